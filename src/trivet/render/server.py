"""A render server: vLLM's own (``vllm launch render``), quickened. The same endpoints, bodies and flags."""

from __future__ import annotations

import gc
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.render.app_state import init_render_app_state

from trivet.errors import TrivetError
from trivet.render.frontend import (
    parse_flags,
    prepare,
    refused_flags,
    render_config,
    root_logger_kept,
    unreadable_model,
)
from trivet.render.quicken import quicken, told_of
from trivet.render.tokenizing import TokenizingSettings

_INLINE_CHARACTERS = 64 * 2**10
"""Texts up to so long are rendered on the event loop: some milliseconds, in which no stream waits here."""
_YOUNG_OBJECTS = 10_000


async def open_render_app(args: Namespace, settings: TokenizingSettings) -> FastAPI:
    """vLLM's render application for parsed flags, quickened. Takes seconds.

    Raises:
        TrivetError: bad flags, or a model whose config or tokenizer cannot be read.
    """
    await prepare(args)
    try:
        config = render_config(args)
    except Exception as error:
        raise unreadable_model(args.model, error) from error
    try:
        with root_logger_kept():
            app: FastAPI = build_app(args, ("render",))
        await init_render_app_state(config, app.state, args)
    except Exception as error:
        raise refused_flags(error) from error
    prompts = quicken(app, app.state.online_renderer.renderer, settings, inline_characters=_INLINE_CHARACTERS)
    app.state.trivet_told = told_of(prompts)

    async def status(_: Request) -> JSONResponse:
        figures = None if prompts is None else prompts.figures
        return JSONResponse({**told_of(prompts), "cache": None if figures is None else asdict(figures)})

    app.router.routes.insert(0, Route("/trivet/render", status, methods=["GET"]))
    return app


async def serve(
    flags: Sequence[str],
    settings: TokenizingSettings,
    listener: socket.socket,
    started: Callable[[FastAPI], None] = lambda _: None,
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        flags: those of ``vllm launch render``, the model first.
        listener: a bound socket.
        started: called when requests are answered.

    Raises:
        TrivetError: bad flags, or a model whose config or tokenizer cannot be read.
    """
    args = parse_flags(flags)
    if args.uds:
        raise TrivetError("a render server listens on a port, and not on a Unix socket", mend="leave out --uds")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        if (file := getattr(args, name)) and not Path(file).is_file():
            raise TrivetError(f"--{name.replace('_', '-')}: there is no file {file}", mend="give one that is there")
    app = await open_render_app(args, settings)
    gc.collect()
    gc.freeze()  # what is loaded now stays
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    config = uvicorn.Config(
        app,
        http="httptools",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        **({"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}),
    )
    server = _Server(config, lambda: started(app))
    await server.serve(sockets=[listener])
    if not server.started:
        raise TrivetError("the render server did not start", mend="see the lines above")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()
