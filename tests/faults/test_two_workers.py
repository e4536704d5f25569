"""Two workers of one gateway on the same simulated engines, with one board: what is true of one is true of both."""

import asyncio
import contextlib
import dataclasses
import random

import pytest

from helpers.boards import board_of
from helpers.stack import QUICK, Stack, answer_of, stack, token_request
from trivet.connectors import CONNECTORS
from trivet.legs.wire import open_session
from trivet.render.contract import ServingError
from trivet.routing.board import Count
from trivet.sim import Fault

SETTINGS = dataclasses.replace(QUICK, step_ms=0.5, prefill_ms_per_token=0.01, kv_lease_s=3)
PLACES = 6
FAULTS = [
    Fault("status", status=500, probability=0.03, uses=None, seed=1),
    Fault("status", status=503, probability=0.03, uses=None, seed=2),
    Fault("disconnect", probability=0.03, uses=None, seed=3),
    Fault("die", after_tokens=3, probability=0.02, uses=None, seed=4),
]


@contextlib.asynccontextmanager
async def two_workers(*tiers: str, settings=SETTINGS):
    """Each with legs, connections and an admission of its own."""
    async with contextlib.AsyncExitStack() as opened:
        made, *boards = opened.enter_context(board_of(2))
        base = await opened.enter_async_context(stack(*tiers, settings=settings))
        workers: list[Stack] = []

        def ring(worker: int) -> None:
            asyncio.get_running_loop().call_soon(workers[worker].admission.look)

        for board in boards:
            session = await opened.enter_async_context(open_session())
            limits = {"running": PLACES, "queued": 1000, "board": board, "ring": ring}
            workers.append(Stack(base.sims, session, settings.kv_connector, **limits))
            board.beat()
            opened.push_async_callback(workers[-1].legs.close)
        yield made, workers


def all_counts(board) -> list[int]:
    return [board.total(count) for count in Count] + [
        number for slot in range(8) for number in (board.outstanding_tokens(slot), board.running_legs(slot))
    ]


@pytest.mark.parametrize("connector", sorted(CONNECTORS))
async def test_a_crowd_in_bad_weather_leaves_nothing_on_the_board(connector):
    settings = dataclasses.replace(SETTINGS, kv_connector=connector)
    async with two_workers("prefill", "prefill", "decode", "decode", "mixed", settings=settings) as (board, workers):
        for sim in workers[0].sims:
            for fault in FAULTS:
                sim.faults.add(dataclasses.replace(fault))
        chance, most, outcomes = random.Random(4), 0, []

        async def request(number: int) -> None:
            nonlocal most
            worker = workers[number % 2]
            leaves_s = chance.random() * 0.05 if chance.random() < 0.15 else None
            try:
                async with asyncio.timeout(leaves_s), worker.admission.turn():
                    most = max(most, board.total(Count.RUNNING), workers[0].legs.running + workers[1].legs.running)
                    prompt, tokens = chance.choice([(17, 4), (40, 12), (300, 8)])
                    outcomes.append(len(await answer_of(worker, token_request(tokens, prompt))) == tokens)
            except (ServingError, TimeoutError):
                outcomes.append(None)

        async with asyncio.timeout(120):
            await asyncio.gather(*(request(number) for number in range(240)))
        for worker in workers:
            await worker.at_rest()
        assert all_counts(board)[:-16] == [0] * 5 + [board.total(Count.RELEASES_UNCONFIRMED)]
        assert all_counts(board)[-16:] == [0] * 16
        assert most == PLACES
        assert (len(outcomes), False in outcomes) == (240, False)
        assert outcomes.count(True) > 150


async def test_both_workers_see_what_the_other_has_under_way():
    slow = dataclasses.replace(SETTINGS, step_ms=20)
    async with two_workers("decode", "decode", settings=slow) as (board, workers):
        asking = [asyncio.create_task(answer_of(workers[number % 2], token_request(20))) for number in range(4)]
        async with asyncio.timeout(20):
            while board.total(Count.GENERATIONS) < 4 or board.running_legs(0) + board.running_legs(1) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        loads = [[worker.engines.outstanding_tokens(name) for name in ("decode-0", "decode-1")] for worker in workers]
        assert loads[0] == loads[1]
        assert loads[0][0] == loads[0][1] > 0, "they took turns, and each engine has two"
        gauges = [worker.gateway().gauges() for worker in workers]
        assert gauges[0] == gauges[1]
        assert gauges[0].generations == 4
        await asyncio.gather(*asking)
        assert all_counts(board)[-16:] == [0] * 16
