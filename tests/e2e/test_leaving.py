"""Clients that leave, and requests of many choices, on real engines: all KV is free again, and no lease ran out."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import time
import urllib.parse

import pytest

pytestmark = pytest.mark.e2e

SETTLED_S = 10.0
"""Far below the lease (30 s): what is free by then was released, and did not expire."""
CROSSED = {"NixlConnector": 2, "TrivetConnector": 0}
"""Hand-overs of a test that may wait for their lease all the same: where an abort meets the end of its request inside
vLLM, the answer is dropped that says where the KV is. TrivetConnector needs no answer for that."""
LEASE_S = 32.0
EXPIRED = {
    "NixlConnector": "vllm:nixl_num_kv_expired_reqs_total",
    "TrivetConnector": "vllm:trivet_kv_expired_total",
}


def held(deployment) -> dict[str, tuple[float, float, float]]:
    """Requests and KV on the engines of the pair; all zero at rest."""
    loads = {tier: deployment.metrics(tier) for tier in ("prefill", "decode")}
    return {tier: (load.running, load.waiting, load.kv_usage) for tier, load in loads.items()}


def expired(deployment) -> float:
    return deployment.metrics("prefill").values.get(EXPIRED[deployment.plan.connector.name], 0.0)


@pytest.fixture
def settles(deployment, conftest):
    """Behind the test, the engines hold nothing any more, and the gateway counts nothing as under way."""
    before = expired(deployment)
    yield
    nothing = dict.fromkeys(("prefill", "decode"), (0.0, 0.0, 0.0))
    started_s = time.monotonic()
    while (found := held(deployment)) != nothing:
        assert time.monotonic() < started_s + LEASE_S, found
        time.sleep(0.1)
    lost = expired(deployment) - before
    assert lost <= CROSSED[deployment.plan.connector.name]
    assert lost or time.monotonic() < started_s + SETTLED_S
    gauges = [
        line
        for line in conftest.get(f"{deployment.url}/metrics")[1].splitlines()
        if line.startswith(("trivet_generations_running", "trivet_requests_", "trivet_outstanding", "trivet_kv_rel"))
        and not line.startswith(("trivet_requests_total", "trivet_requests_created", "trivet_kv_releases_unconf"))
    ]
    assert len(gauges) > 5
    assert [line for line in gauges if not line.endswith(" 0.0")] == []


def ask_and_leave(url: str, body: dict, after_s: float) -> None:
    """Sends a request and closes the connection after a time."""
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=after_s)
    with contextlib.suppress(TimeoutError, OSError):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
    connection.close()


def body_of(chance: random.Random, **more) -> dict:
    length = chance.choice([5, 33, 300, 900])
    prompt = [chance.randrange(100, 40000) for _ in range(length)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **more}


@pytest.mark.usefixtures("settles")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("at_once", [1, 8])
def test_clients_that_leave_at_random_moments(deployment, stream, at_once):
    chance = random.Random(at_once + stream)
    jobs = [(body_of(chance, stream=stream), chance.random() * 0.6) for _ in range(24)]
    with concurrent.futures.ThreadPoolExecutor(at_once) as clients:
        list(clients.map(lambda job: ask_and_leave(deployment.url, *job), jobs))


@pytest.mark.usefixtures("settles")
@pytest.mark.parametrize("after_s", [0.1, 0.5])
def test_a_client_that_leaves_while_its_prompt_waits_for_prefill(deployment, after_s):
    """Prefill has a queue; the leg at decode, which began beside it, holds nothing and is ended."""
    chance = random.Random(1)
    bodies = [body_of(chance) | {"prompt": [chance.randrange(100, 40000) for _ in range(900)]} for _ in range(24)]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as clients:
        for number, body in enumerate(bodies):
            clients.submit(ask_and_leave, deployment.url, body, 30.0 if number < 16 else after_s)


@pytest.mark.usefixtures("settles")
@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("how", ["n of 4", "4 prompts"])
def test_the_kv_of_every_choice_is_freed(deployment, conftest, how, times):
    chance = random.Random(times)
    for _ in range(times):
        body = body_of(chance) | {"max_tokens": 2}
        body |= (
            {"n": 4, "temperature": 0.7}
            if how == "n of 4"
            else {"prompt": [body["prompt"][: 20 + n] for n in range(4)]}
        )
        status, text = conftest.post(f"{deployment.url}/v1/completions", body)
        assert status == 200, text
        assert [one["index"] for one in json.loads(text)["choices"]] == [0, 1, 2, 3]


@pytest.mark.usefixtures("settles")
def test_what_decode_refuses_is_freed_at_once(deployment, conftest):
    """Rendering validates, so that it hardly ever happens; a bad grammar is seen by engines only."""
    body = {"model": "tiny", "prompt": "x " * 40, "max_tokens": 4, "structured_outputs": {"grammar": "root ::= ((("}}
    status, text = conftest.post(f"{deployment.url}/v1/completions", conftest.salted(body))
    plain = conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    assert (status, json.loads(text)) == (plain[0], json.loads(plain[1]))


@pytest.mark.usefixtures("settles")
def test_idle_connections_are_not_met_while_they_close(deployment, conftest):
    """vLLM closes them after 5 s; a pause of about that is the worst moment."""
    for pause_s in (0.0, 5.0, 3.0):
        time.sleep(pause_s)
        body = {"model": "tiny", "prompt": "one two three", "max_tokens": 2}
        status, text = conftest.post(f"{deployment.url}/v1/completions", body)
        assert status == 200, text
