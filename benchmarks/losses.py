"""A batch's losses and a data set's objective. Without Heeler: the plain runs of `benchmarks.clock` import this."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """(B,) each example's loss: cross-entropy, per character where targets are texts, or a squared error."""
    *inputs, target = batch
    out = model(*inputs)
    if target.dtype.is_floating_point:
        return (out - target).square().flatten(1).mean(1)
    if target.ndim > 1:
        return F.cross_entropy(out.flatten(0, -2), target.flatten(), reduction="none").view(target.shape).mean(1)
    return F.cross_entropy(out, target, reduction="none")


@torch.no_grad()
def objective(model: nn.Module, tensors: Batch, decay: float = 0.0) -> float:
    """The mean loss over all rows, with the L2 term, in evaluation mode, on the model's device and in its precision."""
    was, total, like = model.training, 0.0, next(model.parameters())
    model.eval()
    for start in range(0, len(tensors[0]), 512):
        rows = tuple(t[start : start + 512] for t in tensors)
        batch = tuple(t.to(like) if t.is_floating_point() else t.to(like.device) for t in rows)
        total += float(losses(model, batch).double().sum())
    model.train(was)
    square = sum(float(p.double().square().sum()) for p in model.parameters()) if decay else 0.0
    return total / len(tensors[0]) + decay / 2 * square
