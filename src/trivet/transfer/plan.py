"""What a scheduler side tells its workers in a step, and what they report back. Carried by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request of a prefill engine whose prompt goes on in this step."""

    transfer: str
    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    """New block ids for each cache group, behind those known; all of them where ``anew``."""
    anew: bool
    """The request starts, or starts again after it was preempted."""
    computed_tokens: int
    """Tokens of the prompt whose KV is there once this step is computed, those from the prefix cache included."""
    is_last: bool
    """The prompt ends with this step."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A request of a decode engine that now has blocks for KV that comes from prefill."""

    transfer: str
    request_id: str
    attempt: int
    """From 0: prefill may have to begin again."""
    data_paths: tuple[str, ...]
    """Where prefill's workers listen, by rank."""
    prefill_engine: str
    blocks: tuple[tuple[int, ...], ...]
    """Block ids for each cache group from the prompt's start; 0 where there is none."""
    wanted: tuple[tuple[tuple[int, int], ...], ...]
    """For each cache group the ranges of block indexes that must come."""


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """One step. Never changed after the scheduler side has made it: with one process it is not copied."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[str, ...] = ()
    """Transfers whose prefill lost its blocks: what is not sent yet will be computed again."""
    finished: tuple[str, ...] = ()
    """Transfers whose prefill is done; their blocks are kept until they are reported as sent."""
    dropped: tuple[str, ...] = ()
    """Transfers of a prefill engine that nobody wants any more; their blocks may be kept until then."""
    receives: tuple[Receive, ...] = ()
    given_up: tuple[tuple[str, int], ...] = ()
    """Request ids and attempts of a decode engine into whose blocks nothing more is to be written."""
    failed: tuple[str, ...] = ()
    """Request ids of a decode engine that must end with an error."""
    forget: tuple[str, ...] = ()
    """Request ids whose report has been read."""


@dataclass(slots=True)
class Report(KVConnectorWorkerMetadata):
    """What a decode engine's workers have of the requests that receive; repeated in each step until it is forgotten.

    There is one in each step while a request receives, if only an empty one: it makes vLLM ask the scheduler side.
    """

    landed: dict[str, int] = field(default_factory=dict)
    """By request id, the number of ranks where all KV is there."""
    stopped: dict[str, int] = field(default_factory=dict)
    """The same, where nothing is written any more and not all is there."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why, by request id."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Which attempt of each request this tells of."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both ranks' reports as one."""
        assert isinstance(other, Report)
        return Report(
            _sum(self.landed, other.landed),
            _sum(self.stopped, other.stopped),
            {**other.reasons, **self.reasons},
            {**other.attempts, **self.attempts},
        )


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
