"""The batch-size bound from the gradient norms of two batch sizes: for runs without sketches."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heeler.diversity.measured import Measured, bound_from_inverse, student_quantile, unknown

_BLOCKS = 20
"""Stretches of steps that are left out, one at a time, for the interval."""


def bound_from_norms(
    small: ArrayLike, large: ArrayLike, *, small_batch: float, large_batch: float, decay: float = 1.0
) -> Measured:
    """The bound from the squared gradient norms of two batch sizes.

    With a = small_batch, b = large_batch and the *mean* gradients G_a, G_b of random batches (McCandlish et al.,
    appendix A.1):

        ‖G‖² ≈ (b‖G_b‖² − a‖G_a‖²)/(b − a)        tr Σ ≈ (‖G_a‖² − ‖G_b‖²)/(1/a − 1/b)

    each averaged over the steps *before* the ratio is taken, then B = 1 + tr Σ/‖G‖². Both are unbiased, their ratio
    step by step is not. Several workers have both for nothing: a worker's gradient before the all-reduce, and after it.

    Args:
        small: (T,) ‖G_a‖² at every step; or, where a step has several small batches, their mean.
        large: (T,) ‖G_b‖².
        decay: weight of a step relative to the one after it; 1 for a plain mean.
    """
    squares_a, squares_b = np.asarray(small, dtype=np.float64), np.asarray(large, dtype=np.float64)
    if squares_a.ndim != 1 or squares_a.shape != squares_b.shape or not len(squares_a):
        raise ValueError(f"small and large must be (T,) and alike, not {squares_a.shape} and {squares_b.shape}")
    if not 0 < small_batch < large_batch:
        raise ValueError(f"small_batch must be less than large_batch, not {small_batch} and {large_batch}")
    if not 0 < decay <= 1:
        raise ValueError(f"decay must lie in (0, 1], not {decay}")
    if not (np.isfinite(squares_a).all() and np.isfinite(squares_b).all()):
        raise ValueError("the norms must be finite: leave out steps that a gradient scaler skipped")
    steps = len(squares_a)
    weight = decay ** np.arange(steps - 1, -1, -1.0)
    signal = weight * (large_batch * squares_b - small_batch * squares_a) / (large_batch - small_batch)
    noise = weight * (squares_a - squares_b) / (1 / small_batch - 1 / large_batch)
    whole = signal + noise  # E‖g‖² = tr Σ + ‖G‖², so 1/B = ‖G‖²/(tr Σ + ‖G‖²) = signal/whole
    if not whole.sum() > 0:
        return unknown("the norms are zero, or too noisy to tell: take more steps")
    inverse = float(signal.sum() / whole.sum())
    # Neighbouring steps may be alike, so whole stretches of them are left out.
    blocks = np.array_split(np.arange(steps), min(steps, _BLOCKS))
    without = [(signal.sum() - signal[b].sum()) / (whole.sum() - whole[b].sum()) for b in blocks if steps > len(b)]
    half = _half_interval(np.array(without))
    return bound_from_inverse(inverse, inverse - half, inverse + half)


def _half_interval(without: NDArray[np.float64]) -> float:
    """By the jackknife, from the values that leave out one of G blocks each, (G,); inf for fewer than two."""
    groups = len(without)
    if groups < 2:
        return math.inf
    variance = (groups - 1) / groups * float(np.sum((without - without.mean()) ** 2))
    return student_quantile(groups - 1) * math.sqrt(variance)
