"""What an engine tells of itself: vLLM's API server answers ``GET /trivet/engine`` with facts of its resolved config.

``vllm serve ... --middleware trivet.fleet.told.EngineFacts`` (vLLM's own flag, 0.30 and newer) puts it there; Trivet's
launcher does so for each engine it starts. ``trivet check`` compares the two engines of a pair by it. It is as open as
``/metrics``, so it tells no API key, nothing that looks like a secret, and of the environment only what transports
read. It runs in the API server's process: what a worker was given beyond that is not seen.

Imports neither vLLM nor torch: it reads what the process around it has made.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import platform
import re
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import trivet
from trivet.fleet.checkpoint import config_digest, digest, weights_digest

PATH = "/trivet/engine"
MIDDLEWARE = "trivet.fleet.told.EngineFacts"
"""The value of vLLM's flag ``--middleware``."""
FORMAT = 1
"""Of the answer. Raised when a fact means something else; a new fact raises nothing."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_SHOWN_PREFIXES = ("UCX_",)
_OPTIONS = frozenset(
    ("backends", "movers", "connectors", "kv_connector", "kv_role", "kv_load_failure_policy", "kv_buffer_device")
)
"""Of a connector's options, those whose texts are told; numbers are told of all."""
_SHOWN = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "NIXL_LOG_LEVEL",
        "NIXL_PLUGIN_DIR",
        "TRIVET_NIXL_PROGRESS_THREAD",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "NVIDIA_VISIBLE_DEVICES",
        "PYTHONHASHSEED",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_SSM_CONV_STATE_LAYOUT",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    }
)
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie|bearer", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@|(?<=\?)\S*")
"""What names a user in an URL, and its query."""
_LONGEST_TEXT = 500


