"""Runs one command and sees to it that nothing of it is left when it, or whoever asked for it, is gone.

    python guard.py GRACE_S -- COMMAND ...

The guard is started with a pipe as its standard input, held open by Trivet. It ends the command's whole process
group, and whatever has left that group but descends from it, when the command ends, when the pipe closes (Trivet
is gone, by SIGKILL too) or on SIGTERM: first SIGTERM to the command, and SIGKILL to all when GRACE_S seconds are
over. It exits with the command's status (128 + n if signal n ended it). It stands alone and imports nothing of
Trivet, so that it is small and starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_END_LIMIT_S = 60.0  # giving back a GPU, or tens of gigabytes, takes a killed process some seconds


def main(arguments: list[str]) -> int:
    """Guards ``arguments[2:]``; see the module."""
    grace_s = float(arguments[0])
    command = arguments[arguments.index("--") + 1 :]
    # Descendants that lose their parent become ours instead of init's, so that they can be found and ended.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked_to_stop = False

    def on_signal(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for Trivet, which stops things in order
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # should the guard itself be killed
    )
    while child.poll() is None and not asked_to_stop and not _pipe_closed():
        _reap_orphans(child.pid)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()  # before the rest is reaped, or its status would be lost
    _end_all(child.pid)
    return status if status >= 0 else 128 - status


def _pipe_closed() -> bool:
    """Waits a moment; True once the other end of standard input is closed."""
    readable, _, _ = select.select([0], [], [], _POLL_S)
    return bool(readable) and os.read(0, 4096) == b""


def _reap_orphans(child: int) -> None:
    """Reaps descendants that lost their parent and have ended; not the command, whose status ``Popen`` reads."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)


def _end_all(group: int) -> None:
    """Kills the group and every other descendant, and reaps them."""
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        left = _children()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.02)


def _children() -> list[int]:
    """Children of this process that are not yet reaped zombies of the command itself."""
    me = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="latin-1") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == me and fields[0] != "Z":
            found.append(int(entry))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
