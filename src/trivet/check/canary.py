"""One canary through one pair: a prompt that nobody asked for, split, and the same prompt colocated beside it.

The split answer is made by the same ``Legs`` as clients' are, over that pair alone: handshake, release and abort are
the gateway's own. How it is known that the KV came, and was right:

- **Tokens.** Prompts are random, each a passage that begins again before its end, so that a language model goes on
  with the passage: its answer is sharp, and hangs on KV far back. Every ask has a fresh ``cache_salt``, or a cache
  would answer and nothing move. The split answer is asked for first: the colocated one leaves the right KV in
  decode's free blocks, where a transfer that does not happen would find it.
- **What decode computed itself** is told by its own ``usage``, which no other request can disturb: with a fresh salt,
  what it counts as cached was handed over. That needs ``--enable-prompt-tokens-details``. vLLM 0.30 tells the
  engine's own count; later ones tell prefill's where the parameters carry it, so canaries leave it out
  (``Connector.own_count``). Without it ``vllm:prompt_tokens_by_source_total`` is read before and behind, which counts
  only if the canary was alone.
- **Bytes of KV** are counted by the engine for all requests together. Others can only add to them: fewer than there
  must be are missing at any time, more mean something only if the canary was alone, which the engine's count of
  prompt tokens says exactly.

Greedy tokens may differ though all is right: no two ways of computing a prompt agree to the last digit in bf16, and
where two tokens are about as likely the other one is made (docs/measurements.md: up to 0.06 between log-probabilities
at 129 tokens, 0.8 at 700, 1.9 at 8,000 of a model that hangs sharply on its KV; wrong KV of one token moved them by
2.3 to 4.8). So where tokens differ the prompt is asked again, split and colocated, and colocated once more with its
beginning cached, which is right and computed much as the split one is. A split answer is wrong if its first other
token is less likely, in the colocated answer's own log-probabilities, by more than ``NEAR_TIE`` or is not among its
``_CANDIDATES``, unless the two colocated answers part there as well.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import aiohttp

from trivet.check.verdict import Finding, failed, passed, warned
from trivet.connectors import Connector
from trivet.fleet import probe
from trivet.journal import GenerationRecord, now_s
from trivet.legs.life import Legs, Trouble
from trivet.legs.tokens import TokenAsk
from trivet.legs.watch import Patience
from trivet.render.contract import DeadlinePassedError, ServingError, TokenLogprobs, TokenRequest
from trivet.routing.board import Board
from trivet.routing.choose import Knowledge
from trivet.routing.engines import Engines, EngineView
from trivet.routing.prefixes import PrefixTable

ANSWER_TOKENS = 8
"""Of an answer: several are decode's own, also where prefill makes the first; wrong KV shows in the first of them."""
NEAR_TIE = 1.0
"""Natural logarithms. A token that is e times less likely than another is not made in its place by rounding alone: that
moves log-probabilities of prompts of a few hundred tokens by less than half of it, see above."""
TIMES_SLOWER = 4.0
"""A canary that is not done when its time is over was held up by its pair, and not by a load, if the same prompt takes
both engines, one after the other and without a transfer, less time than that divided by this."""

