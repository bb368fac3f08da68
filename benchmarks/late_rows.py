"""What it costs an order that a solve does not wait for the epoch's last rows.

python -m benchmarks.late_rows [--data DIR] > benchmarks/results/late-rows.json

"all": every solve waits for the epoch's end. "3%": from the second epoch on, solves begin at 97% of the positions, and
the last rows come with the next epoch, as between workers with a small table. "a sixth": they begin a sixth before
the end, and in the first epoch too, in which the last rows are missing; as between workers with a large table and
epochs of 100 steps or fewer. "a sixth, anywhere": the same, with examples that have no row at random places of the
whole epoch, not of its first half.

One process stands for all workers. Losses are geometric means over seeds and epochs of the distance from the optimum,
or of the training loss where that is not known.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import experiments.simulate
from experiments.folder import Folder
from experiments.plans import comparison
from experiments.records import carry_out
from heeler.herding import batches
from heeler.ordering.distributed.rounds import LATE_PART
from heeler.ordering.epoch import Epoch
from heeler.ordering.planner import LATE, LocalPlanner

SIXTH = 1.0 - 1.0 / LATE_PART
POLICIES = {
    "all": (1.0, 1.0),
    "3%": (1.0, 1.0 - LATE),
    "a sixth": (SIXTH, SIXTH),
    "a sixth, anywhere": (SIXTH, SIXTH),
}
"""From which share of the first epoch, and of later ones, the solve begins."""
IN_FRONT = batches.unseen_in_front

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path)
parser.add_argument("--tasks", default="digits,digits-mlp")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seeds", type=int, default=5)


def early(first: float, later: float) -> type[LocalPlanner]:
    """A planner that begins its solves at these shares of an epoch."""

    class Early(LocalPlanner):
        def wants_start(self, epoch: Epoch, trained: int) -> bool:
            if self._closed or self._solving is not None or not self.rule.solves_in_background:
                return False
            length = len(epoch.order)
            return (later if epoch.number else first) * length <= trained < length

    return Early


def measure(task: str, refresh: int, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """One task with one policy, over seeds: its losses after every epoch."""
    experiments.simulate.LocalPlanner = early(*POLICIES[policy]) if policy != "random" else LocalPlanner  # type: ignore[misc]
    batches.unseen_in_front = (lambda start, *rest: start) if policy.endswith("anywhere") else IN_FRONT
    rule = "random" if policy == "random" else "herd"
    curves = []
    for run in comparison(task, [rule], options.seeds, epochs=options.epochs, refresh=refresh, shards="global"):
        with tempfile.TemporaryDirectory() as folder:
            epochs = carry_out(run, Folder(options.data), Path(folder)).epochs
        curves.append([epoch.get("suboptimality", epoch["train_loss"]) for epoch in epochs])
    logs = np.log(np.array(curves)[:, -options.epochs :])  # without the state before the first epoch, if it is there
    return {
        "task": task,
        "refresh": refresh,
        "policy": policy,
        "second_epoch": float(np.exp(logs[:, 1].mean())),
        "from_third_on": float(np.exp(logs[:, 2:].mean())),
        "last": float(np.exp(logs[:, -1].mean())),
        "spread_from_third_on": float(np.exp(logs[:, 2:].mean(axis=1).std(ddof=1))),
    }


if __name__ == "__main__":
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": f"python -m benchmarks.late_rows --tasks {options.tasks} --epochs {options.epochs} "
        f"--seeds {options.seeds}",
        "machine": "2 cores of a shared AMD EPYC",
        "date": datetime.date.today().isoformat(),
        "note": "spread_from_third_on: a factor, one standard deviation between seeds",
        "lines": [
            measure(task, refresh, policy, options)
            for task in options.tasks.split(",")
            for refresh in (8, 1)
            for policy in ["random", *POLICIES]
        ],
    }
    print(json.dumps(report, indent=1))
