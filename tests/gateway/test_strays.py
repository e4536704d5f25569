"""Lines of a worker that no logger wrote."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.gateway.strays import Strays, keep

CHAINED = """Traceback (most recent call last):
  File "a.py", line 1, in f
    raise ValueError
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in g
KeyError: 'second'
"""


def told(*pieces: bytes) -> list[dict]:
    strays = Strays()
    lines = [line for piece in pieces for line in strays.feed(piece)] + list(strays.end())
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    return [json.loads(line) for line in lines]


@given(st.lists(st.binary(max_size=40)))
def test_whatever_is_written_becomes_json(pieces):
    for line in told(*pieces):
        assert {"time", "level", "message"} <= line.keys()


@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1), min_size=1), st.data())
def test_lines_are_the_same_however_they_arrive(lines, data):
    text = "\n".join(lines).encode()
    cut = data.draw(st.integers(0, len(text)))
    assert [one["message"] for one in told(text[:cut], text[cut:])] == lines


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("WARNING 07-01 [x.py:3] beware", "WARNING"),
        ("(MainProcess pid=1) ERROR 07-01 [x.py:3] no", "ERROR"),
        ("ERRORS happen", "INFO"),
        ("an ERROR", "INFO"),
        ("word", "INFO"),
    ],
)
def test_a_line_keeps_its_level(text, level):
    (line,) = told(text.encode())
    assert (line["level"], line["message"], line["logger"]) == (level, text, "output")


def test_a_traceback_is_one_object_with_its_fault():
    lines = told(b"before\n" + CHAINED.encode() + b"after\n")
    assert [line["message"] for line in lines] == [
        "before",
        "ValueError: first",
        "During handling of the above exception, another exception occurred:",
        "KeyError: 'second'",
        "after",
    ]
    assert lines[3]["traceback"] == "\n".join(CHAINED.splitlines()[-3:])


def test_a_traceback_that_was_cut_off_is_kept():
    (line,) = told(b"Traceback (most recent call last):\n  File x")
    assert line["traceback"] == "Traceback (most recent call last):\n  File x"


def test_a_line_of_a_logger_stays_as_it_is():
    line = {"time": "t", "level": "INFO", "logger": "trivet", "message": "m", "status": 200}
    assert told(json.dumps(line).encode()) == [line]
    assert told(b'{"other": 1}')[0]["message"] == '{"other": 1}'


def test_a_line_without_an_end_does_not_grow_for_ever():
    lines = told(*[b"x" * 10_000] * 20)
    assert sum(len(line["message"]) for line in lines) == 200_000
    assert len(lines) > 1


async def test_a_full_disk_does_not_fail_who_prints():
    read, write = os.pipe()

    def prints() -> None:
        with os.fdopen(write, "wb", 0) as pipe:  # more than a pipe takes unread; nobody who reads: BrokenPipeError
            for _ in range(100):
                pipe.write(b"x" * 10_000 + b"\n")
            pipe.write(b"and a last one")

    await asyncio.gather(keep(read, Path("/dev/full")), asyncio.to_thread(prints))
