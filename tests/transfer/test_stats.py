import pickle
import threading
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from trivet.transfer.stats import Counts, TransferMetrics, TransferStats

MIB = 2**20


def counted():
    counts = Counts()
    counts.received("shm", 3 * MIB, 4, 0.5, 0.002)
    counts.received("shm", MIB, 1, 0.1, 0.004)
    counts.received("pinned", MIB, 2, 0.3, 0.006)
    counts.sent("shm", MIB)
    counts.sent("shm", 2 * MIB)
    counts.waited_for_slot()
    counts.pair("shm")
    counts.failed("gone")
    counts.recomputed(40)
    counts.recomputed(2)
    counts.expired()
    return counts


DATA = {
    "received": [["shm", 3 * MIB, 4, 0.5, 0.002], ["shm", MIB, 1, 0.1, 0.004], ["pinned", MIB, 2, 0.3, 0.006]],
    "sent": {"shm": [3 * MIB, 2]},
    "waits": {"slot": 1},
    "pairs": {"shm": 1},
    "failed": {"gone": 1},
    "recomputed": {"requests": 2, "tokens": 42},
    "expired": {"transfers": 1},
}


def test_counts_are_taken_once():
    counts = counted()
    assert counts.take().data == DATA
    assert counts.take() is None


def test_counts_of_many_threads_are_all_there():
    counts = Counts()

    def count():
        for _ in range(500):
            counts.sent("shm", 8)
            counts.recomputed(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.take().data == {"sent": {"shm": [16000, 2000]}, "recomputed": {"requests": 2000, "tokens": 2000}}


def test_stats_travel_between_processes():
    assert pickle.loads(pickle.dumps(counted().take())).data == DATA
    import msgspec

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counted().take().to_dict())) == DATA


def test_stats_of_ranks_are_summed_and_stay_as_they_were():
    one, other = counted().take(), counted().take()
    both = one.aggregate(other)
    assert both.data == {
        "received": DATA["received"] * 2,
        "sent": {"shm": [6 * MIB, 4]},
        "waits": {"slot": 2},
        "pairs": {"shm": 2},
        "failed": {"gone": 2},
        "recomputed": {"requests": 4, "tokens": 84},
        "expired": {"transfers": 2},
    }
    assert (one.data, other.data) == (DATA, DATA)


def test_stats_of_other_sides_are_joined():
    one = TransferStats(data={"sent": {"shm": [8, 1]}, "failed": {"gone": 1}})
    other = TransferStats(data={"sent": {"pinned": [16, 2]}, "received": [["shm", 1, 1, 1.0, 1.0]]})
    both = one.aggregate(other).aggregate(TransferStats(data={}))
    assert both.data == {
        "sent": {"shm": [8, 1], "pinned": [16, 2]},
        "failed": {"gone": 1},
        "received": [["shm", 1, 1, 1.0, 1.0]],
    }


def test_stats_know_whether_they_are_empty():
    stats = counted().take()
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}
    assert TransferStats(data={}).is_empty()


def test_the_log_line_has_sums_and_means():
    assert counted().take().reduce() == {
        "transfers received": 3,
        "MiB received": 5.0,
        "mean seconds": 0.3,
        "mean tail ms": 4.0,
        "MiB sent by shm": 3.0,
        "pieces sent by shm": 2,
        "failed (gone)": 1,
        "recomputed requests": 2,
        "recomputed tokens": 42,
        "expired transfers": 1,
    }


@pytest.fixture
def metrics():
    before = set(REGISTRY._collector_to_names)
    yield TransferMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(name, engine="0", **labels):
    return REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def test_metrics_show_what_was_counted(metrics):
    metrics.observe(DATA)
    metrics.observe(counted().take().to_dict())
    assert value("vllm:trivet_kv_bytes_total", mover="shm") == 8 * MIB
    assert value("vllm:trivet_kv_bytes_total", mover="pinned") == 2 * MIB
    assert value("vllm:trivet_kv_pieces_total", mover="shm") == 10
    assert value("vllm:trivet_kv_transfer_seconds_count", mover="shm") == 4
    assert value("vllm:trivet_kv_transfer_seconds_sum", mover="shm") == pytest.approx(1.2)
    assert value("vllm:trivet_kv_tail_seconds_sum", mover="pinned") == pytest.approx(0.012)
    assert value("vllm:trivet_kv_tail_seconds_bucket", mover="shm", le="0.002") == 2
    assert value("vllm:trivet_kv_sent_bytes_total", mover="shm") == 6 * MIB
    assert value("vllm:trivet_kv_sent_pieces_total", mover="shm") == 4
    assert value("vllm:trivet_kv_staging_waits_total") == 2
    assert value("vllm:trivet_kv_failures_total", reason="gone") == 2
    assert value("vllm:trivet_kv_recomputed_tokens_total") == 84
    assert value("vllm:trivet_kv_expired_total") == 2
    assert value("vllm:trivet_kv_peers", mover="shm") == 2


def test_metrics_of_each_engine_are_its_own(metrics):
    metrics.observe(DATA, 1)
    assert value("vllm:trivet_kv_bytes_total", "1", mover="shm") == 4 * MIB
    assert value("vllm:trivet_kv_bytes_total", "0", mover="shm") is None
    metrics.observe({})
    assert value("vllm:trivet_kv_expired_total", "0") == 0


def test_what_alerts_look_for_is_there_before_it_happens(metrics):
    for engine in ("0", "1"):
        for name in ("staging_waits", "recomputed_tokens", "expired"):
            assert value(f"vllm:trivet_kv_{name}_total", engine) == 0
