"""The whole tokens plane over HTTP: gateway, vLLM's front end, legs, and simulated engines that fail."""

import asyncio
import contextlib
import dataclasses
import json
import random
import time

import aiohttp
import pytest

from helpers.stack import MODEL, QUICK, listening, stack
from trivet.sim import Fault

SETTINGS = dataclasses.replace(QUICK, max_model_len=256)
FLAGS = ("--served-model-name", MODEL, "--enable-prompt-tokens-details", "--max-model-len", "256")
BODY = {"model": MODEL, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
CHAT = BODY | {"messages": [{"role": "user", "content": "What is a trivet?"}]}
PROMPT = BODY | {"prompt": "What is a trivet?"}


class Service:
    """A gateway over simulated engines, and a client."""

    def __init__(self, built, url, session):
        self.stack = built
        self.url = url
        self.session = session

    async def post(self, path, body, **headers):
        async with self.session.post(f"{self.url}{path}", json=body, headers=headers) as reply:
            headers = {name.lower(): value for name, value in reply.headers.items()}
            return reply.status, headers, await reply.text()

    async def chat(self, **more):
        status, _, text = await self.post("/v1/chat/completions", CHAT | more)
        assert status == 200, text
        return text

    async def record(self, request_id):
        async with self.session.get(f"{self.url}/trivet/requests/{request_id}") as reply:
            return await reply.json()


@pytest.fixture
def service(serving, model_folder):
    @contextlib.asynccontextmanager
    async def opened(*tiers, settings=SETTINGS, flags=(), **more):
        async with (
            stack(*tiers, settings=settings, **more) as built,
            serving(model_folder, *FLAGS, *flags, engine=built.legs) as served,
            listening(built.gateway(frontend=served.app)) as url,
            aiohttp.ClientSession() as session,
        ):
            yield Service(built, url, session)
            await built.at_rest()
            assert served.known() == []

    return opened


def events(text):
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(text):
    return "".join(choice["delta"].get("content") or "" for one in events(text) for choice in one["choices"])


async def test_an_answer_is_the_same_however_often_it_broke_off(service):
    async with service("prefill", "decode", "decode", "mixed") as one:
        expected = json.loads(await one.chat(logprobs=True, top_logprobs=2))
        whole = expected["choices"][0]["message"]["content"]
        for sim in one.stack.sims[1:3]:
            sim.faults.add(Fault("die", after_tokens=4, uses=None))
        assert json.loads(await one.chat(logprobs=True, top_logprobs=2))["choices"] == expected["choices"]
        assert joined(await one.chat(stream=True)) == whole
        assert one.stack.records[-1].resumes


async def test_what_cannot_be_continued_is_an_error_object_in_a_stream_and_begun_anew_otherwise(service):
    async with service("prefill", "decode", "mixed") as one:
        one.stack.sims[1].faults.add(Fault("die", after_tokens=4, uses=None))
        found = events(await one.chat(stream=True, frequency_penalty=0.5))
        assert "penalty" in found[-1]["error"]["message"]
        assert not any(choice["finish_reason"] for event in found[:-1] for choice in event["choices"])
        answer = json.loads(await one.chat(frequency_penalty=0.5))
        assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_told_as_the_engine_that_computed_the_prompt_knows_them(service, stream):
    async with service("prefill", "decode", "mixed") as one:
        body = PROMPT | {"prompt": list(range(300, 400)), "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        for headers in ({}, {"X-Trivet-Serve": "colocated"}):
            told = []
            for _ in range(2):
                status, _, text = await one.post("/v1/completions", body, **headers)
                assert status == 200, text
                usage = events(text)[-1]["usage"] if stream else json.loads(text)["usage"]
                told.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert told == [0, 96]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("headers", [{}, {"X-Trivet-Serve": "colocated"}], ids=["split", "colocated"])
async def test_log_probabilities_of_the_prompt(service, headers, echo):
    async with service("prefill", "decode", "mixed") as one:
        body = PROMPT | {"prompt": list(range(300, 320)), "prompt_logprobs": 2, "echo": echo, "logprobs": 1}
        status, _, text = await one.post("/v1/completions", body, **headers)
        assert status == 200, text
        choice = json.loads(text)["choices"][0]
        assert choice["prompt_logprobs"][0] is None
        assert [str(300 + n) in one for n, one in enumerate(choice["prompt_logprobs"][1:], 1)] == [True] * 19
        assert len(choice["logprobs"]["tokens"]) == (32 if echo else 12)
        assert one.stack.records[-1].split == (not headers)


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9"}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"request_id": "mine"}, "request_id"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_steers_the_transfer_is_refused(service, more, where, path):
    async with service("prefill", "decode") as one:
        status, headers, text = await one.post(path, (CHAT if "chat" in path else PROMPT) | more)
        assert status == 400
        assert where in json.loads(text)["error"]["message"]
        assert headers["x-request-id"]
        assert [sim.state().legs() for sim in one.stack.sims] == [[], []]


async def test_ids_and_headers_of_legs(service):
    async with service("prefill", "decode") as one:
        mine = {"X-Request-Id": "mine", "traceparent": "00-1-2-01", "X-Tenant": "blue", "Authorization": "Bearer x"}
        answers = [await one.post("/v1/completions", PROMPT, **mine) for _ in range(2)]
        for status, headers, text in answers:
            assert (status, headers["x-request-id"]) == (200, "mine")
            assert json.loads(text)["id"].startswith("cmpl-mine")
        legs = [record for sim in one.stack.sims for record in sim.state().requests]
        assert len({leg.request_id for leg in legs}) == len(legs) == 4
        for leg in legs:
            assert "mine" not in leg.request_id
            sent = {name.lower(): value for name, value in leg.headers.items()}
            assert (sent["traceparent"], sent["x-tenant"]) == ("00-1-2-01", "blue")
            assert sent["x-client-request-id"] == "mine"
            assert "authorization" not in sent


async def test_a_full_queue_and_a_late_turn(service):
    slow = dataclasses.replace(SETTINGS, step_ms=40)
    async with service("prefill", "decode", settings=slow, running=1, queued=1, queue_s=0.2) as one:
        first = asyncio.create_task(one.post("/v1/completions", PROMPT | {"max_tokens": 20}))
        await asyncio.sleep(0.1)
        second = asyncio.create_task(one.post("/v1/completions", PROMPT))
        await asyncio.sleep(0.05)
        status, headers, text = await one.post("/v1/completions", PROMPT)
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(text)["error"]["code"] == 429
        assert (await second)[0] == 503
        assert (await first)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline(service, stream):
    slow = dataclasses.replace(SETTINGS, step_ms=100)
    async with service("prefill", "decode", settings=slow) as one:
        started_s = time.monotonic()
        body = PROMPT | {"max_tokens": 100, "stream": stream}
        status, _, text = await one.post("/v1/completions", body, **{"X-Trivet-Deadline-S": "0.4"})
        assert time.monotonic() - started_s < 5  # the answer takes ten
        assert status == (200 if stream else 504)
        assert "deadline" in text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_at_random_moments(service, path, stream):
    """Through vLLM's own handlers as well, everything returns to zero."""
    slow = dataclasses.replace(SETTINGS, prefill_ms=3, step_ms=1, transfer_ms_per_token=0.05)
    async with service("prefill", "prefill", "decode", "decode", settings=slow, running=30) as one:
        chance = random.Random(5)
        body = (CHAT if "chat" in path else PROMPT) | {"stream": stream, "max_tokens": 40, "n": 2, "temperature": 0.7}

        async def ask_and_leave():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(one.post(path, body), chance.random() * 0.3)

        for _ in range(5):
            await asyncio.gather(*(ask_and_leave() for _ in range(50)))
        await one.stack.at_rest(10)
        assert one.stack.expired() == 0
        assert any(record.finish_reason == "abort" for record in one.stack.records)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_decode_leg(service, stream):
    slow = dataclasses.replace(SETTINGS, step_ms=50)
    async with service("prefill", "decode", settings=slow) as one:
        text = json.loads(await one.chat(max_tokens=6))["choices"][0]["message"]["content"]
        stop = text[len(text) // 2 :][:3]
        started_s = time.monotonic()
        answer = await one.chat(max_tokens=200, stop=[stop], stream=stream)
        assert time.monotonic() - started_s < 5  # two hundred tokens take ten
        said = joined(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
        assert said == text[: text.index(stop)]
        await one.stack.at_rest()
        assert one.stack.sim("decode-0").state().requests[-1].was_aborted
        assert one.stack.records[-1].finish_reason == "stop"  # the client did not leave


@pytest.mark.parametrize("connector", ["TrivetConnector", "NixlConnector"])
async def test_answers_that_end_with_the_models_length_are_those_of_one_engine(service, connector):
    """``/inference/v1/generate`` does not cut ``max_tokens``: behind a first token that fills the length is none."""
    settings = dataclasses.replace(SETTINGS, kv_connector=connector)
    at = "/inference/v1/generate"
    async with service("prefill", "decode", "mixed", settings=settings, flags=("--enable-scale-out",)) as one:
        for room in (3, 2, 1, 0):
            ids = [300 + number % 100 for number in range(256 - room)]
            for sampling in ({}, {"min_tokens": 5}, {"seed": 7, "temperature": 0.7}, {"logprobs": 1}):
                for stream in (False, True):
                    asked = {"temperature": 0, "ignore_eos": True, "max_tokens": 9, **sampling}
                    body = {"model": MODEL, "token_ids": ids, "sampling_params": asked, "stream": stream}
                    case = (room, sampling, stream)
                    whole = await one.post(at, body, **{"X-Trivet-Serve": "colocated"})
                    split = await one.post(at, body)
                    assert told(split) == told(whole), case
                    if room == 0:
                        assert "longer than the maximum model length of 256" in str(told(split)), case
                        continue
                    status, tokens, reason = told(split)
                    assert (status, len(tokens), reason) == (200, room, "length"), case
                    (record,) = (await one.record(split[1]["x-request-id"]))["generations"]
                    alone = connector == "TrivetConnector" and room == 1 and "seed" not in sampling
                    assert record["decode_engine"] == (None if alone else "decode-0"), case
                    assert (record["error"], record["attempts"], record["transfer_problem"]) == (None, 1, None), case


def told(reply):
    """Status, tokens and end of an answer of ``/inference/v1/generate``; of a refusal what it says, in a stream too."""
    status, headers, text = reply
    if status != 200:
        return status, json.loads(text)["error"]["message"]
    found = events(text) if headers["content-type"].startswith("text/event-stream") else [json.loads(text)]
    if "error" in found[0]:
        return status, found[0]["error"]["message"]
    choices = [choice for one in found for choice in one["choices"]]
    return status, [token for one in choices for token in one["token_ids"]], choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_how_it_was_made(service, stream):
    async with service("prefill", "decode", "mixed") as one:
        for headers, expected in (
            ({}, "split; reason=pair_ready; prefill=prefill-0; decode=decode-0"),
            ({"X-Trivet-Serve": "colocated"}, "colocated; reason=requested; decode=mixed-0"),
        ):
            status, answered, text = await one.post("/v1/completions", PROMPT | {"stream": stream}, **headers)
            assert (status, answered["x-trivet-served"]) == (200, expected), text
