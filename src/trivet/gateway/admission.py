"""How many requests a worker serves at once, how many may wait, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator

from trivet.render.contract import ServingError


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
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self.running = 0
        """Requests that are served."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether the next request is let in at once."""
        return self.running < self._places and not self._waiting

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
            self.running -= 1
            self._let_in()

    async def _enter(self) -> None:
        if self.is_open:
            self.running += 1
            return
        if len(self._waiting) >= self._queued:
            raise ServingError(
                f"too many requests: {self.running} are served and {len(self._waiting)} wait", status=429
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        try:
            async with asyncio.timeout(self._queue_s):
                await place
        except BaseException as error:
            self._waiting.pop(place, None)
            if place.done() and not place.cancelled():  # it had been let in at that very moment
                self.running -= 1
            self._let_in()
            if isinstance(error, TimeoutError):
                raise ServingError(f"no place for this request within {self._queue_s:g} s", status=503) from None
            raise

    def _let_in(self) -> None:
        while self._waiting and self.running < self._places:
            place, _ = self._waiting.popitem(last=False)
            if not place.done():
                self.running += 1
                place.set_result(None)
