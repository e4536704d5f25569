"""Scheduler side of prefill: announces transfers, keeps blocks until they are read, hands the first token over."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivet.transfer.identity import difference
from trivet.transfer.link import Connection, Listener
from trivet.transfer.messages import (
    PROTOCOL,
    Alive,
    Announce,
    Close,
    First,
    Hello,
    Lost,
    Message,
    Open,
    Welcome,
    Withdraw,
    is_transfer,
)
from trivet.transfer.plan import Chunk, StepPlan
from trivet.transfer.prompts import prompt_of
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.trace import Trace

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.trivet")

_REMEMBERED = 4096
"""Ended transfers that are still known, so that who opens one late is told."""

_TAKEN = "a decode engine has taken it"
_UNWANTED = "decode did not want it any more"
_RELEASED = "it was released"
_ANOTHER = "another decode engine has opened it"


@dataclass(slots=True, eq=False)
class _Link:
    """A decode engine's scheduler side."""

    connection: Connection
    engine_id: str = ""
    problem: str | None = None


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A request whose KV a decode engine is to get."""

    transfer: str
    request: Request
    hands_first_token: bool
    prompt: str
    """Which prompt it is, see ``prompts.py``."""
    opener: _Link | None = None
    announced: bool = False
    prompt_done: bool = False
    preempted: bool = False
    begun: bool = False
    """A chunk of it has been planned: one that comes anew is a preemption, seen or not."""
    taken: bool = False
    """Decode has all KV, which it can before prefill's request has ended."""
    unwanted: bool = False
    """Decode had opened it and does not want it any more."""
    problem: str | None = None
    finished: bool = False
    token: int | None = None
    deadline_s: float = 0.0


@dataclass(slots=True)
class _Step:
    """What the next plan has besides chunks."""

    finished: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


