"""Which render server a request goes to, and whether one may be asked at all: load, limits, health.

Knows neither HTTP nor vLLM. ``render.remote`` asks the servers and looks after them; what it finds comes in as an
``Inspect``. A server is used only after it was looked at, and only for as long as nothing tells that another process
may be there: each look ends with the question whether it makes the same token ids as this gateway does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolRules:
    """What one gateway worker may ask of the render servers."""

    servers: tuple[str, ...]
    """Their URLs, without a slash at the end."""
    running: int = 16
    """Requests of this worker at one server at once."""
    queued: int = 64
    """Requests of this worker that may wait for one."""
    queue_s: float = 2.0
    timeout_s: float = 10.0
    """Longest that a server may take for one."""
    refuses: bool = False
    """Requests that no server takes are refused; else they are rendered here."""
    local_below_bytes: int = 0
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long is waited where something failed, in seconds."""

    first_s: float = 0.5
    """Before the next look at a server that could not be used; twice as long each time."""
    longest_s: float = 30.0
    other_ids_s: float = 30.0
    """Before the next look at one that makes other token ids: somebody must start it anew."""
    again_s: float = 60.0
    """Between looks at one that is used. Behind a balancer nothing else tells that another process answers."""
    start_s: float = 2.0
    """How long a start waits for the first looks."""


class State(StrEnum):
    """What is known of a server."""

    NEW = "new"
    """It was not looked at yet."""
    UP = "up"
    LOOKING = "looking"
    """It was up, and is being looked at again."""
    DOWN = "down"
    OTHER = "other_ids"
    """It makes other token ids than this gateway."""


_CLOSED = "closed its connection, and is looked at again"

_SOON = (State.NEW, State.LOOKING)
"""States that a look ends, so that it is worth while to wait."""


class Reason(StrEnum):
    """Why no server renders a request that one could have rendered."""

    QUEUE_FULL = "queue_full"
    QUEUE_WAIT = "queue_wait"
    NO_SERVER = "no_server"
    """None can be used."""
    BUSY = "busy"
    """They said so."""
    FAILED = "failed"
    """They tried."""


class NotTakenError(Exception):
    """No server takes this request."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class UnusableError(Exception):
    """A look at a server found that it cannot be used."""

    def __init__(self, problem: str, *, other_ids: bool = False) -> None:
        """
        Args:
            problem: in words for a person, to stand behind the server's name.
            other_ids: it answers, but makes other token ids.
        """
        super().__init__(problem)
        self.problem = problem
        self.other_ids = other_ids


class Visit(Protocol):
    """A server that is being watched."""

    async def check(self) -> None:
        """Looks whether it can be used.

        Raises:
            UnusableError: it cannot.
        """
        ...

    async def gone(self) -> None:
        """Returns when another process may be there than the one that was checked."""
        ...

    def is_there(self) -> bool:
        """Whether that has not happened yet, as far as the event loop has heard."""
        ...


Inspect = Callable[[str], AbstractAsyncContextManager[Visit]]
"""Comes to a server of that URL; raises ``UnusableError`` where it is not there."""


class Tally(Protocol):
    """Counts what goes to render servers, and what does not. Every label has few values."""

    def asked(self, server: str, outcome: str, seconds: float) -> None:
        """A server was asked."""

    def local(self, reason: str) -> None:
        """A request is rendered here."""

    def refused(self, reason: str) -> None:
        """A request is refused, as no server takes it."""

    def running(self, server: str, requests: int) -> None:
        """So many requests of this worker are at a server."""

    def waiting(self, requests: int) -> None:
        """So many wait for one."""

    def used(self, server: str, is_used: bool) -> None:
        """A server is used from now on, or no more."""


class _Life:
    """A server from one look at it to the next: one process, unless the watch over it has ended."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._stood: bool | None = None

    def stands(self) -> bool:
        """Whether it was the process that was looked at up to now, or until nobody watched any more."""
        return self._visit.is_there() if self._stood is None else self._stood

    def close(self) -> None:
        """Nobody watches any more."""
        self._stood = self._visit.is_there()


