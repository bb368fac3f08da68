"""In which epochs sketches are taken: often at first, while gradients change fast, then now and then; if affordable.

Between them orders come from the same sketches, and steps run as they would without Heeler.

What a run may spend is a share of it, its budget. It is counted in seconds of a model of the machine
(`heeler.sketch.prices`, `heeler.herding.batches.solve_seconds`) and never by a clock, so that a seed gives the same
orders on every run. What was really spent is measured beside it: `heeler.ordering.spent`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

REFRESH = 8
"""Epochs from one sketch of an example to the next, at most, by default."""
BUDGET = 0.02
"""The share of a run that Heeler may take, by default."""
START_SECONDS = 0.03
"""To look at a model, and to load what is needed."""
LEAST_EPOCHS = 10
"""A run is taken to be at least this long, since nothing tells its length: most of the cost comes first."""
LEAST_SECONDS = 0.3
"""And this much may be spent in any run: in one of a few seconds nobody waits for it."""
SMALLEST, WORTH = 64, 1.25
"""Sketches that are too expensive have a fourth of the dimensions, and so on, down to this many; unless even so few
would make a run hardly cheaper, less than this many times."""
RECORD_BYTES = 20
"""Of the record, per example."""
LARGEST = 1 << 24
"""Examples of which a record is kept unless it is asked for."""
SHORT = 16
"""Epochs of the run for which the number of dimensions is chosen."""


class Costs(NamedTuple):
    """Seconds by the model of the machine."""

    epoch: float
    """Of a plain epoch."""
    sketches: float
    """That sketches add to an epoch, the order that is made of them included."""
    start: float = 0.0
    """Once."""


class Pace:
    """When sketches are taken. Epochs are counted from 0.

    refresh: how old a sketch may get. budget: a share of the run, None: no limit. costs: None: not known yet.
    """

    def __init__(self, refresh: int, budget: float | None = None, costs: Costs | None = None) -> None:
        self.refresh, self.budget = refresh, None if costs is None else budget
        self.costs = Costs(0.0, 0.0) if costs is None else costs
        self.began = 0
        """The epoch in which sketches were taken as in a new run: earlier ones do not count any more."""
        self.taken_before = 0
        """In how many epochs before that sketches were taken."""
        self._decide_again()

    def plan(self, budget: float | None, costs: Costs) -> None:
        """What sketches cost is known: a model is attached."""
        self.budget, self.costs = budget, costs
        self._decide_again()

    def _decide_again(self) -> None:
        self._due: list[bool] = []
        self._taken, self._wanted = self.taken_before, 1

    def is_due(self, epoch: int) -> bool:
        """Whether sketches are taken: in epochs 0, 1, 3, 7, 15 and 23 if 8 is the refresh, where that is affordable."""
        age = epoch - self.began + 1
        if self.budget is None:
            return wanted(age, self.refresh)
        while len(self._due) < age:
            self._due.append(self._decide(len(self._due) + 1))
        return age > 0 and self._due[age - 1]

    def _decide(self, age: int) -> bool:
        after = self.costs.start + (self._taken + 1) * self.costs.sketches
        if age < self._wanted or after > self.allowance(self.began + age):
            return False
        self._taken += 1
        self._wanted = next(later for later in range(age + 1, age + self.refresh + 1) if wanted(later, self.refresh))
        return True

    def allowance(self, epochs: int) -> float:
        """Seconds that may have been spent by the end of so many epochs."""
        if self.budget is None:
            return math.inf
        return max(LEAST_SECONDS, self.budget * self.costs.epoch * max(epochs, LEAST_EPOCHS))

    def begin_again(self, epoch: int, skipped: int = 0) -> None:
        """From this epoch on as in a new run, but what was spent is spent.

        skipped: epochs before it that were not run.
        """
        self.taken_before, self.began = self.taken(epoch - skipped), epoch
        self._decide_again()

    def repeat(self) -> None:
        """An epoch with sketches has brought few: the next one counts as the same."""
        self.taken_before, self.began = self.taken_before + 1, self.began + 1
        self._decide_again()

    def restore(self, began: int, taken_before: int) -> None:
        self.began, self.taken_before = began, taken_before
        self._decide_again()

    def taken(self, epochs: int) -> int:
        """In how many of the first `epochs` epochs of the run sketches are taken."""
        return self.taken_before + sum(self.is_due(epoch) for epoch in range(self.began, epochs))

    def share(self, epochs: int) -> float:
        """Of a run of so many plain epochs, what Heeler adds to it."""
        plain = epochs * self.costs.epoch
        return (self.costs.start + self.taken(epochs) * self.costs.sketches) / plain if plain else 0.0


def wanted(age: int, refresh: int) -> bool:
    """Whether sketches would be taken in the `age`-th epoch if they cost nothing."""
    return age % refresh == 0 or (age < refresh and age & (age - 1) == 0)


def affordable_dim(usual: int, refresh: int, budget: float | None, costs_of: Callable[[int], Costs]) -> int:
    """The most dimensions, up to `usual`, with which a short run takes all sketches that it wants."""
    if budget is None:
        return usual
    times = sum(wanted(age, refresh) for age in range(1, SHORT + 1))

    def spent(dim: int) -> float:
        return times * costs_of(dim).sketches

    allowed = max(Pace(refresh, budget, costs_of(usual)).allowance(SHORT), WORTH * spent(min(usual, SMALLEST)))
    while usual > SMALLEST and spent(usual) > allowed:
        usual = max(SMALLEST, 4 ** math.ceil(math.log(usual, 4) - 1))  # squares, which suit projections best
    return usual
