"""The standing guard over simulated pairs: who leaves, who stays, who comes back, and what clients see of it."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time

import pytest

from helpers.boards import board_of
from helpers.processes import holds
from helpers.stack import MODEL, QUICK, Stack, answer_of, stack, token_request
from trivet.check.canary import Canaries
from trivet.connectors import CONNECTORS
from trivet.gateway import guard as guard_module
from trivet.gateway.guard import Guard, GuardConfig
from trivet.gateway.readiness import remarks, why_not_ready
from trivet.legs import life as life_module
from trivet.legs.wire import open_session
from trivet.routing.choose import bad_pairs
from trivet.routing.proofs import Proof
from trivet.sim import Fault

CONNECTOR = pytest.mark.parametrize("connector", sorted(CONNECTORS))
SIDE_CHANNEL = {"NixlConnector": "/sim/kv/pull", "TrivetConnector": "/sim/kv/open"}
NEVER_S = 3600.0
"""A timer that does not end within a test."""
WORDS = {"vocab_size": QUICK.vocab_size, "prompt_tokens": 40}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The guard's own times, a tenth and less of what they are."""
    for name, value in {
        "_POLL_S": 0.02,
        "_SPACING_S": 0.0,
        "_AGAIN_S": 0.05,
        "_SLOW_AGAIN_S": 0.1,
        "_BACKOFF_S": (0.1, 0.2),
        "_NOTICE_S": 0.3,
    }.items():
        monkeypatch.setattr(guard_module, name, value)


class Guarded:
    """A stack whose pairs are watched."""

    def __init__(self, built: Stack, **settings):
        limit_s = settings.pop("limit_s", 5.0)
        self.stack = built
        self.counted: list[str] = []
        config = GuardConfig(MODEL, **{"every_s": NEVER_S, **WORDS, **settings})
        connector = built.legs._connector
        self.guard = Guard(config, built.engines, built.legs.session, connector, self.counted.append, limit_s=limit_s)
        built.troubled = self.guard.troubled

    def proof(self, prefill: str = "prefill-0", decode: str = "decode-0") -> Proof:
        views = {view.name: view for view in self.stack.engines.all()}
        return self.stack.engines.proof(views[prefill], views[decode])

    def proofs(self) -> dict[str, Proof]:
        ready = self.stack.engines.ready
        return {
            f"{one.name[-1]}{other.name[-1]}": self.proof(one.name, other.name)
            for one in ready("prefill")
            for other in ready("decode")
        }

    async def all_are(self, proof: Proof) -> None:
        await holds(lambda: set(self.proofs().values()) == {proof})

    async def asked(self, count: int, **more) -> list:
        """Records of requests that were served, and answered right."""
        self.stack.records.clear()
        for number in range(count):
            request = token_request(6, 60, start=400 + 100 * number, **more)
            assert len(await answer_of(self.stack, request)) == 6
        return list(self.stack.records)

    def metric(self) -> dict[str, float]:
        text = self.stack.metrics.text(self.stack.engines, self.stack.gateway().gauges()).decode()
        lines = [line for line in text.splitlines() if line.startswith("trivet_pair_good{")]
        return {line.split("}")[0].partition("{")[2]: float(line.split()[-1]) for line in lines}


@contextlib.asynccontextmanager
async def guarded(*tiers: str, connector="NixlConnector", watching=True, settings=QUICK, lease_s: float = 1.0, **more):
    """Pairs that are watched; what a failed transfer leaves at prefill is free after a second."""
    sims = dataclasses.replace(settings, kv_connector=connector, kv_lease_s=lease_s)
    async with stack(*tiers, settings=sims) as built:
        one = Guarded(built, **more)
        if watching:
            async with one.guard.watching():
                yield one
        else:
            yield one
        for sim in built.sims:
            sim.faults.clear()
        await built.at_rest()


PAIR = ("prefill", "decode")
FOUR = ("prefill", "prefill", "decode", "decode")


# what is looked at, and when


