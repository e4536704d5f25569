"""The board between rows of one process and of several real ones."""

import fcntl
import os
import threading
import time
from dataclasses import dataclass

import pytest

from helpers.boards import Process, board_of
from helpers.processes import until
from trivet.routing import board as board_module
from trivet.routing.board import Board, BoardError, Count, Handover
from trivet.routing.proofs import Proof


@dataclass(frozen=True)
class Seat:
    slot: int | None
    generation: int = 1


def test_readers_sum_over_the_rows():
    with board_of(3) as (made, *workers):
        for number, worker in enumerate(workers):
            worker.charge(2, 10 * (number + 1), 1)
            worker.write(Count.GENERATIONS, number)
        workers[0].charge(2, -4, 0)
        workers[0].charge(7, 5, 1)
        for one in (made, *workers):
            assert [one.outstanding_tokens(slot) for slot in (1, 2, 7)] == [0, 56, 5]
            assert [one.running_legs(slot) for slot in (1, 2, 7)] == [0, 3, 1]
            assert (one.total(Count.GENERATIONS), one.each(Count.GENERATIONS)) == (3, [0, 1, 2])
        assert workers[2].mine(Count.GENERATIONS) == 2


def test_cells_of_different_meaning_do_not_overlap():
    """Each written with a number of its own, at both ends of every range."""
    with board_of(2, engines=3, regions={"a": 8, "b": 5000}) as (made, first, second):
        written = {}
        for worker in (first, second):
            for count in Count:
                worker.write(count, len(written) + 1)
                written[worker.worker, count] = len(written) + 1
            for slot in range(3):
                worker.charge(slot, 100 + slot, 1000 + slot)
            worker.beat()
        for prefill in range(3):
            for decode in range(3):
                first.note_handover(Seat(prefill), Seat(decode), prefill + decode / 8)
        made.region("a")[:] = b"\xff" * 8
        made.region("b")[:] = b"\xff" * 5000
        first.take_turn(2)
        assert {(worker, count): first.each(count)[worker] for worker, count in written} == written
        assert [made.outstanding_tokens(slot) for slot in range(3)] == [200, 202, 204]
        assert [made.running_legs(slot) for slot in range(3)] == [2000, 2002, 2004]
        assert [made.last_turn(slot) for slot in range(3)] == [0, 0, 1]
        assert [made.handover(Seat(0), Seat(slot)).mean_s for slot in range(3)] == [0.0, 0.125, 0.25]
        assert made.handover(Seat(2), Seat(2)) == Handover(2.25, 1)


def test_the_row_of_a_dead_worker_is_cleared_and_no_other():
    with board_of(2) as (made, first, second):
        for worker in (first, second):
            worker.charge(0, 7, 1)
            worker.write(Count.RUNNING, 3)
            worker.beat()
        made.clear(0)
        assert (made.outstanding_tokens(0), made.running_legs(0), made.each(Count.RUNNING)) == (7, 1, [0, 3])
        assert (made.is_alive(0), made.is_alive(1)) == (False, True)


def test_turns_are_of_all_workers():
    with board_of(2) as (made, first, second):
        for worker, slot in ((first, 0), (second, 1), (first, 2), (second, 0)):
            worker.take_turn(slot)
        assert [made.last_turn(slot) for slot in range(4)] == [4, 2, 3, 0]


@pytest.mark.parametrize("slot", [-1, 8, 10**9])
def test_a_slot_out_of_bounds_is_an_error_and_writes_nothing(slot):
    with board_of(2) as (made, first, _):
        before = bytes(made._bytes)
        for call in (
            lambda: first.charge(slot, 1, 1),
            lambda: first.outstanding_tokens(slot),
            lambda: first.running_legs(slot),
            lambda: first.last_turn(slot),
            lambda: first.note_handover(Seat(slot), Seat(0), 1.0),
            lambda: first.note_handover(Seat(0), Seat(slot), 1.0),
            lambda: first.handover(Seat(0), Seat(slot)),
            lambda: made.clear_engine(slot),
        ):
            with pytest.raises(IndexError):
                call()
        with pytest.raises(IndexError):
            made.clear(-1)
        with pytest.raises(IndexError):
            made.clear(2)
        assert bytes(made._bytes) == before


