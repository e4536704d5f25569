import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest

from trivet.check.compatible import NAMES, compatible
from trivet.check.told import TELL, EngineFacts
from trivet.check.verdict import Level, worst
from trivet.connectors import CONNECTORS
from trivet.connectors.nixl import NixlConnector

GOOD = EngineFacts(
    whole=True,
    trivet="0.1.0",
    vllm="0.32.0",
    connector="NixlConnector",
    kv_role="kv_producer",
    connector_options={},
    load_failure_policy="fail",
    kv_buffer_device="cuda",
    permutes_kv=False,
    block_tokens=64,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    kv_dtype_flag="auto",
    tensor_parallel=1,
    pipeline_parallel=1,
    data_parallel=1,
    decode_context_parallel=1,
    model="/models/llama",
    revision="",
    config_digest="c0",
    weights_digest="w0",
    overrides_digest="",
    load_format="auto",
    served_names=("m",),
    max_length_tokens=8192,
    tokenizer="/models/llama",
    tokenizer_tokens=128256,
    kv_heads=8,
    is_mla=False,
    has_state_layers=False,
    hybrid_manager=True,
    speculative="",
    quantization="",
    prefix_caching=True,
    hash_algorithm="sha256",
    hash_seed="",
    device="cuda",
    gpus=({"name": "NVIDIA H200", "uuid": "GPU-a"},),
)
EAGLE = '{"method": "eagle", "model": "org/draft", "tokens": 3}'
NGRAM = '{"method": "ngram", "tokens": 3}'


def pair(connector="NixlConnector", both=None, prefill=None, decode=None):
    base = dataclasses.replace(GOOD, connector=connector, **(both or {}))
    return (
        dataclasses.replace(base, **(prefill or {})),
        dataclasses.replace(base, **{"kv_role": "kv_consumer", **(decode or {})}),
    )


def judged(connector="NixlConnector", **facts):
    findings = compatible(*pair(connector, **facts), connector, "prefill-0 -> decode-1")
    assert tuple(one.name for one in findings) == NAMES
    assert {one.about for one in findings} == {"prefill-0 -> decode-1"}
    assert all(one.mend for one in findings if one.level is not Level.PASS)
    return {one.name: one for one in findings}


def bad(findings):
    return {name: one.level for name, one in findings.items() if one.level is not Level.PASS}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_good_pair_passes(connector):
    assert bad(judged(connector)) == {}


FAIL, WARN = Level.FAIL, Level.WARN
REFUSED = "NIXL's handshake refuses it"

