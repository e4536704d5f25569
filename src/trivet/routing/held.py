"""What engines hold in their prefix caches as they tell themselves: one worker writes it, all of them read it.

The memory is a region of the board. For each engine there is a row: whose it is (``number_of`` its name and
generation), the key under which its chunks stand in the table, and when it was last verified that nothing it told was
missed. An engine whose row is old is not known here, and ``PrefixTable`` guesses. The table has a tag of 64 bits for
each chunk, its hash mixed with the engine's key, in sets of eight. Where a set is full a chunk is left out: of that
engine less is known then than it has, never more.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trivet.routing.engines import EngineView
from trivet.routing.prefixes import CHUNK_TOKENS, Known, Prefix, number_of

HELD_REGION = "held"
"""The name of this memory on the board that workers share."""
FRESH_S = 5.0
"""How long it counts that nothing an engine told was missed."""

_ROWS = 1024
"""Engines; the board has fewer slots."""
_ROW_CELLS = 4
_WHO, _KEY, _VERIFIED, _WHOLE = range(_ROW_CELLS)
_CELL = 8
_WAYS = 8
HELD_BYTES = (_ROWS * _ROW_CELLS + 2**19) * _CELL
"""Rows, and a table of half a million chunks: 33 million tokens. Pages that nobody touches take no room."""


class Told(NamedTuple):
    """What an engine has told about a prompt."""

    known: Known
    whole: bool
    """False if it may have more: what it had computed before anyone listened."""


class Held:
    """The memory as any worker sees it. Only the worker that leads calls what begins with a verb of writing."""

    def __init__(
        self, memory: bytearray | memoryview | None = None, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """
        Args:
            memory: ``HELD_BYTES``, aligned to 8 bytes and zeroed by whoever made it; private memory unless given.
            now_ns: a clock that all processes share; nanoseconds, never 0.
        """
        view = memoryview(bytearray(HELD_BYTES) if memory is None else memory).cast("B")[:HELD_BYTES].cast("Q")
        self._rows = view[: _ROWS * _ROW_CELLS]
        self._tags = view[_ROWS * _ROW_CELLS :]
        self._mask = len(self._tags) // _WAYS - 1
        self._now_ns = now_ns

    # for everyone

    def told(self, prefix: Prefix, engine: EngineView) -> Told | None:
        """How much of a prompt an engine says it holds: whole chunks, cut to whole blocks of its own.

        None where nothing can be said: it tells nothing, what it told may be out of date, or the prompt is known by
        its text only.
        """
        block, row = engine.cached_block_tokens, self._row(engine)
        if row is None or not block or not prefix.of_tokens:
            return None
        tags, mask, key = self._tags, self._mask, row[_KEY]

        def is_missing(chunk: int) -> bool:
            tag = chunk ^ key
            start = (tag & mask) * _WAYS
            return tag not in tags[start : start + _WAYS].tolist()

        # an engine's chunks are here only if all before them are held: looked for by halves
        chunks = bisect_left(prefix.hashes, True, key=is_missing)
        tokens = min(chunks * CHUNK_TOKENS, prefix.prompt_tokens - 1) // block * block
        return Told(Known(max(0, tokens), told=True), bool(row[_WHOLE]))

    def is_live(self, engine: EngineView) -> bool:
        """Whether what the engine tells arrives, and nothing was missed."""
        return self._row(engine) is not None

    def _row(self, engine: EngineView) -> list[int] | None:
        if engine.slot is None or engine.slot >= _ROWS:
            return None
        row = self._rows[engine.slot * _ROW_CELLS : (engine.slot + 1) * _ROW_CELLS].tolist()
        fresh = row[_VERIFIED] + FRESH_S * 1e9 > self._now_ns()
        return row if fresh and row[_WHO] == number_of(engine.name, engine.generation) else None

    # for the one that leads

    def clear(self) -> None:
        """Takes all away: what a leader before this one wrote, it alone could have kept up to date."""
        rows = self._rows
        for at in range(_VERIFIED, len(rows), _ROW_CELLS):
            if rows[at]:
                rows[at] = 0
        self._tags[:] = memoryview(bytes(self._tags.nbytes)).cast("Q")

    def add(self, key: int, chunks: Iterable[int]) -> None:
        """Notes that an engine holds chunks, and all before them."""
        tags, mask = self._tags, self._mask
        for chunk in chunks:
            tag = chunk ^ key
            start = (tag & mask) * _WAYS
            ways = tags[start : start + _WAYS].tolist()
            if tag not in ways and 0 in ways:
                tags[start + ways.index(0)] = tag

    def drop(self, key: int, chunks: Iterable[int]) -> None:
        """Notes that an engine holds chunks no more."""
        tags, mask = self._tags, self._mask
        for chunk in chunks:
            tag = chunk ^ key
            start = (tag & mask) * _WAYS
            ways = tags[start : start + _WAYS].tolist()
            if tag in ways:
                tags[start + ways.index(tag)] = 0

    def verify(self, engine: EngineView, key: int, *, whole: bool) -> None:
        """Notes that up to now nothing was missed of what an engine told.

        Args:
            key: under which its chunks stand.
            whole: it holds nothing but what it told.
        """
        if engine.slot is not None and engine.slot < _ROWS:
            at = engine.slot * _ROW_CELLS
            self._rows[at + _KEY], self._rows[at + _WHOLE] = key, whole
            self._rows[at + _WHO] = number_of(engine.name, engine.generation)
            self._rows[at + _VERIFIED] = self._now_ns()

    def doubt(self, engine: EngineView, key: int) -> None:
        """Takes ``verify`` back, if it was for this key."""
        if engine.slot is not None and engine.slot < _ROWS:
            at = engine.slot * _ROW_CELLS
            if self._rows[at + _KEY] == key:
                self._rows[at + _VERIFIED] = 0


def new_key() -> int:
    """A key for an engine's chunks that nobody has had."""
    return int.from_bytes(os.urandom(_CELL), "little") or 1
