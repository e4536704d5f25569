"""Images, videos and sounds of a prompt as ``/inference/v1/generate`` takes them (its field ``features``).

vLLM's front end has made tensors of them (``MultiModalFeatureSpec`` in ``vllm/multimodal/inputs.py``, in the order of
their places). Engines are sent the tensors, so that nothing is processed twice. The wire
(``vllm/entrypoints/scale_out/token_in_token_out/protocol.py``, ``mm_serde.py``; alike in vLLM 0.30 and 0.32) has one
list a modality, each as long as the others; an engine orders the items by their places again.

What is left out: ``mm_metadata``, the part of the tensors from which positions are counted (M-RoPE). An engine lays it
over the tensors (``merge_mm_kwargs_items``), and all of it is among them.

What the wire does not carry is ``is_embed``, which says for which of an item's tokens there are embeddings: some models
mark out images by tokens of text within the item. Where the marks stand around the embeddings, the item can be told
without them: an engine puts embeddings to the same tokens, and only its names for blocks are others, alike on all
engines. Not so where positions are counted from where an item begins, nor where marks stand between embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
import pybase64
from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.serial_utils import MsgpackEncoder

from trivet.render.contract import Features, Item

_INLINE = 2**62
"""Bytes up to which a tensor stands within the message: all of them, as in ``mm_serde.py``."""
_SLICE = 3 * 2**18
"""Bytes; a multiple of three becomes base64 without a filling, which stands at the end only."""
_EMBEDS = "prompt_embeds"
"""The modality under which vLLM keeps embeddings of text that stand within a chat."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An item with its tensors."""

    item: Item
    modality: str
    data: MultiModalKwargsItem


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be told of a model's items."""

    shortens: bool = False
    """They may be told without the marks around them."""
    refusal: str | None = None
    """Why nothing can be told of them, or None."""

    @classmethod
    def of(cls, model_config: Any) -> Rules:
        """Those of a model; ``vllm.config.ModelConfig``."""
        encodes = model_config.is_encoder_decoder
        return cls(
            shortens=not model_config.uses_mrope,  # which counts positions from where an item begins
            refusal="media for a model with an encoder of its own are not served by this gateway" if encodes else None,
        )


def placed(features: Sequence[MultiModalFeatureSpec], prompt_tokens: int, rules: Rules) -> list[Placed]:
    """The items of a prompt as the wire can say them.

    Args:
        features: as an ``EngineCoreRequest`` has them.
        rules: those of the model.

    Raises:
        GracefulHTTPError: the wire cannot say one of them, in words that name it.
    """
    found: list[Placed] = []
    end = 0
    for number, feature in enumerate(features, start=1):
        said = f"{feature.modality} (item {number} of the prompt)"
        if feature.modality == _EMBEDS:
            raise _refused("prompt embeddings are not served by this gateway")
        if rules.refusal is not None:
            raise _refused(rules.refusal)
        if feature.data is None:
            raise _refused(f"{said} comes without its tensors, which no engine is known to have")
        offset, length = _range(feature.mm_position, said, shortens=rules.shortens)
        if offset + length > prompt_tokens:
            raise _refused(f"{said} has no place among the prompt's tokens")
        if offset < end:
            raise _refused(f"{said} shares tokens with the item before it")
        end = offset + length
        item = Item(feature.mm_hash or feature.identifier, offset, length)
        found.append(Placed(item, feature.modality, feature.data))
    return found


def encode(items: Sequence[Placed]) -> Features:
    """Items ready to be sent. For megabytes of tensors this takes milliseconds: not for an event loop."""
    encoder = MsgpackEncoder(size_threshold=_INLINE)  # of this thread's: it keeps state while it encodes
    by_modality: dict[str, list[Placed]] = {}
    for one in items:
        by_modality.setdefault(one.modality, []).append(one)

    def said(of: Callable[[Item], Any]) -> dict[str, list[Any]]:
        return {modality: [of(one.item) for one in own] for modality, own in by_modality.items()}

    wire = {
        "mm_hashes": said(lambda item: item.name),
        "mm_placeholders": said(lambda item: {"offset": item.offset, "length": item.length}),
    }
    parts = [orjson.dumps(wire)[:-1], b',"kwargs_data":{']
    for modality, own in by_modality.items():
        parts += (orjson.dumps(modality), b":[")
        for one in own:
            (message,) = encoder.encode(one.data)
            parts += (b'"', *_base64(message), b'"', b",")  # nothing in it that JSON would escape
        parts[-1] = b"]"
        parts.append(b",")
    parts[-1] = b"}}"
    return Features(tuple(one.item for one in items), tuple(parts))


def _base64(message: bytes) -> Iterator[bytes]:
    """In slices, between which other threads have their turns."""
    view = memoryview(message)
    for start in range(0, len(view), _SLICE):
        yield pybase64.b64encode(view[start : start + _SLICE])


def _range(position: PlaceholderRange, said: str, *, shortens: bool) -> tuple[int, int]:
    """Offset and length of the tokens that there are embeddings for."""
    mask = position.is_embed
    if mask is None or bool(mask.all()):
        return position.offset, position.length
    places = mask.nonzero().flatten().tolist()
    if not places or places[-1] - places[0] + 1 != len(places) or not shortens:
        raise _refused(
            f"{said} is marked out by tokens of text, as this model has it, which engines cannot be told in token ids "
            "(is_embed); gateway.plane: text serves it"
        )
    return position.offset + places[0], len(places)


def _refused(message: str) -> GracefulHTTPError:
    return GracefulHTTPError(message, HTTPStatus.NOT_IMPLEMENTED)
