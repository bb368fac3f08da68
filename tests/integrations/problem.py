"""One small problem for all frameworks, a model that writes down what it is trained on, and the plain loop."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import heeler

EXAMPLES, BATCH, EPOCHS, SEED = 46, 4, 3, 11
OPTIONS: dict[str, Any] = {
    "order": "herd",
    "dim": 16,
    "seed": SEED,
    "budget": None,
}  # fewer than the parameters: projections, drawn by their names
Batches = list[list[int]]


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x = torch.from_numpy(rng.normal(size=(EXAMPLES, 6)).astype(np.float32))
        self.labels = torch.from_numpy(rng.integers(0, 3, EXAMPLES))

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index], "index": torch.tensor(index)}


class Net(nn.Module):
    """Returns its loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen: Batches = []
        self.losses: list[float] = []

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.layers(x), labels)
        if self.training:
            self.seen.append(index.tolist())
            self.losses.append(loss.item())
        return {"loss": loss}


class Silent(Net):
    """Writes nothing down, so that it can be compiled in one piece."""

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Points(), batch_size=BATCH, **options)


def plain_loop(accumulation: int = 1, *, uneven: bool = False) -> Net:
    """What every framework's run is compared with: the two lines in an ordinary loop, with the labels as strata.

    uneven: whether a step at an epoch's end that has fewer batches still counts each as one of `accumulation`.
    """
    net = Net()
    model: Any = DistributedDataParallel(net) if dist.is_initialized() and dist.get_world_size() > 1 else net
    sampler = heeler.Sampler(Points(), batch_size=BATCH * accumulation, strata=Points().labels, **OPTIONS)
    heeler.attach(model, sampler)
    optimizer = sgd(model)
    batches = loader(sampler=sampler)
    for _ in range(EPOCHS):
        for step, batch in enumerate(batches):
            together = accumulation if uneven else min(accumulation, len(batches) - step // accumulation * accumulation)
            steps_now = (step + 1) % accumulation == 0 or step + 1 == len(batches)
            with nullcontext() if steps_now or model is net else model.no_sync():
                (model(**batch)["loss"] / together).backward()
            if steps_now:
                optimizer.step()
                optimizer.zero_grad()
    return net


def by_epoch(hands: list[Batches]) -> list[list[int]]:
    """What all ranks together have trained on, epoch by epoch."""
    steps = len(hands[0]) // EPOCHS
    return [
        [i for step in range(epoch * steps, (epoch + 1) * steps) for hand in hands for i in hand[step]]
        for epoch in range(EPOCHS)
    ]


def check_orders(hands: list[Batches], expected: list[Batches]) -> None:
    """Every example once an epoch, new orders from the second on, and the plain loop's."""
    epochs = by_epoch(hands)
    assert [sorted(epoch) for epoch in epochs] == [list(range(EXAMPLES))] * EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
    assert hands == expected
