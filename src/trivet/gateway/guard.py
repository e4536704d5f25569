"""The standing guard: canaries through every pair, and who may serve because of what comes of them.

The worker that leads (``Board.leads``) sends them: when it sees a pair first, after either engine was started anew, on
a timer, and at once where requests of any worker met trouble between the two. What comes of it stands on the board,
where all workers choose by it (``Proof``):

- a pair leaves for wrong tokens, KV that decode computed itself, missing bytes and errors at once, and for KV that does
  not come (``Verdict.SILENT``) if no request was handed over meanwhile, and either requests had met trouble before, or
  it has happened twice in a row;
- slowness is no verdict: a canary that is late where plain requests are late too, or is refused by a full queue, leaves
  things as they were;
- a pair that left is tried again after 1, 2, 4 ... 30 s, and is back when it passes;
- a pair that nothing is known of serves while nothing better is there, so that a service that starts has no gap. Beside
  pairs that have passed it waits for its canary: an engine that was started anew meets no client before. It waits no
  longer than ``_HELD_S``, as the pairs that serve may need it.

Canaries cost little and leave nothing: short prompts and answers, one at a time at any engine, ``_TOGETHER`` in all.
They have legs, loads and prefix tables of their own, so neither admission nor metrics, journal or choice of requests
know of them. Where each engine has many pairs, those on a timer are spread so that an engine gets one in
``_SPACING_S`` at most: a pair is then looked at every ``_SPACING_S`` times the number of engines on the other side, if
that is longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp

from trivet.check.canary import Answer, Canaries, Failure, Outcome, Pair, Verdict, Vocabulary, blind_finding
from trivet.connectors import Connector
from trivet.legs.ending import end
from trivet.legs.life import Trouble
from trivet.routing.board import Board
from trivet.routing.engines import Engines, EngineView
from trivet.routing.proofs import Proof

logger = logging.getLogger(__name__)

_POLL_S = 0.25
"""How often the leading worker looks whether another one has met trouble, or the fleet has said something new."""
_LIMIT_S = 4.0
"""Longest that a canary's answer may take: a pair must have left within five seconds."""
_TOGETHER = 4
_SPACING_S = 2.0
_AGAIN_S = 2.0
"""Trouble has a pair looked at again no sooner than that after the last canary."""
_SLOW_AGAIN_S = 5.0
"""A canary without a verdict is sent again after that, or on the timer if that is sooner."""
_HELD_S = 10.0
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_FORGIVEN_S = 300.0
"""A pair that has passed for so long begins with the shortest pause when it fails again."""
_SILENT_TIMES = 2
_NOTICE_S, _NOTICE_POLL_S = 1.0, 0.1
"""How long the fleet may take to see that an engine has ended, before a broken connection is held against a pair."""
_LEFT = "left"
"""What is counted for a canary whose engine ended or was started anew meanwhile: it tells nothing of what is there."""

_PROOFS = {
    Verdict.CANARY_ERROR: Proof.CANARY_ERROR,
    Verdict.WRONG_TOKENS: Proof.WRONG_TOKENS,
    Verdict.RECOMPUTE: Proof.RECOMPUTE,
    Verdict.BYTES: Proof.BYTES,
    Verdict.SILENT: Proof.SILENT,
}


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """What a worker must know to guard pairs."""

    model: str
    """The name that engines serve it under."""
    every_s: float = 60.0
    prompt_tokens: int = 144
    priority: int = 0
    """Of canaries; other than 0 only where all engines schedule by priority."""
    vocab_size: int | None = None
    """Of the model; None if that is not known."""


@dataclass(slots=True, eq=False)
class _Watched:
    """One pair, as its engines were started last."""

    prefill: EngineView
    decode: EngineView
    next_s: float
    """When it is due; ``time.monotonic``."""
    seen_s: float
    began_s: float = 0.0
    """When its last canary was sent."""
    failures: int = 0
    failed_s: float = 0.0
    silent: int = 0
    """Canaries in a row whose KV did not come."""
    is_troubled: bool = False
    """Its last canary was sent because requests had met trouble."""

    def __str__(self) -> str:
        return f"{self.prefill.name} -> {self.decode.name}"

    @property
    def engines(self) -> set[str]:
        return {self.prefill.name, self.decode.name}


@dataclass(slots=True)
class _Answers:
    """The last two canaries that a reference engine answered: is what it says a matter of the prompt?"""

    outcomes: list[Outcome] = field(default_factory=list)
    is_told: bool = False


