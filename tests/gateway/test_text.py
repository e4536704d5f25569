"""The text plane in process: its application over engines that are real HTTP servers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from helpers.engines import (
    AT_ONCE_S,
    DONE,
    HANDED_OVER,
    WAIT_S,
    FakeEngine,
    cutting,
    hanging,
    json_answer,
    listening,
    nobody_listens,
    raw_answer,
    refusing,
    sse,
    streaming,
)
from helpers.garbage import collect
from trivet.connectors import NixlConnector
from trivet.gateway.app import GENERATING, GatewayApp
from trivet.gateway.metrics import GatewayMetrics
from trivet.gateway.text import TextApp
from trivet.legs.life import Legs
from trivet.legs.watch import Patience
from trivet.legs.wire import open_session
from trivet.routing.engines import Engines, EngineView
from trivet.surface.sse import event_of

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
PREFILLED = json_answer({"choices": [], "usage": None, "kv_transfer_params": HANDED_OVER})
ANSWER = {"id": "chatcmpl-1", "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}


def delta(content: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


class Gateway:
    def __init__(self, app: GatewayApp, engines: Engines, legs: Legs, client: httpx.AsyncClient) -> None:
        self.app, self.engines, self.legs, self.client = app, engines, legs, client

    async def post(self, path: str = CHAT, body: object = HELLO, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {name.replace("_", "-"): one for name, one in headers.items()}
        return await self.client.post(path, content=content, headers=named)

    async def facts(self, response: httpx.Response) -> dict[str, Any]:
        """What the gateway tells of a request's only generation."""
        told = await self.client.get(f"/trivet/requests/{response.headers['x-request-id']}")
        (only,) = told.json()["generations"]
        return only


@contextlib.asynccontextmanager
async def gateway(
    *engines: FakeEngine | EngineView, connector=NixlConnector(), aborts=False, **more: Any
) -> AsyncIterator[Gateway]:
    """A gateway of the text plane. Nothing of a request may be left behind."""
    before, faults = asyncio.all_tasks(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    fakes = [one for one in engines if isinstance(one, FakeEngine)]
    async with listening(*fakes), open_session() as session:
        views, metrics = Engines(), GatewayMetrics()
        views.update(one.view(aborts=aborts) if isinstance(one, FakeEngine) else one for one in engines)
        legs = Legs(views, session, connector, metrics.ended, more.pop("patience", None))
        plane = TextApp(views, legs, GENERATING)
        app = GatewayApp(plane, views, legs, metrics, fleet=lambda: {"engines": []}, guards_itself=False, **more)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield Gateway(app, views, legs, client)
        await legs.close()
        gauges = app.gauges()
        assert (gauges.generations, gauges.requests_running, gauges.releases_pending) == (0, 0, 0)
        assert [one.name for one in views.all() if views.outstanding_tokens(one.name)] == []
        await asyncio.sleep(0)
    assert [one for one in asyncio.all_tasks() - before if "trivet" in str(one.get_coro())] == []
    collect()
    assert faults == []


def prefill(*replies, name: str = "prefill-0") -> FakeEngine:
    return FakeEngine(name, "prefill", *(replies or [PREFILLED]))


def decode(*replies, name: str = "decode-0") -> FakeEngine:
    return FakeEngine(name, "decode", *(replies or [json_answer(ANSWER)]))


# the way of a request


async def test_a_request_is_split_and_its_answer_is_the_engines():
    raw = b'{ "messages": [{"role": "user", "content": "\xc3\xa9"}] ,"max_tokens":5}\n'
    content = b'{ "choices":[ ], "x" : 1e0 }'
    p, d = prefill(), decode(raw_answer(content, kind="application/json"))
    async with gateway(p, d) as one:
        response = await one.post(body=raw, x_tenant="t", x_request_id="mine", authorization="Bearer k")
        facts = await one.facts(response)
    assert (response.status_code, response.content) == (200, content)
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert response.headers["content-type"] == "application/json"
    assert p.calls[0].path == d.calls[0].path == CHAT
    assert (p.calls[0].body["max_tokens"], p.calls[0].body["stream"]) == (1, False)
    assert d.calls[0].raw.startswith(raw[:-2])
    assert d.calls[0].body["kv_transfer_params"] == HANDED_OVER
    for call in (p.calls[0], d.calls[0]):
        assert (call.headers["x-tenant"], call.headers["X-Client-Request-Id"]) == ("t", "mine")
        assert "Authorization" not in call.headers
        assert call.headers["X-Request-Id"] != "mine"
    assert (facts["split"], facts["prefill_engine"], facts["decode_engine"]) == (True, "prefill-0", "decode-0")


async def test_a_stream_is_passed_on_event_by_event():
    more = asyncio.Event()
    events = [sse(delta("a")), b": keep-alive\n\n", sse(delta("b", "stop")), DONE]
    async with gateway(prefill(), decode(streaming(events[0], more, *events[1:]))) as one:
        client = Client(one)
        await client.has(1)
        assert client.sent[0]["status"] == 200
        assert client.body == events[0]
        more.set()
        await asyncio.wait_for(client.served, WAIT_S)
        assert client.body == b"".join(events)
        assert client.sent[-1]["more_body"] is False


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO | {"n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/cohere/v2/chat", {"message": "Hi"}),
        (CHAT, b"{oops"),
        (CHAT, b""),
        (CHAT, b'{"x": NaN}'),
    ],
)
async def test_what_cannot_be_split_goes_to_one_engine_as_it_is(path, body):
    p, d = prefill(), decode()
    async with gateway(p, d) as one:
        response = await one.post(path, body)
    assert (response.status_code, p.calls) == (200, [])
    assert d.calls[0].raw == (body if isinstance(body, bytes) else json.dumps(body).encode())


