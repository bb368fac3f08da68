"""Gradient diversity, batch-size bound and noise scale at one weight vector (Yin et al. 2018, arXiv 1706.05699).

With per-example gradients g_1..g_N, A = Σ‖g_i‖² and D = ‖Σ g_i‖²:

    diversity Δ = A/D        batch-size bound B = N·Δ = E‖g‖²/‖E g‖²        noise scale tr(Cov g)/‖E g‖² = B − 1

The noise scale is the "simple" one of McCandlish et al. 2018, arXiv 1812.06162.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from heeler.diversity.alignment import Alignment, Of, Sums, align_dataset, align_sample, jackknife_width, less_one
from heeler.diversity.measured import Diversity, Estimate, Measured, as_estimate, student_quantile
from heeler.diversity.sketching import Floats, Sketch, as_rows, layouts_for, sketch_error, to_floats

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CHUNK = 1 << 18
"""Numbers that are turned to floats at a time: as many as a processor's cache holds."""
_MOMENT_ROWS = 512
"""Rows, at least, that the sketch's moments are taken from: they only enter the interval."""


_BLOCKS = 20
"""Stretches of steps that `bound_from_norms` leaves out, one at a time, for its interval."""

Known = float | Estimate | None


class Options(TypedDict, total=False):
    """What `batch_size_bound` documents; the other functions take the same."""

    sketch: Sketch
    rows: ArrayLike | None
    sum_square: Known
    square_sum: Known
    level: float


def gradient_diversity(vectors: Any, **options: Unpack[Options]) -> Measured:
    """Δ = Σ‖g_i‖²/‖Σ g_i‖² of these N gradients. The options are those of `batch_size_bound`, without `of`."""
    return _alignment(vectors, **options).diversity()


def batch_size_bound(
    vectors: Any,
    *,
    sketch: Sketch = None,
    rows: ArrayLike | None = None,
    of: Of = "dataset",
    sum_square: Known = None,
    square_sum: Known = None,
    level: float = 0.95,
) -> Measured:
    """B = N·Δ: a batch of b drawn with replacement does the work of b single steps up to a factor 1 + (b − 1)/B.

    That is E‖Σ_batch g‖² = b·M²·(1 + (b − 1)/B) with M² the mean squared norm, so b ≤ 1 + δ·B costs at most 1 + δ.
    It is never less than 1. One example has B = 1; gradients that cancel, inf; gradients that are all zero, nan, with
    the reason.

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
    options = Options(sketch=sketch, rows=rows, sum_square=sum_square, square_sum=square_sum, level=level)
    return _alignment(vectors, of, **options).bound()


def noise_scale(vectors: Any, *, of: Of = "dataset", **options: Unpack[Options]) -> Measured:
    """tr(Cov g)/‖E g‖² = B − 1. The options are those of `batch_size_bound`."""
    return less_one(_alignment(vectors, of, **options).bound())


def diversity_of(vectors: Any, *, weights: str = "fixed", **options: Unpack[Options]) -> Diversity:
    """Diversity, bound and noise scale from one reading. The options are those of `batch_size_bound`, without `of`.

    weights: "moving" where the weights moved while the vectors were taken; a label.
    """
    return _alignment(vectors, **options).all(weights)


def differential_diversity(before: Any, after: Any, *, sketch: Sketch = None, level: float = 0.95) -> Measured:
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
    return _of_dataset(sums, level).diversity(meaning="diversity of the gradients' changes between two weight vectors")


def sentence(bound: float | Measured, batch_size: int, delta: float = 0.2) -> str:
    """What the bound says of a batch size, in words: up to 1 + δ·bound it takes at most 1 + δ times the work (Yin et
    al.). Over moving weights that is an upper end, and the sentence says so."""
    found = bound if isinstance(bound, Measured) else Measured(bound, bound, bound, 0.95, "")
    if math.isnan(found.value):
        return "the batch size that would still train well is not known" + (found.reason and f": {found.reason}")
    size = "of any size" if math.isinf(found.value) else f"up to about {math.floor(1 + delta * found.value)}"
    note = " (an upper end: the weights moved while this was measured)" if found.weights == "moving" else ""
    return f"at this point batches {size} train as well as single examples; you use {batch_size}{note}"


def bound_from_norms(
    small: ArrayLike,
    large: ArrayLike,
    *,
    small_batch: float,
    large_batch: float,
    decay: float = 1.0,
    level: float = 0.95,
) -> Measured:
    """The bound from the squared gradient norms of two batch sizes: for runs without sketches.

    With a = small_batch, b = large_batch and the *mean* gradients G_a, G_b of random batches (McCandlish et al.,
    appendix A.1):

        ‖G‖² ≈ (b‖G_b‖² − a‖G_a‖²)/(b − a)        tr Σ ≈ (‖G_a‖² − ‖G_b‖²)/(1/a − 1/b)

    each averaged over the steps *before* the ratio is taken, then B = 1 + tr Σ/‖G‖². Both are unbiased, their ratio
    step by step is not. Several workers have both for nothing: a worker's gradient before the all-reduce, and after it.

    Args:
        small: (T,) ‖G_a‖² at every step; or, where a step has several small batches, their mean.
        large: (T,) ‖G_b‖².
        decay: weight of a step relative to the one after it; 1 for a plain mean.

    Neighbouring steps may be alike: the interval leaves out one of up to 20 stretches of steps at a time.
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
        return Alignment.unknown("the norms are zero, or too noisy to tell: take more steps", level).bound()
    inverse = float(signal.sum() / whole.sum())
    blocks = np.array_split(np.arange(steps), min(steps, _BLOCKS))
    without = [(signal.sum() - signal[b].sum()) / (whole.sum() - whole[b].sum()) for b in blocks if steps > len(b)]
    half = jackknife_width(np.array(without), level)
    return Alignment(inverse, inverse - half, inverse + half, level).bound()


