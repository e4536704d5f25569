"""Derender's paths before vLLM's: what a stream repeats with every chunk is compared, not read again.

A body of ``/v1/chat/completions/derender`` repeats request, prompt and every token so far. vLLM reads and checks all of
it each time, some milliseconds for a prompt of 8,000 tokens. Here the parts that repeat are compared as bytes with what
vLLM itself has read and checked before (memory at its full speed), and the chunk alone is read. Whatever is not such a
call goes to vLLM's own route on the same path, byte by byte as it came, and so do all refusals.

Beyond vLLM: a first call with ``"state": "kept"`` is answered with a handle in the place of the state. The calls after
it bring the handle and the chunk and nothing else, and each answer brings the next handle.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.scale_out.token_in_token_out import protocol
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from trivet.render.derender import CALL, TAIL, Call, Limits, LinearDerender, Live, Wire, install, place

CHAT = "/v1/chat/completions/derender"
COMPLETIONS = "/v1/completions/derender"

_PASSED = "trivet.derender.passed"
_BLANKS = (b" ", b"\t", b"\r", b"\n")
_REPEATED = {"chat_request", "prompt_token_ids", "stream_state"}
_CHANGING = {"stream", "model", "generate_chunk", "prompt_tokens"}
_HANDLE_BYTES = 256
_KEPT = b'"kept"'

_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TOKENS, _LENS = "output_token_ids", "output_chunk_lens"


@dataclass(slots=True, eq=False)
class Kept:
    """A stream whose client has a handle and nothing else."""

    kind: str
    """The path it was begun on."""
    asked: Mapping[str, Any]
    """Request, prompt, model: as they go to vLLM with every call."""
    state: Any
    """``DerenderStreamState``"""
    live: Live | None
    stem: str
    """What its handles begin with."""
    bytes: int
    """What its request and prompt weigh, estimated."""
    calls: int = 1

    @property
    def handle(self) -> str:
        """Of the state it is in."""
        return f"{self.stem}.{self.calls}"


def serve_derender(app: Any, limits: Limits | None = None) -> LinearDerender | None:
    """Makes derender of one of vLLM's applications linear: its derenderer, and its paths.

    Args:
        app: vLLM's, behind ``init_app_state``.
        limits: what is held at most between calls.

    Returns:
        What counts, also ``app.state.linear_derender``; None if this application has no derender
        (``--enable-scale-out``).
    """
    derenderer = getattr(app.state, "online_derenderer", None)
    if derenderer is None or getattr(app.state, "serving_derender", None) is None:
        return None
    linear = install(derenderer, limits)
    app.router.routes[0:0] = routes(linear)
    app.state.linear_derender = linear
    return linear


def routes(linear: LinearDerender) -> list[Route]:
    """Both paths, to stand before vLLM's in the application's router."""
    here = secrets.token_urlsafe(6)
    return [_First(path, _Derender(path, linear, here), methods=["POST"]) for path in (CHAT, COMPLETIONS)]


class _First(Route):
    """Seen once a request: handed on, it is not there, and the router finds vLLM's."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (Match.NONE, {}) if match is not Match.FULL or _PASSED in scope else (match, child)


