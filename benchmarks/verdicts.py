"""Does ordering help, does it harm, and does a run know? Paired runs on many small tasks.

    python -m benchmarks.verdicts --data DIR --seeds 20 --processes 2 --out benchmarks/results/verdicts.json
    python -m benchmarks.verdicts --data DIR --only MLP --seeds 3
    python -m benchmarks.verdicts --data DIR --tune                # random order at other rates, three seeds
    python -m benchmarks.verdicts --of benchmarks/results/verdicts.json         # tables from a stored file

Every order trains from the same first weights for a seed, with the same schedule. `always` is Heeler without its
judgement: balanced from the second epoch on, whatever the run shows. Ratios are of the last training loss (of the
distance from the optimum where the task is convex) over random order's, geometric means over paired seeds with the
standard error of the mean. The verdict is what `handle.verdict` says at the end. It is right if it says "helps" and the
judged run ends significantly lower than random (two standard errors), or if it says that ordering does not help and
balancing all the same does not end significantly lower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.small_tasks import TASKS, least, objective, tasks, train, use
from experiments.folder import Folder
from heeler.herding.rules.herd import Herd
from heeler.herding.rules.spec import RuleSpec
from heeler.notices import HeelerWarning

ORDERS = ("random", "stratified", "heeler", "heeler, strata", "always")
SURE = 2.0
"""Standard errors that make a difference significant."""


class Always(Herd):
    """Balance, whatever the run shows."""

    judges = False


def one(folder: Path, name: str, order: str, seed: int, rate: float | None = None) -> dict[str, Any]:
    """One run: its last losses, seconds, and verdict."""
    torch.set_num_threads(1)
    task = (TASKS or use(Folder(folder)))[name]
    examples = task.load(Folder(folder))
    kind, _, strata = order.partition(", ")
    options: dict[str, Any] = {"strata": examples.train[-1]} if strata or kind == "stratified" else {}
    if kind == "always":
        options = {"order": RuleSpec(Always, {name: np.asarray(each) for name, each in options.items()})}
    elif kind != "heeler":
        options["order"] = kind
    balanced, seconds = 0, [0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeelerWarning)
        for run in train(task, examples, seed, rate, **options):
            rule = run.sampler.session.rule
            balanced += rule.judgement is not None and rule.judgement.ordered
            seconds.append(run.seconds)
    end = objective(run.model, examples.train, task.decay if task.convex else 0.0)
    found: dict[str, Any] = {"task": name, "order": order, "seed": seed, "rate": rate or task.rate}
    found["train"] = end - least(name, Folder(folder)) if task.convex else end
    found |= {"test": objective(run.model, examples.test), "seconds": round(run.seconds, 2)}
    found["late_seconds"] = round(seconds[-1] - seconds[1 + len(seconds) // 2], 3)  # of epochs after that of the middle
    if kind == "heeler" and run.handle is not None:
        verdict, metrics = run.handle.verdict, run.handle.metrics()
        found |= {"helps": verdict.helps, "balanced_epochs": balanced}
        found |= {key: metrics.get(key) for key in ("realized_steps", "realized_prefixes", "evenness_lost")}
        found["stopped"] = run.sampler.session.planner.gave_up
    return found


def compare(lines: list[dict[str, Any]], task: str, order: str, base: str = "random") -> tuple[float, float, int]:
    """Mean and standard error of log(loss / base's loss) over paired seeds, and how many."""
    losses = {(line["order"], line["seed"]): line["train"] for line in lines if line["task"] == task}
    seeds = sorted({seed for each, seed in losses if each == order and (base, seed) in losses})
    if not seeds:
        return math.nan, math.nan, 0
    logs = np.log([losses[order, seed] / losses[base, seed] for seed in seeds])
    return (
        float(logs.mean()),
        float(logs.std(ddof=1) / math.sqrt(len(seeds))) if len(seeds) > 1 else math.nan,
        len(seeds),
    )


def verdict_of(lines: list[dict[str, Any]], task: str) -> tuple[bool | None, int]:
    """What most runs say, and how many of them."""
    said = Counter(line["helps"] for line in lines if line["task"] == task and line["order"] == "heeler")
    return said.most_common(1)[0] if said else (None, 0)


def is_lower(found: tuple[float, float, int]) -> bool:
    """Significantly lower than random's."""
    return found[0] < -SURE * found[1]


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown; a row per task."""
    names = list(dict.fromkeys(line["task"] for line in lines))
    known = tasks(Folder(Path(".")))  # for their names: nothing is read
    head = ["task", "seeds", "verdict", "right", *ORDERS[1:]]
    rows, right = [head, ["---"] * len(head)], 0
    for name in names:
        said, count = verdict_of(lines, name)
        judged, always = compare(lines, name, "heeler"), compare(lines, name, "always")
        agrees = is_lower(judged) if said else not is_lower(always)
        right += agrees
        word = {True: "helps", False: "does not", None: "not known"}[said]
        cells = [_cell(compare(lines, name, order)) for order in ORDERS[1:]]
        rows.append(
            [
                name + ", unseen" * known[name].unseen,
                str(judged[2]),
                f"{word} ({count})",
                "yes" if agrees else "**no**",
                *cells,
            ]
        )
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{text}\n\nVerdicts that are right: {right} of {len(names)}."


def _cell(found: tuple[float, float, int]) -> str:
    mean, error, count = found
    return f"{math.exp(mean):.4f} ± {error:.4f}" if count else "–"  # of the log, which is the relative error


def tune(folder: Path, only: str) -> None:
    """Random order at rates around each task's."""
    for name, task in use(Folder(folder)).items():
        if only in name:
            rates = [task.rate * factor for factor in (0.25, 0.5, 1, 2, 4)]
            ends = {
                rate: np.mean([one(folder, name, "random", seed, rate)["train"] for seed in range(3)]) for rate in rates
            }
            print(name, {f"{rate:g}": f"{end:.5g}" for rate, end in ends.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HEELER_DATA", ".data")))
    parser.add_argument("--only", default="", help="tasks whose name has this in it")
    parser.add_argument("--skip", default="no task", help="and not this")
    parser.add_argument("--orders", default=";".join(ORDERS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path)
    given = parser.parse_args()
    if given.tune:
        tune(given.data, given.only)
        return
    known = use(Folder(given.data))
    if given.of:
        print(table(json.loads(given.of.read_text())))
        return
    plan = [
        (given.data, name, order, seed)
        for name, task in known.items()
        if given.only in name and given.skip not in name
        for seed in range(given.seeds)
        for order in given.orders.split(";")
        if task.labelled or not (order == "stratified" or order.endswith("strata"))
    ]
    with ProcessPoolExecutor(given.processes) as pool:
        lines = list(pool.map(one, *zip(*plan, strict=True), chunksize=4))
    if given.out:
        given.out.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")
    print(table(lines))


if __name__ == "__main__":
    main()
