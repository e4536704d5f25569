"""A whole check of engines that run: what they tell, what the link is, and canaries through every pair.

Pairs are taken one after another, and a pair's canaries too: counters of bytes are exact only where nothing else moves
KV, and a handover that others disturb is not the link's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trivet.check import predict
from trivet.check.canary import (
    ANSWER_TOKENS,
    Answer,
    Canaries,
    Outcome,
    Pair,
    Vocabulary,
    blind_finding,
    findings,
)
from trivet.check.compatible import compatible
from trivet.check.devices import look
from trivet.check.kv_size import KvSize, size_of
from trivet.check.link import judge_mover, look_at_link
from trivet.check.model_config import read_config
from trivet.check.told import EngineFacts, read_facts
from trivet.check.verdict import Finding, Level, failed, passed, warned, worst
from trivet.connectors import Connector
from trivet.errors import TrivetError
from trivet.legs.wire import open_session
from trivet.routing.engines import EngineView

_EXACT_BLOCKS = 4
_REPEATS = 3
"""Canaries at each length whose times count."""
_BUDGET_S = 45.0
"""What the canaries of a pair may take together, as far as that can be told from the first of them."""
_LEAST_LONG_BLOCKS = 8
_CHUNKS = 2
_DEFAULT_BLOCK_TOKENS, _DEFAULT_CHUNK_TOKENS, _DEFAULT_LENGTH_TOKENS = 16, 2048, 4096
"""Of an engine that does not tell."""
_LIMIT_S = 60.0
_FREED_WITHIN_S = 5.0
_METRICS_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_LINK_SHARE = 0.5
"""A link that carries less than this of what it was said to carry is named."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a check."""

    prompt_tokens: tuple[int, ...] = ()
    """Lengths that times are predicted for; those that were measured, if none is given."""
    link_gbps: float | None = None
    """What the link should carry, in 10**9 bits a second."""
    limit_s: float = _LIMIT_S
    """Longest that one answer may take."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a check."""

    connector: str
    model: str
    engines: Mapping[str, EngineFacts | None]
    """None of one that did not answer."""
    kv: KvSize | None
    """None where the model's config could not be read here."""
    findings: tuple[Finding, ...]
    overlaps: bool = False
    """Whether KV moves while it is computed: handovers do not tell the link's speed then."""
    predictions: Mapping[str, tuple[predict.Prediction, ...]] = field(default_factory=dict)
    """By pair."""
    handovers: Mapping[str, predict.HandoverModel] = field(default_factory=dict)
    outcomes: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)

    @property
    def level(self) -> Level:
        """The worst of its findings."""
        return worst(self.findings)

    def facts(self) -> dict[str, Any]:
        """As ``--json`` writes it."""
        return {
            "verdict": str(self.level),
            "connector": self.connector,
            "model": self.model,
            "findings": [one.facts() for one in self.findings],
            "kv": None if self.kv is None else self.kv.facts(),
            "pairs": {
                pair: {
                    "handover": _line_facts(self.handovers.get(pair), None if self.overlaps else self.kv),
                    "predictions": [one.facts() for one in self.predictions.get(pair, ())],
                    "canaries": [_outcome_facts(one) for one in outcomes],
                }
                for pair, outcomes in self.outcomes.items()
            },
            "engines": {
                name: None if facts is None else {"vllm": facts.vllm, "tells": facts.whole, "host": facts.host}
                for name, facts in self.engines.items()
            },
        }


async def check(
    views: Sequence[EngineView],
    connector: Connector,
    model: str,
    *,
    model_path: str | None,
    wish: Wish,
    say: Say = lambda _: None,
) -> Report:
    """Checks every pair of a prefill and a decode engine.

    Args:
        views: engines that run.
        model: the name under which they serve it.
        model_path: where its config may be read here, a folder or hub name; what the engines tell if None.
        say: told what is done, for a person who waits.
    """
    async with open_session() as session:
        return await _Check(session, list(views), connector, model, model_path, wish, say).run()


