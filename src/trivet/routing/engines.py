"""Engines as a gateway worker sees them, and the worker's own count of what it has given each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


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
        )


class Engines:
    """The engines that can be chosen, with outstanding tokens for each.

    A leg is charged while it runs, inside ``charge``; leaving that block, however it is left, takes the charge off.
    """

    def __init__(self, *, decode_serves_whole: bool = True) -> None:
        """
        Args:
            decode_serves_whole: decode engines can serve requests colocated; see ``Connector``.
        """
        self.decode_serves_whole = decode_serves_whole
        self._views: dict[str, EngineView] = {}
        self._watchers: dict[str, set[Callable[[], None]]] = {}
        self._turns: dict[str, int] = {}
        self._turn = 0
        self._outstanding_tokens: dict[str, int] = {}

    def update(self, views: Iterable[EngineView]) -> None:
        """Takes the fleet's newest word."""
        before, self._views = self._views, {view.name: view for view in views}
        for name, old in before.items():
            if old.ready and _has_left(old, self._views.get(name)):
                for leave in list(self._watchers.get(name, ())):
                    leave()

    def ready(self, tier: str) -> list[EngineView]:
        """The engines of a tier that can serve."""
        return [view for view in self._views.values() if view.ready and view.tier == tier]

    def all(self) -> list[EngineView]:
        """Every engine."""
        return list(self._views.values())

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
        """Notes that an engine was chosen, so that equals are chosen in turn."""
        self._turn += 1
        self._turns[view.name] = self._turn

    def last_turn(self, name: str) -> int:
        """When an engine was chosen last; 0 if never."""
        return self._turns.get(name, 0)

    def outstanding_tokens(self, name: str) -> int:
        """Tokens of legs that this worker has running on an engine."""
        return self._outstanding_tokens.get(name, 0)

    @contextlib.contextmanager
    def charge(self, view: EngineView, tokens: int) -> Iterator[None]:
        """Counts a leg's tokens against an engine while the block runs."""
        self._outstanding_tokens[view.name] = self._outstanding_tokens.get(view.name, 0) + tokens
        try:
            yield
        finally:
            left = self.outstanding_tokens(view.name) - tokens
            if left:
                self._outstanding_tokens[view.name] = left
            else:
                self._outstanding_tokens.pop(view.name, None)


def _has_left(old: EngineView, new: EngineView | None) -> bool:
    """Whether what ran on an engine as it was is lost."""
    return new is None or not new.ready or new.generation != old.generation
