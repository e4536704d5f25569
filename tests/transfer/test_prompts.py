from types import SimpleNamespace

import pytest

from transfer.schedulers import make_request
from trivet.transfer.messages import Open, decode, encode
from trivet.transfer.prompts import prompt_of


def prompt(ids, lora=None, *items):
    request = make_request("r", len(ids))
    request.prompt_token_ids, request.lora_request = ids, lora
    request.mm_features = [image(*item) for item in items]
    return prompt_of(request)


def image(name, offset=0, mm_hash=None):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 1), mm_hash)


def test_prompts_that_are_alike_have_the_same_word():
    assert prompt([1, 2, 3]) == prompt([1, 2, 3])
    assert decode(encode(Open("t", prompt([1] * 1000)))) == Open("t", prompt([1] * 1000))


@pytest.mark.parametrize(
    "other",
    [
        ([1, 2],),
        ([1, 2, 4],),
        ([3, 2, 1],),
        ([1, 2, 2**80],),
        ([1, 2, None],),
        ([1, 2, 3], SimpleNamespace(lora_name="l")),
        ([1, 2, 3], None, ("a",)),
    ],
)
def test_prompts_that_differ_have_another(other):
    assert prompt([1, 2, 3]) != prompt(*other)


IMAGES = ("a", 1), ("b", 2)


@pytest.mark.parametrize(
    "other", [(), (("a", 1),), (("b", 1), ("a", 2)), (("a", 0), ("b", 2)), (("c", 1), ("b", 2)), (("a", 1), ("a", 2))]
)
def test_images_are_part_of_a_prompt(other):
    """Prompts with other images may have the same tokens, and have other KV."""
    assert prompt([1, 2, 3], None, *IMAGES) == prompt([1, 2, 3], None, *IMAGES)
    assert prompt([1, 2, 3], None, *IMAGES) != prompt([1, 2, 3], None, *other)


def test_an_image_is_known_by_its_hash_whatever_an_adapter_makes_of_its_name():
    assert prompt([1], None, ("adapter:a", 0, "a")) == prompt([1], None, ("a", 0, "a"))


def test_names_that_an_engine_counts_for_itself_are_not_compared():
    """vLLM hashes no image where neither its processor's cache nor its prefix cache would ask for the hash."""
    from vllm.renderers.base import BaseRenderer

    def name(rank):
        config = SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=0),
        )
        renderer = SimpleNamespace(
            model_config=config,
            config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
            _validate_mm_uuids=lambda *_: None,
        )
        counts = SimpleNamespace(get_all_counts=lambda: {"image": 1})
        made = BaseRenderer._process_mm_uuids(renderer, {}, counts, {}, f"renderer{rank}-mm-{rank + 5}")
        return made["image"][0]

    assert name(0) != name(-1)
    assert prompt([1], None, (name(0),)) == prompt([1], None, (name(-1),)) != prompt([1])
