"""A network that judges itself, interrupted anywhere: orders, looks and verdict of the run that was not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler

BATCH = 16


class Network:
    """A small one that learns: its gradients change, and some vanish."""

    def __init__(self, refresh: int, **options: Any) -> None:
        torch.manual_seed(0)
        x = torch.randn(320, 10)
        self.dataset = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] + 0.5 * torch.randn(320) > 0))
        self.model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, refresh=refresh, seed=5, **options)
        self.handle = heeler.attach(self.model, self.sampler)
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)

    def batches(self) -> Iterator[list[float]]:
        for x, y in self.loader:
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield x[:, 0].tolist()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "heeler": self.handle}
        return {name: _copied(part.state_dict()) for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in (("model", self.model), ("optimizer", self.optimizer), ("heeler", self.handle)):
            part.load_state_dict(_copied(state[name]))


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(value) for value in tree]
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize("refresh", [1, 2])
@pytest.mark.parametrize("options", [{}, {"strata": np.arange(320) % 3}], ids=["plain", "strata"])
def test_a_judged_run_goes_on_exactly_from_anywhere(refresh: int, options: dict[str, Any]) -> None:
    """From the middle of epochs, from the step before their end, and from their end."""
    whole, states, verdicts = Network(refresh, **options), {}, []
    orders: list[list[list[float]]] = []
    for epoch in range(7):
        orders.append([])
        for step, batch in enumerate(whole.batches()):
            orders[-1].append(batch)
            if step in (3, 18):
                states[epoch, step + 1] = whole.state()
        states[epoch, 20] = whole.state()
        verdicts.append(whole.handle.verdict)
    judgement = whole.sampler.session.rule.judgement
    assert len(judgement.looks) == 2
    assert len({str(verdict) for verdict in verdicts}) > 2
    for (epoch, step), state in states.items():
        if epoch not in (0, 1, 3, 4):
            continue
        run = Network(refresh, **options)
        run.load(state)
        if step < 20:
            assert [*run.batches()] == orders[epoch][step:]
            assert run.handle.verdict == verdicts[epoch]
        for later in range(epoch + 1, 7):
            assert [*run.batches()] == orders[later], (epoch, step, later)
            assert run.handle.verdict == verdicts[later]
        assert run.sampler.session.rule.judgement == judgement
