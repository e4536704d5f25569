"""Streamed derender in work that does not grow: vLLM's parsers stay alive between the calls of a stream.

Derender turns generated token ids back into OpenAI's answers (``vllm.renderers.online_derenderer``). Of a stream, each
call brings one chunk of tokens and the state that the call before answered. vLLM keeps nothing between calls: with a
reasoning or tool parser configured, every call makes a new parser and feeds it all tokens so far. Here the parser of
the last call is found again by what it has consumed and goes on. What is not found (another server began the stream,
room was made, the client went back) is replayed once by vLLM's own code, and lives on from there. Bodies and states
stay vLLM's, so that any server can go on from any state.

All that is said and how is still vLLM's ``_derender_chat_stream_parsed``: it runs on the live parser with a state that
has nothing to replay.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import vllm.renderers.online_derenderer as theirs

_ENTRY_BYTES = 40 * 1024
"""Of an entry, beside what grows with its texts and tokens: the parser and the request, emptied."""
_TOKEN_BYTES = 64
"""Of a generated token: in our list and the parser's, its characters in the parser's text and in ours."""
_PROMPT_TOKEN_BYTES = 36
"""A number of its own and the reference to it."""
_REQUEST_COPIES = 4
"""What a request weighs against its JSON: as JSON here, twice at most, and as objects."""

TAIL = 8
"""Last tokens by which a state is looked for, before all of them are compared."""
_INLINE_TOKENS = 16
_INLINE_S = 0.001
"""Chunks as small as this, of parsers that took no longer the last time (CPU time), are parsed on the event loop, as
`vllm serve` does with all: a thread would cost as much again."""

_PARSED = "_derender_chat_stream_parsed"
_PARSED_TAKES = (
    "self",
    "parser_cls",
    "model",
    "generate_chunk",
    "state",
    "chat_request",
    "prompt_tokens",
    "prompt_token_ids",
)
_WINDOW_TAKES = {"tokenizer", "delta_token_ids", "state"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is held for calls that may come."""

    entries: int = 8192
    """Streams."""
    bytes: int = 512 * 1024 * 1024
    """What they weigh together, estimated."""
    age_s: float = 600.0
    """A stream without a call for as long is forgotten. Engines under load pause streams for seconds, not minutes."""


@dataclass(slots=True)
class _Held(Generic[T]):
    what: T
    key: Hashable
    bytes: int
    since: float


