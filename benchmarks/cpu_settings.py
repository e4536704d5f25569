"""What Trivet's settings for CPU engines are worth: cores kept, no polling, NIXL without its progress thread.

    python benchmarks/cpu_settings.py --out DIR --model PATH [--connector TrivetConnector]

Runs the same pair twice in one run, first as vLLM starts it (its environment without ``TRIVET_CPU_CORES`` and
``TRIVET_NIXL_PROGRESS_THREAD``), then as Trivet does, and compares medians of the prefill leg, the handover and the
time a token of the same requests. With TrivetConnector, which pins nothing and has no such thread, the difference is
the polling alone. See ``trivet.fleet.vllm`` for what the settings change.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import uuid
from pathlib import Path

import aiohttp

from gpu_split import body, prompt, stream, topology, versions
from trivet.gateway.service import Service
from trivet.topology import Plan, make_plan, parse_topology
from trivet.topology.ports import PortBook

OURS = ("TRIVET_CPU_CORES", "TRIVET_NIXL_PROGRESS_THREAD")


def without_ours(plan: Plan) -> Plan:
    engines = tuple(
        dataclasses.replace(one, env=tuple(setting for setting in one.env if setting.name not in OURS))
        for one in plan.engines
    )
    return dataclasses.replace(plan, engines=engines)


async def measure(plan: Plan, logs: Path, requests: int, tokens_in: int) -> dict[str, float]:
    logs.mkdir(parents=True, exist_ok=True)
    rng, seen = random.Random(4), []
    async with (
        Service(plan, logs, lambda event: print(event, flush=True)) as service,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http,
    ):
        for _ in range(requests + 1):
            request_id = uuid.uuid4().hex
            await stream(http, service.url, body(prompt(rng, tokens_in), 16), {"X-Request-Id": request_id})
            async with http.get(f"{service.url}/trivet/requests/{request_id}") as answer:
                (generation,) = (await answer.json())["generations"]
            seen.append(generation)
            print(generation, flush=True)
    seen = seen[1:]  # the first one pays for the pair's handshake
    assert all(one["split"] for one in seen)
    return {
        "prefill_ms": round(statistics.median(one["prefill_ms"] for one in seen), 1),
        "handover_ms": round(statistics.median(one["handover_ms"] for one in seen), 1),
        "handover_max_ms": round(max(one["handover_ms"] for one in seen), 1),
        "ms_per_token": round(statistics.median(one["decode_ms"] / 15 for one in seen), 1),
    }


async def run(options: argparse.Namespace) -> dict[str, object]:
    ports = PortBook()
    asked = json.loads(topology(options.model, "cpu", [], 2048)) | {"kv": {"connector": options.connector}}
    plan = make_plan(parse_topology(json.dumps(asked)), ports, model=options.model)
    out = Path(options.out)
    theirs = await measure(without_ours(plan), out / "vllm", options.requests, options.tokens_in)
    ours = await measure(plan, out / "trivet", options.requests, options.tokens_in)
    ports.close()
    return {
        "versions": versions(),
        "connector": options.connector,
        "requests": options.requests,
        "tokens_in": options.tokens_in,
        "vllm's settings": theirs,
        "trivet's settings": ours,
        "times faster": {name: round(theirs[name] / ours[name], 2) for name in theirs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for result and logs")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--connector", default="NixlConnector", choices=["NixlConnector", "TrivetConnector"])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens-in", type=int, default=400)
    options = parser.parse_args()
    facts = asyncio.run(asyncio.wait_for(run(options), 900))
    name = "cpu_settings.json" if options.connector == "NixlConnector" else "cpu_polling.json"
    (Path(options.out) / name).write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
