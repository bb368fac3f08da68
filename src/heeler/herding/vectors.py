"""The vectors of a solve, as the loops read them: checked, with each worker's mean, and with few numbers each.

Exchanges look at pairs of examples, so their time is in proportion to the numbers of a vector. Most of what sketches
differ by lies in few directions: exchanges look at the `AXES` principal axes of a sample. Sweeps, which are cheap, look
at all numbers and balance the rest. Where the axes hold too little, exchanges look at all numbers too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.strata import strata_units
from heeler.herding.validate import Array, IntArray
from heeler.native import loops
from heeler.native.loops import Rows

AXES = 128
"""Numbers of a vector that exchanges look at. `benchmarks.realized` has what other numbers are worth."""
SAMPLE = 2 * AXES
"""Vectors that the axes are taken from, and as many others that show how much the axes hold."""
FEW = 4096
"""Vectors below which it takes as long to find the axes as to look at all numbers."""
HELD = 0.5
"""The share of the squared lengths that the axes must hold."""


@dataclass(frozen=True)
class Vectors:
    """(N, K) vectors of workers side by side, each to be read less its worker's mean."""

    rows: Rows
    shards: IntArray
    """(n + 1,) where each worker's examples begin."""
    seen: NDArray[np.bool_] | None
    """(N,) which examples have a vector; None: all."""
    means: NDArray[np.float64]
    """(n, K) of those that have one."""
    spread: NDArray[np.float64]
    """(n,) mean squared deviation of each worker's examples from its mean, zero of those without a vector."""
    unit: float = 1.0
    """What lengths are to be multiplied with, to be those of the vectors that were given."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def workers(self) -> int:
        return self.shards.size - 1

    def signed(self, order: IntArray) -> IntArray:
        """Row numbers, negative (−1 − row) for examples without a vector."""
        return order if self.seen is None else np.where(self.seen[order], order, -1 - order)

    @cached_property
    def short(self) -> tuple[Rows, NDArray[np.float64]]:
        """The same vectors with few numbers, and the workers' means of those.

        Which vectors the axes are taken from depends on nothing but their number, so that a run that goes on from a
        state finds the same axes.
        """
        full = self.rows, self.means
        known = np.arange(len(self)) if self.seen is None else np.flatnonzero(self.seen)
        if self.rows.dim <= 2 * AXES or known.size < FEW or not self.spread.any():
            return full
        drawn = np.sort(np.random.default_rng(known.size).choice(known, 2 * SAMPLE, replace=False))
        worker = np.searchsorted(self.shards, drawn, side="right") - 1
        one = np.arange(drawn.size + 1)
        sample = loops.group_sums(self.rows, drawn, worker, one, self.means)
        axes = loops.principal_axes(np.ascontiguousarray(sample[::2]), AXES)
        others = sample[1::2]
        if np.square(others @ axes.T).sum() < HELD * np.square(others).sum():
            return full
        length = math.sqrt(float(self.spread.mean()))
        basis = np.ascontiguousarray(axes.T * np.float32(2.0 ** -round(math.log2(length))))
        projected = loops.project_rows(self.rows, self.shards, self.means, self.seen, basis)
        return Rows(projected), np.zeros((self.workers, AXES))


def make_vectors(
    vectors: Any,
    shards: IntArray,
    *,
    seen: NDArray[np.bool_] | None = None,
    weights: NDArray[np.float32] | None = None,
    strata: IntArray | None = None,
) -> Vectors:
    """Check vectors (N, K), and find each worker's mean. Copies those that are strided or need double precision.

    weights: (N,) factors of the vectors. strata: (N,) codes, which become columns (`strata_units`).
    """
    floats = check.as_floats(vectors)
    known = np.arange(len(floats)) if seen is None else np.flatnonzero(seen)
    single, unit = as_single(floats, known, "leave them out of `seen`")
    rows, offsets = Rows(single, weights), np.searchsorted(known, shards)
    means, squares = loops.shard_means(rows, known, offsets)
    if strata is not None:
        deviation = float(_deviation(means, squares, offsets).sum()) / max(1, known.size)
        rows = Rows(single, weights, strata, strata_units(strata, math.sqrt(deviation) if deviation > 0 else 1.0))
        means, squares = loops.shard_means(rows, known, offsets)
    spread = _deviation(means, squares, offsets) / np.maximum(np.diff(shards), 1)
    return Vectors(rows, shards, seen, means, spread, unit)


def _deviation(means: Array, squares: Array, offsets: IntArray) -> NDArray[np.float64]:
    """(n,) Σ ‖row − mean‖² of each shard, zero where it is lost in rounding."""
    left = squares - np.diff(offsets) * np.square(means).sum(axis=1)
    return np.where(left > 1e-13 * squares, left, 0.0)


def as_single(floats: Array, used: IntArray, do: str) -> tuple[Array, float]:
    """(N, K) float16 or float32, contiguous, whose sums and squares float32 holds, and the unit of their lengths.

    Half precision always is such, and single precision nearly always. Where squares overflow or vanish, or deviations
    are lost beside the mean, and for double precision, it is a copy in units of a power of two, less the mean if that
    rounds less. A ValueError for rows `used` that are not finite says what to do.
    """
    if used.size == 0:
        return np.zeros(floats.shape, np.float16), 1.0
    if floats.dtype != np.float64:
        rows = np.ascontiguousarray(floats)
        (mean,), (total,) = loops.shard_means(Rows(rows), used, np.array([0, used.size]))
        square = total / used.size
        plain = square == 0 or (1e-20 < square < 1e20 and square - mean @ mean > 1e-6 * square)
        if math.isfinite(square) and (plain or rows.dtype == np.float16):
            return rows, 1.0
    wide = floats[used].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.vdot(wide, wide)) / used.size
    if not math.isfinite(square):
        check.refuse_nonfinite(floats, used, do)
    wide = np.ldexp(wide, -(exponent := round(math.log2(square) / 2) if square > 0 else 0))
    deviations = wide - wide.mean(axis=0)
    spread = float(np.vdot(deviations, deviations)) / used.size
    out = np.zeros(floats.shape, np.float32)
    out[used] = wide
    if spread > 0 and not (np.array_equal(out[used], wide) and spread > 1e-6):
        more = round(math.log2(spread) / 2)
        out[used], exponent = np.ldexp(deviations, -more), exponent + more
    return out, 2.0**exponent
