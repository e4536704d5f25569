import asyncio
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes import below, left_of, lives, until
from trivet.check import link
from trivet.check.devices import Devices, Gpu, RdmaPort
from trivet.check.link import (
    MIB,
    Measured,
    expected_gb_s,
    judge,
    judge_mover,
    look_at_link,
    measure,
    movers_told,
    settings,
)
from trivet.check.told import TELL, EngineFacts
from trivet.check.ucx import Carrier
from trivet.check.verdict import Level
from trivet.errors import MissingPackageError, TrivetError

FAIL, WARN, PASS = Level.FAIL, Level.WARN, Level.PASS
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
CPU = EngineFacts(
    whole=True, host="h", boot=BOOT, connector_options={}, environment={}, gpus=(), shm_bytes=2**33, device="cpu"
)
GPU_A = dataclasses.replace(CPU, device="cuda", tensor_parallel=1, gpus=({"name": "H200", "uuid": "GPU-a"},))
GPU_B = dataclasses.replace(GPU_A, gpus=({"name": "H200", "uuid": "GPU-b"},))
GPUS = (Gpu(0, "GPU-a", "H200", 5, 16), Gpu(1, "GPU-b", "H200", 5, 16))
NVLINK = Devices(GPUS, frozenset({(0, 1), (1, 0)}), {(0, 1): "NV18", (1, 0): "NV18"}, gpu_rdma=False)
APART = Devices(GPUS, frozenset(), {(0, 1): "SYS", (1, 0): "SYS"}, gpu_rdma=False)
RDMA = dataclasses.replace(APART, rdma=(RdmaPort("mlx5_0", "1", True, 400.0),), gpu_rdma=True)
NOTHING = Devices()


def found(prefill=CPU, decode=CPU, connector="NixlConnector", devices=NOTHING):
    findings = settings(prefill, decode, connector, devices, "prefill-0 -> decode-0")
    assert all(one.mend for one in findings if one.level is not PASS)
    return findings


def bad(findings):
    return {one.name: one.level for one in findings if one.level is not PASS}


def env(facts, **variables):
    return dataclasses.replace(facts, environment=variables)


# what is in its way


@pytest.mark.parametrize("pair", [(CPU, CPU, NOTHING), (GPU_A, GPU_B, NVLINK)])
@pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
def test_nothing_in_the_way(pair, connector):
    prefill, decode, devices = pair
    assert bad(found(prefill, decode, connector, devices)) == {}


@pytest.mark.parametrize(
    ("prefill", "decode", "devices", "level", "said", "mend"),
    [
        (
            env(GPU_A, UCX_TLS="^cuda_ipc"),
            GPU_B,
            NVLINK,
            FAIL,
            "leaves cuda_ipc out",
            "start prefill-0 without UCX_TLS",
        ),
        (GPU_A, env(GPU_B, UCX_TLS="tcp,cuda_copy"), NVLINK, FAIL, "leaves cuda_ipc out", "start decode-0 without"),
        (GPU_A, env(GPU_B, UCX_TLS="tcp"), NVLINK, FAIL, "NIXL does not start", "start decode-0 without UCX_TLS"),
        (env(CPU, UCX_TLS="tcp"), CPU, NOTHING, FAIL, "leaves shared memory out", "start prefill-0 without UCX_TLS"),
        (env(CPU, UCX_TLS="sm"), env(CPU, UCX_TLS="all"), NOTHING, WARN, "UCX_TLS differs", "start both"),
        (dataclasses.replace(CPU, environment=None), CPU, NOTHING, WARN, "UCX_* of prefill-0 are not told", "canaries"),
    ],
)
def test_settings_of_ucx(prefill, decode, devices, level, said, mend):
    findings = {one.name: one for one in found(prefill, decode, devices=devices)}
    assert bad(findings.values()) == {"ucx-settings": level}
    assert said in findings["ucx-settings"].said
    assert mend in findings["ucx-settings"].mend


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"UCX_TLS": "tcp,cuda"}, "leaves RDMA out, and there is mlx5_0"),
        ({"UCX_NET_DEVICES": "eth0"}, "names none of the RDMA devices"),
    ],
)
def test_settings_of_ucx_between_machines(variables, said):
    away = dataclasses.replace(GPU_B, boot="another", host="other")
    findings = {one.name: one for one in found(env(GPU_A, **variables), away, devices=RDMA)}
    assert findings["ucx-settings"].level is FAIL
    assert said in findings["ucx-settings"].said
    assert bad(found(env(GPU_A, **variables), away, devices=APART)).get("ucx-settings") is not FAIL