_BACKOFF_TOKENS = 16
"""vLLM leaves a speculating decode the last tokens, up to one less than it drafts (``_prefill_backoff`` in
``nixl/base_scheduler.py``). A prompt that is computed again is computed whole."""
_CANDIDATES = 20
"""vLLM's ``--max-logprobs`` unless set."""
_SETTLES_S, _SETTLES_POLL_S = 0.5, 0.1
"""Engines count what they did with their next steps."""
_SETTLES_AT_LAST_S = 1.5
_FREED_POLL_S = 0.25
_FULL = frozenset({429, 503})
_REFUSED = frozenset({400, 404, 413, 422})
_COMPUTED = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
_PROMPT = "vllm:prompt_tokens_by_source_total"
_USAGE = "vllm:kv_cache_usage_perc"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids that prompts are made of: such as every tokenizer has, away from its special ones.

    Those stand at either end, up to a thousand at the beginning; a model that people use has 32,000 or more.
    """

    first: int = 1000
    end: int = 20000
    """The first that is not used any more."""
    special: frozenset[int] = frozenset()
    """Ids in between that are not used either."""

    @classmethod
    def of(cls, size: int, special: Iterable[int] = ()) -> Vocabulary:
        """Of a model whose vocabulary has so many ids.

        Args:
            special: ids that mean something beside text, where they are known.
        """
        first = min(1000, size // 2)
        return cls(first, max(first + 1, min(20000, size - size // 8)), frozenset(special))

    def prompt(self, tokens: int, seed: int | str) -> tuple[int, ...]:
        """A passage of random ids, and its beginning again in the last third; the same for the same seed."""
        chance = random.Random(seed)
        ids = [one for one in range(self.first, self.end) if one not in self.special] if self.special else None
        period = max(1, -(-2 * tokens // 3))
        passage = [chance.choice(ids) if ids else chance.randrange(self.first, self.end) for _ in range(period)]
        return tuple(passage[place % period] for place in range(tokens))


@dataclass(frozen=True, slots=True)
class Pair:
    """The two engines that a canary goes through, and who answers the same prompt colocated."""

    prefill: EngineView
    decode: EngineView
    reference: EngineView
    """The decode engine itself, where its connector lets it compute prompts; else a mixed one."""

    def __str__(self) -> str:
        return f"{self.prefill.name} -> {self.decode.name}"

    @classmethod
    def of(
        cls, connector: Connector, prefill: EngineView, decode: EngineView, mixed: EngineView | None = None
    ) -> Pair | None:
        """None if nobody could answer colocated."""
        reference = decode if connector.decode_serves_whole else mixed
        return None if reference is None else cls(prefill, decode, reference)


class Verdict(StrEnum):
    """What came of a canary. The first four are findings by the same name."""

    CANARY_ERROR = "canary-error"
    WRONG_TOKENS = "wrong-tokens"
    RECOMPUTE = "recompute"
    BYTES = "bytes"
    SILENT = "silent"
    """KV did not come in time, and both engines answered others meanwhile."""
    SLOW = "slow"
    """No verdict: it was not done in time, or refused, as engines are full."""
    UNJUDGED = "unjudged"
    """No verdict: there is nothing to hold the answer against."""
    GOOD = "good"

    @property
    def is_bad(self) -> bool:
        """Whether the pair is at fault."""
        return self not in (Verdict.SLOW, Verdict.UNJUDGED, Verdict.GOOD)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to the prompt; times in seconds since it was asked."""

    tokens: tuple[int, ...]
    ttft_s: float | None
    whole_s: float
    prefill_s: float | None = None
    """The prefill leg; None where it was colocated."""
    handover_s: float | None = None
    """Prefill's answer to decode's first token."""
    decode_cached_tokens: int | None = None
    """Prompt tokens that decode counted as handed over, or found in its cache; None if it does not tell."""
    transfer_problem: str | None = None
    """Why decode computed the prompt itself, where that is known."""
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    """At each token, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer."""

    told: str
    """In the engine's words."""
    is_full: bool = False
    """An engine has no room for more requests."""
    is_late: bool = False
    """Its time was over."""
    is_refused: bool = False
    """The request itself was refused (400, 404 ...)."""
    is_lost: bool = False
    """An engine cannot be reached, or broke off: it may just have ended."""
    stage: str = "decode"
    """``prefill``, ``handover`` or ``decode``: how far it had come."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a split answer parts from the colocated one first."""

    at: int
    """Counted from 0."""
    expected: int
    got: int | None
    """None where the split answer has ended."""
    gap: float | None
    """Natural logarithm of how much likelier the expected token is; None if that is not told, or the other one is not
    among the likeliest."""
    is_wrong: bool
    told: str
    """Why that is wrong, or is not held against the pair."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one canary."""

    pair: str
    """``prefill-0 -> decode-0``."""
    reference_engine: str
    prompt: tuple[int, ...] = field(repr=False)
    split: Answer | Failure
    colocated: Answer | Failure | None
    """None where it was not asked for any more."""
    difference: Difference | None = None
    """Between the two; None if they are equal, or one is missing."""
    computed_tokens: int | None = None
    """Prompt tokens that decode computed itself; None if it does not tell."""
    computed_by: str | None = None
    """``usage``: decode's word about this request. ``counters``: the engine's, while nobody else asked it."""
    computed_allowed: int = 1
    """The last token's output is the next token; where KV is addressed by hashes, the whole last block's."""
    kv_bytes: int | None = None
    """Bytes that decode counted meanwhile; None if it counts none."""
    kv_bytes_expected: int | None = None
    was_alone: bool | None = None
    """Nobody else's prompt was computed at decode meanwhile, so that its counters tell of the canary alone."""
    freed_s: tuple[float | None, float | None] | None = None
    """Seconds until KV memory was as before, at prefill and at decode; None of one that was not in time, or is used by
    others too. None as a whole where nobody waited for it."""
    was_idle: bool | None = None
    """Both engines were idle before and behind."""
    releases_unconfirmed: int = 0
    """Hand-overs that nobody took and that no engine confirmed to be free."""
    plain_s: tuple[float | None, float | None] | None = None
    """What the same prompt took without a transfer at prefill and at decode, where the split one was late; None of one
    that did not answer."""
    limit_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt."""
        return len(self.prompt)

    @property
    def verdict(self) -> Verdict:
        """The worst of it that says something about the pair. Memory that is not freed is a finding, and no verdict."""
        split = self.split
        if isinstance(split, Failure):
            if split.is_full:
                return Verdict.SLOW
            if split.is_late:
                return Verdict.SILENT if self._held_up_by_pair else Verdict.SLOW
            both_refuse = split.is_refused and isinstance(self.colocated, Failure) and self.colocated.is_refused
            return Verdict.UNJUDGED if both_refuse else Verdict.CANARY_ERROR
        if self.difference is not None and self.difference.is_wrong:
            return Verdict.WRONG_TOKENS
        if self.recomputed:
            return Verdict.RECOMPUTE
        if self.bytes_missing:
            return Verdict.BYTES
        if isinstance(self.colocated, Failure):
            return Verdict.SLOW if self.colocated.is_full or self.colocated.is_late else Verdict.UNJUDGED
        return Verdict.GOOD

    @property
    def recomputed(self) -> bool:
        """Whether decode computed what it should have been handed."""
        if isinstance(self.split, Answer) and self.split.transfer_problem is not None:
            return True
        return self.computed_tokens is not None and self.computed_tokens > self.computed_allowed

    @property
    def bytes_missing(self) -> bool:
        """Whether fewer bytes came than must have; without arithmetic, whether none did."""
        if self.kv_bytes is None:
            return False
        return self.kv_bytes < (1 if self.kv_bytes_expected is None else self.kv_bytes_expected)

    @property
    def told(self) -> str:
        """The verdict in words, for a log."""
        return next((one.said for one in findings(self) if one.name == _FINDING_OF[self.verdict]), str(self.verdict))

    @property
    def _held_up_by_pair(self) -> bool:
        if self.plain_s is None or None in self.plain_s:
            return False
        return sum(one for one in self.plain_s if one is not None) * TIMES_SLOWER < self.limit_s


_FINDING_OF: Mapping[Verdict, str] = {
    Verdict.CANARY_ERROR: "canary-error",
    Verdict.WRONG_TOKENS: "wrong-tokens",
    Verdict.RECOMPUTE: "recompute",
    Verdict.BYTES: "bytes",
    Verdict.SILENT: "handover",
    Verdict.SLOW: "handover",
    Verdict.UNJUDGED: "canary-error",
    Verdict.GOOD: "wrong-tokens",
}


class Canaries:
    """Sends canaries. Several may be under way at once; counters are exact only where no two share an engine."""

    def __init__(self, session: aiohttp.ClientSession, connector: Connector, model: str, *, priority: int = 0) -> None:
        """
        Args:
            session: the HTTP session of the legs; closed by its owner.
            model: the name that engines serve it under.
            priority: of the requests, where engines schedule by priority; others refuse any but 0. Lower is earlier.
        """
        self._session = session
        self._connector = connector
        self._model = model
        self._priority = priority
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Returns when all that canaries left at engines has been released, or was given up: seconds at most."""
        while self._closing:
            await asyncio.wait(self._closing)

    async def ask(
        self,
        pair: Pair,
        prompt: Sequence[int],
        *,
        limit_s: float,
        answer_tokens: int = ANSWER_TOKENS,
        kv_bytes_expected: int | None = None,
        freed_within_s: float | None = None,
    ) -> Outcome:
        """Sends one canary through a pair. Ends within some multiples of ``limit_s``, whatever the engines do.

        Args:
            prompt: see ``Vocabulary.prompt``.
            limit_s: longest that an answer may take, split or colocated.
            kv_bytes_expected: what decode must count, over all ranks; None if that is not known.
            freed_within_s: waits as long as that for KV memory to be as before; None does not look.
        """
        prompt, decode, limit = tuple(prompt), pair.decode, limit_s
        usage = _Usage(self._session, pair) if freed_within_s is not None else None
        if usage is not None:
            await usage.begin()
        counters = _Counters(self._session, decode, self._connector.bytes_metric)
        await counters.begin()
        split, unconfirmed = await self._split(pair, prompt, answer_tokens, limit)
        outcome = Outcome(
            str(pair), pair.reference.name, prompt, split, None, kv_bytes_expected=kv_bytes_expected, limit_s=limit
        )
        outcome = replace(outcome, releases_unconfirmed=unconfirmed, computed_allowed=self._allowed(pair, prompt))
        if isinstance(split, Failure) and (split.is_full or split.is_lost):
            return outcome
        if isinstance(split, Failure) and split.is_late:
            at_prefill = await self._colocated(pair.prefill, prompt, 1, limit)
            at_decode = await self._colocated(decode, prompt, 1, limit) if self._connector.decode_serves_whole else None
            times = [one.whole_s if isinstance(one, Answer) else None for one in (at_prefill, at_decode or at_prefill)]
            return replace(outcome, colocated=at_decode, plain_s=(times[0], times[1]))
        if isinstance(split, Answer):
            outcome = _with_counts(outcome, split, await counters.settled(len(prompt), 1, _SETTLES_S))
        colocated = await self._colocated(pair.reference, prompt, answer_tokens, limit)
        outcome = replace(outcome, colocated=colocated)
        if isinstance(split, Answer):
            if (
                outcome.bytes_missing and not outcome.recomputed
            ):  # what it has done since may have brought the counters up
                asked = 2 if pair.reference.name == decode.name and isinstance(colocated, Answer) else 1
                counted = await counters.settled(len(prompt), asked, _SETTLES_AT_LAST_S)
                outcome = _with_counts(outcome, split, counted, bytes_only=True)
            if isinstance(colocated, Answer) and split.tokens != colocated.tokens:
                difference = await self._look_again(pair, prompt, answer_tokens, limit, split)
                outcome = replace(outcome, difference=difference)
        if usage is not None and freed_within_s is not None:
            nudge = self._colocated(pair.prefill, prompt[:1], 1, limit)
            freed_s, was_idle = await usage.end(freed_within_s, nudge)
            outcome = replace(outcome, freed_s=freed_s, was_idle=was_idle)
        return outcome

    async def _look_again(
        self, pair: Pair, prompt: tuple[int, ...], tokens: int, limit_s: float, split: Answer
    ) -> Difference | None:
        """Asks once more for what differed; see the top of this file."""
        again, _ = await self._split(pair, prompt, tokens, limit_s)
        salt = uuid.uuid4().hex
        reference = await self._colocated(pair.reference, prompt, tokens, limit_s, salt=salt, logprobs=_CANDIDATES)
        if isinstance(reference, Failure):  # one that tells fewer log-probabilities, or none
            reference = await self._colocated(pair.reference, prompt, tokens, limit_s, salt=salt)
        control = await self._colocated(pair.reference, prompt, tokens, limit_s, salt=salt)
        if isinstance(reference, Failure):
            return Difference(0, -1, None, None, is_wrong=False, told=f"it could not be asked again: {reference.told}")
        splits = [one.tokens for one in (split, again) if isinstance(one, Answer)]
        return judge(splits, reference, control.tokens if isinstance(control, Answer) else None)

    def _allowed(self, pair: Pair, prompt: Sequence[int]) -> int:
        block = pair.decode.cached_block_tokens
        if not self._connector.addressed_by_hash or not block:
            return min(_BACKOFF_TOKENS, max(1, len(prompt) // 2))
        return len(prompt) - (len(prompt) - 1) // block * block

    async def _split(
        self, pair: Pair, prompt: Sequence[int], tokens: int, limit_s: float
    ) -> tuple[Answer | Failure, int]:
        """Over the pair alone, and never otherwise; and how many releases nobody confirmed."""
        engines = Engines(decode_serves_whole=False, board=Board.private(2))
        engines.update(replace(one, slot=slot) for slot, one in enumerate((pair.prefill, pair.decode)))
        return await self._ask(engines, self._connector, prompt, tokens, limit_s)

    async def _colocated(
        self,
        engine: EngineView,
        prompt: Sequence[int],
        tokens: int,
        limit_s: float,
        salt: str | None = None,
        logprobs: int | None = None,
    ) -> Answer | Failure:
        """At that engine, whatever its tier."""
        engines = Engines(board=Board.private(1))
        engines.update([replace(engine, tier="mixed", slot=0)])
        answer, _ = await self._ask(engines, None, prompt, tokens, limit_s, salt, logprobs)
        return answer

    async def _ask(
        self,
        engines: Engines,
        connector: Connector | None,
        prompt: Sequence[int],
        tokens: int,
        limit_s: float,
        salt: str | None = None,
        logprobs: int | None = None,
    ) -> tuple[Answer | Failure, int]:
        """One generation by legs of its own, which know nothing of any other and of which nothing is told."""
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        if logprobs is not None:
            sampling["logprobs"] = logprobs
        request = TokenRequest(
            request_id=uuid.uuid4().hex,
            token_ids=list(prompt),
            sampling=sampling,
            model=self._model,
            cache_salt=salt or f"canary-{uuid.uuid4().hex}",
            priority=self._priority,
        )
        begin_s, records, troubles = now_s(), list[GenerationRecord](), list[Trouble]()
        legs = Legs(
            engines,
            self._session,
            connector,
            lambda record, _: records.append(record),
            Patience(silence_s=None, deadline_s=begin_s + limit_s),
            knowledge=Knowledge(prefixes=PrefixTable(bytearray(64))),
            troubled=troubles.append,
            tells=False,
            own_count=True,
        )
        ask = TokenAsk(request, {}, None)
        made: list[int] = []
        told: list[TokenLogprobs] = []
        try:
            async with aclosing(legs.serve(ask)) as chunks:
                async for chunk in chunks:
                    made += chunk.token_ids
                    told += chunk.logprobs or ()
        except ServingError as error:
            (record,) = records
            return _failure(error, record, troubles), 0
        finally:
            closing = asyncio.create_task(legs.close())  # where engines hang, what is held is released by and by
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        await asyncio.wait([closing])
        (record,) = records
        return (
            Answer(
                tuple(made),
                None if record.first_token_s is None else record.first_token_s - begin_s,
                (record.end_s or now_s()) - begin_s,
                _between(record.prefill_start_s, record.prefill_end_s),
                _between(record.prefill_end_s, record.decode_first_s),
                ask.decode_cached_tokens,
                None if record.split or connector is None else record.transfer_problem or record.reason,
                tuple(told),
            ),
            legs.releases.unconfirmed,
        )


def judge(splits: Collection[tuple[int, ...]], reference: Answer, control: tuple[int, ...] | None) -> Difference | None:
    """Holds split answers against a colocated one; None if none of them differs.

    Args:
        splits: the first that differed, and what came when it was asked again.
        reference: colocated, with log-probabilities if the engine tells them.
        control: colocated once more, with the beginning cached; None if it did not come.
    """
    found = [one for split in splits if (one := _difference(split, reference, control, len(splits))) is not None]
    if not reference.logprobs and len(found) < len(splits):  # once only, and nothing tells how near the two are
        found = [replace(one, is_wrong=False, told="it was not so when it was asked again") for one in found]
    return min(found, key=lambda one: not one.is_wrong, default=None)


def _difference(
    split: tuple[int, ...], reference: Answer, control: tuple[int, ...] | None, asked: int
) -> Difference | None:
    at = first_difference(split, reference.tokens)
    if at is None or at >= len(reference.tokens):
        return None
    expected, got = reference.tokens[at], split[at] if at < len(split) else None
    parts = None if control is None else first_difference(control, reference.tokens)
    if parts is not None and parts <= at:
        return Difference(at, expected, got, None, is_wrong=False, told="colocated answers part there as well")
    if got is None:
        return Difference(at, expected, got, None, is_wrong=True, told="the split answer ended there")
    if at >= len(reference.logprobs):
        return Difference(at, expected, got, None, is_wrong=True, told=f"so each of {asked} times it was asked")
    candidates = dict(zip(reference.logprobs[at].token_ids, reference.logprobs[at].logprobs, strict=False))
    if got not in candidates:
        told = f"{got} is not among the {len(candidates)} likeliest tokens there"
        return Difference(at, expected, got, None, is_wrong=True, told=told)
    if expected not in candidates:
        return Difference(at, expected, got, None, is_wrong=True, told=f"so each of {asked} times it was asked")
    gap = candidates[expected] - candidates[got]
    told = f"{expected} is {gap:.2f} likelier than {got} (natural logarithm)"
    return Difference(at, expected, got, gap, is_wrong=gap > NEAR_TIE, told=told)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ, be it that one has ended; None if they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def findings(outcome: Outcome) -> list[Finding]:
    """What a canary says of its pair, line by line."""
    split, pair = outcome.split, outcome.pair
    if isinstance(split, Failure):
        return [_of_failure(outcome, split)]
    found = [passed("canary-error", pair, f"{outcome.prompt_tokens} tokens were prefilled, handed over and continued")]
    found += [
        _of_tokens(outcome, split),
        _of_recompute(outcome, split),
        _of_bytes(outcome),
        _of_handover(outcome, split),
    ]
    return found + ([_of_freed(outcome)] if outcome.freed_s is not None else [])


def blind_finding(about: str, outcomes: Iterable[Outcome]) -> Finding | None:
    """``canary-blind``: the model's answers do not depend on the prompt, so that right tokens say nothing of the KV.

    So it is with vLLM's dummy weights. None if answers differ, or there are no two to compare.
    """
    answers = {one.prompt: one.colocated.tokens for one in outcomes if isinstance(one.colocated, Answer)}
    if len(answers) < 2 or len(set(answers.values())) > 1:
        return None
    return warned(
        "canary-blind",
        about,
        f"{len(answers)} different prompts got the same answer colocated: tokens would be right without any KV",
        "check with real weights, or a seeded checkpoint: dummy weights answer alike whatever the KV",
    )


def _of_failure(outcome: Outcome, split: Failure) -> Finding:
    pair = outcome.pair
    match outcome.verdict:
        case Verdict.SLOW if split.is_full:
            return warned("handover", pair, f"no verdict: {split.told}", "check again when the engines have room")
        case Verdict.SLOW:
            said = (
                f"no verdict: the canary was not done within {outcome.limit_s:g} s, and the engines are as slow alone"
            )
            return warned("handover", pair, said, "check again when the engines are less busy")
        case Verdict.SILENT:
            plain_s = sum(one for one in outcome.plain_s or () if one is not None)
            said = (
                f"the canary came no further than {split.stage} within {outcome.limit_s:g} s; without a transfer both "
                f"engines together take {plain_s:.2f} s for it"
            )
            mend = "can decode reach prefill's side channel, and the network that KV takes? See decode's log"
            return failed("handover", pair, said, mend)
        case Verdict.UNJUDGED:
            return warned("canary-error", pair, f"no verdict: {split.told}", "the model name, or the prompt's ids?")
    return failed("canary-error", pair, split.told, f"see the logs of {pair.replace(' -> ', ' and ')}")


def _of_tokens(outcome: Outcome, split: Answer) -> Finding:
    pair, difference, colocated = outcome.pair, outcome.difference, outcome.colocated
    behind = f"behind {outcome.prompt_tokens} prompt tokens"
    if not isinstance(colocated, Answer):
        why = "it was not asked" if colocated is None else colocated.told
        said = f"no verdict: there is no colocated answer to hold it against ({why})"
        return warned("wrong-tokens", pair, said, f"does {outcome.reference_engine} answer plain requests?")
    if difference is None:
        said = f"{len(split.tokens)} greedy tokens {behind} are those that {outcome.reference_engine} makes alone"
        return passed("wrong-tokens", pair, said)
    where = f"token {difference.at + 1} {behind} is {difference.got} and not {difference.expected}: {difference.told}"
    if difference.is_wrong:
        mend = "take the pair out of service: its KV is not what prefill computed. Do both engines have the same flags?"
        return failed("wrong-tokens", pair, where, mend)
    mend = "nothing, if it is rare; if it is not, compare with both engines in float32 or VLLM_BATCH_INVARIANT=1"
    return warned("wrong-tokens", pair, f"{where}; not held against the pair", mend)


def _of_recompute(outcome: Outcome, split: Answer) -> Finding:
    pair, computed = outcome.pair, outcome.computed_tokens
    if outcome.recomputed:
        amount = f"{computed} of " if computed is not None else ""
        why = f": {split.transfer_problem}" if split.transfer_problem else ""
        said = f"decode computed {amount}{outcome.prompt_tokens} prompt tokens itself{why}"
        return failed("recompute", pair, said, "decode's log says why KV did not come; kv_load_failure_policy: fail")
    if computed is None:
        said = "decode does not tell what it computed"
        return warned("recompute", pair, said, "start it with --enable-prompt-tokens-details, or check it while idle")
    said = f"decode computed {computed} of {outcome.prompt_tokens} prompt tokens (by its {outcome.computed_by})"
    return passed("recompute", pair, said)


def _of_bytes(outcome: Outcome) -> Finding:
    pair, moved, expected = outcome.pair, outcome.kv_bytes, outcome.kv_bytes_expected
    if moved is None:
        return warned("bytes", pair, "decode counts no bytes of KV", "is its /metrics on, and its connector this one?")
    of = "" if expected is None else f" of {expected:,}"
    if outcome.bytes_missing:
        said = f"{moved:,}{of} bytes of KV came for {outcome.prompt_tokens} tokens"
        return failed("bytes", pair, said, "KV is missing: what decode answers is not made of what prefill computed")
    if not outcome.was_alone:
        return passed("bytes", pair, f"{moved:,} bytes of KV came, others' among them{of and f'; {expected:,} must'}")
    if expected is not None and moved > expected:
        said = f"{moved:,} bytes of KV came for {outcome.prompt_tokens} tokens, and {expected:,} are enough"
        return warned("bytes", pair, said, "does the model's configuration say more than the engines were told?")
    return passed("bytes", pair, f"{moved:,}{of} bytes of KV came for {outcome.prompt_tokens} tokens")


def _of_handover(outcome: Outcome, split: Answer) -> Finding:
    if split.handover_s is None or split.prefill_s is None or split.ttft_s is None:
        return warned("handover", outcome.pair, "it could not be measured", "ask for a longer answer")
    said = f"{split.handover_s * 1e3:.1f} ms behind {split.prefill_s * 1e3:.1f} ms of prefill; first token after "
    said += f"{split.ttft_s * 1e3:.1f} ms"
    if isinstance(outcome.colocated, Answer) and outcome.colocated.ttft_s is not None:
        said += f", colocated {outcome.colocated.ttft_s * 1e3:.1f} ms"
    return passed("handover", outcome.pair, said)


def _of_freed(outcome: Outcome) -> Finding:
    assert outcome.freed_s is not None
    pair, sides = outcome.pair, ("prefill", "decode")
    late = [side for side, seconds in zip(sides, outcome.freed_s, strict=True) if seconds is None]
    if outcome.releases_unconfirmed:
        said = f"{outcome.releases_unconfirmed} release(s) of KV that no engine confirmed"
        return failed("freed", pair, said, "prefill holds that KV until its lease ends; see its log")
    if not late:
        longest_s = max(seconds or 0.0 for seconds in outcome.freed_s)
        return passed("freed", pair, f"KV memory of both engines was as before after {longest_s:.1f} s")
    if not outcome.was_idle:
        said = f"no verdict: others use the memory of {' and '.join(late)}"
        return warned("freed", pair, said, "check again while the engines are idle")
    said = f"KV memory of {' and '.join(late)} is fuller than before"
    return failed("freed", pair, said, "KV that nobody takes fills prefill until its lease ends; see its log")


class _Counters:
    """What a decode engine counted between two moments."""

    def __init__(self, session: aiohttp.ClientSession, engine: EngineView, bytes_metric: str | None) -> None:
        self._session = session
        self._url = engine.url
        self._bytes = bytes_metric
        self._names = (_COMPUTED, _PROMPT, *((bytes_metric,) if bytes_metric is not None else ()))
        self._before: Mapping[str, float] | None = None

    async def begin(self) -> None:
        """From now on."""
        self._before = await probe.counts(self._session, self._url, *self._names)

    async def settled(self, prompt_tokens: int, asked: int, within_s: float) -> _Counted:
        """Until now, or a moment later: until the canary's ``asked`` prompts are in it, and bytes if there are any."""
        deadline_s = now_s() + within_s
        while True:
            counted = await self._read(prompt_tokens * asked)
            if counted.is_whole or now_s() >= deadline_s:
                return counted
            await asyncio.sleep(_SETTLES_POLL_S)

    async def _read(self, prompt_tokens: int) -> _Counted:
        before, after = self._before, await probe.counts(self._session, self._url, *self._names)
        if before is None or after is None:
            return _Counted(None, None, None, is_whole=True)

        def since(name: str) -> float | None:
            # counters with labels appear when they are first counted
            return after[name] - before.get(name, 0.0) if name in after else None

        prompt, moved = since(_PROMPT), since(self._bytes) if self._bytes is not None else None
        computed = since(_COMPUTED)
        return _Counted(
            None if computed is None else int(computed),
            None if moved is None else int(moved),
            None if prompt is None else round(prompt) == prompt_tokens,
            is_whole=(prompt is None or prompt >= prompt_tokens) and moved != 0,
        )


@dataclass(frozen=True, slots=True)
class _Counted:
    computed_tokens: int | None
    kv_bytes: int | None
    was_alone: bool | None
    is_whole: bool


def _with_counts(outcome: Outcome, split: Answer, counted: _Counted, *, bytes_only: bool = False) -> Outcome:
    outcome = replace(outcome, kv_bytes=counted.kv_bytes, was_alone=counted.was_alone)
    if bytes_only:
        return outcome
    if split.decode_cached_tokens is not None:
        computed = max(0, outcome.prompt_tokens - split.decode_cached_tokens)
        return replace(outcome, computed_tokens=computed, computed_by="usage")
    if counted.was_alone and counted.computed_tokens is not None:
        return replace(outcome, computed_tokens=counted.computed_tokens, computed_by="counters")
    return outcome


class _Usage:
    """KV memory of both engines before and behind a canary."""

    def __init__(self, session: aiohttp.ClientSession, pair: Pair) -> None:
        self._session = session
        self._urls = (pair.prefill.url, pair.decode.url)
        self._before: list[Mapping[str, float]] = []

    async def begin(self) -> None:
        """From now on."""
        self._before = await self._look()

    async def end(self, within_s: float, nudge: Any) -> tuple[tuple[float | None, float | None], bool]:
        """Seconds until each engine's memory is as before, and whether nobody else used them.

        Args:
            nudge: an engine tells of its memory as it was in its last step: awaited when that may be why it is full.
        """
        begin_s, nudged = now_s(), False
        if any(_USAGE not in one for one in self._before):  # --disable-log-stats, or /metrics is not to be had
            nudge.close()
            return (None, None), False
        freed: list[float | None] = [None, None]
        busy = any(_is_busy(one) for one in self._before)
        try:
            while None in freed and (waited_s := now_s() - begin_s) < within_s:
                looked = await self._look()
                for side, (before, now) in enumerate(zip(self._before, looked, strict=True)):
                    if freed[side] is None and now.get(_USAGE, 1.0) <= before.get(_USAGE, 0.0) + 1e-9:
                        freed[side] = now_s() - begin_s
                if None in freed and not nudged and waited_s > within_s / 3:
                    nudged = True
                    await nudge
                elif None in freed:
                    await asyncio.sleep(_FREED_POLL_S)
                busy = busy or any(_is_busy(one) for one in looked)
        finally:
            if not nudged:
                nudge.close()
        return (freed[0], freed[1]), not busy

    async def _look(self) -> list[Mapping[str, float]]:
        names = (_USAGE, _RUNNING, _WAITING)
        return [await probe.counts(self._session, url, *names) or {} for url in self._urls]


def _is_busy(counts: Mapping[str, float]) -> bool:
    return counts.get(_RUNNING, 0.0) + counts.get(_WAITING, 0.0) > 0


def _failure(error: ServingError, record: GenerationRecord, troubles: Sequence[Trouble]) -> Failure:
    stage = "decode"
    if record.prefill_end_s is None and record.intended_split:
        stage = "prefill"
    elif record.decode_first_s is None:
        stage = "handover"
    faults = [one.fault for one in troubles if one.fault is not None]
    if isinstance(error, DeadlinePassedError):
        return Failure(error.message, is_late=True, stage=stage)
    return Failure(
        str(faults[-1]) if faults else error.message,
        is_full=all(one.status in _FULL for one in faults) if faults else error.status == 429,
        is_refused=error.status in _REFUSED,
        is_lost=bool(faults) and faults[-1].died,
        stage=stage,
    )


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
