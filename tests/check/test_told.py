import json
from contextlib import asynccontextmanager
from dataclasses import fields

import aiohttp
import pytest
from aiohttp import web

from trivet.check.told import EngineFacts, facts_of, read_facts
from trivet.errors import TrivetError
from trivet.fleet import told

# of vLLM 0.32.0 with --block-size 16 and its defaults; cut to the lines that matter
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",\
kv_cache_layout="None",num_gpu_blocks="100",prefix_caching_hash_algo="sha256",sliding_window="None"} 1.0
"""
NIXL = """\
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 0.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 0.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 0.0
"""
MODELS = {
    "object": "list",
    "data": [
        {"id": "m", "object": "model", "root": "/models/llama", "parent": None, "max_model_len": 4096},
        {"id": "alias", "object": "model", "root": "/models/llama", "parent": None, "max_model_len": 4096},
        {"id": "lora", "object": "model", "root": "/loras/a", "parent": "m", "max_model_len": None},
    ],
}
CONFIG = {
    "model_config": {"model": "org/llama", "dtype": "torch.bfloat16", "max_model_len": 4096, "quantization": None},
    "cache_config": {"block_size": 32, "cache_dtype": "auto", "enable_prefix_caching": True},
    "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1},
    "scheduler_config": {"max_num_batched_tokens": 8192, "disable_hybrid_kv_cache_manager": False},
    "kv_transfer_config": {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {},
    },
    "speculative_config": {
        "method": "eagle",
        "num_speculative_tokens": 3,
        "draft_model_config": {"model": "org/draft"},
    },
}


@asynccontextmanager
async def engine(answers, *, key=None):
    """Answers by path: JSON, a text, or a status."""

    async def answer(request):
        if key and request.path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {key}":
            return web.Response(status=401)
        value = answers.get(request.path, 404)
        if isinstance(value, int):
            return web.Response(status=value)
        return web.Response(text=value) if isinstance(value, str) else web.json_response(value)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield session, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def read(answers, api_key=None, **more):
    async with engine(answers, **more) as (session, url):
        return await read_facts(session, url, api_key)


def known(facts):
    return {name for name in (one.name for one in fields(facts)) if getattr(facts, name) is not None}


async def test_an_engine_that_tells_is_asked_nothing_else():
    facts = await read({told.PATH: {"format": 1, "vllm": "0.32.0", "block_tokens": 128, "served_names": ["m"]}})
    assert facts == EngineFacts(whole=True, vllm="0.32.0", block_tokens=128, served_names=("m",))


async def test_every_fact_that_engines_tell_is_read():
    """The two ends are two files: a fact that one calls otherwise would be unknown for ever."""
    from types import SimpleNamespace

    kv = SimpleNamespace(kv_connector="NixlConnector")
    names = set(told.facts_of(SimpleNamespace(kv_transfer_config=kv))) - {"format"}
    assert names == {one.name for one in fields(EngineFacts)} - {"whole"}


async def test_of_any_other_vllm_what_shows():
    facts = await read({"/version": {"version": "0.30.0"}, "/v1/models": MODELS, "/metrics": METRICS})
    assert facts == EngineFacts(
        vllm="0.30.0",
        model="/models/llama",
        served_names=("m", "alias"),
        max_length_tokens=4096,
        block_tokens=16,
        kv_dtype="auto",
        kv_dtype_flag="auto",
        prefix_caching=True,
        hash_algorithm="sha256",
        data_parallel=1,
    )
    assert facts.nixl_backends is None


async def test_the_connector_shows_in_what_is_counted():
    assert (await read({"/metrics": METRICS + NIXL})).connector == "NixlConnector"
    of_ours = "# TYPE vllm:trivet_kv_expired counter\nvllm:trivet_kv_expired_total 0.0\n"
    assert (await read({"/metrics": METRICS + of_ours})).connector == "TrivetConnector"


async def test_ranks_show_in_the_metrics():
    more = METRICS.replace('engine="0",kv', 'engine="1",kv').splitlines()[-1]
    assert (await read({"/metrics": f"{METRICS}{more}\n"})).data_parallel == 2


async def test_in_development_mode_its_config_shows():
    facts = await read(
        {"/version": {"version": "0.32.0"}, "/metrics": METRICS, "/server_info": {"vllm_config": CONFIG}}
    )
    assert (facts.connector, facts.kv_role, facts.load_failure_policy) == ("NixlConnector", "kv_producer", "fail")
    assert (facts.block_tokens, facts.dtype, facts.kv_dtype, facts.tensor_parallel) == (32, "bfloat16", "bfloat16", 2)
    assert (facts.quantization, facts.hybrid_manager, facts.batched_tokens) == ("", True, 8192)
    assert json.loads(facts.speculative) == {"method": "eagle", "tokens": 3, "model": "org/draft"}
    assert facts.nixl_backends == ("UCX",)
    none = {**CONFIG, "speculative_config": None, "kv_transfer_config": None}
    facts = await read({"/metrics": METRICS, "/server_info": {"vllm_config": none}})
    assert (facts.connector, facts.speculative) == ("", "")


async def test_the_key_goes_along():
    answers = {"/version": {"version": "0.32.0"}, "/v1/models": MODELS}
    assert (await read(answers, "secret", key="secret")).model == "/models/llama"
    assert (await read(answers, "wrong", key="secret")).model is None


@pytest.mark.parametrize(
    "answers",
    [
        {"/version": 500, "/metrics": "no { metrics", "/v1/models": MODELS},
        {"/version": "[]", "/metrics": "", "/v1/models": {"data": [1, {"id": "m", "root": 3}]}},
        {"/version": {"version": 3}, "/v1/models": {"data": None}, "/server_info": {"vllm_config": "text"}},
        {told.PATH: "<html>", "/version": {"version": "1"}},
        {told.PATH: {"something": "else"}, "/version": {"version": "1"}},
    ],
)
async def test_what_is_no_answer_is_not_told(answers):
    facts = await read(answers)
    assert known(facts) <= {"whole", "vllm", "model", "served_names", "max_length_tokens"}
    assert not facts.whole


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_tokens", "128"),
        ("block_tokens", True),
        ("prefix_caching", 1),
        ("vllm", 32),
        ("served_names", "m"),
        ("served_names", [1]),
        ("gpus", ["a"]),
        ("cores", ["a"]),
        ("environment", ["a"]),
        ("whole", "yes"),
    ],
)
def test_a_fact_of_another_kind_is_not_told(name, value):
    assert facts_of({name: value}) == EngineFacts()


async def test_nothing_there_is_one_line(unused_tcp_port):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(TrivetError) as caught:
            await read_facts(session, f"http://127.0.0.1:{unused_tcp_port}")
    assert str(caught.value).startswith(f"nothing answers at http://127.0.0.1:{unused_tcp_port} -> ")


def test_backends_are_as_vllm_takes_them():
    assert EngineFacts(connector_options={}).nixl_backends == ("UCX",)
    assert EngineFacts(connector_options={"backends": ["LIBFABRIC"]}).nixl_backends == ("LIBFABRIC",)
    assert EngineFacts(connector_options={"backends": "UCX"}).nixl_backends is None
