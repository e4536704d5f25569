"""``trivet demo`` over a gateway that is a small HTTP server: what it prints, and how it ends."""

import asyncio
import json
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest

from helpers.demo import PREFILLS_TOKEN_FACTS, SPLIT_FACTS, DemoService, at_once
from trivet.cli import demo as demo_module
from trivet.demo import run


@pytest.fixture
def demo(trivet, tmp_path, monkeypatch):
    """Runs ``trivet demo`` on a service whose attributes are set to what is given."""
    plan = SimpleNamespace(served_names=("tiny",))
    opened = []

    @contextmanager
    def open_plan(path, *, port, guarded):
        opened.append((path, port, guarded))
        yield plan

    def demo(*arguments, failed: str | None = None, up: bool = True, **changes):
        @asynccontextmanager
        async def running(given, *_):
            assert given is plan
            async with DemoService(tmp_path) as service:
                for name, value in changes.items():
                    setattr(service, name, value)
                if failed is not None:
                    service.fails(failed, "ended with exit status 1")
                yield service if up else None

        monkeypatch.setattr(demo_module, "running", running)
        return trivet("demo", *arguments)

    monkeypatch.setattr(demo_module, "open_plan", open_plan)
    monkeypatch.setattr(run, "asyncio", SimpleNamespace(sleep=at_once))
    demo.opened = opened
    return demo


def told(out: str) -> list[list[str]]:
    """The table's rows, by their columns."""
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("leg "))
    return [line.split() for line in lines[start : start + 7]]


def test_a_demo_shows_the_answer_and_where_its_time_went(demo):
    done = demo()
    assert (done.status, done.err) == (0, "")
    assert demo.opened == [(None, 0, False)]
    assert "The [legs]\n" in done.out
    assert told(done.out) == [
        ["leg", "where", "ms", "tokens", "KV", "moved"],
        ["render", "gateway", "1.5", "30"],
        ["prefill", "prefill-0", "20.0", "30"],
        ["handover", "prefill-0", "->", "decode-0", "(NixlConnector)", "3.0", "1", "computed", "again", "0.0", "MB"],
        ["to", "first", "token", "from", "decode-0", "25.0", "1"],
        ["decode", "decode-0", "(4", "ms", "a", "token)", "8.0", "3"],
        ["to", "last", "token", "33.0", "3"],
    ]
    assert "went out before the handover" not in done.out
    assert "3 greedy tokens, split and colocated: equal. Colocated on mixed-0, the first token took 40 ms." in done.out


def test_a_first_token_of_prefills_stands_before_the_handover(demo):
    done = demo(facts=PREFILLS_TOKEN_FACTS)
    assert [line[:3] for line in told(done.out)[2:5]] == [
        ["prefill", "prefill-0", "20.0"],
        ["to", "first", "token"],
        ["handover", "prefill-0", "->"],
    ]
    assert told(done.out)[3:] == [
        ["to", "first", "token", "from", "prefill-0", "21.6", "1"],
        ["handover", "prefill-0", "->", "decode-0", "(NixlConnector)", "3.0", "1", "computed", "again", "0.0", "MB"],
        ["decode", "decode-0", "(5", "ms", "a", "token)", "5.0", "2"],
        ["to", "last", "token", "29.6", "3"],
    ]
    assert "The first token was prefill-0's and went out before the handover, behind which decode-0" in done.out


def test_what_stands_above_a_sum_adds_up_to_it(demo):
    for facts in (PREFILLS_TOKEN_FACTS, SPLIT_FACTS | {"ttft_ms": 24.5}):
        rows = [(row[:3], float(next(word for word in row if "." in word))) for row in told(demo(facts=facts).out)[1:]]
        sums = {name[1]: (number, time_ms) for number, (name, time_ms) in enumerate(rows) if name[0] == "to"}
        for number, time_ms in sums.values():
            parts = [part_ms for name, part_ms in rows[:number] if name[0] != "to"]
            assert sum(parts) == pytest.approx(time_ms, abs=0.2)


