"""Worker sides together, over a real socket and shared memory."""

import random
import threading
import time

import pytest

from transfer.waiting import LIMIT_S, until
from transfer.workers import BLOCK_BYTES, DecodeWorker, Gate, PrefillWorker, Prompt, Talker
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import Cannot, Got, Landed, Offer, Open, Piece, Took, Try, Use, Want
from trivet.transfer.movers import MOVERS, MoverError
from trivet.transfer.movers.shm import Shm, ShmStaging, ShmWindow
from trivet.transfer.plan import StepPlan


@pytest.fixture
def prefill(folder):
    with PrefillWorker(folder) as prefill:
        yield prefill


@pytest.fixture
def decode(folder):
    with DecodeWorker(folder) as decode:
        yield decode


# what arrives


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 160, 1000])
def test_a_prompt_in_one_chunk_arrives(prefill, decode, tokens):
    prompt = Prompt("a", tokens)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()
    prefill.finish(prompt)


@pytest.mark.parametrize("chunk", [16, 40, 100, 128])
def test_a_prompt_in_several_chunks_arrives(prefill, decode, chunk):
    prompt = Prompt("a", 300)
    decode.want(prompt, prefill)
    for to in [*range(chunk, 300, chunk), 300]:
        prefill.compute((prompt, to))
    decode.wait(prompt)
    decode.check()
    prefill.finish(prompt)


def test_pieces_leave_before_the_prompt_is_done(prefill, decode):
    prompt = Prompt("a", 320)
    decode.want(prompt, prefill)
    prefill.compute((prompt, 160))
    rows = decode.pages.layers[0].rows
    until(lambda: (rows != -1).any(1).sum() == 10, "arrival of the first chunk")
    assert not decode.look().landed
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


@pytest.mark.parametrize(("tokens", "ends"), [(32, [2, 4, 6, 8]), (16 * 6, [1, 2, 3, 4, 5, 6, 7, 8])])
def test_layers_are_told_of_in_groups_that_fit_a_piece(folder, monkeypatch, tokens, ends):
    with PrefillWorker(folder, groups=(0,) * 8) as prefill:
        prefill.compute(Prompt("first", 16))  # it shows that a layer is final once it has run
        emitted, original = [], prefill.sender._emit
        monkeypatch.setattr(
            prefill.sender, "_emit", lambda: (emitted.append(prefill.sender._launching[-1] + 1), original())
        )
        prefill.compute(Prompt("a", tokens))
        assert emitted == ends


def test_a_block_that_is_not_full_waits_for_the_chunk_that_fills_it(prefill, decode):
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    prefill.compute((prompt, 47))
    rows = decode.pages.layers[-1].rows
    until(lambda: (rows != -1).any(1).sum() == 2, "arrival of two blocks")
    prefill.compute((prompt, 63))
    until(lambda: (rows != -1).any(1).sum() == 3, "arrival of the third")
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


@pytest.mark.parametrize("chunks", [(200,), (50, 120, 200)])
def test_decode_may_ask_after_all_is_computed(prefill, decode, chunks):
    prompt = Prompt("a", 200)
    for to in chunks:
        prefill.compute((prompt, to))
    prefill.tell(finished=("a",))
    decode.want(prompt, prefill)
    decode.wait(prompt)
    decode.check()
    until(lambda: prefill.sender.take_sent() == {"p-a"}, "sending")


def test_decode_may_ask_between_chunks(prefill, decode):
    prompt = Prompt("a", 200)
    prefill.compute((prompt, 90))
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


@pytest.mark.parametrize("checksums", [False, True])
def test_a_prompt_many_times_as_large_as_the_staging_arrives(folder, decode, checksums):
    with PrefillWorker(folder, staging=16, piece=8, blocks=600, checksums=checksums) as prefill:
        prompt = Prompt("a", 6 * 16 * 16)  # 96 blocks in 6 layers: 36 times the staging
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        decode.wait(prompt)
        decode.check()
        prefill.finish(prompt)
        assert prefill.counts.take().data["sent"] == {"shm": [96 * 6 * BLOCK_BYTES, 72]}


