"""Chat requests validated once for many: those of one client are alike but for their messages.

What vLLM's model makes of a body is the same for the same body, but for a new ``request_id``. So of bodies whose values
are plain, and whose messages are nothing but a role and a text, the validated request is kept and copied.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from pydantic import BaseModel
from vllm.utils import random_uuid

_KNOWN = (
    "__log_extra_fields__ _materialize_tool_calls_after _normalize_messages_before apply_return_mm_kwargs_alias "
    "check_cache_salt_support check_generation_prompt check_logprobs check_structured_outputs_count "
    "check_system_message_content_type check_tool_usage drop_prompt_token_ids_with_media validate_response_format "
    "validate_stream_options"
)
"""Those of vLLM 0.32's chat requests that look at the whole: none of them changes a message that is a role and a text,
compares it with another, or counts them."""
_PLAIN = (str, int, float, bool, type(None))
_KEPT = 64
_LONGEST = 4096
"""Characters of a body without its messages."""


class Validated:
    """A model's requests, of which the newest are kept. For one thread."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model
        self._kept: OrderedDict[Any, BaseModel] = OrderedDict()

    @staticmethod
    def takes(model: type[BaseModel]) -> bool:
        """Whether a model validates each message that is a role and a text by itself, and leaves it as it is."""
        told = model.__pydantic_decorators__
        fields = [one.info.fields for one in told.field_validators.values()]
        return told.model_validators.keys() <= frozenset(_KNOWN.split()) and not any(
            "messages" in one for one in fields
        )

    @staticmethod
    def key_of(told: dict[str, Any]) -> Any:
        """What a body asks for beside its messages; None if that is not plain, or not to be kept (see ``apart``)."""
        key: list[Any] = []
        for name, value in told.items():
            if name != "messages":
                if type(value) not in _PLAIN or (name == "cache_salt" and value is not None):
                    return None
                key += name, type(value), repr(value) if type(value) is float else value
        return tuple(key)

    def validated(self, told: dict[str, Any], key: Any) -> Any:
        """The request that a body asks for.

        Args:
            told: a body, with one of its messages, which is a role and a text.
            key: its own.

        Raises:
            ValidationError: it is at fault.
        """
        if key is None:
            return self._model.model_validate(told)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return _copied(known, told)
        asked = self._model.model_validate(told)
        if sum(len(one) for one in key if isinstance(one, str)) <= _LONGEST and _is_plain(asked):
            self._kept[key] = _copied(asked, told)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return asked


def _is_plain(asked: BaseModel) -> bool:
    """Whether ``_own`` gives all of a request its own."""
    values = (value for name, value in asked.__dict__.items() if name != "messages")
    return all(
        type(value) in _PLAIN
        or (type(value) is list and not value)
        or (type(value) is dict and all(type(one) in _PLAIN for one in value.values()))
        for held in (values, (asked.__pydantic_extra__ or {}).values(), (asked.__pydantic_private__ or {}).values())
        for value in held
    )


def _own(fields: dict[str, Any]) -> dict[str, Any]:
    """A copy, of which nothing that can be changed is another's."""
    copied = fields.copy()
    for name, value in fields.items():
        if type(value) is list:
            copied[name] = []
        elif type(value) is dict:
            copied[name] = value.copy()
    return copied


def _copied(asked: BaseModel, told: dict[str, Any]) -> BaseModel:
    """One of its own for each, with the ``request_id`` that the body names, or a new one."""
    kind = type(asked)
    copied = kind.__new__(kind)
    fields = _own(asked.__dict__)
    if "request_id" not in told:
        fields["request_id"] = random_uuid()
    fields["messages"] = told["messages"]
    extra, private = asked.__pydantic_extra__, asked.__pydantic_private__
    object.__setattr__(copied, "__dict__", fields)
    object.__setattr__(copied, "__pydantic_extra__", None if extra is None else _own(extra))
    object.__setattr__(copied, "__pydantic_fields_set__", set(asked.__pydantic_fields_set__))
    object.__setattr__(copied, "__pydantic_private__", None if private is None else _own(private))
    return copied
