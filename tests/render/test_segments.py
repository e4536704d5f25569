"""Segments: where a text is cut, what is kept, and when nothing is."""

from __future__ import annotations

import json
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from trivet.render.segments import Rules, SegmentCache, Unsuitable, _any_of

LETTERS = [*"abcdefghijklmnopqrstuvwxyz 0123456789<>/|\n▁TM[]\t\x0b", "ab", "abc"]


def tokenizer(*added: AddedToken, **parts) -> Tokenizer:
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    made = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    made.add_tokens(list(added))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def token(content: str, **how) -> AddedToken:
    return AddedToken(content, **{"special": True, "normalized": False, **how})


class Counting:
    """The reference, which remembers what it was asked."""

    def __init__(self, made: Tokenizer) -> None:
        self.made = made
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return self.made.encode(text, add_special_tokens=False).ids

    @property
    def characters(self) -> int:
        return sum(map(len, self.asked))


def cached(made: Tokenizer, capacity: int = 1 << 20) -> tuple[SegmentCache, Counting]:
    counting = Counting(made)
    return SegmentCache(Rules(made.to_str()), counting, capacity), counting


def plain(made: Tokenizer, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False).ids


TEXTS = [
    "",
    "<s>",
    "abc",
    "<s>abc",
    "abc<s>",
    "ab<s>c",
    "<s><s>",
    "a<s>abc<e>ab<s>abc",
    "<s>>abc",
    "<<s>",
    "<s",
    "s><s>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_references_cold_and_warm(text):
    made = tokenizer(token("<s>"), token("<e>"))
    cache, _ = cached(made)
    assert cache.ids(text) == plain(made, text)
    assert cache.ids(text) == plain(made, text)


def test_a_conversation_that_grows_has_only_its_new_text_tokenized():
    made = tokenizer(token("<s>"))
    cache, counting = cached(made)
    text = ""
    for turn in range(30):
        text += f"<s>abc {turn} " + "word " * 20
        asked = counting.characters
        assert cache.ids(text) == plain(made, text)
        assert counting.characters - asked <= 120, (
            "a turn is about a hundred characters, and no former one is among them"
        )


def test_equal_segments_of_one_text_are_tokenized_once():
    made = tokenizer(token("<s>"))
    cache, counting = cached(made)
    assert cache.ids("<s>abc" * 50) == plain(made, "<s>abc" * 50)
    assert counting.characters == len("<s>abc")


def test_what_was_used_last_stays_when_room_is_made():
    made = tokenizer(token("<s>"))
    cache, counting = cached(made, 3 * 270)
    for text in ("<s>abc", "<s>cab", "<s>abc", "<s>bca", "<s>bbb", "<s>abc"):
        cache.ids(text)
    counting.asked.clear()
    cache.ids("<s>abc")
    assert not counting.asked
    cache.ids("<s>cab")
    assert counting.asked, "it was the oldest"


@pytest.mark.parametrize("capacity", [0, 1, 300, 2000])
def test_no_more_is_kept_than_allowed(capacity):
    made = tokenizer(token("<s>"))
    cache, _ = cached(made, capacity)
    for number in range(40):
        text = f"<s>{'abc' * number}<s>x{number}"
        assert cache.ids(text) == plain(made, text)
        assert cache.figures.bytes <= capacity


def test_what_is_forgotten_is_made_anew_and_what_is_being_made_just_then_is_not_kept():
    """As when the tokenizer that made it is not trusted any more."""
    made = tokenizer(token("<s>"))
    wrong = True
    cache: SegmentCache

    def encode(text):
        nonlocal wrong
        ids = plain(made, text)
        if not wrong:
            return ids
        if text.endswith("cab"):
            wrong = False
            cache.forget()
        return [*ids[:-1], 0]

    cache = SegmentCache(Rules(made.to_str()), encode, 1 << 20)
    assert cache.ids("<s>abc") != plain(made, "<s>abc")
    cache.ids("<s>cab")
    assert cache.figures.segments == cache.figures.bytes == 0
    for text in ("<s>abc", "<s>cab"):
        assert cache.ids(text) == plain(made, text)


def test_figures_tell_what_was_asked_and_found():
    cache, _ = cached(tokenizer(token("<s>")))
    cache.ids("first<s>abcd")
    assert (cache.figures.asked_characters, cache.figures.found_characters, cache.figures.segments) == (4, 0, 1)
    cache.ids("first<s>abcd")
    assert (cache.figures.asked_characters, cache.figures.found_characters, cache.figures.segments) == (8, 4, 1)


def test_what_stands_first_is_never_taken_for_what_stands_behind_a_token():
    """``Metaspace`` puts its blank before a text's first word only."""
    made = tokenizer(token("<s>"), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))
    cache, _ = cached(made)
    for text in ("abc", "<s>abc", "abc<s>abc", "<s>abc", "abc"):
        assert cache.ids(text) == plain(made, text)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (("<", "<s>"), "<abc<s>abc<think>s>"),
        (("\n", "\nT"), "\nThe\nT\nabc\n\n\nT"),
        (("a", "ab", "abc"), "xaxabxabcx"),
        (("\t\t", "\n\n", "\n\n\n"), "\n\t\n\x0b\t\t\t\tx\n\n\n\ty\t"),
        (("[M]", "x["), "ax[M]x[b[M]x[M]x"),
        (("ab", "ba"), "xabaxbabx"),
        (("<s>", "<s>a", "<s>ab", "<e>"), "<s>abc<e>abc<s>c<e>ab"),
    ],
)
def test_tokens_that_begin_others_do_no_harm(tokens, text):
    made = tokenizer(*map(token, tokens))
    cache, _ = cached(made)
    for _ in range(2):
        for end in range(len(text) + 1):
            assert cache.ids(text[:end]) == plain(made, text[:end])


