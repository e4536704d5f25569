"""A leg that is begun before anybody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic

from trivet.legs.ask import Piece
from trivet.legs.ending import end


class Ahead(Generic[Piece]):
    """An iteration that a task of its own begins; whoever iterates finds its first piece there, or waits for it.

    Only the beginning is the task's: what is behind it is read by who iterates, as slowly as that one likes.
    """

    def __init__(self, pieces: AsyncGenerator[Piece, None]) -> None:
        self._pieces = pieces
        self.beginning: asyncio.Task[Piece | None] = asyncio.create_task(self._begin())
        """Ends with the first piece, with None if there is none, or with what went wrong."""

    async def _begin(self) -> Piece | None:
        return await anext(self._pieces, None)

    async def read(self) -> AsyncGenerator[Piece, None]:
        """The pieces, from the first."""
        first = await self.beginning
        if first is None:
            return
        yield first
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        """Ends it, wherever it is."""
        try:
            await end(self.beginning)
        finally:
            await self._pieces.aclose()
