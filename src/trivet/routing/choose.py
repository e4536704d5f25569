"""The choice of engines for one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from trivet.routing.engines import Engines, EngineView
from trivet.routing.handovers import Handovers
from trivet.routing.held import Held
from trivet.routing.policy import ALWAYS, Policy, Reason, Ways
from trivet.routing.prefixes import NOTHING, Known, Prefix, PrefixTable

_CACHED_AT_DECODE = 0.125
"""What a token that decode has cached is worth beside one that waits there: it need not be moved.

Moving an 8,000-token prompt takes a fifth of the time of computing it with NixlConnector (48 of 213 ms on H200), and
nearly none with TrivetConnector, which moves while prefill computes. So it only decides between engines about as busy.
"""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. ``prefill`` is None when it is served colocated by ``decode`` alone."""

    decode: EngineView
    prefill: EngineView | None
    reason: str
    """In words, for the request's record."""
    label: Reason = Reason.PAIR_READY
    """The same for metrics."""
    cached: Known = NOTHING
    """What the engine that computes the prompt is thought to have of it already."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What routes are chosen by beside the load of engines."""

    policy: Policy = ALWAYS
    prefixes: PrefixTable = field(default_factory=PrefixTable)
    handovers: Handovers = field(default_factory=Handovers)
    held: Held | None = None
    """What engines tell of their caches; None where none is asked to."""

    def known(self, prompt: Prefix, engine: EngineView) -> Known:
        """How much of a prompt an engine has cached: what it tells, else what it was sent lets guess."""
        told = self.held.told(prompt, engine) if self.held is not None else None
        if told is not None and told.whole:
            return told.known
        guessed = self.prefixes.known(prompt, engine)
        # what it had before anyone listened is guessed; what it tells, it has
        return told.known if told is not None and told.known.tokens >= guessed.tokens else guessed


def choose(
    engines: Engines,
    *,
    colocate: str | None,
    avoid: frozenset[str] = frozenset(),
    prompt: Prefix | None = None,
    knowledge: Knowledge | None = None,
    because: Reason = Reason.UNSPLITTABLE,
) -> Route | None:
    """Picks the engines with the least to do before they would be done with this prompt; None when nothing can serve.

    - prefill, and whoever serves colocated: outstanding tokens, and the prompt's that are not cached there. So a prompt
      goes to where its beginning is cached, unless that engine has more to do than the others by more than what the
      cache saves;
    - decode: outstanding tokens, less a part of those that are cached there and need not be moved.

    Of equals the one is taken whose turn was longest ago. Colocated requests go to a mixed engine, else to a decode
    engine (which then computes the prompt itself) where the connector lets one do that.

    Args:
        colocate: why the request must be served colocated; None leaves it to the policy, if a pair is ready.
        avoid: engines that have just failed this request.
        prompt: what is asked; None chooses by load alone, and splits.
        knowledge: caches, handovers and the policy; None as for ``prompt``.
        because: the label of ``colocate``.
    """
    scale = _Scale(engines, avoid, prompt, knowledge)
    if colocate is None:
        prefill, decode = scale.lightest("prefill"), scale.lightest("decode", _CACHED_AT_DECODE)
        if prefill is not None and decode is not None:
            return scale.split_or_not(prefill, decode)
        colocate, because = _what_is_missing(engines, prefill), Reason.NO_PAIR
    alone = scale.alone()
    return None if alone is None else Route(alone, None, colocate, because, scale.cached(alone))


class _Scale:
    """Weighs the engines for one prompt."""

    def __init__(
        self, engines: Engines, avoid: frozenset[str], prompt: Prefix | None, knowledge: Knowledge | None
    ) -> None:
        self._engines = engines
        self._avoid = avoid
        self._prompt = prompt or Prefix()
        self._knowledge = knowledge if prompt is not None else None
        self._cached: dict[str, Known] = {}

    def cached(self, view: EngineView) -> Known:
        """What an engine is thought to have of the prompt."""
        if self._knowledge is None:
            return NOTHING
        if view.name not in self._cached:
            self._cached[view.name] = self._knowledge.known(self._prompt, view)
        return self._cached[view.name]

    def outstanding_tokens(self, view: EngineView) -> int:
        """Of legs that run on an engine."""
        return self._engines.outstanding_tokens(view.name)

    def uncached_tokens(self, view: EngineView) -> int:
        """Of the prompt, to be computed if the engine computes it."""
        return self._prompt.prompt_tokens - self.cached(view).tokens

    def lightest(self, tier: str, worth: float = 1.0) -> EngineView | None:
        """The engine of a tier with the least to do, where a cached token is worth so many outstanding ones."""

        def cost(view: EngineView) -> tuple[float, int, str]:
            """The prompt's own tokens are the same for all; of equals, the one whose turn was longest ago."""
            work = self.outstanding_tokens(view) - worth * self.cached(view).tokens
            return work, self._engines.last_turn(view.name), view.name

        candidates = [view for view in self._engines.ready(tier) if view.name not in self._avoid]
        return min(candidates, key=cost, default=None)

    def alone(self) -> EngineView | None:
        """The engine that would serve the prompt colocated."""
        return self.lightest("mixed") or (self.lightest("decode") if self._engines.decode_serves_whole else None)

    def split_or_not(self, prefill: EngineView, decode: EngineView) -> Route:
        """Has the policy decide, where there is something to decide."""
        policy = self._knowledge.policy if self._knowledge is not None else ALWAYS
        alone = self.alone() if policy.mode != "always" else None
        if self._knowledge is None or alone is None:
            return Route(decode, prefill, "a pair is ready", Reason.PAIR_READY, self.cached(prefill))
        ways = Ways(
            prompt_tokens=self._prompt.prompt_tokens,
            uncached_tokens=self.uncached_tokens(alone),
            mixed=alone.tier == "mixed",
            colocated_outstanding_tokens=self.outstanding_tokens(alone),
            prefill_uncached_tokens=self.uncached_tokens(prefill),
            prefill_outstanding_tokens=self.outstanding_tokens(prefill),
            decode_outstanding_tokens=self.outstanding_tokens(decode),
            handover_s=self._knowledge.handovers.expected_s(self._engines.board, prefill, decode),
        )
        split, label, reason = policy.decide(ways)
        if split:
            return Route(decode, prefill, reason, label, self.cached(prefill))
        return Route(alone, None, reason, label, self.cached(alone))


def _what_is_missing(engines: Engines, prefill: EngineView | None) -> str:
    if not any(view.tier == "prefill" for view in engines.all()):
        return "the topology has no prefill tier"
    return "no prefill engine is ready" if prefill is None else "no decode engine is ready"
