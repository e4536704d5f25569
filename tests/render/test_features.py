"""Images and the like on the wire, read back with vLLM's own code."""

import contextlib
import json
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.render.contract import Item


@pytest.fixture(scope="module")
def features(frontend):
    """``trivet.render.features``."""
    import trivet.render.features

    return trivet.render.features


@contextlib.contextmanager
def torch_unwarned():
    """torch warns once of memory that it may only read, which vLLM decodes from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@st.composite
def tensors(draw) -> Any:
    import torch

    kind = draw(st.sampled_from(["float32", "bfloat16", "float16", "int64", "uint8", "bool"]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = draw(st.integers(0, 1000))
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 255
    tensor = values.to(getattr(torch, kind))
    return tensor.mT if tensor.dim() > 1 and draw(st.booleans()) else tensor  # not as it lies in memory


@st.composite
def elements(draw) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalSharedField,
    )

    on_cpu = draw(st.booleans())
    field = draw(
        st.sampled_from(
            [
                MultiModalBatchedField(keep_on_cpu=on_cpu),
                MultiModalFlatField(slices=[slice(0, 4), slice(4, 9)], dim=0, keep_on_cpu=on_cpu),
                MultiModalFlatField(slices=[(slice(0, 4), slice(None, 2, None))], dim=1, keep_on_cpu=on_cpu),
                MultiModalSharedField(batch_size=2, keep_on_cpu=on_cpu),
            ]
        )
    )
    numbers = st.integers(-9, 2**40) | st.just(0.5)  # which some models have in the place of tensors
    data = draw(st.none() | tensors() | st.lists(tensors(), min_size=1, max_size=3) | numbers)
    return MultiModalFieldElem(data, field)


@st.composite
def prompts(draw) -> tuple[list[Any], int]:
    """The features of a prompt, and its length."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    made, at = [], 0
    for _ in range(draw(st.integers(1, 5))):
        offset = at + draw(st.integers(0, 5))
        length = draw(st.integers(1, 9))
        at = offset + length
        names = st.sampled_from(["pixel_values", "image_grid_thw", "audio"])
        data = MultiModalKwargsItem(draw(st.dictionaries(names, elements(), max_size=3)))
        name = draw(st.sampled_from(["a", "b", "\N{SNOWMAN} \"'\\"]))  # a client may choose it
        modality = draw(st.sampled_from(["image", "video", "audio"]))
        adapter = draw(st.sampled_from(["", "adapter:"]))
        made.append(MultiModalFeatureSpec(data, modality, adapter + name, PlaceholderRange(offset, length), name))
    return made, at + draw(st.integers(0, 5))


def received(encoded: Sequence[bytes], prompt_tokens: int) -> list[Any]:
    """What an engine makes of it: its server (``ServingTokens.serve_tokens``), then its ``InputProcessor``."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.multimodal.utils import argsort_mm_positions

    body = {"token_ids": [1] * prompt_tokens, "sampling_params": {}, "features": json.loads(b"".join(encoded))}
    sent = GenerateRequest.model_validate_json(json.dumps(body)).features
    with torch_unwarned():
        kwargs = mm_kwargs_from_features(sent)
    places = {
        modality: [PlaceholderRange(one.offset, one.length) for one in ranges]
        for modality, ranges in sent.mm_placeholders.items()
    }
    return [
        MultiModalFeatureSpec(
            kwargs[modality][index],
            modality,
            sent.mm_hashes[modality][index],
            places[modality][index],
            sent.mm_hashes[modality][index],
        )
        for modality, index in argsort_mm_positions(places)
    ]


def sent(features, items, prompt_tokens: int, *, shortens: bool = False) -> Any:
    return features.encode(features.placed(items, prompt_tokens, features.Rules(shortens)))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_engines_have_what_the_front_end_made(features, data):
    """Equal tensors of the same kinds and shapes, in fields of the same kind, in the order of their places."""
    asked, length = data.draw(prompts())
    made = sent(features, asked, length)
    came = received(made.encoded, length)
    assert made.items == tuple(Item(one.mm_hash, one.mm_position.offset, one.mm_position.length) for one in asked)
    assert [one.modality for one in came] == [one.modality for one in asked]
    assert [one.mm_hash for one in came] == [one.mm_hash for one in asked]
    assert [one.mm_position for one in came] == [one.mm_position for one in asked]
    for here, there in zip(asked, came, strict=True):
        assert here.data.keys() == there.data.keys()
        for name in here.data:
            assert same(here.data[name].data, there.data[name].data)
            assert fields(here.data[name]) == fields(there.data[name])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100, 300_000, 1_000_000])
def test_tensors_of_any_size_are_read_as_they_were(features, size):
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    pixels = torch.arange(size, dtype=torch.int32)
    data = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())})
    made = sent(features, [image(at(0, 1), data=data), image(at(1, 1), data=data)], 20)
    for one in received(made.encoded, 20):
        assert torch.equal(one.data["pixel_values"].data, pixels)
    assert max(len(one) for one in made.encoded) <= features._SLICE * 4 // 3


def same(here: Any, there: Any) -> bool:
    import torch

    if isinstance(here, list):
        return isinstance(there, list) and all(same(*pair) for pair in zip(here, there, strict=True))
    if not isinstance(here, torch.Tensor):
        return type(here) is type(there) and here == there
    return here.dtype == there.dtype and here.shape == there.shape and torch.equal(here, there)


def fields(element: Any) -> tuple[type, dict[str, Any]]:
    """A field's kind, and all that it says; ranges come back in lists."""

    def listed(value: Any) -> Any:
        return [listed(one) for one in value] if isinstance(value, list | tuple) else value

    return type(element.field), {name: listed(value) for name, value in vars(element.field).items()}


