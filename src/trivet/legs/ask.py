"""What the life of a generation knows of the form in which a data plane sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import aiohttp

from trivet.journal import GenerationRecord
from trivet.routing.engines import EngineView
from trivet.routing.prefixes import Prefix

Piece = TypeVar("Piece")
"""A part of an answer as it goes towards the client."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One request to one engine."""

    role: str
    """``prefill``, ``decode`` or ``release``."""
    engine: EngineView
    request_id: str
    """Unique in this service; the engine is sent it as ``X-Request-Id``."""
    session: aiohttp.ClientSession = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prefilled(Generic[Piece]):
    """What a prefill leg answered."""

    kv_transfer_params: Mapping[str, Any] | None
    cached_tokens: int | None
    """Prompt tokens that it found in its prefix cache; None if it does not tell."""
    first: Piece | None = None
    """The first token, where it was sampled to be used."""
    finished: bool = False
    """That token is also the last one."""
    prompt: Any = None
    """What was prefilled, as the ask knows it; a release must name the same, whatever has been sent since."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Which engine computed the prompt that a decode leg is handed, and how much of it from its prefix cache."""

    engine: EngineView
    cached_tokens: int | None


class Beside:
    """What a decode leg knows of the prefill leg that runs beside it.

    Nothing of its answer is given out before prefill has answered: not before the first token, if that is prefill's,
    and not before it is known who computed the prompt.
    """

    def __init__(self, prompt: Any, *, first_token: bool) -> None:
        """
        Args:
            prompt: what both legs are asked with, as the ask knows it; see ``Ask.prompt``.
            first_token: prefill's token is the answer's first, decode's answer begins with the second.
        """
        self.prompt = prompt
        self.first_token = first_token
        self._computed: Computed | None = None
        self._answered = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self.recomputed = False
        """Decode's count of cached tokens says that it computed the prompt itself, whatever prefill has answered."""

    def answer(self, computed: Computed | None) -> None:
        """Prefill has answered; ``computed`` is None where decode computes the prompt itself."""
        self._computed = computed
        self._answered.set()
        for listener in self._listeners:
            listener()

    @property
    def is_answered(self) -> bool:
        """Whether prefill has answered."""
        return self._answered.is_set()

    def when_answered(self, listener: Callable[[], None]) -> None:
        """Has prefill's answer told."""
        self._listeners.append(listener)

    def found(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        """What decode says of itself: vLLM counts KV that was handed over as cached.

        The last token is always computed, and told as cached or not; where all before it is cached nothing is lost.

        Args:
            cached_tokens: None if it does not tell.
        """
        self.recomputed = cached_tokens is not None and cached_tokens < prompt_tokens - 1

    async def computed(self) -> Computed | None:
        """What ``answer`` was told, as soon as it is."""
        await self._answered.wait()
        return self._computed


class Ask(Protocol[Piece]):
    """One generation, as one data plane asks engines for it.

    It remembers what it has given out: a leg that is made later continues behind that.
    """

    @property
    def request_id(self) -> str:
        """Unique in this service."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What legs carry besides Trivet's own headers."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens that a prefill leg computes; an estimate where there are no token ids."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of prompt and longest answer together."""
        ...

    @property
    def unsplittable(self) -> str | None:
        """Why it must be served colocated, or None."""
        ...

    @property
    def may_take_first_token(self) -> bool:
        """Whether prefill's token may be the answer's first."""
        ...

    @property
    def wants_one_token(self) -> bool:
        """Whether that token is the whole answer."""
        ...

    @property
    def prompt(self) -> Any:
        """What a leg that starts now is asked with: the client's prompt, and behind it what was given out."""
        ...

    @property
    def prefix(self) -> Prefix:
        """What a leg that starts now is asked with, as prefix caches are searched for it.

        Empty where caches say nothing of it: they are not to be read for it, or it cannot be told what would be found.
        """
        ...

    @property
    def unsaid_end(self) -> Piece | None:
        """The end of an answer that broke off when all its tokens were there; None if there is more to be asked for."""
        ...

    @property
    def answered(self) -> bool:
        """Whether the client has its whole answer though more may come: what ends the generation then is no abort."""
        ...

    @property
    def begun(self) -> bool:
        """Whether something of the answer was given out."""
        ...

    @property
    def obstacle(self) -> str | None:
        """Why another engine could not continue behind what was given out, or None."""
        ...

    @property
    def legs_speak_for_client(self) -> bool:
        """Whether what an engine refuses of a split request, every engine would refuse in the same words."""
        ...

    def is_told_at_once(self, params: Mapping[str, Any] | None) -> bool:
        """Whether a decode leg says nothing before its whole answer is there, however long that takes."""
        ...

    def engine_id(self, leg: Leg) -> str:
        """The id under which the engine knows a leg, for its abort endpoint."""
        ...

    async def prefill(self, leg: Leg, params: Mapping[str, Any] | None, *, sample: bool) -> Prefilled[Piece]:
        """Runs a prefill leg.

        Args:
            params: the connector's ``kv_transfer_params``; None where nothing is to be handed over.
            sample: draw the first token as the client asked, because it will be used.

        Raises:
            LegError: it failed.
        """
        ...

    def decode(
        self,
        leg: Leg,
        params: Mapping[str, Any] | None,
        computed: Computed | Beside | None,
        accepted: Callable[[], None],
        passed: Callable[[int], None] = lambda _: None,
    ) -> AsyncGenerator[Piece, None]:
        """Runs a decode leg, or the only leg of a colocated request (``params`` None). Closing it ends the leg.

        Args:
            computed: who computed the prompt, or who is computing it; None if this leg does.
            accepted: called when the engine has taken the request.
            passed: called with the number of tokens that have gone to the client by another way than this one.

        Raises:
            LegError: it failed.
        """
        ...

    async def release(self, leg: Leg, params: Mapping[str, Any], prompt: Any) -> None:
        """Has an engine see to it that KV which nobody wants is freed: decode takes it, or prefill lets go of it.

        Args:
            prompt: as ``Prefilled`` has it.

        Raises:
            LegError: it failed.
        """
        ...

    def note(self, record: GenerationRecord, piece: Piece) -> None:
        """Writes down what a piece says."""
        ...
