"""A whole service: the fleet's engines and the gateway's workers, up together and down together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from prometheus_client.multiprocess import mark_process_dead

from trivet.errors import EngineFailedError, TopologyError, TrivetError
from trivet.fleet.process import how_it_ended, tail
from trivet.fleet.supervisor import EngineStatus, Fleet, State
from trivet.gateway.guard import GuardConfig
from trivet.gateway.reload import Reload, ReloadFailedError, Steps
from trivet.gateway.runs import FAULTS_LOG, RELOAD_FILE, process_start, state_dir
from trivet.gateway.shared import Shared
from trivet.gateway.strays import keep
from trivet.gateway.tls import tls_files
from trivet.gateway.worker import WorkerConfig
from trivet.routing.board import BoardError
from trivet.routing.held import HELD_BYTES, HELD_REGION
from trivet.routing.prefixes import REGION, TABLE_BYTES
from trivet.routing.slots import Slots
from trivet.surface.cors import CorsRules
from trivet.topology.change import check_same_service, compare
from trivet.topology.model import flag_names, flag_value
from trivet.topology.plan import MOST_ENGINES, Plan
from trivet.topology.ports import bind

_BACKOFF_S = 1.0
_DRAIN_POLL_S = 0.05
_LIFE_S = 5.0
"""Between signs of life of a reload that goes on."""
_ANOTHER_PORT = "--port N, or gateway.port in the topology (0: a free one)"
_HOSTS = "gateway.host: 127.0.0.1 for this machine only, 0.0.0.0 for others too, or an address of this machine"
_LAST_WORDS_S = 1.0
_REGIONS: Mapping[str, int] = {REGION: TABLE_BYTES, HELD_REGION: HELD_BYTES}
"""Memory that workers share besides what they count: names, and sizes in bytes. See ``Board.region``."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person may want to see: an engine or a gateway worker changed its state."""

    subject: str
    state: str
    detail: str = ""


Observer = Callable[[Event], None]


def gateway_keys(plan: Plan) -> tuple[str, ...]:
    """The keys that clients must send one of. As for ``vllm serve``, the environment's counts if no other is given."""
    return tuple(plan.topology.gateway.api_keys or filter(None, [os.environ.get("VLLM_API_KEY")]))


