"""A load of streamed completions, asked as leanly as Python can: a process of its own of ``gateway_overhead.py``.

Jobs come on standard input, one JSON object a line (``Job``). Each is answered by the lines ``{"window": "open"}`` and
``{"window": "closed"}``, between which everything is counted, and ``{"result": ...}``. While a window is open, arriving
bytes are only stamped and kept; what is in them is read when it is over.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import orjson
import uvloop

from asking import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_WORDS = ("the", "of", "and", "to", "in", "was", "for", "that", "with", "from", "which", "first", "time", "more")
_ERRORS_KEPT = 3
_TICK_S = 0.005
_REQUEST_LIMIT_S = 60.0
_PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


class LoadError(Exception):
    """A request that was not answered as it should."""


@dataclass(frozen=True, slots=True)
class Job:
    """One load."""

    port: int
    """Who is asked, on this host."""
    prefill_port: int | None = None
    """The client itself asks both legs, as a gateway would: this one first, then ``port`` with what it has answered."""
    path: str = CHAT
    words: int = 80
    """Of a prompt. Each is about a token."""
    tokens: int = 100
    """Of an answer."""
    streams: int = 1
    requests: int | None = None
    """So many in all; the window is then as long as they take. Else the streams ask until ``window_s`` has passed."""
    ramp_s: float = 0.0
    """Over which the streams start, before the window opens."""
    window_s: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Answer:
    """One answer: its bytes, each piece with the time when it came."""

    start_s: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


def body_of(job: Job, rng: random.Random) -> dict[str, Any]:
    """A streamed, greedy request for exactly ``job.tokens`` tokens."""
    text = " ".join(rng.choices(_WORDS, k=job.words))
    prompt = {"messages": [{"role": "user", "content": text}]} if job.path == CHAT else {"prompt": text}
    return {
        "model": MODEL,
        **prompt,
        "max_tokens": job.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def prefill_body_of(body: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name != "stream_options"}
    return {**kept, "stream": False, "max_tokens": 1, "kv_transfer_params": _PREFILL_PARAMS}


def events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The payloads of a stream's events, each with the time when its last byte came."""
    rest = b""
    for came_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield came_s, event[6:]


@dataclass(slots=True)
class Reading:
    """What an answer said, and when."""

    token_s: list[float]
    """When each event that brought a token came."""
    tokens: int
    """As its usage has it; an event a token is the rule, but a front end may leave out a token without text."""

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens; several that came in one piece are one gap, as they are to who waits for them."""
        return [b - a for a, b in itertools.pairwise(sorted(set(self.token_s)))]


def read(answer: Answer) -> Reading:
    """Reads a stream.

    Raises:
        LoadError: it is none, or it tells of an error.
    """
    if answer.status != 200:
        raise LoadError(f"HTTP {answer.status}: {answer.body[:300]!r}")
    token_s: list[float] = []
    tokens, done = 0, False
    for came_s, data in events(answer.pieces):
        if data == b"[DONE]":
            done = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            raise LoadError(str(event["error"])[:300])
        for choice in event["choices"]:
            if "role" not in choice.get("delta", ()):
                token_s.append(came_s)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not done or not token_s:
        raise LoadError("the stream ended before the answer did" if token_s else "an answer without tokens")
    return Reading(token_s, tokens or len(token_s))


def summary(answers: Sequence[Answer], tokens: int, opened_s: float, closed_s: float) -> dict[str, Any]:
    """What was seen between two times.

    Args:
        tokens: that each answer should have.
    """
    ttft_s: list[float] = []
    gaps_s: list[float] = []
    errors: list[str] = []
    arrived, events_seen, tokens_seen, failed = 0.0, 0, 0, 0
    for answer in answers:
        try:
            seen = read(answer)
            if seen.tokens != tokens:
                raise LoadError(f"{seen.tokens} tokens instead of {tokens}")
        except (LoadError, orjson.JSONDecodeError, KeyError) as error:
            failed += 1
            errors.append(f"{type(error).__name__}: {error}"[:300])
            continue
        events_seen += len(seen.token_s)
        tokens_seen += seen.tokens
        arrived += sum(opened_s <= came_s < closed_s for came_s in seen.token_s) * seen.tokens / len(seen.token_s)
        if opened_s <= answer.start_s < closed_s:
            ttft_s.append(seen.token_s[0] - answer.start_s)
        if seen.token_s[0] < closed_s and seen.token_s[-1] >= opened_s:
            gaps_s += seen.gaps_s
    return {
        "requests": len(ttft_s),
        "answers": len(answers),
        "failed": failed,
        "errors": errors[:_ERRORS_KEPT],
        "tokens": round(arrived),
        "events_per_token": round(events_seen / tokens_seen, 4) if tokens_seen else None,
        "window_s": round(closed_s - opened_s, 4),
        "ttft_ms": [round(one * 1000, 3) for one in ttft_s],
        "itl_ms": {
            "mean": round(1000 * sum(gaps_s) / len(gaps_s), 4) if gaps_s else None,
            **{f"p{share}": quantile_ms(gaps_s, share / 100) for share in (50, 90, 99)},
            "max": quantile_ms(gaps_s, 1.0),
        },
    }


def quantile_ms(values_s: Sequence[float], share: float) -> float | None:
    """The value that so large a share does not exceed; the nearest one, so never an invented one."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


