"""Prefill's worker: what it does with peers that read slowly, ask early or not at all, and with what goes wrong."""

import random
import threading

import pytest
import torch

from transfer.waiting import until
from transfer.workers import BLOCK_BYTES, DecodeWorker, PrefillWorker, Prompt, Talker, kv
from trivet.transfer import sender as module
from trivet.transfer.link import Listener
from trivet.transfer.messages import Lost, Piece, Stop, Took
from trivet.transfer.movers.shm import ShmStaging, ShmWindow
from trivet.transfer.pieces import Coverage
from trivet.transfer.plan import Chunk, StepPlan
from trivet.transfer.slots import Slots


@pytest.fixture
def prefill(folder):
    with PrefillWorker(folder) as prefill:
        yield prefill


@pytest.fixture
def decode(folder):
    with DecodeWorker(folder) as decode:
        yield decode


@pytest.fixture
def talk(prefill):
    talkers = []

    def make(name="talker", path=None):
        talkers.append(Talker.joined(path or prefill.path, name))
        return talkers[-1]

    yield make
    for one in talkers:
        one.close()


def slots(prefill):
    return prefill.sender._pools["shm"].slots


def heard(prefill, talker, mark="mark"):
    """Until all that the talker has said was heard."""
    talker.want(mark, (0, 1))
    until(lambda: any(mark in peer.early for peer in list(prefill.sender._peers)))
    talker.connection.send(Stop(mark, 0))
    until(lambda: not any(mark in peer.early for peer in list(prefill.sender._peers)))


def lands(prefill, decode, name, tokens=100):
    prompt = Prompt(name, tokens)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()
    return prompt


# the order of layers


def orders():
    layers = list(range(6))
    shuffled = random.Random(3).sample(layers, 6)
    return {
        "backwards": layers[::-1],
        "evens first": layers[::2] + layers[1::2],
        "shuffled": shuffled,
        "some without a hook": [5, 1, 2],
        "the last alone": [5],
        "none": [],
    }


@pytest.mark.parametrize("hooked", orders().values(), ids=orders())
@pytest.mark.parametrize("tokens", [16, 100, 400])
def test_layers_leave_once_they_are_computed_whatever_their_order(prefill, decode, monkeypatch, hooked, tokens):
    prompt, computed, emitted = Prompt("a", tokens), set(), []
    original = prefill.sender._emit

    def emit():
        assert set(prefill.sender._launching) <= computed
        emitted.extend(prefill.sender._launching)
        original()

    prefill.compute(Prompt("warm", 16))
    prefill.compute(Prompt("warm", 16))
    monkeypatch.setattr(prefill.sender, "_emit", emit)
    decode.want(prompt, prefill)
    for to in [*range(90, tokens, 90), tokens]:
        prefill.sender.begin(StepPlan(chunks=(prefill.chunk(prompt, to),)))
        computed.clear()
        emitted.clear()
        for layer in hooked:
            prefill._compute(prompt, layer, to)
            computed.add(layer)
            prefill.sender.layer_done("a layer with no cache of its own")
            prefill.sender.layer_done(prefill.pages.layers[layer].name)
        for layer in set(range(6)) - computed:
            prefill._compute(prompt, layer, to)
            computed.add(layer)
        prefill.sender.step_done()
        prompt.done = to
        assert sorted(emitted) == list(range(6))
    decode.wait(prompt)
    decode.check()


def run_twice(prefill, prompt):
    """A step that runs every layer twice; what it writes at first is not final."""
    prefill.sender.begin(StepPlan(chunks=(prefill.chunk(prompt),)))
    for last in (False, True):
        for index, layer in enumerate(prefill.pages.layers):
            if last:
                prefill._compute(prompt, index, prompt.tokens)
            prefill.sender.layer_done(layer.name)
    prefill.sender.step_done()


def test_layers_that_run_twice_in_a_step_leave_when_the_step_is_over(prefill, decode):
    for name in ("a", "b"):
        prompt = Prompt(name, 100)
        decode.want(prompt, prefill)
        run_twice(prefill, prompt)
        decode.wait(prompt)
        decode.check()


