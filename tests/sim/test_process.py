"""``python -m trivet.sim``: its flags, and it as a process."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest

from trivet.errors import TrivetError
from trivet.sim.options import parse, tier_of

WAIT_S = 30.0


def settings(*flags: str, **env: str):
    return parse(["serve", "m", *flags], env)[0]


def test_vllms_flags_are_understood():
    kv = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "recompute"}
    kv["kv_connector_extra_config"] = {"kv_lease_duration": 5}
    got = settings(
        *("--served-model-name", "a", "b", "--host", "0.0.0.0", "--port", "81", "--max-model-len", "4k"),
        *("--block-size", "128", "--max_num_seqs", "3", "--max-num-batched-tokens=2K", "--max-num-queued-reqs", "9"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(kv), "--num-gpu-blocks-override", "10", "--api-key", "k"),
    )
    assert (got.model, got.names, got.host, got.port, got.max_model_len) == ("m", ("a", "b"), "0.0.0.0", 81, 4000)
    assert (got.block_size, got.max_num_seqs, got.max_num_batched_tokens) == (128, 3, 2048)
    assert (got.max_num_queued_reqs, got.num_blocks, got.api_key) == (9, 10, "k")
    assert got.enable_scale_out
    assert got.enable_prompt_tokens_details
    assert not got.enable_prefix_caching
    assert (got.kv_transfer, got.kv_load_failure_policy, got.kv_lease_s) == (True, "recompute", 5.0)


def test_trivets_own_connector():
    options = {"address": "unix:/run/trivet/8101.sock", "lease_s": 5, "movers": ["shm"], "checksums": True}
    kv = {"kv_connector": "TrivetConnector", "kv_role": "kv_producer", "kv_connector_extra_config": options}
    got = settings("--kv-transfer-config", json.dumps(kv), "--transfer-last-ms", "3")
    assert (got.kv_transfer, got.kv_connector, got.kv_lease_s) == (True, "TrivetConnector", 5.0)
    assert (got.kv_address, got.transfer_last_ms) == ("unix:/run/trivet/8101.sock", 3.0)
    got = settings("--kv-transfer-config", json.dumps(kv), "--kv-address", "unix:/a.sock", "--kv-lease-s", "2")
    assert (got.kv_address, got.kv_lease_s) == ("unix:/a.sock", 2.0)
    got = settings("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector"}))
    assert (got.kv_connector, got.kv_address, got.kv_lease_s) == ("NixlConnector", None, 30.0)


@pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
@pytest.mark.parametrize(
    ("role", "tier"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "mixed"), (None, "mixed")]
)
def test_its_tier_is_that_of_its_end_of_the_connector(connector, role, tier):
    kv = {"kv_connector": connector} | ({"kv_role": role} if role else {})
    assert tier_of(["serve", "m", "--kv-transfer-config", json.dumps(kv)]) == tier


def test_without_a_connector_it_is_mixed():
    assert tier_of(["serve", "m"]) == "mixed"


def test_without_flags_it_is_as_vllm_is():
    got = settings()
    assert (got.port, got.kv_transfer, got.enable_scale_out, got.enable_prompt_tokens_details) == (
        8000,
        False,
        False,
        False,
    )
    assert got.enable_prefix_caching


def test_its_own_flags():
    got = settings("--step-ms", "5", "--kv-lease-s", "2", "--eos-chance", "0.1", "--vllm-version", "0.30.0")
    assert (got.step_ms, got.kv_lease_s, got.eos_chance, got.is_old) == (5.0, 2.0, 0.1, True)


def test_the_environment():
    got = settings(VLLM_API_KEY="k", VLLM_NIXL_SIDE_CHANNEL_HOST="node-1")
    assert (got.api_key, got.kv_host) == ("k", "node-1")


def test_flags_that_mean_nothing_here_are_noted_once():
    flags = ["--enforce-eager", "--dtype", "float32", "--dtype=x", "--kv_cache_dtype", "fp8", "--block-size", "8"]
    got, name, notes = parse(["serve", "m", *flags])
    assert notes == ["no effect in a simulated engine: --enforce-eager, --dtype, --kv-cache-dtype"]
    assert (got.block_size, name) == (8, "m")
    assert parse(["serve", "m", "--name", "p"])[1:] == ("p", [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "x"], "argument --port: 'x' is not a port"),
        (["--port", "70000"], "'70000' is not a port"),
        (["--block-size", "-1"], "argument --block-size"),
        (["--step-ms", "fast"], "argument --step-ms: invalid float value: 'fast'"),
        (["--jitter", "2"], "jitter is 2.0 -> it must be from 0 to 1"),
        (["--kv-transfer-config", "{"], "--kv-transfer-config is not JSON"),
        (["--kv-address", "tcp:somewhere"], "the connector's address is 'tcp:somewhere'"),
        (["--kv-address", "unix:relative"], "an address is unix: and an absolute path"),
        (["--kv-address", "unix:/" + "x" * 120], "the path is longer than 107 bytes"),
        (["--kv-transfer-config", "[]"], "--kv-transfer-config is not an object"),
        (
            ["--kv-transfer-config", '{"kv_connector": "MooncakeConnector"}'],
            "imitates NixlConnector and TrivetConnector only",
        ),
    ],
)
def test_a_wrong_value_is_one_line(flags, message):
    with pytest.raises(TrivetError) as caught:
        settings(*flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@asynccontextmanager
async def process(*flags: str):
    """A simulated engine of its own, and where it listens."""
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trivet.sim", "serve", "m", "--port", "0", "--enable-scale-out", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert running.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while not (found := re.search(rb"http://\S+?(?=,)", line := await running.stdout.readline())):
                assert line, await running.communicate()
        yield running, found.group().decode()
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()
        running._transport.close()


async def test_it_serves_until_it_is_told_to_stop():
    async with process("--api-key", "k") as (running, url), aiohttp.ClientSession() as session:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
        key = {"Authorization": "Bearer k"}
        async with session.post(f"{url}/inference/v1/generate", json=body, headers=key) as answer:
            assert len((await answer.json())["choices"][0]["token_ids"]) == 2
        running.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            assert await running.wait() == 0
        assert await running.stderr.read() == b""


async def test_the_fault_exit_ends_the_process():
    async with process() as (running, url), aiohttp.ClientSession() as session:
        fault = {"kind": "exit", "after_tokens": 1, "exit_status": 7}
        async with session.post(f"{url}/sim/faults", json=fault) as answer:
            assert answer.status == 200
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 9}, "stream": True}
        with pytest.raises(aiohttp.ClientError):
            async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                await answer.read()
        async with asyncio.timeout(WAIT_S):
            assert await running.wait() == 7


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "trivet.sim", "serve", "m", "--port", port],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"trivet: port {port} of 127.0.0.1 is taken -> another --port, or --port 0 for a free one"
    ]


def test_a_wrong_flag_ends_with_status_2():
    done = subprocess.run(
        [sys.executable, "-m", "trivet.sim", "serve", "m", "--jitter", "x"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


async def test_two_processes_hand_over_on_their_sockets(tmp_path):
    def flags(side):
        options = {"address": f"unix:{tmp_path}/{side}.sock"}
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[side]
        config = {"kv_connector": "TrivetConnector", "kv_role": role, "kv_connector_extra_config": options}
        return ["--kv-transfer-config", json.dumps(config)]

    asked = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}
    both = {"transfer_id": "t", "first_token": True}
    first = {"do_remote_decode": True, **both}
    second = {"do_remote_prefill": True, "prefill_address": f"unix:{tmp_path}/prefill.sock", **both}
    async with (
        process(*flags("prefill")) as (prefill, prefill_url),
        process(*flags("decode")) as (_, decode_url),
        aiohttp.ClientSession() as session,
    ):

        async def ask(url, params, tokens=3):
            body = {**asked, "sampling_params": {"max_tokens": tokens}, "kv_transfer_params": params}
            async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return (await answer.json())["choices"][0]["token_ids"]

        parts = await asyncio.gather(ask(prefill_url, first, 1), ask(decode_url, second))
        assert [*parts[0], *parts[1]] == await ask(decode_url, None)
        prefill.kill()
        await prefill.wait()
        assert (tmp_path / "prefill.sock").is_socket()
        assert len(await ask(decode_url, {**second, "transfer_id": "t2", "first_token": False})) == 3
        async with session.get(f"{decode_url}/sim/state") as answer:
            facts = await answer.json()
        assert facts["tier"] == "decode"
        counts = facts["handovers"]
        assert (counts["pulled"], counts["recomputed"]) == (1, 1)
        async with process(*flags("prefill")) as (_, prefill_url):  # what the killed one left is replaced
            assert await asyncio.gather(ask(prefill_url, first, 1), ask(decode_url, second)) == parts
