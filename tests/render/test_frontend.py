"""vLLM's own API server over a scripted token engine, through HTTP as a client sees it."""

import asyncio
import contextlib
import json
import logging
import re
import sys
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from helpers.processes import holds
from helpers.token_engine import failing, saying
from trivet.errors import TrivetError
from trivet.render.contract import ServingError, TokenChunk, TokenLogprobs, TokenRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_TOKENS = 256
CHAT_PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    lines = [line for line in response.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def choice(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (only,) = response.json()["choices"]
    return only


def text_of(response: httpx.Response, index: int = 0) -> str:
    """What a stream says, put together."""
    pieces = [one for event in events(response) for one in event["choices"] if one["index"] == index]
    return "".join((one["delta"].get("content") or "") if "delta" in one else one["text"] for one in pieces)


def finish_of(response: httpx.Response, index: int = 0) -> list[tuple[str, Any]]:
    pieces = [one for event in events(response) for one in event["choices"] if one["index"] == index]
    return [(one["finish_reason"], one["stop_reason"]) for one in pieces if one["finish_reason"]]


def usage_of(body: dict[str, Any]) -> tuple[int, int, int]:
    return tuple(body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


# whole and streamed


async def test_a_chat_is_answered_whole(served):
    served.engine.script = saying([*served.ids("Hello world"), 2], finish="stop", cached=16)
    response = await served.chat()
    answer = choice(response)
    assert answer["message"]["content"] == "Hello world"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", None)
    body = response.json()
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    prompt_tokens = len(served.ids(CHAT_PROMPT))
    assert usage_of(body) == (prompt_tokens, 3, prompt_tokens + 3)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_chat_is_streamed(served):
    served.engine.script = saying(served.ids("Hello world"), cached=16)
    response = await served.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    told = events(response)
    assert [one["choices"][0]["delta"].get("content") for one in told[:-1]] == ["", "Hello", " world"]
    assert finish_of(response) == [("length", None)]
    prompt_tokens = len(served.ids(CHAT_PROMPT))
    assert usage_of(told[-1]) == (prompt_tokens, 2, prompt_tokens + 2)
    assert told[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_completion_is_answered_whole(served):
    served.engine.script = saying(served.ids(" there"))
    response = await served.complete("Hi")
    assert choice(response)["text"] == " there"
    assert usage_of(response.json()) == (1, 1, 2)


async def test_a_completion_is_streamed(served):
    served.engine.script = saying(served.ids(" there, you all"))
    response = await served.complete("Hi", stream=True)
    assert len(events(response)) == len(served.ids(" there, you all"))
    assert text_of(response) == " there, you all"


async def test_each_piece_is_sent_when_it_is_there(served):
    """Not when the answer is whole."""
    go_on = asyncio.Event()

    async def script(_: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(served.ids("Hello"))
        await go_on.wait()
        yield TokenChunk(served.ids(" world"), finish_reason="length")

    served.engine.script = script
    async with asgi(served, "/v1/completions", {"prompt": "Hi", "stream": True}) as client:
        await holds(lambda: b"Hello" in client.body)
        assert b" world" not in client.body
        go_on.set()
        await holds(lambda: b"[DONE]" in client.body)


async def test_several_tokens_at_once_are_all_told(served):
    served.engine.script = saying(served.ids("one two three four"), at_once=3)
    response = await served.complete(stream=True, stream_options={"include_usage": True})
    assert text_of(response) == "one two three four"
    assert events(response)[-1]["usage"]["completion_tokens"] == 4


async def test_a_letter_of_several_tokens_is_told_whole(served):
    tokens = served.ids("a😀b")
    assert len(tokens) > 3
    served.engine.script = saying(tokens)
    response = await served.complete(stream=True)
    assert "\ufffd" not in response.text
    assert text_of(response) == "a😀b"


async def test_special_tokens_are_left_out_unless_wanted(served):
    served.engine.script = saying([*served.ids("Hello"), 2])
    assert choice(await served.complete())["text"] == "Hello"
    assert choice(await served.complete(skip_special_tokens=False))["text"] == "Hello<|im_end|>"


async def test_token_ids_are_told_if_wanted(served):
    tokens = served.ids("Hello world")
    served.engine.script = saying(tokens)
    answer = choice(await served.complete("Hi", return_token_ids=True))
    assert (answer["prompt_token_ids"], answer["token_ids"]) == (served.ids("Hi"), tokens)


# what the engine is asked


async def test_a_chat_is_rendered_once_with_the_models_template(served):
    served.engine.script = saying([5])
    await served.chat()
    assert list(served.engine.request.token_ids) == served.ids(CHAT_PROMPT)


async def test_token_ids_of_a_prompt_are_taken_as_they_are(served):
    served.engine.script = saying([5])
    await served.complete([100, 2, 0, 49151])
    assert list(served.engine.request.token_ids) == [100, 2, 0, 49151]


async def test_an_engine_is_asked_under_the_first_served_name(served):
    assert (served.served_names, served.max_model_len) == (["tiny", "alias"], MAX_TOKENS)
    served.engine.script = saying([5])
    response = await served.complete(model="alias")
    assert (response.status_code, response.json()["model"]) == (200, "tiny")
    assert served.engine.request.model == "tiny"
    models = (await served.client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in models] == ["tiny", "alias"]


async def test_without_a_limit_a_chats_answer_may_fill_the_context(served):
    served.engine.script = saying([5])
    for words in ("Hi", "Hi " * 100):
        await served.chat(messages=[{"role": "user", "content": words}])
    lengths = [len(request.token_ids) for request in served.engine.requests]
    assert lengths[1] - lengths[0] > 90
    assert [one.sampling["max_tokens"] for one in served.engine.requests] == [MAX_TOKENS - one for one in lengths]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 16),  # OpenAI's default for completions
        ({"max_tokens": 16}, 16),
        ({"max_tokens": 20}, 20),
        ({"max_tokens": MAX_TOKENS}, MAX_TOKENS - 1),
    ],
)
async def test_a_limit_always_reaches_the_engine(served, body, expected):
    """Left out it would mean something else there: up to the end of the context."""
    served.engine.script = saying([5])
    await served.complete([7], **body)
    assert served.engine.request.sampling["max_tokens"] == expected


async def test_sampling_reaches_the_engine(served):
    served.engine.script = saying([5])
    wanted = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 12,
        "min_p": 0.1,
        "seed": 42,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "stop_token_ids": [9, 10],
        "ignore_eos": True,
        "logit_bias": {"5": 1.5},
        "bad_words": ["Hello"],
    }
    await served.complete(**wanted)
    sampling = dict(served.engine.request.sampling)
    told = {name: sampling.get(name) for name in wanted}
    assert told | {"logit_bias": None} == wanted | {"logit_bias": None}
    assert {int(token): bias for token, bias in sampling["logit_bias"].items()} == {5: 1.5}
    json.dumps(sampling)


async def test_what_belongs_to_the_text_does_not_reach_the_engine(served):
    served.engine.script = saying([5])
    await served.complete(stop=["x"], include_stop_str_in_output=True, skip_special_tokens=False, n=2)
    for request in served.engine.requests:
        assert request.sampling["detokenize"] is False
        kept = {"stop", "include_stop_str_in_output", "skip_special_tokens", "n", "output_kind"} & set(request.sampling)
        assert kept == set()


async def test_a_wish_for_json_reaches_the_engine(served):
    served.engine.script = saying([5])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await served.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    wanted = served.engine.request.sampling["structured_outputs"]["json"]
    assert (json.loads(wanted) if isinstance(wanted, str) else wanted) == schema


async def test_cache_salt_and_priority_reach_the_engine(served):
    served.engine.script = saying([5])
    await served.chat(cache_salt="pepper", priority=3)
    assert (served.engine.request.cache_salt, served.engine.request.priority) == ("pepper", 3)


async def test_request_ids_are_ours_though_a_client_repeats_its_own(served):
    served.engine.script = saying([5])
    for _ in range(2):
        await served.post("/v1/completions", {"prompt": "Hi"}, **{"X-Request-Id": "mine"})
    ids = [request.request_id for request in served.engine.requests]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("body", "kv", "ec"),
    [
        ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, {"remote_host": "10.0.0.1"}, None),
        ({"kv_transfer_params": {"a": 1}, "vllm_xargs": {"mine": 1}}, {"a": 1}, None),
        ({"vllm_xargs": {"ec_transfer_params": "y"}}, None, "y"),
        ({"vllm_xargs": {"mine": 1}}, None, None),
    ],
)
async def test_transfer_parameters_of_a_client_are_told_apart(served, body, kv, ec):
    """Whether a client may say them is the gateway's to decide, in front of this."""
    served.engine.script = saying([5])
    assert (await served.complete(**body)).status_code == 200
    request = served.engine.request
    assert (request.kv_transfer_params, request.ec_transfer_params) == (kv, ec)
    assert "transfer_params" not in json.dumps({**request.sampling})
    mine = {"mine": 1} if "mine" in body.get("vllm_xargs", {}) else None
    assert request.sampling.get("extra_args") == mine, "other extras are an engine's business"


