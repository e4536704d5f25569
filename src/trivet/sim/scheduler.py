"""Continuous batching as vLLM's scheduler does it: steps, chunked prefill, a pool that fills, preemption.

A step computes one token of every running answer and, with what is left of ``max_num_batched_tokens``, prompts in
the order they came. It takes the time that the settings say; only then its tokens come out.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from trivet.sim.pool import BlockPool, Keys
from trivet.sim.settings import SimSettings
from trivet.sim.stats import Stats
from trivet.sim.tokens import Walk, candidates

if TYPE_CHECKING:
    from trivet.sim.connector import Connector
    from trivet.sim.events import Publisher

_MOST_LATE_S = 0.01
"""Lateness that later steps make up for; what is beyond it is lost, as on an engine that is too slow."""


class End(StrEnum):
    """How an answer ends, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Output(NamedTuple):
    """What comes out of a step for one sequence."""

    choice: int
    token: int | None
    draw: bytes
    end: End | None
    stop_reason: int | str | None


class Sink:
    """Where the outputs of one request's sequences go."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._ready = asyncio.Event()

    def put(self, output: Output) -> None:
        """Adds one."""
        self._outputs.append(output)
        self._ready.set()

    async def take(self) -> list[Output]:
        """All that are there, at least one."""
        await self._ready.wait()
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


@dataclass(slots=True, eq=False)
class SimSequence:
    """One answer in the making."""

    name: str
    """vLLM's internal request id."""
    prompt: Sequence[int]
    sink: Sink
    leg: str = ""
    index: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    salt: str | None = None
    skip_cache: bool = False
    """Reads nothing from the prefix cache: ``skip_reading_prefix_cache``, which ``prompt_logprobs`` imply."""
    hands_over: bool = False
    """Its blocks are held for decode when it ends (``do_remote_decode``)."""
    told: dict[str, Any] | None = None
    """``kv_transfer_params`` of its answer."""
    withholds: bool = False
    """A fault: nothing is handed over."""
    source: Any = None
    """Where its prompt's KV comes from (``do_remote_prefill``)."""
    loses_at: int | None = None
    """A fault: its transfer is lost, once prefill has made so many tokens (0 or 1)."""
    slow_factor: float = 1.0
    pause_at: int | None = None
    """Tokens after which it is left alone for ``pause_s``."""
    pause_s: float = 0.0
    pause_ends_s: float | None = None
    end_at: tuple[int, End] | None = None
    """Tokens after which it ends in a given way, whatever was asked."""

    is_corrupted: bool = False
    """A fault: KV that comes from prefill is another prompt's."""
    first_rank: int = 1
    """A fault: which of the likeliest tokens is the first that is made behind KV from prefill; 1 is the likeliest."""
    is_uncounted: bool = False
    """A fault: KV that comes is not in the metrics."""
    is_dull: bool = False
    """A fault: the answer does not depend on the prompt."""

    first_token: int | None = None
    """The first token, if prefill has handed it over. It is part of the answer, and does not come out here."""
    answer: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in its blocks."""
    cached: int = 0
    """Prompt tokens found in the prefix cache here."""
    external: int = 0
    """Prompt tokens that came from prefill."""
    blocks: list[int] = field(default_factory=list)
    keys: Keys | None = None
    walk: Walk | None = None
    ended: End | None = None
    fetching: asyncio.Task[None] | None = None
    granted: Callable[[], None] | None = None
    """Called when it is given blocks for its KV, by a connector that opens at once."""
    pulled: bool = False
    """Its KV has come, or will not come any more."""
    arrived_s: float = field(default_factory=time.monotonic)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0

    @property
    def total(self) -> int:
        """Prompt and answer so far."""
        return len(self.prompt) + len(self.answer)

    @property
    def made(self) -> int:
        """Tokens that have come out here."""
        return len(self.answer) - (self.first_token is not None)


class Scheduler:
    """Runs sequences until they end. ``start`` once, ``stop`` once."""

    def __init__(
        self,
        settings: SimSettings,
        pool: BlockPool,
        stats: Stats,
        connector: Connector,
        events: Publisher | None = None,
    ) -> None:
        """
        Args:
            events: told what can be found in the prefix cache.
        """
        self._events = events
        self._settings = settings
        self._pool = pool
        self._stats = stats
        self._connector = connector
        self._random = random.Random(settings.seed)
        self.waiting: deque[SimSequence] = deque()
        self.running: list[SimSequence] = []
        self.fetching: set[SimSequence] = set()
        """Wait for their KV; with blocks, where the connector has asked for them."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._clock_s = 0.0

    def start(self) -> None:
        """Begins to run steps."""
        self._task = asyncio.create_task(self._run(), name="sim steps")

    async def stop(self) -> None:
        """Ends everything that runs or waits."""
        for sequence in self.unfinished():
            self.finish(sequence, End.ABORT)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def unfinished(self) -> list[SimSequence]:
        """All sequences that have not ended."""
        return [*self.running, *self.fetching, *self.waiting]

    def add(self, sequence: SimSequence) -> None:
        """Queues a sequence."""
        if sequence.source is not None and self._connector.opens_at_once:
            self._begin_fetch(sequence)
        else:
            self.waiting.append(sequence)
        self._wake.set()

    def want_room(self, sequence: SimSequence, granted: Callable[[], None]) -> None:
        """Queues a sequence that waits for its KV for blocks to put it in.

        Args:
            granted: called when it has them.
        """
        if sequence in self.fetching and not sequence.blocks:
            sequence.granted = granted
            self.fetching.discard(sequence)
            self.waiting.append(sequence)
            self._wake.set()

    def leave_room(self, sequence: SimSequence) -> None:
        """Takes back ``want_room``, granted or not."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.fetching.add(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        self._wake.set()

    def wake(self) -> None:
        """Says that there may be room where there was none."""
        self._wake.set()

    def finish(self, sequence: SimSequence, end: End, stop_reason: int | str | None = None) -> None:
        """Ends a sequence now: nothing comes out of it any more but its end, and its KV is free."""
        if sequence.ended is not None:
            return
        self._leave(sequence)
        self._close(sequence, end)
        sequence.sink.put(Output(sequence.index, None, b"", end, stop_reason))

    def _leave(self, sequence: SimSequence) -> None:
        if sequence in self.fetching:
            self.fetching.discard(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.fetching is not None and sequence.fetching is not asyncio.current_task():
            sequence.fetching.cancel()

    def _close(self, sequence: SimSequence, end: End) -> None:
        sequence.ended = end
        self._connector.ended(sequence, end)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []
        self._stats.finished(sequence, end)
        self._wake.set()

    async def _run(self) -> None:
        self._clock_s = time.monotonic()
        while True:
            self._wake.clear()
            batch = self._plan()
            if not batch:
                await self._wake.wait()
                self._clock_s = time.monotonic()
                continue
            seconds = self._duration_s(batch)
            if seconds > 0:
                now = time.monotonic()
                # from when the step before should have ended: the lateness of timers does not add up
                self._clock_s = max(self._clock_s, now - _MOST_LATE_S) + seconds
                await asyncio.sleep(max(0.0, self._clock_s - now))
            else:
                await asyncio.sleep(0)
            self._apply(batch)

    def _plan(self) -> list[tuple[SimSequence, int]]:
        """What the next step computes: sequences, and how many tokens of each."""
        settings, budget, now = self._settings, self._settings.max_num_batched_tokens, time.monotonic()
        batch: list[tuple[SimSequence, int]] = []
        preempted = False
        for sequence in list(self.running):
            if sequence not in self.running or self._is_paused(sequence, now):
                continue
            tokens = min(sequence.total - sequence.computed, budget)
            while tokens and not self._grow(sequence, sequence.computed + tokens):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                batch = [(one, count) for one, count in batch if one is not victim]
                if victim is sequence:
                    tokens = 0
            if tokens:
                batch.append((sequence, tokens))
                budget -= tokens
        if preempted and batch:
            return batch
        while self.waiting and budget > 0 and len(self.running) < settings.max_num_seqs:
            sequence = self.waiting[0]
            if not sequence.blocks and not self._admit(sequence, budget):
                break
            self.waiting.popleft()
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now
            if sequence.source is not None and not sequence.pulled:
                if sequence.granted is None:
                    self._begin_fetch(sequence)
                else:
                    self.fetching.add(sequence)
                    sequence.granted()
                continue
            self.running.append(sequence)
            if sequence.hands_over:
                self._connector.scheduled(sequence)
            tokens = min(sequence.total - sequence.computed, budget)
            if self._is_paused(sequence, now):
                continue
            if not self._grow(sequence, sequence.computed + tokens):  # it, or another, is preempted for that
                self._wake.set()
                continue
            batch.append((sequence, tokens))
            budget -= tokens
        return batch

    def _admit(self, sequence: SimSequence, budget: int) -> bool:
        """Gives a waiting sequence what it needs to begin; False if there is no room."""
        size = self._settings.block_size
        whole = [*sequence.prompt, *sequence.answer]
        sequence.keys = sequence.keys or Keys(size, sequence.salt)
        found: list[int] = []
        if self._settings.enable_prefix_caching:
            sequence.keys.extend(whole)
            if not sequence.skip_cache:
                # the last token is always computed: its output is the next token
                found = self._pool.find(sequence.keys.made[: (len(whole) - 1) // size])
        begin = len(found) * size
        pulls = sequence.source is not None and not sequence.pulled
        end = len(whole) if pulls else min(len(whole), begin + budget)
        blocks = self._pool.take(found, -(-end // size) - len(found))
        if blocks is None:
            return False
        sequence.blocks = blocks
        sequence.computed = begin
        if sequence.walk is None:
            sequence.cached = begin
        return True

    def _grow(self, sequence: SimSequence, tokens: int) -> bool:
        """Blocks for so many tokens; False if the pool has none left."""
        missing = -(-tokens // self._settings.block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.take((), missing)
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def _preempt(self, sequence: SimSequence) -> None:
        self.running.remove(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
        if sequence.walk is None:
            sequence.external = 0  # what was pulled is lost, and vLLM pulls once
        if sequence.hands_over:
            self._connector.preempted(sequence)
        self._queue_first(sequence)
        self._stats.preemptions += 1

    def _queue_first(self, sequence: SimSequence) -> None:
        """Queues a sequence before those that have not begun.

        What has blocks stands before what has none: else this one might wait for the blocks of one behind it.
        """
        place = 0 if sequence.blocks else sum(bool(one.blocks) for one in self.waiting)
        self.waiting.insert(place, sequence)

    def _is_paused(self, sequence: SimSequence, now: float) -> bool:
        if sequence.pause_at is None or sequence.made < sequence.pause_at:
            return False
        if sequence.pause_ends_s is None:
            sequence.pause_ends_s = now + sequence.pause_s
            if math.isfinite(sequence.pause_s):
                asyncio.get_running_loop().call_later(sequence.pause_s, self._wake.set)
        return now < sequence.pause_ends_s - 0.001  # the timer that wakes the steps may be a little early

    def _duration_s(self, batch: list[tuple[SimSequence, int]]) -> float:
        settings = self._settings
        milliseconds = settings.step_ms
        for sequence, tokens in batch:
            if tokens > 1 or not (sequence.answer or sequence.external):  # not a token that was just sampled or pulled
                milliseconds += tokens * settings.prefill_ms_per_token
                if sequence.computed == sequence.cached and sequence.walk is None:
                    milliseconds += settings.prefill_ms
        milliseconds *= max(sequence.slow_factor for sequence, _ in batch)
        if settings.jitter:
            milliseconds *= 1 + settings.jitter * self._random.uniform(-1, 1)
        return milliseconds / 1000

    def _apply(self, batch: list[tuple[SimSequence, int]]) -> None:
        now = time.monotonic()
        for sequence, tokens in batch:
            if sequence.ended is not None:
                continue
            before = sequence.computed
            sequence.computed += tokens
            self._remember(sequence, before)
            if sequence.computed < sequence.total:
                continue
            if sequence.walk is None:
                self._first(sequence, now)
            if sequence.end_at is not None and sequence.made >= sequence.end_at[0]:
                self.finish(sequence, sequence.end_at[1])
            else:
                self._sample(sequence, now)

    def _remember(self, sequence: SimSequence, before: int) -> None:
        """Names the blocks that have just become whole."""
        size, after = self._settings.block_size, sequence.computed
        if not self._settings.enable_prefix_caching or before // size == after // size:
            return
        assert sequence.keys is not None
        if len(sequence.keys.made) < after // size:
            sequence.keys.extend([*sequence.prompt, *sequence.answer])
        keys = sequence.keys.made
        new = [
            place
            for place in range(before // size, after // size)
            if self._pool.remember(sequence.blocks[place], keys[place])
        ]
        if self._events is None or not new:
            return
        whole = [*sequence.prompt, *sequence.answer]
        runs = groupby(enumerate(new), lambda one: one[1] - one[0])  # of blocks behind each other
        for run in ([place for _, place in run] for _, run in runs):
            first, end = run[0], run[-1] + 1
            parent = keys[first - 1] if first else None
            self._events.stored(keys[first:end], parent, whole[first * size : end * size], sequence.salt)

    def _first(self, sequence: SimSequence, now: float) -> None:
        settings = self._settings
        context = [*([] if sequence.is_dull else sequence.prompt), *sequence.answer]
        if sequence.is_corrupted and sequence.external:
            context.append(0)
        sequence.walk = Walk(
            context,
            vocab_size=settings.vocab_size,
            eos_token_id=settings.eos_token_id,
            eos_chance=settings.eos_chance,
        )
        sequence.first_token_s = now
        self._stats.prefilled(sequence)

    def _sample(self, sequence: SimSequence, now: float) -> None:
        walk = sequence.walk
        assert walk is not None
        draw = walk.draw()
        banned: frozenset[int] = frozenset()
        if len(sequence.answer) < sequence.min_tokens:
            banned = sequence.stop_token_ids | {self._settings.eos_token_id}
        token = walk.token(draw, banned)
        if sequence.first_rank > 1 and sequence.external and not sequence.made:
            token, _ = candidates(draw, token, sequence.first_rank, self._settings.vocab_size)[-1]
        walk.append(token)
        sequence.answer.append(token)
        self._stats.token(sequence, now)
        end, reason = self._end(sequence, token)
        if end is not None:
            self.running.remove(sequence)
            self._close(sequence, end)
        sequence.sink.put(Output(sequence.index, token, draw, end, reason))

    def _end(self, sequence: SimSequence, token: int) -> tuple[End | None, int | None]:
        """In vLLM's order: end of sequence, stop tokens, length."""
        if token == self._settings.eos_token_id and not sequence.ignore_eos:
            return End.STOP, None
        if token in sequence.stop_token_ids:
            return End.STOP, token
        if len(sequence.answer) >= sequence.max_tokens or sequence.total >= self._settings.longest:
            return End.LENGTH, None
        return None, None

    def _begin_fetch(self, sequence: SimSequence) -> None:
        self.fetching.add(sequence)
        sequence.fetching = asyncio.create_task(self._fetch(sequence), name=f"pull {sequence.name}")

    async def _fetch(self, sequence: SimSequence) -> None:
        """Gets a sequence's KV; it runs afterwards, or ends if that failed and it cannot do without."""
        try:
            await self._connector.pull(sequence)
        except asyncio.CancelledError:
            raise
        except Exception:  # whatever it was: vLLM sees a failed transfer
            self._stats.failed_transfers += 1
            if not self._connector.recomputes(sequence):
                self.finish(sequence, End.ERROR)
                return
            self._stats.recomputed += 1
        else:
            pulled_from = sequence.computed
            sequence.external = len(sequence.prompt) - pulled_from
            sequence.computed = len(sequence.prompt)
            self._remember(sequence, pulled_from)
            if sequence.first_token is None:
                sequence.computed -= 1  # computed again, for its output
            if not sequence.is_uncounted:
                self._stats.transferred(sequence)
        sequence.pulled = True
        sequence.fetching = None
        if sequence.first_token is not None:
            # not looked at: vLLM looks at tokens that it has made, and goes on behind a stop token that it is handed
            sequence.answer.append(sequence.first_token)
        if sequence in self.fetching:
            self.fetching.discard(sequence)
            self._queue_first(sequence)
        self._wake.set()
