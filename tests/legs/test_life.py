"""Generations on engines that are real HTTP servers; the connector is the real NixlConnector unless said."""

import asyncio
import contextlib
import json
import random
import re
from dataclasses import replace

import pytest
from aiohttp import web

from helpers.engines import (
    AT_ONCE_S,
    DONE,
    HANDED_OVER,
    WAIT_S,
    Call,
    Reply,
    chunk,
    cutting,
    hanging,
    json_answer,
    listening,
    nobody_listens,
    raw_answer,
    refusing,
    speaking,
    sse,
    streaming,
    token_request,
    tokens_of,
    usage,
    whole,
)
from helpers.processes import holds
from helpers.service import Service, cancelled, dead, decode, mixed, owned_by, prefill, serving
from trivet.connectors import NixlConnector
from trivet.journal import Journal, RequestRecord, now_s
from trivet.legs import life, release, tokens
from trivet.legs.life import Legs
from trivet.legs.watch import Patience
from trivet.legs.wire import open_session
from trivet.render.contract import Features, Item, ServingError, TokenChunk, TokenLogprobs
from trivet.routing.engines import Engines


class SeedingConnector(NixlConnector):
    """A connector that may hand prefill's token over when prefill has answered."""

    name = "SeedingConnector"
    hands_over_first_token = True


# the way of a split request


async def test_prefill_comes_first_and_decode_has_its_answer():
    p, d = prefill(whole(7, cached=2)), decode(speaking(5, 6, cached=3))
    async with serving(p, d) as service:
        chunks = await service.ask()
    assert tokens_of(chunks) == [5, 6]
    assert chunks[-1].finish_reason == "length"
    assert (p.legs(), d.legs()) == (["prefill"], ["decode"])
    assert p.calls[0].body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False},
        "stream": False,
        "kv_transfer_params": NixlConnector().prefill_params(),
    }
    assert d.calls[0].body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"temperature": 0.0, "max_tokens": 2, "detokenize": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": HANDED_OVER,
    }


async def test_decode_is_asked_when_prefill_has_answered():
    answer = asyncio.Event()
    p, d = prefill(streaming(answer, b'{"kv_transfer_params": null}')), decode()
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        assert d.calls == []
        answer.set()
        await task
    assert d.legs() == ["decode"]


async def test_only_the_first_chunk_tells_the_cached_tokens_and_they_are_prefills():
    """Decode found the whole prompt; how much was computed is what prefill says."""
    async with serving(prefill(whole(cached=2)), decode(speaking(5, 6, cached=3))) as service:
        chunks = await service.ask()
    assert [one.cached_tokens for one in chunks] == [2, None]
    assert service.record.cached_tokens == 2


@pytest.mark.parametrize(
    ("params", "expected"),
    [(HANDED_OVER, [(1, 1), (None, None)]), (None, [(None, None), (0, 3)])],
    ids=["split", "colocated"],
)
async def test_what_a_prompt_added_to_a_prefix_cache_is_told_of_the_engine_that_computed_it(params, expected):
    p, d = prefill(whole(params=params, cached=1)), decode(speaking(5, 6, cached=0))
    async with serving(p, d) as service:
        views = replace(p.view(), cached_block_tokens=2), replace(d.view(), cached_block_tokens=1)
        service.engines.update(views)
        chunks = await service.ask()
    assert [(one.cached_tokens, one.created_cache_tokens) for one in chunks] == expected


async def test_legs_carry_the_clients_headers_and_the_engines_keys():
    owner = Journal().open("req-1", "/v1/completions")
    owner.forwarded = {"traceparent": "00-1", "X-Client-Request-Id": "req-1"}
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        service.engines.update([p.view(api_key="secret-p"), d.view()])
        with owned_by(owner):
            await service.ask()
    for call in (*p.calls, *d.calls):
        assert (call.headers["traceparent"], call.headers["X-Client-Request-Id"]) == ("00-1", "req-1")
        assert call.headers["Content-Type"] == "application/json"
        assert "X-data-parallel-rank" not in call.headers
    assert p.calls[0].headers["Authorization"] == "Bearer secret-p"
    assert "Authorization" not in d.calls[0].headers


async def test_legs_have_ids_of_their_own_which_no_client_chose():
    owner = Journal().open("req-1", "/v1/completions")
    p, d = prefill(), decode(refusing(500), speaking(5, 6))
    async with serving(p, d) as service:
        with owned_by(owner):
            await service.ask(request_id="req-1")
        await service.ask(request_id="req-1")
        await service.legs.close()
    ids = [call.headers["X-Request-Id"] for call in (*p.calls, *d.calls)]
    assert len(set(ids)) == len(ids)
    generation = service.records[0].generation_id
    assert re.fullmatch(r"[0-9a-f]{32}", generation)
    assert p.calls[0].headers["X-Request-Id"] == f"{generation}-1-prefill"
    assert d.calls[0].headers["X-Request-Id"] == f"{generation}-1-decode"
    assert f"{generation}-2-decode" in ids


async def test_a_data_parallel_rank_is_decodes():
    owner = Journal().open("req-1", "/v1/completions")
    owner.decode_rank = "3"
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        with owned_by(owner):
            await service.ask()
            await service.ask(unsplittable="it is special")
    assert "X-data-parallel-rank" not in p.calls[0].headers
    assert [call.headers["X-data-parallel-rank"] for call in d.calls] == ["3", "3"]


async def test_each_engine_is_charged_while_its_leg_runs():
    answer, more = asyncio.Event(), asyncio.Event()
    p = prefill(streaming(answer, b'{"kv_transfer_params": null}'))
    d = decode(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE))
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        assert service.outstanding() == {"prefill-0": 3}
        answer.set()
        await d.call()
        assert service.outstanding() == {"decode-0": 5}
        more.set()
        await task
        assert service.outstanding() == {}


async def test_requests_spread_over_the_engines():
    hold = asyncio.Event()
    p, q = (prefill(streaming(hold, b'{"kv_transfer_params": null}'), name=f"prefill-{n}") for n in (0, 1))
    async with serving(p, q, decode()) as service:
        tasks = [asyncio.create_task(service.ask()) for _ in range(4)]
        for engine in (p, q):
            await engine.call(1)
        hold.set()
        await asyncio.gather(*tasks)
    assert (len(p.calls), len(q.calls)) == (2, 2)


async def test_requests_one_after_the_other_go_to_the_engines_in_turn():
    engines = [*(prefill(name=f"prefill-{n}") for n in (0, 1)), *(decode(name=f"decode-{n}") for n in (0, 1))]
    async with serving(*engines) as service:
        for _ in range(4):
            await service.ask()
    assert [len(one.calls) for one in engines] == [2, 2, 2, 2]
    pairs = [(record.prefill_engine, record.decode_engine) for record in service.records]
    assert pairs == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")] * 2


# the record


async def test_a_split_generation_leaves_its_facts():
    async with serving(prefill(whole(cached=2)), decode()) as service:
        await service.ask()
    record = service.record
    assert (record.prompt_tokens, record.completion_tokens, record.attempts, record.resumes) == (3, 2, 1, 0)
    assert (record.split, record.reason) == (True, "a pair is ready")
    assert (record.prefill_engine, record.decode_engine) == ("prefill-0", "decode-0")
    assert (record.finish_reason, record.error, record.cached_tokens) == ("length", None, 2)
    stamps = [record.rendered_s, record.prefill_start_s, record.prefill_end_s, record.first_token_s, record.end_s]
    assert stamps == sorted(stamps)
    assert len(service.records) == 1


async def test_a_generation_stands_in_the_record_of_its_request():
    owner = Journal().open("req-1", "/v1/completions")
    async with serving(prefill(), decode()) as service:
        with owned_by(owner):
            await service.ask()
            await service.ask(request_id="gen-2")
    assert owner.generations == service.records
    assert len({one.generation_id for one in owner.generations}) == 2


async def test_observers_are_told_of_the_request_too():
    owner, told = Journal().open("req-1", "/v1/completions"), []
    d = mixed()
    async with listening(d), open_session() as session:
        engines = Engines()
        engines.update([d.view()])
        legs = Legs(engines, session, None, lambda *seen: told.append(seen))
        with owned_by(owner):
            assert tokens_of([one async for one in legs.run(token_request())]) == [8, 9]
    assert told == [(owner.generations[0], owner)]


# what is served colocated


