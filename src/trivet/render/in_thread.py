"""Rendering in a renderer's own threads: how long a chat's template may take there, and ids that are validated there.

vLLM's limit (``VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT``) is for a template that may never end. Here it counts from when a
thread comes to the chat until its template has run: waiting for the thread and tokenizing are not the template's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import vllm.envs as envs
from vllm.renderers.base import BaseRenderer

_KNOWN = 16
"""Lists of ids that wait for the event loop to come to them; there is one thread, unless told otherwise."""
_LOOK_S = 1.0
"""How often one that waits for a thread looks whether the threads have been replaced."""


class _Run:
    """One rendering."""

    def __init__(self, render: Callable[[], Any]) -> None:
        self.render = render
        self.began_s: float | None = None
        """When a thread came to it, on the monotonic clock."""
        self.has_run = False
        """Whether its templates have."""

    def left_s(self, limit_s: float) -> float | None:
        """How long its templates may still run; None if they have."""
        if self.has_run:
            return None
        return limit_s if self.began_s is None else self.began_s + limit_s - time.monotonic()


class InThread:
    """Renders in the threads of one renderer, for one event loop."""

    def __init__(self, renderer: BaseRenderer[Any]) -> None:
        """Puts itself under the renderer, in place."""
        self._renderer = renderer
        self._validate = _spare_validation(renderer)
        self._here = threading.local()
        self._has_limit = hasattr(renderer, "_render_with_timeout")  # not in vLLM 0.30
        if not self._has_limit:
            return
        theirs = renderer.tokenize_prompts

        def tokenize_prompts(*args: Any, **more: Any) -> Any:
            if (run := getattr(self._here, "run", None)) is not None:
                run.has_run = True
            return theirs(*args, **more)

        renderer.tokenize_prompts = tokenize_prompts  # which ``render_chat`` calls behind its templates

    async def render(self, render: Callable[[], Any], *, timed: bool) -> Any:
        """What ``render`` returns. A client that leaves before a thread has come to it takes it along.

        Args:
            timed: templates are at work.

        Raises:
            TimeoutError: they took too long; in vLLM's words, and with threads of their own for those that wait.
        """
        run = _Run(render)
        limit_s = envs.VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT if timed and self._has_limit else 0.0
        while True:
            threads = self._threads()
            work = self._renderer._executor.submit(self._work, run)
            future = asyncio.wrap_future(work)
            if limit_s <= 0:
                return await future
            try:
                while not future.done():
                    if (left_s := run.left_s(limit_s)) is not None and left_s <= 0:
                        future.add_done_callback(_forget)
                        await self._renderer._render_with_timeout(_late())
                    wait_s = left_s if run.began_s is not None else min(limit_s, _LOOK_S)
                    await asyncio.wait((future,), timeout=wait_s)
                    if run.began_s is None and self._threads() is not threads and work.cancel():
                        break  # those in which it waited are stuck, so that it never began
                else:
                    return future.result()
            except asyncio.CancelledError:
                future.cancel()
                raise

    def _threads(self) -> Any:
        executor = self._renderer._executor
        return getattr(executor, "_inner", executor)

    def _work(self, run: _Run) -> Any:
        run.began_s, self._here.run = time.monotonic(), run
        try:
            rendered = run.render()
            self._validate(rendered[1] if isinstance(rendered, tuple) else rendered)
        finally:
            self._here.run = None
        return rendered


async def _late() -> None:
    raise TimeoutError


def _forget(future: asyncio.Future[Any]) -> None:
    """What comes of a template that took too long is nobody's, and no fault that nobody has looked at."""
    if not future.cancelled():
        future.exception()


def _spare_validation(renderer: BaseRenderer[Any]) -> Callable[[Sequence[Any]], None]:
    """Has ids that were looked at in a thread not looked at again on the event loop: 3 ms for 100,000 of them.

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
                theirs(_largest(ids))
                known[id(ids)] = ids  # one step each, as two threads are at it
                while len(known) > _KNOWN:
                    known.pop(next(iter(list(known))), None)

    renderer.validate_token_ids = validate_token_ids
    return validate


def _largest(ids: Sequence[int]) -> Sequence[int]:
    """Of ids that are none below 0 the largest, as it is the one that could be out of a vocabulary; or all of them.

    ``max`` and ``min`` keep Python's lock for 3 ms for 100,000; this takes it for 0.7.
    """
    try:
        return [int(np.frombuffer(array("I", ids), np.uintc).max())]
    except (OverflowError, TypeError):
        return ids
