"""Token ids of text, put together from segments that were tokenized before.

A tokenizer of the ``tokenizers`` library first cuts a text at its added tokens (``<|im_start|>`` and the like), and
what lies between two of them never meets the rest again: normalizer, pre-tokenizer and model each see one segment
(``AddedVocabulary::extract_and_normalize`` and ``TokenizerImpl::do_pre_tokenize`` in that library's source). So ids of
a segment are the same in every text, and of a conversation that grows only what is new has to be tokenized.

Where a tokenizer's rules could reach over an added token, or are not known here, ``Unsuitable`` says which, and nothing
is cut. What stands first in a text may have rules of its own (``Metaspace`` with ``prepend_scheme: first``): it is
tokenized where it stands, and every other segment behind a token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ENTRY_BYTES = 256
"""Of a segment, beside its characters and ids: dictionary entry, heads of text and list."""
_ID_BYTES = 40
"""A number of its own and the reference to it. To share equal ones takes a fifth of that, and three times as long to
write them as JSON, as they then lie all over the memory."""

Encode = Callable[[str], Sequence[int]]
"""A text's ids, without what a tokenizer adds at a text's ends."""


class Unsuitable(Exception):  # noqa: N818  (it is an answer, not an error)
    """Why texts of a tokenizer cannot be cut, in a few words."""


_NORMALIZERS = (
    "Sequence BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Strip StripAccents"
)
_PRE_TOKENIZERS = (
    "Sequence BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation Split "
    "UnicodeScripts Whitespace WhitespaceSplit"
)
_POST_PROCESSORS = frozenset(("Sequence", "BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"))
_MODELS = "BPE Unigram WordPiece WordLevel"
_KNOWN: Mapping[str, frozenset[str]] = {
    "normalizer": frozenset(_NORMALIZERS.split()),
    "pre_tokenizer": frozenset(_PRE_TOKENIZERS.split()),
    "model": frozenset(_MODELS.split()),
}
"""Parts of tokenizers that look at one segment at a time, as of ``tokenizers`` 0.23."""


class Rules:
    """Where texts of one tokenizer may be cut."""

    def __init__(self, definition: str) -> None:
        """
        Args:
            definition: ``tokenizer.json``, as ``Tokenizer.to_str`` gives it.

        Raises:
            Unsuitable: nowhere.
        """
        told = json.loads(definition)
        _check(told)
        plain: dict[str, int] = {}
        odd: list[str] = []
        for token in told["added_tokens"]:
            content = token["content"]
            if token["normalized"] or not content:
                continue  # looked for in each segment by itself, behind its normalizing
            if token["lstrip"] or token["rstrip"] or token["single_word"]:
                odd.append(content)  # takes blanks from its neighbours, or is none beside letters
            else:
                plain[content] = int(token["id"])
        every = (*plain, *odd)
        by_length = sorted(plain, key=len)
        marks = (one for one in by_length if not any(other != one and other.startswith(one) for other in every))
        first: str | None = None
        joint: str | None = None
        for one in marks:  # hundreds of tokens are compared with thousands, unless the first will do
            first = first or one
            if not any(_ends_in(other, one) for other in every):
                joint = one
                break
        if first is None:
            raise Unsuitable("it has no token at which a text can be cut")
        self._every, self._joints = every, dict[str, bool]()
        self._cuts = re.compile(f"({_any_of(plain)})")
        self._odd = re.compile(_any_of(odd)) if odd else None
        self.ids: Mapping[str, int] = plain
        """Ids of the tokens at which texts are cut, by their text."""
        self.mark = joint or first
        """One of them, which is no beginning of another: segments are tokenized behind it."""
        self.joins = joint is not None
        """Whether a segment before it ends where it begins, whatever the segment is: it can stand between two."""

    def joins_at(self, token: str) -> bool:
        """Whether texts end where this token begins: no other token reaches over its beginning, whatever they are."""
        known = self._joints.get(token)
        if known is None:
            known = self._joints[token] = not any(_ends_in(other, token) for other in self._every)
        return known

    def cut(self, text: str) -> list[str] | None:
        """The segments of a text and, at odd places, the tokens between them; None if it is not to be cut."""
        if self._odd is not None and self._odd.search(text) is not None:
            return None
        return self._cuts.split(text)


def _ends_in(token: str, mark: str) -> bool:
    """Whether a token can begin in what stands before the mark and end in the mark, or behind it."""
    if token != mark and mark in token:
        return True
    return any(token[-length:] == mark[:length] for length in range(1, min(len(token), len(mark) + 1)))


_Node = dict[str, "_Node"]


def _any_of(contents: Iterable[str]) -> str:
    """An expression that finds what the library's search does (``MatchKind::LeftmostLongest``).

    Written as a tree of common beginnings: with an alternation of 6,400 tokens, a text full of ``<`` takes a second.
    """
    root: _Node = {}
    for content in contents:
        node = root
        for letter in content:
            node = node.setdefault(letter, {})
        node[""] = {}  # one ends here
    return _expression(root)


def _expression(node: _Node) -> str:
    branches = []
    for letter, behind in node.items():
        if not letter:
            continue
        written = re.escape(letter)
        while len(behind) == 1 and "" not in behind:  # no fork, no group
            ((letter, behind),) = behind.items()
            written += re.escape(letter)
        branches.append(written + _expression(behind))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + ("?" if "" in node else "")  # greedy: the longer one first


def _check(told: Mapping[str, Any]) -> None:
    """Looks for what is not the same in every text.

    Raises:
        Unsuitable: there is something.
    """
    if told.get("truncation") or told.get("padding"):
        raise Unsuitable("it cuts or fills texts to a length")
    for place, known in _KNOWN.items():
        for kind in _kinds(told.get(place)):
            if kind not in known:
                raise Unsuitable(f"its {place.replace('_', '-')} {kind} is not known here")
    for part in _parts(told.get("post_processor")):
        if part["type"] not in _POST_PROCESSORS:
            raise Unsuitable(f"its post-processor {part['type']} is not known here")
        if sum("Sequence" in piece for piece in part.get("single", [{"Sequence": "A"}])) != 1:
            raise Unsuitable("its post-processor does not give a text once")
    model = told["model"]
    if model.get("dropout"):
        raise Unsuitable("it merges at random (dropout)")
    if model.get("alpha") or model.get("nbest_size"):
        raise Unsuitable("it samples")


def _kinds(part: Mapping[str, Any] | None) -> Iterator[str]:
    return (one.get("type", "BPE") for one in _parts(part))  # a model without a type is an old BPE


def _parts(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    yield part
    for name in ("normalizers", "pretokenizers", "processors"):
        for one in part.get(name, ()):
            yield from _parts(one)


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What a cache holds and has done."""

    bytes: int
    segments: int
    asked_characters: int
    """Of all segments that were asked for, but for those that stand first in a text."""
    found_characters: int
    """Those of them that were there."""


