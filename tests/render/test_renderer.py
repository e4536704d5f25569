"""What is rendered on the event loop, what in a thread, and what comes of errors."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from render.conftest import vllm_around

CHAT, COMPLETIONS = "/v1/chat/completions/render", "/v1/completions/render"
HI = [{"role": "user", "content": "Hi"}]
INLINE = 2**16
"""Of ``trivet render``."""
LONG = "x " * INLINE
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": LONG})}}
TOOL = {"type": "function", "function": {"name": "look", "description": LONG, "parameters": {"type": "object"}}}
LARGE = {
    "a text": (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
    "a part": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
    "a tool": (CHAT, {"messages": HI, "tools": [TOOL]}),
    "a call's arguments": (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}]}),
    "reasoning": (CHAT, {"messages": [*HI, {"role": "assistant", "content": "x", "reasoning": LONG}]}),
    "a name": (CHAT, {"messages": [{"role": "user", "content": "Hi", "name": LONG}]}),
    "empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 2000}),
    "empty parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]}),
    "documents": (CHAT, {"messages": HI, "documents": [{"title": "x", "text": LONG}]}),
    "what a template is given": (CHAT, {"messages": HI, "chat_template_kwargs": {"custom": LONG}}),
    "the name of what it is given": (CHAT, {"messages": HI, "chat_template_kwargs": {LONG: 1}}),
    "a prompt": (COMPLETIONS, {"prompt": LONG}),
    "prompts": (COMPLETIONS, {"prompt": ["x"] * 1024}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apps(frontend, caches, model_folder, tmp_path_factory):
    """vLLM's application and ours, of the same flags."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state

    import trivet.render.server
    from trivet.render.tokenizing import TokenizingSettings

    flags = [str(model_folder), "--served-model-name", "tiny", "--enable-auto-tool-choice"]
    args = frontend.parse_flags([*flags, "--tool-call-parser", "hermes"])
    with vllm_around(caches):
        theirs = build_app(args, ("render",))
        await init_render_app_state(frontend.render_config(args), theirs.state, args)
        folder: Path = tmp_path_factory.mktemp("verdicts")
        ours = await trivet.render.server.open_render_app(args, TokenizingSettings(verdicts=folder, fast=()))
    return theirs, ours


def renderer_of(app):
    return app.state.online_renderer.renderer


async def ask(app, path, body):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://render") as client:
        return await client.post(path, json={"model": "tiny", **body})


@pytest.fixture
def in_threads(apps, monkeypatch):
    """What has been given to the renderer's threads."""
    executor, given = renderer_of(apps[1])._executor, []
    submit = executor.submit

    def counting(*call):
        given.append(call)
        return submit(*call)

    monkeypatch.setattr(executor, "submit", counting)
    return given


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", LARGE)
async def test_what_is_large_is_rendered_in_a_thread_wherever_it_is_large(apps, in_threads, name):
    await ask(apps[1], *LARGE[name])
    assert len(in_threads) == 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})])
async def test_what_is_small_is_rendered_at_once(apps, in_threads, path, body):
    assert (await ask(apps[1], path, body)).status_code == 200
    assert not in_threads


def errors():
    from jinja2 import TemplateError
    from vllm.exceptions import VLLMValidationError

    return {
        "a template that takes too long": TimeoutError("Chat template rendering timed out after 30s."),
        "a template that refuses": TemplateError("roles must alternate"),
        "a request that vLLM refuses": VLLMValidationError("it is too long", parameter="messages", value=7),
        "a value": ValueError("no such value"),
        "a type": TypeError("no such type"),
        "an overflow": OverflowError("too much"),
        "what is not there": NotImplementedError("not here"),
        "a fault": RuntimeError("it broke"),
        "a key": KeyError("x"),
    }


KINDS = (
    "a template that takes too long",
    "a template that refuses",
    "a request that vLLM refuses",
    "a value",
    "a type",
    "an overflow",
    "what is not there",
    "a fault",
    "a key",
)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("content", ["Hi", LONG])
async def test_what_rendering_raises_is_told_as_by_vllm_and_nothing_is_rendered_twice(apps, monkeypatch, name, content):
    theirs, ours = apps
    runs: list[int] = []

    def render(*_given, **_more):
        runs.append(1)
        raise errors()[name]

    async def render_async(*given, **more):
        return render(*given, **more)

    monkeypatch.setattr(renderer_of(theirs), "render_chat_async", render_async)
    monkeypatch.setattr(renderer_of(ours), "render_chat", render)
    body = {"messages": [{"role": "user", "content": content}]}
    proper = await ask(theirs, CHAT, body)
    runs.clear()
    told = await ask(ours, CHAT, body)
    assert len(runs) == 1
    assert (told.status_code, told.content) == (proper.status_code, proper.content)
    assert told.status_code >= 400


# -- salted requests ---------------------------------------------------------------------------------------------------


async def kept_by(app):
    """What caches hold and have been asked for."""
    from vllm.renderers.hf import parse_chat_messages

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://render") as client:
        segments = (await client.get("/trivet/render")).json()["cache"]
    return segments, parse_chat_messages.__globals__["_parse_chat_message_content"].characters


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "in_a_thread"), [(CHAT, False), (CHAT, True), (COMPLETIONS, False)])
async def test_a_salted_request_neither_finds_nor_leaves_anything(apps, monkeypatch, path, in_a_thread):
    """How long it takes would tell whether somebody wrote the same before."""
    import trivet.render.renderer

    if in_a_thread:
        monkeypatch.setattr(trivet.render.renderer, "heavier", lambda *_: True)
    text = f"a word of {path} {in_a_thread}"
    what = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": f"<|im_start|>{text}"}
    salted, before = {**what, "cache_salt": "mine"}, await kept_by(apps[1])
    ids = (await ask(apps[1], path, salted)).json()
    assert await kept_by(apps[1]) == before, "nothing is left"
    assert (await ask(apps[1], path, what)).status_code == 200
    left = await kept_by(apps[1])
    assert left != before, "or this test could not fail"
    again = (await ask(apps[1], path, salted)).json()
    assert await kept_by(apps[1]) == left, "nothing is found"
    one, other = (told[0] if isinstance(told, list) else told for told in (ids, again))
    assert one["token_ids"] == other["token_ids"]
