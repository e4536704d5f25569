"""``trivet render``: what it refuses in one line, and a server as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.processes import until
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
    monkeypatch.setattr(command, "_run", lambda flags, listener, tier: calls.append((list(flags), tier)))
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


def get(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_it_renders_until_it_is_told_to_stop(model, tmp_path):
    """The same file of vLLM's answers is behind vLLM's own server: see tests/render/test_quick.py."""
    log = tmp_path / "log"
    arguments = ["render", str(model), "--served-model-name", "m", "--port", "0", "--fast-tokenizer", "off"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trivet.cli", *arguments], stdout=output, stderr=output, env=environment
        )
    try:
        assert until(lambda: "ask it" in log.read_text() or process.poll() is not None, 120)
        assert process.poll() is None, log.read_text()
        url = log.read_text().split("renders on ")[1].split(";")[0]
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        assert get(f"{url}/v1/chat/completions/render", body)["token_ids"]
        told = get(f"{url}/tokenize", {"model": "m", "prompt": "Hi <|im_end|>"})
        assert get(f"{url}/detokenize", {"model": "m", "tokens": told["tokens"]})["prompt"] == "Hi <|im_end|>"
        assert get(f"{url}/trivet/render")["tokenizer"] == "tokenizers"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