class Store(Generic[T]):
    """What waits for its next call: found by key, bounded, the longest idle forgotten first. For one event loop.

    Attributes:
        bytes: what all of it weighs.
        evictions: what was forgotten to make room.
        expirations: what was forgotten for its age.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes = 0
        self.evictions = 0
        self.expirations = 0
        self._limits = limits
        self._clock = clock
        self._serial = 0
        self._held: OrderedDict[int, _Held[T]] = OrderedDict()
        self._by_key: dict[Hashable, dict[int, _Held[T]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: Hashable, what: T, weight: int) -> None:
        """Holds ``what``; several may have one key."""
        self.forget_old()
        self._serial += 1
        held = _Held(what, key, weight, self._clock())
        self._held[self._serial] = held
        self._by_key.setdefault(key, {})[self._serial] = held
        self.bytes += weight
        while self._held and (len(self._held) > self._limits.entries or self.bytes > self._limits.bytes):
            self._remove(next(iter(self._held)))
            self.evictions += 1

    def take(self, key: Hashable, is_it: Callable[[T], bool]) -> T | None:
        """What ``is_it`` is true of, which is then held no longer: nobody else gets it."""
        self.forget_old()
        for serial, held in self._by_key.get(key, {}).items():
            if is_it(held.what):
                self._remove(serial)
                return held.what
        return None

    def look(self, key: Hashable) -> list[T]:
        """What is held by that key, and stays."""
        self.forget_old()
        return [held.what for held in self._by_key.get(key, {}).values()]

    def forget_old(self) -> None:
        """Forgets what has waited too long."""
        oldest = self._clock() - self._limits.age_s
        while self._held:
            serial = next(iter(self._held))
            if self._held[serial].since >= oldest:
                return
            self._remove(serial)
            self.expirations += 1

    def clear(self) -> None:
        """Forgets everything."""
        self._held.clear()
        self._by_key.clear()
        self.bytes = 0

    def _remove(self, serial: int) -> None:
        held = self._held.pop(serial)
        self.bytes -= held.bytes
        same = self._by_key[held.key]
        del same[serial]
        if not same:
            del self._by_key[held.key]


@dataclass(frozen=True, slots=True)
class Wire:
    """Request and prompt as they came, JSON as the client wrote it: equal bytes are equal values."""

    request: bytes
    prompt: bytes


@dataclass(slots=True, eq=False)
class Live:
    """A parser and what it has consumed."""

    request: Any
    """``ChatCompletionRequest``"""
    prompt: list[int] | None
    parser: Any = None
    window: Any = None
    """Where detokenizing stands: a ``DerenderStreamState``."""
    tokens: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    tokens_text: bytearray = field(default_factory=bytearray)
    """``tokens`` as JSON, without the brackets; ``lens_text`` likewise."""
    lens_text: bytearray = field(default_factory=bytearray)
    wire: Wire | None = None
    spent: bool = False
    """The answer is finished: there is no parser any more, but that these tokens can be parsed is known."""
    last_s: float = 0.0
    """CPU seconds of the last call."""
    _dumped: str | None = None

    def consume(self, token_ids: Sequence[int]) -> None:
        """Notes one chunk that was parsed."""
        if not token_ids:
            return
        for text, numbers in ((self.tokens_text, token_ids), (self.lens_text, (len(token_ids),))):
            if text:
                text += b","
            text += ",".join(map(str, numbers)).encode()
        self.tokens += token_ids
        self.lens.append(len(token_ids))

    def finish(self) -> None:
        """Lets go of what no further chunk can use: a parser that was told of the end is none that was not."""
        self.spent = True
        self.parser = self.window = None

    def dumped(self) -> str | None:
        """The request as JSON."""
        if self._dumped is None:
            self._dumped = dump(self.request)
        return self._dumped

    def is_at(self, state: Any, prompt: list[int] | None, request: Any, wire: Wire | None) -> bool:
        """Whether it has consumed exactly this: compared, not guessed."""
        if self.tokens != state.output_token_ids or self.lens != state.output_chunk_lens or self.prompt != prompt:
            return False
        if request is self.request or (
            wire is not None and self.wire is not None and wire.request == self.wire.request
        ):
            return True
        ours = self.dumped()
        return ours is not None and ours == dump(request)

    @property
    def weight(self) -> int:
        """Bytes it holds, estimated."""
        request = len(self.wire.request) + len(self.wire.prompt) if self.wire else len(self.dumped() or "")
        return (
            _ENTRY_BYTES
            + _REQUEST_COPIES * request
            + _PROMPT_TOKEN_BYTES * len(self.prompt or ())
            + _TOKEN_BYTES * len(self.tokens)
        )


def dump(request: Any) -> str | None:
    """A request as JSON, which tells 1 from true and 1.0; None if it has none. What it does not say is not in it."""
    try:
        return str(request.model_dump_json(exclude_unset=True, warnings=False))
    except Exception:  # pydantic raises several kinds; no proof is no equality
        return None


def place(tokens: Sequence[int]) -> tuple[int, ...]:
    """Where a state is looked for."""
    return tuple(tokens[-TAIL:])


@dataclass(slots=True, eq=False)
class Call:
    """What a route knows of the call that it makes into vLLM, and what it is told of it."""

    wire: Wire | None = None
    state: Any = None
    """The state that ``live`` is at."""
    live: Live | None = None
    """Given, and given back if nothing went wrong."""
    keep: bool = False
    """``live`` is for the route to hold."""
    asked: dict[str, Any] | None = None
    """What vLLM's serving layer made of the body, by name of the argument; told of a stream that is to be kept."""
    answered: Any = None
    """The state behind the call."""


CALL: ContextVar[Call | None] = ContextVar("trivet_derender_call", default=None)


