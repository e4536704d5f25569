import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from helpers.engines import nobody_listens
from trivet.fleet import probe
from trivet.fleet.probe import (
    Health,
    can_abort,
    canary,
    counts,
    health,
    metrics,
    parse_counts,
    parse_metrics,
    version,
)


class Engine:
    """An HTTP server that gives one answer to everything and keeps what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.text = ""
        self.broken = False
        self.silent = False
        self.asked: list[tuple[str, str, dict, bytes]] = []
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(application)

    async def __aenter__(self) -> "Engine":
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path, request.headers.copy(), await request.read()))
        if self.broken:
            request.transport.abort()
        if self.silent:
            await asyncio.Event().wait()
        return web.Response(status=self.status, text=self.text)


@pytest.fixture
async def engine():
    async with Engine() as engine:
        yield engine


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


QUESTIONS = {
    "health": (health, Health.SILENT),
    "version": (version, None),
    "metrics": (metrics, None),
}


# health


@pytest.mark.parametrize(
    ("status", "expected"),
    [(200, Health.OK), (503, Health.DEAD), (500, Health.SILENT), (404, Health.SILENT), (204, Health.SILENT)],
)
async def test_health_is_the_status_of_its_endpoint(session, engine, status, expected):
    engine.status = status
    assert await health(session, engine.url) is expected
    assert engine.asked[0][:2] == ("GET", "/health")


@pytest.mark.parametrize(("question", "expected"), QUESTIONS.values(), ids=QUESTIONS)
async def test_nobody_at_the_address_is_no_fault(session, question, expected):
    expected = Health.REFUSED if question is health else expected
    with nobody_listens() as url:
        assert await question(session, url) is expected


@pytest.mark.parametrize(("question", "expected"), QUESTIONS.values(), ids=QUESTIONS)
async def test_a_connection_that_breaks_is_no_fault(session, engine, question, expected):
    engine.broken = True
    assert await question(session, engine.url) is expected


@pytest.mark.parametrize(("question", "expected"), QUESTIONS.values(), ids=QUESTIONS)
async def test_an_engine_that_does_not_answer_in_time_is_no_fault(session, engine, monkeypatch, question, expected):
    monkeypatch.setattr(probe, "_QUESTION_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    engine.silent = True
    assert await question(session, engine.url) is expected


# version


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, '{"version": "0.32.0"}', "0.32.0"),
        (200, '{"version": 1}', "1"),
        (500, '{"version": "0.32.0"}', None),
        (404, "Not Found", None),
        (200, "0.32.0 ", None),
        (200, "", None),
        (200, "null", None),
        (200, "[]", None),
        (200, "{}", None),
    ],
)
async def test_the_version_is_told_or_not(session, engine, status, text, expected):
    engine.status, engine.text = status, text
    assert await version(session, engine.url) == expected
    assert engine.asked[0][:2] == ("GET", "/version")


# canary


async def test_a_canary_is_one_token_with_a_cache_salt_of_its_own(session, engine):
    assert [await canary(session, engine.url, "tiny") for _ in range(2)] == [None, None]
    (method, path, headers, first), (_, _, _, second) = engine.asked
    assert (method, path) == ("POST", "/inference/v1/generate")
    assert "Authorization" not in headers
    bodies = [json.loads(one) for one in (first, second)]
    assert bodies[0].pop("cache_salt") != bodies[1].pop("cache_salt")
    assert bodies[0] == bodies[1]
    assert bodies[0]["model"] == "tiny"
    assert bodies[0]["sampling_params"]["max_tokens"] == 1


async def test_a_canary_carries_the_engines_key(session, engine):
    await canary(session, engine.url, "tiny", "secret")
    assert engine.asked[0][2]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (404, "nope", "start it with --enable-scale-out and --served-model-name tiny (HTTP 404: nope)"),
        (403, "off", "start it with --enable-scale-out and --served-model-name tiny (HTTP 403: off)"),
        (500, " x\n", "HTTP 500 on a one-token request: x"),
        (401, "y" * 300, "HTTP 401 on a one-token request: " + "y" * 200),
    ],
)
async def test_a_canary_that_fails_says_why(session, engine, status, text, expected):
    engine.status, engine.text = status, text
    assert await canary(session, engine.url, "tiny") == expected


async def test_a_canary_without_an_answer_says_so(session, engine, monkeypatch):
    monkeypatch.setattr(probe, "_CANARY_TIMEOUT", aiohttp.ClientTimeout(total=0.05))
    engine.silent = True
    assert await canary(session, engine.url, "tiny") == "no answer to a one-token request (TimeoutError)"
    engine.silent, engine.broken = False, True
    expected = "no answer to a one-token request (ServerDisconnectedError)"
    assert await canary(session, engine.url, "tiny") == expected


# metrics

EXPOSITION = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 64.0
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 2.0
vllm:nixl_bytes_transferred_count{engine="0"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0"} 4096.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0"} 1.0
"""


