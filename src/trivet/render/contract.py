"""What render hands over and what it wants back: token ids in, token ids out. Imports nothing of vLLM's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a prompt that is no text (an image, a video, a sound), and the tokens that stand for it."""

    name: str
    """A hash of what it is and of how it was processed. To an engine's caches, items of one name are the same."""
    offset: int
    """The first of its tokens, counted from the prompt's first."""
    length: int
    """Tokens: as many as the model makes embeddings of it."""


@dataclass(frozen=True, slots=True)
class Features:
    """What of a prompt is no text, ready to be sent."""

    items: Sequence[Item]
    """In their order in the prompt."""
    encoded: Sequence[bytes] = field(repr=False)
    """The parts of a JSON object, as ``features`` of ``/inference/v1/generate`` is one (``MultiModalFeatures`` in
    vLLM): hashes, places and tensors. Megabytes, and made once a request, however many legs it has."""


class EncodedIds(list[int]):
    """Token ids, and the JSON of them: of a long prompt it is made once for all legs, in pieces."""

    __slots__ = ("encoded",)

    def __init__(self, ids: Iterable[int], encoded: bytes) -> None:
        super().__init__(ids)
        self.encoded = encoded


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One generation, rendered and validated as vLLM's engine would have validated it.

    ``sampling`` is vLLM's ``SamplingParams`` as ``/inference/v1/generate`` takes it (JSON-safe, defaults left out),
    with ``n`` = 1 and without what belongs to text: stop strings are matched where the text is made. ``max_tokens`` is
    no more than the model's length leaves behind the prompt.
    """

    request_id: str
    """Unique in this service; never an id that the client chose."""
    token_ids: Sequence[int]
    """An item that is no text has its placeholders among them, as many as the model needs."""
    sampling: Mapping[str, Any]
    model: str
    """A served name, or that of a LoRA adapter."""
    features: Features | None = None
    """None for a prompt that is text only."""
    cache_salt: str | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, Any] | None = None
    prompt_logprobs: int | None = None
    """How many of the best are wanted at each prompt token (-1: the whole vocabulary), or None."""
    whole: bool = False
    """The client sees nothing before the end, so the answer may be begun anew as long as it has not ended."""
    session_id: str | None = None
    """The conversation that the client says it belongs to, for engines."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """The client's own, where the topology lets clients steer the transfer."""
    ec_transfer_params: Mapping[str, Any] | None = None
    unsplittable: str | None = None
    """Why this one must be served colocated, or None."""
    is_answered: Callable[[], bool] = field(default=lambda: False, compare=False, repr=False)
    """Whether the client has its whole answer though tokens may still come: a stop string has matched."""
    take: Callable[[Sequence[int]], None] | None = field(default=None, compare=False, repr=False)
    """Is given tokens that come with nothing else, as soon as they come, in place of a chunk."""


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
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """At every prompt token but the first; on the first chunk, where they were asked for."""

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing but that the engine is at work."""
        return not self.token_ids and self.finish_reason is None and self.prompt_logprobs is None


class ServingError(Exception):
    """A generation that could not be served. The client gets ``status`` and ``message`` in OpenAI's error form.

    ``error`` is the error object of the engine that refused it, where that is what the client should see, and
    ``content`` all that it answered, as JSON.
    """

    def __init__(
        self, message: str, *, status: int = 503, error: Mapping[str, Any] | None = None, content: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.error = error
        self.content = content


class DeadlinePassedError(ServingError):
    """The request's time was up before its answer was whole."""

    def __init__(self) -> None:
        super().__init__("the request's deadline has passed", status=504)


class TokenEngine(Protocol):
    """What stands where vLLM's engine core stood."""

    def run(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """Generates until a chunk with a ``finish_reason``. Cancelled when the client is gone or a stop string matched.

        Raises:
            ServingError: no engine could serve it.
        """
        ...
