"""What a gateway worker reads off a front end for its metrics is there, under those names."""

import contextlib

import httpx
import pytest

from helpers.token_engine import ScriptedEngine
from render.conftest import vllm_around
from trivet.gateway.worker import _rendered

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_front_end_tells_what_it_has_rendered(frontend, caches, model_folder):
    with contextlib.ExitStack() as setting_up:
        setting_up.enter_context(vllm_around(caches))
        flags = [str(model_folder), "--served-model-name", "tiny", "--enable-scale-out"]
        async with frontend.open_frontend(flags, ScriptedEngine()) as opened:
            setting_up.close()
            begun = _rendered(opened)
            assert begun.tokenizer in ("tokenizers", "fastokens", "gigatoken")
            assert (begun.derender_hits, begun.derender_replays) == (0, 0)
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
            transport = httpx.ASGITransport(opened.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://render", timeout=20) as client:
                assert (await client.post("/v1/chat/completions/render", json=body)).status_code == 200
                once = _rendered(opened)
                assert (await client.post("/v1/chat/completions/render", json=body)).status_code == 200
            twice = _rendered(opened)
            assert once.characters > begun.characters
            asked, found = twice.characters - once.characters, twice.found_characters - once.found_characters
            assert asked == found > 0, "the second time all was there"
            assert once.cache_bytes > begun.cache_bytes
            opened.app.state.linear_derender.replays += 3
            assert _rendered(opened).derender_replays == 3
