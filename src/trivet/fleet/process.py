"""A guarded child process with a log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from trivet.fleet import guard

_NOT_INHERITED = frozenset({"VLLM_API_KEY"})
"""A key for the gateway's clients; an engine that took it would refuse the gateway."""

GRACE_S = 10.0
"""How long an engine may take to end after SIGTERM. Work in flight was drained before, by the gateway."""

_POLL_S = 0.05


_PF_EXITING = 0x4
"""Of the flags in ``/proc/PID/stat`` (Linux, ``include/linux/sched.h``)."""


class GuardedProcess:
    """A command under ``guard``: nothing of it outlives it, or this process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], log: Path) -> GuardedProcess:
        """Starts ``command`` with ``env`` added to this process's environment; output goes to ``log``, appended."""
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                guard.__file__,
                str(GRACE_S),
                "--",
                *command,
                stdin=asyncio.subprocess.PIPE,  # the lifeline: closed when we are gone
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**inherited, **env},
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The command's exit status, 128 + n if signal n ended it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the end of the command and of all that it started."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends it: SIGTERM, then SIGKILL after ``GRACE_S``."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        await self._process.wait()

    async def kill(self) -> None:
        """Ends it at once, without grace for the command; for one that is broken."""
        while self._process.returncode is None:
            for child in _children_of(self.pid):  # none yet if the guard has only just been started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _POLL_S)

    def family(self) -> dict[int, str]:
        """The processes below the engine's server that vLLM titles ``VLLM::EngineCore`` or ``VLLM::Worker``, by id."""
        named: dict[int, str] = {}
        pending = [self.pid]
        while pending:
            for child in _children_of(pending.pop()):
                pending.append(child)
                if (name := _name_of(child)) and name.startswith("VLLM"):
                    named[child] = name
        return named


def lost(family: Mapping[int, str]) -> str | None:
    """The name of a process of ``family`` that is gone or dead, or None."""
    for pid, name in family.items():
        if _name_of(pid) != name:
            return name
    return None


def _name_of(pid: int) -> str | None:
    """The title of a process; None if it is gone, a zombie, or ending (giving gigabytes back takes a while)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    if fields[0] in "ZX" or int(fields[6]) & _PF_EXITING:
        return None
    return name


def _children_of(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, or what keeps it from being read."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, maxlen=lines)).rstrip()
    except OSError as error:
        return f"({log}: {error.strerror})"
