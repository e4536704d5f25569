"""A service as ``trivet demo`` sees it: a gateway, a decode engine's counters and the fleet's word; no vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from trivet.connectors import NixlConnector
from trivet.fleet.supervisor import State
from trivet.topology import EnginePlan, Plan, parse_topology

SPLIT_FACTS: dict[str, Any] = {
    "split": True,
    "reason": "a pair is ready",
    "prefill_engine": "prefill-0",
    "decode_engine": "decode-0",
    "prompt_tokens": 30,
    "completion_tokens": 3,
    "render_ms": 1.5,
    "prefill_ms": 20.0,
    "handover_ms": 3.0,
    "ttft_ms": 25.0,
    "decode_ms": 8.0,
}
PREFILLS_TOKEN_FACTS = SPLIT_FACTS | {"ttft_ms": 21.6}
"""The same where prefill made the first token."""
COLOCATED_FACTS = SPLIT_FACTS | {"split": False, "prefill_engine": None, "decode_engine": "mixed-0", "ttft_ms": 40.0}


class DemoService:
    """Listens while the block runs. What is wrong with it is set before it is asked."""

    def __init__(self, folder: Path, *, api_keys: tuple[str, ...] = ()) -> None:
        self.api_keys = api_keys
        self.gateway_log = folder / "gateway.log"
        self.gateway_log.write_text("the gateway's words\n")
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        """Body and headers of each chat."""
        self.split = [("The", 5), (" [legs]", 6), ("", 7)]
        self.colocated = list(self.split)
        self.bytes_moved, self.computed = 4096, 1
        self.lag = 0
        """So many readings of the counters miss the transfer."""
        self.facts = SPLIT_FACTS
        self.error: dict[str, Any] | None = None
        """Sent in the stream in place of the answer."""
        self.status = 200
        self.cut = False
        self._moved = self._computed = 0.0
        self._behind = 0
        self._colocated: set[str] = set()
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/trivet/requests/{id}", self._request)
        application.router.add_get("/metrics", self._metrics)
        self._server = TestServer(application)
        self._folder = folder

    async def __aenter__(self) -> DemoService:
        await self._server.start_server()
        engines = tuple(
            EnginePlan(f"{tier}-0", tier, self.url, "cpu", "trivet") for tier in ("prefill", "decode", "mixed")
        )
        topology = parse_topology("tiers: {prefill: , decode: , mixed: }")
        self.plan = Plan(topology, "/models/tiny", ("tiny", "alias"), NixlConnector(), engines, ())
        self.fleet = SimpleNamespace(
            engines={
                one.name: SimpleNamespace(
                    plan=one, state=State.READY, problem=None, log=self._folder / f"{one.name}.log"
                )
                for one in engines
            }
        )
        for status in self.fleet.engines.values():
            status.log.write_text(f"the words of {status.plan.name}\n")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    def fails(self, name: str, problem: str | None) -> None:
        """The fleet learns that an engine has failed."""
        status = self.fleet.engines[name]
        status.state, status.problem = State.FAILED, problem

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.asked.append((body, dict(request.headers)))
        colocated = request.headers.get("X-Trivet-Serve") == "colocated"
        if colocated:
            self._colocated.add(request.headers["X-Request-Id"])
        if self.status != 200:
            return web.json_response({"error": {"message": "the gateway says no"}}, status=self.status)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.cut:
            assert request.transport is not None
            request.transport.abort()
            return answer
        if self.error is not None:
            await answer.write(b"data: " + json.dumps({"error": self.error}).encode() + b"\n\n")
            return answer
        for text, token in self.colocated if colocated else self.split:
            choice = {"index": 0, "delta": {"content": text}, "token_ids": [token]}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        if not colocated:
            self._moved, self._computed = self._moved + self.bytes_moved, self._computed + self.computed
            self._behind = self.lag
        return answer

    async def _request(self, request: web.Request) -> web.Response:
        facts = COLOCATED_FACTS if request.match_info["id"] in self._colocated else self.facts
        return web.json_response({"generations": [facts]})

    async def _metrics(self, _: web.Request) -> web.Response:
        late = self._behind > 0
        self._behind -= late
        moved, computed = self._moved, self._computed
        if late:
            moved, computed = moved - self.bytes_moved, computed - self.computed
        return web.Response(
            text=f"# TYPE vllm:prompt_tokens_by_source counter\n"
            f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
            f"# TYPE vllm:nixl_bytes_transferred summary\nvllm:nixl_bytes_transferred_sum {moved}\n"
        )


async def at_once(_: float) -> None:
    """In place of ``asyncio.sleep`` in ``trivet.demo.run``."""
    await asyncio.sleep(0)
