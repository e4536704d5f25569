"""What is large is found to be so wherever it stands in a request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.render.weights import heavier, is_text

LIMIT = 4096
SMALL = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def holding(draw, what):
    """A value with ``what`` somewhere in it, maybe as a name."""
    value = what
    for kind in draw(st.lists(st.sampled_from(("list", "tuple", "value", "name")), max_size=5)):
        before, behind = draw(st.lists(SMALL, max_size=2)), draw(st.lists(SMALL, max_size=2))
        if kind == "list":
            value = [*before, value, *behind]
        elif kind == "tuple":
            value = (*before, value, *behind)
        elif kind == "name" and isinstance(value, str):
            value = {value: before}
        else:
            value = {"before": before, "it": value, "behind": behind}
    return value


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_long_text_is_found_wherever_it_stands(data):
    assert heavier(LIMIT, data.draw(SMALL), data.draw(holding("x" * (LIMIT + 1))))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_nobody_knows_weighs_too_much(data):
    assert heavier(LIMIT, data.draw(holding(iter("x"))))


@settings(max_examples=200, deadline=None)
@given(SMALL, SMALL)
def test_little_is_little(one, other):
    assert not heavier(LIMIT, one, other)


@pytest.mark.parametrize(
    "many", [[{}] * LIMIT, [{"role": "user", "content": ""}] * 200, [[]] * LIMIT, {str(n): None for n in range(LIMIT)}]
)
def test_many_things_without_a_text_weigh_too(many):
    assert heavier(LIMIT, many)


def test_nothing_is_light_enough_where_nothing_may_be():
    assert heavier(-1)
    assert heavier(-1, [])


class Untouchable(dict):
    def values(self):
        raise AssertionError("it was looked at one by one")


def test_what_is_too_much_already_is_not_looked_through():
    assert heavier(LIMIT, Untouchable.fromkeys(range(LIMIT)))


@pytest.mark.parametrize(
    ("content", "proper"),
    [
        ("x", True),
        (None, True),
        ([], True),
        ([{"type": "text", "text": "x"}], True),
        ([{"type": "text", "text": None}], False),
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}], False),
        (["x"], False),
    ],
)
def test_what_is_text_is_told_from_what_is_to_be_fetched(content, proper):
    assert is_text([{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]) is proper
