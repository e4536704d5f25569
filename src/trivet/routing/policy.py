"""Split or not: what each way would cost a request, and the reason of the decision.

What splitting pays is that a long prompt does not stall answers that stream already. What it costs is the handover, and
a second admission. So a request is not split where there is little to compute, or where the handover has been measured
to be slow. All costs are in tokens of prefill, the one unit that is known before a request runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Mode = Literal["auto", "always", "never"]


class Reason(StrEnum):
    """Why a generation was split or served colocated: a label of metrics, so the set is bounded."""

    PAIR_READY = "pair_ready"
    """Split, as ``always`` says, or the request (``X-Trivet-Serve: split``)."""
    LONG_PROMPT = "long_prompt"
    """Split: there is much to compute."""
    COLOCATED_BUSY = "colocated_busy"
    """Split, though there is little to compute: the mixed engine has more to do than a whole pair."""
    SHORT_PROMPT = "short_prompt"
    """Colocated: the prompt is short."""
    PREFIX_CACHED = "prefix_cached"
    """Colocated: most of the prompt is in that engine's prefix cache."""
    SLOW_HANDOVER = "slow_handover"
    """Colocated: handovers of that pair have been measured to take too long."""
    PREFILL_BUSY = "prefill_busy"
    """Colocated: prefill would begin much later than the mixed engine."""
    NEVER = "never"
    """Colocated, as the topology says."""
    REQUESTED = "requested"
    """Colocated, as the request says."""
    UNSPLITTABLE = "unsplittable"
    """Colocated: something that the request wants cannot be split."""
    NO_PAIR = "no_pair"
    """Colocated: no prefill engine is ready, or no decode engine, or the topology has none."""
    PAIR_BAD = "pair_bad"
    """Colocated: engines are ready, and no pair of them passes its canary."""
    ONE_TOKEN = "one_token"
    """Prefill alone: its token is the whole answer."""
    RETRY = "retry"
    """Split or colocated after an attempt that failed."""


@dataclass(frozen=True, slots=True)
class Ways:
    """The two ways of serving one request, as far as they are known."""

    prompt_tokens: int
    uncached_tokens: int
    """To be computed by the engine that would serve it colocated."""
    mixed: bool
    """That engine is a mixed one. A decode engine has other answers to make, which each prompt there stalls."""
    colocated_outstanding_tokens: int
    """Of legs that run there."""
    prefill_uncached_tokens: int
    """To be computed by the prefill engine of the pair."""
    prefill_outstanding_tokens: int
    decode_outstanding_tokens: int
    handover_s: float | None
    """From prefill's answer to decode's first token, as the pair has taken lately; None if that is not known."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When a request that could be split is split. ``gateway.split`` of the topology."""

    mode: Mode = "always"
    min_uncached_tokens: int = 256
    """Fewer are computed colocated."""
    max_handover_s: float = 1.0
    """Pairs that take longer are not used while there is another way."""

    def decide(self, ways: Ways) -> tuple[bool, Reason, str]:
        """Whether to split, the label, and the reason in words. Called where both ways are open."""
        if self.mode == "always":
            return True, Reason.PAIR_READY, "a pair is ready"
        if self.mode == "never":
            return False, Reason.NEVER, "gateway.split is never"
        uncached, least = ways.uncached_tokens, self.min_uncached_tokens
        slow = ways.handover_s is not None and ways.handover_s > self.max_handover_s
        if uncached < least:
            pair_tokens = ways.prefill_outstanding_tokens + ways.decode_outstanding_tokens
            more_tokens = ways.colocated_outstanding_tokens - pair_tokens
            if ways.mixed and not slow and more_tokens > max(ways.prompt_tokens, least):
                return True, Reason.COLOCATED_BUSY, "the mixed engine has more to do than the pair"
            if ways.prompt_tokens < least:
                return False, Reason.SHORT_PROMPT, f"{ways.prompt_tokens} tokens, fewer than {least}, are not split"
            told = f"{uncached} tokens are not cached; fewer than {least} are not split"
            return False, Reason.PREFIX_CACHED, told
        if slow:
            took = f"handovers of this pair take {ways.handover_s:.2f} s, more than {self.max_handover_s:g} s"
            return False, Reason.SLOW_HANDOVER, took
        # Outstanding tokens of a mixed engine include answers, which delay a prompt little: this errs for splitting.
        before_decode = ways.prefill_outstanding_tokens + ways.prefill_uncached_tokens
        if ways.mixed and before_decode > 2 * (ways.colocated_outstanding_tokens + uncached):
            return False, Reason.PREFILL_BUSY, "prefill has more than twice as much to do as the mixed engine"
        return True, Reason.LONG_PROMPT, f"{uncached} tokens are not cached; {least} or more are split"


ALWAYS = Policy("always")
