import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from trivet.transfer.backport import keep_items, release_reservations, run_first_steps_as_decode

NAME = "vllm.v1.worker.gpu.model_runner"


class Batch030(NamedTuple):
    """``BatchReqState`` of vLLM 0.30, as far as it is used."""

    is_prefilling_np: np.ndarray
    num_computed_prefill_tokens_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    has_prefill: bool


@dataclass
class Batch032:
    """That of vLLM 0.32."""

    is_prefilling_np: np.ndarray
    num_computed_prefill_tokens_np: np.ndarray
    num_scheduled_tokens: np.ndarray
    has_prefill: bool
    prefill_runs_as_decode_np: np.ndarray


def count_030(num_reqs, num_tokens, max_query_len, has_prefill):
    if not has_prefill and max_query_len == num_tokens // num_reqs and num_tokens == max_query_len * num_reqs:
        return max_query_len
    return None


class Runner:
    """A runner whose batch a test chooses."""

    def __init__(self, batch, uniform=None, **more):
        self.batch, self.uniform = batch, uniform
        vars(self).update(more)

    def gather_batch_req_state(self, scheduler_output, dummy_run):
        return self.batch, self.uniform


@pytest.fixture
def runner():
    """A runner's class of its own for each test."""
    return type("GPUModelRunner", (Runner,), {"gather_batch_req_state": Runner.gather_batch_req_state})


def loaded(monkeypatch, **names):
    module = ModuleType(NAME)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, NAME, module)
    package = sys.modules.get("vllm.v1.worker.gpu") or ModuleType("vllm.v1.worker.gpu")
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu", package)
    monkeypatch.setattr(package, "model_runner", module, raising=False)


@pytest.fixture
def on_030(monkeypatch, runner):
    loaded(monkeypatch, GPUModelRunner=runner, BatchReqState=Batch030, get_uniform_decode_token_count=count_030)
    assert run_first_steps_as_decode()
    return runner


def batch(*requests, kind=Batch030):
    """Requests as (prefilling, computed tokens, scheduled tokens)."""
    prefilling, computed, scheduled = (np.array(column) for column in zip(*requests, strict=True))
    return kind(prefilling.astype(bool), computed, scheduled, bool(prefilling.any()))


def output(*scheduled):
    return SimpleNamespace(
        num_scheduled_tokens={str(index): tokens for index, tokens in enumerate(scheduled)},
        total_num_scheduled_tokens=sum(scheduled),
    )


def uniform(runner, *requests, **more):
    own = runner(batch(*requests), **more)
    found, tokens = own.gather_batch_req_state(output(*(one[2] for one in requests)), False)
    assert found is own.batch
    return tokens


HANDED_OVER, DECODES, BEGINS, GOES_ON = (True, 40, 1), (False, 41, 1), (True, 0, 1), (True, 16, 16)


@pytest.mark.parametrize("requests", [[HANDED_OVER], [HANDED_OVER, DECODES], [DECODES, HANDED_OVER, HANDED_OVER]])
def test_first_steps_of_handed_over_requests_are_decode_steps(on_030, requests):
    assert uniform(on_030, *requests) == 1


@pytest.mark.parametrize("requests", [[BEGINS], [GOES_ON], [HANDED_OVER, GOES_ON], [HANDED_OVER, DECODES, BEGINS]])
def test_steps_with_a_prompt_to_compute_stay_what_they_are(on_030, requests):
    assert uniform(on_030, *requests) is None


def test_steps_that_vllm_knows_as_decode_are_left_alone(on_030):
    assert uniform(on_030, DECODES, DECODES, uniform=1) == 1


def test_a_runner_with_context_parallelism_is_left_alone(on_030):
    assert uniform(on_030, HANDED_OVER, pcp_manager=object()) is None


def test_a_step_without_requests_is_left_alone(on_030):
    assert on_030(None).gather_batch_req_state(output(), True) == (None, None)


def test_it_is_changed_once(on_030):
    changed = on_030.gather_batch_req_state
    assert not run_first_steps_as_decode()
    assert on_030.gather_batch_req_state is changed


def test_a_version_that_does_it_by_itself_is_not_changed(monkeypatch, runner):
    loaded(monkeypatch, GPUModelRunner=runner, BatchReqState=Batch032, get_uniform_decode_token_count=count_030)
    before = runner.gather_batch_req_state
    assert not run_first_steps_as_decode()
    assert runner.gather_batch_req_state is before


def test_a_version_that_is_not_known_is_not_changed(monkeypatch, runner):
    class Other(NamedTuple):
        is_prefilling_np: np.ndarray

    before = runner.gather_batch_req_state
    loaded(monkeypatch, GPUModelRunner=runner, BatchReqState=Other, get_uniform_decode_token_count=count_030)
    assert not run_first_steps_as_decode()
    loaded(monkeypatch, GPUModelRunner=runner, BatchReqState=Batch030)
    assert not run_first_steps_as_decode()
    assert runner.gather_batch_req_state is before


def test_a_process_without_that_runner_is_not_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.delattr("vllm.v1.worker.gpu.model_runner", raising=False)
    assert not run_first_steps_as_decode()


def test_vllms_scheduler_reserves_nothing_for_blocks_that_were_given_back(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_inflight_prefill_reserved_blocks", lambda self: len(self._inflight_prefills))
    assert release_reservations()
    assert release_reservations()  # once is enough
    told = [{"a"}, set()]
    scheduler = SimpleNamespace(connector=SimpleNamespace(take_given_back=told.pop), _inflight_prefills={"a", "b"})
    assert Scheduler._inflight_prefill_reserved_blocks(scheduler) == 2
    assert Scheduler._inflight_prefill_reserved_blocks(scheduler) == 1
    scheduler.connector = None
    assert Scheduler._inflight_prefill_reserved_blocks(scheduler) == 1


def test_a_scheduler_that_reserves_in_another_way_is_told_of(monkeypatch, caplog):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "_inflight_prefill_reserved_blocks")
    assert not release_reservations()
    assert "keep blocks free" in caplog.text


def images(count):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

    data = MultiModalKwargsItem({})
    return [MultiModalFeatureSpec(data, "image", "a", PlaceholderRange(4 * at, 4)) for at in range(count)]


def new_request(features, computed):
    """What vLLM's scheduler tells its runner of a request whose first tokens have KV."""
    from vllm.v1.core.sched.output import NewRequestData

    from transfer.schedulers import make_request

    request = make_request("r")
    request.mm_features, request.num_computed_tokens = features, computed
    return NewRequestData.from_request(request, ((1, 2, 3),))


def test_a_runner_has_the_tensors_of_images_whose_kv_is_there(monkeypatch):
    from vllm.v1.core.sched import output

    monkeypatch.setattr(output, "strip_covered_mm_data", output.strip_covered_mm_data)
    asked = images(3)
    before = [one.data is None for one in new_request(asked, 8).mm_features]
    assert before == [True, True, False]  # else it need not be changed
    assert keep_items()
    assert keep_items()  # once is enough
    for computed in (0, 8, 12):
        assert [one.data is None for one in new_request(asked, computed).mm_features] == [False] * 3


def test_a_scheduler_that_leaves_nothing_out_is_not_changed(monkeypatch):
    from vllm.v1.core.sched import output

    monkeypatch.delattr(output, "strip_covered_mm_data")
    assert not keep_items()
