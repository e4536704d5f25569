"""Requests as they arrive: checked as vLLM checks them, and turned into what is to be computed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trivet.sim import text
from trivet.sim.settings import SimSettings


class RefusedError(Exception):
    """A request that is answered with an error; in vLLM's form."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return error_facts(self.message, self.kind, self.status, self.param)


def error_facts(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """vLLM's error form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(slots=True)
class Ask:
    """A request that can be served."""

    name: str
    """vLLM's request id as it tells it: with the endpoint's prefix."""
    model: str
    prompts: list[list[int]]
    max_tokens: list[int]
    """For each prompt."""
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    top_logprobs: int = 0
    """Of a chat: how many are told; ``logprobs`` is then how many are computed."""
    prompt_logprobs: int | None = None
    skip_cache: bool = False
    """``skip_reading_prefix_cache``, asked for or implied by ``prompt_logprobs``."""
    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    return_token_ids: bool = False
    detokenize: bool = True
    text_mode: bool = False
    echo: bool = False
    prompt_texts: list[str] = field(default_factory=list)


def parse_generate(body: Mapping[str, Any], settings: SimSettings, base_id: str | None) -> Ask:
    """``/inference/v1/generate``.

    Raises:
        RefusedError: vLLM would refuse it.
    """
    ids = _field(body, "token_ids")
    if not isinstance(ids, list):
        raise _invalid("token_ids", "list_type", "Input should be a valid list")
    if not ids:
        raise _invalid("token_ids", "too_short", "List should have at least 1 item after validation, not 0")
    _check_ids(ids, "token_ids")
    sampling = _field(body, "sampling_params")
    if not isinstance(sampling, Mapping):
        raise _invalid("sampling_params", "dataclass_type", "Input should be a dictionary or an instance")
    _check_model(body, settings)
    _check_kv(body)
    ask = Ask(
        name=f"generate-tokens-{base_id or body.get('request_id') or uuid.uuid4().hex}",
        model=settings.names[0],
        prompts=[ids],
        max_tokens=[],
        stream=_flag(body, "stream"),
        cache_salt=_salt(body),
        kv_transfer_params=body.get("kv_transfer_params"),
        return_token_ids=_flag(body, "return_token_ids"),
        text_mode=not settings.is_old and body.get("output_mode") == "text",
    )
    _sampling(ask, sampling, settings)
    ask.detokenize = _flag(sampling, "detokenize", True)
    ask.stop = _stop(sampling)
    ask.include_stop = _flag(sampling, "include_stop_str_in_output")
    if ask.stop and not ask.detokenize:
        raise RefusedError("stop strings are only supported when detokenize is True. Set detokenize=True to use stop.")
    if ask.text_mode and not ask.detokenize:
        raise RefusedError("output_mode='text' requires sampling_params.detokenize to be true")
    ask.logprobs = _logprobs(sampling.get("logprobs"), "sample", settings)
    ask.prompt_logprobs = _logprobs(sampling.get("prompt_logprobs"), "prompt", settings)
    ask.skip_cache = _flag(sampling, "skip_reading_prefix_cache", ask.prompt_logprobs is not None)
    _stream_options(ask, body)
    wanted = _whole(sampling, "max_tokens", None, 1) if "max_tokens" in sampling else None
    room = _room(len(ids), settings)
    ask.max_tokens = [room if wanted is None else wanted]  # one beyond the limit is cut at it, as vLLM does
    _check_min_tokens(ask)
    return ask


def parse_completion(body: Mapping[str, Any], settings: SimSettings, base_id: str | None) -> Ask:
    """``/v1/completions``.

    Raises:
        RefusedError: vLLM would refuse it.
    """
    _check_model(body, settings)
    _check_kv(body)
    prompts = _prompts(body.get("prompt"))
    ask = _openai_ask(body, settings, f"cmpl-{base_id or uuid.uuid4().hex}", prompts)
    ask.echo = _flag(body, "echo")
    ask.logprobs = _logprobs(body.get("logprobs"), "sample", settings)
    wanted = 16 if body.get("max_tokens") is None else _whole(body, "max_tokens", 16, 1)
    assert wanted is not None
    ask.max_tokens = [_within(len(prompt), wanted, settings) for prompt in prompts]
    _check_min_tokens(ask)
    return ask


def parse_chat(body: Mapping[str, Any], settings: SimSettings, base_id: str | None) -> Ask:
    """``/v1/chat/completions``.

    Raises:
        RefusedError: vLLM would refuse it.
    """
    messages = _field(body, "messages")
    if not isinstance(messages, list):
        raise _invalid("messages", "list_type", "Input should be a valid list")
    _check_model(body, settings)
    _check_kv(body)
    try:
        prompt = text.encode(text.chat_prompt(messages))
    except ValueError as error:
        raise RefusedError(str(error), param="messages") from None
    ask = _openai_ask(body, settings, f"chatcmpl-{base_id or uuid.uuid4().hex}", [prompt])
    ask.top_logprobs = _whole(body, "top_logprobs", 0, 0) or 0
    if _flag(body, "logprobs"):
        ask.logprobs = _logprobs(ask.top_logprobs, "sample", settings)
    elif ask.top_logprobs:
        raise RefusedError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    wanted = _whole(body, "max_completion_tokens", None, 1) or _whole(body, "max_tokens", None, 1)
    if wanted is None:
        _within(len(prompt), 1, settings)
        ask.max_tokens = [_room(len(prompt), settings)]
    else:
        ask.max_tokens = [_within(len(prompt), wanted, settings)]
    _check_min_tokens(ask)
    return ask


def _openai_ask(body: Mapping[str, Any], settings: SimSettings, name: str, prompts: list[list[int]]) -> Ask:
    ask = Ask(
        name=name,
        model=settings.names[0],
        prompts=prompts,
        max_tokens=[],
        stream=_flag(body, "stream"),
        cache_salt=_salt(body),
        kv_transfer_params=body.get("kv_transfer_params"),
        return_token_ids=_flag(body, "return_token_ids"),
    )
    _sampling(ask, body, settings)
    ask.stop = _stop(body)
    ask.include_stop = _flag(body, "include_stop_str_in_output")
    ask.prompt_logprobs = _logprobs(body.get("prompt_logprobs"), "prompt", settings)
    ask.skip_cache = ask.prompt_logprobs is not None
    if ask.stream and ask.prompt_logprobs is not None:
        raise RefusedError("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    if body.get("stream_options") and not ask.stream:
        raise RefusedError("Stream options can only be defined when `stream=True`.", param="stream_options")
    _stream_options(ask, body)
    return ask


def _prompts(prompt: Any) -> list[list[int]]:
    if prompt is None or prompt == "" or prompt == []:
        message = "Either prompt or prompt_embeds must be provided and non-empty."
        raise RefusedError(message, param="prompt")
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if isinstance(prompt, list):
        if all(isinstance(one, str) and one for one in prompt):
            return [text.encode(one) for one in prompt]
        if all(_is_id(one) for one in prompt):
            _check_ids(prompt, "prompt")
            return [prompt]
        if all(isinstance(one, list) and one for one in prompt):
            for one in prompt:
                _check_ids(one, "prompt")
            return list(prompt)
    raise _invalid("prompt", "string_type", "Input should be a valid string, or token ids, or a list of either")


def _sampling(ask: Ask, sampling: Mapping[str, Any], settings: SimSettings) -> None:
    ask.n = _whole(sampling, "n", 1, 1) or 1
    if ask.n > settings.max_num_seqs:
        raise RefusedError(
            f"sampling_params.n must be at most the server's max_num_seqs ({settings.max_num_seqs}), got {ask.n}."
        )
    temperature = sampling.get("temperature")
    if temperature is not None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise _invalid("temperature", "float_type", "Input should be a valid number")
        if temperature < 0:
            raise RefusedError(f"temperature must be non-negative, got {temperature}.", param="temperature")
        if temperature == 0 and ask.n > 1:
            raise RefusedError(f"n must be 1 when using greedy sampling, got {ask.n}.")
    ask.min_tokens = _whole(sampling, "min_tokens", 0, 0) or 0
    ask.ignore_eos = _flag(sampling, "ignore_eos")
    stops = sampling.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(_is_id(one) for one in stops):
        raise RefusedError(f"stop_token_ids must contain only integers, got {stops}.")
    ask.stop_token_ids = frozenset(stops)


def _stop(values: Mapping[str, Any]) -> tuple[str, ...]:
    stop = values.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise _invalid("stop", "string_type", "Input should be a valid string or a list of them")
    if not all(stops):
        raise RefusedError("stop cannot contain an empty string.")
    return tuple(stops)


def _stream_options(ask: Ask, body: Mapping[str, Any]) -> None:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise _invalid("stream_options", "model_type", "Input should be a valid dictionary")
    if options and ask.stream:
        ask.include_usage = _flag(options, "include_usage", True)
        ask.continuous_usage = ask.include_usage and _flag(options, "continuous_usage_stats")


def _logprobs(value: Any, which: str, settings: SimSettings) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise RefusedError(f"`{which}` logprobs must be a positive value or -1, got {value}.")
    wanted = settings.vocab_size if value == -1 else value
    if settings.max_logprobs != -1 and wanted > settings.max_logprobs:
        raise RefusedError(
            f"Requested {which} logprobs of {wanted}, which is greater than max allowed: {settings.max_logprobs}"
        )
    return int(wanted)


def _room(prompt: int, settings: SimSettings) -> int:
    """Tokens that an answer may have at most.

    Raises:
        RefusedError: the prompt leaves none.
    """
    if prompt > settings.max_model_len:
        raise RefusedError(
            f"The decoder prompt (length {prompt}) is longer than the maximum model length of "
            f"{settings.max_model_len}. Make sure that `max_model_len` is no smaller than the number of text tokens."
        )
    if prompt == settings.max_model_len:
        raise RefusedError(
            f"The decoder prompt (length {prompt}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {settings.max_model_len}. Make sure that `max_model_len` is no smaller "
            "than the number of text tokens (prompt + requested output tokens)."
        )
    if prompt >= settings.longest:
        raise RefusedError(
            f"The prompt (length {prompt}) does not fit into the KV cache of {settings.longest} tokens. A vLLM engine "
            "would not have started with so small a cache."
        )
    return settings.longest - prompt


def _within(prompt: int, wanted: int, settings: SimSettings) -> int:
    """What was asked for.

    Raises:
        RefusedError: prompt and answer together are longer than the model allows; the OpenAI endpoints say so.
    """
    limit = settings.max_model_len
    if wanted > limit:
        raise RefusedError(
            f"max_tokens={wanted} cannot be greater than max_model_len={limit}. Please request fewer output tokens.",
            param="max_tokens",
        )
    if prompt + wanted > limit:
        raise RefusedError(
            f"This model's maximum context length is {limit} tokens. However, you requested {wanted} output tokens "
            f"and your prompt contains {prompt} input tokens, for a total of {prompt + wanted} tokens. Please reduce "
            "the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    _room(prompt, settings)
    return wanted


def _check_min_tokens(ask: Ask) -> None:
    if ask.min_tokens > min(ask.max_tokens):
        raise RefusedError(
            f"min_tokens must be less than or equal to max_tokens={min(ask.max_tokens)}, got {ask.min_tokens}."
        )


def _check_model(body: Mapping[str, Any], settings: SimSettings) -> None:
    model = body.get("model")
    if model is None or model == "" or model in settings.names:
        return
    aliases = "" if settings.is_old else f" Valid aliases: {', '.join(settings.names)}."
    raise RefusedError(f"The model `{model}` does not exist.{aliases}", status=404, kind="NotFoundError", param="model")


def _check_kv(body: Mapping[str, Any]) -> None:
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, Mapping):
        raise _invalid("kv_transfer_params", "dict_type", "Input should be a valid dictionary")


def _check_ids(ids: Sequence[Any], where: str) -> None:
    if not all(_is_id(one) for one in ids):
        raise _invalid(where, "int_type", "Input should be a valid integer")
    if min(ids) < 0:
        raise _invalid(where, "value_error", f"Value error, {where} must not contain negative values")
    if max(ids) >= 2**32:
        raise RefusedError(f"Token id {max(ids)} is out of vocabulary")


def _salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RefusedError("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    return salt


def _field(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise _invalid(name, "missing", "Field required")
    return body[name]


def _flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _invalid(name, "bool_type", "Input should be a valid boolean")
    return value


def _whole(values: Mapping[str, Any], name: str, default: int | None, least: int) -> int | None:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise _invalid(name, "int_type", "Input should be a valid integer")
    if value < least:
        raise RefusedError(f"{name} must be at least {least}, got {value}.", param=name)
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int


def _invalid(name: str, kind: str, message: str) -> RefusedError:
    return RefusedError(
        f"1 validation error:\n  {{'type': '{kind}', 'loc': 'body.{name}', 'msg': '{message}'}}",
        kind="Bad Request",
        param=f"body.{name}",
    )
