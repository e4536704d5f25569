"""vLLM's own scheduler with the connector in it: what it counts, and who waits for whom, is vLLM's to say."""

import contextlib
import itertools
import random

import pytest
from vllm.v1.request import RequestStatus

from transfer.engines import LONGEST, DecodeEngine
from transfer.schedulers import BLOCK, FakePrefill
from transfer.waiting import until
from trivet.transfer.messages import Announce, Lost


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model's folder; only its config is read."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def prefill(folder):
    with contextlib.closing(FakePrefill(str(folder / "p"))) as prefill:
        yield prefill


@pytest.fixture
def make(folder, model):
    """Makes decode engines."""
    with contextlib.ExitStack() as stack:
        yield lambda blocks, **kind: stack.enter_context(
            contextlib.closing(DecodeEngine(folder, model, blocks, **kind))
        )


@pytest.mark.parametrize("first", [False, True])
def test_a_request_is_handed_over(make, prefill, first):
    engine = make(8)
    engine.receive(prefill, "a", 40, first=first)
    engine.step()
    assert not engine.scheduled
    engine.announce(prefill, "a")
    if first:
        engine.first(prefill, "a")
    engine.steps_until(lambda: "a" in engine.ended, "the end")
    assert len(engine.tokens["a"]) == 4 - first
    engine.step()
    assert engine.is_idle()


# the longest prompts


@pytest.mark.parametrize("tokens", [LONGEST - 3, LONGEST - 2, LONGEST - 1])
def test_no_request_grows_beyond_the_longest(make, prefill, tokens):
    """What has no room for a second token ends with an error, and the engine goes on."""
    engine = make(40)
    request = engine.receive(prefill, "a", tokens, max_tokens=50)
    other = engine.receive(prefill, "b", 20, salt=1)
    for one in ("a", "b"):
        engine.announce(prefill, one)
        engine.first(prefill, one)
    engine.steps_until(lambda: len(engine.ended) == 2, "the end of both")
    assert max(request.num_tokens, other.num_tokens) <= LONGEST
    assert engine.ended["a"] == ("length" if tokens + 1 < LONGEST else "error")
    assert engine.ended["b"] == "length"
    engine.step()
    assert engine.is_idle()


@pytest.mark.parametrize("kind", [{"max_tokens": 1}, {"skip_reading_prefix_cache": True}])
def test_a_first_token_is_never_made_twice(make, prefill, kind):
    engine = make(8)
    request = engine.receive(prefill, "a", 40, **kind)
    engine.step()
    engine.announce(prefill, "a")
    engine.first(prefill, "a")
    engine.steps_until(lambda: engine.ended, "the end")
    if kind.get("max_tokens") == 1:
        assert (engine.ended, engine.tokens["a"]) == ({"a": "error"}, [])
    else:
        assert (engine.ended, engine.tokens["a"]) == ({"a": "length"}, [7, 7, 7])
        assert request.skip_reading_prefix_cache
    engine.step()
    assert engine.is_idle()


# prefill begins again


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("blocks", [7, 9, 12])
def test_withdrawn_requests_reserve_nothing_and_all_are_served(make, prefill, blocks, landed):
    """None fits twice into the pool: blocks that were given back must not be kept free for who gave them."""
    engine = make(blocks)
    sizes = {"a": 6 * BLOCK, "b": 5 * BLOCK + 3, "c": 3 * BLOCK, "d": 6 * BLOCK - 1}
    for salt, (name, tokens) in enumerate(sizes.items()):
        engine.receive(prefill, name, tokens, salt=salt)
    engine.lands = lambda _: landed
    holds = {RequestStatus.WAITING_FOR_REMOTE_KVS}
    for _ in range(3):
        for name in sizes:
            request = engine.scheduler.requests[name]
            engine.announce(prefill, name)
            engine.steps_until(lambda request=request: request.status in holds, f"loading of {name}")
            engine.withdraw(prefill, name)
            engine.steps_until(lambda request=request: request.status not in holds, f"giving back of {name}")
            assert engine.free == blocks
    engine.lands = lambda _: True
    for name in sizes:
        engine.announce(prefill, name)
        engine.first(prefill, name)
    engine.steps_until(lambda: len(engine.ended) == len(sizes), "all ends")
    assert set(engine.ended.values()) == {"length"}
    engine.step()
    assert engine.is_idle()


