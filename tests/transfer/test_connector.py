"""The class that vLLM loads: four of it hand a request over, called as vLLM calls them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

from transfer.schedulers import BLOCK, blocks_of, end, make_request, output_of, step
from transfer.waiting import until
from trivet.transfer.connector import TrivetConnector, window_of
from trivet.transfer.plan import StepPlan

NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(4)]
SHAPE = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
SPEC = FullAttentionSpec(**SHAPE)


def config(folder, role, **changes):
    transfer = {
        "kv_connector": "TrivetConnector",
        "kv_connector_module_path": "trivet.transfer.connector",
        "kv_role": role,
        "engine_id": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"address": f"unix:{folder / role}"},
    }
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1}
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**{**transfer, **changes.pop("transfer", {})}),
        parallel_config=SimpleNamespace(**{**parallel, **changes.pop("parallel", {})}),
        model_config=SimpleNamespace(
            model="m",
            max_model_len=200,
            dtype=torch.float32,
            hf_config=SimpleNamespace(to_diff_dict=lambda: {"layers": 4}),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        use_v2_model_runner=changes.pop("v2", True),
    )


def caches():
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(NAMES), SPEC)])


class Engine:
    """A connector for the scheduler and one for the worker, which vLLM's steps join."""

    def __init__(self, folder, role):
        own = config(folder, role)
        self.scheduler = TrivetConnector(own, KVConnectorRole.SCHEDULER, caches())
        self.worker = TrivetConnector(own, KVConnectorRole.WORKER, caches())
        self.caches = {name: torch.zeros(16, 2, BLOCK, 16) for name in NAMES}
        self.worker.register_kv_caches(self.caches)
        self.freed = []
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(free=self.freed.append, block_pool=None))

    def step(self, *scheduled, compute=lambda: None):
        """A step as the runner goes through it. What the scheduler then reads."""
        meta = self.scheduler.build_connector_meta(step(*scheduled))
        assert isinstance(meta, StepPlan)
        self.worker.bind_connector_metadata(meta)
        compute()
        for name in NAMES if scheduled else ():
            self.worker.save_kv_layer(name, self.caches[name], None)
        self.worker.wait_for_save()
        self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(set())
        output = output_of(self.worker.build_connector_worker_meta())
        output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
        output.failed_recving = results.failed_recving
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return output

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def engines(folder, monkeypatch):
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
    prefill, decode = Engine(folder, "kv_producer"), Engine(folder, "kv_consumer")
    with contextlib.closing(prefill), contextlib.closing(decode):
        yield prefill, decode


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
@pytest.mark.parametrize("v2", [True, False])
def test_only_a_runner_that_is_not_told_again_of_requests_has_all_images_told(folder, monkeypatch, role, v2):
    kept = []
    monkeypatch.setattr("trivet.transfer.connector.keep_items", lambda: kept.append(role))
    made = TrivetConnector(config(folder, role, v2=v2), KVConnectorRole.SCHEDULER, caches())
    made.shutdown()
    assert kept == ([] if v2 else [role])


