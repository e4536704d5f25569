"""``trivet engine NAME``: start one engine of a topology on this host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer
from rich.markup import escape

from trivet.cli.common import TopologyArgument, open_plan, out, read_topology
from trivet.cli.up import stop_signals
from trivet.errors import EngineFailedError, TopologyError
from trivet.fleet.process import GuardedProcess, tail
from trivet.gateway.service import new_run_dir
from trivet.topology import EnginePlan
from trivet.topology.model import TIERS


def engine(
    name: str = typer.Argument(help="The engine's name in the topology."),
    topology: Path | None = TopologyArgument,
) -> None:
    """Start one engine of a topology here, until Ctrl-C or SIGTERM; `trivet up` elsewhere finds it."""
    host = _host_of(name, topology)
    with open_plan(topology, at=host, only=name) as plan:
        chosen = plan.engine(name)
        if chosen.started_by == "someone else":
            raise TopologyError(f"{name} has a url: someone else starts it")
        asyncio.run(_run(chosen))


def _host_of(name: str, path: Path | None) -> str:
    topology = read_topology(path)
    for tier_name in TIERS:
        tier = topology.tier(tier_name)
        for number, one in enumerate(tier.listed() if tier else ()):
            if (one.name or f"{tier_name}-{number}") == name:
                return one.host
    return "local"  # the plan names those that exist


async def _run(plan: EnginePlan) -> None:
    out.print(escape(plan.shell_line()), style="dim", soft_wrap=True)
    log = new_run_dir() / f"{plan.name}.log"
    async with stop_signals() as stop:
        process = await GuardedProcess.start(plan.command(), plan.environment(), log)
        out.print(f"{plan.name} starts on {plan.url}; its log is {log}", soft_wrap=True)
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            stopping.cancel()
            await process.stop()
            return
        stopping.cancel()
        raise EngineFailedError(
            f"engine {plan.name} ended with exit status {process.status}", mend=f"its log is {log}", detail=tail(log)
        )
