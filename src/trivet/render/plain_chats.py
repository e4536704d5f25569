"""Chats of roles and texts, put together from what their messages came to in earlier turns.

Where a chat template is separable (``trivet.render.separable``) each message has a text of its own. Where such a text
begins with a token at which texts are cut and over whose beginning no other reaches (``Rules.joins_at``), its ids are
its own as well. So of a conversation that grows only what is new is rendered and tokenized; of the rest the texts are
kept, and the ids as they are written in JSON.

What a template is given beside the messages is not worked out here: the first chat of its kind goes vLLM's own way, is
looked at there, and the text that comes of it is compared.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from operator import attrgetter, itemgetter
from typing import Any, overload

import orjson
from transformers.utils import chat_template_utils
from vllm.renderers import hf

from trivet.render.separable import Inseparable, Separable
from trivet.render.tokenizing import PromptTokenizer

logger = logging.getLogger(__name__)

ROLES = frozenset(("system", "user", "assistant"))
"""Roles of messages that are nothing but a role and a text."""
_SIMPLE = (str, int, bool, type(None))
_FRAMES = 256
_ENTRY_BYTES = 512
"""Of what is kept, beside its characters and bytes."""
_CHANCES = 1000
"""So many pieces are moved at most when room is made, as the event loop waits for it."""
_LOOKING = threading.Lock()
"""Never waited for."""


class WrittenIds(Sequence[int]):
    """Token ids as JSON writes them. Numbers are made of them when somebody looks."""

    __slots__ = ("_length", "_made", "_parts")

    def __init__(self, parts: Sequence[bytes], length: int) -> None:
        self._parts, self._length = parts, length
        self._made: list[int] | None = None

    def json(self) -> bytes:
        """As a list."""
        return b"[" + b",".join(self._parts) + b"]"

    def _ids(self) -> list[int]:
        if self._made is None:
            self._made = orjson.loads(self.json())
        return self._made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids())

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: int | slice) -> int | list[int]:
        return self._ids()[key]


class PlainMessages(list[dict[str, str]]):
    """Messages that are a role and a text each, looked at, and that nobody changes any more."""

    __slots__ = ("characters", "contents", "roles")

    def __init__(self, messages: list[dict[str, str]], roles: list[str], contents: list[str]) -> None:
        super().__init__(messages)
        self.roles, self.contents = roles, contents
        self.characters = sum(map(len, contents))
        """Of all texts."""


_role, _content = itemgetter("role"), itemgetter("content")


def looked_at(messages: Any) -> PlainMessages | None:
    """A chat's messages, if they are a role and a text each, and nothing else."""
    if type(messages) is PlainMessages:
        return messages
    if (
        type(messages) is not list
        or not messages
        or set(map(type, messages)) != {dict}
        or set(map(len, messages)) != {2}
    ):
        return None
    try:
        roles, contents = list(map(_role, messages)), list(map(_content, messages))
    except KeyError:
        return None
    if set(map(type, roles)) != {str} or set(map(type, contents)) != {str} or not ROLES.issuperset(roles):
        return None
    return PlainMessages(messages, roles, contents)


@dataclass(slots=True, eq=False)
class _Piece:
    text: str
    written: bytes | None
    """Its ids, between the brackets; None if they are not its own."""
    length: int
    """How many ids."""
    size: int
    """Bytes, with those of what it is kept by."""
    used: bool = False
    """Since room was made last."""


@dataclass(slots=True, eq=False)
class _Head:
    """What chats with one first message have in common."""

    number: int
    first: Any
    """That message, as the template has it."""
    before: _Piece
    behind: _Piece
    begin: int
    """The first message that has a piece."""
    size: int
    used: bool = False


_text, _written, _length = attrgetter("text"), attrgetter("written"), attrgetter("length")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What chats that are asked for in the same way have in common."""

    source: str
    template: Separable
    variables: Mapping[str, Any]
    content_format: Any
    number: int


class Prompt(str):
    """A chat's text, with its ids."""

    __slots__ = ("ids",)
    ids: WrittenIds


