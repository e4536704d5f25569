import asyncio
import json

import pytest

from trivet.journal import GenerationRecord, Journal, RequestRecord, current_request, now_s


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
    }


@pytest.mark.parametrize(
    ("stamps", "missing"),
    [
        ({}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms"}),
        ({"prefill_start_s": 10.1}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms"}),
        ({"prefill_start_s": 10.1, "prefill_end_s": 10.2}, {"handover_ms", "ttft_ms", "decode_ms"}),
        ({"first_token_s": 10.2, "end_s": 10.3}, {"prefill_ms", "handover_ms"}),
        ({"end_s": 10.3}, {"prefill_ms", "handover_ms", "ttft_ms", "decode_ms"}),
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
        "generations": [generation().facts(10.0)],
    }
    assert json.loads(json.dumps(facts)) == facts


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