def test_a_piece_that_waits_for_a_slot_is_counted(folder, decode, gate):
    reading = gate(ShmWindow, "read")
    with PrefillWorker(folder, staging=16, piece=8) as prefill:
        prompt = Prompt("a", 1600)
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        until(lambda: "waits" in prefill.counts._data, "waiting")
        reading.open()
        decode.wait(prompt)
        decode.check()


def test_a_block_larger_than_a_piece_has_a_slot_of_its_size(folder):
    groups = (0, 1, 1)
    with (
        PrefillWorker(folder, groups=groups, staging=2, piece=1) as prefill,
        DecodeWorker(folder, groups=groups) as decode,
    ):
        prompt = Prompt("a", 80)
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        decode.wait(prompt)
        decode.check()


@pytest.mark.parametrize("cached", [1, 5, 12])
def test_only_what_decode_lacks_is_sent(prefill, decode, cached):
    prompt = Prompt("a", 200)
    decode.want(prompt, prefill, cached=cached)
    prefill.compute((prompt, 100))
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()
    prefill.finish(prompt)
    assert prefill.counts.take().data["sent"]["shm"][0] == (13 - cached) * 6 * BLOCK_BYTES


@pytest.mark.parametrize("asks", ["first", "later"])
def test_decode_that_lacks_nothing_has_all_at_once(prefill, decode, asks):
    prompt = Prompt("a", 160)
    if asks == "later":
        prefill.compute(prompt)
    decode.want(prompt, prefill, cached=10)
    decode.wait(prompt)
    if asks == "first":
        time.sleep(0.05)
        prefill.compute(prompt)
    decode.check()
    prefill.finish(prompt)


@pytest.mark.parametrize("chunk", [300, 128])
def test_layers_that_no_hook_saw_are_sent_when_the_step_is_over(prefill, decode, chunk):
    prompt = Prompt("a", 300)
    decode.want(prompt, prefill)
    for to in [*range(chunk, 300, chunk), 300]:
        prefill.compute((prompt, to), hooks=False)
    decode.wait(prompt)
    decode.check()


def test_blocks_that_lie_outside_a_sliding_window_are_not_sent(folder):
    groups = (0, 1, 0, 1, 1)
    with PrefillWorker(folder, groups=groups) as prefill, DecodeWorker(folder, groups=groups) as decode:
        prompt = Prompt("a", 230)
        decode.want(prompt, prefill, window=4)
        prefill.compute((prompt, 100))
        prefill.compute(prompt)
        decode.wait(prompt)
        decode.check()
        assert decode.pages.layers[1].rows[0].eq(-1).all()
        assert prefill.counts.take().data["sent"]["shm"][0] == (15 * 2 + 4 * 3 * 2) * BLOCK_BYTES


def test_groups_with_blocks_of_other_sizes_arrive(folder):
    groups = (0, 1, 0, 1)
    with PrefillWorker(folder, groups=groups) as prefill, DecodeWorker(folder, groups=groups) as decode:
        prefill.pages.block_tokens = decode.pages.block_tokens = (16, 32)
        prompt = Prompt("a", 205)
        decode.want(prompt, prefill)
        for to in (40, 100, 205):
            prefill.compute((prompt, to))
        decode.wait(prompt)
        decode.check()


def test_what_prefill_had_cached_is_sent_too(prefill, decode):
    first, second = Prompt("a", 100), Prompt("b", 160)
    prefill.compute((first, 96))
    second.blocks, second.done = [list(first.blocks[0][:3])], 0
    for index, layer in enumerate(prefill.pages.layers):
        prefill._compute(Prompt("b", 160, [first.blocks[0][:3]]), index, 48)
        assert layer.rows[first.blocks[0][0]][0] != -1
    second.done = 48
    chunk = prefill.chunk(second)
    whole = type(chunk)("b", "p-b", tuple(tuple(group) for group in second.blocks), True, 160, True)
    decode.want(second, prefill)
    prefill.run(StepPlan(chunks=(whole,)), [(second, 160)])
    decode.wait(second)
    decode.check()


# together


def test_one_decode_engine_receives_from_two_prefill_engines(folder, decode):
    with PrefillWorker(folder, name="p1") as one, PrefillWorker(folder, name="p2") as two:
        first, second = Prompt("a", 200), Prompt("b", 100)
        decode.start(decode.receive(first, one), decode.receive(second, two))
        one.compute(first)
        two.compute(second)
        decode.wait(first, second)
        decode.check()


