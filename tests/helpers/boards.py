"""Boards whose rows are several workers', in one process or in several."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from trivet.routing.board import Board


@contextlib.contextmanager
def board_of(workers: int, engines: int = 8, regions: Mapping[str, int] | None = None) -> Iterator[list[Board]]:
    """The board as its maker has it, and behind that as each worker has it."""
    made = Board.create(workers, engines, regions)
    opened = [Board.open(os.dup(made.descriptor), number) for number in range(workers)]
    try:
        yield [made, *opened]
    finally:
        for one in (made, *opened):
            one.close()


class Process:
    """A Python program of a few lines that has inherited descriptors; it is talked to line by line."""

    def __init__(self, code: str, *arguments: object, descriptors: tuple[int, ...]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )

    def hears(self) -> str:
        """The next line that it prints; empty at its end."""
        return self._process.stdout.readline().rstrip("\n")

    def tell(self, line: str = "") -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self.end()

    def end(self) -> int:
        """Returns when it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)
        return self._process.returncode