class _Derender:
    """One path."""

    def __init__(self, path: str, linear: LinearDerender, here: str) -> None:
        self._path = path
        self._linear = linear
        self._here = here
        chat = path == CHAT
        self._request_cls = protocol.DerenderChatStreamRequest if chat else protocol.DerenderCompletionStreamRequest
        self._answer = "derender_chat_stream_response" if chat else "derender_completion_stream_response"
        chunk_type: Any = self._request_cls.model_fields["generate_chunk"].annotation
        self._chunk: TypeAdapter[Any] = TypeAdapter(chunk_type)
        self._state_cls: Any = protocol.DerenderStreamState
        self._compares = chat and linear.linear
        self._in_use: set[str] = set()
        """Stems of the handles whose calls are under way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        fields = _streamed(request, body)
        state = bytes(fields["stream_state"]) if fields and "stream_state" in fields else b"null"
        if fields is None:
            await _pass(scope, body, receive, send)
        elif bytes(fields.get("state", b"null")) not in (b"null", _KEPT):
            told = _refused(HTTPStatus.BAD_REQUEST, "state", f"state is {_KEPT.decode()} or left out")
            await told(scope, receive, send)
        elif state.startswith(b'"'):
            await (await self._go_on(request, fields, state))(scope, receive, send)
        elif bytes(fields.get("state", b"")) == _KEPT:
            await self._begin(scope, body, receive, send)
        elif not self._compares:
            await _pass(scope, body, receive, send)
        elif (answer := await self._known(request, fields, state)) is not None:
            await answer(scope, receive, send)
        else:
            with _calling(Call(wire=_wire(fields))):
                await _pass(scope, body, receive, send)

    # states as vLLM's

    async def _known(self, request: Request, fields: Mapping[str, msgspec.Raw], raw_state: bytes) -> Response | None:
        """The answer to a call whose repeated parts are those of a live parser. None: this is not one."""
        if not fields.keys() <= _REPEATED | _CHANGING or (wire := _wire(fields)) is None:
            return None
        if not raw_state.startswith(b"{") or "generate_chunk" not in fields:
            return None
        try:
            told = _FIELDS.decode(raw_state)
            tokens, lens = _numbers(told.pop(_TOKENS)), _numbers(told.pop(_LENS))
            state = self._state_cls.model_validate({name: json.loads(bytes(value)) for name, value in told.items()})
            chunk = self._chunk.validate_python(json.loads(bytes(fields["generate_chunk"])))
            model, prompt_tokens = (json.loads(bytes(fields.get(name, b"null"))) for name in ("model", "prompt_tokens"))
            at = place([int(one) for one in tokens.rsplit(b",", TAIL)[-TAIL:]])
        except (KeyError, ValueError, msgspec.DecodeError):  # pydantic's errors are ValueErrors
            return None
        if type(model) not in (str, type(None)) or type(prompt_tokens) not in (int, type(None)):
            return None
        live = self._linear.take(
            at,
            lambda one: one.lens_text == lens and one.tokens_text == tokens and one.wire == wire,
        )
        if live is None:
            return None
        state = state.model_copy(update={_TOKENS: live.tokens, _LENS: live.lens})
        call = Call(state=state, live=live)
        try:
            asked = self._request_cls.model_construct(
                stream=True,
                model=model,
                generate_chunk=chunk,
                stream_state=state,
                prompt_tokens=prompt_tokens,
                prompt_token_ids=live.prompt,
                chat_request=live.request,
            )
            result = await self._ask(request, asked, call)
            if isinstance(result, ErrorResponse):
                return _refusal(result)
            assert call.live is not None
            return _whole(result[0], result[1], call.live)
        finally:
            if call.live is not None:  # else it failed within, and is nowhere that anybody could say
                self._linear.put(call.live)

    # handles

    async def _begin(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """vLLM reads, checks and answers the call; of the answer, the state stays here."""
        start: Message | None = None
        parts: list[bytes] = []

        async def hear(message: Message) -> None:
            nonlocal start
            if start is None and message["type"] == "http.response.start":
                start = message
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        call = Call(keep=True)
        with _calling(call):
            await _pass(scope, body, receive, hear)
        if start is None:
            return
        if start["status"] != HTTPStatus.OK or call.answered is None or call.asked is None:
            await send(start)
            await send({"type": "http.response.body", "body": b"".join(parts)})
            return
        asked = {name: value for name, value in call.asked.items() if name not in ("generate_chunk", "state")}
        state, weight = call.answered, _HANDLE_BYTES + 4 * len(body)
        if call.live is not None:
            state = state.model_copy(update={_TOKENS: call.live.tokens, _LENS: call.live.lens})
        kept = Kept(self._path, asked, state, call.live, f"{self._here}.{secrets.token_urlsafe(16)}", weight)
        self._hold(kept)
        answer = json.loads(b"".join(parts))
        await JSONResponse({**answer, "stream_state": kept.handle})(scope, receive, send)

    async def _go_on(self, request: Request, fields: Mapping[str, msgspec.Raw], raw_handle: bytes) -> Response:
        handle = str(json.loads(raw_handle))
        stem, _, calls = handle.rpartition(".")
        kept = self._linear.store.take(
            stem, lambda one: isinstance(one, Kept) and one.kind == self._path and one.handle == handle
        )
        if kept is None:
            self._linear.unknown_handles += 1
            return self._unknown(stem, calls)
        self._in_use.add(stem)
        call = Call(state=kept.state, live=kept.live, keep=True)
        try:
            chunk = self._read_chunk(fields)
            given = {name: value for name, value in kept.asked.items() if name in self._request_cls.model_fields}
            asked = self._request_cls.model_construct(
                **given, stream=True, generate_chunk=chunk, stream_state=kept.state
            )
            result = await self._ask(request, asked, call)
            if isinstance(result, ErrorResponse):
                return _refusal(result)
            kept.state, kept.calls = result[1], kept.calls + 1
            return JSONResponse({"chunk": result[0].model_dump(), "stream_state": kept.handle})
        finally:
            # A call that was refused, or given up, has changed nothing; its parser may be gone, and is made again.
            self._in_use.discard(stem)
            kept.live = call.live
            if call.answered is None or kept.state is call.answered:
                self._hold(kept)

    def _hold(self, kept: Kept) -> None:
        self._linear.store.put(kept.stem, kept, kept.live.weight if kept.live is not None else kept.bytes)

    def _read_chunk(self, fields: Mapping[str, msgspec.Raw]) -> Any:
        """
        Raises:
            RequestValidationError: as vLLM's application answers it.
        """
        name = self._request_cls.__name__
        if "generate_chunk" not in fields:
            lacks = {"type": "missing", "loc": ("body", name, "generate_chunk"), "msg": "Field required", "input": {}}
            raise RequestValidationError([lacks])
        try:
            return self._chunk.validate_python(json.loads(bytes(fields["generate_chunk"])))
        except ValidationError as error:
            told = [{**one, "loc": ("body", name, "generate_chunk", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(told) from error

    def _unknown(self, stem: str, calls: str) -> Response:
        """What can be said of a handle that is good for nothing."""
        here, _, _ = stem.partition(".")
        if not (here and calls.isascii() and calls.isdigit()):
            why = "stream_state is a string, and none that a first call with state: kept is answered with"
            return _refused(HTTPStatus.BAD_REQUEST, "stream_state", why)
        if here != self._here:
            why = "is no handle of this server process, or of the one that ran here before"
        elif stem in self._in_use:
            why = "is at work in another call, and good for one"
        elif kept := next((one for one in self._linear.store.look(stem) if isinstance(one, Kept)), None):
            if kept.kind != self._path:
                why = f"stream_state belongs to a stream of {kept.kind}, not of {self._path}"
                return _refused(HTTPStatus.BAD_REQUEST, "stream_state", why)
            why = "was used already: each answer brings the next one"
        else:
            why = (
                f"is not known any more: its stream stood still for longer than {self._linear.limits.age_s:g} s, had "
                "to make room for others, or ended with a call that failed"
            )
        message = (
            f"stream_state {why}; begin again with the whole state (the request, the prompt, and all tokens so far "
            "in stream_state.output_token_ids, or as one generate_chunk whose answer is not used)"
        )
        return _refused(HTTPStatus.CONFLICT, "stream_state", message)

    # vLLM

    async def _ask(self, request: Request, asked: Any, call: Call) -> Any:
        """vLLM's own checks and its derenderer, as its route calls them."""
        serving = request.app.state.serving_derender
        with _calling(call):
            return await getattr(serving, self._answer)(asked)


