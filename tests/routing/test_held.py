"""What engines hold, in memory that several workers read."""

from dataclasses import replace

import pytest

from helpers.boards import board_of
from trivet.routing.engines import EngineView
from trivet.routing.held import FRESH_S, HELD_BYTES, HELD_REGION, Held, new_key
from trivet.routing.prefixes import NOTHING, Chain, Known, Prefix

ENGINE = EngineView("a", "prefill", "http://a", True, generation=3, cached_block_tokens=16, slot=5)
OTHER = replace(ENGINE, name="b", slot=6)


class Clock:
    now_s = 1000.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def prefix(tokens: int, start: int = 0) -> Prefix:
    chain = Chain.of_tokens("m", None)
    chain.extend(range(start, start + tokens))
    return chain.prefix(tokens)


def held_by(engine: EngineView, tokens: int, *, whole: bool = True, held: Held | None = None) -> Held:
    held, key = held or Held(), new_key()
    held.add(key, prefix(tokens).hashes)
    held.verify(engine, key, whole=whole)
    return held


def tokens_of(held: Held, asked: Prefix, engine: EngineView = ENGINE) -> int:
    return held.told(asked, engine).known.tokens


def test_of_an_engine_that_tells_nothing_nothing_is_known():
    assert Held().told(prefix(640), ENGINE) is None
    assert not Held().is_live(ENGINE)


@pytest.mark.parametrize(
    ("asked", "block", "expected"), [(641, 16, 640), (640, 16, 624), (320, 128, 256), (130, 128, 128), (63, 16, 0)]
)
def test_whole_chunks_cut_to_the_engines_blocks_and_never_the_last_token(asked, block, expected):
    held = held_by(ENGINE, 640)
    told = held.told(prefix(asked), replace(ENGINE, cached_block_tokens=block))
    assert told == (Known(expected, told=True), True)


def test_a_prompt_that_shares_a_beginning_has_that():
    held, chain = held_by(ENGINE, 640), Chain.of_tokens("m", None)
    chain.extend([*range(200), *range(5000, 5200)])
    assert tokens_of(held, chain.prefix(400)) == 192


def test_each_engine_has_its_own():
    held = held_by(ENGINE, 640)
    held_by(OTHER, 128, held=held)
    assert (tokens_of(held, prefix(1000)), tokens_of(held, prefix(1000), OTHER)) == (640, 128)


@pytest.mark.parametrize(
    "engine",
    [
        replace(ENGINE, generation=4),
        replace(ENGINE, name="c"),
        replace(ENGINE, slot=4),
        replace(ENGINE, slot=None),
        replace(ENGINE, slot=10**6),
        replace(ENGINE, cached_block_tokens=None),
    ],
)
def test_another_engine_or_the_same_one_started_anew_has_told_nothing(engine):
    assert held_by(ENGINE, 640).told(prefix(640), engine) is None


def test_a_prompt_known_by_its_text_cannot_be_looked_for():
    text = Chain("m", chunk_bytes=256)
    text.extend_bytes(bytes(1024))
    assert held_by(ENGINE, 640).told(text.prefix(256), ENGINE) is None


def test_what_was_not_verified_lately_counts_no_more():
    clock = Clock()
    held, key = Held(now_ns=clock), new_key()
    held.add(key, prefix(640).hashes)
    held.verify(ENGINE, key, whole=True)
    clock.now_s += FRESH_S - 0.1
    assert held.is_live(ENGINE)
    clock.now_s += 0.2
    assert (held.is_live(ENGINE), held.told(prefix(640), ENGINE)) == (False, None)
    held.verify(ENGINE, key, whole=False)
    assert held.told(prefix(640), ENGINE) == (Known(624, told=True), False)


def test_doubt_is_about_ones_own_words_only():
    held = held_by(ENGINE, 640)
    held.doubt(ENGINE, new_key())
    assert held.is_live(ENGINE)
    key = new_key()
    held.verify(ENGINE, key, whole=True)
    held.doubt(ENGINE, key)
    assert not held.is_live(ENGINE)


def test_chunks_that_are_dropped_leave_room():
    held, key = Held(), new_key()
    held.verify(ENGINE, key, whole=True)
    for start in range(0, 64 * 64, 64):
        held.add(key, prefix(640, start).hashes)
        assert tokens_of(held, prefix(641, start)) == 640
        held.drop(key, prefix(640, start).hashes)
        assert tokens_of(held, prefix(641, start)) == 0
    assert not any(held._tags)


def test_where_there_is_no_room_less_is_known_and_never_more():
    held, key = Held(), new_key()
    held.verify(ENGINE, key, whole=True)
    held._tags[:] = memoryview(b"\1" * held._tags.nbytes).cast("Q")  # other engines'
    held.add(key, prefix(640).hashes)
    held.drop(key, prefix(640).hashes[:1])
    assert held.told(prefix(640), ENGINE).known == replace(NOTHING, told=True)
    assert set(held._tags) == {int.from_bytes(b"\1" * 8, "little")}


def test_a_new_leader_takes_all_away():
    held = held_by(ENGINE, 640)
    held.clear()
    assert not held.is_live(ENGINE)
    assert not any(held._tags)


def test_what_one_worker_writes_the_others_read():
    with board_of(2, regions={HELD_REGION: HELD_BYTES}) as (_, first, second):
        held_by(ENGINE, 640, held=Held(first.region(HELD_REGION)))
        assert tokens_of(Held(second.region(HELD_REGION)), prefix(641)) == 640
