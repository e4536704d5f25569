"""``trivet render``: a render server, in the foreground."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
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
    flags, tier = _flags(context.args[0], context.args[1:])
    if cache_mib is not None:
        tier = tier.model_copy(update={"cache_mib": cache_mib})
    if fast_tokenizer is not None:
        tier = tier.model_copy(update={"fast_tokenizer": fast_tokenizer.value})
    with bind("the render server", host, port, another="--port N (0: a free one)") as listener:
        _run(flags, listener, tier)


def _flags(what: str, rest: Sequence[str]) -> tuple[list[str], RenderTier]:
    """vLLM's flags, the model first, and what else a topology says of rendering."""
    if not what.endswith((".yaml", ".yml")):
        if what.startswith(("/", "./", "../", "~")) and not Path(what).expanduser().is_dir():
            raise TrivetError(f"there is no folder {what}", mend="give a model's folder, or a hub name")
        return [str(Path(what).expanduser()) if what.startswith("~") else what, *rest], RenderTier()
    from trivet.cli.common import model_folder
    from trivet.topology import make_plan

    topology = read_topology(Path(what))
    plan = make_plan(topology, PortBook(lock=False), model=model_folder(topology))
    return [*plan.render_flags, *rest], topology.tiers.render


def _run(flags: Sequence[str], listener: socket.socket, tier: RenderTier) -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # it needs no GPU, and must not take memory of one
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import trivet.fleet.vllm  # noqa: F401  (answers for the distribution name of vLLM's CPU build)

    try:
        import uvloop

        from trivet.render.server import serve
        from trivet.render.tokenizing import settings_of
    except ImportError as error:
        raise TrivetError(f"vLLM cannot be loaded: {error}", mend="reinstall it: pip install 'trivet[cpu]'") from error
    settings = settings_of(tier.cache_mib, tier.fast_tokenizer)
    address, port = listener.getsockname()[:2]
    scheme = "https" if any(one.startswith("--ssl-certfile") for one in flags) else "http"
    url = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
    err.print(f"reading {escape(flags[0])} ...", style="dim", soft_wrap=True)
    uvloop.run(serve(flags, settings, listener, lambda app: _tell(app, url)))


def _tell(app: Any, url: str) -> None:
    out.print(f"renders on [bold]{url}[/]; Ctrl-C ends it\n", soft_wrap=True)
    for what, line in app.state.trivet_told.items():
        out.print(f"  {what:<11} {escape(line)}", soft_wrap=True)
    model = app.state.openai_serving_models.model_name()
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hi"}}]}}'
    out.print(
        f"\n  {'ask it':<11} curl {url}/v1/chat/completions/render -H 'Content-Type: application/json' "
        f"-d '{escape(body)}'",
        soft_wrap=True,
    )