class Service:
    """Engines and gateway of one plan. ``async with`` it: inside, it serves."""

    def __init__(self, plan: Plan, run_dir: Path, observe: Observer = lambda _: None) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self._observer = observe
        self._is_unobserved = False
        """Whether who observes has raised; it is still told."""
        self._tls = tls_files(plan.topology)
        self._fleet = Fleet(plan, run_dir, self._engine_changed)
        host, port = plan.topology.gateway.host, plan.topology.gateway.port
        self._socket = bind("the gateway", host, port, another=_ANOTHER_PORT, hosts=_HOSTS)
        self._address: tuple[str, int] = self._socket.getsockname()[:2]
        self._workers: list[_Worker] = []
        # twice as many slots as engines: those that left keep theirs until their last leg has ended
        self._shared = Shared(plan.topology.gateway.workers, 2 * MOST_ENGINES, run_dir, _REGIONS)
        self._slots = Slots(self._shared.board)
        self._told: dict[str, tuple[int, str]] = {}
        """The generation and state of each engine that was observed last."""
        self._news = 0
        """Number of the newest news."""
        self._gone: dict[str, float] = {}
        """Engines that have left for good, and when: on the monotonic clock, which all processes here share."""
        self._reload: Reload | None = None

    def _observe(self, event: Event) -> None:
        """Tells who observes; a fault there (a terminal that is gone) is no fault of what is observed."""
        try:
            self._observer(event)
        except Exception:
            if not self._is_unobserved:
                self.log_fault("what observes the service has raised; said once")
            self._is_unobserved = True

    def log_fault(self, what: str) -> None:
        """Writes the exception that is being handled to the run's ``faults.log``."""
        with contextlib.suppress(OSError), (self.run_dir / FAULTS_LOG).open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {what}\n{traceback.format_exc()}\n")

    @property
    def fleet(self) -> Fleet:
        """Its engines."""
        return self._fleet

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that clients must send one of, if there are any."""
        return gateway_keys(self.plan)

    @property
    def url(self) -> str:
        """Where clients come in; ``127.0.0.1`` for a gateway that listens everywhere."""
        host, port = self._address
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def gateway_log(self) -> Path:
        """The log of the gateway's workers."""
        return self.run_dir / "gateway.log"

    async def __aenter__(self) -> Service:
        try:
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self._fleet.start())
                starting.create_task(self._start_workers())
        except BaseExceptionGroup as group:
            await self._stop()
            fault = _first_fault(group)
            if fault is None:
                raise
            raise fault from None
        except BaseException:
            await self._stop()
            raise
        self._publish()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start_workers(self) -> None:
        topology = self.plan.topology
        metrics_dir = None
        if topology.gateway.workers > 1:
            metrics_dir = self.run_dir / "metrics"
            metrics_dir.mkdir(exist_ok=True)
        for number in range(topology.gateway.workers):
            self._workers.append(
                _Worker(
                    number,
                    self.plan,
                    self._socket,
                    self.gateway_log,
                    metrics_dir,
                    self._state_line,
                    self._observe,
                    self._shared,
                )
            )
        # the first one alone: the operating system's file cache then has what the others import
        for worker in self._workers:
            await worker.start()
        # it answers now, though engines may still be starting: that is when ``trivet status`` is wanted most
        record = {"pid": os.getpid(), "url": self.url, "run_dir": str(self.run_dir)}
        if (started := process_start(os.getpid())) is not None:
            record["started"] = started
        if self._tls is not None:
            record["certificate"] = self._tls.certificate
        state_dir().mkdir(parents=True, exist_ok=True)  # not there yet if the run's folder lies elsewhere
        (state_dir() / "last.json").write_text(json.dumps(record), encoding="utf-8")

    async def _stop(self) -> None:
        """Workers first, which let running requests end; then the engines."""
        with contextlib.suppress(OSError):
            (self.run_dir / RELOAD_FILE).unlink(missing_ok=True)  # it can be reloaded no more
        self._socket.close()  # or the system would go on taking connections that nobody will accept
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await self._fleet.stop()
        self._shared.close()

    async def reload(self, replan: Callable[[Plan], Plan], superseded: asyncio.Event | None = None) -> Reload:
        """Has the engines be those of a new plan; see ``gateway.reload``. One at a time.

        Args:
            replan: makes the new plan of the one that runs now. What it raises refuses the reload.
            superseded: set when there is something newer to do; engines that still start are given up then.

        Returns:
            How it went, which is also told to ``observe`` and to the gateway's workers.
        """
        number = 1 if self._reload is None else self._reload.number + 1
        running = tuple(status.plan for status in self._fleet.engines.values())
        try:
            wanted = replan(dataclasses.replace(self.plan, engines=running))
            check_same_service(self.plan, wanted)
            self._check_obstacle(wanted)
            change = compare(running, wanted.engines)
            self._check_slots([one.name for one in (*running, *wanted.engines)])
        except TrivetError as error:
            return self.note(Reload(number, "refused", str(error)))
        except Exception as error:  # a fault of Trivet's own, or one that nobody has foreseen in the file
            self.log_fault("a reload was refused")
            told = " ".join(f"{type(error).__name__}: {error}".split())
            return self.note(Reload(number, "refused", f"{told} -> see {self.run_dir / FAULTS_LOG}"))
        if not change:
            return self.note(Reload(number, "done", str(change)))
        self.note(Reload(number, "running", str(change)))
        living = asyncio.create_task(self._show_life(), name="life of a reload")
        try:
            await Steps(self._fleet, self._drained, superseded).carry_out(change)
        except ReloadFailedError as error:
            if not isinstance(error.__cause__, TrivetError):
                self.log_fault("a reload failed")
            return self.note(Reload(number, "failed", str(error)))
        except Exception as error:  # a fault of Trivet's own: the service goes on with the engines that there are
            self.log_fault("a reload failed, and could not be taken back")
            told = " ".join(f"{type(error).__name__}: {error}".split())
            return self.note(Reload(number, "failed", f"{told}; see trivet status"))
        finally:
            living.cancel()
        return self.note(Reload(number, "done", str(change)))

    async def _show_life(self) -> None:
        """``trivet reload`` waits for as long as it sees that somebody is there."""
        while True:
            with contextlib.suppress(OSError):
                os.utime(self.run_dir / RELOAD_FILE)
            await asyncio.sleep(_LIFE_S)

    def note(self, reload: Reload) -> Reload:
        """Tells of a reload: to who observes, to the workers, and in the run's folder."""
        self._reload = reload
        if reload.number:
            self._observe(Event("reload", reload.state, reload.told))
            self._publish()
        fresh = self.run_dir / f"{RELOAD_FILE}.new"
        with contextlib.suppress(OSError):  # a full disk is no reason not to serve
            fresh.write_text(json.dumps(reload.facts()), encoding="utf-8")
            fresh.replace(self.run_dir / RELOAD_FILE)
        return reload

    def _check_obstacle(self, wanted: Plan) -> None:
        was, now = _obstacle(self.plan), _obstacle(wanted)
        if was != now:
            raise TopologyError(
                f"whether answers may be continued on another engine cannot change while the service runs "
                f"({now or was})",
                mend="say gateway.continue_answers and start the service anew",
            )

    def _check_slots(self, names: list[str]) -> None:
        try:
            self._slots.assign(names)
        except BoardError as error:
            raise TopologyError(f"{error}", mend="wait until engines that left have ended, or remove some") from None

    async def _drained(self, name: str) -> None:
        """Returns when nothing runs any more on an engine that leaves, or after ``gateway.drain_s``."""
        board, drain_s = self._shared.board, self.plan.topology.gateway.drain_s
        news, slot, deadline_s = self._news, self._slots.assign(self._fleet.engines)[name], time.monotonic() + drain_s
        status = self._fleet.engines[name]
        # before every worker has heard it, one may have something begin there
        while status.state is State.LEAVING and not (board.all_heard(news) and board.is_idle(slot)):
            if time.monotonic() >= deadline_s:
                legs = board.running_legs(slot)
                self._observe(Event(name, "leaving", f"stopped after {drain_s:g} s, with {legs} leg(s) on it"))
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def _engine_changed(self, status: EngineStatus) -> None:
        name, told = status.plan.name, (status.generation, str(status.state))
        if name not in self._fleet.engines:
            self._gone[name] = time.monotonic()
            self._told.pop(name, None)
            self._publish()
            return
        self._gone.pop(name, None)
        if status.state != "ready" or self._told.get(name) != told:  # else gateways alone learn something new
            detail = status.problem or ""
            if status.state == "ready":
                detail = f"after {time.monotonic() - status.started_s:.0f} s"
            elif status.state == "waiting":
                detail = _waited_for(status)
            self._observe(Event(name, str(status.state), detail))
        self._told[name] = told
        self._publish()

    def _state_line(self) -> bytes:
        slots = self._slots.assign(self._fleet.engines)
        engines = [{**status.facts(), "slot": slots[name]} for name, status in self._fleet.engines.items()]
        news: dict[str, Any] = {"engines": engines, "number": self._news, "gone": self._gone}
        if self._reload is not None and self._reload.number:
            news["reload"] = self._reload.facts()
        return orjson.dumps(news) + b"\n"

    def _publish(self) -> None:
        self._news += 1
        line = self._state_line()
        for worker in self._workers:
            worker.tell(line)


