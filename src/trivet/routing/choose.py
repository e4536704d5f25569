"""The choice of engines for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trivet.routing.engines import Engines, EngineView


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. ``prefill`` is None when it is served colocated by ``decode`` alone."""

    decode: EngineView
    prefill: EngineView | None
    reason: str


def choose(engines: Engines, *, colocate: str | None, avoid: frozenset[str] = frozenset()) -> Route | None:
    """Picks the pair with the fewest outstanding tokens; None when nothing can serve.

    Colocated requests go to a mixed engine, else to a decode engine (which then computes the prompt itself) where the
    connector lets one do that.

    Args:
        colocate: why the request must be served colocated; None splits it if a pair is ready.
        avoid: engines that have just failed this request.
    """
    prefill = _least_loaded(engines, engines.ready("prefill"), avoid)
    decode = _least_loaded(engines, engines.ready("decode"), avoid)
    mixed = _least_loaded(engines, engines.ready("mixed"), avoid)
    if colocate is None:
        if prefill is not None and decode is not None:
            return Route(decode, prefill, "a pair is ready")
        colocate = "no prefill engine is ready" if prefill is None else "no decode engine is ready"
        if not any(view.tier == "prefill" for view in engines.all()):
            colocate = "the topology has no prefill tier"
    alone = mixed or (decode if engines.decode_serves_whole else None)
    return Route(alone, None, colocate) if alone is not None else None


def _least_loaded(engines: Engines, views: Sequence[EngineView], avoid: frozenset[str]) -> EngineView | None:
    candidates = [view for view in views if view.name not in avoid]
    return min(candidates, key=lambda view: _load(engines, view), default=None)


def _load(engines: Engines, view: EngineView) -> tuple[int, int, str]:
    """Fewest tokens first; of equals, the one whose turn was longest ago."""
    return engines.outstanding_tokens(view.name), engines.last_turn(view.name), view.name
