"""Ending a task, also for one who is cancelled meanwhile; and what is closed while a task is inside of it."""

import asyncio

import pytest

from trivet.legs.ahead import Ahead
from trivet.legs.ending import end


class Slow:
    """A leg that takes some rounds of the loop to end."""

    def __init__(self, rounds: int = 5) -> None:
        self._rounds = rounds
        self.began = asyncio.Event()
        self.closed = False

    async def pieces(self):
        try:
            self.began.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            for _ in range(self._rounds):
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    continue  # it ends in its own time
            self.closed = True


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_task_has_ended_however_often_the_one_who_waits_is_cancelled(times):
    slow = Slow()
    task = asyncio.create_task(anext(slow.pieces(), None))
    await slow.began.wait()
    ending = asyncio.create_task(end(task))
    for _ in range(times):
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.wait([ending])
    assert (task.done(), slow.closed) == (True, True)
    assert ending.cancelled() is bool(times)


async def test_what_a_task_ended_with_is_looked_at():
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    async def fails():
        raise RuntimeError("odd")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end(task)
    del task
    assert faults == []


@pytest.mark.parametrize("times", range(4))
async def test_a_leg_that_is_begun_is_closed_however_often_the_one_who_closes_is_cancelled(times):
    """The second time was "aclose(): asynchronous generator is already running", and the leg stayed open."""
    slow = Slow()
    ahead = Ahead(slow.pieces())
    await slow.began.wait()
    closing = asyncio.create_task(ahead.aclose())
    for _ in range(times):
        await asyncio.sleep(0)
        closing.cancel()
    await asyncio.wait([closing])
    assert (slow.closed, ahead.beginning.done()) == (True, True)
    assert closing.cancelled() is bool(times)
    assert closing.cancelled() or closing.exception() is None


async def test_a_leg_that_has_not_begun_is_closed():
    slow = Slow()
    ahead = Ahead(slow.pieces())
    await ahead.aclose()
    assert not slow.began.is_set()
    assert [one async for one in ahead._pieces] == []
