"""What a live engine tells of itself, and how it is read.

An engine that Trivet starts, or one that somebody gave ``--middleware trivet.fleet.told.EngineFacts``, answers
``GET /trivet/engine``. Of any other vLLM some facts show in ``/version``, ``/v1/models`` and ``/metrics``, and more in
``/server_info`` where it runs in its development mode. What nothing tells is None: not known, which is not the same as
not there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from trivet.errors import TrivetError
from trivet.fleet.told import MIDDLEWARE, PATH

_TIMEOUT = aiohttp.ClientTimeout(total=30.0)  # the first answer waits for samples of the checkpoint to be read
_SHORT_TIMEOUT = aiohttp.ClientTimeout(total=5.0)

TELL = f"--middleware {MIDDLEWARE}"
"""The flag with which an engine tells all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of one engine. None: not told. An empty text: it has none (no connector, no quantization)."""

    whole: bool = False
    """Whether the engine answers ``/trivet/engine``, so that what is None is nothing it could tell."""
    trivet: str | None = None
    vllm: str | None = None
    connector: str | None = None
    kv_role: str | None = None
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    connector_options: Mapping[str, Any] | None = None
    """``kv_connector_extra_config``, without what looks like a secret."""
    load_failure_policy: str | None = None
    kv_buffer_device: str | None = None
    permutes_kv: bool | None = None
    engine_id: str | None = None
    block_tokens: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    """Of the KV cache; ``auto`` where it is the model's, and that is not told."""
    kv_dtype_flag: str | None = None
    """As ``--kv-cache-dtype`` says it."""
    kv_layout: str | None = None
    """None as well where vLLM decides in the engine core, which does not tell its API server."""
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    decode_context_parallel: int | None = None
    prefill_context_parallel: int | None = None
    model: str | None = None
    """As ``--model`` says it."""
    revision: str | None = None
    config_digest: str | None = None
    """``trivet.fleet.checkpoint``."""
    weights_digest: str | None = None
    overrides_digest: str | None = None
    load_format: str | None = None
    served_names: tuple[str, ...] | None = None
    max_length_tokens: int | None = None
    tokenizer: str | None = None
    tokenizer_tokens: int | None = None
    """Entries of the tokenizer's vocabulary, added ones too."""
    vocabulary_tokens: int | None = None
    """Of the model."""
    layers: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    is_mla: bool | None = None
    sliding_window: int | None = None
    """0: none."""
    has_state_layers: bool | None = None
    hybrid_manager: bool | None = None
    attention_backend: str | None = None
    """None where vLLM chooses."""
    speculative: str | None = None
    """Method, number of tokens and draft model, as sorted JSON."""
    quantization: str | None = None
    prefix_caching: bool | None = None
    hash_algorithm: str | None = None
    hash_seed: str | None = None
    """``PYTHONHASHSEED``; empty if it is not set."""
    batched_tokens: int | None = None
    chunked_prefill: bool | None = None
    device: str | None = None
    host: str | None = None
    boot: str | None = None
    """Of the kernel: two engines with one are on one machine, whatever names their containers have."""
    namespaces: Mapping[str, str] | None = None
    """Of the kernel: ``ipc``, ``pid``, ``net``."""
    environment: Mapping[str, str] | None = None
    """What transports read: ``UCX_*``, ``NIXL_*``, ``CUDA_VISIBLE_DEVICES``, ..."""
    gpus: tuple[Mapping[str, Any], ...] | None = None
    """``name``, ``uuid``, ``pci``, ``numa`` of each that its process may use."""
    cores: tuple[int, ...] | None = None
    numa: tuple[int, ...] | None = None
    locked_memory_bytes: int | None = None
    """How much may be pinned; None if there is no limit."""
    shm_bytes: int | None = None

    @property
    def nixl_backends(self) -> tuple[str, ...] | None:
        """NIXL's plugins, as vLLM takes them from ``backends`` of the extra config; None if that is not told."""
        if self.connector_options is None:
            return None
        named = self.connector_options.get("backends", ["UCX"])
        return tuple(str(one) for one in named) if isinstance(named, list | tuple) else None


async def read_facts(session: aiohttp.ClientSession, url: str, api_key: str | None = None) -> EngineFacts:
    """Asks an engine.

    Raises:
        TrivetError: nothing answers there.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    told = await _json(session, f"{url}{PATH}", headers, _TIMEOUT)
    if told is not None and "format" in told:
        return facts_of(told, whole=True)
    version, models, metrics, info = await asyncio.gather(
        _json(session, f"{url}/version", headers),
        _json(session, f"{url}/v1/models", headers),
        _text(session, f"{url}/metrics", headers),
        _json(session, f"{url}/server_info?config_format=json", headers),
    )
    if version is None and models is None and metrics is None:
        raise TrivetError(f"nothing answers at {url}", mend="start the engine, or correct its url")
    return facts_of(
        {
            **_of_metrics(metrics or ""),
            **_of_models(models or {}),
            **_of_server_info(info or {}),
            "vllm": (version or {}).get("version"),
        }
    )


def facts_of(told: Mapping[str, Any], *, whole: bool = False) -> EngineFacts:
    """From names and values as ``/trivet/engine`` has them. What is of another kind than it should be is not told."""
    return EngineFacts(
        whole=whole,
        **{name: value for name, kind in _KINDS.items() if (value := _fit(told.get(name), *kind)) is not None},
    )


def _kinds() -> Iterator[tuple[str, tuple[type, type | None]]]:
    """Of each fact the type, and of a tuple's members theirs."""
    for name, hint in get_type_hints(EngineFacts).items():
        if name != "whole":
            kind = get_args(hint)[0]  # beside None
            inner = get_args(kind)[0] if get_origin(kind) is tuple else None
            yield name, (get_origin(kind) or kind, inner and (get_origin(inner) or inner))


