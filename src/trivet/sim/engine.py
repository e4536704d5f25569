"""The simulated engine: vLLM's HTTP surface as far as a gateway uses it, over a scheduler that only pretends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from trivet.errors import MissingPackageError, PortInUseError, TrivetError
from trivet.routing.engines import EngineView
from trivet.sim.asks import RefusedError, error_facts
from trivet.sim.connector import Connector
from trivet.sim.exchange import ENDPOINTS, Exchange, status_response
from trivet.sim.faults import Fault, Faults
from trivet.sim.handover import PULL_PATH, RELEASE_PATH, Handovers
from trivet.sim.pool import BlockPool
from trivet.sim.record import RequestLog, SimState, leg_of
from trivet.sim.scheduler import End, Scheduler
from trivet.sim.settings import TRIVET, SimEvents, SimSettings
from trivet.sim.stats import Stats
from trivet.sim.transfer import OPEN_PATH, Transfers, own_address

if TYPE_CHECKING:
    from trivet.sim.events import Publisher

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_GUARDED = ("/v1", "/v2", "/inference")
_CONTROL = ("/sim/faults", "/sim/state")
_LARGEST_BODY_BYTES = 256 * 2**20
_PORT_AGAIN_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_KEEPALIVE_S = 5.0
"""As vLLM's ``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``."""
_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class SimEngine:
    """A simulated engine that listens inside ``async with``."""

    def __init__(
        self,
        settings: SimSettings | None = None,
        *,
        name: str = "sim",
        tier: str = "mixed",
        on_exit: Callable[[int], None] | None = None,
    ) -> None:
        """
        Args:
            settings: without them it answers as fast as it can, on a free port.
            on_exit: ends the process, for the fault ``exit``; without it the engine only looks as if it had ended:
                nothing listens, and every connection is cut.
        """
        self.settings = settings or SimSettings()
        self.name = name
        self.tier = tier
        self.generation = 1
        self.faults = Faults(self._refuse, self._mute)
        self._on_exit = on_exit
        self._port = self.settings.port
        self._kv_address = self.settings.kv_address or own_address()
        self._log = RequestLog(self.settings.keep_requests)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._listening_again: asyncio.Task[None] | None = None
        self._in_use: Counter[asyncio.BaseTransport] = Counter()
        self._served: Counter[asyncio.BaseTransport] = Counter()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_up = False
        self._ended = asyncio.Event()
        self._new_core()

    def _new_core(self) -> None:
        settings = self.settings
        self.stats = Stats(settings)
        self.events = events = self._new_events()
        self.pool = BlockPool(
            settings.num_blocks,
            caching=settings.enable_prefix_caching,
            evicted=events.removed if events is not None else lambda _: None,
        )
        self.engine_id = uuid.uuid4().hex
        self.connector = self._new_connector()
        self.scheduler = Scheduler(settings, self.pool, self.stats, self.connector, events)

    def _new_events(self) -> Publisher | None:
        if self.settings.kv_events is None:
            return None
        try:
            from trivet.sim.events import Publisher
        except ImportError as error:
            raise MissingPackageError(
                f"a simulated engine's KV events need pyzmq and msgspec ({error})", mend="pip install pyzmq msgspec"
            ) from None
        return Publisher(self.settings.kv_events, self.settings.block_size)

    def _new_connector(self) -> Connector:
        settings = self.settings
        if not settings.kv_transfer:
            return Connector()
        if settings.kv_connector == TRIVET:
            return Transfers(
                settings,
                self.pool,
                self.stats,
                address=self._kv_address,
                scheduler=lambda: self.scheduler,
                strike=lambda leg: self.faults.strike(path=OPEN_PATH, leg=leg, reused=False),
                die=self.exit,
            )
        return Handovers(
            settings,
            self.pool,
            self.stats,
            engine_id=self.engine_id,
            address=lambda: (settings.kv_host or _reachable(settings.host), self._port),
            freed=lambda: self.scheduler.wake(),
        )

    # as others see it

    @property
    def url(self) -> str:
        """Where it listens."""
        host = _reachable(self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def is_up(self) -> bool:
        """Whether it serves: started, not stopped, and not dead by a fault."""
        return self._is_up

    def view(self, *, ready: bool | None = None) -> EngineView:
        """The engine as a gateway worker knows it; ready while it is up, unless told otherwise."""
        return EngineView(
            name=self.name,
            tier=self.tier,
            url=self.url,
            ready=self._is_up if ready is None else ready,
            generation=self.generation,
            cached_block_tokens=self.settings.block_size if self.settings.enable_prefix_caching else None,
            api_key=self.settings.api_key,
            aborts=not self.settings.is_old,
            kv_address=self.connector.address,
            kv_events=_heard_at(self.settings.kv_events),
        )

    def state(self) -> SimState:
        """What it does and has done.

        Raises:
            AssertionError: blocks of its pool are missing.
        """
        pool, connector = self.pool, self.connector
        assert pool.free + pool.used + pool.held == pool.total, "blocks are missing"
        return SimState(
            name=self.name,
            tier=self.tier,
            vllm_version=self.settings.vllm_version,
            generation=self.generation,
            now_s=time.monotonic(),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            fetching=len(self.scheduler.fetching),
            executions=dict(self.stats.executions),
            computed_prompt_tokens=dict(self.stats.computed_prompt_tokens),
            preemptions=self.stats.preemptions,
            pool={
                "total": pool.total,
                "free": pool.free,
                "used": pool.used,
                "held": pool.held,
                "cached": pool.cached,
                "block_size": self.settings.block_size,
            },
            connector=connector.name,
            handovers={
                **asdict(connector.counts),
                "recomputed": self.stats.recomputed,
                "open": connector.open,
            },
            requests=self._log.all(),
        )

    async def idle(self, timeout_s: float = 5.0, *, nothing_held: bool = False) -> None:
        """Returns when no request runs, waits or is being answered.

        Args:
            nothing_held: wait for the blocks that are held for decode as well.

        Raises:
            TimeoutError: it was not idle in time; says what it was busy with.
            AssertionError: the books of its pool are wrong.
        """
        deadline = time.monotonic() + timeout_s
        while self.scheduler.unfinished() or self._answering() or (nothing_held and self.connector.open):
            if time.monotonic() > deadline:
                state = self.state()
                busy = {key: getattr(state, key) for key in ("running", "waiting", "fetching", "pool", "handovers")}
                raise TimeoutError(f"{self.name} was not idle after {timeout_s:g} s: {busy}")
            await asyncio.sleep(0.005)
        self.pool.check()

    def _answering(self) -> bool:
        return any(one.ended_s is None for one in self._log.all())

    # its life

    async def __aenter__(self) -> SimEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begins to listen.

        Raises:
            PortInUseError: someone else listens on its port.
            TrivetError: it cannot listen at its address.
        """
        application = web.Application(middlewares=[self._middleware], client_max_size=_LARGEST_BODY_BYTES)
        for path in ENDPOINTS:
            application.router.add_post(path, self._generate)
        for path in ("/health", "/ping"):
            application.router.add_get(path, self._health)
        application.router.add_get("/version", self._version)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/v1/models", self._models)
        if not self.settings.is_old:
            application.router.add_post("/inference/v1/abort_requests", self._abort)
        if isinstance(self.connector, Handovers):
            application.router.add_post(PULL_PATH, self._pull)
            application.router.add_post(RELEASE_PATH, self._release)
        application.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        application.router.add_get("/sim/state", self._tell_state)
        application.router.add_get("/sim/faults", self._tell_faults)
        application.router.add_post("/sim/faults", self._add_faults)
        application.router.add_delete("/sim/faults", self._clear_faults)
        application.router.add_delete("/sim/faults/{number}", self._remove_fault)
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            keepalive_timeout=_KEEPALIVE_S,
            access_log=None,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        try:
            if self.events is not None:
                await self.events.open()
            await self._listen()
        except BaseException:
            if self.events is not None:
                await self.events.close()
            await self._runner.cleanup()
            raise
        self.scheduler.start()
        self._ended = asyncio.Event()
        self._is_up = True

    async def stop(self) -> None:
        """Ends at once: connections are cut, requests aborted."""
        self._disappear()
        if self._listening_again is not None:
            await self._listening_again
            self._listening_again = None
        await self.scheduler.stop()
        if self.events is not None:
            await self.events.close()
        await self.connector.close()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Starts anew after it died or was stopped: same address, empty pool, new engine id, next generation."""
        await self.stop()
        self.generation += 1
        self._log.clear()
        self._new_core()
        for pause_s in _PORT_AGAIN_S:  # somebody's outgoing connection may have been given the port for a moment
            with contextlib.suppress(PortInUseError):
                await self.start()
                return
            await asyncio.sleep(pause_s)
        await self.start()

    def exit(self, status: int = 1) -> None:
        """Dies, as a process does."""
        if self._on_exit is not None:
            self._on_exit(status)
        self._disappear()
        self._in_background(self.scheduler.stop())

    def abort(self, *request_ids: str) -> int:
        """Aborts requests by vLLM's ids (``generate-tokens-`` and the ``X-Request-Id``); how many ran or waited."""
        found = [
            one
            for one in self.scheduler.unfinished()
            if any(one.name == wanted or one.name.rpartition("-")[0] == wanted for wanted in request_ids)
        ]
        for sequence in found:
            self.scheduler.finish(sequence, End.ABORT)
        return len(found)

    async def _listen(self) -> None:
        assert self._runner is not None
        host, server = self.settings.host, self._runner.server
        assert server is not None
        await self.connector.listen()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                server, host, self._port, reuse_address=True, backlog=512
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"port {self._port} of {host} is taken", mend="another --port, or --port 0 for a free one"
                ) from None
            raise TrivetError(
                f"cannot listen on {host} port {self._port}: {error.strerror or error}", mend="another --host or --port"
            ) from None
        self._port = self._listener.sockets[0].getsockname()[1]

    def _mute(self, seconds: float) -> None:
        if self.events is not None:
            self.events.mute(seconds)

    def _refuse(self, seconds: float) -> None:
        """Closes the listening socket and idle connections; listens again after a time."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        self.connector.stop_listening()
        for transport in self._transports():
            if not self._in_use[transport]:
                transport.abort()

        async def listen_again() -> None:
            ended = self._ended
            pauses = iter(_PORT_AGAIN_S)
            pause_s: float | None = seconds
            # never cancelled, as what opens a socket would leave it open
            while pause_s is not None and self._listener is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await ended.wait()
                if ended.is_set():
                    return
                with contextlib.suppress(TrivetError):
                    await self._listen()
                pause_s = next(pauses, None)
            if ended.is_set() and self._listener is not None:
                self._listener.close()
                self._listener = None

        self._listening_again = asyncio.create_task(listen_again(), name=f"{self.name} listens again")

    def _disappear(self) -> None:
        self._is_up = False
        self._ended.set()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.connector.cut()
        if self.events is not None:
            self.events.cut()
        for transport in self._transports():
            transport.abort()

    def _transports(self) -> list[asyncio.WriteTransport]:
        server = self._runner.server if self._runner is not None else None
        connections = server.connections if server is not None else []
        return [one.transport for one in connections if isinstance(one.transport, asyncio.WriteTransport)]

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # what its requests need of it

    def check_admission(self, body: Mapping[str, Any]) -> None:
        """Refuses a request if too many are unfinished.

        Raises:
            RefusedError: 503.
        """
        limit = self.settings.max_num_queued_reqs
        sampling = body.get("sampling_params", body)
        n = sampling.get("n") if isinstance(sampling, Mapping) else None
        wanted = n if isinstance(n, int) else 1
        if limit is not None and len(self.scheduler.unfinished()) + wanted > limit:
            self.stats.rejections += 1
            raise RefusedError(_BUSY, status=503, kind="Service Unavailable")

    def cut(self, request: web.Request) -> None:
        """Closes the connection of a request without another word."""
        if request.transport is not None:
            request.transport.abort()

    # HTTP

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        if transport is None or not self._is_up:
            raise ConnectionResetError
        reused = self._served[transport] > 0
        self._served[transport] += 1
        self._in_use[transport] += 1
        try:
            if not self._is_authorised(request):
                return web.json_response({"error": "Unauthorized"}, status=401)
            if request.path.startswith("/inference") and not self.settings.enable_scale_out:
                if self.settings.is_old:
                    return web.json_response({"detail": "Not Found"}, status=404)
                return web.json_response(error_facts(_DISABLED, "PermissionDeniedError", 403), status=403)
            return await self._struck(request, handler, reused)
        finally:
            self._in_use[transport] -= 1
            for gone in [one for one in self._served if one.is_closing()]:
                del self._served[gone], self._in_use[gone]

    async def _struck(self, request: web.Request, handler: Handler, reused: bool) -> web.StreamResponse:
        """Handles a request, with the fault that strikes it."""
        fault = None
        if not request.path.startswith(_CONTROL):
            leg = leg_of(request.headers.get("X-Request-Id"))
            fault = self.faults.strike(path=request.path, leg=leg, reused=reused)
        if request.path in ENDPOINTS and request.method == "POST":
            record = self._log.open(request.path, request.headers)
            response = await Exchange(self, request, record, fault).answer()
            if fault is not None and fault.kind == "close_idle":
                if not response.prepared:
                    await response.prepare(request)
                    await response.write_eof()
                asyncio.get_running_loop().call_soon(self._close_softly, request.transport)
            return response
        if fault is not None:
            if fault.kind == "status":
                return status_response(fault)
            if fault.kind == "hang":
                await asyncio.sleep(float("inf") if fault.for_s is None else fault.for_s)
            elif fault.kind == "exit":
                self.exit(fault.exit_status)
            if fault.kind in ("disconnect", "die", "exit"):
                self.cut(request)
                return web.Response()
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"detail": error.reason}, status=error.status)

    @staticmethod
    def _close_softly(transport: asyncio.Transport | None) -> None:
        if transport is not None:
            transport.close()

    def _is_authorised(self, request: web.Request) -> bool:
        key = self.settings.api_key
        if key is None or not request.path.startswith(_GUARDED):
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        told, own = token.encode(errors="surrogateescape"), key.encode()
        return scheme.lower() == "bearer" and hmac.compare_digest(told, own)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raise AssertionError(request.path)  # _struck serves these

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.settings.vllm_version})

    async def _metrics(self, _: web.Request) -> web.Response:
        scheduler = self.scheduler
        text = self.stats.text(
            self.pool,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            fetching=len(scheduler.fetching),
        )
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _models(self, _: web.Request) -> web.Response:
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": self.settings.model,
                "parent": None,
                "max_model_len": self.settings.max_model_len,
                "permission": [],
            }
            for name in self.settings.names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _json(request)
        ids = body.get("request_ids") if isinstance(body, dict) else None
        if ids is None:
            return web.json_response(
                error_facts("Missing 'request_ids' in request body", "Bad Request", 400), status=400
            )
        wanted = [ids] if isinstance(ids, str) else [str(one) for one in ids]
        asyncio.get_running_loop().call_soon(self.abort, *wanted)
        return web.Response()

    async def _pull(self, request: web.Request) -> web.Response:
        body = await _json(request)
        assert isinstance(self.connector, Handovers)
        problem = await self.connector.give(body if isinstance(body, dict) else {})
        return web.Response() if problem is None else web.json_response({"problem": problem}, status=409)

    async def _release(self, request: web.Request) -> web.Response:
        body = await _json(request)
        assert isinstance(self.connector, Handovers)
        return web.json_response({"held": self.connector.release(body if isinstance(body, dict) else {})})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        """As vLLM's, which serves it in development mode only."""
        if self.pool.clear() and self.events is not None:
            self.events.cleared()
        return web.Response()

    async def _tell_state(self, _: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(self.state().facts()), content_type="application/json")

    async def _tell_faults(self, _: web.Request) -> web.Response:
        return web.json_response([one.facts() for one in self.faults.all()])

    async def _add_faults(self, request: web.Request) -> web.Response:
        body = await _json(request)
        try:
            faults = [Fault.parse(one) for one in (body if isinstance(body, list) else [body])]
        except TrivetError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"ids": [self.faults.add(fault) for fault in faults]})

    async def _clear_faults(self, _: web.Request) -> web.Response:
        self.faults.clear()
        return web.Response(status=204)

    async def _remove_fault(self, request: web.Request) -> web.Response:
        number = request.match_info["number"]
        was_there = number.isdigit() and self.faults.remove(int(number))
        return web.Response(status=204 if was_there else 404)


async def _json(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError:
        return None


def _heard_at(events: SimEvents | None) -> tuple[str, str] | None:
    """How a gateway on the same machine reaches it."""
    if events is None:
        return None
    endpoint, replay = (one.replace("*", "127.0.0.1") for one in (events.endpoint, events.replay_endpoint))
    return endpoint, replay


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
