"""How good orders are on real tables of gradients: prefixes, steps and the epoch's end, over those of a random order.

python -m benchmarks.order_quality --data DIR [--tasks digits,digits-mlp,glue-rte,glue-mrpc] [--out FILE]

A table is taken from a few epochs of training. "prefixes" is the root mean square of ‖prefix‖ at step boundaries,
"steps" Σ ‖sum_t‖², "end" Σ_τ ‖e_τ‖² / τ (docs/how-it-works.md), "classes" how far a step's counts of the classes are
from their shares, Σ_s |count − share|; all ÷ the random order's. "strata" is `herd` with the classes as strata,
"stratified" the order without gradients.
"seconds" are a second solve's, the first having compiled.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments import training
from experiments.folder import Folder
from experiments.tasks import get_task, settings
from heeler.herding import solve, solve_batches
from heeler.herding.solver import MOST_SWEEPS
from heeler.herding.strata import codes_of, stratified_order

TASKS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 8},
    "digits-mlp": {"epochs": 8},
    "glue-rte": {"epochs": 6, "workers": 1, "batch_size": 64, "shards": "global"},
    "glue-mrpc": {"epochs": 6, "workers": 1, "batch_size": 64, "shards": "global"},
}


def table_of(task: str, folder: Folder) -> tuple[NDArray[np.float32], NDArray[np.int64], int]:
    """(N, K) sketches of a short run, (N,) the examples' classes, and its batch size."""
    run = settings(get_task(task), "herd", 0, **TASKS[task])
    rows: list[NDArray[np.float32]] = []

    class Looking(training.OneProcess):
        def sampler(self, *args: Any, **kwargs: Any) -> Any:
            self.made = super().sampler(*args, **kwargs)
            return self.made

        def measure(self, *_: Any) -> dict[str, Any]:
            table = self.made.session.rule.table
            rows[:] = [] if table is None else [table.sketches(np.arange(len(table)))]
            return {}

    for _ in training.train(run, folder, Looking()):
        pass
    labels = training.load(run, folder)[0].train[-1]
    return rows[0], codes_of(labels.long(), len(rows[0])), run.step


def quality(
    rows: NDArray[np.float32], classes: NDArray[np.int64], order: NDArray[np.int64], step: int
) -> dict[str, float]:
    """Of an order, in full steps."""
    centred = (rows - rows.mean(axis=0))[order]
    count = len(order) // step
    sums = centred[: count * step].reshape(count, step, -1).sum(axis=1, dtype=np.float64)
    scales = 2.0 ** np.arange(int(math.log2(count)) + 1)
    ends = (1 - 1 / scales[:, None]) ** np.arange(count - 1, -1, -1) @ sums
    counts = np.eye(classes.max() + 1)[classes[order[: count * step]]].reshape(count, step, -1).sum(axis=1)
    return {
        "prefixes": math.sqrt(float(np.square(np.cumsum(sums, axis=0)).sum()) / count),
        "steps": float(np.square(sums).sum()),
        "end": float((np.square(ends).sum(axis=1) / scales).sum()),
        "classes": float(np.abs(counts - np.bincount(classes) * step / len(classes)).sum(axis=1).mean()),
    }


def compare(task: str, folder: Folder) -> dict[str, Any]:
    rows, classes, step = table_of(task, folder)
    start = np.random.default_rng(0).permutation(len(rows))
    random = quality(rows, classes, start, step)
    orders = {}
    for name, (order, seconds) in solved(rows, classes, start, step).items():
        own = quality(rows, classes, order, step)
        orders[name] = {key: round(value / random[key], 3) for key, value in own.items()}
        orders[name]["seconds"] = round(seconds, 3)
    return {"task": task, "rows": list(rows.shape), "step": step, "classes": int(classes.max()) + 1, "orders": orders}


def solved(
    rows: NDArray[np.float32], classes: NDArray[np.int64], start: NDArray[np.int64], step: int
) -> dict[str, tuple[NDArray[np.int64], float]]:
    """Each order and the seconds of its second solve, in turns."""
    for _ in range(2):
        found = {"sweeps": solve(rows, start, sweeps=MOST_SWEEPS, batch_size=step)}
        found["herd"] = solve_batches(rows, batch_size=step)
        found["strata"] = solve_batches(rows, batch_size=step, strata=classes)
    dealt = stratified_order(classes, step, np.random.default_rng(0))
    return {name: (one.order, one.seconds) for name, one in found.items()} | {"stratified": (dealt, 0.0)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = [compare(task, Folder.at(given.data)) for task in given.tasks.split(",")]
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
