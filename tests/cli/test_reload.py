"""``trivet up`` that is told to read its file again, by SIGHUP and by ``trivet reload``; its engines are simulated."""

import asyncio
import contextlib
import errno
import importlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers.processes import holds, lives, until
from trivet.cli.common import Progress
from trivet.cli.up import _reload_on, reload_signals
from trivet.errors import TrivetError
from trivet.gateway.runs import process_start
from trivet.gateway.service import Event

reload_module = importlib.import_module("trivet.cli.reload")
WAIT_S = 60.0
FILE = """\
model: {name: sim-model}
tiers: {mixed: {device: sim, engines: [ENGINES]}}
gateway: {plane: text, port: 0, drain_s: 5}
"""


class Up:
    """A running ``trivet up`` with a file that can be changed."""

    def __init__(self, trivet, file: Path, process: subprocess.Popen) -> None:
        self._trivet, self.file, self.process = trivet, file, process

    def write(self, *names: str) -> None:
        self.file.write_text(FILE.replace("ENGINES", ", ".join(f"{{name: {name}}}" for name in names)))

    def line(self, beginning: str) -> str:
        """The next line with these words, those before it are passed over."""
        for line in self.process.stdout:
            if beginning in line:
                return line.rstrip("\n")
        raise AssertionError(f"it never said {beginning!r}: {self.process.stderr.read()}")

    def run_dir(self) -> Path:
        return Path(json.loads((self._trivet.state / "last.json").read_text())["run_dir"])

    def reload_file(self) -> dict:
        return json.loads((self.run_dir() / "reload.json").read_text())


