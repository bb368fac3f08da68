"""What orders from sketches are worth on a small GPT that Adam trains, and how long the sketches need to be.

    python -m benchmarks.adam_sketches --data DIR                        # everything, two seeds: an hour on one core
    python -m benchmarks.adam_sketches --data DIR --only random,256 # some
    python -m benchmarks.adam_sketches --data DIR --only default         # attach(model, sampler), nothing else said
    python -m benchmarks.adam_sketches --data DIR --only random,default,exact --rates 4e-3,8e-3,1.2e-2   # tuned
    python -m benchmarks.adam_sketches --data DIR --cost                 # what a sketched step costs, by K

The character GPT of `experiments.tasks.chargpt`, AdamW, cosine to zero, the rule `herd` on all layers. A row's name is
K ("exact" for full gradients), then "/r" for the default refresh where otherwise sketches are taken in every epoch. One
JSON line per run: the last losses; then, per row, the rate with the least mean training loss, and the share of the gain
of "exact" over "random", each at its best. Stored results of 0.2 also have rows with an "s" or a "q": sketches
scaled as AdamW steps, which gained nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

import torch

import heeler
from experiments.folder import Folder
from experiments.tasks import get_task
from experiments.tasks.base import Examples, Task
from experiments.training import batches
from heeler.ordering.pace import REFRESH
from heeler.sketch import Sketcher

LENGTHS = ("256", "1024", "2048", "4096", "exact")
ROWS = ("random", "default", *(f"{k}{r}" for k in LENGTHS for r in ("", "/r")))


def train(row: str, seed: int, task: Task, examples: Examples, rate: float, epochs: int) -> dict[str, Any]:
    """One run: the last losses, and how long the loop took."""
    length, _, sparse = row.partition("/")
    batch = task.defaults["batch_size"]
    torch.manual_seed(seed)
    model = task.model(examples, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=task.defaults["weight_decay"])
    steps = epochs * (len(examples) // batch)
    cosine = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 + 0.5 * math.cos(math.pi * t / steps))
    random, default = length == "random", length == "default"
    sampler = heeler.Sampler(
        list(range(len(examples))),
        batch_size=batch,
        order="random" if random else "herd",
        refresh=REFRESH if sparse or default else 1,
        dim=int(length) if length.isdigit() else None,
        seed=seed,
    )
    if not random:
        heeler.attach(model, sampler, layers=None if default else "all", exact=length == "exact")
    started = time.perf_counter()
    for _ in range(epochs):
        for drawn in batches(sampler, examples.train, batch):
            task.losses(model, *drawn).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            cosine.step()
    seconds = time.perf_counter() - started
    model.eval()
    with torch.no_grad():
        measured = task.evaluate(model, examples)
    return {"row": row, "seed": seed, "rate": rate, "train": measured["train_loss"], "test": measured["test_loss"]} | {
        "seconds": seconds
    }


def cost(task: Task, examples: Examples, steps: int = 40, turns: int = 7) -> list[dict[str, Any]]:
    """Sketched steps' time over plain ones', in turns: the median, and the fastest and slowest turn."""
    batch = tuple(t[: task.defaults["batch_size"]] for t in examples.train)
    found = []
    for length in (256, 1024, 4096):
        torch.manual_seed(0)
        model = task.model(examples, {})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sketcher = Sketcher(model, dim=length, layers="all")

        def seconds() -> float:
            started = time.perf_counter()
            for _ in range(steps):
                task.losses(model, *batch).mean().backward()  # noqa: B023
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                sketcher.pop()  # noqa: B023
            return time.perf_counter() - started

        ratios = []
        for _ in range(turns + 1):
            sketcher.enabled = True
            tapped = seconds()
            sketcher.enabled = False
            ratios.append(tapped / seconds())
        ratios = sorted(ratios[1:])
        found.append({"K": length, "ratio": statistics.median(ratios), "from": ratios[0], "to": ratios[-1]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="data folder; else HEELER_DATA")
    parser.add_argument("--task", default="char-gpt")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, by commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", default="4e-3", help="by commas")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--cost", action="store_true", help="time steps in place of training")
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = get_task(given.task)
    examples = task.load(Folder(given.data), {})
    if given.cost:
        for line in cost(task, examples):
            print(json.dumps(line))
        return
    rows = given.only.split(",")
    unknown = sorted(set(rows) - set(ROWS))
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    runs = []
    for seed in range(given.seeds):
        for rate in map(float, given.rates.split(",")):
            for row in rows:
                runs.append(train(row, seed, task, examples, rate, given.epochs))
                print(json.dumps(runs[-1]), flush=True)
    for line in summary(runs):
        print(json.dumps(line))


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per row, at the rate with the least mean training loss: mean losses, and the share of full gradients' gain."""
    means: dict[str, dict[str, Any]] = {}
    for row, rate in sorted({(run["row"], run["rate"]) for run in runs}):
        own = [run for run in runs if (run["row"], run["rate"]) == (row, rate)]
        mean = {key: statistics.fmean(run[key] for run in own) for key in ("train", "test")}
        if row not in means or mean["train"] < means[row]["train"]:
            means[row] = {"row": row, "rate": rate, "seeds": len(own), **mean}
    if {"random", "exact"} <= set(means):
        for mean in means.values():
            for key in ("train", "test"):
                random, exact = means["random"][key], means["exact"][key]
                mean[f"{key}_share"] = (random - mean[key]) / (random - exact)
    return list(means.values())


if __name__ == "__main__":
    main()
