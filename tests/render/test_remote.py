"""Render servers in the place of a worker's templates and tokenizer: vLLM's front end over a scripted engine, and
servers over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from helpers.processes import holds
from helpers.render_servers import RenderServer, answering, breaking_off, garbling, silent
from helpers.token_engine import saying
from trivet.errors import TrivetError
from trivet.render.contract import DeadlinePassedError, ServingError
from trivet.render.pool import Pauses, PoolRules
from trivet.render.remote import _otherwise_made, _rendered, open_remote

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUICK = Pauses(first_s=0.01, longest_s=0.05, other_ids_s=0.02, again_s=math.inf, start_s=20)
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FLAGS = ("--served-model-name", "tiny", "--enable-scale-out", *TOOLS)
OTHER_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
USER = [{"role": "user", "content": "Hi"}]


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def whole(serving, model_folder):
    """A front end with render endpoints of its own, as workers have it."""
    async with serving(model_folder, *FLAGS) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def local(whole):
    """The same for each test; what a test leaves under way is a fault."""
    whole.engine.reset()
    whole.engine.script = saying(whole.ids("Hello world"))
    yield whole
    await whole.engine.idle()
    assert whole.known() == []


class Tally:
    """What is counted, written down."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.by_server: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.at: dict[str, int] = {}
        self.queue = 0

    def asked(self, server: str, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes[outcome] += 1
        self.by_server[server] += 1

    def local(self, reason: str) -> None:
        self.reasons[reason] += 1

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1

    def running(self, server: str, requests: int) -> None:
        self.at[server] = requests

    def waiting(self, requests: int) -> None:
        self.queue = requests

    def used(self, server: str, is_used: bool) -> None:
        pass


class Remote:
    """A front end that asks render servers, and a client over it."""

    def __init__(self, app: Any, tally: Tally, served: Any) -> None:
        self.app = app
        self.pool = app.pool
        self.tally = tally
        self.engine = served.engine
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://render", timeout=20, headers={"X-Request-Id": "r"}
        )

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.client.post(path, json={"model": "tiny", **body}, headers=headers)

    async def chat(self, content: Any = "Hi", **body: Any) -> httpx.Response:
        return await self.post(CHAT, {"messages": [{"role": "user", "content": content}], **body})

    @property
    def states(self) -> list[str]:
        return [one["state"] for one in self.pool.facts()]


@contextlib.asynccontextmanager
async def remote_of(
    served: Any,
    *servers: RenderServer | str,
    pauses: Pauses = QUICK,
    api_keys: tuple[str, ...] = (),
    left_s: Any = lambda: None,
    **rules: Any,
) -> AsyncIterator[Remote]:
    urls = tuple(one if isinstance(one, str) else one.url for one in servers)
    front = SimpleNamespace(app=served.app, served_names=["tiny"], max_model_len=served.max_model_len)
    tally = Tally()
    given = PoolRules(urls, **{"timeout_s": 20.0, "queue_s": 20.0, **rules})
    async with open_remote(front, given, tally=tally, pauses=pauses, api_keys=api_keys, left_s=left_s) as app:
        remote = Remote(app, tally, served)
        async with remote.client:
            yield remote
    assert set(tally.at.values()) <= {0}
    assert tally.queue == 0


def said(response: httpx.Response) -> Any:
    """An answer without what is new each time: ids, times."""
    kept = re.sub(r'"(id|created|created_at|completed_at|item_id|request_id)": ?("[^"]*"|[0-9.]+)', "", response.text)
    return response.status_code, re.sub(r"(chatcmpl|cmpl|resp|msg|rs)[-_][0-9a-f-]+", "", kept)


def asked_of(engine: Any) -> list[Any]:
    """What an engine was asked, without ids."""
    return [
        (list(one.token_ids), one.sampling, one.model, one.cache_salt, one.priority, one.prompt_logprobs, one.whole)
        for one in engine.requests
    ]


async def both(local: Any, server: RenderServer, path: str, body: dict[str, Any], **headers: str) -> Remote:
    """Asks without and with a server: the client is told the same, and so is the engine."""
    given = {"Content-Type": "application/json", "X-Request-Id": "r", **headers}
    question = json.dumps({"model": "tiny", **body})
    expected = said(await local.client.post(path, content=question, headers=given))
    asked = asked_of(local.engine)
    local.engine.requests.clear()
    async with remote_of(local, server) as remote:
        assert said(await remote.client.post(path, content=question, headers=given)) == expected
        assert asked_of(local.engine) == asked
        return remote


# the same as without servers