def test_two_decode_engines_receive_from_one_prefill_engine(folder, prefill):
    with DecodeWorker(folder, name="d1") as one, DecodeWorker(folder, name="d2") as two:
        prompts = [Prompt(f"t{number}", 100 + 30 * number) for number in range(6)]
        for number, prompt in enumerate(prompts):
            (one, two)[number % 2].want(prompt, prefill)
        prefill.compute(*prompts)
        one.wait(*prompts[::2])
        two.wait(*prompts[1::2])
        one.check()
        two.check()
        prefill.finish(*prompts)


@pytest.mark.parametrize("seed", range(3))
def test_many_transfers_at_once_all_arrive(folder, seed):
    chance = random.Random(seed)
    kind = {"groups": (0, 1, 0, 0, 1), "blocks": 1200}
    with PrefillWorker(folder, staging=32, piece=6, **kind) as prefill, DecodeWorker(folder, **kind) as decode:
        prompts = [Prompt(f"t{number}", chance.randint(1, 500)) for number in range(16)]
        left, unasked = list(prompts), list(prompts)
        while left:
            while unasked and chance.random() < 0.5:
                asking = unasked.pop(chance.randrange(len(unasked)))
                decode.want(asking, prefill, window=chance.choice([None, 3]), cached=chance.choice([0, 0, 1]))
            batch = chance.sample(left, min(len(left), chance.randint(1, 4)))
            prefill.compute(
                *((prompt, min(prompt.tokens, prompt.done + chance.randint(1, 200))) for prompt in batch),
                hooks=chance.random() < 0.8,
            )
            left = [prompt for prompt in left if prompt.done < prompt.tokens]
        for prompt in unasked:
            decode.want(prompt, prefill)
        decode.wait(*prompts)
        decode.check()
        prefill.finish(*prompts)
        assert len(decode.counts.take().data["received"]) == 16


# when prefill's blocks are given back


def test_blocks_are_given_back_once_prefill_has_ended_and_decode_has_all(prefill, decode):
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    time.sleep(0.05)
    assert prefill.sender.take_sent() == set()
    prefill.finish(prompt)
    time.sleep(0.05)
    assert prefill.sender.take_sent() == set()


def test_blocks_are_kept_until_decode_has_all(prefill, decode, gate):
    reading = gate(ShmWindow, "read")
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    prefill.tell(finished=("a",))
    until(lambda: reading.holds)
    time.sleep(0.05)
    assert prefill.sender.take_sent() == set()
    reading.open()
    decode.wait(prompt)
    until(lambda: prefill.sender.take_sent() == {"p-a"}, "sending")


def test_blocks_that_are_kept_are_given_back_when_nobody_wants_them(prefill):
    prompt = Prompt("a", 100)
    prefill.compute(prompt)
    prefill.tell(finished=("a",))
    assert prefill.sender.take_sent() == set()
    prefill.tell(dropped=("a",))
    until(lambda: prefill.sender.take_sent() == {"p-a"}, "sending")


def test_a_request_that_was_aborted_is_not_told_as_sent(prefill, decode):
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    prefill.compute((prompt, 50))
    prefill.tell(dropped=("a",))
    other = Prompt("b", 100)
    decode.want(other, prefill)
    prefill.compute(other)
    decode.wait(other)
    assert prefill.sender.take_sent() == set()
    assert not prefill.sender._transfers.get("a")


# preemption


def test_a_prompt_that_was_preempted_arrives_right(prefill, decode):
    prompt = Prompt("a", 300)
    decode.want(prompt, prefill)
    prefill.compute((prompt, 150))
    until(lambda: (decode.pages.layers[0].rows != -1).any(1).sum() >= 4)
    prefill.sender.begin(StepPlan(preempted=("a",)))
    prefill.overwrite(prompt)
    prefill.sender.step_done()
    prefill.compute((prompt, 80))
    prefill.compute((prompt, 200))
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()
    prefill.finish(prompt)


