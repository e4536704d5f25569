import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from trivet.transfer.movers import MOVERS, MoverError, movers_for
from trivet.transfer.movers.base import PROOF_BYTES, pattern, prove
from trivet.transfer.movers.memory import SharedMemory
from trivet.transfer.movers.shm import Shm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# which


def test_movers_have_names_and_devices():
    assert {name: mover.devices for name, mover in MOVERS.items()} == {
        "cuda_p2p": {"cuda"},
        "pinned": {"cuda"},
        "shm": {"cpu"},
    }
    assert all(name == mover.name for name, mover in MOVERS.items())


def test_the_device_decides_where_nothing_is_chosen():
    assert movers_for(CPU, ()) == ("shm",)
    assert movers_for(CUDA, ()) == ("cuda_p2p", "pinned")


def test_what_is_chosen_is_tried_in_that_order():
    assert movers_for(CUDA, ["pinned", "shm", "cuda_p2p"]) == ("pinned", "cuda_p2p")


def test_a_name_that_is_no_movers_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="has no mover nvlink, x; it has cuda_p2p, pinned, shm"):
        movers_for(CUDA, ["nvlink", "shm", "x"])


def test_movers_that_do_not_run_on_the_device_are_refused_with_those_that_do():
    with pytest.raises(ValueError, match="no mover of pinned runs on cpu; choose from shm"):
        movers_for(CPU, ["pinned"])
    with pytest.raises(ValueError, match="runs on xpu; choose from none"):
        movers_for(torch.device("xpu"), ())


# the proof


def test_the_pattern_proves_itself_and_repeats_nowhere():
    own = pattern()
    assert (own.dtype, len(own)) == (torch.uint8, PROOF_BYTES)
    prove("shm", own.clone())
    assert len({bytes(own[at : at + 16].tolist()) for at in range(0, PROOF_BYTES, 16)}) == PROOF_BYTES // 16


@pytest.mark.parametrize("at", [0, 1000, PROOF_BYTES - 1])
def test_one_other_byte_is_no_proof(at):
    read = pattern()
    read[at] ^= 1
    with pytest.raises(MoverError, match="shm: what was read is not what prefill wrote"):
        prove("shm", read)


# shm


def test_a_piece_is_read_where_it_was_written():
    staging = Shm().stage(CPU, 3, 8192)
    window = Shm().open(CPU, dict(staging.offered().window), staging.offered().files)
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (8192, 8, 4096)]
    for slot, piece in enumerate(parts):
        staging.write(slot, len(piece), lambda memory, piece=piece: memory.copy_(piece))
    for slot, piece in enumerate(parts):
        assert torch.equal(window.read(slot, len(piece)), piece)
    for slot, size in ((3, 8), (-1, 8), (0, 8200)):
        with pytest.raises(MoverError, match="of 3 slots of 8192 bytes"):
            window.read(slot, size)
    window.close()
    staging.close()


READER = """
    import sys, torch
    from trivet.transfer.movers.shm import Shm
    window = Shm().open(torch.device("cpu"), {"slots": 2, "slot_bytes": 4096}, [int(sys.argv[1])])
    print(window.read(1, 4096).sum().item(), window.read(0, 16).tolist(), flush=True)
    sys.stdin.read(1)
    print(window.read(0, 16).tolist())
    window.close()
"""


def test_another_process_reads_what_is_written_before_and_after_it_opened():
    staging = Shm().stage(CPU, 2, 4096)
    (file,) = staging.offered().files
    staging.write(0, 16, lambda memory: memory.fill_(3))
    staging.write(1, 4096, lambda memory: memory.copy_(torch.arange(4096).to(torch.uint8)))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(READER), str(file)],
        pass_fds=[file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout.readline() == f"{torch.arange(4096).to(torch.uint8).sum().item()} {[3] * 16}\n"
        staging.write(0, 16, lambda memory: memory.fill_(9))
        out, _ = reader.communicate("x")
        assert (out, reader.returncode) == (f"{[9] * 16}\n", 0)
    staging.close()


def test_memory_that_has_another_pattern_is_not_read():
    staging = Shm().stage(CPU, 2, 4096)
    with pytest.raises(MoverError, match="not what prefill wrote"):
        Shm().open(CPU, {"slots": 1, "slot_bytes": 4096}, staging.offered().files)
    staging.close()


def test_an_offer_without_a_file_is_told():
    with pytest.raises(MoverError, match="no file descriptor"):
        Shm().open(CPU, {"slots": 1, "slot_bytes": 4096}, [])


def test_memory_smaller_than_was_offered_is_told():
    staging = Shm().stage(CPU, 1, 4096)
    with pytest.raises(MoverError, match="shm"):
        Shm().open(CPU, {"slots": 4, "slot_bytes": 4096}, staging.offered().files)
    staging.close()


@pytest.fixture
def full(monkeypatch):
    """A machine without memory."""

    def allocate(file, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", allocate)


def test_more_memory_than_there_is_is_told_with_its_size(full):
    with pytest.raises(MoverError, match="shm: 3 MiB of shared memory: No space left on device"):
        SharedMemory("shm", 3 * 2**20)


def files():
    return set(Path("/proc/self/fd").iterdir())


def test_files_are_closed_behind_a_window_that_could_not_be_opened():
    staging = Shm().stage(CPU, 2, 4096)
    before = files()
    with pytest.raises(MoverError):
        Shm().open(CPU, {"slots": 1, "slot_bytes": 4096}, staging.offered().files)
    left = files() - before
    staging.close()
    assert not left


def test_files_are_closed_behind_memory_that_could_not_be_had(full):
    before = files()
    with pytest.raises(MoverError):
        SharedMemory("shm", 4096)
    assert files() <= before


def test_closing_gives_every_file_back():
    before = files()
    staging = Shm().stage(CPU, 2, 4096)
    window = Shm().open(CPU, dict(staging.offered().window), staging.offered().files)
    window.close()
    staging.close()
    assert files() <= before


# the rest of the seam on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["pinned"])
def test_a_piece_gets_from_a_gpu_to_a_gpu(name):
    device = torch.device("cuda", 0)
    staging = MOVERS[name].stage(device, 2, 8192)
    offered = staging.offered()
    window = MOVERS[name].open(device, dict(offered.window), offered.files)
    piece = torch.randint(0, 256, (8192,), dtype=torch.uint8, device=device)
    staging.write(1, 8192, lambda memory: memory.copy_(piece))
    assert torch.equal(window.read(1, 8192), piece)
    window.close()
    staging.close()