async def test_a_request_that_may_not_be_split_is_served_by_a_mixed_engine():
    p, d, m = prefill(), decode(), mixed(speaking(8, 9, cached=1))
    async with serving(p, d, m) as service:
        chunks = await service.ask(unsplittable="it is special")
    assert tokens_of(chunks) == [8, 9]
    assert [one.cached_tokens for one in chunks] == [None, 1]
    assert (p.calls, d.calls) == ([], [])
    assert "kv_transfer_params" not in m.calls[0].body
    record = service.record
    assert (record.split, record.reason) == (False, "it is special")
    assert (record.prefill_engine, record.decode_engine, record.cached_tokens) == (None, "mixed-0", 1)
    assert (record.prefill_start_s, record.prefill_end_s) == (None, None)


async def test_a_request_whose_owner_wants_it_colocated_is():
    owner = Journal().open("req-1", "/v1/completions")
    owner.colocate = "the request asks for it"
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        with owned_by(owner):
            await service.ask()
            await service.ask(unsplittable="its own reason")
    assert p.calls == []
    assert "kv_transfer_params" not in d.calls[0].body
    assert [one.reason for one in service.records] == ["the request asks for it", "its own reason"]


async def test_without_a_connector_everything_is_colocated():
    p, d = prefill(), decode()
    async with serving(p, d, connector=None) as service:
        await service.ask()
    assert p.calls == []
    assert (service.record.split, service.record.reason) == (False, "the topology has no connector")


@pytest.mark.parametrize(
    "params",
    [None, {}, HANDED_OVER | {"remote_block_ids": []}, HANDED_OVER | {"do_remote_prefill": False}],
    ids=["null", "empty", "no blocks", "nothing kept"],
)
async def test_a_request_for_which_prefill_hands_nothing_over_is_served_colocated(params):
    p, d = prefill(whole(params=params, cached=2)), decode(speaking(5, 6, cached=3))
    async with serving(p, d) as service:
        chunks = await service.ask()
    assert tokens_of(chunks) == [5, 6]
    assert [one.cached_tokens for one in chunks] == [None, 3]  # decode computed the prompt
    assert d.legs() == ["decode"]
    assert "kv_transfer_params" not in d.calls[0].body
    record = service.record
    assert (record.split, record.reason) == (False, "prefill-0 handed nothing over")
    assert record.cached_tokens == 3


# prefill fails

CANNOT = "sent what cannot be read "
NOT_LET_IN = "does not let the gateway in (HTTP {0}: not today)"
TROUBLE = {
    "401": (refusing(401), NOT_LET_IN.format(401)),
    "403": (refusing(403), NOT_LET_IN.format(403)),
    "404": (refusing(404), "not today"),
    "500": (refusing(500), "not today"),
    "503": (refusing(503), "not today"),
    "408": (refusing(408), "not today"),
    "429": (refusing(429), "not today"),
    "not JSON": (raw_answer(b"hello"), "answered 200 with something that is not JSON"),
    "not an object": (json_answer([]), "answered 200 with something that is not an object"),
    "no params": (json_answer({"kv_transfer_params": "x"}), CANNOT + "(TypeError: kv_transfer_params of another type)"),
    "no blocks": (
        whole(params=HANDED_OVER | {"remote_block_ids": 5}),
        CANNOT + "(TypeError: 'int' object is not iterable)",
    ),
    "odd usage": (
        json_answer({"usage": {"prompt_tokens_details": [1]}}),
        CANNOT + "(AttributeError: 'list' object has no attribute 'get')",
    ),
    "closed": (cutting(), "closed the connection without an answer"),
    "failed": (whole(finish="error"), "generating failed in the engine (finish_reason error)"),
    "aborted": (whole(finish="abort"), "the engine ended the request (finish_reason abort)"),
}


@pytest.mark.parametrize(("reply", "problem"), TROUBLE.values(), ids=TROUBLE)
async def test_prefill_in_trouble_is_replaced_by_another(reply, problem):
    p, q, d = prefill(reply), prefill(name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), q.legs(), d.legs()) == (["prefill"], ["prefill"], ["decode"])
    record = service.record
    assert (record.split, record.prefill_engine) == (True, "prefill-1")
    assert record.reason == f"a pair is ready (prefill-0: {problem})"


@pytest.mark.parametrize(("reply", "problem"), TROUBLE.values(), ids=TROUBLE)
async def test_without_another_prefill_the_request_is_served_colocated(reply, problem):
    p, d = prefill(reply), decode()
    async with serving(p, d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert "kv_transfer_params" not in d.calls[0].body
    record = service.record
    assert (record.split, record.prefill_engine) == (False, None)
    assert record.reason == f"no prefill engine is ready (prefill-0: {problem})"
    assert (record.prefill_start_s, record.prefill_end_s) == (None, None)


async def test_a_prefill_that_refuses_connections_is_replaced_too():
    with nobody_listens() as url:
        q, d = prefill(name="prefill-1"), decode()
        async with serving(dead("prefill-0", "prefill", url), q, d) as service:
            assert tokens_of(await service.ask()) == [5, 6]
    assert service.record.prefill_engine == "prefill-1"
    assert service.record.reason.startswith("a pair is ready (prefill-0: cannot be reached (")


# decode fails before its first token

DECODE_TROUBLE = {
    "500": (refusing(500), "not today"),
    "error event": (streaming({"error": {"message": "KV load failed", "code": 500}}, DONE), "KV load failed"),
}
ENDS = streaming(DONE)


@pytest.mark.parametrize(("reply", "problem"), DECODE_TROUBLE.values(), ids=DECODE_TROUBLE)
async def test_a_decode_that_could_not_take_the_kv_serves_the_request_colocated(reply, problem):
    p, d = prefill(), decode(reply, speaking(5, 6))
    async with serving(p, d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    first, again = (call for call in d.calls if call.leg == "decode")
    assert first.body["kv_transfer_params"] == HANDED_OVER
    assert "kv_transfer_params" not in again.body
    assert p.legs() == ["prefill"]
    assert (service.record.split, service.record.decode_engine) == (False, "decode-0")
    assert service.record.reason == f"decode failed the split request (decode-0: {problem})"


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_does_not_let_the_gateway_in_is_passed_over(status):
    p, d, e = prefill(), decode(refusing(status)), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], ["decode"], ["decode"])
    assert e.calls[0].body["kv_transfer_params"] == HANDED_OVER


@pytest.mark.parametrize("status", [401, 403])
async def test_where_none_lets_the_gateway_in_that_is_no_fault_of_the_clients_key(status):
    async with serving(mixed(refusing(status))) as service:
        error = await service.fails()
    assert error.status == 502
    assert f"does not let the gateway in (HTTP {status}: " in error.message


async def test_a_decode_that_lacks_what_is_asked_for_is_not_asked_for_it_again():
    """An adapter, say, which another engine may have."""
    p, d, m = prefill(), decode(refusing(404)), mixed()
    async with serving(p, d, m) as service:
        assert tokens_of(await service.ask()) == [8, 9]
        await service.legs.close()
    assert [leg for leg in d.legs() if leg == "decode"] == ["decode"]
    assert service.record.reason == "decode failed the split request (decode-0: not today)"


async def test_a_decode_that_ends_its_answer_before_the_first_token_is_avoided():
    """So vLLM 0.30 says that it was told to end: it is going down."""
    p, d, e = prefill(), decode(ENDS), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (service.record.split, service.record.decode_engine) == (True, "decode-1")
    assert service.record.reason == "a pair is ready (decode-0: the stream ended before the answer did)"


async def test_after_a_failed_transfer_another_decode_has_its_turn():
    p, d, e = prefill(), decode(refusing(500)), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (service.record.split, service.record.decode_engine) == (False, "decode-1")
    assert service.record.reason == "decode failed the split request (decode-0: not today)"


@pytest.mark.parametrize("status", [404, 500, 502, 504])
async def test_what_a_colocated_leg_is_answered_is_the_clients_to_see(status):
    """With its status and its words: it cannot have been the transfer."""
    d, e = decode(refusing(500, "a"), refusing(status, "b")), decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        service.engines.update([*service.engines.all()[:2], e.view(ready=False)])
        error = await service.fails()
        assert (error.message, error.status) == ("b", status)
        assert error.error == {"message": "b", "type": "Error", "param": None, "code": status}
        assert service.record.error == "b"


async def test_a_colocated_leg_that_is_answered_is_not_tried_elsewhere():
    m, n = mixed(refusing(500)), mixed(name="mixed-1")
    async with serving(m, n) as service:
        assert await service.refused() == ("not today", 500)
    assert (len(m.calls), len(n.calls)) == (1, 0)


