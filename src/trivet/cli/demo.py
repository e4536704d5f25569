"""``trivet demo``: a real model, split on this machine's CPU, and where its time went."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from trivet.cli.common import open_plan, out
from trivet.cli.up import running, stop_signals
from trivet.demo.run import PASSAGE, QUESTION, DemoResult, run_demo
from trivet.errors import TrivetError
from trivet.topology import Plan


def demo(
    json_path: Path | None = typer.Option(None, "--json", help="Write the facts to this file as well."),
    prompt: str | None = typer.Option(None, "--prompt", help="Ask something else."),
    max_tokens: int = typer.Option(48, "--max-tokens", min=2, max=512, help="Longest answer."),
) -> None:
    """Serve a small real model split into three tiers, ask it once, show where the time went."""
    question = prompt or f"{PASSAGE}\n{QUESTION}"
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise TrivetError(f"{json_path}: there is no folder {json_path.parent}", mend="make it first")
    with open_plan(None, port=0, guarded=False) as plan:  # the engines' counters are to tell of the demo alone
        result = asyncio.run(_demo(plan, question, prompt or QUESTION, max_tokens))
    if json_path is not None:
        json_path.write_text(json.dumps(result.facts(), indent=1) + "\n", encoding="utf-8")
    if (fault := result.fault()) is not None:
        raise TrivetError(
            fault,
            mend="this should never be: please report it with the logs",
            detail=f"split:     {result.answer!r}\ncolocated: {result.answer_colocated!r}",
        )


async def _demo(plan: Plan, question: str, shown: str, max_tokens: int) -> DemoResult:
    out.print(f"starting three tiers of {escape(plan.served_names[0])} on this CPU (about a minute)")
    async with stop_signals() as stop, running(plan, out, stop) as service:
        if service is None:
            raise TrivetError("stopped before it was up")
        out.print(f"\n[bold]{escape(shown)}[/]", soft_wrap=True)
        asking = asyncio.create_task(run_demo(service, question, max_tokens, _show))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            raise TrivetError("stopped")
        out.print("\n")
        result = asking.result()
        out.print(_table(result))
        verdict = "[green]equal[/]" if result.equal_to_colocated else "[bold red]NOT equal[/]"
        out.print(
            f"\n{result.completion_tokens} greedy tokens, split and colocated: {verdict}. "
            f"Colocated on {result.colocated_engine}, the first token took {result.colocated_ttft_ms:.0f} ms.",
            soft_wrap=True,
        )
        if result.first_is_prefills:
            out.print(
                f"The first token was {result.prefill_engine}'s and went out before the handover, behind which "
                f"{result.decode_engine} made the second.",
                soft_wrap=True,
            )
        out.print("stopping")
    return result


def _show(piece: str) -> None:
    out.print(escape(piece), end="", soft_wrap=True)


def _table(result: DemoResult) -> Table:
    """In the order of time: what stands above a row that begins with "to" adds up to it."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("leg", "where", "ms", "tokens", "KV moved"):
        table.add_column(column, justify="left" if column in ("leg", "where") else "right")
    first = ("to first token", f"from {result.first_token_engine}", result.ttft_ms, "1", "")
    decode_ms, decoded = result.decode_ms, result.completion_tokens
    if result.first_is_prefills:
        decode_ms, decoded = decode_ms - result.handover_ms, decoded - 1
    handover = (
        "handover",
        f"{result.prefill_engine} -> {result.decode_engine} ({result.connector})",
        result.handover_ms,
        f"{result.decode_computed_prompt_tokens} computed again",
        f"{result.kv_bytes_moved / 1e6:.1f} MB",
    )
    rows = [
        ("render", "gateway", result.render_ms, f"{result.prompt_tokens}", ""),
        ("prefill", result.prefill_engine, result.prefill_ms, f"{result.prompt_tokens}", ""),
        *((first, handover) if result.first_is_prefills else (handover, first)),
        (
            "decode",
            f"{result.decode_engine} ({decode_ms / max(1, decoded - 1):.0f} ms a token)",
            decode_ms,
            f"{decoded}",
            "",
        ),
        ("to last token", "", result.ttft_ms + result.decode_ms, f"{result.completion_tokens}", ""),
    ]
    for leg, where, time_ms, tokens, moved in rows:
        table.add_row(leg, where, f"{time_ms:.1f}", tokens, moved)
    return table