class SegmentCache:
    """Ids of segments, the newest up to so many bytes. For several threads."""

    def __init__(
        self,
        rules: Rules,
        encode: Encode,
        capacity_bytes: int,
        quick: tuple[Callable[[str], bool], Encode] | None = None,
    ) -> None:
        """
        Args:
            encode: the tokenizer; segments are given to it behind ``rules.mark``.
            quick: one that takes some texts only, and which; it is asked for many segments at once.
        """
        self._rules, self._encode, self._capacity = rules, encode, capacity_bytes
        self._takes, self._quick = quick or (_any_text, encode)
        self._kept: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._generation = 0
        """Raised when all is forgotten: what was made before is then not kept any more."""
        self._bytes = self._found = self._asked = 0

    def forget(self) -> None:
        """Drops everything, what is being made just now as well."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0
            self._generation += 1

    @property
    def generation(self) -> int:
        """Another one each time that all is forgotten."""
        return self._generation

    @property
    def figures(self) -> CacheFigures:
        """As of now."""
        with self._lock:
            return CacheFigures(self._bytes, len(self._kept), self._asked, self._found)

    def ids(self, text: str) -> list[int] | None:
        """The ids of a text, without what a tokenizer adds at its ends; None if it cannot be cut."""
        parts = self._rules.cut(text)
        if parts is None:
            return None
        segments = parts[2::2]
        if (found := self._look_up(segments)) is None:
            known = self._known(segments)
            found = [known[segment] for segment in segments]
        ids, of_cuts = list(self._encode(parts[0])) if parts[0] else [], self._rules.ids
        for token, behind in zip(parts[1::2], found, strict=True):
            ids.append(of_cuts[token])
            ids += behind
        return ids

    def ids_of_parts(self, texts: Sequence[str]) -> list[list[int] | None]:
        """The ids of each of some texts in any text that is made of such ones; None where that depends on it.

        A text that begins with a token over whose beginning no other reaches is cut there whatever stands before it.
        So put together, such texts are cut as they are one by one.
        """
        cut = [self._rules.cut(text) for text in texts]
        own = [
            parts if parts and len(parts) > 1 and not parts[0] and self._rules.joins_at(parts[1]) else None
            for parts in cut
        ]
        known = self._known([segment for parts in own if parts for segment in parts[2::2]])
        of_cuts = self._rules.ids
        made: list[list[int] | None] = []
        for parts in own:
            if parts is None:
                made.append(None)
                continue
            ids: list[int] = []
            for token, behind in zip(parts[1::2], parts[2::2], strict=True):
                ids.append(of_cuts[token])
                ids += known[behind]
            made.append(ids)
        return made

    def _look_up(self, segments: Sequence[str]) -> list[Sequence[int]] | None:
        """The ids of each, if they all are there."""
        kept = self._kept
        with self._lock:
            try:
                found = [kept[segment] for segment in segments]
            except KeyError:
                return None
            for segment in dict.fromkeys(segments):
                kept.move_to_end(segment)
            characters = sum(map(len, segments))
            self._asked += characters
            self._found += characters
        return found

    def _known(self, segments: Sequence[str]) -> dict[str, Sequence[int]]:
        """The ids of each, those that are not there made now."""
        known: dict[str, Sequence[int]] = {}
        with self._lock:
            generation = self._generation
            for segment in segments:
                self._asked += len(segment)
                if (ids := self._kept.get(segment)) is not None:
                    self._kept.move_to_end(segment)
                    known[segment] = ids
                    self._found += len(segment)
        missing = [one for one in dict.fromkeys(segments) if one not in known]
        made = dict(zip(missing, self._encode_all(missing), strict=True))
        with self._lock:
            for segment, ids in made.items():
                size = _size(segment, ids)
                if segment in self._kept or size > self._capacity or generation != self._generation:
                    continue
                self._kept[segment] = ids
                self._bytes += size
            while self._bytes > self._capacity:
                self._bytes -= _size(*self._kept.popitem(last=False))
        return known | made

    def _encode_all(self, segments: Sequence[str]) -> Sequence[Sequence[int]]:
        """The ids of each, by one call for all that can be put together."""
        if not self._rules.joins:
            return [self._encode_one(one) for one in segments]
        joined = self._joined(segments)
        if self._takes(joined):
            return self._divided(joined, segments)
        quick = [one for one in segments if self._takes(one)]
        made = dict(zip(quick, self._divided(self._joined(quick), quick), strict=True)) if quick else {}
        return [self._encode_one(one) if (ids := made.get(one)) is None else ids for one in segments]

    def _encode_one(self, segment: str) -> Sequence[int]:
        return list(self._encode(self._rules.mark + segment))[1:]

    def _joined(self, segments: Sequence[str]) -> str:
        return self._rules.mark + self._rules.mark.join(segments)

    def _divided(self, joined: str, segments: Sequence[str]) -> Sequence[Sequence[int]]:
        mark = self._rules.ids[self._rules.mark]
        ids = list(self._quick(joined))
        if ids.count(mark) != len(segments):  # a text of which the model makes the mark's id, by normalizing
            return [self._encode_one(one) for one in segments]
        made, begin = [], 1
        for _ in segments[1:]:
            end = ids.index(mark, begin)
            made.append(ids[begin:end])
            begin = end + 1
        made.append(ids[begin:])
        return made


def _any_text(_: str) -> bool:
    return True


def _size(segment: str, ids: Sequence[int]) -> int:
    wide = 1 if segment.isascii() else 4  # at most: how Python keeps a text depends on its widest character
    return _ENTRY_BYTES + wide * len(segment) + _ID_BYTES * len(ids)
