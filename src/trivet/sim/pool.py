"""The KV pool: blocks, the prefix cache over them, and blocks that finished requests still hold for decode."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

from trivet.sim.tokens import id_bytes

Key = bytes
"""Names the content of a block: all tokens up to its end, and the cache salt."""


class Keys:
    """The keys of a sequence's blocks, made as the blocks fill."""

    __slots__ = ("_block_size", "_done", "_hash", "made")

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        self._hash = hashlib.blake2b((salt or "").encode(), digest_size=16)
        self._done = 0
        self.made: list[Key] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Makes the keys of all whole blocks of the sequence, which begins as before."""
        size = self._block_size
        while self._done + size <= len(token_ids):
            self._hash.update(id_bytes(token_ids[self._done : self._done + size]))
            self.made.append(self._hash.copy().digest())
            self._done += size


class BlockPool:
    """Blocks are free (perhaps with content that may be found again), used by requests, or held for decode.

    ``free + used + held == total`` always; a block that a request uses and another one holds counts as used.
    """

    def __init__(self, blocks: int, *, caching: bool = True, evicted: Callable[[Key], None] = lambda _: None) -> None:
        """
        Args:
            evicted: told the content that can be found no more.
        """
        self._evicted = evicted
        self.total = blocks
        self.used = 0
        self.held = 0
        self._caching = caching
        self._users = [0] * blocks
        self._holders = [0] * blocks
        self._keys: list[Key | None] = [None] * blocks
        self._by_key: dict[Key, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))

    @property
    def free(self) -> int:
        """Blocks that nobody uses or holds."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks whose content can be found again."""
        return len(self._by_key)

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest known beginning."""
        found: list[int] = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return found

    def take(self, found: Sequence[int], new: int) -> list[int] | None:
        """Blocks for a request: those found in the cache, then new ones. None if there are too few."""
        if new + sum(block in self._free for block in found) > len(self._free):
            return None
        for block in found:
            self._use(block)
        return [*found, *(self._take_one() for _ in range(new))]

    def remember(self, block: int, key: Key) -> bool:
        """Names the content of a used block, so that it can be found again; whether it could not before."""
        if not self._caching or self._keys[block] is not None or key in self._by_key:
            return False
        self._keys[block] = key
        self._by_key[key] = block
        return True

    def clear(self) -> bool:
        """Forgets all content; not while a block is used or held, as vLLM (``reset_prefix_cache``)."""
        if self.used or self.held:
            return False
        self._by_key.clear()
        self._keys = [None] * self.total
        return True

    def give_back(self, blocks: Sequence[int]) -> None:
        """Ends a request's use of its blocks. The last ones are reused first: beginnings are worth more."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} was given back twice"
            if self._users[block] == 0:
                self.used -= 1
                self._rest(block)

    def hold(self, blocks: Sequence[int]) -> None:
        """Keeps blocks for a decode engine; a request that uses them gives them back besides."""
        for block in blocks:
            self._holders[block] += 1

    def let_go(self, blocks: Sequence[int]) -> None:
        """Ends a hold."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was let go twice"
            if self._holders[block] == 0 and self._users[block] == 0:
                self.held -= 1
                self._free[block] = None

    def check(self) -> None:
        """Counts everything anew.

        Raises:
            AssertionError: the books are wrong.
        """
        used = sum(count > 0 for count in self._users)
        held = sum(holders > 0 and users == 0 for holders, users in zip(self._holders, self._users, strict=True))
        idle = {block for block in range(self.total) if not self._users[block] and not self._holders[block]}
        assert (used, held) == (self.used, self.held), f"used {used}/{self.used}, held {held}/{self.held}"
        assert idle == set(self._free), "a block is free and taken, or neither"
        assert self.free + self.used + self.held == self.total, "blocks are missing"
        named = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {key: block for block, key in named.items()} == self._by_key, "the cache names other blocks"

    def _use(self, block: int) -> None:
        self._users[block] += 1
        if self._users[block] == 1:
            self.used += 1
            if self._holders[block]:
                self.held -= 1
            else:
                del self._free[block]

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        if (key := self._keys[block]) is not None:
            del self._by_key[key]
            self._keys[block] = None
            self._evicted(key)
        self._users[block] = 1
        self.used += 1
        return block

    def _rest(self, block: int) -> None:
        if self._holders[block]:
            self.held += 1
        else:
            self._free[block] = None
