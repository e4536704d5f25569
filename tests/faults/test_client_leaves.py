"""The client leaves, at each stage of a request: engines stop at once, and no KV waits for its lease."""

import asyncio
import contextlib
import dataclasses
import random
import time

import aiohttp
import pytest

from helpers.stack import MODEL, QUICK, listening, stack, token_request

ABORT_S = 0.25
TRIES = 3
"""A machine stands still for longer now and then; not each time."""
RELEASE_S = 10.0
SLOW_PREFILL = dataclasses.replace(QUICK, prefill_ms=5000)
SLOW_DECODE = dataclasses.replace(QUICK, step_ms=50)
SLOW_PULL = dataclasses.replace(QUICK, transfer_ms_per_token=50)
OLD = {"vllm_version": "0.30.0"}

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is a trivet? " * 20}], "max_tokens": 400}


class Client:
    """Something that asks, and can leave."""

    def __init__(self, task: asyncio.Task) -> None:
        self.task = task
        self.left_s = 0.0

    async def leave(self) -> None:
        self.left_s = time.monotonic()
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def tokens_client(built) -> Client:
    async def ask():
        async for _ in built.legs.run(token_request(400)):
            pass

    return Client(asyncio.create_task(ask()))


@contextlib.asynccontextmanager
async def asking(built, how):
    """A client of the tokens plane (below rendering), or of the text plane over HTTP."""
    if how == "tokens":
        client = tokens_client(built)
        yield client
    else:
        async with listening(built.gateway()) as url, aiohttp.ClientSession() as session:

            async def ask():
                async with session.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": "stream" in how}) as reply:
                    await reply.read()

            client = Client(asyncio.create_task(ask()))
            yield client
    if not client.task.done():
        await client.leave()


