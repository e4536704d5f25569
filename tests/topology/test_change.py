"""What is different between the engines that run and those of a newer file; what stays as it is in a newer plan."""

from contextlib import closing

import pytest

from trivet.errors import TopologyError
from trivet.topology import EnginePlan, Plan, make_plan, parse_topology
from trivet.topology.change import check_same_service, compare, difference
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook

SPLIT = "tiers: {prefill: , decode: }\n"


def cpu(cores: int = 8) -> Machine:
    return Machine(tuple(range(cores)), 0, "0.32.0", "cpu", lambda _: True)


def gpu(gpus: int = 4) -> Machine:
    return Machine(tuple(range(16)), gpus, "0.32.0", "cuda", lambda _: True)


def first(text: str, machine: Machine, ports: PortBook | None = None) -> Plan:
    ports = ports or PortBook(lock=False)
    return make_plan(parse_topology(text, "t.yaml"), ports, model="org/model", machine=machine)


def both(before: str, after: str, machine: Machine) -> tuple[Plan, Plan]:
    """The plan of one text, and that of another beside the engines of the first."""
    with closing(PortBook(lock=False)) as ports:
        old = first(before, machine, ports)
        newer = ports.again()
        topology = parse_topology(after, "t.yaml")
        return old, make_plan(topology, newer, model="org/model", machine=machine, running=old.engines)


def changed(before: str, after: str, machine: Machine) -> str:
    old, new = both(before, after, machine)
    return str(compare(old.engines, new.engines))


def steps(before: str, after: str, machine: Machine) -> list[tuple[list[str], list[str]]]:
    old, new = both(before, after, machine)
    found = compare(old.engines, new.engines).steps()
    return [([one.name for one in step.leaving], [one.name for one in step.joining]) for step in found]


# what stays


@pytest.mark.parametrize("machine", [cpu(), gpu()], ids=["cpu", "cuda"])
@pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
def test_the_same_file_is_the_same_engines(machine, connector):
    text = f"{SPLIT}kv: {{connector: {connector}}}\n"
    assert changed(text, text, machine) == "nothing has changed"


@pytest.mark.parametrize("machine", [cpu(), gpu()], ids=["cpu", "cuda"])
@pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
def test_an_engine_more_touches_none_of_the_others(machine, connector):
    """A fresh plan would give decode's GPU and ports to the second prefill engine."""
    kv = f"kv: {{connector: {connector}}}\n"
    assert changed(SPLIT + kv, f"tiers: {{prefill: {{replicas: 2}}, decode: }}\n{kv}", machine) == "prefill-1 is new"


def test_a_new_gpu_engine_takes_what_is_free():
    _, new = both(SPLIT, "tiers: {prefill: {replicas: 2}, decode: }", gpu())
    assert {one.name: one.gpus for one in new.engines} == {"prefill-0": (0,), "decode-0": (1,), "prefill-1": (2,)}
    assert len({one.port for one in new.engines}) == 3


def test_new_cpu_engines_share_the_cores_that_are_left():
    _, new = both("tiers: {mixed: }", "tiers: {mixed: {replicas: 2}}", cpu(8))
    cores = {one.name: one.cores for one in new.engines}
    assert cores["mixed-0"] == first("tiers: {mixed: }", cpu(8)).engines[0].cores
    assert set(cores["mixed-0"]).isdisjoint(cores["mixed-1"])
    assert cores["mixed-1"]


def test_engines_that_share_a_core_stay_there():
    assert changed("tiers: {mixed: {replicas: 3}}", "tiers: {mixed: {replicas: 4}}", cpu(2)) == "mixed-3 is new"


@pytest.mark.parametrize(
    ("engine", "machine", "told"),
    [
        ("{port: 8100}", gpu(), "mixed-0 is replaced (url, --port"),
        ("{gpus: [0]}", gpu(), "mixed-0 is replaced (gpus, CUDA_VISIBLE_DEVICES"),
        ("{cores: [0, 1]}", cpu(), "mixed-0 is replaced (cores, "),
    ],
)
def test_what_another_engine_names_is_given_to_it(engine, machine, told):
    """As in a fresh plan: what the file leaves open gives way to what it says."""
    port = first("tiers: {mixed: }", machine).engines[0].port
    engine = engine.replace("8100", str(port))
    after = f"tiers: {{mixed: {{engines: [{{name: mixed-0}}, {engine[:-1]}, name: other}}]}}}}"
    assert changed("tiers: {mixed: }", after, machine).startswith("other is new, " + told)


def test_more_gpus_for_one_are_a_change():
    text = "tiers: {mixed: {tensor_parallel: 2}}"
    assert changed("tiers: {mixed: }", text, gpu()) == (
        "mixed-0 is replaced (gpus, --tensor-parallel-size, CUDA_VISIBLE_DEVICES)"
    )


