import json
import os
import shlex
import subprocess
import sys

import pytest

from trivet.topology import load_topology
from trivet.topology.machine import Machine
from trivet.topology.template import TEMPLATE

SPLIT = """\
model: {name: org/model, served_names: [tiny, alias], max_length: 512}
kv: {connector: NixlConnector}
flags: [--block-size, "32"]
tiers: {prefill: {env: {A: "x y"}}, decode: }
gateway: {port: 9000, workers: 2, api_keys: [secret]}
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Four cores and vLLM's CPU build, wherever the tests run."""
    here = Machine((0, 1, 2, 3), 0, "0.32.0", "cpu", lambda _: True)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: here))


@pytest.fixture
def topology(tmp_path):
    path = tmp_path / "trivet.yaml"
    path.write_text(SPLIT)
    return path


# init


def test_a_topology_is_written(trivet, tmp_path):
    path = tmp_path / "new.yaml"
    done = trivet("topology", "init", path)
    assert (done.status, done.out, done.err) == (0, f"wrote {path}; serve it with: trivet up {path}\n", "")
    assert path.read_text() == TEMPLATE
    load_topology(path)


def test_it_has_a_name_of_its_own(trivet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trivet("topology", "init").status == 0
    assert (tmp_path / "trivet.yaml").read_text() == TEMPLATE


def test_a_file_that_is_there_stays(trivet, topology):
    done = trivet("topology", "init", topology)
    assert (done.status, done.out) == (2, "")
    assert done.err == f"trivet: {topology} exists -> give another name, or --force\n"
    assert topology.read_text() == SPLIT


def test_a_file_that_is_there_is_overwritten_if_that_is_wanted(trivet, topology):
    assert trivet("topology", "init", topology, "--force").status == 0
    assert topology.read_text() == TEMPLATE


def test_a_place_that_cannot_be_written_is_told(trivet, tmp_path):
    done = trivet("topology", "init", tmp_path, "--force")
    assert (done.status, done.out) == (2, "")
    assert done.err == f"trivet: {tmp_path} cannot be written: Is a directory -> give another path\n"


@pytest.mark.parametrize("folder", ["missing", "missing/more of it", "a file"])
def test_a_folder_that_is_missing_is_told_with_how_to_make_it(trivet, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    done = trivet("topology", "init", f"{folder}/trivet.yaml")
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"trivet: {folder}/trivet.yaml: there is no folder {folder} -> make it first (mkdir -p {shlex.quote(folder)}), "
        "or give another path\n"
    )


def test_a_model_that_is_missing_is_told_with_its_line(trivet, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("tiers: {mixed: }\nmodel:\n  name: ./missing\n")
    done = trivet("topology", "show", path)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"trivet: {path}:3: model.name: there is no folder {tmp_path}/missing -> give a folder or a hub name\n"
    )


# show


def test_a_topology_is_shown_as_json(trivet, topology):
    facts = json.loads(trivet("topology", "show", topology, "--json").out)
    assert (facts["model"], facts["served_names"], facts["connector"]) == (
        "org/model",
        ["tiny", "alias"],
        "NixlConnector",
    )
    assert facts["render_flags"][:4] == ["org/model", "--served-model-name", "tiny", "alias"]
    assert facts["gateway"]["port"] == 9000
    assert [(one["name"], one["tier"], one["started_by"]) for one in facts["engines"]] == [
        ("prefill-0", "prefill", "trivet"),
        ("decode-0", "decode", "trivet"),
    ]
    prefill, decode = facts["engines"]
    assert prefill["env"]["A"] == "x y"
    assert "A" not in decode["env"]
    assert prefill["command"][1:5] == ["-m", "trivet.fleet.vllm", "serve", "org/model"]
    assert prefill["command"][-4:-2] == ["--block-size", "32"]
    assert not set(prefill["cores"]) & set(decode["cores"])


@pytest.fixture
def with_servers(topology):
    servers = 'servers: ["http://127.0.0.1:9001", "http://render:9001"], queue_s: 0.5, api_key: secret'
    topology.write_text(SPLIT.replace("tiers: {", f"tiers: {{render: {{{servers}}}, "))
    return topology


def test_render_servers_are_shown_with_their_limits_and_how_one_is_started(trivet, with_servers):
    lines = trivet("topology", "show", with_servers).out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("render "))
    assert lines[at + 1 : at + 3] == [
        "           token ids of prompts from http://127.0.0.1:9001, http://render:9001",
        "           16 request(s) at once at each, 64 wait for 0.5 s at most, each takes 10 s at most; else rendered "
        "in the workers",
    ]
    started, by_vllm = lines[at + 3].split(", or ")
    assert started == f"           start http://127.0.0.1:9001 with: trivet render {with_servers} --port 9001"
    assert by_vllm.startswith("VLLM_API_KEY=... vllm launch render org/model --served-model-name tiny alias ")
    assert by_vllm.endswith(" --port 9001")
    assert "secret" not in lines[at + 3], "keys are for no terminal"
    facts = json.loads(trivet("topology", "show", with_servers, "--json").out)["render_servers"]
    assert facts["servers"] == ["http://127.0.0.1:9001", "http://render:9001"]
    assert (facts["queue_s"], facts["fallback"]) == (0.5, "local")
    assert facts["command"][:4] == ["vllm", "launch", "render", "org/model"]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost:9001", "--port 9001"),
        ("http://[::1]:9001", "--port 9001"),
        ("http://cpu-1:9001", "--host 0.0.0.0 --port 9001"),
        ("http://cpu-1", "--host 0.0.0.0 --port 80"),
        ("https://cpu-1", "--host 0.0.0.0 --port 443 --ssl-certfile CERTIFICATE --ssl-keyfile KEY"),
    ],
)
def test_a_render_server_is_started_where_it_is_looked_for(trivet, topology, url, address):
    topology.write_text(SPLIT.replace("tiers: {", f'tiers: {{render: {{servers: ["{url}"]}}, '))
    (line,) = (one for one in trivet("topology", "show", topology).out.splitlines() if f"start {url} with" in one)
    started, by_vllm = line.strip().split(", or ")
    assert started == f"start {url} with: trivet render {topology} {address}"
    assert by_vllm.startswith("vllm launch render")
    assert by_vllm.endswith(f" {address}")


