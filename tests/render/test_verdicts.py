"""What is kept of tokenizers: read if nobody else can have written it."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from trivet.render.compare import Finding
from trivet.render.verdicts import Verdict, Verdicts

VERDICT = Verdict(None, Finding("fastokens", ["x"], True, [["a", "b", "c"]], {"other": "differs"}, 1))


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache" / "tokenizers"


def somebody_else(path: Path, monkeypatch) -> None:
    """Has it belong to another user, for whoever asks here."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def test_what_is_written_is_read(folder):
    kept = Verdicts(folder)
    assert kept.read("one") is None
    kept.write("one", VERDICT)
    kept.write("one", VERDICT)
    assert kept.read("one") == VERDICT
    assert kept.read("two") is None
    assert [path.name for path in folder.iterdir()] == ["one.json"], "no draft is left"


def test_folder_and_file_are_for_this_user_only(folder):
    Verdicts(folder).write("one", VERDICT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "one.json").stat().st_mode) == 0o600


def test_a_folder_of_before_is_closed_to_others(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    Verdicts(folder).write("one", VERDICT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_ignored(folder, caplog, mode):
    kept = Verdicts(folder)
    kept.write("one", VERDICT)
    (folder / "one.json").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert kept.read("one") is None
    assert "is ignored" in caplog.text


def test_a_file_in_a_folder_that_others_may_write_is_ignored(folder):
    kept = Verdicts(folder)
    kept.write("one", VERDICT)
    folder.chmod(0o770)
    assert kept.read("one") is None


def test_somebody_elses_file_is_ignored(folder, monkeypatch):
    kept = Verdicts(folder)
    kept.write("one", VERDICT)
    somebody_else(folder / "one.json", monkeypatch)
    assert kept.read("one") is None


def test_somebody_elses_folder_is_not_used(folder, monkeypatch, caplog):
    kept = Verdicts(folder)
    kept.write("one", VERDICT)
    somebody_else(folder, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert kept.read("one") is None
        kept.write("two", VERDICT)
    assert not (folder / "two.json").exists()
    assert "belongs to another user" in caplog.text
    with kept.alone("two"):
        pass


@pytest.mark.parametrize("name", ["one.json", "one.lock"])
def test_links_are_not_followed(folder, tmp_path, name):
    kept = Verdicts(folder)
    kept.write("elsewhere", VERDICT)
    there = folder / "elsewhere.json"
    (folder / name).symlink_to(there)
    before = there.read_bytes()
    assert kept.read("one") is None
    with kept.alone("one"):
        kept.write("one", Verdict("other", VERDICT.finding))
    assert there.read_bytes() == before
    assert kept.read("one") == Verdict("other", VERDICT.finding)
