"""What an answer says of its tokens, in the forms of chat and completions, of ``/v1/responses`` and ``/v1/messages``.

They differ in more than names: ``input_tokens`` of ``/v1/messages`` leaves out what was cached, the others count it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

_READ, _CREATED = "cache_read_input_tokens", "cache_creation_input_tokens"
"""Of ``/v1/messages``."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer and of its prompt."""

    prompt_tokens: int
    """All of them, cached ones as well."""
    completion_tokens: int
    cached_tokens: int | None
    """Those of the prompt that were in a prefix cache; None if it is not told."""

    @classmethod
    def parse(cls, value: Any) -> Usage | None:
        """From a usage object in any of the forms; None if there is none, or none that can be read."""
        try:
            if "prompt_tokens" in value or "input_tokens" not in value:
                details, names = value.get("prompt_tokens_details"), ("prompt_tokens", "completion_tokens")
            else:
                details, names = value.get("input_tokens_details"), ("input_tokens", "output_tokens")
            prompt_tokens, completion_tokens = (int(value.get(name) or 0) for name in names)
            cached = (details or {}).get("cached_tokens")
            if _is_messages(value):
                cached = value.get(_READ)
                prompt_tokens += int(cached or 0) + int(value.get(_CREATED) or 0)
            return cls(prompt_tokens, completion_tokens, None if cached is None else int(cached))
        except (AttributeError, TypeError, ValueError, OverflowError):
            return None


def usage_in(value: Mapping[str, Any]) -> MutableMapping[str, Any] | None:
    """The usage object of a whole answer or of a stream's event, wherever its form has it."""
    for holder in (value, value.get("response"), value.get("message")):
        if isinstance(holder, Mapping) and isinstance(usage := holder.get("usage"), MutableMapping):
            return usage
    return None


def put_cached(usage: MutableMapping[str, Any], cached_tokens: int, created_cache_tokens: int | None) -> bool:
    """Puts other counts of cached tokens in the place of those that a usage object tells.

    Args:
        cached_tokens: prompt tokens that were found in a prefix cache.
        created_cache_tokens: those that were added to it; None leaves the count as it is.

    Returns:
        Whether anything is different now. What it does not tell is not added.
    """
    if _is_messages(usage):
        return _put_in_messages(usage, cached_tokens, created_cache_tokens)
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    if not isinstance(details, MutableMapping):
        return False
    told: dict[str, Any] = {"cached_tokens": cached_tokens}
    if created_cache_tokens is not None:
        told |= {"created_cache_tokens": created_cache_tokens, "cache_write_tokens": created_cache_tokens}
    if isinstance(turns := details.get("cached_tokens_per_turn"), list) and len(turns) == 1:
        told["cached_tokens_per_turn"] = [cached_tokens]
    changes = {name: count for name, count in told.items() if details.get(name) not in (None, count)}
    details.update(changes)
    return bool(changes)


def _is_messages(usage: Mapping[str, Any]) -> bool:
    return "input_tokens" in usage and "input_tokens_details" not in usage


def _put_in_messages(usage: MutableMapping[str, Any], cached: int, created: int | None) -> bool:
    whole = Usage.parse(usage)
    if whole is None or whole.cached_tokens is None:
        return False
    before = usage.get(_READ), usage.get(_CREATED)
    usage[_READ] = cached
    if before[1] is not None and created is not None:
        usage[_CREATED] = created
    usage["input_tokens"] = max(0, whole.prompt_tokens - cached - int(usage.get(_CREATED) or 0))
    return before != (usage.get(_READ), usage.get(_CREATED))
