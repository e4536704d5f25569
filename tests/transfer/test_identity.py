from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from trivet.transfer.identity import difference, host, identity, refusal

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


def config(**changes):
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1}
    model = {"model": "/models/one/", "dtype": torch.bfloat16, "hf": {"layers": 2}}
    cache = {"cache_dtype": "auto", "block_size": 16}
    other = {"speculative_config": None, "device": "cpu"}
    for name, value in changes.items():
        next(part for part in (parallel, model, cache, other, parallel) if name in part or part is parallel)
        target = next((part for part in (model, cache, other) if name in part), parallel)
        target[name] = value
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            model=model["model"], dtype=model["dtype"], hf_config=SimpleNamespace(to_diff_dict=lambda: model["hf"])
        ),
        cache_config=SimpleNamespace(**cache),
        device_config=SimpleNamespace(device_type=other["device"]),
        speculative_config=other["speculative_config"],
    )


def caches(*specs, layout="LBNHC", **of_group):
    groups = [
        SimpleNamespace(layer_names=[f"model.layers.{index}.attn"], kv_cache_spec=spec, **of_group)
        for index, spec in enumerate(specs)
    ]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_layout=layout)


# difference


def test_equal_engines_differ_in_nothing():
    assert difference(identity(config(), caches(FULL)), identity(config(), caches(FULL))) is None


def test_an_identity_survives_the_link():
    from trivet.transfer.messages import Hello, decode, encode

    own = identity(config(), caches(FULL))
    assert decode(encode(Hello(1, "e", own))).identity == own


def test_where_the_models_path_ends_in_a_slash_does_not_matter():
    assert difference(identity(config(), caches(FULL)), identity(config(model="/models/one"), caches(FULL))) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "/models/two"}, "model: /models/one and /models/two"),
        ({"dtype": torch.float16}, "dtype: torch.bfloat16 and torch.float16"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype: auto and fp8"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: 1 and 2"),
        ({"block_size": 32}, "--block-size: 16 and 32"),
        ({"device": "cuda"}, "device type: cpu and cuda"),
        ({"hf": {"layers": 3}}, "model config: "),
    ],
)
def test_a_difference_names_the_field_and_both_values(change, said):
    told = difference(identity(config(), caches(FULL)), identity(config(**change), caches(FULL)))
    assert f"differ in {said}" in told
    assert told.endswith("start both alike")
    assert "\n" not in told


def test_a_difference_of_layout_names_both():
    told = difference(identity(config(), caches(FULL)), identity(config(), caches(FULL, layout="BLHNC")))
    assert "KV cache layout: LBNHC and BLHNC" in told


@pytest.mark.parametrize(
    "other", [caches(FULL, FULL), caches(FullAttentionSpec(**{**SHAPE, "num_kv_heads": 4})), caches()]
)
def test_a_difference_of_groups_is_told_shortly(other):
    told = difference(identity(config(), caches(FULL)), identity(config(), other))
    assert "KV cache groups" in told
    assert len(told) < 400


def test_another_version_of_vllm_or_another_machine_is_told(monkeypatch):
    own = identity(config(), caches(FULL))
    assert "vLLM version" in difference(own, {**own, "vllm": "0.1"})
    assert f"host: {host()} and elsewhere 1" in difference(own, {**own, "host": "elsewhere 1"})
    assert own["vllm"] == vllm.__version__


def test_a_field_that_only_one_side_has_is_a_difference():
    own = identity(config(), caches(FULL))
    assert "differ in more: None and 1" in difference(own, {**own, "more": 1})
    assert "differ in more: 1 and None" in difference({**own, "more": 1}, own)


def test_the_order_of_layers_in_a_group_does_not_matter():
    own, other = caches(FULL), caches(FULL)
    own.kv_cache_groups[0].layer_names = ["a", "b"]
    other.kv_cache_groups[0].layer_names = ["b", "a"]
    assert difference(identity(config(), own), identity(config(), other)) is None


# refusal


@pytest.mark.parametrize(
    "specs",
    [
        (FULL,),
        (FULL, SlidingWindowSpec(**SHAPE, sliding_window=64)),
        (MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1}),),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL}),),
        (),
    ],
)
def test_attention_of_every_kind_is_moved(specs):
    assert refusal(config(), caches(*specs)) is None


def test_a_side_without_caches_is_not_refused():
    assert refusal(config(), None) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"speculative_config": object()}, "speculative decoding"),
    ],
)
def test_what_is_not_moved_is_refused_by_name(change, said):
    told = refusal(config(**change), caches(FULL))
    assert said in told
    assert "\n" not in told


class _Other(KVCacheSpec):
    """A cache of a kind that this version does not know."""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (MAMBA, "state-space layers"),
        (CrossAttentionSpec(**SHAPE), "encoder layers"),
        (EncoderOnlyAttentionSpec(**SHAPE), "encoder layers"),
        (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": MAMBA}), "state-space layers"),
        (object.__new__(_Other), "_Other"),
    ],
)
def test_layers_without_blocks_of_attention_are_refused_with_a_layers_name(spec, said):
    told = refusal(config(), caches(FULL, spec))
    assert said in told
    assert "model.layers.1.attn" in told


def test_kv_in_host_memory_is_refused():
    assert "host memory" in refusal(config(), caches(FULL, host_resident=True))


def test_groups_are_as_vllm_makes_them():
    group = KVCacheGroupSpec(["model.layers.0.attn"], FULL)
    own = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBNHC")
    assert refusal(config(), own) is None
    (words,) = identity(config(), own)["groups"]
    assert words.startswith(f"FullAttentionSpec of 16 tokens in {FULL.page_size_bytes} bytes, 1 layers ")


def test_a_machine_has_one_name_until_it_boots_again():
    assert host() == host()
    assert len(host().split()) == 2
