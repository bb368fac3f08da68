"""The arithmetic and the tables of `benchmarks.clock`, from the stored runs alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Runs = list[dict[str, Any]]


class Interval(NamedTuple):
    """An estimate with its interval."""

    value: float
    low: float
    high: float
    confidence: float


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median, and the narrowest pair of order statistics that holds the true one with this confidence.

    Whatever the distribution, the k-th least and the k-th largest of n values have the true median between them with
    probability 1 − 2 P(fewer than k of n fair coins show heads). Fewer than six values give 95% to no pair: then the
    interval is from the least to the largest, and its confidence is lower.
    """
    ordered, n = sorted(values), len(values)
    best = Interval(statistics.median(ordered), ordered[0], ordered[-1], 1 - 2.0 ** (1 - n))
    for k in range(2, n // 2 + 1):
        sure = 1 - 2 * sum(math.comb(n, j) for j in range(k)) / 2**n
        if sure >= confidence:
            best = Interval(best.value, ordered[k - 1], ordered[-k], sure)
    return best


def bootstrap(seeds: Sequence[int], statistic: Callable[[Sequence[int]], float], count: int = 1000) -> Interval:
    """The statistic of all seeds, and its 95% interval over seeds drawn with replacement.

    The statistic takes a list of seeds, in which one may stand several times. It may be infinite, but no NaN.
    """
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(seeds), size=(count, len(seeds)))
    values = sorted(statistic([seeds[i] for i in each]) for each in drawn)
    cut = round(0.025 * (count - 1))
    return Interval(statistic(seeds), values[cut], values[-1 - cut], 0.95)


def names(runs: Runs, key: str, **where: Any) -> list[Any]:
    """The different values of a key, in the order of their first appearance."""
    return list(dict.fromkeys(run[key] for run in runs if all(run[k] == v for k, v in where.items())))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# cost


def cost(runs: Runs, task: str, order: str) -> dict[str, Any] | None:
    """What an order costs against random, both of one turn, over all turns that have both; None without any."""
    of = {(run["order"], run["seed"]): run for run in runs if run["task"] == task}
    turns = sorted(seed for each, seed in of if each == order and ("random", seed) in of)
    pairs = [(of["random", turn], of[order, turn]) for turn in turns]
    if not turns:
        return None
    calm = [ratio for ratio in (without_sketches(plain, own) for plain, own in pairs) if ratio is not None]
    return {
        "turns": len(turns),
        "plain": statistics.median(plain["seconds"] for plain, _ in pairs),
        "seconds": statistics.median(own["seconds"] for _, own in pairs),
        "ratios": [own["seconds"] / plain["seconds"] for plain, own in pairs],
        "unsketched": calm,
    }


def without_sketches(plain: dict[str, Any], own: dict[str, Any]) -> float | None:
    """The median of the epochs without sketches over that of plain epochs of the same numbers, the first left out."""
    sketched, own_seconds, plain_seconds = own["sketched"], own["epoch_seconds"], plain["epoch_seconds"]
    if not any(sketched):
        return None  # there is no handle
    which = [i for i in range(1, len(sketched)) if not sketched[i]]
    if own["steps"] % own["steps_per_epoch"]:
        which = [i for i in which if i != len(sketched) - 1]  # which is not a whole epoch
    if not which:
        return None
    return statistics.median(own_seconds[i] for i in which) / statistics.median(plain_seconds[i] for i in which)


def cost_table(runs: Runs) -> str:
    rows = []
    for task in names(runs, "task"):
        for order in names(runs, "order", task=task):
            found = cost(runs, task, order)
            if order == "random" or found is None:
                continue
            ratio = median_interval(found["ratios"])
            spread = f"{min(found['ratios']):.3f} to {max(found['ratios']):.3f}"
            calm = _shown(median_interval(found["unsketched"])) if found["unsketched"] else "–"
            seconds = f"{found['plain']:.2f}", f"{found['seconds']:.2f}"
            rows.append((task, order, str(found["turns"]), *seconds, _shown(ratio), spread, calm))
    head = (
        "task",
        "order",
        "turns",
        "plain, s",
        "s",
        "whole run: median (interval)",
        "min to max",
        "epochs without sketches",
    )
    return markdown(head, rows)


def _shown(found: Interval) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f}; {found.confidence:.0%})"
