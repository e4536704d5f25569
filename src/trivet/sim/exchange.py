"""One request for an answer, from its first byte to its last, with the fault that strikes it."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from trivet.sim.asks import Ask, RefusedError, error_facts, parse_chat, parse_completion, parse_generate
from trivet.sim.connector import Source
from trivet.sim.doors import MessagesForm, ResponseForm, parse_messages, parse_response
from trivet.sim.faults import Fault
from trivet.sim.forms import ChatForm, Choice, CompletionForm, Form, GenerateForm, make_choices
from trivet.sim.record import RequestRecord, shortened
from trivet.sim.scheduler import End, Output, SimSequence, Sink
from trivet.sim.settings import SimSettings

if TYPE_CHECKING:
    from trivet.sim.engine import SimEngine

Parser = Callable[[Mapping[str, Any], SimSettings, str | None], Ask]
ENDPOINTS: Mapping[str, tuple[Parser, Callable[[Ask, SimSettings], Form]]] = {
    "/inference/v1/generate": (parse_generate, GenerateForm),
    "/v1/chat/completions": (parse_chat, ChatForm),
    "/v1/completions": (parse_completion, CompletionForm),
    "/v1/responses": (parse_response, ResponseForm),
    "/v1/messages": (parse_messages, MessagesForm),
}
_GARBAGE = {
    "json": b'data: {"request_id": not json\n\n',
    "truncated": b'data: {"request_id":"generate-tok',
    "between": b"garbage\n\n: a comment\nevent: noise\nid: 7\n\n",
}
_CUTS = ("die", "exit", "garbage")


class Cut(Exception):  # noqa: N818  (nothing went wrong: it is what the fault asks for)
    """The connection is closed in the middle of the answer."""


class Exchange:
    """Serves one request. ``answer`` once."""

    def __init__(self, engine: SimEngine, request: web.Request, record: RequestRecord, fault: Fault | None) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._request = request
        self._record = record
        self._fault = fault
        self._sequences: list[SimSequence] = []
        self._choices: list[Choice] = []
        self._source: Source | None = None

    async def answer(self) -> web.StreamResponse:
        """The answer, written already if it is streamed."""
        record = self._record
        try:
            response = await self._answer()
            record.status = response.status
        except RefusedError as refused:
            record.ended = "refused"
            record.status = refused.status
            response = web.json_response(refused.facts(), status=refused.status)
        except Cut:
            record.ended = "fault"
            self._engine.cut(self._request)
            response = web.Response()
        except (asyncio.CancelledError, ConnectionError):
            record.ended = "client gone"
            raise
        finally:
            for sequence in self._sequences:
                self._engine.scheduler.finish(sequence, End.ABORT)
            if self._choices:
                record.completion_tokens = sum(len(choice.tokens) for choice in self._choices)
                record.first_token_s = self._sequences[0].first_token_s
                record.executed = record.first_token_s is not None
            record.ended_s = time.monotonic()
        return response

    async def _answer(self) -> web.StreamResponse:
        fault = self._fault
        if fault is not None:
            self._record.fault = fault.kind
            if fault.kind == "disconnect":
                raise Cut
            if fault.kind == "status":
                self._record.ended = "fault"
                return status_response(fault)
            if fault.kind == "hang":
                await asyncio.sleep(math.inf if fault.for_s is None else fault.for_s)
        parse, form_of = ENDPOINTS[self._request.path]
        body = await self._body()
        self._record.body = shortened(body)
        self._engine.check_admission(body)
        try:
            ask = parse(body, self._settings, self._request.headers.get("X-Request-Id"))
        except RefusedError:
            self._reject(body)
            raise
        return await self._serve(ask, form_of(ask, self._settings))

    async def _body(self) -> dict[str, Any]:
        media_type = self._request.headers.get("Content-Type", "").lower().partition(";")[0].strip()
        if media_type != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise RefusedError(message, kind="Bad Request")
        try:
            body = orjson.loads(await self._request.read())
        except orjson.JSONDecodeError as error:
            message = f"1 validation error:\n  {{'type': 'json_invalid', 'msg': 'JSON decode error: {error}'}}"
            raise RefusedError(message, kind="Bad Request") from None
        if not isinstance(body, dict):
            raise RefusedError("1 validation error:\n  Input should be a valid dictionary", kind="Bad Request")
        return body

    def _reject(self, body: Mapping[str, Any]) -> None:
        """Chat and completions tell prefill when they refuse a request; ``/inference/v1/generate`` does not."""
        params = body.get("kv_transfer_params")
        if isinstance(params, Mapping) and self._request.path != "/inference/v1/generate":
            self._engine.connector.refused(params)

    async def _serve(self, ask: Ask, form: Form) -> web.StreamResponse:
        sink = Sink()
        self._choices = make_choices(ask)
        self._record.prompt_tokens = sum(len(prompt) for prompt in ask.prompts)
        connector, params = self._engine.connector, ask.kv_transfer_params or {}
        self._source = connector.source(params)
        if self._source is not None and ask.skip_cache and connector.declines(self._source):
            # vLLM then reads from nowhere: the prompt is computed here, and prefill is told
            self._source = None
        if self._source is not None:
            self._record.split = "pulled"
        self._sequences = [self._sequence(ask, choice, sink, params) for choice in self._choices]
        for sequence in self._sequences:
            connector.arrived(sequence, params)
            self._engine.scheduler.add(sequence)
        if ask.stream:
            return await self._stream(ask, form, sink)
        return await self._whole(ask, form, sink)

    def _sequence(self, ask: Ask, choice: Choice, sink: Sink, params: Mapping[str, Any]) -> SimSequence:
        sequence = SimSequence(
            name=f"{ask.name}-{uuid.uuid4().hex[:8]}",
            prompt=choice.prompt,
            sink=sink,
            leg=self._record.leg,
            index=choice.index,
            max_tokens=ask.max_tokens[choice.index // ask.n],
            min_tokens=ask.min_tokens,
            ignore_eos=ask.ignore_eos,
            stop_token_ids=ask.stop_token_ids,
            salt=ask.cache_salt,
            skip_cache=ask.skip_cache,
            hands_over=bool(params.get("do_remote_decode")),
            source=self._source,
        )
        if (fault := self._fault) is not None:
            if fault.kind == "slow":
                sequence.slow_factor = fault.factor
            elif fault.kind == "stall":
                sequence.pause_at = fault.after_tokens
                sequence.pause_s = math.inf if fault.for_s is None else fault.for_s
            elif fault.kind == "finish":
                sequence.end_at = (fault.after_tokens, End(fault.reason))
            elif fault.kind == "lose":
                sequence.loses_at = fault.after_tokens
            elif fault.kind == "withhold":
                sequence.withholds = True
            elif fault.kind == "corrupt":
                sequence.is_corrupted = True
            elif fault.kind == "waver":
                sequence.first_rank = fault.rank
            elif fault.kind == "uncounted":
                sequence.is_uncounted = True
            elif fault.kind == "dull":
                sequence.is_dull = True
        return sequence

    async def _stream(self, ask: Ask, form: Form, sink: Sink) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self._request)
        self._record.status = 200
        begun, open_choices = False, len(self._choices)
        if opening := form.opening():
            await response.write(opening)
        if await self._cut_at(0, response):
            return response
        while open_choices:
            pieces: list[bytes] = []
            for output in await sink.take():
                choice = self._choices[output.choice]
                if choice.is_over:
                    continue
                self._take(ask, choice, output)
                if choice.end is End.ERROR:
                    failed = form.failed()
                    await response.write(b"".join((*pieces, failed or b"")))
                    self._record.ended = "error"
                    if failed is None:
                        self._engine.cut(self._request)
                    return response
                if not begun and choice.tokens:
                    pieces.append(form.begin())
                    begun = True
                open_choices -= choice.is_over
                waiting = len(choice.tokens) - choice.sent
                if choice.is_over or choice.sent == 0 or waiting >= self._settings.stream_interval:
                    pieces.append(form.event(choice))
                if self._fault is not None and self._fault.kind in _CUTS:
                    await response.write(b"".join(pieces))
                    pieces.clear()
                    if await self._cut_at(len(self._choices[0].tokens), response):
                        return response
            if not open_choices:
                pieces += [form.finish(self._choices, self._cached_tokens()), form.done]
            if pieces:
                await response.write(b"".join(pieces))
        self._record.ended = self._ended()
        await response.write_eof()
        return response

    async def _whole(self, ask: Ask, form: Form, sink: Sink) -> web.StreamResponse:
        open_choices = len(self._choices)
        while open_choices:
            for output in await sink.take():
                choice = self._choices[output.choice]
                if choice.is_over:
                    continue
                self._take(ask, choice, output)
                open_choices -= choice.is_over
                self._cut_whole(len(choice.tokens))
        if any(choice.end is End.ERROR for choice in self._choices):
            self._record.ended = "error"
            return web.json_response(error_facts("Internal server error", "InternalServerError", 500), status=500)
        self._record.ended = self._ended()
        params = self._sequences[0].told
        if params is not None and params.get("handed_over", True):
            self._record.split = "offered"
        content = orjson.dumps(form.whole(self._choices, self._cached_tokens(), params))
        fault = self._fault
        if fault is not None and fault.kind == "garbage":
            content = content[: len(content) // 2] if fault.garbage == "truncated" else b"garbage " + content
        return web.Response(body=content, content_type="application/json")

    def _take(self, ask: Ask, choice: Choice, output: Output) -> None:
        """Takes a sequence's output into its answer."""
        if output.token is not None:
            choice.tokens.append(output.token)
            if ask.logprobs is not None:
                choice.draws.append(output.draw)
            is_eos = output.end is End.STOP and output.stop_reason is None
            if choice.text is not None and not is_eos and (stop := choice.text.add(output.token)) is not None:
                choice.end, choice.stop_reason = End.STOP, stop
                self._engine.scheduler.finish(self._sequences[choice.index], End.STOP)
                return
        choice.end, choice.stop_reason = output.end, output.stop_reason

    async def _cut_at(self, tokens: int, response: web.StreamResponse) -> bool:
        """Does what a fault does in the middle of a stream; True if the answer has ended with it."""
        fault = self._fault
        if fault is None or fault.kind not in _CUTS or tokens < fault.after_tokens:
            return False
        self._fault = None
        if fault.kind == "garbage":
            await response.write(_GARBAGE[fault.garbage])
            if fault.garbage == "truncated":
                self._record.ended = "fault"
                await response.write_eof()
                return True
            return False
        await asyncio.sleep(0)  # what was written goes out first
        if fault.kind == "exit":
            self._engine.exit(fault.exit_status)
        raise Cut

    def _cut_whole(self, tokens: int) -> None:
        fault = self._fault
        if fault is None or fault.kind not in ("die", "exit") or tokens < fault.after_tokens:
            return
        if fault.kind == "exit":
            self._engine.exit(fault.exit_status)
        raise Cut

    def _cached_tokens(self) -> int:
        first = self._sequences[0]
        told = None if self._source is None or self._settings.is_old else self._source.prefill_cached_tokens
        cached = first.cached + first.external if told is None else told
        self._record.cached_tokens = cached
        return cached

    def _ended(self) -> str:
        ends = [str(choice.end) for choice in self._choices]
        return next((end for end in ends if end == End.ABORT), ends[-1])


def status_response(fault: Fault) -> web.Response:
    """What a ``status`` fault answers."""
    if fault.body is None:
        kind = "InternalServerError" if fault.status >= 500 else "BadRequestError"
        facts = error_facts(f"simulated fault: HTTP {fault.status}", kind, fault.status)
        return web.json_response(facts, status=fault.status, headers=dict(fault.headers))
    return web.Response(
        body=fault.body.encode(), status=fault.status, content_type=fault.content_type, headers=dict(fault.headers)
    )
