"""Which token comes next: a pure function of the whole sequence so far, prompt and answer alike.

So an answer that is continued elsewhere, from the prompt and what was generated, goes on with the same tokens. The
function is a hash (BLAKE2b over the ids as 32-bit numbers) and knows nothing of sampling: temperature, seed and
penalties change nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Container, Sequence

from trivet.sim.settings import FIRST_WORD


def id_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit numbers.

    Raises:
        OverflowError, TypeError: one is not a number from 0 to 2**32 - 1.
    """
    return array("I", token_ids).tobytes()


def digest(token_ids: Sequence[int]) -> str:
    """A short name for a sequence of ids, by which two engines see whether they mean the same prompt."""
    return hashlib.blake2b(id_bytes(token_ids), digest_size=16).hexdigest()


class Walk:
    """A sequence that grows token by token."""

    __slots__ = ("_eos_below", "_eos_token_id", "_hash", "_words")

    def __init__(self, token_ids: Sequence[int], *, vocab_size: int, eos_token_id: int, eos_chance: float) -> None:
        self._hash = hashlib.blake2b(id_bytes(token_ids), digest_size=16)
        self._words = vocab_size - FIRST_WORD
        self._eos_token_id = eos_token_id
        self._eos_below = int(eos_chance * 2**32)

    def draw(self) -> bytes:
        """What the next token and its log-probabilities are made from."""
        return self._hash.copy().digest()

    def token(self, draw: bytes, banned: Container[int] = ()) -> int:
        """The next token; where that is banned, the one that comes instead."""
        if int.from_bytes(draw[8:12], "little") < self._eos_below and self._eos_token_id not in banned:
            return self._eos_token_id
        word = int.from_bytes(draw[:8], "little")
        while (token := FIRST_WORD + word % self._words) in banned:
            word += 1
        return token

    def append(self, token: int) -> None:
        """Goes on to the next place."""
        self._hash.update(token.to_bytes(4, "little"))


def candidates(draw: bytes, token: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The sampled token with its log-probability, then the next best, ``count`` (at least one) in all."""
    best = -(draw[12] + 1) / 256
    others = [
        (FIRST_WORD + (token - FIRST_WORD + rank) % (vocab_size - FIRST_WORD), best - rank * 0.5)
        for rank in range(1, max(count, 1))
    ]
    return [(token, best), *others]


def prompt_logprob(token: int, place: int) -> float:
    """Log-probability of a prompt token."""
    return -((token * 31 + place) % 97 + 1) / 32
