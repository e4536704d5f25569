"""What the engine's ``kv_connector_extra_config`` says to TrivetConnector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivet.connectors.address import default_address, path_of
from trivet.connectors.options import Options

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine's connector. Defaults, and what each may be: ``trivet.connectors.options``."""

    address: str
    """Where the scheduler side listens: ``unix:`` and a path. Rank r of the workers listens at the path and ``.r``."""
    movers: tuple[str, ...]
    """Names of movers that may be used, preferred first; empty lets the device decide."""
    staging_bytes: int
    """Memory of a worker through which pieces leave."""
    piece_bytes: int
    """The size that a piece is cut to."""
    lease_s: float
    """How long KV is kept for a decode engine that does not say that it still wants it."""
    checksums: bool
    """Whether each piece is compared after it has been written at its destination."""

    @property
    def path(self) -> str:
        """The path in ``address``."""
        return path_of(self.address)

    @property
    def notice_path(self) -> str:
        """Where a decode engine's workers tell its scheduler side what has landed."""
        return f"{self.path}.d"

    @classmethod
    def of(cls, given: Mapping[str, Any], engine_id: str) -> Settings:
        """Reads ``kv_connector_extra_config``.

        Args:
            engine_id: names the socket where no address is given.

        Raises:
            ValueError: an option that is not known or not valid, in one line.
        """
        rest = dict(given)
        address = rest.pop("address", None)
        if address is None:
            address = default_address(engine_id.replace("/", "_")[:36])
        try:
            path_of(address)
            options = Options.of(rest)
        except ValueError as error:
            raise ValueError(f"TrivetConnector: {error}") from None
        return cls(
            address=address,
            movers=options.movers,
            staging_bytes=options.staging_mib * MIB,
            piece_bytes=options.piece_mib * MIB,
            lease_s=options.lease_s,
            checksums=options.checksums,
        )
