"""What moves KV between engines, one file a connector: its engine flags, its handshake, its needs."""

from __future__ import annotations

from trivet.connectors.base import Connector, EngineSettings, Need, Side
from trivet.connectors.nixl import NixlConnector
from trivet.connectors.trivet import TrivetConnector

__all__ = ["CONNECTORS", "Connector", "EngineSettings", "Need", "NixlConnector", "Side", "TrivetConnector", "connector"]

CONNECTORS: dict[str, Connector] = {one.name: one for one in (NixlConnector(), TrivetConnector())}
"""Every connector that Trivet speaks, by the name vLLM gives it."""


def connector(name: str) -> Connector:
    """The connector of that name.

    Raises:
        KeyError: Trivet does not speak it.
    """
    return CONNECTORS[name]
