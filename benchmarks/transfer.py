"""What moving KV costs: split against colocated on the same two engines, one arm a way of moving it.

    python benchmarks/transfer.py stock cuda_p2p --model PATH --out transfer-h200.json --logs DIR

Needs one host with two GPUs (``--device cpu``: two CPU engines, to try the script). An arm starts ``trivet up`` on a
prefill and a decode engine, and a second ``trivet up`` whose topology has the same two engines as mixed ones, by
``url``. Requests through the first are split; through the second they are colocated, each on the engine with fewer
outstanding tokens. So both sides go through a gateway, and run on the same engines in the same minutes. Prompts are
random token ids, each used once; prefix caching is off; greedy, ``ignore_eos``. Results of several runs merge into one
file, arm by arm, and every arm holds its own colocated figures. Compare within an arm, not across machines.

Figures of an arm (``summary``; the split ones of its first rate in the arm itself as well; all are the client's):

- ``idle_ttft_s``: median TTFT of split requests, one at a time; ``idle_ttft_ratio``: divided by that of colocated ones,
  which are asked in turn with them. ``direct_ttft_s``: asked of the prefill engine itself, without any gateway.
- ``handover_ms``, idle: from prefill's first token to decode's first token at the client. ``definition`` says how:
  ``second_token_gap``, where prefill's token is the client's first (TrivetConnector): the gap between the client's
  first and second token minus one median decode step. ``ttft_difference``, where decode makes the first token
  (NixlConnector): split TTFT minus the median colocated TTFT. Both raw numbers stand beside it in every arm, and
  ``second_token_delay_ms``, the second token's time minus the colocated one's: should decode be ahead of prefill's
  answer, the gap hides what TTFT lost, and this shows it.
- ``ttft_*_s``, ``second_token_gap_p99_ms``, ``itl_*_ms``: under Poisson arrivals at ``--rate``. ITL is the gap between
  tokens from the second one on; the gap before the second is told apart. A chunk of several tokens is one gap,
  undivided, and counted (``chunks_of_several_tokens``).
- ``failed``: requests without a whole answer. ``not_split``: those that the gateway served otherwise.
- ``prefill_cost_pct``: prompts a second of the prefill engine, saturated, with split requests through the gateway
  against one-token requests without transfer, by as much is the former lower.

``stock_no_p2p`` is measured idle and at 0.2 requests a second only, and its prefill is never saturated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from arms import ARMS, Arm, Ports, colocated_topology, engine_flags, split_topology
from asking import (
    MODEL,
    Answer,
    Answers,
    Ask,
    AskError,
    arrivals_s,
    asker,
    closed_loop,
    completion,
    interval_s,
    journal,
    median,
    open_loop,
    random_prompt,
)
from facts import facts
from serving import ServiceFailedError, Up, end_in_order, free_ports, keep_logs, running

_WARM_UPS = 2
_IDLE_TOKENS = 16
_SATURATING = 6
_FEWEST = _SATURATING + 4
"""Prompts of a round, without which no interval can be told."""
_ROUNDS = 2
_REQUEST_S = 120.0
_PATIENCE_S = 40.0

Say = Callable[[str], None]
Save = Callable[[], None]


@dataclass(slots=True)
class Bench:
    """An arm that is up: where to ask, and what has been found so far."""

    arm: Arm
    options: argparse.Namespace
    http: aiohttp.ClientSession
    ports: Ports
    services: list[Up]
    result: dict[str, Any]
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def split_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.gateway}"

    @property
    def asks(self) -> dict[str, Ask]:
        return {
            "colocated": asker(self.http, f"http://127.0.0.1:{self.ports.colocated_gateway}"),
            "split": asker(self.http, self.split_url),
            "direct": asker(self.http, self.ports.engine_urls[0]),
        }

    def body(self, tokens: int) -> bytes:
        return completion(random_prompt(self.rng, self.options.prompt_tokens), tokens)

    def prompts(self, count: int, tokens: int) -> list[bytes]:
        return [self.body(tokens) for _ in range(count)]


async def measure_idle(bench: Bench) -> dict[str, Any]:
    """One request at a time, the three ways in turn."""
    seen: dict[str, list[Answer]] = {name: [] for name in bench.asks}
    for turn in range(_WARM_UPS + bench.options.idle):
        order = list(bench.asks.items())
        for name, ask in order[turn % 3 :] + order[: turn % 3]:
            answer = await ask(bench.body(_IDLE_TOKENS))
            if turn >= _WARM_UPS:
                seen[name].append(answer)
    split_s, colocated_s, direct_s = ([one.ttft_s for one in seen[name]] for name in ("split", "colocated", "direct"))
    colocated_median_s = statistics.median(colocated_s)
    return {
        "requests": bench.options.idle,
        "idle_ttft_s": round(statistics.median(split_s), 4),
        "colocated_ttft_s": round(colocated_median_s, 4),
        "direct_ttft_s": round(statistics.median(direct_s), 4),
        "idle_ttft_ratio": round(statistics.median(split_s) / colocated_median_s, 4),
        "handover_ms": handover(seen["split"], seen["colocated"], bench.arm.first_token_from_prefill),
        "colocated_second_token_gap_ms": median([one.second_token_gap_s for one in seen["colocated"]], 1e3),
        "gateway": await journal(bench.http, bench.split_url, seen["split"]),
        "ttft_s": {name: [round(one.ttft_s, 4) for one in answers] for name, answers in seen.items()},
    }


def handover(split: Sequence[Answer], colocated: Sequence[Answer], first_token_from_prefill: bool) -> dict[str, Any]:
    """The idle handover, by the definition that fits the connector, and the numbers behind both definitions."""
    steps_s = [gap_s for one in split for gap_s in one.later_gaps_s]
    step_s = statistics.median(steps_s) if steps_s else 0.0  # all tokens came at once
    colocated_ttft_s = statistics.median(one.ttft_s for one in colocated)
    colocated_second_s = statistics.median(one.ttft_s + one.second_token_gap_s for one in colocated)
    gaps_s = [one.second_token_gap_s for one in split]
    differences_s = [one.ttft_s - colocated_ttft_s for one in split]
    handovers_s = [gap_s - step_s for gap_s in gaps_s] if first_token_from_prefill else differences_s
    return {
        "definition": "second_token_gap" if first_token_from_prefill else "ttft_difference",
        "median": median(handovers_s, 1e3),
        "max": round(max(handovers_s) * 1e3, 2),
        "ttft_difference_ms": median(differences_s, 1e3),
        "ttft_difference_max_ms": round(max(differences_s) * 1e3, 2),
        "second_token_delay_ms": median(
            [one.ttft_s + one.second_token_gap_s - colocated_second_s for one in split], 1e3
        ),
        "second_token_gap_ms": median(gaps_s, 1e3),
        "second_token_gap_max_ms": round(max(gaps_s) * 1e3, 2),
        "decode_step_ms": round(step_s * 1e3, 2),
    }


async def measure_load(bench: Bench, rate: float, result: dict[str, Any]) -> None:
    """The same arrivals colocated, then split; ``result`` is filled side by side."""
    seconds = bench.options.seconds if bench.arm.rate is None else max(30.0, bench.options.seconds)
    starts_s = arrivals_s(rate, seconds)
    for name in ("colocated", "split"):
        bodies = bench.prompts(len(starts_s), bench.options.output_tokens)
        before = await received_bytes(bench)
        answers = await open_loop(bench.asks[name], bodies, starts_s, _PATIENCE_S)
        result[name] = answers.figures()
        if name == "split":
            result[name] |= {"gateway": await journal(bench.http, bench.split_url, answers.good)}
            result[name] |= await moved(bench, answers, before)


async def moved(bench: Bench, answers: Answers, before: float | None) -> dict[str, float]:
    """KV bytes that decode's connector says it received for each request; nothing where it does not count them."""
    after = await received_bytes(bench)
    if before is None or after is None or not answers.good:
        return {}
    return {"received_bytes_a_request": round((after - before) / len(answers.good))}


