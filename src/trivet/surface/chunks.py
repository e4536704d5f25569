"""Chunks of HTTP's chunked transfer coding (RFC 9112, 7.1) that go on as they came."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, cast

from trivet.surface.http import Scope

CHUNKS = "trivet.chunks"
"""The name of ``Chunks`` among the extensions of an ASGI scope, where the server has it."""

_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
"""A chunk's size without extensions; one of 4 GiB is none that would be passed on."""


class Chunks(Protocol):
    """Writes into a response behind the application's ``send``, for bytes that need none of its care."""

    def write(self, chunks: bytes) -> bool:
        """Writes whole chunks at once, as they are.

        Returns:
            False if nothing was written, as that cannot be now: the response has not begun, is over or is not chunked,
            its client is gone, or reads so slowly that whoever writes should wait. ``send`` is then the way.
        """
        ...

    def cut(self) -> None:
        """Closes the connection if its client does not read what is there: it can be told nothing more."""
        ...


def chunks_of(scope: Scope) -> Chunks | None:
    """The extension, where the server has it."""
    return cast("Chunks | None", (scope.get("extensions") or {}).get(CHUNKS))


def contents(data: bytes) -> Sequence[bytes]:
    """What is in chunks that stand one behind the other.

    Empty where ``data`` is anything else than whole chunks: one is cut, has extensions or is the last one.
    """
    found, position, end = [], 0, len(data)
    while position < end:
        line = _SIZE.match(data, position)
        if line is None:
            return ()
        size, begin = int(line[1], 16), line.end()
        position = begin + size + 2
        if not size or not data.startswith(b"\r\n", begin + size):
            return ()
        found.append(data[begin : begin + size])
    return found
