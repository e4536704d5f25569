import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.multiprocess import mark_process_dead

from trivet.gateway.metrics import GatewayMetrics, Gauges, Rendered
from trivet.journal import GAP_BOUNDS_S, Gaps, GenerationRecord, RequestRecord
from trivet.routing.board import Board
from trivet.routing.engines import Engines, EngineView
from trivet.routing.held import Held, new_key


def engines_of(*views: EngineView) -> Engines:
    engines = Engines()
    engines.update(views)
    return engines


NOTHING = Gauges(0, 0, 0, 0, 0)


def samples(metrics: GatewayMetrics, engines: Engines | None = None, gauges: Gauges = NOTHING) -> dict:
    """What is exposed, by name and labels; times of creation left out."""
    return parse(metrics.text(engines or Engines(), gauges).decode())


def parse(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    return {name: value for name, value in found.items() if "_created" not in name}


def record(**changes: object) -> GenerationRecord:
    """A split generation with round times: 1 s of rendering, 2 s of prefill, 0.5 s of handover."""
    values: dict = {
        "generation_id": "gen-1",
        "prompt_tokens": 100,
        "rendered_s": 11.0,
        "split": True,
        "prefill_engine": "prefill-0",
        "decode_engine": "decode-0",
        "prefill_start_s": 11.25,
        "prefill_end_s": 13.25,
        "decode_start_s": 11.5,
        "first_token_s": 13.75,
        "decode_first_s": 13.75,
        "end_s": 14.75,
        "completion_tokens": 7,
        "finish_reason": "stop",
    }
    return GenerationRecord(**values | changes)


OWNER = RequestRecord("req-1", "/v1/completions", arrived_s=10.0)

SPLIT = 'served="split"'
PAIR = 'decode="decode-0",prefill="prefill-0"'


@pytest.mark.parametrize(("intended", "split", "counted"), [(True, True, 0), (True, False, 1), (False, False, 0)])
def test_what_was_to_be_split_and_was_not_is_counted(intended, split, counted):
    metrics = GatewayMetrics()
    metrics.ended(record(intended_split=intended, split=split), OWNER)
    found = samples(metrics)
    assert found["trivet_recomputed_generations_total"] == counted
    served = "split" if split else "colocated"
    assert found[f'trivet_generations_total{{outcome="stop",served="{served}"}}'] == 1


@pytest.mark.parametrize(("intended", "decision"), [(True, "split"), (False, "colocated")])
@pytest.mark.parametrize("split", [True, False])
def test_decisions_are_counted_with_their_reasons(intended, decision, split):
    """What was decided, whatever came of it."""
    metrics = GatewayMetrics()
    for reason in ("long_prompt", "retry", "retry", ""):  # the last was given to no engine
        metrics.ended(record(intended_split=intended, split=split, split_reason=reason), OWNER)
    found = {name: value for name, value in samples(metrics).items() if name.startswith("trivet_split_decisions")}
    label = f'trivet_split_decisions_total{{decision="{decision}",reason='
    assert found == {f'{label}"long_prompt"}}': 1, f'{label}"retry"}}': 2}


def test_a_split_generation_is_counted_whole():
    metrics = GatewayMetrics()
    metrics.ended(record(), OWNER)
    found = samples(metrics)
    expected = {
        f'trivet_generations_total{{outcome="stop",{SPLIT}}}': 1.0,
        'trivet_tokens_total{kind="prompt"}': 100.0,
        'trivet_tokens_total{kind="completion"}': 7.0,
        "trivet_render_seconds_sum": 1.0,
        "trivet_render_seconds_count": 1.0,
        f"trivet_time_to_first_token_seconds_sum{{{SPLIT}}}": 3.75,
        f"trivet_time_to_first_token_seconds_count{{{SPLIT}}}": 1.0,
        'trivet_prefill_leg_seconds_sum{engine="prefill-0"}': 2.0,
        f"trivet_handover_seconds_sum{{{PAIR}}}": 0.5,
        'trivet_decode_leg_seconds_sum{engine="decode-0"}': 3.25,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_a_colocated_generation_has_no_handover():
    metrics = GatewayMetrics()
    colocated = {"split": False, "prefill_engine": None, "prefill_start_s": None, "prefill_end_s": None}
    metrics.ended(record(**colocated), OWNER)
    found = samples(metrics)
    assert found['trivet_generations_total{outcome="stop",served="colocated"}'] == 1.0
    assert found['trivet_time_to_first_token_seconds_count{served="colocated"}'] == 1.0
    assert not [name for name in found if name.startswith(("trivet_prefill", "trivet_handover"))]


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"finish_reason": "abort"}, "abort"),
        ({"finish_reason": None}, "none"),
        ({"finish_reason": None, "error": "decode-0: no answer"}, "error"),
        ({"finish_reason": "abort", "error": "decode-0: no answer"}, "error"),
        ({"finish_reason": None, "error": "the request's deadline has passed", "late": True}, "deadline"),
        ({"finish_reason": None, "error": "the request's deadline has passed"}, "error"),
    ],
)
def test_outcomes_are_told_apart(changes, outcome):
    metrics = GatewayMetrics()
    metrics.ended(record(**changes), OWNER)
    counted = [name for name in samples(metrics) if name.startswith("trivet_generations_total")]
    assert counted == [f'trivet_generations_total{{outcome="{outcome}",{SPLIT}}}']


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"first_token_s": None}, ["trivet_time_to_first_token_seconds"]),
        ({"decode_first_s": None}, ["trivet_handover_seconds"]),
        ({"prefill_end_s": None}, ["trivet_prefill_leg_seconds", "trivet_handover_seconds"]),
        ({"decode_engine": None}, ["trivet_handover_seconds", "trivet_decode_leg_seconds"]),
        ({"decode_start_s": None}, ["trivet_decode_leg_seconds"]),
        ({"end_s": None}, ["trivet_decode_leg_seconds"]),
        ({}, ["trivet_inter_token_latency_seconds"]),  # an answer of one chunk
    ],
)
def test_what_a_generation_did_not_reach_is_not_observed(changes, missing):
    metrics = GatewayMetrics()
    metrics.ended(record(**changes), OWNER)
    found = samples(metrics)
    assert [name for name in missing if any(one.startswith(f"{name}_count") for one in found)] == []


