from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.routing.choose import Knowledge, Route, another_decode, choose, told_of_bad
from trivet.routing.engines import Engines, EngineView
from trivet.routing.held import Held, new_key
from trivet.routing.policy import Policy, Reason
from trivet.routing.prefixes import Chain, Prefix, PrefixTable
from trivet.routing.proofs import Proof


def view(name: str, *, ready: bool = True) -> EngineView:
    """An engine whose tier is in its name: ``decode-1``."""
    return EngineView(name, name.partition("-")[0], f"http://{name}", ready)


def routed(
    *names: str,
    load: dict[str, int] | None = None,
    down: tuple[str, ...] = (),
    colocate: str | None = None,
    avoid: tuple[str, ...] = (),
) -> tuple[str | None, str, str] | None:
    """Prefill, decode and reason of the route that is chosen among these engines."""
    engines = Engines()
    engines.update(view(name, ready=name not in down) for name in names)
    with ExitStack() as running:
        for name, tokens in (load or {}).items():
            running.enter_context(engines.charge(view(name), tokens))
        route = choose(engines, colocate=colocate, avoid=frozenset(avoid))
    if route is None:
        return None
    return (route.prefill.name if route.prefill else None, route.decode.name, route.reason)


PAIR = ("prefill-0", "decode-0")
FOUR = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def test_a_request_is_split_when_a_pair_is_ready():
    assert routed(*PAIR, "mixed-0") == ("prefill-0", "decode-0", "a pair is ready")


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({}, ("prefill-0", "decode-0")),
        ({"prefill-0": 1}, ("prefill-1", "decode-0")),
        ({"decode-0": 1}, ("prefill-0", "decode-1")),
        ({"prefill-0": 10, "prefill-1": 9, "decode-0": 3, "decode-1": 4}, ("prefill-1", "decode-0")),
    ],
)
def test_each_leg_goes_where_the_fewest_tokens_are_outstanding(load, expected):
    assert routed(*FOUR, load=load) == (*expected, "a pair is ready")


def test_the_order_in_which_engines_are_listed_does_not_matter():
    assert routed(*reversed(FOUR)) == ("prefill-0", "decode-0", "a pair is ready")


def test_a_colocated_request_goes_to_a_mixed_engine():
    assert routed(*PAIR, "mixed-0", colocate="it says so") == (None, "mixed-0", "it says so")


def test_a_colocated_request_goes_to_the_mixed_engine_with_the_fewest_tokens():
    assert routed("mixed-0", "mixed-1", load={"mixed-0": 1}, colocate="x") == (None, "mixed-1", "x")


def test_even_a_busy_mixed_engine_is_preferred_to_decode():
    assert routed(*PAIR, "mixed-0", load={"mixed-0": 99}, colocate="x") == (None, "mixed-0", "x")


def test_a_colocated_request_goes_to_decode_where_no_mixed_engine_is_ready():
    assert routed(*PAIR, colocate="x") == (None, "decode-0", "x")
    assert routed(*PAIR, "mixed-0", down=("mixed-0",), colocate="x") == (None, "decode-0", "x")


def test_a_colocated_request_never_goes_to_prefill():
    assert routed("prefill-0", colocate="x") is None


@pytest.mark.parametrize(
    ("names", "down", "expected"),
    [
        (PAIR, ("prefill-0",), (None, "decode-0", "no prefill engine is ready")),
        ((*PAIR, "mixed-0"), ("prefill-0",), (None, "mixed-0", "no prefill engine is ready")),
        ((*PAIR, "mixed-0"), ("decode-0",), (None, "mixed-0", "no decode engine is ready")),
        (("mixed-0",), (), (None, "mixed-0", "the topology has no prefill tier")),
        (FOUR, ("prefill-0", "decode-0"), ("prefill-1", "decode-1", "a pair is ready")),
    ],
)
def test_without_a_pair_a_request_is_served_colocated_with_the_reason(names, down, expected):
    assert routed(*names, down=down) == expected


@pytest.mark.parametrize(
    ("names", "down"), [((), ()), (PAIR, PAIR), (PAIR, ("decode-0",)), (("mixed-0",), ("mixed-0",))]
)
def test_nothing_is_chosen_when_nothing_can_serve(names, down):
    assert routed(*names, down=down) is None


