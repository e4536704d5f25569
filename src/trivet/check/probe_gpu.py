"""``python -m trivet.check.probe_gpu``: this machine's GPUs and who reaches whose memory, as JSON on stdout.

Asks CUDA's driver (``cuDeviceCanAccessPeer``), which knows of IOMMU, virtualization and settings, where a drawing of
the bus does not. A process of its own, since the driver stays in whoever has asked it. Makes no context on any GPU.
Needs neither torch nor a CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

_TEXT_BYTES = 64
_PCI_TEXT_BYTES = 16


def main() -> int:
    """Prints ``{"gpus": [{"uuid", "pci", "name"}], "peers": [[a, b], ...]}``, or ``{"problem": ...}`` and 1."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts them
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return _print({"problem": f"no CUDA driver here ({error})"}, 1)
    try:
        return _print(_look(cuda), 0)
    except RuntimeError as error:
        return _print({"problem": f"CUDA's driver: {error}"}, 1)


def _look(cuda: ctypes.CDLL) -> dict[str, Any]:
    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} failed with {status}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    devices = []
    for number in range(count.value):
        device = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), number)
        devices.append(device)
    gpus = []
    for device in devices:
        name, pci = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_PCI_TEXT_BYTES)
        uuid = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetName", name, _TEXT_BYTES, device)
        call("cuDeviceGetPCIBusId", pci, _PCI_TEXT_BYTES, device)
        call("cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", uuid, device)
        gpus.append({"uuid": _uuid(bytes(uuid)), "pci": pci.value.decode().lower(), "name": name.value.decode()})
    peers = []
    for a, here in enumerate(devices):
        for b, there in enumerate(devices):
            can = ctypes.c_int()
            if a != b:
                call("cuDeviceCanAccessPeer", ctypes.byref(can), here, there)
                if can.value:
                    peers.append([a, b])
    return {"gpus": gpus, "peers": peers}


def _uuid(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _print(value: dict[str, Any], status: int) -> int:
    sys.stdout.write(json.dumps(value) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
