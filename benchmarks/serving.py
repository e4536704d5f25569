"""``trivet up`` as a process of its own: started on a topology, waited for, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

STOP_S = 25.0
"""How long a service may take to end by itself; then it is killed, and its engines' guards end what is left."""
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 3 << 20
_ENGINE_MODULES = ("trivet.fleet.vllm", "trivet.sim")


class ServiceFailedError(Exception):
    """A service that did not come up, or ended."""


def free_ports(count: int, start: int = 18100) -> list[int]:
    """Ports on which nothing listens now."""
    found: list[int] = []
    for port in range(start, 65536):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
        if len(found) == count:
            return found
    raise ServiceFailedError(f"no {count} free ports from {start} up")


class Up:
    """One ``trivet up TOPOLOGY``."""

    def __init__(self, name: str, topology: Mapping[str, Any], folder: Path) -> None:
        """
        Args:
            name: of its files in ``folder``.
            topology: the topology file; its gateway needs a port other than 0.
            folder: where file and logs are kept.
        """
        self.name = name
        self.topology = topology
        self.url = f"http://127.0.0.1:{topology['gateway']['port']}"
        self._folder = folder / name
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        """What ``trivet up`` itself prints."""
        return self._folder / "up.log"

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "topology.yaml"
        file.write_text(json.dumps(self.topology, indent=1))  # JSON is YAML
        libc = ctypes.CDLL(None)
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trivet.cli", "up", str(file)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TRIVET_STATE": str(self._folder / "state"), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),  # should we be killed
            )

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Returns when every engine of it is ready.

        Raises:
            ServiceFailedError: it ended.
        """
        while True:
            self.check()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(f"{self.url}/trivet/status", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    if answer.status == 200 and all(one["ready"] for one in (await answer.json())["engines"]):
                        return
            await asyncio.sleep(0.3)

    def check(self) -> None:
        """Raises ``ServiceFailedError`` if it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            told = " | ".join(self.output.read_text(errors="replace").strip().splitlines()[-4:])
            raise ServiceFailedError(f"{self.name}: `trivet up` ended with {self._process.returncode}: {told}")

    def engine_commands(self) -> list[str]:
        """The command of each engine that it has started, read from the processes themselves."""
        commands = {}
        for pid in self.family():
            words = command_of(pid)
            if any(module in words for module in _ENGINE_MODULES) and "serve" in words and "--port" in words:
                commands.setdefault(words[words.index("--port") + 1], shlex.join(words[words.index("-m") :]))
        return [commands[port] for port in sorted(commands)]

    def family(self) -> list[int]:
        """The processes below it, by id."""
        return descendants(self._process.pid) if self._process is not None else []

    async def stop(self) -> None:
        """Ends it and waits until nothing of it is left."""
        if self._process is not None:
            await asyncio.to_thread(self._end, self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        family = self.family()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        deadline_s = time.monotonic() + STOP_S
        while any(_is_alive(pid) for pid in family) and time.monotonic() < deadline_s:
            time.sleep(0.1)

    def logs(self) -> list[Path]:
        """Its logs, its own output first."""
        return [self.output, *sorted(self._folder.glob("state/runs/*/*.log"))]


@contextlib.asynccontextmanager
async def running(services: list[Up]) -> AsyncIterator[None]:
    """Starts services together; whatever happens inside, all of them end with the block."""
    try:
        for one in services:
            one.start()
        yield
    finally:
        # the last ones first: their engines are the first one's
        for one in reversed(services):
            await one.stop()


def end_in_order() -> None:
    """Has SIGTERM end this process as Ctrl-C does, so that what it has started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))


def keep_logs(services: list[Up], target: Path) -> None:
    """Writes the end of every log of some services into one file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as kept:
        for service in services:
            for log in service.logs():
                with contextlib.suppress(OSError), log.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - _LOG_TAIL_BYTES))
                    kept.write(f"\n===== {service.name}: {log.name}\n".encode())
                    kept.write(file.read())


def descendants(pid: int) -> list[int]:
    """The processes below one, by id."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_of(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    fields = _stat_of(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stat_of(pid: int) -> list[str]:
    """State, parent and what follows them in ``/proc/PID/stat``; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    except OSError:
        return []
