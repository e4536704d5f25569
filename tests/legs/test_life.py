"""Generations on engines that are real HTTP servers; the connector is the real NixlConnector unless said."""

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest

from helpers.engines import (
    DONE,
    HANDED_OVER,
    WAIT_S,
    FakeEngine,
    chunk,
    cutting,
    hanging,
    json_answer,
    listening,
    nobody_listens,
    raw_answer,
    refusing,
    speaking,
    streaming,
    token_request,
    tokens_of,
    usage,
    whole,
)
from helpers.processes import holds
from trivet.connectors import NixlConnector
from trivet.journal import GenerationRecord, Journal, current_request
from trivet.legs import life
from trivet.legs.life import Legs
from trivet.legs.wire import open_session
from trivet.render.contract import ServingError, TokenChunk
from trivet.routing.engines import Engines, EngineView


class SeedingConnector(NixlConnector):
    """A connector that may hand over prefill's token, as TrivetConnector will."""

    name = "SeedingConnector"
    hands_over_first_token = True


class Service:
    """Legs over some engines, and what was observed of their generations."""

    def __init__(self, legs: Legs, engines: Engines, records: list[GenerationRecord]) -> None:
        self.legs = legs
        self.engines = engines
        self.records = records
        self.chunks: list[TokenChunk] = []
        """What the newest request's client has."""

    async def ask(self, **changes) -> list[TokenChunk]:
        self.chunks = []
        async with contextlib.aclosing(self.legs.run(token_request(**changes))) as chunks:
            async for one in chunks:
                self.chunks.append(one)
        return self.chunks

    async def refused(self, **changes) -> tuple[str, int]:
        with pytest.raises(ServingError) as caught:
            await self.ask(**changes)
        return caught.value.message, caught.value.status

    @property
    def record(self) -> GenerationRecord:
        """That of the only generation so far, or of the last."""
        return self.records[-1]

    def loses(self, name: str, how: str) -> None:
        """The fleet says that an engine is out of service."""
        change = {
            "not ready": lambda view: [replace(view, ready=False)],
            "gone": lambda _: [],
            "started anew": lambda view: [replace(view, generation=view.generation + 1)],
        }[how]
        views = self.engines.all()
        self.engines.update(new for view in views for new in (change(view) if view.name == name else [view]))

    def outstanding(self) -> dict[str, int]:
        """Engines with outstanding tokens."""
        loads = {view.name: self.engines.outstanding_tokens(view.name) for view in self.engines.all()}
        return {name: tokens for name, tokens in loads.items() if tokens}


@contextlib.asynccontextmanager
async def serving(*engines: FakeEngine | EngineView, connector=NixlConnector()):
    """A service on these engines; all of them listen while the block runs."""
    async with listening(*(one for one in engines if isinstance(one, FakeEngine))), open_session() as session:
        views = Engines()
        views.update(one.view() if isinstance(one, FakeEngine) else one for one in engines)
        records: list[GenerationRecord] = []
        service = Service(Legs(views, session, connector, lambda record, _: records.append(record)), views, records)
        yield service
        await service.legs.close()
        assert service.outstanding() == {}
        assert service.legs.releases_pending == 0


def prefill(*replies, name: str = "prefill-0") -> FakeEngine:
    return FakeEngine(name, "prefill", *(replies or [whole()]))


def decode(*replies, name: str = "decode-0") -> FakeEngine:
    return FakeEngine(name, "decode", *(replies or [speaking(5, 6)]))


def mixed(*replies, name: str = "mixed-0") -> FakeEngine:
    return FakeEngine(name, "mixed", *(replies or [speaking(8, 9)]))


def dead(name: str, tier: str, url: str) -> EngineView:
    """An engine that is thought ready and is gone."""
    return EngineView(name, tier, url, ready=True)


async def cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# the way of a split request


async def test_prefill_comes_first_and_decode_has_its_answer():
    p, d = prefill(whole(7, cached=2)), decode(speaking(5, 6, cached=3))
    async with serving(p, d) as service:
        chunks = await service.ask()
    assert tokens_of(chunks) == [5, 6]
    assert chunks[-1].finish_reason == "length"
    assert (p.legs(), d.legs()) == (["prefill"], ["decode"])
    assert p.calls[0].body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False},
        "stream": False,
        "kv_transfer_params": NixlConnector().prefill_params(),
    }
    assert d.calls[0].body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"temperature": 0.0, "max_tokens": 2, "detokenize": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": HANDED_OVER,
    }


