"""What the layers of a model keep of a sequence, from its ``config.json``: the shapes that vLLM makes caches of.

Source: vLLM 0.32, ``transformers_utils/model_arch_config_convertor.py`` (heads and their sizes), each model's file
under ``model_executor/models`` and ``models`` (which layer is of which kind), and the configuration classes of
transformers (what a field is that ``config.json`` leaves out). The tests build the same models with vLLM and compare
layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from trivet.check.kv_states import State, gated_delta, kimi_delta, mamba1, mamba2, short_conv
from trivet.check.model_config import GIVE, Config, Reading
from trivet.errors import TrivetError


class Kind(StrEnum):
    """What a layer keeps."""

    FULL = "full attention"
    """Keys and values of every token."""
    SLIDING = "sliding window"
    """Keys and values of the last tokens."""
    CHUNKED = "chunked local attention"
    """Keys and values of the tokens of the current chunk."""
    LATENT = "latent attention (MLA)"
    """One vector a token for all heads, of which every TP rank has a copy."""
    INDEXER = "indexer of sparse attention"
    """One quantized key a token, of which every TP rank has a copy."""
    STATE = "state"
    """A state of one size, however long the sequence: Mamba, linear attention, short convolution."""
    SHARED = "cache of another layer"
    NONE = "no cache"


@dataclass(frozen=True, slots=True)
class Cached:
    """What one layer keeps, before it is known in which dtype and by how many ranks."""

    kind: Kind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    """0 where key and value are one vector."""
    window_tokens: int | None = None
    """Of a sliding window or a chunk."""
    state: State | None = None


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """All layers of a model, in their order; a layer that keeps two things is there twice."""

    model_type: str
    cached: tuple[Cached, ...]
    heads: int
    """Heads of queries, which TP divides; 0 where there are none."""
    notes: tuple[str, ...]
    """What the config does not say for certain, and what was taken instead."""


SPARSE_BLOCK = 128
"""Elements that share a scale, of 4 bytes, in the cache of DeepSeek's indexer (vLLM: ``Indexer.quant_block_size``)."""

_Layers = list[Cached]


def layers_of(config: Config) -> ModelLayers:
    """Reads which layers a model has, and what each keeps.

    Raises:
        TrivetError: the config lacks what the sizes follow from, or its architecture is not known here.
    """
    reading = Reading(config)
    try:
        return _read(reading, config)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise TrivetError(
            f"the config of {reading.model_type} is malformed ({type(error).__name__}: {error})", mend=GIVE
        ) from None


def _read(reading: Reading, config: Config) -> ModelLayers:
    if (why := _REFUSED.get(reading.model_type)) is not None:
        raise TrivetError(f"{reading.model_type} {why}", mend=_MEASURE)
    if config.get("is_encoder_decoder"):
        raise TrivetError(
            f"{reading.model_type} is an encoder-decoder model, which no connector moves", mend="serve it colocated"
        )
    if reading.text.get("rswa_window"):
        raise TrivetError(f"{reading.model_type} keeps a reference window, which is not known here", mend=_MEASURE)
    read = _READERS.get(reading.model_type)
    if read is None:
        read = _latent if reading.text.get("kv_lora_rank") else _attention
        if reading.model_type not in _PLAIN:
            reading.note(
                f"model_type {reading.model_type!r} is not known here: taken as a decoder whose every layer attends"
                + (", as layer_types says" if reading.says_layers() else "")
            )
    cached = read(reading)
    if not cached:
        raise TrivetError(f"the config of {reading.model_type} has no layers", mend=GIVE)
    heads = reading.heads() if any(one.kv_heads for one in cached) else 0
    return ModelLayers(reading.model_type, tuple(cached), heads, tuple(reading.notes))


_MEASURE = "its KV can be measured: trivet check on running engines counts the bytes of its canaries"


# ---- which layer is of which kind


_SPELLINGS = {
    **dict.fromkeys(["full_attention", "attention", "indexed_attention", "*", "global", "global_attention"], Kind.FULL),
    **dict.fromkeys(["deepseek_sparse_attention", "qwen_sparse_attention"], Kind.FULL),
    **dict.fromkeys(["sliding_attention", "sliding_window", "swa", "local", "local_attention"], Kind.SLIDING),
    **dict.fromkeys(["chunked_attention"], Kind.CHUNKED),
    **dict.fromkeys(["linear_attention", "mamba", "mamba2", "M", "conv", "short_conv", "gated_deltanet"], Kind.STATE),
    **dict.fromkeys(["mlp", "moe", "-", "E"], Kind.NONE),
}


