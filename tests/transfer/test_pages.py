from types import SimpleNamespace

import pytest
import torch

from trivet.transfer.pages import Layer, Pages, checksum

LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Physical orders of layer, block, head, token and content, as in vLLM's ``v1/kv_cache_layout.py``."""
BLOCKED = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]
LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 3, 12, 2, 16, 24


def views(layout, dtype=torch.float32, *, split=1, layers=LAYERS, blocks=BLOCKS, seed=0, tokens=TOKENS):
    """A view ``[blocks, heads, tokens, width]`` for each layer, blocks cut into ``split`` of a backend's."""
    sizes = (layers, blocks * split, HEADS, tokens // split, WIDTH)
    order = LAYOUTS[layout]
    raw = torch.empty([sizes[axis] for axis in order], dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    as_bytes = raw.flatten().view(torch.uint8)
    as_bytes.copy_(torch.randint(0, 256, as_bytes.shape, generator=generator, dtype=torch.uint8))
    logical = raw.permute([order.index(axis) for axis in range(5)])
    return [logical[layer] for layer in range(layers)]


def named(caches, first=0):
    return {f"model.layers.{first + index}.self_attn.attn": cache for index, cache in enumerate(caches)}


def config(*groups):
    """Groups of layer names and a block's tokens."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=list(names), kv_cache_spec=SimpleNamespace(block_size=tokens))
            for names, tokens in groups
        ]
    )


def pages(caches, tokens=TOKENS):
    own = named(caches)
    return Pages.of(own, config((own, tokens)))


def bytes_of(cache, block, split=1):
    """The bytes of one of the scheduler's blocks, in its own order."""
    return cache[block * split : (block + 1) * split].contiguous().flatten().view(torch.uint8)


def moved(source, target, layers, blocks, into):
    staged = torch.zeros(source.bytes_of(layers, len(blocks)), dtype=torch.uint8)
    source.gather(layers, torch.tensor(blocks), staged)
    target.scatter(layers, torch.tensor(into), staged)


# views


@pytest.mark.parametrize("layout", BLOCKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chosen_blocks_and_no_other_byte_are_moved(layout, dtype):
    here, there = views(layout, dtype, seed=1), views(layout, dtype, seed=2)
    before = [cache.clone() for cache in there]
    moved(pages(here), pages(there), [0, 2], [3, 7, 11], [5, 1, 2])
    for layer in range(LAYERS):
        came = dict(zip([5, 1, 2], [3, 7, 11], strict=True)) if layer != 1 else {}
        for block in range(BLOCKS):
            expected = bytes_of(here[layer], came[block]) if block in came else bytes_of(before[layer], block)
            assert torch.equal(bytes_of(there[layer], block), expected), (layer, block)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_that_the_backend_cuts_into_parts_is_moved_whole(layout, dtype):
    tokens, split = 128, 4
    here = views(layout, dtype, split=split, tokens=tokens, seed=1)
    there = views(layout, dtype, split=split, tokens=tokens, seed=2)
    before = [cache.clone() for cache in there]
    own = pages(here, tokens)
    assert own.layers[0].rows.shape[0] == BLOCKS
    assert own.layers[0].block_bytes == HEADS * tokens * WIDTH * here[0].element_size()
    moved(own, pages(there, tokens), range(LAYERS), [0, 9], [4, 11])
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            expected = {4: bytes_of(here[layer], 0, split), 11: bytes_of(here[layer], 9, split)}.get(
                block, bytes_of(before[layer], block, split)
            )
            assert torch.equal(bytes_of(there[layer], block, split), expected), (layer, block)


def test_blocks_are_staged_layer_by_layer_and_in_the_order_asked():
    caches = views("LBHNC", torch.bfloat16)
    own = pages(caches)
    staged = torch.zeros(own.bytes_of([2, 0], 3), dtype=torch.uint8)
    own.gather([2, 0], torch.tensor([8, 1, 4]), staged)
    expected = torch.cat([bytes_of(caches[layer], block) for layer in (2, 0) for block in (8, 1, 4)])
    assert torch.equal(staged, expected)


def test_vllms_own_views_are_read():
    from vllm.v1 import kv_cache_interface

    try:
        create, tensor = kv_cache_interface.create_kv_cache_views, kv_cache_interface.KVCacheTensor
        from vllm.v1.kv_cache_layout import KVCacheLayout

        spec = kv_cache_interface.FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        page = spec.page_size_bytes
        raw = torch.randint(-128, 128, (LAYERS * BLOCKS * page,), dtype=torch.int8)
        names = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
        caches = create(
            raw,
            spec,
            BLOCKS,
            KVCacheLayout.LBNHC,
            tensor(raw.numel(), names, page * BLOCKS, page),
            kernel_block_size=32,
        )
    except (AttributeError, ImportError, TypeError):
        pytest.skip("this vLLM makes its views elsewhere")
    own = Pages.of(dict(zip(names, caches, strict=True)), config((names, 128)))
    staged = torch.zeros(own.bytes_of([1], 2), dtype=torch.uint8)
    own.gather([1], torch.tensor([5, 0]), staged)
    start = page * BLOCKS
    expected = torch.cat([raw[start + 5 * page : start + 6 * page], raw[start : start + page]]).view(torch.uint8)
    assert torch.equal(staged, expected)


def test_writing_into_pages_writes_into_vllms_tensors():
    caches = views("LBNHC")
    for layer in pages(caches).layers:
        layer.rows.zero_()
    assert all(not cache.view(torch.int32).any() for cache in caches)


# groups and their layers


def test_groups_have_layers_and_block_sizes_of_their_own():
    full = named(views("LBNHC"), first=0)
    window = named(views("LBNHC", tokens=32, layers=2), first=3)
    own = Pages.of({**window, **full}, config((full, 16), (window, 32)))
    assert own.block_tokens == (16, 32)
    assert [layer.group for layer in own.layers] == [0, 0, 0, 1, 1]
    assert own.bytes_of([0, 3], 2) == 2 * (own.layers[0].block_bytes + own.layers[3].block_bytes)
    assert own.largest_block_bytes == own.layers[3].block_bytes == 2 * own.layers[0].block_bytes


def test_layers_stand_in_the_models_order_whatever_their_group():
    caches = named(views("LBNHC", layers=12))
    names = list(caches)
    own = Pages.of(caches, config((names[::-2], 16), (names[::2], 16)))
    assert [layer.name for layer in own.layers] == names
    assert own.index == {name: index for index, name in enumerate(names)}


def test_a_layer_that_shares_anothers_cache_is_left_out():
    caches = named(views("LBNHC"))
    own = Pages.of(caches, config(([*caches, "model.layers.9.attn"], 16)))
    assert [layer.name for layer in own.layers] == list(caches)


def test_layers_of_one_group_may_have_blocks_of_their_own_size():
    small, large = views("LBNHC", layers=1), views("LBNHC", layers=1, tokens=32)
    caches = named([*small, *large])
    group = config((caches, 16))
    sizes = zip(caches, (16, 32), strict=True)
    group.kv_cache_groups[0].kv_cache_spec.kv_cache_specs = {
        name: SimpleNamespace(block_size=tokens) for name, tokens in sizes
    }
    own = Pages.of(caches, group)
    assert own.layers[1].block_bytes == 2 * own.layers[0].block_bytes
    assert [len(layer.rows) for layer in own.layers] == [BLOCKS, BLOCKS]


# refusals


def refused(caches, tokens=TOKENS):
    with pytest.raises(ValueError, match="TrivetConnector") as error:
        pages(caches, tokens)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_block_that_is_no_run_of_bytes_is_refused_with_what_helps(layout):
    told = refused(views(layout))
    assert "model.layers.0.self_attn.attn is not one run of memory" in told
    assert "VLLM_KV_CACHE_LAYOUT" in told


def test_parts_of_a_block_that_lie_apart_are_refused():
    assert "lie apart" in refused(views("BLNHC", split=4, tokens=128), tokens=128)


def test_a_cache_of_another_shape_is_refused():
    assert "not four dimensions" in refused([torch.zeros(4, 2, 16)])


def test_a_block_that_is_no_whole_words_is_refused():
    assert "no 8-byte words" in refused([torch.zeros(4, 1, 1, 9, dtype=torch.uint8)], tokens=1)


def test_no_cache_at_all_is_refused():
    with pytest.raises(ValueError, match="no KV cache"):
        Pages.of({}, config((["a"], 16)))


# checksum


def rows(blocks, words, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (blocks, words), dtype=torch.int64, generator=generator)


@pytest.mark.parametrize("words", [1, 100, 511, 512, 513, 4096, 5000])
def test_a_checksum_is_the_same_for_the_same_bytes(words):
    memory = rows(1, words).flatten().view(torch.uint8)
    assert checksum(memory) == checksum(memory.clone())


@pytest.mark.parametrize("words", [1, 100, 512, 513, 4096, 5000])
def test_a_checksum_shows_a_flipped_byte(words):
    memory = rows(1, words).flatten().view(torch.uint8)
    before = checksum(memory)
    for at in {0, 7, len(memory) // 2, len(memory) - 1}:
        changed = memory.clone()
        changed[at] ^= 0x10
        assert checksum(changed) != before, at


@pytest.mark.parametrize("words", [512, 1024, 2560, 256, 128, 600])
def test_a_checksum_shows_two_exchanged_blocks(words):
    blocks = rows(6, words)
    before = checksum(blocks.flatten().view(torch.uint8))
    for one in range(6):
        for other in range(one):
            order = list(range(6))
            order[one], order[other] = other, one
            assert checksum(blocks[order].flatten().view(torch.uint8)) != before, (one, other)


def test_a_checksum_shows_that_nothing_was_written():
    memory = rows(4, 640).flatten().view(torch.uint8)
    assert checksum(torch.zeros_like(memory)) != checksum(memory)


def test_a_layers_block_bytes_are_its_rows():
    assert Layer("a", 0, rows(3, 40)).block_bytes == 320
