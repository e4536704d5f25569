"""KV events of simulated engines, as vLLM's own wire has them."""

import asyncio
import json

import msgspec
import pytest
import zmq
import zmq.asyncio

from trivet.errors import PortInUseError, TrivetError
from trivet.sim import SimEngine, SimSettings
from trivet.sim.events import Publisher
from trivet.sim.faults import Fault
from trivet.sim.options import parse
from trivet.sim.settings import SimEvents

WAIT_S = 10.0
IDS = list(range(300, 350))


@pytest.fixture
def address(tmp_path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"


class Ear:
    """Who listens, with nothing of Trivet's."""

    def __init__(self, address: tuple[str, str]) -> None:
        self._context = zmq.asyncio.Context()
        self.events = self._context.socket(zmq.SUB)
        self.events.subscribe(b"")
        self.events.connect(address[0])
        self.replays = self._context.socket(zmq.DEALER)
        self.replays.connect(address[1])

    async def hear(self) -> tuple[int, list]:
        topic, number, batch = await asyncio.wait_for(self.events.recv_multipart(), WAIT_S)
        assert topic == b""
        return read(number, batch)

    async def replay(self, since: int) -> list[tuple[int, list]]:
        await self.replays.send_multipart([b"", since.to_bytes(8, "big")])
        got = []
        while True:
            empty, topic, number, batch = await asyncio.wait_for(self.replays.recv_multipart(), WAIT_S)
            assert (empty, topic) == (b"", b"")
            if number == b"\xff" * 8:
                assert batch == b""
                return got
            got.append(read(number, batch))

    def close(self) -> None:
        self._context.destroy(linger=0)


def read(number: bytes, batch: bytes) -> tuple[int, list]:
    time_s, events, rank = msgspec.msgpack.decode(batch)
    assert time_s > 1e9
    assert rank == 0
    return int.from_bytes(number, "big"), events


@pytest.fixture
def ear(address):
    listening = Ear(address)
    yield listening
    listening.close()


def settings(address, buffer_steps: int = 100, **more) -> SimSettings:
    return SimSettings(kv_transfer=False, kv_events=SimEvents(*address, buffer_steps), **more)


async def test_blocks_that_become_whole_are_told(address, ear, client):
    async with SimEngine(settings(address)) as sim:
        await client.generate(sim, IDS, max_tokens=1, more={"cache_salt": "s"})
        ((number, (stored,)),) = await ear.replay(0)
        assert number == 0
        names = stored.pop("block_hashes")
        assert len(set(names)) == 3
        assert all(0 <= name < 2**64 for name in names)
        assert stored == {
            "type": "BlockStored",
            "parent_block_hash": None,
            "token_ids": IDS[:48],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["s"], None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        # what is found again is not told again; what follows stands under what was there
        answer = await client.generate(sim, [*IDS[:48], *range(900, 932)], max_tokens=1, more={"cache_salt": "s"})
        assert answer.status == 200
        ((_, (more,)),) = await ear.replay(1)
        assert (more["parent_block_hash"], more["token_ids"]) == (names[-1], list(range(900, 932)))
        assert more["extra_keys"] == [None, None]


async def test_blocks_that_are_given_to_others_are_told(address, ear, client):
    async with SimEngine(settings(address, kv_tokens=64)) as sim:
        await client.generate(sim, IDS, max_tokens=1)
        await client.generate(sim, list(range(900, 950)), max_tokens=1)
        events = [event for _, batch in await ear.replay(0) for event in batch]
        stored = [event["block_hashes"] for event in events if event["type"] == "BlockStored"]
        removed = [name for event in events if event["type"] == "BlockRemoved" for name in event["block_hashes"]]
        assert removed == stored[0][::-1], "the end of a prompt goes first"


async def test_a_cache_is_cleared_when_nothing_uses_it(address, ear, client):
    async with SimEngine(settings(address)) as sim:
        await client.generate(sim, IDS, max_tokens=1)
        sim.pool.hold(blocks := sim.pool.take((), 1))
        await client.post(sim, "/reset_prefix_cache", {})
        assert sim.pool.cached == 3
        sim.pool.let_go(blocks)
        sim.pool.give_back(blocks)
        await client.post(sim, "/reset_prefix_cache", {})
        assert sim.pool.cached == 0
        assert (await ear.replay(1))[0][1] == [{"type": "AllBlocksCleared"}]
        again = await client.generate(sim, IDS, max_tokens=1)
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_they_are_sent_in_order_and_kept_for_a_while(address, ear, client):
    async with SimEngine(settings(address, 2)) as sim:
        while True:  # a subscription takes a moment, and what was sent before is lost
            await client.generate(sim, IDS, max_tokens=1)
            sim.events.cleared()
            try:
                first, _ = await asyncio.wait_for(ear.hear(), 0.1)
                break
            except TimeoutError:
                await client.post(sim, "/reset_prefix_cache", {})
        for _ in range(3):
            sim.events.cleared()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        heard = [await ear.hear() for _ in range(3)]
        assert [number for number, _ in heard] == [first + 1, first + 2, first + 3]
        kept = await ear.replay(0)
        assert len(kept) == 2
        assert await ear.replay(kept[-1][0]) == kept[-1:]
        assert await ear.replay(kept[-1][0] + 1) == []


async def test_the_fault_mute_keeps_them_for_who_asks(address, ear):
    async with SimEngine(settings(address)) as sim:
        sim.faults.add(Fault("mute", for_s=1e6))
        sim.events.cleared()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ear.hear(), 0.3)
        assert await ear.replay(0) == [(0, [{"type": "AllBlocksCleared"}])]
    with pytest.raises(TrivetError, match="for_s is None"):
        Fault("mute")


async def test_an_engine_that_is_started_anew_counts_from_0(address, ear):
    async with SimEngine(settings(address)) as sim:
        for _ in range(3):
            sim.events.cleared()
            await asyncio.sleep(0.01)
        assert [number for number, _ in await ear.replay(0)] == [0, 1, 2]
        sim.exit()
        await sim.restart()
        assert await ear.replay(0) == []
        sim.events.cleared()
        await asyncio.sleep(0.01)
        assert [number for number, _ in await ear.replay(0)] == [0]


async def test_a_taken_address_is_said():
    context = zmq.Context()
    taken = context.socket(zmq.ROUTER)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    publisher = Publisher(SimEvents(f"tcp://*:{port}", f"tcp://127.0.0.1:{port}"), 16)
    try:
        with pytest.raises(PortInUseError, match=f"KV events: tcp://.*:{port} is taken"):
            await publisher.open()
    finally:
        await publisher.close()
        context.destroy(linger=0)


def test_the_flag():
    told = {"enable_kv_cache_events": True, "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2", "buffer_steps": 3}
    flags = ["--kv-events-config", json.dumps(told)]
    assert parse(["serve", "m", *flags])[0].kv_events == SimEvents("tcp://*:1", "tcp://*:2", 3)
    assert SimEngine(parse(["serve", "m", *flags])[0]).view().kv_events == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert parse(["serve", "m"])[0].kv_events is None
    for off in ({}, {**told, "enable_kv_cache_events": False}, {**told, "publisher": "null"}):
        assert parse(["serve", "m", "--kv-events-config", json.dumps(off)])[0].kv_events is None


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"enable_kv_cache_events": true}',
        '{"enable_kv_cache_events": true, "endpoint": "a", "replay_endpoint": "tcp://*:1"}',
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:2", "replay_endpoint": "tcp://*:1", "buffer_steps": 0}',
    ],
)
def test_a_flag_that_is_wrong_is_said_in_one_line(config):
    with pytest.raises(TrivetError) as caught:
        parse(["serve", "m", "--kv-events-config", config])
    assert str(caught.value).startswith("simulated engine: ")
    assert "\n" not in str(caught.value)
