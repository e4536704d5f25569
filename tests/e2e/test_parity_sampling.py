"""What shapes sampling, and answers with a prescribed form, reach decode as they reach ``vllm serve``."""

import json

import pytest

from helpers.parity import chat, completion, table

pytestmark = pytest.mark.e2e

BOTH = {"chat": chat, "completion": completion}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"enum": [7, 42]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
GRAMMAR = 'root ::= "select " column " from lamps"\ncolumn ::= "age" | "name"'


@table(
    {
        f"{kind}, {name}": ask(**more)
        for kind, ask in BOTH.items()
        for name, more in {
            "greedy": {},
            "seed": {"temperature": 1.2, "seed": 11},
            "seed and top_p": {"temperature": 1.2, "seed": 11, "top_p": 0.9},
            "seed and top_k": {"temperature": 1.2, "seed": 12, "top_k": 5},
            "seed and min_p": {"temperature": 1.2, "seed": 13, "min_p": 0.05},
            "top_k 1": {"temperature": 1.2, "top_k": 1},
            "presence penalty": {"presence_penalty": 1.5},
            "frequency penalty": {"frequency_penalty": 2.0},
            "repetition penalty": {"repetition_penalty": 1.8},
            "all penalties, not greedy": {
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.2,
                "temperature": 0.9,
                "seed": 2,
            },
            "logit_bias": {"logit_bias": {"1000": 100, "7": -100}},
            "logit_bias that favours": {"logit_bias": {"1000": 8.5, "2000": 8.5}},
            "bad words": {"bad_words": ["lamp", "tree", " the"]},
            "a priority": {"priority": 3},
            "a negative priority": {"priority": -3},
        }.items()
    }
)
def test_sampling(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        f"{kind}, {name}": ask(allowed_token_ids=allowed, **more)
        for kind, ask in BOTH.items()
        for name, (allowed, more) in {
            "a few": ([1000, 2000, 3000, 4000], {}),
            "one": ([1000], {}),
            "one, and repetition detected": (
                [1000],
                {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3}},
            ),
        }.items()
    },
    name="alone",
)
def test_allowed_tokens(parity, alone):
    """Alone, because vLLM 0.30 may leave the limits of one request to another of its batch."""
    assert parity.check_alone(alone).status == 200


@table(
    {
        f"{kind}, {name}": ask(**({"max_tokens": 24} | more))
        for kind, ask in BOTH.items()
        for name, more in {
            "json_schema": {"response_format": SCHEMA},
            "json_schema, not greedy": {"response_format": SCHEMA, "temperature": 1.0, "seed": 3},
            "json_object": {"response_format": {"type": "json_object"}},
            "plain text": {"response_format": {"type": "text"}},
            "json": {"structured_outputs": {"json": PERSON}},
            "regex": {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}},
            "choice": {"structured_outputs": {"choice": ["a red lamp", "a green tree"]}},
            "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
            "regex with logprobs": {
                "structured_outputs": {"regex": "[0-9]{4}"},
                "logprobs": 2 if kind == "completion" else True,
            },
            "choice cut short": {"structured_outputs": {"choice": ["a red lamp", "a green tree"]}, "max_tokens": 2},
            "json_schema with min_tokens": {"response_format": SCHEMA, "min_tokens": 2},
            "json_schema with a stop string": {"response_format": SCHEMA, "stop": ["age"]},
        }.items()
    }
)
def test_structured_output(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        kind: ask('{"name": "Ann", "age": 7}', max_tokens=24, response_format=SCHEMA, logprobs=kind == "chat" or 1)
        for kind, ask in BOTH.items()
    }
)
def test_json_is_as_the_schema_says(parity, case):
    assert json.loads(parity.check(case).said) == {"name": "Ann", "age": 7}


@table({"a script against the grammar": chat("no", structured_outputs={"choice": ["yes"]}, generations=None)})
def test_an_answer_that_fails_at_the_engine_is_an_error(parity, case):
    asked = parity.ask(case)
    for answer in (asked.answer.result(), asked.expected.result()):
        error = answer.body["error"]
        assert answer.status == (200 if "stream" in case.body else error["code"])
        assert error["code"] >= 500


@table(
    {
        "a bad grammar": chat(structured_outputs={"grammar": "root ::= nothing"}, served="refused"),
        "a bad regex": chat(structured_outputs={"regex": "(("}, served="refused"),
        "two at once": chat(structured_outputs={"regex": "a", "choice": ["b"]}, served="refused"),
        "no choice": chat(structured_outputs={"choice": []}, served="refused"),
        "no schema": chat(response_format={"type": "json_schema"}, served="refused"),
        "an unknown response format": chat(response_format={"type": "poem"}, served="refused"),
        "a token outside the vocabulary allowed": chat(allowed_token_ids=[99999999], served="refused"),
        "a bias outside the vocabulary": chat(logit_bias={"99999999": 1}, served="refused"),
        "a bad word that is empty": chat(bad_words=[""], served="refused"),
        "a repetition penalty of 0": chat(repetition_penalty=0, served="refused"),
        "a presence penalty out of range": chat(presence_penalty=9, served="refused"),
        "temperature out of range": chat(temperature=-1, served="refused"),
        "top_p out of range": chat(top_p=1.5, served="refused"),
        "top_k out of range": chat(top_k=-5, served="refused"),
        "min_p out of range": chat(min_p=2, served="refused"),
        "a seed of a wrong type": chat(seed="seven", served="refused"),
        "n 0": chat(n=0, served="refused"),
        "n of a greedy answer": chat(n=2, served="refused"),
        "a script of a wrong type": chat(vllm_xargs={"script": "text"}, served="refused"),
    }
)
def test_what_is_refused(parity, case):
    assert parity.check(case).refused
