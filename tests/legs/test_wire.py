import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.engines import (
    DONE,
    WAIT_S,
    FakeEngine,
    chunk,
    cutting,
    json_answer,
    nobody_listens,
    raw_answer,
    refusing,
    speaking,
    sse,
    streaming,
    usage,
    whole,
)
from helpers.processes import holds
from trivet.legs import wire
from trivet.legs.wire import (
    LegError,
    abort,
    dump,
    generate,
    open_session,
    parts_of,
    post,
    read_logprobs,
    read_prompt_logprobs,
    reading,
    stream,
)
from trivet.render.contract import EncodedIds, Features, TokenChunk, TokenLogprobs
from trivet.routing.engines import EngineView

BODY = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
HEADERS = {"X-Request-Id": "gen-1-decode"}


@pytest.fixture
async def session():
    async with open_session() as session:
        yield session


@pytest.fixture
async def engine():
    async with FakeEngine("decode-0", "decode") as engine:
        yield engine


async def read(session: aiohttp.ClientSession, engine: FakeEngine, **sampling) -> list[TokenChunk]:
    """All chunks that the engine's next answer gives."""
    body = {**BODY, "sampling_params": {**BODY["sampling_params"], **sampling}}
    return [one async for one in stream(session, engine.name, engine.url, body, HEADERS)]


GONE = "closed the connection without an answer"


async def fault(coroutine) -> tuple[str, int | None]:
    """What a leg failed with: its problem and status."""
    with pytest.raises(LegError) as caught:
        await coroutine
    assert str(caught.value) == f"decode-0: {caught.value.problem}"
    assert caught.value.engine == "decode-0"
    return caught.value.problem, caught.value.status


# whole answers


async def test_a_leg_is_a_post_of_its_body(session, engine):
    engine.replies = [whole(7)]
    answer = await generate(session, engine.name, engine.url, BODY, HEADERS)
    assert answer["choices"][0]["token_ids"] == [7]
    assert engine.calls[0].body == BODY
    assert engine.calls[0].headers["X-Request-Id"] == "gen-1-decode"


FEATURES = Features((), (b'{"mm_hashes":', b'{"image":["a"]}}'))


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.just("\ud800"), min_size=1))
def test_images_are_a_field_of_the_body_as_they_are(fields):
    body = {**fields, "features": FEATURES}
    assert json.loads(b"".join(parts_of(body))) == {**fields, "features": {"mm_hashes": {"image": ["a"]}}}
    assert [part for part in parts_of(body) if any(part is one for one in FEATURES.encoded)] == list(FEATURES.encoded)
    plain = {**fields, "features": None}
    assert parts_of(plain) == [dump(plain)]


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.just("\ud800")),
    st.lists(st.integers(0, 99)),
    st.booleans(),
)
def test_ids_that_are_written_already_are_a_field_of_the_body(fields, ids, pictured):
    written = EncodedIds(ids, json.dumps(ids).encode())
    body = {**fields, "token_ids": written, **({"features": FEATURES} if pictured else {})}
    told = json.loads(b"".join(parts_of(body)))
    assert told.pop("features", None) == ({"mm_hashes": {"image": ["a"]}} if pictured else fields.get("features"))
    assert told == {**{name: value for name, value in fields.items() if name != "features"}, "token_ids": ids}
    assert any(part is written.encoded for part in parts_of(body))


@pytest.mark.parametrize("size", [0, wire._AT_ONCE_BYTES - 200, wire._AT_ONCE_BYTES, 5 * 10**6])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_body_of_any_size_arrives_whole(session, engine, size, streamed):
    engine.replies = [streaming(EVENTS) if streamed else whole(7)]
    body = {**BODY, "features": Features((), [json.dumps("x" * size).encode()])}
    if streamed:
        assert [one async for one in stream(session, engine.name, engine.url, body, HEADERS)]
    else:
        await generate(session, engine.name, engine.url, body, HEADERS)
    (call,) = engine.calls
    assert call.raw == b"".join(parts_of(body))
    assert call.headers["Content-Length"] == f"{len(call.raw)}"
    assert call.headers["X-Request-Id"] == "gen-1-decode"
    assert HEADERS == {"X-Request-Id": "gen-1-decode"}


async def test_others_have_their_turns_while_a_large_body_is_sent():
    pieces, turns = [], 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)  # what is counted is whose turn it is

    other = asyncio.create_task(count())
    async for piece in wire._in_turns([b"a" * (3 * wire._AT_ONCE_BYTES), b"b"]):
        pieces.append(bytes(piece))
    other.cancel()
    assert b"".join(pieces) == b"a" * (3 * wire._AT_ONCE_BYTES) + b"b"
    assert max(len(piece) for piece in pieces) == wire._AT_ONCE_BYTES
    assert turns >= 3


