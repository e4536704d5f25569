"""One set of real vLLM engines for all end-to-end tests: prefill, decode, a plain one, and the gateway over them."""

import asyncio
import dataclasses
import importlib.util
import json
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.parity import Parity, Server, tokenizer_of
from trivet.fleet import probe
from trivet.gateway.service import Service
from trivet.topology import EnginePlan, Plan, Setting, make_plan, parse_topology
from trivet.topology.ports import PortBook

BLOCK_TOKENS = 32
MODEL = "tiny"
PLUGINS = Path(__file__).parent / "plugins"
PYTHONPATH = os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])])
ADAPTERS = ("tiny-a", "tiny-b")
CONNECTOR = os.environ.get("TRIVET_E2E_CONNECTOR", "TrivetConnector")
CHUNK_TOKENS = 256
"""Longer prompts are computed, and their KV moves, in several steps. The limit is on each prompt, not on all of a step:
a seeded request whose prompt is cut ends vLLM on CPUs (``CPU Generator does not use offset``)."""
PREFILL_SEQS = 8
DECODE_BLOCKS = 3 * 28 + 1
"""Room for three prompts of 28 blocks, and vLLM's null block: more wait, or are thrown out and computed again."""
KV = {
    # a staging of eight pieces, which concurrent prompts outgrow
    "TrivetConnector": "{connector: TrivetConnector, options: {staging_mib: 8, piece_mib: 1, checksums: true}}",
    "NixlConnector": "{connector: NixlConnector}",
}[CONNECTOR]
SPOILED = {
    "TrivetConnector": ("SpoiledTrivetConnector", "spoiled_trivet"),
    "NixlConnector": ("SpoiledNixlConnector", "spoiled_nixl"),
}[CONNECTOR]

TOPOLOGY = f"""\
model: {{name: MODEL_PATH, served_names: [{MODEL}, tiny-alias], max_length: 1024}}
flags:
  block-size: {BLOCK_TOKENS}
  long-prefill-token-threshold: {CHUNK_TOKENS}
  max-logprobs: 30
  enable-prompt-tokens-details: true
  logits-processors: scripted:Scripted
  enable-auto-tool-choice: true
  tool-call-parser: hermes
  reasoning-parser: deepseek_v3   # reasoning only where chat_template_kwargs ask for it
  scheduling-policy: priority
  enable-lora: true
  max-loras: 3   # one more than there are: vLLM on CPUs applies the last one to requests that ask for none
  max-lora-rank: 8
  lora-target-modules: [qkv_proj, q_proj, k_proj, v_proj]   # not the head: vLLM on CPUs mistakes it in prompt_logprobs
  lora-modules: [ADAPTER_MODULES]
env: {{PYTHONPATH: '{PYTHONPATH}'}}
kv: {KV}
tiers:
  render: {{env: {{PYTHONPATH: '{PYTHONPATH}'}}}}
  prefill: {{flags: {{max-num-seqs: {PREFILL_SEQS}}}}}
  decode: {{flags: {{num-gpu-blocks-override: {DECODE_BLOCKS}}}}}
  mixed:          # plain: vLLM without any connector, the reference
gateway: {{port: 0, drain_s: 5, split: always, continue_answers: true, guard: off}}  # the scripted processor knows
"""

TEXT_TOPOLOGY = f"""\
model: {{name: MODEL_PATH, served_names: [{MODEL}, tiny-alias], max_length: 1024}}
kv: {KV}
tiers:
  prefill: {{engines: [PREFILL]}}
  decode: {{engines: [DECODE]}}
  mixed: {{engines: [MIXED]}}
gateway: {{port: 0, drain_s: 5, plane: text, split: always, guard: off}}
"""