@CONNECTOR
async def test_every_pair_is_proven_at_the_start_and_serves_before(connector):
    async with guarded(*FOUR, connector=connector, watching=False) as one:
        one.guard._follow_fleet(time.monotonic())
        assert set(one.proofs().values()) == {Proof.OPEN}
        assert all(record.split for record in await one.asked(4))
        async with one.guard.watching():
            await one.all_are(Proof.GOOD)
        assert one.counted == ["good"] * 4
        assert set(one.metric().values()) == {1.0}
        assert len(one.metric()) == 4


async def test_canaries_are_in_nobodys_figures():
    async with guarded(*PAIR, every_s=0.05) as one:
        await holds(lambda: one.counted.count("good") > 5)
        built = one.stack
        assert built.records == []
        text = built.metrics.text(built.engines, built.gateway().gauges()).decode()
        assert "trivet_generations_total{" not in text
        assert "trivet_prefill_leg_seconds_count{" not in text
        assert built.busy() == {}
        assert built.engines.board.handover(*(sim.view() for sim in built.sims)) is None
        assert built.engines.last_turn("prefill-0") == 0


async def test_a_good_pair_is_looked_at_on_a_timer_and_no_sooner():
    async with guarded(*PAIR, every_s=0.3) as one:
        await holds(lambda: len(one.counted) >= 3)
        begun = [record.received_s for record in one.stack.sim("prefill-0").state().requests]
        assert all(later - earlier > 0.25 for earlier, later in itertools.pairwise(begun))


async def test_no_engine_gets_two_canaries_at_once_nor_the_fleet_many(monkeypatch):
    under_way, most, per_engine = set(), 0, 0
    inner = Canaries.ask

    async def ask(self, pair, prompt, **more):
        nonlocal most, per_engine
        under_way.add(pair)
        most = max(most, len(under_way))
        names = [view.name for one in under_way for view in (one.prefill, one.decode)]
        per_engine = max(per_engine, *(names.count(name) for name in names))
        try:
            return await inner(self, pair, prompt, **more)
        finally:
            under_way.discard(pair)

    monkeypatch.setattr(Canaries, "ask", ask)
    async with guarded(*["prefill"] * 6, *["decode"] * 6, settings=dataclasses.replace(QUICK, step_ms=1)) as one:
        await one.all_are(Proof.GOOD)
        assert len(one.counted) == 36
    assert (most, per_engine) == (guard_module._TOGETHER, 1)


async def test_canaries_on_a_timer_are_spread_over_an_engines_pairs(monkeypatch):
    monkeypatch.setattr(guard_module, "_SPACING_S", 0.2)
    async with guarded("prefill", "decode", "decode", "decode", every_s=0.01) as one:
        await one.all_are(Proof.GOOD)
        sent = len(one.counted)
        begin_s = time.monotonic()
        await holds(lambda: len(one.counted) >= sent + 4)
        assert time.monotonic() - begin_s > 0.5


@CONNECTOR
async def test_requests_that_meet_trouble_have_their_pair_looked_at_at_once(connector):
    async with guarded("prefill", "decode", "decode", connector=connector) as one:
        await one.all_are(Proof.GOOD)
        bad = one.stack.sim("decode-0")
        bad.faults.add(Fault("finish", leg="decode", reason="error", after_tokens=0, uses=None))
        begin_s = time.monotonic()
        for number in range(4):
            await answer_of(one.stack, token_request(6, 60, start=400 + 100 * number))
        await holds(lambda: one.proof().is_bad)
        assert time.monotonic() - begin_s < 5
        assert one.proof("prefill-0", "decode-1") is Proof.GOOD


