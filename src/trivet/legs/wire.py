"""One leg over HTTP: a POST to an engine, its answer whole or streamed, and the abort of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import aiohttp
import orjson

from trivet.legs.express import Express
from trivet.render.contract import EncodedIds, Features, TokenChunk, TokenLogprobs
from trivet.routing.engines import EngineView
from trivet.surface.sse import EventSplitter, data_of

GENERATE = "/inference/v1/generate"
_ABORT = "/inference/v1/abort_requests"
_ABORT_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_CONNECT_TIMEOUT_S = 5.0
_AT_ONCE_BYTES = 2**18
"""Of a body; more is sent in pieces."""
_CORE_DIED = "EngineCore encountered an issue"
"""``EngineDeadError`` in vLLM (``vllm/v1/engine/exceptions.py``), in the moment before its server ends."""
_NOT_EXECUTED = frozenset({429, 503})
"""An engine that says so has not begun: its queue is full, or it is going down."""


class LegError(Exception):
    """A leg failed at an engine."""

    def __init__(
        self,
        engine: str,
        problem: str,
        *,
        status: int | None = None,
        error: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        died: bool = False,
        executed: bool = True,
    ) -> None:
        """
        Args:
            status: the HTTP status, or the code of an error event; None if there was no answer.
            error: the engine's error object.
            content: the engine's whole answer, where that is JSON.
            died: the engine broke off or fell silent, so nothing says that it still lives.
            executed: the engine may have begun to compute.
        """
        super().__init__(f"{engine}: {problem}")
        self.engine = engine
        self.problem = problem
        self.status = status
        self.error = error
        self.content = content
        self.died = died
        self.executed = executed and status not in _NOT_EXECUTED
        self.ended_by_abort = False
        """The engine was told to end it, by us or at its own end."""


def open_session() -> aiohttp.ClientSession:
    """The HTTP session that all legs of a worker share.

    vLLM closes idle connections after 5 s (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``); ours are dropped earlier, so that a
    request never meets a connection that the engine is just closing.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0, ttl_dns_cache=30)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True, read_bufsize=2**18)