@contextlib.contextmanager
def up(trivet, tmp_path: Path, *names: str):
    service = Up(trivet, tmp_path / "t.yaml", None)
    service.write(*names)
    service.process = subprocess.Popen(
        [sys.executable, "-m", "trivet.cli", "up", str(service.file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **trivet.env},
        start_new_session=True,
    )
    try:
        yield service
    finally:
        service.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.communicate(timeout=WAIT_S)
        service.process.kill()


def test_a_service_is_reloaded(trivet, tmp_path):
    with up(trivet, tmp_path, "a") as service:
        service.line("serving ")
        assert until(lambda: (service.run_dir() / "reload.json").exists())
        assert service.reload_file() == {"number": 0, "state": "none", "told": ""}

        # by signal
        service.write("a", "b")
        service.process.send_signal(signal.SIGHUP)
        assert "running  b is new" in service.line("reload")
        assert "done  b is new" in service.line("reload")
        assert until(lambda: service.reload_file() == {"number": 1, "state": "done", "told": "b is new"})

        # by the command, which waits and tells
        service.write("b")
        done = trivet("reload")
        assert (done.status, done.err) == (0, "")
        assert done.out.splitlines()[-1] == "reloaded: a goes"
        names = [one["name"] for one in json.loads(trivet("status", "--json").out)["engines"]]
        assert names == ["b"]
        assert "reload 2: done: a goes" in trivet("status").out.splitlines()

        service.file.write_text(service.file.read_text().replace("port: 0", "port: 8123"))
        before = service.reload_file()
        done = trivet("reload")
        assert done.status == 2
        assert done.err == (
            f"trivet: reload refused: {service.file}:3: gateway.port cannot change while the service runs -> put it "
            "back, or stop the service and start it anew\n"
        )
        assert service.reload_file()["number"] == before["number"] + 1

        text = service.file.read_text()
        service.file.write_text(text.replace("sim-model", "~nosuchuser/m"))
        done = trivet("reload")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert done.err.startswith(f"trivet: reload refused: {service.file}:1: model.name: ~nosuchuser/m: ")

        service.file.unlink()
        done = trivet("reload")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert f"{service.file}: no such file" in done.err

        service.write("b")
        assert trivet("reload").out == "reloaded: nothing has changed\n"

        service.file.write_text(service.file.read_text().replace("{name: b}", "{name: b, flags: {step-ms: slow}}"))
        done = trivet("reload")
        assert done.status == 1
        assert done.err.startswith("trivet: reload failed: engine b ended with exit status 2, so b is started again")
        service.process.send_signal(signal.SIGTERM)
        service.line("stopped")
        assert service.process.wait(WAIT_S) == 0
        assert service.process.stderr.read() == ""
        assert not (service.run_dir() / "reload.json").exists()


@pytest.mark.parametrize("ends", [True, False])
def test_a_service_that_says_nothing_is_not_waited_for_for_ever(tmp_path, monkeypatch, ends):
    monkeypatch.setenv("TRIVET_STATE", str(tmp_path))
    monkeypatch.setattr(reload_module, "_SILENCE_S", 0.3)
    with subprocess.Popen(
        ["sleep", "600"] if ends else ["sh", "-c", "trap '' HUP; echo; exec sleep 600"], stdout=-1
    ) as one:
        if not ends:
            one.stdout.read(1)
        record = {"pid": one.pid, "url": "http://h", "run_dir": str(tmp_path), "started": process_start(one.pid)}
        (tmp_path / "last.json").write_text(json.dumps(record))
        (tmp_path / "reload.json").write_text(json.dumps({"number": 0, "state": "none", "told": ""}))
        with pytest.raises(TrivetError) as caught:
            reload_module.reload()
        one.kill()
    assert caught.value.problem == (
        "the service at http://h ended while it was reloaded"
        if ends
        else "the service at http://h has not been heard of for 0 s while it was reloaded"
    )


async def test_a_fault_does_not_end_reloading():
    asked, noted = [], []

    class Faulty:
        plan = SimpleNamespace(notes=())

        def note(self, _):
            pass

        def log_fault(self, what):
            noted.append(what)

        async def reload(self, *_):
            asked.append(1)
            raise OSError("no")

    wish = asyncio.Event()
    task = asyncio.create_task(_reload_on(wish, Faulty(), None))
    for number in (1, 2):
        wish.set()
        await holds(lambda number=number: len(noted) == number, WAIT_S)
    task.cancel()
    assert len(asked) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_console_that_cannot_be_written_to_is_no_fault(number):
    class Broken(io.StringIO):
        def write(self, _):
            raise OSError(number, "no")

    console = Console(file=Broken())
    Progress(console).event(Event("a", "ready", "x"))
    assert console.quiet == (number == errno.EIO)


def test_a_signal_while_it_starts_is_for_afterwards(trivet, tmp_path):
    with up(trivet, tmp_path, "a") as service:
        service.line("starting")  # the first thing that is said
        service.write("a", "b")
        service.process.send_signal(signal.SIGHUP)
        service.line("serving ")
        assert "b is new" in service.line("reload")
        assert "done  b is new" in service.line("reload")


def test_without_a_service_there_is_nothing_to_reload(trivet):
    done = trivet("reload")
    assert (done.status, done.err) == (1, "trivet: no service runs here -> start one with `trivet up FILE`\n")


def test_a_service_that_cannot_be_reloaded_is_not_sent_a_signal(trivet):
    """One that still starts, or a demo, would be ended by it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        trivet.state.mkdir(parents=True, exist_ok=True)
        record = {"pid": process.pid, "url": "http://127.0.0.1:1", "run_dir": str(trivet.state)}
        (trivet.state / "last.json").write_text(json.dumps(record))
        done = trivet("reload")
        assert lives(process.pid)
        process.kill()
    assert (done.status, done.err) == (
        1,
        "trivet: the service at http://127.0.0.1:1 cannot be reloaded -> if it still starts, wait until `trivet up` "
        "says that it serves\n",
    )


# whose signal it is

TELLS = """
import asyncio, os, sys
from trivet.cli.up import reload_signals

async def main():
    stop = asyncio.Event()
    async with reload_signals(stop) as wish:
        print("ready", flush=True)
        waits = [asyncio.create_task(one.wait()) for one in (stop, wish)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=float(sys.argv[2]))
        with open(sys.argv[1], "w") as file:
            file.write(f"stop={stop.is_set()} wish={wish.is_set()}")

asyncio.run(main())
"""


def test_a_terminal_that_is_closed_ends_the_whole_service(trivet, tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text(FILE.replace("ENGINES", "{name: a}"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "trivet.cli", "up", str(file)], {**os.environ, **trivet.env})
    seen = b""
    while b"curl" not in seen:
        seen += os.read(terminal, 1024)
    assert until(lambda: list(trivet.state.glob("runs/*/reload.json")))  # it has nothing more to say
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    (log,) = trivet.state.glob("runs/*/a.log")
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_ends_the_service_as_it_did(tmp_path, nohup):
    told = tmp_path / "told"
    pid, terminal = pty.fork()
    if pid == 0:
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        limit_s = "3" if nohup else str(WAIT_S)  # under nohup nothing comes
        os.execv(sys.executable, [sys.executable, "-c", TELLS, str(told), limit_s])
    seen = b""
    while b"ready\r\n" not in seen:
        seen += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    assert told.read_text() == ("stop=False wish=False" if nohup else "stop=True wish=False")


async def test_the_signal_is_a_wish_and_handled_as_before_behind_the_block():
    stop = asyncio.Event()
    async with reload_signals(stop) as wish:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(WAIT_S):
            await wish.wait()
        assert not stop.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
