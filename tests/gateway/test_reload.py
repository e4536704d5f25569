"""A whole service on simulated engines with two workers, whose engines are changed while streams run on them."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from itertools import groupby

import aiohttp
import pytest

from helpers.processes import children_of, holds, left_of
from trivet.errors import EngineFailedError, TrivetError
from trivet.fleet import supervisor
from trivet.gateway import service as service_module
from trivet.gateway.reload import Reload
from trivet.gateway.runs import last_service
from trivet.gateway.service import Event, Service
from trivet.sim import SimEngine, SimSettings
from trivet.topology import Plan, make_plan, parse_topology
from trivet.topology import plan as plan_module
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook

TOPOLOGY = """\
model: {name: sim-model}
kv: {connector: CONNECTOR}
tiers:
  prefill: {device: sim}
  decode: {device: sim, engines: [DECODE]}
gateway: {plane: text, port: 0, workers: 2, split: always, drain_s: 40, guard: off}
"""
FIRST = "{name: first, flags: {step-ms: 20}}"
SECOND = "{name: second, flags: {step-ms: 20}}"
TOKENS = 60
WAIT_S = 60.0
"""Two workers and three engines are started, one after the other on a busy machine."""


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIVET_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(service_module, "_BACKOFF_S", 0.05)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.05)
    monkeypatch.setattr(
        plan_module, "_FIRST_HTTP_PORT", 10_000 + os.getpid() % 20_000
    )  # away from other tests' engines


def topology(*decode: str, connector: str = "TrivetConnector", **replaced: str) -> str:
    text = TOPOLOGY.replace("DECODE", ", ".join(decode)).replace("CONNECTOR", connector)
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return text


class Live:
    """A service that serves, and clients of it."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, ports: PortBook, events: list[Event]) -> None:
        self.service, self.events = service, events
        self._session, self._ports = session, ports

    def replan(self, text: str) -> Callable[[Plan], Plan]:
        def replan(running: Plan) -> Plan:
            newer = self._ports.again()
            plan = planned(text, newer, running)
            self._ports.adopt(newer, whole=False)
            return plan

        return replan

    async def reload(self, text: str) -> Reload:
        async with asyncio.timeout(WAIT_S):
            return await self.service.reload(self.replan(text))

    async def get(self, path: str) -> str:
        async with self._session.get(f"{self.service.url}{path}") as answer:
            return await answer.text()

    async def status(self) -> dict:
        return json.loads(await self.get("/trivet/status"))

    async def all_say(self, true: Callable[[dict], bool]) -> None:
        """Returns when the workers say so, whichever is asked: twenty times in a row on a new connection each."""
        async with asyncio.timeout(WAIT_S):
            row = 0
            while row < 20:
                row = row + 1 if true(await self.status()) else 0

    async def stream(self, prompt: str, tokens: int = TOKENS, began: asyncio.Event | None = None) -> str:
        """The whole text of an answer that comes as a stream."""
        body = {"model": "sim-model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        text, done = "", False
        async with self._session.post(f"{self.service.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    if began is not None:
                        began.set()
        assert done
        return text

    async def streams(self, count: int, tokens: int = TOKENS) -> list[asyncio.Task[str]]:
        """So many that all have begun."""
        began = [asyncio.Event() for _ in range(count)]
        asking = [asyncio.create_task(self.stream(f"prompt {number}", tokens, one)) for number, one in enumerate(began)]
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(one.wait() for one in began))
        return asking

    def of(self, subject: str) -> list[str]:
        return [f"{one.state} {one.detail}".strip() for one in self.events if one.subject == subject]

    def pid(self, name: str) -> int:
        return self.service.fleet.engines[name].pid

    def slot(self, name: str) -> int:
        return self.service._slots.assign(self.service.fleet.engines)[name]

    def legs(self, name: str) -> int:
        return self.service._shared.board.running_legs(self.slot(name))


def planned(text: str, ports: PortBook, running: Plan | None = None) -> Plan:
    machine = Machine((0, 1), 0, None, None, lambda _: False)
    engines = running.engines if running is not None else ()
    return make_plan(parse_topology(text, "t.yaml"), ports, model="sim-model", machine=machine, running=engines)


@contextlib.asynccontextmanager
async def serving(tmp_path, text: str) -> AsyncIterator[Live]:
    (tmp_path / "run").mkdir()
    events: list[Event] = []
    with contextlib.closing(PortBook()) as ports:
        service = Service(planned(text, ports), tmp_path / "run", events.append)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(WAIT_S):
                await stack.enter_async_context(service)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
            live = Live(service, session, ports, events)
            yield live
            pids = [status.pid for status in service.fleet.engines.values() if status.pid]
        assert left_of(pids) == []


async def expected(count: int, tokens: int = TOKENS) -> list[str]:
    """What the answers must be: asked of one engine that nobody disturbs."""
    texts = []
    quiet = SimEngine(SimSettings(model="sim-model", kv_transfer=False), name="quiet", tier="mixed")
    async with quiet as engine, aiohttp.ClientSession() as session:
        for number in range(count):
            body = {"model": "sim-model", "prompt": f"prompt {number}", "max_tokens": tokens, "ignore_eos": True}
            async with session.post(f"{engine.url}/v1/completions", json=body) as answer:
                texts.append((await answer.json())["choices"][0]["text"])
    assert len(set(texts)) == count
    return texts


async def test_a_decode_engine_is_added_under_load(tmp_path):
    texts = await expected(12)
    async with serving(tmp_path, topology(FIRST)) as live:
        before = await live.streams(12)
        pids = {name: live.pid(name) for name in ("prefill-0", "first")}
        reload = await live.reload(topology(FIRST, SECOND))
        assert reload == Reload(1, "done", "second is new")
        assert {name: live.pid(name) for name in pids} == pids, "they are not touched"
        await live.all_say(
            lambda status: (
                [(one["name"], one["ready"]) for one in status["engines"]]
                == [("prefill-0", True), ("first", True), ("second", True)]
            )
        )
        assert await asyncio.gather(*before) == texts
        behind = await live.streams(12)
        assert min(live.legs("first"), live.legs("second")) >= 3, "it has its share, of both workers together"
        assert await asyncio.gather(*behind) == texts
        status = await live.status()
        assert status["reload"] == {"number": 1, "state": "done", "told": "second is new"}
        assert not {"number", "gone"} & set(status)
        assert [one["restarts"] for one in status["engines"]] == [0, 0, 0]
        assert json.loads((tmp_path / "run" / "reload.json").read_text()) == reload.facts()
        assert last_service().reload() == reload
        assert 'trivet_engine_ready{engine="second",tier="decode"} 1.0' in await live.get("/metrics")


@pytest.mark.parametrize("connector", ["TrivetConnector", "NixlConnector"])
async def test_a_decode_engine_is_removed_while_streams_run_on_it(tmp_path, connector):
    texts = await expected(16)
    async with serving(tmp_path, topology(FIRST, SECOND, connector=connector)) as live:
        running = await live.streams(8)
        assert live.legs("second") > 0
        engine = live.service.fleet.engines["second"]
        reloading = asyncio.create_task(live.reload(topology(FIRST, connector=connector)))
        await holds(lambda: engine.state == "leaving")
        await live.all_say(
            lambda status: [one["state"] for one in status["engines"] if one["name"] == "second"] in (["leaving"], [])
        )
        more = [asyncio.create_task(live.stream(f"prompt {number}")) for number in range(8, 16)]
        assert await asyncio.gather(*running, *more) == texts
        assert (await reloading) == Reload(1, "done", "second goes")
        assert left_of([engine.pid]) == []
        await live.all_say(lambda status: [one["name"] for one in status["engines"]] == ["prefill-0", "first"])
        assert live.of("second") == [
            *live.of("second")[:-2],
            "leaving it goes: the topology has it no more",
            "stopped",
        ], "and nothing ran there when it was stopped"
        listed = json.loads(await live.get("/trivet/requests?limit=100"))["requests"]
        generations = [one for request in listed for one in request["generations"]]
        assert len(generations) == 16
        assert {one["attempts"] for one in generations} == {1}, "nothing was asked twice"
        late = [request["generations"][0]["decode_engine"] for request in listed[:8]]
        assert set(late) == {"first"}
        text = await live.get("/metrics")
        assert 'trivet_engine_ready{engine="second"' not in text
        assert 'trivet_outstanding_tokens{engine="second"' not in text


async def test_an_engine_whose_flags_change_is_replaced(tmp_path):
    texts = await expected(8)
    async with serving(tmp_path, topology(FIRST, SECOND)) as live:
        running = await live.streams(8)
        old, kept = live.service.fleet.engines["second"], live.pid("first")
        changed = SECOND.replace("step-ms: 20", "step-ms: 5")
        reload = await live.reload(topology(FIRST, changed))
        assert reload == Reload(1, "done", "second is replaced (--step-ms)")
        assert await asyncio.gather(*running) == texts
        new = live.service.fleet.engines["second"]
        assert new.pid != old.pid
        assert live.pid("first") == kept
        assert left_of([old.pid]) == []
        assert new.plan.url == old.plan.url, "its port is free again when it has ended"
        assert "5" in new.plan.command()
        assert (new.generation, new.facts()["restarts"]) == (2, 0), "what was known of the old one is not known of it"
        states = [state for state, _ in groupby(one.split()[0] for one in live.of("second"))]
        assert states[-4:] == ["leaving", "stopped", "starting", "ready"]
        leaving = next(one for one in live.of("second") if one.startswith("leaving"))
        assert leaving == "leaving it is replaced (--step-ms): the new one starts when this one has ended"
        assert await asyncio.gather(*await live.streams(8)) == texts


async def test_a_replacement_that_does_not_come_up_leaves_the_old_one(tmp_path):
    texts = await expected(4)
    async with serving(tmp_path, topology(FIRST, SECOND)) as live:
        bad = [one.replace("step-ms: 20", "step-ms: slow") for one in (FIRST, SECOND)]
        reload = await live.reload(topology(*bad))
        assert reload.state == "failed"
        log = live.service.run_dir / "first.log"
        assert reload.told == (
            "engine first ended with exit status 2, so first is started again as before; left undone: second is "
            f"replaced -> its log is {log}"
        )
        await holds(lambda: live.service.fleet.engines["first"].state == "ready", WAIT_S)
        assert [one.plan.own_flags for one in live.service.fleet.engines.values()] == [
            (),
            ("--step-ms", "20"),
            ("--step-ms", "20"),
        ]
        assert await asyncio.gather(*await live.streams(4)) == texts
        assert (await live.reload(topology(FIRST, SECOND))) == Reload(2, "done", "nothing has changed")


async def test_new_engines_that_do_not_come_up_change_nothing(tmp_path):
    async with serving(tmp_path, topology(FIRST)) as live:
        pids = [status.pid for status in live.service.fleet.engines.values()]
        bad = "{name: bad, flags: {step-ms: slow}}"
        reload = await live.reload(topology(SECOND, bad))  # and first goes
        log = live.service.run_dir / "bad.log"
        assert reload.state == "failed"
        assert reload.told == (
            f"engine bad ended with exit status 2, so nothing was changed; left undone: first goes -> its log is {log}"
        )
        assert [status.pid for status in live.service.fleet.engines.values()] == pids
        await live.all_say(lambda status: [one["name"] for one in status["engines"]] == ["prefill-0", "first"])
        assert len(await live.stream("prompt")) > 0


async def test_an_engine_that_never_comes_up_is_given_up_for_what_is_newer(tmp_path):
    async with serving(tmp_path, topology(FIRST)) as live:
        newer = asyncio.Event()
        nowhere = "{name: nowhere, url: 'http://127.0.0.1:1'}"
        reloading = asyncio.create_task(live.service.reload(live.replan(topology(FIRST, nowhere)), newer))
        await holds(lambda: "nowhere" in live.service.fleet.engines)
        await live.all_say(lambda status: status["reload"]["state"] == "running")
        assert await live.stream("prompt", 2)
        newer.set()
        async with asyncio.timeout(WAIT_S):
            reload = await reloading
        assert reload == Reload(
            1, "failed", "nowhere did not come up before the file was to be read again, so nothing was changed"
        )
        assert list(live.service.fleet.engines) == ["prefill-0", "first"]


async def test_a_replacement_that_does_not_come_up_is_given_up_for_what_is_newer(tmp_path):
    async with serving(tmp_path, topology(FIRST, SECOND)) as live:
        newer = asyncio.Event()
        plans = live.replan(topology(FIRST, "{name: second, url: 'http://127.0.0.1:1'}"))
        reloading = asyncio.create_task(live.service.reload(plans, newer))
        await holds(lambda: live.of("second")[-1].startswith("waiting"), WAIT_S)
        newer.set()
        async with asyncio.timeout(WAIT_S):
            reload = await reloading
        assert reload == Reload(
            1,
            "failed",
            "second did not come up before the file was to be read again, so second is started again as before",
        )
        await holds(lambda: live.service.fleet.engines["second"].state == "ready", WAIT_S)
        assert live.service.fleet.engines["second"].plan.own_flags == ("--step-ms", "20")


async def test_nothing_leaves_when_the_file_is_to_be_read_again(tmp_path):
    async with serving(tmp_path, topology(FIRST)) as live:
        pid, newer = live.pid("first"), asyncio.Event()
        newer.set()
        reload = await live.service.reload(live.replan(topology(FIRST.replace("20", "5"))), newer)
        assert reload == Reload(
            1, "failed", "the file is to be read again before this: first is replaced, so nothing was changed"
        )
        assert live.pid("first") == pid


@pytest.mark.parametrize("why", ["a sibling fails", "newer"])
async def test_a_new_engine_that_serves_already_is_drained_when_it_does_not_stay(tmp_path, monkeypatch, why):
    texts, fails, health = await expected(16), asyncio.Event(), supervisor.probe.health

    async def failing(session: aiohttp.ClientSession, url: str) -> object:
        if fails.is_set() and url == "http://127.0.0.1:1":
            raise EngineFailedError("nowhere has failed")
        return await health(session, url)

    monkeypatch.setattr(supervisor.probe, "health", failing)
    async with serving(tmp_path, topology(FIRST)) as live:
        newer = asyncio.Event()
        nowhere = "{name: nowhere, url: 'http://127.0.0.1:1'}"
        plans = live.replan(topology(FIRST, SECOND, nowhere))
        reloading = asyncio.create_task(live.service.reload(plans, newer))
        await holds(lambda: "second" in live.service.fleet.engines, WAIT_S)
        await live.all_say(lambda status: any(one["name"] == "second" and one["ready"] for one in status["engines"]))
        running = await live.streams(16)
        assert live.legs("second") > 0
        (newer if why == "newer" else fails).set()
        async with asyncio.timeout(WAIT_S):
            reload = await reloading
        assert reload.state == "failed"
        assert reload.told == (
            "second, nowhere did not come up before the file was to be read again, so nothing was changed"
            if why == "newer"
            else "nowhere has failed, so nothing was changed"
        )
        assert "leaving it goes again: the reload that brought it has failed" in live.of("second")
        assert not [one for one in live.of("second") if "leg(s)" in one]
        assert list(live.service.fleet.engines) == ["prefill-0", "first"]
        assert await asyncio.gather(*running) == texts
        listed = json.loads(await live.get("/trivet/requests?limit=100"))["requests"]
        assert {one["attempts"] for request in listed for one in request["generations"]} == {1}


@pytest.mark.parametrize("where", ["join", "_drained"])
async def test_an_unforeseen_fault_is_taken_back(tmp_path, monkeypatch, where):
    async with serving(tmp_path, topology(FIRST, SECOND)) as live:
        pids = {name: live.pid(name) for name in ("prefill-0", "first", "second")}

        async def fails(*_: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(live.service.fleet if where == "join" else live.service, where, fails)
            reload = await live.reload(topology(FIRST, SECOND.replace("20", "5")))
        assert reload.state == "failed"
        assert reload.told.startswith("OSError: [Errno 24] Too many open files, so ")
        await holds(lambda: live.service.fleet.engines["second"].state == "ready", WAIT_S)
        assert live.service.fleet.engines["second"].plan.own_flags == ("--step-ms", "20")
        assert (live.pid("second") == pids["second"]) == (where == "_drained")
        assert (live.pid("first"), live.pid("prefill-0")) == (pids["first"], pids["prefill-0"])
        assert "Too many open files" in (tmp_path / "run" / "faults.log").read_text()
        assert (await live.reload(topology(FIRST))).state == "done"


async def test_a_plan_that_fails_as_nobody_foresaw_is_refused(tmp_path):
    async with serving(tmp_path, topology(FIRST)) as live:

        def replan(_: Plan) -> Plan:
            raise RuntimeError("two\nlines")

        told = f"RuntimeError: two lines -> see {tmp_path / 'run' / 'faults.log'}"
        assert (await live.service.reload(replan)) == Reload(1, "refused", told)
        assert "Traceback" in (tmp_path / "run" / "faults.log").read_text()
        assert (await live.reload(topology(FIRST))).state == "done"
    assert not (tmp_path / "run" / "reload.json").exists(), "it can be reloaded no more"


async def test_an_engine_of_someone_else_comes_and_goes(tmp_path):
    texts = await expected(4)
    settings = SimSettings(model="sim-model", step_ms=20, kv_transfer=False)
    text = topology(FIRST)
    async with SimEngine(settings, name="rented", tier="mixed") as engine, serving(tmp_path, text) as live:
        mixed = f"\n  mixed: {{engines: [{{name: rented, device: sim, url: '{engine.url}'}}]}}"
        with_it = text.replace("\ngateway:", f"{mixed}\ngateway:")
        assert (await live.reload(with_it)).told == "rented is new"
        await live.all_say(lambda status: len(status["engines"]) == 3)
        running = await live.streams(4)
        assert (await live.reload(text)).told == "rented goes"
        assert await asyncio.gather(*running) == texts
        await live.all_say(lambda status: len(status["engines"]) == 2)
        async with live._session.get(f"{engine.url}/health") as answer:
            assert answer.status == 200, "it is not stopped"


async def test_an_engine_that_is_just_being_started_again_can_be_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_BACKOFF_S", (600.0,))
    async with serving(tmp_path, topology(FIRST, SECOND)) as live:
        status = live.service.fleet.engines["second"]
        os.kill(children_of(status.pid)[0], signal.SIGKILL)
        await holds(lambda: status.state == "failed")
        changed = SECOND.replace("step-ms: 20", "step-ms: 5")
        assert (await live.reload(topology(FIRST, changed))).state == "done"
        assert live.service.fleet.engines["second"].state == "ready"
        os.kill(children_of(live.pid("first"))[0], signal.SIGKILL)
        await holds(lambda: live.service.fleet.engines["first"].state == "failed")
        assert (await live.reload(topology(changed))) == Reload(2, "done", "first goes")
        assert list(live.service.fleet.engines) == ["prefill-0", "second"]
        assert await live.stream("prompt", 4)


async def test_what_still_runs_when_the_drain_is_over_is_named(tmp_path):
    short = topology(FIRST, SECOND).replace("drain_s: 40", "drain_s: 0.5")
    async with serving(tmp_path, short) as live:
        running = await live.streams(8, tokens=1500)
        legs = live.legs("second")
        assert legs > 0
        reload = await live.reload(short.replace(f", {SECOND}", ""))
        assert reload.state == "done"
        assert f"leaving stopped after 0.5 s, with {legs} leg(s) on it" in live.of("second")
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


REFUSED = {
    "gateway.port": (
        ("port: 0", "port: 8123"),
        "t.yaml:6: gateway.port cannot change while the service runs -> put it back, or stop the service and start it "
        "anew",
    ),
    "gateway.workers": (("workers: 2", "workers: 3"), "t.yaml:6: gateway.workers cannot change while"),
    "gateway.plane": (("split: always", "split: never"), "t.yaml:6: gateway.split cannot change while"),
    "model": (("{name: sim-model}", "{name: other}"), "t.yaml:1: model.name cannot change while"),
    "connector": (("TrivetConnector", "NixlConnector"), "t.yaml:2: kv.connector cannot change while"),
    "bad file": (("prefill: {", "prefill: {gpus: [0], "), "t.yaml:4: prefill-0: gpus means nothing to a simulated"),
    "bad yaml": (("tiers:", "tiers: ]"), "t.yaml:3: not valid YAML: "),
    "shape": (
        ("kv: {", "flags: {block-size: 32}\nkv: {"),
        "--block-size cannot change while the service runs: an engine that has the new value could not hand over",
    ),
    "continued": (
        (FIRST, FIRST.replace("step-ms: 20", "logits-processors: a")),
        "whether answers may be continued on another engine cannot change while the service runs (engines have "
        "--logits-processors",
    ),
}


async def test_what_cannot_change_is_refused_by_name_and_nothing_changes(tmp_path):
    text = topology(FIRST)
    async with serving(tmp_path, text) as live:
        engines = {name: status.pid for name, status in live.service.fleet.engines.items()}
        for number, (old_new, words) in enumerate(REFUSED.values(), 1):
            assert text.count(old_new[0]) == 1, old_new
            reload = await live.reload(text.replace(*old_new).replace("first", "other"))
            assert (reload.number, reload.state) == (number, "refused")
            assert reload.told.startswith(words)
            assert "\n" not in reload.told
            assert live.of("reload")[-1] == f"refused {reload.told}"
        assert {name: status.pid for name, status in live.service.fleet.engines.items()} == engines
        await live.all_say(lambda status: status["reload"]["state"] == "refused")
        assert await live.stream("prompt", 4)


async def test_a_board_without_room_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "MOST_ENGINES", 1)  # of which there are twice as many slots
    async with serving(tmp_path, topology(FIRST)) as live:
        reload = await live.reload(topology(FIRST, SECOND))
        assert reload == Reload(
            1,
            "refused",
            "no slot for another engine: all 2 are taken -> wait until engines that left have ended, or remove some",
        )
        assert await live.stream("prompt", 4)


async def test_a_fault_of_our_own_ends_no_service(tmp_path):
    def fails(_: Plan) -> Plan:
        raise TrivetError("the file cannot be read", mend="mend it")

    async with serving(tmp_path, topology(FIRST)) as live:
        assert (await live.service.reload(fails)).told == "the file cannot be read -> mend it"


@pytest.mark.parametrize("connector", ["TrivetConnector", "NixlConnector"])
async def test_no_stream_notices_many_reloads(tmp_path, connector):
    """Engines of every tier come, change and go under clients that ask all the while."""
    texts = await expected(16, tokens=12)
    flags = ["step-ms: 4", "step-ms: 6"]
    async with serving(tmp_path, topology(FIRST, connector=connector)) as live:
        prefill = "prefill: {device: sim"
        served, over = 0, False

        async def client(number: int) -> None:
            nonlocal served
            while not over:
                assert await live.stream(f"prompt {number}", 12) == texts[number]
                served += 1

        asking = [asyncio.create_task(client(number)) for number in range(16)]
        for number in range(6):
            engine = f"{{name: other, flags: {{{flags[number % 2]}}}}}"
            text = topology(FIRST, *([engine] if number % 3 != 2 else []), connector=connector)
            if number % 2:
                text = text.replace(prefill, f"{prefill}, replicas: 2")
            assert (await live.reload(text)).state == "done"
            assert not any(one.done() for one in asking), [one for one in asking if one.done()]
        over = True
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*asking)
        assert served > 16
        board = live.service._shared.board
        assert [board.running_legs(slot) for slot in range(8)] == [0] * 8
        listed = json.loads(await live.get("/trivet/requests?limit=1000"))["requests"]
        generations = [one for request in listed for one in request["generations"]]
        assert {one["attempts"] for one in generations} == {1}, [one["reason"] for one in generations]
        assert {one["split"] for one in generations} == {True}
