"""The middleware in vLLM's own application, over an engine that is a script."""

import asyncio
import contextlib
import json
import os
import platform
from types import SimpleNamespace

import httpx
import pytest
import pytest_asyncio

import trivet
from helpers.processes import holds
from helpers.tokenizer import demo_fields
from render.conftest import CONFIG, serving, vllm_around
from trivet.demo.model import write_tokenizer
from trivet.fleet import told
from trivet.fleet.told import MIDDLEWARE, PATH, EngineFacts, facts_of

KEY = "sk-of-the-operator"
KV = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "backends": ["UCX"],
        "kv_recompute_tokens": 64,
        "api_key": KEY,
        "peer": {"url": f"http://me:{KEY}@store:1/x?sig={KEY}", "auth_token": KEY},
    },
}
FLAGS = (
    *("--served-model-name", "tiny", "alias", "--middleware", MIDDLEWARE, "--block-size", "32"),
    *("--dtype", "float32", "--api-key", KEY, "--kv-transfer-config", json.dumps(KV)),
    *("--max-num-batched-tokens", "512"),
)
ENVIRONMENT = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "eth0",
    "NIXL_LOG_LEVEL": "INFO",
    "TRIVET_API_KEY": KEY,
    "UCX_SOME_TOKEN": KEY,
    "VLLM_API_KEY": KEY,
    "HF_TOKEN": KEY,
    "PYTHONHASHSEED": "7",
    "SOMETHING_ELSE": "private",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told") / "model"
    folder.mkdir()
    write_tokenizer(demo_fields(), folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + bytes(range(256)))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllms(tmp_path_factory, folder):
    """vLLM's application, as ``vllm serve`` builds it, and what it tells in an environment like an operator's."""
    caches = tmp_path_factory.mktemp("caches")
    with vllm_around(caches):
        import trivet.render.frontend as frontend
    async with serving(frontend, caches, folder, *FLAGS) as served:
        served.app.state.vllm_config = engine_config(served.app.state.args, caches)  # as an engine has it
        before = dict(os.environ)
        os.environ.update(ENVIRONMENT)
        try:
            yield SimpleNamespace(served=served, answer=await served.client.get(PATH))
        finally:
            os.environ.clear()
            os.environ.update(before)


def engine_config(args, caches):
    from vllm.engine.arg_utils import AsyncEngineArgs

    with vllm_around(caches):
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()


