"""Which engines a check asks."""

import pytest

from trivet.check import engines
from trivet.topology import make_plan, parse_topology
from trivet.topology.ports import PortBook

TOPOLOGY = """\
model: {name: org/model}
kv: {connector: CONNECTOR}
tiers:
  prefill: {engines: [PREFILL]}
  decode: {engines: [DECODE]}
"""
ELSEWHERE = {
    "PREFILL": "{url: 'http://p:1', api_key: secret, kv_address: '/run/p.sock'}",
    "DECODE": "{url: 'http://d:2'}",
}


def plan(connector: str = "TrivetConnector", **engines_of: str):
    text = TOPOLOGY.replace("CONNECTOR", connector)
    for word, engine in (engines_of or ELSEWHERE).items():
        text = text.replace(word, engine)
    return make_plan(parse_topology(text), PortBook(lock=False), model="org/model")


def test_somebody_elses_are_where_the_topology_says():
    prefill, decode = engines.of_urls(plan("NixlConnector", PREFILL=ELSEWHERE["PREFILL"].replace(
        ", kv_address: '/run/p.sock'", ""), DECODE=ELSEWHERE["DECODE"]))  # fmt: skip
    assert (prefill.tier, prefill.url, prefill.api_key) == ("prefill", "http://p:1", "secret")
    assert (decode.tier, decode.url, decode.api_key, decode.ready) == ("decode", "http://d:2", None, True)


def told(name: str, tier: str, url: str) -> dict:
    return {"name": name, "tier": tier, "url": url, "ready": True, "generation": 3}


def test_a_services_engines_have_its_ports_and_the_topologys_keys():
    started = plan(PREFILL="{device: sim, api_key: secret}", DECODE="{device: sim}")
    names = [one.name for one in started.engines]
    views = engines.of_service(
        started, [told(names[0], "prefill", "http://127.0.0.1:8123"), told(names[1], "decode", "http://127.0.0.1:8124")]
    )
    assert views is not None
    assert [one.url for one in views] == ["http://127.0.0.1:8123", "http://127.0.0.1:8124"]
    assert views[0].kv_address == started.connector.peer_address(8123)
    assert views[0].generation == 3
    assert views[0].api_key == started.engines[0].api_key


@pytest.mark.parametrize(
    "those",
    [
        [],
        [told("prefill-0", "prefill", "http://a:1")],
        [told("prefill-0", "prefill", "http://a:1"), told("other", "decode", "http://a:2")],
        [told("prefill-0", "decode", "http://a:1"), told("decode-0", "prefill", "http://a:2")],
    ],
    ids=["none", "fewer", "another", "other tiers"],
)
def test_another_services_engines_are_not_taken(those):
    started = plan(PREFILL="{device: sim}", DECODE="{device: sim}")
    assert [one.name for one in started.engines] == ["prefill-0", "decode-0"]
    assert engines.of_service(started, those) is None
