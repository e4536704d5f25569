"""Spans, JSON lines and what is told of a request that is over, on simulated engines and without."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading

import aiohttp
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from helpers.stack import MODEL, QUICK, answer_of, listening, stack, token_request
from trivet.errors import MissingPackageError, TrivetError
from trivet.gateway import logs
from trivet.gateway.app import GENERATING, GatewayApp
from trivet.gateway.endings import Endings
from trivet.gateway.logs import JsonFormatter, facts_of, tell_request, write_json
from trivet.gateway.metrics import GatewayMetrics
from trivet.gateway.spans import Tracing, _Told, open_tracing
from trivet.gateway.text import TextApp
from trivet.journal import GenerationRecord, RequestRecord

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENTS = f"00-{TRACE}-{PARENT}-01"
BODY = {"model": MODEL, "prompt": list(range(300, 340)), "max_tokens": 5, "ignore_eos": True, "stream": True}


async def served(connector: str, tracing: Tracing | None, *listeners, **headers: str) -> tuple[dict, list[dict]]:
    """One split request: its record's facts, and the headers of its legs."""
    async with stack("prefill", "decode", settings=dataclasses.replace(QUICK, kv_connector=connector)) as built:
        endings = Endings(built.metrics, *listeners, *([tracing.end] if tracing else []))
        built.legs._observe = endings.generation
        app = GatewayApp(
            TextApp(built.engines, built.legs, GENERATING),
            built.engines,
            built.legs,
            built.metrics,
            fleet=lambda: {"engines": []},
            guards_itself=False,
            answered=endings.request,
            tracing=tracing,
        )
        async with listening(app) as url, aiohttp.ClientSession() as client:
            async with client.post(f"{url}/v1/completions", json=BODY, headers=headers) as reply:
                await reply.read()
                assert reply.status == 200
            await built.at_rest()
            async with client.get(f"{url}/trivet/requests/{reply.headers['x-request-id']}") as told:
                facts = await told.json()
        legs = [one.headers for sim in built.sims for one in sim.state().requests if one.path == "/v1/completions"]
        return facts, [{name.lower(): value for name, value in one.items()} for one in legs]


