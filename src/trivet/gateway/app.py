"""The gateway as an ASGI application: Trivet's own endpoints, then vLLM's API server for all the rest."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from trivet.fleet import probe
from trivet.gateway.metrics import GatewayMetrics
from trivet.journal import Journal, RequestRecord, current_request
from trivet.legs.life import Legs
from trivet.routing.choose import choose
from trivet.routing.engines import Engines
from trivet.surface.http import ASGIApp, Message, Receive, Scope, Send, answer, answer_error, answer_json

_GENERATING = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/invocations",
)

_GUARDED_BY_VLLM = ("/v1", "/v2", "/inference", "/cohere")


class GatewayApp:
    """Routes a request to Trivet's endpoints or to vLLM's application.

    ``/health`` says that the worker lives, ``/ready`` that something can serve, ``/metrics`` what it counted,
    ``/trivet/status`` what the fleet looks like and ``/trivet/requests/ID`` how a recent request went. A request with
    the header ``X-Trivet-Serve: colocated`` is not split.
    """

    def __init__(
        self,
        frontend: ASGIApp,
        engines: Engines,
        legs: Legs,
        metrics: GatewayMetrics,
        *,
        fleet: Callable[[], dict[str, Any]],
        running: Callable[[], int],
        api_keys: Sequence[str] = (),
    ) -> None:
        self._frontend = frontend
        self._engines = engines
        self._legs = legs
        self._metrics = metrics
        self._fleet = fleet
        self._running = running
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._journal = Journal()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection."""
        if scope["type"] != "http":
            await self._frontend(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and await self._own(scope, path, send):
            return
        if method == "POST" and not path.startswith(_GUARDED_BY_VLLM) and not self._authorized(scope):
            # vLLM guards its API by prefix and leaves, among others, /invocations and /tokenize open
            await answer_error(send, 401, "an API key is needed: Authorization: Bearer KEY")
            return
        if method == "POST" and path in _GENERATING:
            await self._generate(scope, receive, send)
            return
        await self._frontend(scope, receive, send)

    async def _own(self, scope: Scope, path: str, send: Send) -> bool:
        if path == "/health":
            await answer(send, 200, b"", b"text/plain")
        elif path == "/ready":
            if self._can_serve():
                await answer(send, 200, b"", b"text/plain")
            else:
                await answer_error(send, 503, "no engine is ready to serve")
        elif path == "/metrics":
            text = self._metrics.text(self._engines, self._running(), self._legs.releases_pending)
            await answer(send, 200, text, b"text/plain; version=0.0.4; charset=utf-8")
        elif path.startswith("/trivet/"):
            await self._inside(scope, path, send)
        else:
            return False
        return True

    async def _inside(self, scope: Scope, path: str, send: Send) -> None:
        if not self._authorized(scope):
            await answer_error(send, 401, "an API key is needed: Authorization: Bearer KEY")
        elif path == "/trivet/status":
            await answer_json(send, 200, await self._status())
        elif path.startswith("/trivet/requests/"):
            record = self._journal.find(path.removeprefix("/trivet/requests/"))
            if record is None:
                await answer_error(send, 404, "no such request among the newest ones of this worker")
            else:
                await answer_json(send, 200, record.facts())
        else:
            await answer_error(send, 404, f"no such endpoint: {path}")

    async def _status(self) -> dict[str, Any]:
        """The fleet as this worker knows it, each engine with the load that it reports now."""
        status = self._fleet()
        loads = await asyncio.gather(
            *(
                probe.metrics(self._legs.session, one["url"]) if one["ready"] else _nothing()
                for one in status["engines"]
            )
        )
        engines = []
        for one, load in zip(status["engines"], loads, strict=True):
            facts = {**one, "outstanding_tokens": self._engines.outstanding_tokens(one["name"]), "load": None}
            if load is not None:
                facts["load"] = {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage}
            engines.append(facts)
        return {**status, "engines": engines, "generations_running": self._running()}

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _header(scope, b"x-request-id") or uuid.uuid4().hex
        record = self._journal.open(request_id, scope["path"])
        id_header = (b"x-request-id", request_id.encode("latin-1"))
        if (wish := _header(scope, b"x-trivet-serve")) == "colocated":
            record.colocate = "the request asks for it"
        elif wish not in (None, "auto"):
            self._count(record, 400)
            await answer_error(send, 400, "X-Trivet-Serve is 'auto' or 'colocated'", [id_header])
            return
        if not self._can_serve():
            self._count(record, 503)
            await answer_error(send, 503, "no engine is ready to serve this request", [id_header])
            return
        if _header(scope, b"x-request-id") is None:
            # vLLM takes its id from here; given one, it needs no other
            scope = {**scope, "headers": [*scope["headers"], id_header]}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(record, message["status"])
                present = any(name.lower() == b"x-request-id" for name, _ in message.get("headers", ()))
                if not present:
                    message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        token = current_request.set(record)
        try:
            await self._frontend(scope, receive, send_with_id)
        finally:
            current_request.reset(token)

    def _can_serve(self) -> bool:
        return choose(self._engines, colocate=None) is not None

    def _count(self, record: RequestRecord, status: int) -> None:
        record.status = status
        self._metrics.requests.labels(record.path, str(status)).inc()

    def _authorized(self, scope: Scope) -> bool:
        if not self._key_digests:
            return True
        scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, own) for own in self._key_digests]
        return scheme.lower() == "bearer" and any(matches)


async def _nothing() -> None:
    return None


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
