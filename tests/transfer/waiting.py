"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 10.0
"""Far above what anything here takes: a test that reaches it fails."""


def until(look: Callable[[], T], what: str = "it", limit_s: float = LIMIT_S) -> T:
    """The first true value of ``look``."""
    end_s = time.monotonic() + limit_s
    while not (value := look()):
        assert time.monotonic() < end_s, f"{what} did not happen within {limit_s:g} s"
        time.sleep(0.001)
    return value


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
