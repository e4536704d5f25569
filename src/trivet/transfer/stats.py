"""What the connector counts, and how vLLM's ``/metrics`` and log show it."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Counts:
    """Counts of one process since they were last taken. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {}

    def received(self, mover: str, size: int, pieces: int, seconds: float, tail_s: float) -> None:
        """A transfer has landed.

        Args:
            seconds: since decode asked for it.
            tail_s: since prefill had computed its last layer.
        """
        self._append("received", [mover, size, pieces, seconds, tail_s])

    def sent(self, mover: str, size: int) -> None:
        """A piece has left."""
        with self._lock:
            of = self._data.setdefault("sent", {}).setdefault(mover, [0, 0])
            of[0] += size
            of[1] += 1

    def waited_for_slot(self) -> None:
        """A piece was the next of its peer and found no slot of the staging free."""
        self._add("waits", "slot", 1)

    def pair(self, mover: str) -> None:
        """A peer has been joined."""
        self._add("pairs", mover, 1)

    def failed(self, reason: str) -> None:
        """A transfer was not completed."""
        self._add("failed", reason, 1)

    def recomputed(self, tokens: int) -> None:
        """Decode computes a prompt itself whose KV it should have got."""
        self._add("recomputed", "requests", 1)
        self._add("recomputed", "tokens", tokens)

    def expired(self) -> None:
        """Prefill gave up KV that no decode engine asked for in time."""
        self._add("expired", "transfers", 1)

    def take(self) -> TransferStats | None:
        """What was counted, which is then forgotten; None if that is nothing."""
        if not self._data:
            return None
        with self._lock:
            data, self._data = self._data, {}
        return TransferStats(data=data)

    def _append(self, name: str, value: Any) -> None:
        with self._lock:
            self._data.setdefault(name, []).append(value)

    def _add(self, name: str, key: str, value: float) -> None:
        with self._lock:
            of = self._data.setdefault(name, {})
            of[key] = of.get(key, 0) + value


class TransferStats(KVConnectorStats):
    """``Counts`` on their way to the front end."""

    data: dict[str, Any]

    def reset(self) -> None:
        """See ``KVConnectorStats``."""
        self.data = {}

    def is_empty(self) -> bool:
        """See ``KVConnectorStats``."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See ``KVConnectorStats``."""
        merged = {name: value.copy() for name, value in self.data.items()}
        for name, value in other.data.items():
            if isinstance(value, list):
                merged[name] = [*merged.get(name, []), *value]
                continue
            own = merged.setdefault(name, {})
            for key, amount in value.items():
                known = own.get(key)
                if isinstance(amount, list):
                    own[key] = [a + b for a, b in zip(known, amount, strict=True)] if known else list(amount)
                else:
                    own[key] = (known or 0) + amount
        return TransferStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """See ``KVConnectorStats``: the log line."""
        received = self.data.get("received", [])
        line: dict[str, int | float] = {}
        if received:
            line["transfers received"] = len(received)
            line["MiB received"] = round(sum(one[1] for one in received) / 2**20, 1)
            line["mean seconds"] = round(sum(one[3] for one in received) / len(received), 4)
            line["mean tail ms"] = round(sum(one[4] for one in received) / len(received) * 1e3, 2)
        for mover, (size, pieces) in self.data.get("sent", {}).items():
            line[f"MiB sent by {mover}"] = round(size / 2**20, 1)
            line[f"pieces sent by {mover}"] = pieces
        for reason, times in self.data.get("failed", {}).items():
            line[f"failed ({reason})"] = times
        line.update({f"recomputed {name}": amount for name, amount in self.data.get("recomputed", {}).items()})
        line.update({f"expired {name}": amount for name, amount in self.data.get("expired", {}).items()})
        return line


class TransferMetrics(KVConnectorPromMetrics):
    """The same in ``/metrics``. Labels: vLLM's own, and ``mover`` or ``reason``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram, gauge = metric_types[Counter], metric_types[Histogram], metric_types[Gauge]
        by_mover = [*labelnames, "mover"]
        self._bytes = counter("vllm:trivet_kv_bytes", "KV bytes received from prefill engines.", by_mover)
        self._pieces = counter("vllm:trivet_kv_pieces", "Pieces in which KV was received.", by_mover)
        self._seconds = histogram(
            "vllm:trivet_kv_transfer_seconds",
            "From decode's asking for KV to its last piece; most of it overlaps with prefill.",
            labelnames=by_mover,
            buckets=_SECONDS,
        )
        self._tail = histogram(
            "vllm:trivet_kv_tail_seconds",
            "From prefill's last computed layer to the last piece at decode: the part that does not overlap.",
            labelnames=by_mover,
            buckets=_SECONDS,
        )
        self._sent_bytes = counter("vllm:trivet_kv_sent_bytes", "KV bytes staged for decode engines.", by_mover)
        self._sent_pieces = counter("vllm:trivet_kv_sent_pieces", "Pieces staged for decode engines.", by_mover)
        self._waits = counter(
            "vllm:trivet_kv_staging_waits", "Times that a piece was ready and no staging was free.", labelnames
        )
        self._failed = counter("vllm:trivet_kv_failures", "Transfers not completed.", [*labelnames, "reason"])
        self._recomputed = counter(
            "vllm:trivet_kv_recomputed_tokens", "Prompt tokens decode computed as their KV did not come.", labelnames
        )
        self._expired = counter(
            "vllm:trivet_kv_expired", "Transfers whose lease ended before a decode engine took them.", labelnames
        )
        self._pairs = gauge("vllm:trivet_kv_peers", "Peers joined since the start, by mover.", by_mover)
        for labels in self.per_engine_labelvalues.values():
            for one in (self._waits, self._recomputed, self._expired):
                one.labels(*labels)  # 0 from the start: an alert must see the first of them as a rise

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See ``KVConnectorPromMetrics``."""
        labels = self.per_engine_labelvalues[engine_idx]
        for mover, size, pieces, seconds, tail_s in transfer_stats_data.get("received", ()):
            self._bytes.labels(*labels, mover).inc(size)
            self._pieces.labels(*labels, mover).inc(pieces)
            self._seconds.labels(*labels, mover).observe(seconds)
            self._tail.labels(*labels, mover).observe(tail_s)
        for mover, (size, pieces) in transfer_stats_data.get("sent", {}).items():
            self._sent_bytes.labels(*labels, mover).inc(size)
            self._sent_pieces.labels(*labels, mover).inc(pieces)
        for times in transfer_stats_data.get("waits", {}).values():
            self._waits.labels(*labels).inc(times)
        for reason, times in transfer_stats_data.get("failed", {}).items():
            self._failed.labels(*labels, reason).inc(times)
        self._recomputed.labels(*labels).inc(transfer_stats_data.get("recomputed", {}).get("tokens", 0))
        self._expired.labels(*labels).inc(transfer_stats_data.get("expired", {}).get("transfers", 0))
        for mover, times in transfer_stats_data.get("pairs", {}).items():
            self._pairs.labels(*labels, mover).inc(times)
