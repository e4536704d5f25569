"""Streamed derender: what vLLM answers, and each token parsed once."""

import asyncio
import copy
import json
from collections import Counter
from typing import Any

import httpx
import pytest
import pytest_asyncio

from helpers.processes import holds
from helpers.token_engine import ScriptedEngine, saying
from render.derender_cases import CASES, MAX_TOKENS, THOUGHT, Case, Shop, at_random, chunks, of, shop, write_folder
from trivet.render.contract import TokenLogprobs

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = Case("<think>" + "One thing and another, and so on. " * 60, "deepseek_r1")
LONG_TOKENS = 400


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="shop")
async def _shop(request, frontend, caches, model_folder, tmp_path_factory):
    (ours,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", "").endswith("tests/render/conftest.py")
    )
    folder = write_folder(model_folder, tmp_path_factory.mktemp("derender") / "model")
    flags = ("--reasoning-parser", "deepseek_r1", "--max-logprobs", "5")
    async with shop(frontend, ours.vllm_around(caches), folder, ScriptedEngine(), *flags) as opened:
        yield opened


@pytest.fixture(scope="session")
def derender(shop):
    import trivet.render.derender

    return trivet.render.derender


@pytest.fixture
def parsing(shop):
    if not shop.parses_streams:
        pytest.skip("this vLLM parses no streams")
    return shop


# one call after the other, without HTTP


def body(shop: Shop, case: Case, chunk: dict, state: dict | None, **asks: Any) -> dict[str, Any]:
    """One call as read from a body: nothing is shared with the call before."""
    state_cls = shop.protocol.DerenderStreamState
    return {
        "model": "tiny",
        "generate_chunk": shop.chunk_cls.model_validate(copy.deepcopy(chunk)),
        "state": None if state is None else state_cls.model_validate(copy.deepcopy(state)),
        "chat_request": shop.chat(case, **asks),
        "prompt_tokens": 7,
        "prompt_token_ids": shop.ids(case.prompt),
    }


async def call(shop: Shop, derenderer: Any, case: Case, chunk: dict, state: dict | None, **asks: Any) -> tuple:
    told, after = await derenderer.derender_chat_stream(**body(shop, case, chunk, state, **asks))
    return told.model_dump(), after.model_dump()


def alike(answer: tuple[dict, dict], known: int, logprobs: bool = True) -> str:
    """An answer without what is drawn or timed: its second, and ids of tools that are not known yet.

    Args:
        answer: chunk and state.
        known: how many tools have an id already.
        logprobs: whether they are looked at.
    """
    chunk, state = copy.deepcopy(answer)
    del chunk["created"]
    for choice in chunk["choices"]:
        for tool in choice["delta"].get("tool_calls") or []:
            if tool["index"] >= known and tool["id"] is not None:
                tool["id"] = "new"
        if not logprobs:
            choice["logprobs"] = None
    ids = state["last_tool_call_ids"]
    state["last_tool_call_ids"] = ids[:known] + ["new"] * len(ids[known:])
    return json.dumps((chunk, state))


async def both(shop: Shop, ours: Any, theirs: Any, case: Case, chunk: dict, state: dict | None, **asks: Any) -> tuple:
    """Ours, which must be what vLLM answers to the same body."""
    known = len(state["last_tool_call_ids"]) if state else 0
    told = await call(shop, ours, case, chunk, state, **asks)
    assert alike(told, known, False) == alike(await call(shop, theirs, case, chunk, state, **asks), known, False)
    return told


def joined(pieces: list[dict]) -> dict[str, Any]:
    """What a stream's chunks say together."""
    said: dict[str, Any] = {"reasoning": "", "content": "", "tools": {}, "finish": None}
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        delta = choice["delta"]
        said["reasoning"] += delta.get("reasoning") or ""
        said["content"] += delta.get("content") or ""
        for tool in delta.get("tool_calls") or []:
            name, arguments = said["tools"].get(tool["index"], ("", ""))
            function = tool["function"]
            said["tools"][tool["index"]] = (name or function["name"], arguments + (function["arguments"] or ""))
        said["finish"] = choice["finish_reason"] or said["finish"]
    return said


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
async def test_each_call_answers_what_vllm_answers(parsing, derender, name, seed):
    case = CASES[name]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    state, pieces = None, []
    for chunk in chunks(parsing.ids(case.says), at_random(seed) if seed else of(1), finish=case.finish):
        piece, state = await both(parsing, ours, theirs, case, chunk, state)
        pieces.append(piece)
    assert (linear.begun, linear.replays) == (1, 0)
    assert linear.hits == len(pieces) - 1
    said = joined(pieces)
    assert "\ufffd" not in json.dumps(said, ensure_ascii=False)
    assert said["finish"] == ("tool_calls" if said["tools"] and name != "tool by name" else case.finish)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("tool that ends in the middle", "token ids")])
async def test_a_stream_says_together_what_vllm_makes_of_the_whole(parsing, derender, name):
    case = CASES[name]
    ids = parsing.ids(case.says)
    ours = parsing.theirs(case)
    derender.install(ours)
    state, pieces = None, []
    for chunk in chunks(ids, of(1), finish=case.finish):
        piece, state = await call(parsing, ours, case, chunk, state)
        pieces.append(piece)
    said = joined(pieces)
    whole_cls = parsing.protocol.DerenderChatRequest.model_fields["generate_response"].annotation
    whole = whole_cls.model_validate(
        {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": case.finish}]}
        | {"prompt_token_ids": parsing.ids(case.prompt)}
    )
    (choice,) = await ours.derender_chat(whole, parsing.chat(case), parsing.ids(case.prompt))
    message = choice.message
    tools = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or []]
    if case.asks.get("parallel_tool_calls") is False:
        tools = tools[:1]  # of a whole answer, vLLM's serving layer takes them away, and derender does not
    assert [(name, json.loads(arguments)) for name, arguments in said["tools"].values()] == tools
    # Around a call, whole answers keep blanks that streamed ones do not, or the other way round, by parser.
    assert (said["reasoning"].strip(), said["content"].strip()) == tuple(
        (one or "").strip() for one in (message.reasoning, message.content)
    )