def test_a_prompt_that_was_preempted_before_decode_asked_arrives_right(prefill, decode):
    prompt = Prompt("a", 300)
    prefill.compute((prompt, 150))
    prefill.sender.begin(StepPlan(preempted=("a",)))
    prefill.overwrite(prompt)
    decode.want(prompt, prefill)
    time.sleep(0.05)
    prefill.compute((prompt, 100))
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


def test_a_piece_that_was_being_gathered_when_its_prompt_was_preempted_is_void(prefill, decode, gate):
    prompt = Prompt("a", 300)
    writing = gate(ShmStaging, "write")
    decode.want(prompt, prefill)
    prefill.compute((prompt, 150))
    until(lambda: writing.holds)
    prefill.sender.begin(StepPlan(preempted=("a",)))
    prefill.overwrite(prompt)
    writing.open()
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


def test_no_piece_of_a_preempted_prompt_leaves_while_the_word_of_it_waits(prefill, decode, gate):
    busy, prompt = Prompt("busy", 64), Prompt("a", 64)
    decode.want(busy, prefill)
    until(lambda: any(peer.mover for peer in prefill.sender._peers))
    writing = gate(ShmStaging, "write")
    decode.want(prompt, prefill)
    prefill.compute(busy, prompt)
    until(lambda: writing.holds)  # a piece of the first; the second is ready behind it
    prefill.sender.begin(StepPlan(preempted=("a",)))
    prefill.overwrite(prompt)
    writing.open()
    prefill.compute(prompt)
    decode.wait(busy, prompt)
    decode.check()


def test_no_piece_leaves_of_a_prompt_that_came_and_was_preempted_while_the_sender_was_busy(prefill, decode, gate):
    busy, prompt = Prompt("busy", 64), Prompt("a", 64)
    decode.want(busy, prefill)
    until(lambda: any(peer.mover for peer in prefill.sender._peers))
    writing = gate(ShmStaging, "write")
    decode.want(prompt, prefill)
    prefill.compute(busy)
    until(lambda: writing.holds)
    prefill.compute(prompt)
    prefill.sender.begin(StepPlan(preempted=("a",)))
    prefill.overwrite(prompt)
    writing.open()
    prefill.compute(prompt)
    decode.wait(busy, prompt)
    decode.check()


def test_no_piece_of_a_dropped_prompt_leaves_while_the_word_of_it_waits(folder, decode, gate):
    with PrefillWorker(folder, staging=512) as prefill:
        busy, prompt = Prompt("busy", 64), Prompt("a", 64)
        decode.want(busy, prefill)
        until(lambda: any(peer.mover for peer in prefill.sender._peers))
        writing = gate(ShmStaging, "write")
        decode.want(prompt, prefill)
        prefill.compute(busy, prompt)
        until(lambda: writing.holds)
        prefill.sender.begin(StepPlan(dropped=("a",)))  # its request was aborted: its blocks are another's now
        prefill.overwrite(prompt)
        writing.open()
        decode.wait(busy)
        until(lambda: "a" not in prefill.sender._transfers)
        time.sleep(0.05)
        assert "d-a" not in decode.look().landed


# decode begins again


def again(decode, prefill, prompt, receive):
    """The next attempt at a request: it is given other blocks, those of the former are others' now."""
    assert decode.wait_stopped(prompt) == "given up"
    decode.forget(receive)
    decode.stopped.clear()
    later = decode.receive(prompt, prefill, attempt=receive.attempt + 1)
    plan = StepPlan(receives=(later,), forget=(receive.request_id,))
    decode.receiver.begin(plan)
    decode.receiver.start(plan)
    return later


def test_decode_that_begins_again_with_other_blocks_gets_all(prefill, decode):
    prompt = Prompt("a", 300)
    receive = decode.want(prompt, prefill)
    prefill.compute((prompt, 150))
    until(lambda: (decode.pages.layers[-1].rows != -1).any(1).sum() == 9, "arrival of the first chunk")
    until(lambda: not prefill.sender._pools["shm"].slots.lent)
    prefill.tell(preempted=("a",))
    prefill.overwrite(prompt)
    decode.start(given_up=[receive])
    again(decode, prefill, prompt, receive)
    prefill.compute((prompt, 150))
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()
    assert decode.look().attempts == {"d-a": 1}
    prefill.finish(prompt)


