"""``trivet up``: serve a topology until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from trivet.cli.common import Progress, TopologyArgument, open_plan, out
from trivet.gateway.service import Service, new_run_dir
from trivet.topology import Plan

_STILL_S = 15.0


def up(
    topology: Path | None = TopologyArgument,
    port: int | None = typer.Option(None, "--port", min=0, max=65535, help="Gateway port; 0 takes a free one."),
) -> None:
    """Serve a topology until Ctrl-C or SIGTERM."""
    with open_plan(topology, port=port) as plan:
        for note in plan.notes:
            out.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
        asyncio.run(_serve(plan))


async def _serve(plan: Plan) -> None:
    async with stop_signals() as stop, running(plan, out, stop) as service:
        if service is None:
            return
        out.print(
            f"\nserving {escape(plan.served_names[0])} on [bold]{service.url}[/]  (logs: {service.run_dir})",
            soft_wrap=True,
        )
        out.print(f"\n{escape(curl_line(service))}\n", soft_wrap=True)
        await stop.wait()
        out.print("stopping: running requests may finish; again to stop at once")
    out.print("stopped")


def curl_line(service: Service) -> str:
    """A command that asks the service something and prints the answer as it comes."""
    body = {
        "model": service.plan.served_names[0],
        "messages": [{"role": "user", "content": "What is a trivet?"}],
        "max_tokens": 64,
        "stream": True,
    }
    key = f" -H 'Authorization: Bearer {service.api_keys[0]}'" if service.api_keys else ""
    return f"curl -N {service.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


@contextlib.asynccontextmanager
async def running(plan: Plan, console: Console, stop: asyncio.Event) -> AsyncIterator[Service | None]:
    """A service that is up inside the block; None if ``stop`` was set before it was."""
    progress = Progress(console)
    service = Service(plan, new_run_dir(), progress.event)
    entering = asyncio.create_task(service.__aenter__())
    stopping = asyncio.create_task(stop.wait())
    try:
        while not entering.done() and not stopping.done():
            done, _ = await asyncio.wait([entering, stopping], timeout=_STILL_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                progress.still()
        if not entering.done():
            entering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await entering
            yield None
            return
        entering.result()
    finally:
        stopping.cancel()
    try:
        yield service
    finally:
        await service.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def stop_signals() -> AsyncIterator[asyncio.Event]:
    """An event that Ctrl-C or SIGTERM sets; the second one ends this process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> Callable[[], None]:
        def handle() -> None:
            if stop.is_set():
                os._exit(128 + number)  # engines and workers see their pipes close, and end
            stop.set()

        return handle

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal(number))
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
