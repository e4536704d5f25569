"""NixlConnector: decode reads KV out of prefill's memory over NIXL (UCX).

Protocol as in ``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`` (vLLM 0.30 to 0.32): prefill
is asked with ``do_remote_decode`` and answers with the coordinates of its blocks, which it holds for
``kv_lease_duration`` seconds (30 unless set); decode is given them verbatim, reads the blocks and tells prefill,
which frees them. Decode trims prefill's block list to its own prompt from the front, so both legs must carry
the same token ids: one more token on decode's side is an assertion in the engine or silent corruption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trivet.connectors.base import EngineSettings, Likeness, Need, Side

# Without these, decode claims the tokens, starts no transfer, and the request is parked for ever.
_DECODE_NEEDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class NixlConnector:
    """vLLM's NixlConnector (pull)."""

    name = "NixlConnector"
    devices = frozenset({"cpu", "cuda"})
    hands_over_first_token = False
    decode_serves_whole = True
    legs_start_together = False
    released_at = Side.DECODE
    one_host = False
    moves_padding = True
    rank_to_rank = False
    addressed_by_hash = False
    # vLLM 0.30 and 0.32, nixl/metadata.py: compute_nixl_compatibility_hash has the version, the --model text, dtypes,
    # heads, layers, attention backend, hybrid manager, what EAGLE drafts with, and push or pull. Ranks, block size and
    # layout are compared in base_worker.py: _validate_remote_agent_handshake. Nobody compares weights.
    likeness = Likeness(
        refused="NIXL's handshake refuses it at the first request",
        larger_decode_blocks=True,
        other_ranks=True,
        roles_decide=False,
        speculates=True,
    )
    bytes_metric = "vllm:nixl_bytes_transferred_sum"

    def needs(self, device: str) -> Sequence[Need]:
        """The ``nixl`` package."""
        extra = "cpu" if device == "cpu" else "cuda"
        return [Need("nixl", f"pip install 'nixl>=1.5' (or trivet[{extra}])")]

    def ports(self, ranks: int) -> int:
        """One side channel for each data-parallel rank: vLLM listens on the port plus the rank."""
        return ranks

    def check_device(self, device: str, options: Mapping[str, Any]) -> None:
        """Its options suit every device."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Nothing: they are vLLM's and NIXL's to know."""

    def peer_address(self, port: int) -> str | None:  # noqa: ARG002  (the protocol names it)
        """None: prefill tells decode where it is."""
        return None

    def engine_settings(
        self,
        side: Side,
        *,
        device: str,
        host: str,
        port: int | None,
        options: Mapping[str, Any],
        address: str | None = None,  # noqa: ARG002  (the protocol names it)
    ) -> EngineSettings:
        """``kv_role`` selects nothing in NIXL but is mandatory; the side-channel host is what prefill advertises."""
        config: dict[str, Any] = {
            "kv_connector": self.name,
            "kv_role": "kv_producer" if side is Side.PREFILL else "kv_consumer",
        }
        if side is Side.DECODE:
            # vLLM's default, said aloud: a transfer that failed is an error the gateway sees, not a silent prefill.
            config["kv_load_failure_policy"] = "fail"
        if device == "cpu":
            config["kv_buffer_device"] = "cpu"
        if options:
            config["kv_connector_extra_config"] = dict(options)
        env = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": (host, "what prefill tells decode; vLLM says localhost unless told"),
        }
        if port is not None:  # on another host it is found there
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = (
                str(port),
                "its own port, since engines on one host may not share one",
            )
        if device == "cpu":
            env["TRIVET_NIXL_PROGRESS_THREAD"] = (
                "0",
                "NIXL's progress thread spins on a whole core while idle; without it NIXL advances in vLLM's own polls",
            )
        return EngineSettings(
            config,
            flags={"block-size": ("128", "fewer, larger descriptors a transfer: half the handover of 16-token blocks")},
            env=env,
        )

    def rendezvous(
        self, transfer_id: str, prefill_address: str, *, first_token: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Unused: decode can be asked only with what prefill has answered."""
        raise NotImplementedError

    def problem_of(self, answered: Mapping[str, Any] | None) -> str | None:
        """Unused: see ``decode_params``."""
        raise NotImplementedError

    def prefill_params(self) -> dict[str, Any]:
        """Asks prefill to keep the prompt's blocks for a remote decode."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def decode_params(self, answered: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Prefill's answer, verbatim; None when it cannot be pulled (null, no blocks, a coordinate missing)."""
        if not answered or not answered.get("do_remote_prefill"):
            return None
        blocks = answered.get("remote_block_ids")
        if not blocks or not any(blocks):
            return None  # nothing to load: vLLM asserts, and the engine dies
        if any(answered.get(key) is None for key in _DECODE_NEEDS):
            return None
        return dict(answered)

    def own_count(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without prefill's count, which vLLM 0.32 would tell in place of decode's own (``RequestState``)."""
        return {name: value for name, value in params.items() if name != "remote_prefill_cached_tokens"}

    def release_params(self, answered: Mapping[str, Any]) -> dict[str, Any] | None:
        """A decode request with these, aborted before or after it is scheduled, notifies prefill."""
        return self.decode_params(answered)
