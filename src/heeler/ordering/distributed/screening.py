"""Sketches that cannot be right: not finite, or beyond all measure larger than the other ranks'."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOO_LARGE = 1e4
"""How many times larger than the other ranks' largest. Within a rank gradients may differ by any factor: late in
training most are next to nothing and a few are not."""


def suspicious(batches: list[NDArray[np.float32]]) -> list[NDArray[np.bool_]]:
    """Which rows of each rank's (b_j, K) sketches to leave out, (b_j,) bool each.

    The measure is the lower median over the ranks of their largest finite norm: as long as fewer than half of them
    send nonsense (of two ranks: none or the larger one), it is an honest rank's.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = [np.sqrt(np.einsum("bk,bk->b", rows, rows)) for rows in batches]
    largest = sorted(
        float(n[np.isfinite(n)].max()) for n in norms if np.isfinite(n).any() and n[np.isfinite(n)].max() > 0
    )
    limit = TOO_LARGE * largest[(len(largest) - 1) // 2] if largest else np.inf
    return [~(n <= limit) for n in norms]
