"""What a gateway worker counts, in Prometheus form. Times in seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable

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
            "Prefill's answer to decode's first token",
            ["prefill", "decode"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = Gauge(
            "trivet_generations_running", "Generations under way", registry=registry, multiprocess_mode="livesum"
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
        self.tokens.labels("prompt").inc(record.prompt_tokens)
        self.tokens.labels("completion").inc(record.completion_tokens)
        if owner is not None:
            self.render.observe(max(0.0, record.rendered_s - owner.arrived_s))
            if record.first_token_s is not None:
                self.ttft.labels(served).observe(record.first_token_s - owner.arrived_s)
        if record.prefill_engine and record.prefill_start_s is not None and record.prefill_end_s is not None:
            self.prefill.labels(record.prefill_engine).observe(record.prefill_end_s - record.prefill_start_s)
            if record.split and record.decode_engine and record.first_token_s is not None:
                self.handover.labels(record.prefill_engine, record.decode_engine).observe(
                    max(0.0, record.first_token_s - record.prefill_end_s)
                )

    def sample(self, engines: Engines, running: int, releases_pending: int) -> None:
        """Reads the gauges."""
        self.running.set(running)
        self.releases.set(releases_pending)
        for view in engines.all():
            self.ready.labels(view.name, view.tier).set(view.ready)
            self.outstanding.labels(view.name, view.tier).set(engines.outstanding_tokens(view.name))

    def text(self, engines: Engines, running: int, releases_pending: int) -> bytes:
        """The exposition text, with gauges read now; of all workers where there are several."""
        self.sample(engines, running, releases_pending)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            summed = CollectorRegistry()
            summed.register(_OfAllWorkers())
            return generate_latest(summed)
        return generate_latest(self.registry)
