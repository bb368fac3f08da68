"""What a random sketch does to diversity, and what to do about it.

Let g_i be gradients, S = Σ g_i, A = Σ‖g_i‖², D = ‖S‖², and hats the same from sketches s_i = P g_i. As E PᵀP = I, both
E Â = A and E D̂ = D: neither is biased. Their ratio is, and both vary, for one P serves all.

**Dense signs** (K rows). ‖Pv‖² has variance (2/K)(‖v‖⁴ − Σ v_a⁴) ≤ (2/K)‖v‖⁴. With M = Σ g_i g_iᵀ it is Â = tr PMPᵀ, so

    Var(log Â − log D̂) ≈ (2/K) ‖M/A − SSᵀ/D‖_F²,

about 2/K where many directions share M: at K = 256 a standard deviation of 8.8%.

**Kronecker** (matrices.py): s = RᵀGC with R (m × p) and C (n × q). RRᵀ − I and CCᵀ − I have mean zero and, off their
diagonals, entries of variance λ and μ, the *losses* of the two sides: 1/p for independent signs; (w − p)/((w − 1)p)
for p random columns of a Hadamard matrix of width w ≥ m; 0 where p ≥ m, the identity with signs. For two gradients G, H
of one weight, with the diagonals counted in (Gaussian fourth moments, which bound those of signs),

    Cov(‖RᵀGC‖², ‖RᵀHC‖²) ≈ 2λ⟨GGᵀ, HHᵀ⟩ + 2μ⟨GᵀG, HᵀH⟩ + 2λμ(⟨G, H⟩² + tr GHᵀGHᵀ).

For G = H = uvᵀ, of rank one, that is ((1 + 2λ)(1 + 2μ) − 1)‖G‖⁴: 0.27 for signs at 16 × 16, a standard deviation of
52%; but 22% for a 10 × 64 weight at 10 × 25, whose rows lose nothing. With U_A = Σ G_iG_iᵀ and V_A = Σ G_iᵀG_i, U_S and
V_S the same of the one matrix S, the ratio has

    τ² = Var(log Â − log D̂) ≈ 2λ ‖U_A/A − U_S/D‖_F² + 2μ ‖V_A/A − V_S/D‖_F² + 2λμ ‖M/A − SSᵀ/D‖_F²,

small only where the sum's rows and columns are spread as the examples' are. The sketches' own moments Û, V̂ (p × p and
q × q) estimate the distances, each too large by its noise in the other side, about μ and λ: together 4λμ too much. The
last term is about 2λμ, so the first two alone, from the sketches, are τ² + 2λμ: a margin that is left in, for τ² is
itself an estimate. Dense signs are the case q = 1, C = 1.

**Layouts.** p × q is fitted to each weight, and the sketches of all weights are added up, so a sketch is read in
several ways, which `layouts_of(sketcher)` names. Read as p × q, weights of another layout are taken for noise (not
derived; the measurements below bear it out), so each layout gives the terms of its own weights, as shares of all of A
and D, and the layouts' terms add. Parameters that share places collide: weights with each other, with a variance of
about 2/(pq) times their shares, and a bias with its weight, as one more input column: up to 4/q times their shares. So
an input side counts as losing 1/q even where it keeps all columns, unless one weight without bias is alone. Read in a
wrong layout the moments mean nothing (16 × 16 for a 10 × 25 sketch makes intervals that are too short), so "kronecker"
is for independent signs, not for Heeler's sketches.

**Bias.** A positive number without bias and with relative variance v has a logarithm that is low by about v/2. So
log(D̂/Â) is low by (v_D − v_A)/2, up to 10%: that is added back, to the value and to its interval.

Measured over 100 seeds at K = 256, digits, 500 examples; initialisation, middle (5 epochs), end (40 epochs):

                          standard deviation of the bound    within 10% of the exact one    95% interval covers
    softmax regression         13%, 7%, 6%                        50, 82, 92 of 100               95, 99, 98
    a small LeNet              15%, 17%, 11%                      57, 44, 64 of 100               100, 100, 100

So K = 256 alone does *not* bring the bound within 10% dependably (a dense sketch: 71 to 84 of 100); D̂ and Â alone vary
by 10 to 21%. The interval is 1.1 to 1.2 times as wide as it had to be for softmax regression, 1.6 to 1.8 times for
LeNet, and 1.9 to 2.7 times (5.6 with D known) for networks of small layers that keep all rows and columns, where the
biases' collisions are counted for every column. `heeler.diversity.measure` makes it 1.3 to 2.1%, within 10% for 100, by
two cheap additions: D is the squared norm of what `p.grad` holds, exact at fixed weights; and `calibrate` gives A from
exact norms of examples drawn by `pick_for_calibration`, with an error that falls as 1/√n whatever the tails.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from heeler.diversity.measured import Estimate
from heeler.sketch.matrices import Matrix
from heeler.sketch.projection import BLOCK, Projection, split_dim

if TYPE_CHECKING:
    from heeler.sketch import Sketcher

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """How weights lie in a sketch: its first rows·cols numbers are a matrix, the projections of their two sides."""

    rows: int
    cols: int
    row_loss: float
    """λ of the row side: 1/rows for independent signs, 0 where nothing is lost."""
    col_loss: float


Layouts = tuple[Layout, ...]
Sketch = str | tuple[int, int] | Layouts | None


def layouts_of(sketcher: Sketcher) -> Layouts | None:
    """What to give as `sketch=` for this sketcher's sketches; None if it is exact."""
    if sketcher.exact:
        return None
    alone = len(sketcher.projections) == 1
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for matrix in (part for part in sketcher.projections if isinstance(part, Matrix)):
        spec = matrix.spec
        n_grad, n_input = (spec.rows, spec.cols) if spec.grad_is_rows else (spec.cols, spec.rows)
        kept = alone and matrix.of_ones is None and matrix.k_input >= n_input
        of_input = 0.0 if kept else 1 / matrix.k_input + unread_loss(n_input, matrix.of_input)
        sides = [
            (matrix.k_grad, side_loss(n_grad, matrix.k_grad) + unread_loss(n_grad, matrix.of_grad)),
            (matrix.k_input, of_input),
        ]
        (rows, row_loss), (cols, col_loss) = sides if spec.grad_is_rows else sides[::-1]
        known = found.get((rows, cols), (0.0, 0.0))
        found[rows, cols] = max(known[0], row_loss), max(known[1], col_loss)
    if not found:  # norms' gains alone
        return layouts_for("dense", sketcher.dim)
    return tuple(Layout(*shape, *losses) for shape, losses in found.items())


