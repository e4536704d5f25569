"""Generations whose legs start together (TrivetConnector), on engines that are real HTTP servers."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from aiohttp import web

from helpers.engines import (
    AT_ONCE_S,
    DONE,
    WAIT_S,
    Call,
    FakeEngine,
    Reply,
    chunk,
    cutting,
    hanging,
    json_answer,
    nobody_listens,
    raw_answer,
    refusing,
    speaking,
    streaming,
    tokens_of,
    usage,
)
from helpers.processes import holds
from helpers.service import Service, cancelled, dead, decode, mixed, owned_by, prefill, serving
from trivet.connectors import TrivetConnector
from trivet.journal import RequestRecord, now_s
from trivet.legs import life
from trivet.legs.life import Legs
from trivet.legs.text import TextAsk
from trivet.legs.text_bodies import CHAT
from trivet.legs.watch import Patience
from trivet.render.contract import ServingError, TokenChunk, TokenLogprobs, TokenRequest

GREEDY = {"temperature": 0.0, "max_tokens": 3, "detokenize": False}
SEEDED = {"temperature": 0.7, "seed": 7, "max_tokens": 2}
"""A request whose first token is decode's."""


def met(
    token: int = 7,
    *,
    after: asyncio.Event | None = None,
    problem: str | None = None,
    said: object = ...,
    finish: str = "length",
    cached: int | None = None,
    **more: object,
) -> Reply:
    """A prefill leg's answer, as soon as ``after`` is set; ``said`` in place of what it says of the transfer."""

    async def reply(request: web.Request) -> web.StreamResponse:
        params = (await request.json()).get("kv_transfer_params") or {}
        if after is not None:
            await after.wait()
        told: object = {"transfer_id": params.get("transfer_id"), "handed_over": problem is None}
        if problem is not None:
            told |= {"problem": problem}
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        choice = {"index": 0, "token_ids": [token], "finish_reason": finish, **more}
        answer = {"choices": [choice], "usage": usage, "kv_transfer_params": told if said is ... else said}
        return await json_answer(answer)(request)

    return reply


def together(*engines, **more):
    return serving(*engines, connector=TrivetConnector(), **more)


def of_prefill(*replies: Reply, name: str = "prefill-0") -> FakeEngine:
    return prefill(*(replies or [met()]), name=name)


def params_of(call: Call) -> dict:
    return call.body["kv_transfer_params"]


def released(engine: FakeEngine) -> list[dict]:
    return [params_of(call) for call in engine.calls if call.leg == "release"]


# the way of a request


async def test_decode_is_asked_while_prefill_computes():
    go = asyncio.Event()
    p, d = of_prefill(met(7, after=go)), decode(speaking(8, 9))
    async with together(p, d) as service:
        task = asyncio.create_task(service.ask(sampling=GREEDY))
        await p.call()
        await d.call()
        assert service.outstanding() == {"prefill-0": 3, "decode-0": 6}
        go.set()
        chunks = await task
    assert tokens_of(chunks) == [7, 8, 9]
    assert [one.finish_reason for one in chunks] == [None, None, "length"]
    transfer_id = params_of(p.calls[0])["transfer_id"]
    assert p.calls[0].body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {**GREEDY, "max_tokens": 1},
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "transfer_id": transfer_id, "first_token": True},
    }
    assert d.calls[0].body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": GREEDY,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "prefill_address": "unix:/run/prefill-0.sock",
            "first_token": True,
        },
    }
    record = service.record
    assert (record.split, record.completion_tokens, record.finish_reason) == (True, 3, "length")
    assert (p.legs(), d.legs()) == (["prefill"], ["decode"])


async def test_each_generation_has_a_transfer_of_its_own():
    p, d = of_prefill(), decode(speaking(8))
    async with together(p, d) as service:
        await service.ask()
        await service.ask()
    ids = [params_of(call)["transfer_id"] for call in p.calls]
    assert ids == [params_of(call)["transfer_id"] for call in d.calls]
    assert len(set(ids)) == 2


async def test_the_first_token_is_given_out_while_decode_says_nothing():
    hold = asyncio.Event()
    p, d = of_prefill(met(7, cached=2)), decode(streaming(hold, chunk(8, finish_reason="length"), usage(3), DONE))
    async with together(p, d) as service:
        chunks = service.legs.run(request(max_tokens=2))
        assert await asyncio.wait_for(anext(chunks), WAIT_S) == TokenChunk([7], cached_tokens=2)
        hold.set()
        rest = [one async for one in chunks]
    assert [(list(one.token_ids), one.finish_reason, one.cached_tokens) for one in rest] == [([8], "length", None)]
    assert service.record.cached_tokens == 2


