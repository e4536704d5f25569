"""Render servers in the place of this worker's templates and tokenizer.

A request is sent to a render server before vLLM's front end sees it, as the client sent it. The token ids that come
back wait for the one moment at which vLLM would have rendered: its renderer's two entries (``render_chat_async`` and
``render_cmpl_async``, ``vllm/renderers/base.py``) hand them on as a prompt of token ids. All the rest runs here as it
does without servers: validation, limits, sampling parameters, tool parsers, and every word of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from trivet.errors import TrivetError
from trivet.render.asking import Answer, Asker, Inspector, Model, Outcome, canaries_of, open_session
from trivet.render.contract import DeadlinePassedError, ServingError
from trivet.render.pool import NotTakenError, Pauses, Pool, PoolRules, Reason, Tally, Turn
from trivet.render.portable import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, Local, Portable, look, texts_of

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Any]
Send = Callable[[MutableMapping[str, Any]], Any]

_TRIES = 2
"""A server that fails on a request may have been hit by that request: a third one is not put at risk."""

_RENDERS: dict[str, tuple[str, ...]] = {
    "render_chat_async": ("self", "conversations", "chat_params", "tok_params", "prompt_extras", "skip_mm_cache"),
    "render_cmpl_async": ("self", "prompts", "tok_params", "prompt_extras", "skip_mm_cache"),
}
"""vLLM's two entries to rendering, with their parameters."""

_REFUSALS = {
    Reason.QUEUE_FULL: "too many requests wait for a render server",
    Reason.QUEUE_WAIT: "no render server took this request in time",
    Reason.NO_SERVER: "no render server can be used",
    Reason.BUSY: "the render servers are busy",
    Reason.FAILED: "the render servers failed to render this request",
}


_ITS_WORD: dict[Outcome, Local | None] = {
    Outcome.OK: None,
    Outcome.REFUSED: Local.REFUSED,
    Outcome.UNFIT: Local.UNFIT,
}
"""Answers of a server that is well, and why the request is rendered here all the same."""


class _Rendered:
    """What a server rendered of a request, until vLLM asks for it: once, and for these prompts."""

    def __init__(
        self, path: str, request: Portable, prompts: Sequence[list[int]], unclaimed: Callable[[], None]
    ) -> None:
        """
        Args:
            unclaimed: called if vLLM asks for others.
        """
        self._is_completion = path == COMPLETIONS
        self._texts = request.texts
        self._prompts: Sequence[list[int]] | None = prompts
        self._unclaimed = unclaimed

    def of_chat(self, conversations: Sequence[Any]) -> Sequence[list[int]] | None:
        """The ids of these conversations, or None."""
        texts = self._texts
        known = len(conversations) == 1 and (not texts or any(texts[0] in one for one in texts_of(conversations[0])))
        return self._given(known and not self._is_completion)

    def of_completion(self, prompts: Sequence[Any]) -> Sequence[list[int]] | None:
        """The ids of these prompts, or None."""
        texts = [one.get("prompt") if isinstance(one, dict) and len(one) == 1 else None for one in prompts]
        return self._given(tuple(texts) == self._texts and self._is_completion)

    def _given(self, known: bool) -> Sequence[list[int]] | None:
        prompts = self._prompts
        # a later question is about a later turn of a conversation that vLLM holds with tools
        self._prompts, self._texts = None, ()
        if prompts is not None and not known:
            self._unclaimed()
        return prompts if known else None


_rendered: ContextVar[_Rendered | None] = ContextVar("rendered", default=None)


