"""The gateway's HTTP protocol over sockets: tokens that go on as they came, to clients of every kind."""

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import uvicorn
from aiohttp import web

from helpers.engines import DONE, HANDED_OVER, FakeEngine, json_answer, listening
from helpers.garbage import collect
from helpers.loops import on_both_loops
from helpers.processes import holds
from trivet.connectors import NixlConnector
from trivet.gateway import server
from trivet.gateway.app import GENERATING, GatewayApp
from trivet.gateway.metrics import GatewayMetrics
from trivet.gateway.server import GatewayProtocol
from trivet.gateway.text import TextApp
from trivet.journal import GenerationRecord, Journal
from trivet.legs import express
from trivet.legs.life import Legs
from trivet.legs.wire import open_session
from trivet.routing.engines import Engines
from trivet.surface.chunks import CHUNKS
from trivet.surface.streams import MESSAGES

CHAT = "/v1/chat/completions"
WAIT_S = 20.0


def delta(content: str, finish: str | None = None) -> bytes:
    event = {"id": "c", "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


class Stream:
    """A decode engine's answer that a test writes."""

    def __init__(self) -> None:
        self.answer: web.StreamResponse | None = None
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.written = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await self.answer.prepare(request)
        self.begun.set()
        await self.over.wait()
        await self.answer.write_eof()
        return self.answer

    async def write(self, event: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.begun.wait()
            assert self.answer is not None
            await self.answer.write(event)
        self.written += len(event)


class Scene:
    def __init__(self, port: int, stream: Stream, app: GatewayApp, journal: Journal, server: uvicorn.Server) -> None:
        self.port, self.stream, self.app, self.journal, self.server = port, stream, app, journal, server

    @property
    def generation(self) -> GenerationRecord:
        (record,) = self.journal.newest(1)
        return record.generations[0]

    @contextlib.asynccontextmanager
    async def asking(
        self, version: str = "1.1", more: str = "", path: str = CHAT, stream: bool = True
    ) -> AsyncIterator[asyncio.StreamReader]:
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}{more}\r\n\r\n".encode() + body)
        try:
            yield reader
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def scene(unread_s: float | None = None, drain_s: int | None = None) -> AsyncIterator[Scene]:
    stream = Stream()
    prefill = FakeEngine("prefill-0", "prefill", json_answer({"choices": [], "kv_transfer_params": HANDED_OVER}))
    decode = FakeEngine("decode-0", "decode", stream)
    async with listening(prefill, decode), open_session() as session:
        engines, metrics, journal = Engines(), GatewayMetrics(), Journal()
        engines.update([prefill.view(), decode.view()])
        legs = Legs(engines, session, NixlConnector(), metrics.ended)
        plane = TextApp(engines, legs, GENERATING)
        told = {"fleet": dict, "journal": journal, "stopping": lambda: serves.should_exit}
        app = GatewayApp(plane, engines, legs, metrics, guards_itself=False, **told)
        config = uvicorn.Config(
            app,
            http=GatewayProtocol.cutting_off(unread_s),
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=drain_s,
        )
        serves = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(serves.serve([listener]))
        await holds(lambda: serves.started)
        yield Scene(listener.getsockname()[1], stream, app, journal, serves)
        stream.over.set()
        serves.should_exit = True
        await serving
        await legs.close()


async def flood(one: Scene) -> None:
    for number in range(1_500):
        await one.stream.write(delta(f"{number} {'x' * 20_000}"))


async def chunks(reader: asyncio.StreamReader, most: int = 10**9) -> list[bytes]:
    """The next chunks of an answer, at most so many; to its end else."""
    found: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < most and (size := int(await reader.readline(), 16)):
            found.append(await reader.readexactly(size))
            assert await reader.readexactly(2) == b"\r\n"
    return found


@pytest.fixture
def by_itself(monkeypatch) -> list[bytes]:
    """What went on without being read."""
    seen: list[bytes] = []
    init = express.Express.__init__

    def watched(self, answer, is_known, write, passed=lambda _: None):
        init(self, answer, is_known, write and (lambda data: write(data) and not seen.append(data)), passed)

    monkeypatch.setattr(express.Express, "__init__", watched)
    return seen


@on_both_loops
async def test_tokens_go_on_by_themselves_each_when_it_comes(by_itself):
    async with scene() as one, one.asking() as reader:
        head, got = None, []
        for number in range(6):
            await one.stream.write(delta(f"token {number} \U0001f600\\n"))
            head = head or await reader.readuntil(b"\r\n\r\n")
            got += await chunks(reader, 1)
        await one.stream.write(delta("", "stop"))
        await one.stream.write(DONE)
        one.stream.over.set()
        got += await chunks(reader)
        assert got == [delta(f"token {number} \U0001f600\\n") for number in range(6)] + [delta("", "stop"), DONE]
        assert b"transfer-encoding: chunked" in head.lower()
        assert len(by_itself) >= 4
        record = one.generation
        assert (record.completion_tokens, record.finish_reason) == (7, "stop")
        assert sum(record.gaps.one) == 6


@on_both_loops
async def test_a_client_of_http_1_0_gets_the_same():
    """uvicorn answers it in chunks too, as it does where nothing goes on by itself."""
    async with scene() as one, one.asking("1.0") as reader:
        for number in range(4):
            await one.stream.write(delta(str(number)))
            await asyncio.sleep(0.01)
        await one.stream.write(DONE)
        one.stream.over.set()
        assert b"transfer-encoding: chunked" in (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"".join(await chunks(reader)) == b"".join(delta(str(number)) for number in range(4)) + DONE


@on_both_loops
async def test_a_client_that_reads_slowly_holds_the_engine_back_and_gets_everything(by_itself):
    events = [delta(f"{number} {'x' * 20_000}") for number in range(1_500)]
    async with scene() as one, one.asking() as reader:
        for event in events[:5]:
            await one.stream.write(event)
            await asyncio.sleep(0.02)
        assert by_itself

        async def write() -> None:
            for event in events[5:]:
                await one.stream.write(event)
            await one.stream.write(DONE)
            one.stream.over.set()

        writing = asyncio.create_task(write())
        before = -1
        while before != one.stream.written:  # until nothing goes on any more
            before = one.stream.written
            await asyncio.sleep(0.3)
        (connection,) = one.server.server_state.connections
        assert connection.transport.get_write_buffer_size() < 2**20
        assert one.stream.written < 0.8 * len(b"".join(events))
        await reader.readuntil(b"\r\n\r\n")
        got = b"".join(await chunks(reader))
        await writing
    assert got == b"".join(events) + DONE


@pytest.mark.parametrize("how", ["for too long", "when its time is up"])
@on_both_loops
async def test_a_client_that_stops_reading_is_cut_off(how):
    unread_s, more = (0.5, "") if how == "for too long" else (None, "\r\nx-trivet-deadline-s: 1")
    async with scene(unread_s) as one, one.asking(more=more):
        with contextlib.suppress(ConnectionError):  # the leg has ended
            for number in range(1_500):
                await one.stream.write(delta(f"{number} {'x' * 20_000}"))
        await holds(lambda: one.generation.finish_reason or one.generation.error)
        await holds(lambda: not one.server.server_state.connections)
        if how == "for too long":
            assert one.generation.finish_reason == "abort"
        else:
            assert one.generation.error == "the request's deadline has passed"
        await holds(lambda: not one.app.gauges().requests_running)


@on_both_loops
async def test_a_client_that_reads_a_little_is_not_cut_off():
    async with scene(0.8) as one, one.asking() as reader:
        writing = asyncio.create_task(flood(one))
        read_bytes = 0
        for _ in range(8):
            await asyncio.sleep(0.2)
            async with asyncio.timeout(WAIT_S):
                read_bytes += len(await reader.readexactly(1_000_000))
        assert one.server.server_state.connections
        assert one.generation.finish_reason is None
        writing.cancel()


@on_both_loops
async def test_a_client_that_leaves_ends_the_leg():
    async with scene() as one:
        async with one.asking() as reader:
            for number in range(4):
                await one.stream.write(delta(str(number)))
                if not number:
                    await reader.readuntil(b"\r\n\r\n")
                await chunks(reader, 1)
        await holds(lambda: one.generation.finish_reason)
        assert (one.generation.finish_reason, one.generation.completion_tokens) == ("abort", 4)


@on_both_loops
async def test_one_connection_may_ask_again():
    """The next answer of a connection has a way of its own."""
    async with scene() as one, one.asking() as reader:
        await one.stream.write(delta("a"))
        await one.stream.write(DONE)
        one.stream.over.set()
        await reader.readuntil(b"\r\n\r\n")
        assert await chunks(reader) == [delta("a"), DONE]
        (connection,) = one.server.server_state.connections
        assert not connection.cycle.scope["extensions"][CHUNKS].write(b"1\r\nx\r\n")


@on_both_loops
async def test_what_requests_leave_goes_without_the_collector():
    collect()
    gc.disable()
    try:
        async with scene() as one:
            one.stream.over.set()
            for _ in range(20):
                async with one.asking() as reader, asyncio.timeout(WAIT_S):
                    await reader.readuntil(b"\r\n\r\n")
            await holds(lambda: not one.server.server_state.connections)
            await asyncio.sleep(0.05)
            assert sum(isinstance(left, GatewayProtocol) for left in gc.get_objects()) == 0
    finally:
        gc.enable()


def test_a_uvicorn_that_is_not_known_writes_nothing_and_says_so_once(monkeypatch, caplog):
    class Odd:
        pass

    monkeypatch.setattr(server._Writer, "_fits", True)
    protocol = Odd()
    writer = server._Writer(protocol)
    protocol.cycle = SimpleNamespace(scope={"extensions": {CHUNKS: writer}})
    assert not writer.write(b"1\r\nx\r\n")
    assert not writer.write(b"1\r\nx\r\n")
    (line,) = caplog.messages
    assert line.startswith("this uvicorn is not known (")


@on_both_loops
async def test_a_fault_of_our_own_is_not_the_engines(monkeypatch, caplog):
    def odd(*_):
        raise RuntimeError("odd")

    monkeypatch.setattr(server._Writer, "write", odd)
    async with scene() as one, one.asking() as reader:
        await one.stream.write(delta("0"))
        await reader.readuntil(b"\r\n\r\n")
        got = await chunks(reader, 1)
        for number in (1, 2):
            await asyncio.sleep(0.02)
            with contextlib.suppress(ConnectionError):  # the leg has ended
                await one.stream.write(delta(str(number)))
        got += await chunks(reader)
        assert (one.generation.error, one.generation.attempts) == ("RuntimeError: odd", 1)
    assert b"".join(got).startswith(delta("0"))
    assert b'data: {"error"' in b"".join(got)
    assert "RuntimeError: odd" in caplog.text
    assert "broke off" not in caplog.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
@on_both_loops
async def test_what_still_runs_when_a_stop_takes_too_long_is_told_so(caplog, path, stream):
    async with scene(drain_s=1) as one, one.asking(path=path, stream=stream) as reader:
        await holds(one.stream.begun.is_set)
        if stream:
            await one.stream.write(delta("0"))
            head = await reader.readuntil(b"\r\n\r\n")
            await chunks(reader, 1)
        one.server.should_exit = True
        if stream:
            assert head.startswith(b"HTTP/1.1 200")
            content = b"".join(await chunks(reader))
            content = content[content.index(b"{") :].partition(b"\n\n")[0]
        else:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in head
            assert b"x-request-id: " in head
            content = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
    error = json.loads(content)["error"]
    assert error["message"].startswith("the gateway is stopping")
    assert ("type" in json.loads(content)) is (path == MESSAGES)
    assert "Traceback" not in caplog.text
