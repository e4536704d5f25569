"""``python -m trivet.check.probe_nixl target|initiator``: one end of a NIXL transfer, to measure what carries it.

Two of them stand for two engines: started with the engines' ``UCX_*`` and ``CUDA_VISIBLE_DEVICES``, an agent each as
vLLM's NixlConnector makes it (``nixl/base_worker.py``: backends, threads, telemetry), memory on the first visible GPU
or of the host. The initiator reads out of the target, as decode does out of prefill. Talks JSON lines:

- target: writes ``{"metadata", "address", "device"}``, then serves until its standard input ends;
- initiator: reads that line, writes ``{"reads": [[bytes, seconds], ...], "intact": true}``;
- either: writes ``{"problem": ...}`` and exits with 1.

What UCX says goes to stderr; with ``UCX_PROTO_INFO=y`` that is which transport it picks (``trivet.check.ucx``). It ends
with whoever started it. Imports nothing but NIXL and the standard library.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import mmap
import os
import select
import signal
import sys
import time
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_NOTICE_S = 0.001
_LEAST_TIMES = 3
_OF_THE_LIMIT = 0.7
"""Share of the time behind which no further size is begun."""
_PATTERN = 0xA5


class ProblemError(Exception):
    """One line that says why it cannot be measured."""


def main() -> int:
    """See the module."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("target", "initiator"))
    parser.add_argument("--memory", choices=("DRAM", "VRAM"), required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of a read, ascending")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=20)
    parser.add_argument("--backends", nargs="+", default=["UCX"])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--progress-thread", type=int, choices=(0, 1), default=1)
    options = parser.parse_args()
    answers = _answers_alone()
    try:
        if options.side == "target":
            _target(options, answers)
        else:
            _initiator(options, answers)
    except ProblemError as error:
        _say(answers, {"problem": str(error)})
        return 1
    except Exception as error:  # NIXL's own are of several kinds
        first = next(iter(str(error).splitlines()), "")
        _say(answers, {"problem": f"NIXL: {type(error).__name__}: {first}"})
        return 1
    return 0


def _answers_alone() -> TextIO:
    """Standard output for answers only: what libraries write to it goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _agent(options: argparse.Namespace) -> Any:
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM: distributed/nixl_utils.py
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ProblemError(f"the package nixl is not installed here ({error})") from None
    more: dict[str, Any] = {"num_threads": options.threads}
    if options.backends != ["UCX"]:
        more = {"backends": options.backends}
    agent = nixl_agent(
        f"trivet-{options.side}-{os.getpid()}",
        nixl_agent_config(enable_prog_thread=bool(options.progress_thread), capture_telemetry=True, **more),
    )
    if missing := [one for one in options.backends if one not in agent.backends]:
        raise ProblemError(f"NIXL has no backend {', '.join(missing)} here; it has {', '.join(agent.plugin_list)}")
    return agent


class _Dram:
    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = (ctypes.c_char * size).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        self._size = size

    def fill(self, byte: int) -> None:
        ctypes.memset(self.address, byte, self._size)

    def last(self, size: int) -> bytes:
        return ctypes.string_at(self.address + size - 16, 16)


class _Vram:
    """Memory of the first visible GPU, from CUDA's driver, as ``cudaMalloc`` gives it."""

    def __init__(self, size: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ProblemError(f"no CUDA driver here ({error})") from None
        self._size = size
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = int(address.value)

    def _call(self, name: str, *arguments: Any) -> None:
        if (status := getattr(self._cuda, name)(*arguments)) != 0:
            raise ProblemError(f"CUDA's driver: {name} failed with {status}")

    def fill(self, byte: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(self.address), ctypes.c_ubyte(byte), ctypes.c_size_t(self._size))
        self._call("cuCtxSynchronize")

    def last(self, size: int) -> bytes:
        found = ctypes.create_string_buffer(16)
        self._call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(self.address + size - 16), ctypes.c_size_t(16))
        return found.raw


def _memory(options: argparse.Namespace) -> _Dram | _Vram:
    return (_Vram if options.memory == "VRAM" else _Dram)(max(options.sizes))


def _target(options: argparse.Namespace, answers: TextIO) -> None:
    memory = _memory(options)  # before the agent: UCX looks for a CUDA context when it starts
    memory.fill(_PATTERN)
    agent = _agent(options)
    registered = agent.register_memory([(memory.address, max(options.sizes), 0, "")], options.memory)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    _say(answers, {"metadata": metadata, "address": memory.address, "device": 0})
    wait_s = _NOTICE_S if options.progress_thread else 0.0
    while not select.select([0], [], [], wait_s)[0]:
        agent.get_new_notifs()  # advances it where it has no thread of its own
    agent.deregister_memory(registered)


def _initiator(options: argparse.Namespace, answers: TextIO) -> None:
    memory = _memory(options)
    memory.fill(0)
    agent = _agent(options)
    registered = agent.register_memory([(memory.address, max(options.sizes), 0, "")], options.memory)
    peer = json.loads(sys.stdin.readline() or "{}")
    if "metadata" not in peer:
        raise ProblemError("the other end does not say where it is")
    name = agent.add_remote_agent(base64.b64decode(peer["metadata"]))
    name = name.decode() if isinstance(name, bytes) else name
    reads: list[tuple[int, float]] = []
    largest = 0
    _read(agent, options.memory, memory.address, peer["address"], min(options.sizes), name)  # connects; not measured
    started_s = time.monotonic()
    for size in options.sizes:
        for number in range(options.times):
            spent_s = time.monotonic() - started_s
            if spent_s > options.limit_s or (number >= _LEAST_TIMES and spent_s > _OF_THE_LIMIT * options.limit_s):
                break
            reads.append((size, _read(agent, options.memory, memory.address, peer["address"], size, name)))
            largest = size
        if time.monotonic() - started_s > _OF_THE_LIMIT * options.limit_s:
            break
    intact = memory.last(largest or min(options.sizes)) == bytes([_PATTERN]) * 16
    _say(answers, {"reads": reads, "intact": intact})
    agent.remove_remote_agent(name)
    agent.deregister_memory(registered)


def _read(agent: Any, memory: str, address: int, remote: int, size: int, name: str) -> float:
    """Reads once; seconds."""
    here = agent.get_xfer_descs([(address, size, 0)], memory)
    there = agent.get_xfer_descs([(remote, size, 0)], memory)
    handle = agent.initialize_xfer("READ", here, there, name, b"")
    started_s = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(0)
        state = agent.check_xfer_state(handle)
    took_s = time.perf_counter() - started_s
    agent.release_xfer_handle(handle)
    if state != "DONE":
        raise ProblemError(f"a read of {size} bytes ended as {state}")
    return took_s


if __name__ == "__main__":
    sys.exit(main())
