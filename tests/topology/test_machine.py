import os

import pytest

from trivet.topology.machine import Machine, is_too_old, version_tuple


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.30.1rc2+cpu", (0, 30, 1)), ("0.32.1.dev5+g1a2b", (0, 32, 1)), ("1", (1,)), ("dev", (0,))],
)
def test_a_version_is_its_leading_numbers(version, expected):
    assert version_tuple(version) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.29.9", True), ("0.30.0rc1", False), ("0.30", False), ("0.100.0", False), ("1.0", False), ("dev", True)],
)
def test_vllm_before_0_30_is_too_old(version, expected):
    assert is_too_old(version) is expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", ()), ("-1", ()), ("0", ("0",)), ("2, 5", ("2", "5")), ("GPU-1a,MIG-2b", ("GPU-1a", "MIG-2b"))],
)
def test_gpus_are_those_that_this_process_may_see(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = Machine.here()
    assert (machine.gpus, machine.visible_gpus) == (len(expected), expected)
    assert [machine.gpu_name(number) for number in range(machine.gpus)] == list(expected)


def test_gpus_have_their_numbers_where_nothing_is_hidden():
    assert Machine((0,), 8, None, None).gpu_name(3) == "3"


def test_cores_are_those_that_this_process_may_use():
    assert Machine.here().cores == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("built_for", "gpus", "expected"),
    [("cpu", 2, "cpu"), ("cuda", 0, "cuda"), (None, 2, "cuda"), (None, 0, "cpu")],
)
def test_the_device_is_what_vllm_was_built_for(built_for, gpus, expected):
    assert Machine((0,), gpus, built_for and "0.32.0", built_for).device == expected
