"""Tokens that go from an engine's connection to a client's as they came, with no task in between.

The way of a piece of an answer leads through aiohttp's parser and reader, the generators of a generation's life and the
ASGI server, each of which has its reasons: where an answer begins or ends, where something must be read, changed,
counted, tried again or waited for. Most of an answer is nothing of that: events which are known to bring one token each
and nothing else, in chunks of their own. Those are written to the client where they arrive. Everything else, and
everything while the client reads slowly or an earlier piece is still on the long way, takes the long way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from trivet.surface.chunks import contents

_END_OF_EVENT = b"\n\n\r\n"
"""An event's end that is a chunk's end too: what comes behind it begins a chunk."""


class Express(asyncio.Protocol):
    """Reads a streamed answer inside its ``with`` block, but for what goes on by itself.

    It stands before aiohttp's protocol on the answer's connection meanwhile. Bytes that it does not pass on itself it
    gives to that one, unchanged and in order. Only whole chunks are kept from it, behind which it is in the state that
    it was in before them.
    """

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        is_known: Callable[[bytes], bool],
        write: Callable[[bytes], bool] | None,
        passed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """
        Args:
            is_known: whether the content of a chunk is an event that may go on, and brings one token. What it
                remembers of events goes with the next ``write``, or with a False of its own.
            write: gives whole chunks to the client; False if that cannot be now. None lets nothing go on by itself.
            passed: called with the number of tokens that were in them.
        """
        self._answer = answer
        self._is_known, self._write, self._passed = is_known, write, passed
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._at_chunk = False
        """What comes next begins a chunk."""
        self._open = False
        """Whoever reads the answer waits for more: all that came before has gone on."""

    def __enter__(self) -> Express:
        connection, headers = self._answer.connection, self._answer.headers
        is_chunked = headers.get("Transfer-Encoding", "").lower() == "chunked" and "Content-Encoding" not in headers
        if self._write is not None and is_chunked and connection is not None and connection.transport is not None:
            self._transport, self._inner = connection.transport, connection.protocol
            self._transport.set_protocol(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def read(self, *, steady: bool) -> bytes:
        """What comes next, as it comes; empty at the answer's end.

        Args:
            steady: all bytes so far were used, and events may go on by themselves from here.
        """
        self._open = steady
        try:
            return await self._answer.content.readany()
        finally:
            self._open = False

    def _leave(self) -> None:
        self._open = False
        transport, self._transport = self._transport, None
        if transport is not None and self._inner is not None:
            transport.set_protocol(self._inner)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self._open and self._at_chunk:
            try:
                if self._goes_on(data):
                    return
            except Exception as error:  # of our own: no fault of the engine, which an error in here would count as
                self._answer.content.set_exception(error)
                self._write = None
                return
            self._open = False
        self._at_chunk = data.endswith(_END_OF_EVENT)
        assert self._inner is not None
        self._inner.data_received(data)
        if self._answer.content.is_eof():  # its connection may serve another request from now on
            self._leave()

    def _goes_on(self, data: bytes) -> bool:
        """Passes on what consists of known events; False if it does not, or nothing can be passed on now."""
        events = contents(data)
        if self._write is None or not events:
            return False
        for event in events:
            if not self._is_known(event):
                return False
        if not self._write(data):
            return False
        self._passed(len(events))
        return True

    def eof_received(self) -> bool | None:
        """The engine sends no more."""
        assert self._inner is not None
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._open, self._transport = False, None
        assert self._inner is not None
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The engine reads slowly."""
        assert self._inner is not None
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The engine reads again."""
        assert self._inner is not None
        self._inner.resume_writing()
