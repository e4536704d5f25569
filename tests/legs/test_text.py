"""A client's request as legs of the text plane send it, and what of an answer is read or changed."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines import (
    DONE,
    HANDED_OVER,
    FakeEngine,
    cutting,
    hanging,
    json_answer,
    raw_answer,
    refusing,
    sse,
    streaming,
)
from trivet.journal import GenerationRecord
from trivet.legs import text
from trivet.legs.ask import Computed, Leg
from trivet.legs.text import TextAsk, TextPiece
from trivet.legs.text_bodies import CHAT, COMPLETIONS, prefill_text_body, why_unsplittable, with_field
from trivet.legs.wire import LegError, open_session
from trivet.routing.engines import EngineView
from trivet.surface.streams import MESSAGES, RESPONSES
from trivet.surface.usage import Usage

PARAMS = {"do_remote_decode": True}

# the decode leg's body: the client's, byte for byte, and one field more

WORDS = st.text('{}[],:"\\ \n\té\U0001f600a', max_size=8)
NUMBERS = st.integers() | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.dictionaries(WORDS, st.integers(-(2**63), 2**63) | WORDS | st.lists(st.integers(0, 99)), max_size=4)
OBJECTS = st.dictionaries(st.text(max_size=6) | st.sampled_from(["kv_transfer_params", "}", "{"]), VALUES, max_size=5)
SPACE = st.text(" \t\r\n", max_size=3)


@st.composite
def written(draw) -> bytes:
    """An object as somebody may have written it."""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
    indent = draw(st.sampled_from([None, 0, 2]))
    raw = json.dumps(draw(OBJECTS), separators=separators, indent=indent, ensure_ascii=draw(st.booleans()))
    inside = draw(SPACE) if raw == "{}" else ""
    return f"{draw(SPACE)}{raw[0]}{inside}{raw[1:]}{draw(SPACE)}".encode()


@given(written(), PARAMETERS)
def test_a_field_is_added_and_all_else_stays_byte_for_byte(raw, value):
    longer = with_field(raw, "kv_transfer_params", value)
    assert json.loads(longer) == {**json.loads(raw), "kv_transfer_params": value}
    end = raw.rindex(b"}")
    assert longer.startswith(raw[:end])
    assert longer.endswith(raw[end:])
    added = longer[end : len(longer) - len(raw[end:])]
    assert added.removeprefix(b",").startswith(b'"kv_transfer_params":')


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"{}", b'{"a":1}'),
        (b" { } \n", b' { "a":1} \n'),
        (b'{"b":{}}', b'{"b":{},"a":1}'),
        (b'{"b":"}{"}', b'{"b":"}{","a":1}'),
        (b'{"b":"{"}\n', b'{"b":"{","a":1}\n'),
        (b'{"a":0}', b'{"a":0,"a":1}'),
    ],
)
def test_where_the_field_stands(raw, expected):
    assert with_field(raw, "a", 1) == expected


def test_a_client_cannot_say_the_field_itself():
    """Of a name that is there twice the last one counts."""
    raw = b'{"kv_transfer_params": {"remote_host": "evil"}, "kv_transfer_params": 1}'
    assert json.loads(with_field(raw, "kv_transfer_params", PARAMS)) == {"kv_transfer_params": PARAMS}


# the prefill leg's body

GONE = (
    "stream_options", "logprobs", "logprob_token_ids", "top_logprobs", "prompt_logprobs", "prompt_logprob_token_ids",
    "echo", "best_of", "use_beam_search", "return_token_ids",
)  # fmt: skip
SET = {"stream": False, "n": 1, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": PARAMS}


@given(
    st.dictionaries(
        st.sampled_from([*GONE, *SET, "messages", "prompt", "tools", "response_format", "max_completion_tokens", "x"]),
        VALUES,
    )
)
def test_the_prefill_leg_has_the_prompt_as_it_is_and_one_token(body):
    before = json.dumps(body)
    rewritten = prefill_text_body(CHAT, body, PARAMS)
    assert json.dumps(body) == before
    kept = {name: value for name, value in body.items() if name not in (*GONE, *SET)}
    if "max_completion_tokens" in body:
        kept["max_completion_tokens"] = 1
    assert rewritten == {**kept, **SET}


def test_the_prefill_leg_of_a_response_has_its_own_limit_and_stores_nothing():
    body = {
        "input": "Hi", "instructions": "Be brief.", "tools": [{"type": "function"}], "text": {"format": {}}, "seed": 1,
        "max_output_tokens": 9, "stream": True, "store": True, "stop": ["x"], "stop_token_ids": [5], "top_logprobs": 3,
        "include": ["message.output_text.logprobs"], "enable_response_messages": True,
    }  # fmt: skip
    assert prefill_text_body(RESPONSES, body, PARAMS) == {
        **{name: body[name] for name in ("input", "instructions", "tools", "text", "seed")},
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
        "ignore_eos": True,
        "kv_transfer_params": PARAMS,
    }


@pytest.mark.parametrize("kind", ["enabled", "disabled", "adaptive"])
def test_the_prefill_leg_of_messages_keeps_of_thinking_what_the_prompt_shows(kind):
    """A budget must be below ``max_tokens``, which is 1 there."""
    thinking = {"type": kind} | ({"budget_tokens": 2048} if kind == "enabled" else {})
    body = {"messages": [], "system": "x", "max_tokens": 4096, "stop_sequences": ["a"], "thinking": thinking}
    kept = {} if kind == "enabled" else {"thinking": thinking}
    expected = {"messages": [], "system": "x", "max_tokens": 1, "stream": False, "kv_transfer_params": None, **kept}
    assert prefill_text_body(MESSAGES, body, None) == expected


# what is not split


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
        (
            CHAT,
            {"n": 1, "best_of": None, "logprobs": True, "top_logprobs": 3, "stream": True, "use_beam_search": False},
        ),
        (COMPLETIONS, {"prompt": "Hi", "echo": True}),
        (COMPLETIONS, {"prompt": ["Hi"], "echo": False, "logprobs": 1}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": [[1, 2, 3]]}),
        (COMPLETIONS, {"prompt": [1]}),
        (COMPLETIONS, {}),
        (RESPONSES, {"input": "Hi", "stream": True, "truncation": "disabled", "store": True, "background": False}),
        (RESPONSES, {"input": [], "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}),
        (MESSAGES, {"messages": [{"role": "user", "content": "Hi"}], "tool_choice": {"type": "any"}, "max_tokens": 9}),
        (MESSAGES, {"messages": ["x", {"content": [{"type": "tool_use", "id": "a"}, 1]}], "tool_choice": "odd"}),
    ],
)
def test_a_plain_request_is_split(path, body):
    assert why_unsplittable(path, body) is None


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/cohere/v2/chat", {"message": "Hi"}, "/cohere/v2/chat is not split"),
        (RESPONSES, [], "no JSON object"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "stored response"),
        (RESPONSES, {"background": True}, "stored response"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"truncation": None}, "truncation"),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "web_search_preview"}]}, "calls by itself"),
        (RESPONSES, {"tools": ["x"]}, "calls by itself"),
        (RESPONSES, {"kv_transfer_params": {}}, "steers the transfer"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, "a forced tool call"),
        (MESSAGES, {"messages": [{"content": [{"type": "tool_use", "name": "f"}]}]}, "a tool call without an id"),
        (CHAT, None, "no JSON object"),
        (CHAT, [], "no JSON object"),
        (CHAT, "x", "no JSON object"),
        (CHAT, {"n": 2}, "n above 1"),
        (CHAT, {"n": "x"}, "n above 1"),
        (COMPLETIONS, {"best_of": 3}, "best_of above 1"),
        (COMPLETIONS, {"use_beam_search": True}, "beam search"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "log-probabilities of the prompt"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "log-probabilities of the prompt"),
        (CHAT, {"echo": True}, "log-probabilities of the prompt"),
        (COMPLETIONS, {"prompt_logprob_token_ids": [1]}, "log-probabilities of the prompt"),
        (CHAT, {"truncate_prompt_tokens": -1}, "truncation"),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 5}, "truncation"),
        (COMPLETIONS, {"prompt_embeds": "x"}, "prompt embeddings"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "several prompts"),
        (CHAT, {"kv_transfer_params": {}}, "steers the transfer"),
    ],
)
def test_what_one_handover_cannot_carry_is_served_colocated(path, body, word):
    assert word in why_unsplittable(path, body)
    assert TextAsk(path, b"", body, {}, None).unsplittable == why_unsplittable(path, body)


# what it says of itself


def ask_of(path: str = CHAT, body: object = None, **headers: str) -> TextAsk:
    body = {"messages": []} if body is None else body
    return TextAsk(path, json.dumps(body).encode(), body, headers, None)


def test_ids_are_the_services_own():
    assert ask_of().request_id != ask_of().request_id
    leg = Leg("decode", EngineView("e", "decode", "http://x", True), "id-1-decode", None, {})
    assert ask_of(CHAT).engine_id(leg) == "chatcmpl-id-1-decode"
    assert ask_of(COMPLETIONS).engine_id(leg) == "cmpl-id-1-decode-0"
    assert ask_of(MESSAGES).engine_id(leg) == "chatcmpl-id-1-decode"
    assert ask_of(RESPONSES).engine_id(leg) == "resp_id-1-decode_0"
    assert ask_of("/cohere/v2/chat").engine_id(leg) == "id-1-decode"


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "tokens"),
    [
        ({"prompt": [1, 2, 3], "max_tokens": 7}, 3, 10),
        ({"prompt": [1, 2, 3], "max_tokens": 7, "max_completion_tokens": 9}, 3, 12),
        ({"prompt": [1, 2, 3], "max_tokens": "x"}, 3, 3),
        ({"prompt": [], "max_tokens": None}, 8, 8),
        ({}, 1, 1),
        (5, 1, 1),
    ],
)
def test_tokens_are_estimated(body, prompt_tokens, tokens):
    ask = ask_of(COMPLETIONS, body)
    assert (ask.prompt_tokens, ask.tokens) == (prompt_tokens, tokens)


@given(
    st.recursive(VALUES, lambda inner: st.dictionaries(st.sampled_from(["prompt", "max_tokens", "n", "echo"]), inner))
)
def test_absurd_bodies_are_estimated_too(body):
    ask = ask_of(COMPLETIONS, body)
    assert ask.prompt_tokens >= 0
    assert isinstance(ask.tokens, int)


def test_an_answer_of_which_something_was_seen_cannot_be_continued():
    ask, record = ask_of(), GenerationRecord("gen", 3, 0.0)
    assert (ask.begun, ask.may_take_first_token) == (False, False)
    ask.note(record, TextPiece(b"x", {}))
    assert ask.begun
    assert ask.obstacle is not None


def test_an_answer_that_comes_whole_does_not_tell_when_its_first_token_was_made():
    ask, record = ask_of(), GenerationRecord("gen", 3, 0.0)
    ask.note(record, TextPiece(b"{}", tokens=30, finish_reason="stop"))
    assert (record.first_token_s, record.completion_tokens) == (None, 30)
    assert record.end_s is not None


def test_a_record_is_written_as_pieces_come():
    ask, record = ask_of(body={"messages": [], "stream": True}), GenerationRecord("gen", 3, 0.0)
    ask.note(record, TextPiece(b"", {}))
    assert record.first_token_s is None
    ask.note(record, TextPiece(b"", tokens=1))
    ask.note(record, TextPiece(b"", tokens=1, finish_reason="stop"))
    assert (record.completion_tokens, record.finish_reason) == (2, "stop")
    assert record.first_token_s <= record.end_s
    ask.note(record, TextPiece(b"", usage=Usage(9, 5, 4)))
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (9, 5, 4)


@given(VALUES)
def test_usage_is_read_or_left(value):
    usage = Usage.parse(value)
    assert usage is None or isinstance(usage.prompt_tokens, int)


# over HTTP


@pytest.fixture
async def engine():
    async with FakeEngine("decode-0", "decode") as engine:
        yield engine


@pytest.fixture
async def session():
    async with open_session() as session:
        yield session


@pytest.fixture
def leg(engine, session):
    def make(role: str = "decode") -> Leg:
        headers = {"X-Request-Id": f"id-1-{role}", "Content-Type": "application/json"}
        return Leg(role, engine.view(), f"id-1-{role}", session, headers)

    return make


async def decoded(ask: TextAsk, leg: Leg, params=None, cached: int | None = None) -> list[TextPiece]:
    computed = None if cached is None else Computed(leg.engine, cached)
    return [one async for one in ask.decode(leg, params, computed, lambda: None)]


def delta(content: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "choices": [choice], **more}


async def test_the_prefill_leg(engine, leg):
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    engine.replies = [json_answer({"choices": [], "usage": usage, "kv_transfer_params": HANDED_OVER})]
    body = {"messages": [], "stream": True, "max_tokens": 99}
    prefilled = await ask_of(body=body).prefill(leg("prefill"), PARAMS, sample=True)
    assert (prefilled.kv_transfer_params, prefilled.cached_tokens, prefilled.first) == (HANDED_OVER, 4, None)
    assert engine.calls[0].path == CHAT
    assert engine.calls[0].body == {"messages": [], **SET}


@pytest.mark.parametrize(
    "answer", [{"usage": 5}, {"usage": {"prompt_tokens_details": [1]}}, {"kv_transfer_params": "x"}]
)
async def test_a_prefill_leg_of_another_form_is_a_fault(engine, leg, answer):
    engine.replies = [json_answer(answer)]
    with pytest.raises(LegError, match="sent what cannot be read"):
        await ask_of().prefill(leg("prefill"), PARAMS, sample=False)


async def test_the_decode_leg_is_the_clients_bytes(engine, leg):
    engine.replies = [json_answer({"choices": []})]
    raw = b' {"messages":[ ],  "n" : 1e0, "x":"\\u00e9\xc3\xa9" }\n'
    ask = TextAsk(CHAT, raw, json.loads(raw), {}, None)
    await decoded(ask, leg())
    await decoded(ask, leg(), {"remote_port": 1})
    assert engine.calls[0].raw == raw
    assert engine.calls[1].raw == raw[:-2] + b',"kv_transfer_params":{"remote_port":1}}\n'


STREAM = sse(delta("a")) + b": keep-alive\n\n" + sse(delta("\u00e9\U0001f600", "stop")) + DONE


async def test_a_stream_is_passed_on_byte_for_byte(engine, leg):
    engine.replies = [streaming(STREAM)]
    pieces = await decoded(ask_of(), leg())
    assert b"".join(one.body for one in pieces) == STREAM
    assert [one.tokens for one in pieces] == [1, 0, 1, 0]
    assert [one.finish_reason for one in pieces] == [None, None, "stop", None]
    assert pieces[0].head["content-type"] == "text/event-stream"
    assert [one.head for one in pieces[1:]] == [None] * 3


async def test_who_speaks_is_no_token(engine, leg):
    """vLLM says it in an event of its own, before there is a token."""
    choices = [{"index": n, "delta": {"role": "assistant", "content": ""}, "finish_reason": None} for n in (0, 1)]
    said = {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}
    ended = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    events = [{"choices": choices[:1]}, {"choices": choices}, {"choices": [said]}, {"choices": [ended]}]
    engine.replies = [streaming(*events, DONE)]
    assert [one.tokens for one in await decoded(ask_of(), leg())] == [0, 0, 1, 1, 0]


async def test_a_stream_may_be_cut_anywhere(engine, leg):
    engine.replies = [streaming(*(STREAM[at : at + 1] for at in range(len(STREAM))))]
    pieces = await decoded(ask_of(), leg())
    assert b"".join(one.body for one in pieces) == STREAM
    assert len(pieces) == 4


async def test_each_event_is_given_as_soon_as_it_is_there(engine, leg):
    more = asyncio.Event()
    engine.replies = [streaming(delta("a"), more, DONE)]
    pieces = ask_of().decode(leg(), None, None, lambda: None)
    assert (await anext(pieces)).body == sse(delta("a"))
    more.set()
    assert [one.body async for one in pieces] == [DONE]


async def test_a_whole_answer_is_passed_on_byte_for_byte(engine, leg):
    content = (
        b'{ "choices" : [{"finish_reason": "stop", "x": 1e0}],\n"usage": {"prompt_tokens": 9, "completion_tokens": 4}}'
    )
    cors = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Credentials": "true", "Set-Cookie": "a=b"}
    engine.replies = [raw_answer(content, kind="application/json", Warning="199 - x", Server="engine", **cors)]
    (only,) = await decoded(ask_of(), leg(), {"remote_port": 1}, cached=3)
    assert (only.body, only.tokens, only.finish_reason) == (content, 4, "stop")
    assert only.usage == Usage(9, 4, None)
    assert only.head == {"content-type": "application/json", "warning": "199 - x"}


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}


@pytest.mark.parametrize(("cached", "told"), [(None, 8), (8, 8), (3, 3), (0, 0)])
async def test_cached_tokens_are_prefills(engine, leg, cached, told):
    """Decode takes what was handed over for cached."""
    event = {"choices": [], "usage": USAGE}
    engine.replies = [json_answer({"choices": [], "usage": USAGE}), streaming(sse(event), DONE)]
    (whole,) = await decoded(ask_of(), leg(), {}, cached)
    last, _ = await decoded(ask_of(), leg(), {}, cached)
    for said in (json.loads(whole.body), json.loads(last.body.removeprefix(b"data: "))):
        assert said["usage"] == {**USAGE, "prompt_tokens_details": {"cached_tokens": told}}
    assert (whole.usage, last.usage) == (Usage(9, 4, told),) * 2
    if told == 8:
        assert last.body == sse(event)


@pytest.mark.parametrize(
    "usage", [None, [], 5, {"prompt_tokens_details": [1]}, {"prompt_tokens": "x"}, {"completion_tokens": {}}]
)
async def test_usage_of_another_form_goes_on_as_it_is(engine, leg, usage):
    event = sse({"choices": [], "usage": usage})
    engine.replies = [streaming(event, DONE), json_answer({"choices": [], "usage": usage})]
    record, ask = GenerationRecord("gen", 3, 0.0), ask_of()
    for expected in (event + DONE, json.dumps({"choices": [], "usage": usage}).encode()):
        pieces = await decoded(ask, leg(), {}, 3)
        assert b"".join(one.body for one in pieces) == expected
        for one in pieces:
            ask.note(record, one)
    assert record.prompt_tokens == 3


async def fault_of(ask: TextAsk, leg: Leg) -> tuple[list[bytes], LegError]:
    seen = []

    async def read() -> None:
        async for one in ask.decode(leg, None, None, lambda: None):
            seen.append(one.body)

    with pytest.raises(LegError) as caught:
        await read()
    return seen, caught.value


FIRST = sse(delta("a"))
FAULTS = {
    "error event": (sse({"error": {"message": "gone", "code": 500}}), "gone", 500, False),
    "error": (sse(delta("", "error")), "generating failed in the engine (finish_reason error)", 500, False),
    "abort": (sse(delta("", "abort")), "the engine ended the request (finish_reason abort)", None, True),
    "ends": (b"", "the stream ended before the answer did", 502, True),
    "half": (b'data: {"choi', "the stream ended before the answer did", 502, True),
    "no JSON": (b"data: {oops\n\n", "sent an event that is not JSON", 502, False),
}


@pytest.mark.parametrize(("rest", "problem", "status", "died"), FAULTS.values(), ids=FAULTS)
async def test_a_stream_that_does_not_end_well_is_a_fault(engine, leg, rest, problem, status, died):
    engine.replies = [streaming(FIRST, rest)]
    seen, error = await fault_of(ask_of(), leg())
    assert (seen, error.problem, error.status, error.died) == ([FIRST], problem, status, died)


@pytest.mark.parametrize("event", [[1], 5, "x", None, {"choices": 5}, {"choices": [1]}])
async def test_an_event_of_another_form_is_a_fault(engine, leg, event):
    engine.replies = [streaming(FIRST, sse(event), DONE)]
    _, error = await fault_of(ask_of(), leg())
    assert (error.status, error.problem.startswith("sent what cannot be read (")) == (502, True)


@pytest.mark.parametrize("path", ["/cohere/v2/chat", "/invocations"])
async def test_streams_of_which_nothing_is_known_end_where_they_end(engine, leg, path):
    stream = b'event: response.completed\ndata: {"type": "response.completed"}\n\n'
    engine.replies = [streaming(stream)]
    assert [one.body for one in await decoded(ask_of(path), leg())] == [stream]


def named(value: dict) -> bytes:
    return f"event: {value['type']}\n".encode() + sse(value)


CREATED = named({"type": "response.created", "response": {"status": "in_progress", "usage": None}})
IN_PROGRESS = named({"type": "response.in_progress", "response": {"status": "in_progress", "usage": None}})
SAYS = named({"type": "response.output_text.delta", "sequence_number": 2, "delta": "x"})
RESPONSE_USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0, "cached_tokens_per_turn": []},
    "output_tokens": 4,
    "total_tokens": 13,
}
MESSAGE_BEGINS = named({"type": "message_start", "message": {"id": "1", "usage": {"input_tokens": 9}}})
SAYS_IN_A_MESSAGE = named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}})
MESSAGE_ENDS = named({"type": "message_stop"})


def response_ends(status: str = "completed") -> bytes:
    return named({"type": "response.completed", "response": {"status": status, "usage": RESPONSE_USAGE}})


def message_delta(reason: str | None, **usage: int) -> bytes:
    usage = {"input_tokens": 1, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 0, **usage}
    return named({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage | {"output_tokens": 4}})


@pytest.mark.parametrize(("status", "finish"), [("completed", "stop"), ("incomplete", "length")])
async def test_a_response_is_streamed_with_its_own_events(engine, leg, status, finish):
    """What is written before anything was generated goes out with what was: until then another engine may be asked."""
    engine.replies = [streaming(CREATED, IN_PROGRESS, SAYS, SAYS, response_ends(status))]
    first, second, last = await decoded(ask_of(RESPONSES), leg())
    assert (first.body, second.body, last.body) == (CREATED + IN_PROGRESS + SAYS, SAYS, response_ends(status))
    assert [one.tokens for one in (first, second, last)] == [1, 1, 0]
    assert (last.finish_reason, last.usage) == (finish, Usage(9, 4, 8))
    assert first.head["content-type"].startswith("text/event-stream")


async def test_messages_are_streamed_with_their_own_events(engine, leg):
    more = SAYS_IN_A_MESSAGE.replace(b"x", "\u00e9 \\\\".encode())
    engine.replies = [streaming(MESSAGE_BEGINS, SAYS_IN_A_MESSAGE, more, message_delta("tool_use"), MESSAGE_ENDS)]
    pieces = await decoded(ask_of(MESSAGES), leg())
    assert b"".join(one.body for one in pieces) == (
        MESSAGE_BEGINS + SAYS_IN_A_MESSAGE + more + message_delta("tool_use") + MESSAGE_ENDS
    )
    assert sum(one.tokens for one in pieces) == 2
    assert [one.finish_reason for one in pieces if one.finish_reason] == ["tool_calls"]
    assert pieces[-2].usage == Usage(9, 4, 8)


@pytest.mark.parametrize(
    ("path", "stream", "given", "problem"),
    [  # what opens a response is not given out alone
        (RESPONSES, [CREATED, IN_PROGRESS], 0, "the stream ended before the answer did"),
        (RESPONSES, [CREATED, SAYS], 1, "the stream ended before the answer did"),
        (RESPONSES, [CREATED, SAYS, response_ends("failed")], 1, "finish_reason error"),
        (RESPONSES, [CREATED, SAYS, response_ends("cancelled")], 1, "finish_reason abort"),
        (MESSAGES, [MESSAGE_BEGINS, SAYS_IN_A_MESSAGE, message_delta("end_turn")], 3, "the stream ended before"),
        (MESSAGES, [MESSAGE_BEGINS, SAYS_IN_A_MESSAGE, message_delta(None), MESSAGE_ENDS], 2, "finish_reason abort"),
        (MESSAGES, [named({"type": "error", "error": {"type": "internal_error", "message": "no KV"}})], 0, "no KV"),
    ],
)
async def test_an_answer_that_did_not_end_is_a_fault(engine, leg, path, stream, given, problem):
    engine.replies = [streaming(*stream)]
    pieces, error = await fault_of(ask_of(path), leg())
    assert problem in error.problem
    assert len(pieces) == given


@pytest.mark.parametrize(
    ("path", "answer", "finish"),
    [
        (RESPONSES, {"object": "response", "status": "incomplete", "usage": RESPONSE_USAGE}, "length"),
        (MESSAGES, {"type": "message", "stop_reason": "max_tokens", "usage": {
            "input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 4}}, "length"),
    ],
)  # fmt: skip
async def test_whole_answers_of_both_are_read(engine, leg, path, answer, finish):
    engine.replies = [json_answer(answer)]
    (only,) = await decoded(ask_of(path), leg())
    assert (only.finish_reason, only.usage, only.tokens) == (finish, Usage(9, 4, 8), 4)


@pytest.mark.parametrize("answer", [{"type": "message", "usage": {}}, {"type": "message", "stop_reason": None}])
async def test_a_message_that_its_engine_aborted_is_no_answer(engine, leg, answer):
    engine.replies = [json_answer(answer)]
    _, error = await fault_of(ask_of(MESSAGES), leg())
    assert (error.died, error.ended_by_abort) == (True, True)


async def test_what_prefill_had_cached_is_told_in_both_forms(engine, leg):
    """Decode takes all that was handed over for cached. ``input_tokens`` of messages leaves out what was."""
    engine.replies = [streaming(CREATED, SAYS, response_ends())]
    last = (await decoded(ask_of(RESPONSES), leg(), cached=2))[-1]
    assert (last.usage, last.body.startswith(b"event: response.completed\ndata: {")) == (Usage(9, 4, 2), True)
    engine.replies = [streaming(MESSAGE_BEGINS, message_delta("end_turn"), MESSAGE_ENDS)]
    engine.calls.clear()
    told = (await decoded(ask_of(MESSAGES), leg(), cached=2))[1]
    usage = json.loads(told.body.partition(b"data: ")[2])["usage"]
    assert told.body.startswith(b"event: message_delta\n")
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], told.usage) == (7, 2, Usage(9, 4, 2))


async def test_a_leg_of_a_response_has_its_id_in_its_body(engine, leg):
    """``/v1/responses`` takes none from a header, and nobody could abort it."""
    engine.replies = [json_answer({"object": "response", "status": "completed", "usage": RESPONSE_USAGE})]
    body = {"input": "Hi", "request_id": "mine"}
    prefilled = await ask_of(RESPONSES, body).prefill(leg("prefill"), PARAMS, sample=False)
    await decoded(ask_of(RESPONSES, body), leg())
    assert [call.body["request_id"] for call in engine.calls] == ["resp_id-1-prefill", "resp_id-1-decode"]
    assert prefilled.cached_tokens == 8


async def test_what_users_are_told_is_no_error(engine, leg):
    """Its own words may look like the engine's."""
    words = '"finish_reason":"error" data: {"error": 1}\n\ndata: [DONE]'
    stream = sse(delta(words)) + sse(delta("", "stop")) + DONE
    engine.replies = [streaming(stream)]
    assert b"".join(one.body for one in await decoded(ask_of(), leg())) == stream


