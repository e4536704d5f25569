"""The choice of engines, over simulated engines that keep prefix caches as vLLM does."""

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from helpers.stack import MODEL, QUICK, answer_of, listening, stack, token_request
from trivet.gateway.app import Rules
from trivet.routing.choose import Knowledge
from trivet.routing.policy import Policy
from trivet.routing.prefixes import NOTHING, PrefixTable

CONNECTORS = ("NixlConnector", "TrivetConnector")


class Blind(PrefixTable):
    """Knows nothing, so that load and turns choose alone."""

    def known(self, *_):
        return NOTHING


def auto(**thresholds) -> Knowledge:
    return Knowledge(Policy("auto", **thresholds))


async def converse(built, turns: int, start: int, *, prompt: int = 500, said: int = 60) -> None:
    """A conversation of which each turn begins with all that was said before."""
    token_ids = list(range(start, start + prompt))
    for turn in range(turns):
        request = replace(token_request(tokens=20), token_ids=token_ids)
        answer = await answer_of(built, request)
        token_ids = [*token_ids, *answer, *range(start + 5000 + turn, start + 5000 + turn + said)]


def hit_rate(built) -> float:
    return sum(one.cached_tokens for one in built.records) / sum(one.prompt_tokens for one in built.records)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_turns_of_a_conversation_go_to_the_same_prefill_engine(connector):
    settings = replace(QUICK, kv_connector=connector)
    async with stack(*["prefill"] * 3, *["decode"] * 2, settings=settings) as built:
        await converse(built, 6, 300)
        assert len({one.prefill_engine for one in built.records}) == 1
        assert all(one.split for one in built.records)
        assert [one.cached_tokens > 400 for one in built.records] == [False, *[True] * 5]
        await built.at_rest()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_many_conversations_find_far_more_of_their_prompts_than_in_turn(connector):
    rates = []
    for prefixes in (PrefixTable(), Blind()):
        settings = replace(QUICK, kv_connector=connector)
        knowledge = Knowledge(prefixes=prefixes)
        async with stack(*["prefill"] * 4, *["decode"] * 2, settings=settings, knowledge=knowledge) as built:
            await asyncio.gather(*(converse(built, 5, 300 + 700 * number) for number in range(8)))
            rates.append(hit_rate(built))
            assert {one.prefill_engine for one in built.records} == {f"prefill-{number}" for number in range(4)}
            await built.at_rest()
    assert rates[0] > 0.6
    assert rates[0] > 1.5 * rates[1]


async def test_a_queue_that_is_long_sends_a_conversation_elsewhere():
    async with stack("prefill", "prefill", "decode") as built:
        await converse(built, 1, 300)
        first = built.records[0].prefill_engine
        busy = next(one for one in built.engines.ready("prefill") if one.name == first)
        with built.engines.charge(busy, 10_000):
            await converse(built, 1, 300)
        await converse(built, 1, 300)
        assert built.records[1].prefill_engine != first
        await built.at_rest()


async def test_an_engine_that_was_started_anew_is_not_thought_to_know_anything():
    async with stack("prefill", "decode") as built:
        await converse(built, 1, 300)
        request = token_request(prompt=500)
        prefix = built.legs._knows.prefixes
        (before,) = built.engines.ready("prefill")
        chain = _prefix(request)
        assert prefix.cached_tokens(chain, before) > 400
        assert prefix.cached_tokens(chain, replace(before, generation=before.generation + 1)) == 0


async def test_an_engine_that_has_lost_what_it_had_corrects_the_table():
    """Its pool is too small for two prompts: the second one evicts the first."""
    clock = [0.0]
    table = PrefixTable(now_s=lambda: clock[0])
    own = {"prefill-0": replace(QUICK, kv_tokens=1024)}
    async with stack("prefill", "decode", own=own, knowledge=Knowledge(prefixes=table)) as built:
        (engine,) = built.engines.ready("prefill")
        for start in (300, 3000, 300):
            await converse(built, 1, start, prompt=900)
            clock[0] += 100
        assert all(one.cached_tokens < 200 for one in built.records)
        # it was expected to have the first prompt still: now nothing is believed that is as old as that was
        assert table.cached_tokens(_prefix(token_request(prompt=900)), engine) > 800
        assert table.cached_tokens(_prefix(token_request(prompt=900, start=3000)), engine) == 0


async def test_a_split_prompt_charges_prefill_with_what_it_has_to_compute():
    async with stack("prefill", "decode", settings=replace(QUICK, prefill_ms=50)) as built:
        seen = []
        for _ in range(2):
            asking = asyncio.create_task(answer_of(built, token_request(prompt=500)))
            while not (tokens := built.engines.outstanding_tokens("prefill-0")):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            seen.append(tokens)
            await asking
        assert seen == [500, 500 - 448]
        await built.at_rest()


def _prefix(request):
    from trivet.legs.tokens import TokenAsk

    return TokenAsk(request, {}, None).prefix


# split or not


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(
    ("tiers", "prompt", "expected"),
    [
        (("prefill", "decode", "mixed"), 100, (False, "short_prompt", "mixed-0")),
        (("prefill", "decode"), 100, (False, "short_prompt", "decode-0")),
        (("prefill", "decode", "mixed"), 500, (True, "long_prompt", "decode-0")),
        (("prefill", "decode"), 500, (True, "long_prompt", "decode-0")),
    ],
)
async def test_auto_splits_long_prompts_and_serves_short_ones_colocated(connector, tiers, prompt, expected):
    settings = replace(QUICK, kv_connector=connector)
    async with stack(*tiers, settings=settings, knowledge=auto()) as built:
        await answer_of(built, token_request(prompt=prompt))
        (record,) = built.records
        assert (record.split, record.split_reason, record.decode_engine) == expected
        await built.at_rest()


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_auto_goes_on_where_the_conversation_is_cached(connector):
    """Decode has what it was handed and what it has made, so the next turn has little to compute there."""
    settings = replace(QUICK, kv_connector=connector)
    async with stack("prefill", "decode", "decode", settings=settings, knowledge=auto()) as built:
        await converse(built, 4, 300)
        assert [one.split_reason for one in built.records] == ["long_prompt", *["prefix_cached"] * 3]
        assert len({one.decode_engine for one in built.records}) == 1
        assert all(one.cached_tokens > 400 for one in built.records[1:])
        await built.at_rest()


