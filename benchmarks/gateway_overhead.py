"""What a gateway costs: Trivet's two planes and vllm-router before the same simulated engines, and no gateway at all.

    python benchmarks/gateway_overhead.py --router /tmp/vllm-router-venv/bin/vllm-router --json overhead.json

One prefill, one decode and one mixed simulated engine serve all arms: ``mixed`` (the client asks the mixed engine),
``legs`` (the client asks prefill and then decode itself, as a gateway would), ``router`` (vllm-router in prefill/decode
mode), ``text`` and ``tokens`` (Trivet). Hand-overs are NixlConnector's in all. Gateways have one core, engines and
client the other. Every engine event is one token; nothing puts them together.

Each arm is measured ``--repeats`` times, in an order that rotates, under three loads: requests one after another
(``single``), ``--streams`` streams at once (``streams``), and requests with a long prompt one after another (``long``).
What is added is counted from ``legs``, which waits for the same engines' steps; ``over_mixed`` counts from ``mixed``.
A point whose client or engines were short of CPU is void: it is told and left out. One
whose client or gateway had to wait for others' processes keeps its CPU figures; its times count only if the arm has no
better ones (``calm_repeats``, ``times_are_steady``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from asking import MODEL
from checkpoint import Shape, write_checkpoint
from facts import facts
from idle_cpu import cpu_s
from raw_load import CHAT, COMPLETIONS, Job
from serving import ServiceFailedError, Up, descendants, end_in_order, free_ports, keep_logs

MIXED, LEGS, ROUTER, TEXT, TOKENS = ARMS = ("mixed", "legs", "router", "text", "tokens")
GATEWAYS = (ROUTER, TEXT, TOKENS)
ROUTER_VERSION = "0.1.17"
INSTALL_ROUTER = (
    f"python3 -m venv /tmp/vllm-router-venv && /tmp/vllm-router-venv/bin/pip install vllm-router=={ROUTER_VERSION}"
)
_LOADS = ("single", "streams", "long")
NOISE_MS = 1.0
"""Added times below it are not told apart on a machine of two cores: ratios count them as this."""
_CLIENT_SHARE, _LOAD_SHARE = 0.5, 0.85
"""Beyond these shares of the load's core, who asks and who answers are a part of what is measured."""
_LATE_MS, _WAITED_SHARE = 10.0, 0.1
"""Beyond these, other processes had the cores."""
_TICKS_S = 0.05
"""How wrong a count in ticks may be."""
_START_S, _POINT_SPARE_S = 90.0, 5.0
_PR_SET_PDEATHSIG = 1
_HEAD = Path(__file__).resolve().parent


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started inside runs on that core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(command: Sequence[str], log: Path, core: int, **more: Any) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    with on_core(core), log.open("wb") as output:
        return subprocess.Popen(
            command,
            **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, **more},
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )


