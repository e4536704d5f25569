"""Engines fail, at each stage and in each way: the answer is the whole one, or an honest error, at once."""

import asyncio
import contextlib
import dataclasses
import json
import time

import aiohttp
import pytest

from helpers.stack import MODEL, QUICK, answer_of, listening, stack, token_request
from trivet.legs.watch import Patience
from trivet.render.contract import ServingError
from trivet.sim import Fault

AT_ONCE_S = 5.0
"""What would have to wait takes its lease, or the length of a whole answer, or for ever."""
TOKENS = 12

BEFORE_A_TOKEN = {
    "500": Fault("status", status=500, uses=None),
    "503": Fault("status", status=503, uses=None),
    "429": Fault("status", status=429, uses=None),
    "502, not JSON": Fault("status", status=502, body="<html>bad gateway</html>", content_type="text/html", uses=None),
    "closed": Fault("disconnect", uses=None),
    "dead": Fault("die", uses=None),
    "not an event": Fault("garbage", garbage="json", uses=None),
    "cut short": Fault("garbage", garbage="truncated", uses=None),
    "failed": Fault("finish", reason="error", uses=None),
    "going down": Fault("finish", reason="abort", uses=None),
    "silent": Fault("hang", uses=None),
}
AFTER_SOME = {
    name: dataclasses.replace(BEFORE_A_TOKEN[name], after_tokens=5)
    for name in ("dead", "not an event", "cut short", "failed", "going down")
} | {"silent": Fault("stall", after_tokens=5, uses=None)}
PATIENCE = Patience(silence_s=0.3)
UNREADABLE = ("dead", "not an event", "cut short")
"""Where prefill's answer is lost, nobody knows which KV it holds: only the lease ends that (an engine that really
died holds nothing)."""
SHORT_LEASE = dataclasses.replace(QUICK, kv_lease_s=0.5)


@pytest.fixture
async def expected():
    async with stack("mixed") as built:
        return await answer_of(built, token_request(TOKENS))


@pytest.mark.parametrize("name", BEFORE_A_TOKEN)
async def test_another_prefill_engine_takes_over(name, expected):
    async with stack("prefill", "prefill", "decode", settings=SHORT_LEASE, patience=PATIENCE) as built:
        built.sim("prefill-0").faults.add(BEFORE_A_TOKEN[name])
        for _ in range(2):  # whichever is chosen first
            started_s = time.monotonic()
            assert await answer_of(built, token_request(TOKENS)) == expected
            assert time.monotonic() - started_s < AT_ONCE_S
            assert built.records[-1].split
            assert built.records[-1].prefill_engine == "prefill-1"
        assert built.sim("decode-0").state().executions == {"decode": 2}
        await built.at_rest()
        assert bool(built.expired()) == (name in UNREADABLE)


@pytest.mark.parametrize("name", BEFORE_A_TOKEN)
async def test_without_another_prefill_engine_decode_serves_it_whole(name, expected):
    async with stack("prefill", "decode", settings=SHORT_LEASE, patience=PATIENCE) as built:
        built.sim("prefill-0").faults.add(BEFORE_A_TOKEN[name])
        assert await answer_of(built, token_request(TOKENS)) == expected
        assert not built.records[-1].split
        assert "prefill-0" in built.records[-1].reason
        await built.at_rest()


@pytest.mark.parametrize("name", BEFORE_A_TOKEN)
async def test_another_decode_engine_takes_over(name, expected):
    async with stack("prefill", "decode", "decode", "mixed", patience=PATIENCE) as built:
        built.sim("decode-0").faults.add(dataclasses.replace(BEFORE_A_TOKEN[name], leg="decode"))
        for _ in range(2):
            assert await answer_of(built, token_request(TOKENS)) == expected
        assert built.records[-1].error is None
        await built.at_rest()
        assert built.expired() == 0


@pytest.mark.parametrize("name", ["503", "429", "refused"])
async def test_what_was_prefilled_is_not_prefilled_again_when_decode_does_not_begin(name, expected):
    async with stack("prefill", "decode", "decode") as built:
        fault = Fault("refuse", for_s=5) if name == "refused" else BEFORE_A_TOKEN[name]
        built.sim("decode-0").faults.add(fault)
        for _ in range(2):
            assert await answer_of(built, token_request(TOKENS)) == expected
            assert built.records[-1].split
        assert built.sim("prefill-0").state().executions == {"prefill": 2}
        assert built.sim("decode-1").state().executions == {"decode": 2}
        await built.at_rest()
        assert built.expired() == 0


