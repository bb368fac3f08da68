"""What `heeler demo` does with wrong labels: a twentieth of the digits gets another one, and training finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.cli.demo_runs import BATCH, digits
from heeler.cli.suspects_picture import draw

FLIPPED, EPOCHS, RATE = 0.05, 12, 0.1


def run(target: Path, seed: int = 0) -> tuple[int, int]:
    """How many labels were flipped, and how many of as many suspects are among these; draws the suspects."""
    x, y, *_ = digits()
    rng, labels = np.random.default_rng(seed), y.clone()
    flipped = rng.choice(len(y), round(FLIPPED * len(y)), replace=False)
    labels[flipped] = (y[flipped] + torch.from_numpy(rng.integers(1, 10, len(flipped)))) % 10
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    dataset = TensorDataset(x, labels)
    sampler = heeler.Sampler(dataset, batch_size=BATCH, order="random", seed=seed)
    handle = heeler.attach(model, sampler, record=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for inputs, targets in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = heeler.suspects(handle, len(flipped), labels)
    wrong = set(flipped.tolist())
    titles = [f"{labels[n]}, was {y[n]}" if n in wrong else f"{labels[n]}" for n in found["index"]]
    draw(found, x.numpy().reshape(-1, 8, 8), target, titles)
    return len(flipped), len(wrong & set(found["index"]))
