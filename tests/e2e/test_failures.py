"""Real engines that die: noticed within a second, served around, started again. Run last: others need the engines."""

import json
import os
import signal
import time
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

BODY = {
    "model": "tiny",
    "prompt": list(range(200, 300)),
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def state_of(deployment, conftest, name: str) -> str:
    engines = conftest.get_json(f"{deployment.url}/trivet/status")["engines"]
    return next(one["state"] for one in engines if one["name"] == name)


@pytest.mark.parametrize("tier", ["prefill", "decode"])
def test_a_killed_engine_is_noticed_served_around_and_started_again(deployment, conftest, tier):
    name = f"{tier}-0"
    status = deployment.service.fleet.engines[name]
    family = descendants(status.pid)
    worker = next(pid for pid in family if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    expected = json.loads(conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(BODY))[1])
    killed_s = time.time()
    os.kill(worker, signal.SIGKILL)
    while not any(s == name and state == "failed" and at > killed_s for at, s, state in deployment.events):
        assert time.time() - killed_s < 10, "the death of an engine was not noticed"
        time.sleep(0.02)
    noticed_s = next(at for at, s, state in deployment.events if s == name and state == "failed" and at > killed_s)
    assert noticed_s - killed_s < 1.0

    request_id = uuid.uuid4().hex
    answer = conftest.post(
        f"{deployment.url}/v1/completions", conftest.salted(BODY), headers={"X-Request-Id": request_id}
    )
    assert answer[0] == 200, answer[1]
    assert json.loads(answer[1])["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    (generation,) = deployment.record(request_id)["generations"]
    assert generation["split"] is False
    assert tier in generation["reason"]

    deadline = time.time() + 240
    while state_of(deployment, conftest, name) != "ready":
        assert time.time() < deadline, f"{name} was not started again"
        time.sleep(0.5)
    for pid in family:
        assert not Path(f"/proc/{pid}").exists(), "something of the dead engine is left"
    request_id = uuid.uuid4().hex
    answer = conftest.post(
        f"{deployment.url}/v1/completions", conftest.salted(BODY), headers={"X-Request-Id": request_id}
    )
    assert json.loads(answer[1])["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert deployment.record(request_id)["generations"][0]["split"] is True
