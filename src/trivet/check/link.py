"""The link between two engines: what is in its way, what carries it, how fast, and what it should give.

A transport that falls back says nothing: KV that could go from GPU to GPU at hundreds of gigabytes a second crosses
TCP at half of one, and all that shows is a late first token. ``settings`` looks at what the engines tell and this
machine has, ``measure`` reads between two processes in the engines' places, and ``judge`` compares. ``look_at_link``
is all of it; what TrivetConnector picked shows when it has moved something (``judge_mover``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from trivet.check import ucx
from trivet.check.devices import Devices, free_memory_bytes, is_here, look
from trivet.check.told import EngineFacts
from trivet.check.ucx import Carrier
from trivet.check.verdict import Finding, Level, failed, passed, warned
from trivet.errors import MissingPackageError, TrivetError
from trivet.fleet.told import namespaces

MIB = 2**20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes of a read. A prompt's KV comes in many: the largest tell the link, the smallest what each read costs."""
LIMIT_S = 30.0
_READING_S = 12.0
"""Of the limit; the rest is for two processes to start."""

_NVLINK_GB_S = 25.0
"""One way, of one link of NVLink 2 to 4 (NVIDIA's data sheets: 18 links, 450 GB/s one way, on H100 and H200)."""
_OF_NVLINK = 0.87
"""What copies reach of it: 392 of 450 GB/s, measured between two H200."""
_PCIE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One way, of one lane, by generation (PCI-SIG's rates with their encoding)."""
_OF_PCIE = 0.85
"""What copies reach of it: 55 of 63 GB/s from an H200 to pinned memory and back, measured."""
_OF_RDMA = 0.9
_SLOW = 0.5
"""Less than this share of what a link should give is told."""

_LEAST_SHM_BYTES = 512 * MIB
"""Docker gives containers 64 MiB unless told."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was read from the one place to the other."""

    gb_s: Mapping[int, float]
    """Gigabytes (1e9 bytes) a second, the median, by bytes of a read."""
    told: str | None
    """What UCX says that it uses for large reads, in its words; None if it does not say."""
    gpu: bool
    """Between GPUs' memory; else the host's."""
    intact: bool = True
    """Whether what was read is what was there."""

    @property
    def carrier(self) -> Carrier | None:
        """What carries it."""
        return None if self.told is None else ucx.carrier(self.told)

    @property
    def best_gb_s(self) -> float:
        """At the size that goes best."""
        return max(self.gb_s.values(), default=0.0)


async def look_at_link(prefill: EngineFacts, decode: EngineFacts, connector: str, about: str) -> list[Finding]:
    """What can be said of a pair's link before anything is handed over; NIXL's is measured where both are here.

    Takes up to ``LIMIT_S`` and some.
    """
    devices = await look()
    findings = settings(prefill, decode, connector, devices, about)
    if not connector.startswith("Nixl") or not _one_machine(prefill, decode):
        return findings  # `host` says what becomes of it
    if not is_here(prefill.boot):
        return [*findings, warned("link", about, "not measured from here", f"run trivet check on {decode.host}")]
    try:
        finding = judge(await measure(prefill, decode), prefill, decode, devices, about)
    except TrivetError as error:
        return [*findings, warned("link", about, error.problem, error.mend or "see the canaries")]
    if any(_is_elsewhere(facts) for facts in (prefill, decode)):
        finding = dataclasses.replace(finding, said=f"{finding.said} (measured outside the engines' containers)")
    return [*findings, finding]


def _is_elsewhere(facts: EngineFacts) -> bool:
    """Whether an engine is in another container than this process."""
    own = dict(namespaces())
    return any(own.get(kind, one) != one for kind, one in (facts.namespaces or {}).items() if kind in ("ipc", "pid"))


def _in_gpu_memory(facts: EngineFacts) -> bool:
    """Whether its KV is read out of, or into, GPUs."""
    return bool(facts.gpus) and facts.kv_buffer_device != "cpu"


# what is in its way


def settings(
    prefill: EngineFacts, decode: EngineFacts, connector: str, devices: Devices, about: str = "prefill -> decode"
) -> list[Finding]:
    """What the engines tell, and this machine has, that takes the fast path away.

    Args:
        devices: of this machine; only counted where the engines run on it.
    """
    names = about.split(" -> ")
    ends = ((names[0], prefill), (names[-1], decode))
    is_nixl = connector.startswith("Nixl")
    findings = [_hosts(prefill, decode, connector, about)]
    if is_nixl:
        findings += [_ucx_settings(ends, devices, about), _backends(prefill, decode, about)]
    findings += _limits(ends, devices, connector, about)
    if prefill.gpus and decode.gpus and _one_machine(prefill, decode):
        findings.append(_peer_access(prefill, decode, devices, about))
    return findings


def _one_machine(prefill: EngineFacts, decode: EngineFacts) -> bool | None:
    return None if None in (prefill.boot, decode.boot) else prefill.boot == decode.boot


def _hosts(prefill: EngineFacts, decode: EngineFacts, connector: str, about: str) -> Finding:
    together = _one_machine(prefill, decode)
    ours = connector == "TrivetConnector"
    if together is None:
        return warned("host", about, "whether both run on one machine is not told", "see the canaries")
    if not together:
        said = f"two machines ({prefill.host} and {decode.host})"
        if ours:
            return failed(
                "host",
                about,
                f"{said}, and TrivetConnector moves KV within one",
                "run both on one, or kv: {connector: NixlConnector}",
            )
        return passed("host", about, f"{said}; the link is measured by the canaries")
    if ours and prefill.host != decode.host:
        return failed(
            "host",
            about,
            f"one machine under two host names ({prefill.host} and {decode.host}): TrivetConnector takes them for two",
            "give both containers one name (docker run --hostname NAME; in Kubernetes, one pod)",
        )
    here, there = prefill.namespaces or {}, decode.namespaces or {}
    apart = [kind for kind in ("ipc", "pid") if here.get(kind) and there.get(kind) and here[kind] != there[kind]]
    if apart:
        return warned(
            "host",
            about,
            f"one machine, two containers ({' and '.join(apart)} namespaces differ): memory of the one may be out of "
            "the other's reach, and transports fall back",
            "run both with --ipc=host (docker), hostIPC: true (Kubernetes), or in one pod with "
            "shareProcessNamespace: true",
        )
    return passed("host", about, f"both on {prefill.host}")


def _ucx_settings(ends: Sequence[tuple[str, EngineFacts]], devices: Devices, about: str) -> Finding:
    name = "ucx-settings"
    told = {engine: facts.environment for engine, facts in ends if facts.environment is not None}
    if len(told) < len(ends):
        silent = " and ".join(engine for engine, _ in ends if engine not in told)
        return warned(name, about, f"UCX_* of {silent} are not told", "see link, or the canaries")
    gpus = any(facts.gpus for _, facts in ends)
    together = _one_machine(ends[0][1], ends[1][1])
    rdma = [one.device for one in devices.active_rdma]
    for engine, environment in told.items():
        tls, net = environment.get("UCX_TLS"), environment.get("UCX_NET_DEVICES")
        mend = f"start {engine} without UCX_TLS, or with UCX_TLS=all"
        if gpus and not ucx.allows(tls, "cuda_copy"):
            said = f"UCX_TLS={tls} of {engine} leaves cuda_copy out: NIXL does not start so where there are GPUs"
            return failed(name, about, said, mend)
        if gpus and together and not ucx.allows(tls, "cuda_ipc"):
            said = f"UCX_TLS={tls} of {engine} leaves cuda_ipc out: no KV goes from GPU to GPU directly"
            return failed(name, about, said, mend)
        if not gpus and together and not ucx.allows(tls, "cma", "xpmem", "knem", "sysv", "posix"):
            said = f"UCX_TLS={tls} of {engine} leaves shared memory out: KV goes over TCP within one machine"
            return failed(name, about, said, mend)
        if together is False and rdma and not ucx.allows(tls, *ucx.RDMA):
            said = f"UCX_TLS={tls} of {engine} leaves RDMA out, and there is {', '.join(rdma)}"
            return failed(name, about, said, mend)
        if together is False and rdma and not ucx.names_one_of(net, rdma):
            return failed(
                name,
                about,
                f"UCX_NET_DEVICES={net} of {engine} names none of the RDMA devices ({', '.join(rdma)})",
                f"start {engine} without UCX_NET_DEVICES, or with {rdma[0]}:1",
            )
    words = [environment.get("UCX_TLS", "") for environment in told.values()]
    if words[0] != words[1]:
        said = " and ".join(f"{engine} {one or '(unset)'}" for (engine, _), one in zip(ends, words, strict=True))
        return warned(name, about, f"UCX_TLS differs: {said}", "start both with the same, best with none")
    return passed(name, about, f"UCX_TLS={words[0]}" if words[0] else "UCX chooses among all transports")


def _backends(prefill: EngineFacts, decode: EngineFacts, about: str) -> Finding:
    name, here, there = "nixl-backends", prefill.nixl_backends, decode.nixl_backends
    if here is None or there is None:
        return warned(name, about, "NIXL's backends are not told", "see link, or the canaries")
    if not set(here) & set(there):
        return failed(
            name,
            about,
            f"no backend of NIXL is on both: {', '.join(here)} and {', '.join(there)}",
            '"backends": ["UCX"] in kv_connector_extra_config of both, or leave it out',
        )
    return passed(name, about, ", ".join(one for one in here if one in there))


def _limits(ends: Sequence[tuple[str, EngineFacts]], devices: Devices, connector: str, about: str) -> Iterator[Finding]:
    name, well = "memory-limits", True
    for engine, facts in ends:
        if not facts.whole:
            continue
        if devices.active_rdma and facts.locked_memory_bytes is not None:
            well = False
            yield warned(
                name,
                engine,
                f"it may pin {facts.locked_memory_bytes // 1024} KiB (ulimit -l), and RDMA pins all of the KV cache",
                "docker run --ulimit memlock=-1, LimitMEMLOCK=infinity (systemd), or ulimit -l unlimited",
            )
        if facts.shm_bytes is not None and facts.shm_bytes < _LEAST_SHM_BYTES:
            well = False
            yield warned(
                name,
                engine,
                f"its /dev/shm holds {facts.shm_bytes // MIB} MiB: shared memory "
                f"{'of a mover' if connector == 'TrivetConnector' else 'between processes'} may not fit",
                "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory at /dev/shm",
            )
    if devices.active_rdma and devices.gpu_rdma is False and any(facts.gpus for _, facts in ends):
        well = False
        yield warned(
            name,
            about,
            "the kernel module nvidia_peermem is not loaded: unless the driver offers dma-buf, RDMA cannot reach GPU "
            "memory and copies through the host",
            "modprobe nvidia_peermem",
        )
    if well:
        yield passed(name, about, "locked memory and /dev/shm suffice")


def _peer_access(prefill: EngineFacts, decode: EngineFacts, devices: Devices, about: str) -> Finding:
    name = "gpu-peer-access"
    if not (_in_gpu_memory(prefill) and _in_gpu_memory(decode)):
        return warned(
            name,
            about,
            "kv_buffer_device is cpu: each transfer goes through host memory, as it was asked for",
            '"kv_buffer_device": "cuda" in --kv-transfer-config of both',
        )
    pairs = list(_gpu_pairs(prefill, decode, devices))
    if devices.peers is None or not pairs or any(None in pair for pair in pairs):
        return warned(
            name, about, "whether their GPUs reach each other is not known here", "run it on the engines' host"
        )
    numbers = [(one.number, other.number) for one, other in pairs if one and other]
    links = sorted({devices.links.get(pair, "") for pair in numbers} - {""})
    over = f" over {', '.join(links)}" if links else ""
    away = [(a, b) for a, b in numbers if a != b and (b, a) not in devices.peers]
    if away:
        a, b = away[0]
        return warned(
            name,
            about,
            f"GPU {b} cannot read GPU {a}'s memory{over}: KV goes through the host's",
            "give the pair GPUs that reach each other (nvidia-smi topo -p2p r), or use TrivetConnector, which "
            "overlaps the way through the host with prefill",
        )
    return passed(name, about, f"GPUs reach each other's memory{over}")


def _gpu_pairs(prefill: EngineFacts, decode: EngineFacts, devices: Devices) -> Iterator[tuple[Any, Any]]:
    """Of each of decode's GPUs, which reads, and the one of prefill's that it reads: rank by rank."""
    here, there = prefill.gpus or (), decode.gpus or ()
    ranks = max(1, decode.tensor_parallel or 1)
    for rank in range(min(ranks, len(there))):
        other = here[rank * max(1, min(prefill.tensor_parallel or 1, len(here))) // ranks] if here else {}
        yield devices.gpu(str(other.get("uuid"))), devices.gpu(str(there[rank].get("uuid")))


# measured


async def measure(
    prefill: EngineFacts,
    decode: EngineFacts,
    *,
    sizes: Sequence[int] = SIZES,
    times: int = 5,
    limit_s: float = LIMIT_S,
    python: str = sys.executable,
) -> Measured:
    """Reads from a process in prefill's place with one in decode's, both here, with NIXL and the engines' settings.

    On the first GPU of each if both keep KV there, else in host memory. It takes that much memory twice beside the
    engines, and no more than ``limit_s``.

    Raises:
        MissingPackageError: NIXL is not installed here.
        TrivetError: it cannot be measured, in one line.
    """
    gpu = _in_gpu_memory(prefill) and _in_gpu_memory(decode)
    if not gpu:
        sizes = _fitting(sizes)
    arguments = [
        *("--memory", "VRAM" if gpu else "DRAM", "--times", str(times), "--limit-s", f"{min(_READING_S, limit_s)}"),
        *("--sizes", *map(str, sizes)),
    ]
    async with contextlib.AsyncExitStack() as ending:
        try:
            async with asyncio.timeout(limit_s):
                target = await _start(python, "target", arguments, prefill, gpu)
                ending.push_async_callback(_end, target)
                logs = [asyncio.create_task(_drained(target))]
                initiator = await _start(python, "initiator", arguments, decode, gpu)
                ending.push_async_callback(_end, initiator)
                logs.append(asyncio.create_task(_drained(initiator)))
                assert initiator.stdin is not None
                initiator.stdin.write(json.dumps(await _line(target)).encode() + b"\n")
                result = await _line(initiator)
                await initiator.wait()
                log = await logs[1]
        except TimeoutError:
            raise TrivetError(
                f"NIXL did not read {sizes[0] // MIB} to {sizes[-1] // MIB} MiB within {limit_s:g} s",
                mend="see the engines' logs for NIXL and UCX",
            ) from None
    by_size: dict[int, list[float]] = {}
    for size, took_s in result.get("reads", ()):
        by_size.setdefault(int(size), []).append(float(took_s))
    if not by_size:
        raise TrivetError("NIXL read nothing", mend="see the engines' logs for NIXL and UCX")
    gb_s = {size: size / statistics.median(took_s) / 1e9 for size, took_s in by_size.items()}
    return Measured(gb_s, ucx.picked(log), gpu, result.get("intact") is True)


def _fitting(sizes: Sequence[int]) -> Sequence[int]:
    """Both ends together take no more than a quarter of what is free."""
    free = free_memory_bytes()
    return [one for one in sizes if free is None or 8 * one <= free] or [min(sizes)]


async def _start(
    python: str, side: str, arguments: Sequence[str], facts: EngineFacts, gpu: bool
) -> asyncio.subprocess.Process:
    told = facts.environment or {}
    theirs = {name: value for name, value in told.items() if name.startswith(("UCX_", "NIXL_"))}
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    environment = {**ours, **theirs, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "stderr", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if gpu:
        assert facts.gpus
        environment["CUDA_VISIBLE_DEVICES"] = str(facts.gpus[0].get("uuid"))
    options = facts.connector_options or {}
    threads = options.get("num_threads", 4)
    return await asyncio.create_subprocess_exec(
        python,
        *("-m", "trivet.check.probe_nixl", side, *arguments),
        *("--backends", *(facts.nixl_backends or ("UCX",))),
        *("--threads", str(threads if isinstance(threads, int) else 4)),
        *("--progress-thread", "0" if told.get("TRIVET_NIXL_PROGRESS_THREAD") == "0" else "1"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """What an end answers."""
    assert process.stdout is not None
    text = await process.stdout.readline()
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        raise TrivetError(
            "not measured: NIXL's process said nothing that can be read",
            mend="run it by hand: python -m trivet.check.probe_nixl target --memory DRAM --sizes 1048576",
        ) from None
    problem = answer.get("problem")
    if problem is None:
        return answer
    if "package nixl" in problem:
        raise MissingPackageError(problem, mend="pip install 'nixl>=1.5', or measure where it is")
    raise TrivetError(f"not measured: {problem}", mend="see the engines' logs for NIXL and UCX")


async def _drained(process: asyncio.subprocess.Process) -> str:
    """Its log; read all the while, or it would wait for a reader."""
    assert process.stderr is not None
    return (await process.stderr.read()).decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# judged


def expected_gb_s(carrier: Carrier, link: str = "", gpu: Any = None, rdma_gbit_s: float | None = None) -> float | None:
    """What copies reach over such a link, one way; None where that is not known beforehand.

    Args:
        link: ``nvidia-smi topo``'s word between the two GPUs.
        gpu: one of the two (``devices.Gpu``).
    """
    if carrier is Carrier.PEER and (nvlinks := re.fullmatch(r"NV(\d+)", link)):
        return int(nvlinks[1]) * _NVLINK_GB_S * _OF_NVLINK
    if carrier in (Carrier.PEER, Carrier.STAGED) and gpu is not None and gpu.pcie_gen in _PCIE_GB_S:
        return float(_PCIE_GB_S[gpu.pcie_gen] * (gpu.pcie_lanes or 16) * _OF_PCIE)
    if carrier is Carrier.RDMA and rdma_gbit_s:
        return rdma_gbit_s / 8 * _OF_RDMA
    return None


def judge(
    measured: Measured, prefill: EngineFacts, decode: EngineFacts, devices: Devices, about: str = "prefill -> decode"
) -> Finding:
    """Whether a pair's link is carried by what it could be carried by, and as fast as that goes."""
    name = "link"
    sizes = ", ".join(f"{rate:.3g} GB/s at {size // MIB} MiB" for size, rate in measured.gb_s.items())
    carrier = measured.carrier
    said = f"{carrier or 'an unknown transport'} ({measured.told or 'UCX does not say which'}): {sizes}"
    if not measured.intact:
        return failed(name, about, f"what was read is not what was there; {said}", "do not hand over by this link")
    if carrier is None:
        return warned(name, about, said, "see the engines' logs with UCX_PROTO_INFO=y")
    here, there = next(iter(_gpu_pairs(prefill, decode, devices)), (None, None)) if measured.gpu else (None, None)
    numbers = (here.number, there.number) if here and there else (-1, -1)
    reaches = devices.peers is not None and numbers[::-1] in devices.peers
    if measured.gpu and reaches and carrier is not Carrier.PEER:
        over = devices.links.get(numbers)
        return failed(
            name,
            about,
            f"the GPUs reach each other{f' over {over}' if over else ''}, and KV goes by {said}",
            _mend_of_fallback(prefill, decode),
        )
    if carrier is Carrier.TCP:
        return failed(name, about, f"KV goes by {said}", _mend_of_fallback(prefill, decode))
    rate = max((one.gbit_s or 0 for one in devices.active_rdma), default=None)
    should = expected_gb_s(carrier, devices.links.get(numbers, ""), there, rate)
    if should is not None:
        said = f"{said}; such a link gives about {should:.3g}"
        if measured.best_gb_s < _SLOW * should:
            return warned(name, about, said, "see that nothing else uses it, and that GPU and NIC are on one NUMA node")
    if measured.gpu and carrier is Carrier.STAGED:
        return warned(
            name, about, said, "give the pair GPUs that reach each other, or use TrivetConnector's mover pinned"
        )
    return passed(name, about, said)


def _mend_of_fallback(prefill: EngineFacts, decode: EngineFacts) -> str:
    set_by = sorted(
        {
            f"{name}={facts.environment[name]}"
            for facts in (prefill, decode)
            for name in ("UCX_TLS", "UCX_NET_DEVICES")
            if facts.environment and facts.environment.get(name)
        }
    )
    if set_by:
        return f"start both without {' and '.join(set_by)}"
    return (
        "run both with --ipc=host (docker) or hostIPC: true (Kubernetes), and see that nvidia-smi topo -p2p r says OK; "
        "TrivetConnector's mover pinned needs neither"
    )


# TrivetConnector's mover

_FASTEST = {"cuda_p2p": 0, "pinned": 1, "shm": 1}


def movers_told(metrics: str) -> dict[str, float]:
    """Bytes by mover that an engine counts as received (``vllm:trivet_kv_bytes_total``)."""
    found: dict[str, float] = {}
    with contextlib.suppress(ValueError):
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if sample.name == "vllm:trivet_kv_bytes_total" and sample.value and (one := sample.labels.get("mover")):
                    found[one] = found.get(one, 0.0) + sample.value
    return found


def judge_mover(
    metrics: str, prefill: EngineFacts, decode: EngineFacts, devices: Devices, about: str = "prefill -> decode"
) -> Finding:
    """Which mover carries a pair's KV, from decode's counters, and whether a faster one could.

    Args:
        metrics: decode's ``/metrics``, after something has moved.
    """
    name, told = "mover", movers_told(metrics)
    if not told:
        return warned(
            name, about, "decode has received nothing by any mover", "hand something over first (the canaries do)"
        )
    said = ", ".join(f"{mover} ({size / 1e6:.4g} MB)" for mover, size in sorted(told.items()))
    if all(_FASTEST.get(mover, 1) == 0 for mover in told) or not (prefill.gpus and decode.gpus):
        return passed(name, about, said)
    for facts in (prefill, decode):
        named = (facts.connector_options or {}).get("movers")
        if isinstance(named, list | tuple) and named and "cuda_p2p" not in named:
            return warned(
                name,
                about,
                f"{said}; movers leaves cuda_p2p out, which is faster where GPUs reach each other",
                "leave movers out of kv: options, or put cuda_p2p first",
            )
    access = _peer_access(prefill, decode, devices, about)
    if access.level is Level.PASS:
        return failed(
            name,
            about,
            f"{said}, and not cuda_p2p, though {access.said}",
            "run both with --ipc=host (docker) or hostIPC: true (Kubernetes), and look for cuda_p2p in prefill's log",
        )
    return passed(name, about, f"{said}; {access.said}")
