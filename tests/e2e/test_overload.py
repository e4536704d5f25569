"""More than the engines hold: prefill is asked ten times as much as it takes at once, decode has room for three."""

import concurrent.futures
import json
import random

import pytest

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 32
CHANCE = random.Random(5)


def body_of(length: int) -> dict:
    return {
        "model": "tiny",
        "prompt": [CHANCE.randrange(100, 40000) for _ in range(length)],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(conftest, url: str, body: dict) -> list[int]:
    status, text = conftest.post(f"{url}/v1/completions", conftest.salted(body))
    assert status == 200, text
    return json.loads(text)["choices"][0]["token_ids"]


def test_prompts_that_fill_decode_to_its_last_block(deployment, conftest):
    """All KV is there and no block is left, while the next token of each answer needs one."""
    blocks = (conftest.DECODE_BLOCKS - 1) // 3
    bodies = [body_of(blocks * BLOCK_TOKENS) for _ in range(3)]
    expected = [ask(conftest, deployment.plain_url, body) for body in bodies]
    with deployment.spoiling("slow"), concurrent.futures.ThreadPoolExecutor(len(bodies)) as clients:
        answers = list(clients.map(lambda body: ask(conftest, deployment.url, body), bodies))
    assert answers == expected


def test_all_are_answered_and_all_answers_are_right(deployment, conftest):
    bodies = [body_of(length) for length in (980, 704, 40, 960, 300, 640, 970, 10)]  # some of whole blocks
    expected = [ask(conftest, deployment.plain_url, body) for body in bodies]
    many = 10 * conftest.PREFILL_SEQS
    with concurrent.futures.ThreadPoolExecutor(many) as clients:
        answers = list(
            clients.map(lambda number: ask(conftest, deployment.url, bodies[number % len(bodies)]), range(many))
        )
    for number, tokens in enumerate(answers):
        assert tokens == expected[number % len(bodies)]
    for tier in ("prefill", "decode"):
        assert deployment.metrics(tier).running == deployment.metrics(tier).waiting == 0
