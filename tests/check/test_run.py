"""A whole check over simulated pairs: what each fault comes to, and what is made of many canaries."""

import dataclasses
import json

import pytest

from helpers.stack import MODEL, QUICK, stack
from trivet.check.canary import Answer, Failure, Outcome
from trivet.check.run import Wish, check, measured, merged
from trivet.check.verdict import Level
from trivet.connectors import CONNECTORS
from trivet.sim import Fault

CONNECTOR = pytest.mark.parametrize("connector", sorted(CONNECTORS))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}
BYTES_PER_TOKEN = 2 * 1 * 8 * 2 * 2


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


async def checked(connector: str, model: str | None, *tiers: str, faults=(), wish: Wish | None = None, **settings):
    """The report on simulated engines of which one at least is told to fail."""
    settings = {"kv_connector": connector, "kv_bytes_per_token": BYTES_PER_TOKEN, **settings}
    said = []
    async with stack(*(tiers or ("prefill", "decode")), settings=dataclasses.replace(QUICK, **settings)) as built:
        for name, fault in faults:
            built.sim(name).faults.add(fault)
        report = await check(
            [sim.view() for sim in built.sims],
            CONNECTORS[connector],
            MODEL,
            model_path=model,
            wish=wish or Wish(limit_s=5.0),
            say=said.append,
        )
        for sim in built.sims:
            sim.faults.clear()
        await built.at_rest()
    assert said
    json.dumps(report.facts())
    return report


def level(report, name: str, about: str = "prefill-0 -> decode-0") -> Level:
    (found,) = [one for one in report.findings if (one.name, one.about) == (name, about)]
    return found.level


CANARY = ("canary-error", "wrong-tokens", "recompute", "bytes", "handover", "freed")


@CONNECTOR
async def test_a_good_pair_passes_its_canaries_and_tells_what_a_handover_takes(connector, model):
    report = await checked(connector, model, wish=Wish(prompt_tokens=(500, 1000)), transfer_ms_per_token=0.02)
    assert {level(report, name) for name in CANARY} == {Level.PASS}
    assert level(report, "arithmetic", "") is Level.PASS
    assert report.kv.bytes_per_token == BYTES_PER_TOKEN
    facts = report.facts()["pairs"]["prefill-0 -> decode-0"]
    assert [one["prompt_tokens"] for one in facts["predictions"]] == [500, 1000]
    lengths = {one["prompt_tokens"] for one in facts["canaries"]}
    block = QUICK.block_size
    assert min(lengths) < block
    assert 4 * block in lengths, "whole blocks"
    assert max(lengths) >= 1000
    assert all(one["kv_bytes"] == one["kv_bytes_expected"] for one in facts["canaries"])
    overlaps = CONNECTORS[connector].legs_start_together
    assert (facts["handover"]["gb_per_s"] is None) is overlaps, "KV that moves meanwhile tells nothing of the link"


@CONNECTOR
async def test_an_engine_that_tells_little_is_a_warning_and_no_more(connector, model):
    report = await checked(connector, model)
    unknown = {one.name for one in report.findings if one.level is Level.WARN and "not told" in one.said}
    assert {"dtype", "model", "tensor-parallel"} <= unknown
    assert report.level is Level.WARN
    assert level(report, "block-size") is Level.PASS, "its metrics say so"


@CONNECTOR
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (Fault("corrupt", leg="decode", uses=None), "wrong-tokens"),
        (Fault("uncounted", leg="decode", uses=None), "bytes"),
        (Fault("status", leg="decode", status=500, uses=None), "canary-error"),
    ],
    ids=lambda one: getattr(one, "kind", one),
)
async def test_each_fault_is_a_failure_by_its_name(connector, model, fault, name):
    report = await checked(connector, model, faults=[("decode-0", fault)])
    assert level(report, name) is Level.FAIL
    assert report.level is Level.FAIL


@CONNECTOR
async def test_one_bad_canary_of_many_is_told_as_one_of_many(connector, model):
    report = await checked(connector, model, faults=[("decode-0", Fault("uncounted", leg="decode", nth=5))])
    (found,) = [one for one in report.findings if one.name == "bytes"]
    assert found.level is Level.FAIL
    assert "(1 of 13 canaries)" in found.said


