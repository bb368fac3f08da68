"""Did the loop keep a batch's order? Rows that it has changed are still more like themselves than like others.

Where a loop normalizes, noises, crops or masks its inputs, no row is equal to the loader's. Counting then proposes
which example a row is about. If it is right, a row is most similar to its own example far more often than by chance.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from heeler.native.loops import products

Floats = NDArray[np.float32]

CHANCE = 1e-6
"""A count is believed if, had the order within batches been lost, so many hits had this probability."""
LIKELY = 1e-2
"""And may be right at this one."""
ODD = 1e-3
"""A pass is left out if one that is right had this probability to look like it."""
ENOUGH = 256
"""Rows after which it is decided, one way or the other."""
ALIKE, UNLIKE = 2.0, 3.5
"""Deviations below the usual similarity: a row that is so similar to another example, and so little to its own, is the
other's."""
KEPT = 1024
"""Similarities by which it is told what is usual."""
RARE, PART = 0.0001, 0.2
"""As often it may look so although the count is right: so rarely, or in that part of all misses where there are many,
as with images that are moved or noised."""


def equal_share(rows: Floats, others: Floats) -> Floats:
    """(n, m): how many of the numbers two rows have in common; (n, c) and (m, c)."""
    found: Floats = (rows[:, None] == others[None]).mean(2, dtype=np.float32)
    return found


def correlation(rows: Floats, others: Floats) -> Floats:
    """(n, m) in -1..1, of rows whose columns are standardized, (n, c) and (m, c); 0 where a row has nothing to show."""
    return products(_unit(rows), _unit(others))


def _unit(rows: Floats) -> Floats:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(length > 0, length, 1), np.float32)


def upper_tail(hits: int, trials: int, chance: float) -> float:
    """The probability of at least so many hits."""
    return _sum_of_terms(range(hits, trials + 1), trials, chance)


def lower_tail(hits: int, trials: int, chance: float) -> float:
    """The probability of at most so many hits."""
    return _sum_of_terms(range(min(hits, trials) + 1), trials, chance)


def _sum_of_terms(counts: range, trials: int, chance: float) -> float:
    if not 0.0 < chance < 1.0:
        return float((trials if chance >= 1.0 else 0) in counts)
    up, down, ways = math.log(chance), math.log1p(-chance), math.lgamma(trials + 1)
    return min(
        1.0,
        math.fsum(
            math.exp(ways - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * up + (trials - k) * down)
            for k in counts
        ),
    )


class Columns:
    """Means and deviations of the columns of all rows seen so far, (n, c) at a time."""

    def __init__(self) -> None:
        self._count = 0
        self._shift = self._sum = self._squares = np.zeros(0)

    def add(self, rows: Floats) -> None:
        """Take these in."""
        finite = _finite(rows).astype(np.float64)
        if not self._count:
            self._shift = finite.mean(0)
            self._sum = self._squares = np.zeros(rows.shape[1])
        off = finite - self._shift
        self._count += len(rows)
        self._sum = self._sum + off.sum(0)
        self._squares = self._squares + np.square(off).sum(0)

    def standardize(self, rows: Floats) -> Floats:
        """Less the mean, over the deviation; 0 in columns that do not vary."""
        off = self._sum / self._count
        deviation = np.sqrt(np.maximum(self._squares / self._count - off**2, 0))
        mean = off + self._shift
        varies = deviation > 1e-6 * np.abs(mean)
        found: Floats = ((_finite(rows) - mean) / np.where(varies, deviation, np.inf)).astype(np.float32)
        return found


def _finite(rows: Floats) -> Floats:
    return np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)


class Tally:
    """How often rows were most similar to the examples that they are counted as: (n,) similarities at a time."""

    def __init__(self) -> None:
        self._hits = self._trials = self._others = self._rows = 0
        self._chance = 0.0
        self._usual = np.zeros(0, np.float32)
        """Similarities of rows to their own examples, where these are the most similar."""
        self._middle = self._deviation = 0.0
        """Of the usual ones."""

    def add(self, own: Floats, best_other: Floats, chance: float) -> None:
        """own: to their own examples. best_other: to the most similar other one.

        chance: of a hit, if the order within a batch was lost.
        """
        hits, trials = _counts(own, best_other)
        self._usual = np.concatenate([self._usual, own[own > best_other]])[-KEPT:]
        if self._usual.size:
            self._middle = float(np.median(self._usual))
            self._deviation = 1.5 * float(np.median(np.abs(self._usual - self._middle))) + 0.02
        self._rows += len(own)
        self._hits, self._trials = self._hits + hits, self._trials + trials
        self._others += self._of_others(own, best_other)
        self._chance = max(self._chance, chance)

    def is_enough(self, asked: int) -> bool:
        """Whether the count is right. asked: how many tallies are, so that one may look right by chance."""
        if upper_tail(self._others, self._trials, max(self._expected, 100 * RARE)) < ODD:
            return False
        return upper_tail(self._hits, self._trials, self._chance) * asked < CHANCE

    @property
    def is_likely(self) -> bool:
        """Whether it looks more right than by chance."""
        return upper_tail(self._hits, self._trials, self._chance) < LIKELY

    @property
    def is_exhausted(self) -> bool:
        """Whether so many rows were seen that it would be known by now."""
        return self._trials >= ENOUGH or self._rows >= 4 * ENOUGH

    def fits(self, own: Floats, best_other: Floats, chance: float) -> bool:
        """Whether a pass that was added is in its order as the others are."""
        hits, trials = _counts(own, best_other)
        rate = min((self._hits + 1) / (self._trials + 2), 1 - 1e-4)
        if upper_tail(self._of_others(own, best_other), trials, self._expected) < ODD:
            return False
        if lower_tail(hits, trials, rate) < ODD or rate <= chance:
            return trials == 0
        # How much likelier it is in order than not, against what a pass without a miss would have.
        hit, miss = math.log(rate / chance), math.log((1 - rate) / (1 - chance))
        return hits * hit + (trials - hits) * miss >= min(3.0, trials * hit / 2)

    @property
    def _expected(self) -> float:
        """The share of rows that look like another example's although the count is right."""
        misses = self._trials - self._hits - self._others
        return max(RARE, PART * misses / max(self._trials, 1))

    def _of_others(self, own: Floats, best_other: Floats) -> int:
        """How many rows are another example's: more like that one, as usual for the right one, than like their own."""
        if not self._usual.size:
            return 0
        alike, unlike = (self._middle - times * self._deviation for times in (ALIKE, UNLIKE))
        return int(((best_other > alike) & (own < unlike)).sum())


def _counts(own: Floats, best_other: Floats) -> tuple[int, int]:
    """Hits, and rows that tell something. A tie tells nothing: examples may be equal where it was looked."""
    return int((own > best_other).sum()), int((own != best_other).sum())