@pytest.mark.parametrize(
    ("names", "avoid", "expected"),
    [
        (FOUR, ("prefill-0",), ("prefill-1", "decode-0", "a pair is ready")),
        (FOUR, ("prefill-0", "prefill-1"), (None, "decode-0", "no prefill engine is ready")),
        (PAIR, ("decode-0",), None),
        ((*PAIR, "mixed-0"), ("decode-0",), (None, "mixed-0", "no decode engine is ready")),
        ((*PAIR, "mixed-0"), ("prefill-0", "mixed-0"), (None, "decode-0", "no prefill engine is ready")),
    ],
)
def test_engines_to_avoid_are_not_chosen(names, avoid, expected):
    assert routed(*names, avoid=avoid) == expected


def test_a_route_names_whole_engines():
    engines = Engines()
    engines.update([view("prefill-0"), view("decode-0")])
    assert choose(engines, colocate=None) == Route(view("decode-0"), view("prefill-0"), "a pair is ready")


def chosen(engines: Engines, times: int, *, colocate: str | None = None) -> list[tuple[str | None, str]]:
    """Prefill and decode of so many routes, each of which takes its turn."""
    pairs = []
    for _ in range(times):
        route = choose(engines, colocate=colocate)
        for engine in (route.prefill, route.decode):
            if engine is not None:
                engines.take_turn(engine)
        pairs.append((route.prefill.name if route.prefill else None, route.decode.name))
    return pairs


