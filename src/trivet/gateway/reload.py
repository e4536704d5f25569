"""A service is changed while it serves: engines join, leave and are replaced, one step after the other.

An engine that leaves gets nothing new from the moment that every worker knows; what runs there, and KV there that
decode has not fetched, is waited for, for at most ``gateway.drain_s``. Only then it is stopped.

- New engines that need nobody's place come first. If one of them does not come up, none of them stays, and nothing else
  is done.
- Then those that are replaced, one step after the other. If the new one does not come up, the old one is started again
  as it was, and what has not been done is left undone.
- What only leaves is last.

New engines that do not stay, but are ready already, leave in the same way: they have been chosen for requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trivet.errors import EngineFailedError
from trivet.fleet.supervisor import Fleet
from trivet.legs.ending import end
from trivet.topology.change import Change, Step, difference
from trivet.topology.plan import EnginePlan


@dataclass(frozen=True, slots=True)
class Reload:
    """How a reload went, or goes."""

    number: int
    """From 1, of the service."""
    state: str
    """``running``; ``done``, ``refused`` (nothing was changed) or ``failed`` (``told`` says what was)."""
    told: str = ""
    """In one line."""

    def facts(self) -> dict[str, Any]:
        """For ``/trivet/status`` and the run's folder."""
        return asdict(self)


class ReloadFailedError(Exception):
    """An engine did not come up, or a step failed otherwise; the text says what became of it and of the rest."""


class Steps:
    """Carries out a change."""

    def __init__(
        self, fleet: Fleet, drained: Callable[[str], Awaitable[None]], superseded: asyncio.Event | None = None
    ) -> None:
        """
        Args:
            fleet: whose engines are changed.
            drained: returns when an engine that leaves, by its name, may be stopped.
            superseded: set when there is something newer to do; engines that still start are given up then.
        """
        self._fleet = fleet
        self._drained = drained
        self._superseded = superseded or asyncio.Event()

    async def carry_out(self, change: Change) -> None:
        """Does it all.

        Raises:
            ReloadFailedError: an engine did not come up, or a step failed otherwise.
        """
        steps = change.steps()
        for number, step in enumerate(steps):
            begun = False
            try:
                if step.leaving and step.joining and self._superseded.is_set():
                    raise EngineFailedError(f"the file is to be read again before this: {step}")
                if step.leaving:
                    await self._make_room(step)
                if step.joining:
                    begun = True
                    await self._join(step)
            except Exception as error:
                problem, mend = _told(error)
                said = [f"{problem}, so {await self._take_back(step, begun)}"]
                if number:
                    said.append(f"done before: {', '.join(str(one) for one in steps[:number])}")
                if rest := steps[number + 1 :]:
                    said.append(f"left undone: {', '.join(str(one) for one in rest)}")
                raise ReloadFailedError("; ".join(said) + mend) from error

    async def _take_back(self, step: Step, begun: bool) -> str:
        """Engines that have joined leave again; those that had to make room stay, or are started again as they were.

        Args:
            begun: whether the step's new engines were begun.
        """
        if begun:
            await self._withdraw(step)
        started = []
        for old in step.leaving:
            if not self._fleet.stay(old):
                if old.name in self._fleet.engines:
                    await self._fleet.part([old.name])
                self._fleet.resume([old])
                started.append(old.name)
        if not started:
            return "nothing was changed"
        return f"{', '.join(started)} {'is' if len(started) == 1 else 'are'} started again as before"

    async def _withdraw(self, step: Step) -> None:
        """New engines go again. What is ready serves already, so that it is waited for as for any that leaves."""
        there = [one.name for one in step.joining if one.name in self._fleet.engines]
        ends = (self._part(name, "it goes again: the reload that brought it has failed") for name in there)
        await asyncio.gather(*ends, return_exceptions=True)
        if left := [name for name in there if name in self._fleet.engines]:  # that they are waited for has failed
            await self._fleet.part(left)

    async def _make_room(self, step: Step) -> None:
        heirs = {one.name: one for one in step.joining}
        async with asyncio.TaskGroup() as leaving:
            for old in step.leaving:
                leaving.create_task(self._part(old.name, _why(old, heirs.get(old.name), step.joining)))

    async def _part(self, name: str, why: str) -> None:
        self._fleet.leave(name, why)
        await self._drained(name)
        await self._fleet.part([name])

    async def _join(self, step: Step) -> None:
        joining = asyncio.create_task(self._fleet.join(step.joining))
        newer = asyncio.create_task(self._superseded.wait())
        try:
            await asyncio.wait([joining, newer], return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                await joining
                return
            names = ", ".join(one.name for one in step.joining)
            raise EngineFailedError(f"{names} did not come up before the file was to be read again")
        finally:
            await end(newer)
            await end(joining)


def _told(error: Exception) -> tuple[str, str]:
    """A fault in one line, and how it is mended, if that is known."""
    while isinstance(error, ExceptionGroup):  # of engines that leave side by side
        error = error.exceptions[0]
    if isinstance(error, EngineFailedError):
        return error.problem, f" -> {error.mend}" if error.mend else ""
    return " ".join(f"{type(error).__name__}: {error}".split()), ""


def _why(old: EnginePlan, heir: EnginePlan | None, joining: Sequence[EnginePlan]) -> str:
    """Why an engine leaves, in words."""
    if heir is not None:
        what = difference(old, heir)
        return f"it is replaced ({what}): the new one starts when this one has ended"
    if joining:
        return f"it goes: {', '.join(one.name for one in joining)} starts in its place when it has ended"
    return "it goes: the topology has it no more"