@contextlib.asynccontextmanager
async def post(
    session: aiohttp.ClientSession, engine: str, url: str, body: bytes | Sequence[bytes], headers: Mapping[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A POST whose answer has begun. Leaving the block before the answer's end closes the connection.

    Args:
        body: in one part or in several.

    Raises:
        LegError: no answer, or one that breaks off inside the block.
    """
    parts = [body] if isinstance(body, bytes) else body
    size = sum(len(part) for part in parts)
    data: bytes | AsyncIterator[memoryview]
    if size <= _AT_ONCE_BYTES:
        data = b"".join(parts)
    else:
        data, headers = _in_turns(parts), {**headers, "Content-Length": f"{size}"}
    try:
        async with session.post(url, data=data, headers=headers) as answer:
            yield answer
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise LegError(engine, _connection_text(error), died=True, executed=False) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise LegError(engine, _connection_text(error), died=True) from error


async def _in_turns(parts: Sequence[bytes]) -> AsyncGenerator[memoryview, None]:
    """A large body piece by piece: while a socket takes it as fast as it comes, others have their turns."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _AT_ONCE_BYTES):
            yield view[start : start + _AT_ONCE_BYTES]
            await asyncio.sleep(0)


async def generate(
    session: aiohttp.ClientSession,
    engine: str,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    path: str = GENERATE,
) -> dict[str, Any]:
    """Runs a leg and returns its whole answer.

    Raises:
        LegError: no answer, one that is not 200, or one that says that generating failed.
    """
    async with post(session, engine, f"{url}{path}", parts_of(body), headers) as answer:
        content = await answer.read()
        if answer.status != 200:
            raise refusal(engine, content, answer.status)
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise LegError(engine, "answered 200 with something that is not JSON", status=502) from error
    if not isinstance(parsed, dict):
        raise LegError(engine, "answered 200 with something that is not an object", status=502)
    with reading(engine):
        for choice in parsed.get("choices") or ():
            check_finish(engine, choice.get("finish_reason"))
    return parsed


async def stream(
    session: aiohttp.ClientSession,
    engine: str,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    accepted: Callable[[], None] = lambda: None,
    made: int = 0,
    take: Callable[[Sequence[int]], None] | None = None,
) -> AsyncGenerator[TokenChunk, None]:
    """Runs a streamed leg, giving its tokens as they arrive. Closing the iterator ends the leg at the engine.

    Args:
        accepted: called when the engine has taken the request, before its first token.
        made: tokens of the answer that another engine makes, and that count towards its limit.
        take: is given tokens that come with nothing else, when they come, in place of chunks: once the first chunk has
            been, and whenever all that came before has been asked for.

    Raises:
        LegError: no answer, one that is not 200, an error event, or an end without a finish reason.
    """
    last: TokenChunk | None = None
    cached_tokens: int | None = None
    tokens, done = 0, False
    lone = LoneTokens()

    def pass_on(_: bytes) -> bool:
        nonlocal tokens
        assert take is not None
        found = lone.found()
        tokens += len(found)
        take(found)
        return True

    try:
        async with post(session, engine, f"{url}{GENERATE}", parts_of(body), headers) as answer:
            if answer.status != 200:
                raise refusal(engine, await answer.read(), answer.status)
            accepted()
            splitter = EventSplitter()
            with Express(answer, lone.find, None if take is None else pass_on) as express:
                while piece := await express.read(steady=lone.knows and not (splitter.pending or last or done)):
                    for event in splitter.feed(piece):
                        if (data := data_of(event)) is None:
                            continue
                        if done := done or data == b"[DONE]":
                            last = last or _finish_unsaid(body, tokens, made)
                            continue  # read on to the end, or the connection could not be used again
                        chunks, told = _read_event(engine, data)
                        cached_tokens = told if told is not None else cached_tokens
                        if take is not None and told is None:
                            lone.learn(event, chunks)
                        for chunk in chunks:
                            tokens += len(chunk.token_ids)
                            if chunk.finish_reason is None:
                                yield chunk
                            else:  # kept until usage, the next event, has told the cached tokens
                                last = with_stop_reason(chunk, body)
    except LegError as error:
        error.executed = error.executed or tokens > 0
        if last is None or not error.died:
            raise
    if last is None:  # also behind the end mark: so vLLM 0.30 says that it was told to end
        raise LegError(engine, "the stream ended before the answer did", died=True)
    yield replace(last, cached_tokens=cached_tokens)


async def abort(session: aiohttp.ClientSession, engine: EngineView, engine_id: str) -> None:
    """Asks an engine to end a request; that it cannot be told is no fault, as closing the connection says the same.

    Args:
        engine_id: the id as the engine made it: its endpoint's prefix before ``X-Request-Id``.
    """
    headers = {"Content-Type": "application/json"}
    if engine.api_key:
        headers["Authorization"] = f"Bearer {engine.api_key}"
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.post(
            f"{engine.url}{_ABORT}",
            data=dump({"request_ids": [engine_id]}),
            headers=headers,
            timeout=_ABORT_TIMEOUT,
        ) as answer:
            await answer.read()


@contextlib.contextmanager
def reading(engine: str) -> Iterator[None]:
    """Around code that reads an engine's answer.

    Raises:
        LegError: it is not of the form that it should have.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LegError(engine, f"sent what cannot be read ({type(error).__name__}: {error})", status=502) from error


def check_finish(engine: str, reason: str | None) -> None:
    """Refuses the finish reasons that are none of an answer's.

    Raises:
        LegError: ``error`` (generating failed), or ``abort`` (the engine was told to end: it is going down).
    """
    if reason == "error":
        raise LegError(engine, "generating failed in the engine (finish_reason error)", status=500)
    if reason == "abort":
        error = LegError(engine, "the engine ended the request (finish_reason abort)", died=True)
        error.ended_by_abort = True
        raise error


def _finish_unsaid(body: Mapping[str, Any], tokens: int, made: int) -> TokenChunk | None:
    """vLLM 0.30 leaves out a last event that has no token. All tokens are there, or the request was aborted."""
    limit = body["sampling_params"].get("max_tokens")
    return TokenChunk((), finish_reason="length") if tokens and limit is not None and tokens + made >= limit else None


def with_stop_reason(chunk: TokenChunk, body: Mapping[str, Any]) -> TokenChunk:
    """vLLM 0.30 does not send ``stop_reason``; for tokens it is the stop token itself."""
    stops = body["sampling_params"].get("stop_token_ids") or ()
    if chunk.finish_reason == "stop" and chunk.stop_reason is None and chunk.token_ids and chunk.token_ids[-1] in stops:
        return replace(chunk, stop_reason=chunk.token_ids[-1])
    if chunk.finish_reason == "repetition" and chunk.stop_reason is None:
        return replace(chunk, stop_reason="repetition_detected")
    return chunk


def parts_of(body: Mapping[str, Any]) -> list[bytes]:
    """A body as JSON, in parts: what is large, and the same for all legs, has been written already."""
    written: dict[str, Sequence[bytes]] = {}
    if isinstance(features := body.get("features"), Features):
        written["features"] = features.encoded
    if isinstance(ids := body.get("token_ids"), EncodedIds):
        written["token_ids"] = (ids.encoded,)
    rest = dump({name: value for name, value in body.items() if name not in written})
    if not written:
        return [rest]
    parts = [rest[:-1]]
    for name, value in written.items():
        parts += (b"," if len(rest) > 2 or len(parts) > 1 else b"", b'"%s":' % name.encode(), *value)
    return [*parts, b"}"]


def dump(body: Mapping[str, Any] | Sequence[int]) -> bytes:
    """As JSON; token ids that are keys (``logit_bias``) become strings, as JSON has them."""
    try:
        return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # halves of a surrogate pair, numbers beyond 64 bits: Python's JSON has them, and so vLLM's
        return json.dumps(body).encode()


def _read_event(engine: str, data: bytes) -> tuple[list[TokenChunk], int | None]:
    """The chunks of one event and, if it carries usage, the cached prompt tokens."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LegError(engine, "sent an event that is not JSON", status=502) from error
    if not isinstance(event, dict):
        raise LegError(engine, "sent an event that is not an object", status=502)
    if event.get("error"):
        raise refusal(engine, data, 500)
    with reading(engine):
        chunks = [read_choice(choice) for choice in event.get("choices") or ()]
        cached_tokens = cached_tokens_of(event)
    for chunk in chunks:
        check_finish(engine, chunk.finish_reason)
    return chunks, cached_tokens


class LoneTokens:
    """Knows the events of a stream that bring one token and nothing else, without parsing each of them.

    They differ in one number only. So one is parsed, and what stands before and behind the number in it is kept. What
    stands before ends with a member's name, which is there once: within a string of JSON its quotes would be escaped.
    """

    def __init__(self) -> None:
        self._before = self._behind = b""
        self._found: list[int] = []

    @property
    def knows(self) -> bool:
        """Whether it has an example."""
        return bool(self._before)

    def find(self, event: bytes) -> bool:
        """Whether it is one of those; its token is then the last of ``found``."""
        if self._before and event.startswith(self._before) and event.endswith(self._behind):
            digits = event[len(self._before) : len(event) - len(self._behind)]
            if digits.isdigit() and len(digits) <= _DIGITS and (digits[:1] != b"0" or digits == b"0"):
                self._found.append(int(digits))
                return True
        self._found.clear()
        return False

    def found(self) -> list[int]:
        """The tokens of the events that were known since it was last asked."""
        found, self._found = self._found, []
        return found

    def learn(self, event: bytes, chunks: Sequence[TokenChunk]) -> None:
        """Takes an event for an example, if it is one; else the former one stays.

        Args:
            chunks: all that it says.
        """
        if len(chunks) != 1 or chunks[0] != TokenChunk(chunks[0].token_ids) or event.count(b'"token_ids"') != 1:
            return
        only = _LONE_TOKEN.search(event)
        if only is not None and chunks[0].token_ids == [int(only[1])]:
            self._before, self._behind = event[: only.start(1)], event[only.end(1) :]


_DIGITS = 9
"""Most of a token id that is known without parsing; longer ones are parsed."""
_LONE_TOKEN = re.compile(rb'"token_ids" ?: ?\[(\d{1,%d})\]' % _DIGITS)


def read_choice(choice: Mapping[str, Any]) -> TokenChunk:
    """A choice of ``/inference/v1/generate``, of a stream's event or of a whole answer."""
    token_ids = [int(token) for token in choice.get("token_ids") or ()]
    if any(not 0 <= token < 2**31 for token in token_ids):
        raise ValueError("a token id out of range")
    finish_reason, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
    if not isinstance(finish_reason, str | None) or not isinstance(stop_reason, int | str | None):
        raise TypeError("a reason of another type")
    return TokenChunk(token_ids, read_logprobs(choice.get("logprobs")), finish_reason, stop_reason)


def cached_tokens_of(answer: Mapping[str, Any]) -> int | None:
    """Prompt tokens that an engine had in its prefix cache, if its answer or its usage event tells."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return int(cached) if cached is not None else None


def transfer_params_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a prefill leg's answer says of the KV that it handed over."""
    params = answer.get("kv_transfer_params")
    if not isinstance(params, Mapping | None):
        raise TypeError("kv_transfer_params of another type")
    return params


def read_prompt_logprobs(prompt: Sequence[int], told: Sequence[Any] | None) -> list[TokenLogprobs] | None:
    """Log-probabilities of a prompt, as ``prompt_logprobs`` of ``/inference/v1/generate`` has them.

    An object from token id to ``{"logprob", "rank"}`` for each token, the first of which has none.
    """
    if not told:
        return None
    positions = []
    for token, entry in zip(prompt[1:], told[1:], strict=True):
        own = entry[str(token)]
        best = sorted(
            ((int(other), one) for other, one in entry.items() if int(other) != token), key=lambda pair: pair[1]["rank"]
        )
        positions.append(
            TokenLogprobs(
                token_ids=[token, *(other for other, _ in best)],
                logprobs=[float(own["logprob"]), *(float(one["logprob"]) for _, one in best)],
                sampled_rank=int(own["rank"]),
            )
        )
    return positions


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


def refusal(engine: str, content: bytes, status: int) -> LegError:
    """What an engine says when it refuses or fails: OpenAI's error form, or whatever it sent."""
    said, status = status, status if _is_error(status) else 502
    if said in (401, 403):  # of the gateway's own key, or an endpoint switched off: nothing that a client could mend
        told = _message(content)
        return LegError(engine, f"does not let the gateway in (HTTP {said}: {told})", status=502, executed=False)
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        text = content[:200].decode("utf-8", errors="replace").strip()
        return LegError(engine, f"HTTP {said}{': ' + text if text else ''}", status=status)
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return LegError(engine, str(error), status=status)
    code = error.get("code")
    problem = str(error.get("message", error))
    if problem.startswith(_CORE_DIED):
        return LegError(engine, "its engine core has died", died=True)
    return LegError(engine, problem, status=code if _is_error(code) else status, error=error, content=content)


def _message(content: bytes) -> str:
    """What an error says, as short as can be."""
    try:
        error = orjson.loads(content)["error"]
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return content[:200].decode("utf-8", errors="replace").strip()


def _is_error(status: object) -> TypeGuard[int]:
    """Whether it can be answered with."""
    return isinstance(status, int) and 400 <= status < 600


def _connection_text(error: BaseException) -> str:
    match error:
        case aiohttp.ClientConnectorError():
            return f"cannot be reached ({error.strerror or error.os_error})"
        case aiohttp.ServerDisconnectedError():
            return "closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "broke off its answer"
    return f"no answer ({type(error).__name__}{': ' + str(error) if str(error) else ''})"
