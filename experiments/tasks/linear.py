"""Convex tasks: a linear model with a softmax, whose least objective is found to double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.tasks.base import Examples, Task, chunks


class LinearTask(Task):
    """Softmax regression; with one output column, logistic regression. Evaluated in double precision."""

    convex = True
    classes = 2
    chunk = 1 << 16

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        model = nn.Linear(examples.train[0].shape[1], 1 if self.classes == 2 else self.classes)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def losses(self, model: nn.Module, *batch: Tensor) -> Tensor:
        features, target = batch
        return linear_losses(model(features), target)

    def mean_loss(self, model: nn.Module, tensors: tuple[Tensor, ...]) -> float:
        weight, bias = (p.detach().double() for p in model.parameters())
        parts = (
            linear_losses(x.double() @ weight.T + bias, y).sum()  # double: f − f* gets as small as 1e-7
            for x, y in chunks(tensors, self.chunk)
        )
        return float(sum(parts)) / len(tensors[0])

    def test(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        correct = torch.zeros((), dtype=torch.int64, device=examples.test[0].device)
        for features, target in chunks(examples.test, self.chunk):
            logits = model(features)
            guess = logits.argmax(-1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
            correct += (guess == target).sum()
        accuracy = int(correct) / len(examples.test[0])
        return {"test_loss": self.mean_loss(model, examples.test), "test_accuracy": accuracy}


def linear_losses(logits: Tensor, target: Tensor) -> Tensor:
    """(B,) cross-entropy of (B, C) logits; for C = 1 that of a logistic model."""
    if logits.shape[1] > 1:
        return nn.functional.cross_entropy(logits, target, reduction="none")
    logit = logits[:, 0]
    return nn.functional.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="none")


def least_objective(examples: Examples, classes: int, weight_decay: float) -> float:
    """min over w of the mean loss + λ/2 ‖w‖², by L-BFGS in double precision from zero."""
    features, target = examples.train[0].double(), examples.train[1]
    outputs = 1 if classes == 2 else classes
    w = torch.zeros(features.shape[1] + 1, outputs, dtype=torch.float64, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w], max_iter=2000, history_size=50, tolerance_grad=1e-10, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        losses = linear_losses(features @ w[:-1] + w[-1], target)
        value = losses.mean() + 0.5 * weight_decay * w.square().sum()
        value.backward()
        return value

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small steps: on a busy machine two threads wait for one another for minutes
    try:
        optimizer.step(objective)
        return float(objective().detach())
    finally:
        torch.set_num_threads(threads)
