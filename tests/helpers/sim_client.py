"""A client of simulated engines that asks as a gateway does."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trivet.sim import SimEngine

PROMPT = list(range(300, 341))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Answer:
    status: int
    content: bytes
    headers: Any = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """The payloads of a stream, ``[DONE]`` as text."""
        lines = [line[6:] for line in self.content.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def tokens(self) -> list[int]:
        if self.content.startswith(b"data:"):
            return [
                token
                for event in self.events
                if event != "[DONE]"
                for choice in event.get("choices", ())
                for token in choice["token_ids"]
            ]
        return self.json["choices"][0]["token_ids"]

    @property
    def message(self) -> str:
        return self.json["error"]["message"]


class Client:
    """Asks simulated engines as a gateway does."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, engine: SimEngine, path: str, body: Any, **headers: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(engine.url + path, json=body, headers=sent) as answer:
            return Answer(answer.status, await answer.read(), answer.headers)

    async def get(self, engine: SimEngine, path: str, **headers: str) -> Answer:
        async with self.session.get(engine.url + path, headers=headers) as answer:
            return Answer(answer.status, await answer.read(), answer.headers)

    async def generate(
        self, engine: SimEngine, ids=PROMPT, *, leg: str | None = None, rid: str = "r", more=None, **sampling: Any
    ) -> Answer:
        return await self.post(
            engine,
            "/inference/v1/generate",
            self.body(ids, more, **sampling),
            **({} if leg is None else {"X-Request-Id": f"{rid}-{leg}"}),
        )

    async def stream(self, engine: SimEngine, ids=PROMPT, *, leg=None, rid="r", more=None, **sampling: Any) -> Answer:
        more = {"stream": True, "stream_options": {"include_usage": True}, **(more or {})}
        return await self.generate(engine, ids, leg=leg, rid=rid, more=more, **sampling)

    async def prefill(self, engine: SimEngine, ids=PROMPT, **more: Any) -> dict[str, Any]:
        """The parameters for decode."""
        answer = await self.generate(
            engine, ids, leg="prefill", more={"kv_transfer_params": PREFILL, **more}, max_tokens=1
        )
        assert answer.status == 200, answer.content
        return answer.json["kv_transfer_params"]

    @contextlib.asynccontextmanager
    async def open_stream(self, engine: SimEngine, ids=PROMPT, *, rid="r", leg="decode", more=None, **sampling: Any):
        """A stream that the test reads, and may leave."""
        body = self.body(ids, {"stream": True, **(more or {})}, **sampling)
        async with self.session.post(
            f"{engine.url}/inference/v1/generate", json=body, headers={"X-Request-Id": f"{rid}-{leg}"}
        ) as answer:
            yield answer

    @staticmethod
    def body(ids, more, **sampling: Any) -> dict[str, Any]:
        return {"token_ids": ids, "sampling_params": {"max_tokens": 4, **sampling}, **(more or {})}


async def until(holds, timeout_s: float = 5.0) -> None:
    """Waits for something that should be so at once."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
