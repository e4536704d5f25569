"""Records of requests, from whichever worker of the gateway has them.

Each worker answers the others on a Unix socket of its own in the run's folder, for this user only: one line of JSON
asks, one answers. What it asks of others it asks of all at once, and waits for none longer than ``_TIMEOUT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trivet.gateway.shared import socket_path
from trivet.journal import Journal, RequestRecord, now_s

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
"""A worker that renders or is started anew just now is not waited for: what it lacks is told with the answer."""


@dataclass(frozen=True, slots=True)
class Told:
    """Facts of a request, as its worker told them."""

    arrived_s: float
    """On the clock of ``journal.now_s``, which is the same for all processes of a machine."""
    worker: int
    facts: dict[str, Any]


class Records:
    """The journals of all workers, one of which is this worker's own."""

    def __init__(self, journal: Journal, worker: int = 0, workers: int = 1, folder: Path | None = None) -> None:
        """
        Args:
            journal: this worker's own.
            worker: its number.
            workers: how many there are.
            folder: where their sockets are; needed where there are several.
        """
        self._journal = journal
        self._worker = worker
        self._others = [number for number in range(workers) if number != worker] if folder is not None else []
        self._folder = folder or Path()

    @contextlib.asynccontextmanager
    async def open_to_siblings(self) -> AsyncIterator[None]:
        """Answers the other workers while the block runs."""
        if not self._others:
            yield
            return
        path = socket_path(self._folder, self._worker)
        server = await asyncio.start_unix_server(self._answer, sock=_listener(path))
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def find(self, request_id: str) -> tuple[Told | None, list[int]]:
        """The newest record under an id, of all workers, and those that did not answer."""
        record = self._journal.find(request_id)
        told, silent = await self._ask({"id": request_id})
        told += [self._told(record)] if record is not None else []
        return max(told, key=lambda one: one.arrived_s, default=None), silent

    async def newest(self, count: int) -> tuple[list[Told], list[int]]:
        """So many of the newest records of all workers, the newest first, and those workers that did not answer."""
        told, silent = await self._ask({"newest": count})
        told += self._all_told(self._journal.newest(count))
        return sorted(told, key=lambda one: one.arrived_s, reverse=True)[:count], silent

    async def _ask(self, question: dict[str, Any]) -> tuple[list[Told], list[int]]:
        answers = await asyncio.gather(*(self._ask_one(number, question) for number in self._others))
        told = [one for answer in answers if answer is not None for one in answer]
        return told, [number for number, answer in zip(self._others, answers, strict=True) if answer is None]

    async def _ask_one(self, worker: int, question: dict[str, Any]) -> list[Told] | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                with _short(socket_path(self._folder, worker)) as path:
                    reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(orjson.dumps(question) + b"\n")
                    answer = await reader.read(-1)
                finally:
                    writer.close()
            return [Told(**one) for one in orjson.loads(answer)]
        except (OSError, ValueError, TypeError, TimeoutError):
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                question = orjson.loads(await reader.readline())
                if "id" in question:
                    record = self._journal.find(question["id"])
                    told = [] if record is None else [self._told(record)]
                else:
                    told = self._all_told(self._journal.newest(question["newest"]))
                writer.write(orjson.dumps(told))
                await writer.drain()
        except (OSError, ValueError, TypeError, KeyError, TimeoutError) as error:
            logger.warning("a sibling's question: %r", error)
        finally:
            writer.close()

    def _told(self, record: RequestRecord) -> Told:
        return Told(record.arrived_s, self._worker, record.facts())

    def _all_told(self, records: Iterable[RequestRecord]) -> list[Told]:
        return [self._told(record) for record in records]


def listed(told: Told) -> dict[str, Any]:
    """A record in a list of them."""
    return {"age_s": round(now_s() - told.arrived_s, 3), "worker": told.worker, **told.facts}


def _listener(path: Path) -> socket.socket:
    """A socket at a path, for this user only; one that a killed worker left there is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short:
            listener.bind(short)
        path.chmod(0o600)  # nobody can connect before it listens
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of a path: a Unix socket's may have 107 bytes, and a run's folder lies anywhere."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