SERVED = {
    "chat": (CHAT, {"messages": USER}),
    "streamed": (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}),
    "several turns": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *USER,
                {"role": "assistant", "content": "Yes?"},
                *USER,
            ]
        },
    ),
    "parts of text": (CHAT, {"messages": [{"role": "user", "content": text("Grüße, ", "世界 👋🏽")}]}),
    "many choices": (CHAT, {"messages": USER, "n": 3, "temperature": 0.5, "seed": 3}),
    "a tool": (CHAT, {"messages": USER, "tools": [TOOL]}),
    "a tool that must be used": (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required"}),
    "a tool that may not be used": (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "none"}),
    "a tool's answer": (
        CHAT,
        {
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "It rains."},
            ],
            "tools": [TOOL],
        },
    ),
    "to be continued": (
        CHAT,
        {
            "messages": [*USER, {"role": "assistant", "content": "Well, "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "logprobs, ids, salt, priority": (
        CHAT,
        {"messages": USER, "return_token_ids": True, "cache_salt": "s", "priority": 3, "stop": ["x"], "max_tokens": 7},
    ),
    "completion": (COMPLETIONS, {"prompt": "Once upon"}),
    "completion streamed": (COMPLETIONS, {"prompt": "Once upon", "stream": True, "n": 2}),
    "several prompts": (COMPLETIONS, {"prompt": ["Once", " upon", "a time"], "n": 2, "cache_salt": "s"}),
    "the same prompt twice": (COMPLETIONS, {"prompt": ["Once", "the same", "the same"]}),
    "message": (MESSAGES, {"messages": USER, "max_tokens": 9}),
    "message streamed": (
        MESSAGES,
        {"messages": USER, "max_tokens": 9, "stream": True, "system": text("Be", " brief."), "stop_sequences": ["x"]},
    ),
    "message with a tool's answer": (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look_up", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": text("It rains.")},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ],
            "tools": [{"name": "look_up", "input_schema": {"type": "object", "properties": {}}}],
        },
    ),
    "response": (RESPONSES, {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9}),
    "response streamed": (RESPONSES, {"input": [{"role": "user", "content": "Hi"}], "stream": True}),
    "response with parts": (
        RESPONSES,
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
    ),
}


@pytest.mark.parametrize("name", SERVED)
async def test_what_a_server_renders_is_served_as_without_servers(local, name):
    path, body = SERVED[name]
    async with RenderServer(local.app) as server:
        remote = await both(local, server, path, body)
    assert [one.path for one in server.asked] == [f"{path}/render"]
    assert (remote.tally.outcomes, remote.tally.reasons) == ({"ok": 1}, {})


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_the_engine_gets_the_ids_that_a_server_makes(local, path):
    """Whatever they are: nothing is rendered a second time."""
    body = {"input": "Hi"} if path == RESPONSES else {"messages": USER, "max_tokens": 9}
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: {**answer, "token_ids": [7, 8, 9]}
        assert (await remote.post(path, body)).status_code == 200
    assert [list(one.token_ids) for one in local.engine.requests] == [[7, 8, 9]]


async def test_each_prompt_of_a_completion_gets_its_own_ids(local):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: [{**one, "token_ids": [number]} for number, one in enumerate(answer, 10)]
        answer = await remote.post(COMPLETIONS, {"prompt": ["a", "b", "c"], "return_token_ids": True})
        assert [one["prompt_token_ids"] for one in answer.json()["choices"]] == [[10], [11], [12]]


async def test_requests_at_the_same_time_get_their_own_ids(local):
    async with RenderServer(local.app) as server, remote_of(local, server, running=4) as remote:
        answers = await asyncio.gather(
            *(
                remote.post(COMPLETIONS, {"prompt": f"number {number}", "return_token_ids": True})
                if number % 2
                else remote.chat(f"number {number}", return_token_ids=True)
                for number in range(20)
            )
        )
        for number, answer in enumerate(answers):
            told = answer.json()
            ids = told["choices"][0]["prompt_token_ids"] if number % 2 else told["prompt_token_ids"]
            assert f"number {number}" in local.tokenizer.decode(ids)
        assert remote.tally.outcomes == {"ok": 20}


async def test_a_server_gets_what_the_client_sent_and_no_key_of_the_clients(local):
    sent = b'{"model":  "tiny", "messages": [{"role": "user", "content": "Hi"}], "unknown": 1}'
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "Authorization": "Bearer of the client",
        "X-Api-Key": "of the client",
        "Cookie": "a=b",
        "X-Request-Id": "req-7",
    }
    async with RenderServer(local.app) as server, remote_of(local, server, api_key="of the pool") as remote:
        assert (await remote.client.post(CHAT, content=sent, headers=headers)).status_code == 200
    (asked,) = server.asked
    assert asked.body == sent
    assert asked.headers["Content-Type"] == "application/json; charset=utf-8"
    assert asked.headers["Authorization"] == "Bearer of the pool"
    assert asked.headers["X-Request-Id"] == "req-7"
    assert "of the client" not in str(dict(asked.headers))
    assert not {"Cookie", "X-Api-Key"} & set(asked.headers)