def test_without_render_servers_nothing_is_said_of_them(trivet, topology):
    assert "token ids" not in trivet("topology", "show", topology).out
    assert json.loads(trivet("topology", "show", topology, "--json").out)["render_servers"] is None


def test_what_is_refused_is_shown_as_refused(trivet, with_servers):
    with_servers.write_text(with_servers.read_text().replace("queue_s: 0.5", "fallback: refuse"))
    assert (
        "64 wait for 2 s at most, each takes 10 s at most; else refused (503)"
        in trivet("topology", "show", with_servers).out
    )


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_key_of_render_servers_is_not_shown(trivet, with_servers, form):
    done = trivet("topology", "show", with_servers, *form)
    assert (done.status, "secret" in done.out) == (0, False)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_keys_of_clients_are_not_shown(trivet, topology, form):
    done = trivet("topology", "show", topology, *form)
    assert done.status == 0
    assert "secret" not in done.out


def test_a_topology_is_shown_with_the_reason_for_each_flag(trivet, topology):
    done = trivet("topology", "show", topology)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:3] == [
        "model      org/model, served as tiny, alias",
        "gateway    http://127.0.0.1:9000, 2 worker(s)",
        "connector  NixlConnector",
    ]
    assert "  --max-num-seqs 4  # more prompts at once only make each of them later" in lines
    assert "  --block-size 32  # from the topology" in lines
    assert "  A=x y  # the topology says so" in lines


def test_the_line_that_is_shown_is_the_command_that_is_run(trivet, topology):
    lines = trivet("topology", "show", topology).out.splitlines()
    by_hand = [lines[number + 1] for number, line in enumerate(lines) if line == "  by hand:"]
    facts = json.loads(trivet("topology", "show", topology, "--json").out)
    for line, engine in zip(by_hand, facts["engines"], strict=True):
        words = shlex.split(line)
        env = dict(word.split("=", 1) for word in words[: len(engine["env"])])
        assert env == engine["env"]
        assert words[len(env) :] == engine["command"]


