"""What of a request names what prefix caches would find for it, on either plane."""

import asyncio
import json
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.stack import token_request
from trivet.journal import GenerationRecord
from trivet.legs import tokens
from trivet.legs.bodies import decode_body, prefill_body
from trivet.legs.text import TextAsk
from trivet.legs.text_bodies import CHAT, COMPLETIONS
from trivet.legs.tokens import TokenAsk
from trivet.legs.wire import parts_of
from trivet.render.contract import Features, Item, TokenChunk

NOTHING = ()


def of_tokens(**changes):
    return tuple(TokenAsk(token_request(prompt=300, **changes), {}, None).prefix.hashes)


def of_text(path=CHAT, **body):
    raw = orjson.dumps(body)
    return tuple(TextAsk(path, raw, orjson.loads(raw), {}, None).prefix.hashes)


LONG = "What is a trivet, and what would stand on it? " * 30
CHAT_BODY = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Why?"}]}


def test_ids_model_and_salt_name_a_prompt():
    chains = [
        of_tokens(),
        of_tokens(start=301),
        of_tokens(model="adapter"),
        of_tokens(cache_salt="a"),
        of_tokens(cache_salt="b"),
    ]
    assert [len(one) for one in chains] == [4] * 5
    assert len({one for chain in chains for one in chain}) == 20


def pictured(*items):
    return of_tokens(features=Features(tuple(Item(*one) for one in items), [b"{}"]))


def test_images_name_a_prompt_from_where_they_begin():
    chains = [of_tokens(), pictured(("a", 70, 100)), pictured(("b", 70, 100)), pictured(("a", 70, 100), ("b", 200, 20))]
    assert [len(one) for one in chains] == [4] * 4
    assert len({one[0] for one in chains}) == 1
    assert len({one[1] for one in chains}) == 3
    assert chains[1][:3] == chains[3][:3]
    assert chains[1][3] != chains[3][3]


@pytest.mark.parametrize(
    "changes", [{"sampling": {"temperature": 1.0, "seed": 3, "max_tokens": 1}}, {"priority": 2}, {"session_id": "s"}]
)
def test_what_shapes_only_the_answer_does_not(changes):
    assert of_tokens(**changes) == of_tokens()


@pytest.mark.parametrize("changes", [{"prompt_logprobs": 0}, {"sampling": {"skip_reading_prefix_cache": True}}])
def test_where_no_cache_is_read_there_is_nothing_to_find(changes):
    ask = TokenAsk(token_request(prompt=300, **changes), {}, None)
    assert (tuple(ask.prefix.hashes), ask.prefix.prompt_tokens) == (NOTHING, 300)


@pytest.mark.parametrize("token_ids", [[-1] * 300, [2**40] * 300, ["a"] * 300])
def test_what_is_no_token_id_is_an_engines_to_refuse(token_ids):
    assert of_tokens(token_ids=token_ids) == NOTHING


def test_an_answer_continues_its_prompt():
    request = token_request(prompt=300)
    ask = TokenAsk(request, {}, None)
    before = ask.prefix
    for token in range(100):
        ask._sent.append(token)
        ask.prefix  # noqa: B018  (however often it is asked)
    assert ask.prefix.prompt_tokens == 400
    assert tuple(ask.prefix.hashes[:4]) == tuple(before.hashes)
    assert tuple(ask.prefix.hashes) == of_tokens(token_ids=[*request.token_ids, *range(100)])


def test_texts_have_their_beginning_in_common():
    more = [*CHAT_BODY["messages"], {"role": "assistant", "content": "So."}, {"role": "user", "content": LONG}]
    first, second = of_text(**CHAT_BODY), of_text(model="m", messages=more)
    assert len(first) >= 5
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_what_shapes_a_text_prompt_names_it():
    chains = [
        of_text(**CHAT_BODY),
        of_text(**CHAT_BODY | {"model": "adapter"}),
        of_text(**CHAT_BODY, cache_salt="a"),
        of_text(**CHAT_BODY, tools=[{"type": "function"}]),
        of_text(**CHAT_BODY, chat_template="{{ x }}"),
        of_text(**CHAT_BODY, chat_template_kwargs={"enable_thinking": False}),
        of_text(**CHAT_BODY, system="another"),
        of_text("/v1/messages", **CHAT_BODY),
        of_text("/v1/responses", model="m", input=LONG),
        of_text(COMPLETIONS, model="m", prompt=LONG),
        of_text(COMPLETIONS, model="m", prompt=list(range(300))),
    ]
    assert all(chains)
    assert len({one for chain in chains for one in chain}) == sum(len(one) for one in chains)