def _kinds(reading: Reading, spelled: Iterable[str]) -> list[Kind]:
    kinds = []
    for one in spelled:
        if one not in _SPELLINGS:
            raise TrivetError(f"{reading.model_type} has layers of type {one!r}, unknown here", mend=_MEASURE)
        kinds.append(_SPELLINGS[one])
    return kinds


def _every(layers: int, period: int, often: Kind, rare: Kind = Kind.FULL) -> list[Kind]:
    """``often``, but ``rare`` for each last layer of ``period``."""
    return [often if period and (index + 1) % period else rare for index in range(layers)]


def _said(reading: Reading) -> list[Kind] | None:
    """The kinds as the config spells them, one for each layer."""
    spelled = reading.strings("layer_types", "layers_block_type")
    if spelled is None:
        return None
    kinds = _kinds(reading, spelled)
    layers = reading.said_layers()
    if layers is not None and layers > len(kinds):
        raise TrivetError(
            f"the config of {reading.model_type} has {layers} layers, and the types of {len(kinds)}", mend=GIVE
        )
    return kinds[: layers or len(kinds)]


def _full(reading: Reading) -> Cached:
    """A layer that attends to everything."""
    size = reading.head_dim()
    return Cached(Kind.FULL, kv_heads=reading.kv_heads(), key_dim=size, value_dim=size)


def _mixed(reading: Reading, kinds: Sequence[Kind]) -> _Layers:
    """Attention of several kinds, all with the same heads."""
    full = _full(reading)
    window = reading.window()
    chunk = reading.optional("attention_chunk_size") or None
    made = {
        Kind.FULL: full,
        Kind.SLIDING: full if window is None else replace(full, kind=Kind.SLIDING, window_tokens=window),
        Kind.CHUNKED: full if chunk is None else replace(full, kind=Kind.CHUNKED, window_tokens=chunk),
        Kind.NONE: Cached(Kind.NONE),
    }
    if Kind.STATE in kinds:
        raise TrivetError(
            f"{reading.model_type} has layers with a state, of a shape that is not known here", mend=_MEASURE
        )
    return [made[kind] for kind in kinds]


def _attention(reading: Reading) -> _Layers:
    """As the config says for each layer; else one kind for all: a window that no list limits is every layer's."""
    kinds = _said(reading)
    if kinds is None:
        windows = reading.text.get("sliding_window")
        if isinstance(windows, list) and windows:
            kinds = [Kind.SLIDING if windows[i % len(windows)] else Kind.FULL for i in range(reading.layers())]
        elif reading.text.get("attention_chunk_size"):
            raise TrivetError(f"{reading.model_type} does not say which layers attend in chunks", mend=_MEASURE)
        else:
            kinds = [Kind.SLIDING if reading.window() else Kind.FULL] * reading.layers()
    return _mixed(reading, kinds)


def _periodic(period: int, *names: str, often: Kind = Kind.SLIDING) -> Callable[[Reading], _Layers]:
    """One layer of ``period`` attends to everything, unless the config has another number or a list."""

    def read(reading: Reading) -> _Layers:
        if (kinds := _said(reading)) is None:
            said = reading.optional(*names) if names else None
            kinds = _every(reading.layers(), period if said is None else said, often)
        return _mixed(reading, kinds)

    return read


def _qwen2(reading: Reading) -> _Layers:
    """A window is used only where ``use_sliding_window``, by the layers from ``max_window_layers``."""
    layers = reading.layers()
    if not reading.text.get("use_sliding_window", False):
        return [_full(reading)] * layers
    kinds = _said(reading)
    if kinds is None:
        first = reading.optional("max_window_layers")
        first = 28 if first is None else first
        kinds = [Kind.SLIDING if index >= first else Kind.FULL for index in range(layers)]
    return _mixed(reading, kinds)


def _with_use(reading: Reading) -> _Layers:
    """A window is used only where ``use_sliding_window``; then by every layer, or those of a list."""
    if reading.text.get("use_sliding_window", False):
        return _attention(reading)
    return [_full(reading)] * reading.layers()


