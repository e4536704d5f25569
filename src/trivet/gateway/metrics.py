"""What a gateway's workers count, in Prometheus form. Times in seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from trivet.journal import GAP_BOUNDS_S, GenerationRecord, RequestRecord
from trivet.routing.engines import Engines
from trivet.routing.held import Held
from trivet.routing.proofs import Proof

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_WAIT_SECONDS = (0.0005, *_SECONDS)
"""Most requests do not wait at all."""
_LEG_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
"""Decode legs are as long as their answers."""


_LAST_LOOK_S = 300.0
"""How long the series of an engine that is gone are still shown: longer than anybody's scrape interval."""
_OF_ENGINES = ("engine", "prefill", "decode")
"""Labels whose values are engines."""


class _WithoutEngines(Collector):
    """What another collector has, without the series of some engines; their numbers would stand still for ever."""

    def __init__(self, inner: Collector, names: Collection[str]) -> None:
        self._inner = inner
        self._names = names

    def collect(self) -> Iterable[Metric]:
        for family in self._inner.collect():
            family.samples = [
                one for one in family.samples if not any(one.labels.get(label) in self._names for label in _OF_ENGINES)
            ]
            yield family


class _OfAllWorkers(Collector):
    """Trivet's counters out of the files that all workers write, which hold vLLM's metrics as well."""

    def collect(self) -> Iterable[Metric]:
        files = MultiProcessCollector(CollectorRegistry())  # type: ignore[no-untyped-call]
        return [family for family in files.collect() if family.name.startswith("trivet_")]  # type: ignore[no-untyped-call]


class _Now(Collector):
    """What is under way: read from the board, so that a worker that died leaves no load behind."""

    def __init__(self, engines: Engines, gauges: Gauges, held: Held | None) -> None:
        self._engines = engines
        self._gauges = gauges
        self._held = held

    def collect(self) -> Iterable[Metric]:
        for name, text, value in (
            ("trivet_generations_running", "Generations under way", self._gauges.generations),
            ("trivet_requests_running", "Requests that are served", self._gauges.requests_running),
            ("trivet_requests_waiting", "Requests that wait for a turn", self._gauges.requests_waiting),
            (
                "trivet_kv_releases_pending",
                "Hand-overs nobody took that are being released",
                self._gauges.releases_pending,
            ),
            (
                "trivet_kv_releases_unconfirmed",
                "Hand-overs whose release no engine confirmed: free already, or held until the lease ends",
                self._gauges.releases_unconfirmed,
            ),
        ):
            yield GaugeMetricFamily(name, text, value)
        labels = ["engine", "tier"]
        ready = GaugeMetricFamily("trivet_engine_ready", "1 if the engine can serve", labels=labels)
        outstanding = GaugeMetricFamily("trivet_outstanding_tokens", "Tokens of running legs", labels=labels)
        for view in self._engines.all():
            ready.add_metric([view.name, view.tier], view.ready)
            outstanding.add_metric([view.name, view.tier], self._engines.outstanding_tokens(view.name))
        yield ready
        yield outstanding
        if self._engines.guarded:
            yield self._pairs()
        if self._held is not None:
            live = GaugeMetricFamily(
                "trivet_kv_events_live", "1 if the engine's KV events arrive, so that its cache is known", labels=labels
            )
            for view in self._engines.all():
                live.add_metric([view.name, view.tier], self._held.is_live(view))
            yield live

    def _pairs(self) -> GaugeMetricFamily:
        """Pairs with a verdict."""
        good = GaugeMetricFamily(
            "trivet_pair_good", "1 if the pair's last canary passed, 0 if it is not used", labels=["prefill", "decode"]
        )
        for prefill in self._engines.ready("prefill"):
            for decode in self._engines.ready("decode"):
                proof = self._engines.proof(prefill, decode)
                if proof is Proof.GOOD or proof.is_bad:
                    good.add_metric([prefill.name, decode.name], proof is Proof.GOOD)
        return good


