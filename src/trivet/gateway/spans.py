"""Spans of requests for OpenTelemetry, where it is asked for.

A request's span begins with the request, as its id goes to the engines with the legs (``traceparent``). All the rest is
made from the record's stamps when the request is over: there is no cost while tokens flow, and none at all without a
``Tracing``. OpenTelemetry's packages are imported when one is opened, and not before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from trivet.errors import MissingPackageError, TrivetError
from trivet.journal import GenerationRecord, RequestRecord, now_s
from trivet.surface.http import Scope
from trivet.topology.model import is_collector_url

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

_PATH = "/v1/traces"
"""Where OTLP over HTTP takes spans, unless a URL says otherwise."""
_WHOLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Taken as it is (OpenTelemetry Protocol Exporter, "Endpoint URLs for OTLP/HTTP")."""
_ENDPOINTS = (_WHOLE, "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CLOSING_S = 3.0
"""How long a worker that stops tries to get rid of its last spans."""


@dataclass(slots=True)
class Trace:
    """What spans of one request are made from, besides its record."""

    span: Span
    """The request's own."""
    epoch_ns: int
    """What the clock of the stamps is behind that of spans, in nanoseconds."""

    def ns(self, stamp_s: float) -> int:
        """A stamp on the clock of spans: nanoseconds since 1970."""
        return self.epoch_ns + int(stamp_s * 1e9)


class Tracing:
    """Makes the spans of requests, and exports them in the background."""

    def __init__(self, exporter: SpanExporter, *, renders: bool = True) -> None:
        """
        Args:
            exporter: who takes the spans.
            renders: whether requests are rendered here; on the text plane they are not.
        """
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "trivet-gateway"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trivet")
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._renders = renders

    def begin(self, scope: Scope, record: RequestRecord) -> None:
        """Begins a request's span, as a part of the client's trace if it names one (``traceparent``)."""
        said = {
            name: value.decode("latin-1")
            for key, value in scope["headers"]
            if (name := key.decode("latin-1")) in ("traceparent", "tracestate")
        }
        epoch_ns = time.time_ns() - int(now_s() * 1e9)
        record.trace = trace = Trace(
            self._tracer.start_span(
                f"{scope['method']} {record.path}",
                self._propagator.extract(said),
                self._trace.SpanKind.SERVER,
                start_time=epoch_ns + int(record.arrived_s * 1e9),
            ),
            epoch_ns,
        )
        trace.span.set_attributes({"http.request.method": scope["method"], "url.path": record.path})

    def headers(self, record: RequestRecord, forwarded: Mapping[str, str]) -> dict[str, str]:
        """Headers for the legs of a request: the client's, with this request's span in the place of the client's."""
        kept = {name: value for name, value in forwarded.items() if name not in ("traceparent", "tracestate")}
        if isinstance(record.trace, Trace):
            self._propagator.inject(kept, self._trace.set_span_in_context(record.trace.span))
        return kept

    def end(self, record: RequestRecord) -> None:
        """Makes the spans of a request that is over."""
        trace, record.trace = record.trace, None  # the journal keeps the record
        if not isinstance(trace, Trace):
            return
        span, end_ns = trace.span, trace.ns(now_s())
        if span.is_recording():
            span.set_attributes(_of_request(record))
            if record.status is not None:
                span.set_attribute("http.response.status_code", record.status)
            faults = [one.error for one in record.generations if one.error is not None and not one.refused]
            if faults or (record.status or 0) >= 500:
                span.set_status(self._trace.StatusCode.ERROR, faults[0] if faults else None)
            self._parts(record, trace)
        span.end(end_ns)

    def _parts(self, record: RequestRecord, trace: Trace) -> None:
        kinds = self._trace.SpanKind
        under = self._trace.set_span_in_context(trace.span)

        def part(name: str, start_s: float | None, end_s: float | None, attributes: dict[str, Any], kind: Any) -> None:
            if start_s is None or end_s is None:
                return
            span = self._tracer.start_span(name, under, kind, attributes, start_time=trace.ns(start_s))
            span.end(trace.ns(max(start_s, end_s)))

        part("queue", record.queued_s, record.admitted_s, {}, kinds.INTERNAL)
        if self._renders and record.generations:
            rendered_s = min(one.rendered_s for one in record.generations)
            part("render", record.admitted_s, rendered_s, {}, kinds.INTERNAL)
        for one in record.generations:
            facts = _of_generation(one)
            prefill, decode = {"trivet.engine": one.prefill_engine or ""}, {"trivet.engine": one.decode_engine or ""}
            part("prefill leg", one.prefill_start_s, one.prefill_end_s, facts | prefill, kinds.CLIENT)
            part("handover", one.prefill_end_s, one.decode_first_s, facts, kinds.INTERNAL)
            part("decode leg", one.decode_start_s, one.end_s, facts | decode, kinds.CLIENT)

    def close(self) -> None:
        """Sends what is left, for a few seconds at most. Blocks."""
        # a thread that nobody waits for: where no collector answers it would take half a minute
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSING_S)


