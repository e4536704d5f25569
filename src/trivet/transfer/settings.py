"""What the engine's ``kv_connector_extra_config`` says to TrivetConnector."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
_SCHEME = "unix:"
_KNOWN = frozenset({"address", "movers", "staging_mib", "piece_mib", "lease_s", "checksums"})
_LONGEST_PATH = 90
"""A Unix socket's path has 108 bytes at most (Linux, ``sys/un.h``); ranks append their number."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine's connector."""

    address: str
    """Where the scheduler side listens: ``unix:`` and a path. Rank r of the workers listens at the path and ``.r``."""
    movers: tuple[str, ...]
    """Names of movers that may be used, preferred first; empty lets the device decide."""
    staging_bytes: int
    """Memory of a worker through which pieces leave; what does not fit waits where it was computed."""
    piece_bytes: int
    """The size that a piece is cut to; at least one layer's part of one block."""
    lease_s: float
    """How long KV is kept for a decode engine that does not say that it still wants it."""
    checksums: bool
    """Whether each piece is compared after it has been written at its destination."""

    @property
    def path(self) -> str:
        """The path in ``address``."""
        return self.address.removeprefix(_SCHEME)

    @property
    def notice_path(self) -> str:
        """Where a decode engine's workers tell its scheduler side what has landed."""
        return f"{self.path}.d"

    @classmethod
    def of(cls, options: Mapping[str, Any], engine_id: str) -> Settings:
        """Reads ``kv_connector_extra_config``.

        Args:
            engine_id: names the socket where the options have no address.

        Raises:
            ValueError: an option that is not known or not valid, in one line.
        """
        if unknown := sorted(set(options) - _KNOWN):
            raise ValueError(f"TrivetConnector has no option {', '.join(unknown)}; it has {', '.join(sorted(_KNOWN))}")
        address = options.get("address") or f"{_SCHEME}{runtime_directory()}/{engine_id[:36]}.sock"
        if not isinstance(address, str) or not address.startswith(_SCHEME):
            raise ValueError(
                f"TrivetConnector cannot listen at {address!r}: addresses are {_SCHEME}PATH, KV moves within one host"
            )
        if address == _SCHEME:
            raise ValueError(f"TrivetConnector: {address!r} has no path")
        if len(os.fsencode(address)) - len(_SCHEME) > _LONGEST_PATH:
            raise ValueError(f"TrivetConnector: the path in {address!r} is longer than {_LONGEST_PATH} bytes")
        movers = options.get("movers") or ()
        if not isinstance(movers, list | tuple) or not all(isinstance(one, str) for one in movers):
            raise ValueError(f"TrivetConnector: movers must be a list of names, not {movers!r}")
        checksums = options.get("checksums", False)
        if not isinstance(checksums, bool):
            raise ValueError(f"TrivetConnector: checksums must be true or false, not {checksums!r}")
        piece = _number(options, "piece_mib", 32, 1)
        staging = _number(options, "staging_mib", 256, 8)
        if staging < 2 * piece:
            raise ValueError(
                f"TrivetConnector: staging_mib ({staging:g}) must hold two pieces of piece_mib ({piece:g})"
            )
        return cls(
            address=address,
            movers=tuple(movers),
            staging_bytes=int(staging * MIB),
            piece_bytes=int(piece * MIB),
            lease_s=_number(options, "lease_s", 30, 0.1),
            checksums=checksums,
        )


def _number(options: Mapping[str, Any], name: str, default: float, least: float) -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"TrivetConnector: {name} must be a number of at least {least:g}, not {value!r}")
    return value


def runtime_directory() -> Path:
    """A folder of this user's for sockets; made, for nobody else to read, where it is missing."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = (
        Path(base, "trivet") if base and Path(base).is_dir() else Path(tempfile.gettempdir(), f"trivet-{os.getuid()}")
    )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise ValueError(f"TrivetConnector: {path} belongs to another user; set XDG_RUNTIME_DIR or an address")
    return path