@pytest.mark.parametrize("more", [{"seed": 1}, {"max_tokens": 5}, {"stream": True}, {"user": "someone"}, {"stop": "x"}])
def test_what_shapes_only_the_answer_of_a_text_does_not(more):
    assert of_text(**CHAT_BODY, **more) == of_text(**CHAT_BODY)


def test_ids_in_a_list_are_the_same_ids():
    ids = list(range(300))
    assert of_text(COMPLETIONS, model="m", prompt=[ids]) == of_text(COMPLETIONS, model="m", prompt=ids)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"messages": []},
        {"prompt": [-1] * 300},
        {"prompt": {"a": 1}},
        CHAT_BODY | {"prompt_logprobs": 1},
    ],
)
def test_a_text_in_which_there_is_nothing_to_find(body):
    assert of_text(**body) == NOTHING


@pytest.mark.parametrize("body", [None, [], "text", 7])
def test_a_body_that_is_no_request(body):
    assert tuple(TextAsk(CHAT, orjson.dumps(body), body, {}, None).prefix.hashes) == NOTHING


# -- long prompts, in pieces -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(300, 700),
    largest=st.sampled_from((99, 2**32 - 1)),
    offsets=st.sets(st.integers(0, 299), min_size=1, max_size=4),
    pictured=st.booleans(),
    piece=st.integers(1, 300),
    sent=st.lists(st.integers(0, 9), max_size=70),
)
def test_a_prompt_that_is_prepared_in_pieces_is_the_same_prompt(length, largest, offsets, pictured, piece, sent):
    ids = [number * 7919 % (largest + 1) for number in range(length)]
    items = tuple(Item(f"image {offset}", offset, 1) for offset in sorted(offsets))
    request = replace(token_request(), token_ids=ids, features=Features(items, [b"{}"]) if pictured else None)
    whole, pieces = (TokenAsk(request, {}, None) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_PIECE_TOKENS", piece)
        asyncio.run(pieces.prepare())
    for ask in (whole, pieces):
        ask.note(GenerationRecord("gen", len(ids), 0.0), TokenChunk(sent))
    assert pieces.prefix == whole.prefix
    assert pieces.prompt == whole.prompt
    for made in (prefill_body, decode_body):
        said = [json.loads(b"".join(parts_of(made(ask.prompt, {"a": 1})))) for ask in (whole, pieces)]
        assert said[0] == said[1]


@pytest.mark.parametrize("odd", [-1, 2**32, "x", None, 1.5])
def test_what_is_no_token_id_in_a_long_prompt_is_an_engines_to_refuse(odd):
    ids = [*range(tokens._PIECE_TOKENS + 5), odd]
    ask = TokenAsk(replace(token_request(), token_ids=ids), {}, None)
    asyncio.run(ask.prepare())
    assert tuple(ask.prefix.hashes) == NOTHING
    assert decode_body(ask.prompt, None)["token_ids"] == ids


async def test_others_have_their_turns_while_a_long_prompt_is_prepared():
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await TokenAsk(replace(token_request(), token_ids=list(range(tokens._PIECE_TOKENS * 6))), {}, None).prepare()
    counting.cancel()
    assert turns >= 5


def test_the_ids_of_a_long_prompt_are_written_once_for_all_legs():
    ask = TokenAsk(replace(token_request(), token_ids=list(range(tokens._PIECE_TOKENS + 1))), {}, None)
    asyncio.run(ask.prepare())
    one, other = (parts_of(made(ask.prompt, None)) for made in (prefill_body, decode_body))
    assert max(one, key=len) is max(other, key=len)
