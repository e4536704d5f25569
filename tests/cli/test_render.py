"""``trivet render``: what it refuses in one line, and a server as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from helpers.processes import children_of, lives, until
from helpers.tokenizer import demo_fields
from trivet.cli import app
from trivet.cli import render as command
from trivet.demo.model import write_tokenizer
from trivet.errors import TrivetError
from trivet.topology.machine import Machine
from trivet.topology.model import RenderTier

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "torch_dtype": "float32",
    "vocab_size": 49152,
}


def fault(*arguments: str) -> TrivetError:
    ran = CliRunner().invoke(app, ["render", *arguments])
    assert isinstance(ran.exception, TrivetError), (ran.exception, ran.output)
    return ran.exception


@pytest.fixture
def ran(monkeypatch) -> list[tuple[list[str], RenderTier]]:
    """What would have been served; nothing is."""
    calls: list[tuple[list[str], RenderTier]] = []
    monkeypatch.setattr(command, "_run", lambda asked, listener: calls.append((list(asked.flags), asked.tier)))
    return calls


def test_without_a_model_it_says_how_to_give_one():
    assert "no model is given" in fault().problem
    assert "does not stand first" in fault("--max-model-len", "9", "some/model").problem
    assert "trivet render MODEL" in (fault("--tool-call-parser", "hermes").mend or "")


def test_a_folder_that_is_not_there_is_named(ran):
    assert fault("/no/such/folder", "--port", "0").problem == "there is no folder /no/such/folder"


def test_a_topology_that_is_not_there_is_named(ran):
    assert "no such file" in fault("/no/such.yaml", "--port", "0").problem


def test_a_missing_vllm_is_one_line(monkeypatch):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cls((0,), 0, None, None)))
    assert "vLLM is not installed" in fault("some/model").problem


def test_a_taken_port_is_known_before_anything_is_read(ran):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = fault("some/model", "--port", str(taken.getsockname()[1]))
    assert "cannot listen" in error.problem
    assert "--port" in (error.mend or "")
    assert not ran


def test_vllms_flags_are_passed_on(ran):
    CliRunner().invoke(
        app, ["render", "some/model", "--port", "0", "--tool-call-parser", "hermes", "--max-model-len=9"]
    )
    assert ran[0][0] == ["some/model", "--tool-call-parser", "hermes", "--max-model-len=9"]
    assert ran[0][1] == RenderTier()


def test_a_topology_says_how_its_prompts_are_rendered(ran, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    topology = tmp_path / "trivet.yaml"
    told = {
        "model": {"name": str(tmp_path / "model"), "served_names": ["m"]},
        "tiers": {
            "render": {"flags": {"tool-call-parser": "hermes"}, "cache_mib": 7, "fast_tokenizer": "off"},
            "mixed": {"device": "sim"},
        },
    }
    topology.write_text(json.dumps(told))
    result = CliRunner().invoke(app, ["render", str(topology), "--port", "0", "--cache-mib", "9"])
    assert result.exit_code == 0, (result.exception, result.output)
    flags, tier = ran[0]
    assert flags[0] == str(tmp_path / "model")
    assert flags[flags.index("--served-model-name") :][:2] == ["--served-model-name", "m"]
    assert "hermes" in flags
    assert (tier.cache_mib, tier.fast_tokenizer) == (9, "off")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("render-command") / "model"
    folder.mkdir()
    write_tokenizer(demo_fields(), folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("name", ["B.YAML", "b.Yml", "b.yaml"])
def test_a_topologys_name_may_be_written_in_capitals(ran, name):
    assert "no such file" in fault(f"/no/such/{name}", "--port", "0").problem


def test_a_folder_that_is_none_of_a_model_is_told_what_it_lacks(ran, model, tmp_path):
    error = fault(str(tmp_path), "--port", "0")
    assert error.problem == f"{tmp_path} is no model's folder: it has no config.json"
    (tmp_path / "config.json").write_text("{}")
    assert fault(str(tmp_path), "--port", "0").problem == f"{tmp_path} has no tokenizer.json"
    assert not ran
    for more in (["--tokenizer", str(model)], [f"--tokenizer={model}"], ["--trust-remote-code"]):
        result = CliRunner().invoke(app, ["render", str(tmp_path), "--port", "0", *more])
        assert result.exit_code == 0, (result.exception, result.output)
    assert len(ran) == 3


@pytest.fixture
def guarded(tmp_path, model) -> Path:
    topology = tmp_path / "trivet.yaml"
    told = {
        "model": {"name": str(model)},
        "tiers": {
            "render": {"servers": ["http://127.0.0.1:9000"], "api_key": "of the servers"},
            "mixed": {"device": "sim"},
        },
    }
    topology.write_text(json.dumps(told))
    return topology


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ([], ["of the servers"]),
        (["--api-key", "another"], ["another"]),
        (["--api-key=another"], ["another"]),
        (["--api_key=another"], ["another"]),
    ],
)
def test_a_topologys_servers_are_guarded_by_its_key(ran, guarded, more, keys):
    result = CliRunner().invoke(app, ["render", str(guarded), "--port", "0", *more])
    assert result.exit_code == 0, (result.exception, result.output)
    flags = " ".join(ran[0][0]).replace("=", " ").replace("_", "-").split("--")
    assert [one.removeprefix("api-key ").strip() for one in flags if one.startswith("api-key ")] == keys


@pytest.mark.parametrize(("keys", "env"), [(["secret"], None), (None, "secret"), (None, None)])
def test_the_line_to_try_has_a_place_for_the_key_and_never_the_key(capsys, monkeypatch, keys, env):
    if env is not None:
        monkeypatch.setenv("VLLM_API_KEY", env)
    else:
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
    state = SimpleNamespace(
        trivet_told={},
        args=SimpleNamespace(api_key=keys),
        openai_serving_models=SimpleNamespace(model_name=lambda: "m"),
    )
    command._tell(SimpleNamespace(state=state), "https://127.0.0.1:1")
    said = capsys.readouterr().out
    assert "secret" not in said
    assert ('"Authorization: Bearer $KEY"' in said) == bool(keys or env)
    assert "curl --insecure https" in said


def get(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


class Server:
    """``trivet render`` as a process."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self._log = folder / "log"
        told = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(folder),
            "TMPDIR": str(folder),
            **environment,
        }
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trivet.cli", "render", *arguments, "--port", "0"],
                stdout=output,
                stderr=output,
                env=told,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def says(self, what: str, within_s: float = 300) -> None:
        assert until(lambda: what in self.log or self.process.poll() is not None, within_s), self.log
        assert what in self.log, self.log

    @property
    def url(self) -> str:
        self.says("ask it")
        return self.log.split("renders on ")[1].split(";")[0]


