"""The piece that stands where vLLM's engine core client stood.

``AsyncLLM`` talks to its engine through three calls: ``add_request_async``, ``abort_requests_async`` and
``get_output_async`` (``vllm/v1/engine/core_client.py``, class ``AsyncMPClient``). ``SplitCore`` answers them by
running each ``EngineCoreRequest`` on a ``TokenEngine`` and giving the tokens back as ``EngineCoreOutput``, so that
everything above (n > 1, detokenizing, stop strings, logprobs, usage, streaming, abort on disconnect) is vLLM's.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from trivet.render.contract import Features, ServingError, TokenChunk, TokenEngine, TokenLogprobs, TokenRequest
from trivet.render.features import Placed, Rules, encode, placed

logger = init_logger(__name__)

_FINISH = {str(reason): reason for reason in FinishReason}


class SplitCore:
    """Runs requests on a ``TokenEngine``; has the part of ``AsyncMPClient``'s surface that a front end uses."""

    def __init__(self, engine: TokenEngine, served_name: str) -> None:
        self._engine = engine
        self._served_name = served_name
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        self._reader: asyncio.Task[Any] | None = None
        """vLLM's, which makes text of outputs and looks for stop strings."""
        self._answered: set[str] = set()
        """Generations in whose text it has found one."""
        self._encoding: dict[int, asyncio.Task[Features]] = {}
        """Under way, by the list of items that the choices of a request share."""
        self._processor: OutputProcessor | None = None
        self._max_model_len: int | None = None
        self._rules = Rules()
        # what AsyncLLM reads of an engine core client
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]

    def attach(self, processor: OutputProcessor, max_model_len: int, rules: Rules | None = None) -> None:
        """Tells what is known only when vLLM's front end stands.

        Args:
            processor: where the state of running requests is kept, so that a failed one can be told so.
            max_model_len: longest prompt plus answer, in tokens.
            rules: what may be told of images and the like.
        """
        self._processor, self._max_model_len = processor, max_model_len
        self._rules = rules or Rules()

    @property
    def running(self) -> int:
        """How many generations are under way."""
        return len(self._tasks)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Starts a generation.

        Raises:
            GracefulHTTPError: this request cannot be served over token ids.
        """
        if getattr(request, "abort_immediately", False):
            return  # asks a connector to clean up; the legs do that themselves
        try:
            token_request = _token_request(request, self._served_name, self._max_model_len)
            ids, features = token_request.token_ids, request.mm_features
            items = placed(features, len(ids), self._rules) if features else []
        except GracefulHTTPError:
            if self._processor is not None:  # AsyncLLM has registered it, and forgets only what it has given us
                self._processor.abort_requests([request.request_id], internal=True)
            raise
        request_id = request.request_id
        token_request = replace(
            token_request,
            take=functools.partial(self._take, request_id),
            is_answered=lambda: request_id in self._answered,
        )
        encoding = self._encoded(features, items) if features else None
        task = asyncio.create_task(
            self._run(request_id, _Candidates.of(request.params), token_request, encoding),
            name=f"generation {request_id}",
        )
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._forget(request_id))

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Ends generations: the client is gone, or a stop string matched, as whoever reads outputs has seen."""
        matched = asyncio.current_task() is self._reader
        for request_id in request_ids:
            if task := self._tasks.get(request_id):
                if matched:
                    self._answered.add(request_id)
                task.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs; everything that is ready is taken in one go."""
        self._reader = asyncio.current_task()
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return EngineCoreOutputs(outputs=outputs)

    def _forget(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        self._answered.discard(request_id)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Text generation, and nothing that needs the model's hidden states."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Nothing is cached here."""

    async def add_lora_async(self, _: Any) -> bool:
        """Engines load adapters themselves; the name travels with each request."""
        return True

    def get_kv_event_sources(self) -> dict[int, Any]:
        """None here: the engines publish KV events, not the gateway."""
        return {}

    def dp_engines_running(self) -> bool:
        """Whether anything is under way (vLLM asks when it drains)."""
        return bool(self._tasks)

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002  (vLLM names it)
        """Ends what still runs."""
        for task in list(self._tasks.values()):
            task.cancel()

    def _encoded(self, features: Sequence[Any], items: Sequence[Placed]) -> asyncio.Task[Features]:
        """What engines are sent of a prompt's items, made once for all choices of a request: they come together."""
        if (under_way := self._encoding.get(id(features))) is not None:
            return under_way
        task = asyncio.create_task(asyncio.to_thread(encode, items), name="encoding a prompt's items")
        self._encoding[id(features)] = task

        def done(_: asyncio.Task[Features], kept: Sequence[Any] = features) -> None:  # kept, its id is nobody else's
            del self._encoding[id(kept)]
            if not task.cancelled():
                task.exception()  # looked at, also where whoever asked is gone

        task.add_done_callback(done)
        return task

    async def _run(
        self,
        request_id: str,
        candidates: _Candidates,
        token_request: TokenRequest,
        encoding: asyncio.Task[Features] | None,
    ) -> None:
        finished = False
        try:
            if encoding is not None:
                token_request = replace(token_request, features=await asyncio.shield(encoding))
                del encoding
            async with aclosing(self._engine.run(token_request)) as chunks:
                async for chunk in chunks:
                    finished = chunk.finish_reason is not None  # the last one; read on, or the leg would be aborted
                    if finished and chunk.cached_tokens is not None:
                        self._correct_cached_tokens(request_id, chunk)
                    for one in _by_token(chunk):
                        self._outputs.put_nowait(_output(request_id, token_request, one, candidates))
            if not finished:
                raise ServingError("the engine's answer ended without a finish reason", status=502)
        except ServingError as error:
            self._fail(request_id, _as_vllm_raises(error))
        except Exception as error:  # whatever went wrong, the client must not wait for ever
            logger.exception("generation %s failed", request_id)
            self._fail(
                request_id,
                GracefulHTTPError(f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR),
            )

    def _take(self, request_id: str, tokens: Sequence[int]) -> None:
        """Tokens of an answer with nothing else; see ``TokenRequest.take``."""
        for token in tokens:
            self._outputs.put_nowait(EngineCoreOutput(request_id=request_id, new_token_ids=[token]))

    def _correct_cached_tokens(self, request_id: str, chunk: TokenChunk) -> None:
        """vLLM reads this off the first output only; an engine that streams alone tells it with the last."""
        if self._processor is not None and (state := self._processor.request_states.get(request_id)):
            state.num_cached_tokens = chunk.cached_tokens
            state.num_cache_creation_tokens = chunk.created_cache_tokens or 0

    def _fail(self, request_id: str, error: Exception) -> None:
        """Hands an error to the generator that waits for this request, and forgets the request.

        ``AsyncLLM.generate`` passes ``GracefulHTTPError`` on as it is but leaves the request registered, so it is
        unregistered here first; that queues an abort, which the error then replaces.
        """
        assert self._processor is not None
        state = self._processor.request_states.get(request_id)
        if state is None or state.queue is None:
            return  # its client is gone already
        queue, parent = state.queue, state.parent_req
        doomed = [request_id if parent is None else parent.request_id]
        siblings = self._processor.abort_requests(doomed, internal=True)
        queue.put(error)
        for sibling in siblings:
            if sibling != request_id and (task := self._tasks.get(sibling)):
                task.cancel()


