import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from transformers import PretrainedConfig
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
from trivet.transfer.messages import PROTOCOL, Hello, decode, encode

SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


def config(**changes):
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1}
    model = {
        "model": "/models/one/",
        "dtype": torch.bfloat16,
        "hf": {"layers": 2},
        "revision": None,
        "quantization": None,
    }
    cache = {"cache_dtype": "auto", "block_size": 16, "calculate_kv_scales": False}
    other = {"speculative_config": None, "device": "cpu"}
    for name, value in changes.items():
        next(part for part in (parallel, model, cache, other, parallel) if name in part or part is parallel)
        target = next((part for part in (model, cache, other) if name in part), parallel)
        target[name] = value
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            **{name: value for name, value in model.items() if name != "hf"},
            hf_config=SimpleNamespace(to_diff_dict=lambda: model["hf"]),
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
    own = identity(config(), caches(FULL))
    assert decode(encode(Hello(PROTOCOL, "e", own))).identity == own


def test_where_the_models_path_ends_in_a_slash_does_not_matter():
    assert difference(identity(config(), caches(FULL)), identity(config(model="/models/one"), caches(FULL))) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "/models/two"}, "model: /models/one and /models/two"),
        ({"revision": "v2"}, "--revision: None and v2"),
        ({"quantization": "fp8"}, "--quantization: None and fp8"),
        ({"dtype": torch.float16}, "--dtype: bfloat16 and float16"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype: bfloat16 and fp8"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: 1 and 2"),
        ({"block_size": 32}, "--block-size: 16 and 32"),
        ({"device": "cuda"}, "device type: cpu and cuda"),
    ],
)
def test_a_difference_names_the_field_and_both_values(change, said):
    told = difference(identity(config(), caches(FULL)), identity(config(**change), caches(FULL)))
    assert told == f"prefill and decode differ in {said}; start both alike"


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ({"layers": 2}, {"layers": 3}, "layers): 2 and 3"),
        (
            {"rope": {"theta": 1e4, "type": "yarn"}},
            {"rope": {"theta": 1e6, "type": "yarn"}},
            "rope.theta): 10000.0 and",
        ),
        ({"a": {"b": {"c": [1, 2]}}}, {"a": {"b": {"c": [1, 3]}}}, "a.b.c): [1, 2] and [1, 3]"),
        ({}, {"sliding_window": 4096}, "sliding_window): None and 4096"),
        ({"many": {str(one): one for one in range(99)}}, {"many": {str(one): 0 for one in range(99)}}, "many): {"),
        ({"long": "x" * 5000}, {"long": "x" * 4999 + "y"}, "long): xxx"),
    ],
)
def test_a_difference_of_the_models_config_names_the_setting(own, other, said):
    facts = [identity(config(hf=one), caches(FULL)) for one in (own, other)]
    told = difference(*facts)
    assert told.startswith(f"prefill and decode differ in model config ({said}")
    assert told.endswith("; start both with the same model files and --hf-overrides")
    assert len(told) < 500
    assert [decode(encode(Hello(PROTOCOL, "e", one))).identity for one in facts] == facts


class Opaque:
    """Its text tells where it lies."""


SAYS_LETTERS = """
import sys
sys.path.insert(0, sys.argv[1])
from transfer.test_identity import Opaque, caches, config, FULL, identity
hf = {"letters": set("abcdefgh"), "pairs": {frozenset("xyz"), frozenset("uvw")}, "one": Opaque(),
      "some": [1, Opaque(), {"in": Opaque(), Opaque(): 1, 2: 3}], "type": type("x", (), {})}
print({name: fact for name, fact in identity(config(hf=hf), caches(FULL)).items() if name.startswith("config")})
"""


def test_a_config_says_the_same_in_every_process():
    """Sets have another order in each, and objects that are no JSON another address."""
    told = set()
    for seed in ("1", "2", "3"):
        words = [sys.executable, "-c", SAYS_LETTERS, str(Path(__file__).parents[1])]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        told.add(subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout)
    (facts,) = told
    assert ast.literal_eval(facts.splitlines()[-1]) == {
        "config.letters": json.dumps([*"abcdefgh"]),
        "config.pairs": json.dumps([[*"uvw"], [*"xyz"]]),
        "config.some": '[1, {"2": 3}]',
    }


class NeedsArguments(PretrainedConfig):
    """As a model's own code may have it."""

    model_type = "theirs"

    def __init__(self, width, **more):
        self.width = width
        super().__init__(**more)


def test_a_config_that_cannot_be_made_without_arguments_is_compared_as_well():
    facts = []
    for width in (8, 16):
        own = config()
        own.model_config.hf_config = NeedsArguments(width)
        with pytest.raises(TypeError):
            own.model_config.hf_config.to_diff_dict()
        facts.append(identity(own, caches(FULL)))
    assert "model config (width): 8 and 16" in difference(*facts)
    assert difference(facts[0], facts[0]) is None


@pytest.mark.parametrize("name", ["_name_or_path", "transformers_version"])
def test_what_a_config_says_of_its_file_is_not_compared(name):
    own, other = (identity(config(hf={"layers": 2, name: value}), caches(FULL)) for value in "ab")
    assert difference(own, other) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_dtype_that_is_the_models_may_be_said_or_left_out(dtype):
    said = identity(config(dtype=dtype, cache_dtype=str(dtype).removeprefix("torch.")), caches(FULL))
    assert difference(identity(config(dtype=dtype), caches(FULL)), said) is None


