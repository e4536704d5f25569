"""Free ports, without collisions between engines or between Trivets of one user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable
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
        self._locks: dict[int, int] = {}
        """Descriptors of the locks, by port."""
        self._ours: frozenset[int] = frozenset()

    def again(self) -> PortBook:
        """A book to plan with anew, while what was planned with this one runs.

        A port of this book can be had there by its number, whoever listens now, and is not handed out as a free one.
        Close that book, or have this one ``adopt`` it.
        """
        book = PortBook(lock=self._lock)
        book._ours = frozenset(self._taken)
        return book

    def adopt(self, book: PortBook, *, whole: bool) -> None:
        """Holds what another book, made by ``again``, has handed out.

        Args:
            whole: nothing but that is needed any more; the other ports are given back.
        """
        self._locks |= book._locks
        book._locks = {}
        self._taken = set(book._taken) if whole else self._taken | book._taken
        self._give_back([port for port in self._locks if port not in self._taken])

    def keep(self, port: int) -> bool:
        """Takes a port that the book has which this one was made of; whether it could be had."""
        if port not in self._ours or port in self._taken:
            return False
        self._taken.add(port)
        return True

    def set_aside(self, port: int) -> None:
        """Keeps a port for the gateway, which binds it itself and listens only once it can serve.

        Raises:
            PortInUseError: another Trivet has it.
        """
        if port and port not in self._ours and not self._hold(port):
            raise PortInUseError(
                f"port {port} for the gateway is in use by another Trivet",
                mend="give another: --port N, or gateway.port in the topology (0: a free one)",
            )
        self._taken.add(port)

    def fixed(self, port: int, host: str, what: str) -> int:
        """Takes a port that was asked for by number.

        Raises:
            PortInUseError: something listens there, two engines want it, or ``host`` is not of this machine.
        """
        if port in self._taken:
            raise PortInUseError(f"port {port} is wanted twice, the second time for {what}", mend="give another port")
        if self._lock and port not in self._ours and not (self._hold(port) and is_free(port, host)):
            raise PortInUseError(f"port {port} for {what} is in use", mend="stop what uses it, or give another port")
        self._taken.add(port)
        return port

    def free(self, start: int, host: str, count: int = 1) -> int:
        """The first of ``count`` consecutive free ports at or above ``start``."""
        first = start
        while first + count <= 65536:
            block = range(first, first + count)
            if all(self._is_unused(port, host) and self._hold(port) for port in block):
                self._taken.update(block)
                return first
            self._give_back([port for port in block if port not in self._taken])
            first += 1
        raise PortInUseError(f"no {count} free port(s) from {start} up", mend="give ports in the topology")

    def close(self) -> None:
        """Gives the ports back."""
        self._give_back(list(self._locks))

    def _is_unused(self, port: int, host: str) -> bool:
        return port not in self._taken and port not in self._ours and is_free(port, host)

    def _give_back(self, ports: Iterable[int]) -> None:
        for port in ports:
            if (descriptor := self._locks.pop(port, None)) is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _hold(self, port: int) -> bool:
        if not self._lock:
            return True
        folder = Path(tempfile.gettempdir()) / f"trivet-ports-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PortInUseError(
                f"ports cannot be locked in {folder}: {error.strerror}", mend="set TMPDIR to a folder of your own"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._locks[port] = descriptor
        return True


def is_free(port: int, host: str) -> bool:
    """Whether a server could listen there now.

    Raises:
        PortInUseError: nobody could on this machine, whatever else runs on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise PortInUseError(
                f"nothing can listen on {host}:{port} here: {error.strerror or error}",
                mend="bind: an address of this machine; port: 1024 or above",
            ) from None
    return True


_HOSTS = "give an address of this machine: 127.0.0.1, 0.0.0.0, or a name of its own"


def bind(who: str, host: str, port: int, *, another: str, hosts: str = _HOSTS) -> socket.socket:
    """A bound socket, so that a taken port is known before anything is started.

    Args:
        who: is to listen there, in words.
        another: how another port is given.
        hosts: which hosts can be given, and where.

    Raises:
        PortInUseError: nobody can listen there now.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise PortInUseError(f"{who}: host {host}: {error.strerror or error}", mend=hosts) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        mends = {errno.EADDRNOTAVAIL: hosts, errno.EACCES: f"ports below 1024 are root's; give another: {another}"}
        raise PortInUseError(
            f"{who} cannot listen on {host}:{port}: {error.strerror}",
            mend=mends.get(error.errno or 0, f"stop what uses it, or give another: {another}"),
        ) from None
    return listener