async def test_what_decode_says_before_prefill_has_answered_waits_for_it():
    go = asyncio.Event()
    p, d = of_prefill(met(7, after=go)), decode(speaking(8))
    async with together(p, d) as service:
        task = asyncio.create_task(service.ask())
        await (await d.call()).end()
        await asyncio.sleep(0.05)
        assert service.chunks == []
        go.set()
        assert tokens_of(await task) == [7, 8]


async def test_without_the_first_token_decode_makes_it_and_prefill_tells_what_was_cached():
    go = asyncio.Event()
    p, d = of_prefill(met(7, after=go, cached=2)), decode(speaking(5, 6, cached=3))
    async with together(p, d) as service:
        task = asyncio.create_task(service.ask(sampling=SEEDED))
        await (await d.call()).end()
        assert service.chunks == []  # who computed the prompt is not known yet
        go.set()
        chunks = await task
    assert [(list(one.token_ids), one.cached_tokens) for one in chunks] == [([5], 2), ([6], None)]
    assert (params_of(p.calls[0])["first_token"], params_of(d.calls[0])["first_token"]) == (False, False)
    assert p.calls[0].body["sampling_params"]["temperature"] == 0.0
    assert d.calls[0].body["sampling_params"] == SEEDED


async def test_log_probabilities_of_the_first_token_are_prefills():
    told = {"content": [{"token": "token_id:7", "token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": []}]}
    p = of_prefill(met(7, logprobs=told))
    async with together(p, decode(speaking(8))) as service:
        first, *_ = await service.ask(sampling=GREEDY | {"logprobs": 0})
    assert first == TokenChunk([7], logprobs=[TokenLogprobs([7], [-0.5], 1)])
    assert p.calls[0].body["sampling_params"]["logprobs"] == 0


async def test_prefill_draws_its_one_token_under_the_clients_minimum():
    p, d = of_prefill(), decode(speaking(8, 9))
    async with together(p, d) as service:
        await service.ask(sampling=GREEDY | {"min_tokens": 3})
    assert p.calls[0].body["sampling_params"] == GREEDY | {"max_tokens": 1, "min_tokens": 1}
    assert d.calls[0].body["sampling_params"] == GREEDY | {"min_tokens": 3}


async def test_an_end_that_an_old_vllm_leaves_unsaid_counts_prefills_token():
    p, d = of_prefill(), decode(streaming(chunk(8), chunk(9), usage(), DONE))
    async with together(p, d) as service:
        chunks = await service.ask(sampling=GREEDY)
    assert (tokens_of(chunks), chunks[-1].finish_reason) == ([7, 8, 9], "length")


async def test_the_handover_is_from_prefills_token_to_decodes():
    hold = asyncio.Event()
    p, d = of_prefill(), decode(streaming(hold, chunk(8, finish_reason="length"), usage(), DONE))
    async with together(p, d) as service:
        chunks = service.legs.run(request(max_tokens=2))
        await anext(chunks)
        await asyncio.sleep(0.05)
        hold.set()
        assert [one async for one in chunks]
    record = service.record
    stamps = [record.prefill_start_s, record.prefill_end_s, record.first_token_s, record.decode_first_s, record.end_s]
    assert stamps == sorted(stamps)
    assert record.facts(0.0)["handover_ms"] >= 50
    assert record.decode_first_s - record.first_token_s >= 0.05


# answers that end with the first token


async def test_an_answer_of_one_token_is_prefills_alone():
    p, d = of_prefill(met(7, said=None)), decode()
    async with together(p, d) as service:
        (only,) = await service.ask(sampling=GREEDY | {"max_tokens": 1})
    assert (only.token_ids, only.finish_reason) == ([7], "length")
    assert "kv_transfer_params" not in p.calls[0].body
    assert (p.legs(), d.calls) == (["prefill"], [])
    record = service.record
    assert (record.split, record.prefill_engine, record.decode_engine) == (False, "prefill-0", None)
    assert (record.reason, record.finish_reason) == ("one token, which prefill makes", "length")


async def test_prefill_that_fails_at_an_answer_of_one_token_is_replaced():
    p, q, d = of_prefill(refusing(500)), of_prefill(name="prefill-1"), decode()
    async with together(p, q, d) as service:
        assert tokens_of(await service.ask(sampling=GREEDY | {"max_tokens": 1})) == [7]
    assert service.record.attempts == 2


async def test_an_answer_of_one_token_that_decode_must_make_is_split():
    p, d = of_prefill(), decode(speaking(5))
    async with together(p, d) as service:
        assert tokens_of(await service.ask(sampling=SEEDED | {"max_tokens": 1})) == [5]
    assert (p.legs(), d.legs()) == (["prefill"], ["decode"])


