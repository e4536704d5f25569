"""Which requests can be rendered elsewhere: those of which nothing but token ids is needed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.render.portable import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, Local, Portable, look, texts_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "role", "messages", "input", "output", "prompt", "system"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=15,
)
MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "input_image", "image_url": "data:,"},
    {"type": "image", "source": {}},
    {"type": "document", "source": {}},
    {"type": "input_audio", "input_audio": {}},
    {"type": "audio_url", "audio_url": {}},
    {"type": "video_url", "video_url": {}},
    {"type": "input_file", "file_id": "f"},
    {"type": "prompt_embeds", "prompt_embeds": ""},
    {"type": "of the future"},
    {"image_url": "data:,"},
    {"type": ["text"], "text": "Hi"},
    {"type": None, "text": "Hi"},
]
"""Parts of content that are more than text, or may be."""


def asked(path: str, **body: Any) -> Portable | Local:
    return look(path, json.dumps(body).encode())


def conversation(path: str, content: Any) -> Portable | Local:
    field = "input" if path == RESPONSES else "messages"
    return asked(path, **{field: [{"role": "user", "content": content}]})


@given(st.sampled_from(PATHS), JSON)
def test_whatever_a_body_is_there_is_an_answer(path, value):
    found = look(path, json.dumps(value).encode())
    assert isinstance(found, Local) or found.prompts >= 1


@given(st.sampled_from(PATHS), st.binary(max_size=20))
def test_bytes_that_are_no_json_are_for_vllm_to_refuse(path, body):
    assert isinstance(look(path, b"{" + body), Local)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("part", MEDIA, ids=json.dumps)
@pytest.mark.parametrize("depth", range(3))
def test_what_is_more_than_text_stays_here_wherever_it_stands(path, part, depth):
    content: Any = [{"type": "text", "text": "a"}, part]
    for _ in range(depth):
        content = [{"type": "tool_result", "content": content}, {"type": "text", "text": "b"}]
    assert conversation(path, content) is Local.MEDIA
    assert asked(RESPONSES, input=[{"type": "function_call_output", "output": content}]) is Local.MEDIA
    assert asked(MESSAGES, system=content, messages=[{"role": "user", "content": "Hi"}]) is Local.MEDIA


def test_a_voice_in_a_message_stays_here():
    assert asked(CHAT, messages=[{"role": "assistant", "audio": {"id": "a"}}]) is Local.MEDIA


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("content", "last"),
    [
        ("Hi", ("Hi",)),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ("b",)),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}], ("a",)),
        (["a", "b"], ("b",)),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": {"type": "image"}}], ()),
        ([], ()),
        (None, ()),
        ("", ()),
    ],
)
def test_conversations_are_known_again_by_their_last_text(path, content, last):
    assert conversation(path, content) == Portable(1, last)


def test_texts_are_told_from_the_end():
    parts = [{"type": "text", "text": "c"}, "d", {"type": "tool_use"}]
    assert list(texts_of([{"content": "a"}, {"content": None}, {"role": "tool"}, {"content": parts}])) == [
        "d",
        "c",
        "a",
    ]


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("a", Portable(1, ("a",))),
        (["a"], Portable(1, ("a",))),
        (["a", "b", "a"], Portable(3, ("a", "b", "a"))),
        ([1, 2], Local.TOKEN_IDS),
        ([[1], [2]], Local.TOKEN_IDS),
        (["a", [1]], Local.TOKEN_IDS),
        ([], Local.INVALID),
        (None, Local.INVALID),
        ({"prompt": "a"}, Local.INVALID),
    ],
)
def test_prompts_of_a_completion(prompt, found):
    assert asked(COMPLETIONS, prompt=prompt) == found


def test_embeddings_are_no_text():
    assert asked(COMPLETIONS, prompt="a", prompt_embeds="AAAA") is Local.TOKEN_IDS


@pytest.mark.parametrize("field", ["echo", "return_prompt_text", "use_beam_search", "suffix", "truncate_prompt_tokens"])
@pytest.mark.parametrize(("value", "stays"), [(None, False), (False, False), (True, True), (0, True), ("", True)])
def test_what_is_asked_for_besides_ids_counts_unless_it_is_not_asked_for(field, value, stays):
    found = asked(COMPLETIONS, prompt="a", **{field: value})
    assert found == (Local.MORE_THAN_IDS if stays else Portable(1, ("a",)))


@pytest.mark.parametrize(
    ("thinking", "stays"),
    [({"type": "disabled"}, True), ({"type": "enabled", "budget_tokens": 9}, False), (None, False)],
)
def test_what_no_thinking_means_is_found_out_here(thinking, stays):
    body = {"messages": [{"role": "user", "content": "Hi"}], "thinking": thinking}
    assert asked(MESSAGES, **body) == (Local.MORE_THAN_IDS if stays else Portable(1, ("Hi",)))
