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

from helpers.templates import templates
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


# -- conversations that grow -------------------------------------------------------------------------------------------

ASKED = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "max_tokens": st.sampled_from([1, 5]),
        "add_special_tokens": st.booleans(),
        "chat_template_kwargs": st.sampled_from([{"x": 1}, {"x": True}, {"bos_token": "x"}, {"x": [1]}]),
        "truncate_prompt_tokens": st.sampled_from([3, -1]),
        "continue_final_message": st.just(True),
        "return_token_offsets": st.just(True),
        "documents": st.just([{"title": "a", "text": "b"}]),
        "echo": st.booleans(),
        "stream": st.booleans(),
    },
)


@pytest.mark.asyncio(loop_scope="module")
async def test_conversations_that_grow_are_rendered_as_vllm_does(apps):
    loop = asyncio.get_running_loop()

    async def grow(messages, asked):
        for length in range(1, len(messages) + 1):
            await assert_same(apps, CHAT, {"messages": messages[:length], **asked})

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(messages=CHATS, asked=ASKED)
    def same(messages, asked):
        asyncio.run_coroutine_threadsafe(grow(messages, asked), loop).result(60)

    await asyncio.to_thread(same)


@pytest.mark.asyncio(loop_scope="module")
async def test_of_a_conversation_that_grows_only_what_is_new_is_rendered(apps, monkeypatch):
    from trivet.render.separable import Separable

    run, rendered = Separable.run, []

    def counted(self, variables, messages, wanted):
        rendered.extend(wanted)
        return run(self, variables, messages, wanted)

    monkeypatch.setattr(Separable, "run", counted)
    said = [{"role": ("user", "assistant")[number % 2], "content": f"turn {number}"} for number in range(12)]
    for length in range(1, len(said) + 1):
        rendered.clear()
        await assert_same(apps, CHAT, {"messages": said[:length]})
        if length > 2:
            assert rendered == [length - 1]
    rendered.clear()
    await assert_same(apps, CHAT, {"messages": said})
    assert not rendered


@pytest.mark.asyncio(loop_scope="module")
async def test_ids_of_a_tokenizer_that_is_distrusted_are_not_written(apps):
    _, ours = apps
    body = {"messages": [{"role": "user", "content": "distrusted"}]}
    await assert_same(apps, CHAT, body)
    plain = ours.state.trivet_plain_chats
    assert plain._kept
    plain._prompts._cache.forget()
    await assert_same(apps, CHAT, body)
    assert plain._generation == plain._prompts.generation


class Held:
    """A lock that somebody has for ever, and who would have waited for it."""

    def __init__(self) -> None:
        self.waited = 0

    def acquire(self, blocking: bool = True) -> bool:
        self.waited += blocking
        return False

    def __enter__(self) -> None:
        self.waited += 1
        raise TimeoutError

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.asyncio(loop_scope="module")
async def test_a_template_that_never_ends_keeps_nobody_waiting(apps, monkeypatch):
    """A thread that never comes back has the lock; chats of new kinds go vLLM's way until it is free."""
    from trivet.render import plain_chats

    plain, held = apps[1].state.trivet_plain_chats, Held()
    body = {"messages": HI, "chat_template_kwargs": {"of_a_new_kind": 7}}
    before = list(plain._frames)
    with monkeypatch.context() as patched:
        patched.setattr(plain_chats, "_LOOKING", held)
        await assert_same(apps, CHAT, body)
        assert not held.waited
        assert list(plain._frames) == before, "it may be looked at later"
    await assert_same(apps, CHAT, body)
    assert len(plain._frames) == len(before) + 1


@pytest.mark.asyncio(loop_scope="module")
async def test_of_what_is_salted_nothing_is_kept(apps):
    _, ours = apps
    plain = ours.state.trivet_plain_chats
    await assert_same(apps, CHAT, {"messages": HI})
    before = list(plain._kept)
    await assert_same(apps, CHAT, {"messages": [{"role": "user", "content": "salted"}, *HI], "cache_salt": "s"})
    assert list(plain._kept) == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_template_that_asks_for_more_is_run_whole_and_told(apps):
    _, ours = apps
    plain = ours.state.trivet_plain_chats
    theirs, (kept, expected) = plain._render_messages, (dict(plain._templates), plain._expected)
    source = "{% for m in messages %}{{ m.content }}{{ messages[-1].content }}{% endfor %}"
    asked: list[int] = []

    def render_messages(*given_):
        asked.append(1)
        return theirs(*given_)

    plain._render_messages = render_messages
    try:
        plain.expect(source)
        assert plain.told() == "run for new messages only"
        from vllm.renderers.params import ChatParams

        from trivet.render.plain_chats import looked_at

        for _ in range(3):
            params = ChatParams(chat_template=source, chat_template_kwargs={"tokenize": False})
            assert plain.render(looked_at(HI * 3), params, written=False) is None
        assert plain.told() == "run whole: it looks at other messages than its own and the first"
        assert len(asked) == 1, "vLLM's own way is looked at once"
    finally:
        plain._render_messages, plain._templates, plain._expected = theirs, kept, expected


