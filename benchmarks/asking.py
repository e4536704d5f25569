"""Completions asked in token ids by a client that keeps the time of every token; loads made of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

MODEL = "m"
"""The name under which benchmarks have their model served."""
_ERRORS_KEPT = 3
_SLOWEST_KEPT = 3


class AskError(Exception):
    """A request that was not answered as it should."""


@dataclass(slots=True)
class Answer:
    """One streamed answer as its client saw it; stamps on one clock, in seconds."""

    request_id: str
    start_s: float
    chunk_s: list[float] = field(default_factory=list)
    """When each chunk that brought tokens came."""
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Only if they were asked for."""

    @property
    def tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.start_s

    @property
    def second_token_gap_s(self) -> float:
        """From the first token to the second; 0 if they came together."""
        if self.chunk_tokens[0] > 1 or len(self.chunk_s) < 2:
            return 0.0
        return self.chunk_s[1] - self.chunk_s[0]

    @property
    def later_gaps_s(self) -> list[float]:
        """Between tokens from the second one on.

        A chunk of several tokens counts as one gap, undivided: those within it would be zeros that hide stalls.
        """
        start = 0 if self.chunk_tokens[0] > 1 else 1
        return [b - a for a, b in itertools.pairwise(self.chunk_s[start:])]


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randint(20, 30000) for _ in range(tokens)]


def completion(ids: Sequence[int], tokens: int, **more: Any) -> bytes:
    """The body of a streamed, greedy completion of exactly ``tokens`` tokens that says how many each chunk brings.

    No ``min_tokens``: ``ignore_eos`` does the same here, and a minimum would keep prefill's token from being the first.
    """
    body = {
        "model": MODEL,
        "prompt": list(ids),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **more,
    }
    return orjson.dumps(body)


Ask = Callable[[bytes], Awaitable[Answer]]


