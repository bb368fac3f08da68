"""Filing from a GPU: inputs are copies of the loader's batches, and travel to the host with the sketches."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heeler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
N, BATCH = 200, 16


def run(change, dtype=torch.float32, epochs=2, compiled=None, refresh=1):
    """Train at fixed weights; the share of examples with a sketch, and how many rows are another example's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = torch.randn(N, 12), torch.randn(N, 1)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).cuda().to(dtype)
    called = torch.compile(model, mode=compiled) if compiled else model
    sampler = heeler.Sampler(N, batch_size=BATCH, refresh=refresh, budget=None)
    handle = heeler.attach(called, sampler, layers="all")
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=sampler, pin_memory=True)

    def step(inputs, targets):
        F.mse_loss(called(inputs), targets).backward()
        model.zero_grad()

    for _ in range(epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.cuda(non_blocking=True).to(dtype), targets.cuda(non_blocking=True).to(dtype)
            change(step, inputs, targets)
    found = handle.verify(
        lambda i: F.mse_loss(model(x[i : i + 1].cuda().to(dtype)), y[i : i + 1].cuda().to(dtype)), examples=N
    )
    return float(np.mean(handle.table.seen)), float((found.cosines < 0.99).sum()), handle.ignored_passes


def plain(step, x, y):
    step(x, y)


def permuted(step, x, y):
    order = torch.randperm(len(x), device=x.device)
    step(x[order], y[order])


def other_first(step, x, y):
    step(torch.randn_like(x), y)
    step(x, y)


def halves(step, x, y):
    for part in (slice(0, 5), slice(5, None)):
        if len(x[part]):
            step(x[part], y[part])


@pytest.mark.parametrize("change", [plain, permuted, halves], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["single", "bf16"])
def test_filed_right(change, dtype):
    seen, wrong, ignored = run(change, dtype)
    assert (seen, wrong, ignored) == (1.0, 0.0, 0)


def test_other_data_first():
    seen, wrong, ignored = run(other_first)
    assert (seen, wrong) == (1.0, 0.0)
    assert ignored == 2 * -(-N // BATCH)


@pytest.mark.parametrize("change", [plain, permuted], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("refresh", [1, 8])
def test_compiled(change, mode, refresh):
    """Under CUDA graphs, too, and with untapped epochs between tapped ones."""
    seen, wrong, _ = run(change, compiled=mode, epochs=4, refresh=refresh)
    assert (seen, wrong) == (1.0, 0.0)
