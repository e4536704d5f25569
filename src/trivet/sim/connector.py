"""What every simulated connector does, and the engine without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from trivet.sim.scheduler import End, SimSequence


class Source(Protocol):
    """Where a decode request's KV comes from."""

    @property
    def prefill_cached_tokens(self) -> int | None:
        """Prompt tokens that prefill found in its prefix cache; None if it was not told."""
        ...


class PullError(Exception):
    """KV did not come."""


@dataclass(slots=True)
class HandoverCounts:
    """Hand-overs of one engine since its start."""

    offered: int = 0
    """Blocks held for decode."""
    taken: int = 0
    """Decode has the KV."""
    released: int = 0
    """Freed because decode said that it will not come, or by a leg that is there for that only."""
    expired: int = 0
    """Freed because nobody came within the lease."""
    lost: int = 0
    """Freed because the connection to decode was lost."""
    mismatched: int = 0
    """Decode came with another prompt than prefill computed; with NixlConnector that ends the engine, or the answer is
    nonsense."""
    refused: int = 0
    """Decode came for what is not held (any more)."""
    pulled: int = 0
    """As decode: KV that came."""
    failed: int = 0
    """As decode: KV that did not."""


class Connector:
    """An engine without a connector: ``kv_transfer_params`` mean nothing. The real ones replace what differs."""

    name: ClassVar[str | None] = None
    opens_at_once: ClassVar[bool] = False
    """Whether a decode request speaks to prefill as soon as it comes, and is given blocks only when it asks for them;
    else it is given blocks first."""

    def __init__(self) -> None:
        self.counts = HandoverCounts()

    @property
    def open(self) -> int:
        """Prompts whose blocks are held for decode."""
        return 0

    @property
    def address(self) -> str | None:
        """Where it listens for its peers, if it has an address of its own."""
        return None

    # with the engine

    async def listen(self) -> None:
        """Begins to listen; once more after ``stop_listening``.

        Raises:
            TrivetError: it cannot.
        """

    def stop_listening(self) -> None:
        """Takes no more peers; those that are there stay."""

    def cut(self) -> None:
        """Ends as a process does: nothing listens, and every connection is cut."""

    async def close(self) -> None:
        """Gives up what is held and under way."""

    # with a request

    def source(self, params: Mapping[str, Any]) -> Source | None:  # noqa: ARG002
        """Where the KV of a request with these ``kv_transfer_params`` comes from; None if from nowhere."""
        return None

    def declines(self, source: Source) -> bool:  # noqa: ARG002
        """Tells prefill that a prompt will be computed here; False if that cannot be."""
        return False

    def refused(self, params: Mapping[str, Any]) -> None:
        """A chat or a completion with these parameters was refused."""

    def arrived(self, sequence: SimSequence, params: Mapping[str, Any]) -> None:
        """A sequence is about to be queued."""

    # with the scheduler

    def scheduled(self, sequence: SimSequence) -> None:
        """The first chunk of a prompt that will be handed over is about to be computed."""

    def preempted(self, sequence: SimSequence) -> None:
        """A sequence that was scheduled has lost its blocks."""

    def ended(self, sequence: SimSequence, end: End) -> None:
        """A sequence has ended; its blocks are given back after this."""

    async def pull(self, sequence: SimSequence) -> None:  # noqa: ARG002
        """Gets the KV of a sequence with a source.

        Raises:
            PullError: it did not come.
        """
        raise PullError

    def recomputes(self, sequence: SimSequence) -> bool:  # noqa: ARG002
        """Whether a sequence whose KV did not come computes its prompt itself; else it ends with an error."""
        return False