@pytest.mark.parametrize("stop_reason", [None, 7])
async def test_an_answer_that_ends_with_prefills_token_ends_decode(stop_reason):
    sampling = GREEDY | ({"stop_token_ids": [7]} if stop_reason else {})
    p, d = of_prefill(met(7, finish="stop")), decode(streaming(b": parked\n\n", asyncio.Event()))
    async with together(p, d, aborts=True) as service:
        (only,) = await service.ask(sampling=sampling)
        await (await d.call()).end()
        await d.abort()
    assert (only.token_ids, only.finish_reason, only.stop_reason) == ([7], "stop", stop_reason)
    assert d.calls[0].cancelled
    assert service.record.finish_reason == "stop"


@pytest.mark.parametrize("parked", [hanging(), streaming(b": parked\n\n", asyncio.Event())])
async def test_it_releases_the_kv_that_decode_will_not_take(parked):
    p, d = of_prefill(met(7, finish="stop")), decode(parked)
    async with together(p, d) as service:
        assert tokens_of(await service.ask(sampling=GREEDY)) == [7]
        await service.legs.close()
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]


# nothing was handed over


async def test_a_problem_between_two_engines_is_recorded_and_said_once(caplog):
    p, d = of_prefill(met(7, problem="dtype differs\nmore")), decode(speaking(5, 6, cached=3))
    async with together(p, d) as service:
        chunks = await service.ask(sampling=SEEDED)
        await service.ask(sampling=SEEDED)
    assert (tokens_of(chunks), chunks[-1].cached_tokens) == ([5, 6], 3)  # decode's own: it computed the prompt
    record = service.record
    assert (record.split, record.transfer_problem, record.attempts) == (False, "dtype differs", 1)
    assert record.reason == "prefill-0 handed nothing over: dtype differs"
    assert record.facts(0.0)["transfer_problem"] == "dtype differs"
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == ["prefill-0 handed nothing over to decode-0: dtype differs"]
    assert released(p) == []


async def test_with_prefills_token_it_is_given_out_all_the_same():
    p, d = of_prefill(met(7, problem="no mover", cached=2)), decode(speaking(8, cached=3))
    async with together(p, d) as service:
        chunks = await service.ask()
    assert [(list(one.token_ids), one.cached_tokens) for one in chunks] == [([7], 2), ([8], None)]


async def test_decode_that_does_not_get_the_token_either_is_continued_behind_it():
    p = of_prefill(met(7, problem="no mover"), met(1))
    go = asyncio.Event()
    d, e = decode(streaming(go, chunk(finish_reason="error"), DONE)), decode(speaking(8), name="decode-1")
    async with together(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: tokens_of(service.chunks) == [7])
        go.set()
        assert tokens_of(await task) == [7, 8]
    assert e.calls[0].body["token_ids"] == [11, 12, 13, 7]
    assert params_of(e.calls[0])["first_token"] is False
    assert (service.record.resumes, service.record.error) == (1, None)


@pytest.mark.parametrize("said", [None, {}, {"transfer_id": "t"}, {"handed_over": "yes"}])
async def test_prefill_that_does_not_speak_of_the_transfer_is_passed_over(said):
    """Decode would wait for it for ever: an engine that was started with another connector."""
    p, q = of_prefill(met(7, said=said)), of_prefill(name="prefill-1")
    d = decode(streaming(b": parked\n\n", asyncio.Event()), speaking(8))
    async with together(p, q, d) as service:
        assert tokens_of(await service.ask()) == [7, 8]
    assert d.calls[0].cancelled
    assert service.record.prefill_engine == "prefill-1"


async def test_prefill_whose_address_is_not_known_is_passed_over():
    p, d, m = of_prefill(), decode(), mixed()
    async with together(p, d, m) as service:
        views = service.engines.all()
        service.engines.update(replace(one, kv_address=None) for one in views)
        assert tokens_of(await service.ask()) == [8, 9]
    assert (p.calls, d.calls) == ([], [])


# prefill fails


@pytest.mark.parametrize("reply", [refusing(500), refusing(503), cutting()], ids=["500", "503", "cut"])
async def test_prefill_that_fails_ends_decode_and_both_are_tried_again(reply):
    p, q = of_prefill(reply), of_prefill(name="prefill-1")
    d = decode(streaming(b": parked\n\n", asyncio.Event()), speaking(8))
    async with together(p, q, d, aborts=True) as service:
        assert tokens_of(await service.ask()) == [7, 8]
        if d.calls[0].leg == "decode" and len(d.calls) > 1:
            await d.calls[0].end()
            assert d.calls[0].cancelled
    assert service.record.prefill_engine == "prefill-1"
    assert released(q) == []


