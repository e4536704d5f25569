"""What the workers of one gateway share besides their socket: the board, a bell for each, and a folder to meet in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trivet.routing.board import Board


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """What a worker must know of it."""

    worker: int
    """Its own number: the row of the board that is its to write."""
    board_fd: int
    bell_fds: tuple[int, ...]
    """An eventfd for each worker, by its number."""
    folder: str
    """Where the workers' own sockets are."""


class Shared:
    """Made by the service, and given to every worker that it starts."""

    def __init__(self, workers: int, engines: int, folder: Path, regions: Mapping[str, int] | None = None) -> None:
        """
        Args:
            workers: processes.
            engines: slots of the board.
            folder: where the workers' own sockets are.
            regions: further memory of the board, sizes in bytes.
        """
        self.board = Board.create(workers, engines, regions)
        self._bells = Bells.create(workers)
        self._closing = weakref.finalize(self, self._bells.close)
        self._folder = folder

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a worker inherits."""
        assert self.board.descriptor is not None
        return (self.board.descriptor, *self._bells.descriptors)

    def config(self, worker: int) -> SharedConfig:
        """What the worker of that number is told."""
        return SharedConfig(worker, self.descriptors[0], self.descriptors[1:], str(self._folder))

    def died(self, worker: int) -> None:
        """Takes away what a worker had counted, and lets the others know that there may be places."""
        self.board.clear(worker)
        self._bells.ring_all()

    def close(self) -> None:
        """Lets go of the memory, and removes sockets that killed workers left."""
        self.board.close()
        self._closing()
        for number in range(self.board.workers):
            socket_path(self._folder, number).unlink(missing_ok=True)


class Bells:
    """One eventfd a worker: anybody rings, its owner is woken."""

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        self.descriptors = descriptors
        """By the number of the worker."""

    @classmethod
    def create(cls, workers: int) -> Bells:
        """New ones."""
        made: list[int] = []
        try:
            for _ in range(workers):
                made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except BaseException:
            Bells(tuple(made)).close()
            raise
        return cls(tuple(made))

    def ring(self, worker: int) -> None:
        """Wakes one worker; often before it has looked is as good as once."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.descriptors[worker], 1)

    def ring_all(self) -> None:
        """Wakes every worker."""
        for worker in range(len(self.descriptors)):
            self.ring(worker)

    @contextlib.contextmanager
    def answered(self, worker: int, look: Callable[[], None]) -> Iterator[None]:
        """Calls ``look`` in the running event loop when that worker is rung, while the block runs."""
        bell, loop = self.descriptors[worker], asyncio.get_running_loop()

        def rung() -> None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(bell)
            look()

        loop.add_reader(bell, rung)
        try:
            yield
        finally:
            loop.remove_reader(bell)

    def close(self) -> None:
        """Closes them."""
        for bell in self.descriptors:
            os.close(bell)


def socket_path(folder: Path, worker: int) -> Path:
    """Where a worker answers its siblings."""
    return folder / f"gateway-{worker}.sock"
