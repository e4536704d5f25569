"""Which pieces of a transfer can leave now. Pure bookkeeping: no engine, no tensors.

A transfer is complete when every layer has given every wanted block. Blocks become ready from the first to the last
with each chunk, so what is there is kept as one count a layer; layers become ready in any order, though mostly from the
first to the last. A piece is cut from neighbouring layers that stand at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of block indexes, ascending."""


def count(ranges: Ranges) -> int:
    """Blocks in ``ranges``."""
    return sum(end - start for start, end in ranges)


def indexes(ranges: Ranges) -> list[int]:
    """The block indexes in ``ranges``."""
    return [index for start, end in ranges for index in range(start, end)]


def ranges_of(wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indexes as ranges."""
    ranges: list[tuple[int, int]] = []
    for index in wanted:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def part(ranges: Ranges, start: int, end: int) -> list[tuple[int, int]]:
    """The blocks from the ``start``-th to the ``end``-th of ``ranges``."""
    cut, at = [], 0
    for low, high in ranges:
        size = high - low
        first, last = max(start - at, 0), min(end - at, size)
        if first < last:
            cut.append((low + first, low + last))
        at += size
    return cut


def below(ranges: Ranges, limit: int) -> int:
    """How many blocks of ``ranges`` have an index below ``limit``."""
    return sum(max(0, min(end, limit) - start) for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece to be."""

    group: int
    layers: tuple[int, ...]
    start: int
    end: int
    """The blocks from the ``start``-th to the ``end``-th of those wanted in the group."""


class Coverage:
    """What of a transfer is wanted, ready and sent."""

    def __init__(self, groups: Sequence[int], block_bytes: Sequence[int]) -> None:
        """
        Args:
            groups: the cache group of each layer.
            block_bytes: bytes of a block, by layer.
        """
        self._groups = tuple(groups)
        self._block_bytes = tuple(block_bytes)
        self._ready = [0] * len(groups)
        self._can = [0] * len(groups)
        """How many of the wanted blocks are ready, by layer."""
        self._sent = [0] * len(groups)
        self._from = 0
        """Layers before this one have nothing to send: most of the time all but the last few do."""
        self._totals: list[int] = []
        self.wanted: list[list[tuple[int, int]]] | None = None

    def want(self, ranges: Sequence[Ranges]) -> None:
        """Decode says which blocks it lacks, by group; what was sent before counts no more.

        Raises:
            ValueError: there are not as many groups.
        """
        if len(ranges) <= max(self._groups):
            raise ValueError(f"decode asked for {len(ranges)} cache groups, there are {max(self._groups) + 1}")
        self.wanted = [list(one) for one in ranges]
        self._totals = [count(one) for one in ranges]
        self._sent = [0] * len(self._groups)
        self._can = [below(self.wanted[group], ready) for group, ready in zip(self._groups, self._ready, strict=True)]
        self._from = 0

    def ready(self, layers: Sequence[int], blocks: Sequence[int]) -> None:
        """The first ``blocks[group]`` blocks of these layers are computed."""
        for layer in layers:
            group = self._groups[layer]
            if blocks[group] <= self._ready[layer]:
                continue
            self._ready[layer] = blocks[group]
            if self.wanted is not None:
                self._can[layer] = below(self.wanted[group], blocks[group])
                self._from = min(self._from, layer)

    def reset_ready(self) -> None:
        """Prefill lost its blocks and begins again; what has been sent stays sent."""
        self._ready = [0] * len(self._groups)
        self._can = [0] * len(self._groups)

    def next(self, most_bytes: int) -> Cut | None:
        """The next piece of at most so many bytes (one block of one layer at least), or None if none is ready."""
        layers = len(self._groups)
        while self._from < layers and self._sent[self._from] >= self._can[self._from]:
            self._from += 1
        if self._from == layers:
            return None
        first, group, size = self._from, self._groups[self._from], self._block_bytes[self._from]
        start = self._sent[first]
        end = min(self._can[first], start + max(1, most_bytes // size))
        left = most_bytes - (end - start) * size
        cut = [first]
        for other in range(first + 1, layers):
            if self._groups[other] != group:
                continue
            fits = (end - start) * self._block_bytes[other] <= left
            if not fits or self._sent[other] != start or self._can[other] < end:
                break
            cut.append(other)
            left -= (end - start) * self._block_bytes[other]
        return Cut(group, tuple(cut), start, end)

    def sent(self, cut: Cut) -> None:
        """A piece has left."""
        for layer in cut.layers:
            self._sent[layer] = max(self._sent[layer], cut.end)

    def is_complete(self) -> bool:
        """Whether every layer has given every wanted block."""
        if self.wanted is None:
            return False
        return all(self._sent[layer] >= self._totals[group] for layer, group in enumerate(self._groups))


class Arrivals:
    """What of a transfer has come, by layer. Pieces of a layer come in order."""

    def __init__(self, groups: Sequence[int], wanted: Sequence[Ranges]) -> None:
        """
        Args:
            groups: the cache group of each layer.
            wanted: what must come, by group.
        """
        self._wanted = [list(wanted[group]) for group in groups]
        self._totals = [count(one) for one in self._wanted]
        self._came = [0] * len(groups)

    def check(self, layers: Sequence[int], ranges: Ranges) -> None:
        """A piece is to be written: all blocks that it names are wanted.

        Raises:
            ValueError: it is not what these layers miss next.
        """
        if len(set(layers)) != len(layers):
            raise ValueError("a layer was sent twice")
        size = count(ranges)
        for layer in layers:
            start = self._came[layer]
            if part(self._wanted[layer], start, start + size) != [tuple(one) for one in ranges]:
                raise ValueError(f"layer {layer} was sent blocks {list(ranges)} behind its first {start}")

    def came(self, layers: Sequence[int], ranges: Ranges) -> None:
        """A piece that was checked has been written."""
        size = count(ranges)
        for layer in layers:
            self._came[layer] += size

    def is_complete(self) -> bool:
        """Whether no layer misses a block."""
        return self._came == self._totals

    def missing(self) -> Iterator[tuple[int, int]]:
        """Layers that miss blocks, with the number of blocks."""
        for layer, (came, total) in enumerate(zip(self._came, self._totals, strict=True)):
            if came < total:
                yield layer, total - came
