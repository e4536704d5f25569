"""How many requests a gateway serves at once, how many may wait, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

from trivet.render.contract import ServingError
from trivet.routing.board import Board, Count


class Admission:
    """Lets in ``running`` requests at once, in the order in which they came; ``queued`` more may wait."""

    def __init__(self, running: int, queued: int, queue_s: float) -> None:
        """
        Args:
            running: requests served at once.
            queued: requests that may wait for their turn; the next one is refused.
            queue_s: longest that one waits.
        """
        self._places = running
        self._queued = queued
        self._queue_s = queue_s
        self._waiting: OrderedDict[asyncio.Future[None], int] = OrderedDict()
        """Who waits here, in order, with the tickets that workers who share a line compare."""
        self._running = 0

    @property
    def running(self) -> int:
        """Requests that are served."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether the next request is let in at once."""
        return self.running < self._places and not self.waiting

    def take(self) -> bool:
        """Takes a place, to be given back with ``leave``, if there is one at once; whether there was."""
        if not self.is_open:
            return False
        self._running += 1
        return True

    def leave(self) -> None:
        """Gives a place back."""
        self._running -= 1
        self._let_in()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Waits for a place, which is kept while the block runs.

        Raises:
            ServingError: too many wait already (429), or there was no place in time (503).
        """
        await self._enter()
        try:
            yield
        finally:
            self.leave()

    async def _enter(self) -> None:
        place = self._come()
        if place is None:
            return
        try:
            async with asyncio.timeout(self._queue_s):
                await place
        except BaseException as error:
            self._give_up(place)
            if isinstance(error, TimeoutError):
                raise ServingError(f"no place for this request within {self._queue_s:g} s", status=503) from None
            raise

    def _come(self) -> asyncio.Future[None] | None:
        """The place of a request that has to wait; None if it is in.

        Raises:
            ServingError: too many wait already.
        """
        if self.take():
            return None
        return self._line_up(0)

    def _line_up(self, ticket: int) -> asyncio.Future[None]:
        if (waiting := self.waiting) >= self._queued:
            raise ServingError(f"too many requests: {self.running} are served and {waiting} wait", status=429)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = ticket
        return place

    def _give_up(self, place: asyncio.Future[None]) -> None:
        self._forget(place)
        self._let_in()

    def _forget(self, place: asyncio.Future[None]) -> None:
        self._waiting.pop(place, None)
        if place.done() and not place.cancelled():  # it had been let in at that very moment
            self._running -= 1

    def _let_in(self) -> None:
        while self._waiting and self.running < self._places:
            self._let_first_in()

    def _let_first_in(self) -> None:
        place, _ = self._waiting.popitem(last=False)
        if not place.done():
            self._running += 1
            place.set_result(None)


class SharedAdmission(Admission):
    """The same for all workers of a gateway together, in one line.

    Places are counted in the rows of a board. Who changes their number holds the board's lock, so there are never more
    than ``running``, and a worker that is killed leaves nothing behind but its row, which its service clears. Who waits
    has a ticket; a place that becomes free is for the lowest one. If that waits in another worker, that one is rung.
    Nobody looks again and again.
    """

    def __init__(self, running: int, queued: int, queue_s: float, board: Board, ring: Callable[[int], None]) -> None:
        """
        Args:
            running: requests served at once, by all workers.
            queued: requests that may wait for their turn, in all workers.
            queue_s: longest that one waits.
            board: where the workers count; this one writes its row.
            ring: makes the worker of that number call ``look``.
        """
        super().__init__(running, queued, queue_s)
        self._board = board
        self._ring = ring

    @property
    def running(self) -> int:
        """Requests that are served, by all workers."""
        return self._board.total(Count.RUNNING)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn, in all workers."""
        return self._board.total(Count.WAITING)

    def take(self) -> bool:
        """Takes a place, to be given back with ``leave``, if there is one at once; whether there was."""
        with self._board.lock:
            if not super().take():
                return False
            self._write()
        return True

    def leave(self) -> None:
        """Gives a place back."""
        with self._board.lock:
            self._running -= 1
            other = self._let_all_in()
        self._tell(other)

    def look(self) -> None:
        """Lets in who waits here if there is a place: some worker has seen one, or has died."""
        if not self._waiting:
            return
        with self._board.lock:
            other = self._let_all_in()
        self._tell(other)

    def _come(self) -> asyncio.Future[None] | None:
        with self._board.lock:
            if super().take():
                self._write()
                return None
            place = self._line_up(self._board.next_ticket())
            # places are free while others wait if those are of a worker that does not take them
            other = self._let_all_in()
        self._tell(other)
        return place

    def _give_up(self, place: asyncio.Future[None]) -> None:
        with self._board.lock:
            self._forget(place)
            other = self._let_all_in()
        self._tell(other)

    def _let_all_in(self) -> int | None:
        """Lets in who waits here while it is their turn; who else has to know of a place."""
        self._write()
        first = self._first_of_others()
        while self._waiting and self.running < self._places and self._is_before(first):
            self._let_first_in()
            self._write()
        if first is None or self.running >= self._places or self._is_before(first):
            return None
        return first[2]

    def _is_before(self, other: tuple[bool, int, int] | None) -> bool:
        """Whether the first who waits here is before the first who waits elsewhere."""
        ticket = next(iter(self._waiting.values()), 0)
        return ticket > 0 and (other is None or (False, ticket) < other[:2])

    def _first_of_others(self) -> tuple[bool, int, int] | None:
        """Whether it is silent, its ticket and its number, of the other worker whose turn is next; None if none waits.

        One that does not say that it lives is passed over, or a worker that hangs would hold up all others.
        """
        lined_up = [
            (not self._board.is_alive(worker), ticket, worker)
            for worker, ticket in enumerate(self._board.each(Count.TICKET))
            if ticket and worker != self._board.worker
        ]
        return min(lined_up, default=None)

    def _write(self) -> None:
        self._board.write(Count.RUNNING, self._running)
        self._board.write(Count.WAITING, len(self._waiting))
        self._board.write(Count.TICKET, next(iter(self._waiting.values()), 0))

    def _tell(self, worker: int | None) -> None:
        if worker is not None:
            self._ring(worker)