def test_who_waits_for_prefill_again_keeps_nobody_out(make, prefill):
    engine = make(7)
    request = engine.receive(prefill, "a", 6 * BLOCK)
    engine.lands = lambda name: name == "b"
    engine.announce(prefill, "a")
    engine.steps_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "loading")
    engine.withdraw(prefill, "a")
    engine.receive(prefill, "b", 6 * BLOCK, salt=1)
    engine.announce(prefill, "b")
    engine.first(prefill, "b")
    engine.steps_until(lambda: "b" in engine.ended, "the other's end")
    assert engine.ended == {"b": "length"}
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.is_idle()


def test_a_lost_request_that_waits_for_its_token_keeps_nobody_out(make, prefill):
    engine = make(7)
    request = engine.receive(prefill, "a", 6 * BLOCK)
    engine.lands = lambda name: name == "b"
    engine.announce(prefill, "a")
    engine.steps_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "loading")
    prefill.link.send(Lost("a", "a piece was spoilt", first_comes=True))
    engine.heard("a", lambda one: one.lost)
    engine.receive(prefill, "b", 6 * BLOCK, salt=1)
    engine.announce(prefill, "b")
    engine.first(prefill, "b")
    engine.steps_until(lambda: "b" in engine.ended, "the other's end")
    engine.first(prefill, "a")
    engine.steps_until(lambda: "a" in engine.ended, "the end")
    assert engine.tokens["a"] == [7, 7, 7]
    engine.step()
    assert engine.is_idle()


# who waits for whom


@pytest.mark.parametrize("first", ["announced", "lost", "ordinary"])
def test_who_waits_for_blocks_does_not_keep_those_from_going_on_who_have_their_kv(make, prefill, first):
    """vLLM 0.30 looks at nobody behind one that waits for blocks: the later one, which holds them, could not end."""
    engine = make(8)
    engine.receive(prefill, "a", 6 * BLOCK + 1)
    engine.lands = lambda name: name == "a" or "b" in engine.ended
    engine.step()
    engine.receive(prefill, "b", 6 * BLOCK + 2, salt=1)
    engine.announce(prefill, "b")
    engine.steps_until(lambda: engine.free < 4, "blocks of the later one")
    if first == "lost":
        prefill.link.send(Lost("a", "it was released", first_comes=True))
        engine.heard("a", lambda one: one.lost)
        engine.first(prefill, "a")
    elif first == "announced":
        engine.announce(prefill, "a")
        engine.first(prefill, "a")
    else:
        engine.add("o", 6 * BLOCK, salt=2)
    for _ in range(5):
        engine.step()
    engine.lands = lambda _: True
    engine.first(prefill, "b")
    if first == "ordinary":
        engine.announce(prefill, "a")
        engine.first(prefill, "a")
    engine.steps_until(lambda: {"a", "b"} <= engine.ended.keys(), "both ends")
    assert set(engine.ended.values()) == {"length"}
    engine.steps_until(engine.is_idle, "idleness")


@pytest.mark.parametrize("tokens", [6 * BLOCK, 6 * BLOCK - 1])
def test_plain_requests_that_keep_coming_do_not_starve_one_that_waits_for_blocks(make, prefill, tokens):
    """Two of them fill the pool and end at different times: what one gives back must not go to the next of them."""
    engine = make(12)
    salts = itertools.count(2)

    def plain(name):
        engine.add(name, 5 * BLOCK + 1, salt=next(salts), max_tokens=10)

    plain("one")
    for _ in range(6):
        engine.step()
    plain("two")
    engine.step()
    engine.hand_over(prefill, "a", tokens, salt=1)
    engine.steps_beside(plain, "a", steps=100)
    assert engine.ended["a"] == "length"


def test_later_requests_do_not_starve_one_of_whose_prompt_a_part_is_cached(make, prefill):
    """Whether that part is in use anyway is not known. Here it is, and what is lacking beside it must come back."""
    engine = make(13)
    engine.add("warm", BLOCK + 1, salt=1, max_tokens=2)
    engine.step()
    manager = engine.scheduler.kv_cache_manager
    shared = manager.coordinator.single_type_managers[0].req_to_blocks["warm"][0]
    manager.block_pool.touch([shared])  # a system prompt that others have as well
    engine.steps_until(lambda: "warm" in engine.ended, "its end")
    salts = itertools.count(2)

    def other(name):
        engine.hand_over(prefill, name, 5 * BLOCK + 1, salt=next(salts), max_tokens=11)

    other("one")
    for _ in range(8):
        engine.step()
    other("two")
    for _ in range(2):
        engine.step()
    engine.hand_over(prefill, "a", 7 * BLOCK, salt=1)
    engine.steps_beside(other, "a", steps=100)
    assert engine.ended["a"] == "length"


