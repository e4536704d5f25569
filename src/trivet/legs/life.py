"""The life of one generation: prefill leg, handover, decode leg; or one leg alone when it is served colocated.

Everything a generation holds is held by the task that runs it: cancelling that task closes whichever leg is open,
which makes the engine abort it, and KV that a finished prefill leg keeps for a decode leg that will not come is
released. With a connector whose legs start together, a task of its own begins the decode leg, which waits in its engine
while prefill computes; what ends one of the two ends the other. The rules of what is tried again:

- what an engine refused before it began (no connection, 429, 503) goes to the next engine; a prefill leg that is done
  is not done again for that: its KV is offered to another decode engine;
- a prefill leg that failed is tried on another prefill engine; at last one decode engine serves the request whole;
- a decode leg that was answered with an error has not been able to take the KV: the request is served colocated. The
  same from a colocated leg is the engine's answer, and the client's to see;
- an engine that broke off, fell silent or went out of service is continued on another, from the tokens that the client
  has: prompt and answer so far are computed anew. Where that could not give what one engine would have given, the
  client is told so;
- a request under which two engines ended is not given a third.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import aiohttp

from trivet.connectors import Connector, Side
from trivet.journal import GenerationRecord, RequestRecord, current_request, now_s
from trivet.legs.ahead import Ahead
from trivet.legs.ask import Ask, Beside, Computed, Leg, Piece, Prefilled
from trivet.legs.bodies import why_unsplittable
from trivet.legs.ending import end
from trivet.legs.release import Releases, takers
from trivet.legs.tokens import TokenAsk
from trivet.legs.watch import Patience, watch
from trivet.legs.wire import GENERATE, LegError, reading
from trivet.render.contract import DeadlinePassedError, ServingError, TokenChunk, TokenRequest
from trivet.routing.board import Count
from trivet.routing.choose import Knowledge, Route, another_decode, choose
from trivet.routing.engines import Engines, EngineView
from trivet.routing.policy import ALWAYS, Reason
from trivet.routing.prefixes import NOTHING, Known, Prefix

logger = logging.getLogger(__name__)
generations_logger = logging.getLogger("trivet.legs.generation")
"""A line for each generation; a name of its own, for whoever has it told otherwise."""

_ATTEMPTS = 3
_DEATHS = 2
_NOTICE_S, _NOTICE_POLL_S = 0.6, 0.05
"""How long the fleet may take to see that an engine has ended; it looks at health every 0.3 s."""
_NOT_FOUND = 404
"""What an engine says that lacks an adapter: another may have it."""
_REFUSALS = frozenset({400, 413, 422})
"""The request itself is at fault: another engine would say the same. Other statuses are the engine's own trouble."""
_TENSORS = (
    f"images and the like in {GENERATE} are not for clients of this service: they may be tensors of the client's own "
    "making, and one of another shape ends an engine. /v1/chat/completions takes images (a topology may allow the "
    "former: gateway.allow: [kv_transfer_params])"
)
_LATE_S, _LATE_TIMES = 2.0, 4.0
"""Nothing from decode so long behind prefill's answer, nor in so many times what handovers of the pair take, is
trouble: a transfer may hang, and an engine that waits for KV says nothing. The request waits on."""
_ENDING_S = 1.0
"""How long generations may take to end that were told to; what they release must begin while there is a session."""

_OF_THE_CLIENT = _REFUSALS | {_NOT_FOUND}
"""What an engine says of a client's mistake."""

Observer = Callable[[GenerationRecord, RequestRecord | None], None]


@dataclass(frozen=True, slots=True)
class Trouble:
    """What went wrong between two engines that were to serve a generation split."""

    prefill: EngineView
    decode: EngineView
    told: str
    fault: LegError | None = None
    """None where no leg failed, and decode computed the prompt itself."""


Troubled = Callable[[Trouble], None]


