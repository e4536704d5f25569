"""KV that goes from a prefill engine to a decode engine, and what becomes of it when it does not."""

import asyncio
import time

import pytest

from helpers.sim_client import PREFILL, PROMPT, until
from trivet.connectors import connector
from trivet.sim import Fault
from trivet.sim.handover import Source


@pytest.fixture
async def pair(start):
    return await start("prefill"), await start("decode")


def counts(engine, *names) -> tuple[int, ...]:
    handovers = engine.state().handovers
    return tuple(handovers[name] for name in names)


async def test_decode_goes_on_from_what_prefill_computed(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    assert counts(prefill, "offered", "open", "taken") == (1, 1, 0)
    assert prefill.state().pool["held"] == 3
    assert prefill.state().connector == "NixlConnector"
    answer = await client.stream(decode, leg="decode", more={"kv_transfer_params": params})
    assert answer.tokens == (await client.stream(prefill)).tokens
    assert counts(prefill, "offered", "open", "taken", "released", "expired") == (1, 0, 1, 0, 0)
    assert counts(decode, "pulled", "failed") == (1, 0)
    assert prefill.state().pool["held"] == prefill.state().pool["used"] == 0
    assert decode.state().computed_prompt_tokens == {"decode": 0}
    assert decode.state().executions == {"decode": 1}
    assert prefill.state().requests[0].split == "offered"
    assert decode.state().requests[0].split == "pulled"


async def test_the_parameters_are_nixls(pair, client):
    prefill, decode = pair
    nixl = connector("NixlConnector")
    answer = await client.generate(prefill, max_tokens=1, more={"kv_transfer_params": nixl.prefill_params()})
    params = answer.json["kv_transfer_params"]
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1, 2]],
        "remote_engine_id": prefill.engine_id,
        "remote_request_id": params["remote_request_id"],
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 41,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    assert params["remote_request_id"].startswith("generate-tokens-")
    assert nixl.decode_params(params) == params
    assert len((await client.generate(decode, more={"kv_transfer_params": params})).tokens) == 4


async def test_cached_tokens_are_those_that_prefill_had(pair, client):
    prefill, decode = pair
    await client.generate(prefill)
    params = await client.prefill(prefill)
    assert params["remote_prefill_cached_tokens"] == 32
    answer = await client.stream(decode, more={"kv_transfer_params": params})
    assert answer.events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_030_counts_all_that_was_pulled_as_cached(start, client):
    prefill = await start("prefill", vllm_version="0.30.0")
    decode = await start("decode", vllm_version="0.30.0")
    params = await client.prefill(prefill)
    assert "remote_prefill_cached_tokens" not in params
    answer = await client.stream(decode, more={"kv_transfer_params": params})
    assert answer.events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 41}


async def test_what_decode_has_already_is_not_pulled_again(pair, client):
    prefill, decode = pair
    await client.generate(decode)
    await client.generate(decode, more={"kv_transfer_params": await client.prefill(prefill)})
    text = (await client.get(decode, "/metrics")).content.decode()
    assert 'source="external_kv_transfer"} 9.0' in text
    assert 'source="local_cache_hit"} 32.0' in text
    assert f'nixl_bytes_transferred_sum{{engine="0",model_name="sim"}} {16 * 131072}' in text
    assert counts(prefill, "taken") == (1,)


@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_a_pull_takes_its_time_and_delays_nobody(start, client, slow):
    prefill = await start("prefill", transfer_ms_per_token=20 if slow == "prefill" else 0)
    decode = await start("decode", step_ms=1, transfer_ms_per_token=20 if slow == "decode" else 0)
    params = await client.prefill(prefill)
    pulling = asyncio.create_task(client.generate(decode, more={"kv_transfer_params": params}, max_tokens=1))
    await until(lambda: decode.state().fetching == 1)
    assert decode.state().pool["used"] == 3
    assert prefill.state().pool["held"] == 3
    await client.generate(decode, [1, 2, 3], max_tokens=5)
    assert decode.state().fetching == 1
    assert len((await pulling).tokens) == 1
    pulled, other = decode.state().requests
    assert pulled.first_token_s is not None
    assert pulled.first_token_s - pulled.received_s >= 41 * 0.02
    assert other.first_token_s is not None
    assert other.first_token_s < pulled.first_token_s


