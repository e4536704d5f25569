import contextlib
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from transfer.waiting import descriptors, until
from trivet.transfer import sockets
from trivet.transfer.sockets import connected, foreign_user, listening


def refused(path):
    with pytest.raises(ValueError, match="listen") as error:
        listening(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def dead(path):
    """The socket of a process that was killed."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))


# the folder


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750, 0o711])
def test_a_folder_in_which_only_its_user_writes_is_taken(folder, mode):
    folder.chmod(mode)
    with listening(str(folder / "s")):
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
    folder.chmod(0o700)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777, 0o2775])
def test_a_folder_in_which_others_may_write_is_refused_with_the_mend(folder, mode):
    folder.chmod(mode)
    told = refused(folder / "s")
    assert f"other users may write in {folder} (mode {mode:04o})" in told
    assert f"chmod go-w {folder}" in told
    assert not (folder / "s").exists()


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    told = refused(folder / "s")
    assert f"{folder} belongs to user {os.getuid()}, not to this engine's (4242)" in told


def test_the_folder_that_a_link_leads_to_is_looked_at(folder):
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "link").symlink_to(folder / "open")
    assert "other users may write" in refused(folder / "link" / "s")


@pytest.mark.parametrize("where", ["file/s", "file/more/s"])
def test_a_folder_that_is_none_is_told(folder, where):
    (folder / "file").touch()
    assert str(folder / where) in refused(folder / where)


def test_the_process_umask_is_neither_used_nor_changed(folder, monkeypatch):
    old = os.umask(0)
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("it is every thread's"))
    try:
        with listening(str(folder / "new" / "s")):
            assert stat.S_IMODE((folder / "new" / "s").stat().st_mode) == 0o600
            assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700
    finally:
        monkeypatch.undo()
        os.umask(old)


# what lies there


def test_what_is_no_socket_is_never_removed(folder):
    (folder / "weights").write_text("precious")
    assert "no socket" in refused(folder / "weights")
    assert (folder / "weights").read_text() == "precious"


@pytest.mark.parametrize("points_at", ["dead", "weights", "nothing"])
def test_a_link_is_never_followed_nor_removed(folder, points_at):
    dead(folder / "dead")
    (folder / "weights").write_text("precious")
    (folder / "s").symlink_to(folder / points_at)
    assert "no socket" in refused(folder / "s")
    assert (folder / "s").is_symlink()
    assert {one.name for one in folder.iterdir()} == {"dead", "weights", "s"}


def test_the_socket_of_a_killed_engine_is_replaced(folder):
    dead(folder / "s")
    with listening(str(folder / "s")), connected(str(folder / "s"), 1):
        pass


def test_a_listener_that_takes_no_connections_is_alive_all_the_same(folder):
    """One whose process is stopped: its backlog is full."""
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(str(folder / "s"))
        stopped.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(folder / "s"))
        inode = (folder / "s").stat().st_ino
        assert "already listens" in refused(folder / "s")
        assert (folder / "s").stat().st_ino == inode
        with pytest.raises(TimeoutError, match=r"it took no connection within 0.05 s"):
            connected(str(folder / "s"), 0.05)


def test_a_socket_of_another_kind_is_somebodys(folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(folder / "s"))
        assert "already listens" in refused(folder / "s")
        assert (folder / "s").is_socket()


def test_of_engines_that_start_at_once_one_gets_the_path_and_is_reached(folder):
    path = str(folder / "s")
    for _ in range(20):
        dead(path)
        together, won, lost = threading.Barrier(4), [], []

        def start(together=together, won=won, lost=lost):
            together.wait()
            try:
                won.append(listening(path))
            except ValueError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert (len(won), len(lost)) == (1, 3), lost
        with won[0], connected(path, 1):
            won[0].setblocking(False)
            until(lambda one=won[0]: accepted(one))
        (folder / "s").unlink()


def accepted(own):
    with contextlib.suppress(BlockingIOError):
        own.accept()[0].close()
        return True
    return False


def test_a_folder_that_somebody_keeps_locked_is_not_waited_for_without_end(folder, monkeypatch):
    monkeypatch.setattr(sockets, "_LOCK_WITHIN_S", 0.05)
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert f"kept {folder} locked" in refused(folder / "s")
    finally:
        os.close(file)
    with listening(str(folder / "s")):
        pass


def test_nothing_but_the_socket_is_left_in_the_folder(folder):
    with listening(str(folder / "s")):
        assert [one.name for one in folder.iterdir()] == ["s"]


def test_a_refusal_leaves_no_descriptor(folder):
    (folder / "file").touch()
    with listening(str(folder / "live")):
        before = descriptors()
        for name in ("file", "live", "x" * 120, "file/s"):
            refused(folder / name)
        for name in ("file", "none", "x" * 120):
            with pytest.raises(OSError, match=r"."):
                connected(str(folder / name), 1)
        assert descriptors() == before


# the path


def test_a_path_that_is_too_long_is_told_with_the_limit_on_both_sides():
    path = "/tmp/" + "x" * 120
    assert "the path has 125 bytes, a Unix socket's has at most 107" in refused(path)
    with pytest.raises(OSError, match="the path has 125 bytes, a Unix socket's has at most 107") as error:
        connected(path, 1)
    assert error.value.errno == errno.ENAMETOOLONG


def test_the_longest_path_can_be_listened_at(folder):
    path = str(folder / "s").ljust(107, "x")
    with listening(path), connected(path, 1):
        pass


# whose the other process is


def test_this_users_processes_and_roots_are_not_foreign():
    a, b = socket.socketpair()
    with a, b:
        assert foreign_user(a) is None


def test_another_users_process_is_foreign(monkeypatch):
    class Foreign:
        def getsockopt(self, level, name, size):
            assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return sockets._CREDENTIALS.pack(1, self.user, 1)

    foreign = Foreign()
    for foreign.user, expected in ((4242, None), (0, None), (4243, 4243), (2**32 - 2, 2**32 - 2)):
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        assert foreign_user(foreign) == expected


def test_who_finds_another_users_listener_does_not_talk_to_it(folder, monkeypatch):
    with listening(str(folder / "s")):
        monkeypatch.setattr(sockets, "foreign_user", lambda own: 4242)
        with pytest.raises(PermissionError, match=f"user 4242 listens there, not this engine's .{os.geteuid()}."):
            connected(str(folder / "s"), 1)


LISTEN = """
import os, socket, sys
own = socket.socket(socket.AF_UNIX)
os.setuid(65534)
own.bind(sys.argv[1])
own.listen(1)
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_kernel_says_whose_a_listener_is(folder):
    folder.chmod(0o777)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LISTEN, str(folder / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"listens\n"
        with pytest.raises(PermissionError, match="user 65534 listens there"):
            connected(str(folder / "s"), 1)
        other.stdin.close()


def test_nobody_else_looks_at_the_path_from_the_look_until_it_is_listened_at(folder, monkeypatch):
    held, original = [], socket.socket.listen

    def listen(own, *backlog):
        file = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(stat.S_IMODE((folder / "s").stat().st_mode))
        finally:
            os.close(file)
        original(own, *backlog)

    monkeypatch.setattr(socket.socket, "listen", listen)
    with listening(str(folder / "s")):
        assert held == [0o600]
