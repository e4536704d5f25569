"""How long the next handover of a pair may take, from what its last ones have taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trivet.routing.board import Handover
from trivet.routing.engines import EngineView

_BELIEVED_S = 30.0
"""Without a new sample. A pair that is slow is not used, and only use would show that it has become fast."""
_SETTLED = 8
"""Samples after which each newer one weighs as much as one of so many; as the board averages."""


class Measured(Protocol):
    """Where handovers are counted: the board that all workers share."""

    def handover(self, prefill: EngineView, decode: EngineView) -> Handover | None:
        """What those of a pair have taken since both engines were started; None if there was none."""
        ...


@dataclass(frozen=True, slots=True)
class _Seen:
    handover: Handover
    since_s: float
    improving: bool = False
    """The newest sample was less than half the mean."""


class Handovers:
    """The mean of each pair's handovers, as long as there is reason to believe it.

    After half a minute without a sample a pair counts as unknown, so that a request tries it again: one, as ``asked``
    makes the old mean count for the others meanwhile. If that one took less than half the mean, the pair stays unknown
    until the mean has come down.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._seen: dict[tuple[str, str], _Seen] = {}

    def expected_s(self, measured: Measured, prefill: EngineView, decode: EngineView) -> float | None:
        """Seconds from prefill's answer to decode's first token; None if that is not known."""
        pair, told = (prefill.name, decode.name), measured.handover(prefill, decode)
        if told is None:
            return None
        seen = self._seen.get(pair)
        if seen is None or seen.handover != told:
            seen = self._seen[pair] = _Seen(told, self._now_s(), seen is not None and _improves(seen.handover, told))
        is_old = self._now_s() - seen.since_s >= _BELIEVED_S
        return None if is_old or seen.improving else told.mean_s

    def asked(self, prefill: EngineView, decode: EngineView) -> None:
        """A request is being split onto the pair: until more is known, what was known counts again."""
        pair = prefill.name, decode.name
        seen = self._seen.get(pair)
        if seen is not None and self._now_s() - seen.since_s >= _BELIEVED_S:
            self._seen[pair] = _Seen(seen.handover, self._now_s())


def _improves(old: Handover, new: Handover) -> bool:
    """Whether the newest sample, read off two means, was less than half of the mean."""
    newest_s = old.mean_s + (new.mean_s - old.mean_s) * min(new.samples, _SETTLED)
    return new.samples > old.samples and newest_s * 2 < new.mean_s
