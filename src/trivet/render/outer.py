"""Short routes answered where vLLM counts requests, before the layers that find and run a route.

vLLM's counting (``PrometheusInstrumentatorMiddleware``) is the innermost of its middleware: keys, CORS, request ids and
whatever ``--middleware`` names lie outside of it and see all requests as before. Requests are counted by the very
functions that it would have called, with what they look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from timeit import default_timer
from types import SimpleNamespace
from typing import Any, Protocol, cast

from fastapi import FastAPI
from prometheus_fastapi_instrumentator import metrics
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.datastructures import Headers
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

LEFT = "trivet.left"
"""In a scope: a short route has left this request to vLLM's."""
_COUNTS = "default.<locals>.instrumentation"


class ShortRoute(Protocol):
    """What answers, or leaves it to another."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Answers; what to receive from where vLLM's route is to answer, and None otherwise."""
        ...


def answer_early(app: FastAPI, shorts: Mapping[str, ShortRoute]) -> None:
    """Has short routes answer before an application's others, in place, if it counts in the way known here."""
    layer: Any = app.middleware_stack
    while layer is not None and type(below := getattr(layer, "app", None)) is not PrometheusInstrumentatorMiddleware:
        layer = below
    if layer is None or type(layer.app.app) is not ExceptionMiddleware or not _is_known(layer.app):
        return
    layer.app = _Early(layer.app, shorts)


def _is_known(counting: PrometheusInstrumentatorMiddleware) -> bool:
    """Whether it does nothing but what is done here."""
    return bool(
        counting.should_group_status_codes
        and not counting.should_round_latency_decimals
        and counting.inprogress is None
        and not counting.async_instrumentations
        and not counting.body_handlers
        and all(getattr(one, "__qualname__", None) == _COUNTS for one in counting.instrumentations)
    )


class _Early:
    def __init__(self, counting: PrometheusInstrumentatorMiddleware, shorts: Mapping[str, ShortRoute]) -> None:
        self.app = counting
        self._counts = counting.instrumentations
        excluded = counting._is_handler_excluded
        self._shorts = {path: one for path, one in shorts.items() if not excluded(path, True)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        short = None
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            short = self._shorts.get(scope["path"])
        if short is None:
            await self.app(scope, receive, send)
            return
        begun_s, status, headers, started_s = default_timer(), 500, [], None

        async def sending(message: Message) -> None:
            nonlocal status, headers, started_s
            if message["type"] == "http.response.start":
                status, headers, started_s = message["status"], message["headers"], default_timer()
            await send(message)

        again: Receive | None = None
        try:
            again = await short.answer(scope, receive, sending)
        finally:
            if again is None:
                ended_s = default_timer()
                info = metrics.Info(
                    request=Request(scope),
                    response=cast("Response", SimpleNamespace(headers=Headers(raw=headers))),
                    method="POST",
                    modified_handler=scope["path"],
                    modified_status=f"{status // 100}xx",
                    modified_duration=max(ended_s - begun_s, 0.0),
                    modified_duration_without_streaming=max(started_s - begun_s, 0.0) if started_s else 0.0,
                )
                for count in self._counts:
                    count(info)
        if again is not None:
            scope[LEFT] = True
            await self.app(scope, again, send)
