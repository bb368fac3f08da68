"""What the estimators return, and how an interval is put together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple


@dataclass(frozen=True)
class Measured:
    """A number with its interval and its meaning; `float()` gives the number."""

    value: float
    low: float
    high: float
    level: float
    """Of the interval [low, high]: 0.95 means that it covers the truth in 95 cases of 100."""
    meaning: str
    reason: str = ""
    """Why the value is inf or nan, or what else one has to know; empty where there is nothing to say."""
    weights: str = "fixed"
    """ "fixed": all gradients at one weight vector. "moving": the weights moved while they were taken."""

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        note = f"; {self.reason}" if self.reason else ""
        moved = "" if self.weights == "fixed" else ", over moving weights"
        interval = f"{self.low:.4g} to {self.high:.4g} at {self.level:.0%}"
        return f"{self.value:.4g} ({interval}{moved}): {self.meaning}{note}"


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


@dataclass(frozen=True)
class Estimate:
    """A positive number that is known up to a relative variance; 0 for an exact one."""

    value: float
    relative_variance: float = 0.0

    def __float__(self) -> float:
        return self.value


def as_estimate(given: float | Estimate, name: str) -> Estimate:
    found = given if isinstance(given, Estimate) else Estimate(float(given))
    if not (math.isfinite(found.value) and found.value >= 0):
        raise ValueError(f"{name} is a sum of squares: it must be finite and not negative, not {found.value}")
    return found


def student_quantile(level: float, freedom: float) -> float:
    """t with P(|T| ≤ t) = level, by the Cornish-Fisher expansion in 1/freedom; within 1% from 4 degrees on."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1 (such as 0.95), not {level}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def combine(value: float, sampling: float, sketching: float) -> tuple[float, float]:
    """[low, high] of a positive number from two independent sources of error, each given as half a width.

    sampling: z·se, additive and symmetric. sketching: z·τ with τ the standard deviation of the *logarithm*, so alone it
    gives [value·e^(−zτ), value·e^(zτ)]. The squares of the distances to each end add up (MOVER; Zou & Donner 2008).
    """
    down, up = -value * math.expm1(-sketching), value * math.expm1(sketching)
    return value - math.hypot(sampling, down), value + math.hypot(sampling, up)