@pytest.mark.parametrize("name", AFTER_SOME)
@pytest.mark.parametrize("rest", [("decode",), ("mixed",), ("decode", "mixed")], ids=" and ".join)
async def test_an_answer_that_broke_off_is_continued(name, rest, expected):
    async with stack("prefill", "decode", *rest, patience=PATIENCE) as built:
        built.sim("decode-0").faults.add(AFTER_SOME[name])
        for _ in range(2):
            assert await answer_of(built, token_request(TOKENS)) == expected
        struck = [one for one in built.records if one.resumes]
        assert struck
        for record in struck:
            assert (record.completion_tokens, record.finish_reason, record.error) == (TOKENS, "length", None)
        await built.at_rest()
        assert built.expired() == 0


async def test_a_continued_answer_has_its_log_probabilities_and_cached_tokens_once():
    async with stack("prefill", "decode", "decode") as built:

        async def chunks():
            request = token_request(TOKENS, sampling={"logprobs": 2}, prompt_logprobs=1)
            return [chunk async for chunk in built.legs.run(request)]

        def facts(found):
            positions = [one for chunk in found for one in chunk.logprobs or ()]
            prompts = [chunk.prompt_logprobs for chunk in found if chunk.prompt_logprobs is not None]
            return positions, prompts, len([one for one in found if one.cached_tokens is not None])

        whole = facts(await chunks())
        assert (len(whole[0]), len(whole[1]), whole[2]) == (TOKENS, 1, 1)
        for sim in built.sims[1:]:
            sim.faults.add(Fault("die", after_tokens=5, uses=None))
        built.sims[2].faults.clear()
        for _ in range(2):
            assert facts(await chunks()) == whole
        assert any(one.resumes for one in built.records)
        await built.at_rest()


async def test_a_lost_connection_is_no_lost_engine(expected):
    """With one pair and nothing else, the same engine continues its answer."""
    async with stack("prefill", "decode") as built:
        built.sim("decode-0").faults.add(Fault("die", after_tokens=5))
        assert await answer_of(built, token_request(TOKENS)) == expected
        assert built.records[-1].resumes == 1
        await built.at_rest()


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"frequency_penalty": 0.5}, "penalty"),
        ({"presence_penalty": 0.5}, "penalty"),
        ({"structured_outputs": {"regex": "a"}}, "grammar"),
        ({"seed": 3, "temperature": 0.7}, "seed"),
        ({"bad_words": ["x"]}, "bad words"),
        ({"extra_args": {"x": 1}}, "logits processor"),
    ],
)
async def test_what_cannot_be_continued_ends_with_an_error_that_says_why(sampling, told):
    async with stack("prefill", "decode", "decode") as built:
        for sim in built.sims[1:]:
            sim.faults.add(Fault("die", after_tokens=5, uses=None))
        with pytest.raises(ServingError, match=f"broke off: decode-.*{told}") as caught:
            await answer_of(built, token_request(TOKENS, sampling=sampling))
        assert caught.value.status == 502
        await built.at_rest()


async def test_what_cannot_be_continued_is_begun_anew_if_its_client_has_seen_nothing(expected):
    async with stack("prefill", "decode", "decode") as built:
        for sim in built.sims[1:]:
            sim.faults.add(Fault("die", after_tokens=5))
        request = token_request(TOKENS, sampling={"frequency_penalty": 0.5}, whole=True)
        assert len(await answer_of(built, request)) == TOKENS
        assert built.records[-1].attempts > 1
        assert built.records[-1].resumes == 0
        await built.at_rest()


async def test_a_killed_engine_is_continued_on_the_one_that_is_left(expected):
    async with stack("prefill", "decode", "decode", settings=dataclasses.replace(QUICK, step_ms=20)) as built:
        found = []
        async for chunk in built.legs.run(token_request(TOKENS)):
            found += chunk.token_ids
            if len(found) == 4:
                built.sim(built.records[-1].decode_engine if built.records else "decode-0").exit()
                built.refresh()
        assert found == expected
        await built.at_rest()


