"""Hand-overs whose legs start together, as with TrivetConnector, and what becomes of them when one end is missing."""

import asyncio
import contextlib
import random
import stat
import time
from pathlib import Path

import aiohttp
import pytest

from helpers.sim_client import PROMPT, until
from trivet.connectors import connector
from trivet.errors import PortInUseError
from trivet.sim import Fault, SimEngine, SimSettings
from trivet.sim.link import Link, connect
from trivet.sim.settings import TRIVET
from trivet.sim.tokens import digest
from trivet.sim.transfer import OPEN_PATH

KV_BYTES = "vllm:trivet_kv_bytes_total"
LATE_S = 0.4
"""What a busy machine may add; KV that does not hide behind prefill would take longer."""


def held(name="t", *, first_token=False) -> dict:
    """The parameters of a prefill leg."""
    return {"do_remote_decode": True, "transfer_id": name, "first_token": first_token}


def opened(prefill, name="t", *, first_token=False) -> dict:
    """The parameters of a decode leg."""
    address = prefill if isinstance(prefill, str) else prefill.view().kv_address
    return {"do_remote_prefill": True, "transfer_id": name, "prefill_address": address, "first_token": first_token}


class Legs:
    """Both legs of requests."""

    def __init__(self, client) -> None:
        self.client = client

    def prefill(self, engine, params, ids=PROMPT, *, rid="r", **sampling):
        more = {"kv_transfer_params": params}
        return self.client.generate(engine, ids, leg="prefill", rid=rid, more=more, **{"max_tokens": 1} | sampling)

    def decode(self, engine, params, ids=PROMPT, *, rid="r", **sampling):
        return self.client.stream(engine, ids, leg="decode", rid=rid, more={"kv_transfer_params": params}, **sampling)

    async def both(self, prefill, decode, name="t", *, first_token=False, ids=PROMPT, **sampling):
        """The two answers."""
        return await asyncio.gather(
            self.prefill(prefill, held(name, first_token=first_token), ids),
            self.decode(decode, opened(prefill, name, first_token=first_token), ids, **sampling),
        )

    async def release(self, prefill, name):
        return await self.client.generate(
            prefill, [1], leg="release", more={"kv_transfer_params": {"release_transfer": name}}, max_tokens=1
        )


@pytest.fixture
def legs(client):
    return Legs(client)


@pytest.fixture
def trivet(start):
    async def trivet(tier="mixed", **settings):
        return await start(tier, kv_connector=TRIVET, **settings)

    return trivet


@pytest.fixture
async def pair(trivet):
    return await trivet("prefill"), await trivet("decode")


def counts(engine, *names) -> tuple[int, ...]:
    handovers = engine.state().handovers
    return tuple(handovers[name] for name in names)


def handed_over(answer, name="t") -> bool:
    params = answer.json["kv_transfer_params"]
    assert params["transfer_id"] == name
    assert ("problem" in params) is not params["handed_over"]
    return params["handed_over"]


async def settled(*engines) -> None:
    """Nothing is held, and every hand-over that was offered has come to one end."""
    for engine in engines:
        await engine.idle(nothing_held=True)
        assert engine.state().pool["held"] == engine.state().pool["used"] == 0
        offered, *ends = counts(engine, "offered", "taken", "released", "expired", "lost")
        assert offered == sum(ends)


async def metric(client, engine, name) -> float:
    text = (await client.get(engine, "/metrics")).content.decode()
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


# the usual way


@pytest.mark.parametrize("first", ["decode", "prefill", "together"])
async def test_decode_goes_on_from_what_prefill_computes(pair, legs, client, first):
    prefill, decode = pair
    asked = opened(prefill)
    if first == "prefill":
        answer = await legs.prefill(prefill, held())
        assert counts(prefill, "offered", "open", "taken") == (1, 1, 0)
        assert prefill.state().pool["held"] == 3
        streamed = await legs.decode(decode, asked)
    else:
        decoding = asyncio.create_task(legs.decode(decode, asked))
        if first == "decode":
            await until(lambda: prefill.connector._transfers)
        answer, streamed = await legs.prefill(prefill, held()), await decoding
    assert handed_over(answer)
    assert streamed.tokens == (await client.stream(prefill)).tokens
    await settled(prefill, decode)
    assert counts(prefill, "offered", "taken", "released", "expired", "lost", "refused") == (1, 1, 0, 0, 0, 0)
    assert counts(decode, "pulled", "failed", "recomputed") == (1, 0, 0)
    assert decode.state().computed_prompt_tokens == {"decode": 0}
    assert decode.state().connector == TRIVET
    assert prefill.state().requests[0].split == "offered"
    assert decode.state().requests[0].split == "pulled"
    assert await metric(client, decode, KV_BYTES) == 48 * 131072  # whole blocks
    assert await metric(client, prefill, KV_BYTES) == 0
    assert "nixl" not in (await client.get(decode, "/metrics")).content.decode()


