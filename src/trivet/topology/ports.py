"""Free ports, without collisions between engines or between Trivets of one user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from trivet.errors import PortInUseError


class PortBook:
    """Hands out ports. While the book is open each of its ports is locked against other Trivets on this host."""

    def __init__(self, *, lock: bool = True) -> None:
        """
        Args:
            lock: take locks; without, ports are only looked up (to show a plan).
        """
        self._lock = lock
        self._taken: set[int] = set()
        self._locks: list[int] = []

    def fixed(self, port: int, host: str, what: str) -> int:
        """Takes a port that was asked for by number.

        Raises:
            PortInUseError: something listens there, or two engines want it.
        """
        if port in self._taken:
            raise PortInUseError(f"port {port} is wanted twice, the second time for {what}", mend="give another port")
        if self._lock and not (self._hold(port) and is_free(port, host)):
            raise PortInUseError(f"port {port} for {what} is in use", mend="stop what uses it, or give another port")
        self._taken.add(port)
        return port

    def free(self, start: int, host: str, count: int = 1) -> int:
        """The first of ``count`` consecutive free ports at or above ``start``."""
        first = start
        while first + count <= 65536:
            block = range(first, first + count)
            if all(port not in self._taken and is_free(port, host) and self._hold(port) for port in block):
                self._taken.update(block)
                return first
            first += 1
        raise PortInUseError(f"no {count} free port(s) from {start} up", mend="give ports in the topology")

    def close(self) -> None:
        """Gives the ports back."""
        for descriptor in self._locks:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._locks.clear()

    def _hold(self, port: int) -> bool:
        if not self._lock:
            return True
        folder = Path(tempfile.gettempdir()) / f"trivet-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._locks.append(descriptor)
        return True


def is_free(port: int, host: str) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
