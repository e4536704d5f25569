"""The HTTP protocol of the gateway's workers: uvicorn's, with one way more into an answer that is under way.

Nearly all that a gateway does is passing on tokens: chunks of an answer that come from an engine and go to a client. An
ASGI server is told of each by a message to a coroutine; for a chunk whose bytes go on as they are that is most of the
work. The application finds ``surface.chunks.CHUNKS`` among the scope's extensions, through which it writes such bytes
at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
import weakref
from collections.abc import Mapping

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trivet.surface.chunks import CHUNKS

logger = logging.getLogger(__name__)


class GatewayProtocol(HttpToolsProtocol):
    """See the module."""

    unread_s: float | None = None
    """A client that reads nothing for so long, though there is more, is cut off; None waits for ever."""
    _look: asyncio.TimerHandle | None = None
    _waiting_bytes = 0

    @classmethod
    def cutting_off(cls, unread_s: float | None) -> type[GatewayProtocol]:
        """The protocol with that limit."""
        return type(cls.__name__, (cls,), {"unread_s": unread_s})

    def on_message_begin(self) -> None:
        """A request begins. (``httptools`` calls it.)"""
        super().on_message_begin()
        scope: dict[str, object] = self.scope  # type: ignore[assignment]  # extensions are of servers' own
        scope["extensions"] = {CHUNKS: _Writer(self)}

    def pause_writing(self) -> None:
        """So much waits for the client that whoever writes should wait. (The transport calls it.)"""
        super().pause_writing()
        self._waiting_bytes = _waiting_bytes(self.transport)
        self._look_later()

    def resume_writing(self) -> None:
        """It has read. (The transport calls it.)"""
        super().resume_writing()
        self._look_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone. (The transport calls it.)"""
        self._look_no_more()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        if self.unread_s is not None:
            self._look = self.loop.call_later(self.unread_s, self._cut_off)

    def _look_no_more(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _cut_off(self) -> None:
        before, self._waiting_bytes = self._waiting_bytes, self.transport.get_write_buffer_size()
        if self._waiting_bytes < before:  # slow, but it reads
            self._look_later()
            return
        logger.info("a client that read nothing for %g s is cut off", self.unread_s)
        self.transport.abort()


def _waiting_bytes(transport: asyncio.Transport) -> int:
    """What a client has not taken yet: here, and in the kernel's queue (``SIOCOUTQ``), which is often far longer."""
    queued = bytearray(4)
    with contextlib.suppress(OSError, AttributeError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


class _Writer:
    """See ``surface.chunks.Chunks``; of one request. It keeps nothing alive: requests leave no cycles behind."""

    __slots__ = ("__weakref__", "_protocol")

    _fits = True
    """Whether uvicorn has inside what is looked at here."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = weakref.ref(protocol)

    def write(self, chunks: bytes) -> bool:
        protocol = self._protocol()
        if protocol is None or not _Writer._fits:
            return False
        try:
            cycle = protocol.cycle
            extensions: Mapping[str, object] = cycle.scope.get("extensions") or {}
            if (
                extensions.get(CHUNKS) is not self  # the connection's next request has come
                or not cycle.response_started
                or cycle.response_complete
                or cycle.disconnected
                or not cycle.chunked_encoding
                or protocol.flow.write_paused
            ):
                return False
        except AttributeError as error:
            _Writer._fits = False
            logger.warning("this uvicorn is not known (%s): tokens are passed on in the long way", error)
            return False
        protocol.transport.write(chunks)
        return True

    def cut(self) -> None:
        protocol = self._protocol()
        if protocol is not None and protocol.flow.write_paused:
            protocol.transport.abort()
