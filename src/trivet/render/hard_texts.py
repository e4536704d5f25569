"""Texts on which tokenizers differ if they differ at all: what a fast tokenizer must pass before it is used.

They are made for one tokenizer, since its own added tokens and their lookalikes are among them; two megabytes.
"""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Iterator, Sequence

_SURROGATES = range(0xD800, 0xE000)

_PROSE = (
    "It was the best of times, it was the worst of times; we'll see what they've done, hasn't he? I'd SAY'S \"so\"…",
    "Der schnelle braune Fuchs springt über den faulen Hund – Straße, Maß, größer als 1.234,56 €.",
    "L’été à l'hôtel, c'est déjà l'œuvre d'un naïf garçon; où ça? Ça va. ﬁn, ﬂeur, Ⅷ, ½, ①.",
    "Быстрая коричневая лиса перепрыгивает через ленивую собаку. Ёлка, йод.",
    "敏捷的棕色狐狸跳过了懒狗。東京都に住んでいます。カタカナ、ひらがな、ﾊﾝｶｸ。빠른 갈색 여우가 게으른 개를 뛰어넘는다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول. שלום עולם, עִבְרִית. तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ ကျွန်တော် မြန်မာစကား ភាសាខ្មែរ ລາວ ཇ་ཡིག ქართული Հայերեն አማርኛ",
    "Nhanh nhẹn Trường Sa, Đặng Thị; Ærøskøbing, Łódź, İstanbul ıssız, žluťoučký kůň, Ωμέγα ἀρχή ΐ",
)
_CODE = (
    'def f(self, *args: int, **kw) -> dict[str, list[int]]:\n    """Doc."""\n\treturn {k: [v] for k, v in kw.items()}\n\n\n',
    '#include <stdio.h>\r\nint main(void) {\r\n  for (int i=0; i<10; ++i) printf("%d\\n", i);\r\n  return 0x1F;\r\n}\r\n',
    '{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":'
    '"string","enum":["a","b"]},"n":{"type":"integer","minimum":-1e-9}},"required":["city"]}}}',
    "SELECT a.id, COUNT(*) FROM t1 AS a LEFT JOIN t2 b ON a.id=b.id WHERE x <> 'it''s' GROUP BY 1 HAVING n>=3;--x",
    "<div class=\"a b\"><!-- c --><p>&nbsp;&amp;</p></div>\n\n```python\nprint('hi')\n```\n- [ ] x\n* **b** _i_ `c`\n| a | b |\n|---|---|",
    "const f = async (a, b = () => {}) => `${a?.b ?? 'c'}`; // TODO: fix\n\n\n\n/* é */ let x = /^[\\w.-]+@\\d{3,}$/gi;",
    "https://user:pw@example.com:8080/a/b%20c?x=1&y=[2]#frag C:\\Users\\x\\file.txt ~/.ssh/id_rsa $HOME/${VAR}",
    "\\begin{align} \\frac{\\partial f}{\\partial x} &= \\sum_{i=0}^{\\infty} x_i^2 \\\\ \\end{align} ∀x∈ℝ: ∃y ≤ ±∞ ∮ ≈ ∇",
)
_EMOJI = (
    "👨‍👩‍👧‍👦👩🏽‍💻🏳️‍🌈🇩🇪🇯🇵🇺🇳❤️‍🔥👍🏿✌🏻☺️☺︎#️⃣*️⃣9️⃣🧑‍🚀🫠🫡🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "a👍b 👍 c👍👍👍  d😀\n😀😀😀\t😀 é̂́̃ ñ ñ Å Å ﷺ ꙮ 𝕳𝖊𝖑𝖑𝖔 ｆｕｌｌ ｗｉｄｔｈ ¹²³ ₁₂₃ ㎏ ㍿",
)
_BLANKS = (
    *(" ", "  ", "\t", "\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85"),
    *("\u00a0", "\u1680", "\u2003", "\u2009", "\u2028", "\u202f", "\u205f", "\u3000", "\ufeff", "\u200b"),
)
"""By number, as editors and tools make other blanks of those that nobody sees."""


def hard_texts(added_tokens: Sequence[str]) -> Iterator[str]:
    """The texts.

    Args:
        added_tokens: of the tokenizer to be tested, as ``tokenizer.json`` has them.
    """
    chance = random.Random(20_251_130)
    yield from _PROSE
    yield from _CODE
    yield from _EMOJI
    yield from _neighbours(chance)
    yield from _by_character()
    yield from _blanks(chance)
    yield from _numbers(chance)
    yield from _long_words(chance)
    yield from _lookalikes(added_tokens, chance)
    yield from _mixed(added_tokens, chance)
    yield from _noise(chance)
    yield from _very_long(chance)


def _by_character() -> Iterator[str]:
    """Some of every block of 128 code points, assigned or not: alone, behind a letter, beside blanks, twice."""
    for begin in range(0, sys.maxunicode + 1, 128):
        block = [chr(code) for code in range(begin, begin + 128) if code not in _SURROGATES]
        if not block:
            continue
        assigned = [one for one in block if unicodedata.category(one) != "Cn"]
        if not assigned:
            if begin % 8192 == 0:
                yield "".join(block[:4])
            continue
        step = 1 if begin < 0x3000 else 1 + len(assigned) // 12
        some = assigned[::step]
        yield "".join(f"a{one}b {one}{one} {one}1\n" for one in some)
        yield "".join(some)
        yield unicodedata.normalize("NFD", "".join(some))