# what changes, in words that tell no value


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("{flags: {max-num-seqs: 7}}", "--max-num-seqs"),
        ("{env: {SECRET: x}}", "SECRET"),
        ("{api_key: secret}", "api_key, VLLM_API_KEY"),
        ("{gpu_memory_utilization: 0.5}", "--gpu-memory-utilization"),
        ("{flags: [--enforce-eager]}", "--enforce-eager"),
    ],
)
def test_what_is_different_is_named(engine, told):
    after = f"tiers: {{mixed: {{engines: [{engine}]}}}}"
    assert changed("tiers: {mixed: }", after, gpu()) == f"mixed-0 is replaced ({told})"


def test_an_engine_of_someone_else_is_only_what_is_known_of_it():
    one = "tiers: {mixed: {engines: [{name: a, url: 'http://h:1'}]}}\n"
    assert changed(one, one + "flags: {max-num-seqs: 7}", gpu()) == "nothing has changed"
    assert changed(one, one.replace("h:1", "h:2"), gpu()) == "a is replaced (url)"
    own = "tiers: {mixed: {engines: [{name: a}]}}"
    assert changed(one, own, gpu()).startswith("a is replaced (")


def test_a_difference_is_always_named():
    one = EnginePlan("a", "mixed", "http://h:1", "cuda", "someone else")
    assert difference(one, EnginePlan("a", "mixed", "http://h:1", "cuda", "another host")) == "who starts it"


# in which order


def test_first_comes_what_is_new_then_what_is_replaced_then_what_goes():
    before = "tiers: {mixed: {engines: [{name: a}, {name: b}, {name: c}]}}"
    after = "tiers: {mixed: {engines: [{name: b, env: {X: 1}}, {name: c, env: {X: 1}}, {name: d}]}}"
    assert steps(before, after, gpu()) == [
        ([], ["d"]),
        (["b"], ["b"]),
        (["c"], ["c"]),
        (["a"], []),
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [("gpus: [0]", "gpus: [0]"), ("port: 18100, gpus: [0]", "port: 18100, gpus: [1]")],
    ids=["gpu", "port"],
)
def test_a_new_engine_in_the_place_of_an_old_one_starts_when_that_has_ended(a, b):
    before = f"tiers: {{mixed: {{engines: [{{name: a, {a}}}]}}}}"
    after = f"tiers: {{mixed: {{engines: [{{name: b, {b}}}]}}}}"
    assert steps(before, after, gpu()) == [(["a"], ["b"])]


def test_a_new_engine_in_a_place_of_its_own_starts_first():
    before = "tiers: {mixed: {engines: [{name: a, gpus: [0]}]}}"
    assert steps(before, before.replace("a, gpus: [0]", "b, gpus: [1]"), gpu()) == [([], ["b"]), (["a"], [])]


def test_engines_that_change_places_are_one_step():
    before = "tiers: {mixed: {engines: [{name: a, gpus: [0]}, {name: b, gpus: [1]}, {name: c, gpus: [2]}]}}"
    after = "tiers: {mixed: {engines: [{name: a, gpus: [1]}, {name: b, gpus: [0]}, {name: c, gpus: [3]}]}}"
    assert steps(before, after, gpu()) == [(["a", "b"], ["a", "b"]), (["c"], ["c"])]


def test_an_engine_that_makes_room_on_its_gpu_leaves_before_the_new_one_starts():
    """It gives half of the GPU's memory up, which it can only do by being started anew."""
    before = "tiers: {mixed: {engines: [{name: a, gpus: [0]}]}}"
    after = "tiers: {mixed: {engines: [{name: a, gpus: [0]}, {name: b, gpus: [0]}]}}"
    assert changed(before, after, gpu()) == "b is new, a is replaced (--gpu-memory-utilization)"
    assert steps(before, after, gpu()) == [(["a"], ["a", "b"])]


# what cannot change

PAIR = """\
model: {name: org/model, max_length: 4096}
kv: {connector: TrivetConnector}
tiers:
  prefill:
  decode:
gateway: {port: 8000}
"""