async def test_the_front_ends_own_keys_keep_no_canary_out(serving, model_folder):
    flags = [*FLAGS, "--api-key", "first", "second"]
    async with serving(model_folder, *flags) as served, RenderServer() as server:
        server.canaries = answering(401, {"error": "Unauthorized"})
        async with remote_of(served, server, api_keys=("first", "second")) as remote:
            assert "answers 401 (Unauthorized)" in remote.pool.remarks()
            assert (await remote.app.render_here(CHAT, b'{"messages": [{"role": "user", "content": "Hi"}]}'))[0] == 200


# rendered here

LOCAL = {
    "echo": (CHAT, {"messages": USER, "echo": True, "add_generation_prompt": False}, "more_than_ids"),
    "echo of a completion": (COMPLETIONS, {"prompt": "Hi", "echo": True}, "more_than_ids"),
    "the prompt's text": (CHAT, {"messages": USER, "return_prompt_text": True}, "more_than_ids"),
    "offsets": (COMPLETIONS, {"prompt": "Hi", "return_token_offsets": True}, "more_than_ids"),
    "cut": (COMPLETIONS, {"prompt": "one two three", "truncate_prompt_tokens": 2}, "more_than_ids"),
    "cut to nothing": (COMPLETIONS, {"prompt": "one two three", "truncate_prompt_tokens": 0}, "more_than_ids"),
    "cut as long as it must": (RESPONSES, {"input": "Hi", "truncation": "auto"}, "more_than_ids"),
    "messages of a response": (RESPONSES, {"input": "Hi", "enable_response_messages": True}, "more_than_ids"),
    "no thinking": (
        MESSAGES,
        {"messages": USER, "max_tokens": 9, "thinking": {"type": "disabled"}},
        "more_than_ids",
    ),
    "steering": (CHAT, {"messages": USER, "kv_transfer_params": {"prompt_token_ids": [5, 6]}}, "more_than_ids"),
    "ids": (COMPLETIONS, {"prompt": [5, 6, 7]}, "token_ids"),
    "lists of ids": (COMPLETIONS, {"prompt": [[5], [6, 7]]}, "token_ids"),
    "an image": (CHAT, {"messages": [{"role": "user", "content": [*text("What?"), IMAGE]}]}, "media"),
    "an image of a message": (
        MESSAGES,
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                    ],
                }
            ],
        },
        "media",
    ),
    "the next turn of a response": (RESPONSES, {"input": "Hi", "previous_response_id": "resp_1"}, "stored"),
}


@pytest.mark.parametrize("name", LOCAL)
async def test_what_needs_more_than_ids_is_rendered_here(local, name):
    path, body, reason = LOCAL[name]
    async with RenderServer(local.app) as server:
        remote = await both(local, server, path, body)
    assert server.asked == []
    assert (remote.tally.outcomes, remote.tally.reasons) == ({}, {reason: 1})