@pytest.mark.parametrize("connector", ["TrivetConnector", "NixlConnector"])
@pytest.mark.parametrize("traceparent", [CLIENTS, None, "not one"])
async def test_spans_of_a_split_request_and_what_its_legs_carry(connector, traceparent):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, renders=True)
    said = {} if traceparent is None else {"traceparent": traceparent}
    facts, legs = await served(connector, tracing, **{"X-Request-Id": "mine"}, **said)
    tracing.close()
    spans = {one.name: one for one in exporter.get_finished_spans()}
    whole = spans.pop("POST /v1/completions")
    assert set(spans) == {"queue", "render", "prefill leg", "handover", "decode leg"}
    assert whole.kind is SpanKind.SERVER
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.output_tokens"] == facts["generations"][0]["completion_tokens"]
    if traceparent == CLIENTS:
        assert (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    else:
        assert whole.parent is None
    ours = f"00-{whole.context.trace_id:032x}-{whole.context.span_id:016x}-{int(whole.context.trace_flags):02x}"
    assert [(one["traceparent"], one["x-client-request-id"]) for one in legs] == [(ours, "mine")] * 2
    assert sorted(one["x-request-id"].rpartition("-")[2] for one in legs) == ["decode", "prefill"]
    for one in spans.values():
        assert (one.parent.span_id, one.context.trace_id) == (whole.context.span_id, whole.context.trace_id)
        assert whole.start_time <= one.start_time <= one.end_time <= whole.end_time
    took_ms = (spans["prefill leg"].end_time - spans["prefill leg"].start_time) / 1e6
    assert took_ms == pytest.approx(facts["generations"][0]["prefill_ms"], abs=0.1)
    assert spans["prefill leg"].attributes["trivet.engine"] == "prefill-0"
    assert spans["decode leg"].attributes["trivet.engine"] == "decode-0"


async def test_without_spans_the_clients_context_goes_on_to_the_legs():
    _, legs = await served("TrivetConnector", None, traceparent=CLIENTS)
    assert [one["traceparent"] for one in legs] == [CLIENTS] * 2


def scope(**headers: str) -> dict:
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/v1/completions", "headers": named}


@pytest.mark.parametrize(
    ("status", "error", "refused", "code", "words"),
    [
        (200, None, False, StatusCode.UNSET, None),
        (200, "decode-0: broke off", False, StatusCode.ERROR, "decode-0: broke off"),
        (400, "'secret prompt' is no list", True, StatusCode.UNSET, None),
        (503, None, False, StatusCode.ERROR, None),
        (499, None, False, StatusCode.UNSET, None),
    ],
)
def test_whose_fault_it_was_is_told_without_words_of_the_request(status, error, refused, code, words):
    exporter = InMemorySpanExporter()
    tracing, record = Tracing(exporter), RequestRecord("r", "/v1/completions", status=status)
    record.generations = [GenerationRecord("g", 3, record.arrived_s, error=error, refused=refused)]
    tracing.begin(scope(), record)
    tracing.end(record)
    tracing.end(record)  # is told once
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (code, words)
    assert "secret" not in span.to_json()
    assert record.trace is None


def test_a_trace_that_is_not_sampled_is_not_for_engines_either():
    exporter = InMemorySpanExporter()
    tracing, record = Tracing(exporter), RequestRecord("r", "/v1/completions")
    tracing.begin(scope(traceparent=CLIENTS[:-1] + "0", tracestate="a=b"), record)
    headers = tracing.headers(record, {"traceparent": "the client's", "x-user": "one"})
    assert headers["traceparent"].startswith(f"00-{TRACE}-")
    assert headers["traceparent"].endswith("-00")
    assert (headers["tracestate"], headers["x-user"]) == ("a=b", "one")
    tracing.end(record)
    tracing.close()
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("url", "env", "endpoint"),
    [
        (None, {}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/own"}, "http://c:4318/own"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/v1/traces", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other"}, "https://c/v1/traces"),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_where_spans_go(url, env, endpoint, monkeypatch):
    seen = []
    monkeypatch.setattr("trivet.gateway.spans._exporter", lambda url, grpc: seen.append(url) or InMemorySpanExporter())
    tracing = open_tracing(url, env=env)
    assert seen == ([] if endpoint is None else [endpoint])
    assert (tracing is None) is (endpoint is None)
    if tracing is not None:
        tracing.close()


@pytest.mark.parametrize(
    ("url", "env", "name"),
    [("c:4318", {}, "gateway.otlp"), (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "c"}, "OTEL_EXPORTER_OTLP_ENDPOINT")],
)
def test_what_is_no_url_is_said_with_its_mend(url, env, name):
    with pytest.raises(TrivetError, match="is no URL -> write the collector's, such as http") as caught:
        open_tracing(url, env=env)
    assert caught.value.problem.startswith(f"{name}: ")


def test_a_missing_package_is_said_with_its_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", raising=False)
    with pytest.raises(MissingPackageError) as caught:
        open_tracing("http://c:4318", env={})
    assert "\n" not in str(caught.value)
    assert caught.value.mend.startswith("pip install 'trivet[otel]'")


def test_a_collector_that_is_not_there_is_told_of_once(caplog):
    class Flaky(SpanExporter):
        answers = iter([SpanExportResult.SUCCESS, SpanExportResult.FAILURE, OSError(), SpanExportResult.SUCCESS])

        def export(self, spans):
            answer = next(self.answers)
            if isinstance(answer, OSError):
                raise answer
            return answer

    told = _Told(Flaky(), "http://c/v1/traces")
    for _ in range(4):
        told.export([])
    assert [one.getMessage() for one in caplog.records] == [
        "no collector takes spans at http://c/v1/traces, they are lost -> is gateway.otlp right?",
        "spans are taken at http://c/v1/traces again",
    ]


# what is over, and JSON lines


def test_a_request_is_told_of_once_when_all_of_it_is_over(caplog):
    told: list[RequestRecord] = []

    def broken(_: RequestRecord) -> None:
        raise ValueError("a listener's own trouble")

    endings, record = Endings(GatewayMetrics(), broken, told.append), RequestRecord("r", "/v1/completions")
    generation = GenerationRecord("g", 3, record.arrived_s)
    record.running = 2
    endings.request(record)
    for left, expected in ((1, []), (0, [record]), (0, [record])):
        record.running = left
        endings.generation(generation, record)
        assert told == expected
    endings.generation(generation, None)
    assert [one.getMessage() for one in caplog.records] == ["request r"]


async def test_a_request_is_one_line_of_json_without_its_words(caplog):
    caplog.set_level(logging.INFO, "trivet.request")
    facts, _ = await served("TrivetConnector", None, tell_request)
    (record,) = [one for one in caplog.records if one.name == "trivet.request"]
    line = JsonFormatter().format(record)
    assert "\n" not in line
    said = json.loads(line)
    (generation,) = facts["generations"]
    assert said["message"] == "/v1/completions 200"
    assert (said["level"], said["logger"], said["request_id"]) == ("INFO", "trivet.request", facts["request_id"])
    del generation["reason"]
    assert said["generations"] == [generation]


def test_errors_that_may_quote_a_request_are_not_in_its_line():
    record = RequestRecord("r", "/v1/completions", status=400)
    one = GenerationRecord("g", 3, record.arrived_s, reason="retry (secret)", error="'secret' is wrong", refused=True)
    other = GenerationRecord("h", 3, record.arrived_s, error="decode-0: " + "x" * 1000)
    record.generations = [one, other]
    facts = facts_of(record)
    assert "secret" not in json.dumps(facts)
    assert [len(generation["error"]) for generation in facts["generations"]] == [len("refused"), 300]


def test_tracebacks_and_lines_of_others_are_json_too():
    handler = logging.StreamHandler()
    other = logging.getLogger("vllm")
    other.addHandler(handler)
    generations = logging.getLogger("trivet.legs.generation")
    hooks = sys.excepthook, threading.excepthook
    before = [(one, one.formatter) for name in ("", *logs._OTHERS) for one in logging.getLogger(name).handlers]
    try:
        write_json()
        assert isinstance(handler.formatter, JsonFormatter)
        assert not generations.isEnabledFor(logging.INFO)
    finally:
        for one, formatter in before:  # pytest's among them, which other tests read
            one.setFormatter(formatter)
        handler.setFormatter(JsonFormatter())
        other.removeHandler(handler)
        generations.setLevel(logging.NOTSET)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("vllm.x", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
    line = handler.format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["message"], said["logger"], said["level"]) == ("it failed", "vllm.x", "ERROR")
    assert said["traceback"].endswith("lines")
    assert record.message == "it failed"  # as any formatter leaves it, for handlers behind


@pytest.mark.parametrize("plane", ["tokens", "text"])
async def test_the_gaps_of_an_answer_are_those_of_its_chunks(plane):
    settings = dataclasses.replace(QUICK, step_ms=12.0)
    async with stack("mixed", settings=settings) as built, listening(built.gateway()) as url:
        if plane == "tokens":
            assert len(await answer_of(built, token_request(6))) == 6
        else:
            async with aiohttp.ClientSession() as client:
                body = {**BODY, "max_tokens": 6, "stream_options": {"include_usage": True}}
                async with client.post(f"{url}/v1/completions", json=body) as reply:
                    await reply.read()
        await built.at_rest()
    gaps = built.records[-1].gaps
    # on a busy machine two tokens may come at once
    chunks = sum(gaps.one or [0]) + sum(gaps.several or [0])
    assert 1 <= chunks <= 5
    assert gaps.one_s + gaps.several_s >= 0.04
