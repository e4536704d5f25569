"""The guard as it is used: a process of its own, over real children."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processes import below, end, left_of, lives, pids_in, state_of, until
from trivet.fleet import guard

GRACE_S = 0.5
NOTE = "echo $$ >> pids; "
"""Shell: tells the test a process id."""


class Guard:
    """A guard over a command, in a folder of its own."""

    def __init__(self, folder: Path, *command: str, grace_s: float = GRACE_S) -> None:
        self._pids = folder / "pids"
        self.process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(grace_s), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            start_new_session=True,
        )

    def children(self, count: int = 1) -> list[int]:
        """The processes that have noted themselves, as soon as there are so many."""
        return pids_in(self._pids, count)

    def close_pipe(self) -> None:
        self.process.stdin.close()

    def status(self, within_s: float = 20.0) -> int:
        return self.process.wait(within_s)


@pytest.fixture
def guarding(tmp_path) -> Iterator:
    guards: list[Guard] = []

    def start(*command: str, **more) -> Guard:
        guards.append(Guard(tmp_path, *command, **more))
        return guards[-1]

    yield start
    for one in guards:
        with contextlib.suppress(BrokenPipeError):
            one.process.stdin.close()
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        one.process.stdout.close()
    if (tmp_path / "pids").exists():
        end(pids_in(tmp_path / "pids", 0))


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


# the command ends


@pytest.mark.parametrize("status", [0, 1, 3, 255])
def test_the_commands_exit_status_is_the_guards(guarding, status):
    assert guarding(*shell(f"exit {status}")).status() == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_command_that_a_signal_ended_gives_128_and_its_number(guarding, number):
    assert guarding(*shell(f"kill -{number} $$")).status() == 128 + number


def test_the_commands_words_reach_the_log(guarding):
    process = guarding(*shell("echo out; echo err >&2")).process
    process.wait(5)
    assert process.stdout.read() == "out\nerr\n"


def test_the_command_gets_its_arguments_as_they_are(guarding):
    process = guarding(sys.executable, "-c", "import sys; print(sys.argv[1:])", "--", "a b", "").process
    process.wait(5)
    assert process.stdout.read() == "['--', 'a b', '']\n"


def test_the_command_reads_nothing(guarding):
    """Standard input is the guard's lifeline; a command must not eat it."""
    process = guarding("cat").process
    process.stdin.write("for the guard\n")
    process.stdin.flush()
    assert process.wait(5) == 0
    assert process.stdout.read() == ""


def test_a_command_that_does_not_exist_is_an_error(guarding):
    process = guarding("/no/such/command").process
    assert process.wait(5) == 1
    assert "No such file or directory: '/no/such/command'" in process.stdout.read()


def test_what_a_command_leaves_in_its_group_ends_with_it(guarding):
    one = guarding(*shell(f"sh -c {shlex.quote(NOTE + 'exec sleep 60')} & {until_noted(1)} exit 4"))
    (left,) = one.children()
    assert one.status() == 4
    assert left_of([left]) == []


def until_noted(count: int) -> str:
    return f'while [ "$(cat pids 2>/dev/null | wc -l)" -lt {count} ]; do sleep 0.01; done; '


DAEMON = f"setsid sh -c {shlex.quote(NOTE + 'exec sleep 60')} & "
"""Another session, and so another group."""
ORPHAN = f"( setsid sh -c {shlex.quote(NOTE + 'exec sleep 60')} & ) ; "
"""The same, and its parent is gone at once: nothing but the subreaper knows whose it is."""
STUBBORN = f"( setsid sh -c {shlex.quote('trap : TERM INT HUP; ' + NOTE + 'while :; do sleep 60 & wait; done')} & ) ; "
"""An orphan that no signal but SIGKILL ends, with a child of its own."""


@pytest.mark.parametrize("leaving", [DAEMON, ORPHAN, STUBBORN], ids=["setsid", "double fork", "stubborn"])
def test_what_left_the_group_ends_with_the_command(guarding, leaving):
    one = guarding(*shell(f"{leaving}{until_noted(1)} exit 5"))
    (left,) = one.children()
    assert one.status() == 5
    assert left_of([left]) == []


def test_a_deep_tree_ends_with_the_command(guarding):
    """Each level is another session, so that each is found only when the one above it is gone."""
    depth = 6
    script = NOTE + "exec sleep 60"
    for _ in range(depth - 1):
        script = f"{NOTE}setsid sh -c {shlex.quote(script)} & wait"
    one = guarding(*shell(f"setsid sh -c {shlex.quote(script)} & {until_noted(depth)} exit 0"))
    tree = one.children(depth)
    assert one.status() == 0
    assert left_of(tree) == []


# Trivet is gone, or asks for the end


def closing(one: Guard) -> None:
    one.close_pipe()


