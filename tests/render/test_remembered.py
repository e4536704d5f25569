"""Messages are parsed once, if they are text and nothing else, and always come to the same."""

from __future__ import annotations

import pytest

from trivet.render.remembered import Remembered, remember_messages

HI = {"role": "user", "content": "Hi"}


class Parse:
    """Stands for vLLM's, and counts."""

    def __init__(self, **more):
        self.asked = []
        self.more = more

    def __call__(self, message, mm_tracker, content_format, interleave_strings, mm_processor_kwargs=None):
        self.asked.append(message)
        return [{"role": message["role"], "content": f"{content_format}: {message['content']}", **self.more}]


def ask(remembered, message, content_format="string", *, interleave=False):
    return remembered(message, None, content_format, interleave_strings=interleave, mm_processor_kwargs=None)


def test_the_same_message_is_parsed_once():
    parse = Parse()
    remembered = Remembered(parse)
    first, second = ask(remembered, dict(HI)), ask(remembered, dict(HI))
    assert first == second == [{"role": "user", "content": "string: Hi"}]
    assert len(parse.asked) == 1


def test_what_is_done_to_an_answer_is_not_remembered():
    remembered = Remembered(Parse())
    for _ in range(3):
        (answer,) = ask(remembered, HI)
        assert answer == {"role": "user", "content": "string: Hi"}
        answer["content"] = "changed"
        answer["tool_calls"] = []


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Hi "},
        {"role": "user", "content": "Hi", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "Hi", "tool_calls": []},
        {"role": "tool", "content": "Hi", "tool_call_id": "1"},
    ],
)
def test_other_messages_are_parsed_by_themselves(other):
    parse = Parse()
    remembered = Remembered(parse)
    ask(remembered, HI)
    ask(remembered, other)
    assert parse.asked == [HI, other]


def test_the_format_counts():
    parse = Parse()
    remembered = Remembered(parse)
    assert ask(remembered, HI, "string") != ask(remembered, HI, "openai")
    ask(remembered, HI, interleave=True)
    assert len(parse.asked) == 3


def test_what_has_more_than_text_in_it_is_not_kept():
    """A copy would share it."""
    parse = Parse(tools=[{}])
    remembered = Remembered(parse)
    ask(remembered, HI)
    ask(remembered, HI)
    assert len(parse.asked) == 2


def test_an_error_is_nobodys_but_its_own():
    def parse(message, *others, **more):
        raise ValueError("no such role")

    remembered = Remembered(parse)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such role"):
            ask(remembered, HI)
    assert remembered.characters == 0


def test_no_more_is_kept_than_allowed():
    parse = Parse()
    remembered = Remembered(parse, 10_000)
    for number in range(200):
        ask(remembered, {"role": "user", "content": str(number) * 100})
        assert remembered.characters <= 10_000
    assert remembered.characters > 8_000
    asked = len(parse.asked)
    ask(remembered, {"role": "user", "content": "199" * 100})
    assert len(parse.asked) == asked


def test_one_that_is_larger_than_all_is_not_kept_and_drives_out_nothing():
    parse = Parse()
    remembered = Remembered(parse, 2000)
    ask(remembered, HI)
    ask(remembered, {"role": "user", "content": "x" * 5000})
    ask(remembered, HI)
    assert len(parse.asked) == 2


def test_vllms_own_is_known_here(frontend):
    from vllm.renderers.hf import parse_chat_messages

    remember_messages(parse_chat_messages)
    assert isinstance(parse_chat_messages.__globals__["_parse_chat_message_content"], Remembered)


def test_a_parser_that_is_not_known_is_left_alone(caplog):
    names = {"_parse_chat_message_content": lambda message: []}
    before = dict(names)
    exec("def parse_chat_messages(messages): return []", names)
    remember_messages(names["parse_chat_messages"])
    assert names["_parse_chat_message_content"] is before["_parse_chat_message_content"]
    assert "not known here" in caplog.text
