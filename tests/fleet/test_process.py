"""Guarded processes: real ones, with the real guard."""

import asyncio
import os
import shlex
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager

import pytest

from helpers.processes import WAIT_S, below, children_of, holds, left_of, lives, pids_in, state_of
from trivet.fleet import process as process_module
from trivet.fleet.process import GuardedProcess, cause, how_it_ended, lost, tail

TITLED = """
import ctypes, os, sys, time
if sys.argv[2:] and os.fork() == 0:
    os.execv(sys.executable, [sys.executable, __file__, *sys.argv[2:]])
if sys.argv[1] != "-":
    ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(60)
"""
"""Titles itself as vLLM's processes do, and starts one with the rest of the titles below itself."""


@asynccontextmanager
async def started(*command: str, log, env=None):
    """A process that is gone behind the block, whatever happened in it."""
    process = await GuardedProcess.start(command, env or {}, log)
    try:
        yield process
    finally:
        if process.status is None:
            await process.stop()


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "engine.log"


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)])
async def test_the_commands_status_is_told(log, script, status):
    async with started(*shell(script), log=log) as process:
        assert await process.wait() == status
        assert process.status == status


async def test_a_command_that_runs_has_no_status(log):
    async with started("sleep", "60", log=log) as process:
        await asyncio.sleep(0.1)
        assert process.status is None


async def test_output_is_appended_to_the_log(log):
    for word in ("first", "second"):
        async with started(*shell(f"echo {word}; echo {word} error >&2"), log=log) as process:
            await process.wait()
    assert log.read_text() == "first\nfirst error\nsecond\nsecond error\n"


async def test_the_environment_is_ours_and_what_is_added(log, monkeypatch):
    monkeypatch.setenv("TRIVET_TEST_OURS", "ours")
    monkeypatch.setenv("TRIVET_TEST_CHANGED", "before")
    env = {"TRIVET_TEST_ADDED": "added", "TRIVET_TEST_CHANGED": "after"}
    script = "echo $TRIVET_TEST_OURS $TRIVET_TEST_ADDED $TRIVET_TEST_CHANGED"
    async with started(*shell(script), log=log, env=env) as process:
        await process.wait()
    assert log.read_text() == "ours added after\n"
    assert os.environ["TRIVET_TEST_CHANGED"] == "before"


async def test_stopping_asks_the_command_first(log):
    script = "trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    async with started(*shell(script), log=log) as process:
        await told(log, "up\n")
        await process.stop()
        assert process.status == 0
    assert log.read_text() == "up\nasked\n"


async def test_stopping_ends_a_stubborn_command_after_the_grace(log, monkeypatch):
    monkeypatch.setattr(process_module, "GRACE_S", 0.3)
    async with started(*shell("trap '' TERM; echo up; while :; do sleep 0.01; done"), log=log) as process:
        await told(log, "up\n")
        await asyncio.wait_for(process.stop(), WAIT_S)
        assert process.status == 128 + signal.SIGKILL


async def test_stopping_one_that_has_ended_is_nothing(log):
    async with started(*shell("exit 3"), log=log) as process:
        await process.wait()
        await process.stop()
        await process.kill()
        assert process.status == 3


async def test_killing_gives_no_grace(log):
    script = "trap 'echo asked' TERM; echo up; while :; do sleep 0.01; done"
    async with started(*shell(script), log=log) as process:
        await told(log, "up\n")
        began_s = time.monotonic()
        await asyncio.wait_for(process.kill(), WAIT_S)
        assert process.status == 128 + signal.SIGKILL
        assert time.monotonic() - began_s < process_module.GRACE_S
    assert log.read_text() == "up\n"


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_process_that_has_only_just_started_can_be_ended(log, how):
    """The guard itself may not have started the command yet."""
    async with started("sleep", "60", log=log) as process:
        await asyncio.wait_for(getattr(process, how)(), WAIT_S)
        assert process.status is not None
        assert left_of([process.pid]) == []


