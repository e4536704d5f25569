"""The seam that every mover is behind.

Prefill's worker has a ``Staging``: slots of equal size, made for all its peers. Decode's worker opens it as a
``Window``. A piece is gathered into a slot, decode is told, reads it, and says that the slot is free again.
Both sides run in threads of their own and on streams of their own; what they call may wait, but must not spin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class MoverError(Exception):
    """A mover cannot run here, or not between these two; one line that says why."""


@contextlib.contextmanager
def told_as(name: str) -> Iterator[None]:
    """Inside, what torch and CUDA raise (out of memory, for one) becomes a ``MoverError``: the next may run."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise MoverError(f"{name}: {first}") from error


@dataclass(frozen=True, slots=True)
class Offered:
    """What decode's side needs to open a staging."""

    window: Mapping[str, Any]
    files: Sequence[int] = field(default=())
    """File descriptors that go along."""


class Staging(Protocol):
    """Prefill's side: memory that decode can read."""

    slots: int
    slot_bytes: int

    def offered(self) -> Offered:
        """What decode needs to open it."""
        ...

    def write(self, slot: int, size: int, fill: Callable[[torch.Tensor], None]) -> None:
        """Fills a slot; when it returns, decode may read.

        Args:
            fill: writes its argument, ``size`` bytes on the cache's device, in order on the current stream.
        """
        ...

    def close(self) -> None:
        """Gives the memory back."""
        ...


class Window(Protocol):
    """Decode's side."""

    def read(self, slot: int, size: int) -> torch.Tensor:
        """The bytes of a slot on the cache's device, in order on the current stream; valid until the next ``read``."""
        ...

    def close(self) -> None:
        """Gives the memory back."""
        ...


class Mover(Protocol):
    """A way to move staged bytes."""

    name: str
    devices: frozenset[str]
    """Where engines can use it: ``cpu``, ``cuda``."""

    def stage(self, device: torch.device, slots: int, slot_bytes: int) -> Staging:
        """Makes prefill's side.

        Raises:
            MoverError: it cannot run here.
        """
        ...

    def open(self, device: torch.device, window: Mapping[str, Any], files: Sequence[int]) -> Window:
        """Opens it on decode's side, and proves that it can be read.

        Args:
            files: file descriptors; the caller closes them.

        Raises:
            MoverError: it cannot be opened from here.
        """
        ...


PROOF_BYTES = 4096
"""Behind the slots lies a known pattern, which decode reads when it opens the staging."""


def pattern() -> torch.Tensor:
    """The bytes of the proof."""
    return torch.arange(PROOF_BYTES, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(7).to(torch.uint8)


def prove(name: str, read: torch.Tensor) -> None:
    """Compares what decode read with the pattern.

    Raises:
        MoverError: it differs.
    """
    if not torch.equal(read.cpu(), pattern()):
        raise MoverError(f"{name}: what was read is not what prefill wrote")


def start_of(slot: int, size: int, slots: int, slot_bytes: int) -> int:
    """Where a slot begins: a peer's word alone must not decide what memory is read.

    Raises:
        MoverError: there is no such slot, or it is smaller.
    """
    if not (0 <= slot < slots and 0 <= size <= slot_bytes):
        raise MoverError(f"{size} bytes in slot {slot} of {slots} slots of {slot_bytes} bytes")
    return slot * slot_bytes
