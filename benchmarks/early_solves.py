"""What it costs an order not to wait for the sketches of an epoch's last steps: see `heeler.ordering.planner.LATE`.

    python -m benchmarks.early_solves --data DIR --out early-solves.json

The next order is found beside the last `share` of every sketched epoch but the first, so that its rows of these
examples are those of the sketched epoch before; 0 waits for the epoch's end. Sketches are taken in epochs 1, 2, 4, 8
and so on, as is the default. Distance from the optimum of digits after 40 epochs at a constant rate, last training
losses of the others: the mean over seeds, and how far the same seeds end above those that wait, with its standard
error.

    python -m benchmarks.early_solves --of benchmarks/results/early-solves.json          # the same from a stored file
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.folder import Folder
from experiments.plans import comparison
from experiments.run import Run
from experiments.training import train
from heeler.ordering import planner

SHARES = (0.0, 0.03, 0.1, 0.2, 0.3)
NETWORK: dict[str, Any] = {"epochs": 20, "measure_every": 20, "workers": 1, "batch_size": 16, "shards": "global"}
LINES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("digits", "herd", 10, {**NETWORK, "epochs": 40, "measure_every": 40}),
    ("digits-mlp", "herd", 8, {**NETWORK, "schedule": "constant", "lr": 0.3}),
    ("digits-mlp", "herd", 8, {**NETWORK, "schedule": "cosine", "lr": 0.6}),
    ("digits-mlp", "herd+strata", 8, {**NETWORK, "schedule": "constant", "lr": 0.3}),
    ("digits-mlp", "herd+strata", 8, {**NETWORK, "schedule": "cosine", "lr": 0.6}),
    ("char-gpt", "herd", 8, {"epochs": 12, "measure_every": 12, "schedule": "cosine", "lr": 0.006}),
]
"""Task, order, seeds and settings."""


def last_distance(run: Run, folder: Folder, seed: int) -> float:
    """From the optimum, or a network's loss."""
    *_, end, _ = train(replace(run, seed=seed), folder)
    return float(end["suboptimality"] if "suboptimality" in end else end["train_loss"])


def measure(task: str, rule: str, seeds: int, changes: dict[str, Any], share: float, folder: Folder) -> dict[str, Any]:
    """Where runs end whose solves begin so early, seed by seed."""
    kept, planner.late_share = planner.late_share, lambda numbers: share
    run = comparison(task, [rule], 1, **changes)[0]
    try:
        return {"share": share, "values": [last_distance(run, folder, seed) for seed in range(seeds)]}
    finally:
        planner.late_share = kept


def described(line: dict[str, Any]) -> str:
    """The means, and the differences from the first share's, seed by seed."""
    waiting, *others = line["shares"]
    parts = [f"{line['line']}: {statistics.mean(waiting['values']):.4g} at the end"]
    for one in others:
        above = [a - b for a, b in zip(one["values"], waiting["values"], strict=True)]
        error = statistics.stdev(above) / math.sqrt(len(above))
        mean = statistics.mean(one["values"])
        parts.append(f"{one['share']:.0%} early {mean:.4g} ({statistics.mean(above):+.2g} ± {error:.1g})")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", default="digits,digits-mlp,char-gpt")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path, help="describe this file, and run nothing")
    given = parser.parse_args()
    if given.of is not None:
        print(*map(described, json.loads(given.of.read_text())), sep="\n")
        return
    torch.set_num_threads(1)
    results = []
    for task, rule, seeds, changes in LINES:
        if task not in given.tasks.split(","):
            continue
        found = [measure(task, rule, seeds, changes, share, Folder(given.data)) for share in SHARES]
        results.append({"line": f"{task}, {rule}, {changes.get('schedule', 'constant')}", "shares": found})
        print(described(results[-1]), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
