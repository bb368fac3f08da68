"""From runs to numbers: where larger batches stop to pay, and where the bound said they would."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from experiments.diversity.point import path_bound
from experiments.diversity.search import crossing, final_loss
from experiments.diversity.variants import PLAIN
from experiments.records import Result
from experiments.summary import Line, curve_quantity

DELTA = 0.2
"""The growth of the work that counts as saturation."""


@dataclass(frozen=True)
class Point:
    """One batch size at its best learning rate."""

    batch: int
    lr: float
    epochs: float
    """Passes over the data to the target; inf if it was not reached."""
    to_plain: float = math.inf
    """Passes to the plain variant's target, at whichever rate tried gets there first; inf if that is not reached."""
    diversity: list[dict[str, Any]] = field(default_factory=list)
    """What was measured before training and after every epoch of the first seed; empty if nothing was."""


@dataclass(frozen=True)
class Saturation:
    """A variant of a task: how the work grows with the batch, and how the bound said it would."""

    task: str
    variant: str
    examples: int
    seeds: int
    epochs: int
    target: float
    points: list[Point]

    @property
    def bounds(self) -> list[float | None]:
        """The batch-size bound B(w) before training and after every epoch, with the smallest batch."""
        return [found["batch_size_bound"] for found in self.points[0].diversity]

    @property
    def bound(self) -> float:
        """That of the whole training, see `path_bound`; nan where it was not measured."""
        return path_bound(self.bounds) if self.bounds else math.nan

    def growth(self, point: Point) -> float:
        """Times the work of the smallest batch."""
        return point.epochs / self.points[0].epochs

    def predicted_growth(self, batch: float) -> float:
        """(1 + (b − 1)/B), over that of the smallest batch."""
        return (1 + (batch - 1) / self.bound) / (1 + (self.points[0].batch - 1) / self.bound)

    @property
    def predicted(self) -> float:
        """The batch at which the work has grown by δ, by the bound."""
        first = self.points[0].batch - 1
        return 1 + (1 + DELTA) * first + DELTA * self.bound

    @property
    def measured(self) -> float | None:
        """The batch at which it has, between the measured ones by a straight line of logarithms; None: at none."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            low, high = (math.log(self.growth(p) / (1 + DELTA)) for p in (before, after))
            if high > 0:
                if math.isinf(high):
                    return None
                share = max(-low, 0.0) / (high - min(low, 0.0))
                return before.batch * (after.batch / before.batch) ** share
        return None


def saturations(results: Iterable[Result]) -> list[Saturation]:
    """One of every task and variant among the runs, in their order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        options = {**result.run.options, "measure": False}
        groups.setdefault(json.dumps([result.run.task, result.run.name, options], sort_keys=True), []).append(result)
    plain = {found[0].run.task: _saturation(found) for found in groups.values() if found[0].run.name == PLAIN}
    return [_saturation(found, plain.get(found[0].run.task)) for found in groups.values()]


def _saturation(results: Sequence[Result], plain: Saturation | None = None) -> Saturation:
    first = results[0]
    quantity = curve_quantity(first.run.task)
    trials: dict[int, dict[float, list[Result]]] = {}
    for result in results:
        if not result.run.options.get("measure"):
            trials.setdefault(result.run.batch_size, {}).setdefault(result.run.lr, []).append(result)
    for rates in trials.values():  # a rate may have been given less time elsewhere: the longest runs count
        for lr, found in rates.items():
            longest = max(r.run.epochs for r in found)
            rates[lr] = [r for r in found if r.run.epochs == longest]
    smallest = min(trials)
    curves = {b: {lr: Line("", found).mean(quantity) for lr, found in rates.items()} for b, rates in trials.items()}
    target = min(final_loss(curve) for curve in curves[smallest].values())
    points = []
    for batch in sorted(trials):
        reached = {lr: crossing(curve, target) for lr, curve in curves[batch].items()}
        best = min(reached, key=lambda lr: reached[lr])
        own = curves[batch].values()
        to_plain = math.inf if plain is None else min(crossing(curve, plain.target) for curve in own)
        same = [r for r in results if (r.run.batch_size, r.run.lr) == (batch, best) and r.run.options.get("measure")]
        diversity = [_measured(e) for e in same[-1].epochs] if same else []
        points.append(Point(batch, best, reached[best], to_plain, diversity))
    return Saturation(
        task=first.run.task,
        variant=first.run.name,
        examples=first.start["examples"],
        seeds=len({r.run.seed for r in results}),
        epochs=first.run.options["reference_epochs"],
        target=target,
        points=[p for p in points if math.isfinite(p.epochs)],
    )


def _measured(epoch: dict[str, Any]) -> dict[str, Any]:
    """What was measured at an epoch's end; `moving` is what the run's own table of sketches said then."""
    return {**epoch["diversity"], "moving": (epoch.get("order") or {}).get("batch_size_bound")}


def concurrent_bounds(point: Point) -> dict[int, float]:
    """n → the bound, in batches, of n consecutive batches of this size; the median over epochs from the second on.

    Before that Heeler's order is random, too.
    """
    later = [found["concurrent"] for found in point.diversity[2:]]
    lengths = sorted({int(n) for found in later for n in found})
    return {n: float(np.median([found[str(n)] for found in later if found.get(str(n))])) for n in lengths}