def spec(kind=FullAttentionSpec, **changes):
    return kind(**{**SHAPE, **changes})


WINDOW = spec(SlidingWindowSpec, sliding_window=64)

OF_CACHES = [
    (caches(FULL, layout="BLHNC"), "KV cache layout: LBNHC and BLHNC"),
    (caches(FULL, WINDOW), "number of KV cache groups: 1 and 2"),
    (caches(), "number of KV cache groups: 1 and 0"),
    (caches(spec(num_kv_heads=4)), "KV heads of KV cache group 0: 2 and 4"),
    (caches(spec(head_size=128)), "head size of KV cache group 0: 64 and 128"),
    (caches(spec(num_kv_heads=1, head_size=128)), "KV heads of KV cache group 0: 2 and 1"),  # as many bytes
    (caches(spec(head_size_v=32)), "head size of values of KV cache group 0: 64 and 32"),
    (caches(spec(dtype=torch.float16)), "dtype of KV cache group 0: torch.bfloat16 and torch.float16"),
    (caches(spec(dtype=torch.uint8)), "dtype of KV cache group 0: torch.bfloat16 and torch.uint8"),
    (caches(spec(block_size=32)), "tokens of a block of KV cache group 0: 16 and 32"),
    (caches(spec(sliding_window=64)), "sliding window of KV cache group 0: None and 64"),
    (caches(spec(attention_chunk_size=64)), "attention chunk of KV cache group 0: None and 64"),
    (caches(spec(page_size_padded=16384)), "padding of a block of KV cache group 0: None and 16384"),
    (caches(WINDOW), "kind of attention of KV cache group 0: FullAttentionSpec and SlidingWindowSpec"),
    (
        caches(spec(MLAAttentionSpec, num_kv_heads=1)),
        "kind of attention of KV cache group 0: FullAttention",
    ),
    (
        caches(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL})),
        "kind of attention of KV cache group 0: FullAttentionSpec and UniformTypeKVCacheSpecs",
    ),
]


@pytest.mark.parametrize(("other", "said"), OF_CACHES, ids=[said for _, said in OF_CACHES])
def test_a_difference_of_the_cache_names_what_differs(other, said):
    told = difference(identity(config(), caches(FULL)), identity(config(), other))
    assert told.startswith(f"prefill and decode differ in {said}")
    assert "; start both alike" in told or "; give both the same VLLM_KV_CACHE_LAYOUT" in told
    assert "\n" not in told
    assert len(told) < 300


def test_a_difference_in_a_later_group_names_that_group():
    own = identity(config(), caches(FULL, WINDOW))
    other = identity(config(), caches(FULL, spec(SlidingWindowSpec, sliding_window=32)))
    assert "sliding window of KV cache group 1: 64 and 32" in difference(own, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_size": 128}, "head size of KV cache group 0: 64 and 128/64"),
        ({"sliding_window": 64}, "sliding window of KV cache group 0: None and 64/None"),
    ],
)
def test_layers_that_vllm_gathers_in_a_group_are_each_looked_at(change, said):
    own, other = (
        identity(config(), caches(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": one})))
        for one in (FULL, spec(**change))
    )
    assert said in difference(own, other)


def test_which_layer_has_which_cache_is_compared():
    wide = spec(head_size=128)
    own, other = (
        identity(config(), caches(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)))
        for specs in ({"a": FULL, "b": wide}, {"a": wide, "b": FULL})
    )
    assert "caches by layer of KV cache group 0" in difference(own, other)


@pytest.mark.parametrize(
    ("names", "said"), [(["x", "y"], "layers of KV cache group 0: 1 and 2"), (["z"], "names of layers")]
)
def test_which_layers_there_are_is_compared(names, said):
    other = caches(FULL)
    other.kv_cache_groups[0].layer_names = names
    assert said in difference(identity(config(), caches(FULL)), identity(config(), other))


def test_what_vllm_only_reserves_is_not_compared():
    """It changes no block's bytes, and may follow from flags that differ with reason."""
    own, other = caches(WINDOW), caches(spec(SlidingWindowSpec, sliding_window=64, extra_retained_tokens=7))
    assert difference(identity(config(), own), identity(config(), other)) is None


@pytest.mark.parametrize("changed", identity(config(), caches(FULL, WINDOW)))
def test_every_fact_that_differs_is_one_line_with_a_name_and_a_mend(changed):
    """Also one that is added."""
    own = identity(config(), caches(FULL, WINDOW))
    told = difference(own, {**own, changed: "something\nelse " + "x" * 5000})
    name, _, mend = told.removeprefix("prefill and decode differ in ").partition(": ")
    assert name
    assert len(mend.rpartition("; ")[2].split()) > 2
    assert told.isprintable()
    assert len(told) < 500


def test_what_a_peer_calls_a_fact_is_told_in_one_line():
    own = identity(config(), caches(FULL))
    for name in ("a\nb", "group.", "group.9", "group.\n.x", "config.\n", "x" * 256, ""):
        told = difference(own, {**own, name: 1})
        assert told.isprintable()
        assert len(told) < 500


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
        ({"calculate_kv_scales": True}, "scales that each engine finds for itself (--calculate-kv-scales)"),
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
    facts = identity(config(), own)
    assert (facts["groups"], facts["group.0.layers"], facts["group.0.kind"]) == (1, 1, "FullAttentionSpec")
    assert facts["group.0.page_size_bytes"] == str(FULL.page_size_bytes)


def test_a_machine_has_one_name_until_it_boots_again():
    assert host() == host()
    assert len(host().split()) == 2
