"""Rules that balance vectors as they come, and keep none of them: what they share, and GraB with its recursive kin."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.base_rule import BaseRule
from heeler.herding.validate import Array, IntArray
from heeler.native import online
from heeler.native.build import ONLINE


class OnlineRule(BaseRule):
    """Takes each example's first finite vector of an epoch."""

    _state: ClassVar[tuple[str, ...]] = (*BaseRule._state, "_seen")

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self._seen = np.zeros(self.examples, np.bool_)

    @classmethod
    def c_sources(cls) -> tuple[Path, ...]:
        return (ONLINE,)

    def observe(self, indices: Any, vectors: Any) -> None:
        rows = check.as_rows(indices, self.examples)
        if rows.size == 0:
            return
        floats = check.as_floats(vectors)
        if floats.shape != (rows.size, self.dim):
            raise ValueError(f"vectors must have shape {(rows.size, self.dim)}, got {floats.shape}")
        floats = np.ascontiguousarray(floats, np.float32 if floats.dtype == np.float16 else None)
        if not math.isfinite(np.vdot(floats, floats)):  # one number tells, nearly always, that all of them are finite
            good = np.isfinite(floats).all(axis=1)
            self.screened += int(np.count_nonzero(~good))
            rows, floats = rows[good], floats[good]
        fresh, ordered = ~self._seen[rows], np.sort(rows)
        if not fresh.all() or (ordered[1:] == ordered[:-1]).any():  # seldom, and `unique` is slow
            first = np.sort(np.unique(rows, return_index=True)[1])
            rows, floats = rows[first[fresh[first]]], floats[first[fresh[first]]]
        self._seen[rows] = True
        if rows.size:
            self._take(rows, floats)

    def next_order(self) -> IntArray:
        self._seen[:] = False
        return super().next_order()

    def _take(self, rows: IntArray, floats: Array) -> None:
        """Take note of new, finite vectors (b, K) float32 or float64, contiguous; must keep copies only."""
        raise NotImplementedError

    def _held(self) -> list[IntArray]:
        """Each worker's examples taken so far, in the order that `_close` gives them."""
        raise NotImplementedError

    def _check(self) -> None:
        super()._check()
        for shard, held in zip(self._shards(), self._held(), strict=True):
            if not np.array_equal(np.sort(held), shard.start + np.flatnonzero(self._seen[shard])):
                raise ValueError("the state's examples taken this epoch are not those it has seen: it is damaged")


class Recursive(OnlineRule):
    """Recursive balance, after grab-sampler: a tree of running sums, each half balanced again.

    Every node of a binary tree splits what reaches it by its own running sum, front to the left and back to the right.
    The order is the leaves from left to right, with the right leaf of each lowest node reversed. Depth 0 is GraB.

    Args:
        depth: levels below the root. Memory: 2^(depth+1) running sums per worker.
    """

    _state = (*OnlineRule._state, "_means", "_totals", "_running", "_arrived", "_leaf", "_count")

    def __init__(self, examples: int, dim: int | None = None, *, depth: int = 5, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        if not 0 <= depth <= 16:
            raise ValueError(f"depth must be between 0 and 16, got {depth}")
        self.depth = int(depth)
        self._means, self._totals = np.zeros((2, self.workers, self.dim or 0))
        self._running = np.zeros((self.workers, 2 ** (self.depth + 1) - 1, self.dim or 0))
        self._arrived, self._leaf = np.zeros(self.examples, np.int64), np.zeros(self.examples, np.int32)
        self._count = 0

    def _take(self, rows: IntArray, floats: Array) -> None:
        arrived = slice(self._count, self._count + rows.size)
        self._arrived[arrived] = rows
        sums = (self._means, self._totals, self._running)
        online.observe_tree(floats, self._worker(rows), *sums, self.depth, self._leaf[arrived])
        self._count += rows.size

    def _held(self) -> list[IntArray]:
        arrived, leaf = self._arrived[: self._count], self._leaf[: self._count]
        time = np.arange(arrived.size)
        return self._by_worker(arrived[np.lexsort((np.where(leaf % 2, -time, time), leaf, self._worker(arrived)))])

    def _close(self) -> IntArray:
        lists = self._held()
        for j, own in enumerate(lists):
            if own.size:
                self._means[j] = self._totals[j] / own.size
        self._totals[:] = 0.0
        self._running[:] = 0.0
        self._count = 0
        return self._with_unseen(lists)

    def _check(self) -> None:
        super()._check()
        if self._count > self.examples or self._leaf.min() < 0 or self._leaf.max() >> (self.depth + 1):
            raise ValueError("the state's count or leaf is out of range: it is damaged")


class Grab(Recursive):
    """GraB (arXiv 2205.10733): one balance sweep per epoch, centred on the last epoch's mean (zero in the first).

    With shards every worker has its own running sum and mean: the mean variant of ID-GraB.
    """

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, depth=0, **common)
