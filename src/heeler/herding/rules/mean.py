"""Online balance of mean-centred vectors: GraB, and its recursive kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from heeler.herding.rules.base import Common
from heeler.herding.rules.online import OnlineRule, TwoListRule
from heeler.herding.validate import Array, IntArray

if TYPE_CHECKING:
    from typing import Unpack


class Grab(TwoListRule):
    """GraB (arXiv 2205.10733): one balance sweep per epoch, centred on the last epoch's mean (zero in the first).

    With shards every worker has its own running sum and mean: the mean variant of ID-GraB.
    """

    _state = (*TwoListRule._state, "_means", "_totals", "_running")

    def __init__(self, examples: int, dim: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(examples, dim, **common)
        self._means, self._totals, self._running = np.zeros((3, self.workers, self.dim or 0))

    def _take(self, rows: IntArray, floats: Array) -> None:
        from heeler.herding import kernels_online

        sums = (self._means, self._totals, self._running)
        lists = (self._places, self._left, self._right)
        kernels_online.observe_mean(floats, rows, self._worker(rows), *sums, *lists)

    def _close(self) -> IntArray:
        lists = self._take_lists()
        new_means(self._means, self._totals, [placed.size for placed in lists])
        self._running[:] = 0.0
        return self._with_unseen(lists)


class Recursive(OnlineRule):
    """Recursive balance, after grab-sampler: a tree of running sums, each half balanced again.

    Every node of a binary tree splits what reaches it by its own running sum, front to the left and back to the right.
    The order is the leaves from left to right, with the right leaf of each lowest node reversed. Depth 0 is GraB.

    Args:
        depth: levels below the root. Memory: 2^(depth+1) running sums per worker.
    """

    _state = (*OnlineRule._state, "_means", "_totals", "_running", "_arrived", "_leaf", "_count")

    def __init__(self, examples: int, dim: int | None = None, *, depth: int = 5, **common: Unpack[Common]) -> None:
        super().__init__(examples, dim, **common)
        if not 0 <= depth <= 16:
            raise ValueError(f"depth must be between 0 and 16, got {depth}")
        self.depth = int(depth)
        self._means, self._totals = np.zeros((2, self.workers, self.dim or 0))
        self._running = np.zeros((self.workers, 2 ** (self.depth + 1) - 1, self.dim or 0))
        self._arrived, self._leaf = np.zeros((2, self.examples), np.int64)
        self._count = 0

    def _take(self, rows: IntArray, floats: Array) -> None:
        from heeler.herding import kernels_online

        arrived = slice(self._count, self._count + rows.size)
        self._arrived[arrived] = rows
        sums = (self._means, self._totals, self._running)
        kernels_online.observe_tree(floats, self._worker(rows), *sums, self.depth, self._leaf[arrived])
        self._count += rows.size

    def _close(self) -> IntArray:
        arrived, leaf = self._arrived[: self._count], self._leaf[: self._count]
        time = np.arange(self._count)
        order = np.lexsort((np.where(leaf % 2, -time, time), leaf, self._worker(arrived)))
        placed = arrived[order]
        sizes = np.bincount(self._worker(arrived), minlength=self.workers)
        new_means(self._means, self._totals, sizes.tolist())
        self._running[:] = 0.0
        self._count = 0
        return self._with_unseen(np.split(placed, np.cumsum(sizes)[:-1]))


def new_means(means: Array, totals: Array, counts: Sequence[int]) -> None:
    """Last epoch's mean of uncentred vectors, where a worker saw any; clears the totals."""
    for j, count in enumerate(counts):
        if count:
            means[j] = totals[j] / count
    totals[:] = 0.0
