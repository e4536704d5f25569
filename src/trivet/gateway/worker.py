"""A gateway worker process: ``python -m trivet.gateway.worker``, started by the fleet.

Standard input is its lifeline and its news: the first line is a ``WorkerConfig``, every later one the state of the
fleet; at end of file (Trivet is gone) the worker stops. It reports on the file descriptor it is given, one JSON
object a line: ``{"ready": true}`` or ``{"failed": "...", "mend": "..."}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import uvicorn
import uvloop
from uvicorn.config import LOGGING_CONFIG

from trivet.connectors import CONNECTORS
from trivet.errors import TrivetError
from trivet.gateway.admission import Admission, SharedAdmission
from trivet.gateway.app import GENERATING, GatewayApp, Rules
from trivet.gateway.endings import Endings
from trivet.gateway.guard import Guard, GuardConfig
from trivet.gateway.logs import tell_request, write_json, write_text
from trivet.gateway.metrics import GatewayMetrics, Rendered
from trivet.gateway.server import GatewayProtocol
from trivet.gateway.shared import Bells, SharedConfig
from trivet.gateway.siblings import Records
from trivet.gateway.spans import Tracing, open_tracing
from trivet.gateway.text import TextApp
from trivet.gateway.tls import TlsFiles
from trivet.journal import Journal, current_request, now_s
from trivet.legs.ending import end
from trivet.legs.life import Legs
from trivet.legs.watch import Patience
from trivet.legs.wire import open_session
from trivet.render.garbage import spare_collections
from trivet.render.pool import Pool, PoolRules
from trivet.routing.board import BEAT_S, Board
from trivet.routing.choose import Knowledge
from trivet.routing.engines import Engines, EngineView
from trivet.routing.held import HELD_REGION, Held
from trivet.routing.policy import Policy
from trivet.routing.prefixes import REGION, PrefixTable
from trivet.surface.cors import Cors, CorsRules
from trivet.surface.http import ASGIApp
from trivet.topology.model import Limits, RenderTier, Split

if TYPE_CHECKING:
    from trivet.render.frontend import Frontend

logger = logging.getLogger(__name__)

_LINE_LIMIT_BYTES = 16 * 2**20
_SWITCH_S = 0.0005
"""How long a thread that renders may keep the event loop waiting for Python's lock; 5 ms unless set."""


_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
"""vLLM keeps answers of ``/v1/responses`` in the process that made them, if this is 1."""

