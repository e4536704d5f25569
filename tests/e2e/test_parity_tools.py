"""Tool calls and reasoning, parsed from scripted answers: whole and streamed as by ``vllm serve``."""

import json

import pytest

from helpers.parity import IS_OLD, chat, table

pytestmark = pytest.mark.e2e

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}  # without parameters
TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
CALL_OF_CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINKING = {"chat_template_kwargs": {"thinking": True}}
TEXTS = ("reasoning", "content")
"""With stop strings vLLM holds text back, but not its token ids, by which a stream's reasoning is parsed."""
NAMED = {"type": "function", "function": {"name": "weather"}}


def calling(says: str | tuple = (), /, **more):
    return chat(says, **({"tools": TOOLS, "max_tokens": 60} | more))


def calls_of(answer) -> list[tuple[str, dict]]:
    """Names and arguments of a single choice's calls."""
    calls = answer.choice["message"].get("tool_calls") or []
    calls = list(calls.values()) if isinstance(calls, dict) else calls
    assert all(call["id"] for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@table(
    {
        "auto": (calling(CALL)),
        "auto said so": calling(CALL, tool_choice="auto"),
        "text before": calling("I look. " + CALL),
        "text before with a character of several tokens": calling("🦊 " + CALL),
        "one call at most": calling(CALL, parallel_tool_calls=False),
        "with logprobs": calling(CALL, logprobs=True, top_logprobs=1),
        "with token ids": calling(CALL, return_token_ids=True),
        "with a stop string behind": calling((CALL, " and then"), stop=["and"]),
        "not greedy": calling(CALL, temperature=0.7, seed=3),
        "without special tokens skipped": calling(CALL, skip_special_tokens=False),
        "token by token": calling(tuple(CALL), max_tokens=90),
    }
)
def test_a_tool_call(parity, case):
    assert calls_of(parity.check(case)) == [("weather", {"place": "Rome"})]


@table(
    {
        "two tools": calling(CALL + "\n" + CALL_OF_CLOCK),
        "one after the other": calling(CALL + CALL_OF_CLOCK, parallel_tool_calls=True),
    }
)
def test_parallel_tool_calls(parity, case):
    assert calls_of(parity.check(case)) == [("weather", {"place": "Rome"}), ("clock", {})]


@table(
    {
        "no call made": calling("I need no tool."),
        "a call cut short": calling(CALL, max_tokens=12),
        "a call ended by a stop string": calling(CALL, stop=["Rome"]),
        "a call that is no JSON": calling("<tool_call>\n{nonsense</tool_call>"),
        "only a tool without parameters": calling(CALL_OF_CLOCK, tools=[CLOCK]),
        "of two choices": calling(CALL, n=2, temperature=0.7, seed=3, generations=2),
        "none allowed": calling(CALL, tool_choice="none"),
        "the model's own words": calling(max_tokens=12),
    }
)
def test_tool_calls_and_other_answers(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "required, scripted": calling(CALL, tool_choice="required"),
        "required, the model's own": calling(tool_choice="required", tools=[WEATHER]),
        "required, cut short": calling(tool_choice="required", tools=[WEATHER], max_tokens=8),
        "required with logprobs": calling(tool_choice="required", tools=[WEATHER], logprobs=True),
        "named, scripted": calling(CALL, tool_choice=NAMED),
        "named, the model's own": calling(tool_choice=NAMED),
        "named, one tool without parameters": calling(
            tools=[CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}}, max_tokens=12
        ),
        "named, stopped": calling(CALL, tool_choice=NAMED, stop=["Ro"]),
    }
)
def test_forced_tool_calls(parity, case):
    assert parity.check(case).status == 200


CONVERSATION = [
    {"role": "user", "content": "What is the weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
]


@table(
    {
        "a call and its result": calling("It is sunny.", messages=CONVERSATION),
        "a call and its result, the model's own words": calling(messages=CONVERSATION, max_tokens=12),
        "another call": calling(CALL, messages=CONVERSATION),
    }
)
def test_a_conversation_with_tools(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "a tool that does not exist": calling(
            tool_choice={"type": "function", "function": {"name": "none"}}, served="refused"
        ),
        "required without tools": calling(tools=..., tool_choice="required", served="refused"),
        "a choice without tools": calling(tools=..., tool_choice=NAMED, served="refused"),
        "an unknown choice": calling(tool_choice="perhaps", served="refused"),
        "a thinking budget without reasoning of its own": chat(thinking_token_budget=3, served="refused"),
        "a tool without a name": calling(tools=[{"type": "function", "function": {}}], served="refused"),
    }
)
def test_tools_that_are_refused(parity, case):
    assert parity.check(case).refused