async def test_decode_is_asked_when_prefill_has_answered():
    answer = asyncio.Event()
    p, d = prefill(streaming(answer, b'{"kv_transfer_params": null}')), decode()
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        assert d.calls == []
        answer.set()
        await task
    assert d.legs() == ["decode"]


async def test_only_the_first_chunk_tells_the_cached_tokens_and_they_are_prefills():
    """Decode found the whole prompt; how much was computed is what prefill says."""
    async with serving(prefill(whole(cached=2)), decode(speaking(5, 6, cached=3))) as service:
        chunks = await service.ask()
    assert [one.cached_tokens for one in chunks] == [2, None]
    assert service.record.cached_tokens == 2


@pytest.mark.parametrize(
    ("params", "expected"),
    [(HANDED_OVER, [(1, 1), (None, None)]), (None, [(None, None), (0, 3)])],
    ids=["split", "colocated"],
)
async def test_what_a_prompt_added_to_a_prefix_cache_is_told_of_the_engine_that_computed_it(params, expected):
    p, d = prefill(whole(params=params, cached=1)), decode(speaking(5, 6, cached=0))
    async with serving(p, d) as service:
        views = replace(p.view(), cached_block_tokens=2), replace(d.view(), cached_block_tokens=1)
        service.engines.update(views)
        chunks = await service.ask()
    assert [(one.cached_tokens, one.created_cache_tokens) for one in chunks] == expected


async def test_legs_carry_the_requests_headers_and_the_engines_keys():
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        service.engines.update([p.view(api_key="secret-p"), d.view()])
        await service.ask(headers={"traceparent": "00-1", "X-data-parallel-rank": "1"})
    for call in (*p.calls, *d.calls):
        assert (call.headers["traceparent"], call.headers["X-data-parallel-rank"]) == ("00-1", "1")
        assert call.headers["Content-Type"] == "application/json"
    assert p.calls[0].headers["X-Request-Id"] == "gen-1-prefill"
    assert d.calls[0].headers["X-Request-Id"] == "gen-1-decode"
    assert p.calls[0].headers["Authorization"] == "Bearer secret-p"
    assert "Authorization" not in d.calls[0].headers


async def test_each_engine_is_charged_while_its_leg_runs():
    answer, more = asyncio.Event(), asyncio.Event()
    p = prefill(streaming(answer, b'{"kv_transfer_params": null}'))
    d = decode(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE))
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        assert service.outstanding() == {"prefill-0": 3}
        answer.set()
        await d.call()
        assert service.outstanding() == {"decode-0": 5}
        more.set()
        await task
        assert service.outstanding() == {}


async def test_requests_spread_over_the_engines():
    hold = asyncio.Event()
    p, q = (prefill(streaming(hold, b'{"kv_transfer_params": null}'), name=f"prefill-{n}") for n in (0, 1))
    async with serving(p, q, decode()) as service:
        tasks = [asyncio.create_task(service.ask()) for _ in range(4)]
        for engine in (p, q):
            await engine.call(1)
        hold.set()
        await asyncio.gather(*tasks)
    assert (len(p.calls), len(q.calls)) == (2, 2)


async def test_requests_one_after_the_other_go_to_the_engines_in_turn():
    engines = [*(prefill(name=f"prefill-{n}") for n in (0, 1)), *(decode(name=f"decode-{n}") for n in (0, 1))]
    async with serving(*engines) as service:
        for _ in range(4):
            await service.ask()
    assert [len(one.calls) for one in engines] == [2, 2, 2, 2]
    pairs = [(record.prefill_engine, record.decode_engine) for record in service.records]
    assert pairs == [("prefill-0", "decode-0"), ("prefill-1", "decode-1")] * 2


# the record


async def test_a_split_generation_leaves_its_facts():
    async with serving(prefill(whole(cached=2)), decode()) as service:
        await service.ask()
    record = service.record
    assert (record.generation_id, record.prompt_tokens, record.completion_tokens) == ("gen-1", 3, 2)
    assert (record.split, record.reason) == (True, "a pair is ready")
    assert (record.prefill_engine, record.decode_engine) == ("prefill-0", "decode-0")
    assert (record.finish_reason, record.error, record.cached_tokens) == ("length", None, 2)
    stamps = [record.rendered_s, record.prefill_start_s, record.prefill_end_s, record.first_token_s, record.end_s]
    assert stamps == sorted(stamps)
    assert len(service.records) == 1


async def test_a_generation_stands_in_the_record_of_its_request():
    owner = Journal().open("req-1", "/v1/completions")
    async with serving(prefill(), decode()) as service:
        token = current_request.set(owner)
        await service.ask()
        await service.ask(request_id="gen-2")
        current_request.reset(token)
    assert [one.generation_id for one in owner.generations] == ["gen-1", "gen-2"]
    assert owner.generations == service.records


