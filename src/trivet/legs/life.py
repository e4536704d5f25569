"""The life of one generation: prefill leg, handover, decode leg; or one leg alone when it is served colocated.

Everything a generation holds is held by the task that runs it: cancelling that task closes whichever leg is open,
which makes the engine abort it, and KV that a finished prefill leg keeps for a decode leg that will not come is
released. The rules of what is tried again:

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
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import aiohttp

from trivet.connectors import Connector
from trivet.journal import GenerationRecord, RequestRecord, current_request, now_s
from trivet.legs.ask import Ask, Computed, Leg, Piece, Prefilled
from trivet.legs.release import Releases, takers
from trivet.legs.tokens import TokenAsk
from trivet.legs.watch import Patience, watch
from trivet.legs.wire import LegError, reading
from trivet.render.contract import ServingError, TokenChunk, TokenRequest
from trivet.routing.choose import Route, choose
from trivet.routing.engines import Engines, EngineView

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_DEATHS = 2
_NOTICE_S, _NOTICE_POLL_S = 0.6, 0.05
"""How long the fleet may take to see that an engine has ended; it looks every 0.3 s."""
_NOT_FOUND = 404
"""What an engine says that lacks an adapter: another may have it."""
_REFUSALS = frozenset({400, 413, 422})
"""The request itself is at fault: another engine would say the same. Other statuses are the engine's own trouble."""

Observer = Callable[[GenerationRecord, RequestRecord | None], None]


