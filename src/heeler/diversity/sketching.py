"""What a random sketch does to diversity, and what to do about it.

Let g_i be gradients, S = Σ g_i, A = Σ‖g_i‖², D = ‖S‖², and hats the same from sketches s_i = P g_i. As E PᵀP = I, both
E Â = A and E D̂ = D: neither is biased. Their ratio is, and both vary, for one P serves all.

**Dense signs** (K rows). ‖Pv‖² has variance (2/K)(‖v‖⁴ − Σ v_a⁴) ≤ (2/K)‖v‖⁴. With M = Σ g_i g_iᵀ it is Â = tr PMPᵀ, so

    Var(log Â − log D̂) ≈ (2/K) ‖M/A − SSᵀ/D‖_F²,

about 2/K where many directions share M: at K = 256 a standard deviation of 8.8%.

**Kronecker** (projection.py): s = RᵀGC with R (m × p), C (n × q), K = p·q. Taking the expectation over C, then R (with
Gaussian fourth moments, which bound those of signs), for two gradients G, H of one layer

    Cov(‖RᵀGC‖², ‖RᵀHC‖²) = (2/p)⟨GGᵀ, HHᵀ⟩ + (2/q)⟨GᵀG, HᵀH⟩ + (2/K)(⟨G, H⟩² + tr GHᵀGHᵀ).

For G = H = uvᵀ, of rank one, that is ((1 + 2/p)(1 + 2/q) − 1)‖G‖⁴: 0.27 at 16 × 16, a standard deviation of 52%, and
2/K only where G has many like singular values. Layers add: their row and column spaces lie side by side, as blocks.
With U_A = Σ G_iG_iᵀ and V_A = Σ G_iᵀG_i, U_S and V_S the same of the one matrix S, the ratio has

    τ² = Var(log Â − log D̂) ≈ (2/p) ‖U_A/A − U_S/D‖_F² + (2/q) ‖V_A/A − V_S/D‖_F² + (2/K) ‖M/A − SSᵀ/D‖_F²,

small only where the sum's rows and columns are spread as the examples' are. The sketches' own moments Û, V̂ (p × p and
q × q) estimate the distances; each comes out too large by its noise in the other side, about 1/q and 1/p, which makes
the sum of the first two terms 4/K too large. The last term is about 2/K, so the first two alone, from the sketches, are
τ² and 2/K more: a margin that is left in, for τ² is itself an estimate. Dense signs are the case q = 1, C = 1.

**Bias.** A positive number without bias and with relative variance v has a logarithm that is low by about v/2. So
log(D̂/Â) is low by (v_D − v_A)/2, up to 10%: that is added back, to the value and to its interval.

Measured over 100 seeds at K = 256 (digits, softmax regression and a small LeNet; initialisation, middle, end): the
bound's standard deviation is 16 to 28%, so it is within 10% for only 24 to 46 seeds of 100 from a 16 × 16 sketch alone
(a dense one: 67 to 80 of 100). The 95% interval covers it for 93 to 100; it errs towards wide where a weight has few
rows or columns, for signs vary less than Gaussians. Two cheap additions make it 2 to 3.5%, within 10% for 99 or 100:

- D: the sum is what `p.grad` holds. At fixed weights its squared norm is exact; over an epoch `SumSketch` adds it up in
  4,099 numbers, with a relative standard deviation of √(2/4099) = 2.2%.
- A: `pick_for_calibration` draws some examples with probability ∝ ‖s_i‖²; their exact squared norms (one backward with
  `Sketcher(exact=True)`, or any other way) give A by `calibrate`, with an error that falls as 1/√n whatever the tails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from heeler.diversity.measured import Estimate
from heeler.sketch.projection import split_dim

Floats = NDArray[np.float64]
Sketch = str | tuple[int, int] | None


def sketch_shape(sketch: Sketch, dim: int) -> tuple[int, int] | None:
    """(p, q) with p·q = dim: what `vectors` of `dim` numbers are; None for gradients themselves."""
    if sketch is None:
        return None
    if sketch == "kronecker":
        return split_dim(dim)
    if sketch == "dense":
        return dim, 1
    if isinstance(sketch, tuple) and len(sketch) == 2 and sketch[0] * sketch[1] == dim:
        return sketch
    raise ValueError(
        f"sketch={sketch!r} does not describe vectors of {dim} numbers: give None for full gradients (an exact "
        f'sketcher\'s too), "kronecker" for Heeler\'s sketches, "dense", or (rows, columns) with rows·columns = {dim}'
    )


def moments(vectors: Floats, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """Û = Σ s sᵀ (p, p) and V̂ = Σ sᵀ s (q, q) over sketches (b, p·q), each read as a p × q matrix."""
    rows, cols = shape
    flat = vectors.reshape(-1, cols)
    wide = vectors.reshape(-1, rows, cols).transpose(1, 0, 2).reshape(rows, -1)
    return wide @ wide.T, flat.T @ flat


class SketchError(NamedTuple):
    """Of log R̂ = log D̂ − log Â."""

    variance: float = 0.0
    """τ²."""
    shift: float = 0.0
    """What to add to log R̂ because its mean is not log R."""
    freedom: float = math.inf
    """Degrees of freedom with which τ² is known: an estimate from k × k moments is taken to have k."""


def sketch_error(
    row_moment: Floats, col_moment: Floats, total: Floats, *, sum_known: bool = False, squares_known: bool = False
) -> SketchError:
    """From the moments Û (p, p), V̂ (q, q) of the examples' sketches, and the sum's sketch (p·q,). See above.

    sum_known, squares_known: D or A does not come from the sketches, so that the other one's error is all there is.
    """
    if (sum_known and squares_known) or not np.trace(row_moment) > 0 or not total.any():
        return SketchError()
    p, q = len(row_moment), len(col_moment)
    freedom = max(p, q) if min(p, q) == 1 else min(p, q)
    of_squares = log_variance_of_squares(row_moment, col_moment)
    of_sum = log_variance_of_sum(total, (p, q))
    if sum_known:
        return SketchError(of_squares, -of_squares / 2, freedom)
    if squares_known:
        return SketchError(of_sum, of_sum / 2, freedom)
    return SketchError(log_variance_of_ratio(row_moment, col_moment, total), (of_sum - of_squares) / 2, freedom)


def log_variance_of_ratio(row_moment: Floats, col_moment: Floats, total: Floats) -> float:
    """τ², with both sums from the sketches."""
    matrix = total.reshape(len(row_moment), len(col_moment))
    return _distance(row_moment, matrix @ matrix.T) + _distance(col_moment, matrix.T @ matrix)


def log_variance_of_squares(row_moment: Floats, col_moment: Floats) -> float:
    """The variance of log Â alone."""
    p, q = len(row_moment), len(col_moment)
    sides = [2 / len(m) * (float(np.sum((m / np.trace(m)) ** 2)) - 1 / len(m)) for m in (row_moment, col_moment)]
    return max(sum(sides), 0.0) + 2 / (p * q) * float(p > 1 and q > 1)


def log_variance_of_sum(total: Floats, shape: tuple[int, int]) -> float:
    """The variance of log D̂ alone: from 2/K to (1 + 2/p)(1 + 2/q) − 1."""
    p, q = shape
    matrix = total.reshape(p, q)
    if p == 1 or q == 1:
        return 2 / (p * q)
    size = float(np.sum(matrix**2))
    squares = float(np.sum((matrix @ matrix.T) ** 2)) / size**2  # the same for rows and columns
    concentration = min(max(squares - 1 / p - 1 / q, 0.0), 1.0)
    return 2 / (p * q) + concentration * (2 / p + 2 / q + 2 / (p * q))


def _distance(moment: Floats, other: Floats) -> float:
    difference = moment / np.trace(moment) - other / np.trace(other)
    return 2 / len(moment) * float(np.sum(difference**2))


# Better than the sketch: the squares, from a few exact norms


def pick_for_calibration(sketch_squares: ArrayLike, count: int = 128, seed: int = 0) -> NDArray[np.int64]:
    """(count,) examples whose exact norms to take, drawn with replacement with probability ∝ ‖s_i‖².

    sketch_squares: (N,) ‖s_i‖², at the weights at which the exact norms will be taken.
    """
    squares = np.asarray(sketch_squares, dtype=np.float64)
    if squares.ndim != 1 or not np.isfinite(squares).all() or (squares < 0).any() or not squares.sum() > 0:
        raise ValueError("sketch_squares must be (N,) finite squared norms that are not all zero")
    return np.random.default_rng(seed).choice(len(squares), count, p=squares / squares.sum()).astype(np.int64)


def calibrate(sketch_squares: ArrayLike, picked: ArrayLike, exact_squares: ArrayLike) -> Estimate:
    """A = Σ‖g_i‖², from all sketch norms and the exact norms of the picked examples (Hansen & Hurwitz 1943).

    As example i is picked with probability ‖s_i‖²/Â, the mean of Â·‖g_i‖²/‖s_i‖² over the picked is unbiased for A.
    Its spread is that of the *ratio*, so heavy tails of the norms do not enter.

    Args:
        sketch_squares: (N,) ‖s_i‖², as given to `pick_for_calibration`.
        picked: (n,) what that returned.
        exact_squares: (n,) ‖g_i‖² of the picked.
    """
    squares = np.asarray(sketch_squares, dtype=np.float64)
    where = np.asarray(picked)
    ratios = np.asarray(exact_squares, dtype=np.float64) / squares[where]
    if ratios.ndim != 1 or len(ratios) < 2:
        raise ValueError("calibration needs the exact norms of at least two picked examples")
    mean = float(ratios.mean())
    spread = float(ratios.var(ddof=1)) / len(ratios) / mean**2 if mean > 0 else 0.0
    return Estimate(float(squares.sum()) * mean, spread)


# Better than the sketch: the sum, from p.grad


class SumSketch:
    """A sketch of a sum of gradients alone, of many more numbers: `add` after every backward, `square` at the end.

    Coordinate a of all parameters side by side gets a random sign and is added to place a mod dim (a count sketch).
    Its squared norm is unbiased. Over random places its variance is at most (2/dim)‖Σ‖⁴; places by remainder behave so
    as long as energy does not gather on few of them, and with a *prime* dim no row length of a weight can bring a whole
    column to one place.

    Costs one read of the gradients in a call, and one byte a parameter for the signs.
    """

    def __init__(self, dim: int = 4099, seed: int = 0) -> None:
        if dim < 1:
            raise ValueError(f"dim must be positive, not {dim}")
        self.dim, self.seed = dim, seed
        self._signs: list[Tensor] = []
        self._total: Tensor | None = None

    def add(self, gradients: Iterable[Tensor | None], weight: float = 1.0) -> None:
        """Add weight × the gradient: (…) tensors, the same ones in every call; None counts as zero.

        After a loss that is a mean over b examples the weight is b.
        """
        found = list(gradients)
        if not self._signs:
            self._draw(found)
        if len(found) != len(self._signs):
            raise ValueError(f"add was called with {len(self._signs)} tensors first and with {len(found)} now")
        at = 0
        for gradient, signs in zip(found, self._signs, strict=True):
            if gradient is not None:
                self._fold(gradient.detach().flatten(), signs, at, weight)
            at += signs.numel()

    def square(self) -> Estimate:
        """‖Σ weight·gradient‖², with its relative variance: 2/dim, or 0 where every coordinate has its own place."""
        if self._total is None:
            return Estimate(0.0)
        exact = sum(signs.numel() for signs in self._signs) <= self.dim
        return Estimate(float((self._total**2).sum()), 0.0 if exact else 2 / self.dim)

    def reset(self) -> None:
        """Start a new sum, with the same signs."""
        self._total = None

    def _draw(self, gradients: Sequence[Tensor | None]) -> None:
        if any(g is None for g in gradients):
            raise ValueError("the first call of add needs a gradient for every parameter: leave out those without one")
        generator = torch.Generator().manual_seed(self.seed)
        for g in gradients:
            assert g is not None
            bits = torch.randint(0, 2, (g.numel(),), generator=generator, dtype=torch.int8)
            self._signs.append((2 * bits - 1).to(g.device))

    def _fold(self, flat: Tensor, signs: Tensor, at: int, weight: float) -> None:
        signed = flat.float() * signs
        front = at % self.dim
        padded = torch.nn.functional.pad(signed, (front, -(front + signed.numel()) % self.dim))
        folded = padded.view(-1, self.dim).sum(0).double() * weight
        self._total = folded if self._total is None else self._total + folded.to(self._total.device)


def as_rows(vectors: Any) -> Any:
    """`vectors` as something with rows, without a copy: (N, K)."""
    found = vectors if isinstance(vectors, Tensor) else np.asarray(vectors)
    if found.ndim != 2 or found.shape[0] < 1 or found.shape[1] < 1:
        raise ValueError(f"vectors must be (N, K), one row an example, not {tuple(found.shape)}")
    return found


def to_float64(part: Any) -> Floats:
    """A chunk (b, K) as float64 on the host."""
    if isinstance(part, Tensor):
        return np.asarray(part.detach().double().cpu().numpy())
    return np.asarray(part, dtype=np.float64)
