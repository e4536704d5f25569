from dataclasses import replace

import pytest

from trivet.routing.board import Board
from trivet.routing.engines import Engines, EngineView
from trivet.routing.handovers import Handovers


class Bench:
    """A board, a clock, and what is expected of a pair."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.board = Board.private()
        self.handovers = Handovers(lambda: self.now_s)
        engines = Engines(board=self.board)
        engines.update(
            EngineView(f"{tier}-0", tier, "http://x", True, slot=slot)
            for slot, tier in enumerate(("prefill", "decode"))
        )
        self.prefill, self.decode = engines.all()

    def took(self, *seconds: float) -> None:
        for one in seconds:
            self.board.note_handover(self.prefill, self.decode, one)

    @property
    def expected_s(self) -> float | None:
        return self.handovers.expected_s(self.board, self.prefill, self.decode)

    def asked(self) -> None:
        self.handovers.asked(self.prefill, self.decode)


def test_a_pair_that_has_handed_nothing_over_is_unknown():
    bench = Bench()
    bench.asked()
    assert bench.expected_s is None


def test_what_is_expected_is_the_mean_of_the_last_ones():
    bench = Bench()
    bench.took(0.1, 0.3)
    assert bench.expected_s == pytest.approx(0.2)


def test_after_half_a_minute_without_a_sample_one_request_tries_the_pair_again():
    bench = Bench()
    bench.took(3.0)
    assert bench.expected_s == 3.0
    bench.now_s += 29.9
    assert bench.expected_s == 3.0
    bench.now_s += 0.2
    assert bench.expected_s is None
    assert bench.expected_s is None  # asking is not trying
    bench.asked()
    assert bench.expected_s == 3.0  # for the others
    bench.now_s += 30
    assert bench.expected_s is None


def test_a_pair_that_is_slow_still_is_left_alone_for_as_long_again():
    bench = Bench()
    bench.took(3.0)
    assert bench.expected_s == 3.0
    bench.now_s += 31
    bench.asked()
    bench.took(2.8)
    assert bench.expected_s == pytest.approx(2.9)
    bench.now_s += 29
    assert bench.expected_s == pytest.approx(2.9)


@pytest.mark.parametrize("samples", [1, 3, 20])
def test_a_pair_that_has_become_fast_is_used_until_its_mean_says_so(samples):
    bench = Bench()
    bench.took(*[3.0] * samples)
    assert bench.expected_s == pytest.approx(3.0)
    bench.now_s += 31
    bench.asked()
    for _ in range(40):
        bench.took(0.05)
        assert bench.expected_s is None or bench.expected_s < 0.2
    assert bench.expected_s == pytest.approx(0.05, abs=0.05)


def test_engines_that_were_started_anew_are_unknown():
    bench = Bench()
    bench.took(3.0)
    bench.prefill = replace(bench.prefill, generation=1)
    assert bench.expected_s is None
    bench.took(0.1)
    assert bench.expected_s == pytest.approx(0.1)