@dataclass(slots=True)
class _Run(Generic[Piece]):
    """A generation under way: what is asked, and what was tried for it."""

    ask: Ask[Piece]
    record: GenerationRecord
    patience: Patience
    colocate: str | None
    """Why the next attempt is not split."""
    because: Reason
    """The label of that, before anything has failed."""
    knows: Knowledge
    """What its engines are chosen by."""
    cached: Known = NOTHING
    """What the engine that computes the prompt was thought to have of it."""
    decode_rank: str | None = None
    """See ``RequestRecord``."""
    faults: list[LegError] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    """Engines that have failed it."""
    asked: dict[str, EngineView] = field(default_factory=dict)
    """Engines as they were when it came to them: the fleet may know them no more, or anew, by the time they fail it."""
    broken_off: list[EngineView] = field(default_factory=list)
    """Engines that may have ended under it."""
    forgave: bool = False
    late: asyncio.TimerHandle | None = None
    """Tells of trouble if nothing comes from decode."""
    kept: dict[str, contextlib.ExitStack] = field(default_factory=dict)
    """Engines that must not be stopped as idle though no leg runs there: one is about to, or decode must fetch KV."""

    @property
    def executed(self) -> int:
        return sum(fault.executed for fault in self.faults)

    def told(self) -> str:
        return "; ".join(str(fault) for fault in self.faults)

    def error(self) -> ServingError:
        """What the client is told when nothing is left to try."""
        if not self.faults:
            return ServingError("no engine is ready to serve this request", status=503)
        last = self.faults[-1]
        status = 503 if last.status is None or last.died else last.status
        return ServingError(
            f"no engine could serve this request: {self.told()}",
            status=status,
            error=last.error,
            content=last.content,
        )


@dataclass(slots=True)
class _Held:
    """KV of one prompt, from when a prefill leg is asked to keep it for decode."""

    prefill: EngineView
    decode: EngineView
    """Whom it is offered to."""
    untaken: bool = True
    """Nobody but us would tell prefill that it is of no use any more."""


