"""Models of other shapes than the tiny Llama, and engines of two ranks: TrivetConnector moves their KV as well.

Each shape has a prefill and a decode engine of its own. Decode, asked without a transfer, gives the colocated answer.
"""

import concurrent.futures
import dataclasses
import json
import random
import uuid

import pytest

from trivet.topology import make_plan, parse_topology
from trivet.topology.ports import PortBook

pytestmark = pytest.mark.e2e

WINDOW = 64
BLOCK_TOKENS = 32
TOPOLOGY = """\
model: {name: MODEL, served_names: [tiny], max_length: 1024}
kv: {connector: TrivetConnector, options: {staging_mib: 8, piece_mib: 1, checksums: true}}
flags: {block-size: 32, long-prefill-token-threshold: 256}
env: {PYTHONPATH: 'PLUGINS'}
tiers: {prefill: {tensor_parallel: RANKS}, decode: {tensor_parallel: RANKS}}
gateway: {port: 0, drain_s: 5, split: always, guard: off}
"""
SHAPES = {
    "windows beside full attention": ("gemma3_text", 1),
    "windows alone": ("mistral", 1),
    "two ranks": ("llama", 2),
}
IN_EVERY_RUN = "windows beside full attention"
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 159, 256, 257, 511, 700, 1000)
"""Some end where the window of the last token begins with a block: 95, 127, 159, 511. See ``computes_itself``."""
TOKENS_OUT = 12


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == IN_EVERY_RUN else pytest.mark.full) for name in SHAPES],
)
def shape(request, conftest, tiny_model, tmp_path_factory):
    if conftest.CONNECTOR != "TrivetConnector":
        pytest.skip("of TrivetConnector")
    family, ranks = SHAPES[request.param]
    folder = tmp_path_factory.mktemp("shape")
    model = tiny_model if family == "llama" else conftest.tiny.write_windowed_model(folder / family, family, WINDOW)
    text = TOPOLOGY
    for name, value in {"MODEL": str(model), "PLUGINS": conftest.PYTHONPATH, "RANKS": str(ranks)}.items():
        text = text.replace(name, value)
    ports = PortBook()
    plan = make_plan(parse_topology(text), ports, model=str(model))
    spoil = folder / "spoil"
    engines = tuple(conftest.spoilable(one, spoil) if one.tier == "decode" else one for one in plan.engines)
    running = conftest.Deployment(dataclasses.replace(plan, engines=engines), folder, spoil)
    running.windowed = family != "llama"
    try:
        running.start()
        yield running
    finally:
        running.stop()
        ports.close()


def ids_of(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(200, 40000) for _ in range(length)]


def generated(conftest, url: str, ids: list[int], tokens: int, transfer: dict | None = None) -> dict:
    body = {
        "model": "tiny",
        "token_ids": ids,
        "sampling_params": {"max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "cache_salt": uuid.uuid4().hex,
        "stream": False,
    }
    if transfer is not None:
        body["kv_transfer_params"] = transfer
    status, text = conftest.post(f"{url}/inference/v1/generate", body)
    assert status == 200, text
    return json.loads(text)


def tokens_of(answer: dict) -> list[int]:
    return answer["choices"][0]["token_ids"]


def computes_itself(shape, length: int, first_token: bool) -> bool:
    """Whether decode needs the block before its window: it makes the first token, and vLLM has given that back."""
    ends_there = length > WINDOW and (length - WINDOW + 1) % BLOCK_TOKENS == 0
    return shape.windowed and not first_token and ends_there


def split(shape, conftest, ids: list[int], *, first_token: bool) -> list[int]:
    """Both legs, asked as the gateway asks them."""
    prefill, decode = shape.engine("prefill"), shape.engine("decode")
    connector = shape.plan.connector
    of_prefill, of_decode = connector.rendezvous(uuid.uuid4().hex, prefill.kv_address, first_token=first_token)
    with concurrent.futures.ThreadPoolExecutor(2) as legs:
        behind = legs.submit(generated, conftest, decode.url, ids, TOKENS_OUT, of_decode)
        ahead = generated(conftest, prefill.url, ids, 1, of_prefill)
        assert computes_itself(shape, len(ids), first_token) or not connector.problem_of(ahead["kv_transfer_params"])
        tokens = tokens_of(behind.result())
    return (tokens_of(ahead) + tokens)[:TOKENS_OUT] if first_token else tokens


@pytest.mark.parametrize("first_token", [True, False], ids=["prefill's token first", "decode makes the first"])
@pytest.mark.parametrize("length", LENGTHS)
def test_split_is_equal_to_colocated(shape, conftest, length, first_token):
    ids = ids_of(length)
    before = shape.metrics("decode").prompt_tokens
    assert split(shape, conftest, ids, first_token=first_token) == tokens_of(
        generated(conftest, shape.engine("decode").url, ids, TOKENS_OUT)
    )
    counted = shape.metrics("decode").prompt_tokens
    moved = counted.get("external_kv_transfer", 0) - before.get("external_kv_transfer", 0)
    assert moved == 0 if computes_itself(shape, length, first_token) else moved >= length - 1


@pytest.mark.parametrize("length", [33, 159, 700])
def test_a_spoiled_block_is_noticed(shape, conftest, length):
    ids = ids_of(length)
    with shape.spoiling("zero"):
        tokens = split(shape, conftest, ids, first_token=True)
    assert tokens != tokens_of(generated(conftest, shape.engine("decode").url, ids, TOKENS_OUT))


def test_many_through_the_gateway(shape, conftest):
    """Prompts that share prefixes, so that both sides' caches know some of them."""
    bodies = [
        {
            "model": "tiny",
            "prompt": ids_of(1000)[:length],
            "max_tokens": TOKENS_OUT,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for length in LENGTHS[1:]
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda body: conftest.post(f"{shape.url}/v1/completions", body), bodies * 2))
    for (status, text), body in zip(answers, bodies * 2, strict=True):
        assert status == 200, text
        expected = generated(conftest, shape.engine("decode").url, body["prompt"], TOKENS_OUT)
        assert json.loads(text)["choices"][0]["token_ids"] == tokens_of(expected)
