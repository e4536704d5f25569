"""Small answers in ASGI, and OpenAI's error form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


async def answer(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Sends one whole response."""
    start = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, status: int, value: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a JSON response."""
    await answer(send, status, orjson.dumps(value), b"application/json", headers)


async def answer_error(send: Send, status: int, message: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends an error in the form that OpenAI's clients, and vLLM, use."""
    error = {"message": message, "type": HTTPStatus(status).phrase, "param": None, "code": status}
    await answer_json(send, status, {"error": error}, headers)