def _streamed(request: Request, body: bytes) -> dict[str, msgspec.Raw] | None:
    """The fields of a streamed call, each as it came. None: what it is is for vLLM to say."""
    kind = request.headers.get("content-type", "").lower().partition(";")[0]
    if kind != "application/json":
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return fields if bytes(fields.get("stream", b"")) == b"true" else None


def _wire(fields: Mapping[str, msgspec.Raw]) -> Wire | None:
    if "chat_request" not in fields or "prompt_token_ids" not in fields:
        return None
    return Wire(bytes(fields["chat_request"]), bytes(fields["prompt_token_ids"]))


def _numbers(raw: msgspec.Raw) -> bytes:
    """A list in JSON without its brackets and blanks.

    Raises:
        ValueError: it is none.
    """
    text = bytes(raw)
    if not text.startswith(b"["):
        raise ValueError("no list")
    if any(blank in text for blank in _BLANKS):
        text = text.translate(None, b"".join(_BLANKS))
    return text[1:-1]


@contextmanager
def _calling(call: Call) -> Iterator[None]:
    token = CALL.set(call)
    try:
        yield
    finally:
        CALL.reset(token)


async def _pass(scope: MutableMapping[str, Any], body: bytes, receive: Receive, send: Send) -> None:
    """On to vLLM's route, with the body as it came."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    scope[_PASSED] = True
    await scope["app"].router(scope, again, send)


def _refused(code: HTTPStatus, field: str, message: str) -> Response:
    kind = "ConflictError" if code is HTTPStatus.CONFLICT else "BadRequestError"
    error = {"message": message, "type": kind, "param": field, "code": code.value}
    return JSONResponse({"error": error}, status_code=code)


def _refusal(error: Any) -> Response:
    """As vLLM's route answers it."""
    return JSONResponse(error.model_dump(), status_code=error.error.code)


def _whole(chunk: Any, state: Any, live: Live) -> Response:
    """As vLLM's route answers it; tokens as they are at hand."""
    rest = state.model_dump(exclude={_TOKENS, _LENS})
    numbers = {_TOKENS: bytes(live.tokens_text), _LENS: bytes(live.lens_text)}
    parts = [
        b'"%b":[%b]' % (name.encode(), numbers[name]) if name in numbers else _json({name: rest[name]})[1:-1]
        for name in type(state).model_fields
    ]
    content = b'{"chunk":%b,"stream_state":{%b}}' % (_json(chunk.model_dump()), b",".join(parts))
    return Response(content, media_type="application/json")


def _json(value: Any) -> bytes:
    """As Starlette writes it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