@pytest.mark.parametrize("window", [None, 2 * BLOCK])
def test_first_tokens_find_a_block_in_each_group(make, prefill, window):
    """Prompts that fill their last blocks, more of them than fit: each must be able to go on."""
    engine = make(14, window=window)
    names = [f"r{number}" for number in range(6)]
    for salt, name in enumerate(names):
        engine.receive(prefill, name, (2 + salt % 3) * BLOCK, salt=salt)
    for name in names:
        engine.announce(prefill, name)
    for _ in range(3):
        engine.step()
    for name in names:
        engine.first(prefill, name)
    engine.steps_until(lambda: len(engine.ended) == len(names), "all ends")
    engine.step()
    assert engine.is_idle()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_all_end_and_nothing_is_held(make, prefill, seed):
    """Announcements, withdrawals, losses, tokens and aborts in any order, in a pool that holds two or three."""
    drawn = random.Random(seed)
    engine = make(LONGEST // BLOCK, window=drawn.choice([None, None, 3 * BLOCK]))
    landed = set()
    engine.lands = landed.__contains__
    names = [f"r{number}" for number in range(14)]
    for salt, name in enumerate(names):
        kind = {"skip_reading_prefix_cache": True} if drawn.random() < 0.1 else {}
        tokens = drawn.choice([BLOCK, 2 * BLOCK, drawn.randint(1, 7 * BLOCK)])
        engine.receive(prefill, name, tokens, first=drawn.random() < 0.7, salt=drawn.choice([salt, 0]), **kind)
    active = engine.side._incoming
    for _ in range(400):
        name, what = drawn.choice(names), drawn.random()
        incoming = active.get(name)
        if incoming is not None and incoming.link is not None and name in incoming.link._transfers:
            if what < 0.3 and not incoming.announced:
                engine.announce(prefill, name)
            elif what < 0.45 and incoming.announced and not incoming.token_known:
                landed.discard(name)
                engine.withdraw(prefill, name)
            elif what < 0.5:
                prefill.link.send(Lost(name, "it was released", first_comes=drawn.random() < 0.5))
                engine.heard(name, lambda one: one.lost)
            elif what < 0.6 and incoming.announced:
                landed.add(name)
            elif what < 0.7 and incoming.announced and not incoming.token_known:
                engine.first(prefill, name)
        if what > 0.99:
            engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        engine.step()
    landed.update(names)
    for name in names:
        incoming = active.get(name)
        if incoming is not None and incoming.link is not None and name in incoming.link._transfers:
            engine.announce(prefill, name)
            engine.first(prefill, name)
    engine.steps_until(engine.is_idle, "idleness")


# parked requests


def test_a_request_that_waits_for_prefill_is_not_looked_up_in_each_step(make, prefill, monkeypatch):
    engine = make(8)
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    lookups = itertools.count()
    find = coordinator.find_longest_cache_hit
    monkeypatch.setattr(coordinator, "find_longest_cache_hit", lambda *args: (next(lookups), find(*args))[1])
    engine.add("o", 40)
    engine.steps_until(lambda: engine.ended, "an end, after which the prompt is cached")
    before = next(lookups)
    request = engine.receive(prefill, "a", 40)
    for _ in range(20):
        engine.step()
    assert next(lookups) - before <= 2
    engine.announce(prefill, "a")
    engine.steps_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "loading")
    assert engine.side._incoming["a"].cached_tokens == 2 * BLOCK  # what is cached here does not come


@pytest.mark.parametrize("what", ["announced", "lost"])
def test_what_is_cached_is_found_though_news_come_between_vllms_look_and_its_question(make, prefill, monkeypatch, what):
    engine = make(8)
    engine.add("o", 40)
    engine.steps_until(lambda: engine.ended, "an end, after which the prompt is cached")
    engine.receive(prefill, "a", 40, first=what == "announced")
    until(lambda: engine.side._incoming["a"].link._connection is not None, "a link")
    matched, news = engine.side.matched, []

    def news_come_first(request, cached_tokens):
        if not news:
            news.append(cached_tokens)
            with engine.side.lock:
                incoming = engine.side._incoming["a"]
                incoming.link._hear(Announce("a") if what == "announced" else Lost("a", "gone", first_comes=True))
        return matched(request, cached_tokens)

    monkeypatch.setattr(engine.side, "matched", news_come_first)
    if what == "announced":
        request = engine.scheduler.requests["a"]
        engine.steps_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "loading")
        assert engine.side._incoming["a"].cached_tokens == 2 * BLOCK
    else:
        engine.steps_until(lambda: engine.scheduled, "its own computing")
        assert engine.scheduled == {"a": 40 - 2 * BLOCK}
    assert news == [0]  # vLLM had looked while the request was parked


