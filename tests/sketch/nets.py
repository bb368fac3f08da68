"""A small model with a bit of everything, and data for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .oracle import per_example_gradients


class Net(nn.Module):
    """Convolution, norm, in-place activation, tokens and a head: a bit of everything."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.mix = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.LayerNorm(6))
        self.head = nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.mix(x) if self.use_reentrant is None else checkpoint(self.mix, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(x.mean(1))
        return out


class Heard:
    """A listener that writes down what it was told, and stamps passes with their number."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.stamps = 0

    def forward_begins(self, rows: int, inputs: Tensor | None) -> int:
        self.heard.append(f"{rows} begin")
        self.stamps += 1
        return self.stamps

    def forward_counted(self, rows: int | None) -> None:
        self.heard.append(f"{rows} counted")

    def coverage_changed(self) -> None:
        self.heard.append("coverage changed")


def data(batch: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, 4, 4, generator=generator), torch.randint(3, (batch,), generator=generator)


def make(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return per_example_gradients(model, lambda i: F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), len(x))
