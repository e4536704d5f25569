from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.transfer.pieces import Arrivals, Coverage, Cut, below, count, indexes, part, ranges_of

SETS = st.sets(st.integers(0, 40)).map(sorted)


# ranges


@settings(deadline=None)
@given(SETS)
def test_ranges_hold_what_they_were_made_of(wanted):
    ranges = ranges_of(wanted)
    assert indexes(ranges) == wanted
    assert count(ranges) == len(wanted)
    assert all(start < end for start, end in ranges)
    assert all(one[1] < other[0] for one, other in pairwise(ranges))


@settings(deadline=None)
@given(SETS, st.integers(0, 45), st.integers(0, 45))
def test_a_part_is_the_blocks_from_one_place_to_another(wanted, start, end):
    assert indexes(part(ranges_of(wanted), start, end)) == wanted[start : max(start, end)]


@settings(deadline=None)
@given(SETS, st.integers(0, 45))
def test_parts_behind_each_other_are_the_whole(wanted, middle):
    ranges = ranges_of(wanted)
    total = count(ranges)
    both = part(ranges, 0, middle) + part(ranges, middle, total)
    assert indexes(both) == wanted


@settings(deadline=None)
@given(SETS, st.integers(0, 45))
def test_below_counts_indexes_below_the_limit(wanted, limit):
    assert below(ranges_of(wanted), limit) == sum(index < limit for index in wanted)


# coverage and arrivals


@dataclass
class Case:
    groups: list[int]
    block_bytes: list[int]
    blocks: list[int]
    """Blocks of the prompt, by group."""
    wanted: list[list[tuple[int, int]]]
    most_bytes: int
    ready: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.ready = [0] * len(self.groups)

    def coverage(self):
        return Coverage(self.groups, self.block_bytes)

    def arrivals(self):
        return Arrivals(self.groups, self.wanted)

    def compute(self, coverage, layers, blocks):
        coverage.ready(layers, blocks)
        for layer in layers:
            self.ready[layer] = max(self.ready[layer], blocks[self.groups[layer]])

    def forget(self, coverage):
        coverage.reset_ready()
        self.ready = [0] * len(self.groups)

    def check(self, cut):
        """A piece is small enough, of one group, and computed."""
        size = (cut.end - cut.start) * sum(self.block_bytes[layer] for layer in cut.layers)
        assert size <= self.most_bytes or (len(cut.layers) == 1 and cut.end - cut.start == 1)
        assert cut.start < cut.end
        ranges = part(self.wanted[cut.group], cut.start, cut.end)
        assert count(ranges) == cut.end - cut.start
        for layer in cut.layers:
            assert self.groups[layer] == cut.group
            assert ranges[-1][1] <= self.ready[layer]
        return ranges


@st.composite
def cases(draw):
    number = draw(st.integers(1, 3))
    groups = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=8))
    sizes = draw(st.lists(st.sampled_from([8, 64, 72, 512]), min_size=len(groups), max_size=len(groups)))
    blocks = [draw(st.integers(0, 12)) for _ in range(number)]
    wanted = [
        ranges_of([index for index in range(most) if keep[index]])
        for most, keep in ((most, draw(st.lists(st.booleans(), min_size=most, max_size=most))) for most in blocks)
    ]
    return Case(groups, sizes, blocks, wanted, draw(st.sampled_from([1, 64, 200, 1024, 10**6])))


