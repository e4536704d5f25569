"""Where answers end: stop strings, stop tokens, token limits. Texts are scripted, so that each end is certain."""

import pytest

from helpers.parity import chat, completion, table

pytestmark = pytest.mark.e2e

STORY = "One lamp. Two trees. Three lamps and DEF, then the end."
ABC = ("ab", "c", "DE", "F g", "hij")  # tokenized piece by piece, so that words cross the tokens' borders


BOTH = {"chat": chat, "completion": completion}


@table(
    {
        f"{kind}, {name}": ask(says, max_tokens=24, **more)
        for kind, ask in BOTH.items()
        for name, (says, more) in {
            "a word": (STORY, {"stop": ["Two"]}),
            "one string": (STORY, {"stop": " trees"}),
            "the first of several": (STORY, {"stop": ["DEF", "Three", "nothing"]}),
            "across tokens": (ABC, {"stop": ["cDEF"]}),
            "inside a token": (ABC, {"stop": ["E"]}),
            "the end of one token and the start of the next": (ABC, {"stop": ["F g"]}),
            "kept": (STORY, {"stop": ["Two"], "include_stop_str_in_output": True}),
            "kept, across tokens": (ABC, {"stop": ["cDEF"], "include_stop_str_in_output": True}),
            "begun and not finished": (STORY, {"stop": ["Three lamps are"]}),
            "at the very end": (STORY, {"stop": ["end."]}),
            "the first thing said": (STORY, {"stop": ["One"]}),
            "of a longer buffer": (STORY, {"stop": ["trees. Three lamps and DEF"]}),
            "of characters of several tokens": (("a 🦊 b 🌲 c",), {"stop": ["🌲"]}),
            "with min_tokens": (STORY, {"stop": ["One", "Two"], "min_tokens": 6}),
            "a token id": (("One", " lamp", 1234, " more"), {"stop_token_ids": [1234]}),
            "a token id kept": (
                ("One", " lamp", 1234, " more"),
                {"stop_token_ids": [1234], "include_stop_str_in_output": True},
            ),
            "a token id and a string": (("One", " lamp", 1234), {"stop_token_ids": [1234], "stop": ["lam"]}),
            "a token id before min_tokens": (
                ("One", 1234, " lamp", 1234),
                {"stop_token_ids": [1234], "min_tokens": 3},
            ),
        }.items()
    }
)
def test_stops(parity, case):
    answer = parity.check(case)
    assert answer.status == 200


@table(
    {
        "chat": chat("ABC DEF GHI", stop=["DEF"], max_tokens=24),
        "completion": completion("ABC DEF GHI", stop=["DEF"], max_tokens=24),
    }
)
def test_a_stop_string_does_not_leak(parity, case):
    assert parity.check(case).said == "ABC "


@table(
    {
        f"{kind}, {name}": ask(says, **more)
        for kind, ask in BOTH.items()
        for name, (says, more) in {
            "1 token": ((), {"max_tokens": 1}),
            "1 token that ends": ("", {"max_tokens": 1}),
            "1 token, scripted": ("One two", {"max_tokens": 1}),
            "omitted": ("One two three.", {"max_tokens": ...}),
            "null": ("One two three.", {"max_tokens": None}),
            "exactly as long as the answer": ("One two three.", {"max_tokens": 5}),
            "ignore_eos": ("One", {"ignore_eos": True, "max_tokens": 6}),
            "ended at once": ((2,), {}),
            "min_tokens": ((), {"min_tokens": 8, "max_tokens": 8}),
            "min_tokens equal to max_tokens 1": ((), {"min_tokens": 1, "max_tokens": 1}),
            "min_tokens before the end": (("a", 2, "b", 2), {"min_tokens": 3}),
        }.items()
    }
    | {
        "chat, max_completion_tokens": chat(max_tokens=..., max_completion_tokens=5),
        "chat, max_completion_tokens beside max_tokens": chat(max_tokens=9, max_completion_tokens=5),
        "chat, max_completion_tokens null": chat(max_tokens=5, max_completion_tokens=None),
        "chat, max_completion_tokens 1": chat(max_tokens=..., max_completion_tokens=1),
    }
)
def test_limits(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "chat, max_tokens 0": chat(max_tokens=0, served="refused"),
        "completion, max_tokens 0": completion(max_tokens=0, served="refused"),
        "chat, max_completion_tokens 0": chat(max_tokens=..., max_completion_tokens=0, served="refused"),
        "chat, max_tokens negative": chat(max_tokens=-1, served="refused"),
        "chat, min_tokens over max_tokens": chat(max_tokens=2, min_tokens=9, served="refused"),
        "chat, min_tokens negative": chat(min_tokens=-1, served="refused"),
        "chat, an empty stop string": chat(stop=[""], served="refused"),
        "chat, stop token ids of a wrong type": chat(stop_token_ids=["a"], served="refused"),
        "chat, max_tokens over the context": chat(max_tokens=5000, served="refused"),
        "completion, max_tokens over the context": completion(max_tokens=5000, served="refused"),
    }
)
def test_limits_that_are_refused(parity, case):
    assert parity.check(case).refused


@table({"chat": chat(max_tokens=...), "completion": completion(prompt="Hi", max_tokens=1023)}, streams=(True,))
@pytest.mark.full
def test_an_answer_runs_to_the_end_of_the_context(parity, case):
    assert parity.check(case).body["usage"]["total_tokens"] <= 1024
