"""From runs to the numbers of a table: means over seeds with their spread, and when random's final loss is reached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from experiments.records import Result
from experiments.setup import OURS
from experiments.tasks import get_task
from heeler.ordering.pace import REFRESH, wanted

Floats = NDArray[np.float64]


@dataclass
class Line:
    """All seeds of one rule (or of one label) on one task."""

    name: str
    results: list[Result]

    def all_seeds(self, key: str) -> Floats:
        """(seeds, epochs + 1); a run that diverged goes on at infinity."""
        rows = [r.series(key) for r in self.results]
        longest = max(map(len, rows))
        return np.array([row + [np.inf] * (longest - len(row)) for row in rows])

    def mean(self, key: str) -> Floats:
        """(epochs + 1,) over seeds."""
        return self.all_seeds(key).mean(axis=0)

    def seconds(self) -> Floats:
        """(epochs + 1,) training time up to each epoch, the mean over seeds."""
        return self.all_seeds("train_seconds").mean(axis=0)

    def seconds_by_kind(self) -> tuple[float, float]:
        """Of an epoch in which sketches are taken, and of one in which they are not; the same for most rules.

        Medians over seeds and epochs, which a hiccup of the machine does not move. The solve after an epoch with
        sketches is in the next epoch's time, so of those without only such count as follow another without, if any.
        """
        kinds = self._kinds()
        taken = kinds.get((True, False), kinds.get((True, True), 0.0))
        return taken, kinds.get((False, False), kinds.get((False, True), taken))

    def seconds_of(self, epochs: int) -> float:
        """What so many epochs take: each what its kind takes, by whether it and the one before have sketches."""
        kinds = self._kinds()
        taken, other = self.seconds_by_kind()
        due = [False] + [wanted(age, self.refresh) for age in range(1, epochs + 1)]
        return sum(kinds.get((now, before), taken if now else other) for before, now in pairwise(due))

    def _kinds(self) -> dict[tuple[bool, bool], float]:
        """(sketches are taken, and were in the epoch before) → median seconds; without the first epoch, if possible."""
        seconds = np.diff(self.all_seeds("train_seconds"), axis=1)
        due = [False] + [wanted(age, self.refresh) for age in range(1, seconds.shape[1] + 1)]
        found: dict[tuple[bool, bool], list[Floats]] = {}
        for epoch, (before, now) in enumerate(pairwise(due)):
            if epoch or seconds.shape[1] == 1:
                found.setdefault((now, before), []).append(seconds[:, epoch])
        return {kind: float(np.median(values)) for kind, values in found.items()}

    @property
    def refresh(self) -> int:
        """How many epochs old a sketch may get."""
        run = self.results[0].run
        return (run.refresh or REFRESH) if run.rule in OURS else 1

    @property
    def seconds_an_epoch(self) -> float:
        """The mean over the run's epochs."""
        epochs = max(len(result.epochs) for result in self.results) - 1
        return self.seconds_of(epochs) / max(epochs, 1)


@dataclass
class Row:
    """One line of the table."""

    name: str
    seeds: int
    loss_at: dict[int, tuple[float, float]]
    """Epoch → mean and sample standard deviation over seeds of the curve's quantity."""
    baseline: str | None
    """The line it is timed to: random's with the same setting varied, or random's alone; None: there is none."""
    epochs_to_target: int | None
    seconds_to_target: float | None
    metric: tuple[float, float]
    """Final test metric: mean and standard deviation."""
    seconds_an_epoch: float
    eval_seconds: float
    diverged: int


@dataclass
class Summary:
    """One task's table."""

    task: str
    quantity: str
    metric: str
    target: float | None
    """The baseline's final value, which the others are timed to; the mean over seeds."""
    baseline: str | None
    lines: list[Line]
    rows: list[Row]


def group(results: Sequence[Result]) -> dict[str, list[Line]]:
    """Task → lines, in the order in which they came."""
    tasks: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        tasks.setdefault(result.run.task, {}).setdefault(result.run.name, []).append(result)
    return {task: [Line(name, runs) for name, runs in lines.items()] for task, lines in tasks.items()}


RULES = ("random", "stratified", "id-grab", "cd-grab", "sweeps", "herd")
"""The order in which rules are compared everywhere."""


def by_rule(lines: Sequence[Line]) -> list[Line]:
    """Rules in their order, the lines of one by name, numbers in it by size."""

    def rank(line: Line) -> tuple[int, list[tuple[float, str]]]:
        rule = line.results[0].run.rule
        parts = [part for part in re.split(r"(\d+(?:\.\d+)?)", line.name) if part]
        natural = [(float(part), "") if part[0].isdigit() else (-1.0, part) for part in parts]
        return RULES.index(rule) if rule in RULES else len(RULES), natural

    return sorted(lines, key=rank)


def summarise(task: str, lines: list[Line], baseline: str = "random") -> Summary:
    """The table of one task; lines for which there is no `baseline`, see `own_baseline`, have no target."""
    quantity = curve_quantity(task)
    metric = get_task(task).metric
    by_name = {line.name: line for line in lines}
    base = by_name.get(baseline)
    rows = [_row(line, quantity, metric, own_baseline(line, by_name, baseline)) for line in lines]
    target = float(base.mean(quantity)[-1]) if base is not None else None
    return Summary(task, quantity, metric, target, baseline if base is not None else None, lines, rows)


def own_baseline(line: Line, by_name: dict[str, Line], baseline: str) -> Line | None:
    """ "random lr=4" for "herd lr=4" in a sweep of rates; else plain "random"."""
    varied = line.name.removeprefix(line.results[0].run.rule)
    return by_name.get(baseline + varied, by_name.get(baseline))


def curve_quantity(task: str) -> str:
    """What a task's curves show: the distance from the optimum where that is known, else the training loss."""
    return "suboptimality" if get_task(task).convex else "train_loss"


def shown_epochs(epochs: int) -> list[int]:
    """The epochs that a table has columns for: few at first, the last always."""
    wanted = {1, 2, 5, 10, 20, 30, 50, 100, 200, epochs}
    return sorted(e for e in wanted if e <= epochs)


def first_reached(curve: Floats, target: float) -> int | None:
    """The first epoch after which the curve is no higher than the target; epoch 0, before training, does not count."""
    reached = np.flatnonzero(curve[1:] <= target)
    return int(reached[0]) + 1 if reached.size else None


def _row(line: Line, quantity: str, metric: str, base: Line | None) -> Row:
    values, measures = line.all_seeds(quantity), line.all_seeds(metric)
    reached = None if base is None else first_reached(values.mean(axis=0), float(base.mean(quantity)[-1]))
    return Row(
        name=line.name,
        seeds=len(line.results),
        loss_at={e: _spread(values[:, e]) for e in shown_epochs(values.shape[1] - 1)},
        baseline=None if base is None else base.name,
        epochs_to_target=reached,
        seconds_to_target=None if reached is None else float(line.seconds()[reached]),
        metric=_spread(measures[:, -1]),
        seconds_an_epoch=line.seconds_an_epoch,
        eval_seconds=float(np.mean([r.end["eval_seconds"] for r in line.results])),
        diverged=sum(bool(r.end["diverged"]) for r in line.results),
    )


def _spread(values: Floats) -> tuple[float, float]:
    if not np.isfinite(values).all():
        return float("inf"), float("nan")
    return float(values.mean()), float(values.std(ddof=1)) if values.size > 1 else 0.0
