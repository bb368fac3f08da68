"""The arithmetic and the tables of the clock's `race` and `gain`, from stored runs alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.clock_figures import Interval, Runs, bootstrap, cost, markdown, names

FLOOR = 1e-12
"""A distance from the optimum below it is rounding."""


def with_costs(runs: Runs, costs: Runs) -> Runs:
    """The runs with seconds of runs that had the machine to themselves, those of a file of `cost`.

    A plain epoch takes what it takes there. What an order adds to a whole run is added at every length: it is at most
    that much in a shorter one, which takes fewer sketches.
    """
    found = []
    for run in runs:
        known, of_random = cost(costs, run["task"], run["order"]), cost(costs, run["task"], "random")
        if known is None or of_random is None:
            raise ValueError(f"the costs have no runs of {run['task']}, {run['order']}: run `cost` for it too")
        epochs = next(each["epochs"] for each in costs if each["task"] == run["task"])
        added = (statistics.median(known["ratios"]) - 1) * known["plain"]
        found.append({**run, "seconds": run["epochs"] * of_random["plain"] / epochs + added})
    return found


class Point(NamedTuple):
    """The runs of one order and one length, at their best rate."""

    epochs: float
    seconds: float
    """The median over seeds."""
    log_loss: float
    """The mean over seeds."""
    rate: float


Grid = dict[tuple[float, float], dict[int, tuple[float, float]]]
"""(epochs, rate) → seed → seconds and the log of the last loss."""


def grid_of(runs: Runs, task: str, order: str) -> Grid:
    found: Grid = {}
    for run in runs:
        if run["task"] == task and run["order"] == order:
            found.setdefault((run["epochs"], run["rate"]), {})[run["seed"]] = run["seconds"], _log(run["loss"])
    return found


def curve(grid: Grid, seeds: Sequence[int]) -> list[Point]:
    """A point per length: every one a whole schedule of its own, at the rate with the least mean of the log loss."""
    points: dict[float, Point] = {}
    for (epochs, rate), by_seed in sorted(grid.items()):
        loss = statistics.fmean(by_seed[seed][1] for seed in seeds)
        if epochs not in points or loss < points[epochs].log_loss:
            points[epochs] = Point(epochs, statistics.median(by_seed[seed][0] for seed in seeds), loss, rate)
    return [points[epochs] for epochs in sorted(points)]


def complete(*grids: Grid) -> list[int]:
    """The seeds that every grid has at all of its lengths and rates."""
    return sorted(set.intersection(*(set(by_seed) for grid in grids for by_seed in grid.values())))


def _log(loss: float) -> float:
    return math.log(max(loss, FLOOR)) if math.isfinite(loss) else math.inf


def seconds_to(target: float, points: Sequence[Point]) -> float:
    """The least seconds in which a log loss is at most `target`; infinite if no length gets there.

    Between two lengths seconds and the log loss go in a straight line. Where the shortest gets there already, it is
    that one's seconds, which are then too many.
    """
    if points[0].log_loss <= target:
        return points[0].seconds
    for before, after in pairwise(points):
        if after.log_loss <= target:
            if not math.isfinite(before.log_loss):
                return after.seconds
            share = (before.log_loss - target) / (before.log_loss - after.log_loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return math.inf


def loss_at(seconds: float, points: Sequence[Point]) -> float:
    """The log loss of a run that takes so many seconds; NaN where no two lengths enclose them."""
    for before, after in pairwise(points):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / ((after.seconds - before.seconds) or 1.0)
            return before.log_loss + share * (after.log_loss - before.log_loss)
    return math.nan


def full(points: Sequence[Point], epochs: float) -> Point:
    return next(point for point in points if point.epochs == epochs)


def race(runs: Runs, task: str, order: str) -> dict[str, Any] | None:
    """An order against random on one task; None as long as not even one seed has all its runs."""
    own, plain = grid_of(runs, task, order), grid_of(runs, task, "random")
    seeds, whole = complete(own, plain), names(runs, "full", task=task)[0]
    if not seeds or not all(any(epochs == whole for epochs, _ in grid) for grid in (own, plain)):
        return None

    def time_ratio(drawn: Sequence[int]) -> float:
        target = full(curve(plain, drawn), whole)
        return seconds_to(target.log_loss, curve(own, drawn)) / target.seconds

    def loss_ratio(drawn: Sequence[int]) -> float:
        """At full length, over random's in as many seconds; the last known where random has no run as long."""
        of_random, last = curve(plain, drawn), full(curve(own, drawn), whole)
        at = loss_at(last.seconds, of_random)
        return math.exp(last.log_loss - (of_random[-1].log_loss if math.isnan(at) else at))

    points, of_random = curve(own, seeds), curve(plain, seeds)
    rates = {rate for _, rate in own}
    target, last = full(of_random, whole), full(points, whole)
    return {
        "seeds": len(seeds),
        "seconds": bootstrap(seeds, time_ratio),
        "epochs": epochs_to(target.log_loss, points) / whole,
        "loss": bootstrap(seeds, loss_ratio),
        "last": last,
        "beyond": math.isnan(loss_at(last.seconds, of_random)),
        "shortest": points[0].log_loss <= target.log_loss,
        "edge": [p.epochs for p in points if len(rates) > 1 and p.rate in (min(rates), max(rates))],
    }


