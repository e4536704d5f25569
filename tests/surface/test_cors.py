"""What browsers are told of who may read answers."""

import httpx
import pytest

from trivet.surface.cors import Cors, CorsRules
from trivet.surface.http import answer

PAGE = "https://page.example"
NAMED = CorsRules((PAGE,), ("GET", "POST"), ("Authorization", "content-type"), credentials=True)


class App:
    def __init__(self) -> None:
        self.scopes: list[dict] = []

    async def __call__(self, scope, receive, send) -> None:
        self.scopes.append(scope)
        await answer(send, 418, b"tea", b"text/plain", [(b"x-own", b"1")])


async def asked(rules: CorsRules, method: str = "POST", path: str = "/v1/models", **headers: str):
    app = App()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Cors(app, rules)), base_url="http://gateway") as client:
        return app, await client.request(method, path, headers=named)


def told(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith(("access-", "vary"))}


@pytest.mark.parametrize("rules", [CorsRules(), NAMED, CorsRules(())])
async def test_what_no_page_asks_for_is_untouched(rules):
    for method in ("POST", "OPTIONS"):
        app, response = await asked(rules, method)
        assert (response.status_code, response.text, told(response)) == (418, "tea", {})
        assert len(app.scopes) == 1


async def test_any_page_may_read_answers_unless_told_otherwise():
    app, response = await asked(CorsRules(), origin=PAGE)
    assert (response.status_code, response.headers["x-own"]) == (418, "1")
    assert told(response) == {
        "access-control-allow-origin": "*",
        "access-control-expose-headers": "retry-after, x-request-id, x-trivet-served",
    }
    # or the application below would tell it a second time
    assert b"origin" not in dict(app.scopes[0]["headers"])


@pytest.mark.parametrize(("origin", "allowed"), [(PAGE, True), ("https://page.example.evil", False), ("null", False)])
async def test_named_pages_may_read_answers_and_others_not(origin, allowed):
    app, response = await asked(NAMED, origin=origin)
    assert (response.status_code, len(app.scopes)) == (418, 1)
    assert response.headers["vary"] == "Origin"
    assert response.headers.get("access-control-allow-origin") == (PAGE if allowed else None)
    assert response.headers.get("access-control-allow-credentials") == ("true" if allowed else None)


async def test_nobody_may_where_there_are_no_origins():
    _, response = await asked(CorsRules(()), origin=PAGE)
    assert "access-control-allow-origin" not in response.headers
    _, response = await asked(CorsRules(()), "OPTIONS", origin=PAGE, access_control_request_method="POST")
    assert response.status_code == 400


@pytest.mark.parametrize("path", ["/metrics", "/trivet/status", "/trivet/requests/1"])
async def test_what_the_gateway_tells_of_itself_is_for_no_page(path):
    for rules in (CorsRules(), NAMED):
        _, response = await asked(rules, "GET", path, origin=PAGE)
        assert "access-control-allow-origin" not in response.headers
        _, response = await asked(rules, "OPTIONS", path, origin=PAGE, access_control_request_method="GET")
        assert response.status_code == 400


async def test_a_browser_that_asks_first_is_answered_here():
    app, response = await asked(
        CorsRules(),
        "OPTIONS",
        origin=PAGE,
        access_control_request_method="POST",
        access_control_request_headers="authorization, x-b",
    )
    assert (response.status_code, app.scopes) == (200, [])
    assert told(response) == {
        "access-control-allow-origin": "*",
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization, x-b",
        "access-control-max-age": "600",
    }


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({}, None),
        ({"access_control_request_headers": "AUTHORIZATION,content-type"}, None),
        ({"origin": "https://other.example"}, "origin"),
        ({"access_control_request_method": "DELETE"}, "method"),
        ({"access_control_request_headers": "authorization, x-other"}, "headers"),
    ],
)
async def test_what_is_not_named_is_refused(headers, refused):
    asking = {"origin": PAGE, "access_control_request_method": "POST", **headers}
    app, response = await asked(NAMED, "OPTIONS", **asking)
    assert app.scopes == []
    if refused is None:
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
    else:
        assert (response.status_code, response.text) == (400, f"Disallowed CORS {refused} (gateway.cors)")


async def test_what_is_no_http_passes_through():
    seen = []

    async def app(scope, receive, send) -> None:
        seen.append(scope)

    scope = {"type": "lifespan"}
    await Cors(app, CorsRules())(scope, None, None)
    assert seen == [scope]