def test_pieces_of_a_former_attempt_do_not_spoil_the_next(folder, prefill, decode, gate):
    prompt = Prompt("a", 300)
    receive = decode.want(prompt, prefill)
    reading = gate(ShmWindow, "read")
    prefill.compute((prompt, 150))
    until(lambda: reading.holds and not prefill.sender._pools["shm"].slots.free, "use of every slot")
    prefill.tell(preempted=("a",))
    prefill.overwrite(prompt)
    decode.start(given_up=[receive])
    peer = next(iter(decode.receiver._peers.values()))
    taking = gate(Connection, "receive")  # the pieces behind the one that is written lie in the socket
    reading.open()
    until(lambda: taking.holds)
    again(decode, prefill, prompt, receive)
    assert not peer.ended
    taking.open()
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


def test_the_end_of_a_former_attempt_does_not_end_the_next(prefill, decode, monkeypatch):
    prompt = Prompt("a", 300)
    receive = decode.want(prompt, prefill)
    held, go_on, original = threading.Event(), threading.Event(), Connection.send

    def send(self, message, files=()):
        if isinstance(message, Took) and not held.is_set():
            held.set()
            assert go_on.wait(LIMIT_S)
        return original(self, message, files)

    reading = Gate(monkeypatch, ShmWindow, "read")
    prefill.compute((prompt, 30))
    until(lambda: reading.holds)
    monkeypatch.setattr(Connection, "send", send)
    decode.start(given_up=[receive])
    reading.open()
    assert held.wait(LIMIT_S)  # the piece is written; the slot is not yet given back
    prefill.tell(preempted=("a",))
    prefill.overwrite(prompt)
    again(decode, prefill, prompt, receive)
    time.sleep(0.05)
    go_on.set()
    time.sleep(0.05)
    prefill.compute(prompt)
    decode.wait(prompt)
    decode.check()


# checksums


