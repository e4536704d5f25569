"""Split and plain vLLM give the same answer; and the same comparison fails when a transferred block is spoiled."""

import json
import math
import random
import uuid

import pytest

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 32
TOKENS_OUT = 24
LENGTHS = {"short": 3, "block - 1": 31, "one block": 32, "block + 1": 33, "many blocks": 200, "many whole blocks": 256}


def ids_of(length: int) -> list[int]:
    return [random.Random(length).randrange(100, 40000) for _ in range(length)]


def completion(prompt: list[int]) -> dict:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS_OUT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def chat(turns: int) -> dict:
    words = random.Random(turns)
    messages = []
    for _ in range(turns):
        messages.append(
            {"role": "user", "content": " ".join(words.choice(["tree", "lamp", "7", "né"]) for _ in range(40))}
        )
        messages.append(
            {"role": "assistant", "content": " ".join(words.choice(["yes", "no", "why"]) for _ in range(20))}
        )
    messages.append({"role": "user", "content": "And then?"})
    return {
        "model": "tiny",
        "messages": messages,
        "max_tokens": TOKENS_OUT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def tokens_of(answer: tuple[int, str]) -> list[int]:
    status, text = answer
    assert status == 200, text
    return json.loads(text)["choices"][0]["token_ids"]


def streamed_tokens(conftest, answer: tuple[int, str]) -> tuple[list[int], str]:
    status, text = answer
    assert status == 200, text
    ids, written = [], ""
    for event in conftest.events(text):
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
            delta = choice.get("delta")
            written += (delta.get("content") or "") if delta is not None else choice["text"]
    return ids, written


@pytest.mark.parametrize("name", LENGTHS)
def test_completions_are_equal_token_for_token(deployment, conftest, name):
    body = completion(ids_of(LENGTHS[name]))
    split = conftest.post(f"{deployment.url}/v1/completions", conftest.salted(body))
    plain = conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    assert tokens_of(split) == tokens_of(plain)
    assert len(tokens_of(split)) == TOKENS_OUT
    strip = ("id", "created", "system_fingerprint")
    assert {k: v for k, v in json.loads(split[1]).items() if k not in strip} == {
        k: v for k, v in json.loads(plain[1]).items() if k not in strip
    }


@pytest.mark.parametrize(
    ("name", "how"),
    # one block has no other that it could be mistaken for
    [(name, how) for name in LENGTHS for how in ("zero", "mistake") if how == "zero" or LENGTHS[name] > BLOCK_TOKENS],
)
def test_a_spoiled_block_is_noticed(deployment, conftest, name, how):
    body = completion(ids_of(LENGTHS[name]))
    with deployment.spoiling(how):
        split = conftest.post(f"{deployment.url}/v1/completions", conftest.salted(body))
    plain = conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    assert tokens_of(split) != tokens_of(plain)


@pytest.mark.parametrize("name", LENGTHS)
def test_decode_computes_one_prompt_token_and_receives_whole_blocks(deployment, conftest, name):
    length = LENGTHS[name]
    request_id = uuid.uuid4().hex
    before = deployment.metrics("decode")
    body = conftest.salted(completion(ids_of(length)))
    status, text = conftest.post(f"{deployment.url}/v1/completions", body, headers={"X-Request-Id": request_id})
    assert status == 200, text
    after = deployment.metrics("decode")
    (generation,) = deployment.record(request_id)["generations"]
    assert generation["split"] is True
    assert (generation["prefill_engine"], generation["decode_engine"]) == ("prefill-0", "decode-0")

    def grown(source: str) -> float:
        return after.prompt_tokens.get(source, 0) - before.prompt_tokens.get(source, 0)

    assert grown("local_compute") <= 1
    assert grown("local_cache_hit") == 0
    assert grown("external_kv_transfer") >= length - 1
    moved = "vllm:nixl_bytes_transferred_sum"
    block_bytes = BLOCK_TOKENS * conftest.tiny.KV_BYTES_PER_TOKEN
    assert after.values[moved] - before.values.get(moved, 0) == math.ceil(length / BLOCK_TOKENS) * block_bytes


@pytest.mark.parametrize("turns", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chats_are_equal(deployment, conftest, turns, stream):
    body = chat(turns)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    split = conftest.post(f"{deployment.url}/v1/chat/completions", conftest.salted(body))
    plain = conftest.post(f"{deployment.plain_url}/v1/chat/completions", conftest.salted(body))
    if stream:
        assert streamed_tokens(conftest, split) == streamed_tokens(conftest, plain)
        assert conftest.events(split[1])[-1]["usage"] == conftest.events(plain[1])[-1]["usage"]
    else:
        assert tokens_of(split) == tokens_of(plain)
        assert json.loads(split[1])["choices"] == json.loads(plain[1])["choices"]
        assert json.loads(split[1])["usage"] == json.loads(plain[1])["usage"]


@pytest.mark.parametrize("how", ["zero", "mistake"])
@pytest.mark.parametrize("turns", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_spoiled_chat_is_noticed(deployment, conftest, turns, stream, how):
    body = chat(turns) | ({"stream": True} if stream else {})
    with deployment.spoiling(how):
        split = conftest.post(f"{deployment.url}/v1/chat/completions", conftest.salted(body))
    plain = conftest.post(f"{deployment.plain_url}/v1/chat/completions", conftest.salted(body))
    if stream:
        assert streamed_tokens(conftest, split) != streamed_tokens(conftest, plain)
    else:
        assert tokens_of(split) != tokens_of(plain)


def conversation(deployment, conftest) -> list[tuple[list[int], list[int]]]:
    """Token ids, split and plain, of three turns of which each begins with the last one's prompt."""
    salts, answers = [uuid.uuid4().hex, uuid.uuid4().hex], []
    for turns in (1, 2, 3):
        body = chat(3)
        body["messages"] = body["messages"][: 2 * turns + 1]
        urls = (deployment.url, deployment.plain_url)
        answers.append(
            tuple(
                tokens_of(conftest.post(f"{url}/v1/chat/completions", {**body, "cache_salt": salt}))
                for url, salt in zip(urls, salts, strict=True)
            )
        )
    return answers


def test_a_conversation_reuses_what_both_sides_have_cached(deployment, conftest):
    before = {tier: deployment.metrics(tier).prompt_tokens for tier in ("prefill", "decode")}
    for split, plain in conversation(deployment, conftest):
        assert split == plain
    for tier, tokens in before.items():
        hits = deployment.metrics(tier).prompt_tokens["local_cache_hit"] - tokens["local_cache_hit"]
        assert hits >= 2 * BLOCK_TOKENS, tier


def test_a_spoiled_conversation_is_noticed(deployment, conftest):
    with deployment.spoiling("zero"):
        answers = conversation(deployment, conftest)
    assert all(split != plain for split, plain in answers)


def test_the_header_serves_a_request_colocated(deployment, conftest):
    request_id = uuid.uuid4().hex
    headers = {"X-Request-Id": request_id, "X-Trivet-Serve": "colocated"}
    body = completion(ids_of(100))
    answer = conftest.post(f"{deployment.url}/v1/completions", conftest.salted(body), headers=headers)
    plain = conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    assert tokens_of(answer) == tokens_of(plain)
    (generation,) = deployment.record(request_id)["generations"]
    assert generation["split"] is False
    assert generation["prefill_engine"] is None
    assert generation["reason"] == "the request asks for it"
