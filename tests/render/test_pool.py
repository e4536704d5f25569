"""Which render server a request goes to: load, limits and health, without HTTP and without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.processes import holds
from trivet.render.pool import NotTakenError, Pauses, Pool, PoolRules, Reason, State, UnusableError

A, B, C = (f"http://10.0.0.{number}:9000" for number in (1, 2, 3))
QUICK = Pauses(first_s=0.005, longest_s=0.02, other_ids_s=0.01, again_s=math.inf, start_s=20)


class Ground:
    """Where servers stand: what a look at each of them finds."""

    def __init__(self) -> None:
        self.finds: dict[str, Exception | None] = {}
        self.looks: list[str] = []
        self.may_look: dict[str, asyncio.Event] = {}
        """Looks at these wait for it."""
        self._ends: dict[str, asyncio.Event] = {}
        self.visits = 0
        """Servers that are being watched."""

    @contextlib.asynccontextmanager
    async def __call__(self, url: str) -> AsyncIterator[Any]:
        ground, ends = self, asyncio.Event()
        self._ends[url] = ends

        class Visit:
            async def check(self) -> None:
                ground.looks.append(url)
                if url in ground.may_look:
                    await ground.may_look[url].wait()
                if (found := ground.finds.get(url)) is not None:
                    raise found

            async def gone(self) -> None:
                await ends.wait()

            def is_there(self) -> bool:
                return not ends.is_set()

        self.visits += 1
        try:
            yield Visit()
        finally:
            self.visits -= 1

    def cut(self, url: str) -> None:
        """The connection that watches a server ends."""
        self._ends[url].set()


class Counted:
    """A tally, written down."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.queue: list[int] = []
        self.up: dict[str, list[bool]] = {}

    def running(self, server: str, requests: int) -> None:
        self.at[server] = requests
        self.most[server] = max(requests, self.most.get(server, 0))

    def waiting(self, requests: int) -> None:
        self.queue.append(requests)

    def used(self, server: str, is_used: bool) -> None:
        self.up.setdefault(server, []).append(is_used)


def rules(*servers: str, **more: Any) -> PoolRules:
    return PoolRules(servers or (A, B), **{"queue_s": 20.0, **more})


@pytest.fixture
def ground() -> Ground:
    return Ground()


@contextlib.asynccontextmanager
async def pool_of(
    ground: Ground, *servers: str, tally: Any = None, pauses: Pauses = QUICK, choose: Any = None, **more: Any
) -> AsyncIterator[Pool]:
    async with Pool(rules(*servers, **more), ground, tally, pauses, choose or (lambda able: able[0])) as pool:
        yield pool
    assert ground.visits == 0, "nobody watches any more"


class Request:
    """One request that holds its place until it is told to leave."""

    def __init__(self, pool: Pool, wait_s: float = 20.0, without: str | None = None) -> None:
        self._leave = asyncio.Event()
        self.url: str | None = None
        self.turn: Any = None
        self.task = asyncio.create_task(self._run(pool, wait_s, without))

    async def _run(self, pool: Pool, wait_s: float, without: str | None) -> None:
        async with pool.turn(asyncio.get_running_loop().time() + wait_s, without) as turn:
            self.turn, self.url = turn, turn.url
            await self._leave.wait()

    async def taken(self) -> str:
        await holds(lambda: self.url is not None or self.task.done())
        if self.task.done():
            self.task.result()
        assert self.url is not None
        return self.url

    async def leave(self) -> None:
        self._leave.set()
        await self.task


async def end(*requests: Request) -> None:
    for request in requests:
        await request.leave()


async def waits(pool: Pool, count: int) -> None:
    await holds(lambda: pool.waiting == count)


def states(pool: Pool) -> list[str]:
    return [one["state"] for one in pool.facts()]


async def refusal(pool: Pool, wait_s: float = 20.0, without: str | None = None) -> Reason:
    with pytest.raises(NotTakenError) as refused:
        async with pool.turn(asyncio.get_running_loop().time() + wait_s, without):
            pass
    return refused.value.reason


