import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.surface.steering import STEERING, refusal_of, steering_fields

WITHIN = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")

TEXT = st.text(max_size=12) | st.sampled_from([*STEERING, *(json.dumps({name: {"a": 1}}) for name in STEERING)])
"""What a user may write: the names above all."""
NAMES = st.sampled_from(["messages", "content", "prompt", "tools", "parameters", "user", "x"])
VALUES = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXT, inner, max_size=3),
    max_leaves=10,
)
INNOCENT = st.dictionaries(NAMES, VALUES, max_size=4)
"""Bodies that say nothing of the transfer where vLLM would look for it."""
WAYS = st.lists(st.sampled_from([*WITHIN, 0]), max_size=6)
"""How a planted field is reached: through an object's key, or a place in a list."""


def planted(way: list, inside: object, around: dict) -> object:
    for step in reversed(way):
        inside = [around, inside] if step == 0 else {**around, step: inside}
    return inside


@given(WAYS, st.sampled_from(STEERING), st.sampled_from([{}, {"a": 1}, "x", 0, False, []]), INNOCENT)
def test_a_field_that_steers_is_found_wherever_it_is_planted(way, name, value, around):
    body = planted(way, {**around, name: value}, around)
    assert [what for _, what in steering_fields(body)] == [name]
    where = ".".join([*(step for step in way if step != 0), name])
    assert f"{where} is not for clients of this service" in refusal_of(body, (), ())
    assert refusal_of(body, (), (name,)) is None


@given(INNOCENT | TEXT | st.lists(INNOCENT | TEXT, max_size=3))
def test_what_users_write_is_no_such_field(body):
    """The names may stand anywhere in it: in a text, as a tool's parameter, as a key of a schema."""
    assert list(steering_fields(body)) == []
    assert refusal_of(body, ("content-type",), ()) is None


@given(WAYS, st.sampled_from(STEERING), INNOCENT)
def test_a_null_says_nothing(way, name, around):
    assert list(steering_fields(planted(way, {**around, name: None}, around))) == []


@given(st.lists(st.sampled_from(STEERING), unique=True), st.lists(st.sampled_from(STEERING), unique=True))
def test_all_of_them_must_be_allowed(said, allowed):
    refusal = refusal_of(dict.fromkeys(said, 1), (), allowed)
    assert (refusal is None) == (set(said) <= set(allowed))


@pytest.mark.parametrize("depth", [10, 5000])
def test_how_deep_it_goes_makes_no_difference(depth):
    body: object = {"request_id": "x"}
    for number in range(depth):
        body = {"vllm_xargs": body} if number % 2 else [body]
    assert [what for _, what in steering_fields(body)] == ["request_id"]


def test_fields_are_told_in_their_order():
    body = [
        {"request_id": 1, "vllm_xargs": {"ec_transfer_params": 1}, "extra_body": {"kv_transfer_params": 1}},
        {"data_parallel_rank": 0},
    ]
    assert list(steering_fields(body)) == [
        ("request_id", "request_id"),
        ("vllm_xargs.ec_transfer_params", "ec_transfer_params"),
        ("extra_body.kv_transfer_params", "kv_transfer_params"),
        ("data_parallel_rank", "data_parallel_rank"),
    ]


@pytest.mark.parametrize("body", [None, 5, "kv_transfer_params", True, [], {}, [None, [5]]])
def test_other_bodies_say_nothing(body):
    assert list(steering_fields(body)) == []


def test_the_rank_header_is_refused_unless_it_is_allowed():
    names = {"content-type", "x-data-parallel-rank"}
    expected = (
        "the header x-data-parallel-rank is not for clients of this service "
        "(a topology may allow it: gateway.allow: [data_parallel_rank])"
    )
    assert refusal_of({}, names, ()) == expected
    assert refusal_of({}, names, ("data_parallel_rank",)) is None


def test_numbers_without_end_cost_no_more_than_their_parsing():
    """The body may have four MiB of them, and a worker has one event loop."""
    raw = b'{"prompt": ' + b"[" + b"0," * 2**21 + b"0]}"
    for body in (raw, raw[11:-1], b'{"sampling_params": ' + raw[11:]):
        began_s = time.process_time()
        parsed = json.loads(body)
        parsed_s = time.process_time() - began_s
        began_s = time.process_time()
        assert list(steering_fields(parsed)) == []
        assert time.process_time() - began_s < 2 * parsed_s
