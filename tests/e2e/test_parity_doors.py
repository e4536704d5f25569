"""``/v1/responses``, ``/v1/messages`` and what needs no generation: on both planes as by ``vllm serve``."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from helpers.parity import COLOCATED, PROMPT, QUESTION, REFUSED, Answer, Case, Parity, differences
from trivet.legs.text_bodies import why_unsplittable

pytestmark = pytest.mark.e2e

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"type": "function", "name": "weather", "description": "The weather", "parameters": PARAMETERS}
TOOL = {"name": "weather", "description": "The weather", "input_schema": PARAMETERS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
THINKING = {"chat_template_kwargs": {"thinking": True}}
OF_EACH_REQUEST = (
    "id",
    "item_id",
    "call_id",
    "tool_use_id",
    "created_at",
    "signature",
    "sequence_number",
    "request_id",
)
"""What no two answers have in common."""


def response(says: str | tuple = (), /, **more: Any) -> Case:
    return _case(RESPONSES, {"input": PROMPT, "max_output_tokens": 12}, says, more)


def message(says: str | tuple = (), /, **more: Any) -> Case:
    return _case(MESSAGES, {"messages": QUESTION, "max_tokens": 12}, says, more)


def _case(path: str, first: dict, says: str | tuple, more: dict) -> Case:
    served = more.pop("served", "split")
    body = {"model": "tiny", "temperature": 0, **first, **more}
    says = (says,) if isinstance(says, str) else says
    return Case(path, {name: value for name, value in body.items() if value is not ...}, says, served)


def table(cases: dict[str, Case]):
    """Each case whole and streamed."""
    made = []
    for title, case in cases.items():
        for stream in (False, True):
            what = replace(case, body={**case.body, "stream": stream})
            made.append(pytest.param(what, id=f"{title}, {'streamed' if stream else 'whole'}"))
    return pytest.mark.parametrize("case", made)


def nameless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: nameless(one) for name, one in value.items() if name not in OF_EACH_REQUEST}
    if isinstance(value, list):
        return [nameless(one) for one in value]
    if not isinstance(value, str):
        return value
    # a leg of a response has its id in the body; vLLM leaves the mark where it comes in one chunk with what follows
    return re.sub(r"<dict of \d+ items>", "<dict>", value).removeprefix("<think>")


def events(answer: Answer) -> list[dict]:
    """A stream's events; each says its name twice, and none is a mark of another protocol."""
    found = []
    for one in answer.text.strip().split("\n\n"):
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}", one
    return found


def said(answer: Answer) -> Any:
    """What an answer says, however tokens fell into events: deltas of one kind behind each other are one."""
    if not answer.content_type.startswith("text/event-stream"):
        return nameless(json.loads(answer.text)) if answer.text else None
    joined: list[dict] = []
    told = events(answer)
    numbers = [event["sequence_number"] for event in told if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))
    for event in told:
        one = nameless(event)
        before = joined[-1] if joined else {}
        if one["type"].endswith("delta") and one["type"] == before.get("type") and _kind(one) == _kind(before):
            _append(before, one)
        else:
            joined.append(one)
    return joined


def _kind(event: dict) -> tuple:
    delta = event.get("delta")
    return event.get("index"), event.get("output_index"), delta.get("type") if isinstance(delta, dict) else None


def _append(before: dict, event: dict) -> None:
    if isinstance(event["delta"], str):
        before["delta"] += event["delta"]
        if "logprobs" in before or "logprobs" in event:
            before["logprobs"] = [*(before.get("logprobs") or ()), *(event.get("logprobs") or ())]
        return
    for name, value in event["delta"].items():
        if name != "type":
            before["delta"][name] += value


def check(parity: Parity, case: Case) -> Answer:
    """Both answer alike, and the gateway served the case as it should."""
    asked = parity.asked(case)
    answer, expected = asked.answer.result(), asked.expected.result()
    assert (answer.status, answer.content_type) == (expected.status, expected.content_type), answer.text[:500]
    found = list(differences(said(answer), said(expected)))
    assert not found, "\n".join(found)
    parity.assert_served(case, asked.request_id)
    return answer