async def test_token_ids_that_are_keys_are_sent_as_json_has_them(session, engine):
    engine.replies = [whole(7), streaming(EVENTS)]
    biased = {**BODY, "sampling_params": {**BODY["sampling_params"], "logit_bias": {1000: 5.0}}}
    await generate(session, engine.name, engine.url, biased, HEADERS)
    assert [one async for one in stream(session, engine.name, engine.url, biased, HEADERS)]
    for call in engine.calls:
        assert call.body["sampling_params"]["logit_bias"] == {"1000": 5.0}


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (refusing(400, "prompt too long"), ("prompt too long", 400)),
        (refusing(503, "asleep"), ("asleep", 503)),
        (json_answer({"message": "flat"}, 500), ("flat", 500)),
        (json_answer({"error": "in words"}, 500), ("in words", 500)),
        (json_answer({"detail": "x"}, 404), ("{'detail': 'x'}", 404)),
        (json_answer(["a"], 500), ("['a']", 500)),
        (raw_answer(b"<h1>Bad Gateway</h1>\n", 502), ("HTTP 502: <h1>Bad Gateway</h1>", 502)),
        (raw_answer(b"", 500), ("HTTP 500", 500)),
        (raw_answer(b"\xff" * 300, 500), ("HTTP 500: " + "\ufffd" * 200, 500)),
    ],
)
async def test_an_answer_that_is_not_200_is_a_fault_in_the_engines_words(session, engine, reply, expected):
    engine.replies = [reply]
    assert await fault(generate(session, engine.name, engine.url, BODY, HEADERS)) == expected
    assert await fault(read(session, engine)) == expected


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (raw_answer(b"hello"), "answered 200 with something that is not JSON"),
        (raw_answer(b""), "answered 200 with something that is not JSON"),
        (json_answer([1]), "answered 200 with something that is not an object"),
        (json_answer(None), "answered 200 with something that is not an object"),
    ],
)
async def test_an_answer_that_is_no_json_object_is_a_fault(session, engine, reply, problem):
    engine.replies = [reply]
    assert await fault(generate(session, engine.name, engine.url, BODY, HEADERS)) == (problem, 502)


async def test_nobody_at_the_address_is_a_fault(session):
    with nobody_listens() as url:
        for leg in (
            generate(session, "decode-0", url, BODY, HEADERS),
            anext(stream(session, "decode-0", url, BODY, HEADERS)),
        ):
            problem, status = await fault(leg)
            assert problem.startswith("cannot be reached (")
            assert status is None


async def test_a_connection_that_closes_instead_of_an_answer_is_a_fault(session, engine):
    engine.replies = [cutting()]
    assert await fault(generate(session, engine.name, engine.url, BODY, HEADERS)) == (GONE, None)
    assert await fault(read(session, engine)) == (GONE, None)


async def error_of(coroutine) -> LegError:
    with pytest.raises(LegError) as caught:
        await coroutine
    return caught.value


# what a fault says of its engine


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_full_has_not_begun(session, engine, status):
    engine.replies = [refusing(status)]
    for leg in (generate(session, engine.name, engine.url, BODY, HEADERS), read(session, engine)):
        error = await error_of(leg)
        assert (error.executed, error.died, error.status) == (False, False, status)


@pytest.mark.parametrize("status", [400, 404, 500, 502, 504])
async def test_an_engine_that_answers_lives_and_may_have_begun(session, engine, status):
    engine.replies = [refusing(status)]
    for leg in (generate(session, engine.name, engine.url, BODY, HEADERS), read(session, engine)):
        error = await error_of(leg)
        assert (error.executed, error.died, error.status) == (True, False, status)
        assert error.error == {"message": "not today", "type": "Error", "param": None, "code": status}


async def test_an_engine_that_cannot_be_reached_has_not_begun(session):
    with nobody_listens() as url:
        error = await error_of(generate(session, "decode-0", url, BODY, HEADERS))
    assert (error.executed, error.died, error.status) == (False, True, None)


async def test_an_engine_whose_host_does_not_answer_has_not_begun():
    """A host without power answers no SYN."""

    class Silent(aiohttp.TCPConnector):
        async def _create_connection(self, *_):
            raise TimeoutError

    async with aiohttp.ClientSession(connector=Silent()) as session:
        error = await error_of(generate(session, "decode-0", "http://127.0.0.1:1", BODY, HEADERS))
    assert (error.executed, error.died, error.status) == (False, True, None)


