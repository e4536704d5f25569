"""The tokens plane: a rendered request, asked for and answered in token ids (``/inference/v1/generate``)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from trivet.journal import GenerationRecord, now_s
from trivet.legs.ask import Beside, Computed, Leg, Prefilled
from trivet.legs.bodies import (
    a_token_of,
    behind,
    decode_body,
    first_token_may_be_handed_over,
    obstacle_to_continuing,
    prefill_body,
    release_at_prefill,
    release_body,
    whole_body,
)
from trivet.legs.wire import (
    cached_tokens_of,
    dump,
    generate,
    read_choice,
    read_prompt_logprobs,
    reading,
    stream,
    transfer_params_of,
    with_stop_reason,
)
from trivet.render.contract import EncodedIds, TokenChunk, TokenLogprobs, TokenRequest
from trivet.routing.engines import EngineView
from trivet.routing.prefixes import Chain, Prefix, named

_PIECE_TOKENS = 2**13
"""Of a prompt: so many are hashed and written as JSON in 0.3 ms."""


class TokenAsk:
    """A ``TokenRequest`` as legs send it. See ``Ask``."""

    def __init__(
        self,
        request: TokenRequest,
        headers: Mapping[str, str],
        unsplittable: str | None,
        obstacle: str | None = None,
    ) -> None:
        """
        Args:
            headers: what legs carry besides Trivet's own.
            obstacle: why no answer of these engines may be continued on another, or None.
        """
        # never made of an id that a client chose: an abort by id ends every request that shares it
        self._request_id = uuid.uuid4().hex
        self._request = request
        self._headers = headers
        self._unsplittable = unsplittable
        self._sent: list[int] = []
        self._chain: Chain | None = None
        self._chained_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        # The client sees nothing of such an answer before its end, so it is kept here until then: if it breaks off it
        # can be begun anew, also where it could not be continued.
        self._obstacle = obstacle or obstacle_to_continuing(request)
        self._keeps = request.whole and self._obstacle is not None
        self._kept_tokens = 0
        self.decode_cached_tokens: int | None = None
        """Prompt tokens that the decode leg, or the only one, counted as cached; None if it has not told."""

    @property
    def request_id(self) -> str:
        """See ``Ask``."""
        return self._request_id

    @property
    def headers(self) -> Mapping[str, str]:
        """See ``Ask``."""
        return self._headers

    @property
    def prompt_tokens(self) -> int:
        """See ``Ask``."""
        return len(self._request.token_ids) + len(self._sent)

    @property
    def tokens(self) -> int:
        """See ``Ask``."""
        return len(self._request.token_ids) + int(self._request.sampling.get("max_tokens") or 0)

    @property
    def unsplittable(self) -> str | None:
        """See ``Ask``."""
        return self._unsplittable

    @property
    def may_take_first_token(self) -> bool:
        """See ``Ask``."""
        return not self._sent and self._obstacle is None and first_token_may_be_handed_over(self._request)

    @property
    def wants_one_token(self) -> bool:
        """See ``Ask``."""
        return self._request.sampling.get("max_tokens") == 1

    @property
    def prompt(self) -> TokenRequest:
        """See ``Ask``."""
        return behind(self._request, self._sent)

    @property
    def prefix(self) -> Prefix:
        """See ``Ask``. Made when it is first asked for, and continued with what was given out since."""
        request = self._request
        # prompt log-probabilities imply it (``SamplingParams`` in vLLM)
        if request.sampling.get("skip_reading_prefix_cache") or request.prompt_logprobs is not None:
            return Prefix(prompt_tokens=self.prompt_tokens)
        try:
            if self._chain is None:
                self._chain = Chain.of_tokens(request.model, request.cache_salt)
                self._extend(self._chain, 0, len(request.token_ids))
            self._chain.extend(self._sent[self._chained_tokens :])
            self._chained_tokens = len(self._sent)
        except (OverflowError, TypeError):  # no token ids, which an engine will say
            self._chain = Chain("no tokens")
        return self._chain.prefix(self.prompt_tokens)

    async def prepare(self) -> None:
        """Does what takes long for a long prompt in pieces, between which others have their turns.

        That is what ``prefix`` does when it is first asked for, and what all legs do to write the prompt's ids.
        """
        request = self._request
        ids = request.token_ids
        if len(ids) <= _PIECE_TOKENS:
            return
        chain = Chain.of_tokens(request.model, request.cache_salt)
        written: list[bytes] = []
        try:
            for start in range(0, len(ids), _PIECE_TOKENS):
                stop = min(start + _PIECE_TOKENS, len(ids))
                written.append(dump(ids[start:stop])[1:-1])
                self._extend(chain, start, stop)
                await asyncio.sleep(0)
        except (OverflowError, TypeError):
            return  # no token ids; see ``prefix``
        self._chain = chain
        self._request = replace(request, token_ids=EncodedIds(ids, b"[" + b",".join(written) + b"]"))

    def _extend(self, chain: Chain, start: int, stop: int) -> None:
        """Continues a chain with a part of the prompt."""
        features = self._request.features
        items = features.items if features is not None else ()
        here = ((one.offset - start, one.name) for one in items if start <= one.offset < stop)
        chain.extend_bytes(named(self._request.token_ids[start:stop], here))

    @property
    def unsaid_end(self) -> TokenChunk | None:
        """See ``Ask``. No engine could be asked for it: where the answer fills the model's length, all refuse."""
        if self._sent and self.prompt.sampling.get("max_tokens") == 0:
            return TokenChunk((), finish_reason="length")
        return None

    @property
    def answered(self) -> bool:
        """See ``Ask``."""
        return self._request.is_answered()

    @property
    def begun(self) -> bool:
        """See ``Ask``."""
        return bool(self._sent)

    @property
    def obstacle(self) -> str | None:
        """See ``Ask``."""
        return self._obstacle

    @property
    def legs_speak_for_client(self) -> bool:
        """See ``Ask``."""
        return True

    def is_told_at_once(self, params: Mapping[str, Any] | None) -> bool:
        """See ``Ask``."""
        return self._wants_whole(params)

    def engine_id(self, leg: Leg) -> str:
        """See ``Ask``; ``ServingTokens.serve_tokens`` in vLLM."""
        return f"generate-tokens-{leg.request_id}"

    async def prefill(self, leg: Leg, params: Mapping[str, Any] | None, *, sample: bool) -> Prefilled[TokenChunk]:
        """See ``Ask``."""
        request = self.prompt
        body = prefill_body(request, params, sample=sample)
        answer = await generate(leg.session, leg.engine.name, leg.engine.url, body, leg.headers)
        first, finished = None, False
        with reading(leg.engine.name):
            self._read_prompt_logprobs(request, answer)
            cached_tokens = cached_tokens_of(answer)
            params_of_answer = transfer_params_of(answer)
            chunk = with_stop_reason(_whole_chunk(answer), body) if sample else None
        if chunk is not None:
            finished = chunk.finish_reason == "stop" or request.sampling.get("max_tokens") == 1
            first = self._with_cache_counts(chunk, leg.engine, cached_tokens)
            if not finished:
                first = replace(first, finish_reason=None, stop_reason=None)
        return Prefilled(params_of_answer, cached_tokens, first, finished, request)

    async def decode(
        self,
        leg: Leg,
        params: Mapping[str, Any] | None,
        computed: Computed | Beside | None,
        accepted: Callable[[], None],
        passed: Callable[[int], None] = lambda _: None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """See ``Ask``."""
        beside = computed if isinstance(computed, Beside) else None
        request = beside.prompt if beside is not None else self.prompt
        made = int(beside is not None and beside.first_token)
        chunks = (
            self._whole(leg, request, accepted)
            if self._wants_whole(params)
            else self._stream(leg, request, params, accepted, made, passed)
        )
        fresh = not (self._sent or made)
        kept: list[TokenChunk] = []
        self._kept_tokens = 0
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.cached_tokens is not None:
                    self.decode_cached_tokens = chunk.cached_tokens
                if beside is not None and chunk.cached_tokens is not None:
                    beside.found(len(request.token_ids), chunk.cached_tokens)
                if isinstance(computed, Beside):
                    computed = await computed.computed()
                if not fresh:  # what was cached has been told already, and not by this engine
                    chunk = replace(chunk, cached_tokens=None)
                elif computed is not None:
                    first = not (kept or self._sent)
                    chunk = self._with_cache_counts(chunk, computed.engine, computed.cached_tokens if first else None)
                elif chunk.cached_tokens is not None:
                    chunk = self._with_cache_counts(chunk, leg.engine, chunk.cached_tokens)
                if self._prompt_logprobs is not None:
                    chunk = replace(chunk, prompt_logprobs=self._prompt_logprobs)
                    self._prompt_logprobs = None
                if self._keeps:
                    kept.append(chunk)
                    self._kept_tokens += len(chunk.token_ids)
                    yield TokenChunk(())  # a sign of life, that whoever waits may know of it
                else:
                    yield chunk
        for chunk in kept:
            yield chunk

    async def release(self, leg: Leg, params: Mapping[str, Any], prompt: TokenRequest) -> None:
        """See ``Ask``."""
        if leg.engine.tier == "prefill":
            body = release_at_prefill(prompt.model, a_token_of(prompt), params)
            await generate(leg.session, leg.engine.name, leg.engine.url, body, leg.headers)
            return
        body = release_body(prompt, params)
        async with aclosing(stream(leg.session, leg.engine.name, leg.engine.url, body, leg.headers)) as chunks:
            async for _ in chunks:
                pass

    def note(self, record: GenerationRecord, piece: TokenChunk) -> None:
        """See ``Ask``."""
        if piece.cached_tokens is not None:
            record.cached_tokens = piece.cached_tokens
            if record.first_token_s is not None:
                record.cached_late = {
                    "cached_tokens": piece.cached_tokens,
                    "created_cache_tokens": piece.created_cache_tokens,
                }
        if piece.token_ids or self._kept_tokens:
            record.first_token_s = record.first_token_s or now_s()
            self._sent += piece.token_ids
            record.completion_tokens = max(self._kept_tokens, len(self._sent))
        if piece.finish_reason:
            record.finish_reason = piece.finish_reason
            record.end_s = now_s()

    def _wants_whole(self, params: Mapping[str, Any] | None) -> bool:
        return params is None and self._request.prompt_logprobs is not None and not self._sent

    async def _whole(
        self, leg: Leg, request: TokenRequest, accepted: Callable[[], None]
    ) -> AsyncGenerator[TokenChunk, None]:
        answer = await generate(leg.session, leg.engine.name, leg.engine.url, whole_body(request), leg.headers)
        accepted()
        with reading(leg.engine.name):
            self._read_prompt_logprobs(request, answer)
            chunk = replace(_whole_chunk(answer), cached_tokens=cached_tokens_of(answer))
        yield chunk

    def _read_prompt_logprobs(self, request: TokenRequest, answer: Mapping[str, Any]) -> None:
        if request.prompt_logprobs is not None:
            self._prompt_logprobs = read_prompt_logprobs(request.token_ids, answer["prompt_logprobs"])

    def _stream(
        self,
        leg: Leg,
        request: TokenRequest,
        params: Mapping[str, Any] | None,
        accepted: Callable[[], None],
        made: int,
        passed: Callable[[int], None],
    ) -> AsyncGenerator[TokenChunk, None]:
        def take(tokens: Sequence[int]) -> None:
            self._sent += tokens
            passed(len(tokens))
            assert request.take is not None
            request.take(tokens)

        body = decode_body(request, params)
        takes = take if request.take is not None and not self._keeps else None
        return stream(leg.session, leg.engine.name, leg.engine.url, body, leg.headers, accepted, made=made, take=takes)

    def _with_cache_counts(self, chunk: TokenChunk, engine: EngineView, cached_tokens: int | None) -> TokenChunk:
        """The chunk with the cache counts of the engine that computed the prompt; without any if that is unknown."""
        prompt_tokens = len(self._request.token_ids)
        created = None if cached_tokens is None else engine.created_cache_tokens(prompt_tokens, cached_tokens)
        return replace(chunk, cached_tokens=cached_tokens, created_cache_tokens=created)


def _whole_chunk(answer: Mapping[str, Any]) -> TokenChunk:
    (choice,) = answer["choices"]
    chunk = read_choice(choice)
    if chunk.finish_reason is None:
        raise ValueError("no finish_reason")
    return chunk
