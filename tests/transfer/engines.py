"""vLLM's own scheduler with TrivetConnector in it, as a decode engine; the workers are played."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from transfer.schedulers import BLOCK, FakePrefill
from transfer.waiting import until
from trivet.transfer.connector import TrivetConnector
from trivet.transfer.messages import Announce, First, Withdraw
from trivet.transfer.plan import Report, StepPlan

LONGEST = 16 * BLOCK
"""--max-model-len."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 50000,
    "max_position_embeddings": LONGEST,
}


@cache
def _model(folder: str) -> ModelConfig:
    Path(folder, "config.json").write_text(json.dumps(_LLAMA))
    return ModelConfig(model=folder, dtype="float32", max_model_len=LONGEST, skip_tokenizer_init=True)


class DecodeEngine:
    """See the module. A step ends when its workers have told what became of it."""

    def __init__(
        self, folder: Path, model: Path, blocks: int, *, window: int | None = None, role: str = "kv_consumer"
    ) -> None:
        """
        Args:
            blocks: what requests may have, beside vLLM's null block.
            window: of a second group of layers, which slides.
        """
        config = VllmConfig(
            model_config=_model(str(model)),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=512, max_model_len=LONGEST, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK, cache_dtype="auto", enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="TrivetConnector",
                kv_connector_module_path="trivet.transfer.connector",
                kv_role=role,
                engine_id="decode",
                kv_load_failure_policy="fail",
                kv_connector_extra_config={"address": f"unix:{folder / 'd'}"},
            ),
        )
        config.cache_config.num_gpu_blocks = blocks + 1
        shape = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], FullAttentionSpec(**shape))]
        if window is not None:
            spec = SlidingWindowSpec(**shape, sliding_window=window)
            groups.append(KVCacheGroupSpec(["model.layers.1.self_attn.attn"], spec))
        caches = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), BLOCK, log_stats=True)
        connector = self.scheduler.connector
        assert isinstance(connector, TrivetConnector)
        assert connector._decode is not None
        self.side = connector._decode
        self.blocks = blocks
        self.address = f"unix:{folder / 'd'}"
        self.lands: Callable[[str], bool] = lambda _: True
        """Whether the KV of a request has arrived."""
        self.ended: dict[str, str] = {}
        """Why, by request."""
        self.tokens: dict[str, list[int]] = {}
        self.scheduled: dict[str, int] = {}
        """Of the last step."""
        self._attempts: dict[str, int] = {}
        self._stopped: set[str] = set()

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name: str, tokens: int, params: Any = None, *, salt: int = 0, **sampling: Any) -> Request:
        """A request comes. Those of one ``salt`` have a prompt in common."""
        extra = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        request = Request(
            name,
            [1000 + 100 * salt + one % 100 for one in range(tokens)],
            SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **sampling}, **extra),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def receive(self, prefill: FakePrefill, name: str, tokens: int, *, first: bool = True, **kind: Any) -> Request:
        """A request comes whose KV is to come from prefill, in a transfer of its name."""
        request = self._ask(prefill, name, tokens, first=first, **kind)
        prefill.opened(name)
        return request

    def _ask(self, prefill: FakePrefill, name: str, tokens: int, *, first: bool, **kind: Any) -> Request:
        params = {"do_remote_prefill": True, "transfer_id": name, "first_token": first}
        return self.add(name, tokens, {**params, "prefill_address": prefill.address}, **kind)

    def step(self) -> StepPlan:
        """One step. Whoever has its whole prompt makes a token, 7."""
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        self.scheduled = dict(output.num_scheduled_tokens)
        for one in plan.forget:
            self._attempts.pop(one, None)
            self._stopped.discard(one)
        for receive in plan.receives:
            self._attempts[receive.request_id] = receive.attempt
            self._stopped.discard(receive.request_id)
        self._stopped.update(one for one, attempt in plan.given_up if self._attempts.get(one) == attempt)
        report = Report(attempts=dict(self._attempts))
        for one in self._attempts:
            if one in self._stopped:
                report.stopped[one], report.reasons[one] = 1, "given up"
            elif self.lands(one):
                report.landed[one] = 1
        names = list(self.scheduled)
        made = []
        for one in names:
            request = self.scheduler.requests[one]
            made.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        said = KVConnectorOutput(kv_connector_worker_meta=report)
        said.finished_recving = said.failed_recving = set(plan.failed)
        results = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={one: index for index, one in enumerate(names)},
            sampled_token_ids=made,
            kv_connector_output=said,
        )
        for outputs in self.scheduler.update_from_output(output, results).values():
            for one in outputs.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = str(one.finish_reason)
        return plan

    def steps_until(self, look: Callable[[], Any], what: str) -> None:
        """Steps until something is so."""

        def stepped() -> Any:
            self.step()
            return look()

        until(stepped, what)

    def heard(self, name: str, look: Callable[[Any], Any]) -> None:
        """Waits until the link's thread has heard something of a transfer, unless that has ended."""
        until(lambda: (one := self.side._incoming.get(name)) is None or look(one), f"word of {name}")

    def hand_over(self, prefill: FakePrefill, name: str, tokens: int, **kind: Any) -> Request:
        """A request comes that prefill is done with already. What decode says of it is not looked at."""
        request = self._ask(prefill, name, tokens, first=True, **kind)
        self.announce(prefill, name)
        self.first(prefill, name)
        return request

    def steps_beside(self, add: Callable[[str], Any], name: str, steps: int) -> None:
        """Steps until a request ends, while ``add`` sees to it that two others run and one waits behind it."""
        for number in range(steps):
            for other in range(3 - sum(one != name for one in self.scheduler.requests)):
                add(f"later-{number}-{other}")
            self.step()
            if name in self.ended:
                return
        raise AssertionError(f"{name} did not end in {steps} steps; {len(self.ended)} others did")

    def announce(self, prefill: FakePrefill, name: str) -> None:
        """Prefill schedules the prompt's first chunk."""
        prefill.link.send(Announce(name))
        self.heard(name, lambda one: one.announced)

    def withdraw(self, prefill: FakePrefill, name: str) -> None:
        """Prefill preempts the prompt."""
        prefill.link.send(Withdraw(name))
        self.heard(name, lambda one: not one.announced)

    def first(self, prefill: FakePrefill, name: str, token: int | None = 7) -> None:
        """Prefill is done."""
        prefill.link.send(First(name, token))
        self.heard(name, lambda one: one.token_known)

    def is_idle(self) -> bool:
        """Whether nothing is held and nothing reserved."""
        scheduler = self.scheduler
        return (
            not scheduler.requests
            and not scheduler._inflight_prefills
            and self.free == self.blocks
            and not self.side._incoming
            and not self.side._given_back
            and not self.side._room._kept
        )

    def close(self) -> None:
        """Ends it."""
        self.scheduler.shutdown()
