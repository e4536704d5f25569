"""Looking for a model that is no folder, with the hub's answers made up."""

from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from trivet.errors import TrivetError
from trivet.render.hub import look_for


@pytest.fixture
def hub(monkeypatch):
    """What was asked for; raises what is put into ``answers``, and has nothing in its cache."""

    hub = SimpleNamespace(asked=[], answer=None, cached=set())

    def model_info(_self, name, *, revision=None, timeout=None):
        assert timeout is not None
        hub.asked.append((name, revision))
        if hub.answer is not None:
            raise hub.answer

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file, revision=None: "/cache/file" if (name, file) in hub.cached else None,
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    return hub


def answered(kind, status: int) -> Exception:
    return kind("said", response=httpx.Response(status, request=httpx.Request("GET", "https://h")))


def told(name: str) -> str:
    with pytest.raises(TrivetError) as caught:
        look_for(name)
    assert "\n" not in str(caught.value)
    assert "plane: text" in caught.value.mend
    return caught.value.problem


@pytest.mark.parametrize("error", [OSError("[Errno -2] Name or service not known\nmore"), TimeoutError()])
def test_a_hub_that_cannot_be_reached_is_told(hub, error):
    hub.answer = error
    assert f"{constants.ENDPOINT} cannot be reached" in told("sim-model")
    assert hub.asked == [("sim-model", None)]


def test_a_model_that_does_not_exist_is_told(hub):
    hub.answer = answered(RepositoryNotFoundError, 404)
    assert "no such model" in told("org/misspelt")


def test_a_model_that_exists_is_left_to_vllm(hub):
    look_for("org/model", "v2")
    assert hub.asked == [("org/model", "v2")]


def test_a_hub_that_answers_otherwise_is_left_to_vllm(hub):
    hub.answer = answered(HfHubHTTPError, 500)
    look_for("org/model")
    assert hub.asked


@pytest.mark.parametrize("name", ["s3://bucket/model", "org/model:Q4_K_M", "a/b/c", "/no/such/folder"])
def test_what_is_no_name_of_a_repository_is_not_asked_for(hub, name):
    look_for(name)
    assert hub.asked == []


def test_a_folder_is_not_asked_for(hub, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    look_for("model")
    assert hub.asked == []


@pytest.mark.parametrize("file", ["config.json", "params.json"])
def test_a_model_in_the_cache_is_not_asked_for(hub, file):
    hub.cached.add(("org/model", file))
    look_for("org/model")
    assert hub.asked == []


def test_an_offline_machine_is_left_alone(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    look_for("org/model")
    assert hub.asked == []


def test_another_hub_is_left_alone(hub, monkeypatch):
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    look_for("org/model")
    assert hub.asked == []
