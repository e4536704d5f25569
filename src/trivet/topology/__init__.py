"""The topology: which engines exist, where, and with what flags; one YAML file from a laptop to production."""

from __future__ import annotations

from trivet.topology.load import load_topology, parse_topology
from trivet.topology.model import Engine, Gateway, Kv, Model, Tier, Tiers, Topology
from trivet.topology.plan import EnginePlan, Plan, Setting, make_plan

__all__ = [
    "Engine",
    "EnginePlan",
    "Gateway",
    "Kv",
    "Model",
    "Plan",
    "Setting",
    "Tier",
    "Tiers",
    "Topology",
    "load_topology",
    "make_plan",
    "parse_topology",
]