async def measure_prefill_cost(bench: Bench) -> dict[str, Any]:
    """Prompts a second that prefill computes while it always has some waiting, with transfer and without, in turn."""
    split, found = bench.asks["split"], {"without": [], "with": []}

    async def with_transfer(body: bytes) -> float:
        answer = await split(body)
        return answer.chunk_s[0]

    async def without_transfer(body: bytes) -> float:
        url, headers = f"{bench.ports.engine_urls[0]}/inference/v1/generate", {"content-type": "application/json"}
        async with bench.http.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                raise AskError(f"HTTP {response.status}: {(await response.text())[:300]}")
            await response.read()
            return time.perf_counter()

    for _ in range(_ROUNDS):
        for name, ask in (("without", without_transfer), ("with", with_transfer)):
            make = bench.body if name == "with" else lambda _: _prefill_alone(bench)
            stamps = await closed_loop(ask, [make(2) for _ in range(bench.options.prefill_prompts)], _SATURATING)
            found[name].append(interval_s(stamps[_SATURATING:]))
    without_s, with_s = (statistics.mean(found[name]) for name in ("without", "with"))
    return {
        "prompts": bench.options.prefill_prompts * _ROUNDS,
        "running": _SATURATING,
        "without_transfer_prompts_per_s": [round(1 / one, 3) for one in found["without"]],
        "with_transfer_prompts_per_s": [round(1 / one, 3) for one in found["with"]],
        "prefill_cost_pct": round((1 - without_s / with_s) * 100, 2),
    }


