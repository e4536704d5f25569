"""What stands where vLLM's engine core client stood, by itself; with vLLM's front end above it: ``test_frontend``."""

import asyncio
import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.processes import holds
from helpers.token_engine import ScriptedEngine, saying
from trivet.legs.wire import read_logprobs
from trivet.render.contract import Item, ServingError, TokenChunk, TokenLogprobs


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
        async with asyncio.timeout(20):
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
    assert (request.unsplittable, request.prompt_logprobs, request.kv_transfer_params) == (None, None, None)


async def test_an_adapter_goes_out_under_its_name(core, make_request):
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("poems", 1, "/adapters/poems")
    assert (await asked(core, make_request(lora_request=adapter))).model == "poems"


@pytest.mark.parametrize("wanted", [0, 1, -1])
async def test_log_probabilities_of_the_prompt_are_a_wish_of_their_own(core, make_request, wanted):
    request = await asked(core, make_request({"prompt_logprobs": wanted}))
    assert (request.prompt_logprobs, "prompt_logprobs" in request.sampling) == (wanted, False)
    assert "skip_reading_prefix_cache" not in request.sampling  # decode would compute what it is handed


@pytest.mark.parametrize(
    ("kind", "stop", "whole"),
    [
        ("FINAL_ONLY", None, True),
        ("FINAL_ONLY", [], True),
        ("FINAL_ONLY", ["word"], False),  # looked for while the answer is made
        ("DELTA", None, False),
        ("CUMULATIVE", None, False),
    ],
)
async def test_who_sees_nothing_before_the_end_can_have_it_begun_anew(core, make_request, kind, stop, whole):
    from vllm.sampling_params import RequestOutputKind

    request = make_request({"stop": stop, "output_kind": getattr(RequestOutputKind, kind)})
    assert (await asked(core, request)).whole is whole


@pytest.mark.parametrize("prompt", [5, 6, 7])
@pytest.mark.parametrize(("wanted", "least"), [(1, 0), (1, 1), (2, 1), (2, 2), (3, 0), (100, 0), (100, 3), (100, 100)])
async def test_no_more_is_asked_for_than_the_models_length_leaves(core, make_request, prompt, wanted, least):
    """``check_stop`` ends an answer there with the same reason, whatever was asked for."""
    one = Running(core)
    one.core.attach(SimpleNamespace(request_states={}), 8)
    request = make_request({"max_tokens": wanted, "min_tokens": least}, prompt_token_ids=list(range(prompt)))
    await one.core.add_request_async(request)
    await one.outputs(1)
    asked = one.engine.request.sampling
    assert asked["max_tokens"] == min(wanted, 8 - prompt)
    assert asked.get("min_tokens", 0) == min(least, 8 - prompt)
    assert request.sampling_params.max_tokens == wanted  # vLLM's own is as it was


