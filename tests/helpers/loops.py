"""Tests on both event loops: asyncio's own, and uvloop's, which gateway workers run on."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an asynchronous test once on each."""

    @functools.wraps(test)
    def runs(loop: str, **more: Any) -> None:
        async def whole() -> None:
            await test(**more)

        with asyncio.Runner(loop_factory=FACTORIES[loop]) as runner:
            runner.run(whole())

    own = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    runs.__signature__ = own.replace(parameters=[*own.parameters.values(), loop])  # type: ignore[attr-defined]
    del runs.__wrapped__  # type: ignore[attr-defined]  # else pytest-asyncio runs it as what it was
    return pytest.mark.parametrize("loop", FACTORIES)(runs)
