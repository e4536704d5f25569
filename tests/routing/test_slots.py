import pytest

from helpers.boards import board_of
from trivet.routing.board import Board, BoardError
from trivet.routing.slots import Slots


def test_engines_keep_their_slots():
    slots = Slots(Board.private(4))
    assert slots.assign(["a", "b"]) == {"a": 0, "b": 1}
    assert slots.assign(["b", "c", "a"]) == {"a": 0, "b": 1, "c": 2}


def test_an_engine_that_comes_back_has_its_slot_again():
    slots = Slots(Board.private(4))
    slots.assign(["a", "b"])
    assert slots.assign(["b"]) == {"b": 1}
    assert slots.assign(["a", "b"]) == {"a": 0, "b": 1}


def test_a_slot_is_given_on_only_when_nobody_counts_there_any_more():
    with board_of(2, engines=2) as (made, first, second):
        slots = Slots(made)
        slots.assign(["a", "b"])
        first.charge(0, 5, 1)
        second.charge(1, 0, 1)  # a leg of no tokens is one
        first.take_turn(0)
        with pytest.raises(BoardError, match="no slot for another engine: all 2 are taken"):
            slots.assign(["c"])
        first.charge(0, -5, -1)
        assert slots.assign(["c"]) == {"c": 0}
        assert made.last_turn(0) == 0, "a new engine has not been chosen yet"
        with pytest.raises(BoardError):
            slots.assign(["c", "b", "d"])
        second.charge(1, 0, -1)
        assert slots.assign(["c", "d"]) == {"c": 0, "d": 1}


def test_slots_that_were_never_used_come_first():
    slots = Slots(Board.private(3))
    slots.assign(["a"])
    assert slots.assign(["b"]) == {"b": 1}
    assert slots.assign(["c"]) == {"c": 2}
    assert slots.assign(["d"]) == {"d": 0}, "then the one that is unused for longest"


def test_a_name_twice_is_one_engine():
    assert Slots(Board.private(1)).assign(["a", "a"]) == {"a": 0}
