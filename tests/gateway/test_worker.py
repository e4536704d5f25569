"""The worker's program in a process of its own; only vLLM's application in it is replaced by a few lines."""

import asyncio
import io
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import aiohttp
import pytest

from helpers.certificates import write_certificate
from helpers.engines import DONE, FakeEngine, chunk, hanging, json_answer, listening, speaking, streaming, usage, whole
from helpers.processes import holds, left_of
from helpers.render_servers import RenderServer, answering
from trivet.gateway.guard import GuardConfig
from trivet.gateway.metrics import GatewayMetrics, Rendered
from trivet.gateway.shared import Shared, SharedConfig
from trivet.gateway.tls import TlsFiles, trusting
from trivet.gateway.worker import (
    WorkerConfig,
    _beating,
    _keeps_responses,
    _left_s,
    _pool_rules,
    _rendered,
    report,
)
from trivet.journal import RequestRecord, current_request, now_s
from trivet.render.pool import PoolRules
from trivet.render.segments import CacheFigures
from trivet.routing.board import Board
from trivet.sim import Fault, SimEngine, SimSettings
from trivet.sim.settings import SimEvents
from trivet.surface.cors import CorsRules
from trivet.topology.model import Limits, RenderTier, Split

WAIT_S = 10.0

CONFIG = WorkerConfig(
    listen_fd=5,
    report_fd=6,
    flags=("/models/tiny", "--served-model-name", "tiny ü"),
    connector="NixlConnector",
    api_keys=("secret",),
    drain_s=2.5,
    plane="text",
    limits=Limits(running=3, queue_s=0.5, silence_s=None),
    allow=("request_id",),
    split=Split(min_uncached_tokens=9),
    tell_served=False,
    otlp="http://collector:4318",
    log_format="json",
    tls=TlsFiles("/etc/ü.pem", "/etc/ü.key", "secret", None),
    cors=CorsRules(("https://page.example",), ("POST",), ("*",), credentials=True),
    log_fd=12,
    events_of="tiny ü",
    shared=SharedConfig(1, 7, (8, 9), "/run/ü"),
    render_servers=RenderTier(servers=["http://a:1", "http://b:1"], running=3, queue_s=0.5, api_key="ü"),
    cache_mib=7,
    fast_tokenizer="off",
    guard=GuardConfig("tiny ü", 7.5, 99, 3, 512),
)


@pytest.mark.parametrize(
    "config", [CONFIG, WorkerConfig(listen_fd=0, report_fd=1, flags=(), connector=None, api_keys=(), drain_s=0)]
)
def test_a_config_arrives_as_it_was_sent(config):
    line = config.dump()
    assert b"\n" not in line, "the worker reads one line"
    assert WorkerConfig.parse(line) == config


@pytest.mark.parametrize(
    ("plane", "workers", "store", "kept", "left"),
    [
        ("text", 1, None, False, None),
        ("tokens", 1, "1", True, "1"),
        ("tokens", 2, None, True, None),  # vLLM keeps none, and says so itself
        ("tokens", 2, "0", True, "0"),
        ("tokens", 2, "1", False, None),
    ],
)
def test_stored_responses_are_vllms_where_one_process_has_them_all(monkeypatch, plane, workers, store, kept, left):
    monkeypatch.delenv("VLLM_ENABLE_RESPONSES_API_STORE", raising=False)
    if store is not None:
        monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", store)
    config = replace(CONFIG, plane=plane)
    assert _keeps_responses(config, SimpleNamespace(workers=workers)) is kept
    assert os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE") == left


@pytest.mark.parametrize(("workers", "running", "queued"), [(1, 10, 3), (2, 5, 2), (3, 4, 1), (64, 1, 1)])
def test_workers_share_what_render_servers_may_be_asked(workers, running, queued):
    more = {"queue_s": 1, "timeout_s": 2, "fallback": "refuse", "local_below_bytes": 7, "api_key": "k"}
    tier = RenderTier(servers=["http://a:1/", "http://b:1"], running=10, queued=3, **more)
    assert _pool_rules(tier, workers) == PoolRules(
        ("http://a:1", "http://b:1"), running, queued, 1.0, 2.0, refuses=True, local_below_bytes=7, api_key="k"
    )


