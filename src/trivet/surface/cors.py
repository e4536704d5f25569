"""CORS: which websites a browser lets read what the gateway answers (https://fetch.spec.whatwg.org/#http-cors-protocol).

For both data planes alike, and for the gateway's own refusals: one layer over everything, so the front end under it is
not told the ``Origin`` and adds no headers of its own. What the gateway tells of itself (``/metrics``, ``/trivet/...``)
is for no website: a page that somebody visits could otherwise read it from a gateway of that machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trivet.surface.http import ASGIApp, Message, Receive, Scope, Send, answer, header, header_value

_OF_THE_GATEWAY = ("/metrics", "/trivet/")
_REMEMBERED_S = 600
"""How long browsers may remember what they were allowed; Starlette's number, and so that of vLLM."""
_TOLD = b"retry-after, x-request-id, x-trivet-served"
"""Headers of answers that pages may read besides those that they always may."""


@dataclass(frozen=True, slots=True)
class CorsRules:
    """Who may ask, and how."""

    origins: Sequence[str] = ("*",)
    """``https://host`` each, or ``*`` for any; nobody, if empty."""
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False
    """Whether cookies and such may be sent along."""

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin may read answers."""
        return "*" in self.origins or origin in self.origins


class Cors:
    """An application over another one. What no website asks for (no ``Origin``) passes through untouched."""

    def __init__(self, app: ASGIApp, rules: CorsRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection."""
        if scope["type"] != "http" or (origin := header(scope, b"origin")) is None:
            await self._app(scope, receive, send)
            return
        wanted = header(scope, b"access-control-request-method")
        allowed = self._rules.allows(origin) and not scope["path"].startswith(_OF_THE_GATEWAY)
        if scope["method"] == "OPTIONS" and wanted is not None:
            await self._preflight(scope, send, origin, wanted, allowed)
            return
        scope = {**scope, "headers": [one for one in scope["headers"] if one[0] != b"origin"]}
        own = [*self._told(origin), (b"access-control-expose-headers", _TOLD)] if allowed else []

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *own, *self._varies()]}
            await send(message)

        await self._app(scope, receive, sending)

    async def _preflight(self, scope: Scope, send: Send, origin: str, wanted: str, allowed: bool) -> None:
        rules, asked = self._rules, header(scope, b"access-control-request-headers")
        if not allowed:
            await _refuse(send, "origin", self._varies())
        elif "*" not in rules.methods and wanted not in rules.methods:
            await _refuse(send, "method", self._varies())
        elif asked is not None and not _covers(rules.headers, asked):
            await _refuse(send, "headers", self._varies())
        else:
            told = [
                *self._told(origin),
                (b"access-control-allow-methods", header_value(wanted)),
                (b"access-control-max-age", str(_REMEMBERED_S).encode()),
                *self._varies(),
            ]
            if asked is not None:  # by name, as the wildcard does not stand for Authorization
                told.append((b"access-control-allow-headers", header_value(asked)))
            await answer(send, 200, b"OK", b"text/plain", told)

    def _told(self, origin: str) -> list[tuple[bytes, bytes]]:
        rules = self._rules
        told = [(b"access-control-allow-origin", b"*" if "*" in rules.origins else header_value(origin))]
        return [*told, (b"access-control-allow-credentials", b"true")] if rules.credentials else told

    def _varies(self) -> list[tuple[bytes, bytes]]:
        """That other origins are answered otherwise, for caches."""
        return [] if "*" in self._rules.origins else [(b"vary", b"Origin")]


def _covers(allowed: Sequence[str], asked: str) -> bool:
    names = {one.strip().lower() for one in asked.split(",")} - {""}
    return "*" in allowed or names <= {one.lower() for one in allowed}


async def _refuse(send: Send, what: str, varies: Iterable[tuple[bytes, bytes]]) -> None:
    await answer(send, 400, f"Disallowed CORS {what} (gateway.cors)".encode(), b"text/plain", varies)
