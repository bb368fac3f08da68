"""Gradient diversity, batch-size bound and noise scale at one weight vector (Yin et al. 2018, arXiv 1706.05699).

With per-example gradients g_1..g_N, A = Σ‖g_i‖² and D = ‖Σ g_i‖²:

    diversity Δ = A/D        batch-size bound B = N·Δ = E‖g‖²/‖E g‖²        noise scale tr(Cov g)/‖E g‖² = B − 1

The noise scale is the "simple" one of McCandlish et al. 2018, arXiv 1812.06162.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from heeler.diversity.measured import Diversity, Measured, bound_from_inverse, from_bound, student_quantile, unknown
from heeler.diversity.sketch_error import Layouts, SketchError, checked_layouts, moments, sketch_error
from heeler.diversity.vectors import Floats, as_rows, to_floats

_CHUNK = 1 << 18
"""Numbers that are turned to floats at a time: as many as a processor's cache holds."""
_MOMENT_ROWS = 512
"""Rows, at least, that the sketch's moments are taken from: they only enter its bias and the interval."""
_ROUNDING = 4 * float(np.finfo(np.float64).eps)


def diversity_of(vectors: Any, *, sketch: Layouts | None = None, rows: ArrayLike | None = None) -> Diversity:
    """Diversity, bound and noise scale of these gradients, from one reading. Options as for `batch_size_bound`."""
    table = as_rows(vectors)
    where = _picked(rows, len(table))
    return _of_chunks(_chunks(table, where), len(table) if where is None else len(where), table.shape[1], sketch)


def batch_size_bound(vectors: Any, *, sketch: Layouts | None = None, rows: ArrayLike | None = None) -> Measured:
    """B = N·Δ: a batch of b drawn with replacement does the work of b single steps up to a factor 1 + (b − 1)/B.

    That is E‖Σ_batch g‖² = b·M²·(1 + (b − 1)/B) with M² the mean squared norm, so b ≤ 1 + δ·B costs at most 1 + δ.
    It is never less than 1. One example has B = 1; gradients that cancel, inf; gradients that are all zero, nan, with
    the reason.

    Args:
        vectors: (N, K) float16, float32, float64 (bfloat16 in torch), NumPy or torch, memory-mapped files too. Read in
            chunks, never copied as a whole. Their scale does not matter.
        sketch: None for gradients themselves, which an exact sketcher gives; `layouts_of(sketcher)` for sketches. It
            says how uncertain the result is.
        rows: (N,) bool or (n,) int: use these rows only, such as `table.seen`.
    """
    return diversity_of(vectors, sketch=sketch, rows=rows).bound


def gradient_diversity(vectors: Any, *, sketch: Layouts | None = None, rows: ArrayLike | None = None) -> Measured:
    """Δ = Σ‖g_i‖²/‖Σ g_i‖² of these N gradients. Options as for `batch_size_bound`."""
    return diversity_of(vectors, sketch=sketch, rows=rows).diversity


def noise_scale(vectors: Any, *, sketch: Layouts | None = None, rows: ArrayLike | None = None) -> Measured:
    """tr(Cov g)/‖E g‖² = B − 1. Options as for `batch_size_bound`."""
    return diversity_of(vectors, sketch=sketch, rows=rows).noise_scale


def differential_diversity(before: Any, after: Any, *, sketch: Layouts | None = None) -> Measured:
    """Σ‖h_i‖²/‖Σ h_i‖² of h_i = ∇f_i(w') − ∇f_i(w): what stability, hence generalization, depends on.

    before, after: (N, K) each, the same examples in the same rows, and for sketches the same projection.
    """
    first, second = as_rows(before), as_rows(after)
    if first.shape != second.shape:
        raise ValueError(
            f"before is {tuple(first.shape)} and after {tuple(second.shape)}: rows must be the same examples"
        )
    changes = (other - one for one, other in zip(_chunks(first), _chunks(second), strict=True))
    found = _of_chunks(changes, len(first), first.shape[1], sketch)
    return replace(found.diversity, meaning="diversity of the gradients' changes between two weight vectors")


def bound_from_sums(whole: float, squares: float, count: int, error: SketchError) -> Measured:
    """B from D = `whole`, A = `squares` and N = `count`: 1/B = R/N with R = D/A. error: of log R."""
    if squares == 0:
        return unknown("all gradients are zero")
    ratio = whole / squares
    if ratio <= (_ROUNDING * count) ** 2:
        return bound_from_inverse(0.0, 0.0, 0.0, cancelled=True)
    if count == 1:
        return bound_from_inverse(1.0, 1.0, 1.0)
    ratio = min(ratio * math.exp(error.shift), count)  # Cauchy and Schwarz: R is at most N
    factor = math.exp(student_quantile(error.freedom) * math.sqrt(error.variance))
    return bound_from_inverse(ratio / count, ratio / factor / count, min(ratio * factor, count) / count)


def _of_chunks(parts: Iterable[Floats], count: int, dim: int, sketch: Layouts | None) -> Diversity:
    """Of (N, K) vectors, (b, K) at a time."""
    layouts, every = checked_layouts(sketch, dim), max(1, count // _MOMENT_ROWS)
    squares, total, moment = 0.0, np.zeros(dim), moments(np.zeros((0, dim)), layouts)
    for part in parts:
        squares += float(np.vdot(part, part))
        total += part.sum(axis=0)
        moment += moments(part[::every].astype(np.float64), layouts)
    if not math.isfinite(squares):
        raise ValueError("vectors hold nan or inf: leave such rows out with rows=np.isfinite(vectors).all(axis=1)")
    error = sketch_error(moment, total, layouts)
    return from_bound(bound_from_sums(float(total @ total), squares, count, error), count)


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
