"""Is choosing anew worth it? `python -m benchmarks.reselecting`: `reselect_every` beside all examples, as many steps.

Digits, softmax regression and a small network. Every run has the same number of steps of the same batch size, the rate
falling to zero by a cosine, and starts from the same weights per seed. Prints JSON: mean and standard deviation over
seeds of the loss on all training examples and of the accuracy on the test examples.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

import heeler
from experiments.folder import Folder
from experiments.tasks import get_task

METHODS = ("random", "stratified", "halve", "kernel-thin", "facility", "match")


def run(task_name: str, how: str, seed: int, *, steps: int, every: int, fraction: float) -> dict[str, float]:
    """One training. how: "all random" and "all herd" take every example in every epoch, else a method's name."""
    task = get_task(task_name)
    examples = task.load(Folder(), {})
    x, y = examples.train
    torch.manual_seed(seed)
    model = task.model(examples, {})
    batch = task.defaults["batch_size"]
    options: dict[str, Any] = {"order": how.removeprefix("all ")}
    if not how.startswith("all "):
        selector = heeler.Selector(fraction, how, labels=None if how == "random" else y.numpy(), seed=100 * seed)
        options = {"subset": selector, "reselect_every": every}
    sampler = heeler.Sampler(len(x), batch_size=batch, seed=seed, **options)
    handle = heeler.attach(model, sampler)
    optimizer = torch.optim.SGD(model.parameters(), task.defaults["lr"], weight_decay=task.defaults["weight_decay"])
    done = 0
    while done < steps:
        for indices in BatchSampler(sampler, batch, drop_last=False):
            for group in optimizer.param_groups:
                group["lr"] = task.defaults["lr"] * 0.5 * (1 + math.cos(math.pi * done / steps))
            rows = torch.tensor(indices)
            (task.losses(model, x[rows], y[rows]) * sampler.weights[rows]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
    handle.detach()
    model.eval()
    with torch.no_grad():
        return {name: found for name, found in task.evaluate(model, examples).items() if name != "test_loss"}


def compare(task: str, seeds: int, **options: Any) -> dict[str, dict[str, tuple[float, float]]]:
    """How → measure → (mean, standard deviation)."""
    return {
        how: spread([run(task, how, seed, **options) for seed in range(seeds)])
        for how in ("all random", "all herd", *METHODS)
    }


def spread(runs: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    values = {name: np.array([each[name] for each in runs]) for name in runs[0]}
    return {name: (float(own.mean()), float(own.std(ddof=min(len(own) - 1, 1)))) for name, own in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits", "digits-mlp"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1360, help="ten cycles of five epochs of digits, or 14 epochs")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--fraction", type=float, default=0.1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = {"steps": given.steps, "every": given.every, "fraction": given.fraction}
    found = {task: compare(task, given.seeds, **options) for task in given.tasks}
    print(json.dumps({"seeds": given.seeds, **options, "tasks": found}, indent=1))


if __name__ == "__main__":
    main()