class _Check:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        views: list[EngineView],
        connector: Connector,
        model: str,
        model_path: str | None,
        wish: Wish,
        say: Say,
    ) -> None:
        self._session = session
        self._views = views
        self._connector = connector
        self._model = model
        self._model_path = model_path
        self._wish = wish
        self._say = say
        self._facts: dict[str, EngineFacts | None] = {}
        self._findings: list[Finding] = []
        self._kv: KvSize | None = None
        """Of the first pair."""
        self._predictions: dict[str, tuple[predict.Prediction, ...]] = {}
        self._handovers: dict[str, predict.HandoverModel] = {}
        self._outcomes: dict[str, tuple[Outcome, ...]] = {}
        self._canaries = Canaries(session, connector, model)

    async def run(self) -> Report:
        self._say("asking the engines what they are")
        await asyncio.gather(*(self._read(view) for view in self._views))
        try:
            for prefill in (one for one in self._views if one.tier == "prefill"):
                for decode in (one for one in self._views if one.tier == "decode"):
                    await self._check_pair(prefill, decode)
        finally:
            await self._canaries.close()
        if blind := blind_finding("", [one for outcomes in self._outcomes.values() for one in outcomes]):
            self._findings.append(blind)
        return Report(
            self._connector.name,
            self._model,
            self._facts,
            self._kv,
            tuple(self._findings),
            self._connector.legs_start_together,
            self._predictions,
            self._handovers,
            self._outcomes,
        )

    async def _read(self, view: EngineView) -> None:
        try:
            facts = await read_facts(self._session, view.url, view.api_key)
        except TrivetError as error:
            self._facts[view.name] = None
            self._findings.append(failed("engine", view.name, error.problem, error.mend or "start it"))
            return
        self._facts[view.name] = facts
        told = f"vLLM {facts.vllm or 'of unknown version'} at {view.url}"
        self._findings.append(
            passed("engine", view.name, told + ("" if facts.whole else "; it tells little of itself"))
        )

    def _kv_size(self, prefill: EngineFacts, decode: EngineFacts) -> KvSize | None:
        """The arithmetic of a pair, of what its engines and the model's config say. Said once of equal ones."""
        where = self._model_path or prefill.model or decode.model
        if where is None:
            said = "no engine says where its model is, so that what must move cannot be worked out"
            self._tell_once(warned("arithmetic", "", said, "name it in the topology: model.name"))
            return None
        # NIXL moves prefill's blocks, of which decode's may be several
        blocks = [one for one in (prefill.block_tokens, decode.block_tokens) if one]
        try:
            kv = size_of(
                read_config(where),
                dtype=decode.dtype or "auto",
                kv_cache_dtype=decode.kv_dtype_flag or "auto",
                tp=decode.tensor_parallel or 1,
                block_size=min(blocks, default=_DEFAULT_BLOCK_TOKENS),
                is_hybrid=decode.hybrid_manager,
            )
        except TrivetError as error:
            mend = error.mend or "name it in the topology: model.name"
            self._tell_once(warned("arithmetic", "", error.problem, mend))
            return None
        said = f"{kv.bytes_per_token:,} bytes of KV a token ({kv.kv_cache_dtype}, {kv.model_type})"
        self._tell_once(passed("arithmetic", "", "; ".join((said, *kv.notes))))
        self._kv = self._kv or kv
        return kv

    def _tell_once(self, finding: Finding) -> None:
        if finding not in self._findings:
            self._findings.append(finding)

    async def _check_pair(self, prefill: EngineView, decode: EngineView) -> None:
        name = f"{prefill.name} -> {decode.name}"
        of_prefill, of_decode = self._facts[prefill.name], self._facts[decode.name]
        if of_prefill is None or of_decode is None:
            return  # said already
        kv = await asyncio.to_thread(self._kv_size, of_prefill, of_decode)
        self._findings += compatible(of_prefill, of_decode, self._connector.name, name)
        self._say(f"{name}: measuring the link")
        self._findings += await look_at_link(of_prefill, of_decode, self._connector.name, name)
        mixed = next((one for one in self._views if one.tier == "mixed" and self._facts[one.name] is not None), None)
        pair = Pair.of(self._connector, prefill, decode, mixed)
        if pair is None:
            said = "nobody could answer colocated: with this connector decode computes no prompt"
            self._findings.append(
                warned("wrong-tokens", name, said, "add a mixed engine, which canaries are held against")
            )
            return
        outcomes = await _PairCanaries(
            self._canaries, pair, of_prefill, of_decode, kv, self._connector.moves_padding, self._wish, self._say
        ).run()
        self._outcomes[name] = tuple(outcomes)
        self._findings += merged(outcomes)
        if self._connector.name == "TrivetConnector":
            self._findings.append(await _look_behind(self._session, of_prefill, of_decode, name, decode.url))
        self._predict(name, outcomes, kv)

    def _predict(self, name: str, outcomes: Sequence[Outcome], kv: KvSize | None) -> None:
        handovers, prefill, colocated = measured(outcomes)
        if len(handovers) < 2 or not prefill:
            return  # canaries say why
        line = predict.handover(handovers)
        self._handovers[name] = line
        # where KV moves while it is computed, what is left of the handover says nothing of the link
        per_token = None if kv is None or self._connector.legs_start_together else kv.bytes_per_token
        self._findings.append(predict.prediction_finding(name, line, per_token))
        if (slow := self._slow(name, line, per_token)) is not None:
            self._findings.append(slow)
        if not colocated:
            return
        predictions = predict.predict(
            self._wish.prompt_tokens or [max(handovers)],
            prefill=prefill,
            colocated_ttft=colocated,
            handovers=line,
            first_token_is_prefills=self._connector.hands_over_first_token,
        )
        self._predictions[name] = tuple(predictions)
        self._findings += [predict.split_pays_finding(name, one) for one in predictions]

    def _slow(self, name: str, line: predict.HandoverModel, per_token: int | None) -> Finding | None:
        """``link-speed``: what was measured beside what the link is said to carry."""
        said_gbps = self._wish.link_gbps
        if said_gbps is None or per_token is None or (gb_per_s := line.gb_per_s(per_token)) is None:
            return None
        told = f"KV moves at {gb_per_s * 8:.1f} Gbit/s, and the link is said to carry {said_gbps:g}"
        if gb_per_s * 8 >= _LINK_SHARE * said_gbps:
            return passed("link-speed", name, told)
        return warned(
            "link-speed", name, told, "is it the link that was meant? See `link`, and the settings named there"
        )


