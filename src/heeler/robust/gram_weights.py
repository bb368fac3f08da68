"""Vector rules as weights: the result is Σ w_i x_i, and the weights need only the inner products ⟨x_i, x_j⟩.

So whole gradients need not be in one place. The n × n Gram matrix, of sketches or summed over slices, is enough; the
weighted sum is then one ordinary all-reduce. Everything here is n × n in double precision.

A worker whose place in the Gram matrix's diagonal is NaN or infinite has a vector that is not finite: it gets weight 0
and counts as one of the f.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

SETTLED = 1e-9
"""A step that changes no weight by more ends the search for the geometric median."""


class TooManyLost(ValueError):
    """More vectors are not finite than the rule tolerates."""

    def __init__(self, lost: int, n: int, most: int) -> None:
        super().__init__(f"{lost} of {n} vectors have a NaN or an infinity; at most {most} may here")
        self.lost = lost


def check_f(rule: str, n: int, f: int) -> None:
    """ValueError if the rule does not tolerate f bad workers of n; it names the condition."""
    if isinstance(f, bool) or not isinstance(f, (int, np.integer)) or f < 0:
        raise ValueError(f"f is a number of workers, 0 or more, not {f!r}")
    more, condition = (2, "n > 2f + 2") if rule in ("krum", "multi-krum") else (0, "n > 2f")
    if n <= 2 * f + more:
        most = (n - more - 1) // 2
        tolerated = "none at all" if most < 0 else f"at most f = {most}"
        raise ValueError(f"{rule} needs {condition}, but n = {n} and f = {f}: so many workers tolerate {tolerated}")


def check_m(m: int, most: int) -> None:
    """ValueError unless Multi-Krum can average m vectors: more than n − f would include a bad one."""
    if not 1 <= m <= most:
        raise ValueError(f"m is 1 to n − f = {most}, not {m!r}")


def weights(rule: str, gram: NDArray[Any], f: int, **parameters: Any) -> Matrix:
    """(n,) the weights of a vector rule.

    Args:
        rule: "krum", "multi-krum", "geometric-median" or "centered-clipping".
        gram: (n, n) inner products of the workers' vectors. For centred clipping: of the vectors minus the centre, and
            the result is the centre plus the weighted sum.
        f: how many of the n may be bad.
        parameters: `m` of multi-krum, `nu` and `iterations` of the geometric median, `tau` and `iterations` of centred
            clipping.
    """
    n = len(gram)
    check_f(rule, n, f)
    finite = np.isfinite(np.diag(gram))
    lost = n - int(finite.sum())
    if lost > f:
        raise TooManyLost(lost, n, f)
    result = np.zeros(n)
    result[finite] = VECTOR_RULES[rule](np.asarray(gram, np.float64)[np.ix_(finite, finite)], f - lost, **parameters)
    return result


def gram_of(rows: NDArray[Any]) -> Matrix:
    """(n, n) of (n, K) sketches, summed in one fixed order.

    A library's order of sums differs between machines, and ranks whose sums differ in the last bit could choose
    differently where two workers are tied.
    """
    wide = np.asarray(rows, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.stack([np.cumsum(wide * row, axis=1)[:, -1] for row in wide])


def distances_of(gram: Matrix) -> Matrix:
    """(n, n) ‖x_i − x_j‖² = G_ii + G_jj − 2 G_ij, not below 0."""
    squares = np.diag(gram)
    return np.maximum(squares[:, None] + squares - 2 * gram, 0.0)


def krum_scores(distances: NDArray[Any], f: int) -> Matrix:
    """(n,) the sum of squared distances to the n − f − 2 nearest *others* (Blanchard et al. 2017, section 4)."""
    others = np.asarray(distances, np.float64).copy()
    np.fill_diagonal(others, np.inf)
    nearest = np.sort(others, axis=1)[:, : len(others) - f - 2]
    return np.cumsum(nearest, axis=1)[:, -1]  # in a fixed order, as in `gram_of`


def krum_weights(gram: Matrix, f: int) -> Matrix:
    return multi_krum_weights(gram, f, m=1)


def multi_krum_weights(gram: Matrix, f: int, m: int | None = None) -> Matrix:
    best = best_of(krum_scores(distances_of(gram), f), f, m)
    result = np.zeros(len(gram))
    result[best] = 1.0 / len(best)
    return result


def best_of(scores: Matrix, f: int, m: int | None) -> NDArray[np.int64]:
    """The places of the m least scores, n − f where m is None; of equal scores the first."""
    most = len(scores) - f
    if m is not None:
        check_m(m, most)
    return np.argsort(scores, kind="stable")[: most if m is None else m]


def geometric_median_weights(gram: Matrix, f: int, nu: float = 1e-6, iterations: int = 32) -> Matrix:
    """Weiszfeld's steps w_i ∝ 1 / max(ν, ‖z − x_i‖) from the mean, ‖z − x_i‖² = wᵀGw − 2 (Gw)_i + G_ii."""
    result = np.full(len(gram), 1.0 / len(gram))
    for _ in range(iterations):
        product = gram @ result
        squares = np.maximum(result @ product - 2 * product + np.diag(gram), 0.0)
        step = 1.0 / np.maximum(nu, np.sqrt(squares))
        step /= step.sum()
        if np.abs(step - result).max() < SETTLED:
            return step
        result = step
    return result


def centered_clipping_weights(gram: Matrix, f: int, *, tau: float, iterations: int = 1) -> Matrix:
    """v ← v + (1/n) Σ (x_i − v) min(1, τ/‖x_i − v‖) from v = 0: v is Σ w_i x_i at every step."""
    n = len(gram)
    result = np.zeros(n)
    for _ in range(iterations):
        product = gram @ result
        lengths = np.sqrt(np.maximum(result @ product - 2 * product + np.diag(gram), 0.0))
        factors = np.minimum(1.0, tau / np.maximum(lengths, np.finfo(float).tiny)) / n
        result = result * (1.0 - factors.sum()) + factors
    return result


VECTOR_RULES: dict[str, Callable[..., Matrix]] = {
    "krum": krum_weights,
    "multi-krum": multi_krum_weights,
    "geometric-median": geometric_median_weights,
    "centered-clipping": centered_clipping_weights,
}
