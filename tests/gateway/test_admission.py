"""Admission of one worker, and the same of one of two that share a line and of which the other stands idle."""

import asyncio
import contextlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.boards import board_of
from trivet.gateway.admission import Admission, SharedAdmission
from trivet.render.contract import ServingError

admission_of: Callable[[int, int, float], Admission]


@pytest.fixture(autouse=True, scope="module", params=["one worker", "several workers"])
def _kind(request):
    global admission_of
    if request.param == "one worker":
        admission_of = Admission
        yield
        return
    with contextlib.ExitStack() as boards:

        def shared(*limits) -> Admission:
            boards.close()  # of the one before
            _, _, board = boards.enter_context(board_of(2, engines=1))
            return SharedAdmission(*limits, board, ring=lambda _: pytest.fail("nobody else waits"))

        admission_of = shared
        yield


class Guest:
    """A request that stays until it is told to go."""

    def __init__(self, admission: Admission) -> None:
        self.is_in = asyncio.Event()
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._come(admission))

    async def _come(self, admission: Admission) -> None:
        async with admission.turn():
            self.is_in.set()
            await self.go.wait()

    async def leave(self) -> None:
        self.go.set()
        await self.task

    async def give_up(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task

    async def refused(self) -> tuple[str, int]:
        with pytest.raises(ServingError) as caught:
            await self.task
        return caught.value.message, caught.value.status


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def guests(admission: Admission, count: int) -> list[Guest]:
    come = []
    for _ in range(count):
        come.append(Guest(admission))
        await settle()
    return come


def are_in(come: list[Guest]) -> list[bool]:
    return [one.is_in.is_set() for one in come]


def counts(admission: Admission) -> tuple[int, int]:
    return admission.running, admission.waiting


async def test_as_many_are_in_as_there_are_places():
    admission = admission_of(2, 5, 10.0)
    assert admission.is_open
    come = await guests(admission, 4)
    assert are_in(come) == [True, True, False, False]
    assert (counts(admission), admission.is_open) == ((2, 2), False)
    for one in come:
        await one.leave()
    assert (counts(admission), admission.is_open) == ((0, 0), True)


async def test_who_came_first_is_let_in_first():
    admission = admission_of(1, 5, 10.0)
    come = await guests(admission, 4)
    for number in range(3):
        await come[number].leave()
        await settle()
        assert are_in(come) == [True] * (number + 2) + [False] * (2 - number)
    await come[3].leave()


async def test_nobody_overtakes_those_who_wait():
    """A place that is free belongs to who has waited, also before they have noticed."""
    admission = admission_of(1, 5, 10.0)
    first, second = await guests(admission, 2)
    first.go.set()
    await first.task
    late = Guest(admission)
    await settle()
    assert are_in([second, late]) == [True, False]
    await second.leave()
    await late.leave()


async def test_one_more_than_may_wait_is_refused():
    admission = admission_of(1, 2, 10.0)
    come = await guests(admission, 4)
    assert await come[3].refused() == ("too many requests: 1 are served and 2 wait", 429)
    assert counts(admission) == (1, 2)
    for one in come[:3]:
        await one.leave()


async def test_where_nobody_may_wait_everybody_else_is_refused():
    admission = admission_of(1, 0, 10.0)
    first, second = await guests(admission, 2)
    assert (await second.refused())[1] == 429
    await first.leave()


async def test_who_waits_too_long_is_refused_and_forgotten():
    admission = admission_of(1, 2, 0.02)
    first, second = await guests(admission, 2)
    assert await second.refused() == ("no place for this request within 0.02 s", 503)
    assert counts(admission) == (1, 0)
    await first.leave()
    assert counts(admission) == (0, 0)


async def test_who_gives_up_waiting_is_forgotten():
    admission = admission_of(1, 2, 10.0)
    first, second, third = await guests(admission, 3)
    await second.give_up()
    assert counts(admission) == (1, 1)
    await first.leave()
    await settle()
    assert are_in([second, third]) == [False, True]
    await third.leave()
    assert counts(admission) == (0, 0)


async def test_who_gives_up_at_the_moment_of_being_let_in_leaves_the_place_to_the_next():
    admission = admission_of(1, 2, 10.0)
    async with admission.turn():
        second, third = await guests(admission, 2)
    assert not second.is_in.is_set()
    assert admission.running == 1  # the second has the place, and does not know it yet
    await second.give_up()
    await settle()
    assert (are_in([second, third]), counts(admission)) == ([False, True], (1, 0))
    await third.leave()
    assert counts(admission) == (0, 0)


async def test_a_request_that_fails_gives_its_place_back():
    admission = admission_of(1, 2, 10.0)
    with pytest.raises(ValueError, match="mine"):
        async with admission.turn():
            raise ValueError("mine")
    assert counts(admission) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["come", "leave", "give up", "let go on"]), st.integers(0, 30)), max_size=40),
)
def test_whoever_comes_and_goes(places, queue, steps):
    """Never more in than there are places, first come first served, and all counts back to zero."""

    async def play() -> None:
        admission = admission_of(places, queue, 10.0)
        come: list[Guest] = []
        for what, which in steps:
            present = [one for one in come if not one.task.done()]
            if what == "come":
                come.append(Guest(admission))
            elif present and what == "leave":
                present[which % len(present)].go.set()
            elif present and what == "give up":
                present[which % len(present)].task.cancel()
            elif what == "let go on":
                await settle()
            assert 0 <= admission.running <= places
            assert admission.waiting <= queue
        await settle()
        waiting = [one for one in come if not one.task.done() and not one.is_in.is_set()]
        inside = [one for one in come if not one.task.done() and one.is_in.is_set()]
        assert (len(inside), len(waiting)) == counts(admission)
        assert not waiting or len(inside) == places, "nobody waits while there is a place"
        order = [one for one in come if not one.task.done()]
        assert are_in(order) == sorted(are_in(order), reverse=True), "nobody was overtaken"
        for one in come:
            one.go.set()
        results = await asyncio.gather(*(one.task for one in come), return_exceptions=True)
        for one in results:
            assert one is None or isinstance(one, asyncio.CancelledError) or one.status == 429
        assert counts(admission) == (0, 0)

    asyncio.run(play())


async def test_a_crowd_with_real_time_leaves_nothing_behind():
    dice, most = random.Random(5), 0
    admission = admission_of(5, 20, 0.01)

    async def guest() -> None:
        nonlocal most
        with contextlib.suppress(ServingError, TimeoutError):
            async with asyncio.timeout(dice.random() * 0.03), admission.turn():
                most = max(most, admission.running)
                await asyncio.sleep(dice.random() * 0.01)

    for _ in range(10):
        await asyncio.gather(*(guest() for _ in range(50)))
    assert most == 5
    assert counts(admission) == (0, 0)


async def test_a_place_can_be_taken_without_waiting():
    admission = admission_of(1, 1, 10.0)
    assert admission.take()
    assert not admission.take()
    (waiting,) = await guests(admission, 1)
    admission.leave()
    assert not admission.take(), "it is for who waits"
    await settle()
    assert are_in([waiting]) == [True]
    await waiting.leave()
    assert admission.take()
    admission.leave()
    assert counts(admission) == (0, 0)
