"""An epoch's steps: what their examples add up to, and exchanges between them.

`heeler.herding.batches` says what they are for, docs/how-it-works.md why.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.validate import Array, IntArray

NEAR, FURTHER = 2, 4
"""How far apart steps are that exchange examples: further where that takes no longer, see `reach`."""
FEW = 1 << 15
"""Numbers of a step, examples × K, below which they exchange with steps further away. An exchange looks at all pairs of
examples of two steps, so its time per example is in proportion to that: with FURTHER it stays below what a step of 64
sketches of 1,024 numbers takes with NEAR. On convex tasks that leaves two thirds of f − f* (`benchmarks.thorough`)."""
WINDOW = 64
"""Examples of each of two steps that are looked at together: their inner products, (2 · 64)², fit the caches."""
SUMS_SHARE = 0.1
"""How much the steps' sums count in exchanges beside the prefixes, both measured by what they are at first. With the
steps' sums alone prefixes suffer where they are as short as a step's sum is: on some convex tasks that was worse than
no exchanges at all (docs/how-it-works.md). With 0.3 sums get a few hundredths shorter, and prefixes a tenth longer."""
ROUND_PROGRESS = 0.97
"""A round that leaves more than this share of Σ ‖sum‖ is the last. Of squares one huge vector would be nearly all, and
the rounds would end with the first."""
LEVELS = 4
"""Times that examples are exchanged between steps of different size."""
THREADS = 4
"""That exchange examples, at most; and no more than half of the process's cores, for training has the others."""
_SAMPLE = 1024
"""Of the examples in steps of one size, how many are looked at to make these steps add up to nothing."""
_CHUNK = 4096
"""Steps whose prefixes are held at once."""


