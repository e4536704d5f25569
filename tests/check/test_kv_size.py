"""The arithmetic of KV: published models, whole blocks, windows, states, ranks and links."""

import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.model_configs import MODELS
from trivet.check.kv_layers import Kind
from trivet.check.kv_size import KvSize, size_of
from trivet.errors import TrivetError

LLAMA_8B = MODELS["meta-llama/Llama-3.1-8B"].config
LLAMA_70B = MODELS["meta-llama/Llama-3.1-70B"].config
GPT_OSS = MODELS["openai/gpt-oss-120b"].config
GEMMA_3 = MODELS["google/gemma-3-27b-it"].config
DEEPSEEK = MODELS["deepseek-ai/DeepSeek-V3"].config
SPARSE = MODELS["deepseek-ai/DeepSeek-V3.2"].config
QWEN_NEXT = MODELS["Qwen/Qwen3-Next-80B-A3B-Instruct"].config
LLAMA_4 = MODELS["meta-llama/Llama-4-Scout-17B-16E"].config

models = st.sampled_from(sorted(MODELS))
tokens = st.integers(1, 100_000)
ranks = st.sampled_from([1, 2, 4, 8, 16, 32])


@pytest.mark.parametrize("name", MODELS)
def test_known_models_have_their_known_size(name):
    known = MODELS[name]
    size = size_of(known.config)
    assert (size.bytes_per_token, size.state_bytes) == (known.bytes_per_token, known.state_bytes), known.rule


def test_the_example_of_the_documents_comes_out():
    size = size_of(LLAMA_70B)
    assert size.bytes_per_token == 327_680
    assert size.bytes_of(10_000) == 3_276_800_000
    assert size.transfer_s(10_000, 25) == pytest.approx(1.048576)
    assert size.ttft_share(10_000, 25, prefill_s=1.048576) == pytest.approx(0.5)


def test_ten_thousand_tokens_take_whole_blocks():
    assert size_of(LLAMA_70B, block_size=128).bytes_of(10_000) == 79 * 128 * 327_680


