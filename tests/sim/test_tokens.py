"""The next token, as a function of the whole sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.sim.tokens import Walk, candidates, digest, id_bytes

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


def answer(prompt, count: int, *, banned=(), eos_chance: float = 0.0) -> list[int]:
    walk = Walk(prompt, vocab_size=32000, eos_token_id=2, eos_chance=eos_chance)
    tokens = []
    for _ in range(count):
        tokens.append(walk.token(walk.draw(), banned))
        walk.append(tokens[-1])
    return tokens


@given(IDS, st.integers(0, 12), st.integers(0, 12))
def test_an_answer_that_is_continued_elsewhere_goes_on_alike(prompt, first, second):
    whole = answer(prompt, first + second)
    assert whole == [*answer(prompt, first), *answer([*prompt, *whole[:first]], second)]


@given(IDS, st.integers(0, 8), st.integers(1, 8))
def test_with_ends_of_sequence_as_well(prompt, first, second):
    whole = answer(prompt, first + second, eos_chance=0.3)
    assert whole[first:] == answer([*prompt, *whole[:first]], second, eos_chance=0.3)


@given(IDS, IDS)
def test_other_prompts_have_other_answers(one, other):
    assert (answer(one, 4) == answer(other, 4)) == (one == other)


def test_tokens_are_words_of_the_vocabulary():
    tokens = answer([1, 2, 3], 2000)
    assert 259 <= min(tokens) < 400
    assert 31800 < max(tokens) < 32000
    assert len(set(tokens)) > 1800


def test_they_are_the_same_everywhere():
    # a change here would make two versions of Trivet give unlike answers to one conversation
    assert answer([1, 2, 3], 3) == [20957, 25709, 2968]


def test_ends_come_about_as_often_as_asked():
    tokens = answer([5], 4000, eos_chance=0.1)
    assert 300 < tokens.count(2) < 500
    assert answer([5], 50, eos_chance=1.0) == [2] * 50
    assert answer([5], 50).count(2) == 0


def test_what_is_banned_does_not_come():
    (usual,) = answer([7], 1)
    assert answer([7], 1, banned={usual}) == [usual + 1]
    assert 2 not in answer([7], 50, banned={2}, eos_chance=1.0)


def test_candidates_are_distinct_and_fall():
    best = candidates(b"\0" * 16, 300, 20, 32000)
    assert best[0][0] == 300
    assert len({token for token, _ in best}) == 20
    logprobs = [logprob for _, logprob in best]
    assert logprobs == sorted(logprobs, reverse=True)
    assert logprobs[0] < 0
    assert [token for token, _ in candidates(b"\0" * 16, 31999, 3, 32000)] == [31999, 259, 260]
    assert len(candidates(b"\0" * 16, 300, 0, 32000)) == 1


def test_a_digest_tells_prompts_apart():
    assert digest([1, 2]) == digest((1, 2)) != digest([2, 1])


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_ids_are_32_bits(ids):
    with pytest.raises(OverflowError):
        id_bytes(ids)
