"""What is wrong with a value of the file, in Trivet's words: pydantic's speak of types, patterns and parsing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_A_MAPPING = "a mapping (NAME: VALUE, one a line, further in)"

_WANTED: Mapping[str, str] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": _A_MAPPING,
    "finite_number": "a number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_type": "a whole number",
    "list_type": "a list ([A, B])",
    "mapping_type": _A_MAPPING,
    "model_attributes_type": _A_MAPPING,
    "model_type": _A_MAPPING,
    "string_too_short": "text that is not empty",
    "string_type": "text (in quotes, where YAML reads something else)",
}
"""By pydantic's type of error."""

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def said_by(error: Mapping[str, Any]) -> str:
    """What one of pydantic's errors means, in a line: what the value must be, and what it is."""
    kind, given = error["type"], error["input"]
    if kind == "missing":
        return "this is needed"
    if kind == "invalid_key":
        return "a field's name is text"
    if kind in ("value_error", "assertion_error"):  # a check of our own
        return str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if given is None:
        return "there is nothing behind it: give a value, or leave the key out"
    wanted = _wanted(kind, error.get("ctx") or {})
    if wanted is None:  # of a kind that no field here has until now
        wanted = str(error["msg"]).removeprefix("Input should be ")
    return f"must be {wanted}" + ("" if isinstance(given, dict | list) else f" (got {given!r})")


def _wanted(kind: str, context: Mapping[str, Any]) -> str | None:
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"{word} {context[name]:g}" if isinstance(context[name], float) else f"{word} {context[name]}"
    if kind == "literal_error":
        return str(context["expected"])
    return _WANTED.get(kind)
