"""Prompts with images on the tokens plane: rendered in the gateway, their tensors sent to both engines.

A plain engine beside them, vLLM without any connector, has the same weights and is asked the same.
"""

import concurrent.futures
import dataclasses
import json
import uuid

import pytest

from helpers.vision import asking, part, words, write_vision_model
from trivet.legs.bodies import behind, decode_body
from trivet.legs.wire import parts_of
from trivet.render.contract import Features, TokenRequest
from trivet.topology import make_plan, parse_topology
from trivet.topology.ports import PortBook

pytestmark = [pytest.mark.e2e, pytest.mark.full]

CHUNK_TOKENS = 48
"""So that an image is computed in several steps."""
DECODE_BLOCKS = 40
"""Room for three of the longest prompts here: of more at once, some are thrown out and computed again."""
TOPOLOGY = """\
model: {name: MODEL, served_names: [tiny], max_length: 1024}
kv: KV
flags:
  block-size: 32
  long-prefill-token-threshold: CHUNK
  limit-mm-per-prompt: '{"image": 3}'
env: {PYTHONPATH: 'PLUGINS'}
tiers: {prefill: , decode: {flags: {num-gpu-blocks-override: BLOCKS}}, mixed: }
gateway: {port: 0, drain_s: 5, split: always, guard: off}
"""
TOKENS_OUT = 12
PROMPTS = {
    "no image": [words("What is a trivet? " * 20)],
    "one at the beginning": [part(1), words("What is this?")],
    "one in the middle": [words("Look at this: "), part(2, 224, 112), words("and say what it is. " * 10)],
    "one at the end": [words("Look at this: "), part(3, 56, 224)],
    "two": [part(4), words(" or "), part(5, 168, 168), words("?")],
    "the same twice": [part(6), part(6)],
    "three, of several chunks each": [part(7, 448, 224), part(8, 224, 448), part(9, 336, 336), words("Which?")],
}
FIRST = {"prefill's token first": {}, "decode makes the first": {"presence_penalty": 0.01}}


@pytest.fixture(scope="module")
def service(conftest, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    model = write_vision_model(folder / "model")
    text = TOPOLOGY.replace("MODEL", str(model)).replace("PLUGINS", conftest.PYTHONPATH).replace("KV", conftest.KV)
    text = text.replace("CHUNK", str(CHUNK_TOKENS)).replace("BLOCKS", str(DECODE_BLOCKS))
    ports = PortBook()
    plan = make_plan(parse_topology(text), ports, model=str(model))
    spoil = folder / "spoil"
    engines = tuple(conftest.spoilable(one, spoil) if one.tier == "decode" else one for one in plan.engines)
    running = conftest.Deployment(dataclasses.replace(plan, engines=engines), folder, spoil)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        ports.close()


@pytest.fixture
def ask(service, conftest):
    """Token ids of a chat's answer, and how many tokens its prompt had."""

    def answer(url, messages, salt=True, **more):
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": TOKENS_OUT,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"cache_salt": uuid.uuid4().hex} if salt else {}),
            **more,
        }
        status, text = conftest.post(f"{url}/v1/chat/completions", body)
        assert status == 200, text
        said = json.loads(text)
        return said["choices"][0]["token_ids"], said["usage"]["prompt_tokens"]

    return answer


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", PROMPTS)
def test_split_is_colocated_is_plain(service, ask, conftest, name, first):
    messages = asking(*PROMPTS[name])
    plain = ask(service.plain_url, messages, **FIRST[first])
    before = service.metrics("decode").prompt_tokens
    assert ask(service.url, messages, **FIRST[first]) == plain
    after = service.metrics("decode").prompt_tokens
    counted = {source: after[source] - before.get(source, 0) for source in after}
    assert counted["local_compute"] <= 1
    assert counted["external_kv_transfer"] >= plain[1] - 1
    assert ask(service.engine("decode").url, messages, **FIRST[first]) == plain


@pytest.fixture(scope="module")
def text_plane(service, conftest, tmp_path_factory):
    """Another gateway over the same engines, which render by themselves."""
    model = service.plan.model
    text = conftest.TEXT_TOPOLOGY.replace("MODEL_PATH", model)
    for tier in ("prefill", "decode", "mixed"):
        engine = service.engine(tier)
        known = {"url": engine.url} | ({"kv_address": engine.kv_address} if engine.kv_address else {})
        text = text.replace(tier.upper(), json.dumps(known))
    ports, folder = PortBook(), tmp_path_factory.mktemp("images-as-text")
    running = conftest.Deployment(make_plan(parse_topology(text), ports, model=model), folder, folder / "spoil")
    try:
        running.start()
        yield running
    finally:
        running.stop()
        ports.close()


@pytest.mark.parametrize("name", ["one at the end", "three, of several chunks each"])
def test_engines_that_render_by_themselves_know_each_others_images(service, text_plane, ask, name):
    messages = asking(*PROMPTS[name])
    plain = ask(service.plain_url, messages)
    before = service.metrics("decode").prompt_tokens
    assert ask(text_plane.url, messages) == plain
    after = service.metrics("decode").prompt_tokens
    assert after["external_kv_transfer"] - before["external_kv_transfer"] >= plain[1] - 1