class _Connection(asyncio.Protocol):
    """A connection that carries one request after another, until it is lost."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is none by its class

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(LoadError(f"the connection was closed ({error})"))

    def data_received(self, data: bytes) -> None:
        self._came_s = time.perf_counter()
        if self._parser is not None:
            self._parser.feed_data(data)

    # httptools

    def on_body(self, body: bytes) -> None:
        assert self._answer is not None
        self._answer.pieces.append((self._came_s, body))

    def on_message_complete(self) -> None:
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, port: int, path: str, body: bytes) -> Answer:
        assert self._transport is not None
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._answer = answer = Answer(time.perf_counter())
        self._transport.write(head.encode() + body)
        await self._ended
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Stream:
    """What asks one request after another."""

    def __init__(self, job: Job, number: int) -> None:
        self._job = job
        self._rng = random.Random(f"{job.seed}/{number}")
        self._connections: dict[int, _Connection] = {}
        self._next = body_of(job, self._rng)
        self.answers: list[Answer] = []

    async def ask(self) -> None:
        body, job = self._next, self._job
        try:
            async with asyncio.timeout(_REQUEST_LIMIT_S):
                start_s = time.perf_counter()
                if job.prefill_port is not None:
                    prefill_body = orjson.dumps(prefill_body_of(body))
                    prefilled = await self._ask(job.prefill_port, prefill_body)
                    body["kv_transfer_params"] = orjson.loads(prefilled.body)["kv_transfer_params"]
                raw = orjson.dumps(body)
                answer = await self._ask(job.port, raw)
                answer.start_s = start_s
        except (LoadError, OSError, TimeoutError, KeyError, orjson.JSONDecodeError) as error:
            answer = Answer(start_s, 0, [(start_s, f"{type(error).__name__}: {error}".encode())])
            self.close()
        self.answers.append(answer)
        self._next = body_of(job, self._rng)

    async def _ask(self, port: int, body: bytes) -> Answer:
        one = self._connections.get(port)
        if one is None or not one.is_open:
            _, one = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
            self._connections[port] = one
        return await one.ask(port, self._job.path, body)

    def close(self) -> None:
        for one in self._connections.values():
            one.close()


def _say(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()


async def run(job: Job) -> dict[str, Any]:
    """Runs a job."""
    streams = [_Stream(job, number) for number in range(job.streams)]
    over = False

    async def keep_asking(stream: _Stream, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        while not over:
            await stream.ask()

    async def ask_some(stream: _Stream, count: int) -> None:
        for _ in range(count):
            await stream.ask()

    late_s: list[float] = []

    async def keep_time() -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            late_s.append(time.perf_counter() - began_s - _TICK_S)

    asking: list[asyncio.Task[None]] = []
    if job.requests is None:
        asking = [
            asyncio.create_task(keep_asking(stream, number * job.ramp_s / job.streams))
            for number, stream in enumerate(streams)
        ]
        await asyncio.sleep(job.ramp_s)
    opened_s, spent_s = time.perf_counter(), time.process_time()
    _say({"window": "open"})
    clock = asyncio.create_task(keep_time())
    if job.requests is None:
        await asyncio.sleep(job.window_s)
    else:
        await asyncio.gather(*(ask_some(stream, job.requests // job.streams) for stream in streams))
    closed_s, spent_s = time.perf_counter(), time.process_time() - spent_s
    _say({"window": "closed"})
    clock.cancel()
    over = True
    await asyncio.gather(*asking)  # answers that have begun come to their end
    for stream in streams:
        stream.close()
    answers = [answer for stream in streams for answer in stream.answers]
    seen = summary(answers, job.tokens, opened_s, closed_s)
    late_ms = {"p50": quantile_ms(late_s, 0.5), "p99": quantile_ms(late_s, 0.99)}
    return {**seen, "client_cpu_share": round(spent_s / (closed_s - opened_s), 4), "client_late_ms": late_ms}


def main() -> None:
    for line in sys.stdin.buffer:
        _say({"result": uvloop.run(run(Job(**orjson.loads(line))))})


if __name__ == "__main__":
    main()
