"""Legs over engines that are real HTTP servers, and what was observed of their generations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from helpers.engines import FakeEngine, listening, speaking, token_request, whole
from helpers.garbage import collect
from trivet.connectors import NixlConnector
from trivet.journal import GenerationRecord, RequestRecord, current_request
from trivet.legs.life import Legs
from trivet.legs.wire import open_session
from trivet.render.contract import ServingError, TokenChunk
from trivet.routing.engines import Engines, EngineView


class Service:
    """Legs over some engines, and what was observed of their generations."""

    def __init__(self, legs: Legs, engines: Engines, records: list[GenerationRecord]) -> None:
        self.legs = legs
        self.engines = engines
        self.records = records
        self.chunks: list[TokenChunk] = []
        """What the newest request's client has."""

    async def ask(self, **changes) -> list[TokenChunk]:
        self.chunks = []
        async with contextlib.aclosing(self.legs.run(token_request(**changes))) as chunks:
            async for one in chunks:
                self.chunks.append(one)
        return self.chunks

    async def fails(self, **changes) -> ServingError:
        with pytest.raises(ServingError) as caught:
            await self.ask(**changes)
        assert self.record.error == caught.value.message
        return caught.value

    async def refused(self, **changes) -> tuple[str, int]:
        error = await self.fails(**changes)
        return error.message, error.status

    @property
    def record(self) -> GenerationRecord:
        """That of the only generation so far, or of the last."""
        return self.records[-1]

    def loses(self, name: str, how: str) -> None:
        """The fleet says that an engine is out of service."""
        change = {
            "not ready": lambda view: [replace(view, ready=False)],
            "gone": lambda _: [],
            "started anew": lambda view: [replace(view, generation=view.generation + 1)],
        }[how]
        views = self.engines.all()
        self.engines.update(new for view in views for new in (change(view) if view.name == name else [view]))

    def outstanding(self) -> dict[str, int]:
        """Engines with outstanding tokens."""
        loads = {view.name: self.engines.outstanding_tokens(view.name) for view in self.engines.all()}
        return {name: tokens for name, tokens in loads.items() if tokens}


@contextlib.asynccontextmanager
async def serving(
    *engines: FakeEngine | EngineView, connector=NixlConnector(), patience=None, aborts=False
) -> AsyncIterator[Service]:
    """A service on these engines; all of them listen while the block runs. Nothing of it may be left behind."""
    loop, faults = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: faults.append(context))  # exceptions that nobody retrieved
    async with listening(*(one for one in engines if isinstance(one, FakeEngine))), open_session() as session:
        before = asyncio.all_tasks()
        views = Engines()
        views.update(one.view(aborts=aborts) if isinstance(one, FakeEngine) else one for one in engines)
        records: list[GenerationRecord] = []
        legs = Legs(views, session, connector, lambda record, _: records.append(record), patience)
        service = Service(legs, views, records)
        yield service
        await service.legs.close()
        assert service.outstanding() == {}
        assert (service.legs.releases.pending, service.legs.running) == (0, 0)
        assert not any(views._watchers.values())
        left = [one for one in asyncio.all_tasks() - before if "trivet" in str(one.get_coro())]
        assert left == []
    collect()
    assert faults == []


def prefill(*replies, name: str = "prefill-0") -> FakeEngine:
    return FakeEngine(name, "prefill", *(replies or [whole()]))


def decode(*replies, name: str = "decode-0") -> FakeEngine:
    return FakeEngine(name, "decode", *(replies or [speaking(5, 6)]))


def mixed(*replies, name: str = "mixed-0") -> FakeEngine:
    return FakeEngine(name, "mixed", *(replies or [speaking(8, 9)]))


def dead(name: str, tier: str, url: str) -> EngineView:
    """An engine that is thought ready and is gone."""
    return EngineView(name, tier, url, ready=True)


@contextlib.contextmanager
def owned_by(owner: RequestRecord) -> Iterator[None]:
    """Inside, generations belong to that request."""
    token = current_request.set(owner)
    try:
        yield
    finally:
        current_request.reset(token)


async def cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
