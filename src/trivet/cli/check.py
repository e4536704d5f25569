"""``trivet check``: does KV move as it should, and would splitting pay? Arithmetic alone, or with engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from trivet.check import engines
from trivet.check.kv_size import KvSize, size_of
from trivet.check.model_config import read_config
from trivet.check.run import Report, Wish, check
from trivet.check.verdict import Finding, Level
from trivet.cli.common import Progress, TopologyArgument, err, model_folder, open_plan, out, read_topology
from trivet.cli.status import ask_status
from trivet.cli.up import stop_signals
from trivet.errors import TopologyError, TrivetError
from trivet.fleet.supervisor import Fleet
from trivet.gateway.runs import last_certificate, last_url, new_run_dir
from trivet.gateway.service import Event, gateway_keys
from trivet.gateway.tls import trusting
from trivet.topology import Plan, make_plan
from trivet.topology.ports import PortBook

_CANNOT = Level.FAIL.exit_code
"""Also of a check that could not be made: 1 would say that something was found."""
_STYLES = {Level.PASS: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_STILL_S = 15.0
_STDOUT = "-"


class JsonMayBeAlone(typer.core.TyperCommand):
    """Takes ``--json`` with a file behind it, or without: then it is the standard output's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        args = list(args)
        for place, one in enumerate(args):
            follower = args[place + 1] if place + 1 < len(args) else "--"
            if one == "--json" and (follower.startswith("--") or follower.endswith((".yaml", ".yml"))):
                args[place] = f"--json={_STDOUT}"
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def check_command(
    topology: Path | None = TopologyArgument,
    model: str | None = typer.Option(
        None, "--model", help="Arithmetic alone, without engines: a folder, a config.json or a hub name."
    ),
    prompt_tokens: str | None = typer.Option(
        None, "--prompt-tokens", help="Prompt lengths of yours, such as 1000,8000.", show_default=False
    ),
    link_gbps: float | None = typer.Option(
        None, "--link-gbps", min=0.001, help="What the link between the engines carries, in gigabits a second."
    ),
    prefill_s: float | None = typer.Option(
        None, "--prefill-s", min=0.0, help="With --model: seconds that prefill takes, for the share of TTFT."
    ),
    dtype: str = typer.Option("auto", "--dtype", help="With --model: as engines are given it."),
    kv_cache_dtype: str = typer.Option("auto", "--kv-cache-dtype", help="With --model: as engines are given it."),
    tensor_parallel: int = typer.Option(1, "--tensor-parallel", min=1, help="With --model: ranks of an engine."),
    block_size: int | None = typer.Option(
        None, "--block-size", min=1, help="With --model: tokens in a block.", show_default="16"
    ),
    limit_s: float = typer.Option(60.0, "--limit-s", min=1.0, help="Longest that one answer may take."),
    json_file: str | None = typer.Option(
        None, "--json", metavar="[FILE]", help="Write all facts to a file, or instead of text if none is named."
    ),
) -> None:
    """Prove the KV transfer of a topology's pairs before anything is measured; exit code 0, 1 (WARN) or 2 (FAIL).

    Uses the service that runs with this topology, or engines that others run (url:); else starts the engines, and
    stops them behind it. With --model it only works out what must move, and how long that takes.
    """
    try:
        lengths = _lengths(prompt_tokens)
        _check_writable(json_file)
        if model is not None:
            if topology is not None:
                raise TrivetError(
                    "--model is for arithmetic without engines, and a topology names its own model",
                    mend="give one of the two",
                )
            size = size_of(
                read_config(model),
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                tp=tensor_parallel,
                block_size=block_size,
            )
            _tell_size(model, size, lengths or (), link_gbps, prefill_s, json_file)
            return
        report = asyncio.run(_check(topology, Wish(lengths, link_gbps, limit_s), quiet=json_file == _STDOUT))
        _tell_report(report, json_file)
    except TrivetError as error:
        error.exit_code = _CANNOT
        raise
    if report.level is not Level.PASS:
        raise typer.Exit(report.level.exit_code)


