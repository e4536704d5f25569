"""GPUs that reach each other's memory (NVLink, or PCIe peer-to-peer): decode copies out of prefill's device memory.

Prefill gathers into slots of device memory of its own, which decode maps by its IPC handle (CUDA Runtime API,
``cudaIpcOpenMemHandle``) and reads with the copy engine. The two need not see each other's device
(``CUDA_VISIBLE_DEVICES``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trivet.transfer.movers.base import PROOF_BYTES, Offered, pattern, prove, start_of, told_as
from trivet.transfer.movers.cuda import DeviceBytes, Runtime
from trivet.transfer.streams import finish


class CudaP2P:
    """CUDA IPC."""

    name = "cuda_p2p"
    devices = frozenset({"cuda"})

    def stage(self, device: torch.device, slots: int, slot_bytes: int) -> CudaStaging:
        """See ``Mover``."""
        return CudaStaging(device, slots, slot_bytes)

    def open(self, device: torch.device, window: Mapping[str, Any], files: Sequence[int]) -> CudaWindow:  # noqa: ARG002
        """See ``Mover``."""
        return CudaWindow(device, int(window["slots"]), int(window["slot_bytes"]), bytes(window["handle"]))


class CudaStaging:
    """See ``Staging``."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.slots, self.slot_bytes, self._device = slots, slot_bytes, device
        self._runtime = Runtime()
        size = slots * slot_bytes + PROOF_BYTES
        with told_as("cuda_p2p"), torch.cuda.device(device), contextlib.ExitStack() as undo:
            self._address = self._runtime.allocate(size)
            undo.callback(self._runtime.free, self._address)
            self._handle = self._runtime.handle(self._address)
            self._bytes = torch.as_tensor(DeviceBytes(self._address, size), device=device)
            self._bytes[slots * slot_bytes :].copy_(pattern())
            finish(device)
            undo.pop_all()

    def offered(self) -> Offered:
        """See ``Staging``."""
        return Offered({"slots": self.slots, "slot_bytes": self.slot_bytes, "handle": self._handle})

    def write(self, slot: int, size: int, fill: Callable[[torch.Tensor], None]) -> None:
        """See ``Staging``."""
        start = slot * self.slot_bytes
        fill(self._bytes[start : start + size])
        finish(self._device)

    def close(self) -> None:
        """See ``Staging``."""
        self._runtime.free(self._address)


class CudaWindow:
    """See ``Window``."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int, handle: bytes) -> None:
        self._slots, self._slot_bytes = slots, slot_bytes
        self._runtime = Runtime()
        with told_as("cuda_p2p"), torch.cuda.device(device), contextlib.ExitStack() as undo:
            self._scratch = torch.empty(max(slot_bytes, PROOF_BYTES), dtype=torch.uint8, device=device)
            self._address = self._runtime.open(handle)
            undo.callback(self._runtime.shut, self._address)
            proof = self._address + slots * slot_bytes
            self._runtime.copy(self._scratch.data_ptr(), proof, PROOF_BYTES, torch.cuda.current_stream())
            finish(device)
            prove("cuda_p2p", self._scratch[:PROOF_BYTES])
            undo.pop_all()

    def read(self, slot: int, size: int) -> torch.Tensor:
        """See ``Window``."""
        source = self._address + start_of(slot, size, self._slots, self._slot_bytes)
        self._runtime.copy(self._scratch.data_ptr(), source, size, torch.cuda.current_stream())
        return self._scratch[:size]

    def close(self) -> None:
        """See ``Window``."""
        self._runtime.shut(self._address)
