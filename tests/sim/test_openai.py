"""The OpenAI endpoints: what the text data plane needs of an engine."""

import openai
import pytest

from helpers.sim_client import PREFILL
from trivet.sim import text

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def said(events) -> str:
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
    )


async def chat(client, sim, **body):
    return await client.post(sim, CHAT, {"model": "sim", "messages": MESSAGES, "max_tokens": 4, **body})


async def complete(client, sim, **body):
    return await client.post(sim, COMPLETIONS, {"model": "sim", "prompt": "Hi", "max_tokens": 4, **body})


async def test_a_chat_streamed_and_whole(sim, client):
    whole = await chat(client, sim)
    (choice,) = whole.json["choices"]
    assert (whole.json["object"], choice["finish_reason"]) == ("chat.completion", "length")
    assert choice["message"]["role"] == "assistant"
    prompt = text.encode("<|user|>\nHi\n<|assistant|>\n")
    assert whole.json["usage"]["prompt_tokens"] == len(prompt)
    assert choice["message"]["content"] == text.decode((await client.generate(sim, prompt)).tokens)
    events = (await chat(client, sim, stream=True, stream_options={"include_usage": True})).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert said(events) == choice["message"]["content"]
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    assert (events[-2]["choices"], events[-2]["usage"]["completion_tokens"]) == ([], 4)
    assert events[-1] == "[DONE]"


async def test_a_completion_streamed_and_whole(sim, client):
    whole = await complete(client, sim)
    (choice,) = whole.json["choices"]
    assert (whole.json["object"], choice["finish_reason"], len(choice["text"])) == ("text_completion", "length", 28)
    events = (await complete(client, sim, stream=True)).events
    assert (said(events), len(events)) == (choice["text"], 5)
    assert set(events[0]["choices"][0]) == {
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    }
    assert len((await complete(client, sim, max_tokens=None)).json["choices"][0]["text"]) == 16 * 7


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab", 2), ([5, 6, 7], 3), (["a", "bc"], 3), ([[5], [6, 7]], 3)],
)
async def test_prompts_as_text_ids_and_lists(sim, client, prompt, tokens):
    answer = await complete(client, sim, prompt=prompt, n=2, temperature=1)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(4 if several else 2))
    assert answer.json["usage"]["prompt_tokens"] == tokens


async def test_the_same_conversation_continues_in_text(sim, client):
    first = (await chat(client, sim)).json["choices"][0]["message"]["content"]
    prompt = f"{text.chat_prompt(MESSAGES)}{first}"
    longer = (await chat(client, sim, max_tokens=9)).json["choices"][0]["message"]["content"]
    rest = (await complete(client, sim, prompt=prompt, max_tokens=5)).json["choices"][0]["text"]
    assert first + rest == longer


async def test_stop_strings(sim, client):
    whole = (await complete(client, sim, max_tokens=9)).json["choices"][0]["text"]
    stop = whole[10:13]
    (choice,) = (await complete(client, sim, max_tokens=9, stop=stop)).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole[:10], "stop", stop)
    events = (await chat(client, sim, stream=True, max_tokens=9, stop=[" "])).events
    assert said(events) == ""
    assert events[-2]["choices"][0]["stop_reason"] == " "
    kept = await complete(client, sim, max_tokens=9, stop=stop, include_stop_str_in_output=True)
    assert kept.json["choices"][0]["text"] == whole[:13]
    later = await complete(client, sim, max_tokens=9, stop=" ", min_tokens=3)
    assert later.json["choices"][0]["text"] == whole[:21]


async def test_logprobs(sim, client):
    answer = await chat(client, sim, logprobs=True, top_logprobs=2)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == answer.json["choices"][0]["message"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * 4
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert (await chat(client, sim, top_logprobs=2)).status == 400
    (choice,) = (await complete(client, sim, logprobs=2)).json["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"] == [0, 7, 14, 21]
    events = (await complete(client, sim, logprobs=1, stream=True)).events[:-1]
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [7], [14], [21]]


