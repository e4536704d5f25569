"""What splitting costs at prompt lengths that were not measured, and whether it pays. Pure functions of measurements.

- Moving KV takes a fixed time and a time for each token, so a handover is a line through the medians at two lengths.
  A third length in between says how far that can be believed.
- Computing a prompt takes a fixed time, one for each token, and attention's, which grows with the square of the
  length. With three lengths or more all three are known; with two the square is left out, which is too little for
  longer prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trivet.check.verdict import Finding, Level, failed, passed, warned

Samples = Mapping[int, Sequence[float]]
"""Seconds that were measured, by the prompt's tokens."""

BELIEVED_SHARE = 0.25
"""A prediction that misses the measured time by a larger share of it is not believed."""
CHEAP_SHARE = 0.25
"""A handover that costs no more than this share of the time to first token is what splitting is known to cost: on two
GPUs with direct copies NixlConnector takes 22 % of 8,000 tokens' (docs/measurements.md). It is paid for by streams that
no prompt stalls."""
DEAR_SHARE = 1.0
"""A handover that takes longer than computing the prompt cannot pay: decode could have computed it in that time."""
_LEAST_S = 1e-3
"""A handover that is shorter is no measure of an error: clocks and event loops are no finer."""
UNNOTICED_S = 0.05
"""A handover that is shorter than this costs nobody anything that can be noticed, whatever its share."""


@dataclass(frozen=True, slots=True)
class Curve:
    """``fixed + each * tokens + square * tokens**2``, in seconds."""

    fixed_s: float
    each_s: float
    square_s: float = 0.0

    def at(self, tokens: int) -> float:
        """Seconds for a prompt of so many tokens; never below 0."""
        return max(0.0, self.fixed_s + self.each_s * tokens + self.square_s * tokens * tokens)


@dataclass(frozen=True, slots=True)
class HandoverModel:
    """Handovers of one pair: a line, and how it did on a length that it was not made from."""

    line: Curve
    tested_tokens: int | None = None
    """None where only two lengths were measured."""
    measured_s: float | None = None
    error_share: float | None = None
    """How far the line was off there, as a share of what was measured."""

    def gb_per_s(self, kv_bytes_per_token: int) -> float | None:
        """What the slope says of the link, in 10**9 bytes a second; None where longer prompts took no longer."""
        return kv_bytes_per_token / self.line.each_s / 1e9 if self.line.each_s > 0 else None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One prompt, split over a pair and colocated."""

    prompt_tokens: int
    prefill_s: float
    handover_s: float
    split_ttft_s: float
    """Where prefill makes the first token, the handover is no part of it: it stands before the second."""
    colocated_ttft_s: float
    is_beyond: bool
    """The prompt is more than twice as long as the longest that was measured."""

    @property
    def handover_share(self) -> float:
        """What the handover costs, as a share of the colocated time to first token."""
        return self.handover_s / self.colocated_ttft_s if self.colocated_ttft_s > 0 else math.inf

    def facts(self) -> dict[str, Any]:
        """As ``--json`` writes it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prefill_s": round(self.prefill_s, 6),
            "handover_s": round(self.handover_s, 6),
            "split_ttft_s": round(self.split_ttft_s, 6),
            "colocated_ttft_s": round(self.colocated_ttft_s, 6),
            "handover_share": None if math.isinf(self.handover_share) else round(self.handover_share, 4),
        }


def medians(samples: Samples) -> list[tuple[int, float]]:
    """The median of each length, the shortest first; lengths without a sample are left out."""
    return [(tokens, statistics.median(times)) for tokens, times in sorted(samples.items()) if times]


