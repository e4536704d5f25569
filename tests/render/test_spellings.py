"""Other ways to write a tokenizer mean the same to the reference itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from trivet.render.hard_texts import hard_texts
from trivet.render.spellings import spellings


def digits_and_bytes(**bytes_) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    one = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    one.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, **bytes_)]
    )
    one.decoder = decoders.ByteLevel()
    return one


def cut(tokenizer: Tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    return tokenizer.pre_tokenizer.pre_tokenize_str(text)


@pytest.fixture(scope="module")
def both() -> tuple[Tokenizer, Tokenizer]:
    as_it_is, other = spellings(digits_and_bytes().to_str())
    return Tokenizer.from_str(as_it_is), Tokenizer.from_str(other)


def test_hard_texts_are_cut_alike(both):
    as_it_is, other = both
    for text in hard_texts([]):
        assert cut(other, text) == cut(as_it_is, text)


@settings(deadline=None, max_examples=400)
@given(text=st.text(alphabet=st.sampled_from("ab1٣½ \t\n\u3000'sl.!é中\u0301")))
def test_any_text_is_cut_alike(both, text):
    as_it_is, other = both
    assert cut(other, text) == cut(as_it_is, text)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.ByteLevel()),
        lambda one: setattr(one, "pre_tokenizer", None),
        lambda one: setattr(
            one,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel()]),
        ),
    ],
)
def test_what_is_not_known_is_left_as_it_is(spoil):
    one = digits_and_bytes()
    spoil(one)
    assert spellings(one.to_str()) == (one.to_str(),)


def test_a_pattern_that_is_turned_off_is_none():
    one = digits_and_bytes(use_regex=False)
    assert spellings(one.to_str()) == (one.to_str(),)


def test_only_the_cutting_is_written_in_another_way():
    one = digits_and_bytes()
    one.normalizer = normalizers.NFC()
    one.add_special_tokens(["<x>"])
    as_it_is, other = map(json.loads, spellings(one.to_str()))
    assert {name for name in as_it_is if as_it_is[name] != other[name]} == {"pre_tokenizer"}
