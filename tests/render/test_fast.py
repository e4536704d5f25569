"""Fast tokenizers: used if shown to be equal, left the moment that they are not."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
import time
import unicodedata

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trivet.render import fast
from trivet.render.hard_texts import hard_texts

ADDED = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def made() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    one = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.decoder = decoders.ByteLevel()
    one.add_special_tokens(ADDED)
    return one


@pytest.fixture(scope="module")
def reference(made):
    """Remembers: the same texts are asked for again and again here."""
    known: dict[str, list[int]] = {}

    def ids(texts):
        missing = [text for text in texts if text not in known]
        made_now = made.encode_batch_fast(missing, add_special_tokens=False)
        known.update((text, one.ids) for text, one in zip(missing, made_now, strict=True))
        return [known[text] for text in texts]

    return ids


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(hard_texts(ADDED))


@pytest.fixture
def candidate(monkeypatch, made, reference, texts):
    """Compares one that gives what ``wrong`` makes of a text's proper ids."""

    def compare(wrong=lambda text, ids: ids, *, load=None):
        encode = lambda text: wrong(text, reference([text])[0])  # noqa: E731
        monkeypatch.setattr(fast, "CANDIDATES", {"pytest": load or (lambda definition: encode)})
        return fast.choose(made.to_str(), reference, texts, ["pytest"])

    return compare


def test_one_that_is_equal_is_used(candidate, reference):
    choice = candidate()
    assert choice.fast is not None
    assert not choice.refused
    assert choice.fast.limits == fast.Limits()
    assert choice.fast("Grüße <|im_end|>") == reference(["Grüße <|im_end|>"])[0]


def without(ids):
    return ids[:-1]


@pytest.mark.parametrize("spoiled", ["ab", "a b", " 1", "<|im_start|>x", "e the", "B1", "a" * 50, "n\n", "A."])
def test_one_that_differs_in_what_every_text_is_made_of_is_not_used(candidate, spoiled):
    choice = candidate(lambda text, ids: without(ids) if spoiled in text else ids)
    assert choice.fast is None
    assert "other ids for" in choice.refused["pytest"]


@pytest.mark.parametrize(
    ("spoiled", "texts_with_it"),
    [
        # what three fast tokenizers are wrong at with GPT-2's pattern
        (r"[^\S ]'(?:[sdmt]|ll|ve|re)", ["\t's", "x\t's", "\n'll be", "\u3000've"]),
        (r"[_‿][\u0301\u0308\u0900\u20dd]", ["_\u0301", "x_\u0308"]),
        (r"/\r", ["/\r\n", "a/\r"]),
    ],
)
def test_texts_where_kinds_of_characters_meet_at_which_it_differs_are_left_to_the_reference(
    candidate, reference, spoiled, texts_with_it
):
    choice = candidate(lambda text, ids: without(ids) if re.search(spoiled, text) else ids)
    assert choice.fast is not None, choice.refused
    assert choice.fast.limits.rows
    for one in texts_with_it:
        for text in (one, f"some words {one} and more"):
            assert choice.fast(text) == reference([text])[0]
            assert not choice.fast.takes(text)
    assert choice.fast.takes("Ordinary text, don't 'quote' it\n\tat all. 12 naïve 東京")


@pytest.mark.parametrize("letter", ["a", "Z", " ", "'", "\n", "7"])
def test_one_that_differs_at_what_every_text_is_made_of_is_not_used(candidate, letter):
    choice = candidate(lambda text, ids: without(ids) if letter in text else ids)
    assert choice.fast is None
    assert "gives other ids" in choice.refused["pytest"]


@pytest.mark.parametrize("strange", ["\x0b", "Ⅷ", "\u2028", "ß", "\U0001f44d", "\u0e01"])
def test_texts_with_a_character_at_which_it_differs_are_left_to_the_reference(candidate, reference, strange):
    choice = candidate(lambda text, ids: without(ids) if strange in text else ids)
    assert choice.fast is not None, choice.refused
    assert choice.fast.limits.unlike == {strange}
    for text in (f"ab{strange}c", f"é{strange}", strange, "ab", "é"):
        assert choice.fast(text) == reference([text])[0]


@pytest.mark.parametrize("strange", ["\U0003abcd", "\ue123", "\u0378"])
def test_other_years_tables_leave_all_characters_without_a_meaning_to_the_reference(candidate, reference, strange):
    """Only some of them are looked at, so that one tells for all."""

    def meaningless(text):
        return any(unicodedata.category(one) in ("Cn", "Co") for one in text)

    choice = candidate(lambda text, ids: without(ids) if meaningless(text) else ids)
    assert choice.fast is not None, choice.refused
    assert choice.fast(f"a{strange}") == reference([f"a{strange}"])[0]


def test_one_whose_tables_are_others_altogether_is_not_used(candidate):
    choice = candidate(lambda text, ids: without(ids) if not text.isascii() else ids)
    assert choice.fast is None