INVALID = {
    "no JSON": b'{"messages": [',
    "not a number": b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
    "a list": b"[]",
    "no messages": b'{"model": "tiny"}',
    "messages that are none": b'{"messages": 7}',
    "a message that is none": b'{"messages": ["Hi"]}',
    "a kind that is none": b'{"messages": [{"role": "user", "content": [{"type": ["text"], "text": "Hi"}]}]}',
    "nothing": b"",
    "too deep": b'{"messages": ' + b'[{"content": ' * 400 + b'"Hi"' + b"}]" * 400 + b"}",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
@pytest.mark.parametrize("name", INVALID)
async def test_what_is_no_request_is_refused_in_vllms_words(local, name, path):
    headers = {"Content-Type": "application/json"}
    expected = said(await local.client.post(path, content=INVALID[name], headers=headers))
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        assert said(await remote.client.post(path, content=INVALID[name], headers=headers)) == expected
        assert remote.tally.reasons.total() == 1
    assert expected[0] >= 400


REFUSED = {
    "an unknown model": (CHAT, {"messages": USER, "model": "other"}),
    "a role that is none": (CHAT, {"messages": [{"role": 7, "content": "Hi"}]}),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "word " * 300}]}),
    "far too long": (COMPLETIONS, {"prompt": "word " * 3000}),
    "more than fits": (COMPLETIONS, {"prompt": "Hi", "max_tokens": 1000}),
    "a template of the client's": (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}),
    "a value that is none": (CHAT, {"messages": USER, "temperature": -1}),
    "a message without a limit": (MESSAGES, {"messages": USER}),
    "too long a response": (RESPONSES, {"input": "word " * 300}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_server_refuses_is_refused_here_in_vllms_words(local, name):
    path, body = REFUSED[name]
    async with RenderServer(local.app) as server:
        remote = await both(local, server, path, body)
    assert len(server.asked) == 1
    assert (remote.tally.outcomes, remote.tally.reasons) == ({"refused": 1}, {"refused": 1})
    assert remote.pool.facts()[0]["problem"] is None, "that is no fault of the server's"


async def test_another_media_type_is_refused_in_vllms_words(local):
    async with RenderServer(local.app) as server:
        remote = await both(local, server, CHAT, {"messages": USER}, **{"Content-Type": "text/plain"})
    assert server.asked[0].headers["Content-Type"] == "text/plain"
    assert remote.tally.reasons == {"refused": 1}


@pytest.mark.parametrize(
    ("change", "what"),
    [({"features": {"kwargs_data": None}}, "more than ids"), ({"token_ids": [5] * 257}, "longer than the model takes")],
    ids=["features", "too many"],
)
async def test_an_answer_that_does_not_fit_is_rendered_here(local, change, what):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: {**answer, **change}
        assert (await remote.chat()).status_code == 200, what
        assert (remote.tally.outcomes, remote.tally.reasons) == ({"unfit": 1}, {"unfit": 1})
        assert remote.states == ["up"]
    assert len(local.engine.request.token_ids) < 100


async def test_small_requests_may_be_kept_here(local):
    async with RenderServer(local.app) as server, remote_of(local, server, local_below_bytes=500) as remote:
        assert (await remote.chat("Hi")).status_code == 200
        assert (await remote.chat("word " * 100)).status_code == 200
        assert (remote.tally.outcomes, remote.tally.reasons) == ({"ok": 1}, {"small": 1})


async def test_what_is_no_generation_is_none_of_the_servers_business(local):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        assert (await remote.client.get("/v1/models")).status_code == 200
        assert (await remote.post("/tokenize", {"prompt": "Hi"})).status_code == 200
        assert (await remote.post(f"{CHAT}/render", {"messages": USER})).status_code == 200
        assert (await remote.client.get(CHAT)).status_code == 405
    assert server.asked == []
    assert (remote.tally.outcomes, remote.tally.reasons) == ({}, {})


async def test_vllm_is_given_ids_for_the_prompts_they_are_of_and_no_others(local):
    """Were it to render something else first, that is rendered here, and so is the request."""
    online = local.app.state.online_renderer
    rendering, others = online.render_chat, []

    async def probing(request: Any, **more: Any) -> Any:
        if not others and _rendered.get() is not None:  # not where the server renders
            others.append(True)
            probe = type(request)(messages=[{"role": "user", "content": "Something else"}])
            _, (found,) = await rendering(probe)
            others.append(found["prompt_token_ids"])
        return await rendering(request, **more)

    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: {**answer, "token_ids": [7, 8, 9]}
        online.render_chat = probing
        try:
            assert (await remote.chat("Hi there")).status_code == 200
        finally:
            del online.render_chat
        assert remote.tally.reasons == {"unclaimed": 1}
    assert "Something else" in local.tokenizer.decode(others[1])
    assert "Hi there" in local.tokenizer.decode(list(local.engine.request.token_ids))


async def test_a_chats_ids_are_no_completions(local):
    online, found = local.app.state.online_renderer, []
    rendering = online.render_chat

    async def probing(request: Any, **more: Any) -> Any:
        if not found and _rendered.get() is not None:  # not where the server renders
            found.extend(await online.renderer.render_cmpl_async([{"prompt": "Hi"}]))
        return await rendering(request, **more)

    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: {**answer, "token_ids": [7, 8, 9]}
        online.render_chat = probing
        try:
            assert (await remote.chat("Hi")).status_code == 200
        finally:
            del online.render_chat
        assert remote.tally.reasons == {"unclaimed": 1}
    assert list(found[0]["prompt_token_ids"]) == local.ids("Hi")


async def test_a_completions_ids_are_no_chats(local):
    online, found = local.app.state.online_renderer, []
    rendering = online.render_completion

    async def probing(request: Any, **more: Any) -> Any:
        if not found and _rendered.get() is not None:  # not where the server renders
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            found.extend((await online.render_chat(ChatCompletionRequest(messages=USER)))[1])
        return await rendering(request, **more)

    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: [{**one, "token_ids": [7, 8, 9]} for one in answer]
        online.render_completion = probing
        try:
            assert (await remote.post(COMPLETIONS, {"prompt": "Hi"})).status_code == 200
        finally:
            del online.render_completion
        assert remote.tally.reasons == {"unclaimed": 1}
    assert "Hi" in local.tokenizer.decode(list(found[0]["prompt_token_ids"]))
    assert list(local.engine.request.token_ids) == local.ids("Hi")


async def test_what_was_handed_out_is_not_handed_out_again(local):
    online = local.app.state.online_renderer
    rendering, second = online.render_chat, []

    async def twice(request: Any, **more: Any) -> Any:
        first = await rendering(request, **more)
        if _rendered.get() is not None:  # not where the server renders
            _, (found,) = await rendering(request, **more)
            second.append(found["prompt_token_ids"])
        return first

    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: {**answer, "token_ids": [7, 8, 9]}
        online.render_chat = twice
        try:
            assert (await remote.chat("Hi there")).status_code == 200
        finally:
            del online.render_chat
        assert remote.tally.reasons == {}
    assert "Hi there" in local.tokenizer.decode(second[0])
    assert local.engine.request.token_ids == [7, 8, 9]


async def test_behind_it_the_renderer_is_as_before(local):
    renderer = local.app.state.online_renderer.renderer
    before = renderer.render_chat_async, renderer.render_cmpl_async
    async with RenderServer(local.app) as server, remote_of(local, server):
        assert renderer.render_chat_async != before[0]
    assert (renderer.render_chat_async, renderer.render_cmpl_async) == before


# servers that fail

BAD = {
    "500": (answering(500, {"error": {"message": "no\nspace"}}), "error", "answers 500 (no space)"),
    "503": (answering(503), "error", "answers 503"),
    "no JSON": (answering(200, "<html>"), "garbage", "answers without token ids"),
    "no ids": (answering(200, {"token_ids": None}), "garbage", "answers without token ids"),
    "empty ids": (answering(200, {"token_ids": []}), "garbage", "answers without token ids"),
    "words": (answering(200, {"token_ids": ["a"]}), "garbage", "answers without token ids"),
    "truths": (answering(200, {"token_ids": [True]}), "garbage", "answers without token ids"),
    "negative": (answering(200, {"token_ids": [-1]}), "garbage", "answers without token ids"),
    "a list": (answering(200, [{"token_ids": [1]}]), "garbage", "answers without token ids"),
    "ids of another model": (
        answering(200, {"token_ids": [10**6]}),
        "garbage",
        "answers with token ids that the model does not have",
    ),
    "another place": (answering(307, "", Location="/v1/models"), "garbage", "answers 307"),
    "wrong key": (answering(403, {"error": {"message": "no"}}), "denied", "answers 403 (no)"),
    "half an answer": (breaking_off, "garbage", "gives no whole answer"),
}


@pytest.mark.parametrize("name", BAD)
async def test_where_a_server_fails_another_one_renders(local, name):
    reply, outcome, _ = BAD[name]
    async with RenderServer(local.app) as bad, RenderServer(local.app) as good, remote_of(local, bad, good) as remote:
        bad.replies = reply
        bad.health = 500  # or it would be used again at once
        for _ in range(8):  # whichever is drawn first
            assert (await remote.chat()).status_code == 200
        assert len(bad.asked) == 1, "it is not asked again"
        assert remote.tally.outcomes == {"ok": 8, outcome: 1}
        assert remote.tally.reasons == {}
        assert remote.pool.facts()[1]["problem"] is None
    assert len(good.asked) == 8
    prompts = {tuple(one.token_ids) for one in local.engine.requests}
    assert len(prompts) == 1


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("refuses", [False, True])
async def test_where_all_servers_fail_a_request_is_rendered_here_or_refused(local, name, refuses, caplog):
    reply, outcome, problem = BAD[name]
    caplog.set_level(logging.INFO, "trivet.render.pool")
    async with (
        RenderServer(local.app) as one,
        RenderServer(local.app) as two,
        remote_of(local, one, two, refuses=refuses) as remote,
    ):
        for server in (one, two):
            server.replies, server.health = reply, 500
        if refuses:
            with pytest.raises(ServingError, match="the render servers failed to render this request") as refused:
                await remote.chat()
            assert refused.value.status == 503
            assert (remote.tally.refusals, remote.tally.reasons) == ({"failed": 1}, {})
        else:
            assert (await remote.chat()).status_code == 200
            assert (remote.tally.refusals, remote.tally.reasons) == ({}, {"failed": 1})
        assert remote.tally.outcomes == {outcome: 2}
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        for server in (one, two):
            assert any(f"render server {server.url} {problem}" in line for line in told)
    assert len(local.engine.requests) == (not refuses)


async def test_a_completion_with_another_number_of_prompts_is_garbage(local):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.change = lambda answer: answer[:1]
        assert (await remote.post(COMPLETIONS, {"prompt": ["a", "b"]})).status_code == 200
        assert (remote.tally.outcomes, remote.tally.reasons) == ({"garbage": 1}, {"failed": 1})
    assert len(local.engine.requests) == 2


async def test_a_server_that_says_that_it_is_busy_is_used_on(local):
    async with RenderServer(local.app) as busy, RenderServer(local.app) as good, remote_of(local, busy, good) as remote:
        busy.replies = answering(503, {}, **{"Retry-After": "1"})
        for _ in range(8):
            assert (await remote.chat()).status_code == 200
        assert remote.states == ["up", "up"]
        assert remote.tally.outcomes["ok"] == 8
        good.replies = answering(429, {})
        assert (await remote.chat()).status_code == 200
        assert remote.tally.reasons == {"busy": 1}
        assert remote.states == ["up", "up"]


async def test_a_server_that_hangs_is_given_up_in_time(local):
    async with RenderServer(local.app) as server, remote_of(local, server, timeout_s=0.2) as remote:
        server.replies, server.health = silent, 500
        assert (await remote.chat()).status_code == 200
        assert (remote.tally.outcomes, remote.tally.reasons) == ({"timeout": 1}, {"failed": 1})
        await holds(lambda: server.cancelled == 1)


async def test_a_server_that_ended_is_not_asked_and_used_again_when_it_is_back(local):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        await server.stop()
        await holds(lambda: remote.states == ["down"])
        assert (await remote.chat()).status_code == 200
        assert (remote.tally.outcomes, remote.tally.reasons) == ({}, {"no_server": 1})
        assert "cannot be reached" in remote.pool.remarks()
        await server.start()
        await holds(lambda: remote.states == ["up"])
        assert (await remote.chat()).status_code == 200
        assert remote.tally.outcomes == {"ok": 1}


async def test_a_server_that_is_no_web_server_is_not_used(local):
    async with garbling() as url, remote_of(local, url) as remote:
        assert remote.states == ["down"]
        assert (await remote.chat()).status_code == 200
        assert remote.tally.reasons == {"no_server": 1}


@pytest.mark.parametrize("fault", ["health", "canaries"])
async def test_a_server_that_comes_up_ill_is_not_asked_and_used_when_it_is_well(local, fault):
    async with RenderServer(local.app) as server:
        if fault == "health":
            server.health = 503
        else:
            server.canaries = answering(500)
        async with remote_of(local, server) as remote:
            assert remote.states == ["down"]
            assert (await remote.chat()).status_code == 200
            assert server.asked == []
            server.health, server.canaries = 200, None
            await holds(lambda: remote.states == ["up"])
            assert (await remote.chat()).status_code == 200
    assert len(server.asked) == 1


@pytest.mark.parametrize("refuses", [False, True])
async def test_without_any_server_requests_are_rendered_here_or_refused(local, refuses):
    async with remote_of(local, "http://127.0.0.1:1", refuses=refuses) as remote:
        if refuses:
            with pytest.raises(ServingError, match="no render server can be used"):
                await remote.chat()
            assert remote.tally.refusals == {"no_server": 1}
            assert (await remote.post(COMPLETIONS, {"prompt": [1, 2]})).status_code == 200, "there is nothing to render"
        else:
            assert (await remote.chat()).status_code == 200
            assert remote.tally.reasons == {"no_server": 1}


async def test_a_fault_of_our_own_costs_a_request_nothing(local, caplog, monkeypatch):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        monkeypatch.setattr(remote.app._asker, "render", lambda *_: 1 / 0)
        assert (await remote.chat()).status_code == 200
        assert remote.tally.reasons == {"failed": 1}
    assert any("ZeroDivisionError" in (record.exc_text or "") for record in caplog.records)


# limits


async def test_a_server_has_no_more_at_once_than_it_may_and_all_are_rendered_there(local):
    async with RenderServer(local.app) as server, remote_of(local, server, running=2) as remote:
        gate = asyncio.Event()

        async def slow(request: Any) -> Any:
            await gate.wait()
            return await server._rendered(request)

        server.replies = slow
        asking = [asyncio.create_task(remote.chat(f"number {number}")) for number in range(6)]
        await holds(lambda: server.running == 2 and remote.pool.waiting == 4)
        gate.set()
        assert {one.status_code for one in await asyncio.gather(*asking)} == {200}
        assert (server.most, remote.tally.outcomes, remote.tally.reasons) == (2, {"ok": 6}, {})


@pytest.mark.parametrize(
    ("rules", "reason", "told"),
    [
        ({"queued": 0}, "queue_full", "too many requests wait for a render server"),
        ({"queue_s": 0.05}, "queue_wait", "no render server took this request in time"),
    ],
)
@pytest.mark.parametrize("refuses", [False, True])
async def test_what_is_past_the_limits_is_rendered_here_or_refused(local, rules, reason, told, refuses):
    async with (
        RenderServer(local.app) as server,
        remote_of(local, server, running=1, refuses=refuses, **rules) as remote,
    ):
        server.replies = silent
        holding = asyncio.create_task(remote.chat())
        await holds(lambda: server.running == 1)
        if refuses:
            with pytest.raises(ServingError, match=told) as refused:
                await remote.chat()
            assert refused.value.status == 503
            assert remote.tally.refusals == {reason: 1}
        else:
            assert (await remote.chat()).status_code == 200
            assert remote.tally.reasons == {reason: 1}
        holding.cancel()
        await asyncio.wait([holding])
    assert len(server.asked) == 1


# clients that leave, and deadlines


@contextlib.asynccontextmanager
async def hanging_up(app: Any, path: str = CHAT) -> AsyncIterator[tuple[asyncio.Event, list[Any]]]:
    """One request, spoken as ASGI; the event hangs up."""
    gone, sent, asked = asyncio.Event(), [], []

    async def receive() -> dict[str, Any]:
        if not asked:
            asked.append(True)
            body = json.dumps({"model": "tiny", "messages": USER}).encode()
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

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
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"r")],
        "server": ("render", 80),
        "client": ("client", 1),
    }
    serving = asyncio.create_task(app(scope, receive, send))
    yield gone, sent
    gone.set()
    await asyncio.wait_for(serving, 20)


