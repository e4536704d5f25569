"""The HTTP protocol of the gateway's workers: uvicorn's, with one way more into an answer that is under way.

Nearly all that a gateway does is passing on tokens: chunks of an answer that come from an engine and go to a client. An
ASGI server is told of each by a message to a coroutine; for a chunk whose bytes go on as they are that is most of the
work. The application finds ``surface.chunks.CHUNKS`` among the scope's extensions, through which it writes such bytes
at once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trivet.surface.chunks import CHUNKS

logger = logging.getLogger(__name__)


class GatewayProtocol(HttpToolsProtocol):
    """See the module."""

    def on_message_begin(self) -> None:
        """A request begins. (``httptools`` calls it.)"""
        super().on_message_begin()
        scope: dict[str, object] = self.scope  # type: ignore[assignment]  # extensions are of servers' own
        scope["extensions"] = {CHUNKS: _Writer(self)}


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
