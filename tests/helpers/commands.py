"""The command line, in this process where that is enough and in one of its own where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from trivet.cli import main


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    err: str

    @property
    def last_word(self) -> str:
        """The line that a person reads first."""
        return self.err.splitlines()[-1]


class Trivet:
    """``trivet ARGUMENTS``, with the state and the cache in folders of the test's own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.state = folder / "state"
        self.env = {
            "TRIVET_STATE": str(self.state),
            "TRIVET_CACHE": str(folder / "cache"),
            "TMPDIR": str(folder),  # for the locks of ports
            "COLUMNS": "200",
        }
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        for name in ("TRIVET_API_KEY", "VLLM_API_KEY"):
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *arguments: str | Path) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["trivet", *(str(one) for one in arguments)])
        self._capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        told = self._capsys.readouterr()
        return Done(status, told.out, told.err)

    def process(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Done:
        """The same as a person's shell runs it."""
        done = subprocess.run(
            [sys.executable, "-m", "trivet.cli", *(str(one) for one in arguments)],
            env={**os.environ, **self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


def distribution(folder: Path, name: str, version: str) -> None:
    """Makes a package seem installed to whoever has the folder on its path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def module(folder: Path, name: str, text: str = "") -> None:
    """Writes a module, and the packages around it."""
    *packages, last = name.split(".")
    for package in packages:
        folder /= package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{last}.py").write_text(text)