def engine_command(name: str, port: int, options: argparse.Namespace, *, hands_over: bool) -> list[str]:
    kv = ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})]
    return [
        *(sys.executable, "-m", "trivet.sim", "serve", "sim", "--served-model-name", MODEL, "--name", name),
        *("--port", str(port), "--step-ms", str(options.step_ms), "--max-num-batched-tokens", "131072"),
        *("--kv-tokens", "2000000", "--keep-requests", "1"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--no-enable-prefix-caching"),
        *(kv if hands_over else ()),
    ]  # fmt: skip


def router_command(router: Path, port: int, metrics_port: int, engines: Mapping[str, int], more: str) -> list[str]:
    return [
        *(str(router), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin", "--log-level", "warning"),
        *("--prefill", f"http://127.0.0.1:{engines['prefill']}", "--decode", f"http://127.0.0.1:{engines['decode']}"),
        *more.split(),
    ]  # fmt: skip


def topology(plane: str, model: str, port: int, engines: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model": {"name": model, "served_names": [MODEL], "max_length": 131072},
        "kv": {"connector": "NixlConnector"},
        "tiers": {
            tier: {"engines": [{"name": tier, "url": f"http://127.0.0.1:{engines[tier]}", "device": "sim"}]}
            for tier in ("prefill", "decode")
        },
        "gateway": {"port": port, "plane": plane, "workers": 1, "drain_s": 1, "split": "always"},
    }


def rss_mib(pids: Sequence[int]) -> float:
    """Resident memory of some processes; what they share is counted in each."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return round(kib / 1024, 1)


class Load:
    """The process that asks."""

    def __init__(self, core: int, log: Path) -> None:
        self._log = log
        self._process = start(
            [sys.executable, str(_HEAD / "raw_load.py")],
            log,
            core,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    async def run(self, job: Job, spent: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """Runs a job; ``spent`` is read when its window opens and when it closes.

        Raises:
            ServiceFailedError: the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        self._process.stdin.flush()
        before: dict[str, float] = {}
        cpu: dict[str, float] = {}
        while True:
            said = await asyncio.to_thread(self._line)
            if said.get("window") == "open":
                before = spent()
            elif said.get("window") == "closed":
                cpu = {name: now_s - before[name] for name, now_s in spent().items()}
            else:
                result: dict[str, Any] = said["result"]
                return {**result, "cpu_s": {name: round(one, 5) for name, one in cpu.items()}}

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            told = " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-4:])
            raise ServiceFailedError(f"the load's process has ended: {told}")
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        stop(self._process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Stand:
    """Everything that runs."""

    ports: Mapping[str, int]
    """Of engines and gateways, by name."""
    engines: Sequence[int]
    """Their processes."""
    gateways: Mapping[str, int]
    """The first process of each."""
    load: Load

    def family(self, arm: str) -> list[int]:
        root = self.gateways.get(arm)
        return [] if root is None else [root, *descendants(root)]

    def spent(self, arm: str) -> dict[str, float]:
        """CPU seconds so far."""
        family = self.family(arm)
        return {
            "gateway": sum(cpu_s(pid) for pid in family),
            "gateway_fine": sum(scheduled_s(pid, 0) for pid in family),
            "gateway_waited": sum(scheduled_s(pid, 1) for pid in family),
            "engines": sum(cpu_s(pid) for pid in self.engines),
            "machine": machine_s(),
        }


def scheduled_s(pid: int, field: int) -> float:
    """Seconds that the present threads of a process ran (field 0), or could have run while others did (1)."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            nanoseconds += int(thread.read_text().split()[field])
    return nanoseconds / 1e9


def cpu_of(one: Mapping[str, Any]) -> float:
    """CPU seconds of a gateway in a load's window: to the nanosecond, unless a thread has taken its count with it."""
    ticks, fine = one["cpu_s"]["gateway"], one["cpu_s"]["gateway_fine"]
    return float(fine if fine > ticks - _TICKS_S else ticks)


def machine_s() -> float:
    """CPU seconds that all cores were busy."""
    fields = [int(one) for one in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


async def answers(http: aiohttp.ClientSession, port: int, path: str = "/health") -> None:
    """Returns when somebody answers 200."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with http.get(f"http://127.0.0.1:{port}{path}", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def standing(options: argparse.Namespace, scratch: Path) -> AsyncIterator[Stand]:
    """Starts everything, and ends it."""
    names = ("prefill", "decode", MIXED, *GATEWAYS, "metrics")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    gateway_core, load_core = options.cores
    planes = [arm for arm in options.arms if arm in (TEXT, TOKENS)]
    model = str(write_checkpoint(scratch / "model", Shape.tiny(), tokenizer=None)) if planes else ""
    ups = {plane: Up(plane, topology(plane, model, ports[plane], ports), scratch) for plane in planes}
    started: list[subprocess.Popen[bytes]] = []
    roots: dict[str, int] = {}
    try:
        try:
            async with aiohttp.ClientSession() as http, asyncio.timeout(_START_S):
                for name in ("prefill", "decode", MIXED):
                    command = engine_command(name, ports[name], options, hands_over=name != MIXED)
                    started.append(start(command, scratch / f"{name}.log", load_core))
                engines = [one.pid for one in started]
                await asyncio.gather(*(answers(http, ports[name]) for name in ("prefill", "decode", MIXED)))
                if ROUTER in options.arms:
                    command = router_command(
                        options.router, ports[ROUTER], ports["metrics"], ports, options.router_flags
                    )
                    started.append(start(command, scratch / "router.log", gateway_core))
                    roots[ROUTER] = started[-1].pid
                    await answers(http, ports[ROUTER])
                for plane, up in ups.items():
                    with on_core(gateway_core):
                        up.start()
                    assert up._process is not None
                    roots[plane] = up._process.pid
                for up in ups.values():
                    await up.ready(http)
        except TimeoutError as error:
            raise ServiceFailedError(f"not everything stood after {_START_S:g} s") from error
        load = Load(load_core, scratch / "load.log")
        started.append(load._process)
        yield Stand(ports, engines, roots, load)
    finally:
        if options.logs:
            keep_logs(list(ups.values()), options.logs / "gateway_overhead.log")
        for up in reversed(ups.values()):
            await up.stop()
        for process in reversed(started):
            stop(process)


def jobs(arm: str, ports: Mapping[str, int], options: argparse.Namespace, repeat: int) -> dict[str, Job]:
    """The loads of one point."""
    port, prefill_port = (ports["decode"], ports["prefill"]) if arm == LEGS else (ports[arm], None)
    where = {"port": port, "prefill_port": prefill_port, "path": options.path}
    answer_s = options.tokens * options.step_ms / 1000
    return {
        "single": Job(**where, requests=options.singles, tokens=3, seed=repeat),
        "streams": Job(
            **where,
            streams=options.streams,
            tokens=options.tokens,
            ramp_s=answer_s,
            window_s=options.window_s,
            seed=repeat,
        ),
        "long": Job(**where, requests=options.longs, words=options.long_words, tokens=2, seed=repeat),
    }  # fmt: skip


def problem_of(one: Mapping[str, Any], cores: int = 1) -> str | None:
    """Why a load's numbers say nothing of a gateway, or None."""
    if not one["answers"] or one["failed"] > one["answers"] / 100:
        return f"{one['failed']} of {one['answers']} requests failed: {'; '.join(one['errors'])}"
    client = one["client_cpu_share"]
    load = client + one["cpu_s"]["engines"] / one["window_s"] / cores
    if client > _CLIENT_SHARE:
        return f"the client took {client:.0%} of its core"
    if load > _LOAD_SHARE:
        return f"client and engines took {load:.0%} of their core"
    return None


def unrest_of(one: Mapping[str, Any]) -> str | None:
    """Why a load's times say more of the machine's other work than of a gateway, or None. CPU figures stand."""
    late_ms, waited = one["client_late_ms"]["p99"], one["cpu_s"]["gateway_waited"] / one["window_s"]
    if late_ms is not None and late_ms > _LATE_MS:
        return f"the client was {late_ms:.0f} ms late (p99)"
    if waited > _WAITED_SHARE:
        return f"the gateway waited for its core {waited:.0%} of the time"
    return None


async def point(arm: str, repeat: int, stand: Stand, options: argparse.Namespace) -> dict[str, Any]:
    """One arm, once."""
    found: dict[str, Any] = {"arm": arm, "repeat": repeat}
    for name, job in jobs(arm, stand.ports, options, repeat).items():
        one = await stand.load.run(job, lambda: stand.spent(arm))
        one["void"], one["unrest"] = problem_of(one), unrest_of(one)
        one["others_cpu_share"] = round(
            (one["cpu_s"]["machine"] - one["cpu_s"]["gateway"] - one["cpu_s"]["engines"]) / one["window_s"]
            - one["client_cpu_share"],
            3,
        )
        found[name] = one
    found["rss_mib"] = rss_mib(stand.family(arm))
    return found


def figures(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An arm's figures, of its repeats: medians; of times to first token, quantiles of all of them."""
    kept = {name: [one[name] for one in points if one[name]["void"] is None] for name in _LOADS}
    calm = {name: [one for one in ones if one["unrest"] is None] for name, ones in kept.items()}
    calm = {name: ones or kept[name] for name, ones in calm.items()}  # times of a restless machine, rather than none
    ttft_ms = {name: sorted(value for one in ones for value in one["ttft_ms"]) for name, ones in calm.items()}
    found: dict[str, Any] = {
        f"ttft_{name}_ms": {"p50": at(values, 0.5), "p99": at(values, 0.99), "mean": mean(values), "of": len(values)}
        for name, values in ttft_ms.items()
    }
    streams = kept["streams"]
    found |= {
        "itl_ms": {key: median(one["itl_ms"][key] for one in calm["streams"]) for key in ("p50", "p90", "p99", "mean")},
        "cpu_us_per_token": median(1e6 * cpu_of(one) / one["tokens"] for one in streams),
        "cpu_ms_per_long_request": median(1e3 * cpu_of(one) / one["requests"] for one in kept["long"]),
        "cpu_share": median(cpu_of(one) / one["window_s"] for one in streams),
        "tokens_per_s": median(one["tokens"] / one["window_s"] for one in streams),
        "events_per_token": median(one["events_per_token"] for one in streams),
        "rss_mib": max((one["rss_mib"] for one in points), default=None),
        "repeats": len(streams),
        "calm_repeats": {name: sum(one["unrest"] is None for one in ones) for name, ones in kept.items()},
        "void": [f"repeat {p['repeat']}, {n}: {p[n]['void']}" for p in points for n in kept if p[n]["void"]],
    }
    return found


def at(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 3) if values else None


def median(values: Any) -> float | None:
    listed = list(values)
    return round(statistics.median(listed), 4) if listed else None


_ADDED = {
    "ttft": ("ttft_single_ms", "p50"),
    "ttft_p99": ("ttft_single_ms", "p99"),
    "ttft_streams": ("ttft_streams_ms", "p50"),
    "ttft_streams_p99": ("ttft_streams_ms", "p99"),
    "ttft_streams_mean": ("ttft_streams_ms", "mean"),
    "ttft_long": ("ttft_long_ms", "p50"),
    "itl_p99": ("itl_ms", "p99"),
}


def added(arm: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float | None]:
    """Milliseconds that an arm adds to another."""
    found = {}
    for name, (group, key) in _ADDED.items():
        own, without = arm[group][key], base[group][key]
        found[name] = None if own is None or without is None else round(own - without, 3)
    return found


def ratio(own: float | None, other: float | None, floor: float = 0.0) -> float | None:
    if own is None or other is None or max(other, floor) <= 0:
        return None
    return round(max(own, floor) / max(other, floor), 3)


def ratios(arms: Mapping[str, Mapping[str, Any]], plane: str) -> dict[str, Any]:
    """A plane against vllm-router. Added times of less than ``NOISE_MS`` count as that."""
    own, router = arms[plane], arms[ROUTER]
    found: dict[str, Any] = {
        "cpu_per_token_ratio": ratio(own["cpu_us_per_token"], router["cpu_us_per_token"]),
        "cpu_per_long_request_ratio": ratio(own["cpu_ms_per_long_request"], router["cpu_ms_per_long_request"]),
        "rss_ratio": ratio(own["rss_mib"], router["rss_mib"]),
    }
    if LEGS in arms:
        three = (own, router, arms[LEGS])
        found["times_are_steady"] = all(one["calm_repeats"][load] for one in three for load in _LOADS)
        mine, its = added(own, arms[LEGS]), added(router, arms[LEGS])
        found |= {f"added_{name}_ratio": ratio(mine[name], its[name], NOISE_MS) for name in _ADDED}
    return found


def verdict(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all points say."""
    arms = {arm: figures(ones) for arm in ARMS if (ones := [one for one in points if one["arm"] == arm])}
    for arm in GATEWAYS:
        for key, base in (("added_ms", LEGS), ("added_over_mixed_ms", MIXED)):
            if arm in arms and base in arms:
                arms[arm][key] = added(arms[arm], arms[base])
    found: dict[str, Any] = {"arms": arms}
    for plane in (TEXT, TOKENS):
        if plane in arms and ROUTER in arms:
            found[plane] = ratios(arms, plane)
            found[plane]["of_each_repeat"] = [
                ratios({arm: figures(ones) for arm in ARMS if (ones := of_repeat(points, arm, repeat))}, plane)
                for repeat in sorted({one["repeat"] for one in points})
                if all(of_repeat(points, arm, repeat) for arm in (plane, ROUTER))
            ]
    return found


def of_repeat(points: Sequence[Mapping[str, Any]], arm: str, repeat: int) -> list[Mapping[str, Any]]:
    return [one for one in points if one["arm"] == arm and one["repeat"] == repeat]


def rotated(arms: Sequence[str], by: int) -> list[str]:
    by %= len(arms)
    return [*arms[by:], *arms[:by]]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    deadline_s = time.monotonic() + options.limit_s
    points: list[dict[str, Any]] = []
    stopped, idle = None, {}
    with tempfile.TemporaryDirectory(prefix="trivet-bench-") as scratch:
        try:
            async with standing(options, Path(scratch)) as stand, asyncio.timeout_at(_loop_time(deadline_s)):
                idle = await idle_shares(stand, options)
                longest_s = 0.0
                for repeat in range(options.repeats):
                    for arm in rotated(options.arms, repeat):
                        began_s = time.monotonic()
                        if began_s + longest_s + _POINT_SPARE_S > deadline_s:
                            raise TimeoutError
                        points.append(await point(arm, repeat, stand, options))
                        longest_s = max(longest_s, time.monotonic() - began_s)
                        print(line_of(points[-1]), file=sys.stderr, flush=True)
        except TimeoutError:
            stopped = f"--limit-s {options.limit_s:g} was reached; {len(points)} points are done"
        except (ServiceFailedError, aiohttp.ClientError) as error:
            stopped = f"{type(error).__name__}: {error}"[:1000]
    settings = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str | list)}
    return {
        **facts(options.commit),
        "vllm_router": router_version(options.router) if ROUTER in options.arms else None,
        "machine": machine(),
        "settings": settings,
        "stopped": stopped,
        "idle_cpu_share": idle,
        **verdict(points),
        "points": points,
    }


def _loop_time(monotonic_s: float) -> float:
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


async def idle_shares(stand: Stand, options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds a second of gateways that nobody asks anything."""
    await asyncio.sleep(1.0)
    before = {arm: stand.spent(arm)["gateway_fine"] for arm in options.arms if arm in GATEWAYS}
    await asyncio.sleep(options.idle_s)
    return {arm: round((stand.spent(arm)["gateway_fine"] - spent) / options.idle_s, 4) for arm, spent in before.items()}


def router_version(router: Path) -> str | None:
    told = "from importlib.metadata import version; print(version('vllm-router'))"
    done = subprocess.run([router.parent / "python", "-c", told], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return {"cpu": model, "kernel": os.uname().release, "load_average": os.getloadavg()}


def line_of(one: Mapping[str, Any]) -> str:
    streams = one["streams"]
    said = (
        f"{one['arm']:<7} #{one['repeat']}: single {_ms(at(sorted(one['single']['ttft_ms']), 0.5))}, "
        f"streams TTFT {_ms(mean(streams['ttft_ms']))}, ITL p99 {_ms(streams['itl_ms']['p99'])}, "
        f"{1e6 * cpu_of(streams) / max(1, streams['tokens']):.0f} us a token, "
        f"{1e3 * cpu_of(one['long']) / max(1, one['long']['requests']):.1f} ms a long request, "
        f"others {streams['others_cpu_share']:.0%}"
    )
    said += "".join(f"; {name}: {one[name]['unrest']}" for name in _LOADS if one[name]["unrest"])
    return said + "".join(f"; VOID {name}: {one[name]['void']}" for name in _LOADS if one[name]["void"])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


_ROWS = {
    "TTFT p50 / p99, one stream (ms)": lambda a: _pair(a["ttft_single_ms"]),
    "TTFT p50 / p99, all streams (ms)": lambda a: _pair(a["ttft_streams_ms"]),
    "TTFT p50 / p99, long prompt (ms)": lambda a: _pair(a["ttft_long_ms"]),
    "ITL p50 / p99, all streams (ms)": lambda a: _pair(a["itl_ms"]),
    "added TTFT p50 / p99, one stream (ms)": lambda a: _added(a, "ttft", "ttft_p99"),
    "added TTFT mean / p99, all streams (ms)": lambda a: _added(a, "ttft_streams_mean", "ttft_streams_p99"),
    "added TTFT p50, long prompt (ms)": lambda a: _added(a, "ttft_long"),
    "added ITL p99, all streams (ms)": lambda a: _added(a, "itl_p99"),
    "CPU of a token (us)": lambda a: _number(a["cpu_us_per_token"], 1),
    "CPU of a long request (ms)": lambda a: _number(a["cpu_ms_per_long_request"], 2),
    "share of a core": lambda a: _number(a["cpu_share"], 3),
    "tokens/s": lambda a: _number(a["tokens_per_s"], 0),
    "RSS (MiB)": lambda a: _number(a["rss_mib"], 0),
}


def _calm(arm: Mapping[str, Any]) -> str:
    return " ".join(str(arm["calm_repeats"][name]) for name in _LOADS) + f" of {arm['repeats']}"


def _pair(values: Mapping[str, float | None]) -> str:
    return f"{_number(values['p50'], 2)} / {_number(values['p99'], 2)}"


def _added(arm: Mapping[str, Any], *names: str) -> str:
    return " / ".join(_number(arm["added_ms"][name], 2) for name in names) if "added_ms" in arm else ""


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(results: Mapping[str, Any]) -> str:
    arms = results["arms"]
    lines = [f"{'':<42}" + "".join(f"{arm:>18}" for arm in arms)]
    for name, cell in _ROWS.items():
        lines.append(f"{name:<42}" + "".join(f"{cell(one):>18}" for one in arms.values()))
    for plane in (TEXT, TOKENS):
        if plane in results:
            told = {name: value for name, value in results[plane].items() if name != "of_each_repeat"}
            lines.append(f"{plane} to vllm-router: " + ", ".join(f"{name} {value}" for name, value in told.items()))
    lines.append(f"{'repeats with steady times':<42}" + "".join(f"{_calm(one):>18}" for one in arms.values()))
    lines += [f"void: {arm}, {one}" for arm, told in arms.items() for one in told["void"]]
    if results["stopped"]:
        lines.append(f"stopped: {results['stopped']}")
    return "\n".join(lines)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", help=f"{', '.join(ARMS)}; without any: all")
    parser.add_argument("--router", type=Path, default=Path("/tmp/vllm-router-venv/bin/vllm-router"))
    parser.add_argument("--router-flags", default="", help="more of them, in one string")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--logs", type=Path, help="folder: the gateways' logs")
    parser.add_argument("--path", default=CHAT, choices=(CHAT, COMPLETIONS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer, with many streams")
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the engines: a token of every answer")
    parser.add_argument("--window-s", type=float, default=10.0, help="of the load with many streams")
    parser.add_argument("--singles", type=int, default=30, help="requests one after another")
    parser.add_argument("--longs", type=int, default=15, help="requests with a long prompt")
    parser.add_argument("--long-words", type=int, default=9000, help="of a long prompt; each is about a token")
    parser.add_argument("--idle-s", type=float, default=3.0, help="over which idle gateways are looked at")
    parser.add_argument("--cores", type=int, nargs=2, metavar=("GATEWAY", "LOAD"))
    parser.add_argument("--limit-s", type=float, default=900.0, help="of the whole run, once everything is started")
    parser.add_argument("--commit", help="of the measured tree, where it lies without its repository")
    options = parser.parse_args(arguments)
    if unknown := set(options.arms) - set(ARMS):
        parser.error(f"unknown: {', '.join(unknown)}")
    options.arms = [arm for arm in ARMS if arm in options.arms] or list(ARMS)
    if ROUTER in options.arms and not options.router.is_file():
        parser.error(f"no vllm-router at {options.router}; install it: {INSTALL_ROUTER}")
    options.router = options.router.absolute()
    allowed = sorted(os.sched_getaffinity(0))
    options.cores = options.cores or allowed[:2]
    if len(set(options.cores)) < 2:
        parser.error("gateways and load need a core each")
    return options


def main() -> None:
    options = options_of()
    end_in_order()
    results = asyncio.run(run(options))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
