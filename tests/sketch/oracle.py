"""The slow, obviously right way: one example at a time through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch import Sketcher


def per_example_gradients(
    model: nn.Module, loss_of: Callable[[int], Tensor], count: int, names: list[str] | None = None
) -> Tensor:
    """(count, d): the gradient of `loss_of(i)`, example i's own loss, parameters side by side in the model's order."""
    parameters = [p for n, p in model.named_parameters() if p.requires_grad and (names is None or n in names)]
    rows = []
    for i in range(count):
        grads = torch.autograd.grad(loss_of(i), parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        rows.append(torch.cat([g.flatten().float() for g in flat]))
    return torch.stack(rows)


def projections_of(gradients: Tensor, sketcher: Sketcher) -> Tensor:
    """(B, d) gradients of the covered parameters → what the sketches of them are, (B, K)."""
    covered = [p for name, p in sketcher._survey.parameters.items() if name in sketcher.coverage.covered]
    columns = dict(zip(map(id, covered), gradients.split([p.numel() for p in covered], 1), strict=True))
    total = torch.zeros(len(gradients), sketcher.dim)
    for layer in sketcher._layers:
        for local, p in layer.parameters.items():
            for row, g in zip(total, columns.pop(id(p), gradients[:, :0]), strict=True):
                row += layer.sketch_gradient(local, g.view_as(p)) if g.numel() else 0
    return total


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
