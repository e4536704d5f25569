"""``trivet render``: a render server, in the foreground."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from trivet.cli.common import err, out, read_topology
from trivet.errors import TrivetError
from trivet.topology.machine import Machine
from trivet.topology.model import RenderTier
from trivet.topology.ports import PortBook, bind

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json", "vocab.txt")
"""A folder with none of them has no tokenizer, but for some whose code is in the folder."""


class FastTokenizer(StrEnum):
    """What ``--fast-tokenizer`` takes."""

    AUTO = "auto"
    OFF = "off"
    FASTOKENS = "fastokens"
    GIGATOKEN = "gigatoken"


def render(
    context: typer.Context,
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on."),
    port: int = typer.Option(8100, "--port", min=0, max=65535, help="0 takes a free one."),
    cache_mib: int | None = typer.Option(
        None, "--cache-mib", min=0, help="Memory for ids of text that came before; 0 keeps none.", show_default="64"
    ),
    fast_tokenizer: FastTokenizer | None = typer.Option(
        None,
        "--fast-tokenizer",
        help="auto: the fastest that is installed and gives the same ids.",
        show_default="auto",
    ),
) -> None:
    """Run a render server until Ctrl-C: text to token ids and back, without an engine.

    MODEL is a folder or hub name, or a topology file (.yaml), whose model and render flags are then used. All flags of
    `vllm launch render --help` can be added; endpoints and bodies are the same.
    """
    if not context.args or context.args[0].startswith("-"):
        raise TrivetError(
            "no model is given, or it does not stand first",
            mend="trivet render MODEL [FLAGS], or trivet render TOPOLOGY.yaml [FLAGS]",
        )
    if Machine.here().vllm is None:
        raise TrivetError("vLLM is not installed, and rendering is done with it", mend="pip install 'trivet[cpu]'")
    asked = _asked(context.args[0], context.args[1:])
    tier = asked.tier
    if cache_mib is not None:
        tier = tier.model_copy(update={"cache_mib": cache_mib})
    if fast_tokenizer is not None:
        tier = tier.model_copy(update={"fast_tokenizer": fast_tokenizer.value})
    with bind("the render server", host, port, another="--port N (0: a free one)") as listener:
        _run(_Asked(asked.flags, tier, asked.flags_in), listener)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be served."""

    flags: Sequence[str]
    """vLLM's, the model first."""
    tier: RenderTier
    """What else a topology says of rendering."""
    flags_in: str
    """Where a person finds the flags."""


def _asked(what: str, rest: Sequence[str]) -> _Asked:
    if not what.lower().endswith((".yaml", ".yml")):
        _look_at_folder(what, rest)
        model = str(Path(what).expanduser()) if what.startswith("~") else what
        return _Asked([model, *rest], RenderTier(), "the flags behind the model")
    from trivet.cli.common import model_folder
    from trivet.topology import make_plan

    topology = read_topology(Path(what))
    plan = make_plan(topology, PortBook(lock=False), model=model_folder(topology))
    tier = topology.tiers.render
    flags_in = "`flags` and `tiers.render.flags` in the topology, and the flags behind its name"
    guard = ["--api-key", tier.api_key] if tier.api_key and not _has(rest, "--api-key") else []
    return _Asked([*plan.render_flags, *guard, *rest], tier, flags_in)


def _look_at_folder(what: str, rest: Sequence[str]) -> None:
    """
    Raises:
        TrivetError: it is a folder that is not there, or is none of a model.
    """
    folder = Path(what).expanduser()
    if not folder.is_dir():
        if what.startswith(("/", "./", "../", "~")) and not folder.is_file():
            raise TrivetError(f"there is no folder {what}", mend="give a model's folder, or a hub name")
        return
    if not any((folder / name).exists() for name in ("config.json", "params.json")):
        raise TrivetError(f"{what} is no model's folder: it has no config.json", mend="give the one that has it")
    elsewhere = any(_has(rest, flag) for flag in ("--tokenizer", "--tokenizer-mode", "--trust-remote-code"))
    if not elsewhere and not any((folder / name).exists() for name in _TOKENIZERS):
        raise TrivetError(
            f"{what} has no tokenizer.json", mend="put the tokenizer's files there, or give its folder with --tokenizer"
        )


def _has(flags: Sequence[str], wanted: str) -> bool:
    return any(one.partition("=")[0].replace("_", "-") == wanted for one in flags)


def _run(asked: _Asked, listener: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    err.print("loading vLLM ...", style="dim", soft_wrap=True)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # it needs no GPU, and must not take memory of one
    tells = any(_has(asked.flags, flag) for flag in ("--enable-log-requests", "--log-level"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if tells else "WARNING")
    import trivet.fleet.vllm  # noqa: F401  (answers for the distribution name of vLLM's CPU build)

    try:
        import uvloop

        from trivet.render.server import serve
        from trivet.render.tokenizing import settings_of
    except ImportError as error:
        raise TrivetError(f"vLLM cannot be loaded: {error}", mend="reinstall it: pip install 'trivet[cpu]'") from error
    _log_here()
    settings = settings_of(asked.tier.cache_mib, asked.tier.fast_tokenizer)
    address, port = listener.getsockname()[:2]
    scheme = "https" if _has(asked.flags, "--ssl-certfile") else "http"
    url = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
    err.print(f"reading {escape(asked.flags[0])} ...", style="dim", soft_wrap=True)
    uvloop.run(serve(asked.flags, settings, listener, lambda app: _tell(app, url), asked.flags_in))


def _stop(number: int, _: object) -> None:
    """Before it serves there is nothing to be finished. What was started ends with this process."""
    begin = b"\n" if sys.stderr.isatty() else b""  # behind the terminal's ^C
    os.write(sys.stderr.fileno(), begin + b"stopped before it served\n")
    os._exit(128 + number)


class _Lines(logging.Handler):
    """What Trivet logs, for people."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "dim" if record.levelno < logging.WARNING else "yellow"
        err.print(escape(record.getMessage()), style=style, soft_wrap=True)


def _log_here() -> None:
    logger = logging.getLogger("trivet")
    logger.addHandler(_Lines())
    logger.propagate = False
    for name in ("tokenizing", "verdicts"):  # what takes its time
        logging.getLogger(f"trivet.render.{name}").setLevel(logging.INFO)


def _tell(app: Any, url: str) -> None:
    out.print(f"renders on [bold]{url}[/]; Ctrl-C ends it\n", soft_wrap=True)
    for what, line in app.state.trivet_told.items():
        out.print(f"  {what:<11} {escape(line)}", soft_wrap=True)
    model = app.state.openai_serving_models.model_name()
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    key = ' -H "Authorization: Bearer $KEY"' if _is_guarded(app) else ""
    insecure = " --insecure" if url.startswith("https") else ""  # the certificate may not name this address
    ask = f"curl{insecure} {url}/v1/chat/completions/render -H 'Content-Type: application/json'{key} -d '{body}'"
    out.print(f"\n  {'ask it':<11} {escape(ask)}", soft_wrap=True)


def _is_guarded(app: Any) -> bool:
    """See ``build_app`` of vLLM."""
    return any(app.state.args.api_key or [os.environ.get("VLLM_API_KEY")])
