"""A spike: one of 10,000 examples is corrupted in one pass. Is the step found, and is the example named?

    python -m benchmarks.spikes --data DIR --trials 50 --out benchmarks/results/spikes.jsonl
    python -m benchmarks.spikes --data DIR --only characters --trials 5
    python -m benchmarks.spikes --of benchmarks/results/spikes.jsonl              # the table of a stored file

Three models train for a few epochs on clean data. Then, in steps far apart, one example of the batch is corrupted for
that pass alone: the characters of a text become random ones, the targets of a regression are multiplied by 100, the
pixels of an image lose their scale (0 to 255, where the others have mean 0 and spread 1). After the step the weights
and the optimizer are put back, so that no trial changes another.

A step is found if `handle.spikes()` has it; the example is named if it is the first, or among the first five, of what
that spike lists. `highest loss` looks for the example in the same batch, at the same step, which it has to be told, by
the losses alone: the highest, or among the five highest. False alarms are spikes at steps in which nothing was
corrupted, per 1,000 of these after the clean epochs. The file has one line of JSON per trial, and one for the alarms.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.losses import losses
from benchmarks.wrong_tasks import cnn, images
from experiments.folder import Folder
from experiments.tasks import get_task
from experiments.tasks.base import Examples
from experiments.tasks.chargpt import CHARACTERS, CharGPT
from heeler import Sampler, attach

EXAMPLES, BATCH, CLEAN = 10_000, 32, 3
"""CLEAN: epochs before the first trial."""
APART = 80
"""Steps from one trial to the next."""
NAMED = 5
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Spiked:
    """One task."""

    load: Callable[[Folder], Data]
    make: Callable[[], nn.Module]
    corrupt: Callable[[Data], Data]
    """One example (a batch of one) to its corrupted self."""
    rate: float
    optimizer: str = "adamw"


@dataclass
class Trial:
    """One corrupted pass."""

    step: int
    example: int
    loss_rank: int
    """How many of the batch had a higher loss."""
    loss_ratio: float
    """The batch's mean loss, over that of the step before."""