def side_loss(n: int, k: int) -> float:
    """λ of `projection`, n → k by k random columns of a Hadamard matrix."""
    width = 1 << (n - 1).bit_length()
    return 0.0 if k >= n else (width - k) / ((width - 1) * k)


def unread_loss(n: int, projection: Projection) -> float:
    """Added to λ where only some blocks of n columns are read, as if each block's share of the square varied as much
    as it is. Evenly spread gradients lose nothing."""
    if projection.blocks is None:
        return 0.0
    read = projection.blocks.numel() * BLOCK
    return (1 - read / n) * BLOCK / read


def layouts_for(sketch: Sketch, dim: int) -> Layouts:
    """What `vectors` of `dim` numbers are; () for gradients themselves."""
    if sketch is None:
        return ()
    if sketch == "kronecker":
        return layouts_for(split_dim(dim), dim)
    if sketch == "dense":
        return (Layout(dim, 1, 1 / dim, 0.0),)
    if isinstance(sketch, tuple) and sketch:
        if all(isinstance(one, Layout) and one.rows * one.cols <= dim for one in sketch):
            return cast("Layouts", sketch)
        sides = [one for one in sketch if isinstance(one, int)]
        if len(sides) == len(sketch) == 2 and math.prod(sides) == dim:
            return (Layout(*sides, *(1 / side if side > 1 else 0.0 for side in sides)),)
    raise ValueError(
        f"sketch={sketch!r} does not describe vectors of {dim} numbers: give None for full gradients (an exact "
        f'sketcher\'s too), layouts_of(sketcher) for Heeler\'s sketches, "kronecker" for independent signs, "dense", '
        f"or (rows, columns) with rows·columns = {dim}"
    )


