"""Which layers a model has and what each keeps, compared with what vLLM and transformers make of the same configs."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import vllm_models
from helpers.model_configs import MODELS, nested
from trivet.check.kv_layers import Kind, layers_of
from trivet.check.kv_size import KvSize, size_of
from trivet.check.model_config import DEFAULTS
from trivet.errors import TrivetError

FORMS = (
    "meta-llama/Llama-3.1-70B",
    "mistralai/Mistral-7B-v0.1",
    "google/gemma-2-9b",
    "google/gemma-3-4b-it",
    "google/gemma-4-26B-A4B-it",
    "openai/gpt-oss-120b",
    "tiiuae/falcon-7b",
    "deepseek-ai/DeepSeek-V2-Lite",
    "XiaomiMiMo/MiMo-V2-Flash",
    "meta-llama/Llama-4-Scout-17B-16E",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "LiquidAI/LFM2-1.2B",
)
"""A model of each form; the others are built by the long run."""
REST = tuple(name for name, known in MODELS.items() if known.architecture and name not in FORMS)

DIVIDED = (
    ("meta-llama/Llama-3.1-70B", 4, "auto"),
    ("meta-llama/Llama-3.1-70B", 16, "auto"),
    ("meta-llama/Llama-3.1-8B", 2, "fp8"),
    ("Qwen/Qwen3-30B-A3B", 8, "auto"),
    ("deepseek-ai/DeepSeek-V2-Lite", 4, "auto"),
    ("google/gemma-4-26B-A4B-it", 8, "auto"),
    ("XiaomiMiMo/MiMo-V2-Flash", 8, "auto"),
    ("ai21labs/Jamba-v0.1", 4, "auto"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 4, "auto"),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8, "auto"),
    ("ibm-granite/granite-4.0-h-small", 4, "auto"),
    ("tiiuae/Falcon-H1-7B-Base", 4, "auto"),
    ("LiquidAI/LFM2-1.2B", 2, "auto"),
)
"""Models by a number of ranks, some with fewer KV heads or groups than ranks."""


def built(name: str) -> dict:
    """A config that vLLM builds; of a model that sees, what it speaks with."""
    known = MODELS[name]
    return {**known.as_built, **known.config.get("text_config", known.config), "architectures": [known.architecture]}


@pytest.fixture(scope="module")
def told():
    """vLLM's word on the forms, and on those that are divided."""
    requests = [{"config": built(name)} for name in FORMS]
    requests += [{"config": built(name), "tp": tp, "kv_cache_dtype": dtype} for name, tp, dtype in DIVIDED]
    return dict(zip((*FORMS, *DIVIDED), vllm_models.told(requests), strict=True))


@pytest.fixture(scope="module")
def rest():
    answers = vllm_models.told([{"config": built(name)} for name in REST])
    return dict(zip(REST, answers, strict=True))


def agrees(size: KvSize, answer: dict) -> None:
    """Layer by layer, block by block, group by group."""
    assert "error" not in answer, answer["error"]
    ours = Counter()
    for one in size.layers:
        if one.is_kept:
            ours[one.rank_bytes_per_token, one.window_tokens, one.rank_state_bytes] += one.count
    assert ours == Counter(
        (one.get("bytes_per_token", 0), one.get("window"), one.get("state_bytes", 0)) for one in answer["layers"]
    )
    assert size.block_tokens == answer["block_tokens"]
    blocks = Counter()
    for one in size.layers:
        if one.rank_block_bytes:
            blocks[one.block_tokens, one.rank_block_bytes] += one.count
    groups = [one for one in answer["groups"] if one["spec"] != "MambaSpec"]
    assert blocks == sum(
        (Counter({(one["block_tokens"], one["block_bytes"]): one["layers"]}) for one in groups), Counter()
    )
    assert size.padding_layers == padding(answer["groups"])


def padding(groups: list[dict]) -> int:
    """Regions that NixlConnector reads beyond layers: a block of a group is read from all that another group shares."""
    if len(groups) < 2:
        return 0
    users = Counter(place for one in groups for place in range(one["layers"]))
    states = max((one["layers"] for one in groups if one["spec"] == "MambaSpec"), default=0)
    moved = 0
    for one in groups:
        if one["spec"] == "MambaSpec":
            moved += states
        elif states:
            moved += len(users)
        else:
            moved += sum(count > 1 or place < one["layers"] for place, count in users.items())
    return moved - sum(one["layers"] for one in groups)


@pytest.mark.parametrize("name", FORMS)
def test_layers_are_those_that_vllm_builds(told, name):
    agrees(size_of(MODELS[name].config, block_size=vllm_models.BLOCK_TOKENS, is_hybrid=True), told[name])