class _Server:
    """One render server, as this worker sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.state = State.NEW
        self.problem = "it was not looked at yet"
        self.running = 0
        """Requests of this worker that are there."""
        self.life: _Life | None = None
        """Since it was found good the last time. What was asked before says nothing about now."""
        self.misses = 0
        """Failures, of requests and of looks, since the last request that went well."""
        self.pause_s = 0.0
        """Before the next look."""
        self.doubted = asyncio.Event()
        self.looked_at = asyncio.Event()

    def facts(self) -> dict[str, Any]:
        """As plain JSON values."""
        problem = None if self.state is State.UP else self.problem
        return {"url": self.url, "state": str(self.state), "problem": problem, "requests_running": self.running}


@dataclass(frozen=True, slots=True)
class Turn:
    """A place at a server."""

    url: str
    life: _Life

    def stands(self) -> bool:
        """Whether what answers there is still what was looked at. Asked with an answer in hand: a process that ended
        has closed its connections before another could answer in its place."""
        return self.life.stands()


class Pool:
    """The render servers of one worker. ``async with`` it: inside, they are looked after."""

    def __init__(
        self,
        rules: PoolRules,
        inspect: Inspect,
        tally: Tally | None = None,
        pauses: Pauses | None = None,
        choose: Callable[[Sequence[_Server]], _Server] = random.choice,
    ) -> None:
        """
        Args:
            inspect: how a server is looked at.
            choose: picks one of those that have the least to do.
        """
        self.rules = rules
        self._inspect = inspect
        self._tally = tally
        self._pauses = pauses or Pauses()
        self._choose = choose
        self._servers = {url: _Server(url) for url in rules.servers}
        self._waiting: dict[asyncio.Future[_Server], str | None] = {}
        """Who waits, in order; and the server that each will not have."""
        self._tending: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pool:
        for server in self._servers.values():
            self._tell(server)
            self._tending.append(asyncio.create_task(self._tend(server), name=f"render server {server.url}"))
        looks = [asyncio.ensure_future(server.looked_at.wait()) for server in self._servers.values()]
        try:
            await asyncio.wait(looks, timeout=self._pauses.start_s)
        finally:
            for look in looks:
                look.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tending:
            task.cancel()
        await asyncio.wait(self._tending)

    # what is asked of it

    @contextlib.asynccontextmanager
    async def turn(self, until_s: float, without: str | None = None) -> AsyncIterator[Turn]:
        """A place at the server that has the least to do, kept while the block runs.

        Args:
            until_s: how long is waited for one, on the event loop's clock.
            without: a server that shall not be taken.

        Raises:
            NotTakenError: there is none.
        """
        server = self._take(without) or await self._wait(until_s, without)
        try:
            assert server.life is not None
            yield Turn(server.url, server.life)
        finally:
            self._leave(server)

    def went_well(self, turn: Turn) -> None:
        """A request was rendered there."""
        server = self._servers[turn.url]
        if server.life is turn.life:
            server.misses = 0

    def failed(self, turn: Turn, problem: str) -> None:
        """A request failed there by the server's doing: it is not used until it was looked at again."""
        server = self._servers[turn.url]
        if server.state is not State.UP or server.life is not turn.life:
            return  # that is known, or it was another process
        server.misses += 1
        server.pause_s = self._pause_after(server.misses - 1)
        self._leave_alone(server, State.DOWN if server.pause_s else State.LOOKING, problem)
        server.doubted.set()

    @property
    def waiting(self) -> int:
        """Requests that wait for a server."""
        return len(self._waiting)

    def why_not_ready(self) -> str | None:
        """What keeps every request from being rendered, in words for a person; None if one could be."""
        if not self.rules.refuses or any(one.state in (State.UP, State.LOOKING) for one in self._servers.values()):
            return None
        return f"no render server can be used: {self.remarks()}"

    def remarks(self) -> str:
        """The servers that are not used, each with the reason; empty if all are."""
        return "; ".join(
            f"{one.url} {one.problem}" for one in self._servers.values() if one.state not in (State.UP, State.LOOKING)
        )

    def facts(self) -> list[dict[str, Any]]:
        """The servers as plain JSON values."""
        return [one.facts() for one in self._servers.values()]

    # places

    def _able(self, without: str | None, *states: State) -> list[_Server]:
        return [one for one in self._servers.values() if one.state in states and one.url != without]

    def _take(self, without: str | None) -> _Server | None:
        """A place that is free now, None if one may become free.

        Raises:
            NotTakenError: none will, as no server can be used.
        """
        able = self._able(without, State.UP)
        if not able and not self._able(without, *_SOON):
            raise NotTakenError(Reason.NO_SERVER)
        free = [one for one in able if one.running < self.rules.running]
        if not free:
            return None
        least = min(one.running for one in free)
        server = self._choose([one for one in free if one.running == least])
        self._enter(server)
        return server

    async def _wait(self, until_s: float, without: str | None) -> _Server:
        if len(self._waiting) >= self.rules.queued:
            raise NotTakenError(Reason.QUEUE_FULL)
        place: asyncio.Future[_Server] = asyncio.get_running_loop().create_future()
        self._waiting[place] = without
        self._tell_waiting()
        try:
            async with asyncio.timeout_at(until_s):
                return await place
        except BaseException as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave(place.result())  # it was given at that very moment
            if isinstance(error, TimeoutError):
                raise NotTakenError(Reason.QUEUE_WAIT) from None
            raise
        finally:
            self._waiting.pop(place, None)
            self._tell_waiting()

    def _enter(self, server: _Server) -> None:
        server.running += 1
        self._tell_running(server)

    def _leave(self, server: _Server) -> None:
        server.running -= 1
        self._let_in(server)
        self._tell_running(server)

    def _let_in(self, server: _Server) -> None:
        """Gives places that are free at a server to who has waited longest."""
        for place in [place for place, without in self._waiting.items() if without != server.url]:
            if server.state is not State.UP or server.running >= self.rules.running:
                return
            if not place.done():
                self._enter(server)
                place.set_result(server)
                del self._waiting[place]

    def _send_away(self) -> None:
        """Tells those who wait for nobody any more."""
        for place, without in list(self._waiting.items()):
            if not place.done() and not self._able(without, State.UP, *_SOON):
                place.set_exception(NotTakenError(Reason.NO_SERVER))

    # health

    async def _tend(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(server.pause_s)
            try:
                await self._watch(server)
            except UnusableError as error:
                self._miss(server, error)
            except Exception as error:  # a fault of ours: the server is not used, and looked at again
                logger.exception("render server %s could not be looked at", server.url)
                self._miss(server, UnusableError(f"could not be looked at: {type(error).__name__}: {error}"))

    async def _watch(self, server: _Server) -> None:
        """Looks at a server, and uses it until there is a reason to doubt that it is the same.

        Raises:
            UnusableError: it cannot be used.
        """
        loop = asyncio.get_running_loop()
        async with self._inspect(server.url) as visit, contextlib.AsyncExitStack() as leaving:
            came_s, life = loop.time(), _Life(visit)
            leaving.callback(life.close)
            while True:
                server.doubted.clear()
                await visit.check()
                if server.doubted.is_set():  # a request has failed there meanwhile
                    return
                self._use(server, life)
                if not await self._doubt(server, visit):
                    continue
                if server.state is State.UP:  # what watched it is cut off; no request has failed
                    server.pause_s = 0.0 if loop.time() - came_s >= self._pauses.first_s else self._pauses.first_s
                    self._leave_alone(server, State.LOOKING, _CLOSED)
                return

    async def _doubt(self, server: _Server, visit: Visit) -> bool:
        """Waits until a server must be looked at again; whether it is not to be used meanwhile."""
        doubts = [asyncio.ensure_future(server.doubted.wait()), asyncio.ensure_future(visit.gone())]
        try:
            done, _ = await asyncio.wait(doubts, timeout=self._pauses.again_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for doubt in doubts:
                doubt.cancel()
            await asyncio.wait(doubts)
        for one in done:
            one.result()
        return bool(done)

    def _use(self, server: _Server, life: _Life) -> None:
        server.looked_at.set()
        if server.state is State.UP:
            return
        logger.info("render server %s is used", server.url)
        server.state, server.life = State.UP, life
        self._tell(server)
        self._let_in(server)

    def _miss(self, server: _Server, error: UnusableError) -> None:
        server.misses += 1
        server.pause_s = self._pauses.other_ids_s if error.other_ids else self._pause_after(server.misses)
        self._leave_alone(server, State.OTHER if error.other_ids else State.DOWN, error.problem)
        server.looked_at.set()

    def _leave_alone(self, server: _Server, state: State, problem: str) -> None:
        """A server is not used any more."""
        if (state, problem) != (server.state, server.problem):
            level = logging.INFO if problem == _CLOSED else logging.WARNING
            logger.log(level, "render server %s %s", server.url, problem)
        server.state, server.problem = state, problem
        self._tell(server)
        self._send_away()

    def _pause_after(self, failures: int) -> float:
        if failures <= 0:
            return 0.0
        return float(min(self._pauses.longest_s, self._pauses.first_s * 2 ** min(failures - 1, 16)))

    # counting

    def _tell(self, server: _Server) -> None:
        if self._tally is not None and server.state is not State.LOOKING:
            self._tally.used(server.url, server.state is State.UP)

    def _tell_running(self, server: _Server) -> None:
        if self._tally is not None:
            self._tally.running(server.url, server.running)

    def _tell_waiting(self) -> None:
        if self._tally is not None:
            self._tally.waiting(len(self._waiting))
