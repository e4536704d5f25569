"""Kinds of characters that patterns of pre-tokenizers tell apart, and texts in which a row of three of them stands.

A pattern, such as GPT-2's, decides where to split by what stands beside what: contractions (``'s``, ``'ll``), words
with a blank before them, blanks that end before the last one. Libraries that write it as code of their own are wrong,
if they are, at some such place: behind a tab and before ``'s``, say. Three in a row, with what may stand around them,
show it.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping

import numpy as np

Row = tuple[str, str, str]
"""Three kinds, by name."""

_ALONE = {" ": " ", "\t": "tab", "\n": "newline", "\r": "return", "'": "'", "/": "/"}
_ALONE |= dict.fromkeys("sdmt", "sdmt") | dict.fromkeys("lvr", "lvr") | {"e": "e"}
_ALONE |= dict.fromkeys("SDMT", "SDMT") | dict.fromkeys("LVR", "LVR")
"""Characters that patterns name, and the kinds they are."""

_MEMBERS: Mapping[str, str] = {
    " ": " ",
    "tab": "\t",
    "newline": "\n",
    "return": "\r",
    "control blank": "\v\f\x1c\x1f\x85",
    "other blank": "\u00a0\u2003\u2028\u3000",
    "'": "'",
    "/": "/",
    "sdmt": "sdmt",
    "lvr": "lvr",
    "e": "e",
    "SDMT": "SDMT",
    "LVR": "LVR",
    "lower": "abcxyzéßяλ",
    "upper": "ABCXYZÉЯΛ",
    "other letter": "中あ가กअא",
    "modifier": "ʰˈー々",
    "mark": "\u0301\u0308\u0900\u20dd",
    "digit": "0179٣३",
    "other number": "²½①Ⅷ",
    "connector": "_‿",
    "punctuation": '.,;:!?()[]{}"#%&*@\\-“”—、',
    "symbol": "$+<=>^`|~©€→👍",
    "format": "\u200b\u200d\u00ad\ufeff",
    "control": "\x00\x01\x07\x7f",
    "nothing": "\u0378\ue000",
}
"""Some of each kind."""
_BY_CATEGORY: Mapping[str, str] = {
    "Ll": "lower",
    "Lu": "upper",
    "Lt": "upper",
    "Lo": "other letter",
    "Lm": "modifier",
    "Mn": "mark",
    "Mc": "mark",
    "Me": "mark",
    "Nd": "digit",
    "Nl": "other number",
    "No": "other number",
    "Pc": "connector",
    "Cf": "format",
    "Cc": "control",
    "Cn": "nothing",
    "Co": "nothing",
    "Cs": "nothing",
}
_EDGE = "edge"
"""What stands before a text's first character and behind its last."""
_NAMES = (_EDGE, *_MEMBERS)
BASIC_KINDS = frozenset(
    (_EDGE, " ", "newline", "sdmt", "lvr", "e", "SDMT", "LVR", "lower", "upper", "digit", "punctuation")
)
"""Of which nearly every text is made."""
_BEFORE, _BEHIND = ("", "x", " "), ("", "s", "l", "e", "x", " x", "\n")


def kind_of(character: str) -> str:
    """The kind's name."""
    if (alone := _ALONE.get(character)) is not None:
        return alone
    category = unicodedata.category(character)
    if character.isspace():
        return "control blank" if category == "Cc" else "other blank"
    named = _BY_CATEGORY.get(category)
    return named or ("punctuation" if category.startswith("P") else "symbol")


def is_meaningless(character: str) -> bool:
    """Whether it is not assigned, of which tables of several years differ, or private."""
    return unicodedata.category(character) in ("Cn", "Co")


def row_texts(unlike: Collection[str], *, meaningless: bool = False) -> Iterator[tuple[Row, str]]:
    """Every row, in texts: by itself, twice, and where a contraction may begin with all that may follow.

    Args:
        unlike: characters that are in none of the texts.
        meaningless: nor are those without a meaning.
    """
    chance = random.Random(3)
    members = {name: [one for one in those if one not in unlike] for name, those in _MEMBERS.items()} | {_EDGE: [""]}
    inner = [name for name in _MEMBERS if members[name] and not (meaningless and name == "nothing")]
    outer = [_EDGE, *inner]
    for row in ((first, second, third) for first in outer for second in inner for third in outer):
        for _ in range(2):
            three = "".join(chance.choice(members[name]) for name in row)
            yield row, three
            yield row, "x" * (row[0] != _EDGE) + three + " x" * (row[2] != _EDGE)
        if "'" in row:
            befores = _BEFORE if row[0] != _EDGE else ("",)
            behinds = _BEHIND if row[2] != _EDGE else ("",)
            for before, behind in itertools.product(befores, behinds):
                yield row, before + "".join(chance.choice(members[name]) for name in row) + behind


class Guard:
    """Says whether a text has certain characters, or three certain kinds in a row."""

    def __init__(
        self,
        unlike: Collection[str],
        rows: Collection[Row],
        *,
        meaningless: bool = False,
        marks: Collection[str] = (),
    ) -> None:
        """
        Args:
            meaningless: also characters that are not assigned, or private.
            marks: tokens at which tokenizers cut a text before anything else. What stands beside one stands at an edge,
                though the text goes on: a row with an edge is looked for there too, by the marks' own ends.
        """
        self._unlike: np.ndarray | None = None
        if unlike or meaningless:
            self._unlike = _meaningless().copy() if meaningless else np.zeros(sys.maxunicode + 1, np.bool_)
            self._unlike[np.fromiter(map(ord, unlike), np.uint32, len(unlike))] = True
        self._ascii = tuple(sorted(one for one in unlike if one.isascii()))
        self._rows: np.ndarray | None = None
        if rows:
            count = len(_NAMES)
            self._rows = np.zeros(count**3, np.bool_)
            befores = {_EDGE, *(kind_of(one[-1]) for one in marks if one)}
            behinds = {_EDGE, *(kind_of(one[0]) for one in marks if one)}
            for first, second, third in rows:
                for before in befores if first == _EDGE else (first,):
                    for behind in behinds if third == _EDGE else (third,):
                        place = (_NAMES.index(before) * count + _NAMES.index(second)) * count + _NAMES.index(behind)
                        self._rows[place] = True

    def without_unlike(self, text: str) -> str:
        """A text without those characters."""
        unlike = self._unlike
        return text if unlike is None else "".join(one for one in text if not unlike[ord(one)])

    def passes(self, text: str) -> bool:
        """Whether it has none."""
        if self._rows is None and (self._unlike is None or text.isascii()):
            return not any(one in text for one in self._ascii)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        if self._unlike is not None and self._unlike[codes].any():
            return False
        if self._rows is None:
            return True
        kinds, count = np.zeros(len(codes) + 2, np.uint16), len(_NAMES)  # edges have the first number
        kinds[1:-1] = _kinds()[codes]
        rows = (kinds[:-2] * count + kinds[1:-1]) * count + kinds[2:]
        return not self._rows[rows].any()


@functools.cache
def _meaningless() -> np.ndarray:
    codes = range(sys.maxunicode + 1)
    return np.fromiter((is_meaningless(chr(code)) for code in codes), np.bool_, len(codes))


@functools.cache
def _kinds() -> np.ndarray:
    """The number of each code point's kind."""
    numbers = {name: number for number, name in enumerate(_NAMES)}
    return np.fromiter((numbers[kind_of(chr(code))] for code in range(sys.maxunicode + 1)), np.uint16)