async def test_observers_are_told_of_the_request_too():
    owner, told = Journal().open("req-1", "/v1/completions"), []
    d = mixed()
    async with listening(d), open_session() as session:
        engines = Engines()
        engines.update([d.view()])
        legs = Legs(engines, session, None, lambda *seen: told.append(seen))
        token = current_request.set(owner)
        assert tokens_of([one async for one in legs.run(token_request())]) == [8, 9]
        current_request.reset(token)
    assert told == [(owner.generations[0], owner)]


# what is served colocated


async def test_a_request_that_may_not_be_split_is_served_by_a_mixed_engine():
    p, d, m = prefill(), decode(), mixed(speaking(8, 9, cached=1))
    async with serving(p, d, m) as service:
        chunks = await service.ask(unsplittable="it is special")
    assert tokens_of(chunks) == [8, 9]
    assert [one.cached_tokens for one in chunks] == [None, 1]
    assert (p.calls, d.calls) == ([], [])
    assert "kv_transfer_params" not in m.calls[0].body
    record = service.record
    assert (record.split, record.reason) == (False, "it is special")
    assert (record.prefill_engine, record.decode_engine, record.cached_tokens) == (None, "mixed-0", 1)
    assert (record.prefill_start_s, record.prefill_end_s) == (None, None)


async def test_a_request_whose_owner_wants_it_colocated_is():
    owner = Journal().open("req-1", "/v1/completions")
    owner.colocate = "the request asks for it"
    p, d = prefill(), decode()
    async with serving(p, d) as service:
        token = current_request.set(owner)
        await service.ask()
        await service.ask(unsplittable="its own reason")
        current_request.reset(token)
    assert p.calls == []
    assert "kv_transfer_params" not in d.calls[0].body
    assert [one.reason for one in service.records] == ["the request asks for it", "its own reason"]


async def test_without_a_connector_everything_is_colocated():
    p, d = prefill(), decode()
    async with serving(p, d, connector=None) as service:
        await service.ask()
    assert p.calls == []
    assert (service.record.split, service.record.reason) == (False, "the topology has no connector")


@pytest.mark.parametrize(
    "params",
    [None, {}, HANDED_OVER | {"remote_block_ids": []}, HANDED_OVER | {"do_remote_prefill": False}],
    ids=["null", "empty", "no blocks", "nothing kept"],
)
async def test_a_request_for_which_prefill_hands_nothing_over_is_served_colocated(params):
    p, d = prefill(whole(params=params, cached=2)), decode(speaking(5, 6, cached=3))
    async with serving(p, d) as service:
        chunks = await service.ask()
    assert tokens_of(chunks) == [5, 6]
    assert [one.cached_tokens for one in chunks] == [None, 3]  # decode computed the prompt
    assert d.legs() == ["decode"]
    assert "kv_transfer_params" not in d.calls[0].body
    record = service.record
    assert (record.split, record.reason) == (False, "prefill-0 handed nothing over")
    assert record.cached_tokens == 3


# prefill fails

TROUBLE = {
    "401": (refusing(401), "not today"),
    "403": (refusing(403), "not today"),
    "404": (refusing(404), "not today"),
    "500": (refusing(500), "not today"),
    "503": (refusing(503), "not today"),
    "408": (refusing(408), "not today"),
    "429": (refusing(429), "not today"),
    "not JSON": (raw_answer(b"hello"), "answered 200 with something that is not JSON"),
    "not an object": (json_answer([]), "answered 200 with something that is not an object"),
    "closed": (cutting(), "no answer (ServerDisconnectedError: Server disconnected)"),
}


