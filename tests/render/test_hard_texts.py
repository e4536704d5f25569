"""The texts that fast tokenizers must pass: the same each time, and what they are said to be."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from trivet.render import hard_texts, kinds, spellings


def test_they_are_the_same_each_time():
    assert list(hard_texts.hard_texts(["<s>"])) == list(hard_texts.hard_texts(["<s>"]))


def test_blanks_are_of_every_kind_and_none_is_there_twice():
    """As literals most of them had become spaces, which nobody sees."""
    single = [one for one in hard_texts._BLANKS if len(one) == 1]
    assert len(set(hard_texts._BLANKS)) == len(hard_texts._BLANKS)
    assert {"\u00a0", "\u2003", "\u2028", "\u202f", "\u3000", "\ufeff", "\u200b"} <= set(single)
    assert {unicodedata.category(one) for one in single} == {"Zs", "Zl", "Cc", "Cf"}


@pytest.mark.parametrize("module", [hard_texts, kinds, spellings])
def test_no_blank_is_written_as_itself(module):
    source = Path(module.__file__).read_text(encoding="utf-8")
    unseen = {one for one in source if unicodedata.category(one) in ("Zs", "Zl", "Zp", "Cc")}
    assert unseen == {" ", "\n"}


def test_some_are_very_long():
    long = [text for text in hard_texts.hard_texts([]) if len(text) >= 200_000]
    assert len(long) == 5
    assert {" ", "\n", "a"} == {one.pop() for one in map(set, long) if len(one) == 1}
