"""Predictions from measurements: the line and the curve that made them are found again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.check.predict import (
    BELIEVED_SHARE,
    Curve,
    HandoverModel,
    Prediction,
    curve,
    handover,
    medians,
    predict,
    prediction_finding,
    split_pays,
    split_pays_finding,
)
from trivet.check.verdict import Level

PAIR = "prefill-0 -> decode-0"
seconds = st.floats(1e-4, 1.0)
each = st.floats(1e-7, 1e-3)


def measured(of: Curve, *lengths: int) -> dict[int, list[float]]:
    """Three samples of each length around the truth, whose median it is."""
    return {tokens: [of.at(tokens) * 0.5, of.at(tokens), of.at(tokens) * 3] for tokens in lengths}


def test_medians_come_in_order_and_without_what_was_not_measured():
    assert medians({30: [3.0, 1.0, 2.0], 10: [5.0], 20: []}) == [(10, 5.0), (30, 2.0)]


@settings(deadline=None)
@given(seconds, each)
def test_a_handovers_line_is_found_and_tested_on_the_length_between(fixed_s, each_s):
    found = handover(measured(Curve(fixed_s, each_s), 16, 700, 4000))
    assert found.line.fixed_s == pytest.approx(fixed_s, rel=1e-4, abs=1e-9)
    assert found.line.each_s == pytest.approx(each_s, rel=1e-4)
    assert found.tested_tokens == 700
    assert found.error_share == pytest.approx(0, abs=1e-6)
    assert found.gb_per_s(131072) == pytest.approx(131072 / each_s / 1e9, rel=1e-4)


def test_two_lengths_make_a_line_that_nothing_tests():
    found = handover({100: [0.01], 1100: [0.11]})
    assert found.line.at(2100) == pytest.approx(0.21)
    assert found.error_share is None
    assert prediction_finding(PAIR, found).level is Level.WARN
    with pytest.raises(ValueError, match="two lengths"):
        handover({100: [0.01], 200: []})


def test_a_line_that_falls_tells_no_speed_and_never_less_than_nothing():
    found = handover({100: [0.02], 1100: [0.01]})
    assert found.gb_per_s(131072) is None
    assert found.line.at(10**6) == 0.0


@pytest.mark.parametrize(
    ("between_s", "level"), [(0.06, Level.PASS), (0.08, Level.PASS), (0.081, Level.WARN), (0.04, Level.WARN)]
)
def test_a_prediction_that_is_off_by_more_than_a_quarter_is_not_believed(between_s, level):
    found = handover({100: [0.01], 600: [between_s], 1100: [0.11]})
    assert (found.error_share <= BELIEVED_SHARE) == (level is Level.PASS)
    finding = prediction_finding(PAIR, found, 131072)
    assert (finding.name, finding.level, finding.about) == ("prediction", level, PAIR)
    assert "1.3 GB/s" in finding.said


@settings(deadline=None)
@given(seconds, each, st.floats(1e-11, 1e-8))
def test_attentions_square_is_found_from_three_lengths_and_more(fixed_s, each_s, square_s):
    truth = Curve(fixed_s, each_s, square_s)
    for lengths in ((100, 2000, 8000), (100, 1000, 4000, 8000)):
        assert curve(measured(truth, *lengths)).at(16000) == pytest.approx(truth.at(16000), rel=1e-3)


def test_noise_bends_no_curve_downwards():
    found = curve({100: [0.1], 1000: [0.9], 4000: [3.0]})
    assert found.square_s == 0.0
    assert found.at(8000) > found.at(4000)


def test_fewer_lengths():
    assert curve({200: [0.4]}).at(400) == pytest.approx(0.8)
    assert curve({200: [0.4], 400: [0.6]}).at(600) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="nothing"):
        curve({})


@pytest.mark.parametrize("first_is_prefills", [False, True])
def test_times_to_first_token_split_and_colocated(first_is_prefills):
    prefilling, colocated = Curve(0.01, 1e-4, 1e-9), Curve(0.02, 1e-4, 1e-9)
    near, far = predict(
        [3000, 20000],
        prefill=measured(prefilling, 100, 2000, 8000),
        colocated_ttft=measured(colocated, 100, 2000, 8000),
        handovers=HandoverModel(Curve(0.005, 2e-5)),
        first_token_is_prefills=first_is_prefills,
    )
    assert near.prefill_s == pytest.approx(prefilling.at(3000), rel=1e-3)
    assert near.handover_s == pytest.approx(0.065)
    assert near.split_ttft_s == pytest.approx(near.prefill_s + (0 if first_is_prefills else 0.065))
    assert near.colocated_ttft_s == pytest.approx(colocated.at(3000), rel=1e-3)
    assert (near.is_beyond, far.is_beyond) == (False, True)
    assert set(near.facts()) >= {"prompt_tokens", "split_ttft_s", "colocated_ttft_s", "handover_share"}


def prediction(handover_s: float, colocated_s: float) -> Prediction:
    return Prediction(8000, colocated_s, handover_s, colocated_s + handover_s, colocated_s, is_beyond=False)


@pytest.mark.parametrize(
    ("handover_s", "colocated_s", "level"),
    [
        (0.048, 0.213, Level.PASS),  # NixlConnector over NVLink, blocks of 128
        (0.105, 0.213, Level.WARN),  # blocks of 16
        (2.5, 0.213, Level.FAIL),  # no direct copies
        (1.3, 0.7, Level.FAIL),  # 2x L40S, published
        (0.04, 0.03, Level.PASS),  # nobody notices
        (0.25, 1.0, Level.PASS),
        (0.2501, 1.0, Level.WARN),
        (1.0, 1.0, Level.WARN),
        (1.001, 1.0, Level.FAIL),
    ],
)
def test_whether_splitting_pays(handover_s, colocated_s, level):
    one = prediction(handover_s, colocated_s)
    assert split_pays(one) is level
    finding = split_pays_finding(PAIR, one)
    assert (finding.name, finding.level) == ("split-pays", level)
    assert (level is Level.FAIL) == ("do not split over this link" in (finding.mend or ""))