# several answers


async def by_request(request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
    """An answer that tells prompts and seeds apart: the first prompt token, then 1000 and the seed."""
    yield TokenChunk([request.token_ids[0]], cached_tokens=request.token_ids[0] % 7)
    await asyncio.sleep(0.001 * (10 - request.sampling.get("seed", 0)))  # later ones are done first
    yield TokenChunk([1000 + request.sampling.get("seed", 0)], finish_reason="length")


async def test_several_choices_are_generations_with_seeds_of_their_own(served):
    served.engine.script = by_request
    response = await served.complete([500], n=3, seed=5, return_token_ids=True)
    told = response.json()["choices"]
    assert [(one["index"], one["token_ids"]) for one in told] == [(n, [500, 1005 + n]) for n in range(3)]
    assert usage_of(response.json()) == (1, 6, 7)
    assert ["n" in request.sampling for request in served.engine.requests] == [False] * 3


async def test_several_choices_are_streamed_side_by_side(served):
    served.engine.script = by_request
    response = await served.complete([500], n=2, seed=5, stream=True, stream_options={"include_usage": True})
    for index in range(2):
        assert text_of(response, index) == served.tokenizer.decode([500, 1005 + index])
        assert finish_of(response, index) == [("length", None)]
    assert usage_of(events(response)[-1]) == (1, 4, 5)


async def test_several_prompts_are_answered_in_their_order(served):
    served.engine.script = by_request
    response = await served.complete([[500], [501, 9], [502]], return_token_ids=True)
    told = response.json()["choices"]
    assert [(one["index"], one["token_ids"][0]) for one in told] == [(0, 500), (1, 501), (2, 502)]
    assert usage_of(response.json()) == (4, 6, 10)


async def test_several_choices_of_several_prompts(served):
    served.engine.script = by_request
    response = await served.complete([[500], [501]], n=2, seed=5, return_token_ids=True)
    told = response.json()["choices"]
    assert [one["index"] for one in told] == [0, 1, 2, 3]
    assert [one["token_ids"] for one in told] == [[500, 1005], [500, 1006], [501, 1005], [501, 1006]]


# stop strings


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_ends_the_generation(served, stream):
    served.engine.script = saying(served.ids("one two STOP three four"), finish=None)
    response = await served.complete(stop=["never", "STOP"], stream=stream)
    if stream:
        assert text_of(response) == "one two "
        assert finish_of(response) == [("stop", "STOP")]
    else:
        answer = choice(response)
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == ("one two ", "stop", "STOP")
    await served.engine.idle()
    assert served.engine.cancelled == [served.engine.request.request_id]


async def test_a_stop_string_is_kept_if_wanted(served):
    served.engine.script = saying(served.ids("one two STOP three four"), finish=None)
    answer = choice(await served.complete(stop=["STOP"], include_stop_str_in_output=True))
    assert answer["text"] == "one two STOP"


async def test_tokens_behind_a_stop_string_are_not_counted(served):
    tokens = served.ids("one two three four five")
    served.engine.script = saying(tokens, finish=None)
    response = await served.complete(stop=["three"])
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_a_stop_string_ends_one_choice_and_not_the_others(served):
    async def script(request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        words = "one STOP" if request.sampling["seed"] == 5 else "one two"
        for token in served.ids(words):
            yield TokenChunk([token])
        if request.sampling["seed"] == 5:
            await asyncio.Event().wait()
        yield TokenChunk((), finish_reason="length")

    served.engine.script = script
    told = (await served.complete([500], n=2, seed=5, stop=["STOP"])).json()["choices"]
    assert [(one["text"], one["finish_reason"]) for one in told] == [("one ", "stop"), ("one two", "length")]


async def test_a_stop_token_is_found_by_the_engine(served):
    served.engine.script = saying([*served.ids("one"), 9], finish="stop", stop_reason=9)
    answer = choice(await served.complete(stop_token_ids=[9]))
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", 9)


# log-probabilities

HELLO, WORLD = "Hello", " world"


def position(sampled: int, others: list[int], rank: int) -> TokenLogprobs:
    """As the wire tells it: the sampled token, then the best others, -0.5 apart; the sampled one has its place."""
    places = [place for place in range(1, 10) if place != rank]
    return TokenLogprobs(
        [sampled, *others], [-0.5 * rank, *(-0.5 * place for place in places[: len(others)])], sampled_rank=rank
    )


@pytest.fixture
def spoken(served):
    """Two tokens: the best but one, and one that is none of the best two."""
    hello, world = served.ids(HELLO + WORLD)
    others = served.ids(" red green blue")
    served.engine.script = saying(
        [hello, world], logprobs=[position(hello, others[:2], 2), position(world, others[:2], 7)]
    )
    return served


async def test_log_probabilities_of_a_completion_hold_the_best_and_the_sampled(spoken):
    answer = choice(await spoken.complete(logprobs=2))["logprobs"]
    assert answer["tokens"] == [HELLO, WORLD]
    assert answer["token_logprobs"] == [-1.0, -3.5]
    assert answer["top_logprobs"] == [
        {" red": -0.5, HELLO: -1.0},
        {" red": -0.5, " green": -1.0, WORLD: -3.5},
    ]
    assert answer["text_offset"] == [0, len(HELLO)]


async def test_an_engine_is_asked_for_one_more_than_wanted(spoken):
    """Its wire counts the sampled token among them."""
    await spoken.complete(logprobs=2)
    assert spoken.engine.request.sampling["logprobs"] == 3


async def test_log_probabilities_of_a_chat(spoken):
    first, second = choice(await spoken.chat(logprobs=True, top_logprobs=2))["logprobs"]["content"]
    assert (first["token"], first["logprob"], bytes(first["bytes"])) == (HELLO, -1.0, b"Hello")
    assert {(one["token"], one["logprob"]) for one in first["top_logprobs"]} == {(" red", -0.5), (HELLO, -1.0)}
    assert (second["token"], second["logprob"]) == (WORLD, -3.5)


async def test_log_probabilities_without_others(served):
    hello, world = served.ids(HELLO + WORLD)
    served.engine.script = saying([hello, world], logprobs=[position(hello, [], 1), position(world, [], 7)])
    answer = choice(await served.chat(logprobs=True))["logprobs"]["content"]
    assert [(one["token"], one["logprob"], one["top_logprobs"]) for one in answer] == [
        (HELLO, -0.5, []),
        (WORLD, -3.5, []),
    ]
    assert served.engine.request.sampling["logprobs"] == 1


async def test_log_probabilities_are_streamed(spoken):
    told = events(await spoken.complete(logprobs=2, stream=True))
    logprobs = [one["choices"][0]["logprobs"] for one in told]
    assert [(one["tokens"], one["token_logprobs"]) for one in logprobs] == [([HELLO], [-1.0]), ([WORLD], [-3.5])]


async def test_no_log_probabilities_are_asked_for_unless_wanted(served):
    served.engine.script = saying([5])
    assert choice(await served.complete())["logprobs"] is None
    assert "logprobs" not in served.engine.request.sampling


# tokens that were cached


async def test_cached_tokens_may_be_known_only_at_the_end(served):
    async def script(_: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(served.ids("Hello"))
        await asyncio.sleep(0)
        yield TokenChunk(served.ids(" world"), finish_reason="length", cached_tokens=24, created_cache_tokens=4)

    served.engine.script = script
    details = (await served.chat()).json()["usage"]["prompt_tokens_details"]
    assert (details["cached_tokens"], details["created_cache_tokens"]) == (24, 4)


# what is refused


async def test_a_prompt_that_is_too_long_reaches_no_engine(served):
    response = await served.complete([7] * (MAX_TOKENS + 1))
    assert response.status_code == 400
    assert "maximum context length is 256 tokens" in response.json()["error"]["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "unknown"}, 404),
        ({"max_tokens": MAX_TOKENS + 1}, 400),
        ({"max_tokens": -1}, 400),
        ({"temperature": -1}, 400),
        ({"top_p": 2}, 400),
        ({"logprobs": 1000}, 400),
        ({"n": 0}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [49152]}, 400),
    ],
)
async def test_what_an_engine_would_refuse_reaches_none(served, body, status):
    response = await served.complete(**{"prompt": "Hi", **body})
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)
    assert served.engine.requests == []


