"""Whether the gateway can serve, and what is missing if it cannot."""

from __future__ import annotations

from typing import Any, Protocol

from trivet.routing.choose import choose, told_of_bad
from trivet.routing.engines import Engines


class RenderServers(Protocol):
    """The servers that render for a worker (``render.pool.Pool``)."""

    def why_not_ready(self) -> str | None:
        """What keeps every request from being rendered, in words for a person; None if one could be."""

    def remarks(self) -> str:
        """The servers that are not used, each with the reason; empty if all are."""

    def facts(self) -> list[dict[str, Any]]:
        """The servers as plain JSON values."""


def why_not_ready(engines: Engines, render_servers: RenderServers | None = None) -> str | None:
    """What keeps every request from being served, in words for a person; None if a request could be served.

    A mixed engine serves, and so does a pair of a prefill and a decode engine. A decode engine alone does where the
    connector lets one compute prompts (``Connector.decode_serves_whole``). Render servers are needed only where
    requests that none takes are refused.
    """
    if choose(engines, colocate=None) is None:
        return f"no engine is ready to serve: {_missing(engines)}"
    return None if render_servers is None else render_servers.why_not_ready()


def remarks(engines: Engines, render_servers: RenderServers | None) -> str:
    """What is amiss though requests are served, in words for a person; empty if nothing is."""
    pairs = told_of_bad(engines)
    servers = "" if render_servers is None else render_servers.remarks()
    lines = [f"pairs that are not used: {pairs}\n"] if pairs else []
    return "".join(lines + ([f"render servers that are not used: {servers}\n"] if servers else []))


def _missing(engines: Engines) -> str:
    views = engines.all()
    if not views:
        return "there are no engines"
    if engines.ready("prefill") and engines.ready("decode"):
        return f"no pair passes its canary, and nobody serves colocated: {told_of_bad(engines)}"
    if engines.ready("prefill"):
        return "prefill engines cannot serve without a decode engine, and no decode or mixed engine is ready"
    if engines.ready("decode"):
        return "with this connector decode engines cannot compute prompts, and no prefill or mixed engine is ready"
    return f"0 of {len(views)} are ready"