def test_what_left_before_a_layer_turned_out_to_run_twice_is_lost(prefill, decode, talk):
    lands(prefill, decode, "once")
    talker, prompt = talk(), Prompt("a", 100)
    talker.want("a", (0, 7))
    heard(prefill, talker)
    run_twice(prefill, prompt)
    while isinstance(answer := talker.hear(), Piece):
        talker.took(answer)
    assert answer == Lost("a", "prefill sent layers before they were final", attempt=0)
    later = Prompt("b", 100)
    decode.want(later, prefill)
    run_twice(prefill, later)
    decode.wait(later)
    decode.check()


def test_the_last_layers_do_not_leave_before_it_is_known_that_none_runs_twice(prefill, decode, talk):
    """A transfer that was complete could not be taken back."""
    lands(prefill, decode, "once")
    talker, prompt = talk(), Prompt("a", 100)
    talker.want("a", (0, 7))
    talker.want("mark", (0, 1))
    heard(prefill, talker, "mark-2")
    prefill.compute((Prompt("mark", 16), 10))
    prefill.sender.begin(StepPlan(chunks=(prefill.chunk(prompt),)))
    for layer in prefill.pages.layers:
        prefill.sender.layer_done(layer.name)
    prefill.sender._launched.put(module._Spoiled(("mark",), "all that was told of so far has left"))
    left = set()
    while isinstance(answer := talker.hear(), Piece):
        left.update(answer.layers)
        talker.took(answer)
    assert answer.transfer == "mark"
    assert left == set(range(5))
    prefill.sender.layer_done(prefill.pages.layers[0].name)
    prefill.sender.step_done()
    assert talker.hear() == Lost("a", "prefill sent layers before they were final", attempt=0)


# wants that come early


def test_what_is_wanted_early_is_refused_by_name_where_there_is_too_much_of_it(prefill, talk, monkeypatch):
    monkeypatch.setattr(module, "_MOST_EARLY", 3)
    talker = talk()
    for number in (0, 1, 0, 2, 3, 4):
        talker.want(f"t{number}", (0, 1), attempt=number)
    lost = [talker.hear() for _ in range(2)]
    assert [type(one) for one in lost] == [Lost, Lost]
    assert [(one.transfer, one.attempt) for one in lost] == [("t1", 1), ("t0", 0)]
    prompts = [Prompt(f"t{number}", 16) for number in range(5)]
    prefill.compute(*prompts)
    assert {talker.hear().transfer for _ in range(3)} == {"t2", "t3", "t4"}


def test_a_transfer_that_is_refused_ends_at_decode_with_the_reason(prefill, decode, monkeypatch):
    monkeypatch.setattr(module, "_MOST_EARLY", 1)
    first, second = Prompt("a", 100), Prompt("b", 100)
    receive = decode.want(first, prefill)
    decode.want(second, prefill)
    assert "more than 1 transfers that prefill has not begun" in decode.wait_stopped(first)
    decode.stopped.clear()
    decode.receiver.begin(StepPlan(forget=(receive.request_id,)))
    decode.forget(receive)
    prefill.compute(first, second)
    decode.wait(second)
    decode.check()


def test_hundreds_of_wants_may_come_before_what_they_ask_for(prefill, talk):
    talker = talk()
    for number in range(300):
        talker.want(f"t{number}", (0, 1))
    heard(prefill, talker)
    prefill.compute(*(Prompt(f"t{number}", 16) for number in range(300)))
    came = set()
    while len(came) < 300:
        piece = talker.hear()
        assert isinstance(piece, Piece)
        came.add(piece.transfer)
        talker.took(piece)


# slots


def test_a_peer_that_reads_nothing_leaves_slots_to_those_that_are_connected(prefill, decode, talk):
    hung = talk("hung")
    lands(prefill, decode, "b")
    prompt = Prompt("a", 3200)
    hung.want("a", (0, 200))
    prefill.compute(prompt)
    until(lambda: sum(peer.engine_id == "hung" for peer in list(slots(prefill).lent.values())) == 7)
    lands(prefill, decode, "c", 1600)
    assert len(slots(prefill).lent) == 7


