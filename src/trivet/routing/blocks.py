"""An engine's prefix cache as its KV events tell it: blocks under blocks, and which chunks of the gateway's they make.

Engines name blocks by hashes of their own, which depend on their version, seed and settings. Here a name is only a
name: what a block holds is told by its token ids and by the block it stands under, so that chains are made as the
gateway makes those of prompts, whatever an engine's block size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from trivet.routing.prefixes import grow, named, token_root

Name = int | bytes
"""An engine's name of a block."""

MOST_BLOCKS = 2**18
"""Of one engine: four million tokens in blocks of 16, about 100 MB here."""


class TooManyBlocksError(Exception):
    """An engine has told of more blocks than are kept."""


class Stored(Protocol):
    """Blocks that an engine has put into its cache, one after the other: vLLM's ``BlockStored``."""

    @property
    def block_hashes(self) -> Sequence[Name]:
        """Their names."""

    @property
    def parent_block_hash(self) -> Name | None:
        """The block before the first; None if that begins a prompt."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Of all of them."""

    @property
    def block_size(self) -> int:
        """Tokens of each."""

    @property
    def lora_name(self) -> str | None:
        """The adapter."""

    @property
    def extra_keys(self) -> Sequence[Sequence[object] | None] | None:
        """For each block, what else its name is made of."""


class _Block:
    """One block; a root, before all blocks of one adapter and salt, has no name and is always there."""

    __slots__ = ("above", "after", "before", "chunks", "copies", "first", "name", "parent", "reached", "rest", "root")

    def __init__(self, name: Name | None, above: _Block | None, parent: bytes, rest: bytes) -> None:
        self.name = name
        self.root: tuple[str, str | None] | None = None
        """Of a root: the model or adapter, and the salt."""
        self.above = above
        self.first: _Block | None = None
        """Of the blocks under it, which are a list by ``before`` and ``after``."""
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.parent = parent
        self.rest = rest
        """Of the chain, behind this block; see ``grow``."""
        self.chunks: Sequence[int] = ()
        """Chunks that end in it."""
        self.copies = 0
        """An engine that computes one prompt twice at a time has each block twice."""
        self.reached = False
        """It and all before it are there: only then does an engine find it."""

    def children(self) -> Iterator[_Block]:
        below = self.first
        while below is not None:
            yield below
            below = below.after

    def attach(self, below: _Block) -> None:
        below.after = self.first
        if self.first is not None:
            self.first.before = below
        self.first = below

    def detach(self, below: _Block) -> None:
        if below.before is not None:
            below.before.after = below.after
        else:
            self.first = below.after
        if below.after is not None:
            below.after.before = below.before


