"""The bodies that legs send to ``/inference/v1/generate``. Pure functions of the rendered request.

Rules for the prefill leg, and why (vLLM 0.30 to 0.32):

- ``max_tokens`` 1, because a longer answer could cross a block and shift decode's view of prefill's blocks;
- ``min_tokens`` 1, because some connectors hand over only if prefill ended on length, which an end-of-sequence
  token as the first one would prevent;
- nothing that only shapes the answer: its token is thrown away, and each such field could be refused beside
  ``max_tokens`` 1 (``min_tokens`` above it, stop conditions, structured output, log-probabilities);
- everything that shapes the prompt's KV or where it is cached: ids, model or adapter, ``cache_salt``, priority.

The decode leg is the client's request as rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trivet.render.contract import TokenRequest

PREFILL_SAMPLING: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 1, "min_tokens": 1, "detokenize": False}
"""Sampling of a prefill leg whose token is thrown away."""

_UNSAFE_TO_CONTINUE = (
    "logprobs",
    "structured_outputs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "min_tokens",
    "seed",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "thinking_token_budget",
    "repetition_detection",
    "logprob_token_ids",
)
_NEUTRAL: tuple[Any, ...] = (None, 0, 0.0, False, [], {}, "")
_ZERO_ASKS = ("logprobs", "thinking_token_budget")  # logprobs 0 asks for the sampled token's own


def prefill_body(request: TokenRequest, params: Mapping[str, Any], *, sample: bool = False) -> dict[str, Any]:
    """The body of a prefill leg.

    Args:
        params: the connector's ``kv_transfer_params``.
        sample: draw the token as the client asked, because it will be used.
    """
    sampling = dict(PREFILL_SAMPLING)
    if sample:
        sampling = {**request.sampling, "max_tokens": 1}
    return {
        **_prompt(request),
        "sampling_params": sampling,
        "stream": False,
        "kv_transfer_params": dict(params),
    }


def decode_body(
    request: TokenRequest, params: Mapping[str, Any] | None, *, after: Sequence[int] = ()
) -> dict[str, Any]:
    """The body of a decode leg, or of the only leg of a colocated request.

    Args:
        params: what the connector hands to decode; None serves the request colocated.
        after: tokens that the client already has; generation continues behind them.
    """
    sampling = dict(request.sampling)
    if after and sampling.get("max_tokens") is not None:
        sampling["max_tokens"] -= len(after)
    body: dict[str, Any] = {
        **_prompt(request),
        "sampling_params": sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if after:
        body["token_ids"] = [*request.token_ids, *after]
    if request.reasoning_ended is not None:
        body["reasoning_ended"] = request.reasoning_ended
    if request.reasoning_parser_kwargs is not None:
        body["reasoning_parser_kwargs"] = dict(request.reasoning_parser_kwargs)
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    return body


def first_token_may_be_handed_over(request: TokenRequest) -> bool:
    """Whether prefill's token, drawn alone, is the one that one engine would have drawn and continued from.

    False where the answer so far is an input to sampling (penalties, grammar, seeds, minimum length, custom
    processors) or where more than a token must be carried (log-probabilities).
    """
    sampling = request.sampling
    for name in _UNSAFE_TO_CONTINUE:
        value = sampling.get(name)
        if name == "repetition_penalty" and value == 1.0:
            continue
        if value not in _NEUTRAL or (name in _ZERO_ASKS and value is not None):
            return False
    return bool(sampling.get("temperature", 1.0) == 0.0)


def _prompt(request: TokenRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"token_ids": list(request.token_ids), "model": request.model}
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.priority:
        body["priority"] = request.priority
    return body
