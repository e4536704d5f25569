"""Chats with images through vLLM's front end: what goes to engines, and what is refused.

That split answers are those of one engine: ``tests/e2e/test_images.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from helpers.token_engine import saying
from helpers.vision import (
    IMAGE_ID,
    asking,
    part,
    tokens_of,
    words,
    write_marking_model,
    write_vision_model,
)

FLAGS = ("--served-model-name", "tiny", "--max-model-len", "2048", "--enable-scale-out", "--dtype", "float32")
LIMITS = ("--limit-mm-per-prompt", '{"image": 2}', "--allowed-media-domains", "example.org")
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # torch, once, of memory that vLLM decodes from
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", weights=False)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def only_vision(serving, folder):
    async with serving(folder, *FLAGS, *LIMITS) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def vision(only_vision):
    """A model with images; what a test leaves under way is a fault."""
    only_vision.engine.reset()
    only_vision.engine.script = saying([5])
    yield only_vision
    await only_vision.engine.idle()
    assert only_vision.known() == []


async def chat(served: Any, *parts: dict[str, Any], **body: Any) -> dict[str, Any]:
    answer = await served.post("/v1/chat/completions", {"messages": asking(*parts), **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def wire(request: Any) -> dict[str, Any]:
    return json.loads(b"".join(request.features.encoded))


def pixels(request: Any, index: int = 0) -> Any:
    """The pixels of an image, as an engine reads them."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    return decode_mm_kwargs_item(wire(request)["kwargs_data"]["image"][index])["pixel_values"].data


async def test_images_go_to_engines_with_their_places_and_tensors(vision):
    answer = await chat(vision, words("Look at "), part(1), words(" and "), part(2, 168, 56))
    request = vision.engine.request
    first, second = request.features.items
    assert (first.length, second.length) == (tokens_of(), tokens_of(168, 56))
    for item in (first, second):
        assert set(request.token_ids[item.offset : item.offset + item.length]) == {IMAGE_ID}
    assert list(request.token_ids).count(IMAGE_ID) == first.length + second.length
    assert answer["usage"]["prompt_tokens"] == len(request.token_ids)
    assert wire(request)["mm_hashes"] == {"image": [first.name, second.name]}
    assert pixels(request).shape == (first.length * 4, 3, 14, 14)
    assert str(pixels(request).dtype) == "torch.float32"  # as engines have it, not as vLLM would choose here


async def test_an_image_that_was_seen_before_is_sent_again(vision):
    """vLLM's front end leaves out what it takes its one engine to have; here are several, and none is asked."""
    for _ in range(3):
        await chat(vision, part(3))
    one, two, three = vision.engine.requests
    assert one.features == two.features == three.features
    assert one.features.encoded


async def test_images_are_named_by_what_they_are(vision):
    """By nothing that a worker counts for itself: engines and tables know images of all workers by their names."""
    for seed in (4, 5, 4):
        await chat(vision, part(seed))
    names = [request.features.items[0].name for request in vision.engine.requests]
    assert names[0] == names[2] != names[1]


@pytest.mark.full
async def test_images_are_named_so_too_where_nothing_is_cached(vision, serving, folder):
    async with serving(folder, *FLAGS, "--mm-processor-cache-gb", "0", "--no-enable-prefix-caching") as uncached:
        uncached.engine.script = saying([5])
        for served in (uncached, uncached, vision):
            await chat(served, part(4))
        first, second = uncached.engine.requests
        assert first.features == second.features == vision.engine.request.features


async def test_the_choices_of_a_request_have_the_same_images(vision):
    answer = await chat(vision, part(6), n=3)
    assert len(answer["choices"]) == 3
    assert len({id(request.features) for request in vision.engine.requests}) == 1


async def test_a_conversation_keeps_its_images(vision):
    turn = asking(part(7), words("What is it?"))
    more = [*turn, {"role": "assistant", "content": "A trivet."}, *asking(words("And this?"), part(8))]
    for messages in (turn, more):
        assert (await vision.post("/v1/chat/completions", {"messages": messages})).status_code == 200
    first, second = vision.engine.requests
    assert second.features.items[0] == first.features.items[0]
    assert [pixels(second, index).shape for index in (0, 1)] == [pixels(first).shape] * 2


async def test_text_goes_as_text(vision):
    await chat(vision, words("What is a trivet?"))
    assert vision.engine.request.features is None


