"""How much the end of an epoch matters: the orders of sweeps, the same reversed, and the same begun in the middle.

python -m benchmarks.reversed_orders [--data DIR] > benchmarks/results/reversed-orders.json

Reversed, an order has the same prefix norms, only mirrored. What differs is the last step's noise, and with it where an
epoch leaves the weights: `last_batch` is the norm of the last batch's summed gradients, centred, over that of a batch
drawn at random, `last_examples` the norm of one of its gradients over that of any (root mean squares over a run's
solves). The results were taken when `sweeps` was called `herd`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import rules
from experiments.folder import Folder
from experiments.plans import comparison
from experiments.records import carry_out
from heeler.herding.solver import Solution

CHANGES: dict[str, Callable[[Any], Any]] = {
    "sweeps": lambda order: order,
    "reversed": lambda order: order[::-1],
    "begun in the middle": lambda order: np.roll(order, order.size // 2),
}

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path)
parser.add_argument("--tasks", default="digits,digits-mlp,glue-cola")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seeds", type=int, default=5)


class Changed:
    """A solve whose order is changed afterwards, and a note of how its last batch looks."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change
        self.last: list[tuple[float, float]] = []
        """Squares, of every solve: the last batch's sum, and its examples."""
        self.solve = rules.solve

    def __call__(self, rows: Any, order: Any, *, batch_size: int, **options: Any) -> Solution:
        solution = self.solve(rows, order, batch_size=batch_size, **options)
        changed = np.ascontiguousarray(self.change(solution.order))
        centred = rows[changed].astype(np.float32)
        centred -= centred.mean(0)
        squares, batch = np.sum(centred**2, axis=1), centred[-batch_size:]
        usual = float(squares.mean())
        summed = float(np.sum(batch.sum(0) ** 2)) / (len(batch) * usual)
        self.last.append((summed, float(squares[-batch_size:].mean()) / usual))
        return solution._replace(order=changed)


def measure(task: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The last loss of one task in one kind of order, over seeds."""
    losses: list[float] = []
    solve = Changed(CHANGES[name])
    rules.solve = solve  # type: ignore[assignment]
    try:
        # One global order, so that reversing it reverses what all workers see.
        for run in comparison(task, ["sweeps"], options.seeds, epochs=options.epochs, shards="global"):
            with tempfile.TemporaryDirectory() as folder:
                last = carry_out(run, Folder(options.data), Path(folder)).epochs[-1]
            losses.append(last["suboptimality" if "suboptimality" in last else "train_loss"])
    finally:
        rules.solve = solve.solve
    last_batch, last_examples = np.sqrt(np.mean(solve.last, axis=0)).tolist()
    return {
        "task": task, "order": name, "mean": float(np.mean(losses)), "sd": float(np.std(losses, ddof=1)),
        "all": losses, "last_batch": last_batch, "last_examples": last_examples,
    }  # fmt: skip


if __name__ == "__main__":
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": "python -m benchmarks.reversed_orders --data DIR "
        f"--tasks {options.tasks} --epochs {options.epochs} --seeds {options.seeds}",
        "machine": "2 cores of a shared AMD EPYC",
        "date": datetime.date.today().isoformat(),
        "lines": [measure(task, name, options) for task in options.tasks.split(",") for name in CHANGES],
    }
    print(json.dumps(report, indent=1))
