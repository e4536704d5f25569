"""A guarded child process with a log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trivet.fleet import guard

_NOT_INHERITED = frozenset({"VLLM_API_KEY"})
"""A key for the gateway's clients; an engine that took it would refuse the gateway."""

GRACE_S = 10.0
"""How long an engine may take to end after SIGTERM. Work in flight was drained before, by the gateway."""

_POLL_S = 0.05
_BY_SIGNAL = 128
"""What shells and guards add to a signal's number for an exit status."""


_PF_EXITING = 0x4
"""Of the flags in ``/proc/PID/stat`` (Linux, ``include/linux/sched.h``)."""


class GuardedProcess:
    """A command under ``guard``: nothing of it outlives it, or this process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_begins: int = 0) -> None:
        self._process = process
        self.log = log
        self.log_begins = log_begins
        """How long the log was when it was started: what stands before is of earlier lives."""

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], log: Path) -> GuardedProcess:
        """Starts ``command`` with ``env`` added to this process's environment; output goes to ``log``, appended."""
        log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with log.open("ab") as output:
            log_begins = output.tell()
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
        return cls(process, log, log_begins)

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
                async with asyncio.timeout(_POLL_S):
                    await self._process.wait()

    def family(self) -> dict[int, str]:
        """The processes below the engine's server that vLLM titles ``VLLM::EngineCore`` or ``VLLM::Worker``, by id."""
        names = {child: _name_of(child) or "" for child in self._descendants()}
        return {child: name for child, name in names.items() if name.startswith("VLLM")}

    def listens_on(self, port: int) -> bool:
        """Whether it, or something below it, is who listens on a TCP port of this host."""
        listeners = _listeners(port)
        return any(listeners & _sockets_of(child) for child in self._descendants())

    def _descendants(self) -> Iterator[int]:
        pending = [self.pid]
        while pending:
            for child in _children_of(pending.pop()):
                pending.append(child)
                yield child


def how_it_ended(status: int) -> str:
    """An exit status in words: one for a process of our own (-9), and one that a guard or shell tells (137)."""
    number = -status if status < 0 else status - _BY_SIGNAL
    is_signal = 0 < number < signal.NSIG  # a command may well end with 255 of its own
    return f"was ended by signal {number}" if is_signal else f"ended with exit status {status}"


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


_LISTENING = "0A"
"""State of a TCP socket in ``/proc/net/tcp`` (Linux, ``include/net/tcp_states.h``)."""


def _listeners(port: int) -> set[str]:
    """The inodes of the sockets that listen on a port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes


def _sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _children_of(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


_CAUSE = re.compile(r"(?:^|[\s.])(?:\w*(?:Error|Exception)|error): (?P<said>\S.*)")
_NO_CAUSE = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "cancelled",
    "Worker failed with error",
)
"""How vLLM's outer processes say that an inner one has ended; the inner one has said why, further up."""
_SEARCHED = 2**20
_LONGEST = 300


def cause(log: Path, since: int = 0) -> str | None:
    """What an engine's log says last of why it ended: the message of its innermost error, in one line.

    Args:
        since: where in the log this life of the engine begins; see ``GuardedProcess.log_begins``.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(since if since <= size else 0, size - _SEARCHED))  # somebody may have cut it short
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if (found := _CAUSE.search(line)) and not found["said"].startswith(_NO_CAUSE):
            said = found["said"].strip()
            return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
    return None


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, or what keeps it from being read."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, maxlen=lines)).rstrip()
    except OSError as error:
        return f"({log}: {error.strerror})"
