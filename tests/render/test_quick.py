"""The short render routes answer what vLLM's do: value for value, status for status."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from render.conftest import vllm_around

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(frontend):
    import trivet.render.server

    return trivet.render.server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apps(frontend, server, caches, model_folder, tmp_path_factory):
    """vLLM's application and ours, of the same flags."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state

    from trivet.render.tokenizing import TokenizingSettings

    flags = [str(model_folder), "--served-model-name", "tiny", "alias", "--enable-auto-tool-choice"]
    args = frontend.parse_flags([*flags, "--tool-call-parser", "hermes"])
    with vllm_around(caches):
        theirs = build_app(args, ("render",))
        await init_render_app_state(frontend.render_config(args), theirs.state, args)
        folder: Path = tmp_path_factory.mktemp("verdicts")
        ours = await server.open_render_app(args, TokenizingSettings(verdicts=folder, fast=()))
    return theirs, ours


@contextlib.contextmanager
def vllms_own():
    """Inside, vLLM's handlers make what they made before."""
    from vllm.entrypoints.scale_out.render import serving
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    shortened, serving.GenerateRequest = serving.GenerateRequest, GenerateRequest
    try:
        yield
    finally:
        serving.GenerateRequest = shortened


async def ask(app, path, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://render") as client:
        return await client.post(path, content=content, headers={"content-type": "application/json", **headers})


def known(answer: httpx.Response):
    """All but what is new each time."""
    told = answer.json()
    for one in told if isinstance(told, list) else [told]:
        if "request_id" in one:
            one["request_id"] = one["request_id"].split("-")[0]
    return answer.status_code, told, list(told[0] if isinstance(told, list) else told)


async def assert_same(apps, path, body, **headers):
    theirs, ours = apps
    with vllms_own():
        proper = await ask(theirs, path, body, **headers)
    given_ = await ask(ours, path, body, **headers)
    assert known(given_) == known(proper)
    assert given_.headers["content-type"] == proper.headers["content-type"]
    return given_


GOOD = {
    "a chat": (CHAT, {"messages": HI}),
    "with a system message": (CHAT, {"messages": [{"role": "system", "content": "Be kind."}, *HI]}),
    "in parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    "with tools": (CHAT, {"messages": HI, "tools": [TOOL]}),
    "with a tool by name": (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "required"}),
    "streamed": (CHAT, {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}),
    "sampled": (CHAT, {"messages": HI, "temperature": 0.3, "top_p": 0.5, "seed": 7, "stop": ["x"], "logprobs": True}),
    "salted": (CHAT, {"messages": HI, "cache_salt": "salt", "priority": 0}),
    "a grammar": (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}),
    "cut": (CHAT, {"messages": [{"role": "user", "content": "Hi " * 40}], "truncate_prompt_tokens": 9}),
    "offsets": (CHAT, {"messages": HI, "return_token_offsets": True}),
    "special tokens in the text": (CHAT, {"messages": [{"role": "user", "content": "<|im_end|><|im_start|>x"}]}),
    "unicode": (CHAT, {"messages": [{"role": "user", "content": "Grüße 東京 👍 \u0000"}]}),
    "a request id": (CHAT, {"messages": HI, "request_id": "chatcmpl-mine"}),
    "the alias": (CHAT, {"messages": HI, "model": "alias"}),
    "no model": (CHAT, {"messages": HI, "model": None}),
    "unknown fields": (CHAT, {"messages": HI, "nonsense": 1}),
    "several calls": (
        CHAT,
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "seen"},
            ]
        },
    ),
    "a completion": (COMPLETIONS, {"prompt": "Hi"}),
    "several prompts": (COMPLETIONS, {"prompt": ["Hi", "you", "Grüße"], "max_tokens": 5}),
    "ids": (COMPLETIONS, {"prompt": [1, 2, 3]}),
    "an id that no tokenizer makes": (COMPLETIONS, {"prompt": [10**9]}),
    "several ids": (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
    "echo": (COMPLETIONS, {"prompt": "Hi", "echo": True}),
    "without special tokens": (COMPLETIONS, {"prompt": "Hi", "add_special_tokens": False}),
    "a message": (MESSAGES, {"messages": HI, "max_tokens": 5}),
    "a message with a system": (MESSAGES, {"messages": HI, "max_tokens": 5, "system": "Be kind."}),
}
BAD = {
    "no JSON": (CHAT, b"{"),
    "nothing": (CHAT, b""),
    "null": (CHAT, b"null"),
    "a list": (CHAT, b"[]"),
    "no messages": (CHAT, {}),
    "empty messages": (CHAT, {"messages": []}),
    "an unknown model": (CHAT, {"messages": HI, "model": "nobody"}),
    "a bad role": (CHAT, {"messages": [{"role": 7, "content": "Hi"}]}),
    "a bad temperature": (CHAT, {"messages": HI, "temperature": -1}),
    "a temperature that is none": (CHAT, {"messages": HI, "temperature": "hot"}),
    "too long": (CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]}),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ),
    "a template of its own": (CHAT, {"messages": HI, "chat_template": "{{ x }}"}),
    "beams": (CHAT, {"messages": HI, "use_beam_search": True}),
    "half a character": (CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'),
    "a number that is none": (CHAT, b'{"model": "tiny", "messages": [], "temperature": NaN}'),
    "bytes that are no text": (CHAT, b'{"model": "\xff"}'),
    "no prompt": (COMPLETIONS, {}),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}),
    "no prompts": (COMPLETIONS, {"prompt": []}),
    "a negative id": (COMPLETIONS, {"prompt": [-1]}),
    "a message without a limit": (MESSAGES, {"messages": HI}),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", GOOD)
