"""The end of a prompt in the place of the whole, where an answer's first token is made text.

vLLM gives the stream that makes text of tokens (``DecodeStream`` of ``tokenizers``) the whole prompt, since a token's
text can depend on what stands before it (``FastIncrementalDetokenizer`` in ``vllm/v1/engine/detokenizer.py``). With
the first token the stream decodes all of it twice, on the event loop: 100,000 tokens hold up all others for some 50 ms.
What matters are the last few tokens, from where a character begins; everything before stays the same in both texts
whose difference the stream gives.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import vllm.v1.engine.output_processor as output_processor
from tokenizers import Tokenizer
from transformers import TokenizersBackend

_LONG = 512
"""Prompts up to so many tokens are decoded whole."""
_LEAST, _MOST = 32, 1024
"""Tokens of an end."""
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LOCAL = frozenset(("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"))
"""Decoders that look at a token, or at bytes of one character, and at the text's two ends."""


def shorten_prompts() -> None:
    """Has vLLM's output processor of this process decode no more of a prompt than its end."""
    theirs = output_processor.IncrementalDetokenizer
    if not issubclass(theirs, _Shortened):
        output_processor.IncrementalDetokenizer = type("ShortenedDetokenizer", (_Shortened, theirs), {"theirs": theirs})


class _Shortened:
    theirs: Any

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        """As vLLM's; the request stays as it is."""
        ids = request.prompt_token_ids
        if isinstance(tokenizer, TokenizersBackend) and ids is not None and len(ids) > _LONG:
            end = _ends_of(tokenizer).of(ids, skip_special_tokens=request.sampling_params.skip_special_tokens)
            if end is not None:
                request = copy.copy(request)
                request.prompt_token_ids = end
        return cls.theirs.from_new_request(tokenizer, request)


@functools.lru_cache(maxsize=4)
def _ends_of(tokenizer: TokenizersBackend) -> Ends:
    return Ends(tokenizer.backend_tokenizer)


class Ends:
    """Ends of prompts of one tokenizer."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        told = json.loads(backend.to_str())
        self._is_local = all(kind in _LOCAL for kind in _kinds(told.get("decoder")))
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._begins: dict[int, bool] = {}

    def of(self, ids: Sequence[int], *, skip_special_tokens: bool) -> list[int] | None:
        """An end that stands for the whole; None if none is sure to."""
        if not self._is_local:
            return None
        for place in range(len(ids) - _LEAST, max(0, len(ids) - _MOST), -1):
            if self._begins_a_character(ids[place]):
                end = list(ids[place:])
                text = self._backend.decode(end, skip_special_tokens=skip_special_tokens)
                # nothing to see, or half a character at its end: the stream then takes another way
                return None if not text.strip() or text.endswith(_UNFINISHED) else end
        return None

    def _begins_a_character(self, token: int) -> bool:
        if (known := self._begins.get(token)) is None:
            known = self._begins[token] = token not in self._added and _is_ascii_word(self._backend.id_to_token(token))
        return known


def _is_ascii_word(text: str | None) -> bool:
    """Whether a token is a word of one byte a character, with or without a blank before it (``Ġ``, ``▁``)."""
    word = (text or "").lstrip("Ġ▁ ")
    return word.isascii() and word.isalpha()


def _kinds(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        yield "none"
        return
    yield decoder["type"]
    for one in decoder.get("decoders", ()):
        yield from _kinds(one)
