"""Fixtures for all tests."""

import sys

import pytest


@pytest.fixture(scope="session")
def conftest(request):
    """Helpers of the nearest ``conftest.py`` as a module (tests are no package)."""
    for plugin in request.config.pluginmanager.get_plugins():
        if getattr(plugin, "__file__", "").endswith("tests/e2e/conftest.py"):
            return plugin
    raise LookupError("tests/e2e/conftest.py is not loaded", sys.modules)
