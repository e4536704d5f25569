"""Faults: which requests they strike, and what a client sees."""

import asyncio
import contextlib
import time

import aiohttp
import pytest

from helpers.sim_client import PROMPT, until
from trivet.errors import TrivetError
from trivet.sim import Fault, SimEngine
from trivet.sim.faults import Faults

GENERATE = "/inference/v1/generate"


def struck(faults: Faults, *legs: str, path: str = GENERATE, reused: bool = False) -> list[bool]:
    return [faults.strike(path=path, leg=leg, reused=reused) is not None for leg in legs]


def test_without_selectors_it_strikes_the_next_request_that_generates():
    faults = Faults()
    faults.add(Fault("status"))
    assert struck(faults, "", path="/health") == [False]
    assert struck(faults, "decode", "decode") == [True, False]


def test_leg_path_and_connection_select():
    faults = Faults()
    faults.add(Fault("status", leg="decode", path="/v1/completions", reused=True))
    assert struck(faults, "decode") == [False]
    assert struck(faults, "prefill", path="/v1/completions", reused=True) == [False]
    assert struck(faults, "decode", path="/v1/completions") == [False]
    assert struck(faults, "decode", path="/v1/completions", reused=True) == [True]


def test_a_star_is_every_path():
    faults = Faults()
    faults.add(Fault("hang", path="*"))
    assert struck(faults, "", path="/health") == [True]


def test_the_nth_and_the_uses_behind_it():
    faults = Faults()
    faults.add(Fault("status", nth=2, uses=2))
    assert struck(faults, *"abcde") == [False, True, True, False, False]
    (active,) = faults.all()
    assert (active.fitted, active.used) == (5, 2)


def test_no_limit_of_uses():
    faults = Faults()
    faults.add(Fault("status", uses=None))
    assert struck(faults, *"abcd") == [True] * 4


def test_chance_is_the_same_for_the_same_seed():
    def draws(seed):
        faults = Faults()
        faults.add(Fault("status", probability=0.5, seed=seed, uses=None))
        return struck(faults, *["x"] * 64)

    assert draws(1) == draws(1) != draws(2)
    assert 10 < sum(draws(1)) < 54


def test_the_first_that_fits_strikes():
    faults = Faults()
    first, second = Fault("status", status=500), Fault("status", status=503, uses=None)
    number = faults.add(first)
    faults.add(second)
    assert faults.strike(path=GENERATE, leg="", reused=False) is first
    assert faults.strike(path=GENERATE, leg="", reused=False) is second
    assert faults.remove(number)
    assert not faults.remove(number)
    faults.clear()
    assert struck(faults, "") == [False]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "a fault is an object with a kind"),
        ({"kind": "fire"}, "kind is 'fire'"),
        ({"kind": "status", "code": 500}, "no such field 'code'"),
        ({"kind": "status", "status": "500"}, "status is '500'"),
        ({"kind": "refuse"}, "for_s is None"),
        ({"kind": "die", "nth": 0}, "nth is 0"),
        ({"kind": "die", "uses": True}, "uses is True"),
        ({"kind": "die", "probability": 2}, "probability is 2"),
        ({"kind": "garbage", "garbage": "noise"}, "garbage is 'noise'"),
        (
            {"kind": "die", "leg": "decoder"},
            "leg is 'decoder' -> it must be one of prefill, decode, release, empty for",
        ),
        ({"kind": "die", "leg": ["decode"]}, "leg is "),
    ],
)
def test_what_is_no_fault_is_said_in_one_line(value, message):
    with pytest.raises(TrivetError, match=message) as caught:
        Fault.parse(value)
    assert "\n" not in str(caught.value)


async def test_status_with_vllms_body_and_with_one_of_its_own(sim, client):
    sim.faults.add(Fault("status", status=503, headers={"Retry-After": "3"}))
    answer = await client.generate(sim, leg="decode")
    assert (answer.status, answer.json["error"]["code"]) == (503, 503)
    assert answer.headers["Retry-After"] == "3"
    sim.faults.add(Fault("status", status=502, body="<html>bad gateway</html>", content_type="text/html"))
    answer = await client.generate(sim, leg="decode")
    assert (answer.status, answer.content) == (502, b"<html>bad gateway</html>")
    assert (await client.generate(sim)).status == 200
    assert [one.ended for one in sim.state().requests] == ["fault", "fault", "length"]
    assert sum(sim.state().executions.values()) == 1


async def test_only_the_leg_it_names(sim, client):
    sim.faults.add(Fault("status", leg="decode", uses=None))
    statuses = [(await client.generate(sim, leg=leg)).status for leg in ("prefill", "decode", "release", "decode")]
    assert statuses == [200, 500, 200, 500]


