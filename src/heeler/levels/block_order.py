"""The order of an epoch in two levels, expanded stretch by stretch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding.batches import solve_batches
from heeler.herding.lazy import LazyOrder
from heeler.herding.validate import IntArray
from heeler.levels.halves import Blocks, Walk, halve
from heeler.levels.versions import Placement

KEPT = 4
"""Stretches that are kept: the one that is drawn, the one that is being trained on, one ahead and one behind."""


class BlockOrder(LazyOrder):
    """An epoch in stretches of two half blocks each: see `halves`.

    A pure function of its arguments: any part can be read at any time, again and again, in any process.

    Args:
        shape: how places are cut into blocks.
        placement: which example lies at a place; None where place i holds example i.
        walk: in which order blocks are opened.
        vectors_of: (n, K) float32 deviations from the mean of the examples of a block, zeros where none is known. What
            it returns for a block must not change.
        seed: numbers that differ from epoch to epoch.
        batch_size: examples per step.
    """

    def __init__(
        self,
        shape: Blocks,
        placement: Placement | None,
        walk: Walk,
        vectors_of: Callable[[int], NDArray[np.float32]],
        seed: list[int],
        batch_size: int,
    ) -> None:
        self.shape, self.walk, self.batch_size = shape, walk, batch_size
        self._placement, self._vectors_of, self._seed = placement, vectors_of, seed
        early = np.array([shape.early(block, batch_size) for block in walk.blocks.tolist()])
        late = np.array([shape.length(block) for block in walk.blocks.tolist()]) - early
        sizes = np.append(early, 0) + np.append(0, late)
        self.bounds: IntArray = np.append(0, np.cumsum(sizes))
        """(B + 2,) where each stretch begins, N last."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._expanded: OrderedDict[int, Future[IntArray]] = OrderedDict()
        self._halved: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self.shape.examples

    def part(self, start: int, stop: int) -> IntArray:
        parts = []
        while start < stop:
            stretch = int(np.searchsorted(self.bounds, start, side="right")) - 1
            first, last = self.bounds[stretch : stretch + 2].tolist()
            parts.append(self._stretch(stretch)[start - first : min(stop, last) - first])
            start = min(stop, last)
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def close(self) -> None:
        """End the thread; reading on starts another."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._expanded.clear()
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _stretch(self, number: int) -> IntArray:
        """Its examples; the next one is begun in a thread."""
        with self._lock:
            wanted = self._begun(number)
            if number + 2 < self.bounds.size:
                self._begun(number + 1)
            while len(self._expanded) > KEPT:
                self._expanded.popitem(last=False)
        return wanted.result()

    def _begun(self, number: int) -> Future[IntArray]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "heeler-expand")
        if number not in self._expanded:
            self._expanded[number] = self._pool.submit(self._expand, number)
        self._expanded.move_to_end(number)
        return self._expanded[number]

    # In the thread, one stretch at a time

    def _expand(self, number: int) -> IntArray:
        """(n,) the examples of a stretch in their order."""
        blocks = self.walk.blocks.tolist()
        halves = [] if number == 0 else [self._half(blocks[number - 1], 1)]
        if number < len(blocks):
            halves.append(self._half(blocks[number], 0))
        places = np.concatenate([places for places, _ in halves])
        vectors = np.concatenate([vectors for _, vectors in halves])
        rng = np.random.default_rng([*self._seed, len(blocks) + number])
        if vectors.any():
            order = solve_batches(halved(vectors), batch_size=self.batch_size, seed=rng).order
        else:
            order = rng.permutation(places.size)
        return places[order] if self._placement is None else self._placement.examples(places[order])

    def _half(self, block: int, which: int) -> tuple[IntArray, NDArray[np.float32]]:
        """(n,) places and (n, K) vectors of a block's early or late half; of one block both are kept."""
        if self._halved[0] != block:
            vectors = self._vectors_of(block)
            rng = np.random.default_rng([*self._seed, block])
            early = self.shape.early(block, self.batch_size)
            both = halve(vectors, early, self.walk.targets[block], rng, self.walk.root)
            self._halved = block, [(block * self.shape.size + rows, vectors[rows]) for rows in both]
        found: tuple[IntArray, NDArray[np.float32]] = self._halved[1][which]
        return found


def halved(vectors: NDArray[np.float32]) -> NDArray[np.float16]:
    """In half precision, as a table keeps them, which a solve reads faster; scaled by a power of two into its range."""
    exponent = 8 - np.frexp(np.abs(vectors).max())[1]
    return np.ldexp(vectors, exponent).astype(np.float16)
