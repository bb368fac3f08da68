"""Passes over the same examples before a step add up, whatever tensor they came in; after a step the newest counts."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.ordering import attribution, step_sums
from heeler.ordering.step_sums import StepSums
from heeler.sketch.backward_count import BackwardCount
from tests.ordering.loops import filed

N, BATCH = 40, 8
Losses = Callable[[nn.Module, torch.Tensor, torch.Tensor], list[torch.Tensor]]


class Net(nn.Module):
    """Two heads on one trunk: a backward through one of them reaches not every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return {"a": self.a(hidden), "b": self.b(hidden)}[head]


class Run:
    def __init__(self, order: str = "herd", **options: Any) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(N, 12), torch.randn(N, 1)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.sampler = heeler.Sampler(N, batch_size=BATCH, order=order, refresh=1)
        self.handle = heeler.attach(self.model, self.sampler, exact=order == "herd", layers="all", **options)
        dataset = TensorDataset(self.x, self.y, torch.arange(N))
        self.loader = DataLoader(dataset, batch_size=BATCH, sampler=self.sampler)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, losses: Losses) -> np.ndarray:
        """(N, K) of the sum of an example's losses."""
        rows = []
        for i in range(N):
            with self.handle.paused():
                total = sum(losses(self.model, self.x[i : i + 1], self.y[i : i + 1]))
                grads = torch.autograd.grad(total, list(self.model.parameters()), allow_unused=True)
            zeros = [
                torch.zeros_like(p) if g is None else g for g, p in zip(grads, self.model.parameters(), strict=True)
            ]
            rows.append(torch.cat([g.flatten() for g in zeros]).numpy())
        return np.stack(rows)

    def check(self, losses: Losses) -> None:
        rows, seen = filed(self.handle)
        assert seen.all()
        np.testing.assert_allclose(rows, self.gradients(losses), rtol=3e-3, atol=3e-3)
        assert self.handle.ignored_passes == 0


