"""The KV pool's books, whatever happens to it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from trivet.sim.pool import BlockPool, Keys

SIZE = 4


def keys(ids, salt=None) -> list[bytes]:
    made = Keys(SIZE, salt)
    made.extend(ids)
    return made.made


class Pool(RuleBasedStateMachine):
    """Requests that come, grow, are cached, held and leave, against a pool of 12 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.used: list[list[int]] = []
        self.held: list[list[int]] = []

    requests = Bundle("requests")
    holds = Bundle("holds")

    @rule(target=requests, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, prompt):
        found = self.pool.find(keys(prompt))
        new = -(-len(prompt) // SIZE) - len(found)
        free = self.pool.free
        blocks = self.pool.take(found, new)
        if blocks is None:
            assert new + len(found) > free - 0 or new > free
            return None
        assert len(set(blocks)) == len(blocks) == -(-len(prompt) // SIZE)
        assert all(block not in other[len(found) :] for other in self.used for block in blocks[len(found) :])
        for block, key in zip(blocks, keys(prompt), strict=False):
            self.pool.remember(block, key)
        assert self.pool.find(keys(prompt)) != [] or len(prompt) < SIZE
        self.used.append(blocks)
        return blocks

    @rule(blocks=consumes(requests))
    def leave(self, blocks):
        if blocks is not None:
            self.used.remove(blocks)
            self.pool.give_back(blocks)

    @rule(target=holds, blocks=consumes(requests))
    def leave_and_hold(self, blocks):
        if blocks is None:
            return None
        self.pool.hold(blocks)
        self.used.remove(blocks)
        self.pool.give_back(blocks)
        self.held.append(blocks)
        return blocks

    @rule(blocks=consumes(holds))
    def let_go(self, blocks):
        if blocks is not None:
            self.held.remove(blocks)
            self.pool.let_go(blocks)

    @invariant()
    def the_books_are_right(self):
        self.pool.check()
        used = {block for blocks in self.used for block in blocks}
        held = {block for blocks in self.held for block in blocks} - used
        assert (self.pool.used, self.pool.held) == (len(used), len(held))
        assert self.pool.free + self.pool.used + self.pool.held == 12


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_beginning_is_found_again_after_it_was_given_back():
    pool = BlockPool(4)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    blocks = pool.take((), 3)
    assert blocks is not None
    for block, key in zip(blocks, keys(ids), strict=False):
        pool.remember(block, key)
    pool.give_back(blocks)
    assert pool.find(keys(ids)) == blocks[:2]
    assert pool.find(keys([1, 2, 3, 4, 0, 0, 0, 0])) == blocks[:1]
    assert pool.find(keys([0, 2, 3, 4, 5, 6, 7, 8])) == []
    assert pool.find(keys(ids, "salt")) == []
    assert (pool.free, pool.cached) == (4, 2)


def test_what_is_reused_is_forgotten_the_oldest_last_block_first():
    pool = BlockPool(3)
    blocks = pool.take((), 3)
    assert blocks is not None
    for block, key in zip(blocks, keys(range(12)), strict=True):
        pool.remember(block, key)
    pool.give_back(blocks)
    assert pool.take((), 1) == [blocks[2]]
    assert pool.find(keys(range(12))) == blocks[:2]


def test_without_caching_nothing_is_found():
    pool = BlockPool(2, caching=False)
    (block,) = pool.take((), 1) or []
    pool.remember(block, keys(range(4))[0])
    assert pool.find(keys(range(4))) == []


def test_too_few_blocks_change_nothing():
    pool = BlockPool(2)
    assert pool.take((), 3) is None
    assert (pool.free, pool.used) == (2, 0)


def test_giving_back_twice_is_noticed():
    pool = BlockPool(2)
    blocks = pool.take((), 1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(blocks)
    pool.used += 1
    with pytest.raises(AssertionError):
        pool.check()