def test_the_defaults_for_render_servers_are_those_of_a_lone_worker():
    assert _pool_rules(RenderTier(servers=["http://a:1"]), 1) == PoolRules(("http://a:1",))


def test_no_queue_is_no_queue_for_any_number_of_workers():
    assert _pool_rules(RenderTier(servers=["http://a:1"], queued=0), 4).queued == 0


def test_a_request_has_as_long_for_rendering_as_its_deadline_leaves():
    assert _left_s() is None
    for deadline_s, least, most in ((None, None, None), (now_s() + 60, 1, 60), (now_s() - 1, 0, 0)):
        token = current_request.set(RequestRecord("r", "/v1/completions", arrived_s=now_s(), deadline_s=deadline_s))
        try:
            left_s = _left_s()
        finally:
            current_request.reset(token)
        assert left_s is None if deadline_s is None else least <= left_s <= most


def test_a_report_that_nobody_reads_is_no_fault():
    reader, writer = os.pipe()
    os.close(reader)
    report(writer, {"ready": True})
    os.close(writer)
    report(writer, {"ready": True})


def test_a_report_is_one_line():
    reader, writer = os.pipe()
    report(writer, {"failed": "two\nlines", "mend": None})
    os.close(writer)
    with open(reader) as lines:
        assert [json.loads(line) for line in lines] == [{"failed": "two\nlines", "mend": None}]


# the program

STUB = '''
import contextlib, json, os, sys, types
from pathlib import Path
from trivet.errors import TrivetError
from trivet.render.contract import TokenRequest
from trivet.surface.http import answer

sys.modules["trivet.fleet.vllm"] = types.ModuleType("trivet.fleet.vllm")
frontend_module = types.ModuleType("trivet.render.frontend")
tokenizing = sys.modules["trivet.render.tokenizing"] = types.ModuleType("trivet.render.tokenizing")  # imports much
tokenizing.settings_of = lambda *told: told
figures = types.SimpleNamespace(bytes=1000, segments=3, asked_characters=0, found_characters=0)
linear = types.SimpleNamespace(hits=2, replays=1)


class Renderer:
    """vLLM's, with the entries that matter."""

    model_config = types.SimpleNamespace(get_vocab_size=lambda: 100)

    def get_tokenizer(self):
        return types.SimpleNamespace(max_token_id=99)

    async def render_chat_async(
        self, conversations, chat_params, tok_params=None, *, prompt_extras=None, skip_mm_cache=False
    ):
        raise NotImplementedError

    async def render_cmpl_async(self, prompts, tok_params=None, *, prompt_extras=None, skip_mm_cache=False):
        return [one.get("prompt_token_ids", [1, 2, 3]) for one in prompts]


@contextlib.asynccontextmanager
async def open_frontend(flags, engine, tokenizing):
    """Generates on the legs, and answers with the tokens; says how it was opened."""
    Path("flags").write_text(json.dumps(list(flags)))
    Path("tokenizing").write_text(json.dumps(tokenizing))
    Path("gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    if "--wrong" in flags:
        raise TrivetError("vLLM refuses the render flags: --wrong", mend="look at `flags`")
    if "--broken" in flags:
        raise KeyError("broken")

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
                Path("lifespan").open("a").write(f"{kind} ")
            return
        prompt = json.loads((await receive())["body"]).get("prompt", "Hi")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if scope["path"].endswith("/render"):
            rendered = [{"token_ids": [1, 2, 3]} for _ in prompts]
            value = rendered if "/completions/" in scope["path"] and "/chat/" not in scope["path"] else rendered[0]
            await answer(send, 200, json.dumps(value).encode(), b"application/json")
            return
        (ids,) = await renderer.render_cmpl_async([{"prompt": one} for one in prompts])
        request = TokenRequest("gen-1", ids, {"max_tokens": 2, "temperature": 0.0}, "tiny")
        figures.asked_characters += 9
        figures.found_characters += 5
        tokens = []
        async for chunk in engine.run(request):
            tokens += chunk.token_ids
        await answer(send, 200, json.dumps(tokens).encode(), b"application/json")

    renderer = Renderer()
    online = types.SimpleNamespace(renderer=renderer, use_harmony=False, model_config=renderer.model_config)
    app.state = types.SimpleNamespace(online_renderer=online, linear_derender=linear)
    core, prompts = types.SimpleNamespace(running=0), types.SimpleNamespace(fast=None, figures=figures)
    yield types.SimpleNamespace(app=app, core=core, served_names=["tiny"], max_model_len=99, prompts=prompts)
    Path("closed").touch()


frontend_module.open_frontend = open_frontend
sys.modules["trivet.render.frontend"] = frontend_module

import runpy
sys.argv = ["worker"]
runpy.run_module("trivet.gateway.worker", run_name="__main__")
'''