KNOWN_SAMPLING = {
    "how many": {"n", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids"},
    "of one position": {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "logit_bias",
        "allowed_token_ids",
        "repetition_penalty",
    },
    "of the answer so far": {
        *("presence_penalty", "frequency_penalty", "seed", "structured_outputs", "extra_args", "bad_words"),
        *("thinking_token_budget", "repetition_detection", "trace_decode_token_ids", "watermarking"),
    },
    "of the prompt, told by prefill or refused": {
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start"),
    },
    "keeps KV from being read": {"skip_reading_prefix_cache"},
    "told beside a token": {"logprobs", "logprob_token_ids"},
    "of the text, or of vLLM's own process": {
        *("stop", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
        *("include_stop_str_in_output", "stream_interval", "skip_clone", "output_text_buffer_length"),
        *("_eos_token_id", "_all_stop_token_ids", "_watermarking_skipped", "_bad_words_token_ids"),
    },
}
"""What each of vLLM's sampling parameters means to an answer that two engines make."""


def test_every_sampling_parameter_is_known(core):
    """One that a later vLLM brings may change whether KV that is handed over is used, or what counts the answer."""
    assert set(core.SamplingParams.__struct_fields__) - set().union(*KNOWN_SAMPLING.values()) == set()


@pytest.mark.parametrize(
    ("wanted", "expected"), [(None, None), (0, 1), (1, 2), (20, 21), (-1, -1)], ids=["none", "0", "1", "20", "all"]
)
async def test_one_candidate_more_is_asked_for(core, make_request, wanted, expected):
    assert (await asked(core, make_request({"logprobs": wanted}))).sampling.get("logprobs") == expected


@pytest.mark.parametrize(
    ("extra", "expected", "kv", "ec"),
    [
        (None, None, None, None),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, None, {"do_remote_prefill": True}, None),
        ({"kv_transfer_params": {}, "ec_transfer_params": {"a": 1}, "mine": 1}, {"mine": 1}, {}, {"a": 1}),
    ],
)
async def test_transfer_parameters_are_fields_of_their_own(core, make_request, extra, expected, kv, ec):
    request = make_request({"extra_args": extra})
    seen = await asked(core, request)
    assert (seen.sampling.get("extra_args"), seen.kv_transfer_params, seen.ec_transfer_params) == (expected, kv, ec)
    assert request.sampling_params.extra_args == extra


@pytest.mark.parametrize(
    ("changes", "sampling", "message"),
    [
        ({"prompt_token_ids": None}, {}, "prompt embeddings are not served by this gateway"),
        ({"prompt_embeds": object()}, {}, "prompt embeddings are not served by this gateway"),
        ({"sampling_params": None}, {}, "prompt embeddings are not served by this gateway"),
    ],
)
async def test_what_token_ids_cannot_carry_is_refused_by_name(core, make_request, changes, sampling, message):
    one = Running(core)
    with pytest.raises(core.GracefulHTTPError) as caught:
        await one.core.add_request_async(make_request(sampling, **changes))
    assert (str(caught.value), caught.value.http_status) == (message, 501)
    assert (one.engine.requests, one.core.running) == ([], 0)


# images and the like; what they become: ``test_features``


@pytest.fixture
def image(core):
    """An item as vLLM's front end gives it."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    def make(offset: int = 1, length: int = 2, **changes: Any) -> MultiModalFeatureSpec:
        pixels = MultiModalFieldElem(torch.zeros(2, 3), MultiModalBatchedField())
        values = {
            "data": MultiModalKwargsItem({"pixel_values": pixels}),
            "modality": "image",
            "identifier": "image-a",
            "mm_position": PlaceholderRange(offset, length),
            "mm_hash": "image-a",
        }
        return MultiModalFeatureSpec(**values | changes)

    return make


async def test_images_go_out_encoded(core, make_request, image):
    features = (await asked(core, make_request(mm_features=[image()]))).features
    assert features.items == (Item("image-a", 1, 2),)
    assert json.loads(b"".join(features.encoded))["mm_hashes"] == {"image": ["image-a"]}
    for nothing in (None, []):
        assert (await asked(core, make_request(mm_features=nothing))).features is None


async def test_what_of_an_image_engines_cannot_be_told_is_refused_before_anything_is_begun(core, make_request, image):
    one = Running(core)
    known = []
    one.core.attach(SimpleNamespace(abort_requests=lambda ids, internal: known.append((ids, internal))), 8)
    with pytest.raises(core.GracefulHTTPError, match="without its tensors") as caught:
        await one.core.add_request_async(make_request(mm_features=[image(data=None)]))
    assert caught.value.http_status == 501
    assert (one.engine.requests, one.core.running, known) == ([], 0, [(["gen-1"], True)])


async def test_items_are_shortened_only_where_that_was_said_to_be_right(core, make_request, image):
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    marked = image(mm_position=PlaceholderRange(0, 3, is_embed=torch.tensor([False, True, False])))
    one = Running(core)
    with pytest.raises(core.GracefulHTTPError, match="is_embed"):
        await one.core.add_request_async(make_request(mm_features=[marked]))
    one.core.attach(SimpleNamespace(request_states={}), 8, core.Rules(shortens=True))
    await one.core.add_request_async(make_request(mm_features=[marked]))
    await one.outputs(1)
    assert one.engine.request.features.items == (Item("image-a", 1, 1),)


async def test_the_choices_of_a_request_share_what_is_sent(core, make_request, image, monkeypatch):
    calls = []

    def encode(items):
        calls.append(items)
        return original(items)

    original = core.encode
    monkeypatch.setattr(core, "encode", encode)
    one, shared = Running(core), [image()]
    for number in range(3):
        await one.core.add_request_async(make_request(request_id=f"{number}_gen", mm_features=shared))
    await one.outputs(3)
    assert len(calls) == 1
    assert len({id(request.features) for request in one.engine.requests}) == 1
    await one.core.add_request_async(make_request(request_id="other", mm_features=[image()]))
    await one.outputs(1)
    assert (len(calls), one.core._encoding) == (2, {})


async def test_a_choice_that_is_ended_leaves_the_others_their_images(core, make_request, image, monkeypatch):
    going = threading.Event()

    def encode(items):
        assert going.wait(20)
        return original(items)

    original = core.encode
    monkeypatch.setattr(core, "encode", encode)
    one, shared = Running(core), [image()]
    for name in ("a", "b"):
        await one.core.add_request_async(make_request(request_id=name, mm_features=shared))
    await asyncio.sleep(0)
    await one.core.abort_requests_async(["a"])
    await holds(lambda: one.core.running == 1)
    going.set()
    assert [output.request_id for output in await one.outputs(1)] == ["b"]


async def test_an_image_that_cannot_be_encoded_fails_its_request_alone(core, make_request, image, monkeypatch):
    def encode(items):
        raise TypeError("no tensor")

    monkeypatch.setattr(core, "encode", encode)
    one, told = Running(core), []
    state = SimpleNamespace(queue=SimpleNamespace(put=told.append), parent_req=None)
    one.core.attach(SimpleNamespace(request_states={"gen-1": state}, abort_requests=lambda *_, **__: []), 8)
    await one.core.add_request_async(make_request(mm_features=[image()]))
    await holds(lambda: told != [])
    assert (told[0].http_status, str(told[0])) == (500, "TypeError: no tensor")
    await one.core.add_request_async(make_request(request_id="text"))
    await one.outputs(1)


@pytest.mark.parametrize(("said", "sent"), [(None, None), (True, None), (False, False)])
async def test_only_a_refusal_of_a_watermark_is_sent(core, make_request, said, sent):
    """Whether there will be one is the engines' to know."""
    request = make_request()
    if not hasattr(request.sampling_params, "watermarking"):
        pytest.skip("this vLLM has no watermarks")
    request.sampling_params.watermarking = said
    assert (await asked(core, request)).sampling.get("watermarking") is sent


async def test_a_conversation_goes_out(core, make_request):
    request = make_request()
    assert (await asked(core, request)).session_id is None
    if "session_id" not in type(request).__struct_fields__:
        pytest.skip("this vLLM knows no conversations")
    assert (await asked(core, make_request(session_id="talk-1"))).session_id == "talk-1"


async def test_a_grammar_behind_reasoning_is_refused_where_the_wire_cannot_say_so(core, make_request, monkeypatch):
    from vllm.sampling_params import StructuredOutputsParams

    monkeypatch.setattr(core, "_ENGINES_KNOW_THOUGHT", False)
    sampling = {"structured_outputs": StructuredOutputsParams(regex="a")}
    one = Running(core)
    with pytest.raises(core.GracefulHTTPError) as caught:
        await one.core.add_request_async(make_request(sampling, reasoning_ended=False))
    assert (caught.value.http_status, "reasoning" in str(caught.value)) == (501, True)
    await one.core.add_request_async(make_request(sampling, reasoning_ended=True))
    await one.outputs(1)


async def test_a_request_that_only_frees_kv_is_none_of_ours(core, make_request):
    one = Running(core)
    await one.core.add_request_async(make_request(abort_immediately=True))
    assert (one.engine.requests, one.core.running) == ([], 0)


# what comes back


async def test_tokens_come_back_in_their_order(core, make_request):
    one = Running(core, saying([5, 6, 7], finish="stop", stop_reason=7))
    await one.core.add_request_async(make_request())
    first, second, last = await one.outputs(3)
    assert (first.request_id, first.new_token_ids, first.finish_reason) == ("gen-1", [5], None)
    assert (second.new_token_ids, second.stop_reason) == ([6], None)
    assert (last.new_token_ids, str(last.finish_reason), last.stop_reason) == ([7], "stop", 7)


async def test_tokens_that_came_together_come_back_one_by_one(core, make_request):
    """As a detokenizer has them of an engine: a stop string may end the answer between them."""
    logprobs = [spoken(5, -0.5, 1), spoken(6, -0.6, 1), spoken(7, -0.7, 1)]
    script = saying([5, 6, 7], at_once=3, finish="stop", stop_reason=7, cached=2, logprobs=logprobs)
    one = Running(core, script)
    await one.core.add_request_async(make_request({"logprobs": 0}))
    outputs = await one.outputs(3)
    assert [output.new_token_ids for output in outputs] == [[5], [6], [7]]
    assert [output.new_logprobs.logprobs[0][0] for output in outputs] == [-0.5, -0.6, -0.7]
    assert [str(output.finish_reason) for output in outputs] == ["None", "None", "stop"]
    assert [output.stop_reason for output in outputs] == [None, None, 7]
    assert [output.prefill_stats and output.prefill_stats.num_cached_tokens for output in outputs] == [2, None, None]


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


PROMPT = [TokenLogprobs([2, 7], [-2.0, -0.5], 2), TokenLogprobs([3, 9], [-0.25, -1.0], 1)]


async def test_log_probabilities_of_the_prompt_come_back_with_the_first(core, make_request):
    async def script(_):
        yield TokenChunk([5], prompt_logprobs=PROMPT)
        yield TokenChunk([6], finish_reason="length")

    one = Running(core, script)
    await one.core.add_request_async(make_request({"prompt_logprobs": 1}))
    first, last = await one.outputs(2)
    rows_of = first.new_prompt_logprobs_tensors
    assert rows_of.logprob_token_ids.tolist() == [[2, 7], [3, 3]]
    assert rows_of.logprobs.tolist() == [[-2.0, -0.5], [-0.25, -0.25]]
    assert rows_of.sampled_token_ranks.tolist() == [2, 1]
    assert last.new_prompt_logprobs_tensors is None


async def test_a_prompt_of_one_token_has_no_log_probabilities(core, make_request):
    async def script(_):
        yield TokenChunk([5], finish_reason="length", prompt_logprobs=[])

    one = Running(core, script)
    await one.core.add_request_async(make_request({"prompt_logprobs": 1}, prompt_token_ids=[1]))
    (output,) = await one.outputs(1)
    assert output.new_prompt_logprobs_tensors is None


class Processor:
    """As much of vLLM's output processor as is looked at."""

    def __init__(self, state) -> None:
        self.request_states = {"gen-1": state}


@pytest.mark.parametrize("known", [True, False])
async def test_cached_tokens_that_are_told_last_are_put_where_vllm_keeps_them(core, make_request, known):
    async def script(_):
        yield TokenChunk([5])
        yield TokenChunk([6], finish_reason="length", cached_tokens=2, created_cache_tokens=None)

    state = SimpleNamespace(num_cached_tokens=0, num_cache_creation_tokens=9)
    one = Running(core, script)
    one.core.attach(Processor(state) if known else SimpleNamespace(request_states={}), 256)
    await one.core.add_request_async(make_request())
    await one.outputs(2)
    assert (state.num_cached_tokens, state.num_cache_creation_tokens) == ((2, 0) if known else (0, 9))


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


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, "VLLMClientError"),
        (404, "VLLMNotFoundError"),
        (503, 503),
        (504, 504),
        (520, 502),
        (499, 400),
        (99999, 502),
    ],
)
def test_errors_are_those_that_vllm_raises(core, status, expected):
    error = core._as_vllm_raises(ServingError("why", status=status))
    assert str(error) == "why"
    if isinstance(expected, str):
        assert type(error).__name__ == expected
    else:
        assert error.http_status == expected


# rows of log-probabilities


def rows(core, positions: list[TokenLogprobs], wanted: int | None) -> list[list[tuple[int, float]]]:
    lists = core._logprobs_lists(positions, core._Candidates(wanted))
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


def test_a_row_of_a_small_vocabulary_is_short(core):
    (row,) = rows(core, [spoken(10, -0.1, 1, (11, -2.3))], 4)
    assert row == [(10, -0.1), (10, -0.1), (11, -2.3)]


def test_rows_are_as_wide_as_the_widest(core):
    narrow, wide = rows(core, [spoken(10, -0.1, 1), spoken(11, -0.2, 2, BEST[0])], 4)
    assert wide == [BEST[1], BEST[0], BEST[1]]
    assert narrow == [BEST[0]] * 3


def test_rows_of_chosen_tokens_have_these_in_their_order(core):
    candidates = core._Candidates(0, (12, 7, 10))
    lists = core._logprobs_lists([spoken(10, -0.1, 1, BEST[1], BEST[2])], candidates)
    assert lists.logprob_token_ids.tolist() == [[10, 12, 7, 10]]
    assert lists.logprobs.tolist() == [[-0.1, -0.3, -np.inf, -0.1]]


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