async def test_what_prefill_refuses_as_the_clients_fault_is_the_clients_to_see():
    p, d = of_prefill(refusing(400, "too long")), decode(hanging())
    async with together(p, d) as service:
        assert await service.refused() == ("too long", 400)


async def test_prefill_that_cannot_be_reached_is_replaced():
    with nobody_listens() as url:
        gone = replace(dead("prefill-0", "prefill", url), kv_address="unix:/run/gone.sock")
        q, d = of_prefill(name="prefill-1"), decode(hanging(), speaking(8))
        async with together(gone, q, d) as service:
            assert tokens_of(await service.ask(sampling=GREEDY | {"max_tokens": 2})) == [7, 8]


@pytest.mark.parametrize("how", ["not ready", "gone", "started anew"])
async def test_prefill_that_goes_out_of_service_ends_decode(how):
    p, q = of_prefill(hanging()), of_prefill(name="prefill-1")
    d = decode(streaming(b": parked\n\n", asyncio.Event()), speaking(8))
    async with together(p, q, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        await d.call()
        service.loses("prefill-0", how)
        assert tokens_of(await task) == [7, 8]
        await d.calls[0].end()
    assert d.calls[0].cancelled
    assert released(p) == []  # what it held is gone with it


# decode fails


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("answered", [False, True], ids=["while prefill computes", "behind prefill's answer"])
async def test_a_decode_that_is_full_is_replaced_under_the_same_transfer(status, answered):
    go, refuse = asyncio.Event(), asyncio.Event()

    async def full(request: web.Request) -> web.StreamResponse:
        await refuse.wait()
        return await refusing(status)(request)

    p, d, e = of_prefill(met(7, after=go)), decode(full), decode(speaking(8), name="decode-1")
    async with together(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        if answered:
            go.set()
            await holds(lambda: tokens_of(service.chunks) == [7])
            refuse.set()
        else:
            refuse.set()
            await e.call()
            assert service.outstanding() == {"prefill-0": 3, "decode-1": 5}
            go.set()
        assert tokens_of(await task) == [7, 8]
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], ["decode"], ["decode"])
    assert d.calls[0].body == e.calls[0].body
    assert (service.record.decode_engine, service.record.attempts, service.record.resumes) == ("decode-1", 1, 0)


async def test_a_decode_that_cannot_be_reached_is_replaced_under_the_same_transfer():
    with nobody_listens() as url:
        p, e = of_prefill(), decode(speaking(8), name="decode-1")
        async with together(p, dead("decode-0", "decode", url), e) as service:
            assert tokens_of(await service.ask()) == [7, 8]
    assert (p.legs(), e.legs()) == (["prefill"], ["decode"])


async def test_where_every_decode_is_full_prefill_is_ended_too():
    p, d = of_prefill(hanging()), decode(refusing(503))
    async with together(p, d, aborts=True) as service:
        _, status = await service.refused()
        await p.abort()
        await p.calls[0].end()
        await service.legs.close()
    assert status == 503
    assert p.calls[0].cancelled
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]  # its answer may be lost


async def test_where_every_decode_is_full_what_prefill_handed_over_is_released():
    go = asyncio.Event()
    p, d, m = of_prefill(met(7, after=go)), decode(refusing(503)), mixed()
    async with together(p, d, m) as service:
        task = asyncio.create_task(service.ask(sampling=SEEDED))
        await p.call()
        go.set()  # within the grace that an abandoned prefill leg has
        assert tokens_of(await task) == [8, 9]
        await service.legs.close()
    (one,) = [call for call in p.calls if call.leg == "release"]
    assert one.body == {
        "token_ids": [11],
        "model": "tiny",
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "stream": False,
        "kv_transfer_params": {"release_transfer": params_of(p.calls[0])["transfer_id"]},
    }
    assert d.legs() == ["decode"]


@pytest.mark.parametrize("reply", [refusing(500), cutting(), streaming(b": parked\n\n", cut=True)])
async def test_a_decode_that_fails_while_prefill_computes_ends_it(reply):
    p, d, e = of_prefill(hanging(), met()), decode(reply), mixed()
    async with together(p, d, e, aborts=True) as service:
        assert tokens_of(await service.ask()) == [8, 9]
        await p.abort()
        await p.calls[0].end()
        await service.legs.close()
    assert p.calls[0].cancelled
    assert service.record.split is False
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]  # its answer may be lost


async def test_a_decode_that_fails_behind_prefills_token_is_continued_elsewhere():
    go = asyncio.Event()
    p, d, e = of_prefill(), decode(streaming(go, chunk(8), cut=True)), decode(speaking(9), name="decode-1")
    async with together(p, d, e) as service:
        task = asyncio.create_task(service.ask(sampling=GREEDY))
        await holds(lambda: tokens_of(service.chunks) == [7])
        go.set()
        assert tokens_of(await task) == [7, 8, 9]
    assert p.calls[1].body["token_ids"] == e.calls[0].body["token_ids"] == [11, 12, 13, 7, 8]
    assert e.calls[0].body["sampling_params"]["max_tokens"] == 1
    assert params_of(p.calls[0])["transfer_id"] != params_of(p.calls[1])["transfer_id"]
    assert service.record.resumes == 1


