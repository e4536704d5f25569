# ruff: noqa: E501, RUF001
"""Texts and chats that are hard on a tokenizer, as data: for whoever claims to give a tokenizer's ids by another way.

Seeded, so that a run can be repeated. Nothing here knows what is tested with it, and ``src`` takes nothing from here.
Unicode blocks begin and end at multiples of 16 (Unicode's Blocks.txt), so each row of 16 code points, sampled at both
ends and once inside, leaves out no block.
"""

from __future__ import annotations

import base64
import functools
import importlib.metadata
import json
import random
import string
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

_SURROGATES = range(0xD800, 0xE000)
_PLANES_IN_DETAIL = (range(0x3400), range(0xA000, 0xD800), range(0xE000, 0x11000), range(0x1F000, 0x20000))
"""Scripts, compatibility forms, emoji. What lies outside is wide and uniform (ideographs, private use, nothing yet)."""


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as OpenAI's API has them, and the tools that they may call."""

    name: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


# -- texts -----------------------------------------------------------------------------------------------------------


def texts(added: Sequence[str] = (), *, full: bool = False, seed: int = 7) -> list[Text]:
    """The corpus.

    Args:
        added: the tokenizer's added tokens, which stand whole, cut and nested in texts.
        full: also what takes long (each row of all planes, 100,000 letters in a row).
    """
    rng = random.Random(seed)
    made: list[Text] = []
    for name, several in (
        ("short", SHORT),
        ("unicode", unicode_rows(rng, full=full)),
        ("sequence", SEQUENCES),
        ("normal form", normal_forms()),
        ("space", spaces(rng, full=full)),
        ("number", numbers(rng)),
        ("repeated", repeated(full=full)),
        ("control", controls()),
        ("code", code(40 if full else 5)),
        ("prose", prose(10 if full else 2)),
        ("json", (json.dumps(tool, indent=indent) for tool in TOOLS for indent in (None, 2))),
        ("base64", base64s(rng, full=full)),
        ("like a token", lookalikes(added, rng, full=full)),
        ("between tokens", between_tokens(added, rng, full=full)),
        ("soup", (soup(rng, added, 60) for _ in range(400 if full else 60))),
    ):
        made += [Text(f"{name} {number}", text) for number, text in enumerate(several)]
    return made


SHORT = (
    *("", " ", "  ", "\n", "\t", "a", " a", "a ", "A", ".", "0", "é", "e\u0301", "中", "🙂", "▁", "▁▁", "▁a", " ▁", "▁ ", "Ġ"),
    *("\u00a0", "\u3000", "\u200b", "\ufeff", "\u0000", "Hello, world!", "Hello,world! ", " Hello  world", "don't", "DON'T I'LL"),
    *("we'll", "O’Neil’s", "x'S", "'s", "''''", "don''t", "ſ", "'ſ", "K", "İ", "ı", "ß", "ẞ", "ﬁ", "ΑΣ", "ς"),
)  # fmt: skip

SEQUENCES = (
    "👩‍👩‍👧‍👦 family, 👩🏽‍🚀 astronaut, 🏳️‍🌈 🏴‍☠️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿",  # joined by U+200D, with skin tones, variation selectors and tags
    "🇩🇪🇫🇷🇯🇵🇩 🇪",  # flags: pairs of regional indicators, and one alone
    "☺ ☺\ufe0e ☺\ufe0f 1\ufe0f\u20e3 #\u20e3 漢\U000e0100 漢\U000e01ef",
    "\u200d\u200d \u200da a\u200d \u200c\u200e\u200f\u202aabc\u202c \u2066x\u2069",
    "مرحبا بالعالم، كيف حالك؟ שָׁלוֹם עוֹלָם ABC ١٢٣ 456",
    "한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8 \u1100 \u1161 \u11a8 \u1100\u1100 ㅎㅏㄴ",  # syllables, jamo, compatibility jamo
    "नमस्ते दुनिया क्षत्रिय ಕನ್ನಡ தமிழ் ไทยภาษาไทย ລາວ မြန်မာ ខ្មែរ བོད་ཡིག",
    "日本語のテキスト、カタカナ ｶﾀｶﾅ がが 「引用」。１２３ＡＢＣ　全角 ㍿ ㌀ ①",
    "Z̸̡̢͚͎̯͎̪̱̫̈́̀̒ä̴̗́l̷̘̓g̵̱͐o̶ \u0301 \u0301\u0301a \u0327\u0301 a\u0301\u0327 a\u0327\u0301 q\u0307\u0323 q\u0323\u0307",
    "ﷺ ﬀ ﬃ ½ ² ₂ Ⅷ ⅷ ℌ ™ … ‥ ª º µ μ Å Å Ω Ω K",
    "\U000e0001\U000e0020\U000e007f \U0010fffd \uf8ff \uf000 \ufffe \uffff \ufffd \U0001fffe \U0010ffff",
    "ÀÀÀ ÉÉ ñ ñ Việt Nam Tiếng Việt ăâđêôơư",
    "\u0345 ᾳ ᾳ ΐ ΐ ̓ ˈ ʰ ˠ 𝒜 𝔸 𝟘 𝟙 𐐀 𐐨 Ꭰ ꭰ",
    "\U000110ba \U00011099\U000110ba 𝅘𝅥𝅮 𝅗𝅥",  # composition beyond the first plane, and exclusions from it
    "a\u2028b\u2029c\u0085d\u000be\u000cf\u001cg\u001dh\u001ei\u001fj\u180ek\u2060l\u00adm",
)


