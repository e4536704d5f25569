"""Tiny vision models with random weights, and images for them.

Vision models whose modules vLLM can import without torchvision are few, and its CPU build brings none. Of those:

- PaddleOCR-VL: an image has as many tokens as its size gives, each of which stands for one embedding, and positions are
  counted in three directions (M-RoPE). With weights;
- Idefics3: an image is marked out by tokens of text, within its placeholder. Without weights: it only renders.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from helpers.tokenizer import demo_fields
from trivet.demo.model import write_tokenizer

NAMES = {
    9: "<|IMAGE_START|>",
    10: "<|IMAGE_END|>",
    11: "<row_1_col_1>",
    12: "<image>",
    13: "<fake_token_around_image>",
    14: "<global-img>",
}
"""Of the tokenizer's unused special tokens."""
IMAGE_ID = 12
PATCH, MERGED = 14, 2
SIDE = 112
"""Pixels of a side of an image, unless a test wants another: 16 tokens."""
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 128, 3, 4, 2, 32, 256, 49152
TOWER_HIDDEN, TOWER_LAYERS, TOWER_HEADS, TOWER_FEED_FORWARD, TOWER_SIDE = 64, 2, 2, 128, 8

TEXT = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
PADDLE = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "model_type": "paddleocr_vl",
    "image_token_id": IMAGE_ID,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "text_config": {
        **TEXT,
        "model_type": "paddleocr_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "use_bias": False,
    },
    "vision_config": {
        "model_type": "paddleocr_vl_vision",
        "hidden_size": TOWER_HIDDEN,
        "image_size": TOWER_SIDE * PATCH,
        "intermediate_size": TOWER_FEED_FORWARD,
        "num_attention_heads": TOWER_HEADS,
        "num_hidden_layers": TOWER_LAYERS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
    },
}
PADDLE_PIXELS = {
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "processor_class": "PaddleOCRVLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 1,
    "merge_size": MERGED,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 448 * 448},
}
IDEFICS = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": IMAGE_ID,
    "scale_factor": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "text_config": {**TEXT, "model_type": "llama", "rope_theta": 10000.0},
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": TOWER_HIDDEN,
        "image_size": TOWER_SIDE * PATCH,
        "intermediate_size": TOWER_FEED_FORWARD,
        "num_attention_heads": TOWER_HEADS,
        "num_hidden_layers": TOWER_LAYERS,
        "patch_size": PATCH,
    },
}
IDEFICS_PIXELS = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "do_image_splitting": False,
    "max_image_size": {"longest_edge": TOWER_SIDE * PATCH},
    "size": {"longest_edge": TOWER_SIDE * PATCH},
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_vision_model(folder: Path, *, weights: bool = True) -> Path:
    """A PaddleOCR-VL that vLLM loads; without weights one that only renders."""
    _write_renderer(folder, PADDLE, PADDLE_PIXELS)
    if weights:
        from safetensors.numpy import save_file

        save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_marking_model(folder: Path) -> Path:
    """An Idefics3 that only renders."""
    _write_renderer(folder, IDEFICS, IDEFICS_PIXELS)
    _write(folder / "processor_config.json", {"image_seq_len": (TOWER_SIDE // 2) ** 2})
    return folder


def image(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """Coarse noise: images of unlike seeds are unlike in every patch."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)


def tokens_of(width: int = SIDE, height: int = SIDE) -> int:
    """Of an image to PaddleOCR-VL; sides are multiples of 28 pixels."""
    return (width // PATCH // MERGED) * (height // PATCH // MERGED)


def data_url(picture: Image.Image) -> str:
    """An image within a request."""
    out = io.BytesIO()
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def part(seed: int, width: int = SIDE, height: int = SIDE) -> dict[str, Any]:
    """An image as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(image(seed, width, height))}}


def words(text: str) -> dict[str, Any]:
    """Text as a part of a chat message."""
    return {"type": "text", "text": text}


def asking(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat with one turn."""
    return [{"role": "user", "content": list(parts)}]


def _write_renderer(folder: Path, config: dict[str, Any], pixels: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(demo_fields(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if name := NAMES.get(token["id"]):
            tokenizer["model"]["vocab"].pop(token["content"])
            tokenizer["model"]["vocab"][name] = token["id"]
            token["content"] = name
    _write(folder / "tokenizer.json", tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write(folder / "tokenizer_config.json", settings | {"extra_special_tokens": {"image_token": NAMES[IMAGE_ID]}})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write(folder / "config.json", config)
    _write(folder / "preprocessor_config.json", pixels)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False))


def _weights(seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def weight(*shape: int, scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    def zeros(size: int) -> np.ndarray:
        return np.zeros(size, dtype=np.float32)

    merged = TOWER_HIDDEN * MERGED**2
    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN, scale=0.3),
        "mlp_AR.pre_norm.weight": ones(TOWER_HIDDEN),
        "mlp_AR.pre_norm.bias": zeros(TOWER_HIDDEN),
        "mlp_AR.linear_1.weight": weight(merged, merged, scale=0.1),
        "mlp_AR.linear_1.bias": zeros(merged),
        "mlp_AR.linear_2.weight": weight(HIDDEN, merged, scale=0.1),
        "mlp_AR.linear_2.bias": zeros(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
            # sharp attention over strong values: a wrong block, or another image, moves the greedy token
            f"{prefix}.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN, scale=0.3),
            f"{prefix}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.3),
            f"{prefix}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.3),
            f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM, scale=0.07),
            f"{prefix}.mlp.gate_proj.weight": weight(FEED_FORWARD, HIDDEN, scale=0.1),
            f"{prefix}.mlp.up_proj.weight": weight(FEED_FORWARD, HIDDEN, scale=0.1),
            f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, FEED_FORWARD, scale=0.1),
        }
    tower = "visual.vision_model"
    tensors |= {
        f"{tower}.embeddings.patch_embedding.weight": weight(TOWER_HIDDEN, 3, PATCH, PATCH, scale=0.1),
        f"{tower}.embeddings.patch_embedding.bias": zeros(TOWER_HIDDEN),
        f"{tower}.embeddings.position_embedding.weight": weight(TOWER_SIDE**2, TOWER_HIDDEN, scale=0.5),
        f"{tower}.post_layernorm.weight": ones(TOWER_HIDDEN),
        f"{tower}.post_layernorm.bias": zeros(TOWER_HIDDEN),
    }
    for layer in range(TOWER_LAYERS):
        prefix = f"{tower}.encoder.layers.{layer}"
        for name in ("layer_norm1", "layer_norm2"):
            tensors |= {f"{prefix}.{name}.weight": ones(TOWER_HIDDEN), f"{prefix}.{name}.bias": zeros(TOWER_HIDDEN)}
        for name, rows, columns in (
            *((f"self_attn.{one}_proj", TOWER_HIDDEN, TOWER_HIDDEN) for one in ("q", "k", "v", "out")),
            ("mlp.fc1", TOWER_FEED_FORWARD, TOWER_HIDDEN),
            ("mlp.fc2", TOWER_HIDDEN, TOWER_FEED_FORWARD),
        ):
            tensors[f"{prefix}.{name}.weight"] = weight(rows, columns, scale=0.2)
            tensors[f"{prefix}.{name}.bias"] = zeros(rows)
    return tensors