def test_engines_of_others_are_shown_as_such(trivet, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(
        "model: {name: org/model}\n"
        "kv: {connector: NixlConnector}\n"
        "tiers:\n"
        "  prefill: {engines: [{url: 'http://10.0.0.7:8000', api_key: hidden}]}\n"
        "  decode: {engines: [{name: far, host: node-2, port: 8100, kv_port: 5600}]}\n"
    )
    done = trivet("topology", "show", path)
    assert done.status == 0
    assert "  started by someone else; Trivet watches it and sends it requests" in done.out.splitlines()
    assert "  runs on node-2; start it there with: trivet engine far FILE" in done.out.splitlines()
    assert "hidden" not in done.out
    engines = {one["name"]: one for one in json.loads(trivet("topology", "show", path, "--json").out)["engines"]}
    assert (engines["prefill-0"]["command"], engines["prefill-0"]["url"]) == (None, "http://10.0.0.7:8000")
    assert engines["far"]["url"] == "http://node-2:8100"


def test_without_a_file_it_is_the_demos(trivet):
    facts = json.loads(trivet("topology", "show", "--json").out)
    assert facts["served_names"] == ["SmolLM2-135M-Instruct"]
    assert facts["model"].startswith(trivet.env["TRIVET_CACHE"])
    assert not (trivet.state.parent / "cache").exists(), "nothing is made to show it"


def test_notes_are_shown(trivet, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("model: {name: org/model}\ntiers: {mixed: {replicas: 5}}\n")
    done = trivet("topology", "show", path)
    assert (
        "note: 5 CPU engines share 4 core(s) (mixed-0 on 0, mixed-1 on 1, mixed-2 on 2, mixed-3 on 3, mixed-4 on 0): "
        "they slow each other, and times mean little" in done.out
    )
    assert json.loads(trivet("topology", "show", path, "--json").out)["notes"]


@pytest.mark.parametrize("model", ["./models/tiny", "models/tiny"])
def test_a_models_folder_is_looked_for_beside_the_file(trivet, tmp_path, model):
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    path = tmp_path / "t.yaml"
    path.write_text(f"model: {{name: {model}}}\ntiers: {{mixed: }}\n")
    assert json.loads(trivet("topology", "show", path, "--json").out)["model"] == str(folder)


def test_a_tokenizers_folder_is_looked_for_beside_the_file(trivet, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    path = tmp_path / "t.yaml"
    path.write_text("model: {name: org/model, tokenizer: ./tokenizer}\ntiers: {mixed: }\n")
    (engine,) = json.loads(trivet("topology", "show", path, "--json").out)["engines"]
    command = engine["command"]
    assert command[command.index("--tokenizer") + 1] == str(tmp_path / "tokenizer")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("model:\n  nmae: x\ntiers: {mixed: }\n", 2, "model.nmae: no such field"),
        ("model: {}\ntiers:\n  prefill:\n", 3, "tiers.prefill: prefill without decode"),
        ("tiers: {mixed: \n", 2, "not valid YAML"),
    ],
)
def test_an_error_in_the_file_is_one_line_that_says_where(trivet, tmp_path, text, line, words):
    path = tmp_path / "t.yaml"
    path.write_text(text)
    done = trivet("topology", "show", path)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"trivet: {path}:{line}: {words}")
    assert done.err.count("\n") == 1


def test_a_person_sees_no_traceback(trivet, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("tiers: {mixed: }\nmodel: 3\n")
    done = trivet.process("topology", "show", path)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"trivet: {path}:2: model: ")
    assert done.err.count("\n") == 1


def test_output_that_nobody_reads_to_its_end_is_no_fault(trivet, topology):
    """``trivet topology show | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "trivet.cli", "topology", "init", str(topology), "--force"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env={**os.environ, **trivet.env}, check=False
    )
    os.close(writer)
    assert done.stderr == ""
