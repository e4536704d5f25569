"""The comparison in a process of its own, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers.processes import children_of, end, lives, until
from trivet.render import compare as module
from trivet.render.compare import Finding, compare
from trivet.render.fast import Limits


@pytest.fixture(scope="module")
def definition() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    one = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.decoder = decoders.ByteLevel()
    one.add_special_tokens(["<|im_start|>"])
    return one.to_str()


def test_what_is_found_comes_back(definition):
    found = compare(definition, ["no-such-package", "fastokens"])
    assert found.fast == "fastokens"
    assert found.refused == {"no-such-package": "is not installed"}


def test_none_is_a_finding_too(definition):
    found = compare(definition, ["no-such-package"])
    assert (found.fast, found.limits, found.refused) == (None, Limits(), {"no-such-package": "is not installed"})


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("raise RuntimeError('no memory')", "ended with status 1 RuntimeError: no memory"),
        ("import time; time.sleep(60)", "took longer than 2 s"),
    ],
)
def test_a_process_that_ends_in_another_way_costs_the_fast_tokenizers_and_no_more(
    definition, monkeypatch, tmp_path, code, why
):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c {json.dumps(code)}\n")
    script.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(script))
    monkeypatch.setattr(module, "_LIMIT_S", 2.0 if "longer" in why else 60.0)
    found = compare(definition, ["fastokens", "gigatoken"])
    assert found.fast is None
    assert list(found.refused) == ["fastokens", "gigatoken"]
    assert all(why in one for one in found.refused.values())
    assert not found.lasts, "the next start may have more luck"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_the_one_that_started_it(definition, tmp_path, signal_number):
    """And leaves nothing behind."""
    code = (
        "import sys; from trivet.render import compare\n"
        "print('starting', flush=True); compare.compare(sys.stdin.read(), ['fastokens'])"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    child = 0
    try:
        assert parent.stdin is not None
        parent.stdin.write(definition)
        parent.stdin.close()
        assert until(lambda: children_of(parent.pid))
        (child,) = children_of(parent.pid)
        assert until(lambda: cpu_s(child) > 1.0, 60), "it is at it"
        os.kill(child, signal.SIGSTOP)  # so that it does not come to its end by itself
        parent.send_signal(signal_number)
        parent.wait(20)
        assert until(lambda: not lives(child))
    finally:
        parent.kill()
        parent.wait()
        end([child] if child else [])
    assert list(tmp_path.iterdir()) == []


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_process_whose_parent_was_gone_before_ends(definition):
    asked = json.dumps({"definition": definition, "names": ["fastokens"], "parent": 1 if os.getpid() != 1 else 2})
    done = subprocess.run([sys.executable, "-m", "trivet.render.compare"], input=asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_limits_are_read_as_they_were_written():
    found = Finding("x", ["a"], True, [["tab", "'", "sdmt"]])
    assert found.limits == Limits(frozenset("a"), True, frozenset({("tab", "'", "sdmt")}))
