"""Messages as vLLM's parser of chats has understood them, so that a long conversation's old ones are not parsed again.

A message that is a role and a text, and nothing else, comes to the same whatever stands around it: vLLM's own function
(``_parse_chat_message_content`` in its ``chat_utils``) is asked once, and its answer is copied after that.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from trivet.render.apart import is_apart

logger = logging.getLogger(__name__)

_NAME = "_parse_chat_message_content"
_TAKES = ("message", "mm_tracker", "content_format", "interleave_strings", "mm_processor_kwargs")
_KEYS = {"role", "content"}
_ENTRY_CHARACTERS = 512
"""What an entry weighs beside its text."""

Parse = Callable[..., list[dict[str, Any]]]


class Remembered:
    """vLLM's function for one message, with a memory of so many characters. For several threads."""

    def __init__(self, parse: Parse, capacity_characters: int = 8 * 2**20) -> None:
        self.parse = parse
        self._capacity = capacity_characters
        self._kept: OrderedDict[tuple[str, str, str, bool], list[dict[str, str]]] = OrderedDict()
        self._lock = threading.Lock()
        self.characters = 0
        """What is kept weighs so much."""

    def __call__(
        self,
        message: Any,
        mm_tracker: Any,
        content_format: Any,
        interleave_strings: bool,
        mm_processor_kwargs: Any = None,
    ) -> list[dict[str, Any]]:
        """As vLLM's, of which it takes the place."""
        if type(message) is not dict or message.keys() != _KEYS or is_apart():
            return self.parse(message, mm_tracker, content_format, interleave_strings, mm_processor_kwargs)
        role, content = message["role"], message["content"]
        if type(role) is not str or type(content) is not str:
            return self.parse(message, mm_tracker, content_format, interleave_strings, mm_processor_kwargs)
        key = (role, content, content_format, interleave_strings)
        if (known := self._kept.get(key)) is not None:
            return [dict(one) for one in known]
        parsed = self.parse(message, mm_tracker, content_format, interleave_strings, mm_processor_kwargs)
        if all(type(value) is str for one in parsed for value in one.values()):
            self._keep(key, [dict(one) for one in parsed])
        return parsed

    def _keep(self, key: tuple[str, str, str, bool], parsed: list[dict[str, str]]) -> None:
        with self._lock:
            if key in self._kept or _weight(key) > self._capacity:
                return
            self._kept[key] = parsed
            self.characters += _weight(key)
            while self.characters > self._capacity:
                oldest, _ = self._kept.popitem(last=False)
                self.characters -= _weight(oldest)


def _weight(key: tuple[str, str, str, bool]) -> int:
    return _ENTRY_CHARACTERS + len(key[1])


def remember_messages(parse_chat_messages: Callable[..., Any]) -> None:
    """Puts a memory under vLLM's parser of chats, for this process; nothing where that is another one than known here.

    Args:
        parse_chat_messages: vLLM's, which calls the function for one message by its name.
    """
    names = parse_chat_messages.__globals__
    parse = names.get(_NAME)
    if isinstance(parse, Remembered):
        return
    if parse is None or tuple(inspect.signature(parse).parameters) != _TAKES:
        logger.warning("messages are parsed anew at each turn: this vLLM's way to parse one is not known here")
        return
    names[_NAME] = Remembered(parse)
