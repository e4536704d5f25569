"""The class that vLLM loads (``kv_connector: TrivetConnector``, its module path that of this module).

Each of vLLM's hooks is passed on to one of four parts; see the package. Hooks and their order: vLLM 0.30 to 0.32,
``distributed/kv_transfer/kv_connector/v1/base.py``, ``v1/core/sched/scheduler.py`` and both model runners.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from trivet.transfer.backport import keep_items, overtakes, release_reservations, run_first_steps_as_decode
from trivet.transfer.decode import DecodeSide
from trivet.transfer.identity import identity, refusal
from trivet.transfer.pages import Pages
from trivet.transfer.plan import StepPlan
from trivet.transfer.prefill import PrefillSide
from trivet.transfer.receiver import Receiver
from trivet.transfer.sender import Sender
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts, TransferMetrics, TransferStats
from trivet.transfer.trace import Trace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TrivetConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV while prefill computes. ``kv_role`` says which sides an engine has: ``kv_both`` has both."""

    prefer_cross_layer_blocks = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """
        Raises:
            ValueError: the engine is asked for what this connector does not move, in one line.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._caches = vllm_config, kv_cache_config
        transfer = vllm_config.kv_transfer_config
        if (why := refusal(vllm_config, kv_cache_config)) is not None:
            raise ValueError(f"TrivetConnector does not move KV with {why}")
        if transfer.kv_load_failure_policy != "fail":
            raise ValueError(
                "TrivetConnector recomputes by itself what did not come; kv_load_failure_policy must stay 'fail', "
                "which it uses for what cannot be recomputed"
            )
        self._engine_id = f"{transfer.engine_id}"
        self._settings = Settings.of(transfer.kv_connector_extra_config, self._engine_id)
        self._sends = transfer.kv_role in ("kv_producer", "kv_both")
        self._receives = transfer.kv_role in ("kv_consumer", "kv_both")
        self._counts = Counts()
        self._prefill: PrefillSide | None = None
        self._decode: DecodeSide | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._sender_of: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self._make_scheduler_side()

    def _make_scheduler_side(self) -> None:
        own = identity(self._config, self._caches)
        generation = f"{self._engine_id}-{uuid.uuid4().hex[:8]}"
        ranks = self._config.parallel_config.world_size
        trace = Trace(f"{self._name()} scheduler")
        if not self._config.use_v2_model_runner:
            keep_items()
        if self._sends:
            paths = [f"{self._settings.path}.{rank}" for rank in range(ranks)]
            self._prefill = PrefillSide(self._settings, generation, own, paths, self._counts, trace)
        if self._receives:
            release_reservations()
            self._decode = DecodeSide(
                self._settings,
                generation,
                own,
                ranks=ranks,
                block_tokens=[group.kv_cache_spec.block_size for group in self._caches.kv_cache_groups],
                windows=[window_of(group.kv_cache_spec) for group in self._caches.kv_cache_groups],
                max_model_len=self._config.model_config.max_model_len,
                carries_output=bool(self._config.use_v2_model_runner),
                overtaken=overtakes(),
                counts=self._counts,
                trace=trace,
            )

    def _name(self) -> str:
        return f"{self._config.kv_transfer_config.kv_role} {Path(self._settings.path).stem}"

    # --- scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See ``KVConnectorBase_V1``."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._decode is not None:
            self._decode.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """See ``KVConnectorBase_V1``."""
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            # Some of vLLM's routes take anything here (``vllm_xargs``), and its scheduler reads it behind this hook.
            request.kv_transfer_params = None
            return
        if self._prefill is not None:
            self._prefill.on_new_request(request, params)
        if self._decode is not None:
            self._decode.on_new_request(request, params)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See ``KVConnectorBase_V1``."""
        return self._decode.matched(request, num_computed_tokens) if self._decode is not None else (0, False)

    def take_given_back(self) -> set[Request]:
        """Requests that hold no blocks any more though vLLM counts them, each once; see ``backport.py``."""
        return self._decode.take_given_back() if self._decode is not None else set()

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See ``KVConnectorBase_V1``."""
        if self._decode is not None:
            self._decode.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See ``KVConnectorBase_V1``."""
        plan = self._prefill.plan(scheduler_output) if self._prefill is not None else StepPlan()
        if self._decode is not None:
            other = self._decode.plan()
            plan = replace(
                plan, receives=other.receives, given_up=other.given_up, failed=other.failed, forget=other.forget
            )
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See ``KVConnectorBase_V1``."""
        if self._prefill is not None and connector_output.finished_sending:
            self._prefill.freed(connector_output.finished_sending)
        if self._decode is not None:
            self._decode.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``KVConnectorBase_V1``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``SupportsHMA``."""
        if self._decode is not None:
            self._decode.request_finished(request)
        return self._prefill.request_finished(request) if self._prefill is not None else (False, None)

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See ``KVConnectorBase_V1``."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        pages = Pages.of(kv_caches, self._caches)
        trace = Trace(f"{self._name()} rank {rank}")
        if self._sends:
            self._sender = Sender(pages, self._settings, f"{self._settings.path}.{rank}", self._counts, trace)
        if self._receives:
            if self._config.use_v2_model_runner:
                run_first_steps_as_decode()
            self._receiver = Receiver(pages, self._settings, self._engine_id, rank, self._counts, trace)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See ``KVConnectorBase_V1``: before a step's computation, in every runner."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepPlan)
        if self._sender is not None:
            self._sender.begin(connector_metadata)
        if self._receiver is not None:
            self._receiver.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """See ``KVConnectorBase_V1``."""
        if self._receiver is not None:
            self._receiver.start(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests whose KV is not there are not in a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """See ``KVConnectorBase_V1``."""
        if self._sender is not None:
            self._sender.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """See ``KVConnectorBase_V1``; nothing is waited for."""
        if self._sender is not None:
            self._sender.step_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """See ``KVConnectorBase_V1``. What has landed goes by ``build_connector_worker_meta``: it may have to wait."""
        sent = self._sender.take_sent() if self._sender is not None else set()
        failed = self._receiver.take_failed() if self._receiver is not None else set()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=set(failed), failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See ``KVConnectorBase_V1``."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See ``KVConnectorBase_V1``."""
        return self._receiver.report() if self._receiver is not None else None

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # --- both

    def get_kv_connector_stats(self) -> TransferStats | None:
        """See ``KVConnectorBase_V1``."""
        return self._counts.take()

    def shutdown(self) -> None:
        """See ``KVConnectorBase_V1``."""
        for one in (self._prefill, self._decode, self._sender, self._receiver):
            if one is not None:
                one.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        """No: layers that no hook saw are sent when the step is over."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """See ``KVConnectorBase_V1``."""
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        """See ``KVConnectorBase_V1``."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def window_of(spec: Any) -> int | None:
    """Tokens of a sliding window outside which vLLM keeps no blocks; None where it keeps all."""
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    if all(one.__name__ != "SlidingWindowSpec" for one in type(spec).__mro__):
        return None
    return int(spec.sliding_window)
