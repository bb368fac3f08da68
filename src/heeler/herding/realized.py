"""What an order did: balance measured with the sketches of the epoch that it was used in.

The herding bound is of the sketches that an order was made from. Those of the epoch itself say what the order did to
the gradients of that epoch. Both measures are over what random orders have on average, so 1 is no better than random.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.batches import expected_squares, make_steps
from heeler.herding.validate import Array, IntArray
from heeler.herding.vectors import make_vectors
from heeler.native import loops


class Balance(NamedTuple):
    """1 is what random orders have on average."""

    steps: float
    """Σ_t ‖sum_t‖², of the examples' deviations from the mean over each step."""
    prefixes: float
    """Σ_t ‖prefix_t‖², of the same up to each step's end."""


def realized_balance(
    rows: Array, order: IntArray, *, batch_size: int, shards: IntArray, seen: NDArray[np.bool_]
) -> Balance:
    """The balance of an order (N,), workers' lists side by side, in rows (N, K).

    shards: (n + 1,) where each worker's examples begin. An example that is not seen counts as the mean.
    """
    vectors, steps = make_vectors(rows, shards, seen=seen), make_steps(shards, batch_size)
    places = np.ascontiguousarray(vectors.signed(order[steps.places]))
    got = loops.step_squares(vectors.rows, vectors.means, places, steps.workers, steps.offsets)
    expected = expected_squares(vectors.shards, vectors.spread, batch_size)
    if min(expected) <= 0:
        return Balance(1.0, 1.0)
    return Balance(got[0] / expected[0], got[1] / expected[1])


def row_squares(rows: Array) -> NDArray[np.float64]:
    """(N,) the squared length of each row of (N, K)."""
    if rows.dtype == np.float64:
        return np.einsum("nk,nk->n", rows, rows)
    return loops.squared_norms(loops.Rows(np.ascontiguousarray(rows)))


def evenness(squares: NDArray[np.floating[Any]]) -> float:
    """How even squared lengths are: the log of their geometric mean over their mean, 0 where all are equal, else less.

    Rows of less than 2⁻⁴⁰ of the mean count as that: half precision tells no more of an example that is fitted.
    """
    mean = float(squares.mean()) if squares.size else 0.0
    if mean <= 0:
        return 0.0
    return min(0.0, float(np.log(np.maximum(squares / mean, 2.0**-40)).mean()))  # rounding may leave more
