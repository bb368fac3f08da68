"""Real runs that judge themselves: they stop where orders balance nothing, say so once, and go on exactly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import heeler
from heeler.herding import herding_bound
from heeler.ordering import planner

N, DIM, BATCH = 512, 48, 16
STOPPED = "orders made from sketches balance nothing here"


def drawn(stays: float, examples: int, epoch: int) -> torch.Tensor:
    """(examples, DIM) rows: a share that stays, and what is new in every epoch."""
    old, new = (np.random.default_rng([7, number]).standard_normal((examples, DIM)) for number in (0, epoch + 1))
    return torch.from_numpy((stays * old + (1 - stays) * new).astype(np.float32))


class Rows(Dataset):
    """Rows that may change, each with its number."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index


class Run:
    """A linear model whose gradients are what we say: those of example i are row i of `rows_of(epoch)`."""

    def __init__(self, stays: float, examples: int = N, **options: Any) -> None:
        self.stays, self.examples = stays, examples
        self.dataset = Rows(torch.zeros(examples, DIM))
        self.model = nn.Sequential(nn.Linear(DIM, 1, bias=False))
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, **{"refresh": 1, **options})
        self.handle = heeler.attach(self.model, self.sampler, reduction="sum", layers="all")
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)
        self.sketched: list[bool] = []

    def rows_of(self, epoch: int) -> torch.Tensor:
        return drawn(self.stays, self.examples, epoch)

    def epoch(self, number: int) -> list[int]:
        return [i for batch in self.batches(number) for i in batch]

    def batches(self, number: int) -> Iterator[list[int]]:
        self.dataset.rows = self.rows_of(number)
        for rows, indices in self.loader:
            self.model(rows).sum().backward()
            yield indices.tolist()
        self.sketched.append(self.handle.sketcher.sketching)

    def train(self, first: int, last: int) -> list[list[int]]:
        return [self.epoch(number) for number in range(first, last)]


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum(STOPPED in record.getMessage() for record in caplog.records)


