"""The demo's runs: two small models on handwritten digits, each trained in three orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler

import heeler
from heeler.herding import make_rule
from heeler.sketch import Sketcher

ORDERS = ("random", "cd-grab", "herd")
EXAMPLES, BATCH, WORKERS, L2 = 1536, 16, 4, 1e-3
Curves = NDArray[np.float64]
"""(..., 3, epochs + 1), before training and after every epoch: what is minimised, test accuracy, training seconds."""


@dataclass(frozen=True)
class Task:
    """What is trained, and what of it is shown."""

    name: str
    title: str
    quantity: str
    lr: float
    model: Callable[[], nn.Module]
    measure: Callable[[nn.Module, Tensor, Tensor], float]


def train(task: Task, order: str, seed: int, epochs: int) -> Curves:
    """One run."""
    x, y, test_x, test_y = digits()
    torch.manual_seed(seed)
    model = task.model()
    batches = in_order(order, model, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, weight_decay=L2)
    seconds, found = 0.0, []
    for epoch in range(epochs + 1):
        if epoch:
            model.train()
            started = time.perf_counter()
            for rows in batches:
                cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds += time.perf_counter() - started
        model.eval()
        with torch.no_grad():
            accuracy = float((model(test_x).argmax(-1) == test_y).double().mean())
            found.append((task.measure(model, x, y), accuracy, seconds))
    return np.array(found).T


def in_order(order: str, model: nn.Module, seed: int) -> Iterable[list[int]]:
    """Every epoch's batches."""
    if order == "cd-grab":
        return Published(model, seed)
    sampler = heeler.Sampler(EXAMPLES, batch_size=BATCH, order=order, seed=seed)
    if order == "herd":
        heeler.attach(model, sampler)
    return BatchSampler(sampler, BATCH, drop_last=False)


class Published:
    """CD-GraB as published: full gradients, and workers that hold their own part of the examples.

    The workers are simulated: the gradient of their joined batches is the one that they would average.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.sketcher = Sketcher(model, layers="all", exact=True)
        parts, dim = [EXAMPLES // WORKERS] * WORKERS, self.sketcher.dim
        self.rule = make_rule("cd-grab", EXAMPLES, dim, seed=seed, batch_size=BATCH // WORKERS, shard_sizes=parts)

    def __iter__(self) -> Iterator[list[int]]:
        by_worker = self.rule.order.reshape(WORKERS, -1, BATCH // WORKERS)
        for rows in by_worker.transpose(1, 0, 2).reshape(-1, BATCH):
            yield rows.tolist()
            self.rule.observe(rows, self.sketcher.pop().numpy())
        self.rule.next_order()


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and labels for training, then for testing; from scikit-learn's wheel, the same split everywhere."""
    from sklearn.datasets import load_digits

    pixels, digit = load_digits(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(pixels))
    x, y = torch.tensor(pixels[mixed] / 16.0, dtype=torch.float32), torch.tensor(digit[mixed])
    return x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:]


def regression() -> nn.Module:
    model = nn.Linear(64, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def network() -> nn.Module:
    # Projections depend on the parameters' names: with the empty layer these are those of the experiments' network.
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 10))


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(cross_entropy(model(x), y, reduction="none").double().mean())


def distance(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """f(w) − f*, which becomes so small that f must be computed in double precision."""
    weight, bias = (p.detach().double() for p in model.parameters())
    return float(objective(torch.cat([weight.T, bias[None]]), x, y)) - least_objective()


def objective(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(x.double() @ w[:-1] + w[-1], y) + L2 / 2 * w.square().sum()


@cache
def least_objective() -> float:
    x, y, *_ = digits()
    w = torch.zeros(65, 10, dtype=torch.float64, requires_grad=True)
    exactly: dict[str, Any] = {"max_iter": 2000, "history_size": 50, "tolerance_grad": 1e-10, "tolerance_change": 1e-15}
    optimizer = torch.optim.LBFGS([w], line_search_fn="strong_wolfe", **exactly)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(w, x, y)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return float(objective(w.detach(), x, y))


TASKS = (
    Task("digits", "digits, softmax regression (convex)", "suboptimality", 1.0, regression, distance),
    Task("digits-mlp", "digits, network 64-32-10", "train_loss", 0.3, network, mean_loss),
)
