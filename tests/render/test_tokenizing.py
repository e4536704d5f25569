"""A renderer's tokenizer with a shorter way under it: the same answers, whatever is asked."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st

from helpers.tokenizer import demo_fields
from render.conftest import let_go
from trivet.demo.model import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(demo_fields(), made)
    return made


@pytest.fixture(scope="module")
def tokenizing(frontend):
    """``trivet.render.tokenizing``; vLLM is loaded with ``frontend``."""
    import trivet.render.tokenizing

    return trivet.render.tokenizing


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("verdicts")


@pytest.fixture
def settings(tokenizing, verdicts):
    return tokenizing.TokenizingSettings(verdicts=verdicts)


def as_vllm_holds_it(folder: Path, kind=lambda own: own, **changes):
    """What ``HfRenderer`` has: cached, and over a pool of copies."""
    from transformers import AutoTokenizer
    from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

    let_go()
    tokenizer = AutoTokenizer.from_pretrained(folder, **{"model_max_length": 1000, **changes})
    tokenizer.__class__ = kind(type(tokenizer))
    tokenizer = get_cached_tokenizer(tokenizer)
    maybe_make_thread_pool(tokenizer, 2)
    return tokenizer


@pytest.fixture(scope="module")
def reference(frontend, folder):
    return as_vllm_holds_it(folder)


@pytest.fixture(scope="module")
def hastened(tokenizing, folder, verdicts):
    tokenizer = as_vllm_holds_it(folder)
    prompts = tokenizing.hasten(tokenizer, tokenizing.TokenizingSettings(verdicts=verdicts))
    assert not isinstance(prompts, str), prompts
    return tokenizer, prompts


CHAT = "<|im_start|>user\nDon't panic,\t's\n\n Grüße 東京 👍<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("text", ["", "Hi", CHAT, CHAT * 3, "<|im_start|>", " \t\x0b", "x" * 2000])
@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"add_special_tokens": False},
        {"add_special_tokens": True},
        {"add_special_tokens": False, "truncation": True, "max_length": 4096},
        {"add_special_tokens": False, "truncation": True, "max_length": 12},
        {"truncation": True, "max_length": 1},
        {"truncation": False, "max_length": None},
        {"truncation": True},
        {"truncation": True, "max_length": None},
        {"return_offsets_mapping": True},
        {"padding": "max_length", "max_length": 50},
        {"return_tensors": "np"},
    ],
)
def test_a_call_is_answered_as_before(reference, hastened, text, wanted):
    tokenizer, _ = hastened
    ours, theirs = tokenizer(text, **wanted), reference(text, **wanted)
    assert type(ours) is type(theirs)
    assert {name: list(map(str, value)) for name, value in ours.items()} == {
        name: list(map(str, value)) for name, value in theirs.items()
    }
    assert set(ours) == set(theirs)


@pytest.mark.parametrize("asked", [["Hi", CHAT], [["Hi", "you"]], [("Hi", "you")]])
def test_several_texts_are_answered_as_before(reference, hastened, asked):
    tokenizer, _ = hastened
    assert dict(tokenizer(asked)) == dict(reference(asked))


def test_a_pair_is_answered_as_before(reference, hastened):
    tokenizer, _ = hastened
    assert dict(tokenizer("Hi", "you")) == dict(reference("Hi", "you"))
    assert tokenizer.encode("Hi", "you") == reference.encode("Hi", "you")


@pytest.mark.parametrize("wanted", [{}, {"add_special_tokens": False}, {"truncation": True, "max_length": 5}])
def test_encode_is_answered_as_before(reference, hastened, wanted):
    tokenizer, _ = hastened
    assert tokenizer.encode(CHAT, **wanted) == reference.encode(CHAT, **wanted)


@of_hypothesis(deadline=None)
@given(text=st.text(max_size=60), cut=st.sampled_from(["", "<|im_start|>", "<|im_end|>\n"]))
def test_any_text_has_the_references_ids(reference, hastened, text, cut):
    tokenizer, _ = hastened
    whole = text + cut + text + cut
    assert tokenizer.encode(whole, add_special_tokens=False) == reference.encode(whole, add_special_tokens=False)


def test_what_a_caller_does_to_its_ids_stays_its_own(hastened):
    tokenizer, prompts = hastened
    first = tokenizer.encode(CHAT)
    wanted = list(first)
    first.reverse()
    first += [1, 2, 3]
    assert tokenizer.encode(CHAT) == wanted
    assert prompts.figures.found_characters


def test_the_rest_of_the_tokenizer_is_as_it_was(reference, hastened):
    tokenizer, _ = hastened
    ids = tokenizer.encode(CHAT)
    assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer.max_token_id == reference.max_token_id
    assert tokenizer.is_fast == reference.is_fast
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == reference.apply_chat_template(
        messages, tokenize=False
    )


def test_ends_are_put_around_where_a_tokenizer_has_them(tokenizing, frontend, folder, tmp_path, verdicts):
    told = json.loads((folder / "tokenizer.json").read_text())
    ends = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ends.append({"SpecialToken": {"id": "<|im_end|>", "type_id": 0}})
    ids = {token["content"]: token["id"] for token in told["added_tokens"]}
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": ends,
        "pair": [*ends, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            one: {"id": one, "ids": [ids[one]], "tokens": [one]} for one in ("<|im_start|>", "<|im_end|>")
        },
    }
    for name in ("tokenizer_config.json",):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    plain, ours = as_vllm_holds_it(tmp_path), as_vllm_holds_it(tmp_path)
    assert not isinstance(tokenizing.hasten(ours, tokenizing.TokenizingSettings(verdicts=verdicts)), str)
    for text in ("", "Hi", CHAT):
        assert ours.encode(text) == plain.encode(text)
        assert ours.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)


# -- what it is left for -----------------------------------------------------------------------------------------------


def spoiled(folder: Path, tmp_path: Path, **model) -> Path:
    told = json.loads((folder / "tokenizer.json").read_text())
    told["model"].update(model)
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    return tmp_path


def test_chance_is_left_to_the_tokenizer(tokenizing, settings, folder, tmp_path):
    tokenizer = as_vllm_holds_it(spoiled(folder, tmp_path, dropout=0.2))
    kind = type(tokenizer)
    assert "at random" in tokenizing.hasten(tokenizer, settings)
    assert type(tokenizer) is kind


def test_one_that_splits_special_tokens_is_left_alone(tokenizing, settings, folder):
    assert "special tokens" in tokenizing.hasten(as_vllm_holds_it(folder, split_special_tokens=True), settings)


def shouting(own):
    class Shouting(own):
        def _encode_plus(self, text, **more):
            return super()._encode_plus(text.upper(), **more)

    return Shouting


def test_one_with_code_of_its_own_is_left_alone(tokenizing, settings, folder):
    assert "Shouting has a way of its own" in tokenizing.hasten(as_vllm_holds_it(folder, shouting), settings)


def test_what_is_none_of_the_librarys_is_left_alone(tokenizing, settings):
    assert "no tokenizer of the" in tokenizing.hasten(object(), settings)


def test_one_that_does_more_than_the_library_under_it_is_left_alone(tokenizing, folder, tmp_path):
    """By whatever means: what it gives is compared."""

    def hidden(own):
        kind = shouting(own)
        kind.__module__ = "vllm.tokenizers.shouting"
        return kind

    settings = tokenizing.TokenizingSettings(verdicts=tmp_path)
    for _ in range(2):  # the second time it is read
        assert "other ids than the library" in tokenizing.hasten(as_vllm_holds_it(folder, hidden), settings)


# -- what was found is kept --------------------------------------------------------------------------------------------


def test_a_second_start_compares_nothing_again(tokenizing, settings, folder, monkeypatch):
    tokenizing.hasten(as_vllm_holds_it(folder), settings)
    monkeypatch.setattr(tokenizing, "hard_texts", None)  # would raise
    monkeypatch.setattr(tokenizing, "compare", None)
    prompts = tokenizing.hasten(as_vllm_holds_it(folder), settings)
    assert prompts.told()["tokenizer"].split(";")[0] in tokenizing.CANDIDATES


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"fast": "fastokens"}'])
def test_a_damaged_record_is_made_anew(tokenizing, folder, tmp_path, damage):
    settings = tokenizing.TokenizingSettings(verdicts=tmp_path, fast=())
    no_fast = tokenizing.TokenizingSettings(verdicts=tmp_path, fast=("no-such-package",))
    tokenizing.hasten(as_vllm_holds_it(folder), no_fast)
    (record,) = tmp_path.glob("*.json")
    record.write_bytes(damage)
    prompts = tokenizing.hasten(as_vllm_holds_it(folder), no_fast)
    assert prompts.told()["not used"] == "no-such-package is not installed"
    assert json.loads(record.read_text())["finding"]["refused"]
    assert tokenizing.hasten(as_vllm_holds_it(folder), settings).told()["tokenizer"] == "tokenizers"


def test_a_place_that_takes_no_record_does_no_harm(tokenizing, folder, tmp_path, caplog):
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    with caplog.at_level(logging.WARNING):
        prompts = tokenizing.hasten(
            as_vllm_holds_it(folder), tokenizing.TokenizingSettings(verdicts=nowhere / "x", fast=("no-such-package",))
        )
    assert not isinstance(prompts, str)
    assert "not kept" in caplog.text


def test_another_definition_is_compared_by_itself(tokenizing, folder, tmp_path):
    verdicts = tmp_path / "verdicts"
    settings = tokenizing.TokenizingSettings(verdicts=verdicts, fast=("no-such-package",))
    tokenizing.hasten(as_vllm_holds_it(folder), settings)
    other = tmp_path / "other"
    other.mkdir()
    tokenizing.hasten(as_vllm_holds_it(spoiled(folder, other, unk_token="<|im_end|>")), settings)
    assert len(list(verdicts.glob("*.json"))) == 2


def test_without_a_cache_every_text_is_tokenized(tokenizing, folder, verdicts):
    tokenizer = as_vllm_holds_it(folder)
    prompts = tokenizing.hasten(tokenizer, tokenizing.TokenizingSettings(0, verdicts=verdicts))
    assert prompts.figures is None
    assert prompts.told()["segments"] == "not kept: turned off"
    assert tokenizer.encode("Hi") == as_vllm_holds_it(folder).encode("Hi")


def test_workers_that_start_at_once_compare_once(tokenizing, folder, tmp_path, monkeypatch, caplog):
    """The second waits, and reads what the first has found."""
    tokenizers = [as_vllm_holds_it(folder) for _ in range(2)]
    compared: list[str] = []
    begun, waits = threading.Event(), threading.Event()

    def compare(definition, names):
        compared.append(definition)
        begun.set()
        assert waits.wait(20)
        return tokenizing.Finding(refused=dict.fromkeys(names, "was looked at"))

    class Hears(logging.Handler):
        def emit(self, record):
            if "waiting for it" in record.getMessage():
                waits.set()

    hears = Hears()
    logging.getLogger("trivet").addHandler(hears)
    monkeypatch.setattr(tokenizing, "compare", compare)
    settings = tokenizing.TokenizingSettings(verdicts=tmp_path, fast=("fastokens",))
    try:
        with caplog.at_level(logging.INFO, "trivet"), ThreadPoolExecutor(2) as pool:
            first = pool.submit(tokenizing.hasten, tokenizers[0], settings)
            assert begun.wait(20)
            second = pool.submit(tokenizing.hasten, tokenizers[1], settings)
            found = [one.result(30).told()["not used"] for one in (first, second)]
    finally:
        logging.getLogger("trivet").removeHandler(hears)
    assert found == ["fastokens was looked at"] * 2
    assert len(compared) == 1
    assert caplog.text.count("comparing fast tokenizers for this model") == 1


# -- what is said of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fastokens", "gigatoken"])
def test_one_that_is_asked_for_by_name_and_not_there_is_a_warning_with_the_mend(
    tokenizing, folder, tmp_path, monkeypatch, caplog, name
):
    tokenizer = as_vllm_holds_it(folder)
    settings = replace(tokenizing.settings_of(1, name), verdicts=tmp_path)
    found = tokenizing.Finding(refused={name: tokenizing.NOT_INSTALLED})
    monkeypatch.setattr(tokenizing, "compare", lambda definition, names: found)
    with caplog.at_level(logging.WARNING):
        tokenizing.hasten(tokenizer, settings)
    assert f"{name} is asked for and not used: it is not installed -> pip install {name}" in caplog.text


def test_one_that_is_asked_for_and_differs_is_a_warning_too(tokenizing, folder, tmp_path, monkeypatch, caplog):
    tokenizer = as_vllm_holds_it(folder)
    found = tokenizing.Finding(refused={"gigatoken": "gives other ids for 'x'"})
    monkeypatch.setattr(tokenizing, "compare", lambda definition, names: found)
    with caplog.at_level(logging.WARNING):
        tokenizing.hasten(tokenizer, replace(tokenizing.settings_of(1, "gigatoken"), verdicts=tmp_path))
    assert "it gives other ids for 'x' -> fast_tokenizer: auto" in caplog.text


@pytest.mark.parametrize("asked", ["auto", "off"])
def test_without_a_name_nothing_is_a_warning(tokenizing, folder, tmp_path, monkeypatch, caplog, asked):
    tokenizer = as_vllm_holds_it(folder)
    found = tokenizing.Finding(refused={"gigatoken": tokenizing.NOT_INSTALLED})
    monkeypatch.setattr(tokenizing, "compare", lambda definition, names: found)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(
            tokenizing.hasten(tokenizer, replace(tokenizing.settings_of(1, asked), verdicts=tmp_path)), str
        )
    assert not caplog.records


def test_that_vllm_was_told_to_use_another_is_a_warning(tokenizing, settings, folder, caplog):
    """What VLLM_USE_FASTOKENS does: another object under the tokenizer."""

    class Shim:
        def __getattr__(self, name):
            raise AttributeError(name)

    tokenizer = as_vllm_holds_it(folder)
    tokenizer._tokenizer = Shim()
    with caplog.at_level(logging.WARNING):
        assert "VLLM_USE_FASTOKENS" in tokenizing.hasten(tokenizer, settings)
    assert "no fast tokenizer: another tokenizer has been put in its place" in caplog.text


# -- what becomes of it later ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["add_tokens", "add_special_tokens"])
def test_tokens_that_are_added_later_leave_it_to_the_tokenizer(tokenizing, settings, folder, caplog, way):
    """As processors of some models do when they are made (DeepSeek-VL2, Ovis 2.5)."""
    from transformers import AutoTokenizer

    ours, theirs = (AutoTokenizer.from_pretrained(folder) for _ in range(2))
    prompts = tokenizing.hasten(ours, settings)
    text = "Hi<|image|>you"
    assert ours.encode(text) == theirs.encode(text)
    added = ["<|image|>"] if way == "add_tokens" else {"additional_special_tokens": ["<|image|>"]}
    for one in (ours, theirs):
        with caplog.at_level(logging.WARNING):
            getattr(one, way)(added)
    assert ours.encode(text) == theirs.encode(text)
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert prompts.ids(text, add_special_tokens=False) is None
    assert prompts.ids_of_parts([text]) == [None]
    assert "vLLM's own" in prompts.told()["tokenizer"]
    assert "tokens were added" in caplog.text


def test_tokens_that_were_there_before_change_nothing(tokenizing, settings, folder):
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(folder)
    prompts = tokenizing.hasten(ours, settings)
    ours.add_tokens(["<|im_end|>"], special_tokens=True)
    assert prompts.aside is None
    assert prompts.ids("Hi", add_special_tokens=False) is not None