def test_those_that_read_have_a_fair_share_each(folder, prefill, talk, decode):
    one, other = talk("one"), talk("other")
    one.want("a", (0, 200))
    prefill.compute(Prompt("a", 3200))
    pieces = [one.hear() for _ in range(7)]
    other.want("b", (0, 200))
    prefill.compute(Prompt("b", 3200))
    pieces_of_other = [other.hear()]
    for piece in pieces[:3]:
        one.took(piece)
        pieces_of_other.append(other.hear())
    heard(prefill, other)
    assert sorted(peer.engine_id for peer in slots(prefill).lent.values()) == ["one"] * 4 + ["other"] * 4


def test_a_peer_that_reads_nothing_is_cut_off_when_its_lease_ends_and_the_others_go_on(folder, decode):
    with PrefillWorker(folder, name="q", lease_s=1.0) as prefill:
        hung = Talker.joined(prefill.path, "hung")
        hung.want("a", (0, 200))
        prompt = Prompt("a", 3200)
        prefill.compute(prompt)
        until(lambda: not slots(prefill).free, "use of every slot")
        lands(prefill, decode, "b", 1600)
        while hung.connection.receive() is not None:
            pass  # it is told: its connection has ended
        assert len(slots(prefill).free) == 8
        hung.close()


def test_a_thread_that_nobody_owes_a_slot_sleeps_until_it_is_spoken_to(prefill, decode):
    lands(prefill, decode, "a")
    until(lambda: not slots(prefill).lent)
    assert prefill.sender._patience_s() is None


def test_slots_are_not_free_before_the_connection_of_who_held_them_is_closed(prefill, talk, gate, monkeypatch):
    """Decode sees by its connection that what it reads in them is void."""
    ending = gate(Listener, "_end")
    leaving, leave = [], Slots.leave

    def left(self, peer):
        leaving.append((sum(one is peer for one in self.lent.values()), peer.connection.closed))
        leave(self, peer)

    monkeypatch.setattr(Slots, "leave", left)
    talker = talk()
    talker.want("a", (0, 7))
    prefill.compute(Prompt("a", 100))
    for _ in range(6):
        talker.hear()
    talker.connection._socket.sendall(b"\0\0\0\1\xc1")  # no message
    until(lambda: ending.holds)
    assert until(lambda: leaving) == [(6, True)]


def test_what_decode_read_after_it_was_cut_off_does_not_land(folder, gate):
    reading = gate(ShmWindow, "read")
    with (
        PrefillWorker(folder, lease_s=1.0) as prefill,
        DecodeWorker(folder, name="stopped") as stopped,
    ):
        first = Prompt("a", 16)
        receive = stopped.want(first, prefill)
        prefill.compute(first)
        until(lambda: reading.holds)
        until(lambda: not prefill.sender._peers, "cutting off")
        for slot in range(8):  # the slots are others' now
            prefill.sender._pools["shm"].staging.write(slot, 8, lambda memory: memory.numpy().fill(1))
        reading.open()
        assert "gone" in stopped.wait_stopped(first)
        stopped.forget(receive)
        assert not stopped.landed
        stopped.stopped.clear()
        stopped.receiver.begin(StepPlan(forget=(receive.request_id,)))
        lands(prefill, stopped, "b")


# one transfer's fault


class Failing:
    """The first call of a method fails, or the first for one transfer."""

    def __init__(self, monkeypatch, owner, name, error):
        original, self.left = getattr(owner, name), 1

        def call(*arguments):
            if self.left:
                self.left -= 1
                raise error
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)