def image(position: Any, **changes: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

    values = {"data": MultiModalKwargsItem({}), "modality": "image", "identifier": "a", "mm_hash": "a"}
    return MultiModalFeatureSpec(mm_position=position, **values | changes)


def at(offset: int, length: int, mask: str | None = None) -> Any:
    """A place; a mask has an ``x`` where there is an embedding."""
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    return PlaceholderRange(offset, length, None if mask is None else torch.tensor([one == "x" for one in mask]))


@pytest.mark.parametrize(
    ("mask", "offset", "length"),
    [("xxxxx", 10, 5), (".xxx.", 11, 3), ("...xx", 13, 2), ("x....", 10, 1), ("..x..", 12, 1)],
)
def test_marks_around_embeddings_are_left_out(features, mask, offset, length):
    """Engines put the embeddings to the same tokens as with the mask."""
    position = at(10, 5, mask)
    made = sent(features, [image(position)], 20, shortens=True)
    assert made.items == (Item("a", offset, length),)
    (came,) = received(made.encoded, 20)
    assert came.mm_position.extract_embeds_range() == position.extract_embeds_range()
    assert came.mm_position.get_num_embeds() == position.get_num_embeds()
    for start in range(8, 17):  # a chunk of the prompt, and which embeddings it takes
        for end in range(start + 1, 18):
            assert taken(came.mm_position, start, end) == taken(position, start, end)


def taken(position: Any, start: int, end: int) -> dict[int, int]:
    """Which token of a chunk gets which embedding (``gather_mm_embeddings`` of vLLM's runners)."""
    first, last = max(start - position.offset, 0), min(end - position.offset, position.length)
    if first >= last:
        return {}
    low, high = position.get_embeds_indices_in_range(first, last)
    mask = [True] * position.length if position.is_embed is None else position.is_embed.tolist()
    tokens = [position.offset + index for index in range(first, last) if mask[index]]
    return dict(zip(tokens, range(low, high), strict=True))


MARKED = "image (item 1 of the prompt) is marked out by tokens of text"


@pytest.mark.parametrize("mask", ["xx.xx", ".x.x.", "....."])
def test_marks_between_embeddings_are_refused(features, mask):
    refused(features, [image(at(10, 5, mask))], MARKED, shortens=True)


@pytest.mark.parametrize("mask", [".xxx.", "xxxx.", ".xxxx"])
def test_marks_are_refused_where_positions_are_counted_from_them(features, mask):
    refused(features, [image(at(10, 5, mask))], MARKED, shortens=False)
    made = sent(features, [image(at(10, 5, "xxxxx"))], 20, shortens=False)
    assert made.items == (Item("a", 10, 5),)


def refused(features, items: list[Any], words: str, *, shortens: bool = True) -> None:
    with pytest.raises(features.GracefulHTTPError) as caught:
        features.placed(items, 20, features.Rules(shortens))
    assert str(caught.value).startswith(words)
    assert caught.value.http_status == 501


def test_an_item_without_tensors_is_refused_by_name(features):
    """A front end that takes its engine to have them leaves them out."""
    items = [image(at(0, 1)), image(at(3, 2), data=None, modality="video")]
    refused(features, items, "video (item 2 of the prompt) comes without its tensors")


def test_items_that_have_no_place_in_the_prompt_are_refused(features):
    refused(features, [image(at(0, 21))], "image (item 1 of the prompt) has no place among the prompt's tokens")
    assert sent(features, [image(at(0, 20))], 20).items == (Item("a", 0, 20),)


def test_items_that_share_tokens_are_refused(features):
    """A video with its sound, which vLLM's wire has no way to say."""
    items = [image(at(0, 5), modality="video"), image(at(4, 5), modality="audio")]
    refused(features, items, "audio (item 2 of the prompt) shares tokens with the item before it")


def test_embeddings_of_text_within_a_chat_are_prompt_embeddings(features):
    refused(features, [image(at(0, 5), modality="prompt_embeds")], "prompt embeddings are not served by this gateway")


def test_a_name_is_what_the_item_is_called_without_its_adapter(features):
    """The engine puts the adapter's name before it where that matters (``_get_mm_identifier``)."""
    assert sent(features, [image(at(0, 1), identifier="adapter:a")], 20).items == (Item("a", 0, 1),)
    assert sent(features, [image(at(0, 1), identifier="a", mm_hash=None)], 20).items == (Item("a", 0, 1),)


@pytest.mark.parametrize("mrope", [False, True])
def test_rules_are_the_models(features, mrope):
    rules = features.Rules.of(SimpleNamespace(uses_mrope=mrope, is_encoder_decoder=False))
    assert (rules.shortens, rules.refusal) == (not mrope, None)


def test_a_model_with_an_encoder_of_its_own_has_no_items_in_its_prompt(features):
    """Their places are in the encoder's prompt, and the wire has none."""
    rules = features.Rules.of(SimpleNamespace(uses_mrope=False, is_encoder_decoder=True))
    with pytest.raises(features.GracefulHTTPError, match="a model with an encoder of its own") as caught:
        features.placed([image(at(0, 5))], 20, rules)
    assert caught.value.http_status == 501