async def test_a_lease_ends(start, client):
    prefill, decode = await start("prefill", kv_lease_s=0.05), await start("decode")
    params = await client.prefill(prefill)
    await prefill.idle(nothing_held=True)
    assert counts(prefill, "expired", "taken", "open") == (1, 0, 0)
    assert prefill.state().pool["held"] == 0
    assert (
        'nixl_num_kv_expired_reqs_total{engine="0",model_name="sim"} 1.0'
        in (await client.get(prefill, "/metrics")).content.decode()
    )
    whole = await client.generate(decode, more={"kv_transfer_params": params})
    assert (whole.status, whole.json["error"]["type"]) == (500, "InternalServerError")
    error, done = (await client.stream(decode, more={"kv_transfer_params": params})).events
    assert (error["error"]["code"], done) == (500, "[DONE]")
    assert counts(decode, "failed") == (2,)
    assert decode.state().pool["used"] == 0
    assert [one.ended for one in decode.state().requests] == ["error", "error"]
    assert (
        'nixl_num_failed_transfers_total{engine="0",model_name="sim"} 2.0'
        in (await client.get(decode, "/metrics")).content.decode()
    )


async def test_recompute_is_the_other_policy(start, client):
    prefill = await start("prefill", kv_lease_s=0)
    decode = await start("decode", kv_load_failure_policy="recompute")
    params = await client.prefill(prefill)
    await prefill.idle(nothing_held=True)
    answer = await client.generate(decode, leg="decode", more={"kv_transfer_params": params})
    assert answer.tokens == (await client.generate(prefill)).tokens
    assert decode.state().computed_prompt_tokens == {"decode": 41}
    assert counts(decode, "recomputed") == (1,)


