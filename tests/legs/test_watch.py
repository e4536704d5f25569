import asyncio
import math

import pytest

from helpers.engines import WAIT_S
from trivet.journal import now_s
from trivet.legs.watch import Patience, Watch, watch
from trivet.legs.wire import LegError
from trivet.render.contract import ServingError
from trivet.routing.engines import Engines, EngineView

VIEW = EngineView("decode-0", "decode", "http://127.0.0.1:1", ready=True)
PATIENT = Patience(silence_s=None)


async def waiting(patient: Watch, until: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(WAIT_S), patient:
        await (until or asyncio.Event()).wait()


async def fault_of(wait) -> LegError:
    with pytest.raises(LegError) as caught:
        await wait
    assert (caught.value.engine, caught.value.died, caught.value.status) == ("decode-0", True, None)
    return caught.value


async def test_what_is_waited_for_may_come():
    until = asyncio.Event()
    task = asyncio.create_task(waiting(Watch("decode-0", Patience(silence_s=WAIT_S)), until))
    await asyncio.sleep(0)
    until.set()
    await task


async def test_silence_is_a_fault_of_the_engine():
    error = await fault_of(waiting(Watch("decode-0", Patience(silence_s=0.01))))
    assert error.problem == "said nothing for 0.01 s"


async def test_each_wait_has_the_whole_time():
    one = Watch("decode-0", Patience(silence_s=0.3))
    for _ in range(4):
        async with one:
            await asyncio.sleep(0.08)


@pytest.mark.parametrize("silence_s", [None, WAIT_S])
@pytest.mark.parametrize("in_s", [-1.0, 0.0, 0.01])
async def test_a_deadline_is_no_fault_of_the_engine(silence_s, in_s):
    with pytest.raises(ServingError) as caught:
        await waiting(Watch("decode-0", Patience(silence_s, now_s() + in_s)))
    assert (caught.value.message, caught.value.status) == ("the request's deadline has passed", 504)


async def test_silence_before_a_deadline_is_silence():
    await fault_of(waiting(Watch("decode-0", Patience(0.01, now_s() + WAIT_S))))


@pytest.mark.parametrize("silence_s", [None, WAIT_S])
async def test_a_timer_that_is_a_little_early_is_a_deadline_all_the_same(monkeypatch, silence_s):
    """Event loops count in milliseconds."""
    deadline_s = now_s() + 0.01
    monkeypatch.setattr("trivet.legs.watch.now_s", lambda: deadline_s - 0.001)
    with pytest.raises(ServingError):
        await waiting(Watch("decode-0", Patience(silence_s, deadline_s)))


async def test_an_engine_that_leaves_is_not_waited_for():
    one = Watch("decode-0", PATIENT)
    task = asyncio.create_task(waiting(one))
    await asyncio.sleep(0)
    one.leave()
    one.leave()
    assert (await fault_of(task)).problem == "went out of service"


async def test_an_engine_that_has_left_is_not_waited_for_again():
    one = Watch("decode-0", Patience(silence_s=WAIT_S))
    one.leave()
    for _ in range(2):
        assert (await fault_of(waiting(one))).problem == "went out of service"


async def test_what_an_engine_that_has_left_had_said_already_is_taken():
    one = Watch("decode-0", PATIENT)
    one.leave()
    async with one:
        pass  # nothing had to be waited for


async def test_an_engine_that_leaves_behind_the_wait_is_told_at_the_next():
    one = Watch("decode-0", PATIENT)
    async with one:
        pass
    one.leave()
    await fault_of(waiting(one))


async def test_that_the_client_leaves_is_neither():
    task = asyncio.create_task(waiting(Watch("decode-0", Patience(silence_s=WAIT_S, deadline_s=math.inf))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_client_and_the_engine_may_leave_at_once():
    one = Watch("decode-0", PATIENT)
    task = asyncio.create_task(waiting(one))
    await asyncio.sleep(0)
    task.cancel()
    one.leave()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [ValueError("mine"), TimeoutError("mine"), LegError("decode-0", "mine")])
async def test_other_errors_pass(error):
    with pytest.raises(type(error), match="mine"):
        async with Watch("decode-0", Patience(silence_s=WAIT_S)):
            raise error


@pytest.mark.parametrize(
    "views",
    [
        [],
        [EngineView("decode-0", "decode", VIEW.url, ready=False)],
        [EngineView("decode-0", "decode", VIEW.url, True, 1)],
    ],
    ids=["gone", "not ready", "started anew"],
)
async def test_the_fleet_tells_that_an_engine_has_left(views):
    engines = Engines()
    engines.update([VIEW])
    with watch(engines, VIEW, PATIENT) as one:
        task = asyncio.create_task(waiting(one))
        await asyncio.sleep(0)
        engines.update(views)
        assert (await fault_of(task)).problem == "went out of service"
    with watch(engines, VIEW, PATIENT) as one:  # it had left before
        await fault_of(waiting(one))


async def test_a_watch_that_is_over_hears_nothing_any_more():
    engines = Engines()
    engines.update([VIEW])
    with watch(engines, VIEW, PATIENT) as one:
        pass
    engines.update([])
    async with one:
        await asyncio.sleep(0)


# silence that does not count yet


async def test_silence_counts_from_when_it_is_told_to():
    watching = Watch("decode-0", Patience(silence_s=0.05), counting=False)

    async def wait() -> None:
        async with watching:
            await asyncio.sleep(5)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.15)
    assert not task.done()
    watching.count()
    with pytest.raises(LegError, match=r"said nothing for 0\.05 s"):
        await asyncio.wait_for(task, 4)


async def test_it_counts_in_the_waits_behind_that_too():
    watching = Watch("decode-0", Patience(silence_s=0.05), counting=False)
    watching.count()  # between two waits
    with pytest.raises(LegError, match="said nothing"):
        async with watching:
            await asyncio.sleep(5)


async def test_without_patience_for_silence_there_is_nothing_to_count():
    watching = Watch("decode-0", Patience(silence_s=None), counting=False)
    async with watching:
        watching.count()
        await asyncio.sleep(0.01)


async def test_a_deadline_counts_from_the_beginning():
    watching = Watch("decode-0", Patience(silence_s=0.01, deadline_s=now_s() + 0.1), counting=False)
    with pytest.raises(ServingError, match="deadline"):
        async with watching:
            await asyncio.sleep(5)


async def test_an_engine_that_left_is_gone_whatever_is_counted():
    watching = Watch("decode-0", Patience(silence_s=5), counting=False)
    watching.leave()
    watching.count()
    with pytest.raises(LegError, match="out of service"):
        await waiting(watching)


# one timer for all waits of a leg


@pytest.fixture
async def timers(monkeypatch):
    """Timers that were set, with their seconds."""
    found: list[float] = []
    loop = asyncio.get_running_loop()
    real = loop.call_at

    def call_at(when_s, *more, **others):
        found.append(round(when_s - loop.time(), 2))
        return real(when_s, *more, **others)

    monkeypatch.setattr(loop, "call_at", call_at)
    return found


async def test_waits_share_a_timer(timers):
    one = Watch("decode-0", Patience(silence_s=100, deadline_s=now_s() + 200))
    for _ in range(50):
        async with one:
            await asyncio.sleep(0)
    assert timers == [100]
    one.close()


async def test_the_timer_of_an_earlier_wait_is_set_anew_for_the_rest(timers):
    one = Watch("decode-0", Patience(silence_s=0.2))
    async with one:
        timers.clear()
        await asyncio.sleep(0.12)
    began_s = now_s()
    await fault_of(waiting(one))
    assert 0.19 <= now_s() - began_s < 5
    assert min(timers) == pytest.approx(0.12, abs=0.06)


async def test_between_waits_no_time_passes():
    """Whoever reads the answer may be slow."""
    one = Watch("decode-0", Patience(silence_s=0.05))
    for _ in range(3):
        async with one:
            pass
        await asyncio.sleep(0.1)


async def test_a_deadline_ends_a_later_wait():
    one = Watch("decode-0", Patience(silence_s=5, deadline_s=now_s() + 0.2))

    async def read() -> None:
        for _ in range(100):
            async with one:
                await asyncio.sleep(0.02)

    with pytest.raises(ServingError, match="deadline"):
        await read()


async def test_silence_that_begins_to_count_may_be_nearer_than_the_deadline():
    one = Watch("decode-0", Patience(silence_s=0.05, deadline_s=now_s() + 5), counting=False)
    async with one:
        await asyncio.sleep(0)
    one.count()
    assert (await fault_of(waiting(one))).problem == "said nothing for 0.05 s"


async def test_an_engine_may_leave_in_any_wait():
    one = Watch("decode-0", Patience(silence_s=WAIT_S))
    async with one:
        await asyncio.sleep(0)
    task = asyncio.create_task(waiting(one))
    await asyncio.sleep(0)
    one.leave()
    assert (await fault_of(task)).problem == "went out of service"


async def test_a_wait_that_ends_as_the_engine_leaves_is_not_ended_later():
    one = Watch("decode-0", PATIENT)
    async with one:
        one.leave()
    await asyncio.sleep(0.01)  # nobody cancels who waits for other things


@pytest.mark.parametrize("silence_s", [0.05, None])
async def test_the_deadline_of_one_task_does_not_end_another(silence_s):
    """A leg's first wait may be another task's."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    one = Watch("decode-0", Patience(silence_s, now_s() + 0.1))

    async def begin() -> None:
        async with one:
            await asyncio.sleep(0)

    await asyncio.create_task(begin())
    await asyncio.sleep(0.2)
    assert problems == []


async def test_no_timer_outlives_a_leg():
    loop, engines = asyncio.get_running_loop(), Engines()
    engines.update([VIEW])
    with watch(engines, VIEW, Patience(silence_s=1000)) as one:
        async with one:
            await asyncio.sleep(0)
    assert not [timer for timer in loop._scheduled if not timer.cancelled() and timer.when() > loop.time() + 900]
