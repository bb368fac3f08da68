"""Handwritten digits, 8×8 pixels, from scikit-learn's wheel: needs no download."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.folder import Folder, MissingData
from experiments.tasks.base import Examples, Task
from experiments.tasks.linear import LinearTask

TRAIN = 1536
"""Training examples: a multiple of common batch sizes, so that no batch is short. The other 261 are for testing."""


def load_digits(folder: Folder) -> Examples:
    """The same split on every machine; `digits.npz` of a packed folder stands in for scikit-learn."""
    packed = folder.find("digits.npz")
    if packed is not None:
        arrays = np.load(io.BytesIO(packed.read_bytes()))
        pixels, digit = arrays["X"], arrays["y"]
    else:
        try:
            from sklearn.datasets import load_digits as embedded
        except ModuleNotFoundError:
            raise MissingData(
                f"digits come with scikit-learn, which is not installed: pip install 'heeler[cli]', or put digits.npz "
                f"(see experiments.pack) into {folder.path}"
            ) from None
        pixels, digit = embedded(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(pixels))
    x = torch.tensor(pixels[mixed] / 16.0, dtype=torch.float32)
    y = torch.tensor(digit[mixed], dtype=torch.int64)
    return Examples((x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:]))


class Digits(LinearTask):
    """Softmax regression, 650 parameters, L2 λ = 1e-3: strongly convex, so the distance from the optimum is known."""

    name = "digits"
    summary = "digits, softmax regression (convex)"
    classes = 10
    defaults = {"epochs": 40, "batch_size": 16, "lr": 1.0, "weight_decay": 1e-3}  # noqa: RUF012

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        return load_digits(folder)


class DigitsMLP(Task):
    """A small network, 64-32-10 with ReLU. Options: `dropout`, `augment` (shifts by a pixel)."""

    augments = True
    name = "digits-mlp"
    summary = "digits, network 64-32-10"
    defaults = {"epochs": 40, "batch_size": 16, "lr": 0.3, "weight_decay": 1e-3}  # noqa: RUF012

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        return load_digits(folder)

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        dropout = nn.Dropout(options.get("dropout", 0.0))
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), dropout, nn.Linear(32, 10))

    def prepare(self, batch: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
        if not options.get("augment"):
            return batch
        pixels, digit = batch
        return shifted(pixels), digit


def shifted(pixels: Tensor) -> Tensor:
    """(B, 64) each image moved by up to one pixel to any side, zeros coming in."""
    count, rows = len(pixels), torch.arange(8)
    down, right = torch.randint(0, 3, (2, count, 1))
    padded = nn.functional.pad(pixels.view(count, 8, 8), (1, 1, 1, 1))
    which = torch.arange(count)[:, None, None]
    return padded[which, (rows + down)[:, :, None], (rows + right)[:, None, :]].reshape(count, 64)
