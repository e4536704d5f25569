"""``TRIVET_KV_TRACE=FILE``: what happened when, in Chrome's trace format, which Perfetto and chrome://tracing open.

All engines of a host may write the same file: times are of the machine's monotonic clock, and each event is one append.
The format (Trace Event Format, "JSON Array Format") allows the closing bracket to be missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from pathlib import Path

VARIABLE = "TRIVET_KV_TRACE"


class Trace:
    """A trace file, or nothing where the variable is not set."""

    def __init__(self, engine: str) -> None:
        """
        Args:
            engine: names this process in the trace.
        """
        self._file: int | None = None
        self._pid = os.getpid()
        self._threads: set[str] = set()
        if path := os.environ.get(VARIABLE):
            own = Path(f"{path}.{self._pid}.{time.monotonic_ns()}")
            own.write_bytes(b"[\n")
            with contextlib.suppress(FileExistsError):  # whoever is first makes the file, with its bracket
                os.link(own, path)
            own.unlink()
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            self._write({"ph": "M", "name": "process_name", "args": {"name": engine}})

    def span(self, side: str, transfer: str, what: str, start_ns: int, end_ns: int) -> None:
        """Something that took time."""
        if self._file is not None:
            self._write(
                {
                    "ph": "X",
                    "cat": side,
                    "name": what,
                    "ts": start_ns / 1e3,
                    "dur": (end_ns - start_ns) / 1e3,
                    "args": {"transfer": transfer},
                }
            )

    def mark(self, side: str, transfer: str, what: str, at_ns: int | None = None) -> None:
        """Something that happened, now unless a time is given."""
        if self._file is not None:
            at_ns = at_ns or time.monotonic_ns()
            self._write(
                {"ph": "i", "s": "p", "cat": side, "name": what, "ts": at_ns / 1e3, "args": {"transfer": transfer}}
            )

    def _write(self, event: dict[str, object]) -> None:
        assert self._file is not None
        name = threading.current_thread().name
        where = {"pid": self._pid, "tid": zlib.crc32(name.encode()) % 100_000}
        if name not in self._threads:
            self._threads.add(name)
            self._append({**where, "ph": "M", "name": "thread_name", "args": {"name": name}})
        self._append({**where, **event})

    def _append(self, event: dict[str, object]) -> None:
        assert self._file is not None
        os.write(self._file, json.dumps(event).encode() + b",\n")
