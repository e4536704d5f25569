"""``TRIVET_KV_TRACE=FILE``: what happened when, in Chrome's trace format, which Perfetto and chrome://tracing open.

All engines of a host may write the same file: times are of the machine's monotonic clock, and each event is one append.
The format (Trace Event Format, "JSON Array Format") allows the closing bracket to be missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import zlib
from pathlib import Path

logger = logging.getLogger("vllm.trivet")

VARIABLE = "TRIVET_KV_TRACE"


class Trace:
    """A trace file, or nothing where the variable is not set."""

    def __init__(self, engine: str) -> None:
        """
        Args:
            engine: names this process in the trace.

        Raises:
            ValueError: the file cannot be written, in one line.
        """
        self._file: int | None = None
        self._pid = os.getpid()
        self._threads: set[str] = set()
        self._path = os.environ.get(VARIABLE, "")
        if self._path:
            try:
                self._file = self._open(self._path)
            except OSError as error:
                raise ValueError(
                    f"TrivetConnector cannot write {VARIABLE}={self._path}: {error.strerror or error}; "
                    "name another file, or take the variable away"
                ) from error
            self._write({"ph": "M", "name": "process_name", "args": {"name": engine}})

    def _open(self, path: str) -> int:
        own = Path(f"{path}.{self._pid}.{time.monotonic_ns()}")
        own.write_bytes(b"[\n")
        try:
            with contextlib.suppress(FileExistsError):  # whoever is first makes the file, with its bracket
                os.link(own, path)
        finally:
            own.unlink()
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

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
        name = threading.current_thread().name
        where = {"pid": self._pid, "tid": zlib.crc32(name.encode()) % 100_000}
        if name not in self._threads:
            self._threads.add(name)
            self._append({**where, "ph": "M", "name": "thread_name", "args": {"name": name}})
        self._append({**where, **event})

    def _append(self, event: dict[str, object]) -> None:
        if (file := self._file) is None:
            return
        line = json.dumps(event).encode() + b",\n"
        try:
            why = None if os.write(file, line) == len(line) else "the disk is full"
        except OSError as error:
            why = error.strerror or str(error)
        if why is not None:  # must not end a transfer
            self._file = None
            logger.error("TrivetConnector: tracing to %s has ended: %s", self._path, why)