class RenderMetrics:
    """What a worker counts of its render servers (``render.pool.Tally``).

    Gauges are kept in the files that all workers write, as the others are: those of a worker that ended leave no load
    behind (``mark_process_dead``).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._asked = Counter(
            "trivet_render_server_requests",
            "Requests that render servers were given, by how they answered",
            ["server", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "trivet_render_server_seconds",
            "A render server's answer, of requests that it rendered",
            ["server"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._local = Counter(
            "trivet_render_local",
            "Requests rendered in the gateway's workers though there are render servers",
            ["reason"],
            registry=registry,
        )
        self._refused = Counter(
            "trivet_render_refused", "Requests refused as no render server took them", ["reason"], registry=registry
        )
        self._running = Gauge(
            "trivet_render_server_running",
            "Requests at a render server",
            ["server"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._waiting = Gauge(
            "trivet_render_waiting",
            "Requests that wait for a render server",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._up = Gauge(
            "trivet_render_server_up",
            "1 if all workers use the render server",
            ["server"],
            registry=registry,
            multiprocess_mode="livemin",
        )

    def asked(self, server: str, outcome: str, seconds: float) -> None:
        """A server was asked."""
        self._asked.labels(server, outcome).inc()
        if outcome == "ok":
            self._seconds.labels(server).observe(seconds)

    def local(self, reason: str) -> None:
        """A request is rendered here."""
        self._local.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """A request is refused, as no server takes it."""
        self._refused.labels(reason).inc()

    def running(self, server: str, requests: int) -> None:
        """So many requests of this worker are at a server."""
        self._running.labels(server).set(requests)

    def waiting(self, requests: int) -> None:
        """So many wait for one."""
        self._waiting.set(requests)

    def used(self, server: str, is_used: bool) -> None:
        """A server is used from now on, or no more."""
        self._up.labels(server).set(is_used)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a worker renders with, and how that has gone since its start."""

    tokenizer: str
    """What makes token ids of text now; ``vllm`` where that is left to vLLM."""
    characters: int = 0
    """Of segments that were looked for among those that came before."""
    found_characters: int = 0
    """Those of them that were there."""
    cache_bytes: int = 0
    """What those that are kept weigh."""
    derender_hits: int = 0
    """Chunks of derendered streams that went on from what the last had left."""
    derender_replays: int = 0
    """Chunks for which a stream was parsed anew from its beginning."""


class RenderedMetrics:
    """What is counted where prompts are rendered, brought into the files that all workers write (``look``)."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], Rendered]) -> None:
        """
        Args:
            now: what has come of it so far; numbers never fall, but for the cache's bytes.
        """
        self._now = now
        self._counted = Rendered("")
        self._tokenizers: set[str] = set()
        self._characters = Counter(
            "trivet_render_characters",
            "Characters of prompts, by whether the token ids of their segment were kept from an earlier prompt",
            ["found"],
            registry=registry,
        )
        self._cache = Gauge(
            "trivet_render_cache_bytes",
            "Memory of token ids of segments that came before",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._tokenizer = Gauge(
            "trivet_render_tokenizer",
            "Workers whose prompts are tokenized by it",
            ["name"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._hits = Counter(
            "trivet_derender_hits", "Chunks of derendered streams that found their parser", registry=registry
        )
        self._replays = Counter(
            "trivet_derender_replays",
            "Chunks of derendered streams before which all earlier ones were parsed again",
            registry=registry,
        )

    def look(self) -> None:
        """Counts what has been done since the last look."""
        now, before = self._now(), self._counted
        self._counted = now
        missed, missed_before = (one.characters - one.found_characters for one in (now, before))
        self._characters.labels("yes").inc(now.found_characters - before.found_characters)
        self._characters.labels("no").inc(missed - missed_before)
        self._hits.inc(now.derender_hits - before.derender_hits)
        self._replays.inc(now.derender_replays - before.derender_replays)
        self._cache.set(now.cache_bytes)
        self._tokenizers.add(now.tokenizer)
        for name in self._tokenizers:
            self._tokenizer.labels(name).set(name == now.tokenizer)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is under way now, in all workers."""

    generations: int
    requests_running: int
    requests_waiting: int
    releases_pending: int
    releases_unconfirmed: int


