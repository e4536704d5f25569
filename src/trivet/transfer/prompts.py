"""What a request's KV is computed from, as a word that both legs of a transfer can compare."""

from __future__ import annotations

import hashlib
import re
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


_OF_A_PROCESS = re.compile(r"renderer-?\d+-mm-\d+-.*", re.DOTALL)
"""Names of items where vLLM hashes none (``BaseRenderer._process_mm_uuids``): each process counts for itself."""


def prompt_of(request: Request) -> str:
    """The number of a prompt's tokens and a digest of them, of its LoRA adapter and of its images and the like.

    vLLM's own block hashes cannot be compared: they begin with a number that each process draws. Nor can the names of
    items that were not hashed, which are left out.
    """
    ids = request.prompt_token_ids or []
    digest = hashlib.sha256(f"{getattr(request.lora_request, 'lora_name', None)}\n".encode(errors="replace"))
    try:
        digest.update(array("q", ids))
    except (OverflowError, TypeError):  # ids that no model has
        digest.update(repr(ids).encode())
    for feature in request.mm_features:
        name = feature.mm_hash or feature.identifier
        said = "" if _OF_A_PROCESS.fullmatch(name) else name
        digest.update(f"\n{feature.mm_position.offset} {len(said)} {said}".encode(errors="replace"))
    return f"{request.num_prompt_tokens} tokens {digest.hexdigest()[:32]}"