# balance


async def test_the_server_with_the_least_to_do_is_taken(ground):
    async with pool_of(ground, A, B, C) as pool:
        requests = [Request(pool) for _ in range(3)]
        assert {await one.taken() for one in requests} == {A, B, C}
        (at_b,) = (one for one in requests if one.url == B)
        await at_b.leave()
        last = Request(pool)
        assert await last.taken() == B
        await end(last, *(one for one in requests if one is not at_b))


async def test_of_equals_one_is_drawn(ground):
    drawn = random.Random(7)
    async with pool_of(ground, A, B, choose=drawn.choice) as pool:
        found = set()
        for _ in range(50):
            one = Request(pool)
            found.add(await one.taken())
            await one.leave()
    assert found == {A, B}


async def test_a_server_that_shall_not_be_taken_is_not(ground):
    async with pool_of(ground, A, B) as pool:
        requests = [Request(pool, without=A) for _ in range(3)]
        assert [await one.taken() for one in requests] == [B, B, B]
        await end(*requests)
    async with pool_of(ground, A) as pool:
        assert await refusal(pool, without=A) is Reason.NO_SERVER


# limits


async def test_no_server_has_more_requests_than_it_may_and_the_others_wait_in_order(ground):
    tally = Counted()
    async with pool_of(ground, A, B, running=2, tally=tally) as pool:
        first = [Request(pool) for _ in range(4)]
        for one in first:
            await one.taken()
        later = []
        for number in range(3):
            later.append(Request(pool))
            await waits(pool, number + 1)
        for number, one in enumerate(first[:3]):
            await one.leave()
            assert await later[number].taken() == one.url
        await end(first[3], *later)
    assert tally.most == {A: 2, B: 2}
    assert (max(tally.queue), tally.queue[-1]) == (3, 0)
    assert tally.at == {A: 0, B: 0}


async def test_one_that_finds_the_queue_full_is_turned_away(ground):
    async with pool_of(ground, A, running=1, queued=1) as pool:
        holding, waiting = Request(pool), Request(pool)
        await waits(pool, 1)
        assert await refusal(pool) is Reason.QUEUE_FULL
        await end(holding, waiting)
        one = Request(pool)  # there is room again
        await one.taken()
        await one.leave()


async def test_without_a_queue_only_free_servers_are_taken(ground):
    async with pool_of(ground, A, running=1, queued=0) as pool:
        one = Request(pool)
        await one.taken()
        assert await refusal(pool) is Reason.QUEUE_FULL
        await one.leave()


async def test_one_that_waits_too_long_is_turned_away_and_holds_nothing(ground):
    async with pool_of(ground, A, running=1) as pool:
        one = Request(pool)
        await one.taken()
        assert await refusal(pool, wait_s=0.01) is Reason.QUEUE_WAIT
        assert await refusal(pool, wait_s=-1.0) is Reason.QUEUE_WAIT, "its time was over before"
        assert pool.waiting == 0
        await one.leave()
        assert [facts["requests_running"] for facts in pool.facts()] == [0]


async def test_who_is_cancelled_while_waiting_is_passed_over(ground):
    async with pool_of(ground, A, running=1) as pool:
        holding, leaving, staying = Request(pool), Request(pool), Request(pool)
        await waits(pool, 2)
        leaving.task.cancel()
        await waits(pool, 1)
        await holding.leave()
        assert await staying.taken() == A
        await staying.leave()


async def test_a_place_that_was_given_at_the_moment_of_leaving_is_given_on(ground):
    given: list[int] = []

    class Cancelling(Counted):
        def running(self, server: str, requests: int) -> None:
            if holding._leave.is_set():
                given.append(requests)
                if len(given) == 2:  # the place is given, and who waited for it has not heard
                    leaving.task.cancel()

    async with pool_of(ground, A, running=1, tally=Cancelling()) as pool:
        holding = Request(pool)
        await holding.taken()
        leaving, staying = Request(pool), Request(pool)
        await waits(pool, 2)
        await holding.leave()
        assert await staying.taken() == A
        with pytest.raises(asyncio.CancelledError):
            await leaving.task
        assert leaving.url is None
        await staying.leave()
        assert [facts["requests_running"] for facts in pool.facts()] == [0]