def test_backends_must_meet():
    other = dataclasses.replace(CPU, connector_options={"backends": ["LIBFABRIC"]})
    assert bad(found(CPU, other)) == {"nixl-backends": FAIL}
    both = dataclasses.replace(CPU, connector_options={"backends": ["LIBFABRIC", "UCX"]})
    assert bad(found(CPU, both)) == {}
    assert bad(found(CPU, dataclasses.replace(CPU, connector_options=None))) == {"nixl-backends": WARN}


def test_hosts():
    away = dataclasses.replace(CPU, boot="another", host="other")
    assert bad(found(CPU, away)) == {}
    assert bad(found(CPU, away, "TrivetConnector")) == {"host": FAIL}
    renamed = dataclasses.replace(CPU, host="container")
    assert bad(found(CPU, renamed)) == {}
    assert bad(found(CPU, renamed, "TrivetConnector")) == {"host": FAIL}
    assert bad(found(CPU, dataclasses.replace(CPU, boot=None))) == {"host": WARN}


@pytest.mark.parametrize("kind", ["ipc", "pid"])
def test_containers_that_do_not_share(kind):
    one, other = (dataclasses.replace(CPU, namespaces={"net": "n", kind: f"{kind}:[{n}]"}) for n in (1, 2))
    (finding,) = [one for one in found(one, other) if one.level is not PASS]
    assert (finding.name, finding.level) == ("host", WARN)
    assert "--ipc=host" in finding.mend
    apart_in_net = dataclasses.replace(CPU, namespaces={"net": "m", kind: f"{kind}:[1]"})
    assert bad(found(one, apart_in_net)) == {}


def test_limits():
    small = dataclasses.replace(CPU, shm_bytes=64 * MIB)
    (finding,) = [one for one in found(small) if one.level is not PASS]
    assert (finding.name, finding.about, finding.level) == ("memory-limits", "prefill-0", WARN)
    assert "64 MiB" in finding.said
    locked = dataclasses.replace(GPU_A, locked_memory_bytes=8 * MIB)
    assert bad(found(locked, GPU_B, devices=NVLINK)) == {}  # nothing pins where there is no RDMA
    assert bad(found(locked, GPU_B, devices=dataclasses.replace(NVLINK, rdma=RDMA.rdma, gpu_rdma=True))) == {
        "memory-limits": WARN
    }
    no_peermem = dataclasses.replace(NVLINK, rdma=RDMA.rdma)
    (finding,) = [one for one in found(GPU_A, GPU_B, devices=no_peermem) if one.level is not PASS]
    assert finding.mend == "modprobe nvidia_peermem"
    assert bad(found(EngineFacts(), CPU)).get("memory-limits") is None  # what is not told is not guessed


def test_peer_access():
    assert bad(found(GPU_A, GPU_B, devices=APART)) == {"gpu-peer-access": WARN}
    assert bad(found(GPU_A, GPU_B, devices=NOTHING)) == {"gpu-peer-access": WARN}
    one_way = dataclasses.replace(NVLINK, peers=frozenset({(0, 1)}))  # decode reads: it must reach prefill's
    assert bad(found(GPU_A, GPU_B, devices=one_way)) == {"gpu-peer-access": WARN}
    other_way = dataclasses.replace(NVLINK, peers=frozenset({(1, 0)}))
    assert bad(found(GPU_A, GPU_B, devices=other_way)) == {}


def test_peer_access_of_every_rank():
    gpus = tuple(Gpu(number, f"GPU-{number}") for number in range(4))
    prefill = dataclasses.replace(GPU_A, tensor_parallel=2, gpus=({"uuid": "GPU-0"}, {"uuid": "GPU-1"}))
    decode = dataclasses.replace(GPU_A, tensor_parallel=2, gpus=({"uuid": "GPU-2"}, {"uuid": "GPU-3"}))
    devices = Devices(gpus, frozenset({(2, 0), (3, 1)}))
    assert bad(found(prefill, decode, devices=devices)) == {}
    half = dataclasses.replace(devices, peers=frozenset({(2, 0)}))
    assert bad(found(prefill, decode, devices=half)) == {"gpu-peer-access": WARN}


def test_of_engines_that_tell_nothing_nothing_is_claimed():
    findings = found(EngineFacts(), EngineFacts())
    assert {one.level for one in findings} <= {PASS, WARN}
    assert "host" in bad(findings)


# judged


