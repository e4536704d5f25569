"""Options of TrivetConnector: their defaults, what each may be, and how that is said.

Read by the launcher (``kv.options`` of a topology) and once more inside each engine (``kv_connector_extra_config``),
which somebody may have started by hand. So this imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MOVER_DEVICES = {"shm": frozenset({"cpu"}), "cuda_p2p": frozenset({"cuda"}), "pinned": frozenset({"cuda"})}
MOVERS = tuple(MOVER_DEVICES)
"""What KV can travel by, as the option ``movers`` names it, and between engines on which devices."""


@dataclass(frozen=True, slots=True)
class Options:
    """What TrivetConnector takes, with what it takes unless told."""

    movers: tuple[str, ...] = ()
    """What KV may travel by, preferred first; empty lets the device decide."""
    staging_mib: int = 256
    """Memory of a worker through which pieces leave; what does not fit waits where it was computed."""
    piece_mib: int = 32
    """The size that a piece is cut to; at least one layer's part of one block."""
    lease_s: float = 30
    """How long KV is kept for a decode engine that does not say that it still wants it."""
    checksums: bool = False
    """Whether each piece is compared after it has been written at its destination."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Reads options.

        Raises:
            ValueError: one is unknown or wrong, in one line that names it and what it may be.
        """
        for name, value in given.items():
            if name not in _MAY_BE:
                raise ValueError(f"there is no option {name!r} ({_instead(name)})")
            fits, told = _MAY_BE[name]
            if name == "movers" and (twice := _twice(value)):
                raise ValueError(f"movers names {twice} twice; say each once, the preferred one first")
            if not fits(value):
                raise ValueError(f"{name} is {told} (got {value!r})")
        options = cls(**{**given, "movers": tuple(given.get("movers", ()))})
        if options.staging_mib < 2 * options.piece_mib:
            raise ValueError(
                f"staging_mib holds at least two pieces of piece_mib (got {options.staging_mib} and "
                f"{options.piece_mib}); raise the one or lower the other"
            )
        return options


def _instead(name: object) -> str:
    if name == "address":
        return "an engine's kv_address says where it listens"
    there = [field.name for field in fields(Options)]
    near = difflib.get_close_matches(str(name), [*there, "address"], n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(there))}"


def _twice(value: object) -> str | None:
    """A word that a list has more than once."""
    words = [one for one in value if isinstance(one, str)] if isinstance(value, list | tuple) else []
    return next((one for number, one in enumerate(words) if one in words[:number]), None)


def _are_movers(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(one, str) and one in MOVERS for one in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(least: int, most: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: _is_number(value) and isinstance(value, int) and least <= value <= most, (
        f"a whole number from {least} to {most}"
    )


def _number(least: float, most: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: _is_number(value) and least <= value <= most, f"a number from {least} to {most}"


_MAY_BE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "movers": (_are_movers, f"a list of {', '.join(MOVERS)}, the preferred one first"),
    "staging_mib": _whole(8, 2**20),
    "piece_mib": _whole(1, 2**19),
    "lease_s": _number(0.1, 86_400),
    "checksums": (lambda value: isinstance(value, bool), "true or false"),
}
