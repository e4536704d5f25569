import pytest

from helpers.engines import HANDED_OVER
from trivet.connectors import CONNECTORS, NixlConnector, Side, connector

NIXL = NixlConnector()


def settings(side: Side, *, device: str = "cuda", port: int | None = 5600, options: dict | None = None):
    return NIXL.engine_settings(side, device=device, host="node-1", port=port, options=options or {})


def test_it_is_known_by_vllms_name():
    assert connector("NixlConnector") is CONNECTORS["NixlConnector"]
    assert CONNECTORS["NixlConnector"].name == "NixlConnector"


def test_an_unknown_connector_is_a_key_error():
    with pytest.raises(KeyError):
        connector("MagicConnector")


def test_prefill_comes_first_and_decode_makes_the_first_token():
    assert NIXL.hands_over_first_token is False


def test_prefill_is_asked_to_keep_its_blocks():
    assert NIXL.prefill_params() == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_what_prefill_is_asked_is_made_anew_each_time():
    NIXL.prefill_params()["do_remote_decode"] = False
    assert NIXL.prefill_params()["do_remote_decode"] is True


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"remote_block_ids": [[0]]},  # a block's number may be 0
        {"remote_block_ids": [[], [7]]},  # groups of layers without blocks of their own
        {"remote_block_ids": [5, 6]},
        {"remote_port": 0},
        {"something_of_a_later_vllm": {"a": [1]}},
    ],
)
def test_decode_is_given_prefills_answer_as_it_is(more):
    answered = HANDED_OVER | more
    assert NIXL.decode_params(answered) == answered
    assert NIXL.release_params(answered) == answered


UNUSABLE = {
    "no parameters": None,
    "empty parameters": {},
    "prefill kept nothing": HANDED_OVER | {"do_remote_prefill": False},
    "prefill says nothing of it": {key: value for key, value in HANDED_OVER.items() if key != "do_remote_prefill"},
    "no list of blocks": {key: value for key, value in HANDED_OVER.items() if key != "remote_block_ids"},
    "null blocks": HANDED_OVER | {"remote_block_ids": None},
    "no blocks": HANDED_OVER | {"remote_block_ids": []},
    "groups without any block": HANDED_OVER | {"remote_block_ids": [[], []]},
    **{
        f"{what} {name}": {key: value for key, value in HANDED_OVER.items() if key != name} | more
        for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        for what, more in (("absent", {}), ("null", {name: None}))
    },
}


@pytest.mark.parametrize("answered", UNUSABLE.values(), ids=UNUSABLE)
def test_what_decode_could_not_pull_is_not_handed_over(answered):
    assert NIXL.decode_params(answered) is None


@pytest.mark.parametrize("answered", [one for one in UNUSABLE.values() if one is not None])
def test_what_decode_could_not_pull_cannot_be_released(answered):
    assert NIXL.release_params(answered) is None


def test_parameters_are_handed_on_as_a_copy():
    answered = dict(HANDED_OVER)
    NIXL.decode_params(answered)["remote_port"] = 1
    assert answered == HANDED_OVER


@pytest.mark.parametrize(
    ("side", "device", "expected"),
    [
        (Side.PREFILL, "cuda", {"kv_role": "kv_producer"}),
        (Side.PREFILL, "cpu", {"kv_role": "kv_producer", "kv_buffer_device": "cpu"}),
        (Side.DECODE, "cuda", {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}),
        (
            Side.DECODE,
            "cpu",
            {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail", "kv_buffer_device": "cpu"},
        ),
    ],
)
def test_each_end_on_each_device_has_its_configuration(side, device, expected):
    config = settings(side, device=device).kv_transfer_config
    assert config == {"kv_connector": "NixlConnector"} | expected


@pytest.mark.parametrize("side", Side)
def test_options_of_the_topology_are_passed_on(side):
    options = {"kv_lease_duration": 60}
    config = settings(side, options=options).kv_transfer_config
    assert config["kv_connector_extra_config"] == options
    assert config["kv_connector_extra_config"] is not options


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", {"VLLM_NIXL_SIDE_CHANNEL_HOST": "node-1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}),
        (
            "cpu",
            {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "node-1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
                "TRIVET_NIXL_PROGRESS_THREAD": "0",
            },
        ),
    ],
)
def test_engines_are_told_their_side_channel(side, device, expected):
    assert {name: value for name, (value, _) in settings(side, device=device).env.items()} == expected


def test_a_port_that_is_not_known_is_not_told():
    assert list(settings(Side.PREFILL, port=None).env) == ["VLLM_NIXL_SIDE_CHANNEL_HOST"]


def test_both_ends_have_the_same_large_blocks():
    (prefill, _), (decode, _) = (settings(side).flags["block-size"] for side in Side)
    assert (prefill, decode) == ("128", "128")


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_it_sets_has_a_reason(side, device):
    found = settings(side, device=device)
    assert [reason for _, reason in (*found.flags.values(), *found.env.values()) if not reason.strip()] == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_data_parallel_rank_listens_on_a_port(ranks):
    assert NIXL.ports(ranks) == ranks


@pytest.mark.parametrize(("device", "extra"), [("cpu", "cpu"), ("cuda", "cuda")])
def test_it_needs_nixl(device, extra):
    (need,) = NIXL.needs(device)
    assert (need.package, need.install) == ("nixl", f"pip install 'nixl>=1.5' (or trivet[{extra}])")
    assert device in NIXL.devices


def test_decode_is_asked_behind_prefill_and_releases_what_nobody_takes():
    assert (NIXL.legs_start_together, NIXL.released_at, NIXL.one_host) == (False, Side.DECODE, False)


def test_its_options_are_not_looked_at_and_its_address_is_not_the_gateways_to_know():
    NIXL.check_options({"whatever": 1})
    assert NIXL.peer_address(8101) is None


def test_decode_counts_for_itself_where_it_is_not_told_prefills_count():
    """vLLM 0.32 tells ``remote_prefill_cached_tokens`` as its own count of cached tokens."""
    answered = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_prefill_cached_tokens": 0}
    assert NIXL.own_count(answered) == {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    assert NIXL.own_count({"do_remote_prefill": True}) == {"do_remote_prefill": True}
