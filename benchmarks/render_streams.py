"""Whether rendering long chats disturbs the streams beside it.

    python benchmarks/render_streams.py --json render_streams.json

One gateway worker on a core of its own carries ``--streams`` streams from simulated engines (split). Windows without
long chats take turns with windows in which a client asks, one after another, for chats of some 100,000 tokens that
nobody has seen before, each answered with one token by a mixed engine: as fast as they are answered (``--pause-s 0``),
or with a pause behind each answer. What is told is p50, p99 and the longest of the gaps between tokens, and what long
chats add to each, and how late a timer of the client was: where the client itself is late, a window says nothing.

With ``--render-server`` a ``trivet render`` on the others' core renders what is long.

Engine and client of the long chats run with the lowest priority, so that they take no time from what measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from asking import MODEL
from checkpoint import Shape, write_checkpoint
from facts import facts
from gateway_overhead import Load, answers, engine_command, scheduled_s, start, stop
from raw_load import CHAT, Job
from render_speed import sources
from serving import Up, descendants, free_ports

_START_S = 120.0
_LONG_BYTES = 65536
"""Of a body that a render server is given."""
_LATE_MS = 3.0
"""A client that is later than this at its 99th percentile sees its own gaps."""


def topology(model: str, ports: dict[str, int], *, renders: bool) -> dict[str, Any]:
    tiers = {
        tier: {"engines": [{"name": tier, "url": f"http://127.0.0.1:{ports[tier]}", "device": "sim"}]}
        for tier in ("prefill", "decode", "mixed")
    }
    if renders:
        tiers["render"] = {"servers": [f"http://127.0.0.1:{ports['render']}"], "local_below_bytes": _LONG_BYTES}
    return {
        "model": {"name": model, "served_names": [MODEL], "max_length": 131072},
        "kv": {"connector": "NixlConnector"},
        "tiers": tiers,
        "gateway": {"port": ports["gateway"], "workers": 1, "drain_s": 1, "split": "always"},
    }


def render_command(model: str, port: int) -> list[str]:
    served = ("--served-model-name", MODEL, "--max-model-len", "131072")
    return [sys.executable, "-m", "trivet.cli", "render", model, "--port", f"{port}", *served]


class LongChats:
    """Asks for long chats while it is told to."""

    def __init__(self, url: str, characters: int) -> None:
        self._url, self._characters = url, characters
        self._texts, self._chance = sources(), random.Random(7)
        self.prompt_tokens: list[int] = []
        self.took_s: list[float] = []

    @property
    def rendered(self) -> int:
        return len(self.took_s)

    def _body(self) -> bytes:
        messages, left, roles = [], self._characters, ("user", "assistant")
        while left > 0:
            text = self._chance.choice(self._texts)
            begin = self._chance.randrange(len(text) - 2000)
            messages.append({"role": roles[len(messages) % 2], "content": text[begin : begin + 2000]})
            left -= 2000
        return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, "ignore_eos": True}).encode()

    async def ask_until(self, over: asyncio.Event, pause_s: float) -> None:
        headers = {"X-Trivet-Serve": "colocated", "content-type": "application/json"}
        async with aiohttp.ClientSession() as session:
            while not over.is_set():
                began_s = time.perf_counter()
                async with session.post(self._url + CHAT, data=self._body(), headers=headers) as answer:
                    told = await answer.json()
                    if answer.status != 200:
                        raise SystemExit(f"a long chat was answered {answer.status}: {told}")
                self.took_s.append(time.perf_counter() - began_s)
                self.prompt_tokens.append(told["usage"]["prompt_tokens"])
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), pause_s)


@contextlib.asynccontextmanager
async def standing(options: argparse.Namespace, scratch: Path) -> AsyncIterator[tuple[Up, Load]]:
    names = ("prefill", "decode", "mixed", "gateway", "render")
    ports = dict(zip(names, free_ports(len(names), 18600), strict=True))
    gateway_core, load_core = options.cores
    model = write_checkpoint(scratch / "model", Shape.tiny(), tokenizer=None)
    up = Up("streams", topology(str(model), ports, renders=options.render_server), scratch)
    started: list[Any] = []
    load: Load | None = None
    try:
        for name in names[:3]:
            command = engine_command(name, ports[name], options, hands_over=name != "mixed")
            started.append(start(command, scratch / f"{name}.log", load_core))
        os.sched_setscheduler(started[2].pid, os.SCHED_IDLE, os.sched_param(0))
        if options.render_server:
            started.append(start(render_command(str(model), ports["render"]), scratch / "render.log", load_core))
            async with aiohttp.ClientSession() as http, asyncio.timeout(_START_S):
                await answers(http, ports["render"])
            os.sched_setscheduler(started[-1].pid, os.SCHED_IDLE, os.sched_param(0))
        async with aiohttp.ClientSession() as http, asyncio.timeout(_START_S):
            await asyncio.gather(*(answers(http, ports[name]) for name in names[:3]))
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {gateway_core})
            up.start()
            os.sched_setaffinity(0, before)
            await up.ready(http)
        load = Load(load_core, scratch / "load.log")
        yield up, load
    finally:
        if load is not None:
            load.stop()
        await up.stop()
        for process in started:
            stop(process)


async def window(
    up: Up, load: Load, chats: LongChats, pause_s: float | None, options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """
    Args:
        pause_s: between long chats; None for none of them.
    """
    job = Job(
        port=up.topology["gateway"]["port"],
        streams=options.streams,
        tokens=options.tokens,
        ramp_s=options.tokens * options.step_ms / 1000,
        window_s=options.window_s,
        seed=seed,
    )
    assert up._process is not None
    family = [up._process.pid, *descendants(up._process.pid)]
    over = asyncio.Event()
    asking = asyncio.create_task(chats.ask_until(over, pause_s)) if pause_s is not None else None
    rendered, began_s = chats.rendered, time.perf_counter()
    try:
        told = await load.run(job, lambda: {"gateway": sum(scheduled_s(pid, 0) for pid in family)})
    finally:
        over.set()
        if asking is not None:
            await asking
    return {
        "long": pause_s is not None,
        "pause_s": pause_s,
        "rendered": chats.rendered - rendered,
        "chats_per_s": round((chats.rendered - rendered) / (time.perf_counter() - began_s), 2),
        "chat_s": round(statistics.median(chats.took_s[rendered:]), 3) if pause_s is not None else None,
        "failed": told["failed"],
        "itl_ms": told["itl_ms"],
        "late_ms": told["client_late_ms"],
        "gateway_cpu_share": round(told["cpu_s"]["gateway"] / told["window_s"], 3),
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    os.sched_setaffinity(0, {options.cores[1]})
    with tempfile.TemporaryDirectory(prefix="render-streams-") as name:
        async with standing(options, Path(name)) as (up, load):
            chats = LongChats(up.url, options.long_characters)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            windows = []
            for number, pause_s in enumerate([None, *options.pause_s] * options.repeats):
                one = await window(up, load, chats, pause_s, options, number)
                print(one, flush=True)
                windows.append(one)
    return {**verdict(windows, chats, options), "facts": facts(), "options": plain(options), "windows": windows}


def plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}


_TOLD = ("p50", "p99", "max")


def verdict(windows: Sequence[dict[str, Any]], chats: LongChats, options: argparse.Namespace) -> dict[str, Any]:
    def of(pause_s: float | None, told: str) -> float:
        return statistics.median(one["itl_ms"][told] for one in windows if one["pause_s"] == pause_s)

    def pace(pause_s: float) -> dict[str, Any]:
        its = [one for one in windows if one["pause_s"] == pause_s]
        return {
            "pause_s": pause_s,
            "chats_per_s": statistics.median(one["chats_per_s"] for one in its),
            "long_chat_s": statistics.median(one["chat_s"] for one in its),
            "itl_ms": {told: of(pause_s, told) for told in _TOLD},
            "added_ms": {told: round(of(pause_s, told) - of(None, told), 3) for told in _TOLD},
        }

    quickest = min(options.pause_s)
    return {
        "added_itl_p99_ms": round(of(quickest, "p99") - of(None, "p99"), 3),
        "itl_p99_ms": {"with_long_chats": of(quickest, "p99"), "without": of(None, "p99")},
        "long_chats": chats.rendered,
        "prompt_tokens": round(statistics.mean(chats.prompt_tokens)),
        "long_chat_s": round(statistics.median(chats.took_s), 3),
        "without": {told: of(None, told) for told in _TOLD},
        "paces": [pace(pause_s) for pause_s in options.pause_s],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=60, help="of an answer")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of the engines: a token of every answer")
    parser.add_argument("--window-s", type=float, default=12.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause-s", type=float, nargs="+", default=[0.0, 1.0], help="behind each long chat; several")
    parser.add_argument("--render-server", action="store_true", help="renders what is long, on the others' core")
    parser.add_argument("--long-characters", type=int, default=370_000, help="of a long chat: about 100,000 tokens")
    parser.add_argument("--cores", type=int, nargs=2, default=[1, 0], help="of the gateway, of all others")
    options = parser.parse_args()
    results = asyncio.run(run(options))
    print(json.dumps({name: one for name, one in results.items() if name not in ("windows", "facts")}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
