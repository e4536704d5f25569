"""Unix sockets that only this user's processes reach: where they may lie, and who may be at the other end.

Three things guard a socket. Its folder is this user's, and nobody else may write in it, so nobody can put another in
its place. Its file is this user's alone. And each side looks at whose the other process is, which the kernel tells.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from trivet.connectors.address import LONGEST_SOCKET_PATH_BYTES

_BACKLOG = 64
_LOCK_WITHIN_S = 5.0
_CREDENTIALS = struct.Struct("iII")  # struct ucred (Linux, sys/socket.h)


def send_limit(own: socket.socket, seconds: float) -> None:
    """Limits how long a send, or a connect, waits for the peer. The kernel's limit leaves receiving alone."""
    whole = int(seconds)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def connected(path: str, within_s: float) -> socket.socket:
    """A socket that is connected to a process of this user's, or root's.

    Raises:
        OSError: nobody listens there, or somebody else.
    """
    _check_length(path)
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        send_limit(own, within_s)
        try:
            own.connect(path)
        except BlockingIOError:
            raise TimeoutError(f"it took no connection within {within_s:g} s") from None
        if (user := foreign_user(own)) is not None:
            raise PermissionError(errno.EACCES, f"user {user} listens there, not this engine's ({os.geteuid()})")
    except BaseException:
        own.close()
        raise
    return own


def foreign_user(own: socket.socket) -> int | None:
    """The user id of the process at the other end, where it is neither this user's nor root's."""
    told = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return None if user in (os.geteuid(), 0) else int(user)


def listening(path: str) -> socket.socket:
    """A socket that listens at ``path``, for this user only; what a killed engine left there is replaced.

    Raises:
        ValueError: it cannot be, in one line.
    """
    try:
        _check_length(path)
        folder = Path(path).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder):  # engines that start at once must not remove each other's
            _remove_stale(path)
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                own.bind(path)
                # Not by the umask, which is the whole process's. Nobody can connect before ``listen``.
                Path(path).chmod(0o600)
                own.listen(_BACKLOG)
            except BaseException:
                own.close()
                raise
            return own
    except OSError as error:
        raise ValueError(f"TrivetConnector cannot listen at {path}: {error.strerror or error}") from error


def _check_length(path: str) -> None:
    if (size := len(os.fsencode(path))) > LONGEST_SOCKET_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path has {size} bytes, a Unix socket's has at most {LONGEST_SOCKET_PATH_BYTES}; "
            "choose a shorter address",
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder itself: no file is left behind."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_folder(folder, os.fstat(file))
        end_s = time.monotonic() + _LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"somebody else has kept {folder} locked for {_LOCK_WITHIN_S:g} s") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(file)


def _check_folder(folder: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EACCES,
            f"{folder} belongs to user {status.st_uid}, not to this engine's ({os.geteuid()}); "
            "choose an address (kv_address) in a folder of its own",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            errno.EACCES,
            f"other users may write in {folder} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"chmod go-w {folder}, or choose an address (kv_address) in another folder",
        )


def _remove_stale(path: str) -> None:
    """Removes the socket of an engine that was killed; nothing else, and never one that somebody listens at."""
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket; choose another address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError:
            pass  # its backlog is full, or it is of another kind: somebody has it
    raise ValueError(f"another engine's connector already listens at {path}; stop it or choose another address")
