"""`trivet demo` and `trivet up` as a person runs them, with engines of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def trivet(*arguments: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trivet.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **more)


def test_an_engine_that_cannot_start_is_told_with_its_log(tiny_model, tmp_path):
    topology = tmp_path / "t.yaml"
    topology.write_text(
        f"model: {{name: {tiny_model}, max_length: 512}}\n"
        "tiers:\n  mixed:\n    flags: {no-such-flag: 1}\ngateway: {port: 0}\n"
    )
    done = trivet("up", str(topology), env={**os.environ, "TRIVET_STATE": str(tmp_path / "state")})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr.splitlines()[-1]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("trivet: engine mixed-0 ended with exit status 2: ")
    assert "no-such-flag" in last.partition(" -> its log is ")[0]


def test_the_demo(tmp_path):
    facts_file = tmp_path / "facts.json"
    done = trivet("demo", "--json", str(facts_file), env={**os.environ, "TRIVET_STATE": str(tmp_path / "state")})
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(facts_file.read_text())
    assert facts["equal_to_colocated"] is True
    assert facts["answer"]
    assert facts["answer"].split()[0] in done.stdout
    assert facts["model"] == "SmolLM2-135M-Instruct"
    assert facts["connector"] == "TrivetConnector"
    assert facts["prompt_tokens"] > 3 * 128
    assert facts["completion_tokens"] > 0
    blocks = -(-facts["prompt_tokens"] // 128)
    assert facts["kv_bytes_moved"] == blocks * 128 * 30 * 2 * 3 * 64 * 4  # layers, K and V, KV heads, head size, fp32
    assert facts["decode_computed_prompt_tokens"] <= 1
    for name in ("ttft_ms", "render_ms", "prefill_ms", "handover_ms"):
        assert facts[name] > 0
    # prefill's token is the first, and the client has it before KV is handed over
    assert facts["render_ms"] + facts["prefill_ms"] == pytest.approx(facts["ttft_ms"], abs=5.0)


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children] + [far for child in children for far in descendants(int(child))]


def assert_split_equals_colocated(url: str, conftest) -> None:
    chance = random.Random(1)
    body = {
        "model": "tiny",
        "prompt": [chance.randrange(100, 40000) for _ in range(300)],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answers = []
    for served in ("split", "colocated"):
        headers = {"Authorization": "Bearer a-key", "X-Trivet-Serve": served, "X-Request-Id": f"of-{served}"}
        status, text = conftest.post(f"{url}/v1/completions", conftest.salted(body), headers=headers)
        assert status == 200, text
        answers.append(json.loads(text)["choices"][0])
        record = urllib.request.Request(f"{url}/trivet/requests/of-{served}", headers=headers)
        with urllib.request.urlopen(record, timeout=30) as answer:
            (generation,) = json.load(answer)["generations"]
        assert generation["split"] is (served == "split"), generation
    assert answers[0] == answers[1]
    assert len(answers[0]["token_ids"]) == 16


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_up_serves_what_it_prints_and_nothing_outlives_it(tiny_model, tmp_path, conftest, number):
    """With NixlConnector, as the engines of most other tests have TrivetConnector."""
    topology = tmp_path / "t.yaml"
    topology.write_text(
        f"model: {{name: {tiny_model}, served_names: [tiny], max_length: 512}}\n"
        "kv: {connector: NixlConnector}\ntiers: {prefill: , decode: }\n"
        "gateway: {port: 0, api_keys: [a-key], drain_s: 2}\n"
    )
    env = {**os.environ, "TRIVET_STATE": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "trivet.cli", "up", str(topology)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as trivet_up:
        line = next(line for line in trivet_up.stdout if line.startswith("curl "))
        family = descendants(trivet_up.pid)
        try:
            assert len(family) >= 7  # two guards, two servers with engine core and worker each, a gateway worker
            asked = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
            assert asked.stdout.rstrip().endswith("data: [DONE]"), asked.stdout + asked.stderr
            assert_split_equals_colocated(line.split()[2].removesuffix("/v1/chat/completions"), conftest)
            shown = trivet("status", "--json", "--api-key", "a-key", env=env)
            assert [one["state"] for one in json.loads(shown.stdout)["engines"]] == ["ready", "ready"]
        finally:
            trivet_up.send_signal(number)
        status = trivet_up.wait(timeout=60)
    assert status == (-9 if number is signal.SIGKILL else 0)
    deadline = time.monotonic() + 20
    while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} outlived Trivet"
        time.sleep(0.1)
