"""Where sketches do not know their own examples, the run says so, drops them and goes on without."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler

N, BATCH = 1024, 16


class Run:
    """A small network; `permute` stores every batch's rows under its examples in another order."""

    def __init__(self, *, permute: bool, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.x = torch.randn(N, 10)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0)
        self.dataset = TensorDataset(self.x, self.y)
        self.model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, refresh=1, seed=seed, **options)
        rng = np.random.default_rng(seed)

        def ids(batch: Any) -> Any:
            start = self.sampler.session.progress.handed_out - len(batch[0])
            numbers = np.asarray(self.sampler.indices)[start : start + len(batch[0])]
            return rng.permutation(numbers) if permute else numbers

        self.handle = heeler.attach(self.model, self.sampler, ids=ids)
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def epoch(self) -> list[int]:
        seen: list[int] = []
        for x, y in self.loader:
            seen = np.asarray(self.sampler.indices).tolist()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen


@pytest.mark.parametrize("options", [{}, {"strata": np.arange(N) % 4}])
def test_rows_under_wrong_examples_end_in_a_warning_and_random_orders(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check_gives_up(Run(permute=True, **options), caplog)


def check_gives_up(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "heeler"):
        orders = [run.epoch() for _ in range(8)]
    (word,) = [record.getMessage() for record in caplog.records if "by chance" in record.getMessage()]
    assert "collate" in word
    assert "random transforms" in word
    metrics = run.handle.metrics()
    assert abs(metrics["sketch_knows_its_own"] - 0.5) < 0.05
    assert metrics["sketches_compared"] > 256
    assert metrics["examples_with_sketch"] == 0.0
    assert not run.sampler.session.takes_sketches
    assert not run.handle.sketcher.sketching
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 8


@pytest.mark.parametrize("strata", [False, True])
def test_right_rows_are_known(strata: bool, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(permute=False, **({"strata": np.arange(N) % 4} if strata else {}))
    run.epoch()
    assert "sketch_knows_its_own" not in run.handle.metrics()
    for _ in range(3):
        run.epoch()
    metrics = run.handle.metrics()
    assert metrics["sketch_knows_its_own"] > 0.9
    assert metrics["sketches_compared"] >= N - 20
    assert metrics["examples_with_sketch"] == 1.0
    assert run.sampler.session.takes_sketches
    assert not caplog.records


def test_having_given_up_is_part_of_the_state() -> None:
    run = Run(permute=True)
    for _ in range(6):
        run.epoch()
    state = run.handle.state_dict()
    assert state["session"]["gave_up"]
    again = Run(permute=False)
    again.handle.load_state_dict(state)
    assert not again.sampler.session.takes_sketches
    assert again.epoch() == run.epoch()
    assert not again.handle.sketcher.sketching
    other = Run(permute=False)
    before = other.handle.state_dict()
    del before["session"]["gave_up"]  # as earlier versions save it
    again.handle.load_state_dict(before)
    assert again.sampler.session.takes_sketches


def test_it_is_said_as_training_ends(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(permute=True)
    for _ in range(3):
        run.epoch()
    table = run.sampler.session.rule.table
    while not table.own.at_chance:  # by the seed, after three or four
        assert table.seen.all()
        run.epoch()
    assert sum("by chance" in record.getMessage() for record in caplog.records) == 1
    assert not table.seen.any()
    run.handle.detach()
    assert sum("by chance" in record.getMessage() for record in caplog.records) == 1
