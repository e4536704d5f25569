"""What happened to a request, and when: the facts behind the demo's table, ``/trivet/requests`` and the metrics.

A ``RequestRecord`` is opened when the first byte of a request reaches the gateway and is found again, by whatever
works on that request, through a context variable. One HTTP request makes one generation for each prompt and each
of its ``n`` choices; every generation is served split (two legs) or colocated (one).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any


def now_s() -> float:
    """Seconds on the clock that every stamp here is read from (monotonic)."""
    return time.perf_counter()


GAP_BOUNDS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds, in seconds, of the buckets in which ``Gaps`` counts: what lies between two tokens of one answer."""


class Gaps:
    """The times between the chunks of one answer, in buckets.

    Each chunk of each stream comes by here, so a chunk costs a look at the clock and one addition; metrics are given
    the buckets when the generation ends. Chunks of several tokens (speculative decoding, an engine that gathers them)
    are told apart: the time before such a chunk is not that between two tokens.
    """

    __slots__ = ("_last_s", "_tokens", "one", "one_s", "several", "several_s")

    def __init__(self) -> None:
        self.one: list[int] | None = None
        """Gaps before chunks of one token, by bucket; the last is of those above all bounds. None without any."""
        self.one_s = 0.0
        """Their sum in seconds."""
        self.several: list[int] | None = None
        self.several_s = 0.0
        self._tokens = 0
        self._last_s = 0.0

    def note(self, tokens: int) -> None:
        """Notes that an answer has so many tokens now; the first ones make no gap."""
        new = tokens - self._tokens
        if not new:
            return
        time_s = now_s()
        if self._tokens:
            gap_s = time_s - self._last_s
            if new == 1:
                if self.one is None:
                    self.one = [0] * (len(GAP_BOUNDS_S) + 1)
                self.one[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
                self.one_s += gap_s
            elif new > 1:  # fewer than before: an answer that nobody has seen was begun anew
                if self.several is None:
                    self.several = [0] * (len(GAP_BOUNDS_S) + 1)
                self.several[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
                self.several_s += gap_s
        self._tokens, self._last_s = tokens, time_s


@dataclass(slots=True)
class GenerationRecord:
    """One choice of one prompt: which engines served it, and when. Stamps are ``now_s()``, None if not reached."""

    generation_id: str
    prompt_tokens: int
    rendered_s: float
    intended_split: bool = False
    """Two engines were asked for it: one for the prompt, one for the answer."""
    split: bool = False
    """What came of that: False also where decode computed the prompt itself, as the KV did not come."""
    reason: str = ""
    """Why it was served split or colocated; a fallback names the fault."""
    split_reason: str = ""
    """The same as one of few words (``trivet.routing.policy.Reason``); empty if no engine was asked."""
    prefill_engine: str | None = None
    decode_engine: str | None = None
    prefill_start_s: float | None = None
    prefill_end_s: float | None = None
    first_token_s: float | None = None
    decode_start_s: float | None = None
    """The decode leg is asked, or the only one. With legs that start together it waits for its KV from then on."""
    decode_first_s: float | None = None
    """Decode's first piece behind a prefill leg; the answer's second token, where prefill made the first."""
    end_s: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the engine which computed the prompt found in its own prefix cache."""
    cache_known_by: str = ""
    """How it was known, when engines were chosen, what the one that computes the prompt had cached: ``events``, as it
    had told itself, or ``guess``; empty if no engine was asked."""
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    refused: bool = False
    """That error blames the request, in words that may quote it."""
    late: bool = False
    """That error is a deadline of the client's own: it would not wait for so long."""
    transfer_problem: str | None = None
    """Why decode computed the prompt itself: in the words of prefill's connector, or that decode's log says it."""
    cached_late: Mapping[str, int | None] | None = None
    """The cache counts, if they were known only after the first token."""
    attempts: int = 0
    """How often it was given to engines; more than once if legs failed."""
    resumes: int = 0
    """How often its answer broke off and was continued on another engine."""
    gaps: Gaps = field(default_factory=Gaps, repr=False, compare=False)
    """The times between the chunks of its answer."""

    def facts(self, arrived_s: float) -> dict[str, Any]:
        """The record as plain JSON values; durations in milliseconds."""
        return {
            "id": self.generation_id,
            "intended_split": self.intended_split,
            "split": self.split,
            "reason": self.reason,
            "split_reason": self.split_reason,
            "prefill_engine": self.prefill_engine,
            "decode_engine": self.decode_engine,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cache_known_by": self.cache_known_by,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "transfer_problem": self.transfer_problem,
            "attempts": self.attempts,
            "resumes": self.resumes,
            "render_ms": _ms(arrived_s, self.rendered_s),
            "prefill_ms": _ms(self.prefill_start_s, self.prefill_end_s),
            "handover_ms": _ms(self.prefill_end_s, self.decode_first_s),
            "ttft_ms": _ms(arrived_s, self.first_token_s),
            "decode_ms": _ms(self.first_token_s, self.end_s),
            "decode_leg_ms": _ms(self.decode_start_s, self.end_s),
        }


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request at the gateway."""

    request_id: str
    path: str
    arrived_s: float = field(default_factory=now_s)
    queued_s: float | None = None
    """Its body was there and it waits for its turn. Stamps are ``now_s()``, None if not reached."""
    admitted_s: float | None = None
    """It has its turn."""
    status: int | None = None
    colocate: str | None = None
    """Why the whole request must be served colocated, or None."""
    splits: bool = False
    """Whether it is split wherever it can be, whatever that costs."""
    deadline_s: float | None = None
    """When the client's time is up, on the clock of ``now_s``; None if it has all time."""
    deadline_is_own: bool = False
    """Whether the client said so itself, and not only the topology."""
    forwarded: Mapping[str, str] = field(default_factory=dict)
    """The client's headers that engines see."""
    may_steer: bool = False
    """Whether the topology lets this client say how KV is moved."""
    decode_rank: str | None = None
    """Which data-parallel rank the decode leg, or the only one, must go to, where the topology lets clients say."""
    generations: list[GenerationRecord] = field(default_factory=list)
    decided: Callable[[], Awaitable[None]] | None = field(default=None, repr=False)
    """Called when engines were chosen for one of its generations, before they are asked."""
    running: int = 0
    """Generations of it that are under way."""
    answered: bool = False
    """It has its answer, or its client has left."""
    told: bool = False
    """Who wants to know of requests that are over has been told."""
    trace: object = field(default=None, repr=False)
    """What its spans are made from, where any are made (``trivet.gateway.spans``)."""

    @property
    def served(self) -> str | None:
        """How its first generation is served, as of now, as the value of a header; None before engines were chosen.

        ``split; reason=long_prompt; prefill=prefill-0; decode=decode-0``
        """
        first = next((one for one in self.generations if one.split_reason), None)
        if first is None:
            return None
        reason = "recomputed" if first.intended_split and not first.split else first.split_reason
        engines = {"prefill": first.prefill_engine, "decode": first.decode_engine}
        named = "".join(f"; {role}={name}" for role, name in engines.items() if name is not None)
        return f"{'split' if first.split else 'colocated'}; reason={reason}{named}"

    def facts(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "request_id": self.request_id,
            "path": self.path,
            "status": self.status,
            "served": self.served,
            "queue_ms": _ms(self.queued_s, self.admitted_s),
            "generations": [one.facts(self.arrived_s) for one in self.generations],
        }


current_request: ContextVar[RequestRecord | None] = ContextVar("trivet_current_request", default=None)
"""The request that the running task works for."""


class Journal:
    """The newest requests, by id; the oldest is forgotten when ``capacity`` is reached."""

    def __init__(self, capacity: int = 1024) -> None:
        self._order: deque[RequestRecord] = deque()
        self._by_id: dict[str, RequestRecord] = {}
        self._capacity = capacity

    def open(self, request_id: str, path: str) -> RequestRecord:
        """Starts a record; a repeated id shows its newest request."""
        record = RequestRecord(request_id, path)
        self._order.append(record)
        self._by_id[request_id] = record
        if len(self._order) > self._capacity:
            oldest = self._order.popleft()
            if self._by_id.get(oldest.request_id) is oldest:
                del self._by_id[oldest.request_id]
        return record

    def rename(self, record: RequestRecord, request_id: str) -> None:
        """Gives a record the id that its client chose."""
        if self._by_id.get(record.request_id) is record:
            del self._by_id[record.request_id]
        record.request_id = request_id
        self._by_id[request_id] = record

    def find(self, request_id: str) -> RequestRecord | None:
        """The newest record under this id, or None."""
        return self._by_id.get(request_id)

    def newest(self, count: int) -> list[RequestRecord]:
        """So many of the newest records, the newest first."""
        return list(islice(reversed(self._order), count))


def _ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round((end_s - start_s) * 1e3, 2)
