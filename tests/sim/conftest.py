"""Simulated engines over real HTTP, and a client for them."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from helpers.sim_client import Client
from trivet.sim import SimEngine, SimSettings


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield Client(session)


@pytest.fixture
async def sim() -> AsyncIterator[SimEngine]:
    async with SimEngine() as engine:
        yield engine
        await engine.idle()


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    """Starts engines with settings of their own."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(tier: str = "mixed", *, name: str | None = None, **settings: Any) -> SimEngine:
            engine = SimEngine(SimSettings(**settings), name=name or f"{tier}-0", tier=tier)
            return await stack.enter_async_context(engine)

        yield start