def test_a_generation_of_no_request_has_no_time_to_its_first_token():
    metrics = GatewayMetrics()
    metrics.ended(record(), None)
    found = samples(metrics)
    assert found["trivet_render_seconds_count"] == 0.0
    assert not [name for name in found if name.startswith("trivet_time_to_first_token_seconds")]
    assert found['trivet_prefill_leg_seconds_count{engine="prefill-0"}'] == 1.0


def test_attempts_and_continuations_are_counted():
    metrics = GatewayMetrics()
    metrics.ended(record(attempts=3, resumes=1), OWNER)
    metrics.ended(record(attempts=1), OWNER)
    found = samples(metrics)
    assert (found["trivet_attempts_total"], found["trivet_resumes_total"]) == (4.0, 1.0)


def test_a_clock_that_is_off_by_a_little_gives_no_negative_times():
    metrics = GatewayMetrics()
    metrics.ended(record(rendered_s=9.9, decode_first_s=13.2), OWNER)
    found = samples(metrics)
    assert (found["trivet_render_seconds_sum"], found[f"trivet_handover_seconds_sum{{{PAIR}}}"]) == (0.0, 0.0)


@pytest.mark.parametrize(("handover_s", "bucket"), [(0.0015, "0.002"), (0.003, "0.005"), (0.04, "0.05")])
def test_buckets_tell_milliseconds_apart(handover_s, bucket):
    metrics = GatewayMetrics()
    metrics.ended(record(decode_first_s=13.25 + handover_s), OWNER)
    found = samples(metrics)
    filled = [name for name in found if name.startswith("trivet_handover_seconds_bucket") and found[name]]
    assert f'le="{bucket}"' in filled[0]


def test_gauges_are_as_they_are_now():
    metrics = GatewayMetrics()
    view = EngineView("decode-0", "decode", "http://127.0.0.1:1", True)
    engines = engines_of(view, EngineView("prefill-0", "prefill", "http://127.0.0.1:2", False))
    with engines.charge(view, 321):
        found = samples(metrics, engines, Gauges(4, 3, 7, 2, 1))
    assert found["trivet_generations_running"] == 4.0
    assert (found["trivet_requests_running"], found["trivet_requests_waiting"]) == (3.0, 7.0)
    assert (found["trivet_kv_releases_pending"], found["trivet_kv_releases_unconfirmed"]) == (2.0, 1.0)
    assert found['trivet_engine_ready{engine="decode-0",tier="decode"}'] == 1.0
    assert found['trivet_engine_ready{engine="prefill-0",tier="prefill"}'] == 0.0
    assert found['trivet_outstanding_tokens{engine="decode-0",tier="decode"}'] == 321.0
    later = samples(metrics, engines)
    assert later["trivet_generations_running"] == 0.0
    assert later["trivet_requests_waiting"] == 0.0
    assert later['trivet_outstanding_tokens{engine="decode-0",tier="decode"}'] == 0.0


