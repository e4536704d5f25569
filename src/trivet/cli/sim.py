"""``trivet sim``: one simulated engine, in the foreground."""

from __future__ import annotations

import json

import typer
from rich.markup import escape

from trivet.cli.common import out
from trivet.errors import TrivetError
from trivet.sim import SimEngine
from trivet.sim.options import parse
from trivet.sim.process import run

TIERS = ("prefill", "decode", "mixed")
_ALWAYS = ("--enable-scale-out", "--enable-prompt-tokens-details")


def sim(
    context: typer.Context,
    port: int = typer.Option(8100, "--port", min=0, max=65535, help="0 takes a free one."),
    tier: str = typer.Option("mixed", "--tier", help="prefill, decode or mixed."),
    step_ms: float = typer.Option(5.0, "--step-ms", help="A step: one token of every running answer."),
    prefill_ms_per_token: float = typer.Option(0.02, "--prefill-ms-per-token", help="Of a prompt."),
) -> None:
    """Run a simulated engine until Ctrl-C.

    MODEL is the name it answers to (nothing is loaded). All flags of `python -m trivet.sim serve --help` can be added.
    """
    if tier not in TIERS:
        raise TrivetError(f"--tier is {tier!r}", mend=f"one of {', '.join(TIERS)}")
    # what typer does not know is taken apart by the engine's own parser, which knows which flags have values
    model = context.args[:1] if context.args and not context.args[0].startswith("-") else ["sim"]
    rest = context.args[1:] if context.args[:1] == model else context.args
    arguments = ["serve", *model, "--port", str(port), *_ALWAYS]
    arguments += ["--step-ms", str(step_ms), "--prefill-ms-per-token", str(prefill_ms_per_token)]
    if tier != "mixed":
        role = "kv_producer" if tier == "prefill" else "kv_consumer"
        arguments += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
    settings, name, notes = parse([*arguments, *rest])
    for note in notes:
        out.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    run(settings, name=name, tier=tier, listening=_tell)


def _tell(engine: SimEngine) -> None:
    name = engine.settings.names[0]
    body = {"model": name, "messages": [{"role": "user", "content": "What is a trivet?"}], "max_tokens": 16}
    key = " -H 'Authorization: Bearer KEY'" if engine.settings.api_key else ""
    ask = f"curl -N {engine.url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
    out.print(
        f"simulated {engine.tier} engine: {escape(name)} on [bold]{engine.url}[/], as vLLM "
        f"{engine.settings.vllm_version}; Ctrl-C ends it\n",
        soft_wrap=True,
    )
    for what, line in (
        ("ask it", f"{ask} -d '{json.dumps({**body, 'stream': True})}'"),
        ("what it did", f"curl {engine.url}/sim/state"),
        ("a fault", f'curl {engine.url}/sim/faults -d \'{{"kind": "die", "after_tokens": 3}}\''),
    ):
        out.print(f"[dim]{what}[/]\n{escape(line)}\n", soft_wrap=True)