@pytest.mark.parametrize(("reply", "problem"), TROUBLE.values(), ids=TROUBLE)
async def test_prefill_in_trouble_is_replaced_by_another(reply, problem):
    p, q, d = prefill(reply), prefill(name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (p.legs(), q.legs(), d.legs()) == (["prefill"], ["prefill"], ["decode"])
    record = service.record
    assert (record.split, record.prefill_engine) == (True, "prefill-1")
    assert record.reason == f"a pair is ready (prefill-0: {problem})"


@pytest.mark.parametrize(("reply", "problem"), TROUBLE.values(), ids=TROUBLE)
async def test_without_another_prefill_the_request_is_served_colocated(reply, problem):
    p, d = prefill(reply), decode()
    async with serving(p, d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert "kv_transfer_params" not in d.calls[0].body
    record = service.record
    assert (record.split, record.prefill_engine) == (False, None)
    assert record.reason == f"no prefill engine is ready (prefill-0: {problem})"
    assert (record.prefill_start_s, record.prefill_end_s) == (None, None)


async def test_a_prefill_that_refuses_connections_is_replaced_too():
    with nobody_listens() as url:
        q, d = prefill(name="prefill-1"), decode()
        async with serving(dead("prefill-0", "prefill", url), q, d) as service:
            assert tokens_of(await service.ask()) == [5, 6]
    assert service.record.prefill_engine == "prefill-1"
    assert service.record.reason.startswith("a pair is ready (prefill-0: no answer (ClientConnectorError: ")


# decode fails before its first token

DECODE_TROUBLE = {
    "500": (refusing(500), "not today"),
    "403": (refusing(403), "not today"),
    "error event": (streaming({"error": {"message": "KV load failed", "code": 500}}, DONE), "KV load failed"),
    "ends": (streaming(DONE), "the stream ended before the answer did"),
}


@pytest.mark.parametrize(("reply", "problem"), DECODE_TROUBLE.values(), ids=DECODE_TROUBLE)
async def test_a_decode_that_could_not_take_the_kv_serves_the_request_colocated(reply, problem):
    p, d = prefill(), decode(reply, speaking(5, 6))
    async with serving(p, d) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    first, again = (call for call in d.calls if call.leg == "decode")
    assert first.body["kv_transfer_params"] == HANDED_OVER
    assert "kv_transfer_params" not in again.body
    assert p.legs() == ["prefill"]
    assert (service.record.split, service.record.decode_engine) == (False, "decode-0")
    assert service.record.reason == f"the KV transfer failed (decode-0: {problem})"


async def test_after_a_failed_transfer_another_decode_has_its_turn():
    p, d, e = prefill(), decode(refusing(500)), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert (service.record.split, service.record.decode_engine) == (False, "decode-1")
    assert service.record.reason == "the KV transfer failed (decode-0: not today)"


async def test_a_decode_that_fails_colocated_as_well_is_not_asked_again():
    async with serving(prefill(), decode(refusing(500, "a"), refusing(500, "b"))) as service:
        message, status = await service.refused()
    assert message.startswith("no engine could serve this request: decode-0: a; decode-0: ")
    assert (status, message.count("decode-0: ")) == (502, 2)


async def test_a_decode_that_fails_without_kv_to_take_is_avoided():
    p, d, m = prefill(whole(params=None)), decode(refusing(500)), mixed()
    async with serving(p, d, m) as service:
        assert tokens_of(await service.ask()) == [8, 9]
    assert service.record.reason == "no decode engine is ready (decode-0: not today)"


async def test_a_decode_that_breaks_off_without_an_answer_is_avoided_and_the_request_split_again():
    second = HANDED_OVER | {"remote_request_id": "second"}
    p, d, e = prefill(whole(), whole(params=second)), decode(cutting()), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert p.legs() == ["prefill", "prefill"]
    (again,) = [call for call in e.calls if call.leg == "decode"]
    assert again.body["kv_transfer_params"] == second
    assert (service.record.split, service.record.decode_engine) == (True, "decode-1")
    problem = "no answer (ServerDisconnectedError: Server disconnected)"
    assert service.record.reason == f"a pair is ready (decode-0: {problem})"


@pytest.mark.parametrize("reply", [refusing(500), cutting()], ids=["500", "closed"])
async def test_the_kv_of_a_leg_that_decode_did_not_accept_is_released_elsewhere(reply):
    p, d, e = prefill(), decode(reply), decode(name="decode-1")
    async with serving(p, d, e) as service:
        await service.ask()
        await service.legs.close()
        (release,) = [call for call in e.calls if call.leg == "release"]
    assert release.body["kv_transfer_params"] == HANDED_OVER
    assert d.legs() == ["decode"]


@pytest.mark.parametrize("name", ["error event", "ends"])
async def test_the_kv_of_a_leg_that_decode_accepted_is_decodes_to_release(name):
    p, d, e = prefill(), decode(DECODE_TROUBLE[name][0]), decode(name="decode-1")
    async with serving(p, d, e) as service:
        await service.ask()
        await service.legs.close()
    assert (d.legs(), e.legs()) == (["decode"], ["decode"])


async def test_a_release_is_the_shortest_request_with_the_same_prompt():
    p, d = prefill(), decode(refusing(500), speaking(5))
    async with serving(p, d, mixed()) as service:
        await service.ask(cache_salt="salt", sampling={"max_tokens": 99, "temperature": 1.0, "logprobs": 3})
        release = await d.call(1)
    assert release.headers["X-Request-Id"] == "gen-1-release"
    # what it reads may be another's by then, and must never be found in decode's cache
    assert release.body.pop("cache_salt").startswith("release-")
    assert release.body == {
        "token_ids": [11, 12, 13],
        "model": "tiny",
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "stream": True,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": HANDED_OVER,
    }


async def test_stamps_of_a_failed_attempt_are_forgotten():
    """Else the handover of a colocated answer would be told."""
    async with serving(prefill(whole(cached=2)), decode(refusing(500)), mixed()) as service:
        assert tokens_of(await service.ask()) == [8, 9]
    record = service.record
    assert (record.split, record.decode_engine, record.prefill_engine) == (False, "mixed-0", None)
    assert record.reason == "the KV transfer failed (decode-0: not today)"
    assert (record.prefill_start_s, record.prefill_end_s, record.cached_tokens) == (None, None, None)


async def test_a_decode_that_refuses_connections_is_replaced_and_the_kv_released():
    with nobody_listens() as url:
        p, e = prefill(), decode(name="decode-1")
        async with serving(p, dead("decode-0", "decode", url), e) as service:
            assert tokens_of(await service.ask()) == [5, 6]
    assert sorted(e.legs()) == ["decode", "release"]


# decode fails in the middle of its answer


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (streaming(chunk(5), {"error": {"message": "gone", "code": 500}}, DONE), "gone"),
        (streaming(chunk(5), {"error": {"message": "now it says no", "code": 400}}, DONE), "now it says no"),
        (streaming(chunk(5)), "the stream ended before the answer did"),
        (streaming(chunk(5), cut=True), "no answer (ClientPayloadError: "),
    ],
    ids=["error event", "4xx event", "ends", "cut"],
)
async def test_an_answer_that_breaks_off_is_the_clients_to_see(reply, problem):
    p, d, e, m = prefill(), decode(reply), decode(name="decode-1"), mixed()
    async with serving(p, d, e, m) as service:
        message, status = await service.refused()
    assert message.startswith(f"the answer broke off: decode-0: {problem}")
    assert status == 502
    assert tokens_of(service.chunks) == [5]
    assert (e.calls, m.calls, d.legs()) == ([], [], ["decode"])  # nothing tried elsewhere, nothing to release
    assert service.record.error == message


