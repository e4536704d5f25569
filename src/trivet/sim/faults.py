"""Faults on demand: which requests they strike, what they do, and how often."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from trivet.errors import TrivetError
from trivet.sim.record import LEGS

Kind = Literal[
    "refuse",
    "mute",
    "status",
    "hang",
    "stall",
    "die",
    "exit",
    "slow",
    "garbage",
    "disconnect",
    "finish",
    "close_idle",
    "withhold",
    "lose",
    "corrupt",
    "waver",
    "uncounted",
    "dull",
]
KINDS: tuple[str, ...] = get_args(Kind)
AT_ONCE = ("refuse", "mute")
"""Those that strike no request."""
GARBAGE = ("json", "truncated", "between")
FINISHES = ("error", "abort")
GENERATION_PATHS = (
    "/inference/v1/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It strikes requests that fit all selectors, until its uses are spent."""

    kind: Kind
    """
    - ``refuse``: at once, for ``for_s``: the listening socket and idle connections are closed
    - ``mute``: at once, for ``for_s``: KV events are not sent, only kept for who asks for what it missed
    - ``status``: answers ``status`` with ``body``
    - ``hang``: takes the request and answers nothing for ``for_s``, then goes on (None: never)
    - ``stall``: the answer stops after ``after_tokens`` for ``for_s`` (None: for ever); the request keeps running
    - ``die``: the connection is cut after ``after_tokens``
    - ``exit``: the whole engine dies after ``after_tokens``
    - ``slow``: steps with this request take ``factor`` times as long
    - ``garbage``: after ``after_tokens`` something that is not an event (see ``garbage``)
    - ``disconnect``: the connection is closed before any byte
    - ``finish``: the answer ends after ``after_tokens`` with ``reason``
    - ``close_idle``: the answer is whole; then the connection, said to be kept, is closed
    - ``withhold``: a prefill leg is computed and answered, and hands nothing over
    - ``lose``: the KV of a decode leg does not come. With TrivetConnector of either leg: the two lose each other when
      prefill begins, or, with ``after_tokens`` 1, between its token and the last piece of KV
    - ``corrupt``: KV that was handed over to this request is wrong, so that another answer follows from it
    - ``waver``: behind KV that was handed over, the first token made here is not the likeliest but the ``rank``-th
    - ``uncounted``: KV that was handed over to this request is missing in the engine's metrics
    - ``dull``: the answer is the same whatever the prompt, as a model's with dummy weights
    """

    leg: str | None = None
    """``prefill``, ``decode``, ``release``, or ``""`` for requests without one; None: any."""
    path: str | None = None
    """A path, or ``*`` for all; None: those that generate."""
    reused: bool | None = None
    """Only requests on a connection that has (not) served one before."""
    nth: int = 1
    """Strikes the nth request that fits, and those behind it."""
    probability: float = 1.0
    seed: int | None = None
    """Of the probability."""
    uses: int | None = 1
    """How many requests it strikes; None: all."""

    status: int = 500
    body: str | None = None
    """None: vLLM's error form. Anything else is sent as it is."""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    for_s: float | None = None
    after_tokens: int = 0
    factor: float = 10.0
    garbage: str = "json"
    """``json``: an event that is not JSON. ``truncated``: half an event, then the end of the answer.
    ``between``: lines that mean nothing, then the answer goes on."""
    reason: str = "error"
    """``error`` or ``abort``."""
    exit_status: int = 1
    rank: int = 2
    """Of ``waver``; the likeliest token has rank 1."""

    def __post_init__(self) -> None:
        self._check("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}")
        self._check("garbage", self.garbage in GARBAGE, f"one of {', '.join(GARBAGE)}")
        self._check("reason", self.reason in FINISHES, f"one of {', '.join(FINISHES)}")
        self._check("probability", _is_number(self.probability) and 0 <= self.probability <= 1, "from 0 to 1")
        self._check("nth", _is_whole(self.nth) and self.nth >= 1, "1 or more")
        self._check("uses", self.uses is None or (_is_whole(self.uses) and self.uses >= 1), "1 or more, or null")
        self._check("after_tokens", _is_whole(self.after_tokens) and self.after_tokens >= 0, "0 or more")
        self._check("status", _is_whole(self.status) and 200 <= self.status <= 599, "an HTTP status")
        self._check("rank", _is_whole(self.rank) and self.rank >= 2, "2 or more")
        self._check("factor", _is_number(self.factor) and self.factor > 0, "above 0")
        self._check("for_s", self.for_s is None or (_is_number(self.for_s) and self.for_s >= 0), "seconds, or null")
        self._check(
            "leg", self.leg in (None, "", *LEGS), f"one of {', '.join(LEGS)}, empty for requests without, or null"
        )
        self._check("path", self.path is None or isinstance(self.path, str), "a path, * or null")
        self._check("reused", self.reused is None or isinstance(self.reused, bool), "true, false or null")
        self._check("body", self.body is None or isinstance(self.body, str), "text, or null")
        self._check("headers", isinstance(self.headers, Mapping), "an object")
        if self.kind in AT_ONCE:
            self._check("for_s", self.for_s is not None, "how long it lasts, in seconds")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise TrivetError(f"fault: {name} is {getattr(self, name)!r}", mend=f"it must be {wanted}")

    @classmethod
    def parse(cls, value: object) -> Fault:
        """From JSON.

        Raises:
            TrivetError: it is not one.
        """
        if not isinstance(value, Mapping) or "kind" not in value:
            raise TrivetError("a fault is an object with a kind", mend=f"kinds: {', '.join(KINDS)}")
        known = {one.name for one in fields(cls)}
        if strange := sorted(str(name) for name in value if name not in known):
            raise TrivetError(f"fault: no such field {strange[0]!r}", mend=f"there are: {', '.join(sorted(known))}")
        return cls(**value)

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(slots=True)
class ActiveFault:
    """A fault that was added, with what it has done."""

    number: int
    fault: Fault
    fitted: int = 0
    """Requests that its selectors fitted."""
    used: int = 0
    """Requests that it struck."""
    chance: random.Random = field(default_factory=random.Random)

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"id": self.number, "fitted": self.fitted, "used": self.used, **self.fault.facts()}


