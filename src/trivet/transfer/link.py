"""Connections between engines of one host: messages, and file descriptors beside them, over Unix sockets.

Each connection has one reading thread, which blocks in the kernel while nothing comes: an idle engine costs nothing.
A peer that ends, however it ends, closes its sockets, which the reader sees at once. A peer that stops reading
without ending (a stopped process) makes a send time out, which counts as its end: a scheduler must not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trivet.transfer.messages import Message, decode, encode

logger = logging.getLogger("vllm.trivet")

_LENGTH = struct.Struct("!I")
_LONGEST_BYTES = 64 * 2**20
_SEND_LIMIT_S = 1.0
_BUFFER_BYTES = 2**20
_MOST_FILES = 4


class Connection:
    """One end of a connection."""

    def __init__(self, own: socket.socket) -> None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        seconds = int(_SEND_LIMIT_S)
        own.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_SNDTIMEO,
            struct.pack("ll", seconds, int((_SEND_LIMIT_S - seconds) * 1e6)),
        )
        self._socket = own
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._files: list[int] = []
        self.closed = False

    @classmethod
    def to(cls, path: str) -> Connection:
        """Connects.

        Raises:
            OSError: nobody listens there.
        """
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            own.connect(path)
        except BaseException:
            own.close()
            raise
        return cls(own)

    def send(self, message: Message, files: Sequence[int] = ()) -> bool:
        """Sends a message, with file descriptors that the peer gets copies of. False if the peer is gone.

        What was sent to a peer that lives arrives, also if this process ends right afterwards: it is in the kernel.
        """
        data = encode(message)
        view = memoryview(_LENGTH.pack(len(data)) + data)
        with self._sending:
            if self.closed:
                return False
            try:
                while view:
                    sent = socket.send_fds(self._socket, [view], list(files)) if files else self._socket.send(view)
                    files = ()
                    view = view[sent:]
            except OSError:  # also a time-out, after which the stream has half a message in it
                self._shut()
                return False
        return True

    def receive(self) -> Message | None:
        """The next message; None when the peer is gone. For one thread only.

        Raises:
            ValueError: what came is no message.
        """
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > _LONGEST_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                if len(self._buffer) >= _LENGTH.size + length:
                    data = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
                    del self._buffer[: _LENGTH.size + length]
                    return decode(data)
            try:
                data, files, _, _ = socket.recv_fds(self._socket, 2**18, _MOST_FILES)
            except OSError:
                return None
            self._files += files
            if not data:
                return None
            self._buffer += data

    def take_files(self) -> list[int]:
        """The file descriptors that have come so far; the caller closes them."""
        files, self._files = self._files, []
        return files

    def close(self) -> None:
        """Closes it; a thread in ``receive`` returns."""
        with self._sending:
            self._shut()
        for file in self.take_files():
            with contextlib.suppress(OSError):
                os.close(file)

    def _shut(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


class Listener:
    """Accepts connections and runs ``serve`` for each in a thread of its own; the connection is closed behind it."""

    def __init__(self, path: str, serve: Callable[[Connection], None], name: str) -> None:
        """
        Raises:
            ValueError: the path cannot be listened at, in one line.
        """
        self.path = path
        self._serve = serve
        self._name = name
        self._open: set[Connection] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_served(path):
                raise ValueError(f"another engine's connector already listens at {path}")
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()  # of an engine that was killed
            mask = os.umask(0o177)
            try:
                self._socket.bind(path)
            finally:
                os.umask(mask)
            self._socket.listen(64)
        except ValueError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise ValueError(f"TrivetConnector cannot listen at {path}: {error.strerror or error}") from error
        self._inode = Path(path).stat().st_ino
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                own, _ = self._socket.accept()
            except OSError:
                return
            connection = Connection(own)
            self._open.add(connection)
            threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True).start()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except ValueError as error:
            logger.error("TrivetConnector: a peer at %s was cut off: %s", self.path, error)
        finally:
            connection.close()
            self._open.discard(connection)

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            if Path(self.path).stat().st_ino == self._inode:  # not that of an engine started since
                Path(self.path).unlink()
        for connection in list(self._open):
            connection.close()


def _is_served(path: str) -> bool:
    try:
        Connection.to(path).close()
    except OSError:
        return False
    return True
