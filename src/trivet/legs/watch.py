"""How long a leg is waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from trivet.journal import now_s
from trivet.legs.wire import LegError
from trivet.render.contract import DeadlinePassedError
from trivet.routing.engines import Engines, EngineView

_EARLY_S = 0.001
"""Event loops count in milliseconds: a timer that is no earlier than this is on time."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a generation may take."""

    silence_s: float | None = 300.0
    """Longest that a leg may say nothing; then its engine counts as hung. None waits for ever."""
    deadline_s: float | None = None
    """When the client's time is up, on the clock of ``journal.now_s``."""


class Watch:
    """``async with`` it around each wait for an engine. It ends the wait when there is no use in it any more.

    A leg waits for each of its tokens, so the timer is the leg's and not the wait's: a wait only notes when it must be
    over, and a timer that comes before that is set anew. ``close`` it behind the last wait.

    Raises, inside such a block:
        LegError: the engine went out of service, or was silent for too long. A host that lost its power closes no
            connection: without this a leg would wait for ever.
        DeadlinePassedError: its name says it (504).
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
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        """Who waits."""
        self._cancelling = 0
        """Requests to cancel it that are not ours."""
        self._until_s: float | None = None
        """When the wait must be over, on the loop's clock."""
        self._timer: asyncio.Handle | None = None
        self._timer_s = 0.0
        """When it comes."""
        self._expired = False

    def leave(self) -> None:
        """The engine is out of service."""
        self._left = True
        if self._task is not None and not self._expired:
            self._set_timer()

    def count(self) -> None:
        """From now on silence counts: what the engine had to wait for is there."""
        self._counting = True
        self.heard()

    def heard(self) -> None:
        """The engine has said something that its leg did not have to wait for: silence counts anew."""
        if self._task is not None and not self._left and not self._expired:
            self._set_timer()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def __aenter__(self) -> Watch:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._set_timer()
        return self

    def _set_timer(self) -> None:
        """Sees to it that there is a timer, no later than when the wait that begins now must be over."""
        began_s = self._loop.time()
        seconds = 0.0 if self._left else self._seconds()
        if seconds is None:
            self._until_s = None
            return
        self._until_s = until_s = began_s + seconds
        if self._timer is not None:
            if self._timer_s <= until_s and seconds > 0:
                return
            self._timer.cancel()
        self._timer_s = until_s
        self._timer = self._loop.call_at(until_s, self._ring) if seconds > 0 else self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._task is None or self._until_s is None:
            return
        if self._until_s - self._loop.time() > _EARLY_S:  # set for a wait that is over
            self._timer_s = self._until_s
            self._timer = self._loop.call_at(self._until_s, self._ring)
            return
        self._expired = True
        self._task.cancel()

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
        task, self._task = self._task, None
        assert task is not None
        if self._expired:
            self._expired = False
            # as in ``asyncio.timeout``: somebody else may have cancelled it as well, which goes before
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise self._fault() from None
        if kind is not None or self._left:
            self.close()

    def _fault(self) -> Exception:
        if self._left:
            return LegError(self._engine, "went out of service", died=True)
        if self._deadline_is_nearer:  # not asked of the clock: an event loop's timers may be a little early
            return DeadlinePassedError()
        return LegError(self._engine, f"said nothing for {self._patience.silence_s:g} s", died=True)


@contextlib.contextmanager
def watch(engines: Engines, engine: EngineView, patience: Patience, *, counting: bool = True) -> Iterator[Watch]:
    """A watch over one leg, told when the fleet takes its engine out of service."""
    one = Watch(engine.name, patience, counting=counting)
    try:
        with engines.watching(engine, one.leave):
            yield one
    finally:
        one.close()