def _alignment(
    vectors: Any,
    of: str = "dataset",
    *,
    sketch: Sketch = None,
    rows: ArrayLike | None = None,
    sum_square: Known = None,
    square_sum: Known = None,
    level: float = 0.95,
) -> Alignment:
    table = as_rows(vectors)
    where = _picked(rows, len(table))
    sums = Sums(table.shape[1], layouts_for(sketch, table.shape[1]))
    every = max(1, (len(table) if where is None else len(where)) // _MOMENT_ROWS)
    for part in _chunks(table, where):
        sums.add(part, every)
    if of == "dataset":
        return _of_dataset(sums, level, sum_square, square_sum)
    if of != "sample":
        raise ValueError(f'of must be "dataset" or "sample", not {of!r}')
    if sum_square is not None or square_sum is not None:
        raise ValueError('sum_square and square_sum are of the whole dataset: they go with of="dataset"')
    whole, numbers = float(sums.total @ sums.total), np.array([sums.count, sums.count, sums.squares, sums.squares])
    error = sketch_error(sums.moment, sums.total, sums.layouts)
    return align_sample(whole, numbers, level, error, lambda: _sampling(sums, _chunks(table, where), level))


def _of_dataset(sums: Sums, level: float, sum_square: Known = None, square_sum: Known = None) -> Alignment:
    """Where the sums are known better than from the vectors, they are taken as given."""
    known = {"sum_known": sum_square is not None, "squares_known": square_sum is not None}
    error = sketch_error(sums.moment, sums.total, sums.layouts, **known)
    whole = as_estimate(float(sums.total @ sums.total) if sum_square is None else sum_square, "sum_square")
    squares = as_estimate(sums.squares if square_sum is None else square_sum, "square_sum")
    return align_dataset(whole, squares, sums.count, level, error)


def _sampling(sums: Sums, parts: Iterator[Floats], level: float) -> float:
    """Half the interval of 1/B = (D − A)/((N − 1)A), by the infinitesimal jackknife: the derivative by the weight of
    example i is 2(⟨S, v_i⟩ − ‖v_i‖²)/((N − 1)A) − ‖v_i‖²/(AB). It errs towards wide where D ≈ A (Efron & Stein 1981).
    """
    count, squares = sums.count, sums.squares
    inverse = (float(sums.total @ sums.total) - squares) / ((count - 1) * squares)
    influences = []
    for part in parts:
        own, pull = np.einsum("nk,nk->n", part, part), part @ sums.total
        influences.append((2 * (pull - own) / (count - 1) - inverse * own) / squares)
    influence = np.concatenate(influences)
    deviation = math.sqrt(float(np.sum((influence - influence.mean()) ** 2)) * count / (count - 1))
    return student_quantile(level, count - 1) * deviation


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