@pytest.mark.full
@pytest.mark.parametrize("name", REST)
def test_layers_of_the_others_are_those_that_vllm_builds(rest, name):
    agrees(size_of(MODELS[name].config, block_size=vllm_models.BLOCK_TOKENS, is_hybrid=True), rest[name])


@pytest.mark.parametrize("name", DIVIDED, ids=lambda one: f"{one[0].split('/')[1]}-{one[1]}-{one[2]}")
def test_a_rank_keeps_what_a_rank_of_vllm_keeps(told, name):
    model, tp, dtype = name
    size = size_of(
        MODELS[model].config, tp=tp, kv_cache_dtype=dtype, block_size=vllm_models.BLOCK_TOKENS, is_hybrid=True
    )
    agrees(size, told[name])


_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
NEEDED = {
    "deepseek_v3": ("kv_lora_rank", "qk_rope_head_dim"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (*_DELTA, "linear_conv_kernel_dim")),
}
"""Fields that a config must have, as no default of theirs is taken."""


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_a_config_does_not_say_is_what_transformers_takes(model_type):
    import vllm.config  # noqa: F401  # first: the next cannot be imported alone
    from transformers import AutoConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    theirs = AutoConfig.for_model(model_type, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(model_type, ModelArchConfigConvertorBase)(theirs, theirs)
    needed = NEEDED.get(model_type, ())
    ours = layers_of({"model_type": model_type, **{name: getattr(theirs, name) for name in needed}})
    assert len(ours.cached) == convertor.get_num_hidden_layers()
    assert ours.heads == convertor.get_total_num_attention_heads()
    if model_type == "gemma4_text":  # its layers are of two kinds
        expected = [(one.num_key_value_heads, one.head_dim) for one in theirs.per_layer_config]
    else:
        heads = 1 if model_type == "deepseek_v3" else convertor.get_total_num_kv_heads()
        expected = [(heads, convertor.get_head_size())] * len(ours.cached)
    attending = [index for index, one in enumerate(ours.cached) if one.kv_heads]
    assert [(ours.cached[index].kv_heads, ours.cached[index].key_dim) for index in attending] == [
        expected[index] for index in attending
    ]
    assert kinds_of(ours) == list(expected_kinds(theirs, model_type))
    for note in ours.notes:
        assert "transformers' default" in note


def kinds_of(model) -> list[tuple[Kind, int | None]]:
    return [(one.kind, one.window_tokens) for one in model.cached]


def expected_kinds(config, model_type):
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * layers
    own = layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    for index, one in enumerate(types):
        if index >= own:
            yield Kind.SHARED, None
        elif model_type == "deepseek_v3":
            yield Kind.LATENT, None
        elif one == "full_attention" or (one == "sliding_attention" and not window):
            yield Kind.FULL, None
        elif one == "sliding_attention":
            yield Kind.SLIDING, window + (model_type == "cohere2")
        elif one == "chunked_attention":
            yield Kind.CHUNKED, config.attention_chunk_size
        else:
            assert one == "linear_attention"
            yield Kind.STATE, None


LLAMA = MODELS["meta-llama/Llama-3.1-8B"].config


def kinds(config) -> Counter:
    return Counter((str(one.kind), one.window_tokens) for one in layers_of(config).cached)


def of_type(model_type, **more):
    return {**LLAMA, "model_type": model_type, **more}


FULL, SLIDING = "full attention", "sliding window"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (of_type("qwen2", sliding_window=4096, max_window_layers=20), {(FULL, None): 32}),
        (
            of_type("qwen2", sliding_window=4096, max_window_layers=20, use_sliding_window=True),
            {(FULL, None): 20, (SLIDING, 4096): 12},
        ),
        (of_type("qwen3_moe", sliding_window=4096), {(FULL, None): 32}),
        (of_type("qwen3_moe", sliding_window=4096, use_sliding_window=True), {(SLIDING, 4096): 32}),
        (of_type("mistral", sliding_window=0), {(FULL, None): 32}),
        (of_type("mistral", sliding_window=[None, 128]), {(FULL, None): 16, (SLIDING, 128): 16}),
        (of_type("gemma3_text", sliding_window=512, sliding_window_pattern=4), {(SLIDING, 512): 24, (FULL, None): 8}),
        (of_type("cohere2", sliding_window=512), {(SLIDING, 513): 24, (FULL, None): 8}),
        (of_type("gemma4_text", sliding_window=512), {(SLIDING, 512): 26, (FULL, None): 6}),  # the last one too
        (of_type("exaone4", sliding_window=None), {(FULL, None): 32}),
        (of_type("exaone4", sliding_window=512, sliding_window_pattern="LG"), {(SLIDING, 512): 16, (FULL, None): 16}),
        (of_type("llama4_text", no_rope_layers=[]), {("chunked local attention", 8192): 24, (FULL, None): 8}),
        (of_type("llama4_text", attention_chunk_size=None), {(FULL, None): 32}),
        (
            of_type("smollm3", layer_types=["full_attention", "sliding_attention"] * 16, sliding_window=64),
            {(FULL, None): 32},
        ),
        (of_type("ministral3", layer_types=["sliding_attention"] * 32, sliding_window=64), {(SLIDING, 64): 32}),
        (of_type("deepseek_v2", kv_lora_rank=None), {(FULL, None): 32}),
        (of_type("longcat_flash", kv_lora_rank=512, qk_rope_head_dim=64), {("latent attention (MLA)", None): 64}),
    ],
)
def test_kinds_are_read_from_each_spelling(config, expected):
    assert kinds(config) == expected