async def test_a_client_that_leaves_ends_the_call_to_the_server(local):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        server.replies = silent
        async with hanging_up(remote.app) as (gone, sent):
            await holds(lambda: server.running == 1)
            gone.set()
            await holds(lambda: server.cancelled == 1)
        assert sent == []
        assert (remote.tally.outcomes, remote.tally.reasons) == ({"left": 1}, {})
        assert remote.states == ["up"], "that is no fault of the server's"
    assert local.engine.requests == []


async def test_a_client_that_leaves_the_queue_is_asked_about_nowhere(local):
    async with RenderServer(local.app) as server, remote_of(local, server, running=1) as remote:
        server.replies = silent
        async with hanging_up(remote.app) as (first, _), hanging_up(remote.app) as (second, _):
            await holds(lambda: remote.pool.waiting == 1)
            second.set()
            await holds(lambda: remote.pool.waiting == 0)
            first.set()
    assert len(server.asked) == 1
    assert local.engine.requests == []


async def test_a_client_that_left_before_its_body_was_there_is_vllms_to_see(local):
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        met = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            met.extend([await receive(), await receive()])

        remote.app._app = app
        messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        expected = list(messages)

        async def receive() -> Any:
            return messages.pop(0)

        await remote.app({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, None)
        assert met == expected
    assert server.asked == []


async def test_the_deadline_of_a_request_holds_for_rendering_too(local):
    async with RenderServer(local.app) as server, remote_of(local, server, left_s=lambda: 0.1) as remote:
        server.replies = silent
        with pytest.raises(DeadlinePassedError):
            await remote.chat()
        await holds(lambda: server.cancelled == 1)
        assert remote.states == ["up"]
    assert local.engine.requests == []


# canaries


@pytest.fixture(scope="session")
def other_template(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "other.jinja"
    path.write_text(OTHER_TEMPLATE)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def other(serving, model_folder, other_template):
    """A front end whose template is another."""
    async with serving(model_folder, *FLAGS, "--chat-template", str(other_template)) as served:
        yield served


async def test_a_server_with_another_template_never_answers(local, other, caplog):
    caplog.set_level(logging.INFO, "trivet.render.pool")
    async with RenderServer(other.app) as server, remote_of(local, server) as remote:
        assert remote.states == ["other_ids"]
        problem = f"render server {server.url} makes other token ids of a chat ("
        assert any(problem in record.getMessage() for record in caplog.records)
        assert "makes other token ids of a chat (" in remote.pool.remarks()
        assert (await remote.chat()).status_code == 200
        assert remote.tally.reasons == {"no_server": 1}
        assert server.asked == []
        server._transport = httpx.ASGITransport(local.app)  # started anew, rightly
        await holds(lambda: remote.states == ["up"])
        assert (await remote.chat()).status_code == 200
        assert len(server.asked) == 1


async def test_a_server_that_is_started_anew_with_another_template_never_answers(local, other):
    """Nor does the first request tell: there was none while it was away."""
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        assert (await remote.chat()).status_code == 200
        looks = server.looks
        await server.stop()
        server._transport = httpx.ASGITransport(other.app)
        await server.start()
        for _ in range(5):
            assert (await remote.chat()).status_code == 200
        await holds(lambda: remote.states == ["other_ids"])
        assert remote.tally.outcomes["ok"] == 1
        assert server.looks > looks
    assert len({tuple(one.token_ids) for one in local.engine.requests}) == 1


async def test_an_answer_of_who_took_a_servers_place_is_not_taken(local, other):
    """The request was on its way there when it ended."""
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:

        async def replaced(request: Any) -> Any:
            server.canaries = silent  # nobody has looked at the new one
            for writer in server.connections():
                if writer is not request.transport:
                    writer.close()
            await holds(lambda: remote.states == ["looking"])
            return await server._rendered(request, lambda answer: {**answer, "token_ids": [7]})

        server.replies = replaced
        assert (await remote.chat()).status_code == 200
        assert (remote.tally.outcomes, remote.tally.reasons) == ({"replaced": 1}, {"failed": 1})
    assert len(local.engine.request.token_ids) > 1


CHANGES = {
    "one id": lambda path, answer: {**answer, "token_ids": [*answer["token_ids"][:-1], 5]},
    "one more": lambda path, answer: {**answer, "token_ids": [*answer["token_ids"], 5]},
    "features": lambda path, answer: {**answer, "features": {}},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_any_other_ids_of_a_canary_are_enough(local, path, change):
    async with RenderServer(local.app) as server:

        async def changed(request: Any) -> Any:
            if request.path != f"{path}/render":
                return await server._rendered(request)
            return await server._rendered(request, lambda answer: CHANGES[change](path, answer))

        server.canaries = changed
        async with remote_of(local, server) as remote:
            assert remote.states == ["other_ids"]


async def test_a_server_without_the_tools_of_this_gateway_is_not_used(local, serving, model_folder):
    flags = [flag for flag in FLAGS if flag not in TOOLS]
    async with serving(model_folder, *flags) as without, RenderServer(without.app) as server:
        async with remote_of(local, server) as remote:
            assert remote.states == ["other_ids"]
            assert 'answers 400 ("auto" tool choice requires' in remote.pool.remarks()
            assert "to a chat with a tool, which this gateway renders" in remote.pool.remarks()
        async with RenderServer(local.app) as more, remote_of(without, more) as remote:
            assert "renders a chat with a tool, which this gateway answers with 400" in remote.pool.remarks()


async def test_a_server_of_another_name_is_not_used(local, serving, model_folder):
    flags = ["other" if flag == "tiny" else flag for flag in FLAGS]
    async with (
        serving(model_folder, *flags) as named,
        RenderServer(named.app) as server,
        remote_of(local, server) as remote,
    ):
        assert remote.states == ["other_ids"]
        assert "answers 404 (The model `tiny` does not exist." in remote.pool.remarks()


async def test_a_date_that_changed_between_both_sides_is_no_difference(local):
    """Templates may have today's date: a canary that differs once is sent again."""
    async with RenderServer(local.app) as server:
        seen: Counter[bytes] = Counter()

        async def first_other(request: Any) -> Any:
            body = await request.read()
            seen[body] += 1
            if seen[body] == 1 and request.path != f"{COMPLETIONS}/render":
                return await server._rendered(request, lambda answer: {**answer, "token_ids": [5]})
            return await server._rendered(request)

        server.canaries = first_other
        async with remote_of(local, server) as remote:
            assert remote.states == ["up"]


async def test_endpoints_of_which_no_canary_can_be_rendered_are_rendered_here(local):
    """A model without a chat template: nothing tells that both sides would make the same of a chat."""
    online = local.app.state.online_renderer
    rendering = online.render_chat

    async def without_template(request: Any, **more: Any) -> Any:
        if more.get("skip_mm_cache"):  # as the render endpoints ask
            return online.create_error_response("there is no chat template")
        return await rendering(request, **more)

    online.render_chat = without_template
    for route in local.app.router.routes:  # what was rendered before needs no template
        if (repeated := getattr(route, "_repeated", None)) is not None:
            repeated._kept.clear()
    try:
        async with RenderServer(local.app) as server, remote_of(local, server) as remote:
            assert remote.states == ["up"]
            assert (await remote.chat()).status_code == 200
            assert (await remote.post(COMPLETIONS, {"prompt": "Hi"})).status_code == 200
            assert (remote.tally.outcomes, remote.tally.reasons) == ({"ok": 1}, {"unproven": 1})
    finally:
        del online.render_chat


# seams


@pytest.mark.parametrize(
    "renderer",
    [
        None,
        SimpleNamespace(),
        type("Renderer", (), {"render_chat_async": lambda self, conversations, settings: None})(),
    ],
)
async def test_a_vllm_that_renders_in_another_way_is_refused(renderer):
    app = SimpleNamespace(state=SimpleNamespace(online_renderer=SimpleNamespace(renderer=renderer)))
    front = SimpleNamespace(app=app, served_names=["tiny"], max_model_len=9)
    with pytest.raises(TrivetError, match="renders in a way that Trivet does not know: render_chat_async"):
        async with open_remote(front, PoolRules(("http://127.0.0.1:1",))):
            pass


@pytest.mark.parametrize(
    ("harmony", "encoder", "paths"),
    [
        (False, False, set()),
        (True, False, {CHAT, MESSAGES, RESPONSES}),
        (False, True, {CHAT, COMPLETIONS, MESSAGES, RESPONSES}),
    ],
)
async def test_models_whose_prompts_are_made_in_another_way_are_rendered_here(local, harmony, encoder, paths):
    online = SimpleNamespace(use_harmony=harmony, model_config=SimpleNamespace(is_encoder_decoder=encoder))
    assert _otherwise_made(online) == paths
    async with RenderServer(local.app) as server, remote_of(local, server) as remote:
        remote.app._otherwise_made = _otherwise_made(online)
        await remote.chat()
        await remote.post(COMPLETIONS, {"prompt": "Hi"})
        assert remote.tally.reasons.get("model", 0) == len(paths & {CHAT, COMPLETIONS})
        assert len(server.asked) == 2 - len(paths & {CHAT, COMPLETIONS})
