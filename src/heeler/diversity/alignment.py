"""From sums to diversity, bound and noise scale: shared by the table's form and the streaming one.

Everything goes through the *alignment* R = D/A = ‖Σ g_i‖²/Σ‖g_i‖² = 1/Δ, which is finite whenever any gradient is not
zero; intervals are of R, and are inverted with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from heeler.diversity.measured import Estimate, Measured, combine, student_quantile
from heeler.diversity.sketching import Floats, Layout, SketchError, moments

Of = Literal["dataset", "sample"]

DIVERSITY = "gradient diversity: 1/N for identical gradients, 1 for orthogonal ones, more where they cancel"
BOUND = "batch-size bound: a batch of b costs 1 + (b − 1)/bound times the work of single examples"
NOISE = "gradient noise scale: the batch size at which the gradient's noise is as large as the gradient"
DIFFERENTIAL = "diversity of the gradients' changes between two weight vectors"

_ROUNDING = 4 * float(np.finfo(np.float64).eps)
_NO_ERROR = SketchError()


@dataclass(frozen=True)
class Alignment:
    """R = D/A with its interval, and how it makes a bound: 1/B = slope·(R − offset)."""

    value: float
    low: float
    high: float
    offset: float
    slope: float
    problem: str = ""


class Sums:
    """N, A = Σ‖v‖², S = Σ v (K,), and for sketches their `moments`; float64."""

    def __init__(self, dim: int, layouts: tuple[Layout, ...]) -> None:
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


def align(
    sum_square: Estimate,
    square_sum: Estimate,
    *,
    count: float,
    error: SketchError = _NO_ERROR,
    level: float,
    offset: float = 0.0,
    slope: float | None = None,
    sampling: float = 0.0,
) -> Alignment:
    """R from D and A. error: of log R, by sketching. sampling: half the width that sampling adds."""
    slope = 1 / count if slope is None else slope
    if square_sum.value == 0:
        return Alignment(math.nan, math.nan, math.nan, offset, slope, "all gradients are zero")
    ratio = sum_square.value / square_sum.value
    if offset == 0 and ratio <= (_ROUNDING * count) ** 2:
        return Alignment(0.0, 0.0, 0.0, offset, slope)
    if count == 1 and offset == 0:
        return Alignment(1.0, 1.0, 1.0, offset, slope)
    if offset == 0:
        ratio = min(ratio * math.exp(error.shift), count)  # Cauchy and Schwarz: R is at most N
    low, high = combine(ratio, sampling, student_quantile(level, error.freedom) * math.sqrt(error.variance))
    return Alignment(ratio, max(low, 0.0), high if offset else min(high, count), offset, slope)


def invert(found: Alignment, slope: float, meaning: str, level: float, weights: str = "fixed") -> Measured:
    """1/(slope·R): Δ for slope 1, N·Δ for slope 1/N."""
    if found.problem:
        return undefined(meaning, level, found.problem, weights)
    reason = "" if found.value > 0 else "the gradients add up to zero"
    value, low, high = (1 / (slope * r) if r > 0 else math.inf for r in (found.value, found.high, found.low))
    return Measured(value, low, high, level, meaning, reason, weights)


def bound_of(found: Alignment, meaning: str, level: float, weights: str = "fixed") -> Measured:
    """B, at least 1."""
    if found.problem:
        return undefined(meaning, level, found.problem, weights)
    inverses = [found.slope * (r - found.offset) for r in (found.value, found.high, found.low)]
    value, low, high = (max(1 / y, 1.0) if y > 0 else math.inf for y in inverses)
    reason = ""
    if math.isinf(value):
        reason = "the gradients add up to zero"
        if found.offset or found.value != 0:
            reason = "the mean gradient cannot be told from zero here: only the interval's lower end means something"
    return Measured(value, low, high, level, meaning, reason, weights)


def less_one(bound: Measured) -> Measured:
    ends = (bound.value - 1, bound.low - 1, bound.high - 1)
    return Measured(*ends, level=bound.level, meaning=NOISE, reason=bound.reason, weights=bound.weights)


def jackknife_width(without: Floats, level: float) -> float:
    """Half an interval from the values that leave out one of G groups each, (G,); inf for fewer than two."""
    groups = len(without)
    if groups < 2:
        return math.inf
    variance = (groups - 1) / groups * float(np.sum((without - without.mean()) ** 2))
    return student_quantile(level, groups - 1) * math.sqrt(variance)


def undefined(meaning: str, level: float, reason: str, weights: str = "fixed") -> Measured:
    return Measured(math.nan, math.nan, math.nan, level, meaning, reason, weights)
