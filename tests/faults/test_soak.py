"""Thousands of requests of mixed lengths while engines fail at random: nothing leaks, nothing is lost."""

import asyncio
import dataclasses
import gc
import json
import logging
import os
import random
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from helpers.stack import MODEL, QUICK, listening, stack, token_request
from trivet.render.contract import ServingError
from trivet.sim import Fault

REQUESTS = 5000
AT_ONCE = 64
WARM = 500
"""Requests before memory is measured: pools, parsers and caches have their size then."""
MEMORY_MIB = 48
"""More growth than that over the rest is a leak: 4,500 requests that leave 10 KiB each."""

FAULTS = [
    Fault("status", status=500, probability=0.01, uses=None, seed=1),
    Fault("status", status=503, probability=0.01, uses=None, seed=2),
    Fault("status", status=429, probability=0.01, uses=None, seed=3),
    Fault("status", status=502, body="<html>", content_type="text/html", probability=0.005, uses=None, seed=4),
    Fault("disconnect", probability=0.01, uses=None, seed=5),
    Fault("die", after_tokens=3, probability=0.01, uses=None, seed=6),
    Fault("garbage", garbage="json", after_tokens=2, probability=0.005, uses=None, seed=7),
    Fault("garbage", garbage="truncated", after_tokens=2, probability=0.005, uses=None, seed=8),
    Fault("garbage", garbage="between", after_tokens=1, probability=0.01, uses=None, seed=9),
    Fault("finish", reason="error", after_tokens=2, probability=0.005, uses=None, seed=10),
    Fault("finish", reason="abort", after_tokens=2, probability=0.005, uses=None, seed=11),
    Fault("close_idle", probability=0.02, uses=None, seed=12),
    Fault("slow", factor=20, probability=0.005, uses=None, seed=13),
]
SETTINGS = dataclasses.replace(QUICK, step_ms=0.2, prefill_ms_per_token=0.002, kv_lease_s=3, keep_requests=1)
TIERS = ("prefill", "prefill", "decode", "decode", "mixed")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def sockets() -> int:
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link.readlink()).startswith("socket:") for link in links if link.is_symlink())


@pytest.fixture(autouse=True)
def _nothing_is_logged():
    """What is logged is kept by pytest, which would count as a leak."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def soak(built, ask) -> Counter:
    """Asks ``REQUESTS`` times, ``AT_ONCE`` at a time; what became of them, counted."""
    outcomes: Counter = Counter()
    chance = random.Random(3)
    numbers = iter(range(REQUESTS))
    before = None

    async def client():
        nonlocal before
        for number in numbers:
            if number == WARM:
                before = resident_mib()
            prompt, tokens = chance.choice([(3, 1), (17, 4), (40, 12), (200, 30), (700, 8)])
            leaves_s = chance.random() * 0.05 if chance.random() < 0.05 else None
            try:
                async with asyncio.timeout(leaves_s):
                    outcomes[await ask(number, prompt, tokens)] += 1
            except TimeoutError:
                outcomes["left"] += 1

    async def weather():
        """Engines that end, refuse connections and come back."""
        while True:
            await asyncio.sleep(0.4)
            sim = chance.choice(built.sims)
            if chance.random() < 0.5:
                sim.faults.add(Fault("refuse", for_s=0.1))
            else:
                sim.exit()
                await asyncio.sleep(0.05)
                built.refresh()
                await asyncio.sleep(0.1)
                await sim.restart()
                built.refresh()

    storm = asyncio.create_task(weather())
    try:
        async with asyncio.timeout(240):
            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    finally:
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)
    for sim in built.sims:
        if not sim.is_up:
            await sim.restart()
    built.refresh()
    await built.at_rest(15)
    gc.collect()
    grown = resident_mib() - before
    print(f"{grown:.1f} MiB more after {REQUESTS} requests: {dict(outcomes)}")
    assert grown < MEMORY_MIB
    assert sum(outcomes.values()) == REQUESTS
    return outcomes


@pytest.mark.timeout(400)
async def test_tokens_plane():
    tasks, open_sockets = len(asyncio.all_tasks()), sockets()
    async with stack(*TIERS, settings=SETTINGS) as built:
        for sim in built.sims:
            for fault in FAULTS:
                sim.faults.add(fault)

        async def ask(number, prompt, tokens):
            count = 0
            request = token_request(tokens, prompt, start=300 + number % 97)
            try:
                async for chunk in built.legs.run(request):
                    count += len(chunk.token_ids)
                    finish = chunk.finish_reason
            except ServingError:
                return "error"
            assert (count, finish) == (tokens, "length")
            return "answered"

        outcomes = await soak(built, ask)
        assert outcomes["answered"] > 0.9 * REQUESTS, outcomes
        assert sum(one.resumes for one in built.records) > 10
        assert len(built.records) >= REQUESTS
    assert len(asyncio.all_tasks()) == tasks
    assert sockets() == open_sockets


@pytest.mark.timeout(400)
async def test_text_plane():
    tasks, open_sockets = len(asyncio.all_tasks()), sockets()
    async with stack(*TIERS, settings=SETTINGS) as built:
        for sim in built.sims:
            for fault in FAULTS:
                sim.faults.add(fault)
        connector = aiohttp.TCPConnector(limit=0)
        async with listening(built.gateway()) as url, aiohttp.ClientSession(connector=connector) as session:

            async def ask(number, prompt, tokens):
                streamed = number % 3 > 0
                body = {
                    "model": MODEL,
                    "prompt": [300 + number % 97 + n for n in range(prompt)],
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "stream": streamed,
                }
                body |= {"stream_options": {"include_usage": True}} if streamed else {}
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    text = await reply.text()
                if reply.status != 200:
                    assert json.loads(text)["error"]["code"] == reply.status
                    return "error"
                if not streamed:
                    assert json.loads(text)["usage"]["completion_tokens"] == tokens
                    return "answered"
                events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
                assert events[-1] == "[DONE]"
                last = json.loads(events[-2])
                if "error" in last:
                    return "broke off"
                assert last["usage"]["completion_tokens"] == tokens
                return "answered"

            outcomes = await soak(built, ask)
            assert outcomes["answered"] > 0.85 * REQUESTS, outcomes
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) == tasks
    assert sockets() == open_sockets
