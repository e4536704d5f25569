"""What a check finds: lines that a person can act on, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"

    @property
    def exit_code(self) -> int:
        """0, 1 or 2."""
        return _ORDER.index(self)


_ORDER = (Level.PASS, Level.WARN, Level.FAIL)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a verdict."""

    level: Level
    name: str
    """What was looked at, as docs/check.md has it: lower case, words joined by hyphens. Never changed once released."""
    about: str
    """An engine's name, a pair's (``prefill-0 -> decode-0``), or empty for the whole."""
    said: str
    """What was found, in one line."""
    mend: str | None = None
    """What a person does about it, in one line; given with every WARN and FAIL."""

    def facts(self) -> dict[str, Any]:
        """As ``--json`` writes it."""
        told = {"level": str(self.level), "name": self.name, "about": self.about, "said": self.said}
        return told if self.mend is None else {**told, "mend": self.mend}


def worst(findings: Iterable[Finding]) -> Level:
    """What findings come to: the worst of them, PASS if there are none."""
    return max((one.level for one in findings), key=_ORDER.index, default=Level.PASS)


def passed(name: str, about: str, said: str) -> Finding:
    """A line that is well."""
    return Finding(Level.PASS, name, about, said)


def warned(name: str, about: str, said: str, mend: str) -> Finding:
    """A line that somebody should look at."""
    return Finding(Level.WARN, name, about, said, mend)


def failed(name: str, about: str, said: str, mend: str) -> Finding:
    """A line that forbids traffic."""
    return Finding(Level.FAIL, name, about, said, mend)
