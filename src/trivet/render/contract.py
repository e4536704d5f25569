"""What render hands over and what it wants back: token ids in, token ids out. Imports nothing of vLLM's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One generation, rendered and validated as vLLM's engine would have validated it.

    ``sampling`` is vLLM's ``SamplingParams`` as ``/inference/v1/generate`` takes it (JSON-safe, defaults left out),
    with ``n`` = 1 and without what belongs to text: stop strings are matched where the text is made.
    """

    request_id: str
    """Unique in this service; never an id that the client chose."""
    token_ids: Sequence[int]
    sampling: Mapping[str, Any]
    model: str
    """A served name, or that of a LoRA adapter."""
    cache_salt: str | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """What an engine must see of the client's headers (trace context, data-parallel rank, session)."""
    unsplittable: str | None = None
    """Why this one must be served colocated, or None."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, in the engine's order: the sampled token first, then by rank."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampled_rank: int


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some newly generated tokens of one generation; the last one carries ``finish_reason``."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in a prefix cache; on the first chunk, or on the last where it is known no earlier."""
    created_cache_tokens: int | None = None
    """Prompt tokens that were added to a prefix cache; beside ``cached_tokens``."""


class ServingError(Exception):
    """A generation that could not be served. The client gets ``status`` and ``message`` in OpenAI's error form."""

    def __init__(self, message: str, *, status: int = 503) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class TokenEngine(Protocol):
    """What stands where vLLM's engine core stood."""

    def run(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """Generates until a chunk with a ``finish_reason``. Cancelled when the client is gone or a stop string matched.

        Raises:
            ServingError: no engine could serve it.
        """
        ...
