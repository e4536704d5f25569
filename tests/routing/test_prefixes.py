"""Chains of hashes, and the table of who has what, against an exact model of it."""

import asyncio
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.boards import board_of
from trivet.routing.engines import EngineView
from trivet.routing.prefixes import (
    CHUNK_TOKENS,
    NOTHING,
    REGION,
    TABLE_BYTES,
    Chain,
    Known,
    Prefix,
    PrefixTable,
    named,
)

A, B = (EngineView(name, "prefill", f"http://{name}", True, cached_block_tokens=16) for name in "ab")
SET_BYTES = 48
"""Four slots of twelve bytes."""


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def hashes_of(ids, *identity) -> list[int]:
    chain = Chain(*identity)
    chain.extend(ids)
    return chain.hashes


def prefix_of(ids, *identity) -> Prefix:
    return Prefix(hashes_of(ids, *identity), len(ids))


def ids(count: int, *, start: int = 0) -> list[int]:
    return [(start * 7919 + number * 31) % 150000 for number in range(count)]


# chains


def test_a_hash_for_each_whole_chunk():
    assert [len(hashes_of(ids(count))) for count in (0, 1, 63, 64, 127, 128)] == [0, 0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=400), st.lists(st.integers(0, 2**32 - 1), max_size=200))
def test_prompts_have_the_hashes_of_their_common_beginning_in_common(one, end):
    other = [*one[: len(one) // 2], *end]
    common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    equal = [a == b for a, b in zip(hashes_of(one), hashes_of(other), strict=False)]
    assert equal == [number < common // CHUNK_TOKENS for number in range(len(equal))]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_a_chain_may_grow_in_any_pieces(token_ids, cuts):
    grown, places = Chain("m"), [0, *sorted(cuts), len(token_ids)]
    for start, end in itertools.pairwise(places):
        grown.extend(token_ids[start:end])
    assert grown.hashes == hashes_of(token_ids, "m")


def test_what_keeps_caches_apart_keeps_hashes_apart():
    identities = [
        (),
        ("model",),
        ("adapter",),
        ("model", None),
        ("model", ""),
        ("model", "salt"),
        ("model", "other"),
        ("modelsalt",),
        ("model", "salt", "image"),
        ("model", "salt", "image", "image"),
        ("tokens", "model", "salt"),
        (None, "model"),
    ]
    chains = [hashes_of(ids(256), *one) for one in identities]
    assert len({one for chain in chains for one in chain}) == 4 * len(identities)


def test_a_chain_is_the_same_in_every_process():
    code = "from trivet.routing.prefixes import Chain; c = Chain('m', None); c.extend(range(128)); print(c.hashes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(hashes_of(range(128), "m", None))


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_what_is_no_token_id_is_refused(wrong):
    with pytest.raises(OverflowError):
        Chain().extend([1, wrong])


# the table


def test_a_fresh_table_knows_nothing():
    assert PrefixTable().known(prefix_of(ids(500)), A) == NOTHING


def test_what_an_engine_has_computed_it_has():
    table = PrefixTable()
    table.learn(prefix_of(ids(500)), A)
    assert table.cached_tokens(prefix_of(ids(500)), A) == 448
    assert table.cached_tokens(prefix_of(ids(500) + ids(90, start=1)), A) == 448
    assert table.cached_tokens(prefix_of(ids(200) + ids(300, start=1)), A) == 192
    assert table.cached_tokens(prefix_of(ids(500)), B) == 0
    assert table.cached_tokens(prefix_of(ids(500), "salt"), A) == 0


@pytest.mark.parametrize(
    ("prompt_tokens", "block", "expected"),
    [
        (128, 16, 112),  # the last token is always computed
        (129, 16, 128),
        (200, 128, 128),
        (127, 128, 0),
        (1000, 784, 784),
        (200, None, 0),  # it keeps no cache, or does not tell
    ],
)
def test_tokens_are_whole_blocks_of_the_engines_without_the_last_token(prompt_tokens, block, expected):
    engine, table = replace(A, cached_block_tokens=block), PrefixTable()
    table.learn(prefix_of(ids(prompt_tokens)), engine)
    assert table.cached_tokens(prefix_of(ids(prompt_tokens)), engine) == expected


def test_an_engine_that_was_started_anew_has_nothing():
    table, prefix = PrefixTable(), prefix_of(ids(500))
    table.learn(prefix, A)
    assert table.cached_tokens(prefix, replace(A, generation=1)) == 0


def test_what_was_noted_just_now_is_passed_over():
    table, prefix = PrefixTable(), prefix_of(ids(500))
    table.learn(prefix, A, since=3)
    assert table.cached_tokens(Prefix(prefix.hashes[:3], 192), A) == 0
    table.learn(Prefix(prefix.hashes[:3], 192), A)
    assert table.cached_tokens(prefix, A) == 448


def test_in_a_full_set_the_oldest_gives_way():
    clock = Clock()
    table = PrefixTable(bytearray(SET_BYTES), clock)
    prompts = [prefix_of(ids(70, start=number)) for number in range(6)]
    for number in (0, 1, 2, 3, 0, 4, 5):
        table.learn(prompts[number], A)
        clock.now_s += 1
    assert [table.cached_tokens(one, A) for one in prompts] == [64, 0, 0, 64, 64, 64]


def test_ages():
    clock = Clock()
    table, long, short = PrefixTable(now_s=clock), prefix_of(ids(500)), prefix_of(ids(200))
    table.learn(long, A)
    clock.now_s += 50
    table.learn(short, A)
    clock.now_s += 5
    assert table.known(long, A) == Known(448, 55)
    assert table.known(short, A) == Known(192, 5)


def test_an_engine_that_had_less_than_was_expected_has_lost_what_is_as_old():
    clock = Clock()
    table = PrefixTable(now_s=clock)
    old, new, others = (prefix_of(ids(500, start=number)) for number in range(3))
    table.learn(old, A)
    table.learn(others, B)
    clock.now_s += 60
    expected = table.known(old, A)
    table.learn(new, A)
    clock.now_s += 10
    table.correct(A, expected, 0)
    assert table.cached_tokens(new, A) == 448
    assert table.cached_tokens(old, A) == 0
    assert table.cached_tokens(others, B) == 448
    table.learn(old, A)  # it has computed it
    assert table.cached_tokens(old, A) == 448
    clock.now_s += 59
    assert table.cached_tokens(new, A) == 0
    clock.now_s += 300  # engines' loads change: it is not held against it for ever
    assert table.cached_tokens(new, A) == 448


@pytest.mark.parametrize("told", [224, 448, 10_000])
def test_half_of_what_was_expected_is_another_way_of_counting(told):
    table, prefix = PrefixTable(), prefix_of(ids(500))
    table.learn(prefix, A)
    table.correct(A, table.known(prefix, A), told)
    assert table.cached_tokens(prefix, A) == 448


def test_what_was_learned_within_the_second_is_believed():
    table, prefix = PrefixTable(), prefix_of(ids(500))
    table.learn(prefix, A)
    table.correct(A, table.known(prefix, A), 0)
    assert table.cached_tokens(prefix, A) == 448


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 6), st.integers(0, 1)), max_size=60)


