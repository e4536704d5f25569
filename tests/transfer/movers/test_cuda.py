"""CUDA's movers on a runtime that is made up: what is left behind when any one of their steps fails."""

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.device_communicators import cuda_wrapper

from trivet.transfer.movers import MOVERS, MoverError
from trivet.transfer.movers.base import pattern, prove
from trivet.transfer.movers.cuda import IPC_HANDLE_BYTES, Runtime
from trivet.transfer.pages import checksum

CPU = torch.device("cpu")
FAILED = 719


class Machine:
    """Its memory, and the step of which the world is made to fail."""

    def __init__(self):
        self.allocated, self.mapped, self.registered = {}, [], set()
        self.last_error = 0
        self.steps, self.fails_at = [], None

    def step(self, name):
        self.steps.append(name)
        return self.fails_at is not None and len(self.steps) - 1 == self.fails_at

    def fail_at(self, step):
        self.steps, self.fails_at = [], step

    def check_nothing_is_left(self):
        assert (self.allocated, self.mapped, self.registered) == ({}, [], set())
        assert self.last_error == 0, "torch would take it for the error of its next kernel"


def library(machine):
    """What vLLM's ``CudaRTLibrary`` does: some calls raise, the others return CUDA's error."""

    def failing(name):
        if machine.step(name):
            machine.last_error = FAILED
            return True
        return False

    def raising(name):
        if failing(name):
            raise RuntimeError(f"CUDART error: {name} did not work")

    class Raw:
        def cudaGetLastError(self):  # noqa: N802
            error, machine.last_error = machine.last_error, 0
            return error

        def cudaHostRegister(self, address, size, flags):  # noqa: N802
            if failing("register"):
                return FAILED
            machine.registered.add(address.value)
            return 0

        def cudaHostUnregister(self, address):  # noqa: N802
            machine.registered.remove(address.value)
            return 0

        def cudaIpcCloseMemHandle(self, address):  # noqa: N802
            machine.mapped.remove(address.value)
            return 0

        def cudaMemcpyAsync(self, to, source, size, kind, stream):  # noqa: N802
            if failing("copy"):
                return FAILED
            ctypes.memmove(to, source, size.value)
            return 0

    class Library:
        def __init__(self):
            self.lib = Raw()

        def cudaGetErrorString(self, error):  # noqa: N802
            return "it did not work"

        def cudaMalloc(self, size):  # noqa: N802
            raising("malloc")
            memory = ctypes.create_string_buffer(size)
            machine.allocated[ctypes.addressof(memory)] = memory
            return ctypes.c_void_p(ctypes.addressof(memory))

        def cudaFree(self, address):  # noqa: N802
            del machine.allocated[address.value]

        def cudaIpcGetMemHandle(self, address):  # noqa: N802
            raising("handle")
            handle = cuda_wrapper.cudaIpcMemHandle_t()
            ctypes.memmove(ctypes.addressof(handle), address.value.to_bytes(IPC_HANDLE_BYTES, "little"), 64)
            return handle

        def cudaIpcOpenMemHandle(self, handle):  # noqa: N802
            raising("open")
            address = int.from_bytes(bytes(handle)[:IPC_HANDLE_BYTES], "little")
            machine.mapped.append(address)
            return ctypes.c_void_p(address)

    return Library


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()

    def counted(name, original):
        def call(*arguments, **kinds):
            if machine.step(name):
                raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
            return original(*arguments, **kinds)

        return call

    def seen(address, size):
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(cuda_wrapper, "CudaRTLibrary", library(machine))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch, "empty", counted("empty", torch.empty))
    monkeypatch.setattr(torch, "as_tensor", counted("as_tensor", torch.as_tensor))
    for module in ("cuda_p2p", "pinned"):
        monkeypatch.setattr(f"trivet.transfer.movers.{module}.finish", counted("finish", lambda device: None))
        monkeypatch.setattr(f"trivet.transfer.movers.{module}.pattern", counted("pattern", pattern))
        monkeypatch.setattr(f"trivet.transfer.movers.{module}.prove", counted("prove", lambda name, read: None))
    monkeypatch.setattr("trivet.transfer.movers.cuda_p2p.DeviceBytes", seen)
    return machine