SERVER = 'server="http://10.0.0.1:9000"'


def of_render_servers() -> GatewayMetrics:
    """What a worker with a render server has counted."""
    metrics = GatewayMetrics(has_render_servers=True)
    counted, server = metrics.of_render_servers, "http://10.0.0.1:9000"
    counted.used(server, True)
    counted.running(server, 3)
    counted.waiting(2)
    counted.asked(server, "ok", 0.03)
    counted.asked(server, "ok", 0.04)
    counted.asked(server, "timeout", 10.0)
    counted.local("media")
    counted.refused("queue_full")
    return metrics


def test_what_render_servers_are_asked_is_counted():
    found = samples(of_render_servers())
    expected = {
        f'trivet_render_server_requests_total{{outcome="ok",{SERVER}}}': 2.0,
        f'trivet_render_server_requests_total{{outcome="timeout",{SERVER}}}': 1.0,
        f"trivet_render_server_seconds_count{{{SERVER}}}": 2.0,
        f"trivet_render_server_seconds_sum{{{SERVER}}}": pytest.approx(0.07),
        'trivet_render_local_total{reason="media"}': 1.0,
        'trivet_render_refused_total{reason="queue_full"}': 1.0,
        f"trivet_render_server_running{{{SERVER}}}": 3.0,
        "trivet_render_waiting": 2.0,
        f"trivet_render_server_up{{{SERVER}}}": 1.0,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_a_worker_that_renders_itself_exposes_nothing_of_render_servers():
    metrics = GatewayMetrics()
    assert metrics.of_render_servers is None
    assert [name for name in samples(metrics) if "render" in name and "render_seconds" not in name] == []


def rendering(**now: object) -> tuple[GatewayMetrics, list[Rendered]]:
    """A worker that renders, and what it has rendered, the newest last."""
    done, metrics = [Rendered(**now)], GatewayMetrics()
    metrics.count_rendering(lambda: done[-1])
    return metrics, done


def of_rendering(metrics: GatewayMetrics) -> dict[str, float]:
    return {name: value for name, value in samples(metrics).items() if name.startswith(("trivet_render_", "trivet_de"))}


def without_seconds(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "_seconds" not in name}


def test_what_a_worker_renders_is_counted_as_it_is_when_somebody_asks():
    first = {"characters": 100, "found_characters": 60, "cache_bytes": 5000, "derender_hits": 9, "derender_replays": 2}
    metrics, done = rendering(tokenizer="fastokens", **first)
    expected = {
        'trivet_render_characters_total{found="yes"}': 60.0,
        'trivet_render_characters_total{found="no"}': 40.0,
        "trivet_render_cache_bytes": 5000.0,
        'trivet_render_tokenizer{name="fastokens"}': 1.0,
        "trivet_derender_hits_total": 9.0,
        "trivet_derender_replays_total": 2.0,
    }
    for _ in range(2):  # asking twice counts nothing twice
        assert without_seconds(of_rendering(metrics)) == expected
    done.append(Rendered("fastokens", 150, 110, 4000, 9, 3))
    assert without_seconds(of_rendering(metrics)) == expected | {
        'trivet_render_characters_total{found="yes"}': 110.0,
        "trivet_render_cache_bytes": 4000.0,
        "trivet_derender_replays_total": 3.0,
    }


def test_a_worker_that_has_rendered_nothing_yet_says_so_with_every_series():
    metrics, _ = rendering(tokenizer="vllm")
    found = without_seconds(of_rendering(metrics))
    assert found.pop('trivet_render_tokenizer{name="vllm"}') == 1.0
    assert set(found.values()) == {0.0}
    assert len(found) == 5


def test_a_tokenizer_that_is_given_up_counts_no_more():
    metrics, done = rendering(tokenizer="fastokens")
    done.append(Rendered("tokenizers"))
    found = {name: value for name, value in samples(metrics).items() if "tokenizer" in name}
    assert found == {
        'trivet_render_tokenizer{name="fastokens"}': 0.0,
        'trivet_render_tokenizer{name="tokenizers"}': 1.0,
    }


def test_a_worker_that_does_not_render_exposes_nothing_of_it():
    metrics = GatewayMetrics()
    metrics.look()
    assert without_seconds(of_rendering(metrics)) == {}


@pytest.mark.parametrize(
    "metrics", [GatewayMetrics(), of_render_servers(), rendering(tokenizer="x")[0]], ids=["text", "servers", "renders"]
)
def test_every_metric_has_a_help_text_and_trivets_name(metrics):
    text = metrics.text(Engines(), NOTHING).decode()
    helped = [line.split(" ", 3)[2:] for line in text.splitlines() if line.startswith("# HELP")]
    assert [name for name, _ in helped if not name.startswith("trivet_")] == []
    assert [name for name, words in helped if not words.strip()] == []


def gaps_of(*waits_s: float, tokens: int = 1) -> Gaps:
    """What an answer's chunks leave, each of so many tokens."""
    gaps, clock = Gaps(), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trivet.journal.now_s", lambda: clock)
        gaps.note(tokens)
        for number, wait_s in enumerate(waits_s, 2):
            clock += wait_s
            gaps.note(tokens * number)
    return gaps


WAITS_S = (0.0005, 0.001, 0.0015, 0.02, 0.02, 0.7, 1.0, 30.0)


@pytest.mark.parametrize(("size", "label"), [(1, "one"), (3, "several")])
def test_buckets_counted_elsewhere_are_what_observing_each_would_have_counted(size, label):
    metrics = GatewayMetrics()
    metrics.ended(record(gaps=gaps_of(*WAITS_S, tokens=size)), OWNER)
    metrics.ended(record(gaps=gaps_of(0.02, tokens=size)), OWNER)
    registry = CollectorRegistry()
    observed = Histogram(
        "trivet_inter_token_latency_seconds", "x", ["served", "tokens"], buckets=GAP_BOUNDS_S, registry=registry
    )
    for wait_s in (*WAITS_S, 0.02):
        observed.labels("split", label).observe(wait_s)
    name = "trivet_inter_token_latency_seconds"
    found = {one: value for one, value in samples(metrics).items() if one.startswith(name)}
    expected = {one: value for one, value in parse(generate_latest(registry).decode()).items() if one.startswith(name)}
    assert found == pytest.approx(expected)


def test_retries_are_attempts_behind_the_first():
    metrics = GatewayMetrics()
    for attempts in (0, 1, 3, 2):
        metrics.ended(record(attempts=attempts), OWNER)
    assert samples(metrics)["trivet_retries_total"] == 3


# several workers

WORKER = """
import sys
from prometheus_client import Counter
from trivet.gateway.metrics import GatewayMetrics, Gauges, Rendered
from trivet.journal import GenerationRecord
from trivet.routing.board import Board, Count
from trivet.routing.engines import Engines, EngineView
from trivet.routing.held import Held, new_key

board, worker, running, generations = (int(one) for one in sys.argv[1:])
Counter("vllm_something", "what vLLM counts in the same process").inc()
metrics, engines = GatewayMetrics(has_render_servers=True), Engines(board=Board.open(board, worker))
metrics.of_render_servers.running("http://a:1", running)
metrics.of_render_servers.waiting(1)
metrics.of_render_servers.asked("http://a:1", "ok", 0.1)
for server, is_used in (("http://a:1", True), ("http://b:1", worker == 1)):
    metrics.of_render_servers.used(server, is_used)
metrics.count_rendering(lambda: Rendered("fastokens" if worker else "vllm", 100 * running, 10 * running, 7, 5, 1))
view = EngineView("decode-0", "decode", "http://127.0.0.1:1", True, slot=3)
engines.update([view])
for _ in range(generations):
    one = GenerationRecord("gen", 10, 0.0, finish_reason="stop")
    for tokens in (1, 2, 3):
        one.gaps.note(tokens)
    metrics.ended(one, None)
with engines.charge(view, 100):
    engines.board.write(Count.GENERATIONS, running)
    print("counted", flush=True)
    if sys.stdin.readline():
        gauges = Gauges(engines.board.total(Count.GENERATIONS), 1, 2, 3, 4)
        sys.stdout.write(metrics.text(engines, gauges).decode() + "# EOF\\n")
        sys.stdout.flush()
    sys.stdin.readline()
"""


def told_by(worker: subprocess.Popen) -> dict[str, float]:
    """What a worker exposes."""
    worker.stdin.write("tell\n")
    worker.stdin.flush()
    return parse("".join(iter(worker.stdout.readline, "# EOF\n")))


def test_one_worker_tells_the_sum_of_all(tmp_path):
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    board = Board.create(2, 8)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(board.descriptor), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=[board.descriptor],
        )
        for arguments in (("0", "2", "1"), ("1", "3", "4"))
    ]
    try:
        assert [one.stdout.readline() for one in workers] == ["counted\n", "counted\n"]
        found = told_by(workers[0])
        workers[0].kill()
        workers[0].wait(30)
        board.clear(0)
        mark_process_dead(workers[0].pid, str(tmp_path))
        left = told_by(workers[1])
    finally:
        for one in workers:
            one.kill()
            one.communicate(timeout=30)
        board.close()
    served = 'outcome="stop",served="colocated"'
    assert found[f"trivet_generations_total{{{served}}}"] == 5.0
    assert found['trivet_tokens_total{kind="prompt"}'] == 50.0
    gaps = 'trivet_inter_token_latency_seconds_bucket{le="+Inf",served="colocated",tokens="one"}'
    assert found[gaps] == left[gaps] == 10.0
    assert found["trivet_generations_running"] == 5.0
    assert found['trivet_outstanding_tokens{engine="decode-0",tier="decode"}'] == 200.0
    assert found['trivet_engine_ready{engine="decode-0",tier="decode"}'] == 1.0
    assert [name for name in found if not name.startswith("trivet_")] == []
    server = 'server="http://a:1"'
    assert found[f'trivet_render_server_requests_total{{outcome="ok",{server}}}'] == 2.0
    assert (found[f"trivet_render_server_running{{{server}}}"], found["trivet_render_waiting"]) == (5.0, 2.0)
    up = {name: value for name, value in found.items() if name.startswith("trivet_render_server_up")}
    assert set(up.values()) == {0.0, 1.0}
    assert up[f"trivet_render_server_up{{{server}}}"] == 1.0
    missed = 'trivet_render_characters_total{found="no"}'
    rendered = {name: value for name, value in found.items() if "render_tokenizer" in name or "cache_bytes" in name}
    assert rendered == {
        'trivet_render_tokenizer{name="fastokens"}': 1.0,
        'trivet_render_tokenizer{name="vllm"}': 1.0,
        "trivet_render_cache_bytes": 14.0,
    }
    assert found[missed] == left[missed] == 450.0
    assert (found["trivet_derender_hits_total"], found["trivet_derender_replays_total"]) == (10.0, 2.0)
    # of the one that was killed remains what it counted, and nothing that it had under way
    assert left[f"trivet_generations_total{{{served}}}"] == 5.0
    assert left["trivet_generations_running"] == 3.0
    assert (left[f"trivet_render_server_running{{{server}}}"], left["trivet_render_waiting"]) == (3.0, 1.0)
    assert left['trivet_render_server_up{server="http://b:1"}'] == 1.0, "the other one did not use it"
    assert left["trivet_render_cache_bytes"] == 7.0
    assert 'trivet_render_tokenizer{name="vllm"}' not in left
    assert left['trivet_outstanding_tokens{engine="decode-0",tier="decode"}'] == 100.0


