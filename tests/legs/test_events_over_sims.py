"""Two gateway workers over simulated engines that tell what they hold: one listens, both choose by it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from helpers.boards import board_of
from helpers.sim_client import Client
from helpers.stack import MODEL, QUICK, Stack, answer_of, stack, token_request
from trivet.routing.choose import Knowledge
from trivet.routing.events import Subscriber
from trivet.routing.held import HELD_BYTES, HELD_REGION, Held
from trivet.routing.prefixes import REGION, TABLE_BYTES, Chain, PrefixTable
from trivet.sim.settings import SimEvents

WAIT_S = 20.0
REGIONS = {REGION: TABLE_BYTES, HELD_REGION: HELD_BYTES}
NAMES = ("prefill-0", "prefill-1", "decode-0")
BLOCKS = {"prefill-0": 16, "prefill-1": 32, "decode-0": 16}
CACHE_TOKENS = 2048


class Pair:
    """Two workers."""

    def __init__(self, first: Stack, second: Stack, listens: list[bool]) -> None:
        self.first, self.second, self.listens = first, second, listens
        self.client = Client(first.legs.session)

    async def fill(self, name: str, *prompts: range) -> None:
        """Has an engine compute prompts of which no gateway knows."""
        for prompt in prompts:
            answer = await self.client.generate(self.first.sim(name), list(prompt), max_tokens=1)
            assert answer.status == 200

    async def holds(self, worker: Stack, name: str, prompt: range, tokens: range) -> None:
        """Waits until a worker knows that an engine holds so much of a prompt."""
        chain = Chain.of_tokens(MODEL, None)
        chain.extend(prompt)
        held, view = worker.legs._knows.held, next(one for one in worker.engines.all() if one.name == name)
        deadline = time.monotonic() + WAIT_S
        while (told := held.told(chain.prefix(len(prompt) + 1), view)) is None or told.known.tokens not in tokens:
            assert time.monotonic() < deadline, told
            await asyncio.sleep(0.01)

    async def ask(self, worker: Stack, prompt: range) -> tuple[str, int, str]:
        """Which prefill engine a prompt went to, what it had of it, and by what it was chosen."""
        await answer_of(worker, replace(token_request(tokens=4), token_ids=list(prompt)))
        record = worker.records[-1]
        return record.prefill_engine, record.cached_tokens, record.cache_known_by


@contextlib.asynccontextmanager
async def pair(folder, connector: str = "NixlConnector", *, tells: bool = True) -> AsyncIterator[Pair]:
    quick = replace(QUICK, kv_connector=connector, kv_tokens=CACHE_TOKENS, max_model_len=CACHE_TOKENS)
    own = {
        name: replace(
            quick,
            block_size=BLOCKS[name] if connector == "NixlConnector" else 16,
            kv_events=SimEvents(f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-r") if tells else None,
        )
        for name in NAMES
    }
    listens = [True, True]
    with board_of(2, regions=REGIONS) as (_, *boards):
        knows = [
            Knowledge(prefixes=PrefixTable(board.region(REGION)), held=Held(board.region(HELD_REGION)))
            for board in boards
        ]
        tiers = [name.partition("-")[0] for name in NAMES]
        async with stack(*tiers, settings=quick, own=own, board=boards[0], knowledge=knows[0]) as first:
            second = Stack(first.sims, first.legs.session, connector, board=boards[1], knowledge=knows[1])
            boards[0].beat()
            boards[1].beat()
            leads = (
                lambda: listens[0] and boards[0].leads(),
                lambda: listens[1] and (not listens[0] or boards[1].leads()),
            )
            subscribers = [Subscriber(know.held, MODEL, lead) for know, lead in zip(knows, leads, strict=True)]
            beating = asyncio.create_task(beat(*boards))
            for one, worker in zip(subscribers, (first, second), strict=True):
                one.update(worker.engines.all())
            try:
                yield Pair(first, second, listens)
            finally:
                beating.cancel()
                for one in subscribers:
                    await asyncio.to_thread(one.close)
                await second.legs.close()


async def beat(*boards) -> None:
    while True:
        for board in boards:
            board.beat()
        await asyncio.sleep(0.1)


CONVERSATION = range(300, 1100)
OTHERS = [range(start, start + 1000) for start in (5000, 7000, 9000)]


@pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
async def test_a_conversation_goes_where_its_beginning_really_is(tmp_path, connector):
    async with pair(tmp_path, connector) as both:
        first, second = both.first, both.second
        for name in NAMES:
            await both.holds(second, name, CONVERSATION, range(1))
        # an engine computes it without any gateway: no guess could know
        await both.fill("prefill-1", CONVERSATION[:700])
        for worker in (first, second):
            await both.holds(worker, "prefill-1", CONVERSATION, range(640, 701))
        block = both.first.sim("prefill-1").settings.block_size
        assert await both.ask(second, CONVERSATION[:720]) == ("prefill-1", 700 // block * block, "events")
        assert (await both.ask(first, CONVERSATION[:740]))[0] == "prefill-1"
        # it is evicted there, and computed elsewhere
        await both.fill("prefill-1", *OTHERS)
        await both.holds(second, "prefill-1", CONVERSATION, range(1))
        await both.fill("prefill-0", CONVERSATION[:700])
        await both.holds(second, "prefill-0", CONVERSATION, range(640, 701))
        engine, cached_tokens, by = await both.ask(second, CONVERSATION)
        assert (engine, by) == ("prefill-0", "events")
        assert cached_tokens >= 640
        await first.at_rest()


async def test_without_events_the_guess_goes_where_it_was_sent(tmp_path):
    """The same as above: what events are for."""
    async with pair(tmp_path, tells=False) as both:
        engine, _, _ = await both.ask(both.second, CONVERSATION[:700])
        other = {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[engine]
        await both.fill(engine, *OTHERS)
        await both.fill(other, CONVERSATION[:700])
        assert await both.ask(both.first, CONVERSATION) == (engine, 0, "guess")


async def test_another_worker_listens_when_the_first_one_does_no_more(tmp_path):
    async with pair(tmp_path) as both:
        await both.fill("prefill-1", CONVERSATION[:700])
        await both.holds(both.second, "prefill-1", CONVERSATION, range(640, 701))
        both.listens[0] = False
        await both.fill("prefill-0", CONVERSATION)
        for worker in (both.first, both.second):
            await both.holds(worker, "prefill-0", CONVERSATION, range(768, 801))
            await both.holds(worker, "prefill-1", CONVERSATION, range(640, 701))
        assert (await both.ask(both.first, CONVERSATION))[0] == "prefill-0"


async def test_an_engine_that_goes_silent_is_guessed_about_again(tmp_path, monkeypatch):
    monkeypatch.setattr("trivet.routing.held.FRESH_S", 2.0)
    async with pair(tmp_path) as both:
        for name in NAMES:
            await both.holds(both.first, name, CONVERSATION, range(1))
        engine, _, by = await both.ask(both.first, CONVERSATION)
        assert by == "events"
        for sim in both.first.sims:
            sim.events.cut()
        deadline = time.monotonic() + WAIT_S
        while any(both.second.legs._knows.held.is_live(one) for one in both.second.engines.all()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert await both.ask(both.second, [*CONVERSATION, 1, 2, 3]) == (engine, 800, "guess")
