"""``device: sim``: tiers of simulated engines in a topology."""

import json
import sys

import pytest

from trivet.errors import MissingPackageError, TopologyError
from trivet.sim.options import parse
from trivet.topology import make_plan, parse_topology
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook

NIXL = "kv: {connector: NixlConnector}\n"
SIMS = f"""\
{NIXL}model: {{name: sim-model}}
tiers:
  prefill: {{device: sim, replicas: 2, flags: {{step-ms: 5}}}}
  decode: {{device: sim, env: {{A: b}}}}
  mixed: {{device: sim, flags: {{max-num-seqs: 3}}}}
gateway: {{plane: text}}
"""
BARE = Machine((0, 1), 0, None, None, lambda _: False)
"""Neither vLLM nor a connector's package."""
WITH_VLLM = Machine((0, 1), 0, "0.32.0", "cpu", lambda _: False)


def plan_of(text: str, machine: Machine = BARE, **more):
    return make_plan(parse_topology(text, "t.yaml"), PortBook(lock=False), model="sim-model", machine=machine, **more)


def test_each_is_a_command_that_the_simulated_engine_understands():
    plan = plan_of(SIMS)
    assert [one.name for one in plan.engines] == ["prefill-0", "prefill-1", "decode-0", "mixed-0"]
    for engine in plan.engines:
        python, m, module, *arguments = engine.command()
        assert (python, m, module) == (sys.executable, "-m", "trivet.sim")
        settings, name, notes = parse(arguments, engine.environment())
        assert (name, notes, settings.port) == (engine.name, [], engine.port)
        assert settings.names == ("sim-model",)
        assert settings.enable_scale_out
        assert settings.enable_prompt_tokens_details
        assert settings.kv_transfer == (engine.tier != "mixed")
        assert settings.step_ms == (5.0 if engine.tier == "prefill" else 0.0)
        assert settings.max_num_seqs == {"prefill": 32, "decode": 256, "mixed": 3}[engine.tier]
        assert settings.max_model_len == 131072
    assert plan.engine("decode-0").environment() == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "A": "b"}


def test_they_take_no_cores_no_gpus_and_no_port_for_kv():
    for engine in plan_of(SIMS).engines:
        assert (engine.cores, engine.gpus, engine.kv_port) == ((), (), None)
        names = {one.name for one in engine.settings}
        assert not names & {"dtype", "enforce-eager", "tensor-parallel-size", "gpu-memory-utilization", "tokenizer"}


def test_the_connectors_options_reach_them():
    plan = plan_of(SIMS.replace(NIXL, "kv: {connector: NixlConnector, options: {kv_lease_duration: 7}}\n"))
    settings, _, _ = parse(plan.engine("prefill-0").command()[3:])
    assert settings.kv_lease_s == 7.0
    assert settings.block_size == 128
    (config,) = [one.value for one in plan.engine("decode-0").settings if one.name == "kv-transfer-config"]
    assert json.loads(config)["kv_load_failure_policy"] == "fail"


def test_the_models_length_is_theirs():
    plan = plan_of(SIMS.replace("{name: sim-model}", "{name: sim-model, max_length: 512, dtype: float16}"))
    assert parse(plan.engine("mixed-0").command()[3:])[0].max_model_len == 512


def test_on_the_tokens_plane_the_gateway_needs_vllm():
    tokens = SIMS.replace("plane: text", "plane: tokens")
    with pytest.raises(MissingPackageError, match="on the tokens plane the gateway renders with it"):
        plan_of(tokens)
    assert len(plan_of(tokens, WITH_VLLM).engines) == 4  # but not the connector's package
    cuda = Machine((0, 1), 0, "0.32.0", "cuda", lambda _: False)
    assert len(plan_of(tokens, cuda).engines) == 4
    with pytest.raises(MissingPackageError, match="too old"):
        plan_of(tokens, Machine((0,), 0, "0.29.0", "cpu", lambda _: False))


@pytest.mark.parametrize("real", ["prefill", "decode", "mixed"])
def test_simulated_and_real_engines_are_not_mixed(real):
    lines = [line.replace("sim,", "cpu,") if line.startswith(f"  {real}:") else line for line in SIMS.splitlines()]
    name = "prefill-0" if real != "prefill" else "decode-0"
    with pytest.raises(TopologyError, match=rf"^t.yaml:\d+: {name} is simulated, {real}-0 is a real engine \(cpu\)"):
        plan_of("\n".join(lines), WITH_VLLM)


def test_engines_of_someone_else_may_be_simulated():
    text = "tiers: {mixed: {engines: [{url: 'http://127.0.0.1:1', device: sim}, {device: sim}]}}\n"
    plan = plan_of(text + "gateway: {plane: text}\n")
    assert [one.started_by for one in plan.engines] == ["someone else", "trivet"]
    unsaid = "tiers: {mixed: {engines: [{url: 'http://127.0.0.1:1'}, {device: sim}]}}\n"
    assert len(plan_of(unsaid, WITH_VLLM).engines) == 2


@pytest.mark.parametrize(
    ("field", "device"),
    [
        ("gpus: [0]", "cuda"),
        ("gpus: []", "cuda"),
        ("cores: [0]", "cpu"),
        ("tensor_parallel: 2", "cuda"),
        ("gpu_memory_utilization: 0.5", "cuda"),
        ("cpu_kv_gib: 2", "cpu"),
    ],
)
@pytest.mark.parametrize("of_the_tier", [True, False])
def test_what_means_nothing_to_them_is_refused(field, device, of_the_tier):
    inside = f"device: sim\n    {field}\n" if of_the_tier else f"engines:\n    - device: sim\n      {field}\n"
    with pytest.raises(TopologyError) as caught:
        plan_of(f"tiers:\n  mixed:\n    {inside}", WITH_VLLM)
    name = field.split(":")[0]
    assert str(caught.value) == (
        f"t.yaml:{4 if of_the_tier else 5}: mixed-0: {name} means nothing to a simulated engine -> leave {name} out, "
        f"or say device: {device} instead of device: sim"
    )
