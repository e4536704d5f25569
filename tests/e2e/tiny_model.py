"""A tiny Llama with random weights and SmolLM2's tokenizer, whose answers depend on all of its KV.

Weights and seed were chosen so that spoiling one block changes the greedy answer to every prompt of these tests.

The tokenizer's unused special tokens 13 to 16 are the marks of tool calls and of reasoning, and its chat template
knows tools, so that vLLM's parsers have something to parse.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trivet.demo.model import demo_gguf_fields, write_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY = 128, 3, 4, 2, 32, 256, 49152
END = 2
"""The end-of-sequence token, ``<|im_end|>``."""
MARKS = {13: "<tool_call>", 14: "</tool_call>", 15: "<think>", 16: "</think>"}
WINDOWED_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
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
    _mark(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": END,
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


def write_windowed_model(folder: Path, family: str, window: int, seed: int = 1) -> Path:
    """A model of that family, with random weights, whose attention, or that of some layers, looks ``window`` back."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=len(WINDOWED_LAYERS),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        sliding_window=window,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        tie_word_embeddings=False,
        **({"layer_types": WINDOWED_LAYERS, "query_pre_attn_scalar": HEAD_DIM} if family == "gemma3_text" else {}),
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.08)
    model.save_pretrained(folder)
    write_tokenizer(demo_gguf_fields(), folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def _mark(path: Path) -> None:
    """Gives unused special tokens the names of the marks, as ordinary text that is not skipped."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in tokenizer["added_tokens"]:
        if name := MARKS.get(token["id"]):
            del vocabulary[token["content"]]
            vocabulary[name] = token["id"]
            token |= {"content": name, "special": False}
    path.write_text(json.dumps(tokenizer))


CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
{% endif -%}
{%- if tools -%}
<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- if reasoning_effort is defined and reasoning_effort -%}
<|im_start|>system
Effort: {{ reasoning_effort }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """A LoRA adapter with random weights, strong enough to change what is answered."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (rank, HIDDEN)), ("lora_B", (rows, rank))):
                weights = random.standard_normal(shape) * 0.3
                tensors[f"{name}.{part}.weight"] = weights.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