class Guard:
    """Watches the pairs of a fleet, in the worker that leads; in the others it only passes on what requests met."""

    def __init__(
        self,
        config: GuardConfig,
        engines: Engines,
        session: aiohttp.ClientSession,
        connector: Connector,
        counted: Callable[[str], None] = lambda _: None,
        *,
        limit_s: float = _LIMIT_S,
    ) -> None:
        """
        Args:
            engines: those that requests choose from; from now on by what comes of canaries.
            session: the HTTP session of the canaries; closed by its owner.
            counted: called with what came of each canary: a ``Verdict``, or ``left``.
            limit_s: longest that a canary's answer may take.
        """
        self._config = config
        self._engines = engines
        self._connector = connector
        self._counted = counted
        self._limit_s = limit_s
        self._canaries = Canaries(session, connector, config.model, priority=config.priority)
        self._vocabulary = Vocabulary() if config.vocab_size is None else Vocabulary.of(config.vocab_size)
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._fleet: tuple[tuple[str, int], ...] = ()
        self._running: dict[asyncio.Task[None], _Watched] = {}
        self._last_at: dict[str, float] = {}
        """When an engine last got a canary."""
        self._answers: dict[tuple[str, int], _Answers] = {}
        self._looked_for_trouble_s = 0.0
        self._woken = asyncio.Event()
        engines.guarded = True

    @property
    def _board(self) -> Board:
        return self._engines.board

    def troubled(self, trouble: Trouble) -> None:
        """A request of this worker met trouble between two engines: they are looked at at once."""
        fault = trouble.fault
        if fault is not None and not fault.executed:  # a full queue, or nobody there, which the fleet sees
            return
        self._board.note_trouble(trouble.prefill, trouble.decode)
        self._woken.set()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watches while the block runs."""
        watching = asyncio.create_task(self._watch(), name="pair guard")
        try:
            yield
        finally:
            await end(watching)
            for task in list(self._running):
                await end(task)
            await self._canaries.close()

    async def _watch(self) -> None:
        while True:
            try:
                if self._board.leads():
                    self._look()
                elif self._watched:
                    self._watched.clear()
                    self._fleet = ()
            except Exception:  # without it no pair would be watched any more, and nobody would know
                logger.exception("the pair guard; it goes on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._woken.wait()
            self._woken.clear()

    # what is due

    def _look(self) -> None:
        now = time.monotonic()
        self._follow_fleet(now)
        troubled = self._troubled_pairs(now)
        busy = set[str]().union(*(one.engines for one in self._running.values()))
        for one in sorted(self._watched.values(), key=lambda one: (one not in troubled, *self._urgency(one))):
            proof = self._proof(one)
            if proof is Proof.UNPROVEN and now - one.seen_s > _HELD_S:
                self._board.note_proof(one.prefill, one.decode, Proof.OPEN)
            if one.next_s > now or len(self._running) >= _TOGETHER or one.engines & busy:
                continue
            spaced = max(self._last_at.get(name, 0.0) for name in one.engines) + _SPACING_S <= now
            if proof is Proof.GOOD and one not in troubled and not spaced:
                continue
            busy |= one.engines
            one.is_troubled = one in troubled
            self._send(one, now)

    def _urgency(self, one: _Watched) -> tuple[int, float]:
        """Pairs without a verdict, then bad ones, then those on the timer; the longest due first."""
        proof = self._proof(one)
        return (2 if proof is Proof.GOOD else 1 if proof.is_bad else 0), one.next_s

    def _follow_fleet(self, now: float) -> None:
        prefills, decodes = self._engines.ready("prefill"), self._engines.ready("decode")
        fleet = tuple((one.name, one.generation) for one in (*prefills, *decodes))
        if fleet == self._fleet:
            return
        self._fleet = fleet
        before, self._watched = self._watched, {}
        self._last_at = {name: at_s for name, at_s in self._last_at.items() if name in dict(fleet)}
        self._answers = {key: one for key, one in self._answers.items() if key in {*fleet, *self._mixed()}}
        fresh = []
        for prefill in prefills:
            for decode in decodes:
                old = before.get((prefill.name, decode.name))
                if old is not None and _same(old.prefill, prefill) and _same(old.decode, decode):
                    self._watched[prefill.name, decode.name] = old
                    continue
                one = self._watched[prefill.name, decode.name] = _Watched(prefill, decode, now, now)
                fresh.append(one)
                if self._proof(one) is Proof.GOOD:  # of who led before
                    one.next_s = now + random.random() * self._config.every_s
        if not any(self._proof(one) is Proof.GOOD for one in self._watched.values()):
            for one in fresh:
                if self._proof(one) is Proof.UNPROVEN:
                    self._board.note_proof(one.prefill, one.decode, Proof.OPEN)

    def _mixed(self) -> list[tuple[str, int]]:
        return [(one.name, one.generation) for one in self._engines.ready("mixed")]

    def _troubled_pairs(self, now: float) -> list[_Watched]:
        """Those that met trouble since their last canary, and are due because of that."""
        last_s = self._board.last_trouble_s()
        if last_s <= self._looked_for_trouble_s:
            return []
        found, waits = [], False
        for one in self._watched.values():
            if self._board.last_trouble_s(one.prefill, one.decode) <= one.began_s or self._proof(one).is_bad:
                continue
            if one.began_s + _AGAIN_S > now or one in self._running.values():
                waits = True
                continue
            one.next_s = min(one.next_s, now)
            found.append(one)
        if not waits and not found:
            self._looked_for_trouble_s = last_s
        return found

    def _proof(self, one: _Watched) -> Proof:
        return self._board.proof(one.prefill, one.decode)

    # a canary, and what comes of it

    def _send(self, one: _Watched, now: float) -> None:
        one.began_s = now
        one.next_s = float("inf")  # until there is an outcome
        for name in one.engines:
            self._last_at[name] = now
        task = asyncio.create_task(self._try(one), name=f"canary {one}")
        self._running[task] = one
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        one = self._running.pop(task)
        self._woken.set()
        if not task.cancelled() and task.exception() is not None:
            logger.error("a canary of %s", one, exc_info=task.exception())
            one.next_s = time.monotonic() + self._config.every_s

    async def _try(self, one: _Watched) -> None:
        mixed = min(self._engines.ready("mixed"), key=lambda view: view.name, default=None)
        pair = Pair.of(self._connector, one.prefill, one.decode, mixed)
        if pair is None:
            one.next_s = time.monotonic() + self._config.every_s
            return
        handed_over = self._handed_over(one)
        prompt = self._vocabulary.prompt(self._config.prompt_tokens, uuid.uuid4().hex)
        outcome = await self._canaries.ask(pair, prompt, limit_s=self._limit_s)
        if await self._has_left(one, outcome):
            self._counted(_LEFT)
            one.next_s = time.monotonic() + _AGAIN_S  # unless the fleet says that it is another pair now
            return
        verdict = outcome.verdict
        if verdict is Verdict.SILENT and self._handed_over(one) != handed_over:
            verdict = Verdict.SLOW  # requests went through it meanwhile
        one.silent = one.silent + 1 if verdict is Verdict.SILENT else 0
        self._counted(str(verdict))
        self._look_for_blindness(pair, outcome)
        self._judge(one, verdict, outcome)

    def _judge(self, one: _Watched, verdict: Verdict, outcome: Outcome) -> None:
        now, proof = time.monotonic(), self._proof(one)
        times = 1 if one.is_troubled or proof.is_bad else _SILENT_TIMES
        if verdict.is_bad and (verdict is not Verdict.SILENT or one.silent >= times):
            self._leave(one, _PROOFS[verdict], outcome.told, now)
        elif verdict is Verdict.SILENT:
            one.next_s = now
        elif verdict is Verdict.GOOD:
            if proof.is_bad:
                logger.info("%s passes its canary again and serves, after %.0f s", one, now - one.failed_s)
            if now - one.failed_s > _FORGIVEN_S:
                one.failures = 0
            self._board.note_proof(one.prefill, one.decode, Proof.GOOD)
            one.next_s = now + self._config.every_s * random.uniform(0.9, 1.1)
        else:
            if proof is Proof.UNPROVEN:
                self._board.note_proof(one.prefill, one.decode, Proof.OPEN)
            pause_s = self._pause_s(one) if proof.is_bad else min(_SLOW_AGAIN_S, self._config.every_s)
            one.next_s = now + pause_s
            logger.debug("%s: %s", one, outcome.told)

    def _leave(self, one: _Watched, proof: Proof, told: str, now: float) -> None:
        before = self._proof(one)
        self._board.note_proof(one.prefill, one.decode, proof)
        one.next_s = now + self._pause_s(one)
        one.failures += 1
        if before.is_bad:
            logger.debug("%s fails again: %s", one, told)
            return
        one.failed_s = now
        others = any(self._proof(other).serves for other in self._watched.values())
        rest = "others go on" if others else "no pair is left, so requests are served colocated where they can be"
        logger.warning("%s leaves the rotation (%s): %s; %s", one, proof.word, told, rest)

    def _pause_s(self, one: _Watched) -> float:
        return _BACKOFF_S[min(one.failures, len(_BACKOFF_S) - 1)]

    def _handed_over(self, one: _Watched) -> int:
        """Requests that were handed over between the two, by any worker."""
        told = self._board.handover(one.prefill, one.decode)
        return 0 if told is None else told.samples

    async def _has_left(self, one: _Watched, outcome: Outcome) -> bool:
        """Whether an engine ended or was started anew meanwhile; a broken connection is often the first sign of it."""
        is_lost = isinstance(outcome.split, Failure) and outcome.split.is_lost
        deadline_s = time.monotonic() + (_NOTICE_S if is_lost else 0.0)
        while not (left := any(self._engines.has_left(view) for view in (one.prefill, one.decode))):
            if time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(_NOTICE_POLL_S)
        return left

    def _look_for_blindness(self, pair: Pair, outcome: Outcome) -> None:
        if not isinstance(outcome.colocated, Answer):
            return
        answers = self._answers.setdefault((pair.reference.name, pair.reference.generation), _Answers())
        answers.outcomes = [*answers.outcomes[-1:], outcome]
        finding = blind_finding(pair.reference.name, answers.outcomes)
        if finding is not None and not answers.is_told:
            logger.warning("%s: %s -> %s", pair.reference.name, finding.said, finding.mend)
        answers.is_told = finding is not None


def _same(one: EngineView, other: EngineView) -> bool:
    return one.generation == other.generation and one.url == other.url and one.kv_address == other.kv_address