def test_equals_are_chosen_in_turn():
    engines = Engines()
    engines.update(view(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"))
    assert chosen(engines, 4) == [
        ("prefill-0", "decode-0"),
        ("prefill-1", "decode-1"),
        ("prefill-0", "decode-2"),
        ("prefill-1", "decode-0"),
    ]


def test_equals_are_chosen_in_turn_for_colocated_requests_too():
    engines = Engines()
    engines.update(view(name) for name in ("mixed-0", "mixed-1"))
    assert chosen(engines, 3, colocate="x") == [(None, "mixed-0"), (None, "mixed-1"), (None, "mixed-0")]


def test_an_engine_that_is_new_is_the_first_of_equals():
    engines = Engines()
    engines.update([view("decode-0")])
    chosen(engines, 2, colocate="x")
    engines.update([view("decode-0"), view("decode-1")])
    assert chosen(engines, 2, colocate="x") == [(None, "decode-1"), (None, "decode-0")]


def test_load_counts_more_than_turns():
    engines = Engines()
    engines.update(view(name) for name in ("decode-0", "decode-1"))
    with engines.charge(view("decode-1"), 1):
        assert chosen(engines, 2, colocate="x") == [(None, "decode-0"), (None, "decode-0")]


# caches


def prompt_of(tokens: int, name: str = "a") -> Prefix:
    """Prompts of one name begin alike."""
    chain = Chain(name)
    chain.extend(range(tokens))
    return chain.prefix(tokens)


class Fleet:
    """Engines that keep prefix caches, and what is known of them."""

    def __init__(self, *names: str, policy: Policy | None = None) -> None:
        self.engines = Engines()
        self.engines.update(replace(view(name), cached_block_tokens=16) for name in names)
        self.knowledge = Knowledge(policy or Policy("always"), PrefixTable(bytearray(2**16)))
        self.load = ExitStack()

    def view(self, name: str) -> EngineView:
        return next(one for one in self.engines.all() if one.name == name)

    def give(self, **tokens: int) -> None:
        """Legs that do not end, by engine, with an underline for the dash."""
        for name, count in tokens.items():
            self.load.enter_context(self.engines.charge(self.view(name.replace("_", "-")), count))

    def learn(self, name: str, prompt: Prefix) -> None:
        self.knowledge.prefixes.learn(prompt, self.view(name))

    def choose(self, prompt: Prefix | None, **more) -> Route | None:
        return choose(self.engines, **{"colocate": None, "prompt": prompt, "knowledge": self.knowledge} | more)

    def pair(self, prompt: Prefix | None, **more) -> tuple[str | None, str]:
        route = self.choose(prompt, **more)
        return (route.prefill.name if route.prefill else None, route.decode.name)


def test_a_prompt_goes_to_the_prefill_engine_that_has_its_beginning():
    fleet = Fleet(*FOUR)
    fleet.learn("prefill-1", prompt_of(1000))
    route = fleet.choose(prompt_of(1200))
    assert (route.prefill.name, route.cached.tokens) == ("prefill-1", 960)
    assert fleet.pair(prompt_of(1200, "b"))[0] == "prefill-0"


@pytest.mark.parametrize(("queue", "expected"), [(0, "prefill-1"), (959, "prefill-1"), (961, "prefill-0")])
def test_a_cache_is_given_up_for_a_queue_that_is_longer_than_what_it_saves(queue, expected):
    fleet = Fleet(*FOUR)
    fleet.learn("prefill-1", prompt_of(1000))
    fleet.give(prefill_1=queue)
    assert fleet.pair(prompt_of(1200))[0] == expected


def test_engines_that_have_it_alike_are_chosen_in_turn():
    fleet = Fleet("prefill-0", "prefill-1", "prefill-2", "decode-0")
    for name in ("prefill-1", "prefill-2"):
        fleet.learn(name, prompt_of(1000))
    seen = []
    for _ in range(4):
        route = fleet.choose(prompt_of(1000))
        fleet.engines.take_turn(route.prefill)
        seen.append(route.prefill.name)
    assert seen == ["prefill-1", "prefill-2"] * 2


@pytest.mark.parametrize(("queue", "expected"), [(0, "decode-1"), (119, "decode-1"), (121, "decode-0")])
def test_a_decode_engine_that_has_it_is_a_little_better(queue, expected):
    """960 tokens that need not be moved, an eighth each."""
    fleet = Fleet(*FOUR)
    fleet.learn("decode-1", prompt_of(1000))
    fleet.give(decode_1=queue)
    assert fleet.pair(prompt_of(1200))[1] == expected


def test_who_serves_colocated_is_chosen_by_its_cache_as_well():
    fleet = Fleet("mixed-0", "mixed-1")
    fleet.learn("mixed-1", prompt_of(1000))
    assert fleet.pair(prompt_of(1000), colocate="x") == (None, "mixed-1")
    fleet.give(mixed_1=1000)
    assert fleet.pair(prompt_of(1000), colocate="x") == (None, "mixed-0")


def test_without_a_prompt_nothing_is_known_and_a_pair_is_used():
    fleet = Fleet(*FOUR, policy=Policy("never"))
    fleet.learn("prefill-1", prompt_of(1000))
    assert fleet.pair(None) == ("prefill-0", "decode-0")


def test_no_engine_is_starved():
    """One prompt only, all of it cached on one engine: the others get what would wait longer than it saves."""
    fleet = Fleet("prefill-0", "prefill-1", "prefill-2", "decode-0")
    prompt, given = prompt_of(1001), {}
    fleet.learn("prefill-0", prompt)
    for _ in range(200):
        route = fleet.choose(prompt)
        name = route.prefill.name
        given[name] = given.get(name, 0) + 1
        fleet.give(**{name.replace("-", "_"): 1001 - route.cached.tokens})
    assert len(given) == 3
    loads = [fleet.engines.outstanding_tokens(name) for name in given]
    assert max(loads) - min(loads) <= 1001


NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0", "mixed-1")
SOME = st.sets(st.sampled_from(NAMES))


@given(
    down=SOME,
    avoid=SOME,
    load=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 10**6)),
    cached=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3000)),
    tokens=st.integers(1, 3000),
    handover_s=st.none() | st.floats(0, 10),
    mode=st.sampled_from(["auto", "always", "never"]),
    colocate=st.none() | st.just("it says so"),
    serves_whole=st.booleans(),
)
def test_a_route_is_of_engines_that_can_serve_and_nothing_is_refused_that_could_be_served(
    down, avoid, load, cached, tokens, handover_s, mode, colocate, serves_whole
):
    fleet = Fleet(*NAMES, policy=Policy(mode))
    fleet.engines.decode_serves_whole = serves_whole
    fleet.engines.update(replace(one, ready=one.name not in down) for one in fleet.engines.all())
    fleet.give(**{name.replace("-", "_"): count for name, count in load.items()})
    for name, count in cached.items():
        fleet.learn(name, prompt_of(count))
    if handover_s is not None:
        fleet.engines.board.note_handover(fleet.view("prefill-0"), fleet.view("decode-0"), handover_s)
    prompt = prompt_of(tokens)
    route = fleet.choose(prompt, colocate=colocate, avoid=frozenset(avoid))
    usable = {name for name in NAMES if name not in down | avoid}
    tiers = {name.partition("-")[0] for name in usable}
    alone = "mixed" in tiers or (serves_whole and "decode" in tiers)
    pair = {"prefill", "decode"} <= tiers and colocate is None
    assert (route is not None) == (alone or pair)
    if route is None:
        return
    assert route.decode.name in usable
    assert 0 <= route.cached.tokens < tokens
    assert (colocate is None) != (route.label is Reason.UNSPLITTABLE)
    if route.prefill is not None:
        assert pair
        assert route.prefill.name in usable
        assert (route.prefill.tier, route.decode.tier) == ("prefill", "decode")
        assert mode != "never" or not alone
    else:
        assert route.decode.tier == ("mixed" if "mixed" in tiers else "decode")
        assert not (mode == "always" and pair)

    def work(name: str) -> int:
        had = fleet.knowledge.prefixes.cached_tokens(prompt, fleet.view(name))
        return fleet.engines.outstanding_tokens(name) + tokens - had

    computes = route.prefill or route.decode
    assert work(computes.name) == min(work(name) for name in usable if name.startswith(computes.tier))


