"""The choice of engines by two workers that share a board."""

import contextlib

import pytest

from helpers.boards import board_of
from trivet.routing.choose import choose
from trivet.routing.engines import Engines, EngineView

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")


def view(name: str, **more) -> EngineView:
    return EngineView(name, name.partition("-")[0], f"http://{name}", **{"ready": True, "slot": SLOTS[name], **more})


SLOTS = {name: slot for slot, name in enumerate((*NAMES, "decode-3"))}


@contextlib.contextmanager
def two_workers(*names: str):
    with board_of(2) as (made, *boards):
        workers = [Engines(board=board) for board in boards]
        for one in workers:
            one.update(view(name) for name in names)
        yield made, *workers


def chosen(engines: Engines) -> tuple[str, str]:
    """Prefill and decode of a route that takes its turn."""
    route = choose(engines, colocate=None)
    for engine in (route.prefill, route.decode):
        engines.take_turn(engine)
    return route.prefill.name, route.decode.name


def test_two_workers_choose_equals_in_turn_as_one_does():
    with two_workers(*NAMES) as (_, first, second):
        alone = Engines()
        alone.update(view(name, slot=None) for name in NAMES)
        as_one = [chosen(alone) for _ in range(12)]
        assert [chosen(worker) for _ in range(6) for worker in (first, second)] == as_one
        assert as_one[:3] == [("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("prefill-0", "decode-2")]


def test_each_sees_what_the_other_has_given_an_engine():
    with two_workers(*NAMES) as (_, first, second):
        with first.charge(view("decode-0"), 500), first.charge(view("prefill-0"), 20):
            assert second.outstanding_tokens("decode-0") == first.outstanding_tokens("decode-0") == 500
            with second.charge(view("decode-1"), 499), second.charge(view("decode-2"), 501):
                for worker in (first, second):
                    assert chosen(worker) == ("prefill-1", "decode-1")
        for worker in (first, second):
            assert [worker.outstanding_tokens(name) for name in NAMES] == [0] * 5


def test_the_load_of_a_worker_that_died_weighs_nothing():
    with two_workers("decode-0", "decode-1", "prefill-0") as (made, first, second):
        first.board.charge(SLOTS["decode-0"], 500, 1)
        assert choose(second, colocate=None).decode.name == "decode-1"
        made.clear(0)
        assert second.outstanding_tokens("decode-0") == 0
        assert choose(second, colocate=None).decode.name == "decode-0"


def test_an_engine_is_told_by_its_slot_whatever_the_order_of_the_news():
    with two_workers() as (_, first, second):
        first.update([view("decode-0"), view("decode-1")])
        second.update([view("decode-1"), view("decode-0")])
        with first.charge(view("decode-1"), 7):
            assert (second.outstanding_tokens("decode-1"), second.outstanding_tokens("decode-0")) == (7, 0)


def test_legs_of_an_engine_that_left_stay_counted_until_its_slot_is_anothers():
    with two_workers("decode-0") as (_, first, second):
        with first.charge(view("decode-0"), 7):
            for worker in (first, second):
                worker.update([])
                assert worker.outstanding_tokens("decode-0") == 7
        second.update([view("decode-3", slot=SLOTS["decode-0"])])
        with second.charge(view("decode-3", slot=SLOTS["decode-0"]), 9):
            assert second.outstanding_tokens("decode-3") == 9
            assert second.outstanding_tokens("decode-0") == 0


def test_an_engine_that_nobody_could_count_is_not_chosen():
    with two_workers() as (_, first, _second):
        uncounted = view("decode-0", slot=None)
        first.update([uncounted, view("decode-1")])
        assert [one.name for one in first.ready("decode")] == ["decode-1"]
        with first.charge(uncounted, 5):
            first.take_turn(uncounted)
            assert (first.outstanding_tokens("decode-0"), first.last_turn("decode-0")) == (0, 0)


@pytest.mark.parametrize("generation", [1, 2])
def test_what_a_handover_cost_is_known_to_both(generation):
    with two_workers("prefill-0", "decode-0") as (_, first, second):
        pair = view("prefill-0", generation=1), view("decode-0", generation=generation)
        first.board.note_handover(*pair, 0.25)
        assert second.board.handover(*pair).mean_s == 0.25
        assert second.board.handover(view("prefill-0", generation=2), pair[1]) is None
