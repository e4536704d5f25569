"""What is different between the engines that run and those that are wanted, and in which order that is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trivet.errors import TopologyError
from trivet.topology.model import Gateway, Model, RenderTier, flag_names
from trivet.topology.plan import SHAPES_OF_KV, EnginePlan, Plan

_RESTART = "put it back, or stop the service and start it anew"

_CONTENT_OF_KV = frozenset({"revision", "quantization", "hf-overrides", "load-format", "rope-scaling", "rope-theta"})
"""Flags by which an engine computes other KV for the same tokens."""

_IN_THE_COMMAND = frozenset({"settings", "own_flags", "last_settings", "env"})
"""Fields of a plan that are compared as the command and the environment that they make: reasons are for people."""

_OF_A_PROCESS = _IN_THE_COMMAND | {"model", "gpus", "cores"}
"""Fields that say how an engine is started, which is nothing to who only watches it."""


@dataclass(frozen=True, slots=True)
class Step:
    """Engines that leave, and those that can start when they have left. One of the two may be empty."""

    leaving: tuple[EnginePlan, ...]
    joining: tuple[EnginePlan, ...]

    def __str__(self) -> str:
        there, then = {one.name for one in self.leaving}, {one.name for one in self.joining}
        said = [
            *(f"{one.name} is new" for one in self.joining if one.name not in there),
            *(f"{one.name} is replaced" for one in self.joining if one.name in there),
            *(f"{one.name} goes" for one in self.leaving if one.name not in then),
        ]
        return ", ".join(said)


@dataclass(frozen=True, slots=True)
class Change:
    """From the engines that run to those that are wanted."""

    added: tuple[EnginePlan, ...]
    removed: tuple[EnginePlan, ...]
    replaced: tuple[tuple[EnginePlan, EnginePlan], ...]
    """What runs, and what takes its place under the same name."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.replaced)

    def __str__(self) -> str:
        said = [
            *(f"{one.name} is new" for one in self.added),
            *(f"{old.name} is replaced ({difference(old, new)})" for old, new in self.replaced),
            *(f"{one.name} goes" for one in self.removed),
        ]
        return ", ".join(said) or "nothing has changed"

    def steps(self) -> list[Step]:
        """What is done one after the other.

        First what needs nobody's place, then what needs the place of an engine that leaves, at last what only leaves:
        so there are never fewer engines than there must be. Engines that need each other's ports, cores or GPUs are
        one step.
        """
        groups = [Step((old,), ()) for old in (*(old for old, _ in self.replaced), *self.removed)]
        for new in (*(new for _, new in self.replaced), *self.added):
            mine = [one for one in groups if any(_share_a_place(old, new) for old in one.leaving)]
            leaving = tuple(old for one in mine for old in one.leaving)
            joining = (*(other for one in mine for other in one.joining), new)
            place = groups.index(mine[0]) if mine else len(groups)
            groups = [one for one in groups if one not in mine]
            groups.insert(place, Step(leaving, joining))
        alone = tuple(new for one in groups if not one.leaving for new in one.joining)
        gone = tuple(old for one in groups if not one.joining for old in one.leaving)
        return [
            *([Step((), alone)] if alone else []),
            *(one for one in groups if one.leaving and one.joining),
            *([Step(gone, ())] if gone else []),
        ]


def compare(running: Sequence[EnginePlan], wanted: Sequence[EnginePlan]) -> Change:
    """What must be done so that the engines that are wanted run, and no others."""
    now, then = {one.name: one for one in running}, {one.name: one for one in wanted}
    return Change(
        added=tuple(one for one in wanted if one.name not in now),
        removed=tuple(one for one in running if one.name not in then),
        replaced=tuple(
            (old, then[old.name]) for old in running if old.name in then and _identity(old) != _identity(then[old.name])
        ),
    )


def difference(old: EnginePlan, new: EnginePlan) -> str:
    """What is different between two engines of one name, in words; names only, as values may be secrets."""
    flags, env = _flags(old) ^ _flags(new), set(old.environment().items()) ^ set(new.environment().items())
    names = [
        *(
            name
            for name in ("tier", "device", "host", "url", "kv_address", "kv_events", "api_key", "gpus", "cores")
            if getattr(old, name) != getattr(new, name)
        ),
        *sorted({flag[0] for flag in flags}),
        *sorted({name for name, _ in env}),
    ]
    if old.started_by != "trivet" or new.started_by != "trivet":
        names = [name for name in names if not name.startswith("--")]
    return ", ".join(dict.fromkeys(names)) or "who starts it"


