"""CPU engines: pieces lie in shared memory, which decode reads in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trivet.transfer.movers.base import PROOF_BYTES, MoverError, Offered, pattern, prove, start_of
from trivet.transfer.movers.memory import SharedMemory


class Shm:
    """Shared memory between processes of one host."""

    name = "shm"
    devices = frozenset({"cpu"})

    def stage(self, device: torch.device, slots: int, slot_bytes: int) -> ShmStaging:  # noqa: ARG002
        """See ``Mover``."""
        return ShmStaging(slots, slot_bytes)

    def open(self, device: torch.device, window: Mapping[str, Any], files: Sequence[int]) -> ShmWindow:  # noqa: ARG002
        """See ``Mover``."""
        if not files:
            raise MoverError("shm: prefill sent no file descriptor")
        return ShmWindow(int(window["slots"]), int(window["slot_bytes"]), files[0])


class ShmStaging:
    """See ``Staging``."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes = slots, slot_bytes
        self._memory = SharedMemory("shm", slots * slot_bytes + PROOF_BYTES)
        self._memory.bytes[slots * slot_bytes :].copy_(pattern())

    def offered(self) -> Offered:
        """See ``Staging``."""
        return Offered({"slots": self.slots, "slot_bytes": self.slot_bytes}, [self._memory.file])

    def write(self, slot: int, size: int, fill: Callable[[torch.Tensor], None]) -> None:
        """See ``Staging``."""
        start = slot * self.slot_bytes
        fill(self._memory.bytes[start : start + size])

    def close(self) -> None:
        """See ``Staging``."""
        self._memory.close()


class ShmWindow:
    """See ``Window``."""

    def __init__(self, slots: int, slot_bytes: int, file: int) -> None:
        self._slots, self._slot_bytes = slots, slot_bytes
        self._memory = SharedMemory("shm", slots * slot_bytes + PROOF_BYTES, file)
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.close)
            prove("shm", self._memory.bytes[slots * slot_bytes :])
            undo.pop_all()

    def read(self, slot: int, size: int) -> torch.Tensor:
        """See ``Window``."""
        start = start_of(slot, size, self._slots, self._slot_bytes)
        return self._memory.bytes[start : start + size]

    def close(self) -> None:
        """See ``Window``."""
        self._memory.close()
