"""What a turnover costs: from the last step of an epoch to the next one's first index, and every index after it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler

import heeler

EPOCHS = 3


def measure_epoch(examples: int = 1_000_000, dim: int = 256, batch_size: int = 64, repeats: int = 5) -> dict[str, Any]:
    """Train a linear model with `dim` parameters for three epochs and time the turnovers; then time bare iteration.

    The model is as small as can be, so its epoch is short and there is next to no training for an early solve to hide
    behind: a real run waits less. Iteration is timed against `RandomSampler`, taking turns, shuffling included on both
    sides.
    """
    inputs = torch.randn(examples, dim - 1)
    targets = torch.randn(examples, 1)
    model = nn.Linear(dim - 1, 1)
    sampler = heeler.Sampler(examples, batch_size=batch_size, dim=dim)
    handle = heeler.attach(model, sampler)
    turnovers: list[float] = []
    epochs: list[float] = []
    solves: list[float] = []
    for epoch in range(EPOCHS):
        ended = time.perf_counter()
        batches = iter(BatchSampler(sampler, batch_size, drop_last=False))
        batch: list[int] | None = next(batches)
        begun = time.perf_counter()
        if epoch:
            turnovers.append(begun - ended)
            solves.append(handle.metrics()["solve_seconds"])
        while batch is not None:
            nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
            model.zero_grad()
            batch = next(batches, None)
        epochs.append(time.perf_counter() - begun)
    handle.detach()

    own, others = [], []
    shuffled = heeler.Sampler(examples, batch_size=batch_size, order="random")
    plain = RandomSampler(range(examples))
    for _ in range(repeats):
        others.append(_nanoseconds_an_index(plain))
        own.append(_nanoseconds_an_index(shuffled))
    return {
        "examples": examples,
        "dim": dim,
        "turnover_seconds": turnovers[-1],
        "first_turnover_seconds": turnovers[0],
        "solve_seconds": solves[-1],
        "epoch_seconds": statistics.median(epochs),
        "index_ns": statistics.median(own),
        "index_ns_spread": [min(own), max(own)],
        "random_sampler_index_ns": statistics.median(others),
        "random_sampler_index_ns_spread": [min(others), max(others)],
        "ratio": statistics.median(own) / statistics.median(others),
    }


def _nanoseconds_an_index(sampler: Any) -> float:
    started = time.perf_counter()
    for _ in sampler:
        pass
    return 1e9 * (time.perf_counter() - started) / len(sampler)
