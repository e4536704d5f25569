"""vLLM's own word on what models cache: builds them without weights (on torch's meta device) and asks each layer.

Run as a program of its own, as vLLM's process groups are a process's: one JSON object a line in, with ``config`` and
optionally ``tp`` and ``kv_cache_dtype``; one a line out, with what vLLM makes of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
"""The least that attention on the CPU takes."""

_MARK = "vLLM says "

Json = dict[str, Any]


def told(requests: Sequence[Json], timeout_s: float = 280) -> list[Json]:
    """What vLLM says to each: ``layers``, ``block_tokens`` and ``groups``, or ``error``."""
    done = subprocess.run(
        [sys.executable, __file__],
        input="".join(json.dumps(one) + "\n" for one in requests),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = [json.loads(line.removeprefix(_MARK)) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert len(answers) == len(requests), done.stdout[-4000:]
    return answers


def _answer(lines: Iterable[str]) -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    registry._run_in_subprocess = lambda look: look()  # it starts a process for each class of model
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        store = f"file://{folder}/store"
        init_distributed_environment(1, 0, store, 0, backend="gloo")
        initialize_model_parallel(1, 1)
        for number, line in enumerate(lines):
            home = Path(folder, str(number))
            home.mkdir()
            try:
                answer = _ask(home, json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(_MARK + json.dumps(answer), flush=True)


def _ask(home: Path, request: Json) -> Json:
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    (home / "config.json").write_text(json.dumps(request["config"]))
    config = EngineArgs(
        model=str(home),
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        max_model_len=1024,
        block_size=128,  # what the CPU takes
        kv_cache_dtype=request.get("kv_cache_dtype", "auto"),
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp = request.get("tp", 1)
    config.cache_config.block_size = BLOCK_TOKENS
    if request["config"]["model_type"] != "nemotron_h":
        config.cache_config.mamba_ssm_cache_dtype = "auto"  # the CPU makes float32 of it
    get_tp_group().world_size = tp
    with set_current_vllm_config(config):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config=config, model_config=config.model_config)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        own = {
            name: layer
            for name, layer in layers.items()
            if getattr(layer, "kv_sharing_target_layer_name", None) is None
        }
        config.cache_config.mamba_block_size = BLOCK_TOKENS
        block_tokens = _aligned(config)
        config.cache_config.block_size = BLOCK_TOKENS
        config.cache_config.mamba_page_size_padded = None
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in own.items()}
        told = [_layer(spec) for spec in specs.values()]
        config.cache_config.block_size = block_tokens
        config.cache_config.mamba_block_size = block_tokens
        _aligned(config)
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in own.items()}
        config.cache_config.kv_cache_layout = "LBNHC"
        groups = [_group(one) for one in get_kv_cache_groups(config, specs)]
    return {"layers": told, "block_tokens": block_tokens, "groups": groups}


def _group(group: Any) -> Json:
    spec = group.kv_cache_spec
    return {
        "spec": type(spec).__name__,
        "layers": len(group.layer_names),
        "block_tokens": spec.block_size,
        "block_bytes": spec.page_size_bytes,
    }


def _aligned(config: Any) -> int:
    """Tokens of a block after vLLM has made it hold a state, on a backend that takes 16 tokens and their multiples."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import MultipleOf

    class Backend:
        @staticmethod
        def get_supported_kernel_block_sizes() -> list[MultipleOf]:
            return [MultipleOf(16)]

        @staticmethod
        def customize_spec(spec: Any) -> Any:
            return spec

    class Platform(type(current_platform)):
        @classmethod
        def _find_non_ssm_backends(cls, _: Any) -> list[type]:
            return [Backend]

    if config.model_config.is_hybrid:
        Platform._align_hybrid_block_size(config, Backend)
    return int(config.cache_config.block_size)


def _layer(spec: Any) -> Json:
    told: Json = {"spec": type(spec).__name__}
    if told["spec"] == "MambaSpec":
        return {**told, "state_bytes": spec.state_content_size_bytes}
    return {
        **told,
        "bytes_per_token": spec.page_size_bytes // spec.block_size,
        "heads": spec.num_kv_heads,
        "window": getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
    }


if __name__ == "__main__":
    _answer(sys.stdin)
