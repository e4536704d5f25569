"""Which engine has how much of a prompt in its prefix cache: prompts as chains of hashes, and a table of who has what.

A prompt is cut into chunks, and each chunk's hash takes in the hash before it. So a hash names everything up to its
chunk's end, as the block hashes of vLLM's prefix cache do (``hash_block_tokens`` in
``vllm/v1/core/kv_cache_utils.py``), and an engine that has computed it has all before it too. Chunks are the gateway's
own: coarser than an engine's blocks, as a few tokens more or less decide nothing and each hash costs time. What the
table knows is learned from engines' answers. It may be wrong, and then costs speed: nothing here decides what a client
gets.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

from trivet.routing.engines import EngineView

CHUNK_TOKENS = 64
"""Tokens of a chunk. A prompt of 9,000 tokens is hashed in 0.16 ms; in chunks of 16, vLLM's blocks, in 0.40 ms."""
CHUNK_BYTES = 256
"""Of a text whose tokens are not known: four a token, as in English. Engines' loads are estimated alike."""
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt as the table knows prompts: one hash for each of its whole chunks."""

    hashes: Sequence[int] = ()
    """64 bits each."""
    prompt_tokens: int = 0
    """Tokens of the whole prompt; an estimate where they are not known."""
    of_tokens: bool = False
    """The hashes are those of ``Chain.of_tokens``, to which what engines tell by their KV events can be held."""


def root_of(*identity: str | None) -> bytes:
    """What a chain begins with, before any id; see ``Chain``."""
    root = blake2b(digest_size=_HASH_BYTES)
    for one in identity:
        said = b"" if one is None else one.encode("utf-8", "surrogatepass")
        root.update(b"%d:" % (-1 if one is None else len(said)) + said)
    return root.digest()


def grow(parent: bytes, data: bytes, chunk_bytes: int = CHUNK_TOKENS * 4) -> tuple[list[int], bytes, bytes]:
    """Continues a chain.

    Args:
        parent: a root, or what this gave before.
        data: what follows, from the beginning of a chunk on.

    Returns:
        The hashes of the whole chunks, the next parent, and what is left behind them.
    """
    hashes = []
    whole = len(data) - len(data) % chunk_bytes
    for start in range(0, whole, chunk_bytes):
        # the parent as a salt, which BLAKE2 takes in its first state: no bytes are joined, no block is added
        parent = blake2b(data[start : start + chunk_bytes], digest_size=_HASH_BYTES, salt=parent).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return hashes, parent, data[whole:]


def named(token_ids: Sequence[int], items: Iterable[tuple[int, str]]) -> bytes:
    """Token ids as a chain takes them in, so that images differ in it though the tokens that stand for them do not.

    Where an item begins its name stands, in 32 bits: what is behind it is then told apart as well. Two names that fall
    together, one pair in four thousand million, cost speed as any guess that is wrong.

    Args:
        items: where each begins, and its name.

    Raises:
        OverflowError: one of the ids is none: below 0, or above 32 bits.
    """
    ids = array("I", token_ids)
    for offset, name in items:
        ids[offset] = _word(name)
    return ids.tobytes()


def _word(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "little")


def token_root(model: str, cache_salt: str | None) -> bytes:
    """The root of a prompt's chain on the tokens plane.

    Args:
        model: the LoRA adapter; for the model itself, the first of its served names.
    """
    return root_of("tokens", model, cache_salt or None)


class Chain:
    """Hashes of a growing sequence of token ids, or of text in bytes."""

    __slots__ = ("_chunk_bytes", "_of_tokens", "_parent", "_rest", "hashes")

    def __init__(self, *identity: str | None, chunk_bytes: int = CHUNK_TOKENS * 4) -> None:
        """
        Args:
            identity: what keeps caches apart beside the ids themselves, always in the same order: model or LoRA
                adapter, ``cache_salt``. None and an empty text differ.
            chunk_bytes: bytes of a chunk; ids have four each.
        """
        self._parent = root_of(*identity)
        self._rest = b""
        self._chunk_bytes = chunk_bytes
        self._of_tokens = False
        self.hashes: list[int] = []

    @classmethod
    def of_tokens(cls, model: str, cache_salt: str | None) -> Chain:
        """Of a prompt on the tokens plane; see ``token_root``."""
        chain = cls()
        chain._parent, chain._of_tokens = token_root(model, cache_salt), True
        return chain

    def extend(self, token_ids: Sequence[int]) -> None:
        """Continues with token ids.

        Raises:
            OverflowError: one of them is none: below 0, or above 32 bits.
        """
        self.extend_bytes(array("I", token_ids).tobytes())

    def extend_bytes(self, data: bytes) -> None:
        """Continues with text."""
        hashes, self._parent, self._rest = grow(self._parent, self._rest + data, self._chunk_bytes)
        self.hashes += hashes

    def prefix(self, prompt_tokens: int) -> Prefix:
        """All so far, as a prompt of so many tokens."""
        return Prefix(tuple(self.hashes), prompt_tokens, self._of_tokens)


@dataclass(frozen=True, slots=True)
class Known:
    """How much of a prompt an engine is thought to have cached."""

    tokens: int = 0
    """Whole blocks of the engine's, and never the last token, which is always computed (``get_computed_blocks`` in
    ``vllm/v1/core/kv_cache_manager.py``)."""
    age_s: float = 0.0
    """Since the last of them was computed or used there."""
    told: bool = False
    """The engine has told so itself, by its KV events; else it is a guess from what it was sent."""


NOTHING = Known()

_WAYS = 4
_TAG_BYTES, _STAMP_BYTES = 8, 4
_SLOT_BYTES = _TAG_BYTES + _STAMP_BYTES
REGION = "prefixes"
"""The name of the table's memory on the board that workers share."""
TABLE_BYTES = 2**19 * _SLOT_BYTES
"""Of a table of half a million chunks (33 million tokens): the caches of some thirty engines with a million each."""
_LEARNT_AT_ONCE = 512
"""Chunks: half a millisecond."""
_LEAST_HORIZON_S = 1.0
_DOUBTS_S = 300.0
"""How long it is believed that an engine has forgotten what is older than some age."""


