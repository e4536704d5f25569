import json
from http import HTTPStatus

import pytest

from trivet.surface.http import answer, answer_error, answer_json, for_engines, header, header_value


class Sent:
    """What an application sent, as a server would see it."""

    def __init__(self) -> None:
        self.messages = []

    async def __call__(self, message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def json(self):
        return json.loads(self.messages[1]["body"])


async def test_an_answer_is_a_start_and_a_body():
    sent = Sent()
    await answer(sent, 200, b"hello", b"text/plain", [(b"x-request-id", b"1")])
    assert sent.messages == [
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/plain"), (b"content-length", b"5"), (b"x-request-id", b"1")],
        },
        {"type": "http.response.body", "body": b"hello"},
    ]


async def test_a_json_answer_is_counted_in_bytes():
    sent = Sent()
    await answer_json(sent, 200, {"name": "Töpfe"})
    assert sent.json == {"name": "Töpfe"}
    assert sent.headers[b"content-type"] == b"application/json"
    assert sent.headers[b"content-length"] == str(len(sent.messages[1]["body"])).encode()


@pytest.mark.parametrize(
    ("status", "phrase"),
    [(400, "Bad Request"), (401, "Unauthorized"), (404, "Not Found"), (503, "Service Unavailable")],
)
async def test_an_error_has_openais_form(status, phrase):
    sent = Sent()
    await answer_error(sent, status, "no engine is ready", [(b"x-request-id", b"1")])
    assert sent.status == status
    assert sent.headers[b"x-request-id"] == b"1"
    expected = {"message": "no engine is ready", "type": phrase, "param": None, "code": status}
    assert sent.json == {"error": expected}


@pytest.mark.parametrize("status", [one for one in HTTPStatus if one >= 400])
async def test_every_error_status_that_http_knows_can_be_answered(status):
    sent = Sent()
    await answer_error(sent, int(status), "x")
    assert sent.json["error"]["code"] == status


@pytest.mark.parametrize(("status", "kind"), [(499, "Bad Request"), (520, "Internal Server Error")])
async def test_statuses_that_http_does_not_know_can_be_answered_too(status, kind):
    sent = Sent()
    await answer_error(sent, status, "x")
    assert sent.status == status
    assert sent.json["error"]["type"] == kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mine", b"mine"),
        ("a\tb", b"a\tb"),
        ("a\r\nSet-Cookie: x", b"a??Set-Cookie: x"),
        ("\x00\x1f\x7f", b"???"),
        ("\xfc\xa0\x80", b"\xfc\xa0\x80"),
        ("\u4f60\ud800", b"??"),
        ("", b""),
    ],
)
def test_a_headers_value_stays_in_its_line(text, expected):
    assert header_value(text) == expected


def scope_with(*headers: tuple[bytes, bytes]) -> dict:
    return {"type": "http", "headers": list(headers)}


def test_the_first_of_a_header_counts():
    scope = scope_with((b"a", b"1"), (b"b", b"\xff"), (b"a", b"2"))
    assert (header(scope, b"a"), header(scope, b"b"), header(scope, b"c")) == ("1", "\xff", None)


@pytest.mark.parametrize(
    "name",
    [
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "accept", "accept-encoding", "content-encoding", "content-length", "content-type", "expect", "host",
        "authorization", "cookie", "x-request-id", "x-data-parallel-rank", "x-trivet-serve", "x-trivet-anything",
    ],
)  # fmt: skip
def test_headers_that_are_not_for_engines(name):
    assert for_engines(scope_with((name.encode(), b"x"))) == {}


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "x-session-id", "x-tenant", "user-agent", "x-trivetish"])
def test_headers_that_are(name):
    assert for_engines(scope_with((name.encode(), b"x"), (b"host", b"y"))) == {name: "x"}


def test_every_connection_header_counts():
    said = scope_with(
        (b"connection", b"keep-alive, x-one"), (b"connection", b"X-Two"), (b"x-one", b"1"), (b"x-two", b"2")
    )
    assert for_engines(said) == {}
