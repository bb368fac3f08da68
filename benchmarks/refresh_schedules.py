"""In which epochs sketches are worth taking: fixed schedules, and one that follows from how far sketches have drifted.

python -m benchmarks.refresh_schedules [--data DIR] > benchmarks/results/refresh-schedules.json

A schedule is `refresh` as a number, epochs by name ("1-2-3-6"), or "drift 0.5": of sketches whose agreement with those
before (`SketchTable.agreement`) was c over an age of a epochs, c^(1/a) is expected to be left per epoch, and the next
ones are taken as soon as less than 0.5 is, after eight epochs at the latest.
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

from experiments.folder import Folder
from experiments.plans import comparison
from experiments.records import carry_out
from experiments.simulate import SimulatedSession
from heeler.ordering.pace import REFRESH, wanted

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path)
parser.add_argument("--tasks", default="char-gpt,digits-mlp,digits-mlp augmented")
parser.add_argument("--schedules", default="8,2,1,1-2-3-6-8,1-2-3-4-6-9-13,drift 0.3,drift 0.5,drift 0.7")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--device", default="cpu")
parser.add_argument("--lr", type=float, help="instead of each task's own rate")


def wait(agreement: float, age: int, threshold: float, longest: int = REFRESH) -> int:
    """Epochs until sketches whose agreement was so much after `age` epochs are expected to agree less than wanted."""
    left = max(agreement, 1e-6) ** (1.0 / age)
    return next((h for h in range(1, longest) if left**h < threshold), longest)


class Schedule:
    """Says of every epoch of one run whether sketches are taken, and remembers it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken: list[int] = []
        """Epochs, from 1 on."""
        self.agreements: list[float] = []
        self._answers: dict[int, bool] = {}

    def takes_sketches(self, session: SimulatedSession) -> bool:
        """In the session's place."""
        age = session.epoch.number + 1
        if session.rule.needs_vectors and age not in self._answers:
            self._answers[age] = self._decide(
                age, session.rule.table.persistence.agreement if session.rule.table else None
            )
            self.taken += [age] * self._answers[age]
        return self._answers.get(age, False)

    def _decide(self, age: int, agreement: float | None) -> bool:
        if "-" in self.name:
            return age in map(int, self.name.split("-"))
        if not self.name.startswith("drift"):
            return wanted(age, int(self.name))
        if len(self.taken) < 2 or agreement is None:
            return True
        if age == self.taken[-1] + 1:
            self.agreements.append(agreement)
        return age >= self.taken[-1] + wait(agreement, self.taken[-1] - self.taken[-2], float(self.name.split()[1]))


def measure(task: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The last losses of one task with one schedule, or of random orders, over seeds."""
    own: dict[str, Any] = {"options": {"augment": True}} if task.endswith(" augmented") else {}
    own |= {"schedule": "cosine"} if task.startswith("char-gpt") else {"epochs": 20}
    own |= {"device": options.device, **({"lr": options.lr} if options.lr else {})}
    rule = "random" if name == "random" else "herd"
    lines: dict[str, list[Any]] = {"train": [], "test": [], "sketched": [], "agreements": []}
    for run in comparison(task.removesuffix(" augmented"), [rule], options.seeds, shards="global", **own):
        schedule = Schedule(name)
        SimulatedSession.takes_sketches = property(schedule.takes_sketches)  # type: ignore[method-assign, assignment]
        with tempfile.TemporaryDirectory() as folder:
            last = carry_out(run, Folder(options.data), Path(folder)).epochs[-1]
        lines["train"].append(last["train_loss"])
        lines["test"].append(last["test_loss"])
        lines["sketched"].append(schedule.taken)
        lines["agreements"].append([round(c, 3) for c in schedule.agreements])
    counts = [len(taken) for taken in lines["sketched"]]
    means = {"mean_train": float(np.mean(lines["train"])), "mean_test": float(np.mean(lines["test"]))}
    return {"task": task, "schedule": name, "sketched_epochs": float(np.mean(counts)), **means, **lines}


if __name__ == "__main__":
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate = f" --device {options.device}" + (f" --lr {options.lr}" if options.lr else "")
    report = {
        "command": f"python -m benchmarks.refresh_schedules --data DIR --tasks '{options.tasks}' "
        f"--schedules '{options.schedules}' --seeds {options.seeds}{rate}",
        "machine": "2 cores of a shared AMD EPYC" if options.device == "cpu" else torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "lines": [
            measure(task, name, options)
            for task in options.tasks.split(",")
            for name in ["random", *options.schedules.split(",")]
        ],
    }
    print(json.dumps(report, indent=1))