@pytest.mark.parametrize("finish_with_tokens", [True, False])
async def test_every_token_is_parsed_once(parsing, derender, monkeypatch, finish_with_tokens):
    case, seen = LONG, Counter()
    ours = parsing.theirs(case)
    linear = derender.install(ours)
    parse, window = ours.parser.parse_delta, type(ours)._detokenize_delta

    def counted(self, delta_text, delta_token_ids, *args, **kwargs):
        seen["calls"] += 1
        seen["parsed"] += len(delta_token_ids)
        return parse(self, delta_text, delta_token_ids, *args, **kwargs)

    def detokenized(self, tokenizer, delta_token_ids, *args, **kwargs):
        seen["detokenized"] += len(delta_token_ids)
        return window(self, tokenizer, delta_token_ids, *args, **kwargs)

    monkeypatch.setattr(ours.parser, "parse_delta", counted)
    monkeypatch.setattr(type(ours), "_detokenize_delta", detokenized)
    ids = parsing.ids(case.says)[:LONG_TOKENS]
    steps, state = [], None
    for i, one in enumerate(ids):
        before = seen.copy()
        last = finish_with_tokens and i == len(ids) - 1
        chunk = {
            "request_id": "r",
            "choices": [{"index": 0, "token_ids": [one], "finish_reason": "stop" if last else None}],
        }
        _, state = await call(parsing, ours, case, chunk, state)
        steps.append(seen - before)
    if not finish_with_tokens:
        chunk = {"request_id": "r", "choices": [{"index": 0, "token_ids": [], "finish_reason": "stop"}]}
        await call(parsing, ours, case, chunk, state)
    assert seen == {"calls": len(ids) + (not finish_with_tokens), "parsed": len(ids), "detokenized": len(ids)}
    assert all(step == {"calls": 1, "parsed": 1, "detokenized": 1} for step in steps)
    assert (linear.begun, linear.hits, linear.replays) == (1, len(ids) - finish_with_tokens, 0)


async def test_a_call_does_the_same_work_late_in_an_answer_as_early(parsing, derender):
    """Counted in calls of Python functions: our code and vLLM's."""
    import sys

    case = CASES["no tool"]
    ours = parsing.theirs(case)
    derender.install(ours)
    ids = (parsing.ids(case.says.replace(" 🎉", "")) * 60)[:LONG_TOKENS]
    works, state = [], None
    for one in ids:
        chunk = {"request_id": "r", "choices": [{"index": 0, "token_ids": [one]}]}
        counted = 0

        def count(frame, event, arg):
            nonlocal counted
            counted += event == "call"

        asked = body(parsing, case, chunk, state)
        sys.setprofile(count)
        try:
            _, after = await ours.derender_chat_stream(**asked)
        finally:
            sys.setprofile(None)
        works.append(counted)
        state = after.model_dump()
    period = len(parsing.ids(case.says.replace(" 🎉", "")))
    early, late = works[period : 3 * period], works[-2 * period :]
    assert max(late) <= 1.1 * max(early)


# states that are not known


@pytest.mark.parametrize("name", ["reasoning", "two tools", "reasoning and tool by vLLM's engine", "tool in a list"])
async def test_a_state_from_elsewhere_is_replayed_once_and_lives_on(parsing, derender, name):
    case = CASES[name]
    theirs, ours = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    told = list(chunks(parsing.ids(case.says), at_random(5)))
    half, state = len(told) // 2, None
    for chunk in told[:half]:
        _, state = await call(parsing, theirs, case, chunk, state)
    assert state is not None
    tokens = len(state["output_token_ids"])
    for chunk in told[half:]:
        _, state = await both(parsing, ours, theirs, case, chunk, state)
    assert (linear.begun, linear.replays, linear.replayed_tokens) == (0, 1, tokens)
    assert linear.hits == len(told) - half - 1


async def test_ours_can_be_gone_on_with_elsewhere_and_come_back(parsing, derender):
    case = CASES["reasoning and tool"]
    ours, other, theirs = parsing.theirs(case), parsing.theirs(case), parsing.theirs(case)
    linears = [derender.install(ours), derender.install(other)]
    state = None
    for i, chunk in enumerate(chunks(parsing.ids(case.says), of(1))):
        _, state = await both(parsing, (ours, other, theirs)[i % 3], theirs, case, chunk, state)
    assert all(linear.hits == 0 and linear.replays > 5 for linear in linears)


