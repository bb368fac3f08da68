"""Every rule's orders over four epochs, through sampler, model and loader: `orders.json` holds what they must be.

    python -m tests.golden.orders          # writes the file anew; do so only when orders are meant to change

Data are small integers, so every gradient and every sum of them is exact, on any machine. `herd` compares products of
centred vectors: it gets as many examples as make the mean exact too, powers of two.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import heeler
from heeler.herding import rule_class, rule_names
from tests.distributed.ranks import run_ranks

FILE = Path(__file__).with_name("orders.json")
EPOCHS = 4
EXAMPLES = 46
SHARDS = (24, 21)
EXACT_EXAMPLES = 64
EXACT_SHARDS = (32, 16)


class Numbered(Dataset):
    """Rows of small integers, each with its number."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index


def rows(features: int, order: str) -> torch.Tensor:
    shape = (EXACT_EXAMPLES if order == "herd" else EXAMPLES, features)
    return torch.from_numpy(np.random.default_rng(7).integers(-3, 4, shape).astype(np.float32))


def orders(data: torch.Tensor, **options: Any) -> list[list[int]]:
    """The indices of each epoch. The loss is linear in the weights and its factors change with the epoch, so that an
    example's gradient is known, and another one in every epoch."""
    outputs = 20 if data.shape[1] == 20 else 1
    model = nn.Sequential(nn.Linear(data.shape[1], outputs, bias=False))
    dataset = Numbered(data)
    if options.pop("stratify", False) or rule_class(options["order"]).needs_strata:
        options["strata"] = data[:, 0].long().tolist()
    sampler = heeler.Sampler(dataset, batch_size=4, seed=3, **options)
    heeler.attach(model, sampler, reduction="sum", layers="all")
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    result = []
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for inputs, indices in loader:
            factors = (indices * (2 * epoch + 3)) % 5 - 2
            (model(inputs) * factors[:, None]).sum().backward()
            seen += indices.tolist()
        result.append(seen)
    return result


def one(order: str, **options: Any) -> list[list[int]]:
    return orders(rows(6, order), order=order, **options)


def own(rank: int, order: str) -> list[list[int]]:
    shards = EXACT_SHARDS if order == "herd" else SHARDS
    start = sum(shards[:rank])
    return orders(rows(6, order)[start : start + shards[rank]], order=order, shards="local")


def case(name: str) -> Any:
    """The orders of one case, "order/kind"; of two ranks, first those of rank 0."""
    order, kind = name.split("/")
    if kind == "one":
        return one(order)
    if kind == "every-epoch":
        return one(order, refresh=1)
    if kind == "strata":
        return one(order, stratify=True)
    if kind == "global-strata":
        return run_ranks(2, _global, order, False, True)
    if kind == "sketched":
        return orders(rows(20, order), order=order, dim=16)
    if kind == "global":
        return run_ranks(2, _global, order, False)
    if kind == "drop-last":
        return run_ranks(2, _global, order, True)
    return run_ranks(2, own, order)


def _global(rank: int, order: str, drop_last: bool, stratify: bool = False) -> list[list[int]]:
    return one(order, drop_last=drop_last, stratify=stratify)


def cases() -> list[str]:
    kinds = ("one", "global", "local")
    names = [f"{order}/{kind}" for order in rule_names() for kind in kinds]
    return [*names, "pair/sketched", "grab/drop-last", "herd/every-epoch", "herd/strata", "herd/global-strata"]


if __name__ == "__main__":
    found = {name: case(name) for name in cases()}
    lines = (f'"{name}": {json.dumps(orders, separators=(",", ":"))}' for name, orders in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
