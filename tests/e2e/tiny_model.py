"""A tiny Llama with random weights and SmolLM2's tokenizer, whose answers depend on all of its KV.

Weights and seed were chosen so that spoiling one block changes the greedy answer to every prompt of these tests.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trivet.demo.model import demo_gguf_fields, write_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 128, 3, 4, 2, 32, 256, 49152
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def write_tiny_model(folder: Path, seed: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)

    def weight(rows: int, columns: int, scale: float) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
        "lm_head.weight": weight(VOCABULARY, HIDDEN, 0.3),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            # sharp attention over strong values, so that a wrong block moves the output and not only its last digits
            f"{prefix}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN, 0.3),
            f"{prefix}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, 0.3),
            f"{prefix}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, 0.3),
            f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM, 0.07),
            f"{prefix}.mlp.gate_proj.weight": weight(FEED_FORWARD, HIDDEN, 0.1),
            f"{prefix}.mlp.up_proj.weight": weight(FEED_FORWARD, HIDDEN, 0.1),
            f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, FEED_FORWARD, 0.1),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(demo_gguf_fields(), folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
