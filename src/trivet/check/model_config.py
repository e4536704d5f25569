"""A model's ``config.json``: where it is found, and what its fields are called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivet.errors import MissingPackageError, TrivetError

Config = Mapping[str, Any]
"""What a ``config.json`` holds."""

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "text_encoder", "decoder", "generator")
"""Where a config of several parts has that of its language model."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "n_head_kv",  # Falcon
    "num_kv_heads",
    "multi_query_group_num",  # ChatGLM
    "num_attention_groups",  # Step
    "n_kv_heads",  # Mistral's own format
)
_HEAD_DIM = ("head_dim", "hidden_size_per_head")
_WINDOW = ("sliding_window",)
"""Names of one thing. ``n_layer`` and its like are those of GPT-2, Bloom, Falcon and MPT."""

_Defaults = tuple[int, int, int, int | None, int | None, int | None]

DEFAULTS: Mapping[str, _Defaults] = {
    "llama": (32, 4096, 32, None, None, None),
    "mistral": (32, 4096, 32, 8, None, 4096),
    "mixtral": (32, 4096, 32, 8, None, None),
    "qwen2": (32, 4096, 32, 32, None, 4096),
    "qwen2_moe": (24, 2048, 16, 16, None, 4096),
    "qwen2_vl_text": (80, 8192, 64, 8, None, 4096),
    "qwen2_5_vl_text": (80, 8192, 64, 8, None, 4096),
    "qwen3": (32, 4096, 32, 32, 128, 4096),
    "qwen3_moe": (24, 2048, 32, 4, None, 4096),
    "qwen3_vl_text": (32, 4096, 32, 32, 128, None),
    "qwen3_vl_moe_text": (24, 2048, 16, 16, 128, None),
    "qwen3_next": (48, 2048, 16, 2, 256, None),
    "qwen3_5_text": (32, 4096, 16, 4, 256, None),
    "qwen3_5_moe_text": (40, 2048, 16, 2, 256, None),
    "gemma": (28, 3072, 16, 16, 256, None),
    "gemma2": (26, 2304, 8, 4, 256, 4096),
    "gemma3_text": (26, 2304, 8, 4, 256, 4096),
    "gemma3n_text": (35, 2048, 8, 2, 256, 512),
    "gemma4_text": (30, 2304, 8, 4, 256, 512),
    "phi3": (32, 3072, 32, None, None, None),
    "phimoe": (32, 4096, 32, 8, None, None),
    "starcoder2": (30, 3072, 24, 2, None, None),
    "cohere2": (40, 8192, 64, None, None, 4096),
    "olmo3": (32, 4096, 32, None, None, 4096),
    "exaone4": (32, 4096, 32, 32, None, 4096),
    "gpt_oss": (36, 2880, 64, 8, 64, 128),
    "smollm3": (36, 2048, 16, 4, None, None),
    "glm": (40, 4096, 32, 2, 128, None),
    "glm4": (40, 4096, 32, 2, 128, None),
    "glm4_moe": (46, 4096, 96, 8, None, None),
    "llama4_text": (48, 5120, 40, 8, 128, None),
    "minimax_m2": (62, 3072, 48, 8, 128, None),
    "seed_oss": (64, 4096, 80, 8, 128, None),
    "ernie4_5": (18, 1024, 16, 2, 128, None),
    "ernie4_5_moe": (28, 2560, 20, 4, None, None),
    "deepseek_v3": (61, 7168, 128, 128, None, None),
}
"""What transformers takes where a config is silent, as configs nested in another often are: layers, hidden size, heads,
KV heads (None: as many as heads), head size (None: hidden size / heads), sliding window (where it is used, see
``kv_layers``). The tests compare them with the installed transformers."""

_DEFAULT_OF = {_LAYERS: 0, _HIDDEN: 1, _HEADS: 2, _KV_HEADS: 3, _HEAD_DIM: 4, _WINDOW: 5}

_MOST_LAYERS = 10_000
"""No model has so many; each is an entry of a list here."""

GIVE = "give the folder or the hub name of a generative language model, with its whole config.json"


def text_parts(config: Config) -> list[Config]:
    """A config, and what is nested in it on the way to its language model's, which is the last."""
    parts = [config]
    while nested := next((part for name in _NESTED if isinstance(part := parts[-1].get(name), Mapping)), None):
        parts.append(nested)
    return parts


