"""The official OpenAI client against the gateway, and bad input: as plain vLLM answers it, with no leg started."""

import json
import re
import uuid

import openai
import pytest

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Tell me about lamps and trees. " * 12}]


@pytest.fixture
def split(deployment):
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def plain(deployment):
    with openai.OpenAI(base_url=f"{deployment.plain_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def all_split(deployment, conftest):
    """What the test asked of the gateway was served split, and decode computed none of the prompts."""

    def counts() -> tuple[float, float, float]:
        text = conftest.get(f"{deployment.url}/metrics")[1]
        served = {"split": 0.0, "colocated": 0.0}
        for how, value in re.findall(r'trivet_generations_total\{[^}]*served="(\w+)"[^}]*\} ([0-9.e+]+)', text):
            served[how] += float(value)
        return served["split"], served["colocated"], deployment.metrics("decode").prompt_tokens["local_compute"]

    before = counts()
    yield
    after = counts()
    split = after[0] - before[0]
    assert split >= 1
    assert after[1] == before[1]
    assert after[2] - before[2] <= split  # one token of each prompt


@pytest.mark.usefixtures("all_split")
def test_a_chat(split, plain):
    def ask(client):
        return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)

    answer, expected = ask(split), ask(plain)
    assert answer.choices[0].message == expected.choices[0].message
    assert answer.choices[0].finish_reason == expected.choices[0].finish_reason == "length"
    assert (answer.model, answer.object) == (expected.model, expected.object)
    assert answer.usage.completion_tokens == 12


@pytest.mark.usefixtures("all_split")
def test_a_streamed_chat(split, plain):
    def ask(client):
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        return text, reasons[-1], chunks[0].choices[0].delta.role, chunks[-1].usage.completion_tokens

    assert ask(split) == ask(plain)


@pytest.mark.usefixtures("all_split")
def test_a_streamed_completion_and_several_prompts(split, plain):
    def ask(client, **more):
        return client.completions.create(model="tiny", max_tokens=6, temperature=0, **more)

    prompts = ["one two three", "four five six seven"]
    answers, expected = ask(split, prompt=prompts), ask(plain, prompt=prompts)
    assert [(c.index, c.text, c.finish_reason) for c in answers.choices] == [
        (c.index, c.text, c.finish_reason) for c in expected.choices
    ]
    streamed = "".join(chunk.choices[0].text for chunk in ask(split, prompt=prompts[0], stream=True))
    assert streamed == expected.choices[0].text


@pytest.mark.usefixtures("all_split")
def test_a_stop_string_ends_both_the_text_and_the_decode_leg(deployment, split, plain):
    def ask(client, **more):
        return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, temperature=0, **more)

    words = ask(plain).choices[0].message.content.split()
    stop = words[2][-3:]
    answer, expected = ask(split, stop=[stop]), ask(plain, stop=[stop])
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.choices[0].finish_reason == expected.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == expected.choices[0].stop_reason == stop
    assert answer.usage.completion_tokens == expected.usage.completion_tokens < 40


@pytest.mark.usefixtures("all_split")
def test_log_probabilities(split, plain):
    def ask(client, **more):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, **more
        )
        return answer.choices[0].logprobs.content

    for more in ({"temperature": 0}, {"temperature": 1.5, "seed": 7}):
        answer, expected = ask(split, **more), ask(plain, **more)
        assert [one.token for one in answer] == [one.token for one in expected]
        assert [one.bytes for one in answer] == [one.bytes for one in expected]
        for one, other in zip(answer, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]


@pytest.mark.usefixtures("all_split")
@pytest.mark.parametrize(
    "sampling",
    [
        {"logit_bias": {"1000": 100, "7": -100}},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 1.2, "seed": 11, "top_p": 0.9},
        {"extra_body": {"bad_words": ["lamp"], "min_tokens": 6, "repetition_penalty": 1.3}},
    ],
    ids=["logit_bias", "penalties", "seed", "bad_words"],
)
def test_what_shapes_sampling_reaches_decode(split, plain, sampling):
    def ask(client):
        request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **sampling}
        return client.chat.completions.create(**request).choices[0].message.content

    assert ask(split) == ask(plain)


@pytest.mark.usefixtures("all_split")
def test_as_many_log_probabilities_as_are_allowed_and_no_more(split, plain):
    def ask(client, logprobs):
        return client.completions.create(
            model="tiny", prompt="lamps and trees", max_tokens=4, temperature=1.5, seed=3, logprobs=logprobs
        )

    answer, expected = ask(split, 30).choices[0].logprobs, ask(plain, 30).choices[0].logprobs
    assert answer.tokens == expected.tokens
    assert [sorted(one) for one in answer.top_logprobs] == [sorted(one) for one in expected.top_logprobs]
    with pytest.raises(openai.BadRequestError, match="greater than max allowed: 30"):
        ask(split, 31)


def test_models(split, plain):
    assert sorted(m.id for m in split.models.list()) == sorted(m.id for m in plain.models.list())


def test_an_alias_answers(split):
    answer = split.chat.completions.create(model="tiny-alias", messages=MESSAGES, max_tokens=2, temperature=0)
    assert answer.model == "tiny"