def measured(told, rate=300.0, gpu=True, **more):
    return Measured({MIB: rate / 8, 256 * MIB: rate}, told, gpu, **more)


@pytest.mark.parametrize(
    ("told", "rate", "devices", "level", "said"),
    [
        ("zero-copy cuda_ipc/cuda", 380, NVLINK, PASS, "such a link gives about 392"),
        ("zero-copy cuda_ipc/cuda", 40, NVLINK, WARN, "40 GB/s at 256 MiB"),
        ("software emulation tcp/lo", 0.5, NVLINK, FAIL, "reach each other over NV18, and KV goes by tcp"),
        ("copy cuda_copy/cuda, sysv/memory", 9, NVLINK, FAIL, "and KV goes by host-staged"),
        ("zero-copy rc_mlx5/mlx5_0:1", 45, NVLINK, FAIL, "and KV goes by rdma"),
        ("software emulation tcp/lo", 0.5, APART, FAIL, "KV goes by tcp"),
        ("copy cuda_copy/cuda, sysv/memory", 45, APART, WARN, "host-staged"),
        ("zero-copy rc_mlx5/mlx5_0:1", 44, RDMA, PASS, "such a link gives about 45"),
        ("zero-copy rc_mlx5/mlx5_0:1", 9, RDMA, WARN, "such a link gives about 45"),
        (None, 40, NVLINK, WARN, "UCX does not say which"),
        ("zero-copy newfangled/1", 40, NVLINK, WARN, "an unknown transport"),
    ],
)
def test_a_fallback_is_named(told, rate, devices, level, said):
    finding = judge(measured(told, rate), GPU_A, GPU_B, devices, "p -> d")
    assert (finding.name, finding.level, finding.about) == ("link", level, "p -> d")
    assert said in finding.said
    assert (finding.mend is None) == (level is PASS)


def test_the_mend_is_what_was_set():
    tcp = measured("software emulation tcp/lo", 0.5)
    finding = judge(tcp, env(GPU_A, UCX_TLS="^cuda_ipc"), env(GPU_B, UCX_TLS="^cuda_ipc"), NVLINK)
    assert finding.mend == "start both without UCX_TLS=^cuda_ipc"
    assert "--ipc=host" in judge(tcp, GPU_A, GPU_B, NVLINK).mend


def test_host_memory():
    assert judge(measured("zero-copy cma/memory", 3, gpu=False), CPU, CPU, NOTHING).level is PASS
    assert judge(measured("software emulation tcp/lo", 0.4, gpu=False), CPU, CPU, NOTHING).level is FAIL


def test_wrong_bytes_are_worse_than_slow_ones():
    assert judge(measured("zero-copy cuda_ipc/cuda", 380, intact=False), GPU_A, GPU_B, NVLINK).level is FAIL


def test_what_links_give():
    assert expected_gb_s(Carrier.PEER, "NV18") == pytest.approx(392, rel=0.01)  # measured between two H200
    assert expected_gb_s(Carrier.PEER, "SYS", GPUS[0]) == pytest.approx(53.6, rel=0.01)
    assert expected_gb_s(Carrier.STAGED, "NV18", GPUS[0]) == pytest.approx(55, rel=0.05)  # measured, pinned
    assert expected_gb_s(Carrier.RDMA, rdma_gbit_s=400) == 45
    assert expected_gb_s(Carrier.TCP) is expected_gb_s(Carrier.SHARED) is expected_gb_s(Carrier.PEER) is None


# TrivetConnector's mover


def counters(**movers):
    lines = [f'vllm:trivet_kv_bytes_total{{engine="0",mover="{mover}"}} {size}' for mover, size in movers.items()]
    return "\n".join(["# TYPE vllm:trivet_kv_bytes counter", *lines, ""])


def test_movers_are_told_by_their_bytes():
    assert movers_told(counters(cuda_p2p=5e6, pinned=0)) == {"cuda_p2p": 5e6}
    assert movers_told("no { metrics") == {}


@pytest.mark.parametrize(
    ("metrics", "devices", "options", "level", "said"),
    [
        (counters(cuda_p2p=5e6), NVLINK, {}, PASS, "cuda_p2p (5 MB)"),
        (counters(pinned=5e6), NVLINK, {}, FAIL, "and not cuda_p2p, though GPUs reach each other"),
        (counters(pinned=5e6, cuda_p2p=1), NVLINK, {}, FAIL, "and not cuda_p2p"),
        (counters(pinned=5e6), NVLINK, {"movers": ["pinned"]}, WARN, "movers leaves cuda_p2p out"),
        (counters(pinned=5e6), APART, {}, PASS, "cannot read"),
        (counters(), NVLINK, {}, WARN, "received nothing"),
    ],
)
def test_which_mover_and_why_not_a_faster_one(metrics, devices, options, level, said):
    prefill = dataclasses.replace(GPU_A, connector_options=options)
    finding = judge_mover(metrics, prefill, GPU_B, devices, "p -> d")
    assert (finding.name, finding.level) == ("mover", level)
    assert said in finding.said


