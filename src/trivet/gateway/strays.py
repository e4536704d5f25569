"""Lines of a worker that no logger of its own wrote, kept as JSON beside those that one did.

vLLM writes while it is loaded, a library prints, Python tells of a fault that nobody caught, C code of a crash: all of
it goes to standard output or error. With ``log_format: json`` these are a pipe, which the fleet's process reads: so the
last words of a worker that was killed are kept as well. What loggers write goes to the log itself and not through here,
so a worker waits for nobody to write its requests down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

LOGGER = "output"
"""What stands in ``logger`` of such a line."""
_TRACEBACK = "Traceback (most recent call last):"
_LEVEL = re.compile(r"(?:\([^()]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
"""With which vLLM's lines begin, behind a process's name where that is known, and those of most libraries."""
_LONGEST_BYTES = 64 * 2**10
_READ_BYTES = 64 * 2**10


class Strays:
    """Makes JSON of lines as they come; a traceback is one object with its fault as the message."""

    def __init__(self) -> None:
        self._rest = b""
        self._traceback: list[str] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines of JSON that are whole with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > _LONGEST_BYTES:  # of a line that does not end
            lines.append(self._rest[:_LONGEST_BYTES])
            self._rest = self._rest[_LONGEST_BYTES:]
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[bytes]:
        """What is left when nothing more comes."""
        rest, self._rest = self._rest, b""
        if rest:
            yield from self._line(rest)
        yield from self._whole_traceback()

    def _line(self, line: bytes) -> Iterator[bytes]:
        text = line.decode("utf-8", "replace").rstrip()
        if self._traceback and text and not text.startswith((" ", _TRACEBACK)):
            self._traceback.append(text)
            yield from self._whole_traceback()
        elif text.startswith(_TRACEBACK) or self._traceback:
            self._traceback.append(text)
            if sum(map(len, self._traceback)) > _LONGEST_BYTES:
                yield from self._whole_traceback()
        elif _is_log_line(line):
            yield line + b"\n"
        elif text:
            level = _LEVEL.match(text)
            yield _json(level[1] if level else "INFO", text)

    def _whole_traceback(self) -> Iterator[bytes]:
        lines, self._traceback = self._traceback, []
        if lines:
            yield _json("ERROR", lines[-1].strip(), traceback="\n".join(lines))


def _is_log_line(line: bytes) -> bool:
    """Whether it is one of ``JsonFormatter``'s already."""
    if not line.startswith(b"{"):
        return False
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and {"time", "level", "message"} <= value.keys()


def _json(level: str, message: str, **more: Any) -> bytes:
    now = time.time()
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    stamp = f"{seconds}.{int(now % 1 * 1000):03}Z"
    return orjson.dumps({"time": stamp, "level": level, "logger": LOGGER, "message": message, **more}) + b"\n"


async def keep(descriptor: int, log: Path) -> None:
    """Reads a pipe to its end and appends what comes to a log; closes the pipe.

    A line that cannot be written, as the disk is full, is lost: who writes to the pipe must not fail over it.
    """
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    strays = Strays()
    try:
        with log.open("ab", buffering=0) as file:  # a line at a time, whole: workers write to it as well
            while data := await reader.read(_READ_BYTES):
                for line in strays.feed(data):
                    with contextlib.suppress(OSError):
                        file.write(line)
            for line in strays.end():
                with contextlib.suppress(OSError):
                    file.write(line)
    finally:
        transport.close()