def files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("name", ["cuda_p2p", "pinned"])
def test_nothing_is_left_of_a_staging_of_which_any_step_failed(machine, name):
    before = files()
    machine.fail_at(None)
    MOVERS[name].stage(CPU, 2, 4096).close()
    steps = machine.steps
    assert len(steps) >= 3
    machine.check_nothing_is_left()
    for step, which in enumerate(steps):
        machine.fail_at(step)
        with pytest.raises(MoverError, match=rf"^{name}: CUDA out of memory\.$|did not work"):
            MOVERS[name].stage(CPU, 2, 4096)
        assert machine.steps[-1] == which
        machine.check_nothing_is_left()
        assert files() == before


@pytest.mark.parametrize("name", ["cuda_p2p", "pinned"])
def test_nothing_is_left_of_a_window_of_which_any_step_failed(machine, name):
    staging = MOVERS[name].stage(CPU, 2, 4096)
    offered = staging.offered()
    before, registered = files(), set(machine.registered)
    machine.fail_at(None)
    MOVERS[name].open(CPU, dict(offered.window), offered.files).close()
    steps = machine.steps
    assert len(steps) >= 3
    for step, which in enumerate(steps):
        machine.fail_at(step)
        with pytest.raises(MoverError, match=rf"^{name}: CUDA out of memory\.$|did not work"):
            MOVERS[name].open(CPU, dict(offered.window), offered.files)
        assert machine.steps[-1] == which
        assert (machine.mapped, machine.registered, machine.last_error) == ([], registered, 0)
        assert files() == before
    staging.close()
    machine.check_nothing_is_left()


def test_a_mapping_whose_proof_differs_is_given_back(machine, monkeypatch):
    staging = MOVERS["cuda_p2p"].stage(CPU, 2, 4096)
    staging._bytes[-1] ^= 1
    monkeypatch.setattr("trivet.transfer.movers.cuda_p2p.prove", prove)
    with pytest.raises(MoverError, match="not what prefill wrote"):
        MOVERS["cuda_p2p"].open(CPU, dict(staging.offered().window), ())
    assert not machine.mapped
    staging.close()


@pytest.mark.parametrize("name", ["cuda_p2p", "pinned"])
def test_a_piece_gets_through(machine, name):
    staging = MOVERS[name].stage(CPU, 2, 4096)
    offered = staging.offered()
    window = MOVERS[name].open(CPU, dict(offered.window), offered.files)
    piece = torch.arange(4096).to(torch.uint8)
    staging.write(1, 4096, lambda memory: memory.copy_(piece))
    assert checksum(window.read(1, 4096)) == checksum(piece)
    for slot, size in ((2, 8), (-1, 8), (0, 4104)):
        with pytest.raises(MoverError, match=r"of 2 slots of 4096 bytes"):
            window.read(slot, size)
    window.close()
    staging.close()
    machine.check_nothing_is_left()


CALLS = {
    "malloc": lambda runtime: runtime.allocate(8),
    "handle": lambda runtime: runtime.handle(8),
    "open": lambda runtime: runtime.open(b"x" * IPC_HANDLE_BYTES),
    "register": lambda runtime: runtime.register(8, 8),
    "copy": lambda runtime: runtime.copy(8, 8, 8, SimpleNamespace(cuda_stream=0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_error_is_left_to_the_next_kernel_behind_a_call_that_failed(machine, name):
    runtime = Runtime()
    machine.fail_at(0)
    with pytest.raises(MoverError, match="did not work"):
        CALLS[name](runtime)
    assert machine.steps == [name]
    assert machine.last_error == 0