@CONNECTOR
async def test_requests_whose_kv_does_not_come_have_their_pair_looked_at(connector, monkeypatch):
    """Nothing fails: they would wait for as long as an engine may be silent."""
    monkeypatch.setattr(life_module, "_LATE_S", 0.3)
    async with guarded("prefill", "prefill", "decode", connector=connector, limit_s=0.8) as one:
        await one.all_are(Proof.GOOD)
        one.stack.sim("prefill-0").faults.add(Fault("hang", path=SIDE_CHANNEL[connector], uses=None))
        asking = [asyncio.create_task(answer_of(one.stack, token_request(6, 60, start=400 + 90 * n))) for n in range(2)]
        await holds(lambda: one.proof("prefill-0") is Proof.SILENT)
        assert one.counted.count("silent") == 1, "requests are the other sign"
        assert one.proof("prefill-1") is Proof.GOOD
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_handover_that_takes_no_longer_than_usual_is_no_trouble(monkeypatch):
    monkeypatch.setattr(life_module, "_LATE_S", 0.01)
    settings = dataclasses.replace(QUICK, transfer_ms_per_token=2)
    async with guarded(*PAIR, settings=settings, watching=False) as one:
        await one.asked(1)
        assert one.stack.engines.board.last_trouble_s() > 0, "nobody knew how long they take"
        before_s = one.stack.engines.board.last_trouble_s()
        await one.asked(4)
        assert one.stack.engines.board.last_trouble_s() == before_s


async def test_a_full_queue_and_a_clients_mistake_are_no_trouble():
    async with guarded(*PAIR) as one:
        await one.all_are(Proof.GOOD)
        for status in (503, 429, 400):
            one.stack.sim("decode-0").faults.add(Fault("status", leg="decode", status=status))
            with contextlib.suppress(Exception):
                await answer_of(one.stack, token_request(6, 60))
        assert one.stack.engines.board.last_trouble_s() == 0.0


# who leaves, and comes back

FAULTS = {
    "wrong tokens": (Fault("corrupt", leg="decode", uses=None), Proof.WRONG_TOKENS),
    "missing bytes": (Fault("uncounted", leg="decode", uses=None), Proof.BYTES),
    "errors": (Fault("status", leg="decode", status=500, uses=None), Proof.CANARY_ERROR),
    "KV lost": (Fault("lose", leg="decode", uses=None), Proof.CANARY_ERROR),
}


@CONNECTOR
@pytest.mark.parametrize("what", FAULTS)
async def test_a_bad_pair_leaves_and_returns_when_it_passes(connector, what, caplog):
    fault, proof = FAULTS[what]
    async with guarded("prefill", "decode", "decode", connector=connector, every_s=0.2) as one:
        await one.all_are(Proof.GOOD)
        with caplog.at_level(logging.INFO, logger="trivet.gateway.guard"):
            one.stack.sim("decode-0").faults.add(fault)
            begin_s = time.monotonic()
            await holds(lambda: one.proof() is proof)
            assert time.monotonic() - begin_s < 5
            assert one.proof("prefill-0", "decode-1") is Proof.GOOD
            assert {record.decode_engine for record in await one.asked(4)} == {"decode-1"}
            assert [record.split for record in one.stack.records] == [True] * 4
            assert one.metric() == {
                'decode="decode-0",prefill="prefill-0"': 0.0,
                'decode="decode-1",prefill="prefill-0"': 1.0,
            }
            assert (
                remarks(one.stack.engines, None) == f"pairs that are not used: prefill-0 -> decode-0 ({proof.word})\n"
            )
            assert why_not_ready(one.stack.engines) is None
            one.stack.sim("decode-0").faults.clear()
            await one.all_are(Proof.GOOD)
        assert remarks(one.stack.engines, None) == ""
        assert {record.decode_engine for record in await one.asked(6)} == {"decode-0", "decode-1"}
        said = [
            (line.levelname, line.getMessage())
            for line in caplog.records
            if "prefill-0 -> decode-0" in line.getMessage()
        ]
        assert [level for level, _ in said] == ["WARNING", "INFO"]
        assert said[0][1].startswith(f"prefill-0 -> decode-0 leaves the rotation ({proof.word}): ")
        assert "passes its canary again" in said[1][1]


async def test_recomputing_leaves_though_no_request_sees_an_error():
    settings = dataclasses.replace(QUICK, kv_load_failure_policy="recompute")
    async with guarded("prefill", "decode", "decode", settings=settings, every_s=0.2) as one:
        await one.all_are(Proof.GOOD)
        one.stack.sim("decode-0").faults.add(Fault("lose", leg="decode", uses=None))
        await holds(lambda: one.proof() is Proof.RECOMPUTE)
        assert one.proof("prefill-0", "decode-1") is Proof.GOOD