# engines that have left


def test_the_series_of_an_engine_that_is_gone_are_shown_for_a_while(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr("trivet.gateway.metrics.time.monotonic", lambda: now_s)
    metrics = GatewayMetrics()
    metrics.ended(record(), OWNER)
    metrics.ended(record(decode_engine="decode-1", prefill_engine="prefill-1"), OWNER)
    metrics.ended(record(decode_engine="decode-1"), OWNER)
    before = samples(metrics)
    metrics.gone = {"decode-1": 1000.0}
    now_s += 299
    assert samples(metrics) == before
    now_s += 2
    after = samples(metrics)
    assert {name for name in before if name not in after} == {name for name in before if '"decode-1"' in name}
    assert len(after) < len(before)
    assert {name: before[name] for name in after} == after
    assert after['trivet_prefill_leg_seconds_count{engine="prefill-1"}'] == 1
    metrics.gone = {}  # it is there again
    assert samples(metrics) == before


def test_how_caches_were_known():
    metrics = GatewayMetrics()
    for known_by in ("events", "guess", "events", ""):
        metrics.ended(record(cache_known_by=known_by), None)
    counted = {name: value for name, value in samples(metrics).items() if name.startswith("trivet_cache_known")}
    assert counted == {'trivet_cache_known_total{by="events"}': 2.0, 'trivet_cache_known_total{by="guess"}': 1.0}


def test_which_engines_tell_what_they_hold():
    held = Held()
    engines = engines_of(*(EngineView(name, "mixed", "http://a", True) for name in ("a", "b")))
    held.verify(engines.all()[0], new_key(), whole=True)
    live = {name: value for name, value in samples(GatewayMetrics(held), engines).items() if "events_live" in name}
    assert live == {
        'trivet_kv_events_live{engine="a",tier="mixed"}': 1.0,
        'trivet_kv_events_live{engine="b",tier="mixed"}': 0.0,
    }
    assert not [name for name in samples(GatewayMetrics(), engines) if "events_live" in name]