def _fit(value: Any, kind: type, inner: type | None) -> Any:
    if inner is not None:
        fits = isinstance(value, list) and all(_is(one, inner) for one in value)
        return tuple(value) if fits else None
    return value if _is(value, kind) else None


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _of_models(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """``/v1/models``: the base model's names come first, adapters name their ``parent``."""
    data = answer.get("data")
    models = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
    base = [one for one in models if not one.get("parent")]
    if not base:
        return {}
    return {
        "served_names": [str(one.get("id")) for one in base],
        "model": base[0].get("root"),
        "max_length_tokens": base[0].get("max_model_len"),
    }


_COUNTED = {"vllm:nixl_": "NixlConnector", "vllm:trivet_": "TrivetConnector"}
"""Which connector's counters are there; NixlPushConnector's are NixlConnector's, and canaries tell them apart."""


def _of_metrics(text: str) -> Mapping[str, Any]:
    """``vllm:cache_config_info`` has vLLM's ``CacheConfig`` as labels, a line for each data-parallel rank."""
    configs: list[Mapping[str, str]] = []
    connector = None
    try:
        for family in text_string_to_metric_families(text):
            if family.name == "vllm:cache_config_info":
                configs += [sample.labels for sample in family.samples]
            connector = connector or next(
                (one for start, one in _COUNTED.items() if family.name.startswith(start)), None
            )
    except ValueError:
        return {}
    if not configs:
        return {"connector": connector}
    labels = {name: value for name, value in configs[0].items() if value != "None"}
    block, window = labels.get("block_size", ""), labels.get("sliding_window", "")
    return {
        "connector": connector,
        "block_tokens": int(block) if block.isdigit() else None,
        "kv_dtype": labels.get("cache_dtype"),
        "kv_dtype_flag": labels.get("cache_dtype"),
        "kv_layout": labels.get("kv_cache_layout"),
        "prefix_caching": {"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
        "hash_algorithm": labels.get("prefix_caching_hash_algo"),
        "sliding_window": int(window) if window.isdigit() else None,
        "data_parallel": len(configs),
    }


def _of_server_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """``/server_info``, which a vLLM with ``VLLM_SERVER_DEV_MODE=1`` answers: its ``VllmConfig`` as JSON."""
    config = info.get("vllm_config")
    if not isinstance(config, dict):
        return {}

    def part(name: str) -> Mapping[str, Any]:
        found = config.get(name)
        return found if isinstance(found, dict) else {}

    model, cache, parallel = part("model_config"), part("cache_config"), part("parallel_config")
    scheduler, kv, speculative = part("scheduler_config"), part("kv_transfer_config"), part("speculative_config")
    dtype = str(model["dtype"]).removeprefix("torch.") if model.get("dtype") else None
    kv_dtype = cache.get("cache_dtype")
    draft = speculative.get("draft_model_config")
    said = {
        "method": speculative.get("method"),
        "tokens": speculative.get("num_speculative_tokens"),
        "model": draft.get("model") if isinstance(draft, dict) else None,
        "kv_dtype": speculative.get("kv_cache_dtype"),
    }
    said = {name: value for name, value in said.items() if value is not None}
    facts = {
        "connector": kv.get("kv_connector") or "",
        "kv_role": kv.get("kv_role") or "",
        "connector_options": kv.get("kv_connector_extra_config"),
        "load_failure_policy": kv.get("kv_load_failure_policy") or "",
        "kv_buffer_device": kv.get("kv_buffer_device"),
        "permutes_kv": kv.get("enable_permute_local_kv"),
        "engine_id": kv.get("engine_id"),
        "block_tokens": cache.get("block_size"),
        "dtype": dtype,
        "kv_dtype": dtype if kv_dtype == "auto" and dtype else kv_dtype,
        "kv_dtype_flag": kv_dtype,
        "kv_layout": cache.get("kv_cache_layout"),
        "tensor_parallel": parallel.get("tensor_parallel_size"),
        "pipeline_parallel": parallel.get("pipeline_parallel_size"),
        "data_parallel": parallel.get("data_parallel_size"),
        "decode_context_parallel": parallel.get("decode_context_parallel_size"),
        "prefill_context_parallel": parallel.get("prefill_context_parallel_size"),
        "model": model.get("model"),
        "revision": model.get("revision") or "",
        "tokenizer": model.get("tokenizer"),
        "max_length_tokens": model.get("max_model_len"),
        "quantization": model.get("quantization") or "",
        "load_format": part("load_config").get("load_format"),
        "speculative": json.dumps(said, sort_keys=True) if said else "",
        "prefix_caching": cache.get("enable_prefix_caching"),
        "hash_algorithm": cache.get("prefix_caching_hash_algo"),
        "batched_tokens": scheduler.get("max_num_batched_tokens"),
        "chunked_prefill": scheduler.get("enable_chunked_prefill"),
        "hybrid_manager": None
        if scheduler.get("disable_hybrid_kv_cache_manager") is None
        else not scheduler["disable_hybrid_kv_cache_manager"],
        "device": part("device_config").get("device_type"),
    }
    return {name: value for name, value in facts.items() if value is not None}


async def _json(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout = _SHORT_TIMEOUT,
) -> dict[str, Any] | None:
    text = await _text(session, url, headers, timeout)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def _text(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout = _SHORT_TIMEOUT,
) -> str | None:
    try:
        async with session.get(url, headers=headers, timeout=timeout) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
        return None


_KINDS = dict(_kinds())
