"""Connections between the engines of one host: a JSON object a line, over Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from trivet.errors import PortInUseError, TrivetError

SCHEME = "unix:"
_LONGEST_PATH_BYTES = 107
_LONGEST_LINE_BYTES = 2**16
_BACKLOG = 4096
"""A Unix socket whose backlog is full looks to asyncio as if it were connected."""
_CONNECT_S = 5.0
_PAUSE_S = 0.5


class Link(asyncio.Protocol):
    """One end of a connection."""

    def __init__(
        self,
        heard: Callable[[Link, dict[str, Any]], None],
        lost: Callable[[Link], None],
        made: Callable[[Link], None] = lambda _: None,
    ) -> None:
        """
        Args:
            heard: called with each message.
            lost: called once, when the connection is gone for whatever reason.
            made: called when there is a connection.
        """
        self._heard = heard
        self._lost = lost
        self._made = made
        self._transport: asyncio.Transport | None = None
        self._is_cut = False
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)
        self._made(self)
        if self._is_cut:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError:
                message = None
            if not isinstance(message, dict):
                self.cut()
                return
            self._heard(self, message)
        if len(self._rest) > _LONGEST_LINE_BYTES:
            self.cut()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """See ``asyncio.Protocol``."""
        self._transport = None
        self._lost(self)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; nothing happens if the connection is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(orjson.dumps(message) + b"\n")

    def close(self) -> None:
        """Ends the connection when all that was sent is out."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Ends the connection at once, or as soon as there is one."""
        self._is_cut = True
        if self._transport is not None:
            self._transport.abort()


async def connect(address: str, link: Link) -> None:
    """Connects a link to the engine at ``address``.

    Raises:
        OSError: nobody listens there.
        ValueError: it is no address.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_S):
        await loop.create_unix_connection(lambda: link, path_of(address))


class Listener:
    """What listens at an address. ``close`` and then ``remove``, or, as a process that was killed, ``close`` only.

    An ``asyncio.Server`` loses connections that it accepts while it is closed: their sockets stay open.
    """

    def __init__(self, own: socket.socket, path: Path, link: Callable[[], Link]) -> None:
        self._socket = own
        self._path = path
        self._inode = path.stat().st_ino
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._accepting: set[asyncio.Task[Any]] = set()
        own.setblocking(False)
        own.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        """Listens no more; connections that are there stay."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def settled(self) -> None:
        """Returns when every connection that was accepted has its link."""
        await asyncio.gather(*self._accepting, return_exceptions=True)

    def remove(self) -> None:
        """Takes the socket out of the file system, unless another engine has put its own there since."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file descriptors are left
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_PAUSE_S, self._resume)
                return
            one.setblocking(False)
            task = self._loop.create_task(self._loop.connect_accepted_socket(self._link, one))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)


def listen(address: str, link: Callable[[], Link]) -> Listener:
    """Listens at ``address``, with a link for each engine that connects; for nobody but this user.

    Raises:
        PortInUseError: someone else listens there.
        TrivetError: nobody can.
    """
    try:
        path = Path(path_of(address))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_socket():
            if _is_served(path):
                raise PortInUseError(f"another engine listens at {address}", mend="another address")
            path.unlink()  # of an engine that was killed
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            own.bind(str(path))
        except OSError:
            own.close()
            raise
        finally:
            os.umask(mask)
        return Listener(own, path, link)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TrivetError(f"cannot listen at {address}: {problem}", mend="another address") from None


def path_of(address: str) -> str:
    """The path in an address.

    Raises:
        ValueError: it is no address that an engine on this host can have.
    """
    path = address.removeprefix(SCHEME)
    if path == address or not Path(path).is_absolute():
        raise ValueError(f"an address is {SCHEME} and an absolute path")
    if len(os.fsencode(path)) > _LONGEST_PATH_BYTES:
        raise ValueError(f"the path is longer than {_LONGEST_PATH_BYTES} bytes")
    return path


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
