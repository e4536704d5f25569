"""What events of three protocols say, and how each tells of a failure."""

import json

import pytest

from trivet.surface.sse import DONE, event_of, with_data
from trivet.surface.streams import MESSAGES, RESPONSES, Said, anthropic_kind, failure, said_in

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (CHAT, {"type": "response.completed", "choices": []}, Said()),
        (RESPONSES, {"type": "response.created", "response": {"status": "in_progress"}}, Said(opens=True)),
        (RESPONSES, {"type": "response.in_progress", "response": {"status": "queued"}}, Said(opens=True)),
        (RESPONSES, {"type": "response.output_text.delta", "delta": "x"}, Said(tokens=1)),
        (RESPONSES, {"type": "response.function_call_arguments.delta"}, Said(tokens=1)),
        (RESPONSES, {"type": "response.output_item.done", "item": {"status": "completed"}}, Said()),
        (RESPONSES, {"type": "response.completed", "response": {"status": "completed"}}, Said("stop", ends=True)),
        (RESPONSES, {"type": "response.completed", "response": {"status": "incomplete"}}, Said("length", ends=True)),
        (RESPONSES, {"type": "response.failed", "response": {"status": "failed"}}, Said("error", ends=True)),
        (RESPONSES, {"object": "response", "status": "cancelled"}, Said("abort")),
        (RESPONSES, {"object": "response", "status": "queued"}, Said()),
        (MESSAGES, {"type": "message_start", "message": {"stop_reason": None}}, Said()),
        (MESSAGES, {"type": "content_block_delta", "delta": {"type": "input_json_delta"}}, Said(tokens=1)),
        (MESSAGES, {"type": "content_block_delta", "delta": {"type": "signature_delta"}}, Said()),
        (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": "stop_sequence"}}, Said("stop")),
        (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": "refusal"}}, Said("stop")),
        (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": None}}, Said("abort")),
        (MESSAGES, {"type": "message", "stop_reason": "max_tokens"}, Said("length")),
        (MESSAGES, {"type": "message"}, Said("abort")),
        (MESSAGES, {"type": "message_stop"}, Said(ends=True)),
        (MESSAGES, {"type": "ping"}, Said()),
    ],
)
def test_an_event_is_read(path, value, said):
    assert said_in(path, value) == said


def test_a_failure_of_a_chat_is_openais_error_and_the_end_mark():
    own = {"message": "gone", "type": "InternalServerError", "param": None, "code": 502}
    assert failure(CHAT, "gone", 502, None) == event_of({"error": own}) + DONE
    assert failure(CHAT, "gone", 502, {"message": "theirs"}) == event_of({"error": {"message": "theirs"}}) + DONE


@pytest.mark.parametrize(("last", "number"), [(b"", 0), (b'{"sequence_number": 4}\n\n{"sequence_number":5}', 6)])
def test_a_failure_of_a_response_follows_its_last_event(last, number):
    event = failure(RESPONSES, "gone", 502, {"message": "theirs"}, last)
    assert event.startswith(b"event: error\ndata: {")
    told = json.loads(event.partition(b"data: ")[2])
    assert (told["type"], told["sequence_number"], told["message"], told["error"]["message"]) == (
        *("error", number),
        *("gone", "gone"),
    )


def test_a_failure_of_messages_is_anthropics():
    event = failure(MESSAGES, "gone", 503, None)
    assert event.startswith(b"event: error\n")
    assert json.loads(event.partition(b"data: ")[2]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone"},
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (422, "invalid_request_error"), (429, "rate_limit_error"), (502, "api_error")],
)
def test_every_status_has_a_kind(status, kind):
    assert anthropic_kind(status) == kind


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'data: {"a": 1}\n\n', b'data: {"b":2}\n\n'),
        (b'event: x\ndata: {"a": 1}\n\n', b'event: x\ndata: {"b":2}\n\n'),
    ],
)
def test_an_events_payload_is_replaced_and_its_name_stays(event, expected):
    assert with_data(event, {"b": 2}) == expected
