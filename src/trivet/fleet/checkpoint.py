"""Tells two checkpoints apart without reading them whole: digests of a model folder's config and of its weights.

Weights of the same shapes (a base model and what was tuned from it) differ in their bytes only, so bytes are sampled
all over each file. The safetensors format: 8 bytes with the length of a JSON header (names, dtypes, shapes, offsets),
the header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})
"""Keys of ``config.json`` that change when a model is only saved again."""

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SAMPLES = 2048
"""Places that are looked at in all files together."""
_SAMPLE_BYTES = 4096
_MOST_HEADER_BYTES = 2**20
_LENGTH_BYTES = 8
_LIMIT_S = 10.0


def config_digest(folder: Path) -> str | None:
    """Of ``config.json``, whatever its spacing and order; None if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    return digest({name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL})


def weights_digest(folder: Path, limit_s: float = _LIMIT_S) -> str | None:
    """Of the weights' files: which tensors, of which shapes, and samples of their bytes.

    None if there are none, one cannot be read, or it takes longer than ``limit_s``. Copies of a checkpoint have one
    digest, wherever they are.
    """
    until = time.monotonic() + limit_s
    try:
        there = sorted(one for one in folder.iterdir() if one.suffix in _WEIGHTS and one.is_file())
    except OSError:
        return None
    first = next((suffix for suffix in _WEIGHTS if any(one.suffix == suffix for one in there)), None)
    files = [one for one in there if one.suffix == first]  # vLLM reads one format; folders may hold several
    if not files:
        return None
    found = hashlib.sha256()
    samples = min(64, max(2, _SAMPLES // len(files)))
    for file in files:
        if time.monotonic() > until:
            return None
        try:
            size = file.stat().st_size
            found.update(f"{file.name} {size}\n".encode())
            with file.open("rb", buffering=0) as opened:
                if file.suffix == ".safetensors":
                    length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
                    found.update(opened.read(min(length, _MOST_HEADER_BYTES)))
                for number in range(samples):
                    if time.monotonic() > until:
                        return None
                    opened.seek(max(0, size - _SAMPLE_BYTES) * number // (samples - 1))
                    found.update(opened.read(_SAMPLE_BYTES))
        except OSError:
            return None
    return found.hexdigest()[:16]


def digest(value: Any) -> str:
    """Of what JSON can say; the rest of it by its text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
