"""A topology resolved on a machine: every engine with its address, its cores or GPUs and its exact command."""

from __future__ import annotations

import itertools
import json
import shlex
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trivet.connectors import CONNECTORS, Connector, Side
from trivet.errors import MissingPackageError, TopologyError
from trivet.topology.kv_events import KvEventsAddress, flag_value_of, on_the_network, own_sockets
from trivet.topology.machine import OLDEST_VLLM, Machine, is_too_old
from trivet.topology.model import TIERS, Engine, Tier, Topology, flag_names, flag_value
from trivet.topology.ports import PortBook

GPU_MEMORY_LIMIT = 0.95
"""Most of a GPU's memory that its engines may claim together: the CUDA contexts need the rest."""

MOST_ENGINES = 256
"""Most engines of one topology: the gateway's workers count the load of each, and of each pair, in memory of fixed
size."""

SIM = "sim"
"""The device of simulated engines: they use no cores or GPUs of their own, and need no vLLM."""

_SIM_CONNECTORS = frozenset({"NixlConnector", "TrivetConnector"})
"""Connectors whose hand-over a simulated engine imitates."""

_OF_A_DEVICE: Mapping[str, str] = {
    "gpus": "cuda",
    "cores": "cpu",
    "tensor_parallel": "cuda",
    "gpu_memory_utilization": "cuda",
    "cpu_kv_gib": "cpu",
}
"""Fields that share out what a device has, and the device whose engines they are for first of all."""

_TO_LISTEN: Mapping[str, str] = {"zmq": "pyzmq", "msgspec": "msgspec"}
"""What listening to KV events needs: modules, and the packages that they are in."""

_TELLS_OF_ITSELF = "trivet.fleet.told.EngineFacts"
_GIVEN_BESIDE_OTHERS = frozenset({"middleware"})
"""Flags of which vLLM takes several: one of the topology's is a further one."""

_FIRST_HTTP_PORT = 8100
_FIRST_KV_PORT = 5600


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag or a variable that Trivet sets, and why."""

    name: str
    value: str | None
    reason: str
    also: tuple[str, ...] = ()
    """Further values of the same flag."""

    def flag(self) -> list[str]:
        """As arguments of a command line."""
        return [f"--{self.name}", *([] if self.value is None else [self.value]), *self.also]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine, resolved."""

    name: str
    tier: str
    url: str
    device: str
    started_by: str
    """``trivet`` (here), ``another host`` (``trivet engine NAME`` there) or ``someone else`` (``url:``)."""
    host: str = "local"
    model: str = ""
    port: int = 0
    kv_port: int | None = None
    kv_address: str | None = None
    """Where its connector listens for peers, where the gateway must know that."""
    kv_events: KvEventsAddress | None = None
    """Where the gateway hears what its prefix cache holds; None if it does not tell."""
    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    settings: tuple[Setting, ...] = ()
    own_flags: tuple[str, ...] = ()
    """The topology's flags for it, in order."""
    last_settings: tuple[Setting, ...] = ()
    """Made from the topology's flags, so they stand behind them."""
    env: tuple[Setting, ...] = ()
    api_key: str | None = None

    def arguments(self) -> list[str]:
        """What stands behind ``vllm``."""
        ours = [argument for setting in self.settings for argument in setting.flag()]
        last = [argument for setting in self.last_settings for argument in setting.flag()]
        return ["serve", self.model, *ours, *self.own_flags, *last]

    def command(self) -> list[str]:
        """The command Trivet runs."""
        module = "trivet.sim" if self.device == SIM else "trivet.fleet.vllm"
        return [sys.executable, "-m", module, *self.arguments()]

    def environment(self) -> dict[str, str]:
        """What Trivet adds to the environment."""
        return {one.name: one.value or "" for one in self.env}

    def effective(self, flag: str) -> str | None:
        """The value that the engine gets for a flag; None if nobody gives one."""
        own = flag_value(self.own_flags, flag)
        if own is not None:
            return own
        return next((one.value for one in self.settings if one.name == flag), None)

    def shell_line(self) -> str:
        """The command as a person can run it by hand."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.environment().items()]
        return " ".join([*env, shlex.join(self.command())])


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole topology, resolved."""

    topology: Topology
    model: str
    served_names: tuple[str, ...]
    connector: Connector | None
    engines: tuple[EnginePlan, ...]
    render_flags: tuple[str, ...]
    """vLLM flags of the render tier, the model first."""
    notes: tuple[str, ...] = ()
    """What a person should know before starting it."""

    def render_command(self) -> list[str]:
        """The command of a render server that makes the token ids of the gateway's workers; without its address.

        ``vllm launch render`` takes the flags of ``vllm serve``.
        """
        return ["vllm", "launch", "render", *self.render_flags]

    def engine(self, name: str) -> EnginePlan:
        """The engine of that name.

        Raises:
            TopologyError: there is none.
        """
        for one in self.engines:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.engines)
        raise TopologyError(f"the topology has no engine {name!r}", mend=f"one of: {known}")


def make_plan(
    topology: Topology,
    ports: PortBook,
    *,
    model: str,
    machine: Machine | None = None,
    at: str = "local",
    only: str | None = None,
    running: Sequence[EnginePlan] = (),
) -> Plan:
    """Resolves a topology.

    Args:
        ports: where free ports come from.
        model: the model's folder or hub name (``demo`` already replaced by its folder).
        machine: what runs the engines with ``host: AT``; this machine unless given.
        at: the host whose engines are started from here.
        only: of those, the one engine that is; None for all of them.
        running: engines that run already. Where the topology leaves the choice, those of the same name keep their
            ports, cores and GPUs.

    Raises:
        TopologyError: it asks for what cannot be on this machine.
        MissingPackageError: vLLM or what the connector needs is missing or too old.
        PortInUseError: a port it names is taken.
    """
    machine = machine or Machine.here()
    return _Planner(topology, ports, model, machine, at, only, running).plan()


