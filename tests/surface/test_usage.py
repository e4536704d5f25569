"""Counts of tokens in three forms."""

import copy

import pytest

from trivet.surface.usage import Usage, put_cached, usage_in

CHAT = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 8, "created_cache_tokens": 0},
}
RESPONSE = {
    "input_tokens": 9,
    "output_tokens": 4,
    "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0, "cached_tokens_per_turn": [8]},
}
MESSAGE = {"input_tokens": 1, "output_tokens": 4, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0}
FORMS = pytest.mark.parametrize("usage", [CHAT, RESPONSE, MESSAGE], ids=["chat", "response", "message"])


@FORMS
def test_all_forms_say_the_same(usage):
    assert Usage.parse(usage) == Usage(9, 4, 8)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({}, Usage(0, 0, None)),
        ({"prompt_tokens": 3}, Usage(3, 0, None)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, Usage(3, 0, None)),
        ({"input_tokens": 3, "output_tokens": 0}, Usage(3, 0, None)),
        ({"input_tokens": 3, "input_tokens_details": {}}, Usage(3, 0, None)),
        ({"input_tokens": 3, "cache_read_input_tokens": 2}, Usage(5, 0, 2)),
        (None, None),
        ([], None),
        ("input_tokens", None),
        ({"prompt_tokens": "x"}, None),
        ({"input_tokens": float("inf")}, None),
        ({"prompt_tokens": 1, "prompt_tokens_details": 5}, None),
    ],
)
def test_what_is_not_told_is_not_made_up(usage, expected):
    assert Usage.parse(usage) == expected


@FORMS
@pytest.mark.parametrize("created", [None, 5])
def test_other_counts_take_the_place_and_the_prompt_stays_as_long(usage, created):
    usage = copy.deepcopy(usage)
    assert put_cached(usage, 2, created)
    assert Usage.parse(usage) == Usage(9, 4, 2)
    assert not put_cached(usage, 2, created)


def test_each_form_has_its_own_places():
    chat, response, message = copy.deepcopy((CHAT, RESPONSE, MESSAGE))
    for usage in (chat, response, message):
        put_cached(usage, 2, 5)
    assert chat["prompt_tokens_details"] == {"cached_tokens": 2, "created_cache_tokens": 5}
    assert response["input_tokens_details"] == {
        "cached_tokens": 2,
        "cache_write_tokens": 5,
        "cached_tokens_per_turn": [2],
    }
    assert message == {
        "input_tokens": 2,
        "output_tokens": 4,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 5,
    }


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 3},
        {"prompt_tokens": 3, "prompt_tokens_details": None},
        {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": None}},
        {"input_tokens": 3, "output_tokens": 0},
        {"input_tokens": 3, "input_tokens_details": {}},
    ],
)
def test_nothing_is_told_that_was_not(usage):
    before = copy.deepcopy(usage)
    assert not put_cached(usage, 2, 1)
    assert usage == before


@pytest.mark.parametrize(
    "value",
    [
        {"usage": CHAT},
        {"response": {"usage": CHAT}},
        {"message": {"usage": CHAT}},
        {"usage": None, "response": {"usage": CHAT}},
    ],
)
def test_usage_is_found_where_each_form_has_it(value):
    assert usage_in(value) is CHAT


@pytest.mark.parametrize("value", [{}, {"usage": 5}, {"response": None}, {"message": "x"}])
def test_there_may_be_none(value):
    assert usage_in(value) is None
