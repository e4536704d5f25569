import os
import tempfile
from pathlib import Path

import pytest

from trivet.connectors import CONNECTORS, Side, TrivetConnector, connector
from trivet.connectors.options import MOVER_DEVICES

TRIVET = TrivetConnector()


def test_it_is_known_by_its_name():
    assert connector("TrivetConnector") is CONNECTORS["TrivetConnector"]


def test_its_legs_start_together_and_prefill_may_make_the_first_token():
    assert (TRIVET.legs_start_together, TRIVET.hands_over_first_token, TRIVET.decode_serves_whole) == (True, True, True)


def test_it_needs_nothing_and_no_port():
    assert (list(TRIVET.needs("cpu")), TRIVET.ports(4), TRIVET.devices) == ([], 0, {"cpu", "cuda"})


@pytest.mark.parametrize(("side", "role"), [(Side.PREFILL, "kv_producer"), (Side.DECODE, "kv_consumer")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_end_has_its_configuration(side, role, device):
    settings = TRIVET.engine_settings(
        side, device=device, host="h", port=None, options={"lease_s": 9}, address="unix:/run/1.sock"
    )
    assert settings.kv_transfer_config == {
        "kv_connector": "TrivetConnector",
        "kv_connector_module_path": "trivet.transfer.connector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"address": "unix:/run/1.sock", "lease_s": 9},
    }
    assert (settings.flags, settings.env) == ({}, {})


# where it listens


def test_it_listens_in_the_users_runtime_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    assert TRIVET.peer_address(8101) == "unix:/run/user/1/trivet/8101.sock"


@pytest.mark.parametrize("runtime", [None, "", "/no/such/folder"])
def test_without_one_it_listens_in_a_folder_of_the_users_own(runtime, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert TRIVET.peer_address(8101) == f"unix:/var/tmp/trivet-{os.getuid()}/8101.sock"


def test_a_path_that_is_too_long_for_a_socket_is_not_used(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "a" * 90)
    assert TRIVET.peer_address(8101) == f"unix:/tmp/trivet-{os.getuid()}/8101.sock"


# what engines are asked and answer


@pytest.mark.parametrize("first_token", [True, False])
def test_both_legs_meet_under_one_transfer(first_token):
    assert TRIVET.rendezvous("t-1", "unix:/p.sock", first_token=first_token) == (
        {"do_remote_decode": True, "transfer_id": "t-1", "first_token": first_token},
        {
            "do_remote_prefill": True,
            "transfer_id": "t-1",
            "prefill_address": "unix:/p.sock",
            "first_token": first_token,
        },
    )


@pytest.mark.parametrize(
    ("answered", "problem"),
    [
        ({"transfer_id": "t", "handed_over": True}, None),
        ({"transfer_id": "t", "handed_over": True, "problem": None}, None),
        ({"transfer_id": "t", "handed_over": False, "problem": "dtype differs"}, "dtype differs"),
        ({"transfer_id": "t", "handed_over": False, "problem": "one\ntwo"}, "one"),
        ({"transfer_id": "t", "handed_over": False}, "it does not say why"),
        ({"transfer_id": "t", "handed_over": False, "problem": ""}, "it does not say why"),
    ],
)
def test_a_problem_is_one_line(answered, problem):
    assert TRIVET.problem_of(answered) == problem


@pytest.mark.parametrize("answered", [None, {}, {"handed_over": None}, {"handed_over": 1}, {"transfer_id": "t"}])
def test_an_answer_that_does_not_speak_of_the_transfer_is_none(answered):
    with pytest.raises(ValueError, match="nothing of the transfer; is its kv_connector TrivetConnector"):
        TRIVET.problem_of(answered)


@pytest.mark.parametrize(
    ("answered", "params"),
    [
        ({"transfer_id": "t", "handed_over": True}, {"release_transfer": "t"}),
        ({"transfer_id": "t", "handed_over": False, "problem": "no"}, None),
        ({"handed_over": True}, None),
        ({}, None),
    ],
)
def test_what_prefill_holds_is_released_there(answered, params):
    assert TRIVET.release_params(answered) == params
    assert TRIVET.released_at is Side.PREFILL


# options; what each may be is tested in test_options.py


def test_options_that_can_be_are_taken():
    TRIVET.check_options({"movers": ["cuda_p2p"], "staging_mib": 64, "lease_s": 0.5, "checksums": True})


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="staging_mib is a whole number from 8"):
        TRIVET.check_options({"staging_mib": 7})


def test_where_an_engine_listens_is_no_option():
    """It differs from engine to engine."""
    with pytest.raises(ValueError, match="no option 'address' \\(an engine's kv_address says where it listens\\)"):
        TRIVET.check_options({"address": "unix:/mine"})


@pytest.mark.parametrize(
    ("device", "movers", "fits"),
    [
        ("cpu", [], True),
        ("cpu", ["shm"], True),
        ("cpu", ["cuda_p2p", "shm"], True),
        ("cpu", ["cuda_p2p", "pinned"], False),
        ("cuda", ["shm"], False),
        ("cuda", ["pinned"], True),
        ("cuda", ["shm", "cuda_p2p"], True),
    ],
)
def test_one_of_the_movers_must_run_where_the_engine_does(device, movers, fits):
    options = {"movers": movers} if movers else {}
    if fits:
        TRIVET.check_device(device, options)
        return
    with pytest.raises(ValueError, match=rf"^none of its movers .* runs on {device}; there it has \w+") as caught:
        TRIVET.check_device(device, options)
    assert str(caught.value).endswith("shm" if device == "cpu" else "cuda_p2p, pinned")


def test_what_movers_run_on_is_what_they_say():
    from trivet.transfer.movers import MOVERS

    assert {name: mover.devices for name, mover in MOVERS.items()} == MOVER_DEVICES
