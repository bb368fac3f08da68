"""An average of a model's weights over its steps (EMA)."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    """A copy of a model whose weights follow the model's: w̄ ← w̄ + (1 − β)(w − w̄) after each step.

    β rises to `decay` as (1 + t) / (10 + t), so that the first weights do not linger. A norm layer's running statistics
    are averaged alike; what is no floating-point number is copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval()
        self._decay, self._steps = decay, 0
        pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))
        smooth = [(mine, other) for mine, other in pairs if mine.is_floating_point()]
        self._mine, self._others = [mine for mine, _ in smooth], [other for _, other in smooth]
        self._copied = [(mine, other) for mine, other in pairs if not mine.is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Once after every step."""
        self._steps += 1
        beta = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(self._mine, self._others, 1 - beta)
        for mine, other in self._copied:
            mine.copy_(other)


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.detach() for p in model.parameters()), *model.buffers()]