@pytest.mark.parametrize("step_ms", [0, 2])
async def test_the_first_token_comes_from_prefill(trivet, legs, client, step_ms):
    prefill, decode = await trivet("prefill"), await trivet("decode", step_ms=step_ms)
    whole = (await client.stream(prefill, max_tokens=9)).tokens
    answer, streamed = await legs.both(prefill, decode, first_token=True, max_tokens=9)
    assert [*answer.tokens, *streamed.tokens] == whole
    *_, usage, done = streamed.events
    assert (usage["usage"]["completion_tokens"], done) == (8, "[DONE]")
    assert decode.state().requests[0].completion_tokens == 8
    assert decode.state().computed_prompt_tokens == {"decode": 0}
    assert (
        'generation_tokens_total{engine="0",model_name="sim"} 8.0'
        in (await client.get(decode, "/metrics")).content.decode()
    )
    await settled(prefill, decode)


async def test_the_parameters_are_the_connectors(pair, legs, client):
    prefill, decode = pair
    known = connector(TRIVET)
    for first_token in (True, False):
        ours = (held(first_token=first_token), opened(prefill, first_token=first_token))
        assert known.rendezvous("t", prefill.view().kv_address, first_token=first_token) == ours
    answer, _ = await legs.both(prefill, decode)
    assert known.problem_of(answer.json["kv_transfer_params"]) is None
    assert known.release_params(answer.json["kv_transfer_params"]) == {"release_transfer": "t"}
    assert f"{known.bytes_metric}{{" in (await client.get(decode, "/metrics")).content.decode()
    assert known.bytes_metric == KV_BYTES


async def test_decode_goes_on_behind_a_first_token_that_ends_the_answer(pair, legs, client):
    """As vLLM does, which looks at tokens that it has made: whoever is told the token ends decode."""
    prefill, decode = pair
    first, second, *_ = (await client.generate(prefill, max_tokens=3)).tokens
    _, streamed = await legs.both(prefill, decode, first_token=True, max_tokens=2, stop_token_ids=[first])
    assert streamed.tokens == [second]
    await settled(prefill, decode)


@pytest.mark.parametrize("room", ["max_tokens", "max_model_len"])
async def test_a_first_token_behind_which_is_no_room_ends_decode_with_an_error(trivet, legs, client, room):
    length = {"max_model_len": len(PROMPT) + 1} if room == "max_model_len" else {}
    prefill, decode = await trivet("prefill"), await trivet("decode", **length)
    max_tokens = 1 if room == "max_tokens" else 5
    _, streamed = await legs.both(prefill, decode, first_token=True, max_tokens=max_tokens)
    assert streamed.tokens == []
    assert "error" in streamed.events[0]
    await settled(prefill, decode)


async def test_a_request_that_reads_no_cache_is_handed_kv_all_the_same(pair, legs, client):
    prefill, decode = pair
    moved = []
    for name in ("t0", "t1"):
        _, streamed = await legs.both(
            prefill, decode, name, first_token=True, max_tokens=2, skip_reading_prefix_cache=True
        )
        assert len(streamed.tokens) == 1
        moved.append(await metric(client, decode, f"{KV_BYTES}{{"))
    assert moved[1] == 2 * moved[0] > 0  # what decode had of the first is not read for the second
    await settled(prefill, decode)


async def test_what_decode_has_already_does_not_move(pair, legs, client):
    prefill, decode = pair
    await client.generate(decode)
    await legs.both(prefill, decode)
    assert await metric(client, decode, KV_BYTES) == 16 * 131072  # whole blocks


