"""Fast tokenizers in the place of the reference, where they are shown to give the same ids.

The reference is the ``tokenizers`` library as ``transformers`` set it up. Others are many times faster and nearly the
same: what tells them apart is which characters their tables call letters, digits and blanks, where the patterns by
which a text is split begin and end, and what a text that looks like an added token becomes. So candidates are compared
at start, for the tokenizer at hand:

- every character by itself, in a few surroundings (of long runs of like characters, some);
- every three kinds of characters in a row (``kinds``);
- ``hard_texts``. A text with a character or three kinds at which ids differ goes to the reference ever after; of all
  others one that is not the same, and the candidate is not used at all.

The fastest of those that pass is used. While it serves, one text in ``CHECK_EVERY`` (of a long one, a piece) goes to
the reference as well. If ids differ, the candidate is not asked again, and the log says so. (Not for which text: what
clients write is not logged.)
"""

from __future__ import annotations

import bisect
import functools
import importlib
import importlib.metadata
import itertools
import logging
import random
import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from trivet.render.kinds import BASIC_KINDS, Guard, Row, is_meaningless, row_texts
from trivet.render.spellings import spellings

logger = logging.getLogger(__name__)

Reference = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Texts to their ids, without what a tokenizer adds at a text's ends."""
Encode = Callable[[str], Sequence[int]]

NOT_INSTALLED = "is not installed"
CHECK_EVERY = 1000
"""Of so many texts one is tokenized twice."""
_BASIC = frozenset(map(chr, range(32, 127))) | {"\n", "\t"}
_ROWS = 300
"""Of some 17,000."""
_LONG_TEXT = 1000
_LONGEST_TEXT = 10_000
"""Between the two, speeds are compared by a text. The longer ones are of one kind of character each."""
_UNLIKE = 4096
"""A candidate that differs at more characters has other tables altogether."""
_GROUP = 64
_PATIENCE = 10
"""A candidate that takes so many times longer over a text than the reference would be a way to stop the service."""
_GRACE_S = 0.2
_FAULTS = 10
"""A text that it cannot take is one text; a client must not be able to cost all others the speed with it."""
_CHECKED_CHARACTERS = 4096
"""Nothing longer is tokenized twice, as that would be felt. Nor is a fault with a longer text counted: patterns that
look back have limits (fastokens: a million blanks), and any client may send that."""


def _fastokens(definition: str) -> Encode:
    encode = importlib.import_module("fastokens._native").Tokenizer.from_json_str(definition).encode
    return lambda text: encode(text, False).ids


def _gigatoken(definition: str) -> Encode:
    encode = importlib.import_module("gigatoken").Tokenizer.from_json(definition).encode
    encode("x")  # where several threads ask for the first time at once, some get "Already borrowed" (0.10)
    return lambda text: encode(text).tolist()


CANDIDATES: Mapping[str, Callable[[str], Encode]] = {
    "fastokens": _fastokens,
    "gigatoken": _gigatoken,
}
"""By name; each is given ``tokenizer.json``. docs/render.md says what they and others were found to be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a candidate is not asked for."""

    unlike: frozenset[str] = frozenset()
    """Characters of which texts are the reference's."""
    meaningless: bool = False
    """Whether code points that are not assigned, and private ones, are so as well: with one of them, all, as only some
    are looked at."""
    rows: frozenset[Row] = frozenset()
    """Three kinds in a row, likewise."""


