"""TrivetConnector: KV moves while prefill computes. The connector itself is ``trivet.transfer``, inside the engines.

Both legs start together and meet under a transfer id that the gateway makes: prefill is asked with
``do_remote_decode``, decode with ``do_remote_prefill`` and the address at which prefill's connector listens. Decode
parks its request until prefill announces it, and takes each piece of KV as it is computed. Prefill's answer says
whether it was handed over; where it was not, decode computes the prompt itself. Prefill's token may be the answer's
first: the engines pass it on between themselves, so that both legs carry the same prompt and decode continues behind
it. KV that no decode engine has asked for is released at prefill, by a request that names the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trivet.connectors.address import default_address
from trivet.connectors.base import EngineSettings, Likeness, Need, Side
from trivet.connectors.options import MOVER_DEVICES, MOVERS, Options


class TrivetConnector:
    """Trivet's own connector."""

    name = "TrivetConnector"
    devices = frozenset({"cpu", "cuda"})
    hands_over_first_token = True
    decode_serves_whole = True
    legs_start_together = True
    released_at = Side.PREFILL
    one_host = True
    moves_padding = False
    rank_to_rank = True
    addressed_by_hash = False
    # trivet.transfer.identity: compared when two engines first meet; decode then computes prompts itself
    likeness = Likeness(refused="TrivetConnector refuses it when the two meet, and decode computes each prompt itself")
    bytes_metric = "vllm:trivet_kv_bytes_total"

    def needs(self, device: str) -> Sequence[Need]:  # noqa: ARG002  (the protocol names it)
        """Nothing: it is a part of Trivet."""
        return []

    def ports(self, ranks: int) -> int:  # noqa: ARG002  (the protocol names it)
        """None: it listens on a Unix socket."""
        return 0

    def check_device(self, device: str, options: Mapping[str, Any]) -> None:
        """See ``Connector``."""
        movers = Options.of(options).movers
        if movers and not any(device in MOVER_DEVICES[name] for name in movers):
            suitable = ", ".join(name for name in MOVERS if device in MOVER_DEVICES[name])
            raise ValueError(f"none of its movers ({', '.join(movers)}) runs on {device}; there it has {suitable}")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """See ``Connector``."""
        Options.of(options)

    def peer_address(self, port: int) -> str | None:
        """A socket of this user's, named by the engine's HTTP port, which no two engines of a host share."""
        return default_address(str(port))

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

    def own_count(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """As they are: decode knows no other count."""
        return params

    def release_params(self, answered: Mapping[str, Any]) -> dict[str, Any] | None:
        """A request with these makes prefill free the transfer's KV, held or not; also from what prefill was asked."""
        transfer_id = answered.get("transfer_id")
        held = answered.get("handed_over", answered.get("do_remote_decode"))
        return {"release_transfer": transfer_id} if transfer_id and held else None