async def test_echo_and_token_ids(sim, client):
    answer = await complete(client, sim, echo=True, return_token_ids=True)
    (choice,) = answer.json["choices"]
    assert choice["text"].startswith("Hi ")
    assert choice["prompt_token_ids"] == text.encode("Hi")
    assert text.decode(choice["token_ids"]) == choice["text"][2:]


async def test_an_end_of_sequence_has_no_text(start, client):
    sim = await start(eos_chance=1.0)
    (choice,) = (await complete(client, sim)).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": None}, "valid list"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text only"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 90}, "maximum context length is 100 tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 200}, "cannot be greater than max_model_len=100"),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "only be defined when `stream=True`"),
        (CHAT, {"messages": MESSAGES, "stream": True, "prompt_logprobs": 1}, "not available when `stream=True`"),
        (CHAT, {}, "Field required"),
        (COMPLETIONS, {"prompt": ""}, "Either prompt or prompt_embeds"),
        (COMPLETIONS, {"prompt": 5}, "valid string"),
        (COMPLETIONS, {"prompt": "x" * 100}, "maximum context length is 100 tokens"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n must be at least 1"),
    ],
)
async def test_what_is_refused(start, client, path, body, message):
    sim = await start(max_model_len=100)
    answer = await client.post(sim, path, body)
    assert (answer.status, message in answer.message) == (400, True), answer.content


async def test_kv_goes_over_chat_too(start, client):
    prefill, decode = await start("prefill"), await start("decode")
    first = await chat(client, prefill, max_tokens=1, kv_transfer_params=PREFILL)
    params = first.json["kv_transfer_params"]
    assert params["do_remote_prefill"]
    answer = await chat(client, decode, kv_transfer_params=params)
    assert answer.json["kv_transfer_params"] is None
    assert prefill.state().handovers["taken"] == 1
    assert (
        answer.json["choices"][0]["message"]["content"]
        == (await chat(client, prefill)).json["choices"][0]["message"]["content"]
    )


async def test_openais_client_reads_it(sim):
    async with openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="x") as api:
        answer = await api.chat.completions.create(model="sim", messages=MESSAGES, max_completion_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await api.chat.completions.create(
                model="sim", messages=MESSAGES, max_completion_tokens=3, stream=True
            )
        ]
        assert "".join(pieces) == answer.choices[0].message.content
        assert [model.id async for model in api.models.list()] == ["sim"]


async def test_a_response_and_a_message_are_the_chat_that_they_mean(sim, client):
    expected = (await chat(client, sim)).json
    said = expected["choices"][0]["message"]["content"]
    prompt = expected["usage"]["prompt_tokens"]
    response = (await client.post(sim, "/v1/responses", {"input": "Hi", "max_output_tokens": 4})).json
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["output"][0]["content"][0]["text"] == said
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (prompt, 4)
    message = (await client.post(sim, "/v1/messages", {"messages": MESSAGES, "max_tokens": 4})).json
    assert (message["type"], message["stop_reason"], message["content"][0]["text"]) == ("message", "max_tokens", said)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/responses", {"input": [5]}, 400, "a message is an object"),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"}, 404, "resp_1"),
        ("/v1/responses", {"input": "Hi", "model": "nobody"}, 404, "nobody"),
        ("/v1/messages", {"messages": MESSAGES}, 400, "Field required"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens must be at least 1"),
    ],
)
async def test_what_is_refused_at_the_other_doors(sim, client, path, body, status, message):
    answer = await client.post(sim, path, body)
    assert (answer.status, message in answer.json["error"]["message"]) == (status, True)


async def test_kv_goes_over_responses_and_messages_too(start, client):
    sim = await start()
    for path, body in [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ]:
        answer = await client.post(sim, path, body | {"kv_transfer_params": PREFILL})
        assert answer.json["kv_transfer_params"]["do_remote_prefill"] is True