@pytest.mark.parametrize(
    "reply",
    [cutting(), streaming(chunk(5), cut=True), streaming(chunk(5))],
    ids=["closed", "cut", "ends"],
)
async def test_an_engine_that_breaks_off_may_have_died(session, engine, reply):
    engine.replies = [reply]
    error = await error_of(read(session, engine))
    assert (error.executed, error.died) == (True, True)


@pytest.mark.parametrize("pieces", [(usage(), DONE), (chunk(5), usage(), DONE)])
async def test_an_engine_that_ends_its_stream_without_a_reason_may_be_going_down(session, engine, pieces):
    engine.replies = [streaming(*pieces)]
    error = await error_of(read(session, engine))
    assert (error.executed, error.died, error.status) == (True, True, None)


@pytest.mark.parametrize("status", [429, 503, 500])
async def test_an_engine_that_gave_tokens_has_begun_whatever_it_says(session, engine, status):
    event = {"error": {"message": "no", "code": status}}
    engine.replies = [streaming(chunk(5), event, DONE), streaming(event, DONE)]
    assert (await error_of(read(session, engine))).executed is True
    assert (await error_of(read(session, engine))).executed is (status == 500)


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_does_not_let_us_in_is_the_gateways_trouble(session, engine, status):
    engine.replies = [refusing(status)]
    for leg in (generate(session, engine.name, engine.url, BODY, HEADERS), read(session, engine)):
        error = await error_of(leg)
        assert (error.executed, error.died, error.status, error.error) == (False, False, 502, None)
        assert error.problem.startswith(f"does not let the gateway in (HTTP {status}: ")


@pytest.mark.parametrize(("reason", "status", "died"), [("error", 500, False), ("abort", None, True)])
async def test_finish_reasons_that_are_none_of_an_answers_are_faults(session, engine, reason, status, died):
    engine.replies = [whole(7, finish=reason), streaming(chunk(5), chunk(6, finish_reason=reason), usage(), DONE)]
    for leg in (generate(session, engine.name, engine.url, BODY, HEADERS), read(session, engine)):
        error = await error_of(leg)
        assert (error.status, error.died) == (status, died)
        assert error.problem.endswith(f"(finish_reason {reason})")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (500, 1000, 500),
        (500, 0, 500),
        (500, True, 500),
        (500, 200, 500),
        (500, "404", 500),
        (500, None, 500),
        (500, 404, 404),
        (302, None, 502),
        (204, None, 502),
        (520, None, 520),
        (499, None, 499),
    ],
)
async def test_only_what_can_be_answered_with_is_a_status(session, engine, status, code, expected):
    engine.replies = [json_answer({"error": {"message": "no", "code": code}}, status)]
    assert (await error_of(generate(session, engine.name, engine.url, BODY, HEADERS))).status == expected


# anything an engine could send


