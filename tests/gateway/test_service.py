"""A service over a worker program of a few lines (``helpers/fake_worker.py``) and over engines of someone else."""

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import helpers
from helpers.certificates import write_certificate
from helpers.foreign import ForeignEngine
from helpers.processes import holds, left_of, lives
from trivet.connectors import NixlConnector
from trivet.errors import EngineFailedError, PortInUseError, TrivetError
from trivet.gateway import service as service_module
from trivet.gateway.runs import last_url
from trivet.gateway.service import Event, Service, _Worker, guard_config
from trivet.routing.board import Board, Count
from trivet.topology import EnginePlan, Plan, parse_topology
from trivet.topology.ports import bind

WAIT_S = 10.0
FAKE_WORKER = Path(helpers.__file__).with_name("fake_worker.py")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """Runs are kept in a folder of the test's own."""
    monkeypatch.setenv("TRIVET_STATE", str(tmp_path / "state"))
    for name in ("VLLM_API_KEY", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE", "PROMETHEUS_MULTIPROC_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "state"


# the gateway's socket


def test_a_busy_port_is_told_with_what_to_do(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError) as caught:
            Service(plan_of(host="127.0.0.1", port=port), tmp_path)
    assert str(caught.value) == (
        f"the gateway cannot listen on 127.0.0.1:{port}: Address already in use -> stop what uses it, or give "
        "another: --port N, or gateway.port in the topology (0: a free one)"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_is_told(tmp_path, host):
    with pytest.raises(PortInUseError) as caught:
        Service(plan_of(host=host), tmp_path)
    assert host in caught.value.problem
    assert caught.value.mend == (
        "gateway.host: 127.0.0.1 for this machine only, 0.0.0.0 for others too, or an address of this machine"
    )


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")]
)
def test_the_address_is_one_that_a_client_on_this_machine_can_use(tmp_path, host, expected):
    with closing(Service(plan_of(host=host), tmp_path)._socket) as listener:
        service = Service(plan_of(host=host), tmp_path)
        service._socket.close()
        assert service.url == f"http://{expected}:{service._address[1]}"
        assert service._address[1] != listener.getsockname()[1]


def test_with_a_certificate_the_address_is_https(tmp_path):
    certificate, key = write_certificate(tmp_path)
    service = Service(plan_of(tls={"certificate": str(certificate), "key": str(key)}), tmp_path)
    service._socket.close()
    assert service.url == f"https://127.0.0.1:{service._address[1]}"


def test_a_certificate_that_is_not_there_is_told_before_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "bind", lambda *_, **__: pytest.fail("bound"))
    with pytest.raises(TrivetError, match=r"gateway\.tls\.certificate: /none\.pem: No such file or directory"):
        Service(plan_of(tls={"certificate": "/none.pem"}), tmp_path)


# a worker


def plan_of(
    *engines: EnginePlan, model: str = "org/model", connector=None, render_env: dict | None = None, **gateway: Any
) -> Plan:
    tiers = {"mixed": {}, "render": {"env": render_env or {}}}
    topology = parse_topology(json.dumps({"tiers": tiers, "gateway": {"port": 0, "drain_s": 5, **gateway}}))
    return Plan(topology, model, ("tiny",), connector, engines, (model, "--max-model-len", "512"))


