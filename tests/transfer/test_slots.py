import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.transfer.slots import Slots


def held(slots, holder):
    return sum(other == holder for other in slots.lent.values())


def take(slots, holder, most=99):
    """As many slots as it may have while nobody else waits."""
    taken = []
    while len(taken) < most and slots.turn([holder]) == holder:
        taken.append(slots.lend(holder))
    return taken


def joined(number, *holders):
    slots = Slots(number)
    for holder in holders:
        slots.join(holder)
    return slots


def test_one_alone_may_have_every_slot():
    slots = joined(8, "a")
    assert sorted(take(slots, "a")) == list(range(8))
    assert slots.turn(["a"]) is None


@pytest.mark.parametrize(
    ("number", "others", "most"), [(8, 1, 7), (8, 3, 5), (8, 4, 4), (8, 30, 4), (2, 1, 1), (2, 9, 1)]
)
def test_one_that_takes_all_it_can_leaves_slots_to_those_that_have_none(number, others, most):
    slots = joined(number, "a", *range(others))
    assert len(take(slots, "a")) == most
    assert take(slots, 0, 1)


@settings(deadline=None)
@given(st.integers(2, 12), st.integers(1, 8))
def test_where_all_take_what_they_can_in_turn_each_has_its_fair_share(number, holders):
    slots = joined(number, *range(holders))
    while (holder := slots.turn(range(holders))) is not None:
        slots.lend(holder)
    shares = [held(slots, holder) for holder in range(holders)]
    assert max(shares) - min(shares) <= 1
    assert all(share >= min(1, number // holders) for share in shares)


def test_what_one_gives_back_goes_to_whom_has_the_fewest():
    slots = joined(8, "a", "b")
    first, *_ = take(slots, "a")
    slots.lend("b")
    assert slots.turn(["a", "b"]) is None
    slots.give_back(first, "a")
    assert slots.turn(["a", "b"]) == "b"
    assert slots.turn([]) is None


@settings(deadline=None)
@given(st.data(), st.integers(2, 10), st.integers(1, 4))
def test_a_slot_is_free_or_lent_to_one_whatever_happens(data, number, holders):
    slots = joined(number, *range(holders))
    for _ in range(data.draw(st.integers(0, 40))):
        holder = data.draw(st.integers(0, holders - 1))
        match data.draw(st.sampled_from(["take", "give", "leave"])):
            case "take":
                take(slots, holder, 1)
            case "give":
                slots.give_back(data.draw(st.integers(-1, number)), holder)
            case "leave":
                slots.leave(holder)
                assert not held(slots, holder)
                slots.join(holder)
        assert sorted([*slots.free, *slots.lent]) == list(range(number))
        assert bool(slots.lent) == (slots.silent_since_s() is not None)


def test_who_gives_nothing_back_is_told_and_who_does_is_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trivet.transfer.slots.time.monotonic", lambda: now[0])
    slots = joined(8, "hung", "busy", "idle")
    take(slots, "hung", 1)
    (slot,) = take(slots, "busy", 1)
    assert slots.silent_since_s() == 100.0
    now[0] = 109.0
    take(slots, "busy", 1)
    slots.give_back(slot, "busy")
    assert slots.silent(10) == []
    now[0] = 110.0
    assert slots.silent(10) == ["hung"]
    slots.leave("hung")
    assert slots.silent(10) == []
    assert slots.silent_since_s() == 109.0


def test_a_slot_that_is_not_its_own_is_not_given_back():
    slots = joined(4, "a", "b")
    (slot,) = take(slots, "a", 1)
    for other in (slot, 1, 99):
        slots.give_back(other, "b")
    assert slots.lent == {slot: "a"}
