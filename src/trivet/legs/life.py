"""The life of one generation: prefill leg, handover, decode leg; or one leg alone when it is served colocated.

``Legs`` is the ``TokenEngine`` under the render tier. Everything a generation holds is held by the task that runs
it: cancelling that task closes whichever leg is open, which makes the engine abort it, and KV that a finished
prefill leg keeps for a decode leg that will not come is released. A leg that failed is tried elsewhere while the
client has seen nothing of the answer; afterwards the failure is the client's to see.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from trivet.connectors import Connector
from trivet.journal import GenerationRecord, RequestRecord, current_request, now_s
from trivet.legs.bodies import decode_body, first_token_may_be_handed_over, prefill_body
from trivet.legs.wire import LegError, generate, stream
from trivet.render.contract import ServingError, TokenChunk, TokenRequest
from trivet.routing.choose import Route, choose
from trivet.routing.engines import Engines, EngineView

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_RELEASE_TIMEOUT_S = 5.0
_REFUSALS = frozenset({400, 413, 422})
"""The request itself is at fault: another engine would say the same. Other statuses are the engine's own trouble."""

Observer = Callable[[GenerationRecord, RequestRecord | None], None]


@dataclass(slots=True)
class _Held:
    """What a prefill engine keeps for this generation until decode has taken it."""

    prefill: EngineView
    params: Mapping[str, Any]