def _as_vllm_raises(error: ServingError) -> Exception:
    """The error as vLLM's server would have raised it, so that its handlers answer as they would have."""
    if error.status == 400:
        return VLLMClientError(error.message)
    if error.status == 404:
        return VLLMNotFoundError(error.message)
    try:
        status = HTTPStatus(error.status)
    except ValueError:  # engines behind proxies answer with what Python does not know (499, 520) as well
        status = HTTPStatus.BAD_GATEWAY if error.status >= 500 else HTTPStatus.BAD_REQUEST
    return GracefulHTTPError(error.message, status)


def _token_request(request: EngineCoreRequest, served_name: str, max_model_len: int | None) -> TokenRequest:
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise GracefulHTTPError("prompt embeddings are not served by this gateway", HTTPStatus.NOT_IMPLEMENTED)
    if _ends_thought_in_engines(request) and not _ENGINES_KNOW_THOUGHT:
        raise GracefulHTTPError(
            "structured output after reasoning needs engines of vLLM 0.31 or newer", HTTPStatus.NOT_IMPLEMENTED
        )
    if getattr(params, "prompt_logprob_token_ids", None) is not None:
        raise GracefulHTTPError("prompt_logprob_token_ids are not served by this gateway", HTTPStatus.NOT_IMPLEMENTED)
    extra = params.extra_args or {}
    sampling = _wire_sampling(params)
    if max_model_len is not None:
        _limit(sampling, max_model_len - len(request.prompt_token_ids))
    return TokenRequest(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids,
        sampling=sampling,
        model=request.lora_request.lora_name if request.lora_request else served_name,
        cache_salt=request.cache_salt,
        priority=request.priority,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=getattr(request, "reasoning_parser_kwargs", None),
        prompt_logprobs=params.prompt_logprobs,
        # a stop string is found while the answer is made, so what was made so far has been seen
        whole=params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop,
        session_id=getattr(request, "session_id", None),
        kv_transfer_params=extra.get("kv_transfer_params"),
        ec_transfer_params=extra.get("ec_transfer_params"),
    )


