import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.routing.engines import Engines, EngineView

A = EngineView("a", "decode", "http://a", ready=True)
B = EngineView("b", "prefill", "http://b", ready=True)


def engines_of(*views: EngineView) -> Engines:
    engines = Engines()
    engines.update(views)
    return engines


def test_a_view_is_read_from_the_fleets_json():
    said = {
        "name": "a",
        "tier": "decode",
        "url": "http://a",
        "ready": True,
        "generation": 3,
        "cached_block_tokens": 16,
        "api_key": "k",
        "state": "ready",
    }
    expected = EngineView("a", "decode", "http://a", True, generation=3, cached_block_tokens=16, api_key="k")
    assert EngineView.parse(said) == expected


def test_a_view_needs_no_more_than_a_place():
    said = {"name": "a", "tier": "decode", "url": "http://a", "ready": False}
    expected = EngineView("a", "decode", "http://a", False, generation=0, cached_block_tokens=None, api_key=None)
    assert EngineView.parse(said) == expected


@pytest.mark.parametrize(
    ("block", "prompt", "cached", "expected"),
    [(16, 40, 0, 32), (16, 40, 16, 16), (16, 40, 32, 0), (16, 15, 0, 0), (16, 40, 40, 0), (None, 40, 0, None)],
)
def test_a_prompt_adds_its_whole_blocks_to_the_prefix_cache(block, prompt, cached, expected):
    view = EngineView("a", "prefill", "http://a", True, cached_block_tokens=block)
    assert view.created_cache_tokens(prompt, cached) == expected


def test_a_key_is_not_shown():
    assert "secret" not in repr(EngineView("a", "decode", "http://a", True, api_key="secret"))


def test_only_ready_engines_of_a_tier_can_serve():
    starting = EngineView("c", "decode", "http://c", ready=False)
    engines = engines_of(A, B, starting)
    assert engines.ready("decode") == [A]
    assert engines.ready("mixed") == []
    assert engines.all() == [A, B, starting]


def test_the_newest_word_replaces_all_earlier_ones():
    engines = engines_of(A, B)
    engines.update([A])
    assert engines.all() == [A]


def test_a_leg_is_charged_while_it_runs():
    engines = engines_of(A, B)
    with engines.charge(A, 5):
        with engines.charge(A, 7), engines.charge(B, 1):
            assert (engines.outstanding_tokens("a"), engines.outstanding_tokens("b")) == (12, 1)
        assert engines.outstanding_tokens("a") == 5
    assert (engines.outstanding_tokens("a"), engines.outstanding_tokens("b")) == (0, 0)


def test_a_leg_that_fails_is_no_longer_charged():
    engines = engines_of(A)
    with pytest.raises(ZeroDivisionError), engines.charge(A, 5):
        raise ZeroDivisionError
    assert engines.outstanding_tokens("a") == 0


async def test_a_leg_that_is_cancelled_is_no_longer_charged():
    engines = engines_of(A)
    entered = asyncio.Event()

    async def leg():
        with engines.charge(A, 5):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(leg())
    await entered.wait()
    assert engines.outstanding_tokens("a") == 5
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engines.outstanding_tokens("a") == 0


def test_an_engine_that_is_gone_keeps_the_charge_of_what_still_runs():
    engines = engines_of(A)
    with engines.charge(A, 5):
        engines.update([])
        assert engines.outstanding_tokens("a") == 5
    assert engines.outstanding_tokens("a") == 0


@given(st.lists(st.integers(0, 100), max_size=6), st.randoms())
def test_legs_that_end_in_any_order_leave_nothing(sizes, order):
    engines = engines_of(A)
    charges = [engines.charge(A, size) for size in sizes]
    for charge in charges:
        charge.__enter__()
    assert engines.outstanding_tokens("a") == sum(sizes)
    order.shuffle(charges)
    for charge in charges:
        charge.__exit__(None, None, None)
    assert engines.outstanding_tokens("a") == 0
