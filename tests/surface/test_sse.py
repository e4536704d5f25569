import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.surface.sse import DONE, EventSplitter, data_of, event_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=10)
ENDS = st.sampled_from(["\n", "\r\n"])


@st.composite
def events(draw) -> tuple[bytes, list[str]]:
    """An event as it is written, and the lines of its data."""
    end = draw(ENDS)
    data = draw(st.lists(st.builds(json.dumps, JSON, ensure_ascii=st.booleans()), min_size=1, max_size=3))
    lines = [f"data:{draw(st.sampled_from(['', ' ']))}{one}" for one in data]
    more = st.sampled_from([": a comment", ":", "event: token", "id: 7", "retry: 5"])
    for one in draw(st.lists(more | LINES.map(lambda text: f": {text}"), max_size=2)):
        lines.insert(draw(st.integers(0, len(lines))), one)
    return end.join([*lines, "", ""]).encode(), data


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


def fed(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    found = [event for piece in pieces for event in splitter.feed(piece)]
    return found, splitter.rest


@given(st.lists(events(), max_size=5), st.lists(st.integers(0, 10**6), max_size=12))
def test_events_are_the_same_wherever_the_stream_was_cut(written, places):
    stream = b"".join(event for event, _ in written)
    found, rest = fed(cut(stream, places))
    assert (found, rest) == ([event for event, _ in written], b"")
    assert [data_of(event) for event in found] == ["\n".join(lines).encode() for _, lines in written]


@given(st.lists(events(), min_size=1, max_size=3))
def test_events_may_come_byte_by_byte(written):
    stream = b"".join(event for event, _ in written)
    assert fed([stream[at : at + 1] for at in range(len(stream))]) == ([event for event, _ in written], b"")


@given(
    st.binary(max_size=60) | st.text("\r\n:da ", max_size=40).map(str.encode), st.lists(st.integers(0, 99), max_size=6)
)
def test_whatever_comes_nothing_is_lost_or_held_back(stream, places):
    found, rest = fed(cut(stream, places))
    assert b"".join(found) + rest == stream
    assert (found, rest) == fed([stream])
    assert b"\n\n" not in rest
    assert b"\n\r\n" not in rest
    for event in found:
        assert event.endswith((b"\n\n", b"\n\r\n"))
        assert data_of(event) is None or b"data:" in event


def test_each_event_is_given_as_soon_as_it_is_whole():
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: 1\n")) == []
    assert list(splitter.feed(b"\ndata: 2\n\nda")) == [b"data: 1\n\n", b"data: 2\n\n"]
    assert splitter.rest == b"da"
    assert list(splitter.feed(b"ta: 3\r\n\r")) == []
    assert list(splitter.feed(b"\n")) == [b"data: 3\r\n\r\n"]


def test_a_long_event_is_looked_through_once():
    """Else a stream of many small pieces without an end would take a time that grows with its square."""
    splitter, looked = EventSplitter(), []

    class Pending(bytearray):
        def find(self, sought, start=0, *rest):
            looked.append(len(self) - start)
            return super().find(sought, start, *rest)

    splitter._pending = Pending()
    for _ in range(1000):
        assert list(splitter.feed(b"x" * 100)) == []
    assert max(looked) <= 103


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data: {}\r\n\r\n", b"{}"),
        (b"event: x\ndata: 1\n\n", b"1"),
        (b"data: 1\ndata: 2\n\n", b"1\n2"),
        (b"data: 1\n: a comment\ndata: 2\n\n", b"1\n2"),
        (b"data:\n\n", b""),
        (b": data: 1\n\n", None),
        (b"\n\n", None),
        (b"\ndata: 1\n\n", b"1"),
        (DONE, b"[DONE]"),
        ('data: "Tö\u2028pf"\n\n'.encode(), '"Tö\u2028pf"'.encode()),  # an end of line of Unicode's is none here
        (b'data: "a\x0bb\x85"\n\n', b'"a\x0bb\x85"'),
        (b"event: x\ndata: a\x0bb\x1cc\n\n", b"a\x0bb\x1cc"),
    ],
)
def test_the_payload_of_an_event(event, expected):
    assert data_of(event) == expected


@given(JSON)
def test_an_event_made_of_a_value_is_one_event_with_that_payload(value):
    event = event_of(value)
    assert fed([event]) == ([event], b"")
    assert json.loads(data_of(event)) == value