_ENGINES_KNOW_THOUGHT = "reasoning_ended" in GenerateRequest.model_fields
"""Whether ``/inference/v1/generate`` can be told that an answer begins with reasoning, which no grammar rules."""


def _ends_thought_in_engines(request: EngineCoreRequest) -> bool:
    """Whether an engine must see the end of reasoning to begin with a grammar."""
    params = request.sampling_params
    return params is not None and params.structured_outputs is not None and request.reasoning_ended is False


_OF_THE_TEXT = (
    "stop",
    "include_stop_str_in_output",
    "output_text_buffer_length",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "flat_logprobs",
)
"""Fields of ``SamplingParams`` that say how text is made of tokens or how vLLM's own process is run."""


def _wire_sampling(params: SamplingParams) -> dict[str, Any]:
    """``SamplingParams`` as ``/inference/v1/generate`` takes them, for tokens only."""
    wire: dict[str, Any] = SamplingParams._serialize_msgspec(params)
    for name in _OF_THE_TEXT:
        wire.pop(name, None)
    extra: dict[str, Any] = dict(wire.pop("extra_args", None) or {})
    for name in ("kv_transfer_params", "ec_transfer_params"):
        extra.pop(name, None)  # fields of their own on the wire
    if wire.pop("prompt_logprobs", None) is not None:
        # vLLM derives it from the former; prefill will again, but decode would throw its KV away for it
        wire.pop("skip_reading_prefix_cache", None)
    if extra:
        wire["extra_args"] = extra
    wire["detokenize"] = False
    if wire.get("watermarking") is not False:
        wire.pop("watermarking", None)  # an engine that watermarks does, unless the client will not have it
    # Absent means "up to the context length" to vLLM's server, and 16 is the default that is left out.
    wire["max_tokens"] = params.max_tokens
    if params.logprobs is not None and params.logprobs >= 0:
        # The wire carries as many candidates as were asked for, the sampled token among them even when it is none
        # of the best; one more keeps the last of the best (``ServingTokens._create_tokens_logprobs``).
        wire["logprobs"] = params.logprobs + 1
    if params.logprob_token_ids:
        # Told only beside as many logprobs; again the sampled token takes a place, so there is one id more to lose.
        spare = next(
            token for token in range(len(params.logprob_token_ids) + 1) if token not in params.logprob_token_ids
        )
        wire["logprob_token_ids"] = [*params.logprob_token_ids, spare]
        wire["logprobs"] = len(params.logprob_token_ids) + 1
    return wire


