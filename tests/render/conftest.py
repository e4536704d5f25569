"""vLLM's API server over a scripted token engine, built once: it takes some seconds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from helpers.token_engine import ScriptedEngine
from helpers.tokenizer import demo_fields
from trivet.demo.model import write_tokenizer

MAX_TOKENS = 256
"""Longest prompt plus answer."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "vocab_size": 49152,
}
FLAGS = ("--served-model-name", "tiny", "alias", "--enable-prompt-tokens-details")


@contextlib.contextmanager
def vllm_around(cache: Path) -> Iterator[None]:
    """Inside, vLLM can be imported and set up; behind, this process is for other tests as it was."""
    environment, version = dict(os.environ), importlib.metadata.version
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "torchinductor")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import trivet.fleet.vllm as entry  # as in a worker: answers for the name of vLLM's CPU build

            importlib.metadata.version = entry._version
            yield
    finally:
        importlib.metadata.version = version
        os.environ.clear()
        os.environ.update(environment)


@dataclass
class Served:
    """The application, what generates under it, and a client over it."""

    app: Any
    core: Any
    engine: ScriptedEngine
    client: httpx.AsyncClient
    tokenizer: Tokenizer
    served_names: list[str]
    max_model_len: int

    @property
    def processor(self) -> Any:
        """Where vLLM keeps what it knows of running requests."""
        return self.app.state.engine_client.output_processor

    def known(self) -> list[str]:
        """Requests that something of vLLM's or of ours still holds."""
        held = (self.processor.request_states, self.processor.parent_requests, self.processor.external_req_ids)
        return [name for holder in held for name in holder] + list(self.core._tasks)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.client.post(path, json={"model": "tiny", **body}, headers=headers)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **body})

    async def complete(self, prompt: Any = "Hi", **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, **body})


def let_go() -> None:
    """Gives back what is of no use any more: tokenizers lie in cycles, have some 100 MB, and look small to Python."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def _let_go() -> Iterator[None]:
    yield
    let_go()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    folder = tmp_path_factory.mktemp("render") / "model"
    folder.mkdir()
    write_tokenizer(demo_fields(), folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps what it has worked out. (What vLLM knows of a model's class takes 10 s to find out again.)"""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="session")
def frontend(caches: Path) -> ModuleType:
    """``trivet.render.frontend``, imported as late as this: it brings vLLM and torch."""
    with vllm_around(caches):
        import trivet.render.frontend
    return trivet.render.frontend


@pytest.fixture(scope="session")
def core(frontend: ModuleType) -> ModuleType:
    """``trivet.render.core``."""
    import trivet.render.core

    return trivet.render.core


@contextlib.asynccontextmanager
async def serving(
    module: ModuleType, caches: Path, folder: Path, *flags: str, engine: Any = None
) -> AsyncIterator[Served]:
    """A front end of its own, over a scripted engine unless another is given."""
    engine = engine or ScriptedEngine()
    with contextlib.ExitStack() as setting_up:
        setting_up.enter_context(vllm_around(caches))
        async with module.open_frontend([str(folder), *flags], engine) as opened:
            setting_up.close()
            transport = httpx.ASGITransport(opened.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://render", timeout=20) as client:
                yield Served(
                    opened.app,
                    opened.core,
                    engine,
                    client,
                    Tokenizer.from_file(str(folder / "tokenizer.json")),
                    list(opened.served_names),
                    opened.max_model_len,
                )


@pytest.fixture(name="serving", scope="session")
def _serving(frontend: ModuleType, caches: Path) -> Any:
    return lambda folder, *flags, **more: serving(frontend, caches, folder, *flags, **more)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def only_frontend(frontend: ModuleType, caches: Path, model_folder: Path) -> AsyncIterator[Served]:
    async with serving(frontend, caches, model_folder, *FLAGS) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def served(only_frontend: Served) -> AsyncIterator[Served]:
    """The same for each test; what a test leaves under way is a fault."""
    only_frontend.engine.reset()
    yield only_frontend
    await only_frontend.engine.idle()
    assert only_frontend.known() == []
