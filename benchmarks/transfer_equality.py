"""Is the split answer the colocated one, token for token, whatever moved its KV?

    python benchmarks/transfer_equality.py --mover cuda_p2p pinned --model PATH --out transfer-equality.json --logs DIR

Writes a seeded Llama (4 layers, Llama-3.1-8B's KV heads and head size, bfloat16) with the tokenizer of ``--model``, and
starts, a mover after another, prefill and decode engines and a plain mixed engine without any connector, with
``VLLM_BATCH_INVARIANT=1`` on GPUs, where the batch around a request otherwise changes its last digits. Each prompt is
asked three times through one gateway, greedy, with a fresh ``cache_salt`` each: colocated alone (the reference), split,
and colocated again in the company that split had. A case is equal if split gave the reference's tokens; the second
colocated answer shows what disagreement has nothing to do with the transfer. Cases (``--passes`` times each):

- lengths one at a time: 1, around a block, around a pass (``--pass-tokens``), several passes, near the longest;
- 16 of mixed lengths at once;
- 16 at once of which 8 are aborted at random moments: what such a client (``left``) had got must begin the reference;
- ``repeated``: prefill has the prompt in its cache, decode has not; ``next_turn``: prompt, answer and more behind them,
  of which prefill holds the prompt and decode the answer too.

``sensitive`` counts prompts whose reference changes when one block of them is replaced: where few do, equality means
little. ``not_split`` counts requests that the gateway served otherwise; their cases prove nothing and are not counted.
``kv_left`` is the share of KV memory still in use afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from asking import MODEL, Answer, AskError, completion, journal, random_prompt, stream
from checkpoint import Shape, write_checkpoint
from facts import facts
from serving import ServiceFailedError, Up, end_in_order, free_ports, keep_logs, running

_TOGETHER = 16
_COLOCATED = {"x-trivet-serve": "colocated"}
_FREED_WITHIN_S = 40.0
_KV_BYTES = 8 << 30
_ON_CUDA = (
    "--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    "--gpu-memory-utilization", "0.3",
    "--kv-cache-memory-bytes", str(_KV_BYTES),  # engines that share a GPU and start together misread what is free
)  # fmt: skip


def topology(mover: str, model: str, ports: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """A pair and a plain engine; the plain one is beside prefill on the first GPU."""
    cuda = options.device == "cuda"
    flags = ["--block-size", str(options.block_tokens), "--max-num-batched-tokens", str(options.pass_tokens)]
    flags += ["--max-num-seqs", "64", *(_ON_CUDA if cuda else ()), *json.loads(options.flags)]
    env = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"} if cuda else {}
    first, second = options.gpus
    kv = {"connector": "NixlConnector"} if mover == "nixl" else {"connector": "TrivetConnector"}
    if mover != "nixl":
        kv |= {"options": {"movers": [mover], **json.loads(options.kv_options)}}
    places = zip(("prefill", "decode", "mixed"), ports, (first, second, first), strict=False)
    return {
        "model": {"name": model, "served_names": [MODEL], "max_length": options.max_length},
        "kv": kv,
        "flags": flags,
        "env": env,
        "tiers": {
            tier: {
                "device": options.device,
                "engines": [{"name": tier, "port": port, **({"gpus": [gpu]} if cuda else {})}],
            }
            for tier, port, gpu in places
        },
        "gateway": {"port": ports[3], "drain_s": 1, "split": "always", "guard": False},
    }


@dataclass(slots=True)
class Tally:
    """What was found with one mover."""

    cases: int = 0
    equal: int = 0
    colocated_equal: int = 0
    not_split: int = 0
    failed: int = 0
    sensitive: int = 0
    changed: int = 0
    aborted: int = 0
    disagreements: list[dict[str, Any]] = field(default_factory=list)
    colocated_disagreements: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def figures(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "reasons"} | {
            "not_split_because": sorted(self.reasons)
        }


@dataclass(slots=True)
class Check:
    """A service that is up, and what is asked of it."""

    http: aiohttp.ClientSession
    url: str
    engines: dict[str, str]
    options: argparse.Namespace
    tally: Tally
    rng: random.Random

    async def ask(
        self, ids: Sequence[int], *, colocated: bool = False, salt: str | None = None, into: Answer | None = None
    ) -> Answer:
        body = completion(ids, self.options.output_tokens, cache_salt=salt or uuid.uuid4().hex, return_token_ids=True)
        return await stream(self.http, self.url, body, _COLOCATED if colocated else None, into)

    async def warm_prefill(self, ids: Sequence[int], salt: str) -> None:
        """Has prefill compute a prompt that decode does not see."""
        await stream(self.http, self.engines["prefill"], completion(ids, 1, cache_salt=salt))

    def prompt(self, tokens: int) -> list[int]:
        return random_prompt(self.rng, tokens)

    async def judge(self, case: str, ids: Sequence[int], reference: Answer, split: Answer, again: Answer) -> None:
        """Counts a case, unless it was not split."""
        told = await journal(self.http, self.url, [split])
        if told["not_split"]:
            self.tally.not_split += 1
            self.tally.reasons |= set(told["reasons"])
            return
        pairs = [(reference.token_ids, one.token_ids) for one in (split, again)]
        self.count(case, ids, *pairs)

    def count(self, case: str, ids: Sequence[int], *pairs: tuple[Sequence[int], Sequence[int]]) -> None:
        """Counts a case by what should be equal: split first, then colocated if there is such an answer."""
        tally = self.tally
        tally.cases += 1
        for (expected, got), disagreements in zip(
            pairs, (tally.disagreements, tally.colocated_disagreements), strict=False
        ):
            at = first_difference(expected, got)
            if at is not None:
                disagreements.append({"case": case, "prompt_tokens": len(ids), "first_difference": at})
        tally.equal = tally.cases - len(tally.disagreements)
        tally.colocated_equal = tally.cases - len(tally.colocated_disagreements)

    @contextlib.contextmanager
    def counting_failures(self, case: str) -> Any:
        """A request that fails is a finding, and no reason to leave the other cases out."""
        try:
            yield
        except (AskError, aiohttp.ClientError, ExceptionGroup) as error:
            self.tally.failed += 1
            self.tally.errors.append(f"{case}: {error!r}"[:300])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None if they are equal."""
    if list(one) == list(other):
        return None
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def lengths(options: argparse.Namespace) -> list[int]:
    """Prompt lengths one at a time, those that fit."""
    block, one_pass, longest = options.block_tokens, options.pass_tokens, options.max_length - options.output_tokens
    wanted = [1, block - 1, block, block + 1, 3 * block + 5, one_pass - 1, one_pass, one_pass + 1, 3 * one_pass + 17]
    wanted += [options.prompt_tokens, longest - 1, longest]
    return sorted({tokens for tokens in wanted if 1 <= tokens <= longest})