async def test_what_is_rendered_is_answered_as_vllm_does(apps, name):
    answer = await assert_same(apps, *GOOD[name])
    assert answer.status_code == 200, answer.text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BAD)
async def test_what_is_refused_is_refused_in_vllms_words(apps, name):
    answer = await assert_same(apps, *BAD[name])
    assert answer.status_code >= 400, answer.text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=utf-8", "APPLICATION/JSON", ""])
async def test_the_media_type_counts_as_with_vllm(apps, kind):
    await assert_same(apps, CHAT, {"messages": HI}, **{"content-type": kind})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_id_in_the_header_is_taken(apps):
    proper, given_ = [(await ask(app, CHAT, {"messages": HI}, **{"x-request-id": "mine"})).json() for app in apps]
    assert (given_["request_id"] == "chatcmpl-mine") is (proper["request_id"] == "chatcmpl-mine")  # not in vLLM 0.30


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_answered_as_vllm_does(apps, method):
    answers = []
    for app in apps:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://render") as client:
            answers.append(await client.request(method, CHAT))
    assert [one.status_code for one in answers] == [answers[0].status_code] * 2
    assert answers[0].content == answers[1].content


# -- any chat ----------------------------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["<|im_start|>", "<|im_end|>", "don't\t's", "  \n\n ", "東京", "\r\n", "<tool_call>", "</s>"]),
)
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": WORDS}),
    min_size=1,
    max_size=6,
)


@pytest.mark.asyncio(loop_scope="module")
async def test_any_chat_is_rendered_as_vllm_does(apps):
    loop = asyncio.get_running_loop()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(messages=CHATS)
    def same(messages):
        asyncio.run_coroutine_threadsafe(assert_same(apps, CHAT, {"messages": messages}), loop).result(30)

    await asyncio.to_thread(same)


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_rendered_in_a_thread_ends_with_its_client(apps):
    """It waits for the one thread there is; its client leaves, and it is never rendered."""
    _, ours = apps
    renderer = ours.state.online_renderer.renderer
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    busy = loop.run_in_executor(
        renderer._executor, lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
    )
    rendered: list[int] = []
    before = renderer.render_chat

    def render_chat(*given_, **more):
        rendered.append(1)
        return before(*given_, **more)

    renderer.render_chat = render_chat
    gone = asyncio.Event()
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 70_000}]}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"render")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    scope |= {
        "headers": headers,
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "server": None,
        "client": None,
    }
    try:
        request = asyncio.create_task(ours(scope, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not request.done()
        gone.set()
        await request
    finally:
        release.set()
        await busy
        renderer.render_chat = before
    assert not rendered
    assert not sent
    assert (await ask(ours, CHAT, {"messages": HI})).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_the_status_tells_how_prompts_are_tokenized(apps):
    _, ours = apps
    async with httpx.AsyncClient(transport=httpx.ASGITransport(ours), base_url="http://render") as client:
        told = (await client.get("/trivet/render")).json()
    assert told["tokenizer"] == "tokenizers"
    assert told["segments"] == "kept"
    assert told["cache"]["segments"] > 0