@pytest.mark.parametrize("checksums", [False, True])
def test_a_piece_that_is_spoiled_on_its_way_is_seen_by_its_checksum(folder, decode, monkeypatch, checksums):
    original = ShmWindow.read

    def spoiled(self, slot, size):
        memory = original(self, slot, size).clone()
        memory[size // 2] ^= 1
        return memory

    monkeypatch.setattr(ShmWindow, "read", spoiled)
    with PrefillWorker(folder, checksums=checksums) as prefill:
        prompt = Prompt("a", 200)
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        if checksums:
            assert "checksum" in decode.wait_stopped(prompt)
        else:
            decode.wait(prompt)
            with pytest.raises(AssertionError, match="holds"):
                decode.check()


def test_other_transfers_go_on_behind_one_that_was_spoiled(folder, decode, monkeypatch):
    original, times = ShmWindow.read, []

    def spoiled_once(self, slot, size):
        memory = original(self, slot, size).clone()
        memory[0] ^= not times
        times.append(slot)
        return memory

    monkeypatch.setattr(ShmWindow, "read", spoiled_once)
    with PrefillWorker(folder, checksums=True, staging=16) as prefill:
        first, second = Prompt("a", 600), Prompt("b", 600)
        receive = decode.want(first, prefill)
        prefill.compute(first)
        assert "checksum" in decode.wait_stopped(first)
        decode.forget(receive)
        decode.stopped.clear()
        decode.receiver.begin(StepPlan(forget=("d-a",)))
        decode.want(second, prefill)
        prefill.compute(second)
        decode.wait(second)
        decode.check()


# ends


def test_a_prefill_worker_that_ends_stops_what_it_had_not_sent(prefill, decode):
    prompt = Prompt("a", 200)
    decode.want(prompt, prefill)
    prefill.compute((prompt, 100))
    until(lambda: prefill.sender._peers)
    prefill.cut()
    assert "prefill's worker is gone" in decode.wait_stopped(prompt)


def test_a_sender_that_closes_ends_what_it_had_not_sent(prefill, decode):
    prompt = Prompt("a", 200)
    decode.want(prompt, prefill)
    prefill.compute((prompt, 100))
    until(lambda: prefill.sender._peers)
    prefill.sender.close()
    assert "gone" in decode.wait_stopped(prompt)


def test_what_had_landed_stays_landed_when_prefill_ends(prefill, decode):
    prompt = Prompt("a", 200)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    prefill.cut()
    until(lambda: not prefill.sender._peers)
    assert decode.look().landed == {"d-a": 1}


def test_a_prefill_worker_that_is_not_there_is_told_with_its_path(folder, decode):
    prompt = Prompt("a", 200)
    decode.want(prompt, str(folder / "none.0"))
    assert f"cannot be reached at {folder / 'none.0'}" in decode.wait_stopped(prompt)


def test_a_request_that_comes_when_the_worker_has_just_gone_is_told_the_same(folder, decode):
    first, second = Prompt("a", 200), Prompt("b", 200)
    decode.want(first, str(folder / "none.0"))
    why = decode.wait_stopped(first)
    (peer,) = decode.receiver._peers.values()
    until(lambda: peer.ended)
    peer.ended = False  # it ends between the look at it and its being asked
    receive = decode.receive(second, str(folder / "none.0"))
    submit = peer.submit

    def ends_first(receiving):
        peer.ended = True
        submit(receiving)

    peer.submit = ends_first
    decode.start(receive)
    assert decode.wait_stopped(second) == why


def test_a_rank_that_prefill_does_not_have_is_told(folder, decode, prefill):
    prompt = Prompt("a", 200)
    decode.receiver._rank = 3
    decode.want(prompt, prefill)
    assert "cannot be reached" in decode.wait_stopped(prompt)


def test_a_prefill_engine_that_was_started_again_serves(folder, decode):
    first, second = Prompt("a", 100), Prompt("b", 100)
    with PrefillWorker(folder) as prefill:
        decode.want(first, prefill, engine="p-1")
        prefill.compute(first)
        decode.wait(first)
    with PrefillWorker(folder) as prefill:
        decode.want(second, prefill, engine="p-2")
        prefill.compute(second)
        decode.wait(second)
        decode.check()


def test_the_same_engine_is_connected_again_after_its_connection_was_lost(prefill, decode):
    first, second = Prompt("a", 100), Prompt("b", 100)
    decode.want(first, prefill)
    prefill.compute(first)
    decode.wait(first)
    prefill.cut()
    until(lambda: next(iter(decode.receiver._peers.values())).ended)
    decode.want(second, prefill)
    prefill.compute(second)
    decode.wait(second)
    decode.check()


def test_a_request_that_decode_drops_has_stopped_once_nobody_writes(prefill, decode, gate):
    reading = gate(ShmWindow, "read", after=1)
    prompt = Prompt("a", 300)
    receive = decode.want(prompt, prefill)
    prefill.compute(prompt)
    until(lambda: reading.holds)
    decode.start(given_up=[receive])
    for _ in range(20):
        report = decode.look()
        assert not report.stopped
        assert not report.landed
        time.sleep(0.002)
    reading.open()
    assert decode.wait_stopped(prompt) == "given up"
    decode.forget(receive)
    time.sleep(0.05)
    decode.check()
    until(lambda: prefill.sender._transfers["a"].peer is None)
    until(lambda: not next(iter(prefill.sender._pools.values())).slots.lent)


def test_a_request_that_decode_drops_before_anything_came_stops(prefill, decode):
    prompt = Prompt("a", 300)
    receive = decode.want(prompt, prefill)
    decode.forget(receive)
    decode.start(given_up=[receive])
    assert decode.wait_stopped(prompt) == "given up"
    prefill.compute(prompt)
    time.sleep(0.05)
    decode.check()


def test_a_request_that_is_dropped_in_the_step_that_begins_it_stops(prefill, decode):
    prompt = Prompt("a", 300)
    receive = decode.receive(prompt, prefill)
    decode.forget(receive)
    decode.start(receive, given_up=[receive])
    assert decode.wait_stopped(prompt) == "given up"
    prefill.compute(prompt)
    time.sleep(0.05)
    decode.check()
    assert prefill.counts._data.get("sent") is None


def test_a_prompt_that_prefill_drops_does_not_land(prefill, decode):
    prompt = Prompt("a", 300)
    receive = decode.want(prompt, prefill)
    decode.forget(receive)
    prefill.compute((prompt, 150))
    prefill.tell(dropped=("a",))
    time.sleep(0.05)
    report = decode.look()
    assert not report.landed
    assert not report.stopped
    decode.start(given_up=[receive])  # its scheduler was told by prefill's
    assert decode.wait_stopped(prompt) == "given up"


def test_a_report_is_repeated_until_it_was_read(prefill, decode):
    prompt = Prompt("a", 100)
    decode.want(prompt, prefill)
    assert decode.receiver.report() is not None
    prefill.compute(prompt)
    decode.wait(prompt)
    assert [decode.look().landed for _ in range(2)] == [{"d-a": 1}] * 2
    decode.receiver.begin(StepPlan(forget=("d-a",)))
    assert decode.receiver.report() is None


def test_requests_that_must_fail_are_told_once(decode):
    decode.receiver.begin(StepPlan(failed=("x", "y")))
    assert decode.receiver.take_failed() == {"x", "y"}
    assert decode.receiver.take_failed() == set()


def test_what_has_landed_is_told_to_the_scheduler_side_at_once(folder, prefill, decode):
    came = []

    def hear(connection):
        while (message := connection.receive()) is not None:
            came.append(message)

    listener = Listener(str(folder / "d.d"), hear, "test-notices")
    for name in ("a", "b"):
        prompt = Prompt(name, 100)
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        decode.wait(prompt)
    assert until(lambda: len(came) == 2)
    assert came == [Landed("d-a", 0, 0), Landed("d-b", 0, 0)]
    notices = decode.receiver._notices
    decode.receiver.close()
    assert notices.closed
    listener.close()
    notices.close()


def test_what_landed_is_counted_with_its_pieces_and_times(prefill, decode):
    prompt = Prompt("a", 160)
    decode.want(prompt, prefill)
    prefill.compute(prompt)
    decode.wait(prompt)
    ((mover, size, pieces, seconds, tail_s),) = decode.counts.take().data["received"]
    sent = prefill.counts.take().data
    assert (mover, [size, pieces]) == ("shm", sent["sent"]["shm"])
    assert size == 60 * BLOCK_BYTES
    assert 0 < tail_s < seconds < LIMIT_S
    assert sent["pairs"] == {"shm": 1}


# slots


def test_slots_of_a_decode_engine_that_went_away_come_back(folder, prefill, gate):
    reading = gate(ShmWindow, "read")
    with DecodeWorker(folder, name="d1") as one, DecodeWorker(folder, name="d2") as two:
        first, second = Prompt("a", 1000), Prompt("b", 1000)
        one.want(first, prefill)
        prefill.compute(first)
        until(lambda: "waits" in prefill.counts._data, "use of every slot")
        one.receiver.close()
        until(lambda: not prefill.sender._pools["shm"].slots.lent, "return of the slots")
        reading.open()
        two.want(second, prefill)
        prefill.compute(second)
        two.wait(second)
        two.check()


def test_every_slot_is_free_again_when_all_has_landed(prefill, decode):
    prompts = [Prompt(f"t{number}", 400) for number in range(4)]
    for prompt in prompts:
        decode.want(prompt, prefill)
    prefill.compute(*prompts)
    decode.wait(*prompts)
    pool = prefill.sender._pools["shm"].slots
    until(lambda: len(pool.free) == 8)
    assert sorted(pool.free) == list(range(8))
    assert not pool.lent


def test_a_decode_engine_that_reads_nothing_does_not_hold_the_others_up(folder, prefill):
    stuck = Connection.to(prefill.path)
    assert stuck.send(Try("stuck", "here", "shm"))
    assert isinstance(stuck.receive(), Offer)
    stuck.send(Use("shm", {}))
    with DecodeWorker(folder) as decode:
        first, second = Prompt("a", 300), Prompt("b", 100)
        stuck.send(Want("a", 0, [[(0, 2)]]))
        prefill.compute(first)
        decode.want(second, prefill)
        prefill.compute(second)
        decode.wait(second)
        decode.check()
    stuck.close()


# agreement on a mover


@pytest.fixture
def talker(prefill):
    talker = Talker(prefill.path)
    yield talker
    talker.close()


def test_a_mover_that_prefill_does_not_have_is_answered_with_those_it_has(talker):
    answer = talker.ask(Try("e", "h", "cuda_p2p"))
    assert answer == Cannot("cuda_p2p", "cuda_p2p is not among prefill's movers (shm)")


def test_an_offer_has_slots_for_pieces(talker):
    answer = talker.ask(Try("e", "h", "shm"))
    assert answer == Offer("shm", {"slots": 8, "slot_bytes": 8 * BLOCK_BYTES})


def test_a_mover_that_fails_in_an_unknown_way_is_answered_too(folder, monkeypatch):
    def fails(self, device, slots, slot_bytes):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Shm, "stage", fails)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with PrefillWorker(folder, name="q") as prefill, DecodeWorker(folder) as decode:
        prompt = Prompt("a", 50)
        decode.want(prompt, prefill)
        assert "out of memory" in decode.wait_stopped(prompt)