class Worker:
    """A worker process and what the fleet sees of it."""

    def __init__(self, process: asyncio.subprocess.Process, words: asyncio.StreamReader, url: str, folder: Path):
        self.process, self._words, self.url, self.folder = process, words, url, folder

    async def word(self) -> dict[str, Any]:
        """The next line that it reports."""
        return json.loads(await asyncio.wait_for(self._words.readline(), WAIT_S))

    def tell(self, *engines: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps({"engines": engines}).encode() + b"\n")

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


@asynccontextmanager
async def worker_of(
    folder: Path, *flags: str, drain_s: float = 1.0, log: BinaryIO | None = None, **more: Any
) -> AsyncIterator[Worker]:
    reader, writer = os.pipe()
    words = asyncio.StreamReader()
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(words), os.fdopen(reader, "rb", 0)
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            STUB,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(listener.fileno(), writer, *([log.fileno()] if log else [])),
            cwd=folder,
        )
        os.close(writer)
        values = {"connector": None, "api_keys": (), "split": Split(mode="always")} | more
        values["log_fd"] = log.fileno() if log else None
        config = WorkerConfig(listener.fileno(), writer, flags=("tiny", *flags), drain_s=drain_s, **values)
        process.stdin.write(config.dump() + b"\n" + b'{"engines": []}\n')
        try:
            yield Worker(process, words, f"http://127.0.0.1:{listener.getsockname()[1]}", folder)
        finally:
            if process.returncode is None:
                process.kill()
            print((await process.communicate())[0].decode())
            transport.close()
    assert left_of([process.pid]) == []


@pytest.fixture
async def client():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as client:
        yield client


async def status(client: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, dict[str, Any]]:
    async with client.get(f"{url}/trivet/status", headers=headers) as answer:
        return answer.status, await answer.json()


def facts(engine: FakeEngine, *, ready: bool = True) -> dict[str, Any]:
    """As the fleet tells them."""
    return {"name": engine.name, "tier": engine.tier, "url": engine.url, "ready": ready, "api_key": "of the engine"}


async def ready(client: aiohttp.ClientSession, worker: Worker) -> bool:
    async with client.get(f"{worker.url}/ready") as answer:
        return answer.status == 200


async def ask(client: aiohttp.ClientSession, worker: Worker) -> int:
    async with client.post(f"{worker.url}/v1/completions", json={}) as answer:
        return answer.status


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await true():  # noqa: ASYNC110  (the worker tells nobody)
            await asyncio.sleep(0.01)


async def test_a_worker_serves_with_the_engines_that_it_is_told(tmp_path, client):
    async with FakeEngine("mixed-0", "mixed", speaking(5, 6)) as engine, worker_of(tmp_path) as worker:
        assert await worker.word() == {"ready": True}
        assert not await ready(client, worker)
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        async with client.post(f"{worker.url}/v1/completions", json={}) as answer:
            assert (answer.status, await answer.json()) == (200, [5, 6])
        assert engine.calls[0].headers["Authorization"] == "Bearer of the engine"
        _, told = await status(client, worker.url)
        assert told["engines"][0]["name"] == "mixed-0"
        assert "api_key" not in told["engines"][0], "an engine's key is not for those who ask for the status"
        worker.tell(facts(engine, ready=False))

        async def gone() -> bool:
            return not await ready(client, worker)

        await until(gone)


async def rendering(request: Any) -> Any:
    """As the stub's own front end does."""
    body = await request.json()
    prompts = body.get("prompt", "Hi")
    rendered = [{"token_ids": [1, 2, 3]} for _ in ([prompts] if isinstance(prompts, str) else prompts)]
    return await answering(200, rendered if request.path == "/v1/completions/render" else rendered[0])(request)


