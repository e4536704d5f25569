"""A rendered request as legs send it; the way that requests take between engines: ``test_life``."""

import asyncio
import json

import aiohttp
import pytest

from helpers.engines import (
    DONE,
    HANDED_OVER,
    FakeEngine,
    chunk,
    json_answer,
    speaking,
    streaming,
    token_request,
    tokens_of,
    usage,
    whole,
)
from trivet.journal import GenerationRecord
from trivet.legs.ask import Computed, Leg
from trivet.legs.tokens import TokenAsk
from trivet.legs.wire import LegError, open_session
from trivet.render.contract import TokenChunk

PARAMS = {"remote_port": 1}


@pytest.fixture
async def session():
    async with open_session() as session:
        yield session


@pytest.fixture
async def engine():
    async with FakeEngine("decode-0", "decode") as engine:
        yield engine


def ask_of(**changes) -> TokenAsk:
    return TokenAsk(token_request(**changes), {"traceparent": "00-1"}, None)


def leg_to(engine: FakeEngine, session: aiohttp.ClientSession, role: str = "decode", blocks: int | None = None) -> Leg:
    view = engine.view()
    view = type(view)(view.name, view.tier, view.url, True, cached_block_tokens=blocks)
    return Leg(role, view, f"id-1-{role}", session, {"X-Request-Id": f"id-1-{role}"})


async def decoded(ask: TokenAsk, leg: Leg, params=None, computed=None) -> list[TokenChunk]:
    """What a decode leg gives, written down as the life of a generation does."""
    record, chunks = GenerationRecord("gen", 3, 0.0), []
    async for one in ask.decode(leg, params, computed, lambda: None):
        ask.note(record, one)
        if not one.is_empty:
            chunks.append(one)
    return chunks


def test_what_it_says_of_itself():
    one, other = ask_of(), ask_of()
    assert one.request_id != other.request_id
    assert one.headers == {"traceparent": "00-1"}
    assert (one.prompt_tokens, one.tokens, one.unsplittable, one.begun, one.obstacle) == (3, 5, None, False, None)
    assert one.may_take_first_token
    assert ask_of(sampling={"max_tokens": None}).tokens == 3
    assert ask_of(sampling={"seed": 7}).obstacle == "a seed, whose random numbers begin anew"


async def test_the_engines_id_of_a_leg(session, engine):
    assert ask_of().engine_id(leg_to(engine, session)) == "generate-tokens-id-1-decode"


async def test_what_was_given_out_is_remembered(session, engine):
    ask = ask_of(sampling={"max_tokens": 9, "temperature": 0.0})
    record = GenerationRecord("gen", 3, 0.0)
    ask.note(record, TokenChunk([5, 6]))
    ask.note(record, TokenChunk([]))
    assert (ask.begun, ask.prompt_tokens, ask.may_take_first_token) == (True, 5, False)
    assert (record.completion_tokens, record.finish_reason, record.end_s) == (2, None, None)
    engine.replies = [whole(7), speaking(7, 8), speaking(1)]
    prefilled = await ask.prefill(leg_to(engine, session, "prefill"), PARAMS, sample=False)
    await decoded(ask, leg_to(engine, session))
    await ask.release(leg_to(engine, session, "release"), PARAMS, prefilled.prompt)
    sent = [call.body["token_ids"] for call in engine.calls]
    assert sent == [[11, 12, 13, 5, 6]] * 3  # also the release: what was prefilled, whatever came since


def test_a_record_is_written_as_pieces_come():
    ask, record = ask_of(), GenerationRecord("gen", 3, 0.0)
    ask.note(record, TokenChunk([5], cached_tokens=2, created_cache_tokens=1))
    assert (record.cached_tokens, record.cached_late) == (2, None)
    first_s = record.first_token_s
    assert first_s is not None
    ask.note(record, TokenChunk([6], finish_reason="stop", cached_tokens=3, created_cache_tokens=0))
    assert record.first_token_s == first_s
    assert (record.completion_tokens, record.finish_reason) == (2, "stop")
    assert record.cached_late == {"cached_tokens": 3, "created_cache_tokens": 0}
    assert record.end_s >= first_s


@pytest.mark.parametrize(
    ("finish", "limit", "finished", "reason"),
    [("length", 2, False, None), ("length", 1, True, "length"), ("stop", 2, True, "stop")],
)
async def test_a_sampled_first_token(session, engine, finish, limit, finished, reason):
    engine.replies = [whole(7, cached=2, finish=finish)]
    ask = ask_of(sampling={"max_tokens": limit, "temperature": 0.0})
    prefilled = await ask.prefill(leg_to(engine, session, "prefill", blocks=1), PARAMS, sample=True)
    assert prefilled.first == TokenChunk([7], finish_reason=reason, cached_tokens=2, created_cache_tokens=1)
    assert (prefilled.finished, prefilled.cached_tokens) == (finished, 2)
    assert prefilled.kv_transfer_params == HANDED_OVER


async def test_a_token_that_is_thrown_away_need_not_be_there(session, engine):
    engine.replies = [json_answer({"kv_transfer_params": None})]
    prefilled = await ask_of().prefill(leg_to(engine, session, "prefill"), PARAMS, sample=False)
    assert (prefilled.first, prefilled.finished, prefilled.kv_transfer_params) == (None, False, None)


