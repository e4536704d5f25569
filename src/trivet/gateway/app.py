"""The gateway as an ASGI application: Trivet's own endpoints, then vLLM's API server for all the rest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import orjson

from trivet.fleet import probe
from trivet.gateway.admission import Admission
from trivet.gateway.metrics import GatewayMetrics, Gauges
from trivet.gateway.readiness import RenderServers, remarks, why_not_ready
from trivet.gateway.siblings import Records, listed
from trivet.gateway.spans import Tracing
from trivet.journal import Journal, RequestRecord, current_request, now_s
from trivet.legs.ending import end
from trivet.legs.life import Legs
from trivet.render.contract import ServingError
from trivet.routing.board import Count
from trivet.routing.engines import Engines
from trivet.surface.chunks import chunks_of
from trivet.surface.http import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    answer_error,
    answer_json,
    for_engines,
    header,
    header_value,
)
from trivet.surface.inbox import BodyTooLargeError, Inbox
from trivet.surface.sse import data_of, with_data
from trivet.surface.steering import RANK_HEADER, refusal_of
from trivet.surface.stored import refusal_of_stored
from trivet.surface.streams import MESSAGES, RESPONSES, failure
from trivet.surface.usage import put_cached, usage_in

logger = logging.getLogger(__name__)

_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
CLIENT_LEFT = 499
"""What is counted for a client that left before it had an answer; nginx's number for it."""
_CUT_OFF = "the gateway is stopping, and the time that running requests had for it (gateway.drain_s) is over"
_LAST_WORD_S = 1.0
"""How long a client may take to read that its time is up."""
_LISTED = 100
"""Requests that ``/trivet/requests`` shows unless told otherwise."""
SERVED_HEADER = b"x-trivet-served"
RETRY_AFTER_S = b"1"
"""An engine that ended is started again, and a queue moves on, within seconds."""

_OPENING = (b"event: response.created\n", b"event: response.in_progress\n")
"""Events of ``/v1/responses`` that tell of nothing that was generated."""

GENERATING = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/invocations",
    "/generative_scoring",
    "/v1/systemone",
)

