"""GPUs that cannot reach each other: device to pinned shared memory to device.

The memory is shared by both processes and pinned in both, so that each side's copy engine reads or writes it at full
speed; prefill writes the next slot while decode reads this one, so both directions overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trivet.transfer.movers.base import PROOF_BYTES, MoverError, Offered, pattern, prove, start_of, told_as
from trivet.transfer.movers.cuda import Runtime
from trivet.transfer.movers.memory import SharedMemory
from trivet.transfer.streams import finish


class Pinned:
    """Pinned host memory between two devices."""

    name = "pinned"
    devices = frozenset({"cuda"})

    def stage(self, device: torch.device, slots: int, slot_bytes: int) -> PinnedStaging:
        """See ``Mover``."""
        return PinnedStaging(device, slots, slot_bytes)

    def open(self, device: torch.device, window: Mapping[str, Any], files: Sequence[int]) -> PinnedWindow:
        """See ``Mover``."""
        if not files:
            raise MoverError("pinned: prefill sent no file descriptor")
        return PinnedWindow(device, int(window["slots"]), int(window["slot_bytes"]), files[0])


class _PinnedMemory:
    def __init__(self, device: torch.device, size: int, file: int | None) -> None:
        self._runtime = Runtime()
        self.memory = SharedMemory("pinned", size, file)
        with contextlib.ExitStack() as undo:
            undo.callback(self.memory.close)
            with torch.cuda.device(device):
                self._runtime.register(self.memory.bytes.data_ptr(), size)
            undo.pop_all()

    def close(self) -> None:
        try:
            self._runtime.unregister(self.memory.bytes.data_ptr())
        finally:
            self.memory.close()


class PinnedStaging:
    """See ``Staging``."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes, self._device = slots, slot_bytes, device
        with told_as("pinned"), contextlib.ExitStack() as undo:
            self._scratch = torch.empty(slot_bytes, dtype=torch.uint8, device=device)
            self._pinned = _PinnedMemory(device, slots * slot_bytes + PROOF_BYTES, None)
            undo.callback(self._pinned.close)
            self._pinned.memory.bytes[slots * slot_bytes :].copy_(pattern())
            undo.pop_all()

    def offered(self) -> Offered:
        """See ``Staging``."""
        return Offered({"slots": self.slots, "slot_bytes": self.slot_bytes}, [self._pinned.memory.file])

    def write(self, slot: int, size: int, fill: Callable[[torch.Tensor], None]) -> None:
        """See ``Staging``."""
        fill(self._scratch[:size])
        start = slot * self.slot_bytes
        self._pinned.memory.bytes[start : start + size].copy_(self._scratch[:size], non_blocking=True)
        finish(self._device)

    def close(self) -> None:
        """See ``Staging``."""
        self._pinned.close()


class PinnedWindow:
    """See ``Window``."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int, file: int) -> None:
        self._slots, self._slot_bytes = slots, slot_bytes
        with told_as("pinned"), contextlib.ExitStack() as undo:
            self._scratch = torch.empty(slot_bytes, dtype=torch.uint8, device=device)
            self._pinned = _PinnedMemory(device, slots * slot_bytes + PROOF_BYTES, file)
            undo.callback(self._pinned.close)
            prove("pinned", self._pinned.memory.bytes[slots * slot_bytes :])
            undo.pop_all()

    def read(self, slot: int, size: int) -> torch.Tensor:
        """See ``Window``."""
        start = start_of(slot, size, self._slots, self._slot_bytes)
        source = self._pinned.memory.bytes[start : start + size]
        return self._scratch[:size].copy_(source, non_blocking=True)

    def close(self) -> None:
        """See ``Window``."""
        self._pinned.close()
