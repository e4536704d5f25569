"""``/inference/v1/generate`` over HTTP, in vLLM's shapes."""

import asyncio
import itertools

import pytest

from helpers.sim_client import PROMPT, until
from trivet.legs import bodies
from trivet.sim import SimEngine

CHOICE = {
    "index",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "routed_experts",
    "sampling_mask",
    "weight_versions",
    "logprobs",
}


async def test_streamed_as_vllm_032_does(sim, client):
    answer = await client.stream(sim, leg="decode", max_tokens=3)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *tokens, usage, done = answer.events
    assert [set(event) for event in tokens] == [{"request_id", "usage", "output_mode", "choices"}] * 3
    assert [set(event["choices"][0]) for event in tokens] == [CHOICE] * 3
    assert {event["request_id"] for event in tokens} == {"generate-tokens-r-decode"}
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, "length"]
    assert usage == {
        "request_id": "generate-tokens-r-decode",
        "usage": {
            "prompt_tokens": 41,
            "total_tokens": 44,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "output_mode": "tokens",
        "choices": [],
    }
    assert done == "[DONE]"


async def test_whole_as_vllm_032_does(sim, client):
    answer = await client.generate(sim, leg="prefill", max_tokens=2)
    facts = answer.json
    assert set(facts) == {
        *("request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_id_logprobs"),
        *("prompt_token_ids", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params"),
        *("output_mode", "choices"),
    }
    assert set(facts["choices"][0]) == CHOICE
    assert facts["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert facts["kv_transfer_params"] is None
    assert len(answer.tokens) == 2


async def test_streamed_and_whole_give_the_same_tokens(sim, client):
    assert (await client.stream(sim, max_tokens=20)).tokens == (await client.generate(sim, max_tokens=20)).tokens


async def test_an_answer_goes_on_alike_on_another_engine(start, client):
    one, other = await start(), await start(block_size=64, max_num_batched_tokens=7)
    whole = (await client.generate(one, max_tokens=30)).tokens
    assert (await client.generate(other, [*PROMPT, *whole[:11]], max_tokens=19)).tokens == whole[11:]


async def test_usage_is_only_told_when_asked_for(sim, client):
    answer = await client.stream(sim, more={"stream_options": None})
    assert [bool(event.get("usage")) for event in answer.events[:-1]] == [False] * 4


async def test_continuous_usage_and_prompt_ids(sim, client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await client.stream(sim, more={"stream_options": options, "return_token_ids": True})
    *tokens, _, _ = answer.events
    assert [event["usage"]["completion_tokens"] for event in tokens] == [1, 2, 3, 4]
    assert tokens[0]["prompt_token_ids"] == PROMPT
    assert "prompt_token_ids" not in tokens[1]


async def test_several_answers(sim, client):
    answer = await client.generate(sim, n=3, temperature=1.0)
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
    assert answer.json["usage"]["completion_tokens"] == 12
    assert answer.json["usage"]["prompt_tokens"] == 41
    streamed = await client.stream(sim, n=2, temperature=1.0)
    ends = [event["choices"][0] for event in streamed.events[:-2] if event["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1]


async def test_logprobs(sim, client):
    for answer in (await client.generate(sim, logprobs=3, max_tokens=2), await client.stream(sim, logprobs=3)):
        events = answer.events[:-2] if answer.content.startswith(b"data") else [answer.json]
        content = [one for event in events for one in event["choices"][0]["logprobs"]["content"]]
        assert [one["token_id"] for one in content] == answer.tokens
        for one in content:
            assert one["top_logprobs"][0] == {key: one[key] for key in ("token_id", "logprob", "rank")}
            assert [top["rank"] for top in one["top_logprobs"]] == [1, 2, 3]
    (choice,) = (await client.generate(sim, logprobs=0, max_tokens=1)).json["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1


async def test_prompt_logprobs_skip_the_prefix_cache(sim, client):
    await client.generate(sim)
    answer = await client.generate(sim, prompt_logprobs=2, detokenize=False)
    first, *rest = answer.json["prompt_logprobs"]
    assert first is None
    assert len(rest) == 40
    assert list(rest[0]) == [str(PROMPT[1]), str(PROMPT[1] + 1)]
    assert rest[0][str(PROMPT[1])] == {"logprob": pytest.approx(-2.0, abs=2), "rank": 1, "decoded_token": None}
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await client.generate(sim)).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_text_mode(sim, client):
    answer = await client.generate(sim, more={"output_mode": "text"}, max_tokens=2, logprobs=1)
    (choice,) = answer.json["choices"]
    assert answer.json["output_mode"] == "text"
    assert len(choice["text"]) == 14
    assert choice["logprobs"]["content"][0]["token"] == choice["text"][:7]
    assert (await client.generate(sim, more={"output_mode": "text"}, detokenize=False)).status == 400


async def test_the_end_of_the_sequence(start, client):
    sim = await start(eos_chance=0.2)
    answer = await client.generate(sim, max_tokens=500)
    (choice,) = answer.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", None, 2)
    assert choice["token_ids"].count(2) == 1
    ignoring = await client.generate(sim, max_tokens=200, ignore_eos=True)
    assert len(ignoring.tokens) == 200
    assert ignoring.tokens[: len(answer.tokens)] == answer.tokens
    assert ignoring.tokens.count(2) > 1
    later = await client.generate(sim, max_tokens=500, min_tokens=len(answer.tokens) + 5)
    assert len(later.tokens) >= len(answer.tokens) + 5
    assert later.tokens.count(2) == 1


async def test_stop_tokens(sim, client):
    tokens = (await client.generate(sim, max_tokens=8)).tokens
    (choice,) = (await client.generate(sim, max_tokens=8, stop_token_ids=[tokens[3]])).json["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (tokens[:4], "stop", tokens[3])
    banned = await client.generate(sim, max_tokens=8, min_tokens=5, stop_token_ids=[tokens[3]])
    assert tokens[3] not in banned.tokens[:5]


async def test_stop_strings_end_the_answer(sim, client):
    text = (await client.generate(sim, more={"output_mode": "text"}, max_tokens=8)).json["choices"][0]["text"]
    stop = text[9:12]
    (choice,) = (await client.generate(sim, more={"output_mode": "text"}, max_tokens=8, stop=[stop])).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:9], "stop", stop)
    assert len(choice["token_ids"]) == 2
    await sim.idle()
    assert sim.state().pool["used"] == 0


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist. Valid aliases: sim."),
        ({"token_ids": []}, 400, "at least 1 item"),
        ({"token_ids": [1, -2]}, 400, "negative"),
        ({"token_ids": ["a"]}, 400, "valid integer"),
        ({"token_ids": None}, 400, "valid list"),
        ({"token_ids": [7] * 100}, 400, "(length 100) plus the number of requested output tokens"),
        ({"token_ids": [7] * 101}, 400, "(length 101) is longer than the maximum model length of 100"),
        ({"sampling_params": 3}, 400, "sampling_params"),
        ({"sampling_params": {"max_tokens": 0}}, 400, "max_tokens must be at least 1, got 0"),
        ({"sampling_params": {"max_tokens": 2, "min_tokens": 3}}, 400, "less than or equal to max_tokens=2"),
        ({"sampling_params": {"n": 2, "temperature": 0}}, 400, "n must be 1 when using greedy sampling"),
        ({"sampling_params": {"temperature": -1}}, 400, "temperature must be non-negative"),
        ({"sampling_params": {"logprobs": 21}}, 400, "Requested sample logprobs of 21"),
        ({"sampling_params": {"stop": ["x"], "detokenize": False}}, 400, "only supported when detokenize is True"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"kv_transfer_params": []}, 400, "kv_transfer_params"),
    ],
)
async def test_what_vllm_refuses(start, client, change, status, message):
    sim = await start(max_model_len=100)
    answer = await client.post(sim, "/inference/v1/generate", {**client.body(PROMPT, {}), **change})
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["code"] == status
    assert sim.state().requests[0].ended == "refused"
    assert not sim.state().executions


async def test_what_is_missing_or_not_json(sim, client):
    assert "Field required" in (await client.post(sim, "/inference/v1/generate", {"token_ids": [1]})).message
    assert (await client.post(sim, "/inference/v1/generate", [1])).status == 400
    async with client.session.post(f"{sim.url}/inference/v1/generate", data=b"{") as answer:
        assert answer.status == 400
    headers = {"Content-Type": "application/json"}
    async with client.session.post(f"{sim.url}/inference/v1/generate", data=b"{", headers=headers) as answer:
        assert (answer.status, "JSON decode error" in await answer.text()) == (400, True)


async def test_an_answer_is_cut_at_the_models_limit_as_in_vllm(start, client):
    sim = await start(max_model_len=50)
    (choice,) = (await client.generate(sim, max_tokens=500)).json["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (9, "length")
    unlimited = {"token_ids": PROMPT, "sampling_params": {}}
    assert len((await client.post(sim, "/inference/v1/generate", unlimited)).tokens) == 9


async def test_a_prompt_that_the_pool_cannot_hold(start, client):
    sim = await start(kv_tokens=32)
    answer = await client.generate(sim)
    assert (answer.status, "does not fit into the KV cache of 32 tokens" in answer.message) == (400, True)
    (choice,) = (await client.generate(sim, PROMPT[:20], max_tokens=100)).json["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (12, "length")


async def test_what_the_gateways_legs_send_is_understood(sim, client):
    from helpers.engines import token_request

    request = token_request(model="sim", cache_salt="s", priority=0)
    answer = await client.post(sim, "/inference/v1/generate", bodies.decode_body(request, None))
    assert len(answer.tokens) == 2


async def test_030_answers_as_that_version_does(start, client):
    old = await start(vllm_version="0.30.0")
    *tokens, _, _ = (await client.stream(old, leg="decode", logprobs=1)).events
    assert [set(event) for event in tokens] == [{"request_id", "usage", "choices"}] * 4
    assert "stop_reason" not in tokens[-1]["choices"][0]
    (entry,) = tokens[0]["choices"][0]["logprobs"]["content"]
    assert entry["token"].startswith("token_id:")
    assert "rank" not in entry
    assert (await client.post(old, "/inference/v1/abort_requests", {"request_ids": []})).status == 404
    assert "Valid aliases" not in (await client.post(old, "/v1/completions", {"model": "x", "prompt": "y"})).message
    assert (await client.get(old, "/version")).json == {"version": "0.30.0"}


async def test_030_leaves_out_a_last_event_without_tokens(start, client):
    old, new = await start(vllm_version="0.30.0", step_ms=5), await start(step_ms=5)
    ends = []
    for engine in (old, new):
        async with client.open_stream(engine, max_tokens=500) as answer:
            await answer.content.readany()
            engine.abort("generate-tokens-r-decode")
            ends.append(b'"finish_reason":"abort"' in await answer.content.read())
    assert ends == [False, True]


async def test_stream_interval(start, client):
    sim = await start(stream_interval=3)
    answer = await client.stream(sim, max_tokens=8)
    assert [len(event["choices"][0]["token_ids"]) for event in answer.events[:-2]] == [1, 3, 3, 1]


async def test_an_api_key_guards_what_vllm_guards(start, client):
    sim = await start(api_key="secret")
    body = client.body(PROMPT, {})
    for key, status in ((None, 401), ("Bearer no", 401), ("Basic secret", 401), ("Bearer secret", 200)):
        headers = {} if key is None else {"Authorization": key}
        assert (await client.post(sim, "/inference/v1/generate", body, **headers)).status == status
    assert (await client.get(sim, "/health")).status == 200
    assert (await client.get(sim, "/v1/models")).json == {"error": "Unauthorized"}
    assert sim.view().api_key == "secret"
    assert "secret" not in str(sim.state().facts())


async def test_scale_out_that_is_off(start, client):
    off, old = await start(enable_scale_out=False), await start(enable_scale_out=False, vllm_version="0.30.0")
    answer = await client.generate(off)
    assert (answer.status, answer.json["error"]["type"]) == (403, "PermissionDeniedError")
    assert (await client.generate(old)).status == 404
    assert (await client.post(off, "/v1/completions", {"prompt": "x"})).status == 200


async def test_models_version_health(start, client):
    sim = await start(model="org/m", served_names=("a", "b"), max_model_len=77)
    cards = (await client.get(sim, "/v1/models")).json["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
        ("a", "org/m", 77),
        ("b", "org/m", 77),
    ]
    assert (await client.get(sim, "/version")).json == {"version": "0.32.0"}
    assert (await client.get(sim, "/health")).status == 200
    assert (await client.get(sim, "/nothing")).status == 404
    assert (await client.generate(sim, more={"model": "b"})).json["model"] == "a"
    assert (await client.generate(sim, more={"model": "org/m"})).status == 404


async def test_a_client_that_leaves_ends_its_request_at_once(start, client):
    sim = await start(step_ms=5)
    async with client.open_stream(sim, max_tokens=1000) as answer:
        await answer.content.readany()
        assert sim.state().running == 1
    await until(lambda: not sim.state().running)
    state = sim.state()
    (record,) = state.aborts
    assert (record.ended, record.leg, record.executed, state.pool["used"]) == ("client gone", "decode", True, 0)
    assert 0 < record.completion_tokens < 100
    assert 0 <= state.facts()["aborts"][0]["age_s"] < 20
    assert 'finished_reason="abort"} 1.0' in (await client.get(sim, "/metrics")).content.decode()


async def test_a_client_that_does_not_stream_may_leave_too(start, client):
    sim = await start(step_ms=5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.generate(sim, max_tokens=1000)
    await until(lambda: not sim.state().running)
    assert sim.state().aborts[0].ended == "client gone"


async def test_abort_requests(start, client):
    sim = await start(step_ms=5)
    whole = asyncio.create_task(client.generate(sim, leg="decode", rid="a", max_tokens=1000))
    stream = asyncio.create_task(client.stream(sim, leg="decode", rid="b", max_tokens=1000))
    other = asyncio.create_task(client.generate(sim, leg="decode", rid="c", max_tokens=20))
    await until(lambda: sim.state().running == 3)
    await asyncio.sleep(0.03)
    ids = ["generate-tokens-a-decode", "generate-tokens-b-decode", "nobody"]
    answer = await client.post(sim, "/inference/v1/abort_requests", {"request_ids": ids})
    assert (answer.status, answer.content) == (200, b"")
    assert (await whole).json["choices"][0]["finish_reason"] == "abort"
    *_, last, usage, _ = (await stream).events
    assert last["choices"][0]["finish_reason"] == "abort"
    assert last["choices"][0]["token_ids"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert (await other).json["choices"][0]["finish_reason"] == "length"
    assert sorted(one.request_id for one in sim.state().aborts) == ["a-decode", "b-decode"]
    assert (await client.post(sim, "/inference/v1/abort_requests", {})).status == 400


async def test_state_remembers_the_newest_requests_without_their_tokens(start, client):
    sim = await start(keep_requests=2, name="p")
    for number in range(3):
        await client.generate(sim, leg="prefill", rid=f"r{number}")
    facts = (await client.get(sim, "/sim/state")).json
    assert [one["request_id"] for one in facts["requests"]] == ["r1-prefill", "r2-prefill"]
    assert facts["requests"][0]["body"]["token_ids"] == "41 ids"
    headers = {name.lower(): one for name, one in facts["requests"][0]["headers"].items()}
    assert headers["x-request-id"] == "r1-prefill"
    assert facts["executions"] == {"prefill": 3}
    assert facts["computed_prompt_tokens"] == {"prefill": 41 + 9 + 9}
    assert facts["name"] == "p"
    assert sim.state().legs() == ["prefill", "prefill"]


async def test_idle_says_what_it_was_busy_with(start, client):
    sim = await start(step_ms=20)
    asking = asyncio.create_task(client.generate(sim, max_tokens=100))
    await until(lambda: sim.state().running == 1)
    with pytest.raises(TimeoutError, match=r"'running': 1"):
        await sim.idle(0.05)
    asking.cancel()
    await sim.idle()


async def test_metrics_are_read_by_the_fleet(sim, client):
    from trivet.fleet.probe import canary, health, metrics, version

    assert await canary(client.session, sim.url, "sim") is None
    await client.generate(sim)
    await client.generate(sim)
    told = await metrics(client.session, sim.url)
    assert told is not None
    assert told.prompt_tokens == {
        "local_compute": 3 + 41 + 9,
        "local_cache_hit": 32,
        "external_kv_transfer": 0,
    }
    assert told.cached_block_tokens == 16
    assert told.values["vllm:generation_tokens_total"] == 9
    assert told.values["vllm:request_success_total"] == 3
    assert told.values["vllm:time_to_first_token_seconds_count"] == 3
    assert told.values["vllm:nixl_bytes_transferred_sum"] == 0
    assert told.cache_config["num_gpu_blocks"] == "32768"
    assert await version(client.session, sim.url) == "0.32.0"
    assert await health(client.session, sim.url) == "ok"


async def test_a_port_that_is_taken_is_said_in_one_line(sim):
    from trivet.errors import PortInUseError
    from trivet.sim import SimSettings

    with pytest.raises(PortInUseError, match=f"port {sim.port} of 127.0.0.1 is taken"):
        await SimEngine(SimSettings(port=sim.port)).start()


async def test_salts_keep_prompts_apart(sim, client):
    cached = []
    for salt in ("a", "b", "a", None):
        answer = await client.generate(sim, more={"cache_salt": salt})
        cached.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 32, 0]


async def test_many_at_once(sim, client):
    prompts = [[number, *PROMPT] for number in range(40)]
    answers = await asyncio.gather(*(client.stream(sim, prompt, max_tokens=30) for prompt in prompts))
    assert [len(answer.tokens) for answer in answers] == [30] * 40
    assert all(one.tokens != other.tokens for one, other in itertools.pairwise(answers))
    await sim.idle()
    state = sim.state()
    assert (state.pool["used"], state.executions) == (0, {"": 40})
