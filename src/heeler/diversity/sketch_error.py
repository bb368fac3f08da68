"""How far a random sketch may move the bound.

Let g_i be gradients, S = Σ g_i, A = Σ‖g_i‖², D = ‖S‖², and hats the same from sketches s_i = P g_i. As E PᵀP = I,
neither Â nor D̂ is biased. But one P serves all examples, so both vary, and so does the ratio R̂ = D̂/Â.

A weight's gradient G becomes RᵀGC with R (m × p) and C (n × q). RRᵀ − I and CCᵀ − I have mean zero and, off their
diagonals, entries of variance λ and μ, the *losses* of the two sides: 1/p for independent signs, (w − p)/((w − 1)p) for
p random columns of a Hadamard matrix of width w ≥ m, 0 where p ≥ m. With U_A = Σ G_iG_iᵀ, V_A = Σ G_iᵀG_i, and U_S, V_S
the same of the one matrix S,

    τ² = Var(log Â − log D̂) ≈ 2λ ‖U_A/A − U_S/D‖² + 2μ ‖V_A/A − V_S/D‖²

estimated from the sketches' own moments Û (p × p) and V̂ (q × q). Their noise makes this too large by about 4λμ, of
which a neglected term accounts for 2λμ; the rest is left in as a margin. Weights of several layouts share one sketch:
each layout gives the terms of its own weights, as shares of all of A and D, and the terms add.

A positive number without bias and with relative variance v has a logarithm that is low by about v/2. So log R̂ is low by
(v_D − v_A)/2, up to 10%: that is added back. docs/diversity.md has the derivation, and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from heeler.diversity.vectors import Floats
from heeler.sketch.matrices import Matrix
from heeler.sketch.projection import BLOCK, Projection

if TYPE_CHECKING:
    from heeler.sketch import Sketcher


@dataclass(frozen=True)
class Layout:
    """How weights lie in a sketch: its first rows·cols numbers are a matrix, the projections of their two sides."""

    rows: int
    cols: int
    row_loss: float
    """λ of the row side: 1/rows for independent signs, 0 where nothing is lost."""
    col_loss: float


Layouts = tuple[Layout, ...]


def layouts_of(sketcher: Sketcher) -> Layouts | None:
    """What to give as `sketch=` for this sketcher's sketches; None if it is exact."""
    if sketcher.exact:
        return None
    alone = len(sketcher.projections) == 1
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for matrix in (part for part in sketcher.projections if isinstance(part, Matrix)):
        spec = matrix.spec
        n_grad, n_input = (spec.rows, spec.cols) if spec.grad_is_rows else (spec.cols, spec.rows)
        # A bias is one more input column, and weights share places: then even an input side that keeps all loses 1/q.
        kept = alone and matrix.of_ones is None and matrix.k_input >= n_input
        of_input = 0.0 if kept else 1 / matrix.k_input + unread_loss(n_input, matrix.of_input)
        sides = [
            (matrix.k_grad, side_loss(n_grad, matrix.k_grad) + unread_loss(n_grad, matrix.of_grad)),
            (matrix.k_input, of_input),
        ]
        (rows, row_loss), (cols, col_loss) = sides if spec.grad_is_rows else sides[::-1]
        known = found.get((rows, cols), (0.0, 0.0))
        found[rows, cols] = max(known[0], row_loss), max(known[1], col_loss)
    if not found:  # norms' gains alone, which have independent signs
        return (Layout(sketcher.dim, 1, 1 / sketcher.dim, 0.0),)
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


def checked_layouts(sketch: Layouts | None, dim: int) -> Layouts:
    """What vectors of `dim` numbers are; () for gradients themselves."""
    layouts = () if sketch is None else sketch
    if any(not isinstance(one, Layout) or one.rows * one.cols > dim for one in layouts):
        raise ValueError(
            f"sketch={sketch!r} does not describe vectors of {dim} numbers: give None for full gradients (an exact "
            "sketcher's too), or layouts_of(sketcher)"
        )
    return layouts


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


def sketch_error(moment: Floats, total: Floats, layouts: Layouts) -> SketchError:
    """From the `moments` of the examples' sketches and the sum's sketch (K,)."""
    if not layouts or not moment[0] > 0 or not total.any():
        return SketchError()
    lossy = [k for one in layouts for k, loss in ((one.rows, one.row_loss), (one.cols, one.col_loss)) if loss > 0]
    shift = (log_variance_of_sum(total, layouts) - log_variance_of_squares(moment, layouts)) / 2
    return SketchError(log_variance_of_ratio(moment, total, layouts), shift, min(lossy, default=math.inf))


def log_variance_of_ratio(moment: Floats, total: Floats, layouts: Layouts) -> float:
    """τ²."""
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