@contextlib.asynccontextmanager
async def raw_engine(content: bytes):
    """The address of a server that answers whatever it is asked with these bytes, and closes."""
    handlers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(content)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*handlers)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ODD_CHOICES = [
    [1],
    5,
    "x",
    [{"token_ids": "ab"}],
    [{"token_ids": 5}],
    [{"token_ids": [None]}],
    [{"token_ids": [-1]}],
    [{"token_ids": [2**40]}],
    [{"token_ids": [5], "finish_reason": 5}],
    [{"token_ids": [5], "finish_reason": {}}],
    [{"token_ids": [5], "finish_reason": "stop", "stop_reason": [1]}],
    [{"token_ids": [5], "logprobs": [1]}],
    [{"token_ids": [5], "logprobs": {"content": [{}]}}],
    [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": "x"}]}}],
    [{"token_ids": [5], "logprobs": {"content": [{"token": "x", "logprob": 0}]}}],
    [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": 0, "top_logprobs": [1]}]}}],
]
ODD_USAGE = [5, "x", [1], {"prompt_tokens_details": [1]}, {"prompt_tokens_details": {"cached_tokens": "x"}}]


@pytest.mark.parametrize(
    "event",
    [*({"choices": odd} for odd in ODD_CHOICES), *({"choices": [], "usage": odd} for odd in ODD_USAGE)],
    ids=json.dumps,
)
async def test_an_event_of_another_form_is_a_fault(session, engine, event):
    engine.replies = [streaming(chunk(5), event, DONE)]
    tokens, problem, status = await received_and_fault(session, engine)
    assert (tokens, status) == ([5], 502)
    assert problem.startswith("sent what cannot be read (")


RANDOM = st.binary(max_size=300) | st.sampled_from(
    [
        b"",
        b"\r\n\r\n",
        b"HTTP/1.1 200",
        b"HTTP/1.1 999 ?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20000 + b"\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        OK + b"Content-Encoding: gzip\r\n\r\nnot gzip",
        OK + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RANDOM | RANDOM.map(lambda body: OK + b"\r\n" + body) | RANDOM.map(lambda body: OK + b"\r\ndata: " + body))
def test_whatever_bytes_an_engine_sends_are_a_fault_and_nothing_else(content):
    async def ask() -> None:
        async with raw_engine(content) as url, open_session() as session:
            for leg in (generate(session, "e", url, BODY, HEADERS), drain(stream(session, "e", url, BODY, HEADERS))):
                with contextlib.suppress(LegError):
                    await leg

    asyncio.run(ask())


async def drain(chunks) -> list:
    return [one async for one in chunks]


KEYS = st.sampled_from(
    [
        "choices", "token_ids", "finish_reason", "usage", "prompt_tokens_details", "cached_tokens", "logprobs",
        "content", "logprob", "top_logprobs", "token_id", "error", "message", "code", "rank", "stop_reason",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200)
@given(JSON)
def test_whatever_json_an_event_is_it_is_read_or_a_fault(event):
    data = json.dumps(event).encode()
    chunks, cached = [], None
    with contextlib.suppress(LegError):
        chunks, cached = wire._read_event("decode-0", data)
    assert cached is None or isinstance(cached, int)
    for one in chunks:
        assert all(isinstance(token, int) for token in one.token_ids)
        assert one.finish_reason is None or isinstance(one.finish_reason, str)


@settings(max_examples=200)
@given(JSON, st.sampled_from([200, 204, 301, 400, 429, 500, 503, 599, 700]))
def test_whatever_json_a_refusal_is_it_has_a_status_and_words(body, status):
    error = wire.refusal("decode-0", json.dumps(body).encode(), status)
    assert 400 <= error.status < 600
    assert isinstance(error.problem, str)
    assert error.error is None or isinstance(error.error, dict)


async def test_an_end_of_a_leg_that_its_owner_makes_is_no_fault_of_the_engine(session, engine):
    engine.replies = [streaming(chunk(5), asyncio.Event())]
    with pytest.raises(ValueError, match="mine"):
        async with post(session, engine.name, engine.url, b"{}", HEADERS):
            raise ValueError("mine")
    await engine.calls[0].end()
    assert engine.calls[0].cancelled


def test_what_cannot_be_read_is_told_of_its_engine():
    with pytest.raises(LegError, match=r"^decode-0: sent what cannot be read \(KeyError: 'x'\)$"), reading("decode-0"):
        {}["x"]


# bodies


@pytest.mark.parametrize("value", ["\ud800", 2**70, {"a": ["\udc00", -(2**64)]}])
def test_what_pythons_json_can_say_is_sent(value):
    """Clients may send it, and vLLM's server reads it."""
    assert json.loads(dump({"a": value, "b": {5: 1}})) == {"a": value, "b": {"5": 1}}


# ending a leg by its id


async def test_an_abort_names_the_request_and_has_the_engines_key(session, engine):
    await abort(session, engine.view(api_key="secret"), "generate-tokens-1")
    assert engine.aborted == ["generate-tokens-1"]


@pytest.mark.parametrize("reply", ["nobody", "hangs"])
async def test_an_abort_that_cannot_be_told_is_no_fault(session, monkeypatch, reply):
    monkeypatch.setattr(wire, "_ABORT_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    if reply == "nobody":
        with nobody_listens() as url:
            await abort(session, EngineView("decode-0", "decode", url, ready=True), "x")
        return

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side gives up
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server, asyncio.timeout(WAIT_S):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await abort(session, EngineView("decode-0", "decode", url, ready=True), "x")
        await ended.wait()


# streams


async def test_tokens_arrive_as_they_are_streamed(session, engine):
    more = asyncio.Event()
    engine.replies = [streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE)]
    chunks = stream(session, engine.name, engine.url, BODY, HEADERS)
    assert await anext(chunks) == TokenChunk([5])
    more.set()
    assert await anext(chunks) == TokenChunk([6], finish_reason="length")
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)


@pytest.mark.parametrize("cached", [None, 0, 16])
async def test_usage_behind_the_last_token_tells_the_cached_tokens(session, engine, cached):
    engine.replies = [speaking(5, 6, cached=cached)]
    expected = [TokenChunk([5]), TokenChunk([6], finish_reason="length", cached_tokens=cached)]
    assert await read(session, engine) == expected


async def test_several_tokens_may_share_an_event(session, engine):
    engine.replies = [streaming(chunk(5, 6, 7), chunk(8, finish_reason="stop", stop_reason=8), usage(), DONE)]
    assert await read(session, engine) == [
        TokenChunk([5, 6, 7]),
        TokenChunk([8], finish_reason="stop", stop_reason=8),
    ]


async def test_a_last_event_may_have_no_token(session, engine):
    engine.replies = [streaming(chunk(5), chunk(finish_reason="stop"), usage(), DONE)]
    assert await read(session, engine) == [TokenChunk([5]), TokenChunk([], finish_reason="stop")]


async def test_an_answer_needs_no_end_mark(session, engine):
    engine.replies = [streaming(chunk(5, finish_reason="stop"), usage(3))]
    assert await read(session, engine) == [TokenChunk([5], finish_reason="stop", cached_tokens=3)]


EVENTS = sse(chunk(5)) + b": keep-alive\n\n" + sse(chunk(6, finish_reason="length")) + sse(usage(1)) + DONE
SPOKEN = [TokenChunk([5]), TokenChunk([6], finish_reason="length", cached_tokens=1)]


async def test_events_may_be_cut_anywhere(session, engine, monkeypatch):
    """Split at every byte; the pieces are counted where they are read, as TCP could join them again."""
    pieces = 0
    original = aiohttp.StreamReader.readany

    async def counting(self):
        nonlocal pieces
        piece = await original(self)
        pieces += bool(piece)
        return piece

    monkeypatch.setattr(aiohttp.StreamReader, "readany", counting)
    for position in range(1, len(EVENTS)):
        pause = asyncio.Event()
        engine.replies = [streaming(EVENTS[:position], pause, EVENTS[position:])]
        asyncio.get_running_loop().call_later(0.002, pause.set)
        assert await read(session, engine) == SPOKEN, f"cut at {position}"
    assert pieces >= 1.9 * len(EVENTS)


async def test_events_may_come_byte_by_byte(session, engine):
    engine.replies = [streaming(*(EVENTS[at : at + 1] for at in range(len(EVENTS))))]
    assert await read(session, engine) == SPOKEN


@pytest.mark.parametrize(
    "written",
    [
        EVENTS.replace(b"\n", b"\r\n"),
        EVENTS.replace(b"data: ", b"data:"),
        b"event: token\nid: 1\nretry: 5\n" + EVENTS,
        b"\n\n\n" + EVENTS,
        EVENTS + sse(chunk(99)),  # nothing counts behind the end mark
        EVENTS + sse({"error": {"message": "late", "code": 500}}) + b"data: {oops\n\n" + sse(usage(99)) + DONE,
    ],
    ids=["CRLF", "no space", "other fields", "empty lines", "after the end", "faults after it"],
)
async def test_other_forms_of_the_same_events_are_read_alike(session, engine, written):
    engine.replies = [streaming(written)]
    assert await read(session, engine) == SPOKEN


async def test_streamed_legs_in_a_row_share_a_connection(session, engine):
    """The end of the body comes a moment behind the end mark; a connection left before it would be closed."""
    connections = []

    async def reply(request: web.Request) -> web.StreamResponse:
        connections.append(request.transport.get_extra_info("peername"))
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(EVENTS)
        await asyncio.sleep(0.005)
        await answer.write_eof()
        return answer

    engine.replies = [reply]
    for _ in range(10):
        assert await read(session, engine) == SPOKEN
    assert (len(connections), len(set(connections))) == (10, 1)


async def test_whole_legs_in_a_row_share_a_connection(session, engine):
    connections = []

    async def reply(request: web.Request) -> web.StreamResponse:
        connections.append(request.transport.get_extra_info("peername"))
        return await whole(7)(request)

    engine.replies = [reply]
    for _ in range(10):
        await generate(session, engine.name, engine.url, BODY, HEADERS)
    assert (len(connections), len(set(connections))) == (10, 1)


async def test_acceptance_is_told_before_the_first_token(session, engine):
    token, accepted = asyncio.Event(), asyncio.Event()
    engine.replies = [streaming(token, chunk(5, finish_reason="stop"), usage(), DONE)]
    first = asyncio.ensure_future(anext(stream(session, engine.name, engine.url, BODY, HEADERS, accepted.set)))
    await asyncio.wait_for(accepted.wait(), WAIT_S)
    assert not first.done()
    token.set()
    assert await first == TokenChunk([5], finish_reason="stop")


@pytest.mark.parametrize("reply", [refusing(500), refusing(400), cutting()], ids=["500", "400", "closed"])
async def test_a_leg_that_is_refused_was_not_accepted(session, engine, reply):
    told = []
    engine.replies = [reply]
    await fault(anext(stream(session, engine.name, engine.url, BODY, HEADERS, lambda: told.append(1))))
    assert told == []


async def received_and_fault(session, engine) -> tuple[list[int], str, int | None]:
    """The tokens that came before the fault, and the fault."""
    tokens: list[int] = []

    async def reading():
        async for one in stream(session, engine.name, engine.url, BODY, HEADERS):
            tokens.extend(one.token_ids)

    problem, status = await fault(reading())
    return tokens, problem, status


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"error": {"message": "KV load failed", "type": "x", "code": 500}}, ("KV load failed", 500)),
        ({"error": {"message": "no", "code": 400}}, ("no", 400)),
        ({"error": {"message": "no code"}}, ("no code", 500)),
        ({"error": {"message": "odd code", "code": "invalid"}}, ("odd code", 500)),
        ({"error": {"why": "x"}}, ("{'why': 'x'}", 500)),
        ({"error": "in words"}, ("in words", 500)),
        ([1], ("sent an event that is not an object", 502)),
        ("hello", ("sent an event that is not an object", 502)),
    ],
)
async def test_an_error_event_ends_the_leg(session, engine, event, expected):
    engine.replies = [streaming(chunk(5), event, DONE)]
    assert await received_and_fault(session, engine) == ([5], *expected)


