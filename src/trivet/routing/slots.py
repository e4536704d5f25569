"""Which column of the board counts which engine."""

from __future__ import annotations

from collections.abc import Iterable

from trivet.routing.board import Board, BoardError


class Slots:
    """Gives engines their slots, by name. One process does that for a board, and tells the others."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._slots: dict[str, int] = {}
        self._left: dict[str, int] = {}
        """Slots of engines that are no more, the oldest first: legs may still be counted there."""
        self._used = 0

    def assign(self, names: Iterable[str]) -> dict[str, int]:
        """The slots of these engines, which are all that there are.

        One that was here before has the slot that it had. The slot of one that left goes to another only when none was
        never used, and when no worker counts anything there any more.

        Raises:
            BoardError: there are more engines than slots.
        """
        wanted = list(dict.fromkeys(names))
        for name in set(self._slots).difference(wanted):
            self._left[name] = self._slots.pop(name)
        for name in wanted:
            if name not in self._slots:
                self._slots[name] = self._left.pop(name) if name in self._left else self._free()
        return dict(self._slots)

    def _free(self) -> int:
        if self._used < self._board.engines:
            self._used += 1
            return self._used - 1
        for name, slot in self._left.items():
            if self._board.is_idle(slot):
                del self._left[name]
                self._board.clear_engine(slot)
                return slot
        raise BoardError(f"no slot for another engine: all {self._board.engines} are taken")