class PrefixTable:
    """Which engine has computed which chunk, in memory that several processes may write at once without a lock.

    A slot is a tag of 64 bits, the chunk's hash mixed with a number for the engine and its generation, and a stamp
    beside it. Sets of four slots, of which the oldest gives way. So:

    - the engine is not written down but asked for: no state of the memory names an engine that does not exist, and
      what an engine had before it was started anew is not found any more;
    - a tag is one aligned word, which is written whole; of two writers one wins. A stamp that belongs to another tag
      makes a slot look older or newer. A torn tag is, but for one chance in 2**64, nobody's.

    An engine evicts the least recently used first, as vLLM does. If one turns out to have much less than the table
    said, then all its entries of that age or older count as gone for five minutes (``correct``).
    """

    def __init__(
        self, memory: bytearray | memoryview | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            memory: where it lies, aligned to 8 bytes and zeroed by whoever made it; all processes must give it the
                same size. A private one of ``TABLE_BYTES`` unless given.
            now_s: a clock that all processes share; seconds.

        Raises:
            ValueError: the memory cannot be written, or is too small for one set.
        """
        view = memoryview(bytearray(TABLE_BYTES) if memory is None else memory)
        sets = view.nbytes // (_WAYS * _SLOT_BYTES)
        if view.readonly or sets < 1:
            raise ValueError(f"a prefix table needs writable memory of {_WAYS * _SLOT_BYTES} bytes or more")
        sets = 1 << (sets.bit_length() - 1)
        raw, slots = view.cast("B"), sets * _WAYS
        self._tags = raw[: slots * _TAG_BYTES].cast("Q")
        self._stamps = raw[slots * _TAG_BYTES : slots * _SLOT_BYTES].cast("I")
        self._mask = sets - 1
        self._now_s = now_s
        self._horizons: dict[tuple[str, int], tuple[float, float]] = {}
        """For an engine: what age its cache does not reach, and until when that is believed."""

    def known(self, prefix: Prefix, engine: EngineView) -> Known:
        """The longest beginning of a prompt that the engine is thought to have cached.

        Nothing for an engine that keeps no cache, or does not tell its block size.
        """
        block, hashes = engine.cached_block_tokens, prefix.hashes
        if not block or not hashes:
            return NOTHING
        tags, mask, own = self._tags, self._mask, number_of(engine.name, engine.generation)

        def is_missing(one: int) -> bool:
            tag = one ^ own
            start = (tag & mask) * _WAYS
            return tag not in tags[start : start + _WAYS].tolist()

        # Who has a chunk has had all before it: looked for by halves. Where the table has lost one in between, that may
        # find less than there is.
        known = bisect_left(hashes, True, key=is_missing)
        now_s = self._now_s()
        horizon_s = self._horizon_s(engine, now_s)
        # beginnings are used whenever what follows them is, so the last are the oldest
        while known and (age_s := self._age_s(hashes[known - 1] ^ own, now_s)) >= horizon_s:
            known -= 1
        if not known:
            return NOTHING
        tokens = min(known * CHUNK_TOKENS, prefix.prompt_tokens - 1) // block * block
        return Known(max(0, tokens), age_s)

    def cached_tokens(self, prefix: Prefix, engine: EngineView) -> int:
        """Tokens of the longest beginning that the engine is thought to have cached; see ``known``."""
        return self.known(prefix, engine).tokens

    def learn(self, prefix: Prefix, engine: EngineView, since: int = 0) -> None:
        """Notes that the engine has computed a prompt, or has been handed it, and has it in its cache.

        Args:
            since: chunks before this one have been noted just now.
        """
        if not engine.cached_block_tokens:
            return
        tags, stamps, mask, own = self._tags, self._stamps, self._mask, number_of(engine.name, engine.generation)
        now = int(self._now_s()) + 1  # 0 is an empty slot's
        for one in prefix.hashes[since:]:
            tag = one ^ own
            start = (tag & mask) * _WAYS
            ways = tags[start : start + _WAYS].tolist()
            if tag in ways:
                stamps[start + ways.index(tag)] = now
            else:
                ages = stamps[start : start + _WAYS].tolist()
                place = start + ages.index(min(ages))
                tags[place] = tag
                stamps[place] = now

    async def learn_in_turns(self, prefix: Prefix, engine: EngineView) -> None:
        """As ``learn``; of a long prompt in pieces, between which others have their turns."""
        hashes = prefix.hashes
        for since in range(0, len(hashes), _LEARNT_AT_ONCE):
            if since:
                await asyncio.sleep(0)
            self.learn(replace(prefix, hashes=hashes[since : since + _LEARNT_AT_ONCE]), engine)

    def correct(self, engine: EngineView, expected: Known, cached_tokens: int) -> None:
        """Holds what was expected of an engine against what it says itself.

        Less than half is a wrong table, not another way of counting. The engine has computed the prompt by then, so
        that there is nothing to drop of this prompt; but what else is as old as that was, it has evicted as well.

        Args:
            expected: what ``known`` said when the engine was chosen. Not what it would say now, which other requests
                may have added to. What the engine had told itself says nothing about this table.
            cached_tokens: of the same prompt, as the engine has told.
        """
        if not expected.told and cached_tokens * 2 < expected.tokens:
            until_s = self._now_s() + _DOUBTS_S
            self._horizons[engine.name, engine.generation] = max(_LEAST_HORIZON_S, expected.age_s), until_s

    def _horizon_s(self, engine: EngineView, now_s: float) -> float:
        horizon_s, until_s = self._horizons.get((engine.name, engine.generation), (float("inf"), 0.0))
        return horizon_s if now_s < until_s else float("inf")

    def _age_s(self, tag: int, now_s: float) -> float:
        start = (tag & self._mask) * _WAYS
        ways = self._tags[start : start + _WAYS].tolist()
        if tag not in ways:  # another process has just written over it
            return float("inf")
        return max(0.0, now_s - (self._stamps[start + ways.index(tag)] - 1))


@lru_cache(4096)
def number_of(name: str, generation: int) -> int:
    """Stands for an engine as it was started, in every process alike."""
    said = f"{name}\0{generation}".encode()
    return int.from_bytes(blake2b(said, digest_size=_HASH_BYTES).digest(), "little")