class PrefillSide:
    """See the module. Methods are for the scheduler's thread; links have threads of their own."""

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        identity: dict[str, Any],
        data_paths: list[str],
        counts: Counts,
        trace: Trace,
    ) -> None:
        """
        Raises:
            ValueError: it cannot listen at its address, in one line.
        """
        self._settings, self._engine_id, self._identity = settings, engine_id, identity
        self._data_paths, self._counts, self._trace = data_paths, counts, trace
        self._lock = threading.RLock()
        self._outgoing: dict[str, _Outgoing] = {}
        self._by_request: dict[str, _Outgoing] = {}
        self._early: dict[str, tuple[_Link, Open]] = {}
        """Opened before this engine has the request."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Why a transfer cannot be had any more."""
        self._step = _Step()
        self._listener = Listener(settings.path, self._serve, "trivet-link")

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    # --- links

    def _serve(self, connection: Connection) -> None:
        link = _Link(connection)
        try:
            hello = connection.receive()
            if not isinstance(hello, Hello):
                return
            link.engine_id = hello.engine_id
            if hello.protocol != PROTOCOL:
                link.problem = f"prefill speaks protocol {PROTOCOL} of TrivetConnector, decode {hello.protocol}"
            else:
                link.problem = difference(self._identity, hello.identity)
            if link.problem is not None:
                logger.error("TrivetConnector: decode engine %s: %s", link.engine_id, link.problem)
            connection.send(Welcome(self._engine_id, self._data_paths, link.problem))
            while (message := connection.receive()) is not None:
                self._hear(link, message)
        finally:
            with self._lock:
                for name in [name for name, (other, _) in self._early.items() if other is link]:
                    del self._early[name]
                for outgoing in [one for one in self._outgoing.values() if one.opener is link]:
                    self._closed(outgoing)

    def _hear(self, link: _Link, message: Message) -> None:
        with self._lock:
            match message:
                case Open():
                    if (outgoing := self._outgoing.get(message.transfer)) is not None:
                        self._opened(outgoing, link, message)
                    elif (why := self._ended.get(message.transfer)) is not None:
                        link.connection.send(Lost(message.transfer, why))
                    else:
                        former = self._early.get(message.transfer)
                        if former is not None and former[0] is not link:
                            former[0].connection.send(Lost(message.transfer, _ANOTHER))
                        self._early[message.transfer] = (link, message)
                case Close():
                    former = self._early.get(message.transfer)
                    if former is not None and former[0] is link:
                        del self._early[message.transfer]
                    outgoing = self._outgoing.get(message.transfer)
                    if outgoing is not None and outgoing.opener is link:
                        outgoing.taken = message.has_all
                        self._closed(outgoing)
                case Alive():
                    deadline_s = time.monotonic() + self._settings.lease_s
                    for outgoing in self._outgoing.values():
                        if outgoing.opener is link:
                            outgoing.deadline_s = deadline_s
                case _:
                    raise ValueError(f"a {type(message).__name__} on a link")

    def _opened(self, outgoing: _Outgoing, link: _Link, message: Open) -> None:
        if message.prompt and message.prompt != outgoing.prompt:
            # A fault of whoever made the ids. Nothing of it is told: neither KV nor token belong to decode's request.
            why = f"prefill has another prompt by this transfer id: {outgoing.prompt}, decode {message.prompt}"
            logger.error("TrivetConnector: transfer %s: %s", outgoing.transfer, why)
            link.connection.send(Lost(outgoing.transfer, why))
            return
        if outgoing.opener is not None and outgoing.opener is not link:
            outgoing.opener.connection.send(Lost(outgoing.transfer, _ANOTHER))
        outgoing.opener, outgoing.unwanted, outgoing.taken = link, False, False
        outgoing.problem = link.problem or outgoing.problem
        outgoing.deadline_s = time.monotonic() + self._settings.lease_s
        if outgoing.problem is not None:
            link.connection.send(Lost(outgoing.transfer, outgoing.problem, first_comes=True))
        elif outgoing.announced:
            link.connection.send(Announce(outgoing.transfer))
        if outgoing.finished:
            link.connection.send(First(outgoing.transfer, outgoing.token))
            if outgoing.problem is not None:
                self._drop(outgoing, outgoing.problem)

    def _closed(self, outgoing: _Outgoing) -> None:
        outgoing.opener, outgoing.unwanted = None, not outgoing.taken
        if outgoing.finished:
            self._drop(outgoing, _TAKEN if outgoing.taken else _UNWANTED)

    def _drop(self, outgoing: _Outgoing, why: str) -> None:
        """Gives up KV that is kept; the workers then report it as sent, and vLLM frees the blocks."""
        if self._outgoing.pop(outgoing.transfer, None) is None:
            return
        self._step.dropped.append(outgoing.transfer)
        self._end(outgoing.transfer, why)

    def _end(self, transfer: str, why: str) -> None:
        self._ended[transfer] = why
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    # --- the scheduler

    def on_new_request(self, request: Request, params: dict[str, Any]) -> None:
        """A request has come that is to be handed over, or one whose use is that KV is given up.

        What ``params`` has is the client's word: anything.
        """
        with self._lock:
            if (release := params.get("release_transfer")) is not None:
                if not is_transfer(release):
                    return
                held = self._outgoing.get(release)
                if held is None:
                    self._end(release, _RELEASED)  # its request may be on its way
                elif held.finished:
                    self._drop(held, _RELEASED)
                elif held.opener is None:
                    held.unwanted = True
                return
            transfer = params.get("transfer_id")
            if not params.get("do_remote_decode") or not is_transfer(transfer) or transfer in self._outgoing:
                return
            if request.request_id in self._by_request:
                return
            if transfer in self._step.dropped:  # the workers, told of both in one step, would drop this one
                return
            outgoing = _Outgoing(transfer, request, bool(params.get("first_token")), prompt_of(request))
            self._outgoing[transfer] = self._by_request[request.request_id] = outgoing
            outgoing.unwanted = self._ended.pop(transfer, None) == _RELEASED
            if (early := self._early.pop(transfer, None)) is not None:
                self._opened(outgoing, *early)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers are told of this step."""
        with self._lock:
            chunks = tuple(self._chunks(output)) if self._by_request else ()
            preempted = []
            now_s = time.monotonic()
            for outgoing in list(self._outgoing.values()):
                if outgoing.finished:
                    if outgoing.deadline_s < now_s:
                        self._counts.expired()
                        logger.warning(
                            "TrivetConnector: no decode engine took transfer %s within %g s",
                            outgoing.transfer,
                            self._settings.lease_s,
                        )
                        if outgoing.opener is not None:
                            outgoing.opener.connection.send(Lost(outgoing.transfer, "its lease has ended"))
                        self._drop(outgoing, "its lease has ended")
                elif outgoing.request.status.name == "PREEMPTED" and not outgoing.preempted:
                    outgoing.preempted, outgoing.prompt_done = True, False
                    preempted.append(outgoing.transfer)
                    self._withdraw(outgoing)
            step, self._step = self._step, _Step()
            preempted += step.preempted
            return StepPlan(chunks, tuple(preempted), tuple(step.finished), tuple(step.dropped))

    def _withdraw(self, outgoing: _Outgoing) -> None:
        if outgoing.announced and outgoing.opener is not None and outgoing.problem is None:
            outgoing.opener.connection.send(Withdraw(outgoing.transfer))
        outgoing.announced = False

    def _chunks(self, output: SchedulerOutput) -> list[Chunk]:
        chunks = []
        for new in output.scheduled_new_reqs:
            if (outgoing := self._by_request.get(new.req_id)) is not None:
                scheduled = output.num_scheduled_tokens.get(new.req_id, 0)
                chunks.append(self._chunk(outgoing, new.block_ids, True, new.num_computed_tokens + scheduled))
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            outgoing = self._by_request.get(request_id)
            if outgoing is None or (outgoing.prompt_done and request_id not in cached.resumed_req_ids):
                continue
            computed = cached.num_computed_tokens[index] + output.num_scheduled_tokens.get(request_id, 0)
            blocks = cached.new_block_ids[index] or ()
            chunks.append(self._chunk(outgoing, blocks, request_id in cached.resumed_req_ids, computed))
        return chunks

    def _chunk(self, outgoing: _Outgoing, blocks: tuple[list[int], ...], anew: bool, computed: int) -> Chunk:
        prompt = outgoing.request.num_prompt_tokens
        if anew and outgoing.begun and not outgoing.preempted:
            self._step.preempted.append(outgoing.transfer)
            self._withdraw(outgoing)
        outgoing.begun = True
        outgoing.preempted = False
        outgoing.prompt_done = computed >= prompt
        if not outgoing.announced:
            outgoing.announced = True
            self._trace.mark("prefill", outgoing.transfer, "first chunk scheduled")
            if outgoing.opener is not None and outgoing.problem is None:
                outgoing.opener.connection.send(Announce(outgoing.transfer))
        return Chunk(
            outgoing.transfer,
            outgoing.request.request_id,
            tuple(tuple(group) for group in blocks),
            anew,
            min(computed, prompt),
            outgoing.prompt_done,
        )

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept for a decode engine, and what the answer says of it."""
        with self._lock:
            outgoing = self._by_request.pop(request.request_id, None)
            if outgoing is None:
                return False, None
            link, transfer = outgoing.opener, outgoing.transfer
            if request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED") or not outgoing.prompt_done:
                why = "prefill's request was ended before its prompt was computed"
                self._drop(outgoing, why)
                if link is not None:
                    link.connection.send(Lost(transfer, why))
                return False, None
            outgoing.finished = True
            self._trace.mark("prefill", transfer, "request finished")
            tokens = request.output_token_ids
            outgoing.token = int(tokens[0]) if outgoing.hands_first_token and len(tokens) else None
            outgoing.deadline_s = time.monotonic() + self._settings.lease_s
            if link is not None:
                link.connection.send(First(transfer, outgoing.token))
            if outgoing.taken:
                self._drop(outgoing, _TAKEN)
                return False, {"transfer_id": transfer, "handed_over": True}
            if outgoing.problem is not None or outgoing.unwanted:
                problem = outgoing.problem or _UNWANTED
                self._drop(outgoing, problem)
                return False, {"transfer_id": transfer, "handed_over": False, "problem": problem}
            self._step.finished.append(transfer)
            return True, {"transfer_id": transfer, "handed_over": True}

    def freed(self, request_ids: set[str]) -> None:
        """The workers reported these as sent."""
        with self._lock:
            for outgoing in [one for one in self._outgoing.values() if one.request.request_id in request_ids]:
                del self._outgoing[outgoing.transfer]
                self._end(outgoing.transfer, _TAKEN)