def test_on_cpus_there_is_one_mover():
    assert judge_mover(counters(shm=5e6), CPU, CPU, NOTHING).level is PASS


# measured

nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
SMALL = {"sizes": (MIB, 4 * MIB), "times": 3, "limit_s": 120}  # for busy machines


@nixl
@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, Carrier.SHARED), ({"UCX_TLS": "tcp", "TRIVET_NIXL_PROGRESS_THREAD": "0"}, Carrier.TCP)],
)
async def test_shared_memory_and_tcp_are_told_apart(variables, expected):
    facts = env(CPU, **variables)
    result = await measure(facts, facts, **SMALL)
    assert set(result.gb_s) == {MIB, 4 * MIB}
    assert all(rate > 0 for rate in result.gb_s.values())
    assert (result.carrier, result.gpu, result.intact) == (expected, False, True)
    assert below(os.getpid()) == []


@nixl
async def test_what_nixl_refuses_is_one_line():
    with pytest.raises(TrivetError) as caught:
        await measure(dataclasses.replace(CPU, connector_options={"backends": ["NO_SUCH"]}), CPU, **SMALL)
    assert "NIXL has no backend NO_SUCH here; it has " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert below(os.getpid()) == []


def fake(tmp_path, **answers):
    """A Python in whose place a script answers for each side."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\n"
        f"with open({str(tmp_path)!r} + '/' + sys.argv[3], 'w') as out:\n"
        "    json.dump([sys.argv, dict(os.environ)], out)\n"
        f"answer = {answers!r}[sys.argv[3]]\n"
        "print(answer, flush=True) if answer else time.sleep(60)\n"
        "sys.stdin.read() if sys.argv[3] == 'target' else None\n"
    )
    script.chmod(0o755)
    return str(script)


def asked(tmp_path, side):
    arguments, environment = json.loads((tmp_path / side).read_text())
    return " ".join(arguments[1:]), environment


WHERE = json.dumps({"metadata": "", "address": 0})
READ = json.dumps({"reads": [[MIB, 0.001], [MIB, 0.003], [MIB, 0.002]], "intact": True})


async def test_it_is_measured_in_the_engines_places(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "of this process")
    prefill = env(GPU_A, UCX_TLS="^tcp", NIXL_LOG_LEVEL="x", CUDA_VISIBLE_DEVICES="7", TRIVET_X="1")
    decode = dataclasses.replace(GPU_B, connector_options={"backends": ["UCX"], "num_threads": 2})
    result = await measure(prefill, decode, sizes=(MIB,), python=fake(tmp_path, target=WHERE, initiator=READ))
    assert result == Measured({MIB: MIB / 0.002 / 1e9}, None, True, True)
    arguments, environment = asked(tmp_path, "target")
    assert "--memory VRAM" in arguments
    assert {name: environment.get(name) for name in ("UCX_TLS", "NIXL_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")} == {
        "UCX_TLS": "^tcp",
        "NIXL_LOG_LEVEL": "x",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
    }
    arguments, environment = asked(tmp_path, "initiator")
    assert "--backends UCX --threads 2 --progress-thread 1" in arguments
    assert (environment.get("UCX_TLS"), environment["CUDA_VISIBLE_DEVICES"]) == (None, "GPU-b")


@pytest.mark.parametrize(
    ("target", "initiator", "error", "said"),
    [
        (
            json.dumps({"problem": "the package nixl is not installed here (No module)"}),
            READ,
            MissingPackageError,
            "nixl",
        ),
        (json.dumps({"problem": "CUDA's driver: x"}), READ, TrivetError, "not measured: CUDA's driver: x"),
        ("no json", READ, TrivetError, "said nothing that can be read"),
        (WHERE, "", TrivetError, "within 1 s"),
        (WHERE, json.dumps({"reads": []}), TrivetError, "read nothing"),
    ],
)
async def test_what_goes_wrong_is_one_line_and_leaves_nothing(tmp_path, target, initiator, error, said):
    with pytest.raises(error) as caught:
        await measure(CPU, CPU, limit_s=1, sizes=(MIB,), python=fake(tmp_path, target=target, initiator=initiator))
    assert said in str(caught.value)
    assert caught.value.mend
    assert "\n" not in str(caught.value)
    assert below(os.getpid()) == []


async def test_who_gives_up_leaves_nothing(tmp_path):
    running = asyncio.create_task(measure(CPU, CPU, python=fake(tmp_path, target=WHERE, initiator="")))
    await asyncio.to_thread(until, lambda: (tmp_path / "initiator").exists())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert below(os.getpid()) == []


def test_it_ends_with_whoever_started_it():
    """Be it by SIGKILL, and though its standard input stays open."""
    probe = (
        "import sys, time, trivet.check.probe_nixl as probe\n"
        "def agent(options):\n    print('up', file=sys.stderr, flush=True)\n    time.sleep(60)\n"
        "probe._agent = agent\nprobe.main()"
    )
    arguments = ["target", "--memory", "DRAM", "--sizes", "4096"]
    code = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {probe!r}, *{arguments!r}], stdin=open('/dev/zero'),"
        " stderr=subprocess.PIPE, text=True)\n"
        "assert p.stderr.readline() == 'up\\n'\n"
        "print(p.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    assert left_of([pid]) == []


def test_host_memory_is_left_to_the_engines(monkeypatch):
    monkeypatch.setattr(link, "free_memory_bytes", lambda: 1024 * MIB)
    assert link._fitting((MIB, 64 * MIB, 256 * MIB)) == [MIB, 64 * MIB]
    monkeypatch.setattr(link, "free_memory_bytes", lambda: 0)
    assert link._fitting((MIB, 64 * MIB)) == [MIB]


# all of it


@pytest.fixture
def looked(monkeypatch):
    """On this machine with two GPUs; what ``measure`` answers, or raises, is the test's."""
    answers = [measured("zero-copy cuda_ipc/cuda", 380)]

    async def look():
        return NVLINK

    async def measure(*_):
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    monkeypatch.setattr(link, "look", look)
    monkeypatch.setattr(link, "measure", measure)
    return answers