class Steps:
    """A partition of the examples into steps; places of a step lie worker by worker, as `start` has them."""

    def __init__(
        self, floats: Array, start: IntArray, shards: IntArray, batch_size: int, seen: NDArray[np.bool_] | None
    ) -> None:
        from heeler.herding import kernels_batches

        self._kernels = kernels_batches
        workers, dim = shards.size - 1, floats.shape[1]
        sizes = np.diff(shards)
        worker = np.repeat(np.arange(workers), sizes)
        step = (np.arange(start.size) - np.repeat(shards[:-1], sizes)) // batch_size
        self._places = np.argsort(step, kind="stable")  # where in the workers' lists side by side each place lies
        self._offsets = np.append(0, np.cumsum(np.bincount(step)))
        self._workers = worker[self._places]  # of each place: examples only change places with their worker's own
        self._row_of = np.arange(start.size) if seen is None else np.where(seen, 0, -1) ^ np.arange(start.size)
        self._rows = np.empty_like(start)
        # Where a worker's full steps end, and where its last one does. Steps between two such ends are of one kind, the
        # same workers with as many examples each: these exchange examples.
        self._ends = np.unique(np.concatenate([[0], sizes // batch_size, -(-sizes // batch_size)]))

        self._table = check.as_bits(floats)
        self.means, self.scale = centre(floats, self._table, shards, seen)
        self._sums = check.aligned(self.count, dim, dtype=np.float32)
        fixed = (self._workers, self._offsets, self.means, self.scale)
        self._arguments = (self._table, self._rows, *fixed, self._sums)
        self.rearrange(start)

    def rearrange(self, order: IntArray) -> None:
        """Fill the steps from an order (N,) of the workers' examples, side by side."""
        self._rows[:] = self._row_of[order[self._places]]
        self._kernels.step_sums(*self._arguments)

    @property
    def count(self) -> int:
        """T, how many steps there are."""
        return self._offsets.size - 1

    @property
    def largest(self) -> int:
        """Examples in the largest step, all workers' together."""
        return int(np.diff(self._offsets).max())

    @property
    def total(self) -> float:
        """Σ_t ‖sum_t‖², in units of the scale."""
        return float(np.einsum("tk,tk->", self._sums, self._sums, dtype=np.float64))

    def level(self, rng: np.random.Generator) -> None:
        """Exchange a few examples between steps of different kinds, until each kind's total is about zero.

        Else the prefixes would have to go, in a straight line, to whatever total chance has given to a kind.
        """
        kinds = list(pairwise(self._ends.tolist()))
        if len(kinds) < 2:
            return
        for _ in range(LEVELS):
            totals = np.add.reduceat(self._sums, self._ends[:-1], axis=0, dtype=np.float64).astype(np.float32)
            some = [
                self._offsets[a] + rng.choice(self._offsets[b] - self._offsets[a], size, replace=False)
                for a, b in kinds
                for size in [min(_SAMPLE, self._offsets[b] - self._offsets[a])]
            ]
            offsets, places = np.append(0, np.cumsum([own.size for own in some])), np.concatenate(some)
            rows, workers = self._rows[places], self._workers[places]
            fixed = (self._table, rows, workers, offsets, self.means, self.scale)
            self._kernels.exchange(*fixed, totals, _pairs(0, len(kinds), rng))
            moved = places[rows != self._rows[places]]
            self._rows[places] = rows
            self._sum_again(np.unique(np.searchsorted(self._offsets, moved, side="right") - 1))

    def _sum_again(self, steps: IntArray) -> None:
        """The sums of these steps, whose examples have changed: a few examples must not cost a look at all of them."""
        sizes, sums = np.diff(self._offsets)[steps], check.aligned(steps.size, self._sums.shape[1], dtype=np.float32)
        offsets = np.append(0, np.cumsum(sizes))
        places = np.repeat(self._offsets[steps] - offsets[:-1], sizes) + np.arange(offsets[-1])
        fixed = (offsets, self.means, self.scale)
        self._kernels.step_sums(self._table, self._rows[places], self._workers[places], *fixed, sums)
        self._sums[steps] = sums

    def balance(self, rounds: int, rng: np.random.Generator) -> int:
        """Exchange examples between near steps of a kind as long as that helps; returns the rounds done.

        What falls is Σ_t ‖prefix_t‖² + λ Σ_t ‖sum_t‖², with λ = SUMS_SHARE · Σ ‖prefix‖² / Σ ‖sum‖² of the first order.
        """
        if np.diff(self._ends).max() < 2 or self.largest < 2 or self.total == 0:
            return 0
        weight = SUMS_SHARE * self._squared_prefixes() / self.total
        left, done = self._norms(), 0
        near = reach(self.largest, self._sums.shape[1])
        while done < rounds:
            for distance in range(1, near + 1):
                odd = int(rng.integers(2))
                pairs = np.concatenate([_near(a, b, distance, odd) for a, b in pairwise(self._ends.tolist())])
                for apart in range(distance):  # of overlapping pairs, one would not know the other's prefixes
                    self._exchange(pairs[pairs[:, 0] % distance == apart], distance, weight)
            done += 1
            left, before = self._norms(), left
            if left >= ROUND_PROGRESS * before:
                break
        self._kernels.step_sums(*self._arguments)  # without the rounding of many changes
        return done

    def _exchange(self, pairs: IntArray, distance: int, weight: float) -> None:
        """Exchange examples between steps u and v = u + distance, no two pairs overlapping.

        An exchange of x for y moves all prefixes from u to v − 1 by −(x − y). With D = sum_u − sum_v and Q, the sum of
        these prefixes, Σ ‖prefix‖² + λ Σ ‖sum‖² changes by (2λ + distance) (‖x − y‖² − ⟨D′, x − y⟩), where
        D′ = 2 (λD + Q) / (2λ + distance), and D′ then by −2 (x − y), as D does: what the kernel does with D, given D′.
        """
        first, second = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        prefixes, weight = self._prefixes(0, self.count, np.zeros(self._sums.shape[1])), exact_weight(weight, distance)
        half = (self._sums[first] - self._sums[second]) * (weight / (2 * weight + distance))
        for t in range(distance):
            half += prefixes[first + t] / (2 * weight + distance)
        ends = check.aligned(self.count, half.shape[1], dtype=np.float32)
        ends[first], ends[second] = half, -half
        _at_once(lambda part: self._kernels.exchange(*self._arguments[:-1], ends, part), np.ascontiguousarray(pairs))
        change = ends[first] - half
        self._sums[first] += change
        self._sums[second] -= change

    def _prefixes(self, a: int, b: int, before: NDArray[np.float64]) -> NDArray[np.float64]:
        """(b - a, K) the sums of all steps up to each from a to below b; `before` is that of the steps before a."""
        out = np.empty((b - a, self._sums.shape[1]))
        self._kernels.prefixes(self._sums[a:b], before, out)
        return out

    def _squared_prefixes(self) -> float:
        """Σ_t ‖prefix_t‖², in units of the scale."""
        return float((self.bound() * self.scale) ** 2 * self.count)

    def _norms(self) -> float:
        """Σ_t ‖sum_t‖."""
        return float(np.sqrt(np.einsum("tk,tk->t", self._sums, self._sums)).sum(dtype=np.float64))

    def bound(self) -> float:
        """Root mean square of the prefixes' norms."""
        prefix, squares = np.zeros(self._sums.shape[1]), 0.0
        for first in range(0, self.count, _CHUNK):
            prefixes = self._prefixes(first, min(first + _CHUNK, self.count), prefix)
            squares += float(np.einsum("tk,tk->", prefixes, prefixes))
            prefix = prefixes[-1]
        return math.sqrt(squares / self.count) / self.scale

    def order(self) -> IntArray:
        """(N,) the examples, workers' lists side by side."""
        out = np.empty_like(self._rows)
        out[self._places] = np.where(self._rows >= 0, self._rows, -1 - self._rows)
        return out


def reach(step: int, dim: int) -> int:
    """How far apart steps of so many examples are that exchange them."""
    return FURTHER if step * dim < FEW else NEAR


def exact_weight(weight: float, distance: int) -> float:
    """A weight near the given one with 2 · weight + distance a power of two: to divide by that rounds nothing."""
    return (2.0 ** max(1, round(math.log2(2 * weight + distance))) - distance) / 2


def _at_once(exchange: Callable[[IntArray], Any], pairs: IntArray) -> None:
    """Exchange between all pairs, on several threads: no two pairs share a step, so the result is the same."""
    threads = min(THREADS, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 1)
    if threads < 2 or len(pairs) < threads:
        exchange(pairs)
        return
    with ThreadPoolExecutor(threads, "heeler-solve") as pool:
        for done in [pool.submit(exchange, part) for part in np.array_split(pairs, threads)]:
            done.result()


def _near(a: int, b: int, distance: int, odd: int) -> IntArray:
    """(P, 2) numbers from a to below b that are so far apart, none in two pairs; `odd` 0 or 1 tells which."""
    first = np.arange(a, b - distance)
    first = first[((first - a) // distance) % 2 == odd]
    return np.stack([first, first + distance], axis=1)


def _pairs(a: int, b: int, rng: np.random.Generator) -> IntArray:
    """(P, 2) the numbers from a to below b, an odd one left out, in random pairs."""
    return (a + rng.permutation(b - a)[: (b - a) // 2 * 2]).reshape(-1, 2)


def centre(
    floats: Array, table: Array, shards: IntArray, seen: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float64], float]:
    """Each worker's mean (n, K) over its examples that are seen, and a power of two that makes vectors about 1 long.

    Products of the scaled vectors neither overflow nor vanish in float32; being a power of two, it rounds nothing.
    """
    from heeler.herding import kernels_sweeps

    known = np.arange(len(floats)) if seen is None else np.flatnonzero(seen)
    offsets = np.searchsorted(known, shards)
    means = check.aligned(shards.size - 1, floats.shape[1])
    squares = kernels_sweeps.shard_means(table, check.frozen(known), offsets, means)
    if not math.isfinite(squares):
        check.refuse_nonfinite(floats, known, "leave them out of `seen`")
    if squares == 0:
        return means, 1.0
    spread = squares - float(np.diff(offsets) @ np.einsum("jk,jk->j", means, means))
    # Beside a huge mean the spread is lost in rounding; then it lies below a small share of the squares.
    return means, 2.0 ** -round(math.log2(max(spread, 1e-14 * squares) / known.size) / 2)
