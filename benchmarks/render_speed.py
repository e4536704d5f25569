"""What rendering costs: vLLM's render server, plain and with fastokens, and Trivet's, on the same bodies in one run.

    python benchmarks/render_speed.py --json render_speed.json

All servers run side by side on one core, and are asked one after another from another core, in turns. CPU time is what
the kernel says that all threads of a server ran.

- ``cold``: chats of about 9,000 tokens, none of which was seen before; every server gets the same ones.
- ``warm``: the twenty-first turn of such conversations, whose twenty turns before were rendered by Trivet's server.
- ``derender``: streamed answers, a token a call: plain, reasoning, and a tool's arguments, of several lengths. vLLM's
  work for a token grows with what came before it, so that its server is asked at every ``--every``-th token only, with
  the state that belongs there; Trivet's goes through all. ``whole`` is vLLM's wire, ``kept`` Trivet's own.

Texts are windows of the standard library's sources: English and code that is the same wherever Python is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from facts import facts
from gateway_overhead import on_core, rss_mib, scheduled_s, start, stop
from serving import free_ports

RENDER, DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"
PLAIN, FASTOKENS, TRIVET = ARMS = ("plain", "fastokens", "trivet")
TURNS, TOKENS_OF_A_CHAT = 21, 9000
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PARSERS = ["--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
KINDS = ("plain", "reasoning", "tool")
_START_S = 180.0
_KEPT_S = 2.0
"""vLLM's server closes connections on which nobody asked for 5 s."""


# -- what is asked -----------------------------------------------------------------------------------------------------


def sources() -> list[str]:
    """The standard library's longer modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
    return [text for text in texts if len(text) > 8000]


class Chats:
    """Conversations that nobody has seen before."""

    def __init__(self, tokens: Any, seed: int) -> None:
        self._texts, self._chance = sources(), random.Random(seed)
        one = self._conversation(1000)
        rate = len(tokens("".join(message["content"] for message in one))) / sum(len(one["content"]) for one in one)
        self._characters = int(TOKENS_OF_A_CHAT / rate / (2 * TURNS - 1))

    def one(self) -> list[dict[str, str]]:
        """``TURNS`` turns, the last of them the user's."""
        return self._conversation(self._characters)

    def _conversation(self, characters: int) -> list[dict[str, str]]:
        roles = ["user", "assistant"] * TURNS
        said = [{"role": role, "content": self._window(characters)} for role in roles[: 2 * TURNS - 1]]
        return [{"role": "system", "content": "You are a helpful assistant."}, *said]

    def _window(self, characters: int) -> str:
        text = self._chance.choice(self._texts)
        begin = self._chance.randrange(len(text) - characters)
        return text[begin : begin + characters]


def body_of(messages: Sequence[Mapping[str, str]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 100}).encode()