@pytest.mark.parametrize("how", ["lstrip", "rstrip", "single_word"])
def test_a_text_with_a_token_that_looks_at_its_neighbours_is_not_cut(how):
    made = tokenizer(token("<s>"), token("<x>", **{how: True}))
    cache, _ = cached(made)
    assert cache.ids("ab <x> c") is None
    assert cache.ids("ab <s> c") == plain(made, "ab <s> c")


def test_a_token_that_is_looked_for_in_normalized_text_cuts_nothing_and_is_found():
    made = tokenizer(token("<s>"), token("<n>", normalized=True), normalizer=normalizers.Lowercase())
    cache, _ = cached(made)
    for text in ("AB<N>c<s>AB<N>c", "<s><N>", "<n><s><n>"):
        assert cache.ids(text) == plain(made, text)


def test_a_text_that_becomes_the_marks_own_id_is_no_border():
    """A normalizer can write a token's text where there was none."""
    made = tokenizer(token("ab"), normalizer=normalizers.Replace("x", "ab"))
    cache, _ = cached(made)
    for text in ("abxx cabx", "abx", "xabx"):
        assert cache.ids(text) == plain(made, text)
        assert cache.ids(text) == plain(made, text)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda told: told["model"].update(dropout=0.1), "merges at random"),
        (lambda told: told.update(truncation={"max_length": 8}), "to a length"),
        (lambda told: told.update(padding={"strategy": "BatchLongest"}), "to a length"),
        (lambda told: told.update(normalizer={"type": "Telepathy"}), "its normalizer Telepathy is not known"),
        (
            lambda told: told.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Seance"}]}),
            "its pre-tokenizer Seance is not known",
        ),
        (lambda told: told["model"].update(type="Oracle"), "its model Oracle is not known"),
        (lambda told: told["model"].update(alpha=0.1, type="Unigram"), "samples"),
        (lambda told: told.update(added_tokens=[]), "no token at which"),
        (lambda told: told.update(post_processor={"type": "Chorus"}), "its post-processor Chorus is not known"),
        (
            lambda told: told.update(
                post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 2}
            ),
            "does not give a text once",
        ),
    ],
)
def test_a_tokenizer_whose_texts_cannot_be_cut_says_why(spoil, why):
    told = json.loads(tokenizer(token("<s>")).to_str())
    spoil(told)
    with pytest.raises(Unsuitable, match=why):
        Rules(json.dumps(told))


