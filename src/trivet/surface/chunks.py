"""Chunks of HTTP's chunked transfer coding (RFC 9112, 7.1) that go on as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from trivet.surface.http import Scope

CHUNKS = "trivet.chunks"
"""The name of ``Chunks`` among the extensions of an ASGI scope, where the server has it."""

_LONGEST_SIZE = 8
"""Hexadecimal digits of a chunk's size; one of 4 GiB is none that would be passed on."""


class Chunks(Protocol):
    """Writes into a response behind the application's ``send``, for bytes that need none of its care."""

    def write(self, chunks: bytes) -> bool:
        """Writes whole chunks at once, as they are.

        Returns:
            False if nothing was written, as that cannot be now: the response has not begun, is over or is not chunked,
            its client is gone, or reads so slowly that whoever writes should wait. ``send`` is then the way.
        """
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
        line_end = data.find(b"\r\n", position, position + _LONGEST_SIZE + 2)
        digits = data[position:line_end] if line_end > position else b""
        if not digits.isalnum():  # ``int`` takes signs, blanks and underscores as well
            return ()
        try:
            size = int(digits, 16)
        except ValueError:
            return ()
        begin = line_end + 2
        position = begin + size + 2
        if not size or not data.startswith(b"\r\n", begin + size):
            return ()
        found.append(data[begin : begin + size])
    return found
