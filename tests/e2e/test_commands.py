"""`trivet demo` and `trivet up` as a person runs them, with engines of their own."""

import json
import os
import subprocess
import sys

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
    assert done.stderr.splitlines()[-1].startswith("trivet: engine mixed-0 ended with exit status 2 -> its log is ")
    assert "no-such-flag" in done.stderr


def test_the_demo(tmp_path):
    facts_file = tmp_path / "facts.json"
    done = trivet("demo", "--json", str(facts_file), env={**os.environ, "TRIVET_STATE": str(tmp_path / "state")})
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(facts_file.read_text())
    assert facts["equal_to_colocated"] is True
    assert facts["answer"]
    assert facts["answer"].split()[0] in done.stdout
    assert facts["model"] == "SmolLM2-135M-Instruct"
    assert facts["connector"] == "NixlConnector"
    assert facts["prompt_tokens"] > 3 * 128
    assert facts["completion_tokens"] > 0
    blocks = -(-facts["prompt_tokens"] // 128)
    assert facts["kv_bytes_moved"] == blocks * 128 * 30 * 2 * 3 * 64 * 4  # layers, K and V, KV heads, head size, fp32
    assert facts["decode_computed_prompt_tokens"] <= 1
    for name in ("ttft_ms", "render_ms", "prefill_ms", "handover_ms"):
        assert facts[name] > 0
    total = facts["render_ms"] + facts["prefill_ms"] + facts["handover_ms"]
    assert total == pytest.approx(facts["ttft_ms"], abs=5.0)
