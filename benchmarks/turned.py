"""What an epoch without new sketches should do with the order it has: solve once more, repeat it, or turn its steps.

    python -m benchmarks.turned --data DIR --seeds 5 --out benchmarks/results/turned.json
    python -m benchmarks.turned --of benchmarks/results/turned.json

Last losses (convex tasks: over the least one) over those of orders that are solved in every epoch, geometric means over
paired seeds with their standard errors. `wholly turned` leaves no step in its place. Without a budget, so that all take
the same sketches.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.losses import objective
from benchmarks.small_tasks import least, train, use
from experiments.folder import Folder
from heeler.herding import batches
from heeler.herding.rules import herd

ORDERS = ("solved", "repeated", "turned", "wholly turned")


def choose(order: str) -> None:
    """Have rules do this from now on."""
    herd.Herd.steps_may_turn = order != "solved"
    batches.STAYS = 0.0 if order == "wholly turned" else 1 / 8
    ways: dict[str, Callable[..., Any]] = {"repeated": lambda steps, *_: steps.copy()}
    herd.turned = ways.get(order, batches.turned)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    rows = [["task", *ORDERS], ["---"] * (1 + len(ORDERS))]
    for name in dict.fromkeys(line["task"] for line in lines):
        found = {
            o: np.log([line["loss"] for line in lines if (line["task"], line["order"]) == (name, o)]) for o in ORDERS
        }
        cells = [f"{np.exp(found['solved'].mean()):.3g}"]
        for order in ORDERS[1:]:
            ratios = found[order] - found["solved"]
            error = ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
            cells.append(f"{np.exp(ratios.mean()):.3f} ± {error:.3f}")
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HEELER_DATA", ".data")))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path)
    given = parser.parse_args()
    if given.of:
        print(table(json.loads(given.of.read_text())))
        return
    torch.set_num_threads(1)
    folder, lines = Folder(given.data), []
    names = ("digits softmax", "tumours, logistic", "diabetes, MLP", "mortgages, MLP", "character GPT", "character GRU")
    chosen = {name: use(folder)[name] for name in names}
    chosen["digits softmax, constant rate"] = replace(chosen["digits softmax"], schedule="constant")
    for name, task in chosen.items():
        if given.only not in name:
            continue
        examples, lowest = task.load(folder), least(name.split(", constant")[0], folder) if task.convex else 0.0
        for seed in range(given.seeds):
            for order in ORDERS:
                choose(order)
                *_, run = train(task, examples, seed, order="herd", budget=None)
                loss = objective(run.model, examples.train, task.decay if task.convex else 0.0) - lowest
                lines.append({"task": name, "seed": seed, "order": order, "loss": loss})
        print(table(lines), flush=True)
    if given.out:
        given.out.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


if __name__ == "__main__":
    main()
