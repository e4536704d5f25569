"""Who has which slot of a staging. Pure bookkeeping: no engine, no memory.

A decode engine that reads slowly, or not at all, must not keep the others waiting. The one that holds the fewest slots
is served first; and beyond its fair share, an engine leaves a slot to each of the others that holds none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


@dataclass(slots=True)
class _Held:
    slots: int = 0
    since_s: float = 0.0
    """When it last gave one back, or, if that is longer ago, was lent the first of those that it holds."""


class Slots(Generic[H]):
    """The slots of one staging, and who may have them."""

    def __init__(self, number: int) -> None:
        self.free = deque(range(number))
        self.lent: dict[int, H] = {}
        self._number = number
        self._holders: dict[H, _Held] = {}

    @property
    def holders(self) -> list[H]:
        """Who may be lent slots, in the order in which they joined."""
        return list(self._holders)

    def join(self, holder: H) -> None:
        """From now on it may be lent slots."""
        self._holders.setdefault(holder, _Held())

    def leave(self, holder: H) -> None:
        """It is gone, and what it held is free."""
        self._holders.pop(holder, None)
        for slot in [slot for slot, other in self.lent.items() if other == holder]:
            del self.lent[slot]
            self.free.append(slot)

    def turn(self, waiting: Iterable[H]) -> H | None:
        """Which of these is lent the next slot; None if none is."""
        if not self.free:
            return None
        holder = min(waiting, key=lambda one: self._holders[one].slots, default=None)
        if holder is None or self._holders[holder].slots < max(1, self._number // len(self._holders)):
            return holder
        without = sum(held.slots == 0 for held in self._holders.values())
        return holder if len(self.free) > min(without, self._number // 2) else None

    def lend(self, holder: H) -> int:
        """A free slot, which is its until it gives it back or leaves."""
        slot = self.free.popleft()
        self.lent[slot] = holder
        held = self._holders[holder]
        if not held.slots:
            held.since_s = time.monotonic()
        held.slots += 1
        return slot

    def give_back(self, slot: int, holder: H) -> None:
        """It needs a slot no more; nothing happens if the slot is not its."""
        if slot not in self.lent or self.lent[slot] != holder:
            return
        del self.lent[slot]
        self.free.append(slot)
        held = self._holders[holder]
        held.slots -= 1
        held.since_s = time.monotonic()

    def silent_since_s(self) -> float | None:
        """Since when, at the longest, a holder has slots and gives none back; None while nothing is lent."""
        return min((held.since_s for held in self._holders.values() if held.slots), default=None)

    def silent(self, limit_s: float) -> list[H]:
        """Who has slots and has given none back for so long."""
        before_s = time.monotonic() - limit_s
        return [holder for holder, held in self._holders.items() if held.slots and held.since_s <= before_s]
