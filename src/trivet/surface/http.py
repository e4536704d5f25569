"""Small answers in ASGI, and OpenAI's error form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

import orjson

from trivet.surface.streams import MESSAGES, anthropic_kind

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Scope, name: bytes) -> str | None:
    """A header of a request by its name in lower case; the first, if it is sent twice."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def header_value(text: str) -> bytes:
    """A text as a header's value: what cannot stand in one, a line's end above all, becomes a question mark."""
    kept = "".join("?" if (one < " " and one != "\t") or one == "\x7f" else one for one in text)
    return kept.encode("latin-1", errors="replace")


_NOT_FOR_ENGINES = frozenset(
    {
        # of this one connection (RFC 9110, 7.6.1)
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # of this one message: the legs' bodies are others
        "accept",
        "accept-encoding",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        # between the client and the gateway
        "authorization",
        "cookie",
        "x-api-key",
        "x-client-request-id",
        "x-request-id",
        "x-data-parallel-rank",
    }
)


def for_engines(scope: Scope) -> dict[str, str]:
    """The headers of a request that its legs carry: trace context, session, tenant, whatever a user adds."""
    named = {
        one.strip().lower()
        for key, value in scope["headers"]
        if key == b"connection"
        for one in value.decode("latin-1").split(",")
    }
    kept: dict[str, str] = {}
    for key, value in scope["headers"]:
        name, text = key.decode("latin-1"), value.decode("latin-1")
        if name not in _NOT_FOR_ENGINES and name not in named and not name.startswith("x-trivet-"):
            kept[name] = f"{kept[name]}, {text}" if name in kept else text  # RFC 9110, 5.3
    return kept


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


async def answer_error(
    send: Send, status: int, message: str, headers: Iterable[tuple[bytes, bytes]] = (), *, path: str = ""
) -> None:
    """Sends an error in the form that OpenAI's clients, and vLLM, use.

    Args:
        path: what was asked for; ``/v1/messages`` is answered so that Anthropic's clients read it too.
    """
    try:
        kind = HTTPStatus(status).phrase
    except ValueError:  # what stands before an engine answers with what Python does not know (499, 520) as well
        kind = "Internal Server Error" if status >= 500 else "Bad Request"
    error = {"message": message, "type": kind, "param": None, "code": status}
    if path.startswith(MESSAGES):
        error["type"] = anthropic_kind(status)
        await answer_json(send, status, {"type": "error", "error": error}, headers)
    else:
        await answer_json(send, status, {"error": error}, headers)
