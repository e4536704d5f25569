"""Requests that share no cache with others: those with a ``cache_salt``.

How long rendering takes would tell whether a text came before, which is what a salt is to hide of engines' caches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_here = threading.local()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, and in this thread, nothing of what came before is used, and nothing is kept."""
    before, _here.is_apart = is_apart(), True
    try:
        yield
    finally:
        _here.is_apart = before


def is_apart() -> bool:
    """Whether that is so now."""
    return getattr(_here, "is_apart", False)