class Front(Protocol):
    """What is needed of ``render.frontend.Frontend``."""

    @property
    def app(self) -> Any:
        """vLLM's application."""

    @property
    def served_names(self) -> Sequence[str]:
        """How clients ask for the model."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""


@contextlib.asynccontextmanager
async def open_remote(
    frontend: Front,
    rules: PoolRules,
    *,
    api_keys: Sequence[str] = (),
    left_s: Callable[[], float | None] = lambda: None,
    tally: Tally | None = None,
    pauses: Pauses | None = None,
) -> AsyncIterator[RemoteRender]:
    """Has a worker's front end take token ids from render servers, as long as the block runs.

    Args:
        api_keys: those that the front end wants itself.
        left_s: how long the request at hand may still take, in seconds; None for ever.

    Raises:
        TrivetError: vLLM's renderer is another than Trivet knows.
    """
    online = getattr(getattr(frontend.app, "state", None), "online_renderer", None)
    renderer = getattr(online, "renderer", None)
    for name, parameters in _RENDERS.items():
        method = getattr(type(renderer), name, None)
        if method is None or tuple(inspect.signature(method).parameters) != parameters:
            raise TrivetError(
                f"this vLLM renders in a way that Trivet does not know: {name}",
                mend="leave out tiers.render.servers, or use a vLLM that this Trivet was tested with (see README)",
            )
    model = Model(frontend.served_names[0], frontend.max_model_len, _highest_id(renderer))
    async with open_session() as session:
        remote = RemoteRender(frontend.app, rules, tally, api_keys, left_s, _otherwise_made(online))
        asker = Asker(session, model, rules.api_key, rules.timeout_s)
        inspector = Inspector(asker, remote.render_here, canaries_of(model.name))
        with _handing_out(renderer):
            async with Pool(rules, inspector, tally, pauses) as pool:
                remote.begin(pool, asker, inspector)
                yield remote


def _highest_id(renderer: Any) -> int:
    """The highest token id that vLLM takes (``BaseRenderer.validate_token_ids``)."""
    return int(max(renderer.get_tokenizer().max_token_id, renderer.model_config.get_vocab_size() - 1))


def _otherwise_made(online: Any) -> frozenset[str]:
    """Endpoints whose prompts this model has made past the renderer's entries, or of more than token ids."""
    if getattr(online.model_config, "is_encoder_decoder", False):
        return frozenset(PATHS)
    return frozenset({CHAT, MESSAGES, RESPONSES} if online.use_harmony else ())


@contextlib.contextmanager
def _handing_out(renderer: Any) -> Any:
    """vLLM's renderer hands out what a server rendered of the request at hand."""
    chat, completion = renderer.render_chat_async, renderer.render_cmpl_async

    async def render_chat_async(
        conversations: Any, chat_params: Any, tok_params: Any = None, *, prompt_extras: Any = None, **more: Any
    ) -> Any:
        rendered = _rendered.get()
        prompts = None if rendered is None else rendered.of_chat(conversations)
        if prompts is None:
            return await chat(conversations, chat_params, tok_params, prompt_extras=prompt_extras, **more)
        params = renderer.default_chat_tok_params if tok_params is None else tok_params
        tokens = [{"prompt_token_ids": ids} for ids in prompts]
        # what vLLM parses of a conversation it reads to echo it, which is not done remotely
        return [[] for _ in prompts], await completion(tokens, params, prompt_extras=prompt_extras, **more)

    async def render_cmpl_async(prompts: Any, tok_params: Any = None, *, prompt_extras: Any = None, **more: Any) -> Any:
        rendered = _rendered.get()
        ids = None if rendered is None else rendered.of_completion(prompts)
        tokens = prompts if ids is None else [{"prompt_token_ids": one} for one in ids]
        return await completion(tokens, tok_params, prompt_extras=prompt_extras, **more)

    renderer.render_chat_async, renderer.render_cmpl_async = render_chat_async, render_cmpl_async
    try:
        yield
    finally:
        renderer.render_chat_async, renderer.render_cmpl_async = chat, completion