@pytest.mark.parametrize("name", [name for name in PROMPTS if name != "no image"])
def test_a_spoiled_block_is_noticed(service, ask, name):
    messages = asking(*PROMPTS[name])
    with service.spoiling("zero"):
        spoiled = ask(service.url, messages)
    assert spoiled != ask(service.plain_url, messages)


def test_prompts_of_the_same_tokens_are_told_apart_by_their_images(service, ask):
    """Also where caches may be read: engines' prefix caches, their caches of images, the gateway's of tensors."""
    answers = {}
    for turn in range(3):
        for seed in (11, 12, 13):
            messages = asking(words("This is "), part(seed, 224, 224), words("and what is it? " * 10))
            answer = ask(service.url, messages, salt=False)
            assert answers.setdefault(seed, answer) == answer, turn
            assert answer == ask(service.plain_url, messages)
    assert len({str(tokens) for tokens, _ in answers.values()}) == 3
    assert len({length for _, length in answers.values()}) == 1


def test_a_conversation_goes_on_with_its_images(service, ask):
    messages = asking(part(21, 224, 224), words("What is it?"))
    for turn in range(3):
        assert ask(service.url, messages, salt=False) == ask(service.plain_url, messages, salt=False), turn
        more = [part(22 + turn)] if turn else []
        messages = [*messages, {"role": "assistant", "content": f"A trivet, {turn}."}, *asking(words("And?"), *more)]


def test_streams_are_equal(service, conftest):
    body = {"model": "tiny", "messages": asking(*PROMPTS["two"]), "max_tokens": TOKENS_OUT, "temperature": 0}

    def tokens(url):
        asked = conftest.salted(body | {"ignore_eos": True, "return_token_ids": True, "stream": True})
        status, text = conftest.post(f"{url}/v1/chat/completions", asked)
        assert status == 200, text
        choices = (choice for event in conftest.events(text) for choice in event["choices"])
        return [token for choice in choices for token in choice.get("token_ids") or []]

    assert tokens(service.url) == tokens(service.plain_url)
    assert len(tokens(service.url)) == TOKENS_OUT


def test_what_is_refused_is_refused_as_by_one_engine(service, conftest):
    body = {"model": "tiny", "messages": asking(part(1), part(2), part(3), part(4))}
    split, plain = (conftest.post(f"{url}/v1/chat/completions", body) for url in (service.url, service.plain_url))
    assert split == plain
    assert split[0] == 400


def rendered(service, conftest, messages):
    """The same prompt by vLLM's own hand: ids, and what it would send of the images."""
    status, text = conftest.post(
        f"{service.plain_url}/v1/chat/completions/render", {"model": "tiny", "messages": messages}
    )
    assert status == 200, text
    made = json.loads(text)
    return made["token_ids"], Features((), [json.dumps(made["features"]).encode()])


@pytest.mark.parametrize("sent", [1, 5, TOKENS_OUT - 1])
@pytest.mark.parametrize("name", ["one at the end", "three, of several chunks each"])
def test_an_answer_is_continued_behind_its_images(service, ask, conftest, name, sent):
    messages = asking(*PROMPTS[name])
    tokens, _ = ask(service.plain_url, messages)
    assert generated(service, conftest, messages, tokens[:sent]) == tokens[sent:]


def test_decode_computes_images_whose_kv_does_not_come(service, ask, conftest):
    messages = asking(*PROMPTS["two"])
    nowhere = {"prefill_address": "unix:/tmp/trivet-nobody-is-here", "first_token": False}
    params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, **nowhere}
    if conftest.CONNECTOR != "TrivetConnector":
        pytest.skip("these are TrivetConnector's parameters")
    assert generated(service, conftest, messages, [], params) == ask(service.plain_url, messages)[0]


def generated(service, conftest, messages, sent, params=None):
    """The rest of an answer, asked of the decode engine as the gateway asks for it."""
    ids, features = rendered(service, conftest, messages)
    sampling = {"max_tokens": TOKENS_OUT, "temperature": 0, "ignore_eos": True, "detokenize": False}
    request = TokenRequest("unused", ids, sampling, "tiny", features=features, cache_salt=uuid.uuid4().hex)
    raw = b"".join(parts_of(decode_body(behind(request, sent), params) | {"stream": False, "stream_options": None}))
    status, text = conftest.post(f"{service.engine('decode').url}/inference/v1/generate", None, raw=raw)
    assert status == 200, text
    return json.loads(text)["choices"][0]["token_ids"]


def test_requests_that_are_thrown_out_have_their_images_computed_again(service, ask, conftest):
    """With NixlConnector that ends the engine, as it does without anything of Trivet's: vLLM's V1 runner has no tensors
    any more of images whose KV was there.
    """
    if conftest.CONNECTOR != "TrivetConnector":
        pytest.skip("see transfer/backport.py")
    before = service.metrics("decode").values["vllm:num_preemptions_total"]
    prompts = [asking(words(f"{at}: "), part(100 + at, 448, 448), part(200 + at, 224, 224)) for at in range(6)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as clients:
        split = list(clients.map(lambda messages: ask(service.url, messages, max_tokens=150), prompts))
    assert service.metrics("decode").values["vllm:num_preemptions_total"] > before
    assert split == [ask(service.plain_url, messages, max_tokens=150) for messages in prompts]