class Faults:
    """The faults of one engine; the first one that fits a request strikes it."""

    def __init__(
        self, refuse: Callable[[float], None] = lambda _: None, mute: Callable[[float], None] = lambda _: None
    ) -> None:
        """
        Args:
            refuse: closes the listening socket for so many seconds.
            mute: sends no KV events for so many seconds.
        """
        self._at_once = {"refuse": refuse, "mute": mute}
        self._numbers = itertools.count(1)
        self._active: dict[int, ActiveFault] = {}

    def add(self, fault: Fault) -> int:
        """Adds a fault; the number by which it can be removed."""
        number = next(self._numbers)
        active = ActiveFault(number, fault, chance=random.Random(fault.seed))
        self._active[number] = active
        if fault.kind in AT_ONCE:
            active.used = 1
            self._at_once[fault.kind](fault.for_s or 0.0)
        return number

    def remove(self, number: int) -> bool:
        """Removes one; whether it was there."""
        return self._active.pop(number, None) is not None

    def clear(self) -> None:
        """Removes all."""
        self._active.clear()

    def all(self) -> list[ActiveFault]:
        """Those that were added, with what they have done."""
        return list(self._active.values())

    def strike(self, *, path: str, leg: str, reused: bool) -> Fault | None:
        """The fault for a request that has just come, if there is one."""
        for active in self._active.values():
            fault = active.fault
            if fault.kind in AT_ONCE or not _fits(fault, path, leg, reused):
                continue
            active.fitted += 1
            if active.fitted < fault.nth or (fault.uses is not None and active.used >= fault.uses):
                continue
            if fault.probability < 1 and active.chance.random() >= fault.probability:
                continue
            active.used += 1
            return fault
        return None


def _fits(fault: Fault, path: str, leg: str, reused: bool) -> bool:
    if fault.path is None:
        if path not in GENERATION_PATHS:
            return False
    elif fault.path not in ("*", path):
        return False
    return fault.leg in (None, leg) and fault.reused in (None, reused)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
