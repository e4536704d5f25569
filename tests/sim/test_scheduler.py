"""Steps: who runs, who waits, and what a long prompt does to the others."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sim_client import PROMPT, until
from trivet.errors import TrivetError
from trivet.sim import Fault, SimSettings
from trivet.sim.connector import Connector
from trivet.sim.pool import BlockPool
from trivet.sim.scheduler import End, Scheduler, SimSequence, Sink
from trivet.sim.stats import Stats


async def run(sequences: list[SimSequence], **changes) -> tuple[list[list[int]], Stats]:
    """The answers of sequences that come at once."""
    chosen = SimSettings(**changes)
    pool, stats = BlockPool(chosen.num_blocks), Stats(chosen)
    scheduler = Scheduler(chosen, pool, stats, Connector())
    for one in sequences:
        scheduler.add(one)
    scheduler.start()
    async with asyncio.timeout(20):
        while scheduler.unfinished():  # noqa: ASYNC110
            await asyncio.sleep(0)
    await scheduler.stop()
    pool.check()
    assert (pool.used, pool.held) == (0, 0)
    return [one.answer for one in sequences], stats


def sequence(prompt, max_tokens: int) -> SimSequence:
    return SimSequence("s", prompt, Sink(), max_tokens=max_tokens)


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 20)), max_size=6)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(1, 9), st.integers(8, 20), st.integers(1, 4), st.integers(1, 64))
def test_answers_are_the_same_however_little_room_there_is(asked, size, blocks, seqs, budget):
    blocks = max(blocks, -(-61 // size))

    async def both() -> None:
        alone = [(await run([sequence(*one)], kv_tokens=1024))[0][0] for one in asked]
        together, _ = await run(
            [sequence(*one) for one in asked],
            block_size=size,
            kv_tokens=size * blocks,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
        )
        assert together == alone
        assert [len(answer) for answer in together] == [tokens for _, tokens in asked]

    asyncio.run(both())


async def test_a_pool_that_fills_up_preempts_the_last_that_came():
    answers, stats = await run(
        [sequence([number, *range(20)], 40) for number in range(3)], block_size=4, kv_tokens=100, max_num_seqs=3
    )
    assert stats.preemptions > 0
    assert [len(answer) for answer in answers] == [40] * 3
    assert stats.generation_tokens == 120


async def test_one_that_has_blocks_is_not_behind_one_that_waits_for_them():
    """Both were preempted, or their KV has come: the first would wait for the second's blocks for ever."""
    chosen = SimSettings(block_size=4, kv_tokens=32, enable_prefix_caching=False)
    pool, stats = BlockPool(chosen.num_blocks), Stats(chosen)
    scheduler = Scheduler(chosen, pool, stats, Connector())
    small, large = sequence(range(12), 1), sequence(range(100, 128), 1)
    small.blocks = pool.take((), 3) or []
    scheduler._queue_first(small)
    scheduler._queue_first(large)
    assert list(scheduler.waiting) == [small, large]
    scheduler.start()
    async with asyncio.timeout(20):
        while scheduler.unfinished():  # noqa: ASYNC110
            await asyncio.sleep(0)
    await scheduler.stop()
    pool.check()


async def test_no_more_run_at_once_than_may(start, client):
    sim = await start(max_num_seqs=2, step_ms=3)
    asking = [asyncio.create_task(client.generate(sim, [n], max_tokens=10)) for n in range(5)]
    await until(lambda: sim.state().running == 2)
    assert sim.state().waiting == 3
    for task in asking:
        assert len((await task).tokens) == 10
    text = (await client.get(sim, "/metrics")).content.decode()
    assert 'request_queue_time_seconds_count{engine="0",model_name="sim"} 5' in text


async def test_a_full_queue_is_503(start, client):
    sim = await start(max_num_queued_reqs=2, step_ms=5)
    asking = [asyncio.create_task(client.generate(sim, max_tokens=100)) for _ in range(2)]
    await until(lambda: len(sim.scheduler.unfinished()) == 2)
    answer = await client.generate(sim)
    assert (answer.status, answer.json["error"]["type"]) == (503, "Service Unavailable")
    assert "currently busy" in answer.message
    assert 'reason="max_num_queued_reqs"} 1.0' in (await client.get(sim, "/metrics")).content.decode()
    for task in asking:
        task.cancel()
    await sim.idle()
    assert (await client.generate(sim)).status == 200


