"""What a gateway worker counts, in Prometheus form. Times in seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from trivet.journal import GenerationRecord, RequestRecord
from trivet.routing.engines import Engines

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class _OfAllWorkers(Collector):
    """Trivet's metrics out of the files that all workers write, which hold vLLM's as well."""

    def collect(self) -> Iterable[Metric]:
        files = MultiProcessCollector(CollectorRegistry())  # type: ignore[no-untyped-call]
        return [family for family in files.collect() if family.name.startswith("trivet_")]  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is under way in a worker now."""

    generations: int
    requests_running: int
    requests_waiting: int
    releases_pending: int
    releases_unconfirmed: int


class GatewayMetrics:
    """The counters of one worker. With several workers ``text`` sums them (prometheus-client's multiprocess mode)."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("trivet_requests", "HTTP requests answered", ["path", "status"], registry=registry)
        self.generations = Counter("trivet_generations", "Generations ended", ["served", "outcome"], registry=registry)
        self.tokens = Counter("trivet_tokens", "Tokens of ended generations", ["kind"], registry=registry)
        self.render = Histogram("trivet_render_seconds", "First byte to token ids", buckets=_SECONDS, registry=registry)
        self.ttft = Histogram(
            "trivet_time_to_first_token_seconds",
            "First byte of the request to the first token at the gateway",
            ["served"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.prefill = Histogram(
            "trivet_prefill_leg_seconds", "The prefill leg", ["engine"], buckets=_SECONDS, registry=registry
        )
        self.handover = Histogram(
            "trivet_handover_seconds",
            "Prefill's answer to decode's first token at the gateway",
            ["prefill", "decode"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = Gauge(
            "trivet_generations_running", "Generations under way", registry=registry, multiprocess_mode="livesum"
        )
        self.requests_running = Gauge(
            "trivet_requests_running", "Requests that are served", registry=registry, multiprocess_mode="livesum"
        )
        self.requests_waiting = Gauge(
            "trivet_requests_waiting", "Requests that wait for a turn", registry=registry, multiprocess_mode="livesum"
        )
        self.attempts = Counter(
            "trivet_attempts", "Times that generations were given to engines, with retries", registry=registry
        )
        self.resumes = Counter(
            "trivet_resumes", "Answers that broke off and were continued on another engine", registry=registry
        )
        self.recomputed = Counter(
            "trivet_recomputed_generations",
            "Generations that were to be split and whose prompt decode computed itself",
            registry=registry,
        )
        self.unconfirmed = Gauge(
            "trivet_kv_releases_unconfirmed",
            "Hand-overs whose release no engine confirmed: free already, or held until the lease ends",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.releases = Gauge(
            "trivet_kv_releases_pending",
            "Hand-overs nobody took that are being released",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.ready = Gauge(
            "trivet_engine_ready",
            "1 if the engine can serve",
            ["engine", "tier"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.outstanding = Gauge(
            "trivet_outstanding_tokens",
            "Tokens of running legs",
            ["engine", "tier"],
            registry=registry,
            multiprocess_mode="livesum",
        )

    def ended(self, record: GenerationRecord, owner: RequestRecord | None) -> None:
        """Counts a generation that ended."""
        served = "split" if record.split else "colocated"
        self.generations.labels(served, "error" if record.error else record.finish_reason or "none").inc()
        self.recomputed.inc(record.intended_split and not record.split)
        self.attempts.inc(record.attempts)
        self.resumes.inc(record.resumes)
        self.tokens.labels("prompt").inc(record.prompt_tokens)
        self.tokens.labels("completion").inc(record.completion_tokens)
        if owner is not None:
            self.render.observe(max(0.0, record.rendered_s - owner.arrived_s))
            if record.first_token_s is not None:
                self.ttft.labels(served).observe(record.first_token_s - owner.arrived_s)
        if record.prefill_engine and record.prefill_start_s is not None and record.prefill_end_s is not None:
            self.prefill.labels(record.prefill_engine).observe(record.prefill_end_s - record.prefill_start_s)
            if record.split and record.decode_engine and record.decode_first_s is not None:
                self.handover.labels(record.prefill_engine, record.decode_engine).observe(
                    max(0.0, record.decode_first_s - record.prefill_end_s)
                )

    def sample(self, engines: Engines, gauges: Gauges) -> None:
        """Reads the gauges."""
        self.running.set(gauges.generations)
        self.requests_running.set(gauges.requests_running)
        self.requests_waiting.set(gauges.requests_waiting)
        self.releases.set(gauges.releases_pending)
        self.unconfirmed.set(gauges.releases_unconfirmed)
        for view in engines.all():
            self.ready.labels(view.name, view.tier).set(view.ready)
            self.outstanding.labels(view.name, view.tier).set(engines.outstanding_tokens(view.name))

    def text(self, engines: Engines, gauges: Gauges) -> bytes:
        """The exposition text, with gauges read now; of all workers where there are several."""
        self.sample(engines, gauges)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            summed = CollectorRegistry()
            summed.register(_OfAllWorkers())
            return generate_latest(summed)
        return generate_latest(self.registry)
