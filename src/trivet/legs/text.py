"""The text plane: the client's own request, answered by the engines' OpenAI endpoints, whose bytes are passed through.

What legs send is in ``text_bodies``, what events and answers say in ``surface.streams``.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from trivet.journal import GenerationRecord, now_s
from trivet.legs.ask import Beside, Computed, Leg, Prefilled
from trivet.legs.bodies import release_at_prefill
from trivet.legs.express import Express
from trivet.legs.text_bodies import CHAT, COMPLETIONS, prefill_text_body, why_unsplittable, with_field
from trivet.legs.wire import (
    GENERATE,
    LegError,
    cached_tokens_of,
    check_finish,
    generate,
    post,
    reading,
    refusal,
    transfer_params_of,
)
from trivet.routing.prefixes import CHUNK_BYTES, Chain, Prefix
from trivet.surface.chunks import Chunks
from trivet.surface.sse import EventSplitter, data_of, with_data
from trivet.surface.streams import MESSAGES, RESPONSES, said_in
from trivet.surface.usage import Usage, put_cached, usage_in

_ID_PREFIX: Mapping[str, str] = {
    CHAT: "chatcmpl-{}",
    COMPLETIONS: "cmpl-{}-0",
    GENERATE: "generate-tokens-{}",
    MESSAGES: "chatcmpl-{}",
    RESPONSES: "resp_{}_0",
}
"""How vLLM makes an engine's id of ``X-Request-Id``; of ``request_id`` at ``/v1/responses``, which takes no header."""

_END_WITH_A_MARK = (CHAT, COMPLETIONS, GENERATE)
"""Endpoints whose streams end with ``data: [DONE]``."""
_END_WITH_AN_EVENT = (RESPONSES, MESSAGES)
"""Endpoints whose last event says so."""

_BEFORE_THE_MESSAGES = (
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "instructions",
    "mm_processor_kwargs",
    "prompt_embeds",
    "reasoning_effort",
    "response_format",
    "system",
    "tools",
)
"""Fields that shape a prompt from its beginning on, or everywhere. One that is missing here can only cost speed."""
_PROMPTS = ("prompt", "messages", "input", "token_ids")
"""Fields that are the prompt, at one endpoint or another."""
_SURELY_READ_S = 0.3
"""After so long an engine that answers its requests has read one."""
_BYTES_A_TOKEN = 4
"""Of English text; only the load of engines is estimated with it."""


@dataclass(slots=True)  # one is made for each token: not frozen, which would make that three times as slow
class TextPiece:
    """Bytes of an answer; the first ones with its head."""

    body: bytes
    head: Mapping[str, str] | None = None
    """Response headers, on the first piece."""
    tokens: int = 0
    """Tokens in it; one an event, as engines stream, unless usage tells."""
    finish_reason: str | None = None
    usage: Usage | None = None
    opens: bool = False
    """Written before anything was generated: kept until more has come, so that it binds nobody to this engine."""
    ends: bool = False
    """The stream's last event."""


