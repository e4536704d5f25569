"""A simulated engine as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from trivet.sim.engine import SimEngine
from trivet.sim.settings import SimSettings


def say(line: str) -> None:
    """Into the log, which is standard output, at once."""
    print(line, flush=True)  # noqa: T201  (this is the process's log)


def run(
    settings: SimSettings, *, name: str, tier: str = "mixed", listening: Callable[[SimEngine], None] | None = None
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        listening: called when the engine takes requests.

    Raises:
        TrivetError: it cannot listen.
    """
    asyncio.run(_serve(settings, name, tier, listening))


async def _serve(settings: SimSettings, name: str, tier: str, listening: Callable[[SimEngine], None] | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with SimEngine(settings, name=name, tier=tier, on_exit=_exit) as engine:
        (listening or _say_where)(engine)
        await stop.wait()
    say("stopped")


def _say_where(engine: SimEngine) -> None:
    settings = engine.settings
    say(
        f"simulated engine {engine.name} (vLLM {settings.vllm_version}) serves {', '.join(settings.names)} on "
        f"{engine.url}, pid {os.getpid()}"
    )


def _exit(status: int) -> None:
    say(f"a fault ends this process with status {status}")
    sys.stdout.flush()
    os._exit(status)
