"""The errors that reach a person: one line that says what is wrong, one that says how to mend it."""

from __future__ import annotations


class TrivetError(Exception):
    """A fault that a person can mend.

    ``str(error)`` is one line: what is wrong and, after an arrow, the mend. ``detail`` holds more lines when
    they help (the tail of an engine's log); the CLI prints them under the message.
    """

    exit_code = 1

    def __init__(self, problem: str, *, mend: str | None = None, detail: str | None = None) -> None:
        self.problem = problem
        self.mend = mend
        self.detail = detail
        super().__init__(f"{problem} -> {mend}" if mend else problem)


class TopologyError(TrivetError):
    """The topology file (or a flag that changes it) asks for something that cannot be."""

    exit_code = 2


class MissingPackageError(TrivetError):
    """A Python package that this command needs is not installed, or is too old."""


class EngineFailedError(TrivetError):
    """An engine process ended, or never became ready; ``detail`` is the tail of its log."""


class PortInUseError(TrivetError):
    """An address that was asked for by number is taken."""
