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
from collections.abc import Mapping, Sequence
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

from trivet.render.outer import LEFT, answer_early
from trivet.render.plain_chats import PlainMessages, WrittenIds, looked_at
from trivet.render.renderer import ASKED, WRITTEN
from trivet.render.repeated import Rendering, RenderingError, Repeated
from trivet.render.validated import Validated

logger = logging.getLogger(__name__)

_ROUTES: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions/render": (ChatCompletionRequest, "render_chat_request"),
    "/v1/completions/render": (CompletionRequest, "render_completion_request"),
    "/v1/messages/render": (AnthropicMessagesRequest, "render_messages_request"),
}
_JSON = [(b"content-type", b"application/json")]
_RAISED = "trivet.raised"
"""In a scope: what vLLM's handler has raised."""
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
    serving.list = _listed  # and copy their ids
    short = [
        _Short(route, *_ROUTES[route.path], app.state.serving_render, inline_bytes)
        for route in app.router.routes
        if isinstance(route, APIRoute) and route.path in _ROUTES
    ]
    app.router.routes[0:0] = short
    answer_early(app, {one.path: one for one in short})


def _unchecked(**fields: Any) -> GenerateRequest:
    """A ``GenerateRequest`` whose ids, which a tokenizer made, are not looked at one by one."""
    if fields.get("features") is not None:  # whose places in the prompt are looked at
        return GenerateRequest(**fields)
    ids = fields.pop("token_ids")
    made = GenerateRequest(token_ids=[0], **fields)
    made.__dict__["token_ids"] = ids
    return made


def _listed(ids: Any = ()) -> Any:
    """``list``, of what is to be one."""
    return ids if type(ids) is WrittenIds else list(ids)


class _Short(BaseRoute):
    def __init__(
        self, route: APIRoute, model: type[BaseModel], handler: str, handlers: serving.ServingRender, inline_bytes: int
    ) -> None:
        self._route, self._model, self._inline = route, model, inline_bytes
        self._handle = getattr(handlers, handler)
        self._takes_request = len(inspect.signature(self._handle).parameters) > 1  # not in vLLM 0.30
        self._spares = Validated(model) if model is ChatCompletionRequest and Validated.takes(model) else None
        self._repeated = Repeated.of(handlers, inline_bytes) if self._spares is not None else None
        self.path, self.methods = route.path, route.methods  # other code looks through an application's routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._route.matches(scope)

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        return self._route.url_path_for(name, **path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        again: Receive | None = receive
        if scope["method"] == "POST" and LEFT not in scope:
            again = await self.answer(scope, receive, send)
        if (error := scope.pop(_RAISED, None)) is not None:
            raise error
        if again is not None:
            await self._route.handle(scope, again, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Answers; what to receive from where vLLM's route is to answer, and None otherwise."""
        inbox = _Inbox(receive)
        body = await inbox.whole()
        written = WRITTEN.set(True)
        try:
            answer = None if body is None else await self._answer(scope, body, inbox)
        finally:
            WRITTEN.reset(written)  # vLLM's route wants numbers
        if answer is None:
            return None if inbox.is_left else inbox.again
        status, content = answer
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": status, "headers": [length, *_JSON]})
        await send({"type": "http.response.body", "body": content})
        return None

    async def _answer(self, scope: Scope, body: bytes, inbox: _Inbox) -> tuple[int, bytes] | None:
        """The answer's status and body; None where vLLM's route is to answer, or the client has left."""
        request = Request(scope, inbox.again)
        if request.headers.get("content-type", "").lower().split(";", 1)[0] != "application/json":
            return None
        try:
            told = _parse(body)
            plain = None if self._spares is None or type(told) is not dict else looked_at(told.get("messages"))
        except Exception as error:
            self._leave(error)
            return None
        if plain is None or self._spares is None:
            return await self._rendered(scope, told, request, inbox, len(body))
        key = self._spares.key_of(told)
        repeated = self._repeated
        if repeated is None or key is None or "request_id" in told or "x-request-id" in request.headers:
            return await self._rendered(scope, told, request, inbox, len(body), plain, key)
        try:
            if (written := repeated.answer(key, plain)) is not None:
                return 200, written
        except RenderingError as error:  # raised where vLLM's handlers see it, as below
            scope[_RAISED] = error.raised
            return None
        except Exception as error:  # vLLM's way knows how to tell it
            self._leave(error)
        seen: list[Any] = []
        asked = ASKED.set(seen)
        try:
            return await self._rendered(scope, told, request, inbox, len(body), plain, key, seen)
        finally:
            ASKED.reset(asked)

    async def _rendered(
        self,
        scope: Scope,
        told: Any,
        request: Request,
        inbox: _Inbox,
        length: int,
        plain: PlainMessages | None = None,
        key: Any = None,
        seen: Sequence[Any] = (),
    ) -> tuple[int, bytes] | None:
        """What vLLM's handler answers.

        Args:
            told: the body.
            plain: its messages, if they are a role and a text each.
            key: what is asked for beside them.
            seen: with what the renderer is called, by then; what is answered is kept for the next ones.
        """
        try:
            asked = self._validated(told, plain, key)
        except Exception as error:
            self._leave(error)
            return None
        try:
            rendering = self._handle(asked, request) if self._takes_request else self._handle(asked)
            rendered = await (rendering if length <= self._inline else inbox.unless_left(rendering))
        except Exception as error:  # it is raised where vLLM's handlers see it; to render once more would be no better
            scope[_RAISED] = error
            return None
        try:
            if rendered is None:
                return None
            ids = rendered.token_ids if isinstance(rendered, GenerateRequest) else None
            answer = _answer_of(rendered)
        except Exception as error:  # what only vLLM's way can write
            self._leave(error)
            return None
        if type(ids) is WrittenIds and len(seen) == 1 and self._repeated is not None:
            with contextlib.suppress(Exception):  # what is not kept is made anew
                self._repeated.learn(key, asked, Rendering(*seen[0]), rendered.model_dump(), ids)
        return answer

    def _leave(self, error: Exception) -> None:
        """Leaves a request to vLLM's route, which meets whatever it is as well, and knows how to tell it."""
        logger.debug("%s is left to vLLM's route: %s", self.path, type(error).__name__)

    def _validated(self, told: Any, plain: PlainMessages | None, key: Any) -> Any:
        """The request; messages that are a role and a text have been looked at, and one of them is there."""
        if self._spares is None or plain is None:
            return self._model.model_validate(told)
        told["messages"] = plain[-1:]
        asked = self._spares.validated(told, key)
        asked.__dict__["messages"] = plain
        return asked


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
    fields["token_ids"] = orjson.Fragment(ids.json()) if type(ids) is WrittenIds else ids
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
