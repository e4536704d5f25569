"""A whole service on simulated engines with two workers, which count, admit and answer as one."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from helpers.processes import holds, left_of
from trivet.gateway import service as service_module
from trivet.gateway.service import Service
from trivet.routing.board import Count
from trivet.topology import make_plan, parse_topology
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook

TOPOLOGY = """\
model: {name: sim-model}
kv: {connector: NixlConnector}
tiers:
  prefill: {device: sim}
  decode: {device: sim, replicas: 2, flags: {step-ms: 10}}
gateway: {plane: text, port: 0, workers: 2, split: always, drain_s: 5, limits: {running: 4, queued: 100}}
"""
PLACES = 4
WAIT_S = 60.0
"""Two workers and three engines are started, one after the other on a busy machine."""


class Client:
    """Asks on a new connection each time, so that the kernel chooses the worker."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(f"{self.url}{path}") as answer:
            return answer.status, await (answer.text() if path == "/metrics" else answer.json())

    async def ask(self, request_id: str, tokens: int) -> int | None:
        """The status of an answer of so many tokens; None if it broke off."""
        body = {"model": "sim-model", "prompt": "one two three four", "max_tokens": tokens, "ignore_eos": True}
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, headers={"X-Request-Id": request_id}
            ) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return None

    async def gauges(self) -> dict[str, float]:
        """What is under way in all workers, as the one says that happens to be asked."""
        _, text = await self.get("/metrics")
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("trivet_"): float(value) for name, _, value in lines if "_bucket" not in name}

    async def listed(self) -> dict[str, int]:
        """The worker of each request."""
        _, value = await self.get("/trivet/requests?limit=1000")
        assert value["workers_silent"] == []
        return {one["request_id"]: one["worker"] for one in value["requests"]}

    async def by_both(self, prefix: str, tokens: int = 1) -> dict[str, int]:
        """Requests of which both workers have served some."""
        for round_ in range(50):
            names = [f"{prefix}-{round_}-{number}" for number in range(16)]
            assert set(await asyncio.gather(*(self.ask(name, tokens) for name in names))) == {200}
            mine = {name: worker for name, worker in (await self.listed()).items() if name.startswith(prefix)}
            if set(mine.values()) == {0, 1}:
                return mine
        raise AssertionError("one worker served all")


@contextlib.asynccontextmanager
async def serving(tmp_path) -> AsyncIterator[tuple[Service, Client, list]]:
    machine = Machine((0, 1), 0, None, None, lambda _: False)
    plan = make_plan(parse_topology(TOPOLOGY), PortBook(lock=False), model="sim-model", machine=machine)
    (tmp_path / "run").mkdir()
    events: list = []
    service = Service(plan, tmp_path / "run", events.append)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(WAIT_S):
            await stack.enter_async_context(service)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        pids = [worker._process.pid for worker in service._workers]
        try:
            yield service, Client(service.url, session), events
        finally:
            pids += [worker._process.pid for worker in service._workers]
    assert left_of(pids) == []


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIVET_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(service_module, "_BACKOFF_S", 0.05)


def under_way(gauges: dict[str, float]) -> dict[str, float]:
    """What is not zero of what must be zero at rest."""
    names = ("generations_running", "requests_running", "requests_waiting", "kv_releases_pending", "outstanding_tokens")
    return {name: value for name, value in gauges.items() if name.startswith(names) and value}


async def test_two_workers_are_one_gateway(tmp_path):
    async with serving(tmp_path) as (service, client, events):
        board = service._shared.board

        # records: any worker tells of all
        mine = await client.by_both("first")
        for name in list(mine)[:16]:
            status, facts = await client.get(f"/trivet/requests/{name}")
            assert (status, facts["request_id"], facts["status"]) == (200, name, 200)
        assert (await client.get("/trivet/requests/none"))[0] == 404
        status, facts = await client.get("/trivet/status")
        assert [(one["worker"], one["alive"]) for one in facts["workers"]] == [(0, True), (1, True)]
        assert "slot" not in facts["engines"][0]

        # engines are chosen in turn by both together
        gauges = await client.gauges()
        assert gauges['generations_total{outcome="length",served="split"}'] == len(mine)
        assert under_way(gauges) == {}
        legs = [gauges[f'decode_leg_seconds_count{{engine="decode-{number}"}}'] for number in (0, 1)]
        assert sum(legs) == len(mine)
        assert min(legs) >= len(mine) * 0.3

        # admission: never more than the limit, and all are served
        seen = []

        async def watch() -> None:
            while True:
                seen.append((await client.gauges(), board.total(Count.RUNNING)))
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        statuses = await asyncio.gather(*(client.ask(f"burst-{number}", 15) for number in range(32)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert set(statuses) == {200}
        assert max(running for _, running in seen) == PLACES
        assert max(one["requests_running"] for one, _ in seen) == PLACES
        assert max(one["requests_waiting"] for one, _ in seen) > 8
        assert max(one['outstanding_tokens{engine="decode-0",tier="decode"}'] for one, _ in seen) > 0

        # a worker is killed with requests of its own: nothing of it is left, and the other goes on
        asking = [asyncio.create_task(client.ask(f"long-{number}", 150)) for number in range(8)]
        await holds(lambda: min(board.each(Count.RUNNING)) > 0 or all(t.done() for t in asking))
        victim = 0 if board.each(Count.RUNNING)[0] else 1
        os.kill(service._workers[victim]._process.pid, signal.SIGKILL)
        await holds(lambda: any(one.state == "failed" for one in events))
        statuses = await asyncio.gather(*asking)
        assert set(statuses) <= {200, None}
        assert 200 in statuses
        await holds(lambda: events[-1].detail == "again", WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while under_way(await client.gauges()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.by_both("last")
        assert under_way(await client.gauges()) == {}
        assert sorted(path.name for path in service.run_dir.glob("*.sock")) == ["gateway-0.sock", "gateway-1.sock"]
    assert list((tmp_path / "run").glob("*.sock")) == []
