"""The table of what ``transfer.py`` found, in Markdown: ``python benchmarks/transfer_table.py transfer-h200.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_COLUMNS = (
    "",
    "TTFT idle",
    "to colocated",
    "handover idle, median / max",
    "prefill cost",
    "load: TTFT p50 / p99",
    "second token p99",
    "ITL p50 / p99 / max",
    "failed",
)


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def load_cells(figures: dict[str, Any]) -> str:
    ttft = " / ".join(number(figures[name], 3) for name in ("ttft_p50_s", "ttft_p99_s"))
    itl = " / ".join(number(figures[name]) for name in ("itl_p50_ms", "itl_p99_ms", "itl_max_ms"))
    failed = f"{figures['failed']}" + (f", {figures['not_split']} not split" if figures.get("not_split") else "")
    return f"{ttft} s | {number(figures['second_token_gap_p99_ms'])} ms | {itl} ms | {failed}"


def idle_cells(arm: dict[str, Any], side: str) -> str:
    row, idle = arm["summary"], arm.get("idle") or {}
    if side == "colocated":
        return f"{number(idle.get('colocated_ttft_s'), 3)} s | - | - | -"
    handover = row["handover_ms"] or {}
    cost = "-" if row["prefill_cost_pct"] is None else f"{number(row['prefill_cost_pct'])}%"
    return (
        f"{number(row['idle_ttft_s'], 3)} s | {number(row['idle_ttft_ratio'], 2)} | "
        f"{number(handover.get('median'))} / {number(handover.get('max'))} ms | {cost}"
    )


def rows(name: str, arm: dict[str, Any]) -> list[str]:
    """A row for each rate, colocated and split; the idle figures alone where no load was measured."""
    loads = [key for key in arm["summary"] if " at " in key]
    found = []
    for load in loads:
        side, _, rate = load.partition(" at ")
        found.append(f"| {name}, {side}, {rate} | {idle_cells(arm, side)} | {load_cells(arm['summary'][load])} |")
    if not loads:
        found.append(f"| {name}, split | {idle_cells(arm, 'split')} | - | - | - | - |")
    if arm["stopped"]:
        found[-1] = found[-1].replace(f"| {name}", f"| {name} (stopped {arm['stopped']})", 1)
    return found


def main() -> None:
    arms = json.loads(Path(sys.argv[1]).read_text())["arms"]
    print(f"| {' | '.join(_COLUMNS)} |".replace("|  |", "| |"), "|---" * len(_COLUMNS) + "|", sep="\n")
    for name, arm in arms.items():
        print(*rows(name, arm), sep="\n")


if __name__ == "__main__":
    main()
