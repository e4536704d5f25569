"""From YAML to a ``Topology``; whatever is wrong is said with the line it stands on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trivet.errors import TopologyError
from trivet.topology.model import TIERS, Engine, Topology
from trivet.topology.words import said_by

Location = Sequence[str | int]


class _Loader(yaml.SafeLoader):
    """Dates are words here: a model may be called 2026-10-01. (Libraries change SafeLoader itself, too.)"""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_topology(path: Path) -> Topology:
    """Reads a topology file.

    Raises:
        TopologyError: it cannot be read, is not YAML, or asks for what cannot be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TopologyError(f"{path}: no such file", mend="`trivet topology init` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot be read: {error}") from error
    topology = parse_topology(text, str(path))
    topology._folder = path.parent
    return topology


def parse_topology(text: str, source: str = "topology") -> Topology:
    """Parses a topology; ``source`` stands before the line number in errors.

    Raises:
        TopologyError: see ``load_topology``.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise TopologyError(f"{where}: not valid YAML: {problem}") from None
    if value is None:
        raise TopologyError(f"{source}: the file is empty", mend="`trivet topology init` writes one")
    if not isinstance(value, dict):
        raise TopologyError(f"{source}:1: a topology is a mapping (model, kv, tiers, gateway)")
    _refuse_repeated_keys(root, source)
    try:
        topology = Topology.model_validate(value)
    except ValidationError as error:
        raise TopologyError(*_first_problem(error, root, source)) from None
    topology._locate = lambda location: f"{source}:{line_of(root, location)}"
    _check_tiers(topology)
    return topology


def line_of(root: yaml.Node | None, location: Location) -> int | None:
    """The line (from 1) on which a field stands, or the nearest thing around it that is in the file."""
    node, line = root, None if root is None else root.start_mark.line + 1
    for step in location:
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                if key.value == str(step):
                    node, line = child, key.start_mark.line + 1
                    break
            else:
                return line
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            return line
    return line


def _first_problem(error: ValidationError, root: yaml.Node | None, source: str) -> tuple[str]:
    """One line for the first thing that pydantic found, counting the others."""
    problems = error.errors(include_url=False)
    first = problems[0]
    location = [step for step in first["loc"] if isinstance(step, int) or not step.startswith("function-")]
    field = ".".join(str(step) for step in location) or "topology"
    if first["type"] == "extra_forbidden":
        known = ", ".join(_siblings(location[:-1]))
        message = f"no such field{f' (there are: {known})' if known else ''}"
    else:
        message = said_by(first)
    line = line_of(root, location)
    rest = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return (f"{source}:{line}: {field}: {message}{rest}",)


def _siblings(location: Location) -> list[str]:
    """The fields that exist at a place of the model."""
    model: Any = Topology
    for step in location:
        if isinstance(step, int):
            continue
        annotation = model.model_fields[step].annotation if hasattr(model, "model_fields") else None
        model = _inner_model(annotation)
        if model is None:
            return []
    return sorted(model.model_fields)


def _inner_model(annotation: Any) -> Any:
    if hasattr(annotation, "model_fields"):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if (found := _inner_model(part)) is not None:
            return found
    return None


def _refuse_repeated_keys(node: yaml.Node | None, source: str, met: set[int] | None = None) -> None:
    met = set() if met is None else met
    if id(node) in met:  # an alias, perhaps of what stands around it
        return
    met.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, child in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise TopologyError(f"{source}:{line}: {key.value!r} is given twice", mend="YAML would keep the last")
            seen.add(key.value)
            _refuse_repeated_keys(child, source, met)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_repeated_keys(child, source, met)


def _check_tiers(topology: Topology) -> None:
    """What the fields cannot say one by one: which tiers belong together."""
    counts = {name: len(tier.listed()) if (tier := topology.tier(name)) else 0 for name in TIERS}
    if not any(counts.values()):
        raise TopologyError(f"{topology.where('tiers')}: tiers: no engine", mend="add prefill and decode, or mixed")
    if counts["prefill"] and not counts["decode"]:
        raise TopologyError(
            f"{topology.where('tiers', 'prefill')}: tiers.prefill: prefill without decode has nobody to hand KV to",
            mend="add tiers.decode, or make it tiers.mixed",
        )
    if counts["decode"] and not counts["prefill"]:
        raise TopologyError(
            f"{topology.where('tiers', 'decode')}: tiers.decode: decode without prefill would do both",
            mend="add tiers.prefill, or make it tiers.mixed",
        )
    names: set[str] = set()
    for tier_name in TIERS:
        tier = topology.tier(tier_name)
        for number, engine in enumerate(tier.listed() if tier else ()):
            _check_kv_fields(topology, tier_name, number, engine)
            name = engine.name or f"{tier_name}-{number}"
            if name in names:
                where = topology.where("tiers", tier_name, "engines", number)
                raise TopologyError(f"{where}: two engines are named {name!r}")
            names.add(name)


_KV_FIELDS = {"kv_address": "TrivetConnector", "kv_port": "NixlConnector"}
"""Fields of an engine that mean something to one connector only."""


def _check_kv_fields(topology: Topology, tier: str, number: int, engine: Engine) -> None:
    """What says where KV is handed over must be for somebody who hands over, in that way."""
    for field, connector in _KV_FIELDS.items():
        if getattr(engine, field) is None:
            continue
        where = f"{topology.where('tiers', tier, 'engines', number, field)}: tiers.{tier}.engines.{number}.{field}"
        if tier == "mixed":
            raise TopologyError(
                f"{where}: a mixed engine hands over no KV, so {field} means nothing", mend=f"leave {field} out"
            )
        if topology.kv.connector != connector:
            raise TopologyError(
                f"{where}: {field} is {connector}'s, and kv.connector is {topology.kv.connector}",
                mend=f"leave {field} out, or kv: {{connector: {connector}}}",
            )