def test_an_answer_of_one_token_would_show_no_handover(demo):
    assert demo("--max-tokens", "1").status == 2
    assert demo.opened == []


def test_the_moved_kv_is_told_in_megabytes(demo):
    assert told(demo(bytes_moved=12_340_000).out)[3][-2:] == ["12.3", "MB"]


def test_a_prompt_of_ones_own_is_asked_and_shown(demo):
    done = demo("--prompt", "Is this [it]?", "--max-tokens", "5")
    assert done.status == 0
    assert "\nIs this [it]?\n" in done.out


FAULTS = {
    "not equal": (
        {"colocated": [("A", 5), (" trivet", 9)]},
        "the split answer is not the colocated one",
        "'A trivet'",
    ),
    "no KV": ({"bytes_moved": 0}, "no KV moved from prefill to decode", "'The [legs]'"),
    "computed again": ({"computed": 30}, "decode computed 30 prompt tokens itself", "'The [legs]'"),
}


@pytest.mark.parametrize(("changes", "fault", "colocated"), FAULTS.values(), ids=FAULTS)
def test_a_demo_that_shows_a_fault_fails_with_a_line_for_it(demo, tmp_path, changes, fault, colocated):
    done = demo("--json", tmp_path / "facts.json", **changes)
    assert done.status == 1
    assert done.err.splitlines() == [
        "split:     'The [legs]'",
        f"colocated: {colocated}",
        f"trivet: {fault} -> this should never be: please report it with the logs",
    ]
    assert told(done.out)[0][0] == "leg"
    assert json.loads((tmp_path / "facts.json").read_text())["answer"] == "The [legs]", (
        "the facts are there for a report"
    )


def test_answers_that_differ_are_called_not_equal(demo):
    assert "split and colocated: NOT equal." in demo(colocated=[("A", 5)]).out


def test_the_facts_can_be_written_to_a_file(demo, tmp_path):
    assert demo("--json", tmp_path / "facts.json").status == 0
    facts = json.loads((tmp_path / "facts.json").read_text())
    names = ("model", "kv_bytes_moved", "decode_computed_prompt_tokens", "equal_to_colocated", "ttft_ms")
    assert [facts[name] for name in names] == ["tiny", 4096, 1, True, 25.0]


def test_a_file_that_could_not_be_written_is_told_before_anything_is_started(demo, tmp_path):
    done = demo("--json", tmp_path / "none" / "facts.json")
    assert (done.status, done.out, demo.opened) == (1, "", [])
    assert done.err == f"trivet: {tmp_path}/none/facts.json: there is no folder {tmp_path}/none -> make it first\n"


def test_an_engine_that_fails_is_told_with_the_end_of_its_log(demo):
    done = demo(failed="decode-0", status=502)
    assert done.status == 1
    assert done.err.splitlines() == [
        "the words of decode-0",
        "trivet: engine decode-0 ended with exit status 1: the gateway answered HTTP 502: the gateway says no",
    ]


def test_a_gateway_that_fails_is_told_with_the_end_of_its_log(demo):
    done = demo(status=500)
    assert done.status == 1
    assert done.err.splitlines() == [
        "the gateway's words",
        "trivet: the gateway answered HTTP 500: the gateway says no",
    ]


def test_a_demo_that_is_stopped_before_it_is_up_says_so(demo):
    done = demo(up=False)
    assert (done.status, done.last_word) == (1, "trivet: stopped before it was up")


def test_a_demo_that_is_stopped_says_so(demo, monkeypatch):
    @asynccontextmanager
    async def stop_signals():
        stop = asyncio.Event()
        stop.set()
        yield stop

    monkeypatch.setattr(demo_module, "stop_signals", stop_signals)
    done = demo()
    assert (done.status, done.last_word) == (1, "trivet: stopped")
    assert "leg " not in done.out
