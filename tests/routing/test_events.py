"""Batches of events, and the thread that hears them from simulated engines."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest
import zmq

from helpers.processes import holds
from helpers.sim_client import Client
from trivet.routing.blocks import Blocks
from trivet.routing.events import Mirror, Subscriber, UnusableError, _Subscription
from trivet.routing.held import Held
from trivet.routing.prefixes import Chain, Prefix
from trivet.sim import SimEngine, SimSettings
from trivet.sim.faults import Fault
from trivet.sim.settings import SimEvents

WAIT_S = 20.0
STORED = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": list(range(64)),
    "block_size": 64,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}


def prefix(tokens: int, salt: str | None = None, start: int = 300) -> Prefix:
    chain = Chain.of_tokens("sim", salt)
    chain.extend(range(start, start + tokens))
    return chain.prefix(tokens)


# batches


class Kept:
    def __init__(self, most: int = 100) -> None:
        self.chunks: set[int] = set()
        self.cleared = 0
        self.mirror = Mirror(Blocks("m", self.chunks.update, self.chunks.difference_update, most), self.clear)

    def clear(self) -> None:
        self.cleared += 1

    def take(self, *events, rank=0) -> int:
        self.mirror.take(msgspec.msgpack.encode([1.0, list(events), rank]))
        return len(self.chunks)


def test_stored_removed_and_cleared():
    kept = Kept()
    assert [kept.take(STORED), kept.take(REMOVED), kept.take(STORED, STORED), kept.take(REMOVED)] == [1, 0, 1, 1]
    assert (kept.take(CLEARED), kept.cleared) == (0, 1)


def test_names_may_be_bytes_and_fields_that_are_not_known_are_passed_over():
    kept = Kept()
    name = b"\1" * 32
    kept.take({**STORED, "block_hashes": [name], "session_id": "s", "ownership": None, "new": [1]})
    assert kept.take({**REMOVED, "block_hashes": [b"\2" * 32]}) == 1
    assert kept.take({**REMOVED, "block_hashes": [name]}) == 0


def test_blocks_elsewhere_than_on_the_device_are_passed_over():
    kept = Kept()
    assert kept.take({**STORED, "medium": "CPU"}) == 0
    assert kept.take(STORED, {**REMOVED, "medium": "STORAGE"}) == 1


@pytest.mark.parametrize(
    ("event", "rank", "problem"),
    [
        ({**STORED, "group_idx": 1}, 0, "several kinds of KV"),
        ({**REMOVED, "group_idx": 1}, 0, "several kinds of KV"),
        ({**STORED, "kv_cache_spec_kind": "sliding_window"}, 0, "its KV is sliding_window"),
        (STORED, 1, "data-parallel"),
        ({"type": "BlockMoved"}, 0, "cannot be read"),
        ({**STORED, "token_ids": "abc"}, 0, "cannot be read"),
        ({**STORED, "token_ids": [1]}, 0, "1 blocks of 64 tokens in 1 tokens"),
        ({**STORED, "token_ids": [-1] * 64}, 0, "make no sense"),
        ({**STORED, "extra_keys": []}, 0, "make no sense"),
        ({**STORED, "block_hashes": [1, 2, 3], "token_ids": [1] * 192}, 0, "more than 2 blocks"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(event, rank, problem):
    with pytest.raises(UnusableError, match=problem) as caught:
        Kept(2).take(event, rank=rank)
    assert "\n" not in str(caught.value)


def test_what_is_no_batch_is_said_in_one_line():
    with pytest.raises(UnusableError, match="cannot be read"):
        Kept().mirror.take(b"\xc1nothing")


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", None])
def test_kinds_of_kv_of_which_all_blocks_are_kept(kind):
    assert Kept().take({**STORED, "kv_cache_spec_kind": kind}) == 1


# the thread


class Scene:
    """A simulated engine, and who hears it."""

    def __init__(self, sim: SimEngine, client: Client) -> None:
        self.sim, self.client = sim, client
        self.held = Held()
        self.leading = True
        self.subscriber = Subscriber(self.held, "sim", lambda: self.leading)

    @property
    def view(self):
        return replace(self.sim.view(), slot=3)

    def listen(self) -> None:
        self.subscriber.update([self.view])

    async def ask(self, tokens: int, start: int = 300, **more) -> None:
        answer = await self.client.generate(self.sim, list(range(start, start + tokens)), max_tokens=1, more=more)
        assert answer.status == 200

    def tokens(self, asked: int, salt: str | None = None, start: int = 300) -> tuple[int, bool] | None:
        told = self.held.told(prefix(asked, salt, start), self.view)
        return None if told is None else (told.known.tokens, told.whole)

    async def until(self, expected, asked: int = 641, salt: str | None = None, start: int = 300) -> None:
        deadline = time.monotonic() + WAIT_S
        while (told := self.tokens(asked, salt, start)) != expected:
            assert time.monotonic() < deadline, told
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def scene(folder: Path, buffer_steps: int = 1000, **settings) -> AsyncIterator[Scene]:
    events = SimEvents(f"ipc://{folder}/e", f"ipc://{folder}/r", buffer_steps)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
        SimEngine(SimSettings(kv_transfer=False, kv_events=events, **settings)) as sim,
    ):
        made = Scene(sim, Client(session))
        try:
            yield made
        finally:
            await asyncio.to_thread(made.subscriber.close)
            made.subscriber.close()  # a second time: nothing


async def test_what_an_engine_computes_is_known(tmp_path):
    async with scene(tmp_path) as one:
        one.listen()
        await one.until((0, True))
        await one.ask(640)
        await one.until((640, True))
        assert one.tokens(641, "salt") == (0, True)
        await one.ask(200, cache_salt="salt")
        await one.until((192, True), salt="salt")


async def test_what_it_computed_before_anyone_listened_is_known(tmp_path):
    async with scene(tmp_path) as one:
        await one.ask(640)
        one.listen()
        await one.until((640, True))


async def test_what_it_evicts_is_known(tmp_path):
    async with scene(tmp_path, kv_tokens=704) as one:
        one.listen()
        await one.ask(640)
        await one.until((640, True))
        await one.ask(320, start=5000)
        await one.until((320, True), asked=321, start=5000)
        await one.until((704 - 320, True))
        answer = await one.client.generate(one.sim, list(range(300, 941)), max_tokens=1)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 704 - 320


async def test_clearing_the_cache_is_known(tmp_path):
    async with scene(tmp_path) as one:
        one.listen()
        await one.ask(640)
        await one.until((640, True))
        await one.client.post(one.sim, "/reset_prefix_cache", {})
        await one.until((0, True))


async def test_messages_that_are_lost_are_asked_for(tmp_path):
    async with scene(tmp_path) as one:
        one.listen()
        await one.until((0, True))
        one.sim.faults.add(Fault("mute", for_s=1e6))
        await one.ask(640)
        await one.until((640, True))  # though no later message told of a hole


async def test_a_hole_is_seen_at_the_next_message_and_filled(tmp_path, monkeypatch):
    monkeypatch.setattr("trivet.routing.events._PROBE_S", 1000.0)
    async with scene(tmp_path) as one:
        one.listen()
        await one.until((0, True))
        one.sim.events.mute(1e6)
        await one.ask(320)
        one.sim.events.mute(0.0)
        await one.ask(640)
        await one.until((640, True))


async def test_where_a_hole_cannot_be_filled_the_engine_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("trivet.routing.events._PROBE_S", 1000.0)
    async with scene(tmp_path, buffer_steps=1) as one:
        one.listen()
        await one.until((0, True))
        await one.ask(320)
        await one.until((320, True), asked=321)
        one.sim.events.mute(1e6)
        for start in (5000, 6000):
            await one.ask(64, start=start)
        one.sim.events.mute(0.0)
        await one.ask(128, start=7000)
        await one.until((128, False), asked=129, start=7000)
        assert one.tokens(321) == (0, False)


@pytest.mark.parametrize("seen", [True, False])
async def test_an_engine_that_is_started_anew_has_nothing(tmp_path, seen, monkeypatch):
    monkeypatch.setattr("trivet.routing.events._ANSWER_S", 0.5)
    async with scene(tmp_path) as one:
        one.listen()
        await one.ask(640)
        await one.until((640, True))
        generation = one.sim.generation
        await one.sim.restart()
        if seen:
            assert one.tokens(641) is None  # of the new one nothing was heard yet
            one.listen()
        else:  # started by someone else, so fast that nobody saw it
            one.sim.generation = generation
        await one.until((0, True))
        await one.ask(128)
        await one.until((128, True), asked=129)


async def test_an_engine_that_is_gone_is_guessed_about(tmp_path, monkeypatch):
    monkeypatch.setattr("trivet.routing.held.FRESH_S", 1.0)
    monkeypatch.setattr("trivet.routing.events._PROBE_S", 0.2)
    async with scene(tmp_path) as one:
        one.listen()
        await one.until((0, True))
        one.sim.exit()
        await one.until(None)


async def test_one_that_does_not_lead_hears_nothing_and_one_that_begins_to_asks_for_all(tmp_path):
    async with scene(tmp_path) as one:
        one.leading = False
        one.listen()
        await one.ask(640)
        await asyncio.sleep(0.6)
        assert one.tokens(641) is None
        one.leading = True
        await one.until((640, True))
        one.leading = False
        await one.until(None)


async def test_what_cannot_be_used_is_said_once_and_left_alone(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    async with scene(tmp_path) as one:
        one.sim.events._note({"type": "BlockMoved"})
        one.listen()
        deadline = time.monotonic() + WAIT_S
        while not caplog.messages:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("KV events of sim are not used: they cannot be read (")
        assert caplog.messages[0].endswith("; what it has cached is guessed")
        assert one.tokens(641) is None
        await one.sim.restart()
        one.listen()
        await one.until((0, True))


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Scene, Scene]]:
    """A scene whose subscriber hears two engines, and the other engine's: it reads what the first one hears."""
    for name in ("a", "b"):
        (folder / name).mkdir()
    async with scene(folder / "a") as one, scene(folder / "b") as other:
        other.held = one.held
        yield one, other