async def test_a_decode_that_ends_before_its_first_token_has_the_kv_released():
    go = asyncio.Event()
    p, d, e = of_prefill(), decode(streaming(go, cut=True)), decode(speaking(8), name="decode-1")
    async with together(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: tokens_of(service.chunks) == [7])
        go.set()
        assert tokens_of(await task) == [7, 8]
        await service.legs.close()
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]


async def test_a_decode_that_goes_out_of_service_while_prefill_computes_ends_it():
    p, d, e = of_prefill(hanging(), met()), decode(hanging()), decode(speaking(8), name="decode-1")
    async with together(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        await d.call()
        service.loses("decode-0", "not ready")
        assert tokens_of(await task) == [7, 8]
    assert (p.legs().count("prefill"), service.record.decode_engine) == (2, "decode-1")


# how long is waited


async def test_decode_may_be_silent_while_prefill_computes():
    go = asyncio.Event()
    p, d = of_prefill(met(7, after=go)), decode(streaming(b": parked\n\n", go, chunk(8, finish_reason="length"), DONE))
    async with together(p, d, patience=Patience(silence_s=0.4)) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        await asyncio.sleep(0.3)
        go.set()
        assert tokens_of(await task) == [7, 8]
    assert service.record.attempts == 1


async def test_its_silence_counts_from_prefills_answer():
    p, d, e = of_prefill(), decode(hanging()), decode(speaking(8), name="decode-1")
    async with together(p, d, e, patience=Patience(silence_s=0.3)) as service:
        begin_s = now_s()
        assert tokens_of(await service.ask()) == [7, 8]
        assert 0.25 <= now_s() - begin_s < AT_ONCE_S
        await service.legs.close()
    assert service.record.decode_engine == "decode-1"
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]


async def test_a_prefill_that_says_nothing_is_replaced_and_decode_with_it():
    p, q, d = of_prefill(hanging()), of_prefill(name="prefill-1"), decode(hanging(), speaking(8))
    async with together(p, q, d, patience=Patience(silence_s=0.3)) as service:
        assert tokens_of(await service.ask()) == [7, 8]
    assert service.record.prefill_engine == "prefill-1"
    assert "prefill-0: said nothing for 0.3 s" in service.record.reason


@pytest.mark.parametrize("answered", [False, True])
async def test_a_deadline_ends_both_legs(answered):
    p, d = of_prefill(met() if answered else hanging()), decode(hanging())
    owner = RequestRecord("r", "/", deadline_s=now_s() + 0.3)
    with owned_by(owner):
        async with together(p, d) as service:
            assert await service.refused() == ("the request's deadline has passed", 504)
            await d.calls[0].end()
            await p.calls[0].end()


# the client leaves


def request(**sampling) -> TokenRequest:
    return TokenRequest("gen-1", [11, 12, 13], {"temperature": 0.0, "max_tokens": 3} | sampling, "tiny")


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_client_that_leaves_while_prefill_computes_ends_both_legs(aborts):
    p, d = of_prefill(hanging()), decode(streaming(b": parked\n\n", asyncio.Event()))
    async with together(p, d, aborts=aborts) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        await d.call()
        await asyncio.sleep(0.05)
        await cancelled(task)
        async with asyncio.timeout(AT_ONCE_S):
            await d.calls[0].end()
            if aborts:
                assert "-prefill" in await p.abort()
                assert "-decode" in await d.abort()
        await p.calls[0].end()
        await service.legs.close()
    assert (p.calls[0].cancelled, d.calls[0].cancelled) == (True, True)
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]  # its answer may be lost
    assert service.record.finish_reason == "abort"


@pytest.mark.parametrize("accepted", [False, True])
async def test_kv_of_a_prefill_leg_that_answers_when_its_client_has_left_is_released(accepted):
    """Decode tells prefill that it has given up; prefill would still wait for another one."""
    go = asyncio.Event()
    parked = streaming(b": parked\n\n", asyncio.Event()) if accepted else hanging()
    p, d = of_prefill(met(after=go)), decode(parked)
    async with together(p, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        await d.call()
        await asyncio.sleep(0.1)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await service.legs.close()
    assert len(released(p)) == 1


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_client_that_leaves_behind_the_first_token_ends_decode(accepted):
    parked = streaming(b": parked\n\n", asyncio.Event()) if accepted else hanging()
    p, d = of_prefill(), decode(parked)
    async with together(p, d, aborts=True) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: tokens_of(service.chunks) == [7])
        await asyncio.sleep(0.1)
        await cancelled(task)
        await d.calls[0].end()
        await d.abort()
        await service.legs.close()
    assert len(released(p)) == 1
    assert p.aborted == []


