import asyncio
import json

import pytest

import trivet.journal as journal_module
from trivet.journal import GAP_BOUNDS_S, Gaps, GenerationRecord, Journal, RequestRecord, current_request, now_s


def generation(**changes) -> GenerationRecord:
    """A generation whose request arrived at 10 s."""
    return GenerationRecord(**{"generation_id": "gen-1", "prompt_tokens": 3, "rendered_s": 10.004} | changes)


def test_a_split_generation_in_plain_values():
    record = generation(
        intended_split=True,
        split=True,
        reason="a pair is ready",
        split_reason="pair_ready",
        prefill_engine="prefill-0",
        decode_engine="decode-0",
        prefill_start_s=10.005,
        prefill_end_s=10.105,
        decode_start_s=10.0,
        first_token_s=10.15,
        decode_first_s=10.15,
        end_s=11.15,
        cached_tokens=2,
        completion_tokens=20,
        finish_reason="stop",
        attempts=2,
        resumes=1,
    )
    assert record.facts(10.0) == {
        "id": "gen-1",
        "intended_split": True,
        "split": True,
        "reason": "a pair is ready",
        "split_reason": "pair_ready",
        "prefill_engine": "prefill-0",
        "decode_engine": "decode-0",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "cache_known_by": "",
        "completion_tokens": 20,
        "finish_reason": "stop",
        "error": None,
        "transfer_problem": None,
        "attempts": 2,
        "resumes": 1,
        "render_ms": 4.0,
        "prefill_ms": 100.0,
        "handover_ms": 45.0,
        "ttft_ms": 150.0,
        "decode_ms": 1000.0,
        "decode_leg_ms": 1150.0,
    }