def test_every_character_in_use_is_looked_at_or_lies_among_its_like():
    """No character that is no ideograph, syllable or nothing at all is left out."""
    looked_at = set("".join(fast._groups()))
    valid = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    left_out = [one for one in valid if one not in looked_at]
    assert {unicodedata.category(one) for one in left_out} <= {"Lo", "Cn", "Co"}


def panic() -> BaseException:
    """A real one, as Rust libraries raise it: no ``Exception``, of a class that nobody can import."""
    encoding = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    try:
        encoding.truncate(2, stride=5)
    except BaseException as error:
        return error
    return type("PanicException", (BaseException,), {})("as it was in other versions")


@pytest.mark.parametrize("kind", [ValueError, type(panic())])
def test_one_that_breaks_is_not_used(candidate, kind):

    def load(definition):
        raise kind("no such model")

    def wrong(text, ids):
        if 5000 < len(text) < 10_000:
            raise kind("out of bounds")
        return ids

    assert "cannot read it" in candidate(load=load).refused["pytest"]
    assert "out of bounds" in candidate(wrong).refused["pytest"]


def test_a_character_that_it_refuses_is_left_to_the_reference(candidate, reference):
    """A library may say of itself that it cannot: of a byte without a token, for instance."""

    def wrong(text, ids):
        if "\x04" in text:
            raise ValueError("byte 0x04 has no token")
        return ids

    choice = candidate(wrong)
    assert choice.fast is not None, choice.refused
    assert choice.fast.limits.unlike == {"\x04"}
    assert choice.fast("a\x04b") == reference(["a\x04b"])[0]


def test_one_that_is_not_installed_is_passed_over(made, reference, texts, monkeypatch):
    monkeypatch.setattr(fast, "CANDIDATES", {"no-such-package": None})
    assert fast.choose(made.to_str(), reference, texts).fast is None
    assert fast.choose(made.to_str(), reference, texts, ["no-such-package"]).refused == {
        "no-such-package": "is not installed"
    }


def test_the_next_is_tried_when_one_is_refused(made, reference, texts, monkeypatch):
    good = lambda definition: lambda text: reference([text])[0]  # noqa: E731
    bad = lambda definition: lambda text: []  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(fast, "CANDIDATES", {"bad": bad, "good": good})
    choice = fast.choose(made.to_str(), reference, texts, ["bad", "good"])
    assert choice.fast is not None
    assert choice.fast.name == "good"
    assert list(choice.refused) == ["bad"]


def test_of_several_the_fastest_is_used(made, reference, texts, monkeypatch):
    """By the clock over long texts; the slow one here waits at each."""

    def slow(definition):
        def encode(text):
            if len(text) > 1000:
                time.sleep(0.005)
            return reference([text])[0]

        return encode

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(
        fast, "CANDIDATES", {"slow": slow, "quick": lambda definition: lambda text: reference([text])[0]}
    )
    choice = fast.choose(made.to_str(), reference, texts, ["slow", "quick"])
    assert choice.fast is not None
    assert choice.fast.name == "quick"
    assert choice.refused == {"slow": "is equal and slower than quick"}


def test_one_that_is_slow_on_a_single_long_text_is_not_used(candidate):
    """It could be the way to stop a service, whatever it makes good over all others."""

    def wrong(text, ids):
        if len(text) > 100_000 and text.isspace():
            end_s = time.process_time() + 1.0
            while time.process_time() < end_s:
                pass
        return ids

    assert "is slow on" in candidate(wrong).refused["pytest"]


def test_one_that_says_of_a_very_long_text_that_it_cannot_is_used(candidate):
    def wrong(text, ids):
        if len(text) > 100_000:
            raise ValueError("Max stack size exceeded")
        return ids

    choice = candidate(wrong)
    assert choice.fast is not None, choice.refused


def test_very_long_texts_are_compared(candidate):
    choice = candidate(lambda text, ids: without(ids) if len(text) > 100_000 else ids)
    assert choice.fast is None