def epochs_to(target: float, points: Sequence[Point]) -> float:
    """The same as `seconds_to`, in epochs."""
    return seconds_to(target, [point._replace(seconds=point.epochs) for point in points])


def race_table(runs: Runs) -> str:
    rows, remarks = [], []
    for task in names(runs, "task"):
        for order in names(runs, "order", task=task):
            found = race(runs, task, order)
            if found is None:
                continue
            bound = "≤ " if found["shortest"] else ""
            seconds, loss = bound + _shown(found["seconds"]), _shown(found["loss"])
            rows.append(
                (
                    *(task, order, str(found["seeds"]), seconds, bound + _number(found["epochs"])),
                    *(
                        loss + " *" * found["beyond"],
                        f"{math.exp(found['last'].log_loss):.4g}",
                        f"{found['last'].rate:g}",
                    ),
                )
            )
            if found["edge"]:
                where = ", ".join(f"{epochs:g}" for epochs in found["edge"])
                remarks.append(f"{task}, {order}: the best rate is at an edge of the grid for lengths {where}.")
    head = "task", "order", "seeds", "seconds to random's last loss", "epochs", "loss in as many seconds"
    text = markdown((*head, "last loss", "rate"), rows)
    notes = "All over random's (95% intervals over seeds). `*`: random has no run as long; its last length is taken."
    return "\n".join((text, "", notes, *remarks))


def gain(runs: Runs, task: str, order: str) -> dict[str, Any]:
    """An order's last loss over random's: the geometric mean over paired seeds."""
    of = {(run["order"], run["seed"]): run for run in runs if run["task"] == task}
    seeds = sorted(seed for each, seed in of if each == order and ("random", seed) in of)

    def ratio(drawn: Sequence[int]) -> float:
        logs = [_log(of[order, seed]["loss"]) - _log(of["random", seed]["loss"]) for seed in drawn]
        return math.exp(statistics.fmean(logs))

    seconds = [of[order, seed]["seconds"] / of["random", seed]["seconds"] for seed in seeds]
    return {"seeds": len(seeds), "loss": bootstrap(seeds, ratio), "seconds": statistics.median(seconds)}


def gain_table(runs: Runs) -> str:
    rows = []
    for task in names(runs, "task"):
        orders = [order for order in names(runs, "order", task=task) if order != "random"]
        found = {order: gain(runs, task, order) for order in orders}
        for order in orders:
            free = found.get(f"{order.partition(', budget ')[0]}, budget none")
            kept = "–"
            if free is not None and free["loss"].value < 1:
                kept = f"{math.log(found[order]['loss'].value) / math.log(free['loss'].value):.0%}"
            loss, seconds = _shown(found[order]["loss"]), f"{found[order]['seconds']:.3f}"
            rows.append((task, order, str(found[order]["seeds"]), loss, kept, seconds))
    text = markdown(("task", "order", "seeds", "last loss", "gain kept", "seconds"), rows)
    notes = "Loss and seconds over random's (95% intervals over seeds). Gain kept: log of the loss's ratio, over that"
    return f"{text}\n\n{notes} without a limit."


def _shown(found: Interval) -> str:
    return f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)})"


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "never"
