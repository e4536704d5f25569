"""All that makes vLLM's renderer quicker, put on an application of vLLM's."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from fastapi import FastAPI

from trivet.render.derender_routes import serve_derender
from trivet.render.plain_chats import PlainChats
from trivet.render.quick import shorten
from trivet.render.renderer import render_at_once, render_in_pieces, takes_pieces
from trivet.render.tokenizing import PromptTokenizer, TokenizingSettings, hasten

_OF_CACHE = 2
"""The part of it that is for messages' texts and written ids."""
logger = logging.getLogger(__name__)


def quicken(
    app: FastAPI, renderer: Any, settings: TokenizingSettings, *, inline_characters: int
) -> PromptTokenizer | None:
    """Puts fast tokenizing, rendering in one piece and short routes on an application, in place. Takes seconds.

    Args:
        app: vLLM's, with its state set up.
        renderer: that which it uses.
        inline_characters: texts up to so long are rendered on the event loop.

    Returns:
        What tokenizes prompts now; None where the tokenizer is left as it is, which is logged.
    """
    of_pieces = settings.cache_bytes // _OF_CACHE if takes_pieces(renderer) else 0
    try:
        own = dataclasses.replace(settings, cache_bytes=settings.cache_bytes - of_pieces)
        prompts = hasten(renderer.tokenizer, own)
    except Exception as error:  # what only makes it quicker stops no service
        prompts = f"{type(error).__name__}: {error}"
        logger.warning("no fast tokenizer and no cache of segments: %s", prompts)
    if isinstance(prompts, str):
        logger.info("prompts are tokenized as vLLM does it: %s", prompts)
    else:
        logger.info("%s", "; ".join(f"{what}: {line}" for what, line in prompts.told().items()))
    trusts = getattr(app.state.args, "trust_request_chat_template", False)
    inline = -1 if trusts else inline_characters
    render_at_once(renderer, inline)
    plain = None
    if of_pieces and not isinstance(prompts, str):
        plain = PlainChats(renderer, prompts, of_pieces)
        plain.expect(getattr(getattr(app.state, "online_renderer", None), "chat_template", None))
        render_in_pieces(renderer, plain)
        logger.info("chat template: %s", plain.told())
    app.state.trivet_plain_chats = plain
    shorten(app, inline)
    serve_derender(app)
    return None if isinstance(prompts, str) else prompts


def told_of(prompts: PromptTokenizer | None, plain: PlainChats | None = None) -> dict[str, str]:
    """How prompts are made, for people: what, and how that is."""
    told = {"tokenizer": "vLLM's own", "segments": "not kept"} if prompts is None else prompts.told()
    return {**told, "template": "run whole" if plain is None else plain.told()}
