"""``kv_events``: what engines are told, and where the gateway listens."""

import json
from pathlib import Path

import pytest

from trivet.errors import MissingPackageError, PortInUseError, TopologyError, TrivetError
from trivet.sim.options import parse
from trivet.topology import make_plan, parse_topology
from trivet.topology.kv_events import flag_value_of, make_folders, on_the_network, own_sockets
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook

MACHINE = Machine((0, 1), 0, "0.32.0", "cpu", lambda _: True)
SIMS = """\
model: {name: m}
kv_events: true
kv: {connector: NixlConnector}
tiers:
  prefill: {device: sim, replicas: 2}
  decode: {device: sim}
"""
MIXED = "model: {name: m}\nkv_events: true\ntiers: {mixed: {device: sim, engines: [%s]}}\n"


def plan_of(text: str, machine: Machine = MACHINE, **more):
    return make_plan(parse_topology(text, "t.yaml"), PortBook(lock=False), model="m", machine=machine, **more)


def config_of(engine) -> dict | None:
    told = [one.value for one in engine.settings if one.name == "kv-events-config"]
    return json.loads(told[0]) if told else None


def refused(text: str, kind=TopologyError, **more) -> str:
    with pytest.raises(kind) as caught:
        plan_of(text, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_off_unless_asked_for():
    plan = plan_of(SIMS.replace("kv_events: true\n", ""))
    assert [(one.kv_events, config_of(one)) for one in plan.engines] == [(None, None)] * 3


def test_each_engine_here_has_sockets_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    plan = plan_of(SIMS)
    assert [one.kv_events for one in plan.engines] == [
        (f"ipc://{tmp_path}/trivet/{one.port}-events.sock", f"ipc://{tmp_path}/trivet/{one.port}-replay.sock")
        for one in plan.engines
    ]
    for one in plan.engines:
        assert config_of(one) == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": one.kv_events[0],
            "replay_endpoint": one.kv_events[1],
        }
        settings, _, notes = parse(one.command()[3:])
        assert (settings.kv_events.endpoint, settings.kv_events.replay_endpoint) == one.kv_events
        assert notes == []


def test_vllm_takes_the_flag_and_listens_at_such_addresses():
    publisher = pytest.importorskip("vllm.distributed.kv_events").ZmqEventPublisher
    from vllm.config.kv_events import KVEventsConfig

    for addresses in (own_sockets(8100), on_the_network("*", 5557)):
        config = KVEventsConfig(**json.loads(flag_value_of(addresses)))
        assert (config.endpoint, config.replay_endpoint) == addresses
        bound = getattr(publisher, "_is_bind_endpoint", None)  # vLLM 0.30 decides it in a longer function
        assert bound is None or bound(config.endpoint)
    if bound is not None:
        assert not bound("tcp://127.0.0.1:5557"), "then there would be no need for sockets"


def test_a_port_is_open_to_the_network_and_heard_at_the_engines_name():
    plan = plan_of(MIXED % "{host: node-2, port: 8100, kv_events_port: 5557}, {kv_events_port: 5601}")
    assert [one.kv_events for one in plan.engines] == [
        ("tcp://node-2:5557", "tcp://node-2:5558"),
        ("tcp://127.0.0.1:5601", "tcp://127.0.0.1:5602"),
    ]
    assert [config_of(one)["endpoint"] for one in plan.engines] == ["tcp://*:5557", "tcp://*:5601"]
    assert [config_of(one)["replay_endpoint"] for one in plan.engines] == ["tcp://*:5558", "tcp://*:5602"]
    assert on_the_network("::1", 1) == ("tcp://[::1]:1", "tcp://[::1]:2")


def test_ports_that_are_wanted_twice_are_refused():
    text = MIXED % "{kv_events_port: 5601}, {kv_events_port: 5602}"
    assert "port 5602 is wanted twice, the second time for engine mixed-1 (KV events)" in refused(text, PortInUseError)


