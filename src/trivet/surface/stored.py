"""What ``/v1/responses`` keeps on a server between requests, and where it cannot be served.

vLLM keeps responses in the memory of one process, if ``VLLM_ENABLE_RESPONSES_API_STORE`` is set there. A later request
may reach another worker of the gateway, or another engine on the text plane, which knows nothing of them and says so:
a wrong answer about a response that exists. It is refused by name instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from trivet.surface.streams import RESPONSES

_NOT_STORED = "responses are not kept between requests by this gateway"
_INSTEAD = "send the whole conversation in input"


def refusal_of_stored(method: str, path: str, body: object) -> str | None:
    """Why a request is refused that needs what another has left, or None.

    Args:
        body: the parsed body.
    """
    if path == RESPONSES and method == "POST" and isinstance(body, Mapping):
        if body.get("previous_response_id") is not None:
            return f"previous_response_id is not served: {_NOT_STORED}; {_INSTEAD}"
        if body.get("background"):
            return f"background is not served: {_NOT_STORED}; ask without it, streamed if the answer is long"
    if path.startswith(f"{RESPONSES}/") and not (method == "POST" and path == f"{RESPONSES}/render"):
        return f"{method} {RESPONSES}/ID is not served: {_NOT_STORED}; keep the answer that you were given"
    return None