FAULTS = {
    "gather": lambda monkeypatch, prefill: Failing(monkeypatch, type(prefill.pages), "gather", RuntimeError("CUDA")),
    "staging": lambda monkeypatch, prefill: Failing(monkeypatch, ShmStaging, "write", OSError("CUDA")),
    "ids": lambda monkeypatch, prefill: Failing(monkeypatch, module.Sender, "_ids", torch.OutOfMemoryError("CUDA")),
    "next": lambda monkeypatch, prefill: Failing(monkeypatch, Coverage, "next", IndexError("CUDA")),
    "ready": lambda monkeypatch, prefill: Failing(monkeypatch, Coverage, "ready", ValueError("CUDA")),
    "want": lambda monkeypatch, prefill: Failing(monkeypatch, Coverage, "want", KeyError("CUDA")),
    "scheduled": lambda monkeypatch, prefill: Failing(monkeypatch, module, "Coverage", TypeError("CUDA")),
}


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "scheduled"])
def test_a_fault_of_one_transfer_ends_it_with_its_reason_and_nothing_else(prefill, decode, monkeypatch, fault):
    warm = lands(prefill, decode, "warm")
    FAULTS[fault](monkeypatch, prefill)
    bad, good = Prompt("bad", 400), Prompt("good", 400)
    receive = decode.want(bad, prefill)
    until(lambda: any("bad" in peer.early for peer in list(prefill.sender._peers)))
    decode.want(good, prefill)
    prefill.compute(bad, good)
    why = decode.wait_stopped(bad)
    assert why.startswith("prefill could not send it")
    assert "CUDA" in why
    decode.stopped.clear()
    decode.receiver.begin(StepPlan(forget=(receive.request_id,)))
    decode.forget(receive)
    decode.wait(good)
    decode.check()
    until(lambda: not slots(prefill).lent)
    assert len(slots(prefill).free) == 8
    sent = prefill.tell(finished=("bad",), dropped=("bad",))
    until(lambda: sent | prefill.sender.take_sent() == {"p-bad"}, "its blocks")
    prefill.finish(warm, good)
    lands(prefill, decode, "later")


def test_a_chunk_that_cannot_be_understood_takes_nothing_else_of_its_step_along(prefill, decode):
    kept = Prompt("kept", 100)
    prefill.compute(kept)
    bad, good = Prompt("bad", 100), Prompt("good", 100)
    decode.want(good, prefill)
    receive = decode.want(bad, prefill)
    until(lambda: any(len(peer.early) == 2 for peer in list(prefill.sender._peers)))
    wrong = Chunk("bad", "p-bad", ((1,), (2,), (3,)), True, 100, True)
    plan = StepPlan(chunks=(wrong, prefill.chunk(good)), finished=("kept",), dropped=("kept",))
    sent = prefill.run(plan, [(good, 100)])
    assert "prefill could not send it" in decode.wait_stopped(bad)
    decode.stopped.clear()
    decode.forget(receive)
    decode.receiver.begin(StepPlan(forget=(receive.request_id,)))
    decode.wait(good)
    decode.check()
    assert sent | prefill.sender.take_sent() == {"p-kept"}, "blocks of the same step"


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_want_that_makes_no_sense_is_answered_by_name(prefill, decode, talk, attempts):
    talker = talk()
    prefill.compute(Prompt("a", 100))
    for attempt in range(attempts):
        talker.connection.send(module.Want("a", attempt, []))
        answer = talker.hear()
        assert (type(answer), answer.transfer, answer.attempt) == (Lost, "a", attempt)
        assert "0 cache groups" in answer.why
    lands(prefill, decode, "b")


def test_a_device_that_fails_ends_what_was_being_computed(prefill, decode):
    class Event:
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access\nmore")

    bad = Prompt("a", 100)
    receive = decode.want(bad, prefill)
    prefill.sender.begin(StepPlan(chunks=(prefill.chunk(bad),)))
    prefill.sender._launched.put(module._Ready(prefill.sender._chunks, (0,), Event()))
    assert decode.wait_stopped(bad) == "prefill's device failed: CUDA error: an illegal memory access"
    decode.stopped.clear()
    decode.forget(receive)
    decode.receiver.begin(StepPlan(forget=(receive.request_id,)))
    lands(prefill, decode, "b")


def test_a_transfer_that_failed_can_be_had_once_it_is_computed_anew(prefill, decode, monkeypatch):
    FAULTS["gather"](monkeypatch, prefill)
    prompt = Prompt("a", 100)
    receive = decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait_stopped(prompt)
    decode.stopped.clear()
    decode.forget(receive)
    prefill.tell(preempted=("a",))
    prefill.overwrite(prompt)
    decode.receiver.begin(StepPlan(forget=(receive.request_id,)))
    prefill.compute(prompt)
    decode.want(prompt, prefill, attempt=1)
    decode.wait(prompt)
    decode.check()


def test_a_worker_that_has_no_stream_says_so_and_gives_blocks_back(folder, decode, monkeypatch):
    def fails(device):
        raise RuntimeError("CUDA error: no device")

    monkeypatch.setattr(module, "own_stream", fails)
    with PrefillWorker(folder, name="q") as prefill:
        prompt = Prompt("a", 100)
        decode.want(prompt, prefill)
        assert "prefill's worker cannot send: CUDA error: no device" in decode.wait_stopped(prompt)
        prefill.compute(prompt)
        sent = prefill.tell(finished=("a",), dropped=("a",))
        until(lambda: sent | prefill.sender.take_sent() == {"p-a"})