async def test_a_client_that_is_handed_the_first_token_and_leaves_ends_decode():
    p, d = of_prefill(), decode(hanging())
    async with together(p, d) as service:
        chunks = service.legs.run(request())
        assert (await anext(chunks)).token_ids == [7]
        await chunks.aclose()
        await (await d.call()).end()
        await service.legs.close()
    assert d.calls[0].cancelled
    assert len(released(p)) == 1


async def test_a_client_that_leaves_at_once_leaves_nothing():
    async with together(of_prefill(hanging()), decode(hanging())) as service:
        for steps in range(6):
            task = asyncio.create_task(service.ask())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_client_that_leaves_behind_decodes_tokens_ends_it():
    p, d = of_prefill(), decode(streaming(chunk(8), asyncio.Event()))
    async with together(p, d, aborts=True) as service:
        task = asyncio.create_task(service.ask(sampling=GREEDY))
        await holds(lambda: tokens_of(service.chunks) == [7, 8])
        await cancelled(task)
        await d.calls[0].end()
        await d.abort()
    assert released(p) == []


@pytest.mark.parametrize("aborts", [False, True])
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(aborts):
    moments = random.Random(7)

    async def slowly(inner: Reply, http: web.Request) -> web.StreamResponse:
        await asyncio.sleep(moments.random() * 0.05)
        return await inner(http)

    def slow(inner: Reply) -> Reply:
        return lambda http: slowly(inner, http)

    p = of_prefill(slow(met()), slow(met(7, problem="no mover")), slow(refusing(503)), slow(met()))
    d = decode(slow(speaking(8, 9)), slow(refusing(503)), slow(streaming(chunk(8), cut=True)), slow(speaking(8, 9)))
    e = decode(slow(speaking(8, 9)), name="decode-1")

    async def client(service: Service) -> None:
        task = asyncio.create_task(leaving(service.legs))
        await asyncio.sleep(moments.random() * 0.12)
        task.cancel()
        await asyncio.wait([task])

    async with together(p, d, e, aborts=aborts) as service:
        await asyncio.gather(*(client(service) for _ in range(60)))
        await service.legs.close()
        assert service.legs.releases.unconfirmed == 0


async def leaving(legs: Legs) -> None:
    async for _ in legs.run(request()):
        pass


# every way out releases what prefill may hold, once: the gateway has named the transfer, and needs no answer for that


def when(go: asyncio.Event, inner: Reply) -> Reply:
    async def reply(http: web.Request) -> web.StreamResponse:
        await go.wait()
        return await inner(http)

    return reply


async def left(_: Service, task: asyncio.Task, __: asyncio.Event) -> None:
    task.cancel()


def left_again(rounds: int):
    async def left_again(_: Service, task: asyncio.Task, __: asyncio.Event) -> None:
        for _ in range(3):  # a stop string matches, the client leaves, the worker stops
            task.cancel()
            for _ in range(rounds):
                await asyncio.sleep(0)

    return left_again


async def stopped(service: Service, task: asyncio.Task, _: asyncio.Event) -> None:
    task.cancel()
    await service.legs.close()  # and then there is no session any more
    await service.legs.session.close()


async def answered(_: Service, __: asyncio.Task, go: asyncio.Event) -> None:
    go.set()


async def lost(service: Service, _: asyncio.Task, __: asyncio.Event) -> None:
    service.loses("decode-0", "not ready")


async def late(_: Service, __: asyncio.Task, ___: asyncio.Event) -> None:
    """Nothing is done: the deadline passes."""


WAYS_OUT = {
    "the client leaves": (hanging(), left),
    "it leaves again at once": (hanging(), left_again(0)),
    "it leaves again while its legs are ended": (hanging(), left_again(1)),
    "and again": (hanging(), left_again(2)),
    "the worker stops": (hanging(), stopped),
    "the deadline passes": (hanging(), late),
    "decode is full": (refusing(503), answered),
    "decode refuses": (refusing(400), answered),
    "decode fails": (refusing(500), answered),
    "decode sends garbage": (raw_answer(b"garbage"), answered),
    "decode breaks off": (cutting(), answered),
    "decode begins and breaks off": (streaming(b": parked\n\n", cut=True), answered),
    "decode goes out of service": (hanging(), lost),
}


