"""Scaled sketches of several workers: one scale for all, and none of the plain ones left, nor of the new ones lost."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import heeler
from heeler.ordering.distributed import rounds
from heeler.sketch.preconditioner import squared_denominator
from tests.distributed.ranks import gradients, problem, run_ranks

EXAMPLES, BATCH = 32, 4


def trained(rank: int, round_bytes: int) -> Any:
    """Two epochs at rate 0, at which gradients stay: the multipliers by hand as the second began, and the table."""
    rounds.ROUND_BYTES = round_bytes
    dataset, plain = problem(EXAMPLES)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    sampler = heeler.Sampler(dataset, batch_size=BATCH)
    handle = heeler.attach(model, sampler, optimizer=optimizer)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    multipliers = torch.ones(1)
    for epoch in range(2):
        if epoch:
            found = [squared_denominator(optimizer, p) for p in plain.parameters()]
            w = torch.cat([each.flatten() for each in found if each is not None])
            multipliers = w.mean().sqrt() / w.sqrt()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    handle.consolidate()
    table = handle.table
    assert table is not None
    return multipliers.numpy(), table.sketches(np.arange(EXAMPLES)), table.seen.copy()


@pytest.mark.parametrize("round_bytes", [1 << 26, 64])
def test_all_workers_sketches_are_scaled_and_kept(round_bytes: int) -> None:
    (multipliers, rows, seen), (other, _, _) = run_ranks(2, trained, round_bytes)
    assert seen.all()
    np.testing.assert_array_equal(multipliers, other)
    dataset, model = problem(EXAMPLES)
    np.testing.assert_allclose(rows, 2 * gradients(dataset, model) * multipliers, rtol=2e-3, atol=2e-2)