def _exaone4(reading: Reading) -> _Layers:
    if (kinds := _said(reading)) is None:
        pattern = reading.text.get("sliding_window_pattern", 4)
        if "sliding_window" in reading.text and not reading.window():
            kinds = [Kind.FULL] * reading.layers()
        elif isinstance(pattern, str):  # "LLLG"
            kinds = [
                Kind.SLIDING if pattern[index % len(pattern)] == "L" else Kind.FULL for index in range(reading.layers())
            ]
        else:
            kinds = _every(reading.layers(), int(pattern or 0), Kind.SLIDING)
    return _mixed(reading, kinds)


def _cohere2(reading: Reading) -> _Layers:
    """vLLM adds the token itself to the window, which the config counts without it."""
    layers = _periodic(4, "sliding_window_pattern")(reading)
    return [replace(one, window_tokens=one.window_tokens + 1) if one.window_tokens else one for one in layers]


def _llama4(reading: Reading) -> _Layers:
    """Layers with a position embedding attend in chunks (``no_rope_layers`` has 1 for them)."""
    rope = reading.text.get("no_rope_layers")
    if not isinstance(rope, list) or not rope:
        interval = reading.optional("no_rope_layer_interval")
        rope = [int(kind is Kind.CHUNKED) for kind in _every(reading.layers(), interval or 4, Kind.CHUNKED)]
    name = "attention_chunk_size"
    chunk = reading.optional(name) if name in reading.text else reading.taken(name, 8192)
    full = _full(reading)
    chunked = replace(full, kind=Kind.CHUNKED, window_tokens=chunk) if chunk else full
    return [chunked if one else full for one in rope]


def _gemma3n(reading: Reading) -> _Layers:
    """The last ``num_kv_shared_layers`` (15 unless said) use the cache of an earlier layer."""
    shared = reading.optional("num_kv_shared_layers")
    return _share(_periodic(5)(reading), 15 if shared is None else shared)


def _gemma4(reading: Reading) -> _Layers:
    """Layers that attend to everything have heads of another size and number, and the last is always one."""
    kinds = _said(reading) or _every(reading.layers(), 6, Kind.SLIDING)
    kinds[-1] = Kind.FULL
    size = reading.optional("global_head_dim") or 512
    heads = reading.optional("num_global_key_value_heads") if reading.text.get("attention_k_eq_v") else None
    layers = [
        replace(one, key_dim=size, value_dim=size, kv_heads=heads or one.kv_heads) if one.kind is Kind.FULL else one
        for one in _mixed(reading, kinds)
    ]
    return _share(layers, reading.optional("num_kv_shared_layers") or 0)


def _share(layers: _Layers, shared: int) -> _Layers:
    own = len(layers) - shared
    return [one if index < own else Cached(Kind.SHARED) for index, one in enumerate(layers)]


