"""Which requests can be rendered elsewhere: those of which the gateway needs nothing but token ids. Pure functions.

vLLM's front end reads more than ids of some: the prompt's text, the conversation as it was parsed, pictures. Its render
endpoints tell none of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
"""Endpoints that have a ``/render`` below them (``vllm/entrypoints/scale_out/render/api_router.py``)."""


class Local(StrEnum):
    """Why a request is rendered here though there are render servers, and no fault of theirs."""

    INVALID = "invalid"
    """Its body is none that vLLM takes, which vLLM says best."""
    TOKEN_IDS = "token_ids"
    """It has token ids or embeddings: there is nothing to render."""
    MORE_THAN_IDS = "more_than_ids"
    """The answer needs more of the prompt than its ids."""
    MEDIA = "media"
    STORED = "stored"
    """It goes on from a response that this worker keeps."""
    SMALL = "small"
    MODEL = "model"
    """The model's prompts are made in another way: harmony, or an encoder that has one of its own."""
    UNPROVEN = "unproven"
    """No canary could be rendered for this endpoint, so nothing says that servers make the same ids."""
    REFUSED = "refused"
    """A server refused it (400, 404, 422 ...): rendering it here tells the client in vLLM's words."""
    UNFIT = "unfit"
    """A server's answer has more than token ids, or longer ones than the model takes."""
    UNCLAIMED = "unclaimed"
    """vLLM asked for other prompts than those that a server rendered."""


@dataclass(frozen=True, slots=True)
class Portable:
    """A request that can be rendered elsewhere."""

    prompts: int
    texts: tuple[str, ...]
    """By what its prompts are known again: a completion's, all of them; a conversation's last text, if it has any."""


_MORE_THAN_IDS = (
    "echo",  # the prompt's text, and the conversation as it was parsed
    "return_prompt_text",
    "return_token_offsets",
    "return_assistant_tokens_mask",
    "enable_response_messages",
    "truncate_prompt_tokens",
    "use_beam_search",  # vLLM's render endpoints refuse it
    "suffix",  # prompt and suffix become one text
    "kv_transfer_params",  # may carry the ids, which vLLM takes out of it
    "mm_processor_kwargs",
    "media_io_kwargs",
)

_TEXTS = frozenset(
    {
        "text",
        "input_text",
        "output_text",
        "summary_text",
        "reasoning_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
    }
)
"""Kinds of content in which there is nothing but text, in the words of all three APIs."""


def look(path: str, body: bytes) -> Portable | Local:
    """Whether a request can be rendered elsewhere, or why not.

    Args:
        path: one of ``PATHS``.
        body: as the client sent it.
    """
    try:
        value = orjson.loads(body)
        return _look(path, value) if isinstance(value, dict) else Local.INVALID
    except (orjson.JSONDecodeError, RecursionError):  # or what only Python's parser takes, such as NaN
        return Local.INVALID


def _look(path: str, value: Mapping[str, Any]) -> Portable | Local:
    given = (value.get(name) for name in _MORE_THAN_IDS)
    if any(one is not None and one is not False for one in given):
        return Local.MORE_THAN_IDS
    if path == COMPLETIONS:
        return _completion(value)
    if path == RESPONSES:
        if value.get("previous_response_id") is not None:
            return Local.STORED
        if value.get("truncation") not in (None, "disabled"):
            return Local.MORE_THAN_IDS
        return _conversation(value.get("input"))
    if path == MESSAGES:
        if _kind(value.get("thinking")) == "disabled":
            # what becomes of that vLLM's server finds out from the template; its render endpoint does not
            return Local.MORE_THAN_IDS
        if not _only_text(value.get("system")):
            return Local.MEDIA
    return _conversation(value.get("messages"))


def texts_of(messages: Iterable[Any]) -> Iterator[str]:
    """The texts of a conversation, from its end."""
    for message in reversed(list(messages)):
        content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
        yield from _texts(content)


def _completion(value: Mapping[str, Any]) -> Portable | Local:
    if value.get("prompt_embeds") is not None:
        return Local.TOKEN_IDS
    prompt = value.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not prompts:
        return Local.INVALID
    if not all(isinstance(one, str) for one in prompts):
        return Local.TOKEN_IDS
    return Portable(len(prompts), tuple(prompts))


def _conversation(messages: object) -> Portable | Local:
    if isinstance(messages, str):
        return Portable(1, (messages,) if messages else ())
    if not isinstance(messages, list) or not messages:
        return Local.INVALID
    if not all(_is_text(message) for message in messages):
        return Local.MEDIA
    last = next((text for text in texts_of(messages) if text), None)
    return Portable(1, () if last is None else (last,))


def _is_text(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    if (kind := _kind(message)) is not None and kind not in _TEXTS:
        return False
    if message.get("audio") is not None:
        return False
    return _only_text(message.get("content")) and _only_text(message.get("output"))


def _only_text(content: object) -> bool:
    """Whether there are no pictures and the like in a message's content. What is not known counts as such."""
    if content is None or isinstance(content, str):
        return True
    if not isinstance(content, list):
        return False
    return all(isinstance(part, str) or (_kind(part) in _TEXTS and _is_text(part)) for part in content)


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, str):
                yield part
            elif isinstance(part, Mapping):
                text = part.get("text")
                if isinstance(text, str):
                    yield text


def _kind(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if kind is None or isinstance(kind, str) else "of no kind"