@pytest.mark.parametrize(
    ("reply", "problem", "status"),
    [
        (refusing(400, "too long"), "too long", 400),
        (raw_answer(b"<h1>", 502), "HTTP 502: <h1>", 502),
        (raw_answer(b"hello"), "answered 200 with something that is not JSON", 502),
        (json_answer({"choices": [{"finish_reason": "error"}]}), FAULTS["error"][1], 500),
        (cutting(), "closed the connection without an answer", None),
    ],
)
async def test_an_answer_that_is_none_is_a_fault(engine, leg, reply, problem, status):
    engine.replies = [reply]
    seen, error = await fault_of(ask_of(), leg())
    assert (seen, error.problem, error.status) == ([], problem, status)


@pytest.mark.parametrize("answer", [[1], 5, {"choices": 5}, {"choices": [1]}])
async def test_a_whole_answer_of_another_form_is_a_fault(engine, leg, answer):
    engine.replies = [json_answer(answer)]
    _, error = await fault_of(ask_of(), leg())
    assert (error.status, error.problem.startswith("sent what cannot be read (")) == (502, True)


@given(VALUES | st.dictionaries(st.sampled_from(["choices", "usage", "error", "finish_reason"]), VALUES))
def test_whatever_json_an_event_is_it_goes_on_or_is_a_fault(event):
    with contextlib.suppress(LegError):
        piece = text._event("e", sse(event), None, None)
        assert piece.body == sse(event)
        ask_of().note(GenerationRecord("gen", 3, 0.0), piece)
    with contextlib.suppress(LegError):
        assert text._whole("e", json.dumps(event).encode(), {}, None).body == json.dumps(event).encode()


