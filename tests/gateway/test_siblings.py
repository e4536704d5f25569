"""Records of requests that other workers have, over their real sockets."""

import asyncio
import contextlib
import stat
from pathlib import Path

import httpx
import pytest

from helpers.processes import holds
from trivet.gateway import siblings as siblings_module
from trivet.gateway.app import GatewayApp
from trivet.gateway.metrics import GatewayMetrics
from trivet.gateway.siblings import Records
from trivet.journal import Journal
from trivet.legs.life import Legs
from trivet.legs.wire import open_session
from trivet.routing.engines import Engines


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run's folder whose path is longer than a socket's may be."""
    path = tmp_path / ("run-" + "x" * 120)
    path.mkdir()
    return path


@contextlib.asynccontextmanager
async def workers_of(folder: Path, count: int, listening: tuple[int, ...] | None = None):
    """Journals and records of so many workers, all of which listen unless told otherwise."""
    journals = [Journal() for _ in range(count)]
    records = [Records(journal, number, count, folder) for number, journal in enumerate(journals)]
    async with contextlib.AsyncExitStack() as stack:
        for number in range(count) if listening is None else listening:
            await stack.enter_async_context(records[number].open_to_siblings())
        yield journals, records


async def test_a_record_is_found_at_whichever_worker_has_it(folder):
    async with workers_of(folder, 3) as (journals, records):
        record = journals[2].open("mine", "/v1/completions")
        for one in records:
            told, silent = await one.find("mine")
            assert (told.facts, told.worker, told.arrived_s, silent) == (record.facts(), 2, record.arrived_s, [])
        assert await records[0].find("none") == (None, [])


async def test_of_an_id_that_several_have_the_newest_is_told(folder):
    async with workers_of(folder, 3) as (journals, records):
        for journal in (journals[1], journals[2], journals[0]):
            journal.open("same", "/v1/completions")
        for one in records:
            assert (await one.find("same"))[0].worker == 0


async def test_lists_are_merged_by_time(folder):
    async with workers_of(folder, 2) as (journals, records):
        for number in range(6):
            journals[number % 2].open(f"req-{number}", "/v1/completions")
        for one in records:
            told, silent = await one.newest(4)
            assert [each.facts["request_id"] for each in told] == ["req-5", "req-4", "req-3", "req-2"]
            assert silent == []


async def test_long_lists_arrive_whole(folder):
    async with workers_of(folder, 2) as (journals, records):
        for number in range(1024):
            journals[1].open(f"req-{number}-{'x' * 300}", "/v1/completions")
        assert len((await records[0].newest(5000))[0]) == 1024


async def test_a_worker_that_is_not_there_is_told(folder):
    async with workers_of(folder, 3, listening=(0, 2)) as (journals, records):
        journals[2].open("mine", "/v1/completions")
        told, silent = await records[0].find("mine")
        assert (told.worker, silent) == (2, [1])
        assert (await records[0].newest(10))[1] == [1]


async def test_a_worker_that_says_nothing_is_not_waited_for_long(folder, monkeypatch):
    monkeypatch.setattr(siblings_module, "_TIMEOUT_S", 0.05)
    with siblings_module._listener(folder / "gateway-1.sock") as silent:
        silent.listen()
        async with workers_of(folder, 2, listening=(0,)) as (journals, records):
            journals[0].open("mine", "/v1/completions")
            told, unasked = await records[0].find("mine")
            assert (told.worker, unasked) == (0, [1])


@pytest.mark.parametrize("answer", [b"", b"{", b"[1]", b'[{"arrived_s": 1}]'])
async def test_an_answer_that_is_none_is_as_good_as_none(folder, answer):
    async def reply(reader, writer) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(reply, sock=siblings_module._listener(folder / "gateway-1.sock"))
    async with workers_of(folder, 2, listening=(0,)) as (_, records):
        assert await records[0].find("mine") == (None, [1])
    server.close()


@pytest.mark.parametrize("question", [b"", b"\n", b"{\n", b"[]\n", b"{}\n", b"3\n", b'{"newest": "x"}\n', b"x" * 2**17])
async def test_a_question_that_is_none_harms_nobody(folder, question, caplog):
    async with workers_of(folder, 2) as (journals, records):
        with siblings_module._short(folder / "gateway-1.sock") as path:
            reader, writer = await asyncio.open_unix_connection(path)
        writer.write(question)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        journals[1].open("mine", "/v1/completions")
        assert (await records[0].find("mine"))[0] is not None
        await holds(lambda: "a sibling's question" in caplog.text)


async def test_sockets_are_this_users_and_go_away(folder):
    async with workers_of(folder, 2):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == {"gateway-0.sock": 0o600, "gateway-1.sock": 0o600}
    assert list(folder.iterdir()) == []


async def test_a_socket_that_a_killed_worker_left_is_replaced(folder):
    siblings_module._listener(folder / "gateway-0.sock").close()
    async with workers_of(folder, 2) as (journals, records):
        journals[0].open("mine", "/v1/completions")
        assert (await records[1].find("mine"))[0].worker == 0


async def test_a_file_that_is_no_socket_is_not_replaced(folder):
    (folder / "gateway-0.sock").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        siblings_module._listener(folder / "gateway-0.sock")
    assert (folder / "gateway-0.sock").read_text() == "mine"


async def test_a_worker_alone_has_no_socket(folder):
    async with workers_of(folder, 1) as (journals, records):
        journals[0].open("mine", "/v1/completions")
        assert list(folder.iterdir()) == []
        assert (await records[0].find("mine"))[0].facts["request_id"] == "mine"


# the endpoints


@contextlib.asynccontextmanager
async def asked(records: Records, journal: Journal):
    engines, metrics = Engines(), GatewayMetrics()
    async with open_session() as session:
        legs = Legs(engines, session, None, metrics.ended)
        app = GatewayApp(
            lambda *_: None, engines, legs, metrics, fleet=lambda: {"engines": []}, journal=journal, records=records
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield client


async def test_any_worker_answers_for_all(folder):
    async with workers_of(folder, 3, listening=(0, 1)) as (journals, records):
        journals[1].open("theirs", "/v1/completions")
        journals[0].open("ours", "/v1/chat/completions")
        async with asked(records[0], journals[0]) as client:
            theirs = await client.get("/trivet/requests/theirs")
            assert (theirs.status_code, theirs.json()["request_id"]) == (200, "theirs")
            nobodys = await client.get("/trivet/requests/none")
            assert nobodys.status_code == 404
            message = "no such request among the newest ones; worker 2 did not answer"
            assert nobodys.json()["error"]["message"] == message
            listed = (await client.get("/trivet/requests")).json()
            assert listed["workers_silent"] == [2]
            assert [(one["request_id"], one["worker"]) for one in listed["requests"]] == [("ours", 0), ("theirs", 1)]
            assert 0 <= listed["requests"][0]["age_s"] <= listed["requests"][1]["age_s"]


@pytest.mark.parametrize(("limit", "expected"), [("2", 2), ("0", 0), ("100000", 3)])
async def test_a_list_is_as_long_as_it_is_asked_for(limit, expected):
    journal = Journal()
    for number in range(3):
        journal.open(f"req-{number}", "/v1/completions")
    async with asked(Records(journal), journal) as client:
        assert len((await client.get(f"/trivet/requests?limit={limit}")).json()["requests"]) == expected


@pytest.mark.parametrize("limit", ["-1", "many", "1e3", "²", "10000000"])
async def test_a_limit_that_is_no_number_is_refused(limit):
    journal = Journal()
    async with asked(Records(journal), journal) as client:
        answer = await client.get("/trivet/requests", params={"limit": limit})

        assert answer.status_code == 400