def unicode_rows(rng: random.Random, *, full: bool) -> Iterator[str]:
    """Each row of 16 code points at both ends and once inside, some rows to a text; pages of 256 in the wide planes."""
    points: list[int] = []
    for detailed in _PLANES_IN_DETAIL:
        for row in range(detailed.start, detailed.stop, 16):
            points += [row, row + rng.randrange(1, 15), row + 15]
    step = 64 if full else 1024
    for row in range(0, sys.maxunicode + 1, step):
        if not any(row in detailed for detailed in _PLANES_IN_DETAIL):
            points += [row, row + rng.randrange(1, step - 1), row + step - 1]
    chars = [chr(point) for point in points if point not in _SURROGATES]
    size = 120
    for begin in range(0, len(chars), size):
        row = chars[begin : begin + size]
        yield "".join(row)
        if full or begin % (4 * size) == 0:
            yield " ".join(row)
            yield "".join(f"a{char}b {char}1{char}\n" for char in row)
    if full:  # each assigned one once
        assigned = [chr(p) for p in range(sys.maxunicode + 1) if unicodedata.category(chr(p)) not in ("Cn", "Cs", "Co")]
        for begin in range(0, len(assigned), 400):
            yield "".join(f"{char} " if rng.random() < 0.1 else char for char in assigned[begin : begin + 400])


def normal_forms() -> Iterator[str]:
    for text in SEQUENCES:
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            if (other := unicodedata.normalize(form, text)) != text:
                yield other


def spaces(rng: random.Random, *, full: bool) -> Iterator[str]:
    """Runs of blanks, long ones too, between words and at both ends."""
    lengths = [
        *range(1, 10),
        15,
        16,
        17,
        24,
        25,
        31,
        32,
        33,
        63,
        64,
        65,
        128,
        129,
        256,
        1000,
        *([4096, 10_000] if full else []),
    ]
    for blank in (" ", "\n", "\t", "\r\n", " \n", "\n ", "\u00a0", "\u3000"):
        for length in lengths:
            run = blank * length
            yield run if length % 2 else f"a{run}b"
            if full or length in (2, 3, 17, 64):
                yield f"{run}b"
                yield f"a{run}"
                yield f"x{run}.{run}1{run}é"
    for _ in range(200 if full else 30):
        yield "".join(
            rng.choice((" ", "  ", "\n", "\n\n", "\t", "\r\n", "\r", "\u00a0", "\x0b", "\u2003", "w", "W9", ".", ")"))
            for _ in range(rng.randrange(1, 60))
        )


def numbers(rng: random.Random) -> Iterator[str]:
    yield " ".join("9" * length for length in range(1, 40))
    yield " ".join(str(rng.randrange(10**length)) for length in range(1, 30))
    yield "1,234,567.89 0x1F 1e-10 3.14159 12:34:56 2024-01-31 +49 (0)30 1234567 ½ ² 10⁹ ١٢٣٤ ४५६ １２３４ 〇一二三 Ⅻ ④"
    yield "a1b22c333d4444e55555 v1.2.3-rc4 #42 $1000 100% 1st 2nd 5G x86_64 00000000001"
    yield "".join(chr(p) for p in range(0x30000) if unicodedata.category(chr(p)) in ("Nd", "Nl", "No"))[:1500]


