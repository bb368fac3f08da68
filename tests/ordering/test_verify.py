"""verify: at any time, without a trace, and never content with a part of the gradient."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import heeler

N, BATCH = 48, 8


class Net(nn.Module):
    """Dropout, batch norm and a checkpointed block: all that a look may disturb."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.drop, self.plain = nn.Dropout(0.5), plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if not self.plain:
            hidden = self.drop(self.norm(hidden))
        return checkpoint(lambda h: self.last(torch.tanh(h)), hidden, use_reentrant=False)


class Run:
    def __init__(self, model: nn.Module, lr: float = 0.1, **options: Any) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(N, 6), torch.randint(0, 3, (N,))
        self.model, data = model, TensorDataset(self.x, self.y)
        self.sampler = heeler.Sampler(data, batch_size=BATCH, refresh=1)
        self.handle = heeler.attach(model, self.sampler, exact=True, **options)
        self.loader = DataLoader(data, batch_size=BATCH, sampler=self.sampler)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def train(self, epochs: int = 2, factor: float = 1.0) -> None:
        for _ in range(epochs):
            for x, y in self.loader:
                (factor * F.cross_entropy(self.model(x), y)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def loss_of(self, i: int) -> torch.Tensor:
        return F.cross_entropy(self.model(self.x[i : i + 1]), self.y[i : i + 1])


def traces(run: Run) -> list[Any]:
    """All that a look must leave as it is."""
    flags = [module.training for module in run.model.modules()]
    tensors = [*run.model.parameters(), *run.model.buffers()]
    grads = [None if p.grad is None else p.grad.clone() for p in run.model.parameters()]
    numbers = [torch.random.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))]  # noqa: NPY002
    return [flags, [t.detach().clone() for t in tensors], grads, numbers]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("when", ["attached", "detached"])
@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_a_look_leaves_no_trace(when: str, mode: str) -> None:
    run = Run(Net())
    run.train()
    if when == "detached":
        run.handle.detach()
    run.model.train(mode != "eval")
    if mode == "mixed":
        run.model.norm.eval()
    F.cross_entropy(run.model(run.x), run.y).backward()
    before, seen = traces(run), []

    def loss_of(i: int) -> torch.Tensor:
        seen.append(run.model.drop.training or run.model.norm.training)
        np.random.rand()  # noqa: NPY002
        torch.rand(1)
        return run.loss_of(i)

    with torch.no_grad():
        found = run.handle.verify(loss_of)
    assert not any(seen)
    assert same(before, traces(run))
    assert len(found.cosines) == len(found.lengths) == 32
    assert run.handle.metrics()["examples_with_sketch"] == 1.0
    assert run.handle.coverage.share_of_parameters > 0
    assert run.handle.table is not None
    if mode == "train":
        run.model.norm.eval()  # a batch of one cannot be normalized
        seen.clear()
        run.handle.verify(loss_of, 4, training=True)
        assert all(seen)


def test_right_rows_are_called_right_before_and_after_detach() -> None:
    run = Run(Net(plain=True), lr=0.0)  # steps that change nothing
    run.train()
    for _ in range(2):
        found = run.handle.verify(run.loss_of)
        assert found.same_weights
        assert found.filed_right == 1.0
        assert found.cosines.min() > 0.999
        assert found.lengths == pytest.approx(1.0, abs=2e-3)
        assert "100% of 32 examples are filed right" in str(found)
        assert "they are" in str(found)
        run.handle.detach()


def test_weights_that_have_moved_are_noticed() -> None:
    run = Run(Net(plain=True), lr=2.0)
    run.train()
    found = run.handle.verify(run.loss_of)
    assert not found.same_weights
    assert np.median(found.cosines) < 0.99
    assert "filed right" not in str(found)
    assert "The weights have changed since" in str(found)