async def test_a_decode_that_was_handed_nothing_was_as_good_as_colocated():
    p, d, m = prefill(whole(params=None)), decode(refusing(500)), mixed()
    async with serving(p, d, m) as service:
        assert await service.refused() == ("not today", 500)
    assert (len(d.calls), m.calls) == (1, [])
    assert service.record.reason == "prefill-0 handed nothing over"


async def test_a_decode_that_breaks_off_without_an_answer_is_avoided_and_the_request_split_again():
    second = HANDED_OVER | {"remote_request_id": "second"}
    p, d, e = prefill(whole(), whole(params=second)), decode(cutting()), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert p.legs() == ["prefill", "prefill"]
    (again,) = [call for call in e.calls if call.leg == "decode"]
    assert again.body["kv_transfer_params"] == second
    assert (service.record.split, service.record.decode_engine) == (True, "decode-1")
    problem = "closed the connection without an answer"
    assert service.record.reason == f"a pair is ready (decode-0: {problem})"


@pytest.mark.parametrize("reply", [refusing(500), cutting()], ids=["500", "closed"])
async def test_the_kv_of_a_leg_that_decode_did_not_accept_is_released_elsewhere(reply):
    p, d, e = prefill(), decode(reply), decode(name="decode-1")
    async with serving(p, d, e) as service:
        await service.ask()
        await service.legs.close()
        (releasing,) = [call for call in e.calls if call.leg == "release"]
    assert releasing.body["kv_transfer_params"] == HANDED_OVER
    assert d.legs() == ["decode"]


@pytest.mark.parametrize("reply", [DECODE_TROUBLE["error event"][0], ENDS], ids=["error event", "ends"])
async def test_the_kv_of_a_leg_that_ended_without_a_token_is_released_elsewhere(reply):
    """It may have ended before it took the KV."""
    p, d, e = prefill(), decode(reply), decode(name="decode-1")
    async with serving(p, d, e) as service:
        await service.ask()
        await service.legs.close()
    assert (d.legs(), sorted(e.legs())) == (["decode"], ["decode", "release"])


async def test_the_kv_of_a_leg_that_gave_a_token_is_decodes_to_release():
    p, d, e = prefill(), decode(streaming(chunk(5), cut=True)), decode(speaking(6), name="decode-1")
    async with serving(p, d, e) as service:
        await service.ask()
        await service.legs.close()
    assert (d.legs(), e.legs()) == (["decode"], ["decode"])


async def test_kv_of_which_a_piece_was_given_is_offered_to_nobody_else():
    """Also where an error says that nothing had begun."""
    p, e = prefill(), decode(speaking(6), name="decode-1")
    d = decode(streaming(chunk(5), {"error": {"message": "going down", "code": 503}}, DONE))
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), d.legs(), e.legs()) == (["prefill", "prefill"], ["decode"], ["decode"])
    assert e.calls[0].body["token_ids"] == [11, 12, 13, 5]


async def test_a_release_names_what_was_prefilled_whatever_was_sent_since():
    p, d, e = prefill(), decode(refusing(500)), decode(speaking(8), name="decode-1")
    async with serving(p, d, e, connector=SeedingConnector()) as service:
        assert tokens_of(await service.ask()) == [7, 8]
        await service.legs.close()
    (releasing,) = [call for call in e.calls if call.leg == "release"]
    assert releasing.body["token_ids"] == [11, 12, 13]


async def test_a_release_is_the_shortest_request_with_the_same_prompt():
    p, d = prefill(), decode(refusing(500), speaking(5))
    async with serving(p, d, mixed()) as service:
        await service.ask(cache_salt="salt", sampling={"max_tokens": 99, "temperature": 1.0, "logprobs": 3})
        releasing = await d.call(1)
    assert releasing.headers["X-Request-Id"].endswith("-1-release")
    # what it reads may be another's by then, and must never be found in decode's cache
    assert releasing.body.pop("cache_salt").startswith("release-")
    assert releasing.body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": HANDED_OVER,
    }


async def test_stamps_of_a_failed_attempt_are_forgotten():
    """Else the handover of a colocated answer would be told."""
    async with serving(prefill(whole(cached=2)), decode(refusing(500)), mixed()) as service:
        assert tokens_of(await service.ask()) == [8, 9]
    record = service.record
    assert (record.split, record.decode_engine, record.prefill_engine) == (False, "mixed-0", None)
    assert record.reason == "decode failed the split request (decode-0: not today)"
    assert (record.prefill_start_s, record.prefill_end_s, record.cached_tokens) == (None, None, None)


# decode refuses before it begins


async def test_a_decode_that_refuses_connections_is_replaced_and_prefill_is_not_done_again():
    with nobody_listens() as url:
        p, e = prefill(), decode(name="decode-1")
        async with serving(p, dead("decode-0", "decode", url), e) as service:
            assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), e.legs()) == (["prefill"], ["decode"])
    assert e.calls[0].body["kv_transfer_params"] == HANDED_OVER
    assert (service.record.split, service.record.decode_engine, service.record.attempts) == (True, "decode-1", 1)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_decode_that_is_full_is_replaced_and_prefill_is_not_done_again(status):
    p, d, e = prefill(), decode(refusing(status)), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], ["decode"], ["decode"])
    assert service.record.split is True


async def test_engines_are_asked_in_turn_until_one_has_room():
    full = [decode(refusing(503), name=f"decode-{number}") for number in range(5)]
    p, last = prefill(), decode(name="decode-9")
    async with serving(p, *full, last) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), last.legs()) == (["prefill"], ["decode"])
    assert [one.legs() for one in full] == [["decode"]] * 5


@pytest.mark.parametrize("status", [429, 503])
async def test_where_every_decode_is_full_the_client_may_come_again_and_the_kv_is_released(status):
    p, d = prefill(), decode(refusing(status), speaking(5))
    async with serving(p, d) as service:
        error = await service.fails()
        await service.legs.close()
    assert (error.message, error.status) == ("no engine could serve this request: decode-0: not today", status)
    assert (p.legs(), d.legs()) == (["prefill"], ["decode", "release"])


async def test_a_second_decode_that_cannot_take_the_kv_serves_the_request_colocated():
    p, d, e = prefill(), decode(refusing(503)), decode(refusing(500), speaking(5, 6), name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    (again,) = [call for call in e.calls if call.leg == "decode" and "kv_transfer_params" not in call.body]
    assert again.headers["X-Request-Id"].endswith("-2-decode")
    assert (p.legs(), service.record.split, service.record.decode_engine) == (["prefill"], False, "decode-1")


async def test_each_decode_is_charged_only_while_it_is_asked():
    more = asyncio.Event()
    d = decode(refusing(503))
    e = decode(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE), name="decode-1")
    async with serving(prefill(), d, e) as service:
        task = asyncio.create_task(service.ask())
        await e.call()
        assert service.outstanding() == {"decode-1": 5}
        more.set()
        await task


# decode fails in the middle of its answer

BREAKS = {
    "error event": (streaming(chunk(5), {"error": {"message": "gone", "code": 500}}, DONE), "gone"),
    "4xx event": (streaming(chunk(5), {"error": {"message": "now it says no", "code": 400}}, DONE), "now it says no"),
    "ends": (streaming(chunk(5)), "the stream ended before the answer did"),
    "cut": (streaming(chunk(5), cut=True), "broke off its answer"),
    "failed": (
        streaming(chunk(5), chunk(finish_reason="error"), DONE),
        "generating failed in the engine (finish_reason error)",
    ),
    "aborted": (
        streaming(chunk(5), chunk(finish_reason="abort"), DONE),
        "the engine ended the request (finish_reason abort)",
    ),
    "bad bytes": (streaming(chunk(5), b"data: {oops\n\n"), "sent an event that is not JSON"),
}


@pytest.mark.parametrize(("reply", "problem"), BREAKS.values(), ids=BREAKS)
async def test_an_answer_that_breaks_off_is_continued_on_another_engine(reply, problem):
    """Prompt and answer so far are computed anew, and the client sees one answer."""
    p, d, e = prefill(), decode(reply), decode(speaking(6, 7), name="decode-1")
    async with serving(p, d, e) as service:
        chunks = await service.ask(sampling={"temperature": 0.7, "max_tokens": 3, "min_tokens": 2})
    assert tokens_of(chunks) == [5, 6, 7]
    assert [one.finish_reason for one in chunks] == [None, None, "length"]
    assert p.legs() == ["prefill", "prefill"]
    for call in (p.calls[1], e.calls[0]):
        assert call.body["token_ids"] == [11, 12, 13, 5]
    assert e.calls[0].body["sampling_params"] == {"temperature": 0.7, "max_tokens": 2, "min_tokens": 1}
    record = service.record
    assert (record.split, record.attempts, record.resumes, record.completion_tokens) == (True, 2, 1, 3)
    assert (record.decode_engine, record.finish_reason, record.error) == ("decode-1", "length", None)
    assert record.reason == f"a pair is ready (decode-0: {problem})"