_NOT_FOR_CLIENTS = frozenset(
    {
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/is_scaling_elastic_ep",
        "/kv_event_sources",
        "/scale_elastic_ep",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Endpoints of vLLM's front end by which one client could end another's requests, or that mean nothing here: an adapter
would be known to one worker, and to no engine."""

_GUARDED_BY_VLLM = ("/v1", "/v2", "/inference", "/cohere")


@dataclass(frozen=True, slots=True)
class Rules:
    """What the gateway asks of requests."""

    body_bytes: int = 64 * 2**20
    deadline_s: float | None = None
    allow: Collection[str] = ()
    """See ``surface.steering``."""
    tells_served: bool = True
    """Whether answers say in ``X-Trivet-Served`` how they were made, and by which engines."""
    keeps_responses: bool = True
    """Whether what needs a stored response goes to the application; see ``surface.stored``."""


class GatewayApp:
    """Routes a request to Trivet's endpoints or to vLLM's application.

    ``/health`` says that the worker lives, ``/ready`` that something can serve. For all workers of the gateway,
    ``/metrics`` says what they counted, ``/trivet/status`` what the fleet looks like, ``/trivet/requests`` which
    requests are the newest and ``/trivet/requests/ID`` how one went. A request with the header
    ``X-Trivet-Serve: colocated`` is not split, one with ``split`` is wherever it can be.
    """

    def __init__(
        self,
        frontend: ASGIApp,
        engines: Engines,
        legs: Legs,
        metrics: GatewayMetrics,
        *,
        fleet: Callable[[], dict[str, Any]],
        api_keys: Sequence[str] = (),
        rules: Rules | None = None,
        admission: Admission | None = None,
        guards_itself: bool = True,
        journal: Journal | None = None,
        records: Records | None = None,
        stopping: Callable[[], bool] = lambda: False,
        answered: Callable[[RequestRecord], None] = lambda _: None,
        tracing: Tracing | None = None,
        render_servers: RenderServers | None = None,
    ) -> None:
        """
        Args:
            frontend: serves what is not Trivet's own.
            fleet: the fleet's state, for ``/trivet/status``.
            api_keys: clients must send one of them, if there are any.
            guards_itself: ``frontend`` is vLLM's: it asks for the keys on its API by itself, and does not know what
                legs' errors say.
            journal: where this worker's requests are noted.
            records: what ``/trivet/requests`` answers from; only this worker's journal unless given.
            stopping: whether this worker has been told to stop: it still serves, and is not ready any more.
            answered: called with the record of each generating request that has its answer; see ``Endings``.
            tracing: makes spans of these requests.
            render_servers: those that ``frontend`` takes token ids from, for ``/ready`` and ``/trivet/status``.
        """
        self._frontend = frontend
        self._engines = engines
        self._legs = legs
        self._metrics = metrics
        self._fleet = fleet
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._rules = rules or Rules()
        self._admission = admission or Admission(1024, 1024, 30.0)
        self._guarded = _GUARDED_BY_VLLM if guards_itself else ()
        self._journal = journal or Journal()
        self._records = records or Records(self._journal)
        self._stopping = stopping
        self._answered = answered
        self._tracing = tracing
        self._render_servers = render_servers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection."""
        if scope["type"] != "http":
            await self._frontend(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and await self._own(scope, path, send):
            return
        is_guarded = bool(self._guarded) and path.startswith(self._guarded)
        if (method == "POST" or not self._guarded) and not is_guarded and not self._authorized(scope):
            # vLLM guards its API by prefix and leaves, among others, /invocations and /tokenize open
            await answer_error(send, 401, "an API key is needed: Authorization: Bearer KEY", path=path)
            return
        if is_guarded and method != "OPTIONS" and not self._authorized(scope):
            # as vLLM says it, before a body is read or a place in the queue taken
            await answer_json(send, 401, {"error": "Unauthorized"})
            return
        if path in _NOT_FOR_CLIENTS:
            await answer_json(send, 404, {"detail": "Not Found"})  # as where vLLM has them switched off
        elif not self._rules.keeps_responses and (refusal := refusal_of_stored(method, path, None)) is not None:
            await answer_error(send, 501, refusal)
        elif method == "POST" and path in GENERATING:
            await self._generate(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = Inbox(receive)
        try:
            if await self._body(scope, inbox) is not None:
                await self._frontend(scope, inbox, send)
        except BodyTooLargeError:
            await self._too_large(scope, send)
        finally:
            await inbox.close()

    async def _body(self, scope: Scope, inbox: Inbox) -> bytes | None:
        """See ``Inbox.body``; one that says how long it is need not come to be refused.

        Raises:
            BodyTooLargeError: it is longer than the topology allows.
        """
        said = header(scope, b"content-length")
        if said is not None and said.isdecimal() and int(said) > self._rules.body_bytes:
            raise BodyTooLargeError
        return await inbox.body(self._rules.body_bytes)

    async def _too_large(self, scope: Scope, send: Send) -> None:
        limit_mib = self._rules.body_bytes // 2**20
        message = f"the body is larger than {limit_mib} MiB (gateway.limits.body_mib)"
        await answer_error(send, 413, message, path=scope["path"])

    def gauges(self) -> Gauges:
        """What is under way now, in all workers."""
        total = self._engines.board.total
        return Gauges(
            total(Count.GENERATIONS),
            self._admission.running,
            self._admission.waiting,
            total(Count.RELEASES_PENDING),
            total(Count.RELEASES_UNCONFIRMED),
        )

    async def _own(self, scope: Scope, path: str, send: Send) -> bool:
        if path == "/health":
            await answer(send, 200, b"", b"text/plain")
        elif path == "/ready":
            why_not = (
                "the gateway is stopping" if self._stopping() else why_not_ready(self._engines, self._render_servers)
            )
            if why_not is None:
                await answer(
                    send, 200, remarks(self._engines, self._render_servers).encode(), b"text/plain; charset=utf-8"
                )
            else:
                await answer_error(send, 503, why_not)
        elif path == "/metrics":
            text = self._metrics.text(self._engines, self.gauges())
            await answer(send, 200, text, b"text/plain; version=0.0.4; charset=utf-8")
        elif path.startswith("/trivet/"):
            await self._inside(scope, path, send)
        else:
            return False
        return True

    async def _inside(self, scope: Scope, path: str, send: Send) -> None:
        if not self._authorized(scope):
            await answer_error(send, 401, "an API key is needed: Authorization: Bearer KEY")
        elif path == "/trivet/status":
            await answer_json(send, 200, await self._status())
        elif path == "/trivet/requests":
            await self._list_requests(scope, send)
        elif path.startswith("/trivet/requests/"):
            told, silent = await self._records.find(path.removeprefix("/trivet/requests/"))
            if told is not None:
                await answer_json(send, 200, told.facts)
            else:
                unasked = f"; worker {', '.join(map(str, silent))} did not answer" if silent else ""
                await answer_error(send, 404, f"no such request among the newest ones{unasked}")
        else:
            await answer_error(send, 404, f"no such endpoint: {path}")

    async def _list_requests(self, scope: Scope, send: Send) -> None:
        said = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("limit", [str(_LISTED)])[-1]
        if not re.fullmatch(r"\d{1,6}", said, re.ASCII):
            await answer_error(send, 400, "limit is a number of requests, such as 100")
            return
        told, silent = await self._records.newest(int(said))
        await answer_json(send, 200, {"requests": [listed(one) for one in told], "workers_silent": silent})

    async def _status(self) -> dict[str, Any]:
        """The fleet as this worker knows it, each engine with the load that it reports now."""
        status = self._fleet()
        loads = await asyncio.gather(
            *(
                probe.metrics(self._legs.session, one["url"]) if one["ready"] or one.get("leaving") else _nothing()
                for one in status["engines"]
            )
        )
        engines = []
        for one, load in zip(status["engines"], loads, strict=True):
            facts = {**one, "outstanding_tokens": self._engines.outstanding_tokens(one["name"]), "load": None}
            if load is not None:
                facts["load"] = {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage}
            engines.append(facts)
        facts = {**status, "engines": engines, "generations_running": self.gauges().generations}
        if self._engines.guarded:
            facts["pairs"] = self._pairs()
        if self._render_servers is not None:
            facts["render_servers"] = self._render_servers.facts()
        return facts if self._engines.board.workers == 1 else {**facts, "workers": self._workers()}

    def _pairs(self) -> list[dict[str, str]]:
        """The pairs of engines that are ready, and how each stands."""
        ready = self._engines.ready
        return [
            {"prefill": one.name, "decode": other.name, "proof": self._engines.proof(one, other).word}
            for one in ready("prefill")
            for other in ready("decode")
        ]

    def _workers(self) -> list[dict[str, Any]]:
        board = self._engines.board
        running, waiting = board.each(Count.RUNNING), board.each(Count.WAITING)
        return [
            {
                "worker": worker,
                "alive": board.is_alive(worker),
                "requests_running": running[worker],
                "requests_waiting": waiting[worker],
            }
            for worker in range(board.workers)
        ]

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = header(scope, b"x-request-id")
        request_id = said or uuid.uuid4().hex
        record = self._journal.open(request_id, scope["path"])
        if self._tracing is not None:
            self._tracing.begin(scope, record)
        inbox = Inbox(receive)
        answered = _Answered(
            send,
            record,
            self._count,
            inbox,
            tells_served=self._rules.tells_served,
            rewrites_errors=bool(self._guarded),
        )
        record.decided = answered.begin
        last_word: asyncio.TimerHandle | None = None
        try:
            body = await self._body(scope, inbox)
            if body is None:
                return
            parsed = _parsed(body)
            self._check(scope, record, parsed)
            if said is None and isinstance(parsed, dict) and isinstance(parsed.get("request_id"), str):
                self._journal.rename(record, parsed["request_id"])  # the topology allows it, or it had been refused
            client_id = header_value(record.request_id)
            forwarded = for_engines(scope)
            if self._tracing is not None:
                forwarded = self._tracing.headers(record, forwarded)
            record.forwarded = {**forwarded, "X-Client-Request-Id": client_id.decode("latin-1")}
            # vLLM takes its id from here, and no rank: it would hold it against a front end of one
            headers = [one for one in scope["headers"] if one[0] not in (b"x-request-id", RANK_HEADER.encode())]
            headers.append((b"x-request-id", client_id))
            scope = {**scope, "headers": headers}
            del body, parsed  # the application has it from here on
            record.queued_s = now_s()
            last_word = _last_word(scope, record)
            async with self._turn(inbox, record.deadline_s) as is_in:
                if not is_in:
                    return
                record.admitted_s = now_s()
                self._metrics.queue_wait.observe(record.admitted_s - record.queued_s)
                if why_not_ready(self._engines) is not None:
                    raise ServingError("no engine is ready to serve this request", status=503)
                token = current_request.set(record)
                try:
                    await self._frontend(scope, inbox, answered)
                finally:
                    current_request.reset(token)
        except BodyTooLargeError:
            await self._too_large(scope, answered)
        except ServingError as error:
            await answer_error(answered, error.status, error.message, path=record.path)
        except asyncio.CancelledError:
            if not self._stopping() or inbox.has_left:
                raise
            await answered.cut_off()  # the server gives up on what still runs
        except Exception as error:
            if record.status is None:
                self._count(record, 500)  # which the server answers then
            if not await answered.fail(error):
                raise
        finally:
            if last_word is not None:
                last_word.cancel()
            record.decided = None  # the journal keeps the record, and is not to keep the connection
            if record.status is None:
                self._count(record, CLIENT_LEFT)
            self._answered(record)
            await inbox.close()

    def _check(self, scope: Scope, record: RequestRecord, body: object) -> None:
        """Reads what concerns the gateway of a request's headers and body.

        Raises:
            ServingError: it says what it may not say.
        """
        names = {name.decode("latin-1") for name, _ in scope["headers"]}
        if (refusal := refusal_of(body, names, self._rules.allow)) is not None:
            raise ServingError(refusal, status=400)
        stored = None if self._rules.keeps_responses else refusal_of_stored(scope["method"], scope["path"], body)
        if stored is not None:
            raise ServingError(stored, status=501)
        if (wish := header(scope, b"x-trivet-serve")) is not None:
            if wish.lower() not in ("auto", "colocated", "split"):
                raise ServingError("X-Trivet-Serve is 'auto', 'colocated' or 'split'", status=400)
            record.colocate = "the request asks for it" if wish.lower() == "colocated" else None
            record.splits = wish.lower() == "split"
        seconds = self._rules.deadline_s
        if (said := header(scope, b"x-trivet-deadline-s")) is not None:
            own = float(said) if _SECONDS.fullmatch(said) else 0.0
            if not own > 0:
                raise ServingError(
                    "X-Trivet-Deadline-S is a number of seconds above 0 in digits, such as 30 or 2.5, at most "
                    "999999999; leave it out for no deadline of your own",
                    status=400,
                )
            record.deadline_is_own = seconds is None or own < seconds
            seconds = own if seconds is None else min(own, seconds)
        if seconds is not None:
            record.deadline_s = record.arrived_s + seconds
        record.decode_rank = header(scope, RANK_HEADER.encode())
        record.may_steer = bool({"kv_transfer_params", "ec_transfer_params"} & set(self._rules.allow))

    @contextlib.asynccontextmanager
    async def _turn(self, inbox: Inbox, deadline_s: float | None) -> AsyncIterator[bool]:
        """Waits for the request's turn; False inside if its client left first.

        Raises:
            ServingError: there is no turn for it, or none before its deadline.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self._admission.take():
                stack.callback(self._admission.leave)
                yield True
                return
            waiting = asyncio.ensure_future(stack.enter_async_context(self._admission.turn()))
            leaving = asyncio.ensure_future(inbox.left())
            try:
                rest_s = None if deadline_s is None else max(0.0, deadline_s - now_s())
                done, _ = await asyncio.wait([waiting, leaving], timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not waiting.done():
                    await end(waiting)
                if not waiting.cancelled():
                    waiting.exception()  # looked at, also where nobody is there to be told
            if not done:
                raise ServingError("the request's deadline has passed", status=504)
            if waiting.cancelled():
                yield False
            else:
                waiting.result()
                yield True

    def _count(self, record: RequestRecord, status: int) -> None:
        record.status = status
        self._metrics.requests.labels(record.path, str(status)).inc()

    def _authorized(self, scope: Scope) -> bool:
        if not self._key_digests:
            return True
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        # with all of them, whichever matches: the time that it takes says nothing about a key
        matches = [hmac.compare_digest(digest, own) for own in self._key_digests]
        return scheme.lower() == "bearer" and any(matches)


def _last_word(scope: Scope, record: RequestRecord) -> asyncio.TimerHandle | None:
    """Cuts off a client that does not read when its time is up: what ends its answer could not be written."""
    chunks = chunks_of(scope)
    if chunks is None or record.deadline_s is None:
        return None
    seconds = max(0.0, record.deadline_s - now_s()) + _LAST_WORD_S
    return asyncio.get_running_loop().call_later(seconds, chunks.cut)


async def _nothing() -> None:
    return None


def _parsed(body: bytes) -> object:
    """The body as JSON; None if it is none, which is the server's to say."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:  # as vLLM reads it: with NaN, halves of surrogate pairs, UTF-16 and deep nesting, in which a field could hide
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


class _Answered:
    """``send`` for a request's answer: adds what the gateway tells in headers, and counts."""

    def __init__(
        self,
        send: Send,
        record: RequestRecord,
        count: Callable[[RequestRecord, int], None],
        inbox: Inbox,
        *,
        tells_served: bool,
        rewrites_errors: bool,
    ) -> None:
        """
        Args:
            rewrites_errors: error events are vLLM's own; the text plane's say what is so.
        """
        self._tells_served = tells_served
        self._rewrites_errors = rewrites_errors
        self._head: Message | None = None
        """The head of a stream that waits for its generation's engines to be chosen."""
        self._opening: list[Message] = []
        """Events that wait with it."""
        self._beginning = asyncio.Lock()
        self._send = send
        self._inbox = inbox
        self._record = record
        self._count = count
        self._corrects = False
        self._begun = self._ended = False
        """The head is sent; and the last message."""
        self._reads = record.path in (MESSAGES, RESPONSES)
        """What goes through is looked at."""
        self._last = b""
        """What was sent last, where that is so."""

    def __call__(self, message: Message) -> Awaitable[None]:
        """Sends one ASGI message."""
        is_read = self._corrects and (self._reads or self._is_told_late)
        if self._begun and message["type"] == "http.response.body" and not is_read:
            return self._send(message)  # as nearly every token: without a coroutine of our own
        return self._say(message)

    @property
    def _is_told_late(self) -> bool:
        generations = self._record.generations
        return bool(generations) and generations[0].cached_late is not None

    async def _say(self, message: Message) -> None:
        begins = message["type"] == "http.response.start"
        if begins:
            status: int = message["status"]
            self._count(self._record, CLIENT_LEFT if self._inbox.has_left else status)
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            names = {name for name, _ in headers}
            if b"x-request-id" not in names:
                headers.append((b"x-request-id", header_value(self._record.request_id)))
            if status in (429, 503) and b"retry-after" not in names:
                headers.append((b"retry-after", RETRY_AFTER_S))
            self._corrects = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            message = {**message, "headers": headers}
            if self._tells_served and self._corrects and self._record.served is None:
                # vLLM's front end begins a stream before it generates; engines are chosen within the millisecond
                self._head = message
                return
            message = self._with_served(message)
        body = message.get("body", b"")
        if self._head is not None:
            if self._reads and body.startswith(_OPENING) and message.get("more_body", False):
                self._opening.append(message)  # vLLM writes these before it asks anybody
                self._last = body
                return
            await self.begin()
        if self._corrects and (b'"prompt_tokens_details"' in body or b'"cache_read_input_tokens"' in body):
            message = {**message, "body": _with_cached_tokens(body, self._record)}
        elif self._is_vllms_error(body) and (error := self._record_error()) is not None:
            # vLLM's own words are its trouble with reading the error that it was told
            message = {**message, "body": failure(self._record.path, error, 500, None, self._last)}
        if self._reads and body:
            self._last = body
        await self._send(message)
        self._begun = self._begun or begins
        self._ended = not begins and not message.get("more_body", False)

    def _is_vllms_error(self, body: bytes) -> bool:
        return self._rewrites_errors and self._reads and body.startswith(b"event: error\n")

    def _record_error(self) -> str | None:
        return next((one.error for one in self._record.generations if one.error is not None), None)

    async def fail(self, error: Exception) -> bool:
        """Ends a stream that broke off inside the application with an error event; False where none can be sent.

        vLLM does so itself, but for ``/v1/responses``: there it only closes the connection.
        """
        await self.begin()
        if not (self._begun and self._corrects) or self._ended:
            return False
        if (told := self._record_error()) is None:  # it is none of a leg's, which are logged
            cause = error.__cause__ or error
            told = str(cause) or type(cause).__name__
            logger.error("%s broke off", self._record.path, exc_info=error)
        await self({"type": "http.response.body", "body": failure(self._record.path, told, 500, None, self._last)})
        return True

    async def cut_off(self) -> None:
        """Ends an answer for which there is no time any more."""
        await self.begin()
        if self._ended:
            return
        if not self._begun:
            await answer_error(self, 503, _CUT_OFF, path=self._record.path)
        elif self._corrects:
            event = failure(self._record.path, _CUT_OFF, 503, None, self._last)
            await self({"type": "http.response.body", "body": event})

    async def begin(self) -> None:
        """Sends a head that has waited, with what is known by now."""
        async with self._beginning:
            if self._head is not None:
                await self._send(self._with_served(self._head))
                while self._opening:
                    await self._send(self._opening.pop(0))
                self._head = None
                self._begun = True

    def _with_served(self, head: Message) -> Message:
        served = self._record.served if self._tells_served else None
        if served is None:
            return head
        return {**head, "headers": [*head["headers"], (SERVED_HEADER, header_value(served))]}


def _with_cached_tokens(event: bytes, record: RequestRecord) -> bytes:
    """A stream's usage event with the cached tokens of a colocated request.

    vLLM's front end reads them off the first token; an engine that is asked over HTTP tells them after the last.
    """
    first = record.generations[0] if record.generations else None
    if first is None or first.cached_late is None or (data := data_of(event)) is None:
        return event
    try:
        value = orjson.loads(data)
        usage, late = usage_in(value), first.cached_late
        if usage is not None and "input_tokens" in usage:
            put_cached(usage, late["cached_tokens"] or 0, late.get("created_cache_tokens"))
        else:
            details = value["usage"]["prompt_tokens_details"]
            details |= {name: count for name, count in late.items() if name in details}
    except (AttributeError, orjson.JSONDecodeError, KeyError, TypeError):
        return event  # of another form: an error, or somebody's tokens
    return with_data(event, value)
