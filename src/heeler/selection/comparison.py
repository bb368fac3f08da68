"""How far a weighted subset is from the whole, and how far random subsets of its size are: one read of the table.

`error` is ‖Σ w_i g_i − G‖ / ‖G‖. `mmd` is the maximum mean discrepancy under a Gaussian kernel, whose width is the
median distance of random pairs. The kernel is that of FEATURES random cosines and sines (Rahimi, Recht 2007), which
costs N·K·FEATURES operations where the exact one costs N·k·K. As the features are the same for the subset, for all rows
and for the random subsets, mmd is 0 for all rows with equal weights, and comparable among them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection.rows import Rows

DRAWS = 10
"""Random subsets that a selection is compared with."""
FEATURES = 128
"""Frequencies; each gives a cosine and a sine. The squared mmd is then off by about √(2/128), an eighth of itself."""
PAIRS = 1024
"""Pairs of rows whose median distance is the kernel's width."""
BLOCK = 1 << 13


class Spread(NamedTuple):
    """Mean and standard deviation of ten random subsets."""

    mean: float
    sd: float


def compared(
    rows: Rows, indices: IntArray, weights: NDArray[np.float64], seed: int
) -> tuple[float, float, Spread, Spread]:
    """(error, mmd, both of DRAWS random subsets with weights N/k)."""
    count, size, rng = len(rows), indices.size, np.random.default_rng([seed, 1])
    given = np.zeros(count)
    given[indices] = weights
    drawn = np.zeros((DRAWS, count), bool)
    for one in drawn:
        one[rng.choice(count, size, replace=False)] = True
    frequencies = (rng.standard_normal((rows.dim, FEATURES)) / width(rows, rng)).astype(rows.precision)
    # A line each for all rows, for the subset, and for the random ones
    sums, features = np.zeros((2 + DRAWS, rows.dim)), np.zeros((2 + DRAWS, 2 * FEATURES))
    for start in range(0, count, BLOCK):
        part = slice(start, start + BLOCK)
        block = rows.take(part)
        factors = np.empty((2 + DRAWS, len(block)), rows.precision)
        factors[0], factors[1], factors[2:] = 1, given[part], drawn[:, part]
        sums += factors @ block
        angles = block @ frequencies
        features[:, :FEATURES] += factors @ np.cos(angles)
        features[:, FEATURES:] += factors @ np.sin(angles)
    sums[2:] *= count / size
    masses = np.array([given.sum(), *[size] * DRAWS])
    with np.errstate(divide="ignore", invalid="ignore"):  # where all rows cancel, error is infinite
        error = np.linalg.norm(sums[1:] - sums[0], axis=1) / np.linalg.norm(sums[0])
        means = features[1:] / masses[:, None]
    mmd = np.linalg.norm(means - features[0] / count, axis=1) / np.sqrt(FEATURES)
    return float(error[0]), float(mmd[0]), _spread(error[1:]), _spread(mmd[1:])


def width(rows: Rows, rng: np.random.Generator) -> float:
    """The median distance of PAIRS random pairs; 1 where all are equal."""
    a, b = rng.integers(0, len(rows), (2, PAIRS))
    found = np.linalg.norm((rows.take(a) - rows.take(b)).astype(np.float64), axis=1)
    found = found[found > 0]
    return float(np.median(found)) if found.size else 1.0


def _spread(values: NDArray[np.float64]) -> Spread:
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)))