def steps_of(sim, monkeypatch) -> list[float]:
    """The times that its steps take, in ms, as they come: this machine may be slow, they are exact."""
    took: list[float] = []
    real = sim.scheduler._duration_s

    def duration_s(batch):
        took.append(round(real(batch) * 1000, 6))
        return took[-1] / 1000

    monkeypatch.setattr(sim.scheduler, "_duration_s", duration_s)
    return took


async def test_a_prompt_takes_time_by_its_length(start, client, monkeypatch):
    sim = await start(step_ms=2, prefill_ms=20, prefill_ms_per_token=1)
    took = steps_of(sim, monkeypatch)
    began = time.monotonic()
    await client.generate(sim, max_tokens=3)
    assert took == [63, 2, 2]
    assert time.monotonic() - began >= 0.066
    took.clear()
    await client.generate(sim, max_tokens=1)  # 32 tokens are cached
    assert took == [31]


@pytest.mark.parametrize(("budget", "longest"), [(8192, 101), (10, 11)])
async def test_a_long_prompt_delays_running_answers_by_a_chunk(start, client, monkeypatch, budget, longest):
    sim = await start(step_ms=1, prefill_ms_per_token=1, max_num_batched_tokens=budget)
    took = steps_of(sim, monkeypatch)
    async with client.open_stream(sim, [1], max_tokens=400) as answer:
        await answer.content.readany()
        await client.generate(sim, list(range(100)), max_tokens=1)
        assert sim.state().running == 1
    long = [one for one in took[1:] if one > 1]
    assert max(long) in (longest, longest - 1)  # the answer that runs takes one token of the budget
    assert sum(one - 1 for one in long) == 100


async def test_what_a_slow_request_shares_a_step_with_is_slow_too(start, client, monkeypatch):
    sim = await start(step_ms=1)
    took = steps_of(sim, monkeypatch)
    sim.faults.add(Fault("slow", factor=30))
    await asyncio.gather(client.generate(sim, [1], max_tokens=3), client.generate(sim, [2], max_tokens=30))
    assert took.count(30) == 3
    assert set(took) == {1, 30}


async def test_steps_keep_their_pace(start, client):
    sim = await start(step_ms=2)
    began = time.monotonic()
    await client.generate(sim, max_tokens=100)
    assert time.monotonic() - began >= 0.19


async def test_jitter_varies_steps_and_is_the_same_for_the_same_seed():
    def durations(seed):
        chosen = SimSettings(step_ms=10, jitter=0.5, seed=seed)
        scheduler = Scheduler(chosen, BlockPool(1), Stats(chosen), Connector())
        return [scheduler._duration_s([(sequence([1], 1), 1)]) for _ in range(50)]

    assert durations(1) == durations(1) != durations(2)
    assert 0.005 <= min(durations(1)) < 0.008 < 0.012 < max(durations(1)) <= 0.015


async def test_stopping_ends_everything(start, client):
    sim = await start(step_ms=50, max_num_seqs=1)
    asking = [asyncio.create_task(client.generate(sim)) for _ in range(2)]
    await until(lambda: sim.state().waiting == 1)
    await sim.stop()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(one, Exception) for one in results)
    assert (sim.scheduler.unfinished(), sim.pool.used) == ([], 0)


def test_an_end_is_told_once():
    async def twice() -> list:
        chosen = SimSettings()
        scheduler = Scheduler(chosen, BlockPool(8), Stats(chosen), Connector())
        one = sequence(PROMPT, 3)
        scheduler.add(one)
        scheduler.finish(one, End.ABORT)
        scheduler.finish(one, End.STOP)
        return await one.sink.take()

    (output,) = asyncio.run(twice())
    assert (output.end, output.token) == (End.ABORT, None)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"kv_tokens": 15},
        {"jitter": 1.5},
        {"step_ms": -1},
        {"eos_chance": 2},
        {"vocab_size": 300},
        {"kv_load_failure_policy": "retry"},
        {"kv_connector": "MooncakeConnector"},
        {"transfer_last_ms": -1},
        {"max_num_queued_reqs": -1},
        {"step_ms": float("nan")},
    ],
)
def test_settings_that_cannot_be(change):
    (name,) = change
    with pytest.raises(TrivetError, match=f"simulated engine: {name} is .* -> it must be"):
        SimSettings(**change)