def _load(name: str):
    """A module that lies beside this file; tests are not a package (import mode importlib)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _load("tiny_model")


class Deployment:
    """A service that runs in a thread of its own, and what tests ask of it."""

    def __init__(self, plan: Plan, folder: Path, spoil: Path) -> None:
        self.plan = plan
        self._folder = folder
        self._spoil = spoil
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service", daemon=True)
        self.service: Service | None = None
        self.events: list[tuple[float, str, str]] = []

    def start(self) -> None:
        self._thread.start()

        async def up() -> Service:
            service = Service(self.plan, self._folder, lambda e: self.events.append((time.time(), e.subject, e.state)))
            return await service.__aenter__()

        self.service = asyncio.run_coroutine_threadsafe(up(), self._loop).result(timeout=600)

    def stop(self) -> None:
        if self.service is not None:
            asyncio.run_coroutine_threadsafe(self.service.__aexit__(None, None, None), self._loop).result(timeout=120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    @property
    def url(self) -> str:
        assert self.service is not None
        return self.service.url

    def engine(self, tier: str) -> EnginePlan:
        return next(one for one in self.plan.engines if one.tier == tier)

    @property
    def plain_url(self) -> str:
        return self.engine("mixed").url

    def metrics(self, tier: str) -> probe.EngineMetrics:
        with urllib.request.urlopen(f"{self.engine(tier).url}/metrics", timeout=30) as answer:
            return probe.parse_metrics(answer.read().decode())

    def record(self, request_id: str) -> dict:
        return get_json(f"{self.url}/trivet/requests/{request_id}")

    @contextmanager
    def spoiling(self, how: str) -> Iterator[None]:
        """Inside, decode spoils each transfer that it receives."""
        self._spoil.write_text(how)
        try:
            yield
        finally:
            self._spoil.write_text("")


def get_json(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def get(url: str) -> tuple[int, str]:
    """Status and text of a GET, whatever the status."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def post(url: str, body: object, *, raw: bytes | None = None, headers: dict | None = None) -> tuple[int, str]:
    """Status and text of a POST, whatever the status."""
    data = raw if raw is not None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} | (headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(text: str) -> list[dict]:
    """The events of a stream that ended as it should."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def salted(body: dict) -> dict:
    """The body with a fresh cache salt: nothing that another request left in a prefix cache is found."""
    return {**body, "cache_salt": uuid.uuid4().hex}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with engines of their own come before the shared set (24 GB hold one of them), those that kill last."""

    def turn(item: pytest.Item) -> int:
        if not item.get_closest_marker("e2e"):
            return 0
        if "deployment" not in getattr(item, "fixturenames", ()):
            return 1
        return 3 if item.path.name == "test_failures.py" else 2

    items.sort(key=turn)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("run")
    spoil = folder / "spoil"
    ports = PortBook()
    adapters = {name: tiny.write_adapter(folder / name, seed) for seed, name in enumerate(ADAPTERS)}
    modules = ", ".join(f"{name}={path}" for name, path in adapters.items())
    topology = parse_topology(TOPOLOGY.replace("MODEL_PATH", str(tiny_model)).replace("ADAPTER_MODULES", modules))
    plan = make_plan(topology, ports, model=str(tiny_model))
    engines = tuple(spoilable(one, spoil) if one.tier == "decode" else one for one in plan.engines)
    running = Deployment(dataclasses.replace(plan, engines=engines), folder, spoil)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        ports.close()


@pytest.fixture(scope="session")
def text_plane(
    deployment: Deployment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Another gateway over the same engines: their own OpenAI endpoints, split."""
    text = TEXT_TOPOLOGY.replace("MODEL_PATH", str(tiny_model))
    for tier in ("prefill", "decode", "mixed"):
        engine = deployment.engine(tier)
        known = {"url": engine.url} | ({"kv_address": engine.kv_address} if engine.kv_address else {})
        text = text.replace(tier.upper(), json.dumps(known))
    ports = PortBook()
    folder = tmp_path_factory.mktemp("text")
    running = Deployment(make_plan(parse_topology(text), ports, model=str(tiny_model)), folder, folder / "spoil")
    try:
        running.start()
        yield running
    finally:
        running.stop()
        ports.close()


@pytest.fixture(scope="module", params=["tokens", "text"])
def parity(
    request: pytest.FixtureRequest, deployment: Deployment, text_plane: Deployment, tiny_model: Path
) -> Iterator[Parity]:
    """Each gateway over the engines, by its data plane, beside the plain engine; the module's cases are being asked."""
    urls = {"tokens": deployment.url, "text": text_plane.url}
    tokenizer = tokenizer_of(tiny_model)

    def record(request_id: str) -> dict | None:
        status, text = get(f"{urls[request.param]}/trivet/requests/{request_id}")
        assert status in (200, 404), text
        return json.loads(text) if status == 200 else None

    gateway, plain = (Server(url, tokenizer) for url in (urls[request.param], deployment.plain_url))
    running = Parity(gateway, plain, record, plane=request.param)
    specs = [item.callspec.params for item in request.session.items if item.module is request.module]
    running.ask_ahead(spec["case"] for spec in specs if "case" in spec and spec["parity"] == request.param)
    yield running
    running.close()


def spoilable(engine: EnginePlan, control: Path) -> EnginePlan:
    """The decode engine with a connector that is the topology's until a test asks it to spoil a transfer."""
    settings, (name, module) = [], SPOILED
    for setting in engine.settings:
        if setting.name == "kv-transfer-config":
            config = json.loads(setting.value)
            config |= {"kv_connector": name, "kv_connector_module_path": module}
            setting = Setting(setting.name, json.dumps(config), "test")
        settings.append(setting)
    env = (*engine.env, Setting("TRIVET_TEST_SPOIL", str(control), "test"))
    return dataclasses.replace(engine, settings=tuple(settings), env=env)
