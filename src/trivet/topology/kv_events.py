"""Where an engine tells what its prefix cache holds (vLLM's KV events), and the flag by which it does."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from trivet.connectors.address import SCHEME, default_address
from trivet.errors import TrivetError

KvEventsAddress = tuple[str, str]
"""Where events come from, and where those that were missed are asked for again; as ZeroMQ writes addresses."""


def own_sockets(port: int) -> KvEventsAddress:
    """Of an engine on this machine: sockets of this user's, as events tell clients' prompts.

    TCP would be open to everyone who reaches the machine: at any other address than ``*`` vLLM does not listen, but
    connects (``ZmqEventPublisher._socket_setup``).

    Args:
        port: the engine's HTTP port, which no two engines of a host share.
    """
    return _ipc(f"{port}-events"), _ipc(f"{port}-replay")


def on_the_network(host: str, port: int) -> KvEventsAddress:
    """Of an engine that is reached under ``host``; events that were missed come from the port above."""
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}"


def flag_value_of(addresses: KvEventsAddress) -> str:
    """What ``--kv-events-config`` says to an engine that listens there itself."""
    endpoint, replay = addresses
    return json.dumps(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
    )


def make_folders(config: str) -> None:
    """Makes the folders of an engine's sockets, for this user only: who can put another socket there hears prompts.

    Args:
        config: the value of ``--kv-events-config``; what is wrong with it its engine says.

    Raises:
        TrivetError: there is a folder, and it is not this user's alone, or none can be made.
    """
    try:
        told = json.loads(config)
    except ValueError:
        return
    for name in ("endpoint", "replay_endpoint"):
        scheme, _, path = str(told.get(name) if isinstance(told, dict) else "").partition("://")
        if scheme != "ipc":
            continue
        folder = Path(path).parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError as error:
            raise TrivetError(f"KV events: {folder}: {error.strerror}", mend="set XDG_RUNTIME_DIR or TMPDIR") from None
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise TrivetError(
                f"KV events: others may write in {folder}, where an engine's sockets lie",
                mend=f"chmod 700 {folder}, or set XDG_RUNTIME_DIR or TMPDIR to a folder of your own",
            )


def _ipc(name: str) -> str:
    return f"ipc://{default_address(name).removeprefix(SCHEME)}"