class LinearDerender:
    """Put before one ``OnlineDerenderer``. Made by ``install``.

    Attributes:
        linear: this vLLM's parsed streams are known here; else they are left to vLLM as they are.
        begun: streams begun here.
        hits: calls that found their parser.
        replays: calls that had to replay.
        replayed_tokens: tokens that were parsed again.
        unknown_handles: calls with a handle that is not known (``derender_routes``).
    """

    def __init__(self, derenderer: Any, limits: Limits, clock: Callable[[], float]) -> None:
        self.derenderer = derenderer
        self.limits = limits
        self.store: Store[Any] = Store(limits, clock)
        self.begun = 0
        self.hits = 0
        self.replays = 0
        self.replayed_tokens = 0
        self.unknown_handles = 0
        self.linear = _is_known(type(derenderer))
        self._run = getattr(type(derenderer), _PARSED, None)
        self._executor = derenderer.renderer._executor
        if self.linear:
            derenderer._derender_chat_stream_parsed_async = self._parsed
        for name in ("derender_chat_stream", "derender_completion_stream"):
            setattr(derenderer, name, _told(getattr(derenderer, name)))

    @property
    def evictions(self) -> int:
        """Streams forgotten to make room."""
        return self.store.evictions

    @property
    def expirations(self) -> int:
        """Streams forgotten for their age."""
        return self.store.expirations

    def take(self, key: Hashable, is_it: Callable[[Any], bool]) -> Live | None:
        """A live parser out of the store."""
        return self.store.take(key, lambda one: isinstance(one, Live) and is_it(one))

    def put(self, live: Live) -> None:
        """A live parser back into the store."""
        if live.tokens:  # else there is nothing to replay
            self.store.put(place(live.tokens), live, live.weight)

    async def _parsed(
        self,
        parser_cls: Any,
        model: str,
        generate_chunk: Any,
        state: Any,
        chat_request: Any,
        prompt_tokens: int | None,
        prompt_token_ids: list[int] | None,
    ) -> tuple[Any, Any]:
        """In the place of vLLM's ``_derender_chat_stream_parsed_async``."""
        call = CALL.get()
        given = call is not None and call.state is state
        wire = call.wire if call is not None else None
        choice = generate_chunk.choices[0] if generate_chunk.choices else None
        live: Live | None = None
        if call is not None and given:
            live, call.live = call.live, None
        if live is not None and live.spent and choice is not None:
            live = None
        if live is None and state.output_token_ids:
            live = self.take(
                place(state.output_token_ids),
                lambda one: (
                    (choice is None or not one.spent) and one.is_at(state, prompt_token_ids, chat_request, wire)
                ),
            )
        known = live is not None
        if live is None:
            live = Live(chat_request, prompt_token_ids)
        if wire is not None:
            live.wire = wire
        self._count(known, state)

        step = functools.partial(
            self._step, live, known, parser_cls, model, generate_chunk, state, chat_request, prompt_tokens
        )
        delta: list[int] = (choice.token_ids or []) if choice is not None else []
        if known and len(delta) <= _INLINE_TOKENS and live.last_s < _INLINE_S:
            chunk, after = step()
        else:
            chunk, after = await asyncio.get_running_loop().run_in_executor(self._executor, step)

        # From here on nothing waits. A call that was given up above leaves a parser that nobody finds any more.
        if not known:
            _note(live, state)
        live.consume(delta)
        if choice is not None and choice.finish_reason is not None:
            live.finish()
        if call is not None and (given or call.keep):
            call.live = live
        else:
            self.put(live)
        if known:
            # A route that holds the parser needs no copies; anybody else's states are theirs.
            tokens, lens = (live.tokens, live.lens) if given else (list(live.tokens), list(live.lens))
            after = after.model_copy(update={"output_token_ids": tokens, "output_chunk_lens": lens})
        return chunk, after

    def _count(self, known: bool, state: Any) -> None:
        if known:
            self.hits += 1
        elif state.output_token_ids:
            self.replays += 1
            self.replayed_tokens += len(state.output_token_ids)
        else:
            self.begun += 1

    def _step(
        self,
        live: Live,
        known: bool,
        parser_cls: Callable[..., Any],
        model: str,
        generate_chunk: Any,
        state: Any,
        chat_request: Any,
        prompt_tokens: int | None,
    ) -> tuple[Any, Any]:
        """One call of vLLM's: with the live parser and nothing to replay, or with a new parser and everything."""

        def parser(*args: Any, **kwargs: Any) -> Any:
            if not known:
                live.parser = parser_cls(*args, **kwargs)
            return live.parser

        assert self._run is not None
        begun_s = time.thread_time()
        if known:
            # The first call's request: a parser may have noted something in it.
            chat_request = live.request
            state = state.model_copy(update={"output_token_ids": [], "output_chunk_lens": []})
        before = live.tokens[-_LOGPROB_CONTEXT:] if known else state.output_token_ids[-_LOGPROB_CONTEXT:]
        on_it = _OnLive(self.derenderer, live, known)
        chunk, after = self._run(on_it, parser, model, generate_chunk, state, chat_request, prompt_tokens, live.prompt)
        self._add_logprobs(chunk, generate_chunk, chat_request, before)
        live.last_s = time.thread_time() - begun_s
        return chunk, after

    def _add_logprobs(self, chunk: Any, generate_chunk: Any, chat_request: Any, before: Sequence[int]) -> None:
        """vLLM's parsed derender drops logprobs (0.32); `vllm serve` gives them, unless reasoning is hidden."""
        if not generate_chunk.choices or not chat_request.include_reasoning:
            return
        logprobs, choice = generate_chunk.choices[0].logprobs, chunk.choices[0]
        if logprobs is not None and choice.logprobs is None:
            tokenizer = self.derenderer.renderer.get_tokenizer()
            choice.logprobs = theirs._resolve_logprobs(logprobs, tokenizer, initial_context_token_ids=before)


