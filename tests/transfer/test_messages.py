import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.transfer import messages
from trivet.transfer.messages import decode, encode

ALL = [
    messages.Hello(1, "engine", {"vllm": "0.32", "groups": ["a", "b"], "tensor_parallel": 2, "none": None}),
    messages.Welcome("engine-1", ["/run/a.0", "/run/a.1"], None),
    messages.Welcome("engine-1", [], "they differ"),
    messages.Open("t"),
    messages.Close("t", has_all=True),
    messages.Close("t", has_all=False),
    messages.Alive(),
    messages.Announce("t"),
    messages.First("t", 151643),
    messages.First("t", None),
    messages.Lost("t", "ünbekannt"),
    messages.Lost("t", "they differ", first_comes=True),
    messages.Try("engine", "host boot", "shm"),
    messages.Offer("cuda_p2p", {"slots": 8, "slot_bytes": 2**25, "handle": bytes(range(64))}),
    messages.Cannot("pinned", "no memory"),
    messages.Use("shm", {"pinned": "no memory"}),
    messages.Want("t", 1, [[(0, 3), (5, 9)], []]),
    messages.Piece("t", 0, 3, 2**33, 1, [0, 1, 2], [(0, 2)], 123456789012345, -(2**63)),
    messages.Piece("t", 2, 0, 8, 0, [7], [(1, 2), (4, 5)], 0, None),
    messages.Took(4),
    messages.Got("t", 0),
    messages.Stop("t", 3),
    messages.Withdraw("t"),
    messages.Landed("request", 2, 1),
]


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_comes_back_as_it_was(message):
    assert decode(encode(message)) == message


def test_every_type_of_message_is_tried_here():
    assert {type(one) for one in ALL} == set(typing.get_args(messages.Message))


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_foreign_bytes_are_a_value_error_or_a_message(data):
    try:
        message = decode(data)
    except ValueError:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_cut_short_is_a_value_error(message):
    data = encode(message)
    for end in range(len(data)):
        with pytest.raises(ValueError, match="not a message"):
            decode(data[:end])


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        msgspec.msgpack.encode({"type": "Open", "transfer": "t"}),
        msgspec.msgpack.encode(["Open"]),
        msgspec.msgpack.encode(["Open", 5]),
        msgspec.msgpack.encode(["Opened", "t"]),
        msgspec.msgpack.encode(["Took", "3"]),
        msgspec.msgpack.encode(["Want", "t", 0, [[[1]]]]),
        encode(messages.Alive()) + b"\x00",
        b"\x94\xa5Hello\x01\xa1e" + b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_what_is_no_message_of_the_protocol_is_a_value_error_that_says_so(foreign):
    with pytest.raises(ValueError, match="not a message of TrivetConnector's protocol 1"):
        decode(foreign)
