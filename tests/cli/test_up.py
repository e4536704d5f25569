"""``trivet up``, with engines of someone else and a worker program of a few lines: nothing of vLLM is started."""

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import helpers
from helpers.commands import distribution
from helpers.foreign import ForeignEngine
from helpers.processes import holds, lives, until
from trivet.cli.up import stop_signals

WAIT_S = 15.0
FAKE_WORKER = Path(helpers.__file__).with_name("fake_worker.py")
UP = """
import sys, types
from trivet.gateway import service
service.sys = types.SimpleNamespace(executable=sys.argv.pop(1))
from trivet.cli import main
main()
"""


@pytest.fixture
def topology(tmp_path):
    """Writes a topology of one engine that someone else has started."""

    def write(url: str = "http://127.0.0.1:1", gateway: str = "{port: 0, drain_s: 5}") -> Path:
        path = tmp_path / "t.yaml"
        path.write_text(
            f"model: {{name: org/model, served_names: [tiny]}}\ntiers: {{mixed: {{engines: [{{url: '{url}'}}]}}}}\n"
            f"gateway: {gateway}\n"
        )
        return path

    return write


# what is refused before anything is started


def refusal(done, status: int) -> str:
    assert (done.status, done.out) == (status, "")
    assert done.err.count("\n") == 1
    return done.err.rstrip("\n")


@pytest.mark.parametrize("given", ["flag", "file"])
def test_a_busy_port_is_told(trivet, topology, given):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        if given == "flag":
            done = trivet("up", topology(), "--port", str(port))
        else:
            done = trivet("up", topology(gateway=f"{{port: {port}}}"))
    assert refusal(done, 1) == (
        f"trivet: the gateway cannot listen on 127.0.0.1:{port}: Address already in use -> stop what uses it, or "
        "give another: --port N, or gateway.port in the topology (0: a free one)"
    )


def test_a_file_that_is_not_there_is_told(trivet, tmp_path):
    words = refusal(trivet("up", tmp_path / "no.yaml"), 2)
    assert words == f"trivet: {tmp_path / 'no.yaml'}: no such file -> `trivet topology init` writes one"
    assert not trivet.state.exists()


def test_prefill_without_decode_is_told_with_its_line(trivet, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("model: {name: org/model}\ntiers:\n  prefill:\n")
    assert refusal(trivet("up", path), 2) == (
        f"trivet: {path}:3: tiers.prefill: prefill without decode has nobody to hand KV to -> add tiers.decode, or "
        "make it tiers.mixed"
    )


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.29.1"), ("vllm", "0.9.2+cpu")])
def test_a_vllm_that_is_too_old_is_told(trivet, tmp_path, package, version):
    distribution(tmp_path / "packages", package, version)
    path = tmp_path / "t.yaml"
    path.write_text("model: {name: org/model}\ntiers: {mixed: {device: cpu}}\n")
    done = trivet.process("up", path, env={"PYTHONPATH": str(tmp_path / "packages")})
    assert refusal(done, 1) == (f"trivet: vLLM {version} is too old: Trivet needs 0.30 or newer -> pip install -U vllm")


async def test_an_engine_that_is_too_old_is_told(trivet, topology, tmp_path):
    async with ForeignEngine("mixed-0") as engine:
        engine.version = {"version": "0.29.0"}
        async with up(trivet, tmp_path, topology(engine.plan.url)) as service:
            assert await service.ended() == 1
            words = f"trivet: engine mixed-0 at {engine.plan.url} is vLLM 0.29.0 -> Trivet needs 0.30 or newer"
            assert (await service.process.stderr.read()).decode() == words + "\n"


# a service


class Up:
    """A running ``trivet up``."""

    def __init__(self, process: asyncio.subprocess.Process, workers: Path) -> None:
        self.process = process
        self._workers = workers

    async def line(self, beginning: str) -> str:
        """The next line that begins so; those before it are passed over."""
        async with asyncio.timeout(WAIT_S):
            while line := (await self.process.stdout.readline()).decode():
                if line.startswith(beginning):
                    return line.rstrip("\n")
        raise AssertionError(f"it never said {beginning!r}: {(await self.process.stderr.read()).decode()}")

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    def workers(self) -> list[int]:
        return [json.loads(line)["pid"] for line in (self._workers / "starts").read_text().splitlines()]


@asynccontextmanager
async def up(trivet, tmp_path: Path, topology: Path, *arguments: str, **behaviour: object):
    workers = tmp_path / "workers"
    workers.mkdir()
    (workers / "behaviour.json").write_text(json.dumps({"word": {"ready": True}, **behaviour}))
    program = workers / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE_WORKER} {workers} "$@"\n')
    program.chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        UP,
        str(program),
        "up",
        str(topology),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **trivet.env},
    )
    service = Up(process, workers)
    try:
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    if (workers / "starts").exists():
        assert until(lambda: not any(lives(pid) for pid in service.workers()))  # reaping them is init's, not ours


