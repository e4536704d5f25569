"""Admission of several workers in one line: as rows of one process, and as real processes of which one is killed."""

import asyncio
import contextlib
import json
import os
from dataclasses import asdict

import pytest

from helpers.boards import Process, board_of
from helpers.processes import holds
from trivet.gateway.admission import SharedAdmission
from trivet.gateway.shared import Shared
from trivet.render.contract import ServingError
from trivet.routing import board as board_module
from trivet.routing.board import Board, Count


class Line:
    """Several workers in one line. A bell is heard when the test says so, or at once."""

    def __init__(self, made, boards, limits) -> None:
        self.made = made
        self.rung: list[int] = []
        self.at_once = True
        self.workers = [SharedAdmission(*limits, board, self._ring) for board in boards]
        for board in boards:
            board.beat()
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task] = {}
        self._leave: dict[str, asyncio.Event] = {}

    def _ring(self, worker: int) -> None:
        self.rung.append(worker)
        if self.at_once:
            asyncio.get_running_loop().call_soon(self.workers[worker].look)

    async def come(self, *names: str) -> None:
        """Requests, by name; the number in it is the worker's to which they come."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._serve(name))
            await self.settle()

    async def _serve(self, name: str) -> None:
        async with self.workers[int(name[1])].turn():
            self.order.append(name)
            await self._leave[name].wait()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._leave[name].set()
            await self.tasks[name]
            await self.settle()

    def die(self, worker: int) -> None:
        """What its service does when it has seen a worker die, which from now on writes nothing."""
        self.workers[worker]._board = Board.private()
        self.made.clear(worker)
        for number, one in enumerate(self.workers):
            if number != worker:
                one.look()

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    def counts(self) -> tuple[int, int]:
        return self.made.total(Count.RUNNING), self.made.total(Count.WAITING)


@contextlib.asynccontextmanager
async def line_of(workers: int, running: int, queued: int = 10, queue_s: float = 20.0):
    with board_of(workers, engines=1) as (made, *boards):
        line = Line(made, boards, (running, queued, queue_s))
        yield line
        for task in line.tasks.values():
            task.cancel()
        await asyncio.gather(*line.tasks.values(), return_exceptions=True)
        assert line.counts() == (0, 0)


async def test_the_limits_are_of_all_workers_together():
    async with line_of(2, running=2, queued=1) as line:
        await line.come("a0", "b1", "c0")
        assert (line.order, line.counts()) == (["a0", "b1"], (2, 1))
        assert [(one.running, one.waiting, one.is_open) for one in line.workers] == [(2, 1, False)] * 2
        await line.come("d1")
        with pytest.raises(ServingError, match="too many requests: 2 are served and 1 wait"):
            await line.tasks["d1"]
        await line.leave("a0")
        assert line.order == ["a0", "b1", "c0"]


async def test_who_came_first_is_let_in_first_whichever_worker_it_came_to():
    async with line_of(3, running=1, queued=10) as line:
        come = ["a0", "b1", "c2", "d0", "e1", "f1", "g0", "h2"]
        await line.come(*come)
        for name in come:
            await line.leave(name)
        assert line.order == come


async def test_a_place_passes_over_who_has_left_the_line():
    async with line_of(3, running=1) as line:
        await line.come("a0", "b1", "c2", "d0")
        line.tasks["b1"].cancel()
        await line.settle()
        await line.leave("a0")
        assert line.order == ["a0", "c2"]


async def test_who_leaves_the_line_when_it_has_been_rung_passes_the_place_on():
    async with line_of(3, running=1) as line:
        await line.come("a0", "b1", "c2")
        line.at_once = False
        await line.leave("a0")
        assert (line.rung, line.order) == ([1], ["a0"])
        line.at_once = True
        line.tasks["b1"].cancel()
        await line.settle()
        assert line.order == ["a0", "c2"]


async def test_nobody_overtakes_a_worker_that_was_rung_and_has_not_looked_yet():
    async with line_of(2, running=1) as line:
        await line.come("a0", "b1")
        line.at_once = False
        await line.leave("a0")
        await line.come("c0")
        assert (line.order, line.counts(), line.workers[0].take()) == (["a0"], (0, 2), False)
        line.workers[1].look()
        await line.settle()
        assert line.order == ["a0", "b1"]


async def test_nobody_is_rung_where_nobody_waits():
    async with line_of(2, running=2) as line:
        for _ in range(3):
            await line.come("a0", "b1")
            await line.leave("a0", "b1")
        assert line.rung == []


async def test_several_places_let_several_in():
    async with line_of(2, running=3) as line:
        await line.come("a0", "b0", "c0", "d1", "e0", "f1")
        line.at_once = False
        await line.leave("a0", "b0", "c0")
        assert line.order == ["a0", "b0", "c0"]
        line.at_once = True
        line.workers[1].look()
        await line.settle()
        assert line.order == ["a0", "b0", "c0", "d1", "e0", "f1"], "who is let in tells the next of further places"


async def test_a_worker_that_hangs_is_passed_over(monkeypatch):
    async with line_of(2, running=1) as line:
        await line.come("a0", "b1", "c0")
        line.at_once = False
        await line.leave("a0")
        assert (line.rung, line.order) == ([1], ["a0"])
        monkeypatch.setattr(board_module, "_ALIVE_NS", 0)  # nobody has said just now that it lives
        line.workers[0].look()  # as each worker does now and then
        await line.settle()
        assert line.order == ["a0", "c0"]
        monkeypatch.undo()
        line.at_once = True
        await line.leave("c0")
        assert line.order == ["a0", "c0", "b1"], "when it comes to itself it is served"


async def test_places_of_a_worker_that_died_come_back():
    async with line_of(2, running=2) as line:
        await line.come("a0", "b0", "c1", "d1")
        assert line.order == ["a0", "b0"]
        line.die(0)
        await line.settle()
        assert line.order == ["a0", "b0", "c1", "d1"]


async def test_a_waiting_request_of_a_worker_that_died_holds_nobody_up():
    async with line_of(2, running=1) as line:
        await line.come("a1", "b0", "c1")
        line.die(0)
        await line.leave("a1")
        assert line.order == ["a1", "c1"]


# real processes

WORKER = """
import asyncio, json, random, sys
from trivet.gateway.admission import SharedAdmission
from trivet.gateway.shared import Bells, SharedConfig
from trivet.routing.board import BEAT_S, Board

