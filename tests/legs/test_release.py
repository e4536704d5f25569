"""What a generation leaves at engines, ended in the background; when it is left: ``test_life``."""

import asyncio
from dataclasses import replace

import pytest

from helpers.engines import HANDED_OVER, WAIT_S
from helpers.garbage import collect
from helpers.processes import holds
from trivet.connectors import NixlConnector
from trivet.legs import release
from trivet.legs.ask import Leg, Prefilled
from trivet.legs.release import Releases, takers
from trivet.legs.wire import LegError
from trivet.routing.engines import Engines, EngineView


class Asked:
    """Stands for an ask: its releases go as the test wants, and are remembered."""

    request_id = "gen"

    def __init__(self, *outcomes: BaseException | asyncio.Event | None) -> None:
        self.outcomes = list(outcomes)
        self.released: list[str] = []
        self.began = asyncio.Event()

    def engine_id(self, leg: Leg) -> str:
        return f"engine-{leg.request_id}"

    async def release(self, leg: Leg, params, prompt) -> None:
        assert (params, prompt) == (HANDED_OVER, "prompt")
        self.released.append(leg.engine.name)
        self.began.set()
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, asyncio.Event):
            await outcome.wait()
        elif outcome is not None:
            raise outcome


@pytest.fixture
def aborted(monkeypatch) -> list[str]:
    """Ids that engines were asked to end."""
    ids = []

    async def abort(session, engine, engine_id) -> None:
        ids.append(engine_id)

    monkeypatch.setattr(release, "abort", abort)
    return ids


@pytest.fixture
async def releases():
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    one = Releases(Engines(), NixlConnector())
    yield one
    await one.close()
    assert (one.pending, one._tasks) == (0, set())
    collect()
    assert faults == []


def leg_to(name: str, *, aborts: bool = True, role: str = "release") -> Leg:
    engine = EngineView(name, "decode", "http://127.0.0.1:1", ready=True, aborts=aborts)
    return Leg(role, engine, f"{name}-{role}", None, {})


LEGS = [leg_to("decode-0"), leg_to("decode-1")]
HELD = Prefilled(HANDED_OVER, None, prompt="prompt")
REFUSED = LegError("decode-0", "not today", status=500)


def test_kv_is_free_within_two_seconds():
    """The longest way: two decode engines that hang, and then one that takes it."""
    assert 2 * release._PATIENCE_S <= 1.5
    assert sum(release._ABORT_AGAIN_S) <= 2.0


async def test_one_release_is_enough(releases):
    ask = Asked()
    releases.release(ask, HELD, LEGS)
    assert releases.pending == 1
    await releases.close()
    assert (ask.released, releases.pending, releases.unconfirmed) == (["decode-0"], 0, 0)


async def test_an_engine_that_cannot_leaves_it_to_the_next(releases):
    ask = Asked(REFUSED)
    releases.release(ask, HELD, LEGS)
    await releases.close()
    assert (ask.released, releases.unconfirmed) == (["decode-0", "decode-1"], 0)


@pytest.mark.parametrize("legs", [LEGS, []])
async def test_where_nobody_can_it_is_counted(releases, legs):
    releases.release(Asked(REFUSED, REFUSED), HELD, legs)
    await releases.close()
    assert (releases.pending, releases.unconfirmed) == (0, 1)


async def test_a_release_that_takes_too_long_is_ended(releases, aborted, monkeypatch):
    monkeypatch.setattr(release, "_PATIENCE_S", 0.01)
    ask = Asked(asyncio.Event())
    releases.release(ask, HELD, LEGS)
    await releases.close()
    assert (ask.released, aborted) == (["decode-0", "decode-1"], ["engine-decode-0-release"])
    assert releases.unconfirmed == 0


async def test_where_all_take_too_long_it_is_counted_once(releases, aborted, monkeypatch):
    monkeypatch.setattr(release, "_LAST_S", 0.05)
    monkeypatch.setattr(release, "_PATIENCE_S", 0.01)
    releases.release(Asked(asyncio.Event(), asyncio.Event()), HELD, LEGS)
    await releases.close()
    assert aborted == ["engine-decode-0-release", "engine-decode-1-release"]
    assert releases.unconfirmed == 1


async def test_what_nobody_foresaw_is_logged_and_counted(releases, caplog):
    releases.release(Asked(RuntimeError("odd")), HELD, LEGS)
    await releases.close()
    assert (releases.pending, releases.unconfirmed) == (0, 1)
    assert "RuntimeError: odd" in caplog.text


NOTHING = [
    None,
    {},
    {"remote_block_ids": []},
    HANDED_OVER | {"remote_block_ids": []},
    HANDED_OVER | {"remote_block_ids": 5},
    HANDED_OVER | {"remote_port": None},
]


@pytest.mark.parametrize("answered", NOTHING)
async def test_what_holds_nothing_is_not_released(releases, answered):
    ask = Asked()
    releases.release(ask, Prefilled(answered, None, prompt="prompt"), LEGS)
    assert releases.pending == 0
    await releases.close()
    assert ask.released == []


