"""What the workers of one gateway know together: shared memory in which each of them writes a row of its own.

Every number is an aligned cell of 64 bits, which a processor reads and writes whole. A row has one writer, its worker,
so counting needs no lock; a reader sums over the rows. The row of a worker that died is cleared by whoever started it
(``clear``), and with it what that worker had counted. The memory has no name (``memfd_create``): it is handed on as a
descriptor, and is gone with the last process that has it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple, Protocol

from trivet.routing.proofs import Proof

LAYOUT = 3
"""Version of what follows. Workers are started anew with the code of their service, so no other is ever read."""

_MAGIC = int.from_bytes(b"trivetbd", "little")
_CELL = 8
_PAGE = 4096

# the header: cells, then the directory of the regions
_H_MAGIC, _H_LAYOUT, _H_WORKERS, _H_ENGINES, _H_BYTES, _H_REGIONS, _H_TICKET, _H_LOCK = range(8)
_DIRECTORY = 64
_ENTRY, _NAME = 64, 48
_MOST_REGIONS = 8
_ROWS = 1024

_HEAD_CELLS = 16
_ENGINE_CELLS = 3  # tokens, legs, turn: each a run of as many cells as there are slots
_PAIR_CELLS = 8  # mean, count, both generations; proof, both generations, the last trouble: a cache line

_ALIVE_NS = 1_500_000_000
BEAT_S = 0.5
"""How often a worker should call ``beat``; one that has missed three counts as gone until it comes back."""

_SETTLED = 8
"""Samples after which a handover's mean forgets: each newer one then weighs an eighth."""


class Count(IntEnum):
    """What a worker counts besides the load of engines; the number of its cell in the row."""

    GENERATIONS = 2
    """Generations under way."""
    RUNNING = 3
    """Requests that have a place. This and the next two are written where several workers share a line only."""
    WAITING = 4
    """Requests that wait for one."""
    TICKET = 5
    """The ticket of the one that has waited longest; 0 if none waits."""
    RELEASES_PENDING = 6
    RELEASES_UNCONFIRMED = 7


_BEAT, _TURN = 0, 1
_HEARD, _TROUBLED = 8, 9


class BoardError(Exception):
    """The memory behind a descriptor is no board of this layout, or a board was asked for what it cannot hold."""


class Handover(NamedTuple):
    """What a handover between two engines has cost."""

    mean_s: float
    """Exponentially weighted: of the first eight the plain mean, then each newer one weighs an eighth."""
    samples: int
    """How many were measured since either of the two was started."""


class Seated(Protocol):
    """An engine as the board knows it; an ``EngineView`` is one."""

    @property
    def slot(self) -> int | None:
        """Its column."""

    @property
    def generation(self) -> int:
        """Raised each time it is started anew."""