class PlainChats:
    """Plain chats of one renderer of vLLM's (``HfRenderer``). For several threads."""

    def __init__(self, renderer: Any, prompts: PromptTokenizer, capacity_bytes: int) -> None:
        """
        Args:
            renderer: as vLLM made it: its ``render_messages`` is vLLM's own way.
        """
        self._renderer, self._prompts, self._capacity = renderer, prompts, capacity_bytes
        self._render_messages = renderer.render_messages
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._numbers = 0
        self._generation = prompts.generation
        self._templates: dict[str, Separable | Inseparable] = {}
        self._frames: OrderedDict[Any, _Frame | None] = OrderedDict()
        self._expected: str | None = None
        self.found_characters = 0
        """Of texts whose ids were there; those that are made are counted where that is done (``CacheFigures``)."""

    @property
    def bytes(self) -> int:
        """Of all that is kept."""
        return self._bytes

    def expect(self, chat_template: str | None) -> None:
        """Looks at the template that most chats will have: the one that is served, or the tokenizer's."""
        tokenizer, config = self._renderer.tokenizer, self._renderer.model_config
        try:
            source = hf.resolve_chat_template(tokenizer, chat_template=chat_template, tools=None, model_config=config)
            if isinstance(source, str):
                self._expected = source
                self._separable(chat_template_utils._compile_jinja_template(source), source)
        except Inseparable:
            pass
        except Exception as error:  # a chat will tell
            logger.debug("the chat template is not known yet: %s", type(error).__name__)

    def told(self) -> str:
        """How the expected template is run, for people."""
        known = None if self._expected is None else self._templates.get(self._expected)
        if known is None:
            return "run whole: there is none"
        return f"run whole: {known}" if isinstance(known, Inseparable) else "run for new messages only"

    def render(self, messages: PlainMessages, params: Any, *, written: bool) -> str | None:
        """The text of a chat that was looked at; None where vLLM's way is to be gone.

        Args:
            params: vLLM's ``ChatParams``.
            written: ids are wanted as JSON, in a ``Prompt`` if there are any.
        """
        if (frame := self._frame(messages, params)) is None:
            return None
        if self._generation != self._prompts.generation:
            self._forget()
        try:
            pieces, made_characters = self._pieces(frame, messages)
        except Inseparable as why:
            self._give_up(frame, why)
            return None
        except Exception as error:  # the template's, for vLLM to tell; or ours, if vLLM has none
            logger.debug("a chat is left to vLLM: %s", type(error).__name__)
            return None
        if pieces is None:
            return None
        text = "".join(map(_text, pieces))
        parts = list(map(_written, pieces)) if written else [None]
        if None in parts:
            return text
        with self._lock:
            self.found_characters += len(text) - made_characters
        prompt = Prompt(text)
        prompt.ids = WrittenIds(list(filter(None, parts)), sum(map(_length, pieces)))
        return prompt

    def parsed(self, messages: PlainMessages, params: Any) -> list[Any] | None:
        """The messages as the template has them; None where vLLM's way is to be gone."""
        frame = self._frame(messages, params)
        return None if frame is None else self._parsed(frame.content_format, messages)

    def _pieces(self, frame: _Frame, messages: PlainMessages) -> tuple[list[_Piece] | None, int]:
        """The pieces of a chat, those that are not there made now, and how many characters these have.

        None where vLLM's way is to be gone.

        Raises:
            Inseparable: it is not in pieces.
            Exception: whatever the template raises.
        """
        generation = self._prompts.generation
        named = (frame.number, messages.roles[0], messages.contents[0])
        head: _Head | None = self._kept.get(named)
        made_characters = 0
        if head is None:
            if (head := self._begun(generation, frame, named, messages)) is None:
                return None, 0
            made_characters = len(head.before.text) + len(head.behind.text)
        head.used = True
        keys = _keys(frame, head, messages)
        found: list[Any] = list(map(self._kept.get, keys))
        for piece in found:
            if piece is not None:
                piece.used = True
        if None not in found:
            return [head.before, *found, head.behind], made_characters
        missing = [place for place, piece in enumerate(found, head.begin) if piece is None]
        parsed = self._parsed(frame.content_format, [messages[place] for place in missing])
        if parsed is None:
            return None, 0
        whole: list[Any] = [head.first, *[None] * (len(messages) - 1)]
        for place, one in zip(missing, parsed, strict=True):
            whole[place] = one
        texts = frame.template.run(frame.variables, whole, missing).texts
        made = {}
        for place, piece in zip(missing, self._made(texts), strict=True):
            piece.size += _size(messages.contents[place])
            made[keys[place - head.begin]] = found[place - head.begin] = piece
        self._keep(generation, made)
        return [head.before, *found, head.behind], made_characters + sum(map(len, texts))

    def _begun(self, generation: int, frame: _Frame, named: Any, messages: PlainMessages) -> _Head | None:
        """What chats with this first message have in common; None where vLLM's way is to be gone.

        Raises:
            Inseparable: it is not in pieces.
            Exception: whatever the template raises.
        """
        if (parsed := self._parsed(frame.content_format, messages[:1])) is None:
            return None
        run = frame.template.run(frame.variables, [*parsed, *[None] * (len(messages) - 1)], ())
        before, behind = self._made((run.before, run.behind))
        size = before.size + behind.size + _size(messages.contents[0])
        head = _Head(self._number(), parsed[0], before, behind, run.begin, size)
        self._keep(generation, {named: head})
        return head

    def _made(self, texts: Sequence[str]) -> list[_Piece]:
        pieces = []
        for text, ids in zip(texts, self._prompts.ids_of_parts(texts), strict=True):
            written = b"" if not text else None if ids is None else orjson.dumps(ids)[1:-1]
            size = (1 if text.isascii() else 4) * len(text) + len(written or b"")
            pieces.append(_Piece(text, written, len(ids or ()), size))
        return pieces

    def _parsed(self, content_format: Any, messages: Sequence[dict[str, str]]) -> list[Any] | None:
        """As the template is given them; None if they are not one for one."""
        parsed: list[Any] = hf.parse_chat_messages(list(messages), self._renderer.model_config, content_format)[0]
        alike = len(parsed) == len(messages) and all(
            one["role"] == message["role"] for one, message in zip(parsed, messages, strict=True)
        )
        return parsed if alike else None

    def _number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def _keep(self, generation: int, made: Mapping[Any, _Piece | _Head]) -> None:
        with self._lock:
            for key, one in made.items():
                if key in self._kept or one.size > self._capacity or generation != self._prompts.generation:
                    continue
                self._kept[key] = one
                self._bytes += one.size
            chances = _CHANCES
            while self._bytes > self._capacity:
                key, oldest = self._kept.popitem(last=False)
                if oldest.used and chances:  # a second chance, instead of an order that is kept at each look
                    oldest.used, chances = False, chances - 1
                    self._kept[key] = oldest
                else:
                    self._bytes -= oldest.size

    def _forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self._bytes = 0
            self._generation = self._prompts.generation

    # -- what a template is given --------------------------------------------------------------------------------------

    def _frame(self, messages: PlainMessages, params: Any) -> _Frame | None:
        if params.media_io_kwargs or params.mm_processor_kwargs:
            return None
        given = params.chat_template_kwargs
        for value in given.values():
            if type(value) not in _SIMPLE:
                return None
        key = (
            params.chat_template,
            params.chat_template_content_format,
            tuple(given.items()),
            tuple(map(type, given.values())),
        )
        with self._lock:
            if key in self._frames:
                self._frames.move_to_end(key)
                return self._frames[key]
        frame = None
        try:
            frame = self._looked_at(messages, params)
        except Inseparable as why:
            self._tell(why)
        except Exception as error:  # a chat that the template refuses: the next one may tell
            logger.debug("a chat template is not known yet: %s", type(error).__name__)
            return None
        with self._lock:
            self._frames[key] = frame
            while len(self._frames) > _FRAMES:
                self._frames.popitem(last=False)
        return frame

    def _tell(self, why: Inseparable) -> None:
        logger.info("a chat template is run whole at each turn: %s", why)

    def _looked_at(self, messages: PlainMessages, params: Any) -> _Frame | None:
        """Renders a chat in vLLM's way, and sees what its template is given.

        Raises:
            Inseparable: it is to be run whole.
            Exception: whatever vLLM or the template raises.
        """
        if params.chat_template_kwargs.get("continue_final_message") or params.chat_template_kwargs.get("tokenize"):
            return None
        renderer = self._renderer
        tokenizer, config = renderer.get_tokenizer(), renderer.model_config
        content_format = hf.resolve_chat_template_content_format(
            chat_template=params.chat_template,
            tools=None,
            given_format=params.chat_template_content_format,
            tokenizer=tokenizer,
            model_config=config,
        )
        source = hf.resolve_chat_template(
            tokenizer, chat_template=params.chat_template, tools=None, model_config=config
        )
        if not isinstance(source, str):
            raise Inseparable("there is none")
        compiled = chat_template_utils._compile_jinja_template(source)
        template = self._separable(compiled, source)
        (conversation, prompt), calls = _calls(compiled, lambda: self._render_messages(list(messages), params))
        if len(calls) != 1 or prompt.keys() != {"prompt"} or type(prompt["prompt"]) is not str:
            raise Inseparable("it is not run as expected")
        variables = dict(calls[0])
        if variables.pop("messages", None) != conversation or any(
            type(value) not in _SIMPLE for value in variables.values()
        ):
            raise Inseparable("it is given more than is known here")
        if self._parsed(content_format, messages) != conversation:
            raise ValueError("a message that is not understood by itself")  # another chat will tell
        try:
            run = template.run(variables, conversation, range(len(conversation)))
        except Exception as error:  # vLLM's way raised none
            refusal = error if isinstance(error, Inseparable) else Inseparable("its pieces cannot be made")
            self._templates[source] = refusal
            raise refusal from error
        if run.before + "".join(run.texts) + run.behind != prompt["prompt"]:
            self._templates[source] = refusal = Inseparable("its pieces are not the whole")
            raise refusal
        return _Frame(source, template, variables, content_format, self._number())

    def _separable(self, compiled: Any, source: str) -> Separable:
        known = self._templates.get(source)
        if known is None:
            if len(self._templates) >= _FRAMES:
                self._templates = {name: one for name, one in self._templates.items() if name == self._expected}
            try:
                known = Separable(compiled, source)
            except Inseparable as why:
                known = why
            self._templates[source] = known
        if isinstance(known, Inseparable):
            raise known
        return known

    def _give_up(self, frame: _Frame, why: Inseparable) -> None:
        with self._lock:
            self._templates[frame.source] = why
            for key, known in self._frames.items():
                if known is not None and known.source == frame.source:
                    self._frames[key] = None
        self._tell(why)