async def test_a_client_may_go_back_and_say_something_else(parsing, derender):
    case = CASES["reasoning and tool"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    ids = parsing.ids(case.says)
    states: list[Any] = [None]
    for chunk in list(chunks(ids[:20], of(1)))[:19]:
        states.append((await both(parsing, ours, theirs, case, chunk, states[-1]))[1])
    for back, more in ((5, "Hm</think>42 🎉"), (19, "and</think>1"), (0, "1"), (12, "</think>" + case.says)):
        state = states[back]
        for chunk in chunks(parsing.ids(more), at_random(back)):
            _, state = await both(parsing, ours, theirs, case, chunk, state)
    assert linear.replays == 2  # at 19 its own parser still was, and at 0 there is nothing to replay


async def test_streams_with_equal_beginnings_do_not_meet(parsing, derender):
    case = CASES["reasoning and tool"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    ends = ("It is 42 🎉.", '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "", "It is 43.")
    streams = [list(chunks(parsing.ids(THOUGHT + end), of(1), index=i)) for i, end in enumerate(ends)]
    states: list[Any] = [None] * len(ends)
    for step in range(max(map(len, streams))):
        for i, stream in enumerate(streams):
            if step < len(stream):
                _, states[i] = await both(parsing, ours, theirs, case, stream[step], states[i])
    assert (linear.begun, linear.replays) == (len(ends), 0)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"include_reasoning": False}),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": True}}),
        ({}, {"some_extra": 1}),
        ({}, {"messages": [{"role": "user", "content": "Ho"}]}),
    ],
    ids=["a field", "a kind of number", "a field of nobody's", "a message"],
)
async def test_a_request_that_is_another_one_finds_nothing(parsing, derender, first, then):
    case = CASES["reasoning"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    told = list(chunks(parsing.ids(case.says), of(1)))
    state = None
    for chunk in told[:6]:
        _, state = await both(parsing, ours, theirs, case, chunk, state, **first)
    assert linear.replays == 0
    _, state = await both(parsing, ours, theirs, case, told[6], state, **then)
    assert linear.replays == 1


async def test_a_prompt_or_chunks_that_are_others_find_nothing(parsing, derender):
    case = CASES["reasoning"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    told = list(chunks(parsing.ids(case.says), of(2)))
    state: Any = None
    for chunk in told[:6]:
        _, state = await both(parsing, ours, theirs, case, chunk, state)
    other = {**state, "output_chunk_lens": [1] * len(state["output_token_ids"])}
    await both(parsing, ours, theirs, case, told[6], other)
    assert linear.replays == 1
    ids = state["output_token_ids"]
    other = {**state, "output_token_ids": [ids[0] + 1, *ids[1:]]}
    await both(parsing, ours, theirs, case, told[6], other)
    assert linear.replays == 2
    prompted = Case(case.says, case.reasoning, prompt="Hi<think>")
    await both(parsing, ours, theirs, prompted, told[6], state)
    assert linear.replays == 3
    await both(parsing, ours, theirs, case, told[6], state)
    assert linear.replays == 3


async def test_what_the_client_carries_is_the_clients(parsing, derender):
    """Whether the role was sent, and ids of tools, are its word; parsers know nothing of them."""
    case = CASES["two tools"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    state: Any = None
    for chunk in chunks(parsing.ids(case.says), of(1)):
        _, state = await both(parsing, ours, theirs, case, chunk, state)
        state |= {"role_sent": False, "last_tool_call_ids": [f"mine-{i}" for i in range(3)], "prev_tokens": ["x"]}
    assert linear.replays == 0


async def test_a_state_that_was_answered_changes_no_more(parsing, derender):
    case = CASES["reasoning"]
    ours = parsing.theirs(case)
    derender.install(ours)
    answered, states = None, []
    for chunk in chunks(parsing.ids(case.says), of(1)):
        asked = body(parsing, case, chunk, None if answered is None else answered.model_dump())
        _, answered = await ours.derender_chat_stream(**asked)
        states.append((answered, answered.model_dump()))
    assert [state.model_dump() for state, _ in states] == [then for _, then in states]


# ends


async def test_behind_the_end_only_usage_is_free(parsing, derender):
    case = CASES["reasoning"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    ids = parsing.ids(case.says)
    last = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
    usage = {"request_id": "r", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    _, state = await both(parsing, ours, theirs, case, last, None)
    _, state = await both(parsing, ours, theirs, case, usage, state)
    assert (linear.hits, linear.replays) == (1, 0)
    more = {"request_id": "r", "choices": [{"index": 0, "token_ids": parsing.ids(" Or so."), "finish_reason": None}]}
    _, state = await both(parsing, ours, theirs, case, more, state)
    assert (linear.hits, linear.replays) == (1, 1)
    await both(parsing, ours, theirs, case, usage, state)
    assert (linear.hits, linear.replays) == (2, 1)


async def test_usage_between_tokens_leaves_the_parser_where_it_is(parsing, derender):
    case = CASES["reasoning and tool"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    usage = {"request_id": "r", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    empty = {"request_id": "r", "choices": [{"index": 0, "token_ids": []}]}
    state = None
    for chunk in (usage, empty, *chunks(parsing.ids(case.says), of(3))):
        _, state = await both(parsing, ours, theirs, case, chunk, state)
        _, state = await both(parsing, ours, theirs, case, usage, state)
        _, state = await both(parsing, ours, theirs, case, {**chunk, "choices": []}, state)
    assert linear.replays == 0


# what goes wrong


async def test_a_parser_that_fails_fails_alone(parsing, derender, monkeypatch):
    case = CASES["reasoning"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    told = list(chunks(parsing.ids(case.says), of(1)))
    state = None
    for chunk in told[:4]:
        _, state = await both(parsing, ours, theirs, case, chunk, state)
    with monkeypatch.context() as broken:
        broken.setattr(ours.parser, "parse_delta", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await call(parsing, ours, case, told[4], state)
    for chunk in told[4:]:
        _, state = await both(parsing, ours, theirs, case, chunk, state)
    assert linear.replays == 1


async def test_two_calls_at_once_from_one_state_each_have_their_parser(parsing, derender):
    case = CASES["reasoning and tool"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    ids = parsing.ids(case.says)
    _, state = await both(parsing, ours, theirs, case, next(chunks(ids, of(8))), None)
    big = {"request_id": "r", "choices": [{"index": 0, "token_ids": (ids * 4)[8:90]}]}  # goes to a thread
    small = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids[8:9]}]}
    want = {id(chunk): alike(await call(parsing, theirs, case, chunk, state), 0) for chunk in (big, small)}
    asked = [big, small, small, big, small]
    answers = await asyncio.gather(*(call(parsing, ours, case, chunk, state) for chunk in asked))
    assert [alike(answer, 0) for answer in answers] == [want[id(chunk)] for chunk in asked]
    assert (linear.hits, linear.replays) == (1, 4)


async def test_a_call_that_is_given_up_leaves_no_parser_behind(parsing, derender, monkeypatch):
    import threading

    case = CASES["reasoning"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours)
    ids = parsing.ids(case.says)
    _, state = await both(parsing, ours, theirs, case, next(chunks(ids, of(4))), None)
    waits, goes = threading.Event(), threading.Event()
    parse = ours.parser.parse_delta

    def slow(*args, **kwargs):
        waits.set()
        assert goes.wait(60)
        return parse(*args, **kwargs)

    big = {"request_id": "r", "choices": [{"index": 0, "token_ids": (ids * 3)[4:60]}]}
    with monkeypatch.context() as held:
        held.setattr(ours.parser, "parse_delta", slow)
        asking = asyncio.create_task(call(parsing, ours, case, big, state))
        await holds(waits.is_set)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert len(linear.store) == 0
        goes.set()
        await both(parsing, ours, parsing.theirs(case), case, big, state)
    assert (linear.hits, linear.replays) == (1, 1)


async def test_others_of_vllms_stay_as_they_are(parsing, derender):
    case = CASES["reasoning"]
    kind = type(parsing.theirs(case))
    before = dict(vars(kind))
    linear = derender.install(parsing.theirs(case))
    assert dict(vars(kind)) == before
    state: Any = None
    theirs = parsing.theirs(case)
    for chunk in chunks(parsing.ids(case.says), of(1)):
        _, state = await call(parsing, theirs, case, chunk, state)
    assert (linear.begun, linear.hits) == (0, 0)


async def test_a_vllm_that_replays_in_another_way_is_left_to_it(parsing, derender):
    case = CASES["reasoning"]

    class Newer(type(parsing.theirs(case))):
        def _derender_chat_stream_parsed(self, *, everything):
            return everything

    newer = parsing.theirs(case)
    newer.__class__ = Newer
    before = newer._derender_chat_stream_parsed_async
    assert not derender.install(newer).linear
    assert newer._derender_chat_stream_parsed_async is before


# bounds


def held(derender: Any, **limits: Any) -> tuple[Any, list[float]]:
    now = [0.0]
    return derender.Store(derender.Limits(**limits), lambda: now[0]), now


async def test_the_longest_idle_makes_room(derender):
    store, _ = held(derender, entries=3)
    for name in "abc":
        store.put(name, name, 1)
    assert store.take("a", lambda _: True) == "a"
    store.put("a", "a", 1)
    store.put("d", "d", 1)
    assert [store.take(name, lambda _: True) for name in "abcd"] == ["a", None, "c", "d"]
    assert (len(store), store.bytes, store.evictions) == (0, 0, 1)


async def test_what_weighs_too_much_makes_room(derender):
    store, _ = held(derender, bytes=100)
    store.put("a", "a", 60)
    store.put("b", "b", 60)
    assert (len(store), store.bytes, store.evictions) == (1, 60, 1)
    store.put("c", "c", 101)
    assert (len(store), store.bytes, store.evictions) == (0, 0, 3)


async def test_what_waits_too_long_is_forgotten(derender):
    store, now = held(derender, age_s=10)
    store.put("a", "a", 1)
    now[0] = 6
    store.put("b", "b", 1)
    now[0] = 11
    assert store.take("a", lambda _: True) is None
    assert (len(store), store.bytes, store.expirations, store.evictions) == (1, 1, 1, 0)
    now[0] = 17
    store.put("c", "c", 1)
    assert (len(store), store.expirations) == (1, 2)


async def test_what_is_taken_is_nobody_elses(derender):
    store, _ = held(derender)
    store.put("same", "one", 1)
    store.put("same", "two", 1)
    assert store.take("same", lambda one: one == "two") == "two"
    assert store.take("same", lambda one: one == "two") is None
    store.clear()
    assert (len(store), store.bytes, store.take("same", lambda _: True)) == (0, 0, None)


async def test_streams_that_had_to_make_room_go_on_all_the_same(parsing, derender):
    case = CASES["reasoning and tool"]
    ours, theirs = parsing.theirs(case), parsing.theirs(case)
    linear = derender.install(ours, derender.Limits(entries=2))
    told = list(chunks(parsing.ids(case.says), of(2)))
    states: list[Any] = [None] * 3
    for chunk in told:
        for i in range(3):
            _, states[i] = await both(parsing, ours, theirs, case, chunk, states[i], seed=i)
    assert linear.evictions > 10
    assert linear.replays > 10
    assert len(linear.store) <= 2


async def test_a_stream_weighs_what_it_has_more_of(parsing, derender):
    case = LONG
    ours = parsing.theirs(case)
    linear = derender.install(ours)
    state, weights = None, []
    for chunk in chunks(parsing.ids(case.says)[:40], of(10)):
        _, state = await call(parsing, ours, case, chunk, state)
        weights.append(linear.store.bytes)
    assert weights[0] < weights[1] < weights[2] < weights[3]
    assert len(linear.store) == 1


# logprobs


async def test_logprobs_are_those_that_vllm_serve_streams(parsing, derender):
    """The same tokens from the front end's own chat path, and through derender."""
    case = Case(f"{THOUGHT}It is 🎉🦜.", "deepseek_r1", asks={"logprobs": True, "top_logprobs": 2})
    ids = parsing.ids(case.says)
    logprobs = [TokenLogprobs([one, one + 1], [-0.5, -1.5], 1) for one in ids]
    parsing.engine.script = saying(ids, finish="stop", logprobs=logprobs)
    derenderer = parsing.app.state.online_derenderer
    with parsing.serving(derenderer) as client:
        body = parsing.chat_body(case, stream=True)
        lines = (await client.post("/v1/chat/completions", json=body)).text.split("\n")
    served = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    want = [
        one
        for event in served
        for choice in event["choices"]
        for one in (choice.get("logprobs") or {}).get("content", [])
    ]
    assert [one["logprob"] for one in want] == [-0.5] * len(ids)
    assert any("🎉" in one["token"] for one in want)

    ours = parsing.theirs(case)
    derender.install(ours)
    state, got = None, []
    for chunk in chunks(ids, of(1), logprobs=True):
        piece, state = await call(parsing, ours, case, chunk, state)
        for choice in piece["choices"]:
            told = choice["logprobs"]["content"] if choice["logprobs"] else []
            assert len(told) == len(chunk["choices"][0]["token_ids"])
            got += told
    assert got == want


@pytest.mark.parametrize("seed", range(3))
async def test_logprobs_do_not_depend_on_where_a_stream_is_gone_on_with(parsing, derender, seed):
    case = Case(f"{THOUGHT}It is 🎉🦜.", "deepseek_r1", asks={"logprobs": True})
    first, second, theirs = parsing.theirs(case), parsing.theirs(case), parsing.theirs(case)
    derender.install(first), derender.install(second)
    state, elsewhere = None, None
    for chunk in chunks(parsing.ids(case.says), at_random(seed), logprobs=True):
        known, state = await call(parsing, first, case, chunk, state)
        replayed, _ = await call(parsing, second, case, chunk, elsewhere)
        _, elsewhere = await call(parsing, theirs, case, chunk, elsewhere)
        assert alike((known, state), 0) == alike((replayed, state), 0)


async def test_logprobs_of_hidden_reasoning_are_hidden(parsing, derender):
    case = CASES["reasoning that nobody wants"]
    ours = parsing.theirs(case)
    derender.install(ours)
    state = None
    for chunk in chunks(parsing.ids(case.says), of(1), logprobs=True):
        piece, state = await call(parsing, ours, case, chunk, state)
        assert [choice["logprobs"] for choice in piece["choices"]] == [None] * len(piece["choices"])


# over HTTP


CHAT = "/v1/chat/completions/derender"
COMPLETIONS = "/v1/completions/derender"


@pytest.fixture(scope="session")
def paths(shop):
    import trivet.render.derender_routes

    return trivet.render.derender_routes


class Arm:
    """A server: vLLM's as it is, or with ours first."""

    def __init__(self, shop: Shop, case: Case | None, paths: Any = None, **limits: Any) -> None:
        self.shop = shop
        self.derenderer = shop.theirs(case)
        self.linear = paths.install(self.derenderer, paths.Limits(**limits)) if paths else None
        self.routes = paths.routes(self.linear) if paths else []

    async def post(self, path: str, body: Any, kind: str = "application/json") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.shop.serving(self.derenderer, self.routes) as client:
            return await client.post(path, content=content, headers={"content-type": kind})


@pytest.fixture
def passed(paths, monkeypatch):
    """How many calls went on to vLLM's route."""
    count, on = Counter(), paths._pass

    async def counted(*args):
        count["passed"] += 1
        await on(*args)

    monkeypatch.setattr(paths, "_pass", counted)
    return count


def answered(response: httpx.Response, known: int) -> tuple[int, str]:
    assert response.status_code == 200, response.text
    told = response.json()
    assert set(told) == {"chunk", "stream_state"}
    return response.status_code, alike((told["chunk"], told["stream_state"]), known)


def compact(body: dict) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def spread(body: dict) -> bytes:
    return json.dumps(body, indent=1).encode()


def turned(body: dict) -> bytes:
    """Fields in another order, and only those of the state that are needed."""
    state = body["stream_state"]
    if state and state["output_token_ids"]:
        wanted = ("role_sent", "output_chunk_lens", "output_token_ids", "tools_streamed", "last_tool_call_ids")
        state = {name: state[name] for name in wanted}
    return json.dumps(dict(reversed({**body, "stream_state": state}.items()))).encode()


@pytest.mark.parametrize("write", [compact, spread, turned])
@pytest.mark.parametrize("name", ["reasoning", "two tools", "reasoning and tool by vLLM's engine", "token ids"])
async def test_bodies_are_answered_as_vllm_answers_them(parsing, paths, passed, name, write):
    case = CASES[name]
    ours, theirs = Arm(parsing, case, paths), Arm(parsing, case)
    body = {"stream": True, "model": "tiny", "prompt_tokens": 9, "prompt_token_ids": parsing.ids(case.prompt)}
    body["chat_request"] = parsing.chat_body(case)
    state, calls = None, 0
    for chunk in chunks(parsing.ids(case.says), at_random(7)):
        known = len(state["last_tool_call_ids"]) if state else 0
        raw = write({**body, "generate_chunk": chunk, "stream_state": state})
        told = await ours.post(CHAT, raw)
        assert answered(told, known) == answered(await theirs.post(CHAT, raw), known)
        state, calls = told.json()["stream_state"], calls + 1
    assert (ours.linear.begun, ours.linear.hits, ours.linear.replays) == (1, calls - 1, 0)
    assert passed["passed"] == 1  # the first


async def test_a_client_that_writes_each_body_anew_is_answered_by_vllm_from_the_live_parser(parsing, paths, passed):
    case = CASES["reasoning and tool"]
    ours, theirs = Arm(parsing, case, paths), Arm(parsing, case)
    state, calls = None, 0
    for i, chunk in enumerate(chunks(parsing.ids(case.says), of(4))):
        known = len(state["last_tool_call_ids"]) if state else 0
        asks = parsing.chat_body(case)
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        body |= {"chat_request": dict(reversed(asks.items())) if i % 2 else asks}
        body |= {"prompt_token_ids": parsing.ids(case.prompt)}
        told = await ours.post(CHAT, body)
        assert answered(told, known) == answered(await theirs.post(CHAT, body), known)
        state, calls = told.json()["stream_state"], calls + 1
    assert (ours.linear.hits, ours.linear.replays, passed["passed"]) == (calls - 1, 0, calls)


def spoilt(body: dict, state: dict) -> dict[str, Any]:
    """Bodies that vLLM refuses, or reads in a way of its own."""
    chunk = body["generate_chunk"]
    (choice,) = chunk["choices"]

    def chunked(**fields: Any) -> dict:
        return {**body, "generate_chunk": {**chunk, "choices": [{**choice, **fields}]}}

    def stated(**fields: Any) -> dict:
        return {**body, "stream_state": {**state, **fields}}

    raw = json.dumps(body)
    tokens, lens = (state.get(name, []) for name in ("output_token_ids", "output_chunk_lens"))
    return {
        "another model": {**body, "model": "unknown"},
        "a model that is none": {**body, "model": 5},
        "no model": {**body, "model": None},
        "no prompt": {**body, "prompt_token_ids": None},
        "no request": {**body, "chat_request": None},
        "a request that is none": {**body, "chat_request": {"messages": 5}},
        "no chunk": {name: value for name, value in body.items() if name != "generate_chunk"},
        "a chunk that is none": {**body, "generate_chunk": {"choices": [{"index": "x"}]}},
        "two choices": {**body, "generate_chunk": {**chunk, "choices": [choice, choice]}},
        "a choice without tokens": chunked(token_ids=None),
        "tokens as text": chunked(token_ids=["5", 6]),
        "tokens that are no numbers": chunked(token_ids=["x"]),
        "tokens that nobody knows": chunked(token_ids=[10**7, -1]),
        "too many tokens": chunked(token_ids=[5] * (MAX_TOKENS + 1)),
        "an end": chunked(finish_reason="length", stop_reason=5),
        "text of an engine": {**body, "generate_chunk": {**chunk, "output_mode": "text"}},
        "numbers as text": {**body, "prompt_tokens": "9"},
        "numbers that are none": {**body, "prompt_tokens": True},
        "a state that is none": {**body, "stream_state": 5},
        "a state of another length": stated(output_chunk_lens=[1]),
        "a state with no lengths": stated(output_chunk_lens=[]),
        "a state without tokens": stated(output_token_ids=None),
        "a state with a nought": stated(output_chunk_lens=[0, *lens]),
        "a state with broken tokens": stated(output_token_ids=[1.5, *tokens[1:]]),
        "a state with tokens as text": stated(output_token_ids=list(map(str, tokens))),
        "a state with one text of tokens": stated(output_token_ids=",".join(map(str, tokens))),
        "a state with one text of lengths": stated(output_chunk_lens=",".join(map(str, lens))),
        "a prompt as one text": {**body, "prompt_token_ids": ",".join(map(str, body.get("prompt_token_ids", [])))},
        "a state with too much of a window": stated(prev_tokens=["x"] * 1025),
        "a state with a window": stated(prev_tokens=["x"], prefix_offset=0, read_offset=1),
        "a state that is before its beginning": stated(read_offset=-1),
        "a state with other fields": stated(mine={"a": [1]}),
        "a state with a role as text": stated(role_sent="no"),
        "more context than is looked at": stated(logprob_context_token_ids=[1, 2, 3, 4, 5]),
        "other fields": {**body, "mine": 1},
        "another way of keeping": {**body, "state": "lost"},
        "no stream": {**body, "stream": False},
        "a stream by number": {**body, "stream": 1},
        "nothing": b"",
        "a list": b"[1]",
        "half a body": raw[: len(raw) // 2].encode(),
        "more than a body": raw.encode() + b"}",
        "a body in UTF-16": raw.encode("utf-16"),
        "a body with a mark": b"\xef\xbb\xbf" + raw.encode(),
        "no UTF-8": raw.replace('"r"', '"\\u00ff"').encode().replace(b"\\u00ff", b"\xff"),
        "no UTF-8 in another field": raw[:-1].encode() + b', "mine": "\xff"}',
        "half a character": raw.replace('"r"', '"\\ud83e"').encode(),
        "no number": raw.replace('"finish_reason": null', '"finish_reason": null, "routed_experts": NaN').encode(),
        "a field twice": raw[:-1].encode() + b', "model": "unknown"}',
        "a prompt twice": raw[:-1].encode() + b', "prompt_token_ids": [1, 2]}',
    }


SPOILT = list(spoilt({"generate_chunk": {"choices": [{}]}}, {}))


@pytest.mark.parametrize("fault", SPOILT)
async def test_what_is_wrong_is_answered_as_vllm_answers_it(shop, paths, fault):
    """In the middle of a stream whose parser is alive, which it leaves as it is."""
    case = CASES["reasoning"] if shop.parses_streams else Case(CASES["reasoning"].says)
    ours, theirs = Arm(shop, case, paths), Arm(shop, case)
    ids = shop.ids(case.says)
    body = {"stream": True, "model": "tiny", "chat_request": shop.chat_body(case), "prompt_tokens": 9}
    body |= {"prompt_token_ids": shop.ids(case.prompt), "stream_state": None}
    told = list(chunks(ids, of(2)))
    for chunk in told[:3]:
        body["generate_chunk"] = chunk
        body["stream_state"] = (await ours.post(CHAT, body)).json()["stream_state"]
    body["generate_chunk"] = told[3]
    wrong = spoilt(body, body["stream_state"])[fault]
    answers = [await arm.post(CHAT, wrong) for arm in (ours, theirs)]
    if fault == "another way of keeping":  # a field of ours, which vLLM does not know
        assert answers[0].status_code == 400
        assert '"kept"' in answers[0].json()["error"]["message"]
        return
    assert answers[0].status_code == answers[1].status_code
    if answers[0].status_code == 200:
        assert len({answered(one, 0) for one in answers}) == 1
    else:
        assert answers[0].json() == answers[1].json()
    after = [await arm.post(CHAT, body) for arm in (ours, theirs)]
    assert len({answered(one, 0) for one in after}) == 1
    if answers[0].status_code != 200 and fault != "half a character":  # which fails when it is written, behind parsing
        assert ours.linear.replays == 0


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=utf-8", "APPLICATION/JSON", ""])
async def test_kinds_of_content_are_vllms_to_judge(shop, paths, kind):
    ours, theirs = Arm(shop, None, paths), Arm(shop, None)
    body = {"stream": True, "generate_chunk": next(chunks(shop.ids("Hello"), of(1)))}
    answers = [await arm.post(CHAT, body, kind) for arm in (ours, theirs)]
    assert answers[0].status_code == answers[1].status_code
    told = [one.json() for one in answers]
    for one in told:
        one.get("chunk", {}).pop("created", None)
    assert told[0] == told[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_not_a_stream_is_vllms(shop, paths, path):
    ours, theirs = Arm(shop, None, paths), Arm(shop, None)
    whole = {"request_id": "r", "choices": [{"index": 0, "token_ids": shop.ids("Hello")}]}
    body = {"generate_response": whole} if path == CHAT else {"generate_responses": [whole]}
    told = []
    for arm in (ours, theirs):
        answer = await arm.post(path, body)
        assert answer.status_code == 200
        told.append({name: value for name, value in answer.json().items() if name != "created"})
        with shop.serving(arm.derenderer, arm.routes) as client:
            told[-1]["get"] = (await client.get(path)).status_code
    assert told[0] == told[1]
    assert told[0]["get"] == 405


async def test_calls_at_once_from_one_state_are_all_answered(parsing, paths):
    case = CASES["reasoning"]
    ours, theirs = Arm(parsing, case, paths), Arm(parsing, case)
    told = list(chunks(parsing.ids(case.says), of(3)))
    body = {"stream": True, "chat_request": parsing.chat_body(case), "prompt_token_ids": parsing.ids(case.prompt)}
    body["stream_state"] = (await ours.post(CHAT, {**body, "generate_chunk": told[0]})).json()["stream_state"]
    body["stream_state"] = (await ours.post(CHAT, {**body, "generate_chunk": told[1]})).json()["stream_state"]
    ids = parsing.ids(case.says) * 3
    body["generate_chunk"] = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids}]}
    want = answered(await theirs.post(CHAT, body), 0)
    answers = await asyncio.gather(*(ours.post(CHAT, body) for _ in range(4)))
    assert {answered(one, 0) for one in answers} == {want}
    assert ours.linear.replays == 3


# handles


async def keep(arm: Arm, path: str, body: dict, told: list[dict]) -> list[dict]:
    """The chunks of a stream whose state is kept."""
    pieces, handle = [], None
    for chunk in told:
        asked = {"stream": True, "generate_chunk": chunk, "stream_state": handle}
        answer = await arm.post(path, asked if handle else {**body, **asked, "state": "kept"})
        assert answer.status_code == 200, answer.text
        handle = answer.json()["stream_state"]
        assert isinstance(handle, str)
        assert len(handle) < 64
        pieces.append(answer.json()["chunk"])
    return pieces


async def carry(arm: Arm, path: str, body: dict, told: list[dict]) -> list[dict]:
    """The same of a stream whose client carries the state."""
    pieces, state = [], None
    for chunk in told:
        answer = await arm.post(path, {**body, "stream": True, "generate_chunk": chunk, "stream_state": state})
        assert answer.status_code == 200, answer.text
        state = answer.json()["stream_state"]
        pieces.append(answer.json()["chunk"])
    return pieces


def timeless(pieces: list[dict]) -> list[dict]:
    for piece in pieces:
        piece.pop("created")
        for choice in piece["choices"]:
            for tool in choice.get("delta", {}).get("tool_calls") or []:
                tool["id"] = tool["id"] and "id"
    return pieces


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["reasoning", "two tools", "reasoning and tool by vLLM's engine"])
async def test_a_kept_stream_says_what_a_carried_one_says(parsing, paths, name, seed):
    case = CASES[name]
    ours, theirs = Arm(parsing, case, paths), Arm(parsing, case)
    body = {"model": "tiny", "chat_request": parsing.chat_body(case), "prompt_token_ids": parsing.ids(case.prompt)}
    told = list(chunks(parsing.ids(case.says), at_random(seed)))
    assert timeless(await keep(ours, CHAT, body, told)) == timeless(await carry(theirs, CHAT, body, told))
    assert (ours.linear.begun, ours.linear.hits, ours.linear.replays) == (1, len(told) - 1, 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_plain_streams_can_be_kept_too(shop, paths, path):
    ours, theirs = Arm(shop, None, paths), Arm(shop, None)
    asks = {"model": "tiny", "prompt": "Hi"} if path == COMPLETIONS else shop.chat_body(Case(""))
    body = {"completion_request" if path == COMPLETIONS else "chat_request": asks, "prompt_tokens": 5}
    body["prompt_token_ids"] = shop.ids("Hi there")
    told = list(chunks(shop.ids(" It is 🎉, as ever 🦜."), of(1)))
    assert timeless(await keep(ours, path, body, told)) == timeless(await carry(theirs, path, body, told))


async def begun(arm: Arm, case: Case, chunk: dict, **more: Any) -> str:
    body = {"stream": True, "state": "kept", "chat_request": arm.shop.chat_body(case), "generate_chunk": chunk, **more}
    answer = await arm.post(CHAT, {"prompt_token_ids": arm.shop.ids(case.prompt), **body})
    assert answer.status_code == 200, answer.text
    handle = answer.json()["stream_state"]
    assert isinstance(handle, str)
    return handle


async def go_on(arm: Arm, handle: str, chunk: Any, path: str = CHAT) -> httpx.Response:
    return await arm.post(path, {"stream": True, "generate_chunk": chunk, "stream_state": handle})


@pytest.fixture
def case(shop):
    """One that this vLLM streams."""
    return CASES["reasoning"] if shop.parses_streams else Case(CASES["reasoning"].says)


async def test_a_handle_is_good_for_one_call(shop, paths, case):
    arm = Arm(shop, case, paths)
    told = list(chunks(shop.ids(case.says), of(2)))
    first = await begun(arm, case, told[0])
    second = (await go_on(arm, first, told[1])).json()["stream_state"]
    answer = await go_on(arm, first, told[1])
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("ConflictError", "stream_state", 409)
    assert "used already" in error["message"]
    assert "begin again with the whole state" in error["message"]
    assert "\n" not in error["message"]
    assert (await go_on(arm, second, told[2])).status_code == 200
    assert arm.linear.unknown_handles == 1


async def test_two_calls_at_once_with_one_handle_are_one_and_a_refusal(parsing, paths):
    case = CASES["reasoning"]
    arm = Arm(parsing, case, paths)
    ids = parsing.ids(case.says)
    handle = await begun(arm, case, next(chunks(ids, of(2))))
    big = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids * 3}]}
    answers = await asyncio.gather(*(go_on(arm, handle, big) for _ in range(3)))
    assert sorted(one.status_code for one in answers) == [200, 409, 409]
    told = [one.json()["error"]["message"] for one in answers if one.status_code == 409]
    assert all("at work in another call" in one or "used already" in one for one in told)


@pytest.mark.parametrize("handle", ["a.b.1", "a.b.c.7", f"{'a' * 9999}.1"])
async def test_a_handle_of_another_process_is_told_to_begin_again(shop, paths, case, handle):
    arm = Arm(shop, case, paths)
    answer = await go_on(arm, handle, next(chunks(shop.ids("Hello"), of(1))))
    assert answer.status_code == 409
    assert "no handle of this server process" in answer.json()["error"]["message"]
    assert len(answer.text) < 500


@pytest.mark.parametrize("handle", ["", "x", ".", ".1", "a.b.", "a.b.x", "a.b.²", "ä" * 9999, "kept", "\ud83e"])
async def test_a_string_that_is_no_handle_is_told_so(shop, paths, case, handle):
    arm = Arm(shop, case, paths)
    answer = await go_on(arm, handle, next(chunks(shop.ids("Hello"), of(1))))
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    if handle != "\ud83e":  # no Unicode: vLLM's to refuse
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "stream_state", 400)
        assert "state: kept" in error["message"]


@pytest.mark.parametrize("value", ["Kept", "KEPT", "keep", "", True, 1, {}, ["kept"]])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_word_for_kept_is_refused_and_the_word_is_said(shop, paths, case, value, path):
    """vLLM ignores fields that it does not know: the client would take whole states for what it asked for."""
    arm = Arm(shop, case, paths)
    body = {"chat_request": shop.chat_body(case), "prompt_token_ids": shop.ids("Hi")}
    chunk = next(chunks(shop.ids("Hello"), of(1)))
    answer = await arm.post(path, {**body, "stream": True, "state": value, "generate_chunk": chunk})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "state")
    assert '"kept"' in error["message"]


async def test_no_state_is_no_wrong_one(shop, paths, case):
    arm = Arm(shop, case, paths)
    body = {"chat_request": shop.chat_body(case), "prompt_token_ids": shop.ids(case.prompt)}
    chunk = next(chunks(shop.ids("Hello"), of(1)))
    answer = await arm.post(CHAT, {**body, "stream": True, "state": None, "generate_chunk": chunk})
    assert answer.status_code == 200
    assert isinstance(answer.json()["stream_state"], dict)


async def test_a_handle_that_is_too_old_is_told_so(shop, paths, case):
    arm = Arm(shop, case, paths)
    told = list(chunks(shop.ids(case.says), of(2)))
    handle = await begun(arm, case, told[0])
    arm.linear.store.clear()  # as for its age, or to make room
    answer = await go_on(arm, handle, told[1])
    assert answer.status_code == 409
    assert "is not known any more" in answer.json()["error"]["message"]


async def test_handles_cannot_be_guessed_from_others(shop, paths, case):
    arm = Arm(shop, case, paths)
    chunk = next(chunks(shop.ids("Hello"), of(1)))
    stems = [(await begun(arm, case, chunk)).rsplit(".", 1)[0].split(".")[1] for _ in range(20)]
    assert len(set(stems)) == 20
    assert all(len(stem) >= 20 for stem in stems)
    assert (await begun(Arm(shop, case, paths), case, chunk)).split(".")[0] != (await begun(arm, case, chunk)).split(
        "."
    )[0]


async def test_a_handle_of_one_path_is_none_on_the_other(shop, paths, case):
    arm = Arm(shop, case, paths)
    told = list(chunks(shop.ids(case.says), of(2)))
    handle = await begun(arm, case, told[0])
    elsewhere = await go_on(arm, handle, told[1], COMPLETIONS)
    assert elsewhere.status_code == 400
    assert f"belongs to a stream of {CHAT}" in elsewhere.json()["error"]["message"]
    assert (await go_on(arm, handle, told[1])).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [{"choices": [{"index": "x"}]}, 5, {}, {"choices": [{"index": 0}, {"index": 1}]}],
    ids=["no index", "no chunk", "no choices", "two choices"],
)
async def test_what_is_wrong_with_a_kept_streams_chunk_is_told_as_vllm_tells_it(shop, paths, case, wrong):
    ours, theirs = Arm(shop, case, paths), Arm(shop, case)
    told = list(chunks(shop.ids(case.says), of(2)))
    handle = await begun(ours, case, told[0])
    refused = await go_on(ours, handle, wrong)
    body = {"stream": True, "generate_chunk": wrong, "chat_request": shop.chat_body(case)}
    want = await theirs.post(CHAT, {**body, "prompt_token_ids": shop.ids(case.prompt)})
    assert refused.status_code == want.status_code == 400
    assert refused.json()["error"]["type"] == want.json()["error"]["type"]
    assert refused.json()["error"]["message"] in want.json()["error"]["message"] or wrong != {
        "choices": [{"index": 0}, {"index": 1}]
    }
    assert (await go_on(ours, handle, told[1])).status_code == 200  # it is where it was