async def test_tokens_that_were_taken_as_they_came_belong_to_the_answer():
    """They count as those in chunks do, and an answer that breaks off is continued behind them."""
    gates = [asyncio.Event() for _ in range(4)]
    broken = streaming(chunk(4), gates[0], chunk(5), gates[1], chunk(6), gates[2], chunk(7), gates[3], cut=True)
    d, other = decode(broken), decode(speaking(8), name="decode-1")
    taken: list[int] = []
    async with serving(prefill(), d, other) as service:
        asking = asyncio.create_task(service.ask(sampling={"max_tokens": 9}, take=taken.extend))
        for number, gate in enumerate(gates):
            await holds(lambda number=number: len(service.chunks) + len(taken) > number)
            gate.set()
        chunks = await asking
    assert (tokens_of(chunks), taken) == ([4, 5, 8], [6, 7])
    assert other.calls[0].body["token_ids"] == [11, 12, 13, 4, 5, 6, 7]
    record = service.record
    assert (record.completion_tokens, record.resumes) == (5, 1)
    assert sum(record.gaps.one) == 4


async def test_of_an_answer_that_is_kept_until_its_end_nothing_is_taken():
    """It may be begun anew, and would come twice."""
    gates = [asyncio.Event() for _ in range(3)]
    broken = streaming(chunk(4), gates[0], chunk(5), gates[1], chunk(6), gates[2], cut=True)
    d, other = decode(broken), decode(speaking(7, 8), name="decode-1")
    taken: list[int] = []
    async with serving(prefill(), d, other) as service:
        seeded = {"max_tokens": 9, "seed": 7, "temperature": 0.7}
        asking = asyncio.create_task(service.ask(sampling=seeded, whole=True, take=taken.extend))
        for gate in gates:
            await asyncio.sleep(0.02)
            gate.set()
        assert (tokens_of(await asking), taken) == ([7, 8], [])


async def paced(service, taken: list[int], gates: list[asyncio.Event], pause_s: float) -> None:
    for number, gate in enumerate(gates):
        await holds(lambda number=number: len(service.chunks) + len(taken) > number)
        await asyncio.sleep(pause_s)
        gate.set()


@pytest.mark.parametrize("deadline", [False, True])
async def test_tokens_that_are_taken_are_signs_of_life_and_stop_no_deadline(deadline):
    """Six tokens, 0.4 s apart, and then silence, of which 1 s is suffered."""
    gates = [asyncio.Event() for _ in range(6)]
    pieces = [piece for number, gate in enumerate(gates) for piece in (chunk(number + 3), gate)]
    taken: list[int] = []
    patience = Patience(silence_s=1.0, deadline_s=now_s() + 1.4 if deadline else None)
    async with serving(mixed(streaming(*pieces, asyncio.Event()), refusing(500)), patience=patience) as service:
        pacing = asyncio.create_task(paced(service, taken, gates, 0.4))
        begun_s = now_s()
        error = await service.fails(sampling={"max_tokens": 9}, take=taken.extend)
        took_s = now_s() - begun_s
        pacing.cancel()
    if deadline:
        assert (error.status, 1.2 < took_s < 2.4) == (504, True)
    else:
        assert "said nothing for 1 s" in error.message
        assert (len(taken), took_s > 2.8) == (4, True)


async def test_a_colocated_answer_that_breaks_off_is_continued_too():
    m, n = mixed(streaming(chunk(5), cut=True)), mixed(speaking(6), name="mixed-1")
    async with serving(m, n) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert n.calls[0].body["token_ids"] == [11, 12, 13, 5]


async def test_an_answer_that_breaks_off_twice_is_continued_twice(monkeypatch):
    monkeypatch.setattr(life, "_NOTICE_S", 0.0)
    replies = [streaming(chunk(5), cut=True), streaming(chunk(6), chunk(7), cut=True), speaking(8, 9)]
    engines = [mixed(reply, name=f"mixed-{number}") for number, reply in enumerate(replies)]
    async with serving(*engines) as service:
        chunks = await service.ask(sampling={"max_tokens": 5, "temperature": 0.0})
    assert tokens_of(chunks) == [5, 6, 7, 8, 9]
    assert engines[2].calls[0].body["token_ids"] == [11, 12, 13, 5, 6, 7]
    assert engines[2].calls[0].body["sampling_params"]["max_tokens"] == 2
    assert (service.record.attempts, service.record.resumes) == (3, 2)


async def test_cached_tokens_are_told_once_and_of_the_first_engine():
    p = prefill(whole(cached=2), whole(cached=3))
    d, e = decode(streaming(chunk(5), cut=True)), decode(speaking(6, cached=4), name="decode-1")
    async with serving(p, d, e) as service:
        chunks = await service.ask()
    assert [one.cached_tokens for one in chunks] == [2, None]
    assert service.record.cached_tokens == 2


async def test_an_engine_that_continues_tells_no_cached_tokens():
    """Its prompt was another one."""
    m, n = mixed(streaming(chunk(5), cut=True)), mixed(speaking(6, cached=4), name="mixed-1")
    async with serving(m, n) as service:
        chunks = await service.ask()
    assert [one.cached_tokens for one in chunks] == [None, None]
    assert service.record.cached_tokens is None


async def test_an_answer_of_which_only_the_end_is_missing_is_at_its_end():
    d, e = decode(streaming(chunk(5), chunk(6), cut=True)), decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        chunks = await service.ask()
        await service.legs.close()
    assert tokens_of(chunks) == [5, 6]
    assert chunks[-1].finish_reason == "length"
    assert "decode" not in e.legs()


async def test_that_is_so_behind_the_last_attempt_as_well(monkeypatch):
    monkeypatch.setattr(life, "_NOTICE_S", 0.0)
    engines = [mixed(streaming(chunk(token), cut=True), name=f"mixed-{token}") for token in (5, 6, 7)]
    async with serving(*engines) as service:
        chunks = await service.ask(sampling={"max_tokens": 3, "temperature": 0.0})
    assert sorted(tokens_of(chunks)) == [5, 6, 7]
    assert chunks[-1].finish_reason == "length"
    assert (service.record.attempts, service.record.error) == (3, None)


async def test_an_engine_that_broke_off_is_asked_once_more_where_it_is_the_only_one():
    d = decode(streaming(chunk(5), cut=True), speaking(6))
    async with serving(prefill(), d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert d.legs() == ["decode", "decode"]


async def test_it_is_not_asked_a_third_time(monkeypatch):
    monkeypatch.setattr(life, "_NOTICE_S", 0.0)
    m = mixed(streaming(chunk(5), cut=True), streaming(chunk(6), cut=True), speaking(7))
    async with serving(m) as service:
        error = await service.fails(sampling={"max_tokens": 9})
    told = "mixed-0: broke off its answer; mixed-0: broke off its answer"
    assert (error.message, error.status) == (f"no engine could serve this request: {told}", 503)
    assert (tokens_of(service.chunks), len(m.calls)) == ([5, 6], 2)


OBSTACLES = {
    "a grammar": {"structured_outputs": {"regex": "a"}},
    "a penalty that counts the answer's tokens": {"frequency_penalty": 0.5},
    "a seed, whose random numbers begin anew": {"seed": 7, "temperature": 0.7},
    "bad words, which may span both parts": {"bad_words": ["a"]},
}


@pytest.mark.parametrize(("obstacle", "sampling"), OBSTACLES.items(), ids=OBSTACLES)
async def test_an_answer_that_could_not_be_continued_as_one_engine_would_is_the_clients_to_see(obstacle, sampling):
    p, d, e, m = prefill(), decode(BREAKS["error event"][0]), decode(name="decode-1"), mixed()
    async with serving(p, d, e, m) as service:
        error = await service.fails(sampling={"max_tokens": 2, "temperature": 0.0} | sampling)
    expected = f"the answer broke off: decode-0: gone; it cannot be continued on another engine ({obstacle})"
    assert (error.message, error.status, error.error) == (expected, 502, {"message": "gone", "code": 500})
    assert tokens_of(service.chunks) == [5]
    assert (e.calls, m.calls, d.legs()) == ([], [], ["decode"])  # nothing tried elsewhere, nothing to release


@pytest.mark.parametrize("sampling", OBSTACLES.values(), ids=OBSTACLES)
async def test_where_the_client_has_seen_nothing_such_an_answer_is_begun_anew(sampling):
    d, e = decode(streaming(chunk(5), chunk(6), cut=True)), decode(speaking(8, 9), name="decode-1")
    async with serving(prefill(), d, e) as service:
        asked = {"max_tokens": 2, "temperature": 0.0} | sampling
        chunks = await service.ask(sampling=asked, whole=True)
    assert tokens_of(chunks) == [8, 9]
    assert e.calls[0].body["token_ids"] == [11, 12, 13]
    assert e.calls[0].body["sampling_params"] == asked
    assert (service.record.resumes, service.record.completion_tokens) == (0, 2)


async def test_a_whole_answer_that_can_be_continued_is():
    d, e = decode(streaming(chunk(5), cut=True)), decode(speaking(6), name="decode-1")
    async with serving(prefill(), d, e) as service:
        assert tokens_of(await service.ask(whole=True)) == [5, 6]
    assert e.calls[0].body["token_ids"] == [11, 12, 13, 5]


async def test_an_obstacle_before_the_first_token_is_none():
    d, e = decode(cutting()), decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        assert tokens_of(await service.ask(sampling={"max_tokens": 2, "seed": 7})) == [5, 6]


# the request itself is refused


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_prefill_refuses_as_the_clients_fault_is_not_retried(status):
    p, q, d = prefill(refusing(status, "too long")), prefill(name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        error = await service.fails()
    assert (error.message, error.status) == ("too long", status)
    assert error.error == {"message": "too long", "type": "Error", "param": None, "code": status}
    assert (q.calls, d.calls) == ([], [])


async def test_what_decode_refuses_as_the_clients_fault_is_not_retried_and_releases_the_kv():
    p, d, e = prefill(), decode(refusing(400, "odd")), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert await service.refused() == ("odd", 400)
        await service.legs.close()
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], ["decode"], ["release"])


