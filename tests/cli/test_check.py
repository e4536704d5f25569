"""``trivet check``: arithmetic alone, and over simulated engines that it starts itself."""

import json

import pytest

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "torch_dtype": "bfloat16",
}
"""Llama-3.1-70B's."""


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


# arithmetic


def test_ten_thousand_tokens_of_the_70b_take_a_second_over_25_gigabits(trivet, model, tmp_path):
    done = trivet("check", "--model", model, "--prompt-tokens", "10000", "--link-gbps", "25", "--prefill-s", "3")
    assert (done.status, done.err) == (0, "")
    assert "327,680 bytes of KV a token in bfloat16" in done.out
    assert "10,000 tokens: 3.28 GB move from prefill to decode, 1.05 s at 25 Gbit/s: 26% of a TTFT" in done.out


@pytest.mark.parametrize("where", ["alone", "last", "file"])
def test_its_facts_as_json(trivet, model, tmp_path, where):
    file = tmp_path / "facts.json"
    asked = ["--model", model, "--prompt-tokens", "10000,20", "--link-gbps", "25", "--tensor-parallel", "4"]
    more = {"alone": ["--json", *asked], "last": [*asked, "--json"], "file": [*asked, "--json", str(file)]}[where]
    done = trivet("check", *more)
    assert (done.status, done.err) == (0, "")
    facts = json.loads(file.read_text() if where == "file" else done.out)
    assert facts["kv_bytes_per_token"] == 327680
    assert facts["kv_bytes_per_token_per_rank"] == 327680 // 4
    assert facts["kv_bytes"] == 3_276_800_000
    assert facts["transfer_s"] == pytest.approx(1.048576)
    assert [one["prompt_tokens"] for one in facts["prompts"]] == [10000, 20]
    assert facts["prompts"][1]["kv_bytes"] == 32 * 327680, "whole blocks"


def test_without_lengths_it_says_what_a_token_takes(trivet, model):
    done = trivet("check", "--model", model)
    assert done.status == 0
    assert "80 layers, full attention: 4,096 bytes a token each" in done.out
    assert "--prompt-tokens N and --link-gbps G say how long it takes" in done.out


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--model", "/nowhere/at/all"], "there is no folder"),
        (["--model", "~nobody-at-all/x"], "cannot be read"),
        (["--model", "/" + "x" * 300], "cannot be read"),
        (["--model", "MODEL", "--prompt-tokens", "many"], "'many' is no list of lengths"),
        (["--model", "MODEL", "--prompt-tokens", "10,0"], "'10,0' is no list of lengths"),
        (["--model", "MODEL", "--prompt-tokens", ","], "',' is no list of lengths"),
        (["--model", "MODEL", "--tensor-parallel", "7"], "7"),
        (["--model", "MODEL", "--kv-cache-dtype", "int3"], "'int3' is no KV cache dtype"),
        (["--model", "MODEL", "topology.yaml"], "--model is for arithmetic without engines"),
        (["--model", "MODEL", "--json", "/nowhere/facts.json"], "there is no folder /nowhere"),
        (["--model", "MODEL", "--json", "/tmp"], "is a folder"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(trivet, model, asked, told):
    done = trivet("check", *[model if one == "MODEL" else one for one in asked])
    assert (done.status, done.out) == (2, "")
    assert told in done.err
    assert " -> " in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("name", ["t.yaml", "t.conf"])
def test_json_never_swallows_the_topology(trivet, tmp_path, name):
    file = tmp_path / name
    file.write_text("model: {name: m}\ntiers: {mixed: {device: sim}}\n")
    done = trivet("check", "--json", str(file))
    assert done.status == 2
    assert ("there is no pair" if name == "t.yaml" else "which no report does") in done.err
    assert file.read_text().startswith("model:")


# over engines


TOPOLOGY = """\
model: {name: MODEL, served_names: [m], max_length: 2048}
kv: {connector: NixlConnector}
tiers:
  prefill: {device: sim, engines: [{name: p}]}
  decode: {device: sim, engines: [{name: d}], flags: {DECODE}}
gateway: {port: 0}
"""


def test_it_starts_the_engines_checks_them_and_stops_them(trivet, model, tmp_path):
    file, facts = tmp_path / "t.yaml", tmp_path / "facts.json"
    file.write_text(TOPOLOGY.replace("MODEL", model).replace("DECODE", "kv-bytes-per-token: 327680"))
    done = trivet("check", str(file), "--json", str(facts), "--prompt-tokens", "1000")
    assert "starting the engines" in done.out
    assert "p -> d" in done.out
    report = json.loads(facts.read_text())
    told = {one["name"]: one["level"] for one in report["findings"]}
    assert {told[name] for name in ("canary-error", "wrong-tokens", "recompute")} == {"pass"}
    assert (done.status, report["verdict"]) == (1, "warn"), "simulated engines do not tell what they are"
    assert report["pairs"]["p -> d"]["predictions"][0]["prompt_tokens"] == 1000
    assert "predicted for p -> d" in done.out
    assert done.out.rstrip().splitlines()[-1].startswith("WARN: ")