async def test_a_request_that_asks_for_it_is_served_colocated():
    p, d = prefill(), decode()
    async with gateway(p, d) as one:
        response = await one.post(x_trivet_serve="colocated")
        assert (await one.facts(response))["reason"] == "the request asks for it"
    assert p.calls == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {"a": 1}}',
        b'{"x": NaN, "kv_transfer_params": {"a": 1}}',
        '{"kv_transfer_params": {"a": 1}}'.encode("utf-16"),
    ],
)
async def test_no_engine_sees_what_a_client_may_not_say(body):
    p, d = prefill(), decode()
    async with gateway(p, d) as one:
        assert (await one.post(body=body)).status_code == 400
    assert (p.calls, d.calls) == ([], [])


# what engines answer


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500])
async def test_an_engines_error_keeps_its_status_and_its_json(status):
    async with gateway(decode(refusing(status, "too long")), connector=None) as one:
        response = await one.post()
    assert response.status_code == status
    assert response.json() == {"error": {"message": "too long", "type": "Error", "param": None, "code": status}}


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_full_is_passed_over_and_else_the_client_may_come_again(status):
    d = decode(refusing(status))
    async with gateway(d, decode(name="decode-1"), connector=None) as one:
        assert (await one.post()).status_code == 200
    async with gateway(decode(refusing(status)), connector=None) as one:
        response = await one.post()
    assert (response.status_code, response.headers["retry-after"]) == (status, "1")


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (raw_answer(b"<h1>Bad Gateway</h1>", 502), 502, "HTTP 502: <h1>Bad Gateway</h1>"),
        (raw_answer(b"x", 520), 520, "HTTP 520: x"),
        (raw_answer(b"x", 302), 502, "HTTP 302: x"),
        (raw_answer(b"hello"), 502, "answered 200 with something that is not JSON"),
        (json_answer(["odd"], 500), 500, "['odd']"),
    ],
)
async def test_what_is_no_error_of_openais_is_put_into_one(reply, status, message):
    async with gateway(decode(reply), connector=None) as one:
        response = await one.post()
    assert response.status_code == status
    assert (response.json()["error"]["message"], response.json()["error"]["code"]) == (message, status)


async def test_without_an_engine_that_can_be_reached_the_client_may_come_again():
    with nobody_listens() as url:
        async with gateway(EngineView("decode-0", "decode", url, ready=True)) as one:
            response = await one.post()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "decode-0: cannot be reached (" in response.json()["error"]["message"]


