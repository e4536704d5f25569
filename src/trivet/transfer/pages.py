"""The paged KV cache of one worker, as rows of bytes.

vLLM gives each layer a view ``[blocks, heads, tokens, width]`` (0.30 to 0.32, ``v1/kv_cache_layout.py``) whose physical
order depends on the attention backend. A connector that moves whole blocks between equal engines need not know that
order: it is enough that a block of a layer is one run of bytes, which is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_WORD_BYTES = 8
_STRETCH = 512
"""Words of the rows that ``checksum`` sums by row and by column."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of the cache."""

    name: str
    group: int
    rows: torch.Tensor
    """``[blocks, words]`` of int64: row b is block b."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in this layer."""
        return self.rows.shape[1] * _WORD_BYTES


class Pages:
    """All layers, in the order of the model."""

    def __init__(self, layers: Sequence[Layer], block_tokens: Sequence[int]) -> None:
        """
        Args:
            block_tokens: tokens of a block, by cache group.
        """
        self.layers = tuple(layers)
        self.block_tokens = tuple(block_tokens)
        self.index = {layer.name: index for index, layer in enumerate(self.layers)}
        self.device = self.layers[0].rows.device
        self.largest_block_bytes = max(layer.block_bytes for layer in self.layers)

    @classmethod
    def of(cls, caches: Mapping[str, torch.Tensor], config: KVCacheConfig) -> Pages:
        """The pages that vLLM registers.

        Raises:
            ValueError: a block of a layer is not one run of bytes.
        """
        layers = []
        for group_id, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            for name in group.layer_names:
                own = getattr(spec, "kv_cache_specs", {}).get(name, spec)
                if name in caches:  # layers that share another's cache have none of their own
                    layers.append(Layer(name, group_id, _rows(name, caches[name], own.block_size)))
        if not layers:
            raise ValueError("TrivetConnector: the model has no KV cache")
        layers.sort(key=lambda layer: _order(layer.name))
        return cls(layers, [group.kv_cache_spec.block_size for group in config.kv_cache_groups])

    def bytes_of(self, layers: Sequence[int], blocks: int) -> int:
        """Bytes of ``blocks`` blocks in each of ``layers``."""
        return blocks * sum(self.layers[index].block_bytes for index in layers)

    def gather(self, layers: Sequence[int], blocks: torch.Tensor, into: torch.Tensor) -> None:
        """Copies blocks into contiguous memory, layer by layer, ordered on the current stream.

        Args:
            blocks: their ids, int64, on the cache's device.
            into: uint8, as many bytes as ``bytes_of`` says.
        """
        at = 0
        for index in layers:
            rows = self.layers[index].rows
            part = _part(into, at, len(blocks), rows.shape[1])
            torch.index_select(rows, 0, blocks, out=part)
            at += part.numel() * _WORD_BYTES

    def scatter(self, layers: Sequence[int], blocks: torch.Tensor, source: torch.Tensor) -> None:
        """Copies contiguous memory, as ``gather`` fills it, into blocks, ordered on the current stream."""
        at = 0
        for index in layers:
            rows = self.layers[index].rows
            part = _part(source, at, len(blocks), rows.shape[1])
            rows.index_copy_(0, blocks, part)
            at += part.numel() * _WORD_BYTES


def _part(memory: torch.Tensor, at: int, rows: int, words: int) -> torch.Tensor:
    return memory[at : at + rows * words * _WORD_BYTES].view(torch.int64).view(rows, words)


def checksum(memory: torch.Tensor) -> int:
    """A sum of 64-bit words, weighted by place, so that exchanged words and exchanged blocks show."""
    words = memory.view(torch.int64)
    whole = len(words) // _STRETCH * _STRETCH
    table = words[:whole].view(-1, _STRETCH)
    total = 0
    for factor, part in ((1, table.sum(1)), (3, table.sum(0)), (5, words[whole:])):
        weights = torch.arange(1, len(part) + 1, device=part.device)
        total ^= int((part * weights).sum() * factor)
    return total


def _rows(name: str, cache: torch.Tensor, block_tokens: int) -> torch.Tensor:
    if cache.ndim != 4:
        raise ValueError(
            f"TrivetConnector: the cache of {name} has the shape {tuple(cache.shape)}, not four dimensions"
        )
    blocks, *inner = cache.shape
    width = cache.element_size()
    run = 1
    for size, stride in sorted(zip(inner, cache.stride()[1:], strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != run:
            raise ValueError(
                f"TrivetConnector: a block of {name} is not one run of memory (strides {cache.stride()} of "
                f"{tuple(cache.shape)}); choose another VLLM_KV_CACHE_LAYOUT"
            )
        run *= size
    step = cache.stride(0)
    if (split := block_tokens // cache.shape[2]) > 1:  # the backend's blocks are parts of the scheduler's
        if step != run:
            raise ValueError(f"TrivetConnector: the parts of a block of {name} lie apart from each other")
        blocks, run, step = blocks // split, run * split, step * split
    if run * width % _WORD_BYTES or step * width % _WORD_BYTES or cache.storage_offset() * width % _WORD_BYTES:
        raise ValueError(f"TrivetConnector: a block of {name} has {run * width} bytes, which are no 8-byte words")
    return torch.empty(0, dtype=torch.int64, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * width // _WORD_BYTES,
        (blocks, run * width // _WORD_BYTES),
        (step * width // _WORD_BYTES, 1),
    )


def _order(name: str) -> tuple[list[int], str]:
    """Layers are numbered in their names (``model.layers.7.self_attn.attn``)."""
    return [int(number) for number in re.findall(r"\d+", name)], name
