"""What stands where vLLM's engine core client stood, by itself; with vLLM's front end above it: ``test_frontend``."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from helpers.processes import holds
from helpers.token_engine import ScriptedEngine, saying
from trivet.legs.wire import read_logprobs
from trivet.render.contract import TokenLogprobs


@pytest.fixture
def make_request(core):
    """Makes what vLLM's front end hands to its engine."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    def make(sampling: dict[str, Any] | None = None, **changes: Any) -> EngineCoreRequest:
        values: dict[str, Any] = {
            "request_id": "gen-1",
            "prompt_token_ids": [1, 2, 3],
            "mm_features": None,
            "sampling_params": SamplingParams(**{"max_tokens": 4, **(sampling or {})}),
            "pooling_params": None,
            "arrival_time": 0.0,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
        }
        return EngineCoreRequest(**values | changes)

    return make


class Running:
    """A core over a scripted engine."""

    def __init__(self, core, script=saying([5])) -> None:
        self.engine = ScriptedEngine()
        self.engine.script = script
        self.core = core.SplitCore(self.engine, "tiny")

    async def outputs(self, count: int) -> list:
        """The next outputs."""
        found: list = []
        async with asyncio.timeout(5):
            while len(found) < count:
                found += (await self.core.get_output_async()).outputs
        return found


# what is asked


async def asked(core, request):
    one = Running(core)
    await one.core.add_request_async(request)
    await one.outputs(1)
    return one.engine.request


async def test_a_request_goes_out_as_it_was_rendered(core, make_request):
    request = await asked(core, make_request(cache_salt="pepper", priority=-2, reasoning_ended=True))
    assert (request.request_id, list(request.token_ids), request.model) == ("gen-1", [1, 2, 3], "tiny")
    assert (request.cache_salt, request.priority, request.reasoning_ended) == ("pepper", -2, True)
    assert (request.unsplittable, request.headers) == (None, {})


async def test_an_adapter_goes_out_under_its_name(core, make_request):
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("poems", 1, "/adapters/poems")
    assert (await asked(core, make_request(lora_request=adapter))).model == "poems"


async def test_what_engines_must_see_of_a_client_goes_out_as_headers(core, make_request):
    headers = {"traceparent": "00-1-2-01"}
    request = await asked(core, make_request(trace_headers=headers, data_parallel_rank=3, session_id="s-1"))
    assert request.headers == {"traceparent": "00-1-2-01", "X-data-parallel-rank": "3", "X-Session-ID": "s-1"}
    assert headers == {"traceparent": "00-1-2-01"}


@pytest.mark.parametrize(
    ("wanted", "expected"), [(None, None), (0, 1), (1, 2), (20, 21), (-1, -1)], ids=["none", "0", "1", "20", "all"]
)
async def test_one_candidate_more_is_asked_for(core, make_request, wanted, expected):
    assert (await asked(core, make_request({"logprobs": wanted}))).sampling.get("logprobs") == expected


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (None, None),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, None),
        ({"kv_transfer_params": {}, "ec_transfer_params": {}, "mine": 1}, {"mine": 1}),
    ],
)
async def test_transfer_parameters_stay_here(core, make_request, extra, expected):
    request = make_request({"extra_args": extra})
    assert (await asked(core, request)).sampling.get("extra_args") == expected
    assert request.sampling_params.extra_args == extra


@pytest.mark.parametrize(
    ("changes", "sampling", "message"),
    [
        ({"prompt_token_ids": None}, {}, "prompt embeddings are not served split"),
        ({"prompt_embeds": object()}, {}, "prompt embeddings are not served split"),
        ({"sampling_params": None}, {}, "prompt embeddings are not served split"),
        ({"mm_features": [object()]}, {}, "multimodal prompts are not served split"),
        ({}, {"prompt_logprobs": 0}, "prompt_logprobs (and echo with logprobs) are not served by this gateway"),
    ],
)
async def test_what_token_ids_cannot_carry_is_refused_by_name(core, make_request, changes, sampling, message):
    one = Running(core)
    with pytest.raises(core.GracefulHTTPError) as caught:
        await one.core.add_request_async(make_request(sampling, **changes))
    assert (str(caught.value), caught.value.http_status) == (message, 501)
    assert (one.engine.requests, one.core.running) == ([], 0)


async def test_a_request_that_only_frees_kv_is_none_of_ours(core, make_request):
    one = Running(core)
    await one.core.add_request_async(make_request(abort_immediately=True))
    assert (one.engine.requests, one.core.running) == ([], 0)


# what comes back


async def test_tokens_come_back_in_their_order(core, make_request):
    one = Running(core, saying([5, 6, 7], at_once=2, finish="stop", stop_reason=7))
    await one.core.add_request_async(make_request())
    first, last = await one.outputs(2)
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("gen-1", [5, 6], None)
    assert (last.new_token_ids, str(last.finish_reason), last.stop_reason) == ([7], "stop", 7)


async def test_cached_tokens_come_back_with_the_first(core, make_request):
    one = Running(core, saying([5, 6], cached=2))
    await one.core.add_request_async(make_request())
    first, last = await one.outputs(2)
    stats = first.prefill_stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_computed_tokens) == (3, 2, 1)
    assert last.prefill_stats is None


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error", "repetition"])
async def test_every_reason_to_end_is_vllms(core, make_request, reason):
    one = Running(core, saying([5], finish=reason))
    await one.core.add_request_async(make_request())
    (output,) = await one.outputs(1)
    assert str(output.finish_reason) == reason