def check_same_service(started: Plan, wanted: Plan) -> None:
    """Refuses what cannot change while a service runs.

    Args:
        started: the plan that the service was started with.

    Raises:
        TopologyError: something else than engines is different; it is named.
    """
    was, now = started.topology, wanted.topology
    for name in Model.model_fields:
        _refuse(getattr(was.model, name) != getattr(now.model, name), wanted, "model", name)
    _refuse(started.model != wanted.model, wanted, "model", "name")
    for name in Gateway.model_fields:
        _refuse(getattr(was.gateway, name) != getattr(now.gateway, name), wanted, "gateway", name)
    if wanted.connector is not None:
        if started.connector is None:
            raise TopologyError(
                f"{now.where('tiers', 'prefill')}: tiers.prefill: this service was started without a prefill tier, so "
                "its gateway moves no KV",
                mend=_RESTART,
            )
        _refuse(started.connector.name != wanted.connector.name, wanted, "kv", "connector")
        _refuse(was.kv.options != now.kv.options, wanted, "kv", "options")
    for name in RenderTier.model_fields:
        _refuse(getattr(was.tiers.render, name) != getattr(now.tiers.render, name), wanted, "tiers", "render", name)
    _refuse(was.kv_events != now.kv_events, wanted, "kv_events")
    for name in SHAPES_OF_KV:
        values = _shape(started, name), _shape(wanted, name)
        if None not in values and values[0] != values[1]:
            raise TopologyError(
                f"--{name} cannot change while the service runs: an engine that has the new value could not hand over "
                "to one that has the old",
                mend=_RESTART,
            )
    _check_content(started, wanted)
    if now.gateway.plane == "tokens" and started.render_flags != wanted.render_flags:
        names = sorted({flag[0] for flag in _grouped(started.render_flags) ^ _grouped(wanted.render_flags)})
        raise TopologyError(
            f"{', '.join(names)} cannot change while the service runs: the gateway renders with it as well",
            mend=_RESTART,
        )


def _refuse(differs: bool, wanted: Plan, *field: str) -> None:
    if differs:
        raise TopologyError(
            f"{wanted.topology.where(*field)}: {'.'.join(field)} cannot change while the service runs", mend=_RESTART
        )


def _check_content(started: Plan, wanted: Plan) -> None:
    """Pairs of an old and a new engine must be able to read each other's KV."""
    if not _paired(started) or not _paired(wanted):
        return
    was, now = _content(started), _content(wanted)
    if now - was:  # what is not new has handed over before
        differ = frozenset().union(*now) ^ frozenset().union(*was) or frozenset().union(*now)
        names = ", ".join(sorted({f"--{flag[0]}" for flag in differ}))
        raise TopologyError(
            f"{names} cannot change while the service runs: KV of an engine that has the new value is another than "
            "that of one that has the old",
            mend=_RESTART,
        )
    if wanted.connector is not None and wanted.connector.rank_to_rank and _ranks(started) != _ranks(wanted):
        raise TopologyError(
            f"the number of tensor-parallel ranks cannot change while the service runs: {wanted.connector.name} hands "
            "over from rank to rank",
            mend=_RESTART,
        )


def _paired(plan: Plan) -> list[EnginePlan]:
    """Engines that hand over to each other and are started by Trivet."""
    return [one for one in plan.engines if one.started_by != "someone else" and one.tier != "mixed"]


def _content(plan: Plan) -> set[frozenset[tuple[str, ...]]]:
    """For each way in which an engine computes KV: those of its flags, with their values."""
    return {frozenset(_content_flags(one)) for one in _paired(plan)}


def _content_flags(engine: EnginePlan) -> Iterator[tuple[str, ...]]:
    for dashed, flag, *values in _flags(engine):
        name = "quantization" if dashed == "-q" else "".join(flag_names([dashed]))
        whole = name.partition(".")[0]
        # vLLM's parser takes beginnings of names too
        if len(whole) > 2 and any(one.startswith(whole) for one in _CONTENT_OF_KV):
            _, equals, value = flag.partition("=")
            yield (name, *([value] if equals else []), *values)


def _ranks(plan: Plan) -> set[str]:
    return {one.effective("tensor-parallel-size") or "1" for one in _paired(plan)}


def _shape(plan: Plan, flag: str) -> frozenset[str | None] | None:
    """The values of a flag that a plan's pairs agree on; None where it has no pairs that are started by Trivet."""
    return frozenset(one.effective(flag) for one in _paired(plan)) or None


def _identity(plan: EnginePlan) -> Mapping[str, object]:
    ours = plan.started_by == "trivet"
    left_out = _IN_THE_COMMAND if ours else _OF_A_PROCESS
    facts = {one.name: getattr(plan, one.name) for one in dataclasses.fields(plan) if one.name not in left_out}
    return facts | ({"command": plan.command(), "environment": plan.environment()} if ours else {})


def _share_a_place(old: EnginePlan, new: EnginePlan) -> bool:
    """Whether one cannot start while the other runs."""
    if old.name == new.name:
        return True
    return not set(_places(old)).isdisjoint(_places(new))


def _places(plan: EnginePlan) -> Iterator[tuple[str, object]]:
    if plan.started_by != "trivet":
        return
    for port in (plan.port, plan.kv_port):
        if port:
            yield ("port", port)
    for address in (plan.kv_address, *(plan.kv_events or ())):
        if address:
            yield ("address", address)
    yield from (("gpu", gpu) for gpu in plan.gpus)
    yield from (("core", core) for core in plan.cores)


def _flags(plan: EnginePlan) -> set[tuple[str, ...]]:
    return _grouped(plan.arguments()[1:])


def _grouped(arguments: Sequence[str]) -> set[tuple[str, ...]]:
    """Each flag with its values."""
    starts = [place for place, one in enumerate(arguments) if one.startswith("-") and not one[1:2].isdigit()]
    groups = {tuple(arguments[start:end]) for start, end in pairwise([*starts, len(arguments)])}
    return {(group[0].partition("=")[0], *group) for group in groups}
