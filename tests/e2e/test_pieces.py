"""What TrivetConnector alone does: prefill's token first, KV in pieces that are checked, nothing kept for nobody."""

import concurrent.futures
import json
import random
import time
import urllib.request
import uuid

import pytest

pytestmark = pytest.mark.e2e

SLOW_MS = 300
"""KV of 900 tokens takes 1.4 s while the spoiled connector is slow, of which prefill's computing hides some."""


@pytest.fixture(autouse=True)
def _with_this_connector(conftest):
    if conftest.CONNECTOR != "TrivetConnector":
        pytest.skip("of TrivetConnector")


def body_of(length: int, **more) -> dict:
    chance = random.Random(length)
    prompt = [chance.randrange(100, 40000) for _ in range(length)]
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def tokens_of(answer: tuple[int, str]) -> list[int]:
    status, text = answer
    assert status == 200, text
    return json.loads(text)["choices"][0]["token_ids"]


def streamed(url: str, body: dict, request_id: str) -> list[tuple[float, int]]:
    """When each token came, and which it is."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": request_id},
    )
    tokens = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += [(time.monotonic(), token) for token in choice["token_ids"] or ()]
    return tokens


def failures(deployment) -> float:
    return deployment.metrics("decode").values.get("vllm:trivet_kv_failures_total", 0)


def recomputed(deployment) -> float:
    return deployment.metrics("decode").values.get("vllm:trivet_kv_recomputed_tokens_total", 0)


def test_the_first_token_is_prefills_and_does_not_wait_for_kv(deployment, conftest):
    body, request_id = conftest.salted(body_of(900)), uuid.uuid4().hex
    with deployment.spoiling("slow"):
        tokens = streamed(deployment.url, body, request_id)
    assert [token for _, token in tokens] == tokens_of(
        conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    )
    (generation,) = deployment.record(request_id)["generations"]
    assert generation["split"] is True
    assert generation["cached_tokens"] == 0
    assert generation["handover_ms"] > SLOW_MS
    assert generation["ttft_ms"] == pytest.approx(generation["render_ms"] + generation["prefill_ms"], abs=SLOW_MS / 2)
    assert tokens[1][0] - tokens[0][0] > SLOW_MS / 2e3


@pytest.mark.parametrize(
    "more",
    [{"presence_penalty": 0.5}, {"structured_outputs": {"regex": "[0-9]{12}"}}],
    ids=["a penalty", "a grammar"],
)
def test_decode_makes_the_first_token_where_the_answer_shapes_itself(deployment, conftest, more):
    body, request_id = conftest.salted(body_of(900, **more)), uuid.uuid4().hex
    with deployment.spoiling("slow"):
        tokens = streamed(deployment.url, body, request_id)
    assert [token for _, token in tokens] == tokens_of(
        conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    )
    (generation,) = deployment.record(request_id)["generations"]
    assert generation["split"] is True
    assert generation["handover_ms"] > SLOW_MS
    whole_ms = generation["render_ms"] + generation["prefill_ms"] + generation["handover_ms"]
    assert generation["ttft_ms"] == pytest.approx(whole_ms, abs=SLOW_MS / 2)


@pytest.mark.parametrize("length", [3, 33, 257, 900])
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 0.5}], ids=["first token by prefill", "by decode"])
def test_a_piece_that_changed_on_its_way_is_found_and_the_prompt_computed_anew(deployment, conftest, length, more):
    body, request_id = conftest.salted(body_of(length, **more)), uuid.uuid4().hex
    before = failures(deployment), recomputed(deployment), deployment.metrics("decode").prompt_tokens["local_compute"]
    with deployment.spoiling("corrupt"):
        answer = conftest.post(f"{deployment.url}/v1/completions", body, headers={"X-Request-Id": request_id})
    expected = conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    assert tokens_of(answer) == tokens_of(expected)
    assert json.loads(answer[1])["usage"] == json.loads(expected[1])["usage"]
    (generation,) = deployment.record(request_id)["generations"]
    assert (generation["attempts"], generation["error"]) == (1, None)
    assert failures(deployment) == before[0] + 1
    assert recomputed(deployment) == before[1] + length
    assert deployment.metrics("decode").prompt_tokens["local_compute"] - before[2] >= length


def test_changed_pieces_among_many_at_once(deployment, conftest):
    bodies = [body_of(length) for length in (40, 64, 129, 255, 300, 513, 700, 990)]
    url, before = f"{deployment.url}/v1/completions", failures(deployment)
    with deployment.spoiling("corrupt"), concurrent.futures.ThreadPoolExecutor(len(bodies)) as clients:
        answers = list(clients.map(lambda body: conftest.post(url, conftest.salted(body)), bodies))
    for answer, body in zip(answers, bodies, strict=True):
        assert tokens_of(answer) == tokens_of(
            conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
        )
    assert failures(deployment) == before + len(bodies)


def test_kv_that_does_not_fit_into_the_staging_waits(deployment, conftest):
    """Pieces of many prompts while decode reads slowly: nothing is lost, and nobody waits for ever.

    On a machine that is busy with other things prefill can be as slow as that for once, so it has several tries.
    """
    bodies = [body_of(length) for length in range(610, 1000, 50)]
    url = f"{deployment.url}/v1/completions"
    waits = "vllm:trivet_kv_staging_waits_total"
    before = deployment.metrics("prefill").values.get(waits, 0), failures(deployment)
    expected = [tokens_of(conftest.post(f"{deployment.plain_url}/v1/completions", body)) for body in bodies]
    for _ in range(4):
        with deployment.spoiling("slow"), concurrent.futures.ThreadPoolExecutor(len(bodies)) as clients:
            answers = list(clients.map(lambda body: conftest.post(url, conftest.salted(body)), bodies))
        assert [tokens_of(answer) for answer in answers] == expected
        # an engine tells with a step's output what its connector has counted, also behind its last step
        assert conftest.post(url, conftest.salted(body_of(40)))[0] == 200
        if deployment.metrics("prefill").values[waits] > before[0]:
            break
    else:
        pytest.fail("no KV has waited for room in the staging")
    assert failures(deployment) == before[1]