LISTENING = """
import os, socket, sys, time
if sys.argv[3:] and os.fork():
    time.sleep(60)
holder = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
holder.bind((sys.argv[1], int(sys.argv[2])))
holder.listen()
print(holder.getsockname()[1], flush=True)
time.sleep(60)
"""
"""Listens, or has a child that does, and says on which port."""


@pytest.mark.parametrize("child", [[], ["child"]], ids=["itself", "child"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
async def test_who_listens_on_a_port(log, host, child):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    async with started(sys.executable, "-c", LISTENING, host, "0", *child, log=log) as process:
        await holds(lambda: log.read_text().endswith("\n"))
        port = int(log.read_text())
        assert process.listens_on(port)
        assert not process.listens_on(port - 1)
        async with started("sleep", "60", log=log.with_name("other.log")) as other:
            assert not other.listens_on(port)
    assert not process.listens_on(port)


@pytest.mark.parametrize("connected", [False, True])
async def test_who_only_holds_a_port_or_speaks_there_does_not_listen(log, connected):
    """Our own listener is a stranger to the process."""
    code = "import socket, sys, time; s = socket.socket(); s.bind(('127.0.0.1', 0))\n"
    if connected:
        code = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    code += "print(s.getsockname()[1], flush=True); time.sleep(60)"
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        async with started(sys.executable, "-c", code, str(port), log=log) as process:
            await holds(lambda: log.read_text().endswith("\n"))
            assert not process.listens_on(port)
            assert not process.listens_on(int(log.read_text()))


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_is_left(log, tmp_path, how):
    script = f"cd {tmp_path}; (setsid sh -c 'echo $$ >> pids; exec sleep 60' &); echo $$ >> pids; sleep 60"
    async with started(*shell(script), log=log) as process:
        await asyncio.to_thread(pids_in, tmp_path / "pids", 2)
        tree = [process.pid, *below(process.pid)]
        assert len(tree) >= 4
        await asyncio.wait_for(getattr(process, how)(), WAIT_S)
        assert left_of(tree) == []


async def test_a_starter_that_is_gone_takes_everything_with_it(log, tmp_path):
    code = """
import asyncio, sys
from pathlib import Path
from trivet.fleet.process import GuardedProcess

async def main():
    process = await GuardedProcess.start(["sh", "-c", "exec sleep 60"], {}, Path(sys.argv[1]))
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""
    command = (sys.executable, "-c", code, str(log))
    starter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    guard_pid = int(await asyncio.wait_for(starter.stdout.readline(), WAIT_S))
    await holds(lambda: below(guard_pid))
    (engine,) = below(guard_pid)
    starter.kill()
    await starter.wait()
    await holds(lambda: not lives(guard_pid) and not state_of(engine))


async def test_the_guard_is_the_only_process_of_ours(log):
    async with started("sleep", "60", log=log) as process:
        assert process.pid in children_of(os.getpid())
        assert os.getsid(process.pid) == process.pid, "a Ctrl-C at the terminal would reach it"


async def told(log, text: str) -> None:
    """Waits for what the command says."""
    await holds(lambda: log.read_text() == text)


# vLLM's own processes


@asynccontextmanager
async def titled(tmp_path, *titles: str):
    """One process below the other, with these titles, and their ids."""
    script = tmp_path / "titled.py"
    script.write_text(TITLED)
    script = f"cd {shlex.quote(str(tmp_path))}; exec {sys.executable} {script} {shlex.join(titles)}"
    async with started(*shell(script), log=tmp_path / "log") as process:
        await asyncio.to_thread(pids_in, tmp_path / "pids", len(titles))
        pids = [pid for pid in below(process.pid) if pid in pids_in(tmp_path / "pids")]
        yield process, pids


async def test_the_family_is_what_vllm_has_titled(tmp_path):
    async with titled(tmp_path, "-", "VLLM::EngineCor", "VLLM::Worker_TP", "helper") as (process, pids):
        assert process.family() == {pids[1]: "VLLM::EngineCor", pids[2]: "VLLM::Worker_TP"}


@pytest.mark.parametrize("number", [0, 1])
async def test_a_process_of_the_family_that_dies_is_lost(tmp_path, number):
    titles = ["VLLM::EngineCor", "VLLM::Worker_TP"]
    async with titled(tmp_path, "-", *titles) as (process, (_, *pids)):
        family = process.family()
        assert lost(family) is None
        os.kill(pids[number], signal.SIGKILL)
        await holds(lambda: not lives(pids[number]))
        # nobody above it has reaped it: it may be a zombie
        assert lost(family) == titles[number]


def test_nobody_is_lost_of_no_family():
    assert lost({}) is None


async def test_another_process_under_a_lost_ones_id_is_not_it():
    assert lost({os.getpid(): "VLLM::EngineCor"}) == "VLLM::EngineCor"


async def test_an_engine_without_processes_of_its_own_has_no_family(log):
    async with started("sleep", "60", log=log) as process:
        assert process.family() == {}


# tails of logs


def test_a_tail_is_the_last_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"{number}\n" for number in range(100)))
    assert tail(log, 3) == "97\n98\n99"
    assert tail(log).split("\n") == [str(number) for number in range(85, 100)]


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", ""), (b"a", "a"), (b"a\n\n", "a"), (b"a\xff\n", "a\ufffd"), (b" a\n  b", " a\n  b")]
)
def test_a_tail_is_text_whatever_the_log_holds(tmp_path, content, expected):
    log = tmp_path / "log"
    log.write_bytes(content)
    assert tail(log) == expected


def test_a_log_that_is_not_there_says_so(tmp_path):
    assert tail(tmp_path / "log") == f"({tmp_path / 'log'}: No such file or directory)"


# why an engine ended

OUTER = """
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "core_client.py", line 12, in wait
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "(EngineCore pid=2) ERROR ValueError: TrivetConnector: no mover runs on cpu" + OUTER,
            "TrivetConnector: no mover",
        ),
        (
            "ValueError: first\n(Worker pid=3) torch.OutOfMemoryError: CUDA out of memory." + OUTER,
            "CUDA out of memory.",
        ),
        ("Exception: WorkerProc initialization failed due to one: x\n" + OUTER, "WorkerProc initialization failed"),
        ("usage: vllm serve\nvllm: error: argument --dtype: invalid choice: 'x'\n", "argument --dtype: invalid choice"),
        ("INFO all is well\nERRORS: 3 of them\nError:\n", None),
        (OUTER, None),
        ("", None),
        ("ValueError: " + "x" * 5000, "x" * 300 + " ..."),
        ("\n" * 2**21 + "ValueError: far down\nlast", "far down"),
    ],
)
def test_an_engines_log_says_why_it_ended(tmp_path, log, said):
    (tmp_path / "log").write_text(log)
    found = cause(tmp_path / "log")
    assert found is None if said is None else found.startswith(said)
    assert found is None or "\n" not in found


@pytest.mark.parametrize(("script", "said"), [("kill -9 $$", None), ("echo 'ValueError: new'; kill -9 $$", "new")])
async def test_what_another_life_said_is_no_cause(log, script, said):
    log.parent.mkdir()
    log.write_text("ValueError: old\n")
    process = await GuardedProcess.start(shell(script), {}, log)
    assert how_it_ended(await process.wait()) == "was ended by signal 9"
    assert cause(log, process.log_begins) == said
    assert cause(log, 10**6) == (said or "old"), "of a log that was cut short, all that is there"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "ended with exit status 0"),
        (1, "ended with exit status 1"),
        (128, "ended with exit status 128"),
        (137, "was ended by signal 9"),
        (-9, "was ended by signal 9"),
        (192, "was ended by signal 64"),
        (193, "ended with exit status 193"),
        (255, "ended with exit status 255"),
    ],
)
def test_how_it_ended_is_told_in_words(status, said):
    assert how_it_ended(status) == said


def test_a_log_that_cannot_be_read_says_nothing(tmp_path):
    assert cause(tmp_path / "none") is None
