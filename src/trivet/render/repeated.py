"""Answers to chats that are asked for as others were, and differ from them in their messages only.

Of what vLLM's handler (``ServingRender.render_chat_request``) answers to such chats, three things differ: the ids, the
request's id, and the answer's limit (``get_max_tokens`` of how many ids there are), which goes into the sampling
parameters as it is. That was read in the code that ``_READ`` names, and holds where no reasoning parser is configured,
nor one that changes each request; otherwise each goes vLLM's way. So does the first of them here, and all that it is
answered but those three is kept as JSON. The next ones are rendered by the same renderer with the same parameters.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.scale_out.render import serving
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.utils import api_utils
from vllm.renderers import params
from vllm.renderers.online_renderer import OnlineRenderer, _reused_prompt_token_ids
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid

from trivet.render.plain_chats import PlainMessages, WrittenIds
from trivet.render.weights import heavier

_READ = frozenset(("c510ad4739893321",))
"""Fingerprints of vLLM's code as of 0.32."""
_KEPT = 64
_UNWRITTEN = SamplingParams().max_tokens
"""The default, which is left out."""
_MESSAGE = 128
"""What one that is a role and a text weighs beside its text, at most."""


def fingerprint() -> str:
    """Of all the code between a validated request and its answer that looks at more than the messages."""
    code: Sequence[Any] = (
        serving.ServingRender.render_chat_request,
        serving.ServingRender._extract_mm_features,
        serving.ServingRender._reasoning_parser_kwargs,
        serving.extract_mm_features,
        serving.extract_prompt_components,
        serving.extract_prompt_len,
        BaseServing._check_model,
        BaseServing._is_model_supported,
        BaseServing._base_request_id,
        OnlineRenderer.render_chat,
        OnlineRenderer.preprocess_chat,
        OnlineRenderer.validate_chat_template,
        _reused_prompt_token_ids,
        ChatCompletionRequest.build_chat_params,
        ChatCompletionRequest.build_tok_params,
        ChatCompletionRequest.resolve_reasoning_ended,
        ChatCompletionRequest.to_sampling_params,
        SamplingParams.from_optional,
        SamplingParams.__post_init__,
        SamplingParams._verify_args,
        api_utils.get_max_tokens,
        params.ChatParams,
        params.TokenizeParams,
    )
    digest = hashlib.sha256()
    for one in code:
        digest.update(hashlib.sha256(inspect.getsource(inspect.unwrap(one)).encode()).digest())
    return digest.hexdigest()[:16]


class RenderingError(Exception):
    """What vLLM's renderer has raised."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


@dataclass(frozen=True, slots=True)
class Rendering:
    """What vLLM's handler has its renderer called with."""

    chat_params: Any
    tok_params: Any
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Answer:
    rendering: Rendering
    limit: int | None
    """The answer's, as the client says it."""
    prefix: str
    """Before the request's id."""
    before: bytes
    """Between the ids and the limit."""
    behind: bytes


class Repeated:
    """Of one handler's chats. For one thread."""

    def __init__(self, handlers: serving.ServingRender, get_max_tokens: Callable[..., int], inline: int) -> None:
        """
        Args:
            get_max_tokens: vLLM's.
            inline: what is heavier (``weights``) is not rendered on the event loop.
        """
        self._handlers, self._inline, self._get_max_tokens = handlers, inline, get_max_tokens
        self._renderer: Any = handlers.online_renderer.renderer
        self._kept: OrderedDict[Any, _Answer] = OrderedDict()

    @staticmethod
    def of(handlers: Any, inline: int) -> Repeated | None:
        """Of handlers whose code is known, and which look at nothing else; None otherwise."""
        try:
            if type(handlers) is not serving.ServingRender or fingerprint() not in _READ:
                return None
            online = handlers.online_renderer
            parser = online.parser
            if parser is not None and (parser.reasoning_parser_cls is not None or parser.always_adjust_request):
                return None  # it looks at the ids, or changes the request
            if online.use_harmony or handlers.request_logger is not None:
                return None
            return Repeated(handlers, api_utils.get_max_tokens, inline)
        except (AttributeError, TypeError, OSError):  # another vLLM, or one without its sources
            return None

    def answer(self, key: Any, messages: PlainMessages) -> bytes | None:
        """What a chat is answered; None where vLLM's way is to be gone.

        Args:
            key: what is asked for beside the messages, see ``Validated``; without a ``request_id``.

        Raises:
            RenderingError: the renderer raised something, as it would on vLLM's way.
            Exception: whatever else vLLM raises, which it would raise on its way as well.
        """
        known = self._kept.get(key)
        if known is None or heavier(
            self._inline - messages.characters - _MESSAGE * len(messages),
            known.rendering.chat_params.chat_template_kwargs,
        ):
            return None
        self._kept.move_to_end(key)
        rendering = known.rendering
        try:
            _, (prompt,) = self._renderer.render_chat(
                [messages], rendering.chat_params, rendering.tok_params, **rendering.more
            )
        except Exception as error:
            raise RenderingError(error) from error
        ids = prompt["prompt_token_ids"]
        if type(ids) is not WrittenIds or not ids:
            return None
        max_tokens = self._max_tokens(known.limit, len(ids))
        if max_tokens < 1 or max_tokens == _UNWRITTEN:
            return None
        name = orjson.dumps(known.prefix + random_uuid())
        parts = name, ids.json(), known.before, max_tokens, known.behind
        return b'{"request_id":%b,"token_ids":%b,%b%d%b' % parts

    def learn(self, key: Any, asked: Any, rendering: Rendering, fields: Mapping[str, Any], ids: WrittenIds) -> None:
        """Keeps what a chat was answered.

        Args:
            asked: the validated request.
            fields: of the answer, in order.
        """
        limit = asked.max_completion_tokens
        if limit is None:
            limit = asked.__dict__["max_tokens"]  # of which pydantic warns at each look
        others, name, mark = dict(fields), str(fields["request_id"]), b"\0"
        sampling = dict(others["sampling_params"])
        if sampling.get("max_tokens") != self._max_tokens(limit, len(ids)) or asked.min_tokens:
            return
        if asked.truncate_prompt_tokens is not None or asked.tool_choice != "none":
            return
        if list(others)[:2] != ["request_id", "token_ids"] or not name.endswith(asked.request_id):
            return
        if asked.model and not self._handlers.models.is_base_model(asked.model):  # the others come and go
            return
        del others["request_id"], others["token_ids"]
        others["sampling_params"] = {**sampling, "max_tokens": orjson.Fragment(mark)}
        before, behind = orjson.dumps(others)[1:].split(mark)  # no text in JSON has a zero byte
        prefix = name.removesuffix(asked.request_id)
        self._kept[key] = _Answer(rendering, limit, prefix, before, behind)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def _max_tokens(self, limit: int | None, length: int) -> int:
        handlers = self._handlers
        return self._get_max_tokens(
            handlers.model_config.max_model_len,
            limit,
            length,
            handlers.default_sampling_params,
            handlers.override_max_tokens,
            truncate_prompt_tokens=None,
        )
