"""What docs/dashboards asks Prometheus for: only what gateways and engines expose, and all that gateways do."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from trivet.gateway.metrics import GatewayMetrics, Gauges, Rendered
from trivet.journal import GenerationRecord, RequestRecord
from trivet.routing.engines import Engines, EngineView
from trivet.routing.held import Held
from trivet.routing.proofs import Proof
from trivet.sim.pool import BlockPool
from trivet.sim.settings import SimSettings
from trivet.sim.stats import Stats
from trivet.topology import parse_topology

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs/dashboards/trivet.json").read_text())
RULES = yaml.safe_load((ROOT / "docs/dashboards/alerts.yaml").read_text())
OF_PROMETHEUS = {"instance", "job", "le"}
"""Labels that it adds, and that of buckets."""

Samples = dict[str, set[str]]
"""Names as expressions have them, and their labels."""


def gateways() -> Samples:
    """What a gateway exposes when it has served a request, and has asked render servers."""
    metrics, engines = GatewayMetrics(Held(), has_render_servers=True), Engines()
    owner = RequestRecord("r", "/v1/completions", arrived_s=1.0)
    engines.update([EngineView("p", "prefill", "http://p", True), EngineView("d", "decode", "http://d", True)])
    stamps = {"prefill_start_s": 2.0, "prefill_end_s": 3.0, "decode_start_s": 2.0, "decode_first_s": 3.5}
    record = GenerationRecord("g", 9, 2.0, True, True, split_reason="long_prompt", prefill_engine="p", **stamps)
    record.decode_engine, record.first_token_s, record.end_s = "d", 3.0, 4.0
    record.cache_known_by = "guess"
    for tokens in (1, 2, 5):
        record.gaps.note(tokens)
    metrics.ended(record, owner)
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.queue_wait.observe(0.0)
    metrics.canaries.labels("good").inc()
    engines.guarded = True
    engines.board.note_proof(*engines.all(), Proof.GOOD)
    metrics.count_rendering(lambda: Rendered("tokenizers"))
    servers = metrics.of_render_servers
    assert servers is not None
    servers.asked("http://r", "ok", 0.1)
    servers.local("media")
    servers.refused("queue_full")
    servers.running("http://r", 1)
    servers.used("http://r", True)
    return exposed(metrics.text(engines, Gauges(0, 0, 0, 0, 0)).decode())


def engines() -> Samples:
    """What engines expose under vLLM's names, and TrivetConnector's beside them."""
    found: Samples = {}
    for connector in ("TrivetConnector", "NixlConnector"):
        settings = dataclasses.replace(SimSettings(), kv_connector=connector)
        found |= exposed(Stats(settings).text(BlockPool(8), running=0, waiting=0, fetching=0))
    source = (ROOT / "src/trivet/transfer/stats.py").read_text()  # importing it imports vLLM
    for kind, name, rest in re.findall(r'(counter|histogram|gauge)\(\s*"(vllm:\w+)",([^)]*)\)', source):
        suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[kind]
        extra = {label for label in ("mover", "reason") if label in rest}
        found |= {name + suffix: {"model_name", "engine", *extra} for suffix in suffixes}
    return found


def exposed(text: str) -> Samples:
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


GATEWAY, ENGINES = gateways(), engines()
KNOWN = GATEWAY | ENGINES

PANELS = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
VARIABLES = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
EXPRESSIONS = {
    **{f"{one['id']} {one['title']} {target['refId']}": target["expr"] for one in PANELS for target in one["targets"]},
    **{f"variable {one['name']}": one["definition"] for one in VARIABLES},
    **{rule["alert"]: rule["expr"] for rule in ALERTS},
}


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:trivet_\w+|vllm:\w+)", expression))


def labels_in(expression: str) -> set[str]:
    matched = {
        label for braces in re.findall(r"{([^}]*)}", expression) for label in re.findall(r"(\w+)\s*[=!]", braces)
    }
    return matched | {one.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for one in by.split(",")}


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_every_metric_asked_for_exists_with_its_labels(where):
    expression = EXPRESSIONS[where]
    names = names_in(expression)
    assert names, expression
    assert names - set(KNOWN) == set()
    assert labels_in(expression) <= OF_PROMETHEUS.union(*(KNOWN[name] for name in names))
    assert expression.count("(") == expression.count(")")


def family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count|total)$", "", name)


def test_everything_a_gateway_exposes_is_on_the_dashboard():
    shown = {family(name) for one in PANELS for target in one["targets"] for name in names_in(target["expr"])}
    assert {family(name) for name in GATEWAY} - shown == set()
    own = {family(name) for name in ENGINES if name.startswith("vllm:trivet_")}
    assert own - shown == set()


def test_the_operations_page_tells_of_everything_a_gateway_exposes():
    page = (ROOT / "docs/operations.md").read_text()
    told = {family(name) for name in re.findall(r"^\| `(trivet_\w+)` \|", page, re.MULTILINE)}
    assert told == {family(name) for name in GATEWAY}
    alerts = set(re.findall(r"^\| `(Trivet\w+)` \|", page, re.MULTILINE))
    assert alerts == {rule["alert"] for rule in ALERTS}


def test_the_example_scrapes_the_ports_that_its_topology_names():
    page = (ROOT / "docs/operations.md").read_text()
    section = page.partition("### Dashboard and alerts")[2].partition("| Alert |")[0]
    topology, scrape = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    named = parse_topology(topology)
    jobs = {job["job_name"]: job["static_configs"] for job in yaml.safe_load(scrape)["scrape_configs"]}
    ports = {
        name: [int(target.rpartition(":")[2]) for config in configs for target in config["targets"]]
        for name, configs in jobs.items()
    }
    engines = [*named.tiers.prefill.listed(), *named.tiers.decode.listed()]
    assert ports == {"trivet-gateway": [named.gateway.port], "trivet-engines": [one.port for one in engines]}
    assert {named.gateway.host, *(one.bind for one in engines)} == {"0.0.0.0"}


def test_the_dashboard_is_one_that_grafana_imports():
    assert DASHBOARD["uid"] == "trivet"
    assert DASHBOARD["title"] == "Trivet"
    assert isinstance(DASHBOARD["schemaVersion"], int)
    ids = [one["id"] for one in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    (source,) = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "datasource"]
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    used = [one["datasource"] for panel in PANELS for one in (panel, *panel["targets"])]
    assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in used)
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    asked = {name for where in EXPRESSIONS.values() for name in re.findall(r"\$(\w+)", where)}
    assert asked <= variables


def test_panels_do_not_lie_over_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_are_rules_that_prometheus_takes(rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert labels <= OF_PROMETHEUS.union(*(KNOWN[name] for name in names_in(rule["expr"])))


def test_alerts_have_names_of_their_own():
    assert set(RULES) == {"groups"}
    names = [rule["alert"] for rule in ALERTS]
    assert len(names) == len(set(names))
