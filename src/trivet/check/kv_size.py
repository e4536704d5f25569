"""How many bytes of KV a prompt comes to, and how long they take over a link: arithmetic, without an engine.

One layer of attention keeps ``KV heads x (key size + value size) x bytes of an element`` a token (vLLM 0.32,
``v1/kv_cache_interface.py``: ``AttentionSpec.page_size_bytes`` is that for the tokens of a block). Latent attention
(MLA) keeps one vector, ``kv_lora_rank + qk_rope_head_dim`` elements (``MLAAttentionSpec``). Layers with a state keep
one of the same size for a sequence of any length (``MambaSpec``). Llama-3.1-70B in bfloat16: 80 layers x 8 heads x
(128 + 128) x 2 bytes = 327,680 bytes a token.

What moves is whole blocks, as NixlConnector takes them (``nixl/base_scheduler.py``, ``get_exchange_clipped_blocks``):

- full attention: every block that the prompt touches.
- sliding window: the blocks that decode asks for, which hold the window of the next token (``SlidingWindowManager.
  get_num_skipped_tokens``): at most one more than the window fills. That is so with the hybrid KV cache manager, which
  vLLM leaves on with a connector that can have it (NixlConnector, MooncakeConnector and TrivetConnector can; otherwise
  vLLM turns it off, ``config/vllm.py``). Without it every layer is kept, and moved, whole.
- local attention in chunks: whole as well, as vLLM turns the manager off for such models
  (``VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE`` is off).
- a state: once, at the prompt's last token but one, which decode computes again (``_prefill_backoff``). vLLM makes the
  blocks of the attention beside it so large that one holds a state (``Platform._align_hybrid_block_size``).

A draft model's cache (MTP, EAGLE) comes on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trivet.check.kv_formats import cache_dtype, element_bytes, head_bytes, is_one_byte, latent_bytes, model_dtype
from trivet.check.kv_layers import Cached, Kind, ModelLayers, divides, layers_of
from trivet.check.model_config import Config, read_config
from trivet.errors import TrivetError

__all__ = ["DEFAULT_BLOCK_TOKENS", "KvSize", "Layers", "read_config", "size_of"]

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's ``--block-size`` on CUDA (``CacheConfig.DEFAULT_BLOCK_SIZE``)."""
LATENT_BLOCK_TOKENS = 64
"""The same with MLA, whose kernels take no smaller one (FlashMLA; FlashInfer's take 32, Cutlass' 128)."""

