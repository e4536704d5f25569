"""``trivet engine``, over a vLLM that is a few lines."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from helpers import fake_engine
from helpers.commands import distribution, module
from helpers.processes import left_of, pids_in
from trivet.topology.machine import Machine

WAIT_S = 15.0
VLLM = """
import os, signal, sys, time


def main():
    print("vllm", *sys.argv[1:], flush=True)
    if "--exit" in sys.argv:
        sys.exit(3)
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(60)
"""

TOPOLOGY = """\
model: {name: org/model}
tiers:
  mixed:
    device: cpu
    engines: [{}, {name: far, host: node-2, port: 8123}, {url: 'http://127.0.0.1:1'}, {name: bad, flags: [--exit]}]
"""


@pytest.fixture
def topology(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(TOPOLOGY)
    return path


@asynccontextmanager
async def engine(trivet, tmp_path: Path, name: str, topology: Path, vllm: str = VLLM):
    packages = tmp_path / "packages"
    module(packages, "vllm.entrypoints.cli.main", vllm)
    distribution(packages, "vllm", "0.32.0+cpu")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trivet.cli", "engine", name, str(topology)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **trivet.env, "PYTHONPATH": str(packages), "PIDS": str(tmp_path / "pids")},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    if (tmp_path / "pids").exists():
        assert left_of(pids_in(tmp_path / "pids"), 5.0) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_an_engine_runs_until_it_is_told_to_stop(trivet, topology, tmp_path, how):
    async with engine(trivet, tmp_path, "mixed-0", topology) as process:
        await asyncio.to_thread(pids_in, tmp_path / "pids", 1, WAIT_S)
        command = (await process.stdout.readline()).decode()
        assert " -m trivet.fleet.vllm serve org/model --served-model-name org/model " in command
        assert (await process.stdout.readline()).split() == [b"0", b"s", b"mixed-0", b"starting"]
        (log,) = trivet.state.glob("runs/*/mixed-0.log")
        assert log.read_text().startswith("vllm serve org/model --served-model-name org/model ")
        process.send_signal(how)
        status = await asyncio.wait_for(process.wait(), WAIT_S)
        assert status == (-signal.SIGKILL if how == signal.SIGKILL else 0)


async def test_an_engine_of_another_host_runs_when_it_is_started_there(trivet, topology, tmp_path):
    async with engine(trivet, tmp_path, "far", topology) as process:
        await asyncio.to_thread(pids_in, tmp_path / "pids", 1, WAIT_S)
        command = (await process.stdout.readline()).decode()
        assert " --host 0.0.0.0 --port 8123 " in command


SERVING = """
import os, runpy, sys


def main():
    sys.argv = ["engine", sys.argv[sys.argv.index("--port") + 1], os.environ["FOLDER"]]
    runpy.run_path(os.environ["FAKE_ENGINE"], run_name="__main__")
"""


async def test_an_engine_that_crashes_is_started_again(trivet, topology, tmp_path, monkeypatch):
    (tmp_path / "behaviour.json").write_text("{}")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("FAKE_ENGINE", fake_engine.__file__)
    async with engine(trivet, tmp_path, "mixed-0", topology, SERVING) as process, asyncio.timeout(WAIT_S):

        async def said(words: bytes) -> bytes:
            while words not in (line := await process.stdout.readline()):
                assert line, "it has ended"
            return line

        assert b" ready" in await said(b"ready")
        assert (await said(b"serves on")).startswith(b"mixed-0 serves on http://127.0.0.1:")
        (pid,) = pids_in(tmp_path / "starts")
        os.kill(pid, signal.SIGKILL)
        assert b"was ended by signal 9" in await said(b"failed")
        await said(b"ready")
        assert len(pids_in(tmp_path / "starts")) == 2
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert left_of(pids_in(tmp_path / "starts"), 5.0) == []


async def test_an_engine_that_ends_is_told_with_its_log(trivet, topology, tmp_path):
    async with engine(trivet, tmp_path, "bad", topology) as process:
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 1
        words, last = (await process.stderr.read()).decode().splitlines()
        (log,) = trivet.state.glob("runs/*/bad.log")
        assert words.startswith("vllm serve org/model")
        assert last == f"trivet: engine bad ended with exit status 3 -> its log is {log}"


async def test_the_ports_of_other_engines_are_their_own_business(trivet, topology, tmp_path):
    """They may run already."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        topology.write_text(TOPOLOGY.replace("[{}, ", f"[{{port: {port}}}, "))
        async with engine(trivet, tmp_path, "bad", topology) as process:
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 1
            assert b"engine bad ended with exit status 3" in await process.stderr.read()


def test_an_engine_that_there_is_not_is_told_with_those_that_there_are(trivet, topology, monkeypatch):
    here = Machine((0, 1, 2, 3), 0, "0.32.0", "cpu", lambda _: True)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: here))
    done = trivet("engine", "decode-7", topology)
    assert (done.status, done.out) == (2, "")
    assert done.err == "trivet: the topology has no engine 'decode-7' -> one of: mixed-0, far, mixed-2, bad\n"


def test_an_engine_of_someone_else_is_not_ours_to_start(trivet, topology, monkeypatch):
    here = Machine((0, 1, 2, 3), 0, "0.32.0", "cpu", lambda _: True)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: here))
    done = trivet("engine", "mixed-2", topology)
    assert (done.status, done.out) == (2, "")
    assert done.err == "trivet: mixed-2 has a url: someone else starts it\n"