@table(
    {
        "text": response(),
        "a sentence": response("Lamps are trees. 🦊"),
        "instructions": response(instructions="Be brief."),
        "a conversation": response(
            input=[
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": "I see."},
                {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
            ]
        ),
        "one token": response(max_output_tokens=1),
        "two tokens": response(max_output_tokens=2),
        "no limit": response("Short.", max_output_tokens=...),
        "log-probabilities": response(include=["message.output_text.logprobs"], top_logprobs=3),
        "a stop string": response("Lamps are trees.", stop=["are"]),
        "a seed": response(temperature=0.7, seed=5),
        "penalties": response(presence_penalty=1.0, frequency_penalty=0.5),
        "an adapter": response(model="tiny-a"),
        "an alias": response(model="tiny-alias"),
        "stored, as far as vLLM does": response(store=True, metadata={"a": "b"}, user="ann"),
        "a schema": response(text={"format": {"type": "json_schema", "name": "p", "schema": PARAMETERS}}),
        "a tool is called": response(CALL, tools=[FUNCTION], max_output_tokens=60),
        "no tool is called": response("I need none.", tools=[FUNCTION], max_output_tokens=60),
        "a tool must be called": response(CALL, tools=[FUNCTION], tool_choice="required", max_output_tokens=60),
        "this tool must be called": response(
            CALL, tools=[FUNCTION], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=60
        ),
        "reasoning": response("<think>Hm.</think>Yes.", **THINKING, max_output_tokens=30),
        "asked to be colocated": replace(response(served=COLOCATED), headers={"X-Trivet-Serve": "colocated"}),
    }
)
def test_responses(parity, case):
    assert check(parity, case).status == 200


@table(
    {
        "text": message(),
        "a sentence": message("Lamps are trees. 🦊"),
        "a system": message(system="Be brief."),
        "parts of text": message(
            system=[{"type": "text", "text": "Be brief."}],
            messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}, {"type": "text", "text": "Hm"}]}],
        ),
        "one token": message(max_tokens=1),
        "two tokens": message(max_tokens=2),
        "a stop string": message("Lamps are trees.", stop_sequences=["are"]),
        "an adapter": message(model="tiny-b"),
        "an alias": message(model="tiny-alias"),
        "top k": message(top_k=1, temperature=0.9),
        "a tool is called": message(CALL, tools=[TOOL], max_tokens=60),
        "text before a call": message("I look. " + CALL, tools=[TOOL], tool_choice={"type": "auto"}, max_tokens=60),
        "a tool must be called": message(CALL, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=60),
        "no tool may be called": message(CALL, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=60),
        "a tool's result": message(
            tools=[TOOL],
            messages=[
                *QUESTION,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Sun."}]},
            ],
        ),
        "asked to be colocated": replace(message(served=COLOCATED), headers={"X-Trivet-Serve": "colocated"}),
        "reasoning": message("<think>Hm.</think>Yes.", **THINKING, max_tokens=30),
    }
)
def test_messages(parity, case):
    assert check(parity, case).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_of_a_message(parity, stream):
    """Of one token vLLM can make no call, so the text plane does not split it."""
    choice = {"type": "tool", "name": "weather"}
    case = message(CALL, tools=[TOOL], tool_choice=choice, max_tokens=60, stream=stream)
    assert why_unsplittable(case.path, case.body) is not None
    assert check(parity, case).status == 200