def test_an_indexer_follows_its_pattern():
    config = MODELS["zai-org/GLM-5.1"].config
    indexed = [index for index, one in enumerate(layers_of(config).cached) if one.kind is Kind.INDEXER]
    assert len(indexed) == 21
    assert kinds({**config, "index_topk_pattern": "FS" * 39})["indexer of sparse attention", None] == 39


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_the_language_part_is_found(name):
    assert layers_of({"model_type": "sees", name: LLAMA}).cached == layers_of(LLAMA).cached


def test_the_language_part_is_found_in_depth():
    assert layers_of({"thinker_config": nested(LLAMA)}).cached == layers_of(LLAMA).cached


def test_the_hub_format_of_mistral_is_read():
    config = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "sliding_window": None}
    model = layers_of(config)
    assert model.model_type == "mistral"
    assert model.cached == layers_of(LLAMA).cached


def test_a_type_that_is_not_known_is_said_to_be_guessed():
    model = layers_of(of_type("brand-new"))
    assert model.cached == layers_of(LLAMA).cached
    assert any("'brand-new' is not known here" in note for note in model.notes)
    assert layers_of(LLAMA).notes == ()


def test_a_latent_of_a_type_that_is_not_known_is_said_to_be_guessed():
    model = layers_of(of_type("brand-new", kv_lora_rank=512, qk_rope_head_dim=64))
    assert {one.kind for one in model.cached} == {Kind.LATENT}
    assert any("taken as latent attention" in note for note in model.notes)


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_is_known(name):
    assert [note for note in layers_of(MODELS[name].config).notes if "not known" in note] == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "has no num_hidden_layers"),
        ({"model_type": "llama4_text", "num_hidden_layers": 0}, "no layers"),
        (of_type("deepseek_v4"), "layout of its own"),
        (of_type("modernbert"), "generates no tokens"),
        (of_type("t5", is_encoder_decoder=True), "encoder-decoder"),
        (of_type("other", attention_chunk_size=64), "which layers attend in chunks"),
        (of_type("other", layer_types=["full_attention"] * 31 + ["novel_attention"]), "'novel_attention'"),
        (of_type("other", layer_types=["full_attention"]), "has 32 layers, and the types of 1"),
        (of_type("other", layer_types=["linear_attention"] * 32), "layers with a state"),
        (of_type("llama", num_key_value_heads="8"), "num_key_value_heads: '8', which is no count"),
        (of_type("llama", num_key_value_heads=-8), "no count"),
        (of_type("llama", num_key_value_heads=float("inf")), "no count"),
        (of_type("llama", num_hidden_layers=10**9), "has 1000000000 layers"),
        (of_type("llama", num_key_value_heads=True), "no count"),
        (of_type("nemotron_h"), "neither layers_block_type nor a pattern"),
        (of_type("mamba2"), "has no mamba_num_heads"),
        (of_type("jamba", mamba_d_conv=4, mamba_expand=2, mamba_d_state=16), "attn_layer_period"),
        (of_type("nemotron-nas", block_configs=[{}]), "malformed (KeyError: 'attention')"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(config, said):
    with pytest.raises(TrivetError) as caught:
        layers_of(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.mend


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats() | st.sampled_from(["full_attention", "mamba", "M*"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["attention", "num_heads"]), inner),
    max_leaves=6,
)
names = sorted({name for known in MODELS.values() for name in known.config.get("text_config", known.config)})


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(MODELS)), st.dictionaries(st.sampled_from(names), values, max_size=4))
def test_a_config_of_any_content_gives_a_size_or_a_line(name, changed):
    config = MODELS[name].config
    changed.pop("model_type", None)
    size, refusal = sized({**config.get("text_config", config), **changed})
    assert size is None or size.bytes_of(100) >= 0
    assert refusal is None or refusal.mend


def sized(config) -> tuple[KvSize | None, TrivetError | None]:
    try:
        return size_of(config), None
    except TrivetError as error:
        return None, error