@pytest.mark.parametrize("first_token", [True, False])
async def test_tokens_of_a_pool_that_is_too_small_for_all(trivet, legs, client, first_token):
    prefill = await trivet("prefill")
    decode = await trivet("decode", kv_tokens=128, block_size=4)
    wholes, both = [], []
    for n in range(4):
        ids = [n, *PROMPT]
        wholes.append((await client.stream(prefill, ids, max_tokens=60)).tokens)
        both.append(legs.both(prefill, decode, f"t{n}", first_token=first_token, ids=ids, max_tokens=60))
    for whole, (answer, streamed) in zip(wholes, await asyncio.gather(*both), strict=True):
        assert [*(answer.tokens if first_token else ()), *streamed.tokens] == whole
    assert decode.state().preemptions > 0
    await settled(prefill, decode)


async def test_the_first_tokens_need_blocks_when_there_are_none(trivet, legs, client):
    prefill, decode = await trivet("prefill"), await trivet("decode", kv_tokens=96, transfer_last_ms=30)
    prompts = [[n, *PROMPT, *range(6)] for n in range(2)]
    whole = [(await client.stream(prefill, ids)).tokens for ids in prompts]
    answers = await asyncio.gather(
        *(legs.both(prefill, decode, f"t{n}", first_token=True, ids=ids) for n, ids in enumerate(prompts))
    )
    assert [[*answer.tokens, *streamed.tokens] for answer, streamed in answers] == whole
    await settled(prefill, decode)


# time and room


async def test_decode_takes_no_blocks_before_prefill_begins(trivet, legs):
    prefill, decode = await trivet("prefill", max_num_seqs=1, prefill_ms=100), await trivet("decode")
    busy = asyncio.create_task(legs.client.generate(prefill, [9], max_tokens=1))
    await until(lambda: prefill.state().running == 1)
    both = asyncio.create_task(legs.both(prefill, decode))
    await until(lambda: decode.state().fetching == 1)
    await until(lambda: prefill.state().waiting == 1)
    await asyncio.sleep(0.02)
    assert decode.state().pool["used"] == 0
    await busy
    await until(lambda: decode.state().pool["used"] == 3)
    assert prefill.state().running == 1
    assert (decode.state().fetching, decode.state().waiting) == (1, 0)
    await both


@pytest.mark.parametrize(
    ("prefill_ms", "ms_per_token", "behind_s"),
    [(100, 0, 0.02), (900, 15, 0.02), (0, 2, 0.082)],
    ids=["the last piece", "hidden behind prefill", "slower than prefill"],
)
@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_kv_moves_while_prefill_computes(trivet, legs, prefill_ms, ms_per_token, behind_s, slow):
    times = {"transfer_ms_per_token": ms_per_token, "transfer_last_ms": 20.0}
    prefill = await trivet("prefill", prefill_ms=prefill_ms, **(times if slow == "prefill" else {}))
    decode = await trivet("decode", **(times if slow == "decode" else {}))
    await legs.both(prefill, decode, max_tokens=1)
    (begun,), (done,) = prefill.state().requests, decode.state().requests
    took_s = done.first_token_s - begun.first_token_s
    assert behind_s - 0.005 <= took_s < behind_s + LATE_S


async def test_steps_go_on_while_kv_moves(trivet, legs, client):
    prefill = await trivet("prefill", transfer_last_ms=200)
    decode = await trivet("decode", step_ms=1)
    moving = asyncio.create_task(legs.both(prefill, decode, max_tokens=1))
    await until(lambda: counts(prefill, "open") == (1,))
    await client.generate(decode, [1, 2, 3], max_tokens=5)
    assert decode.state().fetching == 1
    await moving


@pytest.mark.parametrize("budget", [8192, 24])
@pytest.mark.parametrize("first_token", [True, False])
async def test_far_too_many_requests_for_both_pools_all_end_well(trivet, legs, client, first_token, budget):
    """Ten times what prefill has room for, and a decode pool of three prompts; chunks take blocks bit by bit."""
    prefill = await trivet(
        *("prefill",), kv_tokens=4 * 48, max_num_seqs=4, max_num_batched_tokens=budget, enable_prefix_caching=False
    )
    decode = await trivet("decode", kv_tokens=3 * 48, max_num_seqs=2, enable_prefix_caching=False)
    order = random.Random(budget)
    prompts = [[order.randrange(300, 400) for _ in PROMPT] for _ in range(40)]
    asking = []
    for n, ids in enumerate(prompts):
        asking.append(legs.prefill(prefill, held(f"t{n}", first_token=first_token), ids))
        asking.append(legs.decode(decode, opened(prefill, f"t{n}", first_token=first_token), ids, max_tokens=4))
    order.shuffle(asking)
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*asking)
    assert all(answer.status == 200 for answer in answers)
    await settled(prefill, decode)
    assert counts(prefill, "taken", "expired") == (40, 0)
    assert counts(decode, "pulled", "recomputed") == (40, 0)
    assert prefill.state().preemptions == 0 or budget < len(PROMPT)


