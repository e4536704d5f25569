"""``/v1/responses`` and ``/v1/messages`` of a simulated engine: as vLLM 0.32 writes answers of text.

Their prompts are those of the chat that they mean, so a conversation has one prompt whichever way it comes. Tools,
reasoning and stored responses are not imitated.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from trivet.sim.asks import Ask, RefusedError, parse_chat
from trivet.sim.forms import Choice, _Base
from trivet.sim.settings import SimSettings

_OF_BOTH = (
    "model",
    "stream",
    "temperature",
    "cache_salt",
    "kv_transfer_params",
    "ignore_eos",
    "stop_token_ids",
    "stop",
)


def parse_response(body: Mapping[str, Any], settings: SimSettings, _: str | None) -> Ask:
    """``/v1/responses``; its id is in the body, not in a header.

    Raises:
        RefusedError: vLLM would refuse it.
    """
    told = body.get("input")
    messages = [{"role": "user", "content": told}] if isinstance(told, str) else told
    if instructions := body.get("instructions"):
        messages = [{"role": "system", "content": instructions}, *(messages or ())]
    if previous := body.get("previous_response_id"):
        message = f"Response with id '{previous}' not found."
        raise RefusedError(message, status=404, kind="invalid_request_error", param="response_id")
    chat = {name: body[name] for name in _OF_BOTH if body.get(name) is not None}
    if (limit := body.get("max_output_tokens")) is not None:
        chat["max_tokens"] = limit
    ask = parse_chat(chat | {"messages": messages}, settings, None)
    return replace(ask, name=str(body.get("request_id") or f"resp_{uuid.uuid4().hex}"))


def parse_messages(body: Mapping[str, Any], settings: SimSettings, base_id: str | None) -> Ask:
    """``/v1/messages``.

    Raises:
        RefusedError: vLLM would refuse it.
    """
    messages = body.get("messages")
    if (system := body.get("system")) and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    if body.get("max_tokens") is None:
        raise RefusedError("1 validation error:\n  Field required", param="body.max_tokens")
    chat = {name: body[name] for name in _OF_BOTH if body.get(name) is not None and name not in ("stop", "ignore_eos")}
    if stop := body.get("stop_sequences"):
        chat["stop"] = stop
    return parse_chat(chat | {"messages": messages, "max_tokens": body["max_tokens"]}, settings, base_id)


def _named(value: Mapping[str, Any]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


class ResponseForm(_Base):
    """``/v1/responses``."""

    done = b""

    def __init__(self, ask: Ask, settings: SimSettings) -> None:
        super().__init__(ask, settings)
        self._number = 0
        self._said: list[str] = []
        self._item = f"msg_{uuid.uuid4().hex}"

    def opening(self) -> bytes:
        """See ``Form``."""
        begun = self._response([], "in_progress", None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def begin(self) -> bytes:
        """See ``Form``."""
        item = {"id": self._item, "type": "message", "role": "assistant", "content": [], "status": "in_progress"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._event("response.output_item.added", item=item, output_index=0) + self._event(
            "response.content_part.added", part=part, item_id=self._item, output_index=0, content_index=0
        )

    def event(self, choice: Choice) -> bytes:
        """See ``Form``."""
        choice.sent = len(choice.tokens)
        assert choice.text is not None
        if not (said := choice.text.delta(finished=choice.is_over)):
            return b""
        self._said.append(said)
        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", delta=said, logprobs=[], **where)

    def finish(self, choices: Sequence[Choice], cached_tokens: int | None) -> bytes:
        """See ``Form``."""
        response = self._ended(choices[0], "".join(self._said), cached_tokens, None)
        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        return self._event("response.output_text.done", text="".join(self._said), **where) + self._event(
            "response.completed", response=response
        )

    def failed(self) -> bytes | None:
        """See ``Form``."""
        return None

    def whole(
        self, choices: Sequence[Choice], cached_tokens: int | None, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """See ``Form``."""
        assert choices[0].text is not None
        return self._ended(choices[0], choices[0].text.delta(finished=True), cached_tokens, params)

    def _ended(self, choice: Choice, said: str, cached: int | None, params: Mapping[str, Any] | None) -> dict[str, Any]:
        usage = {
            "input_tokens": len(choice.prompt),
            "input_tokens_details": {
                "cached_tokens": cached or 0,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": len(choice.tokens),
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": len(choice.prompt) + len(choice.tokens),
        }
        part: dict[str, Any] = {"type": "output_text", "text": said, "annotations": [], "logprobs": None}
        item = {"id": self._item, "type": "message", "role": "assistant", "content": [part], "status": "completed"}
        status = "incomplete" if choice.end == "length" else "completed"
        return self._response([item], status, usage) | {"kv_transfer_params": params}

    def _response(self, output: list[dict[str, Any]], status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self._ask.name,
            "created_at": self._created,
            "object": "response",
            "model": self._ask.model,
            "output": output,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "parallel_tool_calls": True,
            "tool_choice": "none",
            "tools": [],
            "usage": usage,
        }

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return _named({"type": kind, "sequence_number": number, **more})


class MessagesForm(_Base):
    """``/v1/messages``."""

    done = _named({"type": "message_stop"})

    def begin(self) -> bytes:
        """See ``Form``."""
        message: dict[str, Any] = {
            "id": self._ask.name,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._ask.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._ask.prompts[0]), "output_tokens": 0},
        }
        block = {"type": "text", "text": ""}
        return _named({"type": "message_start", "message": message}) + _named(
            {"index": 0, "type": "content_block_start", "content_block": block}
        )

    def event(self, choice: Choice) -> bytes:
        """See ``Form``."""
        choice.sent = len(choice.tokens)
        assert choice.text is not None
        if not (said := choice.text.delta(finished=choice.is_over)):
            return b""
        return _named({"index": 0, "type": "content_block_delta", "delta": {"type": "text_delta", "text": said}})

    def finish(self, choices: Sequence[Choice], cached_tokens: int | None) -> bytes:
        """See ``Form``."""
        reason, sequence = _stop_of(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage_of(choices[0], cached_tokens)
        return _named({"index": 0, "type": "content_block_stop"}) + _named(
            {"type": "message_delta", "delta": delta, "usage": usage}
        )

    def failed(self) -> bytes | None:
        """See ``Form``."""
        return _named({"type": "error", "error": {"type": "internal_error", "message": "Internal server error"}})

    def whole(
        self, choices: Sequence[Choice], cached_tokens: int | None, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """See ``Form``."""
        choice = choices[0]
        assert choice.text is not None
        reason, sequence = _stop_of(choice)
        facts = {
            "id": self._ask.name,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": choice.text.delta(finished=True)}],
            "model": self._ask.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage_of(choice, cached_tokens),
            "kv_transfer_params": params,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _usage_of(self, choice: Choice, cached_tokens: int | None) -> dict[str, int]:
        usage = {"output_tokens": len(choice.tokens), "input_tokens": len(choice.prompt)}
        if cached_tokens is not None and self._settings.enable_prompt_tokens_details:
            usage |= {"cache_read_input_tokens": cached_tokens, "input_tokens": len(choice.prompt) - cached_tokens}
        return usage


def _stop_of(choice: Choice) -> tuple[str | None, str | None]:
    """Anthropic's ``stop_reason`` and ``stop_sequence``; vLLM has none for what an engine aborted."""
    if choice.end == "length":
        return "max_tokens", None
    if choice.end != "stop":
        return None, None
    return ("stop_sequence", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("end_turn", None)
