"""What speaks against running a compiled model once more, read off its code."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heeler.sketch.effects import effects_of

BANK: list[Any] = []


def helper(x: Tensor) -> Tensor:
    BANK.append(x)
    return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.sizes = nn.Linear(3, 3), 0, [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).relu_()  # type: ignore[no-any-return]


class Global(Plain):
    def forward(self, x: Tensor) -> Tensor:
        BANK.append(1)
        return super().forward(x)


class Helped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x)


class Writes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        BANK[0] = x
        return x


class Reduces(Plain):
    def forward(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x)
        return x


def test_nothing_speaks_against_a_plain_model() -> None:
    assert effects_of(nn.Sequential(Plain(), nn.BatchNorm1d(3), nn.Dropout())) is None


@pytest.mark.parametrize("kind", [Global, Helped, Writes, Reduces])
def test_effects_in_code(kind: type[nn.Module]) -> None:
    assert "forward" in (effects_of(nn.Sequential(nn.Linear(3, 3), kind())) or "")


@pytest.mark.parametrize(
    "value",
    [
        torch.Generator,
        lambda: np.random.default_rng(0),
        lambda: random.Random(0),
        lambda: {"n": {"calls": 0}},
        lambda: {"mean": torch.zeros(3)},
    ],
)
def test_effects_in_what_a_module_holds(value: Callable[[], Any]) -> None:
    model = Plain()
    model.extra = value()
    assert "extra" in (effects_of(model) or "")
