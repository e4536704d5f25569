"""What of a request names what prefix caches would find for it, on either plane."""

import orjson
import pytest

from helpers.stack import token_request
from trivet.legs.text import TextAsk
from trivet.legs.text_bodies import CHAT, COMPLETIONS
from trivet.legs.tokens import TokenAsk
from trivet.render.contract import Features, Item

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