async def test_streams_have_images(vision):
    body = {"model": "tiny", "messages": asking(part(1)), "stream": True}
    async with vision.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert "[DONE]" in (await answer.aread()).decode()
    assert len(vision.engine.request.features.items) == 1


async def test_a_salt_goes_beside_images(vision):
    await chat(vision, part(1), cache_salt="pepper")
    assert vision.engine.request.cache_salt == "pepper"


REFUSED = [
    ("too many", [part(1), part(2), part(3)], 400, "At most 2 image(s) may be provided in one prompt"),
    ("no image", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], 400, "cannot identify"),
    ("a video", [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], 400, "video"),
    ("longer than the model", [part(1, 448, 448), words("word " * 2000)], 400, "context length"),
    ("a name of nothing", [{"type": "image_url", "image_url": None, "uuid": "unseen"}], 400, "data is not provided"),
]


@pytest.mark.parametrize(("parts", "status", "said"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
async def test_what_vllm_refuses_is_refused_in_its_words(vision, parts, status, said):
    answer = await vision.post("/v1/chat/completions", {"messages": asking(*parts)})
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert vision.engine.requests == []


async def test_files_of_the_gateways_machine_are_not_read(vision):
    """As in vLLM: without ``--allowed-local-media-path`` none is."""
    url = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
    with pytest.raises(RuntimeError, match="without `--allowed-local-media-path`"):
        await vision.post("/v1/chat/completions", {"messages": asking(url)})
    assert vision.engine.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1:9", "169.254.169.254", "example.org.evil"])
async def test_images_are_fetched_only_where_that_is_allowed(vision, host):
    url = {"type": "image_url", "image_url": {"url": f"http://{host}/latest/meta-data"}}
    answer = await vision.post("/v1/chat/completions", {"messages": asking(url)})
    assert (answer.status_code, "one of the allowed domains" in answer.text) == (400, True), answer.text


async def test_what_was_rendered_elsewhere_goes_on_as_it_is(vision):
    """vLLM's own code reads it from a client's body (``ServingTokens``); engines are sent the same again."""
    await chat(vision, words("Look: "), part(1), part(2, 56, 224))
    (request,) = vision.engine.requests
    body = {"token_ids": list(request.token_ids), "sampling_params": {"max_tokens": 1}, "features": wire(request)}
    answer = await vision.post("/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text
    again = vision.engine.requests[-1]
    assert again.features == request.features
    assert list(again.token_ids) == list(request.token_ids)
    for lacking in ({"kwargs_data": None}, {"kwargs_data": {"image": [None, None]}}):
        answer = await vision.post("/inference/v1/generate", body | {"features": wire(request) | lacking})
        assert (answer.status_code, "without its tensors" in answer.text) == (501, True)


async def test_what_is_rendered_for_others_has_the_images(vision):
    body = {"messages": asking(words("Look: "), part(1))}
    await chat(vision, *body["messages"][0]["content"])
    (request,) = vision.engine.requests
    for _ in range(2):
        answer = await vision.post("/v1/chat/completions/render", body)
        assert answer.status_code == 200, answer.text
        made = answer.json()
        assert made["token_ids"] == list(request.token_ids)
        assert {name: made["features"][name] for name in wire(request)} == wire(request)


async def test_a_model_of_text_refuses_images_as_vllm_does(served):
    answer = await served.post("/v1/chat/completions", {"messages": asking(part(1))})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert served.engine.requests == []


@pytest.mark.full
async def test_images_that_are_marked_out_are_told_without_their_marks(serving, tmp_path):
    async with serving(write_marking_model(tmp_path / "model"), *FLAGS) as marked:
        marked.engine.script = saying([5])
        await chat(marked, words("Look: "), part(1), part(2))
        (request,) = marked.engine.requests
        assert [item.length for item in request.features.items] == [16, 16]
        for item in request.features.items:
            assert set(request.token_ids[item.offset : item.offset + item.length]) == {IMAGE_ID}
            assert IMAGE_ID not in (request.token_ids[item.offset - 1], request.token_ids[item.offset + item.length])


async def test_adapters_that_come_with_a_kind_of_media_are_known(frontend, folder):
    """``--default-mm-loras``: the front end asks engines for the adapter of that kind."""
    flags = [str(folder), *FLAGS, "--enable-lora", "--default-mm-loras", '{"image": "/adapters/image"}']
    config = frontend.render_config(frontend.parse_flags(flags))
    assert config.lora_config.default_mm_loras == {"image": "/adapters/image"}