class FastTokenizer:
    """A candidate that has passed."""

    def __init__(
        self,
        name: str,
        encode: Encode,
        reference: Reference,
        limits: Limits | None = None,
        spelling: int = 0,
        marks: Collection[str] = (),
    ) -> None:
        """
        Args:
            marks: the tokenizer's added tokens, at which it cuts texts; see ``Guard``.
        """
        self.name = name
        self.spelling = spelling
        """Which of ``spellings`` it has read."""
        self.limits = limits or Limits()
        self.distrust: str | None = None
        """Why it is not asked any more, or None."""
        self.left: Callable[[], None] = lambda: None
        """Called when it is not: what it made is not to be trusted either."""
        self._faults = 0
        self._encode, self._reference = encode, reference
        self._guard = guard_of(self.limits, marks)
        self._count = itertools.count(1)

    def __call__(self, text: str) -> Sequence[int]:
        """The ids of a text, without what a tokenizer adds at its ends."""
        return self.ask(text) if self.takes(text) else self._reference([text])[0]

    def ask(self, text: str) -> Sequence[int]:
        """The ids of a text that it is known to take."""
        if self.distrust is not None:
            return self._reference([text])[0]
        try:
            ids = self._encode(text)
            if next(self._count) % CHECK_EVERY == 0:
                self._check(text, ids)
        except BaseException as error:
            if not _is_fault(error):
                raise
            proper = self._reference([text])[0]  # which may raise as well: half a surrogate pair is no text to anybody
            if len(text) <= _CHECKED_CHARACTERS:
                self._faults += 1
                if self._faults >= _FAULTS:
                    self._leave(f"{self._faults} faults, the last {type(error).__name__}")
            return proper
        return ids if self.distrust is None else self._reference([text])[0]

    def _check(self, text: str, ids: Sequence[int]) -> None:
        if len(text) > _CHECKED_CHARACTERS:
            begin = random.randrange(len(text) - _CHECKED_CHARACTERS)
            text = text[begin : begin + _CHECKED_CHARACTERS]
            if not self.takes(text):  # it begins and ends elsewhere
                return
            ids = self._encode(text)
        if list(self._reference([text])[0]) != list(ids):
            self._leave(f"other ids for a text of {len(text)} characters")

    def takes(self, text: str) -> bool:
        """Whether a text is none of those that are the reference's."""
        return self._guard.passes(text)

    def _leave(self, why: str) -> None:
        self.distrust = why
        self.left()
        logger.error("%s gave %s; the reference tokenizes from now on", self.name, why)


@dataclass(frozen=True, slots=True)
class Choice:
    """What came of the comparison."""

    fast: FastTokenizer | None
    refused: Mapping[str, str]
    """Why not, for each candidate that was looked at and is not used."""


def choose(
    definition: str, reference: Reference, texts: Sequence[str], names: Sequence[str] = tuple(CANDIDATES)
) -> Choice:
    """The fastest candidate that is shown to give the reference's ids. Takes seconds.

    Args:
        definition: ``tokenizer.json``, as ``Tokenizer.to_str`` gives it.
        texts: to be compared over: ``hard_texts``.
    """
    refused: dict[str, str] = {}
    passed: list[tuple[float, FastTokenizer]] = []
    tables: Mapping[str, Sequence[int]] | None = None
    written = spellings(definition)
    for name, spelling in itertools.product(names, range(len(written))):
        encode = load(name, written[spelling])
        if isinstance(encode, str):
            refused[name] = encode
            continue
        if tables is None:
            tables = dict(zip(_groups(), reference([_around(one) for one in _groups()]), strict=True))
        try:
            unlike, meaningless = _unlike(encode, reference, tables)
            limits = Limits(unlike, meaningless, frozenset(_rows(encode, reference, unlike, meaningless)))
            took_s = _pass(encode, reference, texts, limits)
        except _Differs as differs:
            refused[name] = str(differs)
        except BaseException as error:
            if not _is_fault(error):
                raise
            refused[name] = f"failed ({_in_a_line(error)})"
        else:
            passed.append((took_s, FastTokenizer(name, encode, reference, limits, spelling)))
    if not passed:
        return Choice(None, refused)
    _, fast = min(passed, key=lambda one: one[0])
    others = {one.name for _, one in passed} - {fast.name}
    refused = {name: why for name, why in refused.items() if name not in (fast.name, *others)}
    return Choice(fast, refused | dict.fromkeys(sorted(others), f"is equal and slower than {fast.name}"))


