"""What two engines must have in common to exchange KV block by block, and what TrivetConnector refuses by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.transfer.messages import PROTOCOL, one_line

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_ALIKE = "start both alike"
_SAID_OF: Mapping[str, tuple[str, str]] = {
    "protocol": ("protocol of TrivetConnector", "install the same Trivet for both"),
    "vllm": ("vLLM version", "install the same vLLM for both"),
    "host": ("host", "run both on one, under one host name"),
    "device": ("device type", _ALIKE),
    "model": ("model", _ALIKE),
    "revision": ("--revision", _ALIKE),
    "quantization": ("--quantization", _ALIKE),
    "dtype": ("--dtype", _ALIKE),
    "kv_dtype": ("--kv-cache-dtype", _ALIKE),
    "tensor_parallel": ("--tensor-parallel-size", _ALIKE),
    "block_tokens": ("--block-size", _ALIKE),
    "layout": ("KV cache layout", "give both the same VLLM_KV_CACHE_LAYOUT and attention backend"),
    "groups": ("number of KV cache groups", _ALIKE),
}
"""How a fact is called, and what a person does if it differs."""

_OF_GROUPS: Mapping[str, str] = {
    "layers": "layers",
    "layer names": "names of layers",
    "kind": "kind of attention",
    "block_size": "tokens of a block",
    "num_kv_heads": "KV heads",
    "head_size": "head size",
    "head_size_v": "head size of values",
    "dtype": "dtype",
    "cache_dtype_str": "dtype of its cache",
    "kv_quant_mode": "kind of quantization",
    "sliding_window": "sliding window",
    "rswa_window": "sliding window",
    "attention_chunk_size": "attention chunk",
    "sink_len": "attention sink",
    "tokens_per_state": "tokens of a state",
    "num_head_slots": "head slots",
    "state_content_bytes": "bytes of a state",
    "page_size_padded": "padding of a block",
    "alignment": "alignment",
    "model_version": "version of the model's layout",
    "page_size_bytes": "bytes of a block",
    "caches by layer": "caches by layer",
}
"""Fields of vLLM's cache specs on which the bytes of a block depend, or which blocks there are; not all specs have all.

What vLLM reserves (``extra_retained_tokens`` and such) is not among them: engines may differ in it.
"""

_OF_THE_MODEL = "config."
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})
_LONGEST_FACT = 200
_NO_JSON = object()
_NAMES = str | int | float | None
"""Of settings, in JSON or where JSON makes texts of them."""


def host() -> str:
    """Names this machine since its last boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{platform.node()} {boot}"


