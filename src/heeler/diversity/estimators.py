"""Gradient diversity, batch-size bound and noise scale at one weight vector (Yin et al. 2018, arXiv 1706.05699).

With per-example gradients g_1..g_N, A = Σ‖g_i‖² and D = ‖Σ g_i‖²:

    diversity Δ = A/D        batch-size bound B = N·Δ = E‖g‖²/‖E g‖²        noise scale tr(Cov g)/‖E g‖² = B − 1

The noise scale is the "simple" one of McCandlish et al. 2018, arXiv 1812.06162.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from heeler.diversity.alignment import (
    BOUND,
    DIFFERENTIAL,
    DIVERSITY,
    Alignment,
    Of,
    Sums,
    align,
    bound_of,
    invert,
    less_one,
)
from heeler.diversity.measured import Estimate, Measured, as_estimate, student_quantile
from heeler.diversity.sketching import (
    Floats,
    Sketch,
    SketchError,
    as_rows,
    layouts_for,
    sketch_error,
    to_floats,
)

_CHUNK = 1 << 18
"""Numbers that are turned to floats at a time: as many as a processor's cache holds."""
_MOMENT_ROWS = 512
"""Rows, at least, that the sketch's moments are taken from: they only enter the interval."""


def gradient_diversity(
    vectors: Any,
    *,
    sketch: Sketch = None,
    rows: ArrayLike | None = None,
    sum_square: float | Estimate | None = None,
    square_sum: float | Estimate | None = None,
    level: float = 0.95,
) -> Measured:
    """Δ = Σ‖g_i‖²/‖Σ g_i‖² of these N gradients. The arguments are those of `batch_size_bound`."""
    found = _alignment(vectors, sketch, rows, sum_square, square_sum, level, "dataset")
    return invert(found, 1.0, DIVERSITY, level)


def batch_size_bound(
    vectors: Any,
    *,
    sketch: Sketch = None,
    rows: ArrayLike | None = None,
    of: Of = "dataset",
    sum_square: float | Estimate | None = None,
    square_sum: float | Estimate | None = None,
    level: float = 0.95,
) -> Measured:
    """B = N·Δ: a batch of b drawn with replacement does the work of b single steps up to a factor 1 + (b − 1)/B.

    That is E‖Σ_batch g‖² = b·M²·(1 + (b − 1)/B) with M² the mean squared norm, so b ≤ 1 + δ·B costs at most 1 + δ.
    It is never less than 1. One example has B = 1; gradients that cancel, inf; gradients
    that are all zero, nan, with the reason.

    Args:
        vectors: (N, K) float16, float32, float64 (bfloat16 in torch), NumPy or torch, memory-mapped files too. Read in
            chunks, never copied as a whole. Their scale does not matter.
        sketch: None for gradients themselves, which an exact sketcher gives; `layouts_of(sketcher)` for Heeler's
            sketches; "dense" for independent signs; (p, q), or "kronecker" for p ≈ q, for independent signs on either
            side of every weight. It tells how uncertain the result is: see `heeler.diversity.sketching`.
        rows: (N,) bool or (n,) int: use these rows only, such as `table.seen`.
        of: "dataset": the vectors are all there are. "sample": they are a *random* sample of many more (not a batch of
            Heeler's order, whose sums are small on purpose); then ‖E g‖² is estimated without the sample's own noise,
            (D − A)/(N(N − 1)), and the interval includes sampling, by the infinitesimal jackknife.
        sum_square: ‖Σ g_i‖², where it is known better than from the sketches, in the square of the vectors' unit (a
            table's stored rows are `table.scale` times the sketches).
        square_sum: Σ‖g_i‖², likewise.
        level: of the interval.
    """
    found = _alignment(vectors, sketch, rows, sum_square, square_sum, level, of)
    return bound_of(found, BOUND, level)


def noise_scale(
    vectors: Any,
    *,
    sketch: Sketch = None,
    rows: ArrayLike | None = None,
    of: Of = "dataset",
    sum_square: float | Estimate | None = None,
    square_sum: float | Estimate | None = None,
    level: float = 0.95,
) -> Measured:
    """tr(Cov g)/‖E g‖² = B − 1. The arguments are those of `batch_size_bound`."""
    found = _alignment(vectors, sketch, rows, sum_square, square_sum, level, of)
    return less_one(bound_of(found, BOUND, level))


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


def diversity_of(
    vectors: Any,
    *,
    sketch: Sketch = None,
    rows: ArrayLike | None = None,
    sum_square: float | Estimate | None = None,
    square_sum: float | Estimate | None = None,
    level: float = 0.95,
    weights: str = "fixed",
) -> Diversity:
    """Diversity, bound and noise scale from one reading of the vectors. The arguments are those of `batch_size_bound`.

    weights: "moving" where the weights moved while the vectors were taken; a label.
    """
    found = _alignment(vectors, sketch, rows, sum_square, square_sum, level, "dataset")
    bound = bound_of(found, BOUND, level, weights)
    return Diversity(invert(found, 1.0, DIVERSITY, level, weights), bound, less_one(bound))