def test_an_unknown_model(split, plain):
    for client in (split, plain):
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=MESSAGES)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD_INPUT = {
    "malformed JSON": (CHAT, b'{"model": "tiny", "messages": [', None),
    "not an object": (CHAT, b"[1, 2]", None),
    "no body": (CHAT, b"", None),
    "wrong content type": (CHAT, b"hello", {"content-type": "text/plain"}),
    "messages of a wrong type": (CHAT, {"model": "tiny", "messages": "hello"}, None),
    "no messages": (CHAT, {"model": "tiny", "messages": []}, None),
    "messages missing": (CHAT, {"model": "tiny"}, None),
    "a message without role": (CHAT, {"model": "tiny", "messages": [{"content": "hello"}]}, None),
    "max_tokens of a wrong type": (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": "many"}, None),
    "max_tokens zero": (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 0}, None),
    "max_tokens negative": (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": -1}, None),
    "max_tokens over the context": (CHAT, {"model": "tiny", "messages": MESSAGES, "max_tokens": 5000}, None),
    "temperature out of range": (CHAT, {"model": "tiny", "messages": MESSAGES, "temperature": -2}, None),
    "top_p out of range": (CHAT, {"model": "tiny", "messages": MESSAGES, "top_p": 3}, None),
    "n zero": (CHAT, {"model": "tiny", "messages": MESSAGES, "n": 0}, None),
    "n with greedy": (CHAT, {"model": "tiny", "messages": MESSAGES, "n": 2, "temperature": 0}, None),
    "min_tokens over max_tokens": (
        CHAT,
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "min_tokens": 9},
        None,
    ),
    "an over-long prompt": (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "word " * 3000}]}, None),
    "top_logprobs without logprobs": (CHAT, {"model": "tiny", "messages": MESSAGES, "top_logprobs": 3}, None),
    "a tool choice without tools": (CHAT, {"model": "tiny", "messages": MESSAGES, "tool_choice": "required"}, None),
    "an empty prompt": (COMPLETIONS, {"model": "tiny", "prompt": ""}, None),
    "no prompt": (COMPLETIONS, {"model": "tiny"}, None),
    "token ids out of the vocabulary": (COMPLETIONS, {"model": "tiny", "prompt": [1, 2, 99999999]}, None),
    "an over-long list of token ids": (COMPLETIONS, {"model": "tiny", "prompt": [5] * 1025}, None),
    "a prompt that leaves no room": (COMPLETIONS, {"model": "tiny", "prompt": [5] * 1024}, None),
    "stream options without stream": (
        CHAT,
        {"model": "tiny", "messages": MESSAGES, "stream_options": {"include_usage": True}},
        None,
    ),
    "a bad schema": (
        CHAT,
        {"model": "tiny", "messages": MESSAGES, "response_format": {"type": "json_schema"}},
        None,
    ),
    "a streamed over-long prompt": (COMPLETIONS, {"model": "tiny", "prompt": [5] * 2000, "stream": True}, None),
    "an unknown model": (CHAT, {"model": "nobody", "messages": MESSAGES}, None),
    "an unknown path": ("/v1/nothing", {"model": "tiny"}, None),
}


def generations_of(deployment, conftest, request_id: str) -> list[dict]:
    """What the gateway began for a request; a request that never came so far has left no record."""
    status, text = conftest.get(f"{deployment.url}/trivet/requests/{request_id}")
    assert status in (200, 404)
    return json.loads(text)["generations"] if status == 200 else []


def without_addresses(text: str) -> str:
    """Error texts may name objects by their addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_answered_as_by_vllm(deployment, conftest, name):
    path, body, headers = BAD_INPUT[name]
    raw = body if isinstance(body, bytes) else None
    request_id = uuid.uuid4().hex
    named = {**(headers or {}), "X-Request-Id": request_id}
    status, text = conftest.post(f"{deployment.url}{path}", body, raw=raw, headers=named)
    plain_status, plain_text = conftest.post(f"{deployment.plain_url}{path}", body, raw=raw, headers=headers)
    assert (status, without_addresses(text)) == (plain_status, without_addresses(plain_text))
    assert 400 <= status < 500
    assert "error" in json.loads(text) or "detail" in json.loads(text)
    assert generations_of(deployment, conftest, request_id) == []


STEERING = {
    "kv_transfer_params": {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9"}},
    "ec_transfer_params": {"ec_transfer_params": {"any": 1}},
    "vllm_xargs.kv_transfer_params": {"vllm_xargs": {"kv_transfer_params": "any"}},
    "request_id": {"request_id": "mine"},
}


@pytest.mark.parametrize("where", STEERING)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_steers_the_transfer_is_refused_by_name(deployment, conftest, where, path):
    request_id = uuid.uuid4().hex
    body = {"model": "tiny", "prompt": "hello", "messages": MESSAGES, "max_tokens": 2, **STEERING[where]}
    status, text = conftest.post(f"{deployment.url}{path}", body, headers={"X-Request-Id": request_id})
    assert status == 400
    assert where in json.loads(text)["error"]["message"]
    assert generations_of(deployment, conftest, request_id) == []
