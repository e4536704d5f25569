import json
import sys

from trivet.check import devices
from trivet.check.devices import Gpu, RdmaPort, look, parse_gpus, parse_links, parse_peers, rdma_ports

# nvidia-smi 580 on one H200, as it came; and in its form, of several GPUs with NICs beside them
ONE = """\
\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t0-15\t0\t\tN/A

Legend:

  X    = Self
"""
SEVERAL = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
PEERS = """\
 \t\x1b[4mGPU0\tGPU1\tGPU2\t\x1b[0m
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tNS\t
 GPU2\tCNS\tNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""
QUERY = "0, GPU-d4190eae-57dd-7b10-91eb-0b9552c155d6, 00000000:00:06.0, NVIDIA H200, 5, 16\n1, GPU-b, 0, L4, [N/A], 8\n"


def test_links_between_gpus():
    assert parse_links(SEVERAL) == {
        (0, 1): "NV18",
        (1, 0): "NV18",
        (0, 2): "SYS",
        (2, 0): "SYS",
        (1, 2): "SYS",
        (2, 1): "SYS",
    }
    assert parse_links(ONE) == {}
    assert parse_links("") == parse_links("NVIDIA-SMI has failed") == {}


def test_peers():
    assert parse_peers(PEERS) == {(0, 1), (1, 0)}
    assert parse_peers("") == frozenset()


def test_gpus():
    assert parse_gpus(QUERY) == (
        Gpu(0, "GPU-d4190eae-57dd-7b10-91eb-0b9552c155d6", "NVIDIA H200", 5, 16),
        Gpu(1, "GPU-b", "L4", None, 8),
    )
    assert parse_gpus("No devices were found\n") == ()


def test_rdma_ports(tmp_path):
    for device, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "no")):
        port = tmp_path / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    found = rdma_ports(tmp_path)
    assert found == (RdmaPort("mlx5_0", "1", True, 400.0), RdmaPort("mlx5_1", "1", False, None))
    assert devices.Devices(rdma=found).active_rdma == found[:1]
    assert rdma_ports(tmp_path / "missing") == ()


async def test_the_driver_is_believed_before_the_drawing(monkeypatch):
    """``nvidia-smi topo`` draws the bus; whether memory can be reached is the driver's word."""
    probed = {"gpus": [{"uuid": "GPU-a", "name": "H200"}, {"uuid": "GPU-b", "name": "H200"}], "peers": []}

    async def output(*command):
        if command[0] == sys.executable:
            return json.dumps(probed)
        return PEERS if "-p2p" in command else SEVERAL if "topo" in command else ""

    monkeypatch.setattr(devices, "_output", output)
    found = await look()
    assert found.peers == frozenset()
    assert [one.uuid for one in found.gpus] == ["GPU-a", "GPU-b"]
    assert found.links[0, 1] == "NV18"
    assert found.gpu("GPU-b").number == 1
    probed.clear()
    assert (await look()).peers == {(0, 1), (1, 0)}


async def test_a_machine_without_any_of_it_is_looked_at_too():
    found = await look()
    if not found.gpus:
        assert (found.peers, found.links, found.gpu_rdma) == (None, {}, None)


async def test_a_command_that_fails_says_nothing(tmp_path):
    assert await devices._output("/no/such/command") == ""
    assert await devices._output(sys.executable, "-c", "print('half'); raise SystemExit(3)") == ""
    assert await devices._output(sys.executable, "-c", "print('all')") == "all\n"


async def test_a_command_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(devices, "_LIMIT_S", 0.2)
    assert await devices._output(sys.executable, "-c", "import time; time.sleep(60)") == ""


def test_memory_is_known_here():
    assert devices.free_memory_bytes() > 2**20
    assert devices.is_here((devices.Path("/proc/sys/kernel/random/boot_id")).read_text().strip())
    assert not devices.is_here("another")
    assert not devices.is_here(None)