@pytest.mark.parametrize(
    ("pieces", "problem", "status"),
    [
        ((chunk(5), b"data: {oops\n\n"), "sent an event that is not JSON", 502),
        ((chunk(5),), "the stream ended before the answer did", None),
        ((chunk(5), usage(1)), "the stream ended before the answer did", None),
        ((chunk(5), usage(1), DONE), "the stream ended before the answer did", None),
        (
            (chunk(5), b'data: {"choices": [{"token_ids": [6], "finish_r'),
            "the stream ended before the answer did",
            None,
        ),
    ],
)
async def test_a_stream_that_does_not_end_well_is_a_fault(session, engine, pieces, problem, status):
    engine.replies = [streaming(*pieces)]
    assert await received_and_fault(session, engine) == ([5], problem, status)


@pytest.mark.parametrize("pieces", [(), (DONE,), (usage(), DONE), (b": hello\n\n", DONE)])
async def test_a_stream_without_tokens_is_a_fault(session, engine, pieces):
    engine.replies = [streaming(*pieces)]
    expected = ([], "the stream ended before the answer did", None)
    assert await received_and_fault(session, engine) == expected


async def test_a_connection_that_breaks_in_the_middle_is_a_fault(session, engine):
    engine.replies = [streaming(chunk(5), cut=True)]
    tokens, problem, status = await received_and_fault(session, engine)
    assert (tokens, problem, status) == ([5], "broke off its answer", None)


