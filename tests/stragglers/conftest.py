"""What every test of ranks that are forked has in common."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """A first optimizer imports torch's compiler, seconds in every rank: forked ranks have it from here."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
