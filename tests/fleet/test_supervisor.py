"""The fleet over engines that are real processes (``helpers/fake_engine.py``) or somebody else's servers."""

import asyncio
import errno
import itertools
import json
import os
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from helpers import fake_engine
from helpers.foreign import ForeignEngine
from helpers.processes import below, holds, left_of
from trivet.errors import EngineFailedError
from trivet.fleet import probe, supervisor
from trivet.fleet.process import GuardedProcess
from trivet.fleet.supervisor import EngineStatus, Fleet, State
from trivet.topology import EnginePlan, Plan, parse_topology

WAIT_S = 20.0
NOTICED_S = 5.0
"""A second at most on a machine that does not stand still; what is not looked at takes `_SILENCE_S`, or for ever."""
MODEL = "tiny"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Looks often and waits short, where a test does not say otherwise."""
    monkeypatch.setattr(supervisor, "_POLL_S", 0.03)
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05,))
    monkeypatch.setattr(supervisor, "_LAST_WORDS_S", 0.5)
    monkeypatch.setattr(supervisor, "_RECHECK_S", 0.05)


def unused_port() -> int:
    with closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]


@dataclass(frozen=True)
class FakePlan(EnginePlan):
    """A plan whose command is the fake engine."""

    folder: Path = Path()

    def command(self) -> list[str]:
        return [sys.executable, "-S", fake_engine.__file__, str(self.port), str(self.folder)]


class FakeEngine:
    """An engine that Trivet starts, and its behaviour."""

    def __init__(self, folder: Path, name: str = "mixed-0", **behaviour: object) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        port = unused_port()
        self.plan = FakePlan(
            name,
            name.partition("-")[0],
            f"http://127.0.0.1:{port}",
            "cpu",
            "trivet",
            port=port,
            folder=self.folder,
        )
        self.behave(**behaviour)

    def behave(self, **behaviour: object) -> None:
        """From now on; what is not named is as it should be."""
        fresh = self.folder / "behaviour.new"
        fresh.write_text(json.dumps(behaviour))
        fresh.rename(self.folder / "behaviour.json")

    def noted(self, what: str) -> list:
        file = self.folder / what
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def pid(self) -> int:
        """Of its newest process."""
        return self.noted("starts")[-1]


@dataclass(frozen=True)
class News:
    """What the fleet's listener was told, and when."""

    at_s: float
    name: str
    state: str
    generation: int
    problem: str | None


