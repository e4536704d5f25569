import copy
import re

import pytest
import yaml

from trivet.errors import TopologyError
from trivet.topology import Engine, Gateway, Kv, Model, load_topology, parse_topology
from trivet.topology.model import Limits, Split


def refusal(text: str) -> str:
    """What a person reads about this file."""
    with pytest.raises(TopologyError) as caught:
        parse_topology(text, "trivet.yaml")
    return str(caught.value)


SPLIT = "tiers:\n  prefill:\n  decode:\n"


REFUSALS = [
    # not a topology at all
    ("", "trivet.yaml: the file is empty -> `trivet topology init` writes one"),
    ("# only a comment\n", "trivet.yaml: the file is empty -> `trivet topology init` writes one"),
    ("- model\n", "trivet.yaml:1: a topology is a mapping (model, kv, tiers, gateway)"),
    ("model\n", "trivet.yaml:1: a topology is a mapping (model, kv, tiers, gateway)"),
    ("model:\n  name: [a\n", "trivet.yaml:3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("model: {}\n\tkv: {}\n", "trivet.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
    ("a: 1\n---\nb: 2\n", "trivet.yaml:2: not valid YAML: but found another document"),
    # repeated keys
    (SPLIT + "model: {}\nmodel: {}\n", "trivet.yaml:5: 'model' is given twice -> YAML would keep the last"),
    (
        "tiers:\n  mixed:\n    replicas: 1\n    replicas: 2\n",
        "trivet.yaml:4: 'replicas' is given twice -> YAML would keep the last",
    ),
    (
        "tiers:\n  mixed:\n    engines:\n    - {name: a}\n    - {name: b,\n       name: c}\n",
        "trivet.yaml:6: 'name' is given twice -> YAML would keep the last",
    ),
    # split or not
    (
        SPLIT + "gateway:\n  port: 1\n  split: sometimes\n",
        "trivet.yaml:6: gateway.split: 'sometimes' is no way to split; write auto, always or never, or a mapping such "
        "as {min_uncached_tokens: 256, max_handover_s: 1.0}",
    ),
    (
        SPLIT + "gateway:\n  split: {mode: sometimes}\n",
        "trivet.yaml:5: gateway.split.mode: must be 'auto', 'always' or 'never' (got 'sometimes')",
    ),
    (
        SPLIT + "gateway:\n  split:\n    mode: always\n    max_handover_s: 2\n",
        "trivet.yaml:5: gateway.split: with mode always, max_handover_s means nothing: leave it out, or set mode: auto",
    ),
    (
        SPLIT + "gateway:\n  split:\n    min_uncached_tokens: 0\n",
        "trivet.yaml:6: gateway.split.min_uncached_tokens: must be at least 1 (got 0)",
    ),
    # fields that do not exist
    (
        SPLIT + "gatway: {}\n",
        "trivet.yaml:4: gatway: no such field (there are: env, flags, gateway, kv, kv_events, model, tiers)",
    ),
    (
        SPLIT + "model:\n  nmae: x\n",
        "trivet.yaml:5: model.nmae: no such field (there are: dtype, max_length, name, served_names, tokenizer)",
    ),
    (
        "tiers:\n  prefil: {}\n",
        "trivet.yaml:2: tiers.prefil: no such field (there are: decode, mixed, prefill, render)",
    ),
    (
        "tiers:\n  mixed:\n    engines:\n      - name: a\n        gpu: 0\n",
        "trivet.yaml:5: tiers.mixed.engines.0.gpu: no such field (there are: advertise, api_key, bind, cores, "
        "cpu_kv_gib, device, env, flags, gpu_memory_utilization, gpus, host, kv_address, kv_events, "
        "kv_events_port, kv_port, name, port, tensor_parallel, url)",
    ),
    # values that cannot be
    ("model: {}\n", "trivet.yaml:1: tiers: this is needed"),
    (
        SPLIT + "gateway:\n  port: many\n",
        "trivet.yaml:5: gateway.port: must be a whole number (got 'many')",
    ),
    (
        SPLIT + "gateway:\n  host: 0.0.0.0\n  port: 70000\n",
        "trivet.yaml:6: gateway.port: must be at most 65535 (got 70000)",
    ),
    (
        SPLIT + "gateway: {port: 70000, workers: 0}\n",
        "trivet.yaml:4: gateway.port: must be at most 65535 (got 70000) (1 more)",
    ),
    (
        "tiers:\n  mixed:\n    gpus:\n      - 0\n      - -1\n",
        "trivet.yaml:5: tiers.mixed.gpus.1: must be at least 0 (got -1)",
    ),
    (
        SPLIT + "kv:\n  connector: TrivetConnector\n  options:\n    movers: [fax]\n",
        "trivet.yaml:6: kv.options: movers is a list of shm, cuda_p2p, pinned, the preferred one first (got ['fax'])",
    ),
    (
        SPLIT + "kv:\n  options:\n    movers: [shm, shm]\n",
        "trivet.yaml:5: kv.options: movers names shm twice; say each once, the preferred one first",
    ),
    (
        SPLIT.replace("prefill:", "prefill:\n    engines:\n      - kv_address: /tmp/a.sock"),
        "trivet.yaml:4: tiers.prefill.engines.0.kv_address: '/tmp/a.sock' is no address: say unix:/PATH, as KV moves "
        "within one host",
    ),
    (
        SPLIT.replace("prefill:", "prefill:\n    engines:\n      - kv_address: unix:/a.sock")
        + "kv:\n  connector: NixlConnector\n",
        "trivet.yaml:4: tiers.prefill.engines.0.kv_address: kv_address is TrivetConnector's, and kv.connector is "
        "NixlConnector -> leave kv_address out, or kv: {connector: TrivetConnector}",
    ),
    (
        SPLIT.replace("decode:", "decode:\n    engines:\n      - name: a\n        kv_port: 5600"),
        "trivet.yaml:6: tiers.decode.engines.0.kv_port: kv_port is NixlConnector's, and kv.connector is "
        "TrivetConnector -> leave kv_port out, or kv: {connector: NixlConnector}",
    ),
    (
        "tiers:\n  mixed:\n    engines:\n      - name: a\n        kv_address: unix:/a.sock\n",
        "trivet.yaml:5: tiers.mixed.engines.0.kv_address: a mixed engine hands over no KV, so kv_address means nothing "
        "-> leave kv_address out",
    ),
    (
        "kv: {connector: NixlConnector}\ntiers:\n  mixed:\n    engines:\n      - kv_port: 5600\n",
        "trivet.yaml:5: tiers.mixed.engines.0.kv_port: a mixed engine hands over no KV, so kv_port means nothing -> "
        "leave kv_port out",
    ),
    (
        "tiers:\n  mixed:\n    engines:\n      - name: a b\n",
        "trivet.yaml:4: tiers.mixed.engines.0.name: 'a b' is no name: letters, digits and _ . - make one, a letter or "
        "digit first",
    ),
    (
        SPLIT + "gateway:\n  otlp: http://a:99999\n",
        "trivet.yaml:5: gateway.otlp: a collector's URL looks like http://host:4318, with a port from 1 to 65535",
    ),
    (
        SPLIT + 'gateway:\n  api_keys: [a, ""]\n',
        "trivet.yaml:5: gateway.api_keys.1: must be text that is not empty (got '')",
    ),
    (
        SPLIT + "gateway:\n  api_keys:\n",
        "trivet.yaml:5: gateway.api_keys: there is nothing behind it: give a value, or leave the key out",
    ),
    (
        SPLIT.replace("prefill:", "prefill:\n    engines:\n      - kv_address: unix:/" + "x" * 102),
        f"trivet.yaml:4: tiers.prefill.engines.0.kv_address: the path in {'unix:/' + 'x' * 102!r} has 103 bytes; "
        "choose one of at most 102 (Unix sockets have 107, and ranks append their number)",
    ),
    (
        SPLIT + "kv:\n  connector: MagicConnector\n",
        "trivet.yaml:5: kv.connector: unknown connector 'MagicConnector'; Trivet speaks NixlConnector, TrivetConnector",
    ),
    (
        "tiers:\n  mixed:\n    flags: [--port, '1']\n",
        "trivet.yaml:3: tiers.mixed.flags: --port is set by Trivet: use port instead",
    ),
    (
        "tiers:\n  mixed:\n    flags: --enforce-eager\n",
        "trivet.yaml:3: tiers.mixed.flags: flags are a list (['--enforce-eager', '--block-size', '64']) or a "
        "mapping, not one string",
    ),
    # engines
    (
        "tiers:\n  mixed:\n    engines:\n      - url: http://a:1\n        gpus: [0]\n",
        "trivet.yaml:4: tiers.mixed.engines.0: an engine with url is not started by Trivet, so gpus means nothing",
    ),
    (
        "tiers:\n  mixed:\n    engines:\n      - url: a:1\n",
        "trivet.yaml:4: tiers.mixed.engines.0.url: an engine's url looks like http://host:port, with a port from 1 to "
        "65535",
    ),
    (
        "tiers:\n  mixed:\n    engines:\n      - name: a\n      - name: b\n        host: node-2\n",
        "trivet.yaml:5: tiers.mixed.engines.1: an engine on another host needs a port, so that the gateway knows "
        "where it is",
    ),
    (
        "tiers:\n  mixed:\n    replicas: 1\n    engines: []\n",
        "trivet.yaml:2: tiers.mixed: give replicas or a list of engines, not both",
    ),
    (
        "tiers:\n  prefill: {}\n  decode:\n    engines:\n      - name: prefill-0\n",
        "trivet.yaml:5: two engines are named 'prefill-0'",
    ),
    # tiers that do not belong together
    ("model: {}\ntiers: {}\n", "trivet.yaml:2: tiers: no engine -> add prefill and decode, or mixed"),
    (
        "tiers:\n  mixed: {replicas: 0}\n",
        "trivet.yaml:1: tiers: no engine -> add prefill and decode, or mixed",
    ),
    (
        "tiers:\n  mixed: {}\n  prefill: {}\n",
        "trivet.yaml:3: tiers.prefill: prefill without decode has nobody to hand KV to -> add tiers.decode, or "
        "make it tiers.mixed",
    ),
    (
        "tiers:\n  decode:\n    replicas: 2\n",
        "trivet.yaml:2: tiers.decode: decode without prefill would do both -> add tiers.prefill, or make it "
        "tiers.mixed",
    ),
    (
        "tiers:\n  prefill: {replicas: 0}\n  decode: {}\n",
        "trivet.yaml:3: tiers.decode: decode without prefill would do both -> add tiers.prefill, or make it "
        "tiers.mixed",
    ),
]


@pytest.mark.parametrize(("text", "expected"), REFUSALS, ids=[expected for _, expected in REFUSALS])
def test_what_is_wrong_is_said_with_its_line_and_field(text, expected):
    assert refusal(text) == expected


WRONG = [
    *(f"gateway: {{{field}: {value}}}" for field in Gateway.model_fields for value in ("3.5", "{a: 1}", "[[]]", "")),
    *(f"model: {{{field}: {value}}}" for field in Model.model_fields for value in ("3.5", "{a: 1}", "[[]]", "")),
    *(f"gateway: {{limits: {{{field}: {value}}}}}" for field in Limits.model_fields for value in ("'1'", "-1", ".nan")),
    *(f"gateway: {{split: {{{field}: {value}}}}}" for field in Split.model_fields for value in ("x", "-1", "[]")),
    *(f"{field}: {value}" for field in ("model", "kv", "flags", "env", "gateway") for value in ("3", "x", "[[1]]")),
    *(f"kv: {{{field}: {value}}}" for field in Kv.model_fields for value in ("3", "x", "[]")),
    "gateway: {allow: [all]}",
    "1: 2",
]
WRONG_ENGINES = [
    f"{field}: {value}" for field in Engine.model_fields for value in ("3.5", "x y", "{a: {b: c}}", "[[]]", "-1")
]
PYDANTICS = re.compile(r"[Ii]nput|pattern|[Pp]ars(e|ing)|valid |instance|\btype|Value error|\bdict|\n")
"""What a person who writes YAML need not know of."""


@pytest.mark.parametrize(
    "text",
    [f"{SPLIT}{one}\n" for one in WRONG]
    + [f"kv: {{connector: NixlConnector}}\ntiers:\n  mixed:\n    engines:\n      - {one}\n" for one in WRONG_ENGINES],
)
def test_no_value_is_refused_in_pydantics_words(text):
    told = None
    try:
        parse_topology(text, "t.yaml")
    except TopologyError as error:
        told = str(error)
    if told is not None:  # some fields take some of these
        assert re.match(r"t\.yaml:\d+: ", told)
        assert not PYDANTICS.search(told), told


@pytest.mark.parametrize(
    "place",
    [
        ("model",),
        ("kv",),
        ("kv", "options"),
        ("env",),
        ("flags",),
        ("gateway",),
        ("gateway", "limits"),
        ("gateway", "split"),
        ("gateway", "allow"),
        ("model", "served_names"),
        ("tiers", "render"),
        ("tiers", "render", "env"),
        ("tiers", "prefill", "env"),
        ("tiers", "prefill", "gpus"),
        ("tiers", "mixed", "flags"),
    ],
)
def test_a_key_whose_contents_are_commented_out_is_as_if_it_were_absent(place):
    tiers = {"tiers": {"prefill": {}, "decode": {}, "mixed": {}}}
    absent, empty = copy.deepcopy(tiers), copy.deepcopy(tiers)
    inner, other = empty, absent
    for step in place[:-1]:
        inner, other = inner.setdefault(step, {}), other.setdefault(step, {})
    inner[place[-1]] = None
    read = [parse_topology(yaml.safe_dump(one)).model_dump() for one in (empty, absent)]
    assert read[0] == read[1]


def test_an_alias_of_what_stands_around_it_is_refused():
    assert refusal("tiers: &a\n  prefill: *a\n").startswith("trivet.yaml:2: tiers.prefill.prefill: no such field")


def test_deep_nesting_is_refused():
    assert refusal("[" * 1000).startswith("trivet.yaml: not valid YAML: maximum recursion depth exceeded")


def test_a_whole_topology_is_read():
    topology = parse_topology(SPLIT + "model: {name: org/model}\ngateway: {port: 0}\nflags: {seed: 1}\n")
    assert topology.model.name == "org/model"
    assert topology.gateway.port == 0
    assert topology.flags == ["--seed", "1"]
    assert [len(topology.tier(name).listed()) for name in ("prefill", "decode")] == [1, 1]
    assert topology.tier("mixed") is None


def test_values_may_be_shared_by_anchors():
    topology = parse_topology("tiers:\n  prefill: &same {flags: [--seed, '1']}\n  decode: *same\n")
    assert topology.tiers.prefill == topology.tiers.decode


def test_a_topology_knows_the_lines_of_its_fields():
    topology = parse_topology("tiers:\n  mixed:\n    engines:\n      - name: a\n      - name: b\n", "f.yaml")
    assert topology.where("tiers", "mixed", "engines", 1) == "f.yaml:5"
    assert topology.where("tiers", "mixed", "engines", 1, "name") == "f.yaml:5"


def test_a_field_that_is_not_in_the_file_is_placed_at_what_is_around_it():
    topology = parse_topology("model: {}\ntiers:\n  mixed:\n    replicas: 2\n", "f.yaml")
    assert topology.where("tiers", "mixed", "engines", 1) == "f.yaml:3"
    assert topology.where("gateway") == "f.yaml:1"


def test_a_file_is_read_and_named(tmp_path):
    path = tmp_path / "trivet.yaml"
    path.write_text("tiers: {mixed: {}}\n")
    assert load_topology(path).where("tiers") == f"{path}:1"


def test_a_file_that_is_missing_is_named_with_the_mend(tmp_path):
    path = tmp_path / "trivet.yaml"
    with pytest.raises(TopologyError) as caught:
        load_topology(path)
    assert str(caught.value) == f"{path}: no such file -> `trivet topology init` writes one"


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TopologyError, match=f"^{tmp_path}: cannot be read: .*Is a directory"):
        load_topology(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "trivet.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match=f"^{path}: cannot be read: .*utf-8"):
        load_topology(path)


def test_a_topology_error_ends_a_command_with_status_2():
    with pytest.raises(TopologyError) as caught:
        parse_topology("")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("date", ["2026-10-01", "2026-13-40"])
def test_what_looks_like_a_date_is_a_name(date):
    assert parse_topology(f"model: {{name: {date}}}\n{SPLIT}").model.name == date