@table(
    {
        "thought and said": chat("<think>I ponder.</think>Then I speak.", **THINKING),
        "thought without a first mark": chat("I ponder.</think>Then I speak.", **THINKING),
        "with a stop string in what is said": chat(
            "<think>I ponder.</think>Then I speak. STOP here", stop=["STOP"], by_chunks=TEXTS, **THINKING
        ),
        "with token ids": chat("<think>I ponder.</think>Then I speak.", return_token_ids=True, **THINKING),
        "with logprobs": chat("<think>I ponder.</think>Then I speak.", logprobs=True, top_logprobs=1, **THINKING),
        "of two choices": chat(
            "<think>I ponder.</think>Then I speak.", n=2, temperature=0.7, seed=2, generations=2, **THINKING
        ),
        "with an effort": chat("<think>I ponder.</think>Then I speak.", reasoning_effort="high", **THINKING),
        "the mark in the middle of a chunk": chat(("I ponder", ".", 16, "Then I speak."), **THINKING),
    }
)
def test_reasoning(parity, case):
    answer = parity.check(case)
    if not case.by_chunks or "stream" not in case.body:
        assert (answer.choice["message"]["reasoning"], answer.said.strip()) == ("I ponder.", "Then I speak.")


@table(
    {
        "stopped while thinking": chat(
            "<think>I ponder STOP more.</think>Then I speak.", stop=["STOP"], by_chunks=TEXTS, **THINKING
        ),
        "stopped by what ends the thought": chat(
            "<think>I ponder.</think>Speak", stop=["</think>"], by_chunks=TEXTS, **THINKING
        ),
        "stopped across the mark": chat(
            "<think>I ponder.</think>Speak", stop=[".</think>Sp"], by_chunks=TEXTS, **THINKING
        ),
        "stopped right behind the mark": chat(
            "<think>I ponder.</think>Speak", stop=["Speak"], by_chunks=TEXTS, **THINKING
        ),
        "a longer stop string begun in thought": chat(
            "<think>I ponder the end</think>and speak.", stop=["the end of it all"], by_chunks=TEXTS, **THINKING
        ),
        "cut short in thought": chat("<think>I ponder and ponder.</think>Speak", max_tokens=4, **THINKING),
        "nothing said": chat("<think>I ponder.</think>", **THINKING),
        "nothing thought": chat("<think></think>Speak.", **THINKING),
        "characters of several tokens": chat("<think>🦊 木</think>🌲 木", max_tokens=24, **THINKING),
        "reasoning left out": chat("<think>I ponder.</think>Speak.", include_reasoning=False, **THINKING),
        "not asked to think": chat("<think>I ponder.</think>Speak."),
        "a call after thought": calling("<think>I ponder.</think>" + CALL, **THINKING),
        "a call after thought, stopped": calling(
            "<think>I ponder.</think>" + CALL, stop=["Rome"], by_chunks=TEXTS, **THINKING
        ),
        "a call inside thought": calling("<think>" + CALL + "</think>Speak.", **THINKING),
        "the model's own thoughts": chat(**THINKING),
        "effort none": chat(reasoning_effort="none"),
        "effort low": chat(reasoning_effort="low"),
        "no thinking budget": chat("<think>I ponder.</think>Speak.", thinking_token_budget=-1, **THINKING),
    }
)
def test_reasoning_and_other_features(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        "a form": chat(
            "<think>I ponder.</think>red",
            structured_outputs={"choice": ["red", "green"]},
            max_tokens=24,
            **THINKING,
        ),
        "a required call": calling("<think>Hm.</think>" + CALL, tool_choice="required", **THINKING),
        "a named call": calling("<think>Hm.</think>" + CALL, tool_choice=NAMED, **THINKING),
    }
)
def test_what_a_grammar_rules_after_thought(parity, case):
    """vLLM 0.30's engines cannot be told over token ids where thought ends: refused by name there."""
    if IS_OLD and parity.plane == "tokens":
        asked = parity.ask(case)
        assert "needs engines of vLLM 0.31" in asked.answer.result().text
        assert asked.expected.result().status == 200
    else:
        assert parity.check(case).status == 200