async def test_acceptance_is_told_before_the_first_event(engine, leg):
    more, accepted = asyncio.Event(), asyncio.Event()
    engine.replies = [streaming(more, DONE)]
    pieces = ask_of().decode(leg(), None, None, accepted.set)
    first = asyncio.ensure_future(anext(pieces))
    await asyncio.wait_for(accepted.wait(), 20)
    assert not first.done()
    more.set()
    await first
    await pieces.aclose()


async def test_closing_ends_the_leg(engine, leg):
    engine.replies = [streaming(delta("a"), asyncio.Event())]
    pieces = ask_of().decode(leg(), None, None, lambda: None)
    await anext(pieces)
    await pieces.aclose()
    await engine.calls[0].end()
    assert engine.calls[0].cancelled


async def test_a_release_is_one_token_of_the_same_prompt(engine, leg):
    engine.replies = [json_answer({"choices": []})]
    body = {"messages": [{"role": "user"}], "cache_salt": "mine", "stream": True, "logprobs": True}
    await ask_of(body=body).release(leg("release"), {"remote_port": 1}, None)
    sent = engine.calls[0].body
    assert sent.pop("cache_salt").startswith("release-")
    assert sent == {"messages": [{"role": "user"}], **SET, "kv_transfer_params": {"remote_port": 1}}