async def test_a_kept_stream_without_a_chunk_is_told_what_it_lacks(shop, paths, case):
    arm = Arm(shop, case, paths)
    told = list(chunks(shop.ids(case.says), of(2)))
    handle = await begun(arm, case, told[0])
    answer = await arm.post(CHAT, {"stream": True, "stream_state": handle})
    assert answer.status_code == 400
    assert "generate_chunk" in answer.text
    assert (await go_on(arm, handle, told[1])).status_code == 200


async def test_a_parser_that_fails_loses_a_kept_stream_nothing(parsing, paths, monkeypatch):
    case = CASES["reasoning"]
    ours, theirs = Arm(parsing, case, paths), Arm(parsing, case)
    told = list(chunks(parsing.ids(case.says), of(2)))
    handle = await begun(ours, case, told[0])
    with monkeypatch.context() as broken:
        broken.setattr(ours.derenderer.parser, "parse_delta", lambda *_, **__: 1 / 0)
        answer = await go_on(ours, handle, told[1])
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "invalid stream_state: derender failed")
    pieces = []
    for chunk in told[1:]:
        answer = await go_on(ours, handle, chunk)
        assert answer.status_code == 200, answer.text
        handle = answer.json()["stream_state"]
        pieces.append(answer.json()["chunk"])
    body = {"model": "tiny", "chat_request": parsing.chat_body(case), "prompt_token_ids": parsing.ids(case.prompt)}
    assert timeless(pieces) == timeless(await carry(theirs, CHAT, body, told))[1:]
    assert ours.linear.replays == 1


