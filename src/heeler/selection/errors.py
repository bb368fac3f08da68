"""How far a weighted subset is from the whole, and how far random subsets of its size are: one read of the table.

`error` is ‖Σ w_i g_i − G‖ / ‖G‖. `mmd` is the maximum mean discrepancy under a Gaussian kernel, whose width is the
median distance of random pairs. The kernel is that of FEATURES random cosines and sines (Rahimi, Recht 2007), which
costs N·K·FEATURES operations where the exact one costs N·k·K. As the features are the same for the subset, for all rows
and for the random subsets, mmd is 0 for all rows with equal weights, and comparable among them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heeler.selection.result import Chosen, Spread
from heeler.selection.source import Rows

DRAWS = 10
"""Random subsets that a selection is compared with."""
FEATURES = 128
"""Frequencies; each gives a cosine and a sine. The squared mmd is then off by about √(2/128), an eighth of itself."""
PAIRS = 1024
"""Pairs of rows whose median distance is the kernel's width."""
BLOCK = 1 << 13


def compared(rows: Rows, chosen: Chosen, seed: int) -> tuple[float, float, Spread, Spread]:
    """(error, mmd, both of DRAWS random subsets)."""
    count, size = len(rows), chosen.indices.size
    rng = np.random.default_rng([seed, 1])
    given = np.zeros(count)
    given[chosen.indices] = chosen.weights
    drawn = np.zeros((DRAWS, count), bool)
    for one in drawn:
        one[rng.choice(count, size, replace=False)] = True
    error, mmd = distances(rows, given, drawn, count / size, rng)
    return error[0], mmd[0], _spread(error[1:]), _spread(mmd[1:])


def distances(
    rows: Rows, given: NDArray[np.float64], drawn: NDArray[np.bool_], weight: float, rng: np.random.Generator
) -> tuple[list[float], list[float]]:
    """error and mmd of weights `given` (N,), then of each of `drawn` (d, N), whose members weigh `weight` each."""
    count, dim, kind = len(rows), rows.dim, rows.precision
    frequencies = (rng.standard_normal((dim, FEATURES)) / width(rows, rng)).astype(kind)
    sums, features = np.zeros((2 + len(drawn), dim)), np.zeros((2 + len(drawn), 2 * FEATURES))
    for start in range(0, count, BLOCK):
        part = slice(start, start + BLOCK)
        block = rows.take(part)
        weights = np.empty((2 + len(drawn), len(block)), kind)
        weights[0], weights[1], weights[2:] = 1, given[part], drawn[:, part]
        sums += weights @ block
        angles = block @ frequencies
        features[:, :FEATURES] += weights @ np.cos(angles)
        features[:, FEATURES:] += weights @ np.sin(angles)
    sums[2:] *= weight
    whole, masses = sums[0], [given.sum(), *drawn.sum(axis=1)]
    length = np.linalg.norm(whole)
    with np.errstate(divide="ignore", invalid="ignore"):  # where all rows cancel, error is infinite
        error = np.linalg.norm(sums[1:] - whole, axis=1) / length
        means = features[1:] / np.array(masses)[:, None]
    mmd = np.linalg.norm(means - features[0] / count, axis=1) / np.sqrt(FEATURES)
    return error.tolist(), mmd.tolist()


def width(rows: Rows, rng: np.random.Generator) -> float:
    """The median distance of PAIRS random pairs; 1 where all are equal."""
    a, b = rng.integers(0, len(rows), (2, PAIRS))
    found = np.linalg.norm((rows.take(a) - rows.take(b)).astype(np.float64), axis=1)
    found = found[found > 0]
    return float(np.median(found)) if found.size else 1.0


def _spread(values: list[float]) -> Spread:
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1)))
