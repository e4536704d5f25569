"""Bytes of each KV cache format, compared with vLLM's."""

from typing import get_args

import pytest

from trivet.check import kv_formats
from trivet.check.kv_formats import cache_dtype, element_bytes, head_bytes, latent_bytes, model_dtype
from trivet.errors import TrivetError

LATENT_ONLY = {"fp8_ds_mla", "nvfp4_ds_mla"}
PACKED = sorted(kv_formats.KV_CACHE_DTYPES - LATENT_ONLY - {"auto"})


def test_the_formats_are_those_of_vllm():
    from vllm.config.cache import CacheDType

    assert set(get_args(CacheDType)) == kv_formats.KV_CACHE_DTYPES


def of_vllm(key: int, value: int, kept_in: str) -> int:
    """Bytes of a token in one head, as the backend that takes a format has them."""
    import torch
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.attention.ops.ultraquant.format import slot_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    if kept_in.startswith("turboquant"):
        return TurboQuantConfig.from_cache_dtype(kept_in, key).slot_size_aligned
    if kept_in.startswith("ultraquant"):
        return slot_size(key)
    if kept_in.startswith("nvfp4"):
        return nvfp4_kv_cache_full_dim(key) + nvfp4_kv_cache_full_dim(value)
    dtype = torch.bfloat16 if kept_in == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kept_in]
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=key,
        head_size_v=value,
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode(kept_in),
    )
    return TritonAttentionBackend.customize_spec(spec).page_size_bytes // 16


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("kept_in", ["auto", *PACKED])
def test_a_head_takes_what_it_takes_in_vllm(kept_in, size):
    assert head_bytes(size, size, kept_in, "bfloat16") == of_vllm(size, size, kept_in)


def test_a_slot_of_turboquant_is_even():
    assert head_bytes(50, 50, "turboquant_k8v4", "bfloat16") == of_vllm(50, 50, "turboquant_k8v4") == 50 + 25 + 4 + 1


@pytest.mark.parametrize("kept_in", ["auto", "fp8", "int8_per_token_head", "nvfp4"])
def test_keys_and_values_of_unlike_sizes_are_added(kept_in):
    assert head_bytes(192, 128, kept_in, "bfloat16") == of_vllm(192, 128, kept_in)


@pytest.mark.parametrize(
    ("kept_in", "expected"),
    [("auto", 1152), ("bfloat16", 1152), ("fp8", 576), ("fp8_e4m3", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352)],
)
def test_a_latent_vector_takes_what_it_takes_in_vllm(kept_in, expected):
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16 if kept_in == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kept_in],
        cache_dtype_str=kept_in,
        state_content_bytes={"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(kept_in),  # MLAAttention.get_kv_cache_spec
    )
    assert latent_bytes(576, kept_in, "bfloat16") == spec.page_size_bytes // 64 == expected


def test_the_opaque_rows_are_those_that_vllm_packs():
    """512 in 8 bits, 4 scales of 4 bytes, 64 in 16 bits; 512 in 4 bits, 64 in 8, 32 scales of a byte."""
    from vllm.v1.hisparse.runtime import FP8_DS_MLA_ROW_BYTES

    assert latent_bytes(576, "fp8_ds_mla", "bfloat16") == 512 + 4 * 4 + 64 * 2 == FP8_DS_MLA_ROW_BYTES
    assert latent_bytes(576, "nvfp4_ds_mla", "bfloat16") == 512 // 2 + 64 + 512 // 16


@pytest.mark.parametrize("kept_in", LATENT_ONLY)
def test_rows_of_latents_hold_no_heads(kept_in):
    with pytest.raises(TrivetError, match="latent attention"):
        head_bytes(128, 128, kept_in, "bfloat16")


@pytest.mark.parametrize("kept_in", ["nvfp4", "turboquant_k8v4", "int8_per_token_head"])
def test_formats_of_heads_hold_no_latents(kept_in):
    with pytest.raises(TrivetError, match=kept_in):
        latent_bytes(576, kept_in, "bfloat16")


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 4), ("half", 2), ("float16", 2), ("bfloat16", 2)])
def test_a_model_dtype_has_its_bytes(dtype, expected):
    assert element_bytes(dtype) == expected
    assert head_bytes(64, 64, "auto", dtype) == latent_bytes(128, "auto", dtype) == 128 * expected


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16", "bfloat16"),
        ({"torch_dtype": "float16"}, "half", "float16"),
        ({"torch_dtype": "float16"}, "float", "float32"),
        ({"torch_dtype": "torch.float16"}, "auto", "float16"),
        ({"vision_config": {"dtype": "float32"}, "text_config": {"dtype": "float16"}}, "auto", "float16"),
        ({"vision_config": {"dtype": "float16"}, "text_config": {}}, "auto", "float16"),
    ],
)
def test_the_dtype_is_given_or_read(config, given, expected):
    notes = []
    assert (model_dtype(config, given, notes), notes) == (expected, [])


@pytest.mark.parametrize("config", [{}, {"torch_dtype": None}, {"torch_dtype": "float32"}, {"dtype": "torch.float32"}])
def test_a_dtype_that_is_not_certain_is_noted(config):
    notes = []
    assert model_dtype(config, "auto", notes) == "bfloat16"
    assert len(notes) == 1


@pytest.mark.parametrize("given", ["int8", "fp8", ""])
def test_a_dtype_that_vllm_has_not_is_refused(given):
    with pytest.raises(TrivetError, match="no dtype of vLLM"):
        model_dtype({}, given, [])
    with pytest.raises(TrivetError, match="no dtype of vLLM"):
        model_dtype({"torch_dtype": given or "fp8"}, "auto", [])


def scheme(**field):
    return {"quantization_config": {"quant_method": "modelopt", **field}}


EIGHT, FOUR = {"num_bits": 8, "type": "float", "dynamic": False}, {"num_bits": 4, "type": "float"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, None),
        (scheme(kv_cache_quant_algo="FP8"), "fp8"),
        (scheme(quantization={"kv_cache_quant_algo": "NVFP4"}), "nvfp4"),
        (scheme(kv_cache_scheme=EIGHT), "fp8"),
        (scheme(kv_cache_scheme=FOUR), "nvfp4"),
        (scheme(kv_cache_scheme={"num_bits": 8, "type": "int"}), None),
        (scheme(kv_cache_scheme={"num_bits": [8], "type": "float"}), None),
        (scheme(kv_cache_quant_algo="INT9"), None),
        ({"text_config": scheme(kv_cache_scheme=EIGHT)}, "fp8"),
    ],
)
def test_auto_is_what_a_quantized_checkpoint_says(config, expected):
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    notes = []
    assert cache_dtype(config, "auto", notes) == (expected or "auto")
    assert len(notes) == (expected is not None)
    assert cache_dtype(config, "bfloat16", []) == "bfloat16"
    quantization = config.get("text_config", config).get("quantization_config")
    if quantization and quantization["quant_method"] == "modelopt":
        theirs = get_kv_cache_quant_algo_string(quantization) or "auto"
        assert theirs.removesuffix("_e4m3") == (expected or "auto")


def test_a_format_that_vllm_has_not_is_refused():
    with pytest.raises(
        TrivetError, match=r"'int3' is no KV cache dtype of vLLM -> give one of auto, bfloat16, float16, fp8, "
    ):
        cache_dtype({}, "int3", [])
