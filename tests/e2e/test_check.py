"""``trivet check`` over real engines: a good pair passes, and what is wrong with a pair has its name.

The shared engines show a good pair, and wrong KV on the same pair. Pairs that differ on purpose have decode engines of
their own, which all meet one prefill engine.
"""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from trivet.check import engines
from trivet.check.compatible import NAMES
from trivet.check.run import Report, Wish, check
from trivet.check.verdict import Finding, Level
from trivet.fleet.supervisor import Fleet
from trivet.topology import make_plan, parse_topology
from trivet.topology.ports import PortBook

pytestmark = pytest.mark.e2e

CANARY = ("canary-error", "wrong-tokens", "recompute", "bytes", "handover", "freed")
COMPARED = [name for name in NAMES if name != "connector"]


def named(report: Report, name: str, about: str | None = None) -> Finding:
    found = [one for one in report.findings if one.name == name and about in (None, one.about)]
    assert len(found) == 1, (name, found)
    return found[0]


def checked(deployment) -> Report:
    plan = deployment.plan
    views = engines.of_fleet(status.facts() for status in deployment.service.fleet.engines.values())
    return asyncio.run(check(views, plan.connector, plan.served_names[0], model_path=plan.model, wish=Wish()))


# the shared pair


def test_a_good_pair_passes(deployment, conftest):
    report = checked(deployment)
    assert {name: named(report, name).level for name in CANARY} == dict.fromkeys(CANARY, Level.PASS)
    assert {name: named(report, name).level for name in COMPARED} == dict.fromkeys(COMPARED, Level.PASS)
    # decode's is another class, so that these tests can spoil what it receives
    assert named(report, "connector").level is Level.FAIL
    assert "Spoiled" in named(report, "connector").said
    (pair,) = report.facts()["pairs"].values()
    lengths = [one["prompt_tokens"] for one in pair["canaries"]]
    assert min(lengths) < conftest.BLOCK_TOKENS < max(lengths)
    assert max(lengths) > conftest.CHUNK_TOKENS, "several passes of prefill"
    for one in pair["canaries"]:
        blocks = -(-one["prompt_tokens"] // conftest.BLOCK_TOKENS)
        assert one["kv_bytes"] == blocks * conftest.BLOCK_TOKENS * conftest.tiny.KV_BYTES_PER_TOKEN
        assert one["decode_computed_tokens"] <= 1
    assert pair["handover"]["fixed_s"] != 0
    assert pair["predictions"]


def test_wrong_kv_is_wrong_tokens(deployment):
    with deployment.spoiling("zero"):
        report = checked(deployment)
    assert named(report, "wrong-tokens").level is Level.FAIL
    assert report.level is Level.FAIL
    assert named(report, "bytes").level is Level.PASS, "all of it came"


# pairs that differ


TOPOLOGY = """\
model: {name: MODEL, served_names: [tiny], max_length: 1024}
kv: {connector: NixlConnector}
flags: {block-size: 32, enable-prompt-tokens-details: true}
tiers:
  prefill: {engines: [{name: prefill}]}
  decode: {engines: [{name: decode, DIFFERENT}]}
gateway: {port: 0}
"""


class Engines:
    """Engines that run in this test's loop, and checks of them."""

    def __init__(self, folder: Path, ports: PortBook):
        self._folder, self._ports = folder, ports
        self._loop = asyncio.new_event_loop()
        self._fleets: list[Fleet] = []

    def plan(self, model: Path, different: str):
        text = TOPOLOGY.replace("MODEL", str(model)).replace("DIFFERENT", different)
        return make_plan(parse_topology(text), self._ports, model=str(model))

    def start(self, plan, *names: str, changed=lambda one: one):
        """Those engines of a plan."""
        those = tuple(changed(one) for one in plan.engines if one.name in names)
        logs = self._folder / f"run-{len(self._fleets)}"
        logs.mkdir(parents=True)
        fleet = Fleet(dataclasses.replace(plan, engines=those), logs)
        self._fleets.append(fleet)
        self._loop.run_until_complete(fleet.start())
        return fleet

    def stop(self, fleet: Fleet):
        self._fleets.remove(fleet)
        self._loop.run_until_complete(fleet.stop())

    def check(self, plan, *fleets: Fleet, wish: Wish | None = None) -> Report:
        views = [view for fleet in fleets for view in engines.of_fleet(one.facts() for one in fleet.engines.values())]
        checking = check(views, plan.connector, "tiny", model_path=plan.model, wish=wish or Wish(limit_s=30.0))
        return self._loop.run_until_complete(checking)

    def close(self):
        for fleet in reversed(self._fleets):
            self._loop.run_until_complete(fleet.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def prefill(tiny_model, tmp_path_factory):
    """One prefill engine, and what starts others."""
    ports = PortBook()
    running = Engines(tmp_path_factory.mktemp("check"), ports)
    try:
        plan = running.plan(tiny_model, "flags: {}")
        running.prefill = running.start(plan, "prefill")
        yield running
    finally:
        running.close()
        ports.close()


def with_policy(policy: str):
    """An engine that does so with KV that does not come."""

    def changed(one):
        settings = [
            dataclasses.replace(
                setting, value=json.dumps(json.loads(setting.value) | {"kv_load_failure_policy": policy})
            )
            if setting.name == "kv-transfer-config"
            else setting
            for setting in one.settings
        ]
        return dataclasses.replace(one, settings=tuple(settings))

    return changed


DIFFERENCES = {
    "block size": ("flags: {block-size: 48}", "block-size"),
    "dtype": ("flags: {dtype: bfloat16}", "dtype"),
    "connector": (None, "connector"),
    "model": ("flags: {}", "model"),
}


@pytest.mark.full
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_a_failure_by_its_name(prefill, conftest, tmp_path, tiny_model, difference):
    flags, name = DIFFERENCES[difference]
    model = tiny_model
    if difference == "model":
        model = conftest.tiny.write_tiny_model(tmp_path / "other", seed=2)

    def without_connector(one):
        return dataclasses.replace(one, settings=tuple(s for s in one.settings if s.name != "kv-transfer-config"))

    plan = prefill.plan(model, flags or "flags: {}")
    decode = prefill.start(plan, "decode", changed=without_connector if flags is None else lambda one: one)
    try:
        report = prefill.check(plan, prefill.prefill, decode)
    finally:
        prefill.stop(decode)
    assert named(report, name).level is Level.FAIL
    assert named(report, name).mend
    assert report.level is Level.FAIL
    assert {one.level for one in report.findings if one.name in CANARY} & {Level.FAIL}, "and the canaries see it too"


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_side_channel_that_nobody_reaches(prefill, conftest, tiny_model, policy):
    """Prefill says of itself that it is where nobody listens."""
    plan = prefill.plan(tiny_model, "flags: {}")

    def elsewhere(one):
        env = tuple(
            dataclasses.replace(e, value="127.0.0.9") if e.name.endswith("CHANNEL_HOST") else e for e in one.env
        )
        return dataclasses.replace(one, env=env)

    dead = prefill.start(plan, "prefill", changed=elsewhere)
    try:
        decode = prefill.start(plan, "decode", changed=with_policy(policy))
        try:
            report = prefill.check(plan, dead, decode, wish=Wish(limit_s=20.0))
        finally:
            prefill.stop(decode)
    finally:
        prefill.stop(dead)
    assert report.level is Level.FAIL
    failed = {one.name for one in report.findings if one.level is Level.FAIL}
    if policy == "recompute":
        assert named(report, "load-failure-policy").level is Level.WARN
        assert "recompute" in failed
    else:
        assert failed & {"canary-error", "handover"}
