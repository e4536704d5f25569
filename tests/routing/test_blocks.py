"""An engine's cache out of its events, against a model of it that walks each prompt from its beginning."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.routing.blocks import Blocks, TooManyBlocksError
from trivet.routing.prefixes import CHUNK_TOKENS, Chain, named

MODEL = "served"


@dataclass
class Stored:
    block_hashes: list
    parent_block_hash: object
    token_ids: list[int]
    block_size: int = 16
    lora_name: str | None = None
    extra_keys: list | None = None


@dataclass
class Cache:
    """Blocks, and what they said can be found."""

    most: int = 10**6
    found: set = field(default_factory=set)

    def __post_init__(self):
        self.blocks = Blocks(MODEL, self.add, self.drop, self.most)

    def add(self, chunks):
        assert not self.found & set(chunks), "told twice"
        self.found |= set(chunks)

    def drop(self, chunks):
        assert self.found >= set(chunks), "taken back without having been told"
        self.found -= set(chunks)

    def tokens(self, token_ids, model=MODEL, salt=None, items=()) -> int:
        chain = Chain.of_tokens(model, salt)
        chain.extend_bytes(named(token_ids, items))
        held = [one in self.found for one in chain.hashes]
        assert sorted(held, reverse=True) == held, "what is behind a hole cannot be found"
        return sum(held) * CHUNK_TOKENS


def names(token_ids, size, root="") -> list[str]:
    """A name for each whole block, by all that stands up to its end."""
    return [repr((root, token_ids[:end])) for end in range(size, len(token_ids) + 1, size)]


def store(cache: Cache, token_ids, size=16, start=0, root="", **more) -> list[str]:
    """The blocks of a prompt from block ``start`` on."""
    made = names(token_ids, size, root)
    parent = made[start - 1] if start else None
    cache.blocks.store(Stored(made[start:], parent, token_ids[start * size :], size, **more))
    return made


IDS = [number * 7 % 5000 for number in range(512)]


@pytest.mark.parametrize("size", [1, 16, 48, 64, 128, 200])
def test_blocks_of_any_size_make_the_chunks_of_prompts(size):
    cache = Cache()
    made = store(cache, IDS, size)
    assert cache.tokens(IDS) == len(made) * size // CHUNK_TOKENS * CHUNK_TOKENS
    assert cache.tokens([*IDS[:100], 1, *IDS[101:]]) == CHUNK_TOKENS


def test_blocks_may_come_in_several_events():
    cache = Cache()
    store(cache, IDS[:160])
    assert cache.tokens(IDS) == 128
    store(cache, IDS, start=10)
    assert cache.tokens(IDS) == 512


def test_what_stands_behind_a_block_that_was_removed_is_not_found_until_it_is_back():
    cache = Cache()
    made = store(cache, IDS)
    cache.blocks.remove([made[9]])
    assert cache.tokens(IDS) == 128
    cache.blocks.store(Stored([made[9]], made[8], IDS[144:160]))
    assert cache.tokens(IDS) == 512


def test_a_block_that_is_there_twice_is_gone_when_both_are():
    cache = Cache()
    made = store(cache, IDS)
    store(cache, IDS)
    cache.blocks.remove(made)
    assert cache.tokens(IDS) == 512
    cache.blocks.remove(made)
    assert (cache.found, len(cache.blocks)) == (set(), 0)
    cache.blocks.remove(made)  # a third time: of blocks that came before anyone listened
    store(cache, IDS)
    assert cache.tokens(IDS) == 512


def test_salts_and_adapters_keep_prompts_apart():
    cache = Cache()
    store(cache, IDS, root="s", extra_keys=[["salt"], *[None] * 31])
    store(cache, IDS[:128], root="l", lora_name="lora", extra_keys=[["lora"]] * 8)
    store(cache, IDS[:64], root="ls", lora_name="lora", extra_keys=[["lora", "salt"], *[["lora"]] * 3])
    asked = [(MODEL, None), (MODEL, "salt"), ("lora", None), ("lora", "salt"), ("lora", "other"), ("salt", None)]
    assert [cache.tokens(IDS, *one) for one in asked] == [0, 512, 128, 64, 0, 0]


def test_a_salt_that_is_called_as_the_adapter_is_a_salt():
    cache = Cache()
    store(cache, IDS[:64], lora_name="lora", extra_keys=[["lora", "lora"], *[["lora"]] * 3])
    assert (cache.tokens(IDS, "lora", "lora"), cache.tokens(IDS, "lora")) == (64, 0)


@pytest.mark.parametrize("foreign", [[b"embeddings"], ["salt", ["image", 0]], [["image", "0"]], [["image", 0, 1]], [7]])
def test_embeddings_and_what_nobody_knows_are_left_out_and_all_behind_them(foreign):
    cache = Cache()
    made = store(cache, IDS, extra_keys=[*[None] * 8, foreign, *[None] * 23])
    assert cache.tokens(IDS) == 128
    cache.blocks.store(Stored(["more"], made[-1], IDS[:16]))
    assert len(cache.blocks) == 8
    cache = Cache()
    store(cache, IDS, extra_keys=[foreign, *[None] * 31])
    assert (cache.found, len(cache.blocks)) == (set(), 0)


def keys_of(items, size, length=512):
    """Extra keys of each block as vLLM tells them; an item is its offset, its length and its name."""

    def keys(start):
        return [[name, at - start] for at, span, name in items if at < start + size and start < at + span]

    return [keys(start) or None for start in range(0, length, size)]


@pytest.mark.parametrize("size", [1, 16, 48, 64, 128, 200])
@pytest.mark.parametrize("offsets", [(0,), (63,), (64,), (130, 131), (100, 300)])
def test_prompts_are_kept_apart_by_their_images_from_where_these_begin(size, offsets):
    items = [(offset, 1 if offset == 130 else 90, f"image {number}") for number, offset in enumerate(offsets)]
    asked = [(offset, name) for offset, _, name in items]
    cache = Cache()
    made = store(cache, IDS, size, extra_keys=keys_of(items, size))
    whole = len(made) * size // CHUNK_TOKENS * CHUNK_TOKENS
    assert cache.tokens(IDS, items=asked) == whole
    for number, (offset, _) in enumerate(asked):
        other = [*asked[:number], (offset, "another"), *asked[number + 1 :]]
        assert cache.tokens(IDS, items=other) == offset // CHUNK_TOKENS * CHUNK_TOKENS
    assert cache.tokens(IDS) == offsets[0] // CHUNK_TOKENS * CHUNK_TOKENS


def test_images_stand_beside_salt_and_adapter():
    cache = Cache()
    keys = [["lora", ["image", 3], "salt"], *[["lora", ["image", -13]]] * 3]
    store(cache, IDS[:64], lora_name="lora", extra_keys=keys)
    assert cache.tokens(IDS, "lora", "salt", [(3, "image")]) == 64
    assert cache.tokens(IDS, "lora", None, [(3, "image")]) == cache.tokens(IDS, "lora", "salt") == 0


def test_blocks_behind_one_that_nobody_knows_are_left_out():
    cache = Cache()
    store(cache, IDS, start=4)
    assert (cache.found, len(cache.blocks)) == (set(), 0)


def test_clearing_takes_all():
    cache = Cache()
    store(cache, IDS)
    cache.blocks.clear()
    assert (cache.found, len(cache.blocks)) == (set(), 0)
    store(cache, IDS[:64])
    assert cache.tokens(IDS) == 64


def test_there_is_a_bound():
    cache = Cache(most=8)
    made = store(cache, IDS[:128])
    with pytest.raises(TooManyBlocksError, match="more than 8 blocks"):
        store(cache, IDS, start=8)
    cache.blocks.remove(made[4:])
    store(cache, IDS[:128], start=4)


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (Stored(["a", "b"], None, IDS[:31]), ValueError),
        (Stored(["a"], None, IDS, block_size=0), ValueError),
        (Stored(["a"], None, [-1] * 16), OverflowError),
    ],
)
def test_what_makes_no_sense_is_refused(stored, error):
    cache = Cache()
    with pytest.raises(error):
        cache.blocks.store(stored)
    assert not len(cache.blocks)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4)
"""Which of two runs of tokens stands at each place: prompts that share beginnings."""


def ids_of(prompt) -> list[int]:
    return [1000 * one + number for place, one in enumerate(prompt) for number in range(place * 64, place * 64 + 64)]


def shared(one, other) -> int:
    """How many tokens of whole chunks two prompts have in common at their beginnings."""
    alike = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(one), len(other)) if alike is None else alike) // CHUNK_TOKENS * CHUNK_TOKENS


@pytest.mark.parametrize("size", [16, 48, 128])
@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["store", "remove"]), prompts, st.integers(0, 15)), max_size=60))
def test_as_a_cache_that_is_walked_from_the_beginning(size, steps):
    cache, copies, seen = Cache(), {}, set()

    def found_of(prompt) -> list[int]:
        """The tokens of a prompt that are there, in whole chunks."""
        walked = names(ids_of(prompt), size)
        blocks = next((at for at, name in enumerate(walked) if not copies.get(name)), len(walked))
        return ids_of(prompt)[: blocks * size // CHUNK_TOKENS * CHUNK_TOKENS]

    for what, prompt, block in steps:
        seen.add(tuple(prompt))
        made = names(ids_of(prompt), size)
        if not made:
            continue
        if what == "store":
            # as an engine: what it does not find, it computes and stores
            found = next((at for at, name in enumerate(made) if not copies.get(name)), len(made))
            if found < len(made):
                store(cache, ids_of(prompt), size, start=found)
                for name in made[found:]:
                    copies[name] = copies.get(name, 0) + 1
        elif copies.get(name := made[min(block, len(made) - 1)]):
            copies[name] -= 1
            cache.blocks.remove([name])
        for asked in ([0, 0, 0], [0, 1, 0], [1, 1, 1], prompt):
            # a chunk is there if it is in anything that is, also in a block that goes on differently
            assert cache.tokens(ids_of(asked)) == max(shared(found_of(one), ids_of(asked)) for one in seen)
    cache.blocks.remove([name for name, count in copies.items() for _ in range(count)])
    assert (cache.found, len(cache.blocks)) == (set(), 0), "nothing is kept of what is gone"


@pytest.mark.parametrize(("size", "prompts"), [(128, ([0, 0], [0, 1])), (48, ([0, 0], [0, 1]))])
def test_a_chunk_that_two_blocks_share_is_there_as_long_as_one_of_them(size, prompts):
    cache = Cache()
    one, other = (store(cache, ids_of(prompt), size, start=0) for prompt in prompts)
    cache.blocks.remove(one[-1:])
    assert cache.tokens(ids_of(prompts[1])) >= CHUNK_TOKENS
    cache.blocks.remove(other[-1:])
    assert cache.found == set()