@pytest.mark.parametrize(("stream", "once"), [(True, False), (False, True), (None, True), ("true", True)])
def test_only_a_stream_says_something_before_its_end(stream, once):
    ask = ask_of(body={"stream": stream})
    assert (ask.is_told_at_once(None), ask.is_told_at_once(PARAMS)) == (once, once)
    assert ask.legs_speak_for_client is False


@pytest.mark.parametrize(("streamed", "told"), [(False, True), (True, False)])
async def test_an_answer_that_is_not_streamed_is_accepted_after_a_moment(engine, leg, monkeypatch, streamed, told):
    monkeypatch.setattr(text, "_SURELY_READ_S", 0.01)
    accepted = asyncio.Event()
    engine.replies = [hanging()]
    pieces = ask_of(body={"messages": [], "stream": streamed}).decode(leg(), {}, None, accepted.set)
    first = asyncio.ensure_future(anext(pieces))
    await engine.call()
    await asyncio.sleep(0.1)
    assert (accepted.is_set(), first.done()) == (told, False)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_what_is_refused_before_that_was_not_accepted(engine, leg, monkeypatch):
    monkeypatch.setattr(text, "_SURELY_READ_S", 0.5)
    told = []
    engine.replies = [refusing(500)]
    with pytest.raises(LegError):
        await anext(ask_of().decode(leg(), {}, None, lambda: told.append(1)))
    await asyncio.sleep(0.6)
    assert told == []