async def test_another_prompt_than_prefills_is_noticed(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    answer = await client.generate(decode, [*PROMPT, 7], more={"kv_transfer_params": params})
    assert answer.status == 500
    assert counts(prefill, "mismatched", "taken", "open") == (1, 0, 0)


async def test_kv_can_be_pulled_once(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    statuses = [(await client.generate(decode, more={"kv_transfer_params": params})).status for _ in range(2)]
    assert statuses == [200, 500]
    assert counts(prefill, "taken", "refused") == (1, 1)


async def test_a_prefill_engine_that_was_started_anew_knows_nothing_of_it(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    await prefill.restart()
    assert (await client.generate(decode, more={"kv_transfer_params": params})).status == 500
    assert counts(prefill, "offered", "refused") == (0, 1)


async def test_a_prefill_engine_that_is_gone(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    prefill.exit()
    assert (await client.generate(decode, more={"kv_transfer_params": params})).status == 500


async def test_an_aborted_prefill_holds_nothing(start, client):
    prefill = await start("prefill", prefill_ms=100)
    asking = asyncio.create_task(client.generate(prefill, leg="prefill", more={"kv_transfer_params": PREFILL}))
    await until(lambda: prefill.state().running == 1)
    prefill.abort("generate-tokens-r-prefill")
    answer = (await asking).json
    assert (answer["kv_transfer_params"], answer["choices"][0]["finish_reason"]) == (None, "abort")
    assert prefill.state().pool["held"] == prefill.state().pool["used"] == 0


async def test_a_prefill_that_ends_with_a_stop_is_handed_over_too(start, client):
    prefill = await start("prefill", eos_chance=1.0)
    answer = await client.generate(prefill, max_tokens=1, more={"kv_transfer_params": PREFILL})
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert counts(prefill, "offered") == (1,)


async def test_decode_aborted_before_its_pull_tells_prefill(start, client):
    prefill, decode = await start("prefill"), await start("decode", max_num_seqs=1, step_ms=5)
    busy = asyncio.create_task(client.generate(decode, [9], max_tokens=1000))
    await until(lambda: decode.state().running == 1)
    params = await client.prefill(prefill)
    waiting = asyncio.create_task(client.stream(decode, leg="decode", more={"kv_transfer_params": params}))
    await until(lambda: decode.state().waiting == 1)
    waiting.cancel()
    await prefill.idle(nothing_held=True)
    assert counts(prefill, "released", "taken", "expired") == (1, 0, 0)
    busy.cancel()
    await decode.idle()


async def test_decode_aborted_in_its_pull(start, client):
    prefill, decode = await start("prefill", transfer_ms_per_token=1000), await start("decode")
    params = await client.prefill(prefill)
    asking = asyncio.create_task(client.stream(decode, leg="decode", more={"kv_transfer_params": params}))
    await until(lambda: decode.state().fetching == 1)
    await asyncio.sleep(0.05)
    asking.cancel()
    await decode.idle()
    await prefill.idle(nothing_held=True)
    assert counts(prefill, "released", "taken") == (1, 0)
    assert decode.state().pool["used"] == 0


async def test_a_pull_that_was_cut_off_before_it_reached_prefill(pair, client, monkeypatch):
    prefill, decode = pair
    monkeypatch.setattr(decode.connector, "pull", lambda _: asyncio.sleep(60))
    params = await client.prefill(prefill)
    asking = asyncio.create_task(client.stream(decode, leg="decode", more={"kv_transfer_params": params}))
    await until(lambda: decode.state().fetching == 1)
    decode.abort("generate-tokens-r-decode")
    assert (await asking).tokens == []
    await prefill.idle(nothing_held=True)
    assert counts(prefill, "released") == (1,)


async def test_a_release_leg_counts_as_released(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    answer = await client.stream(decode, leg="release", max_tokens=1, more={"kv_transfer_params": params})
    assert len(answer.tokens) == 1
    assert counts(prefill, "released", "taken") == (1, 0)


async def test_chat_refused_by_decode_tells_prefill_and_generate_does_not(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    assert (await client.generate(decode, more={"kv_transfer_params": params, "model": "x"})).status == 404
    assert counts(prefill, "open") == (1,)
    body = {"model": "x", "messages": [], "kv_transfer_params": params}
    assert (await client.post(decode, "/v1/chat/completions", body)).status == 404
    await prefill.idle(nothing_held=True)
    assert counts(prefill, "released") == (1,)


async def test_prompt_logprobs_are_computed_here_and_prefill_is_told(pair, client):
    prefill, decode = pair
    params = await client.prefill(prefill)
    answer = await client.generate(decode, leg="decode", prompt_logprobs=0, more={"kv_transfer_params": params})
    assert answer.status == 200
    assert decode.state().computed_prompt_tokens == {"decode": 41}
    await prefill.idle(nothing_held=True)
    assert counts(prefill, "released") == (1,)


async def test_without_a_connector_the_parameters_mean_nothing(start, client):
    prefill, decode = await start(kv_transfer=False), await start(kv_transfer=False)
    answer = await client.generate(prefill, max_tokens=1, more={"kv_transfer_params": PREFILL})
    assert answer.json["kv_transfer_params"] is None
    assert prefill.state().pool["held"] == 0
    given = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": "nowhere", "remote_port": 1}
    params = {**given, "remote_engine_id": "x", "remote_request_id": "y"}
    assert (await client.generate(decode, more={"kv_transfer_params": params})).status == 200
    assert "nixl" not in (await client.get(decode, "/metrics")).content.decode()
    assert decode.state().connector is None


async def test_held_blocks_make_others_wait(start, client):
    prefill = await start("prefill", kv_tokens=64, kv_lease_s=0.2)
    await client.prefill(prefill)
    began = time.monotonic()
    asking = asyncio.create_task(client.generate(prefill, [5, *PROMPT]))
    await until(lambda: prefill.state().waiting == 1)
    assert (await asking).status == 200
    assert time.monotonic() - began >= 0.15
    assert counts(prefill, "expired") == (1,)


async def test_prefill_may_withhold_and_decode_may_lose(pair, client):
    prefill, decode = pair
    prefill.faults.add(Fault("withhold", leg="prefill"))
    assert await client.prefill(prefill) is None
    assert counts(prefill, "offered") == (0,)
    params = await client.prefill(prefill)
    decode.faults.add(Fault("lose", leg="decode"))
    answer = await client.generate(decode, leg="decode", more={"kv_transfer_params": params})
    assert answer.status == 500
    assert counts(prefill, "open") == (1,)
    assert counts(decode, "failed") == (1,)


async def test_a_fault_may_strike_the_pull_itself(pair, client):
    prefill, decode = pair
    prefill.faults.add(Fault("disconnect", path="/sim/kv/pull"))
    params = await client.prefill(prefill)
    assert (await client.generate(decode, more={"kv_transfer_params": params})).status == 500
    assert counts(prefill, "open") == (1,)


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_prefill": False},
        {"remote_engine_id": None},
        {"remote_port": None},
        {"remote_block_ids": None},
        {"remote_block_ids": [[]]},
    ],
)
def test_parameters_that_name_nothing(change):
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "::1",
        "remote_port": 5,
    }
    found = Source.parse(params)
    assert found is not None
    assert found.url == "http://[::1]:5"
    assert Source.parse({**params, **change}) is None
