"""The HTTP protocol of the gateway's workers: uvicorn's, with one way more into an answer that is under way.

Nearly all that a gateway does is passing on tokens: chunks of an answer that come from an engine and go to a client. An
ASGI server is told of each by a message to a coroutine; for a chunk whose bytes go on as they are that is most of the
work. The application finds ``surface.chunks.CHUNKS`` among the scope's extensions, through which it writes such bytes
at once.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trivet.surface.chunks import CHUNKS


class GatewayProtocol(HttpToolsProtocol):
    """See the module."""

    def on_message_begin(self) -> None:
        """A request begins. (``httptools`` calls it.)"""
        super().on_message_begin()
        scope: dict[str, object] = self.scope  # type: ignore[assignment]  # extensions are of servers' own
        scope["extensions"] = {CHUNKS: _Writer(self, scope)}


class _Writer:
    """See ``surface.chunks.Chunks``; of one request."""

    __slots__ = ("_protocol", "_scope")

    def __init__(self, protocol: HttpToolsProtocol, scope: object) -> None:
        self._protocol, self._scope = protocol, scope

    def write(self, chunks: bytes) -> bool:
        protocol = self._protocol
        cycle = protocol.cycle
        if (
            cycle is None
            or cycle.scope is not self._scope
            or not cycle.response_started
            or cycle.response_complete
            or cycle.disconnected
            or not cycle.chunked_encoding
            or protocol.flow.write_paused
        ):
            return False
        protocol.transport.write(chunks)
        return True