async def check_lengths(check: Check) -> None:
    for tokens in lengths(check.options):
        with check.counting_failures("length"):
            ids = check.prompt(tokens)
            reference = await check.ask(ids, colocated=True)
            split, again = await check.ask(ids), await check.ask(ids, colocated=True)
            await check.judge("length", ids, reference, split, again)
            await check_sensitivity(check, ids, reference)


async def check_sensitivity(check: Check, ids: list[int], reference: Answer) -> None:
    """Replaces one block of a prompt that has several."""
    block = check.options.block_tokens
    if len(ids) < 2 * block:
        return
    start = check.rng.randrange(len(ids) // block) * block
    other = await check.ask([*ids[:start], *check.prompt(block), *ids[start + block :]], colocated=True)
    check.tally.changed += 1
    check.tally.sensitive += other.token_ids != reference.token_ids


async def check_together(check: Check) -> None:
    """Many at once, each against its reference, which was alone."""
    with check.counting_failures("together"):
        prompts = [check.prompt(check.rng.choice(lengths(check.options))) for _ in range(_TOGETHER)]
        references = [await check.ask(ids, colocated=True) for ids in prompts]
        splits = await gathered(check.ask(ids) for ids in prompts)
        again = await gathered(check.ask(ids, colocated=True) for ids in prompts)
        for ids, *answers in zip(prompts, references, splits, again, strict=True):
            await check.judge("together", ids, *answers)


async def check_aborted(check: Check) -> None:
    """As many at once; every other client leaves at a random moment of its answer's usual time."""
    with check.counting_failures("aborted"):
        prompts = [check.prompt(check.rng.choice(lengths(check.options)[3:])) for _ in range(_TOGETHER)]
        references = [await check.ask(ids, colocated=True) for ids in prompts]
        usual_s = statistics.median(one.chunk_s[-1] - one.start_s for one in references)

        async def leave(ids: list[int], reference: Answer, after_s: float) -> None:
            seen = Answer(uuid.uuid4().hex, 0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(check.ask(ids, into=seen), after_s)
            check.tally.aborted += 1
            if seen.token_ids:
                check.count("left", ids, (reference.token_ids[: len(seen.token_ids)], seen.token_ids))

        leaving = [
            leave(ids, reference, check.rng.uniform(0, 1.5 * usual_s))
            for ids, reference in zip(prompts[::2], references[::2], strict=True)
        ]
        staying = [check.ask(ids) for ids in prompts[1::2]]
        answers = (await gathered([*leaving, *staying]))[len(leaving) :]
        again = await gathered(check.ask(ids, colocated=True) for ids in prompts[1::2])
        for ids, *three in zip(prompts[1::2], references[1::2], answers, again, strict=True):
            await check.judge("beside aborted", ids, *three)


async def check_repeated(check: Check) -> None:
    """The prompt is in prefill's cache; then a next turn, whose beginning both have."""
    for tokens in [one for one in lengths(check.options)[2:] if one + 200 < lengths(check.options)[-1]]:
        with check.counting_failures("repeated"):
            ids, salt, other_salt = check.prompt(tokens), uuid.uuid4().hex, uuid.uuid4().hex
            reference = await check.ask(ids, colocated=True)
            await check.warm_prefill(ids, salt)
            split = await check.ask(ids, salt=salt)
            await check.ask(ids, colocated=True, salt=other_salt)
            await check.judge("repeated", ids, reference, split, await check.ask(ids, colocated=True, salt=other_salt))
            longer = [*ids, *reference.token_ids, *check.prompt(check.options.block_tokens + 3)]
            reference = await check.ask(longer, colocated=True)
            split = await check.ask(longer, salt=salt)
            again = await check.ask(longer, colocated=True, salt=other_salt)
            await check.judge("next_turn", longer, reference, split, again)


async def gathered(asks: Any) -> list[Any]:
    """All at once; if one fails the others end."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in asks]
    return [task.result() for task in tasks]


async def kv_left(check: Check) -> dict[str, float | None]:
    """Share of KV memory in use on each engine once nothing is asked, when it has come to rest or time is up."""
    deadline_s = time.monotonic() + _FREED_WITHIN_S
    while True:
        used = {name: await kv_usage(check.http, url) for name, url in check.engines.items()}
        if not any(used.values()) or time.monotonic() > deadline_s:
            return used
        await asyncio.sleep(1.0)


async def kv_usage(http: aiohttp.ClientSession, url: str) -> float | None:
    async with http.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("vllm:kv_cache_usage_perc"):
                return float(line.rpartition(" ")[2])
    return None


async def measure(check: Check, service: Up, result: dict[str, Any]) -> None:
    started_s = time.monotonic()
    await service.ready(check.http)
    result |= {"start_s": round(time.monotonic() - started_s, 1), "engines": service.engine_commands()}
    await check.ask(check.prompt(8))  # the pair's first meeting
    steps: list[tuple[str, Awaitable[None]]] = []
    for _ in range(check.options.passes):
        steps = [("lengths", check_lengths(check)), ("together", check_together(check))]
        steps += [("aborted", check_aborted(check)), ("repeated", check_repeated(check))]
        for name, step in steps:
            await step
            print(f"{name}: {check.tally.cases} cases, {check.tally.equal} equal", file=sys.stderr, flush=True)
    result["kv_left"] = await kv_left(check)


async def run_mover(mover: str, model: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    ports = free_ports(4)
    service = Up(mover, topology(mover, model, ports, options), scratch)
    tally = Tally()
    result: dict[str, Any] = {"stopped": None, "topology": service.topology}
    engines = {
        tier: f"http://127.0.0.1:{port}" for tier, port in zip(("prefill", "decode", "mixed"), ports, strict=False)
    }
    timeout = aiohttp.ClientTimeout(total=180)
    try:
        async with (
            running([service]),
            aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20
            ) as http,
            asyncio.timeout(options.limit_s),
        ):
            check = Check(http, service.url, engines, options, tally, random.Random(options.seed))
            await measure(check, service, result)
    except (ServiceFailedError, AskError, aiohttp.ClientError, TimeoutError) as error:
        result["stopped"] = f"{type(error).__name__}: {error}"[:1000] or type(error).__name__
    finally:
        keep_logs([service], options.logs / f"equality_{mover}.log")
    return {**tally.figures(), **result}


async def run(options: argparse.Namespace) -> bool:
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        shape = Shape(layers=options.layers, hidden=options.hidden, heads=max(8, options.hidden // 128))
        source = Path(options.model) if options.model else None
        model = write_checkpoint(Path(scratch) / "model", shape, tokenizer=source, seed=options.seed, std=options.std)
        for mover in options.mover:
            found = await run_mover(mover, str(model), options, Path(scratch))
            results[mover] = found | facts(options.commit)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            shown = {name: value for name, value in found.items() if name not in ("topology", "engines")}
            print(json.dumps({mover: shown}), flush=True)
    good = (results[mover] for mover in options.mover)
    return all(one["stopped"] is None and not one["disagreements"] and not one["failed"] for one in good)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mover", nargs="+", default=["cuda_p2p"], help="movers of TrivetConnector; `nixl`: NixlConnector"
    )
    parser.add_argument("--model", help="a model folder whose tokenizer is taken; without, the demo's")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; movers that it holds already stay")
    parser.add_argument("--logs", type=Path, required=True, help="folder: one log a mover")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--std", type=float, default=0.02, help="of the weights")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--pass-tokens", type=int, default=2048, help="--max-num-batched-tokens of all engines")
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=16384)
    parser.add_argument("--passes", type=int, default=1, help="how often all cases are tried")
    parser.add_argument("--flags", default="[]", help="more vLLM flags for all engines, a JSON list")
    parser.add_argument("--kv-options", default="{}", help="more options of TrivetConnector, a JSON object")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=270.0, help="longest time of a mover, its start included")
    parser.add_argument("--commit", help="of the measured tree, where it lies without its repository")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    end_in_order()
    sys.exit(0 if asyncio.run(run(options)) else 1)


if __name__ == "__main__":
    main()
