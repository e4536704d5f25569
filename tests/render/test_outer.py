"""Short routes that answer early: requests are counted as they would be, and what is left to others goes there."""

from __future__ import annotations

import contextlib
import re

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.responses import Response

from trivet.render.outer import LEFT, answer_early

pytestmark = pytest.mark.asyncio
TIMES = re.compile("duration.*(sum|created)$|created$")


class Short:
    """Answers as the route would, or not at all, or raises."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def answer(self, scope, receive, send):
        body = (await receive())["body"]
        self.asked.append(body)
        if body == b"raise":
            raise RuntimeError
        if body == b"leave":
            return None
        if body == b"other":

            async def again():
                return {"type": "http.request", "body": b"other", "more_body": False}

            return again
        await Response(body * 3, status_code=404 if body == b"none" else 200)(scope, receive, send)
        return None


def counting_app(**how) -> tuple[FastAPI, CollectorRegistry]:
    app, registry = FastAPI(), CollectorRegistry()

    async def route(request):
        body = await request.body()
        return Response(body * 3, status_code=404 if body == b"none" else 200)

    app.add_route("/short", route, methods=["POST", "GET"])
    app.add_route("/other", route, methods=["POST"])
    app.add_route("/health", route, methods=["POST"])
    Instrumentator(excluded_handlers=["/health"], registry=registry, **how).add().instrument(app)
    app.middleware_stack = app.build_middleware_stack()
    return app, registry


async def ask(app, path, body, method="POST") -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.request(method, path, content=body)


def counted(registry) -> dict:
    """All but times."""
    samples = (sample for metric in registry.collect() for sample in metric.samples)
    return {(one.name, str(one.labels)): one.value for one in samples if not TIMES.search(one.name)}


async def test_requests_are_counted_as_they_would_be():
    (proper, theirs), (early, ours) = counting_app(), counting_app()
    short = Short()
    answer_early(early, {"/short": short, "/health": short})
    for path, body in [("/short", b"abc"), ("/short", b"none"), ("/short", b"other"), ("/other", b"x"), ("/no", b"")]:
        answers = [await ask(app, path, body) for app in (proper, early)]
        assert answers[0].content == answers[1].content
        assert answers[0].status_code == answers[1].status_code
        assert counted(theirs) == counted(ours)
    answers = [await ask(app, "/short", b"abc", "GET") for app in (proper, early)]
    assert counted(theirs) == counted(ours)
    assert short.asked == [b"abc", b"none", b"other"], "other paths and methods are not its own"
    await ask(early, "/health", b"x")
    assert len(short.asked) == 3, "what is not counted goes its usual way"
    assert counted(theirs) == counted(ours)


@pytest.mark.parametrize("body", [b"raise", b"leave"])
async def test_one_that_was_not_answered_counts_as_failed(body):
    app, registry = counting_app()
    answer_early(app, {"/short": Short()})
    with contextlib.suppress(AssertionError):  # httpx misses an answer
        await ask(app, "/short", body)
    failed = {name for name, value in counted(registry).items() if name[0] == "http_requests_total" and value}
    assert len(failed) == 1
    assert "5xx" in failed.pop()[1]


async def test_what_is_left_is_marked():
    app, _ = counting_app()
    seen = []
    theirs = app.router.app

    answer_early(app, {"/short": Short()})

    async def looking(scope, receive, send):
        seen.append(scope.get(LEFT))
        await theirs(scope, receive, send)

    app.router.middleware_stack = looking
    await ask(app, "/short", b"other")
    await ask(app, "/other", b"other")
    assert seen == [True, None]


@pytest.mark.parametrize(
    "how",
    [
        {"should_group_status_codes": False},
        {"should_round_latency_decimals": True},
        {"should_instrument_requests_inprogress": True, "inprogress_name": "here"},
        {"body_handlers": ["/short"]},
    ],
)
async def test_where_it_is_counted_in_another_way_nothing_is_changed(how):
    app, _ = counting_app(**how)
    short = Short()
    answer_early(app, {"/short": short})
    assert (await ask(app, "/short", b"abc")).status_code == 200
    assert not short.asked


async def test_a_path_under_another_root_goes_its_usual_way():
    app, _ = counting_app()
    app.root_path = "/under"
    short = Short()
    answer_early(app, {"/short": short})
    await ask(app, "/short", b"abc")
    assert not short.asked


async def test_layers_that_are_not_there_yet_are_not_made():
    app = FastAPI()
    answer_early(app, {})
    assert app.middleware_stack is None