def _keys(frame: _Frame, head: _Head, messages: PlainMessages) -> list[Any]:
    """By what pieces are kept: all that they depend on."""
    begin, places = head.begin, frame.template.places
    roles, contents = (
        (messages.roles[begin:], messages.contents[begin:]) if begin else (messages.roles, messages.contents)
    )
    if "index" in places or "index0" in places:
        keys: list[Any] = list(zip(repeat(head.number), roles, contents, count(), strict=False))
    else:
        keys = list(zip(repeat(head.number), roles, contents, repeat(None), strict=False))
        if "first" in places and keys:
            keys[0] = (*keys[0][:3], 0)
    if "last" in places and keys:
        keys[-1] = (*keys[-1], True)
    return keys


def _size(content: str) -> int:
    return _ENTRY_BYTES + (1 if content.isascii() else 4) * len(content)


def _calls(compiled: Any, call: Callable[[], Any]) -> tuple[Any, list[Mapping[str, Any]]]:
    """What a call returns, and with what it ran a template on its way."""
    calls: list[Mapping[str, Any]] = []
    me = threading.get_ident()

    def render(*args: Any, **given: Any) -> Any:
        if threading.get_ident() == me:
            calls.append(given if not args else {})
        return theirs(*args, **given)

    if not _LOOKING.acquire(blocking=False):  # a request's template may hold it for ever
        raise BlockingIOError("another chat is looked at")
    try:
        theirs = compiled.render
        compiled.render = render
        try:
            return call(), calls
        finally:
            del compiled.render
    finally:
        _LOOKING.release()
