"""Hand-overs as Trivet's own TrivetConnector makes them: both legs start together and meet under a transfer's id.

Here is prefill's side; decode's is ``incoming.py``. A transfer begins with prefill's request or with the decode engine
that opens it, whichever comes first. When prefill is done, its blocks are held until decode has everything, decode
gives up, its connection is lost, the lease ends (every sign of life from decode begins it anew), or a request
releases them. A decode engine that gives up before prefill is done may be followed by another.

Decode says ``open``, then ``alive`` at times, at last ``got`` or ``close``. Prefill says ``announce`` (the first chunk
is scheduled), ``withdraw`` (it was preempted), ``first`` (all is computed; perhaps with the answer's first token), or
``lost``, with the reason.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trivet.sim.connector import Connector, PullError
from trivet.sim.faults import Fault
from trivet.sim.incoming import Incoming, Meeting
from trivet.sim.link import SCHEME, Link, Listener, listen
from trivet.sim.pool import BlockPool
from trivet.sim.scheduler import End, Scheduler, SimSequence
from trivet.sim.settings import TRIVET, SimSettings
from trivet.sim.stats import Stats
from trivet.sim.tokens import digest

OPEN_PATH = "/sim/kv/open"
"""The path by which faults strike a decode engine that opens a transfer."""

_MOST_ENDED = 8192
_WITHHELD = "simulated fault: nothing is handed over"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a decode engine that opened a transfer said of it."""

    prompt: str
    first_token: bool

    def differs(self, sequence: SimSequence, first_token: bool) -> str | None:
        """Why it cannot be given what ``sequence`` computes."""
        if self.prompt != digest(sequence.prompt):
            return "decode's prompt is not the one that prefill computes"
        if self.first_token != first_token:
            return "prefill and decode disagree about who makes the first token"
        return None