@pytest.mark.parametrize("computes", [True, False], ids=["while prefill computes", "behind its answer"])
@pytest.mark.parametrize("way", WAYS_OUT)
async def test_every_way_out_releases_the_transfer_once(way, computes):
    reply, act = WAYS_OUT[way]
    go = asyncio.Event()
    p, m = of_prefill(*([hanging()] if computes else []), met()), mixed()
    d = decode(when(go, reply) if act is answered else reply, speaking(8))
    owner = RequestRecord("r", "/", deadline_s=now_s() + 1.0 if act is late else None)
    with owned_by(owner):
        async with together(p, d, m) as service:
            task = asyncio.create_task(service.ask())
            await p.call()
            await d.call()
            if not computes:
                await holds(lambda: tokens_of(service.chunks) == [7])
            await act(service, task, go)
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None or isinstance(task.exception(), ServingError)
            await service.legs.close()
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}]


@pytest.mark.parametrize(
    ("reply", "may_hold"),
    [
        (cutting(), True),
        (raw_answer(b"garbage"), True),
        (raw_answer(b'{"choices": 5}', kind="application/json"), True),
        (refusing(500), True),
        (refusing(503), False),
        (refusing(400), False),
        (refusing(404), False),
    ],
    ids=["cut", "garbage", "another form", "500", "full", "refused", "not found"],
)
async def test_an_answer_of_prefills_that_is_lost_is_released_once(reply, may_hold):
    p, d, m = of_prefill(reply, met()), decode(hanging(), speaking(8)), mixed()
    async with together(p, d, m) as service:
        await asyncio.gather(service.ask(), return_exceptions=True)
        await service.legs.close()
    assert released(p) == [{"release_transfer": params_of(p.calls[0])["transfer_id"]}] * may_hold


async def test_closing_waits_for_generations_that_were_told_to_end():
    p, d = of_prefill(hanging(), met()), decode(hanging())
    async with together(p, d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        task.cancel()
        assert service.legs.running == 1
        await service.legs.close()
        assert (service.legs.running, len(released(p))) == (0, 1)


async def test_closing_does_not_wait_for_long_for_one_that_was_not(monkeypatch):
    monkeypatch.setattr(life, "_ENDING_S", 0.01)
    p, d = of_prefill(hanging(), met()), decode(hanging())
    async with together(p, d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        async with asyncio.timeout(AT_ONCE_S):
            await service.legs.close()
        assert not task.done()
        await cancelled(task)


# what was intended, and what came of it


@pytest.mark.parametrize(("cached", "split"), [(None, True), (3, True), (2, True), (1, False), (0, False)])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED | {"max_tokens": 3}], ids=["prefills first", "decodes first"])
async def test_a_transfer_that_failed_behind_prefills_answer_is_told(cached, split, sampling):
    p, d = of_prefill(met(7, cached=0)), decode(speaking(8, 9, cached=cached))
    async with together(p, d) as service:
        await service.ask(sampling=sampling)
    facts = service.record.facts(0.0)
    assert (facts["intended_split"], facts["split"]) == (True, split)
    problem = None if split else "decode-0 computed the prompt itself; its log says why"
    assert facts["transfer_problem"] == problem
    assert facts["cached_tokens"] == 0  # prefill's: what decode found is none of the client's


async def test_one_that_failed_before_it_keeps_prefills_words():
    p, d = of_prefill(met(7, problem="no mover")), decode(speaking(8, 9, cached=0))
    async with together(p, d) as service:
        await service.ask(sampling=GREEDY)
    assert (service.record.intended_split, service.record.split) == (True, False)
    assert service.record.transfer_problem == "no mover"


async def test_what_needs_no_second_engine_is_not_meant_to_have_one():
    p, d, m = of_prefill(), decode(), mixed()
    async with together(p, d, m) as service:
        await service.ask(sampling=GREEDY | {"max_tokens": 1})
        assert (service.record.intended_split, service.record.split) == (False, False)
        await service.ask(unsplittable="the test wants it")
        assert (service.record.intended_split, service.record.split) == (False, False)


async def test_an_attempt_that_follows_forgets_the_problem_of_the_one_before():
    p, d, m = of_prefill(met(7, problem="no mover")), decode(refusing(500)), mixed()
    async with together(p, d, m) as service:
        await service.ask(sampling=SEEDED)
    assert service.record.decode_engine == "mixed-0"
    assert (service.record.intended_split, service.record.transfer_problem) == (False, None)


@pytest.mark.parametrize(("cached", "split"), [(None, True), (3, True), (0, False)])
@pytest.mark.parametrize("stream", [True, False])
async def test_it_is_told_on_the_text_plane_too_where_usage_says_it(cached, split, stream):
    counts = {"prompt_tokens": 3, "completion_tokens": 1}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    end, usage = {"choices": [{"finish_reason": "stop"}]}, {"usage": counts}
    reply = streaming(end, {"choices": [], **usage}, DONE) if stream else json_answer(end | usage)
    async with together(of_prefill(met(7, cached=2)), decode(reply)) as service:
        await text_of(service, text_ask(stream=stream))
    assert (service.record.intended_split, service.record.split) == (True, split)


