"""Whether the gateway can serve, and what is missing if it cannot."""

from __future__ import annotations

from trivet.routing.choose import choose
from trivet.routing.engines import Engines


def why_not_ready(engines: Engines) -> str | None:
    """What keeps every request from being served, in words for a person; None if a request could be served.

    A mixed engine serves, and so does a pair of a prefill and a decode engine. A decode engine alone does where the
    connector lets one compute prompts (``Connector.decode_serves_whole``).
    """
    if choose(engines, colocate=None) is not None:
        return None
    return f"no engine is ready to serve: {_missing(engines)}"


def _missing(engines: Engines) -> str:
    views = engines.all()
    if not views:
        return "there are no engines"
    if engines.ready("prefill"):
        return "prefill engines cannot serve without a decode engine, and no decode or mixed engine is ready"
    if engines.ready("decode"):
        return "with this connector decode engines cannot compute prompts, and no prefill or mixed engine is ready"
    return f"0 of {len(views)} are ready"