_NESTED = ("shared", "tls", "cors", "guard")
"""Fields of ``WorkerConfig`` that are values with fields themselves."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker must know at its start."""

    listen_fd: int
    """A bound socket that all workers share."""
    report_fd: int
    flags: tuple[str, ...]
    """vLLM's serve flags for the render tier, the model first."""
    connector: str | None
    api_keys: tuple[str, ...]
    drain_s: float
    """How long running requests may take after the worker was told to stop."""
    plane: str = "tokens"
    limits: Limits = field(default_factory=Limits)
    obstacle: str | None = None
    """Why no answer may be continued on another engine, or None."""
    allow: tuple[str, ...] = ()
    """See ``surface.steering``."""
    split: Split = field(default_factory=Split)
    tell_served: bool = True
    otlp: str | None = None
    """Where spans are sent; None leaves it to OpenTelemetry's variables."""
    log_format: str = "text"
    """``text`` or ``json``."""
    tls: TlsFiles | None = None
    """Serves HTTPS with these; None serves HTTP."""
    cors: CorsRules = field(default_factory=CorsRules)
    log_fd: int | None = None
    """Where JSON is appended; None for standard error."""
    events_of: str | None = None
    """What the model is called where engines tell what their prefix caches hold; None if they do not."""
    shared: SharedConfig | None = None
    """What it shares with its siblings; None where it has none and counts by itself."""
    render_servers: RenderTier | None = None
    """Where prompts are rendered; None if this worker renders them itself."""
    cache_mib: int = 64
    """For token ids of text that came before."""
    fast_tokenizer: str = "auto"
    """See ``RenderTier``."""
    guard: GuardConfig | None = None
    """How pairs are watched; None if they are not."""

    def dump(self) -> bytes:
        """As one line of JSON."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        whole = {name: None if (one := getattr(self, name)) is None else asdict(one) for name in _NESTED}
        tier = self.render_servers
        servers = None if tier is None else tier.model_dump(exclude={"flags", "env", "cache_mib", "fast_tokenizer"})
        own = {"limits": self.limits.model_dump(), "split": self._split(), "render_servers": servers}
        return orjson.dumps(values | own | whole)

    def _split(self) -> dict[str, Any]:
        """Only what is set: with other modes than auto, thresholds mean nothing."""
        return {**self.split.model_dump(exclude_unset=True), "mode": self.split.mode}

    @classmethod
    def parse(cls, line: bytes) -> WorkerConfig:
        """From ``dump``'s line."""
        value = orjson.loads(line)
        value["limits"] = Limits(**value["limits"])
        value["split"] = Split(**value["split"])
        for name in ("flags", "api_keys", "allow"):
            value[name] = tuple(value[name])
        if (shared := value.get("shared")) is not None:
            value["shared"] = SharedConfig(**{**shared, "bell_fds": tuple(shared["bell_fds"])})
        value["guard"] = None if value.get("guard") is None else GuardConfig(**value["guard"])
        value["tls"] = None if value.get("tls") is None else TlsFiles(**value["tls"])
        if (servers := value.get("render_servers")) is not None:
            value["render_servers"] = RenderTier(**servers)
        value["cors"] = CorsRules(**{name: _tuples(one) for name, one in value["cors"].items()})
        return cls(**value)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _keeps_responses(config: WorkerConfig, board: Board) -> bool:
    """Whether requests for stored responses are vLLM's to answer: they reach the process that has them, if any has.

    Where several workers would each keep their own, none does: what is kept and cannot be fetched only takes memory.
    """
    if config.plane == "text":
        return False
    if board.workers == 1 or os.environ.get(_STORE, "0") == "0":
        return True
    logger.warning("%s means nothing with gateway.workers above 1: responses are not stored", _STORE)
    del os.environ[_STORE]
    return False


@contextlib.asynccontextmanager
async def _open_plane(
    config: WorkerConfig, engines: Engines, legs: Legs, metrics: GatewayMetrics
) -> AsyncIterator[tuple[ASGIApp, Pool | None]]:
    """The application under the gateway's own: vLLM's front end, or the engines' by HTTP. And the render servers."""
    if config.plane == "text":
        yield TextApp(engines, legs, GENERATING), None
        return
    logger.info("loading vLLM ...")
    from trivet.render.frontend import open_frontend
    from trivet.render.tokenizing import settings_of

    sys.setswitchinterval(_SWITCH_S)
    flags = list(config.flags)
    if config.api_keys:
        flags += ["--api-key", *config.api_keys]
    if config.log_format == "json":
        write_json(config.log_fd)  # vLLM is loaded now
    tokenizing = settings_of(config.cache_mib, config.fast_tokenizer)
    async with open_frontend(flags, legs, tokenizing) as frontend:
        if config.log_format == "json":
            write_json(config.log_fd)
        metrics.count_rendering(lambda: _rendered(frontend))
        if config.render_servers is None:
            yield frontend.app, None
            return
        from trivet.render.remote import open_remote

        rules = _pool_rules(config.render_servers, engines.board.workers)
        async with open_remote(
            frontend, rules, api_keys=config.api_keys, left_s=_left_s, tally=metrics.of_render_servers
        ) as remote:
            yield remote, remote.pool


def _rendered(frontend: Frontend) -> Rendered:
    """What a front end has rendered so far, and with what."""
    prompts, linear = frontend.prompts, getattr(getattr(frontend.app, "state", None), "linear_derender", None)
    if prompts is None:
        rendered = Rendered("vllm")
    else:
        fast, figures = prompts.fast, prompts.figures
        rendered = Rendered("tokenizers" if fast is None or fast.distrust else fast.name)
        if figures is not None:
            plain = getattr(getattr(frontend.app, "state", None), "trivet_plain_chats", None)
            kept_bytes, found = (0, 0) if plain is None else (plain.bytes, plain.found_characters)
            rendered = replace(
                rendered,
                characters=figures.asked_characters + found,
                found_characters=figures.found_characters + found,
                cache_bytes=figures.bytes + kept_bytes,
            )
    if linear is not None:
        rendered = replace(rendered, derender_hits=linear.hits, derender_replays=linear.replays)
    return rendered


