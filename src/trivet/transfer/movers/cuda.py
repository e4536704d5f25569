"""The few calls of the CUDA runtime that torch does not offer."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from trivet.transfer.movers.base import MoverError

IPC_HANDLE_BYTES = 64
"""``CUDA_IPC_HANDLE_SIZE``."""


class Runtime:
    """CUDA's runtime as vLLM loads it (``vllm/distributed/device_communicators/cuda_wrapper.py``)."""

    def __init__(self) -> None:
        """
        Raises:
            MoverError: it cannot be loaded.
        """
        try:
            from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

            self._library = CudaRTLibrary()
        except Exception as error:
            raise MoverError(f"the CUDA runtime cannot be loaded: {error}") from error

    def allocate(self, size: int) -> int:
        """Device memory of its own allocation, as an IPC handle names a whole one. Its address."""
        return int(self._call("cudaMalloc", size).value)

    def free(self, address: int) -> None:
        """Gives device memory back."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def handle(self, address: int) -> bytes:
        """The IPC handle of an allocation."""
        own = self._call("cudaIpcGetMemHandle", ctypes.c_void_p(address))
        return bytes(own)[:IPC_HANDLE_BYTES]  # a copy: an address of it would outlive it

    def open(self, handle: bytes) -> int:
        """The address here of another process's allocation."""
        from vllm.distributed.device_communicators.cuda_wrapper import cudaIpcMemHandle_t

        own = cudaIpcMemHandle_t()
        ctypes.memmove(ctypes.addressof(own), handle, IPC_HANDLE_BYTES)
        return int(self._call("cudaIpcOpenMemHandle", own).value)

    def shut(self, address: int) -> None:
        """Unmaps what ``open`` mapped."""
        self._check("cudaIpcCloseMemHandle", self._library.lib.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))

    def copy(self, to: int, source: int, size: int, stream: torch.cuda.Stream) -> None:
        """Copies between any two addresses, in order on a stream."""
        self._check(
            "cudaMemcpyAsync",
            self._library.lib.cudaMemcpyAsync(
                ctypes.c_void_p(to),
                ctypes.c_void_p(source),
                ctypes.c_size_t(size),
                ctypes.c_int(4),  # cudaMemcpyDefault: the addresses say what they are
                ctypes.c_void_p(stream.cuda_stream),
            ),
        )

    def register(self, address: int, size: int) -> None:
        """Pins host memory for copies at full speed, by every device."""
        self._check(
            "cudaHostRegister",
            self._library.lib.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(1)),
        )

    def unregister(self, address: int) -> None:
        """Undoes ``register``."""
        self._check("cudaHostUnregister", self._library.lib.cudaHostUnregister(ctypes.c_void_p(address)))

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, name)(*arguments)
        except RuntimeError as error:
            self._forget_error()
            raise MoverError(f"{name}: {error}") from error

    def _check(self, name: str, result: int) -> None:
        if result:
            message = self._library.cudaGetErrorString(result)
            self._forget_error()
            raise MoverError(f"{name}: {message}")

    def _forget_error(self) -> None:
        """A failed call leaves its error with the thread, and torch would take it for that of its next kernel."""
        self._library.lib.cudaGetLastError()


class DeviceBytes:
    """Device memory at an address, for ``torch.as_tensor`` (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
