import json
import random
import struct

import pytest

from trivet.fleet import checkpoint
from trivet.fleet.checkpoint import config_digest, weights_digest

TENSORS = {"embed": 4096, "layer.0": 65536, "layer.1": 65536, "head": 4096}


def write(folder, *, tensors=TENSORS, seed=0, name="model.safetensors", dtype="U8"):
    folder.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for tensor, size in tensors.items():
        header[tensor] = {"dtype": dtype, "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(at))
    return folder


def test_copies_have_one_digest(tmp_path):
    one, other = write(tmp_path / "a"), write(tmp_path / "b/c")
    assert weights_digest(one) == weights_digest(other)
    assert len(weights_digest(one)) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"tensors": {**TENSORS, "head": 4095}},
        {"tensors": {("tail" if name == "head" else name): size for name, size in TENSORS.items()}},
        {"dtype": "I8"},
        {"name": "other.safetensors"},
    ],
)
def test_another_checkpoint_has_another(tmp_path, change):
    assert weights_digest(write(tmp_path / "a")) != weights_digest(write(tmp_path / "b", **change))


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_a_tuned_layer_shows_where_the_rest_is_the_same(tmp_path, share):
    """Tuned weights may differ in some layers only: the bytes are looked at all over the file."""
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    file = other / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = int(share * len(content)) + 512
    tuned = content[start : start + len(content) // 8]
    content[start : start + len(content) // 8] = bytes(byte ^ 1 for byte in tuned)
    file.write_bytes(content)
    assert weights_digest(one) != weights_digest(other)


def test_a_second_shard_counts(tmp_path):
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    for folder, seed in ((one, 5), (other, 6)):
        write(folder, seed=seed, name="model-2.safetensors")
    assert weights_digest(one) != weights_digest(other)


def test_files_of_a_format_that_is_not_loaded_do_not_count(tmp_path):
    one, other = write(tmp_path / "a"), write(tmp_path / "b")
    (other / "pytorch_model.bin").write_bytes(b"the same once more")
    assert weights_digest(one) == weights_digest(other)


def test_what_is_looked_at_is_bounded(tmp_path, monkeypatch):
    """However large: a file of holes with a header that claims to be huge."""
    file = write(tmp_path) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(struct.pack("<Q", 2**40))
        opened.truncate(2**40)
    asked = []
    read = checkpoint.Path.open

    def counting(self, *args, **more):
        opened = read(self, *args, **more)

        class Counting:
            def __enter__(self):
                return self

            def __exit__(self, *_):
                opened.close()

            def seek(self, *at):
                return opened.seek(*at)

            def read(self, size):
                asked.append(size)
                return opened.read(size)

        return Counting()

    monkeypatch.setattr(checkpoint.Path, "open", counting)
    assert weights_digest(tmp_path)
    assert sum(asked) < 2 * 2**20


def test_no_time_no_digest(tmp_path):
    assert weights_digest(write(tmp_path), limit_s=-1) is None


def test_nothing_to_look_at(tmp_path):
    assert weights_digest(tmp_path) is None
    assert weights_digest(tmp_path / "missing") is None
    assert config_digest(tmp_path) is None
    (tmp_path / "config.json").write_text("[1]")
    assert config_digest(tmp_path) is None


def test_a_config_is_what_it_says_however_it_is_written(tmp_path):
    says = {"hidden_size": 64, "rope": {"theta": 1e4}}
    told = []
    for number, text in enumerate(
        [
            json.dumps(says),
            json.dumps({**says, "transformers_version": "9", "_name_or_path": "/a"}, indent=3, sort_keys=True),
            json.dumps({**says, "rope": {"theta": 1e5}}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(text)
        told.append(config_digest(folder))
    assert told[0] == told[1] != told[2]