CASES = [
    # what differs on decode, the finding, its level, words of it, words of its mend
    (
        {"vllm": "0.30.0"},
        "vllm-version",
        FAIL,
        f"vLLM differs: 0.32.0 on prefill-0, 0.30.0 on decode-1; {REFUSED}",
        "vllm==0.32.0",
    ),
    (
        {"connector": ""},
        "connector",
        FAIL,
        "decode-1 has no connector",
        '"kv_connector": "NixlConnector", "kv_role": "kv_consumer"',
    ),
    ({"connector": "MooncakeConnector"}, "connector", FAIL, "decode-1 has MooncakeConnector", "--kv-transfer-config"),
    ({"connector": "NixlPushConnector"}, "connector", FAIL, "decode-1 has NixlPushConnector", "--kv-transfer-config"),
    ({"kv_role": "kv_producer"}, "roles", WARN, "decode-1 is kv_producer", '"kv_role": "kv_consumer"'),
    (
        {"block_tokens": 32},
        "block-size",
        FAIL,
        f"not a multiple of prefill's; {REFUSED}",
        "start both with --block-size 64",
    ),
    ({"block_tokens": 96}, "block-size", FAIL, "not a multiple", "--block-size 96"),
    ({"block_tokens": 128}, "block-size", WARN, "puts 2 blocks together", "--block-size 128"),
    ({"block_tokens": 128, "kv_buffer_device": "cpu"}, "block-size", FAIL, "host memory", "--block-size 128"),
    ({"dtype": "float16"}, "dtype", FAIL, REFUSED, "start both with --dtype bfloat16"),
    (
        {"kv_dtype": "fp8", "kv_dtype_flag": "fp8"},
        "kv-dtype",
        FAIL,
        "bfloat16 on prefill-0, fp8 on decode-1",
        "--kv-cache-dtype bfloat16",
    ),
    ({"kv_dtype_flag": "bfloat16"}, "kv-dtype", FAIL, "which both come to bfloat16; NIXL", "--kv-cache-dtype auto"),
    ({"pipeline_parallel": 2}, "pipeline-parallel", FAIL, "2 on decode-1", "--pipeline-parallel-size 1"),
    ({"device": "cpu"}, "kv-layout", FAIL, "device differs", "same kind of device"),
    ({"hybrid_manager": False}, "kv-layout", FAIL, REFUSED, "--disable-hybrid-kv-cache-manager"),
    (
        {"gpus": ({"name": "NVIDIA L4"},)},
        "kv-layout",
        WARN,
        "NVIDIA H200 on prefill-0, NVIDIA L4",
        "--attention-backend",
    ),
    ({"kv_layout": "NHD"}, "kv-layout", WARN, "(vLLM chooses) on prefill-0, LBNHC", "VLLM_KV_CACHE_LAYOUT=LBNHC"),
    ({"model": "org/llama"}, "model", FAIL, f"under two names; {REFUSED}", "start both with --model /models/llama"),
    ({"weights_digest": "w1"}, "model", FAIL, "no handshake looks at it, and tokens would be wrong", "the same files"),
    ({"config_digest": "c1"}, "model", FAIL, "config.json differs", "the same files"),
    ({"overrides_digest": "o1"}, "model", FAIL, "--hf-overrides differs: (none)", "--hf-overrides"),
    ({"quantization": "fp8"}, "model", FAIL, "--quantization differs: (none) on prefill-0, fp8", "--quantization"),
    ({"load_format": "dummy"}, "model", WARN, "right tokens prove nothing", "checkpoint's weights"),
    ({"revision": "abc", "weights_digest": None}, "model", FAIL, "--revision differs: (the newest)", "same --revision"),
    ({"weights_digest": None}, "model", WARN, "which weights: not told by decode-1", "see the canaries"),
    ({"speculative": EAGLE}, "speculative", FAIL, f"is handed over; {REFUSED}", "same --speculative-config"),
    (
        {"prefix_caching": False},
        "prefix-caching",
        WARN,
        "takes the whole prompt's KV again",
        "start decode-1 with --enable-prefix-caching",
    ),
    (
        {"max_length_tokens": 4096},
        "max-length",
        FAIL,
        "decode refuses what prefill has computed",
        "--max-model-len 4096",
    ),
    ({"max_length_tokens": 9000}, "max-length", WARN, "prefill refuses", "--max-model-len 8192"),
    (
        {"load_failure_policy": "recompute"},
        "load-failure-policy",
        WARN,
        "looks like a slow one",
        '"kv_load_failure_policy": "fail"',
    ),
    (
        {"tokenizer_tokens": 32000},
        "tokenizer",
        FAIL,
        "128256 on prefill-0, 32000 on decode-1",
        "--tokenizer /models/llama",
    ),
]


@pytest.mark.parametrize(("decode", "name", "level", "said", "mend"), CASES)
def test_each_mismatch_is_named_with_its_mend(decode, name, level, said, mend):
    findings = judged(decode=decode)
    assert bad(findings) == {name: level}
    assert said in findings[name].said
    assert mend in findings[name].mend


def test_every_name_has_a_mismatch_of_its_own():
    named = {case[1] for case in CASES} | {"tensor-parallel", "hash-seed"}  # below
    assert named == set(NAMES)


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "level", "said"),
    [
        (1, 2, {}, Level.PASS, "1 on prefill-0, 2 on decode-1"),
        (4, 2, {}, Level.PASS, "NixlConnector fits them"),
        (2, 3, {}, FAIL, REFUSED),
        (16, 8, {}, FAIL, "8 KV heads, fewer than prefill has ranks"),
        (8, 16, {}, Level.PASS, "fits them"),
        (
            16,
            32,
            {},
            Level.PASS,
            "fits them",
        ),
        (16, 8, {"is_mla": True}, Level.PASS, "fits them"),
        (16, 8, {"has_state_layers": True}, Level.PASS, "fits them"),
        (1, 2, {"kv_layout": "NHD"}, FAIL, "the KV layout is LBNHC"),
        (1, 2, {"kv_layout": "HND"}, Level.PASS, "fits them"),
        (1, 1, {"decode_context_parallel": 2}, Level.PASS, "1 rank on both"),
    ],
)
def test_nixl_takes_other_ranks_so_far(prefill, decode, both, level, said):
    finding = judged(both=both, prefill={"tensor_parallel": prefill}, decode={"tensor_parallel": decode})[
        "tensor-parallel"
    ]
    assert (finding.level, said in finding.said) == (level, True), finding