class _Worker:
    """One gateway worker process, started again if it ends."""

    def __init__(
        self,
        number: int,
        plan: Plan,
        listener: socket.socket,
        log: Path,
        metrics_dir: Path | None,
        state_line: Callable[[], bytes],
        observe: Observer,
        shared: Shared | None = None,
    ) -> None:
        self._number = number
        self._shared = shared
        self._name = f"gateway-{number}"
        self._plan = plan
        self._listener = listener
        self._log = log
        self._metrics_dir = metrics_dir
        self._state_line = state_line
        self._observe = observe
        self._process: asyncio.subprocess.Process | None = None
        self._tending: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None
        """Reads what the process writes past its loggers, where its log is JSON."""

    async def start(self) -> None:
        """Returns when the worker listens.

        Raises:
            TrivetError: it cannot; in its own words if it had any.
        """
        self._observe(Event(self._name, "starting", _read_at_start(self._plan)))
        started_s = time.monotonic()
        await self._spawn()
        self._observe(Event(self._name, "ready", f"after {time.monotonic() - started_s:.0f} s"))
        self._tending = asyncio.create_task(self._tend(), name=self._name)

    async def stop(self) -> None:
        """Lets it finish what it serves, for as long as the topology allows."""
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.gather(self._tending, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            await self._end(self._process)
        await self._heard_out()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._plan.topology.gateway.drain_s + 15.0):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def tell(self, line: bytes) -> None:
        """Sends the state of the fleet."""
        process = self._process
        if process is not None and process.stdin is not None and process.returncode is None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                process.stdin.write(line)

    async def _tend(self) -> None:
        while True:
            assert self._process is not None
            status = await self._process.wait()
            await self._heard_out()
            if self._shared is not None:
                self._shared.died(self._number)
            if self._metrics_dir is not None:
                mark_process_dead(self._process.pid, str(self._metrics_dir))  # type: ignore[no-untyped-call]
            self._observe(Event(self._name, "failed", f"{how_it_ended(status)}; its log is {self._log}"))
            await asyncio.sleep(_BACKOFF_S)
            try:
                await self._spawn()
                self._observe(Event(self._name, "ready", "again"))
            except (TrivetError, OSError) as error:  # no memory, no descriptors: it may be better the next time
                self._observe(Event(self._name, "failed", str(error)))

    async def _spawn(self) -> None:
        tls = tls_files(self._plan.topology)
        gateway = self._plan.topology.gateway
        report_in, report_out = os.pipe()
        env = dict(os.environ)
        if self._metrics_dir is not None:
            env["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_dir)
        if Path(self._plan.model).is_dir():
            env["HF_HUB_OFFLINE"] = "1"
        env.setdefault("VLLM_NO_USAGE_STATS", "1")
        env |= self._plan.topology.tiers.render.env
        shared = self._shared.descriptors if self._shared else ()
        try:
            with self._log.open("ab", buffering=0) as log, self._output(log) as output:
                log_fd = log.fileno() if output is not log else None
                self._process = process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "trivet.gateway.worker",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(self._listener.fileno(), report_out, *shared, *(() if log_fd is None else (log_fd,))),
                    env=env,
                    start_new_session=True,
                )
        except BaseException:
            os.close(report_in)
            raise
        finally:
            os.close(report_out)
        config = WorkerConfig(
            listen_fd=self._listener.fileno(),
            report_fd=report_out,
            flags=self._plan.render_flags,
            connector=self._plan.connector.name if self._plan.connector else None,
            api_keys=gateway_keys(self._plan),
            drain_s=gateway.drain_s,
            plane=gateway.plane,
            limits=gateway.limits,
            obstacle=_obstacle(self._plan),
            allow=tuple(gateway.allow),
            split=gateway.split,
            events_of=self._plan.served_names[0] if self._plan.topology.kv_events else None,
            tell_served=gateway.tell_served,
            otlp=gateway.otlp,
            log_format=gateway.log_format,
            tls=tls,
            cors=CorsRules(**gateway.cors.model_dump()),
            log_fd=log_fd,
            shared=self._shared.config(self._number) if self._shared else None,
            cache_mib=self._plan.topology.tiers.render.cache_mib,
            fast_tokenizer=self._plan.topology.tiers.render.fast_tokenizer,
            render_servers=tier if (tier := self._plan.topology.tiers.render).servers else None,
            guard=guard_config(self._plan),
        )
        assert process.stdin is not None
        process.stdin.write(config.dump() + b"\n" + self._state_line())
        word = await _read_line(report_in)
        if word.get("ready"):
            return
        await process.wait()
        await self._heard_out()
        raise EngineFailedError(
            str(word.get("failed") or f"the gateway worker {how_it_ended(process.returncode or 0)}"),
            mend=f"{word['mend']}; its log is {self._log}" if word.get("mend") else f"its log is {self._log}",
            detail=None if word.get("failed") else tail(self._log),  # its own words say more than where they came from
        )

    @contextlib.contextmanager
    def _output(self, log: BinaryIO) -> Iterator[BinaryIO]:
        """What a worker is given as its standard output: its log, or a pipe whose lines are made JSON for it."""
        if self._plan.topology.gateway.log_format != "json":
            yield log
            return
        reading, writing = os.pipe()
        self._hearing = asyncio.create_task(keep(reading, self._log), name=f"output of {self._name}")
        with os.fdopen(writing, "wb", 0) as output:
            yield output

    async def _heard_out(self) -> None:
        """Waits until all that a worker said is in its log; what it started may hold the pipe open for longer."""
        if self._hearing is not None:
            await asyncio.wait([self._hearing], timeout=_LAST_WORDS_S)
            self._hearing.cancel()