class Board:
    """Counts, pairs and regions that the workers of a gateway share.

    Reading needs no lock and sees each cell whole; two cells that belong together may be from two moments. Every
    ``slot`` and ``worker`` is checked: one that is out of bounds is an ``IndexError``.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int | None, worker: int | None) -> None:
        """Use ``create``, ``open`` or ``private``."""
        self._bytes = memoryview(memory)
        self._cells = self._bytes.cast("q")
        self.descriptor = descriptor
        """The memory, for ``pass_fds`` and ``open``; None for a private board. Closed with the board."""
        self.worker = worker
        """Whose row is written here; None for who only reads and clears."""
        self.workers: int = self._cells[_H_WORKERS]
        """Rows."""
        self.engines: int = self._cells[_H_ENGINES]
        """Slots."""
        if worker is not None and not 0 <= worker < self.workers:
            raise IndexError(f"worker {worker} of {self.workers}")
        self._stride = _row_cells(self.engines)
        self._first = _ROWS // _CELL
        self._end = self._first + self.workers * self._stride
        self._own = -1 if worker is None else self._first + worker * self._stride
        self.lock = _Lock(descriptor)
        """Held by one process of all, which must not wait inside; the kernel lets go of it when that process ends."""
        # every descriptor of the memory that a process closes takes its locks along, so there is this one only
        self._closing = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, workers: int, engines: int, regions: Mapping[str, int] | None = None) -> Board:
        """A new board in memory of its own, all zeros, with nobody's row to write.

        Args:
            workers: rows.
            engines: slots.
            regions: names of further memory, with their sizes in bytes.

        Raises:
            BoardError: too many regions, or a name that is too long.
        """
        descriptor = os.memfd_create("trivet-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = _size(workers, engines, regions or {})
            os.ftruncate(descriptor, size)
            # nobody can take memory away under a worker that has it mapped
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(descriptor, size)
            _lay_out(memory, workers, engines, regions or {})
            return cls(memory, descriptor, None)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, descriptor: int, worker: int) -> Board:
        """The board behind an inherited descriptor, which is the board's from here on.

        Raises:
            BoardError: there is none, or one of another layout.
            IndexError: it has no such row.
        """
        size = os.fstat(descriptor).st_size
        if size < _ROWS:
            raise BoardError(f"descriptor {descriptor} holds no board")
        memory = mmap.mmap(descriptor, size)
        with memoryview(memory) as whole, whole[:_ROWS].cast("q") as cells:
            if cells[_H_MAGIC] != _MAGIC:
                raise BoardError(f"descriptor {descriptor} holds no board")
            if cells[_H_LAYOUT] != LAYOUT:
                raise BoardError(f"a board of layout {cells[_H_LAYOUT]}; this is {LAYOUT}")
            if cells[_H_BYTES] != size:
                raise BoardError(f"a board of {cells[_H_BYTES]} bytes in {size}")
        return cls(memory, descriptor, worker)

    @classmethod
    def private(cls, engines: int = 256, regions: Mapping[str, int] | None = None) -> Board:
        """A board of this process alone, with the one row that there is to write."""
        memory = mmap.mmap(-1, _size(1, engines, regions or {}))  # pages that nobody touches take no room
        _lay_out(memory, 1, engines, regions or {})
        return cls(memory, None, 0)

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last view of it."""
        if self._closing is not None:
            self._closing()

    # counts

    def write(self, count: Count, value: int) -> None:
        """Says this worker's count."""
        self._cells[self._mine() + count] = value

    def mine(self, count: Count) -> int:
        """What this worker has said."""
        return self._cells[self._mine() + count]

    def total(self, count: Count) -> int:
        """Summed over all workers."""
        return self._sum(count)

    def each(self, count: Count) -> list[int]:
        """What each worker has said, by its number."""
        return self._cells[self._first + count : self._end : self._stride].tolist()

    def charge(self, slot: int, tokens: int, legs: int) -> None:
        """Adds to an engine's tokens and legs in this worker's row; negative numbers take off."""
        cell = self._mine() + _HEAD_CELLS + self._checked(slot)
        self._cells[cell] += tokens
        self._cells[cell + self.engines] += legs

    def outstanding_tokens(self, slot: int) -> int:
        """Tokens of legs that all workers have running on an engine."""
        return self._sum(_HEAD_CELLS + self._checked(slot))

    def running_legs(self, slot: int) -> int:
        """Legs that all workers have running on an engine."""
        return self._sum(_HEAD_CELLS + self.engines + self._checked(slot))

    def take_turn(self, slot: int) -> None:
        """Notes that an engine was chosen: later than any other that any worker has chosen so far."""
        own, turn = self._mine(), self._max(_TURN) + 1
        self._cells[own + _TURN] = turn
        self._cells[own + _HEAD_CELLS + 2 * self.engines + self._checked(slot)] = turn

    def last_turn(self, slot: int) -> int:
        """When an engine was chosen last, by any worker; 0 if never."""
        return self._max(_HEAD_CELLS + 2 * self.engines + self._checked(slot))

    # pairs

    def note_handover(self, prefill: Seated, decode: Seated, seconds: float) -> None:
        """Counts one measured handover. Two workers that note one at the same moment may lose one of them."""
        if prefill.slot is None or decode.slot is None:
            return
        cells, at = self._cells, self._pair(prefill.slot, decode.slot)
        generations = (prefill.generation, decode.generation)
        nanoseconds = max(0, round(seconds * 1e9))
        count = cells[at + 1] if (cells[at + 2], cells[at + 3]) == generations else 0
        if not count:
            cells[at + 1] = 0  # first, so that nobody takes the old mean for the new engines'
            cells[at + 2], cells[at + 3] = generations
        mean = cells[at] if count else nanoseconds
        cells[at] = mean + (nanoseconds - mean) // min(count + 1, _SETTLED)
        cells[at + 1] = count + 1

    def handover(self, prefill: Seated, decode: Seated) -> Handover | None:
        """What handovers between two engines, as they were started last, have cost; None if none was measured."""
        if prefill.slot is None or decode.slot is None:
            return None
        at = self._pair(prefill.slot, decode.slot)
        mean, count, of_prefill, of_decode = self._cells[at : at + 4].tolist()
        if not count or (of_prefill, of_decode) != (prefill.generation, decode.generation):
            return None
        return Handover(mean / 1e9, count)

    def note_proof(self, prefill: Seated, decode: Seated, proof: Proof) -> None:
        """Says how a pair stands, as both engines were started last. Only the worker that leads does."""
        if prefill.slot is None or decode.slot is None:
            return
        cells, at = self._cells, self._pair(prefill.slot, decode.slot)
        if (cells[at + 5], cells[at + 6]) != (prefill.generation, decode.generation):
            cells[at + 4] = Proof.UNPROVEN  # first, so that nobody takes the old verdict for the new engines'
            cells[at + 5], cells[at + 6] = prefill.generation, decode.generation
        cells[at + 4] = proof

    def proof(self, prefill: Seated, decode: Seated) -> Proof:
        """How a pair stands, as its engines were started last."""
        if prefill.slot is None or decode.slot is None:
            return Proof.UNPROVEN
        at = self._pair(prefill.slot, decode.slot)
        proof, of_prefill, of_decode = self._cells[at + 4 : at + 7].tolist()
        return Proof(proof) if (of_prefill, of_decode) == (prefill.generation, decode.generation) else Proof.UNPROVEN

    def note_trouble(self, prefill: Seated, decode: Seated) -> None:
        """Says that something has just gone wrong between two engines, so that the worker that leads looks at them."""
        if prefill.slot is None or decode.slot is None:
            return
        at_ns = time.monotonic_ns()
        self._cells[self._pair(prefill.slot, decode.slot) + 7] = at_ns
        self._cells[self._mine() + _TROUBLED] = at_ns

    def last_trouble_s(self, prefill: Seated | None = None, decode: Seated | None = None) -> float:
        """When something went wrong last between two engines, or any, on the monotonic clock; 0 if nothing has."""
        if prefill is None or decode is None:
            return self._max(_TROUBLED) / 1e9
        if prefill.slot is None or decode.slot is None:
            return 0.0
        return self._cells[self._pair(prefill.slot, decode.slot) + 7] / 1e9

    # workers

    def beat(self) -> None:
        """Says that this worker lives; every ``BEAT_S``."""
        self._cells[self._mine() + _BEAT] = time.monotonic_ns()

    def is_alive(self, worker: int) -> bool:
        """Whether a worker has said lately that it lives."""
        return self._cells[self._row(worker) + _BEAT] > time.monotonic_ns() - _ALIVE_NS

    def note_heard(self, number: int) -> None:
        """Says which of the fleet's news this worker has taken last; they are numbered from 1."""
        self._cells[self._mine() + _HEARD] = number

    def all_heard(self, number: int) -> bool:
        """Whether every worker that knows of any engine has taken the news of that number, or later ones."""
        return all(not one or one >= number for one in self._cells[self._first + _HEARD : self._end : self._stride])

    def leads(self) -> bool:
        """Whether this worker is the one that does the gateway's periodic work: the living one of the lowest number.

        When it dies, another leads within two seconds. For a moment two may believe that they lead, or none.
        """
        if self.workers == 1:
            return True
        return self.worker == next((number for number in range(self.workers) if self.is_alive(number)), None)

    def next_ticket(self) -> int:
        """A higher number than any before; only under ``lock``."""
        self._cells[_H_TICKET] += 1
        return self._cells[_H_TICKET]

    def clear(self, worker: int) -> None:
        """Takes away all that a worker counted. Only when it is dead: nothing else may write its row then."""
        row = self._row(worker)
        self._zero(row, row + self._stride)

    # slots

    def is_idle(self, slot: int) -> bool:
        """Whether no worker has anything running on an engine."""
        return not self.outstanding_tokens(slot) and not self.running_legs(slot)

    def clear_engine(self, slot: int) -> None:
        """Forgets an engine that is no more, its turns and its pairs, before its slot is given to another."""
        turns = _HEAD_CELLS + 2 * self.engines + self._checked(slot)
        for worker in range(self.workers):
            self._cells[self._row(worker) + turns] = 0
        for other in range(self.engines):
            for at in (self._pair(slot, other), self._pair(other, slot)):
                if (
                    self._cells[at + 1] or self._cells[at + 4] or self._cells[at + 7]
                ):  # a page that nobody has touched stays so
                    self._zero(at, at + _PAIR_CELLS)

    # regions

    def region(self, name: str) -> memoryview:
        """Memory of a fixed size that was declared when the board was made; what stands in it is its users' concern.

        Raises:
            KeyError: no such region was declared.
        """
        for number in range(self._cells[_H_REGIONS]):
            entry = _DIRECTORY + number * _ENTRY
            if bytes(self._bytes[entry : entry + _NAME]).rstrip(b"\0") == name.encode():
                start, size = self._cells[(entry + _NAME) // _CELL : (entry + _ENTRY) // _CELL].tolist()
                return self._bytes[start : start + size]
        raise KeyError(name)

    # cells

    def _mine(self) -> int:
        if self._own < 0:
            raise BoardError("nobody's row is written here")
        return self._own

    def _row(self, worker: int) -> int:
        if not 0 <= worker < self.workers:
            raise IndexError(f"worker {worker} of {self.workers}")
        return self._first + worker * self._stride

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.engines:
            raise IndexError(f"slot {slot} of {self.engines}")
        return slot

    def _pair(self, prefill: int, decode: int) -> int:
        return self._end + (self._checked(prefill) * self.engines + self._checked(decode)) * _PAIR_CELLS

    def _sum(self, cell: int) -> int:
        if self.workers == 1:
            return self._cells[self._first + cell]
        return sum(self._cells[self._first + cell : self._end : self._stride])

    def _max(self, cell: int) -> int:
        if self.workers == 1:
            return self._cells[self._first + cell]
        return max(self._cells[self._first + cell : self._end : self._stride])

    def _zero(self, start: int, end: int) -> None:
        self._cells[start:end] = memoryview(bytes((end - start) * _CELL)).cast("q")


class _Lock:
    """A record lock on the memory: exact between processes, no matter how they end; nothing where there is one."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        if self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, _CELL, _H_LOCK * _CELL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, _CELL, _H_LOCK * _CELL)


def _row_cells(engines: int) -> int:
    """Cells of a row: whole cache lines, so that workers do not slow each other."""
    return -(-(_HEAD_CELLS + _ENGINE_CELLS * engines) // 8) * 8


def _regions_at(workers: int, engines: int) -> int:
    cells = workers * _row_cells(engines) + engines * engines * _PAIR_CELLS
    return _whole_pages(_ROWS + cells * _CELL)


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _size(workers: int, engines: int, regions: Mapping[str, int]) -> int:
    if workers < 1 or engines < 1:
        raise BoardError(f"a board for {workers} workers and {engines} engines")
    return _regions_at(workers, engines) + sum(_whole_pages(size) for size in regions.values())


def _lay_out(memory: mmap.mmap, workers: int, engines: int, regions: Mapping[str, int]) -> None:
    if len(regions) > _MOST_REGIONS:
        raise BoardError(f"{len(regions)} regions; a board has {_MOST_REGIONS} at most")
    with memoryview(memory) as whole, whole[:_ROWS].cast("q") as cells:
        cells[_H_LAYOUT], cells[_H_WORKERS], cells[_H_ENGINES] = LAYOUT, workers, engines
        cells[_H_BYTES], cells[_H_REGIONS] = len(memory), len(regions)
        start = _regions_at(workers, engines)
        for number, (name, size) in enumerate(regions.items()):
            encoded, entry = name.encode(), _DIRECTORY + number * _ENTRY
            if not 0 < len(encoded) <= _NAME or size < 1:
                raise BoardError(f"a region {name!r} of {size} bytes: a name has 1 to {_NAME} bytes, a region some")
            whole[entry : entry + len(encoded)] = encoded
            cells[(entry + _NAME) // _CELL], cells[(entry + _NAME) // _CELL + 1] = start, size
            start += _whole_pages(size)
        cells[_H_MAGIC] = _MAGIC