async def test_a_request_that_is_found_at_fault_in_its_stream_is_told_so_as_it_is(engine, leg):
    event = sse({"error": {"message": "bad grammar", "type": "BadRequestError", "code": 400}})
    engine.replies = [streaming(event, DONE)]
    first, _ = await decoded(ask_of(), leg())
    assert (first.body, first.finish_reason) == (event, "error")


async def test_what_prefill_added_to_its_cache_is_prefills_too(engine, leg):
    details = {"cached_tokens": 8, "created_cache_tokens": 1}
    answer = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": details}}
    engine.replies = [json_answer(answer)]
    view = replace(engine.view(), cached_block_tokens=2)
    (only,) = [one async for one in ask_of().decode(leg(), {}, Computed(view, 4), lambda: None)]
    told = json.loads(only.body)["usage"]["prompt_tokens_details"]
    assert told == {"cached_tokens": 4, "created_cache_tokens": 4}


async def test_a_refusal_keeps_the_engines_whole_json(engine, leg):
    said = {"error": {"message": "no", "code": 400}, "hint": "x"}
    engine.replies = [json_answer(said, 400)]
    _, error = await fault_of(ask_of(), leg())
    assert json.loads(error.content) == said


# events that are known without being parsed

TOKEN_EVENTS = [
    b'data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"@"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"text":"@","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}],"usage":null}\n\n',
    b'data: {"choices": [{"delta": {"reasoning": "@", "content": null}, "finish_reason": null}]}\n\n',
    b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"@"}}]}}],"error":null}\n\n',
]
SPLINTERS = st.sampled_from(
    [
        *('"', "\\", '\\"', "\\\\", "\\n", "\\u0041", "\\ud800", "\\u", "\\x"),
        *("\n", "\n\n", "\r", "\t", "\0", "\x7f", "@", "{", "é", "\U0001f600", "\u2028"),
        *('"finish_reason":"stop"', '"finish_reason":null', '"usage":{"prompt_tokens":1}', '"error":{"code":400}'),
        *('"}', '"}]}', '"},"finish_reason":"error"', '","content":"', 'content":"', '"text": "', "data: [DONE]"),
        *('"}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n', 'data: {"error":1}\n\n'),
    ]
)
SAID = st.lists(SPLINTERS | st.text(max_size=4), max_size=5).map(lambda parts: "".join(parts).encode(errors="replace"))
RAW = SAID | st.binary(max_size=8)