def test_an_engine_of_someone_else():
    url = "url: http://10.0.0.7:8000"
    plan = plan_of(MIXED % f"{{{url}, kv_events: {{endpoint: 'tcp://10.0.0.7:1', replay: 'ipc:///run/r'}}}}, {{{url}}}")
    assert [one.kv_events for one in plan.engines] == [("tcp://10.0.0.7:1", "ipc:///run/r"), None]
    assert plan.notes == ("mixed-1: where it publishes KV events is not said: what it has cached is guessed",)


@pytest.mark.parametrize(
    ("engine", "note"),
    [
        ("{flags: {enable-prefix-caching: false}}", "keeps no prefix cache"),
        ("{flags: {data-parallel-size: 2}}", "data-parallel ranks"),
    ],
)
def test_an_engine_that_could_not_tell_is_not_asked_to(engine, note):
    plan = plan_of(MIXED % engine)
    assert (plan.engines[0].kv_events, config_of(plan.engines[0])) == (None, None)
    assert note in plan.notes[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (MIXED % "{}" + "gateway: {plane: text}\n", "kv_events needs gateway.plane: tokens"),
        (MIXED % "{host: node-2, port: 8100}", "give it a kv_events_port"),
        (MIXED % "{flags: {kv-events-config: '{}'}}", "kv_events sets --kv-events-config, and flags do too"),
        (MIXED % "{flags: [--kv-events-config.topic, a]}", "kv_events sets --kv-events-config, and flags do too"),
        (MIXED % "{kv_events: {endpoint: 'tcp://a:1', replay: 'tcp://a:2'}}", "there is kv_events_port"),
        (MIXED % "{url: 'http://a:1', kv_events_port: 5}", "kv_events_port means nothing"),
        (MIXED % "{url: 'http://a:1', kv_events: {endpoint: 'tcp://a:1'}}", "replay"),
        (
            MIXED % "{url: 'http://a:1', kv_events: {endpoint: 'tcp://*:1', replay: 'tcp://a:2'}}",
            "'tcp://*:1' is no address",
        ),
        (MIXED % "{url: 'http://a:1', kv_events: {endpoint: 'tcp://a:1', replay: 'tcp://a:99999'}}", "is no address"),
        (MIXED % "{kv_events_port: 65535}", "65534"),
        (
            (MIXED % "{kv_events_port: 5601}").replace("kv_events: true\n", ""),
            "kv_events_port of an engine means nothing without kv_events: true",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text, problem):
    assert problem in refused(text)


def test_flags_of_ones_own_are_left_alone_without_it():
    text = (MIXED % '{flags: {kv-events-config: \'{"topic": "a"}\'}}').replace("kv_events: true\n", "")
    assert plan_of(text).engines[0].own_flags == ("--kv-events-config", '{"topic": "a"}')


@pytest.mark.parametrize(("missing", "name"), [("zmq", "pyzmq"), ("msgspec", "msgspec")])
def test_packages_that_are_missing_are_named(missing, name):
    bare = Machine((0, 1), 0, "0.32.0", "cpu", lambda package: package != missing)
    assert f"kv_events needs the package {name} -> pip install {name}" in refused(
        SIMS, MissingPackageError, machine=bare
    )
    assert plan_of(SIMS.replace("kv_events: true\n", ""), bare).engines


# folders


def config_in(folder: Path) -> str:
    return flag_value_of((f"ipc://{folder}/e", f"ipc://{folder}/r"))


def test_the_folder_of_sockets_is_made_for_this_user_only(tmp_path):
    make_folders(config_in(tmp_path / "a" / "b"))
    make_folders(config_in(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_folder_in_which_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(TrivetError, match="others may write in") as caught:
        make_folders(config_in(tmp_path))
    assert f"chmod 700 {tmp_path}" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrivetError, match=r"KV events: .*/file/a: Not a directory"):
        make_folders(config_in(tmp_path / "file" / "a"))


@pytest.mark.parametrize("config", ["", "[]", "{", '{"endpoint": 5}', flag_value_of(on_the_network("*", 5557))])
def test_other_addresses_need_no_folder(config):
    make_folders(config)