async def test_a_service_is_up_until_it_is_told_to_stop(trivet, topology, tmp_path):
    async with ForeignEngine("mixed-0") as engine, up(trivet, tmp_path, topology(engine.plan.url)) as service:
        serving = await service.line("serving tiny on http://127.0.0.1:")
        url = serving.split()[3]
        run = Path(serving.partition("(logs: ")[2].rstrip(")"))
        assert (run / "gateway.log").read_text() == "the worker starts\n"
        assert json.loads((trivet.state / "last.json").read_text())["url"] == url
        curl = await service.line("curl ")
        assert curl.startswith(f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{")
        assert json.loads(curl.partition(" -d '")[2].rstrip("'"))["model"] == "tiny"
        service.process.send_signal(signal.SIGTERM)
        await service.line("stopping: running requests may finish; again to stop at once")
        await service.line("stopped")
        assert await service.ended() == 0
        assert (await service.process.stderr.read()) == b""


async def test_a_service_whose_reader_has_gone_serves_on(trivet, topology, tmp_path):
    """``trivet up | head``: each later line would be written to a pipe that nobody reads."""
    async with ForeignEngine("mixed-0") as engine, up(trivet, tmp_path, topology(engine.plan.url)) as service:
        await service.line("curl ")
        service.process._transport.get_pipe_transport(1).close()
        engine.health = 503  # which is a line, and what follows others
        await asyncio.sleep(1)
        assert service.process.returncode is None
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert (await service.process.stderr.read()) == b""


async def test_a_service_with_keys_shows_one_in_its_curl_line(trivet, topology, tmp_path):
    async with ForeignEngine("mixed-0") as engine:
        file = topology(engine.plan.url, "{port: 0, drain_s: 1, api_keys: [first, second]}")
        async with up(trivet, tmp_path, file) as service:
            assert " -H 'Authorization: Bearer first' " in await service.line("curl ")


@pytest.mark.parametrize(("given", "expected"), [("", "from-env"), (", api_keys: [first]", "first")])
async def test_the_key_of_the_environment_is_in_the_curl_line_where_the_topology_has_none(
    trivet, topology, tmp_path, monkeypatch, given, expected
):
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    async with ForeignEngine("mixed-0") as engine:
        file = topology(engine.plan.url, f"{{port: 0, drain_s: 1{given}}}")
        async with up(trivet, tmp_path, file) as service:
            assert f" -H 'Authorization: Bearer {expected}' " in await service.line("curl ")


async def test_a_service_that_still_starts_stops_at_once(trivet, topology, tmp_path):
    async with ForeignEngine("mixed-0") as engine:
        engine.health = None
        async with up(trivet, tmp_path, topology(engine.plan.url)) as service:
            await holds((tmp_path / "workers" / "lines").exists, WAIT_S)
            service.process.send_signal(signal.SIGINT)
            assert await service.ended() == 0


async def test_a_second_signal_stops_at_once(trivet, topology, tmp_path):
    async with (
        ForeignEngine("mixed-0") as engine,
        up(trivet, tmp_path, topology(engine.plan.url), stubborn=True) as service,
    ):
        await service.line("serving ")
        service.process.send_signal(signal.SIGTERM)
        await service.line("stopping: ")
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 128 + signal.SIGTERM
        # the workers' pipes are closed with it
        assert until(lambda: not any(lives(pid) for pid in service.workers()))


async def test_signals_are_handled_as_before_behind_the_block():
    async with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), WAIT_S)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