class Observed(Fleet):
    """A fleet, and what it told of its engines."""

    def __init__(self, plan: Plan, logs: Path) -> None:
        self.news: list[News] = []
        self.pids: set[int] = set()
        self._arrived = asyncio.Condition()
        super().__init__(plan, logs, self._hear)

    def _hear(self, status: EngineStatus) -> None:
        self.news.append(News(time.monotonic(), status.plan.name, str(status.state), status.generation, status.problem))
        if status.pid:
            self.pids |= {status.pid, *below(status.pid)}

    async def said(self, state: State, name: str | None = None, *, after: int = 0, times: int = 1) -> News:
        """The news that an engine is in this state (for the ``times``-th time), as soon as it is told."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found = [one for one in self.news[after:] if one.state == state and name in (None, one.name)]
                if len(found) >= times:
                    return found[times - 1]
                await asyncio.sleep(0.005)

    def states(self, name: str | None = None) -> list[str]:
        return [one.state for one in self.news if name in (None, one.name)]


@asynccontextmanager
async def fleet_of(folder: Path, *engines: FakeEngine | ForeignEngine):
    """A fleet that is not started yet; behind the block it is stopped, and nothing is left of its engines."""
    plans = tuple(one.plan for one in engines)
    plan = Plan(parse_topology("tiers: {mixed: }"), "/models/tiny", (MODEL, "alias"), None, plans, ())
    fleet = Observed(plan, folder / "logs")
    try:
        yield fleet
    finally:
        await asyncio.wait_for(fleet.stop(), WAIT_S)
    mine = [pid for one in engines if isinstance(one, FakeEngine) for pid in one.noted("starts")]
    assert left_of({*fleet.pids, *mine}) == []


async def refusal(fleet: Fleet) -> EngineFailedError:
    with pytest.raises(EngineFailedError) as caught:
        await asyncio.wait_for(fleet.start(), WAIT_S)
    return caught.value


# start


async def test_an_engine_is_ready_when_it_has_generated_a_token(tmp_path):
    engine = FakeEngine(tmp_path, canary="hang")
    async with fleet_of(tmp_path, engine) as fleet:
        starting = asyncio.create_task(fleet.start())
        await holds(lambda: engine.noted("canaries"))
        await asyncio.sleep(0.1)
        assert not starting.done()
        assert fleet.states()[-1] == "starting"
        engine.behave()
        await asyncio.wait_for(starting, WAIT_S)
        assert fleet.states()[-1] == "ready"
        assert engine.noted("canaries") == [{"model": MODEL, "key": None}]


async def test_a_fleet_has_started_when_all_of_its_engines_are_ready(tmp_path):
    quick, slow = FakeEngine(tmp_path, "prefill-0"), FakeEngine(tmp_path, "decode-0", health=500)
    async with fleet_of(tmp_path, quick, slow) as fleet:
        starting = asyncio.create_task(fleet.start())
        await fleet.said(State.READY, "prefill-0")
        await asyncio.sleep(0.1)
        assert not starting.done()
        slow.behave()
        await asyncio.wait_for(starting, WAIT_S)
        assert fleet.states("decode-0") == ["starting", "starting", "ready"]


async def test_engines_start_side_by_side(tmp_path):
    engines = [FakeEngine(tmp_path, f"decode-{number}", health=500) for number in range(2)]
    async with fleet_of(tmp_path, *engines) as fleet:
        starting = asyncio.create_task(fleet.start())
        await holds(lambda: all(one.noted("starts") for one in engines))
        for one in engines:
            one.behave()
        await asyncio.wait_for(starting, WAIT_S)


async def test_the_facts_of_an_engine(tmp_path):
    metrics = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1.0\n'
    engine = FakeEngine(tmp_path, metrics=metrics)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        assert fleet.engines["mixed-0"].facts() == {
            "name": "mixed-0",
            "tier": "mixed",
            "url": engine.plan.url,
            "device": "cpu",
            "state": "ready",
            "ready": True,
            "leaving": False,
            "generation": 1,
            "restarts": 0,
            "problem": None,
            "last_problem": None,
            "last_problem_at": None,
            "log": str(tmp_path / "logs" / "mixed-0.log"),
            "cached_block_tokens": 16,
            "api_key": None,
            "aborts": False,
            "kv_address": None,
            "kv_events": None,
        }


@pytest.mark.parametrize("aborts", [True, False])
async def test_whether_an_engine_can_end_a_request_by_its_id_is_asked(tmp_path, aborts):
    async with fleet_of(tmp_path, FakeEngine(tmp_path, aborts=aborts)) as fleet:
        await fleet.start()
        assert fleet.engines["mixed-0"].facts()["aborts"] is aborts


async def test_a_stranger_on_an_engines_port_is_not_that_engine(tmp_path):
    """It answers every question as an engine would."""
    engine = FakeEngine(tmp_path, start="wait")
    stranger = FakeEngine(tmp_path / "stranger")
    command = [sys.executable, "-S", fake_engine.__file__, str(engine.plan.port), str(stranger.folder)]
    other = await GuardedProcess.start(command, {}, tmp_path / "stranger.log")
    try:
        await holds(lambda: stranger.noted("starts"))
        async with fleet_of(tmp_path, engine) as fleet:
            async with aiohttp.ClientSession() as session:
                for _ in range(500):
                    if await probe.health(session, engine.plan.url) is probe.Health.OK:
                        break
                    await asyncio.sleep(0.01)
            starting = asyncio.create_task(fleet.start())
            await holds(lambda: engine.noted("starts"))
            await asyncio.sleep(0.3)
            assert not starting.done()
            assert set(fleet.states()) == {"starting"}
            assert stranger.noted("canaries") == []
            await other.stop()
            engine.behave()
            await asyncio.wait_for(starting, WAIT_S)
            assert fleet.states()[-1] == "ready"
    finally:
        await other.stop()


async def test_an_engines_words_are_in_its_log(tmp_path):
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        os.kill(engine.pid, signal.SIGKILL)
        await fleet.said(State.READY, times=2)
    assert (tmp_path / "logs" / "mixed-0.log").read_text() == "the engine starts\n" * 2


@pytest.mark.parametrize(
    ("status", "expected"), [(3, "ended with exit status 3"), (-signal.SIGSEGV, "was ended by signal 11")]
)
async def test_an_engine_that_ends_at_its_start_is_an_error_with_its_log(tmp_path, status, expected):
    async with fleet_of(tmp_path, FakeEngine(tmp_path, start=status)) as fleet:
        error = await refusal(fleet)
        assert error.problem == f"engine mixed-0 {expected}"
        assert error.mend == f"its log is {tmp_path / 'logs' / 'mixed-0.log'}"
        assert error.detail == "the engine starts\nthe engine cannot start"
        assert fleet.states() == ["starting", "starting", "failed"]
        assert fleet.engines["mixed-0"].facts()["problem"] == expected


async def test_the_siblings_of_one_that_cannot_start_are_gone_after_stop(tmp_path):
    good = FakeEngine(tmp_path, "prefill-0")
    async with fleet_of(tmp_path, good, FakeEngine(tmp_path, "decode-0", start=3)) as fleet:
        assert (await refusal(fleet)).problem == "engine decode-0 ended with exit status 3"
    assert left_of(good.noted("starts")) == []


async def test_an_engine_that_ends_before_its_siblings_are_ready_is_an_error(tmp_path):
    slow = FakeEngine(tmp_path, "decode-0", health=500)
    async with fleet_of(tmp_path, FakeEngine(tmp_path, "prefill-0", die_after_s=0.2), slow) as fleet:
        assert (await refusal(fleet)).problem == "engine prefill-0 ended with exit status 9"
        assert "ready" in fleet.states("prefill-0")


async def test_an_engine_that_ends_during_its_canary_is_noticed_then(tmp_path):
    engine = FakeEngine(tmp_path, canary="hang", die_after_s=0.3)
    async with fleet_of(tmp_path, engine) as fleet:
        assert (await refusal(fleet)).problem == "engine mixed-0 ended with exit status 9"
        assert engine.noted("canaries")


def without_memory(monkeypatch) -> None:
    async def start(*_: object) -> GuardedProcess:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(GuardedProcess, "start", start)


async def test_an_engine_whose_process_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    without_memory(monkeypatch)
    async with fleet_of(tmp_path, FakeEngine(tmp_path)) as fleet:
        error = await refusal(fleet)
        assert error.problem == "engine mixed-0 could not be started: Cannot allocate memory"
        assert fleet.states() == ["starting", "starting", "failed"]


async def test_an_engine_whose_process_cannot_be_made_again_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05, 0.2))
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        with monkeypatch.context() as patch:
            without_memory(patch)
            os.kill(engine.pid, signal.SIGKILL)
            failed = await fleet.said(State.FAILED, times=2)
            assert failed.problem == "could not be started: Cannot allocate memory"
            assert fleet.engines["mixed-0"].facts()["ready"] is False
        back = await fleet.said(State.READY, times=2)
        assert back.problem is None
        assert back.at_s - failed.at_s >= 0.2
        assert len(engine.noted("starts")) == 2


async def test_an_engine_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_START_LIMIT_S", 0.4)
    async with fleet_of(tmp_path, FakeEngine(tmp_path, start="hang")) as fleet:
        assert (await refusal(fleet)).problem == "engine mixed-0 was not ready after 0 s"


async def test_an_engine_that_refuses_its_canary_is_an_error(tmp_path):
    async with fleet_of(tmp_path, FakeEngine(tmp_path, canary=500)) as fleet:
        assert "HTTP 500 on a one-token request" in (await refusal(fleet)).problem
        assert "ready" not in fleet.states()


# watching


async def test_a_crash_is_noticed_within_a_second_and_the_engine_started_again(tmp_path, monkeypatch):
    monkeypatch.undo()  # as it is in service
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.3,))
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        killed_s = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        failed = await fleet.said(State.FAILED)
        assert failed.at_s - killed_s < NOTICED_S
        assert failed.problem == "was ended by signal 9"
        ready = await fleet.said(State.READY, times=2)
        assert (ready.generation, ready.problem) == (2, None)
        assert fleet.states() == ["starting", "starting", "ready", "failed", "starting", "ready"]
        again = [one for one in fleet.news if one.generation == 2]
        assert again[0].at_s - failed.at_s >= 0.3
        facts = fleet.engines["mixed-0"].facts()
        assert (facts["restarts"], facts["problem"]) == (1, None)
        assert facts["last_problem"] == "was ended by signal 9"
        told = datetime.strptime(facts["last_problem_at"], "%Y-%m-%dT%H:%M:%S%z")
        assert abs(datetime.now(UTC) - told) < timedelta(minutes=1)


async def test_the_others_serve_on_while_one_is_started_again(tmp_path):
    engines = FakeEngine(tmp_path, "prefill-0"), FakeEngine(tmp_path, "decode-0")
    async with fleet_of(tmp_path, *engines) as fleet:
        await fleet.start()
        other = engines[1].pid
        os.kill(engines[0].pid, signal.SIGKILL)
        await fleet.said(State.READY, "prefill-0", times=2)
        assert fleet.states("decode-0") == ["starting", "starting", "ready"]
        assert engines[1].noted("starts") == [other]


async def test_pauses_between_starts_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.0, 0.15, 0.3))
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        engine.behave(start=3)
        os.kill(engine.pid, signal.SIGKILL)
        await fleet.said(State.STARTING, times=6)
        told = [one for one in fleet.news if one.generation > 1 or one.state == "failed"]
        pauses = [after.at_s - before.at_s for before, after in itertools.pairwise(told) if after.state == "starting"]
        for pause, least in zip(pauses, (0.0, 0.15, 0.3, 0.3), strict=True):
            assert pause >= least
        assert [one.problem for one in told if one.state == "failed"][1:] == ["ended with exit status 3"] * 3


async def test_after_long_service_earlier_failures_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_STEADY_S", 0.2)
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        for times in (1, 2):
            os.kill(engine.pid, signal.SIGKILL)
            await fleet.said(State.READY, times=times + 1)
        assert fleet.engines["mixed-0"].failures == 2
        await asyncio.sleep(0.25)
        os.kill(engine.pid, signal.SIGKILL)
        await fleet.said(State.READY, times=4)
        assert fleet.engines["mixed-0"].failures == 1


async def test_an_engine_that_says_that_it_died_is_replaced(tmp_path):
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        old = engine.pid
        engine.behave(health=503)
        failed = await fleet.said(State.FAILED)
        engine.behave()
        assert failed.problem == "says that its engine core has died"
        await fleet.said(State.READY, times=2)
        assert left_of([old]) == []
        assert engine.pid != old


async def test_an_engine_that_is_silent_for_long_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_SILENCE_S", 0.4)
    monkeypatch.setattr(probe, "_QUESTION_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        os.kill(engine.pid, signal.SIGSTOP)
        asked_s = time.monotonic()
        failed = await fleet.said(State.FAILED)
        assert failed.problem == "has not answered for 0 s"
        assert failed.at_s - asked_s > 0.35
        await fleet.said(State.READY, times=2)


@pytest.mark.parametrize("word", [probe.Health.SILENT, probe.Health.REFUSED])
async def test_an_engine_that_runs_and_cannot_be_reached_for_long_is_replaced(tmp_path, monkeypatch, word):
    monkeypatch.setattr(supervisor, "_SILENCE_S", 0.2)
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        with monkeypatch.context() as patch:

            async def health(*_: object) -> probe.Health:
                return word

            patch.setattr(probe, "health", health)
            assert (await fleet.said(State.FAILED)).problem == "has not answered for 0 s"
        await fleet.said(State.READY, times=2)


async def test_an_engine_that_is_busy_for_a_while_serves_on(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_SILENCE_S", 5.0)
    monkeypatch.setattr(probe, "_QUESTION_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        engine.behave(health="hang")
        await asyncio.sleep(0.4)
        engine.behave(health=500)
        await asyncio.sleep(0.1)
        engine.behave()
        await asyncio.sleep(0.1)
        assert fleet.states() == ["starting", "starting", "ready"]


async def test_an_engine_that_lost_one_of_vllms_processes_is_replaced(tmp_path):
    engine = FakeEngine(tmp_path, title="VLLM::EngineCor")
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        (core,) = below(engine.pid)
        killed_s = time.monotonic()
        os.kill(core, signal.SIGKILL)
        failed = await fleet.said(State.FAILED)
        assert failed.problem == "has lost its process VLLM::EngineCor"
        assert failed.at_s - killed_s < NOTICED_S
        await fleet.said(State.READY, times=2)


# stop


async def test_stopping_ends_every_engine(tmp_path):
    engines = [FakeEngine(tmp_path, name) for name in ("prefill-0", "decode-0", "mixed-0")]
    async with fleet_of(tmp_path, *engines) as fleet:
        await fleet.start()
    assert {name: one.state for name, one in fleet.engines.items()} == dict.fromkeys(fleet.engines, State.STOPPED)
    assert all(left_of(one.noted("starts")) == [] for one in engines)


async def test_decode_ends_before_prefill_which_holds_its_kv(tmp_path):
    engines = {name: FakeEngine(tmp_path, name) for name in ("prefill-0", "decode-0", "mixed-0")}
    async with fleet_of(tmp_path, *engines.values()) as fleet:
        await fleet.start()
    ends_s = {name: one.noted("ends")[0] for name, one in engines.items()}
    assert sorted(ends_s, key=ends_s.get) == ["decode-0", "mixed-0", "prefill-0"]


async def test_a_fleet_that_still_starts_can_be_stopped(tmp_path):
    engine = FakeEngine(tmp_path, start="hang")
    async with fleet_of(tmp_path, engine) as fleet:
        starting = asyncio.create_task(fleet.start())
        await holds(lambda: engine.noted("starts"))
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    assert left_of(engine.noted("starts")) == []


async def test_a_fleet_can_be_stopped_while_an_engine_is_started_again(tmp_path):
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        engine.behave(start="hang")
        os.kill(engine.pid, signal.SIGKILL)
        await holds(lambda: len(engine.noted("starts")) == 2)
    assert fleet.states()[-1] == "stopped"


async def test_a_fleet_that_was_not_started_can_be_stopped(tmp_path):
    async with fleet_of(tmp_path, FakeEngine(tmp_path)) as fleet:
        pass
    assert fleet.states() == ["stopped"]


# engines of others


@pytest.mark.parametrize(
    ("health", "why"),
    [(None, "it does not answer there yet"), (503, "what answers there says that it has died")],
)
async def test_an_engine_of_someone_else_is_waited_for(tmp_path, health, why):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        engine.health = health
        starting = asyncio.create_task(fleet.start())
        assert (await fleet.said(State.WAITING, times=2)).problem == why
        await asyncio.sleep(0.2)
        assert fleet.states() == ["waiting", "waiting"], "it is told once"
        assert not starting.done()
        engine.health = 200
        await asyncio.wait_for(starting, WAIT_S)
        assert fleet.states() == ["waiting", "waiting", "ready"]
        facts = fleet.engines["decode-0"].facts()
        assert (facts["log"], facts["problem"], facts["last_problem"]) == (None, None, None)


async def test_where_nothing_listens_that_is_what_is_waited_for(tmp_path):
    async with ForeignEngine() as engine:
        await engine.vanish()
        async with fleet_of(tmp_path, engine) as fleet:
            starting = asyncio.create_task(fleet.start())
            told = await fleet.said(State.WAITING, times=2)
            assert told.problem == "nothing listens there yet, or there is no such host"
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


async def test_an_engine_on_another_host_is_followed_too(tmp_path):
    async with ForeignEngine(started_by="another host") as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        assert fleet.states() == ["waiting", "ready"]


async def test_an_engine_of_someone_else_is_asked_with_its_key(tmp_path):
    async with ForeignEngine(api_key="secret") as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        assert engine.keys == ["Bearer secret"]
        assert fleet.engines["decode-0"].facts()["api_key"] == "secret"


async def test_an_engine_of_someone_else_is_left_out_while_it_says_that_it_has_died(tmp_path):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        engine.health = 503
        left = await fleet.said(State.WAITING, times=2)
        assert left.problem == "says that it has died"
        engine.health = 200
        back = await fleet.said(State.READY, times=2)
        assert (back.generation, back.problem) == (2, None)
        assert fleet.engines["decode-0"].facts()["last_problem"] == "says that it has died"
        assert len(engine.keys) == 2, "one that comes back has to generate a token first"


async def test_an_engine_of_someone_else_is_left_out_a_second_after_nothing_listens_there(tmp_path, monkeypatch):
    monkeypatch.undo()  # as it is in service
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        await engine.vanish()
        vanished_s = time.monotonic()
        left = await fleet.said(State.WAITING, times=2)
        assert left.problem == "does not answer"
        assert 0.5 < left.at_s - vanished_s < NOTICED_S


SILENCES = {"hangs": ("hangs", True), "closes": ("health", None), "errs": ("health", 500)}


@pytest.mark.parametrize(("what", "value"), SILENCES.values(), ids=SILENCES)
async def test_an_engine_of_someone_else_may_be_silent_for_long(tmp_path, monkeypatch, what, value):
    """It is busy: a thousand prompts at once make a server slow to answer."""
    monkeypatch.setattr(supervisor, "_SILENCE_S", 0.5)
    monkeypatch.setattr(probe, "_QUESTION_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        silent_s = time.monotonic()
        setattr(engine, what, value)
        left = await fleet.said(State.WAITING, times=2)
        assert left.problem == "does not answer"
        assert 0.4 < left.at_s - silent_s < NOTICED_S


async def test_an_answer_within_the_silence_makes_up_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_SILENCE_S", 0.5)
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        for _ in range(3):
            engine.health = None
            await asyncio.sleep(0.3)
            engine.health = 200
            await asyncio.sleep(0.1)
        assert fleet.states() == ["waiting", "ready"]


async def test_a_refused_connection_that_was_one_only_is_no_absence(tmp_path, monkeypatch):
    words = []
    original = probe.health

    async def health(session, url):
        return words.pop() if words else await original(session, url)

    monkeypatch.setattr(probe, "health", health)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.1)
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        words.append(probe.Health.REFUSED)
        await holds(lambda: not words)
        await asyncio.sleep(0.3)
        assert fleet.states() == ["waiting", "ready"]


@pytest.mark.parametrize("version", [{"version": "0.29.1"}, {"version": "0.9.0rc2"}])
async def test_a_vllm_that_is_too_old_is_refused_by_name(tmp_path, version):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        engine.version = version
        error = await refusal(fleet)
        assert error.problem == f"engine decode-0 at {engine.plan.url} is vLLM {version['version']}"
        assert error.mend == "Trivet needs 0.30 or newer"
        assert engine.keys == []


@pytest.mark.parametrize("version", [{"version": "0.30.0"}, {"version": "1.0"}, {}, None])
async def test_a_vllm_that_is_new_enough_or_tells_nothing_is_taken(tmp_path, version):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        engine.version = version
        await asyncio.wait_for(fleet.start(), WAIT_S)
        assert fleet.states()[-1] == "ready"


async def test_an_engine_of_someone_else_that_refuses_its_canary_is_refused_by_name(tmp_path):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        engine.canary = 404
        expected = f"start it with --enable-scale-out and --served-model-name {MODEL} (HTTP 404: why not)"
        assert (await refusal(fleet)).problem == f"engine decode-0 at {engine.plan.url}: {expected}"


UNFIT = {
    "canary": ("canary", 500, 200, "HTTP 500 on a one-token request: why not"),
    "version": (
        "version",
        {"version": "0.29.0"},
        {"version": "0.30.0"},
        "is vLLM 0.29.0; Trivet needs 0.30 or newer",
    ),
}


@pytest.mark.parametrize(("what", "bad", "good", "problem"), UNFIT.values(), ids=UNFIT)
async def test_an_engine_that_comes_back_unfit_is_told_so_and_waited_for(tmp_path, what, bad, good, problem):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        engine.health = 503
        await fleet.said(State.WAITING, times=2)
        setattr(engine, what, bad)
        engine.health = 200
        assert (await fleet.said(State.WAITING, times=3)).problem == problem
        facts = fleet.engines["decode-0"].facts()
        assert (facts["state"], facts["problem"]) == ("waiting", problem)
        await fleet.said(State.WAITING, times=4)
        setattr(engine, what, good)
        back = await fleet.said(State.READY, times=2)
        assert (back.generation, back.problem) == (2, None)


async def test_an_unfit_engine_is_not_asked_all_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_RECHECK_S", 0.4)
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        engine.health = 503
        await fleet.said(State.WAITING, times=2)
        engine.canary, engine.health = 500, 200
        times = [(await fleet.said(State.WAITING, times=number)).at_s for number in (3, 4)]
        assert times[1] - times[0] >= 0.4
        assert len(engine.keys) == 3


async def test_what_an_engine_tells_of_its_cache_is_read_each_time_it_comes_up(tmp_path):
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        status = fleet.engines["decode-0"]
        assert status.cached_block_tokens is None
        engine.metrics = 'vllm:cache_config_info{block_size="128",enable_prefix_caching="True"} 1.0\n'
        engine.health = 503
        await fleet.said(State.WAITING, times=2)
        engine.health = 200
        await fleet.said(State.READY, times=2)
        assert status.cached_block_tokens == 128


async def test_an_engine_that_could_not_be_asked_when_it_came_up_is_asked_again(tmp_path):
    """It serves meanwhile: a machine that starts many engines at once is busy for minutes."""
    async with ForeignEngine() as engine, fleet_of(tmp_path, engine) as fleet:
        engine.metrics = None
        await fleet.start()
        status = fleet.engines["decode-0"]
        assert (status.state, status.cached_block_tokens) == (State.READY, None)
        engine.metrics = 'vllm:cache_config_info{block_size="128",enable_prefix_caching="True"} 1.0\n'
        await fleet.said(State.READY, times=2)  # told once more
        assert (status.generation, status.cached_block_tokens) == (1, 128)


async def test_engines_of_others_are_not_ended(tmp_path):
    async with ForeignEngine() as engine:
        async with fleet_of(tmp_path, engine) as fleet:
            await fleet.start()
        async with aiohttp.ClientSession() as session:
            assert await probe.health(session, engine.plan.url) is probe.Health.OK
        assert fleet.engines["decode-0"].pid is None


# engines that come and go while others serve


async def test_an_engine_joins_a_fleet_that_serves(tmp_path):
    first, second = FakeEngine(tmp_path, "decode-0"), FakeEngine(tmp_path, "decode-1", health=500)
    async with fleet_of(tmp_path, first) as fleet:
        await fleet.start()
        joining = asyncio.create_task(fleet.join([second.plan]))
        await fleet.said(State.STARTING, "decode-1")
        await asyncio.sleep(0.1)
        assert not joining.done()
        second.behave()
        await asyncio.wait_for(joining, WAIT_S)
        assert [one.state for one in fleet.engines.values()] == ["ready", "ready"]
        assert len(first.noted("starts")) == 1
        os.kill(second.pid, signal.SIGKILL)  # from now on it is as the others
        await fleet.said(State.READY, "decode-1", times=2)
    assert left_of(second.noted("starts")) == []


async def test_engines_of_which_one_cannot_join_are_there_until_they_part(tmp_path):
    """Those that are ready may have something running."""
    first, good = FakeEngine(tmp_path, "decode-0"), FakeEngine(tmp_path, "decode-1")
    bad = FakeEngine(tmp_path, "decode-2", start=3)
    async with fleet_of(tmp_path, first) as fleet:
        await fleet.start()
        with pytest.raises(EngineFailedError, match=r"^engine decode-2 ended with exit status 3 -> its log is "):
            await asyncio.wait_for(fleet.join([good.plan, bad.plan]), WAIT_S)
        assert list(fleet.engines) == ["decode-0", "decode-1", "decode-2"]
        assert left_of([good.pid], within_s=0) == [good.pid]
        await fleet.part(["decode-1", "decode-2"])
        assert list(fleet.engines) == ["decode-0"]
        assert left_of([*good.noted("starts"), *bad.noted("starts")]) == []
        assert len(first.noted("starts")) == 1


async def test_an_engine_of_someone_else_that_never_comes_does_not_join(tmp_path, monkeypatch):
    plan = EnginePlan("mixed-1", "mixed", f"http://127.0.0.1:{unused_port()}", "cuda", "someone else")
    async with fleet_of(tmp_path, FakeEngine(tmp_path)) as fleet:
        await fleet.start()
        monkeypatch.setattr(supervisor, "_START_LIMIT_S", 0.3)
        with pytest.raises(EngineFailedError, match=r"^engine mixed-1 was not ready after 0 s -> is it running there"):
            await asyncio.wait_for(fleet.join([plan]), WAIT_S)
        await fleet.part(["mixed-1"])
        assert list(fleet.engines) == ["mixed-0"]


async def test_an_engine_that_leaves_runs_until_it_parts(tmp_path):
    kept, going = FakeEngine(tmp_path, "decode-0"), FakeEngine(tmp_path, "decode-1")
    async with fleet_of(tmp_path, kept, going) as fleet:
        await fleet.start()
        fleet.leave("decode-1", "it goes")
        facts = fleet.engines["decode-1"].facts()
        assert (facts["state"], facts["ready"], facts["leaving"], facts["problem"]) == (
            "leaving",
            False,
            True,
            "it goes",
        )
        await asyncio.sleep(0.2)
        assert fleet.engines["decode-1"].state == "leaving"
        assert left_of([going.pid], within_s=0) == [going.pid]
        await fleet.part(["decode-1"])
        assert fleet.states("decode-1")[-2:] == ["stopped", "stopped"]
        assert list(fleet.engines) == ["decode-0"]
        assert len(going.noted("ends")) == 1, "it could end by itself"
        assert left_of([going.pid]) == []


async def test_an_engine_that_leaves_may_stay_after_all(tmp_path):
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        fleet.leave("mixed-0", "it goes")
        assert fleet.stay(engine.plan)
        facts = fleet.engines["mixed-0"].facts()
        assert (facts["state"], facts["problem"], facts["restarts"]) == ("ready", None, 0)
        os.kill(engine.pid, signal.SIGKILL)  # it is as it was, so that it is started again
        await fleet.said(State.READY, times=3)
        assert not fleet.stay(replace(engine.plan, port=1)), "this is another one"
        await fleet.part(["mixed-0"])
        assert not fleet.stay(engine.plan)


async def test_an_engine_that_ends_while_it_leaves_is_not_started_again(tmp_path):
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        fleet.leave("mixed-0", "it goes")
        os.kill(engine.pid, signal.SIGKILL)
        await fleet.said(State.FAILED)
        await asyncio.sleep(0.3)
        assert len(engine.noted("starts")) == 1
        await fleet.part(["mixed-0"])
        assert fleet.engines == {}


async def test_an_engine_that_comes_up_when_it_is_to_leave_gets_nothing(tmp_path):
    engine = FakeEngine(tmp_path, "decode-1")
    async with fleet_of(tmp_path, FakeEngine(tmp_path, "decode-0"), engine) as fleet:
        await fleet.start()
        engine.behave(health=500)
        os.kill(engine.pid, signal.SIGKILL)
        await fleet.said(State.STARTING, "decode-1", times=3)
        fleet.leave("decode-1", "it goes")
        assert fleet.engines["decode-1"].facts()["leaving"] is False, "nothing runs there"
        engine.behave()
        await fleet.said(State.LEAVING, "decode-1")
        assert fleet.states("decode-1").count("ready") == 1


async def test_an_engine_of_someone_else_is_followed_while_it_leaves_and_not_stopped(tmp_path):
    async with ForeignEngine("mixed-1") as other, fleet_of(tmp_path, FakeEngine(tmp_path), other) as fleet:
        await fleet.start()
        fleet.leave("mixed-1", "it goes")
        await asyncio.sleep(0.2)
        assert fleet.states("mixed-1")[-1] == "leaving"
        other.health = 503
        await fleet.said(State.WAITING, "mixed-1", times=2)
        other.health = 200
        await asyncio.sleep(0.2)
        assert fleet.states("mixed-1")[-1] == "waiting", "it is not taken back"
        await fleet.part(["mixed-1"])
        assert list(fleet.engines) == ["mixed-0"]


async def test_an_engine_that_comes_back_is_known_as_another(tmp_path):
    engine = FakeEngine(tmp_path, "decode-1")
    async with fleet_of(tmp_path, FakeEngine(tmp_path, "decode-0"), engine) as fleet:
        await fleet.start()
        os.kill(engine.pid, signal.SIGKILL)
        await fleet.said(State.READY, "decode-1", times=2)
        await fleet.part(["decode-1"])
        await fleet.join([engine.plan])
        facts = fleet.engines["decode-1"].facts()
        assert (facts["generation"], facts["restarts"]) == (3, 0)
        await fleet.part(["decode-1"])
        fleet.resume([engine.plan])
        await fleet.said(State.READY, "decode-1", times=4)
        facts = fleet.engines["decode-1"].facts()
        assert (facts["generation"], facts["restarts"]) == (4, 0)


async def test_an_engine_that_was_there_before_is_tried_until_it_is_back(tmp_path):
    engine = FakeEngine(tmp_path)
    async with fleet_of(tmp_path, engine) as fleet:
        await fleet.start()
        await fleet.part(["mixed-0"])
        engine.behave(start=3)
        fleet.resume([engine.plan])
        await fleet.said(State.FAILED, times=2)
        engine.behave()
        await fleet.said(State.READY, times=2)