class Reading:
    """A config being read: knows the names that its fields go by, and keeps notes of what it does not say."""

    def __init__(self, config: Config) -> None:
        self.text = text_parts(config)[-1]
        self.model_type = str(self.text.get("model_type") or config.get("model_type") or _named(config))
        self.notes: list[str] = []

    def note(self, note: str) -> None:
        """Keeps a note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def number(self, *names: str, within: Config | None = None) -> int:
        """As ``optional``, of a field that there must be."""
        value = self.optional(*names, within=within)
        if value is None:
            raise TrivetError(f"the config of {self.model_type} has no {names[0]}", mend=GIVE)
        return value

    def optional(self, *names: str, within: Config | None = None) -> int | None:
        """The first of these fields that there is; else what transformers takes. Null counts as not said."""
        fields = self.text if within is None else within
        for name in names:
            if (value := fields.get(name)) is not None:
                return self._checked(name, value)
        if any(name in fields for name in names) or within is not None:
            return None
        index = _DEFAULT_OF.get(names)
        value = DEFAULTS[self.model_type][index] if index is not None and self.model_type in DEFAULTS else None
        return None if value is None else self.taken(names[0], value)

    def taken(self, name: str, value: int) -> int:
        """Notes that the config does not have a field, and what transformers takes then."""
        self.note(f"{name} {value}: transformers' default for {self.model_type}, the config does not say")
        return value

    def _checked(self, name: str, value: Any) -> int:
        is_count = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_count or value < 0:
            raise TrivetError(f"the config of {self.model_type} has {name}: {value!r}, which is no count", mend=GIVE)
        return int(value)

    def strings(self, *names: str) -> Sequence[str] | None:
        """A list with an entry for each layer."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, list) and value:
                return [str(one) for one in value]
        return None

    def says_layers(self) -> bool:
        """Whether there is a list with the type of each layer."""
        return self.strings("layer_types", "layers_block_type") is not None

    def layers(self) -> int:
        """How many layers there are."""
        layers = self.number(*_LAYERS)
        if layers > _MOST_LAYERS:
            raise TrivetError(f"the config of {self.model_type} has {layers} layers", mend=GIVE)
        return layers

    def said_layers(self) -> int | None:
        """As ``layers``; None where only a list of their types says it."""
        return self.optional(*_LAYERS)

    def hidden(self) -> int:
        """Elements of the hidden state."""
        return self.number(*_HIDDEN)

    def heads(self) -> int:
        """Heads of queries."""
        return self.number(*_HEADS)

    def head_dim(self) -> int:
        """Elements of a head: as said, else the hidden state's part."""
        if size := self.optional(*_HEAD_DIM):
            return size
        return self.hidden() // max(self.heads(), 1)

    def kv_heads(self) -> int:
        """Heads of keys and values: as said, else as many as those of queries."""
        said = self.optional(*_KV_HEADS)
        return self.heads() if said is None else said

    def window(self) -> int | None:
        """Tokens of the sliding window; 0 means none, as in vLLM."""
        value = self.text.get("sliding_window")
        if isinstance(value, list):  # Mistral's own format: one for each layer of a pattern
            value = next((one for one in value if one), None)
            return None if value is None else self._checked("sliding_window", value)
        return self.optional(*_WINDOW) or None


def _named(config: Config) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return "mistral" if "n_layers" in config and "dim" in config else "(no model_type)"


# ---- where it is found


_TIMEOUT_S = 10.0
_PATH = (".", "~", "/")
_MEND = "give a model's folder, its config.json, or a hub name that this machine can reach"


def read_config(model: str, revision: str | None = None) -> Config:
    """The ``config.json`` of a model: its folder, the file itself, or a hub name. Asks the hub for this file alone.

    Raises:
        TrivetError: there is none, it cannot be read, or the hub cannot be reached.
    """
    try:
        path = Path(model).expanduser()
        is_folder, is_a_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise TrivetError(f"{model[:80]!r} cannot be read ({error})", mend=_MEND) from None
    if is_folder:
        found = next((file for name in _FILES if (file := path / name).is_file()), None)
        if found is None:
            raise TrivetError(f"{path} has no config.json", mend=_MEND)
        return _parsed(found)
    if is_a_file:
        if path.suffix != ".json":
            raise TrivetError(f"{path} is no config.json", mend=_MEND)
        return _parsed(path)
    if model.startswith(_PATH) or model.count("/") > 1 or not model:
        raise TrivetError(f"there is no folder {model!r}", mend=_MEND)
    return _parsed(_from_hub(model, revision))


_FILES = ("config.json", "params.json")
"""The second is in Mistral's own format, which vLLM reads as well."""


def _parsed(file: Path) -> Config:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise TrivetError(f"{file} cannot be read ({error})", mend=_MEND) from None
    if not isinstance(config, dict):
        raise TrivetError(f"{file} holds no config", mend=_MEND)
    return config


def _from_hub(name: str, revision: str | None) -> Path:
    """Where the file is on this machine: in Hugging Face's cache, or brought there."""
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise MissingPackageError(
            f"{name!r} is no folder here, and huggingface_hub, which asks the hub, is not installed",
            mend="pip install huggingface_hub, or give a model's folder",
        ) from None
    try:
        for file in _FILES:
            if isinstance(cached := try_to_load_from_cache(name, file, revision=revision), str):
                return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise TrivetError(
                f"{name!r} is no folder here and not in Hugging Face's cache, and HF_HUB_OFFLINE is set", mend=_MEND
            )
        return Path(hf_hub_download(name, _FILES[0], revision=revision, etag_timeout=_TIMEOUT_S))
    except HFValidationError:
        raise TrivetError(f"{name!r} is no folder here, and no name of a model", mend=_MEND) from None
    except RepositoryNotFoundError:
        raise TrivetError(
            f"there is no folder {name!r} here, and no such model at {constants.ENDPOINT}, or it is private (HF_TOKEN)",
            mend=_MEND,
        ) from None
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError too
        raise _unreached(name, constants.ENDPOINT, error) from None
    except EntryNotFoundError:
        raise TrivetError(f"{name!r} has no config.json at {constants.ENDPOINT}", mend=_MEND) from None
    except TrivetError:
        raise
    except Exception as error:  # of whichever HTTP library it uses
        raise _unreached(name, constants.ENDPOINT, error) from None


def _unreached(name: str, endpoint: str, error: Exception) -> TrivetError:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TrivetError(
        f"{name!r} is no folder here and not in Hugging Face's cache, and {endpoint} cannot be reached ({why})",
        mend=_MEND,
    )
