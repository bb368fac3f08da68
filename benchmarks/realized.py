"""Realized balance: what orders made from one epoch's sketches do to the gradients of the next one.

    python -m benchmarks.realized --data DIR --out benchmarks/results/realized.json
    python -m benchmarks.realized --data DIR --only MLP --epochs 6
    python -m benchmarks.realized --of benchmarks/results/realized.json

A run takes sketches in every epoch and trains in random order, so that what is measured changes nothing. After every
epoch but the first, two orders are made from its sketches: from the rows as they are, and from predictions (rows times
the factors of `heeler.herding.persistence`). The next epoch's sketches say what each would have done; 1 is what random
orders have. Means over the epochs from the third on, over `--solves` seeds of the solver and `--seeds` of training.
`cost` is the time of a look (`Herd._look` and the factors) over that of the sketched epoch, in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.small_tasks import Small, train, use
from experiments.folder import Folder
from experiments.tasks.base import Examples
from heeler.herding.batches import solve_batches
from heeler.herding.judgement import Judgement
from heeler.herding.realized import realized_balance, row_squares
from heeler.herding.rules.herd import Herd, Turn
from heeler.herding.rules.spec import RuleSpec


class Watched(Herd):
    """Random orders; at the end of every epoch, orders that would have been."""

    solves = 2

    def __init__(self, *args: Any, **common: Any) -> None:
        super().__init__(*args, **common)
        self.made: dict[str, list[Any]] = {}
        self.found: list[dict[str, list[float]]] = []
        self.seconds: list[float] = []

    def solve(self) -> Turn:
        """Measure the orders of the epoch before, and make new ones."""
        table = self.table
        squares = row_squares(table.rows)
        shape: dict[str, Any] = {"batch_size": self.batch_size, "shards": self.offsets, "seen": table.seen}
        measured = {
            kind: np.mean([realized_balance(table.rows, order, **shape) for order in orders], axis=0).tolist()
            for kind, orders in self.made.items()
        }
        if measured:
            self.found.append(measured)
        begun = time.perf_counter()
        self.judgement = Judgement(ordered=True)  # so that a look is a whole one
        self._look(row_squares(table.rows))
        weights, _ = table.persistence.weights(squares / table.scale**2)
        self.seconds.append(time.perf_counter() - begun)
        if self.epoch:  # before, there are no factors
            rows = {
                "raw": table.rows,
                "predictions": table.rows if weights is None else (table.rows * weights[:, None]).astype(np.float16),
            }
            options: dict[str, Any] = {"batch_size": self.batch_size, "strata": self.strata, "seen": table.seen}
            self.made = {
                kind: [solve_batches(each, seed=[self.epoch, s], **options).order for s in range(self.solves)]
                for kind, each in rows.items()
            }
        return Turn(Judgement(), None)


def measure(task: Small, examples: Examples, strata: bool, seed: int, epochs: int) -> dict[str, Any]:
    """One run."""
    shorter = Small(**{**vars(task), "epochs": min(epochs, task.epochs)})
    options = {"strata": np.asarray(examples.train[-1])} if strata else {}
    sketched: list[float] = []
    before = 0.0
    for run in train(shorter, examples, seed, order=RuleSpec(Watched, options), refresh=1):
        sketched.append(run.seconds - before)
        before = run.seconds
    rule: Any = run.sampler.session.rule
    rule.next_order()
    # An epoch's seconds hold the measuring of the one before it, which is no part of a sketched epoch.
    cost = np.median(rule.seconds[1:]) / sketched[0]
    found = {kind: np.mean([each[kind] for each in rule.found], axis=0) for kind in ("raw", "predictions")}
    return {
        **{
            f"{kind} {name}": float(value[i])
            for kind, value in found.items()
            for i, name in enumerate(("steps", "prefixes"))
        },
        "cost": 100 * float(cost),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown; a row per task, and the mean of the ratios."""
    head = ["task", "steps: raw", "predictions", "prefixes: raw", "predictions", "prefixes: ratio", "cost, %"]
    rows, ratios = [head, ["---"] * len(head)], []
    for name in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == name]
        mean = {key: float(np.mean([line[key] for line in own])) for key in own[0] if key not in ("task", "seed")}
        ratios.append(mean["predictions prefixes"] / mean["raw prefixes"])
        values = [mean[f"{kind} {what}"] for what in ("steps", "prefixes") for kind in ("raw", "predictions")]
        rows.append([name, *(f"{value:.3f}" for value in values), f"{ratios[-1]:.3f}", f"{mean['cost']:.2f}"])
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{text}\n\nMean ratio of prefixes: {np.mean(ratios):.3f}; the largest: {max(ratios):.3f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HEELER_DATA", ".data")))
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--solves", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path)
    given = parser.parse_args()
    if given.of:
        print(table(json.loads(given.of.read_text())))
        return
    torch.set_num_threads(1)
    folder, Watched.solves = Folder(given.data), given.solves
    lines: list[dict[str, Any]] = []
    for name, task in use(folder).items():
        for strata in (False, True) if "ResNet" in name else (False,):
            label = name + ", strata" * strata
            if given.only not in label:
                continue
            for seed in range(given.seeds if "ResNet" not in name else 1):
                found = measure(task, task.load(folder), strata, seed, given.epochs)
                lines.append({"task": label, "seed": seed, **found})
                print(json.dumps(lines[-1]), flush=True)
    if given.out:
        given.out.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    print(table(lines))


if __name__ == "__main__":
    main()