# sliding windows


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("tokens", range(3 * BLOCK - 2, 4 * BLOCK + 3))
def test_no_token_is_computed_without_the_blocks_of_its_window(make, prefill, tokens, first):
    """vLLM gives blocks for the window of the token behind the prompt, and decode may compute the one before."""
    window = 2 * BLOCK
    engine = make(40, window=window)
    engine.receive(prefill, "a", tokens, first=first)
    engine.announce(prefill, "a")
    if first:
        engine.first(prefill, "a")
    until(lambda: engine.step() and engine.scheduled, "its first step")
    request = engine.scheduler.requests["a"]
    position = request.num_computed_tokens - engine.scheduled["a"]
    ids = engine.scheduler.kv_cache_manager.get_block_ids("a")[1]
    oldest = max(0, position - window + 1)
    assert 0 not in ids[oldest // BLOCK :]


# what clients say

ODD = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    0.5,
    float("nan"),
    "",
    "x",
    "x" * 100_000,
    "\ud800",
    "a\nb\0",
    [],
    ["t"],
    {},
    {"t": 1},
    "unix:",
    "unix:/nowhere",
    "unix:" + "/x" * 500,
    "unix:relative",
    "tcp://1.2.3.4:5",
]
NAMES = ["do_remote_prefill", "do_remote_decode", "transfer_id", "prefill_address", "first_token", "release_transfer"]


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_whatever_a_client_says_of_a_transfer_the_engine_lives(make, prefill, role):
    """Any exception in a hook would end vLLM's engine core, and with it everybody's requests."""
    drawn = random.Random(role)
    engine = make(40, role=role)
    address = prefill.address if role == "kv_consumer" else engine.address
    asks = [value for value in ODD if not isinstance(value, dict)]  # of vllm_xargs: not even a mapping
    asks += [{"unknown": 1}]
    sane = {"transfer_id": "t", "prefill_address": address, "first_token": True}
    for leg in (
        {"do_remote_prefill": True},
        {"do_remote_decode": True},
        {"do_remote_prefill": 1, "do_remote_decode": 1},
    ):
        asks += [{**sane, **leg}, {**sane, **leg}, {**leg, "transfer_id": "t"}]
        asks += [{**sane, **leg, name: value} for name in NAMES for value in ODD]
    asks += [{name: drawn.choice(ODD) for name in NAMES} for _ in range(100)]
    drawn.shuffle(asks)
    names = [f"r{number}" for number in range(len(asks))]
    for name, params in zip(names, asks, strict=True):
        engine.add(name, drawn.randint(1, 60), params, salt=drawn.randint(0, 3), max_tokens=drawn.randint(1, 3))
        if drawn.random() < 0.5:
            engine.step()
    for _ in range(30):
        engine.step()
    after = engine.add("after", 20, salt=5)
    waiting = {*engine.scheduler.requests} - {"after"}  # for a prefill engine that has not said anything
    engine.scheduler.finish_requests(waiting, RequestStatus.FINISHED_ABORTED)
    engine.steps_until(lambda: "after" in engine.ended, "the end of a request that comes afterwards")
    assert after.status is RequestStatus.FINISHED_LENGTH_CAPPED
    engine.steps_until(lambda: not engine.side._incoming, "nothing held")


def test_two_requests_of_one_transfer_are_not_mixed_up(make, prefill):
    engine = make(20)
    engine.receive(prefill, "a", 40)
    params = {"do_remote_prefill": True, "transfer_id": "a", "prefill_address": prefill.address}
    engine.add("computes", 40, params, salt=1)
    engine.add("fails", 40, {**params, "first_token": True}, salt=2)
    engine.announce(prefill, "a")
    engine.first(prefill, "a")
    engine.steps_until(lambda: len(engine.ended) == 3, "all ends")
    assert engine.ended == {"a": "length", "computes": "length", "fails": "error"}
    assert prefill.closed("a")
    engine.step()
    assert engine.is_idle()
