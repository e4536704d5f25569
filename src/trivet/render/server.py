"""A render server: vLLM's own (``vllm launch render``), quickened. The same endpoints, bodies and flags."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import FrameType

import uvicorn
import vllm.logger
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.render.app_state import init_render_app_state

from trivet.errors import TrivetError
from trivet.render.frontend import (
    IN_TOPOLOGY,
    parse_flags,
    prepare,
    refused_flags,
    render_config,
    root_logger_kept,
    unreadable_model,
)
from trivet.render.garbage import spare_collections
from trivet.render.listening import DEFAULTS, config_of, refreshed, refuse_others
from trivet.render.quicken import quicken, told_of
from trivet.render.tokenizing import TokenizingSettings

_INLINE_CHARACTERS = 64 * 2**10
"""Texts up to so long are rendered on the event loop: some milliseconds, in which no stream waits here."""


async def open_render_app(args: Namespace, settings: TokenizingSettings, flags_in: str = IN_TOPOLOGY) -> FastAPI:
    """vLLM's render application for parsed flags, quickened. Takes seconds.

    Args:
        flags_in: where a person finds the flags, for errors.

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
        raise refused_flags(error, flags_in) from error
    prompts = quicken(app, app.state.online_renderer.renderer, settings, inline_characters=_INLINE_CHARACTERS)
    plain = app.state.trivet_plain_chats
    app.state.trivet_told = told_of(prompts, plain)

    async def status(_: Request) -> JSONResponse:
        figures = None if prompts is None else prompts.figures
        return JSONResponse({**told_of(prompts, plain), "cache": None if figures is None else asdict(figures)})

    app.router.routes.insert(0, Route("/trivet/render", status, methods=["GET"]))
    return app


async def serve(
    flags: Sequence[str],
    settings: TokenizingSettings,
    listener: socket.socket,
    started: Callable[[FastAPI], None] = lambda _: None,
    flags_in: str = IN_TOPOLOGY,
) -> None:
    """Serves until SIGINT or SIGTERM, and then what still runs; a second one ends the process.

    Args:
        flags: those of ``vllm launch render``, the model first.
        listener: a bound socket.
        started: called when requests are answered.
        flags_in: where a person finds the flags, for errors.

    Raises:
        TrivetError: bad flags, or a model whose config or tokenizer cannot be read.
    """
    args = parse_flags([*flags[:1], *DEFAULTS, *flags[1:]], flags_in)
    refuse_others(args)
    if (configure := getattr(vllm.logger, "configure_logging_from_args", None)) is not None:  # not in vLLM 0.30
        try:
            configure(args)
        except Exception as error:  # of whatever a file names
            raise refused_flags(error, flags_in) from error
    app = await open_render_app(args, settings, flags_in)
    spare_collections()
    config = config_of(app, args)
    server = _Server(config, lambda: started(app))
    with refreshed(config, args):
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's raises the signal again when all is done, and a supervisor would take that for a failure."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second one does not wait for clients."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)
