import pytest

from trivet.check.ucx import RDMA, Carrier, allows, carrier, names_one_of, picked

# printed by NIXL 1.5.1's UCX with UCX_PROTO_INFO=y, on two processes of one machine
CMA = """\
2026-11-30 23:01:19 NIXL INFO    _api.py:281 Initialized NIXL agent: init
[1796079219.201265] [vm:12447:0]   +--------+-------------+-----------------------------------+
[1796079219.201265] [vm:12447:0]   | init self cfg#0                                          |
[1796079219.201265] [vm:12447:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1796079219.201265] [vm:12447:0]   +--------+-------------+-----------------------------------+
[1796079219.201265] [vm:12447:0]   | Range  | Description |              Config               |
[1796079219.201265] [vm:12447:0]   | 0..inf | zero-copy   | self/memory                       |
[1796079219.306265] [vm:12447:0]   +--------+-------------+-------------------------------------------+
[1796079219.306265] [vm:12447:0]   | init intra-node cfg#1                                            |
[1796079219.306265] [vm:12447:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1796079219.306265] [vm:12447:0]   +--------+-------------+-------------------------------------------+
[1796079219.306265] [vm:12447:0]   | Range  | Description |                  Config                   |
[1796079219.306265] [vm:12447:0]   +--------+-------------+-------------------------------------------+
[1796079219.306265] [vm:12447:0]   | 0..inf | zero-copy   | cma/memory                                |
[1796079219.306265] [vm:12447:0]   +--------+-------------+-------------------------------------------+
[1796079219.406265] [vm:12447:0]   +--------+-------------+-----------------------------------+
[1796079219.406265] [vm:12447:0]   | init intra-node cfg#1                                    |
[1796079219.406265] [vm:12447:0]   | remote memory write by ucp_put* from host memory to host |
[1796079219.406265] [vm:12447:0]   +--------+-------------+-----------------------------------+
[1796079219.406265] [vm:12447:0]   | Range  | Description |              Config               |
[1796079219.406265] [vm:12447:0]   +--------+-------------+-----------------------------------+
[1796079219.406265] [vm:12447:0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1796079219.406265] [vm:12447:0]   +--------+-------------+-----------------------------------+
"""
# the same between two processes on one H200, where UCX did not take cuda_ipc
STAGED = """\
[1796079679.219933] [vm:492  :0]   +--------+--------------------+-----------------------------------------+
[1796079679.219933] [vm:492  :0]   | trivet-initiator-492 intra-node cfg#2                                 |
[1796079679.219933] [vm:492  :0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1] |
[1796079679.219933] [vm:492  :0]   +--------+--------------------+-----------------------------------------+
[1796079679.219933] [vm:492  :0]   | Range  |    Description     |                 Config                  |
[1796079679.219933] [vm:492  :0]   +--------+--------------------+-----------------------------------------+
[1796079679.219933] [vm:492  :0]   | 0..inf | software emulation | tcp/lo                                  |
[1796079679.219933] [vm:492  :0]   +--------+--------------------+-----------------------------------------+
"""


def table(*rows: str, where: str = "inter-node", operation: str = "ucp_get*(multi) into cuda/GPU0 from cuda") -> str:
    """A table in the same form."""
    lines = [f"| a {where} cfg#3 |", f"| remote memory read by {operation} |", "| Range | Description | Config |"]
    return "".join(f"[1.2] [h:1:0]   {line}\n" for line in [*lines, *(f"| {row} |" for row in rows)])


@pytest.mark.parametrize(
    ("text", "told", "by"),
    [
        (CMA, "zero-copy cma/memory", Carrier.SHARED),
        (STAGED, "software emulation tcp/lo", Carrier.TCP),
        (table("0..inf | zero-copy | cuda_ipc/cuda"), "zero-copy cuda_ipc/cuda", Carrier.PEER),
        (
            table("0..8191 | short | rc_mlx5/mlx5_0:1", "8K..inf | zero-copy | rc_mlx5/mlx5_1:1"),
            "zero-copy rc_mlx5/mlx5_1:1",
            Carrier.RDMA,
        ),
        (table("0..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"), None, Carrier.RDMA),
        (table("0..inf | zero-copy | 52% on tcp/lo and 48% on tcp/eth0"), None, Carrier.TCP),
        (table("0..inf | copy | cuda_copy/cuda, sysv/memory, cuda_copy/cuda"), None, Carrier.STAGED),
        (table("0..4K | short | sysv/memory", "4K..inf | zero-copy | cuda_ipc/cuda"), None, Carrier.PEER),
        (table("0..inf | zero-copy | srd/rdmap0:1"), None, Carrier.RDMA),
    ],
)
def test_what_carries_large_reads_is_read_from_its_log(text, told, by):
    found = picked(f"other lines\n{text}more of them")
    assert found is not None
    assert told in (None, found)
    assert carrier(found) is by


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1.2] [h:1:0] | broken",
        table("0..inf | zero-copy | cma/memory", where="self"),
        table("0..inf | zero-copy | cma/memory", operation="ucp_put* from host memory to host"),
        table("0 | short | tcp/lo"),
        table(),
    ],
)
def test_what_tells_of_no_read_from_another_process_tells_nothing(text):
    assert picked(text) is None


def test_a_transport_that_is_not_known_is_none():
    assert carrier("zero-copy newfangled/device") is None


@pytest.mark.parametrize(
    ("setting", "transport", "allowed"),
    [
        (None, "cuda_ipc", True),
        ("", "cuda_ipc", True),
        ("all", "cuda_ipc", True),
        ("^cuda_ipc", "cuda_ipc", False),
        ("^cuda_ipc", "cuda_copy", True),
        ("^tcp,cuda_ipc", "cuda_ipc", False),
        ("^cuda", "cuda_ipc", False),
        ("tcp", "cuda_ipc", False),
        ("tcp,cuda_copy", "cuda_copy", True),
        ("tcp, CUDA", "cuda_ipc", True),
        ("rc,cuda_ipc", "rc_mlx5", True),
        ("ib", "dc_mlx5", True),
        ("rc_x", "rc_mlx5", True),
        ("tcp", "cma", False),
        ("sm", "cma", True),
        ("shm,tcp", "posix", True),
    ],
)
def test_what_ucx_tls_allows(setting, transport, allowed):
    assert allows(setting, transport) is allowed


def test_one_of_several_is_enough():
    assert allows("dc,tcp", *RDMA)
    assert not allows("tcp,cuda_copy", *RDMA)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        (None, True),
        ("all", True),
        ("mlx5_0:1", True),
        ("eth0, mlx5_1:1", True),
        ("eth0", False),
        ("mlx5_7:1", False),
        ("^mlx5_0:1", True),
        ("^mlx5_0:1,mlx5_1:1", False),
    ],
)
def test_which_devices_ucx_net_devices_leaves(setting, named):
    assert names_one_of(setting, ["mlx5_0", "mlx5_1"]) is named


def test_carriers_go_from_slow_to_fast():
    assert list(Carrier) == ["tcp", "host-staged", "shared-memory", "rdma", "gpu-peer"]