def telling_prompt(request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
    """An answer that tells the prompt's log-probabilities: each token is the second best, behind token 7."""

    async def script() -> AsyncGenerator[TokenChunk, None]:
        told = [TokenLogprobs([token, 7], [-2.0, -0.5], 2) for token in request.token_ids[1:]]
        logprobs = [TokenLogprobs([19556], [-0.25], 1)] if "logprobs" in request.sampling else None
        yield TokenChunk([19556], logprobs, "length", prompt_logprobs=told)

    return script()


@pytest.mark.parametrize("n", [1, 2])
async def test_log_probabilities_of_a_prompt_are_told(served, n):
    served.engine.script = telling_prompt
    response = await served.complete([5, 6, 9], prompt_logprobs=1, n=n, max_tokens=1)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert len(choices) == n
    for one in choices:
        first, *rest = one["prompt_logprobs"]
        assert first is None
        told = [{int(token): (entry["logprob"], entry["rank"]) for token, entry in place.items()} for place in rest]
        assert told == [{6: (-2.0, 2), 7: (-0.5, 1)}, {9: (-2.0, 2), 7: (-0.5, 1)}]
    for request in served.engine.requests:
        assert (request.prompt_logprobs, "prompt_logprobs" in request.sampling) == (1, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_tells_the_prompts_log_probabilities_with_the_answers(served, stream):
    served.engine.script = telling_prompt
    response = await served.complete([5, 6, 9], echo=True, logprobs=1, stream=stream, max_tokens=1)
    assert response.status_code == 200, response.text
    if stream:
        logprobs = [one["choices"][0]["logprobs"]["token_logprobs"] for one in events(response) if one["choices"]]
        told = [value for part in logprobs for value in part]
    else:
        told = choice(response)["logprobs"]["token_logprobs"]
    assert told == [None, -2.0, -2.0, -0.25]


async def test_what_fails_inside_vllm_is_told_in_openais_form_too(served):
    """Its handler asks for things that only its own launcher sets."""
    response = await served.complete(vllm_xargs={"kv_transfer_params": "no mapping"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == 500


async def test_an_echo_alone_is_served(served):
    served.engine.script = saying(served.ids(" there"))
    assert choice(await served.complete("Hi", echo=True))["text"] == "Hi there"


# what fails

LATE = "Gateway Timeout"
FAULTS = [
    (ServingError("no engine is ready"), 503, "no engine is ready", "Service Unavailable"),
    (ServingError("too long", status=400), 400, "too long", "BadRequestError"),
    (ServingError("who?", status=404), 404, "who?", "NotFoundError"),
    (ServingError("the request's deadline has passed", status=504), 504, "the request's deadline has passed", LATE),
    (ServingError("too many", status=429), 429, "too many", "Too Many Requests"),
    (ServingError("odd", status=520), 502, "odd", "Bad Gateway"),
    (RuntimeError("boom"), 500, "RuntimeError: boom", "Internal Server Error"),
]


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("error", "status", "message", "kind"), FAULTS, ids=[str(one[1]) for one in FAULTS])
@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_a_failure_is_told_in_openais_form(served, ask, error, status, message, kind, after):
    served.engine.script = failing(error, served.ids("Hello world")[:after])
    response = await getattr(served, ask)()
    assert response.status_code == status
    assert response.json() == {"error": {"message": message, "type": kind, "param": None, "code": status}}
    await served.engine.idle()
    assert served.known() == []


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("error", "status", "message", "kind"), FAULTS, ids=[str(one[1]) for one in FAULTS])
@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_a_failure_of_a_stream_is_its_last_event(served, ask, error, status, message, kind, after):
    served.engine.script = failing(error, served.ids("Hello world")[:after])
    response = await getattr(served, ask)(stream=True)
    told = events(response)
    assert told[-1] == {"error": {"message": message, "type": kind, "param": None, "code": status}}
    assert [one for one in told[:-1] if "error" in one] == []
    await served.engine.idle()
    assert served.known() == []


async def test_an_answer_without_an_end_is_a_failure(served):
    async def script(_: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(served.ids("Hello"))

    served.engine.script = script
    response = await served.complete()
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "the engine's answer ended without a finish reason"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_ends_its_siblings(served, stream):
    async def script(request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(served.ids("Hello"))
        if request.sampling["seed"] == 6:
            await holds(lambda: served.engine.open == 3)
            raise ServingError("decode-0: gone", status=502)
        await asyncio.Event().wait()

    served.engine.script = script
    response = await served.complete([500], n=3, seed=5, stream=stream)
    error = events(response)[-1]["error"] if stream else response.json()["error"]
    assert (error["message"], error["code"]) == ("decode-0: gone", 502)
    await served.engine.idle()
    assert len(served.engine.cancelled) == 2


async def test_a_prompt_that_fails_ends_the_others(served):
    async def script(request: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(served.ids("Hello"))
        if request.token_ids[0] == 501:
            await holds(lambda: served.engine.open == 2)
            raise ServingError("decode-0: gone", status=502)
        await asyncio.Event().wait()

    served.engine.script = script
    assert (await served.complete([[500], [501]])).status_code == 502
    await served.engine.idle()
    assert len(served.engine.cancelled) == 1


async def test_the_next_request_is_served_after_a_failure(served):
    served.engine.script = failing(RuntimeError("boom"))
    assert (await served.chat()).status_code == 500
    served.engine.script = saying(served.ids("Hello"))
    assert choice(await served.chat())["message"]["content"] == "Hello"


# clients that go


class Client:
    """One connection, spoken as ASGI: unlike httpx it can hang up."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self.gone = asyncio.Event()


@contextlib.asynccontextmanager
async def asgi(served, path: str, body: dict[str, Any]):
    client = Client()
    question = json.dumps({"model": "tiny", **body}).encode()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": question, "more_body": False}
        await client.gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            client.status = message["status"]
        else:
            client.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"render")],
        "server": ("render", 80),
        "client": ("client", 1),
    }
    serving = asyncio.create_task(served.app(scope, receive, send))
    try:
        yield client
    finally:
        client.gone.set()
        await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 10)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_generations(served, stream, n):
    served.engine.script = saying(served.ids("Hello"), finish=None)
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, "n": n}
    async with asgi(served, "/v1/chat/completions", body) as client:
        await holds(lambda: served.engine.open == n and (not stream or client.body.count(b"Hello") == n))
        client.gone.set()
        await holds(lambda: served.engine.open == 0)
    assert len(served.engine.cancelled) == n
    await holds(lambda: served.known() == [])


async def test_the_others_are_served_on(served):
    served.engine.script = saying(served.ids("Hello"), finish=None)
    async with asgi(served, "/v1/completions", {"prompt": "Hi", "stream": True}):
        await holds(lambda: served.engine.open == 1)
        served.engine.script = saying(served.ids("Hello world"))
        answers = await asyncio.gather(*(served.complete() for _ in range(20)))
        assert {choice(one)["text"] for one in answers} == {"Hello world"}
        assert served.engine.open == 1


# a front end of its own


async def test_tool_calls_are_parsed_by_vllm(serving, model_folder):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with serving(model_folder, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as own:
        own.engine.script = saying([*own.ids(call), 2], finish="stop")
        messages = [{"role": "user", "content": "1"}]
        body = {"model": str(model_folder), "messages": messages, "tools": [tool]}
        answer = choice(await own.post("/v1/chat/completions", body))
        (told,) = answer["message"]["tool_calls"]
        assert (told["function"]["name"], json.loads(told["function"]["arguments"])) == ("add", {"a": 1})
        assert answer["finish_reason"] == "tool_calls"
        assert own.served_names == [str(model_folder)]


async def test_what_still_runs_ends_with_the_front_end(serving, model_folder):
    async with serving(model_folder, "--served-model-name", "tiny", "--max-model-len", "128") as own:
        assert own.max_model_len == 128
        own.engine.script = saying(own.ids("Hello"), finish=None)
        asking = asyncio.create_task(own.complete())
        await holds(lambda: own.engine.open == 1)
    await own.engine.idle()
    assert len(own.engine.cancelled) == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_keys_are_vllms(serving, model_folder):
    async with serving(model_folder, "--served-model-name", "tiny", "--api-key", "one", "two") as own:
        own.engine.script = saying([5])
        assert (await own.complete()).status_code == 401
        answer = await own.post("/v1/completions", {"prompt": "Hi"}, Authorization="Bearer two")
        assert answer.status_code == 200


# what cannot be opened


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-model-len", "nonsense"], "nonsense"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
        (["--max-model-len"], "expected"),
    ],
)
async def test_flags_that_vllm_refuses_are_told_in_its_words(frontend, flags, words):
    with pytest.raises(TrivetError) as caught:
        frontend.parse_flags(["tiny", *flags])
    assert caught.value.problem.startswith("vLLM refuses the render flags: ")
    assert words in caught.value.problem
    assert caught.value.mend.startswith("look at `flags` and `tiers.render.flags` in the topology")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--enable-auto-tool-choice", "--tool-call-parser", "no-such-parser"], "no-such-parser"),
        (["--reasoning-parser", "no-such-parser"], "no-such-parser"),
        (["--chat-template", "/no/such/template.jinja"], "template.jinja"),
        (["--middleware", "no.such.Middleware"], "no"),
        (["--max-model-len", "999999"], "max_model_len"),
        (["--dtype", "float7"], "float7"),
    ],
)
async def test_what_vllm_finds_out_later_is_one_line_too(serving, model_folder, flags, words):
    with pytest.raises(TrivetError) as caught:
        async with serving(model_folder, *flags):
            pass
    assert words in caught.value.problem
    assert "\n" not in str(caught.value)
    assert not re.search(r"validation error|Value error|\[type=|Traceback", caught.value.problem), caught.value.problem
    assert caught.value.mend


async def test_the_model_stands_first(frontend):
    args = frontend.parse_flags(["/models/tiny", "--served-model-name", "a", "b", "--max-model-len", "512"])
    assert (args.model, args.served_model_name, args.max_model_len) == ("/models/tiny", ["a", "b"], 512)


@pytest.mark.parametrize("what", ["nothing", "no config", "unknown architecture", "no tokenizer"])
async def test_a_model_that_cannot_be_read_is_told(serving, model_folder, tmp_path, what):
    folder = tmp_path / "model"
    if what != "nothing":
        folder.mkdir()
    config = json.loads((model_folder / "config.json").read_text())
    match what:
        case "unknown architecture":
            (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
        case "no tokenizer":
            (folder / "config.json").write_text(json.dumps(config))
    if what == "unknown architecture":
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text((model_folder / file).read_text())
    with pytest.raises(TrivetError) as caught:
        async with serving(folder):
            pass
    problem = caught.value.problem
    assert problem.startswith(f"the render tier cannot set up {str(folder)!r}: ")
    assert "\n" not in problem
    assert len(problem) > len(f"the render tier cannot set up {str(folder)!r}: ")
    assert caught.value.mend.startswith("give a Hugging Face folder")


# the seam


class Deaf:
    """An ``AsyncLLM`` that makes its engine client in another way."""

    shut = 0

    def __init__(self, **_: Any) -> None:
        self.engine_core = object()

    def shutdown(self) -> None:
        Deaf.shut += 1


class Renamed(Deaf):
    """An ``AsyncLLM`` that asks the factory for something else."""

    def __init__(self, **_: Any) -> None:
        import vllm.v1.engine.async_llm as async_llm

        self.engine_core = async_llm.EngineCoreClient.make_another_client()


@pytest.mark.parametrize("changed", [Deaf, Renamed])
async def test_a_vllm_with_another_seam_is_told(frontend, serving, model_folder, monkeypatch, changed):
    theirs = frontend.async_llm.EngineCoreClient
    monkeypatch.setattr(frontend.async_llm, "AsyncLLM", changed)
    monkeypatch.setattr(Deaf, "shut", 0)
    with pytest.raises(TrivetError) as caught:
        async with serving(model_folder):
            pass
    assert caught.value.problem.startswith("this vLLM builds its engine client in a way that Trivet does not know")
    assert caught.value.mend == "use a vLLM that this Trivet was tested with (see README)"
    assert frontend.async_llm.EngineCoreClient is theirs
    assert Deaf.shut == (1 if changed is Deaf else 0), "what it started instead is ended"


async def test_a_vllm_without_the_seam_is_told(frontend, serving, model_folder, monkeypatch):
    monkeypatch.delattr(frontend.async_llm, "EngineCoreClient")
    with pytest.raises(TrivetError, match="in a way that Trivet does not know"):
        async with serving(model_folder):
            pass


async def test_the_seam_is_open_only_while_a_front_end_is_built(frontend, served):
    assert frontend.async_llm.EngineCoreClient.__module__ == "vllm.v1.engine.core_client"


async def test_adapters_thinking_budgets_and_traces_are_known_as_to_vllm_serve(serving, model_folder, tmp_path):
    flags = ["--served-model-name", "tiny", "--enable-lora", "--lora-modules", f"poems={tmp_path}"]
    flags += ["--reasoning-parser", "qwen3", "--otlp-traces-endpoint", "grpc://127.0.0.1:1"]
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(model_folder, *flags) as served:
        served.engine.script = saying([19556])
        answer = await served.chat(model="poems", thinking_token_budget=5, max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert (await served.post("/v1/completions", {"prompt": "Hi"}, traceparent=traceparent)).status_code == 200
        adapted, traced = served.engine.requests
    assert (adapted.model, adapted.sampling["thinking_token_budget"]) == ("poems", 5)
    assert traced.model == "tiny"


async def test_what_vllm_loads_does_not_silence_other_warnings(served):
    """A package of its sets the root logger to ERROR when it is first loaded."""
    assert "model_hosting_container_standards.logging_config" in sys.modules
    assert logging.getLogger().level == logging.WARNING