FIRST = "{% for m in messages %}{{ messages[0].content }}{{ m.content }}{{ x }}{{ loop.index }}{% endfor %}|{{ x }}"
REST = (
    "{{ messages[0].content }}{% for m in messages[1:] %}<|im_start|>{{ m.content }}{{ loop.first }}{% endfor %}{{ x }}"
)
LAST = "{% for m in messages %}<|im_end|>{{ m.role }}{{ loop.last }}{{ m.content | trim }}{% endfor %}"
GIVEN = st.sampled_from([{}, {"x": 1}, {"x": True}, {"x": "1"}, {"x": None}, {"x": 0}, {"x": False}, {"x": ""}])


@pytest.mark.asyncio(loop_scope="module")
async def test_any_template_is_rendered_in_pieces_as_vllm_does(apps):
    from vllm.renderers.params import ChatParams

    from trivet.render.plain_chats import Prompt, looked_at

    _, ours = apps
    plain, renderer = ours.state.trivet_plain_chats, ours.state.online_renderer.renderer
    made = {"pieces": 0, "ids": 0}

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        messages=CHATS,
        source=st.sampled_from([FIRST, REST, *[LAST] * 12, *templates().values()]),
        given_=GIVEN,
        written=st.booleans(),
    )
    def same(messages, source, given_, written):
        params = ChatParams(chat_template=source, chat_template_kwargs={"tokenize": False, **given_})
        for length in range(1, len(messages) + 1):
            text = plain.render(looked_at(messages[:length]), params, written=written)
            if text is None:
                continue
            made["pieces"] += 1
            _, prompt = plain._render_messages(messages[:length], params)
            assert str(text) == prompt["prompt"]
            if type(text) is Prompt:
                made["ids"] += 1
                assert list(text.ids) == renderer.tokenizer.encode(prompt["prompt"], add_special_tokens=False)
                assert len(text.ids) == len(list(text.ids))

    await asyncio.to_thread(same)
    assert made["pieces"] > 100
    assert made["ids"] > 10


@pytest.mark.asyncio(loop_scope="module")
async def test_variables_that_are_equal_and_written_otherwise_are_told_apart(apps):
    from vllm.renderers.params import ChatParams

    from trivet.render.plain_chats import looked_at

    plain = apps[1].state.trivet_plain_chats
    found = []
    for value in (1, True, 0, False, "1"):
        params = ChatParams(chat_template=FIRST, chat_template_kwargs={"tokenize": False, "x": value})
        found.append(plain.render(looked_at(HI), params, written=True))
    assert found == [f"HiHi{value}1|{value}" for value in ("1", "True", "0", "False", "1")]


@pytest.mark.asyncio(loop_scope="module")
async def test_ids_that_are_written_are_numbers_to_who_looks(apps):
    from trivet.render.plain_chats import WrittenIds

    ids = WrittenIds([b"1,2", b"3"], 3)
    assert (list(ids), len(ids), ids[-1], ids[1:], 2 in ids) == ([1, 2, 3], 3, 3, [2, 3], True)
    assert ids.json() == b"[1,2,3]"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_kept_of_messages_is_bounded(apps, monkeypatch):
    _, ours = apps
    plain = ours.state.trivet_plain_chats
    monkeypatch.setattr(plain, "_capacity", 20_000)
    for number in range(40):
        await assert_same(apps, CHAT, {"messages": [{"role": "user", "content": f"é{number} " * 20}, *HI]})
        assert plain._bytes == sum(one.size for one in plain._kept.values()) <= 20_000
    assert plain._kept


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("asked", [{"max_tokens": 20}, {"max_completion_tokens": 20}, {}, {"temperature": 0.5, "n": 2}])
async def test_chats_that_are_asked_for_alike_are_answered_as_vllm_does(apps, asked):
    """Answers' limits follow from how long the prompts are: from far below to beyond what there is room for."""
    rooms = set()
    for words in [1, 3, 1, *range(190, 240), 300, 1]:
        body = {"messages": [{"role": "user", "content": "x " * words}], **asked}
        answer = (await assert_same(apps, CHAT, body)).json()
        rooms.add(answer.get("sampling_params", {"max_tokens": None}).get("max_tokens", "default"))
    assert rooms >= {1, 15, "default", 17, None}, "vLLM leaves the default, 16, out; and says that there is no room"