def parsed(event: bytes, tokens: text._TokenEvents | None = None) -> TextPiece | str:
    try:
        return text._event("e", event, None, None, None, tokens)
    except LegError as error:
        return f"{error} {error.status}"


@settings(deadline=None)
@given(st.sampled_from(TOKEN_EVENTS), st.lists(RAW, min_size=1, max_size=4))
def test_what_is_known_is_what_parsing_would_find(form, said):
    tokens = text._TokenEvents()
    parsed(form.replace(b"@", b"a"), tokens)
    for one in said:
        event = form.replace(b"@", one)
        if tokens.know(event):
            assert parsed(event) == TextPiece(event, tokens=1)
        parsed(event, tokens)  # which may learn from it, whatever it is


@settings(deadline=None)
@given(st.sampled_from(TOKEN_EVENTS), RAW, RAW, st.integers(0, 10**6), st.integers(0, 10**6), RAW)
def test_nor_can_anything_else_be_taken_for_it(form, first, second, at, cut, splinter):
    tokens = text._TokenEvents()
    parsed(form.replace(b"@", first), tokens)
    event = form.replace(b"@", second)
    at %= len(event) + 1
    event = event[:at] + splinter + event[at + cut % 8 :]
    if tokens.know(event):
        assert parsed(event) == TextPiece(event, tokens=1)