def test_a_request_is_handed_over(engines, folder):
    prefill, decode = engines
    sends = make_request("p", 40, {"do_remote_decode": True, "transfer_id": "t", "first_token": True}, max_tokens=1)
    params = {"do_remote_prefill": True, "transfer_id": "t", "first_token": True}
    params["prefill_address"] = f"unix:{folder / 'kv_producer'}"
    receives = make_request("d", 40, params)
    decode.scheduler.on_new_request(receives)
    prefill.scheduler.on_new_request(sends)
    assert decode.scheduler.get_num_new_matched_tokens(receives, 0) == (None, False)

    def compute():
        for cache in prefill.caches.values():
            cache[1:4] = torch.rand(3, 2, BLOCK, 16)

    prefill.step((sends, 40), compute=compute)
    until(lambda: decode.scheduler.get_num_new_matched_tokens(receives, 0) == (40, True))
    decode.scheduler.update_state_after_alloc(receives, blocks_of([9, 5, 7]), 40)
    receives.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    end(sends, 7)
    kept, answer = prefill.scheduler.request_finished(sends, [1, 2, 3])
    assert (kept, answer) == (True, {"transfer_id": "t", "handed_over": True})
    until(lambda: decode.step().finished_recving == {"d"}, "landing")
    assert list(receives.output_token_ids) == [7]
    for name in NAMES:
        assert torch.equal(decode.caches[name][[9, 5, 7]], prefill.caches[name][[1, 2, 3]])
        assert not decode.caches[name][[0, 1, 2, 3, 4, 6, 8]].any()
    until(lambda: prefill.step().finished_sending == {"p"}, "freeing")
    assert decode.worker.get_kv_connector_stats().data["received"][0][0] == "shm"
    assert prefill.worker.get_kv_connector_stats().data["sent"]["shm"][0] == 3 * 4 * SPEC.page_size_bytes
    assert decode.scheduler.get_kv_connector_stats() is None


def test_a_request_that_must_fail_is_told_to_vllm(engines, folder):
    _, decode = engines
    params = {"do_remote_prefill": True, "transfer_id": "t", "first_token": True, "prefill_address": "unix:/none"}
    request = make_request("d", 40, params)
    decode.scheduler.on_new_request(request)
    until(lambda: decode.scheduler.get_num_new_matched_tokens(request, 0) == (40, True))
    decode.scheduler.update_state_after_alloc(request, blocks_of([1, 2, 3]), 40)
    output = decode.step()
    assert (output.finished_recving, output.failed_recving) == ({"d"}, {"d"})
    assert not decode.step().failed_recving


def test_requests_without_parameters_are_left_alone(engines):
    for engine in engines:
        request = make_request("r")
        engine.scheduler.on_new_request(request)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        engine.scheduler.update_state_after_alloc(request, blocks_of([1]), 0)
        assert engine.step((request, 40)).is_empty()
        assert engine.scheduler.request_finished_all_groups(request, ([1],)) == (False, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "does not move KV with pipeline parallelism"),
        ({"transfer": {"kv_load_failure_policy": "recompute"}}, "kv_load_failure_policy must stay 'fail'"),
        ({"transfer": {"kv_connector_extra_config": {"adress": "x"}}}, "no option 'adress'"),
    ],
)
@pytest.mark.parametrize("role", KVConnectorRole)
def test_what_it_cannot_do_is_refused_in_one_line(folder, changes, said, role):
    with pytest.raises(ValueError, match=said) as error:
        TrivetConnector(config(folder, "kv_producer", **changes), role, caches())
    assert "\n" not in str(error.value)


def test_layers_that_no_hook_sees_may_be_in_a_graph():
    assert not TrivetConnector.requires_piecewise_for_cudagraph({})
    assert TrivetConnector.build_kv_connector_stats().is_empty()
    assert TrivetConnector.build_kv_connector_stats({"waits": {"slot": 1}}).data == {"waits": {"slot": 1}}


@pytest.mark.parametrize(
    ("spec", "window"),
    [
        (SPEC, None),
        (FullAttentionSpec(**SHAPE, sliding_window=32), None),  # vLLM keeps all its blocks
        (SlidingWindowSpec(**SHAPE, sliding_window=32), 32),
        (
            UniformTypeKVCacheSpecs(
                block_size=BLOCK, kv_cache_specs={"a": SlidingWindowSpec(**SHAPE, sliding_window=8)}
            ),
            8,
        ),
    ],
)
def test_windows_are_those_outside_which_there_are_no_blocks(spec, window):
    assert window_of(spec) == window


def test_attention_in_chunks_is_refused_by_name(folder):
    chunked = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32)
    layers = KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], chunked)])
    with pytest.raises(ValueError, match="attention in local chunks"):
        TrivetConnector(config(folder, "kv_both"), KVConnectorRole.SCHEDULER, layers)
