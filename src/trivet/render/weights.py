"""How much of a request there is to be rendered, so that what is large is not rendered on the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_OBJECT, _ITEM = 64, 8
"""What a message or another object weighs beside its texts, and each value in it: a template's steps for it take about
as long as the tokenizing of so many characters."""
_PLAIN = (int, float, bool, type(None))


def heavier(limit: int, *values: Any) -> bool:
    """Whether values hold more than so many characters, in all their texts and names. Takes no longer for more.

    What is of no kind that JSON makes weighs too much: it may be anything.
    """
    weight, waiting = 0, list(values)
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            weight += len(one)
        elif isinstance(one, Mapping):
            weight += _OBJECT + _ITEM * len(one)
            if weight <= limit:
                waiting += one.values()
                waiting += one.keys()
        elif isinstance(one, list | tuple):
            weight += _ITEM * len(one)
            if weight <= limit:
                waiting += one
        elif not isinstance(one, _PLAIN):
            return True
        if weight > limit:
            return True
    return weight > limit


def is_text(conversation: Sequence[Any]) -> bool:
    """Whether a chat's messages have nothing but text for their contents: nothing is to be fetched or decoded."""
    for message in conversation:
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is None or type(content) is str:
            continue
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            if type(text) is not str:
                return False
    return True
