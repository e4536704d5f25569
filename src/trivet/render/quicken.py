"""All that makes vLLM's renderer quicker, put on an application of vLLM's."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI

from trivet.render.derender_routes import serve_derender
from trivet.render.quick import shorten
from trivet.render.renderer import render_at_once
from trivet.render.tokenizing import PromptTokenizer, TokenizingSettings, hasten

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
    try:
        prompts = hasten(renderer.tokenizer, settings)
    except Exception as error:  # what only makes it quicker stops no service
        prompts = f"{type(error).__name__}: {error}"
        logger.warning("no fast tokenizer and no cache of segments: %s", prompts)
    if isinstance(prompts, str):
        logger.info("prompts are tokenized as vLLM does it: %s", prompts)
    else:
        logger.info("%s", "; ".join(f"{what}: {line}" for what, line in told_of(prompts).items()))
    trusts = getattr(app.state.args, "trust_request_chat_template", False)
    inline = -1 if trusts else inline_characters
    render_at_once(renderer, inline)
    shorten(app, inline)
    serve_derender(app)
    return None if isinstance(prompts, str) else prompts


def told_of(prompts: PromptTokenizer | None) -> dict[str, str]:
    """How prompts are tokenized, for people: what, and how that is."""
    return {"tokenizer": "vLLM's own", "segments": "not kept"} if prompts is None else prompts.told()
