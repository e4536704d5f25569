"""A request of a decode engine whose KV prefill computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from trivet.transfer.prefill_link import PrefillLink


class State(Enum):
    """See ``decode.py``."""

    OPENED = auto()
    ANNOUNCED = auto()
    LOADING = auto()
    SETTLED = auto()


@dataclass(slots=True, eq=False)
class Incoming:
    """See the module. Changed with the decode side's lock only."""

    transfer: str
    request: Request
    takes_first_token: bool
    prompt: str
    """Which prompt it is, see ``prompts.py``."""
    skips_cache: bool
    """Whether its client asked for no reading of the prefix cache; the request's own word is changed meanwhile."""
    link: PrefillLink | None = None
    """None where prefill is not asked."""
    state: State = State.OPENED
    announced: bool = False
    lost: str | None = None
    """Why its KV will not come."""
    token: int | None = None
    token_known: bool = False
    """Prefill is done: ``token`` is what there will ever be."""
    token_lost: bool = False
    """Prefill will never say it."""
    token_taken: bool = False
    deadline_s: float = float("inf")
    """Until when what prefill has computed must be here."""
    withdrawn: bool = False
    """Prefill begins again: what is here is worth nothing until it announces anew."""
    gave_back: bool = False
    """It has no blocks any more, which vLLM has not seen yet."""
    attempt: int = 0
    """How often it was withdrawn: reports of former attempts may still be under way."""
    dropped: bool = False
    """The workers were told to stop."""
    has_all: bool = False
    aborted: bool = False
    fails: bool = False
    """It must end with an error: its first token went to the client and cannot be taken here."""
    woken: bool = False
    """It was woken since the last step."""
    cached_tokens: int = 0
    landed_at: set[int] = field(default_factory=set)
    """Ranks that have said so."""

    @property
    def awaits_token(self) -> bool:
        """Whether its first token may yet be told."""
        return self.takes_first_token and not self.token_known and not self._is_mute

    @property
    def lacks_token(self) -> bool:
        """Whether its first token will never be known here."""
        return self.takes_first_token and (self.token is None if self.token_known else self._is_mute)

    @property
    def _is_mute(self) -> bool:
        return self.token_lost or self.link is None or self.link.ended

    def park(self) -> None:
        """While it waits for prefill, vLLM would look for its prompt in the prefix cache in each step, for nothing."""
        self.request.skip_reading_prefix_cache = True

    def unpark(self) -> None:
        """From now on what is cached here matters."""
        self.request.skip_reading_prefix_cache = self.skips_cache

    def wake(self) -> None:
        """The same while vLLM may just have looked into its cache in vain: from another thread than the scheduler's."""
        self.unpark()
        self.woken = True

    def lose(self, why: str) -> None:
        """Its KV will not come."""
        self.lost = self.lost or why
        if self.state in (State.OPENED, State.ANNOUNCED):
            self.wake()
