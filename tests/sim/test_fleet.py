"""Simulated engines as the fleet of a topology: started, watched, started again."""

import asyncio

import aiohttp
import pytest

from helpers.sim_client import PREFILL, PROMPT
from trivet.connectors import connector
from trivet.fleet import supervisor
from trivet.fleet.supervisor import Fleet
from trivet.topology import make_plan, parse_topology
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook

TOPOLOGY = """\
model: {name: sim-model}
tiers: {prefill: {device: sim}, decode: {device: sim, engines: [{api_key: secret}]}}
kv: {connector: NixlConnector}
gateway: {plane: text}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervisor, "_POLL_S", 0.03)
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (0.05,))


async def test_a_fleet_of_simulated_engines_hands_over_and_comes_back(tmp_path, client):
    machine = Machine((0, 1), 0, None, None, lambda _: False)
    plan = make_plan(parse_topology(TOPOLOGY), PortBook(lock=False), model="sim-model", machine=machine)
    fleet = Fleet(plan, tmp_path)
    try:
        async with asyncio.timeout(60):
            await fleet.start()
        assert [status.cached_block_tokens for status in fleet.engines.values()] == [128, 128]
        prefill, decode = (status.plan for status in fleet.engines.values())
        first = await client.generate(prefill, max_tokens=1, more={"kv_transfer_params": PREFILL})
        params = first.json["kv_transfer_params"]
        body = client.body(PROMPT, {"kv_transfer_params": params})
        answer = await client.post(decode, "/inference/v1/generate", body, Authorization="Bearer secret")
        assert len(answer.tokens) == 4
        assert (await client.get(prefill, "/sim/state")).json["handovers"]["taken"] == 1

        status = fleet.engines["decode-0"]
        assert (await client.post(decode, "/sim/faults", {"kind": "exit", "path": "/version"})).status == 200
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await client.post(decode, "/version", {})
        async with asyncio.timeout(60):
            while status.generation < 2 or not status.facts()["ready"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "a fault ends this process with status 1" in (tmp_path / "decode-0.log").read_text()
    finally:
        await fleet.stop()


async def test_a_fleet_hands_over_by_the_connector_whose_legs_start_together(tmp_path, client):
    machine = Machine((0, 1), 0, None, None, lambda _: False)
    text = TOPOLOGY.replace("NixlConnector", "TrivetConnector, options: {lease_s: 5}")
    plan = make_plan(parse_topology(text), PortBook(lock=False), model="sim-model", machine=machine)
    fleet = Fleet(plan, tmp_path)
    try:
        async with asyncio.timeout(60):
            await fleet.start()
        prefill, decode = (status.plan for status in fleet.engines.values())
        params = connector("TrivetConnector").rendezvous("t", prefill.kv_address, first_token=True)
        bodies = [client.body(PROMPT, {"kv_transfer_params": one}) for one in params]
        bodies[0]["sampling_params"]["max_tokens"] = 1
        path, key = "/inference/v1/generate", {"Authorization": "Bearer secret"}
        first, rest = await asyncio.gather(
            client.post(prefill, path, bodies[0]), client.post(decode, path, bodies[1], **key)
        )
        whole = await client.post(prefill, path, client.body(PROMPT, None))
        assert [*first.tokens, *rest.tokens] == whole.tokens
        assert (await client.get(decode, "/sim/state")).json["handovers"]["pulled"] == 1
    finally:
        await fleet.stop()
