"""The gateway over a front end that is a few lines of ASGI; engines and legs are the real ones."""

import asyncio
import contextlib
import hmac
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from helpers.engines import (
    AT_ONCE_S,
    WAIT_S,
    FakeEngine,
    hanging,
    listening,
    nobody_listens,
    refusing,
    speaking,
    token_request,
    whole,
)
from helpers.garbage import collect
from helpers.processes import holds
from trivet.connectors import NixlConnector
from trivet.gateway import app as app_module
from trivet.gateway.admission import Admission
from trivet.gateway.app import GatewayApp, Rules
from trivet.gateway.metrics import GatewayMetrics, Gauges
from trivet.journal import GenerationRecord, current_request
from trivet.legs.life import Legs
from trivet.legs.wire import open_session
from trivet.render.contract import ServingError
from trivet.routing.engines import Engines, EngineView
from trivet.surface.http import answer, answer_error

CHAT = "/v1/chat/completions"
GENERATING = [
    CHAT,
    f"{CHAT}/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/cohere/v2/chat",
    "/inference/v1/generate",
    "/invocations",
    "/generative_scoring",
    "/v1/systemone",
]
NOT_READY = {
    "error": {
        "message": "no engine is ready to serve this request",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
}

Serve = Callable[[dict, Callable, Callable], Awaitable[None]]


class Frontend:
    """Stands for vLLM's application: keeps what reaches it, and answers as the test wants."""

    def __init__(self) -> None:
        self.scopes: list[dict] = []
        self.records: list = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.serve: Serve = self._say

    async def __call__(self, scope, receive, send) -> None:
        self.scopes.append(scope)
        self.records.append(current_request.get())
        await self.serve(scope, receive, send)

    async def _say(self, scope, receive, send) -> None:
        await answer(send, 200, b"vllm", b"text/plain", self.headers)

    def header(self, name: bytes) -> list[bytes]:
        """Its values in the newest request."""
        return [value for key, value in self.scopes[-1]["headers"] if key == name]


class Gateway:
    """A gateway application, what is around it, and a client."""

    def __init__(self, app: GatewayApp, engines: Engines, legs: Legs, frontend: Frontend, client: httpx.AsyncClient):
        self.app, self.engines, self.legs, self.frontend, self.client = app, engines, legs, frontend, client
        self.state: dict[str, Any] = {"engines": []}

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    async def post(self, path: str = CHAT, body: object = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, bytes):
            return await self.client.post(path, headers=named, content=body)
        return await self.client.post(path, headers=named, json=body or {})

    async def count(self, name: str) -> float | None:
        """One of its metrics, labels and all."""
        for line in (await self.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return None


@contextlib.asynccontextmanager
async def gateway(*views: EngineView, connector=None, **more: Any) -> AsyncIterator[Gateway]:
    """``more``: what ``GatewayApp`` takes besides. Nothing of a request may be left behind."""
    before, faults = asyncio.all_tasks(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    engines, metrics, frontend = Engines(), GatewayMetrics(), Frontend()
    engines.update(views)
    async with open_session() as session:
        legs = Legs(engines, session, connector, metrics.ended)
        app = GatewayApp(frontend, engines, legs, metrics, fleet=lambda: dict(one.state), **more)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            one = Gateway(app, engines, legs, frontend, client)
            yield one
        await legs.close()
    await asyncio.sleep(0)
    gauges = app.gauges()
    assert (gauges.generations, gauges.requests_running, gauges.requests_waiting, gauges.releases_pending) == (0,) * 4
    assert [task for task in asyncio.all_tasks() - before if "trivet" in str(task.get_coro())] == []
    collect()
    assert faults == []  # exceptions that nobody retrieved


def view(name: str = "mixed-0", *, ready: bool = True, url: str = "http://127.0.0.1:1") -> EngineView:
    return EngineView(name, name.partition("-")[0], url, ready)


# life and readiness


async def test_a_worker_that_lives_is_healthy_whatever_its_engines_do():
    async with gateway() as one:
        response = await one.get("/health")
        assert (response.status_code, response.content) == (200, b"")
        assert one.frontend.scopes == []


NO_DECODE = "prefill engines cannot serve without a decode engine, and no decode or mixed engine is ready"
NO_PREFILL = "with this connector decode engines cannot compute prompts, and no prefill or mixed engine is ready"
UP, DOWN = {"ready": True}, {"ready": False}


@pytest.mark.parametrize(
    ("tiers", "alone", "why_not"),
    [
        # ``alone``: the connector lets decode engines compute prompts
        ({}, True, "there are no engines"),
        ({"mixed-0": DOWN}, True, "0 of 1 are ready"),
        ({"prefill-0": DOWN, "decode-0": DOWN}, True, "0 of 2 are ready"),
        ({"prefill-0": UP}, True, NO_DECODE),
        ({"prefill-0": UP, "decode-0": DOWN}, True, NO_DECODE),
        ({"prefill-0": UP, "decode-0": DOWN, "mixed-0": DOWN}, False, NO_DECODE),
        ({"decode-0": UP}, True, None),
        ({"decode-0": UP}, False, NO_PREFILL),
        ({"prefill-0": DOWN, "decode-0": UP}, True, None),
        ({"prefill-0": DOWN, "decode-0": UP}, False, NO_PREFILL),
        ({"prefill-0": UP, "decode-0": UP}, True, None),
        ({"prefill-0": UP, "decode-0": UP}, False, None),
        ({"mixed-0": UP}, True, None),
        ({"mixed-0": UP}, False, None),
        ({"prefill-0": UP, "decode-0": DOWN, "mixed-0": UP}, False, None),
    ],
)
async def test_a_gateway_is_ready_when_something_can_serve(tiers, alone, why_not):
    async with gateway(*(view(name, **state) for name, state in tiers.items())) as one:
        one.engines.decode_serves_whole = alone
        response = await one.get("/ready")
        assert response.status_code == (200 if why_not is None else 503)
        if why_not is not None:
            assert response.json()["error"]["message"] == f"no engine is ready to serve: {why_not}"
        # the request itself finds the same, and that the worker lives is another question
        assert (await one.post()).status_code == response.status_code
        assert (await one.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("why_not", "remarks", "status", "told"),
    [
        (None, "", 200, ""),
        (None, "http://a:1 answers 500", 200, "render servers that are not used: http://a:1 answers 500\n"),
        (
            "no render server can be used: http://a:1 ü",
            "http://a:1 ü",
            503,
            "no render server can be used: http://a:1 ü",
        ),
    ],
)
async def test_readiness_tells_of_render_servers(why_not, remarks, status, told):
    facts = [{"url": "http://a:1", "state": "up", "problem": None, "requests_running": 2}]
    servers = SimpleNamespace(why_not_ready=lambda: why_not, remarks=lambda: remarks, facts=lambda: facts)
    async with gateway(view(), render_servers=servers) as one:
        response = await one.get("/ready")
        found = response.text if status == 200 else response.json()["error"]["message"]
        assert (response.status_code, found) == (status, told)
        assert (await one.get("/trivet/status")).json()["render_servers"] == facts
        one.engines.update([view(ready=False)])
        response = await one.get("/ready")
        assert response.json()["error"]["message"] == "no engine is ready to serve: 0 of 1 are ready"


async def test_a_worker_that_stops_lives_and_serves_and_is_not_ready():
    stopping = False
    async with gateway(view(), stopping=lambda: stopping) as one:
        assert (await one.get("/ready")).status_code == 200
        stopping = True
        response = await one.get("/ready")
        assert (response.status_code, response.json()["error"]["message"]) == (503, "the gateway is stopping")
        assert [(await one.get("/health")).status_code, (await one.post()).status_code] == [200, 200]


async def test_head_is_answered_as_get_is():
    async with gateway() as one:
        assert [(await one.client.head(path)).status_code for path in ("/health", "/ready")] == [200, 503]


async def test_the_fleets_newest_word_counts():
    async with gateway(view(ready=False)) as one:
        assert (await one.get("/ready")).status_code == 503
        one.engines.update([view()])
        assert (await one.get("/ready")).status_code == 200


@pytest.mark.parametrize("path", GENERATING)
async def test_where_nothing_can_serve_a_client_is_told_in_openais_form(path):
    async with gateway(view(ready=False)) as one:
        response = await one.post(path)
        assert response.status_code == 503
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        if path == "/v1/messages":  # Anthropic's form, with OpenAI's fields in it
            assert response.json() == {"type": "error", "error": {**NOT_READY["error"], "type": "overloaded_error"}}
        else:
            assert {"error": error} == NOT_READY
        assert one.frontend.scopes == []
        facts = (await one.get(f"/trivet/requests/{response.headers['x-request-id']}")).json()
        assert (facts["status"], facts["path"], facts["generations"]) == (503, path, [])


# metrics


async def test_the_wait_for_a_turn_is_counted_also_where_there_is_none():
    async with gateway(view()) as one:
        await one.post()
        await one.post(x_trivet_serve="nonsense")  # it never waited
        assert await one.count("trivet_queue_wait_seconds_count") == 1
        assert await one.count("trivet_queue_wait_seconds_sum") < 5
        record = one.frontend.records[0]
        assert record.arrived_s <= record.queued_s <= record.admitted_s


async def test_metrics_are_prometheus_text():
    async with gateway(view()) as one:
        await one.post()
        one.legs.running = 3
        response = await one.get("/metrics")
        one.legs.running = 0
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = response.text.splitlines()
        assert f'trivet_requests_total{{path="{CHAT}",status="200"}} 1.0' in lines
        assert 'trivet_engine_ready{engine="mixed-0",tier="mixed"} 1.0' in lines
        assert "trivet_generations_running 3.0" in lines
        assert "trivet_kv_releases_pending 0.0" in lines
        assert "trivet_kv_releases_unconfirmed 0.0" in lines
        assert "trivet_requests_running 0.0" in lines
        assert "trivet_requests_waiting 0.0" in lines


async def test_requests_are_counted_by_path_and_status():
    async with gateway() as one:
        await one.post()
        await one.post(x_trivet_serve="both")
        one.engines.update([view()])

        async def refuse(scope, receive, send) -> None:
            await answer_error(send, 422, "no")

        one.frontend.serve = refuse
        await one.post("/v1/completions")
        assert await one.count(f'trivet_requests_total{{path="{CHAT}",status="503"}}') == 1.0
        assert await one.count(f'trivet_requests_total{{path="{CHAT}",status="400"}}') == 1.0
        assert await one.count('trivet_requests_total{path="/v1/completions",status="422"}') == 1.0


# API keys

KEYS = ("first-key", "zweiter-schlüssel")
INSIDE = ["/trivet/status", "/trivet/requests/none", "/trivet/nothing"]


@pytest.mark.parametrize("path", INSIDE)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer first-key ",
        "Bearer first-ke",
        "Bearer first-keyy",
        "first-key",
        "Basic first-key",
        "Bearer  first-key",
    ],
)
async def test_without_a_key_nothing_of_the_inside_is_told(path, authorization):
    async with gateway(view(), api_keys=KEYS) as one:
        headers = {} if authorization is None else {"Authorization": authorization}
        response = await one.get(path, **headers)
        assert response.status_code == 401
        assert response.json()["error"]["message"] == "an API key is needed: Authorization: Bearer KEY"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_each_of_the_keys_opens(key, scheme):
    async with gateway(view(), api_keys=KEYS) as one:
        response = await one.client.get("/trivet/status", headers={"Authorization": f"{scheme} {key}".encode()})
        assert response.status_code == 200


@pytest.mark.parametrize("guards_itself", [True, False], ids=["tokens plane", "text plane"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/trivet/status"), ("POST", CHAT), ("POST", "/tokenize")])
@pytest.mark.parametrize("key", [*KEYS, "wrong", "x" * 1000])
async def test_how_long_a_key_is_looked_at_tells_nothing_about_it(key, method, path, guards_itself, monkeypatch):
    """Whichever it is, it is compared with all, each time as a digest of the same length."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(app_module, "hmac", SimpleNamespace(compare_digest=compare))
    async with gateway(view(), api_keys=KEYS, guards_itself=guards_itself) as one:
        answer = await one.client.request(method, path, headers={"Authorization": f"Bearer {key}".encode()})
        assert answer.status_code == (200 if key in KEYS else 401)
    assert compared == [(32, 32)] * len(KEYS)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_and_metrics_need_no_key(path):
    async with gateway(view(), api_keys=KEYS) as one:
        assert (await one.get(path)).status_code == 200


async def test_a_gateway_without_keys_is_open():
    async with gateway(view()) as one:
        assert (await one.get("/trivet/status")).status_code == 200
        assert (await one.get("/trivet/status", Authorization="Bearer whatever")).status_code == 200


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/detokenize", "/pause", "/trivet/status", "/v3/new"])
async def test_what_vllm_leaves_open_needs_a_key_all_the_same(path):
    async with gateway(view(), api_keys=KEYS) as one:
        refused = [await one.post(path), await one.post(path, authorization="Bearer wrong")]
        assert [response.status_code for response in refused] == [401, 401]
        assert refused[0].json()["error"]["message"] == "an API key is needed: Authorization: Bearer KEY"
        assert one.frontend.scopes == []
        assert (await one.post(path, authorization="Bearer first-key")).text == "vllm"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v2/rerank", "/inference/v1/generate", "/cohere/v2/chat"])
async def test_keys_of_what_vllm_guards_are_asked_for_in_its_words_and_before_a_body_is_read(path):
    async with gateway(view(), api_keys=KEYS) as one:
        asked = []

        async def receive() -> dict:
            asked.append(1)
            return {"type": "http.disconnect"}

        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        await one.app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        assert (sent[0]["status"], json.loads(sent[1]["body"])) == (401, {"error": "Unauthorized"})
        refused = await one.post(path, authorization="Bearer wrong")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert (asked, one.frontend.scopes) == ([], [])
        assert (await one.post(path, authorization="Bearer first-key")).text == "vllm"
        assert one.frontend.header(b"authorization") == [b"Bearer first-key"]  # its server is given the same keys


async def test_browsers_may_ask_without_a_key_what_they_may_do():
    async with gateway(view(), api_keys=KEYS) as one:
        assert (await one.client.options(CHAT)).text == "vllm"
        assert (await one.get("/v1/models")).status_code == 401


# request ids


@pytest.mark.parametrize("path", GENERATING)
async def test_a_request_without_an_id_is_given_one(path):
    async with gateway(view()) as one:
        responses = [await one.post(path) for _ in range(2)]
        ids = [response.headers["x-request-id"] for response in responses]
        assert ids[0] != ids[1]
        assert [len(one) for one in ids] == [32, 32]
        assert one.frontend.header(b"x-request-id") == [ids[1].encode()]
        assert (await one.get(f"/trivet/requests/{ids[0]}")).json()["request_id"] == ids[0]


async def test_a_request_keeps_the_id_that_it_brings():
    async with gateway(view()) as one:
        response = await one.post(x_request_id="mine-1")
        assert response.headers.get_list("x-request-id") == ["mine-1"]
        assert one.frontend.header(b"x-request-id") == [b"mine-1"]
        assert (await one.get("/trivet/requests/mine-1")).json()["status"] == 200


async def test_an_id_that_vllm_answers_with_is_not_given_twice():
    async with gateway(view()) as one:
        one.frontend.headers = [(b"X-Request-Id", b"vllms")]
        assert (await one.post()).headers.get_list("x-request-id") == ["vllms"]


async def test_what_is_refused_here_has_an_id_too():
    async with gateway(view()) as one:
        response = await one.post(x_request_id="mine-2", x_trivet_serve="both")
        assert response.headers["x-request-id"] == "mine-2"
        assert (await one.get("/trivet/requests/mine-2")).json()["status"] == 400


# X-Trivet-Serve


@pytest.mark.parametrize(
    ("wish", "colocate"),
    [
        (None, None),
        ("auto", None),
        ("colocated", "the request asks for it"),
        ("Colocated", "the request asks for it"),
        ("split", None),
    ],
)
async def test_a_request_says_whether_it_may_be_split(wish, colocate):
    async with gateway(view()) as one:
        headers = {"x_trivet_serve": wish} if wish else {}
        assert (await one.post(**headers)).status_code == 200
        assert one.frontend.records[-1].colocate == colocate
        assert one.frontend.records[-1].splits is (wish == "split")


@pytest.mark.parametrize("wish", ["both", "", "colocated, auto"])
async def test_another_wish_is_an_error(wish):
    async with gateway(view()) as one:
        response = await one.post(x_trivet_serve=wish)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "X-Trivet-Serve is 'auto', 'colocated' or 'split'",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        }
        assert one.frontend.scopes == []


# what a request did


def generating(one: Gateway, *, prompts: int = 1) -> Serve:
    """A front end that runs generations on the legs, as vLLM's would."""

    async def serve(scope, receive, send) -> None:
        for number in range(prompts):
            async with contextlib.aclosing(one.legs.run(token_request(request_id=f"gen-{number}"))) as chunks:
                async for _ in chunks:
                    pass
        await answer(send, 200, b"done", b"text/plain")

    return serve


@pytest.fixture
async def pair():
    engines = [FakeEngine("prefill-0", "prefill", whole(cached=2)), FakeEngine("decode-0", "decode", speaking(5, 6))]
    async with listening(*engines):
        yield engines


async def test_a_requests_generations_are_told(pair):
    async with gateway(*(one.view() for one in pair), connector=NixlConnector()) as one:
        one.frontend.serve = generating(one, prompts=2)
        await one.post(x_request_id="mine")
        facts = (await one.get("/trivet/requests/mine")).json()
        assert (facts["request_id"], facts["path"], facts["status"]) == ("mine", CHAT, 200)
        assert len({generation["id"] for generation in facts["generations"]}) == 2
        first = facts["generations"][0]
        assert (first["split"], first["prefill_engine"], first["decode_engine"]) == (True, "prefill-0", "decode-0")
        assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (3, 2, 2)
        assert first["render_ms"] >= 0
        assert first["ttft_ms"] > 0
        assert await one.count('trivet_generations_total{outcome="length",served="split"}') == 2.0


async def test_a_request_that_asks_for_it_is_served_colocated(pair):
    async with gateway(*(one.view() for one in pair), connector=NixlConnector()) as one:
        one.frontend.serve = generating(one)
        await one.post(x_request_id="mine", x_trivet_serve="colocated")
        (generation,) = (await one.get("/trivet/requests/mine")).json()["generations"]
        assert (generation["split"], generation["reason"]) == (False, "the request asks for it")
        assert [engine.legs() for engine in pair] == [[], ["decode"]]


async def test_the_next_request_does_not_ask_for_what_the_last_one_did(pair):
    async with gateway(*(one.view() for one in pair), connector=NixlConnector()) as one:
        one.frontend.serve = generating(one)
        await one.post(x_trivet_serve="colocated")
        await one.post(x_request_id="mine")
        assert (await one.get("/trivet/requests/mine")).json()["generations"][0]["split"] is True
        assert current_request.get() is None


async def test_requests_at_once_are_told_apart(pair):
    async with gateway(*(one.view() for one in pair), connector=NixlConnector()) as one:
        one.frontend.serve = generating(one)
        wishes = ["auto", "colocated"] * 3
        await asyncio.gather(
            *(one.post(x_request_id=f"mine-{number}", x_trivet_serve=wish) for number, wish in enumerate(wishes))
        )
        facts = [(await one.get(f"/trivet/requests/mine-{number}")).json() for number in range(len(wishes))]
        assert [[generation["split"] for generation in one["generations"]] for one in facts] == [[True], [False]] * 3


async def test_a_front_end_that_fails_leaves_nothing_behind():
    async with gateway(view()) as one:

        async def fail(scope, receive, send) -> None:
            raise RuntimeError("broken")

        one.frontend.serve = fail
        with pytest.raises(RuntimeError, match="broken"):
            await one.post(x_request_id="mine")
        assert current_request.get() is None
        assert (await one.get("/trivet/requests/mine")).json()["status"] == 500  # as the server answers


@pytest.mark.parametrize("path", ["/trivet/requests/unknown", "/trivet/requests/", "/trivet/requests/a/b"])
async def test_a_request_that_is_not_known_is_not_found(path):
    async with gateway(view()) as one:
        response = await one.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "no such request among the newest ones"


async def test_a_place_inside_that_does_not_exist_is_not_found():
    async with gateway(view()) as one:
        response = await one.get("/trivet/nothing")
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "no such endpoint: /trivet/nothing"


# the fleet's state

METRICS = "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 3.0\nvllm:kv_cache_usage_perc 0.5\n"


@pytest.fixture
async def loaded_engine():
    """The address of an engine that tells its load."""
    application = web.Application()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    application.router.add_get("/metrics", metrics)
    server = TestServer(application)
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


async def test_the_status_is_the_fleets_with_each_engines_load(loaded_engine):
    with nobody_listens() as nowhere:
        one_engine = {"name": "mixed-0", "url": loaded_engine, "ready": True, "state": "ready"}
        silent = {"name": "mixed-1", "url": nowhere, "ready": True, "state": "ready"}
        starting = {"name": "mixed-2", "url": loaded_engine, "ready": False, "state": "starting"}
        async with gateway(view("mixed-0"), view("mixed-1")) as one:
            one.state = {"engines": [one_engine, silent, starting], "more": "of it"}
            one.legs.running = 4
            with one.engines.charge(view("mixed-0"), 700):
                status = (await one.get("/trivet/status")).json()
            one.legs.running = 0
    load = {"running": 2.0, "waiting": 3.0, "kv_usage": 0.5}
    assert status == {
        "engines": [
            {**one_engine, "outstanding_tokens": 700, "load": load},
            {**silent, "outstanding_tokens": 0, "load": None},
            {**starting, "outstanding_tokens": 0, "load": None},
        ],
        "more": "of it",
        "generations_running": 4,
    }


async def test_asking_for_the_status_changes_nothing():
    async with gateway() as one:
        one.state = {"engines": [{"name": "mixed-0", "url": "http://127.0.0.1:1", "ready": False}]}
        before = repr(one.state)
        await one.get("/trivet/status")
        assert repr(one.state) == before


# all the rest is vLLM's


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/version"),
        ("GET", "/"),
        ("GET", "/healthy"),
        ("GET", "/trivet"),
        ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions/render"),
        ("POST", "/health"),
        ("POST", "/trivet/status"),
        ("GET", CHAT),
        ("DELETE", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/messages/count_tokens"),
    ],
)
async def test_other_requests_reach_vllms_application_as_they_are(method, path):
    async with gateway() as one:  # no engine: they need none
        response = await one.client.request(method, path)
        assert (response.status_code, response.text) == (200, "vllm")
        assert (one.frontend.scopes[-1]["method"], one.frontend.scopes[-1]["path"]) == (method, path)
        assert one.frontend.records == [None]
        assert "x-request-id" not in response.headers


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
async def test_what_is_no_http_request_passes_through(kind):
    async with gateway() as one:
        seen = []

        async def receive() -> dict:
            return {"type": f"{kind}.startup"}

        async def send(message: dict) -> None:
            seen.append(message["type"])

        async def serve(scope, receive, send) -> None:
            await send({"type": (await receive())["type"] + ".complete"})

        one.frontend.serve = serve
        scope = {"type": kind, "path": "/health"}
        await one.app(scope, receive, send)
        assert one.frontend.scopes == [scope]
        assert seen == [f"{kind}.startup.complete"]


async def test_an_answer_is_passed_on_piece_by_piece():
    """Nothing is held back, changed or put together."""
    async with gateway(view()) as one:
        pieces = [b"data: 1\n\n", b"data: 2\n\n", b""]
        sent: list[dict] = []

        async def stream(scope, receive, send) -> None:
            assert (await receive())["body"] == b"question"
            await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
            for number, piece in enumerate(pieces):
                await send({"type": "http.response.body", "body": piece, "more_body": number < 2})
                assert len(sent) == number + 2, "it has left the gateway"

        messages = [{"type": "http.request", "body": b"question"}]

        async def receive() -> dict:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: dict) -> None:
            sent.append(message)

        one.frontend.serve = stream
        headers = [(b"x-request-id", b"mine")]
        await one.app({"type": "http", "method": "POST", "path": CHAT, "headers": headers}, receive, send)
        assert sent[0]["headers"] == [(b"a", b"b"), (b"x-request-id", b"mine")]
        assert [message["body"] for message in sent[1:]] == pieces


async def test_an_engine_that_refuses_is_recorded(pair):
    pair[1].replies = [refusing(400, "too long")]
    async with gateway(pair[1].view(), connector=NixlConnector()) as one:

        async def serve(scope, receive, send) -> None:
            try:
                async for _ in one.legs.run(token_request()):
                    pass
            except Exception as error:
                await answer_error(send, 400, str(error))

        one.frontend.serve = serve
        assert (await one.post(x_request_id="mine")).status_code == 400
        facts = (await one.get("/trivet/requests/mine")).json()
        assert facts["status"] == 400
        assert facts["generations"][0]["error"] == "too long"
        assert await one.count('trivet_generations_total{outcome="refused",served="colocated"}') == 1.0


# what a client may not say

HIDDEN = [
    b'{"kv_transfer_params": {"remote_host": "x"}}',
    b'{"vllm_xargs": {"kv_transfer_params": {"a": 1}}}',
    b'[{"a": 1}, {"ec_transfer_params": {"a": 1}}]',
    b'{"request_id": "mine"}',
    b'{"data_parallel_rank": 1}',
    # what Python's JSON reads, as vLLM does, and others do not
    b'{"x": NaN, "kv_transfer_params": {"a": 1}}',
    b'{"x": "\\ud800", "kv_transfer_params": {"a": 1}}',
    b'{"x": -Infinity, "request_id": "mine"}',
    b'\xef\xbb\xbf{"kv_transfer_params": {"a": 1}}',
    '{"kv_transfer_params": {"a": 1}}'.encode("utf-16"),
    '{"kv_transfer_params": {"a": 1}}'.encode("utf-32-le"),
    b'{"kv_transfer_params": null, "kv_transfer_params": {"a": 1}}',
]


@pytest.mark.parametrize("body", HIDDEN)
@pytest.mark.parametrize("path", [CHAT, "/cohere/v2/chat"])
async def test_fields_that_steer_the_transfer_are_refused_by_name(path, body):
    async with gateway(view()) as one:
        response = await one.post(path, body, x_request_id="mine")
        assert response.status_code == 400
        error = response.json()["error"]
        assert " is not for clients of this service (a topology may allow it: gateway.allow: [" in error["message"]
        assert (error["code"], error["type"]) == (400, "Bad Request")
        assert response.headers["x-request-id"] == "mine"
        assert one.frontend.scopes == []


async def test_a_data_parallel_rank_is_refused_as_well():
    async with gateway(view()) as one:
        response = await one.post(x_data_parallel_rank="1")
        assert response.status_code == 400
        assert "the header x-data-parallel-rank" in response.json()["error"]["message"]


async def test_what_the_topology_allows_goes_on():
    allow = ("kv_transfer_params", "data_parallel_rank")
    async with gateway(view(), rules=Rules(allow=allow)) as one:
        assert (await one.post(body={"kv_transfer_params": {}}, x_data_parallel_rank="3")).status_code == 200
        assert one.frontend.records[-1].decode_rank == "3"
        assert one.frontend.header(b"x-data-parallel-rank") == []  # vLLM would hold it against a front end of one
        assert (await one.post(body={"request_id": "x"})).status_code == 400


@pytest.mark.parametrize("said", ["mine", "a\r\nSet-Cookie: x=y", "\u00fc\u4f60", "\x00", "x" * 500, ""])
async def test_an_id_in_the_body_is_the_requests_where_that_is_allowed(said):
    async with gateway(view(), rules=Rules(allow=("request_id",))) as one:
        response = await one.post(body={"request_id": said})
        assert response.status_code == 200
        (echoed,) = [value for name, value in response.headers.raw if name == b"x-request-id"]
        expected = "".join("?" if one < " " else one for one in said).encode("latin-1", errors="replace")
        assert echoed == expected
        assert one.frontend.header(b"x-request-id") == [expected]
        assert "set-cookie" not in response.headers
        record = one.frontend.records[-1]
        assert (record.request_id, record.forwarded["X-Client-Request-Id"]) == (said, expected.decode("latin-1"))


async def test_an_id_in_the_body_is_found_again():
    async with gateway(view(), rules=Rules(allow=("request_id",))) as one:
        await one.post(body={"request_id": "mine"})
        assert (await one.get("/trivet/requests/mine")).json()["status"] == 200


async def test_the_header_is_the_id_where_both_are_there():
    async with gateway(view(), rules=Rules(allow=("request_id",))) as one:
        response = await one.post(body={"request_id": "body"}, x_request_id="header")
        assert response.headers["x-request-id"] == "header"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b"\xff\xfe",
        b"\x00" * 50,
        b"[" * 5000 + b"]" * 5000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
    ids=lambda body: repr(body[:10]),
)
async def test_a_body_that_is_no_request_is_vllms_to_refuse(body):
    async with gateway(view()) as one:
        got = []

        async def serve(scope, receive, send) -> None:
            got.append((await receive())["body"])
            await answer(send, 400, b"no", b"text/plain")

        one.frontend.serve = serve
        assert (await one.post(body=body or b"")).status_code == 400
        assert got == [body or b""]


