"""Whether two engines can hand over to each other: their facts compared, a finding for each thing that must agree.

vLLM compares a part of it when the engines first meet, and says so in decode's log, while both report themselves
healthy; the rest nobody compares, and wrong tokens come of it. ``Connector.likeness`` says how far a connector lets
the two differ.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trivet.check.told import TELL, EngineFacts
from trivet.check.verdict import Finding, failed, passed, warned
from trivet.connectors import CONNECTORS
from trivet.connectors.base import Likeness

NAMES = (
    "vllm-version",
    "connector",
    "roles",
    "block-size",
    "dtype",
    "kv-dtype",
    "tensor-parallel",
    "pipeline-parallel",
    "kv-layout",
    "model",
    "speculative",
    "hash-seed",
    "prefix-caching",
    "max-length",
    "load-failure-policy",
    "tokenizer",
)
"""Of the findings, in their order."""

_OTHER = Likeness(refused="its connector may refuse it, or copy bytes that mean something else")
_LAYOUTS = {"NHD": "LBNHC", "HND": "LBHNC"}
"""vLLM's older names of layouts (``v1/kv_cache_layout.py``)."""
_NIXL_PULL = ("NixlConnector", "NixlPullConnector")
"""One connector under two names (``nixl/connector.py``)."""
_SPECULATE_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods that draft from the text, and keep nothing in the KV cache."""
_RANDOM_SEED = ("xxhash", "xxhash_cbor")
"""Hashes whose seed vLLM draws for each process unless ``PYTHONHASHSEED`` is set (``v1/core/kv_cache_utils.py``)."""


def compatible(
    prefill: EngineFacts, decode: EngineFacts, connector: str, about: str = "prefill -> decode"
) -> list[Finding]:
    """Compares the two engines of a pair.

    Args:
        connector: vLLM's name of what the pair is to hand over by.
        about: the pair, ``prefill-0 -> decode-0``; findings call the engines so.
    """
    names = about.split(" -> ")
    pair = _Pair(prefill, decode, connector, about, names[0], names[-1])
    return [check(pair) for check in _CHECKS]


@dataclass(frozen=True, slots=True)
class _Pair:
    prefill: EngineFacts
    decode: EngineFacts
    connector: str
    about: str
    prefill_name: str
    decode_name: str

    @property
    def likeness(self) -> Likeness:
        return CONNECTORS[self.connector].likeness if self.connector in CONNECTORS else _OTHER

    def both(self, fact: str) -> tuple[Any, Any]:
        return getattr(self.prefill, fact), getattr(self.decode, fact)

    def told(self, *facts: str) -> bool:
        return all(value is not None for fact in facts for value in self.both(fact))

    def differ(self, what: str, prefill: object, decode: object) -> str:
        return f"{what} differs: {prefill} on {self.prefill_name}, {decode} on {self.decode_name}"

    def passed(self, name: str, said: str) -> Finding:
        return passed(name, self.about, said)

    def warned(self, name: str, said: str, mend: str) -> Finding:
        return warned(name, self.about, said, mend)

    def failed(self, name: str, said: str, mend: str) -> Finding:
        return failed(name, self.about, said, mend)

    def refused(self, name: str, said: str, mend: str) -> Finding:
        """Differs in what somebody compares."""
        return failed(name, self.about, f"{said}; {self.likeness.refused}", mend)

    def unknown(self, name: str, what: str, *facts: str) -> Finding:
        """Not told by one of them, or by both."""
        silent = {
            engine: one.whole
            for engine, one in ((self.prefill_name, self.prefill), (self.decode_name, self.decode))
            if any(getattr(one, fact) is None for fact in facts)
        }
        who = " and ".join(silent)
        mute = [engine for engine, whole in silent.items() if not whole]
        mend = f"start {' and '.join(mute)} with {TELL}, or see the canaries" if mute else "see the canaries"
        return warned(name, self.about, f"{what}: not told by {who}", mend)

    def same(self, name: str, what: str, fact: str, mend: Callable[[Any], str]) -> Finding:
        """What must be the same on both and is compared by somebody.

        Args:
            mend: from prefill's value.
        """
        if not self.told(fact):
            return self.unknown(name, what, fact)
        here, there = self.both(fact)
        if here != there:
            return self.refused(name, self.differ(what, here, there), mend(here))
        return self.passed(name, f"{what} {here} on both")


def _version(pair: _Pair) -> Finding:
    finding = pair.same("vllm-version", "vLLM", "vllm", lambda version: f"install vllm=={version} for both")
    here, there = pair.both("trivet")
    if pair.connector == "TrivetConnector" and here and there and here != there:
        return pair.warned(
            "vllm-version",
            f"{pair.differ('Trivet', here, there)}; TrivetConnector refuses pairs whose protocols differ",
            f"install trivet=={here} for both",
        )
    return finding


def _connector(pair: _Pair) -> Finding:
    for engine, facts, role in _ends(pair):
        if facts.connector is None:
            continue
        if pair.connector not in _connectors_of(facts):
            config = {"kv_connector": pair.connector, "kv_role": role}
            if pair.connector == "TrivetConnector":
                config["kv_connector_module_path"] = "trivet.transfer.connector"
            said = f"{engine} has {facts.connector}" if facts.connector else f"{engine} has no connector"
            return pair.failed(
                "connector",
                f"{said}, and the pair is to hand over by {pair.connector}: nothing would move",
                f"start {engine} with --kv-transfer-config {shlex.quote(json.dumps(config))}",
            )
    if not pair.told("connector"):
        return pair.unknown("connector", "the connector", "connector")
    return pair.passed("connector", f"{pair.connector} on both")


def _ends(pair: _Pair) -> Iterable[tuple[str, EngineFacts, str]]:
    yield pair.prefill_name, pair.prefill, "kv_producer"
    yield pair.decode_name, pair.decode, "kv_consumer"


def _connectors_of(facts: EngineFacts) -> set[str]:
    """Its own, or those that a MultiConnector has."""
    names = {facts.connector or ""}
    children = (facts.connector_options or {}).get("connectors")
    if facts.connector == "MultiConnector" and isinstance(children, list | tuple):
        names |= {str(one.get("kv_connector")) for one in children if isinstance(one, dict)}
    return names | set(_NIXL_PULL) if names & set(_NIXL_PULL) else names


def _roles(pair: _Pair) -> Finding:
    for engine, facts, role in _ends(pair):
        if facts.kv_role in (None, "", role, "kv_both"):
            continue
        said, mend = f"{engine} is {facts.kv_role}", f'"kv_role": "{role}" in --kv-transfer-config of {engine}'
        if pair.likeness.roles_decide:
            return pair.failed("roles", f"{said}, and this side must be {role}: nothing would move", mend)
        return pair.warned("roles", f"{said}; {pair.connector} moves KV either way, other parts of vLLM go by it", mend)
    if not pair.told("kv_role"):
        return pair.unknown("roles", "kv_role", "kv_role")
    if "" in pair.both("kv_role"):
        return pair.warned("roles", "an engine has no kv_role, as it has no connector", "see connector")
    return pair.passed("roles", " -> ".join(pair.both("kv_role")))


def _block_size(pair: _Pair) -> Finding:
    if not pair.told("block_tokens"):
        return pair.unknown("block-size", "tokens of a block", "block_tokens")
    here, there = pair.both("block_tokens")
    mend = f"start both with --block-size {max(here, there)}"
    if here == there:
        return pair.passed("block-size", f"{here} tokens a block on both")
    said = pair.differ("block size", here, there)
    if not pair.likeness.larger_decode_blocks:
        return pair.refused("block-size", said, mend)
    if there % here:
        # it compares the blocks of the attention kernels: some have a size of their own, and take a block as several
        kernels = f"{pair.likeness.refused}, unless the attention backend cuts both into blocks of one size"
        return pair.failed("block-size", f"{said}, and decode's is not a multiple of prefill's; {kernels}", mend)
    if pair.decode.kv_buffer_device == "cpu" and pair.decode.device not in (None, "cpu"):
        return pair.refused("block-size", f"{said}, and decode receives in host memory (kv_buffer_device: cpu)", mend)
    ranks = pair.both("tensor_parallel")
    if None not in ranks and ranks[0] > ranks[1]:
        return pair.refused("block-size", f"{said}, and prefill has more tensor-parallel ranks", mend)
    return pair.warned(
        "block-size",
        f"{said}; {pair.connector} puts {there // here} blocks together for each of decode's, which takes decode time "
        "after each transfer",
        mend,
    )


def _dtype(pair: _Pair) -> Finding:
    return pair.same("dtype", "dtype", "dtype", lambda dtype: f"start both with --dtype {dtype}")


def _kv_dtype(pair: _Pair) -> Finding:
    here, there = pair.both("kv_dtype")
    if not pair.told("kv_dtype") or (here != there and "auto" in (here, there) and not {"fp8"} & {here[:3], there[:3]}):
        return pair.unknown("kv-dtype", "dtype of the KV cache", "kv_dtype", "dtype")
    if here != there:
        return pair.refused(
            "kv-dtype", pair.differ("dtype of the KV cache", here, there), f"start both with --kv-cache-dtype {here}"
        )
    flags = pair.both("kv_dtype_flag")
    if pair.connector in _NIXL_PULL and None not in flags and flags[0] != flags[1]:
        return pair.refused(  # the hash has the text
            "kv-dtype",
            f"{pair.differ('--kv-cache-dtype', *flags)}, which both come to {here}",
            f"start both with --kv-cache-dtype {flags[0]}",
        )
    return pair.passed("kv-dtype", f"KV cache in {here} on both")


def _tensor_parallel(pair: _Pair) -> Finding:
    name, what = "tensor-parallel", "tensor-parallel ranks"
    if not pair.told("tensor_parallel"):
        return pair.unknown(name, what, "tensor_parallel")
    here, there = pair.both("tensor_parallel")
    contexts = [max(one.decode_context_parallel or 1, 1) for one in (pair.prefill, pair.decode)]
    if max(contexts) > 1:
        if not pair.likeness.other_ranks or max(contexts) % min(contexts):
            return pair.refused(
                name,
                pair.differ("--decode-context-parallel-size", *contexts)
                if contexts[0] != contexts[1]
                else f"--decode-context-parallel-size is {contexts[0]}",
                "start both without --decode-context-parallel-size",
            )
        if contexts[0] != contexts[1] and pair.prefill.has_state_layers:
            return pair.refused(
                name,
                f"{pair.differ('--decode-context-parallel-size', *contexts)}, and the model has state layers",
                f"start both with --decode-context-parallel-size {contexts[0]}",
            )
    if here == there:
        return pair.passed(name, f"{here} rank{'s'[: here != 1]} on both")
    said, mend = pair.differ(what, here, there), f"start both with --tensor-parallel-size {here}"
    if not pair.likeness.other_ranks or max(here, there) % min(here, there):
        return pair.refused(name, said, mend)
    heads = pair.prefill.kv_heads
    in_parts = pair.prefill.is_mla is False and pair.prefill.has_state_layers is False
    if here > there and in_parts and heads is not None and here > heads:
        return pair.refused(name, f"{said}, and the model has {heads} KV heads, fewer than prefill has ranks", mend)
    layouts = {_layout(one) for one in (pair.prefill, pair.decode)} - {None, "LBHNC", "BLHNC"}
    if in_parts and layouts and (heads is None or here <= heads):
        return pair.refused(
            name,
            f"{said}, which takes heads that lie together, and the KV layout is {layouts.pop()}",
            "start both with VLLM_KV_CACHE_LAYOUT=LBHNC, or with the same --tensor-parallel-size",
        )
    return pair.passed(
        name, f"{here} on {pair.prefill_name}, {there} on {pair.decode_name}; {pair.connector} fits them"
    )


def _pipeline_parallel(pair: _Pair) -> Finding:
    name = "pipeline-parallel"
    if not pair.told("pipeline_parallel"):
        return pair.unknown(name, "pipeline stages", "pipeline_parallel")
    if set(pair.both("pipeline_parallel")) != {1}:
        here, there = pair.both("pipeline_parallel")
        return pair.refused(
            name,
            f"{here} pipeline stages on {pair.prefill_name}, {there} on {pair.decode_name}, and {pair.connector} "
            "moves one stage's KV",
            "start both with --pipeline-parallel-size 1 (more --tensor-parallel-size instead)",
        )
    if CONNECTORS.get(pair.connector, None) is not None and CONNECTORS[pair.connector].rank_to_rank:
        for engine, facts, _ in _ends(pair):
            if (facts.data_parallel or 1) > 1:
                return pair.refused(
                    name,
                    f"{engine} has {facts.data_parallel} data-parallel ranks",
                    f"start {engine} with --data-parallel-size 1, and further engines beside it",
                )
    return pair.passed(name, "one stage on both")


def _layout(facts: EngineFacts) -> str | None:
    return None if facts.kv_layout is None else _LAYOUTS.get(facts.kv_layout, facts.kv_layout)


def _kv_layout(pair: _Pair) -> Finding:
    name = "kv-layout"
    for what, fact, mend in (
        ("device", "device", "start both on the same kind of device"),
        ("attention backend", "attention_backend", "start both with --attention-backend {}"),
        ("hybrid KV cache manager", "hybrid_manager", "start both with, or both without, "
         "--disable-hybrid-kv-cache-manager"),
    ):  # fmt: skip
        here, there = pair.both(fact)
        if None not in (here, there) and here != there:
            return pair.refused(name, pair.differ(what, here, there), mend.format(here))
    layouts = _layout(pair.prefill), _layout(pair.decode)
    if None not in layouts:
        if layouts[0] == layouts[1]:
            return pair.passed(name, f"{layouts[0]} on both")
        if pair.prefill.is_mla and pair.connector in _NIXL_PULL:
            return pair.passed(name, "differs, and with MLA has no meaning")
        if pair.decode.permutes_kv and layouts == ("LBHNC", "LBNHC") and pair.connector in _NIXL_PULL:
            return pair.warned(
                name,
                f"{pair.differ('KV layout', *layouts)}; decode turns each block around (enable_permute_local_kv)",
                f"start both with VLLM_KV_CACHE_LAYOUT={layouts[0]}",
            )
        return pair.refused(
            name, pair.differ("KV layout", *layouts), f"start both with VLLM_KV_CACHE_LAYOUT={layouts[0]}"
        )
    if not (pair.prefill.whole and pair.decode.whole):
        return pair.unknown(name, "KV layout", "kv_layout")
    gpus = [sorted({str(one.get("name")) for one in facts.gpus or ()}) for facts in (pair.prefill, pair.decode)]
    if gpus[0] != gpus[1]:
        return pair.warned(
            name,
            f"{pair.differ('GPU', ', '.join(gpus[0]), ', '.join(gpus[1]))}: vLLM may choose another attention backend, "
            "and with it another layout",
            "start both with the same --attention-backend",
        )
    if layouts != (None, None) and "LBHNC" not in layouts:
        return pair.warned(
            name,
            f"{pair.differ('VLLM_KV_CACHE_LAYOUT', *(one or '(vLLM chooses)' for one in layouts))}",
            f"start both with VLLM_KV_CACHE_LAYOUT={layouts[0] or layouts[1]}",
        )
    return pair.passed(name, "vLLM chooses it alike on both, from connector and attention backend")


def _model(pair: _Pair) -> Finding:
    name, one_model = "model", f"start both with --model {pair.prefill.model}"
    names = tuple(None if one is None else one.rstrip("/") for one in pair.both("model"))
    if None not in names and names[0] != names[1]:
        return pair.refused(name, f"{pair.differ('--model', *names)}, be it one checkpoint under two names", one_model)
    seen_by_nobody = "no handshake looks at it, and tokens would be wrong"
    for what, fact, mend in (
        ("config.json", "config_digest", "give both the same files"),
        ("the checkpoint's weights", "weights_digest", "give both the same files"),
        ("--hf-overrides", "overrides_digest", "start both with the same --hf-overrides"),
        ("--quantization", "quantization", "start both with the same --quantization"),
    ):
        here, there = pair.both(fact)
        if None not in (here, there) and here != there:
            return pair.failed(
                name, f"{pair.differ(what, here or '(none)', there or '(none)')}; {seen_by_nobody}", mend
            )
    here, there = pair.both("revision")
    if (
        None not in (here, there)
        and here != there
        and not (pair.told("weights_digest") and pair.connector in _NIXL_PULL)
    ):
        return pair.failed(
            name,
            pair.differ("--revision", here or "(the newest)", there or "(the newest)"),
            "start both with the same --revision",
        )
    if not pair.told("model"):
        return pair.unknown(name, "the model", "model")
    for engine, facts, _ in _ends(pair):
        if facts.load_format == "dummy":
            return pair.warned(
                name,
                f"{engine} has random weights (--load-format dummy): right tokens prove nothing of its KV",
                f"start {engine} with the checkpoint's weights",
            )
    if not pair.told("config_digest", "weights_digest"):
        return pair.unknown(name, f"--model is {names[0]} on both; which weights", "config_digest", "weights_digest")
    return pair.passed(name, f"{names[0]}, the same weights on both")


def _speculative(pair: _Pair) -> Finding:
    name = "speculative"
    if not pair.told("speculative"):
        return pair.unknown(name, "speculative decoding", "speculative")
    here, there = (_speculation(one) for one in pair.both("speculative"))
    if not pair.likeness.speculates and (here or there):
        return pair.failed(
            name,
            f"{pair.connector} does not hand over to engines that speculate, and they do not start with it",
            "start both without --speculative-config",
        )
    keep_kv = [bool(one) and one.get("method") not in _SPECULATE_WITHOUT_KV for one in (here, there)]
    told = [_short(one) for one in (here, there)]
    if any(keep_kv):
        if {**here, "tokens": None} != {**there, "tokens": None}:
            return pair.refused(
                name,
                f"{pair.differ('speculative decoding', *told)}; the draft's KV is a part of what is handed over",
                "start both with the same --speculative-config",
            )
        return pair.passed(name, f"{told[0]} on both")
    if here == there:
        return pair.passed(name, f"{told[0]} on both")
    return pair.passed(name, f"{told[0]} on {pair.prefill_name}, {told[1]} on {pair.decode_name}: keeps no KV")


def _speculation(told: str) -> dict[str, Any]:
    try:
        value = json.loads(told) if told else {}
    except ValueError:
        return {"method": told}
    return value if isinstance(value, dict) else {"method": told}


def _short(speculation: dict[str, Any]) -> str:
    return " ".join(str(one) for one in speculation.values()) or "none"


def _hash_seed(pair: _Pair) -> Finding:
    name = "hash-seed"
    by_hash = pair.connector in CONNECTORS and CONNECTORS[pair.connector].addressed_by_hash
    if pair.connector in CONNECTORS and not by_hash:
        return pair.passed(name, f"{pair.connector} finds blocks by their numbers, not by hashes")
    if not pair.told("hash_algorithm", "hash_seed"):
        return pair.unknown(name, "how blocks are hashed", "hash_algorithm", "hash_seed")
    unseen = "no handshake looks at it, and decode would find nothing"
    here, there = pair.both("hash_algorithm")
    if here != there:
        said = pair.differ("--prefix-caching-hash-algo", here, there)
        return pair.failed(name, f"{said}; {unseen}", f"start both with --prefix-caching-hash-algo {here}")
    seeds = pair.both("hash_seed")
    if seeds[0] != seeds[1] or (not seeds[0] and here in _RANDOM_SEED):
        said = pair.differ("PYTHONHASHSEED", *(one or "(not set)" for one in seeds))
        return pair.failed(name, f"{said}; {unseen}", f"start both with PYTHONHASHSEED={seeds[0] or seeds[1] or 0}")
    return pair.passed(name, f"{here} with one seed on both")


def _prefix_caching(pair: _Pair) -> Finding:
    name = "prefix-caching"
    if not pair.told("prefix_caching"):
        return pair.unknown(name, "prefix caching", "prefix_caching")
    here, there = pair.both("prefix_caching")
    if here == there:
        return pair.passed(name, "on, on both" if here else "off on both")
    off = pair.decode_name if here else pair.prefill_name
    cost = "takes the whole prompt's KV again each turn" if here else "computes the whole prompt again each turn"
    return pair.warned(name, f"off on {off} only: it {cost}", f"start {off} with --enable-prefix-caching")


def _max_length(pair: _Pair) -> Finding:
    name = "max-length"
    if not pair.told("max_length_tokens"):
        return pair.unknown(name, "greatest length", "max_length_tokens")
    here, there = pair.both("max_length_tokens")
    mend = f"start both with --max-model-len {min(here, there)}"
    if here == there:
        return pair.passed(name, f"{here} tokens on both")
    said = pair.differ("--max-model-len", here, there)
    if there < here:
        return pair.failed(name, f"{said}: decode refuses what prefill has computed", mend)
    return pair.warned(name, f"{said}: prefill refuses prompts that decode would take", mend)


def _load_failure_policy(pair: _Pair) -> Finding:
    name, policy = "load-failure-policy", pair.decode.load_failure_policy
    if policy is None:
        silent = pair.decode_name
        mend = "see the canaries" if pair.decode.whole else f"start {silent} with {TELL}, or see the canaries"
        return pair.warned(name, f"kv_load_failure_policy: not told by {silent}", mend)
    if policy == "recompute":
        return pair.warned(
            name,
            f"{pair.decode_name} computes a prompt again when its KV does not come, and nobody is told: a broken link "
            "looks like a slow one",
            f'"kv_load_failure_policy": "fail" in --kv-transfer-config of {pair.decode_name}',
        )
    if not policy:
        return pair.warned(name, f"{pair.decode_name} has no connector", "see connector")
    return pair.passed(name, f"{pair.decode_name} reports KV that does not come ({policy})")


def _tokenizer(pair: _Pair) -> Finding:
    name = "tokenizer"
    if not pair.told("tokenizer_tokens"):
        return pair.unknown(name, "the tokenizer's vocabulary", "tokenizer_tokens")
    here, there = pair.both("tokenizer_tokens")
    if here != there:
        return pair.failed(
            name,
            f"{pair.differ('the size of the vocabulary', here, there)}; no handshake looks at it",
            f"start both with --tokenizer {pair.prefill.tokenizer or pair.prefill.model}",
        )
    return pair.passed(name, f"{here} entries on both")


_CHECKS: tuple[Callable[[_Pair], Finding], ...] = (
    _version,
    _connector,
    _roles,
    _block_size,
    _dtype,
    _kv_dtype,
    _tensor_parallel,
    _pipeline_parallel,
    _kv_layout,
    _model,
    _speculative,
    _hash_seed,
    _prefix_caching,
    _max_length,
    _load_failure_policy,
    _tokenizer,
)