async def _look_behind(
    session: aiohttp.ClientSession, prefill: EngineFacts, decode: EngineFacts, name: str, decode_url: str
) -> Finding:
    """Which mover carried KV, which shows when something has moved."""
    metrics = ""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.get(f"{decode_url}/metrics", timeout=_METRICS_TIMEOUT) as answer:
            metrics = await answer.text()
    return judge_mover(metrics, prefill, decode, await look(), name)


@dataclass(slots=True)
class _PairCanaries:
    canaries: Canaries
    pair: Pair
    prefill: EngineFacts
    decode: EngineFacts
    kv: KvSize | None
    pads: bool
    wish: Wish
    say: Say
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self) -> list[Outcome]:
        """Below a block, exact blocks, several chunks; then again, for times that can be believed."""
        block = self.decode.block_tokens or self.pair.decode.cached_block_tokens or _DEFAULT_BLOCK_TOKENS
        length = min(one.max_length_tokens or _DEFAULT_LENGTH_TOKENS for one in (self.prefill, self.decode))
        most = length - ANSWER_TOKENS - 1
        below, exact = max(1, min(block // 2, most)), max(1, min(_EXACT_BLOCKS * block, most))
        if not await self._ask(below) or not await self._ask(exact, freed=True):
            return self.outcomes
        # the first ones paid for the handshake, and are not what such prompts take
        if not await self._ask(below) or not await self._ask(exact):
            return self.outcomes
        long = self._long(block, exact, most)
        middle = max(1, (exact + long) // 2)
        for number in range(_REPEATS):
            for tokens in (exact, middle, long):
                if not await self._ask(tokens, freed=number == 0 and tokens == long):
                    return self.outcomes
        return self.outcomes

    def _long(self, block: int, exact: int, most: int) -> int:
        """A prompt of several chunks that ends within a block, if this pair computes it in reasonable time."""
        chunk = self.prefill.batched_tokens or _DEFAULT_CHUNK_TOKENS
        wanted = max(_CHUNKS * chunk + block // 2, *self.wish.prompt_tokens, _LEAST_LONG_BLOCKS * block)
        (short, short_s), (_, exact_s) = ((one.prompt_tokens, _took_s(one)) for one in self.outcomes[-2:])
        each_s = max(0.0, exact_s - short_s) / max(1, exact - short)
        rest_s = _BUDGET_S / (_REPEATS * 2) - short_s  # half of it is for the long one, half for the two others
        affordable = int(max(0.0, rest_s) / each_s) if each_s > 0 else wanted
        tokens = min(wanted, max(affordable, _LEAST_LONG_BLOCKS * block + block // 2), most)
        return max(tokens, exact + 1) if most > exact else tokens

    async def _ask(self, tokens: int, *, freed: bool = False) -> bool:
        """Sends one; whether there is any use in more."""
        vocabulary = Vocabulary.of(self.decode.vocabulary_tokens or self.decode.tokenizer_tokens or 32000)
        self.say(f"{self.pair}: a canary of {tokens} tokens")
        outcome = await self.canaries.ask(
            self.pair,
            vocabulary.prompt(tokens, len(self.outcomes)),
            limit_s=self.wish.limit_s,
            kv_bytes_expected=None if self.kv is None else self.kv.bytes_of(tokens, with_padding=self.pads),
            freed_within_s=_FREED_WITHIN_S if freed else None,
        )
        self.outcomes.append(outcome)
        return isinstance(outcome.split, Answer)


def _took_s(outcome: Outcome) -> float:
    """Split and colocated together."""
    return sum(one.whole_s for one in (outcome.split, outcome.colocated) if isinstance(one, Answer))


def merged(outcomes: Sequence[Outcome]) -> list[Finding]:
    """One finding of each name: the worst of all canaries', of equal ones the longest prompt's."""
    by_name: dict[str, list[tuple[int, Finding]]] = defaultdict(list)
    for outcome in outcomes:
        for one in findings(outcome):
            by_name[one.name].append((outcome.prompt_tokens, one))
    found = []
    for those in by_name.values():
        level = worst(one for _, one in those)
        tokens, finding = max(((tokens, one) for tokens, one in those if one.level is level), key=lambda pair: pair[0])
        same = sum(one.level is level for _, one in those)
        lengths = sorted({tokens for tokens, one in those if one.level is level} - {tokens})
        said = finding.said
        if level is Level.PASS and lengths:
            said += f" (as of {', '.join(map(str, lengths))} tokens; {same} canaries)"
        elif level is not Level.PASS and len(those) > 1:
            said += f" ({same} of {len(those)} canaries)"
        found.append(Finding(level, finding.name, finding.about, said, finding.mend))
    return found


def measured(
    outcomes: Iterable[Outcome],
) -> tuple[dict[int, list[float]], dict[int, list[float]], dict[int, list[float]]]:
    """Handovers, prefill legs and colocated times to first token by length; what met a cold pair is left out."""
    handovers, prefill, colocated = (defaultdict[int, list[float]](list) for _ in range(3))
    for outcome in list(outcomes)[_COLD:]:
        split, alone, tokens = outcome.split, outcome.colocated, outcome.prompt_tokens
        if isinstance(split, Answer) and split.handover_s is not None and not outcome.recomputed:
            handovers[tokens].append(max(0.0, split.handover_s))
            if split.prefill_s is not None:
                prefill[tokens].append(split.prefill_s)
        if isinstance(alone, Answer) and alone.ttft_s is not None:
            colocated[tokens].append(alone.ttft_s)
    return dict(handovers), dict(prefill), dict(colocated)


_COLD = 4
"""The first canaries of a pair: their times have a handshake, and first uses of a length, in them."""


def _line_facts(model: predict.HandoverModel | None, kv: KvSize | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {
        "fixed_s": model.line.fixed_s,
        "s_per_token": model.line.each_s,
        "gb_per_s": None if kv is None else model.gb_per_s(kv.bytes_per_token),
        "tested_tokens": model.tested_tokens,
        "measured_s": model.measured_s,
        "error_share": model.error_share,
    }


def _outcome_facts(outcome: Outcome) -> dict[str, Any]:
    split, alone = outcome.split, outcome.colocated
    told: dict[str, Any] = {
        "prompt_tokens": outcome.prompt_tokens,
        "verdict": str(outcome.verdict),
        "decode_computed_tokens": outcome.computed_tokens,
        "kv_bytes": outcome.kv_bytes,
        "kv_bytes_expected": outcome.kv_bytes_expected,
        "was_alone": outcome.was_alone,
        "freed_s": outcome.freed_s,
    }
    if isinstance(split, Answer):
        told |= {"prefill_s": split.prefill_s, "handover_s": split.handover_s, "split_ttft_s": split.ttft_s}
    else:
        told["error"] = split.told
    if isinstance(alone, Answer):
        told["colocated_ttft_s"] = alone.ttft_s
    return told