def _prefill_alone(bench: Bench) -> bytes:
    """What the gateway's prefill leg asks, without any transfer."""
    return orjson.dumps(
        {
            "token_ids": random_prompt(bench.rng, bench.options.prompt_tokens),
            "model": MODEL,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False},
            "stream": False,
        }
    )


async def received_bytes(bench: Bench) -> float | None:
    """KV bytes that decode has received since its start, by its connector's counter."""
    metric = bench.arm.bytes_metric
    if metric is None:
        return None
    try:
        async with bench.http.get(f"{bench.ports.engine_urls[1]}/metrics") as response:
            lines = (await response.text()).splitlines()
    except (aiohttp.ClientError, TimeoutError):
        return None
    counted = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == metric]
    return sum(counted) if counted else None


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The table's row: what is there of it."""
    idle, prefill = result.get("idle", {}), result.get("prefill", {})
    row = {name: idle.get(name) for name in ("idle_ttft_s", "idle_ttft_ratio", "direct_ttft_s", "handover_ms")}
    row["prefill_cost_pct"] = prefill.get("prefill_cost_pct")
    names = ("failed", "ttft_p50_s", "ttft_p99_s", "second_token_gap_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms")
    for rate, sides in result.get("load", {}).items():
        for side, figures in sides.items():
            row[f"{side} at {rate}/s"] = {name: figures[name] for name in names}
            if "gateway" in figures:
                row[f"{side} at {rate}/s"]["not_split"] = figures["gateway"]["not_split"]
    return row


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """The split side of a row as plain numbers, of the first rate that was measured."""
    load = next((row[key] for key in row if key.startswith("split at ")), {})
    handover = row["handover_ms"] or {}
    names = ("second_token_gap_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_p50_s", "ttft_p99_s")
    return {
        "idle_ttft_ratio": row["idle_ttft_ratio"],
        "handover_ms": handover.get("median"),
        "handover_definition": handover.get("definition"),
        "second_token_delay_ms": handover.get("second_token_delay_ms"),
        **{name: load.get(name) for name in names},
        "prefill_cost_pct": row["prefill_cost_pct"],
    }


def tell(result: dict[str, Any]) -> None:
    """Puts the figures of what was measured so far into an arm."""
    result["summary"] = summary(result)
    result |= figures(result["summary"])