@dataclass(slots=True)
class _Run(Generic[Piece]):
    """A generation under way: what is asked, and what was tried for it."""

    ask: Ask[Piece]
    record: GenerationRecord
    patience: Patience
    colocate: str | None
    """Why the next attempt is not split."""
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
    ) -> None:
        """
        Args:
            engines: whose engines are chosen from.
            session: the HTTP session of the legs; closed by its owner.
            connector: what moves KV between prefill and decode; None serves everything colocated.
            observe: called with the record of each generation that ended.
            patience: how long legs are waited for.
            obstacle: why no answer of these engines may be continued on another, or None.
        """
        self._obstacle = obstacle
        self._engines = engines
        self.session = session
        self._connector = connector
        self._observe = observe
        self._patience = patience or Patience()
        self.releases = Releases(engines, connector)
        self.running = 0
        """Generations under way."""

    async def run(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """Generates in token ids. See ``TokenEngine.run``."""
        owner = current_request.get()
        if owner is None or not owner.may_steer:  # the gateway has refused those that say such a thing
            request = replace(request, kv_transfer_params=None, ec_transfer_params=None)
        unsplittable = request.unsplittable or (owner.colocate if owner is not None else None)
        if request.kv_transfer_params is not None:
            unsplittable = "the client steers the transfer"
        headers = dict(owner.forwarded) if owner is not None else {}
        if request.session_id is not None:
            headers["x-session-id"] = request.session_id
        ask = TokenAsk(request, headers, unsplittable, self._obstacle)
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
            patience = replace(patience, deadline_s=owner.deadline_s)
        colocate = ask.unsplittable
        if colocate is None and self._connector is None:
            colocate = "the topology has no connector"
        run = _Run(ask, record, patience, colocate, owner.decode_rank if owner is not None else None)
        self.running += 1
        try:
            async with aclosing(self._attempts(run)) as pieces:
                async for piece in pieces:
                    ask.note(record, piece)
                    yield piece
        except ServingError as error:
            record.error = error.message
            raise
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            record.finish_reason = record.finish_reason or "abort"
            raise
        finally:
            self.running -= 1
            record.end_s = record.end_s or now_s()
            logger.info(
                "request %s: %s, %d + %d tokens, %s, generation %s",
                owner.request_id if owner is not None else "-",
                record.error or record.finish_reason,
                record.prompt_tokens,
                record.completion_tokens,
                f"{record.prefill_engine or record.reason} -> {record.decode_engine}",
                record.generation_id,
            )
            self._observe(record, owner)

    async def close(self) -> None:
        """Waits for releases that are under way, and gives up on those that take too long."""
        await self.releases.close()

    async def _attempts(self, run: _Run[Piece]) -> AsyncGenerator[Piece, None]:
        while run.executed < _ATTEMPTS and not await self._kills(run):
            if run.executed == _ATTEMPTS - 1 and run.colocate is None:
                run.colocate = "split failed"  # the last attempt asks for as little as can be
            route = choose(self._engines, colocate=run.colocate, avoid=frozenset(run.avoid))
            if route is None and self._forgives(run):
                route = choose(self._engines, colocate=run.colocate, avoid=frozenset(run.avoid))
            if route is None:
                break
            self._begin(run, route)
            attempt = self._split(run, route.prefill, route.decode) if route.prefill else self._colocated(run, route)
            try:
                async with aclosing(attempt) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except LegError as fault:
                self._learn(run, route, fault)
                logger.warning("generation %s: %s; trying elsewhere", run.ask.request_id, fault)
        raise run.error()

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

    def _begin(self, run: _Run[Any], route: Route) -> None:
        for engine in (route.prefill, route.decode):
            if engine is not None:
                self._engines.take_turn(engine)
                run.asked[engine.name] = engine
        record = run.record
        record.attempts += 1
        record.resumes += run.ask.begun
        record.split = route.prefill is not None
        record.reason = f"{route.reason} ({run.told()})" if run.faults else route.reason
        record.decode_engine = route.decode.name
        record.prefill_engine = route.prefill.name if route.prefill else None
        if not run.ask.begun:
            record.prefill_start_s = record.prefill_end_s = record.cached_tokens = None  # of an attempt that failed

    def _learn(self, run: _Run[Any], route: Route, fault: LegError) -> None:
        """Decides what a fault means for the next attempt.

        Raises:
            ServingError: there is none.
        """
        begun = run.ask.begun
        if begun and (obstacle := run.ask.obstacle) is not None:
            raise ServingError(
                f"the answer broke off: {fault}; it cannot be continued on another engine ({obstacle})",
                status=502,
                error=fault.error,
            ) from fault
        answered = fault.status is not None and fault.executed and not fault.died
        of_prefill = route.prefill is not None and fault.engine == route.prefill.name
        if of_prefill and fault.status in _REFUSALS and not begun and not run.ask.prefill_speaks_for_decode:
            run.faults.append(fault)
            run.colocate = "prefill refused it"
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

    async def _colocated(self, run: _Run[Piece], route: Route) -> AsyncGenerator[Piece, None]:
        with self._engines.charge(route.decode, run.ask.tokens):
            async with aclosing(self._decode(run, route.decode, None, None)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _split(self, run: _Run[Piece], prefill: EngineView, decode: EngineView) -> AsyncGenerator[Piece, None]:
        assert self._connector is not None
        record, start_s = run.record, now_s()
        prefilled = await self._prefill(run, prefill)
        if record.first_token_s is None:
            record.prefill_start_s, record.prefill_end_s = start_s, now_s()
            record.cached_tokens = prefilled.cached_tokens
        with reading(prefill.name):
            params = self._connector.decode_params(prefilled.kv_transfer_params)
        held: Prefilled[Piece] | None = prefilled  # what prefill keeps until decode has taken it
        computed: Computed | None = Computed(prefill, prefilled.cached_tokens)

        def accepted() -> None:
            nonlocal held
            held = None  # from here on decode tells prefill, also when it is aborted

        try:
            if params is None:
                if not self._connector.decode_serves_whole:
                    raise LegError(prefill.name, "handed nothing over", status=502)
                held = computed = None
                record.split, record.cached_tokens = False, None
                record.reason = f"{prefill.name} handed nothing over"
            elif prefilled.first is not None:
                yield prefilled.first
                if prefilled.finished:
                    return
            while True:
                taken = False
                try:
                    with self._engines.charge(decode, run.ask.tokens):
                        decoding = self._decode(run, decode, params, computed, accepted)
                        async with aclosing(decoding) as pieces:
                            async for piece in pieces:
                                taken = True
                                yield piece
                    return
                except LegError as fault:
                    if not taken and params is not None:
                        held = prefilled  # it may have ended before it took the KV
                    if taken or fault.executed:
                        raise
                    other = choose(self._engines, colocate=None, avoid=frozenset({*run.avoid, fault.engine}))
                    if other is None or other.prefill is None:
                        raise
                    run.faults.append(fault)
                    run.avoid.add(fault.engine)
                    decode = other.decode  # what was prefilled is not prefilled again
                    self._engines.take_turn(decode)
                    run.asked[decode.name] = decode
                    record.decode_engine = decode.name
        finally:
            if held is not None:
                self.releases.release(run.ask, held, self._release_legs(run, decode))

    async def _prefill(self, run: _Run[Piece], engine: EngineView) -> Prefilled[Piece]:
        assert self._connector is not None
        ask, leg = run.ask, self._leg(run, engine, "prefill")
        sample = self._connector.hands_over_first_token and ask.may_take_first_token
        # a task of its own: an answer that is on its way when the client leaves says what must be released
        call = asyncio.create_task(ask.prefill(leg, self._connector.prefill_params(), sample=sample))
        try:
            with self._engines.charge(engine, ask.prompt_tokens), watch(self._engines, engine, run.patience) as patient:
                async with patient:
                    return await asyncio.shield(call)
        except BaseException:
            if not call.done() or (not call.cancelled() and call.exception() is None):
                self.releases.abandon(ask, leg, call, self._release_legs(run, None))
            raise

    async def _decode(
        self,
        run: _Run[Piece],
        engine: EngineView,
        params: Mapping[str, Any] | None,
        computed: Computed | None,
        accepted: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Piece, None]:
        leg = self._leg(run, engine, "decode")
        patience = replace(run.patience, silence_s=None) if run.ask.is_told_at_once(params) else run.patience
        ended = False
        try:
            async with aclosing(run.ask.decode(leg, params, computed, accepted)) as pieces:
                with watch(self._engines, engine, patience) as patient:
                    while True:
                        async with patient:
                            piece = await anext(pieces, None)
                        if piece is None:
                            break
                        yield piece
            ended = True
        except LegError as fault:
            ended = fault.status is not None or not fault.executed
            raise
        finally:
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

    def _release_legs(self, run: _Run[Any], last_resort: EngineView | None) -> list[Leg]:
        return [self._leg(run, engine, "release") for engine in takers(self._engines, last_resort)]