async def test_a_kept_stream_can_be_begun_again_with_the_whole_state(parsing, paths):
    case = CASES["reasoning and tool"]
    ours, theirs = Arm(parsing, case, paths, entries=1), Arm(parsing, case)
    told = list(chunks(parsing.ids(case.says), of(1)))
    body = {"model": "tiny", "chat_request": parsing.chat_body(case), "prompt_token_ids": parsing.ids(case.prompt)}
    want = timeless(await carry(theirs, CHAT, body, told))
    half = len(told) // 2
    pieces, tokens, handle = [], [], None
    for i, chunk in enumerate(told):
        if i == half:
            await begun(ours, case, told[0])  # which makes room for itself
            assert (await go_on(ours, handle, chunk)).status_code == 409
            tools = [
                one["id"] for piece in pieces for c in piece["choices"] for one in c["delta"].get("tool_calls") or []
            ]
            state = {"role_sent": True, "output_token_ids": tokens, "output_chunk_lens": [1] * len(tokens)}
            handle = {**state, "tools_streamed": bool(tools), "last_tool_call_ids": [one for one in tools if one]}
        whole = {**body, "state": "kept"} if i in (0, half) else {}
        answer = await ours.post(CHAT, {**whole, "stream": True, "generate_chunk": chunk, "stream_state": handle})
        assert answer.status_code == 200, answer.text
        handle = answer.json()["stream_state"]
        assert isinstance(handle, str)
        pieces.append(answer.json()["chunk"])
        tokens += [one for choice in chunk["choices"] for one in choice["token_ids"]]
    assert timeless(pieces) == want
    assert ours.linear.replays == 1