@pytest.mark.parametrize("status", [404, 405, 408, 500])
async def test_other_refusals_of_prefill_are_its_own_trouble(status):
    async with serving(prefill(refusing(status, "a")), decode()) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert service.record.reason == "no prefill engine is ready (prefill-0: a)"


# an engine goes out of service

LOST = ["not ready", "gone", "started anew"]


@pytest.mark.parametrize("how", LOST)
async def test_a_prefill_leg_ends_when_its_engine_goes_out_of_service(how):
    p, q, d = prefill(hanging()), prefill(name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        task = asyncio.create_task(service.ask())
        call = await p.call()
        service.loses("prefill-0", how)
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
        await call.end()
        assert call.cancelled
    assert (service.record.split, service.record.prefill_engine) == (True, "prefill-1")
    assert service.record.reason == "a pair is ready (prefill-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("answered", [False, True])
async def test_a_decode_leg_without_a_token_is_tried_elsewhere_when_its_engine_goes_out_of_service(answered, how):
    reply = streaming(b": waiting\n\n", asyncio.Event()) if answered else hanging()
    p, d, e = prefill(), decode(reply), decode(name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        call = await d.call()
        service.loses("decode-0", how)
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
        await call.end()
        assert call.cancelled
    assert (service.record.split, service.record.decode_engine) == (True, "decode-1")
    assert service.record.reason == "a pair is ready (decode-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
async def test_a_decode_that_goes_out_of_service_while_prefill_runs_is_not_waited_for(how):
    answer = asyncio.Event()
    p = prefill(streaming(answer, json.dumps({"kv_transfer_params": HANDED_OVER}).encode()), whole())
    d, e = decode(hanging()), decode(name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        service.loses("decode-0", how)
        answer.set()
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
    assert service.record.reason == "a pair is ready (decode-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
async def test_an_answer_is_continued_when_its_engine_goes_out_of_service(how):
    p, d, e = prefill(), decode(streaming(chunk(5), asyncio.Event())), decode(speaking(6), name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: service.chunks)
        await asyncio.sleep(0)  # the next token is being waited for
        service.loses("decode-0", how)
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
        await d.calls[0].end()
        assert d.calls[0].cancelled
    assert service.record.reason == "a pair is ready (decode-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
async def test_an_answer_is_continued_when_its_engine_went_while_the_client_was_busy(how):
    p, d, e = prefill(), decode(streaming(chunk(5), asyncio.Event())), decode(speaking(6), name="decode-1")
    async with serving(p, d, e) as service:
        chunks = service.legs.run(token_request())
        assert (await anext(chunks)).token_ids == [5]
        service.loses("decode-0", how)
        assert tokens_of([one async for one in chunks]) == [6]


async def test_a_request_under_which_two_engines_ended_is_not_given_a_third():
    lasting = [mixed(streaming(chunk(token), asyncio.Event()), name=f"mixed-{token}") for token in (5, 6)]
    last = mixed(name="mixed-9")
    async with serving(*lasting, last) as service:
        task = asyncio.create_task(service.fails(sampling={"max_tokens": 9}))
        for number, engine in enumerate(lasting):
            await engine.call()
            await holds(lambda number=number: len(service.chunks) > number)
            service.loses(engine.name, "gone")
        error = await asyncio.wait_for(task, WAIT_S)
    told = "mixed-5: went out of service; mixed-6: went out of service"
    assert (error.message, error.status) == (f"no engine could serve this request: {told}", 503)
    assert (tokens_of(service.chunks), last.calls) == ([5, 6], [])


@pytest.mark.parametrize("how", LOST)
async def test_it_makes_no_difference_how_they_ended(how):
    """The fleet may already know them anew, or no more, when they fail the request."""
    p, last = prefill(), decode(name="decode-9")
    lasting = [decode(streaming(chunk(token), asyncio.Event()), name=f"decode-{token}") for token in (5, 6)]
    async with serving(p, *lasting, last) as service:
        task = asyncio.create_task(service.fails(sampling={"max_tokens": 9, "temperature": 0.0}))
        for number, engine in enumerate(lasting):
            await engine.call()
            await holds(lambda number=number: len(service.chunks) > number)
            service.loses(engine.name, how)
        assert (await asyncio.wait_for(task, WAIT_S)).status == 503
    assert "decode" not in last.legs()


async def test_a_decode_that_was_asked_in_anothers_place_counts_as_well():
    full, d = decode(refusing(503)), decode(streaming(chunk(5), asyncio.Event()), name="decode-1")
    e, last = decode(streaming(chunk(6), asyncio.Event()), name="decode-2"), decode(name="decode-9")
    async with serving(prefill(), full, d, e, last) as service:
        task = asyncio.create_task(service.fails(sampling={"max_tokens": 9, "temperature": 0.0}))
        for number, engine in enumerate([d, e]):
            await engine.call()
            await holds(lambda number=number: len(service.chunks) > number)
            service.loses(engine.name, "gone")
        assert (await asyncio.wait_for(task, WAIT_S)).status == 503
    assert "decode" not in last.legs()


async def test_two_lost_connections_are_no_two_ended_engines(monkeypatch):
    monkeypatch.setattr(life, "_NOTICE_S", 0.0)
    engines = [mixed(cutting(), name="mixed-0"), mixed(cutting(), name="mixed-1"), mixed(name="mixed-2")]
    async with serving(*engines) as service:
        assert tokens_of(await service.ask()) == [8, 9]


async def test_a_colocated_leg_ends_when_its_engine_goes_out_of_service():
    m, d = mixed(hanging()), decode()
    async with serving(m, d) as service:
        task = asyncio.create_task(service.ask(unsplittable="it is special"))
        await m.call()
        service.loses("mixed-0", "gone")
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
    assert service.record.reason == "it is special (mixed-0: went out of service)"


async def test_a_leg_runs_on_when_another_engine_goes_out_of_service():
    more = asyncio.Event()
    d, e = decode(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE)), decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: service.chunks)
        service.loses("decode-1", "gone")
        service.loses("prefill-0", "gone")
        more.set()
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]


# nothing can serve


async def test_without_engines_the_service_is_not_available():
    async with serving() as service:
        assert await service.refused() == ("no engine is ready to serve this request", 503)
    assert service.record.error == "no engine is ready to serve this request"


async def test_when_every_engine_fails_each_fault_is_told():
    async with serving(prefill(refusing(500, "a")), decode(refusing(503, "b"))) as service:
        error = await service.fails()
    assert (error.message, error.status) == ("no engine could serve this request: prefill-0: a; decode-0: b", 503)
    assert error.error["message"] == "b"