def _latent(reading: Reading) -> _Layers:
    """MLA: ``kv_lora_rank`` elements and the key's rotated ones, ``qk_rope_head_dim``, for all heads together.

    DeepSeek-V3: 512 + 64. With ``index_topk`` each layer that selects tokens has an indexer too, whose key is 8-bit
    with a scale for each 128 elements; GLM's share what another selected (``index_topk_freq``, ``index_topk_pattern``).
    """
    if not reading.text.get("kv_lora_rank"):
        return [_deepseek_full(reading)] * reading.layers()
    rope = reading.number("qk_rope_head_dim")
    latent = Cached(Kind.LATENT, kv_heads=1, key_dim=reading.number("kv_lora_rank") + rope)
    if reading.model_type not in _MLA:
        reading.note(
            f"kv_lora_rank in {reading.model_type!r}, which is not known here: taken as latent attention (MLA)"
        )
    if not reading.text.get("index_topk"):
        return [latent] * reading.layers()
    size = reading.number("index_head_dim")
    indexer = Cached(Kind.INDEXER, kv_heads=1, key_dim=size + size // SPARSE_BLOCK * 4)
    pattern = reading.text.get("index_topk_pattern")
    period, offset = reading.optional("index_topk_freq") or 1, reading.optional("index_skip_topk_offset")
    start = 2 if offset is None else offset
    layers: _Layers = []
    for index in range(reading.layers()):
        if pattern is None:
            selects = max(index - start + 1, 0) % period == 0
        else:
            selects = index >= len(pattern) or pattern[index] != "S"
        layers += [latent, indexer] if selects else [latent]
    return layers


def _deepseek_full(reading: Reading) -> Cached:
    """DeepSeek's attention without a latent, as vLLM computes it: values are padded to the size of keys."""
    if reading.text.get("qk_nope_head_dim") and reading.text.get("qk_rope_head_dim"):
        size = reading.number("qk_nope_head_dim") + reading.number("qk_rope_head_dim")
        return Cached(Kind.FULL, kv_heads=reading.heads(), key_dim=size, value_dim=size)
    return _full(reading)


def _minicpm3(reading: Reading) -> _Layers:
    """Has a latent too, but vLLM keeps whole keys, and values padded to their size."""
    return [_deepseek_full(reading)] * reading.layers()


def _longcat(reading: Reading) -> _Layers:
    """Two attentions in each layer."""
    return [one for one in _latent(reading) for _ in range(2)]


def _falcon(reading: Reading) -> _Layers:
    """``multi_query`` is one KV head, unless the architecture is the new one."""
    if not reading.text.get("new_decoder_architecture") and reading.text.get("multi_query", False):
        return [replace(_full(reading), kv_heads=1)] * reading.layers()
    return [_full(reading)] * reading.layers()


def _chatglm(reading: Reading) -> _Layers:
    full = _full(reading)
    if not reading.text.get("multi_query_attention"):
        full = replace(full, kv_heads=reading.heads())
    return [full] * reading.layers()


def _in_attn_config(reading: Reading) -> _Layers:
    """DBRX and MPT: KV heads stand in ``attn_config``."""
    within = reading.text.get("attn_config")
    heads = reading.optional("kv_n_heads", within=within) if isinstance(within, Mapping) else None
    return [replace(_full(reading), kv_heads=heads or reading.heads())] * reading.layers()


def _blocks(reading: Reading) -> _Layers:
    """Nemotron made by architecture search: ``block_configs`` has each layer's attention, or none."""
    layers: _Layers = []
    for block in reading.text.get("block_configs") or []:
        attention = block["attention"]
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(Cached(Kind.NONE))
        else:
            heads = reading.heads() // reading.number("n_heads_in_group", within=attention)
            layers.append(replace(_full(reading), kv_heads=heads))
    return layers


def _mimo_v2(reading: Reading) -> _Layers:
    """``hybrid_layer_pattern`` has 1 for layers with a window, whose heads are others."""
    full = _full(reading)
    full = replace(full, value_dim=reading.optional("v_head_dim") or full.key_dim)
    size = reading.number("swa_head_dim")
    sliding = Cached(
        Kind.SLIDING,
        kv_heads=reading.number("swa_num_key_value_heads"),
        key_dim=size,
        value_dim=reading.optional("swa_v_head_dim") or size,
        window_tokens=reading.number("sliding_window_size", "sliding_window"),
    )
    pattern = reading.text.get("hybrid_layer_pattern")
    if not isinstance(pattern, list):
        raise TrivetError(f"the config of {reading.model_type} has no hybrid_layer_pattern", mend=GIVE)
    return [sliding if one == 1 else full for one in pattern[: reading.layers()]]


# ---- layers with a state


def _with_state(shape: Callable[[Reading], State], kinds: Callable[[Reading], list[Kind]]) -> Callable[..., _Layers]:
    def read(reading: Reading) -> _Layers:
        wanted = kinds(reading)
        made = _Lazy(
            {
                Kind.STATE: lambda: Cached(Kind.STATE, state=shape(reading)),
                Kind.NONE: lambda: Cached(Kind.NONE),
                Kind.FULL: lambda: _full(reading),
            }
        )
        return [made[kind] for kind in wanted]

    return read


class _Lazy(dict[Kind, Cached]):
    """Reads of each kind only what a model has layers of: a model of states alone says nothing of attention."""

    def __init__(self, make: Mapping[Kind, Callable[[], Cached]]) -> None:
        self._make = make

    def __missing__(self, kind: Kind) -> Cached:
        if kind not in self._make:
            raise TrivetError(f"layers of {kind} beside layers with a state are not known here", mend=_MEASURE)
        return self.setdefault(kind, self._make[kind]())


def _only_state(reading: Reading) -> list[Kind]:
    return [Kind.STATE] * reading.layers()


def _jamba(reading: Reading) -> list[Kind]:
    """``attn_layer_period`` and ``attn_layer_offset``: one layer of the period attends."""
    if (kinds := _said(reading)) is not None:
        return kinds
    period, offset = reading.number("attn_layer_period"), reading.number("attn_layer_offset")
    return [Kind.FULL if index % period == offset else Kind.STATE for index in range(reading.layers())]


def _bamba(reading: Reading) -> list[Kind]:
    """``attn_layer_indices``."""
    if (kinds := _said(reading)) is not None:
        return kinds
    attends = reading.text.get("attn_layer_indices") or []
    return [Kind.FULL if index in attends else Kind.STATE for index in range(reading.layers())]


def _nemotron_h(reading: Reading) -> list[Kind]:
    """``hybrid_override_pattern``: M a state, * attention, - and E neither. It says how many layers there are."""
    spelled: Iterable[str] | None = reading.strings("layers_block_type", "layer_types")
    spelled = spelled or reading.text.get("hybrid_override_pattern")
    if not spelled:
        raise TrivetError("the config of nemotron_h has neither layers_block_type nor a pattern", mend=GIVE)
    return _kinds(reading, spelled)


def _granite(reading: Reading) -> list[Kind]:
    """Without ``layer_types`` no layer attends."""
    return _said(reading) or _only_state(reading)


def _interval(reading: Reading) -> list[Kind]:
    """``full_attention_interval``: the last layer of each attends."""
    said = _said(reading)
    period = reading.optional("full_attention_interval") or 4
    return said if said is not None else _every(reading.layers(), period, Kind.STATE)


def _lfm2(reading: Reading) -> list[Kind]:
    if (kinds := _said(reading)) is not None:
        return kinds
    attends = reading.text.get("full_attn_idxs")
    layers = range(reading.layers())
    return [Kind.FULL if attends is None or index in attends else Kind.STATE for index in layers]


def _falcon_h1(reading: Reading) -> _Layers:
    """Attention and a state, side by side in each layer."""
    return [Cached(Kind.STATE, state=mamba2(reading)), _full(reading)] * reading.layers()


def _zamba2(reading: Reading) -> _Layers:
    """A state in each layer; ``hybrid`` ones attend as well, with heads of ``attention_head_dim``."""
    spelled = reading.strings("layers_block_type")
    if spelled is None:
        raise TrivetError("the config of zamba2 has no layers_block_type", mend=GIVE)
    size = reading.optional("attention_head_dim") or 2 * reading.hidden() // reading.heads()
    full = Cached(Kind.FULL, kv_heads=reading.kv_heads(), key_dim=size, value_dim=size)
    state = Cached(Kind.STATE, state=mamba2(reading))
    return [one for kind in spelled for one in ([full, state] if kind == "hybrid" else [state])]


def _kimi_linear(reading: Reading) -> _Layers:
    """Kimi's delta attention (``kda_layers``, counted from 1), whose matrix is float32, and MLA."""
    linear = reading.text.get("linear_attn_config")
    if not isinstance(linear, Mapping) or linear.get("kda_layers") is None:
        return _latent(reading)
    state = kimi_delta(reading)
    latent = _latent(reading)
    return [
        Cached(Kind.STATE, state=state) if index + 1 in linear["kda_layers"] else one
        for index, one in enumerate(latent)
    ]


_MLA = frozenset(
    {
        *("axk1", "AXK1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "kimi_k2"),
        *("kimi_linear", "longcat_flash", "pangu_ultra_moe"),
    }
)
"""Read as MLA by vLLM where they have a ``kv_lora_rank``: ``is_deepseek_mla``."""

_PLAIN = frozenset(
    {
        *("apertus", "arcee", "baichuan", "bailing_moe", "bailing_moe_v2", "bloom", "cohere", "command-r", "deepseek"),
        *("ernie4_5", "ernie4_5_moe", "exaone", "gemma", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text"),
        *("glm_ocr_text", "gpt2", "gpt_neox", "gptj", "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hyperclovax", "internlm2", "internlm3", "llama", "minicpm", "minimax_m2", "ministral3"),
        *("mistral", "mistral3", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "opt", "orion", "persimmon", "phi"),
        *("phi3", "phimoe", "qwen", "qwen2_5_omni_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
        *("seed_oss", "solar", "stablelm", "starcoder2", "telechat", "teleflm"),
    }
)
"""Decoders whose every layer attends, with a window in all of them or in none, unless ``layer_types`` says more."""

_OWN = "keeps its cache in a layout of its own, which is not known here"
_NO_TOKENS = "generates no tokens: there is no prefill to split from decode"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ["deepseek_v4", "deepseek_v41", "dots3_note", "glm5next", "glm5next_text", "hy_v4", "inkling"], _OWN
    ),
    **dict.fromkeys(
        ["inkling", "iquest_loopcoder", "k3_dspark", "kimi_k3", "minimax", "minimax_m1", "minimax_m3"], _OWN
    ),
    **dict.fromkeys(["bailing_hybrid", "bailing_moe_v3_vl", "cohere_asr", "minimax_text_01", "plamo2"], _OWN),
    **dict.fromkeys(["qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "step3p5"], _OWN),
    **dict.fromkeys(["bert", "clip", "modernbert", "nomic_bert", "roberta", "siglip", "xlm-roberta"], _NO_TOKENS),
}

_READERS: Mapping[str, Callable[[Reading], _Layers]] = {
    **dict.fromkeys(_MLA, _latent),
    **dict.fromkeys(["qwen2", "qwen3", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"], _qwen2),
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl"], _qwen2),  # their old configs are flat
    **dict.fromkeys(["qwen3_moe", "smollm3"], _with_use),
    **dict.fromkeys(["falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode"], _falcon),
    **dict.fromkeys(["dbrx", "mpt"], _in_attn_config),
    **dict.fromkeys(["gemma2", "gpt_oss"], _periodic(2)),
    **dict.fromkeys(["gemma3_text", "gemma3"], _periodic(6, "sliding_window_pattern", "_sliding_window_pattern")),
    **dict.fromkeys(["gemma3n_text", "gemma3n"], _gemma3n),
    **dict.fromkeys(["gemma4_text", "gemma4"], _gemma4),
    **dict.fromkeys(["mamba", "falcon_mamba"], _with_state(mamba1, _only_state)),
    **dict.fromkeys(["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"], _with_state(gated_delta, _interval)),
    **dict.fromkeys(["nemotron_h", "nemotron_h_puzzle"], _with_state(mamba2, _nemotron_h)),
    **dict.fromkeys(["lfm2", "lfm2_moe"], _with_state(short_conv, _lfm2)),
    **dict.fromkeys(["mimo_v2", "mimo_v2_flash"], _mimo_v2),
    "afmoe": _periodic(4, "global_attn_every_n_layers"),
    "bamba": _with_state(mamba2, _bamba),
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _with_state(mamba2, _granite),
    "jamba": _with_state(mamba1, _jamba),
    "kimi_linear": _kimi_linear,
    "llama4_text": _llama4,
    "longcat_flash": _longcat,
    "mamba2": _with_state(mamba2, _only_state),
    "minicpm3": _minicpm3,
    "nemotron-nas": _blocks,
    "olmo3": _periodic(4),
    "olmo_hybrid": _with_state(gated_delta, _interval),
    "zamba2": _zamba2,
}


def divides(model: ModelLayers, tp: int) -> None:
    """Checks that vLLM can divide a model among ``tp`` ranks.

    Raises:
        TrivetError: it cannot.
    """
    if tp < 1:
        raise TrivetError(f"there are {tp} TP ranks", mend="give one or more")
    if model.heads % tp:
        fits = [one for one in range(1, min(model.heads, 1024) + 1) if model.heads % one == 0]
        raise TrivetError(
            f"{model.heads} attention heads cannot be divided among {tp} TP ranks",
            mend=f"give one of {', '.join(map(str, fits))}",
        )
    for one in model.cached:
        if one.kind in (Kind.FULL, Kind.SLIDING, Kind.CHUNKED) and one.kv_heads % tp and tp % one.kv_heads:
            raise TrivetError(
                f"{one.kv_heads} KV heads can be neither divided among {tp} TP ranks nor copied to them",
                mend=f"give a TP size that {one.kv_heads} divides, or a divisor of it",
            )
        if one.state is not None and (one.state.conv_width % tp or one.state.matrix_elements % tp):
            raise TrivetError(
                f"the state of {model.model_type} cannot be divided among {tp} TP ranks",
                mend=f"give {math.gcd(one.state.conv_width, tp)}",
            )
