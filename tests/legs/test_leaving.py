"""Generations on engines that are to be stopped: what runs there ends there, what has not begun goes elsewhere."""

import asyncio
import json
from dataclasses import replace

import pytest

from helpers.engines import DONE, HANDED_OVER, WAIT_S, chunk, hanging, json_answer, streaming, tokens_of, usage, whole
from helpers.processes import holds
from helpers.service import Service, cancelled, decode, mixed, prefill, serving
from trivet.connectors import NixlConnector, TrivetConnector
from trivet.legs.release import takers


def leaves(service: Service, name: str) -> None:
    """The fleet says that an engine is leaving."""
    service.engines.update(
        replace(view, ready=False, leaving=True) if view.name == name else view for view in service.engines.all()
    )


def in_use(service: Service) -> set[str]:
    """Engines that must not be stopped now."""
    engines = service.engines
    return {view.name for view in engines.all() if engines.board.running_legs(engines._slots[view.name])}


def answered(after: asyncio.Event):
    """A prefill leg's answer, when it is time."""
    return streaming(after, json.dumps({"kv_transfer_params": HANDED_OVER}).encode())


async def finished(task: asyncio.Task) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return tokens_of(await task)


async def test_an_answer_goes_on_where_it_is():
    more = asyncio.Event()
    d = decode(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE))
    e = decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        await holds(lambda: service.chunks)
        leaves(service, "decode-0")
        assert in_use(service) == {"decode-0"}
        more.set()
        assert await finished(task) == [5, 6]
        assert in_use(service) == set()
        assert tokens_of(await service.ask()) == [5, 6]
    assert (d.legs(), e.legs()) == (["decode"], ["decode"]), "the next one goes elsewhere"
    assert [one.attempts for one in service.records] == [1, 1]


async def test_a_decode_leg_that_has_not_begun_goes_to_another():
    answer = asyncio.Event()
    p, d, e = prefill(answered(answer)), decode(), decode(name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        assert in_use(service) == {"prefill-0", "decode-0"}, "it was chosen"
        leaves(service, "decode-0")
        answer.set()
        assert await finished(task) == [5, 6]
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], [], ["decode"])
    assert (service.record.decode_engine, service.record.split) == ("decode-1", True)
    assert (service.record.attempts, service.record.reason) == (1, "a pair is ready")


@pytest.mark.parametrize("prefill_leaves", [False, True])
async def test_where_there_is_no_other_it_begins_where_it_was_to(prefill_leaves):
    answer = asyncio.Event()
    p, d = prefill(answered(answer)), decode()
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        leaves(service, "decode-0")
        if prefill_leaves:
            leaves(service, "prefill-0")
        answer.set()
        assert await finished(task) == [5, 6]
        assert in_use(service) == set()
    assert d.legs() == ["decode"]


async def test_prefill_is_in_use_until_decode_has_its_kv():
    first, more = asyncio.Event(), asyncio.Event()
    d = decode(streaming(first, chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE))
    async with serving(prefill(), d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        assert in_use(service) == {"prefill-0", "decode-0"}
        assert service.outstanding().keys() == {"decode-0"}, "it has nothing to compute"
        first.set()
        await holds(lambda: in_use(service) == {"decode-0"})
        more.set()
        assert await finished(task) == [5, 6]


async def test_prefill_is_in_use_until_decode_has_its_kv_where_legs_start_together():
    first, more = asyncio.Event(), asyncio.Event()
    p = prefill(json_answer(json.loads(whole_of_trivet())))
    d = decode(streaming(first, chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE))
    request = {"sampling": {"temperature": 0.7, "seed": 7, "max_tokens": 2}}  # decode makes the first token
    async with serving(p, d, connector=TrivetConnector()) as service:
        task = asyncio.create_task(service.ask(**request))
        await p.call()
        await p.calls[0].end()
        await d.call()
        assert in_use(service) == {"prefill-0", "decode-0"}
        first.set()
        await holds(lambda: in_use(service) == {"decode-0"})
        more.set()
        assert await finished(task) == [5, 6]
        assert in_use(service) == set()


def whole_of_trivet() -> str:
    choice = {"index": 0, "token_ids": [7], "finish_reason": "length"}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3}, "kv_transfer_params": {"handed_over": True}})


@pytest.mark.parametrize("connector", [NixlConnector(), TrivetConnector()], ids=["nixl", "trivet"])
async def test_nothing_is_in_use_when_a_client_has_left(connector):
    p, d = prefill(whole(), hanging()), decode(hanging())
    async with serving(p, d, connector=connector) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        assert "decode-0" in in_use(service)
        await cancelled(task)
        await service.legs.releases.close()
        assert in_use(service) == set()


async def test_a_colocated_leg_is_in_use_from_its_choice():
    async with serving(mixed(hanging()), connector=None) as service:
        task = asyncio.create_task(service.ask())
        await asyncio.sleep(0)
        await holds(lambda: in_use(service))
        leaves(service, "mixed-0")
        assert in_use(service) == {"mixed-0"}
        await cancelled(task)
        assert in_use(service) == set()


async def test_those_that_leave_take_kv_to_release_it_only_behind_the_others():
    d, e, f = decode(), decode(name="decode-1"), decode(name="decode-2")
    async with serving(d, e, f) as service:
        leaves(service, "decode-0")
        views = {view.name: view for view in service.engines.all()}
        assert [one.name for one in takers(service.engines, views["decode-1"])] == ["decode-2", "decode-1", "decode-0"]
