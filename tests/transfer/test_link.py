import contextlib
import errno
import gc
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
import warnings
from pathlib import Path

import pytest

from transfer.waiting import LIMIT_S, descriptors, until
from trivet.transfer import link
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import PROTOCOL, Alive, Hello, Landed, Lost, Open, Took, encode


class Server:
    """A listener that keeps what it is sent."""

    def __init__(self, path):
        self.came = queue.Queue()
        self.connections = []
        self.gone = threading.Event()
        self.listener = Listener(str(path), self._serve, "test-link")

    def _serve(self, connection):
        self.connections.append(connection)
        try:
            while (message := connection.receive()) is not None:
                self.came.put((message, connection.take_files()))
        finally:
            self.gone.set()

    def next(self):
        return self.came.get(timeout=LIMIT_S)

    def close(self):
        self.listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def server(folder):
    with contextlib.closing(Server(folder / "s")) as server:
        yield server


@pytest.fixture
def client(server):
    with contextlib.closing(Connection.to(server.listener.path)) as client:
        until(lambda: server.connections)
        yield client


def pair():
    a, b = socket.socketpair()
    return Connection(a), b


def large(size, name="e"):
    """A message of about so many bytes."""
    return Hello(PROTOCOL, name, {f"{number}": name[:1] * 1000 for number in range(size // 1000)})


def framed(message):
    data = encode(message)
    return struct.pack("!I", len(data)) + data


def test_messages_come_in_the_order_they_were_sent(client, server):
    for number in range(100):
        assert client.send(Took(number))
    assert [server.next()[0].slot for _ in range(100)] == list(range(100))


def test_messages_go_both_ways(client, server):
    assert server.connections[0].send(Open("to the client"))
    assert client.receive() == Open("to the client")


def test_a_message_that_comes_byte_by_byte_is_put_together():
    own, raw = pair()
    stream = framed(Open("a")) + framed(Lost("b", "x" * 300)) + framed(Alive())

    def trickle():
        for at in range(len(stream)):
            raw.send(stream[at : at + 1])
        raw.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    assert [own.receive() for _ in range(4)] == [Open("a"), Lost("b", "x" * 300), Alive(), None]
    thread.join()
    own.close()


def test_messages_that_come_at_once_are_told_apart():
    own, raw = pair()
    with raw:
        raw.send(framed(Open("a")) + framed(Alive()) + framed(Open("b"))[:-1])
        assert own.receive() == Open("a")
        assert own.receive() == Alive()
        raw.send(framed(Open("b"))[-1:])
        assert own.receive() == Open("b")
    own.close()


def test_a_message_larger_than_any_buffer_arrives_whole(client, server):
    assert client.send(large(3 * 2**20))
    assert server.next()[0] == large(3 * 2**20)


def test_a_length_that_no_message_has_is_a_value_error():
    own, raw = pair()
    with raw:
        raw.send(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ValueError, match="a message of 1195725856 bytes"):
            own.receive()
    own.close()


def test_a_peer_that_sends_no_messages_is_cut_off_and_others_are_served(server):
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.connect(server.listener.path)
        foreign.send(struct.pack("!I", 3) + b"???")
        foreign.settimeout(LIMIT_S)
        assert foreign.recv(1) == b""
    with contextlib.closing(Connection.to(server.listener.path)) as other:
        other.send(Alive())
        assert server.next()[0] == Alive()


def test_file_descriptors_travel_beside_their_message(client, server):
    read, write = os.pipe()
    assert client.send(Open("t"), [write])
    os.close(write)
    message, (file,) = server.next()
    assert message == Open("t")
    os.write(file, b"through the copy")
    os.close(file)
    assert os.read(read, 100) == b"through the copy"
    os.close(read)


def test_a_message_without_files_brings_none(client, server):
    assert client.send(Open("t"))
    assert server.next() == (Open("t"), [])


def test_files_that_nobody_took_are_closed_with_the_connection():
    own, raw = pair()
    read, write = os.pipe()
    with raw:
        socket.send_fds(raw, [framed(Alive())], [write])
        os.close(write)
        own.receive()
        own.close()
        assert os.read(read, 1) == b""  # every end to write to is closed
    os.close(read)


def test_the_end_of_a_peer_is_seen_at_once(client, server):
    client.send(Alive())
    server.next()
    client.close()
    assert server.gone.wait(LIMIT_S)


def test_what_was_sent_before_the_end_still_arrives(client, server):
    for number in range(50):
        client.send(Landed("r", 0, number))
    client.close()
    assert [server.next()[0].rank for _ in range(50)] == list(range(50))


def test_closing_wakes_the_thread_that_receives(client):
    got = queue.Queue()
    thread = threading.Thread(target=lambda: got.put(client.receive()))
    thread.start()
    client.close()
    assert got.get(timeout=LIMIT_S) is None
    thread.join()


def test_to_a_peer_that_is_gone_nothing_is_sent(client, server):
    server.connections[0].close()
    until(lambda: not client.send(Alive()))
    assert client.closed
    assert not client.send(Alive())


def test_closing_twice_is_closing_once(client):
    client.close()
    client.close()
    assert not client.send(Alive())


def test_a_peer_that_stops_reading_counts_as_gone_within_the_limit(monkeypatch):
    monkeypatch.setattr(link, "_SEND_LIMIT_S", 0.05)
    own, raw = pair()
    with raw:
        for _ in range(64):
            if not own.send(large(2**18)):
                break
        else:
            pytest.fail("nothing is sent without end to a peer that does not read")
        assert own.closed
        assert not own.send(Alive())


def test_a_peer_that_reads_slowly_gets_everything():
    own, raw = pair()
    sizes = []

    def slowly():
        while data := raw.recv(2**17):
            sizes.append(len(data))
            time.sleep(0.002)

    thread = threading.Thread(target=slowly)
    thread.start()
    message = large(2**21)
    assert own.send(message)
    own.close()
    thread.join()
    raw.close()
    assert sum(sizes) == len(framed(message))


def test_messages_of_many_threads_do_not_mix(client, server):
    def send(name):
        for _ in range(20):
            client.send(large(5000, name))

    threads = [threading.Thread(target=send, args=(str(number),)) for number in range(5)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        message, _ = server.next()
        assert message == large(5000, message.engine_id)
    for thread in threads:
        thread.join()


def test_nobody_listening_is_an_os_error(folder):
    with pytest.raises(OSError, match="No such file"):
        Connection.to(str(folder / "none"))


def test_a_socket_is_its_users_alone_and_so_is_its_folder(folder):
    with contextlib.closing(Server(folder / "new" / "s")):
        assert stat.S_IMODE((folder / "new" / "s").stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700


def test_the_socket_of_an_engine_that_was_killed_is_replaced(folder):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(folder / "s"))
    with (
        contextlib.closing(Server(folder / "s")) as server,
        contextlib.closing(Connection.to(str(folder / "s"))) as own,
    ):
        own.send(Alive())
        assert server.next()[0] == Alive()


def test_an_engine_that_lives_is_not_replaced(server):
    with pytest.raises(ValueError, match="already listens at") as error:
        Listener(server.listener.path, lambda connection: None, "test-second")
    assert "\n" not in str(error.value)
    assert server.listener.path in str(error.value)
    with contextlib.closing(Connection.to(server.listener.path)) as own:
        own.send(Open("still served"))
        assert server.next()[0] == Open("still served")


def test_a_listener_that_was_refused_closes_its_socket(server):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="already listens"):
            Listener(server.listener.path, lambda connection: None, "test-second")
        gc.collect()
    assert not [one for one in caught if one.category is ResourceWarning]


@pytest.mark.parametrize("path", ["/proc/none/s", "/tmp/" + "x" * 120])
def test_a_path_that_cannot_be_listened_at_is_told_in_one_line(path):
    with pytest.raises(ValueError, match="cannot listen at") as error:
        Listener(path, lambda connection: None, "test-path")
    assert "\n" not in str(error.value)


def test_closing_removes_the_socket(folder):
    server = Server(folder / "s")
    server.close()
    assert not (folder / "s").exists()
    with pytest.raises(OSError, match="No such file"):
        Connection.to(str(folder / "s"))


def test_closing_leaves_a_socket_that_another_engine_has_made_since(folder):
    old = Server(folder / "s")
    Path(folder / "s").unlink()
    with contextlib.closing(Server(folder / "s")) as new:
        old.close()
        with contextlib.closing(Connection.to(str(folder / "s"))) as own:
            own.send(Alive())
            assert new.next()[0] == Alive()


def test_a_listener_that_closes_ends_its_connections(folder):
    server = Server(folder / "s")
    with contextlib.closing(Connection.to(str(folder / "s"))) as own:
        own.send(Alive())
        server.next()
        server.listener.close()
        assert server.gone.wait(LIMIT_S), "the peer still waits for a side that has closed"
    server.close()


# what does not end a listener


def spoken(server):
    """A connection that the listener has heard."""
    own = Connection.to(server.listener.path)
    assert own.send(Alive())
    assert server.next()[0] == Alive()
    return own


def errors(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED, errno.EPROTO, errno.EINTR]
)
def test_a_listener_goes_on_when_a_connection_cannot_be_taken_and_says_so_once(server, monkeypatch, caplog, number):
    monkeypatch.setattr(link, "_PAUSES_S", (0.001, 0.002))
    original, failed = socket.socket.accept, []

    def accept(own):
        if len(failed) < 5:
            failed.append(own)
            raise OSError(number, os.strerror(number))
        return original(own)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with contextlib.closing(spoken(server)), contextlib.closing(spoken(server)):
        assert len(failed) == 5
        (told,) = errors(caplog)
        assert server.listener.path in told
        assert os.strerror(number) in told


def test_a_listener_goes_on_when_no_thread_can_be_started(server, monkeypatch, caplog):
    monkeypatch.setattr(link, "_PAUSES_S", (0.001, 0.002))
    original, failed = threading.Thread.start, []

    def start(thread):
        if not failed and thread.name == "test-link":
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with contextlib.closing(Connection.to(server.listener.path)) as unlucky:
        assert unlucky.receive() is None
    with contextlib.closing(spoken(server)):
        assert ["can't start new thread" in told for told in errors(caplog)] == [True]
    until(lambda: not server.listener._open)


def test_a_listener_that_waits_for_descriptors_can_be_closed(server, monkeypatch):
    monkeypatch.setattr(link, "_PAUSES_S", (3600, 3600))
    failed = threading.Event()

    def accept(own):
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with contextlib.closing(Connection.to(server.listener.path)):
        assert failed.wait(LIMIT_S)
        server.listener.close()
        assert not server.listener._thread.is_alive()


def test_connections_that_have_ended_are_forgotten(server):
    for _ in range(20):
        spoken(server).close()
    until(lambda: not server.listener._open, "forgetting")
    until(lambda: not [one for one in threading.enumerate() if one.name == "test-link" and one is not own_of(server)])


def own_of(server):
    return server.listener._thread


# peers that say nothing


@pytest.mark.parametrize("said", [b"", b"\x00", framed(Open("t"))[:-1]])
def test_who_does_not_say_a_first_message_in_time_is_cut_off_and_others_are_not(server, monkeypatch, caplog, said):
    with contextlib.closing(spoken(server)) as idle:
        monkeypatch.setattr(link, "FIRST_WITHIN_S", 0.05)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(server.listener.path)
            silent.send(said)
            silent.settimeout(LIMIT_S)
            assert silent.recv(1) == b""
        until(lambda: errors(caplog))
        assert errors(caplog) == [
            f"TrivetConnector: a peer at {server.listener.path} was cut off: it said nothing within 0.05 s"
        ]
        assert idle.send(Open("after a long time"))
        assert server.next()[0] == Open("after a long time")


def test_who_is_not_answered_in_time_is_told(monkeypatch):
    monkeypatch.setattr(link, "FIRST_WITHIN_S", 0.05)
    own, raw = pair()
    with raw, pytest.raises(TimeoutError, match=r"it said nothing within 0.05 s"):
        own.receive()
    own.close()


def test_a_later_message_is_waited_for_as_long_as_is_said():
    own, raw = pair()
    with raw:
        raw.send(framed(Alive()))
        assert own.receive(LIMIT_S) == Alive()
        with pytest.raises(TimeoutError, match=r"it said nothing within 0.02 s"):
            own.receive(0.02)
    own.close()


def test_of_many_that_say_nothing_the_oldest_go(server, monkeypatch, caplog):
    monkeypatch.setattr(link, "MOST_SILENT", 3)
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(contextlib.closing(spoken(server)))
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(10)]
        for one in silent:
            one.connect(server.listener.path)
            one.settimeout(LIMIT_S)
        assert [one.recv(1) for one in silent[:7]] == [b""] * 7
        until(lambda: len(server.listener._open) == 4, "forgetting them")
        late = stack.enter_context(contextlib.closing(Connection.to(server.listener.path)))
        assert silent[7].recv(1) == b""
        for one in (idle, late):
            assert one.send(Open("t"))
            assert server.next()[0] == Open("t")
        for one in silent[8:]:
            assert one.send(framed(Alive()))
            assert server.next()[0] == Alive()
    assert len(errors(caplog)) == 1
    assert "more than 3 connections" in errors(caplog)[0]


# whose the other process is


def test_a_process_of_another_user_is_refused_by_the_listener(server, monkeypatch, caplog):
    monkeypatch.setattr(link, "foreign_user", lambda own: 4242)
    for _ in range(3):
        with contextlib.closing(Connection.to(server.listener.path)) as own:
            assert own.receive() is None
    monkeypatch.undo()
    with contextlib.closing(spoken(server)):
        pass
    (told,) = errors(caplog)
    assert "user 4242" in told
    assert "the same user" in told


# descriptors of files


def test_descriptors_that_come_are_not_for_programs_that_are_started_here(client, server):
    read, write = os.pipe()
    assert client.send(Open("t"), [write])
    os.close(write)
    _, (file,) = server.next()
    assert not os.get_inheritable(file)
    os.close(file)
    os.close(read)


def test_no_descriptor_is_given_to_two_who_take_them_at_once():
    """Each closes what it takes, and by then the number may be another file's."""
    both = threading.Barrier(2)

    class Slow(Connection):
        @property
        def _files(self):
            files = self.files
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return files

        @_files.setter
        def _files(self, files):
            self.files = files

    own, other = socket.socketpair()
    connection, took = Slow(own), []
    connection.files = [77]
    threads = [threading.Thread(target=lambda: took.extend(connection.take_files())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert took == [77]
    connection.close()
    other.close()


@pytest.mark.parametrize("each", [1, 5])
def test_who_sends_more_descriptors_than_a_message_has_is_cut_off_and_they_are_closed(folder, caplog, each):
    def serve(connection):
        while connection.receive() is not None:
            pass  # and takes no file

    listener = Listener(str(folder / "s"), serve, "test-files")
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as greedy:
        greedy.connect(listener.path)
        greedy.settimeout(LIMIT_S)
        for _ in range(5 // each):
            socket.send_fds(greedy, [framed(Alive())], [write] * each)
        assert greedy.recv(1) == b""
    os.close(write)
    assert os.read(read, 1) == b""  # every copy is closed
    os.close(read)
    listener.close()
    assert ["more than 4 file descriptors" in told for told in errors(caplog)] == [True]


def test_an_ended_connection_leaves_no_descriptor(server):
    spoken(server).close()
    until(lambda: not server.listener._open)
    before = descriptors()
    for _ in range(10):
        spoken(server).close()
    until(lambda: not server.listener._open)
    assert descriptors() == before


# ends


def test_what_a_peer_said_before_it_ended_is_heard_though_nothing_can_be_sent_to_it():
    own, raw = pair()
    raw.send(framed(Alive()))
    assert own.receive() == Alive()
    raw.send(framed(Open("last words")))
    raw.close()
    assert not own.send(Alive())
    assert own.receive() == Open("last words")
    assert own.receive() is None
    own.close()


def test_after_closing_nothing_more_is_received():
    own, raw = pair()
    with raw:
        raw.send(framed(Open("a")) + framed(Open("b")))
        assert own.receive() == Open("a")
        own.close()
        assert own.receive() is None


def test_closing_does_not_wait_for_a_send_that_is_stuck(monkeypatch):
    monkeypatch.setattr(link, "_SEND_LIMIT_S", 3600.0)
    own, raw = pair()
    sent = queue.Queue()
    with raw:
        thread = threading.Thread(target=lambda: sent.put([own.send(large(2**21)) for _ in range(9)]))
        thread.start()
        until(lambda: own._sending.locked())
        own.close()
        assert sent.get(timeout=LIMIT_S)[-1] is False
        thread.join()


# foreign bytes


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", 3) + b"???",
        struct.pack("!I", 0),
        framed(Open("x" * 600)),
        struct.pack("!I", 8) + b"\x92\xa5a\nb\nc\x01",
    ],
)
def test_a_bad_message_ends_its_connection_with_one_line_and_nothing_else(server, caplog, bad):
    with contextlib.closing(spoken(server)) as other, socket.socket(socket.AF_UNIX) as foreign:
        foreign.connect(server.listener.path)
        foreign.settimeout(LIMIT_S)
        foreign.send(framed(Alive()) + bad + framed(Open("not heard")))
        with contextlib.suppress(ConnectionResetError):
            assert foreign.recv(1) == b""
        assert server.next()[0] == Alive()
        assert other.send(Open("still here"))
        assert server.next()[0] == Open("still here")
    until(lambda: errors(caplog))
    (told,) = errors(caplog)
    assert told.startswith(f"TrivetConnector: a peer at {server.listener.path} was cut off: ")
    assert "\n" not in told
    assert "Traceback" not in caplog.text