def repeated(*, full: bool) -> Iterator[str]:
    """One thing over and over, which makes merges compete, and words longer than a tokenizer's caches and limits."""
    for unit in (
        "a",
        "A",
        "=",
        "-",
        "é",
        "中",
        "🙂",
        "ab",
        "aaaab",
        "0",
        "\u0301",
        "word",
        ".",
        "_",
        "▁",
        "Ġ",
        "<",
        "the ",
    ):
        length = 1_000 if not full else 100_000 if unit in ("a", "é", "0", "the ") else 10_000
        yield unit * (length // len(unit))
        yield " " + unit * 37
    for size in (99, 100, 101, 199, 200, 201, 255, 256, 257, 1023, 1024):
        yield f"x {'qwertyuiop' * size}"[: size + 2] + " y"


def controls() -> Iterator[str]:
    yield "".join(map(chr, range(0x20))) + "".join(map(chr, range(0x7F, 0xA1)))
    yield "a\x00b\x00\x00c \x00 d\x00"
    yield "line\r\nline\rline\n\r\nline\n\n\r\r\n \r\n"
    yield "\x1b[31mred\x1b[0m \x07\x08 \x7f"
    yield "\ufefftext \ufeff\ufeff text\ufeff"


@functools.cache
def _package_files(endings: tuple[str, ...], count: int, packages: tuple[str, ...]) -> tuple[str, ...]:
    """The smaller files of installed packages, the same in each run."""
    found: list[str] = []
    for package in packages:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in sorted((file for file in files if file.name.endswith(endings)), key=str):
            if len(found) < count:
                path = Path(str(file.locate()))
                if path.is_file() and 500 < path.stat().st_size < 40_000:
                    found.append(path.read_text(encoding="utf-8", errors="replace"))
    return tuple(found)


def code(count: int) -> Iterator[str]:
    """Code in several languages, out of installed packages."""
    yield from (_SHELL, _C, _RUST, _HTML)
    for endings in (
        (".py",),
        (".js", ".css", ".html"),
        (".pyi",),
        (".h", ".hpp", ".cu", ".cuh"),
        (".json", ".toml", ".yaml"),
    ):
        packages = ("rich", "pydantic", "uvicorn", "aiohttp", "numpy", "triton", "jsonschema-specifications", "openai")
        yield from _package_files(endings, max(1, count // 5), packages)


def prose(count: int) -> Iterator[str]:
    yield from _package_files(
        ("METADATA", ".md", ".rst"), count, ("rich", "pydantic", "aiohttp", "hypothesis", "numpy", "jinja2")
    )


def base64s(rng: random.Random, *, full: bool) -> Iterator[str]:
    for size in (3, 50, 2_000, *((30_000,) if full else ())):
        raw = rng.randbytes(size)
        yield "data:image/png;base64," + base64.b64encode(raw).decode()
        yield base64.encodebytes(raw).decode()
        yield raw.hex()


_SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "<s>", "</s>", "<unk>", "<pad>"),
    *("[INST]", "[/INST]", "<<SYS>>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<start_of_turn>", "<tool_call>", "</think>"),
    *("[CLS]", "[SEP]", "[MASK]", "<mask>", "<|channel|>", "<0x0A>", "<0xFF>"),
)  # fmt: skip


def lookalikes(added: Sequence[str], rng: random.Random, *, full: bool) -> Iterator[str]:
    """Special tokens, some of them this tokenizer's: whole, cut, doubled, nested, in other letters and among blanks."""
    chosen = [*_SPECIAL, *(added if full else _some(added, 24, rng))]
    for token in dict.fromkeys(chosen):
        inside = len(token) // 2
        yield token
        yield f"{token}{token} {token}\n{token}\n\n{token}  {token}\t{token}."
        yield f"a{token}b {token}c d{token} 1{token}2 é{token}é _{token}_ .{token}. \u0301{token}\u0301"
        yield f" {token} hello {token}  \n {token}\u00a0{token}\u200b{token}"
        yield token[:inside] + token + token[inside:] + token[:-1] + token[1:] + token[:inside] + " " + token[inside:]
        yield f"{token.upper()} {token.lower()} {token.title()} {token[:inside]}\u200b{token[inside:]} " + "".join(
            chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in token
        )
        yield unicodedata.normalize("NFD", token) + unicodedata.normalize("NFKC", token) + f"\u0301{token}\u0301"


def between_tokens(added: Sequence[str], rng: random.Random, *, full: bool) -> Iterator[str]:
    """What has rules of its own at a text's or a segment's beginning and end, behind and before added tokens."""
    edges = (
        *("", " ", "  ", "\n", "\n\n", "▁", " a", "a", "a ", "\u0301", "\u00a0", "s", "'s", "1", "12", ".", "\ufeff"),
        *("\x00", "<", "|", ">", "\u200d", "é", "e\u0301", "中", " 中", "\r\n", "x\n", "\t", "A", "ing"),
    )
    chosen = _some(added, 40 if full else 10, rng) or ["<s>"]
    for edge in edges:
        yield edge.join(["", *chosen, ""])
        yield edge.join([*chosen])
        for token in chosen if full else chosen[:3]:
            yield edge + token + edge
            yield f"{edge}x{token}{edge}x{edge}{token}x{edge}"


def _some(several: Sequence[str], count: int, rng: random.Random) -> list[str]:
    if len(several) <= count:
        return list(several)
    return [*several[: count // 2], *rng.sample(list(several[count // 2 :]), count - count // 2)]


_WORDS = (
    "the",
    "Render",
    "tokens",
    "déjà",
    "naïve",
    "fox",
    "数据",
    "поезд",
    "x_y",
    "camelCase",
    "HTTP2",
    "αβγ",
    "don't",
    "ing",
)
_BLANKS = (" ", "  ", "\n", "\n\n", "\t", "   ", "\r\n", "\u00a0", " \n", "\n    ", "")
_ODD = (
    "\u0301",
    "\u200d",
    "🙂",
    "👍🏽",
    "🇩🇪",
    "\ufe0f",
    "\x00",
    "\ufeff",
    "ﬁ",
    "が",
    "한",
    "\u1100\u1161",
    "½",
    "…",
    "▁",
    "Ġ",
    "Ċ",
)


def soup(rng: random.Random, added: Sequence[str], length: int) -> str:
    """Words, blanks, oddities, added tokens and parts of them, in no order."""
    parts = []
    for _ in range(rng.randrange(1, length)):
        match rng.randrange(8):
            case 0 | 1:
                parts.append(rng.choice(_WORDS))
            case 2 | 3:
                parts.append(rng.choice(_BLANKS))
            case 4:
                parts.append(rng.choice(_ODD))
            case 5:
                parts.append("".join(rng.choices(string.printable, k=rng.randrange(1, 6))))
            case 6:
                parts.append(rng.choice(added or _SPECIAL))
            case _:
                token = rng.choice(added or _SPECIAL)
                parts.append(token[rng.randrange(len(token)) :][: rng.randrange(1, len(token) + 1)])
    return "".join(parts)


def smallest(text: str, fails: Callable[[str], bool]) -> str:
    """A short text that still fails, made by leaving out parts (Zeller's delta debugging), for people to read."""
    size = max(1, len(text) // 2)
    while True:
        begin, shorter = 0, False
        while begin < len(text):
            candidate = text[:begin] + text[begin + size :]
            if fails(candidate):
                text, shorter = candidate, True
            else:
                begin += size
        if size == 1 and not shorter:
            return text
        size = max(1, size // 2)


# -- chats -----------------------------------------------------------------------------------------------------------


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool(
        "get_weather",
        "Current weather at a place. Temperatures in °C or °F.",
        city={"type": "string", "description": "City, e.g. «Zürich» or 東京"},
        unit={"type": "string", "enum": ["c", "f"], "default": "c"},
    ),
    _tool(
        "run",
        'Runs a shell command; quotes " and \\ stay as they are.\nTwo lines.',
        command={"type": "string", "pattern": "^[^\\n]{1,4096}$"},
        timeout_s={"type": "number", "minimum": 0, "exclusiveMaximum": 600},
        environment={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    _tool("empty", ""),
)


def _call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=number % 2 == 0)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def chats(added: Sequence[str] = (), *, full: bool = False, seed: int = 11) -> list[Chat]:
    """Conversations, each of which is also meant to be rendered turn by turn (``growing``)."""
    rng = random.Random(seed)
    user, assistant = functools.partial(_says, "user"), functools.partial(_says, "assistant")
    made = [
        Chat("one word", (user("Hi"),)),
        Chat("empty", (user(""), assistant(""), user(" "))),
        Chat("blanks at all ends", (user(" a "), assistant("\n\nb\n"), user("\tc "), assistant(" "), user("\n"))),
        Chat("system", (_says("system", "Be brief.\n"), user("Hi"), assistant("Hello!"), user("Bye"))),
        Chat(
            "system in the middle", (user("Hi"), assistant("Hello!"), _says("system", "Now in French."), user("Go on"))
        ),
        Chat("the same again", tuple(says(text) for text in ("yes", "no") * 6 for says in (user, assistant))),
        Chat(
            "tools",
            (
                _says("system", "You may call tools."),
                user("Wie ist das Wetter in Zürich? 🌧️"),
                {**assistant(""), "tool_calls": [_call(0, "get_weather", city="Zürich", unit="c")]},
                {
                    **_says("tool", '{"temp": -3.5, "sky": "🌧️", "raw": "a\\nb"}'),
                    "tool_call_id": "call00000",
                    "name": "get_weather",
                },
                assistant("Es regnet bei −3,5 °C."),
                user("run `ls -la | grep '<|im_end|>'`"),
                {
                    **assistant("I'll look."),
                    "tool_calls": [_call(1, "run", command="ls -la", timeout_s=3, environment={})],
                },
                {
                    **_says("tool", "total 0\n-rw-r--r-- 1 root root 0 a b\n"),
                    "tool_call_id": "call00001",
                    "name": "run",
                },
                assistant("There is one file."),
                user("Thanks"),
            ),
            TOOLS,
        ),
        Chat("tools that nobody calls", (user("Hi"),), TOOLS),
        Chat(
            "content parts", (_parts("user", "first part", " second", "\n"), assistant("fine"), _parts("user", "third"))
        ),
        Chat("tokens as text", tuple(says(soup(rng, added, 30)) for _ in range(4) for says in (user, assistant))),
        Chat("code", tuple(says(text) for text in list(code(5))[:6] for says in (user, assistant))[:7]),
        Chat("oddities", tuple(says(text) for text in SEQUENCES for says in (user, assistant))),
    ]
    for number in range(30 if full else 3):
        turns = rng.randrange(1, 9)
        said = [says(soup(rng, added, 40)) for _ in range(turns) for says in (user, assistant)]
        made.append(Chat(f"soup {number}", tuple(said[: 2 * turns - 1])))
    return made


def growing(chat: Chat) -> Iterator[Chat]:
    """The chat as a server sees it over time: up to each message that asks for an answer."""
    for end, message in enumerate(chat.messages, start=1):
        if message["role"] in ("user", "tool"):
            yield Chat(f"{chat.name}, {end} messages", chat.messages[:end], chat.tools)


def _says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _parts(role: str, *several: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in several]}


# -- for hypothesis --------------------------------------------------------------------------------------------------


def any_text(added: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """Texts around added tokens: whole ones, parts of them, blanks, marks that combine, anything else."""
    tokens = st.sampled_from([token for token in added if token] or list(_SPECIAL))
    part = st.tuples(tokens, st.integers(0, 40), st.integers(1, 40)).map(lambda cut: cut[0][cut[1] :][: cut[2]])
    anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    piece = st.one_of(
        tokens, tokens, part, st.sampled_from(_WORDS), st.sampled_from(_BLANKS), st.sampled_from(_ODD), anything,
        st.text(st.sampled_from(" \n\t▁aA1.'<>|é\u0301"), max_size=20),
    )  # fmt: skip
    return st.lists(piece, max_size=25).map("".join)


def any_chat(added: Sequence[str] = ()) -> st.SearchStrategy[Chat]:
    """Chats whose turns alternate, as most templates want them, with or without a system message and tools."""

    def chat(system: str | None, said: list[str], tools: bool) -> Chat:
        first = [] if system is None else [_says("system", system)]
        turns = [_says(("user", "assistant")[number % 2], text) for number, text in enumerate(said)]
        return Chat("any", (*first, *turns), TOOLS if tools else ())

    said = st.lists(any_text(added), min_size=1, max_size=7)
    return st.builds(chat, st.none() | any_text(added), said, st.booleans())


def of_tokens(several: Iterable[Any]) -> list[str]:
    """Contents of ``tokenizer.json``'s added tokens."""
    return [str(token["content"]) for token in several]


_SHELL = """#!/usr/bin/env bash
set -euo pipefail
for f in "$HOME"/*.{txt,md}; do [[ -e $f ]] || continue; awk -F'\\t' '{ print $1 "," $NF }' "$f" | sort -u >> /tmp/out.csv 2>&1; done
"""

_C = """#include <stdio.h>
#define MAX(a, b) ((a) > (b) ? (a) : (b))
static int *p, **pp; /* comment */ // another
int main(int argc, char *argv[]) {\r\n\tfor (size_t i = 0; i < 0x10; ++i) printf("%zu: %s\\n", i, argv[i % argc]);
\treturn (argc != 1) ? -1 : !p && pp->x[3]<<2;\r\n}
"""

_RUST = """fn main() -> Result<(), Box<dyn std::error::Error>> {
    let v: Vec<_> = (0..=9u8).map(|x| x as f64 / 3.0).collect::<Vec<f64>>();
    println!("{:?} {:>8.3}", v, r#"raw "string""#); // émoji 🦀
    Ok(())
}
"""

_HTML = """<!DOCTYPE html><html lang="en"><head><title>x &amp; y</title><style>a>b{color:#fff!important}</style></head>
<body onload='f("<s>")'><p>1 &lt; 2</p><!-- <|endoftext|> --><s>struck</s> <unk> </body></html>
"""