async def test_hang_before_the_answer(sim, client):
    sim.faults.add(Fault("hang"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.generate(sim)
    await sim.idle()
    (record,) = sim.state().requests
    assert (record.ended, record.fault, record.executed) == ("client gone", "hang", False)


async def test_hang_for_a_while(sim, client):
    sim.faults.add(Fault("hang", for_s=0.05))
    began = time.monotonic()
    assert (await client.generate(sim)).status == 200
    assert time.monotonic() - began >= 0.05


async def test_stall_in_the_middle_keeps_the_request_running(sim, client):
    sim.faults.add(Fault("stall", after_tokens=2))
    async with client.open_stream(sim, max_tokens=5) as answer:
        seen = b""
        while seen.count(b"data:") < 2:
            seen += await answer.content.readany()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                seen += await answer.content.readany()
        assert sim.state().running == 1
        assert sim.state().pool["used"] == 3
    await sim.idle()
    assert sim.state().pool["used"] == 0
    assert sim.state().aborts[0].completion_tokens == 2


@pytest.mark.parametrize("after", [0, 2])
async def test_stall_that_passes(sim, client, after):
    sim.faults.add(Fault("stall", after_tokens=after, for_s=0.05))
    began = time.monotonic()
    answer = await client.stream(sim, max_tokens=5)
    assert time.monotonic() - began >= 0.05
    assert len(answer.tokens) == 5


@pytest.mark.parametrize("after", [0, 3])
async def test_die_in_the_middle(sim, client, after):
    sim.faults.add(Fault("die", after_tokens=after))
    async with client.open_stream(sim, max_tokens=50) as answer:
        seen = b""
        while not isinstance(answer.content.exception(), aiohttp.ClientPayloadError):
            with contextlib.suppress(aiohttp.ClientPayloadError):
                seen += await answer.content.readany()
    assert answer.status == 200
    assert seen.count(b"data:") == after
    await sim.idle()
    assert (sim.state().requests[0].ended, sim.state().pool["used"]) == ("fault", 0)


@pytest.mark.parametrize("kind", ["die", "disconnect"])
async def test_no_byte_of_an_answer_that_is_not_streamed(sim, client, kind):
    sim.faults.add(Fault(kind))
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await client.generate(sim)
    assert (await client.generate(sim)).status == 200
    assert [one.executed for one in sim.state().requests] == [kind == "die", True]


async def test_disconnect_only_a_connection_that_was_used_before(sim, client):
    sim.faults.add(Fault("disconnect", reused=True))
    assert (await client.generate(sim)).status == 200
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await client.generate(sim)
    assert (await client.generate(sim)).status == 200


async def test_garbage_that_is_not_json(sim, client):
    sim.faults.add(Fault("garbage", after_tokens=1))
    answer = await client.stream(sim)
    assert b"not json" in answer.content.split(b"\n\n")[1]
    sim.faults.add(Fault("garbage"))
    with pytest.raises(ValueError, match="Expecting value"):
        _ = (await client.generate(sim)).json


async def test_garbage_truncated(sim, client):
    sim.faults.add(Fault("garbage", after_tokens=1, garbage="truncated"))
    answer = await client.stream(sim)
    assert answer.content.endswith(b'"generate-tok')
    assert answer.content.count(b"data:") == 2
    sim.faults.add(Fault("garbage", garbage="truncated"))
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        _ = (await client.generate(sim)).json


async def test_garbage_between_events_leaves_them_whole(sim, client):
    expected = (await client.stream(sim)).tokens
    sim.faults.add(Fault("garbage", after_tokens=2, garbage="between"))
    content = (await client.stream(sim)).content
    events = [line for line in content.split(b"\n") if line.startswith(b"data:")]
    assert b"garbage\n\n: a comment\n" in content
    assert len(events) == 6
    assert [b"[%d]" % token in event for token, event in zip(expected, events, strict=False)] == [True] * 4


async def test_finish_with_error_streamed_and_whole(sim, client):
    sim.faults.add(Fault("finish", after_tokens=2, uses=2))
    *tokens, error, done = (await client.stream(sim, leg="decode")).events
    assert len(tokens) == 2
    assert error["error"] == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert done == "[DONE]"
    answer = await client.generate(sim, leg="decode")
    assert (answer.status, answer.json) == (500, error)
    assert [one.ended for one in sim.state().requests] == ["error", "error"]


async def test_finish_with_abort(sim, client):
    sim.faults.add(Fault("finish", after_tokens=2, reason="abort", uses=2))
    events = (await client.stream(sim)).events
    assert [event["choices"][0]["finish_reason"] for event in events[:3]] == [None, None, "abort"]
    (choice,) = (await client.generate(sim)).json["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 2)


@pytest.mark.parametrize("reason", ["error", "abort"])
async def test_finish_before_any_token(sim, client, reason):
    sim.faults.add(Fault("finish", reason=reason))
    answer = await client.stream(sim)
    assert (answer.tokens, answer.events[-1]) == ([], "[DONE]")


async def test_slow(start, client):
    sim = await start(step_ms=2)
    sim.faults.add(Fault("slow", factor=20))
    began = time.monotonic()
    await client.generate(sim, max_tokens=5)
    assert time.monotonic() - began >= 0.19


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_connection_is_closed_behind_a_whole_answer(sim, client, streamed):
    sim.faults.add(Fault("close_idle"))
    answer = await (client.stream if streamed else client.generate)(sim)
    assert (answer.status, len(answer.tokens)) == (200, 4)
    assert "Connection" not in answer.headers
    await until(lambda: not sim._transports())


async def test_refuse_for_a_time(sim, client):
    await client.generate(sim)
    sim.faults.add(Fault("refuse", for_s=0.3))
    await asyncio.sleep(0.02)  # the client learns that its idle connection was closed
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.generate(sim)

    await until(lambda: sim._listener is not None)
    assert (await client.generate(sim)).status == 200


async def test_refusing_leaves_running_requests_alone(start, client):
    sim = await start(step_ms=5)
    async with client.open_stream(sim, max_tokens=20) as answer:
        await answer.content.readany()
        sim.faults.add(Fault("refuse", for_s=10))
        rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_exit_looks_like_a_process_that_ended_and_can_come_back(sim, client):
    url, engine_id = sim.url, sim.engine_id
    sim.faults.add(Fault("exit", after_tokens=2))
    async with client.open_stream(sim, max_tokens=50) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    assert not sim.is_up
    assert not sim.view().ready
    with pytest.raises(aiohttp.ClientConnectorError):
        await client.generate(sim)
    await sim.restart()
    assert (sim.url, sim.generation, sim.view().generation) == (url, 2, 2)
    assert sim.engine_id != engine_id
    assert (await client.generate(sim)).status == 200


async def test_exit_ends_the_process_where_there_is_one(client):
    statuses = []
    async with SimEngine(on_exit=statuses.append) as engine:
        engine.faults.add(Fault("exit", exit_status=9))
        with pytest.raises(aiohttp.ClientError):
            await client.generate(engine)
    assert statuses == [9]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
async def test_other_paths_when_they_are_named(sim, client, path):
    sim.faults.add(Fault("status", path=path, status=503))
    assert [(await client.get(sim, path)).status for _ in range(2)] == [503, 200]
    sim.faults.add(Fault("disconnect", path=path, uses=2))  # a client may ask twice
    with pytest.raises(aiohttp.ClientError):
        await client.get(sim, path)


async def test_over_http(sim, client):
    answer = await client.post(sim, "/sim/faults", [{"kind": "status", "leg": "decode"}, {"kind": "hang", "nth": 5}])
    assert answer.json == {"ids": [1, 2]}
    assert (await client.generate(sim, leg="decode")).status == 500
    told = (await client.get(sim, "/sim/faults")).json
    assert [(one["id"], one["kind"], one["fitted"], one["used"]) for one in told] == [
        (1, "status", 1, 1),
        (2, "hang", 0, 0),
    ]
    for field, value in (("kind", "fire"), ("leg", "decoder")):
        bad = await client.post(sim, "/sim/faults", {"kind": "die", field: value})
        assert (bad.status, bad.json["error"].startswith(f"fault: {field} is {value!r}")) == (400, True)
    async with client.session.delete(f"{sim.url}/sim/faults/2") as answer:
        assert answer.status == 204
    async with client.session.delete(f"{sim.url}/sim/faults/2") as answer:
        assert answer.status == 404
    async with client.session.delete(f"{sim.url}/sim/faults") as answer:
        assert answer.status == 204
    assert (await client.get(sim, "/sim/faults")).json == []


async def test_a_fault_cannot_shut_out_the_one_who_made_it(sim, client):
    sim.faults.add(Fault("status", path="*", uses=None))
    assert (await client.get(sim, "/sim/state")).status == 200
    assert (await client.get(sim, "/sim/faults")).status == 200
    assert (await client.generate(sim, PROMPT)).status == 500


# faults of KV that nothing else tells


@pytest.mark.parametrize("kind", ["corrupt", "waver"])
async def test_kv_that_is_wrong_shows_in_the_answer_alone(sim, client, kind):
    expected = (await client.generate(sim, leg="decode")).tokens
    sim.faults.add(Fault(kind, uses=None))
    assert (await client.generate(sim, leg="decode")).tokens == expected, "no KV came from anywhere"
    params = await client.prefill(sim)
    got = await client.stream(sim, leg="decode", more={"kv_transfer_params": params})
    assert got.status == 200
    assert (len(got.tokens), got.tokens[0] == expected[0]) == (len(expected), False)


async def test_bytes_that_are_not_counted(sim, client):
    for kind, expected in (("uncounted", False), ("slow", True)):
        sim.faults.add(Fault(kind, leg="decode"))
        params = await client.prefill(sim, cache_salt=kind)
        before = sim.stats.transfer_bytes.sum
        answer = await client.stream(sim, leg="decode", more={"kv_transfer_params": params, "cache_salt": kind + "d"})
        assert answer.status == 200
        assert (sim.stats.transfer_bytes.sum > before) is expected


async def test_an_engine_that_is_dull_answers_alike(sim, client):
    prompts = ([300, 301], [400, 401, 402])
    assert len({tuple((await client.generate(sim, ids)).tokens) for ids in prompts}) == 2
    sim.faults.add(Fault("dull", uses=None))
    assert len({tuple((await client.generate(sim, ids)).tokens) for ids in prompts}) == 1
