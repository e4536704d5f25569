"""The bodies that legs of the text plane send. Pure functions of the client's own.

The decode leg is the client's body as it came, byte for byte, with the connector's parameters added. The prefill leg
is the same body, rewritten so that it makes one token and nothing in it could be refused beside that. Rules, and why
(vLLM 0.30 to 0.32): what shapes the prompt stays (messages, tools, template arguments, ``response_format``, which some
models are told of in their prompt); what only shapes the answer goes.

``/v1/responses`` and ``/v1/messages`` take ``kv_transfer_params`` and answer with them, streamed no more than the
others do. They know no ``min_tokens``: the first has its end of sequence ignored instead, the second may end with its
first token, and hand nothing over with NixlConnector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from trivet.surface.streams import MESSAGES, RESPONSES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_ONLY_THE_ANSWER = (
    "stream_options",
    "min_tokens",
    "logprobs",
    "logprob_token_ids",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "echo",
    "best_of",
    "use_beam_search",
    "return_token_ids",
)

_ONLY_THE_RESPONSE = (
    "enable_response_messages",
    "include",
    "stop",
    "stop_token_ids",
    "top_logprobs",
)
_TOOLS_OF_CLIENTS = ("custom", "function", "namespace")
"""Kinds of tools of ``/v1/responses`` that a client calls. An engine calls the others by itself and generates again
behind them, with the same transfer parameters for another prompt."""


def why_unsplittable(path: str, body: object) -> str | None:
    """Why a request must be served colocated on this plane, or None.

    One prefill leg hands over the KV of one prompt, to be read once.
    """
    if path not in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        return f"{path} is not split on the text plane"
    if not isinstance(body, Mapping):
        return "the body is no JSON object"
    if body.get("kv_transfer_params") is not None:
        return "the client steers the transfer"
    if path == RESPONSES:
        return _why_unsplittable_response(body)
    if path == MESSAGES:
        return _why_unsplittable_messages(body)
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            return f"{name} above 1 on the text plane"
    if body.get("use_beam_search"):
        return "beam search"
    of_the_prompt = body.get("prompt_logprobs") is not None or body.get("prompt_logprob_token_ids") is not None
    # vLLM makes ``prompt_logprobs`` of an echo in any chat, and of one with log-probabilities in a completion
    if of_the_prompt or (body.get("echo") and (path == CHAT or body.get("logprobs") is not None)):
        return "log-probabilities of the prompt on the text plane"
    if body.get("truncate_prompt_tokens") is not None:
        return "truncation, which depends on the answer's length, on the text plane"
    if body.get("prompt_embeds") is not None:
        return "prompt embeddings"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt):
        return "several prompts on the text plane"
    return None


def _why_unsplittable_response(body: Mapping[str, Any]) -> str | None:
    if body.get("previous_response_id") is not None or body.get("background"):
        return "it needs a stored response"
    if body.get("truncation", "disabled") != "disabled":  # null truncates as well
        return "truncation, which depends on the answer's length, on the text plane"
    tools = body.get("tools")
    if any(not isinstance(one, Mapping) or one.get("type") not in _TOOLS_OF_CLIENTS for one in _items(tools)):
        return "tools that an engine calls by itself"
    return None


def _why_unsplittable_messages(body: Mapping[str, Any]) -> str | None:
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "tool":
        return "a forced tool call, of which one token is none"  # vLLM parses its arguments, and fails
    for message in _items(body.get("messages")):
        for block in _items(message.get("content") if isinstance(message, Mapping) else None):
            if isinstance(block, Mapping) and block.get("type") == "tool_use" and not block.get("id"):
                return "a tool call without an id"  # vLLM makes one of the time, for the prompt
    return None


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def prefill_text_body(path: str, body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body of a prefill leg: the prompt as it is, and one token after it."""
    steered = {"stream": False, "kv_transfer_params": None if params is None else dict(params)}
    if path == RESPONSES:
        kept = {name: value for name, value in body.items() if name not in _ONLY_THE_RESPONSE}
        return kept | steered | {"max_output_tokens": 1, "ignore_eos": True, "store": False}
    if path == MESSAGES:
        kept = {name: value for name, value in body.items() if name != "stop_sequences"}
        if isinstance(thinking := kept.get("thinking"), Mapping) and thinking.get("type") == "enabled":
            del kept["thinking"]  # a budget, which must be below max_tokens; the prompt is the same
        return kept | steered | {"max_tokens": 1}
    kept = {name: value for name, value in body.items() if name not in _ONLY_THE_ANSWER}
    kept |= steered | {"n": 1, "max_tokens": 1, "min_tokens": 1}
    if "max_completion_tokens" in body:  # wins over max_tokens
        kept["max_completion_tokens"] = 1
    return kept


def with_field(raw: bytes, name: str, value: object) -> bytes:
    """A JSON object's text with one more field at its end; all else stays as it is, byte for byte.

    Of a name that is there already, the last one counts (so in Python's parser, which vLLM reads bodies with).
    """
    end = raw.rindex(b"}")
    has_fields = raw[:end].rstrip()[-1:] != b"{"
    field = orjson.dumps({name: value})[1:-1]
    return raw[:end] + (b"," if has_fields else b"") + field + raw[end:]