def test_larger_blocks_and_more_ranks_on_prefill_are_too_much_for_nixl():
    findings = judged(prefill={"tensor_parallel": 2}, decode={"block_tokens": 128})
    assert findings["block-size"].level is FAIL
    assert "more tensor-parallel ranks" in findings["block-size"].said


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"tensor_parallel": 2}, "tensor-parallel"),
        ({"block_tokens": 128}, "block-size"),
        ({"kv_role": "kv_producer"}, "roles"),
        ({"pipeline_parallel": 2}, "pipeline-parallel"),
        ({"data_parallel": 2}, "pipeline-parallel"),
        ({"decode_context_parallel": 2}, "tensor-parallel"),
        ({"speculative": NGRAM}, "speculative"),
        ({"revision": "abc"}, "model"),
        ({"trivet": "0.0.1"}, "vllm-version"),
    ],
)
def test_trivet_connector_needs_both_alike(changed, name):
    assert name in bad(judged("TrivetConnector", decode=changed))


def test_the_mend_of_a_missing_connector_is_whole():
    mend = judged("TrivetConnector", prefill={"connector": ""})["connector"].mend
    assert '"kv_connector_module_path": "trivet.transfer.connector"' in mend
    assert '"kv_role": "kv_producer"' in mend
    assert mend.startswith("start prefill-0 with --kv-transfer-config '{")


def test_a_connector_may_be_one_of_several():
    several = {"connector": "MultiConnector", "connector_options": {"connectors": [{"kv_connector": "NixlConnector"}]}}
    assert bad(judged(both=None, prefill=several, decode=several)) == {}
    assert bad(judged(decode={"connector": "NixlPullConnector"})) == {}


def test_both_roles_at_once_pass():
    assert bad(judged("TrivetConnector", prefill={"kv_role": "kv_both"}, decode={"kv_role": "kv_both"})) == {}


@pytest.mark.parametrize(
    ("prefill", "decode", "level"),
    [
        ("", NGRAM, Level.PASS),
        (NGRAM, NGRAM, Level.PASS),
        (EAGLE, EAGLE, Level.PASS),
        (EAGLE, EAGLE.replace("3", "5"), Level.PASS),  # how many is no matter of KV
        (EAGLE, EAGLE.replace("draft", "other"), FAIL),
        (EAGLE, NGRAM, FAIL),
        (EAGLE, "no json", FAIL),
    ],
)
def test_drafts_that_keep_kv_must_be_the_same(prefill, decode, level):
    findings = judged(prefill={"speculative": prefill}, decode={"speculative": decode})
    assert findings["speculative"].level is level


@pytest.mark.parametrize(
    ("prefill", "decode", "level"),
    [
        ({}, {}, Level.PASS),
        ({"hash_seed": "1"}, {"hash_seed": "1"}, Level.PASS),
        ({"hash_seed": "1"}, {}, FAIL),
        ({}, {"hash_algorithm": "sha256_cbor"}, FAIL),
        ({"hash_algorithm": "xxhash"}, {"hash_algorithm": "xxhash"}, FAIL),
        ({"hash_algorithm": "xxhash", "hash_seed": "3"}, {"hash_algorithm": "xxhash", "hash_seed": "3"}, Level.PASS),
        ({"hash_seed": None}, {}, WARN),
    ],
)
def test_hashes_matter_where_blocks_are_found_by_them(monkeypatch, prefill, decode, level):
    assert judged(prefill=prefill, decode=decode)["hash-seed"].level is Level.PASS
    monkeypatch.setattr(NixlConnector, "addressed_by_hash", True)
    finding = judged(prefill=prefill, decode=decode)["hash-seed"]
    assert finding.level is level
    if level is FAIL:
        assert "start both with " in finding.mend


