"""An engine that someone else has started, as the fleet sees it: health, version, one token, metrics."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from trivet.topology import EnginePlan


class ForeignEngine:
    """On 127.0.0.1 while the block runs; its attributes say what it answers from now on."""

    def __init__(self, name: str = "decode-0", *, api_key: str | None = None, started_by: str = "someone else") -> None:
        self.health: int | None = 200
        """None closes the connection."""
        self.hangs = False
        """It takes questions about its health and answers nothing."""
        self.version: object = {"version": "0.32.0"}
        self.canary = 200
        self.metrics: str | None = ""
        """None: it cannot be asked now."""
        self.keys: list[str | None] = []
        self._url: str | None = None
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/version", self._version)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_post("/inference/v1/generate", self._generate)
        self._server = TestServer(application)
        self._name, self._api_key, self._started_by = name, api_key, started_by

    async def __aenter__(self) -> ForeignEngine:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def vanish(self) -> None:
        """Nothing listens there from now on."""
        self._url = self.url
        await self._server.close()

    @property
    def url(self) -> str:
        return self._url or str(self._server.make_url("")).rstrip("/")

    @property
    def plan(self) -> EnginePlan:
        tier = self._name.partition("-")[0]
        return EnginePlan(self._name, tier, self.url, "cuda", self._started_by, api_key=self._api_key)

    async def _health(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.Event().wait()
        if self.health is None:
            request.transport.abort()
        return web.Response(status=self.health or 500)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response(self.version)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics, status=200 if self.metrics is not None else 500)

    async def _generate(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.Response(status=self.canary, text="why not")
