"""Diversity at one weight vector, exactly: from every example's full gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from experiments.tasks import Task
from heeler.sketch import Sketcher

NUMBERS = 1 << 24
"""Of gradients in memory at a time."""
WINDOWS = (2, 4, 8, 16)
"""Batches that are taken to be concurrent."""

Change = Callable[[Tensor], Tensor]


def example_gradients(model: nn.Module, task: Task, tensors: tuple[Tensor, ...], batch: int = 1) -> Iterator[Tensor]:
    """(b, d) full gradients of the examples in their order, whole batches at a time, in the model's training mode."""
    mode, held = model.training, [p.grad for p in model.parameters()]
    model.train()
    sketcher = Sketcher(model, exact=True, layers="all", reduction="sum")
    size = max(NUMBERS // sketcher.dim // batch, 1) * batch
    try:
        for start in range(0, len(tensors[0]), size):
            model.zero_grad()
            with torch.enable_grad():
                task.losses(model, *(t[start : start + size] for t in tensors)).sum().backward()
            yield sketcher.pop()
    finally:
        sketcher.detach()
        model.train(mode)
        for parameter, gradient in zip(model.parameters(), held, strict=True):
            parameter.grad = gradient


def measure(gradients: Iterator[Tensor], batch: int, change: Change | None = None) -> dict[str, Any]:
    """Of gradients (b, d) in the order in which they were trained on, each with `change` made to it.

    batch_size_bound: N·Σ‖g‖²/‖Σg‖². mean_square: of a gradient's norm. batch_noise: E‖G − ḡ‖² of the batches' means G,
    over what it is for random batches; 1 there. concurrent: for n consecutive batches, n·Σ‖G‖²/‖ΣG‖², their own bound
    in batches: n for orthogonal ones, 1 for equal ones.
    """
    squares, count, total = 0.0, 0, None
    batch_squares, batches = 0.0, 0
    windows = {n: _Window(n) for n in WINDOWS}
    for part in gradients:
        rows = part if change is None else change(part)
        squares += float(rows.double().square().sum())
        count += len(rows)
        summed = rows.double().sum(0)
        total = summed if total is None else total + summed
        whole = len(rows) // batch * batch
        means = rows[:whole].view(-1, batch, rows.shape[1]).mean(1).double()
        batch_squares += float(means.square().sum())
        batches += len(means)
        for window in windows.values():
            window.add(means)
    assert total is not None
    mean_square, square_mean = squares / count, float((total / count).square().sum())
    noise = (mean_square - square_mean) / batch * (count - batch) / max(count - 1, 1)  # drawn without replacement
    return {
        "gradient_diversity": _ratio(squares, float(total.square().sum())),
        "batch_size_bound": _ratio(mean_square, square_mean),
        "mean_square": mean_square,
        "batch_noise": _ratio(batch_squares / max(batches, 1) - square_mean, noise),
        "concurrent": {str(n): _ratio(w.squares * n, w.sum_squares) for n, w in windows.items() if w.sum_squares > 0},
    }


class _Window:
    """Sums over stretches of n consecutive batches, (m, d) of which come at a time."""

    def __init__(self, length: int) -> None:
        self.length, self.squares, self.sum_squares = length, 0.0, 0.0
        self._rest: Tensor | None = None

    def add(self, means: Tensor) -> None:
        known = means if self._rest is None else torch.cat([self._rest, means])
        whole = len(known) // self.length * self.length
        self._rest = known[whole:]
        stretches = known[:whole].view(-1, self.length, known.shape[1])
        self.squares += float(stretches.square().sum())
        self.sum_squares += float(stretches.sum(1).square().sum())


def _ratio(one: float, other: float) -> float | None:
    """JSON has no infinities."""
    return one / other if other > 0 and math.isfinite(one / other) else None


def path_bound(bounds: Sequence[float | None]) -> float:
    """The bound of a whole training run from those at its epochs' ends: as work adds up, 1/B is averaged.

    Between two ends B is taken to change exponentially, for it often changes tenfold in an epoch.
    """
    inverses = [0.0 if b is None else 1 / b for b in bounds]
    parts = [_mean_between(*pair) for pair in pairwise(inverses)] or inverses
    mean = sum(parts) / len(parts)
    return 1 / mean if mean > 0 else math.inf


def _mean_between(one: float, other: float) -> float:
    """The mean of a quantity that goes from one value to another exponentially."""
    if one <= 0 or other <= 0 or math.isclose(one, other):
        return (one + other) / 2
    return (one - other) / math.log(one / other)
