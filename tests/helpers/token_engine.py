"""A token engine that says what the test wants, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from helpers.processes import WAIT_S
from trivet.render.contract import TokenChunk, TokenLogprobs, TokenRequest

Script = Callable[[TokenRequest], AsyncGenerator[TokenChunk, None]]


class ScriptedEngine:
    """Stands where Trivet's legs stand."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As before the first request."""
        self.script: Script = saying([])
        self.requests: list[TokenRequest] = []
        self.cancelled: list[str] = []
        """Generations that somebody ended."""
        self.open = 0
        """Generations that are under way."""

    async def run(self, request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.open += 1
        try:
            async with aclosing(self.script(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.open -= 1

    @property
    def request(self) -> TokenRequest:
        """The only one."""
        (request,) = self.requests
        return request

    async def idle(self) -> None:
        """Waits until nothing is under way."""
        async with asyncio.timeout(WAIT_S):
            while self.open:  # noqa: ASYNC110  (a task that is being cancelled tells nobody)
                await asyncio.sleep(0)


def saying(
    tokens: Sequence[int],
    *,
    at_once: int = 1,
    finish: str | None = "length",
    stop_reason: int | str | None = None,
    cached: int | None = None,
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> Script:
    """These tokens, ``at_once`` a chunk; with ``finish`` None the engine then says nothing more, for ever."""

    async def script(_: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        for start in range(0, len(tokens), at_once):
            last = start + at_once >= len(tokens)
            yield TokenChunk(
                list(tokens[start : start + at_once]),
                logprobs=None if logprobs is None else list(logprobs[start : start + at_once]),
                finish_reason=finish if last else None,
                stop_reason=stop_reason if last else None,
                cached_tokens=cached if start == 0 else None,
                created_cache_tokens=0 if start == 0 and cached is not None else None,
            )
            await asyncio.sleep(0)
        if finish is None:
            await asyncio.Event().wait()

    return script


def failing(error: Exception, after: Sequence[int] = ()) -> Script:
    """An error, behind some tokens."""

    async def script(_: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        for token in after:
            yield TokenChunk([token])
            await asyncio.sleep(0)
        raise error

    return script
