"""Which labels are wrong? What an ordinary run sees of each example, against losses, margins and cross-validation.

    python -m benchmarks.wrong_labels --data DIR --out benchmarks/results/wrong-labels.jsonl --jobs 2
    python -m benchmarks.wrong_labels --data DIR --only digits --seeds 5 --cleanlab
    python -m benchmarks.wrong_labels --of benchmarks/results/wrong-labels.jsonl        # tables of a stored file

A run trains once, with labels of which a known share is wrong, and ranks all examples by

- heeler: the score of `heeler.suspects`, the mean square of the gradient's norm at the model's output, ‖p − y‖²;
- heeler, labels: the same with labels;
- mean norm: the mean of ‖p − y‖ (EL2N over all epochs);
- mean loss, mean margin (the area under the margin, AUM, with its sign turned): over all epochs;
- last loss: in the last epoch;
- cleanlab (with --cleanlab, where five more runs are affordable): its `get_label_quality_scores` with the
  probabilities of 5-fold cross-validation, with the same model and schedule.

Losses and margins are of the same passes as the gradients: nothing is computed a second time. Kinds of wrong labels:
`random` is any other class, `pairs` swaps class 2i with 2i + 1, and `one way` turns 2i into 2i + 1 but never back.
A rate is the share of all labels that are wrong. AUC is the chance that a wrong label ranks above a right one, and
precision is of the first k examples if k labels are wrong. Differences are paired by seed, with 95% intervals (t).

The file has one line of JSON per run. Lines are appended, and runs that it already has are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.wrong_tasks import TASKS, Labelled, digits, probabilities, train
from experiments.folder import Folder
from heeler.cli.suspects_picture import draw
from heeler.diversity.measured import student_quantile
from heeler.ordering.findings import scores

KINDS = ("random", "pairs", "one way")
RATES = (0.05, 0.1, 0.2)
METHODS = ("heeler", "heeler, labels", "mean norm", "mean loss", "mean margin", "last loss", "cleanlab")
FOLDS = 5
ALLOWED = 0.005
"""By so much heeler's AUC may be below the mean loss's."""
Job = tuple[str, str, float, int]
"""Task, kind, rate and seed."""


def one(folder: Path, name: str, kind: str, rate: float, seed: int, cleanlab: bool) -> dict[str, Any]:
    """One run: how well each score ranks the wrong labels."""
    torch.set_num_threads(1)
    task = TASKS[name]
    x, y = task.load(Folder(folder))
    labels, wrong = corrupted(y.numpy(), task.classes, kind, rate, seed)
    notes = train(task, x, torch.from_numpy(labels), seed)
    ranked: dict[str, NDArray[Any]] = {
        "heeler": scores(notes.square),
        "heeler, labels": scores(notes.square, labels),
        "mean norm": notes.norm.mean(0),
        "mean loss": notes.loss.mean(0),
        "mean margin": -notes.margin.mean(0),
        "last loss": notes.loss[-1],
    }
    found: dict[str, Any] = {"task": name, "kind": kind, "rate": rate, "seed": seed, "wrong": int(wrong.sum())}
    found["seconds"] = round(notes.seconds, 2)
    if cleanlab:
        begun = time.perf_counter()
        ranked["cleanlab"], issues = cross_validated(task, x, labels, seed)
        found["cleanlab_seconds"] = round(time.perf_counter() - begun, 2)
        found["cleanlab_names"], found["cleanlab_right"] = int(issues.sum()), int((issues & wrong).sum())
    found["auc"] = {method: auc(score, wrong) for method, score in ranked.items()}
    found["precision"] = {method: precision(score, wrong) for method, score in ranked.items()}
    return found


def corrupted(
    labels: NDArray[np.int64], classes: int, kind: str, rate: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(N,) labels, and which of them are wrong: the share `rate` of all."""
    rng, given, wrong = np.random.default_rng([seed, 1]), labels.copy(), np.zeros(len(labels), bool)
    pool = np.flatnonzero(labels % 2 == 0) if kind == "one way" else np.arange(len(labels))
    chosen = rng.choice(pool, round(rate * len(labels)), replace=False)
    if kind == "random":
        given[chosen] = (labels[chosen] + rng.integers(1, classes, len(chosen))) % classes
    else:
        given[chosen] = labels[chosen] ^ 1
    wrong[chosen] = True
    return given, wrong


