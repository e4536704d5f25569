"""Connections between engines of one host: messages, and file descriptors beside them, over Unix sockets.

Each connection has one reading thread, which blocks in the kernel while nothing comes: an idle engine costs nothing.
A peer that ends, however it ends, closes its sockets, which the reader sees at once. A peer that stops reading
without ending (a stopped process) makes a send time out, which counts as its end: a scheduler must not wait for it.
A peer speaks right after it has connected, and is answered at once: only its first message is waited for with a limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trivet.transfer.messages import LONGEST_BYTES, Message, decode, encode, one_line
from trivet.transfer.sockets import connected, foreign_user, listening, send_limit

logger = logging.getLogger("vllm.trivet")

FIRST_WITHIN_S = 30.0
"""How long a peer's first message is waited for. Its scheduler may be in a long step, its worker may pin memory."""
MOST_SILENT = 64
"""Connections of a listener that have said nothing yet; the oldest makes room. Each holds a thread and a descriptor."""

_LENGTH = struct.Struct("!I")
_SEND_LIMIT_S = 1.0
_BUFFER_BYTES = 2**20
_FILE = struct.Struct("i")
_MOST_FILES = 4
_FILES_BYTES = socket.CMSG_SPACE(_MOST_FILES * _FILE.size)
_PAUSES_S = (0.05, 1.0)
_TOLD_AGAIN_S = 60.0


class Connection:
    """One end of a connection."""

    def __init__(self, own: socket.socket) -> None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        send_limit(own, _SEND_LIMIT_S)
        self._socket = own
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._is_read = False
        self._receiving = False
        self._dropped = False
        self._buffer = bytearray()
        self._files: list[int] = []
        self.heard = False
        """Whether a message has come."""
        self.closed = False
        """Whether nothing can be sent any more."""

    @classmethod
    def to(cls, path: str) -> Connection:
        """Connects.

        Raises:
            OSError: nobody listens there, or another user.
        """
        own = connected(path, _SEND_LIMIT_S)
        try:
            return cls(own)
        except BaseException:
            own.close()
            raise

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
                with self._state:  # what the peer said before is still received, if anybody receives here
                    if not self._is_read:
                        self._socket.close()
                return False
        return True

    def receive(self, within_s: float | None = None) -> Message | None:
        """The next message; None when the peer is gone. For one thread only.

        Args:
            within_s: how long it is waited for; None is for ever, but for a peer's first.

        Raises:
            ValueError: what came is no message.
            TimeoutError: none came in time. The connection is of no use then.
        """
        if within_s is None and not self.heard:
            within_s = FIRST_WITHIN_S
        end_s = None if within_s is None else time.monotonic() + within_s
        if not self._hold():
            return None
        try:
            message = self._next(end_s)
        except TimeoutError:
            raise TimeoutError(f"it said nothing within {within_s:g} s") from None
        finally:
            self._let_go()
        self.heard = self.heard or message is not None
        return message

    def _hold(self) -> bool:
        """Keeps the descriptor open: closed under the thread that receives, its number could be another file's."""
        with self._state:
            self._is_read = True
            self._receiving = not self._dropped and self._socket.fileno() >= 0
            return self._receiving

    def _let_go(self) -> None:
        with self._state:
            self._receiving = False
            if self._dropped:
                self._socket.close()

    def _next(self, end_s: float | None) -> Message | None:
        while not self._dropped:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > LONGEST_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                if len(self._buffer) >= _LENGTH.size + length:
                    data = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
                    del self._buffer[: _LENGTH.size + length]
                    return decode(data)
            if end_s is not None:
                self._wait(end_s)
            try:  # not ``socket.recv_fds``, which drops its flags (Python 3.11)
                data, beside, flags, _ = self._socket.recvmsg(2**18, _FILES_BYTES, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return None
            for level, kind, content in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = content[: len(content) // _FILE.size * _FILE.size]
                    with self._state:
                        self._files += (file for (file,) in _FILE.iter_unpack(whole))
            if flags & socket.MSG_CTRUNC or len(self._files) > _MOST_FILES:
                raise ValueError(f"more than {_MOST_FILES} file descriptors")
            if not data:
                return None
            self._buffer += data
        return None

    def _wait(self, end_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            raise TimeoutError

    def is_cut_off(self) -> bool:
        """Whether it is closed at either end, though messages may be left to receive. For the thread that receives."""
        if not self._hold():
            return True
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))
        finally:
            self._let_go()

    def take_files(self) -> list[int]:
        """The file descriptors that have come so far; the caller closes them."""
        with self._state:  # a descriptor that two threads close is another file's the second time
            files, self._files = self._files, []
        return files

    def close(self) -> None:
        """Closes it; a thread in ``receive`` returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a send that waits, so that this does not
        with self._sending:
            self._shut()
            with self._state:
                self._dropped = True
                if not self._receiving:
                    self._socket.close()
        for file in self.take_files():
            with contextlib.suppress(OSError):
                os.close(file)

    def _shut(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


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
        self._lock = threading.Lock()
        self._open: dict[Connection, None] = {}
        """The oldest first."""
        self._closing = threading.Event()
        self._told_s: dict[str, float] = {}
        self._socket = listening(path)
        self._file = _file_at(path)
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        pause_s, longest_s = _PAUSES_S
        with self._socket:
            while not self._closing.is_set():
                try:
                    own, _ = self._socket.accept()
                    self._begin(own)
                    pause_s = _PAUSES_S[0]
                except (OSError, RuntimeError) as error:  # no descriptors or memory are left, or no threads
                    if self._closing.is_set():
                        return
                    why = getattr(error, "strerror", None) or error
                    self._tell(f"cannot take a connection at {self.path}, and tries again: {why}")
                    if getattr(error, "errno", None) in (errno.EBADF, errno.ENOTSOCK):
                        return  # somebody closed the descriptor under us
                    self._closing.wait(pause_s)
                    pause_s = min(2 * pause_s, longest_s)

    def _begin(self, own: socket.socket) -> None:
        try:
            if (user := foreign_user(own)) is not None:
                self._tell(f"refused a process of user {user} at {self.path}; engines of a pair run as the same user")
                own.close()
                return
            connection = Connection(own)
        except BaseException:
            own.close()
            raise
        with self._lock:
            self._open[connection] = None
            silent = [one for one in self._open if not (one.heard or one.closed)]
            closing = self._closing.is_set()
        if closing:
            connection.close()
        if len(silent) > MOST_SILENT:
            self._tell(f"more than {MOST_SILENT} connections at {self.path} say nothing; the oldest was closed")
            silent[0].close()
        try:
            threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True).start()
        except RuntimeError:
            self._end(connection)
            raise

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except (ValueError, TimeoutError) as error:
            logger.error("TrivetConnector: a peer at %s was cut off: %s", self.path, one_line(error))
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._open.pop(connection, None)

    def _tell(self, what: str) -> None:
        """Logs it, but not for ever the same."""
        now_s = time.monotonic()
        if now_s - self._told_s.get(what, -_TOLD_AGAIN_S) >= _TOLD_AGAIN_S:
            self._told_s[what] = now_s
            logger.error("TrivetConnector: %s", what)

    def close(self) -> None:
        """Stops listening, and ends all connections."""
        if not self._closing.is_set():  # while it still listens, nobody puts another in its place
            with contextlib.suppress(OSError):
                if _file_at(self.path) == self._file:
                    Path(self.path).unlink()
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1)
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.close()


def _file_at(path: str) -> tuple[int, int, int]:
    """Which file lies there; numbers of inodes are used again."""
    status = Path(path).lstat()
    return status.st_dev, status.st_ino, status.st_ctime_ns
