"""Names, fields, headers, prompts and faults of requests: taken or refused just as by ``vllm serve``."""

import json
import random

import pytest

from helpers.parity import CHAT, COLOCATED, COMPLETIONS, REFUSED, Case, chat, completion, table

pytestmark = pytest.mark.e2e

BLOCK_TOKENS, MAX_LENGTH = 32, 1024
BOTH = {"chat": chat, "completion": completion}
EMOJI = "👩🏽‍🚀🦊 木林森 é€ ᚠ 🇳🇴 नमस्ते"


def ids(length: int) -> list[int]:
    return [random.Random(length).randrange(100, 40000) for _ in range(length)]


@table(
    {
        f"{kind}, {name}": ask(**more)
        for kind, ask in BOTH.items()
        for name, more in {
            "an adapter": {"model": "tiny-a"},
            "another adapter": {"model": "tiny-b"},
            "an adapter, n 2": {"model": "tiny-a", "n": 2, "temperature": 0.8, "seed": 3, "generations": 2},
            "no model": {"model": ...},
        }.items()
    }
)
def test_models(parity, case):
    assert parity.check(case).body["model"] == case.body.get("model", "tiny")


@pytest.mark.parametrize("ask", BOTH.values(), ids=BOTH)
def test_adapters_answer_differently(parity, ask):
    said = {parity.check(ask(model=model)).said for model in ("tiny", "tiny-a", "tiny-b")}
    assert len(said) == 3


@table({kind: ask(model="tiny-alias") for kind, ask in BOTH.items()})
def test_an_alias_is_answered_under_the_first_name(parity, case):
    assert parity.check(case).body["model"] == "tiny"