def solve_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables too, beside the last step of an epoch."""
    monkeypatch.setattr(planner, "EARLY_SIZE", 0)
    monkeypatch.setattr(planner, "LATE", 0.04)


def imbalance(run: Run, order: list[int], epoch: int) -> float:
    """Of prefixes, over that of random orders."""
    rows, rng = run.rows_of(epoch).numpy(), np.random.default_rng(0)
    random = [herding_bound(rows, rng.permutation(N), batch_size=BATCH).rms for _ in range(20)]
    return herding_bound(rows, np.array(order), batch_size=BATCH).rms / float(np.mean(random))


def test_gradients_that_stay_are_balanced_and_the_verdict_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(stays=1.0)
    assert run.handle.verdict.helps is None
    orders = run.train(0, 2)
    assert run.handle.verdict.helps is None  # no order made from sketches has been followed by new ones
    orders += run.train(2, 6)
    verdict = run.handle.verdict
    assert verdict.helps is True
    assert str(verdict).startswith("Ordering helps: the last order left 0.")
    metrics = run.handle.metrics()
    assert metrics["order_is_balanced"] == metrics["ordering_helps"] == 1.0
    assert metrics["realized_steps"] < 0.5
    assert metrics["realized_prefixes"] < 0.1
    assert metrics["evenness"] < 0
    assert metrics["evenness_lost"] == pytest.approx(0.0, abs=1e-3)
    assert max(imbalance(run, order, epoch) for epoch, order in enumerate(orders) if epoch) < 0.4
    assert all(run.sketched)
    assert not caplog.records


def test_gradients_that_hardly_stay_end_it_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """They know their own examples, more often than not, and yet balance nothing."""
    run = Run(stays=0.14)
    with caplog.at_level(logging.WARNING, "heeler"):
        orders = run.train(0, 3)
        assert said(caplog) == 0
        orders += run.train(3, 9)
        run.handle.metrics()
        run.handle.state_dict()
    assert said(caplog) == 1
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert run.sketched == [True] * 3 + [False] * 6
    assert not run.sampler.session.takes_sketches
    assert run.sampler.session.planner.gave_up
    verdict = run.handle.verdict
    assert verdict.helps is False
    assert "No more sketches are taken" in verdict.why
    metrics = run.handle.metrics()
    assert metrics["order_is_balanced"] == metrics["ordering_helps"] == 0.0
    assert min(metrics["realized_steps"], metrics["realized_prefixes"]) >= 0.9
    assert metrics["examples_with_sketch"] == 1.0
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert np.mean([imbalance(run, order, 2) for order in orders[3:]]) > 0.8


@pytest.mark.parametrize("strata", [False, True])
def test_gradients_that_are_new_in_every_epoch_end_it_with_one_warning(
    strata: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They do not know their own examples either: whatever is found first, one warning is all."""
    classes = np.arange(N) % 4
    run = Run(stays=0.0, **({"strata": classes} if strata else {}))
    with caplog.at_level(logging.WARNING, "heeler"):
        orders = run.train(0, 8)
    assert len(caplog.records) == 1
    assert run.sketched == sorted(run.sketched, reverse=True)
    assert 3 <= sum(run.sketched) <= 5
    assert run.handle.verdict.helps is not True
    if strata:
        for order in orders[5:]:
            for batch in classes[order].reshape(-1, BATCH):
                assert np.bincount(batch).tolist() == [BATCH // 4] * 4


def test_where_sketches_do_not_know_their_own_examples_the_verdict_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(stays=0.0)
    run.train(0, 8)
    assert "as by chance" in caplog.text
    assert run.handle.verdict.helps is False


@pytest.mark.parametrize("batches", [1, 7, None])
@pytest.mark.parametrize("epoch", [2, 3, 5])
def test_having_stopped_is_part_of_the_state_and_is_said_once(
    epoch: int, batches: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved in the epoch whose end shows it, in the first without sketches, and later, after batches or at its end."""
    run, again = Run(stays=0.2), Run(stays=0.2)
    run.train(0, epoch)
    walked = run.batches(epoch)
    list(islice(walked, batches))
    state = run.handle.state_dict()
    told = said(caplog)
    rest = [*walked]
    orders = run.train(epoch + 1, 8)
    assert said(caplog) == 1
    caplog.clear()
    again.handle.load_state_dict(state)
    if batches is not None:
        assert [*again.batches(epoch)] == rest
    assert again.train(epoch + 1, 8) == orders
    assert said(caplog) == 1 - told
    assert not again.sampler.session.takes_sketches
    assert again.sketched[-1] is False
    assert again.handle.verdict == run.handle.verdict


@pytest.mark.parametrize("early", [False, True])
def test_a_look_at_the_verdict_changes_nothing(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """early: solves begin before an epoch ends, and a look at the verdict waits for them."""
    if early:
        solve_early(monkeypatch)
    plain, curious = Run(stays=0.5, refresh=2), Run(stays=0.5, refresh=2)
    for epoch in range(5):
        expected, found = plain.batches(epoch), []
        for batch in curious.batches(epoch):
            found.append(batch)
            str(curious.handle.verdict)
            curious.handle.metrics()
        assert found == [*expected]
    assert curious.handle.verdict == plain.handle.verdict


def test_a_state_of_after_the_warning_brings_no_second_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A solve that began before the epoch's end is over, and a look at the run has found it, when it is saved."""
    solve_early(monkeypatch)
    run = Run(stays=0.14)
    for epoch in range(8):
        run.train(epoch, epoch + 1)
        str(run.handle.verdict)
        run.handle.state_dict()
        state, told = run.handle.state_dict(), said(caplog)
        if told:
            break
    assert told == 1
    caplog.clear()
    again = Run(stays=0.2)
    again.handle.load_state_dict(state)
    again.train(epoch + 1, epoch + 3)
    assert again.sketched == [False, False]
    assert said(caplog) == 0


def test_few_examples_are_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(stays=0.2, examples=255)
    run.train(0, 7)
    assert said(caplog) == 0
    assert all(run.sketched)
    assert run.handle.verdict.helps is None
    assert "realized_steps" not in run.handle.metrics()


def test_orders_that_look_at_nothing_are_not_judged() -> None:
    for order in ("random", "pair"):
        run = Run(stays=0.0, order=order)
        run.train(0, 2)
        assert run.handle.verdict == (None, "only the order 'herd' of 256 examples or more is judged.")