async def test_a_worker_counts_what_it_renders(tmp_path, client):
    more = {"cache_mib": 7, "fast_tokenizer": "off"}
    async with FakeEngine("mixed-0", "mixed", speaking(5, 6)) as engine, worker_of(tmp_path, **more) as worker:
        assert await worker.word() == {"ready": True}
        assert json.loads((tmp_path / "tokenizing").read_text()) == [7, "off"]
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        assert [await ask(client, worker) for _ in range(2)] == [200, 200]
        async with client.get(f"{worker.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert {
            'trivet_render_characters_total{found="yes"} 10.0',
            'trivet_render_characters_total{found="no"} 8.0',
            "trivet_render_cache_bytes 1000.0",
            'trivet_render_tokenizer{name="tokenizers"} 1.0',
            "trivet_derender_hits_total 2.0",
            "trivet_derender_replays_total 1.0",
        } <= set(lines)


FIGURES = CacheFigures(bytes=50, segments=1, asked_characters=9, found_characters=4)


@pytest.mark.parametrize(
    ("prompts", "linear", "rendered"),
    [
        (None, None, Rendered("vllm")),
        (None, (3, 1), Rendered("vllm", derender_hits=3, derender_replays=1)),
        ((None, None), None, Rendered("tokenizers")),
        ((None, FIGURES), None, Rendered("tokenizers", 9, 4, 50)),
        (("gigatoken", FIGURES), (3, 1), Rendered("gigatoken", 9, 4, 50, 3, 1)),
        (("gigatoken, given up", FIGURES), None, Rendered("tokenizers", 9, 4, 50)),
    ],
)
def test_what_a_front_end_has_rendered_is_told_with_what(prompts, linear, rendered):
    state = SimpleNamespace()
    if linear is not None:
        state.linear_derender = SimpleNamespace(hits=linear[0], replays=linear[1])
    if prompts is not None:
        name, comma, _ = (prompts[0] or "").partition(",")
        fast = SimpleNamespace(name=name, distrust="other ids" if comma else None) if name else None
        prompts = SimpleNamespace(fast=fast, figures=prompts[1])
    assert _rendered(SimpleNamespace(app=SimpleNamespace(state=state), prompts=prompts)) == rendered


async def test_what_a_worker_renders_is_there_for_its_siblings_with_its_heartbeat(tmp_path):
    metrics, done = GatewayMetrics(), [Rendered("tokenizers")]
    metrics.count_rendering(lambda: done[-1])
    shared = Shared(2, 1, tmp_path)
    try:
        config = replace(CONFIG, shared=shared.config(0))
        async with _beating(config, Board.open(os.dup(config.shared.board_fd), 0), metrics):
            done.append(Rendered("tokenizers", derender_replays=4))
            await holds(lambda: metrics.registry.get_sample_value("trivet_derender_replays_total") == 4)
    finally:
        shared.close()


async def test_a_worker_has_its_render_servers_render(tmp_path, client):
    async with (
        RenderServer() as server,
        RenderServer() as other,
        FakeEngine("mixed-0", "mixed", speaking(5, 6)) as engine,
        worker_of(
            tmp_path, render_servers=RenderTier(servers=[server.url, other.url], api_key="of the servers")
        ) as worker,
    ):
        server.canaries, server.replies = rendering, answering(200, [{"token_ids": [7, 8, 9]}])
        other.canaries = answering(200, {"token_ids": [4]})
        assert await worker.word() == {"ready": True}
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        async with client.get(f"{worker.url}/ready") as answer:
            assert f"render servers that are not used: {other.url} " in await answer.text()
        headers = {"Authorization": "Bearer of the client"}
        async with client.post(f"{worker.url}/v1/completions", json={"prompt": "Hi"}, headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, [5, 6])
        assert engine.calls[0].body["token_ids"] == [7, 8, 9]
        assert server.asked[0].headers["Authorization"] == "Bearer of the servers"
        async with client.get(f"{worker.url}/metrics") as answer:
            text = await answer.text()
        assert f'trivet_render_server_requests_total{{outcome="ok",server="{server.url}"}} 1.0' in text
        assert f'trivet_render_server_up{{server="{other.url}"}} 0.0' in text
        assert "trivet_render_seconds_count 1.0" in text
        _, told = await status(client, worker.url)
        assert [one["url"] for one in told["render_servers"]] == [server.url, other.url]
        assert "of the servers" not in json.dumps(told)


