"""How far any order can go on the convex tasks: as many steps of the same rate, each with the gradient of all examples.

    python -m benchmarks.without_noise --data DIR --out without-noise.json
    python -m benchmarks.without_noise --data DIR --only glue-rte

An order takes noise out of the steps; what is left when there is none is this run's distance from the optimum. An order
whose distance is near it has nothing more to gain. The epochs, batch sizes and rates are those of the plan, by default
that of RESULTS.md's convex tasks; rows of one worker alone, since where examples lie makes no difference here.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from experiments.folder import Folder
from experiments.plans import read_plan
from experiments.setup import Run
from experiments.tasks import get_task
from experiments.tasks.base import parameters_l2
from experiments.training import Steps, load, optimizer_of

PLAN = Path("experiments/plan_files/15-convex.json")


def distance(run: Run, folder: Folder) -> dict[str, Any]:
    """f(w) − f* after the run's number of steps, each with the gradient of all examples."""
    task = get_task(run.task)
    examples, least = load(run, folder)
    if least is None:
        raise ValueError(f"{run.task} is not convex: it has no least objective to be away from")
    model = task.model(examples, run.options)
    optimizer = optimizer_of(run, model)
    per_epoch = len(examples) // run.step
    steps = Steps(run, optimizer, per_epoch)
    for _ in range(run.epochs * per_epoch):
        task.losses(model, *examples.train).mean().backward()
        steps.step()
    loss = task.evaluate(model, examples)["train_loss"]
    found = loss + run.weight_decay * parameters_l2(model) - least
    return {"task": run.task, "epochs": run.epochs, "steps": run.epochs * per_epoch, "distance": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the data")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--only", action="append", help="a task; may be given several times")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = {run.task: run for run in read_plan(given.plan) if run.workers == 1 and run.seed == 0}
    results = []
    for task, run in runs.items():
        if given.only and task not in given.only:
            continue
        begun = time.perf_counter()
        results.append(distance(run, Folder(given.data)))
        print(
            f"{task}: {results[-1]['distance']:.3g} after {results[-1]['steps']} steps, "
            f"{time.perf_counter() - begun:.0f} s",
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
