"""Decode's worker: what it asks for, which mover it uses, and what goes wrong with one transfer."""

import contextlib
import threading

import pytest
import torch

from transfer.waiting import LIMIT_S, until
from transfer.workers import BLOCK_BYTES, DecodeWorker, Gate, PrefillWorker, Prompt
from trivet.transfer import receiver as module
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import Got, Lost, Offer, Piece, Stop, Took, Try, Use, Want
from trivet.transfer.movers import MOVERS, MoverError
from trivet.transfer.movers.shm import Shm, ShmStaging, ShmWindow
from trivet.transfer.pages import Pages
from trivet.transfer.plan import StepPlan


@pytest.fixture
def prefill(folder):
    with PrefillWorker(folder) as prefill:
        yield prefill


@pytest.fixture
def decode(folder):
    with DecodeWorker(folder) as decode:
        yield decode


def lands(prefill, decode, name, **kind):
    prompt = Prompt(name, 100)
    decode.want(prompt, prefill, **kind)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


def stops(decode, prompt, receive):
    """Why it has stopped; it is then forgotten."""
    why = decode.wait_stopped(prompt)
    decode.stopped.clear()
    decode.forget(receive)
    decode.receiver.begin(StepPlan(forget=(receive.request_id,)))
    return why


def fails_first(monkeypatch, owner, name, error, times=1):
    left, original = [error] * times, getattr(owner, name)

    def call(*arguments):
        if left:
            raise left.pop()
        return original(*arguments)

    monkeypatch.setattr(owner, name, call)


class Scripted:
    """A prefill worker that says what a test wants it to say."""

    def __init__(self, folder):
        self.path = str(folder / "scripted")
        self.staging = ShmStaging(8, 8 * BLOCK_BYTES)
        self.heard, self.connection = [], None
        self._listener = Listener(self.path, self._serve, "test-prefill")

    def _serve(self, connection):
        self.connection = connection
        while (message := connection.receive()) is not None:
            self.heard.append(message)
            if isinstance(message, Try):
                offered = self.staging.offered()
                connection.send(Offer("shm", dict(offered.window)), offered.files)

    def said(self, kind):
        return [one for one in self.heard if isinstance(one, kind)]

    def piece(self, transfer, blocks, **changes):
        layers = changes.pop("layers", [0])
        size = blocks * len(layers) * BLOCK_BYTES
        own = {"slot": 0, "bytes": size, "group": 0, "ranges": [(0, blocks)], "attempt": 0, **changes}
        self.connection.send(Piece(transfer=transfer, layers=layers, computed_ns=0, checksum=None, **own))

    def close(self):
        self._listener.close()
        self.staging.close()


@pytest.fixture
def scripted(folder):
    scripted = Scripted(folder)
    yield scripted
    scripted.close()


# movers


class Broken(Shm):
    """A mover that decode cannot open."""

    name = "broken"
    error: Exception = MoverError("cannot be mapped")

    def __init__(self):
        self.tried = 0

    def open(self, device, window, files):
        self.tried += 1
        raise self.error


@pytest.fixture
def broken(monkeypatch):
    broken = Broken()
    monkeypatch.setitem(MOVERS, "broken", broken)
    return broken