class _Planner:
    def __init__(
        self,
        topology: Topology,
        ports: PortBook,
        model: str,
        machine: Machine,
        at: str,
        only: str | None,
        running: Sequence[EnginePlan],
    ) -> None:
        self._topology = topology
        self._ports = ports
        self._model = model
        self._machine = machine
        self._at = at
        self._only = only
        self._running = {one.name: one for one in running if one.started_by == "trivet"}
        self._tokenizer = resolve_tokenizer(topology.model.tokenizer, topology.folder)
        self._notes: list[str] = []
        prefill = topology.tiers.prefill
        self._connector = CONNECTORS[topology.kv.connector] if prefill is not None and prefill.listed() else None
        self._served = tuple(topology.model.served_names) or (topology.model.default_served_name,)

    def plan(self) -> Plan:
        merged = list(self._merged())
        if len(merged) > MOST_ENGINES:
            raise TopologyError(
                f"the topology has {len(merged)} engines; one gateway serves at most {MOST_ENGINES}",
                mend="make it two services, each with a topology of its own",
            )
        self._check_simulated(merged)
        cores = self._share_cores(merged)
        gpus = self._share_gpus(merged)
        memory = self._share_gpu_memory(merged, gpus)
        ports = self._share_ports(merged)
        engines = []
        for entry in merged:
            name = entry.name
            if entry.engine.url:
                engines.append(
                    EnginePlan(
                        name,
                        entry.tier,
                        entry.engine.url,
                        entry.device,
                        "someone else",
                        kv_address=entry.engine.kv_address,
                        kv_events=self._foreign_events(entry),
                        api_key=entry.engine.api_key,
                    )
                )
            else:
                engines.append(
                    self._started(entry, cores.get(name, ()), gpus.get(name, ()), memory.get(name), *ports[name])
                )
        self._check_equal(engines)
        if self._connector and self._connector.rank_to_rank:
            self._check_ranks(merged, self._connector)
        if self._connector and self._connector.one_host:
            self._check_one_host(merged, self._connector)
        else:
            self._check_reach(merged)
        self._check_packages({one.device for one in engines if one.started_by == "trivet"})
        self._check_listening()
        self._check_render_servers()
        return Plan(
            topology=self._topology,
            model=self._model,
            served_names=self._served,
            connector=self._connector,
            engines=tuple(engines),
            render_flags=tuple(self._render_flags(engines)),
            notes=tuple(self._notes),
        )

    def _merged(self) -> Iterator[_Entry]:
        for tier_name in TIERS:
            tier = self._topology.tier(tier_name)
            if tier is None:
                continue
            for number, engine in enumerate(tier.listed()):
                entry = _Entry(tier_name, number, tier, engine, engine.device or tier.device or self._machine.device)
                if tier_name != "mixed" and self._connector and not _can_run(self._connector, entry.device):
                    raise TopologyError(
                        f"{entry.where(self._topology)}: {entry.name}: {self._connector.name} cannot run on "
                        f"{entry.device}",
                        mend=f"it runs on {', '.join(sorted(self._connector.devices))}",
                    )
                if entry.engine.url is not None:
                    yield entry
                    continue
                if tier_name != "mixed" and self._connector and entry.device != SIM:
                    self._check_movers(entry, self._connector)
                if entry.device == SIM:
                    self._check_needs_nothing(entry)
                if entry.device == "cpu" and entry.gpus:
                    raise TopologyError(
                        f"{entry.where(self._topology, 'gpus')}: {entry.name}: a CPU engine has no gpus",
                        mend="leave gpus out, or say device: cuda",
                    )
                if entry.gpus and len(entry.gpus) != self._ranks(entry):
                    raise TopologyError(
                        f"{entry.where(self._topology)}: {entry.name}: {len(entry.gpus)} GPU(s) for tensor_parallel "
                        f"{self._tensor_parallel(entry)}{self._other_parts(entry)}",
                        mend="name as many GPUs as its parallel sizes multiply to",
                    )
                yield entry

    def _share_ports(self, entries: Sequence[_Entry]) -> dict[str, tuple[int, int | None]]:
        """HTTP and KV port of each engine; what is given by number is taken before free ones are looked for."""
        if self._at == "local" and self._only is None:
            self._ports.set_aside(self._topology.gateway.port)
        ports: dict[str, tuple[int, int | None]] = {}
        here: list[tuple[_Entry, int]] = []
        for entry in entries:
            engine, count = entry.engine, self._kv_ports(entry)
            ports[entry.name] = (engine.port or 0, engine.kv_port if count else None)
            if engine.url is not None or not self._starts(entry):
                continue
            here.append((entry, count))
            if engine.port:
                self._ports.fixed(engine.port, entry.bind, f"engine {entry.name}")
            if engine.kv_port:
                for number in range(count):
                    self._ports.fixed(engine.kv_port + number, entry.bind, f"engine {entry.name} (KV)")
            if engine.kv_events_port:
                for events_port in (engine.kv_events_port, engine.kv_events_port + 1):
                    self._ports.fixed(events_port, "0.0.0.0", f"engine {entry.name} (KV events)")
        for entry, count in here:
            port, kv_port = ports[entry.name]
            if (before := self._running.get(entry.name)) is not None:
                if not port and self._ports.keep(before.port):
                    port = before.port
                first = before.kv_port
                if kv_port is None and first and all(self._ports.keep(first + number) for number in range(count)):
                    kv_port = first if count else None
            port = port or self._ports.free(_FIRST_HTTP_PORT, entry.bind)
            if count and kv_port is None:
                kv_port = self._ports.free(_FIRST_KV_PORT, entry.bind, count)
            ports[entry.name] = (port, kv_port)
        return ports

    def _starts(self, entry: _Entry) -> bool:
        return entry.engine.host == self._at and self._only in (None, entry.name)

    def _kv_ports(self, entry: _Entry) -> int:
        if self._connector is None or entry.tier == "mixed" or entry.engine.url is not None or entry.device == SIM:
            return 0
        return self._connector.ports(int(self._number(entry, "data-parallel-size") or 1))

    def _number(self, entry: _Entry, flag: str) -> float | None:
        """The value of one of an engine's flags that must be a number."""
        value = flag_value(self._flags(entry), flag)
        try:
            return None if value is None else float(value)
        except ValueError:
            raise TopologyError(
                f"{entry.where(self._topology)}: {entry.name}: --{flag} is {value!r}", mend="give a number"
            ) from None

    def _tensor_parallel(self, entry: _Entry) -> int:
        """As the topology says; else over all GPUs that it names."""
        return entry.tensor_parallel or max(1, len(entry.gpus or ()) // self._replicated(entry))

    def _ranks(self, entry: _Entry) -> int:
        return self._tensor_parallel(entry) * self._replicated(entry)

    def _replicated(self, entry: _Entry) -> int:
        """Pipeline stages times local data-parallel ranks."""
        stages = self._number(entry, "pipeline-parallel-size") or 1
        ranks = self._number(entry, "data-parallel-size-local") or self._number(entry, "data-parallel-size") or 1
        return max(1, int(stages) * int(ranks))

    def _other_parts(self, entry: _Entry) -> str:
        parts = self._replicated(entry)
        return f" and {parts} pipeline stages or data-parallel ranks" if parts > 1 else ""

    def _flags(self, entry: _Entry) -> tuple[str, ...]:
        # on the text plane the engines render, so what would be the gateway's is theirs
        rendering = self._topology.tiers.render.flags if self._topology.gateway.plane == "text" else ()
        return (*self._topology.flags, *rendering, *entry.tier_model.flags, *entry.engine.flags)

    def _started(
        self,
        entry: _Entry,
        cores: tuple[int, ...],
        gpus: tuple[int, ...],
        memory: float | None,
        port: int,
        kv_port: int | None,
    ) -> EnginePlan:
        engine, bind, advertise = entry.engine, entry.bind, entry.advertise
        own_flags = self._flags(entry)
        settings = {setting.name: setting for setting in self._common_settings(entry, bind, port, memory)}
        env = self._common_env(entry, cores, gpus, own_flags)
        kv_address = None
        if self._connector and entry.tier != "mixed":
            kv_address = engine.kv_address or self._connector.peer_address(port)
            kv = self._connector.engine_settings(
                Side(entry.tier),
                device=entry.device,
                host=advertise,
                port=kv_port,
                options=self._topology.kv.options,
                address=kv_address,
            )
            settings["kv-transfer-config"] = Setting(
                "kv-transfer-config",
                json.dumps(kv.kv_transfer_config),
                f"the {entry.tier} end of {self._connector.name}",
            )
            for name, (value, reason) in kv.flags.items():
                settings[name] = Setting(name, value, reason)
            for name, (value, reason) in kv.env.items():
                env[name] = Setting(name, value, reason)
        kv_events = self._events(entry, port, own_flags)
        if kv_events is not None:
            # it must listen itself, on what others reach it by
            listens = on_the_network("*", engine.kv_events_port) if engine.kv_events_port else kv_events
            settings["kv-events-config"] = Setting(
                "kv-events-config", flag_value_of(listens), "tells the gateway what its prefix cache holds (kv_events)"
            )
        if engine.api_key:
            env["VLLM_API_KEY"] = Setting("VLLM_API_KEY", engine.api_key, "its clients must send it; the gateway does")
        given = set(flag_names(own_flags))
        given |= {name.removeprefix("no-") for name in given}
        for source in (self._topology.env, entry.tier_model.env, engine.env):
            for name, value in source.items():
                env[name] = Setting(name, value, "the topology says so")
        return EnginePlan(
            name=entry.name,
            tier=entry.tier,
            url=f"http://{_in_url(advertise)}:{port}",
            device=entry.device,
            started_by="trivet" if self._starts(entry) else "another host",
            host=engine.host,
            model=self._model,
            port=port,
            kv_port=kv_port,
            kv_address=kv_address,
            kv_events=kv_events,
            gpus=gpus,
            cores=cores,
            settings=tuple(
                setting for name, setting in settings.items() if name not in given or name in _GIVEN_BESIDE_OTHERS
            ),
            own_flags=own_flags,
            last_settings=tuple(_last_settings(own_flags)) if self._topology.gateway.plane == "tokens" else (),
            env=tuple(env.values()),
            api_key=engine.api_key,
        )

    def _events(self, entry: _Entry, port: int, own_flags: Sequence[str]) -> KvEventsAddress | None:
        """Where an engine is to tell what its prefix cache holds, if it can and shall.

        Raises:
            TopologyError: where is not known here, or its flags say otherwise.
        """
        if not self._topology.kv_events:
            return None
        names = flag_names(own_flags)
        where = f"{entry.where(self._topology)}: {entry.name}"
        if any(name.partition(".")[0] == "kv-events-config" for name in names):
            raise TopologyError(
                f"{where}: kv_events sets --kv-events-config, and flags do too", mend="leave one of the two out"
            )
        if "no-enable-prefix-caching" in names:
            self._notes.append(f"{entry.name} keeps no prefix cache, so it has no KV events to tell")
            return None
        if (self._number(entry, "data-parallel-size") or 1) > 1:
            self._notes.append(
                f"{entry.name} has data-parallel ranks with a cache each, among which vLLM chooses: what it has cached "
                "is guessed, as without kv_events"
            )
            return None
        if entry.engine.kv_events_port:
            return on_the_network(entry.advertise, entry.engine.kv_events_port)
        if entry.engine.host != "local":
            raise TopologyError(
                f"{where}: where an engine on another host publishes its KV events is not known here",
                mend="give it a kv_events_port (that and the next are used), or leave kv_events out",
            )
        return own_sockets(port)

    def _foreign_events(self, entry: _Entry) -> KvEventsAddress | None:
        """Where an engine that someone else started tells what its prefix cache holds, as far as the file says."""
        told = entry.engine.kv_events
        if told is not None:
            return told.endpoint, told.replay
        if self._topology.kv_events:
            self._notes.append(f"{entry.name}: where it publishes KV events is not said: what it has cached is guessed")
        return None

    def _check_listening(self) -> None:
        """The gateway needs packages of its own to hear engines; they come with vLLM."""
        if self._topology.kv_events and self._at == "local":
            for package, name in _TO_LISTEN.items():
                if not self._machine.has_package(package):
                    raise MissingPackageError(
                        f"kv_events needs the package {name}", mend=f"pip install {name}, or leave kv_events out"
                    )

    def _check_render_servers(self) -> None:
        """The gateway cannot ask itself: each request would hold two of its workers, and the second does the work."""
        gateway = self._topology.gateway
        for number, url in enumerate(self._topology.tiers.render.servers):
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            if port == gateway.port and (host == gateway.host or _is_loopback(host)):
                raise TopologyError(
                    f"{self._topology.where('tiers', 'render', 'servers', number)}: tiers.render.servers: {url} is "
                    "this gateway itself",
                    mend="name render servers (vllm launch render), or leave servers out: its workers render anyway",
                )

    def _common_settings(self, entry: _Entry, bind: str, port: int, memory: float | None) -> Iterator[Setting]:
        model = self._topology.model
        yield Setting(
            "served-model-name", self._served[0], "the names under which it is asked for", also=self._served[1:]
        )
        if entry.device == SIM:
            yield Setting("name", entry.name, "what it calls itself in its log and in /sim/state")
        elif self._tokenizer:
            yield Setting("tokenizer", self._tokenizer, "the topology says so")
        yield Setting("host", bind, "reachable from here only" if bind == "127.0.0.1" else "reachable from other hosts")
        yield Setting("port", str(port), "from the topology" if entry.engine.port else "a free one")
        dtype = model.dtype or ("float32" if entry.device == "cpu" else None)
        if dtype and entry.device != SIM:
            reason = "the topology says so" if model.dtype else "bfloat16 prefills four times slower without AMX"
            yield Setting("dtype", dtype, f"{reason}; equal on all tiers, as KV is copied byte for byte")
        if model.max_length:
            yield Setting("max-model-len", str(model.max_length), "equal on all tiers: what one takes, all must take")
        yield Setting("enable-scale-out", None, "serves /inference/v1/generate, which the gateway speaks")
        yield Setting("enable-prompt-tokens-details", None, "tells how many prompt tokens were cached")
        if entry.device != SIM:
            yield Setting("middleware", _TELLS_OF_ITSELF, "tells `trivet check` its resolved config (/trivet/engine)")
        if entry.device == "cpu":
            yield Setting("enforce-eager", None, "starts in seconds; compiling gains little on small CPU models")
        batched, sequences, why_batched, why_sequences = _TIER_LIMITS[entry.device][entry.tier]
        yield Setting("max-num-batched-tokens", str(batched), why_batched)
        yield Setting("max-num-seqs", str(sequences), why_sequences)
        if (parts := self._tensor_parallel(entry)) > 1:
            yield Setting("tensor-parallel-size", str(parts), "from the topology")
        if memory is not None:
            reason = "of the memory of its GPU(s); no more than 0.95 with the engines it shares them with"
            yield Setting("gpu-memory-utilization", f"{memory:g}", reason)

    def _common_env(
        self, entry: _Entry, cores: tuple[int, ...], gpus: tuple[int, ...], own_flags: Sequence[str]
    ) -> dict[str, Setting]:
        env: dict[str, Setting] = {}

        def put(name: str, value: str, reason: str) -> None:
            env[name] = Setting(name, value, reason)

        if entry.device == SIM:
            return env
        put("VLLM_NO_USAGE_STATS", "1", "nothing is sent home unless you ask for it")
        if Path(self._model).is_dir():
            put("HF_HUB_OFFLINE", "1", "the model is a folder: no hub is asked for anything")
        if entry.device == "cpu":
            put("VLLM_CPU_KVCACHE_SPACE", str(entry.cpu_kv_gib), "GiB for KV; unset, vLLM takes most of the memory")
            if cores:
                joined = ",".join(str(core) for core in cores)
                bound = _bound(cores, self._ranks(entry))
                put("VLLM_CPU_OMP_THREADS_BIND", bound, "its own cores, so that tiers do not slow each other")
                put(
                    "TRIVET_CPU_CORES",
                    joined,
                    "leaves these cores to the work: no polling, no pinning to the last core",
                )
            if "enforce-eager" not in {name.removeprefix("no-") for name in flag_names(own_flags)}:
                put("TORCHDYNAMO_DISABLE", "1", "else the first log-probabilities wait 20 s for a compiler")
        else:
            here = entry.engine.host == self._at
            names = [self._machine.gpu_name(gpu) if here else str(gpu) for gpu in gpus]
            put("CUDA_VISIBLE_DEVICES", ",".join(names), "its own GPU(s)")
        return env

    def _share_cores(self, entries: Sequence[_Entry]) -> dict[str, tuple[int, ...]]:
        """Disjoint cores for the CPU engines started here; what the topology names is theirs."""
        here = [e for e in entries if e.device == "cpu" and e.engine.url is None and e.engine.host == self._at]
        shares = {e.name: tuple(e.cores) for e in here if e.cores}
        claimed: dict[int, str] = {}
        for entry in here:
            where = entry.where(self._topology)
            for core in shares.get(entry.name, ()):
                if core in claimed:
                    raise TopologyError(
                        f"{where}: core {core} is given to {claimed[core]} and to {entry.name}",
                        mend="give each engine its own cores",
                    )
                if core not in self._machine.cores:
                    raise TopologyError(
                        f"{where}: {entry.name} wants core {core}, which this process may not use",
                        mend=f"usable are {', '.join(map(str, self._machine.cores))}",
                    )
                claimed[core] = entry.name
        named = frozenset(claimed)
        for entry in here:
            before = self._running.get(entry.name)
            if entry.name not in shares and before is not None and self._may_stay(before.cores, named):
                shares[entry.name] = before.cores
                claimed |= dict.fromkeys(before.cores, entry.name)
        rest = [e for e in here if e.name not in shares]
        strangers = [e.name for e in entries if e.engine.url is not None and e.is_near and e.device == "cpu"]
        if strangers and rest:
            self._notes.append(
                f"{strangers[0]} runs on this host too, on cores that Trivet does not know: give "
                f"{', '.join(e.name for e in rest)} `cores` of their own, or transfers may stall"
            )
        free = [core for core in self._machine.cores if core not in claimed]
        if rest and len(free) >= len(rest):
            spare = 1 if len(free) > 2 * len(rest) else 0  # the gateway renders on it
            size = (len(free) - spare) // len(rest)
            for number, entry in enumerate(rest):
                shares[entry.name] = tuple(free[number * size : (number + 1) * size])
        elif rest:
            pool = free or list(self._machine.cores)
            shares |= _shared_cores(rest, pool)
            places = ", ".join(f"{e.name} on {shares[e.name][0]}" for e in rest)
            stall = (
                "; a pair on one core stalls: give prefill and decode cores of their own"
                if len(pool) < _TWO_SIDES and self._connector
                else ""
            )
            self._notes.append(
                f"{len(rest)} CPU engines share {len(pool)} core(s) ({places}): they slow each other, and times mean "
                f"little{stall}"
            )
        for entry in here:
            cores, ranks = shares[entry.name], self._ranks(entry)
            if len(cores) < ranks:
                self._notes.append(f"{entry.name}: {ranks} ranks share {len(cores)} core(s): they slow each other")
        return shares

    def _may_stay(self, cores: Sequence[int], named: frozenset[int]) -> bool:
        """Whether an engine that runs on these cores may stay there, as nobody else names one of them."""
        return bool(cores) and named.isdisjoint(cores) and set(cores) <= set(self._machine.cores)

    def _share_gpus(self, entries: Sequence[_Entry]) -> dict[str, tuple[int, ...]]:
        """GPU indices for each CUDA engine: those it names, else the next ones that no engine has named."""
        cuda = [e for e in entries if e.device == "cuda" and e.engine.url is None]
        shares = {e.name: tuple(e.gpus) for e in cuda if e.gpus}
        taken: dict[str, set[int]] = defaultdict(set)
        for entry in cuda:
            taken[entry.engine.host].update(entry.gpus or ())
        stays = {e.name: before.gpus for e in cuda if (before := self._stays(e, shares, taken)) is not None}
        shares |= stays
        for entry in cuda:
            taken[entry.engine.host].update(stays.get(entry.name, ()))
        for entry in cuda:
            if entry.name not in shares:
                picked = self._free_gpus(entry, taken[entry.engine.host])
                shares[entry.name] = picked
                taken[entry.engine.host].update(picked)
        for entry in cuda:
            missing = [gpu for gpu in shares[entry.name] if gpu >= self._machine.gpus]
            if missing and entry.engine.host == self._at:
                raise TopologyError(
                    f"{entry.where(self._topology)}: {entry.name} needs GPU {missing[0]}; this machine has "
                    f"{self._machine.gpus}",
                    mend="name GPUs that exist (engines may share one), or fewer engines, or device: cpu",
                )
        return shares

    def _stays(
        self, entry: _Entry, shares: Mapping[str, tuple[int, ...]], taken: Mapping[str, set[int]]
    ) -> EnginePlan | None:
        """What runs of an engine, if it can stay on its GPUs: they are as many as it needs, and nobody names them."""
        before = self._running.get(entry.name)
        if before is None or entry.name in shares or before.host != entry.engine.host:
            return None
        fits = len(before.gpus) == self._ranks(entry) and taken[before.host].isdisjoint(before.gpus)
        return before if fits else None

    def _free_gpus(self, entry: _Entry, taken: set[int]) -> tuple[int, ...]:
        """The next GPUs of its host; those that another engine still runs on only if there are no others."""
        host, count = entry.engine.host, self._ranks(entry)
        others = (one for one in self._running.values() if one.host == host and one.name != entry.name)
        held = {gpu for one in others for gpu in one.gpus}
        free = tuple(itertools.islice((gpu for gpu in range(self._machine.gpus) if gpu not in taken | held), count))
        return (
            free
            if held and len(free) == count
            else tuple(itertools.islice((gpu for gpu in itertools.count() if gpu not in taken), count))
        )

    def _share_gpu_memory(
        self, entries: Sequence[_Entry], gpus: Mapping[str, tuple[int, ...]]
    ) -> dict[str, float | None]:
        """Memory fraction of each CUDA engine, refused where a GPU's engines together exceed the limit."""
        memory: dict[str, float | None] = {}
        on_gpu: dict[tuple[str, int], list[_Entry]] = defaultdict(list)
        for entry in entries:
            for gpu in gpus.get(entry.name, ()):
                on_gpu[(entry.engine.host, gpu)].append(entry)
        given: dict[str, float] = {}
        for entry in entries:
            by_flag = self._number(entry, "gpu-memory-utilization")
            if by_flag is not None:
                given[entry.name] = by_flag
            elif entry.gpu_memory_utilization is not None:
                given[entry.name] = entry.gpu_memory_utilization
        for entry in entries:
            if entry.name not in gpus:
                continue
            share = given.get(entry.name, _ALONE)
            if entry.name not in given:
                for gpu in gpus[entry.name]:
                    others = on_gpu[(entry.engine.host, gpu)]
                    left = GPU_MEMORY_LIMIT - sum(given.get(one.name, 0.0) for one in others)
                    open_ones = sum(one.name not in given for one in others)
                    share = min(share, int(max(0.0, left) / open_ones * 100 + 1e-6) / 100)
            memory[entry.name] = share
        for (host, gpu), sharing in on_gpu.items():
            total = sum(memory[one.name] or 0.0 for one in sharing)
            if total > GPU_MEMORY_LIMIT + 1e-9 or any((memory[one.name] or 0.0) <= 0 for one in sharing):
                raise TopologyError(
                    f"{sharing[-1].where(self._topology)}: GPU {gpu}{'' if host == 'local' else f' of {host}'}: "
                    f"{' + '.join(f'{one.name} {memory[one.name]:g}' for one in sharing)} = {total:.2f} of its memory",
                    mend=f"keep the sum of gpu_memory_utilization at {GPU_MEMORY_LIMIT} or below",
                )
        return memory

    def _check_needs_nothing(self, entry: _Entry) -> None:
        """A simulated engine has nothing that such fields could share out."""
        for name, device in _OF_A_DEVICE.items():
            if getattr(entry.engine, name) is not None or getattr(entry.tier_model, name) is not None:
                raise TopologyError(
                    f"{entry.where(self._topology, name)}: {entry.name}: {name} means nothing to a simulated engine",
                    mend=f"leave {name} out, or say device: {device} instead of device: sim",
                )

    def _check_simulated(self, entries: Sequence[_Entry]) -> None:
        """Simulated engines and real ones cannot hand over to each other, nor stand in for each other."""
        stated = [one for one in entries if one.engine.url is None or one.engine.device or one.tier_model.device]
        simulated = [one for one in stated if one.device == SIM]
        real = [one for one in stated if one.device != SIM]
        if simulated and real:
            raise TopologyError(
                f"{simulated[0].where(self._topology)}: {simulated[0].name} is simulated, {real[0].name} is a real "
                f"engine ({real[0].device}): they cannot serve one model together",
                mend="device: sim on every tier, or on none",
            )

    def _check_equal(self, engines: Sequence[EnginePlan]) -> None:
        """KV is copied byte for byte: what shapes it must be the same on every engine of a pair."""
        ours = [one for one in engines if one.started_by != "someone else"]
        paired = [one for one in ours if one.tier in ("prefill", "decode")]
        for name in SHAPES_OF_KV:
            # how long a prompt may be is checked once, at render: it must hold wherever the request goes
            values = {one.name: one.effective(name) for one in (ours if name == "max-model-len" else paired)}
            if len(set(values.values())) > 1:
                told = ", ".join(f"{engine} {value or '(vLLM decides)'}" for engine, value in values.items())
                raise TopologyError(
                    f"{self._topology.where('tiers')}: --{name} differs between engines: {told}",
                    mend="set it once, in the topology's own flags (or model)",
                )

    def _check_reach(self, entries: Sequence[_Entry]) -> None:
        """Decode on another host must be able to reach prefill."""
        away = [one.name for one in entries if one.tier == "decode" and not one.is_near]
        for entry in entries:
            if away and entry.tier == "prefill" and entry.is_near and _is_loopback(entry.advertise):
                raise TopologyError(
                    f"{entry.where(self._topology)}: {entry.name} is reachable from this machine only "
                    f"({entry.advertise}), but {away[0]} is not on it and must read its KV",
                    mend=f"give {entry.name} a bind address, and an advertise name that the other host knows",
                )

    def _check_movers(self, entry: _Entry, connector: Connector) -> None:
        try:
            connector.check_device(entry.device, self._topology.kv.options)
        except ValueError as error:
            raise TopologyError(
                f"{self._topology.where('kv')}: {connector.name} of {entry.name}: {error}",
                mend="name one of those in kv: {options: {movers: [...]}}, or leave movers out",
            ) from None

    def _check_ranks(self, entries: Sequence[_Entry], connector: Connector) -> None:
        """A connector whose ranks meet one to one must find as many of them on both sides of each pair."""
        started = [one for one in entries if one.tier != "mixed" and one.engine.url is None]
        for entry in started:
            for flag in ("pipeline-parallel-size", "data-parallel-size"):
                if (self._number(entry, flag) or 1) > 1:
                    where = f"{entry.where(self._topology)}: {entry.name}"
                    raise TopologyError(
                        f"{where}: {connector.name} does not hand over with --{flag}",
                        mend="use tensor_parallel, more engines, or kv: {connector: NixlConnector}",
                    )
        parts = {one.name: self._tensor_parallel(one) for one in started}
        if len(set(parts.values())) > 1:
            told = ", ".join(f"{name} has {count}" for name, count in parts.items())
            raise TopologyError(
                f"{self._topology.where('tiers')}: {connector.name} hands over from rank to rank, and {told}",
                mend="give prefill and decode as many GPUs (tensor_parallel), or kv: {connector: NixlConnector}",
            )

    def _check_one_host(self, entries: Sequence[_Entry], connector: Connector) -> None:
        """A connector that stays within a host must find both ends of each pair there, under addresses we know."""
        pair = [one for one in entries if one.tier != "mixed"]
        started = [one for one in pair if one.engine.url is None]
        for entry in started:
            if entry.engine.host != started[0].engine.host:
                raise TopologyError(
                    f"{entry.where(self._topology)}: {connector.name} moves KV within one host, but {entry.name} is on "
                    f"{entry.engine.host} and {started[0].name} on {started[0].engine.host}",
                    mend="keep prefill and decode on one host, or kv: {connector: NixlConnector}",
                )
        listening: dict[str, str] = {}
        for entry in pair:
            if (address := entry.engine.kv_address) is not None:
                if address in listening:
                    raise TopologyError(
                        f"{entry.where(self._topology)}: {listening[address]} and {entry.name} have one kv_address",
                        mend="give each engine its own",
                    )
                listening[address] = entry.name
        for entry in pair:
            asked_there = entry.tier == "prefill" and (entry.engine.url is not None or entry.engine.host != "local")
            if entry.engine.kv_address is None and (asked_there or (entry.engine.url and not entry.is_near)):
                raise TopologyError(
                    f"{entry.where(self._topology)}: where {connector.name} of {entry.name} listens is not known here",
                    mend="say where on this host (kv_address: unix:/PATH), or kv: {connector: NixlConnector}",
                )

    def _check_packages(self, devices: set[str]) -> None:
        version = self._machine.vllm
        if devices <= {SIM} and self._topology.gateway.plane == "text":
            return  # nothing here is vLLM
        if version is None:
            if devices == {SIM}:
                raise MissingPackageError(
                    "vLLM is not installed, and on the tokens plane the gateway renders with it",
                    mend="pip install 'trivet[cpu]' (see README), or gateway: {plane: text}",
                )
            extra = "cuda" if "cuda" in devices or self._machine.gpus else "cpu"
            raise MissingPackageError("vLLM is not installed", mend=f"pip install 'trivet[{extra}]' (see README)")
        if is_too_old(version):
            needed = ".".join(str(part) for part in OLDEST_VLLM)
            raise MissingPackageError(
                f"vLLM {version} is too old: Trivet needs {needed} or newer", mend="pip install -U vllm"
            )
        if self._machine.vllm_device == "cpu" and "cuda" in devices:
            raise TopologyError(
                "the topology has CUDA engines, but the vLLM installed here is the CPU build",
                mend="install vllm instead of vllm-cpu, or say device: cpu",
            )
        if self._machine.vllm_device == "cuda" and "cpu" in devices:
            raise TopologyError(
                "the topology has CPU engines, but the vLLM installed here is a CUDA build",
                mend="install vllm-cpu, or say device: cuda",
            )
        if self._connector:
            for device in sorted(devices - {SIM}):
                for need in self._connector.needs(device):
                    if not self._machine.has_package(need.package):
                        raise MissingPackageError(
                            f"{self._connector.name} needs the package {need.package}", mend=need.install
                        )

    def _render_flags(self, engines: Sequence[EnginePlan]) -> Iterator[str]:
        model = self._topology.model
        yield self._model
        yield from ("--served-model-name", *self._served)
        if self._tokenizer:
            yield from ("--tokenizer", self._tokenizer)
        length = next((one.effective("max-model-len") for one in engines if one.effective("max-model-len")), None)
        if length is not None:  # the same for all
            yield from ("--max-model-len", length)
        # The engines' own: pixels are rounded to it. Text has nothing of it.
        dtype = next((one.effective("dtype") for one in engines if one.effective("dtype")), None)
        yield from ("--dtype", model.dtype or dtype or "auto")
        yield from ("--enable-scale-out", "--disable-log-stats", "--disable-uvicorn-access-log")
        yield from self._topology.flags
        yield from self._topology.tiers.render.flags


@dataclass(frozen=True, slots=True)
class _Entry:
    """An engine of the file with its tier's settings behind it."""

    tier: str
    number: int
    tier_model: Tier
    engine: Engine
    device: str

    @property
    def name(self) -> str:
        return self.engine.name or f"{self.tier}-{self.number}"

    @property
    def advertise(self) -> str:
        return self.engine.advertise or _advertised(self.bind, self.engine.host)

    @property
    def is_near(self) -> bool:
        """Whether it shares this machine's loopback address."""
        if self.engine.url is not None:
            return _is_loopback(urlsplit(self.engine.url).hostname or "")
        return self.engine.host == "local"

    @property
    def gpus(self) -> list[int] | None:
        return self.engine.gpus if self.engine.gpus is not None else self.tier_model.gpus

    @property
    def cores(self) -> list[int] | None:
        return self.engine.cores if self.engine.cores is not None else self.tier_model.cores

    @property
    def bind(self) -> str:
        return self.engine.bind or ("127.0.0.1" if self.engine.host == "local" else "0.0.0.0")

    @property
    def tensor_parallel(self) -> int | None:
        return self.engine.tensor_parallel or self.tier_model.tensor_parallel

    @property
    def gpu_memory_utilization(self) -> float | None:
        return self.engine.gpu_memory_utilization or self.tier_model.gpu_memory_utilization

    @property
    def cpu_kv_gib(self) -> int:
        return self.engine.cpu_kv_gib or self.tier_model.cpu_kv_gib or 1

    def where(self, topology: Topology, field: str | None = None) -> str:
        """Where it stands in the file, or one of its fields, which may be its tier's."""
        if field is None:
            return topology.where("tiers", self.tier, "engines", self.number)
        if getattr(self.engine, field) is None:
            return topology.where("tiers", self.tier, field)
        return topology.where("tiers", self.tier, "engines", self.number, field)


_TWO_SIDES = 2


def _shared_cores(entries: Sequence[_Entry], pool: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """A core for each of more engines than there are cores. No decode engine is on a prefill engine's.

    Two that hand over to each other and share a core can stall each other: one spins while it waits for the other.
    """
    if len(pool) < _TWO_SIDES:
        return {entry.name: (pool[0],) for entry in entries}
    prefill = sum(entry.tier == "prefill" for entry in entries)
    cut = min(len(pool) - 1, max(1, len(pool) * prefill // len(entries)))
    sides: Mapping[str, Sequence[int]] = {"prefill": pool[:cut], "decode": pool[cut:], "mixed": pool}
    seen: dict[str, int] = defaultdict(int)
    shares: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        cores = sides[entry.tier]
        shares[entry.name] = (cores[seen[entry.tier] % len(cores)],)
        seen[entry.tier] += 1
    return shares


def _bound(cores: Sequence[int], ranks: int) -> str:
    """An engine's cores as ``VLLM_CPU_OMP_THREADS_BIND`` wants them: a list for each rank, ``|`` between them."""
    groups = [cores[rank::ranks] or (cores[rank % len(cores)],) for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in group) for group in groups)


_ALONE = 0.9

_MAX_LOGPROBS = 20
"""vLLM's default."""

SHAPES_OF_KV = ("block-size", "dtype", "kv-cache-dtype", "max-model-len")
"""Flags that must be the same on all engines that hand over to each other."""

_MANY_TOKENS = "a long prompt in as few passes as fit: prefill is bound by compute"
_FEW_TOKENS = "a prompt that decode must compute itself stalls running answers only for this many tokens"
_FEW_SEQUENCES = "more prompts at once only make each of them later"
_MANY_SEQUENCES = "decode is bound by memory bandwidth: each further sequence is nearly free"
_BOTH = "vLLM's usual compromise between the two"

_REAL_TIER_LIMITS: Mapping[str, Mapping[str, tuple[int, int, str, str]]] = {
    "cuda": {
        "prefill": (16384, 32, _MANY_TOKENS, _FEW_SEQUENCES),
        "decode": (2048, 256, _FEW_TOKENS, _MANY_SEQUENCES),
        "mixed": (8192, 256, _BOTH, _BOTH),
    },
    "cpu": {
        "prefill": (4096, 4, _MANY_TOKENS, _FEW_SEQUENCES),
        "decode": (512, 32, _FEW_TOKENS, _MANY_SEQUENCES),
        "mixed": (2048, 32, _BOTH, _BOTH),
    },
}

_TIER_LIMITS = {**_REAL_TIER_LIMITS, SIM: _REAL_TIER_LIMITS["cuda"]}
"""``max_num_batched_tokens`` and ``max_num_seqs`` by device and tier, each with its reason."""


def _can_run(connector: Connector, device: str) -> bool:
    return connector.name in _SIM_CONNECTORS if device == SIM else device in connector.devices


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _last_settings(own_flags: Sequence[str]) -> Iterator[Setting]:
    """The wire carries the sampled token among as many candidates as are asked for: the gateway asks for one more."""
    limit = flag_value(own_flags, "max-logprobs") or str(_MAX_LOGPROBS)
    if limit.isdigit():
        reason = "one more than clients may ask for: the sampled token takes a place among the best"
        yield Setting("max-logprobs", str(int(limit) + 1), reason)


def _advertised(bind: str, host: str) -> str:
    if bind not in ("0.0.0.0", "::"):
        return bind
    return socket.gethostname() if host == "local" else host


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def resolve_tokenizer(name: str | None, at: Path | None) -> str | None:
    """The tokenizer as engines are given it: a folder relative to the topology file as an absolute path."""
    if name is None:
        return None
    path = Path(name).expanduser()
    candidate = path if path.is_absolute() or at is None else at / path
    return str(candidate.resolve()) if candidate.is_dir() else name


def resolve_model(name: str, at: Path | None = None, where: str | None = None) -> str:
    """The model as engines are given it: a folder as an absolute path, a hub name as it is.

    Args:
        at: the folder that a relative path is relative to (the topology file's).
        where: ``file:line`` of the name, for messages.

    Raises:
        TopologyError: it looks like a path and is not a model's folder.
    """
    field = "model.name" if where is None else f"{where}: model.name"
    path = Path(name).expanduser()
    candidate = path if path.is_absolute() or at is None else at / path
    if candidate.is_dir():
        if not (candidate / "config.json").is_file():
            raise TopologyError(f"{field}: {candidate} has no config.json", mend="give a Hugging Face model's folder")
        return str(candidate.resolve())
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise TopologyError(f"{field}: there is no folder {candidate}", mend="give a folder or a hub name")
    return name