def _lengths(told: str | None) -> tuple[int, ...]:
    if told is None:
        return ()
    try:
        lengths = tuple(int(one) for one in told.replace("_", "").split(",") if one.strip())
    except ValueError:
        lengths = ()
    if not lengths or any(one < 1 for one in lengths):
        raise TrivetError(
            f"--prompt-tokens: {told!r} is no list of lengths",
            mend="write numbers of tokens: --prompt-tokens 1000,8000",
        )
    return tuple(dict.fromkeys(lengths))


def _check_writable(json_file: str | None) -> None:
    if json_file is None or json_file == _STDOUT:
        return
    path = Path(json_file).absolute()
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise TrivetError(f"--json {json_file}: {what}", mend="name a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TrivetError(f"--json {json_file}: it cannot be written", mend="name a file that you may write")
    if path.is_file() and (begins := path.read_bytes()[:1]) not in (b"", b"{"):
        raise TrivetError(
            f"--json {json_file}: it is there, and begins with {begins!r}, which no report does",
            mend="name another file; a topology stands before --json",
        )


def _write(json_file: str | None, facts: Mapping[str, Any]) -> None:
    if json_file is None:
        return
    text = json.dumps(facts, indent=1)
    if json_file == _STDOUT:
        typer.echo(text)
        return
    try:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TrivetError(
            f"--json {json_file} cannot be written ({error.strerror})", mend="name another file"
        ) from None


# -- arithmetic alone --------------------------------------------------------------------------------------------------


def _tell_size(
    model: str,
    size: KvSize,
    lengths: Sequence[int],
    link_gbps: float | None,
    prefill_s: float | None,
    json_file: str | None,
) -> None:
    facts = size.facts(lengths[0] if lengths else None, link_gbps, prefill_s)
    if len(lengths) > 1:
        facts["prompts"] = [
            {name: one[name] for name in ("prompt_tokens", "kv_bytes", "transfer_s") if name in one}
            for one in (size.facts(length, link_gbps) for length in lengths)
        ]
    _write(json_file, {"model": model, **facts})
    if json_file == _STDOUT:
        return
    out.print(
        f"{escape(model)} ({escape(size.model_type)}): {size.bytes_per_token:,} bytes of KV a token in "
        f"{size.kv_cache_dtype}"
        + (f", {size.rank_bytes_per_token:,} on each of {size.tp} ranks" if size.tp > 1 else ""),
        soft_wrap=True,
    )
    for one in size.layers:
        kind = f"{one.kind}" + (f" of {one.window_tokens:,} tokens" if one.window_tokens else "")
        kept = [f"{one.bytes_per_token:,} bytes a token"] if one.bytes_per_token else []
        kept += [f"{one.state_bytes:,} bytes a prompt"] if one.state_bytes else []
        out.print(f"  {one.count} layers, {kind}: {' and '.join(kept) or 'nothing'} each", style="dim", soft_wrap=True)
    for note in size.notes:
        out.print(f"  [yellow]note:[/] {escape(note)}", soft_wrap=True)
    for length in lengths:
        moved = size.bytes_of(length)
        line = f"{length:,} tokens: {_bytes(moved)} move from prefill to decode"
        if link_gbps is not None:
            line += f", {_seconds(size.transfer_s(length, link_gbps))} at {link_gbps:g} Gbit/s"
            if prefill_s is not None:
                share = size.ttft_share(length, link_gbps, prefill_s)
                line += f": {share:.0%} of a TTFT with {_seconds(prefill_s)} of prefill"
        out.print(line, soft_wrap=True)
    if not lengths or link_gbps is None:
        out.print("--prompt-tokens N and --link-gbps G say how long it takes.", style="dim", soft_wrap=True)


def _bytes(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# -- with engines ------------------------------------------------------------------------------------------------------


async def _check(path: Path | None, wish: Wish, *, quiet: bool) -> Report:
    topology = read_topology(path)
    console = err if quiet else out
    shown = make_plan(topology, PortBook(lock=False), model=model_folder(topology))
    connector = shown.connector
    if connector is None or not {"prefill", "decode"} <= {one.tier for one in shown.engines}:
        raise TopologyError(
            f"{topology.where('tiers')}: there is no pair of a prefill and a decode engine, and so no KV to move",
            mend="name a tier prefill, a tier decode and kv.connector; `trivet topology init` writes an example",
        )
    async with stop_signals() as stop:
        checking = asyncio.create_task(_with_engines(path, shown, wish, console))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([checking, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not checking.done():
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
            raise TrivetError("stopped")
        return checking.result()


async def _with_engines(path: Path | None, shown: Plan, wish: Wish, console: Any) -> Report:
    connector = shown.connector
    assert connector is not None
    async with _engines(path, shown, console) as (plan, views):
        with err.status("") if err.is_terminal else contextlib.nullcontext() as status:

            def say(what: str) -> None:
                if status is not None:
                    status.update(escape(what))

            return await check(
                views,
                connector,
                plan.served_names[0],
                model_path=plan.model,
                wish=wish,
                say=say,
            )


@contextlib.asynccontextmanager
async def _engines(path: Path | None, shown: Plan, console: Any) -> AsyncIterator[tuple[Plan, list[Any]]]:
    """Engines of a topology that run: a service's, somebody else's, or started for the length of the block."""
    if (views := await _running(shown)) is not None:
        console.print("checking the engines of the service that runs", style="dim", soft_wrap=True)
        yield shown, views
        return
    with open_plan(path, port=0) as plan:
        if all(one.started_by != "trivet" for one in plan.engines):
            yield plan, engines.of_urls(plan)
            return
        run_dir = new_run_dir()
        progress = Progress(console)
        fleet = Fleet(
            plan,
            run_dir,
            lambda status: progress.event(Event(status.plan.name, str(status.state), status.problem or "")),
        )
        console.print(f"starting the engines (logs: {run_dir})", style="dim", soft_wrap=True)
        try:
            starting = asyncio.create_task(fleet.start())
            try:
                while not (await asyncio.wait([starting], timeout=_STILL_S))[0]:
                    progress.still()
            finally:
                if not starting.done():
                    starting.cancel()
                    await asyncio.gather(starting, return_exceptions=True)
            starting.result()
            yield plan, engines.of_fleet(status.facts() for status in fleet.engines.values())
        finally:
            await fleet.stop()


async def _running(shown: Plan) -> list[Any] | None:
    """The engines of a service of this topology that was started on this machine; None if none runs."""
    gateway = last_url()
    if gateway is None:
        return None
    certificate, keys = last_certificate(), gateway_keys(shown)
    try:
        trusted = trusting(certificate) if certificate is not None else None
        facts = await ask_status(gateway, keys[0] if keys else None, trusted)
    except (TrivetError, OSError):
        return None
    return engines.of_service(shown, facts["engines"])


# -- what is told ------------------------------------------------------------------------------------------------------


def _tell_report(report: Report, json_file: str | None) -> None:
    _write(json_file, report.facts())
    if json_file == _STDOUT:
        return
    last = None
    for one in report.findings:
        if one.about != last:
            out.print(f"\n[bold]{escape(one.about or 'the whole')}[/]", soft_wrap=True)
            last = one.about
        _tell_finding(one)
    for pair, predictions in report.predictions.items():
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("prompt tokens", "prefill", "handover", "TTFT split", "TTFT colocated"):
            table.add_column(column, justify="right")
        for row in predictions:
            times = (row.prefill_s, row.handover_s, row.split_ttft_s, row.colocated_ttft_s)
            table.add_row(f"{row.prompt_tokens:,}", *map(_seconds, times))
        out.print(f"\n[bold]predicted for {escape(pair)}[/]", soft_wrap=True)
        out.print(table)
    counts = {level: sum(one.level is level for one in report.findings) for level in Level}
    told = ", ".join(f"{count} {str(level).upper()}" for level, count in counts.items())
    out.print(f"\n[{_STYLES[report.level]}]{str(report.level).upper()}[/]: {told}", soft_wrap=True)


def _tell_finding(one: Finding) -> None:
    word = f"[{_STYLES[one.level]}]{str(one.level).upper()}[/]"
    out.print(f"  {word}  {one.name:<20} {escape(one.said)}", soft_wrap=True)
    if one.mend is not None:
        out.print(f"  {'':26}-> {escape(one.mend)}", soft_wrap=True)