async def test_blocks_that_prefill_cannot_use_yet_are_given_back(trivet, legs, client):
    """Prefill preempts a prompt whose first chunk it has announced: decode lets others have its blocks."""
    prefill = await trivet("prefill", kv_tokens=96, step_ms=2, enable_prefix_caching=False)
    decode = await trivet("decode", kv_tokens=48)
    growing = asyncio.create_task(client.generate(prefill, [9] * 16, max_tokens=64))
    prefill.faults.add(Fault("stall", leg="prefill", for_s=0.4))
    await until(lambda: prefill.state().running == 1)
    both = asyncio.create_task(legs.both(prefill, decode))
    await until(lambda: decode.state().pool["used"] == 3)
    await until(lambda: prefill.state().preemptions == 1)
    await until(lambda: decode.state().pool["used"] == 0)
    assert decode.state().fetching == 1
    await growing
    answer, streamed = await both
    assert handed_over(answer)
    assert len(streamed.tokens) == 4
    await settled(prefill, decode)


# one end is missing


async def test_decode_that_leaves_before_prefill_begins(trivet, legs, client):
    prefill, decode = await trivet("prefill", max_num_seqs=1, step_ms=5), await trivet("decode")
    busy = asyncio.create_task(client.generate(prefill, [9], max_tokens=1000))
    await until(lambda: prefill.state().running == 1)
    prefilling = asyncio.create_task(legs.prefill(prefill, held()))
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill)))
    await until(lambda: prefill.connector._transfers and prefill.connector._transfers["t"].peers)
    decoding.cancel()
    await until(lambda: not prefill.connector._transfers["t"].peers)
    await decode.idle()
    prefilling.cancel()
    busy.cancel()
    await settled(prefill, decode)
    assert counts(prefill, "offered") == (0,)
    assert not prefill.connector._transfers


@pytest.mark.parametrize("by_id", [True, False])
async def test_decode_that_leaves_while_it_waits_for_room_frees_what_prefill_holds(trivet, legs, client, by_id):
    prefill, decode = await trivet("prefill"), await trivet("decode", kv_tokens=64, step_ms=5)
    busy = asyncio.create_task(client.generate(decode, [9], max_tokens=40))
    await until(lambda: decode.state().pool["used"] >= 2)
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill)))
    assert handed_over(await legs.prefill(prefill, held()))
    await until(lambda: decode.state().waiting == 1)
    assert counts(prefill, "open") == (1,)
    if by_id:
        decode.abort("generate-tokens-r-decode")
    else:
        decoding.cancel()
    await until(lambda: not counts(prefill, "open")[0])
    assert counts(prefill, "released", "lost", "taken") == (1, 0, 0)
    await asyncio.gather(decoding, return_exceptions=True)
    busy.cancel()
    await settled(prefill, decode)


async def test_decode_that_leaves_while_kv_moves(trivet, legs):
    prefill, decode = await trivet("prefill"), await trivet("decode", transfer_last_ms=60_000)
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill)))
    await legs.prefill(prefill, held())
    await until(lambda: decode.state().pool["used"] == 3)
    decoding.cancel()
    await settled(prefill, decode)
    assert counts(prefill, "released") == (1,)


async def test_a_second_decode_engine_after_the_first_gave_up(trivet, legs, client):
    prefill = await trivet("prefill", prefill_ms=150)
    first, second = await trivet("decode", name="decode-0"), await trivet("decode", name="decode-1")
    prefilling = asyncio.create_task(legs.prefill(prefill, held()))
    decoding = asyncio.create_task(legs.decode(first, opened(prefill)))
    await until(lambda: first.state().pool["used"] == 3)
    decoding.cancel()
    streamed = await legs.decode(second, opened(prefill))
    assert handed_over(await prefilling)
    assert streamed.tokens == (await client.stream(prefill)).tokens
    await settled(prefill, first, second)
    assert counts(prefill, "taken", "released") == (1, 0)
    assert counts(second, "pulled", "recomputed") == (1, 0)