async def test_a_connection_that_breaks_behind_the_finish_reason_is_none(session, engine):
    engine.replies = [streaming(chunk(5, finish_reason="stop"), cut=True)]
    assert await read(session, engine) == [TokenChunk([5], finish_reason="stop")]


async def test_a_connection_that_breaks_behind_the_end_mark_is_none(session, engine):
    engine.replies = [streaming(chunk(5), chunk(6), usage(3), DONE, cut=True)]
    expected = [TokenChunk([5]), TokenChunk([6]), TokenChunk((), finish_reason="length", cached_tokens=3)]
    assert await read(session, engine) == expected


async def test_closing_a_stream_ends_the_leg_at_the_engine(session, engine):
    engine.replies = [streaming(chunk(5), asyncio.Event())]
    chunks = stream(session, engine.name, engine.url, BODY, HEADERS)
    assert await anext(chunks) == TokenChunk([5])
    await chunks.aclose()
    await engine.calls[0].end()
    assert engine.calls[0].cancelled


async def test_cancelling_a_whole_leg_ends_it_at_the_engine(session, engine):
    engine.replies = [streaming(asyncio.Event())]
    task = asyncio.create_task(generate(session, engine.name, engine.url, BODY, HEADERS))
    call = await engine.call()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await call.end()
    assert call.cancelled


# what vLLM 0.30 does otherwise


@pytest.mark.parametrize(("tokens", "limit"), [([5, 6], 2), ([5], 1), ([5, 6, 7], 2)])
async def test_a_last_event_that_0_30_leaves_out_is_made_up_for_where_all_tokens_are_there(
    session, engine, tokens, limit
):
    engine.replies = [streaming(*(chunk(one) for one in tokens), usage(16), DONE)]
    *before, last = await read(session, engine, max_tokens=limit)
    assert before == [TokenChunk([one]) for one in tokens]
    assert last == TokenChunk((), finish_reason="length", cached_tokens=16)


@pytest.mark.parametrize(("tokens", "limit"), [([5], 2), ([5, 6], None), ([], 0)])
async def test_else_no_reason_is_made_up(session, engine, tokens, limit):
    """An engine that was told to end ends so as well, and then the answer is not at its end."""
    engine.replies = [streaming(*(chunk(one) for one in tokens), usage(16), DONE)]
    error = await error_of(read(session, engine, max_tokens=limit))
    assert (error.problem, error.died, error.executed) == ("the stream ended before the answer did", True, True)


