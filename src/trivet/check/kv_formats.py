"""Bytes of what is cached in each of vLLM's KV cache formats, and which of them an engine takes.

Source: vLLM 0.32, ``config/cache.py`` (``CacheDType``), ``utils/torch_utils.py`` (what ``auto`` comes to), and
``customize_spec`` of the attention backends that pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.check.model_config import Config, text_parts
from trivet.errors import TrivetError

_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_SHORT = {"half": "float16", "float": "float32"}
_ONE_BYTE = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})
_DS_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a latent vector with its scales (vLLM: ``MLAAttention.get_kv_cache_spec``, ``flashmla_sparse.py``)."""
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Bits of an element of keys and of values; 8 are fp8."""
_NVFP4 = frozenset({"nvfp4", "nvfp4_4over6"})
_ULTRAQUANT = "ultraquant_4bit"
_PER_TOKEN_HEAD = frozenset({"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"})
KV_CACHE_DTYPES = (
    frozenset({"auto", "float16", "bfloat16", _ULTRAQUANT})
    | _ONE_BYTE
    | _PER_TOKEN_HEAD
    | _NVFP4
    | _DS_MLA.keys()
    | _TURBOQUANT.keys()
)
"""vLLM's ``--kv-cache-dtype`` (``config/cache.py``, ``CacheDType``)."""


def is_one_byte(dtype: str) -> bool:
    """Whether an element takes a byte, with one scale for the whole tensor, which does not move."""
    return dtype in _ONE_BYTE


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a model's own dtype.

    Raises:
        TrivetError: vLLM has no such dtype.
    """
    if dtype not in _BYTES:
        raise TrivetError(f"{dtype!r} is no dtype of vLLM", mend=f"give one of auto, {', '.join(_BYTES)}")
    return _BYTES[dtype]


def latent_bytes(size: int, kept_in: str, dtype: str) -> int:
    """One token's latent vector (MLA) of so many elements.

    Args:
        size: elements.
        kept_in: KV cache dtype; ``auto`` is the model's.
        dtype: the model's.

    Raises:
        TrivetError: vLLM has no latent attention in this format.
    """
    if kept_in in _DS_MLA:
        return _DS_MLA[kept_in]
    if kept_in in _ONE_BYTE:
        return size
    if kept_in in ("auto", "float16", "bfloat16"):
        return size * element_bytes(dtype if kept_in == "auto" else kept_in)
    raise TrivetError(
        f"vLLM has no latent attention (MLA) in {kept_in}",
        mend=f"give one of auto, bfloat16, fp8, {', '.join(_DS_MLA)}",
    )


def head_bytes(key: int, value: int, kept_in: str, dtype: str) -> int:
    """One token's key and value in one head, with what the format keeps beside them.

    Args:
        key: elements of a key.
        value: elements of a value.
        kept_in: KV cache dtype; ``auto`` is the model's.
        dtype: the model's.

    Raises:
        TrivetError: the format is not for heads.
    """
    if kept_in in ("auto", "float16", "bfloat16"):
        return (key + value) * element_bytes(dtype if kept_in == "auto" else kept_in)
    if kept_in in _ONE_BYTE:
        return key + value
    if kept_in in _PER_TOKEN_HEAD:  # a float32 scale for each; triton_attn.py
        packed = 2 if kept_in.startswith("int4") else 1
        return key // packed + value // packed + 2 * 4
    if kept_in in _NVFP4:  # torch_utils.py, nvfp4_kv_cache_full_dim: a scale for each 16
        return sum(size // 2 + size // 16 for size in (key, value))
    if kept_in == _ULTRAQUANT:  # ultraquant/format.py, slot_size: a scale for each 32
        return 2 * (key // 2 + key // 32)
    if kept_in in _TURBOQUANT:  # turboquant/config.py, slot_size_aligned
        key_bits, value_bits = _TURBOQUANT[kept_in]
        packed_key = key if key_bits == 8 else -(-key * key_bits // 8) + 2
        slot = packed_key + -(-key * value_bits // 8) + 4
        return slot + slot % 2
    raise TrivetError(f"{kept_in} is for latent attention (MLA) alone", mend="give --kv-cache-dtype auto or fp8")


def model_dtype(config: Config, given: str, notes: list[str]) -> str:
    """The model's dtype: as given, else as the config says (vLLM loads float32 as bfloat16).

    Raises:
        TrivetError: vLLM has no such dtype.
    """
    if given != "auto":
        element_bytes(given)
        return _SHORT.get(given, given)
    parts = [*text_parts(config), *(part for part in config.values() if isinstance(part, Mapping))]
    said = next((str(value) for part in parts for name in ("dtype", "torch_dtype") if (value := part.get(name))), None)
    if said is None:
        notes.append("the config has no dtype: taken as bfloat16; vLLM looks into the weights")
        return "bfloat16"
    said = _SHORT.get(said.removeprefix("torch."), said.removeprefix("torch."))
    if said == "float32":
        notes.append("the config says float32, which vLLM loads as bfloat16 unless --dtype says otherwise")
        return "bfloat16"
    element_bytes(said)
    return said


def cache_dtype(config: Config, given: str, notes: list[str]) -> str:
    """The KV cache's dtype: as given; ``auto`` is what a quantized checkpoint says, else it stays (the model's).

    Raises:
        TrivetError: vLLM has no such format.
    """
    if given not in KV_CACHE_DTYPES:
        raise TrivetError(
            f"{given!r} is no KV cache dtype of vLLM", mend=f"give one of {', '.join(sorted(KV_CACHE_DTYPES))}"
        )
    if given == "auto" and (said := _of_checkpoint(config)) is not None:
        notes.append(f"KV cache dtype {said}: the checkpoint's quantization says so")
        return said
    return given


def _of_checkpoint(config: Config) -> str | None:
    """vLLM's ``get_kv_cache_quant_algo_string``, and compressed-tensors' ``kv_cache_scheme`` (``Attention``)."""
    quantizations = (part.get("quantization_config") for part in text_parts(config))
    quantization = next((one for one in quantizations if isinstance(one, Mapping)), None)
    if quantization is None:
        return None
    inner = quantization.get("quantization")
    fields = [inner, quantization] if isinstance(inner, Mapping) else [quantization]
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        for field in fields:
            if said := field.get(name):
                return _in_words(said)
    return None


def _in_words(scheme: Any) -> str | None:
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
        return "fp8" if bits == 8 else "nvfp4" if bits == 4 else None
    words = str(scheme).lower()
    return words if words in ("fp8", "nvfp4") else None