@pytest.mark.parametrize(
    ("kv_cache_dtype", "expected"),
    [
        ("auto", 131_072),
        ("bfloat16", 131_072),
        ("fp8", 65_536),
        ("fp8_e5m2", 65_536),
        ("int8_per_token_head", 65_536 + 32 * 8 * 8),
        ("int4_per_token_head", 32_768 + 32 * 8 * 8),
        ("nvfp4", 32_768 + 4_096),
    ],
)
def test_a_kv_cache_dtype_changes_the_size(kv_cache_dtype, expected):
    size = size_of(LLAMA_8B, kv_cache_dtype=kv_cache_dtype)
    assert size.bytes_per_token == expected
    assert size.kv_cache_dtype == ("bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype)


def test_turboquant_leaves_out_the_first_and_last_two_layers():
    size = size_of(LLAMA_8B, kv_cache_dtype="turboquant_k8v4")
    assert [(one.count, one.bytes_per_token) for one in size.layers] == [(4, 8 * 512), (28, 8 * (128 + 68))]
    assert any("turboquant" in note for note in size.notes)


def test_sparse_latents_in_fp8_have_a_format_of_their_own():
    size = size_of(SPARSE, kv_cache_dtype="fp8")
    assert (size.bytes_per_token, size.kv_cache_dtype) == (61 * (656 + 132), "fp8_ds_mla")
    assert any("FlashInfer" in note for note in size.notes)
    assert size_of(DEEPSEEK, kv_cache_dtype="fp8").bytes_per_token == 61 * 576


def test_dtype_is_the_models_own_unless_given():
    assert size_of({**LLAMA_8B, "torch_dtype": "float16"}).dtype == "float16"
    assert size_of(LLAMA_8B, dtype="float32").bytes_per_token == 2 * 131_072


def sized(config, refusal: str, **settings) -> KvSize | None:
    """None where these settings are refused, with these words."""
    try:
        return size_of(config, **settings)
    except TrivetError as error:
        if refusal not in str(error):
            raise
        return None


# ---- ranks


def test_kv_heads_are_divided_then_copied():
    assert [size_of(LLAMA_70B, tp=tp).rank_bytes_per_token for tp in (1, 2, 4, 8, 16)] == [
        327_680,
        163_840,
        81_920,
        40_960,
        40_960,
    ]
    assert size_of(LLAMA_70B, tp=16).bytes_of(160) == 2 * size_of(LLAMA_70B, tp=8).bytes_of(160)


def test_every_rank_has_a_latent_of_its_own():
    size = size_of(DEEPSEEK, tp=8)
    assert size.bytes_per_token == size.rank_bytes_per_token == 70_272
    assert size.bytes_of(640) == 8 * 640 * 70_272
    assert any("8 TP ranks takes a copy" in note for note in size.notes)
    assert not any("copy" in note for note in size_of(LLAMA_70B, tp=8).notes)


@settings(deadline=None)
@given(models, ranks, tokens)
def test_ranks_together_hold_the_model_at_least_once(name, tp, prompt_tokens):
    whole = size_of(MODELS[name].config, block_size=16)
    size = sized(MODELS[name].config, "divided", tp=tp, block_size=16)
    assume(size is not None)
    assert size.bytes_per_token == whole.bytes_per_token
    assert size.state_bytes == whole.state_bytes
    assert whole.bytes_per_token <= tp * size.rank_bytes_per_token <= tp * whole.bytes_per_token
    assert size.bytes_of(prompt_tokens) == tp * size.rank_bytes_of(prompt_tokens)
    divisible = all(
        one.kind not in (Kind.LATENT, Kind.INDEXER) and one.bytes_per_token == tp * one.rank_bytes_per_token
        for one in size.layers
    )
    if divisible:
        assert tp * size.rank_bytes_per_token == whole.bytes_per_token


@pytest.mark.parametrize(
    ("config", "tp", "said"),
    [
        (LLAMA_8B, 0, "0 TP ranks"),
        (LLAMA_8B, 3, "32 attention heads cannot be divided among 3 TP ranks -> give one of 1, 2, 4, 8, 16, 32"),
        ({**LLAMA_8B, "num_attention_heads": 48, "num_key_value_heads": 6, "head_dim": 128}, 4, "6 KV heads can be"),
        (MODELS["tiiuae/falcon-mamba-7b"].config, 3, "cannot be divided among 3 TP ranks"),
    ],
)
def test_ranks_that_vllm_refuses_are_refused(config, tp, said):
    with pytest.raises(TrivetError) as caught:
        size_of(config, tp=tp)
    assert said in str(caught.value)


# ---- blocks


@settings(deadline=None)
@given(models, tokens, st.sampled_from([16, 32, 64, 128]))
def test_full_attention_moves_each_block_that_a_prompt_touches(name, prompt_tokens, block_size):
    size = size_of(MODELS[name].config, block_size=block_size, is_hybrid=None)
    assume(all(one.window_tokens is None for one in size.layers) and not size.state_bytes)
    moved, least = size.bytes_of(prompt_tokens), prompt_tokens * size.bytes_per_token
    assert least <= moved < least + block_size * size.bytes_per_token
    assert moved % (block_size * size.bytes_per_token) == 0
    assert moved <= size.bytes_of(prompt_tokens + 1)


@settings(deadline=None)
@given(models, tokens, tokens)
def test_more_tokens_are_no_fewer_bytes_without_the_hybrid_manager(name, one, other):
    size = sized(MODELS[name].config, "hybrid KV cache manager", is_hybrid=False)
    assume(size is not None)
    assert size.bytes_of(min(one, other)) <= size.bytes_of(max(one, other))


@settings(deadline=None)
@given(st.sampled_from([GPT_OSS, GEMMA_3, MODELS["XiaomiMiMo/MiMo-V2-Flash"].config]), tokens)
def test_a_window_moves_what_vllm_keeps_of_it(config, prompt_tokens):
    from vllm.utils.math_utils import cdiv
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    size, whole = size_of(config), size_of(config, is_hybrid=False)
    for one in size.layers:
        blocks = size.blocks_of(one, prompt_tokens)
        if one.kind is not Kind.SLIDING:
            assert blocks == cdiv(prompt_tokens, one.block_tokens)
            continue
        manager = SlidingWindowManager.__new__(SlidingWindowManager)
        manager.sliding_window, manager.extra_retained_tokens = one.window_tokens, 0
        skipped = manager.get_num_skipped_tokens(prompt_tokens) // one.block_tokens
        assert blocks == cdiv(prompt_tokens, one.block_tokens) - skipped
        assert blocks <= cdiv(one.window_tokens, one.block_tokens) + 1  # what prefill hands over at most
        assert blocks * one.block_tokens >= min(prompt_tokens, one.window_tokens - 1)
    assert size.bytes_of(prompt_tokens) <= whole.bytes_of(prompt_tokens) + 2 * sum(
        one.count * one.rank_block_bytes for one in size.layers
    )


def test_a_long_prompt_costs_a_window_nothing():
    """gpt-oss: 18 layers of the prompt, 18 of a window of 128 in blocks of 16."""
    size = size_of(GPT_OSS)
    assert size.bytes_of(16_000) == 18 * 2048 * 16_000 + 18 * 2048 * 16 * 8
    assert size.bytes_of(16_014) == 18 * 2048 * 16_016 + 18 * 2048 * 16 * 9
    assert size.bytes_of(16_015) == 18 * 2048 * 16_016 + 18 * 2048 * 16 * 8
    assert size.bytes_of(16_001) == 18 * 2048 * 16_016 + 18 * 2048 * 16 * 9
    assert size_of(GPT_OSS, is_hybrid=False).bytes_of(16_000) == 36 * 2048 * 16_000


@settings(deadline=None)
@given(tokens)
def test_chunks_move_whole_unless_the_manager_is_forced_on(prompt_tokens):
    from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager

    size, forced = size_of(LLAMA_4), size_of(LLAMA_4, is_hybrid=True)
    assert not size.is_hybrid
    assert size.bytes_of(prompt_tokens) == -(-prompt_tokens // 16) * 16 * size.bytes_per_token
    chunked = next(one for one in forced.layers if one.kind is Kind.CHUNKED)
    manager = ChunkedLocalAttentionManager.__new__(ChunkedLocalAttentionManager)
    manager.attention_chunk_size = 8192
    skipped = manager.get_num_skipped_tokens(prompt_tokens) // 16
    assert forced.blocks_of(chunked, prompt_tokens) == -(-prompt_tokens // 16) - skipped


def test_a_state_moves_once_and_its_attention_in_large_blocks():
    size = size_of(QWEN_NEXT)
    assert size.block_tokens == 544
    assert size.bytes_of(100) == size.bytes_of(545) == 544 * 24_576 + size.state_bytes
    assert size.bytes_of(546) == 2 * 544 * 24_576 + size.state_bytes  # one token less: decode computes the last again
    assert size_of(QWEN_NEXT, block_size=1024).block_tokens == 1024
    assert size_of(QWEN_NEXT, state_dtype="float32").state_bytes > size.state_bytes
    assert size_of(MODELS["tiiuae/falcon-mamba-7b"].config).bytes_of(1) == 19_922_944


def test_latents_beside_a_state_have_blocks_of_128():
    """3 x 12288 x 2 + 32 x 128 x 128 x 4 bytes in pages of 1152 a token: 1885 tokens."""
    size = size_of(MODELS["moonshotai/Kimi-Linear-48B-A3B-Instruct"].config, block_size=16)
    assert size.block_tokens == 15 * 128


def test_a_state_needs_the_hybrid_manager():
    with pytest.raises(TrivetError, match="without its hybrid KV cache manager"):
        size_of(QWEN_NEXT, is_hybrid=False)


def test_layers_of_unlike_sizes_have_blocks_of_the_same_bytes():
    """Gemma 4: 2 heads of 512 in layers that attend to everything, 8 of 256 in the others."""
    size = size_of(MODELS["google/gemma-4-26B-A4B-it"].config)
    assert sorted((one.count, one.block_tokens, one.rank_block_bytes) for one in size.layers) == [
        (5, 32, 131_072),
        (25, 16, 131_072),
    ]
    assert {
        one.block_tokens for one in size_of(MODELS["google/gemma-4-26B-A4B-it"].config, is_hybrid=False).layers
    } == {16}


def test_a_block_that_does_not_come_out_even_is_padded():
    config = {**MODELS["XiaomiMiMo/MiMo-V2-Flash"].config, "swa_num_key_value_heads": 6}
    size = size_of(config)
    assert {one.rank_block_bytes for one in size.layers} == {6 * 320 * 2 * 16}
    assert {one.block_tokens for one in size.layers} == {16}


def test_nixl_reads_regions_that_hold_no_layer():
    """Gemma 3 27B: 52 layers with a window in groups of 9 and 8, each read from the 9 regions that groups share."""
    size = size_of(GEMMA_3)
    assert size.padding_layers == 2
    more = size.bytes_of(5000, with_padding=True) - size.bytes_of(5000)
    sliding = next(one for one in size.layers if one.kind is Kind.SLIDING)
    assert more == 2 * size.blocks_of(sliding, 5000) * sliding.rank_block_bytes
    assert size_of(LLAMA_8B).padding_layers == size_of(GEMMA_3, is_hybrid=False).padding_layers == 0


def test_vllms_block_sizes_are_taken_unless_given():
    assert size_of(LLAMA_8B).block_tokens == 16
    assert size_of(DEEPSEEK).block_tokens == 64
    assert size_of(DEEPSEEK, block_size=16).block_tokens == 16
    with pytest.raises(TrivetError, match="0 tokens"):
        size_of(LLAMA_8B, block_size=0)


def test_no_prompt_moves_nothing():
    assert size_of(LLAMA_8B).bytes_of(0) == 0
    assert size_of(QWEN_NEXT).bytes_of(0) == 0
    with pytest.raises(ValueError, match="tokens"):
        size_of(LLAMA_8B).bytes_of(-1)


# ---- links, and how it is told


@given(tokens, st.floats(0.1, 10_000))
def test_seconds_are_bits_over_the_rate(prompt_tokens, link_gbps):
    size = size_of(LLAMA_8B)
    assert size.transfer_s(prompt_tokens, link_gbps) * link_gbps * 1e9 == pytest.approx(
        8 * size.bytes_of(prompt_tokens)
    )
    assert 0 < size.ttft_share(prompt_tokens, link_gbps, prefill_s=1) < 1
    assert size.ttft_share(prompt_tokens, link_gbps, prefill_s=0) == 1


@pytest.mark.parametrize("link_gbps", [0, -1.0])
def test_a_link_carries_something(link_gbps):
    with pytest.raises(ValueError, match="link"):
        size_of(LLAMA_8B).transfer_s(1, link_gbps)


def test_facts_hold_what_was_asked_for():
    size = size_of(GPT_OSS, tp=2)
    facts = size.facts()
    assert facts["kv_bytes_per_token"] == 73_728
    assert facts["kv_bytes_per_token_per_rank"] == 36_864
    assert facts["layers"][0] == {
        "kind": "sliding window",
        "count": 18,
        "block_tokens": 16,
        "bytes_per_token": 2048,
        "bytes_per_token_per_rank": 1024,
        "window_tokens": 128,
    }
    assert "kv_bytes" not in facts
    assert "transfer_s" not in size.facts(100)
    told = size.facts(100, 25, 0.5)
    assert told["kv_bytes"] == size.bytes_of(100)
    assert told["kv_bytes_per_rank"] * 2 == told["kv_bytes"]
    assert told["transfer_s"] == size.transfer_s(100, 25)
    assert told["transfer_share_of_ttft"] == size.ttft_share(100, 25, 0.5)
    assert size_of(QWEN_NEXT).facts()["layers"][0] == {
        "kind": "state",
        "count": 36,
        "state_bytes": 39_518_208 // 36,
        "state_bytes_per_rank": 39_518_208 // 36,
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MODELS["google/gemma-3-4b-it"].config, "num_key_value_heads 4: transformers' default for gemma3_text"),
        (MODELS["openai-community/gpt2"].config, "no dtype"),
        (LLAMA_4, "vLLM turns its hybrid KV cache manager off"),
        (MODELS["google/gemma-3n-E4B-it"].config, "15 layers use the cache of an earlier one"),
        (QWEN_NEXT, "blocks of 544 tokens"),
        (
            {**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
            "KV cache dtype fp8",
        ),
        (MODELS["zai-org/GLM-5.1"].config, "fp8 on Blackwell"),
    ],
)
def test_what_is_not_certain_is_noted(config, said):
    assert any(said in note for note in size_of(config).notes)


def test_importing_it_is_light():
    heavy = {"torch", "vllm", "transformers", "huggingface_hub", "numpy"}
    code = f"import sys, trivet.check.kv_size; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