config, places, requests, hold_s = SharedConfig(**json.loads(sys.argv[1])), *json.loads(sys.argv[2])
board = Board.open(config.board_fd, config.worker)
inside = board.region("inside").cast("q")
bells, dice, most = Bells(tuple(config.bell_fds)), random.Random(config.worker), 0


async def main():
    admission = SharedAdmission(places, 10**6, 60.0, board, bells.ring)
    served = 0

    async def request():
        global most
        nonlocal served
        await asyncio.sleep(dice.random() * hold_s)
        async with admission.turn():
            inside[config.worker] += 1  # behind taking the place, and taken off before it is given back
            most = max(most, sum(inside))
            await asyncio.sleep(dice.random() * hold_s)
            inside[config.worker] -= 1
        served += 1

    async def beat():
        while True:
            board.beat()
            await asyncio.sleep(BEAT_S)  # without looking: that nobody is forgotten is the bells' doing

    beating = asyncio.create_task(beat())
    with bells.answered(config.worker, admission.look):
        print("up", flush=True)
        await asyncio.gather(*(request() for _ in range(requests)))
    beating.cancel()
    print(json.dumps([served, most]), flush=True)


asyncio.run(main())
sys.stdin.readline()
"""


@contextlib.contextmanager
def processes(tmp_path, workers: int, places: int, requests: list[int], hold_s: float):
    shared = Shared(workers, 1, tmp_path, {"inside": 8 * workers})
    running = [
        Process(
            WORKER,
            json.dumps(asdict(shared.config(number))),
            json.dumps([places, requests[number], hold_s]),
            descriptors=shared.descriptors,
        )
        for number in range(workers)
    ]
    try:
        assert [one.hears() for one in running] == ["up"] * workers
        yield shared, running
    finally:
        for one in running:
            one.kill()
        shared.close()


@pytest.mark.parametrize("places", [1, 5])
def test_two_processes_under_load_never_serve_more_than_the_limit_and_serve_all(tmp_path, places):
    with processes(tmp_path, 2, places, [300, 300], 0.004) as (shared, both):
        told = [json.loads(one.hears()) for one in both]
        assert [served for served, _ in told] == [300, 300]
        assert max(most for _, most in told) == places
        assert [shared.board.total(count) for count in (Count.RUNNING, Count.WAITING)] == [0, 0]


async def test_places_of_a_process_that_is_killed_come_back(tmp_path):
    """It holds all places, for longer than any test lasts, and more of its requests wait before the other's."""
    with processes(tmp_path, 2, 4, [0, 0], 0.0) as (shared, _):
        limits = json.dumps([4, 20, 1000.0])
        code = WORKER.replace("await asyncio.sleep(dice.random() * hold_s)\n        async", "pass\n        async")
        holder = Process(code, json.dumps(asdict(shared.config(0))), limits, descriptors=shared.descriptors)
        assert holder.hears() == "up"
        await holds(lambda: shared.board.each(Count.WAITING) == [16, 0])
        other = Process(
            code,
            json.dumps(asdict(shared.config(1))),
            json.dumps([4, 50, 0.001]),
            descriptors=shared.descriptors,
        )
        assert other.hears() == "up"
        await holds(lambda: shared.board.each(Count.WAITING) == [16, 50])
        holder.kill()
        shared.board.region("inside").cast("q")[0] = 0
        shared.died(0)
        served, most = json.loads(other.hears())
        other.kill()
        assert (served, most <= 4) == (50, True)
        assert (shared.board.each(Count.RUNNING), shared.board.each(Count.WAITING)) == ([0, 0], [0, 0])


def test_what_is_shared_leaves_nothing_open(tmp_path):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = open_files()
    shared = Shared(2, 4, tmp_path)
    (tmp_path / "gateway-1.sock").touch()
    shared.close()
    del shared
    assert (open_files(), list(tmp_path.iterdir())) == (before, [])
