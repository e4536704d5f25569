"""The gateway over a front end that is a few lines of ASGI; engines and legs are the real ones."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from helpers.engines import FakeEngine, listening, nobody_listens, refusing, speaking, token_request, whole
from trivet.connectors import NixlConnector
from trivet.gateway import app as app_module
from trivet.gateway.app import GatewayApp
from trivet.gateway.metrics import GatewayMetrics
from trivet.journal import current_request
from trivet.legs.life import Legs
from trivet.legs.wire import open_session
from trivet.routing.engines import Engines, EngineView
from trivet.surface.http import answer, answer_error

CHAT = "/v1/chat/completions"
GENERATING = [
    CHAT,
    f"{CHAT}/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
    "/invocations",
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
        self.running = 0

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.client.get(path, headers=headers)

    async def post(self, path: str = CHAT, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, headers=named, json={})

    async def count(self, name: str) -> float | None:
        """One of its metrics, labels and all."""
        for line in (await self.get("/metrics")).text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return None


@contextlib.asynccontextmanager
async def gateway(*views: EngineView, api_keys: tuple[str, ...] = (), connector=None) -> AsyncIterator[Gateway]:
    engines, metrics, frontend = Engines(), GatewayMetrics(), Frontend()
    engines.update(views)
    async with open_session() as session:
        legs = Legs(engines, session, connector, metrics.ended)
        app = GatewayApp(
            frontend,
            engines,
            legs,
            metrics,
            fleet=lambda: dict(one.state),
            running=lambda: one.running,
            api_keys=api_keys,
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            one = Gateway(app, engines, legs, frontend, client)
            yield one
        await legs.close()


def view(name: str = "mixed-0", *, ready: bool = True, url: str = "http://127.0.0.1:1") -> EngineView:
    return EngineView(name, name.partition("-")[0], url, ready)


# life and readiness


async def test_a_worker_that_lives_is_healthy_whatever_its_engines_do():
    async with gateway() as one:
        response = await one.get("/health")
        assert (response.status_code, response.content) == (200, b"")
        assert one.frontend.scopes == []


@pytest.mark.parametrize(
    ("views", "status"),
    [
        ([], 503),
        ([view(ready=False)], 503),
        ([view("prefill-0")], 503),  # it can only hand over, and nobody takes it
        ([view()], 200),
        ([view("decode-0")], 200),
        ([view("prefill-0"), view("decode-0")], 200),
        ([view("prefill-0", ready=False), view("decode-0")], 200),
    ],
)
async def test_a_gateway_is_ready_when_something_can_serve(views, status):
    async with gateway(*views) as one:
        response = await one.get("/ready")
        assert response.status_code == status
        if status == 503:
            assert response.json()["error"]["message"] == "no engine is ready to serve"
        # and the request itself finds the same
        assert (await one.post()).status_code == status


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
        assert response.json() == NOT_READY
        assert one.frontend.scopes == []
        facts = (await one.get(f"/trivet/requests/{response.headers['x-request-id']}")).json()
        assert (facts["status"], facts["path"], facts["generations"]) == (503, path, [])


# metrics


async def test_metrics_are_prometheus_text():
    async with gateway(view()) as one:
        await one.post()
        one.running = 3
        response = await one.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = response.text.splitlines()
        assert f'trivet_requests_total{{path="{CHAT}",status="200"}} 1.0' in lines
        assert 'trivet_engine_ready{engine="mixed-0",tier="mixed"} 1.0' in lines
        assert "trivet_generations_running 3.0" in lines
        assert "trivet_kv_releases_pending 0.0" in lines


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


@pytest.mark.parametrize("key", [*KEYS, "wrong", "x" * 1000])
async def test_how_long_a_key_is_looked_at_tells_nothing_about_it(key, monkeypatch):
    """Whichever it is, it is compared with all, each time as a digest of the same length."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(app_module, "hmac", SimpleNamespace(compare_digest=compare))
    async with gateway(view(), api_keys=KEYS) as one:
        await one.client.get("/trivet/status", headers={"Authorization": f"Bearer {key}".encode()})
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


async def test_the_keys_of_what_vllm_guards_are_vllms_business():
    """Its server is given the same keys."""
    async with gateway(view(), api_keys=KEYS) as one:
        assert (await one.post()).text == "vllm"
        assert (await one.post(authorization="Bearer first-key")).text == "vllm"
        assert one.frontend.header(b"authorization") == [b"Bearer first-key"]


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


@pytest.mark.parametrize(("wish", "colocate"), [(None, None), ("auto", None), ("colocated", "the request asks for it")])
async def test_a_request_says_whether_it_may_be_split(wish, colocate):
    async with gateway(view()) as one:
        headers = {"x_trivet_serve": wish} if wish else {}
        assert (await one.post(**headers)).status_code == 200
        assert one.frontend.records[-1].colocate == colocate


@pytest.mark.parametrize("wish", ["split", "Colocated", "", "colocated, auto"])
async def test_another_wish_is_an_error(wish):
    async with gateway(view()) as one:
        response = await one.post(x_trivet_serve=wish)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": "X-Trivet-Serve is 'auto' or 'colocated'",
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
        assert [generation["id"] for generation in facts["generations"]] == ["gen-0", "gen-1"]
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
        assert (await one.get("/trivet/requests/mine")).json()["status"] is None


@pytest.mark.parametrize("path", ["/trivet/requests/unknown", "/trivet/requests/", "/trivet/requests/a/b"])
async def test_a_request_that_is_not_known_is_not_found(path):
    async with gateway(view()) as one:
        response = await one.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "no such request among the newest ones of this worker"


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
            one.running = 4
            with one.engines.charge(view("mixed-0"), 700):
                status = (await one.get("/trivet/status")).json()
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

        async def receive() -> dict:
            return {"type": "http.request", "body": b"question"}

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
        assert facts["generations"][0]["error"] == "decode-0: too long"
        assert await one.count('trivet_generations_total{outcome="error",served="colocated"}') == 1.0
