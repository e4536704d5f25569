"""Ending what a generation leaves behind at engines: legs nobody waits for, and KV that nobody will pull.

All of it runs in the background, bounded in time, and is counted until it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from trivet.connectors import Connector
from trivet.journal import now_s
from trivet.legs.ask import Ask, Leg, Prefilled
from trivet.legs.ending import end
from trivet.legs.wire import LegError, abort, reading
from trivet.routing.board import Count
from trivet.routing.engines import Engines, EngineView

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.6
"""A release leg that is not served by then is aborted by its id, which makes its engine tell prefill all the same, and
the next engine is asked: KV is free within two seconds also when decode is busy, or one or two decode engines hang."""
_LAST_S = 8.0
"""After that no release leg is waited for any more."""
_GRACE_S = 0.1
"""A prefill leg that ends by itself within that is not aborted: an abort that meets the end of its request inside vLLM
drops the answer, and with it where the KV is that is held then."""
_ABORT_AGAIN_S = (0.1, 0.2, 0.4, 0.8)
"""An abort that overtakes its request on the way finds nothing to end, so it is repeated."""
_CLOSE_S = 5.0


class Releases:
    """Ends legs and releases KV in the background."""

    def __init__(self, engines: Engines, connector: Connector | None) -> None:
        self._engines = engines
        self._connector = connector
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending = self._unconfirmed = 0

    @property
    def pending(self) -> int:
        """KV hand-overs of this worker that nobody took and that are being released."""
        return self._pending

    @pending.setter
    def pending(self, value: int) -> None:
        self._pending = value
        self._engines.board.write(Count.RELEASES_PENDING, value)

    @property
    def unconfirmed(self) -> int:
        """Those that no engine confirmed: prefill had freed the KV already, or holds it until its lease ends."""
        return self._unconfirmed

    @unconfirmed.setter
    def unconfirmed(self, value: int) -> None:
        self._unconfirmed = value
        self._engines.board.write(Count.RELEASES_UNCONFIRMED, value)

    def abort(self, ask: Ask[Any], leg: Leg) -> None:
        """Has an engine end a leg whose connection is closed already, where it has an endpoint for that."""
        if leg.engine.aborts:
            self._start(abort(leg.session, leg.engine, ask.engine_id(leg)))

    def abandon(
        self,
        ask: Ask[Any],
        leg: Leg,
        call: asyncio.Task[Prefilled[Any]],
        spare: Sequence[Leg] | None,
        unanswered: Prefilled[Any] | None = None,
    ) -> None:
        """Ends a prefill leg that nobody waits for any more; KV that it has handed over by then is released.

        Args:
            spare: release legs, as in ``release``; None if nothing is held, or decode tells prefill itself.
            unanswered: what is released where the answer is lost, as it is when an abort meets the end of its request
                inside vLLM; None if only the answer says what is held.
        """
        self._start(self._abandon(ask, leg, call, spare, unanswered))

    def release(self, ask: Ask[Any], prefilled: Prefilled[Any], legs: Sequence[Leg] | None) -> None:
        """Lets prefill free KV that nobody will pull.

        Args:
            prefilled: what prefill answered.
            legs: release legs, one of which is enough; the likeliest to work first. None if nothing is held.
        """
        params = None
        if legs is None:
            return
        if self._connector is not None and prefilled.kv_transfer_params:
            with contextlib.suppress(LegError), reading(ask.request_id):
                params = self._connector.release_params(prefilled.kv_transfer_params)
        if params is None:
            return
        self.pending += 1
        self._start(self._release(ask, params, prefilled.prompt, legs))

    async def close(self) -> None:
        """Waits for what is under way, and gives up on what takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._tasks:  # one may begin another
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abandon(
        self,
        ask: Ask[Any],
        leg: Leg,
        call: asyncio.Task[Prefilled[Any]],
        spare: Sequence[Leg] | None,
        unanswered: Prefilled[Any] | None,
    ) -> None:
        try:
            ended, _ = await asyncio.wait([call], timeout=_GRACE_S)
            if not ended and leg.engine.aborts:
                # not closed at once: an answer that is on its way says where the KV is that must be released
                for pause_s in _ABORT_AGAIN_S:
                    await abort(leg.session, leg.engine, ask.engine_id(leg))
                    if (await asyncio.wait([call], timeout=pause_s))[0]:
                        break
        finally:
            await end(call)  # closes the connection, on which every vLLM aborts
        held = unanswered if call.cancelled() or call.exception() is not None else call.result()
        if held is not None:
            self.release(ask, held, spare)

    async def _release(self, ask: Ask[Any], params: Mapping[str, Any], prompt: Any, legs: Sequence[Leg]) -> None:
        trying: dict[asyncio.Task[None], Leg] = {}
        kept = contextlib.ExitStack()
        try:
            for leg in legs:
                kept.enter_context(self._engines.charge(leg.engine, 0))  # one that leaves is not stopped meanwhile
                trying[asyncio.create_task(ask.release(leg, params, prompt))] = leg
                if await self._released(ask, trying, _PATIENCE_S):
                    return
                if leg in trying.values():
                    # An engine that is only busy tells prefill now. Its connection stays open: a request that is closed
                    # before it has come as far as the engine's queue tells nobody.
                    self.abort(ask, leg)
            deadline_s = now_s() + _LAST_S
            while trying and (rest_s := deadline_s - now_s()) > 0:
                if await self._released(ask, trying, rest_s):
                    return
            self.unconfirmed += 1
            logger.warning("KV of %s: no engine confirmed its release", ask.request_id)
        except Exception:  # in the background nobody else would say so
            self.unconfirmed += 1
            logger.exception("releasing KV of %s", ask.request_id)
        finally:
            kept.close()
            self.pending -= 1
            for task in trying:
                task.cancel()
            for task in trying:
                await end(task)

    async def _released(self, ask: Ask[Any], trying: dict[asyncio.Task[None], Leg], seconds: float) -> bool:
        """Waits for a release leg to end; whether prefill has been told. Legs that failed are taken out."""
        done, _ = await asyncio.wait(trying, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        told = False
        for task in done:
            trying.pop(task)
            error = task.exception()
            if error is None or (isinstance(error, LegError) and error.ended_by_abort):
                told = True
            elif isinstance(error, LegError):
                logger.warning("releasing KV of %s: %s", ask.request_id, error)
            else:
                raise error
        return told


def takers(engines: Engines, last_resort: EngineView | None) -> list[EngineView]:
    """Engines that can take KV to release it; ``last_resort`` has just failed."""
    name = last_resort.name if last_resort else None
    return sorted(engines.serving("decode"), key=lambda engine: (engine.leaving, engine.name == name))
