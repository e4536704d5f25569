"""Decode's side of a transfer of TrivetConnector: from the request's arrival until its KV is there.

Decode opens the transfer at prefill's address at once. It asks for blocks when prefill announces that the prompt's
first chunk is scheduled, and gives them back if prefill takes that back, so that neither engine keeps blocks for what
the other has no room for. KV moves while prefill computes; what is behind prefill's end is the last piece, or as much
as the path could not carry in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivet.sim.connector import PullError
from trivet.sim.link import Link, connect
from trivet.sim.settings import SimSettings
from trivet.sim.tokens import digest

if TYPE_CHECKING:
    from trivet.sim.scheduler import Scheduler, SimSequence

_SOONEST_ALIVE_S = 0.005


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where decode meets prefill: its ``kv_transfer_params``."""

    transfer_id: str
    address: str
    first_token: bool
    """Prefill's token is the answer's first, and comes with the KV."""
    prefill_cached_tokens: int | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Meeting | None:
        """None if they name no transfer."""
        if not params.get("do_remote_prefill") or not params.get("transfer_id"):
            return None
        address = str(params.get("prefill_address") or "")
        return cls(str(params["transfer_id"]), address, bool(params.get("first_token")))


class Incoming:
    """One transfer. ``run`` once."""

    def __init__(self, settings: SimSettings, scheduler: Scheduler, sequence: SimSequence) -> None:
        self._scheduler = scheduler
        self._sequence = sequence
        self._meeting: Meeting = sequence.source
        self._max_model_len = settings.max_model_len
        self._events: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._s_per_token = settings.transfer_ms_per_token / 1000
        self._last_s = settings.transfer_last_ms / 1000
        self._alive_s = _alive_s(settings.kv_lease_s)
        self._alive_at_s = time.monotonic() + self._alive_s
        self._begin_s: float | None = None
        """Since when there are blocks to write to."""
        self._end_s: float | None = None
        """Since when prefill has computed all of it."""
        self.link = Link(lambda _, message: self._events.put_nowait(message), lambda _: self._happened("gone"))

    async def run(self) -> None:
        """Returns when all KV is here.

        Raises:
            PullError: it will not come.
        """
        meeting, sequence = self._meeting, self._sequence
        try:
            try:
                await connect(meeting.address, self.link)
            except (OSError, ValueError, TimeoutError) as error:
                raise PullError(f"cannot reach prefill at {meeting.address!r}: {error}") from error
            self.link.send(
                {
                    "say": "open",
                    "transfer": meeting.transfer_id,
                    "prompt": digest(sequence.prompt),
                    "first_token": meeting.first_token,
                    "leg": sequence.leg,
                }
            )
            if meeting.first_token and (sequence.max_tokens <= 1 or len(sequence.prompt) + 1 >= self._max_model_len):
                self.link.send({"say": "close"})
                raise PullError("no token has room behind the first")
            await self._take()
            self.link.send({"say": "got"})
        except asyncio.CancelledError:
            self.link.send({"say": "close"})
            raise
        finally:
            self.link.close()

    async def _take(self) -> None:
        while True:
            while not self._events.empty():  # before anything is held to be done
                self._take_event(self._events.get_nowait())
            now = time.monotonic()
            done_s = self._done_s()
            if done_s is not None and done_s <= now:
                return
            if self._alive_at_s <= now:
                self.link.send({"say": "alive"})
                self._alive_at_s = now + self._alive_s
            try:
                async with asyncio.timeout(min(done_s or self._alive_at_s, self._alive_at_s) - now):
                    event = await self._events.get()
            except TimeoutError:
                continue
            self._take_event(event)

    def _take_event(self, event: Mapping[str, Any]) -> None:
        sequence = self._sequence
        match event.get("say"):
            case "announce":
                self._s_per_token = max(self._s_per_token, float(event["s_per_token"]))
                self._last_s = max(self._last_s, float(event["last_s"]))
                self._alive_s = min(self._alive_s, _alive_s(float(event["lease_s"])))
                self._alive_at_s = min(self._alive_at_s, time.monotonic() + self._alive_s)
                self._scheduler.want_room(sequence, lambda: self._happened("room"))
                self._lose(0)
            case "withdraw":
                self._begin_s = None
                self._scheduler.leave_room(sequence)
            case "room":
                if sequence.blocks:  # and they were not given back meanwhile
                    self._begin_s = time.monotonic()
            case "first":
                self._end_s = time.monotonic()
                if self._meeting.first_token:
                    sequence.first_token = int(event["token"])
                self._lose(1)
            case "lost":
                raise PullError(str(event.get("why")))
            case "gone":
                raise PullError("the connection to prefill is lost")

    def _done_s(self) -> float | None:
        """When the last piece will be here; None while that cannot be said."""
        if self._begin_s is None or self._end_s is None:
            return None
        tokens = len(self._sequence.prompt) - self._sequence.computed
        return max(max(self._begin_s, self._end_s) + self._last_s, self._begin_s + tokens * self._s_per_token)

    def _lose(self, tokens: int) -> None:
        """Does what the fault ``lose`` asks for once prefill has made so many tokens."""
        at = self._sequence.loses_at
        if at is not None and min(at, 1) == tokens:
            self.link.cut()
            raise PullError("simulated fault: the transfer is lost")

    def _happened(self, what: str) -> None:
        self._events.put_nowait({"say": what})


def _alive_s(lease_s: float) -> float:
    """How often prefill is told that its KV is still wanted."""
    return max(lease_s / 4, _SOONEST_ALIVE_S)
