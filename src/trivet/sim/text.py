"""Text and token ids without a tokenizer file.

- Ids 0, 1 and 2 are special (padding, begin, end) and have no text.
- Ids 3 to 258 are bytes: byte ``b`` is ``3 + b``.
- Ids from 259 are words: a space and three syllables of a consonant and a vowel, ``259`` being `` bababa``.

Words are found again as words, all other text is taken byte by byte as UTF-8. So ``decode(encode(text))`` is the
text, answers (which are words) are encoded to the ids they were made of, and a byte of a prompt is a token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any

from trivet.sim.settings import FIRST_WORD

_FIRST_BYTE = 3
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_PLACES = {syllable: place for place, syllable in enumerate(_SYLLABLES)}
_WORDS = len(_SYLLABLES) ** 3
_WORD = re.compile(rf" ((?:[{_CONSONANTS}][{_VOWELS}]){{3}})(?![a-z])")


def piece(token: int) -> bytes:
    """The text of one token as UTF-8; a byte token may be a part of a character."""
    if token >= FIRST_WORD:
        word = token - FIRST_WORD
        if word >= _WORDS:
            return f"<{token}>".encode()
        high, rest = divmod(word, 10000)
        middle, low = divmod(rest, 100)
        return f" {_SYLLABLES[high]}{_SYLLABLES[middle]}{_SYLLABLES[low]}".encode()
    return bytes((token - _FIRST_BYTE,)) if token >= _FIRST_BYTE else b""


def encode(text: str) -> list[int]:
    """The token ids of a text."""
    ids: list[int] = []
    end = 0
    for match in _WORD.finditer(text):
        ids += _bytes(text[end : match.start()])
        word = match.group(1)
        high, middle, low = (_PLACES[word[place : place + 2]] for place in (0, 2, 4))
        ids.append(FIRST_WORD + high * 10000 + middle * 100 + low)
        end = match.end()
    return ids + _bytes(text[end:])


def decode(token_ids: Iterable[int]) -> str:
    """The text of token ids."""
    return b"".join(piece(token) for token in token_ids).decode("utf-8", errors="replace")


def chat_prompt(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt of a chat: each message behind a line that names its role, and a line for the answer.

    Raises:
        ValueError: a message is not one, or holds something else than text.
    """
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("a message is an object with a role")
        parts.append(f"<|{message['role']}|>\n{_content(message.get('content'))}\n")
    return "".join(parts) + "<|assistant|>\n"


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise ValueError("a simulated engine takes text only")


def _bytes(text: str) -> list[int]:
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8", errors="replace")]


class TextStream:
    """Text of a growing answer, with stop strings looked for and held back as vLLM does."""

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False, after_tokens: int = 0) -> None:
        """
        Args:
            stop: strings that end the answer.
            include_stop: whether the answer keeps the one that ended it.
            after_tokens: tokens (``min_tokens``) before which stop strings are not looked for.
        """
        self._stop = stop
        self._include_stop = include_stop
        self._after_tokens = after_tokens
        self._held_back = 0 if include_stop or not stop else max(len(one) for one in stop) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokens = 0
        self._told = 0
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str | None:
        """Takes a token; the stop string that has come with it, or None."""
        new = self._decoder.decode(piece(token))
        self._tokens += 1
        before = len(self.text)
        self.text += new
        if not new or not self._stop or self._tokens <= self._after_tokens:
            return None
        for stop in self._stop:
            found = self.text.find(stop, max(0, before - len(stop) + 1))
            if found >= 0:
                self.text = self.text[: found + len(stop) if self._include_stop else found]
                self.stopped_by = stop
                return stop
        return None

    def delta(self, *, finished: bool) -> str:
        """The text that can go out now and has not yet."""
        if finished and self.stopped_by is None:
            self.text += self._decoder.decode(b"", final=True)
        end = len(self.text) if finished else max(self._told, len(self.text) - self._held_back)
        told, self._told = self._told, end
        return self.text[told:end]
