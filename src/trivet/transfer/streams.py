"""Streams of the connector's own threads."""

from __future__ import annotations

import contextlib
from collections import deque
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


class Lead:
    """How far a thread launches ahead of its device, in layers of the model, which it keeps within ``most``.

    A stream takes about a thousand launches that have not begun. Who launches more waits inside the driver and holds a
    lock there; other threads of the process then hardly get to launch anything. vLLM launches a step while the one
    before is computed; of 3,178 pieces on two H200 that way one took 205 ms and one 48 ms instead of 3.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ahead: deque[tuple[int, torch.cuda.Event]] = deque()
        self._layers = 0

    def launched(self, layers: int, event: torch.cuda.Event) -> None:
        """So many layers more, which are computed when ``event`` happens. Waits, asleep, while too many are not.

        The device has then ``most`` layers to go on with. The last launched are never waited for.
        """
        self._ahead.append((layers, event))
        self._layers += layers
        while self._layers > self._most and len(self._ahead) > 1:
            oldest_layers, oldest = self._ahead.popleft()
            self._layers -= oldest_layers
            oldest.synchronize()
