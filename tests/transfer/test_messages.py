import random
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.transfer import messages
from trivet.transfer.messages import LONGEST_BYTES, decode, encode, is_transfer, one_line

ALL = [
    messages.Hello(messages.PROTOCOL, "engine", {"vllm": "0.32", "groups": 2, "tensor_parallel": 2, "none": None}),
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
    messages.Lost("t", "it was spoilt", attempt=3),
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
    with pytest.raises(ValueError, match=f"not a message of TrivetConnector's protocol {messages.PROTOCOL}"):
        decode(foreign)


def refused(data):
    with pytest.raises(ValueError, match=r".") as error:
        decode(data)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    return str(error.value)


# bounds


def piece(**changes):
    fields = ["t", 0, 3, 4096, 0, [0, 1], [[0, 2]], 1, None]
    names = ["transfer", "attempt", "slot", "bytes", "group", "layers", "ranges", "computed_ns", "checksum"]
    for name, value in changes.items():
        fields[names.index(name)] = value
    return ["Piece", *fields]


@pytest.mark.parametrize(
    "fields",
    [
        ["Open", "t" * 513],
        ["Open", None],
        ["Open", b"t"],
        ["Open", ["t"]],
        ["Close", "t", 1],
        ["First", "t", -1],
        ["First", "t", 2**64 - 1],
        ["First", "t", 1.5],
        ["First", "t", True],
        ["Hello", "1", "e", {}],
        ["Hello", 1, "e", []],
        ["Hello", 1, "e", {"a": ["nested"]}],
        ["Hello", 1, "e", {"a": {"b": 1}}],
        ["Hello", 1, "e", {1: 1}],
        ["Hello", 1, "e", {"x" * 257: 1}],
        ["Hello", 1, "e", {"a": "x" * 1025}],
        ["Hello", 1, "e", {str(number): 1 for number in range(4097)}],
        ["Hello", 1, "e" * (2**16 + 1), {}],
        ["Welcome", "e", ["/p"] * 4097, None],
        ["Welcome", "e", ["/" + "p" * 300], None],
        ["Welcome", "e", "/p", None],
        ["Try", "e", "h", "m" * 65],
        ["Offer", "shm", {"slots": [1]}],
        ["Offer", "shm", {"slots": 1.5}],
        ["Offer", "shm", {str(number): 1 for number in range(65)}],
        ["Use", "shm", {"x": 1}],
        ["Took", -1],
        ["Took", 2**31],
        ["Landed", "r", 0, -1],
        ["Landed", "r", -1, 0],
        ["Got", "t", -1],
        ["Want", "t", 0, [[[0, 2**40]]]],
        ["Want", "t", 0, [[[-1, 3]]]],
        ["Want", "t", 0, [[[3, 3]]]],
        ["Want", "t", 0, [[[3, 1]]]],
        ["Want", "t", 0, [[[0, 4], [3, 6]]]],
        ["Want", "t", 0, [[[5, 6], [0, 1]]]],
        ["Want", "t", 0, [[[0, 1, 2]]]],
        ["Want", "t", 0, [[]] * 1025],
        ["Want", "t", -1, [[[0, 1]]]],
        piece(slot=-1),
        piece(slot=2**31),
        piece(bytes=-8),
        piece(group=-1),
        piece(layers=[-1]),
        piece(layers=[0] * (2**16 + 1)),
        piece(layers="01"),
        piece(ranges=[[2, 0]]),
        piece(ranges=[[0, 2**62]]),
        piece(computed_ns=-1),
        piece(checksum="0"),
        [],
        "Alive",
        7,
        None,
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_field_outside_of_its_bounds_is_refused_in_one_line(fields):
    assert f"not a message of TrivetConnector's protocol {messages.PROTOCOL}" in refused(msgspec.msgpack.encode(fields))


def test_a_message_longer_than_any_is_not_looked_at():
    assert refused(b"\x91" * (LONGEST_BYTES + 1)) == f"a message of {LONGEST_BYTES + 1} bytes"


def test_a_prompt_of_a_million_tokens_in_the_smallest_blocks_fits():
    alternating = [(at, at + 1) for at in range(0, 2**16, 2)]
    for message in (messages.Want("t", 0, [alternating] * 8), messages.Piece("t", 0, 0, 8, 0, [0], alternating, 0, 0)):
        data = encode(message)
        assert len(data) < LONGEST_BYTES
        assert decode(data) == message


# texts for people


@pytest.mark.parametrize(
    "text", ["one\ntwo\r\nthree", "\x1b[31mred", "a\u2028b\x00c", "x" * 10**6, "", "\n" * 5000 + "late", "\ud800"]
)
def test_a_text_becomes_one_line_of_bounded_length(text):
    said = one_line(text)
    assert len(said) <= 500
    assert said == "" or (said.isprintable() and len(said.splitlines()) == 1)
    said.encode()


@pytest.mark.parametrize(
    ("make", "text_of"),
    [
        (lambda text: messages.Welcome("e", [], text), lambda message: message.problem),
        (lambda text: messages.Lost("t", text), lambda message: message.why),
        (lambda text: messages.Cannot("shm", text), lambda message: message.why),
        (lambda text: messages.Use("shm", {"pinned": text}), lambda message: message.rejected["pinned"]),
    ],
)
def test_texts_are_cut_where_a_message_is_made_and_where_it_comes(make, text_of):
    long = "first line\n" + "x" * 10_000
    own = make(long)
    assert text_of(own).startswith("first line xxx")
    assert len(text_of(own)) == 500
    foreign = encode(own).replace(b"first line ", b"first line\n")
    assert decode(foreign) == own


@pytest.mark.parametrize(("value", "fits"), [("t", True), ("x" * 512, True), ("x" * 513, False), ("", False)])
def test_a_transfers_id_is_looked_at_before_it_is_sent(value, fits):
    assert is_transfer(value) is fits


@pytest.mark.parametrize("value", [None, 5, b"t", ["t"], "a\nb", "\ud800"])
def test_what_messages_cannot_carry_is_no_transfers_id(value):
    assert not is_transfer(value)


# anything at all

ODD = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.5,
    float("nan"),
    "",
    "t",
    "a\nb",
    "x" * 600,
    b"",
    b"t",
]


def anything(chance, depth=3):
    """Whatever MessagePack can carry."""
    kind = chance.randrange(4 if depth else 2)
    if kind == 2:
        return [anything(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 3:
        return {chance.choice(["", "a", "slots"]): anything(chance, depth - 1) for _ in range(chance.randrange(3))}
    return chance.choice(ODD)


def holds(data):
    """It is a message, within its bounds, or one line."""
    message, said = None, ""
    try:
        message = decode(data)
    except ValueError as error:
        said = str(error)
    if message is None:
        assert said.isprintable()
        assert len(said) < 700
    else:
        assert decode(encode(message)) == message


@pytest.mark.parametrize("seed", range(4))
def test_a_known_name_with_any_fields_is_a_message_or_a_value_error(seed):
    chance = random.Random(seed)
    for _ in range(5000):
        tag = type(chance.choice(ALL)).__name__
        holds(msgspec.msgpack.encode([tag, *(anything(chance) for _ in range(chance.randrange(10)))]))


@pytest.mark.parametrize("seed", range(4))
def test_a_message_with_a_field_exchanged_is_a_message_or_a_value_error(seed):
    chance = random.Random(seed)
    for _ in range(5000):
        fields = msgspec.msgpack.decode(encode(chance.choice(ALL)))
        fields[chance.randrange(len(fields))] = anything(chance)
        holds(msgspec.msgpack.encode(fields))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(ALL), st.data())
def test_a_message_with_bytes_exchanged_is_a_message_or_a_value_error(message, data):
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    holds(bytes(raw))
