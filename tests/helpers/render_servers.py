"""Render servers over real HTTP: vLLM's own front end renders for them, unless the test wants something else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from aiohttp import web

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that reached a server."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class RenderServer:
    """Listens on a port of its own; can end and come back there."""

    def __init__(self, app: Any = None) -> None:
        """
        Args:
            app: renders, as an ASGI application; without it nothing but replies is answered.
        """
        self._transport = httpx.ASGITransport(app) if app is not None else None
        self._socket = _listening(0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._runner: web.AppRunner | None = None
        self.replies: Reply | None = None
        """Answers requests in the place of the application."""
        self.canaries: Reply | None = None
        """The same, of canaries."""
        self.health = 200
        self.change: Callable[[Any], Any] = lambda answer: answer
        """What is made of the application's answers to requests that are no canaries."""
        self.asked: list[Asked] = []
        """Without canaries."""
        self.looks = 0
        """How often its health was asked for."""
        self.running = self.most = 0
        self.cancelled = 0
        """Requests whose client has closed the connection."""

    async def __aenter__(self) -> RenderServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self._socket.close()

    async def start(self) -> None:
        """Listens, on the port that it had before."""
        application = web.Application(client_max_size=2**30)
        application.router.add_get("/health", self._health)
        application.router.add_post("/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        if self._socket.fileno() < 0:
            self._socket = _listening(int(self.url.rpartition(":")[2]))
        await web.SockSite(self._runner, self._socket).start()

    async def stop(self) -> None:
        """Ends as a process does: its connections are closed, and nobody listens."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None
        self._socket.close()

    def connections(self) -> list[asyncio.Transport]:
        """Those that are open."""
        assert self._runner is not None
        assert self._runner.server is not None
        return [one.transport for one in self._runner.server.connections if one.transport is not None]

    def bodies(self) -> list[Any]:
        return [json.loads(one.body) for one in self.asked]

    async def _health(self, _: web.Request) -> web.Response:
        self.looks += 1
        return web.Response(status=self.health)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        is_canary = "X-Request-Id" not in request.headers
        if is_canary:
            return await (self.canaries or self._rendered)(request)
        self.asked.append(Asked(request.path, request.headers, body))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.replies is not None:
                return await self.replies(request)
            return await self._rendered(request, self.change)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _rendered(self, request: web.Request, change: Callable[[Any], Any] = lambda it: it) -> web.Response:
        assert self._transport is not None
        async with httpx.AsyncClient(transport=self._transport, base_url="http://renders", timeout=20) as client:
            headers = {name: value for name, value in request.headers.items() if name == "Content-Type"}
            answer = await client.post(request.path, content=await request.read(), headers=headers)
        if answer.status_code != 200:
            return web.json_response(answer.json(), status=answer.status_code)
        return web.json_response(change(answer.json()))


def _listening(port: int) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    return found


def answering(status: int, value: Any = None, **headers: str) -> Reply:
    """This answer; a text is sent as it is."""

    async def reply(_: web.Request) -> web.Response:
        if isinstance(value, str):
            return web.Response(status=status, text=value, headers=headers)
        return web.json_response(value, status=status, headers=headers)

    return reply


async def silent(_: web.Request) -> web.StreamResponse:
    """No answer at all."""
    await asyncio.Event().wait()
    raise AssertionError


async def breaking_off(request: web.Request) -> web.StreamResponse:
    """Half an answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"token_ids": [1, 2,')
    assert request.transport is not None
    request.transport.close()
    return response


@contextlib.asynccontextmanager
async def garbling() -> AsyncIterator[str]:
    """A server that speaks no HTTP; its URL."""

    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(10)
            writer.write(b"220 mail.example ESMTP\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(garble, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