async def test_a_reason_that_vllm_does_not_know_is_an_error(core, make_request):
    one = Running(core, saying([5], finish="tired"))
    await one.core.add_request_async(make_request())
    (output,) = await one.outputs(1)
    assert str(output.finish_reason) == "error"


async def test_everything_that_is_ready_is_taken_in_one_go(core, make_request):
    one = Running(core, saying([5, 6, 7]))
    for number in range(4):
        await one.core.add_request_async(make_request(request_id=f"gen-{number}"))
    await holds(lambda: one.core.running == 0)
    assert len((await one.core.get_output_async()).outputs) == 12


# the end


async def test_generations_are_counted_while_they_run(core, make_request):
    one = Running(core, saying([5], finish=None))
    for number in range(3):
        await one.core.add_request_async(make_request(request_id=f"gen-{number}"))
    assert (one.core.running, one.core.dp_engines_running()) == (3, True)
    await one.outputs(3)
    await one.core.abort_requests_async(["gen-0", "gen-2", "gen-unknown"])
    await holds(lambda: one.core.running == 1)
    assert one.engine.cancelled == ["gen-0", "gen-2"]
    one.core.shutdown()
    await holds(lambda: one.core.running == 0)
    assert not one.core.dp_engines_running()
    assert len(one.engine.cancelled) == 3


async def test_a_generation_that_is_ended_before_it_begins_reaches_no_engine(core, make_request):
    one = Running(core)
    await one.core.add_request_async(make_request())
    await one.core.abort_requests_async(["gen-1"])
    await holds(lambda: one.core.running == 0)
    assert one.engine.requests == []


# rows of log-probabilities


def rows(core, positions: list[TokenLogprobs], wanted: int | None) -> list[list[tuple[int, float]]]:
    lists = core._logprobs_lists(positions, wanted)
    assert list(lists.sampled_token_ranks) == [one.sampled_rank for one in positions]
    pairs = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def spoken(sampled: int, logprob: float, rank: int, *others: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs([sampled, *(token for token, _ in others)], [logprob, *(value for _, value in others)], rank)


BEST = [(10, -0.1), (11, -0.2), (12, -0.3)]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (spoken(10, -0.1, 1, BEST[1], BEST[2]), [BEST[0], BEST[0], BEST[1]]),
        (spoken(11, -0.2, 2, BEST[0], BEST[2]), [BEST[1], BEST[0], BEST[1]]),
        (spoken(12, -0.3, 3, BEST[0], BEST[1]), [BEST[2], BEST[0], BEST[1]]),
        (spoken(99, -5.0, 70, BEST[0], BEST[1]), [(99, -5.0), BEST[0], BEST[1]]),
    ],
    ids=["the best", "the last of the best", "just outside", "far outside"],
)
def test_a_row_is_the_sampled_token_and_the_best(core, position, expected):
    assert rows(core, [position], 2) == [expected]


def test_a_row_without_others_is_the_sampled_token(core):
    assert rows(core, [spoken(10, -0.1, 1), spoken(99, -5.0, 70)], 0) == [[(10, -0.1)], [(99, -5.0)]]


def test_a_row_of_a_small_vocabulary_is_filled(core):
    (row,) = rows(core, [spoken(10, -0.1, 1, (11, -2.3))], 4)
    assert row == [(10, -0.1), (10, -0.1), (11, -2.3), (10, -0.1), (10, -0.1)]


def test_rows_of_all_candidates_are_as_wide_as_the_widest(core):
    positions = [spoken(10, -0.1, 1, BEST[1], BEST[2]), spoken(11, -0.2, 2, BEST[0], BEST[2])]
    assert rows(core, positions, -1) == [[BEST[0], *BEST], [BEST[1], *BEST]]


@pytest.mark.parametrize("wanted", [0, 1, 3, 20])
def test_rows_are_those_of_one_engine(core, wanted):
    """Through vLLM's own wire: its sampler's rows, its dictionaries, its JSON, our reading, and rows again."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine.logprobs import LogprobsProcessor

    random.seed(wanted)
    vocabulary = 40
    for _ in range(50):
        logprobs = sorted((-random.random() * 9 for _ in range(vocabulary)), reverse=True)
        tokens = random.sample(range(vocabulary), vocabulary)
        sampled = random.choice([0, 1, wanted, wanted + 1, random.randrange(vocabulary)])
        pairs = list(zip(tokens, logprobs, strict=True))
        at_engine = [pairs[sampled], *pairs[: wanted + 1]]  # an engine is asked for one more
        expected = [pairs[sampled], *pairs[:wanted]]

        processor = LogprobsProcessor(
            tokenizer=None,
            logprobs=[],
            prompt_logprobs=None,
            cumulative_logprob=0.0,
            num_logprobs=wanted + 1,
            num_prompt_logprobs=None,
        )
        lists = core.LogprobsLists(
            np.array([[token for token, _ in at_engine]]),
            np.array([[value for _, value in at_engine]]),
            np.array([sampled + 1]),
            None,
        )
        processor._update_sample_logprobs(lists)
        told = ServingTokens._create_tokens_logprobs(None, [tokens[sampled]], processor.logprobs, wanted + 1)
        (row,) = rows(core, read_logprobs(told.model_dump()), wanted)
        assert [token for token, _ in row] == [token for token, _ in expected]
        assert [value for _, value in row] == pytest.approx([value for _, value in expected])
