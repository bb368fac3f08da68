"""M4 competition, weekly series: an autoregressive network, 20 values in, 6 out, one after the other."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.folder import Folder, Source
from experiments.tasks.base import Examples, Task

ORIGINAL = "https://raw.githubusercontent.com/Mcompetitions/M4-methods/master/Dataset/{}/Weekly-{}.csv"
SHA256 = {
    "train": "d478d3f6ed673e6ed3c2cb0fbed5425f72eedd51318ebebeb0b5ecfcefc37714",
    "test": "3b2bc4be8e636e802260dcd843ca3c5da40536a1fbe1ecb3229a97dae4f44688",
}
SEEN, AHEAD, STRIDE = 20, 6, 3


def read_series(folder: Folder, part: str) -> list[NDArray[np.float64]]:
    """Every series' values, in the file's order."""
    source = Source(ORIGINAL.format(part.capitalize(), part), SHA256[part])
    text = folder.read(f"m4-weekly/Weekly-{part}.csv", source).decode("utf-8")
    rows = list(csv.reader(io.StringIO(text)))[1:]
    return [np.array([float(cell) for cell in row[1:] if cell not in ("", "NA")]) for row in rows if row]


class M4(Task):
    """Three layers of width 64; each series scaled by its own mean and spread; mean squared error."""

    name = "m4"
    summary = "M4 weekly, autoregressive network 3×64"
    metric = "test_smape"
    higher_is_better = False
    chunk = 1 << 15
    defaults = {  # noqa: RUF012
        "epochs": 30,
        "batch_size": 32,
        "workers": 32,
        "shards": "local",
        "lr": 1e-3,
        "momentum": 0.9,
        "decay_every": 10,
        "decay": 0.25,
    }

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        """Windows of all series; test: the last values of each, what follows, and the scale to undo."""
        seen, ahead, last, following, scales = [], [], [], [], []
        for known, future in zip(read_series(folder, "train"), read_series(folder, "test"), strict=True):
            mean, spread = known.mean(), known.std() or 1.0
            scaled = (known - mean) / spread
            starts = np.arange(0, len(scaled) - SEEN - AHEAD + 1, STRIDE)[:, None]
            seen.append(scaled[starts + np.arange(SEEN)])
            ahead.append(scaled[starts + SEEN + np.arange(AHEAD)])
            last.append(scaled[-SEEN:])
            following.append(future[:AHEAD])
            scales.append((mean, spread))
        x, y = (torch.tensor(np.concatenate(part), dtype=torch.float32) for part in (seen, ahead))
        mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: options.get("limit")]
        test = (np.stack(last), np.array(scales), np.stack(following))
        return Examples((x[mixed], y[mixed]), tuple(torch.tensor(t, dtype=torch.float32) for t in test))

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        return Autoregressive(options.get("width", 64))

    def losses(self, model: nn.Module, *batch: Tensor) -> Tensor:
        seen, ahead = batch
        return (model(seen) - ahead).square().mean(dim=1)

    def labels(self, examples: Examples) -> Tensor:
        """The last value seen, so that sorted shards differ in level."""
        return examples.train[0][:, -1]

    def test(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Symmetric mean absolute percentage error of the first six weeks after each series' end."""
        last, scales, following = (t.double() for t in examples.test)
        forecast = model(last.float()).double() * scales[:, 1:] + scales[:, :1]
        error = (forecast - following).abs() / (forecast.abs() + following.abs()).clamp_min(1e-12)
        return {"test_smape": float(200.0 * error.mean())}


class Autoregressive(nn.Module):
    """Predicts the next value from the last 20, six times, each time with its own last prediction among them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.next = nn.Sequential(
            nn.Linear(SEEN, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, seen: Tensor) -> Tensor:
        values = seen
        for _ in range(AHEAD):
            values = torch.cat([values, self.next(values[:, -SEEN:])], dim=1)
        return values[:, SEEN:]
