"""Kinds of characters, and the guard that looks for rows of them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.render.kinds import _MEMBERS, Guard, kind_of, row_texts


@pytest.mark.parametrize("name", _MEMBERS)
def test_members_are_of_their_kind(name):
    assert {kind_of(one) for one in _MEMBERS[name]} == {name}


def test_every_character_is_of_some_kind():
    assert {kind_of(chr(code)) for code in range(sys.maxunicode + 1)} <= set(_MEMBERS)


def test_every_row_has_a_text_and_every_text_its_row():
    rows = set()
    for row, text in row_texts(()):
        kinds = ["edge", *map(kind_of, text), "edge"]
        assert any(tuple(kinds[begin : begin + 3]) == row for begin in range(len(kinds) - 2)), (row, text)
        rows.add(row)
    assert len(rows) == (len(_MEMBERS) + 1) ** 2 * len(_MEMBERS)


def test_no_text_has_a_character_that_is_to_be_left_out():
    assert not any("\v" in text or "é" in text for _, text in row_texts(("\v", "é")))


def test_what_means_nothing_can_be_left_out_as_a_whole():
    guard = Guard((), (), meaningless=True)
    assert guard.passes("Grüße 東京 👍")
    for one in ("\u0378", "\ue000", "\U0003abcd"):
        assert not guard.passes(f"a{one}")
        assert guard.without_unlike(f"a{one}b") == "ab"
    assert not any(one in text for _, text in row_texts((), meaningless=True) for one in "\u0378\ue000")


@settings(deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("ab é1.'\t\n中👍\x0b/_\ud800"), max_size=30),
    unlike=st.sets(st.sampled_from("é\x0b1中"), max_size=2),
    rows=st.sets(st.tuples(*[st.sampled_from(["lower", "tab", "'", " ", "digit", "edge"])] * 3), max_size=4),
)
def test_a_text_passes_if_it_has_none_of_the_characters_and_none_of_the_rows(text, unlike, rows):
    kinds = ["edge", *map(kind_of, text), "edge"]
    has = unlike.intersection(text) or any(tuple(kinds[begin : begin + 3]) in rows for begin in range(len(kinds)))
    assert Guard(unlike, rows).passes(text) is not bool(has)


MARKS = ("<|a|>", "[B]", "word")


@settings(deadline=None)
@given(
    texts=st.lists(st.text(alphabet=st.sampled_from("ab .'1"), max_size=4), min_size=2, max_size=4),
    marks=st.lists(st.sampled_from(MARKS), min_size=3, max_size=3),
    rows=st.sets(st.tuples(*[st.sampled_from(["lower", "'", " ", "digit", "edge"])] * 3), max_size=3),
)
def test_what_stands_beside_a_mark_stands_at_an_edge(texts, marks, rows):
    """A tokenizer cuts a text there, so that to it each piece is a text of its own."""
    whole = texts[0] + "".join(mark + text for mark, text in zip(marks, texts[1:], strict=False))
    if all(Guard((), rows).passes(text) for text in texts):
        return
    assert not Guard((), rows, marks=MARKS).passes(whole)


def test_marks_mean_nothing_to_rows_without_an_edge():
    assert Guard((), {("lower", "digit", "lower")}, marks=MARKS).passes("<|a|>1a")
    assert not Guard((), {("edge", "digit", "lower")}, marks=MARKS).passes("<|a|>1a")
    assert Guard((), {("edge", "digit", "lower")}).passes("<|a|>1a")
