"""One canary through one simulated pair: every fault has its verdict, and load has none."""

import asyncio
import contextlib
import dataclasses

import pytest

from helpers.processes import holds
from helpers.stack import MODEL, QUICK, answer_of, stack, token_request
from trivet.check.canary import (
    NEAR_TIE,
    Answer,
    Canaries,
    Failure,
    Pair,
    Verdict,
    Vocabulary,
    blind_finding,
    findings,
    first_difference,
    judge,
)
from trivet.check.verdict import Level
from trivet.connectors import CONNECTORS
from trivet.render.contract import TokenLogprobs
from trivet.sim import Fault

CONNECTOR = pytest.mark.parametrize("connector", sorted(CONNECTORS))
SIDE_CHANNEL = {"NixlConnector": "/sim/kv/pull", "TrivetConnector": "/sim/kv/open"}
WORDS = Vocabulary.of(QUICK.vocab_size)


def kv_bytes(tokens: int) -> int:
    """Of whole blocks."""
    return -(-tokens // QUICK.block_size) * QUICK.block_size * QUICK.kv_bytes_per_token


class Sent:
    """A simulated pair, and canaries through it."""

    def __init__(self, built, connector: str, priority: int = 0):
        self.stack, self.connector = built, CONNECTORS[connector]
        self.prefill, self.decode = built.sim("prefill-0"), built.sim("decode-0")
        self.canaries = Canaries(built.legs.session, self.connector, MODEL, priority=priority)
        self._number = 0

    async def ask(self, tokens: int = 40, *, limit_s: float = 10.0, **more):
        self._number += 1
        mixed = next((sim.view() for sim in self.stack.sims if sim.tier == "mixed"), None)
        pair = Pair.of(self.connector, self.prefill.view(), self.decode.view(), mixed)
        return await self.canaries.ask(pair, WORDS.prompt(tokens, self._number), limit_s=limit_s, **more)


@contextlib.asynccontextmanager
async def pair(connector: str, *more: str, **settings):
    async with stack(
        "prefill", "decode", *more, settings=dataclasses.replace(QUICK, kv_connector=connector, **settings)
    ) as built:
        sent = Sent(built, connector)
        yield sent
        await sent.canaries.close()
        for sim in built.sims:
            sim.faults.clear()
        await built.at_rest()
        assert built.records == [], "canaries are nobody's generations"


def levels(outcome) -> dict[str, Level]:
    return {one.name: one.level for one in findings(outcome)}


# prompts


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 40, 5000])
def test_a_prompt_is_a_passage_that_begins_again(tokens):
    prompt = WORDS.prompt(tokens, "a")
    period = -(-2 * tokens // 3)
    assert len(prompt) == tokens
    assert prompt[period:] == prompt[: tokens - period]
    assert prompt == WORDS.prompt(tokens, "a")
    assert tokens < 3 or prompt != WORDS.prompt(tokens, "b")


@pytest.mark.parametrize("size", [2, 100, 512, 32000, 128256])
def test_ids_are_of_the_vocabulary_and_away_from_its_ends(size):
    words = Vocabulary.of(size)
    ids = set(words.prompt(2000, 1))
    assert 0 <= min(ids) <= max(ids) < size
    if size >= 512:
        assert min(ids) >= size // 2 or min(ids) >= 1000
        assert max(ids) < size - size // 10


def test_special_ids_are_never_taken():
    words = Vocabulary(10, 14, special=frozenset({11, 12}))
    assert set(words.prompt(200, 1)) == {10, 13}


# verdicts


@CONNECTOR
@pytest.mark.parametrize("tokens", [5, 16, 64, 700])
@pytest.mark.parametrize("old", [False, True])
async def test_a_good_pair_passes_every_line(connector, tokens, old):
    more = {"vllm_version": "0.30.0"} if old else {}
    async with pair(connector, max_num_batched_tokens=256, **more) as sent:
        for _ in range(2):
            outcome = await sent.ask(tokens, kv_bytes_expected=kv_bytes(tokens), freed_within_s=5)
            assert outcome.verdict is Verdict.GOOD
            assert set(levels(outcome).values()) == {Level.PASS}, findings(outcome)
            assert set(levels(outcome)) == {"canary-error", "wrong-tokens", "recompute", "bytes", "handover", "freed"}
        assert (outcome.computed_by, outcome.was_alone, outcome.was_idle) == ("usage", True, True)
        assert outcome.kv_bytes == kv_bytes(tokens)
        assert len(outcome.split.tokens) == 8
        assert outcome.split.tokens == outcome.colocated.tokens
        assert sent.decode.state().handovers["pulled"] == 2
        assert sent.prefill.state().handovers["expired"] == 0


@CONNECTOR
@pytest.mark.parametrize(
    ("fault", "verdict", "finding"),
    [
        (Fault("corrupt", leg="decode", uses=None), Verdict.WRONG_TOKENS, "wrong-tokens"),
        (Fault("corrupt", leg="decode", uses=1), Verdict.WRONG_TOKENS, "wrong-tokens"),
        (Fault("waver", leg="decode", rank=9, uses=None), Verdict.WRONG_TOKENS, "wrong-tokens"),
        (Fault("uncounted", leg="decode"), Verdict.BYTES, "bytes"),
        (Fault("status", leg="decode", status=500), Verdict.CANARY_ERROR, "canary-error"),
        (Fault("finish", leg="decode", reason="error"), Verdict.CANARY_ERROR, "canary-error"),
        (Fault("garbage", leg="decode"), Verdict.CANARY_ERROR, "canary-error"),
        (Fault("disconnect", leg="decode", uses=None), Verdict.CANARY_ERROR, "canary-error"),
    ],
    ids=["corrupt", "corrupt once", "unlikely", "uncounted", "500", "error", "garbage", "cut off"],
)
async def test_faults_of_decode(connector, fault, verdict, finding):
    async with pair(connector, kv_lease_s=0.5) as sent:
        sent.decode.faults.add(fault)
        outcome = await sent.ask()
        assert outcome.verdict is verdict
        assert outcome.verdict.is_bad
        assert levels(outcome)[finding] is Level.FAIL
        assert outcome.told
        sent.decode.faults.clear()
        assert (await sent.ask()).verdict is Verdict.GOOD


@CONNECTOR
async def test_a_prefill_engine_that_fails_is_an_error_in_its_words(connector):
    async with pair(connector) as sent:
        sent.prefill.faults.add(Fault("status", leg="prefill", status=500))
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.CANARY_ERROR
        assert "prefill-0: simulated fault: HTTP 500" in outcome.told


@pytest.mark.parametrize("old", [False, True])
async def test_a_decode_engine_that_computes_anew_what_did_not_come(old):
    """``kv_load_failure_policy: recompute``: tokens are right, and no error says anything."""
    more = {"vllm_version": "0.30.0"} if old else {}
    async with pair("NixlConnector", kv_load_failure_policy="recompute", kv_lease_s=0.5, **more) as sent:
        sent.decode.faults.add(Fault("lose", leg="decode"))
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.RECOMPUTE
        assert (outcome.computed_tokens, outcome.computed_by) == (40, "usage")
        assert levels(outcome)["wrong-tokens"] is Level.PASS


@CONNECTOR
async def test_a_prefill_engine_that_hands_nothing_over(connector):
    async with pair(connector) as sent:
        sent.prefill.faults.add(Fault("withhold", leg="prefill"))
        outcome = await sent.ask()
        assert outcome.verdict in (Verdict.RECOMPUTE, Verdict.CANARY_ERROR)  # where prefill's token is lost, an error


@CONNECTOR
async def test_without_usage_the_counters_tell_if_nobody_else_asks(connector):
    async with pair(connector, enable_prompt_tokens_details=False) as sent:
        outcome = await sent.ask()
        assert (outcome.verdict, outcome.computed_tokens, outcome.computed_by) == (Verdict.GOOD, 0, "counters")
    recompute = {"kv_load_failure_policy": "recompute", "kv_lease_s": 0.5}
    async with pair("NixlConnector", enable_prompt_tokens_details=False, **recompute) as sent:
        sent.decode.faults.add(Fault("lose", leg="decode"))
        assert (await sent.ask()).verdict is Verdict.RECOMPUTE


async def test_fewer_bytes_than_there_must_be_are_missing():
    async with pair("NixlConnector") as sent:
        outcome = await sent.ask(kv_bytes_expected=kv_bytes(40) + 1)
        assert outcome.verdict is Verdict.BYTES
        outcome = await sent.ask(kv_bytes_expected=kv_bytes(40) - 1)
        assert outcome.verdict is Verdict.GOOD
        assert levels(outcome)["bytes"] is Level.WARN


@CONNECTOR
async def test_a_near_tie_is_not_held_against_a_pair(connector):
    async with pair(connector) as sent:
        sent.decode.faults.add(Fault("waver", leg="decode", uses=None))
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.GOOD
        assert outcome.difference.gap == pytest.approx(0.5)
        assert levels(outcome)["wrong-tokens"] is Level.WARN


async def test_an_engine_that_tells_no_logprobs_is_judged_by_asking_again():
    async with pair("NixlConnector", max_logprobs=0) as sent:
        sent.decode.faults.add(Fault("corrupt", leg="decode", uses=None))
        assert (await sent.ask()).verdict is Verdict.WRONG_TOKENS
        sent.decode.faults.clear()
        sent.decode.faults.add(Fault("waver", leg="decode", uses=1))
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.GOOD
        assert outcome.difference is not None


@CONNECTOR
async def test_kv_that_never_comes_is_told_from_engines_that_are_slow(connector):
    async with pair(connector) as sent:
        sim = sent.prefill
        sim.faults.add(Fault("hang", path=SIDE_CHANNEL[connector], uses=None))
        outcome = await sent.ask(limit_s=1.0)
        assert outcome.verdict is Verdict.SILENT
        assert outcome.split.stage == "handover"
        assert levels(outcome)["handover"] is Level.FAIL
    async with pair(connector, step_ms=400) as sent:
        outcome = await sent.ask(limit_s=1.0)
        assert outcome.verdict is Verdict.SLOW
        assert levels(outcome)["handover"] is Level.WARN


@CONNECTOR
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_full_engine_is_no_verdict(connector, status, leg):
    async with pair(connector) as sent:
        sim = sent.prefill if leg == "prefill" else sent.decode
        sim.faults.add(Fault("status", leg=leg, status=status, uses=None))
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.SLOW
        assert not outcome.verdict.is_bad


async def test_a_canary_that_every_engine_refuses_is_no_verdict():
    async with pair("NixlConnector") as sent:
        sent.canaries = Canaries(sent.stack.legs.session, sent.connector, "another-model")
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.UNJUDGED
        assert "another-model" in outcome.told


async def test_a_pair_without_a_colocated_answer_is_no_verdict():
    async with pair("NixlConnector") as sent:
        sent.decode.faults.add(Fault("status", leg="decode", status=500, nth=2, uses=None))
        outcome = await sent.ask()
        assert outcome.verdict is Verdict.UNJUDGED
        assert isinstance(outcome.colocated, Failure)


@CONNECTOR
async def test_load_disturbs_no_verdict(connector):
    """Other requests compute, move KV and count at both engines while canaries go through."""
    times = {"step_ms": 2, "prefill_ms_per_token": 0.02, "transfer_ms_per_token": 0.01}
    async with stack(
        "prefill", "decode", settings=dataclasses.replace(QUICK, kv_connector=connector, **times)
    ) as built:
        sent, over = Sent(built, connector), asyncio.Event()

        async def load(number: int) -> None:
            while not over.is_set():
                await answer_of(built, token_request(20, 300, start=300 + number))

        loads = [asyncio.create_task(load(number)) for number in range(12)]
        outcomes = [await sent.ask(kv_bytes_expected=kv_bytes(40), limit_s=20) for _ in range(6)]
        over.set()
        await asyncio.gather(*loads)
        assert [one.verdict for one in outcomes] == [Verdict.GOOD] * 6
        assert not all(one.was_alone for one in outcomes), "there was no load"
        assert all(one.computed_by == "usage" for one in outcomes)
        await sent.canaries.close()
        await built.at_rest()


@CONNECTOR
async def test_recomputing_is_seen_under_load(connector):
    times = {"step_ms": 2, "kv_load_failure_policy": "recompute", "kv_lease_s": 1.0}
    settings = dataclasses.replace(QUICK, kv_connector=connector, **times)
    async with stack("prefill", "decode", settings=settings) as built:
        sent = Sent(built, connector)
        loads = [asyncio.create_task(answer_of(built, token_request(150, 300))) for _ in range(6)]
        await asyncio.sleep(0)
        at = sent.prefill if connector == "TrivetConnector" else sent.decode
        leg, tokens = ("prefill", 1) if connector == "TrivetConnector" else ("decode", 0)
        at.faults.add(Fault("lose", leg=leg, after_tokens=tokens, uses=None))
        outcome = await sent.ask(limit_s=20)
        at.faults.clear()
        assert outcome.verdict is Verdict.RECOMPUTE
        await asyncio.gather(*loads)
        await sent.canaries.close()
        await built.at_rest()


async def test_memory_that_is_not_freed_is_told():
    """A pull that failed leaves what prefill holds to its lease."""
    async with pair("NixlConnector", kv_load_failure_policy="recompute", kv_lease_s=3.0) as sent:
        sent.decode.faults.add(Fault("lose", leg="decode"))
        outcome = await sent.ask(freed_within_s=0.6)
        assert outcome.freed_s[0] is None
        assert outcome.freed_s[1] is not None
        assert levels(outcome)["freed"] is Level.FAIL


async def test_memory_that_others_use_says_nothing():
    async with pair("NixlConnector", step_ms=5) as sent:
        begun = asyncio.create_task(answer_of(sent.stack, token_request(300, 600)))
        await holds(lambda: sent.decode.scheduler.running)
        outcome = await sent.ask(freed_within_s=0.6)
        assert outcome.verdict is Verdict.GOOD
        assert levels(outcome)["freed"] is Level.WARN
        await begun
        sent.stack.records.clear()


async def test_the_reference_may_be_a_mixed_engine():
    built_with = CONNECTORS["NixlConnector"]
    none = Pair.of(_NeverWhole(), "p", "d")
    assert none is None
    async with pair("NixlConnector", "mixed") as sent:
        views = [sim.view() for sim in sent.stack.sims]
        asked = Pair.of(_NeverWhole(), *views)
        assert asked.reference.name == "mixed-0"
        assert Pair.of(built_with, *views).reference.name == "decode-0"
        outcome = await sent.canaries.ask(asked, WORDS.prompt(40, 1), limit_s=10)
        assert outcome.verdict is Verdict.GOOD
        assert outcome.reference_engine == "mixed-0"
        assert sent.stack.sim("mixed-0").state().executions != {}


class _NeverWhole:
    decode_serves_whole = False


async def test_every_ask_has_a_salt_of_its_own_and_the_split_one_goes_first():
    async with pair("NixlConnector") as sent:
        await sent.ask()
        bodies = [one.body for sim in (sent.prefill, sent.decode) for one in sim.state().requests]
        salts = [one["cache_salt"] for one in bodies]
        assert len(set(salts)) == 2, "both legs have one, the colocated answer another"
        assert sent.decode.state().legs() == ["decode", "decode"]
        first = sent.decode.state().requests[0]
        assert first.split == "pulled"


async def test_canaries_say_their_priority_only_where_they_were_told_one():
    async with pair("NixlConnector") as sent:
        await sent.ask()
        sent.canaries = Canaries(sent.stack.legs.session, sent.connector, MODEL, priority=1000)
        await sent.ask()
        said = [one.body.get("priority") for one in sent.decode.state().requests]
        assert said == [None, None, 1000, 1000]


async def test_canaries_say_nothing_in_the_log(caplog):
    async with pair("NixlConnector") as sent:
        with caplog.at_level("INFO"):
            await sent.ask()
            sent.decode.faults.add(Fault("status", leg="decode", status=500))
            await sent.ask()
        assert [one for one in caplog.records if one.name.startswith("trivet.legs")] == []


# answers that do not depend on the prompt


async def test_a_model_that_answers_alike_whatever_it_is_asked_is_blind():
    async with pair("NixlConnector") as sent:
        seeing = [await sent.ask() for _ in range(2)]
        assert blind_finding("decode-0", seeing) is None
        for sim in (sent.prefill, sent.decode):
            sim.faults.add(Fault("dull", uses=None))
        blind = [await sent.ask() for _ in range(2)]
        assert [one.verdict for one in blind] == [Verdict.GOOD] * 2
        finding = blind_finding("decode-0", blind)
        assert (finding.name, finding.level) == ("canary-blind", Level.WARN)
        assert blind_finding("decode-0", blind[:1]) is None
        assert blind_finding("decode-0", [blind[0], blind[0]]) is None, "the same prompt"


# judging by log-probabilities


def reference(*places: tuple[int, dict[int, float]]) -> Answer:
    told = [TokenLogprobs(list(others), list(others.values()), 1) for _, others in places]
    return Answer(tuple(token for token, _ in places), 0.1, 0.1, logprobs=tuple(told))


SHARP = reference((5, {5: -0.1, 6: -3.0}), (7, {7: -0.7, 8: -0.9}))


@pytest.mark.parametrize(
    ("splits", "control", "wrong"),
    [
        ([(5, 7), (5, 7)], (5, 7), None),
        ([(6, 1), (5, 7)], (5, 7), True),
        ([(6, 1), (6, 1)], (6, 2), False),
        ([(9, 1), (5, 7)], (5, 7), True),
        ([(5, 8), (5, 8)], (5, 7), False),
        ([(5, 8), (6, 7)], (5, 7), True),
        ([(5,), (5, 7)], (5, 7), True),
        ([(6, 1)], None, True),
        ([(5, 9), (5, 7)], (5, 1), False),
        ([(6, 9), (5, 7)], (5, 1), True),
    ],
)
def test_what_is_held_against_a_split_answer(splits, control, wrong):
    found = judge(splits, SHARP, control)
    assert (None if found is None else found.is_wrong) == wrong


def test_the_bound_itself_is_a_near_tie():
    on = reference((5, {5: 0.0, 6: -NEAR_TIE}))
    beyond = reference((5, {5: 0.0, 6: -NEAR_TIE - 0.01}))
    assert not judge([(6,)], on, None).is_wrong
    assert judge([(6,)], beyond, None).is_wrong


def test_places_where_answers_part():
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1,), (1, 3)) == 1
    assert first_difference((), ()) is None
