"""A decode engine's first step of a handed-over request, on vLLM versions that take it for a prefill.

That step computes one token behind KV that is already there. vLLM 0.30's V2 runner counts the request as prefilling
and so runs the whole batch without its CUDA graph: 34 ms instead of 5 on an H200 with an 8B model, for everybody who
decodes there. Later versions run it as what it is (``prefill_runs_as_decode_np`` in vLLM 0.32's
``v1/worker/gpu/model_runner.py``). This makes 0.30 choose its graph by the same rule; nothing else of the step changes.
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
