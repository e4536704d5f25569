"""Log-probabilities of answers and of prompts, and token ids beside texts: as ``vllm serve`` gives them."""

import pytest

from helpers.parity import chat, completion, table

pytestmark = pytest.mark.e2e

IDS = list(range(2000, 2040))
AS_IDS = {"return_tokens_as_token_ids": True, "by_chunks": ("text_offset",)}
EMOJI = "Hi 🦊🌲 木"


@table(
    {
        "chat, sampled only": chat(logprobs=True),
        "chat, top 0": chat(logprobs=True, top_logprobs=0),
        "chat, top 1": chat(logprobs=True, top_logprobs=1),
        "chat, top 5": chat(logprobs=True, top_logprobs=5),
        "chat, top 5, not greedy": chat(logprobs=True, top_logprobs=5, temperature=1.7, seed=4),
        "chat, asked for none": chat(logprobs=False),
        "chat, of one token": chat(logprobs=True, top_logprobs=2, max_tokens=1),
        "chat, of characters split across tokens": chat(EMOJI, logprobs=True, top_logprobs=2),
        "chat, with a stop string": chat("One. Two. Three.", logprobs=True, top_logprobs=1, stop=["Two"]),
        "chat, as token ids": chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
        "completion, 0": completion(logprobs=0),
        "completion, 1": completion(logprobs=1),
        "completion, 5": completion(logprobs=5),
        "completion, 5, not greedy": completion(logprobs=5, temperature=1.7, seed=4),
        "completion, as many as are allowed": completion(logprobs=30),
        "completion, of one token": completion(logprobs=2, max_tokens=1),
        "completion, of characters split across tokens": completion(EMOJI, logprobs=2),
        "completion, with a stop string": completion("One. Two. Three.", logprobs=1, stop=["Two"]),
        "completion, as token ids": completion(logprobs=2, **AS_IDS),
        "completion, with penalties": completion(logprobs=2, frequency_penalty=1.0, repetition_penalty=1.2),
    }
)
def test_log_probabilities(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "completion, prompt_logprobs 0": completion(prompt_logprobs=0),
        "completion, prompt_logprobs 2": completion(prompt_logprobs=2),
        "completion, prompt_logprobs and logprobs": completion(prompt_logprobs=1, logprobs=3),
        "completion, prompt_logprobs of token ids": completion(prompt=IDS, prompt_logprobs=1),
        "completion, prompt_logprobs of one token": completion(prompt=[7], prompt_logprobs=1),
        "completion, prompt_logprobs of a list": completion(
            prompt=["one two", "three"], prompt_logprobs=1, generations=2
        ),
        "completion, prompt_logprobs, n 2": completion(prompt_logprobs=1, n=2, temperature=0.8, seed=3, generations=2),
        "completion, echo and logprobs 0": completion(echo=True, logprobs=0),
        "completion, echo and logprobs 2": completion(echo=True, logprobs=2),
        "completion, echo, logprobs and prompt_logprobs": completion(echo=True, logprobs=1, prompt_logprobs=2),
        "completion, echo and logprobs of token ids": completion(prompt=IDS, echo=True, logprobs=1),
        "completion, echo and logprobs of a list": completion(
            prompt=["one two", "three"], echo=True, logprobs=1, generations=2
        ),
        "completion, only the prompt's": completion(echo=True, logprobs=1, max_tokens=0),
        "chat, prompt_logprobs 1": chat(prompt_logprobs=1),
        "chat, prompt_logprobs 1 and top_logprobs": chat(prompt_logprobs=1, logprobs=True, top_logprobs=2),
    },
    streams=(False,),
)
def test_log_probabilities_of_the_prompt(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "completion, echo and logprobs": completion(echo=True, logprobs=2),
        "completion, echo and logprobs of a list": completion(
            prompt=["one two", "three"], echo=True, logprobs=1, generations=2
        ),
        "completion, only the prompt's": completion(echo=True, logprobs=1, max_tokens=0),
        "chat, echo and logprobs": chat(echo=True, logprobs=True, top_logprobs=1),
    },
    streams=(True,),
)
def test_log_probabilities_of_the_prompt_in_a_stream(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "chat": chat(return_token_ids=True),
        "chat, scripted": chat(EMOJI, return_token_ids=True),
        "chat, stopped": chat("One. Two. Three.", return_token_ids=True, stop=["Two"]),
        "chat, n 2": chat(return_token_ids=True, n=2, temperature=0.9, seed=3, generations=2),
        "chat, prompt text": chat(return_prompt_text=True),
        "completion": completion(return_token_ids=True),
        "completion, echo": completion(return_token_ids=True, echo=True),
        "completion, with logprobs": completion(return_token_ids=True, logprobs=2, **AS_IDS),
    }
)
def test_token_ids(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "completion, negative": completion(logprobs=-2, served="refused"),
        "chat, top_logprobs alone": chat(top_logprobs=2, served="refused"),
    }
)
def test_what_is_refused(parity, case):
    assert parity.check(case).refused


@table({"completion": completion(prompt_logprobs=1, served="refused")}, streams=(True,))
def test_prompt_logprobs_are_refused_in_a_stream(parity, case):
    assert parity.check(case).refused


@table(
    {
        "chat": chat(logprobs=True, logprob_token_ids=[5, 1000, 2000]),
        "completion": completion(logprobs=0, logprob_token_ids=[5, 1000, 2000]),
        "completion, more than 20": completion(logprobs=0, logprob_token_ids=list(range(100, 128))),
    },
    name="alone",
)
def test_log_probabilities_of_chosen_tokens(parity, alone):
    """Alone, because vLLM gives those tokens to every other request of the batch that asks for log-probabilities."""
    assert parity.check_alone(alone).status == 200