EVENTS = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text('":{}a\\', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "usage", "error", "finish_reason", "delta", "content", "text", "my text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(EVENTS, EVENTS, st.sampled_from(["content", "text"]), st.booleans(), RAW)
def test_whatever_it_was_learned_from(around, within, name, first, said):
    choice = {**(within if isinstance(within, dict) else {"finish_reason": within}), name: "@"}
    event = {**(around if isinstance(around, dict) else {"usage": around}), "choices": [choice]}
    if first:  # the string is where it is of interest
        event = {"error": within, "usage": {name: "@"}, **event}
    raw = b"data: " + json.dumps(event).encode() + b"\n\n"
    tokens = text._TokenEvents()
    parsed(raw, tokens)
    for other in (raw.replace(b"@", said), raw.replace(b"@", said, 1)):
        if tokens.know(other):
            assert parsed(other) == TextPiece(other, tokens=1)


@pytest.mark.parametrize("form", TOKEN_EVENTS)
@pytest.mark.parametrize("said", [b"", b" the", "é\U0001f600".encode(), b'\\n\\"x\\"', b"data: [DONE]", b"\x7f{}"])
def test_tokens_are_known_by_the_one_before(form, said):
    tokens = text._TokenEvents()
    assert not tokens.know(form)
    parsed(form, tokens)
    assert tokens.know(form.replace(b"@", said))


@pytest.mark.parametrize(
    "more",
    [
        {"usage": USAGE},
        {"error": {"code": 400}},
        {"choices": []},
        {"choices": [{"text": "a", "finish_reason": "stop"}]},
        {"choices": [{"text": "a"}, {"text": "b", "finish_reason": "length"}]},
    ],
)
def test_nothing_is_learned_from_events_with_more_in_them(more):
    event, tokens = sse(delta("a", **more)), text._TokenEvents()
    parsed(event, tokens)
    assert not tokens.know(event)


@pytest.mark.parametrize("form", TOKEN_EVENTS)
def test_one_quote_does_not_both_begin_and_end_a_string(form):
    tokens = text._TokenEvents()
    parsed(form, tokens)
    event = form.replace(b'"@"', b'"')
    assert not tokens.know(event)
    assert parsed(event) == "e: sent an event that is not JSON 502"


def test_events_that_differ_in_more_are_soon_left_to_the_parser():
    tokens = text._TokenEvents()
    for number in range(20):
        event = sse(delta("a", number=number))
        assert not tokens.know(event)
        assert parsed(event, tokens) == TextPiece(event, tokens=1)
    assert not tokens.know(event)


async def test_tokens_that_come_together_go_on_together(engine, leg):
    stream = [delta(one) for one in ("", "a", "b", "c")]
    end = [sse(delta("d", "length")), sse({"choices": [], "usage": USAGE}), DONE]
    engine.replies = [streaming(b"".join([*map(sse, stream), *end]))]
    pieces = await decoded(ask_of(), leg())
    assert [one.body for one in pieces] == [sse(stream[0]), b"".join(map(sse, stream[1:])), *end]
    assert [one.tokens for one in pieces] == [1, 3, 1, 0, 0]
    assert [one.head is None for one in pieces] == [False, *[True] * 4]


async def test_tokens_before_a_fault_are_given_out(engine, leg):
    engine.replies = [streaming(b"".join([FIRST, sse(delta("b")), sse(delta("c")), b"data: {oops\n\n"]))]
    seen, error = await fault_of(ask_of(), leg())
    assert seen == [FIRST, sse(delta("b")) + sse(delta("c"))]
    assert error.problem == "sent an event that is not JSON"