@pytest.mark.parametrize("lr", [0.0, 0.5])
def test_a_part_of_the_gradient_is_not_called_right(lr: float) -> None:
    run = Run(Net(plain=True), lr=lr)
    run.train()
    table = run.handle.table
    assert table is not None
    rows = table.sketches(np.arange(N))
    rows[:, : 6 * 12 // 2] = 0.0  # half of the first layer's
    table.put(np.arange(N), rows)
    found = run.handle.verify(run.loss_of)
    assert "filed right" not in str(found)
    if lr == 0.0:
        assert found.filed_right > 0.9
        assert "a part of the gradient is missing" in str(found)


@pytest.mark.parametrize("wrong", [10, N])
def test_rows_under_wrong_examples_are_said(wrong: int) -> None:
    run = Run(Net(plain=True), lr=0.0)
    run.train()
    table = run.handle.table
    assert table is not None
    table.put(np.arange(wrong), table.sketches(np.roll(np.arange(wrong), 1)))
    found = run.handle.verify(run.loss_of, N)
    assert found.filed_right <= 1 - 0.5 * wrong / N
    assert "stored under wrong examples" in str(found)


@pytest.mark.parametrize("factor", [0.25, 65536.0])
def test_lengths_that_are_off_are_said(factor: float) -> None:
    run = Run(Net(plain=True), lr=0.0)
    run.train(factor=factor)
    found = run.handle.verify(run.loss_of)
    assert found.lengths == pytest.approx(factor, rel=2e-3)
    assert f"Lengths are {factor:.3g} times" in str(found)
    moved = Run(Net(plain=True), lr=1e-6)
    moved.train(factor=65536.0)
    assert "Lengths are" in str(moved.handle.verify(moved.loss_of))


def test_a_gradient_of_zero_has_no_length() -> None:
    run = Run(Net(plain=True), lr=0.0)
    run.train()
    found = run.handle.verify(lambda i: run.loss_of(i) * 0.0)
    assert np.isnan(found.lengths).all()
    assert "nan" not in str(found)


# The end of the last epoch


def uneven(run: Run, passes: int) -> None:
    """Changes its inputs, so that passes are counted, and passes over one batch never or twice: nobody knows which."""
    for step, (x, y) in enumerate(run.loader):
        for turn in range(passes if step == 3 else 1):
            F.cross_entropy(run.model(x + 0.1 + turn), y).backward()
            run.model.zero_grad()


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("end", ["table", "detach", "state", "next epoch"])
def test_doubtful_rows_are_dropped_as_training_ends(end: str, passes: int, caplog: pytest.LogCaptureFixture) -> None:
    if (end, passes) == ("state", 0):
        pytest.skip("a batch is outstanding, so a state goes on with it: the epoch is not over")
    run = Run(Net(plain=True))
    table = run.sampler.session.rule.table
    with run.handle.paused():
        losses = (F.cross_entropy(run.model(run.x[i : i + 1] + 0.1), run.y[i : i + 1]) for i in range(N))
        true = np.stack([run.handle.sketcher.sketch_of(loss).numpy() for loss in losses])
    with caplog.at_level(logging.WARNING, "heeler"):
        uneven(run, passes)
        if end == "table":
            assert run.handle.table is table
        elif end == "detach":
            run.handle.detach()
        elif end == "state":
            seen = run.handle.state_dict()["session"]["rule"]["table"]["seen"].numpy()
            assert np.array_equal(seen, table.seen)
        else:
            next(iter(run.loader))
    assert not table.seen.all()
    assert np.abs(table.sketches(np.arange(N)) - true)[table.seen].max(initial=0.0) < 0.01
    assert sum("it is not certain which examples" in record.getMessage() for record in caplog.records) <= 1
    assert caplog.records


def test_few_sketches_are_said_as_the_epoch_ends(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Net(plain=True))
    with caplog.at_level(logging.WARNING, "heeler"):
        for step, (x, y) in enumerate(run.loader):
            loss = F.cross_entropy(run.model(x), y)
            if step % 2:
                with run.handle.paused():
                    loss = F.cross_entropy(run.model(x), y)
            loss.backward()
        run.handle.detach()
    assert sum("of the examples of an epoch have a sketch" in each.getMessage() for each in caplog.records) == 1


def test_a_run_that_is_broken_off_is_told_nothing_about_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Net(plain=True))
    for x, y in run.loader:
        F.cross_entropy(run.model(x), y).backward()
        break
    run.handle.detach()
    assert not caplog.records