async def test_who_will_not_have_the_free_server_keeps_no_one_else_from_it(ground):
    async with pool_of(ground, A, B, running=1) as pool:
        at_a, at_b = Request(pool), Request(pool)
        assert [await at_a.taken(), await at_b.taken()] == [A, B]
        picky = Request(pool, without=A)
        await waits(pool, 1)
        easy = Request(pool)
        await waits(pool, 2)
        await at_a.leave()
        assert await easy.taken() == A
        await at_b.leave()
        assert await picky.taken() == B
        await end(picky, easy)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "leave", "cancel", "fail"]), st.integers(0, 30)), min_size=5, max_size=40
    ),
    st.integers(1, 3),
)
def test_places_are_never_lost_and_never_too_many(events, running):
    """Whatever happens: what is at a server is what holds a place there, and nobody waits while there is room."""

    async def story() -> None:
        tally = Counted()
        async with pool_of(Ground(), A, B, running=running, queued=5, tally=tally) as pool:
            requests: list[Request] = []
            for event, number in events:
                mine = [one for one in requests if not one.task.done()]
                if event == "come":
                    requests.append(Request(pool))
                elif mine:
                    one = mine[number % len(mine)]
                    if event == "leave":
                        one._leave.set()
                    elif event == "cancel":
                        one.task.cancel()
                    elif one.turn is not None:
                        pool.failed(one.turn, "failed")
                for _ in range(3):
                    await asyncio.sleep(0)
            await holds(lambda: states(pool) == ["up", "up"])
            for _ in range(3):
                await asyncio.sleep(0)
            holding = [one for one in requests if one.url and not one.task.done() and not one._leave.is_set()]
            counted = {one["url"]: one["requests_running"] for one in pool.facts()}
            assert counted == {url: sum(one.url == url for one in holding) for url in (A, B)}
            assert not pool.waiting or set(counted.values()) == {running}
            for one in requests:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in requests), return_exceptions=True)
            assert [one["requests_running"] for one in pool.facts()] == [0, 0]
        assert max(tally.most.values(), default=0) <= running

    asyncio.run(story())


# health


async def test_a_server_is_used_only_after_it_was_looked_at(ground):
    """Who comes before waits for that, as at a full server."""
    ground.may_look[A] = asyncio.Event()
    async with pool_of(ground, A, pauses=Pauses(start_s=0.0)) as pool:
        assert states(pool) == [State.NEW]
        one = Request(pool)
        await waits(pool, 1)
        ground.may_look[A].set()
        assert await one.taken() == A
        assert states(pool) == [State.UP]
        await one.leave()


async def test_a_start_waits_for_the_first_looks_whatever_they_find(ground):
    ground.finds[B] = UnusableError("cannot be reached")
    async with pool_of(ground, A, B) as pool:
        assert states(pool) == [State.UP, State.DOWN]
        one = Request(pool)
        assert await one.taken() == A
        await one.leave()


async def test_a_server_that_cannot_be_used_is_looked_at_again_and_used_when_it_can(ground, caplog):
    ground.finds[A] = UnusableError("cannot be reached (refused)")
    caplog.set_level(logging.INFO, "trivet.render.pool")
    tally = Counted()
    async with pool_of(ground, A, tally=tally) as pool:
        assert await refusal(pool) is Reason.NO_SERVER
        assert pool.remarks() == f"{A} cannot be reached (refused)"
        await holds(lambda: len(ground.looks) > 4)
        ground.finds[A] = None
        await holds(lambda: states(pool) == [State.UP])
        one = Request(pool)
        await one.taken()
        await one.leave()
        assert (pool.remarks(), pool.facts()[0]["problem"]) == ("", None)
    assert tally.up[A][0] is False
    assert tally.up[A][-1] is True
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"render server {A} cannot be reached (refused)", f"render server {A} is used"], "each said once"


