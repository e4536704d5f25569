"""The end of a prompt makes the same text of an answer as the whole."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from helpers import conversations
from helpers.families import FAMILIES


@pytest.fixture(scope="module")
def detokenizing(frontend):
    """``trivet.render.detokenizing``; vLLM is loaded with ``frontend``."""
    import trivet.render.detokenizing

    return trivet.render.detokenizing


def said(backend: Tokenizer, prompt: list[int], answer: list[int], *, skip: bool) -> list[str | None]:
    stream = DecodeStream(ids=prompt, skip_special_tokens=skip)
    pieces: list[str | None] = []
    for token in answer:
        try:
            pieces.append(stream.step(backend, token))
        except Exception as error:  # the library's own, of any kind
            pieces.append(type(error).__name__)
            break
    return pieces


@pytest.mark.parametrize("family", [one for one in FAMILIES if not one.missing], ids=lambda one: one.name)
def test_an_answer_reads_the_same_behind_the_end_as_behind_the_whole(detokenizing, family, tmp_path):
    backend = Tokenizer.from_file(str(family.write(tmp_path / "t") / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    ends = detokenizing.Ends(backend)
    chance = random.Random(family.name)
    texts = [one.text for one in conversations.texts(seed=5)]
    vocabulary = sorted(backend.get_vocab(with_added_tokens=True).values())
    shortened = 0
    for number in range(60):
        whole = " ".join(chance.choice(texts)[:600] for _ in range(6)) + " and then they said"[: number % 20]
        prompt = backend.encode(whole, add_special_tokens=False).ids
        answer = backend.encode(chance.choice(texts)[:60], add_special_tokens=False).ids[:12]
        if number % 3 == 0:  # what no text comes to
            answer = [chance.choice(vocabulary) for _ in range(12)]
        for skip in (True, False):
            end = ends.of(prompt, skip_special_tokens=skip) if len(prompt) > 64 else None
            if end is None:
                continue
            shortened += 1
            assert len(end) < len(prompt)
            assert end == prompt[-len(end) :]
            assert said(backend, end, answer, skip=skip) == said(backend, prompt, answer, skip=skip)
    assert shortened or not ends._is_local


def test_a_decoder_that_is_not_known_is_given_the_whole(detokenizing):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.decoder = decoders.CTC()
    assert detokenizing.Ends(backend).of([0, 1] * 500, skip_special_tokens=True) is None


def test_a_prompt_that_ends_in_half_a_character_is_given_whole(detokenizing, model_folder):
    backend = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    half = backend.encode("👍", add_special_tokens=False).ids[:1]
    prompt = backend.encode("word " * 900, add_special_tokens=False).ids + half
    assert backend.decode(prompt).endswith("\N{REPLACEMENT CHARACTER}")
    assert detokenizing.Ends(backend).of(prompt, skip_special_tokens=True) is None
    assert detokenizing.Ends(backend).of(prompt[:-1], skip_special_tokens=True) is not None


class Request(SimpleNamespace):
    """What vLLM's detokenizer looks at."""

    def __copy__(self):
        return Request(**vars(self))


def test_vllm_is_given_the_end_of_long_prompts_only_and_the_request_stays(detokenizing, model_folder, monkeypatch):
    from transformers import AutoTokenizer
    from vllm.v1.engine import output_processor

    given: list[int] = []

    class Theirs:
        @classmethod
        def from_new_request(cls, tokenizer, request):
            given.append(len(request.prompt_token_ids))

    monkeypatch.setattr(output_processor, "IncrementalDetokenizer", Theirs)
    detokenizing.shorten_prompts()
    detokenizing.shorten_prompts()  # once is enough
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for words in (10, 5000):
        ids = tokenizer.encode("word " * words)
        request = Request(prompt_token_ids=ids, sampling_params=SimpleNamespace(skip_special_tokens=True))
        before = copy.deepcopy(ids)
        output_processor.IncrementalDetokenizer.from_new_request(tokenizer, request)
        output_processor.IncrementalDetokenizer.from_new_request(object(), request)
        assert request.prompt_token_ids == before
    assert given[:2] == [given[0]] * 2
    assert given[2] < 100 < given[3]
