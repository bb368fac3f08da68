"""What orders of shards keep of the gain of orders of all examples: their bounds, and a convex task trained with them.

python -m benchmarks.shards [--seeds 3] > benchmarks/results/shards.json

*Bounds*: N vectors of K numbers around 50 centres, in shards of 1,000, mixed. *Training*: softmax regression on digits
(1,536 examples, 650 weights, λ = 1e-3, batches of 16, rate 1, exact gradients in every epoch) in shards of 48, mixed or
sorted by class, which is how shards should not be. Distance from the optimum after the last epoch.
"""

from __future__ import annotations

import argparse
import datetime
import json
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

import heeler.streams.shard_order
from experiments.folder import Folder
from experiments.tasks.digits import load_digits
from heeler.herding import OrderingRule, make_rule, solve_batches
from heeler.streams import sharded_order
from heeler.streams.shard_rules import sharded

parser = argparse.ArgumentParser()
parser.add_argument("--examples", type=int, default=200_000)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seeds", type=int, default=3)

SHARD, BATCH, RATE, DECAY = 48, 16, 1.0, 1e-3
READERS = ((1, 1), (1, 4), (4, 2))
"""Ranks and loader workers of each."""
OPEN = (1, 2, 4, 8)


def bounds(examples: int, dim: int) -> list[dict[str, Any]]:
    """Of one order of all examples, and of orders of shards; in units of the first."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((50, dim))
    vectors = (rng.standard_normal((examples, dim)) + centres[rng.integers(50, size=examples)]).astype(np.float16)
    sharded_order([64, 64], vectors[:128], batch_size=4)  # compiles
    one = solve_batches(vectors, batch_size=32)
    found: list[dict[str, Any]] = [{"order": "all", "bound": 1.0, "seconds": one.seconds}]
    sizes = [1000] * (examples // 1000)
    for stays in (2, 3, 9):
        with patch.object(heeler.streams.shard_order, "STAYS", stays):
            some = sharded_order(sizes, vectors[: sum(sizes)], batch_size=32)
        found.append({"order": "shards", "stays": stays, "bound": some.bound_after / one.bound_after})
    for ranks, workers in READERS:
        for open_shards in OPEN:
            readers: dict[str, Any] = {"ranks": ranks, "workers": workers, "open_shards": open_shards}
            some = sharded_order(sizes, vectors[: sum(sizes)], batch_size=32 // ranks, **readers)
            bound, random = some.bound_after / one.bound_after, some.bound_random / one.bound_after
            found.append({"order": "shards", **readers, "bound": bound, "random": random, "seconds": some.seconds})
    return found


class Task:
    """Softmax regression in double precision, examples sorted by class or not."""

    def __init__(self, by_class: bool) -> None:
        x, y = load_digits(Folder(None)).train
        order = np.argsort(y.numpy(), kind="stable") if by_class else np.arange(len(y))
        self.x = np.hstack([x.numpy(), np.ones((len(x), 1))]).astype(np.float64)[order]
        self.y = np.eye(10)[y.numpy()[order]]
        self.least = self._optimum()

    def gradients(self, w: NDArray[np.float64], rows: Any) -> NDArray[np.float64]:
        """(b, 650), each example's, without the decay."""
        scores = self.x[rows] @ w
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return (self.x[rows][:, :, None] * (p - self.y[rows])[:, None, :]).reshape(len(rows), -1)

    def loss(self, w: NDArray[np.float64]) -> float:
        """Mean cross-entropy and decay."""
        logs = torch.log_softmax(torch.from_numpy(self.x @ w), dim=1)
        return float(-(logs.numpy() * self.y).sum(axis=1).mean() + DECAY / 2 * (w * w).sum())

    def _optimum(self) -> float:
        w = torch.zeros(65, 10, dtype=torch.float64, requires_grad=True)
        x, y = torch.from_numpy(self.x), torch.from_numpy(self.y)
        solver = torch.optim.LBFGS(
            [w], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            solver.zero_grad()
            loss = -(torch.log_softmax(x @ w, dim=1) * y).sum(dim=1).mean() + DECAY / 2 * w.square().sum()
            loss.backward()
            return loss

        solver.step(closure)
        return self.loss(w.detach().numpy())

    def train(self, rule: OrderingRule, epochs: int) -> float:
        """Distance from the optimum at the end."""
        w = np.zeros((65, 10))
        for _ in range(epochs):
            for rows in np.asarray(rule.order).reshape(-1, BATCH):
                own = self.gradients(w, rows)
                if rule.needs_vectors:
                    rule.observe(rows, own.astype(np.float32))
                w = w - RATE * (own.mean(axis=0).reshape(w.shape) + DECAY * w)
            rule.next_order()
        return self.loss(w) - self.least


def training(epochs: int, seeds: int) -> list[dict[str, Any]]:
    """Every order on mixed shards and on sorted ones."""
    found: list[dict[str, Any]] = []
    for by_class in (False, True):
        task = Task(by_class)
        count = len(task.x)
        settings: list[dict[str, Any]] = [{"order": order} for order in ("random", "herd")]
        settings += [
            {"order": order, "workers": workers, "open_shards": open_shards}
            for order in ("random", "herd")
            for workers, open_shards in ((1, 1), (1, 4), (1, 8), (2, 4))
        ]
        for setting in settings:
            lasts = []
            for seed in range(seeds):
                options: dict[str, Any] = {"seed": seed, "batch_size": BATCH}
                if "workers" in setting:
                    sizes = np.full(count // SHARD, SHARD)
                    spec = sharded(
                        setting["order"], sizes, workers=setting["workers"], open_shards=setting["open_shards"]
                    )
                    rule = spec.make(count, 650, **options)
                else:
                    rule = make_rule(setting["order"], count, 650, **options)
                lasts.append(task.train(rule, epochs))
            row = {**setting, "sorted": by_class, "mean": float(np.mean(lasts)), "std": float(np.std(lasts))}
            found.append({**row, "lasts": lasts})
    return found


def main() -> None:
    given = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(),
        "arguments": vars(given),
        "bounds": bounds(given.examples, given.dim),
        "training": training(given.epochs, given.seeds),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