@dataclass(slots=True, eq=False)
class _Transfer:
    """One transfer as prefill knows it."""

    id: str
    sequence: SimSequence | None = None
    """Prefill's request, when it has come."""
    first_token: bool = False
    peers: dict[Link, _Asked] = field(default_factory=dict)
    """Those who have it open. The first is served, the others wait for it to give up."""
    is_scheduled: bool = False
    blocks: list[int] | None = None
    """Held since prefill is done."""
    problem: str | None = None
    """Why nothing will be handed over."""
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Ends the lease, or the wait for prefill's request."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Transfers(Connector):
    """The hand-overs of one engine, as prefill and as decode."""

    name: ClassVar[str | None] = TRIVET
    opens_at_once: ClassVar[bool] = True

    def __init__(
        self,
        settings: SimSettings,
        pool: BlockPool,
        stats: Stats,
        *,
        address: str,
        scheduler: Callable[[], Scheduler],
        strike: Callable[[str], Fault | None],
        die: Callable[[int], None],
    ) -> None:
        """
        Args:
            address: where it listens.
            strike: the fault for a decode request of that leg that opens a transfer.
            die: ends the engine.
        """
        super().__init__()
        self._settings = settings
        self._pool = pool
        self._stats = stats
        self._address = address
        self._scheduler = scheduler
        self._strike = strike
        self._die = die
        self._listener: Listener | None = None
        self._listens = False
        self._links: set[Link] = set()
        self._transfers: dict[str, _Transfer] = {}
        self._by_sequence: dict[SimSequence, _Transfer] = {}
        self._by_link: dict[Link, _Transfer] = {}
        self._ended: dict[str, str] = {}
        """The newest that have ended, and how."""

    @property
    def open(self) -> int:
        """See ``Connector``."""
        return sum(one.blocks is not None for one in self._transfers.values())

    @property
    def address(self) -> str | None:
        """See ``Connector``."""
        return self._address

    # with the engine

    async def listen(self) -> None:
        """See ``Connector``."""
        if not self._listens:
            self._listener = listen(self._address, lambda: Link(self._heard, self._lost, self._met))
            self._listens = True

    def stop_listening(self) -> None:
        """See ``Connector``."""
        if self._listener is not None:
            self._listener.close()
        self._listens = False

    def cut(self) -> None:
        """See ``Connector``."""
        self.stop_listening()
        for link in list(self._links):
            link.cut()

    async def close(self) -> None:
        """See ``Connector``."""
        self.cut()
        if self._listener is not None:
            await self._listener.settled()
            self._listener.remove()
            self._listener = None
        for transfer in self._transfers.values():
            transfer.stop_timer()
            if transfer.blocks is not None:
                self._pool.let_go(transfer.blocks)
        self._transfers.clear()
        self._by_link.clear()
        while self._links:  # noqa: ASYNC110  (those that were cut say so in the loop's next round)
            await asyncio.sleep(0)

    # with a request

    def source(self, params: Mapping[str, Any]) -> Meeting | None:
        """See ``Connector``."""
        return Meeting.parse(params)

    def arrived(self, sequence: SimSequence, params: Mapping[str, Any]) -> None:
        """See ``Connector``."""
        if (released := params.get("release_transfer")) is not None:
            self._release(str(released))
        name = params.get("transfer_id")
        if not sequence.hands_over or not name:
            return
        name = str(name)
        transfer = self._transfers.setdefault(name, _Transfer(name))
        if transfer.sequence is not None:
            sequence.told = _not(name, "this transfer is under way already")
            return
        self._ended.pop(name, None)
        transfer.stop_timer()
        transfer.sequence = sequence
        transfer.first_token = bool(params.get("first_token"))
        self._by_sequence[sequence] = transfer
        if sequence.withholds:
            self._fail(transfer, _WITHHELD)
        self._serve(transfer)

    # with the scheduler

    def scheduled(self, sequence: SimSequence) -> None:
        """See ``Connector``."""
        if (transfer := self._by_sequence.get(sequence)) is not None:
            transfer.is_scheduled = True
            self._announce(transfer)

    def preempted(self, sequence: SimSequence) -> None:
        """See ``Connector``."""
        if (transfer := self._by_sequence.get(sequence)) is not None:
            transfer.is_scheduled = False
            self._tell(transfer, {"say": "withdraw"})

    def ended(self, sequence: SimSequence, end: End) -> None:
        """See ``Connector``."""
        transfer = self._by_sequence.pop(sequence, None)
        if transfer is None:
            return
        if end in (End.ABORT, End.ERROR):
            self._fail(transfer, "prefill was aborted" if end is End.ABORT else "prefill failed")
        if transfer.problem is not None:
            sequence.told = _not(transfer.id, transfer.problem)
            self._forget(transfer)
            return
        sequence.told = {"transfer_id": transfer.id, "handed_over": True}
        transfer.blocks = list(sequence.blocks)
        self._pool.hold(transfer.blocks)
        self.counts.offered += 1
        self._begin_lease(transfer)
        self._hand_over(transfer)

    async def pull(self, sequence: SimSequence) -> None:
        """See ``Connector``."""
        incoming = Incoming(self._settings, self._scheduler(), sequence)
        self._links.add(incoming.link)
        try:
            await incoming.run()
        except PullError:
            self.counts.failed += 1
            raise
        finally:
            self._links.discard(incoming.link)
        self.counts.pulled += 1

    def recomputes(self, sequence: SimSequence) -> bool:
        """See ``Connector``."""
        meeting: Meeting = sequence.source
        return not meeting.first_token or sequence.first_token is not None

    # what decode says

    def _met(self, link: Link) -> None:
        self._links.add(link)
        if not self._listens:
            link.cut()

    def _heard(self, link: Link, message: Mapping[str, Any]) -> None:
        transfer = self._by_link.get(link)
        match message.get("say"):
            case "open" if transfer is None:
                self._opened(link, message)
            case "alive" if transfer is not None and transfer.blocks is not None:
                self._begin_lease(transfer)
            case "got" if transfer is not None and transfer.blocks is not None:
                self._drop(link)
                self.counts.taken += 1
                self._end(transfer, "another decode engine has taken it")
            case "close":
                self._left(link, given_up=True)

    def _lost(self, link: Link) -> None:
        self._links.discard(link)
        self._left(link, given_up=False)

    def _opened(self, link: Link, message: Mapping[str, Any]) -> None:
        """A decode engine opens a transfer."""
        fault = self._strike(str(message.get("leg") or ""))
        match fault.kind if fault is not None else None:
            case "hang" if fault is not None:
                if fault.for_s is not None:
                    asyncio.get_running_loop().call_later(fault.for_s, self._join, link, message)
                return
            case "status":
                self.counts.refused += 1
                link.send({"say": "lost", "why": "simulated fault: the transfer is refused"})
                return
            case "exit" if fault is not None:
                self._die(fault.exit_status)
                return
            case "die" | "disconnect":
                link.cut()
                return
        self._join(link, message)

    def _join(self, link: Link, message: Mapping[str, Any]) -> None:
        """Adds a decode engine to those who have a transfer open."""
        if link not in self._links:
            return
        name = str(message.get("transfer"))
        transfer = self._transfers.get(name)
        ended = self._ended.get(name) if transfer is None else transfer.problem
        if ended is not None:
            self.counts.refused += 1
            link.send({"say": "lost", "why": ended})
            return
        if transfer is None:
            transfer = self._transfers[name] = _Transfer(name)
            transfer.timer = self._after_lease(self._never_came, transfer)
        transfer.peers[link] = _Asked(str(message.get("prompt")), bool(message.get("first_token")))
        self._by_link[link] = transfer
        if len(transfer.peers) == 1:
            self._serve(transfer)

    def _left(self, link: Link, *, given_up: bool) -> None:
        """A decode engine has left a transfer: it said so, or its connection is lost."""
        transfer = self._by_link.get(link)
        if transfer is None:
            return
        was_served = next(iter(transfer.peers)) is link
        self._drop(link)
        if transfer.peers:
            if was_served:
                self._serve(transfer)
        elif transfer.blocks is not None:
            if given_up:
                self.counts.released += 1
            else:
                self.counts.lost += 1
            self._end(transfer, "decode has given it up" if given_up else "the connection to decode was lost")
        elif transfer.sequence is None:
            transfer.stop_timer()
            del self._transfers[transfer.id]

    def _drop(self, link: Link) -> None:
        del self._by_link.pop(link).peers[link]

    # what prefill says

    def _serve(self, transfer: _Transfer) -> None:
        """Tells the decode engine that is served now how far prefill is."""
        if not transfer.peers or transfer.sequence is None:
            return
        asked = next(iter(transfer.peers.values()))
        if (problem := asked.differs(transfer.sequence, transfer.first_token)) is not None:
            self.counts.mismatched += 1
            self._fail(transfer, problem)
        elif transfer.is_scheduled:
            self._announce(transfer)
            if transfer.blocks is not None:
                self._hand_over(transfer)

    def _announce(self, transfer: _Transfer) -> None:
        settings = self._settings
        message = {
            "say": "announce",
            "s_per_token": settings.transfer_ms_per_token / 1000,
            "last_s": settings.transfer_last_ms / 1000,
            "lease_s": settings.kv_lease_s,
        }
        self._tell(transfer, message, lose_at=0)

    def _hand_over(self, transfer: _Transfer) -> None:
        assert transfer.sequence is not None
        token = transfer.sequence.answer[0] if transfer.first_token else None
        self._tell(transfer, {"say": "first", "token": token}, lose_at=1)

    def _tell(self, transfer: _Transfer, message: Mapping[str, Any], *, lose_at: int | None = None) -> None:
        """Says something to the decode engine that is served, and then does what the fault ``lose`` asks for."""
        link, sequence = next(iter(transfer.peers), None), transfer.sequence
        if link is None or sequence is None:
            return
        link.send(message)
        if lose_at is not None and sequence.loses_at is not None and min(sequence.loses_at, 1) == lose_at:
            sequence.loses_at = None
            link.send({"say": "gone"})  # in one piece with the message before it
            link.close()

    # its end

    def _release(self, name: str) -> None:
        """Frees what nobody will take; nothing happens if it is not known."""
        transfer = self._transfers.get(name)
        if transfer is None:
            return
        if transfer.blocks is not None:
            self.counts.released += 1
        self._fail(transfer, "it was released")

    def _expire(self, transfer: _Transfer) -> None:
        self.counts.expired += 1
        self._stats.expired += 1
        self._end(transfer, "the lease has ended")

    def _never_came(self, transfer: _Transfer) -> None:
        self.counts.refused += 1
        self._tell_lost(transfer, "prefill was not asked for it")
        self._transfers.pop(transfer.id)

    def _fail(self, transfer: _Transfer, problem: str) -> None:
        """Nothing will be handed over."""
        transfer.problem = transfer.problem or problem
        if transfer.blocks is not None or transfer.sequence is None:
            self._end(transfer, problem)
        else:  # until prefill's request ends, as its answer says so
            self._tell_lost(transfer, problem)

    def _end(self, transfer: _Transfer, how: str) -> None:
        """Frees what is held, and forgets the transfer but for its end."""
        self._tell_lost(transfer, how)
        if transfer.blocks is not None:
            self._pool.let_go(transfer.blocks)
            self._scheduler().wake()
        transfer.problem = how
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        transfer.stop_timer()
        self._transfers.pop(transfer.id, None)
        self._ended[transfer.id] = transfer.problem or "it has ended"
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def _tell_lost(self, transfer: _Transfer, why: str) -> None:
        for link in list(transfer.peers):
            link.send({"say": "lost", "why": why})
            self._drop(link)

    def _begin_lease(self, transfer: _Transfer) -> None:
        transfer.stop_timer()
        transfer.timer = self._after_lease(self._expire, transfer)

    def _after_lease(self, then: Callable[[_Transfer], None], transfer: _Transfer) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._settings.kv_lease_s, then, transfer)


def own_address() -> str:
    """An address for an engine that was given none."""
    return f"{SCHEME}{Path(tempfile.gettempdir()).absolute()}/trivet-sim-{uuid.uuid4().hex[:12]}.sock"


def _not(transfer_id: str, problem: str) -> dict[str, Any]:
    return {"transfer_id": transfer_id, "handed_over": False, "problem": problem}