@CONNECTOR
async def test_kv_that_does_not_come_needs_two_canaries(connector):
    async with guarded("prefill", "prefill", "decode", connector=connector, every_s=0.2, limit_s=0.8) as one:
        await one.all_are(Proof.GOOD)
        at = "prefill-0"
        one.stack.sim(at).faults.add(Fault("hang", path=SIDE_CHANNEL[connector], uses=None))
        await holds(lambda: one.proof(at) is Proof.SILENT)
        assert one.counted.count("silent") >= 2
        assert one.proof("prefill-1") is Proof.GOOD
        assert {record.prefill_engine for record in await one.asked(3)} == {"prefill-1"}
        one.stack.sim(at).faults.clear()
        await one.all_are(Proof.GOOD)


@CONNECTOR
async def test_without_the_last_pair_requests_are_served_colocated_and_say_why(connector):
    async with guarded(*PAIR, connector=connector, every_s=0.2) as one:
        await one.all_are(Proof.GOOD)
        fault = Fault("corrupt", leg="decode", uses=None)
        one.stack.sim("decode-0").faults.add(fault)
        await holds(lambda: one.proof().is_bad)
        (record,) = await one.asked(1)
        assert (record.split, record.split_reason, record.decode_engine) == (False, "pair_bad", "decode-0")
        assert record.reason == "no pair passes its canary: prefill-0 -> decode-0 (wrong-tokens)"
        assert why_not_ready(one.stack.engines) is None
        one.stack.engines.decode_serves_whole = False
        assert "prefill-0 -> decode-0 (wrong-tokens)" in why_not_ready(one.stack.engines)
        one.stack.engines.decode_serves_whole = True
        one.stack.sim("decode-0").faults.clear()
        await one.all_are(Proof.GOOD)
        assert (await one.asked(1))[0].split


async def test_a_bad_pair_is_tried_with_growing_pauses(monkeypatch):
    monkeypatch.setattr(guard_module, "_BACKOFF_S", (0.05, 0.2, 0.4))
    async with guarded(*PAIR, every_s=0.05) as one:
        await one.all_are(Proof.GOOD)
        one.stack.sim("decode-0").faults.add(Fault("status", leg="decode", status=500, uses=None))
        await holds(lambda: one.counted.count("canary-error") >= 4)
        tried = [record.received_s for record in one.stack.sim("decode-0").state().requests if record.fault == "status"]
        firsts = [at for at, before in zip(tried[1:], tried, strict=False) if at - before > 0.04]
        pauses = [later - earlier for earlier, later in zip([tried[0], *firsts], firsts, strict=False)]
        assert len(pauses) >= 3
        assert pauses[1] > 0.19
        assert pauses[2] > 0.39


# slowness


@CONNECTOR
async def test_slow_engines_never_leave(connector):
    settings = dataclasses.replace(QUICK, step_ms=150)
    async with guarded(*PAIR, connector=connector, settings=settings, every_s=0.1, limit_s=0.5) as one:
        await holds(lambda: one.counted.count("slow") >= 3)
        assert set(one.counted) == {"slow"}
        assert one.proof() is Proof.OPEN
        assert (await one.asked(1))[0].split


@CONNECTOR
async def test_a_loaded_pair_stays_whatever_its_canaries_take(connector):
    """Queues so long that no canary is done in time, behind requests that all are."""
    settings = dataclasses.replace(QUICK, step_ms=10, max_num_seqs=4)
    async with guarded(*PAIR, connector=connector, settings=settings, lease_s=30, every_s=0.1, limit_s=0.6) as one:
        await one.all_are(Proof.GOOD)
        built, over = one.stack, asyncio.Event()

        async def load(number: int) -> int:
            served = 0
            while not over.is_set():
                served += len(await answer_of(built, token_request(20, 60, start=400 + number))) == 20
            return served

        loads = [asyncio.create_task(load(number)) for number in range(24)]
        await holds(lambda: one.counted.count("slow") >= 3)
        assert set(one.counted) <= {"good", "slow"}
        assert not bad_pairs(built.engines)
        over.set()
        assert all(await asyncio.gather(*loads))
        assert all(record.split for record in built.records)