_SMALLEST_KERNEL_BLOCK = 16
_MLA_STATE_BLOCK = 128
"""vLLM aligns blocks of MLA beside a state to this (``Platform._align_hybrid_block_size``)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that keep the same. Bytes are those of one layer."""

    kind: Kind
    count: int
    bytes_per_token: int = 0
    """One copy of the whole model's."""
    rank_bytes_per_token: int = 0
    """What one TP rank keeps: KV heads fewer than ranks, and latent vectors, are kept by several."""
    window_tokens: int | None = None
    state_bytes: int = 0
    rank_state_bytes: int = 0
    block_tokens: int = 0
    """Tokens of a block; 0 where none are kept."""
    rank_block_bytes: int = 0
    """Bytes of a block in one TP rank, with what vLLM pads it by."""

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to move."""
        return bool(self.rank_bytes_per_token or self.rank_state_bytes)


@dataclass(frozen=True, slots=True)
class KvSize:
    """What the KV of a model comes to, as engines with these settings keep and move it."""

    model_type: str
    layers: tuple[Layers, ...]
    tp: int
    block_tokens: int
    """Tokens of a block; more than was asked for where a block must hold a state. See ``Layers.block_tokens``."""
    dtype: str
    kv_cache_dtype: str
    """``auto`` resolved."""
    is_hybrid: bool
    """Whether layers with a window keep only that (vLLM's hybrid KV cache manager)."""
    notes: tuple[str, ...] = ()
    """What the config does not say for certain, and what was taken instead."""

    @property
    def bytes_per_token(self) -> int:
        """One copy of the model's, all layers; of a token that every window still holds."""
        return sum(one.count * one.bytes_per_token for one in self.layers)

    @property
    def rank_bytes_per_token(self) -> int:
        """What one TP rank keeps of a token."""
        return sum(one.count * one.rank_bytes_per_token for one in self.layers)

    @property
    def state_bytes(self) -> int:
        """One copy of the states of a sequence."""
        return sum(one.count * one.state_bytes for one in self.layers)

    def rank_bytes_of(self, prompt_tokens: int, *, with_padding: bool = False) -> int:
        """Bytes of a prompt that one TP rank takes over; see ``bytes_of``."""
        if prompt_tokens < 0:
            raise ValueError("a prompt has no fewer than no tokens")
        if prompt_tokens == 0:
            return 0
        counts = self._moved_counts() if with_padding else {one: one.count for one in self.layers}
        return sum(
            counts[one] * (self.blocks_of(one, prompt_tokens) * one.rank_block_bytes + one.rank_state_bytes)
            for one in self.layers
        )

    def bytes_of(self, prompt_tokens: int, *, with_padding: bool = False) -> int:
        """Bytes of a prompt that all TP ranks of decode take over together, none of it being cached there.

        Args:
            prompt_tokens: of the whole prompt.
            with_padding: as NixlConnector counts. It reads each block in every region of memory; where groups of
                layers are of unlike sizes (``KvSize.padding_layers``), some of these hold none of the block's layers.
        """
        return self.tp * self.rank_bytes_of(prompt_tokens, with_padding=with_padding)

    def transfer_s(self, prompt_tokens: int, link_gbps: float) -> float:
        """Seconds that the prompt's KV takes over a link of so many gigabits (10^9 bits) a second, at its full rate."""
        if link_gbps <= 0:
            raise ValueError("a link carries something")
        return self.bytes_of(prompt_tokens) * 8 / (link_gbps * 1e9)

    def ttft_share(self, prompt_tokens: int, link_gbps: float, prefill_s: float) -> float:
        """Part of the time to first token that the transfer takes if it begins when prefill ends, 0 to 1."""
        transfer_s = self.transfer_s(prompt_tokens, link_gbps)
        whole_s = prefill_s + transfer_s
        return transfer_s / whole_s if whole_s > 0 else 0.0

    def blocks_of(self, layers: Layers, prompt_tokens: int) -> int:
        """Blocks that one of these layers hands over for a prompt."""
        if not layers.rank_bytes_per_token:
            return 0
        # decode computes the last token again beside a state
        tokens = prompt_tokens - 1 if prompt_tokens > 1 and self._has_state() else prompt_tokens
        blocks = -(-tokens // layers.block_tokens)
        if layers.window_tokens is None or not self.is_hybrid:
            return blocks
        if layers.kind is Kind.CHUNKED:
            skipped = tokens // layers.window_tokens * layers.window_tokens
        else:
            skipped = max(0, tokens - layers.window_tokens + 1)
        return blocks - skipped // layers.block_tokens

    @property
    def padding_layers(self) -> int:
        """Layers' worth of memory beyond the model's that NixlConnector moves with blocks of unlike groups."""
        counts = self._moved_counts()
        return sum(counts[one] - one.count for one in self.layers)

    def _has_state(self) -> bool:
        return any(one.rank_state_bytes for one in self.layers)

    def _moved_counts(self) -> dict[Layers, int]:
        """Regions that a block of these layers is read from, over all groups of them.

        vLLM's ``_get_kv_cache_groups_uniform_page_size`` makes groups of equal size, of which the last ones may be
        short; NixlConnector's ``_compute_desc_ids`` reads a group's block from all regions that two groups share.
        """
        counts = {one: one.count for one in self.layers}
        kinds = _by_kind(self.layers, self.is_hybrid)
        if len(kinds) < 2 or any(len(same) > 1 for same in kinds.values()):
            return counts  # one group, or pages of unlike sizes, which vLLM packs
        totals = [same[0].count for same in kinds.values()]
        size = min(totals) if max(totals) >= min(totals) * 1.5 else max(totals)
        groups = {same[0]: _groups(same[0].count, size) for same in kinds.values()}
        widths = sorted((width for each in groups.values() for width in each), reverse=True)
        shared = widths[0] if self._has_state() else widths[1]
        states = max((width for one, each in groups.items() if one.state_bytes for width in each), default=0)
        for one, each in groups.items():
            counts[one] = sum(states if one.state_bytes else max(width, shared) for width in each)
        return counts

    def facts(
        self, prompt_tokens: int | None = None, link_gbps: float | None = None, prefill_s: float | None = None
    ) -> dict[str, Any]:
        """As ``--json`` writes it; what a prompt, a link and the seconds of prefill say, where they are given."""
        told: dict[str, Any] = {
            "model_type": self.model_type,
            "kv_bytes_per_token": self.bytes_per_token,
            "kv_bytes_per_token_per_rank": self.rank_bytes_per_token,
            "state_bytes": self.state_bytes,
            "tp": self.tp,
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "layers": [_facts(one) for one in self.layers],
            "notes": list(self.notes),
        }
        if prompt_tokens is None:
            return told
        told["prompt_tokens"] = prompt_tokens
        told["kv_bytes"] = self.bytes_of(prompt_tokens)
        told["kv_bytes_per_rank"] = self.rank_bytes_of(prompt_tokens)
        if link_gbps is not None:
            told["link_gbps"] = link_gbps
            told["transfer_s"] = self.transfer_s(prompt_tokens, link_gbps)
            if prefill_s is not None:
                told["prefill_s"] = prefill_s
                told["transfer_share_of_ttft"] = self.ttft_share(prompt_tokens, link_gbps, prefill_s)
        return told


def _by_kind(layers: Iterable[Layers], is_hybrid: bool) -> dict[tuple[Any, ...], list[Layers]]:
    """Layers that vLLM's cache manager may put into one group: those that need blocks for the same tokens."""
    kinds: dict[tuple[Any, ...], list[Layers]] = {}
    for one in layers:
        if one.rank_state_bytes:
            kinds.setdefault((Kind.STATE,), []).append(one)
        elif one.rank_bytes_per_token and is_hybrid and one.window_tokens is not None:
            kinds.setdefault((one.kind, one.window_tokens), []).append(one)
        elif one.rank_bytes_per_token:
            kinds.setdefault((Kind.FULL,), []).append(one)
    return kinds


def _groups(layers: int, size: int) -> list[int]:
    """Layers of each group: dealt out in turn, as ``layers[i::groups]``."""
    groups = -(-layers // size)
    return [len(range(index, layers, groups)) for index in range(groups)]


def _facts(layers: Layers) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": str(layers.kind), "count": layers.count}
    if layers.rank_bytes_per_token:
        told["block_tokens"] = layers.block_tokens
        told["bytes_per_token"] = layers.bytes_per_token
        told["bytes_per_token_per_rank"] = layers.rank_bytes_per_token
    if layers.window_tokens is not None:
        told["window_tokens"] = layers.window_tokens
    if layers.state_bytes:
        told["state_bytes"] = layers.state_bytes
        told["state_bytes_per_rank"] = layers.rank_state_bytes
    return told


def size_of(
    config: Config,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    tp: int = 1,
    block_size: int | None = None,
    state_dtype: str = "auto",
    is_hybrid: bool | None = None,
) -> KvSize:
    """What the KV of a model comes to.

    Args:
        config: what its ``config.json`` holds.
        dtype: as engines are given it (``--dtype``).
        kv_cache_dtype: as engines are given it (``--kv-cache-dtype``).
        tp: tensor-parallel ranks of each engine. Pipeline stages change no sum.
        block_size: tokens of a block (``--block-size``); None: what vLLM takes on CUDA.
        state_dtype: of a recurrent matrix (``--mamba-ssm-cache-dtype``).
        is_hybrid: whether the hybrid KV cache manager is on; None: as vLLM does with a connector that can have it.

    Raises:
        TrivetError: the architecture is not known here, the config lacks what the sizes follow from, or vLLM would
            refuse these settings.
    """
    model = layers_of(config)
    divides(model, tp)
    notes = list(model.notes)
    if block_size is None:
        is_latent = any(one.kind is Kind.LATENT for one in model.cached)
        block_size = LATENT_BLOCK_TOKENS if is_latent else DEFAULT_BLOCK_TOKENS
    elif block_size < 1:
        raise TrivetError(f"blocks have {block_size} tokens", mend="give one or more")
    has_chunks = any(one.kind is Kind.CHUNKED for one in model.cached)
    has_state = any(one.state is not None for one in model.cached)
    if is_hybrid is None:
        is_hybrid = not has_chunks
        if has_chunks:
            notes.append("local attention in chunks: vLLM turns its hybrid KV cache manager off, all layers move whole")
    elif not is_hybrid and has_state:
        raise TrivetError(
            f"vLLM does not run {model.model_type}, which has layers with a state, without its hybrid KV cache manager",
            mend="leave --disable-hybrid-kv-cache-manager out",
        )
    resolved = model_dtype(config, dtype, notes)
    measure = _Measure(resolved, _cache_dtype(config, kv_cache_dtype, model, notes), state_dtype, tp)
    layers = tuple(_counted(model, measure, notes))
    if any(one.kind is Kind.SHARED for one in layers):
        shared = sum(one.count for one in layers if one.kind is Kind.SHARED)
        notes.append(f"{shared} layers use the cache of an earlier one")
    if any(one.rank_bytes_per_token * tp > one.bytes_per_token for one in layers):
        notes.append(f"each of {tp} TP ranks takes a copy of its own of what cannot be divided among them")
    block_tokens = _block_tokens(layers, block_size, notes)
    return KvSize(
        model.model_type,
        _in_blocks(layers, block_tokens, is_hybrid),
        tp,
        block_tokens,
        resolved,
        measure.kv_cache_dtype if measure.kv_cache_dtype != "auto" else resolved,
        is_hybrid,
        tuple(notes),
    )


def _cache_dtype(config: Config, given: str, model: ModelLayers, notes: list[str]) -> str:
    """As given or resolved, but for sparse attention, which has formats of its own."""
    resolved = cache_dtype(config, given, notes)
    if all(one.kind is not Kind.INDEXER for one in model.cached):
        return resolved
    if is_one_byte(resolved):
        notes.append(
            "sparse MLA in fp8 taken as fp8_ds_mla (FlashMLA, Hopper); FlashInfer on Blackwell keeps plain fp8"
        )
        return "fp8_ds_mla"
    if resolved == "auto" and model.model_type == "glm_moe_dsa":
        notes.append("vLLM keeps this model's KV in fp8 on Blackwell (SM 10.x) unless --kv-cache-dtype says otherwise")
    return resolved


def _counted(model: ModelLayers, measure: _Measure, notes: list[str]) -> list[Layers]:
    kept = _kept_in_dtype(model, measure, notes)
    alike = Counter(
        measure.layer(one, "auto" if index in kept else measure.kv_cache_dtype)
        for index, one in enumerate(model.cached)
    )
    return [replace(one, count=count) for one, count in alike.items()]


def _kept_in_dtype(model: ModelLayers, measure: _Measure, notes: list[str]) -> frozenset[int]:
    """vLLM leaves the first and last two layers out of TurboQuant (``get_boundary_skip_layers``), but in hybrids."""
    if not measure.kv_cache_dtype.startswith("turboquant") or any(one.state is not None for one in model.cached):
        return frozenset()
    layers = len(model.cached)
    notes.append("turboquant: the first and last two layers stay in the model's dtype; vLLM may pad blocks beyond this")
    return frozenset({*range(min(2, layers)), *range(max(0, layers - 2), layers)})


@dataclass(frozen=True, slots=True)
class _Measure:
    """Bytes of what layers keep, in given dtypes and by a number of ranks."""

    dtype: str
    kv_cache_dtype: str
    state_dtype: str
    tp: int

    def layer(self, one: Cached, kept_in: str) -> Layers:
        """One layer."""
        if one.state is not None:
            matrix = self.state_dtype if self.state_dtype != "auto" else one.state.matrix_dtype or self.dtype
            sizes = [
                one.state.conv_elements(tp) * element_bytes(self.dtype)
                + one.state.matrix_elements // tp * element_bytes(matrix)
                for tp in (1, self.tp)
            ]
            return Layers(one.kind, 1, state_bytes=sizes[0], rank_state_bytes=sizes[1])
        if not one.kv_heads:
            return Layers(one.kind, 1)
        if one.kind is Kind.INDEXER:
            size = one.key_dim  # already bytes
        elif one.kind is Kind.LATENT:
            size = latent_bytes(one.key_dim, kept_in, self.dtype)
        else:
            size = head_bytes(one.key_dim, one.value_dim, kept_in, self.dtype)
        heads = max(1, one.kv_heads // self.tp)
        return Layers(one.kind, 1, one.kv_heads * size, heads * size, one.window_tokens)


def _block_tokens(layers: tuple[Layers, ...], block_size: int, notes: list[str]) -> int:
    """Tokens of a block: what was asked for, or the least with which a block of attention holds a state."""
    state = max((one.rank_state_bytes for one in layers), default=0)
    pages = {one.rank_bytes_per_token for one in layers if one.rank_bytes_per_token}
    if state and pages:
        least = _MLA_STATE_BLOCK if any(one.kind is Kind.LATENT for one in layers) else _SMALLEST_KERNEL_BLOCK
        align = max(block_size, least)
        tokens = align * -(-state // (align * max(pages)))
        tokens = -(-tokens // _SMALLEST_KERNEL_BLOCK) * _SMALLEST_KERNEL_BLOCK
        if tokens > block_size:
            notes.append(f"blocks of {tokens} tokens: vLLM makes them as large as a layer's state")
            return tokens
    return block_size


def _in_blocks(layers: tuple[Layers, ...], block_tokens: int, is_hybrid: bool) -> tuple[Layers, ...]:
    """Gives each its blocks. In several groups all have the same bytes: vLLM's ``unify_kv_cache_spec_page_size``.

    Layers that keep fewer bytes a token get more tokens in a block, or a padded one where that does not come out even.
    """
    largest = block_tokens * max((one.rank_bytes_per_token for one in layers), default=0)
    is_unified = len(_by_kind(layers, is_hybrid)) > 1
    made = []
    for one in layers:
        block_bytes = block_tokens * one.rank_bytes_per_token
        if not block_bytes:
            made.append(one)
        elif not is_unified:
            made.append(replace(one, block_tokens=block_tokens, rank_block_bytes=block_bytes))
        elif largest % block_bytes == 0:
            tokens = block_tokens * (largest // block_bytes)
            made.append(replace(one, block_tokens=tokens, rank_block_bytes=largest))
        else:
            made.append(replace(one, block_tokens=block_tokens, rank_block_bytes=largest))
    return tuple(made)
