import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.engines import token_request
from trivet.legs.bodies import (
    a_token_of,
    behind,
    decode_body,
    first_token_may_be_handed_over,
    obstacle_to_continuing,
    prefill_body,
    release_body,
    whole_body,
    why_unsplittable,
)
from trivet.render.contract import Features, Item, TokenRequest

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
    features=st.none() | st.just(Features((Item("image", 0, 1),), [b"{}"])),
)


def prompt_of(body: dict) -> dict:
    """What shapes the prompt's KV or says where it is cached."""
    names = ("token_ids", "features", "model", "cache_salt", "priority")
    return {name: body[name] for name in names if name in body}


def test_images_are_sent_with_every_leg_that_has_the_whole_prompt():
    features = Features((Item("image", 1, 2),), [b"{}"])
    request = token_request(features=features, prompt_logprobs=1)
    bodies = [
        prefill_body(request, PARAMS),
        decode_body(request, None),
        decode_body(behind(request, [5, 6]), PARAMS),
        whole_body(request),
        release_body(request, PARAMS),
    ]
    assert all(body["features"] is features for body in bodies)
    assert "features" not in decode_body(token_request(), None)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], 11),
        ([(0, 1)], 12),
        ([(0, 2)], 13),
        ([(0, 1), (1, 1)], 13),
        ([(1, 1)], 11),
        ([(0, 1), (2, 1)], 12),
        ([(0, 3)], 11),  # nothing else is there
    ],
)
def test_a_token_that_stands_for_no_image(items, expected):
    features = Features(tuple(Item("image", *one) for one in items), [b"{}"])
    assert a_token_of(token_request(features=features)) == expected
    assert a_token_of(token_request()) == 11


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
        *("token_ids", "features", "model", "cache_salt", "priority", "sampling_params", "stream"),
        "kv_transfer_params",
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
def test_bodies_are_json_and_the_request_stays_as_it_was(request, sent):
    before = json.dumps([list(request.token_ids), request.sampling])
    for body in (
        prefill_body(request, PARAMS),
        prefill_body(request, PARAMS, sample=True),
        decode_body(behind(request, sent), PARAMS),
        whole_body(request),
        release_body(request, PARAMS),
    ):
        features = body.pop("features", None)
        assert features is request.features
        assert json.loads(json.dumps(body)) == body
        body["sampling_params"]["max_tokens"] = None
        body["token_ids"].append(1)
    assert json.dumps([list(request.token_ids), request.sampling]) == before


# behind what the client has


@given(REQUESTS, st.lists(st.integers(0, 100), max_size=1100))
def test_the_rest_of_an_answer_is_asked_for_behind_what_the_client_has(request, sent):
    rest = behind(request, sent)
    assert list(rest.token_ids) == [*request.token_ids, *sent]
    asked = {**request.sampling, "max_tokens": max(0, request.sampling["max_tokens"] - len(sent))}
    if "min_tokens" in asked:
        asked["min_tokens"] = max(0, asked["min_tokens"] - len(sent))
    assert rest.sampling == asked
    assert (rest.model, rest.cache_salt, rest.priority) == (request.model, request.cache_salt, request.priority)


@given(REQUESTS, st.lists(st.integers(0, 100), max_size=10), st.lists(st.integers(0, 100), max_size=10))
def test_breaking_off_twice_is_breaking_off_once(request, first, second):
    assert behind(behind(request, first), second) == behind(request, [*first, *second])


def test_where_nothing_was_sent_the_request_is_the_same():
    request = token_request(prompt_logprobs=2)
    assert behind(request, []) is request


def test_the_prompts_log_probabilities_are_not_asked_for_twice():
    assert behind(token_request(prompt_logprobs=2), [5]).prompt_logprobs is None


def test_an_answer_without_a_limit_stays_without_one():
    request = token_request(sampling={"max_tokens": None, "min_tokens": None})
    assert behind(request, [1]).sampling == {"max_tokens": None, "min_tokens": None}
    assert behind(token_request(sampling={}), [1]).sampling == {}


# log-probabilities of the prompt, and what clients steer


@given(REQUESTS, st.integers(-1, 20))
def test_the_prompts_log_probabilities_are_prefills_to_tell(request, count):
    request = replace(request, prompt_logprobs=count)
    assert prefill_body(request, PARAMS)["sampling_params"]["prompt_logprobs"] == count
    assert prefill_body(request, PARAMS, sample=True)["sampling_params"]["prompt_logprobs"] == count
    assert "prompt_logprobs" not in decode_body(request, PARAMS)["sampling_params"]
    assert "prompt_logprobs" not in release_body(request, PARAMS)["sampling_params"]


@given(REQUESTS, st.integers(-1, 20))
def test_a_colocated_leg_that_tells_them_is_not_streamed(request, count):
    body = whole_body(replace(request, prompt_logprobs=count))
    expected = decode_body(request, None)
    expected["sampling_params"]["prompt_logprobs"] = count
    del expected["stream_options"]
    assert body == expected | {"stream": False}


