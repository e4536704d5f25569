"""TrivetConnector: KV moves while prefill computes. The connector itself is ``trivet.transfer``, inside the engines.

Both legs start together and meet under a transfer id that the gateway makes: prefill is asked with
``do_remote_decode``, decode with ``do_remote_prefill`` and the address at which prefill's connector listens. Decode
parks its request until prefill announces it, and takes each piece of KV as it is computed. Prefill's answer says
whether it was handed over; where it was not, decode computes the prompt itself. Prefill's token may be the answer's
first: the engines pass it on between themselves, so that both legs carry the same prompt and decode continues behind
it. KV that no decode engine has asked for is released at prefill, by a request that names the transfer.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trivet.connectors.base import EngineSettings, Need, Side

_SCHEME = "unix:"
_LONGEST_PATH_BYTES = 90
"""Of the 107 that Linux allows a Unix socket's path; what the engine's ranks listen at is longer by their number."""

MOVERS = ("shm", "cuda_p2p", "pinned")
"""What KV can travel by, as the option ``movers`` names it."""


class TrivetConnector:
    """Trivet's own connector."""

    name = "TrivetConnector"
    devices = frozenset({"cpu", "cuda"})
    hands_over_first_token = True
    decode_serves_whole = True
    legs_start_together = True
    released_at = Side.PREFILL
    one_host = True
    bytes_metric = "vllm:trivet_kv_bytes_total"

    def needs(self, device: str) -> Sequence[Need]:  # noqa: ARG002  (the protocol names it)
        """Nothing: it is a part of Trivet."""
        return []

    def ports(self, ranks: int) -> int:  # noqa: ARG002  (the protocol names it)
        """None: it listens on a Unix socket."""
        return 0

    def check_options(self, options: Mapping[str, Any]) -> None:
        """See ``Connector``."""
        for name, value in options.items():
            if name not in _OPTIONS:
                raise ValueError(f"{self.name} has no option {name!r} (there are: {', '.join(sorted(_OPTIONS))})")
            fits, told = _OPTIONS[name]
            if not fits(value):
                raise ValueError(f"{name} is {told} (got {value!r})")
        pieces = options.get("piece_mib", _PIECE_MIB)
        if options.get("staging_mib", _STAGING_MIB) < 2 * pieces:
            raise ValueError(f"staging_mib holds at least two pieces of piece_mib ({pieces})")

    def peer_address(self, port: int) -> str | None:
        """A socket of this user's, named by the engine's HTTP port, which no two engines of a host share."""
        paths = [folder / f"{port}.sock" for folder in _runtime_folders()]
        fitting = (path for path in paths if len(os.fsencode(path)) <= _LONGEST_PATH_BYTES)
        return f"{_SCHEME}{next(fitting, paths[-1])}"

    def engine_settings(
        self,
        side: Side,
        *,
        device: str,  # noqa: ARG002  (the protocol names it)
        host: str,  # noqa: ARG002
        port: int | None,  # noqa: ARG002
        options: Mapping[str, Any],
        address: str | None = None,
    ) -> EngineSettings:
        """vLLM loads it by its module's path."""
        return EngineSettings(
            {
                "kv_connector": self.name,
                "kv_connector_module_path": "trivet.transfer.connector",
                "kv_role": "kv_producer" if side is Side.PREFILL else "kv_consumer",
                # decode recomputes by itself what did not come; vLLM's policy is for what cannot be recomputed, a first
                # token that has gone to the client and is not known to decode
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": {"address": address, **options},
            }
        )

    def rendezvous(
        self, transfer_id: str, prefill_address: str, *, first_token: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``Connector``."""
        shared = {"transfer_id": transfer_id, "first_token": first_token}
        return (
            {"do_remote_decode": True, **shared},
            {"do_remote_prefill": True, "prefill_address": prefill_address, **shared},
        )

    def problem_of(self, answered: Mapping[str, Any] | None) -> str | None:
        """See ``Connector``."""
        if not answered or not isinstance(answered.get("handed_over"), bool):
            raise ValueError(f"it says nothing of the transfer; is its kv_connector {self.name}?")
        if answered["handed_over"]:
            return None
        return str(answered.get("problem") or "it does not say why").splitlines()[0]

    def prefill_params(self) -> dict[str, Any]:
        """Unused: see ``rendezvous``."""
        raise NotImplementedError

    def decode_params(self, answered: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Unused: see ``rendezvous``."""
        raise NotImplementedError

    def release_params(self, answered: Mapping[str, Any]) -> dict[str, Any] | None:
        """A request with these makes prefill free the transfer's KV, held or not; also from what prefill was asked."""
        transfer_id = answered.get("transfer_id")
        held = answered.get("handed_over", answered.get("do_remote_decode"))
        return {"release_transfer": transfer_id} if transfer_id and held else None


_STAGING_MIB, _PIECE_MIB = 256, 32
"""What the connector takes unless told."""


def _runtime_folders() -> Iterator[Path]:
    """Where this user's sockets may lie, the best first; the last has the shortest path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield Path(runtime) / "trivet"
    own = f"trivet-{os.getuid()}"
    yield Path(tempfile.gettempdir()).absolute() / own
    yield Path("/tmp") / own


def _are_movers(value: object) -> bool:
    known = isinstance(value, list) and all(isinstance(one, str) and one in MOVERS for one in value)
    return known and bool(value) and len(set(value)) == len(value)  # type: ignore[arg-type, call-overload]


def _whole_number(least: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_lease(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


_OPTIONS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "movers": (_are_movers, f"a list of {', '.join(MOVERS)}, the preferred one first"),
    "staging_mib": (_whole_number(8), "a whole number of at least 8"),
    "piece_mib": (_whole_number(1), "a whole number of at least 1"),
    "lease_s": (_is_lease, "a number above 0"),
    "checksums": (lambda value: isinstance(value, bool), "true or false"),
}
"""What each option may be, and how that is said."""
