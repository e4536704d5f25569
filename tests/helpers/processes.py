"""What tests ask about processes that they or their children started."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WAIT_S = 20.0
"""Longest that a test waits for something that should happen at once."""


def state_of(pid: int) -> str | None:
    """The state letter of a process (``Z``: a zombie), None if there is none of that id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except OSError:
        return None


def lives(pid: int) -> bool:
    return state_of(pid) not in (None, "Z", "X")


def left_of(pids: Iterable[int], within_s: float = WAIT_S) -> list[int]:
    """Those that are still listed, be it as zombies, when the time is over."""
    pids = list(pids)
    until(lambda: not any(state_of(pid) for pid in pids), within_s)
    return [pid for pid in pids if state_of(pid)]


def children_of(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """All descendants of a process."""
    return [one for child in children_of(pid) for one in (child, *below(child))]


def until(true: Callable[[], object], within_s: float = WAIT_S) -> bool:
    """Waits until something is true; whether it became so."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def holds(true: Callable[[], object], within_s: float = WAIT_S) -> None:
    """Waits until something is true, letting other tasks run.

    Raises:
        TimeoutError: it did not become so.
    """
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110  (processes have no events)
            await asyncio.sleep(0.005)


def pids_in(file: Path, count: int = 1, within_s: float = WAIT_S) -> list[int]:
    """Process ids that children wrote to a file, one a line, as soon as there are so many."""
    found: list[int] = []

    def there() -> bool:
        text = file.read_text() if file.exists() else ""
        found[:] = [int(line) for line in text.split("\n")[:-1]]
        return len(found) >= count

    assert until(there, within_s), f"{len(found)} of {count} process(es) started"
    return found


def end(pids: Iterable[int]) -> None:
    """SIGKILL to processes that a failed test left."""
    for pid in pids:
        if lives(pid):
            os.kill(pid, 9)
