"""What two engines must have in common to exchange KV block by block, and what TrivetConnector refuses by name."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.transfer.messages import PROTOCOL

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SAID_OF: Mapping[str, str] = {
    "protocol": "protocol of TrivetConnector",
    "vllm": "vLLM version",
    "model": "model",
    "weights": "model config",
    "dtype": "dtype",
    "kv_dtype": "--kv-cache-dtype",
    "tensor_parallel": "--tensor-parallel-size",
    "block_tokens": "--block-size",
    "groups": "KV cache groups",
    "layout": "KV cache layout",
    "device": "device type",
    "host": "host",
}


def host() -> str:
    """Names this machine since its last boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{platform.node()} {boot}"


def identity(config: VllmConfig, caches: KVCacheConfig) -> dict[str, Any]:
    """What ``difference`` compares: everything on which the bytes of a block, or their meaning, depend."""
    import vllm

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "protocol": PROTOCOL,
        "vllm": vllm.__version__,
        "model": str(model.model).rstrip("/"),
        "weights": _digest(model.hf_config.to_diff_dict()),
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "tensor_parallel": parallel.tensor_parallel_size,
        "block_tokens": cache.block_size,
        "groups": [_group_words(group) for group in caches.kv_cache_groups],
        "layout": str(getattr(caches, "kv_cache_layout", None)),
        "device": config.device_config.device_type,
        "host": host(),
    }


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first thing in which two identities differ, in one line with the mend; None if they can exchange KV."""
    for name in {**own, **other}:
        here, there = own.get(name), other.get(name)
        if here != there:
            said = _SAID_OF.get(name, name)
            return f"prefill and decode differ in {said}: {_short(here)} and {_short(there)}; start both alike"
    return None


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
    if "AttentionSpec" not in names or not getattr(spec, "has_layer_views", True):
        return f"a cache of another kind than attention's, {type(spec).__name__},"
    return None


def _group_words(group: Any) -> str:
    spec = group.kv_cache_spec
    return (
        f"{type(spec).__name__} of {spec.block_size} tokens in {spec.page_size_bytes} bytes, "
        f"{len(group.layer_names)} layers {_digest(sorted(group.layer_names))}"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