def identity(config: VllmConfig, caches: KVCacheConfig) -> dict[str, str | int | None]:
    """What ``difference`` compares: everything on which the bytes of a block, or their meaning, depend."""
    import vllm

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    facts: dict[str, Any] = {
        "protocol": PROTOCOL,
        "vllm": vllm.__version__,
        "host": host(),
        "device": config.device_config.device_type,
        "model": str(model.model).rstrip("/"),
        "revision": getattr(model, "revision", None),
        "quantization": getattr(model, "quantization", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
        "tensor_parallel": parallel.tensor_parallel_size,
        "block_tokens": cache.block_size,
        "layout": getattr(caches, "kv_cache_layout", None),
        "groups": len(caches.kv_cache_groups),
    }
    if facts["kv_dtype"] == "auto":
        facts["kv_dtype"] = facts["dtype"]
    for index, group in enumerate(caches.kv_cache_groups):
        facts |= {f"group.{index}.{name}": fact for name, fact in _facts_of(group)}
    facts |= {f"{_OF_THE_MODEL}{name}": fact for name, fact in _flat(_settings_of(model.hf_config))}
    return {name: fact if isinstance(fact, int) else _fact(fact) for name, fact in facts.items()}


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first thing in which two identities differ, in one line with the mend; None if they can exchange KV."""
    for name in {**own, **other}:
        here, there = own.get(name), other.get(name)
        if here != there:
            said, mend = _said_of(name)
            return f"prefill and decode differ in {said}: {_short(here)} and {_short(there)}; {mend}"
    return None


def _said_of(name: str) -> tuple[str, str]:
    if name.startswith(_OF_THE_MODEL):
        field = _short(name.removeprefix(_OF_THE_MODEL))
        return f"model config ({field})", "start both with the same model files and --hf-overrides"
    if name.startswith("group."):
        _, index, field = name.split(".", 2) if name.count(".") > 1 else ("", "?", name)
        return f"{_OF_GROUPS.get(field, _short(field))} of KV cache group {_short(index)}", _ALIKE
    return _SAID_OF.get(name, (_short(name), _ALIKE))


def refusal(config: VllmConfig, caches: KVCacheConfig | None) -> str | None:
    """What this engine is asked for and TrivetConnector does not move, in one line; None if there is nothing."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism; use tensor parallelism"
    if parallel.data_parallel_size > 1:
        return "data-parallel ranks in one engine; start an engine for each"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"context parallelism ({name})"
    if config.speculative_config is not None:
        return "speculative decoding"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "scales that each engine finds for itself (--calculate-kv-scales)"
    for group in caches.kv_cache_groups if caches is not None else ():
        if kind := _immovable(group.kv_cache_spec):
            return f"{kind} ({group.layer_names[0]})"
        if getattr(group, "host_resident", False):
            return f"KV that lives in host memory ({group.layer_names[0]})"
    return None


def _immovable(spec: Any) -> str | None:
    names = {one.__name__ for one in type(spec).__mro__}
    if "MambaSpec" in names:
        return "state-space layers, whose state is no list of blocks"
    if "CrossAttentionSpec" in names or "EncoderOnlyAttentionSpec" in names:
        return "encoder layers"
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        return next((kind for one in inner.values() if (kind := _immovable(one))), None)
    if "ChunkedLocalAttentionSpec" in names:
        return "attention in local chunks, which decode cannot go on in without blocks that vLLM does not ask for"
    if "AttentionSpec" not in names or not getattr(spec, "has_layer_views", True):
        return f"a cache of another kind than attention's, {type(spec).__name__},"
    return None


def _facts_of(group: Any) -> Iterator[tuple[str, Any]]:
    spec = group.kv_cache_spec
    members = {name: dict(_fields_of(one)) for name, one in (getattr(spec, "kv_cache_specs", None) or {}).items()}
    facts: dict[str, Any] = {
        "layers": len(group.layer_names),
        "layer names": _digest(sorted(group.layer_names)),
        "kind": type(spec).__name__,
        "caches by layer": _digest(members) if members else None,
        **dict(_fields_of(spec)),
    }
    for field in _OF_GROUPS:
        if field not in facts:  # vLLM may gather unlike layers in one group
            values = {own[field] for own in members.values() if field in own}
            unset = any(field not in own for own in members.values())
            facts[field] = "/".join([*sorted(values), *(["None"] * unset)]) if values else None
        yield field, facts[field]


def _fields_of(spec: Any) -> Iterator[tuple[str, str]]:
    for field in _OF_GROUPS:
        with contextlib.suppress(AttributeError, NotImplementedError):  # a kind of spec that has it not
            if (value := getattr(spec, field)) is not None:
                yield field, str(value)


def _settings_of(config: Any) -> Mapping[str, Any]:
    """What a model's config says, as JSON: without what is none, whose text may be another in each process."""
    try:
        said = config.to_diff_dict()
    except Exception:  # it makes a config of that class without arguments, which a model's own code may not allow
        said = config.to_dict()
    settings = _as_json(said)
    assert isinstance(settings, dict)
    return settings


def _as_json(value: Any) -> Any:
    match value:
        case None | str() | int() | float():
            return value
        case Mapping():
            each = ((f"{name}", _as_json(one)) for name, one in value.items() if isinstance(name, _NAMES))
            return {name: one for name, one in each if one is not _NO_JSON}
        case list() | tuple() | set() | frozenset():
            known = [one for member in value if (one := _as_json(member)) is not _NO_JSON]
            return sorted(known, key=_text) if isinstance(value, set | frozenset) else known
        case _:
            return _NO_JSON


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of a model's config by their dotted names, so that a difference can be named."""
    for name, value in config.items():
        if name in _NOT_OF_THE_MODEL:
            continue
        if isinstance(value, Mapping) and value and len(value) <= 64:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"[:_LONGEST_FACT], value if isinstance(value, str) else _text(value)


def _fact(value: object) -> str | None:
    text = None if value is None else str(value)
    return text if text is None or len(text) <= _LONGEST_FACT else f"{text[:100]}... {_digest(text)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _short(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