async def test_a_vllm_that_keeps_nothing_answers_with_the_whole_state(shop, case):
    theirs = Arm(shop, case)
    body = {"stream": True, "state": "kept", "generate_chunk": next(chunks(shop.ids("Hello"), of(1)))}
    body |= {"chat_request": shop.chat_body(case), "prompt_token_ids": shop.ids(case.prompt)}
    assert isinstance((await theirs.post(CHAT, body)).json()["stream_state"], dict)


async def test_what_cannot_be_begun_is_not_kept(shop, paths, case):
    ours, theirs = Arm(shop, case, paths), Arm(shop, case)
    body = {"stream": True, "state": "kept", "model": "unknown", "chat_request": shop.chat_body(case)}
    body["generate_chunk"] = next(chunks(shop.ids("Hello"), of(1)))
    answers = [await arm.post(CHAT, body) for arm in (ours, theirs)]
    assert [one.status_code for one in answers] == [404, 404]
    assert answers[0].json() == answers[1].json()
    assert len(ours.linear.store) == 0


async def test_streams_that_vllm_does_not_parse_stay_unparsed(shop, paths):
    if shop.parses_streams:
        pytest.skip("this vLLM parses streams")
    case = CASES["reasoning"]
    ours, theirs = Arm(shop, case, paths), Arm(shop, case)
    body = {"stream": True, "chat_request": shop.chat_body(case), "generate_chunk": next(chunks([5], of(1)))}
    for more in ({}, {"state": "kept"}):
        answers = [await arm.post(CHAT, {**body, **more}) for arm in (ours, theirs)]
        assert [one.status_code for one in answers] == [501, 501]
        assert answers[0].json() == answers[1].json()
    assert not ours.linear.linear


async def test_an_application_is_made_linear_in_one_call(parsing, paths):
    app = parsing.app
    before = list(app.router.routes)
    with parsing.serving(parsing.theirs(CASES["reasoning"])):
        linear = paths.serve_derender(app)
        assert linear.linear
        assert app.state.linear_derender is linear
        assert [route.path for route in app.router.routes[:2]] == [CHAT, COMPLETIONS]
    assert app.router.routes == before


async def test_an_application_without_derender_is_left_alone(paths):
    from types import SimpleNamespace

    assert paths.serve_derender(SimpleNamespace(state=SimpleNamespace())) is None