@table(
    {
        "an unknown model of a response": response(model="nobody", served=REFUSED),
        "a response without input": response(input=..., served=REFUSED),
        "a response to too long an input": response(input="a " * 3000, served=REFUSED),
        "a response with a prompt template": response(prompt={"id": "p"}, served=REFUSED),
        "an unknown model of a message": message(model="nobody", served=REFUSED),
        "a message without a limit": message(max_tokens=..., served=REFUSED),
        "a message without a prompt": message(messages=..., served=REFUSED),
        "too long a message": message(messages=[{"role": "user", "content": "a " * 3000}], served=REFUSED),
    }
)
def test_faults(parity, case):
    assert check(parity, case).status in (400, 404, 422)


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"background": True}], ids=str)
def test_what_needs_a_stored_response_is_not_served(parity, more):
    """The tokens plane says it as vLLM does that stores none; on the text plane another engine may have it."""
    case = response(**more, served=REFUSED)
    if parity.plane == "tokens":
        assert check(parity, case).status in (400, 404)
    else:
        answer = parity.gateway.ask(case)
        assert (answer.status, "are not kept" in answer.text) == (501, True)


PLAIN = {
    "tokens of a text": ("/tokenize", {"model": "tiny", "prompt": PROMPT}),
    "tokens of a chat": ("/tokenize", {"model": "tiny", "messages": QUESTION, "return_token_strs": True}),
    "tokens for an adapter": ("/tokenize", {"model": "tiny-a", "prompt": PROMPT}),
    "the text of tokens": ("/detokenize", {"model": "tiny", "tokens": [400, 401, 402]}),
    "an unknown model": ("/tokenize", {"model": "nobody", "prompt": PROMPT}),
    "no prompt": ("/tokenize", {"model": "tiny"}),
    "tokens of a message": ("/v1/messages/count_tokens", {"model": "tiny", "messages": QUESTION, "tools": [TOOL]}),
    "an unknown model's tokens": ("/v1/messages/count_tokens", {"model": "nobody", "messages": QUESTION}),
    "a chat, rendered": ("/v1/chat/completions/render", {"model": "tiny", "messages": QUESTION, "max_tokens": 5}),
    "a completion, rendered": ("/v1/completions/render", {"model": "tiny", "prompt": PROMPT, "max_tokens": 5}),
    "a response, rendered": ("/v1/responses/render", {"model": "tiny", "input": PROMPT, "max_output_tokens": 5}),
    "a message, rendered": ("/v1/messages/render", {"model": "tiny", "messages": QUESTION, "max_tokens": 5}),
}


@pytest.mark.parametrize(("path", "body"), PLAIN.values(), ids=PLAIN)
def test_what_generates_nothing(parity, path, body):
    case = Case(path, body, served=REFUSED, salted=False)
    answer, expected = parity.gateway.ask(case), parity.plain.ask(case)
    assert (answer.status, answer.content_type) == (expected.status, expected.content_type), answer.text[:500]
    found = list(differences(nameless(json.loads(answer.text)), nameless(json.loads(expected.text))))
    assert not found, "\n".join(found)


def test_what_was_rendered_and_generated_is_derendered(parity):
    chat = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    told = []
    for server in (parity.gateway, parity.plain):
        rendered = json.loads(server.ask(Case("/v1/chat/completions/render", chat, salted=False)).text)
        del rendered["request_id"]
        generated = json.loads(server.ask(Case("/inference/v1/generate", rendered)).text)
        body = {"model": "tiny", "generate_response": generated, "chat_request": chat}
        answer = server.ask(Case("/v1/chat/completions/derender", body, salted=False))
        assert answer.status == 200, answer.text
        told.append(json.loads(answer.text)["choices"])
    assert told[0] == told[1]


def test_models_are_listed_with_their_adapters(parity, conftest):
    def names(url: str) -> list[str]:
        return [model["id"] for model in conftest.get_json(f"{url}/v1/models")["data"]]

    assert names(parity.gateway.url) == names(parity.plain.url)
    assert {"tiny", "tiny-a", "tiny-b"} <= set(names(parity.gateway.url))


def test_responses_and_messages_are_counted_as_split(parity, conftest):
    for case in (response(), message()):
        status, _ = conftest.post(f"{parity.gateway.url}{case.path}", conftest.salted(dict(case.body)))
        assert status == 200
    text = conftest.get(f"{parity.gateway.url}/metrics")[1]
    split = re.search(r'trivet_split_decisions_total\{decision="split",reason="pair_ready"\} ([0-9.e+]+)', text)
    assert float(split.group(1)) >= 2
