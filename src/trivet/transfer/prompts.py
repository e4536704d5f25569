"""What a request's KV is computed from, as a word that both legs of a transfer can compare."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prompt_of(request: Request) -> str:
    """The number of a prompt's tokens and a digest of them and of its LoRA adapter.

    vLLM's own block hashes cannot be compared: they begin with a number that each process draws. The items of a
    multimodal prompt are not in it: two engines may name the same image differently.
    """
    ids = request.prompt_token_ids or []
    digest = hashlib.sha256(f"{getattr(request.lora_request, 'lora_name', None)}\n".encode(errors="replace"))
    try:
        digest.update(array("q", ids))
    except (OverflowError, TypeError):  # ids that no model has
        digest.update(repr(ids).encode())
    return f"{request.num_prompt_tokens} tokens {digest.hexdigest()[:32]}"
