"""Shorter ways to a tokenizer's ids, against the tokenizer: over families and texts that nobody tuned them to.

The reference is ``transformers``' tokenizer, as vLLM loads it. A way may say that it does not take a tokenizer or a
text; what it gives has to be the same ids. Which tokenizers it has to take is written here as well: a way that takes
none proves nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from helpers import families
from helpers.conversations import Chat, Text, any_chat, any_text, chats, growing, of_tokens, smallest, texts
from helpers.families import FAMILIES, Family, by_name
from helpers.templates import templates
from render.conftest import let_go
from trivet.render.fast import CANDIDATES
from trivet.render.segments import Rules, SegmentCache, Unsuitable

UNCUT = {
    "bytes, gpt-2's token is normalized": "no token",
    "sentences, tokens normalized": "no token",
    "no token cuts": "no token",
    "merges at random": "at random",
    "a text is given twice": "post-processor",
}
"""Families whose texts are not to be cut, and what is said of them."""
NOT_SHOWN = {"special tokens are split"}
"""Families of which ``tokenizer.json`` does not show what they do: whoever has the tokenizer has to look."""
NOT_PLAIN = {"special tokens are split": "splits special tokens", "merges at random": "at random"}
"""Families that are left to ``transformers`` altogether, and what is said of them."""
TAKEN = {
    "fastokens": ("smollm2", "tekken", "bytes, llama 3's split", "bytes, qwen's split, NFC", "sentences, gemma's"),
    "gigatoken": ("sentences, blank at first place", "bytes, llama 3's split", "tekken"),
}
"""Families that a fast tokenizer has to take, if it is installed."""
PLENTY, LITTLE = 64 * 2**20, 3_000

Ids = Callable[[str], Sequence[int] | None]


@dataclass
class Known:
    """A family's tokenizer."""

    family: Family
    tokenizer: Any

    @cached_property
    def backend(self) -> Tokenizer:
        """The library's, as ``transformers`` uses it when nothing is to be truncated."""
        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def definition(self) -> str:
        return str(self.backend.to_str())

    @cached_property
    def added(self) -> list[str]:
        return of_tokens(json.loads(self.definition)["added_tokens"])

    @cached_property
    def odd(self) -> list[str]:
        """Added tokens that look at what stands beside them."""
        flags = ("lstrip", "rstrip", "single_word")
        every = json.loads(self.definition)["added_tokens"]
        return of_tokens(token for token in every if not token["normalized"] and any(token[flag] for flag in flags))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @cached_property
    def corpus(self) -> list[tuple[Text, list[int]]]:
        return [(text, self.ids(text.text)) for text in texts(self.added)]

    @cached_property
    def long_corpus(self) -> list[tuple[Text, list[int]]]:
        return [(text, self.ids(text.text)) for text in texts(self.added, full=True, seed=13)]

    @cached_property
    def cut(self) -> Rules:
        return Rules(self.definition)

    def rules(self) -> Rules:
        if self.family.name in NOT_SHOWN:
            pytest.skip("the definition does not show it")
        if (told := UNCUT.get(self.family.name)) is None:
            return self.cut
        with pytest.raises(Unsuitable, match=told):
            Rules(self.definition)
        pytest.skip("is not cut, as it should be")

    @property
    def unset(self) -> dict[str, str]:
        """Of what templates name without asking, that which this tokenizer has not."""
        return {name: "" for name in ("bos_token", "eos_token") if getattr(self.tokenizer, name) is None}

    def rendered(self, names: Iterable[str], several: Iterable[Chat]) -> Iterator[tuple[str, str]]:
        """Each chat as it grows, by each template, if that takes it: what it is, and its text."""
        for name in names:
            source, made = templates()[name], 0
            for chat in several:
                for sofar in growing(chat):
                    try:
                        text = self.tokenizer.apply_chat_template(
                            _parsed(sofar.messages),
                            tools=list(sofar.tools) or None,
                            chat_template=source,
                            tokenize=False,
                            add_generation_prompt=True,
                            **self.unset,
                        )
                    except (jinja2.TemplateError, TypeError):  # content parts, two questions in a row
                        continue
                    made += 1
                    yield f"{name}: {sofar.name}", text
            assert made > 20, name


