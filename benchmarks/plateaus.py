"""Networks that begin on a plateau: does a stratified first epoch, which has less noise, keep them there?

python -m benchmarks.plateaus [--seeds 6] [--epochs 10] [--out FILE]

Three networks on scikit-learn's digits, each at two rates, with PyTorch's own first weights: seven narrow layers, two
layers of sigmoids, three convolutions. SGD with momentum 0.9, batches of 32, a constant rate. Training loss after every
epoch, mean over seeds, and the standard deviation of the last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heeler

EXAMPLES, BATCH = 1536, 32
ORDERS: dict[str, dict[str, Any]] = {
    "random": {"order": "random"},
    "stratified": {"order": "stratified", "strata": True},
    "herd": {},
    "herd, strata": {"strata": True},
}


def deep() -> nn.Module:
    """Seven layers of 32."""
    inner = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), *inner, nn.Linear(32, 10))


def sigmoids() -> nn.Module:
    """Two hidden layers of sigmoids."""
    return nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 10))


def convolutions() -> nn.Module:
    """Three convolutions and two layers behind them."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


NETWORKS: list[tuple[str, Callable[[], nn.Module], float]] = [
    *(("seven layers", deep, rate) for rate in (0.05, 0.1)),
    *(("sigmoids", sigmoids, rate) for rate in (0.05, 0.1)),
    *(("convolutions", convolutions, rate) for rate in (0.005, 0.01)),
]


def digits() -> tuple[Tensor, Tensor]:
    """(N, 64) pixels from 0 to 1, and (N,) classes."""
    found = load_digits()
    chosen = np.random.default_rng(0).permutation(len(found.target))[:EXAMPLES]
    return torch.tensor(found.data[chosen] / 16, dtype=torch.float32), torch.tensor(found.target[chosen])


def train(make: Callable[[], nn.Module], rate: float, order: dict[str, Any], seed: int, epochs: int) -> list[float]:
    """The loss after every epoch."""
    x, y = digits()
    torch.manual_seed(seed)
    model, data = make(), TensorDataset(x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    options = {**order, "strata": y} if order.get("strata") else order
    sampler = heeler.Sampler(data, batch_size=BATCH, seed=seed, **options)
    heeler.attach(model, sampler)
    losses = []
    for _ in range(epochs):
        for inputs, labels in DataLoader(data, BATCH, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y).item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, make, rate in NETWORKS:
        for order, options in ORDERS.items():
            losses = np.array([train(make, rate, options, seed, given.epochs) for seed in range(given.seeds)])
            row = {"network": name, "rate": rate, "order": order, "seeds": given.seeds}
            row |= {"loss": losses.mean(0).round(4).tolist(), "deviation": round(float(losses[:, -1].std(ddof=1)), 4)}
            print(json.dumps(row), flush=True)
            found.append(row)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
