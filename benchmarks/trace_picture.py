"""A picture (SVG) of one transfer, out of a trace that engines wrote with ``TRIVET_KV_TRACE``.

    python benchmarks/trace_picture.py TRACE --out PICTURE.svg [--transfer N]

Lanes: layers that prefill has computed, pieces gathered there, pieces written at decode. Marks: the scheduler sides.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, LANE, TOP = 1100, 150, 46, 64
LANES = ("layers computed", "gather (prefill)", "write (decode)")
COLOURS = ("#8a8f98", "#c2703d", "#2f6f9f")


def events_of(trace: Path) -> list[dict[str, Any]]:
    """The events of a trace that may still be written, and so may end within a line."""
    found = []
    for line in trace.read_text().splitlines():
        try:
            found.append(json.loads(line.rstrip().rstrip(",")))
        except json.JSONDecodeError:
            continue
    return [one for one in found if isinstance(one, dict)]


def transfer_of(events: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The events of the transfer that began as the ``number``-th, from 0."""
    names: dict[str, None] = {}
    for event in events:
        if (name := event.get("args", {}).get("transfer")) is not None:
            names.setdefault(name)
    chosen = list(names)[number]
    own = [event for event in events if event.get("args", {}).get("transfer") == chosen]
    return sorted(own, key=lambda event: event["ts"])


def picture(events: Sequence[dict[str, Any]]) -> str:
    """The SVG of one transfer's events."""
    start = events[0]["ts"]
    end = max(event["ts"] + event.get("dur", 0) for event in events)
    scale = (WIDTH - LEFT - 30) / (end - start)
    height = TOP + LANE * len(LANES) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for lane, (name, colour) in enumerate(zip(LANES, COLOURS, strict=True)):
        y = TOP + lane * LANE
        parts.append(f'<text x="10" y="{y + 20}" fill="{colour}">{name}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y + 30}" x2="{WIDTH - 30}" y2="{y + 30}" stroke="#ddd"/>')
    row = 0
    for event in events:
        x, what = LEFT + (event["ts"] - start) * scale, event["name"]
        if event["ph"] == "X" and (what.startswith(("gather", "write"))):
            lane = 1 if what.startswith("gather") else 2
            width = max(1.0, event["dur"] * scale)
            parts.append(
                f'<rect x="{x:.1f}" y="{TOP + lane * LANE + 6}" width="{width:.1f}" height="22" '
                f'fill="{COLOURS[lane]}" fill-opacity="0.75">'
                f"<title>{escape(what)}, {event['dur'] / 1e3:.2f} ms</title></rect>"
            )
        elif event["ph"] == "i" and what.startswith("layers"):
            parts.append(
                f'<line x1="{x:.1f}" y1="{TOP + 6}" x2="{x:.1f}" y2="{TOP + 28}"'
                f' stroke="{COLOURS[0]}" stroke-width="2"/>'
            )
        elif event["ph"] == "i":
            y, anchor = 14 + row % 3 * 15, "end" if x > WIDTH * 0.6 else "start"
            row += 1
            parts.append(
                f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{TOP + LANE * len(LANES)}"'
                ' stroke="#b33" stroke-dasharray="2 3"/>'
            )
            told = f"{event['cat']}: {what}"
            parts.append(f'<text x="{x:.1f}" y="{y}" fill="#b33" text-anchor="{anchor}">{escape(told)}</text>')
    y = TOP + LANE * len(LANES) + 20
    for step in range(int((end - start) / 20e3) + 1):
        x = LEFT + step * 20e3 * scale
        parts.append(f'<text x="{x:.1f}" y="{y + 14}" fill="#555" text-anchor="middle">{step * 20} ms</text>')
        parts.append(f'<line x1="{x:.1f}" y1="{y - 6}" x2="{x:.1f}" y2="{y}" stroke="#555"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--transfer", type=int, default=5, help="which one, from 0: the first ones join the engines")
    options = parser.parse_args()
    try:
        events = events_of(options.trace)
    except OSError as error:
        parser.error(f"{options.trace}: {error.strerror}")
    there = len({event["args"]["transfer"] for event in events if "transfer" in event.get("args", {})})
    if not 0 <= options.transfer < there:
        parser.error(f"{options.trace} has {there} transfers; choose one with --transfer, from 0")
    options.out.write_text(picture(transfer_of(events, options.transfer)))


if __name__ == "__main__":
    main()