async def test_a_second_decode_engine_waits_for_the_first(trivet, legs):
    """Which of two is heard first when a request moves from one to the other is chance."""
    prefill = await trivet("prefill")
    first, second = await trivet("decode", transfer_last_ms=60_000), await trivet("decode")
    await legs.prefill(prefill, held())
    leaving = asyncio.create_task(legs.decode(first, opened(prefill)))
    await until(lambda: first.state().pool["used"] == 3)
    coming = asyncio.create_task(legs.decode(second, opened(prefill)))
    await until(lambda: len(prefill.connector._transfers["t"].peers) == 2)
    assert second.state().pool["used"] == 0
    leaving.cancel()
    assert len((await coming).tokens) == 4
    await settled(prefill, first, second)
    assert counts(prefill, "taken", "released") == (1, 0)
    assert counts(second, "pulled") == (1,)


async def test_who_waits_behind_one_that_takes_it_computes_the_prompt(trivet, legs):
    prefill = await trivet("prefill")
    first, second = await trivet("decode", transfer_last_ms=50), await trivet("decode")
    await legs.prefill(prefill, held())
    taking = asyncio.create_task(legs.decode(first, opened(prefill)))
    await until(lambda: first.state().pool["used"] == 3)
    assert (await legs.decode(second, opened(prefill))).tokens == (await taking).tokens
    assert (counts(first, "pulled"), counts(second, "recomputed")) == ((1,), (1,))
    late = await legs.decode(second, opened(prefill))
    assert len(late.tokens) == 4
    assert counts(prefill, "taken", "refused") == (1, 1)


@pytest.mark.parametrize("address", ["unix:/nowhere/at/all.sock", "tcp:127.0.0.1:1", ""])
async def test_an_address_that_cannot_be_reached(pair, legs, client, address):
    prefill, decode = pair
    answer = await legs.decode(decode, opened(address))
    assert answer.tokens == (await client.stream(prefill)).tokens
    assert counts(decode, "failed", "recomputed", "pulled") == (1, 1, 0)
    assert decode.state().computed_prompt_tokens == {"decode": 41}
    error, done = (await legs.decode(decode, opened(address, first_token=True), [*PROMPT, 5])).events
    assert (error["error"]["code"], done) == (500, "[DONE]")
    assert counts(decode, "failed", "recomputed") == (2, 1)
    assert [one.ended for one in decode.state().requests] == ["length", "error"]
    await settled(decode)


async def test_a_prefill_engine_that_refuses_for_a_time(pair, legs):
    prefill, decode = pair
    prefill.faults.add(Fault("refuse", for_s=0.2))
    await legs.decode(decode, opened(prefill))
    assert counts(decode, "recomputed") == (1,)
    await until(lambda: prefill._listener is not None)
    answer, _ = await legs.both(prefill, decode, "t2")
    assert handed_over(answer, "t2")
    assert counts(decode, "pulled") == (1,)


@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize("when", ["queued", "running"])
async def test_prefill_that_is_aborted(trivet, legs, client, first_token, when):
    prefill, decode = await trivet("prefill", max_num_seqs=1, prefill_ms=60_000), await trivet("decode")
    if when == "queued":
        busy = asyncio.create_task(client.generate(prefill, [9]))
        await until(lambda: prefill.state().running == 1)
    prefilling = asyncio.create_task(legs.prefill(prefill, held(first_token=first_token)))
    await until(lambda: getattr(prefill.state(), {"queued": "waiting"}.get(when, when)) == 1)
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill, first_token=first_token)))
    await until(lambda: prefill.connector._transfers["t"].peers)
    prefill.abort("generate-tokens-r-prefill")
    answer, streamed = await prefilling, await decoding
    assert answer.json["kv_transfer_params"] == {
        "transfer_id": "t",
        "handed_over": False,
        "problem": "prefill was aborted",
    }
    assert answer.json["choices"][0]["finish_reason"] == "abort"
    if first_token:
        assert streamed.events[0]["error"]["code"] == 500
        assert decode.state().requests[0].ended == "error"
    else:
        assert len(streamed.tokens) == 4
        assert counts(decode, "recomputed") == (1,)
    if when == "queued":
        busy.cancel()
    await settled(prefill, decode)