def test_where_no_mover_works_every_reason_is_told(folder, decode, prefill, monkeypatch):
    def fails(self, device, window, files):
        raise MoverError("shm: not today")

    monkeypatch.setattr(Shm, "open", fails)
    prompt = Prompt("a", 50)
    decode.want(prompt, prefill)
    assert decode.wait_stopped(prompt) == "no mover between prefill and decode: shm: shm: not today"


def test_the_next_mover_is_tried_where_one_does_not_work(folder, monkeypatch, caplog):
    class Broken(Shm):
        name = "broken"

        def open(self, device, window, files):
            raise MoverError("cannot be mapped")

    monkeypatch.setitem(MOVERS, "broken", Broken())
    movers = {"movers": ("broken", "shm")}
    with PrefillWorker(folder, **movers) as prefill, DecodeWorker(folder, **movers) as decode:
        prompt = Prompt("a", 100)
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        decode.wait(prompt)
        decode.check()
        until(lambda: "no broken to decode engine engine-d: cannot be mapped" in caplog.text)
        assert prefill.counts.take().data["pairs"] == {"shm": 1}


def test_settings_with_a_mover_of_another_device_are_refused(folder):
    with pytest.raises(ValueError, match="no mover of pinned runs on cpu"):
        PrefillWorker(folder, movers=("pinned",))
    with pytest.raises(ValueError, match="no mover of pinned runs on cpu"):
        DecodeWorker(folder, movers=("pinned",))


