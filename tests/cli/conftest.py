"""Fixtures for the command line's tests."""

import pytest

from helpers.commands import Trivet


@pytest.fixture
def trivet(tmp_path, monkeypatch, capsys) -> Trivet:
    return Trivet(tmp_path, monkeypatch, capsys)
