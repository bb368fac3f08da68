"""`attach(optimizer=...)`: one scale per sketched epoch, kept in the state, never mixed with plain gradients."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import heeler
from heeler.ordering.state import StateError
from heeler.sketch.preconditioner import squared_denominator
from tests.ordering.loops import filed, problem, true_gradients

EXAMPLES, BATCH, EPOCHS = 40, 8, 5
STEPS = EXAMPLES // BATCH


class Run:
    """Linear regression with Adam; dim: 3 numbers per sketch of the 6 parameters, or None for exact gradients."""

    def __init__(self, dim: int | None = None, lr: float = 0.0, kind: str = "AdamW", *, tell: bool = True) -> None:
        self.dataset, self.model = problem(EXAMPLES)
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=lr)
        self.sampler = heeler.Sampler(self.dataset, batch_size=BATCH, dim=dim)
        self.handle = heeler.attach(self.model, self.sampler, optimizer=self.optimizer if tell else None)
        self.loader = DataLoader(self.dataset, batch_size=BATCH, sampler=self.sampler)
        self.order: list[list[int]] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()

    def train(self, epochs: int, steps: int | None = None) -> None:
        """So many epochs, or up to a step of the last one."""
        for epoch in range(epochs):
            for number, batch in enumerate(self.loader):
                if epoch == epochs - 1 and number == steps:
                    return
                self.step(*batch)
            self.order.append(self.sampler.indices.tolist())

    def multipliers(self) -> Tensor:
        """(6,) by hand."""
        found = [squared_denominator(self.optimizer, p) for p in self.model.parameters()]
        w = torch.cat([each.flatten() for each in found if each is not None])
        return w.mean().sqrt() / w.sqrt()

    def true_rows(self, multipliers: Tensor) -> np.ndarray:
        return true_gradients(self.dataset, self.model) * multipliers.numpy()


def test_first_epoch_plain_then_scaled_by_what_the_optimizer_held_as_the_epoch_began() -> None:
    run = Run()  # rate 0: weights, and so gradients, stay
    run.train(1)
    rows, seen = filed(run.handle)
    assert seen.all()
    np.testing.assert_allclose(rows, true_gradients(run.dataset, run.model), rtol=2e-3, atol=2e-3)
    multipliers = run.multipliers()
    assert multipliers.std() > 0.01
    run.train(1, steps=2)
    rows, seen = filed(run.handle)
    assert seen.sum() == 2 * BATCH  # plain rows are gone: nothing is mixed
    np.testing.assert_allclose(rows[seen], run.true_rows(multipliers)[seen], rtol=2e-3, atol=2e-3)


def test_the_scale_stays_for_an_epoch_and_follows_in_the_next_sketched_one() -> None:
    run = Run()
    run.train(2)
    first = run.handle.state_dict()["scale"]
    run.train(1)  # epoch 3 takes no sketches
    assert _equal(run.handle.state_dict()["scale"], first)
    held = run.multipliers()
    run.train(1)  # epoch 4 does
    assert not _equal(run.handle.state_dict()["scale"], first)
    rows, seen = filed(run.handle)
    assert seen.all()
    np.testing.assert_allclose(rows, run.true_rows(held), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_orders_change_with_second_moments_alone(kind: str) -> None:
    told, untold = Run(lr=0.05, kind=kind), Run(lr=0.05, kind=kind, tell=False)
    for run in (told, untold):
        run.train(EPOCHS)
    assert untold.handle.state_dict()["scale"] == {}
    assert set(told.handle.state_dict()["scale"]) == ({"0.weight", "0.bias"} if kind == "Adam" else set())
    assert (told.order == untold.order) == (kind == "SGD")


@pytest.mark.parametrize("dim", [None, 3])
@pytest.mark.parametrize("moment", [(1, 3), (2, 3), (3, 2), (4, 1), (4, 4)])
def test_resumed_runs_go_on_exactly(moment: tuple[int, int], dim: int | None, tmp_path: Path) -> None:
    whole = Run(dim, lr=0.05)
    whole.train(EPOCHS)
    first = Run(dim, lr=0.05)
    first.train(*moment)
    buffer = io.BytesIO()
    torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.handle.state_dict()], buffer)
    heeler.save(first.handle, tmp_path / "state")
    for way in ("state_dict", "file"):
        buffer.seek(0)
        model, optimizer, state = torch.load(buffer, weights_only=True)
        second = Run(dim, lr=0.05)
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        if way == "file":
            heeler.load(second.handle, tmp_path / "state")
        else:
            second.handle.load_state_dict(state)
        assert _equal(second.handle.state_dict()["scale"], first.handle.state_dict()["scale"])
        second.train(EPOCHS - moment[0] + 1)
        assert first.order + second.order == whole.order
        for a, b in zip(second.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(a, b)
        assert not second.handle.sketcher.left_out


def test_verify_uses_the_scale_of_the_sketches() -> None:
    run = Run(dim=3)
    run.train(2)

    def loss_of(i: int) -> Tensor:
        inputs, targets = run.dataset[i]
        return nn.functional.mse_loss(run.model(inputs[None]), targets[None])

    found = run.handle.verify(loss_of)
    assert found.filed_right == 1.0
    assert found.cosines.min() > 0.999


def test_a_batch_that_straddles_the_change_is_left_out() -> None:
    """An endless loop draws the next batch between a forward and its backward."""
    run = Run(dim=3)
    drawn = ((epoch, batch) for epoch in range(2) for batch in run.loader)
    (_, (inputs, targets)) = next(drawn)
    for _ in range(STEPS + 2):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        _, (inputs, targets) = next(drawn)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
    _, seen = filed(run.handle)
    assert seen.sum() == 2 * BATCH
    straddles = run.handle.table
    assert straddles is not None
    assert straddles.dropped == BATCH


def test_state_of_another_model_is_refused() -> None:
    run = Run()
    run.train(2)
    state = run.handle.state_dict()
    other = Run()
    for damaged in (
        {"0.weight": {"entries": torch.ones(4)}},
        {"nobody": {"entries": torch.ones(5)}},
        {"0.weight": {"entries": -torch.ones(5)}},
        {"0.weight": torch.ones(5)},
    ):
        with pytest.raises(StateError):
            other.handle.load_state_dict({**state, "scale": damaged})
    del state["scale"]  # a state of 0.2.0
    other.handle.load_state_dict(state)
    assert other.handle.state_dict()["scale"] == {}


def test_optimizers_that_do_not_fit_are_refused_or_said() -> None:
    class ZeroRedundancyOptimizer(torch.optim.AdamW):
        pass

    dataset, model = problem(EXAMPLES)
    sharded = ZeroRedundancyOptimizer(model.parameters())
    with pytest.raises(ValueError, match="leave optimizer= away"):
        heeler.attach(model, heeler.Sampler(dataset, batch_size=BATCH), optimizer=sharded)
    with pytest.raises(TypeError, match="torch optimizer"):
        heeler.attach(model, heeler.Sampler(dataset, batch_size=BATCH), optimizer=model)  # type: ignore[arg-type]


def test_the_optimizer_of_another_model_is_said() -> None:
    other = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    other.step()
    run = Run()
    run.handle.detach()
    sampler = heeler.Sampler(run.dataset, batch_size=BATCH)
    heeler.attach(run.model, sampler, optimizer=other)
    with pytest.warns(heeler.HeelerWarning, match="none of the sketched parameters"):
        next(iter(sampler))


def test_a_state_that_is_cut_up_over_ranks_is_said_and_left() -> None:
    run = Run()
    run.train(1)
    weight = next(run.model.parameters())
    run.optimizer.state[weight]["exp_avg_sq"] = torch.ones(3)
    with pytest.warns(heeler.HeelerWarning, match="cut up over the ranks"):
        next(iter(run.sampler))
    assert run.handle.state_dict()["scale"] == {}


def _equal(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n][s], b[n][s]) for n in a for s in a[n])
