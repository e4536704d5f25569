from contextlib import ExitStack

import pytest

from trivet.routing.choose import Route, choose
from trivet.routing.engines import Engines, EngineView


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