_KINDS = (
    " ",
    "\t",
    "\n",
    "\r",
    "\v",
    "\u3000",
    "a",
    "B",
    "'",
    "s",
    "ll",
    "1",
    ".",
    "_",
    "é",
    "中",
    "\u0301",
    "👍",
    "\x1f",
    "\u200d",
)
"""One or two of each kind of character that patterns of pre-tokenizers tell apart."""


def _neighbours(chance: random.Random) -> Iterator[str]:
    """Rows of more than three kinds of character, which are looked at one by one in ``kinds``."""
    for _ in range(4000):
        yield "".join(chance.choices(_KINDS, k=chance.randint(4, 9)))


def _blanks(chance: random.Random) -> Iterator[str]:
    for blank in _BLANKS:
        for count in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 500):
            yield f"{blank * count}x{blank * count}\n{blank * count}y. {blank * count}"
    yield " " * 5000 + "x" + "\n" * 3000 + "\t" * 1000
    for _ in range(40):
        yield "".join(chance.choice((*_BLANKS, "a", "B1", ".", "'s")) * chance.randint(1, 4) for _ in range(60))


def _numbers(chance: random.Random) -> Iterator[str]:
    yield " ".join(str(chance.randrange(10 ** chance.randint(1, 24))) for _ in range(300))
    yield "3.14159 -2,718 1e-10 0xDEADBEEF 1_000_000 ١٢٣٤ १२३ 五百 ½⅓ 12:34:56 2025-11-30T00:00:00Z +49(0)30/123456 v1.2.3-rc.4"
    yield "".join(str(one) for one in range(2000))


def _long_words(chance: random.Random) -> Iterator[str]:
    for alphabet in (
        "a",
        "ab",
        "abcdefghijklmnopqrstuvwxyz",
        "ABC",
        "аб",
        "中文字",
        "=",
        "-",
        "_",
        "!?",
        "0123456789abcdef",
        "é",
    ):
        for length in (50, 400, 3000):
            yield "".join(chance.choice(alphabet) for _ in range(length))
    yield "".join(chance.choice("ABCDEFGHabcdefgh0123456789+/") for _ in range(4000)) + "=="


def _lookalikes(added_tokens: Sequence[str], chance: random.Random) -> Iterator[str]:
    some = list(added_tokens) if len(added_tokens) <= 80 else chance.sample(list(added_tokens), 80)
    for token in (
        *some,
        "<|im_start|>",
        "<s>",
        "</s>",
        "[INST]",
        "<|eot_id|>",
        "<pad>",
        "<unk>",
        "<0x41>",
        "▁",
        "Ġ",
        "Ċ",
        "##a",
    ):
        yield f"{token}x{token} {token}\n{token}{token}{token.upper()}{token.lower()}{token[1:]}{token[:-1]}"
        yield f"a{token}b {token[: len(token) // 2]} {token[len(token) // 2 :]} 1{token}2 \t{token}\t é{token}é"
        yield f"  {token}  \n\n{token}\n\n  {' '.join(token)} {token[:-1]}{token}{token[1:]}"
    yield "".join(added_tokens)[:20_000]


def _mixed(added_tokens: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Conversations and patchworks of all the above."""
    pieces = [*_PROSE, *_CODE, *_EMOJI]
    tokens = list(added_tokens) or ["<|im_end|>"]
    for _ in range(60):
        parts: list[str] = []
        for _ in range(chance.randint(3, 12)):
            piece = chance.choice(pieces)
            begin = chance.randrange(len(piece))
            parts.append(piece[begin : begin + chance.randint(1, 200)])
            if chance.random() < 0.5:
                parts.append(chance.choice(tokens))
            if chance.random() < 0.3:
                parts.append(chance.choice(_BLANKS) * chance.randint(1, 9))
        yield "".join(parts)
    for _ in range(6):
        words = " ".join(pieces).split(" ")
        yield " ".join(chance.choices(words, k=900))


def _noise(chance: random.Random) -> Iterator[str]:
    for _ in range(60):
        yield "".join(_some(chance, 120, assigned=True))
    for _ in range(40):
        yield "".join(chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x250)))) for _ in range(200))
    for _ in range(20):
        yield "".join(_some(chance, 80, assigned=False))


def _some(chance: random.Random, count: int, *, assigned: bool) -> Iterator[str]:
    while count:
        one = chance.randrange(0x30000 if assigned else sys.maxunicode + 1)
        if one in _SURROGATES or (assigned and unicodedata.category(chr(one)) in ("Cn", "Co")):
            continue
        count -= 1
        yield chr(one)


_VERY_LONG = 200_000
"""Characters of which some time is spent on each, if any is."""


def _very_long(chance: random.Random) -> Iterator[str]:
    """What costs patterns and merges the most, if it costs them more than a character each."""
    yield "".join(chance.choices(_CODE, k=_VERY_LONG // 100))[:_VERY_LONG]
    for one in ("a", " ", "\n"):
        yield one * _VERY_LONG
    yield "".join(chr(chance.randrange(0x4E00, 0x9FA6)) for _ in range(_VERY_LONG))
