"""Several answers to one request, several prompts in one, and prompts that come back: all as by ``vllm serve``."""

import pytest

from helpers.parity import EITHER, PROMPT, Case, chat, completion, table

pytestmark = pytest.mark.e2e

IDS = list(range(1000, 1040))
SHORT_IDS = [[1000, 2000, 3000], [4000], list(range(500, 540))]


@table(
    {
        "chat of 2": chat(n=2, temperature=0.8, seed=5, generations=2),
        "chat of 4 with logprobs": chat(n=4, temperature=1.0, seed=6, logprobs=True, top_logprobs=2, generations=4),
        "chat of 2, each stopped by itself": chat(
            n=2, temperature=1.5, seed=7, stop=["a", "e"], max_tokens=24, generations=2
        ),
        "completion of 2": completion(n=2, temperature=0.8, seed=5, generations=2),
        "completion of 3, 2 prompts": completion(
            prompt=["one two", "three four five"], n=3, temperature=0.9, seed=9, generations=6
        ),
        "completion of 2, scripted": completion("Both say this.", n=2, temperature=0.8, seed=5, generations=2),
        "completion of 2 with echo": completion(n=2, temperature=0.8, seed=5, echo=True, generations=2),
    }
)
def test_several_choices(parity, case):
    parity.check(case)


@table(
    {
        "a list of one": completion(prompt=[PROMPT]),
        "a list of three": completion(prompt=["one", "two three four", PROMPT], generations=3),
        "token ids": completion(prompt=IDS),
        "a list of token ids": completion(prompt=[IDS]),
        "a list of lists of token ids": completion(prompt=SHORT_IDS, generations=3),
        "the same prompt twice": completion(prompt=[IDS, IDS], generations=2, stream_options=...),
        "a list with logprobs": completion(prompt=["one two three", "four"], logprobs=2, generations=2),
        "a list with token ids returned": completion(prompt=SHORT_IDS, return_token_ids=True, generations=3),
        "echo": completion(echo=True),
        "echo of token ids": completion(prompt=IDS, echo=True),
        "echo of a list": completion(prompt=["one two", "three"], echo=True, generations=2),
        "echo and nothing more": completion(echo=True, max_tokens=0),
        "echo with a stop string": completion("One. Two. Three.", echo=True, stop=["Two"]),
    }
)
def test_prompts(parity, case):
    parity.check(case)


@table({"a suffix": completion(suffix=" the end", served="refused")})
def test_a_suffix_is_refused(parity, case):
    assert parity.check(case).refused


@table(
    {
        "beams": completion(use_beam_search=True, n=2, max_tokens=4, generations=None),
        "beams of a chat": chat(use_beam_search=True, n=2, max_tokens=4, generations=None),
        "beams with length penalty": completion(
            use_beam_search=True, n=2, max_tokens=4, length_penalty=0.5, temperature=0.7, generations=None
        ),
        "beams of a list": completion(
            prompt=["one two three", "four"], use_beam_search=True, n=2, max_tokens=3, generations=None
        ),
    },
    streams=(False,),
)
def test_beam_search(parity, case):
    parity.check(case)


@table(
    {
        "completion": completion(best_of=2, temperature=0.8, seed=3, generations=None, served=EITHER),
        "chat": chat(best_of=2, temperature=0.8, seed=3, generations=None, served=EITHER),
    },
    streams=(False,),
)
def test_best_of_is_an_unknown_field(parity, case: Case):
    assert len(parity.check(case).body["choices"]) == 1
