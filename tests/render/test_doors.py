"""The other doors of the tokens plane: what vLLM's front end serves besides chat and completions, over our legs."""

import contextlib
import dataclasses
import json

import aiohttp
import anthropic
import openai
import pytest

from helpers.stack import MODEL, QUICK, listening, stack
from trivet.gateway.app import Rules
from trivet.sim import Fault

pytestmark = pytest.mark.asyncio(loop_scope="session")

SETTINGS = dataclasses.replace(QUICK, max_model_len=256)
FLAGS = (
    *("--served-model-name", MODEL, "alias", "--enable-prompt-tokens-details", "--max-model-len", "256"),
    "--enable-scale-out",
)
PROMPT = "What is a trivet? " * 8
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
RESPONSE = {"model": MODEL, "input": PROMPT, "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
MESSAGE = {**CHAT, "max_tokens": 12}


class Service:
    """A gateway over simulated engines, and a client."""

    def __init__(self, built, url, session):
        self.stack, self.url, self.session = built, url, session

    async def ask(self, method, path, body=None, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, f"{self.url}{path}", json=body, headers=named) as reply:
            return reply.status, {name.lower(): value for name, value in reply.headers.items()}, await reply.text()

    async def post(self, path, body, **headers):
        return await self.ask("POST", path, body, **headers)


@pytest.fixture
def service(serving, model_folder):
    @contextlib.asynccontextmanager
    async def opened(*tiers, settings=SETTINGS, flags=(), rules=None, **more):
        async with (
            stack(*tiers, settings=settings, **more) as built,
            serving(model_folder, *FLAGS, *flags, engine=built.legs) as served,
            listening(built.gateway(rules, frontend=served.app)) as url,
            aiohttp.ClientSession() as session,
        ):
            yield Service(built, url, session)
            await built.at_rest()
            assert served.known() == []

    return opened


def events(text):
    """Named events; each says its name twice."""
    found = []
    for one in text.strip().split("\n\n"):
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_response_and_a_message_are_split_and_say_what_a_chat_says(service):
    async with service("prefill", "decode") as one:
        _, head, text = await one.post("/v1/chat/completions", CHAT | {"max_tokens": 12, "ignore_eos": True})
        assert head["x-trivet-served"].startswith("split")
        chat = json.loads(text)
        expected = chat["choices"][0]["message"]["content"]

        status, head, text = await one.post("/v1/responses", RESPONSE)
        assert (status, head["x-trivet-served"].split(";")[0]) == (200, "split")
        response = json.loads(text)
        assert (response["output"][0]["content"][0]["text"], response["status"]) == (expected, "incomplete")
        usage = response["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (chat["usage"]["prompt_tokens"], 12)

        status, head, text = await one.post("/v1/responses", RESPONSE | {"stream": True})
        assert head["x-trivet-served"].startswith("split")
        told = events(text)
        assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == expected
        assert (told[0]["type"], told[-1]["type"]) == ("response.created", "response.completed")
        assert told[-1]["response"]["usage"]["output_tokens"] == 12

        status, head, text = await one.post("/v1/messages", MESSAGE)
        assert (status, head["x-trivet-served"].split(";")[0]) == (200, "split")
        message = json.loads(text)
        assert (message["content"][0]["text"], message["stop_reason"]) == (expected, "max_tokens")

        status, head, text = await one.post("/v1/messages", MESSAGE | {"stream": True})
        assert head["x-trivet-served"].startswith("split")
        told = events(text)
        deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
        assert ("".join(deltas), told[-1]["type"]) == (expected, "message_stop")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_of_a_colocated_answer_are_those_of_its_engine(service, path, stream):
    """It tells them behind its last token, when vLLM's front end has long looked for them."""
    body = (RESPONSE if path == "/v1/responses" else MESSAGE) | {"stream": stream}
    async with service("mixed") as one:
        seen = []
        for _ in range(2):
            _, _, text = await one.post(path, body)
            if path == "/v1/responses":
                usage = (events(text)[-1]["response"] if stream else json.loads(text))["usage"]
                seen.append((usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]))
            else:
                usage = next(e for e in events(text) if e["type"] == "message_delta") if stream else json.loads(text)
                usage = usage["usage"]
                cached = usage.get("cache_read_input_tokens", 0)
                created = usage.get("cache_creation_input_tokens") or 0
                seen.append((usage["input_tokens"] + cached + created, cached))
    (prompt, first), (again, second) = seen
    assert (first, again) == (0, prompt)
    assert second == (prompt - 1) // 16 * 16


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSE | {"seed": 1, "temperature": 0.5}), ("/v1/messages", MESSAGE)]
)
async def test_a_stream_that_fails_says_so_in_its_own_protocol(service, path, body):
    async with service("decode") as one:
        one.stack.sim("decode-0").faults.add(Fault("die", after_tokens=3, uses=None))
        status, _, text = await one.post(path, body | {"stream": True}, x_request_id="mine")
        assert status == 200
        told = events(text)
        _, _, record = await one.ask("GET", "/trivet/requests/mine")
    (generation,) = json.loads(record)["generations"]
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["message"] == generation["error"]
    if path == "/v1/responses":
        assert told[-1]["sequence_number"] == told[-2]["sequence_number"] + 1


async def test_the_official_clients_are_told_of_a_stream_that_failed(service):
    async with service("decode") as one:
        one.stack.sim("decode-0").faults.add(Fault("die", after_tokens=3, uses=None))
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="decode-0"):
                async for _ in await client.responses.create(
                    model=MODEL, input="Hi", max_output_tokens=9, stream=True, temperature=0.5, extra_body={"seed": 1}
                ):
                    pass
        async with anthropic.AsyncAnthropic(base_url=one.url, api_key="x", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError, match="decode-0"):
                async with client.messages.stream(
                    model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
                ) as stream:
                    await stream.get_final_text()