def test_reading_a_definition_leaves_no_file(made, tmp_path, monkeypatch):
    """The process may be ended at any time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in fast.CANDIDATES:
        monkeypatch.setattr("tempfile.mkdtemp", None)  # would raise
        if (loaded := fast.load(name, made.to_str())) != fast.NOT_INSTALLED:
            assert callable(loaded), loaded


# -- while it serves ---------------------------------------------------------------------------------------------------


def serving(reference, encode) -> fast.FastTokenizer:
    return fast.FastTokenizer("swift", encode, reference)


def test_now_and_then_a_text_is_tokenized_twice_and_a_difference_ends_its_use(reference, caplog):
    asked: list[str] = []

    def encode(text):
        asked.append(text)
        return without(reference([text])[0])

    swift = serving(reference, encode)
    with caplog.at_level(logging.ERROR):
        answers = [list(swift(f"text {number}")) for number in range(fast.CHECK_EVERY + 50)]
    assert len(asked) == fast.CHECK_EVERY
    assert answers[fast.CHECK_EVERY - 1] == reference([f"text {fast.CHECK_EVERY - 1}"])[0]
    assert answers[-1] == reference([f"text {fast.CHECK_EVERY + 49}"])[0]
    assert swift.distrust is not None
    assert "the reference tokenizes from now on" in caplog.text


def test_equal_ids_leave_it_in_use(reference):
    swift = serving(reference, lambda text: reference([text])[0])
    for number in range(fast.CHECK_EVERY + 50):
        swift(f"text {number}")
    assert swift.distrust is None


@pytest.mark.parametrize("kind", [RuntimeError, type(panic())])
def test_one_that_breaks_while_it_serves_has_the_text_tokenized_and_is_left_when_it_does_so_again(
    reference, caplog, kind
):
    """Once is a text that it cannot take; a client must not cost all others the speed with it."""

    def encode(text):
        if "z" in text:
            raise kind("poisoned lock")
        return reference([text])[0]

    swift = serving(reference, encode)
    left = []
    swift.left = lambda: left.append(1)
    with caplog.at_level(logging.ERROR):
        assert swift("zzz") == reference(["zzz"])[0]
        assert swift.distrust is None
        for _ in range(20):
            assert swift("zzz") == reference(["zzz"])[0]
    assert swift.distrust is not None
    assert swift.distrust.startswith("10 faults, the last")
    assert left == [1]


def test_of_a_long_text_a_piece_is_tokenized_twice(reference):
    """All of it would be felt."""
    asked: list[str] = []

    def encode(text):
        asked.append(text)
        ids = list(reference([text])[0])
        return without(ids) if len(text) < 10_000 else ids

    swift = serving(reference, encode)
    long = "ordinary words, one after the other " * 1000
    for _ in range(fast.CHECK_EVERY):
        assert list(swift(long)) == reference([long])[0]
    (piece,) = (one for one in asked if one != long)
    assert piece in long
    assert swift.distrust is not None


def test_a_piece_that_is_the_references_is_not_compared(reference):
    limits = fast.Limits(rows=frozenset({("edge", "lower", "lower")}))  # where a text begins, and nowhere else
    swift = fast.FastTokenizer(
        "swift", lambda text: [0] if len(text) < 10_000 else reference([text])[0], reference, limits
    )
    long = "\n" + "a" * 20_000
    for _ in range(fast.CHECK_EVERY + 1):
        swift(long)
    assert swift.distrust is None


@pytest.mark.parametrize("kind", [ValueError, type(panic())])
def test_a_long_text_that_it_cannot_take_is_the_references_and_costs_no_others_the_speed(reference, kind):
    """fastokens: a million blanks in a row exceed what its patterns can look back at."""

    def encode(text):
        if len(text) > 100_000:
            raise kind("Max stack size exceeded")
        return reference([text])[0]

    swift, long = serving(reference, encode), " " * 100_001
    for _ in range(fast.CHECK_EVERY + 20):
        assert swift(long) == reference([long])[0]
    assert swift.distrust is None


def test_a_million_blanks_have_the_references_ids(made, reference):
    encode = fast.load("fastokens", made.to_str())
    assert not isinstance(encode, str), encode
    swift = serving(reference, encode)
    for text in (" " * 10**6, "\n" * 10**6 + "x"):
        assert list(swift(text)) == reference([text])[0]
    assert swift.distrust is None


def test_an_interrupt_is_none_of_its_faults(reference):
    def encode(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serving(reference, encode)("abc")


# -- the real ones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fast.CANDIDATES)
def test_a_real_one_that_is_used_gives_the_references_ids(made, reference, texts, name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    choice = fast.choose(made.to_str(), reference, texts, [name])
    if choice.fast is None:
        assert choice.refused[name]
        return
    other = [
        "def f(x):\n\treturn 'x'\n",
        "naïve 東京 <|im_end|>\n<|im_start|>user",
        "don't\t's\n's",
        "\U0003abcd\x0b \x0c",
    ]
    assert [list(choice.fast(text)) for text in other] == reference(other)


def test_the_one_that_the_lock_brings_is_there():
    assert importlib.metadata.version("fastokens")


def test_what_nobody_can_tokenize_is_no_fault_of_its_own(reference):
    """A client that sends half a surrogate pair must not cost all others the fast tokenizer."""

    def encode(text):
        text.encode()
        return reference([text])[0]

    swift = serving(reference, encode)
    with pytest.raises((TypeError, UnicodeError)):
        swift("\ud800")
    assert swift.distrust is None


def test_logs_quote_no_prompt(reference, caplog):
    """What a client wrote belongs into no log."""

    def encode(text):
        raise RuntimeError

    with caplog.at_level(logging.ERROR):
        serving(reference, encode)("my password is hunter2")
    assert "hunter2" not in caplog.text
