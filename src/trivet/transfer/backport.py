"""What of vLLM's own code is changed in a decode engine's processes, each where a version needs it.

**The first step of a handed-over request.** It computes one token behind KV that is already there. vLLM 0.30's V2
runner counts the request as prefilling and so runs the whole batch without its CUDA graph: 34 ms instead of 5 on an
H200 with an 8B model, for everybody who decodes there. Later versions run it as what it is
(``prefill_runs_as_decode_np`` in vLLM 0.32's ``v1/worker/gpu/model_runner.py``). This makes 0.30 choose its graph by
the same rule; nothing else of the step changes.

**Blocks that were given back.** vLLM's scheduler keeps free what requests that load KV will still need, also for one
whose blocks the connector has given back because prefill begins again: all of its prompt's, until it runs. It would be
let in again only where its prompt fits twice, and others would not be meanwhile. A connector has no say in this.

**Images of a request that is thrown out.** vLLM's scheduler gives a model runner no tensors of images whose KV is
there already. When such a request is thrown out to make room, its prompt is computed anew. The V2 runner is told of it
as of a new one. The V1 runner, which serves on CPUs, is not: it encodes what it was given before, which is nothing, and
the engine ends. With KV that is handed over that is every request with images; else it takes one that found them in a
prefix cache. That runner is given all tensors.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.trivet")


def run_first_steps_as_decode() -> bool:
    """Changes the V2 runner of this process, once. Whether that was needed and could be done."""
    try:
        from vllm.v1.worker.gpu import model_runner
    except ImportError:  # no Triton: this process has no V2 runner
        return False
    runner, state = model_runner.GPUModelRunner, model_runner.BatchReqState
    count = getattr(model_runner, "get_uniform_decode_token_count", None)
    known = {"is_prefilling_np", "num_computed_prefill_tokens_np", "num_scheduled_tokens", "has_prefill"}
    fields = set(getattr(state, "_fields", ()) or getattr(state, "__dataclass_fields__", ()))
    if "prefill_runs_as_decode_np" in fields or not known <= fields:
        return False
    if count is None or getattr(runner.gather_batch_req_state, "trivet", False):
        return False
    original = runner.gather_batch_req_state

    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> tuple[Any, int | None]:
        batch, uniform = original(self, scheduler_output, dummy_run)
        if batch is not None and batch.has_prefill and uniform is None and getattr(self, "pcp_manager", None) is None:
            goes_on = (batch.num_scheduled_tokens == 1) & (batch.num_computed_prefill_tokens_np > 0)
            if bool((goes_on | ~batch.is_prefilling_np).all()):
                scheduled = scheduler_output.num_scheduled_tokens
                uniform = count(
                    len(scheduled),
                    scheduler_output.total_num_scheduled_tokens,
                    max(scheduled.values()),
                    has_prefill=False,
                )
        return batch, uniform

    gather_batch_req_state.trivet = True  # type: ignore[attr-defined]
    runner.gather_batch_req_state = gather_batch_req_state
    logger.info("TrivetConnector: first steps of handed-over requests run as decode steps")
    return True


def release_reservations() -> bool:
    """Lets vLLM's scheduler reserve nothing for requests whose blocks were given back. Whether it can be done.

    Those requests (``take_given_back`` of the connector) are taken out of the scheduler's set of prefills in flight
    before it counts what these need; when they get blocks again, vLLM puts them in again.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = getattr(Scheduler, "_inflight_prefill_reserved_blocks", None)
    if original is None:
        logger.warning("TrivetConnector: this vLLM may keep blocks free for requests that gave them back")
        return False
    if getattr(original, "trivet", False):
        return True

    def reserved_blocks(self: Any) -> int:
        if (take := getattr(self.connector, "take_given_back", None)) is not None:
            self._inflight_prefills.difference_update(take())
        return int(original(self))

    reserved_blocks.trivet = True  # type: ignore[attr-defined]
    Scheduler._inflight_prefill_reserved_blocks = reserved_blocks
    return True


def keep_items() -> bool:
    """Lets vLLM's scheduler give its runner all tensors of images and the like. Whether it can be done."""
    from vllm.v1.core.sched import output

    original = getattr(output, "strip_covered_mm_data", None)
    if original is None:
        return False
    if getattr(original, "trivet", False):
        return True

    def strip_covered_mm_data(mm_features: list[Any], *_: Any, **__: Any) -> list[Any]:
        return mm_features

    strip_covered_mm_data.trivet = True  # type: ignore[attr-defined]
    output.strip_covered_mm_data = strip_covered_mm_data
    return True


def overtakes() -> bool:
    """Whether vLLM's scheduler lets requests that hold blocks overtake those that wait for some; see ``room.py``."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return hasattr(Scheduler, "_holds_kv_blocks")
