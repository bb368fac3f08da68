"""What an order did: balance measured with the sketches of the epoch that it was used in.

The herding bound is of the sketches that an order was made from. Those of the epoch itself say what the order did to
the gradients of that epoch. Both measures are over what random orders have on average, so 1 is no better than random.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.steps import Steps
from heeler.herding.validate import Array, IntArray


class Balance(NamedTuple):
    """1 is what random orders have on average."""

    steps: float
    """Σ_t ‖sum_t‖², of the examples' deviations from the mean over each step."""
    prefixes: float
    """Σ_t ‖prefix_t‖², of the same up to each step's end."""


def realized_balance(
    rows: Array,
    squares: NDArray[np.float64],
    order: IntArray,
    *,
    batch_size: int,
    shards: IntArray,
    seen: NDArray[np.bool_],
) -> Balance:
    """The balance of an order (N,), workers' lists side by side, in rows (N, K).

    squares: (N,) the rows' squared lengths. shards: (n + 1,) where each worker's examples begin. An example that is not
    seen counts as the mean.
    """
    steps = Steps(rows, order, shards, batch_size, seen)
    prefixes = steps.bound() ** 2 * steps.count
    expected_steps, expected_prefixes = _expected(steps, squares, batch_size, shards, seen)
    if expected_steps <= 0 or expected_prefixes <= 0:
        return Balance(1.0, 1.0)
    return Balance(steps.total / steps.scale**2 / expected_steps, prefixes / expected_prefixes)


def _expected(
    steps: Steps, squares: NDArray[np.float64], batch_size: int, shards: IntArray, seen: NDArray[np.bool_]
) -> tuple[float, float]:
    """Σ_t E‖sum_t‖² and Σ_t E‖prefix_t‖² over random orders of each worker's examples.

    A sum of t of m vectors drawn without replacement, which add up to zero and have the mean square v, has the expected
    square t (m - t) / (m - 1) · v. Workers' sums are independent.
    """
    of_steps = of_prefixes = 0.0
    ends = np.arange(1, steps.count + 1) * batch_size
    for mean, a, b in zip(steps.means, shards[:-1].tolist(), shards[1:].tolist(), strict=True):
        size, known = b - a, int(seen[a:b].sum())
        if size < 2:
            continue
        square = (squares[a:b][seen[a:b]].sum() - known * (mean @ mean)) / size
        up_to = np.minimum(ends, size)
        own = np.diff(up_to, prepend=0)
        of_steps += float((own * (size - own)).sum() * square / (size - 1))
        of_prefixes += float((up_to * (size - up_to)).sum() * square / (size - 1))
    return of_steps, of_prefixes


def row_squares(rows: Array) -> NDArray[np.float64]:
    """(N,) the squared length of each row of (N, K)."""
    from heeler.herding import kernels_sweeps

    out = np.empty(len(rows))
    kernels_sweeps.squared_norms(check.as_bits(rows), out)
    return out


def evenness(squares: NDArray[np.floating[Any]]) -> float:
    """How even squared lengths are: the log of their geometric mean over their mean, 0 where all are equal, else less.

    Rows of less than 2⁻⁴⁰ of the mean count as that: half precision tells no more of an example that is fitted.
    """
    mean = float(squares.mean()) if squares.size else 0.0
    if mean <= 0:
        return 0.0
    return min(0.0, float(np.log(np.maximum(squares / mean, 2.0**-40)).mean()))  # rounding may leave more
