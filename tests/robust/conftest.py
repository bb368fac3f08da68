"""`pytest -m slow tests/robust` runs every rule under every fault, over real ranks."""

from tests.generative.conftest import pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]