# no cache is to be read


async def test_what_wants_no_cache_read_is_served_by_one_engine():
    p, d, m = of_prefill(), decode(speaking(5)), mixed()
    async with together(p, d, m) as service:
        assert tokens_of(await service.ask(sampling=GREEDY | {"skip_reading_prefix_cache": True})) == [8, 9]
        assert service.record.reason == "it wants no KV read that is there (skip_reading_prefix_cache)"
        assert tokens_of(await service.ask(sampling=GREEDY | {"skip_reading_prefix_cache": False})) == [7, 5]
    assert m.calls[0].body["sampling_params"]["skip_reading_prefix_cache"] is True


# nothing more can be had


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED | {"max_tokens": 3}], ids=["could be continued", "could not"])
async def test_an_answer_that_breaks_off_behind_its_last_token_is_ended_without_an_engine(sampling):
    """No engine could be asked: a prompt that fills the model's length is refused."""
    made = [chunk(8), chunk(9)] if sampling is GREEDY else [chunk(7), chunk(8), chunk(9)]
    p, d = of_prefill(), decode(streaming(*made, cut=True))
    async with together(p, d) as service:
        chunks = await service.ask(sampling=sampling)
    assert (tokens_of(chunks), chunks[-1].finish_reason) == ([7, 8, 9], "length")
    assert (p.legs(), d.legs()) == (["prefill"], ["decode"])


# the text plane


def text_ask(**body: object) -> TextAsk:
    value = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
    return TextAsk(CHAT, json.dumps(value).encode(), value, {}, None)


async def text_of(service: Service, ask: TextAsk) -> bytes:
    return b"".join([piece.body async for piece in service.legs.serve(ask)])


async def test_on_the_text_plane_both_legs_start_together_and_decode_writes_all():
    go = asyncio.Event()
    p = of_prefill(met(7, after=go, cached=2))
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    d = decode(streaming({"choices": [{"finish_reason": "stop"}]}, {"choices": [], "usage": counts}, DONE))
    async with together(p, d) as service:
        task = asyncio.create_task(text_of(service, text_ask(stream=True)))
        await p.call()
        await (await d.call()).end()
        assert not task.done()
        go.set()
        answer = await task
    assert b'"cached_tokens":2' in answer
    assert params_of(p.calls[0]) == {
        "do_remote_decode": True,
        "transfer_id": params_of(d.calls[0])["transfer_id"],
        "first_token": False,
    }
    assert params_of(d.calls[0])["prefill_address"] == "unix:/run/prefill-0.sock"
    assert (p.calls[0].path, d.calls[0].path) == (CHAT, CHAT)


async def test_on_the_text_plane_an_answer_that_is_not_streamed_waits_for_prefill_too():
    go = asyncio.Event()
    answer = {"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    p, d = of_prefill(met(7, after=go)), decode(json_answer(answer))
    async with together(p, d) as service:
        task = asyncio.create_task(text_of(service, text_ask()))
        await (await d.call()).end()
        assert not task.done()
        go.set()
        assert b'"finish_reason"' in await task


async def test_on_the_text_plane_kv_is_released_by_a_token_of_no_prompt():
    p, d, m = of_prefill(), decode(refusing(503)), mixed(json_answer({"choices": [{"finish_reason": "stop"}]}))
    async with together(p, d, m) as service:
        await text_of(service, text_ask())
        await service.legs.close()
    (one,) = [call for call in p.calls if call.leg == "release"]
    assert (one.path, one.body["token_ids"], one.body["model"]) == ("/inference/v1/generate", [0], "tiny")
    assert set(params_of(one)) == {"release_transfer"}


@pytest.mark.parametrize("colocated", [False, True])
async def test_requests_that_come_together_are_shared_by_what_each_brings(colocated):
    """Each is chosen for with those counted that were chosen just before it, though their legs have not begun."""
    p, d, e = of_prefill(), decode(speaking(8, 9)), decode(speaking(8, 9), name="decode-1")
    async with together(p, d, e) as service:
        (busier,) = [view for view in service.engines.all() if view.name == "decode-0"]
        with service.engines.charge(busier, 1):  # else equals would be taken in turn
            why = "it is special" if colocated else None
            await asyncio.gather(*(service.ask(sampling=GREEDY, unsplittable=why) for _ in range(8)))
    assert (len(d.calls), len(e.calls)) == (4, 4)