class Program:
    """What stands for the worker's program, and what it noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.path = folder / "python"
        self.path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE_WORKER} {folder} "$@"\n')
        self.path.chmod(0o755)
        self.behave()

    def behave(self, **behaviour: object) -> None:
        """What workers do that start from now on; they report that they are ready unless told otherwise."""
        (self.folder / "behaviour.json").write_text(json.dumps({"word": {"ready": True}, **behaviour}))

    def noted(self, what: str) -> list:
        file = self.folder / what
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def pids(self) -> list[int]:
        return [one["pid"] for one in self.noted("starts")]

    def env(self, name: str) -> str | None:
        """A variable as the newest worker sees it."""
        return self.noted("starts")[-1]["env"].get(name)


@pytest.fixture
def program(tmp_path, monkeypatch):
    program = Program(tmp_path / "worker")
    monkeypatch.setattr(service_module, "sys", SimpleNamespace(executable=str(program.path)))
    monkeypatch.setattr(service_module, "_BACKOFF_S", 0.05)
    yield program
    assert left_of(program.pids) == []


class Running:
    """A worker and what was heard of it."""

    def __init__(self, worker: _Worker, log: Path, port: int, events: list[Event]) -> None:
        self.worker, self.log, self.port, self.events = worker, log, port, events
        self.state: Mapping[str, object] = {"engines": []}

    def heard(self) -> list[str]:
        return [one.state for one in self.events]

    async def refused(self) -> TrivetError:
        with pytest.raises(EngineFailedError) as caught:
            await asyncio.wait_for(self.worker.start(), WAIT_S)
        return caught.value


@asynccontextmanager
async def worker_of(tmp_path: Path, plan: Plan | None = None, metrics_dir: Path | None = None):
    events: list[Event] = []
    log = tmp_path / "gateway.log"
    with closing(bind("a worker", "127.0.0.1", 0, another="0")) as listener:
        running: Running
        worker = _Worker(
            3,
            plan or plan_of(),
            listener,
            log,
            metrics_dir,
            lambda: json.dumps(running.state).encode() + b"\n",
            events.append,
        )
        running = Running(worker, log, listener.getsockname()[1], events)
        try:
            yield running
        finally:
            await asyncio.wait_for(worker.stop(), WAIT_S)


async def test_a_worker_is_told_all_it_must_know(tmp_path, program):
    plan = plan_of(connector=NixlConnector(), api_keys=["secret"], drain_s=7)
    async with worker_of(tmp_path, plan) as one:
        one.state = {"engines": [{"name": "mixed-0"}]}
        await one.worker.start()
        (start,) = program.noted("starts")
        assert start["argv"] == ["-m", "trivet.gateway.worker"]
        assert start["port"] == one.port
        config = start["config"]
        assert {name: config[name] for name in ("flags", "connector", "api_keys", "drain_s")} == {
            "flags": ["org/model", "--max-model-len", "512"],
            "connector": "NixlConnector",
            "api_keys": ["secret"],
            "drain_s": 7.0,
        }
        assert program.noted("lines") == [{"engines": [{"name": "mixed-0"}]}]
        assert one.log.read_text() == "the worker starts\n"
        assert [(event.subject, event.state) for event in one.events] == [
            ("gateway-3", "starting"),
            ("gateway-3", "ready"),
        ]


async def test_workers_are_told_of_the_render_servers(tmp_path, program):
    tier = {"servers": ["http://a:1/", "http://b:1"], "running": 3, "queued": 5, "fallback": "refuse", "api_key": "k"}
    gateway = {"port": 0, "workers": 2, "drain_s": 5}
    topology = parse_topology(json.dumps({"tiers": {"mixed": {}, "render": tier}, "gateway": gateway}))
    async with worker_of(tmp_path, replace(plan_of(), topology=topology)) as one:
        await one.worker.start()
        (start,) = program.noted("starts")
        assert start["config"]["render_servers"] == {
            "servers": ["http://a:1", "http://b:1"],
            "running": 3,
            "queued": 5,
            "queue_s": 2.0,
            "timeout_s": 10.0,
            "fallback": "refuse",
            "local_below_bytes": 0,
            "api_key": "k",
        }


async def test_without_render_servers_workers_are_told_of_none(tmp_path, program):
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        assert program.noted("starts")[0]["config"]["render_servers"] is None


@pytest.mark.parametrize(
    ("plane", "model", "told"),
    [
        ("tokens", "org/model", "reads config and tokenizer of org/model, from the hub where they are not cached"),
        ("tokens", ".", ""),
        ("text", "org/model", ""),
    ],
)
async def test_what_a_start_waits_for_is_told(tmp_path, program, plane, model, told):
    async with worker_of(tmp_path, plan_of(model=model, plane=plane)) as one:
        await one.worker.start()
        assert (one.events[0].state, one.events[0].detail) == ("starting", told)


@pytest.mark.parametrize(
    ("flags", "wish", "obstacle"),
    [
        ((), None, None),
        (("--dtype", "x"), None, None),
        (("--logits-processors", "a:B"), None, "engines have --logits-processors, which may count the answer's tokens"),
        (("--watermark_config={}",), None, "engines have --watermark-config, which may count the answer's tokens"),
        (("--watermark-config.a=1",), None, "engines have --watermark-config.a, which may count the answer's tokens"),
        (("--logits-processors", "a:B"), True, None),
        ((), False, "gateway.continue_answers is false"),
    ],
)
async def test_a_worker_is_told_why_answers_may_not_be_continued(tmp_path, program, flags, wish, obstacle):
    engines = [EnginePlan(f"mixed-{n}", "mixed", "http://x", "cpu", "trivet", own_flags=flags * n) for n in (0, 1)]
    async with worker_of(tmp_path, plan_of(*engines, continue_answers=wish)) as one:
        await one.worker.start()
        assert program.noted("starts")[0]["config"]["obstacle"] == obstacle


async def test_the_fleets_news_reach_a_worker(tmp_path, program):
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        for number in range(3):
            one.worker.tell(json.dumps({"news": number}).encode() + b"\n")
        await holds(lambda: len(program.noted("lines")) == 4)
        assert program.noted("lines")[1:] == [{"news": number} for number in range(3)]


async def test_news_for_a_worker_that_is_not_there_are_no_fault(tmp_path, program):
    async with worker_of(tmp_path) as one:
        one.worker.tell(b"{}\n")
        await one.worker.start()
        await one.worker.stop()
        one.worker.tell(b"{}\n")


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ([], None, []),
        ([], "env-key", ["env-key"]),
        (["a", "b"], "env-key", ["a", "b"]),
        ([], "", []),
    ],
)
async def test_keys_are_the_topologys_or_else_the_environments(
    tmp_path, program, monkeypatch, given, environment, expected
):
    if environment is not None:
        monkeypatch.setenv("VLLM_API_KEY", environment)
    async with worker_of(tmp_path, plan_of(api_keys=given)) as one:
        await one.worker.start()
        assert program.noted("starts")[0]["config"]["api_keys"] == expected


async def test_a_workers_environment(tmp_path, program, monkeypatch):
    monkeypatch.setenv("TRIVET_TEST_OURS", "ours")
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        names = ("TRIVET_TEST_OURS", "VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE", "PROMETHEUS_MULTIPROC_DIR")
        assert [program.env(name) for name in names] == ["ours", "1", None, None]


async def test_the_render_tiers_environment_reaches_its_workers_and_counts_most(tmp_path, program, monkeypatch):
    monkeypatch.setenv("TRIVET_TEST_OURS", "ours")
    plan = plan_of(render_env={"TRIVET_TEST_OURS": "its", "TRIVET_TEST_NEW": "7", "VLLM_NO_USAGE_STATS": "0"})
    async with worker_of(tmp_path, plan) as one:
        await one.worker.start()
        names = ("TRIVET_TEST_OURS", "TRIVET_TEST_NEW", "VLLM_NO_USAGE_STATS")
        assert [program.env(name) for name in names] == ["its", "7", "0"]


async def test_usage_statistics_are_sent_only_if_a_person_wants_it(tmp_path, program, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        assert program.env("VLLM_NO_USAGE_STATS") == "0"


async def test_no_hub_is_asked_for_a_model_that_is_a_folder(tmp_path, program):
    async with worker_of(tmp_path, plan_of(model=str(tmp_path))) as one:
        await one.worker.start()
        assert program.env("HF_HUB_OFFLINE") == "1"


async def test_workers_that_count_together_know_where(tmp_path, program):
    async with worker_of(tmp_path, metrics_dir=tmp_path) as one:
        await one.worker.start()
        assert program.env("PROMETHEUS_MULTIPROC_DIR") == str(tmp_path)


async def test_a_worker_that_cannot_start_says_why_in_its_own_words(tmp_path, program):
    program.behave(word={"failed": "vLLM refuses the render flags: no", "mend": "look at `flags`"}, status=1)
    async with worker_of(tmp_path) as one:
        error = await one.refused()
        assert (error.problem, error.mend, error.detail) == (
            "vLLM refuses the render flags: no",
            f"look at `flags`; its log is {one.log}",
            None,
        )
        assert one.heard() == ["starting"]


async def test_a_worker_that_knows_no_mend_names_its_log(tmp_path, program):
    program.behave(word={"failed": "KeyError: 'x'", "mend": None}, words="Traceback ...", status=1)
    async with worker_of(tmp_path) as one:
        error = await one.refused()
        assert (error.problem, error.mend, error.detail) == (
            "KeyError: 'x'",
            f"its log is {one.log}",
            None,
        )


@pytest.mark.parametrize(
    ("status", "how"),
    [(0, "ended with exit status 0"), (3, "ended with exit status 3"), (137, "was ended by signal 9")],
)
async def test_a_worker_that_ends_without_a_word_is_told_so(tmp_path, program, status, how):
    program.behave(word=None, words="Killed", status=status)
    async with worker_of(tmp_path) as one:
        error = await one.refused()
        assert (error.problem, error.mend, error.detail) == (
            f"the gateway worker {how}",
            f"its log is {one.log}",
            "Killed",
        )


UNLIKE = "INFO 07-01 [x.py:1] loading\nplain ü\n\n" + json.dumps({"time": "t", "level": "INFO", "message": "m"})


async def test_all_that_a_worker_writes_is_json_if_its_log_is(tmp_path, program):
    program.behave(words=UNLIKE)
    async with worker_of(tmp_path, plan_of(log_format="json")) as one:
        await one.worker.start()
        os.kill(program.pids[0], signal.SIGKILL)
        await holds(lambda: one.heard() == ["starting", "ready", "failed", "ready"])
    lines = [json.loads(line) for line in one.log.read_text().splitlines()]
    told = [(line["level"], line["message"]) for line in lines]
    assert told == [("INFO", "INFO 07-01 [x.py:1] loading"), ("INFO", "plain ü"), ("INFO", "m")] * 2
    assert left_of(program.pids) == []


async def test_the_last_words_of_a_worker_that_failed_are_json_too(tmp_path, program):
    words = "Traceback (most recent call last):\n  File x\nKeyError: 'y'"
    program.behave(word=None, words=words, status=1)
    async with worker_of(tmp_path, plan_of(log_format="json")) as one:
        error = await one.refused()
    (line,) = [json.loads(text) for text in error.detail.splitlines()]
    assert (line["level"], line["message"], line["traceback"]) == ("ERROR", "KeyError: 'y'", words)


async def test_a_worker_that_ends_is_started_again_and_knows_the_newest_state(tmp_path, program):
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        one.state = {"engines": [], "news": 2}
        os.kill(program.pids[0], signal.SIGKILL)
        await holds(lambda: one.heard() == ["starting", "ready", "failed", "ready"])
        assert one.events[2].detail == f"was ended by signal 9; its log is {one.log}"
        assert one.events[3].detail == "again"
        first, second = program.noted("starts")
        assert second["port"] == first["port"]
        assert program.noted("lines") == [{"engines": []}, {"engines": [], "news": 2}]
        one.worker.tell(b'{"news": 3}\n')
        await holds(lambda: program.noted("lines")[-1] == {"news": 3})


async def test_a_worker_that_cannot_start_again_is_tried_again(tmp_path, program):
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        program.behave(word={"failed": "no memory", "mend": "buy some"}, status=1)
        os.kill(program.pids[0], signal.SIGKILL)
        told = f"no memory -> buy some; its log is {one.log}"
        await holds(lambda: [event.detail for event in one.events].count(told) == 2)
        program.behave()
        await holds(lambda: one.heard()[-1] == "ready")
        assert lives(program.pids[-1])


async def test_stopping_lets_a_worker_end_by_itself(tmp_path, program):
    async with worker_of(tmp_path) as one:
        await one.worker.start()
        await one.worker.stop()
        assert program.noted("ends") == program.pids
        assert one.heard() == ["starting", "ready"]
        await asyncio.sleep(0.15)
        assert len(program.pids) == 1, "it is not started again"


async def test_a_worker_that_does_not_end_is_killed(tmp_path, program):
    program.behave(stubborn=True)
    plan = plan_of()
    impatient = plan.topology.gateway.model_copy(update={"drain_s": -14.7})  # 15 s are added for what follows draining
    object.__setattr__(plan, "topology", plan.topology.model_copy(update={"gateway": impatient}))
    async with worker_of(tmp_path, plan) as one:
        await one.worker.start()
        await asyncio.wait_for(one.worker.stop(), WAIT_S)
        assert program.noted("ends") == program.pids, "it was asked first"
        assert left_of(program.pids) == []


async def test_a_worker_can_be_stopped_while_it_starts(tmp_path, program):
    program.behave(word=None)
    async with worker_of(tmp_path) as one:
        starting = asyncio.create_task(one.worker.start())
        await holds(lambda: program.noted("lines"))
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.wait_for(one.worker.stop(), WAIT_S)
        assert left_of(program.pids) == []


async def test_a_worker_that_was_not_started_can_be_stopped(tmp_path, program):
    async with worker_of(tmp_path) as one:
        await one.worker.stop()


async def test_workers_leave_no_open_files(tmp_path, program):
    def open_files() -> set[str]:
        return {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}

    async with worker_of(tmp_path) as one:
        before = open_files()
        await one.worker.start()
        os.kill(program.pids[0], signal.SIGKILL)
        await holds(lambda: len(one.heard()) == 4)
        await one.worker.stop()
        program.behave(word={"failed": "no", "mend": "yes"}, status=1)
        await one.refused()
        await asyncio.sleep(0.05)
        assert open_files() - before == set()


# the whole


@asynccontextmanager
async def serving(tmp_path: Path, *engines: ForeignEngine, **gateway: Any):
    (tmp_path / "run").mkdir()
    events: list[Event] = []
    service = Service(plan_of(*(one.plan for one in engines), **gateway), tmp_path / "run", events.append)
    async with asyncio.timeout(WAIT_S), service:
        yield service, events


async def test_a_service_is_up_when_engines_and_workers_are(tmp_path, program, state):
    async with ForeignEngine() as engine:
        async with serving(tmp_path, engine) as (service, events):
            assert {(event.subject, event.state) for event in events} == {
                ("decode-0", "waiting"),
                ("decode-0", "ready"),
                ("gateway-0", "starting"),
                ("gateway-0", "ready"),
            }
            assert service.fleet.engines["decode-0"].facts()["ready"] is True
            assert program.noted("starts")[0]["port"] == int(service.url.rpartition(":")[2])
            # the last word before clients come is the newest
            await holds(lambda: program.noted("lines")[-1]["engines"][0]["ready"])
            assert last_url() == service.url
            assert json.loads((state / "last.json").read_text())["run_dir"] == str(service.run_dir)
            assert service.gateway_log.read_text() == "the worker starts\n"
        assert left_of(program.pids) == []
        assert program.noted("ends") == program.pids


async def test_workers_hear_of_an_engine_that_is_gone(tmp_path, program):
    async with ForeignEngine() as engine, serving(tmp_path, engine) as (_, events):
        await holds(lambda: program.noted("lines")[-1]["engines"][0]["state"] == "ready")
        engine.health = 503
        await holds(lambda: program.noted("lines")[-1]["engines"][0]["state"] == "waiting")
        assert events[-1] == Event("decode-0", "waiting", f"for {engine.url}: says that it has died")


@pytest.mark.parametrize(
    ("started_by", "more"),
    [("someone else", ""), ("another host", "; trivet engine decode-0 FILE starts it there")],
)
async def test_what_is_waited_for_is_told_with_where_and_why(tmp_path, program, started_by, more):
    async with ForeignEngine(started_by=started_by) as engine:
        engine.health = None
        events: list[Event] = []
        (tmp_path / "run").mkdir()
        service = Service(plan_of(engine.plan), tmp_path / "run", events.append)
        starting = asyncio.create_task(service.__aenter__())
        expected = [f"for {engine.url}{more}", f"for {engine.url}: it does not answer there yet{more}"]
        await holds(lambda: [one.detail for one in events if one.state == "waiting"] == expected)
        engine.health = 200
        await asyncio.wait_for(starting, WAIT_S)
        await service.__aexit__(None, None, None)


async def test_several_workers_share_the_port_and_their_counts(tmp_path, program):
    async with ForeignEngine() as engine, serving(tmp_path, engine, workers=3) as (service, _):
        starts = program.noted("starts")
        assert {start["port"] for start in starts} == {int(service.url.rpartition(":")[2])}
        assert [start["env"]["PROMETHEUS_MULTIPROC_DIR"] for start in starts] == [str(tmp_path / "run" / "metrics")] * 3
        await holds(lambda: len([line for line in program.noted("lines") if line["engines"][0]["ready"]]) >= 3)


async def test_what_a_dead_worker_had_under_way_is_not_counted_any_more(tmp_path, program):
    async with ForeignEngine() as engine, serving(tmp_path, engine, workers=2) as (_, events):
        dead = program.pids[0]
        counts = tmp_path / "run" / "metrics" / f"gauge_livesum_{dead}.db"
        kept = tmp_path / "run" / "metrics" / f"counter_{dead}.db"
        for file in (counts, kept):
            file.touch()
        os.kill(dead, signal.SIGKILL)
        await holds(lambda: events[-1].detail == "again")
        assert (counts.exists(), kept.exists()) == (False, True)


async def test_what_workers_share_is_given_to_each(tmp_path, program):
    async with ForeignEngine() as engine, serving(tmp_path, engine, workers=2) as (service, _):
        shared = [start["config"]["shared"] for start in program.noted("starts")]
        assert [one.pop("worker") for one in shared] == [0, 1]
        assert shared[0] == shared[1]
        assert shared[0]["folder"] == str(tmp_path / "run")
        assert shared[0]["board_fd"] == service._shared.board.descriptor
        assert len(set(shared[0]["bell_fds"])) == 2
        for start in program.noted("starts"):
            for descriptor in (shared[0]["board_fd"], *shared[0]["bell_fds"]):
                assert Path(f"/proc/{start['pid']}/fd/{descriptor}").exists()


async def test_engines_have_slots_in_the_news(tmp_path, program):
    async with ForeignEngine() as engine, serving(tmp_path, engine) as _:
        await holds(lambda: program.noted("lines")[-1]["engines"][0]["ready"])
        assert {line["engines"][0]["slot"] for line in program.noted("lines")} == {0}


async def test_the_row_of_a_worker_that_died_is_clear_before_it_is_started_anew(tmp_path, program, monkeypatch):
    monkeypatch.setattr(service_module, "_BACKOFF_S", 0.3)
    async with ForeignEngine() as engine, serving(tmp_path, engine, workers=2) as (service, events):
        board = service._shared.board
        for number in (0, 1):
            row = Board.open(os.dup(board.descriptor), number)
            row.charge(0, 100, 1)
            row.write(Count.RUNNING, 3)
            row.close()
        os.kill(program.pids[1], signal.SIGKILL)
        await holds(lambda: events[-1].state == "failed")
        assert len(program.pids) == 2
        assert (board.outstanding_tokens(0), board.running_legs(0), board.each(Count.RUNNING)) == (100, 1, [3, 0])
        bell = service._shared.config(0).bell_fds[0]
        assert os.eventfd_read(bell) == 1, "places may have come back"
        await holds(lambda: events[-1].detail == "again")
        assert board.outstanding_tokens(0) == 100


async def test_what_workers_share_is_gone_when_the_service_is(tmp_path, program):
    async with ForeignEngine() as engine:
        async with serving(tmp_path, engine, workers=2) as (service, _):
            (tmp_path / "run" / "gateway-1.sock").touch()  # as a killed worker leaves it
            config = service._shared.config(0)
        for descriptor in (config.board_fd, *config.bell_fds):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        assert list((tmp_path / "run").glob("*.sock")) == []


async def test_an_engine_that_cannot_start_ends_the_workers_too(tmp_path, program):
    async with ForeignEngine() as engine:
        engine.version = {"version": "0.29.0"}
        with pytest.raises(EngineFailedError, match=r"^engine decode-0 at .* is vLLM 0\.29\.0 -> Trivet needs"):
            async with serving(tmp_path, engine):
                pass
    assert left_of(program.pids) == []
    assert last_url() is None


async def test_a_worker_that_cannot_start_is_the_services_error(tmp_path, program):
    program.behave(word={"failed": "the render tier cannot read the model", "mend": "give a folder"}, status=1)
    async with ForeignEngine() as engine:
        with pytest.raises(
            EngineFailedError, match=r"^the render tier cannot read the model -> give a folder; its log is "
        ):
            async with serving(tmp_path, engine):
                pass


async def test_a_service_that_still_starts_can_be_given_up(tmp_path, program):
    async with ForeignEngine() as engine:
        engine.health = None
        entering = asyncio.create_task(serving(tmp_path, engine).__aenter__())
        await holds(lambda: program.noted("lines"))
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    assert left_of(program.pids) == []


async def test_a_port_in_use_is_known_before_anything_is_started(tmp_path, program):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(PortInUseError):
            Service(plan_of(port=server.getsockname()[1]), tmp_path)
    assert program.pids == []


# who observes


def test_who_observes_may_raise(tmp_path):
    said = []

    def observe(event: Event) -> None:
        said.append(event)
        raise OSError(errno.EIO, "Input/output error")

    service = Service(plan_of(), tmp_path, observe)
    service._socket.close()
    for _ in range(2):
        service._observe(Event("a", "ready"))
    assert said == [Event("a", "ready")] * 2
    assert (tmp_path / "faults.log").read_text().count("Traceback") == 1, "it is told once"


# how pairs are watched


def watched(tmp_path, text: str = "tiers: {prefill: , decode: }", *, vocabulary: object = None, flags=((),)):
    if vocabulary is not None:
        (tmp_path / "config.json").write_text(json.dumps(vocabulary))
    engines = tuple(SimpleNamespace(own_flags=one) for one in flags)
    plan = plan_of(*engines, connector=NixlConnector(), model=str(tmp_path))
    return guard_config(replace(plan, topology=parse_topology(text)))


@pytest.mark.parametrize(
    ("flags", "are_last"),
    [
        ([("--scheduling-policy", "priority"), ("--scheduling-policy=priority",)], True),
        ([("--scheduling-policy", "priority"), ()], False),
        ([("--scheduling-policy", "fcfs")], False),
    ],
)
def test_canaries_come_last_where_every_engine_knows_what_that_is(tmp_path, flags, are_last):
    assert (watched(tmp_path, flags=flags).priority > 0) is are_last


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 512}, 512),
        ({"text_config": {"vocab_size": 99}}, 99),
        ({}, None),
        ([], None),
        ({"vocab_size": "a"}, None),
    ],
)
def test_the_vocabulary_is_that_of_the_models_folder(tmp_path, config, expected):
    assert watched(tmp_path, vocabulary=config).vocab_size == expected


def test_pairs_are_watched_unless_told_otherwise(tmp_path):
    assert watched(tmp_path).model == "tiny"
    assert watched(tmp_path, "{tiers: {prefill: , decode: }, gateway: {guard: off}}") is None
    assert guard_config(plan_of(connector=None)) is None
