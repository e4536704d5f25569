"""``trivet topology``: write a topology file, show what one resolves to."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import typer
from rich.markup import escape

from trivet.cli.common import TopologyArgument, model_folder, out, read_topology
from trivet.errors import TopologyError
from trivet.topology import EnginePlan, Plan, make_plan
from trivet.topology.ports import PortBook
from trivet.topology.template import TEMPLATE

app = typer.Typer(help="Write a topology file, or show what one resolves to.", no_args_is_help=True)


@app.command("init")
def init(
    path: Path = typer.Argument(Path("trivet.yaml"), help="Where to write it."),
    force: bool = typer.Option(False, "--force", help="Overwrite a file that is there."),
) -> None:
    """Write a commented topology file: the demo's, ready to be changed."""
    if path.exists() and not force:
        raise TopologyError(f"{path} exists", mend="give another name, or --force")
    if not path.absolute().parent.is_dir():
        raise TopologyError(
            f"{path}: there is no folder {path.parent}",
            mend=f"make it first (mkdir -p {shlex.quote(str(path.parent))}), or give another path",
        )
    try:
        path.write_text(TEMPLATE, encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{path} cannot be written: {error.strerror}", mend="give another path") from None
    out.print(f"wrote {escape(str(path))}; serve it with: trivet up {escape(str(path))}", soft_wrap=True)


@app.command("show")
def show(
    path: Path | None = TopologyArgument,
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Print the resolved topology and the exact vLLM command of each engine."""
    topology = read_topology(path)
    plan = make_plan(topology, PortBook(lock=False), model=model_folder(topology, make=False))
    if as_json:
        typer.echo(json.dumps(_facts(plan), indent=1))
        return
    gateway = topology.gateway
    out.print(
        f"[bold]model[/]      {escape(plan.model)}, served as {escape(', '.join(plan.served_names))}", soft_wrap=True
    )
    scheme = "https" if gateway.tls else "http"
    out.print(f"[bold]gateway[/]    {scheme}://{gateway.host}:{gateway.port}, {gateway.workers} worker(s)")
    out.print(f"[bold]connector[/]  {plan.connector.name if plan.connector else 'none: nothing is split'}")
    render = " ".join(plan.render_flags[1:])
    if plan.topology.gateway.plane == "text":
        out.print("[bold]render[/]     in the engines (gateway.plane: text)")
    else:
        out.print(f"[bold]render[/]     in the gateway's workers, as vllm serve with: {escape(render)}", soft_wrap=True)
        _show_render_servers(plan, path)
    for engine in plan.engines:
        _show_engine(engine)
    for note in plan.notes:
        out.print(f"\n[yellow]note:[/] {escape(note)}", soft_wrap=True)


def _show_render_servers(plan: Plan, path: Path | None) -> None:
    tier = plan.topology.tiers.render
    if not tier.servers:
        return
    otherwise = "rendered in the workers" if tier.fallback == "local" else "refused (503)"
    for line in (
        f"token ids of prompts from {', '.join(tier.servers)}",
        f"{tier.running} request(s) at once at each, {tier.queued} wait for {tier.queue_s:g} s at most, each takes "
        f"{tier.timeout_s:g} s at most; else {otherwise}",
        f"start {tier.servers[0]} with: {_render_start(plan, path)}",
    ):
        out.print(f"           {escape(line)}", soft_wrap=True)


def _render_start(plan: Plan, path: Path | None) -> str:
    tier = plan.topology.tiers.render
    url = urlsplit(tier.servers[0])
    here = url.hostname in ("localhost", "::1") or (url.hostname or "").startswith("127.")
    address = [] if here else ["--host", "0.0.0.0"]
    address += ["--port", str(url.port or (443 if url.scheme == "https" else 80))]
    if url.scheme == "https":
        address += ["--ssl-certfile", "CERTIFICATE", "--ssl-keyfile", "KEY"]
    guard = "VLLM_API_KEY=... " if tier.api_key else ""  # a command line is for everybody to see
    by_vllm = f"{guard}{shlex.join([*plan.render_command(), *address])}"
    return by_vllm if path is None else f"{shlex.join(['trivet', 'render', str(path), *address])}, or {by_vllm}"


def _show_engine(engine: EnginePlan) -> None:
    out.print(f"\n[bold cyan]{engine.name}[/]  {engine.tier} on {engine.device}, {engine.url}", soft_wrap=True)
    if engine.started_by == "someone else":
        out.print("  started by someone else; Trivet watches it and sends it requests")
        return
    if engine.started_by == "another host":
        out.print(f"  runs on {engine.host}; start it there with: trivet engine {engine.name} FILE", soft_wrap=True)
    if engine.cores:
        out.print(f"  cores {', '.join(map(str, engine.cores))}")
    if engine.gpus:
        out.print(f"  GPUs {', '.join(map(str, engine.gpus))}")
    for setting in engine.settings:
        value = "".join(f" {one}" for one in setting.flag()[1:])
        out.print(f"  --{setting.name}{escape(value)}  [dim]# {escape(setting.reason)}[/]", soft_wrap=True)
    if engine.own_flags:
        out.print(f"  {escape(' '.join(engine.own_flags))}  [dim]# from the topology[/]", soft_wrap=True)
    for setting in engine.last_settings:
        out.print(f"  --{setting.name} {setting.value}  [dim]# {escape(setting.reason)}[/]", soft_wrap=True)
    for variable in engine.env:
        out.print(
            f"  {variable.name}={escape(variable.value or '')}  [dim]# {escape(variable.reason)}[/]", soft_wrap=True
        )
    out.print("  [bold]by hand:[/]")
    out.print(f"  {escape(engine.shell_line())}", soft_wrap=True)


def _render_servers(plan: Plan) -> dict[str, object] | None:
    tier = plan.topology.tiers.render
    if not tier.servers:
        return None
    return {**tier.model_dump(exclude={"flags", "env", "api_key"}), "command": plan.render_command()}


def _facts(plan: Plan) -> dict[str, object]:
    return {
        "model": plan.model,
        "served_names": list(plan.served_names),
        "connector": plan.connector.name if plan.connector else None,
        "render_flags": list(plan.render_flags),
        "render_servers": _render_servers(plan),
        "gateway": plan.topology.gateway.model_dump(exclude={"api_keys"}),
        "notes": list(plan.notes),
        "engines": [
            {
                "name": engine.name,
                "tier": engine.tier,
                "device": engine.device,
                "url": engine.url,
                "host": engine.host,
                "started_by": engine.started_by,
                "cores": list(engine.cores),
                "gpus": list(engine.gpus),
                "command": engine.command() if engine.started_by != "someone else" else None,
                "env": engine.environment(),
            }
            for engine in plan.engines
        ],
    }
