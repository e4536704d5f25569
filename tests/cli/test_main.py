import io

import pytest
from rich.console import Console

import trivet as package
from helpers.commands import distribution
from trivet.cli.common import Progress, console_error
from trivet.errors import EngineFailedError, TrivetError
from trivet.gateway.service import Event
from trivet.topology.machine import Machine


@pytest.mark.parametrize(("vllm", "expected"), [("0.32.0", "0.32.0"), (None, "not installed")])
def test_the_version_names_vllms_too(trivet, monkeypatch, vllm, expected):
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: Machine((0,), 0, vllm, None)))
    done = trivet("--version")
    assert (done.status, done.out, done.err) == (0, f"trivet {package.__version__} (vLLM {expected})\n", "")


def test_it_is_a_module_too(trivet, tmp_path):
    distribution(tmp_path / "packages", "vllm", "0.31.4")
    done = trivet.process("--version", env={"PYTHONPATH": str(tmp_path / "packages")})
    assert (done.status, done.out, done.err) == (0, f"trivet {package.__version__} (vLLM 0.31.4)\n", "")


def test_without_a_command_it_explains_itself(trivet):
    done = trivet()
    assert done.status == 2
    assert all(command in done.out + done.err for command in ("demo", "up", "status", "engine", "topology"))


@pytest.mark.parametrize("arguments", [("serve",), ("up", "--nothing"), ("up", "--port", "65536"), ("engine",)])
def test_a_command_that_there_is_not_is_refused(trivet, arguments):
    done = trivet(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert "Traceback" not in done.err


# errors


def printed(error: TrivetError, capsys) -> tuple[str, str]:
    console_error(error)
    return tuple(capsys.readouterr())


def test_an_error_is_one_line(capsys):
    error = TrivetError("port 8000 is taken", mend="give another")
    assert printed(error, capsys) == ("", "trivet: port 8000 is taken -> give another\n")


def test_the_line_that_matters_is_the_last(capsys):
    error = EngineFailedError("engine mixed-0 ended", mend="its log is /x", detail="line 1\nline 2")
    assert printed(error, capsys) == ("", "line 1\nline 2\ntrivet: engine mixed-0 ended -> its log is /x\n")


def test_an_error_is_printed_as_it_is(capsys):
    """Neither taken for markup nor broken into lines."""
    words = "[bold]no[/bold] [/] [x" + " word" * 100
    error = TrivetError(words, detail=words)
    assert printed(error, capsys) == ("", f"{words}\ntrivet: {words}\n")


# progress


def lines_of(*events: Event, still: bool = False) -> list[str]:
    """What is printed of these events, without the clock."""
    console = Console(file=io.StringIO(), width=200, highlight=False)
    progress = Progress(console)
    for event in events:
        progress.event(event)
    if still:
        progress.still()
    return [line.partition(" s  ")[2].rstrip() for line in console.file.getvalue().splitlines()]


def test_progress_tells_changes():
    events = Event("mixed-0", "starting"), Event("mixed-0", "ready", "after 3 s"), Event("gateway-0", "failed", "[no]")
    assert lines_of(*events) == ["mixed-0      starting", "mixed-0      ready  after 3 s", "gateway-0    failed  [no]"]


def test_progress_does_not_repeat_itself():
    assert lines_of(Event("mixed-0", "starting"), Event("mixed-0", "starting")) == ["mixed-0      starting"]


def test_progress_repeats_a_state_for_another_reason():
    events = [Event("mixed-0", "failed", reason) for reason in ("one", "two")]
    assert lines_of(*events) == ["mixed-0      failed  one", "mixed-0      failed  two"]


def test_progress_says_what_is_being_waited_for():
    events = Event("a", "starting"), Event("b", "starting"), Event("c", "waiting"), Event("a", "ready")
    assert lines_of(*events, still=True)[-1] == "still starting: b, c"


def test_progress_is_silent_when_nothing_is_waited_for():
    assert lines_of(Event("a", "ready"), still=True) == ["a            ready"]
