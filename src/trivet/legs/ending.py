"""Ending a task, and knowing that it has ended."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels a task and returns when it has ended, not sooner: also where the one who waits is cancelled meanwhile.

    Whatever the task worked on is nobody's else until then: a generator that is closed while a task is still inside is
    an error in Python, and what the task holds would be left to nobody. A request can be cancelled more than once (its
    client leaves, a stop string matches, the worker stops), and each time lands in whatever cleans up just then.

    Raises:
        asyncio.CancelledError: who waits was cancelled; said when the task has ended.
    """
    task.cancel()
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
    if not task.cancelled():
        task.exception()  # looked at: whoever ends it wants to hear no more of it
    if interrupted is not None:
        raise interrupted
