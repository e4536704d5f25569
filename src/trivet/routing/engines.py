"""Engines as a gateway worker sees them, and the count of what all workers have given each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trivet.routing.board import Board
from trivet.routing.proofs import Proof
from trivet.routing.slots import Slots


@dataclass(frozen=True, slots=True)
class EngineView:
    """What is known of one engine; replaced as a whole when the fleet says something new."""

    name: str
    tier: str
    """``prefill``, ``decode`` or ``mixed``."""
    url: str
    ready: bool
    generation: int = 0
    """Raised each time the engine is started anew."""
    cached_block_tokens: int | None = None
    """Tokens in a block of its prefix cache; None if it keeps none, or does not tell."""
    api_key: str | None = field(default=None, repr=False)
    """Sent to engines that want one."""
    aborts: bool = False
    """Whether it has an endpoint that ends a request by its id (vLLM 0.31 and newer)."""
    kv_address: str | None = None
    """Where its connector listens for its peers; None if the gateway need not tell them."""
    slot: int | None = field(default=None, compare=False, repr=False)
    """Its column on the board; None until somebody gave it one."""
    kv_events: tuple[str, str] | None = None
    """Where it tells what its prefix cache holds, and where it tells again what was missed; None if it does not."""
    leaving: bool = False
    """Whether it is to be stopped: it gets no new request (``ready`` is false), and what runs there may end."""

    @property
    def serves(self) -> bool:
        """Whether what runs there goes on."""
        return self.ready or self.leaving

    def created_cache_tokens(self, prompt_tokens: int, cached_tokens: int) -> int | None:
        """Prompt tokens that serving a prompt adds to its prefix cache: whole blocks, less those it had.

        As ``PrefillStats.finalize`` in ``vllm/v1/metrics/stats.py`` counts them.
        """
        if self.cached_block_tokens is None:
            return None
        whole = prompt_tokens // self.cached_block_tokens * self.cached_block_tokens
        return max(0, whole - cached_tokens)

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> EngineView:
        """From the fleet's JSON; unknown keys are ignored."""
        return cls(
            name=value["name"],
            tier=value["tier"],
            url=value["url"],
            ready=bool(value["ready"]),
            generation=int(value.get("generation", 0)),
            cached_block_tokens=value.get("cached_block_tokens"),
            api_key=value.get("api_key"),
            aborts=bool(value.get("aborts", False)),
            kv_address=value.get("kv_address"),
            kv_events=None if (told := value.get("kv_events")) is None else (told[0], told[1]),
            slot=value.get("slot"),
            leaving=bool(value.get("leaving", False)),
        )


class Engines:
    """The engines that can be chosen, with outstanding tokens for each.

    A leg is charged while it runs, inside ``charge``; leaving that block, however it is left, takes the charge off.
    """

    def __init__(self, *, decode_serves_whole: bool = True, board: Board | None = None) -> None:
        """
        Args:
            decode_serves_whole: decode engines can serve requests colocated; see ``Connector``.
            board: where all workers count; the fleet's news give engines their slots on it. None counts here alone.
        """
        self.decode_serves_whole = decode_serves_whole
        self.board = board or Board.private()
        """Where loads, turns and handovers are counted."""
        self.guarded = False
        """Canaries are sent through pairs, so that ``proof`` counts for those who choose."""
        self._own_slots = Slots(self.board) if board is None else None
        self._slots: dict[str, int] = {}
        """Also of engines that have left: legs may still run there."""
        self._views: dict[str, EngineView] = {}
        self._watchers: dict[str, set[Callable[[], None]]] = {}

    def update(self, views: Iterable[EngineView]) -> None:
        """Takes the fleet's newest word.

        Raises:
            BoardError: there are more engines than a board of this process's own has slots.
        """
        before, self._views = self._views, {view.name: view for view in self._seated(list(views))}
        for name, old in before.items():
            if old.serves and _has_left(old, self._views.get(name)):
                for leave in list(self._watchers.get(name, ())):
                    leave()

    def ready(self, tier: str) -> list[EngineView]:
        """The engines of a tier that can serve."""
        return [view for view in self._views.values() if view.ready and view.tier == tier]

    def serving(self, tier: str) -> list[EngineView]:
        """The engines of a tier that answer: those that can serve, and behind them those that are leaving."""
        serving = [view for view in self._views.values() if view.serves and view.tier == tier]
        return sorted(serving, key=lambda view: view.leaving)

    def is_leaving(self, view: EngineView) -> bool:
        """Whether the engine, as it was seen then, is to be stopped and must not be given anything more."""
        now = self._views.get(view.name)
        return now is not None and now.leaving and now.generation == view.generation

    def all(self) -> list[EngineView]:
        """Every engine."""
        return list(self._views.values())

    def proof(self, prefill: EngineView, decode: EngineView) -> Proof:
        """How a pair stands; where nobody sends canaries, every pair serves."""
        return self.board.proof(prefill, decode) if self.guarded else Proof.OPEN

    @contextlib.contextmanager
    def watching(self, view: EngineView, left: Callable[[], None]) -> Iterator[None]:
        """Calls ``left`` if the engine goes out of service, or is started anew, while the block runs or before."""
        watchers = self._watchers.setdefault(view.name, set())
        watchers.add(left)
        if _has_left(view, self._views.get(view.name)):
            left()
        try:
            yield
        finally:
            watchers.discard(left)

    def has_left(self, view: EngineView) -> bool:
        """Whether the engine, as it was seen then, has gone out of service since."""
        return _has_left(view, self._views.get(view.name))

    def take_turn(self, view: EngineView) -> None:
        """Notes that an engine was chosen, so that equals are chosen in turn, whichever worker chooses."""
        if (slot := self._slot_of(view)) is not None:
            self.board.take_turn(slot)

    def last_turn(self, name: str) -> int:
        """When an engine was chosen last, by any worker; 0 if never."""
        slot = self._slots.get(name)
        return 0 if slot is None else self.board.last_turn(slot)

    def outstanding_tokens(self, name: str) -> int:
        """Tokens of legs that all workers have running on an engine."""
        slot = self._slots.get(name)
        return 0 if slot is None else self.board.outstanding_tokens(slot)

    @contextlib.contextmanager
    def charge(self, view: EngineView, tokens: int) -> Iterator[None]:
        """Counts a leg's tokens against an engine while the block runs."""
        slot = self._slot_of(view)  # the same when it is taken off, whatever the fleet has said by then
        if slot is None:
            yield
            return
        self.board.charge(slot, tokens, 1)
        try:
            yield
        finally:
            self.board.charge(slot, -tokens, -1)

    def _seated(self, views: list[EngineView]) -> list[EngineView]:
        """The views with their slots."""
        if self._own_slots is not None:
            slots = self._own_slots.assign(view.name for view in views)
            views = [replace(view, slot=slots[view.name]) for view in views]
        for view in views:
            if view.slot is not None and self._slots.get(view.name) != view.slot:
                # of an engine that left, when all of its legs had ended
                self._slots = {name: slot for name, slot in self._slots.items() if slot != view.slot}
                self._slots[view.name] = view.slot
        # what nobody could count would look idle for ever, and be given everything
        return [view if view.slot is not None else replace(view, ready=False, leaving=False) for view in views]

    def _slot_of(self, view: EngineView) -> int | None:
        return self._slots.get(view.name, view.slot)


def _has_left(old: EngineView, new: EngineView | None) -> bool:
    """Whether what ran on an engine as it was is lost."""
    return new is None or not new.serves or new.generation != old.generation
