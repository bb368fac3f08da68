"""What of the model the sketch covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heeler.sketch.prices import NOMINAL, Prices, prices
from heeler.sketch.survey import survey
from heeler.torch_private import is_compiled, unwrapped


@dataclass(frozen=True)
class Line:
    """One parameter of the report."""

    parameter: str
    size: int
    rule: str | None
    reason: str
    """Why it is not covered; empty where it is."""


@dataclass(frozen=True)
class Coverage:
    """Per parameter, by which rule it is covered, or why it is not."""

    lines: list[Line]
    parameters: dict[str, nn.Parameter]
    dim: int
    exact: bool

    @property
    def covered(self) -> dict[str, str]:
        """Covered parameters → their rule."""
        return {line.parameter: line.rule for line in self.lines if line.rule is not None}

    @property
    def left_out(self) -> dict[str, str]:
        """Parameters that are not covered → the reason."""
        return {line.parameter: line.reason for line in self.lines if line.rule is None}

    @property
    def share_of_parameters(self) -> float:
        total = sum(line.size for line in self.lines)
        return sum(line.size for line in self.lines if line.rule is not None) / total if total else 0.0

    def share_of_gradient(self) -> float | None:
        """Covered share of the squared gradient norm, from `p.grad` as it is now (this waits for the device).

        None while no parameter holds a gradient. With sharded parameters, every rank sees its own shard.
        """
        total = covered = 0.0
        for line in self.lines:
            grad: Any = self.parameters[line.parameter].grad
            if grad is None:
                continue
            grad = grad.to_local() if hasattr(grad, "to_local") else grad
            square = float(grad.detach().float().pow(2).sum())
            total += square
            covered += square if line.rule is not None else 0.0
        return covered / total if total else None

    def __str__(self) -> str:
        kind = "exact gradient" if self.exact else "sketch"
        lines = [
            f"{kind} of {self.dim} numbers; covers {len(self.covered)} of {len(self.lines)} parameters, "
            f"{self.share_of_parameters:.1%} of their entries"
        ]
        share = self.share_of_gradient()
        if share is not None:
            lines[0] += f", {share:.1%} of the squared gradient norm"
        width = max((len(line.parameter) for line in self.lines), default=0)
        for line in self.lines:
            state = line.rule if line.rule is not None else f"left out: {line.reason}"
            lines.append(f"  {line.parameter:<{width}}  {line.size:>12,}  {state}")
        return "\n".join(lines)


def coverable(model: nn.Module, batch: float) -> tuple[int, Prices]:
    """How many parameters sketches of a model cover if all layers are sketched, and what steps of a batch cost."""
    found = survey(unwrapped(model))
    device = next((p.device for p in found.parameters.values()), torch.device("cpu"))
    return found.count(found.layers), prices(found.layers, NOMINAL, device, is_compiled(model), batch)