def guard_config(plan: Plan) -> GuardConfig | None:
    """How a plan's pairs are watched; None if they are not, or if there are none."""
    guard = plan.topology.gateway.guard
    if guard is None or plan.connector is None:
        return None
    # vLLM takes a priority only where it schedules by it; of engines that others started that is not known
    by_priority = all(flag_value(one.own_flags, "scheduling-policy") == "priority" for one in plan.engines)
    return GuardConfig(
        plan.served_names[0],
        guard.every_s,
        guard.prompt_tokens,
        _LAST_PRIORITY if by_priority else 0,
        _vocab_size(plan.model),
    )


def _vocab_size(model: str) -> int | None:
    """Of a model that lies in a folder; else None."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        sizes = [one.get("vocab_size") for one in (config, config.get("text_config") or {})]
    except (OSError, ValueError, AttributeError):
        return None
    return next((one for one in sizes if isinstance(one, int) and one > 1), None)


_LAST_PRIORITY = 1000
"""Of canaries: behind everything that clients are likely to ask for."""
_STATEFUL = frozenset({"logits-processors", "watermark-config"})
"""Flags of engines by which sampling may depend on what an answer has so far."""


def _obstacle(plan: Plan) -> str | None:
    """Why answers of these engines may not be continued on one another, or None."""
    wish = plan.topology.gateway.continue_answers
    if wish is not None:
        return None if wish else "gateway.continue_answers is false"
    for engine in plan.engines:
        for name in flag_names(engine.own_flags):
            if name.partition(".")[0] in _STATEFUL:
                return f"engines have --{name}, which may count the answer's tokens"
    return None


def _read_at_start(plan: Plan) -> str:
    """What a worker's start may take long for, in words for a person."""
    if plan.topology.gateway.plane == "text" or Path(plan.model).is_dir():
        return ""
    return f"reads config and tokenizer of {plan.model}, from the hub where they are not cached"


def _waited_for(status: EngineStatus) -> str:
    """Where an engine that is started elsewhere is looked for, and what keeps it from being used."""
    plan = status.plan
    told = f"for {plan.url}" + (f": {status.problem}" if status.problem else "")
    return told + (f"; trivet engine {plan.name} FILE starts it there" if plan.started_by == "another host" else "")


async def _read_line(descriptor: int) -> Mapping[str, Any]:
    """The first line that a worker reports; empty if it ends without a word."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    try:
        line = await reader.readline()
        return dict(json.loads(line)) if line else {}
    finally:
        transport.close()


def _first_fault(error: BaseException) -> TrivetError | None:
    """The Trivet error inside a group of errors, if there is one."""
    if isinstance(error, TrivetError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            if (found := _first_fault(inner)) is not None:
                return found
    return None
