"""The engines of a topology as a check asks them: somebody else's, a running service's, or a fleet's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from trivet.routing.engines import EngineView
from trivet.topology import Plan


def of_urls(plan: Plan) -> list[EngineView]:
    """Engines that others run, where the topology says that they are."""
    return [
        EngineView(one.name, one.tier, one.url, ready=True, api_key=one.api_key, kv_address=one.kv_address, slot=number)
        for number, one in enumerate(plan.engines)
    ]


def of_fleet(facts: Iterable[Mapping[str, Any]]) -> list[EngineView]:
    """A fleet's, as it tells of them (``EngineStatus.facts``)."""
    return [EngineView.parse(one) for one in facts]


def of_service(plan: Plan, facts: Iterable[Mapping[str, Any]]) -> list[EngineView] | None:
    """A running service's, as its gateway tells of them; None if they are not this topology's.

    It tells neither keys nor where connectors listen, which are the topology's, or follow from ports.
    """
    plans, told = {one.name: one for one in plan.engines}, list(facts)
    if {one["name"] for one in told} != set(plans) or any(one["tier"] != plans[one["name"]].tier for one in told):
        return None
    for one in told:  # names alone are everybody's
        planned = plans[one["name"]]
        if one.get("device", planned.device) != planned.device:
            return None
        if planned.started_by != "trivet" and one["url"] != planned.url:
            return None
    views = []
    for one in told:
        view, planned = EngineView.parse(one), plans[one["name"]]
        address, port = planned.kv_address, urlsplit(view.url).port
        if plan.connector is not None and planned.started_by == "trivet" and port is not None:
            address = plan.connector.peer_address(port)  # the plan's port is not the one that was free then
        views.append(replace(view, api_key=planned.api_key, kv_address=address))
    return views