def asker(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> Ask:
    """What sends completions to ``url``."""

    async def ask(body: bytes) -> Answer:
        return await stream(http, url, body, headers)

    return ask


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Sends a completion and reads its stream.

    Args:
        answer: filled while it comes, for one who may not wait for its end.

    Raises:
        AskError: an error instead of an answer, or in it.
    """
    answer = answer or Answer(uuid.uuid4().hex, 0.0)
    sent = {"content-type": "application/json", "x-request-id": answer.request_id, **(headers or {})}
    answer.start_s, seen = time.perf_counter(), 0
    async with http.post(f"{url}/v1/completions", data=body, headers=sent) as response:
        if response.status != 200:
            raise AskError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now_s, event = time.perf_counter(), orjson.loads(line[6:])
            if "error" in event:
                raise AskError(str(event["error"])[:300])
            for choice in event["choices"]:
                answer.token_ids += choice.get("token_ids") or ()
            total = (event.get("usage") or {}).get("completion_tokens", seen)
            if total > seen and event["choices"]:
                answer.chunk_s.append(now_s)
                answer.chunk_tokens.append(total - seen)
                seen = total
    if not answer.chunk_s:
        raise AskError("an answer without tokens")
    return answer


@dataclass(slots=True)
class Answers:
    """What a load gave."""

    good: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As plain JSON values."""
        ttft_s = [one.ttft_s for one in self.good]
        gaps_s = [gap_s for one in self.good for gap_s in one.later_gaps_s]
        second_s = [one.second_token_gap_s for one in self.good]
        return {
            "requests": len(self.good) + len(self.errors),
            "failed": len(self.errors),
            "errors": self.errors[:_ERRORS_KEPT],
            "tokens": sum(one.tokens for one in self.good),
            "chunks_of_several_tokens": sum(n > 1 for one in self.good for n in one.chunk_tokens),
            "ttft_p50_s": _rounded(ttft_s, 50, 1, 4),
            "ttft_p99_s": _rounded(ttft_s, 99, 1, 4),
            "ttft_max_s": _rounded(ttft_s, 100, 1, 4),
            "second_token_gap_p50_ms": _rounded(second_s, 50, 1e3, 2),
            "second_token_gap_p99_ms": _rounded(second_s, 99, 1e3, 2),
            "second_token_gap_max_ms": _rounded(second_s, 100, 1e3, 2),
            "itl_p50_ms": _rounded(gaps_s, 50, 1e3, 2),
            "itl_p99_ms": _rounded(gaps_s, 99, 1e3, 2),
            "itl_max_ms": _rounded(gaps_s, 100, 1e3, 2),
            "slowest": self._slowest(),
        }

    def _slowest(self) -> dict[str, Any]:
        """The longest waits for a token, and when they ended by the monotonic clock, which engines trace by."""
        waits = [
            (b - a, b, index + 1, one.request_id)
            for one in self.good
            for index, (a, b) in enumerate(itertools.pairwise(one.chunk_s))
        ]
        seconds = {one.request_id for one in self.good if one.chunk_tokens[0] == 1}
        second = [wait for wait in waits if wait[2] == 1 and wait[3] in seconds]
        later = [wait for wait in waits if wait[2] > 1 or wait[3] not in seconds]
        return {
            name: [
                {
                    "request_id": request_id,
                    "chunk": index,
                    "gap_ms": round(gap_s * 1e3, 2),
                    "monotonic_s": round(at_s, 4),
                }
                for gap_s, at_s, index, request_id in sorted(some, reverse=True)[:_SLOWEST_KEPT]
            ]
            for name, some in (("second", second), ("later", later))
        }


async def journal(http: aiohttp.ClientSession, gateway_url: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """What a gateway says of requests: how many were split at once, with their KV; medians of its own times."""
    records = []
    for one in answers:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(f"{gateway_url}/trivet/requests/{one.request_id}") as response:
                if response.status == 200:
                    records += (await response.json())["generations"]
    split = [one for one in records if one["split"] and one["attempts"] == 1 and not one.get("transfer_problem")]
    told = {str(one.get("transfer_problem") or one["reason"])[:200] for one in records if one not in split}
    times = ("render_ms", "prefill_ms", "handover_ms", "ttft_ms")
    return {
        "split": len(split),
        "not_split": len(records) - len(split),
        "unknown": len(answers) - len(records),  # another worker of the gateway has them
        "reasons": sorted(told)[:_ERRORS_KEPT],
        **{name: median([one[name] for one in split if one[name] is not None]) for name in times},
    }


def percentile(values: Sequence[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]


def _rounded(values: Sequence[float], p: float, scale: float, digits: int) -> float | None:
    return round(percentile(values, p) * scale, digits) if values else None


def median(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> float | None:
    return round(statistics.median(values) * scale, digits) if values else None


def arrivals_s(rate: float, seconds: float, seed: int = 1) -> list[float]:
    """Poisson arrivals: when each request of a load begins. At least one."""
    rng, now_s, found = random.Random(seed), 0.0, []
    while now_s < seconds or not found:
        found.append(now_s)
        now_s += rng.expovariate(rate)
    return found


async def open_loop(ask: Ask, bodies: Sequence[bytes], starts_s: Sequence[float], patience_s: float) -> Answers:
    """Sends each body at its time, whatever came of those before.

    Args:
        patience_s: how long after the last arrival answers are waited for; those that are not there then have failed.
    """
    answers, begin_s = Answers(), time.perf_counter()

    async def one(body: bytes, start_s: float) -> None:
        try:
            await asyncio.sleep(max(0.0, begin_s + start_s - time.perf_counter()))
            answers.good.append(await ask(body))
        except (AskError, aiohttp.ClientError, TimeoutError, OSError) as error:
            answers.errors.append(repr(error)[:300])
        except asyncio.CancelledError:
            answers.errors.append(f"no answer {patience_s:.0f} s after the last arrival")
            raise

    tasks = [asyncio.create_task(one(body, start_s)) for body, start_s in zip(bodies, starts_s, strict=True)]
    try:
        await asyncio.wait(tasks, timeout=starts_s[-1] + patience_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def closed_loop(ask: Callable[[bytes], Awaitable[float]], bodies: Sequence[bytes], running: int) -> list[float]:
    """Keeps ``running`` requests under way until all bodies were sent; the stamps that ``ask`` returns, in order."""
    waiting, stamps = iter(bodies), []

    async def worker() -> None:
        for body in waiting:
            stamps.append(await ask(body))

    async with asyncio.TaskGroup() as group:
        for _ in range(running):
            group.create_task(worker())
    return sorted(stamps)


def interval_s(stamps: Sequence[float]) -> float:
    """The time between neighbours of a series: the slope of the line through it, which jitter hardly moves."""
    return statistics.linear_regression(range(len(stamps)), stamps).slope
