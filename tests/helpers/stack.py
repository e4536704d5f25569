"""A whole service in one process: simulated engines, legs, and the gateway over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import uvicorn

from helpers.processes import WAIT_S
from trivet.connectors import CONNECTORS
from trivet.gateway.admission import Admission, SharedAdmission
from trivet.gateway.app import GENERATING, GatewayApp, Rules
from trivet.gateway.metrics import GatewayMetrics
from trivet.gateway.text import TextApp
from trivet.journal import GenerationRecord
from trivet.legs.life import Legs, Trouble
from trivet.legs.watch import Patience
from trivet.legs.wire import open_session
from trivet.render.contract import TokenRequest
from trivet.routing.engines import Engines
from trivet.sim import SimEngine, SimSettings

MODEL = "sim"
QUICK = SimSettings(model=MODEL, block_size=16, kv_tokens=65536, max_model_len=8192)


class Stack:
    """Simulated engines and what runs on them."""

    def __init__(
        self, sims: Sequence[SimEngine], session: aiohttp.ClientSession, connector: str, **settings: Any
    ) -> None:
        self.sims = list(sims)
        board, ring = settings.pop("board", None), settings.pop("ring", lambda _: None)
        self.engines = Engines(board=board)
        self.records: list[GenerationRecord] = []
        self.troubled: Callable[[Trouble], None] = lambda _: None
        """Told of what goes wrong between two engines."""
        self.metrics = GatewayMetrics()
        self.legs = Legs(
            self.engines,
            session,
            CONNECTORS[connector],
            self._ended,
            settings.pop("patience", Patience()),
            knowledge=settings.pop("knowledge", None),
            troubled=lambda trouble: self.troubled(trouble),
        )
        limits = {"running": 1024, "queued": 1024, "queue_s": 30.0} | settings
        self.admission = Admission(**limits) if board is None else SharedAdmission(**limits, board=board, ring=ring)
        self.refresh()

    def _ended(self, record: GenerationRecord, owner: Any) -> None:
        self.records.append(record)
        self.metrics.ended(record, owner)

    def refresh(self) -> None:
        """Tells the gateway which engines are up, as the fleet would."""
        self.engines.update(dataclasses.replace(sim.view(), slot=slot) for slot, sim in enumerate(self.sims))

    def sim(self, name: str) -> SimEngine:
        return next(one for one in self.sims if one.name == name)

    def gateway(self, rules: Rules | None = None, frontend: Any = None) -> GatewayApp:
        """The gateway's application: on the text plane, unless a front end is given."""
        return GatewayApp(
            frontend or TextApp(self.engines, self.legs, GENERATING),
            self.engines,
            self.legs,
            self.metrics,
            fleet=lambda: {"engines": []},
            rules=rules,
            admission=self.admission,
            guards_itself=frontend is not None,
        )

    async def at_rest(self, within_s: float = WAIT_S) -> None:
        """Waits until nothing is under way or held anywhere; that this happens is what most tests are about."""
        deadline = time.monotonic() + within_s
        while (busy := self.busy()) and time.monotonic() < deadline:  # noqa: ASYNC110  (gauges have no events)
            await asyncio.sleep(0.01)
        assert not busy, busy
        for sim in self.sims:
            if sim.is_up:
                await sim.idle(within_s, nothing_held=True)

    def busy(self) -> dict[str, int]:
        """What the gateway counts as under way; nothing that is zero."""
        counts = {
            "generations": self.legs.running,
            "requests": self.admission.running,
            "waiting": self.admission.waiting,
            "releases": self.legs.releases.pending,
            **{sim.name: self.engines.outstanding_tokens(sim.name) for sim in self.sims},
        }
        return {name: count for name, count in counts.items() if count}

    def expired(self) -> int:
        """Hand-overs whose KV was held until its lease ended."""
        return sum(sim.state().handovers["expired"] for sim in self.sims)


@contextlib.asynccontextmanager
async def stack(
    *tiers: str, settings: SimSettings = QUICK, own: dict[str, SimSettings] | None = None, **more: Any
) -> AsyncIterator[Stack]:
    """A stack with an engine for each tier named, called ``prefill-0``, ``decode-0``, ``decode-1`` ...

    Args:
        own: settings of single engines, by name.
        more: ``patience``, ``knowledge``, and what ``Admission`` takes.
    """
    async with contextlib.AsyncExitStack() as opened:
        sims = []
        for number, tier in enumerate(tiers):
            name = f"{tier}-{tiers[:number].count(tier)}"
            chosen = (own or {}).get(name, settings)
            if tier == "mixed":
                chosen = dataclasses.replace(chosen, kv_transfer=False)
            sims.append(await opened.enter_async_context(SimEngine(chosen, name=name, tier=tier)))
        session = await opened.enter_async_context(open_session())
        built = Stack(sims, session, settings.kv_connector, **more)
        yield built
        await built.legs.close()


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The address at which an application is served, as a gateway worker serves it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http="httptools", lifespan="on", access_log=False, log_level="warning")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # this process is the tests'
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def token_request(tokens: int = 8, prompt: int = 40, *, start: int = 300, **more: Any) -> TokenRequest:
    """A request in token ids for so many greedy tokens."""
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    return TokenRequest(
        **{
            "request_id": "unused",
            "token_ids": list(range(start, start + prompt)),
            "sampling": sampling | more.pop("sampling", {}),
            "model": MODEL,
        }
        | more
    )


async def answer_of(stack: Stack, request: TokenRequest) -> list[int]:
    """The tokens of an answer."""
    return [token async for chunk in stack.legs.run(request) for token in chunk.token_ids]
