"""Real ranks that train softmax regression on digits, some of them with something wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # DDP imports it: before the ranks fork, or each of them would for seconds
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from heeler import robust

BATCH, RATE, DECAY = 256, 0.1, 1e-2
RULES: dict[str, dict[str, Any]] = {
    "krum": {},
    "multi-krum": {},
    "geometric-median": {},
    "centered-clipping": {"tau": 0.5},
    "median": {},
    "trimmed-mean": {},
}
FAULTS = ("nan", "times 1000", "sign flip", "stale")


def spoil(model: nn.Module, fault: str) -> None:
    """Make this rank's gradients wrong, before DDP sees them."""
    for parameter in model.parameters():
        parameter.register_hook(_changed(fault))


def _changed(fault: str) -> Callable[[Tensor], Tensor]:
    if fault == "stale":  # for ever that of the first step
        first: deque[Tensor] = deque(maxlen=1)

        def stale(gradient: Tensor) -> Tensor:
            if not first:
                first.append(gradient.clone())
            return first[0].clone()

        return stale
    factor = {"nan": float("nan"), "times 1000": 1000.0, "sign flip": -1.0}[fault]
    return lambda gradient: gradient * factor


def train(
    rank: int, rule: str | None, distances: str = "sketch", fault: str | None = None, bad: int = 1, steps: int = 60
) -> tuple[float, dict[str, float]]:
    """The loss over all examples after the last step, with its L2 term, and the hook's metrics. rule None: plain DDP.

    Ranks 0 to bad − 1 are the bad ones. Every rank draws batches from all examples.
    """
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    aggregator = None
    if rule is not None:
        aggregator = robust.install(ddp, rule=rule, f=bad, momentum=0.9, distances=distances, **RULES[rule])
    if fault is not None and rank < bad:
        spoil(model, fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9 if rule is None else 0.0)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=drawn)
        optimizer.zero_grad()
        objective(ddp, x[batch], y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = objective(model, x, y).item()
    return loss, {} if aggregator is None else aggregator.metrics()


def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    squares = sum(parameter.square().sum() for parameter in model.parameters())
    return nn.functional.cross_entropy(model(x), y) + DECAY / 2 * squares
