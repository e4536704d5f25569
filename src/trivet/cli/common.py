"""What several commands share: loading a plan, showing events, errors on the terminal."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from trivet import __version__
from trivet.errors import TopologyError, TrivetError
from trivet.gateway.service import Event
from trivet.topology import Plan, Topology, load_topology, make_plan, parse_topology
from trivet.topology.plan import resolve_model
from trivet.topology.ports import PortBook
from trivet.topology.template import TEMPLATE

_WIDTH_OF_NO_TERMINAL = 100_000
"""Columns of a pipe or file: whoever reads there (grep, awk, a person's editor) wants a line to be a line."""


class _Terminal(Console):
    def __init__(self, *, stderr: bool = False) -> None:
        is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
        super().__init__(stderr=stderr, highlight=False, width=None if is_terminal else _WIDTH_OF_NO_TERMINAL)

    def on_broken_pipe(self) -> None:
        """Whoever read this has gone, which is no reason to end what is served. Rich would exit here."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # or Python would complain of its buffer when it ends
        os.close(nowhere)


out = _Terminal()
err = _Terminal(stderr=True)

TopologyArgument = typer.Argument(None, help="Topology file; without one, the demo's topology.", show_default=False)


def version_callback(wanted: bool) -> None:
    """``trivet --version``."""
    if wanted:
        from trivet.topology.machine import Machine

        typer.echo(f"trivet {__version__} (vLLM {Machine.here().vllm or 'not installed'})")
        raise typer.Exit()


def console_error(error: TrivetError) -> None:
    """Prints an error: its detail first, the line that matters last."""
    if error.detail:
        err.print(escape(error.detail), style="dim", soft_wrap=True)
    err.print(f"[bold red]trivet:[/] {escape(str(error))}", soft_wrap=True)


def read_topology(path: Path | None) -> Topology:
    """The topology of a file, or the demo's."""
    return parse_topology(TEMPLATE, "the demo topology") if path is None else load_topology(path)


def model_folder(topology: Topology, *, make: bool = True) -> str:
    """What engines are given as their model; the demo's is made if need be."""
    if topology.model.name != "demo":
        where = topology.where("model", "name")
        try:
            return resolve_model(topology.model.name, topology.folder, where)
        except RuntimeError as error:  # ~nobody
            raise TopologyError(
                f"{where}: model.name: {topology.model.name}: {error}", mend="give a folder or a hub name"
            ) from None
    from trivet.demo.model import demo_model_path, ensure_demo_model

    if not make:
        return str(demo_model_path())
    return str(ensure_demo_model(lambda text: err.print(f"  {text}", style="dim")))


@contextmanager
def open_plan(
    path: Path | None, *, port: int | None = None, at: str = "local", only: str | None = None, guarded: bool = True
) -> Iterator[Plan]:
    """The plan of a topology file; its ports are held while the block runs.

    Args:
        port: the gateway's, in place of the file's.
        guarded: False sends no canaries, whatever the file says.
    """
    topology = read_topology(path)
    changes = ({} if port is None else {"port": port}) | ({} if guarded else {"guard": None})
    if changes:
        topology = topology.model_copy(update={"gateway": topology.gateway.model_copy(update=changes)})
    ports = PortBook()
    try:
        yield make_plan(topology, ports, model=model_folder(topology), at=at, only=only)
    finally:
        ports.close()


def say(console: Console, text: str, *, soft_wrap: bool = True) -> None:
    """Prints a line while a service runs, which goes on where it cannot: its terminal is gone, a disk is full."""
    try:
        console.print(text, soft_wrap=soft_wrap)
    except OSError as error:
        if error.errno == errno.EIO:
            console.quiet = True


class Progress:
    """Prints what happens while a service starts, and that it still does when nothing happens for a while."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._states: dict[str, str] = {}

    def event(self, event: Event) -> None:
        """Prints a change of state."""
        if self._states.get(event.subject) == event.state and not event.detail:
            return
        self._states[event.subject] = event.state
        style = {"ready": "green", "failed": "bold red"}.get(event.state, "dim")
        clock = f"{time.monotonic() - self._started_s:5.0f} s"
        detail = f"  [dim]{escape(event.detail)}[/]" if event.detail else ""
        self._print(f"[dim]{clock}[/]  {escape(event.subject):<12} [{style}]{event.state}[/]{detail}")

    def still(self) -> None:
        """Says what is being waited for."""
        waiting = [name for name, state in self._states.items() if state in ("starting", "waiting")]
        if waiting:
            clock = f"{time.monotonic() - self._started_s:5.0f} s"
            self._print(f"[dim]{clock}  still starting: {', '.join(waiting)}[/]")

    def _print(self, text: str) -> None:
        say(self._console, text, soft_wrap=False)
