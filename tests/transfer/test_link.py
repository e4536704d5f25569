import contextlib
import gc
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

from transfer.waiting import LIMIT_S, until
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import Alive, Landed, Lost, Open, Took, encode


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
    why = os.urandom(4 * 2**20).hex()
    assert client.send(Lost("t", why))
    assert server.next()[0] == Lost("t", why)


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
    start_s = time.monotonic()
    client.close()
    assert server.gone.wait(LIMIT_S)
    assert time.monotonic() - start_s < 2


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


def test_a_peer_that_stops_reading_counts_as_gone_within_the_limit():
    own, raw = pair()
    with raw:
        start_s = time.monotonic()
        for _ in range(64):
            if not own.send(Lost("t", "x" * 2**18)):
                break
        else:
            pytest.fail("nothing is sent without end to a peer that does not read")
        assert time.monotonic() - start_s < 4
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
    message = Lost("t", "x" * 2**22)
    assert own.send(message)
    own.close()
    thread.join()
    raw.close()
    assert sum(sizes) == len(framed(message))


def test_messages_of_many_threads_do_not_mix(client, server):
    def send(name):
        for _ in range(20):
            client.send(Lost(name, name * 5000))

    threads = [threading.Thread(target=send, args=(str(number),)) for number in range(5)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        message, _ = server.next()
        assert message.why == message.transfer * 5000
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
        assert server.gone.wait(2), "the peer still waits for a side that has closed"
    server.close()
