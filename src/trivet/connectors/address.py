"""Where TrivetConnector of an engine listens: an address is ``unix:`` and a path, as KV moves within one host."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

SCHEME = "unix:"
LONGEST_SOCKET_PATH_BYTES = 107
"""Of a Unix socket (Linux, ``sys/un.h``: 108 with the zero behind it)."""
LONGEST_PATH_BYTES = LONGEST_SOCKET_PATH_BYTES - len(".9999")
"""Of an address: an engine's ranks listen at its path and their number."""


def path_of(address: object) -> str:
    """The path in an address.

    Raises:
        ValueError: it is none, in one line.
    """
    path = address.removeprefix(SCHEME) if isinstance(address, str) and address.startswith(SCHEME) else ""
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError(f"{address!r} is no address: say {SCHEME}/PATH, as KV moves within one host")
    if (size := len(os.fsencode(path))) > LONGEST_PATH_BYTES:
        raise ValueError(
            f"the path in {address!r} has {size} bytes; choose one of at most {LONGEST_PATH_BYTES} "
            f"(Unix sockets have {LONGEST_SOCKET_PATH_BYTES}, and ranks append their number)"
        )
    return path


def default_address(name: str) -> str:
    """Where the engine of that name listens unless told: in a folder that is this user's alone, the best that fits."""
    paths = [folder / f"{name}.sock" for folder in _folders()]
    fitting = (path for path in paths if len(os.fsencode(path)) <= LONGEST_PATH_BYTES)
    return f"{SCHEME}{next(fitting, paths[-1])}"


def _folders() -> Iterator[Path]:
    """The best first; the last has the shortest path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield Path(runtime).absolute() / "trivet"
    own = f"trivet-{os.getuid()}"
    yield Path(tempfile.gettempdir()).absolute() / own
    yield Path("/tmp") / own