def write_folder(folder: Path) -> Path:
    """The demo's tokenizer with the marks that parsers look for, and a config that takes long prompts. No weights."""
    from trivet.demo.model import demo_gguf_fields, write_tokenizer

    folder.mkdir()
    write_tokenizer(demo_gguf_fields(), folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    first = len(told["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    told["added_tokens"] += [{"id": first + number, "content": mark, **flags} for number, mark in enumerate(MARKS)]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 64,
        "max_position_embeddings": 131072,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "vocab_size": first + len(MARKS),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- who is asked ------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A process on a port."""

    name: str
    process: Any
    port: int
    log: Path
    http: Any = field(init=False)
    _used_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def cpu_s(self) -> float:
        """What all its threads ran so far."""
        return scheduled_s(self.process.pid, 0)

    def post(self, path: str, body: bytes) -> bytes:
        """
        Raises:
            SystemExit: it does not answer with success.
        """
        if time.monotonic() - self._used_s > _KEPT_S:
            self.http.close()  # the server did, or is about to
        self.http.request("POST", path, body, {"content-type": "application/json"})
        answer = self.http.getresponse()
        told = answer.read()
        self._used_s = time.monotonic()
        if answer.status != 200:
            sys.exit(f"{self.name}: {path} answered {answer.status}: {told[:300]!r}")
        return told


def command(arm: str, folder: Path, port: int, more: Sequence[str]) -> list[str]:
    flags = [str(folder), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), *more]
    if arm.startswith(TRIVET):
        return [sys.executable, "-m", "trivet.cli", "render", *flags]
    return [sys.executable, "-m", "trivet.fleet.vllm", "launch", "render", *flags, "--disable-uvicorn-access-log"]


@contextlib.contextmanager
def serving(options: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Server]]:
    """All servers, ready."""
    folder = write_folder(scratch / "model")
    wanted = {arm: [] for arm in ARMS}
    if not options.rendering_only:
        wanted |= {"plain, parsing": PARSERS, "trivet, parsing": PARSERS}
    servers: dict[str, Server] = {}
    try:
        for (name, more), port in zip(wanted.items(), free_ports(len(wanted), 18400), strict=True):
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONUNBUFFERED": "1"}
            env["VLLM_USE_FASTOKENS"] = "1" if name == FASTOKENS else "0"
            log = scratch / f"{name.replace(', ', '-')}.log"
            process = start(command(name, folder, port, more), log, options.cores[1], env=env)
            servers[name] = Server(name, process, port, log)
            wait(servers[name])  # one after another: each loads much
        yield servers
    finally:
        for one in servers.values():
            stop(one.process)


def wait(server: Server) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.http.request("GET", "/health")
            server.http.getresponse().read()
            return
        server.http.close()
        time.sleep(0.5)
    sys.exit(f"{server.name} did not start:\n{server.log.read_text()[-3000:]}")


# -- rendering ---------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """What some requests cost one server."""

    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    def ask(self, server: Server, bodies: Sequence[bytes]) -> list[bytes]:
        answers, before_s = [], server.cpu_s()
        for body in bodies:
            sent_s = time.perf_counter()
            answers.append(server.post(RENDER, body))
            self.latencies_s.append(time.perf_counter() - sent_s)
        self.cpu_s += server.cpu_s() - before_s
        return answers

    def told(self) -> dict[str, float]:
        ordered = sorted(self.latencies_s)
        return {
            "requests": len(ordered),
            "cpu_ms": round(self.cpu_s / len(ordered) * 1e3, 3),
            "requests_per_cpu_s": round(len(ordered) / self.cpu_s, 1),
            "p50_ms": round(statistics.median(ordered) * 1e3, 2),
            "p99_ms": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3, 2),
        }


def render(servers: Mapping[str, Server], chats: Chats, options: argparse.Namespace) -> dict[str, Any]:
    found = {
        **{(arm, "cold"): Asked() for arm in ARMS},
        **{(arm, "warm"): Asked() for arm in ARMS},
    }
    lengths: list[int] = []
    for number in range(-1, options.repeats):
        conversations = {kind: [chats.one() for _ in range(options.chats)] for kind in ("cold", "warm")}
        for conversation in conversations["warm"]:
            for turn in range(1, TURNS):
                servers[TRIVET].post(RENDER, body_of(conversation[: 2 * turn]))
        for kind, those in conversations.items():
            bodies = [body_of(one) for one in those]
            answers = {}
            for arm in rotated(number):
                asked = Asked() if number < 0 else found[arm, kind]  # the first is nobody's: servers warm up
                answers[arm] = asked.ask(servers[arm], bodies)
            ids = {arm: [orjson.loads(one)["token_ids"] for one in told] for arm, told in answers.items()}
            if any(one != ids[PLAIN] for one in ids.values()):
                sys.exit(f"{kind}: token ids differ")
            lengths += map(len, ids[PLAIN])
    told = {arm: {kind: found[arm, kind].told() for kind in ("cold", "warm")} for arm in ARMS}
    for arm in ARMS:
        told[arm]["rss_mib"] = rss_mib([servers[arm].process.pid])
    return {"prompt_tokens": {"mean": round(statistics.mean(lengths)), "most": max(lengths)}, "arms": told}


def rotated(by: int) -> list[str]:
    return [ARMS[(by + number) % len(ARMS)] for number in range(len(ARMS))]


# -- derendering -------------------------------------------------------------------------------------------------------


def answer_ids(kind: str, tokens: int, tokenize: Any, texts: Sequence[str], seed: int) -> list[int]:
    """What a model says, in ids."""
    chance = random.Random(seed)
    said = " ".join(_window(chance.choice(texts), chance) for _ in range(1 + tokens // 60))
    if kind == "plain":
        return tokenize(f"<think>\n</think>\n{said}")[:tokens]
    if kind == "reasoning":
        return tokenize(f"<think>\n{said}")[:tokens]
    arguments = json.dumps(said)[:-1]
    return tokenize(f'<think>\n</think>\n<tool_call>\n{{"name": "write", "arguments": {{"text": {arguments}')[:tokens]


def _window(text: str, chance: random.Random) -> str:
    begin = chance.randrange(len(text) - 400)
    return text[begin : begin + 400]


def chunk_of(one: int, last: bool) -> bytes:
    choice = {"index": 0, "token_ids": [one], "finish_reason": "length" if last else None}
    return orjson.dumps({"request_id": "r", "choices": [choice]})


TOOL = {
    "type": "function",
    "function": {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


def derender_one(
    servers: Mapping[str, Server], kind: str, ids: Sequence[int], prompt: Sequence[int], asked: bytes, every: int
) -> dict[str, float]:
    """Tokens a CPU-second of each way."""
    ours, theirs = servers["trivet, parsing"], servers["plain, parsing"]
    same = b',"prompt_token_ids":' + orjson.dumps(list(prompt)) + b',"chat_request":' + asked
    found: dict[str, float] = {}
    at: dict[int, tuple[bytes, bytes]] = {}
    for wire in ("whole", "kept"):
        state, before_s = b"null", ours.cpu_s()
        for number, one in enumerate(ids):
            body = b'{"stream":true,"generate_chunk":' + chunk_of(one, number == len(ids) - 1)
            body += b',"stream_state":' + state
            if wire == "kept" and not number:
                body += b',"state":"kept"'
            if wire == "whole" or not number:
                body += same
            answer = ours.post(DERENDER, body + b"}")
            if wire == "whole" and number % every == every // 2:
                at[number] = body + b"}", answer
            state = answer[answer.index(b',"stream_state":') + len(b',"stream_state":') : -1]
        found[wire] = len(ids) / (ours.cpu_s() - before_s)
    before_s = theirs.cpu_s()
    answers = {number: theirs.post(DERENDER, body) for number, (body, _) in at.items()}
    found["vllm"] = len(at) / (theirs.cpu_s() - before_s)
    for number, (_, answer) in at.items():
        if said(answers[number]) != said(answer):
            sys.exit(f"derender of {kind} differs at token {number}: {answers[number][:300]!r} {answer[:300]!r}")
    return {name: round(value, 1) for name, value in found.items()}


def said(answer: bytes) -> Any:
    """What a call answers, without the names that are new each time."""
    told = orjson.loads(answer)["chunk"]["choices"]
    for choice in told:
        for call in choice["delta"].get("tool_calls") or ():
            call["id"] = None
    return told


def derender(
    servers: Mapping[str, Server], chats: Chats, tokenize: Any, options: argparse.Namespace
) -> dict[str, dict[str, dict[str, float]]]:
    texts = sources()
    messages = chats.one()
    prompt = orjson.loads(servers[PLAIN].post(RENDER, body_of(messages)))["token_ids"][: options.prompt_tokens]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in KINDS:
        request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        if kind == "tool":
            request["tools"] = [TOOL]
        for tokens in options.lengths:
            ids = answer_ids(kind, tokens, tokenize, texts, tokens)
            one = derender_one(servers, kind, ids, prompt, orjson.dumps(request), max(1, tokens // options.samples))
            found.setdefault(kind, {})[str(len(ids))] = one
            assert len(ids) == tokens, "the text is too short"
            print(f"derender {kind:9} {len(ids):5} tokens: {one}", flush=True)
    return found


# -- the whole ---------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> dict[str, Any]:
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory(prefix="render-speed-") as name, serving(options, Path(name)) as servers:
        reference = Tokenizer.from_file(str(Path(name) / "model" / "tokenizer.json"))

        def tokenize(text: str) -> list[int]:
            return reference.encode(text, add_special_tokens=False).ids

        with on_core(options.cores[0]):
            chats = Chats(tokenize, options.seed)
            rendered = render(servers, chats, options)
            told = None if options.rendering_only else derender(servers, chats, tokenize, options)
            tokenizing = asyncio.run(_status(servers[TRIVET].port))
    per_s = {
        (arm, kind): rendered["arms"][arm][kind]["requests_per_cpu_s"] for arm in ARMS for kind in ("cold", "warm")
    }
    found: dict[str, Any] = {
        "cold_vs_plain": round(per_s[TRIVET, "cold"] / per_s[PLAIN, "cold"], 2),
        "cold_vs_fastokens": round(per_s[TRIVET, "cold"] / per_s[FASTOKENS, "cold"], 2),
        "warm_vs_plain": round(per_s[TRIVET, "warm"] / per_s[PLAIN, "warm"], 2),
    }
    if told is not None:
        reasoning = told["reasoning"].get(str(options.judged)) or list(told["reasoning"].values())[-1]
        found["derender_vs_vllm"] = round(reasoning["whole"] / reasoning["vllm"], 2)
    found["facts"] = {**facts(), "fastokens": version("fastokens"), "tokenizing": tokenizing}
    found["rendering"] = rendered
    if told is not None:
        found["derendering_tokens_per_cpu_s"] = told
    return found


async def _status(port: int) -> Any:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/trivet/render") as answer:
        return await answer.json()


def table(results: Mapping[str, Any]) -> str:
    rows = ["| | cold: CPU ms | p50 / p99 ms | warm: CPU ms | p50 / p99 ms | RSS MiB |", "|---|---|---|---|---|---|"]
    for arm, one in results["rendering"]["arms"].items():
        cold, warm = one["cold"], one["warm"]
        rows.append(
            f"| {arm} | {cold['cpu_ms']} | {cold['p50_ms']} / {cold['p99_ms']} | {warm['cpu_ms']} "
            f"| {warm['p50_ms']} / {warm['p99_ms']} | {one['rss_mib']} |"
        )
    goals = {"cold_vs_plain": 5, "cold_vs_fastokens": 1.4, "warm_vs_plain": 25, "derender_vs_vllm": 10}
    rows += [f"{name}: {results[name]} (goal {goal})" for name, goal in goals.items() if name in results]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--chats", type=int, default=20, help="new ones, of each kind, in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rendering-only", action="store_true", help="leave derendering out")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 4000, 8000], help="of derendered answers")
    parser.add_argument("--judged", type=int, default=4000, help="length by which derendering is compared")
    parser.add_argument("--samples", type=int, default=20, help="tokens of an answer at which vLLM's server is asked")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="before derendered answers")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of the asking, of the servers")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results = run(options)
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
