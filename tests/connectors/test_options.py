"""One table for the launcher and for the engine: ``Options`` is all that reads options."""

import dataclasses

import pytest

from trivet.connectors import CONNECTORS
from trivet.connectors.options import MOVERS, Options
from trivet.transfer import movers
from trivet.transfer.settings import MIB, Settings

TRIVET = CONNECTORS["TrivetConnector"]

GOOD = [
    {},
    {"movers": ["pinned", "shm"]},
    {"movers": ("shm",)},
    {"movers": ["cuda_p2p"], "staging_mib": 64, "piece_mib": 32, "lease_s": 0.5, "checksums": True},
    {"staging_mib": 8, "piece_mib": 4},
    {"staging_mib": 2**20, "piece_mib": 2**19, "lease_s": 86_400},
    {"lease_s": 0.1},
]

BAD = [
    ({"mover": ["shm"]}, "there is no option 'mover' (did you mean movers?)"),
    ({"stagingmib": 64}, "there is no option 'stagingmib' (did you mean staging_mib?)"),
    ({"colour": 1}, "there is no option 'colour' (there are: checksums, lease_s, movers, piece_mib, staging_mib)"),
    ({7: 1}, "there is no option 7 (there are:"),
    ({"movers": "shm"}, "movers is a list of shm, cuda_p2p, pinned, the preferred one first (got 'shm')"),
    ({"movers": []}, "movers is a list of"),
    ({"movers": None}, "movers is a list of"),
    ({"movers": {"shm": 1}}, "movers is a list of"),
    ({"movers": ["rdma"]}, "movers is a list of"),
    ({"movers": ["shm", "shm"]}, "movers names shm twice; say each once"),
    ({"movers": ["rdma", "rdma"]}, "movers names rdma twice"),
    ({"movers": [["shm"]]}, "movers is a list of"),
    ({"staging_mib": 7}, "staging_mib is a whole number from 8 to 1048576 (got 7)"),
    ({"staging_mib": 2**20 + 1}, "staging_mib is a whole number from 8 to"),
    ({"staging_mib": 8.5}, "staging_mib is a whole number from 8 to 1048576 (got 8.5)"),
    ({"staging_mib": "64"}, "staging_mib is a whole number from 8 to 1048576 (got '64')"),
    ({"staging_mib": None}, "staging_mib is a whole number"),
    ({"staging_mib": [64]}, "staging_mib is a whole number"),
    ({"staging_mib": float("inf")}, "staging_mib is a whole number"),
    ({"piece_mib": 0}, "piece_mib is a whole number from 1 to 524288 (got 0)"),
    ({"piece_mib": -1}, "piece_mib is a whole number"),
    ({"piece_mib": True}, "piece_mib is a whole number from 1 to 524288 (got True)"),
    ({"piece_mib": float("nan")}, "piece_mib is a whole number"),
    ({"staging_mib": 16, "piece_mib": 16}, "staging_mib holds at least two pieces of piece_mib (got 16 and 16)"),
    ({"staging_mib": 16}, "staging_mib holds at least two pieces of piece_mib (got 16 and 32)"),
    ({"lease_s": 0}, "lease_s is a number from 0.1 to 86400 (got 0)"),
    ({"lease_s": -1}, "lease_s is a number from"),
    ({"lease_s": 1e300}, "lease_s is a number from"),  # no thread can sleep so long
    ({"lease_s": float("nan")}, "lease_s is a number from 0.1 to 86400 (got nan)"),
    ({"lease_s": float("inf")}, "lease_s is a number from"),
    ({"lease_s": "30"}, "lease_s is a number from 0.1 to 86400 (got '30')"),
    ({"lease_s": False}, "lease_s is a number from"),
    ({"checksums": 1}, "checksums is true or false (got 1)"),
    ({"checksums": "false"}, "checksums is true or false (got 'false')"),
    ({"checksums": None}, "checksums is true or false (got None)"),
]


@pytest.mark.parametrize("given", GOOD)
def test_what_the_launcher_takes_the_engine_takes(given):
    TRIVET.check_options(given)
    options, settings = Options.of(given), Settings.of(given, "e")
    for name in given.keys() - {"movers"}:
        assert getattr(options, name) == given[name]
    assert options.movers == settings.movers == tuple(given.get("movers", ()))
    assert settings.staging_bytes == options.staging_mib * MIB
    assert settings.piece_bytes == options.piece_mib * MIB
    assert (settings.lease_s, settings.checksums) == (options.lease_s, options.checksums)


@pytest.mark.parametrize(("given", "told"), BAD)
def test_what_the_launcher_refuses_the_engine_refuses_in_the_same_line(given, told):
    with pytest.raises(ValueError) as early:  # noqa: PT011  (what it says is compared)
        TRIVET.check_options(given)
    assert str(early.value).startswith(told)
    assert "\n" not in str(early.value)
    with pytest.raises(ValueError) as late:  # noqa: PT011
        Settings.of(given, "e")
    assert str(late.value) == f"TrivetConnector: {early.value}"


def test_every_option_has_a_default_that_may_be():
    defaults = dataclasses.asdict(Options())
    assert Options.of({name: value for name, value in defaults.items() if name != "movers"}) == Options()


def test_every_option_is_refused_when_it_is_wrong_in_kind():
    """Also one that is added."""
    for field in dataclasses.fields(Options):
        with pytest.raises(ValueError, match=f"^{field.name} is "):
            Options.of({field.name: object()})


def test_movers_are_those_that_there_are():
    assert set(MOVERS) == set(movers.MOVERS)
