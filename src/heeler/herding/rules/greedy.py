"""Greedy herding, for study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from heeler.herding.rules.base import Common
from heeler.herding.rules.tabled import TabledRule
from heeler.herding.validate import Array, IntArray

if TYPE_CHECKING:
    from typing import Unpack


class Greedy(TabledRule):
    """Greedy herding: always the example that keeps the prefix sum shortest.

    Its prefix norms are the best of all and it trains *worse than random* at large learning rates: unstable, since it
    leaves the largest gradients to the end. Takes O(N²K) time. Each worker herds its own examples.

    Args:
        limit: the largest shard it will take on.
    """

    def __init__(self, examples: int, dim: int | None = None, *, limit: int = 20_000, **common: Unpack[Common]) -> None:
        super().__init__(examples, dim, **common)
        largest = int(np.diff(self.offsets).max())
        if largest > limit:
            raise ValueError(
                f"greedy herding takes O(N²K) time and a shard has {largest} examples, more than limit={limit}: "
                "use the rule 'herd', or raise the limit and wait"
            )

    def _close(self) -> IntArray:
        order, sizes = self._known()
        parts = np.split(order, np.cumsum(sizes)[:-1])
        return self._with_unseen([greedy_order(self.table.rows, own) for own in parts])


def greedy_order(vectors: Array, order: IntArray) -> IntArray:
    """Rows of `order` so that each next one keeps the centred prefix shortest; of equals the earliest in `order`.

    ‖p + c_i‖² = ‖p‖² + 2⟨p, c_i⟩ + ‖c_i‖², so the least of 2⟨p, c_i⟩ + ‖c_i‖² is taken: one matrix-vector product per
    step.
    """
    if order.size == 0:
        return order
    centred = vectors[order].astype(np.float64)
    centred -= centred.mean(axis=0)
    squares = np.einsum("ik,ik->i", centred, centred)
    prefix, following = np.zeros(centred.shape[1]), np.empty_like(order)
    for t in range(order.size):
        best = int(np.argmin(2.0 * (centred @ prefix) + squares))
        following[t] = order[best]
        prefix += centred[best]
        squares[best] = np.inf
    return following