def test_many_threads_get_the_references_ids():
    made = tokenizer(token("<s>"))
    cache, _ = cached(made, 4000)
    wrong: list[str] = []

    def ask(seed: int) -> None:
        for number in range(300):
            text = "".join(f"<s>abc{(seed * number + one) % 17} ab" for one in range(8))
            if cache.ids(text) != plain(made, text):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 7)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert cache.figures.bytes <= 4000


@given(
    tokens=st.sets(st.text(alphabet="ab<|>.*\n", min_size=1, max_size=5), min_size=1, max_size=8),
    text=st.text(alphabet="ab<|>.*\nx", max_size=40),
)
@settings(deadline=None)
def test_what_is_found_is_the_leftmost_and_of_those_the_longest(tokens, text):
    alternation = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    found = [(one.start(), one[0]) for one in re.finditer(_any_of(tokens), text)]
    assert found == [(one.start(), one[0]) for one in alternation.finditer(text)]


def test_thousands_of_tokens_are_no_way_to_stop_the_service():
    """Counted in steps, not in time: a text of beginnings is looked at once, whatever the number of tokens."""
    tokens = [f"<unused{number}>" for number in range(6400)]
    definition = {
        "model": {"type": "BPE"},
        "added_tokens": [
            {"id": number, "content": one, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
            for number, one in enumerate(tokens)
        ],
    }
    rules = Rules(json.dumps(definition))
    assert len(rules._cuts.pattern) < sum(map(len, tokens)) / 2, "common beginnings are written once"
    assert rules.cut("<unused6399><unused64000><unus" + "<" * 50) == [
        "",
        "<unused6399>",
        "<unused64000><unus" + "<" * 50,
    ]


# -- parts -------------------------------------------------------------------------------------------------------------

PARTS = st.lists(
    st.tuples(st.sampled_from(["<s>", "<e>", "<s>>", "<", "", "T", "[M]"]), st.text(st.sampled_from("abc<s>e/ TM[]"))),
    max_size=6,
).map(lambda parts: ["".join(part) for part in parts])


@pytest.mark.parametrize(
    "added",
    [
        ("<s>", "<e>"),
        ("<s>", "<s>>", "<e>"),
        ("<s>", "a<s>", "<e>"),
        ("<s>", "c<", "<e>"),
        ("<e>", "e><s"),
        ("[M]", "M]b", "<s>"),
    ],
)
@settings(max_examples=150, deadline=None)
@given(parts=PARTS)
def test_ids_of_parts_are_those_of_the_whole(added, parts):
    made = tokenizer(*map(token, added))
    cache, _ = cached(made)
    own = [[] if not part else ids for part, ids in zip(parts, cache.ids_of_parts(parts), strict=True)]
    if None not in own:
        assert [one for ids in own for one in ids] == plain(made, "".join(parts))


def test_parts_that_begin_with_a_token_have_ids_of_their_own():
    cache, _ = cached(tokenizer(token("<s>"), token("<e>")))
    assert None not in cache.ids_of_parts(["<s>abc<e>", "<e>", "<s>"])
    assert cache.ids_of_parts(["abc", "", "a<s>"]) == [None] * 3


def test_parts_have_none_where_another_token_reaches_over_their_beginning():
    cache, _ = cached(tokenizer(token("<s>"), token("a<"), token("<e>")))
    assert cache.ids_of_parts(["<s>abc", "<e>"]) == [None, None]


def test_parts_with_a_token_that_takes_blanks_have_none():
    cache, _ = cached(tokenizer(token("<s>"), token("<e>", rstrip=True)))
    assert cache.ids_of_parts(["<s>abc<e>"]) == [None]
    assert cache.ids_of_parts(["<s>abc"]) != [None]
