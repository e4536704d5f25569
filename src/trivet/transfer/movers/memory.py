"""Memory that two processes share: anonymous, so that nothing is left behind however they end."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from trivet.transfer.movers.base import MoverError


class SharedMemory:
    """A mapping of a memory file (Linux ``memfd_create``), whose descriptor is passed to the peer."""

    def __init__(self, name: str, size: int, file: int | None = None) -> None:
        """
        Args:
            file: a descriptor to map; it stays the caller's. None makes new memory.

        Raises:
            MoverError: there is not so much memory.
        """
        try:
            self.file = os.memfd_create(f"trivet-{name}") if file is None else os.dup(file)
        except OSError as error:
            raise MoverError(f"{name}: no shared memory: {error.strerror or error}") from error
        try:
            if file is None:
                if size > (free := _available_bytes()):  # the kernel would end a process to make room, perhaps this one
                    raise OSError(f"only {free / 2**20:.0f} MiB are free")
                os.posix_fallocate(self.file, 0, size)  # or a full machine would show as a bus error, later
            mapped = mmap.mmap(self.file, size)
        except (OSError, ValueError) as error:
            os.close(self.file)
            why = getattr(error, "strerror", None) or error
            raise MoverError(f"{name}: {size / 2**20:.0f} MiB of shared memory: {why}") from error
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def close(self) -> None:
        """Unmaps it once nothing refers to its bytes."""
        os.close(self.file)
        del self.bytes


def _available_bytes() -> int:
    """Memory that can be had without swapping (``MemAvailable``); without end where that is not told."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 2**62
    told = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(told) * 1024 if told is not None else 2**62
