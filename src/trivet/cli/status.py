"""``trivet status``: tiers, engines, render servers, state and load of a running service."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import typer
from rich.markup import escape
from rich.table import Table

from trivet.cli.common import out
from trivet.errors import TrivetError
from trivet.gateway.runs import last_certificate, last_url
from trivet.gateway.tls import trusting
from trivet.topology.model import names_a_host


def status(
    url: str | None = typer.Option(None, "--url", help="The gateway; without it, the service started last here."),
    api_key: str | None = typer.Option(None, "--api-key", envvar="TRIVET_API_KEY", help="If the gateway wants one."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
    certificate: Path | None = typer.Option(
        None, "--certificate", help="What an https gateway's certificate is checked against; else what is trusted here."
    ),
) -> None:
    """Show tiers, engines, render servers, their state and load."""
    gateway = url or last_url()
    if gateway is None:
        raise TrivetError("no service runs here", mend="start one with `trivet up`, or give --url")
    if not (re.fullmatch(r"https?://\S+", gateway) and names_a_host(gateway)):
        raise TrivetError(
            f"{gateway!r} is no URL of a gateway", mend="write --url http://HOST:PORT, such as http://127.0.0.1:8000"
        )
    trusted = _trusted(certificate or (last_certificate() if url is None else None))
    facts = asyncio.run(ask_status(gateway.rstrip("/"), api_key, trusted))
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    table = Table(box=None, header_style="bold")
    for column in ("tier", "engine", "state", "running", "waiting", "KV used", "restarts", "address"):
        right = column in ("running", "waiting", "KV used", "restarts")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for engine in facts["engines"]:
        load = engine.get("load") or {}
        style = "green" if engine["ready"] else "yellow" if engine.get("leaving") else "red"
        table.add_row(
            engine["tier"],
            engine["name"],
            f"[{style}]{engine['state']}[/]",
            _number(load.get("running")),
            _number(load.get("waiting")),
            f"{load['kv_usage']:.0%}" if load else "-",
            str(engine["restarts"]),
            engine["url"],
        )
    out.print(f"gateway {gateway}: {facts['generations_running']} generation(s) running")
    out.print(table)
    if servers := facts.get("render_servers"):
        _show_render_servers(servers, several_workers="workers" in facts)
    for pair in facts.get("pairs") or ():
        if pair["proof"] not in _QUIET_PROOFS:
            told = f"{pair['prefill']} -> {pair['decode']} is not used: its canary fails ({pair['proof']})"
            out.print(f"[red]{escape(told)}[/]", soft_wrap=True)
    if reload := facts.get("reload"):
        out.print(f"reload {reload['number']}: {reload['state']}: {escape(reload['told'])}", soft_wrap=True)
    for engine in facts["engines"]:
        if engine.get("problem"):
            out.print(f"{engine['name']}: {escape(engine['problem'])}", soft_wrap=True)
        elif engine.get("last_problem"):
            past = f"{engine['name']}: {engine['last_problem']} ({engine['last_problem_at']}; it is over)"
            out.print(escape(past), soft_wrap=True)
    for server in servers or ():
        if server.get("problem"):  # written to stand behind its name
            out.print(escape(f"{server['url']} {server['problem']}"), soft_wrap=True)


_QUIET_PROOFS = frozenset({"unproven", "open", "good"})
"""Of pairs that are used; see ``routing.proofs``."""
_SERVER_STYLES = {"up": "green", "new": "yellow", "looking": "yellow"}


def _show_render_servers(servers: Sequence[Mapping[str, Any]], *, several_workers: bool) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("render server", overflow="fold")
    table.add_column("state")
    table.add_column("running, of one worker" if several_workers else "running", justify="right")
    for server in servers:
        style = _SERVER_STYLES.get(server["state"], "red")
        table.add_row(server["url"], f"[{style}]{server['state']}[/]", str(server["requests_running"]))
    out.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _trusted(certificate: Path | None) -> ssl.SSLContext | None:
    """What an https gateway is checked against: one certificate, or, with None, the system's authorities."""
    if certificate is None:
        return None
    try:
        return trusting(certificate)
    except OSError as error:
        raise TrivetError(
            f"{certificate} is no certificate that can be read ({error.strerror or error})",
            mend="give the PEM file that gateway.tls.certificate names: --certificate FILE",
        ) from None


async def ask_status(gateway: str, api_key: str | None, trusted: ssl.SSLContext | None = None) -> dict[str, Any]:
    """What a gateway answers on ``/trivet/status``.

    Raises:
        TrivetError: it does not answer, or not this client.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=15)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{gateway}/trivet/status", ssl=trusted or True) as answer,
        ):
            if answer.status == 401 and api_key:
                raise TrivetError(
                    f"{gateway} does not take this API key",
                    mend="give one of its gateway.api_keys: --api-key KEY, or TRIVET_API_KEY",
                )
            if answer.status == 401:
                raise TrivetError(f"{gateway} wants an API key", mend="--api-key KEY, or TRIVET_API_KEY")
            if answer.status != 200:
                raise TrivetError(f"{gateway} answers HTTP {answer.status}", mend="is it a Trivet gateway?")
            facts = await answer.json()
            if not isinstance(facts, dict) or "engines" not in facts:
                raise TrivetError(f"{gateway} answers with something else", mend="is it a Trivet gateway?")
            return facts
    except aiohttp.ClientConnectorCertificateError as error:
        raise TrivetError(
            f"{gateway} shows a certificate that is not trusted here ({_words(error.certificate_error)})",
            mend="--certificate FILE, with the one that its gateway.tls.certificate names",
        ) from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise TrivetError(
            f"{gateway} does not answer ({type(error).__name__})", mend="is `trivet up` running there?"
        ) from None


def _words(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or error)
