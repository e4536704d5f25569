"""Events that go from connection to connection: nothing is lost, doubled or overtaken, however it is cut."""

import asyncio
import contextlib

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.loops import on_both_loops
from helpers.processes import holds
from trivet.legs.express import Express
from trivet.legs.wire import open_session

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
KNOWN, OTHER, LONG = b"data: k%d\n\n", b"data: other\n\n", b"data: k\n\ndata: k\n\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


class Engine:
    """A server that writes an answer's bytes in pieces, each when it is told to, on connections that it keeps."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.connections = 0
        self.tasks: list[asyncio.Task] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
                await reader.readexactly(length)
                piece = b""
                while not piece.endswith(END):
                    if (piece := await self.pieces.get()) is None:
                        return
                    writer.write(piece)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


class Scene:
    def __init__(self, engine: Engine, url: str, session: aiohttp.ClientSession) -> None:
        self.engine, self.url, self.session = engine, url, session
        self.seen: list[tuple[str, bytes]] = []
        self.passed = 0
        self.takes = True
        self.pause: asyncio.Event | None = None
        """Whoever reads is busy with what was read until then."""
        self.steady = True

    @property
    def by_itself(self) -> list[bytes]:
        return [content for way, content in self.seen if way == "by itself"]

    @property
    def body(self) -> bytes:
        return b"".join(content for _, content in self.seen)

    def write(self, data: bytes) -> bool:
        if self.takes:
            while data:  # what a client would read
                size, _, data = data.partition(b"\r\n")
                self.seen.append(("by itself", data[: int(size, 16)]))
                data = data[int(size, 16) + 2 :]
        return self.takes

    def count(self, tokens: int) -> None:
        self.passed += tokens

    async def read(self) -> None:
        async with self.session.post(self.url, data=b"{}") as answer:
            with Express(answer, lambda event: event.startswith(b"data: k"), self.write, self.count) as express:
                while piece := await express.read(steady=self.steady):
                    if self.pause is not None:
                        await self.pause.wait()
                    self.seen.append(("read", piece))


@contextlib.asynccontextmanager
async def scene():
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with open_session() as session:
        yield Scene(engine, url, session)
    server.close()
    for task in engine.tasks:
        task.cancel()
    await asyncio.gather(*engine.tasks, return_exceptions=True)
    await server.wait_closed()


async def said(one: Scene, *pieces: bytes) -> None:
    """Sends pieces, each when the one before has come."""
    for piece in pieces:
        length = len(one.body)
        one.engine.pieces.put_nowait(piece)
        if piece is HEAD:
            await asyncio.sleep(0.02)  # comes alone: whoever reads stands there before what follows
        elif piece is not END:
            await holds(lambda length=length: len(one.body) > length)


@on_both_loops
async def test_known_events_go_on_by_themselves_once_a_chunk_begins_where_they_do():
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        await said(
            one, HEAD, chunk(KNOWN % 1), chunk(KNOWN % 2) + chunk(KNOWN % 3), chunk(OTHER), chunk(KNOWN % 4), END
        )
        await reading
        assert one.by_itself == [KNOWN % 2, KNOWN % 3, KNOWN % 4]  # where the first one begins is not known
        assert (one.passed, one.body) == (3, b"".join(KNOWN % n for n in (1, 2, 3)) + OTHER + KNOWN % 4)


@pytest.mark.parametrize(
    "piece", [chunk(OTHER), chunk(KNOWN % 1) + chunk(OTHER), chunk(KNOWN % 1)[:-1], b"b;x\r\ndata: k12\n\n\r\n"]
)
@on_both_loops
async def test_anything_else_is_read(piece):
    rest = b"\n" if piece.endswith(b"\r") else b""
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        await said(one, HEAD, chunk(OTHER), piece)
        assert one.by_itself == []
        one.engine.pieces.put_nowait(rest + END)
        await reading
        assert one.passed == 0


@pytest.mark.parametrize("why", ["the client reads slowly", "it is not steady", "what came before is worked on"])
@on_both_loops
async def test_they_wait_where_they_must(why):
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        await said(one, HEAD, chunk(OTHER))
        if why == "the client reads slowly":
            one.takes = False
        elif why == "it is not steady":
            one.steady = False
            await said(one, chunk(OTHER))
        else:
            one.pause = asyncio.Event()
            one.engine.pieces.put_nowait(chunk(OTHER))
            await asyncio.sleep(0.02)
        one.engine.pieces.put_nowait(chunk(KNOWN % 1))
        await asyncio.sleep(0.02)
        assert one.by_itself == []
        if one.pause is not None:
            one.pause.set()
        await holds(lambda: one.body.endswith(KNOWN % 1))
        assert one.by_itself == []
        one.takes = one.steady = True
        one.engine.pieces.put_nowait(chunk(OTHER))
        await holds(lambda: one.body.endswith(OTHER))
        await said(one, chunk(KNOWN % 2), END)
        await reading
        assert one.by_itself == [KNOWN % 2]


EVENTS = st.lists(
    st.sampled_from([KNOWN % 1, KNOWN % 22, OTHER, LONG, b": comment\n\n", b"data: k\r\n\r\n"]), max_size=12
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(EVENTS, st.data())
async def test_every_byte_comes_once_and_in_order_however_it_is_cut(events, data):
    raw = HEAD + b"".join(map(chunk, events)) + END
    cuts = sorted(data.draw(st.sets(st.integers(len(HEAD), len(raw) - len(END)), max_size=10)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    takes = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        for piece, one.takes in zip(pieces, takes, strict=True):
            one.engine.pieces.put_nowait(piece)
            await asyncio.sleep(0.001)
        await reading
        assert one.body == b"".join(events)
        assert one.passed == len(one.by_itself)


@on_both_loops
async def test_the_connection_serves_the_next_request():
    async with scene() as one:
        for _ in range(3):
            reading = asyncio.create_task(one.read())
            await said(one, HEAD, chunk(OTHER), chunk(KNOWN % 1), END)
            await reading
        assert one.engine.connections == 1
        assert one.by_itself == [KNOWN % 1] * 3


@on_both_loops
async def test_an_engine_that_breaks_off_is_heard():
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        await said(one, HEAD, chunk(OTHER), chunk(KNOWN % 1))
        one.engine.pieces.put_nowait(None)
        with pytest.raises(aiohttp.ClientPayloadError):
            await reading
        assert one.by_itself == [KNOWN % 1]


@on_both_loops
async def test_whoever_stops_reading_gets_nothing_more():
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        await said(one, HEAD, chunk(OTHER), chunk(KNOWN % 1))
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        one.engine.pieces.put_nowait(chunk(KNOWN % 2))
        await asyncio.sleep(0.02)
        assert one.by_itself == [KNOWN % 1]
        one.engine.pieces.put_nowait(None)


@on_both_loops
async def test_without_a_way_to_the_client_all_is_read():
    async with scene() as one:

        async def read() -> bytes:
            async with one.session.post(one.url, data=b"{}") as answer:
                with Express(answer, lambda _: True, None) as express:
                    parts = []
                    while piece := await express.read(steady=True):
                        parts.append(piece)
                    return b"".join(parts)

        one.engine.pieces.put_nowait(HEAD + chunk(KNOWN % 1) + chunk(KNOWN % 2) + END)
        assert await read() == KNOWN % 1 + KNOWN % 2


@pytest.mark.parametrize("where", ["is_known", "write", "passed"])
@on_both_loops
async def test_a_fault_of_our_own_is_told_to_whoever_reads(where):
    def odd(*_):
        raise RuntimeError("odd")

    async with scene() as one:

        async def read() -> None:
            ways = {"is_known": lambda _: True, "write": lambda _: True, "passed": lambda _: None, where: odd}
            async with one.session.post(one.url, data=b"{}") as answer:
                with Express(answer, **ways) as express:
                    while piece := await express.read(steady=True):
                        one.seen.append(("read", piece))

        reading = asyncio.create_task(read())
        await said(one, HEAD, chunk(OTHER))
        one.engine.pieces.put_nowait(chunk(KNOWN % 1))
        with pytest.raises(RuntimeError, match="odd"):
            await reading
        assert one.body == OTHER


@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"transfer-encoding: chunked", b"content-length: 18"),
        HEAD.replace(b"transfer-encoding: chunked", b"connection: close"),
    ],
)
@on_both_loops
async def test_an_answer_that_is_not_chunked_is_read(head):
    body = b"5\r\ndata:\r\n" + b"x" * 8
    async with scene() as one:
        reading = asyncio.create_task(one.read())
        one.engine.pieces.put_nowait(head)
        await asyncio.sleep(0.02)
        one.engine.pieces.put_nowait(body)
        if b"close" in head:
            one.engine.pieces.put_nowait(None)
        await reading
        assert (one.body, one.by_itself) == (body, [])