@pytest.mark.asyncio(loop_scope="module")
async def test_of_chats_that_are_asked_for_alike_the_first_goes_vllms_way(apps, monkeypatch):
    from vllm.entrypoints.scale_out.render.serving import ServingRender

    _, ours = apps
    short = next(route for route in ours.router.routes if type(route).__name__ == "_Short" and route.path == CHAT)
    theirs, seen = short._handle, []

    async def handle(*given_):
        seen.append(1)
        return await theirs(*given_)

    monkeypatch.setattr(short, "_handle", handle)
    assert isinstance(theirs.__self__, ServingRender)

    async def handled(body, **headers):
        seen.clear()
        return (await assert_same(apps, CHAT, body, **headers)) and len(seen)

    body = {"messages": HI, "seed": 4711, "max_tokens": 7}
    assert await handled(body) == 1
    assert await handled(body) == 0
    assert await handled({**body, "messages": [*HI, *HI]}) == 0
    assert await handled({**body, "seed": 4712}) == 1
    assert await handled({**body, "seed": 4711.0}) == 1
    assert await handled(body, **{"x-request-id": "mine"}) == 1
    for other in (
        {"request_id": "mine"},
        {"stop": ["x"]},
        {"cache_salt": "salt"},
        {"min_tokens": 2},
        {"tool_choice": None},
        {"truncate_prompt_tokens": 200},
        {"model": "nobody"},
        {"echo": True},
        {"return_token_offsets": True},
    ):
        for _ in range(2):
            count = await handled({**body, **other})
        assert count == (0 if "echo" in other else 1), other
    answers = [(await ask(ours, CHAT, body)).json()["request_id"] for _ in range(3)]
    assert len(set(answers)) == 3
    assert all(one.startswith("chatcmpl-") for one in answers)


def test_vllms_code_is_that_which_was_read(frontend):
    """If it is not: read what ``repeated.fingerprint`` names anew, and only then add its fingerprint."""
    import vllm

    from trivet.render import repeated

    if not vllm.__version__.startswith("0.32"):
        pytest.skip("chats of this vLLM are each answered anew")
    assert repeated.fingerprint() in repeated._READ


@pytest.mark.asyncio(loop_scope="module")
async def test_where_the_code_or_what_is_configured_is_not_known_nothing_is_repeated(apps, monkeypatch):
    from trivet.render import repeated

    _, ours = apps
    handlers = ours.state.serving_render
    assert handlers.online_renderer.parser is not None, "a tool parser is configured here"
    assert repeated.Repeated.of(handlers, 1000) is not None
    for name, value in [("reasoning_parser_cls", object), ("always_adjust_request", True)]:
        with monkeypatch.context() as changed:
            changed.setattr(handlers.online_renderer.parser, name, value)
            assert repeated.Repeated.of(handlers, 1000) is None
    monkeypatch.setattr(handlers, "request_logger", object())
    assert repeated.Repeated.of(handlers, 1000) is None
    monkeypatch.setattr(handlers, "request_logger", None)
    monkeypatch.setattr(repeated, "_READ", frozenset())
    assert repeated.Repeated.of(handlers, 1000) is None


# -- what lies around --------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", GOOD)
async def test_answers_come_before_routes_are_looked_for(apps, monkeypatch, name):
    _, ours = apps

    async def looked(*_):
        raise AssertionError

    monkeypatch.setattr(ours.router, "app", looked)
    monkeypatch.setattr(ours.router, "middleware_stack", looked)
    for _ in range(3):
        assert (await ask(ours, *GOOD[name])).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_written_here_is_answered_by_vllms_route(apps, monkeypatch):
    from trivet.render import quick

    def answer_of(_):
        raise TypeError

    monkeypatch.setattr(quick, "_answer_of", answer_of)
    await assert_same(apps, CHAT, {"messages": HI, "seed": 815})


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
    assert told["template"] == "run for new messages only"
    assert told["cache"]["segments"] > 0
