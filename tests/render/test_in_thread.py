"""What waits for a renderer's thread, and what a template's time is."""

from __future__ import annotations

import asyncio
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

LIMIT_S = 0.02


@pytest.fixture(scope="module")
def in_thread(frontend):
    import trivet.render.in_thread

    return trivet.render.in_thread


class Pools:
    """As vLLM 0.32's executor: the threads can be replaced."""

    def __init__(self) -> None:
        self._inner, self.replaced = ThreadPoolExecutor(1), 0

    def submit(self, *call):
        return self._inner.submit(*call)

    def replace_inner(self) -> None:
        self._inner.shutdown(wait=False)
        self._inner, self.replaced = ThreadPoolExecutor(1), self.replaced + 1


@pytest.fixture
def renderer(in_thread, monkeypatch):
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.hf import HfRenderer

    monkeypatch.setenv("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", str(LIMIT_S))
    one = types.SimpleNamespace(
        _executor=Pools(),
        model_config=types.SimpleNamespace(renderer_num_workers=1, get_vocab_size=lambda: 90),
        tokenizer=types.SimpleNamespace(max_token_id=99),
        tokenize_prompts=lambda texts: [{"prompt_token_ids": [len(text)]} for text in texts],
    )
    for name in ("_render_with_timeout", "_replace_executor"):
        if (method := getattr(HfRenderer, name, None)) is not None:
            setattr(one, name, types.MethodType(method, one))
    if (method := getattr(BaseRenderer, "validate_token_ids", None)) is not None:
        one.validate_token_ids = types.MethodType(method, one)
    if not hasattr(one, "_render_with_timeout"):
        pytest.skip("vLLM 0.30 has no limit")
    yield one
    one._executor._inner.shutdown(wait=False)


@pytest.fixture
def clock(in_thread, monkeypatch):
    """The clock by which templates are timed; it stands still unless it is set."""
    clock = types.SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(in_thread, "time", types.SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(in_thread, "_LOOK_S", LIMIT_S)
    return clock


def chat(renderer, text="Hi", template=lambda: None, behind=lambda: None):
    """A chat's rendering: its template, then its tokenizing."""

    def render():
        template()
        made = renderer.tokenize_prompts([text])
        behind()
        return [{"role": "user", "content": text}], made

    return render


async def passed():
    """So many limits by the real clock that whoever waits for one has looked again."""
    await asyncio.sleep(3 * LIMIT_S)


async def test_what_is_rendered_is_given(in_thread, renderer):
    threads = in_thread.InThread(renderer)
    assert (await threads.render(chat(renderer), timed=True))[1] == [{"prompt_token_ids": [2]}]


async def test_waiting_for_the_thread_is_not_the_template_s_time(in_thread, renderer, clock):
    threads, free = in_thread.InThread(renderer), threading.Event()
    busy = renderer._executor.submit(free.wait)
    asked = asyncio.create_task(threads.render(chat(renderer), timed=True))
    await passed()
    clock.now_s += 100 * LIMIT_S
    await passed()
    assert not asked.done()
    free.set()
    assert (await asked)[1] == [{"prompt_token_ids": [2]}]
    assert busy.result()
    assert not renderer._executor.replaced


async def test_tokenizing_is_not_the_template_s_time(in_thread, renderer, clock):
    threads, begun, go = in_thread.InThread(renderer), threading.Event(), threading.Event()

    def behind():
        begun.set()
        go.wait()

    asked = asyncio.create_task(threads.render(chat(renderer, behind=behind), timed=True))
    await asyncio.to_thread(begun.wait)
    clock.now_s += 100 * LIMIT_S
    await passed()
    assert not asked.done()
    go.set()
    assert (await asked)[1] == [{"prompt_token_ids": [2]}]


async def test_a_template_that_does_not_end_is_given_up_and_others_get_a_thread(in_thread, renderer, clock):
    threads, begun, never = in_thread.InThread(renderer), threading.Event(), threading.Event()
    runs: list[str] = []

    def template():
        runs.append("stuck")
        begun.set()
        never.wait()

    stuck = asyncio.create_task(threads.render(chat(renderer, template=template), timed=True))
    await asyncio.to_thread(begun.wait)
    waiting = asyncio.create_task(
        threads.render(chat(renderer, "Hello", template=lambda: runs.append("other")), timed=True)
    )
    await asyncio.sleep(0)
    clock.now_s += 2 * LIMIT_S
    with pytest.raises(TimeoutError, match="Chat template rendering timed out"):
        await stuck
    try:
        assert (await waiting)[1] == [{"prompt_token_ids": [5]}]
        assert renderer._executor.replaced == 1
        assert runs == ["stuck", "other"], "each once"
    finally:
        never.set()


async def test_what_has_no_template_is_not_timed(in_thread, renderer, clock):
    threads, begun, go = in_thread.InThread(renderer), threading.Event(), threading.Event()

    def template():
        begun.set()
        go.wait()

    asked = asyncio.create_task(threads.render(chat(renderer, template=template), timed=False))
    await asyncio.to_thread(begun.wait)
    clock.now_s += 100 * LIMIT_S
    await passed()
    assert not asked.done()
    go.set()
    await asked


@pytest.mark.parametrize("timed", [True, False])
async def test_what_nobody_waits_for_any_more_is_not_rendered(in_thread, renderer, timed):
    threads, free, runs = in_thread.InThread(renderer), threading.Event(), []
    busy = renderer._executor.submit(free.wait)
    asked = asyncio.create_task(threads.render(chat(renderer, template=lambda: runs.append(1)), timed=timed))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    free.set()
    busy.result()
    await threads.render(chat(renderer), timed=timed)
    assert not runs


@pytest.mark.parametrize("timed", [True, False])
async def test_what_goes_wrong_is_told(in_thread, renderer, timed):
    def template():
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await in_thread.InThread(renderer).render(chat(renderer, template=template), timed=timed)


# -- ids that are looked at in the thread ------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 99) | st.sampled_from((-1, 100, 101, 2**32, 2**70, -(2**70))), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(IDS)
def test_ids_are_refused_as_vllm_refuses_them(in_thread, ids):
    from vllm.renderers.base import BaseRenderer

    if not hasattr(BaseRenderer, "validate_token_ids"):
        pytest.skip("vLLM 0.30 looks at ids elsewhere")

    def renderer():
        one = types.SimpleNamespace(
            model_config=types.SimpleNamespace(get_vocab_size=lambda: 90),
            tokenizer=types.SimpleNamespace(max_token_id=99),
        )
        one.validate_token_ids = types.MethodType(BaseRenderer.validate_token_ids, one)
        return one

    def refusal(validate):
        try:
            validate()
        except Exception as error:
            return str(error)
        return None

    proper = refusal(lambda: renderer().validate_token_ids(ids))
    assert refusal(lambda: in_thread._spare_validation(renderer())([{"prompt_token_ids": ids}])) == proper


async def test_ids_that_were_looked_at_are_not_looked_at_again_and_others_are(in_thread, renderer):
    looked: list[list[int]] = []
    renderer.validate_token_ids = lambda ids, **_: looked.append(list(ids))
    _, (made,) = await in_thread.InThread(renderer).render(chat(renderer), timed=True)
    looked.clear()
    renderer.validate_token_ids(made["prompt_token_ids"])
    assert not looked
    renderer.validate_token_ids(list(made["prompt_token_ids"]))
    renderer.validate_token_ids(made["prompt_token_ids"])
    assert len(looked) == 2