async def test_a_slow_link_is_slow_while_requests_come_through():
    """KV of others is before the canary's on the way, and arrives."""
    settings = dataclasses.replace(QUICK, transfer_ms_per_token=15)
    async with guarded(*PAIR, settings=settings, every_s=0.1, limit_s=0.4) as one:
        over = asyncio.Event()

        async def load() -> None:
            while not over.is_set():
                await answer_of(one.stack, token_request(2, 20))

        loads = [asyncio.create_task(load()) for _ in range(3)]
        await holds(lambda: one.counted.count("slow") >= 4)
        over.set()
        await asyncio.gather(*loads)
        assert "silent" not in one.counted
        assert not one.proof().is_bad


async def test_near_ties_never_leave():
    async with guarded(*PAIR, every_s=0.05) as one:
        one.stack.sim("decode-0").faults.add(Fault("waver", leg="decode", uses=None))
        await holds(lambda: len(one.counted) >= 4)
        assert set(one.counted) == {"good"}


# engines that are started anew


async def test_an_engine_that_was_started_anew_meets_no_client_before_its_canary():
    async with guarded(*FOUR, watching=False) as one:
        async with one.guard.watching():
            await one.all_are(Proof.GOOD)
        sim = one.stack.sim("decode-0")
        await sim.restart()
        one.stack.refresh()
        assert one.proof("prefill-0", "decode-0") is Proof.UNPROVEN
        assert {record.decode_engine for record in await one.asked(6)} == {"decode-1"}
        async with one.guard.watching():
            await one.all_are(Proof.GOOD)
        assert {record.decode_engine for record in await one.asked(6)} == {"decode-0", "decode-1"}


async def test_nobody_waits_for_ever_for_a_canary_without_a_verdict(monkeypatch):
    monkeypatch.setattr(guard_module, "_HELD_S", 0.3)
    async with guarded(*FOUR) as one:
        await one.all_are(Proof.GOOD)
        sim = one.stack.sim("decode-0")
        await sim.restart()
        sim.faults.add(Fault("hang", leg="decode", uses=None))
        one.stack.refresh()
        await holds(lambda: one.proof() is Proof.OPEN)
        sim.faults.clear()


@CONNECTOR
async def test_prefill_and_then_decode_started_anew_under_load(connector):
    """Pairs leave and return, the others go on, and no client sees any of it."""
    settings = dataclasses.replace(QUICK, step_ms=1)
    async with guarded(*FOUR, connector=connector, settings=settings) as one:
        await one.all_are(Proof.GOOD)
        built, over, answers = one.stack, asyncio.Event(), []
        expected = {}

        async def load(number: int) -> None:
            request = token_request(12, 60, start=400 + 70 * number)
            while not over.is_set():
                answers.append((number, tuple(await answer_of(built, request))))

        loads = [asyncio.create_task(load(number)) for number in range(8)]
        for name in ("prefill-0", "decode-0"):
            await holds(lambda: len(answers) > 8)
            sim = built.sim(name)
            sim.exit()
            await asyncio.sleep(0.05)
            built.refresh()
            await holds(lambda: one.proof("prefill-1", "decode-1") is Proof.GOOD)
            await sim.restart()
            if name == "decode-0":  # it comes back with a fault: its pairs must not serve
                sim.faults.add(Fault("corrupt", leg="decode", uses=None))
            built.refresh()
            bad = Proof.WRONG_TOKENS if name == "decode-0" else Proof.GOOD
            await holds(lambda sim=sim, bad=bad: {one.proofs()[key] for key in _pairs_of(sim.name)} == {bad})
        served = len(answers)
        await holds(lambda: len(answers) > served + 16)
        built.sim("decode-0").faults.clear()
        await one.all_are(Proof.GOOD)
        over.set()
        await asyncio.gather(*loads)
        for number, answer in answers:
            assert expected.setdefault(number, answer) == answer
            assert len(answer) == 12
        assert all(record.error is None for record in built.records)


def _pairs_of(name: str) -> list[str]:
    own = name[-1]
    return [f"{own}{other}" if name.startswith("prefill") else f"{other}{own}" for other in "01"]


