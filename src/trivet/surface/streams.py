"""What events and whole answers say, and how a stream tells that it failed, for each protocol that vLLM speaks.

- Chat, completions and ``/inference/v1/generate``: ``choices`` with a ``finish_reason``; ``data: [DONE]`` is the end.
- ``/v1/responses`` (OpenAI): events with a ``type``; one of ``response.completed`` and its like is the last.
- ``/v1/messages`` (Anthropic): events with a ``type``; ``message_stop`` is the last.

What vLLM 0.30 to 0.32 write. Of other endpoints (``/cohere/v2/chat``) nothing is known, and nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trivet.surface.sse import DONE, event_of

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

_RESPONSE_ENDS: Mapping[str, str] = {
    "completed": "stop",
    "incomplete": "length",
    "cancelled": "abort",
    "failed": "error",
}
"""Finish reasons by ``status`` of ``/v1/responses``. To vLLM an answer that its engine aborted is ``completed``."""
_MESSAGE_ENDS: Mapping[str | None, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    None: "abort",
}
"""Finish reasons by ``stop_reason`` of ``/v1/messages``; vLLM has none for an answer that its engine aborted."""
_OPENING = frozenset({"response.created", "response.in_progress", "response.queued"})
_SEQUENCE = re.compile(rb'"sequence_number": ?(\d{1,9})')


@dataclass(frozen=True, slots=True)
class Said:
    """What one event, or a whole answer, says of how the answer goes."""

    finish_reason: str | None = None
    """In chat's words; ``error`` and ``abort`` as well."""
    tokens: int = 0
    """Tokens in it, one an event, as engines stream."""
    opens: bool = False
    """It is written before anything is generated."""
    ends: bool = False
    """It is the stream's last."""


_NOTHING = Said()


def said_in(path: str, value: Mapping[str, Any]) -> Said:
    """Reads an event, or a whole answer, of ``/v1/responses`` or ``/v1/messages``.

    Raises:
        AttributeError, TypeError: it is none.
    """
    kind = value.get("type")
    if path == RESPONSES:
        response = value if value.get("object") == "response" else value.get("response")
        ended = _RESPONSE_ENDS.get(response.get("status") or "") if isinstance(response, Mapping) else None
        if isinstance(kind, str) and kind.startswith("response."):
            return Said(ended, int(kind.endswith(".delta")), kind in _OPENING, ended is not None)
        return Said(ended)
    if path == MESSAGES:
        if kind == "content_block_delta":
            return Said(tokens=int((value.get("delta") or {}).get("type") != "signature_delta"))
        if kind in ("message", "message_delta"):
            reason = (value if kind == "message" else value.get("delta") or {}).get("stop_reason")
            return Said(_MESSAGE_ENDS.get(reason, "stop"))
        return Said(ends=kind == "message_stop")
    return _NOTHING


def failure(path: str, message: str, status: int, error: Mapping[str, Any] | None, last: bytes = b"") -> bytes:
    """What is behind the last event of a stream that fails, in its protocol.

    Args:
        error: an engine's own error object, for those who can take it.
        last: what was sent before, whose number the next one follows.
    """
    if path == RESPONSES:
        number = int(_SEQUENCE.findall(last)[-1]) + 1 if _SEQUENCE.search(last) else 0
        inner = {"type": "server_error", "code": "server_error", "message": message, "param": None}
        # OpenAI documents the outer fields and sends the inner ones; its clients raise on the latter
        return _named("error", {**inner, "type": "error", "sequence_number": number, "error": inner})
    if path == MESSAGES:
        return _named("error", {"type": "error", "error": {"type": anthropic_kind(status), "message": message}})
    own = {"message": message, "type": "InternalServerError", "param": None, "code": status}
    return event_of({"error": dict(error or own)}) + DONE


def anthropic_kind(status: int) -> str:
    """The ``type`` of an error of ``/v1/messages``, by its HTTP status."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    return kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _named(name: str, value: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