@pytest.mark.parametrize(
    "choices",
    [
        None,
        [],
        [1],
        [{}],
        [{"token_ids": [7]}],
        [{"token_ids": ["x"], "finish_reason": "stop"}],
        [{"token_ids": [-7], "finish_reason": "stop"}],
        [{"token_ids": [7], "finish_reason": 5}],
        [{"token_ids": [7], "finish_reason": "stop"}] * 2,
    ],
    ids=json.dumps,
)
async def test_a_token_that_is_used_must_be_there(session, engine, choices):
    engine.replies = [json_answer({"choices": choices, "kv_transfer_params": HANDED_OVER})]
    with pytest.raises(LegError) as caught:
        await ask_of().prefill(leg_to(engine, session, "prefill"), PARAMS, sample=True)
    assert (caught.value.status, caught.value.executed) == (502, True)


async def test_a_decode_leg_behind_a_prefill_tells_prefills_cache(session, engine):
    engine.replies = [speaking(5, 6, cached=3)]
    leg = leg_to(engine, session)
    chunks = await decoded(ask_of(), leg, PARAMS, Computed(leg_to(engine, session, blocks=1).engine, 1))
    assert [(one.cached_tokens, one.created_cache_tokens) for one in chunks] == [(1, 2), (None, None)]


async def test_a_leg_alone_tells_its_own_cache(session, engine):
    engine.replies = [speaking(5, 6, cached=1)]
    chunks = await decoded(ask_of(), leg_to(engine, session, blocks=1))
    assert [(one.cached_tokens, one.created_cache_tokens) for one in chunks] == [(None, None), (1, 2)]


def test_the_end_of_an_answer_that_is_all_there_is_known():
    ask, record = ask_of(), GenerationRecord("gen", 3, 0.0)
    assert ask.unsaid_end is None
    ask.note(record, TokenChunk([5]))
    assert ask.unsaid_end is None
    ask.note(record, TokenChunk([6]))
    assert ask.unsaid_end == TokenChunk((), finish_reason="length")


async def test_an_answer_that_is_kept_gives_signs_of_life_and_comes_at_its_end(session, engine):
    last = asyncio.Event()
    engine.replies = [streaming(chunk(5), chunk(6), last, chunk(7, finish_reason="length"), usage(1), DONE)]
    ask = ask_of(whole=True, sampling={"max_tokens": 3, "seed": 7})
    chunks = ask.decode(leg_to(engine, session), None, None, lambda: None)
    assert (await anext(chunks)).is_empty
    assert (await anext(chunks)).is_empty
    assert not ask.begun
    last.set()
    rest = [one async for one in chunks if not one.is_empty]
    assert (tokens_of(rest), rest[-1].finish_reason, rest[-1].cached_tokens) == ([5, 6, 7], "length", 1)


@pytest.mark.parametrize(
    ("chunk", "empty"),
    [
        (TokenChunk(()), True),
        (TokenChunk([]), True),
        (TokenChunk([5]), False),
        (TokenChunk((), finish_reason="stop"), False),
        (TokenChunk((), prompt_logprobs=[]), False),
    ],
)
def test_a_sign_of_life_has_nothing_in_it(chunk, empty):
    assert chunk.is_empty is empty


async def test_acceptance_of_a_whole_answer_is_told(session, engine):
    engine.replies = [json_answer({"choices": [{"token_ids": [5], "finish_reason": "stop"}], "prompt_logprobs": None})]
    accepted = asyncio.Event()
    ask = ask_of(prompt_logprobs=0)
    (only,) = [one async for one in ask.decode(leg_to(engine, session), None, None, accepted.set)]
    assert (accepted.is_set(), only.token_ids, only.prompt_logprobs) == (True, [5], None)


def test_an_obstacle_of_the_engines_is_the_requests():
    plain, seeded = token_request(), token_request(sampling={"seed": 7})
    assert TokenAsk(plain, {}, None, "engines count").obstacle == "engines count"
    assert TokenAsk(seeded, {}, None, "engines count").obstacle == "engines count"
    assert TokenAsk(plain, {}, None).obstacle is None


def test_prescribed_tokens_are_not_continued():
    sampling = {"trace_decode_token_ids": [1, 2]}
    assert ask_of(sampling=sampling).obstacle == "tokens prescribed by their place in the answer"
    assert not ask_of(sampling=sampling | {"temperature": 0.0}).may_take_first_token


async def test_what_is_kept_is_counted_and_forgotten_when_it_is_begun_anew(session, engine):
    engine.replies = [streaming(chunk(5), chunk(6), cut=True), speaking(7)]
    ask, record = ask_of(whole=True, sampling={"max_tokens": 3, "seed": 7}), GenerationRecord("gen", 3, 0.0)

    async def asked() -> list[int]:
        seen = []
        async for one in ask.decode(leg_to(engine, session), None, None, lambda: None):
            ask.note(record, one)
            seen += one.token_ids
        return seen

    with pytest.raises(LegError):
        await asked()
    assert (record.completion_tokens, ask.begun) == (2, False)
    assert record.first_token_s is not None
    assert await asked() == [7]
    assert record.completion_tokens == 1


@pytest.mark.parametrize(("obstacle", "may"), [(None, True), ("engines have --logits-processors", False)])
def test_where_engines_may_count_an_answers_tokens_decode_makes_all_of_them(obstacle, may):
    assert TokenAsk(token_request(), {}, None, obstacle).may_take_first_token is may
