"""Seeded Llama checkpoints for benchmarks. Engines that load the same one compute the same function of their KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama. KV heads and their size are Llama-3.1-8B's unless told otherwise."""

    layers: int = 4
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 49152
    longest: int = 131072

    @property
    def feed_forward(self) -> int:
        return 2 * self.hidden

    @classmethod
    def tiny(cls) -> Shape:
        return cls(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32)


def write_checkpoint(folder: Path, shape: Shape, *, tokenizer: Path | None, seed: int = 1, std: float = 0.02) -> Path:
    """Writes a model folder: normal weights of deviation ``std`` in bfloat16, norms 1.

    Args:
        tokenizer: a model folder whose tokenizer is copied; None makes that of the demo's model.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(_tensors(shape, seed, std)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    if tokenizer is None:
        from trivet.demo.model import demo_gguf_fields, write_tokenizer

        write_tokenizer(demo_gguf_fields(), folder)
    else:
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    return folder


def _tensors(shape: Shape, seed: int, std: float) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    draw = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) * std).to(torch.bfloat16)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.feed_forward, shape.hidden),
        "mlp.up_proj": (shape.feed_forward, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.feed_forward),
    }
    yield "model.embed_tokens.weight", weight(shape.vocabulary, shape.hidden)
    yield "lm_head.weight", weight(shape.vocabulary, shape.hidden)
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)
    for layer in range(shape.layers):
        for name, (rows, columns) in sizes.items():
            yield f"model.layers.{layer}.{name}.weight", weight(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": shape.longest,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
    }
