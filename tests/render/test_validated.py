"""Requests that are validated once for many are what vLLM's model makes of each."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator, model_validator

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=8)},
    ),
    min_size=1,
    max_size=4,
)
VALUES = {
    "model": st.sampled_from(["m", None, "other"]),
    "max_tokens": st.sampled_from([1, 1.0, True, None, -1, "1"]),
    "temperature": st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, "hot", float("nan")]),
    "seed": st.sampled_from([0, False, 2**70]),
    "stream": st.booleans(),
    "logprobs": st.booleans(),
    "top_logprobs": st.sampled_from([0, 2, -2]),
    "stop": st.sampled_from([None, "x", ["x"], []]),
    "tool_choice": st.sampled_from(["none", "auto", None]),
    "cache_salt": st.sampled_from(["", "salt"]),
    "request_id": st.sampled_from(["mine", None]),
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.sampled_from([{"a": 1}, {}]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_schema"}]),
    "kv_transfer_params": st.sampled_from([{"prompt_token_ids": [1]}]),
    "nonsense": st.sampled_from([1, "x", [1], {"a": [1]}]),
}
BODIES = st.fixed_dictionaries({"messages": MESSAGES}, optional=VALUES)


@pytest.fixture(scope="module")
def kept(frontend):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    from trivet.render.validated import Validated

    return ChatCompletionRequest, Validated


def outcome(validate, body):
    """All that a request is, but for a name that is new each time; or why there is none."""
    try:
        asked = validate(copy.deepcopy(body))
    except Exception as error:
        return type(error), str(error)
    fields = dict(asked.__dict__)
    if "request_id" not in body:
        assert fields.pop("request_id")
    kinds = {name: type(value) for name, value in fields.items()}
    return repr(fields), kinds, asked.model_fields_set, repr(asked.__pydantic_private__), repr(asked.model_extra)


def test_vllms_model_is_known(kept):
    model, validated = kept
    assert validated.takes(model)


def test_messages_are_validated_one_by_one_and_stay_as_they_are(kept):
    model, validated = kept
    keeping = validated(model)

    def ours(body):
        messages = body["messages"]
        asked = keeping.validated({**body, "messages": messages[-1:]}, keeping.key_of(body))
        asked.__dict__["messages"] = messages
        return asked

    @settings(max_examples=400, deadline=None)
    @given(body=BODIES)
    def same(body):
        proper = outcome(model.model_validate, body)
        for _ in range(3):
            found = outcome(ours, body)
            if len(proper) == 2:  # an error's text has the messages in it
                assert found[0] is proper[0]
            else:
                assert in_order(found) == in_order(proper)

    same()


def in_order(told):
    """Fields of a message are in vLLM's order where vLLM has made it: no template sees that."""
    fields, *others = told
    values = eval(fields, {"nan": "nan", "StreamOptions": dict, "ResponseFormat": dict, "inf": "inf"})
    return str({name: value for name, value in values.items() if name != "messages"}), values["messages"], others


def test_each_request_is_its_own(kept):
    model, validated = kept
    keeping = validated(model)
    body = {"messages": [{"role": "user", "content": "Hi"}], "model": "m"}
    first, second, third = (keeping.validated(dict(body), keeping.key_of(body)) for _ in range(3))
    names = {one.request_id for one in (first, second, third)}
    assert len(names) == 3
    second.stop.append("x")
    second.stop_token_ids.append(7)
    second.bad_words.append("x")
    second.temperature = 0.5
    second._grammar_from_parser = True
    second._DEFAULT_SAMPLING_PARAMS["top_p"] = 0.1
    second.nonsense = 1
    fourth = keeping.validated(dict(body), keeping.key_of(body))
    for other in (third, fourth):
        assert (other.stop, other.stop_token_ids, other.bad_words, other.temperature) == ([], [], [], None)
        assert other._grammar_from_parser is False
        assert other._DEFAULT_SAMPLING_PARAMS["top_p"] == 1.0
        assert not other.model_extra
        assert "temperature" not in other.model_fields_set


def test_no_more_are_kept_than_are_meant_to_be(kept):
    model, validated = kept
    keeping = validated(model)
    messages = [{"role": "user", "content": "Hi"}]
    for more in (*({"seed": number} for number in range(200)), {"user": "x" * 10_000}):
        body = {"messages": messages, **more}
        keeping.validated(body, keeping.key_of(body))
    assert len(keeping._kept) == 64


@pytest.mark.parametrize("more", [{"stop": ["x"]}, {"cache_salt": "x"}, {"chat_template_kwargs": {}}])
def test_what_is_not_plain_or_salted_has_no_key(kept, more):
    _, validated = kept
    assert validated.key_of({"messages": [], "seed": 1}) is not None
    assert validated.key_of({"messages": [], "seed": 1, **more}) is None


def test_keys_of_bodies_differ_where_values_do(kept):
    _, validated = kept
    values = [0, 0.0, -0.0, False, None, "0", "0.0", "", 1, True, 1.0]
    assert len({validated.key_of({"seed": one}) for one in values}) == len(values)
    assert len({validated.key_of({name: 1}) for name in ("seed", "n", "messages")}) == 3


class _Messages(BaseModel):
    messages: list[dict]

    @field_validator("messages")
    @classmethod
    def none_is_last(cls, value):
        return value


class _Whole(BaseModel):
    messages: list[dict]

    @model_validator(mode="after")
    def counts(self):
        return self


def test_a_model_that_looks_at_messages_in_ways_not_known_is_not_taken(kept):
    _, validated = kept
    assert not validated.takes(_Messages)
    assert not validated.takes(_Whole)