@pytest.fixture
def facts(vllms):
    assert vllms.answer.status_code == 200
    assert vllms.answer.headers["content-type"] == "application/json"
    return vllms.answer.json()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_config_is_told_as_vllm_resolved_it(vllms, facts, folder):
    import vllm

    config = vllms.served.app.state.vllm_config
    expected = {
        "trivet": trivet.__version__,
        "vllm": vllm.__version__,
        "connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "load_failure_policy": "recompute",
        "block_tokens": 32,
        "dtype": "float32",
        "kv_dtype": "float32",
        "kv_dtype_flag": "auto",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "model": str(folder),
        "revision": "",
        "served_names": ["tiny", "alias"],
        "max_length_tokens": config.model_config.max_model_len,
        "vocabulary_tokens": CONFIG["vocab_size"],
        "layers": 1,
        "kv_heads": 2,
        "head_size": 32,
        "is_mla": False,
        "sliding_window": 0,
        "has_state_layers": False,
        "speculative": "",
        "quantization": "",
        "load_format": "auto",
        "prefix_caching": True,
        "hash_algorithm": "sha256",
        "hash_seed": "7",
        "batched_tokens": 512,
        "device": "cpu",
        "gpus": [],
        "host": platform.node(),
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["tokenizer_tokens"] == len(vllms.served.app.state.engine_client.renderer.tokenizer) > 0
    assert len(facts["config_digest"]) == len(facts["weights_digest"]) == 16
    assert facts["namespaces"]["ipc"].startswith("ipc:[")
    assert facts["shm_bytes"] > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_it_tells_all_that_is_compared(facts):
    """A fact that vLLM has renamed would be null for ever. These may be: nobody has chosen them."""
    unknown = {name for name, value in facts.items() if value is None}
    assert unknown <= {"kv_layout", "attention_backend", "locked_memory_bytes"}


@pytest.mark.asyncio(loop_scope="module")
async def test_no_secret_and_no_more_of_the_environment_than_transports_read(vllms, facts):
    assert KEY not in vllms.answer.text
    assert "private" not in vllms.answer.text
    environment = facts["environment"]
    assert {name: environment.get(name) for name in ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_LOG_LEVEL")} == {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "eth0",
        "NIXL_LOG_LEVEL": "INFO",
    }
    assert not {"HF_TOKEN", "VLLM_API_KEY", "TRIVET_API_KEY", "UCX_SOME_TOKEN", "PATH"} & set(environment)
    assert facts["connector_options"] == {"backends": ["UCX"], "kv_recompute_tokens": 64}


@pytest.mark.asyncio(loop_scope="module")
async def test_it_is_as_open_as_metrics(vllms):
    client = vllms.served.client
    statuses = [(await client.get(path)).status_code for path in ("/metrics", PATH, "/v1/models")]
    assert statuses == [200, 200, 401]


@pytest.mark.asyncio(loop_scope="module")
async def test_other_requests_and_methods_are_vllms(vllms):
    client = vllms.served.client
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json().keys() == {"version"}
    assert (await client.post(PATH)).status_code == 404
    assert (await client.get(f"/v1{PATH}")).status_code == 401
    head = await client.head(PATH)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len((await client.get(PATH)).content)


# alone


@pytest.mark.parametrize(
    "options",
    [
        {"headers": ["Authorization: Bearer abc"]},
        {"dsn": "host=x password=abc"},
        {"aws_access_id": "abc", "sas": "abc"},
        {"connectors": [{"kv_connector": "X", "url": "http://u:abc/w@h"}]},
    ],
)
def test_options_that_nobody_compares_are_not_told(options):
    assert "abc" not in json.dumps(told._without_secrets(options))


def test_of_the_environment_only_what_transports_read_is_told():
    given = {"NIXL_OBJ_AKID": "a", "NIXL_S3_ACCESS": "a", "TRIVET_SAS": "a", "TRIVET_PWD": "a", "UCX_TLS": "tcp"}
    assert dict(told._environment(given)) == {"UCX_TLS": "tcp"}


async def other(scope, receive, send):
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask(middleware, path, *, state=None, **scope):
    app = SimpleNamespace(state=state or SimpleNamespace(vllm_config=SimpleNamespace()))

    async def outer(given, receive, send):
        await middleware({**given, "app": app, **scope}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://e") as client:
        return await client.get(path)


@pytest.mark.parametrize("path", ["/", "/trivet", "/trivet/engine/", "/x/trivet/engine", "/trivet/enginex"])
async def test_only_its_own_path_is_its(path):
    assert (await ask(EngineFacts(other), path)).status_code == 418


async def test_behind_a_prefix_it_is_found(monkeypatch):
    monkeypatch.setattr(told, "facts_of", lambda *_: {"a": 1})
    assert (await ask(EngineFacts(other), f"/api{PATH}", root_path="/api")).json() == {"a": 1}
    assert (await ask(EngineFacts(other), PATH, root_path="/api")).json() == {"a": 1}


async def test_what_is_no_http_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    middleware = EngineFacts(app)
    await middleware({"type": "lifespan"}, None, None)
    await middleware({"type": "websocket", "path": PATH}, None, None)
    assert seen == ["lifespan", "websocket"]


async def test_an_engine_that_is_not_ready_says_so():
    answer = await ask(EngineFacts(other), PATH, state=SimpleNamespace())
    assert (answer.status_code, answer.json()) == (503, {"error": "the engine has no config yet"})


async def test_the_checkpoint_is_read_once_off_the_loop_and_outlives_who_asked_first(monkeypatch):
    """Reading takes seconds on a slow disk: streams go on, and a client that gives up does not begin it anew."""
    asked, may_go = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*_):
        asked.append(1)
        asyncio.run_coroutine_threadsafe(may_go.wait(), loop).result()
        return {"a": 1}

    monkeypatch.setattr(told, "facts_of", slow)
    middleware = EngineFacts(other)
    first = asyncio.create_task(ask(middleware, PATH))
    await holds(lambda: asked)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(ask(middleware, PATH))
    assert (await ask(middleware, "/other")).status_code == 418
    may_go.set()
    assert (await second).json() == {"a": 1}
    assert asked == [1]


def test_a_config_without_anything_is_told_too():
    """What a later vLLM has renamed is unknown, and no fault."""
    facts = facts_of(SimpleNamespace())
    assert facts["block_tokens"] is None
    assert facts["connector"] == ""
    json.dumps(facts)


def test_gpus_are_told_in_the_order_of_the_process(monkeypatch):
    devices = {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda index: devices[index],
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=b"00000000:18:00.0"),
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: handle,
    )
    monkeypatch.setitem(told.sys.modules, "vllm.third_party.pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-a")
    assert [one["uuid"] for one in told._gpus()] == ["GPU-c", "GPU-a"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [one["uuid"] for one in told._gpus()] == ["GPU-a", "GPU-b", "GPU-c"]
    assert next(told._gpus())["pci"] == "00000000:18:00.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(told._gpus()) == []
    monkeypatch.delattr(nvml, "nvmlInit")
    assert list(told._gpus()) == []