def test_what_another_engine_asks_for_is_lost_to_the_first(prefill, decode, talk):
    talker = talk()
    prompt = Prompt("a", 100)
    talker.want("a", (0, 7))
    heard(prefill, talker)
    prefill.compute((prompt, 10))
    until(lambda: prefill.sender._transfers.get("a"))
    decode.want(prompt, prefill)
    assert talker.hear() == Lost("a", "another decode engine has asked for it", attempt=0)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


# decode asks again


def test_decode_that_asks_again_for_other_blocks_gets_those(prefill, decode):
    prompt = Prompt("a", 320)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.landed.clear()
    decode.receiver.begin(StepPlan(forget=("d-a",)))
    decode.want(prompt, prefill, cached=3, attempt=1)
    decode.wait(prompt)
    decode.check()
    prefill.finish(prompt)


def test_a_piece_holds_the_blocks_that_it_names_in_every_attempt(prefill, talk):
    talker, prompt = talk(), Prompt("a", 160)
    prefill.compute(prompt)
    until(lambda: "a" in prefill.sender._transfers and all(prefill.sender._transfers["a"].coverage._ready))
    for attempt, (start, end) in enumerate([(0, 8), (2, 10), (1, 9)]):
        talker.want("a", (start, end), attempt=attempt)
        for layer in range(6):
            piece = talker.hear()
            assert (piece.attempt, piece.layers, piece.ranges) == (attempt, [layer], [(start, end)])
            at = piece.slot * 8 * BLOCK_BYTES
            memory = prefill.sender._pools["shm"].staging._memory.bytes[at : at + piece.bytes].view(torch.int64)
            assert torch.equal(memory, torch.cat([kv("a", layer, block, 24) for block in range(start, end)]))
            talker.took(piece)


# what it costs


def test_neither_transfers_without_work_nor_a_full_staging_are_looked_at_again(prefill, talk, monkeypatch):
    calls, original = [], Coverage.next
    monkeypatch.setattr(Coverage, "next", lambda self, most: (calls.append(1), original(self, most))[1])
    reads, hung = talk("reads"), talk("hung")
    idle = [Prompt(f"i{number}", 16) for number in range(40)]
    for prompt in idle:
        reads.want(prompt.name, (0, 1), (5, 6))
    hung.want("big", (0, 200))
    heard(prefill, hung)
    prefill.compute(*idle)
    came = 0
    while came < 6 * len(idle):
        piece = reads.hear()
        came += len(piece.layers)
        reads.took(piece)
    heard(prefill, reads)
    prefill.compute(Prompt("big", 3200))
    for _ in range(7):
        hung.hear()
    until(lambda: "waits" in prefill.counts._data)
    heard(prefill, reads)
    looked = len(calls)
    for _ in range(200):
        reads.connection.send(Took(99))
    heard(prefill, reads)
    assert len(calls) == looked


def test_a_piece_that_waits_is_counted_once(prefill, talk):
    talker = talk()
    talker.want("a", (0, 80))
    heard(prefill, talker)
    prefill.compute(Prompt("a", 1280))
    pieces = [talker.hear() for _ in range(8)]
    until(lambda: "waits" in prefill.counts._data)
    for _ in range(20):
        talker.connection.send(Took(99))
    heard(prefill, talker)
    assert prefill.counts._data["waits"] == {"slot": 1}
    talker.took(pieces[0])
    talker.hear()
    heard(prefill, talker)
    assert prefill.counts._data["waits"] == {"slot": 2}


def test_the_word_of_blocks_that_were_taken_away_is_kept_until_it_was_heard_only(prefill, decode):
    for number in range(50):
        prefill.tell(preempted=(f"never-{number}", "later"), dropped=(f"nor-{number}",))
    until(lambda: not prefill.sender._losing)
    lands(prefill, decode, "later")


def test_its_threads_end_with_it(prefill):
    names = ("trivet-sender", "trivet-watcher")
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    prefill.sender.close()
    until(lambda: not any(thread.is_alive() for thread in threads if thread is prefill.sender._thread))