async def test_who_waits_is_told_at_once_that_no_server_can_be_used(ground):
    ground.may_look[A] = asyncio.Event()
    ground.finds[A] = UnusableError("answers /health with 500")
    async with pool_of(ground, A, pauses=Pauses(start_s=0.0)) as pool:
        waiting = [asyncio.create_task(refusal(pool)) for _ in range(3)]
        await waits(pool, 3)
        ground.may_look[A].set()
        assert await asyncio.gather(*waiting) == [Reason.NO_SERVER] * 3


async def test_a_server_that_failed_gets_nothing_until_it_was_looked_at_again(ground):
    async with pool_of(ground, A, B) as pool:
        ground.may_look[A] = asyncio.Event()
        one = Request(pool)
        assert await one.taken() == A
        watched = ground._ends[A]
        pool.failed(one.turn, "answers 500")
        assert pool.facts()[0]["problem"] == "answers 500"
        others = [Request(pool) for _ in range(3)]
        assert [await other.taken() for other in others] == [B, B, B]
        ground.may_look[A].set()
        await holds(lambda: states(pool) == [State.UP, State.UP])
        watched.set()
        assert one.turn.stands(), "that it was watched no more is no sign of another process"
        await end(one, *others)
        back = Request(pool)
        assert await back.taken() == A
        await back.leave()


async def test_many_requests_that_fail_at_once_are_one_failure(ground):
    async with pool_of(ground, A) as pool:
        requests = [Request(pool) for _ in range(5)]
        for one in requests:
            await one.taken()
        for one in requests:
            pool.failed(one.turn, "cannot be reached")
        assert pool._servers[A].misses == 1
        assert states(pool) == [State.LOOKING], "looked at at once: it may have been that request"
        await holds(lambda: states(pool) == [State.UP])
        pool.failed(requests[0].turn, "cannot be reached")
        assert states(pool) == [State.UP], "what was asked before says nothing about the server that is there now"
        await end(*requests)


async def test_a_failure_while_it_is_looked_at_counts_too(ground):
    """The look may have gone well before."""
    async with pool_of(ground, A, pauses=Pauses(first_s=0.005, longest_s=0.02, again_s=0.0)) as pool:
        one = Request(pool)
        await one.taken()
        ground.may_look[A] = asyncio.Event()
        looks = len(ground.looks)
        await holds(lambda: len(ground.looks) > looks)
        pool.failed(one.turn, "answers 500")
        ground.may_look.pop(A).set()
        await holds(lambda: states(pool) == [State.UP] and pool._servers[A].life is not one.turn.life)
        assert one.turn.stands(), "it is the same process, as nothing has told otherwise"
        await one.leave()


async def test_a_failure_while_it_is_looked_at_is_not_undone_by_that_look(ground):
    async with pool_of(ground, A, pauses=Pauses(first_s=0.005, longest_s=600, again_s=0.0)) as pool:
        one = Request(pool)
        await one.taken()
        pool._servers[A].misses = 20  # so that it would be left alone for minutes
        ground.may_look[A] = asyncio.Event()
        looks = len(ground.looks)
        await holds(lambda: len(ground.looks) > looks)
        pool.failed(one.turn, "answers 500")
        ground.may_look.pop(A).set()
        await holds(lambda: ground.visits == 0)
        assert pool.facts()[0]["problem"] == "answers 500"
        assert states(pool) == [State.DOWN]
        await one.leave()


