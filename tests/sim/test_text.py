"""Text and ids without a tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.sim import text


@given(st.text())
def test_text_comes_back(value):
    assert text.decode(text.encode(value)) == value.encode(errors="replace").decode()


@given(st.lists(st.integers(259, 1_000_258), max_size=20))
def test_answers_are_encoded_to_the_ids_they_were_made_of(ids):
    assert text.encode(text.decode(ids)) == ids


def test_the_scheme_is_as_documented():
    assert text.encode("aé") == [3 + 97, 3 + 0xC3, 3 + 0xA9]
    assert text.decode([0, 1, 2, 259, 260]) == " bababa bababe"
    assert text.encode(" bababa.") == [259, 3 + ord(".")]
    assert len(text.encode(" bababax")) == 8  # not a word: something follows
    assert text.decode([2_000_000]) == "<2000000>"


def test_a_chat_names_roles_and_joins_parts():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    assert text.chat_prompt(messages) == "<|system|>\nS\n<|user|>\nab\n<|assistant|>\n\n<|assistant|>\n"


@pytest.mark.parametrize("message", ["hi", {"content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}])
def test_what_is_no_text_message(message):
    with pytest.raises(ValueError, match=r"message is an object|takes text only"):
        text.chat_prompt([message])


def pieces(stream: text.TextStream, ids) -> tuple[list[str], str | None]:
    out = []
    for place, token in enumerate(ids):
        stopped = stream.add(token)
        out.append(stream.delta(finished=stopped is not None or place == len(ids) - 1))
        if stopped:
            return out, stopped
    return out, None


def test_a_character_comes_out_when_it_is_whole():
    assert pieces(text.TextStream(), text.encode("é!")) == (["", "é", "!"], None)
    assert pieces(text.TextStream(), text.encode("é")[:1]) == (["�"], None)


@given(st.text(alphabet="abc", max_size=30), st.text(alphabet="abc", min_size=1, max_size=3), st.booleans())
def test_a_stop_string_ends_the_text_wherever_it_comes(value, stop, include):
    out, stopped = pieces(text.TextStream([stop], include_stop=include), text.encode(value))
    before, found, _ = value.partition(stop)
    assert (stopped == stop) == bool(found)
    assert "".join(out) == before + (found if include else "")


def test_stop_strings_wait_for_the_least_tokens():
    stream = text.TextStream(["a"], after_tokens=2)
    assert pieces(stream, text.encode("aaab")) == (["a", "a", ""], "a")