@pytest.mark.parametrize(
    ("prefill", "decode", "both", "level"),
    [
        ("HND", "LBHNC", {}, Level.PASS),  # two names of one
        ("LBHNC", "LBNHC", {}, FAIL),
        ("LBHNC", "LBNHC", {"permutes_kv": True}, WARN),
        ("LBNHC", "LBHNC", {"permutes_kv": True}, FAIL),
        ("LBHNC", "LBNHC", {"is_mla": True}, Level.PASS),
        ("LBHNC", None, {}, Level.PASS),  # which NIXL asks vLLM for
    ],
)
def test_layouts(prefill, decode, both, level):
    findings = judged(both=both, prefill={"kv_layout": prefill}, decode={"kv_layout": decode})
    assert findings["kv-layout"].level is level


@pytest.mark.parametrize("connector", [*CONNECTORS, "MooncakeConnector"])
def test_what_nobody_tells_is_a_warning_with_how_to_be_told(connector):
    findings = compatible(EngineFacts(), EngineFacts(), connector, "prefill-0 -> decode-0")
    assert worst(findings) is Level.WARN
    unknown = [one for one in findings if one.level is Level.WARN]
    assert {one.name for one in unknown} >= set(NAMES) - {"hash-seed"}
    for one in unknown:
        assert "not told by " in one.said
        assert one.mend.endswith(f"with {TELL}, or see the canaries")
    assert next(one for one in unknown if one.name == "dtype").mend.startswith("start prefill-0 and decode-0 with")


def test_who_tells_is_not_asked_again():
    findings = compatible(GOOD, EngineFacts(), "NixlConnector", "p -> d")
    assert next(one for one in findings if one.name == "dtype").mend == f"start d with {TELL}, or see the canaries"
    silent = dataclasses.replace(GOOD, tokenizer_tokens=None)
    findings = compatible(silent, GOOD, "NixlConnector", "p -> d")
    assert next(one for one in findings if one.name == "tokenizer").mend == "see the canaries"


def test_a_mismatch_shows_in_what_any_vllm_tells():
    """Of an engine that Trivet did not start: block size and the like stand in its metrics."""
    prefill = EngineFacts(vllm="0.32.0", block_tokens=64, kv_dtype="auto", kv_dtype_flag="auto", max_length_tokens=10)
    decode = dataclasses.replace(prefill, block_tokens=16, kv_dtype="fp8_e4m3", kv_dtype_flag="fp8_e4m3", vllm="0.30.0")
    failed = {one.name for one in compatible(prefill, decode, "NixlConnector") if one.level is FAIL}
    assert failed == {"block-size", "kv-dtype", "vllm-version"}
    unsure = dataclasses.replace(prefill, kv_dtype="bfloat16", kv_dtype_flag="bfloat16")
    assert {one.name for one in compatible(prefill, unsure, "NixlConnector") if one.level is FAIL} == set()


HASHED = {
    "vllm_version": "vllm",
    "nixl_connector_version": "vllm",
    "model": "model",
    "dtype": "dtype",
    "num_kv_heads": "config_digest",
    "head_size": "config_digest",
    "num_hidden_layers": "config_digest",
    "attn_backend_name": "attention_backend",
    "cache_dtype": "kv_dtype_flag",
    "is_hma_enabled": "hybrid_manager",
    "speculative_config": "speculative",
    "transfer_mode": "connector",
}
"""What NIXL's compatibility hash has, and the fact that tells it."""


def test_what_nixls_hash_covers_is_what_is_compared():
    """A further factor of a later vLLM would refuse pairs that this passes."""
    package = importlib.util.find_spec("vllm")
    source = Path(package.submodule_search_locations[0]) / "distributed/kv_transfer/kv_connector/v1/nixl/metadata.py"
    (hashing,) = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "compute_nixl_compatibility_hash"
    ]
    (factors,) = [
        node.value
        for node in ast.walk(hashing)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.targets[0].id == "factors"
    ]
    assert {key.value for key in factors.keys} == set(HASHED)


@pytest.mark.parametrize("fact", sorted(set(HASHED.values())))
def test_each_of_them_alone_fails_a_pair(fact):
    other = {"hybrid_manager": False, "speculative": EAGLE}.get(fact, "another")
    both = {"attention_backend": "FLASH_ATTN"}
    assert worst(judged(both=both, decode={fact: other}).values()) is FAIL
