"""A tiny problem whose gradients are known: linear regression at fixed weights, so a sketch tells its example."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from tests.herding.every_rule import needed

FEATURES = 5


def problem(examples: int, seed: int = 0) -> tuple[TensorDataset, nn.Module]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, FEATURES, generator=generator)
    targets = torch.randn(examples, 1, generator=generator)
    torch.manual_seed(seed)
    return TensorDataset(inputs, targets), nn.Sequential(nn.Linear(FEATURES, 1))


def true_gradients(dataset: TensorDataset, model: nn.Module) -> np.ndarray:
    """(N, FEATURES + 1) each example's gradient of the squared error, by hand."""
    inputs, targets = dataset.tensors
    with torch.no_grad():
        residual = 2 * (model(inputs) - targets)
    return torch.cat([residual * inputs, residual], dim=1).numpy()


def backward(model: nn.Module, batch: list[torch.Tensor]) -> None:
    inputs, targets = batch
    nn.functional.mse_loss(model(inputs), targets).backward()


def filed(handle: heeler.Handle) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) what the table holds, and (N,) for which examples."""
    handle.state_dict()  # files what the last backward left
    table = handle.session.rule.table
    return table.rows.astype(np.float32) / table.scale, table.seen.copy()


def check_filed(handle: heeler.Handle, dataset: TensorDataset, model: nn.Module, *, all_of_them: bool = True) -> None:
    """Every sketch in the table is the gradient of the very example it is filed under."""
    rows, seen = filed(handle)
    assert seen.any()
    if all_of_them:
        assert seen.all()
    np.testing.assert_allclose(rows[seen], true_gradients(dataset, model)[seen], rtol=2e-3, atol=2e-3)


def attached(examples: int = 64, batch_size: int = 8, **loader_options):
    """(dataset, model, sampler, handle, loader) over the tiny problem."""
    dataset, model = problem(examples)
    order = loader_options.pop("order", "herd")
    seed = loader_options.pop("seed", 0)
    sampler = heeler.Sampler(dataset, batch_size=batch_size, order=order, seed=seed, **needed(order, examples))
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, **loader_options)
    return dataset, model, sampler, handle, loader