def _pool_rules(tier: RenderTier, workers: int) -> PoolRules:
    """A worker's share of what the topology allows, rounded up."""
    return PoolRules(
        servers=tuple(tier.servers),
        running=-(-tier.running // workers),
        queued=-(-tier.queued // workers),
        queue_s=tier.queue_s,
        timeout_s=tier.timeout_s,
        refuses=tier.fallback == "refuse",
        local_below_bytes=tier.local_below_bytes,
        api_key=tier.api_key,
    )


def _left_s() -> float | None:
    """How long the request at hand may still take, in seconds; None for ever."""
    record = current_request.get()
    return None if record is None or record.deadline_s is None else max(0.0, record.deadline_s - now_s())


@contextlib.asynccontextmanager
async def _beating(config: WorkerConfig, board: Board, metrics: GatewayMetrics) -> AsyncIterator[Admission]:
    """Admission to what all workers serve, and this worker's heart while the block runs."""
    limits, shared = config.limits, config.shared
    if shared is None or board.workers == 1:
        yield Admission(limits.running, limits.queued, limits.queue_s)
        return
    bells = Bells(shared.bell_fds)
    admission = SharedAdmission(limits.running, limits.queued, limits.queue_s, board, bells.ring)
    board.beat()

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            board.beat()
            metrics.look()  # a sibling may be asked for them
            admission.look()  # a sibling that hangs is passed over from some moment on, of which nobody tells

    beating = asyncio.create_task(beat())
    try:
        with bells.answered(shared.worker, admission.look):
            yield admission
    finally:
        await end(beating)


def _knowledge(config: WorkerConfig, board: Board) -> Knowledge:
    """What engines are chosen by: the topology's policy, and what all workers know of prefix caches."""
    split = config.split
    shared = config.shared is not None
    prefixes = PrefixTable(board.region(REGION) if shared else None)
    held = None if config.events_of is None else Held(board.region(HELD_REGION) if shared else None)
    return Knowledge(Policy(split.mode, split.min_uncached_tokens, split.max_handover_s), prefixes, held=held)


@contextlib.asynccontextmanager
async def _hearing(
    config: WorkerConfig, knowledge: Knowledge, board: Board
) -> AsyncIterator[Callable[[Iterable[EngineView]], None]]:
    """Hears what engines hold in their caches, where they tell it. It is given the fleet's news."""
    if config.events_of is None or knowledge.held is None:
        yield lambda _: None
        return
    try:
        from trivet.routing.events import Subscriber
    except ImportError as error:
        logger.warning("no KV events, so what engines have cached is guessed: %s (pip install pyzmq msgspec)", error)
        yield lambda _: None
        return
    subscriber = Subscriber(knowledge.held, config.events_of, board.leads)
    try:
        yield subscriber.update
    finally:
        await asyncio.to_thread(subscriber.close)


def _records(config: WorkerConfig, journal: Journal, board: Board) -> Records:
    if config.shared is None:
        return Records(journal)
    return Records(journal, config.shared.worker, board.workers, Path(config.shared.folder))


async def _serve(config: WorkerConfig, news: asyncio.StreamReader) -> None:
    connector = CONNECTORS[config.connector] if config.connector else None
    engines = Engines(
        decode_serves_whole=connector is None or connector.decode_serves_whole,
        board=Board.open(config.shared.board_fd, config.shared.worker) if config.shared else None,
    )
    knowledge = _knowledge(config, engines.board)
    metrics = GatewayMetrics(knowledge.held, has_render_servers=config.render_servers is not None)
    journal = Journal()
    tracing = _tracing(config)
    listeners = [tell_request] if config.log_format == "json" else []
    endings = Endings(metrics, *listeners, *([tracing.end] if tracing is not None else []))
    state: dict[str, Any] = {"engines": []}
    limits, keeps_responses = config.limits, _keeps_responses(config, engines.board)
    records = _records(config, journal, engines.board)
    async with open_session() as session:
        guard = None
        if config.guard is not None and connector is not None:
            guard = Guard(config.guard, engines, session, connector, lambda what: metrics.canaries.labels(what).inc())
        legs = Legs(
            engines,
            session,
            connector,
            endings.generation,
            Patience(limits.silence_s),
            config.obstacle,
            knowledge,
            troubled=guard.troubled if guard is not None else lambda _: None,
        )
        async with (
            _open_plane(config, engines, legs, metrics) as (plane, render_servers),
            _beating(config, engines.board, metrics) as admission,
            records.open_to_siblings(),
            _hearing(config, knowledge, engines.board) as heard,
            guard.watching() if guard is not None else contextlib.nullcontext(),
        ):
            app = GatewayApp(
                plane,
                engines,
                legs,
                metrics,
                fleet=lambda: dict(state),
                api_keys=config.api_keys,
                rules=Rules(
                    limits.body_mib * 2**20, limits.deadline_s, config.allow, config.tell_served, keeps_responses
                ),
                admission=admission,
                guards_itself=config.plane == "tokens",
                journal=journal,
                records=records,
                stopping=lambda: server.should_exit,
                answered=endings.request,
                tracing=tracing,
                render_servers=render_servers,
            )
            server = uvicorn.Server(
                uvicorn.Config(
                    Cors(app, config.cors),
                    http=GatewayProtocol.cutting_off(limits.unread_s),
                    lifespan="on",
                    access_log=False,
                    log_level="warning",
                    log_config=None if config.log_format == "json" else LOGGING_CONFIG,
                    **(config.tls.for_uvicorn() if config.tls is not None else {}),
                    server_header=False,
                    timeout_keep_alive=75,
                    timeout_graceful_shutdown=math.ceil(config.drain_s),
                )
            )

            async def listen_to_fleet() -> None:
                with contextlib.suppress(ValueError):  # a line that is none: the lifeline is of no use any more
                    await take_news()
                server.should_exit = True

            async def take_news() -> None:
                while line := await news.readline():
                    state.clear()
                    state.update(orjson.loads(line))
                    engines.update(EngineView.parse(one) for one in state["engines"])
                    heard(engines.all())
                    metrics.gone = state.pop("gone", {})
                    engines.board.note_heard(state.pop("number", 0))
                    for one in state["engines"]:
                        for name in ("api_key", "slot"):  # not for /trivet/status
                            one.pop(name, None)

            listener = asyncio.create_task(listen_to_fleet())

            reporter = asyncio.create_task(_report_when_started(server, config.report_fd))
            # uvicorn, when it is done, raises the signal again that ended it; what follows must still be done
            signal.signal(signal.SIGTERM, lambda *_: None)
            try:
                await server.serve(sockets=[socket.socket(fileno=config.listen_fd)])
            finally:
                for task in (listener, reporter):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
        await legs.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


def _tracing(config: WorkerConfig) -> Tracing | None:
    """Spans, where they are asked for.

    Raises:
        TrivetError: the topology asks for what cannot be.
    """
    try:
        return open_tracing(config.otlp, renders=config.plane == "tokens")
    except TrivetError as error:
        if config.otlp is not None:
            raise
        logger.warning("no spans: %s", error)  # variables that are set for all of a machine's services end none
        return None


async def _report_when_started(server: uvicorn.Server, report_fd: int) -> None:
    while not server.started:  # noqa: ASYNC110  (uvicorn has no event to wait for)
        await asyncio.sleep(0.02)
    spare_collections()
    report(report_fd, {"ready": True})


def report(report_fd: int, value: dict[str, Any]) -> None:
    """Tells the fleet something; that nobody listens any more is no fault."""
    with contextlib.suppress(OSError):
        os.write(report_fd, orjson.dumps(value) + b"\n")


async def _main() -> int:
    loop = asyncio.get_running_loop()
    news = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(news), sys.stdin)
    config = WorkerConfig.parse(await news.readline())
    if config.log_format == "json":
        write_json(config.log_fd)
    try:
        await _serve(config, news)
    except TrivetError as error:
        report(config.report_fd, {"failed": error.problem, "mend": error.mend})
        return 1
    except Exception as error:
        report(config.report_fd, {"failed": f"the gateway worker ended: {type(error).__name__}: {error}", "mend": None})
        raise
    return 0


if __name__ == "__main__":
    # The render tier needs no GPU: without this a worker could start a CUDA context on one.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    import trivet.fleet.vllm  # noqa: F401  (answers for the distribution name of vLLM's CPU build)

    write_text()
    sys.exit(uvloop.run(_main()))