@pytest.mark.parametrize(
    ("names", "tokens", "expected"),
    [
        ((*PAIR, "mixed-0"), 100, (None, "mixed-0", "short_prompt")),
        (PAIR, 100, (None, "decode-0", "short_prompt")),
        ((*PAIR, "mixed-0"), 1000, ("prefill-0", "decode-0", "long_prompt")),
        (("mixed-0",), 1000, (None, "mixed-0", "no_pair")),
        (("prefill-0", "mixed-0"), 1000, (None, "mixed-0", "no_pair")),
    ],
)
def test_under_auto_short_prompts_are_served_colocated(names, tokens, expected):
    route = Fleet(*names, policy=Policy("auto")).choose(prompt_of(tokens))
    assert (route.prefill.name if route.prefill else None, route.decode.name, route.label) == expected


def test_under_auto_a_prompt_that_decode_has_is_served_there():
    fleet = Fleet(*FOUR, policy=Policy("auto"))
    fleet.learn("decode-1", prompt_of(1000))
    route = fleet.choose(prompt_of(1200))
    assert (route.prefill, route.decode.name, route.label) == (None, "decode-1", "prefix_cached")
    assert route.reason == "240 tokens are not cached; fewer than 256 are not split"


def test_where_nobody_serves_colocated_short_prompts_are_split():
    fleet = Fleet(*PAIR, policy=Policy("auto"))
    fleet.engines.decode_serves_whole = False
    assert fleet.choose(prompt_of(10)).label == "pair_ready"


def test_a_slow_pair_is_not_used():
    fleet = Fleet(*PAIR, policy=Policy("auto"))
    fleet.engines.board.note_handover(fleet.view("prefill-0"), fleet.view("decode-0"), 2.5)
    assert fleet.choose(prompt_of(1000)).label == "slow_handover"


# what engines tell themselves


