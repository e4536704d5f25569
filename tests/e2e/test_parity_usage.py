"""Token counts, whole and in streams, with prompts that are in a cache and with those that are not."""

import random
import uuid
from dataclasses import replace

import pytest

from helpers.parity import COLOCATED, chat, completion, table

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 32
LONG = [random.Random(3).randrange(100, 40000) for _ in range(5 * BLOCK_TOKENS + 7)]
MESSAGES = [{"role": "user", "content": "A lamp and a tree, again and again. " * 20}]
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@table(
    {
        f"{kind}, {name}": ask(**more)
        for kind, ask in {"chat": chat, "completion": completion}.items()
        for name, more in {
            "usage": {"stream_options": {"include_usage": True}},
            "no usage": {"stream_options": {"include_usage": False}},
            "no stream options": {"stream_options": ...},
            "stream options null": {"stream_options": None},
            "usage all along": CONTINUOUS,
            "usage all along, n 2": {**CONTINUOUS, "n": 2, "temperature": 0.8, "seed": 3, "generations": 2},
            "usage all along, stopped": {**CONTINUOUS, "stop": ["a", "e"]},
            "chunks of 4 tokens": {"stream_interval": 4},
        }.items()
    },
    streams=(True,),
)
def test_usage_of_streams(parity, case):
    assert parity.check(case).status == 200


@pytest.mark.parametrize("served", ["split", COLOCATED])
@table(
    {
        "chat": chat(messages=MESSAGES),
        "completion": completion(prompt=LONG),
        "whole blocks": completion(prompt=LONG[: 4 * BLOCK_TOKENS]),
        "less than a block": completion(prompt=LONG[: BLOCK_TOKENS - 1]),
        "a chat with usage all along": chat(messages=MESSAGES, **CONTINUOUS),
    },
    name="repeated",
)
def test_cached_tokens(parity, repeated, served):
    """The second time the prompt is found in the cache of whoever computes it; both times that is told."""
    headers = {"X-Trivet-Serve": "colocated"} if served == COLOCATED else {}
    case = replace(repeated, served=served, headers=headers)
    # colocated, gateway and reference share an engine: each has a salt of its own
    salts = uuid.uuid4().hex, uuid.uuid4().hex
    cold, warm = parity.check(case, salts=salts), parity.check(case, salts=salts)
    tokens = [answer.body["usage"] for answer in (cold, warm)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in tokens]
    assert tokens[0]["prompt_tokens"] == tokens[1]["prompt_tokens"]
    assert cached == [0, (tokens[0]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS]


@table({"chat": chat(messages=MESSAGES), "completion": completion(prompt=LONG)}, name="repeated", streams=(False,))
def test_a_longer_prompt_finds_the_shorter_one_in_the_cache(parity, repeated):
    salts = uuid.uuid4().hex, uuid.uuid4().hex
    parity.check(repeated, salts=salts)
    if "prompt" in repeated.body:
        more = {"prompt": [*LONG, *LONG[:50]]}
    else:
        more = {"messages": [*MESSAGES, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]}
    answer = parity.check(replace(repeated, body={**repeated.body, **more}), salts=salts)
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 4 * BLOCK_TOKENS