@given(STEPS, st.sampled_from([SET_BYTES, 4 * SET_BYTES, TABLE_BYTES // 64]))
@settings(max_examples=150)
def test_it_never_says_more_than_an_exact_one_and_the_same_where_there_is_room(steps, size):
    """The exact one is a dictionary; prompts share beginnings; engines are started anew."""
    table, exact, clock = PrefixTable(bytearray(size), Clock()), {}, Clock()
    for learns, prompt, chunks, generation in steps:
        engine = replace((A, B)[prompt % 2], generation=generation)
        token_ids = ids(64, start=prompt // 2) + ids(64 * chunks)
        prefix = prefix_of(token_ids)
        had = exact.setdefault((engine.name, generation), set())
        if learns:
            table.learn(prefix, engine)
            had |= set(prefix.hashes)
            clock.now_s += 1
        known = 0
        while known < len(prefix.hashes) and prefix.hashes[known] in had:
            known += 1
        expected = max(0, min(known * CHUNK_TOKENS, len(token_ids) - 1) // 16 * 16)
        said = table.cached_tokens(prefix, engine)
        assert said == expected if size > 4 * SET_BYTES else said <= expected


@given(st.binary(min_size=4 * SET_BYTES, max_size=4 * SET_BYTES))
def test_whatever_stands_in_the_memory_it_goes_on(memory):
    table, prefix = PrefixTable(bytearray(memory)), prefix_of(ids(500))
    assert table.known(prefix, A).tokens == 0
    table.learn(prefix, A)
    assert 0 <= table.known(prefix, A).tokens <= 448


@pytest.mark.parametrize("memory", [bytearray(47), bytearray(), memoryview(bytes(96))])
def test_memory_that_is_no_table(memory):
    with pytest.raises(ValueError, match="writable memory of 48 bytes or more"):
        PrefixTable(memory)


WRITER = """
import mmap, sys, time
from trivet.routing.engines import EngineView
from trivet.routing.prefixes import Chain, Prefix, PrefixTable
path, name, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
with open(path, "r+b") as file:
    table = PrefixTable(memoryview(mmap.mmap(file.fileno(), 0)))
    engine = EngineView(name, "prefill", "http://x", True, cached_block_tokens=16)
    end, round = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        chain = Chain(name, str(round % 50))
        chain.extend(range(640))
        table.learn(chain.prefix(641), engine)
        table.known(chain.prefix(641), engine)
        round += 1
print(round)
"""


def test_processes_that_write_at_once_name_no_engine_that_did_not(tmp_path):
    """Each writes prompts of its own into a table with too little room for both."""
    path = tmp_path / "table"
    path.write_bytes(bytes(64 * SET_BYTES))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name, "1.0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in "ab"
    ]
    for writer in writers:
        out, err = writer.communicate(timeout=60)
        assert (writer.returncode, err) == (0, b"")
        assert int(out) > 50
    table = PrefixTable(bytearray(path.read_bytes()))
    found = dict.fromkeys("abc", 0)
    for written in "ab":
        for number in range(50):
            prefix = prefix_of(range(641), written, str(number))
            for name in found:
                tokens = table.cached_tokens(prefix, replace(A, name=name))
                assert tokens == 0 or name == written
                found[name] += tokens
    assert found["a"] + found["b"] > 0
    assert found["c"] == 0


def test_on_the_board_one_worker_finds_what_another_has_learned():
    with board_of(2, regions={REGION: TABLE_BYTES}) as (_, first, second):
        PrefixTable(first.region(REGION)).learn(prefix_of(ids(500)), A)
        assert PrefixTable(second.region(REGION)).cached_tokens(prefix_of(ids(500)), A) == 448


def test_what_an_engine_told_itself_says_nothing_about_the_table():
    table = PrefixTable()
    table.learn(prefix_of(ids(640)), A)
    known = table.known(prefix_of(ids(640)), A)
    table.correct(A, replace(known, told=True), 0)
    assert table.known(prefix_of(ids(640)), A).tokens == known.tokens


def chunks_of(token_ids, *items):
    chain = Chain("m")
    chain.extend_bytes(named(token_ids, items))
    return chain.hashes


def test_images_keep_prompts_apart_that_have_the_same_tokens():
    plain, one, other = chunks_of(ids(256)), chunks_of(ids(256), (70, "a")), chunks_of(ids(256), (70, "b"))
    assert plain[0] == one[0] == other[0]
    assert len({*plain[1:], *one[1:], *other[1:]}) == 9
    assert chunks_of(ids(256), (71, "a"))[1] != one[1]
    assert chunks_of(ids(256), (70, "a"), (200, "b"))[:3] == one[:3]
    assert chunks_of(ids(256), (70, "\ud800")) == chunks_of(ids(256), (70, "\ud800"))


def test_a_prompt_without_images_is_its_tokens_and_is_left_as_it_is():
    asked = ids(256)
    before = list(asked)
    named(asked, [(3, "a")])
    assert list(asked) == before
    plain = Chain("m")
    plain.extend(asked)
    assert plain.hashes == chunks_of(asked)


def test_a_prompt_on_the_tokens_plane_is_marked_and_kept_apart_by_model_and_salt():
    made = {}
    for identity in (("m", None), ("m", "salt"), ("lora", None)):
        chain = Chain.of_tokens(*identity)
        chain.extend(ids(128))
        made[identity] = chain.prefix(128)
    assert all(one.of_tokens for one in made.values())
    assert len({one.hashes for one in made.values()}) == 3
    assert not prefix_of(ids(128)).of_tokens
    empty = Chain.of_tokens("m", "")  # no salt to an engine
    empty.extend(ids(128))
    assert empty.hashes == list(made["m", None].hashes)


@pytest.mark.parametrize("chunks", [0, 1, 512, 513, 1600])
def test_what_is_learned_in_turns_is_what_is_learned(chunks):
    prefix = Prefix([number * 2654435761 + 1 for number in range(chunks)], chunks * CHUNK_TOKENS + 1)
    one, other = (PrefixTable(now_s=Clock()) for _ in range(2))
    one.learn(prefix, A)
    asyncio.run(other.learn_in_turns(prefix, A))
    assert other.known(prefix, A) == one.known(prefix, A) == Known(chunks * CHUNK_TOKENS)
    assert bytes(other._tags) == bytes(one._tags)


async def test_others_have_their_turns_while_much_is_learned():
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await PrefixTable().learn_in_turns(Prefix(list(range(1600)), 1600 * CHUNK_TOKENS), A)
    counting.cancel()
    assert turns >= 2