def refusal(before: str, after: str) -> str:
    with pytest.raises(TopologyError) as caught:
        check_same_service(*both(before, after, gpu()))
    assert "\n" not in str(caught.value)
    return caught.value.problem


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("org/model,", "org/other,", "t.yaml:1: model.name cannot change while the service runs"),
        ("4096", "8192", "t.yaml:1: model.max_length cannot change while the service runs"),
        ("TrivetConnector}", "NixlConnector}", "t.yaml:2: kv.connector cannot change while the service runs"),
        (
            "TrivetConnector}",
            "TrivetConnector, options: {lease_s: 9}}",
            "t.yaml:2: kv.options cannot change while the service runs",
        ),
        ("port: 8000", "port: 8001", "t.yaml:6: gateway.port cannot change while the service runs"),
        ("port: 8000", "port: 8000, host: 0.0.0.0", "t.yaml:6: gateway.host cannot change while the service runs"),
        ("port: 8000", "port: 8000, api_keys: [a]", "t.yaml:6: gateway.api_keys cannot change while the service runs"),
        ("port: 8000", "port: 8000, drain_s: 1", "t.yaml:6: gateway.drain_s cannot change while the service runs"),
        (
            "  prefill:",
            "  render: {flags: {reasoning-parser: x}}\n  prefill:",
            "t.yaml:4: tiers.render.flags cannot change while the service runs",
        ),
        (
            "  prefill:",
            "  render:\n    queued: 3\n    servers: ['http://127.0.0.1:9000']\n  prefill:",
            "t.yaml:6: tiers.render.servers cannot change while the service runs",
        ),
        (
            "kv:",
            "kv_events: true\nkv:",
            "t.yaml:2: kv_events cannot change while the service runs",
        ),
        (
            "kv:",
            "flags: {seed: 7}\nkv:",
            "--seed cannot change while the service runs: the gateway renders with it as well",
        ),
        (
            "gateway:",
            "flags: {block-size: 32}\ngateway:",
            "--block-size cannot change while the service runs: an engine that has the new value could not hand over "
            "to one that has the old",
        ),
    ],
)
def test_what_is_not_an_engine_is_refused_by_name(old, new, told):
    assert PAIR.count(old) == 1
    assert refusal(PAIR, PAIR.replace(old, new)) == told


def test_the_limits_of_render_servers_are_refused_by_name_too():
    one = PAIR.replace("  prefill:", "  render: {servers: ['http://a:1']}\n  prefill:")
    other = one.replace("'http://a:1']", "'http://a:1'], timeout_s: 3")
    assert refusal(one, other) == "t.yaml:4: tiers.render.timeout_s cannot change while the service runs"


ANOTHER_KV = "cannot change while the service runs: KV of an engine that has the new value is another than that"


@pytest.mark.parametrize(
    "flag",
    [
        "revision: abc",
        "quantization: fp8",
        "hf-overrides: '{\"rope_theta\": 1}'",
        "hf-overrides.rope_theta: 1",
        "load-format: dummy",
        "rope-scaling: x",
        "rope_theta: 7",
    ],
)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gateway:", "flags: {FLAG}\ngateway:"),
        ("  decode:", "  decode: {flags: {FLAG}}"),
        ("  prefill:", "  prefill: {engines: [{}, {flags: {FLAG}}]}"),
    ],
    ids=["topology", "tier", "engine"],
)
def test_what_makes_other_kv_is_refused_by_name(flag, old, new):
    name = flag.split(":")[0].replace("_", "-")
    after = PAIR.replace(old, new.replace("FLAG", flag))
    assert refusal(PAIR, after).startswith(f"--{name} {ANOTHER_KV}")
    if old == "gateway:":
        assert refusal(after, PAIR).startswith(f"--{name} {ANOTHER_KV}")


def test_an_engine_that_was_unlike_the_others_may_go():
    before = PAIR.replace("  prefill:", "  prefill: {engines: [{}, {flags: {load-format: dummy}}]}")
    check_same_service(*both(before, PAIR, gpu()))


def test_what_makes_other_kv_may_change_where_nobody_hands_over():
    text = "tiers: {mixed: }\ngateway: {plane: text}\n"
    check_same_service(*both(text, text + "flags: {quantization: fp8}\n", gpu()))


@pytest.mark.parametrize("connector", ["TrivetConnector", "NixlConnector"])
def test_ranks_that_meet_one_to_one_cannot_be_more(connector):
    before = PAIR.replace("TrivetConnector", connector)
    after = before.replace("prefill:", "prefill: {tensor_parallel: 2}").replace(
        "decode:", "decode: {tensor_parallel: 2}"
    )
    if connector == "TrivetConnector":
        assert refusal(before, after) == (
            "the number of tensor-parallel ranks cannot change while the service runs: TrivetConnector hands over from "
            "rank to rank"
        )
    else:
        check_same_service(*both(before, after, gpu()))


def test_a_gateway_without_connector_gets_none():
    before = "tiers: {mixed: }\n"
    assert refusal(before, "tiers: {mixed: , prefill: , decode: }\n").startswith(
        "t.yaml:1: tiers.prefill: this service was started without a prefill tier"
    )


def test_a_tier_may_go_and_come_back():
    colocated = PAIR.replace("  prefill:\n  decode:\n", "  mixed:\n")
    old, new = both(PAIR, colocated, gpu())
    check_same_service(old, new)
    assert str(compare(old.engines, new.engines)) == "mixed-0 is new, prefill-0 goes, decode-0 goes"
    check_same_service(old, first(PAIR, gpu()))


def test_flags_of_engines_that_render_themselves_may_change():
    text = PAIR.replace("port: 8000", "port: 8000, plane: text")
    check_same_service(*both(text, "flags: {seed: 7}\n" + text, gpu()))
