"""What idle engines cost: CPU seconds a second of a prefill and a decode engine that nobody asks anything.

    python benchmarks/idle_cpu.py --json --out idle-cpu.json

Starts one pair after another on CPUs, each by ``trivet up``: ``nixl_stock`` (NixlConnector with its progress thread, as
vLLM has it), ``nixl_trivet`` (NixlConnector as Trivet starts it on CPUs) and ``trivet`` (TrivetConnector). Two split
requests bring the connectors together; then user and system time of every process of an engine are read twice,
``--seconds`` apart. The gateway asks each engine's ``/health`` three times a second, as it does in service: that is
part of each figure, and the same in all. Without ``--model`` a tiny Llama with random weights is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from asking import MODEL, AskError, asker, completion, random_prompt
from checkpoint import Shape, write_checkpoint
from facts import facts
from serving import ServiceFailedError, Up, command_of, descendants, end_in_order, free_ports, keep_logs, running

CASES: dict[str, dict[str, Any]] = {
    "nixl_stock": {"connector": "NixlConnector", "env": {"TRIVET_NIXL_PROGRESS_THREAD": "1"}},
    "nixl_trivet": {"connector": "NixlConnector", "env": {}},
    "trivet": {"connector": "TrivetConnector", "env": {}},
}
_ENGINE = ["-m", "trivet.fleet.vllm"]
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PROMPT_TOKENS = 200


def topology(case: dict[str, Any], model: str, ports: list[int]) -> dict[str, Any]:
    tiers = zip(("prefill", "decode"), ports, strict=False)
    return {
        "model": {"name": model, "served_names": [MODEL], "max_length": 1024},
        "kv": {"connector": case["connector"]},
        "env": case["env"],
        "tiers": {tier: {"device": "cpu", "engines": [{"name": tier, "port": port}]} for tier, port in tiers},
        "gateway": {"port": ports[2], "drain_s": 1},
    }


def engine_family(service: Up, port: int) -> list[int]:
    """The processes of the engine that listens on ``port``: its server and all below."""
    for pid in service.family():
        words = command_of(pid)
        if words[1:3] == _ENGINE and str(port) in words:
            return [pid, *descendants(pid)]
    raise ServiceFailedError(f"no engine on port {port}")


def cpu_s(pid: int) -> float:
    """User and system time of a process; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


def name_of(pid: int) -> str:
    """The title of a process, short."""
    words = command_of(pid)
    return "server" if words[1:3] == _ENGINE else Path(" ".join(words)[:80] or str(pid)).name


async def shares(service: Up, ports: list[int], seconds: float) -> dict[str, Any]:
    """CPU seconds a second of each engine, and of those of its processes that use any."""
    families = {tier: engine_family(service, port) for tier, port in zip(("prefill", "decode"), ports, strict=False)}
    before = {pid: cpu_s(pid) for family in families.values() for pid in family}
    start_s = time.monotonic()
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - start_s
    used = {pid: (cpu_s(pid) - spent_s) / passed_s for pid, spent_s in before.items()}
    found: dict[str, Any] = {tier: round(sum(used[pid] for pid in family), 4) for tier, family in families.items()}
    found["processes"] = {
        tier: {f"{name_of(pid)} ({pid})": round(used[pid], 4) for pid in family if used[pid] > 0}
        for tier, family in families.items()
    }
    return found


async def measure(name: str, model: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    ports = free_ports(3)
    service = Up(name, topology(CASES[name], model, ports), scratch)
    try:
        async with (
            running([service]),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
            asyncio.timeout(options.limit_s),
        ):
            await service.ready(http)
            ask, rng = asker(http, service.url), random.Random(1)
            for _ in range(2):
                await ask(completion(random_prompt(rng, _PROMPT_TOKENS), 4))
            await asyncio.sleep(options.settle_s)
            return {**await shares(service, ports, options.seconds), "engines": service.engine_commands()}
    except (ServiceFailedError, AskError, aiohttp.ClientError, TimeoutError) as error:
        return {"stopped": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        if options.logs:
            keep_logs([service], options.logs / f"idle_{name}.log")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = facts(options.commit) | {"seconds": options.seconds}
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        folder = Path(scratch)
        model = options.model or str(write_checkpoint(folder / "model", Shape.tiny(), tokenizer=None))
        for name in options.cases:
            results[name] = await measure(name, model, options, folder)
            print(f"{name}: {results[name].get('stopped') or 'done'}", file=sys.stderr, flush=True)
    return results


def table(results: dict[str, Any], cases: list[str]) -> str:
    rows = [f"{'CPU seconds a second':<22}{'prefill':>10}{'decode':>10}"]
    for name in cases:
        one = results[name]
        row = f"{one['prefill']:>10.3f}{one['decode']:>10.3f}" if "prefill" in one else f"  {one['stopped']}"
        rows.append(f"{name:<22}{row}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; without any: all")
    parser.add_argument("--model", help="model folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write the JSON there as well")
    parser.add_argument("--logs", type=Path, help="folder: one log a pair")
    parser.add_argument("--seconds", type=float, default=25.0, help="between the two readings")
    parser.add_argument("--settle-s", type=float, default=8.0, help="after the last request, before the first reading")
    parser.add_argument("--limit-s", type=float, default=240.0, help="longest time of a pair, its start included")
    parser.add_argument("--commit", help="of the measured tree, where it lies without its repository")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown: {', '.join(unknown)}")
    options.cases = options.cases or list(CASES)
    end_in_order()
    results = asyncio.run(run(options))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1) if options.json else table(results, options.cases))


if __name__ == "__main__":
    main()