def test_a_clients_own_transfer_parameters_go_out_where_there_are_no_others():
    request = token_request(kv_transfer_params={"mine": 1}, ec_transfer_params={"mine": 2})
    assert decode_body(request, None)["kv_transfer_params"] == {"mine": 1}
    assert decode_body(request, {"remote_port": 1})["kv_transfer_params"] == {"remote_port": 1}
    assert decode_body(request, None)["ec_transfer_params"] == {"mine": 2}


@given(REQUESTS)
def test_a_release_is_the_same_prompt_under_a_salt_of_its_own(request):
    one, other = (release_body(request, {"remote_port": 1}) for _ in range(2))
    assert one.pop("cache_salt") != other.pop("cache_salt")
    assert one == other
    assert one["sampling_params"] == {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    assert (one["token_ids"], one["model"]) == (list(request.token_ids), request.model)
    assert one["kv_transfer_params"] == {"remote_port": 1}


@given(REQUESTS)
def test_a_prefill_leg_whose_token_is_used_draws_it_as_the_client_asked(request):
    body = prefill_body(request, PARAMS, sample=True)
    expected = {**request.sampling, "max_tokens": 1}
    if "min_tokens" in expected:
        expected["min_tokens"] = min(1, expected["min_tokens"])
    assert body["sampling_params"] == expected
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
        {"temperature": 0.7},
        {"logprobs": 1},
        {"logprobs": 0},
        {"logprobs": -1},
        {"logprob_token_ids": [1]},
        {"repetition_penalty": 1.1},
        {"min_tokens": 5},
        {"logit_bias": {"1": 1.0}},
        {"allowed_token_ids": [1]},
    ],
)
def test_a_first_token_that_looks_at_its_own_place_may_be_handed_over(more):
    assert first_token_may_be_handed_over(token_request(sampling=GREEDY | more)) is True


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"regex": "a"}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"bad_words": ["a"]},
        {"seed": 7},
        {"seed": 7, "temperature": 0.7},
        {"extra_args": {"a": 1}},
        {"thinking_token_budget": 0},
        {"thinking_token_budget": 10},
        {"repetition_detection": {"max_pattern_size": 3}},
    ],
)
def test_a_first_token_that_the_answer_depends_on_further_may_not_be_handed_over(more):
    assert first_token_may_be_handed_over(token_request(sampling=GREEDY | more)) is False


def test_the_prompts_log_probabilities_are_more_than_a_token():
    assert first_token_may_be_handed_over(token_request(sampling=GREEDY, prompt_logprobs=0)) is False


@pytest.mark.parametrize(("said", "splits"), [(None, True), (False, True), (True, False)])
def test_what_wants_no_cache_read_is_handed_nothing(said, splits):
    request = token_request(sampling=GREEDY | {"skip_reading_prefix_cache": said})
    assert (why_unsplittable(request) is None) is splits
    assert first_token_may_be_handed_over(request) is splits


def test_nothing_else_of_a_request_keeps_it_from_being_handed_kv():
    more = {"prompt_logprobs": 1, "cache_salt": "pepper", "priority": 3, "reasoning_ended": True}
    assert why_unsplittable(token_request(sampling=GREEDY | {"seed": 7, "extra_args": {"a": 1}}, **more)) is None


# what another engine could continue


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0, "seed": 7},
        {"logprobs": 3, "logit_bias": {"1": 1.0}, "allowed_token_ids": [1], "stop_token_ids": [2], "min_tokens": 4},
        {"repetition_penalty": 1.3, "top_k": 4, "ignore_eos": True},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "bad_words": [], "extra_args": {}, "seed": None},
        {"structured_outputs": None, "thinking_token_budget": None, "repetition_detection": None},
    ],
)
def test_what_looks_at_one_position_can_be_continued(sampling):
    assert obstacle_to_continuing(token_request(sampling=sampling)) is None


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"structured_outputs": {"regex": "a"}}, "grammar"),
        ({"presence_penalty": 0.1}, "penalty"),
        ({"frequency_penalty": -0.1}, "penalty"),
        ({"bad_words": ["a"]}, "bad words"),
        ({"extra_args": {"a": 1}}, "logits processor"),
        ({"thinking_token_budget": 0}, "budget"),
        ({"thinking_token_budget": 9}, "budget"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetitions"),
        ({"seed": 0, "temperature": 0.7}, "seed"),
        ({"seed": 7}, "seed"),
    ],
)
def test_what_counts_from_the_first_token_cannot(sampling, word):
    assert word in obstacle_to_continuing(token_request(sampling=sampling))


@given(REQUESTS)
def test_what_cannot_be_continued_has_no_first_token_of_prefill(request):
    if obstacle_to_continuing(request) is not None:
        assert not first_token_may_be_handed_over(request)