async def test_an_engine_that_ends_is_the_fleets_matter_and_not_its_pairs(caplog):
    async with guarded(*FOUR, every_s=0.05) as one:
        await one.all_are(Proof.GOOD)
        one.stack.sim("decode-0").exit()
        begin_s = time.monotonic()
        await holds(lambda: one.guard._running or time.monotonic() - begin_s > 1)
        await asyncio.sleep(0.1)  # what the fleet needs to see it
        one.stack.refresh()
        await holds(lambda: "left" in one.counted or time.monotonic() - begin_s > 2)
        assert "canary-error" not in one.counted
        assert not [line for line in caplog.records if "leaves the rotation" in line.getMessage()]


# several workers


async def test_the_worker_that_leads_sends_them_for_all_and_the_next_takes_over():
    async with contextlib.AsyncExitStack() as opened:
        _, *boards = opened.enter_context(board_of(2))
        base = await opened.enter_async_context(stack("prefill", "decode", "decode"))
        workers = []
        for board in boards:
            session = await opened.enter_async_context(open_session())
            built = Stack(base.sims, session, "NixlConnector", board=board)
            opened.push_async_callback(built.legs.close)
            board.beat()
            workers.append(Guarded(built))
        leading, other = workers
        async with other.guard.watching():
            async with leading.guard.watching():
                await leading.all_are(Proof.GOOD)
                assert other.proofs() == leading.proofs()
                assert other.counted == []
                sent = len(leading.counted)
                trouble = Fault("finish", leg="decode", reason="error", after_tokens=0, uses=2)
                base.sim("decode-0").faults.add(trouble)
                for number in range(4):  # met by the worker that does not lead
                    await answer_of(other.stack, token_request(6, 60, start=500 + 90 * number))
                await holds(lambda: len(leading.counted) > sent)
                assert other.counted == []
            boards[0].clear(0)  # it has died
            base.sim("decode-0").faults.clear()
            base.sim("decode-0").faults.add(Fault("corrupt", leg="decode", uses=None))
            await holds(lambda: boards[1].beat() or other.guard._watched)
            boards[1].note_trouble(*(view for view in other.stack.engines.all() if view.name != "decode-1"))
            await holds(lambda: boards[1].beat() or other.proof() is Proof.WRONG_TOKENS)
            assert leading.proof() is Proof.WRONG_TOKENS, "every worker chooses by it"
        base.sim("decode-0").faults.clear()


# its own faults


async def test_a_fault_of_its_own_does_not_end_it(monkeypatch, caplog):
    times = []

    def look(self):
        times.append(1)
        if len(times) == 1:
            raise RuntimeError("a fault")
        return inner(self)

    inner = Guard._look
    monkeypatch.setattr(Guard, "_look", look)
    async with guarded(*PAIR) as one:
        await one.all_are(Proof.GOOD)
    assert "the pair guard; it goes on" in caplog.text


async def test_a_canary_that_raises_is_told_and_sent_again_on_the_timer(monkeypatch, caplog):
    asked = []

    async def ask(self, *args, **more):
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("a fault")
        return await inner(self, *args, **more)

    inner = Canaries.ask
    monkeypatch.setattr(Canaries, "ask", ask)
    async with guarded(*PAIR, every_s=0.1) as one:
        await one.all_are(Proof.GOOD)
    assert "a canary of prefill-0 -> decode-0" in caplog.text


async def test_a_model_that_is_blind_is_told_once(caplog):
    async with guarded(*PAIR, every_s=0.05) as one:
        for sim in one.stack.sims:
            sim.faults.add(Fault("dull", uses=None))
        await holds(lambda: len(one.counted) >= 5)
        said = [line.getMessage() for line in caplog.records if "the same answer" in line.getMessage()]
        assert len(said) == 1
        assert said[0].startswith("decode-0: ")


async def test_nothing_is_left_when_it_ends_in_the_middle():
    settings = dataclasses.replace(QUICK, step_ms=20)
    async with guarded(*FOUR, settings=settings, watching=False) as one:
        async with one.guard.watching():
            await holds(lambda: any(sim.scheduler.running for sim in one.stack.sims))
        assert one.guard._running == {}
