import json
import os
import subprocess
import sys
import threading
import time

import pytest

from trivet.transfer.trace import VARIABLE, Trace


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trace.json"))
    return tmp_path / "trace.json"


def events(file):
    """As a viewer reads it, which supplies the closing bracket."""
    all_of_them = json.loads(file.read_text().rstrip().rstrip(",") + "]")
    return [event for event in all_of_them if event["name"] != "thread_name"]


def test_nothing_is_written_where_the_variable_is_not_set(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    trace = Trace("engine")
    trace.mark("prefill", "t", "x")
    trace.span("prefill", "t", "x", 1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_events_in_microseconds(file):
    trace = Trace("prefill 8001")
    trace.span("prefill", "t", "gather 1.0 MiB", 2_000_000, 5_500_000)
    trace.mark("decode", "t", "goes on", 7_000)
    name, span, mark = events(file)
    assert (name["ph"], name["name"], name["args"]) == ("M", "process_name", {"name": "prefill 8001"})
    assert (span["ph"], span["ts"], span["dur"], span["cat"]) == ("X", 2000, 3500, "prefill")
    assert (mark["ph"], mark["ts"], mark["name"]) == ("i", 7, "goes on")
    assert span["args"] == mark["args"] == {"transfer": "t"}
    assert {event["pid"] for event in (name, span, mark)} == {os.getpid()}
    assert len({event["tid"] for event in (name, span, mark)}) == 1


def test_a_mark_without_a_time_is_now(file):
    trace = Trace("e")
    before = time.monotonic_ns() / 1e3
    trace.mark("decode", "t", "x")
    assert before <= events(file)[1]["ts"] <= time.monotonic_ns() / 1e3


WRITER = """
import sys
from trivet.transfer.trace import Trace
trace = Trace(sys.argv[1])
for number in range(300):
    trace.mark("prefill", f"{sys.argv[1]} {number}", "x" * 200)
"""


def test_two_processes_may_write_at_once(file):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    written = [event["args"]["transfer"] for event in events(file) if event["ph"] == "i"]
    for name in ("a", "b"):
        assert [one for one in written if one.startswith(name)] == [f"{name} {number}" for number in range(300)]


def test_who_comes_while_the_file_is_made_spoils_nothing(file, monkeypatch):
    original, came = os.write, []

    def write(descriptor, data):
        if not came:
            came.append(1)
            Trace("second").mark("prefill", "t", "x")
        return original(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    Trace("first").mark("prefill", "u", "y")
    assert sorted(event["args"].get("name", event["args"].get("transfer")) for event in events(file)) == [
        "first",
        "second",
        "t",
        "u",
    ]


def test_a_file_that_is_there_is_continued(file):
    Trace("first").mark("prefill", "t", "x")
    Trace("second").mark("prefill", "t", "x")
    assert [event["name"] for event in events(file)] == ["process_name", "x", "process_name", "x"]


def test_threads_have_their_names_once(file):
    trace = Trace("e")
    for name in ("trivet-sender", "trivet-watcher"):
        thread = threading.Thread(target=lambda: [trace.mark("prefill", "t", "x") for _ in range(2)], name=name)
        thread.start()
        thread.join()
    lines = json.loads(file.read_text().rstrip().rstrip(",") + "]")
    names = [event["args"]["name"] for event in lines if event["name"] == "thread_name"]
    assert names[-2:] == ["trivet-sender", "trivet-watcher"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("where", ["none/trace.json", ""])
def test_a_file_that_cannot_be_written_is_told_in_one_line(tmp_path, monkeypatch, where):
    monkeypatch.setenv(VARIABLE, f"{tmp_path}/{where}")
    with pytest.raises(ValueError, match=f"cannot write {VARIABLE}={tmp_path}") as error:
        Trace("e")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), None])
def test_a_disk_that_fills_ends_the_trace_and_nothing_else(file, monkeypatch, caplog, fault):
    trace = Trace("e")
    original = os.write

    def write(descriptor, data):
        if fault is not None:
            raise fault
        return original(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write)
    for _ in range(3):
        trace.mark("prefill", "t", "x")
        trace.span("decode", "t", "y", 1, 2)
    monkeypatch.undo()
    trace.mark("prefill", "t", "x")
    assert [one.getMessage().partition(" has ended: ")[0] for one in caplog.records] == [
        f"TrivetConnector: tracing to {file}"
    ]


def test_a_programs_own_programs_do_not_inherit_the_file(file):
    trace = Trace("e")
    assert not os.get_inheritable(trace._file)