def _parsed(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As vLLM gives messages to templates: a call's arguments are an object."""
    parsed = json.loads(json.dumps(list(messages)))
    for message in parsed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(parsed)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, ``transformers`` may be imported, for whoever comes next as well."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def load(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Known:
    if family.missing:
        pytest.skip(f"{family.missing} is not installed")
    folder = family.write(tmp_path_factory.mktemp("family"))
    with offline():
        from transformers import AutoTokenizer

        return Known(family, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module", params=[pytest.param(family, id=family.name) for family in FAMILIES])
def known(request, tmp_path_factory) -> Iterator[Known]:
    yield load(request.param, tmp_path_factory)
    let_go()


@pytest.fixture(scope="module")
def of_every_template(tmp_path_factory) -> Known:
    return load(by_name("tokens of every template"), tmp_path_factory)


def check(
    known: Known, ids: Ids, corpus: Iterable[tuple[Text, list[int]]], anew: Callable[[], Ids] | None = None
) -> None:
    """Every text that is answered is answered as the reference does; the first that is not is shown short.

    Args:
        anew: makes ``ids`` without what it has kept.
    """
    fresh = anew or (lambda: ids)

    def differs(text: str) -> bool:
        made = fresh()(text)
        return made is not None and list(made) != known.ids(text)

    for text, proper in corpus:
        made = ids(text.text)
        if made is None or list(made) == proper:
            continue
        short = smallest(text.text, differs) if differs(text.text) else None
        if short is None:
            pytest.fail(f"{text.name} only behind others: {text.text[:200]!r}")
        pytest.fail(f"{text.name}, in short {short!r}: {fresh()(short)} instead of {known.ids(short)}"[:2000])


# -- cached segments -------------------------------------------------------------------------------------------------


def segment_checks(known: Known, corpus: Sequence[tuple[Text, list[int]]]) -> None:
    def anew() -> Ids:
        return SegmentCache(known.rules(), known.encode, PLENTY).ids

    cache = SegmentCache(known.rules(), known.encode, PLENTY)
    check(known, cache.ids, corpus, anew)
    before = cache.figures
    check(known, cache.ids, corpus, anew)  # again, from what is kept
    after = cache.figures
    assert after.segments == before.segments
    assert after.asked_characters - before.asked_characters == after.found_characters - before.found_characters
    tight = SegmentCache(known.rules(), known.encode, LITTLE)
    check(known, tight.ids, corpus, anew)  # while segments are thrown out all the time
    assert tight.figures.bytes <= LITTLE
    for text, _ in corpus:
        if cache.ids(text.text) is None:
            assert any(token in text.text for token in known.odd), text


def test_segments_have_the_ids_of_the_whole(known):
    segment_checks(known, known.corpus)


@pytest.mark.full
def test_segments_have_the_ids_of_the_whole_over_the_long_corpus(known):
    segment_checks(known, known.long_corpus)


def grow(known: Known, names: Iterable[str], several: Sequence[Chat]) -> None:
    cache = SegmentCache(known.rules(), known.encode, PLENTY)
    tight = SegmentCache(known.rules(), known.encode, LITTLE)
    for what, text in known.rendered(names, several):
        proper = [(Text(what, text), known.ids(text))]
        check(known, cache.ids, proper)
        check(known, tight.ids, proper)
    if not known.odd:  # whose neighbours are not cut
        assert cache.figures.found_characters > cache.figures.asked_characters / 2


def test_conversations_that_grow_have_the_ids_of_the_whole(known):
    grow(known, [known.family.template], chats(known.added))


def test_conversations_of_every_template_have_the_ids_of_the_whole(of_every_template):
    several = chats(of_every_template.added)
    cache = SegmentCache(of_every_template.rules(), of_every_template.encode, PLENTY)
    for what, text in of_every_template.rendered(templates(), several):
        check(of_every_template, cache.ids, [(Text(what, text), of_every_template.ids(text))])


@pytest.mark.full
def test_every_family_with_every_template(known):
    several = chats(known.added, full=True, seed=17)
    cache = SegmentCache(known.rules(), known.encode, PLENTY)
    for what, text in known.rendered(templates(), several):
        check(known, cache.ids, [(Text(what, text), known.ids(text))])


@pytest.mark.parametrize("examples", [20, pytest.param(400, marks=pytest.mark.full)])
def test_segments_of_any_text_have_the_ids_of_the_whole(known, examples):
    cache = SegmentCache(known.rules(), known.encode, 20_000)  # kept from one example to the next, in part

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(any_text(known.added), any_chat(known.added)))
    def each(drawn: str | Chat) -> None:
        said = [drawn] if isinstance(drawn, str) else [message["content"] for message in drawn.messages]
        token = known.added[len(said) % len(known.added)]
        text = ""
        for part in said:
            text += part + token
            if (made := cache.ids(text)) is not None:
                assert made == known.ids(text)

    each()


def test_threads_that_share_a_cache_get_the_ids_of_the_whole(of_every_template):
    known = of_every_template
    cache = SegmentCache(known.rules(), known.encode, LITTLE)
    wrong: list[str] = []

    def work(seed: int) -> None:
        mine = list(known.corpus)
        random.Random(seed).shuffle(mine)
        try:
            wrong.extend(text.name for text, proper in mine if cache.ids(text.text) != proper)
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- fast tokenizers, and all of it together ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizing():
    """``trivet.render.tokenizing``, which brings ``transformers``."""
    with offline():
        import trivet.render.tokenizing

    return trivet.render.tokenizing


def prompts_of(known: Known, tokenizing: Any, *fast: str) -> Any:
    """What makes a prompt's ids, compared anew with the reference."""
    told = NOT_PLAIN.get(known.family.name)
    made = tokenizing.TokenizingSettings(verdicts=None, fast=fast)
    if told is None:
        return tokenizing.PromptTokenizer(known.tokenizer, made)
    with pytest.raises(Unsuitable, match=told):
        tokenizing.PromptTokenizer(known.tokenizer, made)
    pytest.skip("is left to transformers, as it should be")


def prompt_checks(known: Known, prompts: Any, corpus: Sequence[tuple[Text, list[int]]]) -> None:
    check(known, lambda text: prompts.ids(text, add_special_tokens=False), corpus)
    for text, _ in corpus[:: max(1, len(corpus) // 200)]:
        made = prompts.ids(text.text, add_special_tokens=True)
        assert made is None or made == known.tokenizer.encode(text.text), text
    assert prompts.fast is None or prompts.fast.distrust is None


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize("name", ["bytes, llama 3's split", "sentences, blank at first place"])
def test_prompts_have_the_reference_s_ids(name, tmp_path_factory, tokenizing):
    known = load(by_name(name), tmp_path_factory)
    prompt_checks(known, prompts_of(known, tokenizing, *CANDIDATES), known.corpus)


@pytest.mark.full
@pytest.mark.parametrize("candidate", list(CANDIDATES))
def test_a_fast_tokenizer_that_is_taken_has_the_reference_s_ids(known, tokenizing, candidate):
    if not is_installed(candidate):
        pytest.skip(f"{candidate} is not installed")
    prompts = prompts_of(known, tokenizing, candidate)
    if prompts.fast is None:
        assert known.family.name not in TAKEN[candidate], prompts.refused
        return
    prompt_checks(known, prompts, known.corpus)
    prompt_checks(known, prompts, known.long_corpus)
    for what, text in known.rendered([known.family.template], chats(known.added, full=True)):
        check(known, lambda one: prompts.ids(one, add_special_tokens=False), [(Text(what, text), known.ids(text))])


# -- the families themselves -------------------------------------------------------------------------------------------


def test_every_family_says_something_of_its_own():
    """No two of them are the same tokenizer by another name, and all names are told here rightly."""
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    told = {*UNCUT, *NOT_SHOWN, *NOT_PLAIN, *families.AT_RANDOM, *(name for taken in TAKEN.values() for name in taken)}
    assert told <= set(names)
    made = [json.dumps(family.definition(), sort_keys=True) for family in FAMILIES if not family.missing]
    alike = len(made) - len(set(made))
    assert alike <= 1  # special tokens are split by a setting beside the definition


def test_the_corpus_is_the_same_each_time_and_has_every_block():
    first, again = texts(["<s>"]), texts(["<s>"])
    assert first == again
    rows = {ord(char) // 16 for text in first for char in text.text}
    detailed = [row for row in range(0x110000 // 16) if not 0xD80 <= row < 0xE00 and row < 0x340]
    assert rows.issuperset(detailed)