class EngineFacts:
    """ASGI middleware. Other requests pass it by at the price of one comparison."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._facts: asyncio.Task[dict[str, Any]] | None = None

    def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> Awaitable[None]:
        """See ASGI."""
        path: str = scope.get("path", "")
        if not path.endswith(PATH) or scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return self._app(scope, receive, send)
        if path.removeprefix(scope.get("root_path", "")) != PATH:
            return self._app(scope, receive, send)
        return self._answer(scope, send)

    async def _answer(self, scope: _Scope, send: _Send) -> None:
        state = scope["app"].state
        config = getattr(state, "vllm_config", None)
        if config is None:
            await _send_json(send, 503, {"error": "the engine has no config yet"}, scope["method"])
            return
        if self._facts is None:
            self._facts = asyncio.create_task(asyncio.to_thread(facts_of, config, state))
        # one for all who ask: nothing in it changes while the engine serves
        await _send_json(send, 200, await asyncio.shield(self._facts), scope["method"])


async def _send_json(send: _Send, status: int, body: Mapping[str, Any], method: str) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else content})


def facts_of(config: Any, state: Any = None) -> dict[str, Any]:
    """The facts, as JSON has them. What a version of vLLM does not have is null; what an engine does without is ``""``.

    Takes up to some seconds: it reads samples of the checkpoint's files.

    Args:
        config: ``vllm.config.VllmConfig`` of an engine that serves, so that what the engine core has changed (block
            size, greatest length) is in it (``EngineCoreReadyResponse``).
        state: the application's state.
    """
    model, cache, parallel = (_of(config, f"{name}_config") for name in ("model", "cache", "parallel"))
    dtype = _name(_of(model, "dtype"))
    kv_dtype = _name(_of(cache, "cache_dtype"))
    folder = _folder_of(model, _of(config, "load_config.download_dir"))
    hybrid_off = _of(config, "scheduler_config.disable_hybrid_kv_cache_manager")
    overrides = _of(model, "hf_overrides")
    return {
        "format": FORMAT,
        "trivet": trivet.__version__,
        "vllm": _of(sys.modules.get("vllm"), "__version__"),
        **_connector_facts(_of(config, "kv_transfer_config")),
        "block_tokens": _of(cache, "block_size"),
        "dtype": dtype,
        "kv_dtype": dtype if kv_dtype == "auto" else kv_dtype,
        "kv_dtype_flag": kv_dtype,
        "kv_layout": _name(_of(cache, "kv_cache_layout")) or os.environ.get("VLLM_KV_CACHE_LAYOUT"),
        "tensor_parallel": _of(parallel, "tensor_parallel_size"),
        "pipeline_parallel": _of(parallel, "pipeline_parallel_size"),
        "data_parallel": _of(parallel, "data_parallel_size"),
        "decode_context_parallel": _of(parallel, "decode_context_parallel_size"),
        "prefill_context_parallel": _of(parallel, "prefill_context_parallel_size"),
        "model": _text(_of(model, "model")),
        "revision": _of(model, "revision") or "",
        "config_digest": config_digest(folder) if folder else None,
        "weights_digest": weights_digest(folder) if folder else None,
        "overrides_digest": digest(overrides) if overrides and isinstance(overrides, Mapping) else "",
        "load_format": _name(_of(config, "load_config.load_format")),
        "served_names": _served_names(_of(state, "args")),
        "max_length_tokens": _of(model, "max_model_len"),
        "tokenizer": _text(_of(model, "tokenizer")),
        "tokenizer_tokens": _tokenizer_tokens(state),
        "vocabulary_tokens": _called(model, "get_vocab_size"),
        "layers": _called(model, "get_total_num_hidden_layers"),
        "kv_heads": _called(model, "get_total_num_kv_heads"),
        "head_size": _called(model, "get_head_size"),
        "is_mla": _of(model, "use_mla"),
        "sliding_window": _called(model, "get_sliding_window") or 0,
        "has_state_layers": _of(model, "is_hybrid"),
        "hybrid_manager": None if hybrid_off is None else not hybrid_off,
        "attention_backend": _name(_of(config, "attention_config.backend")),
        "speculative": _speculative(_of(config, "speculative_config")),
        "quantization": _name(_of(model, "quantization")) or "",
        "prefix_caching": _of(cache, "enable_prefix_caching"),
        "hash_algorithm": _name(_of(cache, "prefix_caching_hash_algo")),
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "batched_tokens": _of(config, "scheduler_config.max_num_batched_tokens"),
        "chunked_prefill": _of(config, "scheduler_config.enable_chunked_prefill"),
        "device": _of(config, "device_config.device_type"),
        **_machine_facts(),
    }


def _of(thing: Any, path: str) -> Any:
    """An attribute of an attribute; None where one is missing."""
    for name in path.split("."):
        try:
            thing = getattr(thing, name, None)
        except Exception:  # a property of a config that is not for this model
            return None
    return thing


def _called(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name)()
    except Exception:  # asked for what this model, or this vLLM, has not
        return None


def _name(value: Any) -> str | None:
    """An enum's, a dtype's or a text's name."""
    if value is None:
        return None
    return str(getattr(value, "name", None) or value).removeprefix("torch.")


def _text(value: Any) -> str | None:
    return None if value is None else _IN_URL.sub("", str(value))[:_LONGEST_TEXT]


def _connector_facts(kv: Any) -> dict[str, Any]:
    name = _of(kv, "kv_connector")
    if not name:
        return {"connector": "", "kv_role": "", "connector_options": {}, "load_failure_policy": ""}
    return {
        "connector": name,
        "kv_role": _of(kv, "kv_role"),
        "connector_options": _without_secrets(_of(kv, "kv_connector_extra_config") or {}),
        "load_failure_policy": _of(kv, "kv_load_failure_policy"),
        "kv_buffer_device": _of(kv, "kv_buffer_device"),
        "permutes_kv": _of(kv, "enable_permute_local_kv"),
        "engine_id": _of(kv, "engine_id"),
    }


def _without_secrets(value: Any) -> Any:
    match value:
        case Mapping():
            return {
                str(name): _without_secrets(one)
                for name, one in value.items()
                if isinstance(one, bool | int | float) or (name in _OPTIONS and not _is_secret(str(name), one))
            }
        case list() | tuple():
            return [_without_secrets(one) for one in value]
        case None | bool() | int() | float():
            return value
        case _:
            return _text(value)


def _is_secret(name: str, value: Any) -> bool:
    """Numbers are none, whatever they are called (``kv_recompute_tokens``)."""
    return bool(_SECRET.search(name)) and not isinstance(value, bool | int | float)


