"""The demo's questions to a gateway that is a small HTTP server, and what it makes of the answers."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.demo import PREFILLS_TOKEN_FACTS, SPLIT_FACTS, DemoService, at_once
from trivet.demo import run
from trivet.demo.run import DemoResult, run_demo
from trivet.errors import EngineFailedError, TrivetError


@pytest.fixture
def pauses(monkeypatch):
    """Pauses of the demo take no time; how many there were, and what happens in each."""
    told = SimpleNamespace(count=0, during=lambda count: None)

    async def sleep(time_s: float) -> None:
        told.count += 1
        told.during(told.count)
        await at_once(time_s)

    monkeypatch.setattr(run, "asyncio", SimpleNamespace(sleep=sleep))
    return told


@pytest.fixture
async def service(tmp_path, pauses):
    async with DemoService(tmp_path) as service:
        yield service


def nothing(_: str) -> None:
    pass


async def failure(service: DemoService) -> tuple[str, str | None]:
    with pytest.raises(EngineFailedError) as caught:
        await asyncio.wait_for(run_demo(service, "Why?", 8, nothing), 20.0)
    return caught.value.problem, caught.value.detail


# the facts


async def test_the_facts_of_a_demo(service):
    shown = []
    result = await run_demo(service, "Why?", 8, shown.append)
    assert shown == ["The", " [legs]"]
    assert result == DemoResult(
        answer="The [legs]",
        model="tiny",
        connector="NixlConnector",
        prompt_tokens=30,
        completion_tokens=3,
        ttft_ms=25.0,
        render_ms=1.5,
        prefill_ms=20.0,
        handover_ms=3.0,
        decode_ms=8.0,
        colocated_ttft_ms=40.0,
        kv_bytes_moved=4096,
        decode_computed_prompt_tokens=1,
        prefill_engine="prefill-0",
        decode_engine="decode-0",
        first_token_engine="decode-0",
        colocated_engine="mixed-0",
        equal_to_colocated=True,
        answer_colocated="The [legs]",
    )
    assert result.fault() is None
    assert result.facts()["kv_bytes_moved"] == 4096


async def test_a_first_token_that_came_before_the_handover_is_prefills(service):
    service.facts = PREFILLS_TOKEN_FACTS
    result = await run_demo(service, "Why?", 8, nothing)
    assert (result.first_token_engine, result.first_is_prefills) == ("prefill-0", True)
    assert (result.facts()["first_token_engine"], result.ttft_ms) == ("prefill-0", 21.6)


@pytest.mark.parametrize("ttft_ms", [24.48, 24.5, 25.0, 200.0])
async def test_a_first_token_behind_the_handover_is_decodes(service, ttft_ms):
    """Durations are rounded each; a busy gateway adds to all of them."""
    service.facts = SPLIT_FACTS | {"ttft_ms": ttft_ms}
    result = await run_demo(service, "Why?", 8, nothing)
    assert (result.first_token_engine, result.first_is_prefills) == ("decode-0", False)


async def test_the_prompt_is_asked_colocated_and_split_with_a_salt_of_its_own_each(service):
    await run_demo(service, "Why?", 8, nothing)
    _, *chats = service.asked  # the first is for the handshake
    assert [headers.get("X-Trivet-Serve") for _, headers in chats] == ["colocated", "split"]
    (one, other) = (dict(body) for body, _ in chats)
    assert one.pop("cache_salt") != other.pop("cache_salt")
    assert one == other
    assert one == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }


@pytest.mark.parametrize(("keys", "expected"), [(("first", "second"), "Bearer first"), ((), None)])
async def test_the_gateway_is_asked_with_its_key(tmp_path, pauses, keys, expected):
    async with DemoService(tmp_path, api_keys=keys) as service:
        await run_demo(service, "Why?", 8, nothing)
    assert [headers.get("Authorization") for _, headers in service.asked] == [expected] * 3


async def test_a_transfer_that_is_counted_late_is_waited_for(service):
    service.lag = 3
    result = await run_demo(service, "Why?", 8, nothing)
    assert (result.kv_bytes_moved, result.decode_computed_prompt_tokens) == (4096, 1)


# what must not be


async def test_answers_of_other_tokens_are_not_equal_even_if_their_text_is(service):
    service.colocated = [*service.split[:-1], ("", 8)]
    result = await run_demo(service, "Why?", 8, nothing)
    assert result.answer == result.answer_colocated
    assert result.fault() == "the split answer is not the colocated one"


async def test_a_demo_without_a_transfer_has_a_fault(service):
    service.bytes_moved = 0
    assert (await run_demo(service, "Why?", 8, nothing)).fault() == "no KV moved from prefill to decode"


@pytest.mark.parametrize(
    ("computed", "expected"),
    [(0, None), (1, None), (2, "decode computed 2 prompt tokens itself")],
)
async def test_decode_may_compute_one_prompt_token(service, computed, expected):
    service.computed = computed
    assert (await run_demo(service, "Why?", 8, nothing)).fault() == expected


async def test_the_first_of_several_faults_is_told(service):
    result = await run_demo(service, "Why?", 8, nothing)
    bad = replace(result, equal_to_colocated=False, kv_bytes_moved=0, decode_computed_prompt_tokens=9)
    assert bad.fault() == "the split answer is not the colocated one"
    assert replace(bad, equal_to_colocated=True).fault() == "no KV moved from prefill to decode"


async def test_a_request_that_was_not_split_is_an_error_with_its_reason(service):
    service.facts = SPLIT_FACTS | {"split": False, "reason": "the KV transfer failed (decode-0: x)"}
    expected = "the request was not served split: the KV transfer failed (decode-0: x)"
    assert await failure(service) == (expected, "the gateway's words")


async def test_an_answer_that_ends_with_prefills_token_shows_nothing(service):
    service.facts = PREFILLS_TOKEN_FACTS | {"completion_tokens": 1, "handover_ms": None, "decode_ms": 0.0}
    with pytest.raises(TrivetError, match="the answer ended with prefill's token") as caught:
        await run_demo(service, "Why?", 8, nothing)
    assert caught.value.mend == "ask for a longer answer"


# errors

FAULTS = {
    "status": ({"status": 500}, "the gateway answered HTTP 500: the gateway says no"),
    "error event": ({"error": {"message": "it broke", "code": 502}}, "it broke"),
    "cut": ({"cut": True}, "the gateway broke off (ClientPayloadError)"),
    "no token": ({"split": []}, "the answer had no token"),
}


def becomes(service: DemoService, changes: dict) -> None:
    for name, value in changes.items():
        setattr(service, name, value)


@pytest.mark.parametrize(("changes", "problem"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_with_all_engines_ready_comes_with_the_gateways_log(service, pauses, changes, problem):
    becomes(service, changes)
    assert await failure(service) == (problem, "the gateway's words")
    assert pauses.count == 20, "engines had 2 s to be found failed"


@pytest.mark.parametrize(("changes", "problem"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_with_an_engine_that_failed_comes_with_its_log(service, pauses, changes, problem):
    becomes(service, changes)
    service.fails("decode-0", "was ended by signal 9")
    expected = (f"engine decode-0 was ended by signal 9: {problem}", "the words of decode-0")
    assert await failure(service) == expected
    assert pauses.count == 0


async def test_an_engine_that_is_found_failed_a_moment_later_is_the_fault(service, pauses):
    service.status = 500
    pauses.during = lambda count: service.fails("prefill-0", None) if count == 5 else None
    problem, detail = await failure(service)
    assert problem == "engine prefill-0 failed: the gateway answered HTTP 500: the gateway says no"
    assert (detail, pauses.count) == ("the words of prefill-0", 5)
