"""``/v1/responses`` and ``/v1/messages`` on the text plane, over simulated engines, as official clients see them."""

import contextlib
import dataclasses

import anthropic
import openai
import pytest

from helpers.stack import MODEL, QUICK, listening, stack
from trivet.sim import Fault

PROMPT = "What is a trivet? " * 20
HI = [{"role": "user", "content": PROMPT}]
CONNECTORS = pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
DOORS = pytest.mark.parametrize("door", ["responses", "messages"])
STREAM = pytest.mark.parametrize("stream", [False, True])


class Doors:
    """A gateway, and how it is asked for the same at each door."""

    def __init__(self, built, openai_client, anthropic_client):
        self.stack, self._openai, self._anthropic = built, openai_client, anthropic_client

    async def chat(self, tokens: int) -> str:
        made = await self._openai.chat.completions.create(model=MODEL, messages=HI, max_tokens=tokens)
        return made.choices[0].message.content

    async def responses(self, tokens: int, *, stream: bool) -> tuple[str, int, int]:
        """The text, and tokens of prompt and answer."""
        if not stream:
            whole = await self._openai.responses.create(model=MODEL, input=PROMPT, max_output_tokens=tokens)
        else:
            made = await self._openai.responses.create(model=MODEL, input=PROMPT, max_output_tokens=tokens, stream=True)
            events = [event async for event in made]
            whole = events[-1].response
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert said == whole.output[0].content[0].text
            assert [event.sequence_number for event in events] == list(range(len(events)))
        return whole.output[0].content[0].text, whole.usage.input_tokens, whole.usage.output_tokens

    async def messages(self, tokens: int, *, stream: bool) -> tuple[str, int, int]:
        """The same."""
        if stream:
            async with self._anthropic.messages.stream(model=MODEL, max_tokens=tokens, messages=HI) as made:
                whole = await made.get_final_message()
        else:
            whole = await self._anthropic.messages.create(model=MODEL, max_tokens=tokens, messages=HI)
        usage = whole.usage
        return whole.content[0].text, usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


@contextlib.asynccontextmanager
async def doors(*tiers: str, connector: str = "TrivetConnector"):
    settings = dataclasses.replace(QUICK, kv_connector=connector)
    async with (
        stack(*tiers, settings=settings) as built,
        listening(built.gateway()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as one,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as other,
    ):
        yield Doors(built, one, other)
        await built.at_rest()
        assert built.expired() == 0


@CONNECTORS
@DOORS
@STREAM
async def test_an_answer_is_split_and_the_same_as_a_chats(connector, door, stream):
    async with doors("prefill", "decode", "mixed", connector=connector) as one:
        expected = await one.chat(6)
        said, prompt, answer = await getattr(one, door)(6, stream=stream)
        record = one.stack.records[-1]
        executions = [sim.state().executions.get("prefill", 0) for sim in one.stack.sims]
    assert (said, answer) == (expected, 6)
    assert prompt == record.prompt_tokens
    assert (record.split, record.prefill_engine, record.decode_engine) == (True, "prefill-0", "decode-0")
    assert (record.completion_tokens, record.finish_reason) == (6, "length")
    assert executions == [2, 0, 0]  # one for each request, and nothing was computed twice


@DOORS
@STREAM
async def test_a_decode_engine_that_ends_before_the_answer_is_replaced(door, stream):
    async with doors("prefill", "decode", "decode", "mixed") as one:
        expected = await one.chat(6)
        for sim in one.stack.sims:
            if sim.tier == "decode":
                sim.faults.add(Fault("die", after_tokens=0, uses=1))
        said, _, _ = await getattr(one, door)(6, stream=stream)
        assert one.stack.records[-1].attempts > 1
    assert said == expected


@DOORS
async def test_an_answer_that_breaks_off_is_no_answer(door):
    async with doors("decode") as one:
        one.stack.sim("decode-0").faults.add(Fault("die", after_tokens=3, uses=None))
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="decode-0"):
            await getattr(one, door)(9, stream=True)


@STREAM
async def test_a_message_that_an_engine_aborts_is_no_answer_either(stream):
    """Of a response vLLM says that it was completed, so nobody could tell (docs/requests.md)."""
    async with doors("decode") as one:
        one.stack.sim("decode-0").faults.add(Fault("finish", after_tokens=3, reason="abort", uses=None))
        with pytest.raises(anthropic.APIStatusError):
            await one.messages(9, stream=stream)


@DOORS
async def test_a_client_that_leaves_a_stream_leaves_nothing(door):
    slow = dataclasses.replace(QUICK, step_ms=5.0, kv_connector="TrivetConnector")
    async with stack("prefill", "decode", settings=slow) as built, listening(built.gateway()) as url:
        if door == "responses":
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
                made = await client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=5000, stream=True)
                async for _ in made:
                    break
                await made.close()
        else:
            async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as client:
                made = await client.messages.create(model=MODEL, max_tokens=5000, messages=HI, stream=True)
                async for _ in made:
                    break
                await made.close()
        await built.at_rest()
        assert built.expired() == 0
    assert built.records[-1].finish_reason == "abort"
