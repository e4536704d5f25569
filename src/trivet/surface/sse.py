"""Server-sent events, as far as OpenAI's streams use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


class EventSplitter:
    """Puts events together again from pieces that a connection cut anywhere.

    An event is what stands before an empty line; lines end with LF or CRLF (the standard also allows CR alone, which
    no engine sends). Feeding the pieces of a stream gives the same events wherever it was cut.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that ``piece`` completes, each with its lines' ends and the empty line."""
        pending = self._pending
        if not pending and 0 <= piece.find(b"\n\n") == len(piece) - 2 and b"\n\r\n" not in piece:
            yield bytes(piece)  # one event and no more, as nearly always
            return
        pending += piece
        start = 0
        # an end of line that was the last byte so far may be half of an empty line
        position = max(0, self._searched - 3)
        while (position := pending.find(b"\n", position)) >= 0:
            following = pending[position + 1 : position + 3]
            if following[:1] == b"\n":
                end = position + 2
            elif following == b"\r\n":
                end = position + 3
            else:
                position += 1
                continue
            yield bytes(pending[start:end])
            start = position = end
        if start:
            del pending[:start]
        self._searched = len(pending)

    @property
    def pending(self) -> bool:
        """Whether a part of an event has come."""
        return bool(self._pending)

    @property
    def rest(self) -> bytes:
        """What came behind the last whole event."""
        return bytes(self._pending)


def data_of(event: bytes) -> bytes | None:
    """The payload of an event's ``data:`` lines, joined by line ends; None if it has none (comments, keep-alives)."""
    if event.startswith(b"data:") and event.find(b"\n", 0, -2) < 0:
        return event[5:].strip()  # one line, as nearly always
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_of(value: Any) -> bytes:
    """An event whose payload is a JSON value."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def with_data(event: bytes, value: Any) -> bytes:
    """The event with another payload; what stands before it (``event:`` and its name) is kept."""
    begin = 0 if event.startswith(b"data:") else event.index(b"\ndata:") + 1
    return event[:begin] + event_of(value)
