"""What a simulated engine remembers of its requests, and its state as facts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_LONGEST_LIST = 32
LEGS = ("prefill", "decode", "release")


def leg_of(request_id: str | None) -> str:
    """The leg that an ``X-Request-Id`` names by its end; empty if none."""
    leg = (request_id or "").rpartition("-")[2]
    return leg if leg in LEGS else ""


@dataclass(slots=True)
class RequestRecord:
    """One request for an answer. Times are ``time.monotonic()``."""

    request_id: str
    """As the ``X-Request-Id`` header gives it."""
    leg: str
    path: str
    headers: Mapping[str, str]
    received_s: float
    body: Any = None
    """As JSON; long lists are told by their length."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    executed: bool = False
    """Whether its prompt was computed or loaded, so that a token came out."""
    split: str | None = None
    """``offered``: its KV was held for decode. ``pulled``: it was to get its KV from prefill."""
    fault: str | None = None
    """The kind of the fault that struck it."""
    first_token_s: float | None = None
    ended_s: float | None = None
    ended: str | None = None
    """``stop``, ``length``, ``abort``, ``error``, ``client gone``, ``refused`` or ``fault``."""
    status: int | None = None
    """HTTP status of the answer, if there was one."""

    @property
    def was_aborted(self) -> bool:
        """Whether it ended because nobody wanted it any more."""
        return self.ended in ("abort", "client gone")


@dataclass(frozen=True, slots=True)
class SimState:
    """A simulated engine at one moment."""

    name: str
    tier: str
    vllm_version: str
    generation: int
    now_s: float
    """``time.monotonic()``, as all times here."""
    running: int
    waiting: int
    fetching: int
    """Wait for their KV."""
    executions: Mapping[str, int]
    """Answers whose prompt was computed or loaded, by leg."""
    computed_prompt_tokens: Mapping[str, int]
    """Prompt tokens computed here, by leg."""
    preemptions: int
    pool: Mapping[str, int]
    connector: str | None
    """Whose hand-overs ``handovers`` counts."""
    handovers: Mapping[str, int]
    requests: tuple[RequestRecord, ...] = field(repr=False)
    """The newest, oldest first."""

    @property
    def aborts(self) -> list[RequestRecord]:
        """Requests that ended because nobody wanted them any more."""
        return [one for one in self.requests if one.was_aborted]

    def legs(self) -> list[str]:
        """Which legs came, in order."""
        return [one.leg for one in self.requests]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        facts = asdict(self)
        facts["aborts"] = [
            {
                "request_id": one.request_id,
                "leg": one.leg,
                "how": one.ended,
                "ended_s": one.ended_s,
                "age_s": self.now_s - (one.ended_s or self.now_s),
                "completion_tokens": one.completion_tokens,
            }
            for one in self.aborts
        ]
        return facts


class RequestLog:
    """The newest requests."""

    def __init__(self, keep: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=keep)

    def open(self, path: str, headers: Mapping[str, str]) -> RequestRecord:
        """Begins a record."""
        shown = {str(name): "..." if name.lower() == "authorization" else value for name, value in headers.items()}
        request_id = next((value for name, value in headers.items() if name.lower() == "x-request-id"), "")
        record = RequestRecord(request_id, leg_of(request_id), path, shown, time.monotonic())
        self._records.append(record)
        return record

    def all(self) -> tuple[RequestRecord, ...]:
        """All that are remembered."""
        return tuple(self._records)

    def clear(self) -> None:
        """Forgets all."""
        self._records.clear()


def shortened(value: Any) -> Any:
    """A body as it is remembered: token lists are told by their length."""
    if isinstance(value, dict):
        return {name: f"{len(one)} ids" if _is_ids(name, one) else shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return f"{len(value)} items" if len(value) > _LONGEST_LIST else [shortened(one) for one in value]
    return value


def _is_ids(name: Any, value: Any) -> bool:
    return name in ("token_ids", "prompt") and isinstance(value, list) and all(type(one) is int for one in value)