def differential_diversity(
    before: Any,
    after: Any,
    *,
    sketch: Sketch = None,
    level: float = 0.95,
) -> Measured:
    """Σ‖h_i‖²/‖Σ h_i‖² of h_i = ∇f_i(w') − ∇f_i(w): what stability, hence generalization, depends on.

    before, after: (N, K) each, the same examples in the same rows, and for sketches the same projection.
    """
    first, second = as_rows(before), as_rows(after)
    if first.shape != second.shape:
        raise ValueError(
            f"before is {tuple(first.shape)} and after {tuple(second.shape)}: rows must be the same examples"
        )
    sums = Sums(first.shape[1], layouts_for(sketch, first.shape[1]))
    for one, other in zip(_chunks(first), _chunks(second), strict=True):
        sums.add(other - one)
    return invert(_from_sums(sums, level), 1.0, DIFFERENTIAL, level)


def sentence(bound: float | Measured, batch_size: int, delta: float = 0.2) -> str:
    """What the bound says of a batch size, in words.

    "As well" means: with at most 1 + δ times the work, δ = 0.2 unless given. By Yin et al. that holds up to a batch of
    1 + δ·bound, which is the number named. Over moving weights it is an upper end, and the sentence says so.
    """
    value = float(bound)
    if math.isnan(value):
        reason = bound.reason if isinstance(bound, Measured) else ""
        return f"the batch size that would still train well is not known{': ' + reason if reason else ''}"
    size = "of any size" if math.isinf(value) else f"up to about {math.floor(1 + delta * value)}"
    moved = isinstance(bound, Measured) and bound.weights == "moving"
    note = " (an upper end: the weights moved while this was measured)" if moved else ""
    return f"at this point batches {size} train as well as single examples; you use {batch_size}{note}"


def _alignment(
    vectors: Any,
    sketch: Sketch,
    rows: ArrayLike | None,
    sum_square: float | Estimate | None,
    square_sum: float | Estimate | None,
    level: float,
    of: str,
) -> Alignment:
    table = as_rows(vectors)
    where = _picked(rows, len(table))
    sums = Sums(table.shape[1], layouts_for(sketch, table.shape[1]))
    every = max(1, (len(table) if where is None else len(where)) // _MOMENT_ROWS)
    for part in _chunks(table, where):
        sums.add(part, every)
    if of == "dataset":
        return _from_sums(sums, level, sum_square, square_sum)
    if of != "sample":
        raise ValueError(f'of must be "dataset" or "sample", not {of!r}')
    if sum_square is not None or square_sum is not None:
        raise ValueError('sum_square and square_sum are of the whole dataset: they go with of="dataset"')
    return _from_sample(sums, _chunks(table, where), level)


def _from_sums(
    sums: Sums,
    level: float,
    sum_square: float | Estimate | None = None,
    square_sum: float | Estimate | None = None,
) -> Alignment:
    own_sum, own_squares = Estimate(float(sums.total @ sums.total)), Estimate(sums.squares)
    known_sum = own_sum if sum_square is None else as_estimate(sum_square, "sum_square")
    known_squares = own_squares if square_sum is None else as_estimate(square_sum, "square_sum")
    known = {"sum_known": sum_square is not None, "squares_known": square_sum is not None}
    error = sketch_error(sums.moment, sums.total, sums.layouts, **known)
    variance = error.variance + known_sum.relative_variance + known_squares.relative_variance
    return align(known_sum, known_squares, count=sums.count, error=error._replace(variance=variance), level=level)


def _from_sample(sums: Sums, parts: Iterator[Floats], level: float) -> Alignment:
    """1/B = (D − A)/((N − 1)A), with the infinitesimal jackknife: the derivative by the weight of example i is
    2(⟨S, v_i⟩ − ‖v_i‖²)/((N − 1)A) − ‖v_i‖²/(AB). It errs towards wide where D ≈ A (Efron & Stein 1981)."""
    count, squares = sums.count, sums.squares
    whole = float(sums.total @ sums.total)
    if count < 2:
        return Alignment(math.nan, 0, 0, 1, 1, "one example does not tell how much gradients differ: take more")
    sampling, error = 0.0, SketchError()
    if squares > 0:
        inverse = (whole - squares) / ((count - 1) * squares)
        influences = []
        for part in parts:
            own, pull = np.einsum("nk,nk->n", part, part), part @ sums.total
            influences.append((2 * (pull - own) / (count - 1) - inverse * own) / squares)
        influence = np.concatenate(influences)
        deviation = math.sqrt(float(np.sum((influence - influence.mean()) ** 2)) * count / (count - 1))
        sampling = student_quantile(level, count - 1) * deviation * (count - 1)
        error = sketch_error(sums.moment, sums.total, sums.layouts)
    return align(
        Estimate(whole),
        Estimate(squares),
        count=count,
        error=error,
        level=level,
        offset=1.0,
        slope=1 / (count - 1),
        sampling=sampling,
    )


def _picked(rows: ArrayLike | None, count: int) -> Any:
    if rows is None:
        return None
    where = np.asarray(rows)
    if where.dtype == np.bool_ and where.shape == (count,):
        if where.all():
            return None  # slices are several times as fast as lists of rows
        where = np.flatnonzero(where)
    if where.ndim != 1 or not np.issubdtype(where.dtype, np.integer) or not len(where):
        raise ValueError(f"rows must choose at least one row: ({count},) bool or (n,) int")
    return where


def _chunks(table: Any, where: Any = None) -> Iterator[Floats]:
    """(b, K) at a time, as `to_floats` has them."""
    size = max(1, _CHUNK // table.shape[1])
    for start in range(0, len(table) if where is None else len(where), size):
        part = slice(start, start + size)
        yield to_floats(table[part] if where is None else table[where[part]])