@pytest.mark.parametrize(
    ("event", "stops", "expected"),
    [
        (chunk(6, finish_reason="stop"), [6], 6),
        (chunk(6, finish_reason="stop", stop_reason=None), [5, 6], 6),
        (chunk(6, finish_reason="stop"), [5], None),  # the end of the sequence has no stop reason
        (chunk(6, finish_reason="stop"), None, None),
        (chunk(6, finish_reason="length"), [6], None),
        (chunk(finish_reason="stop"), [6], None),
        (chunk(6, finish_reason="stop", stop_reason="word"), [6], "word"),
    ],
)
async def test_the_stop_reason_that_0_30_does_not_send_is_its_stop_token(session, engine, event, stops, expected):
    engine.replies = [streaming(event, usage(), DONE)]
    (last,) = await read(session, engine, stop_token_ids=stops)
    assert last.stop_reason == expected


NEW = {
    "content": [
        {
            "token_id": 6,
            "logprob": -1.5,
            "rank": 3,
            "top_logprobs": [
                {"token_id": 6, "logprob": -1.5, "rank": 3},
                {"token_id": 4, "logprob": -0.5, "rank": 1},
                {"token_id": 9, "logprob": -1.0, "rank": 2},
            ],
        }
    ]
}
OLD = {
    "content": [
        {
            "token": "token_id:6",
            "logprob": -1.5,
            "top_logprobs": [
                {"token": "token_id:6", "logprob": -1.5},
                {"token": "token_id:4", "logprob": -0.5},
                {"token": "token_id:9", "logprob": -1.0},
            ],
        }
    ]
}


@pytest.mark.parametrize("sent", [NEW, OLD], ids=["0.32", "0.30"])
def test_log_probabilities_of_both_versions_are_read_alike(sent):
    assert read_logprobs(sent) == [TokenLogprobs([6, 4, 9], [-1.5, -0.5, -1.0], 3)]


async def test_log_probabilities_travel_with_their_tokens(session, engine):
    engine.replies = [streaming(chunk(6, finish_reason="length", logprobs=NEW), usage(), DONE)]
    (last,) = await read(session, engine)
    assert last.logprobs == [TokenLogprobs([6, 4, 9], [-1.5, -0.5, -1.0], 3)]


@pytest.mark.parametrize("sent", [None, {}, {"content": None}, {"content": []}])
def test_without_log_probabilities_there_are_none(sent):
    assert read_logprobs(sent) is None


def test_a_token_without_candidates_stands_alone():
    sent = {"content": [{"token_id": 6, "logprob": -9999.0, "rank": None, "top_logprobs": []}]}
    assert read_logprobs(sent) == [TokenLogprobs([6], [-9999.0], 1)]


def test_a_rank_that_is_not_told_counts_the_better_candidates():
    sent = json.loads(json.dumps(OLD))
    sent["content"][0]["top_logprobs"][0:1] = []
    assert read_logprobs(sent) == [TokenLogprobs([6, 4, 9], [-1.5, -0.5, -1.0], 3)]


# log-probabilities of a prompt

PROMPT_LOGPROBS = [
    None,
    {"12": {"logprob": -2.0, "rank": 3, "decoded_token": None}, "4": {"logprob": -0.5, "rank": 1}},
    {"9": {"logprob": -1.0, "rank": 2}, "13": {"logprob": -0.25, "rank": 1}, "7": {"logprob": -3.0, "rank": 3}},
]


def test_log_probabilities_of_a_prompt_begin_with_its_second_token():
    assert read_prompt_logprobs([11, 12, 13], PROMPT_LOGPROBS) == [
        TokenLogprobs([12, 4], [-2.0, -0.5], 3),
        TokenLogprobs([13, 9, 7], [-0.25, -1.0, -3.0], 1),
    ]


def test_a_prompt_of_one_token_has_none():
    assert read_prompt_logprobs([11], [None]) == []
    assert read_prompt_logprobs([11, 12], None) is None


@pytest.mark.parametrize(
    "told",
    [
        [None, {"12": {"logprob": -2.0, "rank": 3}}],  # too short
        [None, {"99": {"logprob": -2.0, "rank": 3}}, PROMPT_LOGPROBS[2]],  # not of this prompt
        [None, None, None],
        [None, {"12": 5}, PROMPT_LOGPROBS[2]],
        "abc",
        5,
    ],
)
def test_log_probabilities_of_another_prompt_are_a_fault(told):
    with pytest.raises(LegError, match="cannot be read"), reading("prefill-0"):
        read_prompt_logprobs([11, 12, 13], told)


