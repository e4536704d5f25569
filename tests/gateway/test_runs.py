"""Where runs are kept, and how the service that was started last is found."""

import errno
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.processes import lives
from trivet.errors import TrivetError
from trivet.gateway.runs import (
    LastService,
    last_certificate,
    last_service,
    last_url,
    new_run_dir,
    process_start,
    state_dir,
)

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """Runs are kept in a folder of the test's own."""
    monkeypatch.setenv("TRIVET_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TRIVET_STATE": "/a", "XDG_STATE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_STATE_HOME": "/b", "HOME": "/c"}, "/b/trivet"),
        ({"TRIVET_STATE": "", "XDG_STATE_HOME": "", "HOME": "/c"}, "/c/.local/state/trivet"),
    ],
)
def test_where_runs_are_kept_can_be_said(monkeypatch, env, expected):
    for name in ("TRIVET_STATE", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert state_dir() == Path(expected)


def test_a_run_has_a_folder_of_its_own(state):
    run = new_run_dir()
    assert run.is_dir()
    assert run.parent == state / "runs"
    assert run.name.endswith(f"-{os.getpid()}")


def ended_pid() -> int:
    """The id of a process that was."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_oldest_runs_are_removed(state):
    pid = ended_pid()
    runs = [state / "runs" / f"202601{day:02}-120000-{pid}" for day in range(1, 16)]
    for run in runs:
        run.mkdir(parents=True)
        (run / "mixed-0.log").write_text("old")
    newest = new_run_dir()
    assert sorted((state / "runs").iterdir()) == [*runs[-9:], newest]


def test_a_run_that_still_runs_is_not_removed(state):
    old = state / "runs" / f"20200101-120000-{os.getpid()}"
    old.mkdir(parents=True)
    pid = ended_pid()
    for day in range(1, 16):
        (state / "runs" / f"202601{day:02}-120000-{pid}").mkdir()
    new_run_dir()
    assert old.is_dir()


def test_nothing_is_removed_while_there_are_few(state):
    pid = ended_pid()
    runs = [state / "runs" / f"202601{day:02}-120000-{pid}" for day in range(1, 10)]
    for run in runs:
        run.mkdir(parents=True)
    new_run_dir()
    assert all(run.is_dir() for run in runs)


def test_a_service_that_runs_is_found(state):
    assert last_url() is None
    state.mkdir()
    (state / "last.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:8000"}))
    assert last_url() == "http://127.0.0.1:8000"


def test_a_process_that_has_a_services_number_is_not_the_service(state):
    state.mkdir()
    known = {"pid": os.getpid(), "url": "http://127.0.0.1:8000", "started": process_start(os.getpid())}
    (state / "last.json").write_text(json.dumps(known))
    assert last_url() == "http://127.0.0.1:8000"
    assert last_service().started == known["started"]
    (state / "last.json").write_text(json.dumps(known | {"started": f"{known['started']}0"}))
    assert last_url() is None
    assert last_service() is None


def test_a_process_that_has_ended_has_no_start():
    assert process_start(ended_pid()) is None
    with subprocess.Popen(["sleep", "600"]) as process:
        assert process_start(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(process.pid) is None, "it is a zombie"


def test_a_signal_is_for_the_service_only(tmp_path, monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as process:
        service = LastService(process.pid, "http://h", tmp_path, process_start(process.pid))
        for started in (None, process_start(os.getpid())):
            with pytest.raises(TrivetError, match=r"^the service at http://h has ended -> trivet up FILE$"):
                replace(service, started=started).hang_up()
        assert lives(process.pid)

        def forbidden(*_: Any) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", forbidden)
            with pytest.raises(TrivetError, match=r"is another user's -> reload it as that user$"):
                service.hang_up()
        service.hang_up()
        assert process.wait(WAIT_S) == -signal.SIGHUP
    with pytest.raises(TrivetError, match=r"^the service at http://h has ended"):
        service.hang_up()


def test_its_certificate_is_found_with_it(state):
    state.mkdir()
    known = {"pid": os.getpid(), "url": "https://127.0.0.1:8000"}
    (state / "last.json").write_text(json.dumps(known))
    assert last_certificate() is None
    (state / "last.json").write_text(json.dumps(known | {"certificate": "/a/b.pem"}))
    assert last_certificate() == Path("/a/b.pem")
    (state / "last.json").write_text(json.dumps({"pid": ended_pid(), "url": "https://h", "certificate": "/a/b.pem"}))
    assert last_certificate() is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"pid": 1}', '{"pid": "x", "url": "http://h"}', "GONE"])
def test_a_service_that_is_gone_is_not_found(state, text):
    state.mkdir()
    text = json.dumps({"pid": ended_pid(), "url": "http://h"}) if text == "GONE" else text
    (state / "last.json").write_text(text)
    assert last_url() is None
