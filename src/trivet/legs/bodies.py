"""The bodies that legs send to ``/inference/v1/generate``. Pure functions of the rendered request.

Rules for the prefill leg, and why (vLLM 0.30 to 0.32):

- ``max_tokens`` 1, because a longer answer could cross a block and shift decode's view of prefill's blocks;
- ``min_tokens`` 1, because some connectors hand over only if prefill ended on length, which an end-of-sequence
  token as the first one would prevent;
- nothing that only shapes the answer: its token is thrown away, and each such field could be refused beside
  ``max_tokens`` 1 (``min_tokens`` above it, stop conditions, structured output, log-probabilities);
- everything that shapes the prompt's KV or where it is cached: ids, images and the like, model or adapter,
  ``cache_salt``, priority;
- ``prompt_logprobs``, as no other leg sees the prompt's hidden states.

Where its token is the answer's first, it is drawn as the client asked, with ``max_tokens`` 1.

The decode leg is the client's request as rendered. An answer that broke off is asked for again as ``behind`` it.
Every leg with the whole prompt has the tensors of its images: where KV does not come, or is lost, decode computes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trivet.render.contract import EncodedIds, TokenRequest

PREFILL_SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False}
"""Sampling of a prefill leg whose token is thrown away."""

_COUNTED_FROM_THE_FIRST_TOKEN: Mapping[str, str] = {
    "structured_outputs": "a grammar",
    "presence_penalty": "a penalty that counts the answer's tokens",
    "frequency_penalty": "a penalty that counts the answer's tokens",
    "bad_words": "bad words, which may span both parts",
    "extra_args": "a logits processor that may count the answer's tokens",
    "thinking_token_budget": "a budget that counts the answer's tokens",
    "repetition_detection": "a search for repetitions in the answer",
    "trace_decode_token_ids": "tokens prescribed by their place in the answer",
}
"""Sampling whose state is made of the answer's own tokens: behind a border within the answer it would begin anew.