async def measure(bench: Bench, say: Say, save: Save) -> None:
    """All of one arm, saved piece by piece."""

    def done(what: str) -> None:
        tell(bench.result)
        save()
        say(what)

    started_s = time.monotonic()
    for service in bench.services:
        await service.ready(bench.http)
    bench.result["start_s"] = round(time.monotonic() - started_s, 1)
    bench.result["engines"] = [one for service in bench.services for one in service.engine_commands()]
    done(f"up after {bench.result['start_s']} s")
    bench.result["idle"] = await measure_idle(bench)
    done(f"idle: {json.dumps(bench.result['idle'])}")
    for rate in [bench.arm.rate] if bench.arm.rate is not None else bench.options.rate:
        load = bench.result.setdefault("load", {}).setdefault(f"{rate:g}", {})
        await measure_load(bench, rate, load)
        done(f"{rate:g}/s: {json.dumps(load)}")
    if bench.arm.saturates_prefill and bench.options.prefill_prompts:
        bench.result["prefill"] = await measure_prefill_cost(bench)
        done(f"prefill: {bench.result['prefill']}")


async def run_arm(arm: Arm, options: argparse.Namespace, result: dict[str, Any], say: Say, save: Save) -> None:
    """Starts an arm's engines and gateways, measures, and ends them; ``result`` says if something stopped it."""
    ports = Ports(*free_ports(4))
    flags = [*engine_flags(options.device, options.limits), *json.loads(options.flags)]
    named = {"model": options.model, "device": options.device, "max_length": options.max_length}
    topology = split_topology(arm, ports, gpus=options.gpus, flags=flags, **named)
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        services = [
            Up("split", topology, Path(scratch)),
            Up("colocated", colocated_topology(ports, **named), Path(scratch)),
        ]
        result |= {"arm": asdict(arm), "topology": topology, "stopped": "interrupted"}
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with (
                running(services),
                aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
                asyncio.timeout(options.limit_s),
            ):
                await measure(Bench(arm, options, http, ports, services, result), say, save)
                result["stopped"] = None
        except TimeoutError:
            result["stopped"] = f"after its limit of {options.limit_s:g} s"
        except (ServiceFailedError, AskError, aiohttp.ClientError, ExceptionGroup) as error:
            result["stopped"] = told_of(error)[:2000]
        finally:
            tell(result)
            keep_logs(services, options.logs / f"{arm.name}.log")
            save()
    say(f"ended{': ' + result['stopped'] if result['stopped'] else ''}")


def told_of(error: BaseException) -> str:
    """An error in one line; of a group, each of its own."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(told_of(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}"


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {"arms": {}}


async def run(options: argparse.Namespace) -> bool:
    begin_s, results = time.monotonic(), read_results(options.out)
    told = facts(options.commit)
    for name in options.arms:
        result: dict[str, Any] = {**told}
        results["arms"][name] = result

        def save() -> None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")

        def say(what: str, name: str = name) -> None:
            print(f"[{time.monotonic() - begin_s:5.0f} s] {name}: {what}", flush=True)

        await run_arm(ARMS[name], options, result, say, save)
    for name in options.arms:
        print(json.dumps({name: results["arms"][name].get("summary")}), flush=True)
    return all(results["arms"][name]["stopped"] is None for name in options.arms)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", choices=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--model", required=True, help="model folder; its weights are not read on GPUs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; arms that it holds already stay")
    parser.add_argument("--logs", type=Path, required=True, help="folder: one log an arm")
    parser.add_argument("--rate", type=float, nargs="+", default=[3.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--idle", type=int, default=9, help="idle requests each way")
    parser.add_argument(
        "--prefill-prompts",
        type=int,
        default=40,
        help=f"prompts a round of the prefill cost, {_FEWEST} at least; 0: none",
    )
    parser.add_argument("--gpus", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--max-length", type=int, default=16384)
    parser.add_argument(
        "--limits", choices=["vllm", "trivet"], default="vllm", help="tokens and sequences a pass, GPUs"
    )
    parser.add_argument("--flags", default="[]", help="more vLLM flags for both engines, a JSON list")
    parser.add_argument("--limit-s", type=float, default=270.0, help="longest time of an arm, its start included")
    parser.add_argument("--commit", help="of the measured tree, where it lies without its repository")
    options = parser.parse_args()
    if 0 < options.prefill_prompts < _FEWEST:
        parser.error(f"--prefill-prompts is 0, or {_FEWEST} at least: the first {_SATURATING} only fill the engine")
    return options


def main() -> None:
    options = parsed()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    end_in_order()
    sys.exit(0 if asyncio.run(run(options)) else 1)


if __name__ == "__main__":
    main()
