"""`pytest -m slow tests/stragglers` runs the long versions, which are left out otherwise."""

from tests.generative.conftest import pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]
