import re

import pytest
import yaml

from trivet.topology import make_plan, parse_topology
from trivet.topology.machine import Machine
from trivet.topology.ports import PortBook
from trivet.topology.template import TEMPLATE

EXAMPLE = re.compile(r"^( *)# ([a-z_]+:.*)$")
"""A line of the template that would be a field without its mark."""

LINES = TEMPLATE.splitlines()
PLACES = {number: match.group(2) for number, line in enumerate(LINES) if (match := EXAMPLE.match(line))}
"""The line numbers of the examples, and what they say."""


def test_the_template_is_the_demos_topology():
    topology = parse_topology(TEMPLATE, "trivet.yaml")
    plan = make_plan(
        topology, PortBook(lock=False), model="demo", machine=Machine((0, 1), 0, "0.32.0", "cpu", lambda _: True)
    )
    assert [(one.name, one.started_by) for one in plan.engines] == [("prefill-0", "trivet"), ("decode-0", "trivet")]
    assert topology.model.max_length == 4096


def test_what_the_template_leaves_out_it_says_as_it_is():
    """Each value that stands in the template uncommented and has a default in the code is that default."""
    topology = parse_topology(TEMPLATE)
    bare = parse_topology("tiers: {prefill: , decode: }")
    assert topology.kv == bare.kv
    assert topology.gateway == bare.gateway
    assert topology.model.model_copy(update={"max_length": None}) == bare.model
    assert [len(topology.tier(name).listed()) for name in ("prefill", "decode")] == [1, 1]


def uncommented(number: int) -> str:
    """The template with one example brought in, and the lines that belong to it."""
    lines = list(LINES)
    indent = EXAMPLE.match(lines[number]).group(1)
    lines[number] = indent + PLACES[number]
    for follower in range(number + 1, len(lines)):
        if not lines[follower].startswith(f"{indent}#   "):
            break
        lines[follower] = indent + lines[follower].removeprefix(f"{indent}# ")
    if PLACES[number].startswith("engines:"):  # "a list instead of replicas"
        (replaced,) = (place for place in range(number - 2, number) if lines[place] == "    replicas: 1")
        del lines[replaced]
    return "\n".join(lines) + "\n"


def test_the_template_has_examples():
    assert len(PLACES) >= 15


@pytest.mark.parametrize("number", PLACES, ids=[text.split()[0] for text in PLACES.values()])
def test_every_example_in_the_template_is_right(number):
    text = uncommented(number)
    plain, changed = yaml.safe_load(TEMPLATE), yaml.safe_load(text)
    assert changed != plain
    parse_topology(text, "trivet.yaml")


def test_the_example_with_several_engines_means_what_it_says():
    (number,) = (number for number, text in PLACES.items() if text.startswith("engines:"))
    engines = parse_topology(uncommented(number)).tiers.decode.listed()
    assert [one.name or one.url for one in engines] == ["decode-a", "decode-b", "http://10.0.0.7:8000"]
    assert (engines[1].host, engines[1].port) == ("node-2", 8100)
