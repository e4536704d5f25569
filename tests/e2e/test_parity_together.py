"""Many unlike requests at the same time: each answered as if it had been alone."""

import random

import pytest

from helpers.parity import COLOCATED, chat, completion

pytestmark = pytest.mark.e2e

TOGETHER = [
    chat(),
    chat(stream=True, stream_options={"include_usage": True}),
    chat(n=2, temperature=0.8, seed=1, generations=2),
    chat("One lamp. Two trees.", stop=["trees"]),
    chat(logprobs=True, top_logprobs=3),
    chat(structured_outputs={"regex": "[0-9]{6}"}),
    chat(temperature=1.1, seed=5, model="tiny-a"),
    chat(served=COLOCATED, headers={"X-Trivet-Serve": "colocated"}),
    completion(),
    completion(prompt=[[1000, 2000], list(range(3000, 3070))], generations=2),
    completion(logprobs=4, stream=True),
    completion(max_tokens=1),
    completion(prompt=list(range(5000, 5900)), max_tokens=4),
    completion(frequency_penalty=1.0, presence_penalty=1.0),
    completion(model="tiny-b", stream=True),
    completion("🦊 and 木", echo=True),
]


def test_sixteen_at_once(parity):
    for asked in parity.ask_at_once(TOGETHER):
        parity.compare(asked)


@pytest.mark.full
def test_sixteen_at_once_again_and_again(parity):
    for _ in range(8):
        for asked in parity.ask_at_once(random.sample(TOGETHER, len(TOGETHER))):
            parity.compare(asked)


@pytest.mark.parametrize(
    "spoiled", [chat(), completion(logprobs=1), chat(stream=True)], ids=["chat", "completion", "streamed chat"]
)
def test_a_spoiled_transfer_is_a_difference(parity, deployment, spoiled):
    with deployment.spoiling("zero"), pytest.raises(AssertionError, match="!="):
        parity.check(spoiled)
