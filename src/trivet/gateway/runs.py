"""Runs of services on this machine: their folders, and the service that was started last."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.errors import TrivetError
from trivet.gateway.reload import Reload

RELOAD_FILE = "reload.json"
"""Of a run's folder, while the service can be reloaded: the newest reload, as ``Reload`` has it."""
FAULTS_LOG = "faults.log"
"""Of a run's folder: where unforeseen exceptions came from, if there were any."""
_KEPT_RUNS = 10


def state_dir() -> Path:
    """Where runs are kept: ``$TRIVET_STATE``, else ``$XDG_STATE_HOME/trivet``, else ``~/.local/state/trivet``."""
    if own := os.environ.get("TRIVET_STATE"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "trivet"


def new_run_dir() -> Path:
    """A fresh folder for the logs of one run; the oldest ones are removed."""
    runs = state_dir() / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    ended = [run for run in sorted(runs.iterdir()) if not _is_running(run.name.rpartition("-")[2])]
    for old in ended[: max(0, len(ended) - _KEPT_RUNS + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    path = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path.mkdir()
    return path


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def process_start(pid: int) -> str | None:
    """What only this process has, of all that ever have its number; None if it does not run (any more)."""
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return None if state in ("Z", "X") else f"{boot} {fields[18]}"
    except (OSError, IndexError, ValueError):
        return None


def last_url() -> str | None:
    """The address of the service that was started last and still runs, for commands that are given none."""
    last = _last()
    return str(last["url"]) if last is not None else None


def last_certificate() -> Path | None:
    """The certificate that this service shows; None if it serves HTTP, or if there is none."""
    last = _last() or {}
    return Path(last["certificate"]) if "certificate" in last else None


@dataclass(frozen=True, slots=True)
class LastService:
    """The service that was started last."""

    pid: int
    url: str
    run_dir: Path
    started: str | None = None
    """Its process's ``process_start``, as it was recorded."""

    def hang_up(self) -> None:
        """Sends it SIGHUP: it, and no other process that has its number meanwhile.

        Raises:
            TrivetError: it is gone, or someone else's.
        """
        gone = TrivetError(f"the service at {self.url} has ended", mend="trivet up FILE")
        try:
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.started is None or process_start(self.pid) != self.started:
                    raise gone
                signal.pidfd_send_signal(descriptor, signal.SIGHUP)
            finally:
                os.close(descriptor)
        except ProcessLookupError:
            raise gone from None
        except PermissionError:
            raise TrivetError(
                f"the service at {self.url} (process {self.pid}) is another user's", mend="reload it as that user"
            ) from None
        except OSError as error:
            raise TrivetError(
                f"the service at {self.url} (process {self.pid}) cannot be sent a signal: {error.strerror}",
                mend=f"kill -HUP {self.pid}",
            ) from None

    def sign_of_life(self) -> int | None:
        """Another number each time that the service has shown, in the run's folder, that it can be or is reloaded."""
        try:
            return (self.run_dir / RELOAD_FILE).stat().st_mtime_ns
        except OSError:
            return None

    def reload(self) -> Reload | None:
        """Its newest reload, number 0 if there was none; None if it cannot be reloaded, or not yet."""
        try:
            return Reload(**json.loads((self.run_dir / RELOAD_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def last_service() -> LastService | None:
    """The service that was started last and still runs."""
    last = _last()
    if last is None:
        return None
    return LastService(int(last["pid"]), str(last["url"]), Path(last.get("run_dir", "")), last.get("started"))


def _last() -> Mapping[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads((state_dir() / "last.json").read_text(encoding="utf-8"))
        if not value["url"] or not _is_running(str(value["pid"])):
            return None
        if "started" in value and process_start(int(value["pid"])) != value["started"]:
            return None  # another process has its number now
        return value
    except (OSError, ValueError, KeyError, TypeError):
        return None