@pytest.mark.parametrize(
    "error",
    [
        MoverError("not today"),
        RuntimeError("not today\nmore"),
        torch.OutOfMemoryError("not today"),
        KeyError("not today"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_mover_that_failed_is_not_tried_again_with_the_same_engine_and_told_once(folder, broken, caplog, error):
    broken.error, movers = error, {"movers": ("broken", "shm")}
    with PrefillWorker(folder, **movers) as prefill, DecodeWorker(folder, **movers) as decode:
        for number in range(3):
            lands(prefill, decode, f"t{number}", engine="p-1")
            peer = decode.receiver._peers["p-1"]
            prefill.cut()
            until(lambda peer=peer: peer.ended)
        assert broken.tried == 1
        assert caplog.text.count("no broken from prefill engine p-1") == 1
        assert "not today" in caplog.text
        lands(prefill, decode, "later", engine="p-2")
        assert broken.tried == 2


def test_where_no_mover_works_all_are_tried_again_after_a_while_only(folder, broken, monkeypatch, caplog):
    with PrefillWorker(folder, movers=("broken",)) as prefill, DecodeWorker(folder, movers=("broken",)) as decode:
        for number in range(3):
            prompt = Prompt(f"t{number}", 20)
            receive = decode.want(prompt, prefill)
            assert stops(decode, prompt, receive) == "no mover between prefill and decode: broken: cannot be mapped"
        assert broken.tried == 1
        monkeypatch.setattr(module, "_TRY_AGAIN_S", -1.0)
        prompt = Prompt("again", 20)
        receive = decode.want(prompt, prefill)
        stops(decode, prompt, receive)
        assert broken.tried == 2


def test_only_so_many_engines_are_remembered(decode, monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 4)
    for number in range(10):
        decode.receiver.reject(f"p-{number}", "shm", MoverError("x"))
        decode.receiver.reject("p-0", "shm", MoverError("x"))
    assert set(decode.receiver._rejected) == {"p-0", "p-7", "p-8", "p-9"}


def test_prefill_that_ends_while_a_mover_is_agreed_on_is_no_movers_fault(folder, decode):
    listener = Listener(str(folder / "ends"), lambda connection: connection.receive(), "test")
    prompt = Prompt("a", 20)
    decode.want(prompt, str(folder / "ends"))
    assert "cannot be reached" in decode.wait_stopped(prompt)
    assert not decode.receiver._rejected[f"of {folder / 'ends'}"].why
    listener.close()


def test_a_mover_whose_pieces_cannot_be_read_gives_way_to_the_next(folder, monkeypatch, caplog):
    class Unreadable(Shm):
        name = "unreadable"

        def open(self, device, window, files):
            window = super().open(device, window, files)
            window.read = lambda slot, size: (_ for _ in ()).throw(MoverError("copying failed"))
            return window

    monkeypatch.setitem(MOVERS, "unreadable", Unreadable())
    movers = {"movers": ("unreadable", "shm")}
    with PrefillWorker(folder, **movers) as prefill, DecodeWorker(folder, **movers) as decode:
        for number in range(module._MOST_FAULTS):
            prompt = Prompt(f"t{number}", 20)
            receive = decode.want(prompt, prefill)
            prefill.compute(prompt)
            assert "copying failed" in stops(decode, prompt, receive)
        until(lambda: all(peer.ended for peer in list(decode.receiver._peers.values())))
        lands(prefill, decode, "later")
        assert "no unreadable from prefill engine" in caplog.text
        until(lambda: not prefill.sender._pools["unreadable"].slots.lent)


# what is asked for


@pytest.fixture
def words(monkeypatch):
    """What decode's workers say of transfers, in order."""
    said, original = [], Connection.send

    def send(self, message, files=()):
        if isinstance(message, Want | Stop | Got):
            said.append((type(message), message.transfer, message.attempt))
        return original(self, message, files)

    monkeypatch.setattr(Connection, "send", send)
    return said


def test_what_is_given_up_before_the_connection_stands_is_never_asked_for(prefill, decode, gate, words):
    opening = gate(Shm, "open")
    first, second = Prompt("a", 100), Prompt("b", 100)
    receive = decode.want(first, prefill)
    until(lambda: opening.holds)
    decode.start(given_up=[receive])
    decode.want(second, prefill)
    assert stops(decode, first, receive) == "given up"
    decode.want(first, prefill, attempt=1)
    opening.open()
    prefill.compute(first, second)
    decode.wait(first, second)
    decode.check()
    until(lambda: len(words) == 4)
    assert sorted(words[:2], key=str) == [(Want, "a", 1), (Want, "b", 0)]
    assert {kind for kind, _, _ in words[2:]} == {Got}


def test_what_is_given_up_while_it_is_asked_for_is_stopped_behind_that(scripted, decode, monkeypatch, gate):
    opening = gate(Shm, "open")
    held, go_on, original = threading.Event(), threading.Event(), Connection.send

    def send(self, message, files=()):
        if isinstance(message, Want) and not held.is_set():
            held.set()
            assert go_on.wait(LIMIT_S)
        return original(self, message, files)

    monkeypatch.setattr(Connection, "send", send)
    prompt = Prompt("a", 100)
    receive = decode.want(prompt, scripted.path)
    opening.open()
    assert held.wait(LIMIT_S)
    decode.start(given_up=[receive])
    assert stops(decode, prompt, receive) == "given up"
    decode.want(prompt, scripted.path, attempt=1)
    go_on.set()
    until(lambda: len(scripted.heard) == 5)
    assert [(type(one), one.attempt) for one in scripted.heard[2:]] == [(Want, 0), (Stop, 0), (Want, 1)]


def test_where_no_thread_is_left_the_request_ends_and_not_the_engine(prefill, decode, monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    prompt = Prompt("a", 100)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        receive = decode.want(prompt, prefill)
    assert stops(decode, prompt, receive) == "receiving failed: can't start new thread"
    lands(prefill, decode, "later")


@pytest.mark.parametrize("stands", [False, True])
def test_nothing_is_kept_of_a_transfer_of_which_nothing_is_wanted(scripted, decode, stands):
    other = decode.want(Prompt("other", 100), scripted.path)
    (peer,) = decode.receiver._peers.values()
    if stands:
        until(lambda: peer._connection is not None)
    prompt = Prompt("a", 160)
    decode.want(prompt, scripted.path, cached=10)
    decode.wait(prompt)
    until(lambda: len(scripted.said(Want)) == 2)
    assert list(peer._reading) == ["other"]
    decode.start(given_up=[other])
    until(lambda: not peer._reading)
    assert not peer._waiting


def test_a_receiver_that_closes_while_it_connects_lets_go(folder, decode, gate):
    connecting = gate(Connection, "receive")
    heard = []
    listener = Listener(str(folder / "s"), heard.append, "test")
    decode.want(Prompt("a", 20), str(folder / "s"))
    (peer,) = decode.receiver._peers.values()
    until(lambda: connecting.holds)
    decode.receiver.close()
    connecting.open()
    until(lambda: peer.ended)
    listener.close()


# one transfer's fault


FAULTS = {
    "read": (ShmWindow, "read", RuntimeError("CUDA")),
    "mover": (ShmWindow, "read", MoverError("CUDA")),
    "scatter": (Pages, "scatter", IndexError("CUDA")),
    "ids": (module.Receiver, "_ids", torch.OutOfMemoryError("CUDA")),
    "finish": (module, "finish", RuntimeError("CUDA")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_transfer_ends_it_with_its_reason_and_nothing_else(prefill, decode, monkeypatch, fault):
    lands(prefill, decode, "warm")
    (peer,) = decode.receiver._peers.values()
    fails_first(monkeypatch, *FAULTS[fault])
    bad, good = Prompt("bad", 400), Prompt("good", 400)
    receive = decode.want(bad, prefill)
    prefill.compute(bad)
    assert stops(decode, bad, receive) == "decode could not write a piece: CUDA"
    decode.want(good, prefill)
    prefill.compute(good)
    decode.wait(good)
    decode.check()
    assert not peer.ended
    until(lambda: len(prefill.sender._pools["shm"].slots.free) == 8)
    until(lambda: prefill.sender._transfers["bad"].peer is None)


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 3},
        {"layers": [77]},
        {"layers": [0, 0]},
        {"bytes": 8},
        {"ranges": [(5, 9)]},
        {"ranges": [(4, 5)]},
        {"slot": 500},
    ],
    ids=str,
)
def test_a_piece_that_makes_no_sense_ends_its_transfer_alone(scripted, decode, changes):
    bad, good = Prompt("bad", 64), Prompt("good", 16)
    receive = decode.want(bad, scripted.path)
    decode.want(good, scripted.path)
    until(lambda: len(scripted.said(Want)) == 2)
    scripted.piece("bad", 4, **changes)
    assert stops(decode, bad, receive)
    until(lambda: scripted.said(Stop) == [Stop("bad", 0)])
    scripted.piece("good", 1, layers=list(range(6)))
    decode.wait(good)
    until(lambda: scripted.said(Got) == [Got("good", 0)])
    assert len(scripted.said(Took)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"ranges": [(0, 1)]},
        {"ranges": [(0, 1), (3, 4)]},
        {"ranges": [(4, 5)]},
        {"ranges": [(3, 4)], "layers": [0, 0]},
        {"ranges": [(3, 4)], "layers": [0, 2]},
        {"ranges": [(3, 4)], "layers": [2]},
        {"ranges": [(3, 4)], "group": 1},
        {"ranges": [(3, 4)], "layers": [0, 77]},
    ],
    ids=str,
)
def test_a_piece_that_names_what_it_must_not_changes_no_page(folder, scripted, changes):
    """Blocks that were not asked for are others' as well: a cached prefix."""
    with DecodeWorker(folder, groups=(0, 0, 1)) as decode:
        before = [layer.rows.clone() for layer in decode.pages.layers]
        prompt = Prompt("a", 100)
        decode.want(prompt, scripted.path, cached=3)
        until(lambda: scripted.said(Want))
        own = {"group": 0, "layers": [0], **changes}
        blocks = sum(end - start for start, end in own["ranges"])
        scripted.staging.write(0, 8 * BLOCK_BYTES, lambda memory: memory.fill_(7))
        scripted.piece("a", blocks, bytes=decode.pages.bytes_of([min(one, 2) for one in own["layers"]], blocks), **own)
        assert decode.wait_stopped(prompt).startswith("prefill sent a piece o")
        assert all(torch.equal(layer.rows, old) for layer, old in zip(decode.pages.layers, before, strict=True))
        (peer,) = decode.receiver._peers.values()
        assert not peer._faults


def test_blocks_are_not_free_before_all_that_was_launched_into_them_is_done(prefill, decode, monkeypatch):
    """Where a later layer fails, copies into the earlier ones may still be under way."""
    waited = []
    monkeypatch.setattr(
        module, "finish", lambda device: waited.append(next(iter(decode.receiver._receiving.values())).ended)
    )
    fails_first(monkeypatch, Pages, "scatter", RuntimeError("CUDA"))
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait_stopped(prompt)
    assert waited == [None]


def test_what_prefill_loses_ends_with_its_reason(scripted, decode):
    lost, other = Prompt("lost", 100), Prompt("other", 16)
    receive = decode.want(lost, scripted.path)
    decode.want(other, scripted.path)
    until(lambda: len(scripted.said(Want)) == 2)
    for name in ("unknown", "lost", "lost"):
        scripted.connection.send(Lost(name, "prefill could not send it: CUDA"))
    assert stops(decode, lost, receive) == "prefill could not send it: CUDA"
    until(lambda: scripted.said(Stop) == [Stop("lost", 0)])
    scripted.piece("other", 1, layers=list(range(6)))
    decode.wait(other)


@pytest.mark.parametrize("attempt", [0, 1, None])
def test_the_loss_of_a_former_attempt_does_not_end_the_next(scripted, decode, attempt):
    """It was said before prefill heard of the next one."""
    prompt, other = Prompt("a", 16), Prompt("other", 16)
    decode.want(prompt, scripted.path, attempt=1)
    decode.want(other, scripted.path)
    until(lambda: len(scripted.said(Want)) == 2)
    scripted.connection.send(Lost("a", "prefill could not send it", attempt=attempt))
    scripted.piece("a", 1, layers=list(range(6)), attempt=1)
    if attempt == 0:
        decode.wait(prompt)
        assert not scripted.said(Stop)
    else:
        assert decode.wait_stopped(prompt) == "prefill could not send it"
        until(lambda: scripted.said(Stop) == [Stop("a", 1)])


def test_a_window_that_cannot_be_closed_strands_nobody(prefill, decode, monkeypatch):
    lands(prefill, decode, "warm")
    fails_first(monkeypatch, ShmWindow, "close", RuntimeError("CUDA"))
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    prefill.cut()
    assert "gone" in decode.wait_stopped(prompt)


# cut off


@pytest.mark.parametrize("end", ["prefill", "decode"])
def test_a_connection_that_was_cut_off_says_so_though_messages_are_left(folder, end):
    there = []
    held = threading.Event()

    def serve(connection):
        there.append(connection)
        held.wait(LIMIT_S)

    listener = Listener(str(folder / "s"), serve, "test")
    own = Connection.to(str(folder / "s"))
    until(lambda: there)
    there[0].send(Took(3))
    assert not own.is_cut_off()
    (there[0] if end == "prefill" else own).close()
    assert own.is_cut_off()
    if end == "prefill":
        assert own.receive() == Took(3)
    held.set()
    with contextlib.suppress(OSError):
        own.close()
    listener.close()


def test_a_piece_that_was_read_when_prefill_had_already_gone_does_not_land(scripted, decode, monkeypatch):
    reading = Gate(monkeypatch, ShmWindow, "read")
    prompt = Prompt("a", 16)
    decode.want(prompt, scripted.path)
    until(lambda: scripted.said(Want))
    scripted.piece("a", 1, layers=list(range(6)))
    until(lambda: reading.holds)
    scripted.connection.close()
    reading.open()
    assert decode.wait_stopped(prompt) == "prefill's worker is gone"
    assert decode.counts.take().data.get("received") is None
    assert Use("shm", {}) in scripted.heard