class TextAsk:
    """A client's request as legs send it. See ``Ask``."""

    def __init__(self, path: str, raw: bytes, body: object, headers: Mapping[str, str], unsplittable: str | None):
        """
        Args:
            raw: the body as it came.
            body: the same, parsed; None if it is no JSON, which an engine will say.
            headers: what legs carry of the client's.
        """
        self.request_id = uuid.uuid4().hex
        self.headers = headers
        self.unsplittable = why_unsplittable(path, body) or unsplittable
        self.may_take_first_token = self.wants_one_token = False
        self.prompt = self.unsaid_end = None
        self.begun = self.answered = False
        # A rewritten body is refused for what it is: only an engine that has the client's own says what is wrong.
        self.legs_speak_for_client = False
        self.obstacle: str | None = "the text plane passes on what one engine writes"
        self._path = path
        self._raw = raw
        self._body: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
        self._prefix: Prefix | None = None
        self.client: Chunks | None = None
        """Where bytes may go to the client without coming by here, if there is such a way."""

    @property
    def prefix(self) -> Prefix:
        """See ``Ask``. Of the prompt's text, as its tokens are not known: chunks stand for so many tokens each.

        Of a prompt in token ids, those; so a text and its ids are two prompts here.
        """
        if self._prefix is None:
            self._prefix = self._hashed()
        return self._prefix

    def _hashed(self) -> Prefix:
        body = self._body
        prompt = next((body[name] for name in _PROMPTS if body.get(name) is not None), None)
        if body.get("prompt_logprobs") is not None:  # no cache is read for it
            return Prefix(prompt_tokens=self.prompt_tokens)
        shapes = orjson.dumps({name: body[name] for name in _BEFORE_THE_MESSAGES if name in body}).decode()
        identity = self._path, str(body.get("model")), str(body.get("cache_salt") or ""), shapes
        ids = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt
        if isinstance(ids, list) and ids and isinstance(ids[0], int):
            chain = Chain(*identity)
            try:
                chain.extend(ids)
            except (OverflowError, TypeError):  # no token ids, which an engine will say
                return Prefix(prompt_tokens=self.prompt_tokens)
        else:
            chain = Chain(*identity, chunk_bytes=CHUNK_BYTES)
            chain.extend_bytes(orjson.dumps(prompt))
        return chain.prefix(self.prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        """See ``Ask``; an estimate."""
        prompt = self._body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        return max(1, len(self._raw) // _BYTES_A_TOKEN)

    @property
    def tokens(self) -> int:
        """See ``Ask``; an estimate."""
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        limit = next((self._body[name] for name in names if self._body.get(name)), None)
        return self.prompt_tokens + (limit if isinstance(limit, int) else 0)

    def is_told_at_once(self, params: Mapping[str, Any] | None) -> bool:  # noqa: ARG002  (the protocol names it)
        """See ``Ask``."""
        return self._body.get("stream") is not True

    def _named(self, leg: Leg, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the leg's id where its endpoint takes it from there, so that it can be aborted by it."""
        return {**body, "request_id": f"resp_{leg.request_id}"} if self._path == RESPONSES and self._body else body

    def engine_id(self, leg: Leg) -> str:
        """See ``Ask``."""
        path = GENERATE if _releases_at_prefill(leg) else self._path
        return _ID_PREFIX.get(path, "{}").format(leg.request_id)

    async def prefill(
        self,
        leg: Leg,
        params: Mapping[str, Any] | None,
        *,
        sample: bool,  # noqa: ARG002  (there is nothing to sample for)
    ) -> Prefilled[TextPiece]:
        """See ``Ask``."""
        body = self._named(leg, prefill_text_body(self._path, self._body, params))
        answer = await generate(leg.session, leg.engine.name, leg.engine.url, body, leg.headers, self._path)
        with reading(leg.engine.name):
            if self._path not in _END_WITH_AN_EVENT:
                return Prefilled(transfer_params_of(answer), cached_tokens_of(answer))
            usage = Usage.parse(usage_in(answer))
            return Prefilled(transfer_params_of(answer), None if usage is None else usage.cached_tokens)

    async def decode(
        self,
        leg: Leg,
        params: Mapping[str, Any] | None,
        computed: Computed | Beside | None,
        accepted: Callable[[], None],
        passed: Callable[[int], None] = lambda _: None,
    ) -> AsyncGenerator[TextPiece, None]:
        """See ``Ask``."""
        raw = self._raw if params is None else with_field(self._raw, "kv_transfer_params", params)
        for name, value in self._named(leg, {}).items():
            raw = with_field(raw, name, value)
        engine = leg.engine.name
        # An answer that is not streamed has no beginning: its request has long been read when its head comes.
        whole = self.is_told_at_once(params)
        taken = asyncio.get_running_loop().call_later(_SURELY_READ_S, accepted) if whole else None
        try:
            answering = post(leg.session, engine, f"{leg.engine.url}{self._path}", raw, leg.headers)
            async with answering as answer:
                if answer.status != 200:
                    raise refusal(engine, await answer.read(), answer.status)
                accepted()
                async with aclosing(self._pieces(engine, answer, computed, passed)) as pieces:
                    async for piece in pieces:
                        yield piece
        finally:
            if taken is not None:
                taken.cancel()

    async def _pieces(
        self,
        engine: str,
        answer: aiohttp.ClientResponse,
        computed: Computed | Beside | None,
        passed: Callable[[int], None],
    ) -> AsyncGenerator[TextPiece, None]:
        if not answer.content_type.startswith("text/event-stream"):
            content = await answer.read()
            yield _whole(engine, content, _head(answer.headers), await _settled(computed), computed, self._path)
            return
        head: Mapping[str, str] | None = _head(answer.headers)
        splitter, tokens = EventSplitter(), _TokenEvents()
        done = self._path not in _END_WITH_A_MARK + _END_WITH_AN_EVENT
        opening: list[bytes] = []
        # the others' events are looked at on their way: an error behind them is told by what came last
        client = self.client if self._path in _END_WITH_A_MARK else None
        with Express(answer, tokens.know, None if client is None else client.write, passed) as express:
            while read := await express.read(steady=head is None and tokens.knows and not splitter.pending):
                by = computed if not isinstance(computed, Beside) else await computed.computed()
                plain: list[bytes] = []
                for event in splitter.feed(read):
                    if head is None and tokens.know(event):
                        plain.append(event)
                        continue
                    if plain:
                        yield TextPiece(b"".join(plain), tokens=len(plain))
                        plain = []
                    piece = _event(engine, event, head, by, computed, tokens, self._path)
                    done = done or piece.ends
                    if piece.opens:
                        opening.append(event)
                        continue
                    if opening:
                        piece.body, opening = b"".join((*opening, piece.body)), []
                    yield piece
                    head = None
                if plain:
                    yield TextPiece(b"".join(plain), tokens=len(plain))
        if not done:
            raise LegError(engine, "the stream ended before the answer did", status=502, died=True)

    async def release(self, leg: Leg, params: Mapping[str, Any], prompt: Any) -> None:  # noqa: ARG002  (the same)
        """See ``Ask``."""
        if _releases_at_prefill(leg):
            body = release_at_prefill(self._body.get("model"), 0, params)
            await generate(leg.session, leg.engine.name, leg.engine.url, body, leg.headers)
            return
        # A salt of its own: should prefill have freed the blocks already, decode must not cache what it reads there.
        body = {**prefill_text_body(self._path, self._body, params), "cache_salt": f"release-{uuid.uuid4().hex}"}
        await generate(leg.session, leg.engine.name, leg.engine.url, self._named(leg, body), leg.headers, self._path)

    def note(self, record: GenerationRecord, piece: TextPiece) -> None:
        """See ``Ask``."""
        self.begun = True
        if piece.tokens:
            if not self.is_told_at_once(None):
                record.first_token_s = record.first_token_s or now_s()
            record.completion_tokens += piece.tokens
        if piece.usage is not None:
            record.prompt_tokens = piece.usage.prompt_tokens or record.prompt_tokens
            record.completion_tokens = piece.usage.completion_tokens or record.completion_tokens
            record.cached_tokens = piece.usage.cached_tokens
        if piece.finish_reason is not None:
            record.finish_reason = piece.finish_reason
            record.end_s = now_s()


async def _settled(computed: Computed | Beside | None) -> Computed | None:
    """Who computed the prompt, as soon as that is known."""
    return await computed.computed() if isinstance(computed, Beside) else computed


def _releases_at_prefill(leg: Leg) -> bool:
    """Such a leg needs no prompt of the client's, and so not the endpoint that would render it."""
    return leg.role == "release" and leg.engine.tier == "prefill"


_OF_THE_CONNECTION = frozenset({"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"})
_NOT_PASSED_ON = _OF_THE_CONNECTION | {"content-encoding", "set-cookie", "x-request-id"}


def _head(headers: Mapping[str, str]) -> dict[str, str]:
    """What of an engine's headers goes on; which pages may ask (CORS) is not an engine's to say."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() not in _NOT_PASSED_ON and not name.lower().startswith("access-control-")
    }


def _whole(
    engine: str,
    content: bytes,
    head: Mapping[str, str] | None,
    computed: Computed | None,
    source: Computed | Beside | None = None,
    path: str = CHAT,
) -> TextPiece:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise LegError(engine, "answered 200 with something that is not JSON", status=502) from error
    with reading(engine):
        reason = said_in(path, answer).finish_reason
        check_finish(engine, reason)
        for choice in answer.get("choices") or ():
            check_finish(engine, reason := choice.get("finish_reason"))
        told = usage_in(answer)
        _found(source, told)
        if _corrected(told, computed):
            content = orjson.dumps(answer)
        usage = Usage.parse(told)
        return TextPiece(content, head, (usage and usage.completion_tokens) or 1, reason, usage)


_NAME = re.compile(rb"\Aevent: [a-z_.]+\n")
_TEXT_BEGINS = re.compile(rb'(?:content|reasoning|text|arguments)" ?: ?"')
_TEXT = re.compile(rb'[^"\\\x00-\x1f]*+(?:\\["\\/bfnrt][^"\\\x00-\x1f]*+)*+')
"""The inside of a JSON string in UTF-8; without ``\\u``, of which not all are valid."""


class _TokenEvents:
    """Knows the events of a stream that bring one token each and nothing else, without parsing each of them.

    Such events differ in one string only, which is of no interest here. So one is parsed, and what stands before and
    behind the string in it is kept: with any other string between the two, the same parser reads the same values, but
    for that string. Nobody can forge this with what a model says, since nothing is searched for: what is between must
    be the inside of one string, to its last byte.

    That what is taken for the string is one, and a member's value: in JSON, ``content":"`` cannot stand outside of
    strings, nor inside one, as the first quote would end it; so that quote ends a string, which is a member's name as
    a colon follows, and the last one begins the value. That it is of no interest: the name is none that ``_event``
    asks for, and what ``_event`` found under those names was nothing that could have it inside.
    """

    def __init__(self) -> None:
        self._before = self._behind = b""
        self._in_vain = 0
        """Examples since an event was known."""

    @property
    def knows(self) -> bool:
        """Whether it has an example."""
        return bool(self._before)

    def know(self, event: bytes) -> bool:
        """Whether it is one of those."""
        if not self._before or not event.startswith(self._before) or not event.endswith(self._behind):
            return False
        begin, end = len(self._before), len(event) - len(self._behind)
        if begin > end or _TEXT.fullmatch(event, begin, end) is None:
            return False
        if not event.isascii() and not _is_utf8(event[begin:end]):
            return False
        self._in_vain = 0
        return True

    def learn(self, event: bytes, data: bytes) -> None:
        """Takes an event for an example: it brings a token, and neither usage, an error nor a finish reason."""
        self._before = b""
        if self._in_vain > _EXAMPLES:
            return
        self._in_vain += 1
        begins = _TEXT_BEGINS.search(event)
        if begins is None or _NAME.sub(b"", event, 1) != b"data: " + data + b"\n\n":
            return
        text = _TEXT.match(event, begins.end())
        if text is not None and event[text.end()] == _QUOTE:
            self._before, self._behind = event[: text.start()], event[text.end() :]


_QUOTE = ord('"')
_EXAMPLES = 8
"""After so many in vain, the stream's events differ in more: several choices, log-probabilities."""


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _event(
    engine: str,
    event: bytes,
    head: Mapping[str, str] | None,
    computed: Computed | None,
    source: Computed | Beside | None = None,
    tokens: _TokenEvents | None = None,
    path: str = CHAT,
) -> TextPiece:
    """An event as it goes on: its bytes as they came, but for the count of cached tokens.

    Args:
        tokens: learns what events look like that this function would find nothing in but a token.

    Raises:
        LegError: it tells of an error, or is none of a stream's events.
    """
    data = data_of(event)
    if data is None or data == b"[DONE]":
        return TextPiece(event, head, ends=data is not None)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise LegError(engine, "sent an event that is not JSON", status=502) from error
    with reading(engine):
        if value.get("error"):
            fault = refusal(engine, data, 500)
            if fault.status != 400:
                raise fault
            # vLLM finds some requests at fault only when their stream is open, and says so in it
            return TextPiece(event, head, finish_reason="error")
        said = said_in(path, value)
        reason = said.finish_reason
        check_finish(engine, reason)
        choices = value.get("choices") or ()
        for choice in choices:
            reason = choice.get("finish_reason") or reason
            check_finish(engine, reason)
        count, usage = int(any(map(_brings_token, choices))) or said.tokens, usage_in(value)
        if tokens is not None and count and reason is None and usage is None:
            tokens.learn(event, data)
        _found(source, usage)
        if _corrected(usage, computed):
            event = with_data(event, value)
        return TextPiece(event, head, count, reason, Usage.parse(usage), said.opens, said.ends)


def _brings_token(choice: Mapping[str, Any]) -> bool:
    """Whether a choice tells of a token: a chat's first event says who speaks, and is written before there is any."""
    delta = choice.get("delta")
    if not isinstance(delta, Mapping) or "role" not in delta or choice.get("finish_reason") is not None:
        return True
    return any(said for name, said in delta.items() if name != "role")


def _found(source: Computed | Beside | None, usage: Any) -> None:
    """Tells who is beside what decode's own usage says, before it is corrected."""
    if isinstance(source, Beside) and (own := Usage.parse(usage)) is not None and own.cached_tokens is not None:
        source.found(own.prompt_tokens, own.cached_tokens)


def _corrected(usage: MutableMapping[str, Any] | None, computed: Computed | None) -> bool:
    """Puts prefill's counts of cached tokens in place of decode's, which takes what was handed over for cached.

    vLLM 0.32 tells prefill's ``cached_tokens`` itself (``remote_prefill_cached_tokens``), 0.30 does not; neither
    tells what prefill added to its cache.
    """
    if usage is None or computed is None or computed.cached_tokens is None or (told := Usage.parse(usage)) is None:
        return False
    created = computed.engine.created_cache_tokens(told.prompt_tokens, computed.cached_tokens)
    return put_cached(usage, computed.cached_tokens, created)
