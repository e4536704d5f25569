"""``trivet up``: serve a topology until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from trivet.cli.common import Progress, TopologyArgument, err, out, say
from trivet.cli.plan_file import PlanFile
from trivet.gateway.reload import Reload
from trivet.gateway.runs import new_run_dir
from trivet.gateway.service import Service
from trivet.topology import Plan

_STILL_S = 15.0


def up(
    topology: Path | None = TopologyArgument,
    port: int | None = typer.Option(None, "--port", min=0, max=65535, help="Gateway port; 0 takes a free one."),
) -> None:
    """Serve a topology until Ctrl-C or SIGTERM; SIGHUP (or `trivet reload`) has it read the file again."""
    with contextlib.closing(PlanFile(topology, port=port)) as file:
        plan = file.plan()
        _tell_notes(plan.notes)
        asyncio.run(_serve(plan, file))


def _tell_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say(out, f"[yellow]note:[/] {escape(note)}")


async def _serve(plan: Plan, file: PlanFile) -> None:
    async with stop_signals() as stop, reload_signals(stop) as wish, running(plan, out, stop) as service:
        if service is None:
            return
        say(out, f"\nserving {escape(plan.served_names[0])} on [bold]{service.url}[/]  (logs: {service.run_dir})")
        say(out, f"\n{escape(curl_line(service))}\n")
        reloading = asyncio.create_task(_reload_on(wish, service, file))
        await stop.wait()
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)
        say(out, "stopping: running requests may finish; again to stop at once")
    say(out, "stopped")


async def _reload_on(wish: asyncio.Event, service: Service, file: PlanFile) -> None:
    """Reloads as often as it is wished. A wish that comes meanwhile counts for afterwards; so do several."""
    service.note(Reload(0, "none"))  # from now on it can be
    told = set(service.plan.notes)

    def replan(running: Plan) -> Plan:
        plan = file.again(running)
        _tell_notes(note for note in plan.notes if note not in told)
        told.update(plan.notes)
        return plan

    while True:
        await wish.wait()
        wish.clear()
        try:
            match (await service.reload(replan, wish)).state:
                case "refused":
                    file.drop()
                case state:
                    file.keep(whole=state == "done")
        except Exception:  # the next one may go better
            service.log_fault("a reload ended with a fault")


def curl_line(service: Service) -> str:
    """A command that asks the service something and prints the answer as it comes."""
    body = {
        "model": service.plan.served_names[0],
        "messages": [{"role": "user", "content": "What is a trivet?"}],
        "max_tokens": 64,
        "stream": True,
    }
    key = f" -H 'Authorization: Bearer {service.api_keys[0]}'" if service.api_keys else ""
    # the certificate may not name the address of this machine
    insecure = " --insecure" if service.url.startswith("https") else ""
    url = f"{service.url}/v1/chat/completions"
    return f"curl -N{insecure} {url} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


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
async def reload_signals(stop: asyncio.Event) -> AsyncIterator[asyncio.Event]:
    """An event that SIGHUP sets. If it comes because this process's terminal was closed, it sets ``stop`` instead."""
    wish, loop = asyncio.Event(), asyncio.get_running_loop()
    survives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    has_terminal = _has_terminal()
    on_it = [console for console in (out, err) if console.is_terminal]

    def handle() -> None:
        nonlocal has_terminal
        if has_terminal and not _has_terminal():
            has_terminal = False
            for console in on_it:
                console.quiet = True  # it can be written to no more
            if not survives:
                stop.set()
        else:
            wish.set()

    loop.add_signal_handler(signal.SIGHUP, handle)
    try:
        yield wish
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _has_terminal() -> bool:
    """Whether this process has a terminal that would end it, by SIGHUP, when it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


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