def _served_names(args: Any) -> list[str] | None:
    names = _of(args, "served_model_name") or _of(args, "model")
    if isinstance(names, str):
        return [names]
    return [str(one) for one in names] if isinstance(names, list | tuple) else None


def _tokenizer_tokens(state: Any) -> int | None:
    """Entries of the tokenizer, added ones too."""
    tokenizer = _of(state, "engine_client.renderer.tokenizer") or _of(state, "online_renderer.renderer.tokenizer")
    try:
        return len(tokenizer)
    except Exception:  # there is none, or one of another kind
        return None


def _speculative(config: Any) -> str:
    """What speculates, as sorted JSON; empty if nothing does."""
    if config is None:
        return ""
    told = {
        "method": _name(_of(config, "method")),
        "tokens": _of(config, "num_speculative_tokens"),
        "model": _text(_of(config, "draft_model_config.model")),
        "kv_dtype": _name(_of(config, "kv_cache_dtype")),
    }
    return json.dumps({name: value for name, value in told.items() if value is not None}, sort_keys=True, default=str)


def _folder_of(model: Any, cache: Any) -> Path | None:
    """Where the checkpoint's files are: a folder, or what the hub's cache has of that revision."""
    name, revision = _of(model, "model"), _of(model, "revision")
    if not isinstance(name, str):
        return None
    with contextlib.suppress(Exception):  # no hub here, or a name that is none
        if (folder := Path(name)).is_dir():
            return folder
        cached = importlib.import_module("huggingface_hub").try_to_load_from_cache(
            name, "config.json", cache_dir=cache, revision=revision
        )
        return Path(cached).parent if isinstance(cached, str) else None
    return None


def _machine_facts() -> dict[str, Any]:
    """Of the machine as this engine sees it, which in a container is not how its host does."""
    return {
        "host": platform.node(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "namespaces": dict(namespaces()),
        "environment": dict(_environment(os.environ)),
        "gpus": list(_gpus()),
        "cores": sorted(os.sched_getaffinity(0)),
        "numa": list(_numa_of(os.sched_getaffinity(0))),
        "locked_memory_bytes": _locked_memory_bytes(),
        "shm_bytes": _shm_bytes(),
    }


def _environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(environment.items()):
        if (name.startswith(_SHOWN_PREFIXES) or name in _SHOWN) and not _SECRET.search(name):
            yield name, _text(value) or ""


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def namespaces() -> Iterator[tuple[str, str]]:
    """Which of the kernel's namespaces it is in: processes of two containers reach each other's memory only so far."""
    for kind in ("ipc", "pid", "net"):
        with contextlib.suppress(OSError):
            yield kind, str(Path(f"/proc/self/ns/{kind}").readlink())


def _numa_of(cores: set[int]) -> Iterator[int]:
    for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        listed = _read(f"{node}/cpulist") or ""
        if not cores.isdisjoint(_cores_in(listed)):
            yield int(node.name.removeprefix("node"))


def _cores_in(listed: str) -> Iterator[int]:
    """Of ``0-3,8``."""
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _locked_memory_bytes() -> int | None:
    """How much memory may be pinned for RDMA; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _shm_bytes() -> int | None:
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return None
    return there.f_frsize * there.f_blocks


def _gpus() -> Iterator[dict[str, Any]]:
    """The GPUs that this process may use, in its order, asked of NVML, which touches none of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nvml = sys.modules.get("vllm.third_party.pynvml") or sys.modules.get("pynvml")
    if nvml is None:
        return
    with contextlib.suppress(Exception):  # no driver: no GPU
        nvml.nvmlInit()
        try:
            count = nvml.nvmlDeviceGetCount()
            chosen = [one.strip() for one in visible.split(",")] if visible is not None else map(str, range(count))
            for name in filter(None, chosen):
                by_number = name.isdigit()
                handle = (
                    nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
                )
                pci = _decoded(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
                numa = _read(f"/sys/bus/pci/devices/{pci[-12:]}/numa_node")
                yield {
                    "name": _decoded(nvml.nvmlDeviceGetName(handle)),
                    "uuid": _decoded(nvml.nvmlDeviceGetUUID(handle)),
                    "pci": pci,
                    "numa": int(numa) if numa and numa.isdigit() else None,
                }
        finally:
            nvml.nvmlShutdown()


def _decoded(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
