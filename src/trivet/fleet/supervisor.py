"""Starts the engines of a plan, watches all of them, and starts again those that end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from trivet.errors import EngineFailedError
from trivet.fleet import probe
from trivet.fleet.process import GuardedProcess, cause, how_it_ended, lost, tail
from trivet.topology.machine import OLDEST_VLLM, is_too_old
from trivet.topology.plan import EnginePlan, Plan

_POLL_S = 0.3
_FAMILY_POLL_S = 0.1
"""Between looks at an engine's processes: a few reads of ``/proc`` each, so that a dead one is seen at once."""
_SILENCE_S = 30.0
"""An engine that has answered nothing for so long is out of service; a busy one may be slow to answer."""
_LAST_WORDS_S = 1.0
"""An engine that breaks off an answer has often just ended, which says more; its guard notices a moment later."""
_RECHECK_S = 5.0
_START_LIMIT_S = 1800.0
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 120.0
"""After so long in service an engine's earlier failures are forgotten."""


class State(StrEnum):
    """Where an engine is in its life."""

    WAITING = "waiting"
    """Someone else starts it, and it does not answer yet."""
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    """It ended; it is started again after a pause."""
    LEAVING = "leaving"
    """It is to be stopped: it gets nothing new, and what runs there may end."""
    STOPPED = "stopped"


_IN_SERVICE = (State.READY, State.LEAVING)
_ABSENT = {
    probe.Health.REFUSED: "nothing listens there yet, or there is no such host",
    probe.Health.SILENT: "it does not answer there yet",
    probe.Health.DEAD: "what answers there says that it has died",
}
"""What keeps an engine that someone else starts from being used, by what it says to the first questions."""


@dataclass(slots=True)
class EngineStatus:
    """One engine as the fleet knows it."""

    plan: EnginePlan
    log: Path
    state: State
    generation: int = 0
    first_generation: int = 1
    """Above 1 for an engine that has the name of an earlier one: what was known of that must not be taken for its."""
    stays: bool = False
    """Whether it is started again when it fails; until then its failure is the error of who waits for it."""
    parts: bool = False
    """Whether it is to be stopped, and so is not started again."""
    failures: int = 0
    ready_since: float | None = None
    problem: str | None = None
    """What is wrong now."""
    last_problem: str | None = None
    """What was wrong last, also when that is over."""
    last_problem_at: str | None = None
    """When that was: UTC, as ISO 8601 has it."""
    pid: int | None = None
    is_known: bool = False
    """Whether it has told what follows since it came up."""
    asked_s: float = 0.0
    cached_block_tokens: int | None = None
    aborts: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def facts(self) -> dict[str, Any]:
        """For gateway workers and ``trivet status``."""
        return {
            "name": self.plan.name,
            "tier": self.plan.tier,
            "url": self.plan.url,
            "device": self.plan.device,
            "state": str(self.state),
            "ready": self.state is State.READY,
            "leaving": self.state is State.LEAVING,
            "generation": self.generation,
            "restarts": max(0, self.generation - self.first_generation),
            "problem": self.problem,
            "last_problem": self.last_problem,
            "last_problem_at": self.last_problem_at,
            "log": str(self.log) if self.plan.started_by == "trivet" else None,
            "cached_block_tokens": self.cached_block_tokens,
            "aborts": self.aborts,
            "kv_address": self.plan.kv_address,
            "kv_events": self.plan.kv_events,
            "api_key": self.plan.api_key,
        }


Listener = Callable[[EngineStatus], None]


