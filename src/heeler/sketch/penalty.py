"""What is missing where examples' parts do not add up to a gradient: is it a penalty on the weights themselves?

The gradient of λ‖w‖² or λ‖w‖₁ is the same for every example, so it has no part in an order, and may be missing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heeler.sketch.sketched_layer import SketchedLayer


class Comparison(NamedTuple):
    """One comparison."""

    groups: set[int]
    parameters: list[tuple[Any, SketchedLayer, str]]
    found: Tensor
    expected: Tensor
    square: Tensor
    columns: slice | None

    def numbers(self) -> list[Tensor]:
        """By how much the parts' sum is off, and how large they and the gradient are."""
        expected = self.expected.double()
        return [(expected - self.found).norm(), self.square.double().sum().sqrt() + expected.norm()]

    def directions(self) -> list[Tensor]:
        """Weights and their signs, matrices and vectors apart, as `found` and `expected` see gradients."""
        found = [torch.zeros_like(self.found) for _ in range(4)]
        for parameter, layer, local in self.parameters:
            for number, value in enumerate((parameter.detach(), parameter.detach().sign())):
                sketch = layer.sketch_gradient(local, value)
                found[2 * number + (parameter.ndim < 2)] += sketch if self.columns is None else sketch[self.columns]
        return found


class Missing:
    """What one comparison lacks, against the directions of a penalty, as far as fitting needs it."""

    def __init__(self, job: Comparison, allowed: float) -> None:
        self.job, self.allowed = job, allowed
        residual = (job.expected - job.found).double().cpu()
        basis = torch.stack([d.double().cpu() for d in job.directions()], 1)
        self.size, self.square = len(residual), float(residual.square().sum())
        self.gram, self.along = basis.t() @ basis, basis.t() @ residual

    def left(self, factors: Tensor) -> float:
        """As a multiple of what is allowed."""
        square = self.square - 2 * factors @ self.along + factors @ self.gram @ factors
        return math.sqrt(max(float(square), 0.0)) / self.allowed


def no_penalty(failing: list[Missing]) -> list[Missing]:
    """Those of which what is missing does not point along the weights and their signs, as a penalty's gradient does.

    A penalty's factors are positive, and mostly the same for all parameters; those for which they are not have to be
    large enough for factors of their own.
    """
    rest, out = list(failing), []
    while rest:
        factors = _fit(rest)
        worst = max(rest, key=lambda missing: missing.left(factors))
        if worst.left(factors) <= 1.0:
            break
        rest.remove(worst)
        out.append(worst)
    return [missing for missing in out if missing.size < 8 or missing.left(_fit([missing])) > 1.0]


def _fit(missing: list[Missing]) -> Tensor:
    """The factors, none negative, of λ‖w‖² and λ‖w‖₁ that explain most."""
    gram: Any = sum(m.gram for m in missing)
    along: Any = sum(m.along for m in missing)
    used = torch.arange(len(along))
    while True:
        some = torch.linalg.pinv(gram[used][:, used], hermitian=True) @ along[used]
        if not len(used) or bool((some >= 0).all()):
            return torch.zeros_like(along).index_copy_(0, used, some)
        used = used[some > some.min()]