@pytest.mark.parametrize("first_token", [True, False])
async def test_prefill_that_dies(trivet, legs, client, first_token):
    prefill, decode = await trivet("prefill", prefill_ms=50), await trivet("decode")
    prefill.faults.add(Fault("exit", leg="prefill", after_tokens=1))
    prefilling, streamed = await asyncio.gather(
        legs.prefill(prefill, held(first_token=first_token)),
        legs.decode(decode, opened(prefill, first_token=first_token)),
        return_exceptions=True,
    )
    assert isinstance(prefilling, aiohttp.ClientError)
    # the token was made; whether it reached decode before the end is chance, as is what is left to say
    expected = (await client.stream(decode)).tokens
    assert streamed.tokens in ([], expected[1:]) if first_token else streamed.tokens == expected
    assert counts(decode, "failed", "recomputed")[0] == 1
    address = prefill.view().kv_address
    await prefill.restart()
    assert prefill.view().kv_address == address
    answer, _ = await legs.both(prefill, decode, "t2")
    assert handed_over(answer, "t2")
    await settled(prefill, decode)


async def test_decode_that_dies(trivet, legs):
    prefill, decode = await trivet("prefill"), await trivet("decode", transfer_last_ms=60_000)
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill)))
    await legs.prefill(prefill, held())
    await until(lambda: decode.state().pool["used"] == 3)
    decode.exit()
    await settled(prefill)
    assert counts(prefill, "lost", "released") == (1, 0)
    await asyncio.gather(decoding, return_exceptions=True)


async def test_a_prompt_that_is_not_prefills(pair, legs):
    prefill, decode = pair
    answer = await legs.prefill(prefill, held())
    streamed = await legs.decode(decode, opened(prefill), [*PROMPT, 7])
    assert len(streamed.tokens) == 4
    assert counts(prefill, "offered", "mismatched", "open") == (1, 1, 0)
    assert counts(decode, "recomputed") == (1,)
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill, "t2", first_token=True)))
    await until(lambda: "t2" in prefill.connector._transfers)
    answer = await legs.prefill(prefill, held("t2"))
    assert not handed_over(answer, "t2")
    assert "who makes the first token" in answer.json["kv_transfer_params"]["problem"]
    assert (await decoding).events[0]["error"]["code"] == 500
    for engine in pair:
        await engine.idle(nothing_held=True)


# leases and releases


async def test_a_lease_ends(trivet, legs, client):
    prefill, decode = await trivet("prefill", kv_lease_s=0.05), await trivet("decode")
    assert handed_over(await legs.prefill(prefill, held()))
    await settled(prefill)
    assert counts(prefill, "expired", "released") == (1, 0)
    assert (await legs.decode(decode, opened(prefill))).status == 200
    assert counts(prefill, "refused") == (1,)
    assert counts(decode, "recomputed") == (1,)


async def silent(prefill, name="t") -> tuple[Link, asyncio.Queue]:
    """A decode engine that opens a transfer and says nothing more."""
    said: asyncio.Queue = asyncio.Queue()
    link = Link(lambda _, message: said.put_nowait(message), lambda _: said.put_nowait(None))
    await connect(prefill.view().kv_address, link)
    link.send({"say": "open", "transfer": name, "prompt": digest(PROMPT), "first_token": False})
    return link, said


async def test_a_lease_is_renewed_by_signs_of_life(trivet, legs, client):
    prefill = await trivet("prefill", kv_lease_s=0.3)
    decode = await trivet("decode", kv_tokens=64, step_ms=10)
    busy = asyncio.create_task(client.generate(decode, [9], max_tokens=60))
    await until(lambda: decode.state().pool["used"] >= 2)
    began = time.monotonic()
    _, streamed = await legs.both(prefill, decode)
    assert time.monotonic() - began > 0.35
    assert len(streamed.tokens) == 4
    await busy
    await settled(prefill, decode)
    assert counts(prefill, "taken", "expired") == (1, 0)
    # one that is connected and does not say that it still wants it
    link, said = await silent(prefill, "t2")
    await legs.prefill(prefill, held("t2"))
    heard = [(await said.get())["say"] for _ in range(3)]
    assert heard == ["announce", "first", "lost"]
    assert counts(prefill, "expired") == (1,)
    link.close()


async def test_prefill_that_is_never_asked(trivet, legs):
    prefill, decode = await trivet("prefill", kv_lease_s=0.05), await trivet("decode")
    assert len((await legs.decode(decode, opened(prefill))).tokens) == 4
    assert counts(prefill, "refused", "expired") == (1, 0)
    answer, _ = await legs.both(prefill, decode)
    assert handed_over(answer)
    assert counts(decode, "pulled") == (1,)