async def test_a_request_under_which_two_engines_end_is_not_given_a_third():
    async with stack("prefill", "decode", "decode", "decode") as built:
        for sim in built.sims[1:]:
            sim.faults.add(Fault("exit", after_tokens=3))

        async def fleet():
            while True:
                await asyncio.sleep(0.1)
                built.refresh()

        watching = asyncio.create_task(fleet())
        with pytest.raises(ServingError) as caught:
            await answer_of(built, token_request(TOKENS))
        watching.cancel()
        assert caught.value.status == 503
        assert sum(sim.is_up for sim in built.sims) == 2
        await built.at_rest()


@pytest.mark.parametrize("name", sorted(set(BEFORE_A_TOKEN) - {"silent"}))
async def test_when_nothing_is_left_the_client_is_told_at_once(name):
    async with stack("prefill", "decode", settings=SHORT_LEASE) as built:
        for sim in built.sims:
            sim.faults.add(BEFORE_A_TOKEN[name])
        async with listening(built.gateway()) as url, aiohttp.ClientSession() as session:
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": 4}
            for stream in (False, True):
                started_s = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body | {"stream": stream}) as reply:
                    told = json.loads(await reply.text())["error"]
                    assert time.monotonic() - started_s < AT_ONCE_S
                    assert reply.status >= 429
                    assert reply.status == told["code"]
                    assert told["message"]
                    assert ("Retry-After" in reply.headers) == (reply.status in (429, 503))
                    if name.isdigit():
                        assert reply.status == int(name)
        await built.at_rest()


@pytest.mark.parametrize("name", sorted(set(AFTER_SOME) - {"silent"}))
async def test_a_text_stream_that_broke_off_ends_with_an_error_object(name):
    async with stack("prefill", "decode") as built:
        built.sim("decode-0").faults.add(AFTER_SOME[name])
        async with listening(built.gateway()) as url, aiohttp.ClientSession() as session:
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": TOKENS, "stream": True}
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200
                events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["message"]
        assert not any('"finish_reason":"' in event for event in events)
        await built.at_rest()


@pytest.mark.parametrize("name", sorted(set(AFTER_SOME) - {"silent"}))
async def test_a_text_answer_that_is_not_streamed_is_begun_anew(name):
    async with stack("prefill", "decode", "mixed") as built:
        built.sim("decode-0").faults.add(AFTER_SOME[name])
        async with listening(built.gateway()) as url, aiohttp.ClientSession() as session:
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": TOKENS, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200
        assert answer["usage"]["completion_tokens"] == TOKENS
        await built.at_rest()


@pytest.mark.parametrize("plane", ["tokens", "text"])
async def test_a_deadline_ends_a_request_wherever_it_is(plane):
    slow = dataclasses.replace(QUICK, step_ms=100)
    async with stack("prefill", "decode", settings=slow) as built, listening(built.gateway()) as url:
        started_s = time.monotonic()
        async with aiohttp.ClientSession(headers={"X-Trivet-Deadline-S": "0.4"}) as session:
            body = {"model": MODEL, "prompt": "one two three", "max_tokens": 200, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body | {"stream": plane == "tokens"}) as reply:
                text = await reply.text()
        assert time.monotonic() - started_s < 0.4 + AT_ONCE_S
        assert "deadline" in text
        assert reply.status == (200 if plane == "tokens" else 504)
        await built.at_rest()


async def test_a_conversation_with_pauses_meets_no_connection_that_is_just_closing():
    """vLLM closes an idle connection after 5 s; here after each answer, which is the worst moment."""
    async with stack("prefill", "decode") as built:
        for sim in built.sims:
            sim.faults.add(Fault("close_idle", uses=None))
        for _ in range(200):
            assert len(await answer_of(built, token_request(2))) == 2
        assert all(one.error is None for one in built.records)
        await built.at_rest()
        assert built.expired() == 0


async def test_a_fault_of_one_request_is_nobody_elses():
    async with stack("prefill", "decode", "decode") as built:
        built.sim("decode-0").faults.add(Fault("die", after_tokens=3, nth=4, uses=1))
        answers = await asyncio.gather(*(answer_of(built, token_request(TOKENS, start=400 + n)) for n in range(24)))
        assert all(len(answer) == TOKENS for answer in answers)
        assert sum(one.attempts > 1 for one in built.records) == 1
        with contextlib.suppress(ServingError):
            await built.at_rest()