def _of_request(record: RequestRecord) -> dict[str, Any]:
    return {
        "trivet.request_id": record.request_id,
        "trivet.served": record.served or "",
        "trivet.attempts": sum(one.attempts for one in record.generations),
        "trivet.resumes": sum(one.resumes for one in record.generations),
        "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in record.generations),
        "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in record.generations),
    }


def _of_generation(record: GenerationRecord) -> dict[str, Any]:
    return {"trivet.generation": record.generation_id, "trivet.attempts": record.attempts}


class _Told:
    """An exporter that says in one line that spans cannot be sent, and in another that they can again."""

    def __init__(self, inner: SpanExporter, url: str) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._inner, self._url = inner, url
        self._failed = SpanExportResult.FAILURE
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception:
            result = self._failed
        if (result is self._failed) is not self._fails:
            self._fails = not self._fails
            if self._fails:
                logger.warning("no collector takes spans at %s, they are lost -> is gateway.otlp right?", self._url)
            else:
                logger.warning("spans are taken at %s again", self._url)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def open_tracing(url: str | None, *, renders: bool = True, env: Mapping[str, str] | None = None) -> Tracing | None:
    """Spans to an OTLP collector; None where neither the topology nor OpenTelemetry's variables ask for any.

    Args:
        url: ``gateway.otlp``; None leaves it to ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its like.
        renders: see ``Tracing``.
        env: the environment; this process's unless given.

    Raises:
        MissingPackageError: OpenTelemetry's packages are not installed.
        TrivetError: the URL is none.
    """
    env = os.environ if env is None else env
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    source = "gateway.otlp"
    if url is None:
        if env.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
            return None
        source = next((name for name in _ENDPOINTS if env.get(name)), "")
        if not source:
            return None
        url = env[source]
    if not is_collector_url(url):
        raise TrivetError(f"{source}: {url} is no URL", mend="write the collector's, such as http://collector:4318")
    protocol = next((env[name] for name in _PROTOCOLS if env.get(name)), "http/protobuf")
    if protocol != "grpc" and source != _WHOLE:
        url = _at_path(url)
    exporter = _exporter(url, grpc=protocol == "grpc")
    return Tracing(cast("SpanExporter", _Told(exporter, url)), renders=renders)  # to the letter, without its package


def _at_path(url: str) -> str:
    return url if url.rstrip("/").endswith(_PATH) else url.rstrip("/") + _PATH


def _exporter(url: str, *, grpc: bool) -> SpanExporter:
    # what they log of each failure, at length and again and again, is said once by _Told
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL + 1)
    try:
        import opentelemetry.sdk.trace.export  # noqa: F401  (Tracing needs it)

        if grpc:
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

            return over_grpc.OTLPSpanExporter(endpoint=url)
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(endpoint=url)
    except ImportError as error:
        raise MissingPackageError(
            f"spans need OpenTelemetry's packages, and {error.name or error} is not installed",
            mend="pip install 'trivet[otel]', or leave gateway.otlp and OTEL_EXPORTER_OTLP_ENDPOINT out",
        ) from None