def run(task: Spiked, data: Data, trials: int, seed: int) -> tuple[list[Trial], list[Any], int]:
    """Train with so many trials; returns them, the spikes that the handle names, and the number of steps."""
    torch.manual_seed(seed)
    rng, model, count = np.random.default_rng(seed), task.make(), len(data[0])
    sampler = Sampler(count, batch_size=BATCH, seed=seed, order="random")
    handle = attach(model, sampler, record=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=0.9)
    if task.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    per_epoch = math.ceil(count / BATCH)
    planned = CLEAN * per_epoch + APART * np.arange(1, trials + 1) + rng.integers(0, APART // 8, trials)
    done: list[Trial] = []
    spikes: dict[int, Any] = {}
    before, step = 1.0, 0
    while step <= planned[-1] + 1:
        for part in torch.tensor(list(sampler)).split(BATCH):
            batch = data[0][part].clone(), data[1][part].clone()
            place = int(rng.integers(len(part))) if step in planned else None
            if place is not None:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                for tensor, changed in zip(batch, task.corrupt((batch[0][[place]], batch[1][[place]])), strict=True):
                    tensor[[place]] = changed
            with handle.examples(part):
                each = losses(model, batch)
                each.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            each = each.detach()
            if place is not None:
                higher = int((each > each[place]).sum())
                done.append(Trial(step, int(part[place]), higher, float(each.mean()) / before))
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            before, step = float(each.mean()), step + 1
        spikes |= {spike.step: spike for spike in handle.spikes()}
    for trial in done:  # the handle counts steps as this loop does
        if trial.example not in handle.steps[trial.step]:
            raise AssertionError(f"step {trial.step} was trained on {trial.example}, and the handle does not know it")
    handle.detach()
    return done, list(spikes.values()), step


def measure(folder: Folder, name: str, trials: int, seed: int) -> list[dict[str, Any]]:
    """A line per trial, and a last one for the false alarms."""
    task, begun = TASKS[name], time.perf_counter()
    done, spikes, steps = run(task, task.load(folder), trials, seed)
    found = {spike.step: [int(i) for i in spike.examples] for spike in spikes}
    lines: list[dict[str, Any]] = []
    for trial in done:
        named = found.get(trial.step)
        rank = named.index(trial.example) if named is not None and trial.example in named else None
        line = {"task": name, "seed": seed, "step": trial.step, "found": named is not None, "rank": rank}
        lines.append({**line, "loss_rank": trial.loss_rank, "loss_ratio": round(trial.loss_ratio, 3)})
    corrupted = {trial.step for trial in done}
    alarms = [step for step in found if step not in corrupted and step >= CLEAN * EXAMPLES / BATCH]
    others = steps - round(CLEAN * EXAMPLES / BATCH) - len(done)
    seconds = round(time.perf_counter() - begun, 1)
    return [*lines, {"task": name, "seed": seed, "alarms": len(alarms), "steps": others, "seconds": seconds}]


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown; a row per task."""
    head = ["task", "trials", "step found", "named first", "among five", "highest loss", "among five highest"]
    rows = [[*head, "the batch's loss rises", "false alarms per 1,000 steps"]]
    for task in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task]
        tried, totals = [line for line in own if "found" in line], [line for line in own if "alarms" in line]
        counts = [
            sum(line["found"] for line in tried),
            sum(line["rank"] == 0 for line in tried),
            sum(line["rank"] is not None and line["rank"] < NAMED for line in tried),
            sum(line["loss_rank"] == 0 for line in tried),
            sum(line["loss_rank"] < NAMED for line in tried),
        ]
        alarms, steps = (sum(line[key] for line in totals) for key in ("alarms", "steps"))
        rise = f"× {np.median([line['loss_ratio'] for line in tried]):.3g}"
        rows.append([task, str(len(tried)), *map(str, counts), rise, f"{1000 * alarms / steps:.1f}" if steps else "–"])
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


# Tasks


def texts(folder: Folder) -> Data:
    x, y = get_task("char-gpt").load(folder, {"limit": EXAMPLES}).train
    return x, y


def random_text(example: Data) -> Data:
    """Random characters; what follows each is still the next one."""
    count, length = example[0].shape
    text = torch.randint(CHARACTERS + 1, (count, length + 1))
    return text[:, :-1], text[:, 1:]


def series(folder: Folder) -> Data:
    x, y = get_task("m4").load(folder, {"limit": EXAMPLES}).train
    return x, y


def forecaster() -> nn.Module:
    """The next six weeks of a series from the last twenty."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))


def without_scale(example: Data) -> Data:
    """About what an image of 0 to 255 is, if nobody subtracts the mean and divides by the spread."""
    return 63.0 * example[0] + 121.0, example[1]


TASKS = {
    "characters, random text": Spiked(
        texts, lambda: CharGPT().model(Examples((), ()), {}), random_text, CharGPT.defaults["lr"]
    ),
    "weekly series, target × 100": Spiked(series, forecaster, lambda e: (e[0], 100.0 * e[1]), 1e-3),
    "CIFAR-10, image without scale": Spiked(
        lambda folder: images(folder, EXAMPLES), lambda: cnn(norm=False), without_scale, 0.02, "momentum"
    ),
}
"""Name → task."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HEELER_DATA", ".data")))
    parser.add_argument("--only", default="", help="tasks whose name has this in it: " + "; ".join(TASKS))
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=1, help="runs per task, each with so many trials")
    parser.add_argument("--out", type=Path, help="append here, and skip the runs that are here")
    parser.add_argument("--of", type=Path, help="print the table of this file; run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    stored = given.of or given.out
    lines = [json.loads(line) for line in stored.read_text().splitlines()] if stored and stored.exists() else []
    known = {(line["task"], line["seed"]) for line in lines}
    jobs = [(name, seed) for name in TASKS for seed in range(given.seeds) if given.only in name]
    for name, seed in [] if given.of else [job for job in jobs if job not in known]:
        new = measure(Folder(given.data), name, given.trials, seed)
        print(f"{name}, seed {seed}: {new[-1]['seconds']} s", flush=True)
        lines += new
        if given.out:
            with given.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in new)
    print(table(lines))


if __name__ == "__main__":
    main()
