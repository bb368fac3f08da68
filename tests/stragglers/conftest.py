"""`pytest -m slow tests/stragglers` runs the long versions, which are left out otherwise."""

import pytest
import torch

from tests.generative.conftest import pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """A first optimizer imports torch's compiler, seconds in every rank: forked ranks have it from here."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