def moments(vectors: Floats, layouts: Layouts) -> Floats:
    """Σ‖s‖², then for every layout Û = Σ s sᵀ and V̂ = Σ sᵀ s of sketches (b, K) read as p × q: one flat array.

    These are sums: those of several batches add up. Without a layout it is empty.
    """
    if not layouts:
        return np.zeros(0)
    parts = [np.array([np.vdot(vectors, vectors)])]
    for one in layouts:
        matrices = vectors[:, : one.rows * one.cols].reshape(-1, one.rows, one.cols)
        flat = matrices.reshape(-1, one.cols)
        wide = matrices.transpose(1, 0, 2).reshape(one.rows, -1)
        parts += [(wide @ wide.T).ravel(), (flat.T @ flat).ravel()]
    return np.concatenate(parts)


def _shares(moment: Floats, layouts: Layouts) -> Iterator[tuple[Layout, Floats, Floats]]:
    """Every layout with its U (p, p) and V (q, q), as shares of Σ‖s‖²."""
    rest = moment[1:] / moment[0]
    for one in layouts:
        of_rows, of_cols, rest = np.split(rest, [one.rows**2, one.rows**2 + one.cols**2])
        yield one, of_rows.reshape(one.rows, one.rows), of_cols.reshape(one.cols, one.cols)


class SketchError(NamedTuple):
    """Of log R̂ = log D̂ − log Â."""

    variance: float = 0.0
    """τ²."""
    shift: float = 0.0
    """What to add to log R̂ because its mean is not log R."""
    freedom: float = math.inf
    """Degrees of freedom with which τ² is known: an estimate from k × k moments is taken to have k."""


def sketch_error(
    moment: Floats, total: Floats, layouts: Layouts, *, sum_known: bool = False, squares_known: bool = False
) -> SketchError:
    """From the `moments` of the examples' sketches and the sum's sketch (K,). See above.

    sum_known, squares_known: D or A does not come from the sketches, so that the other one's error is all there is.
    """
    if not layouts or (sum_known and squares_known) or not moment[0] > 0 or not total.any():
        return SketchError()
    lossy = [k for one in layouts for k, loss in ((one.rows, one.row_loss), (one.cols, one.col_loss)) if loss > 0]
    freedom = min(lossy, default=math.inf)
    of_squares = 0.0 if squares_known else log_variance_of_squares(moment, layouts)
    of_sum = 0.0 if sum_known else log_variance_of_sum(total, layouts)
    both = not (sum_known or squares_known)
    variance = log_variance_of_ratio(moment, total, layouts) if both else of_sum + of_squares
    return SketchError(variance, (of_sum - of_squares) / 2, freedom)


def log_variance_of_ratio(moment: Floats, total: Floats, layouts: Layouts) -> float:
    """τ², with both sums from the sketches."""
    of_sum = _shares(moments(total[None], layouts), layouts)
    return sum(
        2 * one.row_loss * float(np.sum((u - u_sum) ** 2)) + 2 * one.col_loss * float(np.sum((v - v_sum) ** 2))
        for (one, u, v), (_, u_sum, v_sum) in zip(_shares(moment, layouts), of_sum, strict=True)
    )