class Blocks:
    """The blocks of one engine."""

    def __init__(
        self,
        served_name: str,
        add: Callable[[Sequence[int]], None],
        drop: Callable[[Sequence[int]], None],
        most: int = MOST_BLOCKS,
    ) -> None:
        """
        Args:
            served_name: what prompts for the model itself are hashed under; see ``token_root``.
            add: told chunks that the engine can find from now on.
            drop: told chunks that it can find no more.
            most: blocks that are kept.
        """
        self._served_name = served_name
        self._add = add
        self._drop = drop
        self._most = most
        self._by_name: dict[Name, _Block] = {}
        self._roots: dict[tuple[str, str | None], _Block] = {}
        self._holders: dict[int, int] = {}
        """For each chunk that can be found, in how many blocks it ends: blocks that are longer than a chunk, or not
        aligned to chunks, may share one and go on differently."""

    def __len__(self) -> int:
        return len(self._by_name)

    def store(self, stored: Stored) -> None:
        """Takes in new blocks.

        Blocks of embeddings, and those behind them, are left out: the gateway does not hash such prompts. So are those
        behind a block that is not known.

        Raises:
            TooManyBlocksError: there are more than are kept.
            OverflowError: what it has are no token ids.
            ValueError: it has more blocks than tokens for them.
        """
        size, names = stored.block_size, stored.block_hashes
        ids = array("I", stored.token_ids)
        if size < 1 or len(ids) < size * len(names):
            raise ValueError(f"{len(names)} blocks of {size} tokens in {len(stored.token_ids)} tokens")
        begins = stored.parent_block_hash is None
        above = None if begins else self._by_name.get(stored.parent_block_hash)  # type: ignore[arg-type]
        for number, name in enumerate(names):
            keys = stored.extra_keys[number] if stored.extra_keys is not None else None
            salt, items = _keys(keys, stored.lora_name, may_be_salted=begins and number == 0)
            if items is None:
                return
            if above is None:
                if not begins or number:
                    return
                above = self._root(stored.lora_name or self._served_name, salt)
            above = self._put(name, above, named(ids[number * size : (number + 1) * size], items))

    def remove(self, names: Sequence[Name]) -> None:
        """Takes blocks out: a copy of each."""
        for name in names:
            block = self._by_name.get(name)
            if block is None or not block.copies:
                continue
            block.copies -= 1
            if not block.copies:
                self._lose(block)
                self._prune(block)

    def clear(self) -> None:
        """Takes out all of them."""
        for root in self._roots.values():
            for block in root.children():
                self._lose(block)
        self._by_name.clear()
        self._roots.clear()

    def _root(self, model: str, salt: str | None) -> _Block:
        root = self._roots.get((model, salt))
        if root is None:
            root = self._roots[model, salt] = _Block(None, None, token_root(model, salt), b"")
            root.root, root.reached = (model, salt), True
        return root

    def _put(self, name: Name, above: _Block, data: bytes) -> _Block:
        block = self._by_name.get(name)
        if block is None:
            if len(self._by_name) >= self._most:
                raise TooManyBlocksError(f"more than {self._most} blocks")
            chunks, parent, rest = grow(above.parent, above.rest + data)
            block = self._by_name[name] = _Block(name, above, parent, rest)
            block.chunks = chunks or ()
            above.attach(block)
        block.copies += 1
        if block.copies == 1:
            self._reach(block)
        return block

    def _reach(self, block: _Block) -> None:
        """Notes what can be found now that a block is there."""
        waiting = [block]
        while waiting:
            one = waiting.pop()
            if one.copies and not one.reached and one.above is not None and one.above.reached:
                one.reached = True
                if one.chunks:
                    self._hold(one.chunks)
                waiting += one.children()

    def _lose(self, block: _Block) -> None:
        """Notes what can be found no more: a block, and all behind it."""
        waiting = [block]
        while waiting:
            one = waiting.pop()
            if one.reached:
                one.reached = False
                if one.chunks:
                    self._let_go(one.chunks)
                waiting += one.children()

    def _hold(self, chunks: Sequence[int]) -> None:
        """Notes one more block of chunks; those of which it is the first are told."""
        holders, new = self._holders, []
        for chunk in chunks:
            count = holders.get(chunk, 0)
            holders[chunk] = count + 1
            if not count:
                new.append(chunk)
        if new:
            self._add(new)

    def _let_go(self, chunks: Sequence[int]) -> None:
        """Notes one block of chunks less; those of which it was the last are told."""
        holders, gone = self._holders, []
        for chunk in chunks:
            count = holders.pop(chunk) - 1
            if count:
                holders[chunk] = count
            else:
                gone.append(chunk)
        if gone:
            self._drop(gone)

    def _prune(self, block: _Block) -> None:
        """Forgets a block that is gone, if nothing behind it is there; and those before it likewise."""
        while block.name is not None and not block.copies and block.first is None:
            assert block.above is not None
            del self._by_name[block.name]
            block.above.detach(block)
            block = block.above
        if block.root is not None and block.first is None:
            del self._roots[block.root]


def _keys(
    keys: Sequence[object] | None, adapter: str | None, *, may_be_salted: bool
) -> tuple[str | None, list[tuple[int, str]] | None]:
    """The ``cache_salt`` among a block's extra keys, and its images: where each begins in the block, and its name.

    None for the latter where there is anything else, that no prompt here has. They come untagged: the adapter's name,
    images as pairs, the salt (of a prompt's first block only), embeddings as bytes (``to_event_extra_keys`` in
    ``vllm/v1/core/kv_cache_utils.py``). An image that began in a block before is told to begin before this one's first
    token: it is in the chain already.
    """
    rest = list(keys or ())
    if adapter is not None and rest and rest[0] == adapter:
        del rest[0]
    salt = rest.pop() if may_be_salted and rest and isinstance(rest[-1], str) else None
    items = []
    for one in rest:
        match one:
            case (str() as name, int() as offset):
                if offset >= 0:
                    items.append((offset, name))
            case _:
                return None, None
    return (salt if isinstance(salt, str) else None), items
