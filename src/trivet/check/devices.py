"""What this machine has between two engines: GPUs and how they are linked, RDMA devices. Starts nothing on a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LIMIT_S = 20.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_QUERY = "index,uuid,pci.bus_id,name,pcie.link.gen.max,pcie.link.width.max"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, counted as ``nvidia-smi`` does."""

    number: int
    uuid: str
    name: str = ""
    pcie_gen: int | None = None
    pcie_lanes: int | None = None


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    port: str
    is_active: bool
    gbit_s: float | None


@dataclass(frozen=True, slots=True)
class Devices:
    """What a machine has."""

    gpus: tuple[Gpu, ...] = ()
    peers: frozenset[tuple[int, int]] | None = None
    """Pairs of which the first GPU can read the second's memory; None if it is not known."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """``nvidia-smi topo -m``: ``NV18``, ``PIX``, ``PXB``, ``PHB``, ``NODE``, ``SYS``."""
    rdma: tuple[RdmaPort, ...] = ()
    gpu_rdma: bool | None = None
    """Whether RDMA devices reach GPU memory (``nvidia_peermem``); None if it is not known."""

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU of that UUID."""
        return next((one for one in self.gpus if one.uuid == uuid), None)

    @property
    def active_rdma(self) -> tuple[RdmaPort, ...]:
        """Ports that could carry something."""
        return tuple(one for one in self.rdma if one.is_active)


async def look() -> Devices:
    """Looks at this machine. What cannot be found out is left open."""
    probed, listed, drawn, peers = await asyncio.gather(
        _output(sys.executable, "-m", "trivet.check.probe_gpu"),
        _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"),
        _output("nvidia-smi", "topo", "-m"),
        _output("nvidia-smi", "topo", "-p2p", "r"),
    )
    gpus, reached = _probed(probed)
    listing = parse_gpus(listed)
    return Devices(
        gpus=listing or gpus,
        peers=reached if reached is not None else parse_peers(peers) if peers else None,
        links=parse_links(drawn),
        rdma=rdma_ports(),
        gpu_rdma=Path("/sys/module/nvidia_peermem").is_dir() if listing or gpus else None,
    )


async def _output(*command: str) -> str:
    """What a command writes; empty if it is missing, fails or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(_LIMIT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        out = b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return out.decode(errors="replace") if process.returncode == 0 else ""


def _probed(text: str) -> tuple[tuple[Gpu, ...], frozenset[tuple[int, int]] | None]:
    try:
        told: dict[str, Any] = json.loads(text)
        gpus = tuple(Gpu(number, one["uuid"], one["name"]) for number, one in enumerate(told["gpus"]))
        return gpus, frozenset((int(a), int(b)) for a, b in told["peers"])
    except (ValueError, KeyError, TypeError):
        return (), None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """``nvidia-smi --query-gpu=...``, a line for each."""
    gpus = []
    for line in text.splitlines():
        cells = [one.strip() for one in line.split(",")]
        if len(cells) == len(_QUERY.split(",")) and cells[0].isdigit():
            gpus.append(Gpu(int(cells[0]), cells[1], cells[3], _number(cells[4]), _number(cells[5])))
    return tuple(gpus)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """``nvidia-smi topo -m``: what lies between two GPUs."""
    return {pair: word for pair, word in _matrix(text).items() if word != "X"}


def parse_peers(text: str) -> frozenset[tuple[int, int]]:
    """``nvidia-smi topo -p2p r``: pairs whose word is OK."""
    return frozenset(pair for pair, word in _matrix(text).items() if word == "OK")


def _matrix(text: str) -> dict[tuple[int, int], str]:
    columns: Sequence[int] = ()
    cells: dict[tuple[int, int], str] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        words = line.split()
        named = [int(word[3:]) for word in words if _GPU.fullmatch(word)]
        if not named:
            continue
        if not columns:
            columns = named
        elif _GPU.fullmatch(words[0]):
            row = named[0]
            cells |= {(row, column): word for column, word in zip(columns, words[1:], strict=False)}
    return cells


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> tuple[RdmaPort, ...]:
    """The kernel's RDMA devices: ``state`` is ``4: ACTIVE``, ``rate`` is ``400 Gb/sec (4X NDR)``."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb", _read(port / "rate"))
        ports.append(
            RdmaPort(
                port.parent.parent.name,
                port.name,
                "ACTIVE" in _read(port / "state"),
                float(rate[1]) if rate else None,
            )
        )
    return tuple(ports)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def is_here(boot: str | None) -> bool:
    """Whether an engine that tells this boot id runs on this machine."""
    return boot is not None and boot == _read(Path("/proc/sys/kernel/random/boot_id"))


def free_memory_bytes() -> int | None:
    """Of the host's memory, what can still be had."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