class RemoteRender:
    """The front end, as an ASGI application that asks a render server first."""

    def __init__(
        self,
        app: Any,
        rules: PoolRules,
        tally: Tally | None,
        api_keys: Sequence[str],
        left_s: Callable[[], float | None],
        otherwise_made: frozenset[str],
    ) -> None:
        """
        Args:
            app: vLLM's.
            api_keys: one of which it wants.
            left_s: how long the request at hand may still take.
            otherwise_made: endpoints of which nothing can be rendered elsewhere.
        """
        self._app = app
        self._rules = rules
        self._tally = tally
        self._api_keys = api_keys
        self._left_s = left_s
        self._otherwise_made = otherwise_made
        self._pool: Pool | None = None
        self._asker: Asker | None = None
        self._inspector: Inspector | None = None

    def begin(self, pool: Pool, asker: Asker, inspector: Inspector) -> None:
        """Has it ask servers from now on."""
        self._pool, self._asker, self._inspector = pool, asker, inspector

    @property
    def pool(self) -> Pool:
        """The servers."""
        assert self._pool is not None
        return self._pool

    async def render_here(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and answer of this worker's own render endpoint below ``path``."""
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        if self._api_keys:
            headers.append((b"authorization", b"Bearer " + self._api_keys[0].encode()))
        target = f"{path}/render"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": target,
            "raw_path": target.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 80),
        }
        status, parts = 500, []
        answered = asyncio.Event()

        async def gone() -> Any:
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    answered.set()

        await self._app(scope, _after([{"type": "http.request", "body": body, "more_body": False}], gone), send)
        return status, b"".join(parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI connection.

        Raises:
            ServingError: no server renders it, and it shall not be rendered here; or its deadline has passed.
        """
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS or self._pool is None:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
            messages.append(await receive())
        replayed = _after(messages, receive)
        if messages[-1]["type"] != "http.request":  # the client has left
            await self._app(scope, replayed, send)
            return
        body = b"".join(message.get("body", b"") for message in messages)
        request = self._look(scope["path"], body)
        rendered: Sequence[list[int]] | Reason | Local | None
        if isinstance(request, Local):
            rendered = request
        elif (rendered := await self._unless_left(self._render(scope, body, request), receive)) is None:
            return
        if isinstance(rendered, Reason) and self._rules.refuses:
            if self._tally is not None:
                self._tally.refused(rendered.value)
            raise ServingError(_REFUSALS[rendered], status=503)
        if isinstance(rendered, Reason | Local):
            self._stays(rendered)
            waiting = None
        else:
            assert isinstance(request, Portable)
            waiting = _Rendered(scope["path"], request, rendered, lambda: self._stays(Local.UNCLAIMED))
        del messages, body, request, rendered  # they may be large, and the answer may take minutes
        token = _rendered.set(waiting)
        try:
            await self._app(scope, replayed, send)
        finally:
            _rendered.reset(token)

    def _stays(self, reason: Local | Reason) -> None:
        if self._tally is not None:
            self._tally.local(reason.value)

    def _look(self, path: str, body: bytes) -> Portable | Local:
        if path in self._otherwise_made:
            return Local.MODEL
        if len(body) < self._rules.local_below_bytes:
            return Local.SMALL
        return look(path, body)

    async def _unless_left(self, rendering: Any, receive: Receive) -> Sequence[list[int]] | Reason | Local | None:
        """What came of rendering; None if the client left before.

        Raises:
            DeadlinePassedError: the request's time is up.
        """
        work, leaving = asyncio.ensure_future(rendering), asyncio.ensure_future(receive())
        try:
            done, _ = await asyncio.wait([work, leaving], timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            both = [one for one in (work, leaving) if not one.done()]
            for one in both:
                one.cancel()
            if both:
                await asyncio.wait(both)
        if leaving in done:
            leaving.result()
            if not work.cancelled():
                work.exception()  # looked at: there is nobody to be told
            return None
        if not done:
            raise DeadlinePassedError
        result: Sequence[list[int]] | Reason | Local = work.result()
        return result

    async def _render(self, scope: Scope, body: bytes, request: Portable) -> Sequence[list[int]] | Reason | Local:
        """Token ids of a request's prompts, by a server that has room, or by another one if that fails."""
        assert self._inspector is not None
        path, headers = scope["path"], _forwarded(scope)
        until_s = asyncio.get_running_loop().time() + self._rules.queue_s
        without: str | None = None
        reason = Reason.NO_SERVER
        for _ in range(_TRIES):
            try:
                async with self.pool.turn(until_s, without) as turn:
                    if path not in self._inspector.proven:
                        return Local.UNPROVEN
                    answer = await self._ask(turn, path, body, headers, request.prompts)
                    if answer.outcome in _ITS_WORD:
                        self.pool.went_well(turn)
                    elif answer.outcome not in (Outcome.BUSY, Outcome.REPLACED):
                        self.pool.failed(turn, answer.problem)
            except NotTakenError as error:
                return error.reason if without is None else reason
            except Exception:  # a fault of ours is none of the client's
                logger.exception("no render server could be asked")
                return Reason.FAILED
            if answer.outcome in _ITS_WORD:
                return _ITS_WORD[answer.outcome] or answer.prompts
            without = turn.url
            reason = Reason.BUSY if answer.outcome is Outcome.BUSY else Reason.FAILED
        return reason

    async def _ask(self, turn: Turn, path: str, body: bytes, headers: dict[str, str], prompts: int) -> Answer:
        assert self._asker is not None
        loop = asyncio.get_running_loop()
        began_s, outcome = loop.time(), "left"
        try:
            answer = await self._asker.render(turn.url, path, body, headers, prompts)
            if answer.outcome is Outcome.OK and not turn.stands():
                answer = Answer(Outcome.REPLACED)
            outcome = answer.outcome.value
            return answer
        finally:
            if self._tally is not None:
                self._tally.asked(turn.url, outcome, loop.time() - began_s)


def _forwarded(scope: Scope) -> dict[str, str]:
    """What a server is told of a request besides its body: what kind of body that is, and the id for its log."""
    kept = {b"content-type": "Content-Type", b"x-request-id": "X-Request-Id"}
    return {kept[name]: value.decode("latin-1") for name, value in scope["headers"] if name in kept}


def _after(messages: Sequence[Any], receive: Receive) -> Receive:
    """ASGI's ``receive`` with messages that were taken from it before."""
    rest = list(messages)

    async def replayed() -> Any:
        return rest.pop(0) if rest else await receive()

    return replayed