def named(other: Scene):
    return replace(other.sim.view(), name="other", slot=4)


async def test_an_odd_event_of_one_engine_keeps_nobody_from_hearing_another(tmp_path, caplog):
    async with two(tmp_path) as (one, other):
        one.subscriber.update([one.view, named(other)])
        await one.until((0, True))
        one.sim.events._note({**STORED, "extra_keys": []})
        await one.until(None)
        await other.ask(640)
        deadline = time.monotonic() + WAIT_S
        while (told := one.held.told(prefix(641), named(other))) is None or told.known.tokens != 640:
            assert time.monotonic() < deadline, told
            await asyncio.sleep(0.01)
        assert "KV events of sim are not used: they make no sense" in "\n".join(caplog.messages)
        assert "other" not in "\n".join(caplog.messages)


async def test_a_socket_that_fails_ends_one_subscription_which_begins_again_later(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("trivet.routing.events._ANEW_S", 0.2)
    tick, failing = _Subscription.tick, True

    def ticking(self, now_s):
        if failing and self.view.name == "sim":
            raise zmq.ZMQError(24, "Too many open files")
        tick(self, now_s)

    monkeypatch.setattr(_Subscription, "tick", ticking)
    async with two(tmp_path) as (one, other):
        one.subscriber.update([one.view, named(other)])
        deadline = time.monotonic() + WAIT_S
        while one.held.told(prefix(641), named(other)) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert one.tokens(641) is None
        await asyncio.sleep(0.6)  # it has been tried more than once
        (line,) = caplog.messages
        assert line.startswith("KV events of sim are not used: ZMQError: Too many open files")
        failing = False
        await one.until((0, True))


async def test_an_address_that_is_none_is_said_once(tmp_path, caplog):
    async with scene(tmp_path) as one:
        one.subscriber.update([replace(one.view, kv_events=("tcp://nobody", "tcp://nobody"))])
        await holds(lambda: caplog.messages)
        await asyncio.sleep(0.5)  # time for a second one
        (line,) = caplog.messages
        assert line.startswith("KV events of sim are not used: nothing can be reached at ('tcp://nobody'")


async def test_an_answer_longer_than_what_zeromq_lets_through_at_once_is_asked_for_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("trivet.routing.events._ANSWER_S", 0.5)
    async with scene(tmp_path, buffer_steps=10_000) as one:
        await one.ask(640)
        for _ in range(5000):
            one.sim.events._note({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"})
            one.sim.events._pending.cancel()
            one.sim.events._send()
        await one.ask(1280)
        one.listen()
        await one.until((1280, True), asked=1281)
