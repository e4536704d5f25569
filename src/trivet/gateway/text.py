"""The text plane as an ASGI application: requests go to the engines' own OpenAI endpoints, split where they can be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
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
from trivet.surface.http import Receive, Scope, Send, answer, answer_error, answer_json, for_engines, header
from trivet.surface.inbox import Inbox
from trivet.surface.sse import DONE, event_of

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
    }
)
"""What else goes to an engine, as it is. By name, since engines have endpoints that are not for clients."""


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
        begun = False
        try:
            async with aclosing(self._legs.serve(ask)) as pieces:
                async for piece in pieces:
                    if piece.head is not None:
                        headers = [(name.encode(), _raw(value)) for name, value in piece.head.items()]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
                    await send({"type": "http.response.body", "body": piece.body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ServingError as error:
            await _fail(send, error, begun=begun)
        except Exception as error:  # whatever went wrong, the client must be told
            logger.exception("request at %s", scope["path"])
            await _fail(send, ServingError(f"{type(error).__name__}: {error}", status=500), begun=begun)

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        engine = self._any_engine()
        if engine is None:
            await answer_error(send, 503, "no engine is ready to serve this request")
            return
        url = engine.url + scope["path"]
        if query := scope.get("query_string"):
            url += "?" + query.decode("latin-1")
        headers = for_engines(scope)
        for name, value in scope["headers"]:
            if name in (b"accept", b"content-type"):
                headers[name.decode()] = value.decode("latin-1")
        if engine.api_key:
            headers["authorization"] = f"Bearer {engine.api_key}"
        try:
            async with self._legs.session.request(
                scope["method"], url, data=body or None, headers=headers, timeout=_SILENCE, allow_redirects=False
            ) as answer:
                kept = [
                    (name.lower().encode(), _raw(value))
                    for name, value in answer.headers.items()
                    if name.lower() in ("content-type", "location", "allow", "retry-after", "www-authenticate")
                ]
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            with contextlib.suppress(RuntimeError):  # the answer had begun: its connection is closed by the server
                await answer_error(send, 502, f"{engine.name}: no answer ({type(error).__name__})")

    def _any_engine(self) -> EngineView | None:
        route = choose(self._engines, colocate="not split")
        if route is not None:
            return route.decode
        return next(iter(self._engines.ready("prefill")), None)


def _raw(value: str) -> bytes:
    """A header's value as the engine sent it."""
    return value.encode("utf-8", errors="surrogateescape")


def _content_type(scope: Scope) -> dict[str, str]:
    """The client's content type: engines take no other than JSON, which is theirs to say."""
    said = header(scope, b"content-type")
    return {} if said is None else {"Content-Type": said}


async def _fail(send: Send, error: ServingError, *, begun: bool) -> None:
    """Answers with an error; in a stream that has begun, as its last event."""
    if not begun and error.content is not None:
        await answer(send, error.status, error.content, b"application/json")
    elif not begun:
        await answer_error(send, error.status, error.message)
    else:
        own = {"message": error.message, "type": "InternalServerError", "param": None, "code": error.status}
        event = event_of({"error": dict(error.error or own)})
        await send({"type": "http.response.body", "body": event + DONE, "more_body": False})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
