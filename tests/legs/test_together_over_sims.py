"""Legs that start together, over simulated engines that speak TrivetConnector's protocol between each other."""

import asyncio
import dataclasses
import random

import pytest

from helpers.stack import QUICK, Stack, answer_of, stack, token_request

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