async def test_a_release_frees_at_once(pair, legs):
    prefill, decode = pair
    await legs.prefill(prefill, held())
    assert counts(prefill, "open") == (1,)
    assert len((await legs.release(prefill, "t")).tokens) == 1
    assert counts(prefill, "open", "released") == (0, 1)
    for unknown in ("t", "never heard of"):
        assert (await legs.release(prefill, unknown)).status == 200
    assert counts(prefill, "released") == (1,)
    await legs.decode(decode, opened(prefill))
    assert counts(decode, "recomputed") == (1,)
    await settled(prefill, decode)


async def test_a_release_while_prefill_computes(trivet, legs):
    prefill, decode = await trivet("prefill", prefill_ms=100), await trivet("decode")
    prefilling = asyncio.create_task(legs.prefill(prefill, held()))
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill)))
    await until(lambda: decode.state().pool["used"] == 3)
    await legs.release(prefill, "t")
    assert len((await decoding).tokens) == 4
    assert not handed_over(await prefilling)
    assert counts(decode, "recomputed") == (1,)
    await settled(prefill, decode)
    assert counts(prefill, "offered", "released") == (0, 0)


async def test_an_id_that_is_in_use(pair, legs):
    prefill, decode = pair
    assert handed_over(await legs.prefill(prefill, held()))
    assert not handed_over(await legs.prefill(prefill, held()))
    await legs.decode(decode, opened(prefill))
    await settled(prefill, decode)
    assert handed_over(await legs.prefill(prefill, held()))  # once it has ended, it may begin anew
    await legs.release(prefill, "t")


# faults


@pytest.mark.parametrize("first_token", [True, False])
async def test_withhold(pair, legs, first_token):
    prefill, decode = pair
    prefill.faults.add(Fault("withhold", leg="prefill"))
    answer, _ = await legs.both(prefill, decode, first_token=first_token)
    assert not handed_over(answer)
    assert answer.json["kv_transfer_params"]["problem"].startswith("simulated fault")
    assert len(answer.tokens) == 1
    assert decode.state().requests[0].ended == ("error" if first_token else "length")
    await settled(prefill, decode)
    assert counts(prefill, "offered") == (0,)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("after_tokens", [0, 1])
@pytest.mark.parametrize("first_token", [True, False])
async def test_lose(trivet, legs, client, leg, after_tokens, first_token):
    prefill, decode = await trivet("prefill", prefill_ms=30), await trivet("decode", transfer_last_ms=20)
    expected = (await client.stream(decode, [*PROMPT[1:], 9], max_tokens=9)).tokens
    for engine in (prefill, decode):
        engine.faults.add(Fault("lose", leg=leg, after_tokens=after_tokens))
    answer, streamed = await legs.both(prefill, decode, first_token=first_token, ids=[*PROMPT[1:], 9], max_tokens=9)
    assert handed_over(answer)  # all is there; it is decode that lost it
    assert counts(decode, "failed", "pulled") == (1, 0)
    if first_token and after_tokens == 0:
        assert streamed.events[0]["error"]["code"] == 500
    else:
        assert streamed.tokens == expected[1:] if first_token else streamed.tokens == expected
        assert counts(decode, "recomputed") == (1,)
    if after_tokens == 0:  # nobody has it open: another decode engine might still come
        assert counts(prefill, "open") == (1,)
        await legs.release(prefill, "t")
    else:
        assert counts(prefill, "lost") == (1,)
    await settled(prefill, decode)


@pytest.mark.parametrize("kind", ["status", "disconnect", "die", "exit"])
async def test_faults_strike_the_opening(pair, legs, kind):
    prefill, decode = pair
    prefill.faults.add(Fault(kind, path=OPEN_PATH, leg="decode"))
    assert len((await legs.decode(decode, opened(prefill))).tokens) == 4
    assert counts(decode, "recomputed") == (1,)
    assert prefill.is_up is (kind != "exit")


async def test_an_opening_that_hangs(pair, legs):
    prefill, decode = pair
    prefill.faults.add(Fault("hang", path=OPEN_PATH, for_s=0.05))
    began = time.monotonic()
    await legs.both(prefill, decode)
    assert time.monotonic() - began >= 0.05
    assert counts(decode, "pulled") == (1,)
    prefill.faults.add(Fault("hang", path=OPEN_PATH))
    decoding = asyncio.create_task(legs.decode(decode, opened(prefill, "t2")))
    await until(lambda: prefill.faults.all()[1].used == 1)
    assert handed_over(await legs.prefill(prefill, held("t2")), "t2")
    decoding.cancel()
    await decode.idle()
    assert counts(prefill, "open") == (1,)
    await legs.release(prefill, "t2")


