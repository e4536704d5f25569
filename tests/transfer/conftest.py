"""Fixtures of the connector's tests."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder():
    """A folder for sockets: its path is short, as theirs must be."""
    with tempfile.TemporaryDirectory(prefix="trivet-", dir="/tmp") as path:
        yield Path(path)