async def test_a_decode_that_could_not_take_the_kv_serves_the_request_colocated():
    d = decode(refusing(500), json_answer(ANSWER))
    async with gateway(prefill(), d) as one:
        response = await one.post()
        assert (await one.facts(response))["reason"] == "decode failed the split request (decode-0: not today)"
    assert response.json() == ANSWER
    assert "kv_transfer_params" not in [call for call in d.calls if call.leg == "decode"][1].body


async def test_an_answer_that_broke_off_before_its_first_byte_is_begun_anew():
    d, e = decode(cutting()), decode(name="decode-1")
    async with gateway(d, e, connector=None) as one:
        assert (await one.post()).json() == ANSWER


@pytest.mark.parametrize(
    ("rest", "cut", "told"),
    [
        ([], True, "decode-0: broke off its answer"),
        ([], False, "decode-0: the stream ended before the answer did"),
        ([b"data: {oops\n\n"], False, "decode-0: sent an event that is not JSON"),
        ([{"error": {"message": "KV is gone", "type": "x", "code": 500}}], False, "KV is gone"),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_event(rest, cut, told):
    first = sse(delta("a"))
    e = decode(name="decode-1")
    async with gateway(decode(streaming(first, *rest, cut=cut)), e, connector=None) as one:
        response = await one.post()
    assert response.status_code == 200
    assert response.content.startswith(first + b"data: ")
    assert response.content.endswith(b"}\n\n" + DONE)
    error = json.loads(response.content[len(first + b"data: ") : -len(DONE)])["error"]
    assert told in error["message"]
    assert error["code"] in (500, 502)
    assert e.calls == []


@pytest.mark.parametrize("code", [429, 503])
async def test_kv_of_which_something_was_given_is_offered_to_nobody_else(code):
    event = {"error": {"message": "going down", "code": code}}
    d, e = decode(streaming(sse(delta("a")), sse(event))), decode(name="decode-1")
    async with gateway(prefill(), d, e) as one:
        response = await one.post(body=HELLO | {"stream": True})
    assert response.content == sse(delta("a")) + event_of(event) + DONE
    assert "decode" not in e.legs()


async def test_a_deadline_ends_a_request():
    async with gateway(decode(hanging()), connector=None) as one:
        response = await one.post(x_trivet_deadline_s="0.05")
    assert response.status_code == 504


async def test_an_engine_that_says_nothing_is_replaced():
    """Where it says something before its answer is whole."""
    d, e = decode(hanging()), decode(streaming(sse(delta("a", "stop")), DONE), name="decode-1")
    async with gateway(d, e, connector=None, patience=Patience(0.05)) as one:
        assert (await one.post(body=HELLO | {"stream": True})).content == sse(delta("a", "stop")) + DONE
    assert (len(d.calls), len(e.calls)) == (1, 1)


async def test_an_answer_that_comes_whole_may_take_long():
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.4)
        return web.json_response(ANSWER)

    d, e = decode(slow), decode(name="decode-1")
    async with gateway(d, e, connector=None, patience=Patience(0.05)) as one:
        assert (await one.post()).json() == ANSWER
    assert (len(d.calls), len(e.calls)) == (1, 0)


async def test_what_prefill_refuses_is_said_by_an_engine_that_has_the_clients_own_body():
    """Prefill's body is another: what it finds wrong with that, a client could not understand."""
    p, d = prefill(refusing(400, "max_tokens 1 is odd")), decode(refusing(400, "max_tokens 99 is odd"))
    async with gateway(p, d) as one:
        response = await one.post(body=HELLO | {"max_tokens": 99})
        facts = await one.facts(response)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "max_tokens 99 is odd")
    assert (len(p.calls), json.loads(d.calls[0].raw)) == (1, HELLO | {"max_tokens": 99})
    assert facts["reason"].startswith("prefill refused it")


async def test_what_decode_refuses_of_a_body_that_is_not_the_clients_is_asked_again():
    """Its body has the connector's parameters besides, and it may be the first that answers."""
    p, d = (
        prefill(),
        decode(refusing(400, "9 items, messages is missing"), refusing(400, "8 items, messages is missing")),
    )
    async with gateway(p, d) as one:
        response = await one.post()
        facts = await one.facts(response)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "8 items, messages is missing")
    assert ["kv_transfer_params" in call.body for call in d.calls[:2]] == [True, False]  # then the release
    assert "decode refused it" in facts["reason"]


