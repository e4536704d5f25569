"""Where a model's config is found, with the hub's answers made up."""

import json
import sys
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from trivet.check.model_config import read_config, text_parts
from trivet.errors import MissingPackageError, TrivetError

CONFIG = {"model_type": "llama"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """What was asked for; has ``cached`` files, and answers with a file or raises ``answer``."""
    hub = SimpleNamespace(asked=[], answer=None, cached={})
    brought = tmp_path / "brought.json"
    brought.write_text(json.dumps(CONFIG))

    def download(name, file, *, revision=None, etag_timeout=None):
        assert etag_timeout is not None
        hub.asked.append((name, file, revision))
        if hub.answer is not None:
            raise hub.answer
        return str(brought)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file, revision=None: hub.cached.get((name, file))
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub


def told(model: str) -> str:
    with pytest.raises(TrivetError) as caught:
        read_config(model)
    assert "\n" not in str(caught.value)
    assert "folder" in caught.value.mend
    return caught.value.problem


def test_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_config(str(tmp_path)) == read_config(str(tmp_path / "config.json")) == CONFIG


def test_a_folder_is_found_under_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    assert read_config("~/model") == CONFIG


def test_a_folder_of_mistrals_own_format_is_read(tmp_path):
    (tmp_path / "params.json").write_text('{"dim": 4096}')
    assert read_config(str(tmp_path)) == {"dim": 4096}


def test_a_folder_without_a_config_is_told(tmp_path, hub):
    assert "has no config.json" in told(str(tmp_path))


@pytest.mark.parametrize("written", ["", "{", "[1]", "null", b"\xff\xfe{"])
def test_a_config_that_cannot_be_read_is_told(tmp_path, written):
    file = tmp_path / "config.json"
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    assert str(file) in told(str(tmp_path))


def test_another_file_is_no_config(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is no config.json" in told(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "../model", "~/no/such", "a/b/c", ""])
def test_a_path_is_not_asked_for(hub, name):
    assert "there is no folder" in told(name)
    assert hub.asked == []


def test_what_is_in_the_cache_is_not_asked_for(hub, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    hub.cached["org/model", "config.json"] = str(file)
    hub.answer = AssertionError
    assert read_config("org/model") == CONFIG


def test_the_hub_is_asked_for_the_config_alone(hub):
    assert read_config("org/model", "v2") == CONFIG
    assert hub.asked == [("org/model", "config.json", "v2")]


def test_an_offline_machine_asks_nobody(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in told("org/model")
    assert hub.asked == []


NOT_FOUND = httpx.Response(404, request=httpx.Request("GET", "https://h"))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OSError("[Errno -2] Name or service not known\nmore"), "cannot be reached ([Errno -2]"),
        (TimeoutError(), "cannot be reached (TimeoutError)"),
        (LocalEntryNotFoundError("offline\nmore"), "cannot be reached (offline)"),
        (RepositoryNotFoundError("said", response=NOT_FOUND), "no such model"),
        (EntryNotFoundError("said"), "has no config.json at"),
        (HFValidationError("Repo id must..."), "no name of a model"),
    ],
)
def test_a_hub_that_does_not_give_it_is_told(hub, answer, said):
    hub.answer = answer
    assert said in told("org/model")


def test_a_machine_without_the_hubs_package_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match="pip install huggingface_hub"):
        read_config("org/model")


def test_parts_lead_to_the_language_model():
    inner = {"model_type": "x"}
    middle = {"text_config": inner}
    outer = {"thinker_config": middle, "vision_config": {}}
    assert text_parts(outer) == [outer, middle, inner]
    assert text_parts(inner) == [inner]
