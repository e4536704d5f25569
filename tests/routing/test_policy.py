import pytest

from trivet.routing.policy import ALWAYS, Policy, Reason, Ways

IDLE = {
    "prompt_tokens": 4000,
    "uncached_tokens": 4000,
    "mixed": True,
    "colocated_outstanding_tokens": 0,
    "prefill_uncached_tokens": 4000,
    "prefill_outstanding_tokens": 0,
    "decode_outstanding_tokens": 0,
    "handover_s": None,
}
SHORT = {"prompt_tokens": 255, "uncached_tokens": 255, "prefill_uncached_tokens": 255}
CACHED = {"uncached_tokens": 100}
ON_DECODE = {"mixed": False}


def ways(*changes: dict) -> Ways:
    values = dict(IDLE)
    for one in changes:
        values |= one
    return Ways(**values)


@pytest.mark.parametrize(
    ("changes", "split", "label"),
    [
        ([], True, Reason.LONG_PROMPT),
        ([ON_DECODE], True, Reason.LONG_PROMPT),
        ([{"prompt_tokens": 256, "uncached_tokens": 256, "prefill_uncached_tokens": 256}], True, Reason.LONG_PROMPT),
        ([SHORT], False, Reason.SHORT_PROMPT),
        ([SHORT, ON_DECODE], False, Reason.SHORT_PROMPT),
        ([CACHED], False, Reason.PREFIX_CACHED),
        ([CACHED, ON_DECODE], False, Reason.PREFIX_CACHED),
        # handovers
        ([{"handover_s": 1.0}], True, Reason.LONG_PROMPT),
        ([{"handover_s": 1.01}], False, Reason.SLOW_HANDOVER),
        ([{"handover_s": 1.01}, ON_DECODE], False, Reason.SLOW_HANDOVER),
        ([{"handover_s": 1.01}, SHORT], False, Reason.SHORT_PROMPT),
        # a mixed engine that is busy
        ([SHORT, {"colocated_outstanding_tokens": 256}], False, Reason.SHORT_PROMPT),
        ([SHORT, {"colocated_outstanding_tokens": 257}], True, Reason.COLOCATED_BUSY),
        ([CACHED, {"colocated_outstanding_tokens": 4000}], False, Reason.PREFIX_CACHED),
        ([CACHED, {"colocated_outstanding_tokens": 4001}], True, Reason.COLOCATED_BUSY),
        ([SHORT, {"colocated_outstanding_tokens": 257, "decode_outstanding_tokens": 1}], False, Reason.SHORT_PROMPT),
        ([SHORT, {"colocated_outstanding_tokens": 257, "handover_s": 2.0}], False, Reason.SHORT_PROMPT),
        # what waits at a decode engine waits there either way
        ([SHORT, ON_DECODE, {"colocated_outstanding_tokens": 10**6}], False, Reason.SHORT_PROMPT),
        # prefill that is busy
        ([{"prefill_outstanding_tokens": 4000}], True, Reason.LONG_PROMPT),
        ([{"prefill_outstanding_tokens": 4001}], False, Reason.PREFILL_BUSY),
        ([{"prefill_outstanding_tokens": 4001, "colocated_outstanding_tokens": 1}], True, Reason.LONG_PROMPT),
        ([{"prefill_outstanding_tokens": 10**6}, ON_DECODE], True, Reason.LONG_PROMPT),
        ([{"uncached_tokens": 1999}], False, Reason.PREFILL_BUSY),  # it has more to compute, as its cache has less
        ([{"uncached_tokens": 1999, "prefill_uncached_tokens": 3000}], True, Reason.LONG_PROMPT),
    ],
)
def test_auto(changes, split, label):
    decided, said, words = Policy("auto").decide(ways(*changes))
    assert (decided, said) == (split, label)
    assert words


def test_thresholds():
    policy = Policy("auto", min_uncached_tokens=10, max_handover_s=0.1)
    assert policy.decide(ways({"uncached_tokens": 10}, ON_DECODE))[:2] == (True, Reason.LONG_PROMPT)
    assert policy.decide(ways({"uncached_tokens": 9}))[:2] == (False, Reason.PREFIX_CACHED)
    assert policy.decide(ways({"handover_s": 0.2}))[:2] == (False, Reason.SLOW_HANDOVER)


@pytest.mark.parametrize("changes", [[], [SHORT], [{"handover_s": 60.0}]])
def test_always_and_never(changes):
    assert ALWAYS.decide(ways(*changes)) == (True, Reason.PAIR_READY, "a pair is ready")
    assert Policy("never").decide(ways(*changes)) == (False, Reason.NEVER, "gateway.split is never")


def test_words_say_the_numbers():
    policy = Policy("auto")
    assert policy.decide(ways())[2] == "4000 tokens are not cached; 256 or more are split"
    assert policy.decide(ways(SHORT))[2] == "255 tokens, fewer than 256, are not split"
    assert policy.decide(ways(CACHED))[2] == "100 tokens are not cached; fewer than 256 are not split"
    assert policy.decide(ways({"handover_s": 1.26}))[2] == "handovers of this pair take 1.26 s, more than 1 s"
