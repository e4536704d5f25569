"""Rendering in one piece: one turn of a thread, or none, in the place of several.

vLLM's ``render_chat_async`` (``vllm/renderers/base.py``) goes through two executors and a task for each prompt; its
``render_chat`` does the same steps one after the other. For text only the second is called here, on the event loop if
there is little to do and in the renderer's own threads if there is more. What has to fetch something (images by URL)
or brings its own template goes vLLM's way.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer, parse_chat_messages

from trivet.render.remembered import remember_messages

_KNOWN = 16
"""Lists of ids that wait for the event loop to come to them; there is one thread, unless told otherwise."""


def render_at_once(renderer: BaseRenderer[Any], inline_characters: int) -> None:
    """Puts the shorter way on a renderer, in place, if it is one whose two ways are known to do the same.

    Args:
        inline_characters: texts up to so long are rendered on the event loop; -1 where a request's template, which may
            never end, can be among them.
    """
    if type(renderer) is not HfRenderer or renderer.model_config.enable_prompt_embeds:
        return
    theirs_chat, theirs_cmpl = renderer.render_chat_async, renderer.render_cmpl_async
    remember_messages(parse_chat_messages)
    has_timeout = hasattr(renderer, "_render_with_timeout")  # not in vLLM 0.30

    validated = _spare_validation(renderer)

    def render_and_validate(render: Callable[[], Any]) -> Any:
        rendered = render()
        validated(rendered[1] if isinstance(rendered, tuple) else rendered)
        return rendered

    async def at_once(render: Callable[[], Any], characters: int, *, timed: bool) -> Any:
        if characters <= inline_characters:
            return render()
        run = asyncio.get_running_loop().run_in_executor
        rendered = _awaited(run(renderer._executor, render_and_validate, render))
        return await (renderer._render_with_timeout(rendered) if timed and has_timeout else rendered)

    async def render_chat_async(
        conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        characters = 0
        for conversation in conversations:
            if (one := _characters(conversation)) is None:
                return await theirs_chat(conversations, chat_params, tok_params, **more)
            characters += one
        render = functools.partial(renderer.render_chat, conversations, chat_params, tok_params, **more)
        return await at_once(render, characters, timed=True)

    async def render_cmpl_async(prompts: Sequence[Any], tok_params: Any = None, **more: Any) -> Any:
        characters = 0
        for prompt in prompts:
            if not isinstance(prompt, Mapping) or not prompt.keys() <= {"prompt"} or type(prompt["prompt"]) is not str:
                return await theirs_cmpl(prompts, tok_params, **more)
            characters += len(prompt["prompt"])
        render = functools.partial(renderer.render_cmpl, prompts, tok_params, **more)
        return await at_once(render, characters, timed=False)  # no template is at work

    renderer.render_chat_async = render_chat_async
    renderer.render_cmpl_async = render_cmpl_async


def _spare_validation(renderer: BaseRenderer[Any]) -> Callable[[Sequence[Any]], None]:
    """Has ids that were looked at in a thread not looked at again on the event loop: 4 ms for 100,000 of them.

    Returns:
        What is to be called with a renderer's prompts, in the thread.
    """
    theirs = getattr(renderer, "validate_token_ids", None)
    if theirs is None:  # vLLM 0.30 looks at ids elsewhere
        return lambda _: None
    known: dict[int, Sequence[int]] = {}

    def validate_token_ids(token_ids: Sequence[int], **more: Any) -> None:
        if known.pop(id(token_ids), None) is not token_ids:
            theirs(token_ids, **more)

    def validate(prompts: Sequence[Any]) -> None:
        for prompt in prompts:
            if isinstance(prompt, Mapping) and (ids := prompt.get("prompt_token_ids")):
                theirs(ids)
                known[id(ids)] = ids  # one step each, as two threads are at it
                while len(known) > _KNOWN:
                    known.pop(next(iter(list(known))), None)

    renderer.validate_token_ids = validate_token_ids
    return validate


async def _awaited(future: asyncio.Future[Any]) -> Any:
    return await future


def _characters(conversation: Sequence[Any]) -> int | None:
    """How much text there is; None if there is something else."""
    characters = 0
    for message in conversation:
        content = message.get("content") if isinstance(message, Mapping) else None
        if type(content) is str:
            characters += len(content)
        elif content is not None:
            for part in content:
                text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
                if type(text) is not str:
                    return None
                characters += len(text)
    return characters
