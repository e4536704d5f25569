"""How long a leg is waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from trivet.journal import now_s
from trivet.legs.wire import LegError
from trivet.render.contract import ServingError
from trivet.routing.engines import Engines, EngineView


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a generation may take."""

    silence_s: float | None = 300.0
    """Longest that a leg may say nothing; then its engine counts as hung. None waits for ever."""
    deadline_s: float | None = None
    """When the client's time is up, on the clock of ``journal.now_s``."""


class Watch:
    """``async with`` it around each wait for an engine. It ends the wait when there is no use in it any more.

    Raises, inside such a block:
        LegError: the engine went out of service, or was silent for too long. A host that lost its power closes no
            connection: without this a leg would wait for ever.
        ServingError: the deadline has passed (504).
    """

    def __init__(self, engine: str, patience: Patience, *, counting: bool = True) -> None:
        """
        Args:
            counting: silence counts from the beginning, not only from ``count``.
        """
        self._engine = engine
        self._patience = patience
        self._counting = counting
        self._left = False
        self._deadline_is_nearer = False
        self._limit: asyncio.Timeout | None = None

    def leave(self) -> None:
        """The engine is out of service."""
        self._left = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0)

    def count(self) -> None:
        """From now on silence counts: what the engine had to wait for is there."""
        self._counting = True
        if self._limit is not None and not self._left and not self._limit.expired():
            seconds = self._seconds()
            self._limit.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    async def __aenter__(self) -> Watch:
        self._limit = asyncio.timeout(0 if self._left else self._seconds())
        await self._limit.__aenter__()
        return self

    def _seconds(self) -> float | None:
        """How long the wait that begins now may take."""
        seconds = self._patience.silence_s if self._counting else None
        if (deadline_s := self._patience.deadline_s) is not None:
            remaining = max(0.0, deadline_s - now_s())
            self._deadline_is_nearer = seconds is None or remaining <= seconds
            seconds = remaining if self._deadline_is_nearer else seconds
        return seconds

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        limit, self._limit = self._limit, None
        assert limit is not None
        try:
            await limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._fault() from None

    def _fault(self) -> Exception:
        if self._left:
            return LegError(self._engine, "went out of service", died=True)
        if self._deadline_is_nearer:  # not asked of the clock: an event loop's timers may be a little early
            return ServingError("the request's deadline has passed", status=504)
        return LegError(self._engine, f"said nothing for {self._patience.silence_s:g} s", died=True)


@contextlib.contextmanager
def watch(engines: Engines, engine: EngineView, patience: Patience, *, counting: bool = True) -> Iterator[Watch]:
    """A watch over one leg, told when the fleet takes its engine out of service."""
    one = Watch(engine.name, patience, counting=counting)
    with engines.watching(engine, one.leave):
        yield one