def test_who_has_no_row_writes_none():
    with board_of(1) as (made, _):
        for call in (lambda: made.charge(0, 1, 1), made.beat, lambda: made.write(Count.RUNNING, 1)):
            with pytest.raises(BoardError, match="nobody's row"):
                call()


def test_a_board_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setattr(board_module, "LAYOUT", 99)
    made = Board.create(1, 4)
    monkeypatch.undo()
    with pytest.raises(BoardError, match="a board of layout 99; this is 3"):
        Board.open(made.descriptor, 0)
    made.close()


@pytest.mark.parametrize("size", [0, 100, 8192])
def test_other_memory_is_no_board(size):
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, size)
    with pytest.raises(BoardError, match="holds no board"):
        Board.open(descriptor, 0)
    os.close(descriptor)


def test_a_row_that_is_not_there_cannot_be_opened():
    with board_of(2) as (made, *_), pytest.raises(IndexError):
        Board.open(made.descriptor, 2)


def test_nobody_can_take_the_memory_away():
    with board_of(1) as (made, _):
        for size in (0, 2**24):
            with pytest.raises(PermissionError):
                os.ftruncate(made.descriptor, size)
        assert fcntl.fcntl(made.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_the_memory_has_no_name():
    with board_of(1) as (made, _):
        assert "deleted" in os.readlink(f"/proc/self/fd/{made.descriptor}")  # noqa: PTH115


# regions


def test_regions_are_shared_and_whole():
    with board_of(2, regions={"prefixes": 10000, "ü": 1}) as (made, first, second):
        assert (len(first.region("prefixes")), len(first.region("ü"))) == (10000, 1)
        first.region("prefixes")[9999] = 7
        assert (second.region("prefixes")[9999], second.region("ü")[0], made.region("prefixes")[0]) == (7, 0, 0)
        assert len(made.region("prefixes")[: 8 * 1250].cast("Q")) == 1250, "aligned for cells of 64 bits"
        with pytest.raises(KeyError):
            first.region("prefix")


def test_a_private_board_has_regions_too():
    board = Board.private(4, {"a": 16})
    board.region("a")[0] = 1
    assert (board.descriptor, board.worker, bytes(board.region("a"))[:2]) == (None, 0, b"\x01\x00")
    assert board.leads()


@pytest.mark.parametrize("regions", [{"": 1}, {"a": 0}, {"a" * 49: 1}, {str(number): 1 for number in range(9)}])
def test_regions_that_cannot_be_are_refused(regions):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(BoardError):
        Board.create(1, 4, regions)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


# pairs


def test_a_handovers_mean_follows_what_is_measured():
    with board_of(2) as (_, first, second):
        pair = Seat(1), Seat(2)
        assert first.handover(*pair) is None
        for worker, seconds in ((first, 0.1), (second, 0.2), (first, 0.3)):
            worker.note_handover(*pair, seconds)
        mean_s, samples = second.handover(*pair)
        assert (mean_s, samples) == (pytest.approx(0.2), 3)
        for _ in range(50):
            first.note_handover(*pair, 1.0)
        assert first.handover(*pair).mean_s == pytest.approx(1.0, rel=0.01)
        assert first.handover(Seat(2), Seat(1)) is None


def test_an_engine_that_is_started_anew_is_measured_anew():
    with board_of(1) as (_, board):
        board.note_handover(Seat(0, 1), Seat(1, 1), 5.0)
        for pair in ((Seat(0, 2), Seat(1, 1)), (Seat(0, 1), Seat(1, 2))):
            assert board.handover(*pair) is None
            board.note_handover(*pair, 0.5)
            assert board.handover(*pair) == Handover(0.5, 1)


def test_how_a_pair_stands_is_known_to_all_workers_and_forgotten_with_its_engines():
    with board_of(2) as (made, first, second):
        pair = Seat(0, 1), Seat(1, 1)
        assert second.proof(*pair) is Proof.UNPROVEN
        first.note_proof(*pair, Proof.GOOD)
        assert second.proof(*pair) is Proof.GOOD
        assert second.proof(Seat(1, 1), Seat(0, 1)) is Proof.UNPROVEN
        first.note_proof(*pair, Proof.WRONG_TOKENS)
        assert second.proof(*pair) is Proof.WRONG_TOKENS
        for anew in ((Seat(0, 2), Seat(1, 1)), (Seat(0, 1), Seat(1, 2))):
            assert second.proof(*anew) is Proof.UNPROVEN
            first.note_proof(*anew, Proof.OPEN)
            assert second.proof(*anew) is Proof.OPEN
        made.clear_engine(1)
        assert second.proof(Seat(0, 1), Seat(1, 2)) is Proof.UNPROVEN
        assert first.handover(*pair) is None


def test_the_last_trouble_of_any_worker_is_known_to_all():
    with board_of(2) as (made, first, second):
        pair = Seat(2), Seat(3)
        assert (first.last_trouble_s(), first.last_trouble_s(*pair)) == (0.0, 0.0)
        before_s = time.monotonic()
        second.note_trouble(*pair)
        assert before_s <= first.last_trouble_s(*pair) <= time.monotonic()
        assert first.last_trouble_s() == pytest.approx(first.last_trouble_s(*pair))
        assert first.last_trouble_s(Seat(3), Seat(2)) == 0.0
        made.clear(1)
        assert first.last_trouble_s() == 0.0
        made.clear_engine(2)
        assert first.last_trouble_s(*pair) == 0.0


def test_engines_without_a_slot_have_no_pair():
    board = Board.private()
    board.note_proof(Seat(None), Seat(0), Proof.GOOD)
    board.note_trouble(Seat(None), Seat(0))
    assert board.proof(Seat(None), Seat(0)) is Proof.UNPROVEN
    assert board.last_trouble_s(Seat(None), Seat(0)) == board.last_trouble_s() == 0.0
    board.note_handover(Seat(None), Seat(0), 1.0)
    assert board.handover(Seat(None), Seat(0)) is None


def test_an_engine_that_is_no_more_is_forgotten():
    with board_of(2) as (made, first, second):
        for worker in (first, second):
            worker.take_turn(3)
            worker.take_turn(4)
        first.note_handover(Seat(3), Seat(4), 1.0)
        first.note_handover(Seat(5), Seat(3), 1.0)
        first.note_handover(Seat(5), Seat(4), 1.0)
        made.clear_engine(3)
        assert (made.last_turn(3), made.last_turn(4)) == (0, 4)
        assert made.handover(Seat(3), Seat(4)) is made.handover(Seat(5), Seat(3)) is None
        assert made.handover(Seat(5), Seat(4)) == Handover(1.0, 1)


# who leads


def test_the_living_worker_of_the_lowest_number_leads(monkeypatch):
    with board_of(3) as (made, *workers):
        now = 10**12
        monkeypatch.setattr(board_module.time, "monotonic_ns", lambda: now)

        def leading() -> list[int]:
            return [number for number, worker in enumerate(workers) if worker.leads()]

        assert leading() == []
        workers[2].beat()
        assert leading() == [2]
        workers[0].beat()
        assert leading() == [0]
        now += 10**9
        workers[1].beat()
        assert leading() == [0]
        now += 10**9  # the first has not beaten for two seconds
        assert leading() == [1]
        workers[0].beat()
        assert leading() == [0]
        made.clear(0)
        assert leading() == [1], "at once when its service has seen it die"
        assert not made.leads()


# between processes

CHARGING = """
import sys
from trivet.routing.board import Board, Count

board = Board.open(int(sys.argv[1]), int(sys.argv[2]))
rounds = int(sys.argv[3])
print("up", flush=True)
number = 0
while rounds < 0 or number < rounds:
    board.charge(number % 8, 3, 1)
    board.write(Count.GENERATIONS, number % 5)
    board.take_turn(number % 8)
    if number % 3:
        board.charge(number % 8, -3, -1)
    number += 1
board.write(Count.GENERATIONS, 1)
print("done", flush=True)
sys.stdin.readline()
"""


def loads(board: Board) -> tuple[int, int]:
    return sum(board.outstanding_tokens(slot) for slot in range(8)), sum(board.running_legs(s) for s in range(8))


def test_two_processes_count_at_once_and_nothing_is_lost():
    with board_of(2) as (made, *_):
        both = [Process(CHARGING, made.descriptor, n, 30000, descriptors=(made.descriptor,)) for n in (0, 1)]
        assert [one.hears() for one in both] == ["up", "up"]
        assert [one.hears() for one in both] == ["done", "done"]
        assert loads(made) == (3 * 20000, 20000)
        assert made.total(Count.GENERATIONS) == 2
        for one in both:
            one.tell()
            assert one.end() == 0


def test_a_process_that_is_killed_between_charges_leaves_nothing_once_its_row_is_cleared():
    with board_of(2) as (made, *_):
        endless = Process(CHARGING, made.descriptor, 0, -1, descriptors=(made.descriptor,))
        other = Process(CHARGING, made.descriptor, 1, 3000, descriptors=(made.descriptor,))
        assert (endless.hears(), other.hears(), other.hears()) == ("up", "up", "done")
        endless.kill()
        made.clear(0)
        assert loads(made) == (3 * 1000, 1000)
        assert (made.total(Count.GENERATIONS), made.is_alive(0)) == (1, False)
        anew = Process(CHARGING, made.descriptor, 0, 300, descriptors=(made.descriptor,))
        assert (anew.hears(), anew.hears()) == ("up", "done")
        assert loads(made) == (3 * 1100, 1100)
        for one in (anew, other):
            one.tell()
            one.end()


LOCKING = """
import sys
from trivet.routing.board import Board

board = Board.open(int(sys.argv[1]), int(sys.argv[2]))
cell = board.region("cell").cast("q")
if sys.argv[3] == "hold":
    with board.lock:
        print("has it", flush=True)
        sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    with board.lock:
        seen = cell[0]
        board.each(3)
        cell[0] = seen + 1
        board.next_ticket()
print("done", flush=True)
"""


def test_the_lock_is_exact_between_processes():
    with board_of(2, regions={"cell": 8}) as (made, first, _):
        both = [Process(LOCKING, made.descriptor, n, 5000, descriptors=(made.descriptor,)) for n in (0, 1)]
        assert [one.hears() for one in both] == ["done", "done"]
        assert made.region("cell").cast("q")[0] == 10000
        assert first.next_ticket() == 10001
        assert [one.end() for one in both] == [0, 0]


def test_a_process_that_is_killed_lets_go_of_the_lock():
    with board_of(2, regions={"cell": 8}) as (made, first, _):
        holder = Process(LOCKING, made.descriptor, 0, "hold", descriptors=(made.descriptor,))
        assert holder.hears() == "has it"
        entered = threading.Event()

        def wait() -> None:
            with first.lock:
                entered.set()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert not entered.wait(0.1)
        holder.kill()
        assert entered.wait(20)
        waiting.join(20)


BEATING = """
import sys, time
from trivet.routing.board import BEAT_S, Board

board = Board.open(int(sys.argv[1]), int(sys.argv[2]))
board.beat()
print("up", flush=True)
while True:
    time.sleep(BEAT_S)
    board.beat()
"""


def test_another_leads_when_the_leader_is_killed_also_where_nobody_clears_its_row():
    with board_of(2) as (made, _, second):
        leader = Process(BEATING, made.descriptor, 0, descriptors=(made.descriptor,))
        assert leader.hears() == "up"
        second.beat()
        assert not second.leads()
        leader.kill()
        assert until(lambda: second.beat() or second.leads())


# news


def test_all_have_heard_when_the_last_has():
    with board_of(2) as (made, first, second):
        assert made.all_heard(1), "who knows of no engine chooses none"
        first.note_heard(1)
        second.note_heard(2)
        assert made.all_heard(1)
        assert not made.all_heard(2)
        first.note_heard(2)
        assert made.all_heard(2)
        assert not made.all_heard(3)
        second.note_heard(3)
        assert not made.all_heard(3)
        made.clear(0)
        assert made.all_heard(3), "a worker that is dead chooses none either"