async def test_auto_leaves_a_slow_pair_alone():
    settings = replace(QUICK, transfer_ms_per_token=0.5)
    async with stack("prefill", "decode", "mixed", settings=settings, knowledge=auto(max_handover_s=0.2)) as built:
        for start in (300, 1000, 1700):
            await answer_of(built, token_request(prompt=600, start=start))
        assert [one.split_reason for one in built.records] == ["long_prompt", "slow_handover", "slow_handover"]
        assert built.records[1].reason.startswith("handovers of this pair take 0.")
        await built.at_rest()


async def test_a_retry_is_called_so():
    async with stack("prefill", "prefill", "decode", knowledge=auto()) as built:
        for name in ("prefill-0", "prefill-1"):
            await built.sim(name).stop()
        await answer_of(built, token_request(prompt=500))
        (record,) = built.records
        assert (record.split, record.split_reason) == (False, "retry")


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"sampling": {"skip_reading_prefix_cache": True}}])
async def test_requests_for_which_no_cache_is_read_teach_nothing(fields):
    async with stack("prefill", "decode") as built:
        await answer_of(built, token_request(prompt=500))
        prefixes = built.legs._knows.prefixes
        engines = built.engines.all()
        before = [prefixes.known(_prefix(token_request(prompt=500)), one).tokens for one in engines]
        for _ in range(2):
            await answer_of(built, token_request(prompt=500, **fields))
        assert [prefixes.known(_prefix(token_request(prompt=500)), one).tokens for one in engines] == before
        assert built.records[-1].cached_tokens in (0, None)


# what is told of it


def chat(words: int) -> dict:
    text = " ".join(f"w{number}" for number in range(words))
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("words", "headers", "expected"),
    [
        (3, {}, "colocated; reason=short_prompt; decode=mixed-0"),
        (900, {}, "split; reason=long_prompt; prefill=prefill-0; decode=decode-0"),
        (900, {"X-Trivet-Serve": "colocated"}, "colocated; reason=requested; decode=mixed-0"),
        (3, {"X-Trivet-Serve": "split"}, "split; reason=pair_ready; prefill=prefill-0; decode=decode-0"),
    ],
)
async def test_an_answer_says_how_it_was_made(words, headers, expected, stream):
    async with (
        stack("prefill", "decode", "mixed", knowledge=auto()) as built,
        listening(built.gateway()) as url,
        aiohttp.ClientSession() as session,
    ):
        body = chat(words) | {"stream": stream}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            assert (reply.status, reply.headers["X-Trivet-Served"]) == (200, expected), await reply.text()
            await reply.read()
        decision, reason = expected.split("; ")[:2]
        async with session.get(f"{url}/metrics") as reply:
            labels = f'decision="{decision}",reason="{reason.removeprefix("reason=")}"'
            assert f"trivet_split_decisions_total{{{labels}}} 1.0" in await reply.text()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_says_what_the_answer_said_where_decode_takes_no_kv(stream):
    """Somebody started decode without a connector: it computes each prompt, and says so behind its answer only."""
    plain = replace(QUICK, kv_connector="TrivetConnector", kv_lease_s=0.3)
    async with (
        stack("prefill", "decode", settings=plain, own={"decode-0": replace(plain, kv_transfer=False)}) as built,
        listening(built.gateway()) as url,
        aiohttp.ClientSession() as session,
    ):
        body = chat(300) | {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        headers = {"X-Request-Id": "mine"}
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
            assert reply.status == 200
            said = reply.headers["X-Trivet-Served"]
            await reply.read()
        async with session.get(f"{url}/trivet/requests/mine") as reply:
            facts = await reply.json()
        computed = "colocated; reason=recomputed; prefill=prefill-0; decode=decode-0"
        assert facts["served"] == computed
        assert facts["generations"][0]["split"] is False
        # a stream's head is gone before anybody can know
        assert said == ("split; reason=pair_ready; prefill=prefill-0; decode=decode-0" if stream else computed)


async def test_a_topology_may_have_it_say_nothing():
    async with (
        stack("prefill", "decode") as built,
        listening(built.gateway(Rules(tells_served=False))) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=chat(3)) as reply,
    ):
        assert reply.status == 200
        assert "X-Trivet-Served" not in reply.headers


async def test_texts_that_begin_alike_go_to_the_same_engine():
    async with (
        stack("prefill", "prefill", "decode") as built,
        listening(built.gateway()) as url,
        aiohttp.ClientSession() as session,
    ):
        said = chat(400)["messages"]
        for turn in range(4):
            body = {"model": MODEL, "messages": said, "max_tokens": 8, "cache_salt": "mine"}
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                answer = await reply.json()
            said = [*said, answer["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
            said = [{"role": one["role"], "content": one["content"]} for one in said]
        assert len({one.prefill_engine for one in built.records}) == 1
        assert all(one.cached_tokens > 400 for one in built.records[1:])
        body = {"model": MODEL, "messages": said, "max_tokens": 8, "cache_salt": "another"}
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
        assert built.records[-1].prefill_engine != built.records[0].prefill_engine