def cross_validated(
    task: Labelled, x: torch.Tensor, labels: NDArray[np.int64], seed: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """(N,) cleanlab's score, and which labels it takes for wrong, by models that were not trained on the example."""
    try:
        filtering, ranking = (import_module(f"cleanlab.{name}") for name in ("filter", "rank"))
    except ModuleNotFoundError as error:
        raise SystemExit(f"--cleanlab needs the package {error.name}: pip install cleanlab") from None
    fold, y = np.random.default_rng([seed, 2]).permutation(len(labels)) % FOLDS, torch.from_numpy(labels)
    chances = np.zeros((len(labels), task.classes))
    for out in range(FOLDS):
        inside, outside = (torch.from_numpy(np.flatnonzero(mask)) for mask in (fold != out, fold == out))
        model = train(task, x[inside], y[inside], seed).model
        chances[outside.numpy()] = probabilities(model, x[outside])
    issues: NDArray[np.bool_] = filtering.find_label_issues(labels, chances, n_jobs=1)
    return -ranking.get_label_quality_scores(labels, chances), issues


def auc(score: NDArray[Any], wrong: NDArray[np.bool_]) -> float:
    """The chance that a wrong label has a higher score than a right one; equal scores count half."""
    high = np.sort(score[~wrong])
    below = np.searchsorted(high, score[wrong], "left") + np.searchsorted(high, score[wrong], "right")
    return float(below.mean() / 2 / len(high))


def precision(score: NDArray[Any], wrong: NDArray[np.bool_]) -> float:
    """Of as many first examples as there are wrong labels."""
    return float(wrong[np.argsort(-score, kind="stable")[: wrong.sum()]].mean())


def picture(folder: Folder, target: Path) -> None:
    """Of the digits as scikit-learn ships them, nothing changed: the first 20 that a run cannot explain."""
    torch.set_num_threads(1)
    x, y = digits(folder)
    score = scores(train(TASKS["digits, MLP"], x, y, 0).square, y.numpy())
    first = np.argsort(-score, kind="stable")[:20]
    draw({"index": first.tolist(), "label": y[first].tolist()}, x.numpy().reshape(-1, 8, 8), target)


# Tables


def tables(lines: list[dict[str, Any]]) -> str:
    """Markdown: AUC, precision, and seconds."""
    parts = [_table(lines, "auc", "AUC"), _table(lines, "precision", "Precision among as many as are wrong")]
    for method in METHODS[:2]:
        short = [_case(each) for each in _cases(lines) if _difference(_of(lines, each), "auc", method)[0] < -ALLOWED]
        parts.append(f"AUC below the mean loss's by more than {ALLOWED}, {method}: {'; '.join(short) or 'nowhere'}.")
    both = [line for line in lines if "cleanlab_seconds" in line]
    return "\n\n".join([*parts, _times(both)] if both else parts)


def short(lines: list[dict[str, Any]], rate: float = 0.1) -> str:
    """Markdown for the documentation: AUC at one rate, and the paired difference from the mean loss."""
    methods = [method for method in METHODS if method not in ("mean norm", "mean margin")]
    rows = [["task", "wrong labels", "seeds", *methods, "heeler − mean loss"]]
    for case in _cases(lines):
        if case[2] == rate:
            own = _of(lines, case)
            rows.append([case[0], f"{case[1]}, {case[2]:.0%}", str(len(own)), *_means(own, "auc", methods)])
            rows[-1].append(_shown(*_difference(own, "auc", "heeler")))
    return _markdown(rows)


def _means(lines: list[dict[str, Any]], measure: str, methods: Sequence[str]) -> list[str]:
    """Over the seeds that have each; how many, where not all have."""
    found = []
    for method in methods:
        values = [line[measure][method] for line in lines if method in line[measure]]
        some = f" ({len(values)})" if 0 < len(values) < len(lines) else ""
        found.append(f"{np.mean(values):.4f}{some}" if values else "–")
    return found


def _shown(mean: float, error: float) -> str:
    return f"{mean:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def _table(lines: list[dict[str, Any]], measure: str, title: str) -> str:
    rows = [["task", "wrong labels", "seeds", *METHODS, "heeler − mean loss", "with labels − mean loss"]]
    for case in _cases(lines):
        own = _of(lines, case)
        differences = [_shown(*_difference(own, measure, method)) for method in METHODS[:2]]
        shown = [*_means(own, measure, METHODS), *differences]
        rows.append([case[0], f"{case[1]}, {case[2]:.0%}", str(len(own)), *shown])
    return f"{title}:\n\n{_markdown(rows)}"


def _difference(lines: list[dict[str, Any]], measure: str, method: str) -> tuple[float, float]:
    """Mean over seeds of the difference from the mean loss, and half of its 95% interval; NaN for one seed."""
    each = np.array([line[measure][method] - line[measure]["mean loss"] for line in lines])
    freedom = len(each) - 1
    error = student_quantile(freedom) * each.std(ddof=1) / math.sqrt(len(each)) if freedom else math.nan
    return float(each.mean()), float(error)


def _times(lines: list[dict[str, Any]]) -> str:
    rows = [["task", "one run, s", "cleanlab's five runs, s", "ratio", "labels that cleanlab names", "of them wrong"]]
    for task in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task]
        run, more, names, right = (
            sum(line[key] for line in own) / len(own)
            for key in ("seconds", "cleanlab_seconds", "cleanlab_names", "cleanlab_right")
        )
        rows.append([task, f"{run:.1f}", f"{more:.1f}", f"{more / run:.1f}", f"{names:.0f}", f"{right / names:.0%}"])
    return f"Time, and what `find_label_issues` names:\n\n{_markdown(rows)}"


