"""Asks render servers: a request's token ids by HTTP, and whether they are those that this gateway would make.

The endpoints are vLLM's (``vllm/entrypoints/scale_out/render``): ``POST /v1/chat/completions/render`` and the like take
the body of the endpoint above them and answer with a ``GenerateRequest``, or ``/v1/completions/render`` with a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from trivet.render.pool import UnusableError
from trivet.render.portable import CHAT, COMPLETIONS, MESSAGES, RESPONSES

_ANSWER_BYTES = 64 * 2**20
"""Longest answer that is read: ids of some million tokens."""
_HEALTH_S = 5.0
_CONNECT_S = 5.0
_TOLD_CHARS = 200


class Outcome(StrEnum):
    """How a server answered."""

    OK = "ok"
    REFUSED = "refused"
    """It blames the request."""
    UNFIT = "unfit"
    """There is more to the prompt than token ids, or too many of them."""
    BUSY = "busy"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    ERROR = "error"
    DENIED = "denied"
    """It does not know the key."""
    GARBAGE = "garbage"
    REPLACED = "replaced"
    """It ended meanwhile, so nothing says who has answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking a server once."""

    outcome: Outcome
    prompts: Sequence[list[int]] = ()
    """Token ids of each prompt, if it went well."""
    problem: str = ""
    """In words for a person, to stand behind the server's name."""


@dataclass(frozen=True, slots=True)
class Model:
    """What token ids must be like."""

    name: str
    """As clients ask for it."""
    longest_tokens: int
    highest_id: int


def open_session() -> aiohttp.ClientSession:
    """The HTTP session of a worker with its render servers.

    vLLM closes idle connections after 5 s (``VLLM_HTTP_TIMEOUT_KEEP_ALIVE``); ours are dropped earlier.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0, ttl_dns_cache=30)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**18)


class Asker:
    """Asks servers over one session."""

    def __init__(self, session: aiohttp.ClientSession, model: Model, api_key: str | None, timeout_s: float) -> None:
        self._session = session
        self._model = model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    async def render(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str], prompts: int | None = None
    ) -> Answer:
        """The token ids of a request's prompts, or why there are none. Cancelled, it closes the connection.

        Args:
            path: the endpoint whose request it is.
            prompts: how many there must be; None if any number will do.
        """
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(
                    f"{url}{path}/render", data=body, headers={**headers, **self._headers}, allow_redirects=False
                ) as response,
            ):
                whole = await _read(response)
                if response.status == 200:
                    return self._answer(path, whole, prompts)
                return _failure(response, whole)
        except TimeoutError:  # of the connection as well
            return Answer(Outcome.TIMEOUT, problem=f"gave no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientConnectionError, OSError) as error:
            return Answer(Outcome.UNREACHABLE, problem=f"cannot be reached ({_in_a_line(error)})")
        except (aiohttp.ClientError, ValueError) as error:
            return Answer(Outcome.GARBAGE, problem=f"gives no whole answer ({_in_a_line(error)})")

    async def check_health(self, url: str) -> None:
        """Looks whether a server says that it is well.

        Raises:
            UnusableError: it does not.
        """
        try:
            async with (
                asyncio.timeout(min(_HEALTH_S, self._timeout_s)),
                self._session.get(f"{url}/health", headers=self._headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise UnusableError(f"answers /health with {response.status}")
        except TimeoutError:
            raise UnusableError("does not answer /health") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnusableError(f"cannot be reached ({_in_a_line(error)})") from None

    def _answer(self, path: str, whole: bytes | None, prompts: int | None) -> Answer:
        parsed = prompts_of(path, whole)
        if parsed is None:
            return Answer(Outcome.GARBAGE, problem="answers without token ids")
        if prompts is not None and len(parsed) != prompts:
            return Answer(Outcome.GARBAGE, problem=f"renders {len(parsed)} prompt(s) of {prompts}")
        if any(max(one.token_ids) > self._model.highest_id for one in parsed):
            return Answer(Outcome.GARBAGE, problem="answers with token ids that the model does not have")
        if any(one.features is not None or len(one.token_ids) > self._model.longest_tokens for one in parsed):
            return Answer(Outcome.UNFIT)
        return Answer(Outcome.OK, [one.token_ids for one in parsed])


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    features: Any


def prompts_of(path: str, whole: bytes | None) -> list[_Prompt] | None:
    """The prompts in the answer of a render endpoint; None if that is none."""
    try:
        value = orjson.loads(whole or b"")
    except orjson.JSONDecodeError:
        return None
    entries = value if path == COMPLETIONS else [value]
    if not isinstance(entries, list) or not entries:
        return None
    prompts = []
    for entry in entries:
        ids = entry.get("token_ids") if isinstance(entry, dict) else None
        if not isinstance(ids, list) or set(map(type, ids)) != {int} or min(ids) < 0:
            return None
        prompts.append(_Prompt(ids, entry.get("features")))
    return prompts


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """The whole answer; None if it is longer than any could be."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _ANSWER_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def _failure(response: aiohttp.ClientResponse, whole: bytes | None) -> Answer:
    status = response.status
    problem = f"answers {status}{_told(whole)}"
    if status == 429 or (status == 503 and "Retry-After" in response.headers):
        return Answer(Outcome.BUSY, problem=problem)
    if status in (401, 403):
        return Answer(Outcome.DENIED, problem=problem)
    if 400 <= status < 500:
        return Answer(Outcome.REFUSED, problem=problem)
    return Answer(Outcome.ERROR if status >= 500 else Outcome.GARBAGE, problem=problem)


