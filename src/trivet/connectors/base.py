"""The seam that every connector is behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Side(StrEnum):
    """Which end of a transfer an engine is."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a connector adds to an engine's start."""

    kv_transfer_config: Mapping[str, Any]
    """The value of ``--kv-transfer-config``."""
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Further flags with their value and the reason; what the topology says wins over them."""
    env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Environment with values and reasons."""


@dataclass(frozen=True, slots=True)
class Need:
    """A thing that must be there before an engine with this connector can start."""

    package: str
    """The import name of a Python package."""
    install: str
    """What a person types to get it."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How far the two engines of a pair may differ, beyond what every connector needs of both.

    Every one copies bytes of one model's KV: vLLM version, model, dtype, KV dtype and layout must be the same.
    """

    refused: str
    """What becomes of a pair that differs too far, in a few words."""
    larger_decode_blocks: bool = False
    """Whether decode's block may be several of prefill's, where decode has as many tensor-parallel ranks or more."""
    other_ranks: bool = False
    """Whether the one side's tensor-parallel ranks may be several times the other's."""
    roles_decide: bool = True
    """Whether ``kv_role`` decides what an engine does."""
    speculates: bool = False
    """Whether engines may speculate."""


class Connector(Protocol):
    """One of vLLM's KV connectors, or Trivet's own, as the rest of Trivet sees it.

    Parameters that engines exchange (``kv_transfer_params``) are opaque to everything but the connector's file.
    """

    @property
    def name(self) -> str:
        """vLLM's name for it, as ``kv.connector`` gives it in the topology."""
        ...

    @property
    def devices(self) -> frozenset[str]:
        """The devices whose engines can run it: ``cpu``, ``cuda``."""
        ...

    @property
    def hands_over_first_token(self) -> bool:
        """Whether decode may be given the prompt and prefill's token after it.

        Where it may not (both legs must carry identical ids), decode makes the first token.
        """
        ...

    @property
    def decode_serves_whole(self) -> bool:
        """Whether a decode engine computes a prompt itself when it is given no parameters.

        One that claims KV for every request, asked or not, would answer from memory that nobody wrote: no colocated
        request may go there.
        """
        ...

    @property
    def legs_start_together(self) -> bool:
        """Whether decode is asked at the same moment as prefill (``rendezvous``), or when prefill has answered.

        Of the parameters below those of the other way are unused then.
        """
        ...

    @property
    def released_at(self) -> Side:
        """Who is asked to have KV freed that nobody will take.

        ``decode``: a decode engine takes it, or gives it up, and tells prefill. ``prefill``: the engine that holds it.
        """
        ...

    @property
    def one_host(self) -> bool:
        """Whether both engines of a pair must run on the same host."""
        ...

    def needs(self, device: str) -> Sequence[Need]:
        """What must be installed for engines on ``device``."""
        ...

    def ports(self, ranks: int) -> int:
        """How many consecutive ports an engine with ``ranks`` data-parallel ranks listens on beside HTTP."""
        ...

    @property
    def rank_to_rank(self) -> bool:
        """Whether each rank of prefill hands over to the same rank of decode, so that both must have as many.

        Tensor-parallel ranks only: there are neither pipeline stages nor data-parallel ranks within an engine.
        """
        ...

    def check_device(self, device: str, options: Mapping[str, Any]) -> None:
        """Looks at ``kv.options`` for an engine on ``device``.

        Raises:
            ValueError: an engine there could not start with them, said in one line.
        """
        ...

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Looks at ``kv.options`` of a topology.

        Raises:
            ValueError: one is unknown or wrong, said in one line.
        """
        ...

    def peer_address(self, port: int) -> str | None:
        """Where the connector of an engine listens that is started on this machine; None if the gateway need not know.

        Args:
            port: the engine's HTTP port.
        """
        ...

    def engine_settings(
        self,
        side: Side,
        *,
        device: str,
        host: str,
        port: int | None,
        options: Mapping[str, Any],
        address: str | None = None,
    ) -> EngineSettings:
        """How an engine is started.

        Args:
            host: the name or address under which the other side reaches this engine.
            port: the first of ``ports()``, None if that is 0 or not known here.
            options: ``kv.options`` of the topology, passed on as ``kv_connector_extra_config``.
            address: where it listens for its peers, as ``peer_address`` or the topology has it.
        """
        ...

    def rendezvous(
        self, transfer_id: str, prefill_address: str, *, first_token: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """``kv_transfer_params`` of the prefill leg and of the decode leg, where both start together.

        Args:
            transfer_id: unique; under it the two meet. A decode leg that is offered to another engine keeps it.
            prefill_address: where prefill's connector listens.
            first_token: prefill's token is the answer's first. The engines hand it over themselves: decode is asked
                with the same prompt and limits, and its answer begins with the second token.
        """
        ...

    def problem_of(self, answered: Mapping[str, Any] | None) -> str | None:
        """Why a prefill leg that met decode handed nothing over, in one line; None if it did.

        Decode then computes the prompt itself.

        Raises:
            ValueError: the answer does not speak of it.
        """
        ...

    def prefill_params(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the prefill leg."""
        ...

    def decode_params(self, answered: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the decode leg, from what prefill answered; None if nothing was handed over."""
        ...

    def release_params(self, answered: Mapping[str, Any]) -> dict[str, Any] | None:
        """Parameters of a one-token request whose only use is that prefill frees KV nobody else will pull.

        It goes to the side that ``released_at`` names.

        None if prefill holds nothing.
        """
        ...

    def own_count(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """``decode_params`` under which decode's ``usage`` tells how much of the prompt it had or was handed itself.

        It may be left to tell prefill's count in place of its own, which is what a client wants to see.
        """
        ...

    @property
    def likeness(self) -> Likeness:
        """How far the two engines of a pair may differ."""
        ...

    @property
    def addressed_by_hash(self) -> bool:
        """Whether KV is found by the hashes of whole blocks, so that decode computes the last, partial one itself."""
        ...

    @property
    def moves_padding(self) -> bool:
        """Whether a block is read from every region of memory, where groups of layers are of unlike sizes.

        Some of these hold none of the block's layers then (``KvSize.bytes_of``).
        """
        ...

    @property
    def bytes_metric(self) -> str | None:
        """The engines' counter of KV bytes received, as Prometheus names it, or None."""
        ...