class Legs:
    """Runs generations on the fleet's engines."""

    def __init__(
        self,
        engines: Engines,
        session: aiohttp.ClientSession,
        connector: Connector | None,
        observe: Observer = lambda *_: None,
    ) -> None:
        """
        Args:
            engines: whose engines are chosen from.
            session: the HTTP session of the legs; closed by its owner.
            connector: what moves KV between prefill and decode; None serves everything colocated.
            observe: called with the record of each generation that ended.
        """
        self._engines = engines
        self.session = session
        self._connector = connector
        self._observe = observe
        self._background: set[asyncio.Task[None]] = set()
        self.releases_pending = 0
        """KV hand-overs that nobody took and that are being released."""

    async def run(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """Generates. See ``TokenEngine.run``."""
        owner = current_request.get()
        record = GenerationRecord(request.request_id, len(request.token_ids), now_s())
        if owner is not None:
            owner.generations.append(record)
        try:
            if owner is not None and owner.colocate and request.unsplittable is None:
                request = replace(request, unsplittable=owner.colocate)
            async with aclosing(self._attempts(request, record)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids and record.first_token_s is None:
                        record.first_token_s = now_s()
                    record.completion_tokens += len(chunk.token_ids)
                    if chunk.finish_reason:
                        record.finish_reason = chunk.finish_reason
                        record.end_s = now_s()
                    yield chunk
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
            record.end_s = record.end_s or now_s()
            self._observe(record, owner)

    async def close(self) -> None:
        """Waits for releases that are under way, and gives up on those that take too long."""
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=_RELEASE_TIMEOUT_S)
            for task in late:
                task.cancel()

    async def _attempts(self, request: TokenRequest, record: GenerationRecord) -> AsyncGenerator[TokenChunk, None]:
        avoid: frozenset[str] = frozenset()
        colocate = request.unsplittable
        if colocate is None and self._connector is None:
            colocate = "the topology has no connector"
        faults: list[str] = []
        while len(faults) < _ATTEMPTS:
            if len(faults) == _ATTEMPTS - 1 and colocate is None:
                colocate = "split failed"  # the last attempt asks for as little as can be
            route = choose(self._engines, colocate=colocate, avoid=avoid)
            if route is None:
                break
            for engine in (route.prefill, route.decode):
                if engine is not None:
                    self._engines.take_turn(engine)
            record.split = route.prefill is not None
            record.reason = f"{route.reason} ({'; '.join(faults)})" if faults else route.reason
            record.decode_engine = route.decode.name
            record.prefill_engine = route.prefill.name if route.prefill else None
            record.prefill_start_s = record.prefill_end_s = record.cached_tokens = None  # of an attempt that failed
            try:
                async with aclosing(self._on_route(request, route, record)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except LegError as fault:
                if record.first_token_s is not None or record.completion_tokens:
                    raise ServingError(f"the answer broke off: {fault}", status=502) from fault
                if fault.status in _REFUSALS:
                    raise ServingError(str(fault), status=fault.status) from fault
                logger.warning("generation %s: %s; trying elsewhere", request.request_id, fault)
                faults.append(str(fault))
                if record.split and fault.engine == route.decode.name and fault.status is not None:
                    # it lives and answered: what it could not do is take the KV (``kv_load_failure_policy: fail``)
                    colocate = "the KV transfer failed"
                else:
                    avoid |= {fault.engine}
        if faults:
            raise ServingError(f"no engine could serve this request: {'; '.join(faults)}", status=502)
        raise ServingError("no engine is ready to serve this request", status=503)

    async def _on_route(
        self, request: TokenRequest, route: Route, record: GenerationRecord
    ) -> AsyncGenerator[TokenChunk, None]:
        if route.prefill is None:
            with self._engines.charge(route.decode, _tokens(request)):
                async with aclosing(self._decode(request, route.decode, None)) as chunks:
                    async for chunk in chunks:
                        if chunk.cached_tokens is not None:
                            record.cached_tokens = chunk.cached_tokens
                            chunk = _with_cache_counts(chunk, request, route.decode, chunk.cached_tokens)
                        yield chunk
            return

        assert self._connector is not None
        seeded = self._connector.hands_over_first_token and first_token_may_be_handed_over(request)
        record.prefill_start_s = now_s()
        with self._engines.charge(route.prefill, len(request.token_ids)):
            async with self._in_service(route.prefill):
                answer = await generate(
                    self.session,
                    route.prefill.name,
                    route.prefill.url,
                    prefill_body(request, self._connector.prefill_params(), sample=seeded),
                    _headers(request, route.prefill, "prefill"),
                )
        record.prefill_end_s = now_s()
        record.cached_tokens = _cached_tokens(answer)
        answered = answer.get("kv_transfer_params")
        held = _Held(route.prefill, answered) if answered else None
        first: tuple[int, ...] = ()

        def accepted() -> None:
            nonlocal held
            held = None  # from here on decode tells prefill, also when it is aborted or cannot read

        try:
            params = self._connector.decode_params(answered)
            if params is None:
                held = None
                record.split, record.cached_tokens = False, None
                record.reason = f"{route.prefill.name} handed nothing over"
            elif seeded:
                choice = answer["choices"][0]
                first = tuple(choice["token_ids"])
                stopped = choice.get("finish_reason") == "stop" or request.sampling.get("max_tokens") == 1
                seed = TokenChunk(
                    first,
                    finish_reason=choice["finish_reason"] if stopped else None,
                    stop_reason=choice.get("stop_reason"),
                )
                yield _with_cache_counts(seed, request, route.prefill, record.cached_tokens)
                if stopped:
                    return
            with self._engines.charge(route.decode, _tokens(request)):
                begun = bool(first)
                async with aclosing(self._decode(request, route.decode, params, first, accepted)) as chunks:
                    async for chunk in chunks:
                        if params is not None:  # prefill computed the prompt, so its count is the true one
                            computed_by, cached = route.prefill, None if begun else record.cached_tokens
                        else:
                            computed_by, cached = route.decode, chunk.cached_tokens
                            record.cached_tokens = cached if cached is not None else record.cached_tokens
                        begun = True
                        yield _with_cache_counts(chunk, request, computed_by, cached)
        finally:
            if held is not None:
                self._release(request, held, route.decode)

    async def _decode(
        self,
        request: TokenRequest,
        engine: EngineView,
        params: Mapping[str, Any] | None,
        after: tuple[int, ...] = (),
        accepted: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[TokenChunk, None]:
        body, headers = decode_body(request, params, after=after), _headers(request, engine, "decode")
        async with aclosing(stream(self.session, engine.name, engine.url, body, headers, accepted)) as chunks:
            while True:
                async with self._in_service(engine):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk

    @asynccontextmanager
    async def _in_service(self, engine: EngineView) -> AsyncGenerator[None, None]:
        """Ends what is awaited inside with a ``LegError`` when the fleet takes the engine out of service.

        A host that lost its power closes no connection: without this a leg would wait for ever.
        """
        try:
            async with asyncio.timeout(None) as limit:
                with self._engines.watching(engine, lambda: limit.reschedule(0) if limit.when() is None else None):
                    yield
        except TimeoutError:
            raise LegError(engine.name, "went out of service") from None

    def _release(self, request: TokenRequest, held: _Held, last_resort: EngineView) -> None:
        """Lets prefill free KV that nobody will pull, in the background; ``last_resort`` has just failed to."""
        assert self._connector is not None
        params = self._connector.release_params(held.params)
        if params is None:
            return
        engines = sorted(self._engines.ready("decode"), key=lambda engine: engine.name == last_resort.name)
        self.releases_pending += 1
        task = asyncio.create_task(self._release_now(request, params, engines), name=f"release {request.request_id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release_now(
        self, request: TokenRequest, params: Mapping[str, Any], engines: Sequence[EngineView]
    ) -> None:
        # A salt of its own: should prefill have freed the blocks already, decode must not cache what it reads there.
        releasing = replace(
            request,
            sampling={"max_tokens": 1, "temperature": 0.0, "detokenize": False},
            cache_salt=f"release-{uuid.uuid4().hex}",
        )
        body = decode_body(releasing, params)
        try:
            for engine in engines:
                headers = _headers(request, engine, "release")
                try:
                    async with (
                        asyncio.timeout(_RELEASE_TIMEOUT_S),
                        aclosing(stream(self.session, engine.name, engine.url, body, headers)) as chunks,
                    ):
                        async for _ in chunks:
                            pass
                    return
                except (LegError, TimeoutError) as error:
                    problem = str(error) or "too slow"
                    logger.warning("releasing KV of %s at %s: %s", request.request_id, engine.name, problem)
            logger.warning("KV of %s is left to its lease: no decode engine could release it", request.request_id)
        finally:
            self.releases_pending -= 1


def _tokens(request: TokenRequest) -> int:
    return len(request.token_ids) + int(request.sampling.get("max_tokens") or 0)


def _with_cache_counts(
    chunk: TokenChunk, request: TokenRequest, engine: EngineView, cached_tokens: int | None
) -> TokenChunk:
    """The chunk with the cache counts of the engine that computed the prompt; without any if that is unknown."""
    created = None if cached_tokens is None else engine.created_cache_tokens(len(request.token_ids), cached_tokens)
    return replace(chunk, cached_tokens=cached_tokens, created_cache_tokens=created)


def _headers(request: TokenRequest, engine: EngineView, leg: str) -> dict[str, str]:
    headers = {**request.headers, "Content-Type": "application/json", "X-Request-Id": f"{request.request_id}-{leg}"}
    if engine.api_key:
        headers["Authorization"] = f"Bearer {engine.api_key}"
    return headers


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return int(cached) if cached is not None else None
