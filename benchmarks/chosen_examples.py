"""Which examples methods choose, and why some subsets teach the wrong thing: SST-2 on MiniLM embeddings.

python -m benchmarks.chosen_examples --data DIR --out benchmarks/results/chosen-examples.json

Logistic regression's gradient is (p − y)(x, 1), so a row's last number says how wrong the model was about its example:
above ½ it had the label wrong. Two tables: the one that three epochs leave, as in `experiments.subsets`, and one of the
untrained model, which has p = ½ everywhere.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import heeler
from experiments.folder import Folder
from experiments.subset_methods import select
from experiments.subsets import Setting, left_behind, loaded, parted, trained
from experiments.tasks import get_task
from experiments.tasks.base import settings
from heeler.herding.validate import Array

METHODS = ("stratified", "halve", "kernel-thin", "facility", "match", "glister", "norm", "influence", "coverage")
MOMENTS = {"trained": 1.0, "untrained": 1e-9}
"""Of the table: what the rate of the training that leaves it is multiplied with; nothing moves with the second."""
PLAN = Path(__file__).parents[1] / "experiments" / "plan_files" / "subsets" / "16-gpu.json"


def described(rows: Array, chosen: heeler.Selection) -> dict[str, float]:
    """Share of the chosen that the model had wrong, the same by weight, and the largest weight over the mean."""
    wrong = np.abs(rows[chosen.indices, -1]) > 0.5
    weights = chosen.weights / chosen.weights.sum()
    return {
        "wrong": float(wrong.mean()),
        "wrong_by_weight": float(weights @ wrong),
        "largest_weight": float(weights.max() * weights.size),
    }


def measure(folder: Folder, fractions: list[float], seeds: int) -> dict[str, Any]:
    """moment → method → fraction → a number per seed of each measure, test accuracy among them."""
    entry = next(entry for entry in json.loads(PLAN.read_text()) if entry["task"] == "glue")
    own = ("task", "steps", "warm_up", "methods", "fractions", "seeds", "device")
    run = settings(get_task("glue"), "herd", **{name: value for name, value in entry.items() if name not in own})
    setting = Setting(run, warm_up=entry["warm_up"], steps=entry["steps"])
    task, examples = get_task("glue"), loaded(run, folder)
    found: dict[str, Any] = {}
    for moment, rate in MOMENTS.items():
        of_table = Setting(run.but(lr=rate * run.lr), warm_up=setting.warm_up)
        for seed in range(seeds):
            table, (pool, held) = left_behind(of_table, folder, seed), parted(len(examples), seed)
            rows, labels = table[pool], task.labels(examples).numpy()[pool]
            for method in METHODS:
                for fraction in fractions:
                    chosen = select(rows, fraction, method, labels=labels, target=table[held], seed=seed)
                    weights = chosen.weights / chosen.weights.mean()
                    test = trained(task, setting, examples, pool[chosen.indices], weights, seed)
                    measures = {**described(rows, chosen), "test_accuracy": test["test_accuracy"]}
                    cell = found.setdefault(moment, {}).setdefault(method, {}).setdefault(f"{fraction:g}", {})
                    for name, value in measures.items():
                        cell.setdefault(name, []).append(value)
            everyone = np.abs(rows[:, -1]) > 0.5
            found[moment].setdefault("all", {}).setdefault("wrong", []).append(float(everyone.mean()))
    return found


def table_text(found: dict[str, Any], fraction: str) -> str:
    """Markdown for one fraction, means over seeds."""
    lines = [
        "| method | wrong, of those chosen | wrong, by weight | largest weight, in means | test accuracy "
        "| table of the untrained model |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        own, early = found["trained"][method][fraction], found["untrained"][method][fraction]
        means = {name: float(np.mean(values)) for name, values in own.items()}
        lines.append(
            f"| `{method}` | {means['wrong']:.0%} | {means['wrong_by_weight']:.0%} | {means['largest_weight']:.1f} "
            f"| {_percent(own['test_accuracy'])} | {_percent(early['test_accuracy'])} |"
        )
    return "\n".join(lines)


def _percent(values: list[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--fractions", default="0.01,0.1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure(Folder(given.data), [float(share) for share in given.fractions.split(",")], given.seeds)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    for fraction in given.fractions.split(","):
        print(f"{float(fraction):.0%}\n\n{table_text(found, f'{float(fraction):g}')}\n")


if __name__ == "__main__":
    main()