def windows(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [F.mse_loss(model(x[:, t : t + 6]), y) for t in (0, 3, 6)]


def copied_windows(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return windows(model, x.clone(), y)


def heads(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [F.mse_loss(model(x[:, :6], "a"), y), 2 * F.mse_loss(model(x[:, :6].clone(), "b"), -y)]


def whole_and_halves(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Halves are passes of their own, over other numbers of rows."""
    found = [F.mse_loss(model(x[:, :6]), y)]
    parts = [x] if len(x) == 1 else [x[:3], x[3:]]
    targets = [y] if len(x) == 1 else [y[:3], y[3:]]
    return found + [F.mse_loss(model(p[:, 6:].clone()), t) for p, t in zip(parts, targets, strict=True)]


WAYS = [windows, copied_windows, heads, whole_and_halves]


@pytest.mark.parametrize("backwards", ["one", "one each", "forwards first"])
@pytest.mark.parametrize("losses", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("far", [False, True])
def test_passes_over_a_batch_add_up(losses: Losses, backwards: str, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if far:
        monkeypatch.setattr(attribution, "_is_far", lambda sketches: True)
    run = Run()
    for _ in range(2):
        for x, y, _ in run.loader:
            if backwards == "one":
                sum(losses(run.model, x, y)).backward()
            elif backwards == "forwards first":
                for loss in losses(run.model, x, y):
                    loss.backward()
            else:
                for k in range(len(losses(run.model, x, y))):
                    losses(run.model, x, y)[k].backward()
            run.step()
    run.check(losses)


@pytest.mark.parametrize("between", ["step", "zero_grad", "perturb"])
def test_after_a_step_the_newest_pass_counts(between: str) -> None:
    """A loop that trains twice on a batch, one that throws gradients away, and SAM's two gradients."""
    run = Run()
    for x, y, _ in run.loader:
        F.mse_loss(run.model(x[:, :6]), y).backward()
        if between == "step":
            run.optimizer.step()
        elif between == "zero_grad":
            run.optimizer.zero_grad()
        else:
            with torch.no_grad():
                for p in run.model.parameters():
                    p.add_(0.0)
        F.mse_loss(run.model(x[:, 6:]), y).backward()
        run.step()
    run.check(lambda model, x, y: [F.mse_loss(model(x[:, 6:]), y)])


def test_accumulated_batches_do_not_interfere() -> None:
    """A window of three batches, each with two passes that others come between."""
    run = Run()
    for _ in range(2):
        batches = list(run.loader)
        for group in (batches[:3], batches[3:]):
            for part in (slice(0, 6), slice(6, 12)):
                for x, y, _ in group:
                    F.mse_loss(run.model(x[:, part]), y).backward()
            run.step()
    run.check(lambda model, x, y: [F.mse_loss(model(x[:, :6]), y), F.mse_loss(model(x[:, 6:]), y)])


@pytest.mark.parametrize("look", ["table", "metrics", "state"])
def test_a_look_between_two_passes_sees_the_first_and_loses_nothing(look: str) -> None:
    run = Run()
    for x, y, i in run.loader:
        F.mse_loss(run.model(x[:, :6]), y).backward()
        if look == "table":
            assert run.handle.table is not None
            assert run.handle.table.seen[i].all()
        elif look == "metrics":
            run.handle.metrics()
        else:
            run.handle.state_dict()
        F.mse_loss(run.model(x[:, 6:]), y).backward()
        run.step()
    run.check(lambda model, x, y: [F.mse_loss(model(x[:, :6]), y), F.mse_loss(model(x[:, 6:]), y)])


@pytest.mark.parametrize("way", ["one block", "two blocks", "one backward"])
def test_named_examples_add_up(way: str) -> None:
    run = Run()
    for x, y, i in run.loader:
        x = x * 2  # so that only the name tells
        if way == "two blocks":
            for part in (x[:, :6], x[:, 6:]):
                with run.handle.examples(i):
                    F.mse_loss(run.model(part), y).backward()
        else:
            with run.handle.examples(i):
                losses = [F.mse_loss(run.model(x[:, :6]), y)]
                if way == "one block":
                    losses.pop().backward()
                losses.append(F.mse_loss(run.model(x[:, 6:]), y))
                sum(losses).backward()
        run.step()
    run.check(lambda model, x, y: [F.mse_loss(model(2 * x[:, :6]), y), F.mse_loss(model(2 * x[:, 6:]), y)])
    assert run.sampler.session.progress.trained == N


def test_named_rows_may_be_several_of_an_example() -> None:
    run = Run()
    for x, y, i in run.loader:
        with run.handle.examples(i.repeat_interleave(2)):
            F.mse_loss(run.model(2 * x.reshape(-1, 6)), y.repeat_interleave(2, 0)).backward()
        run.step()
    run.check(
        lambda model, x, y: [F.mse_loss(model(2 * x[:, :6]), y) / 2, F.mse_loss(model(2 * x[:, 6:]), y) / 2],
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_cut_in_the_loop_have_their_examples_gradient(reduction: str) -> None:
    run = Run(reduction=reduction)
    for x, y, _ in run.loader:
        out = run.model(x.clone().reshape(-1, 6))
        F.mse_loss(out, y.repeat_interleave(2, 0), reduction=reduction).backward()
        run.step()
    half = 2 if reduction == "mean" else 1
    run.check(lambda model, x, y: [F.mse_loss(model(x[:, :6]), y) / half, F.mse_loss(model(x[:, 6:]), y) / half])


@pytest.mark.parametrize("steps", [True, False])
def test_a_rule_without_a_table_sees_every_example_once(steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("grab")
    told: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(run.sampler.session.planner, "observe", lambda i, v: told.append((i, v.copy())))
    for x, y, _ in run.loader:
        F.mse_loss(run.model(x[:, :6]), y).backward()
        run.handle.metrics()
        F.mse_loss(run.model(x[:, :6]), y).backward()
        if steps:
            run.step()
    run.handle.state_dict()
    assert sorted(np.concatenate([i for i, _ in told]).tolist()) == list(range(N))
    once = Run("grab")
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    monkeypatch.setattr(once.sampler.session.planner, "observe", lambda i, v: seen.append((i, v.copy())))
    for x, y, _ in once.loader:
        F.mse_loss(once.model(x[:, :6]), y).backward()
    once.handle.state_dict()
    np.testing.assert_allclose(
        np.concatenate([v for _, v in told]), 2 * np.concatenate([v for _, v in seen]), rtol=1e-4, atol=1e-5
    )


def test_examples_that_are_filed_twice_count_once() -> None:
    run = Run()
    for _ in range(2):
        x, y, _ = next(iter(run.loader))
        for _ in range(3):
            F.mse_loss(run.model(x[:, :6]), y).backward()
            run.step()
    run.handle.metrics()
    assert run.sampler.session.attribution.filed == BATCH


# What separates steps


@pytest.mark.parametrize("sharded", [False, True])
def test_windows_end_with_steps_and_cleared_gradients(sharded: bool) -> None:
    """sharded: as FSDP2's parameters are, which are counted at after their gradient was added."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    if sharded:
        for parameter in model.parameters():
            parameter.device_mesh = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    count = BackwardCount()
    count.watch(list(model.parameters()))

    def window(part: nn.Module = model, size: int = 3) -> int:
        part(torch.randn(4, size)).sum().backward()
        return count.window

    first = window()
    assert window() == window() == first
    optimizer.step()
    second = window()
    assert second != first
    assert window() == second
    optimizer.zero_grad()
    third = window()
    assert third != second
    assert window(model[1], 2) == third  # a part of the model
    optimizer.step()
    optimizer.zero_grad()
    assert window() != third
    assert count.count == 15


# The sums themselves


def vectors(*numbers: float) -> np.ndarray:
    return np.array([[n, n] for n in numbers], np.float32)


def test_sums_close_with_their_window() -> None:
    sums, epoch = StepSums(), object()
    assert sums.add(epoch, 1, np.array([3, 4]), vectors(1, 2)) == []
    assert sums.add(epoch, 1, np.array([4, 5]), vectors(10, 20)) == []
    (first, rows), (second, others) = sums.add(epoch, 2, np.array([3]), vectors(100))
    assert (first.tolist(), rows[:, 0].tolist()) == ([3, 4], [1, 12])
    assert (second.tolist(), others[:, 0].tolist()) == ([5], [20])
    ((index, row),) = sums.add(object(), 2, np.array([3]), vectors(5))  # another iteration
    assert (index.tolist(), row[:, 0].tolist()) == ([3], [100])
    ((index, row),) = sums.close()
    assert row[:, 0].tolist() == [5]
    assert sums.close() == []


def test_what_was_given_is_not_written_to() -> None:
    sums, epoch, first = StepSums(), object(), vectors(1, 2)
    sums.add(epoch, 1, np.array([0, 1]), first)
    ((_, taken),) = sums.flush()
    sums.add(epoch, 1, np.array([1]), vectors(5))
    assert first[:, 0].tolist() == taken[:, 0].tolist() == [1, 2]
    ((_, whole),) = sums.flush()
    assert whole[:, 0].tolist() == [1, 7]


def test_a_window_that_never_ends_holds_few_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sums, "HELD", 16)
    sums, epoch = StepSums(), object()
    out = []
    for k in range(100):
        out += sums.add(epoch, 1, np.arange(2 * k, 2 * k + 2), vectors(k, k))
    assert len(out) == 96
    assert [index for part, _ in out for index in part.tolist()] == list(range(192))
    assert sums.add(epoch, 1, np.array([0, 199]), vectors(1, 1)) == []
    assert sums.lost == 1
    assert [row[:, 0].tolist() for _, row in sums.close()][-1] == [99, 100]


def test_a_pass_that_came_too_late_to_be_added_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_sums, "HELD", 500)
    run = Run()
    with caplog.at_level(logging.WARNING, "heeler"):
        batches = list(run.loader)
        for x, y, _ in batches:
            F.mse_loss(run.model(x[:, :6]), y).backward()
        F.mse_loss(run.model(batches[0][0][:, 6:]), batches[0][1]).backward()
        run.step()
        run.check(lambda model, x, y: [F.mse_loss(model(x[:, :6]), y)])
    assert "their sums were not kept" in caplog.text