async def test_what_only_prefill_refuses_is_served():
    p, d = prefill(refusing(400, "odd")), decode()
    async with gateway(p, d) as one:
        assert (await one.post()).json() == ANSWER


async def test_a_clients_content_type_reaches_engines():
    p, d = prefill(), decode()
    async with gateway(p, d) as one:
        await one.post(content_type="application/json; charset=utf-8")
    assert [call.headers["Content-Type"] for call in (*p.calls, *d.calls)] == ["application/json; charset=utf-8"] * 2


@pytest.mark.parametrize("path", [*GENERATING, "/tokenize", "/v1/chat/completions/render", "/v1/messages/count_tokens"])
async def test_a_body_without_a_type_is_refused_as_vllm_does_and_reaches_no_engine(path):
    """A browser lets any page send it, without asking the gateway first."""
    p, d = prefill(), decode()
    async with gateway(p, d) as one:
        response = await one.client.post(path, content=json.dumps(HELLO).encode())
    assert "content-type" not in response.request.headers
    assert (response.status_code, p.calls, d.calls) == (400, [], [])
    said = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    assert response.json()["error"]["message"] == said


async def test_an_error_is_the_engines_whole_answer():
    said = {"error": {"message": "no", "code": 400}, "hint": {"a": 1}}
    async with gateway(decode(json_answer(said, 400)), connector=None) as one:
        assert (await one.post()).json() == said


async def test_a_request_that_is_found_at_fault_in_its_stream_is_told_so_as_it_is():
    stream = sse({"error": {"message": "bad grammar", "type": "BadRequestError", "code": 400}}) + DONE
    d, e = decode(streaming(stream)), decode(name="decode-1")
    async with gateway(d, e, connector=None) as one:
        response = await one.post(body=HELLO | {"stream": True})
    assert (response.status_code, response.content, e.calls) == (200, stream, [])


@pytest.mark.parametrize("value", ["plain", "t\xf6pf", "\u4f60"])
async def test_an_engines_headers_are_passed_on_as_they_came(value):
    async with gateway(decode(raw_answer(b"{}", kind="application/json", Note=value)), connector=None) as one:
        response = await one.post()
    assert (b"note", value.encode()) in [(name.lower(), one) for name, one in response.headers.raw]


# the client goes away


