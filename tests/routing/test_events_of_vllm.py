"""What vLLM itself tells, in its own code and on its own wire, held against what it finds. No engine is started."""

import itertools
import random
import time

import pytest

pytest.importorskip("vllm")

import msgspec
import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from trivet.routing.blocks import Blocks
from trivet.routing.engines import EngineView
from trivet.routing.events import Mirror, Subscriber, UnusableError
from trivet.routing.held import Held
from trivet.routing.prefixes import CHUNK_TOKENS, Chain, named

WAIT_S = 20.0
NUMBERS = itertools.count()
SHAPE = {"num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}


class Cache:
    """vLLM's own KV cache manager, which tells of each step as its scheduler does."""

    def __init__(self, block: int, *more_groups) -> None:
        init_none_hash(sha256)
        self.block = block
        groups = [KVCacheGroupSpec(["a"], FullAttentionSpec(block, **SHAPE)), *more_groups]
        config = KVCacheConfig(num_blocks=max(8, 1000 // block), kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(config, 4096, block, block, enable_kv_cache_events=True)

    def request(self, ids, salt=None, lora=None, items=()) -> Request:
        features = [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length), name)
            for offset, length, name in items
        ]
        return Request(
            str(next(NUMBERS)),
            list(ids),
            SamplingParams(max_tokens=1),
            None,
            mm_features=features,
            cache_salt=salt,
            lora_request=None if lora is None else LoRARequest(lora, 1, "/" + lora),
            block_hasher=get_request_block_hasher(self.block, sha256),
        )

    def found(self, request: Request) -> int:
        return self.manager.get_computed_blocks(request)[1]

    def begin(self, request: Request) -> None:
        """Schedules all of a prompt; it keeps its blocks until ``end``."""
        blocks, tokens, *_ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - tokens
        assert self.manager.allocate_slots(request, new, tokens, blocks) is not None
        request.num_computed_tokens = request.num_tokens

    def end(self, request: Request) -> None:
        self.manager.free(request)

    def step(self) -> KVEventBatch:
        return KVEventBatch(ts=time.time(), events=self.manager.take_events(), data_parallel_rank=0)


class Listener:
    """What is kept of the batches."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.chunks: set[int] = set()
        self.mirror = Mirror(Blocks("m", self.chunks.update, self.chunks.difference_update))

    def take(self, batch: KVEventBatch) -> None:
        self.mirror.take(msgspec.msgpack.encode(batch))

    def found(self, ids, salt=None, lora=None, items=()) -> int:
        """By whole chunks, cut to the engine's blocks."""
        chain = Chain.of_tokens(lora or "m", salt)
        chain.extend_bytes(named(ids, ((offset, name) for offset, _, name in items)))
        chunks = next((at for at, one in enumerate(chain.hashes) if one not in self.chunks), len(chain.hashes))
        return min(chunks * CHUNK_TOKENS, len(ids) - 1) // self.block * self.block


def expected(found: int, ids, block: int) -> int:
    """What an engine finds, as it looks in whole chunks."""
    return min(found // CHUNK_TOKENS * CHUNK_TOKENS, len(ids) - 1) // block * block


@pytest.mark.parametrize("block", [16, 32, 48, 128])
def test_what_is_heard_is_what_vllm_finds(block):
    """Conversations, salts and an adapter in a cache that is too small for them, so that it evicts all the time."""
    dice, cache, listener = random.Random(block), Cache(block), Listener(block)
    beginnings = [[one * 1000 + number for number in range(400)] for one in range(6)]
    kinds = [(None, None), ("salt", None), (None, "lora"), ("salt", "lora")]
    seen, evicted = 0, 0
    for _ in range(300):
        ids = dice.choice(beginnings)[: dice.randrange(1, 400)]
        salt, lora = dice.choice(kinds)
        request = cache.request(ids, salt, lora)
        cache.begin(request)
        if dice.random() < 0.3:  # two at a time, so that blocks are there twice
            twin = cache.request(ids, salt, lora)
            if cache.manager.block_pool.get_num_free_blocks() > -(-len(ids) // block):
                cache.begin(twin)
                cache.end(twin)
        cache.end(request)
        batch = cache.step()
        evicted += sum(type(one).__name__ == "BlockRemoved" for one in batch.events)
        listener.take(batch)
        for asked in beginnings:
            for kind in kinds:
                finds = expected(cache.found(cache.request(asked, *kind)), asked, block)
                heard = listener.found(asked, *kind)
                assert heard == finds, kind
                seen += bool(finds)
    assert seen > 500
    assert evicted > 100
    assert cache.manager.reset_prefix_cache()
    listener.take(cache.step())
    assert listener.chunks == set()


@pytest.mark.parametrize("block", [16, 32, 48, 128])
def test_images_are_heard_as_vllm_finds_them(block):
    """Prompts of the same tokens with images of different names and places, some of them over blocks' borders."""
    dice, cache, listener = random.Random(block), Cache(block), Listener(block)
    ids = list(range(400))
    layouts = [[(0, 30)], [(5, 16), (21, 90)], [(64, 64)], [(100, 250)], [(250, 3), (300, 50)], []]
    prompts = [
        [(offset, length, f"{name}-{number}") for number, (offset, length) in enumerate(layout)]
        for layout in layouts
        for name in "ab"
    ]
    seen = 0
    for _ in range(100):
        items, salt = dice.choice(prompts), dice.choice([None, "salt"])
        request = cache.request(ids[: dice.randrange(360, 400)], salt, items=items)
        cache.begin(request)
        cache.end(request)
        listener.take(cache.step())
        for asked in prompts:
            finds = cache.found(cache.request(ids, salt, items=asked))
            # a chunk may end before an image that begins in the same block
            assert expected(finds, ids, block) <= listener.found(ids, salt, items=asked) <= finds, asked
            seen += bool(finds)
    assert seen > 200


def test_several_kinds_of_kv_are_not_used():
    window = KVCacheGroupSpec(["b"], SlidingWindowSpec(16, **SHAPE, sliding_window=32))
    cache, listener = Cache(16, window), Listener(16)
    cache.begin(cache.request(range(200)))
    with pytest.raises(UnusableError, match="several kinds of KV"):
        listener.take(cache.step())


def test_over_vllms_own_publisher(tmp_path):
    address = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    engine = EngineView("a", "prefill", "http://a", True, cached_block_tokens=16, kv_events=address, slot=0)
    cache, held, ids = Cache(16), Held(), list(range(400))
    chain = Chain.of_tokens("m", None)
    chain.extend(ids)
    publisher = ZmqEventPublisher(0, *address)
    subscriber = Subscriber(held, "m", lambda: True)

    def tell() -> None:
        publisher.publish(cache.step())

    def until(tokens: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while (told := held.told(chain.prefix(400), engine)) is None or told.known.tokens != tokens or not told.whole:
            assert time.monotonic() < deadline, told
            time.sleep(0.02)

    try:
        request = cache.request(ids[:200])
        cache.begin(request)
        tell()  # before anyone listens
        subscriber.update([engine])
        until(192)
        cache.end(request)
        cache.begin(cache.request(ids))
        tell()
        until(384)
        publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
        until(0)
    finally:
        subscriber.close()
        publisher.shutdown()


def test_every_field_that_is_read_is_vllms():
    fields = {one.name for one in msgspec.structs.fields(BlockStored)}
    from trivet.routing.events import BlockStored as Ours

    assert {one.name for one in msgspec.structs.fields(Ours)} <= fields