def load(name: str, definition: str) -> Encode | str:
    """A candidate for a tokenizer, or why there is none."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
    try:
        return CANDIDATES[name](definition)
    except BaseException as error:
        if not _is_fault(error):
            raise
        return f"cannot read it ({_in_a_line(error)})"


class _Differs(Exception):  # noqa: N818  (a verdict)
    pass


def guard_of(limits: Limits, marks: Collection[str] = ()) -> Guard:
    """What looks for that in texts; ``marks`` as for ``Guard``."""
    return Guard(limits.unlike, limits.rows, meaningless=limits.meaningless, marks=marks)


def _unlike(encode: Encode, reference: Reference, tables: Mapping[str, Sequence[int]]) -> tuple[frozenset[str], bool]:
    """Characters at which ids differ, and whether they do at some without a meaning.

    Raises:
        _Differs: too many, or those of which every text is made.
    """
    unlike: set[str] = set()
    for group, ids in tables.items():
        if _gives(encode, _around(group), ids):
            continue
        each = reference([_around(one) for one in group])
        found = [one for one, proper in zip(group, each, strict=True) if not _gives(encode, _around(one), proper)]
        if not found:  # together only
            raise _Differs(f"gives other ids for {_shown(_around(group))}")
        unlike.update(found)
        if basic := sorted(_BASIC.intersection(found)):
            raise _Differs(f"gives other ids for texts with {basic[0]!r}")
        if sum(not is_meaningless(one) for one in unlike) > _UNLIKE:
            raise _Differs(f"gives other ids at more than {_UNLIKE} characters")
    meant = frozenset(one for one in unlike if not is_meaningless(one))
    return meant, len(meant) < len(unlike)


def _gives(encode: Encode, text: str, ids: Sequence[int]) -> bool:
    try:
        return list(encode(text)) == list(ids)
    except Exception:  # it says so itself: a byte without a token, say
        return False


def _rows(encode: Encode, reference: Reference, unlike: frozenset[str], meaningless: bool) -> set[Row]:
    """Three kinds in a row at which ids differ.

    Raises:
        _Differs: those of which every text is made, or too many.
    """
    rows: dict[str, Row] = {}
    for row, text in row_texts(unlike, meaningless=meaningless):
        rows.setdefault(text, row)
    found: set[Row] = set()
    for (text, row), proper in zip(rows.items(), reference(list(rows)), strict=True):
        if row not in found and list(encode(text)) != list(proper):
            if BASIC_KINDS.issuperset(row):
                raise _Differs(f"gives other ids for {_shown(text)}")
            found.add(row)
    if len(found) > _ROWS:
        raise _Differs(f"gives other ids where more than {_ROWS} kinds of characters meet")
    return found


def _pass(encode: Encode, reference: Reference, texts: Sequence[str], limits: Limits) -> float:
    """Compares over hard texts, and says how much CPU time the long ones took, in seconds.

    Raises:
        _Differs: it does.
    """
    guard = guard_of(limits)
    fit = [fit for text in texts if guard.passes(fit := guard.without_unlike(text))]
    fit.sort(key=len)
    short = bisect.bisect_right(fit, _LONG_TEXT, key=len)
    proper = dict(zip(fit[:short], reference(fit[:short]), strict=True))
    whole_s = 0.0
    for text in fit:
        started_s = time.process_time()
        ids = proper[text] if text in proper else reference([text])[0]
        patience_s = _GRACE_S + _PATIENCE * (time.process_time() - started_s)
        started_s = time.process_time()
        same = _same(encode, text, ids)
        took_s = time.process_time() - started_s
        if not same:
            raise _Differs(f"gives other ids for {_shown(text)}")
        if took_s > patience_s:
            raise _Differs(f"is slow on {_shown(text)} ({len(text)} characters)")
        whole_s += took_s if _LONG_TEXT < len(text) <= _LONGEST_TEXT else 0.0
    return whole_s


def _same(encode: Encode, text: str, ids: Sequence[int]) -> bool:
    try:
        return list(encode(text)) == list(ids)
    except BaseException as error:
        if len(text) > _LONGEST_TEXT and _is_fault(error):  # then the reference is asked
            return True
        raise


def _around(characters: str) -> str:
    """Characters in what they may stand beside, and between what is one token if they are nothing."""
    return "".join(
        f"a{one}b {one}{one} {one}1\n {one}\n{one} 's{one}.{one}\n\n-{one}. {one}(th{one}e" for one in characters
    )


_LONG_RUN = 256
"""More such characters in a row are ideographs or syllables, or none at all: all are alike."""
_STEPS: Mapping[str, int] = {"Lo": 16, "Cn": 512, "Co": 512}


@functools.cache
def _groups() -> Sequence[str]:
    """Characters to be looked at, some at a time. Of long runs of like ones: both ends, and some between."""
    wanted: list[str] = []
    valid = (chr(code) for code in range(sys.maxunicode + 1) if not _SURROGATES[0] <= code <= _SURROGATES[1])
    for (kind, _), run in itertools.groupby(valid, key=lambda one: (unicodedata.category(one), ord(one) >> 12)):
        alike = list(run)
        step = _STEPS.get(kind, 1)
        wanted += alike if len(alike) <= _LONG_RUN else [*alike[:8], *alike[8:-8:step], *alike[-8:]]
    return tuple("".join(wanted[begin : begin + _GROUP]) for begin in range(0, len(wanted), _GROUP))


_SURROGATES = (0xD800, 0xDFFF)


def _is_fault(error: BaseException) -> bool:
    """Whether a library has failed. What Rust raises when it breaks is no ``Exception``, and each has its own."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