def terminating(one: Guard) -> None:
    one.process.terminate()


ENDINGS = pytest.mark.parametrize("ending", [closing, terminating], ids=["pipe closed", "SIGTERM"])


@ENDINGS
def test_the_command_is_asked_to_end(guarding, ending):
    command = shell(f"trap 'echo asked; exit 7' TERM; {NOTE} while :; do sleep 0.01; done")
    one = guarding(*command, grace_s=30)
    one.children()
    ending(one)
    assert one.status() == 7
    assert one.process.stdout.read() == "asked\n"


@ENDINGS
def test_a_command_that_does_nothing_about_it_is_ended_by_the_signal(guarding, ending):
    one = guarding(*shell(f"{NOTE} exec sleep 60"), grace_s=30)
    one.children()
    ending(one)
    assert one.status() == 128 + signal.SIGTERM


@ENDINGS
def test_a_command_that_ignores_it_is_killed_after_the_grace(guarding, ending):
    one = guarding(*shell(f"trap '' TERM; {NOTE} while :; do sleep 0.01; done"), grace_s=0.5)
    (command,) = one.children()
    asked_s = time.monotonic()
    ending(one)
    time.sleep(0.3)
    assert lives(command)
    assert one.status() == 128 + signal.SIGKILL
    assert 0.4 < time.monotonic() - asked_s < 10.0
    assert left_of([command]) == []


@ENDINGS
def test_the_whole_tree_is_gone(guarding, ending):
    child = f"sh -c {shlex.quote(NOTE + 'exec sleep 60')} & "
    one = guarding(*shell(f"{child}{DAEMON}{ORPHAN}{STUBBORN}{NOTE}wait"))
    noted = one.children(5)
    tree = {*noted, *below(one.process.pid)}
    assert len(tree) > len(noted)
    ending(one)
    one.status()
    assert left_of(tree) == []


def test_what_is_written_into_the_pipe_ends_nothing(guarding):
    one = guarding(*shell(f"{NOTE} exec sleep 60"))
    (command,) = one.children()
    one.process.stdin.write("still here\n" * 1000)
    one.process.stdin.flush()
    time.sleep(0.3)
    assert lives(command)
    assert one.process.poll() is None


def test_ctrl_c_is_not_for_the_guard(guarding):
    one = guarding(*shell(f"{NOTE} exec sleep 60"))
    (command,) = one.children()
    one.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert lives(command)
    assert one.process.poll() is None


def test_the_command_has_a_session_of_its_own(guarding):
    """A Ctrl-C at the terminal, which goes to a whole group, does not reach it."""
    one = guarding(*shell(f"{NOTE} exec sleep 60"))
    (command,) = one.children()
    assert os.getsid(command) == os.getpgid(command) == command


def test_a_pipe_that_was_closed_from_the_start_ends_the_command(guarding):
    one = guarding(*shell("exec sleep 60"))
    one.close_pipe()
    assert one.status() == 128 + signal.SIGTERM


HOLDER = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(process.pid, flush=True)
time.sleep(60)
"""


def test_sigkill_of_whoever_holds_the_pipe_ends_the_tree(tmp_path):
    command = [sys.executable, "-I", guard.__file__, str(GRACE_S), "--", *shell(f"{ORPHAN}{STUBBORN}{NOTE}wait")]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *command], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as holder:
        try:
            guard_pid = int(holder.stdout.readline())
            pids_in(tmp_path / "pids", 3)
            tree = below(guard_pid)
            assert len(tree) >= 3
        finally:
            holder.kill()
    assert left_of(tree, 5.0) == []
    assert until(lambda: not lives(guard_pid))  # reaping it is init's, not ours


# zombies


def test_orphans_that_end_while_the_command_runs_leave_no_zombies(guarding):
    orphan = f"( setsid sh -c {shlex.quote(NOTE + 'exit 0')} & ) ; "
    one = guarding(*shell(f"{orphan * 5} exec sleep 60"))
    orphans = one.children(5)
    assert left_of(orphans) == []
    assert one.process.poll() is None
    one.close_pipe()
    assert one.status() == 128 + signal.SIGTERM


def test_a_zombie_of_somebody_else_does_not_keep_the_guard(guarding):
    """The command never waits for its child; both are gone at the end."""
    parent = (
        "import os, time\nif os.fork() == 0: os._exit(0)\nopen('pids', 'a').write(f'{os.getpid()}\\n')\ntime.sleep(60)"
    )
    one = guarding(sys.executable, "-c", parent)
    (command,) = one.children()
    assert until(lambda: [state_of(pid) for pid in below(command)] == ["Z"])
    tree = [command, *below(command)]
    one.close_pipe()
    assert one.status() == 128 + signal.SIGTERM
    assert left_of(tree) == []