def log_variance_of_squares(moment: Floats, layouts: Layouts) -> float:
    """The variance of log Â alone."""
    variance = 0.0
    for one, u, v in _shares(moment, layouts):
        share = float(np.trace(u)) ** 2
        for side, loss in ((u, one.row_loss), (v, one.col_loss)):
            variance += 2 * loss * max(float(np.sum(side**2)) - loss * share, 0.0)
        variance += 2 * one.row_loss * one.col_loss * share
    return variance


def log_variance_of_sum(total: Floats, layouts: Layouts) -> float:
    """The variance of log D̂ alone: of one layout, from 2λμ to (1 + 2λ)(1 + 2μ) − 1 with its losses λ and μ."""
    variance = 0.0
    for one, u, _ in _shares(moments(total[None], layouts), layouts):
        both, product = one.row_loss + one.col_loss, one.row_loss * one.col_loss
        share = float(np.trace(u)) ** 2
        concentration = min(max(float(np.sum(u**2)) - both * share, 0.0), 1.0)  # the same for rows and columns
        variance += 2 * product * share + concentration * 2 * (both + product)
    return variance


# Better than the sketch: the squares, from a few exact norms


def pick_for_calibration(sketch_squares: ArrayLike, count: int = 128, seed: int = 0) -> NDArray[np.int64]:
    """(count,) examples whose exact norms to take (one backward with `Sketcher(exact=True)`, or any other way), drawn
    with replacement by `sketch_squares`, (N,) ‖s_i‖² at the weights at which the norms will be taken."""
    squares = np.asarray(sketch_squares, dtype=np.float64)
    if squares.ndim != 1 or not np.isfinite(squares).all() or (squares < 0).any() or not squares.sum() > 0:
        raise ValueError("sketch_squares must be (N,) finite squared norms that are not all zero")
    return np.random.default_rng(seed).choice(len(squares), count, p=squares / squares.sum()).astype(np.int64)


def calibrate(sketch_squares: ArrayLike, picked: ArrayLike, exact_squares: ArrayLike) -> Estimate:
    """A = Σ‖g_i‖², from all sketch norms and the exact norms of the picked examples (Hansen & Hurwitz 1943).

    As example i is picked with probability ‖s_i‖²/Â, the mean of Â·‖g_i‖²/‖s_i‖² over the picked is unbiased for A.
    Its spread is that of the *ratio*, so heavy tails of the norms do not enter. sketch_squares: (N,), and picked: (n,),
    as given to and returned by `pick_for_calibration`. exact_squares: (n,) ‖g_i‖² of the picked.
    """
    squares = np.asarray(sketch_squares, dtype=np.float64)
    ratios = np.asarray(exact_squares, dtype=np.float64) / squares[np.asarray(picked)]
    if ratios.ndim != 1 or len(ratios) < 2:
        raise ValueError("calibration needs the exact norms of at least two picked examples")
    mean = float(ratios.mean())
    spread = float(ratios.var(ddof=1)) / len(ratios) / mean**2 if mean > 0 else 0.0
    return Estimate(float(squares.sum()) * mean, spread)


def as_rows(vectors: Any) -> Any:
    """`vectors` as something with rows, without a copy: (N, K)."""
    found = vectors if isinstance(vectors, Tensor) else np.asarray(vectors)
    if found.ndim != 2 or found.shape[0] < 1 or found.shape[1] < 1:
        raise ValueError(f"vectors must be (N, K), one row an example, not {tuple(found.shape)}")
    return found


def to_floats(part: Any, *, single: bool = False) -> Floats:
    """A chunk (b, K) on the host, to be added up: float64; float32 for half precision, which is no finer than that.

    single: leave float32 as it is, for sums over one batch.
    """
    half = part.dtype.itemsize == 2
    if half and isinstance(part, np.ndarray) and part.flags.writeable:
        part = torch.from_numpy(part)  # which converts faster than NumPy
    if isinstance(part, Tensor):
        part = part.detach().cpu()
        part = (part.float() if half else part).numpy()
    return np.asarray(part, dtype=np.float32 if half or (single and part.dtype == np.float32) else np.float64)