class GatewayMetrics:
    """The counters of one worker. With several workers ``text`` sums them (prometheus-client's multiprocess mode)."""

    def __init__(self, held: Held | None = None, *, has_render_servers: bool = False) -> None:
        """
        Args:
            held: what engines tell of their caches, where they do.
            has_render_servers: prompts are rendered elsewhere, of which ``of_render_servers`` counts.
        """
        self._held = held
        self.gone: Mapping[str, float] = {}
        """Engines that have left for good, and when, on the monotonic clock."""
        self.registry = registry = CollectorRegistry()
        self.of_render_servers = RenderMetrics(registry) if has_render_servers else None
        self._rendered: RenderedMetrics | None = None
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
        self.gaps = Histogram(
            "trivet_inter_token_latency_seconds",
            "One chunk of an answer to the next at the gateway, by how many tokens the next has",
            ["served", "tokens"],
            buckets=GAP_BOUNDS_S,
            registry=registry,
        )
        self.queue_wait = Histogram(
            "trivet_queue_wait_seconds",
            "Waiting for a turn, of requests that got one",
            buckets=_WAIT_SECONDS,
            registry=registry,
        )
        self.prefill = Histogram(
            "trivet_prefill_leg_seconds", "The prefill leg", ["engine"], buckets=_SECONDS, registry=registry
        )
        self.decode = Histogram(
            "trivet_decode_leg_seconds",
            "The decode leg, or the only one, with what it waits for KV",
            ["engine"],
            buckets=_LEG_SECONDS,
            registry=registry,
        )
        self.handover = Histogram(
            "trivet_handover_seconds",
            "Prefill's answer to decode's first token at the gateway",
            ["prefill", "decode"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.decisions = Counter(
            "trivet_split_decisions",
            "Generations by whether they were to be split, and why",
            ["decision", "reason"],
            registry=registry,
        )
        self.cache_known = Counter(
            "trivet_cache_known",
            "Generations by how it was known what the engine that computes the prompt had cached",
            ["by"],
            registry=registry,
        )
        self.attempts = Counter(
            "trivet_attempts", "Times that generations were given to engines, with retries", registry=registry
        )
        self.retries = Counter(
            "trivet_retries", "Times that generations were given to engines anew, as a leg failed", registry=registry
        )
        self.resumes = Counter(
            "trivet_resumes", "Answers that broke off and were continued on another engine", registry=registry
        )
        self.canaries = Counter(
            "trivet_canaries",
            "Canaries that were sent through pairs, by what came of them",
            ["outcome"],
            registry=registry,
        )
        self.recomputed = Counter(
            "trivet_recomputed_generations",
            "Generations that were to be split and whose prompt decode computed itself",
            registry=registry,
        )

    def count_rendering(self, now: Callable[[], Rendered]) -> None:
        """Counts from now on what a worker renders, where it does.

        Args:
            now: what has come of it so far.
        """
        self._rendered = RenderedMetrics(self.registry, now)
        self.look()

    def look(self) -> None:
        """Counts what is kept up elsewhere. Of other workers ``text`` tells what they saw at their last look."""
        if self._rendered is not None:
            self._rendered.look()

    def ended(self, record: GenerationRecord, owner: RequestRecord | None) -> None:
        """Counts a generation that ended."""
        served = "split" if record.split else "colocated"
        outcome = _outcome(record)
        self.generations.labels(served, outcome).inc()
        self.recomputed.inc(record.intended_split and not record.split)
        if record.split_reason:
            self.decisions.labels("split" if record.intended_split else "colocated", record.split_reason).inc()
        if record.cache_known_by:
            self.cache_known.labels(record.cache_known_by).inc()
        self.attempts.inc(record.attempts)
        self.retries.inc(max(0, record.attempts - 1))
        self.resumes.inc(record.resumes)
        self.tokens.labels("prompt").inc(record.prompt_tokens)
        self.tokens.labels("completion").inc(record.completion_tokens)
        self.tokens.labels("cached").inc(record.cached_tokens or 0)
        _add(self.gaps, (served, "one"), record.gaps.one, record.gaps.one_s)
        _add(self.gaps, (served, "several"), record.gaps.several, record.gaps.several_s)
        if record.decode_engine and record.decode_start_s is not None and record.end_s is not None:
            self.decode.labels(record.decode_engine).observe(max(0.0, record.end_s - record.decode_start_s))
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

    def text(self, engines: Engines, gauges: Gauges) -> bytes:
        """The exposition text; its counters are of all workers where there are several."""
        self.look()
        shown = CollectorRegistry()
        counted = _OfAllWorkers() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else self.registry
        latest_s = time.monotonic() - _LAST_LOOK_S
        shown.register(_WithoutEngines(counted, {name for name, at_s in self.gone.items() if at_s < latest_s}))
        shown.register(_Now(engines, gauges, self._held))
        return generate_latest(shown)


def _outcome(record: GenerationRecord) -> str:
    """How a generation ended, by whose doing: the client's mistake or impatience, a fault, or the model's word."""
    if record.refused:
        return "refused"
    if record.late:
        return "deadline"
    return "error" if record.error else record.finish_reason or "none"


def _add(histogram: Histogram, labels: tuple[str, ...], counts: Sequence[int] | None, sum_s: float) -> None:
    """Adds observations that were counted by bucket already.

    ``observe`` takes one at a time, a microsecond each, and an answer has thousands; prometheus-client has no public
    way to add many. A test holds this against ``observe``.
    """
    if counts is None:
        return
    child = histogram.labels(*labels)
    for bucket, count in zip(child._buckets, counts, strict=True):
        if count:
            bucket.inc(count)
    child._sum.inc(sum_s)