def _cases(lines: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    names = list(TASKS)
    found = {(line["task"], line["kind"], line["rate"]) for line in lines}
    return sorted(found, key=lambda case: (names.index(case[0]), KINDS.index(case[1]), case[2]))


def _of(lines: list[dict[str, Any]], case: tuple[str, str, float]) -> list[dict[str, Any]]:
    return [line for line in lines if (line["task"], line["kind"], line["rate"]) == case]


def _case(case: tuple[str, str, float]) -> str:
    return f"{case[0]}, {case[1]}, {case[2]:.0%}"


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


# Runs


def read(path: Path | None) -> list[dict[str, Any]]:
    """The lines that a file already has."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def plan(given: argparse.Namespace, done: list[dict[str, Any]]) -> list[Job]:
    """The runs that are still to do. With two classes, `random` and `pairs` are the same."""
    finished = {(line["task"], line["kind"], line["rate"], line["seed"]) for line in done}
    jobs = [
        (name, kind, rate, seed)
        for name, task in TASKS.items()
        if given.only in name
        for seed in range(given.seeds)
        for kind in given.kinds.split(",")
        if task.classes > 2 or kind != "pairs"
        for rate in map(float, given.rates.split(","))
    ]
    return [job for job in jobs if job not in finished]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("HEELER_DATA", ".data")))
    parser.add_argument("--only", default="", help="tasks whose name has this in it: " + "; ".join(TASKS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one thread")
    parser.add_argument("--cleanlab", action="store_true", help="cross-validate too, where that is affordable")
    parser.add_argument("--out", type=Path, help="append each run here, and skip those that are here")
    parser.add_argument(
        "--picture", type=Path, help="draw the first suspects of the digits as they are; run nothing else"
    )
    parser.add_argument("--of", type=Path, help="print the tables of this file; run nothing")
    given = parser.parse_args()
    if given.picture:
        picture(Folder(given.data), given.picture)
        return
    lines = read(given.of or given.out)
    if not given.of:
        jobs = plan(given, lines)
        with ProcessPoolExecutor(given.jobs) as pool:
            started = [pool.submit(one, given.data, *job, given.cleanlab and TASKS[job[0]].cleanlab) for job in jobs]
            for count, done in enumerate(as_completed(started), start=1):
                lines.append(done.result())
                last = lines[-1]
                print(f"{count} of {len(jobs)}: {_case(tuple(last[k] for k in ('task', 'kind', 'rate')))}", flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(last) + "\n")
    print(tables(lines))


if __name__ == "__main__":
    main()
