"""What the estimators return.

Intervals are made of 1/B, the inverse of the batch-size bound, which is finite even where the gradients cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

DIVERSITY = "gradient diversity: 1/N for identical gradients, 1 for orthogonal ones, more where they cancel"
BOUND = "batch-size bound: a batch of b costs 1 + (b − 1)/bound times the work of single examples"
NOISE = "gradient noise scale: the batch size at which the gradient's noise is as large as the gradient"
MORE_WORK = 0.2
"""How much more work than single examples `sentence` allows."""


@dataclass(frozen=True)
class Measured:
    """A number with its interval and its meaning; `float()` gives the number."""

    value: float
    low: float
    high: float
    """[low, high] covers the truth in 95 cases of 100."""
    meaning: str
    reason: str = ""
    """Why the value is inf or nan."""
    moving: bool = False
    """Whether the weights moved while the gradients were taken."""

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        note = f"; {self.reason}" if self.reason else ""
        moved = ", over moving weights" if self.moving else ""
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g} at 95%{moved}): {self.meaning}{note}"


class Diversity(NamedTuple):
    """All three at once."""

    diversity: Measured
    bound: Measured
    noise_scale: Measured

    def as_numbers(self) -> dict[str, float]:
        """For a logger: finite numbers only."""
        numbers = {
            "gradient_diversity": self.diversity.value,
            "batch_size_bound": self.bound.value,
            "batch_size_bound_low": self.bound.low,
            "batch_size_bound_high": self.bound.high,
            "noise_scale": self.noise_scale.value,
        }
        return {name: value for name, value in numbers.items() if math.isfinite(value)}


def from_bound(bound: Measured, count: int, *, moving: bool = False) -> Diversity:
    """Δ = B/N, B, and B − 1."""
    value, low, high, reason = bound.value, bound.low, bound.high, bound.reason
    return Diversity(
        Measured(value / count, low / count, high / count, DIVERSITY, reason, moving),
        replace(bound, moving=moving),
        Measured(value - 1, low - 1, high - 1, NOISE, reason, moving),
    )


def bound_from_inverse(value: float, low: float, high: float, *, cancelled: bool = False) -> Measured:
    """B from 1/B and its interval: at least 1, and inf where 1/B is not positive."""
    bound, lower, upper = (max(1 / y, 1.0) if y > 0 else math.inf for y in (value, high, low))
    reason = ""
    if math.isinf(bound):
        reason = "the mean gradient cannot be told from zero here: only the interval's lower end means something"
    return Measured(bound, lower, upper, BOUND, "the gradients add up to zero" if cancelled else reason)


def unknown(reason: str) -> Measured:
    return Measured(math.nan, math.nan, math.nan, BOUND, reason)


def sentence(bound: Measured, batch_size: int) -> str:
    """What the bound says of a batch size: up to 1 + δ·bound, training takes at most 1 + δ times the work of single
    examples (Yin et al.), here with δ = 0.2."""
    if math.isnan(bound.value):
        return "the batch size that would still train well is not known" + (bound.reason and f": {bound.reason}")
    most = "of any size"
    if math.isfinite(bound.value):
        most = f"up to about {math.floor(1 + MORE_WORK * bound.value)}"
    note = " (an upper end: the weights moved while this was measured)" if bound.moving else ""
    return f"at this point batches {most} train as well as single examples; you use {batch_size}{note}"


def student_quantile(freedom: float) -> float:
    """t with P(|T| ≤ t) = 0.95, by the Cornish-Fisher expansion in 1/freedom; within 1% from 4 degrees on."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