def test_an_engines_metrics_are_read():
    found = parse_metrics(EXPOSITION)
    assert (found.running, found.waiting, found.kv_usage) == (5.0, 4.0, 0.25)
    assert found.prompt_tokens == {"local_compute": 15.0, "external_kv_transfer": 64.0}
    assert found.values["vllm:nixl_bytes_transferred_sum"] == 4096.0
    assert found.cached_block_tokens == 128


def test_an_engine_that_has_done_nothing_counts_nothing():
    found = parse_metrics("")
    assert (found.running, found.waiting, found.kv_usage) == (0.0, 0.0, 0.0)
    assert (found.prompt_tokens, found.values, found.cached_block_tokens) == ({}, {}, None)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ('block_size="16",enable_prefix_caching="True"', 16),
        ('block_size="16",enable_prefix_caching="False"', None),
        ('block_size="None",enable_prefix_caching="True"', None),
        ('enable_prefix_caching="True"', None),
        ('block_size="16"', None),
    ],
)
def test_blocks_of_the_prefix_cache_are_known_where_there_is_one(labels, expected):
    assert parse_metrics(f"vllm:cache_config_info{{{labels}}} 1.0\n").cached_block_tokens == expected


async def test_metrics_are_asked_for(session, engine):
    engine.text = EXPOSITION
    assert (await metrics(session, engine.url)).running == 5.0
    assert engine.asked[0][:2] == ("GET", "/metrics")


@pytest.mark.parametrize(("status", "text"), [(500, EXPOSITION), (200, "<h1>Hello</h1> {"), (200, "a b c\n")])
async def test_what_are_no_metrics_is_none(session, engine, status, text):
    engine.status, engine.text = status, text
    assert await metrics(session, engine.url) is None


# aborts


@pytest.mark.parametrize(("status", "expected"), [(200, True), (404, False), (401, False), (405, False), (500, False)])
async def test_whether_requests_can_be_ended_by_id(engine, session, status, expected):
    engine.status = status
    assert await can_abort(session, engine.url, "secret") is expected
    ((method, path, headers, body),) = engine.asked
    assert (method, path, json.loads(body)) == ("POST", "/inference/v1/abort_requests", {"request_ids": []})
    assert headers["Authorization"] == "Bearer secret"


async def test_an_engine_that_cannot_be_asked_cannot_end_them(engine, session):
    engine.broken = True
    assert await can_abort(session, engine.url) is False
    with nobody_listens() as url:
        assert await can_abort(session, url) is False


COUNTS = """\
# HELP vllm:some_tokens_total Tokens.
# TYPE vllm:some_tokens_total counter
vllm:some_tokens_total{engine="0",source="a"} 3.0
vllm:some_tokens_total{engine="1",source="a"} 4.0
vllm:some_tokens_total{engine="0",source="b"} 10.0 1700000000000
vllm:some_tokens_total_created{engine="0"} 1.7e9
# TYPE vllm:never_counted_total counter
# TYPE plain gauge
plain 7
bytes_sum{brace="}"} 5e3
"""


def test_some_counts_are_read_without_all_the_others():
    names = ("vllm:some_tokens_total", 'vllm:some_tokens_total{source="a"}', "vllm:never_counted_total", "plain")
    assert parse_counts(COUNTS, *names, "bytes_sum", "absent") == {
        "vllm:some_tokens_total": 17.0,
        'vllm:some_tokens_total{source="a"}': 7.0,
        "vllm:never_counted_total": 0.0,
        "plain": 7.0,
        "bytes_sum": 5000.0,
    }


def test_counts_are_those_of_all_metrics():
    found = parse_metrics(EXPOSITION)
    for name, value in found.values.items():
        assert parse_counts(EXPOSITION, name)[name] == value


async def test_counts_are_asked_for(session, engine):
    engine.text = EXPOSITION
    assert (await counts(session, engine.url, "vllm:num_requests_running"))["vllm:num_requests_running"] == 5.0