def told_and_sent(told: int | None, sent: int, *, whole: bool = True) -> tuple[str, int, bool]:
    """What is known of an engine that has told of so many tokens (None: nothing) and was sent so many."""
    engine = replace(view("prefill-0"), cached_block_tokens=16, slot=0)
    chain = Chain.of_tokens("m", None)
    chain.extend(range(640))
    held, prefixes, key, prompt = Held(), PrefixTable(), new_key(), chain.prefix(641)
    if told is not None:
        held.add(key, prompt.hashes[: told // 64])
        held.verify(engine, key, whole=whole)
    prefixes.learn(replace(prompt, hashes=prompt.hashes[: sent // 64]), engine)
    engines = Engines()
    engines.update([engine, replace(engine, name="decode-0", tier="decode", slot=1)])
    route = choose(engines, colocate=None, prompt=prompt, knowledge=Knowledge(prefixes=prefixes, held=held))
    return route.prefill.name, route.cached.tokens, route.cached.told


@pytest.mark.parametrize(
    ("told", "sent", "whole", "expected"),
    [
        (None, 320, True, (320, False)),
        (128, 320, True, (128, True)),
        (0, 320, True, (0, True)),
        (320, 128, True, (320, True)),
        (128, 320, False, (320, False)),
        (320, 128, False, (320, True)),
    ],
)
def test_what_an_engine_tells_counts_and_what_it_was_sent_where_it_does_not(told, sent, whole, expected):
    assert told_and_sent(told, sent, whole=whole) == ("prefill-0", *expected)


# pairs that are known to be bad


def proven(**proofs: Proof) -> Engines:
    """Two engines of each tier and a mixed one; ``p0d1=Proof.GOOD`` says how a pair stands."""
    engines = Engines()
    engines.update(view(name) for name in (*FOUR, "mixed-0"))
    engines.guarded = True
    seated = {one.name: one for one in engines.all()}
    for pair, proof in proofs.items():
        engines.board.note_proof(seated[f"prefill-{pair[1]}"], seated[f"decode-{pair[3]}"], proof)
    return engines


def proven_pair(engines: Engines, **more) -> tuple[str, ...]:
    route = choose(engines, colocate=None, **more)
    return (route.prefill.name[-1], route.decode.name[-1]) if route.prefill else (route.decode.name, route.label)


GOOD, OPEN, BAD = Proof.GOOD, Proof.OPEN, Proof.BYTES


@pytest.mark.parametrize(
    ("proofs", "expected"),
    [
        ({}, ("0", "0")),
        ({"p0d0": BAD}, ("0", "1")),
        ({"p0d0": BAD, "p0d1": BAD}, ("1", "0")),
        ({"p0d0": BAD, "p0d1": BAD, "p1d0": BAD}, ("1", "1")),
        ({"p0d0": BAD, "p0d1": BAD, "p1d0": BAD, "p1d1": BAD}, ("mixed-0", Reason.PAIR_BAD)),
        ({"p1d1": GOOD}, ("1", "1")),
        ({"p1d1": OPEN}, ("1", "1")),
        ({"p0d0": GOOD, "p1d1": GOOD}, ("0", "0")),
        ({"p0d0": BAD, "p1d0": GOOD}, ("1", "0")),
        ({"p0d0": OPEN, "p0d1": GOOD}, ("0", "0")),
    ],
)
def test_bad_pairs_are_left_out_and_unproven_ones_while_there_are_others(proofs, expected):
    assert proven_pair(proven(**proofs)) == expected
    engines = proven(**proofs)
    engines.guarded = False
    assert proven_pair(engines) == ("0", "0"), "nobody says so where no canaries are sent"


def test_load_chooses_among_the_pairs_that_are_left():
    engines = proven(p0d0=BAD, p0d1=GOOD, p1d0=GOOD, p1d1=GOOD)
    with engines.charge(view("decode-1"), 50):
        assert proven_pair(engines) == ("0", "1"), "prefill first: its queue weighs more"
    with engines.charge(view("prefill-0"), 50):
        assert proven_pair(engines) == ("1", "0")
    assert proven_pair(engines, avoid=frozenset({"prefill-0"})) == ("1", "0")


def test_that_all_pairs_are_bad_is_told_in_words():
    bad = {f"p{one}d{other}": Proof.WRONG_TOKENS for one in "01" for other in "01"}
    route = choose(proven(**bad), colocate=None)
    assert route.reason.startswith("no pair passes its canary: prefill-0 -> decode-0 (wrong-tokens), prefill-0 -> ")
    many = Engines()
    many.update(view(f"{tier}-{number}") for tier in ("prefill", "decode") for number in range(3))
    many.guarded = True
    for one in many.ready("prefill"):
        for other in many.ready("decode"):
            many.board.note_proof(one, other, Proof.SILENT)
    assert told_of_bad(many).endswith("(silent), and 5 more")


def test_kv_is_not_offered_to_an_engine_that_cannot_take_it():
    engines = proven(p0d0=BAD, p0d1=GOOD, p1d0=GOOD)
    (holder, *_) = engines.ready("prefill")
    assert another_decode(engines, holder, frozenset()).name == "decode-1"
    assert another_decode(engines, holder, frozenset({"decode-1"})) is None
    engines = proven(p0d1=GOOD)
    assert another_decode(engines, holder, frozenset()).name == "decode-1"
    assert another_decode(engines, holder, frozenset({"decode-1"})).name == "decode-0"
