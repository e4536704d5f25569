import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines import token_request
from trivet.legs.bodies import decode_body, first_token_may_be_handed_over, prefill_body
from trivet.render.contract import TokenRequest

PARAMS = {"do_remote_decode": True}

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 1000), "detokenize": st.just(False)},
    optional={
        "temperature": FINITE,
        "top_p": FINITE,
        "min_tokens": st.integers(0, 1000),
        "stop_token_ids": st.lists(st.integers(0, 100)),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 20),
        "structured_outputs": st.dictionaries(st.sampled_from(["json", "regex"]), st.text(max_size=5)),
        "logit_bias": st.dictionaries(st.integers(0, 9).map(str), FINITE),
        "presence_penalty": FINITE,
        "seed": st.integers(0, 2**31),
        "bad_words": st.lists(st.text(max_size=5)),
        "extra_args": st.dictionaries(st.text(max_size=5), st.integers()),
        "n": st.just(1),
    },
)
REQUESTS = st.builds(
    TokenRequest,
    request_id=st.just("gen-1"),
    token_ids=st.lists(st.integers(0, 200000), min_size=1, max_size=20),
    sampling=SAMPLING,
    model=st.sampled_from(["base", "adapter"]),
    cache_salt=st.none() | st.text(max_size=8),
    priority=st.integers(-5, 5),
    reasoning_ended=st.none() | st.booleans(),
    reasoning_parser_kwargs=st.none() | st.dictionaries(st.text(max_size=5), st.booleans()),
)


def prompt_of(body: dict) -> dict:
    """What shapes the prompt's KV or says where it is cached."""
    return {name: body[name] for name in ("token_ids", "model", "cache_salt", "priority") if name in body}


def test_the_prefill_leg_of_a_plain_request():
    assert prefill_body(token_request(), PARAMS) == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False},
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }


def test_the_decode_leg_of_a_plain_request():
    assert decode_body(token_request(), {"remote_port": 1}) == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"temperature": 0.0, "max_tokens": 2, "detokenize": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"remote_port": 1},
    }


def test_a_colocated_request_has_no_transfer():
    assert "kv_transfer_params" not in decode_body(token_request(), None)


@given(REQUESTS)
def test_the_prefill_leg_makes_one_token_and_none_of_the_answer(request):
    body = prefill_body(request, PARAMS)
    assert body["sampling_params"] == {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False}
    assert body["stream"] is False
    assert set(body) <= {
        "token_ids", "model", "cache_salt", "priority", "sampling_params", "stream", "kv_transfer_params",
    }  # fmt: skip


@given(REQUESTS)
def test_both_legs_carry_the_same_prompt(request):
    prefill, decode = prefill_body(request, PARAMS), decode_body(request, {"remote_port": 1})
    assert prompt_of(prefill) == prompt_of(decode)
    assert prefill["token_ids"] == list(request.token_ids)
    assert prefill["model"] == request.model
    assert prefill.get("cache_salt") == request.cache_salt
    assert prefill.get("priority", 0) == request.priority


@given(REQUESTS)
def test_the_decode_leg_is_the_clients_request(request):
    body = decode_body(request, {"remote_port": 1})
    assert body["sampling_params"] == request.sampling
    assert body.get("reasoning_ended") == request.reasoning_ended
    assert body.get("reasoning_parser_kwargs") == request.reasoning_parser_kwargs
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert body["kv_transfer_params"] == {"remote_port": 1}


@given(REQUESTS, st.lists(st.integers(0, 100), max_size=3))
def test_bodies_are_json_and_the_request_stays_as_it_was(request, after):
    before = json.dumps([list(request.token_ids), request.sampling])
    for body in (
        prefill_body(request, PARAMS),
        prefill_body(request, PARAMS, sample=True),
        decode_body(request, PARAMS, after=after),
    ):
        assert json.loads(json.dumps(body)) == body
        body["sampling_params"]["max_tokens"] = None
        body["token_ids"].append(1)
    assert json.dumps([list(request.token_ids), request.sampling]) == before


@given(REQUESTS, st.lists(st.integers(0, 100), min_size=1, max_size=3))
def test_decode_continues_behind_what_the_client_has(request, after):
    body = decode_body(request, PARAMS, after=after)
    assert body["token_ids"] == [*request.token_ids, *after]
    expected = {**request.sampling, "max_tokens": request.sampling["max_tokens"] - len(after)}
    assert body["sampling_params"] == expected


def test_an_answer_without_a_limit_stays_without_one():
    request = token_request(sampling={"max_tokens": None})
    assert decode_body(request, PARAMS, after=[1])["sampling_params"] == {"max_tokens": None}
    assert decode_body(token_request(sampling={}), PARAMS, after=[1])["sampling_params"] == {}


@given(REQUESTS)
def test_a_prefill_leg_whose_token_is_used_draws_it_as_the_client_asked(request):
    body = prefill_body(request, PARAMS, sample=True)
    assert body["sampling_params"] == {**request.sampling, "max_tokens": 1}
    assert prompt_of(body) == prompt_of(prefill_body(request, PARAMS))
    assert body["stream"] is False


GREEDY = {"temperature": 0.0, "max_tokens": 8, "detokenize": False}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"top_p": 0.5, "top_k": 3},
        {"stop_token_ids": [1], "ignore_eos": True},
        {"logprobs": None, "structured_outputs": None, "seed": None},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0},
        {"bad_words": [], "logit_bias": {}, "allowed_token_ids": None, "extra_args": {}},
    ],
)
def test_a_greedy_first_token_may_be_handed_over(more):
    assert first_token_may_be_handed_over(token_request(sampling=GREEDY | more)) is True


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7},
        {"logprobs": 1},
        {"logprobs": 0},
        {"logprobs": -1},
        {"logprob_token_ids": [1]},
        {"structured_outputs": {"regex": "a"}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"bad_words": ["a"]},
        {"min_tokens": 1},
        {"seed": 7},
        {"logit_bias": {"1": 1.0}},
        {"allowed_token_ids": [1]},
        {"extra_args": {"a": 1}},
        {"thinking_token_budget": 0},
        {"thinking_token_budget": 10},
        {"repetition_detection": {"max_pattern_size": 3}},
    ],
)
def test_a_first_token_that_the_answer_depends_on_further_may_not_be_handed_over(more):
    assert first_token_may_be_handed_over(token_request(sampling=GREEDY | more)) is False


def test_a_request_without_temperature_is_not_greedy():
    assert first_token_may_be_handed_over(token_request(sampling={"max_tokens": 8})) is False
