"""Chunks that go on as they came."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.surface.chunks import CHUNKS, chunks_of, contents

CONTENTS = st.lists(st.binary(min_size=1, max_size=300), max_size=5)


def chunked(*parts: bytes, form: str = "%x") -> bytes:
    return b"".join((form % len(part)).encode() + b"\r\n" + part + b"\r\n" for part in parts)


@given(CONTENTS, st.sampled_from(["%x", "%X", "%04x"]))
def test_contents_are_those_of_all_chunks(parts, form):
    assert list(contents(chunked(*parts, form=form))) == parts


@given(CONTENTS.filter(bool), st.data())
def test_of_what_is_cut_nothing_is_given(parts, data):
    whole = chunked(*parts)
    ends = {len(chunked(*parts[:count])) for count in range(len(parts) + 1)}
    cut = data.draw(st.integers(0, len(whole)).filter(lambda at: at not in ends))
    assert contents(whole[:cut]) == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"0\r\n\r\n",
        b"5;x=y\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"0x5\r\nhello\r\n",
        b"0_5\r\nhello\r\n",
        b"\xb2\r\nhe\r\n",
        b"zz\r\nhello\r\n",
        b"5\nhello\n",
        b"5\r\nhello\n\n",
        b"4\r\nhello\r\n",
        b"6\r\nhello\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n5",
        b"0000000005\r\nhello\r\n",
    ],
)
def test_what_is_anything_else_has_none(data):
    assert list(contents(data)) == []


def test_a_server_without_the_way_has_none():
    assert chunks_of({}) is None
    assert chunks_of({"extensions": None}) is None
    assert chunks_of({"extensions": {"tls": {}}}) is None
    assert chunks_of({"extensions": {CHUNKS: 5}}) == 5
