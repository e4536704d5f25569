"""The text plane as an ASGI application: requests go to the engines' own OpenAI endpoints, split where they can be."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing

import aiohttp
import orjson

from trivet.journal import current_request
from trivet.legs.ending import end
from trivet.legs.life import Legs
from trivet.legs.text import TextAsk
from trivet.render.contract import ServingError
from trivet.routing.choose import choose
from trivet.routing.engines import Engines, EngineView
from trivet.surface.chunks import chunks_of
from trivet.surface.http import Receive, Scope, Send, answer, answer_error, answer_json, for_engines, header
from trivet.surface.inbox import Inbox
from trivet.surface.streams import failure

logger = logging.getLogger(__name__)

_SILENCE = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)


_PASSED_ON = frozenset(
    {
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/v1/chat/completions/derender"),
        ("POST", "/v1/completions/render"),
        ("POST", "/v1/completions/derender"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/messages/render"),
        ("POST", "/v1/responses/render"),
        ("POST", "/cohere/v2/chat/render"),
    }
)
"""What else goes to an engine, as it is. By name, since engines have endpoints that are not for clients."""


_BUSY = (429, 503)
"""What an engine answers that has not begun: another may have room."""

_NO_JSON = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
"""What vLLM says (``validate_json_request``)."""

_Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers that go on, content."""

_ANY_SIZE = sys.maxsize
"""The gateway has measured it."""


class TextApp:
    """Stands where vLLM's application stands on the tokens plane."""

    def __init__(self, engines: Engines, legs: Legs, generating: tuple[str, ...]) -> None:
        """
        Args:
            generating: paths that generate; every other request goes to one engine as it is.
        """
        self._engines = engines
        self._legs = legs
        self._generating = generating

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] != "http":
            raise RuntimeError(f"the text plane serves HTTP, not {scope['type']}")
        else:
            inbox = Inbox(receive)
            body = await inbox.body(_ANY_SIZE)
            if body is None:
                return
            where = scope["method"], scope["path"]
            generates = where[0] == "POST" and where[1] in self._generating
            if not generates and where not in _PASSED_ON:
                await answer_json(send, 404, {"detail": "Not Found"})  # as vLLM says it
                return
            if where[0] == "POST" and not header(scope, b"content-type"):
                # here and not at an engine, as legs have a type: a page of anybody's may send this without asking first
                await answer_error(send, 400, _NO_JSON, path=where[1])
                return
            serving = asyncio.create_task((self._generate if generates else self._pass_on)(scope, body, send))
            leaving = asyncio.ensure_future(inbox.left())
            try:
                await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                try:
                    if not serving.done():
                        await end(serving)
                    if not serving.cancelled():
                        serving.result()
                finally:
                    await inbox.close()

    async def _generate(self, scope: Scope, raw: bytes, send: Send) -> None:
        owner = current_request.get()
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            body = None
        ask = TextAsk(
            scope["path"],
            raw,
            body,
            {**(owner.forwarded if owner is not None else {}), **_content_type(scope)},
            owner.colocate if owner is not None else None,
        )
        ask.client = chunks_of(scope)
        begun, last = False, b""
        try:
            async with aclosing(self._legs.serve(ask)) as pieces:
                async for piece in pieces:
                    last = piece.body
                    if piece.head is not None:
                        headers = [(name.encode(), _raw(value)) for name, value in piece.head.items()]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
                    await send({"type": "http.response.body", "body": piece.body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ServingError as error:
            await _fail(send, scope["path"], error, begun=begun, last=last)
        except Exception as error:  # whatever went wrong, the client must be told
            logger.exception("request at %s", scope["path"])
            fault = ServingError(f"{type(error).__name__}: {error}", status=500)
            await _fail(send, scope["path"], fault, begun=begun, last=last)

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        """Asks one engine after the other until one answers: nothing that is asked for here changes any of them."""
        path = scope["path"]
        if query := scope.get("query_string"):
            path += "?" + query.decode("latin-1")
        headers = for_engines(scope)
        for name, value in scope["headers"]:
            if name in (b"accept", b"content-type"):
                headers[name.decode()] = value.decode("latin-1")
        faults, answered = [], None
        for engine in self._by_turns():
            own = {**headers, "authorization": f"Bearer {engine.api_key}"} if engine.api_key else headers
            try:
                answered = await self._ask(scope["method"], engine.url + path, own, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                faults.append(f"{engine.name}: no answer ({type(error).__name__})")
                continue
            if answered[0] not in _BUSY:
                break
        if answered is not None:
            status, kept, content = answered
            await send({"type": "http.response.start", "status": status, "headers": kept})
            await send({"type": "http.response.body", "body": content})
        elif faults:
            await answer_error(send, 502, "; ".join(faults))
        else:
            await answer_error(send, 503, "no engine is ready to serve this request")

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> _Answer:
        async with self._legs.session.request(
            method, url, data=body or None, headers=headers, timeout=_SILENCE, allow_redirects=False
        ) as answer:
            kept = [
                (name.lower().encode(), _raw(value))
                for name, value in answer.headers.items()
                if name.lower() in ("content-type", "location", "allow", "retry-after", "www-authenticate")
            ]
            return answer.status, kept, await answer.read()

    def _by_turns(self) -> Iterator[EngineView]:
        """Engines that are up: the one with the least to do of those that serve whole requests, then all others."""
        route = choose(self._engines, colocate="not split")
        if route is not None:
            yield route.decode
        for tier in ("mixed", "decode", "prefill"):
            yield from (one for one in self._engines.ready(tier) if route is None or one.name != route.decode.name)


def _raw(value: str) -> bytes:
    """A header's value as the engine sent it."""
    return value.encode("utf-8", errors="surrogateescape")


def _content_type(scope: Scope) -> dict[str, str]:
    """The client's content type: engines take no other than JSON, which is theirs to say."""
    said = header(scope, b"content-type")
    return {} if said is None else {"Content-Type": said}


async def _fail(send: Send, path: str, error: ServingError, *, begun: bool, last: bytes) -> None:
    """Answers with an error; in a stream that has begun, as its last event, behind ``last``."""
    if not begun and error.content is not None:
        await answer(send, error.status, error.content, b"application/json")
    elif not begun:
        await answer_error(send, error.status, error.message, path=path)
    else:
        event = failure(path, error.message, error.status, error.error, last)
        await send({"type": "http.response.body", "body": event, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
