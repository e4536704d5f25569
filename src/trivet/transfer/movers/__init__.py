"""How staged bytes get from prefill's worker to decode's, one file a mover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trivet.transfer.movers.base import Mover, MoverError, Staging, Window, told_as
from trivet.transfer.movers.cuda_p2p import CudaP2P
from trivet.transfer.movers.pinned import Pinned
from trivet.transfer.movers.shm import Shm

__all__ = ["MOVERS", "Mover", "MoverError", "Staging", "Window", "movers_for", "told_as"]

MOVERS: Mapping[str, Mover] = {one.name: one for one in (CudaP2P(), Pinned(), Shm())}
"""Every mover by its name, the fastest first."""


def movers_for(device: torch.device, chosen: Sequence[str]) -> tuple[str, ...]:
    """The names of movers that may be tried on a device, preferred first.

    Args:
        chosen: what the topology names; empty for all that suit the device.

    Raises:
        ValueError: a name that is none, or nothing suits, in one line.
    """
    if unknown := [name for name in chosen if name not in MOVERS]:
        raise ValueError(f"TrivetConnector has no mover {', '.join(unknown)}; it has {', '.join(MOVERS)}")
    names = tuple(name for name in chosen or MOVERS if device.type in MOVERS[name].devices)
    if not names:
        suitable = ", ".join(name for name, mover in MOVERS.items() if device.type in mover.devices)
        raise ValueError(
            f"TrivetConnector: no mover of {', '.join(chosen) or 'its own'} runs on {device.type}; "
            f"choose from {suitable or 'none'}"
        )
    return names
