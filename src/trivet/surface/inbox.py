"""The client's side of an ASGI connection: its body, then the moment at which it leaves."""

from __future__ import annotations

import asyncio

from trivet.surface.http import Message, Receive

_LONG_BYTES = 2**16


class BodyTooLargeError(Exception):
    """The body is longer than allowed."""


class Inbox:
    """Stands for ``receive``: the body is read once, here, and given on to the application as one message."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._body: bytes | None = None
        self._given = False
        self._leaving: asyncio.Task[None] | None = None

    async def body(self, limit_bytes: int) -> bytes | None:
        """The whole body; None if the client left before its end.

        Raises:
            BodyTooLargeError: it is longer than ``limit_bytes``.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise BodyTooLargeError
            parts.append(part)
            if not message.get("more_body", False):
                self._body = b"".join(parts)
                return self._body

    async def left(self) -> None:
        """Returns when the client has left, or the response is complete."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._until_left())
        await asyncio.shield(self._leaving)

    @property
    def has_left(self) -> bool:
        """Whether the client is known to have left."""
        return self._leaving is not None and self._leaving.done()

    async def __call__(self) -> Message:
        """The next ASGI message."""
        if not self._given and self._body is not None:
            self._given = True
            body, self._body = self._body, None  # it may be large, and the answer may take minutes
            if len(body) > _LONG_BYTES:  # it has just been looked through, and will be again
                await asyncio.sleep(0)
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left()
        return {"type": "http.disconnect"}

    async def close(self) -> None:
        """Ends what still listens."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.wait([self._leaving])

    async def _until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
