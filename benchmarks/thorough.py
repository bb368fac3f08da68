"""What a more thorough solve would gain, and take: more rounds of exchanges, between steps that lie further apart.

    python -m benchmarks.thorough --data DIR --out thorough.json
    python -m benchmarks.thorough --tasks digits,digits-mlp --seeds 2

Each setting is (rounds at most, how far apart steps are that exchange examples, SUMS_SHARE) of `heeler.herding`: the
library has the first for steps of many numbers and the second for steps of few, see `steps.reach`. Convex tasks are
those of experiments/plan_files/15-convex.json, with their budgets: mean distance from the optimum. digits-mlp, a
network, has its last training loss, without and with strata, at a constant rate of 0.3 and under a cosine from 0.6.
Seconds are medians over a run's solves. What orders are like: `benchmarks.order_quality`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.folder import Folder
from experiments.plans import comparison, read_plan
from experiments.setup import Run
from experiments.training import train
from heeler.herding import batches, steps
from heeler.herding.rules import herd
from heeler.herding.solver import Solution

PLAN = Path("experiments/plan_files/15-convex.json")
CONVEX = ("digits", "glue-cola", "glue")
SETTINGS = ((batches.ROUNDS, steps.NEAR, steps.SUMS_SHARE), (4, 4, 0.1), (4, 8, 0.1))
NETWORK: dict[str, Any] = {
    "epochs": 20,
    "measure_every": 20,
    "workers": 1,
    "batch_size": 16,
    "shards": "global",
    "weight_decay": 1e-3,
}


@contextmanager
def solving(rounds: int, near: int, share: float, taken: list[float]) -> Iterator[None]:
    """Solves of the rule `herd` are done so; their seconds are added to `taken`."""
    solve, kept = batches.solve_batches, (steps.reach, steps.SUMS_SHARE)

    def timed(*args: Any, **options: Any) -> Solution:
        solution = partial(solve, rounds=rounds)(*args, **options)
        taken.append(solution.seconds)
        return solution

    herd.solve_batches, steps.reach, steps.SUMS_SHARE = timed, lambda step, dim: near, share
    try:
        yield
    finally:
        herd.solve_batches = solve
        steps.reach, steps.SUMS_SHARE = kept


def lines(task: str) -> list[tuple[str, Run]]:
    """What is run of a task, with seed 0."""
    if task == "digits-mlp":
        changes = [("constant", 0.3), ("cosine", 0.6)]
        return [
            (f"{rule}, {schedule} {lr}", comparison(task, [rule], 1, **NETWORK, schedule=schedule, lr=lr)[0])
            for rule in ("herd", "herd+strata")
            for schedule, lr in changes
        ]
    runs = [r for r in read_plan(PLAN) if r.task == task and r.rule == "herd" and r.strata == "none" and not r.seed]
    return [("own shards" if r.workers > 1 else "one worker", replace(r, measure_every=r.epochs)) for r in runs]


def last_distance(run: Run, folder: Folder, seed: int) -> float:
    """From the optimum, or a network's loss."""
    *_, end, _ = train(replace(run, seed=seed), folder)
    return float(end["suboptimality"] if "suboptimality" in end else end["train_loss"])


def measure(run: Run, seeds: int, folder: Folder) -> list[dict[str, Any]]:
    found = []
    for setting in SETTINGS:
        taken: list[float] = []
        with solving(*setting, taken):
            values = [last_distance(run, folder, seed) for seed in range(seeds)]
        error = statistics.stdev(values) if seeds > 1 else None
        shown = {"rounds": setting[0], "near": setting[1], "share": setting[2], "mean": statistics.mean(values)}
        found.append({**shown, "deviation": error, "values": values, "seconds": statistics.median(taken)})
        print("  ", {k: v for k, v in found[-1].items() if k != "values"}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default=",".join((*CONVEX, "digits-mlp")))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for task in given.tasks.split(","):
        folder = Folder(given.data)
        for name, run in lines(task):
            print(task, name, flush=True)
            seeds = min(given.seeds, 2) if task == "glue" else given.seeds  # a minute per run
            results.append({"task": task, "line": name, "settings": measure(run, seeds, folder)})
            if given.out is not None:
                given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
