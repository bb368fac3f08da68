"""Two processes that train together: with Heeler every rank trains as without, bit for bit, collectives included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # which takes seconds, and DDP would import it in every process
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.distributed.ranks import run_ranks
from tests.transparency.same import CALLS, EPOCHS, EXAMPLES, FEATURES, Points, Side, compared

CASES: dict[str, tuple[Callable[[int, Side], None], float]] = {}
"""By name, with the part of its dataset that each rank reads."""
WAIT = {"exchange_timeout": 20.0}


def case(part: float) -> Callable[[Callable[[int, Side], None]], Callable[[int, Side], None]]:
    def add(run: Callable[[int, Side], None]) -> Callable[[int, Side], None]:
        CASES[run.__name__] = run, part
        return run

    return add


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return self.layers(x)  # type: ignore[no-any-return]


class Collective(Net):
    """As DINO's centre, a balance of experts or a contrast over all ranks: every forward waits for the other ranks'."""

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.cat([x.detach().sum(0), torch.tensor([float(len(x))])])
        dist.all_reduce(mean)
        CALLS["rows of all ranks"] += int(mean[-1])
        return super().forward(x - mean[:-1] / mean[-1])


def train(side: Side, model: nn.Module, loader: DataLoader[Any], accumulation: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader):
            steps = (number + 1) % accumulation == 0 or number + 1 == len(loader)
            waits = nullcontext() if steps or not isinstance(model, DistributedDataParallel) else model.no_sync()
            with waits:
                loss = F.mse_loss(model(x), y) / accumulation
                loss.backward()
            side.log(loss)
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    side.keep(model=model, optimizer=optimizer)


@case(0.5)
def ddp(rank: int, side: Side) -> None:
    model = DistributedDataParallel(Net())
    train(side, model, side.loader(model, sampler=WAIT))


@case(0.5)
def ddp_accumulates(rank: int, side: Side) -> None:
    model = DistributedDataParallel(Net())
    train(side, model, side.loader(model, batch_size=4, sampler={"batch_size": 8, **WAIT}), accumulation=2)


@case(0.5)
def ddp_with_a_collective_in_its_forward(rank: int, side: Side) -> None:
    model = DistributedDataParallel(Collective())
    train(side, model, side.loader(model, sampler=WAIT))


@case(1.0)
def batches_of_different_size_and_a_collective(rank: int, side: Side) -> None:
    """Every rank has its own examples: 40 in batches of 8, 25 in batches of 5."""
    size = (8, 5)[rank]
    model, options = Collective(), {"batch_size": 8, "shards": "local", **WAIT}
    train(side, model, side.loader(model, Points(5 * size), batch_size=size, sampler=options))


def both_sides(rank: int, name: str) -> tuple[dict[str, float], list[str]]:
    run, part = CASES[name]
    return compared(lambda side: run(rank, side), part=part)


@pytest.mark.parametrize("name", CASES)
def test_ranks(name: str) -> None:
    assert EXAMPLES % 2 == 0
    for rank, (metrics, found) in enumerate(run_ranks(2, both_sides, name, timeout=30.0)):
        assert not found, f"rank {rank}:\n" + "\n".join(found[:20])
        if (
            rank == 0 and "collective" not in name
        ):  # which may leave it open whose rows they are; the first rank has all
            assert metrics["examples_with_sketch"] > 0