``repetition_penalty`` is none of them, as prompt and answer count alike (``vllm/v1/sample/ops/penalties.py``), nor are
``logit_bias``, ``allowed_token_ids``, stop tokens and log-probabilities, which look at one position.
"""
_NEUTRAL: tuple[Any, ...] = (None, 0, 0.0, False, [], {}, "")


def prefill_body(request: TokenRequest, params: Mapping[str, Any] | None, *, sample: bool = False) -> dict[str, Any]:
    """The body of a prefill leg.

    Args:
        params: the connector's ``kv_transfer_params``; None where nothing is to be handed over.
        sample: draw the token as the client asked, because it will be used.
    """
    sampling = dict(PREFILL_SAMPLING)
    if sample:
        sampling = {**request.sampling, "max_tokens": 1}
        if (least := sampling.get("min_tokens")) is not None:
            sampling["min_tokens"] = min(least, 1)  # more than max_tokens would be refused
    if request.prompt_logprobs is not None:  # decode gets KV and no hidden states: only prefill can tell them
        sampling["prompt_logprobs"] = request.prompt_logprobs
    body = {**_prompt(request), "sampling_params": sampling, "stream": False}
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    return body


def decode_body(request: TokenRequest, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body of a decode leg, or of the only leg of a colocated request.

    Args:
        params: what the connector hands to decode; None serves the request colocated.
    """
    body: dict[str, Any] = {
        **_prompt(request),
        "sampling_params": dict(request.sampling),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.reasoning_ended is not None:
        body["reasoning_ended"] = request.reasoning_ended
    if request.reasoning_parser_kwargs is not None:
        body["reasoning_parser_kwargs"] = dict(request.reasoning_parser_kwargs)
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    elif request.kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(request.kv_transfer_params)
    if request.ec_transfer_params is not None:
        body["ec_transfer_params"] = dict(request.ec_transfer_params)
    return body


def whole_body(request: TokenRequest) -> dict[str, Any]:
    """The body of the only leg of a colocated request whose prompt's log-probabilities are wanted.

    Not streamed: vLLM's streams of tokens have no field for them.
    """
    body = decode_body(request, None)
    body["sampling_params"]["prompt_logprobs"] = request.prompt_logprobs
    body["stream"] = False
    del body["stream_options"]
    return body


def release_body(request: TokenRequest, params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a decode leg whose only use is that prefill frees its KV."""
    releasing = replace(
        request,
        sampling={"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        # A salt of its own: should prefill have freed the blocks already, decode must not cache what it reads there.
        cache_salt=f"release-{uuid.uuid4().hex}",
        prompt_logprobs=None,
    )
    return decode_body(releasing, params)


def release_at_prefill(model: str | None, token_id: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request to the engine that holds KV, whose only use is that it lets go of it."""
    return {
        "token_ids": [token_id],
        "model": model,
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "stream": False,
        "kv_transfer_params": dict(params),
    }


def a_token_of(request: TokenRequest) -> int:
    """A token that the prompt's model has, and that stands for no image, where the prompt has such a one."""
    at = 0
    for item in request.features.items if request.features is not None else ():
        if at < item.offset:
            break
        at = item.offset + item.length
    return request.token_ids[at if at < len(request.token_ids) else 0]


def behind(request: TokenRequest, sent: Sequence[int]) -> TokenRequest:
    """The request for the rest of an answer of which ``sent`` is there already: the prompt, then those tokens."""
    if not sent:
        return request
    sampling = dict(request.sampling)
    for name in ("max_tokens", "min_tokens"):
        if sampling.get(name) is not None:
            sampling[name] = max(0, sampling[name] - len(sent))
    return replace(request, token_ids=[*request.token_ids, *sent], sampling=sampling, prompt_logprobs=None)


def obstacle_to_continuing(request: TokenRequest) -> str | None:
    """Why an answer that broke off cannot be continued on another engine as one engine would have; None if it can."""
    sampling = request.sampling
    for name, reason in _COUNTED_FROM_THE_FIRST_TOKEN.items():
        value = sampling.get(name)
        if value not in _NEUTRAL or (name == "thinking_token_budget" and value is not None):
            return reason
    if sampling.get("seed") is not None and sampling.get("temperature", 1.0) != 0.0:
        return "a seed, whose random numbers begin anew"
    return None


def why_unsplittable(request: TokenRequest) -> str | None:
    """Why no KV may be handed over for a request, or None.

    ``skip_reading_prefix_cache``: the client wants nothing of its prompt read from KV that is there. vLLM 0.32 then
    leaves out what a connector offers as well (``vllm/v1/core/sched/scheduler.py``), so decode would compute the prompt
    again, and make a first token that prefill has made already; 0.30 would read it. ``prompt_logprobs`` imply it for
    the engine that tells them: that is prefill, and decode is not asked for any.
    """
    if request.sampling.get("skip_reading_prefix_cache"):
        return "it wants no KV read that is there (skip_reading_prefix_cache)"
    return None


def first_token_may_be_handed_over(request: TokenRequest) -> bool:
    """Whether prefill's token, drawn alone, is one that one engine would have drawn and continued from.

    False where the answer so far is an input to sampling (penalties, grammar, seeds, custom processors), or where its
    first chunk has more to tell than prefill's answer does. What looks at one position is drawn by prefill as by any
    other engine: temperature, bias, allowed and stop tokens, minimum length, log-probabilities.
    """
    return (
        obstacle_to_continuing(request) is None
        and why_unsplittable(request) is None
        and request.prompt_logprobs is None
        and request.sampling.get("seed") is None
    )


def _prompt(request: TokenRequest) -> dict[str, Any]:
    ids = request.token_ids
    body: dict[str, Any] = {"token_ids": ids if isinstance(ids, EncodedIds) else list(ids), "model": request.model}
    if request.features is not None:
        body["features"] = request.features
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.priority:
        body["priority"] = request.priority
    return body
