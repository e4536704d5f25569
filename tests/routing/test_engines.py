import asyncio
from dataclasses import replace

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
        "kv_address": "unix:/run/a.sock",
    }
    expected = EngineView(
        "a",
        "decode",
        "http://a",
        True,
        generation=3,
        cached_block_tokens=16,
        api_key="k",
        kv_address="unix:/run/a.sock",
    )
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


# engines that go out of service

ENDS = {
    "not ready": [replace(A, ready=False)],
    "gone": [],
    "started anew": [replace(A, generation=1)],
}


@pytest.mark.parametrize("news", ENDS.values(), ids=ENDS)
def test_a_leg_hears_that_its_engine_went_out_of_service(news):
    engines, heard = engines_of(A, B), []
    with engines.watching(A, lambda: heard.append("a")), engines.watching(B, lambda: heard.append("b")):
        engines.update([*news, B])
        assert heard == ["a"]


def test_every_leg_on_it_hears():
    engines, heard = engines_of(A), []
    with engines.watching(A, lambda: heard.append(1)), engines.watching(A, lambda: heard.append(2)):
        engines.update([])
    assert sorted(heard) == [1, 2]


@pytest.mark.parametrize("news", ENDS.values(), ids=ENDS)
def test_a_leg_on_an_engine_that_has_already_gone_out_of_service_hears_at_once(news):
    """It was chosen, and lost before the leg began: it will not be told again."""
    engines, heard = engines_of(A), []
    engines.update(news)
    with engines.watching(A, lambda: heard.append(1)):
        assert heard == [1]


def test_other_news_of_an_engine_are_nothing_to_its_legs():
    engines, heard = engines_of(A), []
    with engines.watching(A, lambda: heard.append(1)):
        engines.update([replace(A, cached_block_tokens=16), B])
        engines.update([A])
    assert heard == []


def test_a_leg_that_has_ended_hears_nothing():
    engines, heard = engines_of(A), []
    with engines.watching(A, lambda: heard.append(1)):
        pass
    with pytest.raises(ZeroDivisionError), engines.watching(A, lambda: heard.append(2)):
        raise ZeroDivisionError
    engines.update([])
    assert heard == []


# turns


def test_the_turn_of_an_engine_is_the_newest_that_it_took():
    engines = engines_of(A, B)
    assert [engines.last_turn(name) for name in "ab"] == [0, 0]
    for view in (A, B, A):
        engines.take_turn(view)
    assert engines.last_turn("a") > engines.last_turn("b") > 0


def test_turns_outlive_the_fleets_news():
    engines = engines_of(A, B)
    engines.take_turn(A)
    engines.update([A, B])
    assert engines.last_turn("a") > engines.last_turn("b")


# engines that are leaving

LEAVING = replace(A, ready=False, leaving=True)


def test_what_the_fleet_says_of_an_engine_that_leaves_is_read():
    said = {"name": "a", "tier": "decode", "url": "http://a", "ready": False, "leaving": True}
    assert EngineView.parse(said) == LEAVING


def test_an_engine_that_leaves_is_given_nothing_new_and_keeps_what_it_has():
    engines, heard = engines_of(A), []
    with engines.watching(A, lambda: heard.append(1)):
        engines.update([LEAVING])
        assert engines.ready("decode") == []
        assert engines.is_leaving(A)
        assert not engines.has_left(A)
        assert heard == []
        engines.update([])
        assert heard == [1]
    assert not engines.is_leaving(A)


@pytest.mark.parametrize("news", ENDS.values(), ids=ENDS)
def test_a_leg_hears_that_an_engine_that_was_leaving_has_ended(news):
    engines, heard = engines_of(A), []
    engines.update([LEAVING])
    with engines.watching(A, lambda: heard.append(1)):
        engines.update(news)
        assert heard == [1]


def test_those_that_are_leaving_are_the_last_that_serve():
    other = replace(A, name="c")
    engines = engines_of(LEAVING, other, replace(A, name="d", ready=False))
    assert engines.serving("decode") == [other, LEAVING]
    assert engines.serving("prefill") == []


def test_an_engine_that_was_started_anew_is_not_leaving_any_more():
    engines = engines_of(replace(LEAVING, generation=1))
    assert not engines.is_leaving(A)