@CONNECTOR
async def test_a_bad_pair_keeps_no_other_from_being_checked(connector, model):
    fault = Fault("status", leg="decode", status=500, uses=None)
    report = await checked(connector, model, "prefill", "decode", "decode", faults=[("decode-0", fault)])
    assert level(report, "canary-error") is Level.FAIL
    assert level(report, "canary-error", "prefill-0 -> decode-1") is Level.PASS
    assert set(report.outcomes) == {"prefill-0 -> decode-0", "prefill-0 -> decode-1"}


async def test_an_engine_that_is_not_there_is_told_and_its_pairs_are_left_out(model):
    async with stack("prefill", "decode", settings=dataclasses.replace(QUICK, kv_connector="NixlConnector")) as built:
        views = [sim.view() for sim in built.sims]
        views[1] = dataclasses.replace(views[1], url="http://127.0.0.1:1")
        report = await check(views, CONNECTORS["NixlConnector"], MODEL, model_path=model, wish=Wish())
    assert level(report, "engine", "decode-0") is Level.FAIL
    assert report.outcomes == {}


async def test_a_config_that_cannot_be_read_leaves_bytes_to_what_came(tmp_path):
    report = await checked("NixlConnector", str(tmp_path / "nowhere"))
    assert level(report, "arithmetic", "") is Level.WARN
    assert level(report, "bytes") is Level.PASS
    assert report.facts()["kv"] is None


async def test_a_slow_link_should_not_be_split_over(model):
    report = await checked("NixlConnector", model, wish=Wish((1000,), link_gbps=25.0), transfer_ms_per_token=1.0)
    assert level(report, "split-pays") is not Level.PASS
    assert level(report, "link-speed") is Level.WARN


@pytest.mark.parametrize("tokens", [1, 8, 17, 60])
async def test_a_short_model_is_asked_no_more_than_it_takes(model, tokens):
    report = await checked("NixlConnector", model, max_model_len=tokens + 9)
    asked = [one.prompt_tokens for one in report.outcomes["prefill-0 -> decode-0"]]
    assert max(asked) <= tokens
    assert level(report, "canary-error") is Level.PASS


# what is made of many canaries


def outcome(tokens: int, handover_s: float = 0.1, **more) -> Outcome:
    split = Answer((1, 2), 0.3, 0.4, prefill_s=0.2, handover_s=handover_s, decode_cached_tokens=tokens)
    alone = Answer((1, 2), 0.25, 0.4)
    told = {"computed_tokens": 0, "computed_by": "usage", "kv_bytes": 8, "kv_bytes_expected": 8, "was_alone": True}
    return Outcome("p -> d", "d", tuple(range(tokens)), split, alone, **{**told, **more})


def test_of_equal_findings_the_longest_prompt_speaks():
    (said,) = [one.said for one in merged([outcome(5), outcome(40), outcome(9)]) if one.name == "recompute"]
    assert said == "decode computed 0 of 40 prompt tokens (by its usage) (as of 5, 9 tokens; 3 canaries)"


def test_the_worst_of_them_is_the_finding():
    found = {one.name: one for one in merged([outcome(5, kv_bytes=1), outcome(40), outcome(9, computed_tokens=9)])}
    assert (found["bytes"].level, found["recompute"].level) == (Level.FAIL, Level.FAIL)
    assert "1 of 8 bytes" in found["bytes"].said.replace(",", "")
    assert "9 of 9" in found["recompute"].said


def test_times_of_a_cold_pair_and_of_what_was_not_handed_over_do_not_count():
    cold = [outcome(10, 9.0), outcome(20, 9.0), outcome(10, 9.0), outcome(20, 9.0)]
    late = Outcome("p -> d", "d", (1,), Failure("late", is_late=True), None)
    handovers, prefill, colocated = measured(
        [*cold, outcome(20, 0.1), outcome(20, 0.2), outcome(90, 5.0, computed_tokens=90), outcome(40, 0.3), late]
    )
    assert handovers == {20: [0.1, 0.2], 40: [0.3]}
    assert prefill == {20: [0.2, 0.2], 40: [0.2]}
    assert set(colocated) == {20, 40, 90}