async def test_without_an_engine_that_answers_the_service_is_not_available():
    with nobody_listens() as url:
        async with serving(dead("prefill-0", "prefill", url), dead("decode-0", "decode", url)) as service:
            message, status = await service.refused()
    assert status == 503
    assert message.startswith("no engine could serve this request: prefill-0: cannot be reached (")
    assert "; decode-0: cannot be reached (" in message


async def test_the_third_attempt_is_colocated():
    broken = [prefill(refusing(500), name=f"prefill-{number}") for number in range(4)]
    async with serving(*broken, decode()) as service:
        await service.ask()
    assert [len(one.calls) for one in broken] == [1, 1, 0, 0]
    assert service.record.split is False
    assert service.record.reason.startswith("split failed (prefill-0: ")


async def test_three_attempts_are_enough(monkeypatch):
    monkeypatch.setattr(life, "_NOTICE_S", 0.0)
    broken = [prefill(refusing(500), name=f"prefill-{number}") for number in range(3)]
    last = [decode(cutting(), name="decode-0"), decode(name="decode-1")]
    async with serving(*broken, *last) as service:
        _, status = await service.refused()
    assert status == 503
    assert sum(len(one.calls) for one in (*broken, *last)) == 3
    assert service.record.attempts == 3


# the client goes away


async def test_cancelling_during_prefill_closes_its_connection():
    p, d = prefill(hanging()), decode()
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        call = await p.call()
        await cancelled(task)
        assert service.outstanding() == {}
        await call.end()
        assert call.cancelled
    assert d.calls == []
    assert (service.record.finish_reason, service.record.error) == ("abort", None)


async def test_cancelling_before_decodes_first_token_releases_the_kv():
    p, d = prefill(), decode(hanging(), speaking(5))
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        call = await d.call()
        await cancelled(task)
        assert service.outstanding() == {}
        assert service.legs.releases.pending == 1
        await call.end()
        assert call.cancelled
        releasing = await d.call(1)
        await releasing.end()
        assert (releasing.leg, releasing.body["kv_transfer_params"]) == ("release", HANDED_OVER)
    assert service.record.finish_reason == "abort"


async def test_cancelling_a_decode_leg_that_was_accepted_releases_nothing(monkeypatch):
    """Decode tells prefill itself."""
    accepted, original = asyncio.Event(), tokens.stream

    def stream(*arguments, **more):
        def on_accepted():
            arguments[-1]()
            accepted.set()

        return original(*arguments[:-1], on_accepted, **more)

    monkeypatch.setattr(tokens, "stream", stream)
    p, d = prefill(), decode(streaming(b": waiting\n\n", asyncio.Event()))
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await asyncio.wait_for(accepted.wait(), WAIT_S)
        await cancelled(task)
        assert service.legs.releases.pending == 0
        await d.calls[0].end()
        assert d.calls[0].cancelled
    assert d.legs() == ["decode"]


async def test_cancelling_between_the_legs_releases_the_kv():
    """The client leaves while it is handed prefill's token: decode has not been asked yet."""
    p, d = prefill(), decode(speaking(5))
    async with serving(p, d, connector=SeedingConnector()) as service:
        chunks = service.legs.run(token_request())
        assert (await anext(chunks)).token_ids == [7]
        assert d.calls == []
        await chunks.aclose()
        assert service.outstanding() == {}
        releasing = await d.call()
        assert (releasing.leg, releasing.body["kv_transfer_params"]) == ("release", HANDED_OVER)
    assert service.record.finish_reason == "abort"


async def test_cancelling_behind_decodes_first_token_ends_it_and_releases_nothing():
    p, d = prefill(), decode(streaming(chunk(5), asyncio.Event()))
    async with serving(p, d) as service:
        chunks = service.legs.run(token_request())
        assert (await anext(chunks)).token_ids == [5]
        assert service.outstanding() == {"decode-0": 5}
        await chunks.aclose()
        await d.calls[0].end()
        assert d.calls[0].cancelled
        assert service.legs.releases.pending == 0
    assert d.legs() == ["decode"]
    assert (service.record.finish_reason, service.record.completion_tokens) == ("abort", 1)


async def test_cancelling_a_colocated_request_ends_it():
    m = mixed(streaming(chunk(5), asyncio.Event()))
    async with serving(m) as service:
        task = asyncio.create_task(service.ask())
        call = await m.call()
        await cancelled(task)
        await call.end()
        assert call.cancelled


# releasing


async def held_without_a_taker(*engines) -> tuple[Service, list[str]]:
    """A service whose client left with KV held, and what each decode engine was asked."""
    async with serving(prefill(), *engines) as service:
        task = asyncio.create_task(service.ask())
        await engines[0].call()
        await cancelled(task)
        await service.legs.close()
    return service, [one.legs() for one in engines]


async def test_one_engine_releases_and_it_is_not_the_one_that_just_failed():
    _, legs = await held_without_a_taker(decode(hanging(), speaking(5)), decode(name="decode-1"))
    assert legs == [["decode"], ["release"]]


async def test_an_engine_that_cannot_release_leaves_it_to_the_next():
    d, e = decode(hanging(), speaking(5)), decode(refusing(500), name="decode-1")
    _, legs = await held_without_a_taker(d, e)
    assert legs == [["decode", "release"], ["release"]]


async def test_kv_that_nobody_can_release_is_left_to_its_lease_with_a_word(caplog):
    service, legs = await held_without_a_taker(decode(hanging(), refusing(500)))
    assert legs == [["decode", "release"]]
    told = f"KV of {service.record.generation_id}: no engine confirmed its release"
    assert told in caplog.messages
    assert service.legs.releases.unconfirmed == 1


async def test_kv_is_released_where_decode_hangs(monkeypatch):
    """The release leg is ended, which makes its engine tell prefill all the same."""
    monkeypatch.setattr(release, "_LAST_S", 0.2)
    monkeypatch.setattr(release, "_PATIENCE_S", 0.05)
    d = decode(hanging())
    async with serving(prefill(), d, aborts=True) as service:
        task = asyncio.create_task(service.ask())
        leg = await d.call()
        await cancelled(task)
        ending = await d.call(1)
        assert (await d.abort(), await d.abort(1)) == (engine_id(leg), engine_id(ending))
        await ending.end()
        assert (ending.leg, ending.cancelled) == ("release", True)


