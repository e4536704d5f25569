"""What UCX, which carries NIXL's transfers, is allowed to use, and what it says that it uses.

``UCX_TLS`` names transports, or with ``^`` in front what is left out; some words stand for several (UCX's
documentation, "Frequently asked questions": which transports does UCX use). With ``UCX_PROTO_INFO=y`` it prints a table
for each operation with the transport it has chosen by size; these are of UCX 1.19 in NIXL 1.5's wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

_STANDS_FOR = {
    "shm": ("posix", "sysv", "xpmem", "cma", "knem"),
    "sm": ("posix", "sysv", "xpmem", "cma", "knem"),
    "mm": ("posix", "sysv", "xpmem"),
    "ib": ("rc_verbs", "rc_mlx5", "ud_verbs", "ud_mlx5", "dc_mlx5"),
    "rc": ("rc_verbs", "rc_mlx5"),
    "rc_v": ("rc_verbs",),
    "rc_x": ("rc_mlx5",),
    "ud": ("ud_verbs", "ud_mlx5"),
    "ud_v": ("ud_verbs",),
    "ud_x": ("ud_mlx5",),
    "dc": ("dc_mlx5",),
    "dc_x": ("dc_mlx5",),
    "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"),
}
RDMA = ("rc_mlx5", "dc_mlx5", "rc_verbs", "ud_mlx5", "ud_verbs", "srd", "gga_mlx5")
"""Transports over RDMA devices."""


class Carrier(StrEnum):
    """What carries bytes, the slowest first."""

    TCP = "tcp"
    STAGED = "host-staged"
    """From a GPU into host memory and out of it again."""
    SHARED = "shared-memory"
    """From one process's host memory to another's, by the kernel or a mapping of both."""
    RDMA = "rdma"
    PEER = "gpu-peer"
    """GPU to GPU, over NVLink or PCIe."""


_CARRIED_BY: tuple[tuple[str, Carrier], ...] = (
    (r"tcp", Carrier.TCP),
    (r"cuda_ipc", Carrier.PEER),
    (r"rc_\w+|dc_\w+|ud_\w+|srd|gga_\w+", Carrier.RDMA),
    (r"cma|xpmem|knem|sysv|posix", Carrier.SHARED),
    (r"cuda_copy|gdr_copy", Carrier.STAGED),
)


def allows(setting: str | None, *transports: str) -> bool:
    """Whether ``UCX_TLS`` allows one of some transports."""
    words = [one.strip() for one in (setting or "all").lower().split(",") if one.strip()]
    if not words:
        return True
    if left_out := words[0].startswith("^"):
        words[0] = words[0][1:]
    if "all" in words:
        return not left_out
    named = {one for word in words for one in (word.split(":")[0].lstrip("\\"), *_STANDS_FOR.get(word, ()))}
    return any((one in named) != left_out for one in transports)


_LINE = re.compile(r"\[[^\]]*\]\s*\[[^\]]*\]\s+\|(?P<cells>.*)\|\s*$")


def picked(text: str) -> str | None:
    """What carries large reads from another process, as UCX tells it: ``cma/memory``, ``52% on tcp/lo and ...``.

    Args:
        text: what a process wrote to its log with ``UCX_PROTO_INFO=y``.

    None if no such read is told of.
    """
    found, is_other, is_read = None, False, False
    for line in text.splitlines():
        if (match := _LINE.search(line)) is None:
            continue  # a border, or somebody else's
        cells = [one.strip() for one in match["cells"].split("|")]
        if len(cells) == 1:
            if " cfg#" in cells[0]:
                is_other, is_read = "self cfg#" not in cells[0], False
            elif "ucp_get" in cells[0]:
                is_read = True
        elif is_other and is_read and len(cells) == 3 and ".." in cells[0] and not cells[0].startswith("Range"):
            found = f"{cells[1]} {cells[2]}".strip()  # sizes ascend; the last goes to infinity
    return found


def carrier(told: str) -> Carrier | None:
    """The carrier behind ``picked()``: where there are several, the slowest; None if it is none that is known."""
    words = re.findall(r"[a-z]\w+", told.lower())
    kinds = [kind for word in words for pattern, kind in _CARRIED_BY if re.fullmatch(pattern, word)]
    return min(kinds, key=list(Carrier).index) if kinds else None


def names_one_of(devices: str | None, names: Iterable[str]) -> bool:
    """Whether ``UCX_NET_DEVICES`` allows one of some devices (``mlx5_0`` by ``mlx5_0:1``)."""
    if not devices or devices.strip().lower() == "all":
        return True
    words = [one.strip().split(":")[0] for one in devices.strip().lstrip("^").split(",")]
    if devices.strip().startswith("^"):
        return any(name not in words for name in names)
    return any(name in words for name in names)