def handover(samples: Samples) -> HandoverModel:
    """The line through the shortest and the longest that were measured, tested on one in between.

    Where there are several, the one in the middle of them.

    Raises:
        ValueError: fewer than two lengths were measured.
    """
    points = medians(samples)
    if len(points) < 2:
        raise ValueError("a handover's line needs two lengths")
    (short, short_s), (long, long_s) = points[0], points[-1]
    each_s = (long_s - short_s) / (long - short)
    line = Curve(short_s - each_s * short, each_s)
    between = points[1:-1]
    if not between:
        return HandoverModel(line)
    tokens, measured_s = between[len(between) // 2]
    error = abs(line.at(tokens) - measured_s) / max(measured_s, _LEAST_S)
    return HandoverModel(line, tokens, measured_s, error)


def curve(samples: Samples) -> Curve:
    """How long prompts take to compute, by least squares through the medians.

    One length is taken for proportional; two make a line; of three and more the square is kept if it is positive and
    the rest with it, as noise alone bends a curve downwards.

    Raises:
        ValueError: nothing was measured.
    """
    points = medians(samples)
    if not points:
        raise ValueError("nothing was measured")
    if len(points) == 1:
        ((tokens, seconds),) = points
        return Curve(0.0, seconds / tokens)
    if len(points) > 2:
        fixed_s, each_s, square_s = _least_squares(points, 3)
        if square_s > 0 and each_s >= 0:
            return Curve(fixed_s, each_s, square_s)
    fixed_s, each_s = _least_squares(points, 2)
    return Curve(fixed_s, max(0.0, each_s))


def predict(
    lengths: Sequence[int],
    *,
    prefill: Samples,
    colocated_ttft: Samples,
    handovers: HandoverModel,
    first_token_is_prefills: bool,
) -> list[Prediction]:
    """Times to first token of prompts of these lengths.

    Args:
        prefill: prefill legs, as they were measured through the pair.
        colocated_ttft: times to first token of the same prompts, colocated.
        first_token_is_prefills: ``Connector.hands_over_first_token``.

    Raises:
        ValueError: nothing was measured.
    """
    prefilling, colocated = curve(prefill), curve(colocated_ttft)
    longest = max(tokens for tokens, _ in medians(prefill))
    found = []
    for tokens in lengths:
        prefill_s, handover_s = prefilling.at(tokens), handovers.line.at(tokens)
        split_s = prefill_s if first_token_is_prefills else prefill_s + handover_s
        found.append(Prediction(tokens, prefill_s, handover_s, split_s, colocated.at(tokens), tokens > 2 * longest))
    return found


def prediction_finding(about: str, model: HandoverModel, kv_bytes_per_token: int | None = None) -> Finding:
    """``prediction``: whether the handover's line holds at a length that it was not made from."""
    line = model.line
    told = f"a handover takes {line.fixed_s * 1e3:.1f} ms and {line.each_s * 1e6:.2f} us a token"
    if kv_bytes_per_token is not None and (gb_per_s := model.gb_per_s(kv_bytes_per_token)) is not None:
        told += f" ({gb_per_s:.1f} GB/s)"
    if model.error_share is None or model.measured_s is None:
        return warned("prediction", about, f"{told}; not tested on a third length", "measure three prompt lengths")
    told += (
        f"; at {model.tested_tokens} tokens it was off by {model.error_share:.0%} of {model.measured_s * 1e3:.1f} ms"
    )
    if model.error_share <= BELIEVED_SHARE:
        return passed("prediction", about, told)
    return warned(
        "prediction", about, told, "check again while the engines are idle: a link that others use has no fixed speed"
    )


def split_pays_finding(about: str, prediction: Prediction) -> Finding:
    """``split-pays``: what the handover costs at a length, beside computing the prompt where it is decoded."""
    share, seconds = prediction.handover_share, prediction.handover_s
    colocated_ms, split_ms = prediction.colocated_ttft_s * 1e3, prediction.split_ttft_s * 1e3
    told = (
        f"{prediction.prompt_tokens} tokens: the handover takes {seconds * 1e3:.0f} ms, {share:.0%} of the colocated "
        f"time to first token ({colocated_ms:.0f} ms; split {split_ms:.0f} ms)"
    )
    if prediction.is_beyond:
        told += "; that is far beyond what was measured"
    level = split_pays(prediction)
    if level is Level.PASS:
        return passed("split-pays", about, told)
    if level is Level.WARN:
        mend = "split only if time between tokens matters more than time to first token, or use a faster link"
        return warned("split-pays", about, told, mend)
    mend = "do not split over this link: serve colocated (gateway.split: never), or give the pair a faster one"
    return failed("split-pays", about, told, mend)


def split_pays(prediction: Prediction) -> Level:
    """PASS up to ``CHEAP_SHARE`` or ``UNNOTICED_S``, FAIL above ``DEAR_SHARE``, WARN in between."""
    if prediction.handover_s <= UNNOTICED_S or prediction.handover_share <= CHEAP_SHARE:
        return Level.PASS
    return Level.WARN if prediction.handover_share <= DEAR_SHARE else Level.FAIL


def _least_squares(points: Sequence[tuple[int, float]], terms: int) -> list[float]:
    """Coefficients of 1, n, n**2 ... by the normal equations; lengths are scaled, as their powers differ by far."""
    scale = float(max(tokens for tokens, _ in points))
    rows = [[(tokens / scale) ** power for power in range(terms)] for tokens, _ in points]
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(terms)]
        + [sum(row[i] * seconds for row, (_, seconds) in zip(rows, points, strict=True))]
        for i in range(terms)
    ]
    for i in range(terms):
        pivot = max(range(i, terms), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(terms):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][terms] / matrix[i][i] / scale**i for i in range(terms)]