async def test_closing_gives_up_on_a_release_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(release, "_CLOSE_S", 0.05)
    d = decode(hanging())
    async with serving(prefill(), d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        await cancelled(task)
        ending = await d.call(1)
        await asyncio.wait_for(service.legs.close(), AT_ONCE_S)
        await ending.end()
        assert (ending.leg, ending.cancelled) == ("release", True)


async def test_closing_waits_for_releases():
    hold = asyncio.Event()
    d = decode(hanging(), streaming(hold, chunk(5, finish_reason="length"), usage(), DONE))
    async with serving(prefill(), d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        await cancelled(task)
        closing = asyncio.create_task(service.legs.close())
        await d.call(1)
        assert not closing.done()
        hold.set()
        await asyncio.wait_for(closing, WAIT_S)
        assert service.legs.releases.pending == 0


# connectors that hand over the first token


async def test_the_first_token_comes_from_prefill_and_decode_continues_after_it():
    hold = asyncio.Event()
    p = prefill(whole(7, cached=2))
    d = decode(streaming(hold, chunk(8), chunk(9, finish_reason="length"), usage(3), DONE))
    async with serving(p, d, connector=SeedingConnector()) as service:
        chunks = service.legs.run(token_request(sampling={"temperature": 0.0, "max_tokens": 3, "top_k": 5}))
        assert await asyncio.wait_for(anext(chunks), WAIT_S) == TokenChunk([7], cached_tokens=2)
        hold.set()
        rest = [one async for one in chunks]
    assert [(list(one.token_ids), one.finish_reason, one.cached_tokens) for one in rest] == [
        ([8], None, None),
        ([9], "length", None),
    ]
    assert p.calls[0].body["sampling_params"] == {"temperature": 0.0, "max_tokens": 1, "top_k": 5}
    assert d.calls[0].body["token_ids"] == [11, 12, 13, 7]
    assert d.calls[0].body["sampling_params"] == {"temperature": 0.0, "max_tokens": 2, "top_k": 5}
    assert d.calls[0].body["kv_transfer_params"] == HANDED_OVER
    assert (service.record.split, service.record.completion_tokens) == (True, 3)


async def test_cached_tokens_of_a_decode_that_had_only_to_continue_are_not_told():
    async with serving(
        prefill(whole(7, cached=2)), decode(speaking(8, cached=3)), connector=SeedingConnector()
    ) as service:
        assert [one.cached_tokens for one in await service.ask()] == [2, None]


@pytest.mark.parametrize(
    ("finish", "limit", "expected"), [("stop", 5, "stop"), ("length", 1, "length"), ("stop", 1, "stop")]
)
async def test_an_answer_of_one_token_needs_no_decode_and_releases_the_kv(finish, limit, expected):
    p, d = prefill(whole(7, finish=finish)), decode(speaking(5))
    async with serving(p, d, connector=SeedingConnector()) as service:
        (only,) = await service.ask(sampling={"temperature": 0.0, "max_tokens": limit})
        await service.legs.close()
    assert (only.token_ids, only.finish_reason) == ([7], expected)
    assert d.legs() == ["release"]
    assert service.record.finish_reason == expected


async def test_where_its_token_could_not_be_continued_decode_makes_the_first_one():
    p, d = prefill(whole(7)), decode()
    async with serving(p, d, connector=SeedingConnector()) as service:
        chunks = await service.ask(sampling={"temperature": 0.0, "max_tokens": 2, "bad_words": ["a"]})
    assert tokens_of(chunks) == [5, 6]
    assert p.calls[0].body["sampling_params"]["min_tokens"] == 1
    assert d.calls[0].body["token_ids"] == [11, 12, 13]


async def test_a_token_without_kv_behind_it_is_not_handed_over():
    p, d = prefill(whole(7, params=None)), decode()
    async with serving(p, d, connector=SeedingConnector()) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert d.calls[0].body["token_ids"] == [11, 12, 13]
    assert service.record.split is False


async def test_decode_that_fails_behind_prefills_token_is_continued_elsewhere_and_its_kv_released():
    p, d, e = prefill(), decode(refusing(500)), decode(speaking(8), name="decode-1")
    async with serving(p, d, e, connector=SeedingConnector()) as service:
        assert tokens_of(await service.ask()) == [7, 8]
        await service.legs.close()
    assert p.calls[1].body["token_ids"] == [11, 12, 13, 7]
    assert p.calls[1].body["sampling_params"]["min_tokens"] == 1  # its token is not used
    (again,) = [call for call in e.calls if call.leg == "decode"]
    assert again.body["token_ids"] == [11, 12, 13, 7]
    assert sorted(e.legs()) == ["decode", "release"]


async def test_a_decode_that_is_full_behind_prefills_token_is_replaced():
    p, d, e = prefill(), decode(refusing(503)), decode(speaking(8), name="decode-1")
    async with serving(p, d, e, connector=SeedingConnector()) as service:
        assert tokens_of(await service.ask()) == [7, 8]
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], ["decode"], ["decode"])
    assert e.calls[0].body["token_ids"] == [11, 12, 13, 7]
    assert service.record.resumes == 0


# log-probabilities of the prompt

TOLD = [None, {"12": {"logprob": -2.0, "rank": 1}}, {"13": {"logprob": -1.0, "rank": 1}}]
READ = [TokenLogprobs([12], [-2.0], 1), TokenLogprobs([13], [-1.0], 1)]


def telling(*tokens: int, told: object = TOLD) -> Reply:
    """A whole answer with the prompt's log-probabilities."""
    choice = {"index": 0, "token_ids": list(tokens), "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": 0}}
    return json_answer(
        {"choices": [choice], "usage": usage, "prompt_logprobs": told, "kv_transfer_params": HANDED_OVER}
    )


async def test_the_prompts_log_probabilities_are_prefills_and_come_first():
    p, d = prefill(telling(7)), decode()
    async with serving(p, d) as service:
        chunks = await service.ask(prompt_logprobs=0)
    assert [one.prompt_logprobs for one in chunks] == [READ, None]
    assert p.calls[0].body["sampling_params"]["prompt_logprobs"] == 0
    assert "prompt_logprobs" not in d.calls[0].body["sampling_params"]
    assert service.record.split is True


async def test_a_colocated_request_with_them_is_not_streamed():
    m = mixed(telling(8, 9))
    async with serving(m) as service:
        (only,) = await service.ask(prompt_logprobs=0)
    assert (list(only.token_ids), only.finish_reason, only.prompt_logprobs) == ([8, 9], "length", READ)
    assert only.cached_tokens == 0
    assert (m.calls[0].body["stream"], m.calls[0].body["sampling_params"]["prompt_logprobs"]) == (False, 0)


@pytest.mark.parametrize("told", [None, [], [None], "x", [None, {}, {}]])
async def test_a_prefill_that_tells_them_wrongly_is_replaced(told):
    p, q, d = prefill(telling(7, told=told)), prefill(telling(7), name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        chunks = await service.ask(prompt_logprobs=0)
    if told:
        assert chunks[0].prompt_logprobs == READ
        assert service.record.prefill_engine == "prefill-1"
    else:
        assert (chunks[0].prompt_logprobs, service.record.prefill_engine) == (None, "prefill-0")


async def test_they_are_told_once_also_where_the_answer_breaks_off():
    p = prefill(telling(7), whole(7))
    d, e = decode(streaming(chunk(5), cut=True)), decode(speaking(6), name="decode-1")
    async with serving(p, d, e) as service:
        chunks = await service.ask(prompt_logprobs=0)
    assert [(list(one.token_ids), one.prompt_logprobs) for one in chunks] == [([5], READ), ([6], None)]
    assert "prompt_logprobs" not in p.calls[1].body["sampling_params"]


# what clients steer, where they may


async def test_a_client_that_steers_the_transfer_is_served_as_it_says():
    p, d = prefill(), decode()
    owner = Journal().open("req-1", "/v1/completions")
    owner.may_steer = True
    async with serving(p, d) as service:
        with owned_by(owner):
            await service.ask(kv_transfer_params={"mine": 1})
    assert (p.calls, d.calls[0].body["kv_transfer_params"]) == ([], {"mine": 1})
    assert service.record.reason == "the client steers the transfer"


@pytest.mark.parametrize("owned", [True, False])
async def test_who_may_not_steer_does_not(owned):
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        with owned_by(Journal().open("req-1", "/v1/completions")) if owned else contextlib.nullcontext():
            await service.ask(kv_transfer_params={"mine": 1}, ec_transfer_params={"mine": 2})
    assert p.legs() == ["prefill"]
    assert d.calls[0].body["kv_transfer_params"] == HANDED_OVER
    assert "ec_transfer_params" not in d.calls[0].body


PICTURED = Features((Item("image", 0, 1),), [b'{"mm_hashes":{"image":["image"]}}'])


async def test_images_go_with_both_legs_and_with_what_continues_the_answer():
    p, d, e = prefill(), decode(streaming(chunk(5), cut=True)), decode(speaking(6), name="decode-1")
    async with serving(p, d, e) as service:
        await service.ask(features=PICTURED)
    sent = [call.body["features"] for engine in (p, d, e) for call in engine.calls]
    assert len(sent) == 4  # prefilled anew for the rest
    assert sent == [{"mm_hashes": {"image": ["image"]}}] * 4
    assert e.calls[0].body["token_ids"][-1] == 5


@pytest.mark.parametrize(
    ("path", "steers", "served"),
    [
        ("/inference/v1/generate", False, False),
        ("/inference/v1/generate", True, True),
        ("/v1/chat/completions", False, True),
    ],
)
async def test_tensors_that_a_client_makes_itself_are_for_those_who_may_steer(path, steers, served):
    """Of another shape than the model's they end an engine; those of a chat the gateway has made."""
    p, d = prefill(), decode()
    owner = Journal().open("req-1", path)
    owner.may_steer = steers
    async with serving(p, d) as service:
        with owned_by(owner):
            if served:
                await service.ask(features=PICTURED)
            else:
                with pytest.raises(ServingError, match="not for clients of this service") as caught:
                    await service.ask(features=PICTURED)
                assert caught.value.status == 400
            await service.ask()  # text is for everyone
    assert len(p.calls) == 1 + served


async def test_a_conversation_reaches_engines_as_a_header():
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        await service.ask(session_id="talk-1")
        await service.ask()
    for engine in (p, d):
        assert [call.headers.get("x-session-id") for call in engine.calls] == ["talk-1", None]


async def test_where_engines_have_an_obstacle_no_answer_is_continued():
    d, e = mixed(streaming(chunk(5), cut=True), name="mixed-0"), mixed(name="mixed-1")
    async with serving(d, e) as service:
        service.legs._obstacle = "engines count"
        error = await service.fails()
    assert (error.status, e.calls) == (502, [])
    assert error.message.endswith("it cannot be continued on another engine (engines count)")


async def test_an_answer_that_is_kept_is_stamped_while_it_is():
    more = asyncio.Event()
    m = mixed(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE))
    owner = Journal().open("req-1", "/v1/completions")
    async with serving(m) as service:
        with owned_by(owner):
            task = asyncio.create_task(service.ask(whole=True, sampling={"max_tokens": 2, "seed": 7}))
        await holds(lambda: owner.generations and owner.generations[0].first_token_s)
        assert (service.chunks, owner.generations[0].completion_tokens) == ([], 1)
        first_s = owner.generations[0].first_token_s
        more.set()
        await task
    assert (service.record.first_token_s, service.record.completion_tokens) == (first_s, 2)