async def test_the_official_clients_read_answers(service):
    async with service("prefill", "decode") as one:
        async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="x", max_retries=0) as client:
            whole = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=5, temperature=0)
            async with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=5, temperature=0) as stream:
                final = await stream.get_final_response()
            assert whole.output_text == final.output_text
            assert [model.id async for model in client.models.list()] == [MODEL, "alias"]
        async with anthropic.AsyncAnthropic(base_url=one.url, api_key="x", max_retries=0) as client:
            hi = [{"role": "user", "content": "Hi"}]
            message = await client.messages.create(model=MODEL, max_tokens=5, messages=hi)
            async with client.messages.stream(model=MODEL, max_tokens=5, messages=hi) as stream:
                assert await stream.get_final_text() == message.content[0].text
            counted = await client.messages.count_tokens(model=MODEL, messages=hi)
            assert counted.input_tokens == whole.usage.input_tokens


async def test_rendering_and_tokens_need_no_engine(service):
    async with service() as one:
        _, _, text = await one.post("/tokenize", {"model": MODEL, "prompt": "Hello world"})
        tokens = json.loads(text)["tokens"]
        _, _, text = await one.post("/detokenize", {"model": MODEL, "tokens": tokens})
        assert json.loads(text) == {"prompt": "Hello world"}
        for path, body in [
            ("/v1/chat/completions/render", MESSAGE),
            ("/v1/messages/render", MESSAGE),
            ("/v1/responses/render", RESPONSE),
        ]:
            status, _, text = await one.post(path, body)
            assert status == 200, (path, text)
            assert json.loads(text)["token_ids"]
        _, _, text = await one.post("/v1/completions/render", {"model": MODEL, "prompt": "Hello world"})
        assert json.loads(text)[0]["token_ids"] == tokens
        assert (await one.ask("GET", "/v1/models"))[0] == 200


async def test_what_was_rendered_and_generated_is_derendered(service):
    async with service("prefill", "decode") as one:
        body = CHAT | {"max_tokens": 6, "ignore_eos": True}
        _, _, rendered = await one.post("/v1/chat/completions/render", body)
        generate = json.loads(rendered)
        del generate["request_id"]  # not for clients
        _, _, generated = await one.post("/inference/v1/generate", generate)
        status, _, text = await one.post(
            "/v1/chat/completions/derender",
            {"generate_response": json.loads(generated), "model": MODEL, "chat_request": body},
        )
        assert status == 200, text
        _, _, expected = await one.post("/v1/chat/completions", body)
    message = json.loads(text)["choices"][0]["message"]
    assert message["content"] == json.loads(expected)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"prompt": "x"}),
    ],
)
async def test_a_model_that_nobody_knows_is_vllms_404(service, path, body):
    async with service("mixed") as one:
        status, _, text = await one.post(path, body | {"model": "nobody"})
    assert (status, "nobody" in json.loads(text)["error"]["message"]) == (404, True)


async def test_an_adapter_is_a_model_of_its_own(service, tmp_path):
    """In the list of models, at each door, and on the way to engines."""
    flags = ("--enable-lora", "--lora-modules", f"mine={tmp_path}")
    engines = dataclasses.replace(SETTINGS, served_names=(MODEL, "mine"))
    async with service("prefill", "decode", flags=flags, settings=engines) as one:
        _, _, text = await one.ask("GET", "/v1/models")
        assert [model["id"] for model in json.loads(text)["data"]] == [MODEL, "alias", "mine"]
        for path, body in [
            ("/v1/chat/completions", CHAT | {"max_tokens": 3}),
            ("/v1/responses", RESPONSE),
            ("/v1/messages", MESSAGE),
        ]:
            status, head, text = await one.post(path, body | {"model": "mine"})
            assert (status, json.loads(text)["model"], head["x-trivet-served"][:5]) == (200, "mine", "split")
        asked = [request["body"]["model"] for sim in one.stack.sims for request in sim.state().facts()["requests"]]
        assert set(asked) == {"mine"}
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await one.post(path, {"lora_name": "x", "lora_path": "/x"}))[0] == 404


async def test_without_a_store_vllm_says_that_it_has_none(service):
    async with service("mixed") as one:
        status, _, text = await one.post("/v1/responses", RESPONSE | {"previous_response_id": "resp_1"})
        assert (status, "resp_1" in json.loads(text)["error"]["message"]) == (404, True)
        assert (await one.post("/v1/responses", RESPONSE | {"background": True}))[0] == 400
        assert (await one.ask("GET", "/v1/responses/resp_1"))[0] == 404


async def test_where_another_worker_may_have_it_a_stored_response_is_refused_by_name(service):
    async with service("mixed", rules=Rules(keeps_responses=False)) as one:
        assert (await one.post("/v1/responses", RESPONSE | {"store": True}))[0] == 200
        for method, path, body in [
            ("POST", "/v1/responses", RESPONSE | {"previous_response_id": "resp_1"}),
            ("POST", "/v1/responses", RESPONSE | {"background": True}),
            ("GET", "/v1/responses/resp_1", None),
            ("POST", "/v1/responses/resp_1/cancel", None),
            ("DELETE", "/v1/responses/resp_1", None),
        ]:
            status, _, text = await one.ask(method, path, body)
            assert (status, "are not kept between requests" in json.loads(text)["error"]["message"]) == (501, True)