async def test_without_a_connector_nothing_is_released():
    releases = Releases(Engines(), None)
    releases.release(Asked(), HELD, LEGS)
    assert releases.pending == 0


async def test_only_engines_that_can_be_told_are_told_to_end_a_leg(releases, aborted):
    releases.abort(Asked(), leg_to("decode-0"))
    releases.abort(Asked(), leg_to("decode-1", aborts=False))
    await releases.close()
    assert aborted == ["engine-decode-0-release"]


# prefill legs that nobody waits for


def prefilling(answer) -> asyncio.Task:
    async def call():
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, BaseException):
            raise answer
        return Prefilled(answer if isinstance(answer, dict) else HANDED_OVER, None, prompt="prompt")

    return asyncio.create_task(call())


PREFILL = leg_to("prefill-0", role="prefill")


async def test_an_answer_that_was_there_is_released(releases, aborted):
    ask, call = Asked(), prefilling(HANDED_OVER)
    await asyncio.wait([call])
    releases.abandon(ask, PREFILL, call, LEGS)
    await releases.close()
    assert ask.released == ["decode-0"]


async def test_an_answer_that_comes_late_is_released(releases, aborted):
    answer = asyncio.Event()
    ask, call = Asked(), prefilling(answer)
    releases.abandon(ask, PREFILL, call, LEGS)
    await holds(lambda: aborted)
    answer.set()
    await asyncio.wait_for(ask.began.wait(), WAIT_S)
    assert aborted == ["engine-prefill-0-prefill"]


async def test_an_answer_that_is_about_to_come_is_not_aborted(releases, aborted, monkeypatch):
    """An abort that meets the end of its request would drop the answer, and with it where the KV is."""
    monkeypatch.setattr(release, "_GRACE_S", WAIT_S)
    answer = asyncio.Event()
    ask, call = Asked(), prefilling(answer)
    releases.abandon(ask, PREFILL, call, LEGS)
    await asyncio.sleep(0)
    answer.set()
    await asyncio.wait_for(ask.began.wait(), WAIT_S)
    assert aborted == []


async def test_an_answer_that_does_not_come_is_given_up(releases, aborted, monkeypatch):
    monkeypatch.setattr(release, "_ABORT_AGAIN_S", (0.01, 0.01))
    ask, call = Asked(), prefilling(asyncio.Event())
    releases.abandon(ask, PREFILL, call, LEGS)
    await releases.close()
    assert call.cancelled()
    assert (aborted, ask.released) == (["engine-prefill-0-prefill"] * 2, [])


async def test_an_engine_that_cannot_be_told_has_its_connection_closed_at_once(releases, aborted):
    call = prefilling(asyncio.Event())
    releases.abandon(Asked(), leg_to("prefill-0", aborts=False), call, LEGS)
    await asyncio.wait([call], timeout=WAIT_S)
    assert call.cancelled()
    assert aborted == []


@pytest.mark.parametrize("answer", [REFUSED, {}, HANDED_OVER | {"remote_block_ids": 5}])
async def test_an_answer_that_hands_nothing_over_is_nobodys(releases, aborted, answer):
    ask, call = Asked(), prefilling(answer)
    releases.abandon(ask, PREFILL, call, LEGS)
    await releases.close()
    assert ask.released == []


async def test_closing_gives_up_on_what_takes_too_long(releases, aborted, monkeypatch):
    monkeypatch.setattr(release, "_CLOSE_S", 0.01)
    never = asyncio.Event()
    call = prefilling(never)
    releases.release(Asked(never), HELD, LEGS)
    releases.abandon(Asked(), PREFILL, call, LEGS)
    await asyncio.wait_for(releases.close(), WAIT_S)
    assert releases.pending == 0
    await asyncio.wait([call])
    assert call.cancelled()


async def test_closing_waits_for_what_one_release_begins(releases, aborted):
    answer = asyncio.Event()
    ask, call = Asked(), prefilling(answer)
    releases.abandon(ask, PREFILL, call, LEGS)
    closing = asyncio.create_task(releases.close())
    await asyncio.sleep(0)
    assert not closing.done()
    answer.set()
    await closing
    assert ask.released == ["decode-0"]


def test_who_can_take_kv_and_who_has_just_failed_comes_last():
    engines, views = Engines(), [EngineView(f"decode-{n}", "decode", "http://x", ready=True) for n in range(4)]
    engines.update([*views[:3], replace(views[3], ready=False), EngineView("mixed-0", "mixed", "http://x", ready=True)])
    assert [one.name for one in takers(engines, None)] == ["decode-0", "decode-1", "decode-2"]
    assert [one.name for one in takers(engines, views[0])] == ["decode-1", "decode-2", "decode-0"]


async def test_what_is_not_held_is_not_released(releases):
    ask = Asked()
    releases.release(ask, HELD, None)
    call = asyncio.create_task(asyncio.sleep(0, HELD))
    releases.abandon(ask, PREFILL, call, None)
    await releases.close()
    assert (ask.released, releases.unconfirmed) == ([], 0)
