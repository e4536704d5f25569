"""Rendering in one piece: one turn of a thread, or none, in the place of several.

vLLM's ``render_chat_async`` (``vllm/renderers/base.py``) goes through two executors and a task for each prompt; its
``render_chat`` does the same steps one after the other. For text only the second is called here, on the event loop if
there is little to do and in the renderer's own threads if there is more. What has to fetch something (images by URL)
or brings its own template goes vLLM's way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer, parse_chat_messages, parse_dec_only_prompt

from trivet.render.apart import apart, is_apart
from trivet.render.in_thread import InThread
from trivet.render.plain_chats import PlainChats, PlainMessages, Prompt, looked_at
from trivet.render.remembered import remember_messages
from trivet.render.weights import heavier, is_text

_PROMPT = 64
"""What a prompt weighs beside its characters."""
_MESSAGE = 128
"""What one that is a role and a text weighs beside its text, at most."""
WRITTEN: ContextVar[bool] = ContextVar("WRITTEN", default=False)
"""Whether ids are wanted as JSON writes them: an answer is made of them, and nothing else."""

ASKED: ContextVar[list[tuple[Any, Any, Mapping[str, Any]]] | None] = ContextVar("ASKED", default=None)
"""Where it is written down with what parameters chats are rendered."""


def render_at_once(renderer: BaseRenderer[Any], inline_characters: int) -> None:
    """Puts the shorter way on a renderer, in place, if it is one whose two ways are known to do the same.

    Args:
        inline_characters: what is no heavier (``weights``) is rendered on the event loop; -1 where a request's
            template, which may never end, can be among them.
    """
    if type(renderer) is not HfRenderer or renderer.model_config.enable_prompt_embeds:
        return
    theirs_chat, theirs_cmpl = renderer.render_chat_async, renderer.render_cmpl_async
    remember_messages(parse_chat_messages)
    threads = InThread(renderer)

    async def render_chat_async(
        conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        limit, others = inline_characters, []
        for one in conversations:
            if type(one) is PlainMessages:  # looked at already
                limit -= one.characters + _MESSAGE * len(one)
            elif is_text(one):
                others.append(one)
            else:
                return await theirs_chat(conversations, chat_params, tok_params, **more)
        if (asked := ASKED.get()) is not None:
            asked.append((chat_params, tok_params, more))
        render = _rendering(renderer.render_chat, conversations, chat_params, tok_params, **more)
        if not heavier(limit, others, chat_params.chat_template_kwargs):
            return render()
        return await threads.render(render, timed=True)

    async def render_cmpl_async(prompts: Sequence[Any], tok_params: Any = None, **more: Any) -> Any:
        characters = 0
        for prompt in prompts:
            if not isinstance(prompt, Mapping) or not prompt.keys() <= {"prompt"} or type(prompt["prompt"]) is not str:
                return await theirs_cmpl(prompts, tok_params, **more)
            characters += len(prompt["prompt"])
        render = _rendering(renderer.render_cmpl, prompts, tok_params, **more)
        if characters + _PROMPT * len(prompts) <= inline_characters:
            return render()
        return await threads.render(render, timed=False)

    renderer.render_chat_async = render_chat_async
    renderer.render_cmpl_async = render_cmpl_async


def _rendering(theirs: Callable[..., Any], *given: Any, **more: Any) -> Callable[[], Any]:
    """A call that renders; apart from all others if the request is salted."""
    if not (more.get("prompt_extras") or {}).get("cache_salt"):
        return functools.partial(theirs, *given, **more)

    def render() -> Any:
        with apart():
            return theirs(*given, **more)

    return render


def takes_pieces(renderer: BaseRenderer[Any]) -> bool:
    """Whether a renderer's plain chats can be put together from pieces."""
    if type(renderer) is not HfRenderer:
        return False
    config = renderer.model_config
    return not config.enable_prompt_embeds and config.multimodal_config is None and not config.is_encoder_decoder


def render_in_pieces(renderer: BaseRenderer[Any], plain: PlainChats) -> None:
    """Has the plain chats of a renderer that takes pieces put together from them, in place."""
    theirs_messages: Any = renderer.render_messages
    theirs_tokenize: Any = getattr(renderer, "_tokenize_prompt", None)
    takes = () if theirs_tokenize is None else tuple(inspect.signature(theirs_tokenize).parameters)
    may_write = takes == ("prompt", "params")  # otherwise it is another vLLM's

    def render_messages(messages: Any, params: Any) -> Any:
        if is_apart() or (looked := looked_at(messages)) is None:
            return theirs_messages(messages, params)
        written = may_write and WRITTEN.get()
        if (text := plain.render(looked, params, written=written)) is None:
            return theirs_messages(messages, params)
        # where ids are all that is wanted, nobody asks for the messages as the template had them
        conversation = messages if written else plain.parsed(looked, params)
        return (
            theirs_messages(messages, params) if conversation is None else (conversation, parse_dec_only_prompt(text))
        )

    def tokenize_prompt(prompt: Any, params: Any) -> Any:
        text = prompt["prompt"]
        if type(text) is Prompt and prompt.keys() == {"prompt"} and not params.return_token_offsets:
            asked = params.get_encode_kwargs()
            most = asked.pop("max_length", None) if asked.pop("truncation", False) else None
            if not asked.pop("add_special_tokens", True) and not asked and (most is None or len(text.ids) <= most):
                return {"prompt_token_ids": text.ids, **prompt}
        return theirs_tokenize({**prompt, "prompt": str(text)}, params)

    renderer.render_messages = render_messages
    if may_write:
        renderer._tokenize_prompt = tokenize_prompt
