"""Batches once and in turn, whatever is lost, asked for again, or begun anew by another engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.routing.stream import Stream


class Engine:
    """Numbers batches, keeps some, and answers; another one numbers anew."""

    def __init__(self, name: str = "a", kept: int = 10_000) -> None:
        self.name, self.kept, self.batches = name, kept, []

    def tell(self) -> tuple[int, bytes]:
        self.batches.append(b"%s%d" % (self.name.encode(), len(self.batches)))
        return len(self.batches) - 1, self.batches[-1]

    def answer(self, stream: Stream) -> None:
        since = stream.ask()
        for number in range(max(since, len(self.batches) - self.kept), len(self.batches)):
            stream.answered(number, self.batches[number])
        stream.ended()


class Heard:
    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.forgotten = 0
        self.stream = Stream(self.batches.append, self.forget)

    def forget(self) -> None:
        self.forgotten += 1
        self.batches.clear()


def until_in_order(heard: Heard, engine: Engine) -> None:
    for _ in range(3):
        engine.answer(heard.stream)
        if heard.stream.in_order:
            return
    raise AssertionError("asked three times and not in order")


def test_an_engine_that_has_told_nothing_is_known_whole():
    heard, engine = Heard(), Engine()
    assert not heard.stream.in_order
    engine.answer(heard.stream)
    assert (heard.stream.in_order, heard.stream.whole, heard.batches) == (True, True, [])
    heard.stream.came(*engine.tell())
    assert heard.batches == engine.batches
    engine.answer(heard.stream)
    assert (heard.stream.in_order, heard.stream.whole, heard.batches) == (True, True, engine.batches)


def test_what_was_told_before_is_asked_for_and_nothing_is_taken_twice():
    heard, engine = Heard(), Engine()
    told = [engine.tell() for _ in range(5)]
    engine.answer(heard.stream)
    assert (heard.batches, heard.stream.whole) == (engine.batches, True)
    for one in told:  # these were on their way
        heard.stream.came(*one)
    heard.stream.came(*engine.tell())
    assert (heard.batches, heard.stream.in_order, heard.forgotten) == (engine.batches, True, 0)


def test_a_beginning_that_is_not_kept_is_not_known():
    heard, engine = Heard(), Engine(kept=2)
    for _ in range(5):
        engine.tell()
    engine.answer(heard.stream)
    assert (heard.batches, heard.stream.in_order, heard.stream.whole) == (engine.batches[3:], True, False)
    heard.stream.cleared()
    assert heard.stream.whole


def test_a_hole_is_filled():
    heard, engine = Heard(), Engine()
    engine.answer(heard.stream)
    heard.stream.came(*engine.tell())
    engine.tell()
    heard.stream.came(*engine.tell())
    assert (heard.stream.in_order, heard.batches) == (False, engine.batches[:1])
    engine.answer(heard.stream)
    assert (heard.stream.in_order, heard.batches, heard.forgotten) == (True, engine.batches, 0)


def test_a_hole_that_cannot_be_filled_is_a_new_beginning():
    heard, engine = Heard(), Engine(kept=1)
    engine.answer(heard.stream)
    heard.stream.came(*engine.tell())
    engine.tell()
    heard.stream.came(*engine.tell())
    engine.answer(heard.stream)
    assert (heard.forgotten, heard.batches) == (1, engine.batches[2:])
    assert (heard.stream.in_order, heard.stream.whole) == (True, False)


def test_the_newest_one_lost_comes_with_the_next_answer():
    heard, engine = Heard(), Engine()
    engine.answer(heard.stream)
    heard.stream.came(*engine.tell())
    engine.tell()
    engine.answer(heard.stream)
    assert (heard.batches, heard.stream.in_order, heard.forgotten) == (engine.batches, True, 0)


@pytest.mark.parametrize("before", [1, 3, 8])
@pytest.mark.parametrize("told", [0, 1, 3, 8])
def test_another_engine_in_its_place_is_begun_anew(before, told):
    heard, engine = Heard(), Engine()
    engine.answer(heard.stream)
    for _ in range(before):
        heard.stream.came(*engine.tell())
    other = Engine("b")
    for _ in range(told):
        other.tell()
    until_in_order(heard, other)
    assert (heard.batches, heard.forgotten, heard.stream.whole) == (other.batches, 1, True)
    heard.stream.came(*other.tell())
    assert heard.batches == other.batches


def test_numbers_that_begin_anew_are_not_mixed_with_those_before():
    heard, engine = Heard(), Engine()
    engine.answer(heard.stream)
    for _ in range(3):
        heard.stream.came(*engine.tell())
    other = Engine("b")
    heard.stream.came(*other.tell())
    assert (heard.stream.in_order, heard.batches) == (False, engine.batches)
    until_in_order(heard, other)
    assert heard.batches == other.batches


def test_after_an_answer_that_never_came_the_engine_must_be_asked_first():
    heard, engine = Heard(), Engine()
    engine.answer(heard.stream)
    heard.stream.came(*engine.tell())
    heard.stream.ask()
    assert heard.stream.is_asking
    heard.stream.give_up()
    assert (heard.stream.is_asking, heard.stream.in_order) == (False, False)
    engine.answer(heard.stream)
    assert (heard.stream.in_order, heard.batches, heard.forgotten) == (True, engine.batches, 0)


def test_batches_may_come_while_an_answer_does():
    heard, engine = Heard(), Engine()
    engine.answer(heard.stream)
    heard.stream.came(*engine.tell())
    since = heard.stream.ask()
    heard.stream.came(*engine.tell())
    for number in range(since, 2):
        heard.stream.answered(number, engine.batches[number])
    heard.stream.ended()
    assert (heard.batches, heard.stream.in_order, heard.forgotten) == (engine.batches, True, 0)


def test_an_answer_with_a_hole_is_asked_for_again_from_there():
    heard, engine = Heard(), Engine()
    for _ in range(6):
        engine.tell()
    heard.stream.ask()
    for number in (0, 1, 4, 5):
        heard.stream.answered(number, engine.batches[number])
    heard.stream.ended()
    assert (heard.stream.in_order, heard.batches) == (False, engine.batches[:2])
    assert heard.stream.ask() == 1
    heard.stream.give_up()
    engine.answer(heard.stream)
    assert (heard.stream.in_order, heard.batches, heard.forgotten) == (True, engine.batches, 0)
    assert heard.stream.whole


def test_another_engine_is_noticed_though_a_batch_came_between_question_and_answer():
    heard, engine, other = Heard(), Engine(), Engine("b")
    engine.answer(heard.stream)
    heard.stream.ask()
    heard.stream.came(*engine.tell())
    for _ in range(2):
        heard.stream.answered(*other.tell())
    heard.stream.ended()
    until_in_order(heard, other)
    assert heard.batches == other.batches


@given(st.lists(st.sampled_from(["tell", "lose", "answer", "restart"]), max_size=40), st.integers(1, 4))
def test_whatever_happens_what_is_taken_has_no_hole(steps, kept):
    heard, engine, lives = Heard(), Engine("0", kept), 0
    for step in [*steps, "answer"]:
        if step == "tell":
            one = engine.tell()
            if heard.stream.in_order:  # else it waits, or is asked for
                heard.stream.came(*one)
        elif step == "lose":
            engine.tell()
        elif step == "restart":
            lives += 1
            engine = Engine(str(lives), kept)
            heard.stream.give_up()  # it was away: somebody asked, and had no answer
        else:
            until_in_order(heard, engine)
            assert heard.batches == engine.batches[len(engine.batches) - len(heard.batches) :]
            assert len(heard.batches) >= min(kept, len(engine.batches))
            assert not heard.stream.whole or len(heard.batches) == len(engine.batches)