class Client:
    """A client that can leave."""

    def __init__(self, one: Gateway, body: bytes = json.dumps(HELLO).encode()) -> None:
        self.sent: list[dict] = []
        self._news = asyncio.Condition()
        self._leaving = asyncio.Event()
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
        self.served = asyncio.create_task(one.app(scope, self._receive, self._send))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def has(self, count: int) -> None:
        """Waits until so many messages with a body have come."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: len(self.sent) > count), WAIT_S)

    async def leave(self) -> None:
        self._leaving.set()
        await asyncio.wait_for(self.served, AT_ONCE_S)

    async def _receive(self) -> dict:
        if self._messages:
            return self._messages.pop()
        await self._leaving.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        async with self._news:
            self.sent.append(message)
            self._news.notify_all()


async def test_a_client_that_leaves_during_prefill_ends_it():
    p, d = prefill(hanging()), decode()
    async with gateway(p, d, aborts=True) as one:
        client = Client(one)
        call = await p.call()
        await client.leave()
        assert await p.abort() == f"chatcmpl-{call.headers['X-Request-Id']}"
        await call.end()
    assert (d.calls, client.sent) == ([], [])


async def test_a_client_that_leaves_before_decode_answers_ends_it_and_the_kv_is_released():
    d = decode(hanging(), json_answer(ANSWER))
    async with gateway(prefill(), d) as one:
        client = Client(one)
        call = await d.call()
        await client.leave()
        await call.end()
        releasing = await d.call(1)
        assert (releasing.leg, releasing.body["kv_transfer_params"]) == ("release", HANDED_OVER)
        assert releasing.path == CHAT


async def test_a_client_that_leaves_a_stream_ends_it():
    d = decode(streaming(delta("a"), asyncio.Event()))
    async with gateway(prefill(), d, aborts=True) as one:
        client = Client(one)
        await client.has(1)
        await client.leave()
        assert (await d.abort()).startswith("chatcmpl-")
        await d.calls[0].end()
        assert d.calls[0].cancelled
    assert d.legs() == ["decode"]


async def test_a_server_that_gives_up_leaves_nothing():
    d = decode(streaming(delta("a"), asyncio.Event()))
    async with gateway(prefill(), d) as one:
        client = Client(one)
        await client.has(1)
        client.served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.served
        await d.calls[0].end()


# all the rest


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/messages/count_tokens"),
        *(("POST", f"/v1/{what}/render") for what in ("chat/completions", "completions", "responses", "messages")),
        *(("POST", f"/v1/{what}/derender") for what in ("chat/completions", "completions")),
    ],
)
async def test_other_requests_are_passed_on_as_they_are(method, path):
    m = FakeEngine("mixed-0", "mixed", raw_answer(b'{"a": 1}', 418, "application/json", Allow="x", Server="engine"))
    async with listening(m), gateway(EngineView("mixed-0", "mixed", m.url, True, api_key="secret")) as one:
        headers = {"accept": "a/b", "cookie": "c=d", "x-tenant": "t", "content-type": "application/json"}
        response = await one.client.request(method, f"{path}?a=b%20c", content=b"body", headers=headers)
    assert (response.status_code, response.content) == (418, b'{"a": 1}')
    assert (response.headers["allow"], "server" in response.headers) == ("x", False)
    call = m.calls[0]
    assert (call.path, call.raw) == (f"{path}?a=b%20c", b"body")
    assert (call.headers["accept"], call.headers["x-tenant"]) == ("a/b", "t")
    assert (call.headers["Authorization"], "cookie" in call.headers) == ("Bearer secret", False)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/inference/v1/abort_requests"),
        ("POST", "/abort_requests"),
        ("POST", "/pause"),
        ("POST", "/sleep"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/models"),
        ("GET", "/server_info"),
        ("GET", CHAT),
        ("GET", "/v1/models/../../pause"),
        ("DELETE", "/v1/responses/1"),
    ],
)
async def test_what_is_not_for_clients_reaches_no_engine(method, path):
    d = decode()
    async with gateway(d) as one:
        response = await one.client.request(method, path)
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})  # as vLLM says it
    assert (d.calls, d.aborted) == ([], [])


async def test_a_prefill_engine_can_tell_the_models_as_well():
    p = prefill(json_answer({"data": []}))
    async with gateway(p) as one:
        assert (await one.client.get("/v1/models")).json() == {"data": []}


@pytest.mark.parametrize("first", [cutting(), refusing(503), refusing(429)])
async def test_other_requests_go_to_the_next_engine_where_one_does_not_answer(first):
    d, p = decode(first), prefill(json_answer({"tokens": [1]}))
    with nobody_listens() as url:
        async with gateway(EngineView("mixed-0", "mixed", url, ready=True), d, p) as one:
            response = await one.post("/tokenize", {"prompt": "a"})
    assert (response.status_code, response.json()) == (200, {"tokens": [1]})
    assert (len(d.calls), len(p.calls)) == (1, 1)


async def test_what_an_engine_refuses_of_other_requests_is_its_answer():
    m, d = FakeEngine("mixed-0", "mixed", refusing(404, "no such model")), decode()
    async with gateway(m, d) as one:
        response = await one.post("/tokenize", {"model": "nobody"})
    assert (response.status_code, response.json()["error"]["message"], d.calls) == (404, "no such model", [])


async def test_the_last_answer_of_busy_engines_is_told():
    async with gateway(decode(refusing(503, "full")), prefill(refusing(429, "too many"))) as one:
        response = await one.post("/tokenize", {"prompt": "a"})
    assert (response.status_code, response.json()["error"]["message"]) == (429, "too many")


async def test_other_requests_fail_where_no_engine_is_there():
    async with gateway() as one:
        assert (await one.client.get("/v1/models")).status_code == 503
    with nobody_listens() as url:
        async with gateway(EngineView("decode-0", "decode", url, ready=True)) as one:
            response = await one.client.get("/v1/models")
    assert response.status_code == 502
    assert response.json()["error"]["message"].startswith("decode-0: no answer (")


async def test_it_starts_and_stops_with_its_server():
    app = TextApp(Engines(), None, GENERATING)
    messages, sent = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], []

    async def receive() -> dict:
        return messages.pop(0)

    async def send(message: dict) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_it_serves_nothing_but_http():
    with pytest.raises(RuntimeError, match="websocket"):
        await TextApp(Engines(), None, GENERATING)({"type": "websocket"}, None, None)


@pytest.mark.parametrize("after", [0, 1], ids=["before a byte", "in a stream"])
async def test_a_fault_of_our_own_is_told_as_well(monkeypatch, after):
    engine = FakeEngine("mixed-0", "mixed", streaming(delta("Hi"), delta("!", "stop"), DONE))
    async with gateway(engine) as one:
        serve = one.legs.serve

        async def failing(ask):
            count = 0
            async for piece in serve(ask):
                if count == after:
                    raise ZeroDivisionError("of our own")
                count += 1
                yield piece

        monkeypatch.setattr(one.legs, "serve", failing)
        answer = await one.post(body=HELLO | {"stream": True})
        assert answer.status_code == (200 if after else 500)
        assert "ZeroDivisionError: of our own" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n") == bool(after)


# other protocols

RESPONSE = {"object": "response", "status": "completed", "usage": None, "output": []}
MESSAGE = {"type": "message", "stop_reason": "end_turn", "content": []}


@pytest.mark.parametrize(
    ("path", "body", "answer", "limit"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 9}, RESPONSE, "max_output_tokens"),
        ("/v1/messages", HELLO | {"max_tokens": 9}, MESSAGE, "max_tokens"),
    ],
)
async def test_responses_and_messages_are_split_at_their_own_endpoints(path, body, answer, limit):
    p, d = prefill(json_answer(answer | {"kv_transfer_params": HANDED_OVER})), decode(json_answer(answer))
    async with gateway(p, d) as one:
        response = await one.post(path, body)
        facts = await one.facts(response)
    assert (response.json(), facts["split"]) == (answer, True)
    assert p.calls[0].path == d.calls[0].path == path
    assert (p.calls[0].body[limit], d.calls[0].body[limit]) == (1, 9)
    assert d.calls[0].body["kv_transfer_params"] == HANDED_OVER


@pytest.mark.parametrize(
    ("path", "body", "first"),
    [
        (
            "/v1/responses",
            {"input": "Hi", "stream": True},
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":7}\n\n',
        ),
        (
            "/v1/messages",
            HELLO | {"stream": True, "max_tokens": 9},
            b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
        ),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_of_its_protocol(path, body, first):
    async with gateway(decode(streaming(first, cut=True)), decode(name="decode-1"), connector=None) as one:
        response = await one.post(path, body)
    assert response.content.startswith(first + b"event: error\ndata: ")
    told = json.loads(response.content.rpartition(b"data: ")[2])
    assert (told["type"], "decode-0: broke off" in told["error"]["message"]) == ("error", True)
    if path == "/v1/responses":
        assert told["sequence_number"] == 8


async def test_an_error_in_a_stream_of_messages_keeps_its_type():
    first = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
    async with gateway(decode(streaming(first, asyncio.Event())), connector=None) as one:
        response = await one.post("/v1/messages", HELLO | {"stream": True, "max_tokens": 9}, x_trivet_deadline_s="0.5")
    assert response.content.startswith(first + b"event: error\n")
    assert json.loads(response.content.rpartition(b"data: ")[2])["error"]["type"] == "timeout_error"


async def test_a_response_of_which_nothing_was_said_is_begun_anew():
    """Its first events come before anything is generated, and are no reason to stay with an engine."""
    created = b'event: response.created\ndata: {"type":"response.created","response":{"status":"in_progress"}}\n\n'
    ended = b'event: response.completed\ndata: {"type":"response.completed","response":{"status":"completed"}}\n\n'
    e = decode(streaming(created, ended), name="decode-1")
    async with gateway(decode(streaming(created, cut=True)), e, connector=None) as one:
        response = await one.post("/v1/responses", {"input": "Hi", "stream": True})
    assert response.content == created + ended


async def test_an_error_of_messages_has_anthropics_form():
    async with gateway(connector=None) as one:
        response = await one.post("/v1/messages", HELLO | {"max_tokens": 9})
    assert response.status_code == 503
    assert (response.json()["type"], response.json()["error"]["type"]) == ("error", "overloaded_error")
