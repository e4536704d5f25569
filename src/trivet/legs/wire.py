"""One leg over HTTP: ``POST /inference/v1/generate`` to an engine, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from trivet.render.contract import TokenChunk, TokenLogprobs

_CONNECT_TIMEOUT_S = 5.0


class LegError(Exception):
    """A leg failed at an engine; ``status`` is the HTTP status where there was one."""

    def __init__(self, engine: str, problem: str, *, status: int | None = None) -> None:
        super().__init__(f"{engine}: {problem}")
        self.engine = engine
        self.problem = problem
        self.status = status


def open_session() -> aiohttp.ClientSession:
    """The HTTP session that all legs of a worker share.

    vLLM closes idle connections after 5 s (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``); ours are dropped earlier, so that a
    request never meets a connection that the engine is just closing.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0, ttl_dns_cache=30)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True, read_bufsize=2**18)


async def generate(
    session: aiohttp.ClientSession, engine: str, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> dict[str, Any]:
    """Runs a leg and returns its whole answer.

    Raises:
        LegError: no answer, or one that is not 200.
    """
    try:
        async with session.post(f"{url}/inference/v1/generate", data=_dump(body), headers=headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise LegError(engine, _error_text(content, answer.status), status=answer.status)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise LegError(engine, _connection_text(error)) from error
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise LegError(engine, "answered 200 with something that is not JSON", status=502) from error
    if not isinstance(parsed, dict):
        raise LegError(engine, "answered 200 with something that is not an object", status=502)
    return parsed


async def stream(
    session: aiohttp.ClientSession,
    engine: str,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    accepted: Callable[[], None] = lambda: None,
) -> AsyncGenerator[TokenChunk, None]:
    """Runs a streamed leg, giving its tokens as they arrive. Closing the iterator ends the leg at the engine.

    Args:
        accepted: called when the engine has taken the request, before its first token.

    Raises:
        LegError: no answer, one that is not 200, an error event, or an end without a finish reason.
    """
    last: TokenChunk | None = None
    cached_tokens: int | None = None
    tokens, done = 0, False
    try:
        async with session.post(f"{url}/inference/v1/generate", data=_dump(body), headers=headers) as answer:
            if answer.status != 200:
                raise LegError(engine, _error_text(await answer.read(), answer.status), status=answer.status)
            accepted()
            async for data in _events(answer.content):
                if done := done or data == b"[DONE]":
                    last = last or _finish_unsaid(body, tokens)
                    continue  # read on to the end, or the connection could not be used again
                chunks, told = _read_event(engine, data)
                cached_tokens = told if told is not None else cached_tokens
                for chunk in chunks:
                    tokens += len(chunk.token_ids)
                    if chunk.finish_reason is None:
                        yield chunk
                    else:  # kept until usage, the next event, has told the cached tokens
                        last = _with_stop_reason(chunk, body)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if last is None:
            raise LegError(engine, _connection_text(error)) from error
    if last is None:
        raise LegError(engine, "the stream ended before the answer did", status=502)
    yield replace(last, cached_tokens=cached_tokens)


def _finish_unsaid(body: Mapping[str, Any], tokens: int) -> TokenChunk | None:
    """vLLM 0.30 leaves out a last event that has no token; its reason follows from what was asked."""
    if not tokens:
        return None
    limit = body["sampling_params"].get("max_tokens")
    return TokenChunk((), finish_reason="length" if limit is not None and tokens >= limit else "stop")


def _with_stop_reason(chunk: TokenChunk, body: Mapping[str, Any]) -> TokenChunk:
    """vLLM 0.30 does not send ``stop_reason``; for tokens it is the stop token itself."""
    stops = body["sampling_params"].get("stop_token_ids") or ()
    if chunk.finish_reason == "stop" and chunk.stop_reason is None and chunk.token_ids and chunk.token_ids[-1] in stops:
        return replace(chunk, stop_reason=chunk.token_ids[-1])
    return chunk


def _dump(body: Mapping[str, Any]) -> bytes:
    """As JSON; token ids that are keys (``logit_bias``) become strings, as JSON has them."""
    return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The payloads of ``data:`` lines; comments and other fields of server-sent events are passed over."""
    pending = b""
    async for piece in content.iter_any():
        pending += piece
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _read_event(engine: str, data: bytes) -> tuple[list[TokenChunk], int | None]:
    """The chunks of one event and, if it carries usage, the cached prompt tokens."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LegError(engine, "sent an event that is not JSON", status=502) from error
    if not isinstance(event, dict):
        raise LegError(engine, "sent an event that is not an object", status=502)
    if fault := event.get("error"):
        code = fault.get("code") if isinstance(fault, dict) else None
        raise LegError(engine, _error_text(data, 500), status=code if isinstance(code, int) else 500)
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    chunks = [
        TokenChunk(
            token_ids=choice.get("token_ids") or (),
            logprobs=read_logprobs(choice.get("logprobs")),
            finish_reason=choice.get("finish_reason"),
            stop_reason=choice.get("stop_reason"),
        )
        for choice in event.get("choices") or ()
    ]
    return chunks, details.get("cached_tokens")


def read_logprobs(logprobs: Mapping[str, Any] | None) -> list[TokenLogprobs] | None:
    """Log-probabilities of a choice; vLLM 0.30 writes the token as ``token_id:N``, later versions as a number."""
    if not logprobs or not logprobs.get("content"):
        return None
    positions = []
    for entry in logprobs["content"]:
        sampled, sampled_logprob = _token_id(entry), float(entry["logprob"])
        best = [(_token_id(one), float(one["logprob"])) for one in entry.get("top_logprobs") or ()]
        rest = [pair for pair in best if pair[0] != sampled]
        rank = entry.get("rank")
        if rank is None:  # 0.30 tells none; it is certain only up to the candidates sent
            rank = 1 + sum(value > sampled_logprob for _, value in rest)
        positions.append(
            TokenLogprobs(
                token_ids=[sampled, *(token for token, _ in rest)],
                logprobs=[sampled_logprob, *(value for _, value in rest)],
                sampled_rank=int(rank),
            )
        )
    return positions


def _token_id(entry: Mapping[str, Any]) -> int:
    if (token_id := entry.get("token_id")) is not None:
        return int(token_id)
    return int(str(entry["token"]).removeprefix("token_id:"))


def _error_text(content: bytes, status: int) -> str:
    try:
        body = orjson.loads(content)
        fault = body.get("error", body)
        return str(fault.get("message", fault)) if isinstance(fault, dict) else str(fault)
    except (orjson.JSONDecodeError, AttributeError):
        text = content[:200].decode("utf-8", errors="replace").strip()
        return f"HTTP {status}{': ' + text if text else ''}"


def _connection_text(error: BaseException) -> str:
    return f"no answer ({type(error).__name__}{': ' + str(error) if str(error) else ''})"
