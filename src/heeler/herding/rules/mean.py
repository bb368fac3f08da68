"""Online balance of mean-centred vectors: GraB, and its recursive kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from heeler.herding._validate import Array, IntArray
from heeler.herding.rules.base import BaseRule


class Grab(BaseRule):
    """GraB (arXiv 2205.10733): one balance a epoch, centred on the last epoch's mean (zero in the first).

    With shards every worker has its own running sum and mean: the mean variant of ID-GraB.
    """

    _state: ClassVar[tuple[str, ...]] = (
        *BaseRule._state,
        "_means",
        "_totals",
        "_running",
        "_places",
        "_left",
        "_right",
    )

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(examples, dim, seed=seed, batch_size=batch_size, shard_sizes=shard_sizes)
        shape = (self.workers, self.dim or 0)
        self._means, self._totals, self._running = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._places = np.zeros(self.examples, np.int64)
        self._left, self._right = self.offsets[:-1].copy(), self.offsets[1:] - 1

    def _take(self, rows: IntArray, floats: Array) -> None:
        from heeler.herding import kernels_online

        kernels_online.observe_mean(
            floats,
            rows,
            self._worker(rows),
            self._means,
            self._totals,
            self._running,
            self._places,
            self._left,
            self._right,
        )

    def _close(self) -> IntArray:
        lists = []
        for j, shard in enumerate(self._shards()):
            front, back = self._places[shard.start : self._left[j]], self._places[self._right[j] + 1 : shard.stop]
            lists.append(np.concatenate([front, back]))
        new_means(self._means, self._totals, [placed.size for placed in lists])
        self._running[:] = 0.0
        self._left, self._right = self.offsets[:-1].copy(), self.offsets[1:] - 1
        return self._with_unseen(lists)


class Recursive(BaseRule):
    """Recursive balance, after grab-sampler: a tree of running sums, each half balanced again.

    Every node of a binary tree splits what reaches it by its own running sum, front to the left and back to the right.
    The order is the leaves from left to right, with the right leaf of each lowest node reversed. Depth 0 is GraB.

    Args:
        depth: levels below the root. Memory: 2^(depth+1) running sums a worker.
    """

    _state: ClassVar[tuple[str, ...]] = (
        *BaseRule._state,
        "_means",
        "_totals",
        "_running",
        "_arrived",
        "_leaf",
        "_count",
    )

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
        depth: int = 5,
    ) -> None:
        super().__init__(examples, dim, seed=seed, batch_size=batch_size, shard_sizes=shard_sizes)
        if not 0 <= depth <= 16:
            raise ValueError(f"depth must be between 0 and 16, got {depth}")
        self.depth = int(depth)
        shape = (self.workers, self.dim or 0)
        self._means, self._totals = np.zeros(shape), np.zeros(shape)
        self._running = np.zeros((self.workers, 2 ** (self.depth + 1) - 1, self.dim or 0))
        self._arrived = np.zeros(self.examples, np.int64)
        self._leaf = np.zeros(self.examples, np.int64)
        self._count = 0

    def _take(self, rows: IntArray, floats: Array) -> None:
        from heeler.herding import kernels_online

        arrived = slice(self._count, self._count + rows.size)
        self._arrived[arrived] = rows
        kernels_online.observe_tree(
            floats, self._worker(rows), self._means, self._totals, self._running, self.depth, self._leaf[arrived]
        )
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