async def test_an_engine_whose_core_died_is_no_engine_that_answered():
    """vLLM's server says so in an error of its own, and ends a moment later."""
    told = wire.refusal(
        "decode-0",
        b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
        b'"type": "InternalServerError", "param": null, "code": 500}}',
        500,
    )
    assert (str(told), told.died, told.status) == ("decode-0: its engine core has died", True, None)


# tokens that are taken as they come


def lone(token: int, **more) -> bytes:
    return sse({**chunk(token), **more})


async def test_tokens_that_come_alone_are_taken_once_the_first_chunk_has_been(session, engine):
    gates = [asyncio.Event() for _ in range(5)]
    logprobs = {"content": [{"token": "token_id:9", "logprob": -0.5, "top_logprobs": []}]}
    odd = chunk(9, logprobs=logprobs)
    engine.replies = [
        streaming(chunk(3), gates[0], chunk(5), gates[1], chunk(6), gates[2], chunk(7), gates[3], odd, gates[4],
                  chunk(8), chunk(4, finish_reason="length"), usage(3), DONE)
    ]  # fmt: skip
    order: list[object] = []

    async def reads() -> None:
        taking = stream(session, engine.name, engine.url, BODY, HEADERS, take=lambda tokens: order.extend(tokens))
        async for one in taking:
            order.append(one)

    reading_task = asyncio.create_task(reads())
    for number, gate in enumerate(gates, 1):
        await holds(lambda number=number: len(order) >= number)
        gate.set()
    await reading_task
    chunks = [one for one in order if isinstance(one, TokenChunk)]
    assert [one if isinstance(one, int) else one.token_ids[-1] for one in order] == [3, 5, 6, 7, 9, 8, 4]
    assert order[2:4] == [6, 7]
    assert (chunks[0], chunks[2].logprobs is not None) == (TokenChunk([3]), True)
    assert chunks[-1] == TokenChunk([4], finish_reason="length", cached_tokens=3)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_leg_that_breaks_off_behind_taken_tokens_has_been_executed(session, engine, cut):
    second, gate, more = asyncio.Event(), asyncio.Event(), asyncio.Event()
    engine.replies = [streaming(chunk(4), second, chunk(5), gate, chunk(6), more, cut=cut)]
    taken: list[int] = []
    chunks = stream(session, engine.name, engine.url, BODY, HEADERS, take=taken.extend)
    assert await anext(chunks) == TokenChunk([4])
    second.set()
    assert await anext(chunks) == TokenChunk([5])
    following = asyncio.ensure_future(anext(chunks))
    gate.set()
    await holds(lambda: taken)
    more.set()
    with pytest.raises(LegError) as caught:
        await following
    assert (taken, caught.value.died, caught.value.executed) == ([6], True, True)


ODD_NUMBERS = ("", "-1", "01", "1.0", "1,2", " 5", "5 ", "1e3", "\u0663", "99999999999")
NUMBERS = st.one_of(
    st.integers(0, 2**31 - 1).map(str),
    st.sampled_from(ODD_NUMBERS),
)


@given(NUMBERS, st.booleans())
def test_a_lone_token_is_known_only_where_the_event_says_it(number, spaced):
    known = wire.LoneTokens()
    event = lone(5) if spaced else lone(5).replace(b": ", b":").replace(b"data:", b"data: ")
    assert not known.find(event)
    known.learn(event, [TokenChunk([5])])
    assert known.knows
    other = event.replace(b"[5]", b"[%s]" % number.encode())
    if known.find(other):
        assert wire._read_event("e", other[6:-2]) == ([TokenChunk(known.found())], None)
    else:
        assert known.found() == []
        assert not (number.isascii() and number.isdigit() and str(int(number)) == number and len(number) <= 9)


@pytest.mark.parametrize(
    ("event", "chunks"),
    [
        (lone(5), []),
        (lone(5), [TokenChunk([5]), TokenChunk([6])]),
        (sse(chunk(5, 6)), [TokenChunk([5, 6])]),
        (sse(chunk(5, finish_reason="stop")), [TokenChunk([5], finish_reason="stop")]),
        (lone(5), [TokenChunk([5], logprobs=[TokenLogprobs([5], [-1.0], 1)])]),
        (lone(5, token_ids=[7]), [TokenChunk([5])]),
        (sse({"choices": [{"index": 0, "tokens": [5]}]}), [TokenChunk([5])]),
        (sse({"token_ids": [7], "choices": []}), [TokenChunk([5])]),
    ],
)
def test_what_says_more_or_other_is_no_example(event, chunks):
    known = wire.LoneTokens()
    known.learn(event, chunks)
    assert not known.knows
    known.learn(lone(5), [TokenChunk([5])])
    known.learn(event, chunks)
    assert known.find(lone(6))  # the example before stays
