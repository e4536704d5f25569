"""What a simulated engine counts, and its ``/metrics`` under vLLM's names."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trivet.sim.settings import TRIVET, SimSettings

if TYPE_CHECKING:
    from trivet.sim.pool import BlockPool
    from trivet.sim.scheduler import End, SimSequence

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_BYTES = tuple(float(2 ** (10 + place)) for place in range(1, 25, 2))
_REASONS = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class Histogram:
    """Prometheus' kind: counts below bounds, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self.count += 1

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Its exposition."""
        yield f"# TYPE {name} histogram"
        below = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            below += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {below}'
        yield f'{name}_bucket{{{labels},le="+Inf"}} {self.count}'
        yield f"{name}_count{{{labels}}} {self.count}"
        yield f"{name}_sum{{{labels}}} {self.sum}"


class Stats:
    """Counters since the start."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self.executions: Counter[str] = Counter()
        """Sequences whose prompt was wholly computed or loaded, by leg."""
        self.computed_prompt_tokens: Counter[str] = Counter()
        """Prompt tokens computed here, by leg."""
        self.by_source: Counter[str] = Counter()
        self.by_reason: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.queries = 0
        self.hits = 0
        self.external_queries = 0
        self.external_hits = 0
        self.failed_transfers = 0
        self.recomputed = 0
        """Prompts computed here because their KV did not come."""
        self.failed_notifications = 0
        self.expired = 0
        self.late_notifications = 0
        self.rejections = 0
        self.ttft = Histogram(_SECONDS)
        self.itl = Histogram(_SECONDS)
        self.e2e = Histogram(_SECONDS)
        self.queue = Histogram(_SECONDS)
        self.transfer_bytes = Histogram(_BYTES)
        self.transfer_s = Histogram(_SECONDS)

    def prefilled(self, sequence: SimSequence) -> None:
        """A prompt is in the KV pool."""
        prompt = len(sequence.prompt)
        # as vLLM counts it: what was pulled whole counts as pulled, though its last token is computed again
        computed = prompt - sequence.cached - sequence.external
        self.executions[sequence.leg] += 1
        self.computed_prompt_tokens[sequence.leg] += computed
        self.by_source["local_compute"] += computed
        self.by_source["local_cache_hit"] += sequence.cached
        self.by_source["external_kv_transfer"] += sequence.external
        self.prompt_tokens += prompt
        self.queries += prompt
        self.hits += sequence.cached
        if sequence.source is not None:
            self.external_queries += prompt - sequence.cached
            self.external_hits += sequence.external
        assert sequence.first_token_s is not None
        self.ttft.observe(sequence.first_token_s - sequence.arrived_s)
        if sequence.scheduled_s is not None:
            self.queue.observe(sequence.scheduled_s - sequence.arrived_s)

    def token(self, sequence: SimSequence, now_s: float) -> None:
        """A token came out."""
        self.generation_tokens += 1
        if sequence.last_token_s:
            self.itl.observe(now_s - sequence.last_token_s)
        sequence.last_token_s = now_s

    def finished(self, sequence: SimSequence, end: End) -> None:
        """A sequence has ended."""
        self.by_reason[end] += 1
        self.e2e.observe(time.monotonic() - sequence.arrived_s)

    def transferred(self, sequence: SimSequence) -> None:
        """A sequence's KV has come."""
        block = self._settings.block_size  # what moves is whole blocks
        self.transfer_bytes.observe(float(-(-sequence.external // block) * block * self._settings.kv_bytes_per_token))
        self.transfer_s.observe(sequence.external * self._settings.transfer_ms_per_token / 1000)

    def text(self, pool: BlockPool, *, running: int, waiting: int, fetching: int) -> str:
        """The ``/metrics`` page."""
        settings = self._settings
        labels = f'engine="0",model_name="{_escaped(settings.names[0])}"'
        lines: list[str] = []

        def put(kind: str, name: str, value: float, **more: str) -> None:
            family = f"vllm:{name}"
            header = f"# TYPE {family} {kind}"
            if header not in lines:
                lines.append(header)
            sample = f"{family}_total" if kind == "counter" else family
            extra = "".join(f',{key}="{_escaped(one)}"' for key, one in more.items())
            lines.append(f"{sample}{{{labels}{extra}}} {float(value)}")

        put("gauge", "num_requests_running", running)
        put("gauge", "num_requests_waiting", waiting + fetching)
        put("gauge", "num_requests_waiting_by_reason", waiting, reason="capacity")
        put("gauge", "num_requests_waiting_by_reason", fetching, reason="deferred")
        put("gauge", "kv_cache_usage_perc", (pool.used + pool.held) / pool.total)
        put("counter", "prefix_cache_queries", self.queries)
        put("counter", "prefix_cache_hits", self.hits)
        put("counter", "external_prefix_cache_queries", self.external_queries)
        put("counter", "external_prefix_cache_hits", self.external_hits)
        put("counter", "num_preemptions", self.preemptions)
        put("counter", "prompt_tokens", self.prompt_tokens)
        for source in _SOURCES:
            put("counter", "prompt_tokens_by_source", self.by_source[source], source=source)
        put("counter", "prompt_tokens_cached", self.prompt_tokens - self.by_source["local_compute"])
        put("counter", "generation_tokens", self.generation_tokens)
        for reason in _REASONS:
            put("counter", "request_success", self.by_reason[reason], finished_reason=reason)
        if not settings.is_old:
            put("counter", "admission_rejections", self.rejections, reason="max_num_queued_reqs")
        for name, histogram in (
            ("time_to_first_token_seconds", self.ttft),
            ("inter_token_latency_seconds", self.itl),
            ("e2e_request_latency_seconds", self.e2e),
            ("request_queue_time_seconds", self.queue),
        ):
            lines += histogram.lines(f"vllm:{name}", labels)
        if settings.kv_transfer and settings.kv_connector == TRIVET:
            put("counter", "trivet_kv_bytes", self.transfer_bytes.sum)
        elif settings.kv_transfer:
            lines += self.transfer_s.lines("vllm:nixl_xfer_time_seconds", labels)
            lines += self.transfer_bytes.lines("vllm:nixl_bytes_transferred", labels)
            put("counter", "nixl_num_failed_transfers", self.failed_transfers)
            put("counter", "nixl_num_failed_notifications", self.failed_notifications)
            put("counter", "nixl_num_kv_expired_reqs", self.expired)
            if not settings.is_old:
                put("counter", "nixl_num_notifications_after_expiry", self.late_notifications)
        config: Mapping[str, object] = {
            "block_size": settings.block_size,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "num_gpu_blocks": pool.total,
            "gpu_memory_utilization": 0.92,
            "cache_dtype": "auto",
        }
        put("gauge", "cache_config_info", 1, **{name: str(value) for name, value in config.items()})
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