@table(
    {
        f"{kind}, {name}": ask(**more)
        for kind, ask in BOTH.items()
        for name, more in {
            "unknown fields": {"something": {"new": [1, 2]}, "another": None},
            "a user": {"user": "someone"},
            "extra arguments": {"vllm_xargs": {"anything": "at all", "numbers": [1, 2.5], "one": 1}},
            "nothing said of KV": {"kv_transfer_params": None, "ec_transfer_params": None},
            "headers": {"headers": {"X-Something": "new", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}},
            "an API key that nobody asked for": {"headers": {"Authorization": "Bearer none"}},
            "nulls": {"stop": None, "seed": None, "logit_bias": None, "top_p": None, "n": 1},
            "special tokens kept": {"skip_special_tokens": False},
            "special tokens without spaces": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            "special tokens added": {"add_special_tokens": True},
            "no special tokens added": {"add_special_tokens": False},
            "truncated": {"truncate_prompt_tokens": 9},
            "truncated to one": {"truncate_prompt_tokens": 1},
            "truncated to the model's length": {"truncate_prompt_tokens": -1},
            "truncated from the right": {"truncate_prompt_tokens": 9, "truncation_side": "right"},
            "a session": {"session_id": "one"},
        }.items()
    }
    | {
        "chat, metadata": chat(metadata={"a": "b"}),
        "chat, store": chat(store=True),
        "chat, service tier": chat(service_tier="auto"),
        "chat, an unknown role": chat(messages=[{"role": "critic", "content": "A lamp is a tree."}]),
        "chat, a developer": chat(
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        ),
        "chat, a system": chat(
            messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        ),
        "chat, parts of text": chat(
            messages=[{"role": "user", "content": [{"type": "text", "text": "A lamp"}, {"type": "text", "text": "Hm"}]}]
        ),
        "chat, a named speaker": chat(messages=[{"role": "user", "name": "ann", "content": "Hi"}]),
        "chat, an unknown field of a message": chat(messages=[{"role": "user", "content": "Hi", "mood": "good"}]),
        "chat, continued": chat(
            messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I say"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        "chat, without the start of an answer": chat(add_generation_prompt=False),
        "chat, echo": chat(
            messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I say"}],
            continue_final_message=True,
            add_generation_prompt=False,
            echo=True,
        ),
        "chat, template arguments": chat(chat_template_kwargs={"reasoning_effort": "high"}),
        "chat, effort": chat(reasoning_effort="medium"),
        "chat, documents": chat(documents=[{"title": "a", "text": "b"}]),
        "chat, asked by header to be colocated": chat(served=COLOCATED, headers={"X-Trivet-Serve": "colocated"}),
        "completion, asked by header to be colocated": completion(
            served=COLOCATED, headers={"X-Trivet-Serve": "colocated"}
        ),
        "completion, special tokens in the prompt": completion(prompt="<|im_start|>user\nHi<|im_end|>\n"),
        "completion, without a salt": completion(prompt="Unsalted, and asked once only.", salted=False),
    }
)
def test_fields(parity, case):
    assert parity.check(case).status == 200


@table(
    {
        f"{kind}, {name}": ask(says, max_tokens=64, **more)
        for kind, ask in BOTH.items()
        for name, (says, more) in {
            "characters of several tokens": (EMOJI, {}),
            "with logprobs": (EMOJI, {"logprobs": True if kind == "chat" else 1}),
            "a stop string of several tokens": (EMOJI + "🦊 stop", {"stop": ["stop"]}),
            "a space first": (" leading", {}),
            "a mark in the middle": ("a<|im_start|>b", {}),
        }.items()
    }
)
def test_texts(parity, case):
    answer = parity.check(case)
    assert "\N{REPLACEMENT CHARACTER}" not in answer.text
    assert answer.said == "".join(case.says).replace("<|im_start|>", "").removesuffix("stop")


@table(
    {
        f"{kind}, {name}": ask(says, **more)
        for kind, ask in BOTH.items()
        for name, (says, more) in {
            "a character that is cut off": (("a", *"🦊"), {"max_tokens": 2}),
            "bytes that are no text": ((233, 180, 233, 180), {}),
            "spaces and lines": ("  a\n\n\tb  ", {}),
        }.items()
    }
)
def test_odd_texts(parity, case):
    assert parity.check(case).status == 200


LENGTHS = {
    "one token": 1,
    "two tokens": 2,
    "a block but one": BLOCK_TOKENS - 1,
    "a block": BLOCK_TOKENS,
    "a block and one": BLOCK_TOKENS + 1,
    "two blocks": 2 * BLOCK_TOKENS,
    "all but 13": MAX_LENGTH - 13,
    "all but 12": MAX_LENGTH - 12,
}


@table(
    {name: completion(prompt=ids(length), return_token_ids=True) for name, length in LENGTHS.items()}
    | {
        "all but one": completion(prompt=ids(MAX_LENGTH - 1), max_tokens=1),
        "all but one, no limit": completion(prompt=ids(MAX_LENGTH - 1), max_tokens=1, min_tokens=1),
        "a long chat without a limit": chat(messages=[{"role": "user", "content": "a " * 980}], max_tokens=...),
    },
)
def test_lengths(parity, case):
    assert parity.check(case).status == 200


BAD_JSON = b'{"model": "tiny", "messages": ['


@table(
    {
        "a prompt as long as the context": completion(prompt=ids(MAX_LENGTH), served=REFUSED),
        "a prompt longer than the context": completion(prompt=ids(MAX_LENGTH + 1), served=REFUSED),
        "a chat longer than the context": chat(messages=[{"role": "user", "content": "a " * 3000}], served=REFUSED),
        "one of two prompts too long": completion(prompt=[ids(5), ids(MAX_LENGTH)], served=REFUSED),
        "an empty prompt": completion(prompt="", served=REFUSED),
        "an empty list": completion(prompt=[], served=REFUSED),
        "no prompt": completion(prompt=..., served=REFUSED),
        "a prompt of a wrong type": completion(prompt={"text": "a"}, served=REFUSED),
        "a token outside the vocabulary": completion(prompt=[1, 99999999], served=REFUSED),
        "a negative token": completion(prompt=[1, -5], served=REFUSED),
        "no messages": chat(messages=[], served=REFUSED),
        "messages missing": chat(messages=..., served=REFUSED),
        "messages of a wrong type": chat(messages="Hi", served=REFUSED),
        "a message without a role": chat(messages=[{"content": "Hi"}], served=REFUSED),
        "content of an unknown kind": chat(
            messages=[{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}], served=REFUSED
        ),
        "an image for a model that sees none": chat(
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            served=REFUSED,
        ),
        "a wrong type": chat(max_tokens="many", served=REFUSED),
        "a salt of a wrong type": chat(cache_salt=5, salted=False, served=REFUSED),
        "an empty salt": chat(cache_salt="", salted=False, served=REFUSED),
        "truncated to less than nothing": chat(truncate_prompt_tokens=-2, served=REFUSED),
        "truncated to more than the context": completion(truncate_prompt_tokens=5000, served=REFUSED),
        "best of both worlds": chat(continue_final_message=True, add_generation_prompt=True, served=REFUSED),
        "prompt embeddings": completion(prompt=..., prompt_embeds="AAAA", served=REFUSED),
        "an unknown model": chat(model="nobody", served=REFUSED),
        "an unknown model of a completion": completion(model="nobody", served=REFUSED),
    }
)
def test_faults(parity, case):
    answer = parity.check(case)
    assert answer.refused or answer.status == 404
    assert json.loads(answer.text)["error"] if answer.status != 200 else answer.body["error"]


@table(
    {
        "malformed JSON": Case(CHAT, BAD_JSON, served=REFUSED),
        "malformed JSON of a completion": Case(COMPLETIONS, BAD_JSON, served=REFUSED),
        "no body": Case(CHAT, b"", served=REFUSED),
        "a list": Case(CHAT, b"[1, 2]", served=REFUSED),
        "a word": Case(CHAT, b'"word"', served=REFUSED),
        "no UTF-8": Case(CHAT, b'{"model": "\xff\xfe"}', served=REFUSED),
        "another content type": Case(CHAT, b"Hi", served=REFUSED, headers={"Content-Type": "text/plain"}),
        "an unknown path": Case("/v1/nothing", b"{}", served=REFUSED),
        "a stream with options but no stream": chat(stream_options={"include_usage": True}, served=REFUSED),
    },
    streams=(False,),
)
def test_bodies_that_are_none(parity, case):
    assert 400 <= parity.check(case).status < 500