def _told(whole: bytes | None) -> str:
    """The message in an error, to stand behind its status."""
    try:
        value = orjson.loads(whole or b"")
    except orjson.JSONDecodeError:
        return ""
    told = value.get("error", value.get("detail")) if isinstance(value, dict) else None
    message = told.get("message") if isinstance(told, dict) else told
    return f" ({' '.join(message.split())[:_TOLD_CHARS]})" if isinstance(message, str) and message else ""


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_TOLD_CHARS] or type(error).__name__


# canaries


@dataclass(frozen=True, slots=True)
class Canary:
    """A request whose token ids both sides make, so that they can be compared."""

    name: str
    """In words for a person."""
    path: str
    body: bytes


_WORDS = "Grüße, 世界! 👋🏽\n\n  (1 + 2) == 3;\t<s>[INST] <|im_end|> don't"
"""Where tokenizers differ: accents, other scripts, emoji of several code points, white space, words of templates."""
_TOOL = {
    "name": "look_up",
    "description": "Looks a city's weather up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def canaries_of(model: str) -> list[Canary]:
    """One canary for each way in which a prompt is made."""
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _WORDS}]
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    turns = [*talk, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": parts}]
    tools = [{"type": "function", "function": _TOOL}]
    bodies: Sequence[tuple[str, str, Mapping[str, Any]]] = (
        ("a chat", CHAT, {"messages": talk}),
        ("a chat of several turns", CHAT, {"messages": turns}),
        ("a chat with a tool", CHAT, {"messages": talk, "tools": tools}),
        ("a chat with a tool that is not to be used", CHAT, {"messages": talk, "tools": tools, "tool_choice": "none"}),
        ("a completion of two prompts", COMPLETIONS, {"prompt": [_WORDS, " Once"]}),
        ("a message", MESSAGES, {"system": "Be brief.", "messages": talk[1:], "max_tokens": 1}),
        ("a response", RESPONSES, {"instructions": "Be brief.", "input": _WORDS}),
    )
    return [Canary(name, path, orjson.dumps({"model": model, **body})) for name, path, body in bodies]


Locally = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Has this worker's own front end render a request: path of the endpoint and body to status and answer."""


class Inspector:
    """Looks at servers; see ``pool.Inspect``."""

    def __init__(self, asker: Asker, locally: Locally, canaries: Sequence[Canary]) -> None:
        self._asker = asker
        self._locally = locally
        self._canaries = canaries
        self.proven: frozenset[str] = frozenset()
        """Endpoints of which something could be rendered here, and was compared."""

    @contextlib.asynccontextmanager
    async def __call__(self, url: str) -> AsyncIterator[_Watched]:
        """Comes to a server. The connection that is held says nothing: when it ends, the process at its end has.

        Raises:
            UnusableError: it is not there.
        """
        parts = urlsplit(url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, parts.port or (443 if secure else 80), ssl=secure
                )
        except TimeoutError:
            raise UnusableError("cannot be reached (no connection in time)") from None
        except OSError as error:
            raise UnusableError(f"cannot be reached ({_in_a_line(error)})") from None
        try:
            yield _Watched(self, url, reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.wait_closed()

    async def check(self, url: str) -> None:
        """See ``pool.Visit.check``."""
        await self._asker.check_health(url)
        proven = set()
        for canary in self._canaries:
            for again in (True, False):
                is_proven, difference = await self._compare(url, canary)
                if difference is None:
                    break
                if not again:  # the date in a template may have changed between the two
                    raise UnusableError(difference, other_ids=True)
            if is_proven:
                proven.add(canary.path)
        self.proven = frozenset(proven)

    async def _compare(self, url: str, canary: Canary) -> tuple[bool, str | None]:
        """Whether both sides rendered a canary; and how they differ.

        Raises:
            UnusableError: the server does not render.
        """
        theirs = await self._asker.render(url, canary.path, canary.body, {"Content-Type": "application/json"})
        if theirs.outcome not in (Outcome.OK, Outcome.REFUSED, Outcome.UNFIT):
            raise UnusableError(theirs.problem)
        status, whole = await self._locally(canary.path, canary.body)
        ours = prompts_of(canary.path, whole) if status == 200 else None
        if ours is None:
            if theirs.outcome is Outcome.REFUSED:
                return False, None
            return False, f"renders {canary.name}, which this gateway answers with {status}{_told(whole)}"
        if theirs.outcome is not Outcome.OK:
            what = theirs.problem or "answers with other than token ids"
            return False, f"{what} to {canary.name}, which this gateway renders"
        return True, _difference(canary, [one.token_ids for one in ours], theirs.prompts)


def _difference(canary: Canary, ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> str | None:
    if list(ours) == list(theirs):
        return None
    mine, other = next(
        ((mine, other) for mine, other in zip(ours, theirs, strict=False) if mine != other), (ours[-1], [])
    )
    same = next((place for place, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
    where = f"from token {same + 1} on" if same is not None else "by its length"
    return (
        f"makes other token ids of {canary.name} ({len(other)} where this gateway makes {len(mine)}, different {where})"
        ": its model, tokenizer, chat template, flags or vLLM are others"
    )


class _Watched:
    """See ``pool.Visit``."""

    def __init__(self, inspector: Inspector, url: str, reader: asyncio.StreamReader) -> None:
        self._inspector = inspector
        self._url = url
        self._reader = reader

    async def check(self) -> None:
        await self._inspector.check(self._url)

    async def gone(self) -> None:
        with contextlib.suppress(OSError):
            while await self._reader.read(2**12):
                pass

    def is_there(self) -> bool:
        return not self._reader.at_eof() and self._reader.exception() is None
