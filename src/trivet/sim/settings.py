"""How a simulated engine behaves: vLLM's settings as far as they are imitated, and the sim's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trivet.errors import TrivetError

NIXL = "NixlConnector"
TRIVET = "TrivetConnector"
CONNECTORS = (NIXL, TRIVET)
"""The connectors whose hand-overs are imitated."""

FIRST_WORD = 259
"""Ids below are the special tokens (0 to 2) and the 256 bytes; see ``trivet.sim.text``."""
_TIMES = ("step_ms", "prefill_ms", "prefill_ms_per_token", "transfer_ms_per_token", "transfer_last_ms", "kv_lease_s")


@dataclass(frozen=True, slots=True)
class SimEvents:
    """Where KV events are published: vLLM's ``KVEventsConfig`` as far as it is imitated."""

    endpoint: str
    replay_endpoint: str
    buffer_steps: int = 10_000
    """Batches that are kept for who missed them."""

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            if "://" not in getattr(self, name):
                raise TrivetError(
                    f"simulated engine: {name} of KV events is {getattr(self, name)!r}",
                    mend="tcp://*:PORT or ipc:///PATH",
                )
        if self.buffer_steps < 1:
            raise TrivetError(f"simulated engine: buffer_steps is {self.buffer_steps}", mend="it must be at least 1")


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Everything that is set when a simulated engine starts. Without times it answers as fast as it can."""

    model: str = "sim"
    served_names: tuple[str, ...] = ()
    """Names that requests may use; the model's own if there are none."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    api_key: str | None = None
    """What ``/v1`` and ``/inference`` want as a bearer token."""
    vllm_version: str = "0.32.0"
    """The version whose answers are imitated; anything below 0.32 is answered as 0.30 does."""

    max_model_len: int = 131072
    """Longest prompt plus answer, in tokens."""
    block_size: int = 16
    """Tokens in a block of KV."""
    kv_tokens: int = 524288
    """Size of the KV pool in tokens; about what a small model leaves free on a large GPU."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int | None = None
    """Unfinished requests beyond which new ones get 503; None for no limit."""
    max_logprobs: int = 20
    stream_interval: int = 1
    """Tokens in an event of a stream; the first token always goes out at once."""
    enable_prefix_caching: bool = True
    enable_prompt_tokens_details: bool = True
    enable_scale_out: bool = True

    kv_transfer: bool = True
    """Whether ``kv_transfer_params`` mean anything, as with vLLM's ``--kv-transfer-config``."""
    kv_connector: str = NIXL
    """Whose hand-overs are imitated."""
    kv_address: str | None = None
    """TrivetConnector: where it listens, ``unix:`` and a path; one of its own unless given."""
    kv_load_failure_policy: str = "fail"
    """NixlConnector: ``fail`` or ``recompute``, what a decode request does when its KV cannot be pulled."""
    kv_lease_s: float = 30.0
    """How long prefill holds KV that nobody pulls, or says to want."""
    kv_bytes_per_token: int = 131072
    """What a token of KV counts in the metrics: 128 KiB, as Llama-3.1-8B in bfloat16."""
    kv_host: str | None = None
    """The host that decode is told to pull from; the one it listens on unless given."""

    kv_events: SimEvents | None = None
    """Where it tells what its prefix cache holds; None if it does not."""

    step_ms: float = 0.0
    """Every step takes at least so long: one token of every running answer."""
    prefill_ms: float = 0.0
    """Added once for each prompt."""
    prefill_ms_per_token: float = 0.0
    """Added to a step for each prompt token that it computes, so that long prompts delay running answers."""
    transfer_ms_per_token: float = 0.0
    """Time to pull KV from prefill, for each token; steps go on meanwhile. The slower of both ends counts."""
    transfer_last_ms: float = 1.0
    """TrivetConnector: least time from prefill's end until decode has all KV. The rest moves while prefill computes."""
    jitter: float = 0.0
    """Share by which each step's time varies at random, 0 to 1."""
    seed: int = 0
    """Of the jitter."""

    vocab_size: int = 32000
    """Answers are made of ids below it, from 259 on."""
    eos_token_id: int = 2
    eos_chance: float = 0.0
    """Chance that a token is the end of the sequence, 0 to 1; drawn from the sequence itself."""
    keep_requests: int = 1000
    """How many requests ``/sim/state`` remembers."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "kv_tokens", "max_num_seqs", "max_num_batched_tokens"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("stream_interval", self.stream_interval >= 1, "at least 1")
        self._check("kv_tokens", self.kv_tokens >= self.block_size, f"at least a block ({self.block_size})")
        self._check("max_num_queued_reqs", (self.max_num_queued_reqs or 1) >= 1, "at least 1")
        for name in _TIMES:
            value = getattr(self, name)
            self._check(name, math.isfinite(value) and value >= 0, "0 or more")
        for name in ("jitter", "eos_chance"):
            self._check(name, 0 <= getattr(self, name) <= 1, "from 0 to 1")
        self._check("vocab_size", self.vocab_size > FIRST_WORD + 100, f"above {FIRST_WORD + 100}")
        self._check("max_logprobs", self.max_logprobs >= -1, "0 or more, or -1 for the vocabulary")
        self._check("keep_requests", self.keep_requests >= 1, "at least 1")
        self._check("kv_connector", self.kv_connector in CONNECTORS, " or ".join(CONNECTORS))
        policies = ("fail", "recompute")
        self._check("kv_load_failure_policy", self.kv_load_failure_policy in policies, " or ".join(policies))

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise TrivetError(f"simulated engine: {name} is {getattr(self, name)!r}", mend=f"it must be {wanted}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use, the answered one first."""
        return self.served_names or (self.model,)

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self.kv_tokens // self.block_size

    @property
    def longest(self) -> int:
        """Most tokens that one sequence can have: the model's limit, or the whole KV pool if that is smaller."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def is_old(self) -> bool:
        """Whether answers are those of vLLM 0.30."""
        parts = self.vllm_version.split(".")
        return tuple(int(part) for part in parts[:2] if part.isdigit()) < (0, 32)
