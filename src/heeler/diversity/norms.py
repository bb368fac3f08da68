"""The batch-size bound from gradient norms alone, for runs without sketches."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from heeler.diversity.alignment import BOUND, Alignment, bound_of, jackknife_width, undefined
from heeler.diversity.measured import Measured

BLOCKS = 20
"""Stretches of steps that `bound_from_norms` leaves out, one at a time, for its interval."""


def bound_from_norms(
    small: ArrayLike,
    large: ArrayLike,
    *,
    small_batch: float,
    large_batch: float,
    decay: float = 1.0,
    level: float = 0.95,
) -> Measured:
    """The bound from the squared gradient norms of two batch sizes: for runs without a table.

    With a = small_batch, b = large_batch and the *mean* gradients G_a, G_b of random batches (McCandlish et al.,
    appendix A.1):

        ‖G‖² ≈ (b‖G_b‖² − a‖G_a‖²)/(b − a)        tr Σ ≈ (‖G_a‖² − ‖G_b‖²)/(1/a − 1/b)

    each averaged over the steps *before* the ratio is taken, then B = 1 + tr Σ/‖G‖². Both are unbiased, their ratio
    step by step is not. Several workers have both for nothing: a worker's gradient before the all-reduce, and after it.

    Args:
        small: (T,) ‖G_a‖² at every step; or, where a step has several small batches, their mean.
        large: (T,) ‖G_b‖².
        decay: weight of a step relative to the one after it; 1 for a plain mean.

    The interval leaves out one of up to 20 stretches of steps at a time (a block jackknife), so neighbouring steps may
    be alike.
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
    # E‖g‖² = tr Σ + ‖G‖², so 1/B = ‖G‖²/(tr Σ + ‖G‖²) = signal/whole.
    whole = signal + noise
    if not whole.sum() > 0:
        return undefined(BOUND, level, "the norms are zero, or too noisy to tell: take more steps")
    inverse = float(signal.sum() / whole.sum())
    blocks = np.array_split(np.arange(steps), min(steps, BLOCKS))
    without = [(signal.sum() - signal[b].sum()) / (whole.sum() - whole[b].sum()) for b in blocks if steps > len(b)]
    half = jackknife_width(np.array(without), level)
    low, high = inverse - half, inverse + half
    return bound_of(Alignment(inverse, low, high, 0.0, 1.0), BOUND, level)