async def test_a_worker_that_may_not_render_refuses_without_servers(tmp_path, client):
    tier = RenderTier(servers=["http://127.0.0.1:1"], fallback="refuse")
    async with (
        FakeEngine("mixed-0", "mixed", speaking(5, 6)) as engine,
        worker_of(tmp_path, render_servers=tier) as worker,
    ):
        assert await worker.word() == {"ready": True}
        worker.tell(facts(engine))

        async def told() -> bool:
            async with client.get(f"{worker.url}/ready") as answer:
                return "no render server can be used: http://127.0.0.1:1 cannot be reached" in await answer.text()

        await until(told)
        for path in ("completions", "messages"):
            body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
            async with client.post(f"{worker.url}/v1/{path}", json=body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert error["message"] == "no render server can be used"
        async with client.post(f"{worker.url}/v1/completions", json={"prompt": [[5, 6]]}) as answer:
            assert answer.status == 200, "there is nothing to render"
        assert [call.body["token_ids"] for call in engine.calls] == [[1, 2, 3]]


async def test_a_worker_gives_vllm_the_keys_and_wants_them_itself(tmp_path, client):
    async with worker_of(tmp_path, "--max-model-len", "512", api_keys=("one", "two")) as worker:
        await worker.word()
        flags = json.loads((tmp_path / "flags").read_text())
        assert flags == ["tiny", "--max-model-len", "512", "--api-key", "one", "two"]
        assert (await status(client, worker.url))[0] == 401
        assert (await status(client, worker.url, Authorization="Bearer two"))[0] == 200


async def test_a_worker_serves_https_and_tells_browsers_what_they_may(tmp_path, client):
    certificate, key = write_certificate(tmp_path)
    files, cors = TlsFiles(str(certificate), str(key)), CorsRules(("https://page.example",))
    async with worker_of(tmp_path, plane="text", tls=files, cors=cors) as worker:
        assert await worker.word() == {"ready": True}
        url, origin = worker.url.replace("http:", "https:"), {"Origin": "https://page.example"}
        async with client.post(f"{url}/v1/completions", ssl=trusting(certificate), headers=origin) as answered:
            assert answered.status == 503
            assert answered.headers["Access-Control-Allow-Origin"] == "https://page.example"
        with pytest.raises(aiohttp.ClientError):
            await client.get(f"{worker.url}/health")


async def test_a_worker_of_the_text_plane_keeps_no_responses_and_counts_no_rendering(tmp_path, client):
    async with worker_of(tmp_path, plane="text") as worker:
        await worker.word()
        async with client.get(f"{worker.url}/metrics") as answered:
            told = {line.split("{")[0].split(" ")[0] for line in (await answered.text()).splitlines()}
        assert {name for name in told if "render" in name and "render_seconds" not in name} == set()
        async with client.get(f"{worker.url}/v1/responses/resp_1") as answered:
            assert (answered.status, "are not kept" in (await answered.json())["error"]["message"]) == (501, True)


async def test_a_worker_of_the_text_plane_needs_no_front_end(tmp_path, client):
    answer = json_answer({"choices": []})
    async with FakeEngine("mixed-0", "mixed", answer) as engine, worker_of(tmp_path, plane="text") as worker:
        assert await worker.word() == {"ready": True}
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        async with client.post(f"{worker.url}/v1/completions", data=b'{"prompt":  "Hi"}') as answered:
            assert (answered.status, await answered.json()) == (200, {"choices": []})
        assert engine.calls[0].raw == b'{"prompt":  "Hi"}'
    assert not (tmp_path / "flags").exists()


async def test_a_worker_writes_json_and_serves_without_its_collector(tmp_path, client):
    values = {"plane": "text", "log_format": "json", "otlp": "http://127.0.0.1:1"}
    answer = json_answer({"choices": []})
    async with FakeEngine("mixed-0", "mixed", answer) as engine, worker_of(tmp_path, **values) as worker:
        await worker.word()
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        async with client.post(f"{worker.url}/v1/completions", json={"prompt": "secret"}) as answered:
            assert answered.status == 200
        assert engine.calls[0].headers["traceparent"].startswith("00-")
        worker.process.stdin.close()
        assert await worker.ended() == 0
        written = (await worker.process.stdout.read()).decode()
    lines = [json.loads(line) for line in written.splitlines()]
    (request,) = [line for line in lines if line["logger"] == "trivet.request"]
    assert (request["path"], request["status"]) == ("/v1/completions", 200)
    assert "secret" not in written


async def test_a_fault_that_nobody_catches_is_json_in_the_log(tmp_path):
    with (tmp_path / "log").open("ab") as log:
        async with worker_of(tmp_path, "--broken", log_format="json", log=log) as worker:
            assert "KeyError" in (await worker.word())["failed"]
            assert await worker.ended() == 1
            assert await worker.process.stdout.read() == b""
    (line,) = [json.loads(text) for text in (tmp_path / "log").read_text().splitlines()]
    assert (line["level"], line["logger"], line["message"]) == ("CRITICAL", "trivet", "KeyError: 'broken'")
    assert line["traceback"].startswith("Traceback (most recent call last):\n")


async def test_a_worker_hears_what_engines_hold(tmp_path, client):
    events = SimEvents(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    settings = SimSettings(model="tiny", kv_transfer=False, kv_events=events)
    sim = SimEngine(settings, name="mixed-0", tier="mixed")
    async with sim, worker_of(tmp_path, events_of="tiny") as worker:
        await worker.word()
        worker.tell({**facts(sim), "kv_events": sim.view().kv_events, "slot": 0, "cached_block_tokens": 16})

        async def hears() -> bool:
            async with client.get(f"{worker.url}/metrics") as answer:
                return 'trivet_kv_events_live{engine="mixed-0",tier="mixed"} 1.0' in await answer.text()

        await until(hears)
        assert await ask(client, worker) == 200
        async with client.get(f"{worker.url}/metrics") as answer:
            assert 'trivet_cache_known_total{by="events"} 1.0' in await answer.text()
        worker.process.stdin.close()
        assert await worker.ended() == 0


async def test_a_worker_without_the_packages_guesses_and_says_so(tmp_path, client):
    (tmp_path / "zmq.py").write_text("raise ImportError('No module named zmq')\n")  # found first, in its folder
    async with FakeEngine("mixed-0", "mixed", speaking(5)) as engine, worker_of(tmp_path, events_of="tiny") as worker:
        await worker.word()
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        assert await ask(client, worker) == 200
        worker.process.stdin.close()
        assert await worker.ended() == 0
        said = (await worker.process.stdout.read()).decode()
    assert "what engines have cached is guessed: No module named zmq (pip install pyzmq msgspec)" in said
    assert "Traceback" not in said


async def test_a_worker_keeps_to_its_limits(tmp_path, client):
    limits, go_on = Limits(running=1, queued=0, body_mib=1), asyncio.Event()
    reply = streaming(go_on, chunk(6, finish_reason="length"), usage(), DONE)
    async with FakeEngine("mixed-0", "mixed", reply) as engine, worker_of(tmp_path, limits=limits) as worker:
        await worker.word()
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        first = asyncio.create_task(ask(client, worker))
        await engine.call()
        assert await ask(client, worker) == 429
        async with client.post(f"{worker.url}/v1/completions", data=io.BytesIO(b" " * (2**20 + 1))) as answered:
            assert answered.status == 413
        async with client.post(f"{worker.url}/v1/completions", json={"request_id": "mine"}) as answered:
            assert answered.status == 400
        go_on.set()
        assert await first == 200


async def test_a_worker_ends_when_its_lifeline_does(tmp_path):
    async with worker_of(tmp_path) as worker:
        await worker.word()
        worker.process.stdin.close()
        assert await worker.ended() == 0
        assert (tmp_path / "closed").exists()
        assert (tmp_path / "lifespan").read_text() == "startup shutdown "


async def test_a_worker_ends_at_sigterm(tmp_path):
    async with worker_of(tmp_path) as worker:
        await worker.word()
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0
        assert (tmp_path / "closed").exists()
        assert (tmp_path / "lifespan").read_text() == "startup shutdown "


async def test_kv_that_a_request_leaves_at_the_end_is_released(tmp_path, client):
    """Decode has not taken it when the time for draining is over."""
    prefill = FakeEngine("prefill-0", "prefill", whole())
    decode = FakeEngine("decode-0", "decode", hanging(), speaking(5))
    async with listening(prefill, decode), worker_of(tmp_path, drain_s=0, connector="NixlConnector") as worker:
        await worker.word()
        worker.tell(*(facts(one) for one in (prefill, decode)))
        await until(lambda: ready(client, worker))
        asking = asyncio.create_task(ask(client, worker))
        await decode.call()
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0
        assert decode.legs() == ["decode", "release"]
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize(("drain_s", "request_s", "served"), [(5.0, 0.3, True), (1.0, 1.3, False)])
async def test_running_requests_may_end_for_as_long_as_the_topology_says(tmp_path, client, drain_s, request_s, served):
    """A request takes so long from when the worker is told to stop."""
    go_on = asyncio.Event()
    reply = streaming(chunk(5), go_on, chunk(6, finish_reason="length"), usage(), DONE)
    async with FakeEngine("mixed-0", "mixed", reply) as engine, worker_of(tmp_path, drain_s=drain_s) as worker:
        await worker.word()
        worker.tell(facts(engine))
        await until(lambda: ready(client, worker))
        asking = asyncio.create_task(ask(client, worker))
        call = await engine.call()
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(request_s)
        go_on.set()
        assert (await asking == 200) is served
        await call.end()
        assert call.cancelled is not served
        assert await worker.ended() == 0


async def test_flags_that_vllm_refuses_are_reported_with_their_mend(tmp_path):
    async with worker_of(tmp_path, "--wrong") as worker:
        assert await worker.word() == {"failed": "vLLM refuses the render flags: --wrong", "mend": "look at `flags`"}
        assert await worker.ended() == 1


async def test_what_nobody_foresaw_is_reported_by_name(tmp_path):
    async with worker_of(tmp_path, "--broken") as worker:
        assert await worker.word() == {"failed": "the gateway worker ended: KeyError: 'broken'", "mend": None}
        assert await worker.ended() == 1


@pytest.mark.parametrize(("given", "expected"), [(None, ""), ("1", "1")])
async def test_a_worker_sees_no_gpu_unless_told(tmp_path, monkeypatch, given, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    async with worker_of(tmp_path) as worker:
        await worker.word()
        assert (tmp_path / "gpus").read_text() == expected


async def test_a_worker_watches_its_pairs_and_names_those_that_it_does_not_use(tmp_path, client):
    settings = SimSettings(model="tiny")
    guard = GuardConfig("tiny", every_s=1.0, prompt_tokens=40, vocab_size=settings.vocab_size)
    async with AsyncExitStack() as opened:
        names = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
        sims = [await opened.enter_async_context(SimEngine(settings, name=name, tier=names[name])) for name in names]
        worker = await opened.enter_async_context(worker_of(tmp_path, connector="NixlConnector", guard=guard))
        await worker.word()
        worker.tell(*map(facts, sims))

        async def stand(*proofs: str) -> bool:
            told = (await status(client, worker.url))[1].get("pairs", [])
            return [one["proof"] for one in told] == list(proofs)

        await until(lambda: stand("good", "good"))
        sims[1].faults.add(Fault("corrupt", leg="decode", uses=None))
        await until(lambda: stand("wrong-tokens", "good"))
        async with client.get(f"{worker.url}/ready") as answer:
            told = (answer.status, await answer.text())
        assert told == (200, "pairs that are not used: prefill-0 -> decode-0 (wrong-tokens)\n")
        async with client.get(f"{worker.url}/metrics") as answer:
            text = await answer.text()
        assert 'trivet_pair_good{decode="decode-0",prefill="prefill-0"} 0.0' in text
        assert 'trivet_canaries_total{outcome="wrong-tokens"}' in text
        assert "trivet_requests_total{" not in text
        sims[1].faults.clear()
        await until(lambda: stand("good", "good"))
        worker.process.stdin.close()
        assert await worker.ended() == 0