def parts_of(draw, layers):
    """Layers in the groups in which a step tells of them."""
    edges = sorted({0, layers, *draw(st.lists(st.integers(0, layers), max_size=3))})
    return [range(start, end) for start, end in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(cases(), st.data())
def test_everything_is_sent_once_in_order_and_never_before_it_is_computed(case, data):
    coverage, arrivals = case.coverage(), case.arrivals()
    wants_at, preempted_at = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    steps = data.draw(st.integers(1, 3))
    sent = {layer: [] for layer in range(len(case.groups))}

    def pump(most):
        for _ in range(most):
            if (cut := coverage.next(case.most_bytes)) is None:
                return
            ranges = case.check(cut)
            coverage.sent(cut)
            arrivals.check(cut.layers, ranges)
            arrivals.came(cut.layers, ranges)
            for layer in cut.layers:
                sent[layer] += indexes(ranges)
            assert arrivals.is_complete() == (not list(arrivals.missing())) == coverage.is_complete()

    def compute():
        for step in range(1, steps + 1):
            blocks = [most * step // steps for most in case.blocks]
            for layers in parts_of(data.draw, len(case.groups)):
                case.compute(coverage, layers, blocks)
                pump(data.draw(st.integers(0, 3)))
            if step == wants_at and coverage.wanted is None:
                coverage.want(case.wanted)
            if step == preempted_at:
                case.forget(coverage)
                return False
        return True

    if wants_at == 0:
        coverage.want(case.wanted)
    if not compute():
        preempted_at = 0
        compute()
    if coverage.wanted is None:
        assert not coverage.is_complete()
        coverage.want(case.wanted)
    pump(10**6)
    assert sent == {layer: indexes(case.wanted[group]) for layer, group in enumerate(case.groups)}
    assert coverage.is_complete()
    assert arrivals.is_complete()
    assert coverage.next(case.most_bytes) is None


@settings(deadline=None)
@given(cases())
def test_what_is_ready_at_once_leaves_in_pieces_that_cannot_be_joined(case):
    coverage = case.coverage()
    coverage.want(case.wanted)
    case.compute(coverage, range(len(case.groups)), case.blocks)
    cuts = []
    while (cut := coverage.next(case.most_bytes)) is not None:
        case.check(cut)
        coverage.sent(cut)
        cuts.append(cut)
    for one, other in pairwise(cuts):
        if one.layers == other.layers and one.end == other.start and len(one.layers) == 1:
            size = case.block_bytes[one.layers[0]]
            assert (one.end - one.start + 1) * size > case.most_bytes


def test_nothing_leaves_before_decode_has_said_what_it_lacks():
    coverage = Coverage([0], [8])
    coverage.ready([0], [5])
    assert coverage.next(100) is None
    assert not coverage.is_complete()
    coverage.want([[(2, 5)]])
    assert coverage.next(100) == Cut(0, (0,), 0, 3)


def test_a_block_larger_than_a_piece_leaves_alone():
    coverage = Coverage([0, 0], [100, 100])
    coverage.want([[(0, 2)]])
    coverage.ready([0, 1], [2])
    assert coverage.next(10) == Cut(0, (0,), 0, 1)


def test_neighbouring_layers_at_the_same_place_leave_together():
    coverage = Coverage([0, 1, 0, 0], [8, 8, 8, 8])
    coverage.want([[(0, 2)], [(0, 1)]])
    coverage.ready([0, 1, 2], [2, 1])
    assert coverage.next(1000) == Cut(0, (0, 2), 0, 2)


def test_decode_that_asks_again_gets_everything_again():
    coverage = Coverage([0], [8])
    coverage.want([[(0, 2)]])
    coverage.ready([0], [4])
    coverage.sent(coverage.next(100))
    assert coverage.is_complete()
    coverage.want([[(1, 4)]])
    assert not coverage.is_complete()
    assert coverage.next(100) == Cut(0, (0,), 0, 3)


def test_what_was_sent_before_a_preemption_is_not_sent_again():
    coverage = Coverage([0], [8])
    coverage.want([[(0, 4)]])
    coverage.ready([0], [2])
    coverage.sent(coverage.next(100))
    coverage.reset_ready()
    assert coverage.next(100) is None
    coverage.ready([0], [2])
    assert coverage.next(100) is None
    coverage.ready([0], [4])
    assert coverage.next(100) == Cut(0, (0,), 2, 4)


def test_a_count_that_is_told_late_takes_nothing_back():
    coverage = Coverage([0], [8])
    coverage.want([[(0, 4)]])
    coverage.ready([0], [3])
    coverage.ready([0], [1])
    assert coverage.next(100) == Cut(0, (0,), 0, 3)


def test_where_nothing_is_wanted_all_is_there_at_once():
    coverage = Coverage([0, 1], [8, 8])
    coverage.want([[], []])
    assert coverage.is_complete()
    assert coverage.next(100) is None
    assert Arrivals([0, 1], [[], []]).is_complete()


@pytest.mark.parametrize("ranges", [[(1, 2)], [(0, 1), (2, 4)], [(3, 4)], [(0, 5)]])
def test_a_piece_that_is_not_what_is_missing_next_is_refused(ranges):
    arrivals = Arrivals([0, 0], [[(0, 2), (3, 4)]])
    with pytest.raises(ValueError, match="layer 0 was sent blocks"):
        arrivals.check([0, 1], ranges)
    assert list(arrivals.missing()) == [(0, 3), (1, 3)]


def test_a_piece_that_comes_twice_is_refused():
    arrivals = Arrivals([0], [[(0, 4)]])
    arrivals.came([0], [(0, 2)])
    with pytest.raises(ValueError, match="behind its first 2"):
        arrivals.check([0], [(0, 2)])
    with pytest.raises(ValueError, match="twice"):
        arrivals.check([0, 0], [(2, 4)])
    arrivals.check([0], [[2, 4]])  # as it is in a message
    arrivals.came([0], [[2, 4]])
    assert arrivals.is_complete()
