"""The command line: one file a command."""

from __future__ import annotations

import sys

import typer

from trivet.cli import check, demo, engine, reload, render, sim, status, topology, up
from trivet.cli.common import console_error, version_callback
from trivet.errors import TrivetError

app = typer.Typer(
    name="trivet",
    help="Serve LLMs on vLLM split into three tiers: render (CPU), prefill and decode.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(demo.demo)
app.command()(up.up)
app.command()(reload.reload)
app.command()(status.status)
app.command(name="check", cls=check.JsonMayBeAlone)(check.check_command)
app.command()(engine.engine)
app.command(
    options_metavar="MODEL [OPTIONS]", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(render.render)
app.command(
    options_metavar="[MODEL] [OPTIONS]", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(sim.sim)
app.add_typer(topology.app, name="topology")


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=version_callback, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    pass


def main() -> None:
    """Runs the command line; what a person can mend is printed as one line, without a traceback."""
    try:
        app()
    except TrivetError as error:
        console_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(141)


if __name__ == "__main__":
    main()