# time


def owner_of(seconds: float) -> RequestRecord:
    """A request whose client waits so long."""
    owner = Journal().open("req-1", "/v1/completions")
    owner.deadline_s = now_s() + seconds
    return owner


LATE = ("the request's deadline has passed", 504)


async def test_a_deadline_ends_the_prefill_leg():
    p, d = prefill(hanging()), decode()
    async with serving(p, d, aborts=True) as service:
        with owned_by(owner_of(0.05)):
            assert await service.refused() == LATE
        assert await p.abort() == engine_id(p.calls[0])
        await p.calls[0].end()
    assert d.calls == []


async def test_a_deadline_ends_the_decode_leg_and_releases_the_kv():
    p, d = prefill(), decode(hanging(), speaking(5))
    async with serving(p, d, aborts=True) as service:
        with owned_by(owner_of(0.1)):
            assert await service.refused() == LATE
        await d.calls[0].end()
        assert await d.abort() == engine_id(d.calls[0])
        assert (await d.call(1)).leg == "release"


async def test_a_deadline_ends_an_answer_also_one_that_could_be_continued():
    d, e = decode(streaming(chunk(5), asyncio.Event())), decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        with owned_by(owner_of(0.2)):
            assert await service.refused() == LATE
    assert (tokens_of(service.chunks), e.calls) == ([5], [])


async def test_a_deadline_that_has_passed_is_that_whatever_else_is_waited_for():
    async with serving(mixed(hanging()), patience=Patience(silence_s=None)) as service:
        with owned_by(owner_of(-1.0)):
            assert await service.refused() == LATE


async def test_a_deadline_that_does_not_pass_changes_nothing():
    async with serving(prefill(), decode()) as service:
        with owned_by(owner_of(60.0)):
            assert tokens_of(await service.ask()) == [5, 6]


IMPATIENT = Patience(silence_s=0.1)


async def test_a_prefill_that_says_nothing_is_replaced():
    p, q, d = prefill(hanging()), prefill(name="prefill-1"), decode()
    async with serving(p, q, d, patience=IMPATIENT) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert service.record.reason == "a pair is ready (prefill-0: said nothing for 0.1 s)"


async def test_a_decode_that_says_nothing_is_replaced():
    d, e = decode(hanging()), decode(name="decode-1")
    async with serving(prefill(), d, e, patience=IMPATIENT) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert service.record.decode_engine == "decode-1"


async def test_a_decode_that_falls_silent_is_continued_elsewhere():
    d, e = decode(streaming(chunk(5), asyncio.Event())), decode(speaking(6), name="decode-1")
    async with serving(prefill(), d, e, patience=IMPATIENT) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert service.record.resumes == 1


@pytest.mark.parametrize("sampling", [{}, {"seed": 7, "temperature": 0.7}])
async def test_an_engine_that_speaks_slowly_is_not_silent(sampling):
    """Also where the answer is kept until its end."""

    async def reply(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for token in range(5):
            await asyncio.sleep(0.05)
            await answer.write(sse(chunk(token, finish_reason="length" if token == 4 else None)))
        return answer

    async with serving(mixed(reply), patience=Patience(silence_s=0.15)) as service:
        chunks = await service.ask(sampling={"max_tokens": 5, "temperature": 0.0} | sampling, whole=True)
    assert [list(one.token_ids) for one in chunks] == [[0], [1], [2], [3], [4]]


# the client goes away, and engines can be told


def engine_id(call: Call) -> str:
    return f"generate-tokens-{call.headers['X-Request-Id']}"


async def test_a_prefill_leg_is_aborted_at_once():
    p = prefill(hanging())
    async with serving(p, decode(), aborts=True) as service:
        task = asyncio.create_task(service.ask())
        call = await p.call()
        async with asyncio.timeout(AT_ONCE_S):
            await cancelled(task)
            assert await p.abort() == engine_id(call)


async def test_a_decode_leg_is_aborted_at_once():
    d = decode(streaming(chunk(5), asyncio.Event()))
    async with serving(prefill(), d, aborts=True) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: service.chunks)
        async with asyncio.timeout(AT_ONCE_S):
            await cancelled(task)
            assert await d.abort() == engine_id(d.calls[0])
            await d.calls[0].end()


async def test_a_decode_leg_that_has_not_answered_is_aborted_at_once_and_its_kv_released():
    d = decode(hanging(), speaking(5))
    async with serving(prefill(), d, aborts=True) as service:
        task = asyncio.create_task(service.ask())
        call = await d.call()
        async with asyncio.timeout(AT_ONCE_S):
            await cancelled(task)
            assert await d.abort() == engine_id(call)
            assert (await d.call(1)).leg == "release"


async def test_a_leg_that_ended_by_itself_is_not_aborted():
    p, d = prefill(), decode()
    async with serving(p, d, aborts=True) as service:
        await service.ask()
        d.replies = [refusing(500), speaking(5, 6)]
        await service.ask()
        await service.legs.close()
    assert (p.aborted, d.aborted) == ([], [])


async def test_an_engine_that_has_no_such_endpoint_is_not_asked():
    d = decode(streaming(chunk(5), asyncio.Event()))
    async with serving(prefill(), d) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: service.chunks)
        await cancelled(task)
        await d.calls[0].end()
        await service.legs.close()
    assert d.aborted == []


async def test_kv_of_a_prefill_leg_that_answers_when_its_client_has_left_is_released():
    answer = asyncio.Event()
    content = json.dumps({"kv_transfer_params": HANDED_OVER, "choices": []}).encode()
    p, d = prefill(streaming(answer, content)), decode(speaking(5))
    async with serving(p, d, aborts=True) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        await cancelled(task)
        assert service.outstanding() == {}
        await p.abort()
        answer.set()
        releasing = await d.call()
        assert (releasing.leg, releasing.body["kv_transfer_params"]) == ("release", HANDED_OVER)


async def test_an_abort_that_overtook_its_request_is_repeated():
    p = prefill(hanging())
    async with serving(p, decode(), aborts=True) as service:
        task = asyncio.create_task(service.ask())
        call = await p.call()
        await cancelled(task)
        assert {await p.abort(), await p.abort(1)} == {engine_id(call)}


async def test_a_client_that_leaves_while_its_prefill_fails_leaves_nothing():
    """The failure of a leg that nobody waits for is nobody's."""
    answer = asyncio.Event()
    p = prefill(streaming(answer, b"{oops"))
    async with serving(p, decode(), aborts=True) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        await cancelled(task)
        answer.set()
        await service.legs.close()


@pytest.mark.parametrize("aborts", [True, False])
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(aborts):
    """Charges, counts, tasks and releases: ``serving`` looks."""
    dice = random.Random(7)
    never = asyncio.Event()
    prefills = [
        prefill(
            *dice.choices([whole(), whole(), whole(), hanging(), cutting(), refusing(503)], k=40), name=f"prefill-{n}"
        )
        for n in (0, 1)
    ]
    said = [
        speaking(5, 6),
        streaming(chunk(5), never),
        hanging(),
        refusing(500),
        refusing(429),
        cutting(),
        streaming(chunk(5), cut=True),
        streaming(b": waiting\n\n", never),
    ]
    decodes = [decode(*dice.choices(said, k=80), speaking(5, 6), name=f"decode-{n}") for n in (0, 1)]
    async with serving(*prefills, *decodes, aborts=aborts, patience=Patience(silence_s=0.3)) as service:

        async def client() -> None:
            with contextlib.suppress(ServingError, TimeoutError):
                async with asyncio.timeout(dice.random() * 0.2):
                    async for _ in service.legs.run(token_request()):
                        if dice.random() < 0.1:
                            break

        await asyncio.gather(*(client() for _ in range(150)))
        assert service.legs.running == 0
        assert service.outstanding() == {}
    assert len(service.records) == 150
