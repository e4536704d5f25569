"""docs/topology.md has a row for each field, and the default that the code has."""

import re
from pathlib import Path

import pytest

from trivet.topology import model

PAGE = (Path(__file__).parents[2] / "docs/topology.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The table behind a heading or line: each field's default, as it is written."""
    section = PAGE.partition(f"\n{heading}\n")[2]
    table = section[section.index("| Field") :].partition("\n\n")[0].splitlines()[2:]
    cells = [[one.strip() for one in line.strip("|").split(" | ")] for line in table]
    return {name: line[2].strip("`") for line in cells for name in re.findall(r"`(\w+)`", line[0])}


PLACES = {
    "### Top level": model.Topology,
    "### model": model.Model,
    "### kv": model.Kv,
    "### tiers": model.Tiers,
    "### The render tier": model.RenderTier,
    "### A tier: prefill, decode, mixed": model.Tier,
    "### gateway": model.Gateway,
    "`limits`, for all workers together:": model.Limits,
    "### Split or not": model.Split,
    "### Guard": model.Guard,
}


@pytest.mark.parametrize("heading", PLACES)
def test_every_field_has_a_row_and_every_row_is_a_field(heading):
    assert set(rows(heading)) == set(PLACES[heading].model_fields)


@pytest.mark.parametrize(
    "heading", ["### The render tier", "`limits`, for all workers together:", "### Split or not", "### Guard"]
)
def test_defaults_are_those_of_the_code(heading):
    fields = {name: one for name, one in PLACES[heading].model_fields.items() if not one.default_factory}
    assert fields
    for name, told in rows(heading).items():
        if name in fields:
            default = fields[name].default
            expected = "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
            assert float(told) == default if isinstance(default, float) else told == expected, name