@pytest.mark.parametrize("tokens", [0, 1, 2])
async def test_the_answers_own_faults_count_what_decode_makes(pair, legs, tokens):
    prefill, decode = pair
    decode.faults.add(Fault("finish", leg="decode", after_tokens=tokens, reason="abort"))
    _, streamed = await legs.both(prefill, decode, first_token=True, max_tokens=9)
    assert len(streamed.tokens) == tokens
    await settled(prefill, decode)


async def test_prefill_that_hangs_is_waited_for_and_can_be_left(pair, legs):
    prefill, decode = pair
    prefill.faults.add(Fault("hang", leg="prefill"))
    both = [
        asyncio.create_task(legs.prefill(prefill, held())),
        asyncio.create_task(legs.decode(decode, opened(prefill))),
    ]
    await until(lambda: prefill.connector._transfers)
    assert (decode.state().fetching, decode.state().pool["used"]) == (1, 0)
    for task in both:
        task.cancel()
    await settled(prefill, decode)
    await until(lambda: not prefill.connector._transfers)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_nothing_is_left(trivet, legs, seed):
    chance = random.Random(seed)
    small = {"max_num_batched_tokens": 32, "step_ms": 0.5, "enable_prefix_caching": False}
    prefill = await trivet("prefill", kv_tokens=256, kv_lease_s=2, **small)  # and so long decode waits for its request
    engines = [await trivet("decode", name=f"decode-{n}", kv_tokens=160, **small) for n in range(2)]
    for kind in ("lose", "withhold"):
        for engine in (prefill, *engines):
            engine.faults.add(
                Fault(kind, probability=0.1, seed=seed, uses=None, after_tokens=chance.randrange(2), leg=None)
            )

    async def leave_after(work, seconds):
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            assert seconds < 1, "it waits for nothing"

    async def one(n):
        first_token, name = chance.random() < 0.5, f"t{n}"
        ids = [chance.randrange(300, 400) for _ in range(chance.randrange(1, 60))]
        patience = [chance.choice([chance.uniform(0, 0.2), 10.0]) for _ in range(3)]
        await asyncio.sleep(chance.uniform(0, 0.3))
        prefilling = asyncio.create_task(
            leave_after(legs.prefill(prefill, held(name, first_token=first_token), ids, rid=name), patience[0])
        )
        for engine, seconds in zip(engines, patience[1:], strict=True):
            asked = opened(prefill, name, first_token=first_token)
            answer = await leave_after(legs.decode(engine, asked, ids, rid=name), seconds)
            if answer is not None:
                break
        await prefilling
        await legs.release(prefill, name)

    async with asyncio.timeout(30):
        await asyncio.gather(*(one(n) for n in range(60)))
    await settled(prefill, *engines)
    assert not prefill.connector._transfers
    assert not prefill.connector._by_link
    assert not prefill.connector._by_sequence
    taken, expired = counts(prefill, "taken", "expired")
    assert (taken > 0, expired) == (True, 0)


# the address


async def test_the_address_is_for_this_user_only(tmp_path):
    address = f"unix:{tmp_path}/deep/er/8101.sock"
    path = Path(address.removeprefix("unix:"))
    chosen = SimSettings(kv_connector=TRIVET, kv_address=address)
    async with SimEngine(chosen) as engine:
        assert engine.view().kv_address == address
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with pytest.raises(PortInUseError, match="another engine listens at unix:"):
            await SimEngine(chosen).start()
        engine.exit()
        assert path.is_socket()  # as a process leaves it
        await engine.restart()
        link = Link(lambda *_: None, lambda _: None)
        await connect(address, link)
        link.cut()
    assert not path.exists()


async def test_what_speaks_another_language_is_cut_off(pair):
    prefill, _ = pair
    path = prefill.view().kv_address.removeprefix("unix:")
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"x" * 70_000):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(words)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_other_connectors_have_no_address(start):
    assert (await start()).view().kv_address is None
    assert (await start(kv_transfer=False, kv_connector=TRIVET)).view().kv_address is None