async def test_a_link_is_looked_at_and_measured(looked):
    findings = await look_at_link(GPU_A, GPU_B, "NixlConnector", "p -> d")
    assert [one.name for one in findings][-2:] == ["gpu-peer-access", "link"]
    assert bad(findings) == {}
    assert "containers" not in findings[-1].said


async def test_what_is_measured_beside_the_engines_containers_says_so(looked):
    inside = dataclasses.replace(GPU_A, namespaces={"ipc": "ipc:[1]", "pid": "pid:[1]"})
    findings = await look_at_link(inside, dataclasses.replace(GPU_B, namespaces=inside.namespaces), "NixlConnector", "")
    assert findings[-1].said.endswith("(measured outside the engines' containers)")


async def test_what_cannot_be_measured_is_a_warning(looked):
    looked.append(TrivetError("not measured: x", mend="y"))
    (finding,) = [one for one in await look_at_link(GPU_A, GPU_B, "NixlConnector", "p -> d") if one.level is not PASS]
    assert (finding.name, finding.level, finding.said, finding.mend) == ("link", WARN, "not measured: x", "y")


async def test_a_link_elsewhere_is_not_measured_here(looked):
    looked.append(AssertionError("nothing is measured"))
    away = [dataclasses.replace(one, boot="another", host="there") for one in (GPU_A, GPU_B)]
    findings = await look_at_link(*away, "NixlConnector", "p -> d")
    assert findings[-1].mend == "run trivet check on there"
    for pair in ((GPU_A, away[1]), (EngineFacts(), EngineFacts())):
        assert "link" not in [one.name for one in await look_at_link(*pair, "NixlConnector", "p -> d")]
    assert "link" not in [one.name for one in await look_at_link(GPU_A, GPU_B, "TrivetConnector", "p -> d")]


async def test_buffers_in_host_memory_are_measured_there(tmp_path):
    prefill, decode = (dataclasses.replace(one, kv_buffer_device="cpu") for one in (GPU_A, GPU_B))
    assert bad(found(prefill, decode, devices=NVLINK)) == {"gpu-peer-access": WARN}
    python = fake(tmp_path, target=WHERE, initiator=READ)
    assert not (await measure(prefill, decode, sizes=(MIB,), python=python)).gpu
    assert "--memory DRAM" in asked(tmp_path, "target")[0]


def test_the_flag_that_tells_is_the_launchers():
    assert TELL == "--middleware trivet.fleet.told.EngineFacts"
