"""Fixtures of the connector's tests."""

import tempfile
from pathlib import Path

import pytest

from transfer.workers import Gate


@pytest.fixture
def folder():
    """A folder for sockets: its path is short, as theirs must be."""
    with tempfile.TemporaryDirectory(prefix="trivet-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def gate(monkeypatch):
    gates = []

    def make(owner, name, after=0):
        gates.append(Gate(monkeypatch, owner, name, after))
        return gates[-1]

    yield make
    for one in gates:
        one.open()
