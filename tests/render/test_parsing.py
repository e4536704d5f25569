"""Long bodies are parsed to what ``json`` makes of them, and refused as it refuses them."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

FILL = " " * 2**16
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def parsing(frontend):
    import trivet.render.parsing

    trivet.render.parsing.parse_in_turns()
    return trivet.render.parsing


def request_of(body: bytes) -> Request:
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def parsed(body: bytes):
    """What a request makes of a body, or how it refuses it."""
    try:
        return asyncio.run(request_of(body).json())
    except Exception as error:
        return type(error), str(error)


def proper(body: bytes):
    try:
        return json.loads(body)
    except Exception as error:
        return type(error), str(error)


def same(one, other):
    """As ``==``, for which an int is a float and NaN is nothing."""
    return repr(one) == repr(other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@settings(max_examples=200, deadline=None)
@given(JSON, st.booleans())
def test_any_json_is_what_json_makes_of_it(parsing, value, ascii_only):
    body = (json.dumps(value, ensure_ascii=ascii_only) + FILL).encode("utf-8", "surrogatepass")
    assert same(parsed(body), proper(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": 1} x',
        b'{"a": NaN, "b": [Infinity, -Infinity]}',
        b'{"a": 1, "a": 2}',
        b"1" * 40,
        b"1e400",
        b"-0.0",
        b"-0",
        b'"\\ud800"',
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        '{"a": "x"}'.encode("utf-16"),
        b'"a\tb"',
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_what_is_odd_is_taken_or_refused_as_json_does(parsing, body):
    long = body + (FILL.encode("utf-16-le") if body[:2] in (b"\xff\xfe", b"\xfe\xff") else FILL.encode())
    assert same(parsed(long), proper(long))
    assert same(parsed(body), proper(body))


async def test_a_long_body_is_parsed_once_and_others_have_a_turn_behind_it(parsing):
    turns: list[str] = []
    request = request_of((json.dumps({"a": "x"}) + FILL).encode())

    async def read():
        value = await request.json()
        turns.append("read")
        return value

    async def tell():
        turns.append("other")

    reading = asyncio.create_task(read())
    other = asyncio.create_task(tell())
    value = await reading
    await other
    assert turns == ["other", "read"]
    assert await request.json() is value
