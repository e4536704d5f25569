"""``trivet engine NAME``: run one engine of a topology on this host."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import typer
from rich.markup import escape

from trivet.cli.common import Progress, TopologyArgument, open_plan, out, read_topology
from trivet.cli.up import stop_signals
from trivet.errors import TopologyError
from trivet.fleet.supervisor import EngineStatus, Fleet
from trivet.gateway.runs import new_run_dir
from trivet.gateway.service import Event
from trivet.topology import Plan
from trivet.topology.model import TIERS


def engine(
    name: str = typer.Argument(help="The engine's name in the topology."),
    topology: Path | None = TopologyArgument,
) -> None:
    """Run one engine of a topology here, until Ctrl-C or SIGTERM; `trivet up` elsewhere finds it."""
    with open_plan(topology, at=_host_of(name, topology), only=name) as plan:
        chosen = plan.engine(name)
        if chosen.started_by == "someone else":
            raise TopologyError(f"{name} has a url: someone else starts it")
        asyncio.run(_run(dataclasses.replace(plan, engines=(chosen,))))


def _host_of(name: str, path: Path | None) -> str:
    topology = read_topology(path)
    for tier_name in TIERS:
        tier = topology.tier(tier_name)
        for number, one in enumerate(tier.listed() if tier else ()):
            if (one.name or f"{tier_name}-{number}") == name:
                return one.host
    return "local"  # the plan names those that exist


async def _run(plan: Plan) -> None:
    """One engine under the care that it has in `trivet up`: watched, and started again when it ends."""
    (engine,) = plan.engines
    progress = Progress(out)
    out.print(escape(engine.shell_line()), style="dim", soft_wrap=True)
    fleet = Fleet(plan, new_run_dir(), lambda status: progress.event(_event(status)))
    async with stop_signals() as stop:
        starting, stopping = asyncio.create_task(fleet.start()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                log = fleet.engines[engine.name].log
                out.print(f"\n{engine.name} serves on [bold]{engine.url}[/]  (log: {log})", soft_wrap=True)
                await stopping
        finally:
            for task in (starting, stopping):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
            await fleet.stop()


def _event(status: EngineStatus) -> Event:
    return Event(status.plan.name, str(status.state), status.problem or "")