async def test_a_server_that_ends_every_watch_is_not_looked_at_without_pause(ground):
    async with pool_of(ground, A, pauses=Pauses(first_s=600, again_s=math.inf)) as pool:
        ground.cut(A)
        await holds(lambda: ground.visits == 0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (len(ground.looks), states(pool)) == (1, [State.LOOKING])


async def test_pauses_grow_with_failures_and_shrink_after_a_request_that_went_well(ground):
    async with pool_of(ground, A, pauses=Pauses(first_s=0.004, longest_s=0.01, again_s=math.inf)) as pool:
        server = pool._servers[A]
        found = []
        for _ in range(5):
            await holds(lambda: server.state is State.UP)
            one = Request(pool)
            await one.taken()
            pool.failed(one.turn, "answers 500")
            found.append(server.pause_s)
            await one.leave()
        assert found == [0.0, 0.004, 0.008, 0.01, 0.01]
        await holds(lambda: server.state is State.UP)
        one = Request(pool)
        await one.taken()
        pool.went_well(one.turn)
        pool.failed(one.turn, "answers 500")
        assert server.pause_s == 0.0
        await one.leave()


async def test_a_server_that_makes_other_ids_is_told_apart_and_looked_at_again(ground, caplog):
    caplog.set_level(logging.INFO, "trivet.render.pool")
    ground.finds[B] = UnusableError("makes other token ids of a chat", other_ids=True)
    async with pool_of(ground, A, B) as pool:
        assert states(pool) == [State.UP, State.OTHER]
        assert pool.remarks() == f"{B} makes other token ids of a chat"
        assert pool.why_not_ready() is None
        requests = [Request(pool) for _ in range(3)]
        assert [await one.taken() for one in requests] == [A, A, A]
        ground.finds[B] = None
        await holds(lambda: states(pool) == [State.UP, State.UP])
        await end(*requests)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [f"render server {B} makes other token ids of a chat"]


async def test_a_server_whose_watch_ends_is_looked_at_before_it_is_used_again(ground):
    """Another process may be there by now, with another template."""
    tally = Counted()
    async with pool_of(ground, A, tally=tally) as pool:
        ground.may_look[A] = asyncio.Event()
        before = Request(pool)
        await before.taken()
        assert before.turn.stands()
        ground.cut(A)
        assert not before.turn.stands(), "at once"
        await holds(lambda: len(ground.looks) == 2)
        assert states(pool) == [State.LOOKING]
        assert not before.turn.stands()
        await before.leave()
        one = Request(pool)
        await waits(pool, 1)
        ground.finds[A] = UnusableError("makes other token ids", other_ids=True)
        ground.may_look.pop(A).set()
        with pytest.raises(NotTakenError):
            await one.task
    assert tally.up[A][-1] is False


async def test_a_server_that_is_used_is_looked_at_from_time_to_time_and_used_meanwhile(ground):
    async with pool_of(ground, A, pauses=Pauses(again_s=0.001)) as pool:
        await holds(lambda: len(ground.looks) > 3)
        ground.may_look[A] = asyncio.Event()
        looks = len(ground.looks)
        await holds(lambda: len(ground.looks) > looks)
        one = Request(pool)
        await one.taken()
        assert states(pool) == [State.UP]
        ground.finds[A] = UnusableError("makes other token ids", other_ids=True)
        ground.may_look.pop(A).set()
        await holds(lambda: states(pool) == [State.OTHER])
        await one.leave()


async def test_a_fault_in_looking_is_told_and_no_end(ground, caplog):
    ground.finds[A] = RuntimeError("a fault of ours")
    async with pool_of(ground, A) as pool:
        assert pool.remarks() == f"{A} could not be looked at: RuntimeError: a fault of ours"
        ground.finds[A] = None
        await holds(lambda: states(pool) == [State.UP])
    assert any("a fault of ours" in (record.exc_text or "") for record in caplog.records)


# ready


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_gateway_needs_a_server_only_where_it_would_refuse_otherwise(ground, refuses):
    ground.finds |= dict.fromkeys((A, B), UnusableError("cannot be reached"))
    async with pool_of(ground, A, B, refuses=refuses) as pool:
        missing = f"no render server can be used: {A} cannot be reached; {B} cannot be reached"
        assert pool.why_not_ready() == (missing if refuses else None)
        ground.finds[A] = None
        await holds(lambda: State.UP in states(pool))
        assert pool.why_not_ready() is None
