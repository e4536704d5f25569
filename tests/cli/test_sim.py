"""``trivet sim``."""

import asyncio
import re
import signal
import sys

import aiohttp
import pytest

WAIT_S = 30.0


async def start(trivet, *arguments: str):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trivet.cli", "sim", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_it_serves_in_the_foreground_and_says_how_to_ask(trivet):
    process = await start(trivet, "m", "--port", "0", "--tier", "prefill", "--name", "p", "--step-ms", "0")
    try:
        said = b""
        async with asyncio.timeout(WAIT_S):
            while b"/sim/faults" not in said:
                said += (line := await process.stdout.readline())
                assert line, (said, await process.stderr.read())
        (url,) = set(re.findall(r"http://127\.0\.0\.1:\d+", said.decode()))
        assert "simulated prefill engine: m" in said.decode()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/sim/state") as answer:
                facts = await answer.json()
            assert (facts["name"], facts["tier"]) == ("p", "prefill")
            body = {
                "token_ids": [1],
                "sampling_params": {"max_tokens": 1},
                "kv_transfer_params": {"do_remote_decode": True},
            }
            async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                assert (await answer.json())["kv_transfer_params"]["do_remote_prefill"]
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tier", "render"], "--tier is 'render' -> one of prefill, decode, mixed"),
        (["--jitter", "3"], "jitter is 3.0 -> it must be from 0 to 1"),
    ],
)
def test_what_is_wrong_is_one_line(trivet, arguments, message):
    done = trivet("sim", "--port", "0", *arguments)
    assert done.status != 0
    assert message in done.last_word
