"""The choice of engines for one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trivet.routing.engines import Engines, EngineView
from trivet.routing.handovers import Handovers
from trivet.routing.held import Held
from trivet.routing.policy import ALWAYS, Policy, Reason, Ways
from trivet.routing.prefixes import NOTHING, Known, Prefix, PrefixTable
from trivet.routing.proofs import Proof

_CACHED_AT_DECODE = 0.125
"""What a token that decode has cached is worth beside one that waits there: it need not be moved.

Moving an 8,000-token prompt takes a fifth of the time of computing it with NixlConnector (48 of 213 ms on H200), and
nearly none with TrivetConnector, which moves while prefill computes. So it only decides between engines about as busy.
"""

_TOLD = 4
"""Bad pairs that are named; the others are counted."""


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

    Of equals the one is taken whose turn was longest ago. Pairs that are known to be bad are left out, and those that
    are not proven yet while there are others (``Proof``). Colocated requests go to a mixed engine, else to a decode
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
        if prefill is None or decode is None:
            colocate, because = _what_is_missing(engines, prefill), Reason.NO_PAIR
        elif (pair := scale.proven(prefill, decode)) is not None:
            return scale.split_or_not(*pair)
        else:
            colocate, because = f"no pair passes its canary: {told_of_bad(engines)}", Reason.PAIR_BAD
    alone = scale.alone()
    return None if alone is None else Route(alone, None, colocate, because, scale.cached(alone))


def another_decode(engines: Engines, holder: EngineView, avoid: frozenset[str]) -> EngineView | None:
    """The decode engine that KV is offered to which ``holder`` has, when the one it was for does not take it."""
    scale = _Scale(engines, avoid, None, None)
    if scale.lightest("prefill") is None:
        return None
    takers = [one for one in scale.by_cost("decode") if not engines.proof(holder, one).is_bad]
    return min(takers, key=lambda one: not engines.proof(holder, one).serves, default=None)


def bad_pairs(engines: Engines) -> list[tuple[EngineView, EngineView, Proof]]:
    """Pairs of engines that are ready and get no request, as they are known to be bad."""
    if not engines.guarded:
        return []
    pairs = [(one, other) for one in engines.ready("prefill") for other in engines.ready("decode")]
    judged = [(*pair, engines.proof(*pair)) for pair in pairs]
    return [one for one in judged if one[2].is_bad]


def told_of_bad(engines: Engines) -> str:
    """The bad pairs in words for a person, each with the cause; empty if there is none."""
    told = [f"{prefill.name} -> {decode.name} ({proof.word})" for prefill, decode, proof in bad_pairs(engines)]
    return ", ".join([*told[:_TOLD], f"and {len(told) - _TOLD} more"] if len(told) > _TOLD else told)


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
        return min(self._candidates(tier), key=self._cost(worth), default=None)

    def by_cost(self, tier: str, worth: float = 1.0) -> list[EngineView]:
        """Those of a tier, the one with the least to do first."""
        return sorted(self._candidates(tier), key=self._cost(worth))

    def proven(self, prefill: EngineView, decode: EngineView) -> tuple[EngineView, EngineView] | None:
        """These two, the lightest; where their pair does not serve, the lightest that does; None if all are bad.

        Prefill is chosen first, as its queue and its cache weigh more.
        """
        if self._engines.proof(prefill, decode).serves:
            return prefill, decode
        unproven: tuple[EngineView, EngineView] | None = None
        decodes = self.by_cost("decode", _CACHED_AT_DECODE)
        for one in self.by_cost("prefill"):
            for other in decodes:
                proof = self._engines.proof(one, other)
                if proof.serves:
                    return one, other
                if unproven is None and not proof.is_bad:
                    unproven = one, other
        return unproven

    def _candidates(self, tier: str) -> list[EngineView]:
        return [view for view in self._engines.ready(tier) if view.name not in self._avoid]

    def _cost(self, worth: float) -> Callable[[EngineView], tuple[float, int, str]]:
        def cost(view: EngineView) -> tuple[float, int, str]:
            """The prompt's own tokens are the same for all; of equals, the one whose turn was longest ago."""
            work = self.outstanding_tokens(view) - worth * self.cached(view).tokens
            return work, self._engines.last_turn(view.name), view.name

        return cost

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