class Legs:
    """Runs generations on the fleet's engines."""

    def __init__(
        self,
        engines: Engines,
        session: aiohttp.ClientSession,
        connector: Connector | None,
        observe: Observer = lambda *_: None,
        patience: Patience | None = None,
        obstacle: str | None = None,
        knowledge: Knowledge | None = None,
        troubled: Troubled = lambda _: None,
        tells: bool = True,
        own_count: bool = False,
    ) -> None:
        """
        Args:
            engines: whose engines are chosen from.
            session: the HTTP session of the legs; closed by its owner.
            connector: what moves KV between prefill and decode; None serves everything colocated.
            observe: called with the record of each generation that ended.
            patience: how long legs are waited for.
            obstacle: why no answer of these engines may be continued on another, or None.
            knowledge: what engines are chosen by beside their load; None splits whatever can be split.
            troubled: called with what goes wrong between two engines, unless a client is to blame for it.
            tells: each generation that ended is a line of the log, and what went wrong in it.
            own_count: decode legs count as cached what they were handed themselves; see ``Connector.own_count``.
        """
        self._own_count = own_count
        self._troubled = troubled
        self._level = logging.INFO if tells else logging.DEBUG
        self._warning = logging.WARNING if tells else logging.DEBUG
        self._obstacle = obstacle
        self._knows = knowledge or Knowledge()
        self._engines = engines
        self.session = session
        self._connector = connector
        self._observe = observe
        self._patience = patience or Patience()
        self._problems: set[tuple[str, int, str, int]] = set()
        """Pairs of engines, as they were started, whose trouble with each other was logged."""
        self.releases = Releases(engines, connector)
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @property
    def running(self) -> int:
        """Generations of this worker that are under way."""
        return self._running

    @running.setter
    def running(self, value: int) -> None:
        self._running = value
        self._engines.board.write(Count.GENERATIONS, value)

    async def run(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """Generates in token ids. See ``TokenEngine.run``."""
        owner = current_request.get()
        if request.features is not None and owner is not None and owner.path == GENERATE and not owner.may_steer:
            raise ServingError(_TENSORS, status=400)
        if owner is None or not owner.may_steer:  # the gateway has refused those that say such a thing
            request = replace(request, kv_transfer_params=None, ec_transfer_params=None)
        unsplittable = (
            request.unsplittable or why_unsplittable(request) or (owner.colocate if owner is not None else None)
        )
        if request.kv_transfer_params is not None:
            unsplittable = "the client steers the transfer"
        headers = dict(owner.forwarded) if owner is not None else {}
        if request.session_id is not None:
            headers["x-session-id"] = request.session_id
        ask = TokenAsk(request, headers, unsplittable, self._obstacle)
        await ask.prepare()
        async with aclosing(self.serve(ask)) as chunks:
            async for chunk in chunks:
                if not chunk.is_empty:
                    yield chunk

    async def serve(self, ask: Ask[Piece]) -> AsyncGenerator[Piece, None]:
        """Generates. Closing the iterator, or cancelling the task that runs it, ends everything that was begun for it.

        Raises:
            ServingError: no engine could serve it.
        """
        owner = current_request.get()
        record = GenerationRecord(ask.request_id, ask.prompt_tokens, now_s())
        patience = self._patience
        if owner is not None:
            owner.generations.append(record)
            owner.running += 1
            patience = replace(patience, deadline_s=owner.deadline_s)
        colocate, because = ask.unsplittable, Reason.UNSPLITTABLE
        if colocate is None and self._connector is None:
            colocate, because = "the topology has no connector", Reason.NO_PAIR
        elif owner is not None and owner.colocate is not None and colocate == owner.colocate:
            because = Reason.REQUESTED
        splits = owner is not None and owner.splits
        knows = replace(self._knows, policy=ALWAYS) if splits else self._knows
        run = _Run(ask, record, patience, colocate, because, knows)
        if owner is not None:
            run.decode_rank = owner.decode_rank
        self.running += 1
        self._none_runs.clear()
        try:
            async with aclosing(self._attempts(run)) as pieces:
                async for piece in pieces:
                    goes_on = record.finish_reason is None  # usage, which comes behind the end, may correct the count
                    ask.note(record, piece)
                    if goes_on:
                        record.gaps.note(record.completion_tokens)
                    yield piece
        except ServingError as error:
            record.error, record.refused = error.message, error.status in _OF_THE_CLIENT
            record.late = isinstance(error, DeadlinePassedError) and owner is not None and owner.deadline_is_own
            raise
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            record.finish_reason = record.finish_reason or ("stop" if ask.answered else "abort")
            raise
        finally:
            self.running -= 1
            if not self.running:
                self._none_runs.set()
            record.end_s = record.end_s or now_s()
            if owner is not None:
                owner.running -= 1
            generations_logger.log(
                self._level,
                "request %s: %s, %d + %d tokens, %s, generation %s",
                owner.request_id if owner is not None else "-",
                "refused" if record.refused else record.error or record.finish_reason,
                record.prompt_tokens,
                record.completion_tokens,
                f"{record.prefill_engine or record.reason} -> {record.decode_engine}",
                record.generation_id,
            )
            self._observe(record, owner)

    def _note_handover(self, run: _Run[Any]) -> None:
        """What the handover of this pair has cost, for those who choose; one after faults would tell of the faults."""
        record = run.record
        if not record.split or run.faults or record.prefill_end_s is None or record.decode_first_s is None:
            return
        prefill, decode = run.asked.get(record.prefill_engine or ""), run.asked.get(record.decode_engine or "")
        if prefill is not None and decode is not None:
            self._engines.board.note_handover(prefill, decode, record.decode_first_s - record.prefill_end_s)

    async def close(self) -> None:
        """Waits for what is under way, and gives up on what takes too long.

        Generations are ended by who runs them. A moment is theirs: where that was only just now, they have not come yet
        to the release of what they hold.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                await self._none_runs.wait()
        await self.releases.close()

    async def _attempts(self, run: _Run[Piece]) -> AsyncGenerator[Piece, None]:
        while run.executed < _ATTEMPTS and not await self._kills(run):
            if run.executed == _ATTEMPTS - 1 and run.colocate is None:
                run.colocate = "split failed"  # the last attempt asks for as little as can be
            route = self._route(run)
            if route is None and self._forgives(run):
                route = self._route(run)
            if route is None:
                break
            self._begin(run, route)
            try:
                with self._keeping(run, route):
                    if (owner := current_request.get()) is not None and owner.decided is not None:
                        await owner.decided()
                    async with aclosing(self._attempt(run, route)) as pieces:
                        async for piece in pieces:
                            yield piece
                return
            except LegError as fault:
                self._note_trouble(run, route.prefill, fault)
                self._learn(run, route, fault)
                # words that blame a request may quote it
                told = f"{fault.engine} refused it ({fault.status})" if fault.status in _REFUSALS else fault
                logger.log(self._warning, "generation %s: %s; trying elsewhere", run.ask.request_id, told)
            if (end_of_answer := run.ask.unsaid_end) is not None:  # also where no attempt is left: none is needed
                yield end_of_answer
                return
        raise run.error()

    def _route(self, run: _Run[Any]) -> Route | None:
        return choose(
            self._engines,
            colocate=run.colocate,
            avoid=frozenset(run.avoid),
            prompt=run.ask.prefix,
            knowledge=run.knows,
            because=Reason.RETRY if run.faults else run.because,
        )

    def _forgives(self, run: _Run[Any]) -> bool:
        """Where nobody else is left, an engine that broke off and is still in service may be asked once more.

        A connection can be lost without its engine: one that was closed while it was idle, a proxy that was restarted.
        """
        alive = {engine.name for engine in run.broken_off if not self._engines.has_left(engine)} & run.avoid
        if run.forgave or not alive:
            return False
        run.forgave = True
        run.avoid -= alive
        return True

    async def _kills(self, run: _Run[Any]) -> bool:
        """Whether engines have ended under a request, and not only connections."""
        if len(run.broken_off) < _DEATHS:
            return False
        deadline_s = now_s() + _NOTICE_S
        while not all(self._engines.has_left(engine) for engine in run.broken_off):
            if now_s() >= deadline_s:
                return False
            await asyncio.sleep(_NOTICE_POLL_S)
        return True

    @contextlib.contextmanager
    def _keeping(self, run: _Run[Any], route: Route) -> Iterator[None]:
        """Has an attempt's engines count as in use until ``_let_go``: who stops one that is idle waits for it.

        A leg that begins at once counts with its tokens from the choice on: of requests that come together, the next
        is chosen for before this one's tasks have run.
        """
        together = route.prefill is None or (self._connector is not None and self._connector.legs_start_together)
        try:
            if route.prefill is not None:
                self._keep(run, route.prefill, run.ask.prompt_tokens - run.cached.tokens)
            self._keep(run, route.decode, run.ask.tokens if together else 0)
            yield
        finally:
            self._no_more_expected(run)
            for name in list(run.kept):
                self._let_go(run, name)

    def _keep(self, run: _Run[Any], engine: EngineView, tokens: int) -> None:
        self._let_go(run, engine.name)
        kept = run.kept[engine.name] = contextlib.ExitStack()
        kept.enter_context(self._engines.charge(engine, tokens))

    def _let_go(self, run: _Run[Any], name: str) -> None:
        """The attempt's leg on an engine speaks for itself, or nothing of it is there any more."""
        if (kept := run.kept.pop(name, None)) is not None:
            kept.close()

    def _begin(self, run: _Run[Any], route: Route) -> None:
        for engine in (route.prefill, route.decode):
            if engine is not None:
                self._engines.take_turn(engine)
                run.asked[engine.name] = engine
        record = run.record
        record.attempts += 1
        record.resumes += run.ask.begun
        record.intended_split = record.split = route.prefill is not None
        record.transfer_problem = None
        record.reason = f"{route.reason} ({run.told()})" if run.faults else route.reason
        record.split_reason = Reason.RETRY if run.faults else route.label
        run.cached = route.cached
        record.cache_known_by = "events" if route.cached.told else "guess"
        if route.prefill is not None:
            self._knows.handovers.asked(route.prefill, route.decode)
        record.decode_engine = route.decode.name
        record.prefill_engine = route.prefill.name if route.prefill else None
        if not run.ask.begun:
            # of an attempt that failed
            record.prefill_start_s = record.prefill_end_s = record.decode_first_s = record.cached_tokens = None
            record.decode_start_s = None

    def _learn(self, run: _Run[Any], route: Route, fault: LegError) -> None:
        """Decides what a fault means for the next attempt.

        Raises:
            ServingError: there is none.
        """
        begun = run.ask.begun
        if begun and run.ask.unsaid_end is None and (obstacle := run.ask.obstacle) is not None:
            raise ServingError(
                f"the answer broke off: {fault}; it cannot be continued on another engine ({obstacle})",
                status=502,
                error=fault.error,
            ) from fault
        answered = fault.status is not None and fault.executed and not fault.died
        of_prefill = route.prefill is not None and fault.engine == route.prefill.name
        if route.prefill is not None and fault.status in _REFUSALS and not begun and not run.ask.legs_speak_for_client:
            # a leg's body is not the client's, and neither is what its engine finds wrong with it
            run.faults.append(fault)
            run.colocate = "prefill refused it" if of_prefill else "decode refused it"
            return
        if answered and not begun and (fault.status in _REFUSALS or not run.record.split):
            raise ServingError(
                fault.problem, status=fault.status or 500, error=fault.error, content=fault.content
            ) from fault
        run.faults.append(fault)
        if fault.died and fault.executed:
            run.broken_off.append(run.asked[fault.engine])
        if answered and not begun and fault.engine == run.record.decode_engine:
            # it lives and answered; what it could not do may be to take the KV (``kv_load_failure_policy: fail``)
            run.colocate = "decode failed the split request"
            if fault.status != _NOT_FOUND:
                return
        run.avoid.add(fault.engine)

    def _note_trouble(self, run: _Run[Any], prefill: EngineView | None, fault: LegError) -> None:
        """Tells who watches pairs of a fault, unless the request is to blame."""
        decode = run.asked.get(run.record.decode_engine or "")
        if prefill is not None and decode is not None and fault.status not in _OF_THE_CLIENT:
            self._troubled(Trouble(prefill, decode, str(fault), fault))

    def _attempt(self, run: _Run[Piece], route: Route) -> AsyncGenerator[Piece, None]:
        if route.prefill is None:
            return self._decode(run, route.decode, None, None)
        assert self._connector is not None
        held = _Held(route.prefill, route.decode)
        return self._together(run, held) if self._connector.legs_start_together else self._split(run, held)

    async def _split(self, run: _Run[Piece], held: _Held) -> AsyncGenerator[Piece, None]:
        """Decode is asked with what prefill has answered."""
        assert self._connector is not None
        record, start_s, prefill = run.record, now_s(), held.prefill
        sample = self._connector.hands_over_first_token and run.ask.may_take_first_token
        prefilled = await self._prefill(run, held, self._connector.prefill_params(), sample=sample)
        self._stamp(record, start_s, prefilled)
        with reading(prefill.name):
            params = self._connector.decode_params(prefilled.kv_transfer_params)
        if params is not None and self._own_count:
            params = dict(self._connector.own_count(params))
        computed: Computed | None = Computed(prefill, prefilled.cached_tokens)
        try:
            if params is None:
                if not self._connector.decode_serves_whole:
                    raise LegError(prefill.name, "handed nothing over", status=502)
                computed = None
                self._not_handed_over(run, prefill, None)
            elif prefilled.first is not None:
                yield prefilled.first
                if prefilled.finished:
                    return
            if computed is not None:
                self._expect(run, held, params)
            async with aclosing(self._offered(run, held, params, computed)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if held.untaken and params is not None:
                self.releases.release(run.ask, prefilled, self._release_legs(run, held))

    async def _together(self, run: _Run[Piece], held: _Held) -> AsyncGenerator[Piece, None]:
        """Both legs at once. Decode waits in its engine, and takes the KV while prefill computes it."""
        assert self._connector is not None
        ask, prefill, start_s = run.ask, held.prefill, now_s()
        sample = self._connector.hands_over_first_token and ask.may_take_first_token
        if prefill.kv_address is None:
            raise LegError(prefill.name, "it is not known where its connector listens", executed=False)
        if sample and ask.wants_one_token:
            async with aclosing(self._one_token(run, held)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        to_prefill, to_decode = self._connector.rendezvous(uuid.uuid4().hex, prefill.kv_address, first_token=sample)
        beside = Beside(ask.prompt, first_token=sample)
        prefilling = asyncio.create_task(self._prefill(run, held, to_prefill, sample=sample))
        decoding = Ahead(self._offered(run, held, to_decode, beside))
        try:
            await asyncio.wait([prefilling, decoding.beginning], return_when=asyncio.FIRST_COMPLETED)
            if not prefilling.done():
                decoding.beginning.result()  # its fault
            prefilled = await prefilling
            self._stamp(run.record, start_s, prefilled)
            if prefilled.first is not None and prefilled.finished:
                yield prefilled.first
                return
            with reading(prefill.name):
                problem = self._connector.problem_of(prefilled.kv_transfer_params)
            if problem is not None:
                self._not_handed_over(run, prefill, problem)
            elif run.record.decode_first_s is None:
                self._expect(run, held, to_decode)
            beside.answer(None if problem is not None else Computed(prefill, prefilled.cached_tokens))
            if prefilled.first is not None:
                yield prefilled.first
            async with aclosing(decoding.read()) as pieces:
                async for piece in pieces:
                    if problem is None and beside.recomputed:  # before it is passed on: its head says how it was made
                        self._recomputed(run)
                    yield piece
            if problem is None and beside.recomputed:
                self._recomputed(run)
        finally:
            try:
                await decoding.aclose()
            finally:
                try:
                    await end(prefilling)
                finally:
                    if not prefilling.cancelled() and prefilling.exception() is None and held.untaken:
                        self.releases.release(ask, prefilling.result(), self._release_legs(run, held))

    async def _one_token(self, run: _Run[Piece], held: _Held) -> AsyncGenerator[Piece, None]:
        """An answer that prefill's token is the whole of: there is nothing to hand over."""
        record, start_s = run.record, now_s()
        prefilled = await self._prefill(run, held, None, sample=True)
        self._stamp(record, start_s, prefilled)
        record.intended_split = record.split = False
        record.decode_engine, record.reason = None, "one token, which prefill makes"
        record.split_reason = Reason.ONE_TOKEN
        assert prefilled.first is not None
        yield prefilled.first

    async def _offered(
        self, run: _Run[Piece], held: _Held, params: Mapping[str, Any] | None, computed: Computed | Beside | None
    ) -> AsyncGenerator[Piece, None]:
        """The decode leg of a split request. What an engine refuses before it began is offered to the next."""

        assert self._connector is not None
        # Where decode is handed KV that is there, it tells prefill once it has accepted, also when it is aborted. One
        # that gives up while prefill computes leaves room for another: only we know that there will be none.
        tells = self._connector.released_at is Side.DECODE

        def accepted() -> None:
            held.untaken = not tells

        if self._engines.is_leaving(held.decode):  # since it was chosen, while prefill computed
            other = another_decode(self._engines, held.prefill, frozenset(run.avoid))
            if other is not None:
                self._let_go(run, held.decode.name)
                self._offer(run, held, other)
        while True:
            taken = False
            try:
                async with aclosing(self._decode(run, held.decode, params, computed, accepted)) as pieces:
                    async for piece in pieces:
                        if not taken:
                            self._let_go(run, held.prefill.name)  # its KV has been fetched
                        taken, held.untaken = True, False
                        # an answer that comes whole does not tell when its first token was made
                        if run.record.decode_first_s is None and not run.ask.is_told_at_once(params):
                            run.record.decode_first_s = now_s()
                            self._no_more_expected(run)
                            self._note_handover(run)
                        yield piece
                return
            except LegError as fault:
                if not taken:
                    held.untaken = True  # it may have ended before it took the KV
                if taken or fault.executed:
                    raise
                other = another_decode(self._engines, held.prefill, frozenset({*run.avoid, fault.engine}))
                if other is None:
                    raise
                self._note_trouble(run, held.prefill, fault)
                run.faults.append(fault)
                run.avoid.add(fault.engine)
                self._offer(run, held, other)

    def _expect(self, run: _Run[Any], held: _Held, params: Mapping[str, Any] | None) -> None:
        """Has it told if nothing comes from decode for much longer than a handover takes."""
        if run.ask.is_told_at_once(params):
            return
        usual = self._engines.board.handover(held.prefill, held.decode)
        late_s = _LATE_S if usual is None else max(_LATE_S, _LATE_TIMES * usual.mean_s)

        def tell() -> None:
            told = f"{held.decode.name} has said nothing for {late_s:.0f} s since {held.prefill.name} answered"
            self._troubled(Trouble(held.prefill, held.decode, told))

        run.late = asyncio.get_running_loop().call_later(late_s, tell)

    @staticmethod
    def _no_more_expected(run: _Run[Any]) -> None:
        if run.late is not None:
            run.late.cancel()
            run.late = None

    def _offer(self, run: _Run[Any], held: _Held, decode: EngineView) -> None:
        """KV goes to another decode engine than was chosen: what is prefilled is not prefilled again."""
        held.decode = decode
        self._engines.take_turn(decode)
        run.asked[decode.name] = decode
        run.record.decode_engine = decode.name

    def _stamp(self, record: GenerationRecord, start_s: float, prefilled: Prefilled[Any]) -> None:
        if record.first_token_s is None:
            record.prefill_start_s, record.prefill_end_s = start_s, now_s()
            record.cached_tokens = prefilled.cached_tokens

    def _not_handed_over(self, run: _Run[Any], prefill: EngineView, problem: str | None) -> None:
        """Decode computes the prompt itself, which is slower and no fault."""
        record = run.record
        record.split, record.cached_tokens, record.transfer_problem = False, None, problem
        record.reason = f"{prefill.name} handed nothing over{f': {problem}' if problem else ''}"
        decode = run.asked[record.decode_engine or ""]
        pair = (prefill.name, prefill.generation, decode.name, decode.generation)
        self._troubled(Trouble(prefill, decode, record.reason))
        if problem is not None and pair not in self._problems:
            self._problems.add(pair)
            logger.log(self._warning, "%s handed nothing over to %s: %s", prefill.name, decode.name, problem)

    def _recomputed(self, run: _Run[Any]) -> None:
        """Prefill handed over, and decode computed the prompt itself: it went wrong behind prefill's answer."""
        record = run.record
        record.split = False
        record.transfer_problem = f"{record.decode_engine} computed the prompt itself; its log says why"
        prefill, decode = run.asked.get(record.prefill_engine or ""), run.asked.get(record.decode_engine or "")
        if prefill is not None and decode is not None:
            self._troubled(Trouble(prefill, decode, record.transfer_problem))

    async def _prefill(
        self, run: _Run[Piece], held: _Held, params: Mapping[str, Any] | None, *, sample: bool
    ) -> Prefilled[Piece]:
        ask, engine = run.ask, held.prefill
        leg = self._leg(run, engine, "prefill")
        # a task of its own: an answer that is on its way when the client leaves says what must be released
        call = asyncio.create_task(ask.prefill(leg, params, sample=sample))
        try:
            uncached_tokens = ask.prompt_tokens - run.cached.tokens
            with self._engines.charge(engine, uncached_tokens), watch(self._engines, engine, run.patience) as patient:
                if engine.name in run.kept:  # the leg counts for itself; what it leaves there does not weigh
                    self._keep(run, engine, 0)
                async with patient:
                    prefilled = await asyncio.shield(call)
            if prefilled.cached_tokens is not None:
                self._knows.prefixes.correct(engine, run.cached, prefilled.cached_tokens)
            await self._knows.prefixes.learn_in_turns(ask.prefix, engine)
            return prefilled
        except BaseException:
            # where the gateway names the transfer, what is held is known without the answer
            knows = params is not None and self._connector is not None and self._connector.legs_start_together
            unanswered: Prefilled[Piece] | None = Prefilled(params, None, prompt=ask.prompt) if knows else None
            spare = self._release_legs(run, held) if params is not None and held.untaken else None
            if not call.done() or (not call.cancelled() and call.exception() is None):
                self.releases.abandon(ask, leg, call, spare, unanswered)
            elif unanswered is not None and (call.cancelled() or _may_hold(call.exception())):
                self.releases.release(ask, unanswered, spare)
            raise

    async def _decode(
        self,
        run: _Run[Piece],
        engine: EngineView,
        params: Mapping[str, Any] | None,
        computed: Computed | Beside | None,
        accepted: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Piece, None]:
        leg = self._leg(run, engine, "decode")
        run.record.decode_start_s = now_s()
        patience = replace(run.patience, silence_s=None) if run.ask.is_told_at_once(params) else run.patience
        waits = isinstance(computed, Beside) and not computed.is_answered
        # what is told of an engine that was handed KV, or continues an answer, is not what its own cache had
        tells_its_cache = run.record.prefill_engine is None and not run.ask.begun
        learned: Prefix | None = None
        ended = False
        record = run.record

        def passed(tokens: int) -> None:  # while the leg is read, and so inside the watch
            goes_on = record.finish_reason is None
            record.completion_tokens += tokens
            if goes_on:
                record.gaps.note(record.completion_tokens)
            patient.heard()

        try:
            async with aclosing(run.ask.decode(leg, params, computed, accepted, passed)) as pieces:
                with (
                    self._engines.charge(engine, run.ask.tokens),
                    watch(self._engines, engine, patience, counting=not waits) as patient,
                ):
                    self._let_go(run, engine.name)
                    if isinstance(computed, Beside):
                        computed.when_answered(patient.count)
                    while True:
                        async with patient:
                            piece = await anext(pieces, None)
                        if piece is None:
                            break
                        if learned is None:  # the prompt's KV is there, computed or handed over
                            learned = run.ask.prefix
                            await self._knows.prefixes.learn_in_turns(learned, engine)
                        yield piece
            ended = True
        except LegError as fault:
            ended = fault.status is not None or not fault.executed
            raise
        finally:
            if learned is not None:  # the answer is cached as well
                self._knows.prefixes.learn(run.ask.prefix, engine, since=len(learned.hashes))
                if tells_its_cache and run.record.cached_tokens is not None:
                    self._knows.prefixes.correct(engine, run.cached, run.record.cached_tokens)
            if not ended:  # its connection is closed; what stands between may pass that on late
                self.releases.abort(run.ask, leg)

    def _leg(self, run: _Run[Any], engine: EngineView, role: str) -> Leg:
        request_id = f"{run.ask.request_id}-{run.record.attempts}-{role}"
        headers = {"Content-Type": "application/json", **run.ask.headers, "X-Request-Id": request_id}
        if role == "decode" and run.decode_rank is not None:
            headers["X-data-parallel-rank"] = run.decode_rank
        if engine.api_key:
            headers["Authorization"] = f"Bearer {engine.api_key}"
        return Leg(role, engine, request_id, self.session, headers)

    def _release_legs(self, run: _Run[Any], held: _Held) -> list[Leg] | None:
        """Release legs, the likeliest to work first; None if prefill is gone, and with it what it held."""
        assert self._connector is not None
        if self._connector.released_at is Side.PREFILL:
            return None if self._engines.has_left(held.prefill) else [self._leg(run, held.prefill, "release")]
        return [self._leg(run, engine, "release") for engine in takers(self._engines, held.decode)]


def _may_hold(fault: BaseException | None) -> bool:
    """Whether a prefill engine that failed in this way may hold KV: it has computed, and the answer was lost."""
    if not isinstance(fault, LegError):
        return True
    return fault.executed and fault.status not in _OF_THE_CLIENT