class Fleet:
    """The engines of a plan. ``start`` once, ``stop`` once; between them engines ``join`` and ``part``."""

    def __init__(self, plan: Plan, logs: Path, listener: Listener = lambda _: None) -> None:
        """
        Args:
            logs: folder for one log an engine.
            listener: called with an engine's status each time its state changes.
        """
        self._model = plan.served_names[0]
        self._listener = listener
        self._logs = logs
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, GuardedProcess] = {}
        self._session: aiohttp.ClientSession | None = None
        self._awaited: Collection[str] = [one.name for one in plan.engines]
        """Engines that somebody waits for."""
        self._all_ready = asyncio.Event()
        """They are."""
        self._generations: dict[str, int] = {}
        """Of engines that have parted."""
        self.engines = {one.name: self._new(one) for one in plan.engines}

    async def start(self) -> None:
        """Returns when every engine is ready.

        Raises:
            EngineFailedError: one ended instead, or a foreign one is too old; its siblings still run until ``stop``.
        """
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        for status in self.engines.values():
            self._begin(status)
        await self._all_up()
        for status in self.engines.values():
            status.stays = True

    async def join(self, plans: Sequence[EnginePlan]) -> None:
        """Starts further engines, or follows those that others start; returns when all of them are ready.

        Whatever is raised, they are there until they ``part``: those that came up may have something running.

        Raises:
            EngineFailedError: one ended instead, or was not ready in time.
        """
        self._awaited = [one.name for one in plans]
        self._all_ready.clear()
        for plan in plans:
            self.engines[plan.name] = status = self._new(plan)
            self._begin(status)
        try:
            async with asyncio.timeout(_START_LIMIT_S + _POLL_S):  # one that others start may never come
                await self._all_up()
        except TimeoutError:
            late = [name for name in self._awaited if self.engines[name].state is not State.READY]
            raise EngineFailedError(
                f"engine {late[0]} was not ready after {_START_LIMIT_S:.0f} s", mend="is it running there?"
            ) from None
        for plan in plans:
            self.engines[plan.name].stays = True

    def resume(self, plans: Sequence[EnginePlan]) -> None:
        """Starts engines that were there before, as ``start`` would have them; nobody waits for them."""
        for plan in plans:
            self.engines[plan.name] = status = self._new(plan)
            status.stays = True
            self._begin(status)

    def leave(self, name: str, why: str) -> None:
        """Takes an engine out of the rotation for what is new, before it is stopped; what runs there goes on.

        Args:
            why: for a person who looks.
        """
        status = self.engines[name]
        status.parts = True
        if status.state is State.READY:
            status.problem = why
            self._change(status, State.LEAVING)

    def stay(self, plan: EnginePlan) -> bool:
        """Takes ``leave`` back, if that engine is still there as it was.

        Returns:
            Whether it is; else it is to be stopped and started again.
        """
        status, task = self.engines.get(plan.name), self._tasks.get(plan.name)
        if status is None or status.plan != plan or task is None or task.done():
            return False
        status.parts = False
        if status.state is State.LEAVING:
            self._change(status, State.READY)
        return True

    async def part(self, names: Collection[str]) -> None:
        """Stops engines, or no longer follows them, and forgets them: decode first, as in ``stop``."""
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in names:  # told first: ending takes a moment
            self.engines[name].problem = None
            self._change(self.engines[name], State.STOPPED)
        await self._end(names)
        for name in names:
            status = self.engines.pop(name)
            self._generations[name] = status.generation
            self._tasks.pop(name, None)
            self._processes.pop(name, None)
            self._listener(status)  # it is not among them any more

    def _new(self, plan: EnginePlan) -> EngineStatus:
        before = self._generations.get(plan.name, 0)
        return EngineStatus(
            plan,
            self._logs / f"{plan.name}.log",
            State.STARTING if plan.started_by == "trivet" else State.WAITING,
            generation=before,
            first_generation=before + 1,
        )

    def _begin(self, status: EngineStatus) -> None:
        self._listener(status)
        tend = self._tend if status.plan.started_by == "trivet" else self._follow
        self._tasks[status.plan.name] = asyncio.create_task(tend(status), name=f"engine {status.plan.name}")

    async def _all_up(self) -> None:
        """Returns when the engines that are awaited are ready.

        Raises:
            EngineFailedError: one of them ended instead.
        """
        everyone = asyncio.create_task(self._all_ready.wait())
        tasks = [self._tasks[name] for name in self._awaited]
        try:
            done, _ = await asyncio.wait([everyone, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a failed engine's error comes out here
        finally:
            everyone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await everyone

    async def _end(self, names: Collection[str]) -> None:
        for tier in ("decode", "mixed", "prefill"):
            mine = [name for name in names if self.engines[name].plan.tier == tier]
            await asyncio.gather(*(self._processes[name].stop() for name in mine if name in self._processes))

    async def stop(self) -> None:
        """Ends the engines that were started here: decode first, so that no transfer loses its source."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._end(self.engines)
        for status in self.engines.values():
            self._change(status, State.STOPPED)
        if self._session is not None:
            await self._session.close()

    async def _tend(self, status: EngineStatus) -> None:
        """The life of an engine that is started here."""
        while True:
            status.generation += 1
            status.started_s = time.monotonic()
            self._change(status, State.STARTING)
            try:
                process = await GuardedProcess.start(status.plan.command(), status.plan.environment(), status.log)
            except OSError as error:  # no memory, no descriptors, a full disk: it may be better the next time
                status.problem = f"could not be started: {error.strerror or error}"
                self._change(status, State.FAILED)
                if not status.stays:
                    raise EngineFailedError(f"engine {status.plan.name} {status.problem}") from error
                await asyncio.sleep(_BACKOFF_S[-1])
                continue
            self._processes[status.plan.name] = process
            status.pid = process.pid
            try:
                problem = await self._until_ready(status, process)
                if problem is None:
                    await self._learn(status)
                    status.ready_since = time.monotonic()
                    self._change(status, State.READY)
                    problem = await self._until_broken(status, process)
            except Exception:
                await process.kill()
                raise
            status.problem = problem
            self._change(status, State.FAILED)  # told first: ending what is left takes a moment
            await process.kill()
            if status.parts:
                return
            if not status.stays:
                why = cause(status.log, process.log_begins)
                raise EngineFailedError(
                    f"engine {status.plan.name} {problem}{f': {why}' if why else ''}",
                    mend=f"its log is {status.log}",
                    detail=tail(status.log),
                )
            if status.ready_since is not None and time.monotonic() - status.ready_since > _STEADY_S:
                status.failures = 0
            status.failures += 1
            status.ready_since = None
            await asyncio.sleep(_BACKOFF_S[min(status.failures, len(_BACKOFF_S)) - 1])

    async def _until_ready(self, status: EngineStatus, process: GuardedProcess) -> str | None:
        """None when the engine has generated a token; else what happened."""
        assert self._session is not None
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            if (problem := _ended(process)) is not None:
                return problem
            is_up = await probe.health(self._session, status.plan.url) is probe.Health.OK
            # another server may have this port, which then is who answered
            if is_up and process.listens_on(status.plan.port):
                return await self._watching(
                    process, probe.canary(self._session, status.plan.url, self._model, status.plan.api_key)
                )
            await asyncio.sleep(_POLL_S)
        return f"was not ready after {_START_LIMIT_S:.0f} s"

    async def _watching(self, process: GuardedProcess, question: Any) -> str | None:
        """The answer to a question, or the end of the process if that comes first."""
        asking = asyncio.ensure_future(question)
        ending = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and asking.result() is not None:
                await asyncio.wait([ending], timeout=_LAST_WORDS_S)
                return _ended(process) or str(asking.result())
            return None if asking.done() else _ended(process)
        finally:
            asking.cancel()
            ending.cancel()

    async def _until_broken(self, status: EngineStatus, process: GuardedProcess) -> str:
        """Returns when the engine ended, lost one of its processes, says that it died, or is silent for too long."""
        watches = [
            asyncio.create_task(one)
            for one in (_until_ended(process), _until_bereft(process), self._until_sick(status))
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in watches if task in done)
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _until_sick(self, status: EngineStatus) -> str:
        assert self._session is not None
        last_word = time.monotonic()
        while True:
            match await probe.health(self._session, status.plan.url):
                case probe.Health.OK:
                    last_word = time.monotonic()
                    await self._learn_late(status)
                case probe.Health.DEAD:
                    return "says that its engine core has died"
                case probe.Health.SILENT | probe.Health.REFUSED if time.monotonic() - last_word > _SILENCE_S:
                    return f"has not answered for {_SILENCE_S:.0f} s"
                case _:
                    pass
            await asyncio.sleep(_POLL_S)

    async def _follow(self, status: EngineStatus) -> None:
        """Watches an engine that someone else starts."""
        assert self._session is not None
        plan, last_word = status.plan, time.monotonic()
        while True:
            word = await probe.health(self._session, plan.url)
            if word is probe.Health.OK:
                last_word = time.monotonic()
                if status.state in _IN_SERVICE:
                    await self._learn_late(status)
                elif not status.parts:
                    found = await probe.version(self._session, plan.url)
                    if found is not None and is_too_old(found):
                        needed = f"Trivet needs {'.'.join(str(part) for part in OLDEST_VLLM)} or newer"
                        if not status.stays:
                            raise EngineFailedError(f"engine {plan.name} at {plan.url} is vLLM {found}", mend=needed)
                        status.problem = f"is vLLM {found}; {needed}"
                    else:
                        status.problem = await probe.canary(self._session, plan.url, self._model, plan.api_key)
                    if status.problem is None:
                        await self._learn(status)
                        status.generation += 1
                        self._change(status, State.READY)
                    elif not status.stays:
                        raise EngineFailedError(f"engine {plan.name} at {plan.url}: {status.problem}")
                    else:
                        self._change(status, State.WAITING)
                        await asyncio.sleep(_RECHECK_S)
            elif status.state in _IN_SERVICE and (
                word is probe.Health.DEAD
                or time.monotonic() - last_word > (3 * _POLL_S if word is probe.Health.REFUSED else _SILENCE_S)
            ):
                status.problem = "says that it has died" if word is probe.Health.DEAD else "does not answer"
                self._change(status, State.WAITING)
            elif status.state is State.WAITING and status.problem is None:
                status.problem = _ABSENT[word]
                self._listener(status)  # nothing has happened, it is only known now what is waited for
            await asyncio.sleep(_POLL_S)

    async def _learn(self, status: EngineStatus) -> None:
        """Reads what a gateway must know of an engine that has just come up."""
        for _ in range(3):  # it is busy just then: its siblings may still be starting
            if await self._ask(status):
                return
            await asyncio.sleep(_POLL_S)

    async def _learn_late(self, status: EngineStatus) -> None:
        """The same of one that serves, as long as it has not answered that."""
        if status.is_known or time.monotonic() - status.asked_s < _RECHECK_S:
            return
        if await self._ask(status):
            self._listener(status)

    async def _ask(self, status: EngineStatus) -> bool:
        assert self._session is not None
        status.asked_s = time.monotonic()
        metrics = await probe.metrics(self._session, status.plan.url)
        status.is_known = metrics is not None
        status.cached_block_tokens = metrics.cached_block_tokens if metrics else None
        status.aborts = await probe.can_abort(self._session, status.plan.url, status.plan.api_key)
        return status.is_known

    def _change(self, status: EngineStatus, state: State) -> None:
        if state is State.READY and status.parts:  # it has just come up, too late
            state = State.LEAVING
        status.state = state
        if state is State.READY:
            status.problem = None
        elif status.problem is not None and state in (State.FAILED, State.WAITING):
            status.last_problem = status.problem
            status.last_problem_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if all(self.engines[name].state is State.READY for name in self._awaited if name in self.engines):
            self._all_ready.set()
        self._listener(status)


async def _until_ended(process: GuardedProcess) -> str:
    await process.wait()
    return _ended(process) or "ended"


async def _until_bereft(process: GuardedProcess) -> str:
    """vLLM notices a lost worker itself, but may take seconds to say so."""
    family = process.family()
    while (gone := lost(family)) is None:  # noqa: ASYNC110  (/proc has no events)
        await asyncio.sleep(_FAMILY_POLL_S)
    return f"has lost its process {gone}"


def _ended(process: GuardedProcess) -> str | None:
    return None if process.status is None else how_it_ended(process.status)
