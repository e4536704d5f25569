"""Legs that start together, over simulated engines that speak TrivetConnector's protocol between each other."""

import asyncio
import dataclasses
import random
import re

import aiohttp
import pytest

from helpers.stack import MODEL, QUICK, Stack, answer_of, listening, stack, token_request
from trivet.sim import Fault, text

TRIVET = dataclasses.replace(QUICK, kv_connector="TrivetConnector", prefill_ms=5.0, step_ms=1.0)
SEEDED = {"temperature": 0.7, "seed": 7}


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["prefill makes the first token", "decode makes it"])
@pytest.mark.parametrize("tokens", [1, 2, 9])
async def test_the_answer_is_that_of_one_engine(sampling, tokens):
    async with stack("mixed", settings=TRIVET) as one:
        expected = await answer_of(one, token_request(tokens, sampling=sampling))
    async with stack("prefill", "decode", settings=TRIVET) as pair:
        assert await answer_of(pair, token_request(tokens, sampling=sampling)) == expected
        await pair.at_rest()
        assert pair.expired() == 0
    record = pair.records[-1]
    assert (record.transfer_problem, record.attempts, record.completion_tokens) == (None, 1, tokens)


async def test_answers_side_by_side_do_not_mix():
    async with stack("prefill", "prefill", "decode", "decode", settings=TRIVET) as built:
        requests = [token_request(5, start=300 + 50 * number) for number in range(40)]
        together = await asyncio.gather(*(answer_of(built, one) for one in requests))
        assert together == [await answer_of(built, one) for one in requests]
        await built.at_rest()
        assert built.expired() == 0


async def test_clients_that_leave_at_any_moment_leave_no_kv_behind():
    moments = random.Random(11)

    async def client(built: Stack, number: int) -> None:
        task = asyncio.create_task(answer_of(built, token_request(20, start=300 + number)))
        await asyncio.sleep(moments.random() * 0.1)
        task.cancel()
        await asyncio.wait([task])

    async with stack("prefill", "decode", "decode", settings=TRIVET) as built:
        for _ in range(4):
            await asyncio.gather(*(client(built, number) for number in range(40)))
        await built.at_rest()
        assert built.expired() == 0
        assert built.legs.releases.unconfirmed == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("room", [3, 2, 1, 0])
async def test_on_the_text_plane_answers_that_end_with_the_models_length_are_those_of_one_engine(path, stream, room):
    settings = dataclasses.replace(TRIVET, max_model_len=64)
    words = {"messages": [{"role": "user", "content": "x"}]}
    base = len(text.encode(text.chat_prompt(words["messages"])))
    words = {"messages": [{"role": "user", "content": "x" * (64 - room - base + 1)}]}
    ids = list(range(300, 364 - room))
    body = {"model": MODEL, "stream": stream} | {
        "/v1/completions": {"prompt": ids, "max_tokens": max(room, 1), "ignore_eos": True},
        "/v1/chat/completions": words | {"ignore_eos": True},
        "/inference/v1/generate": {"token_ids": ids, "sampling_params": {"max_tokens": 9, "ignore_eos": True}},
    }[path]
    async with stack("prefill", "decode", "mixed", settings=settings) as built, listening(built.gateway()) as url:
        replies = []
        for headers in ({"X-Trivet-Serve": "colocated"}, {}):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}{path}", json=body, headers=headers) as reply,
            ):
                replies.append((reply.status, without_ids(await reply.text())))
        assert replies[0] == replies[1]
        assert replies[0][0] == (200 if room else 400)
        if room:
            assert built.records[-1].finish_reason == "length"
            assert built.records[-1].split is (path != "/inference/v1/generate")
        await built.at_rest()
        assert built.expired() == 0


def without_ids(told: str) -> str:
    """An answer without what is its own, and without the count of what was cached, which is whose engine it was."""
    return re.sub(r'"(id|request_id|created|cached_tokens|created_cache_tokens)":("[^"]*"|\d+|null),?', "", told)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("room", [1, 2, 5])
async def test_the_answer_is_that_of_one_engine_up_to_the_models_length(tokens, room):
    """As render has it: no more tokens are asked for than there is room for."""
    settings = dataclasses.replace(TRIVET, max_model_len=64)
    request = token_request(min(tokens, room), 64 - room)
    async with stack("mixed", settings=settings) as one:
        expected = await answer_of(one, token_request(tokens, 64 - room))
    async with stack("prefill", "decode", settings=settings) as pair:
        assert await answer_of(pair, request) == expected
        await pair.at_rest()
        assert pair.records[-1].finish_reason == "length"
        assert pair.records[-1].attempts == 1


@pytest.mark.parametrize("connector", ["TrivetConnector", "NixlConnector"])
@pytest.mark.parametrize("version", ["0.30.0", "0.32.0"])
async def test_what_wants_no_cache_read_has_the_answer_of_one_engine(connector, version):
    settings = dataclasses.replace(TRIVET, kv_connector=connector, vllm_version=version)
    request = token_request(5, sampling={"skip_reading_prefix_cache": True})
    async with stack("prefill", "decode", "mixed", settings=settings) as built:
        expected = await answer_of(built, token_request(5))
        assert await answer_of(built, request) == expected
        assert (built.records[-1].split, built.records[-1].decode_engine) == (False, "mixed-0")
        await built.at_rest()
        assert built.expired() == 0


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["prefill makes the first token", "decode makes it"])
@pytest.mark.parametrize("fails", [True, False])
async def test_kv_that_is_lost_behind_prefills_answer_is_told(sampling, fails):
    settings = dataclasses.replace(TRIVET, transfer_last_ms=100.0)
    async with stack("prefill", "decode", settings=settings) as built:
        if fails:
            built.sim("prefill-0").faults.add(Fault("lose", leg="prefill", after_tokens=1))
        assert len(await answer_of(built, token_request(5, sampling=sampling))) == 5
        record = built.records[-1]
        assert (record.intended_split, record.split) == (True, not fails)
        assert (record.transfer_problem is not None) is fails
        text_of = built.metrics.text(built.engines, built.gateway().gauges()).decode()
        assert f"trivet_recomputed_generations_total {float(fails)}" in text_of
        await built.at_rest()
