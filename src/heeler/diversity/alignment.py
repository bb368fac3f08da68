"""From sums to diversity, bound and noise scale: shared by the table's form and the streaming one.

Everything goes through the *alignment* R = D/A = ‖Σ g_i‖²/Σ‖g_i‖² = 1/Δ, which is finite whenever any gradient is not
zero; intervals are of R, and are inverted with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from heeler.diversity.measured import Diversity, Estimate, Measured, combine, student_quantile
from heeler.diversity.sketching import Floats, Layout, SketchError, moments

Of = Literal["dataset", "sample"]

DIVERSITY = "gradient diversity: 1/N for identical gradients, 1 for orthogonal ones, more where they cancel"
BOUND = "batch-size bound: a batch of b costs 1 + (b − 1)/bound times the work of single examples"
NOISE = "gradient noise scale: the batch size at which the gradient's noise is as large as the gradient"

_ROUNDING = 4 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Alignment:
    """R = D/A with its interval, and how it makes a bound: 1/B = slope·(R − offset)."""

    value: float
    low: float
    high: float
    level: float
    slope: float = 1.0
    offset: float = 0.0
    problem: str = ""

    @classmethod
    def unknown(cls, problem: str, level: float) -> Alignment:
        return cls(math.nan, math.nan, math.nan, level, problem=problem)

    def diversity(self, weights: str = "fixed", meaning: str = DIVERSITY) -> Measured:
        """Δ = 1/R."""
        return self._inverted(1.0, 0.0, 0.0, meaning, weights)

    def bound(self, weights: str = "fixed") -> Measured:
        """B, at least 1."""
        return self._inverted(self.slope, self.offset, 1.0, BOUND, weights)

    def all(self, weights: str = "fixed") -> Diversity:
        bound = self.bound(weights)
        return Diversity(self.diversity(weights), bound, less_one(bound))

    def _inverted(self, slope: float, offset: float, least: float, meaning: str, weights: str) -> Measured:
        if self.problem:
            return Measured(math.nan, math.nan, math.nan, self.level, meaning, self.problem, weights)
        inverses = [slope * (r - offset) for r in (self.value, self.high, self.low)]
        value, low, high = (max(1 / y, least) if y > 0 else math.inf for y in inverses)
        reason = ""
        if math.isinf(value):
            reason = "the gradients add up to zero"
            if self.offset or self.value != 0:
                reason = (
                    "the mean gradient cannot be told from zero here: only the interval's lower end means something"
                )
        return Measured(value, low, high, self.level, meaning, reason, weights)


def less_one(bound: Measured) -> Measured:
    """The noise scale."""
    return replace(bound, value=bound.value - 1, low=bound.low - 1, high=bound.high - 1, meaning=NOISE)


def align_dataset(whole: Estimate, squares: Estimate, count: float, level: float, error: SketchError) -> Alignment:
    """R of gradients that are all there are, from D = `whole` and A = `squares`. error: of log R, by sketching."""
    if squares.value == 0:
        return Alignment.unknown("all gradients are zero", level)
    ratio = whole.value / squares.value
    cancels = ratio <= (_ROUNDING * count) ** 2
    if cancels or count == 1:
        exact = 0.0 if cancels else 1.0
        return Alignment(exact, exact, exact, level, 1 / count)
    ratio = min(ratio * math.exp(error.shift), count)  # Cauchy and Schwarz: R is at most N
    variance = error.variance + whole.relative_variance + squares.relative_variance
    low, high = combine(ratio, 0.0, student_quantile(level, error.freedom) * math.sqrt(variance))
    return Alignment(ratio, low, min(high, count), level, 1 / count)


def align_sample(
    whole: float, numbers: Floats, level: float, error: SketchError, sampling: Callable[[], float]
) -> Alignment:
    """R = D/A₂ of a random sample of many more, D = `whole`, which makes 1/B = slope·(R − 1).

    numbers: W₁ = Σ ω_i, W₂ = Σ ω_i², A₁ = Σ ω_i‖v_i‖² and A₂ = Σ ω_i²‖v_i‖². sampling: half the interval of 1/B.
    """
    count, count_2, squares, squares_2 = (float(n) for n in numbers)
    pairs = count**2 - count_2
    if pairs <= 1e-9 * count**2:
        return Alignment.unknown("one example does not tell how much gradients differ: take more", level)
    if squares_2 == 0:
        return Alignment.unknown("all gradients are zero", level)
    ratio, slope = whole / squares_2, squares_2 * count / (pairs * squares)
    sketching = student_quantile(level, error.freedom) * math.sqrt(error.variance)
    low, high = combine(ratio, sampling() / slope, sketching)
    return Alignment(ratio, max(low, 0.0), high, level, slope, 1.0)


def jackknife_width(without: Floats, level: float) -> float:
    """Half an interval from the values that leave out one of G groups each, (G,); inf for fewer than two."""
    groups = len(without)
    if groups < 2:
        return math.inf
    variance = (groups - 1) / groups * float(np.sum((without - without.mean()) ** 2))
    return student_quantile(level, groups - 1) * math.sqrt(variance)


class Sums:
    """N, A = Σ‖v‖², S = Σ v (K,), and for sketches their `moments`; float64."""

    def __init__(self, dim: int, layouts: tuple[Layout, ...] = ()) -> None:
        self.count, self.squares, self.total, self.layouts = 0, 0.0, np.zeros(dim), layouts
        self.moment = moments(np.zeros((0, dim)), layouts)

    def add(self, vectors: Floats, every: int = 1) -> None:
        """(b, K). every: take the moments, which only enter the interval, from every so manieth row."""
        squares = float(np.vdot(vectors, vectors))
        if not math.isfinite(squares):
            raise ValueError("vectors hold nan or inf: leave such rows out with rows=np.isfinite(vectors).all(axis=1)")
        self.count += len(vectors)
        self.squares += squares
        self.total += vectors.sum(axis=0)
        if self.layouts:
            self.moment += moments(vectors[::every].astype(np.float64), self.layouts)
