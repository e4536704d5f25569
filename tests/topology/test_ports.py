import errno
import socket
from contextlib import closing

import pytest

from trivet.errors import PortInUseError
from trivet.topology import ports
from trivet.topology.ports import PortBook, bind, is_free

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def locks_of_their_own(tmp_path, monkeypatch):
    """These tests hold their locks in a folder of their own, so that a Trivet on this machine is no part of them."""
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.fixture
def busy():
    """A port that someone listens on, between two that are free."""
    while True:
        with socket.socket() as server:
            server.bind((HOST, 0))
            server.listen()
            port = server.getsockname()[1]
            if port < 65535 and is_free(port - 1, HOST) and is_free(port + 1, HOST):
                yield port
                return


@pytest.fixture
def book():
    with closing(PortBook()) as book:
        yield book


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def test_a_book_never_hands_out_a_port_twice(book):
    start = unused_port() & ~1023
    handed_out = [book.free(start, HOST) for _ in range(5)]
    block = book.free(start, HOST, count=3)
    everything = [*handed_out, block, block + 1, block + 2]
    assert len(set(everything)) == 8
    assert min(everything) >= start


@pytest.mark.parametrize("lock", [True, False])
def test_a_port_that_someone_listens_on_is_passed_over(busy, lock):
    with closing(PortBook(lock=lock)) as book:
        assert book.free(busy, HOST) > busy


def test_consecutive_ports_are_all_free(busy, book):
    assert book.free(busy - 1, HOST, count=2) > busy


def test_a_port_that_was_looked_at_and_not_taken_can_still_be_had(busy, book):
    book.free(busy - 1, HOST, count=2)
    assert book.fixed(busy - 1, HOST, "engine a") == busy - 1


def test_a_port_that_another_book_holds_is_passed_over(book):
    port = unused_port()
    book.fixed(port, HOST, "engine a")
    with closing(PortBook()) as other:
        assert other.free(port, HOST) > port


def test_a_port_that_another_book_holds_is_refused(book):
    port = unused_port()
    book.fixed(port, HOST, "engine a")
    with closing(PortBook()) as other, pytest.raises(PortInUseError) as caught:
        other.fixed(port, HOST, "engine b")
    expected = f"port {port} for engine b is in use -> stop what uses it, or give another port"
    assert str(caught.value) == expected


def test_a_closed_book_gives_its_ports_back(book):
    first = PortBook()
    port = first.fixed(unused_port(), HOST, "engine a")
    first.close()
    assert book.fixed(port, HOST, "engine b") == port


def test_books_without_locks_do_not_hinder_anyone(book):
    port = unused_port()
    PortBook(lock=False).fixed(port, HOST, "engine a")
    assert book.fixed(port, HOST, "engine b") == port


def test_a_fixed_port_that_someone_listens_on_is_refused(busy, book):
    with pytest.raises(PortInUseError) as caught:
        book.fixed(busy, HOST, "engine a")
    assert str(caught.value).startswith(f"port {busy} for engine a is in use")


def test_a_plan_that_is_only_shown_may_name_a_busy_port(busy):
    assert PortBook(lock=False).fixed(busy, HOST, "engine a") == busy


@pytest.mark.parametrize("lock", [True, False])
def test_a_port_that_is_wanted_twice_is_refused(lock):
    port = unused_port()
    with closing(PortBook(lock=lock)) as book:
        book.fixed(port, HOST, "engine a")
        with pytest.raises(PortInUseError) as caught:
            book.fixed(port, HOST, "engine b")
    expected = f"port {port} is wanted twice, the second time for engine b -> give another port"
    assert str(caught.value) == expected


def test_a_port_that_was_set_aside_is_not_handed_out(book):
    port = unused_port()
    book.set_aside(port)
    assert book.free(port, HOST) > port
    with pytest.raises(PortInUseError, match="wanted twice"):
        book.fixed(port, HOST, "engine a")


