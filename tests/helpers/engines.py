"""Engines that speak ``/inference/v1/generate`` as vLLM does, over real HTTP, and say what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from trivet.render.contract import TokenChunk, TokenRequest
from trivet.routing.engines import EngineView

WAIT_S = 20.0
"""Longest that a test waits for something that should happen at once."""

AT_ONCE_S = 5.0
"""Longest that what must be done at once may take on a machine that stands still for seconds now and then; what it
must not wait for takes much longer."""

HANDED_OVER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "engine-of-prefill",
    "remote_request_id": "generate-tokens-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
"""What a prefill engine with NixlConnector answers with."""


@dataclass(slots=True)
class Call:
    """One request that reached an engine."""

    body: dict[str, Any]
    """Empty, if it was sent no JSON."""
    headers: Mapping[str, str]
    path: str = ""
    raw: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine is done with it, however."""
    cancelled: bool = False
    """The connection was closed before the answer was whole."""

    @property
    def leg(self) -> str:
        """``prefill``, ``decode`` or ``release``."""
        return self.headers["X-Request-Id"].rpartition("-")[2]

    async def end(self) -> None:
        await asyncio.wait_for(self.ended.wait(), WAIT_S)


Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]
Piece = bytes | dict[str, Any] | asyncio.Event
"""Part of a stream: raw bytes, an event's JSON, or a moment to wait for."""


class FakeEngine:
    """An HTTP server that records what it is asked and answers with its replies in turn, the last one for ever."""

    def __init__(self, name: str, tier: str, *replies: Reply) -> None:
        self.name = name
        self.tier = tier
        self.replies = list(replies)
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        """Ids that it was asked to end; it has no effect on what it answers."""
        self._news = asyncio.Condition()
        application = web.Application(client_max_size=2**30)
        application.router.add_post("/inference/v1/abort_requests", self._abort)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._server = TestServer(application)

    async def __aenter__(self) -> FakeEngine:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    def view(self, *, ready: bool = True, api_key: str | None = None, aborts: bool = False) -> EngineView:
        return EngineView(
            self.name,
            self.tier,
            self.url,
            ready,
            api_key=api_key,
            aborts=aborts,
            kv_address=f"unix:/run/{self.name}.sock",
        )

    def legs(self) -> list[str]:
        """Which legs it was asked for, in order."""
        return [call.leg for call in self.calls]

    async def call(self, number: int = 0) -> Call:
        """The call of that number, as soon as it has arrived."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: len(self.calls) > number), WAIT_S)
        return self.calls[number]

    async def abort(self, number: int = 0) -> str:
        """The id of that abort, as soon as it has arrived."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: len(self.aborted) > number), WAIT_S)
        return self.aborted[number]

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        async with self._news:
            self.aborted += (await request.json())["request_ids"]
            self._news.notify_all()
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        call = Call(body, request.headers.copy(), request.path_qs, raw)
        reply = self.replies[min(len(self.calls), len(self.replies) - 1)]
        async with self._news:
            self.calls.append(call)
            self._news.notify_all()
        try:
            return await reply(request)
        except (asyncio.CancelledError, ConnectionError):
            call.cancelled = True
            raise
        finally:
            call.ended.set()


def whole(token: int = 7, *, params: object = HANDED_OVER, cached: int | None = None, finish: str = "length") -> Reply:
    """A prefill leg's answer."""
    usage: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 1}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    choice = {"index": 0, "token_ids": [token], "finish_reason": finish}
    return json_answer({"choices": [choice], "usage": usage, "kv_transfer_params": params})


def json_answer(value: object, status: int = 200) -> Reply:
    return raw_answer(json.dumps(value).encode(), status, "application/json")


def raw_answer(content: bytes, status: int = 200, kind: str = "application/octet-stream", **headers: str) -> Reply:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(body=content, status=status, content_type=kind, headers=headers)

    return reply


def refusing(status: int, message: str = "not today") -> Reply:
    """vLLM's error form."""
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return json_answer({"error": error}, status)


def cutting() -> Reply:
    """Closes the connection instead of answering."""

    async def reply(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return reply


def hanging() -> Reply:
    """Takes the request and answers nothing."""

    async def reply(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return reply


def streaming(*pieces: Piece, cut: bool = False) -> Reply:
    """A streamed answer; ``cut`` breaks the connection behind the last piece."""

    async def reply(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                await answer.write(piece if isinstance(piece, bytes) else sse(piece))
        if cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await answer.write_eof()
        return answer

    return reply


def speaking(*tokens: int, cached: int | None = None, finish: str = "length") -> Reply:
    """A decode leg's answer as vLLM 0.32 streams it: one token an event, then usage, then the end mark."""
    events = [chunk(token) for token in tokens[:-1]]
    return streaming(*events, chunk(tokens[-1], finish_reason=finish), usage(cached), DONE)


DONE = b"data: [DONE]\n\n"


def sse(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk(*token_ids: int, finish_reason: str | None = None, **more: object) -> dict[str, Any]:
    """An event with tokens."""
    choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": finish_reason, "logprobs": None, **more}
    return {"request_id": "generate-tokens-1", "choices": [choice], "usage": None}


def usage(cached: int | None = None) -> dict[str, Any]:
    """The event behind the last one with tokens."""
    counts: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"request_id": "generate-tokens-1", "choices": [], "usage": counts}


@contextlib.contextmanager
def nobody_listens() -> Iterator[str]:
    """The address of a port that refuses connections while the block runs."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


@contextlib.asynccontextmanager
async def listening(*engines: FakeEngine) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        yield


def token_request(**changes: Any) -> TokenRequest:
    """A rendered request for two greedy tokens."""
    values: dict[str, Any] = {
        "request_id": "gen-1",
        "token_ids": [11, 12, 13],
        "sampling": {"temperature": 0.0, "max_tokens": 2, "detokenize": False},
        "model": "tiny",
    }
    return TokenRequest(**values | changes)


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for one in chunks for token in one.token_ids]
