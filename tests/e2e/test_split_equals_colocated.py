"""Split and plain vLLM give the same answer; and the same comparison fails when a transferred block is spoiled."""

import concurrent.futures
import json
import math
import random
import uuid

import pytest

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 32
TOKENS_OUT = 24
LENGTHS = {
    "one token": 1,
    "short": 3,
    "block - 1": 31,
    "one block": 32,
    "block + 1": 33,
    "many blocks": 200,
    "one chunk": 256,
    "one chunk + 1": 257,
    "many chunks": 700,
    "nearly the context": 1024 - TOKENS_OUT,
}


def ids_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(length + seed)
    return [chance.randrange(100, 40000) for _ in range(length)]


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
    if LENGTHS[name] == 1 and not deployment.plan.connector.hands_over_first_token:
        pytest.skip("decode computes the last prompt token itself, and here there is no other")
    body = completion(ids_of(LENGTHS[name]))
    with deployment.spoiling(how):
        split = conftest.post(f"{deployment.url}/v1/completions", conftest.salted(body))
    plain = conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body))
    assert tokens_of(split) != tokens_of(plain)


class Counted:
    """What decode's engine counts while the block runs."""

    def __init__(self, deployment, conftest) -> None:
        self._deployment = deployment
        self._block_bytes = BLOCK_TOKENS * conftest.tiny.KV_BYTES_PER_TOKEN
        self._metric = deployment.plan.connector.bytes_metric

    def __enter__(self):
        self._before = self._deployment.metrics("decode")
        return self

    def __exit__(self, *_: object) -> None:
        after = self._deployment.metrics("decode")
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self.tokens = {
            name: after.prompt_tokens.get(name, 0) - self._before.prompt_tokens.get(name, 0) for name in sources
        }
        moved = after.values.get(self._metric, 0) - self._before.values.get(self._metric, 0)
        self.blocks = moved / self._block_bytes


def asked(deployment, conftest, body: dict) -> tuple[list[int], dict]:
    """Token ids of the gateway's answer, and the record of its one generation."""
    request_id = uuid.uuid4().hex
    answer = conftest.post(f"{deployment.url}/v1/completions", body, headers={"X-Request-Id": request_id})
    (generation,) = deployment.record(request_id)["generations"]
    return tokens_of(answer), generation


@pytest.mark.parametrize("name", LENGTHS)
def test_decode_computes_one_prompt_token_and_receives_whole_blocks(deployment, conftest, name):
    length = LENGTHS[name]
    with Counted(deployment, conftest) as counted:
        _, generation = asked(deployment, conftest, conftest.salted(completion(ids_of(length))))
    assert generation["split"] is True
    assert (generation["prefill_engine"], generation["decode_engine"]) == ("prefill-0", "decode-0")
    assert counted.tokens["local_compute"] <= 1
    assert counted.tokens["local_cache_hit"] == 0
    assert counted.tokens["external_kv_transfer"] >= length - 1
    assert counted.blocks == math.ceil(length / BLOCK_TOKENS)


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}], ids=["alone", "of an echo"])
def test_log_probabilities_of_the_prompt_are_prefills(deployment, conftest, more):
    with Counted(deployment, conftest) as counted:
        _, generation = asked(deployment, conftest, conftest.salted(completion(ids_of(200)) | more))
    assert generation["split"] is True
    assert counted.tokens["local_compute"] <= 1
    assert counted.blocks == math.ceil(200 / BLOCK_TOKENS)


def warm(conftest, engine, body: dict) -> None:
    """Makes an engine compute the prompt by itself, so that it finds it in its cache the next time."""
    tokens_of(conftest.post(f"{engine.url}/v1/completions", body | {"max_tokens": 1}))


@pytest.mark.parametrize("spoiled", ["", "zero"])
@pytest.mark.parametrize("tier", ["prefill", "decode"])
@pytest.mark.parametrize("length", [200, 256, 700])
def test_one_side_has_the_prompt_cached(deployment, conftest, tier, length, spoiled):
    """What decode has is not sent again; what prefill has is sent though it is not computed."""
    body = conftest.salted(completion(ids_of(length)))
    warm(conftest, deployment.engine(tier), body)
    with deployment.spoiling(spoiled), Counted(deployment, conftest) as counted:
        tokens, generation = asked(deployment, conftest, body)
    expected = tokens_of(conftest.post(f"{deployment.plain_url}/v1/completions", conftest.salted(body)))
    assert (tokens == expected) is not bool(spoiled)
    assert generation["split"] is True
    # whole blocks are found in a cache, and at least the last token is computed
    cached = (length - 1) // BLOCK_TOKENS
    if tier == "prefill":
        assert generation["cached_tokens"] == cached * BLOCK_TOKENS
        assert counted.blocks == math.ceil(length / BLOCK_TOKENS)
    else:
        assert generation["cached_tokens"] == 0
        assert counted.blocks == math.ceil(length / BLOCK_TOKENS) - cached
        assert counted.tokens["local_cache_hit"] == cached * BLOCK_TOKENS
    assert counted.tokens["local_compute"] <= 1


@pytest.mark.parametrize("spoiled", ["", "zero", "mistake"])
def test_many_at_once(deployment, conftest, spoiled):
    bodies = [completion(ids_of(length, seed)) for seed in (1, 2) for length in (40, 64, 129, 255, 300, 513, 700, 990)]
    url, plain_url = (f"{where}/v1/completions" for where in (deployment.url, deployment.plain_url))
    with deployment.spoiling(spoiled), concurrent.futures.ThreadPoolExecutor(len(bodies)) as clients:
        answers = list(clients.map(lambda body: conftest.post(url, conftest.salted(body)), bodies))
    for answer, body in zip(answers, bodies, strict=True):
        expected = conftest.post(plain_url, conftest.salted(body))
        assert (tokens_of(answer) == tokens_of(expected)) is not bool(spoiled)


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