@pytest.mark.parametrize(
    ("stamps", "missing"),
    [
        ({}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms", "decode_leg_ms"}),
        ({"prefill_start_s": 10.1}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms", "decode_leg_ms"}),
        ({"prefill_start_s": 10.1, "prefill_end_s": 10.2}, {"handover_ms", "ttft_ms", "decode_ms", "decode_leg_ms"}),
        ({"first_token_s": 10.2, "end_s": 10.3}, {"prefill_ms", "handover_ms", "decode_leg_ms"}),
        ({"decode_start_s": 10.1, "end_s": 10.3}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms"}),
        ({"end_s": 10.3}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms", "decode_leg_ms"}),
    ],
)
def test_what_was_not_reached_has_no_duration(stamps, missing):
    facts = generation(**stamps).facts(10.0)
    assert {name for name, value in facts.items() if name.endswith("_ms") and value is None} == missing


def test_a_request_in_plain_values():
    record = RequestRecord("req-1", "/v1/completions", arrived_s=10.0, status=200, generations=[generation()])
    facts = record.facts()
    assert facts == {
        "request_id": "req-1",
        "path": "/v1/completions",
        "status": 200,
        "served": None,
        "queue_ms": None,
        "generations": [generation().facts(10.0)],
    }
    assert json.loads(json.dumps(facts)) == facts
    record.queued_s, record.admitted_s = 10.001, 10.021
    assert record.facts()["queue_ms"] == 20.0


def test_the_clock_only_goes_forward():
    before = now_s()
    assert before <= RequestRecord("req-1", "/").arrived_s <= now_s()


def test_a_record_is_found_by_its_id():
    journal = Journal()
    record = journal.open("req-1", "/v1/completions")
    assert journal.find("req-1") is record
    assert journal.find("req-2") is None


def test_the_oldest_record_is_forgotten():
    journal = Journal(capacity=2)
    records = [journal.open(f"req-{number}", "/") for number in range(3)]
    assert [journal.find(f"req-{number}") for number in range(3)] == [None, records[1], records[2]]


def test_a_repeated_id_shows_its_newest_request():
    journal = Journal(capacity=2)
    journal.open("same", "/first")
    second = journal.open("same", "/second")
    assert journal.find("same") is second


def test_forgetting_the_first_of_a_repeated_id_keeps_the_newest():
    journal = Journal(capacity=2)
    journal.open("same", "/first")
    second = journal.open("same", "/second")
    journal.open("other", "/")  # the first one is forgotten now
    assert journal.find("same") is second
    journal.open("another", "/")
    assert journal.find("same") is None


async def test_each_task_works_for_its_own_request():
    async def handle(name: str) -> str:
        current_request.set(RequestRecord(name, "/"))
        await asyncio.sleep(0)
        return current_request.get().request_id

    assert await asyncio.gather(handle("a"), handle("b")) == ["a", "b"]
    assert current_request.get() is None


def test_a_record_takes_the_id_that_its_client_chose():
    journal = Journal(capacity=2)
    record = journal.open("made-up", "/")
    journal.rename(record, "chosen")
    assert record.request_id == "chosen"
    assert (journal.find("chosen"), journal.find("made-up")) == (record, None)


def test_a_record_with_another_id_is_forgotten_as_any_other():
    journal = Journal(capacity=1)
    journal.rename(journal.open("made-up", "/"), "chosen")
    last = journal.open("last", "/")
    assert [journal.find(one) for one in ("made-up", "chosen", "last")] == [None, None, last]
    assert len(journal._by_id) == 1


def test_taking_the_id_of_another_record_leaves_that_one_nameless():
    journal = Journal(capacity=2)
    journal.open("chosen", "/first")
    second = journal.open("made-up", "/second")
    journal.rename(second, "chosen")
    assert journal.find("chosen") is second
    journal.open("third", "/")  # the first one is forgotten, and nothing else with it
    assert journal.find("chosen") is second


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.s = 5.0
        monkeypatch.setattr(journal_module, "now_s", lambda: self.s)


def test_gaps_between_chunks_are_counted_by_bucket(monkeypatch):
    clock, gaps = Clock(monkeypatch), Gaps()
    for gap_s, tokens in [(3.0, 1), (0.0005, 2), (0.007, 3), (0.5, 3), (0.0075, 4), (7.0, 5)]:
        clock.s += gap_s
        gaps.note(tokens)
    assert gaps.several is None
    assert dict(zip((*GAP_BOUNDS_S, "above"), gaps.one, strict=True)) == {
        **dict.fromkeys(GAP_BOUNDS_S, 0),
        0.001: 1,
        0.008: 1,
        1.0: 1,  # a sign of life without a token is no chunk: the gap goes on
        "above": 1,
    }
    assert gaps.one_s == pytest.approx(0.0005 + 0.007 + 0.5075 + 7.0)


def test_chunks_of_several_tokens_are_told_apart(monkeypatch):
    clock, gaps = Clock(monkeypatch), Gaps()
    for gap_s, tokens in [(1.0, 4), (0.02, 7), (0.01, 8), (0.02, 10)]:
        clock.s += gap_s
        gaps.note(tokens)
    assert (sum(gaps.one), sum(gaps.several)) == (1, 2)
    assert (gaps.one_s, gaps.several_s) == (pytest.approx(0.01), pytest.approx(0.04))


def test_an_answer_that_was_begun_anew_makes_no_gap_of_what_nobody_has_seen(monkeypatch):
    clock, gaps = Clock(monkeypatch), Gaps()
    for tokens in (1, 2, 3, 1, 2):
        clock.s += 0.01
        gaps.note(tokens)
    assert (sum(gaps.one), gaps.several) == (3, None)


def test_the_first_chunk_makes_no_gap():
    gaps = Gaps()
    for tokens in (0, 0, 5, 5):
        gaps.note(tokens)
    assert (gaps.one, gaps.several) == (None, None)


def test_the_buckets_of_gaps_span_a_millisecond_to_a_second():
    assert (GAP_BOUNDS_S[0], GAP_BOUNDS_S[-1]) == (0.001, 1.0)
    assert list(GAP_BOUNDS_S) == sorted(set(GAP_BOUNDS_S))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (None, None),
        ({}, None),  # no engine was chosen yet
        (
            {"intended_split": True, "split": True, "prefill_engine": "p", "decode_engine": "d"},
            "split; reason=long_prompt; prefill=p; decode=d",
        ),
        (
            {"intended_split": True, "prefill_engine": "p", "decode_engine": "d"},
            "colocated; reason=recomputed; prefill=p; decode=d",
        ),
        ({"decode_engine": "m"}, "colocated; reason=long_prompt; decode=m"),
        ({"prefill_engine": "p"}, "colocated; reason=long_prompt; prefill=p"),
    ],
)
def test_how_a_request_is_served_in_a_line(facts, expected):
    record = RequestRecord("r", "/v1/completions")
    if facts is not None:
        record.generations = [generation(**facts, split_reason="long_prompt" if facts else ""), generation()]
    assert record.served == expected