def _limit(sampling: dict[str, Any], room: int) -> None:
    """Cuts what an answer may have at what the model's length leaves.

    An engine ends an answer there (``check_stop`` in ``vllm/v1/core/sched/utils.py``) with the same reason, ``length``;
    not every endpoint does so beforehand (``/inference/v1/generate``). Whoever divides an answer among engines must
    know where it ends: behind a first token that fills the model's length there is no second.
    """
    sampling["max_tokens"] = min(sampling["max_tokens"], room)
    if "min_tokens" in sampling:  # more than max_tokens would be refused; none before the end is the same
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Whose log-probabilities are told at each position besides the sampled token's."""

    count: int | None
    """How many of the best; None or -1 takes all that an engine tells."""
    token_ids: Sequence[int] = ()
    """These, whatever their rank, if there are any."""

    @classmethod
    def of(cls, params: object) -> _Candidates:
        """As a request asks for them."""
        if not isinstance(params, SamplingParams):
            return cls(None)
        return cls(params.logprobs, tuple(params.logprob_token_ids or ()))


def _by_token(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """The chunk, one token at a time, as an engine gives them to a detokenizer: a stop string ends an answer within."""
    last = len(chunk.token_ids) - 1
    if last <= 0:
        yield chunk
        return
    for number, token_id in enumerate(chunk.token_ids):
        yield TokenChunk(
            [token_id],
            logprobs=chunk.logprobs[number : number + 1] if chunk.logprobs else None,
            finish_reason=chunk.finish_reason if number == last else None,
            stop_reason=chunk.stop_reason if number == last else None,
            cached_tokens=chunk.cached_tokens if number == 0 else None,
            created_cache_tokens=chunk.created_cache_tokens if number == 0 else None,
            prompt_logprobs=chunk.prompt_logprobs if number == 0 else None,
        )


def _output(request_id: str, request: TokenRequest, chunk: TokenChunk, candidates: _Candidates) -> EngineCoreOutput:
    stats, prompt_tokens = None, len(request.token_ids)
    if chunk.cached_tokens is not None:
        stats = PrefillStats(
            num_prompt_tokens=prompt_tokens,
            num_computed_tokens=prompt_tokens - chunk.cached_tokens,
            num_cached_tokens=chunk.cached_tokens,
            num_local_cached_tokens=chunk.cached_tokens,
            num_cache_creation_tokens=chunk.created_cache_tokens or 0,
        )
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(chunk.token_ids),
        new_logprobs=_logprobs_lists(chunk.logprobs, candidates) if chunk.logprobs else None,
        # vLLM has tensors here, and reads of them what arrays have as well
        new_prompt_logprobs_tensors=(
            _logprobs_lists(chunk.prompt_logprobs, _Candidates(request.prompt_logprobs))
            if chunk.prompt_logprobs
            else None
        ),
        finish_reason=_FINISH.get(chunk.finish_reason, FinishReason.ERROR) if chunk.finish_reason else None,
        stop_reason=chunk.stop_reason,
        prefill_stats=stats,
    )


def _logprobs_lists(positions: Sequence[TokenLogprobs], candidates: _Candidates) -> LogprobsLists:
    """Rows of ``[sampled, candidate 1, ... candidate k]``, as vLLM's sampler makes them."""
    rows = [_row(one, candidates) for one in positions]
    width = max(len(row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    values = np.full((len(rows), width), -np.inf, dtype=np.float64)
    for number, row in enumerate(rows):
        row += [row[0]] * (width - len(row))  # a vocabulary smaller than the candidates asked for
        ids[number] = [token for token, _ in row]
        values[number] = [value for _, value in row]
    ranks = np.array([one.sampled_rank for one in positions], dtype=np.int64)
    return LogprobsLists(ids, values, ranks, None)


def _row(one: TokenLogprobs, candidates: _Candidates) -> list[tuple[int, float]]:
    """One position. The wire leaves the sampled token out of the best when it is one of them; it is put back."""
    sampled, *best = zip(one.token_ids, one.logprobs, strict=True)
    if candidates.token_ids:
        told = {sampled[0]: sampled[1], **dict(best)}
        return [sampled, *((token, told.get(token, -math.inf)) for token in candidates.token_ids)]
    if 0 < one.sampled_rank <= len(best) + 1:
        best.insert(one.sampled_rank - 1, sampled)
    wanted = candidates.count
    return [sampled, *(best if wanted is None or wanted < 0 else best[:wanted])]
