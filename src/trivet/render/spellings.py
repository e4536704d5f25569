"""Other ways to write the same tokenizer, which a fast library reads into a faster one.

That the ids are the same is not taken from here: each way is compared with the reference like everything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_DIGITS_AND_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"  # blanks end before a digit
)


def spellings(definition: str) -> Sequence[str]:
    """A definition (``tokenizer.json``) as it is, and others that mean the same."""
    told = json.loads(definition)
    parts = (told.get("pre_tokenizer") or {}).get("pretokenizers", [])
    if len(parts) == 2 and _is(parts[0], _DIGITS) and _is(parts[1], _BYTES):
        # StarCoder's and SmolLM's: each digit by itself, and GPT-2's pattern for the rest. In one, fastokens takes a
        # third of the time.
        split = {"type": "Split", "pattern": {"Regex": _DIGITS_AND_GPT2}, "behavior": "Isolated", "invert": False}
        told["pre_tokenizer"]["pretokenizers"] = [split, {**parts[1], "use_regex": False}]
        return definition, json.dumps(told)
    return (definition,)


def _is(part: Any, meant: dict[str, Any]) -> bool:
    return all(part.get(name) == value for name, value in meant.items())