@pytest.mark.parametrize("message", [Open("t"), Use("none", {}), Use("pinned", {}), Landed("r", 0, 0)])
def test_a_peer_that_says_what_it_must_not_is_cut_off_and_the_others_are_served(folder, decode, message):
    with PrefillWorker(folder, name="q", movers=("shm",)) as prefill:
        talker = Talker(prefill.path)
        prefill.compute(Prompt("a", 20))
        for one in (message, Want("a", 0, [[(0, 1)]])):
            talker.connection.send(one)
        prompt = Prompt("b", 100)
        decode.want(prompt, prefill)
        prefill.compute(prompt)
        decode.wait(prompt)
        decode.check()
        assert talker.connection.receive() is None
        talker.close()


def test_a_slot_can_be_given_back_by_whom_it_was_lent_to_only(prefill, talker):
    talker.ask(Try("e", "h", "shm"))
    talker.connection.send(Use("shm", {}))
    for slot in (0, 0, 99):
        talker.connection.send(Took(slot))
    talker.connection.send(Got("unknown", 0))
    assert isinstance(talker.ask(Try("e", "h", "x")), Cannot)
    assert sorted(prefill.sender._pools["shm"].slots.free) == list(range(8))


def test_a_piece_names_layers_and_blocks_in_prefills_order(prefill, talker):
    talker.ask(Try("e", "h", "shm"))
    talker.connection.send(Use("shm", {}))
    prefill.compute(Prompt("a", 100))
    until(lambda: "a" in prefill.sender._transfers and all(prefill.sender._transfers["a"].coverage._ready))
    talker.connection.send(Want("a", 0, [[(1, 3), (4, 5)]]))
    piece = talker.connection.receive()
    assert isinstance(piece, Piece)
    assert (piece.transfer, piece.group, piece.layers, piece.ranges) == ("a", 0, [0, 1], [(1, 3), (4, 5)])
    assert (piece.bytes, piece.checksum) == (6 * BLOCK_BYTES, None)
    assert 0 < piece.computed_ns <= time.monotonic_ns()