async def until(condition, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        await asyncio.sleep(0.005)


async def aborted_after_s(sim, leg, client):
    """Seconds from the client's leaving to the engine's end of its leg, the last one."""
    record = [one for one in sim.state().requests if one.leg == leg][-1]
    await until(lambda: record.ended_s is not None)
    assert record.was_aborted, record.ended
    return record.ended_s - client.left_s


HOW = ["tokens", "text, streamed", "text, whole"]
VERSIONS = [{}, OLD]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("version", VERSIONS, ids=["abort endpoint", "none"])
async def test_in_prefill(how, version):
    own = {"prefill-0": dataclasses.replace(SLOW_PREFILL, **version)}
    async with stack("prefill", "decode", own=own) as built:
        prefill, decode = built.sims
        took_s = []
        while not took_s or (took_s[-1] >= ABORT_S and len(took_s) < TRIES):
            async with asking(built, how) as client:
                await until(lambda: prefill.state().running)
                await client.leave()
                await until(lambda: not prefill.state().running)
                took_s.append(await aborted_after_s(prefill, "prefill", client))
        assert min(took_s) < ABORT_S
        await built.at_rest()
        assert prefill.state().pool["used"] == 0
        assert decode.state().legs() == []


@pytest.mark.parametrize("how", HOW)
async def test_a_short_request_behind_a_prefill_that_nobody_wants_is_not_held_up(how):
    own = {"prefill-0": dataclasses.replace(QUICK, prefill_ms=600, max_num_seqs=1)}
    async with stack("prefill", "decode", own=own) as built:
        prefill = built.sims[0]
        async with contextlib.AsyncExitStack() as clients:
            leaving = [await clients.enter_async_context(asking(built, how)) for _ in range(5)]
            await until(lambda: prefill.state().running + prefill.state().waiting == 5)
            for client in leaving:
                await client.leave()
            async for _ in built.legs.run(token_request(1, 20)):
                break
            # the step that runs, as on a real engine, then its own; and not five others
            assert prefill.state().executions["prefill"] <= 2
        await built.at_rest()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("version", VERSIONS, ids=["abort endpoint", "none"])
async def test_in_decode(how, version):
    own = {"decode-0": dataclasses.replace(SLOW_DECODE, **version)}
    async with stack("prefill", "decode", own=own) as built:
        prefill, decode = built.sims
        took_s = []
        while not took_s or (took_s[-1] >= ABORT_S and len(took_s) < TRIES):
            async with asking(built, how) as client:
                await until(lambda: any(one.first_token_s for one in decode.scheduler.running))
                await client.leave()
                await until(lambda: not decode.state().running)
                took_s.append(await aborted_after_s(decode, "decode", client))
        assert min(took_s) < ABORT_S
        await built.at_rest()
        assert decode.state().pool["used"] == 0
        assert prefill.state().handovers["taken"] == len(took_s)


@pytest.mark.parametrize("how", HOW)
async def test_while_decode_waits_for_kv(how):
    async with stack("prefill", "decode", own={"prefill-0": SLOW_PULL}) as built:
        prefill, decode = built.sims
        took_s = []
        while not took_s or (took_s[-1] >= ABORT_S and len(took_s) < TRIES):
            async with asking(built, how) as client:
                await until(lambda: decode.state().fetching)
                await client.leave()
                await until(lambda: not decode.state().fetching)
                took_s.append(await aborted_after_s(decode, "decode", client))
                await until(lambda: not prefill.state().handovers["open"], RELEASE_S)
        assert min(took_s) < ABORT_S
        await built.at_rest()


@pytest.mark.parametrize("how", HOW)
async def test_while_decode_has_not_begun(how):
    own = {"decode-0": dataclasses.replace(SLOW_DECODE, max_num_seqs=1)}
    async with stack("prefill", "decode", own=own) as built:
        prefill, decode = built.sims
        other = tokens_client(built)
        await until(lambda: decode.state().running)
        async with asking(built, how) as client:
            await until(lambda: decode.state().waiting)
            await client.leave()
            await until(lambda: not prefill.state().handovers["open"], RELEASE_S)
        await other.leave()
        await built.at_rest()
        assert built.expired() == 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("decode_is_busy", [False, True])
async def test_between_the_legs(how, decode_is_busy, monkeypatch):
    """Prefill has answered, and decode has not been asked yet."""
    own = {"decode-0": dataclasses.replace(SLOW_DECODE, max_num_seqs=1)}
    async with stack("prefill", "decode", own=own) as built:
        prefill, decode = built.sims
        others = [tokens_client(built)] if decode_is_busy else []
        await until(lambda: decode.state().running == len(others))
        between = asyncio.Event()
        decode_of = built.legs._decode

        async def waiting(*args, **more):
            between.set()
            await asyncio.sleep(60)
            async for piece in decode_of(*args, **more):
                yield piece

        monkeypatch.setattr(built.legs, "_decode", waiting)
        async with asking(built, how) as client:
            await asyncio.wait_for(between.wait(), 20)
            assert prefill.state().handovers["open"] == 1
            monkeypatch.setattr(built.legs, "_decode", decode_of)
            await client.leave()
            await until(lambda: not prefill.state().handovers["open"], RELEASE_S)
        for other in others:
            await other.leave()
        await built.at_rest()
        assert built.expired() == 0
        assert "release" in decode.state().legs()


@pytest.mark.parametrize("how", HOW[1:])
async def test_in_the_queue(how):
    async with (
        stack("prefill", "decode", own={"decode-0": SLOW_DECODE}, running=1) as built,
        asking(built, how) as first,
    ):
        await until(lambda: built.admission.running)
        async with asking(built, how) as second:
            # the second one's gateway is another application over the same admission
            await until(lambda: built.admission.waiting)
            await second.leave()
            await until(lambda: not built.admission.waiting)
            assert built.admission.running == 1
        await first.leave()
        await built.at_rest()


async def test_when_prefill_answers_just_then():
    """Its answer and the client's leaving cross: what was handed over is released all the same."""
    own = {"prefill-0": dataclasses.replace(QUICK, prefill_ms=30)}
    async with stack("prefill", "decode", own=own) as built:
        chance = random.Random(7)
        for _ in range(60):
            client = tokens_client(built)
            await asyncio.sleep(0.02 + chance.random() * 0.03)
            await client.leave()
        await built.at_rest()
        assert built.expired() == 0
        counts = built.sims[0].state().handovers
        assert counts["offered"] == counts["taken"] + counts["released"] > 0


@pytest.mark.parametrize("how", HOW)
async def test_a_thousand_leave_at_random_moments(how):
    """Every gauge returns to exactly zero, and all KV is free, without one lease that ran out."""
    slow = dataclasses.replace(QUICK, prefill_ms=3, step_ms=1, transfer_ms_per_token=0.02)
    async with stack("prefill", "prefill", "decode", "decode", settings=slow, running=40) as built:
        chance = random.Random(11)
        async with contextlib.AsyncExitStack() as opened:
            url = session = None
            if how != "tokens":
                url = await opened.enter_async_context(listening(built.gateway()))
                connector = aiohttp.TCPConnector(limit=0, force_close=True)
                session = await opened.enter_async_context(aiohttp.ClientSession(connector=connector))
            body = {"model": MODEL, "prompt": "one two three " * 10, "max_tokens": 30, "stream": "stream" in how}

            async def ask():
                if how == "tokens":
                    async for _ in built.legs.run(token_request(30)):
                        pass
                else:
                    async with session.post(f"{url}/v1/completions", json=body) as reply:
                        await reply.read()

            async def ask_and_leave():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ask(), chance.random() * 0.15)

            for _ in range(20):
                await asyncio.gather(*(ask_and_leave() for _ in range(50)))
            await built.at_rest(10)
        assert built.expired() == 0
        assert len(built.records) > 300
        assert any(one.finish_reason == "abort" for one in built.records)
        for sim in built.sims:
            assert sim.state().pool["used"] == sim.state().pool["held"] == 0