@pytest.fixture
def server(tmp_path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(*arguments: str, **environment: str) -> Server:
        made.append(Server(tmp_path, *arguments, **environment))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


def test_it_renders_until_it_is_told_to_stop(model, server):
    """The same file of vLLM's answers is behind vLLM's own server: see tests/render/test_quick.py."""
    one = server(str(model), "--served-model-name", "m", "--fast-tokenizer", "off", PYTHONUNBUFFERED="1")
    one.says("loading vLLM ...", 20)
    url = one.url
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    assert get(f"{url}/v1/chat/completions/render", body)["token_ids"]
    told = get(f"{url}/tokenize", {"model": "m", "prompt": "Hi <|im_end|>"})
    assert get(f"{url}/detokenize", {"model": "m", "tokens": told["tokens"]})["prompt"] == "Hi <|im_end|>"
    assert get(f"{url}/trivet/render")["tokenizer"] == "tokenizers"
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0, "a supervisor takes anything else for a failure"
    assert "Traceback" not in one.log
    assert "GET /trivet/render" not in one.log, "requests are not logged unless that is asked for"


@pytest.mark.full
def test_ctrl_c_ends_it_as_sigterm_does_and_what_is_asked_for_is_logged(model, server):
    one = server(str(model), "--served-model-name", "m", "--fast-tokenizer", "off", "--uvicorn-log-level", "info")
    get(f"{one.url}/trivet/render")
    one.says("GET /trivet/render", 20)
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(30) == 0
    assert "Traceback" not in one.log


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_what_ends_it_while_tokenizers_are_compared_ends_all_of_it(model, server, tmp_path, number):
    one = server(str(model))
    one.says("comparing fast tokenizers for this model (once, some 10 s) ...")

    def comparing():
        told = ((child, Path(f"/proc/{child}/cmdline").read_bytes()) for child in children_of(one.process.pid))
        return [child for child, command in told if b"trivet.render.compare" in command]

    assert until(comparing)
    children = comparing()
    for child in children:
        os.kill(child, signal.SIGSTOP)  # so that it does not come to its end by itself
    one.process.send_signal(number)
    assert one.process.wait(30) == 128 + number
    assert until(lambda: not any(map(lives, children)))
    assert one.log.splitlines()[-1] == "stopped before it served"
    assert "Traceback" not in one.log
    assert not list(tmp_path.glob("trivet-*"))


def test_ctrl_c_while_vllm_is_loaded_is_one_line(model, server):
    one = server(str(model))
    one.says("loading vLLM ...", 60)
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(30) == 130
    assert one.log.splitlines() == ["loading vLLM ...", "stopped before it served"]