async def test_a_deeply_nested_body_is_looked_through():
    """A client says how deep it goes."""
    depth = 900
    body = b"[" * depth + b'{"kv_transfer_params": {}}' + b"]" * depth
    async with gateway(view()) as one:
        assert (await one.post(body=body)).status_code == 400


# limits


@pytest.mark.parametrize("path", [*GENERATING, "/tokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_no_door_takes_a_body_that_is_too_large(path, chunked):
    """Whether its length is said before or only seen when it comes."""
    came = 0

    async def body():
        nonlocal came
        for _ in range(64):
            came += 2**18
            yield b" " * 2**18

    async with gateway(view(), rules=Rules(body_bytes=2**20)) as one:
        headers = {} if chunked else {"content-length": str(2**24)}
        response = await one.client.post(path, content=body(), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, 413)
    assert error["message"] == "the body is larger than 1 MiB (gateway.limits.body_mib)"
    assert one.frontend.scopes == []
    assert came == (2**20 + 2**18 if chunked else 0)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_nor_does_a_method_that_needs_none(method):
    async with gateway(view(), rules=Rules(body_bytes=2**20)) as one:
        response = await one.client.request(method, "/v1/models", content=b" " * (2**20 + 1))
        assert (response.status_code, one.frontend.scopes) == (413, [])


async def test_a_body_that_is_too_large_is_refused():
    async with gateway(view(), rules=Rules(body_bytes=2**20)) as one:
        assert (await one.post(body=b" " * 2**20)).status_code == 200
        response = await one.post(body=b" " * (2**20 + 1))
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "the body is larger than 1 MiB (gateway.limits.body_mib)"
        assert len(one.frontend.scopes) == 1
        assert (await one.post("/tokenize", body=b" " * 2**20)).status_code == 200
        other = await one.post("/tokenize", body=b" " * (2**20 + 1))
        assert (other.status_code, other.json()) == (413, response.json())
        assert len(one.frontend.scopes) == 2


@pytest.mark.parametrize(
    ("rule", "said", "expected"),
    [
        (None, None, None),
        (5.0, None, 5.0),
        (None, "2.5", 2.5),
        (5.0, "2.5", 2.5),
        (5.0, "9", 5.0),
    ],
)
async def test_a_deadline_is_the_nearer_of_the_clients_and_the_topologys(rule, said, expected):
    async with gateway(view(), rules=Rules(deadline_s=rule)) as one:
        await one.post(**({"x_trivet_deadline_s": said} if said else {}))
        record = one.frontend.records[-1]
        assert (record.deadline_s and record.deadline_s - record.arrived_s) == (expected and pytest.approx(expected))


@pytest.mark.parametrize("said", ["0", "-1", "nan", "soon", "", "1s", "0x10", "inf", "1e999", "1_0"])
async def test_another_deadline_is_an_error(said):
    async with gateway(view()) as one:
        response = await one.post(x_trivet_deadline_s=said)
        assert response.status_code == 400
        message = (
            "X-Trivet-Deadline-S is a number of seconds above 0 in digits, such as 30 or 2.5, at most 999999999; "
            "leave it out for no deadline of your own"
        )
        assert response.json()["error"]["message"] == message
        assert one.frontend.scopes == []


@pytest.mark.parametrize(
    ("rule", "said", "outcome"), [(None, "0.05", "deadline"), (60.0, "0.05", "deadline"), (0.05, "60", "error")]
)
async def test_a_deadline_reaches_the_legs_and_is_counted_as_whose_it_is(rule, said, outcome):
    engine = FakeEngine("mixed-0", "mixed", hanging())
    async with listening(engine), gateway(engine.view(), rules=Rules(deadline_s=rule)) as one:
        statuses = []

        async def serve(scope, receive, send) -> None:
            try:
                async for _ in one.legs.run(token_request()):
                    pass
            except ServingError as error:
                statuses.append(error.status)
                await answer_error(send, error.status, error.message)

        one.frontend.serve = serve
        assert (await one.post(x_trivet_deadline_s=said)).status_code == 504
        assert statuses == [504]
        assert await one.count(f'trivet_generations_total{{outcome="{outcome}",served="colocated"}}') == 1.0


# what engines see of a client


async def test_a_clients_headers_are_kept_for_the_engines():
    async with gateway(view()) as one:
        headers = {
            "traceparent": "00-1",
            "x-tenant": "t",
            "x_session_id": "s",
            "authorization": "Bearer key",
            "cookie": "a=b",
            "x_trivet_serve": "auto",
            "x_request_id": "mine",
        }
        await one.post(**headers)
        forwarded = dict(one.frontend.records[-1].forwarded)
        assert forwarded.pop("user-agent")
        assert forwarded == {"traceparent": "00-1", "x-tenant": "t", "x-session-id": "s", "X-Client-Request-Id": "mine"}


# the queue


class Held:
    """A front end that answers when it is told to."""

    def __init__(self, one: Gateway) -> None:
        self.go, self.waiting = asyncio.Event(), 0
        one.frontend.serve = self

    async def __call__(self, scope, receive, send) -> None:
        self.waiting += 1
        await self.go.wait()
        await answer(send, 200, b"done", b"text/plain")


async def test_requests_wait_for_their_turn():
    async with gateway(view(), admission=Admission(2, 3, 10.0)) as one:
        held = Held(one)
        asking = [asyncio.create_task(one.post()) for _ in range(5)]
        await holds(lambda: (one.app.gauges().requests_running, one.app.gauges().requests_waiting) == (2, 3))
        assert held.waiting == 2
        refused = await one.post()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"] == "too many requests: 2 are served and 3 wait"
        held.go.set()
        assert [response.status_code for response in await asyncio.gather(*asking)] == [200] * 5


async def test_a_request_that_waits_too_long_is_told_to_come_again():
    async with gateway(view(), admission=Admission(1, 1, 0.05)) as one:
        held = Held(one)
        first = asyncio.create_task(one.post())
        await holds(lambda: held.waiting)
        refused = await one.post()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "no place for this request within 0.05 s"
        held.go.set()
        assert (await first).status_code == 200


async def test_other_requests_do_not_wait():
    async with gateway(view(), admission=Admission(1, 0, 0.05)) as one:
        held = Held(one)
        first = asyncio.create_task(one.post())
        await holds(lambda: held.waiting)
        assert (await one.get("/health")).status_code == 200
        assert (await one.get("/metrics")).status_code == 200
        held.go.set()
        assert (await first).status_code == 200


class Client:
    """A client that can leave."""

    def __init__(self, one: Gateway, **headers: str) -> None:
        self.sent: list[dict] = []
        self._leaving = asyncio.Event()
        self._messages = [{"type": "http.request", "body": b"{}", "more_body": False}]
        encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": encoded}
        self.served = asyncio.create_task(one.app(scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if self._messages:
            return self._messages.pop()
        await self._leaving.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.sent.append(message)

    async def leave(self) -> None:
        self._leaving.set()
        await asyncio.wait_for(self.served, WAIT_S)


async def test_a_client_that_leaves_the_queue_is_forgotten_at_once():
    async with gateway(view(), admission=Admission(1, 5, 10.0)) as one:
        held = Held(one)
        first = asyncio.create_task(one.post())
        await holds(lambda: held.waiting)
        client, behind = Client(one, x_request_id="mine"), Client(one)
        await holds(lambda: one.app.gauges().requests_waiting == 2)
        async with asyncio.timeout(AT_ONCE_S):
            await client.leave()
        assert one.app.gauges().requests_waiting == 1
        assert client.sent == []
        held.go.set()
        await first
        await asyncio.wait_for(behind.served, WAIT_S)
        assert behind.sent[0]["status"] == 200
        assert held.waiting == 2
        assert await one.count(f'trivet_requests_total{{path="{CHAT}",status="499"}}') == 1.0
        assert (await one.get("/trivet/requests/mine")).json()["status"] == 499


async def test_a_client_that_leaves_before_its_body_has_come_is_forgotten():
    async with gateway(view()) as one:
        sent = []

        async def receive() -> dict:
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)

        await one.app({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)
        assert (sent, one.frontend.scopes) == ([], [])
        assert await one.count(f'trivet_requests_total{{path="{CHAT}",status="499"}}') == 1.0


async def test_a_client_that_leaves_before_its_answer_begins_is_counted():
    async with gateway(view()) as one:

        async def wait(scope, receive, send) -> None:
            await receive()
            assert (await receive())["type"] == "http.disconnect"

        one.frontend.serve = wait
        await Client(one, x_request_id="mine").leave()
        assert await one.count(f'trivet_requests_total{{path="{CHAT}",status="499"}}') == 1.0
        assert (await one.get("/trivet/requests/mine")).json()["status"] == 499


async def test_a_deadline_ends_the_wait_in_the_queue():
    async with gateway(view(), admission=Admission(1, 5, 10.0)) as one:
        held = Held(one)
        first = asyncio.create_task(one.post())
        await holds(lambda: held.waiting)
        late = await one.post(x_trivet_deadline_s="0.05")
        assert late.status_code == 504
        assert late.json()["error"]["message"] == "the request's deadline has passed"
        assert one.app.gauges().requests_waiting == 0
        held.go.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize(
    ("allow", "may"),
    [((), False), (("request_id",), False), (("kv_transfer_params",), True), (("ec_transfer_params",), True)],
)
async def test_whether_a_client_may_steer_is_the_topologys_to_say(allow, may):
    async with gateway(view(), rules=Rules(allow=allow)) as one:
        await one.post()
        assert one.frontend.records[0].may_steer is may


async def test_a_server_that_gives_up_on_a_queued_request_leaves_nothing():
    async with gateway(view(), admission=Admission(1, 5, 10.0)) as one:
        held = Held(one)
        first = asyncio.create_task(one.post())
        await holds(lambda: held.waiting)
        client = Client(one)
        await holds(lambda: one.app.gauges().requests_waiting == 1)
        client.served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.served
        assert one.app.gauges().requests_waiting == 0
        held.go.set()
        assert (await first).status_code == 200


async def test_clients_that_leave_at_any_moment_leave_no_gauge_behind():
    dice = random.Random(3)
    async with gateway(view(), admission=Admission(3, 8, 0.02)) as one:

        async def serve(scope, receive, send) -> None:
            leaving = asyncio.ensure_future(receive_until_left(receive))
            await asyncio.wait([leaving], timeout=dice.random() * 0.01)
            leaving.cancel()
            await answer(send, 200, b"done", b"text/plain")

        one.frontend.serve = serve

        async def come_and_go() -> None:
            await asyncio.sleep(dice.random() * 0.1)
            client = Client(one)
            await asyncio.wait([client.served], timeout=dice.random() * 0.02)
            if dice.random() < 0.2:
                client.served.cancel()
                await asyncio.wait([client.served])
            else:
                await client.leave()

        await asyncio.gather(*(come_and_go() for _ in range(300)))
        assert one.app.gauges() == Gauges(0, 0, 0, 0, 0)


async def receive_until_left(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# statuses


@pytest.mark.parametrize(("status", "expected"), [(429, "1"), (503, "1"), (500, None), (200, None), (504, None)])
async def test_who_may_come_again_is_told_when(status, expected):
    async with gateway(view()) as one:

        async def serve(scope, receive, send) -> None:
            await answer(send, status, b"", b"text/plain")

        one.frontend.serve = serve
        assert (await one.post()).headers.get("retry-after") == expected


async def test_when_to_come_again_is_not_said_twice():
    async with gateway(view()) as one:

        async def serve(scope, receive, send) -> None:
            await answer(send, 503, b"", b"text/plain", [(b"Retry-After", b"9")])

        one.frontend.serve = serve
        assert (await one.post()).headers.get_list("retry-after") == ["9"]


# usage in streams


def streaming_events(*events: bytes, kind: bytes = b"text/event-stream; charset=utf-8") -> Serve:
    async def serve(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return serve


def late(one: Gateway, serve: Serve, counts: dict | None) -> Serve:
    """As if a colocated generation had told its cached tokens with the last one."""

    async def serving(scope, receive, send) -> None:
        record = current_request.get()
        record.generations.append(GenerationRecord("gen", 3, 0.0, cached_late=counts))
        await serve(scope, receive, send)

    return serving


USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
COUNTS = {"cached_tokens": 8, "created_cache_tokens": 1}


async def test_cached_tokens_that_were_told_late_are_put_into_the_usage():
    async with gateway(view()) as one:
        one.frontend.serve = late(one, streaming_events(b'data: {"a":1}\n\n', USAGE, b"data: [DONE]\n\n"), COUNTS)
        response = await one.post()
        expected = USAGE.replace(b'"cached_tokens":0', b'"cached_tokens":8')
        assert response.content == b'data: {"a":1}\n\n' + expected + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"usage":{"prompt_tokens_details":null}}\n\n',
        b'data: {"usage":null,"x":"prompt_tokens_details"}\n\n',
        b'data: {"choices":[{"text":"\\"prompt_tokens_details\\""}]}\n\n',
        b'data: ["prompt_tokens_details"]\n\n',
        b'data: "prompt_tokens_details\n\n',
        b': "prompt_tokens_details"\n\n',
        b'data: {"usage":{"prompt_tokens_details":5}}\n\n',
        b'data: {"usage":[{"prompt_tokens_details":{}}]}\n\n',
        b'"prompt_tokens_details"',
    ],
)
async def test_other_events_go_on_byte_for_byte(event):
    async with gateway(view()) as one:
        one.frontend.serve = late(one, streaming_events(event), COUNTS)
        assert (await one.post()).content == event


@pytest.mark.parametrize(("counts", "kind"), [(None, b"text/event-stream"), (COUNTS, b"application/json")])
async def test_usage_that_was_told_in_time_goes_on_byte_for_byte(counts, kind):
    async with gateway(view()) as one:
        one.frontend.serve = late(one, streaming_events(USAGE, kind=kind), counts)
        assert (await one.post()).content == USAGE


# a front end that does not guard itself


@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/x")]
)
async def test_where_nobody_else_asks_for_the_key_the_gateway_does(method, path):
    async with gateway(view(), api_keys=KEYS, guards_itself=False) as one:
        assert (await one.client.request(method, path)).status_code == 401
        assert one.frontend.scopes == []
        headers = {"Authorization": "Bearer first-key"}
        assert (await one.client.request(method, path, headers=headers, json={})).status_code == 200
        assert (await one.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/inference/v1/abort_requests", "/abort_requests", "/scale_elastic_ep"])
async def test_what_could_end_anothers_request_is_not_for_clients(path):
    async with gateway(view()) as one:
        response = await one.client.post(path, json={"request_ids": ["chatcmpl-another"]})
        assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
        assert one.frontend.scopes == []


# X-Trivet-Served


async def heads_and_bodies(one: Gateway, serve: Callable) -> list[str]:
    """What a client of one streaming request is sent, and when engines were chosen."""
    seen: list[str] = []

    async def frontend(scope, receive, send) -> None:
        record = current_request.get()
        await serve(send, record, seen)

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(0.01)  # a client that reads slowly
            served = dict(message["headers"]).get(b"x-trivet-served", b"nothing").decode()
            seen.append(f"head: {served}")
        else:
            seen.append(f"body: {message['body'].decode()}")

    async def receive() -> Any:
        if not asked:
            asked.append(True)
            return {"type": "http.request", "body": b"{}", "more_body": False}
        return await asyncio.Event().wait()

    asked: list[bool] = []
    one.frontend.serve = frontend
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    await one.app(scope, receive, send)
    return seen


def starts(content_type: bytes = b"text/event-stream; charset=utf-8") -> dict:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


def says(text: bytes, *, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": text, "more_body": more}


def decided_record() -> GenerationRecord:
    return GenerationRecord(
        "g", 3, 0.0, intended_split=True, split=True, split_reason="long_prompt", prefill_engine="p", decode_engine="d"
    )


async def test_a_streams_head_waits_until_engines_are_chosen_and_no_longer():
    async def serve(send, record, seen) -> None:
        await send(starts())
        seen.append("front end goes on")
        record.generations.append(decided_record())
        await asyncio.gather(record.decided(), record.decided(), send(says(b"one", more=True)))
        await send(says(b"two"))

    async with gateway(view()) as one:
        assert await heads_and_bodies(one, serve) == [
            "front end goes on",
            "head: split; reason=long_prompt; prefill=p; decode=d",
            "body: one",
            "body: two",
        ]


async def test_a_stream_that_asks_no_engine_begins_with_its_body():
    async def serve(send, record, seen) -> None:
        await send(starts())
        await send(says(b"an error"))

    async with gateway(view()) as one:
        assert await heads_and_bodies(one, serve) == ["head: nothing", "body: an error"]
        assert await one.count(f'trivet_requests_total{{path="{CHAT}",status="200"}}') == 1


@pytest.mark.parametrize("tells", [True, False])
async def test_an_answer_in_one_piece_has_it_in_its_head(tells):
    async def serve(send, record, seen) -> None:
        record.generations.append(decided_record())
        await send(starts(b"application/json"))
        await send(says(b"{}"))

    async with gateway(view(), rules=Rules(tells_served=tells)) as one:
        said = "split; reason=long_prompt; prefill=p; decode=d" if tells else "nothing"
        assert await heads_and_bodies(one, serve) == [f"head: {said}", "body: {}"]


async def test_a_stream_is_not_held_where_nothing_is_told():
    async def serve(send, record, seen) -> None:
        await send(starts())
        seen.append("front end goes on")
        await send(says(b"one"))

    async with gateway(view(), rules=Rules(tells_served=False)) as one:
        assert await heads_and_bodies(one, serve) == ["head: nothing", "front end goes on", "body: one"]


# streams of other protocols


def streaming_frontend(*pieces: bytes, fault: Exception | None = None) -> Serve:
    async def serve(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if fault is not None:
            raise fault
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return serve


CREATED = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'


async def test_a_response_that_breaks_off_inside_the_front_end_ends_with_an_error():
    """vLLM only closes the connection there, and logs why."""
    async with gateway(view()) as one:
        one.frontend.serve = streaming_frontend(CREATED, fault=ValueError("no such grammar"))
        response = await one.post("/v1/responses", {"stream": True})
    assert response.content.startswith(CREATED + b"event: error\ndata: ")
    told = json.loads(response.content.rpartition(b"data: ")[2])
    assert (told["type"], told["message"], told["sequence_number"]) == ("error", "no such grammar", 1)
    assert told["error"]["message"] == "no such grammar"


async def test_what_fails_before_a_stream_begins_is_the_servers_to_answer():
    async def serve(scope, receive, send) -> None:
        raise ValueError("odd")

    async with gateway(view()) as one:
        one.frontend.serve = serve
        with pytest.raises(ValueError, match="odd"):
            await one.post("/v1/responses", {"stream": True})


@pytest.mark.parametrize("stored", [{"previous_response_id": "resp_1"}, {"background": True}])
async def test_what_needs_a_stored_response_is_refused_where_another_worker_may_have_it(stored):
    async with gateway(view(), rules=Rules(keeps_responses=False)) as one:
        response = await one.post("/v1/responses", {"input": "Hi", **stored})
        assert (response.status_code, one.frontend.scopes) == (501, [])
        assert next(iter(stored)) in response.json()["error"]["message"]
        assert (await one.post("/v1/responses", {"input": "Hi", "store": True})).status_code == 200
        assert (await one.post("/v1/responses/render", {"input": "Hi"})).status_code == 200
        for method, path in [
            ("GET", "resp_1"),
            ("DELETE", "resp_1"),
            ("POST", "resp_1/cancel"),
            ("GET", "x/input_items"),
        ]:
            response = await one.client.request(method, f"/v1/responses/{path}")
            assert (response.status_code, response.json()["error"]["code"]) == (501, 501)