_LOGPROB_CONTEXT = 4
"""Tokens that vLLM's ``_correct_decoded_token`` looks back at, to mend characters made of several."""


class _OnLive:
    """vLLM's derenderer to its own method, but for what goes on from call to call."""

    __slots__ = ("_derenderer", "_known", "_live")

    def __init__(self, derenderer: Any, live: Live, known: bool) -> None:
        self._derenderer = derenderer
        self._live = live
        self._known = known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._derenderer, name)

    def _detokenize_delta(self, tokenizer: Any, delta_token_ids: list[int], state: Any, **how: bool) -> tuple[str, Any]:
        window = self._live.window if self._live.window is not None else state
        text, self._live.window = self._derenderer._detokenize_delta(tokenizer, delta_token_ids, window, **how)
        return text, self._live.window

    def _resolve_chat_template_kwargs(self, chat_request: Any) -> Any:
        # For making a parser, and there is one.
        return {} if self._known else self._derenderer._resolve_chat_template_kwargs(chat_request)


def _note(live: Live, state: Any) -> None:
    """What a replay has consumed."""
    start = 0
    for length in state.output_chunk_lens:
        live.consume(state.output_token_ids[start : start + length])
        start += length


def _told(method: Callable[..., Awaitable[tuple[Any, Any]]]) -> Callable[..., Awaitable[tuple[Any, Any]]]:
    """vLLM's method, of which a route that asks for it learns what it was asked and what the new state is."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def told(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = CALL.get()
        if call is not None and call.keep and call.state is None:
            call.asked = dict(signature.bind(*args, **kwargs).arguments)
        answer = await method(*args, **kwargs)
        if call is not None:
            call.answered = answer[1]
        return answer

    return told


def _is_known(kind: type) -> bool:
    """Whether this vLLM replays in the way that is cut short here: 0.32 does, 0.30 has no parsed streams at all."""
    run, window = getattr(kind, _PARSED, None), getattr(kind, "_detokenize_delta", None)
    if run is None or window is None or not hasattr(theirs, "_resolve_logprobs"):
        return False
    return (
        tuple(inspect.signature(run).parameters) == _PARSED_TAKES
        and set(inspect.signature(window).parameters) >= _WINDOW_TAKES
    )


def install(
    derenderer: Any, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
) -> LinearDerender:
    """Makes one ``OnlineDerenderer`` linear. Once each; others in the process stay as they are.

    Args:
        derenderer: vLLM's, as in ``app.state.online_derenderer``.
        limits: what is held at most.
        clock: seconds, for ages.
    """
    return LinearDerender(derenderer, limits or Limits(), clock)
