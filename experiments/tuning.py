"""Each rule at its own best learning rate: which one that is, and when a rule is where `random` ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiments.records import Result
from experiments.summary import curve_quantity


def last(result: Result, key: str) -> float:
    """The value after the last epoch; infinite where the run had diverged."""
    return math.inf if result.end["diverged"] else result.series(key)[-1]


def best_rate(results: Sequence[Result]) -> float | None:
    """The rate with the least last training loss (distance from the optimum, where known), the mean over seeds.

    `results` are one line's, at one length. Only seeds that all rates have are compared; None where there are none.
    """
    by_rate: dict[float, dict[int, float]] = {}
    for result in results:
        by_rate.setdefault(result.run.lr, {})[result.run.seed] = last(result, curve_quantity(result.run.task))
    if not by_rate:
        return None
    common = set.intersection(*(set(values) for values in by_rate.values()))
    if not common:
        return None
    means = {lr: float(np.mean([values[seed] for seed in common])) for lr, values in by_rate.items()}
    return min(sorted(means), key=lambda lr: means[lr])


def epochs_to(target: float, losses: dict[int, float]) -> float | None:
    """The least length of a run at which its last loss is `target`: `losses` are those of runs by their epochs.

    Between two lengths the loss's logarithm is taken to change in a straight line. None where no run gets there; the
    shortest length where that run gets there already, so that the answer is then too large.
    """
    before: tuple[int, float] | None = None
    for epochs, loss in sorted(losses.items()):
        if loss <= target:
            if before is None or not math.isfinite(before[1]):
                return float(epochs)
            share = math.log(before[1] / target) / math.log(before[1] / loss)
            return before[0] + share * (epochs - before[0])
        before = epochs, loss
    return None
