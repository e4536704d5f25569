"""vLLM's render endpoints with what lies around the rendering made short.

Of a request to ``/v1/chat/completions/render`` with a prompt of 9,000 tokens, vLLM's server spends most of its time,
once tokenizing is fast, on ids as objects: they are validated one by one, copied, and written by ``json``. Here the
same handlers (``ServingRender`` in ``vllm/entrypoints/scale_out/render/serving.py``) get the same validated request,
and what they return is written by orjson. Whatever is out of the way (a body that does not parse or validate, an error,
another media type) goes to vLLM's own route from the start, so that it is answered in vLLM's words.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.render import serving
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

logger = logging.getLogger(__name__)

_ROUTES: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions/render": (ChatCompletionRequest, "render_chat_request"),
    "/v1/completions/render": (CompletionRequest, "render_completion_request"),
    "/v1/messages/render": (AnthropicMessagesRequest, "render_messages_request"),
}
_JSON = [(b"content-type", b"application/json")]
_parse = msgspec.json.Decoder().decode
"""Of what it takes it makes what ``json`` does, numbers of any length among it; the rest it refuses."""


def shorten(app: FastAPI, inline_bytes: int) -> None:
    """Puts the short routes before those of vLLM's application, in place, behind its middleware (keys, metrics).

    Args:
        inline_bytes: bodies up to so long are rendered on the event loop, and so before anybody could leave.
    """
    if getattr(app.state, "serving_render", None) is None:
        return
    serving.GenerateRequest = _unchecked  # by which name its handlers make their answers
    short = [
        _Short(route, *_ROUTES[route.path], app.state.serving_render, inline_bytes)
        for route in app.router.routes
        if isinstance(route, APIRoute) and route.path in _ROUTES
    ]
    app.router.routes[0:0] = short


def _unchecked(**fields: Any) -> GenerateRequest:
    """A ``GenerateRequest`` whose ids, which a tokenizer made, are not looked at one by one."""
    if fields.get("features") is not None:  # whose places in the prompt are looked at
        return GenerateRequest(**fields)
    ids = fields.pop("token_ids")
    made = GenerateRequest(token_ids=[0], **fields)
    made.__dict__["token_ids"] = ids
    return made


class _Short(BaseRoute):
    def __init__(
        self, route: APIRoute, model: type[BaseModel], handler: str, handlers: serving.ServingRender, inline_bytes: int
    ) -> None:
        self._route, self._model, self._inline = route, model, inline_bytes
        self._handle = getattr(handlers, handler)
        self._takes_request = len(inspect.signature(self._handle).parameters) > 1  # not in vLLM 0.30
        self.path, self.methods = route.path, route.methods  # other code looks through an application's routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._route.matches(scope)

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        return self._route.url_path_for(name, **path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._route.handle(scope, receive, send)
            return
        inbox = _Inbox(receive)
        body = await inbox.whole()
        answer = None if body is None else await self._answer(scope, body, inbox)
        if answer is None:
            if not inbox.is_left:
                await self._route.handle(scope, inbox.again, send)
            return
        status, written = answer
        length = (b"content-length", str(len(written)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length, *_JSON]})
        await send({"type": "http.response.body", "body": written})

    async def _answer(self, scope: Scope, body: bytes, inbox: _Inbox) -> tuple[int, bytes] | None:
        """The answer's status and body; None where vLLM's route is to answer, or the client has left."""
        request = Request(scope, inbox.again)
        if request.headers.get("content-type", "").lower().split(";", 1)[0] != "application/json":
            return None
        try:
            asked = self._model.model_validate(_parse(body))
            rendering = self._handle(asked, request) if self._takes_request else self._handle(asked)
            rendered = await (rendering if len(body) <= self._inline else inbox.unless_left(rendering))
            return None if rendered is None else _answer_of(rendered)
        except Exception as error:  # whatever it is: vLLM's route meets it as well, and knows how to tell it
            logger.debug("%s is left to vLLM's route: %s", self.path, type(error).__name__)
            return None


def _answer_of(rendered: Any) -> tuple[int, bytes] | None:
    if isinstance(rendered, GenerateRequest):
        return 200, orjson.dumps(_fields(rendered))
    if isinstance(rendered, list):
        return 200, orjson.dumps([_fields(one) for one in rendered])
    if isinstance(rendered, ErrorResponse):
        return rendered.error.code, orjson.dumps(rendered.model_dump())
    return None


def _fields(rendered: GenerateRequest) -> dict[str, Any]:
    """As ``model_dump`` gives them, in its order."""
    ids = rendered.token_ids
    rendered.__dict__["token_ids"] = []
    fields: dict[str, Any] = rendered.model_dump()
    fields["token_ids"] = ids
    return fields


class _Inbox:
    """A request's body, to be read twice, and the client behind it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []
        self._unread = 0
        self.is_left = False
        """Whether the client has gone."""

    async def whole(self) -> bytes | None:
        """The body; None if the client left before it was there."""
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                self.is_left = True
                return None
            self._read.append(message)
            if not message.get("more_body", False):
                return b"".join(one.get("body", b"") for one in self._read)

    async def again(self) -> Message:
        """``receive`` for somebody who has read nothing yet."""
        if self._unread < len(self._read):
            self._unread += 1
            return self._read[self._unread - 1]
        return await self._receive()

    async def unless_left(self, rendering: Any) -> Any:
        """What a coroutine returns; None if the client goes first, which cancels it."""
        task = asyncio.ensure_future(rendering)
        leaving = asyncio.ensure_future(self._left())
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self.is_left = True
            return None
        finally:
            for one in (task, leaving):
                if not one.done():
                    one.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await one

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
