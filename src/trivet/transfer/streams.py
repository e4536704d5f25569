"""Streams of the connector's own threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Inside, the calling thread works on a device and on a stream of its own; on CPUs nothing changes."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):  # short kernels, before the engine's long ones
        yield


def finish(device: torch.device) -> None:
    """Waits for all that the thread's stream was given, asleep: a spinning thread would take a core from the engine."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event(blocking=True)
    done.record()
    done.synchronize()