# the request itself is refused


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_prefill_refuses_as_the_clients_fault_is_not_retried(status):
    p, q, d = prefill(refusing(status, "too long")), prefill(name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        assert await service.refused() == ("prefill-0: too long", status)
    assert (q.calls, d.calls) == ([], [])
    assert service.record.error == "prefill-0: too long"


async def test_what_decode_refuses_as_the_clients_fault_is_not_retried_and_releases_the_kv():
    p, d, e = prefill(), decode(refusing(400, "odd")), decode(name="decode-1")
    async with serving(p, d, e) as service:
        assert await service.refused() == ("decode-0: odd", 400)
    assert (p.legs(), d.legs(), e.legs()) == (["prefill"], ["decode"], ["release"])


@pytest.mark.parametrize("status", [401, 403, 404, 405, 408, 429])
async def test_other_refusals_are_the_engines_trouble_and_not_the_clients(status):
    async with serving(prefill(refusing(status, "a")), decode(refusing(status, "b"))) as service:
        expected = "no engine could serve this request: prefill-0: a; decode-0: b"
        assert await service.refused() == (expected, 502)


# an engine goes out of service

LOST = ["not ready", "gone", "started anew"]


@pytest.mark.parametrize("how", LOST)
async def test_a_prefill_leg_ends_when_its_engine_goes_out_of_service(how):
    p, q, d = prefill(hanging()), prefill(name="prefill-1"), decode()
    async with serving(p, q, d) as service:
        task = asyncio.create_task(service.ask())
        call = await p.call()
        service.loses("prefill-0", how)
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
        await call.end()
        assert call.cancelled
    assert (service.record.split, service.record.prefill_engine) == (True, "prefill-1")
    assert service.record.reason == "a pair is ready (prefill-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("answered", [False, True])
async def test_a_decode_leg_without_a_token_is_tried_elsewhere_when_its_engine_goes_out_of_service(answered, how):
    reply = streaming(b": waiting\n\n", asyncio.Event()) if answered else hanging()
    p, d, e = prefill(), decode(reply), decode(name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        call = await d.call()
        service.loses("decode-0", how)
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
        await call.end()
        assert call.cancelled
    assert (service.record.split, service.record.decode_engine) == (True, "decode-1")
    assert service.record.reason == "a pair is ready (decode-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
async def test_a_decode_that_goes_out_of_service_while_prefill_runs_is_not_waited_for(how):
    answer = asyncio.Event()
    p = prefill(streaming(answer, json.dumps({"kv_transfer_params": HANDED_OVER}).encode()), whole())
    d, e = decode(hanging()), decode(name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.ask())
        await p.call()
        service.loses("decode-0", how)
        answer.set()
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
    assert service.record.reason == "a pair is ready (decode-0: went out of service)"


@pytest.mark.parametrize("how", LOST)
async def test_an_answer_breaks_off_when_its_engine_goes_out_of_service(how):
    p, d, e = prefill(), decode(streaming(chunk(5), asyncio.Event())), decode(name="decode-1")
    async with serving(p, d, e) as service:
        task = asyncio.create_task(service.refused())
        await holds(lambda: service.chunks)
        await asyncio.sleep(0)  # the next token is being waited for
        service.loses("decode-0", how)
        expected = ("the answer broke off: decode-0: went out of service", 502)
        assert await asyncio.wait_for(task, WAIT_S) == expected
        await d.calls[0].end()
        assert d.calls[0].cancelled
    assert tokens_of(service.chunks) == [5]
    assert e.calls == []


@pytest.mark.parametrize("how", LOST)
async def test_an_answer_breaks_off_when_its_engine_went_out_of_service_while_the_client_was_busy(how):
    p, d = prefill(), decode(streaming(chunk(5), asyncio.Event()))
    async with serving(p, d) as service:
        chunks = service.legs.run(token_request())
        assert (await anext(chunks)).token_ids == [5]
        service.loses("decode-0", how)
        with pytest.raises(ServingError, match=r"^the answer broke off: decode-0: went out of service$"):
            await asyncio.wait_for(anext(chunks), WAIT_S)


async def test_a_colocated_leg_ends_when_its_engine_goes_out_of_service():
    m, d = mixed(hanging()), decode()
    async with serving(m, d) as service:
        task = asyncio.create_task(service.ask(unsplittable="it is special"))
        await m.call()
        service.loses("mixed-0", "gone")
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]
    assert service.record.reason == "it is special (mixed-0: went out of service)"


async def test_a_leg_runs_on_when_another_engine_goes_out_of_service():
    more = asyncio.Event()
    d, e = decode(streaming(chunk(5), more, chunk(6, finish_reason="length"), usage(), DONE)), decode(name="decode-1")
    async with serving(prefill(), d, e) as service:
        task = asyncio.create_task(service.ask())
        await holds(lambda: service.chunks)
        service.loses("decode-1", "gone")
        service.loses("prefill-0", "gone")
        more.set()
        assert tokens_of(await asyncio.wait_for(task, WAIT_S)) == [5, 6]


# nothing can serve


async def test_without_engines_the_service_is_not_available():
    async with serving() as service:
        assert await service.refused() == ("no engine is ready to serve this request", 503)
    assert service.record.error == "no engine is ready to serve this request"


async def test_when_every_engine_fails_each_fault_is_told():
    async with serving(prefill(refusing(500, "a")), decode(refusing(500, "b"))) as service:
        expected = "no engine could serve this request: prefill-0: a; decode-0: b"
        assert await service.refused() == (expected, 502)
    assert service.record.error == expected


async def test_the_third_attempt_is_colocated():
    broken = [prefill(refusing(500), name=f"prefill-{number}") for number in range(4)]
    async with serving(*broken, decode()) as service:
        await service.ask()
    assert [len(one.calls) for one in broken] == [1, 1, 0, 0]
    assert service.record.split is False
    assert service.record.reason.startswith("split failed (prefill-0: ")


async def test_three_attempts_are_enough():
    broken = [decode(refusing(500), name=f"decode-{number}") for number in range(4)]
    async with serving(prefill(), *broken) as service:
        _, status = await service.refused()
    assert status == 502
    served = [[leg for leg in one.legs() if leg != "release"] for one in broken]
    assert served == [["decode"], ["decode"], ["decode"], []]


# the client goes away


async def test_cancelling_during_prefill_closes_its_connection():
    p, d = prefill(hanging()), decode()
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        call = await p.call()
        await cancelled(task)
        assert service.outstanding() == {}
        await call.end()
        assert call.cancelled
    assert d.calls == []
    assert (service.record.finish_reason, service.record.error) == ("abort", None)


async def test_cancelling_before_decodes_first_token_releases_the_kv():
    p, d = prefill(), decode(hanging(), speaking(5))
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        call = await d.call()
        await cancelled(task)
        assert service.outstanding() == {}
        assert service.legs.releases_pending == 1
        await call.end()
        assert call.cancelled
        release = await d.call(1)
        await release.end()
        assert (release.leg, release.body["kv_transfer_params"]) == ("release", HANDED_OVER)
    assert service.record.finish_reason == "abort"


async def test_cancelling_a_decode_leg_that_was_accepted_releases_nothing(monkeypatch):
    """Decode tells prefill itself."""
    accepted, original = asyncio.Event(), life.stream

    def stream(*arguments):
        def on_accepted():
            arguments[-1]()
            accepted.set()

        return original(*arguments[:-1], on_accepted)

    monkeypatch.setattr(life, "stream", stream)
    p, d = prefill(), decode(streaming(b": waiting\n\n", asyncio.Event()))
    async with serving(p, d) as service:
        task = asyncio.create_task(service.ask())
        await asyncio.wait_for(accepted.wait(), WAIT_S)
        await cancelled(task)
        assert service.legs.releases_pending == 0
        await d.calls[0].end()
        assert d.calls[0].cancelled
    assert d.legs() == ["decode"]


async def test_cancelling_between_the_legs_releases_the_kv():
    """The client leaves while it is handed prefill's token: decode has not been asked yet."""
    p, d = prefill(), decode(speaking(5))
    async with serving(p, d, connector=SeedingConnector()) as service:
        chunks = service.legs.run(token_request())
        assert (await anext(chunks)).token_ids == (7,)
        assert d.calls == []
        await chunks.aclose()
        assert service.outstanding() == {}
        release = await d.call()
        assert (release.leg, release.body["kv_transfer_params"]) == ("release", HANDED_OVER)
    assert service.record.finish_reason == "abort"


async def test_cancelling_behind_decodes_first_token_ends_it_and_releases_nothing():
    p, d = prefill(), decode(streaming(chunk(5), asyncio.Event()))
    async with serving(p, d) as service:
        chunks = service.legs.run(token_request())
        assert (await anext(chunks)).token_ids == [5]
        assert service.outstanding() == {"decode-0": 5}
        await chunks.aclose()
        await d.calls[0].end()
        assert d.calls[0].cancelled
        assert service.legs.releases_pending == 0
    assert d.legs() == ["decode"]
    assert (service.record.finish_reason, service.record.completion_tokens) == ("abort", 1)


async def test_cancelling_a_colocated_request_ends_it():
    m = mixed(streaming(chunk(5), asyncio.Event()))
    async with serving(m) as service:
        task = asyncio.create_task(service.ask())
        call = await m.call()
        await cancelled(task)
        await call.end()
        assert call.cancelled


# releasing


async def held_without_a_taker(*engines) -> tuple[Service, list[str]]:
    """A service whose client left with KV held, and what each decode engine was asked."""
    async with serving(prefill(), *engines) as service:
        task = asyncio.create_task(service.ask())
        await engines[0].call()
        await cancelled(task)
        await service.legs.close()
    return service, [one.legs() for one in engines]


async def test_one_engine_releases_and_it_is_not_the_one_that_just_failed():
    _, legs = await held_without_a_taker(decode(hanging(), speaking(5)), decode(name="decode-1"))
    assert legs == [["decode"], ["release"]]


async def test_an_engine_that_cannot_release_leaves_it_to_the_next():
    d, e = decode(hanging(), speaking(5)), decode(refusing(500), name="decode-1")
    _, legs = await held_without_a_taker(d, e)
    assert legs == [["decode", "release"], ["release"]]


async def test_an_engine_that_releases_too_slowly_leaves_it_to_the_next(caplog, monkeypatch):
    d, e = decode(hanging(), speaking(5)), decode(hanging(), name="decode-1")
    async with serving(prefill(), d, e) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        monkeypatch.setattr(life, "_RELEASE_TIMEOUT_S", 0.1)
        await cancelled(task)
        await holds(lambda: service.legs.releases_pending == 0)
    assert (d.legs(), e.legs()) == (["decode", "release"], ["release"])
    assert [one for one in caplog.messages if "gen-1" in one] == ["releasing KV of gen-1 at decode-1: too slow"]


async def test_kv_that_nobody_can_release_is_left_to_its_lease_with_a_word(caplog):
    _, legs = await held_without_a_taker(decode(hanging(), refusing(500)))
    assert legs == [["decode", "release"]]
    assert "KV of gen-1 is left to its lease: no decode engine could release it" in caplog.messages


async def test_closing_gives_up_on_a_release_that_takes_too_long(monkeypatch):
    d = decode(hanging())
    async with serving(prefill(), d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        await cancelled(task)
        release = await d.call(1)
        monkeypatch.setattr(life, "_RELEASE_TIMEOUT_S", 0.05)
        await asyncio.wait_for(service.legs.close(), 1.0)
        await release.end()
        assert (release.leg, release.cancelled) == ("release", True)


async def test_closing_waits_for_releases():
    hold = asyncio.Event()
    d = decode(hanging(), streaming(hold, chunk(5, finish_reason="length"), usage(), DONE))
    async with serving(prefill(), d) as service:
        task = asyncio.create_task(service.ask())
        await d.call()
        await cancelled(task)
        closing = asyncio.create_task(service.legs.close())
        await d.call(1)
        assert not closing.done()
        hold.set()
        await asyncio.wait_for(closing, WAIT_S)
        assert service.legs.releases_pending == 0


# connectors that hand over the first token


async def test_the_first_token_comes_from_prefill_and_decode_continues_after_it():
    hold = asyncio.Event()
    p = prefill(whole(7, cached=2))
    d = decode(streaming(hold, chunk(8), chunk(9, finish_reason="length"), usage(3), DONE))
    async with serving(p, d, connector=SeedingConnector()) as service:
        chunks = service.legs.run(token_request(sampling={"temperature": 0.0, "max_tokens": 3, "top_k": 5}))
        assert await asyncio.wait_for(anext(chunks), WAIT_S) == TokenChunk((7,), cached_tokens=2)
        hold.set()
        rest = [one async for one in chunks]
    assert [(list(one.token_ids), one.finish_reason, one.cached_tokens) for one in rest] == [
        ([8], None, None),
        ([9], "length", None),
    ]
    assert p.calls[0].body["sampling_params"] == {"temperature": 0.0, "max_tokens": 1, "top_k": 5}
    assert d.calls[0].body["token_ids"] == [11, 12, 13, 7]
    assert d.calls[0].body["sampling_params"] == {"temperature": 0.0, "max_tokens": 2, "top_k": 5}
    assert d.calls[0].body["kv_transfer_params"] == HANDED_OVER
    assert (service.record.split, service.record.completion_tokens) == (True, 3)


async def test_cached_tokens_of_a_decode_that_had_only_to_continue_are_not_told():
    async with serving(
        prefill(whole(7, cached=2)), decode(speaking(8, cached=3)), connector=SeedingConnector()
    ) as service:
        assert [one.cached_tokens for one in await service.ask()] == [2, None]


@pytest.mark.parametrize(
    ("finish", "limit", "expected"), [("stop", 5, "stop"), ("length", 1, "length"), ("stop", 1, "stop")]
)
async def test_an_answer_of_one_token_needs_no_decode_and_releases_the_kv(finish, limit, expected):
    p, d = prefill(whole(7, finish=finish)), decode(speaking(5))
    async with serving(p, d, connector=SeedingConnector()) as service:
        (only,) = await service.ask(sampling={"temperature": 0.0, "max_tokens": limit})
        await service.legs.close()
    assert (only.token_ids, only.finish_reason) == ((7,), expected)
    assert d.legs() == ["release"]
    assert service.record.finish_reason == expected


async def test_where_its_token_could_not_be_continued_decode_makes_the_first_one():
    p, d = prefill(whole(7)), decode()
    async with serving(p, d, connector=SeedingConnector()) as service:
        chunks = await service.ask(sampling={"temperature": 0.0, "max_tokens": 2, "logprobs": 1})
    assert tokens_of(chunks) == [5, 6]
    assert p.calls[0].body["sampling_params"]["min_tokens"] == 1
    assert d.calls[0].body["token_ids"] == [11, 12, 13]


async def test_a_token_without_kv_behind_it_is_not_handed_over():
    p, d = prefill(whole(7, params=None)), decode()
    async with serving(p, d, connector=SeedingConnector()) as service:
        assert tokens_of(await service.ask()) == [5, 6]
    assert d.calls[0].body["token_ids"] == [11, 12, 13]
    assert service.record.split is False


async def test_decode_that_fails_behind_prefills_token_breaks_the_answer_off_and_releases_the_kv():
    p, d, e = prefill(), decode(refusing(500)), decode(name="decode-1")
    async with serving(p, d, e, connector=SeedingConnector()) as service:
        assert await service.refused() == ("the answer broke off: decode-0: not today", 502)
        await service.legs.close()
    assert tokens_of(service.chunks) == [7]
    assert e.legs() == ["release"]