def test_running_out_of_ports_is_said(book):
    with pytest.raises(PortInUseError) as caught:
        book.free(65535, HOST, count=2)
    assert str(caught.value) == "no 2 free port(s) from 65535 up -> give ports in the topology"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_of_this_machine_is_refused_at_once(book, host):
    with pytest.raises(PortInUseError) as caught:
        book.free(8100, host)
    assert str(caught.value).startswith(f"nothing can listen on {host}:8100 here: ")
    assert caught.value.mend == "bind: an address of this machine; port: 1024 or above"


def test_a_port_is_free_until_someone_listens():
    port = unused_port()
    assert is_free(port, HOST)
    with socket.socket() as server:
        server.bind((HOST, port))
        server.listen()
        assert not is_free(port, HOST)


def test_ports_of_ipv6_addresses_are_looked_up_too():
    try:
        server = socket.socket(socket.AF_INET6)
        server.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        server.listen()
        assert not is_free(server.getsockname()[1], "::1")


# planning again


def test_a_port_of_the_first_book_can_be_had_again_by_its_number(busy, book):
    book._taken.add(busy)  # who listens there is the engine that it was given to
    with closing(book.again()) as newer:
        assert newer.fixed(busy, HOST, "engine a") == busy
        with pytest.raises(PortInUseError, match="is wanted twice"):
            newer.fixed(busy, HOST, "engine b")


def test_a_port_of_the_first_book_is_kept_once_and_never_a_free_one(book):
    port = book.free(unused_port(), HOST)
    with closing(book.again()) as newer:
        assert newer.free(port, HOST) > port
        assert newer.keep(port)
        assert not newer.keep(port)
        assert not newer.keep(port + 5000)


def test_the_gateways_port_can_be_set_aside_again(book):
    port = unused_port()
    book.set_aside(port)
    with closing(book.again()) as newer:
        newer.set_aside(port)


def held(port: int) -> bool:
    with closing(PortBook()) as other:
        try:
            other.fixed(port, HOST, "another Trivet's")
        except PortInUseError:
            return True
        return False


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_newer_book_has_handed_out_is_held(book, whole):
    old = book.free(unused_port(), HOST)
    kept = book.free(old + 1, HOST)
    newer = book.again()
    fresh = newer.free(old, HOST)
    assert newer.keep(kept)
    book.adopt(newer, whole=whole)
    newer.close()  # it has nothing any more
    assert (held(old), held(kept), held(fresh)) == (not whole, True, True)
    with closing(book.again()) as third:
        assert third.keep(fresh)


def test_a_newer_book_that_is_closed_leaves_the_first_as_it_was(book):
    old = book.free(unused_port(), HOST)
    newer = book.again()
    newer.keep(old)
    fresh = newer.free(old, HOST)
    newer.close()
    assert (held(old), held(fresh)) == (True, False)


# who listens


def listener(host: str = HOST, port: int = 0) -> socket.socket:
    return bind("the server", host, port, another="--port N", hosts="give one of its own")


def test_a_port_that_someone_listens_on_is_told_with_what_to_do(busy):
    with pytest.raises(PortInUseError) as caught:
        listener(port=busy)
    assert str(caught.value) == (
        f"the server cannot listen on {HOST}:{busy}: Address already in use -> stop what uses it, or give another: "
        "--port N"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_is_told(host):
    with pytest.raises(PortInUseError) as caught:
        listener(host)
    assert caught.value.problem.startswith("the server")
    assert host in caught.value.problem
    assert caught.value.mend == "give one of its own"


def test_a_port_that_is_roots_is_told(monkeypatch):
    class Refusing(socket.socket):
        def bind(self, _address):
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ports.socket, "socket", Refusing)
    with pytest.raises(PortInUseError) as caught:
        listener(port=80)
    assert caught.value.mend == "ports below 1024 are root's; give another: --port N"


def test_port_0_is_a_free_one():
    with closing(listener()) as one, closing(listener()) as other:
        numbers = {one.getsockname()[1], other.getsockname()[1]}
        assert len(numbers) == 2
        assert 0 not in numbers


def test_a_port_can_be_taken_again_at_once():
    """Connections of the last service may still be closing."""
    with closing(listener()) as first:
        first.listen()
        address = first.getsockname()
        client = socket.create_connection(address)
        accepted, _ = first.accept()
        accepted.close()  # the side that closes first keeps the port for a while
        client.close()
    listener(*address).close()
